//! In-flight tracking: memory that outlives this process and records the requests that the process has
//! fetched from each ring and not completed (vhost-user: "Inflight I/O tracking").
//!
//! The front-end keeps the memory and passes it to the next process that serves its rings. That process
//! repeats the requests that its predecessor had not finished. The contents were therefore written by a
//! process that was killed at any point, or by a malicious front-end, and are checked like any other input.
//!
//! The record of each ring type, and why a kill between any two stores is harmless, is described with its
//! code: [split](crate::virtqueue) in `split/inflight.rs`, packed in `packed/inflight.rs`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use thiserror::Error;

use crate::memory::{Mapping, MemoryError, RegionLayout};
use crate::ring::{RING_SIZE_MAX, RingBase, RingError};
use crate::sigbus::SessionAbort;

/// Alignment of each queue's part: queues do not share cache lines.
const QUEUE_ALIGN: u64 = 64;

/// Split queue: length of the header and of each entry, in bytes.
const SPLIT_BYTES: (u64, u64) = (16, 16);

/// Packed queue: length of the header and of each entry, in bytes.
const PACKED_BYTES: (u64, u64) = (32, 32);

/// The only version of the record; 0 marks a queue without a record.
const VERSION: u16 = 1;

/// Stored in place of a version: a packed queue that has too few entries is being served.
const UNTRACKED: u16 = 0xffff;

/// Stored in place of a version: a packed queue that has too few entries has stopped with nothing in flight;
/// the field for the number of entries holds its position.
const PARKED: u16 = 0xfffe;

/// Minimum number of entries per queue in a region that ringdisk creates. QEMU asks for `queue-size` entries,
/// but some versions (10.0.13 for example) let the driver set up rings of 1024 descriptors regardless of that
/// value.
const ENTRIES_MIN: u16 = 1024;

/// Maximum number of entries per queue.
const ENTRIES_MAX: u16 = RING_SIZE_MAX;

/// The region's position in its file and its number of queues (vhost-user: "Inflight description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightLayout {
    /// Length of the region in bytes.
    pub len: u64,
    /// Offset of the region in the file.
    pub file_offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Maximum number of descriptors in a queue. QEMU sends back the value that it asked for, not the one it
    /// was given.
    pub queue_size: u16,
}

/// Why a region was rejected.
#[derive(Debug, Error)]
pub enum InflightError {
    /// The number of queues is wrong, the region's offset is misaligned, or its length is out of range.
    #[error("in-flight region {0:x?} does not match a disk with {1} queues")]
    Malformed(InflightLayout, u16),
    /// The region cannot be mapped.
    #[error("in-flight region: {0}")]
    Memory(#[from] MemoryError),
    /// The region's file cannot be created.
    #[error("cannot allocate an in-flight region: {0}")]
    Make(io::Error),
}

impl InflightLayout {
    /// The layout for a front-end that asked for `queue_size` entries per queue; it is large enough for every
    /// ring that its guest may set up.
    pub fn for_request(queues: u16, queue_size: u16, packed: bool) -> Self {
        Self::new(queues, queue_size.clamp(ENTRIES_MIN, ENTRIES_MAX), packed)
    }

    /// The layout of a region for rings of one type, at the start of its own file.
    pub fn new(queues: u16, queue_size: u16, packed: bool) -> Self {
        Self {
            len: u64::from(queues) * queue_bytes(queue_size, packed),
            file_offset: 0,
            queues,
            queue_size,
        }
    }

    /// Validates a layout that a front-end sent for a disk with `queues` queues.
    fn check(self, queues: u16) -> Result<(), InflightError> {
        let len_max = u64::from(queues) * queue_bytes(ENTRIES_MAX, true);
        let sound = (1..=queues).contains(&self.queues)
            && (1..=len_max).contains(&self.len)
            && self.file_offset.is_multiple_of(8);
        if sound {
            Ok(())
        } else {
            Err(InflightError::Malformed(self, queues))
        }
    }

