//! What a virtqueue and the record of its requests in flight have in common: layout, position and errors.

use std::fmt;

use thiserror::Error;

/// The largest ring that the specification allows (virtio 1.3 §2.7); crosvm's default.
pub const RING_SIZE_MAX: u16 = 1 << 15;

/// The ring's layout as the front-end describes it; addresses are the front-end's own (vhost-user: "Vring
/// address description").
#[derive(Clone, Copy, Debug)]
pub struct RingLayout {
    /// The queue's number, which errors contain.
    pub number: u16,
    /// VIRTIO_F_RING_PACKED was negotiated.
    pub packed: bool,
    /// Number of descriptors; a power of two for a split ring.
    pub size: u16,
    /// Descriptor table, or descriptor ring.
    pub descriptors: u64,
    /// Available ring, or driver area.
    pub available: u64,
    /// Used ring, or device area.
    pub used: u64,
    /// Position at which the device continues.
    pub base: RingBase,
    /// VIRTIO_RING_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Maximum number of data segments in a request, as the device told the driver (seg_max). It limits
    /// indirect tables, because drivers size them by this value and not by the ring.
    pub max_segments: u16,
}

/// The position at which the device continues in a ring, in the front-end's encoding (vhost-user:
/// "VHOST_USER_SET_VRING_BASE").
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RingBase(pub u32);

impl RingBase {
    /// Position in a split ring: the index of the next available entry.
    pub const fn split(next_available: u16) -> Self {
        Self(next_available as u32)
    }

    /// Position in a packed ring: the next available descriptor and the next used one, each with its wrap
    /// counter in the highest bit.
    pub const fn packed(available: u16, used: u16) -> Self {
        Self(available as u32 | (used as u32) << 16)
    }

    /// The initial position of a device.
    pub const fn first(packed: bool) -> Self {
        if packed {
            // Both wrap counters start at 1 (virtio 1.3 §2.8.1).
            Self::packed(1 << 15, 1 << 15)
        } else {
            Self::split(0)
        }
    }
}

impl fmt::Debug for RingBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// An error in a ring. The guest broke the protocol, so nothing in the queue can be trusted until the driver
/// resets it.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RingError {
    /// The size is zero, not a power of two, or over the limit.
    #[error("queue size {0} is not a power of two from 1 to {max}", max = RING_SIZE_MAX)]
    Size(u16),
    /// The size of a packed ring is zero or over the limit.
    #[error("size {0} of a packed queue is not from 1 to {max}", max = RING_SIZE_MAX)]
    PackedSize(u16),
    /// The base of a packed ring is not inside the ring.
    #[error("ring base {0:?} is not in the ring")]
    Base(RingBase),
    /// A part of the ring is not in guest memory.
    #[error(
        "the {0} at front-end address {1:#x} is not in guest memory or not aligned; is the guest's memory shared (share=on)?"
    )]
    Address(&'static str, u64),
    /// More entries were made available than the ring can hold.
    #[error("available index {index} is {ahead} entries ahead in a ring of {size}")]
    AvailableIndex {
        /// The guest's index.
        index: u16,
        /// Entries between the device's index and the guest's.
        ahead: u16,
        /// Ring size.
        size: u16,
    },
    /// An index is beyond the end of its table.
    #[error("descriptor index {0} is beyond a table of {1}")]
    DescriptorIndex(u16, u32),
    /// The chain is a loop, or has more descriptors than a chain may have.
    #[error("descriptor chain {head} has a loop or more than {limit} descriptors")]
    ChainLength {
        /// First descriptor.
        head: u16,
        /// Maximum number of descriptors in a chain.
        limit: u32,
    },
    /// A chain that was available is no longer available.
    #[error("the driver withdrew descriptor {0} after making it available")]
    TakenBack(u16),
    /// The buffer id of a packed chain is beyond the ring size, which no driver needs.
    #[error("buffer id {id} of chain {at} is beyond a queue of {size}")]
    BufferId {
        /// The guest's id of the chain.
        id: u16,
        /// First descriptor.
        at: u16,
        /// Ring size.
        size: u16,
    },
    /// The buffer id of a packed chain is in use by a chain in flight.
    #[error("buffer id {id} of chain {at} is that of a chain in flight")]
    BufferIdTwice {
        /// The guest's id of both chains.
        id: u16,
        /// First descriptor.
        at: u16,
    },
    /// The record of requests in flight is invalid.
    #[error("the in-flight region of the queue {0}")]
    Inflight(&'static str),
    /// The requests in flight are unknown.
    #[error(
        "its in-flight region was too small and the process that served it was killed, so its requests in \
         flight are unknown; reset the guest"
    )]
    Untracked,
    /// A buffer is not in guest memory.
    #[error("guest address {0:#x} with {1} bytes is not in guest memory")]
    Buffer(u64, u32),
    /// An indirect table is nested, chained, empty or truncated.
    #[error("indirect descriptor with {len} bytes and flags {flags:#x} is not allowed here")]
    Indirect {
        /// Length of the table in bytes.
        len: u32,
        /// Flags of the descriptor.
        flags: u16,
    },
    /// A device-readable buffer comes after a device-writable one.
    #[error("a device-readable descriptor follows a device-writable one in chain {0}")]
    Order(u16),
    /// The chain has fewer than 16 readable bytes.
    #[error("chain {0} has no complete request header")]
    Header(u16),
    /// The chain has no writable byte.
    #[error("chain {0} has no status byte")]
    Status(u16),
}
