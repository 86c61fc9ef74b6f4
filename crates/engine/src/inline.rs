//! Operations that the I/O thread performs as they are submitted, by a plain system call.
//!
//! RAM disks and tmpfs do not support RWF_NOWAIT, so io_uring hands every operation on them to a kernel
//! thread. That costs more than the operation itself and takes CPU time on other cores; a synchronous call is
//! cheaper. Other files are never handled this way, because a dead NFS server would block the thread and all
//! its disks. A RAM disk whose operations start to block is returned to the kernel threads.

use std::ffi::OsStr;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use block::{Backing, FileOffset, Op, Segment};
use nix::sys::resource::{UsageWho, getrusage};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

/// Average time that an operation may take: a base, plus an amount for each page of 4 KiB.
const BASE: Duration = Duration::from_micros(10);
const EACH_PAGE: Duration = Duration::from_micros(2);

/// An operation that takes longer than its allowance counts for at most `COST_MAX` times that allowance, and
/// moves the average by one part in `AVERAGE_WEIGHT`. A file that blocks only occasionally therefore stays below the
/// limit; a file whose every operation takes ten times too long is given up after seven operations.
const COST_MAX: f32 = 16.0;
const AVERAGE_WEIGHT: f32 = 64.0;

/// One operation in this many is timed, and each one that follows a slow operation.
const SAMPLE_INTERVAL: u32 = 16;

/// Number of operations that use the kernel threads before the file is tried again.
const RETRY_AFTER: u32 = 65_536;

/// Whether a file's operations are performed inline.
pub(crate) enum Inline {
    /// The kernel performs its operations without a thread, so there is no need.
    Off,
    Adaptive(CostEstimate),
}

/// Estimates whether a file's operations are fast.
#[derive(Default)]
pub(crate) struct CostEstimate {
    /// Moving average of the time that operations were blocked; 1 is the allowance.
    load: f32,
    /// Number of operations until the next trial.
    operations_to_retry: u32,
    /// Number of operations that are not timed before the next one that is.
    until_sample: u32,
}

/// An operation that is being timed.
struct Timing {
    start: Instant,
    sleeps: i64,
}

impl Timing {
    fn begin() -> Self {
        let sleeps = sleeps();
        let start = Instant::now();
        Self { start, sleeps }
    }

    /// Returns how long the operation took and whether it slept. If it did not sleep, it took long because it
    /// had much data to move or because the host gave the core to another task; a kernel thread would not
    /// improve either case.
    fn end(self) -> (Duration, bool) {
        (self.start.elapsed(), sleeps() != self.sleeps)
    }
}

/// Number of times that this thread has gone to sleep.
pub(crate) fn sleeps() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.voluntary_context_switches())
}

impl Inline {
    /// Tests whether this file is in memory and io_uring would need a kernel thread for it. Does not block.
    pub fn probe(file: BorrowedFd<'_>, backing: Backing) -> Self {
        if !in_memory(file, backing) {
            return Self::Off;
        }
        let mut buffer = vec![0; 8192];
        // O_DIRECT requires an aligned buffer.
        let skip = buffer.as_ptr().align_offset(4096);
        let mut part = [IoSliceMut::new(&mut buffer[skip..skip + 4096])];
        match preadv2(file, &mut part, 0, ReadWriteFlags::NOWAIT) {
            Err(Errno::OPNOTSUPP) => Self::Adaptive(CostEstimate::default()),
            _ => Self::Off,
        }
    }

    /// Returns the parameters of an operation that can be performed inline: a read, or (true) a write that
    /// need not be stable.
    #[inline]
    pub fn transfer_of(op: Op<'_>) -> Option<(bool, FileOffset, &[Segment])> {
        match op {
            Op::Read { at, to } => Some((false, at, to)),
            Op::Write {
                at,
                from,
                stable: false,
            } => Some((true, at, from)),
            _ => None,
        }
    }

    /// Whether the next operation should be performed inline.
    #[inline]
    pub fn is_wanted(&mut self) -> bool {
        match self {
            Self::Off => false,
            Self::Adaptive(CostEstimate {
                operations_to_retry: 0,
                ..
            }) => true,
            Self::Adaptive(estimate) => {
                estimate.operations_to_retry -= 1;
                false
            }
        }
    }

