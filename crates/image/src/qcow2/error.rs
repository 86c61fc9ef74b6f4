use std::fmt;
use std::io;

use thiserror::Error;

/// Why an image could not do what was asked of it while it was in use.
#[derive(Debug, Error)]
pub enum ImageError {
    /// A table could not be read or written. The change may be tried again.
    #[error("{doing} at byte {at}: {source}")]
    Io {
        /// What was to be done.
        doing: &'static str,
        /// Where in the file.
        at: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// What the page cache had to write could not be written, and is forgotten. Nothing that was written
    /// since the last flush, or will be, counts as durable.
    #[error(
        "an fdatasync of the image failed ({source}), and what the page cache had to write then is lost for \
        good; no flush succeeds until it is served anew: repair the storage, check the guest's file \
        systems, and restart"
    )]
    Lost {
        /// What the kernel said.
        source: io::Error,
    },
    /// The image contradicts itself. Nothing is written to it any more.
    #[error("{0}; nothing more is written to it; run 'qemu-img check' on it")]
    Damaged(Damage),
    /// The file cannot grow, or the format cannot address more of it.
    #[error("the image is full: {0}")]
    Full(&'static str),
    /// The image was opened for reading only.
    #[error("the image was opened read-only")]
    ReadOnly,
    /// A change that the image cannot take.
    #[error("{0}")]
    Unsupported(&'static str),
}

/// What an image contradicts itself in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// What was found.
    pub what: &'static str,
    /// Offset in the file, or of the disk if `what` says so.
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
    /// The errno that says the same.
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

    /// Whether there is no point in trying again what failed: the cause is not the storage, and does not
    /// go away.
    pub fn is_lasting(&self) -> bool {
        !matches!(self, Self::Io { .. })
    }

    pub(crate) fn damaged(what: &'static str, at: u64) -> Self {
        Self::Damaged(Damage { what, at })
    }
}

/// Gives an error of a [`Storage`](crate::Storage) its context.
pub(crate) trait Doing<T> {
    fn doing(self, doing: &'static str, at: u64) -> Result<T, ImageError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, doing: &'static str, at: u64) -> Result<T, ImageError> {
        self.map_err(|source| ImageError::Io { doing, at, source })
    }
}
