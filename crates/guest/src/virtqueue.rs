//! A virtqueue as the device sees it. Its type, [split](split) or [packed](packed), decides how chains are
//! fetched and returned; the content of a chain is the same for [both](walk).
//!
//! ringdisk walks descriptor chains itself: the walk checks every address against a cached window of guest
//! memory and allocates nothing. It reads ring memory once, with volatile or atomic loads, because the guest
//! may change it at any time; the values that were read are the values that were checked.

#![expect(
    unsafe_code,
    reason = "rings live in memory that a guest shares with us"
)]

mod logged;
mod packed;
mod split;
mod walk;

use std::ptr;
use std::sync::Arc;

use block::Segment;

use crate::inflight::InflightQueue;
use crate::log::LogError;
use crate::memory::GuestMemory;
use crate::ring::{RingBase, RingError, RingLayout};
use logged::Logged;
use packed::{Packed, TrackedPacked};
use split::{InOrderSplit, Split, TrackedSplit};
use walk::View;

pub use logged::DirtyMarks;

/// Length of a virtio-blk request header, which is at the start of every chain, in bytes.
const HEADER_BYTES: usize = 16;
const DESCRIPTOR_BYTES: u64 = 16;

/// A request in guest memory: a copy of its header, and the location of its buffers.
///
/// The segments are in the slice that [`Virtqueue::fetch`] filled: the device-readable ones first, then the
/// device-writable ones, without header and status.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    /// The guest's id of the request: its first descriptor, or its buffer id.
    pub head: u16,
    /// The virtio-blk header.
    pub header: [u8; HEADER_BYTES],
    /// Number of segments that the device reads.
    pub readable: u16,
    /// Number of bytes that the device reads, after the header.
    pub readable_len: u64,
    /// Number of segments that the device writes.
    pub writable: u16,
    /// Number of bytes that the device writes, before the status.
    pub writable_len: u64,
    /// Number of descriptors that the chain occupies in a packed ring.
    descriptors: u16,
    /// Address of the status byte in this process.
    status: usize,
}

/// The device side of a virtqueue.
pub struct Virtqueue {
    ring: Ring,
    number: u16,
    size: u16,
    segments_max: usize,
    /// Keeps the ring and every address that it returns mapped.
    view: View,
}

enum Ring {
    Split(Split),
    Packed(Packed),
    // Boxed, because most rings are not tracked and must not grow for those that are.
    TrackedSplit(Box<TrackedSplit>),
    TrackedPacked(Box<TrackedPacked>),
    InOrder(Box<InOrderSplit>),
    Logged(Box<Logged>),
}

// SAFETY: the pointers refer to shared memory that `view` keeps mapped. They are not bound to a thread, and
// only the owner of this value uses them.
unsafe impl Send for Virtqueue {}

impl Virtqueue {
    /// The largest ring that QEMU creates (VIRTQUEUE_MAX_SIZE). In a larger ring, no chain has more
    /// descriptors than this, because drivers size chains by seg_max.
    pub const MAX_SIZE: u16 = 1024;

    /// Opens a ring with this layout.
    ///
    /// # Errors
    /// The size is not allowed, or part of the ring is outside `memory` or misaligned.
    pub fn new(memory: Arc<GuestMemory>, layout: RingLayout) -> Result<Self, RingError> {
        Self::open_ring(memory, layout, |view, limit| {
            Ok(if layout.packed {
                Ring::Packed(Packed::new(view, &layout, limit)?)
            } else {
                Ring::Split(Split::new(view, &layout, limit)?)
            })
        })
    }

    /// Like [`new`](Self::new), but records requests in flight in `region`. If a predecessor has done so, the
    /// ring continues where the predecessor stopped, and the requests that were in flight are fetched first,
    /// in their original order.
    ///
    /// # Errors
    /// As for [`new`](Self::new), or the region does not belong to this ring.
    pub fn tracked(
        memory: Arc<GuestMemory>,
        layout: RingLayout,
        region: InflightQueue,
    ) -> Result<Self, RingError> {
        Self::open_ring(memory, layout, |view, limit| {
            Ok(if layout.packed {
                let ring = TrackedPacked::new(view, &layout, limit, region)?;
                Ring::TrackedPacked(Box::new(ring))
            } else {
                let ring = TrackedSplit::new(view, &layout, limit, region)?;
                Ring::TrackedSplit(Box::new(ring))
            })
        })
    }

