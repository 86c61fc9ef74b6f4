//! A packed ring (virtio 1.3 §2.8), written from the specification, without code of the device.
//!
//! Chains are built in a private table of the driver, as for a split ring, and copied to the ring when they are made
//! available. The head of a chain is its buffer id.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use super::{Desc, Used};
use crate::frontend::RingAddresses;
use crate::memory::{Memory, Region};

/// A descriptor (virtio 1.3 §2.8.13), with its layout in memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedDesc {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Buffer id.
    pub id: u16,
    /// The flags of [`Desc`], and `AVAIL` and `USED`.
    pub flags: u16,
}

impl PackedDesc {
    /// Equals the driver's wrap counter in an available descriptor.
    pub const AVAIL: u16 = 1 << 7;
    /// The inverse of `AVAIL` in an available descriptor, and equal to it in a used one.
    pub const USED: u16 = 1 << 15;

    /// The bytes of the descriptor.
    pub fn bytes(&self) -> [u8; 16] {
        let high = u64::from(self.len) | u64::from(self.id) << 32 | u64::from(self.flags) << 48;
        (u128::from(self.addr) | u128::from(high) << 64).to_le_bytes()
    }
}

/// Values of the flags in an event suppression structure (virtio 1.3 §2.8.14).
const ENABLE: u32 = 0;
const DISABLE: u32 = 1;
const DESC: u32 = 2;

/// A packed ring in guest memory, which the containing [`Ring`](super::Ring) keeps mapped.
pub struct PackedRing {
    size: u16,
    event_idx: bool,
    ring: *mut PackedDesc,
    driver: *mut u32,
    device: *mut u32,
    avail: Position,
    used: Position,
    /// The driver's private chains, by head.
    table: Box<[Desc]>,
    /// The number of descriptors of the chain in flight with this id; 0 if there is none.
    in_flight: Box<[u16]>,
}

#[derive(Clone, Copy)]
struct Position {
    index: u16,
    wrap: bool,
}

impl Position {
    fn advance(&mut self, count: u16, size: u16) {
        self.index += count;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }

    fn word(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    fn avail_flags(self) -> u16 {
        if self.wrap {
            PackedDesc::AVAIL
        } else {
            PackedDesc::USED
        }
    }

    fn used_flags(self) -> u16 {
        if self.wrap {
            PackedDesc::AVAIL | PackedDesc::USED
        } else {
            0
        }
    }
}

impl PackedRing {
    pub(super) fn new(
        memory: &Arc<Memory>,
        region: &Region,
        size: u16,
        event_idx: bool,
    ) -> (Self, RingAddresses) {
        let desc = region.alloc(16 * u64::from(size), 64);
        let avail = region.alloc(4, 64);
        let used = region.alloc(4, 64);
        let start = Position {
            index: 0,
            wrap: true,
        };
        let ring = Self {
            size,
            event_idx,
            ring: memory.ptr(desc, 16 * usize::from(size)).cast(),
            driver: memory.ptr(avail, 4).cast(),
            device: memory.ptr(used, 4).cast(),
            avail: start,
            used: start,
            table: vec![Desc::default(); usize::from(size)].into(),
            in_flight: vec![0; usize::from(size)].into(),
        };
        (ring, RingAddresses { desc, used, avail })
    }

    /// The position of the next chain, with the wrap counter in the top bit.
    pub fn avail(&self) -> u16 {
        self.avail.word()
    }

    /// The position of the next used element, with the wrap counter in the top bit.
    pub fn used(&self) -> u16 {
        self.used.word()
    }

    /// The AVAIL and USED flags of a descriptor that is made available at the next position.
    pub fn avail_flags(&self) -> u16 {
        self.avail.avail_flags()
    }

    /// Writes a descriptor of the ring itself, valid or not.
    pub fn write(&mut self, position: u16, desc: PackedDesc) {
        assert!(position < self.size);
        // SAFETY: the ring has `size` descriptors. The flags are written last, as a driver does.
        unsafe {
            let at = self.ring.add(usize::from(position));
            (&raw mut (*at).addr).write_volatile(desc.addr);
            (&raw mut (*at).len).write_volatile(desc.len);
            (&raw mut (*at).id).write_volatile(desc.id);
        }
        self.flags(position).store(desc.flags, Ordering::Release);
    }

    /// Reads a descriptor of the ring itself.
    pub fn read(&self, position: u16) -> PackedDesc {
        assert!(position < self.size);
        // SAFETY: the ring has `size` descriptors.
        unsafe { self.ring.add(usize::from(position)).read_volatile() }
    }

    pub(super) fn restart(&mut self, base: u16) {
        let start = Position {
            index: base & 0x7fff,
            wrap: base >> 15 != 0,
        };
        (self.avail, self.used) = (start, start);
        self.in_flight.fill(0);
        for index in 0..self.size {
            // From the start position on, descriptors are as the previous lap left them; before it, as this lap left
            // them.
            let lap = Position {
                index,
                wrap: start.wrap == (index < start.index),
            };
            self.flags(index).store(lap.used_flags(), Ordering::Relaxed);
        }
        self.driver_event().store(ENABLE << 16, Ordering::Relaxed);
        self.device_event().store(ENABLE << 16, Ordering::Release);
    }

