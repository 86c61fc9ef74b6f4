//! A packed ring (virtio 1.3 §2.8): one ring of descriptors, which both sides write.
//!
//! The driver makes a chain available by writing its descriptors in order and the flags of the first
//! one last. The device gives it back by one used descriptor, not where the chain was but where the
//! device itself has got to; both sides then step over as many descriptors as the chain had. Two
//! bits of the flags say whose a descriptor is, and their meaning turns over with each lap.
//!
//! # What makes it right on machines that reorder memory accesses
//!
//! - *Fetching.* The driver releases a chain with its first flags. We read those with acquire in
//!   [`Packed::look`], before anything else of the chain, so that the other reads see what
//!   the driver wrote before. A driver may also release several chains by the flags of the first
//!   alone; we look at a chain only after the one before it was seen, so that this holds for all.
//! - *Giving back.* All but the first element of a batch may be written in any order, because a
//!   driver looks at an element only after it has taken the one before: until the flags of the first
//!   are there, it looks at none. These are stored last, with release: whoever sees them sees
//!   payload, status and all elements of the batch.
//! - *Sleeping.* Each side writes (we: the first flags, or our wish for kicks), passes a full fence,
//!   and reads what the other wrote (its wish for interrupts, or its next flags). In whatever order
//!   the two writes reach memory, the side whose write is second reads the other's: no wake-up is
//!   lost. Wish and position are one word of 32 bits, so that no half of one is ever seen.

mod inflight;

use std::ptr;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use block::Segment;
use virtio_bindings::virtio_ring::{
    VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_PACKED_DESC_F_AVAIL,
    VRING_PACKED_DESC_F_USED, VRING_PACKED_EVENT_FLAG_DESC, VRING_PACKED_EVENT_FLAG_DISABLE,
    VRING_PACKED_EVENT_FLAG_ENABLE,
};

use super::walk::{View, Walk, prefetch};
use super::{Chain, DESCRIPTOR_BYTES, RingBase, RingError, RingLayout, Ticket, Virtqueue, place};

pub(super) use inflight::TrackedPacked;

const AVAIL: u16 = 1 << VRING_PACKED_DESC_F_AVAIL;
const USED: u16 = 1 << VRING_PACKED_DESC_F_USED;
const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// Chains that are looked for at a time: what one turn of an I/O thread fetches from a queue.
const LOOK: u16 = 64;

pub(super) struct Packed {
    ring: *mut Descriptor,
    /// Whether and where the driver wants to be interrupted (virtio 1.3 §2.8.14).
    driver: *const AtomicU32,
    /// Whether and where we want to be kicked.
    device: *const AtomicU32,
    size: u16,
    event_idx: bool,
    /// Most descriptors in a chain.
    chain_limit: u16,
    /// The next chain to fetch.
    available: Position,
    /// Chains from there on that were seen to be available.
    seen: u16,
    /// Descriptors of chains that were fetched and not given back. A driver has no others to make
    /// available than the rest.
    in_flight: u16,
    /// Where the next used element goes.
    used: Position,
    /// Descriptors that used elements stand for which the guest was not shown.
    hidden: u16,
    /// The first of these elements, and the flags that show it and all others.
    first_hidden: u16,
    first_flags: u16,
    /// Nothing was published yet: the driver's event index says nothing about us.
    first: bool,
}

/// A place in the ring, and the lap.
#[derive(Clone, Copy)]
struct Position {
    index: u16,
    /// What AVAIL and USED are in a descriptor that is available on this lap: the wrap counter, and
    /// its opposite.
    turn: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    addr: u64,
    len: u32,
    id: u16,
    flags: u16,
}

