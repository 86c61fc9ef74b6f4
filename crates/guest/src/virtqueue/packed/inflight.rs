//! A packed ring that records its requests in flight, so that they survive a kill of this process
//! (vhost-user: "Inflight I/O tracking", "Queue region for packed virtqueue").
//!
//! Used elements overwrite descriptors, including those of chains in flight. Each descriptor is therefore
//! copied to an entry of the region when it is fetched. Free entries form a list; a chain takes as many
//! entries from the front of the list as it has descriptors, and returns them together.
//!
//! A kill happens between two stores. The stores that matter are releases: everything that precedes such a
//! store in this file has been stored before it. The order is:
//!
//! 1. *Fetched.* The copies, `num`, `last` and `counter`, then `inflight` = 1 in the chain's first entry,
//!    then both heads of the free list in one store. Before the last store, the entries are in the free list,
//!    so they are not in flight, whatever they contain: the successor counts the chain among the available
//!    ones. After it, the chain is in flight. Its request cannot have been executed before.
//! 2. *Done*: status and used element. All elements of a batch except the first are written completely and
//!    stay hidden behind the first; the chains are still in flight. A successor must hide these elements
//!    again before it returns another chain at the first element's position: otherwise the driver would see
//!    them (`Packed::hide`).
//! 3. *Published*, for a batch: its chains are linked in front of the free list; the head (not the old head)
//!    is moved to them, and the used position (not the old one) is moved past the batch; then the flags of
//!    the first element are stored; then `inflight` = 0 for each chain; then the old head is moved, then the
//!    old position. Until the flags are stored, a successor finds two different positions and an element at
//!    the old position that is not used, and returns to the old values: the whole batch is in flight. After
//!    that, it finds the element used, or already reused by the driver, and continues with the new values:
//!    the batch is in the free list and so not in flight, however many `inflight` fields were 0 by then. In
//!    between, none of these entries is used for a new chain.
//!
//! Both positions with their wrap counters are written in one store, and so are both heads: there is no
//! partial update. If a batch filled the whole ring, the positions are equal but the wrap counters differ.
//!
//! Every chain that was fetched is therefore either {in flight} or {returned}. The device is ahead of its
//! used position by the number of descriptors in flight; the successor continues there. After a kill, the
//! front-end knows neither position: it sends the last one that it received.

use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use block::Segment;

use super::{AVAIL, Descriptor, INDIRECT, NEXT, Packed, Position, USED, indirect};
use crate::inflight::InflightQueue;
use crate::ring::{RingBase, RingError, RingLayout};
use crate::virtqueue::walk::{View, Walk};
use crate::virtqueue::{Chain, Ticket};

pub struct TrackedPacked {
    ring: Packed,
    region: InflightQueue,
    /// The links between entries, in the free list and in chains. The copy in the region is written for a
    /// successor and not read again.
    next: Box<[u16]>,
    /// The first free entry, or the number of entries if none is free.
    free: u16,
    /// The chain in flight for each buffer id.
    chains: Box<[Option<Entries>]>,
    /// Chains that were completed and not published.
    batch: Vec<Entries>,
    /// The number of the next chain to be fetched.
    counter: u64,
    /// Chains that a predecessor had fetched, the oldest last.
    resubmit: Vec<Entries>,
}

/// The first and last entry of a chain.
#[derive(Clone, Copy)]
struct Entries {
    first: u16,
    last: u16,
}

#[repr(C)]
struct Header {
    _preamble: [u8; 12],
    /// `free_head` and `old_free_head`.
    heads: AtomicU32,
    /// `used_idx` and `old_used_idx`, and the wrap counter of each.
    used: AtomicU64,
    _padding: u64,
}

#[repr(C)]
struct Entry {
    inflight: AtomicU8,
    _padding: u8,
    next: AtomicU16,
    last: AtomicU16,
    num: AtomicU16,
    counter: AtomicU64,
    id: AtomicU16,
    flags: AtomicU16,
    len: AtomicU32,
    addr: AtomicU64,
}

