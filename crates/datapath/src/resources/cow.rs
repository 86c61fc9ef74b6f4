//! Copy-on-write: the guest's bytes are written in one operation with the other bytes of the same clusters, the fills.
//!
//! If the fills are in one piece and the table that leads there is in memory, the engine reads them, on the I/O thread.
//! Otherwise the [blocking pool](super::blocking_pool) does.

use block::{FileOffset, Segment};
use image::{Allocation, Chain, FileIndex, ImageError, Pin, ReadLocation};

use crate::disk::source::Alignment;

/// Largest write of the guest's bytes and fills, in bytes. Above that, the copy costs more than a second write.
const MERGE_MAX: u64 = 256 << 10;

/// An alignment of buffers that any file accepts.
const ALIGNMENT: usize = 4096;

/// Most buffers of a thread for its own reads: 64 of 68 KiB keep any disk busy, and the largest are 17 MiB together.
const BUFFERS_MAX: usize = 64;

/// The content of clusters, with a gap for the guest's bytes.
pub(crate) struct CowWrite {
    /// Its place in the file.
    to: FileOffset,
    bytes: Vec<u8>,
    /// Where it begins in `bytes`, aligned.
    skip: usize,
    len: usize,
    /// Where the guest's bytes go, counted from `skip`.
    gap: usize,
    /// The buffer is one of [`CowBuffers`].
    pooled: bool,
}

/// Where the fills come from.
pub(crate) enum FillSource {
    /// They are zeroes.
    Zeroes,
    /// This read, in one piece. Some of what it reads is overwritten with the guest's bytes.
    Bytes(CowRead),
}

/// A read into a [`CowWrite`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct CowRead {
    pub file: FileIndex,
    pub at: FileOffset,
    pub len: u64,
    pub to: Segment,
}

impl CowWrite {
    /// A buffer for the content of the clusters; `None` if that is too much to be copied once more. The buffer is not
    /// initialised.
    fn new(allocation: &Allocation, buffer: impl FnOnce() -> Option<Vec<u8>>) -> Option<Self> {
        let fills = || allocation.fills.iter();
        let (to, data_end) = (allocation.to.0, allocation.to.0 + allocation.len);
        let start = fills().map(|f| f.to.0).fold(to, u64::min);
        let end = fills().map(|f| f.to.0 + f.len).fold(data_end, u64::max);
        let together = fills().map(|f| f.len).sum::<u64>() + allocation.len;
        if end - start > MERGE_MAX || together != end - start {
            return None;
        }
        let len = (end - start) as usize;
        let mut bytes = buffer()?;
        if bytes.len() < len + ALIGNMENT {
            bytes.resize(len + ALIGNMENT, 0);
        }
        Some(Self {
            to: FileOffset(start),
            skip: bytes.as_ptr().align_offset(ALIGNMENT),
            bytes,
            len,
            gap: (to - start) as usize,
            pooled: false,
        })
    }

    /// With all fills. Blocks.
    pub fn read(chain: &Chain, allocation: &Allocation) -> Result<Option<Self>, ImageError> {
        let Some(mut write) = Self::new(allocation, || Some(Vec::new())) else {
            return Ok(None);
        };
        let pin = chain.pins().pin(0);
        let read = allocation.fills.iter().try_for_each(|fill| {
            let bytes = write.part(fill.to, fill.len);
            match fill.from {
                Some(from) => chain.read(&pin, from, bytes),
                None => {
                    bytes.fill(0);
                    Ok(())
                }
            }
        });
        chain.pins().unpin(pin);
        read.map(|()| Some(write))
    }

    /// A buffer, and the source of the fills; `None` if they are not in one piece, or that is not known without
    /// blocking, or the engine cannot read them alone.
    pub fn plan(
        chain: &Chain,
        pin: &Pin,
        allocation: &Allocation,
        alignment: Alignment,
        buffers: &mut CowBuffers,
    ) -> Option<(Self, FillSource)> {
        let fills = || allocation.fills.iter();
        let (first, last) = (fills().next()?, fills().next_back()?);
        let read = match (first.from, last.from) {
            (Some(from), Some(_)) if fills().all(|f| f.from.is_some()) => {
                let len = last.to.0 + last.len - first.to.0;
                let useful: u64 = fills().map(|f| f.len).sum();
                let whole = |n: u64| n.is_multiple_of(alignment.len.into());
                match chain.map(pin, from, len) {
                    ReadLocation::Data { file, at, len: n }
                        if n == len && whole(at.0) && whole(len) && len <= 2 * useful =>
                    {
                        Some((file, at, len))
                    }
                    _ => return None,
                }
            }
            _ if fills().all(|f| f.from.is_none()) => None,
            _ => return None,
        };
        let mut write = Self::new(allocation, || buffers.take())?;
        write.pooled = true;
        let beside = match read {
            Some((file, at, len)) => {
                let to = write.part(first.to, len);
                let (addr, bytes) = (to.as_mut_ptr() as usize, to.len());
                if !addr.is_multiple_of(alignment.address as usize) {
                    buffers.give_back(write);
                    return None;
                }
                FillSource::Bytes(CowRead {
                    file,
                    at,
                    len,
                    to: Segment { addr, len: bytes },
                })
            }
            None => {
                fills().for_each(|fill| write.part(fill.to, fill.len).fill(0));
                FillSource::Zeroes
            }
        };
        Some((write, beside))
    }

    /// The part that goes to this place.
    fn part(&mut self, to: FileOffset, len: u64) -> &mut [u8] {
        let at = self.skip + (to.0 - self.to.0) as usize;
        &mut self.bytes[at..at + len as usize]
    }

    /// The gap for the guest's bytes.
    pub fn gap(&mut self, len: u64) -> &mut [u8] {
        let at = self.skip + self.gap;
        &mut self.bytes[at..at + len as usize]
    }

    /// All of it, as an engine takes it, and its place in the file.
    pub fn write(&mut self) -> (FileOffset, Segment) {
        let bytes = &mut self.bytes[self.skip..self.skip + self.len];
        let segment = Segment {
            addr: bytes.as_mut_ptr() as usize,
            len: bytes.len(),
        };
        (self.to, segment)
    }
}

impl std::fmt::Debug for CowWrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes to {}", self.len, self.to)
    }
}

/// The copy-on-write buffers of a thread, which are reused.
#[derive(Default)]
pub(crate) struct CowBuffers {
    free: Vec<Vec<u8>>,
    taken: usize,
}

impl CowBuffers {
    fn take(&mut self) -> Option<Vec<u8>> {
        if self.taken == BUFFERS_MAX {
            return None;
        }
        self.taken += 1;
        Some(self.free.pop().unwrap_or_default())
    }

    /// Takes the buffer of a write back.
    pub fn give_back(&mut self, write: CowWrite) {
        if write.pooled {
            self.taken -= 1;
            self.free.push(write.bytes);
        }
    }
}
