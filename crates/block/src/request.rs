use std::fmt;

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

impl Request {
    /// The range of the disk that it is about: its first byte, and its length.
    pub fn range(&self) -> Option<(GuestOffset, u64)> {
        match *self {
            Self::Read { at, len }
            | Self::Write { at, len }
            | Self::Discard { at, len }
            | Self::WriteZeroes { at, len, .. } => Some((at, len)),
            Self::Flush | Self::GetId => None,
        }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (operation, at, len) = match *self {
            Self::Read { at, len } => ("a read", at, len),
            Self::Write { at, len } => ("a write", at, len),
            Self::Discard { at, len } => ("a discard", at, len),
            Self::WriteZeroes { at, len, .. } => ("a write-zeroes", at, len),
            Self::Flush => return write!(f, "a flush"),
            Self::GetId => return write!(f, "a query of the serial number"),
        };
        write!(f, "{operation} of {len} bytes at byte {}", at.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_described_in_words() {
        let (at, len) = (GuestOffset(8192), 4096);
        let text = Request::Write { at, len }.to_string();
        assert_eq!(text, "a write of 4096 bytes at byte 8192");
        assert_eq!(Request::Flush.to_string(), "a flush");
    }
}
