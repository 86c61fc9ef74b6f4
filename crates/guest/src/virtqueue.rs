//! A virtqueue, seen from the device: [split](split) or [packed](packed), which decides how chains come and
//! go. What a chain is, is the same for [both](walk).
//!
//! The walk over a descriptor chain is our own: it checks every address against a cached window of
//! guest memory and allocates nothing. All ring memory is read once, with volatile or atomic loads,
//! because the guest may change it at any time; what was read is what was checked.

#![expect(
    unsafe_code,
    reason = "rings live in memory that a guest shares with us"
)]

mod logged;
mod packed;
mod split;
mod walk;

use std::fmt;
use std::ptr;
use std::sync::Arc;

use block::Segment;
use thiserror::Error;

use crate::inflight::InflightQueue;
use crate::log::LogError;
use crate::memory::GuestMemory;
use logged::Logged;
use packed::{Packed, TrackedPacked};
use split::{InOrderSplit, Split, TrackedSplit};
use walk::View;

pub use logged::DirtyMarks;

/// Bytes of a virtio-blk request header, which opens every chain.
const HEADER_BYTES: usize = 16;
const DESCRIPTOR_BYTES: u64 = 16;

/// Where the front-end says that a ring is; addresses are the front-end's own
/// (vhost-user: "Vring address description").
#[derive(Clone, Copy, Debug)]
pub struct RingLayout {
    /// The queue's number, by which errors name it.
    pub number: u16,
    /// VIRTIO_F_RING_PACKED was negotiated.
    pub packed: bool,
    /// Number of descriptors; of a split ring, a power of two.
    pub size: u16,
    /// Descriptor table, or descriptor ring.
    pub descriptors: u64,
    /// Available ring, or driver area.
    pub available: u64,
    /// Used ring, or device area.
    pub used: u64,
    /// Where the device goes on.
    pub base: RingBase,
    /// VIRTIO_RING_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Most segments of data that the device told the driver a request may have (seg_max). It binds
    /// indirect tables, which drivers size by it and not by the ring.
    pub max_segments: u16,
}

/// Where the device goes on in a ring, as front-ends keep it (vhost-user: "VHOST_USER_SET_VRING_BASE").
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RingBase(pub u32);

impl RingBase {
    /// In a split ring: the index of the next available entry.
    pub const fn split(next_available: u16) -> Self {
        Self(next_available as u32)
    }

    /// In a packed ring: positions of the next available descriptor and of the next used one, each
    /// with its wrap counter on top.
    pub const fn packed(available: u16, used: u16) -> Self {
        Self(available as u32 | (used as u32) << 16)
    }

    /// Where a device begins.
    pub const fn first(packed: bool) -> Self {
        match packed {
            // Both wrap counters start at 1 (virtio 1.3 §2.8.1).
            true => Self::packed(1 << 15, 1 << 15),
            false => Self::split(0),
        }
    }
}