    #[inline]
    pub(super) fn set_desc(&mut self, index: u16, desc: Desc) {
        self.table[usize::from(index)] = desc;
    }

    /// Copies the chains with these heads to the ring. Returns whether the device wants a kick.
    #[inline]
    pub(super) fn publish(&mut self, heads: impl IntoIterator<Item = u16>) -> bool {
        let mut added = 0;
        for head in heads {
            added += self.make_available(head);
        }
        // The flags must be visible before the device's request for kicks is read: the device writes the request, then
        // reads the flags again.
        fence(Ordering::SeqCst);
        self.wants_kick(added)
    }

    #[inline]
    fn make_available(&mut self, head: u16) -> u16 {
        assert_eq!(self.in_flight[usize::from(head)], 0, "{head} is in flight");
        let (start, mut index, mut count) = (self.avail, head, 0);
        let mut first_flags = 0;
        loop {
            let desc = self.table[usize::from(index)];
            let at = self.avail;
            let flags = desc.flags | at.avail_flags();
            // SAFETY: positions are below `size`, and the driver owns the descriptors that are not in flight.
            unsafe {
                let to = self.ring.add(usize::from(at.index));
                (&raw mut (*to).addr).write_volatile(desc.addr);
                (&raw mut (*to).len).write_volatile(desc.len);
                (&raw mut (*to).id).write_volatile(head);
            }
            match count {
                0 => first_flags = flags,
                _ => self.flags(at.index).store(flags, Ordering::Relaxed),
            }
            count += 1;
            self.avail.advance(1, self.size);
            // A chain with a loop ends when it fills the ring.
            if desc.flags & Desc::NEXT == 0 || count == self.size {
                break;
            }
            index = desc.next;
        }
        self.in_flight[usize::from(head)] = count;
        self.flags(start.index)
            .store(first_flags, Ordering::Release);
        count
    }

    /// Whether the last `added` descriptors passed the position at which the device wants a kick.
    fn wants_kick(&self, added: u16) -> bool {
        let event = self.device_event().load(Ordering::Relaxed);
        match event >> 16 & 3 {
            DISABLE => false,
            DESC => {
                assert!(self.event_idx, "DESC without EVENT_IDX");
                // §2.8.14, counted in descriptors from the last time that both were at the start of a lap with wrap
                // counter 1.
                let size = u32::from(self.size);
                let lap = 2 * size;
                let linear = |word: u32| match word >> 15 {
                    0 => word + size,
                    _ => word & 0x7fff,
                };
                let event = linear(event & 0xffff);
                assert!(
                    event < lap,
                    "the device asks for a kick at {event} of {lap}"
                );
                (linear(u32::from(self.avail.word())) + lap - event - 1) % lap < u32::from(added)
            }
            _ => true,
        }
    }

    #[inline]
    pub(super) fn has_used(&self) -> bool {
        let flags = self.flags(self.used.index).load(Ordering::Acquire);
        flags & (PackedDesc::AVAIL | PackedDesc::USED) == self.used.used_flags()
    }

    #[inline]
    pub(super) fn take_used(&mut self, mut taken: impl FnMut(Used)) -> usize {
        let mut count = 0;
        while self.has_used() {
            taken(self.take_one());
            count += 1;
        }
        count
    }

    /// Takes one element, which must exist.
    #[inline]
    pub(super) fn take_one(&mut self) -> Used {
        let element = self.read(self.used.index);
        let id = usize::from(element.id);
        let chain = std::mem::take(&mut self.in_flight[id]);
        assert!(chain > 0, "{element:?} was not in flight");
        assert!(element.flags & Desc::WRITE != 0, "a status was written");
        self.used.advance(chain, self.size);
        Used {
            id: u32::from(element.id),
            len: element.len,
        }
    }

    pub(super) fn want_calls(&mut self, wanted: bool) {
        let wish = match (wanted, self.event_idx) {
            (false, _) => DISABLE << 16,
            (true, false) => ENABLE << 16,
            (true, true) => DESC << 16 | u32::from(self.used.word()),
        };
        self.driver_event().store(wish, Ordering::Relaxed);
        // The request for calls must be visible before the flags are read again.
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn flags(&self, position: u16) -> &AtomicU16 {
        debug_assert!(position < self.size);
        // SAFETY: the ring has `size` aligned descriptors, mapped as long as `self` is used.
        unsafe { AtomicU16::from_ptr(&raw mut (*self.ring.add(usize::from(position))).flags) }
    }

    #[inline]
    fn driver_event(&self) -> &AtomicU32 {
        // SAFETY: mapped and aligned, as long as `self` is used.
        unsafe { AtomicU32::from_ptr(self.driver) }
    }

    #[inline]
    fn device_event(&self) -> &AtomicU32 {
        // SAFETY: mapped and aligned, as long as `self` is used.
        unsafe { AtomicU32::from_ptr(self.device) }
    }
}