    /// Like [`new`](Self::new), for a ring whose region has too few entries. A split ring then returns its
    /// requests in order and continues where its used ring ends, so the used index shows which requests are
    /// in flight. For a packed ring, nothing shows this.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn untracked(memory: Arc<GuestMemory>, layout: RingLayout) -> Result<Self, RingError> {
        if layout.packed {
            Self::new(memory, layout)
        } else {
            Self::open_ring(memory, layout, |view, limit| {
                let ring = InOrderSplit::new(view, &layout, limit)?;
                Ok(Ring::InOrder(Box::new(ring)))
            })
        }
    }

    fn open_ring(
        memory: Arc<GuestMemory>,
        layout: RingLayout,
        ring: impl FnOnce(&View, u16) -> Result<Ring, RingError>,
    ) -> Result<Self, RingError> {
        let view = View::new(memory);
        // Data, header and status.
        let chain_limit = layout.max_segments.saturating_add(2);
        let chain_limit = chain_limit.max(layout.size.min(Self::MAX_SIZE));
        Ok(Self {
            ring: ring(&view, chain_limit)?,
            number: layout.number,
            size: layout.size,
            segments_max: usize::from(chain_limit) + view.memory.len(),
            view,
        })
    }

    /// Returns the same queue, which from now on marks its writes to guest memory in a dirty log. The queue
    /// was opened with `layout`.
    ///
    /// # Errors
    /// The log is too short for this guest.
    pub fn logged(self, layout: &RingLayout, marks: DirtyMarks) -> Result<Self, LogError> {
        let logged = Logged::new(self.ring, &self.view, layout, marks)?;
        Ok(Self {
            ring: Ring::Logged(Box::new(logged)),
            ..self
        })
    }

    /// The queue's number, as the front-end counts.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Address of the descriptors in this process.
    pub fn address(&self) -> usize {
        self.ring.address()
    }

    /// The position at which a successor would continue.
    pub fn base(&self) -> RingBase {
        self.ring.base()
    }

    /// The guest's memory as mapped in this process.
    pub fn memory(&self) -> &GuestMemory {
        &self.view.memory
    }

    /// Maximum number of segments that one chain can need: one for each descriptor, and one more for each
    /// boundary between regions that a buffer can cross. Longer chains are rejected.
    pub fn max_segments(&self) -> usize {
        self.segments_max
    }

    /// Upper bound of [`max_segments`](Self::max_segments).
    pub const MAX_SEGMENTS: usize = Self::MAX_SIZE as usize + 2 + crate::MAX_MEM_SLOTS;

    /// Number of requests that can be fetched; for a packed ring, those found so far.
    ///
    /// # Errors
    /// The guest's index is invalid.
    #[inline]
    pub fn available(&mut self) -> Result<u16, RingError> {
        self.ring.available()
    }

    /// Whether the next process that opens the ring can determine which requests are in flight.
    pub fn is_tracked(&self) -> bool {
        self.ring.is_tracked()
    }

    /// Whether something was marked in the dirty log since the last call.
    pub fn take_marked(&mut self) -> bool {
        match &mut self.ring {
            Ring::Logged(logged) => logged.take_marked(),
            _ => false,
        }
    }

    /// Puts the requests that a predecessor had fetched and not returned into the ring again. A process that
    /// continues at the returned base then fetches them first, without the region that records them. Returns
    /// `None` if they are not recorded. The ring must not be served during the call.
    pub fn requeue(&mut self) -> Option<RingBase> {
        match &mut self.ring {
            Ring::TrackedSplit(ring) => Some(ring.requeue()),
            Ring::TrackedPacked(ring) => Some(ring.requeue()),
            Ring::Split(_) | Ring::Packed(_) | Ring::InOrder(_) | Ring::Logged(_) => None,
        }
    }

    /// Number of requests that a predecessor had fetched and not returned, and that were not fetched again
    /// yet.
    pub fn resubmits(&self) -> usize {
        self.ring.resubmits()
    }

    /// Fetches the next request that [`available`](Self::available) counted, and writes the location of its
    /// buffers to `segments`. A chain with more segments than fit is rejected.
    ///
    /// # Errors
    /// The chain breaks the protocol.
    #[inline]
    pub fn fetch(&mut self, segments: &mut [Segment]) -> Result<Chain, RingError> {
        self.ring.fetch(&mut self.view, segments)
    }

    /// Returns a request to the guest, with its status and the number of bytes written to its buffers. The
    /// guest sees it after [`publish`](Self::publish).
    #[inline]
    pub fn complete(&mut self, ticket: &Ticket, status: u8, written: u32) {
        // SAFETY: the status byte was found mapped when the chain was fetched from this queue.
        unsafe { ptr::write_volatile(ticket.status as *mut u8, status) };
        self.ring.complete(ticket, written);
    }

    /// Called for a request that is not returned because its queue was given up. Data written for it is still
    /// marked in the dirty log, if there is one.
    #[cold]
    pub fn abandon(&mut self, ticket: &Ticket) {
        if let Ring::Logged(logged) = &mut self.ring {
            logged.mark(ticket);
        }
    }

    /// Makes all completed requests visible to the guest; returns whether the guest wants an interrupt
    /// (virtio 1.3 §2.7.7, §2.8.10).
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    /// Asks the guest to kick at its next request; returns whether a request has arrived in the meantime.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        self.ring.enable_kicks()
    }

    /// Tells the guest that kicks are not needed.
    #[inline]
    pub fn disable_kicks(&mut self) {
        self.ring.disable_kicks()
    }

    /// Copies bytes from the segments of a chain of this queue; returns the number of bytes copied.
    pub fn copy_from(&self, segments: &[Segment], to: &mut [u8]) -> usize {
        let mut done = 0;
        for segment in segments {
            let len = segment.len.min(to.len() - done);
            // SAFETY: segments come from `fetch`, which found them mapped; `to` has room for `len` bytes.
            unsafe {
                ptr::copy_nonoverlapping(segment.addr as *const u8, to.as_mut_ptr().add(done), len);
            }
            done += len;
        }
        done
    }

    /// Fills the segments of a chain of this queue with zeroes.
    pub fn zero(&self, segments: &[Segment]) {
        for segment in segments {
            // SAFETY: segments come from `fetch`, which found them mapped.
            unsafe { ptr::write_bytes(segment.addr as *mut u8, 0, segment.len) };
        }
    }

    /// Copies bytes to the segments of a chain of this queue; returns the number of bytes that fit.
    pub fn copy_to(&self, segments: &[Segment], from: &[u8]) -> usize {
        let mut done = 0;
        for segment in segments {
            let len = segment.len.min(from.len() - done);
            // SAFETY: segments come from `fetch`, which found them mapped; `from` has `len` bytes left.
            unsafe {
                ptr::copy_nonoverlapping(from.as_ptr().add(done), segment.addr as *mut u8, len);
            }
            done += len;
        }
        done
    }
}

