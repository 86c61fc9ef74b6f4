use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use block::FileOffset;
use rustix::fs::{FallocateFlags, fallocate};

/// A file or block device, as an image reads and writes its own tables in it.
///
/// Calls block; they are made from threads that may. Any number of them come at the same time, for
/// ranges that may touch but are never written twice at once. Guest data does not come this way.
///
/// Whoever implements it for files that need aligned I/O aligns: an image writes whole
/// [`block`](Self::block)s, but reads what it likes.
pub trait Storage: Send + Sync {
    /// Fills `to` from there on, as far as the file reaches; returns how many bytes that were.
    ///
    /// # Errors
    /// What the kernel said.
    fn read_at(&self, at: FileOffset, to: &mut [u8]) -> io::Result<usize>;

    /// Writes all of `from`; a file grows where it must.
    ///
    /// # Errors
    /// What the kernel said; any part may have been written.
    fn write_at(&self, at: FileOffset, from: &[u8]) -> io::Result<()>;

    /// Returns once every write that has completed, by this or another path, is on stable storage.
    ///
    /// # Errors
    /// What the kernel said; what was written since the last success may be lost.
    fn flush(&self) -> io::Result<()>;

    /// Whether a failed [`flush`](Self::flush) forgets what it has not written, as that of the page cache
    /// does: the next one succeeds, and it is lost all the same.
    fn forgets(&self) -> bool;

    /// Bytes.
    ///
    /// # Errors
    /// What the kernel said.
    fn size(&self) -> io::Result<u64>;

    /// Makes a regular file longer or shorter; what is added reads as zeroes.
    ///
    /// # Errors
    /// What the kernel said; `Unsupported` for what has a fixed length.
    fn set_size(&self, size: u64) -> io::Result<()>;

    /// Gives the space back; from then on, the range reads as zeroes.
    ///
    /// # Errors
    /// What the kernel said; `Unsupported` if it can't.
    fn punch(&self, at: FileOffset, len: u64) -> io::Result<()>;

    /// What a write must be a multiple of in place and length to disturb nothing beside it, in
    /// bytes; a power of two.
    fn block(&self) -> u32;
}

/// A file that is read and written through the page cache, and never made durable: for a journal, and for tests.
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

    fn forgets(&self) -> bool {
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

    fn block(&self) -> u32 {
        1
    }
}

/// Fills `to`; what lies behind the end of the file reads as zeroes.
pub(crate) fn read_padded(
    storage: &dyn Storage,
    at: FileOffset,
    to: &mut [u8],
) -> io::Result<usize> {
    let n = storage.read_at(at, to)?.min(to.len());
    to[n..].fill(0);
    Ok(n)
}
