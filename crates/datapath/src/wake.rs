//! How other threads wake an I/O thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// Ends a thread's sleep or its polling.
pub(crate) struct Wake {
    event: OwnedFd,
    pending: AtomicBool,
}

impl Wake {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            pending: AtomicBool::new(false),
        })
    }

    pub fn wake(&self) {
        self.pending.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    #[inline]
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }

    /// Whether the thread was woken since the last call. A command that is sent after this returns wakes it again.
    #[inline]
    pub fn take(&self) -> bool {
        self.is_pending() && self.pending.swap(false, Ordering::Acquire)
    }

    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
