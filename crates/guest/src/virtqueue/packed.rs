//! A packed ring (virtio 1.3 §2.8): one ring of descriptors, which both sides write.
//!
//! The driver makes a chain available by writing its descriptors in order and the flags of the first one
//! last. The device returns the chain with one used descriptor. It writes that descriptor at its own current
//! position, not where the chain was; both sides then advance by the number of descriptors of the chain. Two
//! bits of the flags say which side owns a descriptor, and their meaning is inverted on each lap.
//!
//! # Correctness on machines that reorder memory accesses
//!
//! - *Fetching.* The driver releases a chain with its first flags. The device reads them with acquire in
//!   [`Packed::look`], before anything else of the chain, so that its other reads see what the driver wrote
//!   before. A driver may also release several chains with the flags of the first one; the device looks at a
//!   chain only after it has seen the previous one, so the same holds for all of them.
//! - *Completing.* All elements of a batch except the first may be written in any order, because a driver
//!   looks at an element only after it has taken the previous one: until the flags of the first are visible,
//!   it looks at none. These flags are stored last, with release: a driver that sees them also sees payload,
//!   status and all elements of the batch.
//! - *Sleeping.* Each side writes (the device: the first flags, or its kick setting), passes a full fence,
//!   and reads what the other side wrote (the driver's interrupt setting, or its next flags). In whichever
//!   order the two writes reach memory, the side that writes second reads the other's write, so no wake-up is
//!   lost. Setting and position are one 32-bit word, so a partial update is never visible.

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
use super::{Chain, DESCRIPTOR_BYTES, Ticket, place};
use crate::ring::{RING_SIZE_MAX, RingBase, RingError, RingLayout};

pub(super) use inflight::TrackedPacked;

const AVAIL: u16 = 1 << VRING_PACKED_DESC_F_AVAIL;
const USED: u16 = 1 << VRING_PACKED_DESC_F_USED;
const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// Maximum number of chains to look for at a time: the number that an I/O thread fetches from a queue in one
/// turn.
const LOOK: u16 = 64;

pub(super) struct Packed {
    ring: *mut Descriptor,
    /// Whether and where the driver wants to be interrupted (virtio 1.3 §2.8.14).
    driver: *const AtomicU32,
    /// Whether and where the device wants to be kicked.
    device: *const AtomicU32,
    size: u16,
    event_idx: bool,
    /// Maximum number of descriptors in a chain.
    chain_limit: u16,
    /// Position of the next chain to fetch.
    available: Position,
    /// Number of chains from there that were found available.
    seen: u16,
    /// Number of descriptors of chains that were fetched and not returned. A driver can make only the
    /// remaining descriptors available.
    in_flight: u16,
    /// Position of the next used element.
    used: Position,
    /// Number of descriptors covered by used elements that are not visible to the guest yet.
    hidden: u16,
    /// Index of the first of these elements, and the flags that make it and all others visible.
    first_hidden: u16,
    first_flags: u16,
    /// Nothing was published yet, so the driver's event index does not refer to this device.
    first: bool,
}

