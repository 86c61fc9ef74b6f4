//! A virtqueue whose driver is this process. A server of another protocol puts its clients' requests there, and the device
//! serves them like a guest's.
//!
//! The queue has memory of its own, which holds the ring and the payload of requests. A [`Buffer`] is owned like any value:
//! the queue takes it with a request, and returns it when the device has finished the request. So no other code of this
//! process touches memory that the kernel still works on.

#![expect(
    unsafe_code,
    reason = "the ring and the buffers are in memory that the device uses"
)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

use block::SECTOR_BYTES;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use virtio_bindings::virtio_blk as b;
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use crate::blk::{Status, ZEROES_BYTES_MAX};
use crate::memory::{GuestMemory, RegionLayout};
use crate::ring::{RingBase, RingLayout};
use crate::session::NewQueue;
use crate::sigbus::SessionAbort;
use crate::virtqueue::Virtqueue;

/// Requests that can be in flight.
const SLOTS: u16 = 64;

/// Descriptors of a request at most: header, data, status.
const CHAIN: u16 = 3;

/// A power of two, at least `SLOTS * CHAIN`.
const RING: u16 = 256;

// Offsets in the memory. The available ring has 6 + 2 * RING bytes, the used ring 6 + 8 * RING.
const DESCRIPTORS: usize = 0;
const AVAILABLE: usize = 4096;
const USED: usize = 8192;
const CONTROLS: usize = 12288;
const DATA: usize = CONTROLS + CONTROL_BYTES * SLOTS as usize;

/// A request's header, its range if it has no payload, and its status byte.
const CONTROL_BYTES: usize = 64;
const RANGE_AT: usize = 16;
const STATUS_AT: usize = 32;

/// Buffers are multiples of this, and begin at one: direct I/O needs no copy.
const UNIT: usize = 4096;

/// Memory for buffers that stays after they have been used, in bytes.
pub const LOCAL_KEPT_BYTES: usize = 1 << 20;

/// What the device is to do; a read or write has the length of its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalOp {
    /// Fill the buffer from the disk.
    Read {
        /// First byte on the disk.
        at: u64,
    },
    /// Write the buffer to the disk.
    Write {
        /// First byte on the disk.
        at: u64,
    },
    /// Make completed writes durable.
    Flush,
    /// Give back the space of a range.
    Discard {
        /// First byte on the disk.
        at: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// First byte on the disk.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// The space may be given back.
        unmap: bool,
    },
}

/// The number of the next queue.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A part of a queue's memory. Only that queue accepts it.
#[derive(Debug, PartialEq, Eq)]
pub struct Buffer {
    /// The number of the queue.
    queue: u64,
    at: usize,
    len: usize,
}

