//! In-flight tracking: memory that outlives this process, in which it writes down which requests it
//! has fetched from each ring and not given back (vhost-user: "Inflight I/O tracking").
//!
//! The front-end keeps the memory and hands it to whoever serves its rings next; that one does again
//! what the one before had not finished. So, whatever is in there was written by a process that
//! was killed in the midst of it, or by a front-end that lies: it is checked like any other input.
//!
//! How each kind of ring is written down, and why a kill between any two stores does no harm, is said
//! where it is done: [split](crate::virtqueue), in `split/inflight.rs`, and packed, in `packed/inflight.rs`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use thiserror::Error;

use crate::lost::Lost;
use crate::memory::{Mapping, MemoryError, RegionLayout};
use crate::virtqueue::{RingError, Virtqueue};

/// Queues begin on cache lines of their own.
const QUEUE_ALIGN: u64 = 64;

/// Bytes before the entries of a split queue, and of each of these.
const SPLIT_BYTES: (u64, u64) = (16, 16);

/// The same of a packed queue.
const PACKED_BYTES: (u64, u64) = (32, 32);

/// The only version of what is written down; 0 is a queue of which nothing is.
const VERSION: u16 = 1;

/// Where the region is in its file, and for how many queues (vhost-user: "Inflight description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightLayout {
    /// Bytes of the region.
    pub len: u64,
    /// Its first byte in the file.
    pub file_offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Most descriptors that a queue may have.
    pub queue_size: u16,
}

/// Why a region was refused.
#[derive(Debug, Error)]
pub enum InflightError {
    /// There are no such queues, or it does not begin where numbers may begin, or is larger than any.
    #[error("in-flight region {0:x?} is not that of a disk with {1} queues")]
    Malformed(InflightLayout, u16),
    /// It cannot be mapped.
    #[error("in-flight region: {0}")]
    Memory(#[from] MemoryError),
    /// It cannot be made.
    #[error("cannot make memory for an in-flight region: {0}")]
    Make(io::Error),
}

impl InflightLayout {
    /// A region for rings of one kind, at the start of a file of its own.
    pub fn new(queues: u16, queue_size: u16, packed: bool) -> Self {
        Self {
            len: u64::from(queues) * queue_bytes(queue_size, packed),
            file_offset: 0,
            queues,
            queue_size,
        }
    }

    /// Checks what a front-end says of a region for a disk with `queues` queues.
    fn check(self, queues: u16) -> Result<(), InflightError> {
        let len_max = u64::from(queues) * queue_bytes(Virtqueue::MAX_SIZE, true);
        let sound = (1..=queues).contains(&self.queues)
            && (1..=Virtqueue::MAX_SIZE).contains(&self.queue_size)
            && (1..=len_max).contains(&self.len)
            && self.file_offset.is_multiple_of(8);
        match sound {
            true => Ok(()),
            false => Err(InflightError::Malformed(self, queues)),
        }
    }
}

/// Bytes of one queue in a region.
fn queue_bytes(queue_size: u16, packed: bool) -> u64 {
    let (head, entry) = if packed { PACKED_BYTES } else { SPLIT_BYTES };
    (head + entry * u64::from(queue_size)).next_multiple_of(QUEUE_ALIGN)
}

/// A region, mapped.
pub struct Inflight {
    layout: InflightLayout,
    mapping: Arc<Mapping>,
    base: usize,
    /// For another process that goes on with it.
    file: Arc<OwnedFd>,
}

impl Inflight {
    /// Makes the file of a region of which nothing is used, for a disk with `queues` queues. Nobody can
    /// change its size.
    ///
    /// # Errors
    /// The disk has no such queues, or there is no memory.
    pub fn make(layout: InflightLayout, queues: u16) -> Result<OwnedFd, InflightError> {
        layout.check(queues)?;
        let make = || {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = memfd_create("ringdisk-inflight", flags)?;
            ftruncate(&file, layout.file_offset + layout.len)?;
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(file)
        };
        make().map_err(|e: rustix::io::Errno| InflightError::Make(e.into()))
    }

    /// Maps a region that a front-end hands over, for a disk with `queues` queues.
    ///
    /// # Errors
    /// It is not what such a disk needs, reaches beyond its file, or cannot be mapped.
    pub fn map(layout: InflightLayout, file: &OwnedFd, queues: u16) -> Result<Self, InflightError> {
        Self::map_watched(layout, file, queues, None)
    }

    /// The same; `lost` is told when the front-end has cut the file short.
    pub(crate) fn map_watched(
        layout: InflightLayout,
        file: &OwnedFd,
        queues: u16,
        lost: Option<Lost>,
    ) -> Result<Self, InflightError> {
        layout.check(queues)?;
        let region = RegionLayout {
            guest: 0,
            len: layout.len,
            user: 0,
            file_offset: layout.file_offset,
        };
        let mapping = Mapping::new(region, file, crate::memory::MAX_MAPPED_BYTES, lost)?;
        let file = file.try_clone().map_err(InflightError::Make)?;
        Ok(Self {
            layout,
            file: Arc::new(file),
            base: mapping.at(layout.file_offset),
            mapping: Arc::new(mapping),
        })
    }