// What a queue does is not inlined here: inlined beside the same of a split ring, it would cost that one
// registers, and so some ten instructions per request.
impl Packed {
    pub fn new(view: &View, layout: &RingLayout, chain_limit: u16) -> Result<Self, RingError> {
        let size = layout.size;
        if size == 0 || size > Virtqueue::SIZE_LIMIT {
            return Err(RingError::PackedSize(size));
        }
        let n = u64::from(size);
        let ring = place(view, "descriptor ring", layout.descriptors, n * 16, 16)?;
        let driver = place(view, "driver area", layout.available, 4, 4)?;
        let device = place(view, "device area", layout.used, 4, 4)?;
        let base = layout.base;
        let position = |word: u32| Position::decode(word as u16, size).ok_or(RingError::Base(base));
        let (available, used) = (position(base.0)?, position(base.0 >> 16)?);
        Ok(Self {
            ring: ring as *mut Descriptor,
            driver: driver as *const AtomicU32,
            device: device as *const AtomicU32,
            size,
            event_idx: layout.event_idx,
            chain_limit,
            available,
            seen: 0,
            in_flight: 0,
            used,
            hidden: 0,
            first_hidden: 0,
            first_flags: 0,
            first: true,
        })
    }

    pub fn address(&self) -> usize {
        self.ring as usize
    }

    pub fn base(&self) -> RingBase {
        let (available, used) = (self.available.encode(), self.used.encode());
        RingBase(u32::from(available) | u32::from(used) << 16)
    }

    #[inline(never)]
    pub fn waiting(&mut self) -> u16 {
        if self.seen == 0 {
            self.look();
        }
        self.seen
    }

    /// Counts the chains that are available, as far as it pays to know.
    #[inline]
    fn look(&mut self) {
        let mut at = self.available;
        // A driver that goes on beyond these says that a chain in flight is available again.
        let mut left = self.size - self.in_flight;
        while self.seen < LOOK && left > 0 {
            // Acquire: what the driver wrote before these flags is seen by all reads after them.
            let mut flags = self.flags(at.index).load(Ordering::Acquire);
            if flags & (AVAIL | USED) != at.turn {
                return;
            }
            self.seen += 1;
            loop {
                left -= 1;
                at.advance(1, self.size);
                if flags & NEXT == 0 || left == 0 {
                    break;
                }
                flags = self.flags(at.index).load(Ordering::Relaxed);
            }
        }
    }

    /// Takes the next chain. It is read anew, and for the first time as a whole; the driver may have
    /// changed it since it was counted.
    #[inline(never)]
    pub fn fetch(&mut self, view: &mut View, segments: &mut [Segment]) -> Result<Chain, RingError> {
        self.fetch_and(view, segments, |_| true)
    }

    /// The same, showing each of its descriptors in the ring, as it was read, to `seen`, which tells
    /// whether there is room for it.
    #[inline(always)]
    fn fetch_and(
        &mut self,
        view: &mut View,
        segments: &mut [Segment],
        mut seen: impl FnMut(&Descriptor) -> bool,
    ) -> Result<Chain, RingError> {
        debug_assert_ne!(self.seen, 0);
        self.prefetch(view);
        self.seen -= 1;
        let start = self.available;
        let mut d = self.descriptor(start.index);
        let left = self.size - self.in_flight;
        if d.flags & (AVAIL | USED) != start.turn || left == 0 || !seen(&d) {
            return Err(RingError::TakenBack(start.index));
        }
        let mut at = start;
        at.advance(1, self.size);
        let mut count = 1;
        let (walk, id) = if d.flags & INDIRECT != 0 {
            let mut walk = Walk::new(start.index, u32::from(self.chain_limit), segments);
            indirect(view, d, &mut walk)?;
            (walk, d.id)
        } else {
            let left = left.min(self.chain_limit);
            let mut walk = Walk::new(start.index, u32::from(left), segments);
            walk.add(view, d.addr, d.len, u32::from(d.flags))?;
            while d.flags & NEXT != 0 {
                if count == left {
                    return Err(walk.too_long());
                }
                d = self.descriptor(at.index);
                if !seen(&d) {
                    return Err(walk.too_long());
                }
                at.advance(1, self.size);
                count += 1;
                // virtio 1.3 §2.8.19: a list linked by NEXT has no tables.
                if d.flags & INDIRECT != 0 {
                    return Err(RingError::Indirect {
                        len: d.len,
                        flags: d.flags,
                    });
                }
                walk.add(view, d.addr, d.len, u32::from(d.flags))?;
            }
            // The last one names the buffer (virtio 1.3 §2.8.6).
            (walk, d.id)
        };
        if id >= self.size {
            return Err(RingError::BufferId {
                id,
                at: start.index,
                size: self.size,
            });
        }
        let chain = walk.finish(id, count)?;
        self.available = at;
        self.in_flight += count;
        Ok(chain)
    }

