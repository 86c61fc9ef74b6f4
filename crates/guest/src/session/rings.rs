//! The rings of a session: what the front-end says of them, and when they are served.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{CWD, OFlags};
use tracing::debug;

use super::{F_LOG_ALL, NewQueue, Session, SessionError};
use crate::blk;
use crate::inflight::{Inflight, InflightQueue};
use crate::memory::GuestMemory;
use crate::message::VringAddr;
use crate::virtqueue::{DirtyMarks, RingBase, RingError, RingLayout, Virtqueue};

/// What the front-end has said of a ring so far.
#[derive(Default)]
pub(super) struct Ring {
    pub size: u16,
    pub addr: Option<VringAddr>,
    /// Where the device goes on; where it begins, unless that was said.
    pub base: Option<RingBase>,
    /// Where it stopped before the device was reset. QEMU 7.2 asks for it only then.
    pub base_at_reset: Option<RingBase>,
    /// When it stopped, it left requests in flight.
    pub unfinished: bool,
    /// These are available again at its base, for the process that goes on there.
    pub put_back: bool,
    /// It has run in this session, and when it stopped, the region said of no request that it is in flight.
    pub drained: bool,
    /// What the region says of it is of no use when it is started next.
    pub outdated: bool,
    /// It is served in this session although the region has too few entries for it.
    pub unrecorded: bool,
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

    /// Changes what is known of a ring. One that runs goes on with it at once: QEMU sends addresses
    /// again while the guest runs, when it switches the dirty log.
    pub(super) fn change_ring(
        &mut self,
        ring: u32,
        change: impl FnOnce(&mut Ring),
    ) -> Result<(), SessionError> {
        let was_running = self.ring(ring)?.running;
        self.stop(ring as u16);
        change(&mut self.rings[ring as usize]);
        match was_running {
            true => self.start_if_ready(ring as u16),
            false => Ok(()),
        }
    }

    /// Whether rings are packed.
    pub(super) fn packed(&self) -> bool {
        self.features & blk::F_RING_PACKED != 0
    }

