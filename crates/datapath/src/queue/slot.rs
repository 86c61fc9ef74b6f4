//! The slot table of a queue: the state of each request in flight.
//!
//! It is sized when the queue starts, and filled as slots are first needed: most queues never have more than a few
//! requests in flight, and memory that is not written to costs nothing. A slot owns the list of segments that the
//! kernel works on until its completion has been reaped, so no slot ever moves.

use block::{FileOffset, Request, Segment};
use guest::Ticket;

use crate::request::Retry;
use crate::resources::bounce::Bounce;
use crate::stats::Stamps;

/// Segments that a slot holds itself; longer lists live in a vector that the slot keeps for next
/// time. 4k requests have one, or two where they meet the end of a page.
const INLINE: usize = 4;

/// How much longer a discard or a write-zeroes may take than another request, in nanoseconds.
const RANGE_NS: u64 = 60_000_000_000;

pub(crate) struct Slot {
    pub ticket: Ticket,
    pub request: Request,
    pub stamps: Stamps,
    /// Where the current operation starts, and how many bytes are left from there.
    pub at: FileOffset,
    pub left: u64,
    /// Bytes to report as written to the guest, if all goes well.
    pub written: u32,
    /// The engine has an operation of it.
    is_in_engine: bool,
    /// When a check for storage that hangs found that operation first, in nanoseconds of the monotonic clock; 0 if none has.
    seen_ns: u64,
    /// Times that this operation was tried again.
    pub retries: u8,
    /// Part of it was written and is not durable.
    pub needs_sync: bool,
    pub state: RequestState,
    pub zero_search: ZeroSearch,
    /// It was stalled, and counts as stalled until it ends.
    pub counts_as_stalled: bool,
    /// It is a write that was in flight at the moment of a backup.
    pub precedes_cut: bool,
    pub bounce: Option<Bounce>,
    few: [Segment; INLINE],
    many: Vec<Segment>,
    first: usize,
    len: usize,
}

/// Where a request is on its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestState {
    /// A limit holds it back.
    Held,
    /// The old data that it changes is copied, for a backup.
    Preserving,
    /// Its range is being noted as written to.
    Noting,
    /// The place of its next piece is looked up in a mapped image.
    Mapping,
    /// What a copy-on-write needs beside the guest's bytes is read.
    Filling,
    /// Its bytes are moved: an operation is in flight, or waits for a buffer.
    Moving,
    /// Its bytes were moved, and it waits for an fdatasync.
    Syncing,
    /// Storage failed to serve it. It waits to be tried again.
    Stalled(Retry),
    /// It has ended; its slot is free.
    Done,
}

/// The search for writes of nothing but zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ZeroSearch {
    /// So many bytes from the start are known to be zeroes.
    Known(u64),
    /// It was a write of nothing but zeroes: it became a write-zeroes.
    Found,
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
            is_in_engine: false,
            seen_ns: 0,
            retries: 0,
            needs_sync: false,
            state: RequestState::Done,
            zero_search: ZeroSearch::Known(0),
            counts_as_stalled: false,
            precedes_cut: false,
            bounce: None,
            few: [NO_SEGMENT; INLINE],
            many: Vec::new(),
            first: 0,
            len: 0,
        }
    }

    /// The engine gets an operation of it.
    #[inline]
    pub fn enters_engine(&mut self) {
        (self.is_in_engine, self.seen_ns) = (true, 0);
    }

    /// The engine's operation has ended.
    #[inline]
    pub fn leaves_engine(&mut self) {
        self.is_in_engine = false;
    }

    /// Since when the engine has had an operation of it, as far as checks have seen; `None` if it has none. A large range
    /// counts from a later time on.
    pub fn in_engine_since(&mut self, now_ns: u64) -> Option<u64> {
        if !self.is_in_engine {
            return None;
        }
        if self.seen_ns == 0 {
            self.seen_ns = now_ns;
        }
        Some(self.seen_ns + self.extra_ns())
    }

    /// How much longer its operations may take than those of others, in nanoseconds: large ranges take working storage
    /// long. Reads of old data, which come before, are like others.
    pub fn extra_ns(&self) -> u64 {
        match (self.request, self.state) {
            (_, RequestState::Preserving) => 0,
            (Request::Discard { .. } | Request::WriteZeroes { .. }, _) => RANGE_NS,
            _ => 0,
        }
    }

    /// Whether it waits for an fdatasync, or for another one after one that failed.
    pub fn is_syncing(&self) -> bool {
        matches!(
            self.state,
            RequestState::Syncing | RequestState::Stalled(Retry::Sync)
        )
    }

    /// Whether it is a write of zeroes that became a write-zeroes.
    #[inline]
    pub fn is_detected_zeroes(&self) -> bool {
        self.zero_search == ZeroSearch::Found
    }

    /// What the guest asked for.
    #[inline]
    pub fn requested(&self) -> Request {
        match self.request {
            Request::WriteZeroes { at, len, .. } if self.is_detected_zeroes() => {
                Request::Write { at, len }
            }
            request => request,
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
        if self.len <= INLINE {
            &self.few[self.first..self.len]
        } else {
            &self.many[self.first..self.len]
        }
    }

    /// Takes `bytes` off the front of the segments.
    pub fn advance(&mut self, mut bytes: usize) {
        let all = if self.len <= INLINE {
            &mut self.few[..self.len]
        } else {
            &mut self.many[..self.len]
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
        slot.needs_sync = false;
        slot.precedes_cut = false;
        slot.state = RequestState::Moving;
        slot.zero_search = ZeroSearch::Known(0);
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
        let state = &mut self.get(slot).state;
        debug_assert!(*state != RequestState::Done, "a request ends once");
        *state = RequestState::Done;
        self.free.push(slot);
    }

    /// The number of slots, taken or not.
    pub fn len(&self) -> usize {
        self.max
    }

    /// The number of requests in flight.
    pub fn taken(&self) -> usize {
        self.max - self.free.len()
    }

    #[inline]
    pub fn get(&mut self, slot: u16) -> &mut Slot {
        &mut self.slots[usize::from(slot)]
    }

    /// The slot with this number, if it has been taken before.
    pub fn find(&mut self, slot: u16) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(slot))
    }

    /// Those that have been taken before, with their numbers.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut Slot)> {
        (0..).zip(&mut self.slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists of every length, cut at every byte: what is left is what a list of bytes would have left.
    #[test]
    fn a_slot_continues_after_a_short_transfer() {
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
    fn a_slot_is_taken_once_until_it_is_given_back() {
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
