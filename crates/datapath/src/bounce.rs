//! Buffers for requests whose own are not aligned as the backing needs them (O_DIRECT).
//!
//! A thread has a bounded number of them: one for each disk, which nobody else can take, and more
//! that all share. A request that finds none waits until one comes free; then the disks whose requests
//! wait take turns. So one disk with many such requests slows another down, but never stops it. One
//! buffer serves a request of any length, piece by piece.

use block::{Engine, Segment};

use crate::worker::Worker;

/// Buffers of one thread beyond the first of each disk. With 256 KiB each, they are at most 16 MiB.
const SHARED_MAX: usize = 64;

/// Bytes that move in one piece.
pub(crate) const BOUNCE_BYTES: usize = 256 << 10;

/// What every backing accepts as alignment of a buffer.
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
        let bytes = &mut self.bytes()[..len];
        Segment {
            addr: bytes.as_mut_ptr() as usize,
            len,
        }
    }
}

/// The buffers of a thread. Who takes one has a count of those that the disk holds.
#[derive(Default)]
pub(crate) struct Pool {
    free: Vec<Bounce>,
    /// Of those held, all but the first of each disk.
    shared: usize,
}

impl Pool {
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

impl<E: Engine> Worker<E> {
    /// Submits a request once there is a buffer for it.
    pub fn wait_for_buffer(&mut self, number: usize, slot: u16) {
        if let Some(queue) = &self.queues[number]
            && let Some(thread_disk) = &mut self.disks[queue.thread_disk]
        {
            thread_disk.waiting_for_buffer.push_back((number, slot));
            self.waiting_for_buffer += 1;
        }
    }

    /// Submits a request, once the engine has room for it.
    pub fn submit_or_wait(&mut self, number: usize, slot: u16) {
        match self.engine.room() {
            0 => self.wait_for_buffer(number, slot),
            _ => self.submit(number, slot),
        }
    }

    /// Submits requests for which there are buffers now, from each disk in turn.
    pub fn retry_bounced(&mut self) {
        let mut refused = 0;
        while self.waiting_for_buffer > 0 && self.engine.room() > 0 && refused < self.disks.len() {
            self.buffer_turn = (self.buffer_turn + 1) % self.disks.len();
            if let Some(thread_disk) = &mut self.disks[self.buffer_turn]
                && self.bounce.has_one(thread_disk.bounces)
                && let Some((number, slot)) = thread_disk.waiting_for_buffer.pop_front()
            {
                self.waiting_for_buffer -= 1;
                self.submit(number, slot);
                refused = 0;
            } else {
                refused += 1;
            }
        }
    }

    /// Gives back the buffer that a request has, if any.
    #[inline]
    pub fn release_bounce(&mut self, number: usize, slot: u16) {
        if let Some(queue) = &mut self.queues[number]
            && let Some(bounce) = queue.slots.get(slot).bounce.take()
            && let Some(thread_disk) = &mut self.disks[queue.thread_disk]
        {
            self.bounce.give_back(bounce, &mut thread_disk.bounces);
        }
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
