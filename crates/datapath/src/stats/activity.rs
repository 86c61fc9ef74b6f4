//! What an I/O thread does with its time.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::histogram::add;

/// What an I/O thread has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadStats {
    /// CPU time in nanoseconds, user and kernel; `None` where the kernel does not count it
    /// (`CONFIG_SCHED_INFO`) or does not show it (no `/proc`).
    pub cpu_ns: Option<u64>,
    /// Times that it polled for a guest or a completion.
    pub polls: u64,
    /// Times that a request or a completion came meanwhile.
    pub polls_hit: u64,
    /// Nanoseconds that it polled.
    pub polled_ns: u64,
    /// CPU time in nanoseconds of the sleeps that polling saved, as measured on the thread.
    pub poll_saved_ns: u64,
    /// Times that it slept, or was about to.
    pub sleeps: u64,
}

/// Written by the thread alone.
#[derive(Default)]
pub(crate) struct Activity {
    /// The kernel's number of the thread; 0 before it runs.
    tid: AtomicU32,
    polls: AtomicU64,
    polls_hit: AtomicU64,
    polled_ns: AtomicU64,
    poll_saved_ns: AtomicU64,
    sleeps: AtomicU64,
}

impl Activity {
    /// Called by the thread itself.
    pub fn begin(&self) {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        self.tid.store(tid as u32, Ordering::Relaxed);
    }

    pub fn polled(&self, hit: bool, ns: u64, saved_ns: u64) {
        add(&self.polls, 1);
        add(&self.polls_hit, u64::from(hit));
        add(&self.polled_ns, ns);
        add(&self.poll_saved_ns, saved_ns);
    }

    pub fn slept(&self) {
        add(&self.sleeps, 1);
    }

    pub fn stats(&self) -> ThreadStats {
        ThreadStats {
            cpu_ns: cpu_ns(self.tid.load(Ordering::Relaxed)),
            polls: self.polls.load(Ordering::Relaxed),
            polls_hit: self.polls_hit.load(Ordering::Relaxed),
            polled_ns: self.polled_ns.load(Ordering::Relaxed),
            poll_saved_ns: self.poll_saved_ns.load(Ordering::Relaxed),
            sleeps: self.sleeps.load(Ordering::Relaxed),
        }
    }
}

/// CPU time of a thread of this process (proc(5): the first of three numbers in `schedstat`).
fn cpu_ns(tid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).ok()?;
    text.split(' ').next()?.parse().ok()
}
