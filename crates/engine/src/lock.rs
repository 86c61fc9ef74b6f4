//! File locks that are compatible with QEMU's locks (QEMU's `block/file-posix.c`, "image locking").
//!
//! QEMU holds a shared lock on byte 100+p for each permission p that it uses, and on byte 200+p for each
//! permission that it denies to other processes. A process that opens a file tests the bytes that conflict
//! with its use.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const USED: i64 = 100;
const NOT_SHARED: i64 = 200;

const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// Locks an open file as a running VM does. Other processes may not write to it. Processes that need it
/// unchanged while they read it (`qemu-img convert`) are refused unless they override the lock (`-U`). The
/// lock ends when the last duplicate of the descriptor is closed, also if the process dies.
///
/// Returns whether the lock was granted; `false` if another process holds a conflicting lock.
///
/// # Errors
/// The file system does not support such locks.
pub(crate) fn acquire(file: BorrowedFd<'_>, writable: bool) -> io::Result<bool> {
    // Lock first, then test: if two processes start at the same time, at least one sees the other.
    share(file)?;
    if writable {
        set(file, USED + WRITE, libc::F_RDLCK)?;
    }
    let free = is_free(file, writable)?;
    if !free {
        // Release our lock so that it does not block the next attempt of the process that may use the file.
        release(file)?;
    }
    Ok(free)
}

/// Whether no other open file description holds a conflicting lock; the locks of this descriptor do not
/// count.
///
/// # Errors
/// The file system does not support such locks.
pub(crate) fn is_free(file: BorrowedFd<'_>, writable: bool) -> io::Result<bool> {
    let conflicting = [NOT_SHARED + CONSISTENT_READ, USED + WRITE, USED + RESIZE];
    let to_write = writable.then_some(NOT_SHARED + WRITE);
    for byte in conflicting.into_iter().chain(to_write) {
        if held_by_other(file, byte)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether another open file description keeps everybody from writing to the file, and none writes to it: it is a part of an
/// image in use, or is being copied.
///
/// # Errors
/// The file system does not support such locks.
pub(crate) fn is_only_read(file: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(held_by_other(file, NOT_SHARED + WRITE)? && !held_by_other(file, USED + WRITE)?)
}

/// Takes a read lock as [`acquire`] does, but does not test for conflicts: the owner of the existing write
/// lock, whichever descriptor holds it, knows of this lock and has kept all other processes away.
///
/// # Errors
/// The file system does not support such locks.
pub(crate) fn share(file: BorrowedFd<'_>) -> io::Result<()> {
    let bytes = [
        USED + CONSISTENT_READ,
        NOT_SHARED + WRITE,
        NOT_SHARED + RESIZE,
    ];
    let mut bytes = bytes.iter();
    bytes.try_for_each(|&byte| set(file, byte, libc::F_RDLCK))
}

/// Releases the lock, for reading or writing.
///
/// # Errors
/// The file system does not support such locks.
pub(crate) fn release(file: BorrowedFd<'_>) -> io::Result<()> {
    let held = [
        USED + CONSISTENT_READ,
        USED + WRITE,
        NOT_SHARED + WRITE,
        NOT_SHARED + RESIZE,
    ];
    held.iter()
        .try_for_each(|&byte| set(file, byte, libc::F_UNLCK))
}

fn set(file: BorrowedFd<'_>, byte: i64, kind: i32) -> io::Result<()> {
    fcntl(file, libc::F_OFD_SETLK, &mut one_byte(byte, kind))
}

/// Whether another open file description has any lock on this byte; tested by asking for an exclusive lock.
fn held_by_other(file: BorrowedFd<'_>, byte: i64) -> io::Result<bool> {
    let mut lock = one_byte(byte, libc::F_WRLCK);
    fcntl(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

fn one_byte(byte: i64, kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

#[expect(unsafe_code, reason = "rustix has no open-file-description locks")]
fn fcntl(file: BorrowedFd<'_>, command: i32, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the commands read and write one `flock`.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
