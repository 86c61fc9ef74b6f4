//! Files as images use them: to read and write their tables.

use std::io;
use std::sync::Arc;

use block::{Backing, FileOffset};
use engine::DiskFile;
use image::Storage;
use rustix::fs::{FallocateFlags, fallocate, ftruncate};
use rustix::io::{Errno, pread, pwrite};

/// A file that is read and written by plain system calls, with the alignment that it requires.
pub struct FileStorage {
    pub file: Arc<DiskFile>,
    /// Whether it is made durable when that is asked for; not with `cache=unsafe`.
    pub flushes: bool,
}

impl FileStorage {
    /// What offsets and lengths must be multiples of, and addresses too.
    fn unit(&self) -> usize {
        let facts = self.file.facts();
        facts.length_alignment.max(facts.address_alignment) as usize
    }
}

impl Storage for FileStorage {
    fn read_at(&self, at: FileOffset, to: &mut [u8]) -> io::Result<usize> {
        let unit = self.unit();
        let address = to.as_ptr().align_offset(unit);
        if address == 0 && to.len().is_multiple_of(unit) && at.0.is_multiple_of(unit as u64) {
            return read(&self.file, at.0, to);
        }
        let skip = (at.0 % unit as u64) as usize;
        let mut buffer = Aligned::new((skip + to.len()).next_multiple_of(unit), unit);
        let n = read(&self.file, at.0 - skip as u64, buffer.bytes())?;
        let n = n.saturating_sub(skip).min(to.len());
        to[..n].copy_from_slice(&buffer.bytes()[skip..skip + n]);
        Ok(n)
    }

    fn write_at(&self, at: FileOffset, from: &[u8]) -> io::Result<()> {
        let unit = self.unit();
        if unit == 1 {
            return write(&self.file, at.0, from);
        }
        let mut buffer = Aligned::new(from.len(), unit);
        buffer.bytes().copy_from_slice(from);
        write(&self.file, at.0, buffer.bytes())
    }

    fn flush(&self) -> io::Result<()> {
        if self.flushes {
            self.file.sync()
        } else {
            Ok(())
        }
    }

    fn loses_data_on_failed_flush(&self) -> bool {
        self.flushes && self.file.is_cached()
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        match self.file.backing() {
            Backing::File => Ok(ftruncate(&self.file, size)?),
            Backing::BlockDevice => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn punch(&self, at: FileOffset, len: u64) -> io::Result<()> {
        if self.file.facts().discard_granularity == 0 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, at.0, len)?)
    }

    fn block_size(&self) -> u32 {
        self.file.facts().logical_block
    }
}

fn read(file: &DiskFile, at: u64, to: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < to.len() {
        match pread(file, &mut to[done..], at + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            // With O_DIRECT, what follows a piece that ends within a block: the end of the file.
            Err(Errno::INVAL) if done > 0 => break,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(done)
}

fn write(file: &DiskFile, at: u64, from: &[u8]) -> io::Result<()> {
    let mut done = 0;
    while done < from.len() {
        match pwrite(file, &from[done..], at + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// A buffer that O_DIRECT accepts.
struct Aligned {
    storage: Vec<u8>,
    skip: usize,
    len: usize,
}

impl Aligned {
    fn new(len: usize, unit: usize) -> Self {
        let storage = vec![0; len + unit];
        let skip = storage.as_ptr().align_offset(unit);
        Self { storage, skip, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.storage[self.skip..self.skip + self.len]
    }
}

#[cfg(test)]
mod tests {
    use block::CacheMode;

    use super::*;

    #[test]
    fn misaligned_ranges_are_read() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("f");
        let content: Vec<u8> = (0..10_001u32).map(|i| (i * 7 + i / 256) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        for cache in [CacheMode::Writeback, CacheMode::None] {
            let file = match DiskFile::open(&path, cache, false) {
                Err(e @ engine::OpenError::Direct(_)) => {
                    println!("skipped: {e}");
                    continue;
                }
                file => file.unwrap(),
            };
            let storage = FileStorage {
                file: Arc::new(file),
                flushes: true,
            };
            for (at, len) in [
                (0, 1),
                (511, 2),
                (4095, 4098),
                (9_000, 1_001),
                (9_000, 5_000),
            ] {
                let mut to = vec![0xaa; len];
                let n = storage.read_at(FileOffset(at as u64), &mut to).unwrap();
                let expected = &content[at..content.len().min(at + len)];
                assert_eq!(&to[..n], expected, "{cache:?} {at} {len}");
            }
            let block = storage.block_size() as usize;
            storage
                .write_at(FileOffset(block as u64), &vec![9; block])
                .unwrap();
            let mut to = vec![0; block + 2];
            storage
                .read_at(FileOffset(block as u64 - 1), &mut to)
                .unwrap();
            assert_eq!(to[0], content[block - 1]);
            assert!(to[1..=block].iter().all(|&b| b == 9));
            std::fs::write(&path, &content).unwrap();
        }
    }
}
