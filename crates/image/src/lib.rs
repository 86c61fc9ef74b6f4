//! Disk image formats: maps from the guest's disk to the host's files.
//!
//! An image never moves guest data. It says where a range is; an engine reads or writes it there.

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
    /// A mapped image: its tables say where each piece is.
    Chain(Arc<Chain>),
    /// No file: requests complete at once, and reads leave the guest's buffers unchanged. For
    /// measuring the request path alone.
    Null,
}

/// Where a range of the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// In the file, contiguous from this offset.
    File(FileOffset),
    /// In pieces; the [`Chain`] maps them.
    Pieces,
    /// Nowhere: there is nothing to do.
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

    /// The chain of a mapped image.
    #[inline]
    pub fn chain(&self) -> Option<&Arc<Chain>> {
        match self {
            Self::Chain(chain) => Some(chain),
            Self::Raw | Self::Null => None,
        }
    }
}
