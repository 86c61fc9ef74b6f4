//! Linux AIO: `io_submit`, with completions read from the ring that the kernel maps into the process.
//!
//! `io_submit` does not block on an O_DIRECT file whose space is allocated while the device's queue has room.
//! When it does block, everything that its thread serves waits with it; therefore its time is measured.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use block::{Completion, Op, Segment, Token};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use thiserror::Error;
use tracing::warn;

/// Number of operations that the kernel accepts at a time; further operations wait here. The limit for the
/// whole machine is 65536 (fs.aio-max-nr). Each I/O thread takes `EVENTS_MAX` of that, or less if less is
/// left.
const EVENTS_MAX: u32 = 1024;
const EVENTS_MIN: u32 = 64;

/// Maximum number of operations in one `io_submit` call.
const BATCH: usize = 64;

/// Maximum length of an operation on one segment, in bytes. A longer operation completes short, and the
/// submitter continues it.
const LEN_MAX: usize = 1 << 30;

/// An `io_submit` call that takes this long has blocked, even allowing for other work of the processor.
const BLOCKED: Duration = Duration::from_millis(10);

/// Minimum time between two warnings about blocked calls.
const WARN_EACH: Duration = Duration::from_secs(60);

/// Why Linux AIO is not available.
#[derive(Debug, Error)]
pub enum LinuxAioError {
    /// Other users have exhausted the machine's limit.
    #[error(
        "Linux AIO has no contexts left (fs.aio-nr has reached fs.aio-max-nr); raise the limit with 'sysctl -w \
        fs.aio-max-nr=1048576'"
    )]
    Exhausted,
    /// A seccomp filter or a container runtime forbids it.
    #[error(
        "Linux AIO is forbidden here ({0}); a container or service manager filters the system call io_setup; \
        configure it to allow the call"
    )]
    Forbidden(io::Error),
    /// The kernel was built without Linux AIO.
    #[error("this kernel has no Linux AIO (CONFIG_AIO)")]
    Absent,
    /// Another error.
    #[error("Linux AIO cannot be set up: {cause}", cause = block::explain(.0, ""))]
    Other(io::Error),
}

impl LinuxAioError {
    /// Whether this was a lack of file descriptors, which says nothing about the method.
    pub(crate) fn is_limit(&self) -> bool {
        matches!(self, Self::Other(e) if block::is_out_of_descriptors(e))
    }
}

/// A context of Linux AIO and the operations that wait to be submitted to it.
pub(crate) struct LinuxAio {
    context: Context,
    /// Whether IOCB_CMD_FDSYNC is available (Linux 4.18); otherwise the caller must flush in another way.
    pub flushes: bool,
    event: OwnedFd,
    queued: VecDeque<Iocb>,
    /// Operations that the kernel refused at submission.
    failed: Vec<Completion>,
    /// Number of operations that are in the kernel or completed but not reaped.
    submitted: usize,
    warned: Option<Instant>,
    left_out: u32,
}

