use std::any::Any;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::{Aio, Backing, FileOffset};

/// A contiguous range of memory for the kernel to read or write, laid out like `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Address of the first byte in this process.
    pub addr: usize,
    /// Length in bytes.
    pub len: usize,
}

/// The number that the submitter gives an operation; its completion carries the same number. Bit 63 and bits
/// 56 to 58 are reserved for the engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(pub u64);

/// A file that was attached to an engine with [`Engine::attach`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub u32);

/// Disk storage that is not a file: a library moves the bytes, and an engine that knows this type of storage
/// calls the library.
pub trait Remote: Any + Send + Sync {
    /// Makes every completed write durable, and waits until it is.
    ///
    /// # Errors
    /// The writes could not be made durable.
    fn sync(&self) -> io::Result<()>;

    /// The parts of a range that may have data. Blocks. Writes that have completed before are seen. `None` if the storage
    /// does not know.
    ///
    /// # Errors
    /// The storage could not be asked.
    fn data_in(&self, at: u64, len: u64) -> io::Result<Option<DataExtents>>;
}

/// Where a part of a disk may have data. Elsewhere it reads as zeroes, and has no space of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DataExtents {
    /// Where the part begins, in bytes.
    pub from: u64,
    /// Where it ends.
    pub to: u64,
    /// The beginning and end of each extent with data: in order, apart, not empty, and inside the part.
    pub data: Vec<(u64, u64)>,
}

impl DataExtents {
    /// The length of the beginning of a range that is in one state, and whether it has data. `None` if it begins outside of
    /// the part.
    pub fn beginning(&self, at: u64, len: u64) -> Option<(u64, bool)> {
        if !(self.from..self.to).contains(&at) {
            return None;
        }
        let next = self.data.partition_point(|&(_, end)| end <= at);
        let (end, is_data) = match self.data.get(next) {
            Some(&(begin, end)) if begin <= at => (end, true),
            Some(&(begin, _)) => (begin, false),
            None => (self.to, false),
        };
        Some((len.min(end - at), is_data))
    }
}

/// One I/O operation on a file.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// File to memory. May complete short.
    Read {
        /// Offset in the file.
        at: FileOffset,
        /// Destination in memory; at least one segment.
        to: &'a [Segment],
    },
    /// Memory to file. May complete short.
    Write {
        /// Offset in the file.
        at: FileOffset,
        /// Source in memory; at least one segment.
        from: &'a [Segment],
        /// Complete only when these bytes are on stable storage.
        stable: bool,
    },
    /// Complete only when every write that has completed before is on stable storage.
    Flush,
    /// Deallocate the range. A part that cannot be deallocated stays as it is; that is not an error.
    Discard {
        /// Offset in the file.
        at: FileOffset,
        /// Length in bytes.
        len: u64,
        /// Complete only when the result is on stable storage.
        stable: bool,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// Offset in the file.
        at: FileOffset,
        /// Length in bytes.
        len: u64,
        /// The range may be deallocated.
        unmap: bool,
        /// Complete only when the result is on stable storage.
        stable: bool,
    },
}

/// A finished operation.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The token that the operation was submitted with.
    pub token: Token,
    /// Number of bytes moved, or a negated errno.
    pub result: i32,
}

/// Moves bytes between memory and files, with many operations in flight. One thread owns an engine.
///
/// The submitter checks `room` before it submits, validates offsets and lengths against the disk, and does
/// not expect the engine to split anything: an engine performs one operation per call and reports the
/// kernel's result.
pub trait Engine {
    /// Attaches a file. The file stays open and its id stays valid until [`detach`](Self::detach). An engine
    /// with several I/O methods uses the one that `aio` selects.
    ///
    /// # Errors
    /// The file table is full, the kernel refused, or the file does not support this method.
    fn attach(&mut self, file: &Arc<OwnedFd>, backing: Backing, aio: Aio) -> io::Result<FileId>;

    /// Attaches storage that is not a file; its id is used like a file's.
    ///
    /// # Errors
    /// The engine does not know this type of storage, or its table is full.
    fn attach_remote(&mut self, remote: &Arc<dyn Remote>) -> io::Result<FileId>;

    /// Detaches a file that has no operation in flight.
    fn detach(&mut self, file: FileId);

    /// Pins the pages of this memory, so that each operation on it costs less. An engine that does not
    /// benefit from this does nothing.
    ///
    /// # Errors
    /// The pages cannot be pinned; operations work as before.
    ///
    /// # Safety
    /// The memory must stay mapped until [`unregister`](Self::unregister) is called with the same memory, and
    /// none of its pages may be replaced: the engine would continue to use the old page.
    #[expect(unsafe_code, reason = "a promise about memory that this call names")]
    unsafe fn register(&mut self, memory: &[Segment]) -> io::Result<()>;

    /// Undoes a [`register`](Self::register) that succeeded. No operation may be in flight on this memory.
    fn unregister(&mut self, memory: &[Segment]);

    /// Reports `token` whenever `fd` becomes readable, until [`unwatch`](Self::unwatch). The engine never
    /// reads from the descriptor.
    ///
    /// # Errors
    /// The kernel refused.
    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token) -> io::Result<()>;

    /// Stops reporting `token`.
    ///
    /// # Errors
    /// The kernel refused.
    fn unwatch(&mut self, token: Token) -> io::Result<()>;

    /// Number of operations that can be submitted before completions must be reaped.
    fn room(&self) -> usize;

    /// Number of submitted operations whose completion has not been reaped.
    fn in_flight(&self) -> usize;

    /// Whether a [`push`](Self::push) is likely to yield a completion. This is cheap and never enters the
    /// kernel: the submitter calls it in a loop while it polls.
    fn ready(&mut self) -> bool;

    /// Queues an operation; [`push`](Self::push) or [`wait`](Self::wait) submits it to the kernel.
    ///
    /// # Safety
    /// The memory of `op`'s segments must stay valid until the completion with `token` has been reaped, and
    /// must be writable if `op` is a read. The slice of segments must also stay valid and must not move until
    /// then. The exception is a slice of one segment, which the engine copies.
    #[expect(
        unsafe_code,
        reason = "the kernel writes to memory that this call names"
    )]
    unsafe fn submit(&mut self, file: FileId, op: Op<'_>, token: Token);

    /// Submits all queued operations to the kernel, without waiting.
    ///
    /// # Errors
    /// The kernel refused; no queued operation is lost.
    fn push(&mut self) -> io::Result<()>;

    /// Submits all queued operations to the kernel and sleeps until there is something to reap.
    ///
    /// # Errors
    /// The kernel refused; no queued operation is lost.
    fn wait(&mut self) -> io::Result<()>;

    /// Moves completions to `out`, up to its capacity, without entering the kernel. There may be completions
    /// before the first push, because an engine may perform an operation as it is submitted.
    fn reap(&mut self, out: &mut Vec<Completion>);
}
