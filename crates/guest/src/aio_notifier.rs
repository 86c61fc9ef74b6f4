//! Sends signals that cannot block the sender, even if a front-end changes the flags of the descriptor.
//!
//! A write obeys the flags of the open file, and the front-end has the same file open. The kernel itself
//! ignores these flags: when an operation of Linux AIO ends, the kernel adds one to the event counter named
//! in the operation, or leaves a full counter unchanged (`eventfd_signal`). Each signal is therefore a read
//! of zero bytes from an empty file. It takes about five times as long as a write.

#![expect(unsafe_code, reason = "libc has no wrappers for Linux AIO")]

use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

use libc::{c_long, c_ulong};
use rustix::fs::{MemfdFlags, memfd_create};

/// Sends the signals of one thread.
#[derive(Default)]
pub(crate) struct AioNotifier(OnceCell<Context>);

struct Context {
    id: c_ulong,
    empty: OwnedFd,
}

/// `struct iocb` of `linux/aio_abi.h`.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    _reserved: u64,
    flags: u32,
    event: u32,
}

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

impl AioNotifier {
    /// Adds one to an event counter. A full counter stays full, which has the same effect.
    ///
    /// # Errors
    /// The descriptor is not an event counter, or the machine has no Linux AIO contexts left (fs.aio-max-nr).
    pub fn notify(&self, event: &OwnedFd) -> io::Result<()> {
        let context = match self.0.get() {
            Some(context) => context,
            None => {
                let context = Context::new()?;
                self.0.get_or_init(|| context)
            }
        };
        context.notify(event)
    }
}

impl Context {
    fn new() -> io::Result<Self> {
        let empty = memfd_create("ringdisk", MemfdFlags::CLOEXEC)?;
        let mut id: c_ulong = 0;
        // SAFETY: the kernel writes one number to `id`.
        match unsafe { libc::syscall(libc::SYS_io_setup, 1 as c_long, &raw mut id) } {
            0 => Ok(Self { id, empty }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn notify(&self, event: &OwnedFd) -> io::Result<()> {
        let mut iocb = Iocb {
            opcode: IOCB_CMD_PREAD,
            fd: self.empty.as_raw_fd() as u32,
            flags: IOCB_FLAG_RESFD,
            event: event.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let mut batch = [&raw mut iocb];
        // SAFETY: there is one pointer, to a control block that outlives the call and names no memory.
        let taken = unsafe {
            libc::syscall(
                libc::SYS_io_submit,
                self.id,
                1 as c_long,
                batch.as_mut_ptr(),
            )
        };
        if taken != 1 {
            return Err(io::Error::last_os_error());
        }
        // `struct io_event`.
        let mut done = [0u64; 4];
        // SAFETY: the kernel writes one event. It is available at once, because the read waits for nothing.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.id,
                1 as c_long,
                1 as c_long,
                done.as_mut_ptr(),
                ptr::null::<libc::timespec>(),
            );
        }
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: this value owns the context, and nothing uses the context after this.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn notification_adds_one_unless_counter_is_full() {
        let notifier = AioNotifier::default();
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        let mut count = [0; 8];
        for _ in 0..1000 {
            notifier.notify(&event).unwrap();
        }
        rustix::io::read(&event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1000);
        // Now a write to the counter would block.
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..3 {
            notifier.notify(&event).unwrap();
        }
        rustix::io::read(&event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), u64::MAX);
        let none = memfd_create("none", MemfdFlags::CLOEXEC).unwrap();
        assert!(notifier.notify(&none).is_err());
        notifier.notify(&event).unwrap();
    }
}
