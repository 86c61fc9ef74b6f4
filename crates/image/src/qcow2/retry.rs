//! Why a change to the tables must be tried again, and what it may do.

use super::error::ImageError;
use super::file::FileEnd;
use super::types::{GuestCluster, HostOffset, SliceIndex};

/// What must be done without the state lock before a change can be tried again.
#[derive(Debug)]
pub(crate) enum Retry {
    /// The refcount table must grow. It had this many entries; if it has more, another request has enlarged it.
    TableFull(u64),
    /// A slice must be loaded.
    Load(SliceIndex),
    /// A cluster must get its place in a raw data file before its data.
    MapFirst(GuestCluster),
    /// All frames for a slice have changes that must be written.
    CacheFull,
    /// The file would grow although there are freed clusters, which can be used once they are reclaimed.
    Reclaim,
    /// The file must be read or extended, or the search takes longer than the caller may spend.
    WouldBlock,
    /// The search was interrupted so that others get the lock; it continues where it stopped.
    Later,
    Error(ImageError),
}

impl From<ImageError> for Retry {
    fn from(error: ImageError) -> Self {
        Self::Error(error)
    }
}

/// Whether a change may read or extend the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MayBlock {
    /// It may, but freed clusters are reclaimed before the file grows.
    Yes,
    /// It may, and the file may grow although freed clusters could be reclaimed.
    Grow,
    No,
}

impl MayBlock {
    /// Fails if the file must be extended to `to` and the caller may not block.
    pub fn grow(self, end: &FileEnd, to: HostOffset) -> Result<(), Retry> {
        match self {
            Self::No if end.get() < to => Err(Retry::WouldBlock),
            _ => Ok(()),
        }
    }

    /// The same for new clusters, while others are to be reclaimed first.
    pub fn grow_for_new(
        self,
        end: &FileEnd,
        to: HostOffset,
        reclaims_first: bool,
    ) -> Result<(), Retry> {
        match self {
            Self::Yes if end.get() < to && reclaims_first => Err(Retry::Reclaim),
            _ => self.grow(end, to),
        }
    }
}
