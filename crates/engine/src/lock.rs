//! File locks that QEMU's own locks respect (QEMU's `block/file-posix.c`, "image locking").
//!
//! QEMU holds a shared lock on byte 100+p for each permission p that it uses and on byte 200+p for
//! each that it does not let others have. Whoever opens a file tests the bytes that conflict.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const USED: i64 = 100;
const NOT_SHARED: i64 = 200;

const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// Locks an open file as a running VM does: others may not write to it, and those that want it to stay
/// unchanged while they read (`qemu-img convert`) are refused unless they say otherwise (`-U`). The lock ends with the last duplicate
/// of the descriptor, also when the process dies.
///
/// Returns whether the lock was granted; `false` if somebody holds one that conflicts.
///
/// # Errors
/// The file system does not know such locks.
pub(crate) fn acquire(file: BorrowedFd<'_>, writable: bool) -> io::Result<bool> {
    let used = match writable {
        true => &[CONSISTENT_READ, WRITE][..],
        false => &[CONSISTENT_READ],
    };
    let not_shared = [WRITE, RESIZE];
    let ours = || {
        let used = used.iter().map(|p| USED + p);
        used.chain(not_shared.iter().map(|p| NOT_SHARED + p))
    };
    let conflicting = || {
        let used = used.iter().map(|p| NOT_SHARED + p);
        used.chain(not_shared.iter().map(|p| USED + p))
    };
    // Take first and test then: of two that start at once, at least one sees the other.
    for byte in ours() {
        set(file, byte, libc::F_RDLCK)?;
    }
    for byte in conflicting() {
        if held_by_other(file, byte)? {
            // What we hold must not keep the rightful owner's next one away.
            ours().try_for_each(|byte| set(file, byte, libc::F_UNLCK))?;
            return Ok(false);
        }
    }
    Ok(true)
}

/// Gives the lock up, whichever it was.
///
/// # Errors
/// The file system does not know such locks.
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

/// Whether somebody else has any lock on this byte: an exclusive one would not be granted.
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
