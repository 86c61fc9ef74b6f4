//! The slot table of a queue: all that is known of the requests under way.
//!
//! It is sized when the queue starts, and filled as slots are first needed: most queues never have more than a few
//! requests under way, and memory that is not written to costs nothing. A slot owns the list of segments that the kernel
//! works on until its completion has been reaped, so that no slot ever moves.

use block::{FileOffset, Request, Segment};
use guest::Ticket;

use crate::bounce::Bounce;
use crate::stats::Stamps;

/// Segments that a slot holds itself; longer lists live in a vector that the slot keeps for next
/// time. 4k requests have one, or two where they meet the end of a page.
const INLINE: usize = 4;

pub(crate) struct Slot {
    pub ticket: Ticket,
    pub request: Request,
    pub stamps: Stamps,
    /// Where the operation under way starts, and how many bytes are left from there.
    pub at: FileOffset,
    pub left: u64,
    /// Bytes to report as written to the guest, if all goes well.
    pub written: u32,
    /// Times that this operation was to be tried again.
    pub retries: u8,
    /// Part of it was written without being made durable.
    pub unstable: bool,
    /// Moved; it completes with the end of an fdatasync.
    pub is_syncing: bool,
    /// A write of zeroes that became a write-zeroes.
    pub detected: bool,
    /// Bytes of a write that are known to be zeroes, while the rest is still to be looked at.
    pub zeroes: u64,
    /// Storage failed to serve it, and it has not been served since. Whoever finishes it clears this.
    pub stalled: bool,
    /// How it goes on then.
    pub redo: Redo,
    pub bounce: Option<Bounce>,
    few: [Segment; INLINE],
    many: Vec<Segment>,
    first: usize,
    len: usize,
}

/// How a request goes on that storage failed to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redo {
    /// With the operation that failed, or, if it waited for an fdatasync, with another fdatasync.
    Operation,
    /// With its next piece.
    MappedRequest,
    /// With what comes after the move of its piece.
    Commit,
}

const NO_SEGMENT: Segment = Segment { addr: 0, len: 0 };

impl Slot {
    fn empty() -> Self {
        Self {
            ticket: Ticket::default(),
            request: Request::Flush,
            stamps: Stamps::default(),
            at: FileOffset(0),
            left: 0,
            written: 0,
            retries: 0,
            unstable: false,
            is_syncing: false,
            detected: false,
            zeroes: 0,
            stalled: false,
            redo: Redo::Operation,
            bounce: None,
            few: [NO_SEGMENT; INLINE],
            many: Vec::new(),
            first: 0,
            len: 0,
        }
    }

    #[inline]
    pub fn set_segments(&mut self, segments: &[Segment]) {
        self.first = 0;
        self.len = segments.len();
        if let [only] = segments {
            self.few[0] = *only;
        } else if self.len <= INLINE {
            self.few[..self.len].copy_from_slice(segments);
        } else {
            self.many.clear();
            self.many.extend_from_slice(segments);
        }
    }

    /// The segments that are left.
    #[inline]
    pub fn segments(&self) -> &[Segment] {
        match self.len <= INLINE {
            true => &self.few[self.first..self.len],
            false => &self.many[self.first..self.len],
        }
    }

    /// Takes `bytes` off the front of the segments.
    pub fn advance(&mut self, mut bytes: usize) {
        let all = match self.len <= INLINE {
            true => &mut self.few[..self.len],
            false => &mut self.many[..self.len],
        };
        while let Some(segment) = all.get_mut(self.first) {
            if bytes < segment.len {
                segment.addr += bytes;
                segment.len -= bytes;
                return;
            }
            bytes -= segment.len;
            self.first += 1;
        }
    }
}

/// A fixed number of slots, taken and given back in constant time.
pub(crate) struct Slots {
    /// Those that have been taken before. Memory for all of them is reserved.
    slots: Vec<Slot>,
    /// The last one is taken next. Those that have never been taken are at the beginning, in descending order.
    free: Vec<u16>,
    max: usize,
}

