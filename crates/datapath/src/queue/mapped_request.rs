//! What a request to a mapped image is about to do: the piece under way, and what is left after it.

use block::{FileId, FileOffset, GuestOffset, Segment};
use image::{Allocation, Pin};

use super::slot::Slot;
use crate::resources::cow::CowWrite;

/// How far a request to a mapped image has come.
pub(crate) struct MappedRequest {
    /// Where on the disk the piece under way begins.
    pub at: GuestOffset,
    /// Its length in bytes.
    pub len: u64,
    /// Bytes of the request from `at` on.
    pub rest: u64,
    /// The file that the piece is in.
    pub file: FileId,
    /// Held from before a look-up until the request ends, or waits. While pinned, looked-up clusters are not reused.
    pub pin: Option<Pin>,
    /// The request has begun, and not ended.
    has_begun: bool,
    /// Clusters that were taken for the piece under way.
    pub allocation: Option<Allocation>,
    /// What is written for the piece, if that is more than the guest's bytes.
    pub cow: Option<CowWrite>,
    /// The guest's segments of `rest`, once the request turned out to have several pieces.
    pub segments: Vec<Segment>,
    /// The first of these that is not used up.
    first: usize,
    /// The segments of the piece under way.
    cut: Vec<Segment>,
}

impl MappedRequest {
    fn new() -> Self {
        Self {
            at: GuestOffset(0),
            len: 0,
            rest: 0,
            file: FileId(0),
            pin: None,
            has_begun: false,
            allocation: None,
            cow: None,
            segments: Vec::new(),
            first: 0,
            cut: Vec::new(),
        }
    }

    /// Begins with a request of `len` bytes.
    #[inline]
    pub fn begin(&mut self, at: GuestOffset, len: u64, pin: Pin) {
        (self.at, self.len, self.rest) = (at, 0, len);
        self.segments.clear();
        self.cut.clear();
        self.first = 0;
        self.pin = Some(pin);
        self.has_begun = true;
    }

    /// Whether its first piece was looked up, or is being looked up.
    #[inline(always)]
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// The request has ended.
    #[inline]
    pub fn end(&mut self) {
        self.has_begun = false;
    }

    #[inline(always)]
    pub fn pin(&self) -> &Pin {
        self.pin.as_ref().expect("a request that is looked up")
    }

    /// So many bytes of the request are done.
    #[inline]
    pub fn advance(&mut self, bytes: u64) {
        self.at += bytes;
        self.rest -= bytes;
        self.cut.clear();
    }

    /// Forgets what was done of the piece under way, which is looked up again. The slot has the guest's segments as they
    /// were, or they are [kept](Self::keep_segments).
    #[cold]
    pub fn restart_piece(&mut self) {
        self.segments.splice(..self.first, self.cut.drain(..));
        self.first = 0;
    }

    /// Makes a piece ready for the engine: it is at this place of this file.
    #[inline(always)]
    pub fn set_piece(&mut self, slot: &mut Slot, file: FileId, at: FileOffset, len: u64) {
        self.set_len(slot, len);
        (slot.at, slot.left, self.file) = (at, len, file);
    }

    /// The next piece has `len` bytes: gives the slot their segments.
    #[inline(always)]
    pub fn set_len(&mut self, slot: &mut Slot, len: u64) {
        self.len = len;
        if self.segments.is_empty() {
            if len == self.rest {
                return;
            }
            self.segments.extend_from_slice(slot.segments());
        }
        slot.set_segments(self.cut(len));
    }

    /// Keeps the guest's segments, while the slot's are used for something else.
    pub fn keep_segments(&mut self, slot: &Slot) {
        if self.segments.is_empty() {
            self.segments.extend_from_slice(slot.segments());
        }
    }

    /// Takes the segments of the next `len` bytes off the front.
    fn cut(&mut self, mut len: u64) -> &[Segment] {
        self.cut.clear();
        while len > 0
            && let Some(segment) = self.segments.get_mut(self.first)
        {
            let n = (segment.len as u64).min(len) as usize;
            self.cut.push(Segment {
                addr: segment.addr,
                len: n,
            });
            len -= n as u64;
            segment.addr += n;
            segment.len -= n;
            self.first += usize::from(segment.len == 0);
        }
        &self.cut
    }
}

/// The requests of a queue to a mapped image, by slot. They are made as slots are first taken.
#[derive(Default)]
pub(crate) struct MappedRequests(Vec<MappedRequest>);

impl MappedRequests {
    /// Reserves memory for a queue with so many slots.
    pub fn reserve(&mut self, slots: usize) {
        self.0.reserve_exact(slots - self.0.len());
    }

    /// Forgets all, and gives the memory back: the image is not mapped any more.
    pub fn clear(&mut self) {
        self.0 = Vec::new();
    }

    /// The request in this slot, which is made if it is the first there.
    #[inline(always)]
    pub fn get_or_add(&mut self, slot: u16) -> &mut MappedRequest {
        if usize::from(slot) >= self.0.len() {
            self.add(usize::from(slot) + 1);
        }
        self.get(slot)
    }

    /// The request in this slot, which was made before.
    #[inline]
    pub fn get(&mut self, slot: u16) -> &mut MappedRequest {
        &mut self.0[usize::from(slot)]
    }

    /// The request in this slot; `None` if the image is not mapped, or the slot is new.
    #[inline]
    pub fn find(&mut self, slot: u16) -> Option<&mut MappedRequest> {
        self.0.get_mut(usize::from(slot))
    }

    #[cold]
    #[inline(never)]
    fn add(&mut self, len: usize) {
        debug_assert!(len <= self.0.capacity());
        self.0.resize_with(len, MappedRequest::new);
    }
}
