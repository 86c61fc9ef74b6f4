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
use crate::virtqueue::{RingBase, RingError, Virtqueue};

/// Queues begin on cache lines of their own.
const QUEUE_ALIGN: u64 = 64;

/// Bytes before the entries of a split queue, and of each of these.
const SPLIT_BYTES: (u64, u64) = (16, 16);

/// The same of a packed queue.
const PACKED_BYTES: (u64, u64) = (32, 32);

/// The only version of what is written down; 0 is a queue of which nothing is.
const VERSION: u16 = 1;

/// In place of a version: a packed queue for which there is too little room is being served.
const UNRECORDED: u16 = 0xffff;

/// In place of a version: such a queue has stopped, with nothing in flight, where the number of entries says.
const PARKED: u16 = 0xfffe;

/// Entries per queue of a region that is made here, at least. QEMU asks for `queue-size` of them; yet some of its versions
/// (10.0.13 is one) let the driver set up rings of 1024 descriptors whatever that is.
const ENTRIES_MIN: u16 = 1024;

/// Entries per queue at most.
const ENTRIES_MAX: u16 = Virtqueue::SIZE_LIMIT;

/// Where the region is in its file, and for how many queues (vhost-user: "Inflight description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightLayout {
    /// Bytes of the region.
    pub len: u64,
    /// Its first byte in the file.
    pub file_offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Most descriptors that a queue may have. QEMU repeats here what it asked for, and not what it was given.
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
    /// A region for a front-end that asked for `queue_size` entries per queue: large enough for every ring that its guest
    /// may set up.
    pub fn answering(queues: u16, queue_size: u16, packed: bool) -> Self {
        Self::new(queues, queue_size.clamp(ENTRIES_MIN, ENTRIES_MAX), packed)
    }

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
        let len_max = u64::from(queues) * queue_bytes(ENTRIES_MAX, true);
        let sound = (1..=queues).contains(&self.queues)
            && (1..=len_max).contains(&self.len)
            && self.file_offset.is_multiple_of(8);
        match sound {
            true => Ok(()),
            false => Err(InflightError::Malformed(self, queues)),
        }
    }

    /// Bytes from one queue to the next, and the entries of each. The process that made the region divided its length evenly, so
    /// that the length says more than the number of entries that the front-end names. That number counts only for a
    /// length that is no whole number of queues.
    fn division(&self, packed: bool) -> (u64, u16) {
        let even = self.len / u64::from(self.queues);
        let named = queue_bytes(self.queue_size, packed);
        let divides = even * u64::from(self.queues) == self.len && even.is_multiple_of(QUEUE_ALIGN);
        if !divides || even == named {
            return (named, self.queue_size);
        }
        let (head, entry) = entry_bytes(packed);
        // Whole fours: of what is over, some may be padding.
        let entries = ((even - head) / entry) & !3;
        (even, entries.min(u64::from(ENTRIES_MAX)) as u16)
    }
}

/// Bytes before the entries of a queue, and of each of these.
fn entry_bytes(packed: bool) -> (u64, u64) {
    if packed { PACKED_BYTES } else { SPLIT_BYTES }
}

/// Bytes of one queue in a region.
fn queue_bytes(queue_size: u16, packed: bool) -> u64 {
    let (head, entry) = entry_bytes(packed);
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

    /// Where it is, for rings of one kind, and its file.
    pub(crate) fn region(&self, packed: bool) -> (InflightLayout, Arc<OwnedFd>) {
        // Another version of this program may go by the number of entries.
        let (_, queue_size) = self.layout.division(packed);
        let layout = InflightLayout {
            queue_size,
            ..self.layout
        };
        (layout, self.file.clone())
    }

    /// The part of a ring; none if the region ends before it.
    pub fn queue(&self, ring: u16, packed: bool) -> Option<InflightQueue> {
        let (bytes, entries) = self.layout.division(packed);
        let start = u64::from(ring) * bytes;
        let there = ring < self.layout.queues && start + bytes <= self.layout.len;
        there.then(|| InflightQueue {
            addr: self.base + start as usize,
            entries,
            _mapping: self.mapping.clone(),
        })
    }
}

/// The part of a region that is one queue's. It holds as many entries as the queue has descriptors, or
/// more.
pub struct InflightQueue {
    /// A multiple of 8.
    addr: usize,
    /// As many as there is room for, or fewer if a predecessor used fewer.
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
    /// Whether there is room for the requests of a ring of this size.
    pub fn fits(&self, size: u16) -> bool {
        self.entries >= size
    }

