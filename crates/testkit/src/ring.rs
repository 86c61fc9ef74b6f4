//! The driver's side of a split virtqueue (virtio 1.3 §2.7), with no opinion on what is put into it: hostile tests write
//! nonsense through the same calls that the driver uses.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::time::Duration;

use virtio_bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};

use crate::frontend::{RingAddresses, eventfd, eventfd_wait};
use crate::memory::{Memory, Region};

/// A descriptor (virtio 1.3 §2.7.5), as it lies in memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Desc {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// `NEXT`, `WRITE`, `INDIRECT`.
    pub flags: u16,
    /// The next descriptor, if `NEXT`.
    pub next: u16,
}

impl Desc {
    /// `next` is valid.
    pub const NEXT: u16 = 1;
    /// The device writes here.
    pub const WRITE: u16 = 2;
    /// The buffer is a table of descriptors.
    pub const INDIRECT: u16 = 4;

    /// The bytes of the descriptor.
    pub fn bytes(&self) -> [u8; 16] {
        let (high, flags) = (
            u64::from(self.len),
            u64::from(self.flags) | u64::from(self.next) << 16,
        );
        (u128::from(self.addr) | u128::from(high | flags << 32) << 64).to_le_bytes()
    }
}

/// An entry of the used ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Head of the chain that the device is done with.
    pub id: u32,
    /// How many bytes the device says it wrote.
    pub len: u32,
}

/// A split ring in guest memory, and its three eventfds.
pub struct Ring {
    /// Number of descriptors.
    pub size: u16,
    /// Whether EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Tells the device of new buffers.
    pub kick: OwnedFd,
    /// Tells the driver of used buffers.
    pub call: OwnedFd,
    /// Tells the driver that the ring is broken.
    pub err: OwnedFd,
    desc: *mut Desc,
    avail: *mut u16,
    used: *mut u16,
    avail_idx: u16,
    used_idx: u16,
    guest_addresses: RingAddresses,
    _memory: Arc<Memory>,
}

// SAFETY: the pointers lead into guest memory, which `_memory` keeps mapped and which is Sync.
unsafe impl Send for Ring {}

impl Ring {
    /// Lays a ring out in `region`, which must be one of `memory`'s.
    pub fn new(
        memory: &Arc<Memory>,
        region: &Region,
        size: u16,
        event_idx: bool,
    ) -> io::Result<Self> {
        let n = u64::from(size);
        // Each part on cache lines of its own, as a guest has it.
        let desc = region.alloc(16 * n, 64);
        let avail = region.alloc(6 + 2 * n, 64);
        let used = region.alloc(6 + 8 * n, 64);
        Ok(Self {
            size,
            event_idx,
            kick: eventfd()?,
            call: eventfd()?,
            err: eventfd()?,
            desc: memory.ptr(desc, 16 * usize::from(size)).cast(),
            avail: memory.ptr(avail, 6 + 2 * usize::from(size)).cast(),
            used: memory.ptr(used, 6 + 8 * usize::from(size)).cast(),
            avail_idx: 0,
            used_idx: 0,
            guest_addresses: RingAddresses { desc, used, avail },
            _memory: memory.clone(),
        })
    }

    /// Where the ring lies, guest-physical.
    pub fn guest_addresses(&self) -> RingAddresses {
        self.guest_addresses
    }

    /// The next available index, as counted by the driver.
    pub fn avail_idx(&self) -> u16 {
        self.avail_idx
    }

    /// Puts both indices to 0, or where the device goes on after `GET_VRING_BASE`, and makes the ring in memory as if
    /// nothing had been in flight when they got there: the first publication kicks.
    pub fn restart(&mut self, base: u16) {
        (self.avail_idx, self.used_idx) = (base, base);
        self.avail_word(0).store(0, Ordering::Relaxed);
        self.used_word(0).store(0, Ordering::Relaxed);
        self.used_word(1).store(base, Ordering::Relaxed);
        self.used_word(2 + 4 * usize::from(self.size))
            .store(base, Ordering::Relaxed);
        self.avail_word(2 + usize::from(self.size))
            .store(base, Ordering::Relaxed);
        self.avail_word(1).store(base, Ordering::Release);
        let _ = eventfd_wait(&self.call, Some(Duration::ZERO));
        let _ = eventfd_wait(&self.err, Some(Duration::ZERO));
    }