    /// Starts to bring what the next descriptors lead to into this core's cache. Where each of them
    /// is a chain, as with indirect tables, this is what the next chains need.
    #[inline]
    fn prefetch(&self, view: &View) {
        let first = |ahead: u16| {
            let mut at = self.available;
            at.advance(ahead.min(self.size), self.size);
            self.descriptor(at.index)
        };
        let table = |d: Descriptor| match d.flags & INDIRECT {
            0 => None,
            _ => view.known(d.addr, DESCRIPTOR_BYTES),
        };
        if self.seen > 4
            && let Some(addr) = table(first(4))
        {
            prefetch(addr as *const u8);
        }
        if self.seen > 2 {
            let d = first(2);
            let header = match table(d) {
                // SAFETY: `known` found 16 bytes mapped; they need not be aligned.
                Some(addr) => unsafe { ptr::read_unaligned(addr as *const Descriptor) }.addr,
                None => d.addr,
            };
            if let Some(addr) = view.known(header, 1) {
                prefetch(addr as *const u8);
            }
        }
    }

    #[inline(never)]
    pub fn complete(&mut self, ticket: &Ticket, written: u32) {
        let at = self.used;
        // Used on this lap: both bits are the wrap counter. The device has written: its status.
        let flags = at.used_flags() | WRITE;
        // SAFETY: positions are below the ring's size, and the ring is mapped and aligned.
        unsafe {
            let element = self.ring.add(usize::from(at.index));
            ptr::write_volatile(&raw mut (*element).len, written);
            ptr::write_volatile(&raw mut (*element).id, ticket.head);
        }
        match self.hidden {
            0 => (self.first_hidden, self.first_flags) = (at.index, flags),
            _ => self.flags(at.index).store(flags, Ordering::Relaxed),
        }
        self.hidden += ticket.descriptors;
        self.in_flight -= ticket.descriptors;
        self.used.advance(ticket.descriptors, self.size);
    }

    #[inline(never)]
    pub fn publish(&mut self) -> bool {
        let moved = std::mem::take(&mut self.hidden);
        if moved == 0 {
            return false;
        }
        self.flags(self.first_hidden)
            .store(self.first_flags, Ordering::Release);
        // The guest writes its wish and then reads these flags; one of us must see the other.
        fence(Ordering::SeqCst);
        let first = std::mem::replace(&mut self.first, false);
        // SAFETY: the driver area is mapped and aligned.
        let event = unsafe { (*self.driver).load(Ordering::Relaxed) };
        match event >> 16 & 3 {
            VRING_PACKED_EVENT_FLAG_DISABLE => false,
            VRING_PACKED_EVENT_FLAG_DESC if self.event_idx => {
                first || self.used.passed(event as u16, moved, self.size)
            }
            // What makes no sense is no reason to let a guest wait.
            _ => true,
        }
    }

    #[inline(never)]
    pub fn enable_kicks(&mut self) -> bool {
        self.wish(match self.event_idx {
            true => u32::from(self.available.encode()) | VRING_PACKED_EVENT_FLAG_DESC << 16,
            false => VRING_PACKED_EVENT_FLAG_ENABLE << 16,
        });
        // The guest writes its flags and then reads what we just wrote.
        fence(Ordering::SeqCst);
        let flags = self.flags(self.available.index).load(Ordering::Acquire);
        self.in_flight < self.size && flags & (AVAIL | USED) == self.available.turn
    }

    #[inline(never)]
    pub fn disable_kicks(&mut self) {
        // A position that is left standing would be passed again two laps later.
        self.wish(VRING_PACKED_EVENT_FLAG_DISABLE << 16);
    }

    /// Takes out of the driver's sight what a predecessor wrote over descriptors that are in flight.
    fn hide(&mut self) {
        let mut at = self.used;
        for _ in 0..self.in_flight {
            self.flags(at.index).store(at.turn, Ordering::Release);
            at.advance(1, self.size);
        }
    }

