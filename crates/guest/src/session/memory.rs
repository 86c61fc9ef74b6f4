//! The memory that the front-end shares: the guest's, its dirty log, and the record of requests in flight.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::rings::event;
use super::{P_INFLIGHT_SHMFD, P_LOG_SHMFD, Reply, Session, SessionError};
use crate::inflight::{Inflight, InflightLayout};
use crate::log::{DirtyLog, LogLayout};
use crate::memory::{GuestMemory, RegionLayout};
use crate::message::{self, MAX_MEM_SLOTS};

impl Session<'_> {
    pub(super) fn set_memory(
        &mut self,
        table: Vec<(RegionLayout, OwnedFd)>,
    ) -> Result<(), SessionError> {
        let mut memory = GuestMemory::watched(self.abort.clone());
        for (layout, file) in table {
            memory = memory.with_region(layout, file)?;
        }
        self.change_memory(memory)
    }

    pub(super) fn add_memory(
        &mut self,
        layout: RegionLayout,
        file: OwnedFd,
    ) -> Result<(), SessionError> {
        if self.memory.len() == MAX_MEM_SLOTS {
            return Err(SessionError::MemorySlots);
        }
        self.change_memory(self.memory.with_region(layout, file)?)
    }

    /// Installs a new memory map. A ring keeps the map with which it started, so running rings are stopped
    /// and started again.
    pub(super) fn change_memory(&mut self, memory: GuestMemory) -> Result<(), SessionError> {
        self.stop_all();
        self.memory = Arc::new(memory);
        // All rings, because a ring that was stopped when its memory was removed may have it again.
        let rings = (0..self.device.queues()).collect();
        self.start_again(rings)
    }

    pub(super) fn set_log(
        &mut self,
        layout: LogLayout,
        file: OwnedFd,
    ) -> Result<Reply, SessionError> {
        self.negotiated(P_LOG_SHMFD)?;
        let log = DirtyLog::map(layout, file, Some(self.abort.clone()))?;
        let stopped = self.stop_all();
        self.log = Some(Arc::new(log));
        self.start_again(stopped)?;
        // From now on, nothing is marked in the previous log. QEMU accepts a reply of any length; Cloud
        // Hypervisor waits for as many bytes as it has sent.
        Ok(Reply::Bytes(message::log_payload(layout)))
    }

    pub(super) fn set_log_event(&mut self, fd: OwnedFd) -> Result<(), SessionError> {
        self.log_event = event(Some(fd))?;
        let stopped = self.stop_all();
        self.start_again(stopped)
    }

    pub(super) fn make_inflight(
        &self,
        queues: u16,
        queue_size: u16,
    ) -> Result<Reply, SessionError> {
        self.negotiated(P_INFLIGHT_SHMFD)?;
        let layout = InflightLayout::for_request(queues, queue_size, self.packed());
        let file = Inflight::make(layout, self.device.queues())?;
        Ok(Reply::File(message::inflight_payload(&layout), file))
    }

    pub(super) fn set_inflight(
        &mut self,
        layout: InflightLayout,
        file: OwnedFd,
    ) -> Result<(), SessionError> {
        self.negotiated(P_INFLIGHT_SHMFD)?;
        let queues = self.device.queues();
        let inflight = Inflight::map_watched(layout, file, queues, Some(self.abort.clone()))?;
        let stopped = self.stop_all();
        self.inflight = Some(inflight);
        for ring in &mut self.rings {
            (ring.drained, ring.outdated, ring.untracked) = (false, false, false);
        }
        self.start_again(stopped)
    }
}
