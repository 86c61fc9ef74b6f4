//! What an I/O thread does with its time.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

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
    /// It sleeps, and nothing is in flight.
    is_idle: AtomicBool,
    /// When it was told to check the age of its requests, in nanoseconds of the monotonic clock; 0 once it has. Written by
    /// the thread that tells it as well.
    checking_since: AtomicU64,
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

    /// It is about to sleep, with nothing in flight or not.
    pub fn sleeps(&self, is_idle: bool) {
        add(&self.sleeps, 1);
        self.is_idle.store(is_idle, Ordering::Relaxed);
    }

    /// It has been woken.
    pub fn woke(&self) {
        self.is_idle.store(false, Ordering::Relaxed);
    }

    pub fn is_idle(&self) -> bool {
        self.is_idle.load(Ordering::Relaxed)
    }

    /// It is told to check the age of its requests. Returns false if it was told before, and has not done so.
    pub fn begin_check(&self, now_ns: u64) -> bool {
        let since = &self.checking_since;
        let begun = since.compare_exchange(0, now_ns, Ordering::Relaxed, Ordering::Relaxed);
        begun.is_ok()
    }

    pub fn answered_check(&self) {
        self.checking_since.store(0, Ordering::Relaxed);
    }

    /// Since when it has not done what it was told; 0 if it has.
    pub fn checking_since(&self) -> u64 {
        self.checking_since.load(Ordering::Relaxed)
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