impl Slots {
    pub fn new(n: u16) -> Self {
        Self {
            slots: Vec::with_capacity(n.into()),
            free: (0..n).rev().collect(),
            max: n.into(),
        }
    }

    #[inline]
    pub fn none_free(&self) -> bool {
        self.free.is_empty()
    }

    /// Takes a slot for a request that needs an operation from `at` on. One must be free.
    #[inline]
    pub fn take(
        &mut self,
        ticket: Ticket,
        request: Request,
        at: FileOffset,
        segments: &[Segment],
        stamps: Stamps,
    ) -> u16 {
        let number = self.free.pop().expect("the caller saw a free slot");
        if usize::from(number) == self.slots.len() {
            self.add_slot();
        }
        let slot = self.get(number);
        slot.ticket = ticket;
        slot.request = request;
        slot.at = at;
        slot.stamps = stamps;
        slot.retries = 0;
        slot.unstable = false;
        slot.is_syncing = false;
        slot.detected = false;
        slot.zeroes = 0;
        slot.set_segments(segments);
        (slot.left, slot.written) = match request {
            // The used ring counts in 32 bits.
            Request::Read { len, .. } => (len, u32::try_from(len).unwrap_or(u32::MAX - 1)),
            Request::Write { len, .. }
            | Request::Discard { len, .. }
            | Request::WriteZeroes { len, .. } => (len, 0),
            Request::Flush | Request::GetId => (0, 0),
        };
        number
    }

    /// Makes the next slot, for which there is memory.
    #[cold]
    #[inline(never)]
    fn add_slot(&mut self) {
        assert!(self.slots.len() < self.max);
        self.slots.push(Slot::empty());
    }

    pub fn give_back(&mut self, slot: u16) {
        debug_assert!(self.taken() > 0);
        self.free.push(slot);
    }

    /// Slots, taken or not.
    pub fn len(&self) -> usize {
        self.max
    }

    /// Requests under way.
    pub fn taken(&self) -> usize {
        self.max - self.free.len()
    }

    #[inline]
    pub fn get(&mut self, slot: u16) -> &mut Slot {
        &mut self.slots[usize::from(slot)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists of every length, cut at every byte: what is left is what a list of bytes would have left.
    #[test]
    fn a_slot_goes_on_where_a_short_transfer_ended() {
        for count in 1..=2 * INLINE {
            let list: Vec<Segment> = (0..count)
                .map(|i| Segment {
                    addr: 1000 * i,
                    len: 1 + i % 3,
                })
                .collect();
            let bytes = |list: &[Segment]| -> Vec<usize> {
                let each = list.iter().flat_map(|s| s.addr..s.addr + s.len);
                each.collect()
            };
            let all = bytes(&list);
            for first in 0..=all.len() {
                for second in 0..=all.len() - first {
                    let mut slot = Slot::empty();
                    slot.set_segments(&list);
                    slot.advance(first);
                    assert_eq!(bytes(slot.segments()), all[first..]);
                    slot.advance(second);
                    assert_eq!(bytes(slot.segments()), all[first + second..]);
                }
            }
        }
    }

    /// Each is taken once until it is given back.
    #[test]
    fn slots_are_taken_once() {
        const N: u16 = 8;
        let mut slots = Slots::new(N);
        let take = |slots: &mut Slots| {
            let (ticket, stamps) = (Ticket::default(), Stamps::default());
            slots.take(ticket, Request::Flush, FileOffset(0), &[], stamps)
        };
        let mut taken: Vec<u16> = Vec::new();
        for round in 0..40u16 {
            while !slots.none_free() {
                let slot = take(&mut slots);
                assert!(slot < N && !taken.contains(&slot));
                taken.push(slot);
            }
            assert_eq!(
                (taken.len(), slots.taken()),
                (usize::from(N), usize::from(N))
            );
            for _ in 0..round % N + 1 {
                slots.give_back(taken.swap_remove(usize::from(round) % taken.len()));
            }
            assert_eq!(slots.taken(), taken.len());
        }
    }
}
