//! Disk image formats: maps from the guest's disk to the host's files.
//!
//! An image never moves guest data. It says where a range is; an engine reads or writes it there.

mod allowed;
mod bytes;
mod chain;
mod format;
mod qcow2;
mod storage;

pub use allowed::{AllowedDirectories, AllowedError};
pub use chain::{
    Allocated, AllocatedIn, Chain, ChainError, ChainOptions, Compressed, DataFile, FileIndex,
    FileRole, LayerFormat, MissingMetadata, OpenFiles, ReadLocation, TopFile, WriteLocation,
};
pub use format::{FORMAT_BYTES, Format, UnknownFormat, foreign_format};
pub use qcow2::check::check;
pub use qcow2::{
    Allocation, Awaited, BITMAP_BYTES_MAX, CheckReport, Compression, Damage, DamagedPart, Fill,
    Generations, HeaderError, ImageError, JournalEvent, JournalFile, JournalOwner, OpenOptions,
    Pin, Pins, Prepared, Progress, Qcow2, Qcow2Error, Reclaimed, ThreadPins, UnusableBitmap,
    ZeroMode, ZeroStep, journal_owner, may_have_journal,
};
pub use storage::{PlainFile, Storage};

use std::sync::Arc;

use block::{DirtyBitmaps, FileOffset, GuestOffset};

/// A disk image. Formats are a closed set: what a disk needs of them is this enum's methods.
#[derive(Clone)]
pub enum Image {
    /// The file is the disk, byte for byte. Its bitmaps are elsewhere.
    Raw(Arc<DirtyBitmaps>),
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
    /// In several places; the [`Chain`] maps them.
    Mapped,
    /// Nowhere: there is nothing to do.
    Nowhere,
}

impl Image {
    /// A disk that is its file, byte for byte, and has no bitmaps yet.
    pub fn raw() -> Self {
        Self::Raw(Arc::default())
    }

    /// Where the range that starts at `at` is.
    #[inline]
    pub fn map(&self, at: GuestOffset) -> Extent {
        match self {
            Self::Raw(_) => Extent::File(FileOffset(at.0)),
            Self::Chain(_) => Extent::Mapped,
            Self::Null => Extent::Nowhere,
        }
    }

    /// The chain of a mapped image.
    #[inline]
    pub fn chain(&self) -> Option<&Arc<Chain>> {
        match self {
            Self::Chain(chain) => Some(chain),
            Self::Raw(_) | Self::Null => None,
        }
    }

    /// The dirty bitmaps of the disk.
    pub fn bitmaps(&self) -> Option<&Arc<DirtyBitmaps>> {
        match self {
            Self::Raw(bitmaps) => Some(bitmaps),
            Self::Chain(chain) => Some(chain.image()?.bitmaps()),
            Self::Null => None,
        }
    }
}
