//! What lies where: the formats of disk images, as maps from the guest's disk to the host's file.
//!
//! An image never moves payload; it says where a range is, and an engine goes there.

mod format;

pub use format::{Format, UnknownFormat};

use block::{DiskOffset, FileOffset};

/// A disk image. Formats are a closed set: what a disk needs of them is this enum's methods.
#[derive(Clone, Debug)]
pub enum Image {
    /// The file is the disk, byte for byte.
    Raw,
    /// There is no file: requests complete at once, and reads leave the guest's buffers as they
    /// are. It measures the path of a request, and nothing else.
    Null,
}

/// Where a range of the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// In the file, from here on, in one piece.
    File(FileOffset),
    /// Nowhere: there is nothing to be done.
    Nowhere,
}

impl Image {
    /// Where the range that starts at `at` is.
    #[inline]
    pub fn map(&self, at: DiskOffset) -> Extent {
        match self {
            Self::Raw => Extent::File(FileOffset(at.0)),
            Self::Null => Extent::Nowhere,
        }
    }
}