impl TrackedPacked {
    /// Continues at the position in the region or, if the region is blank, at the position in the layout.
    pub fn new(
        view: &View,
        layout: &RingLayout,
        chain_limit: u16,
        mut region: InflightQueue,
    ) -> Result<Self, RingError> {
        let ring = Packed::new(view, layout, chain_limit)?;
        let blank = region.is_blank(layout.size)?;
        if !region.fits(layout.size) {
            return Err(RingError::Inflight("has fewer entries than the queue"));
        }
        let entries = region.entries();
        let mut tracked = Self {
            ring,
            region,
            next: vec![entries; usize::from(entries)].into(),
            free: 0,
            chains: vec![None; usize::from(layout.size)].into(),
            batch: Vec::with_capacity(usize::from(entries)),
            counter: 0,
            resubmit: Vec::new(),
        };
        if blank {
            tracked.begin(layout.base)?
        } else {
            tracked.recover()?
        }
        Ok(tracked)
    }

    fn begin(&mut self, base: RingBase) -> Result<(), RingError> {
        if self.ring.available.encode() != self.ring.used.encode() {
            // The descriptors between the two positions are unknown and may be overwritten.
            return Err(RingError::Base(base));
        }
        for entry in self.entries() {
            entry.inflight.store(0, Ordering::Relaxed);
        }
        self.free_all_but(&vec![false; self.next.len()]);
        let used = self.ring.used;
        self.header()
            .used
            .store(words(used, used), Ordering::Relaxed);
        self.region.begin();
        Ok(())
    }

    fn recover(&mut self) -> Result<(), RingError> {
        let size = self.ring.size;
        // SAFETY: the region is mapped while `self` lives; the slice does not leave this function.
        let entries = unsafe { entries_of(&self.region) };
        let header = self.header();

        // 1. Choose the new or the old values.
        let (used, old_used) = positions(header.used.load(Ordering::Acquire), size)
            .ok_or(RingError::Inflight("has a position beyond the ring"))?;
        let heads = halves(header.heads.load(Ordering::Acquire));
        let flags = self.ring.flags(old_used.index).load(Ordering::Acquire);
        let published =
            used.encode() != old_used.encode() && flags & (AVAIL | USED) != old_used.turn;
        let (free, used) = if published {
            (heads.0, used)
        } else {
            (heads.1, old_used)
        };
        header.heads.store(both(free, free), Ordering::Release);
        header.used.store(words(used, used), Ordering::Release);

        // 2. Free entries are not in flight.
        let mut taken = vec![false; entries.len()];
        let mut at = free;
        while let Some(entry) = entries.get(usize::from(at))
            && !std::mem::replace(&mut taken[usize::from(at)], true)
        {
            entry.inflight.store(0, Ordering::Release);
            at = entry.next.load(Ordering::Relaxed);
        }

        // 3. Every other entry is in flight if its field says so; record which entries belong to each chain.
        taken.fill(false);
        let mut found = Vec::new();
        let mut descriptors = 0;
        for (first, entry) in (0..).zip(entries) {
            if entry.inflight.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let num = entry.num.load(Ordering::Relaxed);
            let mut last = first;
            for i in 0..num {
                if i > 0 {
                    let link = entries[usize::from(last)].next.load(Ordering::Relaxed);
                    self.next[usize::from(last)] = link;
                    last = link;
                }
                match taken.get_mut(usize::from(last)) {
                    Some(taken) if !*taken => *taken = true,
                    _ => return Err(RingError::Inflight("has chains that meet")),
                }
            }
            descriptors += u32::from(num);
            if num == 0 || descriptors > u32::from(size) {
                return Err(RingError::Inflight("has chains longer than the ring"));
            }
            let counter = entry.counter.load(Ordering::Relaxed);
            found.push((counter, Entries { first, last }));
        }
        found.sort_unstable_by_key(|&(counter, _)| counter);
        let counter = found.last().map_or(0, |&(last, _)| last.wrapping_add(1));
        let resubmit = found.iter().rev().map(|&(_, chain)| chain).collect();
        (self.counter, self.resubmit) = (counter, resubmit);

        // 4. All other entries are free. Before, after and during this step, links lead from free entries to
        // free entries, so a kill leaves at worst a shorter list.
        self.free_all_but(&taken);

        (self.ring.used, self.ring.available) = (used, used);
        self.ring.available.advance(descriptors as u16, size);
        self.ring.in_flight = descriptors as u16;
        self.ring.hide();
        Ok(())
    }

