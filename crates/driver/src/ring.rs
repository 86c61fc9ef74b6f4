//! The driver's side of a virtqueue, split or packed. It does not check what is written to the ring: hostile tests
//! write invalid data through the same calls that the driver uses.
//!
//! Callers always use descriptors of a split ring, linked by index, so that the same code drives both kinds.

mod packed;
mod split;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::frontend::{RingAddresses, eventfd, eventfd_wait, eventfd_wait_any};
use crate::memory::{Memory, Region};

pub use packed::{PackedDesc, PackedRing};
pub use split::SplitRing;

/// A descriptor (virtio 1.3 §2.7.5), with its layout in memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Desc {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// `NEXT`, `WRITE`, `INDIRECT`.
    pub flags: u16,
    /// The index of the next descriptor, if `NEXT` is set.
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

/// The device's report of a completed chain.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Head of the chain.
    pub id: u32,
    /// The number of bytes that the device claims to have written.
    pub len: u32,
}

/// A ring in guest memory, and its three eventfds.
pub struct Ring {
    /// Number of descriptors.
    pub size: u16,
    /// Whether EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Signals new buffers to the device.
    pub kick: OwnedFd,
    /// Signals used buffers to the driver.
    pub call: OwnedFd,
    /// Signals a broken ring to the driver.
    pub err: OwnedFd,
    kind: Kind,
    guest_addresses: RingAddresses,
    _memory: Arc<Memory>,
}

enum Kind {
    Split(SplitRing),
    Packed(PackedRing),
}

// SAFETY: the pointers point into guest memory, which `_memory` keeps mapped and which is Sync.
unsafe impl Send for Ring {}

impl Ring {
    /// Lays a split ring out in `region`, which must be one of `memory`'s.
    pub fn new(
        memory: &Arc<Memory>,
        region: &Region,
        size: u16,
        event_idx: bool,
    ) -> io::Result<Self> {
        let (ring, addresses) = SplitRing::new(memory, region, size, event_idx);
        Self::of(Kind::Split(ring), addresses, memory, size, event_idx)
    }

    /// Lays a packed ring out in `region`, which must be one of `memory`'s.
    pub fn packed(
        memory: &Arc<Memory>,
        region: &Region,
        size: u16,
        event_idx: bool,
    ) -> io::Result<Self> {
        let (ring, addresses) = PackedRing::new(memory, region, size, event_idx);
        Self::of(Kind::Packed(ring), addresses, memory, size, event_idx)
    }

    fn of(
        kind: Kind,
        guest_addresses: RingAddresses,
        memory: &Arc<Memory>,
        size: u16,
        event_idx: bool,
    ) -> io::Result<Self> {
        Ok(Self {
            size,
            event_idx,
            kick: eventfd()?,
            call: eventfd()?,
            err: eventfd()?,
            kind,
            guest_addresses,
            _memory: memory.clone(),
        })
    }

    /// The guest-physical addresses of the ring.
    pub fn guest_addresses(&self) -> RingAddresses {
        self.guest_addresses
    }

    /// Whether the ring is packed.
    pub fn is_packed(&self) -> bool {
        matches!(self.kind, Kind::Packed(_))
    }

    /// The bytes of a descriptor in an indirect table. In a table of a packed ring, descriptors follow one another
    /// without links.
    pub fn table_bytes(&self, desc: &Desc) -> [u8; 16] {
        match self.kind {
            Kind::Split(_) => desc.bytes(),
            Kind::Packed(_) => PackedDesc {
                addr: desc.addr,
                len: desc.len,
                id: 0,
                flags: desc.flags & !Desc::NEXT,
            }
            .bytes(),
        }
    }

    /// The base with which a driver starts.
    pub fn first_base(&self) -> u16 {
        match self.kind {
            Kind::Split(_) => 0,
            Kind::Packed(_) => 1 << 15,
        }
    }

    /// The value for SET_VRING_BASE if nothing is in flight.
    pub fn base_word(&self, base: u16) -> u32 {
        match self.kind {
            Kind::Split(_) => u32::from(base),
            Kind::Packed(_) => u32::from(base) | u32::from(base) << 16,
        }
    }

    /// The value for SET_VRING_BASE after the device has died, whether or not requests are in flight: it contains all
    /// that a front-end then knows.
    pub fn base_after_death(&self) -> u32 {
        match &self.kind {
            Kind::Split(ring) => u32::from(ring.device_used_idx()),
            Kind::Packed(_) => self.base_word(self.first_base()),
        }
    }

    /// Where the driver makes the next chain available: an index, or a position with the wrap counter in the top bit.
    pub fn avail_idx(&self) -> u16 {
        match &self.kind {
            Kind::Split(ring) => ring.avail_idx(),
            Kind::Packed(ring) => ring.avail(),
        }
    }

    /// Access to the split ring.
    ///
    /// # Panics
    /// The ring is packed.
    pub fn as_split(&mut self) -> &mut SplitRing {
        match &mut self.kind {
            Kind::Split(ring) => ring,
            Kind::Packed(_) => panic!("the ring is packed"),
        }
    }