impl fmt::Debug for RingBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// What is wrong with a ring. The guest broke the protocol, so that nothing in the queue can be
/// trusted until the driver resets it.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RingError {
    /// The size is zero, no power of two, or over the limit.
    #[error("queue size {0} is not a power of two from 1 to {max}", max = Virtqueue::SIZE_LIMIT)]
    Size(u16),
    /// The size of a packed ring is zero or over the limit.
    #[error("size {0} of a packed queue is not from 1 to {max}", max = Virtqueue::SIZE_LIMIT)]
    PackedSize(u16),
    /// A packed ring is to go on where it has no descriptor.
    #[error("ring base {0:?} is not in the ring")]
    Base(RingBase),
    /// A part of the ring is not in guest memory.
    #[error("the {0} at front-end address {1:#x} is not in guest memory or not aligned")]
    Address(&'static str, u64),
    /// More was made available than the ring can hold.
    #[error("available index {index} is {ahead} entries ahead in a ring of {size}")]
    AvailableIndex {
        /// The guest's index.
        index: u16,
        /// Entries between ours and the guest's.
        ahead: u16,
        /// Ring size.
        size: u16,
    },
    /// An index points beyond its table.
    #[error("descriptor index {0} is beyond a table of {1}")]
    DescriptorIndex(u16, u32),
    /// The chain is a loop, or has more descriptors than a chain may have.
    #[error("descriptor chain {head} has a loop or more than {limit} descriptors")]
    ChainLength {
        /// First descriptor.
        head: u16,
        /// Most descriptors that a chain may have.
        limit: u32,
    },
    /// A chain that was available is not any more.
    #[error("descriptor {0} was available and was taken back")]
    TakenBack(u16),
    /// A packed chain has a name that no driver needs.
    #[error("buffer id {id} of chain {at} is beyond a queue of {size}")]
    BufferId {
        /// What the guest calls the chain.
        id: u16,
        /// First descriptor.
        at: u16,
        /// Ring size.
        size: u16,
    },
    /// A packed chain has the name of one that is in flight.
    #[error("buffer id {id} of chain {at} is that of a chain in flight")]
    BufferIdTwice {
        /// What the guest calls both.
        id: u16,
        /// First descriptor.
        at: u16,
    },
    /// What is written down of the requests in flight cannot be so.
    #[error("the in-flight region of the queue {0}")]
    Inflight(&'static str),
    /// Nobody knows which requests are in flight.
    #[error(
        "its in-flight region was too small, and the process that served it was killed, so that nobody knows which \
         requests it had in flight; reset the guest"
    )]
    Unrecorded,
    /// A buffer is not in guest memory.
    #[error("guest address {0:#x} with {1} bytes is not in guest memory")]
    Buffer(u64, u32),
    /// An indirect table is nested, chained, empty or cut off.
    #[error("indirect descriptor with {len} bytes and flags {flags:#x} is not allowed here")]
    Indirect {
        /// Bytes of the table.
        len: u32,
        /// Flags of the descriptor.
        flags: u16,
    },
    /// A device-readable buffer comes after a device-writable one.
    #[error("a device-readable descriptor follows a device-writable one in chain {0}")]
    Order(u16),
    /// Fewer than 16 readable bytes.
    #[error("chain {0} has no complete request header")]
    Header(u16),
    /// No writable byte.
    #[error("chain {0} has no status byte")]
    Status(u16),
}

/// A request as it lies in guest memory: its header, copied, and where its buffers are.
///
/// The segments themselves are in the slice that [`Virtqueue::fetch`] filled: the device-readable
/// ones first, then the device-writable ones, without header and status.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    /// The guest's name for the request: its first descriptor, or its buffer id.
    pub head: u16,
    /// The virtio-blk header.
    pub header: [u8; HEADER_BYTES],
    /// Segments that the device reads.
    pub readable: u16,
    /// Bytes that the device reads, after the header.
    pub readable_len: u64,
    /// Segments that the device writes.
    pub writable: u16,
    /// Bytes that the device writes, before the status.
    pub writable_len: u64,
    /// Descriptors that it has in a packed ring.
    descriptors: u16,
    /// Our address of the status byte.
    status: usize,
}

/// The device's end of a virtqueue.
pub struct Virtqueue {
    ring: Ring,
    number: u16,
    size: u16,
    segments_max: usize,
    /// Keeps every address in the ring, and every one that it hands out, mapped.
    view: View,
}

enum Ring {
    Split(Split),
    Packed(Packed),
    // In boxes, because most rings are not tracked, and the others need not be larger for it.
    TrackedSplit(Box<TrackedSplit>),
    TrackedPacked(Box<TrackedPacked>),
    InOrder(Box<InOrderSplit>),
    Logged(Box<Logged>),
}

// SAFETY: the pointers lead into shared memory that `view` keeps mapped; nothing about them is
// bound to a thread, and only the owner of this value uses them.
unsafe impl Send for Virtqueue {}

impl Virtqueue {
    /// The largest ring that QEMU builds (VIRTQUEUE_MAX_SIZE). In a larger one, no chain has more descriptors than
    /// this: drivers size them by seg_max.
    pub const MAX_SIZE: u16 = 1024;