    /// Rebuilds the free list from all entries except those `taken`.
    fn free_all_but(&mut self, taken: &[bool]) {
        let mut free = self.region.entries();
        for at in (0..self.region.entries()).rev() {
            if !taken[usize::from(at)] {
                self.next[usize::from(at)] = free;
                self.entries()[usize::from(at)]
                    .next
                    .store(free, Ordering::Release);
                free = at;
            }
        }
        self.free = free;
        self.header()
            .heads
            .store(both(free, free), Ordering::Release);
    }

    /// Makes the chains in flight available again in the ring itself, starting at the next used element:
    /// there is room for as many descriptors as are in flight. A driver that looks for used elements does not
    /// find any of these.
    pub fn requeue(&mut self) -> RingBase {
        let used = self.ring.used;
        let mut position = used;
        for chain in self.resubmit.iter().rev() {
            let mut at = chain.first;
            loop {
                let entry = &self.entries()[usize::from(at)];
                let flags = entry.flags.load(Ordering::Relaxed) & !(AVAIL | USED);
                let descriptor = Descriptor {
                    addr: entry.addr.load(Ordering::Relaxed),
                    len: entry.len.load(Ordering::Relaxed),
                    id: entry.id.load(Ordering::Relaxed),
                    flags: flags | position.turn,
                };
                // SAFETY: positions are less than the ring's size, and the ring is mapped and aligned.
                unsafe {
                    let place = self.ring.ring.add(usize::from(position.index));
                    ptr::write_volatile(place, descriptor);
                }
                position.advance(1, self.ring.size);
                if at == chain.last {
                    break;
                }
                at = self.next[usize::from(at)];
            }
        }
        RingBase::packed(used.encode(), used.encode())
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
    pub fn available(&mut self) -> u16 {
        match self.resubmit.len() {
            0 => self.ring.available(),
            n => n as u16,
        }
    }

    #[inline(never)]
    pub fn fetch(&mut self, view: &mut View, segments: &mut [Segment]) -> Result<Chain, RingError> {
        if let Some(&entries) = self.resubmit.last() {
            let chain = self.fetch_again(entries, view, segments)?;
            self.resubmit.pop();
            return Ok(chain);
        }
        let start = self.ring.available.index;
        let (first, mut last, mut at) = (self.free, self.free, self.free);
        // SAFETY: the region is mapped while `self` lives; the slice does not leave this function.
        let entries = unsafe { entries_of(&self.region) };
        let next = &self.next;
        let copy = |d: &Descriptor| {
            let Some(entry) = entries.get(usize::from(at)) else {
                return false;
            };
            entry.id.store(d.id, Ordering::Relaxed);
            entry.flags.store(d.flags, Ordering::Relaxed);
            entry.len.store(d.len, Ordering::Relaxed);
            entry.addr.store(d.addr, Ordering::Relaxed);
            (last, at) = (at, next[usize::from(at)]);
            true
        };
        let chain = self.ring.fetch_and(view, segments, copy)?;
        self.claim(chain.head, start, Entries { first, last })?;
        let entry = &entries[usize::from(first)];
        entry.num.store(chain.descriptors, Ordering::Relaxed);
        entry.last.store(last, Ordering::Relaxed);
        entry.counter.store(self.counter, Ordering::Relaxed);
        entry.inflight.store(1, Ordering::Release);
        self.header().heads.store(both(at, at), Ordering::Release);
        self.free = at;
        self.counter = self.counter.wrapping_add(1);
        Ok(chain)
    }

    /// Fetches a chain that a predecessor had fetched, from the copies of its descriptors.
    #[cold]
    fn fetch_again(
        &mut self,
        chain: Entries,
        view: &mut View,
        segments: &mut [Segment],
    ) -> Result<Chain, RingError> {
        let limit = u32::from(self.ring.chain_limit.max(self.ring.size));
        let mut walk = Walk::new(chain.first, limit, segments);
        let (mut at, mut count) = (chain.first, 1);
        let id = loop {
            let entry = &self.entries()[usize::from(at)];
            let d = Descriptor {
                addr: entry.addr.load(Ordering::Relaxed),
                len: entry.len.load(Ordering::Relaxed),
                id: entry.id.load(Ordering::Relaxed),
                flags: entry.flags.load(Ordering::Relaxed),
            };
            // The same rules as in the first fetch: an indirect table is the only descriptor, and every
            // descriptor except the last has NEXT set.
            let alone = chain.first == chain.last;
            match (d.flags & INDIRECT != 0, d.flags & NEXT != 0) {
                (true, _) if alone => indirect(view, d, &mut walk)?,
                (false, goes_on) if goes_on == (at != chain.last) => {
                    walk.add(view, d.addr, d.len, u32::from(d.flags))?;
                }
                _ => return Err(RingError::Inflight("has a chain that is none")),
            }
            if at == chain.last {
                break d.id;
            }
            at = self.next[usize::from(at)];
            count += 1;
        };
        self.claim(id, chain.first, chain)?;
        walk.finish(id, count)
    }

    /// Assigns a buffer id to a chain.
    fn claim(&mut self, id: u16, at: u16, chain: Entries) -> Result<(), RingError> {
        let size = self.ring.size;
        match self.chains.get_mut(usize::from(id)) {
            None => Err(RingError::BufferId { id, at, size }),
            Some(Some(_)) => Err(RingError::BufferIdTwice { id, at }),
            Some(free) => {
                *free = Some(chain);
                Ok(())
            }
        }
    }

    #[inline(never)]
    pub fn complete(&mut self, ticket: &Ticket, written: u32) {
        let chain = self.chains[usize::from(ticket.head)].take();
        debug_assert!(chain.is_some(), "it was fetched");
        self.batch.extend(chain);
        self.ring.complete(ticket, written);
    }

    #[inline(never)]
    pub fn publish(&mut self) -> bool {
        if self.batch.is_empty() {
            return false;
        }
        let mut free = self.free;
        for i in 0..self.batch.len() {
            let chain = self.batch[i];
            let last = usize::from(chain.last);
            self.next[last] = free;
            self.entries()[last].next.store(free, Ordering::Relaxed);
            free = chain.first;
        }
        let mut old_used = self.ring.used;
        old_used.go_back(self.ring.hidden, self.ring.size);
        let used = self.ring.used;
        let header = self.header();
        header.heads.store(both(free, self.free), Ordering::Release);
        header.used.store(words(used, old_used), Ordering::Release);
        let wants_call = self.ring.publish();
        for chain in &self.batch {
            let entry = &self.entries()[usize::from(chain.first)];
            entry.inflight.store(0, Ordering::Release);
        }
        let header = self.header();
        header.heads.store(both(free, free), Ordering::Release);
        header.used.store(words(used, used), Ordering::Release);
        self.free = free;
        self.batch.clear();
        wants_call
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
        // SAFETY: the region is mapped while `self` lives, is aligned to 8 and begins with a header; every
        // value is valid in an atomic, even if another process writes there.
        unsafe { &*(self.region.addr() as *const Header) }
    }

    #[inline]
    fn entries(&self) -> &[Entry] {
        // SAFETY: the region lives as long as `self`.
        unsafe { entries_of(&self.region) }
    }
}

/// # Safety
/// The region must outlive the slice.
#[inline]
unsafe fn entries_of<'a>(region: &InflightQueue) -> &'a [Entry] {
    let start = region.addr() + size_of::<Header>();
    // SAFETY: the header is followed by this many entries, mapped while the region lives; every value is
    // valid in an atomic, even if another process writes there.
    unsafe { std::slice::from_raw_parts(start as *const Entry, usize::from(region.entries())) }
}

/// Combines two numbers for one store, in the order in which they are in memory.
#[inline]
fn both(new: u16, old: u16) -> u32 {
    let ([a, b], [c, d]) = (new.to_ne_bytes(), old.to_ne_bytes());
    u32::from_ne_bytes([a, b, c, d])
}

fn halves(word: u32) -> (u16, u16) {
    let [a, b, c, d] = word.to_ne_bytes();
    (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]))
}

/// Combines two positions for one store: both indices, then both wrap counters.
#[inline]
fn words(new: Position, old: Position) -> u64 {
    let ([a, b], [c, d]) = (new.index.to_ne_bytes(), old.index.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, new.wrap() as u8, old.wrap() as u8, 0, 0])
}

/// Splits a word into two positions; `None` if one is not in the ring.
fn positions(word: u64, size: u16) -> Option<(Position, Position)> {
    let [a, b, c, d, new_wrap, old_wrap, ..] = word.to_ne_bytes();
    let position = |index: [u8; 2], wrap: u8| {
        let index = u16::from_ne_bytes(index);
        let turn = if wrap != 0 { AVAIL } else { USED };
        (index < size).then_some(Position { index, turn })
    };
    Some((position([a, b], new_wrap)?, position([c, d], old_wrap)?))
}