    fn wish(&self, wish: u32) {
        // SAFETY: the device area is mapped and aligned.
        unsafe { (*self.device).store(wish, Ordering::Relaxed) };
    }

    #[inline]
    fn flags(&self, index: u16) -> &AtomicU16 {
        debug_assert!(index < self.size);
        // SAFETY: `index` is below the ring's size, and the ring is mapped and aligned.
        unsafe { AtomicU16::from_ptr(&raw mut (*self.ring.add(usize::from(index))).flags) }
    }

    #[inline]
    fn descriptor(&self, index: u16) -> Descriptor {
        debug_assert!(index < self.size);
        // SAFETY: `index` is below the ring's size, and the ring is mapped and aligned.
        unsafe { ptr::read_volatile(self.ring.add(usize::from(index))) }
    }
}

/// Adds the buffers of an indirect table. Of its descriptors only the write flag counts, and they
/// follow one another (virtio 1.3 §2.8.7).
#[inline(always)]
fn indirect(view: &mut View, d: Descriptor, walk: &mut Walk<'_>) -> Result<(), RingError> {
    let bytes = u64::from(d.len);
    if d.flags & NEXT != 0 || bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) {
        return Err(RingError::Indirect {
            len: d.len,
            flags: d.flags,
        });
    }
    let table = view.locate(d.addr, bytes);
    for i in 0..bytes / DESCRIPTOR_BYTES {
        let offset = i * DESCRIPTOR_BYTES;
        let entry: Descriptor = match table {
            // SAFETY: `locate` found the whole table mapped; it may be at any address.
            Some(addr) => unsafe { ptr::read_unaligned((addr + offset as usize) as *const _) },
            None => {
                let mut bytes = [0; DESCRIPTOR_BYTES as usize];
                view.read(d.addr.wrapping_add(offset), &mut bytes)?;
                // SAFETY: any 16 bytes are a descriptor.
                unsafe { ptr::read_unaligned(bytes.as_ptr().cast()) }
            }
        };
        walk.add(view, entry.addr, entry.len, u32::from(entry.flags))?;
    }
    Ok(())
}

impl Position {
    /// From how a front-end has it: 15 bits of index, and the wrap counter.
    fn decode(word: u16, size: u16) -> Option<Self> {
        let index = word & 0x7fff;
        let turn = if word >> 15 != 0 { AVAIL } else { USED };
        (index < size).then_some(Self { index, turn })
    }

    #[inline]
    fn encode(self) -> u16 {
        self.index | self.wrap() << 15
    }

    #[inline]
    fn wrap(self) -> u16 {
        u16::from(self.turn == AVAIL)
    }

    /// What AVAIL and USED are in a descriptor that is used on this lap.
    #[inline]
    fn used_flags(self) -> u16 {
        match self.turn {
            AVAIL => AVAIL | USED,
            _ => 0,
        }
    }

    /// Steps over at most a ring.
    #[inline]
    fn advance(&mut self, descriptors: u16, size: u16) {
        self.index += descriptors;
        if self.index >= size {
            self.index -= size;
            self.turn ^= AVAIL | USED;
        }
    }

    /// Steps back over at most a ring.
    #[inline]
    fn go_back(&mut self, descriptors: u16, size: u16) {
        if self.index < descriptors {
            self.index += size;
            self.turn ^= AVAIL | USED;
        }
        self.index -= descriptors;
    }

    /// Whether the last `moved` steps led over the position `event` (virtio 1.3 §2.8.14).
    #[inline]
    fn passed(self, event: u16, moved: u16, size: u16) -> bool {
        let (index, wrap) = (event & 0x7fff, event >> 15);
        if index >= size {
            // Nowhere in the ring: better one interrupt too many.
            return true;
        }
        // Both lie on a circle of two laps.
        let size = i32::from(size);
        let mut behind = i32::from(self.index) - i32::from(index) - 1;
        if self.wrap() != wrap {
            behind += size;
        }
        if behind < 0 {
            behind += 2 * size;
        }
        behind < i32::from(moved)
    }
}
