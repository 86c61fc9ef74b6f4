use std::fmt;
use std::io;

use thiserror::Error;

/// Why an operation on an open image failed.
#[derive(Debug, Error)]
pub enum ImageError {
    /// A table could not be read or written. The caller may retry the change.
    #[error("{doing} at byte {at}: {source}")]
    Io {
        doing: &'static str,
        at: u64,
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
    /// The file cannot grow, or the format cannot address more of it.
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
    /// The offset in the file, or on the disk if `what` says so.
    pub at: u64,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the image is damaged: {} (at byte {})",
            self.what, self.at
        )
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
            Self::Full(_) => ENOSPC,
            Self::ReadOnly => EROFS,
            Self::Unsupported(_) => EOPNOTSUPP,
        }
    }

    /// Whether a retry is pointless, because the cause does not go away. Only errors of the storage
    /// ([`Io`](Self::Io)) may go away.
    pub fn is_permanent(&self) -> bool {
        !matches!(self, Self::Io { .. })
    }

    pub(crate) fn damaged(what: &'static str, at: u64) -> Self {
        Self::Damaged(Damage { what, at })
    }
}

/// Adds the operation and the offset to an error of a [`Storage`](crate::Storage).
pub(crate) trait Doing<T> {
    fn doing(self, doing: &'static str, at: u64) -> Result<T, ImageError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, doing: &'static str, at: u64) -> Result<T, ImageError> {
        self.map_err(|source| ImageError::Io { doing, at, source })
    }
}