    /// Where it is, and its file.
    pub(crate) fn region(&self) -> (InflightLayout, Arc<OwnedFd>) {
        (self.layout, self.file.clone())
    }

    /// The part of a ring.
    ///
    /// # Errors
    /// The region has none for it, or not one of this kind.
    pub fn queue(&self, ring: u16, packed: bool) -> Result<InflightQueue, RingError> {
        let bytes = queue_bytes(self.layout.queue_size, packed);
        let start = u64::from(ring) * bytes;
        if ring >= self.layout.queues || start + bytes > self.layout.len {
            return Err(RingError::Inflight("has no room for it"));
        }
        Ok(InflightQueue {
            addr: self.base + start as usize,
            entries: self.layout.queue_size,
            _mapping: self.mapping.clone(),
        })
    }
}

/// The part of a region that is one queue's. It holds as many entries as the queue has descriptors, or
/// more.
pub struct InflightQueue {
    /// A multiple of 8.
    addr: usize,
    entries: u16,
    _mapping: Arc<Mapping>,
}

/// What a queue of either kind begins with.
#[repr(C)]
struct Preamble {
    features: AtomicU64,
    version: AtomicU16,
    entries: AtomicU16,
}

impl InflightQueue {
    /// Whether nothing is written down of the queue, so that it begins where the front-end says.
    ///
    /// # Errors
    /// What is there is of another version or length.
    pub(crate) fn is_blank(&self) -> Result<bool, RingError> {
        let preamble = self.preamble();
        match preamble.version.load(Ordering::Acquire) {
            0 => Ok(true),
            VERSION if preamble.features.load(Ordering::Relaxed) != 0 => {
                Err(RingError::Inflight("has features that are not known"))
            }
            VERSION if preamble.entries.load(Ordering::Relaxed) != self.entries => {
                Err(RingError::Inflight("is for queues of another size"))
            }
            VERSION => Ok(false),
            _ => Err(RingError::Inflight("is of a version that is not known")),
        }
    }

    /// Makes the queue one of which something is written down. All else of it has been written.
    pub(crate) fn begin(&self) {
        let preamble = self.preamble();
        preamble.features.store(0, Ordering::Relaxed);
        preamble.entries.store(self.entries, Ordering::Relaxed);
        preamble.version.store(VERSION, Ordering::Release);
    }

    /// Forgets the queue: it begins anew, where the front-end will say.
    pub(crate) fn forget(&self) {
        self.preamble().version.store(0, Ordering::Release);
    }

    /// Number of entries.
    pub(crate) fn entries(&self) -> u16 {
        self.entries
    }

    /// Where it is mapped: as many bytes as a queue of its kind has, aligned to 8, for as long as this
    /// value lives.
    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    #[expect(unsafe_code, reason = "the region is memory shared with the front-end")]
    fn preamble(&self) -> &Preamble {
        // SAFETY: the queue is mapped as long as `self` lives and is aligned to 8 bytes; every value is
        // valid in an atomic, whoever else writes there.
        unsafe { &*(self.addr as *const Preamble) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_that_cannot_be_are_refused() {
        let good = InflightLayout::new(2, 128, false);
        assert_eq!(good.len, 2 * (16 + 128 * 16 + 48));
        let file = Inflight::make(good, 2).unwrap();
        assert!(ftruncate(&file, 0).is_err(), "its size is sealed");
        let map = |layout| Inflight::map(layout, &file, 2);
        assert!(map(good).is_ok());
        for layout in [
            InflightLayout { queues: 3, ..good },
            InflightLayout { queues: 0, ..good },
            InflightLayout {
                queue_size: 0,
                ..good
            },
            InflightLayout {
                queue_size: 1025,
                ..good
            },
            InflightLayout { len: 0, ..good },
            InflightLayout {
                len: u64::MAX,
                ..good
            },
            InflightLayout {
                file_offset: 4,
                ..good
            },
        ] {
            assert!(
                matches!(map(layout), Err(InflightError::Malformed(..))),
                "{layout:?}"
            );
        }
        for layout in [
            InflightLayout {
                len: good.len + 1,
                ..good
            },
            InflightLayout {
                file_offset: 8,
                ..good
            },
            InflightLayout {
                file_offset: u64::MAX - 7,
                ..good
            },
        ] {
            assert!(
                matches!(map(layout), Err(InflightError::Memory(_))),
                "{layout:?}"
            );
        }
    }

    /// What is too short for packed rings may do for split ones.
    #[test]
    fn a_queue_lies_in_its_region_or_is_refused() {
        let layout = InflightLayout::new(2, 128, false);
        let file = Inflight::make(layout, 2).unwrap();
        let inflight = Inflight::map(layout, &file, 2).unwrap();
        assert!(inflight.queue(1, false).is_ok());
        assert!(inflight.queue(2, false).is_err());
        assert!(inflight.queue(0, true).is_ok());
        assert!(inflight.queue(1, true).is_err());
    }
}
