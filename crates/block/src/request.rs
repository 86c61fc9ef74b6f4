use crate::GuestOffset;

/// A guest's request to its disk, parsed and checked against the disk's size and block size.
///
/// The payload is not included: it stays in guest memory, described by separate [`Segment`](crate::Segment)s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Fill the guest's buffers from the disk.
    Read {
        /// First byte on the disk.
        at: GuestOffset,
        /// Length in bytes, a multiple of the logical block size.
        len: u64,
    },
    /// Write the guest's buffers to the disk.
    Write {
        /// First byte on the disk.
        at: GuestOffset,
        /// Length in bytes, a multiple of the logical block size.
        len: u64,
    },
    /// Make every completed write durable.
    Flush,
    /// The guest no longer needs this range; later reads may return anything.
    Discard {
        /// First byte on the disk.
        at: GuestOffset,
        /// Length in bytes.
        len: u64,
    },
    /// This range reads as zeroes from now on.
    WriteZeroes {
        /// First byte on the disk.
        at: GuestOffset,
        /// Length in bytes.
        len: u64,
        /// The space may be deallocated.
        unmap: bool,
    },
    /// Return the disk's serial number, 20 bytes.
    GetId,
}
