use std::any::Any;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::{Aio, Backing, FileOffset};

/// A stretch of memory that the kernel reads from or writes to, with the layout of `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte, an address of this process.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
}

/// The submitter's own number for an operation; it comes back with the completion. The highest bit
/// and bits 56 to 58 belong to the engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(pub u64);

/// A file that an engine was given by [`Engine::attach`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub u32);

/// What holds a disk's bytes where that is no file: a library of its own moves them, and an engine that knows
/// this kind of holder calls it.
pub trait Remote: Any + Send + Sync {
    /// Makes every write that has completed durable, waiting for it.
    ///
    /// # Errors
    /// It could not be made durable.
    fn sync(&self) -> io::Result<()>;
}

/// One movement of bytes between memory and a file.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// File to memory. May come back short.
    Read {
        /// Where in the file.
        at: FileOffset,
        /// Where in memory; at least one segment.
        to: &'a [Segment],
    },
    /// Memory to file. May come back short.
    Write {
        /// Where in the file.
        at: FileOffset,
        /// Where in memory; at least one segment.
        from: &'a [Segment],
        /// Complete only once these bytes are on stable storage.
        stable: bool,
    },
    /// Complete only once every write that completed before is on stable storage.
    Flush,
    /// Give the space back. What cannot be given back stays as it is, which is no error.
    Discard {
        /// Where in the file.
        at: FileOffset,
        /// Bytes.
        len: u64,
        /// Complete only once the result is on stable storage.
        stable: bool,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// Where in the file.
        at: FileOffset,
        /// Bytes.
        len: u64,
        /// The space may be given back.
        unmap: bool,
        /// Complete only once the result is on stable storage.
        stable: bool,
    },
}

/// An operation that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The submitter's number for it.
    pub token: Token,
    /// Bytes moved, or a negated errno.
    pub result: i32,
}

/// Moves bytes between memory and files, many operations at a time. One thread owns it.
///
/// The submitter checks `room` before it submits, validates offsets and lengths against the disk,
/// and splits nothing: an engine does one operation per call and reports what the kernel said.
pub trait Engine {
    /// Makes a file known, which stays open until [`detach`](Self::detach); so long the id is valid. Its bytes are moved
    /// as `aio` says, by an engine that knows several ways.
    ///
    /// # Errors
    /// The table of files is full, the kernel refused, or the file cannot be served that way.
    fn attach(&mut self, file: &Arc<OwnedFd>, backing: Backing, aio: Aio) -> io::Result<FileId>;

    /// The same for what is no file; its id is used like that of one.
    ///
    /// # Errors
    /// The engine does not know this kind, or has no room for it.
    fn attach_remote(&mut self, remote: &Arc<dyn Remote>) -> io::Result<FileId>;

    /// Forgets a file that has nothing in flight.
    fn detach(&mut self, file: FileId);

    /// Prepares for operations on this memory, by pinning its pages, so that each of them costs
    /// less. An engine that cannot gain by it does nothing.
    ///
    /// # Errors
    /// The pages cannot be pinned; operations work as before.
    ///
    /// # Safety
    /// Until [`unregister`](Self::unregister) with the same memory, it must stay mapped, and no page
    /// of it may be replaced by another one: the engine would go on with the old one.
    #[expect(unsafe_code, reason = "a promise about memory that this call names")]
    unsafe fn register(&mut self, memory: &[Segment]) -> io::Result<()>;

    /// Undoes a [`register`](Self::register) that succeeded. Nothing in this memory is in flight.
    fn unregister(&mut self, memory: &[Segment]);

    /// Reports `token` whenever `fd` becomes readable, until [`unwatch`](Self::unwatch). The
    /// descriptor is never read from.
    ///
    /// # Errors
    /// The kernel refused.
    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token) -> io::Result<()>;

    /// Stops reporting `token`.
    ///
    /// # Errors
    /// The kernel refused.
    fn unwatch(&mut self, token: Token) -> io::Result<()>;

    /// How many operations can be submitted before completions must be reaped.
    fn room(&self) -> usize;

    /// Operations submitted whose completion has not been reaped.
    fn in_flight(&self) -> usize;

    /// Whether a [`push`](Self::push) is likely to bring something to reap. Cheap, and never enters
    /// the kernel: it is asked again and again while the submitter looks out for a completion.
    fn ready(&mut self) -> bool;

    /// Queues an operation; [`push`](Self::push) or [`wait`](Self::wait) hands it to the kernel.
    ///
    /// # Safety
    /// The memory that `op`'s segments name must stay valid until the completion with `token` has been
    /// reaped, and must be writable if `op` is a read. The slice of segments itself must stay valid
    /// and not move until then too, unless it has only one, which the engine copies.
    #[expect(
        unsafe_code,
        reason = "the kernel writes to memory that this call names"
    )]
    unsafe fn submit(&mut self, file: FileId, op: Op<'_>, token: Token);

    /// Hands what is queued to the kernel, without waiting.
    ///
    /// # Errors
    /// The kernel refused; nothing that was queued is lost.
    fn push(&mut self) -> io::Result<()>;

    /// Hands what is queued to the kernel and sleeps until there is something to reap.
    ///
    /// # Errors
    /// The kernel refused; nothing that was queued is lost.
    fn wait(&mut self) -> io::Result<()>;

    /// Moves completions to `out`, at most up to its capacity, without entering the kernel. Some may
    /// be there before anything was pushed: an engine may do an operation where it is submitted.
    fn reap(&mut self, out: &mut Vec<Completion>);
}
