//! A split ring (virtio 1.3 §2.7): descriptors in a table, and one ring for each direction.

mod in_order;
mod inflight;

use std::ptr;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use block::Segment;
use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_USED_F_NO_NOTIFY,
};

use super::walk::{View, Walk, prefetch};
use super::{Chain, DESCRIPTOR_BYTES, Ticket, place};
use crate::ring::{RING_SIZE_MAX, RingBase, RingError, RingLayout};

pub(super) use in_order::InOrderSplit;
pub(super) use inflight::TrackedSplit;

pub(super) struct Split {
    descriptors: *const Descriptor,
    available: *const AvailableHead,
    available_ring: *const u16,
    used: *mut UsedHead,
    used_ring: *mut UsedElement,
    size: u16,
    event_idx: bool,
    /// Maximum number of descriptors in a chain.
    chain_limit: u16,
    /// Index up to which available entries have been fetched.
    next_available: u16,
    /// The guest's index as last read.
    seen_available: u16,
    /// Index up to which used entries have been written.
    next_used: u16,
    /// Index up to which used entries are visible to the guest.
    published: u16,
    /// Nothing was published yet, so the driver's event index does not refer to this device.
    first: bool,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

#[repr(C)]
struct AvailableHead {
    flags: AtomicU16,
    index: AtomicU16,
}

#[repr(C)]
struct UsedHead {
    flags: AtomicU16,
    index: AtomicU16,
}

#[repr(C)]
struct UsedElement {
    id: u32,
    len: u32,
}

impl Split {
    pub fn new(view: &View, layout: &RingLayout, chain_limit: u16) -> Result<Self, RingError> {
        let size = layout.size;
        if !size.is_power_of_two() || size > RING_SIZE_MAX {
            return Err(RingError::Size(size));
        }
        let n = u64::from(size);
        // Each ring ends with a 16-bit event index (virtio 1.3 §2.7.6, §2.7.8).
        let descriptors = place(view, "descriptor table", layout.descriptors, n * 16, 16)?;
        let available = place(view, "available ring", layout.available, 6 + 2 * n, 2)?;
        let used = place(view, "used ring", layout.used, 6 + 8 * n, 4)?;
        let used_head = used as *mut UsedHead;
        // SAFETY: the used ring is mapped and aligned; `place` checked this.
        let next_used = unsafe { (*used_head).index.load(Ordering::Acquire) };
        let next_available = layout.base.0 as u16;
        Ok(Self {
            descriptors: descriptors as *const Descriptor,
            available: available as *const AvailableHead,
            available_ring: (available + 4) as *const u16,
            used: used_head,
            used_ring: (used + 4) as *mut UsedElement,
            size,
            event_idx: layout.event_idx,
            chain_limit,
            next_available,
            seen_available: next_available,
            next_used,
            published: next_used,
            first: true,
        })
    }

    pub fn address(&self) -> usize {
        self.descriptors as usize
    }

    pub fn base(&self) -> RingBase {
        RingBase::split(self.next_available)
    }

    #[inline]
    pub fn available(&mut self) -> Result<u16, RingError> {
        if self.seen_available == self.next_available {
            // SAFETY: `available` was checked and stays mapped.
            self.seen_available = unsafe { (*self.available).index.load(Ordering::Acquire) };
        }
        let ahead = self.seen_available.wrapping_sub(self.next_available);
        if ahead > self.size {
            return Err(RingError::AvailableIndex {
                index: self.seen_available,
                ahead,
                size: self.size,
            });
        }
        Ok(ahead)
    }

    #[inline]
    pub fn fetch(&mut self, view: &mut View, segments: &mut [Segment]) -> Result<Chain, RingError> {
        debug_assert_ne!(self.seen_available, self.next_available);
        self.prefetch(view);
        let chain = self.walk(view, self.head(0), segments)?;
        // Only after the walk: if a chain cannot be fetched now, it can be when the front-end has restored
        // its memory.
        self.next_available = self.next_available.wrapping_add(1);
        Ok(chain)
    }

    /// The head of the chain that is `ahead` chains after the next one.
    #[inline]
    fn head(&self, ahead: u16) -> u16 {
        let entry = usize::from(self.next_available.wrapping_add(ahead) & (self.size - 1));
        // SAFETY: `entry` is less than the ring's size.
        unsafe { ptr::read_volatile(self.available_ring.add(entry)) }
    }