    /// Reads or writes, and returns the result that io_uring would return.
    ///
    /// # Safety
    /// The memory of the segments must be valid, and writable for a read.
    #[expect(unsafe_code, reason = "the kernel works on memory that segments name")]
    pub unsafe fn run(
        &mut self,
        file: BorrowedFd<'_>,
        write: bool,
        at: FileOffset,
        segments: &[Segment],
    ) -> i32 {
        let timing = match self {
            Self::Adaptive(estimate) => estimate.start_timing(),
            Self::Off => None,
        };
        let (fd, offset) = (file.as_raw_fd(), at.0 as libc::off_t);
        let (list, n) = crate::iovec::iovec(segments);
        // SAFETY: the caller's promise; a segment is laid out like an iovec.
        let result = unsafe {
            match (segments, write) {
                (&[s], false) => libc::pread(fd, s.addr as *mut _, s.len, offset),
                (&[s], true) => libc::pwrite(fd, s.addr as *const _, s.len, offset),
                (_, false) => libc::preadv(fd, list, n as i32, offset),
                (_, true) => libc::pwritev(fd, list, n as i32, offset),
            }
        };
        match i32::try_from(result) {
            Ok(moved @ 0..) => {
                if let (Self::Adaptive(estimate), Some(timing)) = (self, timing) {
                    let (time, slept) = timing.end();
                    estimate.record(time, slept, moved as usize);
                }
                moved
            }
            // One call never transfers more than 2 GiB.
            _ => -io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
        }
    }
}

impl CostEstimate {
    /// Starts timing the next operation, if it is to be timed.
    #[inline]
    fn start_timing(&mut self) -> Option<Timing> {
        match self.until_sample {
            0 => Some(Timing::begin()),
            _ => {
                self.until_sample -= 1;
                None
            }
        }
    }

    fn record(&mut self, time: Duration, slept: bool, bytes: usize) {
        let allowance = BASE + EACH_PAGE * (bytes / 4096) as u32;
        let waited = if slept {
            (time.as_secs_f32() / allowance.as_secs_f32()).min(COST_MAX)
        } else {
            0.0
        };
        self.load += (waited - self.load) / AVERAGE_WEIGHT;
        self.until_sample = if waited > 1.0 { 0 } else { SAMPLE_INTERVAL - 1 };
        if self.load > 1.0 {
            (self.load, self.operations_to_retry) = (0.0, RETRY_AFTER);
        }
    }
}

/// Whether a file is held only in this machine's memory.
fn in_memory(file: BorrowedFd<'_>, backing: Backing) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    match backing {
        Backing::File => {
            rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type as u64 == TMPFS_MAGIC)
        }
        Backing::BlockDevice => {
            let Ok(stat) = rustix::fs::fstat(file) else {
                return false;
            };
            let (major, minor) = (
                rustix::fs::major(stat.st_rdev),
                rustix::fs::minor(stat.st_rdev),
            );
            let link = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}"));
            link.ok()
                .as_deref()
                .and_then(Path::file_name)
                .and_then(OsStr::to_str)
                .is_some_and(|name| {
                    ["zram", "ram", "pmem"]
                        .iter()
                        .any(|ram| name.starts_with(ram))
                })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_file_is_given_up_and_retried() {
        let mut estimate = CostEstimate::default();
        for _ in 0..1000 {
            estimate.record(Duration::from_micros(5), true, 4096);
        }
        // A single slow operation is not enough.
        estimate.record(Duration::from_secs(1), true, 4096);
        assert_eq!(estimate.operations_to_retry, 0);
        for _ in 0..8 {
            assert!(
                estimate.start_timing().is_some(),
                "after a slow one, each is looked at"
            );
            estimate.record(Duration::from_millis(1), true, 4096);
        }
        let mut inline = Inline::Adaptive(estimate);
        let skipped = (0..2 * RETRY_AFTER)
            .take_while(|_| !inline.is_wanted())
            .count();
        assert_eq!(skipped, RETRY_AFTER as usize);
    }

    #[test]
    fn long_operation_has_larger_allowance() {
        let mut estimate = CostEstimate::default();
        for _ in 0..100 {
            estimate.record(Duration::from_micros(70), true, 128 << 10);
        }
        assert_eq!(estimate.operations_to_retry, 0);
    }

    #[test]
    fn preempted_thread_does_not_blame_the_file() {
        let mut estimate = CostEstimate::default();
        for _ in 0..1000 {
            estimate.record(Duration::from_millis(5), false, 4096);
        }
        assert_eq!(estimate.operations_to_retry, 0);
    }

    #[test]
    fn only_sleeping_is_counted() {
        let timing = Timing::begin();
        std::thread::sleep(Duration::from_micros(100));
        assert!(timing.end().1);
        let timing = Timing::begin();
        std::hint::black_box((0..100_000_u64).fold(0, |a, b| a ^ b));
        assert!(!timing.end().1);
    }
}