    /// The largest ring that there is (virtio 1.3 §2.7), which crosvm builds if not told otherwise.
    pub const SIZE_LIMIT: u16 = 1 << 15;

    /// Takes up a ring where its layout says.
    ///
    /// # Errors
    /// The size is not allowed, or a part lies outside `memory` or is not aligned.
    pub fn new(memory: Arc<GuestMemory>, layout: RingLayout) -> Result<Self, RingError> {
        Self::take_up(memory, layout, |view, limit| {
            Ok(match layout.packed {
                true => Ring::Packed(Packed::new(view, &layout, limit)?),
                false => Ring::Split(Split::new(view, &layout, limit)?),
            })
        })
    }

    /// The same, writing down in `region` what is in flight. Where a predecessor has done so, the ring goes on
    /// where that one ended, and what was in flight is fetched first, in the order in which it was then.
    ///
    /// # Errors
    /// As above, or the region is not of this ring.
    pub fn tracked(
        memory: Arc<GuestMemory>,
        layout: RingLayout,
        region: InflightQueue,
    ) -> Result<Self, RingError> {
        Self::take_up(memory, layout, |view, limit| {
            Ok(match layout.packed {
                true => {
                    let ring = TrackedPacked::new(view, &layout, limit, region)?;
                    Ring::TrackedPacked(Box::new(ring))
                }
                false => {
                    let ring = TrackedSplit::new(view, &layout, limit, region)?;
                    Ring::TrackedSplit(Box::new(ring))
                }
            })
        })
    }

    /// The same without a region, since the one that there is has too few entries. A split ring gives its requests back in
    /// order, and goes on where its used ring ends, so that this says what is in flight; of a packed ring, nothing does.
    ///
    /// # Errors
    /// As above.
    pub fn unrecorded(memory: Arc<GuestMemory>, layout: RingLayout) -> Result<Self, RingError> {
        match layout.packed {
            true => Self::new(memory, layout),
            false => Self::take_up(memory, layout, |view, limit| {
                let ring = InOrderSplit::new(view, &layout, limit)?;
                Ok(Ring::InOrder(Box::new(ring)))
            }),
        }
    }

