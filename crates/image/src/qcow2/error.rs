use std::fmt;
use std::io;

use block::{FileOffset, GuestOffset};
use thiserror::Error;

use super::types::HostOffset;

/// Why an operation on an open image failed.
#[derive(Debug, Error)]
pub enum ImageError {
    /// A table could not be read or written. The caller may retry the change.
    #[error("{doing} at {at}: {source}")]
    Io {
        doing: &'static str,
        at: FileOffset,
        source: io::Error,
    },
    /// The kernel could not write data from the page cache, and has dropped it. Nothing that was written since the
    /// last flush, or is written from now on, counts as durable.
    #[error(
        "an fdatasync of the image failed ({source}), and the page cache dropped the data that it had to \
        write; every flush fails until the disk is served again: repair the storage, check the guest's file \
        systems, and restart"
    )]
    Lost { source: io::Error },
    /// The image contradicts itself. Nothing more is written to it.
    #[error("{0}; nothing more is written to it; run 'qemu-img check' on it")]
    Damaged(Damage),
    /// The block device that the image is on has no room left.
    #[error(
        "the image needs more space than the block device that it is on has; extend the device, and ringdisk uses the \
        new space with the next attempt"
    )]
    NoSpace,
    /// The block device that the external data file is on is shorter than the disk.
    #[error(
        "the disk needs {needed} bytes in its external data file, and the block device that this is on has {size}; extend \
        the device (lvextend -L {needed}b), and try again"
    )]
    ShortDataDevice { size: u64, needed: u64 },
    /// The format cannot address a larger file.
    #[error("the image is full: {0}")]
    Full(&'static str),
    /// The image is open for reading only.
    #[error("the image was opened read-only")]
    ReadOnly,
    /// The image does not support this change.
    #[error("{0}")]
    Unsupported(&'static str),
}

/// A contradiction in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// What was found.
    pub what: &'static str,
    pub at: DamagedPart,
}

/// The part of an image that a [`Damage`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DamagedPart {
    /// What is at this offset in the file.
    File(FileOffset),
    /// What maps this position on the disk.
    Disk(GuestOffset),
    /// An entry of a table with this value.
    Entry(u64),
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the image is damaged: {} ({})", self.what, self.at)
    }
}

impl fmt::Display for DamagedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(at) => write!(f, "at byte {}", at.0),
            Self::Disk(at) => write!(f, "at byte {} of the disk", at.0),
            Self::Entry(entry) => write!(f, "the entry is {entry:#x}"),
        }
    }
}

impl Damage {
    /// The offset in the image's file, if the damage is at one.
    pub fn file_offset(&self) -> Option<u64> {
        match self.at {
            DamagedPart::File(at) => Some(at.0),
            DamagedPart::Disk(_) | DamagedPart::Entry(_) => None,
        }
    }

    pub(crate) fn in_file(what: &'static str, at: HostOffset) -> Self {
        let at = DamagedPart::File(at.in_file());
        Self { what, at }
    }

    pub(crate) fn in_entry(what: &'static str, entry: u64) -> Self {
        let at = DamagedPart::Entry(entry);
        Self { what, at }
    }
}

impl ImageError {
    /// The corresponding errno.
    pub fn errno(&self) -> i32 {
        const EIO: i32 = 5;
        const ENOSPC: i32 = 28;
        const EROFS: i32 = 30;
        const EOPNOTSUPP: i32 = 95;
        match self {
            Self::Io { source, .. } | Self::Lost { source } => source.raw_os_error().unwrap_or(EIO),
            Self::Damaged(_) => EIO,
            Self::NoSpace | Self::ShortDataDevice { .. } | Self::Full(_) => ENOSPC,
            Self::ReadOnly => EROFS,
            Self::Unsupported(_) => EOPNOTSUPP,
        }
    }

    /// Whether a retry is pointless, because the cause does not go away. Errors of the storage ([`Io`](Self::Io)) may
    /// go away, except for data that cannot be what was written, and so may a lack of space.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Io { source, .. } => source.kind() == io::ErrorKind::InvalidData,
            Self::NoSpace | Self::ShortDataDevice { .. } => false,
            Self::Lost { .. }
            | Self::Damaged(_)
            | Self::Full(_)
            | Self::ReadOnly
            | Self::Unsupported(_) => true,
        }
    }

    /// Whether it is a lack of space, which goes away when there is more.
    pub fn is_no_space(&self) -> bool {
        match self {
            Self::NoSpace | Self::ShortDataDevice { .. } => true,
            Self::Io { source, .. } => source.raw_os_error().is_some_and(block::is_no_space),
            _ => false,
        }
    }

    pub(crate) fn damaged(what: &'static str, at: HostOffset) -> Self {
        Self::Damaged(Damage::in_file(what, at))
    }

    pub(crate) fn damaged_disk(what: &'static str, at: GuestOffset) -> Self {
        let at = DamagedPart::Disk(at);
        Self::Damaged(Damage { what, at })
    }

    pub(crate) fn bad_entry(what: &'static str, entry: u64) -> Self {
        Self::Damaged(Damage::in_entry(what, entry))
    }
}

/// Adds the operation and the offset to an error of a [`Storage`](crate::Storage).
pub(crate) trait Doing<T> {
    fn doing(self, doing: &'static str, at: HostOffset) -> Result<T, ImageError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, doing: &'static str, at: HostOffset) -> Result<T, ImageError> {
        let at = at.in_file();
        self.map_err(|source| ImageError::Io { doing, at, source })
    }
}