    /// The length of each queue's part in bytes, and its number of entries. The process that created the
    /// region divided its length evenly, so the length is more reliable than the number of entries that the
    /// front-end sends. That number is used only if the length is not a whole number of queues.
    fn division(&self, packed: bool) -> (u64, u16) {
        let even = self.len / u64::from(self.queues);
        let named = queue_bytes(self.queue_size, packed);
        let divides = even * u64::from(self.queues) == self.len && even.is_multiple_of(QUEUE_ALIGN);
        if !divides || even == named {
            return (named, self.queue_size);
        }
        let (head, entry) = entry_bytes(packed);
        // Round down to a multiple of four: the remainder may be padding.
        let entries = ((even - head) / entry) & !3;
        (even, entries.min(u64::from(ENTRIES_MAX)) as u16)
    }
}

/// Length of a queue's header and of each of its entries, in bytes.
fn entry_bytes(packed: bool) -> (u64, u64) {
    if packed { PACKED_BYTES } else { SPLIT_BYTES }
}

/// Length of one queue's part of a region, in bytes.
fn queue_bytes(queue_size: u16, packed: bool) -> u64 {
    let (head, entry) = entry_bytes(packed);
    (head + entry * u64::from(queue_size)).next_multiple_of(QUEUE_ALIGN)
}

/// A mapped region.
pub struct Inflight {
    layout: InflightLayout,
    mapping: Arc<Mapping>,
    base: usize,
    /// For another process that continues with the region.
    file: Arc<OwnedFd>,
}

impl Inflight {
    /// Creates the file of an unused region for a disk with `queues` queues. The file's size is sealed.
    ///
    /// # Errors
    /// The disk does not have that many queues, or there is no memory.
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

    /// Maps a region that a front-end sends, for a disk with `queues` queues.
    ///
    /// # Errors
    /// The layout does not fit such a disk, the region extends beyond its file, or it cannot be mapped.
    pub fn map(
        layout: InflightLayout,
        file: impl Into<Arc<OwnedFd>>,
        queues: u16,
    ) -> Result<Self, InflightError> {
        Self::map_watched(layout, file, queues, None)
    }

    /// Like [`map`](Self::map); `abort` is notified if the front-end truncates the file.
    pub(crate) fn map_watched(
        layout: InflightLayout,
        file: impl Into<Arc<OwnedFd>>,
        queues: u16,
        abort: Option<SessionAbort>,
    ) -> Result<Self, InflightError> {
        let file = file.into();
        layout.check(queues)?;
        let region = RegionLayout {
            guest: 0,
            len: layout.len,
            user: 0,
            file_offset: layout.file_offset,
        };
        let mapping = Mapping::new(region, &file, crate::memory::MAX_MAPPED_BYTES, abort)?;
        Ok(Self {
            layout,
            file,
            base: mapping.at(layout.file_offset),
            mapping: Arc::new(mapping),
        })
    }

    /// The layout for rings of one type, and the file.
    pub(crate) fn region(&self, packed: bool) -> (InflightLayout, Arc<OwnedFd>) {
        // Another version of ringdisk may use the number of entries.
        let (_, queue_size) = self.layout.division(packed);
        let layout = InflightLayout {
            queue_size,
            ..self.layout
        };
        (layout, self.file.clone())
    }

    /// The part of the region for a ring, or `None` if the region ends before it.
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

/// One queue's part of a region. It has at least as many entries as the queue has descriptors.
pub struct InflightQueue {
    /// Address in this process, a multiple of 8.
    addr: usize,
    /// Number of entries: as many as fit, or fewer if a predecessor used fewer.
    entries: u16,
    _mapping: Arc<Mapping>,
}

/// Start of a queue's part, the same for both ring types.
#[repr(C)]
struct Preamble {
    features: AtomicU64,
    version: AtomicU16,
    entries: AtomicU16,
}

impl InflightQueue {
    /// Whether there are enough entries for a ring of this size.
    pub fn fits(&self, size: u16) -> bool {
        self.entries >= size
    }

    /// Whether a ring has been served with this part of the region.
    pub(crate) fn has_record(&self) -> bool {
        self.preamble().version.load(Ordering::Acquire) != 0
    }

    /// Whether nothing is recorded for a ring of `size`, so that the ring starts at the position that the
    /// front-end gives.
    ///
    /// # Errors
    /// The record has another version or length.
    pub(crate) fn is_blank(&mut self, size: u16) -> Result<bool, RingError> {
        let preamble = self.preamble();
        match preamble.version.load(Ordering::Acquire) {
            0 => Ok(true),
            VERSION if preamble.features.load(Ordering::Relaxed) != 0 => {
                Err(RingError::Inflight("has features that are not known"))
            }
            VERSION => match preamble.entries.load(Ordering::Relaxed) {
                n if n > self.entries => Err(RingError::Inflight("is for larger queues")),
                // The record belongs to a smaller ring that no longer exists.
                n if n < size => Ok(true),
                n => {
                    self.entries = n;
                    Ok(false)
                }
            },
            // The record belongs to a larger ring that no longer exists.
            UNTRACKED | PARKED => Ok(true),
            _ => Err(RingError::Inflight("is of a version that is not known")),
        }
    }

