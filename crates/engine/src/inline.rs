//! Operations done where they are submitted, by a plain system call.
//!
//! On RAM disks and tmpfs, which do not know RWF_NOWAIT, io_uring hands every operation to a kernel
//! thread, which costs more than the operation itself and takes CPU time on other cores. There it is
//! better to wait for it. Nothing else is tried this way (a dead NFS server would stop the thread and
//! all its disks), and a RAM disk that turns slow is given back to the kernel's threads.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use block::{Backing, FileOffset, Op, Segment};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

/// What an operation may take on average: this, and so much more for each page of 4 KiB.
const BASE: Duration = Duration::from_micros(10);
const EACH_PAGE: Duration = Duration::from_micros(2);

/// One operation counts for at most this many times what it may take, and moves the average by one
/// part in so many: a thread that loses its core now and then does not judge a file by it, while a
/// file that takes ten times too long is given up after seven operations.
const WORST: f32 = 16.0;
const PARTS: f32 = 64.0;

/// Operations that go to the kernel's threads before the file is given another chance.
const PENANCE: u32 = 65_536;

/// What is known of a file.
pub(crate) enum Inline {
    /// The kernel does its operations without a thread: no need.
    NoNeed,
    Measured {
        /// Moving average of the time taken, 1 being what it may take.
        load: f32,
        /// Operations until the next trial.
        penance: u32,
    },
}

impl Inline {
    /// Finds out whether this file is in memory and io_uring would need a kernel thread for it.
    /// Does not block.
    pub fn probe(file: &File, backing: Backing) -> Self {
        if !in_memory(file, backing) {
            return Self::NoNeed;
        }
        let mut buffer = vec![0; 8192];
        // O_DIRECT wants an aligned buffer.
        let skip = buffer.as_ptr().align_offset(4096);
        let mut part = [IoSliceMut::new(&mut buffer[skip..skip + 4096])];
        match preadv2(file, &mut part, 0, ReadWriteFlags::NOWAIT) {
            Err(Errno::OPNOTSUPP) => Self::Measured {
                load: 0.0,
                penance: 0,
            },
            _ => Self::NoNeed,
        }
    }

    /// What may be done at once: a read, or (true) a write that need not be made stable.
    #[inline]
    pub fn suits(op: Op<'_>) -> Option<(bool, FileOffset, &[Segment])> {
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

    /// Whether the next operation is to be done at once.
    #[inline]
    pub fn wanted(&mut self) -> bool {
        match self {
            Self::NoNeed => false,
            Self::Measured { penance: 0, .. } => true,
            Self::Measured { penance, .. } => {
                *penance -= 1;
                false
            }
        }
    }

    fn took(&mut self, time: Duration, bytes: usize) {
        if let Self::Measured { load, penance } = self {
            let may = BASE + EACH_PAGE * (bytes / 4096) as u32;
            let this = (time.as_secs_f32() / may.as_secs_f32()).min(WORST);
            *load += (this - *load) / PARTS;
            if *load > 1.0 {
                *load = 0.0;
                *penance = PENANCE;
            }
        }
    }

    /// Reads or writes, and returns what io_uring would.
    ///
    /// # Safety
    /// The memory that the segments name must be valid, and writable if it is read into.
    #[expect(unsafe_code, reason = "the kernel works on memory that segments name")]
    pub unsafe fn run(
        &mut self,
        file: &File,
        write: bool,
        at: FileOffset,
        segments: &[Segment],
    ) -> i32 {
        let start = Instant::now();
        let (fd, offset) = (file.as_raw_fd(), at.0 as libc::off_t);
        let (list, n) = crate::uring::iovec(segments);
        // SAFETY: the caller's promise; a segment is laid out like an iovec.
        let result = unsafe {
            match write {
                false => libc::preadv(fd, list, n as i32, offset),
                true => libc::pwritev(fd, list, n as i32, offset),
            }
        };
        match i32::try_from(result) {
            Ok(moved @ 0..) => {
                self.took(start.elapsed(), moved as usize);
                moved
            }
            // More than 2 GiB never moves at once.
            _ => -io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
        }
    }
}

/// Whether a file lies in this machine's memory and nowhere else.
fn in_memory(file: &File, backing: Backing) -> bool {
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

    fn measured() -> Inline {
        Inline::Measured {
            load: 0.0,
            penance: 0,
        }
    }

    #[test]
    fn a_slow_file_is_given_back_and_tried_again_later() {
        let mut inline = measured();
        for _ in 0..1000 {
            assert!(inline.wanted());
            inline.took(Duration::from_micros(5), 4096);
        }
        // Once is no reason.
        inline.took(Duration::from_secs(1), 4096);
        assert!(inline.wanted());
        for _ in 0..8 {
            inline.took(Duration::from_millis(1), 4096);
        }
        let punished = (0..2 * PENANCE).take_while(|_| !inline.wanted()).count();
        assert_eq!(punished, PENANCE as usize);
    }

    #[test]
    fn a_long_operation_may_take_longer() {
        let mut inline = measured();
        for _ in 0..100 {
            inline.took(Duration::from_micros(70), 128 << 10);
        }
        assert!(inline.wanted());
    }
}