impl Buffer {
    /// Length in bytes, as requested from [`LocalQueue::alloc`].
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// A request that the device has finished.
#[derive(Debug)]
pub struct Finished {
    /// The number that it was submitted with.
    pub tag: u32,
    /// How it ended. [`Status::NoSpace`] exists only here.
    pub status: Status,
    /// Its buffer.
    pub buffer: Option<Buffer>,
}

/// A request that the device works on.
struct InFlight {
    tag: u32,
    buffer: Option<Buffer>,
}

/// The driver's side of the queue.
pub struct LocalQueue {
    /// No other queue of this process has this number.
    number: u64,
    /// Keeps the memory mapped.
    _memory: Arc<GuestMemory>,
    file: Arc<OwnedFd>,
    base: usize,
    space: Space,
    kick: Arc<OwnedFd>,
    call: Arc<OwnedFd>,
    /// By slot.
    in_flight: Box<[Option<InFlight>]>,
    free: Vec<u16>,
    /// The index after the last request that was submitted, and after the last that the device can see.
    submitted: u16,
    published: u16,
    /// The index after the last request that was taken back.
    taken: u16,
}

/// The widest range of a discard or write-zeroes in bytes.
pub const LOCAL_ZEROES_MAX: u64 = ZEROES_BYTES_MAX;

impl LocalQueue {
    /// A queue with so many bytes for buffers, and what an I/O thread needs to serve it. Memory is used as buffers are.
    ///
    /// # Errors
    /// There are no descriptors or there is no memory left.
    pub fn new(bytes: usize) -> io::Result<(Self, NewQueue)> {
        let file = Arc::new(memfd_create("queue", MemfdFlags::CLOEXEC)?);
        let len = DATA + bytes.next_multiple_of(UNIT);
        ftruncate(&file, len as u64)?;
        let layout = RegionLayout {
            guest: 0,
            len: len as u64,
            user: 0,
            file_offset: 0,
        };
        let memory = GuestMemory::default().with_region(layout, file.clone());
        let memory = Arc::new(memory.map_err(io::Error::other)?);
        let base = memory.at_user(0, len as u64).expect("the whole region");
        let ring = RingLayout {
            number: 0,
            packed: false,
            size: RING,
            descriptors: DESCRIPTORS as u64,
            available: AVAILABLE as u64,
            used: USED as u64,
            base: RingBase::first(false),
            event_idx: true,
            max_segments: 1,
        };
        let virtqueue = Virtqueue::new(memory.clone(), ring).map_err(io::Error::other)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Arc::new);
        let (kick, call) = (event()?, event()?);
        let new = NewQueue {
            virtqueue,
            kick: kick.clone(),
            call: Some(call.clone()),
            error: None,
            marked: None,
            abort: SessionAbort::new()?,
        };
        let queue = Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            _memory: memory,
            file,
            base,
            space: Space::new(DATA, len - DATA),
            kick,
            call,
            in_flight: (0..SLOTS).map(|_| None).collect(),
            free: (0..SLOTS).rev().collect(),
            submitted: 0,
            published: 0,
            taken: 0,
        };
        Ok((queue, new))
    }

    /// The longest buffer that it can have.
    pub fn capacity(&self) -> usize {
        self.space.bytes
    }

    /// The length of its memory, which is a file for the kernel.
    pub fn file_bytes(&self) -> usize {
        DATA + self.capacity()
    }

    /// A buffer of this length, which must not be 0; `None` if there is no space for it now.
    pub fn alloc(&mut self, len: usize) -> Option<Buffer> {
        let at = self.space.take(len.next_multiple_of(UNIT))?;
        let queue = self.number;
        Some(Buffer { queue, at, len })
    }

    /// Length of the memory that buffers have used once the next [`alloc`](Self::alloc) has succeeded, in bytes; `None` if it
    /// has no space.
    pub fn bytes_used_with(&self, len: usize) -> Option<usize> {
        let len = len.next_multiple_of(UNIT);
        let (_, at) = self.space.place(len)?;
        Some(self.space.high_water.max(at + len) - DATA)
    }

    /// Gives a buffer back.
    ///
    /// # Panics
    /// It is another queue's.
    pub fn give_back(&mut self, buffer: Buffer) {
        self.check(&buffer);
        self.space
            .give_back(buffer.at, buffer.len.next_multiple_of(UNIT));
    }

    /// Whether [`shrink`](Self::shrink) would give memory back, if no buffer is in use.
    pub fn can_shrink(&self) -> bool {
        self.space.high_water > DATA + LOCAL_KEPT_BYTES
    }

    /// Gives unused memory back to the system. Returns false if a buffer is in use.
    pub fn shrink(&mut self) -> bool {
        let Some(end) = self.space.forget_high_water() else {
            return false;
        };
        if end > DATA + LOCAL_KEPT_BYTES {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let (at, len) = (DATA + LOCAL_KEPT_BYTES, end - DATA - LOCAL_KEPT_BYTES);
            // If it fails, the memory stays in use, as it was.
            let _ = fallocate(&self.file, flags, at as u64, len as u64);
        }
        true
    }

    /// The content of a buffer.
    ///
    /// # Panics
    /// It is another queue's.
    pub fn bytes(&self, buffer: &Buffer) -> &[u8] {
        self.check(buffer);
        // SAFETY: this queue made the buffer, so it is inside the mapping. The device does not work on it: while it does, the
        // queue has the buffer. `alloc` returns only memory that no other buffer has, and `Space` gives it out again only
        // after `give_back` has consumed the buffer. No other process has the memory's file. `shrink` gives back only pages
        // of which no part is in a buffer.
        unsafe { slice::from_raw_parts((self.base + buffer.at) as *const u8, buffer.len) }
    }

    /// The content of a buffer, to be changed.
    ///
    /// # Panics
    /// It is another queue's.
    pub fn bytes_mut(&mut self, buffer: &mut Buffer) -> &mut [u8] {
        self.check(buffer);
        // SAFETY: as in `bytes`; and the queue and the buffer are borrowed exclusively.
        unsafe { slice::from_raw_parts_mut((self.base + buffer.at) as *mut u8, buffer.len) }
    }

    /// A buffer of another queue has other bounds, and the device may be working on the same place of this one.
    fn check(&self, buffer: &Buffer) {
        assert_eq!(buffer.queue, self.number, "a buffer of another queue");
    }

    /// Number of requests that can be submitted.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Number of requests that the device has not finished.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len() - self.free.len()
    }

    /// Readable when requests have been finished, if [`enable_calls`](Self::enable_calls) asked for that.
    pub fn call(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// Submits a request; the device sees it after [`publish`](Self::publish). There must be [room](Self::room). A read or
    /// write has a buffer. Positions are multiples of 512, and ranges at most [`LOCAL_ZEROES_MAX`] long.
    ///
    /// # Panics
    /// There is no room, or the buffer is another queue's.
    pub fn submit(&mut self, tag: u32, op: LocalOp, buffer: Option<Buffer>) {
        buffer.iter().for_each(|buffer| self.check(buffer));
        let slot = self.free.pop().expect("the caller saw room");
        let (kind, at, range) = match op {
            LocalOp::Read { at } => (b::VIRTIO_BLK_T_IN, at, None),
            LocalOp::Write { at } => (b::VIRTIO_BLK_T_OUT, at, None),
            LocalOp::Flush => (b::VIRTIO_BLK_T_FLUSH, 0, None),
            LocalOp::Discard { at, len } => (b::VIRTIO_BLK_T_DISCARD, 0, Some((at, len, 0))),
            LocalOp::WriteZeroes { at, len, unmap } => {
                let range = (at, len, u32::from(unmap));
                (b::VIRTIO_BLK_T_WRITE_ZEROES, 0, Some(range))
            }
        };
        let control = CONTROLS + CONTROL_BYTES * usize::from(slot);
        self.store(control, u64::from(kind));
        self.store(control + 8, at / SECTOR_BYTES);
        if let Some((at, len, flags)) = range {
            let sectors = len / SECTOR_BYTES;
            self.store(control + RANGE_AT, at / SECTOR_BYTES);
            self.store(control + RANGE_AT + 8, sectors | u64::from(flags) << 32);
        }
        let data = match (&buffer, range) {
            (Some(buffer), _) => {
                let write = match op {
                    LocalOp::Read { .. } => VRING_DESC_F_WRITE,
                    _ => 0,
                };
                Some((buffer.at, buffer.len, write))
            }
            (None, Some(_)) => Some((control + RANGE_AT, 16, 0)),
            (None, None) => None,
        };
        let header = (control, 16, 0);
        let status = (control + STATUS_AT, 1, VRING_DESC_F_WRITE);
        let head = slot * CHAIN;
        let parts = [Some(header), data, Some(status)];
        let count = parts.iter().flatten().count() as u16;
        for (i, (at, len, flags)) in (0..).zip(parts.into_iter().flatten()) {
            let is_last = i + 1 == count;
            let flags = if is_last {
                flags
            } else {
                flags | VRING_DESC_F_NEXT
            };
            let place = DESCRIPTORS + 16 * usize::from(head + i);
            let next = u64::from(head + i + 1) << 48;
            self.store(place, at as u64);
            self.store(place + 8, len as u64 | u64::from(flags) << 32 | next);
        }
        let entry = AVAILABLE + 4 + 2 * usize::from(self.submitted % RING);
        self.word(entry).store(head, Ordering::Relaxed);
        self.submitted = self.submitted.wrapping_add(1);
        self.in_flight[usize::from(slot)] = Some(InFlight { tag, buffer });
    }

    /// Shows the device all submitted requests, and wakes it if it asked for that.
    pub fn publish(&mut self) {
        let before = self.published;
        if before == self.submitted {
            return;
        }
        self.published = self.submitted;
        self.word(AVAILABLE + 2)
            .store(self.published, Ordering::Release);
        // The device writes its event index, and then reads the available index again.
        fence(Ordering::SeqCst);
        let event = self.word(USED + 4 + 8 * usize::from(RING));
        let event = event.load(Ordering::Relaxed);
        let (since, passed) = (
            self.published.wrapping_sub(before),
            self.published.wrapping_sub(event).wrapping_sub(1),
        );
        if passed < since {
            // The counter cannot be full: the device resets it.
            let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
        }
    }

    /// Takes a request that the device has finished.
    pub fn take(&mut self) -> Option<Finished> {
        if self.word(USED + 2).load(Ordering::Acquire) == self.taken {
            return None;
        }
        let entry = USED + 4 + 8 * usize::from(self.taken % RING);
        let slot = self.word(entry).load(Ordering::Relaxed) / CHAIN;
        self.taken = self.taken.wrapping_add(1);
        let InFlight { tag, buffer } = self.in_flight[usize::from(slot)]
            .take()
            .expect("the device finishes a request once");
        self.free.push(slot);
        let status = CONTROLS + CONTROL_BYTES * usize::from(slot) + STATUS_AT;
        let status = match self.word(status).load(Ordering::Relaxed) as u8 {
            0 => Status::Ok,
            status if status == Status::NoSpace as u8 => Status::NoSpace,
            status if status == Status::Unsupported as u8 => Status::Unsupported,
            _ => Status::IoError,
        };
        Some(Finished {
            tag,
            status,
            buffer,
        })
    }

    /// Asks the device to signal the next request that it finishes. Returns whether one has been finished meanwhile.
    pub fn enable_calls(&mut self) -> bool {
        self.word(AVAILABLE + 4 + 2 * usize::from(RING))
            .store(self.taken, Ordering::Relaxed);
        // The device writes its index, and then reads this one.
        fence(Ordering::SeqCst);
        self.word(USED + 2).load(Ordering::Acquire) != self.taken
    }

    /// Resets the signal of finished requests.
    pub fn clear_call(&self) {
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
    }

    fn word(&self, at: usize) -> &AtomicU16 {
        debug_assert!(at.is_multiple_of(2) && at < DATA);
        // SAFETY: the offset is inside the mapping, which is page-aligned, and even.
        unsafe { AtomicU16::from_ptr((self.base + at) as *mut u16) }
    }

    /// Writes eight bytes where the device does not look before the next request is published.
    fn store(&self, at: usize, word: u64) {
        debug_assert!(at.is_multiple_of(8) && at < DATA);
        // SAFETY: the offset is inside the mapping and aligned, and the device reads it only after `publish`.
        unsafe { ((self.base + at) as *mut u64).write_volatile(word.to_le()) };
    }
}

