//! Deallocates and zeroes ranges. The kernel has no asynchronous interface for this on every version and
//! backing, and backings differ in what they support.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use block::{Backing, FileOffset};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

/// If the file system supports no faster way, zeroes are written in pieces of this size.
const ZEROES: usize = 1 << 20;

/// The file that an operation works on.
pub(crate) struct Target {
    pub file: Arc<OwnedFd>,
    pub backing: Backing,
    /// Its number in the engine's thread pool.
    pub number: usize,
}

/// A byte range of a file.
pub(crate) struct Range<'a> {
    pub target: &'a Target,
    pub at: FileOffset,
    pub len: u64,
}

/// Deallocates a range. A backing that cannot deallocate is not an error: the guest only said that it no
/// longer needs the data.
pub(crate) fn discard(range: &Range<'_>) -> Result<(), Errno> {
    let result = match range.target.backing {
        Backing::File => fallocate(
            range,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        ),
        Backing::BlockDevice => ioctl_range(range, BLKDISCARD),
    };
    ignore_unsupported(result)
}

/// Zeroes a range in the best way that the backing supports.
pub(crate) fn write_zeroes(range: &Range<'_>, unmap: bool) -> Result<(), Errno> {
    const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
    const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE);
    let done = match (range.target.backing, unmap) {
        // On a device, punching a hole zeroes and unmaps, or fails; BLKZEROOUT always zeroes.
        (_, true) => fallocate(range, PUNCH),
        (Backing::BlockDevice, false) => ioctl_range(range, BLKZEROOUT),
        (Backing::File, false) => match fallocate(range, ZERO) {
            // A hole reads as zeroes, also after it is allocated again (tmpfs supports no other way).
            Err(Errno::OPNOTSUPP) => {
                fallocate(range, PUNCH).and_then(|()| fallocate(range, FallocateFlags::KEEP_SIZE))
            }
            result => result,
        },
    };
    match done {
        Err(Errno::OPNOTSUPP | Errno::NOTTY) => match range.target.backing {
            Backing::BlockDevice => ioctl_range(range, BLKZEROOUT),
            Backing::File => fallocate(range, ZERO),
        },
        result => return result,
    }
    .or_else(|e| match e {
        Errno::OPNOTSUPP | Errno::NOTTY => pwrite_zeroes(range),
        e => Err(e),
    })
}

fn pwrite_zeroes(range: &Range<'_>) -> Result<(), Errno> {
    // O_DIRECT requires an aligned buffer.
    let storage = vec![0u8; ZEROES + 4096];
    let skip = storage.as_ptr().align_offset(4096);
    let zeroes = &storage[skip..skip + ZEROES];
    let (mut at, end) = (range.at.0, range.at.0 + range.len);
    while at < end {
        let n = (end - at).min(ZEROES as u64) as usize;
        match rustix::io::pwrite(&range.target.file, &zeroes[..n], at) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(n) => at += n as u64,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn ignore_unsupported(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::OPNOTSUPP | Errno::NOTTY) => Ok(()),
        result => result,
    }
}

fn fallocate(range: &Range<'_>, flags: FallocateFlags) -> Result<(), Errno> {
    loop {
        match rustix::fs::fallocate(&range.target.file, flags, range.at.0, range.len) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// `_IO(0x12, 119)` and `_IO(0x12, 127)` of `linux/fs.h`.
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKZEROOUT: libc::Ioctl = 0x127f;

#[expect(unsafe_code, reason = "rustix has no BLKDISCARD and BLKZEROOUT")]
fn ioctl_range(range: &Range<'_>, request: libc::Ioctl) -> Result<(), Errno> {
    let numbers = [range.at.0, range.len];
    // SAFETY: both requests read two 64-bit numbers, start and length in bytes.
    match unsafe { libc::ioctl(range.target.file.as_raw_fd(), request, numbers.as_ptr()) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}
