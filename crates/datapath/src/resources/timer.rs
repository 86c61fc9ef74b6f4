//! A thread's timer: it ends the thread's sleep when held or stalled requests may continue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tracing::error;

/// The engine watches it like a kick, so it works with every engine.
pub(crate) struct Timer {
    fd: OwnedFd,
    /// When it expires, in nanoseconds of the monotonic clock.
    at: u64,
}

impl Timer {
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self {
            fd: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            at: 0,
        })
    }

    /// Has it expire at `at`, or earlier if it was set to.
    pub fn set(&mut self, now: u64, at: u64) {
        if now < self.at && self.at <= at {
            return;
        }
        self.at = at;
        let zero = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let when = Itimerspec {
            it_interval: zero,
            it_value: Timespec {
                tv_sec: (at / 1_000_000_000) as i64,
                tv_nsec: (at % 1_000_000_000) as _,
            },
        };
        // It fails only for values that are not a time.
        if let Err(e) = timerfd_settime(&self.fd, TimerfdTimerFlags::ABSTIME, &when) {
            error!("an I/O thread's timer cannot be set to {at} ns: {e}");
        }
    }

    pub fn event(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