/// The free parts of a range, in ascending order and with something in use between any two of them.
struct Space {
    /// The length of all of it.
    bytes: usize,
    free: Vec<(usize, usize)>,
    /// Bytes in use.
    used: usize,
    /// The end of everything that was in use since it was last asked.
    high_water: usize,
}

impl Space {
    fn new(at: usize, len: usize) -> Self {
        Self {
            bytes: len,
            free: vec![(at, len)],
            used: 0,
            high_water: at,
        }
    }

    /// The lowest free place, so that the same memory is used again, and its index.
    fn place(&self, len: usize) -> Option<(usize, usize)> {
        let index = self.free.iter().position(|&(_, free)| free >= len)?;
        Some((index, self.free[index].0))
    }

    fn take(&mut self, len: usize) -> Option<usize> {
        let (index, at) = self.place(len)?;
        let free = self.free[index].1;
        if free == len {
            self.free.remove(index);
        } else {
            self.free[index] = (at + len, free - len);
        }
        self.used += len;
        self.high_water = self.high_water.max(at + len);
        Some(at)
    }

    fn give_back(&mut self, at: usize, len: usize) {
        self.used -= len;
        let index = self.free.partition_point(|&(free, _)| free < at);
        self.free.insert(index, (at, len));
        if let Some(&(next, next_len)) = self.free.get(index + 1)
            && at + len == next
        {
            self.free[index].1 += next_len;
            self.free.remove(index + 1);
        }
        if index > 0 {
            let (before, before_len) = self.free[index - 1];
            if before + before_len == at {
                self.free[index - 1].1 += self.free[index].1;
                self.free.remove(index);
            }
        }
    }