// One match per call for every ring type: rings that mark their writes call these methods again.
impl Ring {
    fn address(&self) -> usize {
        match self {
            Self::Split(ring) => ring.address(),
            Self::Packed(ring) => ring.address(),
            Self::TrackedSplit(ring) => ring.address(),
            Self::TrackedPacked(ring) => ring.address(),
            Self::InOrder(ring) => ring.address(),
            Self::Logged(logged) => logged.ring.address(),
        }
    }

    fn base(&self) -> RingBase {
        match self {
            Self::Split(ring) => ring.base(),
            Self::Packed(ring) => ring.base(),
            Self::TrackedSplit(ring) => ring.base(),
            Self::TrackedPacked(ring) => ring.base(),
            Self::InOrder(ring) => ring.base(),
            Self::Logged(logged) => logged.ring.base(),
        }
    }

    fn is_tracked(&self) -> bool {
        match self {
            Self::Split(_) | Self::Packed(_) => false,
            Self::TrackedSplit(_) | Self::TrackedPacked(_) | Self::InOrder(_) => true,
            Self::Logged(logged) => logged.ring.is_tracked(),
        }
    }

    #[inline]
    fn available(&mut self) -> Result<u16, RingError> {
        match self {
            Self::Split(ring) => ring.available(),
            Self::Packed(ring) => Ok(ring.available()),
            Self::TrackedSplit(ring) => ring.available(),
            Self::TrackedPacked(ring) => Ok(ring.available()),
            Self::InOrder(ring) => ring.available(),
            Self::Logged(logged) => logged.available(),
        }
    }