    /// Whether nothing is written down of a ring of `size`, so that it begins where the front-end says.
    ///
    /// # Errors
    /// What is there is of another version or length.
    pub(crate) fn is_blank(&mut self, size: u16) -> Result<bool, RingError> {
        let preamble = self.preamble();
        match preamble.version.load(Ordering::Acquire) {
            0 => Ok(true),
            VERSION if preamble.features.load(Ordering::Relaxed) != 0 => {
                Err(RingError::Inflight("has features that are not known"))
            }
            VERSION => match preamble.entries.load(Ordering::Relaxed) {
                n if n > self.entries => Err(RingError::Inflight("is for larger queues")),
                // Of a smaller ring, which is gone.
                n if n < size => Ok(true),
                n => {
                    self.entries = n;
                    Ok(false)
                }
            },
            // Of a larger ring, which is gone as well.
            UNRECORDED | PARKED => Ok(true),
            _ => Err(RingError::Inflight("is of a version that is not known")),
        }
    }

    /// Where a packed ring for which there is too little room goes on, if that is written down.
    ///
    /// # Errors
    /// A process was killed that served it.
    pub(crate) fn parked(&self) -> Result<Option<RingBase>, RingError> {
        let preamble = self.preamble();
        match preamble.version.load(Ordering::Acquire) {
            UNRECORDED => Err(RingError::Unrecorded),
            PARKED => {
                let position = preamble.entries.load(Ordering::Relaxed);
                Ok(Some(RingBase::packed(position, position)))
            }
            _ => Ok(None),
        }
    }

    /// Such a ring is being served from here on.
    pub(crate) fn unpark(&self) {
        self.preamble().version.store(UNRECORDED, Ordering::Release);
    }

    /// Such a ring has stopped, with nothing in flight.
    pub(crate) fn park(&self, base: RingBase) {
        let preamble = self.preamble();
        preamble.entries.store(base.0 as u16, Ordering::Relaxed);
        preamble.version.store(PARKED, Ordering::Release);
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

    /// The length counts, and not the number of entries that a front-end names.
    #[test]
    fn a_queue_lies_where_the_length_says() {
        for packed in [false, true] {
            let answered = InflightLayout::answering(3, 128, packed);
            assert_eq!(answered, InflightLayout::new(3, 1024, packed));
            let file = Inflight::make(answered, 3).unwrap();
            for queue_size in [0, 1, 128, 1024, u16::MAX] {
                let layout = InflightLayout {
                    queue_size,
                    ..answered
                };
                let inflight = Inflight::map(layout, &file, 3).unwrap();
                let at = |ring| inflight.queue(ring, packed).unwrap().addr as u64;
                assert_eq!(at(2) - at(0), 2 * queue_bytes(1024, packed));
                assert!(inflight.queue(2, packed).unwrap().fits(1024));
                assert!(!inflight.queue(0, packed).unwrap().fits(1028));
                assert!(inflight.queue(3, packed).is_none());
                assert_eq!(inflight.region(packed).0, answered);
            }
        }
    }

    /// Regions of any size that somebody made for their own rings, of which a front-end says how large these are.
    #[test]
    fn a_region_has_the_entries_for_which_it_was_made() {
        for packed in [false, true] {
            for size in 1..=1024 {
                let layout = InflightLayout::new(2, size, packed);
                assert_eq!(layout.division(packed), (layout.len / 2, size));
                let (_, entries) = InflightLayout {
                    queue_size: 128,
                    ..layout
                }
                .division(packed);
                assert!(size == 128 || entries + 3 >= size, "{size}: {entries}");
                assert!(u64::from(entries) * 16 < layout.len);
            }
        }
    }

    /// One that ends in the midst of a page, say, is divided as the front-end says; what does not fit is not there.
    #[test]
    fn a_length_that_does_not_divide_says_nothing() {
        let layout = InflightLayout {
            len: 8192,
            ..InflightLayout::new(3, 128, false)
        };
        assert_eq!(layout.division(false), (2112, 128));
        let file = Inflight::make(layout, 3).unwrap();
        let inflight = Inflight::map(layout, &file, 3).unwrap();
        assert!(inflight.queue(2, false).unwrap().fits(128));
        let packed = |ring| inflight.queue(ring, true);
        assert!(packed(0).unwrap().fits(128) && packed(1).is_none());
        for queue_size in [0, u16::MAX] {
            let layout = InflightLayout {
                queue_size,
                ..layout
            };
            let inflight = Inflight::map(layout, &file, 3).unwrap();
            let fits = |ring| inflight.queue(ring, false).is_some_and(|q| q.fits(1));
            assert!((0..4).all(|ring| !fits(ring)), "{queue_size}");
        }
    }
}
