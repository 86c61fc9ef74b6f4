//! Whether the kernel performs a file's operations without blocking the thread that submits them.
//!
//! io_uring and Linux AIO are asynchronous only as far as the file system is. Where a server answers, it may
//! not be: on FUSE without `FUSE_ASYNC_DIO`, the submission of a read ends when the server has answered. On
//! NFS, io_uring gives each operation to one of a few kernel threads, which all files of an I/O thread share.
//! A server that does not answer then blocks the other disks too.

use std::os::fd::{AsRawFd, BorrowedFd};

use block::{Aio, Backing};
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use rustix::fs::fstatfs;

use crate::inline::sleeps;

/// Where a file's operations are performed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Submission {
    /// By this kernel: submission does not wait.
    Local,
    /// By a server, or by a file system that is not known; submission has not waited when it was tried.
    Served,
    /// The same, and the thread that submitted an operation waited for it.
    Blocks,
}

impl Submission {
    /// Finds out about an open file. May block as long as a read of it.
    pub fn of(file: BorrowedFd<'_>, backing: Backing) -> Self {
        match backing {
            Backing::BlockDevice => Self::Local,
            Backing::File if is_local(file) => Self::Local,
            Backing::File if submits_without_sleep(file) => Self::Served,
            Backing::File => Self::Blocks,
        }
    }

    /// The method to attach the file with, if the operator wants this one.
    pub fn method(self, wanted: Aio) -> Aio {
        match (self, wanted) {
            (Self::Local, _) | (Self::Served, Aio::IoUring | Aio::Native) => wanted,
            _ => Aio::Threads,
        }
    }
}

/// Whether a file is on a file system that needs nothing but this kernel and its devices.
fn is_local(file: BorrowedFd<'_>) -> bool {
    const LOCAL: [u32; 22] = [
        0xef53,      // ext2, ext3, ext4
        0x5846_5342, // XFS
        0x9123_683e, // Btrfs
        0x0102_1994, // tmpfs
        0x8584_58f6, // ramfs
        0xf2f5_2010, // F2FS
        0x2fc1_2fc1, // ZFS
        0xca45_1a4e, // bcachefs
        0x0116_1970, // GFS2
        0x7461_636f, // OCFS2
        0x794c_7630, // overlayfs; its layers are nearly always local
        0x3153_464a, // JFS
        0x3434,      // NILFS2
        0x5265_4973, // ReiserFS
        0x7366_746e, // NTFS
        0x2011_bab0, // exFAT
        0x4d44,      // FAT
        0x2405_1905, // UBIFS
        0xe0f5_e1e2, // EROFS
        0x7371_7368, // SquashFS
        0x9660,      // ISO 9660
        0x1501_3346, // UDF
    ];
    fstatfs(file).is_ok_and(|stat| LOCAL.contains(&(stat.f_type as u32)))
}

/// Submits a read of the file's first page, and tells whether that was possible without waiting for it.
fn submits_without_sleep(file: BorrowedFd<'_>) -> bool {
    const PAGE: usize = 4096;
    let Ok(mut ring) = IoUring::new(2) else {
        return false;
    };
    // O_DIRECT requires an aligned buffer.
    let mut buffer = vec![0; 2 * PAGE];
    let skip = buffer.as_ptr().align_offset(PAGE);
    let page = buffer[skip..skip + PAGE].as_mut_ptr();
    let read = opcode::Read::new(Fd(file.as_raw_fd()), page, PAGE as u32);
    // SAFETY: the file and the buffer outlive the operation: its completion is awaited below, and the buffer
    // is leaked if that fails.
    #[expect(unsafe_code, reason = "submission queue entries name memory")]
    let queued = unsafe { ring.submission().push(&read.build()) };
    let before = sleeps();
    let submitted = queued.is_ok() && ring.submit().is_ok_and(|n| n == 1);
    let slept = sleeps() != before;
    if submitted {
        while ring.completion().next().is_none() {
            match ring.submit_and_wait(1) {
                Err(e) if e.raw_os_error() != Some(libc::EINTR) => {
                    std::mem::forget(buffer);
                    return false;
                }
                _ => {}
            }
        }
    }
    submitted && !slept
}