/// A position in the ring, with the lap.
#[derive(Clone, Copy)]
struct Position {
    index: u16,
    /// The AVAIL and USED bits of a descriptor that is available on this lap: the wrap counter and its
    /// inverse.
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

// The queue operations are not inlined here: inlining them next to those of a split ring would cost the split
// ring registers, about ten instructions per request.
impl Packed {
    pub fn new(view: &View, layout: &RingLayout, chain_limit: u16) -> Result<Self, RingError> {
        let size = layout.size;
        if size == 0 || size > RING_SIZE_MAX {
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
    pub fn available(&mut self) -> u16 {
        if self.seen == 0 {
            self.look();
        }
        self.seen
    }

    /// Counts available chains, up to `LOOK`.
    #[inline]
    fn look(&mut self) {
        let mut at = self.available;
        // A driver that makes more descriptors available has reused those of a chain in flight.
        let mut left = self.size - self.in_flight;
        while self.seen < LOOK && left > 0 {
            // Acquire: all later reads see what the driver wrote before these flags.
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

    /// Fetches the next chain. It is read again, completely for the first time; the driver may have changed
    /// it since it was counted.
    #[inline(never)]
    pub fn fetch(&mut self, view: &mut View, segments: &mut [Segment]) -> Result<Chain, RingError> {
        self.fetch_and(view, segments, |_| true)
    }

    /// Like [`fetch`](Self::fetch), but calls `seen` with each of the chain's ring descriptors, as it was
    /// read; `seen` returns whether there is room for the descriptor.
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
            // The last descriptor contains the buffer id (virtio 1.3 §2.8.6).
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

    /// Prefetches the memory that the next descriptors refer to. If each of them is a chain, as with indirect
    /// tables, the next chains need this memory.
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
        // Used on this lap: both bits equal the wrap counter. WRITE: the device has written at least the
        // status.
        let flags = at.used_flags() | WRITE;
        // SAFETY: positions are less than the ring's size, and the ring is mapped and aligned.
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
        // The guest writes its event setting and then reads these flags; one side must see the other's write.
        fence(Ordering::SeqCst);
        let first = std::mem::replace(&mut self.first, false);
        // SAFETY: the driver area is mapped and aligned.
        let event = unsafe { (*self.driver).load(Ordering::Relaxed) };
        match event >> 16 & 3 {
            VRING_PACKED_EVENT_FLAG_DISABLE => false,
            VRING_PACKED_EVENT_FLAG_DESC if self.event_idx => {
                first || self.used.passed(event as u16, moved, self.size)
            }
            // An invalid value must not make the guest wait.
            _ => true,
        }
    }

    #[inline(never)]
    pub fn enable_kicks(&mut self) -> bool {
        self.wish(if self.event_idx {
            u32::from(self.available.encode()) | VRING_PACKED_EVENT_FLAG_DESC << 16
        } else {
            VRING_PACKED_EVENT_FLAG_ENABLE << 16
        });
        // The guest writes its flags and then reads the setting that was just written.
        fence(Ordering::SeqCst);
        let flags = self.flags(self.available.index).load(Ordering::Acquire);
        self.in_flight < self.size && flags & (AVAIL | USED) == self.available.turn
    }

    #[inline(never)]
    pub fn disable_kicks(&mut self) {
        // A position that stays in place would be passed again two laps later.
        self.wish(VRING_PACKED_EVENT_FLAG_DISABLE << 16);
    }

    /// Hides the used elements that a predecessor wrote over descriptors in flight from the driver.
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
        // SAFETY: `index` is less than the ring's size, and the ring is mapped and aligned.
        unsafe { AtomicU16::from_ptr(&raw mut (*self.ring.add(usize::from(index))).flags) }
    }

    #[inline]
    fn descriptor(&self, index: u16) -> Descriptor {
        debug_assert!(index < self.size);
        // SAFETY: `index` is less than the ring's size, and the ring is mapped and aligned.
        unsafe { ptr::read_volatile(self.ring.add(usize::from(index))) }
    }
}

/// Adds the buffers of an indirect table. Only the write flag of its descriptors is used, and they are
/// consecutive (virtio 1.3 §2.8.7).
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
                // SAFETY: any 16 bytes are a valid descriptor.
                unsafe { ptr::read_unaligned(bytes.as_ptr().cast()) }
            }
        };
        walk.add(view, entry.addr, entry.len, u32::from(entry.flags))?;
    }
    Ok(())
}

impl Position {
    /// Decodes the front-end's representation: 15 bits of index, and the wrap counter.
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

    /// The AVAIL and USED bits of a descriptor that is used on this lap.
    #[inline]
    fn used_flags(self) -> u16 {
        match self.turn {
            AVAIL => AVAIL | USED,
            _ => 0,
        }
    }

    /// Advances by at most the size of the ring.
    #[inline]
    fn advance(&mut self, descriptors: u16, size: u16) {
        self.index += descriptors;
        if self.index >= size {
            self.index -= size;
            self.turn ^= AVAIL | USED;
        }
    }

    /// Goes back by at most the size of the ring.
    #[inline]
    fn go_back(&mut self, descriptors: u16, size: u16) {
        if self.index < descriptors {
            self.index += size;
            self.turn ^= AVAIL | USED;
        }
        self.index -= descriptors;
    }

    /// Whether the last `moved` steps passed the position `event` (virtio 1.3 §2.8.14).
    #[inline]
    fn passed(self, event: u16, moved: u16, size: u16) -> bool {
        let (index, wrap) = (event & 0x7fff, event >> 15);
        if index >= size {
            // The position is not in the ring: an extra interrupt is better than a missing one.
            return true;
        }
        // Both positions are on a circle of two laps.
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