    /// Returns the end of what was in use since the last call; `None` if anything is in use.
    fn forget_high_water(&mut self) -> Option<usize> {
        (self.used == 0).then(|| std::mem::take(&mut self.high_water))
    }
}

#[cfg(test)]
mod tests {
    use block::Segment;

    use super::*;

    fn device(new: &mut NewQueue) -> Vec<(u32, u64, u64)> {
        let mut segments = [Segment { addr: 0, len: 0 }; 8];
        let mut seen = Vec::new();
        for _ in 0..new.virtqueue.available().unwrap() {
            let chain = new.virtqueue.fetch(&mut segments).unwrap();
            let word = |at: usize| u32::from_le_bytes(chain.header[at..at + 4].try_into().unwrap());
            seen.push((
                word(0),
                u64::from(word(8)),
                chain.readable_len + chain.writable_len,
            ));
            new.virtqueue.complete(&chain.ticket(), 0, 1);
        }
        new.virtqueue.publish();
        seen
    }

    /// More than 65536 requests, so that every index wraps.
    #[test]
    fn requests_come_and_go() {
        let (mut queue, mut new) = LocalQueue::new(1 << 20).unwrap();
        for round in 0..2000u32 {
            for i in 0..u32::from(SLOTS) {
                let buffer = queue.alloc(512 * (1 + i as usize % 3)).unwrap();
                queue.submit(
                    round ^ i,
                    LocalOp::Read {
                        at: u64::from(i) << 9,
                    },
                    Some(buffer),
                );
            }
            assert_eq!(queue.room(), 0);
            queue.publish();
            let seen = device(&mut new);
            assert_eq!(seen.len(), usize::from(SLOTS));
            for (i, (kind, sector, len)) in seen.into_iter().enumerate() {
                assert_eq!((kind, sector), (b::VIRTIO_BLK_T_IN, i as u64));
                assert_eq!(len, 512 * (1 + i as u64 % 3));
            }
            let mut tags: Vec<u32> = Vec::new();
            while let Some(Finished {
                tag,
                status,
                buffer,
            }) = queue.take()
            {
                assert_eq!(status, Status::Ok);
                queue.give_back(buffer.unwrap());
                tags.push(tag ^ round);
            }
            assert_eq!(tags, (0..u32::from(SLOTS)).collect::<Vec<_>>());
        }
        assert_eq!(queue.space.free, [(DATA, 1 << 20)]);
    }

    /// Its bounds are those of the other queue.
    #[test]
    #[should_panic(expected = "a buffer of another queue")]
    fn buffers_of_other_queues_are_refused() {
        let (mut long, _) = LocalQueue::new(1 << 20).unwrap();
        let (short, _) = LocalQueue::new(1 << 12).unwrap();
        let buffer = long.alloc(1 << 20).unwrap();
        short.bytes(&buffer);
    }

    #[test]
    fn space_is_merged() {
        let mut space = Space::new(0, 10);
        let taken: Vec<_> = (0..5).map(|_| space.take(2).unwrap()).collect();
        assert_eq!(space.take(1), None);
        for i in [1, 3, 2, 0, 4] {
            space.give_back(taken[i], 2);
        }
        assert_eq!(space.free, [(0, 10)]);
        assert_eq!(space.forget_high_water(), Some(10));
    }
}
