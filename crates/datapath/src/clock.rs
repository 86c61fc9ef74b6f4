//! The clock of the data path.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock. It does not enter the kernel, and costs about 25 ns: ask once
/// per batch.
#[inline]
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// CPU time of the calling thread in nanoseconds. It enters the kernel.
pub(crate) fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
