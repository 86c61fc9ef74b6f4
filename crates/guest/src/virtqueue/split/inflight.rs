//! A split ring that records its requests in flight, so that they survive a kill of this process (vhost-user:
//! "Inflight I/O tracking", "Queue region for split virtqueue").
//!
//! Each chain uses the entry of its head. A kill happens between two stores, and every store here is a
//! release: everything that precedes it in this file has been stored before it. The order is:
//!
//! 1. *Fetched.* `counter`, then `inflight` = 1. Before the latter, the request has not been fetched: the
//!    successor counts it among the available ones. After it, the request is in flight. It cannot have been
//!    executed before, because it is returned to the caller only afterwards.
//! 2. *Done*: status and used element, which the driver does not read yet. The request is still in flight,
//!    and a successor repeats it; the guest has not got its buffers back.
//! 3. *Published*, for a batch: each entry is linked to the previous one, and `last_batch_head` is set to the
//!    last of them; then the used index of the ring; then `inflight` = 0 for each; then `used_idx`, the same
//!    index in the region. Until the used index is stored, it equals `used_idx`: nothing was returned since
//!    then, the links are not followed, and the whole batch is in flight. From then on they differ by the
//!    batch, whose entries are linked from `last_batch_head`. A successor sets `inflight` = 0 for all of
//!    them, however many were already done, and then stores `used_idx` itself. Until `used_idx` is stored,
//!    none of these entries is used for a new request, although the guest may have made it available by now.
//!
//! Every request that was fetched is therefore either {in flight} or {returned}. The number of fetched
//! requests is the sum of both, and the successor continues there. The base that the front-end sends is not
//! needed and would be a guess.

use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use block::Segment;

use super::Split;
use crate::inflight::InflightQueue;
use crate::ring::{RingBase, RingError, RingLayout};
use crate::virtqueue::walk::View;
use crate::virtqueue::{Chain, Ticket};

pub struct TrackedSplit {
    ring: Split,
    region: InflightQueue,
    /// The number of the next request to be fetched.
    counter: u64,
    /// Heads of chains that a predecessor had fetched, the oldest last.
    resubmit: Vec<u16>,
    /// Heads of completed chains, by their place in the used ring.
    batch: Box<[u16]>,
}

#[repr(C)]
struct Header {
    _preamble: [u8; 12],
    last_batch_head: AtomicU16,
    used_idx: AtomicU16,
}

#[repr(C)]
struct Entry {
    inflight: AtomicU8,
    _padding: [u8; 5],
    next: AtomicU16,
    counter: AtomicU64,
}

// Not inlined, for the same reason as with packed rings: inlining would slow down the rings that are not
// tracked.
impl TrackedSplit {
    /// Continues at the position in the region or, if the region is blank, at the position in the layout.
    pub fn new(
        view: &View,
        layout: &RingLayout,
        chain_limit: u16,
        mut region: InflightQueue,
    ) -> Result<Self, RingError> {
        let ring = Split::new(view, layout, chain_limit)?;
        let blank = region.is_blank(layout.size)?;
        if !region.fits(layout.size) {
            return Err(RingError::Inflight("has fewer entries than the queue"));
        }
        let mut tracked = Self {
            ring,
            region,
            counter: 0,
            resubmit: Vec::new(),
            batch: vec![0; usize::from(layout.size)].into(),
        };
        if blank {
            tracked.begin()
        } else {
            tracked.recover()?
        }
        Ok(tracked)
    }

    fn begin(&mut self) {
        for entry in self.entries() {
            entry.inflight.store(0, Ordering::Relaxed);
        }
        let header = self.header();
        header.last_batch_head.store(0, Ordering::Relaxed);
        header
            .used_idx
            .store(self.ring.next_used, Ordering::Relaxed);
        self.region.begin();
    }

    fn recover(&mut self) -> Result<(), RingError> {
        let (header, entries) = (self.header(), self.entries());
        let size = self.ring.size;
        let used = self.ring.next_used;
        let batch = used.wrapping_sub(header.used_idx.load(Ordering::Acquire));
        if batch > size {
            return Err(RingError::Inflight("is not of this ring"));
        }
        let mut head = header.last_batch_head.load(Ordering::Acquire);
        for _ in 0..batch {
            let entry = entries
                .get(usize::from(head))
                .ok_or(RingError::Inflight("has a link that leads nowhere"))?;
            entry.inflight.store(0, Ordering::Release);
            head = entry.next.load(Ordering::Relaxed);
        }
        header.used_idx.store(used, Ordering::Release);

        let in_flight = |&(head, _): &(u16, u64)| {
            let entry = &entries[usize::from(head)];
            entry.inflight.load(Ordering::Relaxed) != 0
        };
        let counters = entries.iter().map(|e| e.counter.load(Ordering::Relaxed));
        let mut found: Vec<(u16, u64)> = (0..).zip(counters).filter(in_flight).collect();
        if found.iter().any(|&(head, _)| head >= size) {
            return Err(RingError::Inflight("has requests beyond the queue"));
        }
        found.sort_unstable_by_key(|&(_, counter)| counter);
        let counter = found.last().map_or(0, |&(_, last)| last.wrapping_add(1));
        let next_available = used.wrapping_add(found.len() as u16);
        let resubmit = found.iter().rev().map(|&(head, _)| head).collect();
        (self.counter, self.resubmit) = (counter, resubmit);
        self.ring.next_available = next_available;
        self.ring.seen_available = next_available;
        Ok(())
    }