    /// Where a ring is, and where it goes on.
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
        let region = self.inflight.as_ref().map(|i| i.queue(ring, packed));
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
        let (virtqueue, too_small) = match take_up(self.memory.clone(), layout, region) {
            Ok(taken_up) => taken_up,
            // Where a ring lies and how large it is, is the guest's choice: a bad one costs it that ring.
            Err(e) => {
                self.device.ring_failed(ring, &e);
                if let Some(error) = &state.error
                    && let Err(e) = self.signals.send(error)
                {
                    debug!("the front-end is not told of the ring that was given up: {e}");
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
            lost: self.lost.clone(),
        };
        state.unrecorded = too_small.is_some();
        let region = too_small.flatten();
        // Before a request is fetched: what the region says is not of this ring, and no successor must do it.
        match &region {
            Some(region) if packed => region.unpark(),
            Some(region) => region.forget(),
            None => {}
        }
        if let Err(e) = self.device.start(ring, queue) {
            if let Some(region) = region.filter(|_| packed) {
                region.park(base);
            }
            return Err(e.into());
        }
        // What it had left is under way again.
        (state.running, state.unfinished, state.put_back) = (true, false, false);
        if state.unrecorded && !std::mem::replace(&mut self.told_unrecorded, true) {
            self.device.unrecorded(ring, layout.size);
        }
        Ok(())
    }

    pub(super) fn stop(&mut self, ring: u16) {
        let packed = self.packed();
        let state = &mut self.rings[usize::from(ring)];
        if !std::mem::take(&mut state.running) {
            return;
        }
        let stopped = self.device.stop(ring);
        (state.base, state.unfinished) = (Some(stopped.base), stopped.unfinished);
        state.drained = !stopped.unfinished || state.unrecorded;
        // One that gives back in order begins with what it left.
        state.put_back = state.unrecorded && !packed;
        let region = || self.inflight.as_ref()?.queue(ring, packed);
        match (state.unrecorded, stopped.unfinished) {
            (true, false) if packed => {
                if let Some(region) = region() {
                    region.park(stopped.base);
                }
            }
            (false, true) => self.put_back(ring),
            _ => {}
        }
    }

    /// Makes the requests that a ring has left available again. The record of them is for the process that is connected here
    /// next; a guest that goes on elsewhere, or is saved, takes the ring along, and not the record.
    fn put_back(&mut self, ring: u16) {
        let Some(addr) = self.rings[usize::from(ring)].addr else {
            return;
        };
        let layout = self.layout(ring, addr);
        let queue = |inflight: &Inflight| inflight.queue(ring, layout.packed);
        let Some(region) = self.inflight.as_ref().and_then(queue) else {
            return;
        };
        let queue = Virtqueue::tracked(self.memory.clone(), layout, region);
        let Some(base) = queue.ok().and_then(|mut queue| queue.put_back()) else {
            return;
        };
        let state = &mut self.rings[usize::from(ring)];
        (state.base, state.put_back) = (Some(base), true);
        if let Some(log) = &self.log {
            let size = u64::from(layout.size);
            let (user, len) = match layout.packed {
                true => (layout.descriptors, 16 * size),
                false => (layout.available, 6 + 2 * size),
            };
            if let Some(guest) = self.memory.guest_of_user(user, len) {
                log.mark(guest, len);
            }
        }
    }

    pub(super) fn stop_all(&mut self) -> Vec<u16> {
        let running = |(i, r): (usize, &Ring)| r.running.then_some(i as u16);
        let stopped: Vec<u16> = self.rings.iter().enumerate().filter_map(running).collect();
        stopped.iter().for_each(|&ring| self.stop(ring));
        stopped
    }

    /// Has a ring begin anew in the region of requests in flight. Those that are written down there will
    /// not be done again.
    pub(super) fn forget_inflight(&self, ring: u16) {
        let queue = |inflight: &Inflight| inflight.queue(ring, self.packed());
        if let Some(queue) = self.inflight.as_ref().and_then(queue) {
            queue.forget();
        }
    }

    /// Puts a new map in place. Rings hold on to the map with which they started, so that those
    /// which run are stopped and taken up anew.
    pub(super) fn change_memory(&mut self, memory: GuestMemory) -> Result<(), SessionError> {
        self.stop_all();
        self.memory = Arc::new(memory);
        // All of them: one that had to stop when its memory went may have it again.
        let rings = (0..self.device.queues()).collect();
        self.start_again(rings)
    }

    pub(super) fn start_again(&mut self, rings: Vec<u16>) -> Result<(), SessionError> {
        rings
            .into_iter()
            .try_for_each(|ring| self.start_if_ready(ring))
    }

    pub(super) fn signals_changed(&mut self, ring: u16) {
        let state = &self.rings[usize::from(ring)];
        if state.running {
            let (call, error) = (state.call.clone(), state.error.clone());
            self.device.set_signals(ring, call, error);
        }
    }
}

/// Takes up a ring for which the front-end keeps no region, or this one, or one that ends before the ring's part. With it
/// comes that part, if it is too small for the ring.
fn take_up(
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
            Ok((Virtqueue::unrecorded(memory, layout)?, Some(region)))
        }
    }
}

/// A descriptor for signals. It must be an event counter: to look whether something else is readable may take for ever
/// (an epoll descriptor asks the files that it watches, and files in FUSE ask a process), as may writing to it. It is
/// made not to block, since I/O threads write to it, and a front-end could have filled it.
pub(super) fn event(fd: Option<OwnedFd>) -> Result<Option<Arc<OwnedFd>>, SessionError> {
    let Some(fd) = fd else {
        return Ok(None);
    };
    // The kernel makes this name, and what lies in a file system has one that begins with a slash.
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
