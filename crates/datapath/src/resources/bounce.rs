//! Buffers for requests whose own are not aligned as the backing needs them (O_DIRECT).
//!
//! A thread has a bounded number of them: one for each disk, which no other disk can take, and more that all disks share. A
//! request that finds none waits until one is free; then the disks whose requests wait take turns. So one disk with many
//! such requests slows another down, but never stops it. One buffer serves a request of any length, piece by piece.

use block::Segment;

/// Buffers of one thread beyond the first of each disk. With 256 KiB each, they are at most 16 MiB.
const SHARED_MAX: usize = 64;

/// Bytes of a buffer: more are moved in several pieces.
pub(crate) const BOUNCE_BYTES: usize = 256 << 10;

/// An alignment of buffers that every backing accepts.
const ALIGNMENT: usize = 4096;

pub(crate) struct Bounce {
    storage: Box<[u8]>,
    skip: usize,
}

impl Bounce {
    fn new() -> Self {
        let storage = vec![0; BOUNCE_BYTES + ALIGNMENT].into_boxed_slice();
        let skip = storage.as_ptr().align_offset(ALIGNMENT);
        Self { storage, skip }
    }

    /// The aligned buffer.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.storage[self.skip..self.skip + BOUNCE_BYTES]
    }

    /// The first `len` bytes of the buffer, as an engine wants them.
    pub fn segment(&mut self, len: usize) -> Segment {
        self.segment_at(0, len)
    }

    /// `len` bytes of the buffer from `at` on.
    pub fn segment_at(&mut self, at: usize, len: usize) -> Segment {
        let bytes = &mut self.bytes()[at..at + len];
        Segment {
            addr: bytes.as_mut_ptr() as usize,
            len,
        }
    }
}

/// The bounce buffers of a thread. The caller counts those that each disk holds.
#[derive(Default)]
pub(crate) struct BouncePool {
    free: Vec<Bounce>,
    /// How many are held, without the first of each disk.
    shared: usize,
}

impl BouncePool {
    /// Whether a disk that holds so many can have another one.
    pub fn has_one(&self, held: usize) -> bool {
        held == 0 || self.shared < SHARED_MAX
    }

    pub fn take(&mut self, held: &mut usize) -> Option<Bounce> {
        if !self.has_one(*held) {
            return None;
        }
        self.shared += usize::from(*held > 0);
        *held += 1;
        Some(self.free.pop().unwrap_or_else(Bounce::new))
    }

    pub fn give_back(&mut self, bounce: Bounce, held: &mut usize) {
        *held -= 1;
        self.shared -= usize::from(*held > 0);
        self.free.push(bounce);
    }
}

/// Whether the backing can work on these segments as they are.
#[inline]
pub(crate) fn is_aligned(segments: &[Segment], address: u32, len: u32) -> bool {
    let (address, len) = (address as usize - 1, len as usize - 1);
    segments
        .iter()
        .all(|s| (s.addr & address) | (s.len & len) == 0)
}
