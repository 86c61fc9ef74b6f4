//! The rings of a session: their setup by the front-end, and when they are served.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{CWD, OFlags};
use tracing::debug;

use super::{Driver, F_LOG_ALL, NewQueue, Pause, Reply, Session, SessionError};
use crate::blk;
use crate::inflight::{Inflight, InflightQueue};
use crate::memory::GuestMemory;
use crate::message::{Deferred, VringAddr};
use crate::ring::{RingBase, RingError, RingLayout};
use crate::virtqueue::{DirtyMarks, Virtqueue};

/// The state of a ring, as the front-end has set it so far.
#[derive(Default)]
pub(super) struct Ring {
    pub size: u16,
    pub addr: Option<VringAddr>,
    /// The position at which the device continues; `None` for the initial position.
    pub base: Option<RingBase>,
    /// The position at which the ring stopped before the device was reset. QEMU 7.2 asks for it only after
    /// the reset.
    pub base_at_reset: Option<RingBase>,
    /// The ring left requests in flight when it stopped.
    pub unfinished: bool,
    /// Those requests are available again at its base, for the process that continues there.
    pub requeued: bool,
    /// The ring has run in this session, and when it stopped, the region recorded no request in flight.
    pub drained: bool,
    /// The region's record of this ring must be discarded at the next start.
    pub outdated: bool,
    /// The ring is served in this session although the region has too few entries for it.
    pub untracked: bool,
    pub kick: Option<Arc<OwnedFd>>,
    pub call: Option<Arc<OwnedFd>>,
    pub error: Option<Arc<OwnedFd>>,
    pub enabled: bool,
    pub running: bool,
}