    /// Access to the packed ring.
    ///
    /// # Panics
    /// The ring is split.
    pub fn as_packed(&mut self) -> &mut PackedRing {
        match &mut self.kind {
            Kind::Split(_) => panic!("the ring is split"),
            Kind::Packed(ring) => ring,
        }
    }

    /// Starts at `base`, or continues there after `GET_VRING_BASE`, and initialises the ring in memory as if nothing
    /// had been in flight at that point: the first publication kicks.
    pub fn restart(&mut self, base: u16) {
        match &mut self.kind {
            Kind::Split(ring) => ring.restart(base),
            Kind::Packed(ring) => ring.restart(base),
        }
        let _ = eventfd_wait(&self.call, Some(Duration::ZERO));
        let _ = eventfd_wait(&self.err, Some(Duration::ZERO));
    }

    /// Writes a descriptor.
    #[inline]
    pub fn set_desc(&mut self, index: u16, desc: Desc) {
        match &mut self.kind {
            Kind::Split(ring) => ring.set_desc(index, desc),
            Kind::Packed(ring) => ring.set_desc(index, desc),
        }
    }

    /// Makes the chains with these heads available, and kicks the device if it wants that.
    #[inline]
    pub fn publish(&mut self, heads: impl IntoIterator<Item = u16>) {
        let wants_kick = match &mut self.kind {
            Kind::Split(ring) => ring.publish(heads),
            Kind::Packed(ring) => ring.publish(heads),
        };
        if wants_kick {
            self.kick();
        }
    }

    /// Advances the available index of a split ring by `count` without writing heads, and kicks the device if it wants
    /// that.
    pub fn publish_jump(&mut self, count: u16) {
        if self.as_split().publish_jump(count) {
            self.kick();
        }
    }

    /// Kicks the device, whether or not it wants that.
    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("an eventfd takes 2^64 kicks");
    }

    /// Whether the device has used buffers that `next_used` has not taken yet.
    #[inline]
    pub fn has_used(&self) -> bool {
        match &self.kind {
            Kind::Split(ring) => ring.has_used(),
            Kind::Packed(ring) => ring.has_used(),
        }
    }

    /// Takes all used buffers. Returns their number.
    #[inline]
    pub fn take_used(&mut self, taken: impl FnMut(Used)) -> usize {
        match &mut self.kind {
            Kind::Split(ring) => ring.take_used(taken),
            Kind::Packed(ring) => ring.take_used(taken),
        }
    }

    /// Takes one used chain; waits for it for at most `timeout`.
    pub fn next_used(&mut self, timeout: Duration) -> Option<Used> {
        self.wait_timeout(timeout).then(|| match &mut self.kind {
            Kind::Split(ring) => ring.take_one(),
            Kind::Packed(ring) => ring.take_one(),
        })
    }

    /// Sleeps on the call eventfd until the device has used a buffer.
    pub fn wait(&mut self) {
        self.want_calls(true);
        while !self.has_used() {
            eventfd_wait(&self.call, None).expect("the call eventfd is readable");
        }
        self.want_calls(false);
    }

    /// As `wait`, but until `deadline` at most (false). Calls then stay enabled, as in a guest that does something
    /// else.
    pub fn wait_until(&mut self, deadline: Instant) -> bool {
        self.want_calls(true);
        while !self.has_used() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            eventfd_wait(&self.call, Some(left)).expect("the call eventfd is readable");
        }
        self.want_calls(false);
        true
    }

    /// Sleeps on the call eventfds of all `rings` until the device has used a buffer of one of them.
    pub fn wait_any<'a>(rings: impl Iterator<Item = &'a mut Self>) {
        let mut rings: Vec<_> = rings.collect();
        rings.iter_mut().for_each(|ring| ring.want_calls(true));
        while !rings.iter().any(|ring| ring.has_used()) {
            let calls: Vec<_> = rings.iter().map(|ring| &ring.call).collect();
            eventfd_wait_any(&calls).expect("the call eventfds are readable");
        }
        rings.iter_mut().for_each(|ring| ring.want_calls(false));
    }

    /// As `wait`, but returns false if no call has arrived for `timeout`.
    pub fn wait_timeout(&mut self, timeout: Duration) -> bool {
        self.want_calls(true);
        while !self.has_used() {
            if !eventfd_wait(&self.call, Some(timeout)).expect("the call eventfd is readable") {
                // Do not check `has_used()` again: used buffers without the requested call are a lost interrupt.
                return false;
            }
        }
        self.want_calls(false);
        true
    }

    /// Enables or disables the call for the next used buffer.
    fn want_calls(&mut self, wanted: bool) {
        match &mut self.kind {
            Kind::Split(ring) => ring.want_calls(wanted),
            Kind::Packed(ring) => ring.want_calls(wanted),
        }
    }

    /// Whether the device signals the error eventfd within `timeout`.
    pub fn broken(&self, timeout: Duration) -> bool {
        eventfd_wait(&self.err, Some(timeout)).expect("the err eventfd is readable")
    }
}
