//! What lies where: the formats of disk images, as maps from the guest's disk to the host's file.
//!
//! An image never moves payload; it says where a range is, and an engine goes there.

mod bytes;
mod chain;
mod format;
mod gate;
mod qcow2;
mod storage;

pub use chain::{
    Chain, ChainError, ChainOptions, Compressed, FileIndex, LayerFormat, Missing, OpenFiles, Place,
    Role, Top, WritePlace,
};
pub use format::{Format, UnknownFormat};
pub use gate::{Gate, GateError};
pub use qcow2::check::check;
pub use qcow2::{
    Allocation, CheckReport, Compression, Damage, Fill, HeaderError, ImageError, JournalEvent,
    JournalOf, JournalPlace, OpenOptions, Pin, Pins, Prepared, Progress, Qcow2, Qcow2Error,
    ThreadPins, Waiting, ZeroStep, Zeroing, journal_of,
};
pub use storage::{PlainFile, Storage};

use std::sync::Arc;

use block::{DiskOffset, FileOffset};

/// A disk image. Formats are a closed set: what a disk needs of them is this enum's methods.
#[derive(Clone)]
pub enum Image {
    /// The file is the disk, byte for byte.
    Raw,
    /// It goes by tables, piece by piece.
    Chain(Arc<Chain>),
    /// There is no file: requests complete at once, and reads leave the guest's buffers as they
    /// are. It measures the path of a request, and nothing else.
    Null,
}

/// Where a range of the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// In the file, from here on, in one piece.
    File(FileOffset),
    /// In pieces, which the [`Chain`] knows.
    Pieces,
    /// Nowhere: there is nothing to be done.
    Nowhere,
}

impl Image {
    /// Where the range that starts at `at` is.
    #[inline]
    pub fn map(&self, at: DiskOffset) -> Extent {
        match self {
            Self::Raw => Extent::File(FileOffset(at.0)),
            Self::Chain(_) => Extent::Pieces,
            Self::Null => Extent::Nowhere,
        }
    }

    /// The image, if it goes by tables.
    #[inline]
    pub fn chain(&self) -> Option<&Arc<Chain>> {
        match self {
            Self::Chain(chain) => Some(chain),
            Self::Raw | Self::Null => None,
        }
    }
}
