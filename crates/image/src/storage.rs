use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use block::FileOffset;
use rustix::fs::{FallocateFlags, fallocate};

/// A file or block device, as an image reads and writes its own tables in it.
///
/// Calls block, so only threads that may block make them. Calls run concurrently; no range is written by
/// two calls at once. Guest data does not take this path.
///
/// An image writes whole [`block`](Self::block)s, but reads at any offset and length. An implementation for
/// files that need aligned I/O must align reads itself.
pub trait Storage: Send + Sync {
    /// Reads into `to` until it is full or the file ends; returns the number of bytes read.
    ///
    /// # Errors
    /// What the kernel said.
    fn read_at(&self, at: FileOffset, to: &mut [u8]) -> io::Result<usize>;

    /// Writes all of `from`; a regular file grows if necessary.
    ///
    /// # Errors
    /// What the kernel said; any part may have been written.
    fn write_at(&self, at: FileOffset, from: &[u8]) -> io::Result<()>;

    /// Returns once every write that has completed, by this or another path, is on stable storage.
    ///
    /// # Errors
    /// What the kernel said; what was written since the last success may be lost.
    fn flush(&self) -> io::Result<()>;

    /// Whether a failed [`flush`](Self::flush) drops the data that it could not write, as the page cache
    /// does: the next flush succeeds although that data is lost.
    fn loses_data_on_failed_flush(&self) -> bool;

    /// The size in bytes.
    ///
    /// # Errors
    /// What the kernel said.
    fn size(&self) -> io::Result<u64>;

    /// Sets the length of a regular file; an added part reads as zeroes.
    ///
    /// # Errors
    /// What the kernel said; `Unsupported` for a block device, which has a fixed length.
    fn set_size(&self, size: u64) -> io::Result<()>;

    /// Frees the space of a range, which reads as zeroes afterwards.
    ///
    /// # Errors
    /// What the kernel said; `Unsupported` if it can't.
    fn punch(&self, at: FileOffset, len: u64) -> io::Result<()>;

    /// The unit of writes in bytes, a power of two: a write whose offset and length are multiples of it
    /// changes no byte outside its range.
    fn block_size(&self) -> u32;
}

/// A file used through the page cache and never made durable: for journals and tests.
pub struct PlainFile(pub File);

impl Storage for PlainFile {
    fn read_at(&self, at: FileOffset, to: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < to.len() {
            match self.0.read_at(&mut to[done..], at.0 + done as u64)? {
                0 => break,
                n => done += n,
            }
        }
        Ok(done)
    }

    fn write_at(&self, at: FileOffset, from: &[u8]) -> io::Result<()> {
        self.0.write_all_at(from, at.0)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn loses_data_on_failed_flush(&self) -> bool {
        false
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.0.set_len(size)
    }

    fn punch(&self, at: FileOffset, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.0, flags, at.0, len)?)
    }

    fn block_size(&self) -> u32 {
        1
    }
}

/// Fills `to`, with zeroes after the end of the file; returns the number of bytes that the file had.
pub(crate) fn read_padded(
    storage: &dyn Storage,
    at: FileOffset,
    to: &mut [u8],
) -> io::Result<usize> {
    let n = storage.read_at(at, to)?.min(to.len());
    to[n..].fill(0);
    Ok(n)
}
