//! The limits of a disk: its own, and those of its group.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use block::{ThrottleError, ThrottleLimits};

use super::{Sharer, Shares, ThrottleGroup};
use crate::clock::now_ns;

/// The limits of a disk: its own, and those of the group that it belongs to. Queues whose requests do not come from the
/// disk's guest have others.
pub struct Admission {
    /// There are limits, or the disk is stopped.
    limits_any: AtomicBool,
    stopped: AtomicBool,
    /// When the guest last sent a request to which no limit applies, on any queue.
    pub(crate) free: AtomicU64,
    pub(crate) state: Mutex<AdmissionState>,
}

pub(crate) struct AdmissionState {
    pub own: Shares,
    pub group: Option<Membership>,
}

pub(crate) struct Membership {
    pub group: Arc<ThrottleGroup>,
    pub sharer: Sharer,
}

impl Default for Admission {
    fn default() -> Self {
        Self {
            limits_any: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            free: AtomicU64::new(0),
            state: Mutex::new(AdmissionState {
                own: Shares::new(&ThrottleLimits::NONE),
                group: None,
            }),
        }
    }
}

impl Admission {
    /// Whether requests may have to wait.
    #[inline]
    pub(crate) fn limits_any(&self) -> bool {
        self.limits_any.load(Ordering::Relaxed)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, AdmissionState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn changed(&self, state: &AdmissionState) {
        let any = state.own.limits().is_limited() || state.group.is_some() || self.is_stopped();
        self.limits_any.store(any, Ordering::Relaxed);
    }

    /// Whether all requests wait until the operator resumes the disk.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Stops the disk, or lets requests go as the limits allow.
    pub(crate) fn set_stopped(&self, stopped: bool) {
        let state = self.lock();
        self.stopped.store(stopped, Ordering::Relaxed);
        self.changed(&state);
    }

    /// The own limits.
    pub fn limits(&self) -> ThrottleLimits {
        *self.lock().own.limits()
    }

    /// Changes the own limits, for requests that are waiting and for new ones.
    ///
    /// # Errors
    /// The limits contradict each other; the old ones stay.
    pub fn set_limits(&self, limits: &ThrottleLimits) -> Result<(), ThrottleError> {
        limits.check()?;
        let mut state = self.lock();
        state.own.set(limits, now_ns());
        self.changed(&state);
        Ok(())
    }

    pub(crate) fn group(&self) -> Option<Arc<ThrottleGroup>> {
        self.lock().group.as_ref().map(|m| m.group.clone())
    }

    pub(crate) fn set_group(&self, group: Option<Arc<ThrottleGroup>>) {
        let mut state = self.lock();
        state.leave_group();
        state.group = group.map(|group| {
            let sharer = group.shares().join();
            Membership { group, sharer }
        });
        self.changed(&state);
    }
}

impl AdmissionState {
    fn leave_group(&mut self) {
        if let Some(Membership { group, sharer }) = self.group.take() {
            group.shares().leave(sharer);
        }
    }

    /// The group does not wait for a disk that has no requests waiting.
    pub fn rest_in_group(&mut self) {
        let Some(Membership { group, sharer }) = &self.group else {
            return;
        };
        for lane in (0..2).filter(|&lane| !self.own.waited_for(lane)) {
            group.shares().rest(*sharer, lane);
        }
    }
}

impl Drop for AdmissionState {
    fn drop(&mut self) {
        self.leave_group();
    }
}