    /// Prefetches the next chains. The guest has just written them on another core; without the prefetch,
    /// each of the three steps from ring to header would wait for that core in turn.
    #[inline]
    fn prefetch(&self, view: &View) {
        let left = self.seen_available.wrapping_sub(self.next_available);
        let first = |ahead: u16| -> Option<Descriptor> {
            let head = self.head(ahead);
            // SAFETY: `head` is less than the ring's size.
            (head < self.size)
                .then(|| unsafe { ptr::read_volatile(self.descriptors.add(usize::from(head))) })
        };
        let table = |d: Descriptor| {
            let indirect = u32::from(d.flags) & VRING_DESC_F_INDIRECT != 0;
            indirect
                .then(|| view.known(d.addr, DESCRIPTOR_BYTES))
                .flatten()
        };
        if left > 6 {
            prefetch(
                self.descriptors
                    .wrapping_add(usize::from(self.head(6)))
                    .cast(),
            );
        }
        if left > 4
            && let Some(addr) = first(4).and_then(table)
        {
            prefetch(addr as *const u8);
        }
        if left > 2
            && let Some(d) = first(2)
        {
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

    fn walk(
        &mut self,
        view: &mut View,
        head: u16,
        segments: &mut [Segment],
    ) -> Result<Chain, RingError> {
        let mut table = Table::Ring;
        let mut table_len = u32::from(self.size);
        let mut index = head;
        let mut walk = Walk::new(head, u32::from(self.chain_limit), segments);
        loop {
            if u32::from(index) >= table_len {
                return Err(RingError::DescriptorIndex(index, table_len));
            }
            let d = self.descriptor(view, table, index)?;
            let flags = u32::from(d.flags);

            if flags & VRING_DESC_F_INDIRECT != 0 {
                // virtio 1.3 §2.7.5.3.1: not nested, not chained; its own write flag is ignored.
                let nested = !matches!(table, Table::Ring);
                let bytes = u64::from(d.len);
                if nested
                    || flags & VRING_DESC_F_NEXT != 0
                    || bytes == 0
                    || !bytes.is_multiple_of(DESCRIPTOR_BYTES)
                {
                    return Err(RingError::Indirect {
                        len: d.len,
                        flags: d.flags,
                    });
                }
                table = match view.locate(d.addr, bytes) {
                    Some(addr) => Table::Indirect(addr as *const u8),
                    None => Table::Scattered(d.addr),
                };
                table_len = d.len / DESCRIPTOR_BYTES as u32;
                index = 0;
                continue;
            }
            walk.add(view, d.addr, d.len, flags)?;
            if flags & VRING_DESC_F_NEXT == 0 {
                break;
            }
            index = d.next;
        }
        walk.finish(head, 0)
    }

    #[inline]
    fn descriptor(
        &self,
        view: &mut View,
        table: Table,
        index: u16,
    ) -> Result<Descriptor, RingError> {
        let index = usize::from(index);
        match table {
            // SAFETY: `index` is less than the ring's size, and the table is mapped and aligned.
            Table::Ring => Ok(unsafe { ptr::read_volatile(self.descriptors.add(index)) }),
            Table::Indirect(start) => {
                // SAFETY: `index` is less than the number of descriptors that `locate` found mapped. The
                // guest may place the table at any address, so the read is unaligned.
                Ok(unsafe { ptr::read_unaligned(start.cast::<Descriptor>().add(index)) })
            }
            Table::Scattered(start) => {
                let mut bytes = [0; DESCRIPTOR_BYTES as usize];
                view.read(
                    start.wrapping_add(index as u64 * DESCRIPTOR_BYTES),
                    &mut bytes,
                )?;
                // SAFETY: any 16 bytes are a valid descriptor.
                Ok(unsafe { ptr::read_unaligned(bytes.as_ptr().cast()) })
            }
        }
    }

    #[inline]
    pub fn complete(&mut self, ticket: &Ticket, written: u32) {
        self.give_back(ticket.head, written);
    }

    #[inline]
    fn give_back(&mut self, head: u16, written: u32) {
        let entry = usize::from(self.next_used & (self.size - 1));
        // SAFETY: `entry` is less than the ring's size.
        unsafe {
            ptr::write_volatile(
                self.used_ring.add(entry),
                UsedElement {
                    id: u32::from(head),
                    len: written,
                },
            );
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_used);
        if old == new {
            return false;
        }
        self.published = new;
        // SAFETY: both rings are mapped, and the event index follows the available ring.
        unsafe {
            (*self.used).index.store(new, Ordering::Release);
            // The guest writes its event index and then reads the used index; one side must see the other's
            // write.
            fence(Ordering::SeqCst);
            let first = std::mem::replace(&mut self.first, false);
            if self.event_idx {
                let event = ptr::read_volatile(self.available_ring.add(usize::from(self.size)));
                // virtio 1.3 §2.7.10: was `event` passed between `old` and `new`?
                first || new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
            } else {
                let flags = (*self.available).flags.load(Ordering::Relaxed);
                u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0
            }
        }
    }

    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        // SAFETY: both rings are mapped, and the event index follows the used ring.
        unsafe {
            if self.event_idx {
                let event = self.used_ring.add(usize::from(self.size)).cast::<u16>();
                ptr::write_volatile(event, self.next_available);
            } else {
                (*self.used).flags.store(0, Ordering::Relaxed);
            }
            // The guest writes its index and then reads the value that was just written.
            fence(Ordering::SeqCst);
            (*self.available).index.load(Ordering::Acquire) != self.next_available
        }
    }

    #[inline]
    pub fn disable_kicks(&mut self) {
        // With event indices there is nothing to do: the device's index falls behind by itself, and the guest
        // kicks only when its own index passes it.
        if !self.event_idx {
            // SAFETY: the used ring is mapped.
            unsafe {
                (*self.used)
                    .flags
                    .store(VRING_USED_F_NO_NOTIFY as u16, Ordering::Relaxed);
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Table {
    Ring,
    Indirect(*const u8),
    /// An indirect table that spans regions, by guest address.
    Scattered(u64),
}