impl LinuxAio {
    pub fn new() -> Result<Self, LinuxAioError> {
        let context = Context::new()?;
        Ok(Self {
            flushes: context.flushes(),
            context,
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|e| LinuxAioError::Other(e.into()))?,
            queued: VecDeque::new(),
            failed: Vec::new(),
            submitted: 0,
            warned: None,
            left_out: 0,
        })
    }

    /// An eventfd that is written with each completion. It is never read.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Number of submitted operations whose completion has not been reaped.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.queued.len() + self.failed.len() + self.submitted
    }

    #[inline]
    pub fn ready(&self) -> bool {
        !self.failed.is_empty() || (self.submitted > 0 && self.context.ready())
    }

    /// Queues a read, a write or a flush.
    ///
    /// # Safety
    /// As for `block::Engine::submit`.
    #[expect(
        unsafe_code,
        reason = "the caller promises that the memory stays valid"
    )]
    pub unsafe fn submit(&mut self, fd: RawFd, op: Op<'_>, token: Token) {
        let mut iocb = Iocb {
            data: token.0,
            fd: fd as u32,
            flags: IOCB_FLAG_RESFD,
            event: self.event.as_raw_fd() as u32,
            ..Iocb::default()
        };
        match op {
            Op::Read { at, to } => {
                iocb.offset = at.0 as i64;
                iocb.transfer([IOCB_CMD_PREAD, IOCB_CMD_PREADV], to);
            }
            Op::Write { at, from, stable } => {
                iocb.offset = at.0 as i64;
                iocb.rw_flags = if stable { libc::RWF_DSYNC } else { 0 };
                iocb.transfer([IOCB_CMD_PWRITE, IOCB_CMD_PWRITEV], from);
            }
            Op::Flush => iocb.opcode = IOCB_CMD_FDSYNC,
            Op::Discard { .. } | Op::WriteZeroes { .. } => {
                unreachable!("Linux AIO has no such operations: threads do them")
            }
        }
        self.queued.push_back(iocb);
    }

    /// Submits as many operations as the kernel accepts.
    #[inline]
    pub fn push(&mut self) -> io::Result<()> {
        while !self.queued.is_empty() {
            if !self.push_batch()? {
                break;
            }
        }
        Ok(())
    }

    /// Submits one batch; returns whether the kernel may accept more.
    fn push_batch(&mut self) -> io::Result<bool> {
        let mut batch = [ptr::null_mut(); BATCH];
        let n = self.queued.len().min(BATCH);
        for (place, iocb) in batch.iter_mut().zip(self.queued.iter_mut()) {
            *place = iocb;
        }
        let start = Instant::now();
        // SAFETY: the pointers name control blocks that do not move during the call, and the kernel reads
        // them only during the call. The submitters guarantee that the memory named in them is valid until
        // their completions have been reaped.
        #[expect(unsafe_code, reason = "control blocks name memory")]
        let result = unsafe { self.context.submit(&mut batch[..n]) };
        let took = start.elapsed();
        if took >= BLOCKED {
            self.blocked(took);
        }
        match result {
            Ok(taken) => {
                self.queued.drain(..taken);
                self.submitted += taken;
                // If the kernel accepted fewer, the next attempt returns the reason.
                Ok(true)
            }
            // The kernel's queue is full: the remaining operations stay queued until one has completed.
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) && self.submitted > 0 => Ok(false),
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => Ok(false),
            Err(e) => self.refused(e),
        }
    }

    /// Handles an operation, the first in the queue, that the kernel does not accept.
    #[cold]
    fn refused(&mut self, e: io::Error) -> io::Result<bool> {
        let errno = e.raw_os_error().ok_or(e)?;
        if let Some(iocb) = self.queued.pop_front() {
            self.failed.push(Completion {
                token: Token(iocb.data),
                result: -errno,
            });
        }
        Ok(true)
    }

    #[cold]
    fn blocked(&mut self, took: Duration) {
        if self.warned.is_some_and(|at| at.elapsed() < WARN_EACH) {
            self.left_out = self.left_out.saturating_add(1);
            return;
        }
        let Some(first) = self.queued.front() else {
            return;
        };
        warn!(
            "{}: io_submit blocked this I/O thread and all its disks for {} ms; aio=native does \
             so where space is not allocated yet or the device's queue is full: allocate the file \
             ('fallocate -l SIZE FILE'), or use aio=io_uring or aio=threads ({} more of these left out)",
            path_of(first.fd),
            took.as_millis(),
            self.left_out
        );
        (self.warned, self.left_out) = (Some(Instant::now()), 0);
    }

    #[inline]
    pub fn reap(&mut self, out: &mut Vec<Completion>) {
        let n = self.failed.len().min(out.capacity() - out.len());
        out.extend(self.failed.drain(..n));
        if self.submitted > 0 {
            let before = out.len();
            self.context.reap(out);
            self.submitted -= out.len() - before;
        }
    }
}

fn path_of(fd: u32) -> String {
    match std::fs::read_link(format!("/proc/self/fd/{fd}")) {
        Ok(path) => path.display().to_string(),
        Err(_) => format!("file descriptor {fd}"),
    }
}

/// `aio_context_t`: the address at which the kernel mapped the completion ring.
struct Context(libc::c_ulong);

/// Header of the completion ring (`struct aio_ring` of the kernel, which libaio, fio and QEMU rely on).
#[repr(C)]
struct RingHead {
    id: u32,
    /// Number of events that the ring holds.
    count: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compatible: u32,
    incompatible: u32,
    header_bytes: u32,
}

const RING_MAGIC: u32 = 0xa10a_10a1;

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    data: u64,
    iocb: u64,
    result: i64,
    result_2: i64,
}

impl Context {
    #[expect(unsafe_code, reason = "libc has no wrapper for io_setup")]
    fn new() -> Result<Self, LinuxAioError> {
        let mut events = EVENTS_MAX;
        loop {
            let mut id: libc::c_ulong = 0;
            // SAFETY: the kernel writes one number to `id`.
            if unsafe { libc::syscall(libc::SYS_io_setup, events, &raw mut id) } == 0 {
                return Ok(Self(id));
            }
            let e = io::Error::last_os_error();
            match e.raw_os_error() {
                Some(libc::EAGAIN) if events > EVENTS_MIN => events /= 2,
                Some(libc::EAGAIN) => return Err(LinuxAioError::Exhausted),
                Some(libc::EPERM | libc::EACCES) => return Err(LinuxAioError::Forbidden(e)),
                Some(libc::ENOSYS) => return Err(LinuxAioError::Absent),
                _ => return Err(LinuxAioError::Other(e)),
            }
        }
    }

    /// Tests, on a file in memory, whether the kernel can flush through Linux AIO.
    fn flushes(&self) -> bool {
        let Ok(file) = memfd_create("ringdisk", MemfdFlags::CLOEXEC) else {
            return false;
        };
        let mut iocb = Iocb {
            opcode: IOCB_CMD_FDSYNC,
            fd: file.as_raw_fd() as u32,
            ..Iocb::default()
        };
        // SAFETY: the control block outlives the call and names no memory.
        #[expect(unsafe_code, reason = "control blocks name memory")]
        let submitted = unsafe { self.submit(&mut [&raw mut iocb]) };
        let mut done = Vec::with_capacity(1);
        while submitted.is_ok() && done.is_empty() {
            self.get_events(1, &mut done);
        }
        done.first().is_some_and(|c| c.result == 0)
    }