    fn take_up(
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

    /// The same queue, which marks from now on what it writes to guest memory. It was taken up where `layout`
    /// says.
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

    /// Our address of its descriptors.
    pub fn address(&self) -> usize {
        self.ring.address()
    }

    /// Where a successor would go on.
    pub fn base(&self) -> RingBase {
        self.ring.base()
    }

    /// The guest's memory as it is mapped here.
    pub fn memory(&self) -> &GuestMemory {
        &self.view.memory
    }

    /// Most segments that one chain can need: one for each descriptor, and one more for each border
    /// between regions that a buffer can lie across. Longer ones are refused.
    pub fn max_segments(&self) -> usize {
        self.segments_max
    }

    /// What [`max_segments`](Self::max_segments) is at most.
    pub const MAX_SEGMENTS: usize = Self::MAX_SIZE as usize + 2 + crate::MAX_MEM_SLOTS;

    /// Number of requests that wait to be fetched; of a packed ring, as far as was looked.
    ///
    /// # Errors
    /// The guest's index is impossible.
    #[inline]
    pub fn waiting(&mut self) -> Result<u16, RingError> {
        self.ring.waiting()
    }

    /// Whether the next process to take the ring up finds out what is in flight.
    pub fn is_tracked(&self) -> bool {
        self.ring.is_tracked()
    }

    /// Whether something was marked in the dirty log since this was last asked.
    pub fn take_marked(&mut self) -> bool {
        match &mut self.ring {
            Ring::Logged(logged) => logged.take_marked(),
            _ => false,
        }
    }

    /// Puts the requests that a predecessor had fetched and not given back into the ring again, so that the process that goes on
    /// at the base that this returns fetches them first, without the region in which they are written down. `None`
    /// if they are not written down. The ring is not served meanwhile.
    pub fn put_back(&mut self) -> Option<RingBase> {
        match &mut self.ring {
            Ring::TrackedSplit(ring) => Some(ring.put_back()),
            Ring::TrackedPacked(ring) => Some(ring.put_back()),
            Ring::Split(_) | Ring::Packed(_) | Ring::InOrder(_) | Ring::Logged(_) => None,
        }
    }

    /// Number of requests that a predecessor had fetched and not given back, and that were not fetched again yet.
    pub fn resubmits(&self) -> usize {
        self.ring.resubmits()
    }

    /// Takes the next request that [`waiting`](Self::waiting) counted, and writes to `segments`
    /// where its buffers are. A chain with more segments than fit is refused.
    ///
    /// # Errors
    /// The chain breaks the protocol.
    #[inline]
    pub fn fetch(&mut self, segments: &mut [Segment]) -> Result<Chain, RingError> {
        self.ring.fetch(&mut self.view, segments)
    }

    /// Gives a request back to the guest: its status, and how many bytes were written to its
    /// buffers. The guest sees it after [`publish`](Self::publish).
    #[inline]
    pub fn complete(&mut self, ticket: &Ticket, status: u8, written: u32) {
        // SAFETY: the status byte was found mapped when the chain was fetched from this queue.
        unsafe { ptr::write_volatile(ticket.status as *mut u8, status) };
        self.ring.complete(ticket, written);
    }

    /// For a request that is not given back, because its queue was given up: what was written for it is marked
    /// all the same, if that is asked for.
    #[cold]
    pub fn abandon(&mut self, ticket: &Ticket) {
        if let Ring::Logged(logged) = &mut self.ring {
            logged.mark(ticket);
        }
    }

    /// Shows all that was completed to the guest, and tells whether it wants an interrupt for it
    /// (virtio 1.3 §2.7.7, §2.8.10).
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    /// Asks the guest for a kick at the next request, and tells whether one has come meanwhile.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        self.ring.enable_kicks()
    }

    /// Tells the guest that kicks are not needed.
    #[inline]
    pub fn disable_kicks(&mut self) {
        self.ring.disable_kicks()
    }

    /// Copies bytes from the segments of a chain of this queue; returns how many there were.
    pub fn copy_from(&self, segments: &[Segment], to: &mut [u8]) -> usize {
        let mut done = 0;
        for segment in segments {
            let len = segment.len.min(to.len() - done);
            // SAFETY: segments come from `fetch`, which found them mapped; `to` has room for `len`.
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

    /// Copies bytes to the segments of a chain of this queue; returns how many there was room for.
    pub fn copy_to(&self, segments: &[Segment], from: &[u8]) -> usize {
        let mut done = 0;
        for segment in segments {
            let len = segment.len.min(from.len() - done);
            // SAFETY: segments come from `fetch`, which found them mapped; `from` has `len` more.
            unsafe {
                ptr::copy_nonoverlapping(from.as_ptr().add(done), segment.addr as *mut u8, len);
            }
            done += len;
        }
        done
    }
}

// One match for each call, whatever the kind: rings that mark what they write lead here again.
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
    fn waiting(&mut self) -> Result<u16, RingError> {
        match self {
            Self::Split(ring) => ring.waiting(),
            Self::Packed(ring) => Ok(ring.waiting()),
            Self::TrackedSplit(ring) => ring.waiting(),
            Self::TrackedPacked(ring) => Ok(ring.waiting()),
            Self::InOrder(ring) => ring.waiting(),
            Self::Logged(logged) => logged.waiting(),
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

/// What is left of a chain while its request is under way: enough to give it back.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ticket {
    head: u16,
    descriptors: u16,
    status: usize,
}

impl Chain {
    /// What [`Virtqueue::complete`] needs.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        Ticket {
            head: self.head,
            descriptors: self.descriptors,
            status: self.status,
        }
    }
}

/// Our address of a part of a ring, which the front-end names by its own.
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
