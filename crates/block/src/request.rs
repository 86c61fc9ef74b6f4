use crate::DiskOffset;

/// What a guest asks of its disk, parsed and checked against the disk's size and block size.
///
/// Payload is not here: it stays in guest memory, as [`Segment`](crate::Segment)s beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Fill the guest's buffers from the disk.
    Read {
        /// First byte on the disk.
        at: DiskOffset,
        /// Bytes, a multiple of the logical block size.
        len: u64,
    },
    /// Write the guest's buffers to the disk.
    Write {
        /// First byte on the disk.
        at: DiskOffset,
        /// Bytes, a multiple of the logical block size.
        len: u64,
    },
    /// Make every write that has completed durable.
    Flush,
    /// The content of this range is no longer needed; it may read as anything after.
    Discard {
        /// First byte on the disk.
        at: DiskOffset,
        /// Bytes.
        len: u64,
    },
    /// This range reads as zeroes from now on.
    WriteZeroes {
        /// First byte on the disk.
        at: DiskOffset,
        /// Bytes.
        len: u64,
        /// Space may be given back.
        unmap: bool,
    },
    /// The disk's serial, 20 bytes.
    GetId,
}