    /// Makes the requests in flight available again in the ring itself, starting where the used ring ends:
    /// there are as many entries between that position and the next request. No driver reads the entries that
    /// it has made available.
    pub fn requeue(&mut self) -> RingBase {
        let (first, mask) = (self.ring.next_used, self.ring.size - 1);
        for (i, &head) in (0..).zip(self.resubmit.iter().rev()) {
            let entry = usize::from(first.wrapping_add(i) & mask);
            // SAFETY: `entry` is less than the ring's size, and the ring is also mapped for writing.
            unsafe { ptr::write_volatile(self.ring.available_ring.add(entry).cast_mut(), head) };
        }
        RingBase::split(first)
    }

    pub fn address(&self) -> usize {
        self.ring.address()
    }

    pub fn base(&self) -> RingBase {
        self.ring.base()
    }

    pub fn resubmits(&self) -> usize {
        self.resubmit.len()
    }

    #[inline(never)]
    pub fn available(&mut self) -> Result<u16, RingError> {
        match self.resubmit.len() {
            0 => self.ring.available(),
            n => Ok(n as u16),
        }
    }

    #[inline(never)]
    pub fn fetch(&mut self, view: &mut View, segments: &mut [Segment]) -> Result<Chain, RingError> {
        if let Some(&head) = self.resubmit.last() {
            let chain = self.ring.walk(view, head, segments)?;
            self.resubmit.pop();
            return Ok(chain);
        }
        let chain = self.ring.fetch(view, segments)?;
        let entry = &self.entries()[usize::from(chain.head)];
        entry.counter.store(self.counter, Ordering::Relaxed);
        entry.inflight.store(1, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
        Ok(chain)
    }

    #[inline(never)]
    pub fn complete(&mut self, ticket: &Ticket, written: u32) {
        let place = usize::from(self.ring.next_used & (self.ring.size - 1));
        self.batch[place] = ticket.head;
        self.ring.complete(ticket, written);
    }

    #[inline(never)]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.ring.published, self.ring.next_used);
        if old == new {
            return false;
        }
        // A driver that makes descriptors available twice can have more chains completed than there is room
        // for.
        let count = new.wrapping_sub(old).min(self.ring.size);
        let (header, entries) = (self.header(), self.entries());
        let mut last = header.last_batch_head.load(Ordering::Relaxed);
        for head in self.batch(count) {
            entries[usize::from(head)]
                .next
                .store(last, Ordering::Relaxed);
            last = head;
        }
        header.last_batch_head.store(last, Ordering::Release);
        let wants_call = self.ring.publish();
        let (header, entries) = (self.header(), self.entries());
        for head in self.batch(count) {
            entries[usize::from(head)]
                .inflight
                .store(0, Ordering::Release);
        }
        header.used_idx.store(new, Ordering::Release);
        wants_call
    }

    /// The heads of the last `count` completed chains.
    #[inline]
    fn batch(&self, count: u16) -> impl Iterator<Item = u16> + '_ {
        let (first, mask) = (self.ring.next_used.wrapping_sub(count), self.ring.size - 1);
        (0..count).map(move |i| self.batch[usize::from(first.wrapping_add(i) & mask)])
    }

    #[inline(never)]
    pub fn enable_kicks(&mut self) -> bool {
        self.ring.enable_kicks() || !self.resubmit.is_empty()
    }

    #[inline(never)]
    pub fn disable_kicks(&mut self) {
        self.ring.disable_kicks();
    }

    #[inline]
    fn header(&self) -> &Header {
        // SAFETY: the region is mapped while `self` lives, is aligned and begins with a header; every value
        // is valid in an atomic, even if another process writes there.
        unsafe { &*(self.region.addr() as *const Header) }
    }

    #[inline]
    fn entries(&self) -> &[Entry] {
        let start = self.region.addr() + size_of::<Header>();
        // SAFETY: as in `header`; the header is followed by this many entries.
        unsafe {
            std::slice::from_raw_parts(start as *const Entry, usize::from(self.region.entries()))
        }
    }
}