    fn resubmits(&self) -> usize {
        match self {
            Self::Split(_) | Self::Packed(_) | Self::InOrder(_) => 0,
            Self::TrackedSplit(ring) => ring.resubmits(),
            Self::TrackedPacked(ring) => ring.resubmits(),
            Self::Logged(logged) => logged.ring.resubmits(),
        }
    }

    #[inline]
    fn fetch(&mut self, view: &mut View, segments: &mut [Segment]) -> Result<Chain, RingError> {
        match self {
            Self::Split(ring) => ring.fetch(view, segments),
            Self::Packed(ring) => ring.fetch(view, segments),
            Self::TrackedSplit(ring) => ring.fetch(view, segments),
            Self::TrackedPacked(ring) => ring.fetch(view, segments),
            Self::InOrder(ring) => ring.fetch(view, segments),
            Self::Logged(logged) => logged.fetch(view, segments),
        }
    }

    #[inline]
    fn complete(&mut self, ticket: &Ticket, written: u32) {
        match self {
            Self::Split(ring) => ring.complete(ticket, written),
            Self::Packed(ring) => ring.complete(ticket, written),
            Self::TrackedSplit(ring) => ring.complete(ticket, written),
            Self::TrackedPacked(ring) => ring.complete(ticket, written),
            Self::InOrder(ring) => ring.complete(ticket, written),
            Self::Logged(logged) => logged.complete(ticket, written),
        }
    }

    #[inline]
    fn publish(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.publish(),
            Self::Packed(ring) => ring.publish(),
            Self::TrackedSplit(ring) => ring.publish(),
            Self::TrackedPacked(ring) => ring.publish(),
            Self::InOrder(ring) => ring.publish(),
            Self::Logged(logged) => logged.publish(),
        }
    }

    #[inline]
    fn enable_kicks(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.enable_kicks(),
            Self::Packed(ring) => ring.enable_kicks(),
            Self::TrackedSplit(ring) => ring.enable_kicks(),
            Self::TrackedPacked(ring) => ring.enable_kicks(),
            Self::InOrder(ring) => ring.enable_kicks(),
            Self::Logged(logged) => logged.enable_kicks(),
        }
    }

    #[inline]
    fn disable_kicks(&mut self) {
        match self {
            Self::Split(ring) => ring.disable_kicks(),
            Self::Packed(ring) => ring.disable_kicks(),
            Self::TrackedSplit(ring) => ring.disable_kicks(),
            Self::TrackedPacked(ring) => ring.disable_kicks(),
            Self::InOrder(ring) => ring.disable_kicks(),
            Self::Logged(logged) => logged.disable_kicks(),
        }
    }
}

/// The part of a chain that is needed to return its request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ticket {
    head: u16,
    descriptors: u16,
    status: usize,
}

impl Chain {
    /// The value that [`Virtqueue::complete`] needs.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        Ticket {
            head: self.head,
            descriptors: self.descriptors,
            status: self.status,
        }
    }
}

/// Translates the front-end's address of a part of a ring to an address in this process.
fn place(
    view: &View,
    name: &'static str,
    user: u64,
    len: u64,
    align: usize,
) -> Result<usize, RingError> {
    view.memory
        .at_user(user, len)
        .filter(|addr| addr.is_multiple_of(align))
        .ok_or(RingError::Address(name, user))
}
