//! Buffers for requests whose own are not aligned as the backing needs them (O_DIRECT).
//!
//! A thread has a bounded number of them; a request that finds none waits until one comes free. One
//! buffer serves a request of any length, piece by piece.

use block::Segment;

/// Buffers of one thread. With 256 KiB each, they are at most 16 MiB.
const BUFFERS_MAX: usize = 64;

/// Bytes that move in one piece.
pub(crate) const PIECE: usize = 256 << 10;

/// What every backing accepts as alignment of a buffer.
const ALIGNMENT: usize = 4096;

pub(crate) struct Bounce {
    storage: Box<[u8]>,
    skip: usize,
}

impl Bounce {
    fn new() -> Self {
        let storage = vec![0; PIECE + ALIGNMENT].into_boxed_slice();
        let skip = storage.as_ptr().align_offset(ALIGNMENT);
        Self { storage, skip }
    }

    /// The aligned buffer.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.storage[self.skip..self.skip + PIECE]
    }

    /// The first `len` bytes of the buffer, as an engine wants them.
    pub fn segment(&mut self, len: usize) -> Segment {
        let bytes = &mut self.bytes()[..len];
        Segment {
            addr: bytes.as_mut_ptr() as usize,
            len,
        }
    }
}

#[derive(Default)]
pub(crate) struct Pool {
    free: Vec<Bounce>,
    made: usize,
}

impl Pool {
    pub fn take(&mut self) -> Option<Bounce> {
        if let Some(bounce) = self.free.pop() {
            return Some(bounce);
        }
        (self.made < BUFFERS_MAX).then(|| {
            self.made += 1;
            Bounce::new()
        })
    }

    pub fn give_back(&mut self, bounce: Bounce) {
        self.free.push(bounce);
    }
}

/// Whether the backing can work on these segments as they are.
#[inline]
pub(crate) fn aligned(segments: &[Segment], address: u32, len: u32) -> bool {
    let (address, len) = (address as usize - 1, len as usize - 1);
    segments
        .iter()
        .all(|s| (s.addr & address) | (s.len & len) == 0)
}