impl Session<'_> {
    pub(super) fn ring(&mut self, ring: u32) -> Result<&mut Ring, SessionError> {
        let n = self.device.queues();
        self.rings
            .get_mut(ring as usize)
            .ok_or(SessionError::NoRing(ring, n))
    }

    /// Changes the state of a ring. A running ring continues with it at once: QEMU sends addresses again
    /// while the guest runs, when it switches the dirty log.
    pub(super) fn change_ring(
        &mut self,
        ring: u32,
        change: impl FnOnce(&mut Ring),
    ) -> Result<(), SessionError> {
        let was_running = self.ring(ring)?.running;
        self.stop(ring as u16);
        change(&mut self.rings[ring as usize]);
        if was_running {
            self.start_if_ready(ring as u16)?;
        }
        Ok(())
    }

    pub(super) fn set_ring_size(&mut self, ring: u32, size: u32) -> Result<(), SessionError> {
        let size = u16::try_from(size)
            .map_err(|_| SessionError::Refused("ring size is more than 16 bits"))?;
        self.change_ring(ring, |state| state.size = size)
    }

    pub(super) fn set_ring_base(&mut self, ring: u32, base: u32) -> Result<(), SessionError> {
        if !self.packed() && base > u32::from(u16::MAX) {
            return Err(SessionError::Refused("ring base is more than 16 bits"));
        }
        self.change_ring(ring, |state| state.base = Some(RingBase(base)))
    }

    /// Stops a ring, and replies with its position.
    pub(super) fn stop_for_base(&mut self, ring: u32) -> Result<Reply, SessionError> {
        self.ring(ring)?;
        self.stop(ring as u16);
        let first = RingBase::first(self.packed());
        self.rings[ring as usize].kick = None;
        // A migrating guest continues elsewhere as soon as this message is answered. Requests that storage
        // has not finished are in the ring again (`requeue`) and are executed there. Operations that storage
        // has not answered must not run there: they may still be written later, over data that the guest
        // writes on the other machine. The front-end therefore waits, as it does for QEMU's own disks
        // (`bdrv_drain_all`). Closing the connection would not refuse the request: QEMU up to 10.0 continues
        // without an answer, from the used index or, for packed rings, from their start, and the guest runs
        // without its requests (`vhost_virtqueue_stop`).
        if self.migrating() && !self.device.storage_answered() {
            return Ok(Reply::Deferred(Deferred::VringBase { ring }));
        }
        // Before the answer, because the front-end may then let the guest continue elsewhere.
        self.quiesce(Pause::Stopped)?;
        let state = &self.rings[ring as usize];
        let base = state.base.or(state.base_at_reset).unwrap_or(first);
        Ok(if state.drained {
            Reply::Base(ring, base)
        } else {
            // The record of this ring stays valid, even if the ring has not been started here yet.
            Reply::Bytes([ring.to_ne_bytes(), base.0.to_ne_bytes()].concat())
        })
    }

    pub(super) fn set_kick(&mut self, ring: u32, fd: Option<OwnedFd>) -> Result<(), SessionError> {
        let fd = event(fd)?.ok_or(SessionError::Refused(
            "a ring without an eventfd for kicks is not supported",
        ))?;
        self.ring(ring)?;
        self.stop(ring as u16);
        self.rings[ring as usize].kick = Some(fd);
        self.start_if_ready(ring as u16)
    }

    pub(super) fn enable_ring(&mut self, ring: u32, on: bool) -> Result<(), SessionError> {
        self.ring(ring)?.enabled = on;
        if on {
            return self.start_if_ready(ring as u16);
        }
        self.stop(ring as u16);
        Ok(())
    }

    /// Whether the rings are packed.
    pub(super) fn packed(&self) -> bool {
        self.features & blk::F_RING_PACKED != 0
    }

    /// The layout of a ring and the position at which it continues.
    fn layout(&self, ring: u16, addr: VringAddr) -> RingLayout {
        let (state, packed) = (&self.rings[usize::from(ring)], self.packed());
        RingLayout {
            number: ring,
            packed,
            size: state.size,
            descriptors: addr.descriptors,
            available: addr.available,
            used: addr.used,
            base: state.base.unwrap_or(RingBase::first(packed)),
            event_idx: self.features & blk::F_EVENT_IDX != 0,
            max_segments: self.device.seg_max(),
        }
    }

    pub(super) fn start_if_ready(&mut self, ring: u16) -> Result<(), SessionError> {
        let packed = self.packed();
        let driver = self.driver();
        let region = self.inflight.as_ref().map(|i| i.queue(ring, packed));
        let is_new = matches!(&region, Some(Some(region)) if !region.has_record());
        let state = &self.rings[usize::from(ring)];
        let (false, true, Some(_), Some(addr)) =
            (state.running, state.enabled, &state.kick, state.addr)
        else {
            return Ok(());
        };
        let layout = self.layout(ring, addr);
        let state = &mut self.rings[usize::from(ring)];
        if std::mem::take(&mut state.outdated)
            && let Some(Some(region)) = &region
        {
            region.forget();
        }
        let Some(kick) = &state.kick else {
            return Ok(());
        };
        let (virtqueue, too_small) = match open_ring(self.memory.clone(), layout, region) {
            Ok(taken_up) => taken_up,
            // The guest chooses the address and size of a ring: an invalid choice costs it that ring.
            Err(e) => {
                self.device.ring_failed(ring, &e);
                if let Some(error) = &state.error
                    && let Err(e) = self.notifier.notify(error)
                {
                    debug!("cannot notify the front-end of a failed ring: {e}");
                }
                return Ok(());
            }
        };
        let base = virtqueue.base();
        let wanted = self.features & F_LOG_ALL != 0 || addr.log.is_some();
        let (virtqueue, marked) = match &self.log {
            Some(log) if wanted => {
                let marks = DirtyMarks {
                    log: log.clone(),
                    used: addr.log,
                };
                (virtqueue.logged(&layout, marks)?, self.log_event.clone())
            }
            _ => (virtqueue, None),
        };
        let queue = NewQueue {
            virtqueue,
            kick: kick.clone(),
            call: state.call.clone(),
            error: state.error.clone(),
            marked,
            abort: self.abort.clone(),
        };
        state.untracked = too_small.is_some();
        let region = too_small.flatten();
        // Before a request is fetched: the region's record is not of this ring, and no successor may execute
        // it.
        match &region {
            Some(region) if packed => region.unpark(),
            Some(region) => region.forget(),
            None => {}
        }
        if let Err(e) = self.device.start(ring, queue, driver) {
            if let Some(region) = region.filter(|_| packed) {
                region.park(base);
            } else if is_new
                && let Some(region) = self.inflight.as_ref().and_then(|it| it.queue(ring, packed))
            {
                // It has not been served: the driver still starts.
                region.forget();
            }
            return Err(e.into());
        }
        // Its unfinished requests are in flight again.
        (state.running, state.unfinished, state.requeued) = (true, false, false);
        if state.untracked && !std::mem::replace(&mut self.reported_untracked, true) {
            self.device.untracked(ring, layout.size);
        }
        Ok(())
    }

    /// Where the driver was served before: a ring is not at its first position, or has a record of its requests in flight. A
    /// reset removes both. If the front-end enables a ring before it has set up the others, and no request has ever used that
    /// ring, this is not known yet.
    fn driver(&self) -> Driver {
        let packed = self.packed();
        let moved = |ring: &Ring| {
            ring.base
                .is_some_and(|base| base != RingBase::first(packed))
        };
        let is_recorded = |ring| {
            let region = self.inflight.as_ref()?.queue(ring, packed)?;
            Some(region.has_record())
        };
        let mut all = 0..self.device.queues();
        match all.any(|ring| is_recorded(ring) == Some(true)) {
            true => Driver::GoesOnHere,
            false if self.rings.iter().any(moved) => match &self.inflight {
                Some(_) => Driver::GoesOn,
                // Nothing tells where it was.
                None => Driver::GoesOnSomewhere,
            },
            false => Driver::Starts,
        }
    }

    pub(super) fn stop(&mut self, ring: u16) {
        if self.rings[usize::from(ring)].running {
            self.device.begin_stop(ring);
            self.finish_stop(ring);
        }
    }

    /// Waits for a ring that was asked to stop, and records where it stopped.
    fn finish_stop(&mut self, ring: u16) {
        let stopped = self.device.finish_stop(ring);
        let packed = self.packed();
        let state = &mut self.rings[usize::from(ring)];
        state.running = false;
        (state.base, state.unfinished) = (Some(stopped.base), stopped.unfinished);
        state.drained = !stopped.unfinished || state.untracked;
        // An in-order ring starts with the requests that it left.
        state.requeued = state.untracked && !packed;
        let region = || self.inflight.as_ref()?.queue(ring, packed);
        match (state.untracked, stopped.unfinished) {
            (true, false) if packed => {
                if let Some(region) = region() {
                    region.park(stopped.base);
                }
            }
            (false, true) => self.requeue(ring),
            _ => {}
        }
    }

    /// Makes the requests that a ring has left available again. The record of them is for the process that
    /// serves this connection next; a guest that continues elsewhere or is saved takes only the ring along,
    /// not the record.
    fn requeue(&mut self, ring: u16) {
        let Some(addr) = self.rings[usize::from(ring)].addr else {
            return;
        };
        let layout = self.layout(ring, addr);
        let queue = |inflight: &Inflight| inflight.queue(ring, layout.packed);
        let Some(region) = self.inflight.as_ref().and_then(queue) else {
            return;
        };
        let queue = Virtqueue::tracked(self.memory.clone(), layout, region);
        let Some(base) = queue.ok().and_then(|mut queue| queue.requeue()) else {
            return;
        };
        let state = &mut self.rings[usize::from(ring)];
        (state.base, state.requeued) = (Some(base), true);
        if let Some(log) = &self.log {
            let size = u64::from(layout.size);
            let (user, len) = if layout.packed {
                (layout.descriptors, 16 * size)
            } else {
                (layout.available, 6 + 2 * size)
            };
            if let Some(guest) = self.memory.guest_of_user(user, len) {
                log.mark(guest, len);
            }
        }
    }

    /// Stops all running rings, and returns them. All are asked to stop before the first is waited for.
    /// Otherwise the others would continue to fetch requests, these would compete for storage with those
    /// that are waited for, and the guest would wait for the sum over all rings.
    ///
    /// The order in which the rings finish does not matter. Their requests in flight need nothing that another
    /// ring would fetch. The base, the region's record and the dirty log of a ring are updated when this ring
    /// has stopped; until then its record stays as it was while the ring was served, which is valid if this
    /// process is killed. The caller changes memory, log, region and features only after all have stopped.
    /// A ring whose I/O thread has failed also counts as stopped.
    pub(super) fn stop_all(&mut self) -> Vec<u16> {
        let running = |(i, r): (usize, &Ring)| r.running.then_some(i as u16);
        let rings: Vec<u16> = self.rings.iter().enumerate().filter_map(running).collect();
        rings.iter().for_each(|&ring| self.device.begin_stop(ring));
        rings.iter().for_each(|&ring| self.finish_stop(ring));
        rings
    }

    /// Removes a ring's record from the region of requests in flight. The recorded requests will not be
    /// repeated.
    pub(super) fn forget_inflight(&self, ring: u16) {
        let queue = |inflight: &Inflight| inflight.queue(ring, self.packed());
        if let Some(queue) = self.inflight.as_ref().and_then(queue) {
            queue.forget();
        }
    }

    pub(super) fn start_again(&mut self, rings: Vec<u16>) -> Result<(), SessionError> {
        rings
            .into_iter()
            .try_for_each(|ring| self.start_if_ready(ring))
    }

    pub(super) fn update_event_fds(&mut self, ring: u16) {
        let state = &self.rings[usize::from(ring)];
        if state.running {
            let (call, error) = (state.call.clone(), state.error.clone());
            self.device.set_event_fds(ring, call, error);
        }
    }
}

