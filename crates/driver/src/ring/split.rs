//! A split ring (virtio 1.3 §2.7).

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use virtio_bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};

use super::{Desc, Used};
use crate::frontend::RingAddresses;
use crate::memory::{Memory, Region};

/// A split ring in guest memory, which the containing [`Ring`](super::Ring) keeps mapped.
pub struct SplitRing {
    size: u16,
    event_idx: bool,
    desc: *mut Desc,
    avail: *mut u16,
    used: *mut u16,
    avail_idx: u16,
    used_idx: u16,
}

impl SplitRing {
    pub(super) fn new(
        memory: &Arc<Memory>,
        region: &Region,
        size: u16,
        event_idx: bool,
    ) -> (Self, RingAddresses) {
        let n = u64::from(size);
        // Each part has its own cache lines, as in a guest.
        let desc = region.alloc(16 * n, 64);
        let avail = region.alloc(6 + 2 * n, 64);
        let used = region.alloc(6 + 8 * n, 64);
        let ring = Self {
            size,
            event_idx,
            desc: memory.ptr(desc, 16 * usize::from(size)).cast(),
            avail: memory.ptr(avail, 6 + 2 * usize::from(size)).cast(),
            used: memory.ptr(used, 6 + 8 * usize::from(size)).cast(),
            avail_idx: 0,
            used_idx: 0,
        };
        (ring, RingAddresses { desc, used, avail })
    }

    pub(super) fn avail_idx(&self) -> u16 {
        self.avail_idx
    }

    /// The device's used index.
    pub(super) fn device_used_idx(&self) -> u16 {
        self.used_word(1).load(Ordering::Acquire)
    }

    pub(super) fn restart(&mut self, base: u16) {
        (self.avail_idx, self.used_idx) = (base, base);
        self.avail_word(0).store(0, Ordering::Relaxed);
        self.used_word(0).store(0, Ordering::Relaxed);
        self.used_word(1).store(base, Ordering::Relaxed);
        self.used_word(2 + 4 * usize::from(self.size))
            .store(base, Ordering::Relaxed);
        self.avail_word(2 + usize::from(self.size))
            .store(base, Ordering::Relaxed);
        self.avail_word(1).store(base, Ordering::Release);
    }

    #[inline]
    pub(super) fn set_desc(&mut self, index: u16, desc: Desc) {
        assert!(index < self.size);
        // SAFETY: the table has `size` entries, and the driver owns those that are not in flight.
        unsafe { self.desc.add(usize::from(index)).write_volatile(desc) }
    }

    /// Appends heads to the available ring and publishes them together. Returns whether the device wants a kick.
    #[inline]
    pub(super) fn publish(&mut self, heads: impl IntoIterator<Item = u16>) -> bool {
        let before = self.avail_idx;
        for head in heads {
            let position = usize::from(self.avail_idx & (self.size - 1));
            self.avail_word(2 + position).store(head, Ordering::Relaxed);
            self.avail_idx = self.avail_idx.wrapping_add(1);
        }
        self.publish_index(before)
    }

    pub(super) fn publish_jump(&mut self, count: u16) -> bool {
        let before = self.avail_idx;
        self.avail_idx = before.wrapping_add(count);
        self.publish_index(before)
    }

    #[inline]
    fn publish_index(&mut self, before: u16) -> bool {
        self.avail_word(1).store(self.avail_idx, Ordering::Release);
        // The index must be visible before the device's request for kicks is read: the device writes the request, then
        // reads the index again.
        fence(Ordering::SeqCst);
        self.wants_kick(before)
    }

    #[inline]
    fn wants_kick(&self, before: u16) -> bool {
        if self.event_idx {
            // §2.7.7.2: avail_event follows the used ring; kick when the index moves past it.
            let event = self
                .used_word(2 + 4 * usize::from(self.size))
                .load(Ordering::Relaxed);
            self.avail_idx.wrapping_sub(event).wrapping_sub(1) < self.avail_idx.wrapping_sub(before)
        } else {
            self.used_word(0).load(Ordering::Relaxed) & VRING_USED_F_NO_NOTIFY as u16 == 0
        }
    }

    #[inline]
    pub(super) fn has_used(&self) -> bool {
        self.used_word(1).load(Ordering::Acquire) != self.used_idx
    }

    /// Takes all entries that the device has added to the used ring. Returns their number.
    #[inline]
    pub(super) fn take_used(&mut self, mut taken: impl FnMut(Used)) -> usize {
        let end = self.used_word(1).load(Ordering::Acquire);
        let count = end.wrapping_sub(self.used_idx);
        assert!(
            count <= self.size,
            "the device used {count} buffers at once in a ring of {}",
            self.size
        );
        while self.used_idx != end {
            taken(self.used_entry(self.used_idx));
            self.used_idx = self.used_idx.wrapping_add(1);
        }
        usize::from(count)
    }

    /// Takes one entry, which must exist.
    pub(super) fn take_one(&mut self) -> Used {
        let used = self.used_entry(self.used_idx);
        self.used_idx = self.used_idx.wrapping_add(1);
        used
    }

    pub(super) fn want_calls(&mut self, wanted: bool) {
        if !self.event_idx {
            let flags = if wanted {
                0
            } else {
                VRING_AVAIL_F_NO_INTERRUPT as u16
            };
            self.avail_word(0).store(flags, Ordering::Relaxed);
        } else if wanted {
            // §2.7.7.1: used_event follows the available ring. Disabling calls needs no write: the index passes an old
            // event again only after 65536 buffers.
            self.avail_word(2 + usize::from(self.size))
                .store(self.used_idx, Ordering::Relaxed);
        }
        // The request for calls must be visible before the used index is read again.
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn used_entry(&self, index: u16) -> Used {
        let position = usize::from(index & (self.size - 1));
        // SAFETY: the position is below `size`; the entry is before the used index, which was loaded with Acquire.
        unsafe {
            self.used
                .add(2 + 4 * position)
                .cast::<Used>()
                .read_volatile()
        }
    }

    #[inline]
    fn avail_word(&self, index: usize) -> &AtomicU16 {
        debug_assert!(index < 3 + usize::from(self.size));
        // SAFETY: the available ring has `3 + size` aligned words, mapped as long as `self` lives.
        unsafe { AtomicU16::from_ptr(self.avail.add(index)) }
    }

    #[inline]
    fn used_word(&self, index: usize) -> &AtomicU16 {
        debug_assert!(index < 3 + 4 * usize::from(self.size));
        // SAFETY: the used ring has `3 + 4 * size` aligned words, mapped as long as `self` lives.
        unsafe { AtomicU16::from_ptr(self.used.add(index)) }
    }
}