    /// The mapped ring, if it has the known format.
    #[inline]
    #[expect(unsafe_code, reason = "the ring is memory that the kernel mapped")]
    fn ring(&self) -> Option<&RingHead> {
        // SAFETY: a context's number is the address of its ring. The ring is at least one page and stays
        // mapped until `io_destroy`, which only `drop` calls. The kernel changes only `head` and `tail`.
        let ring = unsafe { &*(self.0 as *const RingHead) };
        let known = ring.magic == RING_MAGIC
            && ring.incompatible == 0
            && ring.header_bytes as usize == size_of::<RingHead>();
        known.then_some(ring)
    }

    /// Whether there is a completion; also true if only the kernel can tell.
    #[inline]
    fn ready(&self) -> bool {
        self.ring().is_none_or(|ring| {
            ring.head.load(Ordering::Relaxed) != ring.tail.load(Ordering::Acquire)
        })
    }

    #[expect(unsafe_code, reason = "libc has no wrapper for io_submit")]
    unsafe fn submit(&self, batch: &mut [*mut Iocb]) -> io::Result<usize> {
        // SAFETY: the caller's promise; the kernel reads as many pointers as the batch has.
        let taken = unsafe {
            libc::syscall(
                libc::SYS_io_submit,
                self.0,
                batch.len() as libc::c_long,
                batch.as_mut_ptr(),
            )
        };
        usize::try_from(taken).map_err(|_| io::Error::last_os_error())
    }

    #[inline]
    fn reap(&self, out: &mut Vec<Completion>) {
        let Some(ring) = self.ring() else {
            return self.get_events(0, out);
        };
        let tail = ring.tail.load(Ordering::Acquire);
        let mut head = ring.head.load(Ordering::Relaxed);
        let events = ptr::from_ref(ring).wrapping_add(1).cast::<Event>();
        while head != tail && out.len() < out.capacity() {
            // SAFETY: the ring's header is followed by `count` events; `head` is less than `count`, and the
            // kernel has finished the events before `tail`.
            #[expect(unsafe_code, reason = "the ring is memory that the kernel mapped")]
            let event = unsafe { events.add((head % ring.count) as usize).read() };
            out.push(event.into());
            head = (head + 1) % ring.count;
        }
        // The kernel may now reuse the entries before `head`.
        ring.head.store(head, Ordering::Release);
    }

    /// Reaps with a system call, and waits until there are at least `least` completions.
    #[cold]
    #[expect(unsafe_code, reason = "libc has no wrapper for io_getevents")]
    fn get_events(&self, least: usize, out: &mut Vec<Completion>) {
        let mut events = [Event::default(); BATCH];
        let most = events.len().min(out.capacity() - out.len());
        // SAFETY: the kernel writes at most `most` events.
        let n = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.0,
                least as libc::c_long,
                most as libc::c_long,
                events.as_mut_ptr(),
                // No timeout; it has no effect if `least` is 0.
                ptr::null::<libc::timespec>(),
            )
        };
        // An error loses nothing: the events stay in the ring.
        let n = usize::try_from(n).unwrap_or(0);
        out.extend(events[..n].iter().map(|&event| Completion::from(event)));
    }
}

impl Drop for Context {
    /// The kernel waits for the operations in flight.
    #[expect(unsafe_code, reason = "libc has no wrapper for io_destroy")]
    fn drop(&mut self) {
        // SAFETY: this value owns the context, and nothing uses the context or its ring after this.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

impl From<Event> for Completion {
    #[inline]
    fn from(event: Event) -> Self {
        Self {
            token: Token(event.data),
            // One operation transfers less than 2 GiB, and an errno is small.
            result: event.result as i32,
        }
    }
}

/// `struct iocb` of `linux/aio_abi.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Iocb {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    address: u64,
    /// Length in bytes, or number of segments.
    length: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    /// The eventfd that is signalled on completion.
    event: u32,
}

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_FDSYNC: u16 = 3;
const IOCB_CMD_PREADV: u16 = 7;
const IOCB_CMD_PWRITEV: u16 = 8;
const IOCB_FLAG_RESFD: u32 = 1;

impl Iocb {
    fn transfer(&mut self, [plain, vectored]: [u16; 2], segments: &[Segment]) {
        const { assert!(size_of::<Self>() == 64) };
        match segments {
            [one] => {
                self.opcode = plain;
                self.address = one.addr as u64;
                self.length = one.len.min(LEN_MAX) as u64;
            }
            many => {
                let (list, n) = crate::iovec::iovec(many);
                self.opcode = vectored;
                self.address = list as u64;
                self.length = n.into();
            }
        }
    }
}