/// Opens a ring. `region` is `None` if the front-end keeps no region, and `Some(None)` if the region ends
/// before the ring's part. If the ring's part is too small for the ring, it is returned with the queue.
fn open_ring(
    memory: Arc<GuestMemory>,
    mut layout: RingLayout,
    region: Option<Option<InflightQueue>>,
) -> Result<(Virtqueue, Option<Option<InflightQueue>>), RingError> {
    match region {
        None => Ok((Virtqueue::new(memory, layout)?, None)),
        Some(Some(region)) if region.fits(layout.size) => {
            Ok((Virtqueue::tracked(memory, layout, region)?, None))
        }
        Some(region) => {
            if let Some(region) = region.as_ref().filter(|_| layout.packed)
                && let Some(base) = region.parked()?
            {
                layout.base = base;
            }
            Ok((Virtqueue::untracked(memory, layout)?, Some(region)))
        }
    }
}

/// Checks a descriptor for signals. It must be an event counter: polling another type of file may block
/// forever (an epoll descriptor polls the files that it watches, and a file on FUSE asks a process), and so
/// may writing to it. The descriptor is made nonblocking, because I/O threads write to it and the front-end
/// could have filled it.
pub(super) fn event(fd: Option<OwnedFd>) -> Result<Option<Arc<OwnedFd>>, SessionError> {
    let Some(fd) = fd else {
        return Ok(None);
    };
    // The kernel generates this name; the name of a file in a file system begins with a slash.
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let what = rustix::fs::readlinkat(CWD, link, Vec::new()).map_err(io::Error::from)?;
    if what.as_bytes() != b"anon_inode:[eventfd]" {
        return Err(SessionError::Refused(
            "a descriptor for kicks, calls, errors or the dirty log is not an eventfd",
        ));
    }
    let flags = rustix::fs::fcntl_getfl(&fd).map_err(io::Error::from)?;
    rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(io::Error::from)?;
    Ok(Some(Arc::new(fd)))
}