    /// The recorded position of a packed ring that has too few entries, if there is one.
    ///
    /// # Errors
    /// The process that served the ring was killed.
    pub(crate) fn parked(&self) -> Result<Option<RingBase>, RingError> {
        let preamble = self.preamble();
        match preamble.version.load(Ordering::Acquire) {
            UNTRACKED => Err(RingError::Untracked),
            PARKED => {
                let position = preamble.entries.load(Ordering::Relaxed);
                Ok(Some(RingBase::packed(position, position)))
            }
            _ => Ok(None),
        }
    }

    /// Records that a packed ring with too few entries is being served.
    pub(crate) fn unpark(&self) {
        self.preamble().version.store(UNTRACKED, Ordering::Release);
    }

    /// Records that a packed ring with too few entries has stopped, with nothing in flight.
    pub(crate) fn park(&self, base: RingBase) {
        let preamble = self.preamble();
        preamble.entries.store(base.0 as u16, Ordering::Relaxed);
        preamble.version.store(PARKED, Ordering::Release);
    }

    /// Marks the queue as recorded. All other fields must have been written.
    pub(crate) fn begin(&self) {
        let preamble = self.preamble();
        preamble.features.store(0, Ordering::Relaxed);
        preamble.entries.store(self.entries, Ordering::Relaxed);
        preamble.version.store(VERSION, Ordering::Release);
    }

    /// Removes the queue's record: the ring will start at the position that the front-end gives.
    pub(crate) fn forget(&self) {
        self.preamble().version.store(0, Ordering::Release);
    }

    /// Number of entries.
    pub(crate) fn entries(&self) -> u16 {
        self.entries
    }

    /// Address of the queue's part. It is aligned to 8 and mapped, in the full length of a queue of its type,
    /// while this value lives.
    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    #[expect(unsafe_code, reason = "the region is memory shared with the front-end")]
    fn preamble(&self) -> &Preamble {
        // SAFETY: the queue's part is mapped while `self` lives and is aligned to 8 bytes; every value is
        // valid in an atomic, even if another process writes there.
        unsafe { &*(self.addr as *const Preamble) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_regions_are_refused() {
        let good = InflightLayout::new(2, 128, false);
        assert_eq!(good.len, 2 * (16 + 128 * 16 + 48));
        let file = Inflight::make(good, 2).unwrap();
        assert!(ftruncate(&file, 0).is_err(), "its size is sealed");
        let map = |layout| Inflight::map(layout, file.try_clone().unwrap(), 2);
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

    /// The length determines the layout, not the number of entries that a front-end sends.
    #[test]
    fn queue_position_follows_from_length() {
        for packed in [false, true] {
            let answered = InflightLayout::for_request(3, 128, packed);
            assert_eq!(answered, InflightLayout::new(3, 1024, packed));
            let file = Inflight::make(answered, 3).unwrap();
            for queue_size in [0, 1, 128, 1024, u16::MAX] {
                let layout = InflightLayout {
                    queue_size,
                    ..answered
                };
                let inflight = Inflight::map(layout, file.try_clone().unwrap(), 3).unwrap();
                let at = |ring| inflight.queue(ring, packed).unwrap().addr as u64;
                assert_eq!(at(2) - at(0), 2 * queue_bytes(1024, packed));
                assert!(inflight.queue(2, packed).unwrap().fits(1024));
                assert!(!inflight.queue(0, packed).unwrap().fits(1028));
                assert!(inflight.queue(3, packed).is_none());
                assert_eq!(inflight.region(packed).0, answered);
            }
        }
    }

    /// Regions of any size that another program created for its own rings, with the ring size sent by a
    /// front-end.
    #[test]
    fn region_has_requested_entries() {
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

    /// A length that does not divide evenly (for example up to the middle of a page) is divided as the
    /// front-end says; queues that do not fit are absent.
    #[test]
    fn indivisible_length_gives_no_entries() {
        let layout = InflightLayout {
            len: 8192,
            ..InflightLayout::new(3, 128, false)
        };
        assert_eq!(layout.division(false), (2112, 128));
        let file = Inflight::make(layout, 3).unwrap();
        let inflight = Inflight::map(layout, file.try_clone().unwrap(), 3).unwrap();
        assert!(inflight.queue(2, false).unwrap().fits(128));
        let packed = |ring| inflight.queue(ring, true);
        assert!(packed(0).unwrap().fits(128) && packed(1).is_none());
        for queue_size in [0, u16::MAX] {
            let layout = InflightLayout {
                queue_size,
                ..layout
            };
            let inflight = Inflight::map(layout, file.try_clone().unwrap(), 3).unwrap();
            let fits = |ring| inflight.queue(ring, false).is_some_and(|q| q.fits(1));
            assert!((0..4).all(|ring| !fits(ring)), "{queue_size}");
        }
    }
}