    /// Writes a descriptor.
    #[inline]
    pub fn set_desc(&mut self, index: u16, desc: Desc) {
        assert!(index < self.size);
        // SAFETY: the table has `size` entries, and the driver owns those that are not in flight.
        unsafe { self.desc.add(usize::from(index)).write_volatile(desc) }
    }

    /// Appends heads to the available ring, publishes them together, and kicks the device if it asks for it.
    #[inline]
    pub fn publish(&mut self, heads: impl IntoIterator<Item = u16>) {
        let before = self.avail_idx;
        for head in heads {
            let position = usize::from(self.avail_idx & (self.size - 1));
            self.avail_word(2 + position).store(head, Ordering::Relaxed);
            self.avail_idx = self.avail_idx.wrapping_add(1);
        }
        self.publish_index(before);
    }

    /// Moves the available index on by `count` without writing heads, and kicks if asked to.
    pub fn publish_jump(&mut self, count: u16) {
        let before = self.avail_idx;
        self.avail_idx = before.wrapping_add(count);
        self.publish_index(before);
    }

    #[inline]
    fn publish_index(&mut self, before: u16) {
        self.avail_word(1).store(self.avail_idx, Ordering::Release);
        // The index must be visible before the device's wish is read: the device writes its wish, then re-reads the index.
        fence(Ordering::SeqCst);
        if self.wants_kick(before) {
            self.kick();
        }
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

    /// Kicks the device, asked for or not.
    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("an eventfd takes 2^64 kicks");
    }

    /// Whether the device has used buffers that `next_used` has not taken yet.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.used_word(1).load(Ordering::Acquire) != self.used_idx
    }

    /// Takes all entries that the device has added to the used ring. Gives their number.
    #[inline]
    pub fn take_used(&mut self, mut taken: impl FnMut(Used)) -> usize {
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

    /// Takes one entry of the used ring, waiting for it until `timeout`.
    pub fn next_used(&mut self, timeout: Duration) -> Option<Used> {
        if !self.wait_timeout(timeout) {
            return None;
        }
        let used = self.used_entry(self.used_idx);
        self.used_idx = self.used_idx.wrapping_add(1);
        Some(used)
    }

    /// Sleeps on the call eventfd until the device has used a buffer.
    pub fn wait(&mut self) {
        self.want_calls(true);
        while !self.has_used() {
            eventfd_wait(&self.call, None).expect("the call eventfd is readable");
        }
        self.want_calls(false);
    }

    /// Like `wait`, but gives up (false) when no call has come for `timeout`.
    pub fn wait_timeout(&mut self, timeout: Duration) -> bool {
        self.want_calls(true);
        while !self.has_used() {
            if !eventfd_wait(&self.call, Some(timeout)).expect("the call eventfd is readable") {
                // Not `has_used()`: buffers that came without the call they were asked for are a lost interrupt.
                return false;
            }
        }
        self.want_calls(false);
        true
    }

    /// Asks for a call at the next used buffer, or for none.
    fn want_calls(&mut self, wanted: bool) {
        if !self.event_idx {
            let flags = if wanted {
                0
            } else {
                VRING_AVAIL_F_NO_INTERRUPT as u16
            };
            self.avail_word(0).store(flags, Ordering::Relaxed);
        } else if wanted {
            // §2.7.7.1: used_event follows the available ring. There is nothing to write for "none": a stale event
            // is not passed again for 65536 buffers.
            self.avail_word(2 + usize::from(self.size))
                .store(self.used_idx, Ordering::Relaxed);
        }
        // The wish must be visible before the used index is read again.
        fence(Ordering::SeqCst);
    }

    /// Whether the device has signalled the error eventfd, waiting for it until `timeout`.
    pub fn broken(&self, timeout: Duration) -> bool {
        eventfd_wait(&self.err, Some(timeout)).expect("the err eventfd is readable")
    }

    #[inline]
    fn used_entry(&self, index: u16) -> Used {
        let position = usize::from(index & (self.size - 1));
        // SAFETY: the position is below `size`; the entry is behind the index that was loaded with Acquire.
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
