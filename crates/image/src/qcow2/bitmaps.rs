//! Bitmaps stored in an image (docs/interop/qcow2 "Bitmaps extension").
//!
//! The consistent bitmaps of an image that is opened for writing are [loaded](Qcow2::load_bitmaps). Requests set bits in
//! memory. Before the first write, the bitmaps that track writes are [marked as in use](super::begin) in the file. When
//! nothing writes to the image any more, they are [stored](Qcow2::store_bitmaps), and are no longer in use.
//!
//! A bitmap that is in use has any content in the file, and programs that open the image do not use it. So a crash leaves
//! it {as it was, if nothing was written}, {in use}, or {stored}; it never has fewer bits than there were writes. After a
//! kill of the process, or a crash of the host, bitmaps that are in use are of no use any more, as in QEMU, unless their bits
//! [are known from elsewhere](Qcow2::continue_bitmaps).

mod directory;
mod load;
mod resume;
mod store;

use std::borrow::Cow;
use std::sync::{Arc, PoisonError};

use block::{CannotGrow, DirtyBitmap, DirtyBitmaps};

use directory::{Part, PartOf};

use super::error::ImageError;
use super::types::HostOffset;
use super::{ImageState, Qcow2};
use crate::bytes::{be16, be32, be64};

/// Most bytes of a bitmap directory: 65535 bitmaps, as in QEMU, of 1024 bytes.
pub(crate) const BITMAP_DIRECTORY_BYTES_MAX: u64 = 65535 * 1024;

/// Most bitmaps of an image that are loaded.
const LOADED_MAX: usize = 256;
/// Most bytes of the bits of all bitmaps of an image: at 4 KiB a bit, those of 4 TiB.
pub const BITMAP_BYTES_MAX: u64 = 128 << 20;

const IN_USE: u32 = 1;
const AUTO: u32 = 2;
const EXTRA_DATA_COMPATIBLE: u32 = 4;
const FLAGS_KNOWN: u32 = 7;
const TYPE_DIRTY_TRACKING: u8 = 1;
const ENTRY_BYTES: usize = 24;

/// Bits of an entry of a bitmap table.
const ALL_ONES: u64 = 1;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// An entry of a bitmap directory.
#[derive(Clone, Debug)]
pub(crate) struct BitmapEntry {
    /// Where in the directory it begins, in bytes. The entry's fields begin with the offset of its table (8 bytes), the
    /// number of entries of that (4 bytes) and the flags (4 bytes), all in one or two sectors.
    at: usize,
    /// The bitmap table, which refers to the clusters of the bitmap.
    pub table_at: HostOffset,
    pub table_entries: u32,
    flags: u32,
    granularity_bits: u8,
    has_extra_data: bool,
    name: Vec<u8>,
}

impl BitmapEntry {
    pub fn is_in_use(&self) -> bool {
        self.flags & IN_USE != 0
    }

    pub fn tracks_writes(&self) -> bool {
        self.flags & AUTO != 0
    }

    /// Its name, which may be any bytes in the file.
    fn name(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.name)
    }

    /// Where it begins in the directory, in bytes.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Where its flags are in the directory, and their value with the "in use" bit.
    pub fn marked_in_use(&self) -> (usize, u32) {
        (self.at + 12, self.flags | IN_USE)
    }
}

/// Parses a bitmap directory; `None` if it contains an unknown type or flag.
pub(crate) fn bitmap_directory(directory: &[u8], bitmaps: u32) -> Option<Vec<BitmapEntry>> {
    let mut entries = Vec::new();
    let mut at = 0;
    while at < directory.len() {
        let entry = directory
            .get(at..)
            .filter(|rest| rest.len() >= ENTRY_BYTES)?;
        let (flags, kind) = (be32(entry, 12), entry[16]);
        if kind != TYPE_DIRTY_TRACKING || flags & !FLAGS_KNOWN != 0 {
            return None;
        }
        let name_at = ENTRY_BYTES.checked_add(be32(entry, 20) as usize)?;
        let name_end = name_at.checked_add(be16(entry, 18).into())?;
        entries.push(BitmapEntry {
            at,
            table_at: HostOffset::new(be64(entry, 0)),
            table_entries: be32(entry, 8),
            flags,
            granularity_bits: entry[17],
            has_extra_data: name_at > ENTRY_BYTES,
            name: entry.get(name_at..name_end)?.to_vec(),
        });
        at += name_end.next_multiple_of(8);
    }
    (entries.len() == bitmaps as usize && at == directory.len()).then_some(entries)
}

/// The bitmaps of an image that is open for writing.
#[derive(Default)]
pub(super) struct StoredBitmaps {
    loaded: Vec<StoredBitmap>,
    unusable: Vec<UnusableBitmap>,
    /// What the header says about bitmaps is not known.
    is_broken: bool,
    /// The directory is damaged, or not where the header says. The first write clears the header's feature bit, and then
    /// the bitmaps count as outdated.
    pub is_damaged: bool,
}

/// A bitmap that was loaded, or will be stored.
struct StoredBitmap {
    bits: Arc<DirtyBitmap>,
    /// Where its entry is in the directory, in bytes. `None` if it has none yet.
    entry_at: Option<usize>,
    table_at: HostOffset,
    /// The table as in the file, or as it will be stored.
    table: Vec<u64>,
    /// The number of its entries in the file.
    table_entries: u32,
    /// It may be marked as in use, because of this process, or is not in the file.
    is_in_use: bool,
}

impl StoredBitmap {
    /// A bitmap that the image does not have yet.
    fn not_stored(bits: Arc<DirtyBitmap>) -> Self {
        Self {
            bits,
            entry_at: None,
            table_at: HostOffset::START,
            table: Vec::new(),
            table_entries: 0,
            is_in_use: true,
        }
    }
}

/// A bitmap of the image that is not continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusableBitmap {
    /// Its name; empty if it is not known.
    pub name: String,
    /// Bytes of the disk for each bit; 0 if it is not known.
    pub granularity: u64,
    /// Why it is not continued.
    pub why: String,
}

pub(super) type OnBitmapLost = Box<dyn Fn(&str, &ImageError) + Send + Sync>;

impl StoredBitmaps {
    /// The bitmap whose entry is here in the directory is being marked as in use.
    pub fn set_in_use(&mut self, entry_at: usize) {
        let mut bitmaps = self.loaded.iter_mut();
        if let Some(bitmap) = bitmaps.find(|bitmap| bitmap.entry_at == Some(entry_at)) {
            bitmap.is_in_use = true;
        }
    }

    /// The directory consists of these parts from now on.
    fn set_places(&mut self, parts: &[Part]) {
        for (number, bitmap) in self.loaded.iter_mut().enumerate() {
            let of = bitmap.entry_at.map_or(PartOf::New(number), PartOf::Old);
            let place = parts.iter().position(|part| part.of == of);
            let before = |place: usize| parts[..place].iter().map(|part| part.bytes.len()).sum();
            bitmap.entry_at = place.map(before);
        }
    }
}

impl Qcow2 {
    /// The bitmaps that were stored in the image and are up to date. A request that changes the disk must set its bits in
    /// those that are recording before it looks up its range.
    pub fn bitmaps(&self) -> &Arc<DirtyBitmaps> {
        &self.bitmaps
    }

    /// The other bitmaps of the image.
    pub fn unusable_bitmaps(&self) -> Vec<UnusableBitmap> {
        self.lock().bitmaps.unusable.clone()
    }

    /// Sets `tell`, which is called when a bitmap cannot be continued, with its name. It can be set only once; returns
    /// false if it was set already.
    pub fn on_bitmap_lost(&self, tell: impl Fn(&str, &ImageError) + Send + Sync + 'static) -> bool {
        self.on_bitmap_lost.set(Box::new(tell)).is_ok()
    }

    fn bitmap_lost(&self, bitmap: &DirtyBitmap, error: &ImageError) {
        bitmap.set_inconsistent();
        if let Some(tell) = self.on_bitmap_lost.get() {
            tell(bitmap.name(), error);
        }
    }

    /// Marks all bitmaps that were loaded as in use, durably, before they are changed other than by writes. A copy of the image
    /// that was made before has other bitmaps than those that a process continues after a kill: it does not count as
    /// [continued](Self::is_continued) any more, even if the guest has only written in place since. Blocks.
    ///
    /// # Errors
    /// They could not be marked, or copies still count.
    pub fn use_bitmaps(&self) -> Result<(), ImageError> {
        self.begin_writing()?;
        let flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        self.outdate_bitmaps(&mut self.lock(), true)?;
        drop(flushing);
        self.outdate_copies()
    }

    /// Replaces all bitmaps. New persistent ones are stored when the others are. Those that are missing must have been
    /// [removed](Self::remove_stored_bitmaps) from the image. No request is in flight, and
    /// [`use_bitmaps`](Self::use_bitmaps) was called if persistent bitmaps change.
    pub fn set_bitmaps(&self, bitmaps: Vec<Arc<DirtyBitmap>>) {
        let mut state = self.lock();
        let loaded = &mut state.bitmaps.loaded;
        let mut stored = std::mem::take(loaded);
        for bits in bitmaps.iter().filter(|bitmap| bitmap.is_persistent()) {
            let same = |stored: &StoredBitmap| stored.bits.name() == bits.name();
            let bits = bits.clone();
            loaded.push(match stored.iter().position(same) {
                Some(place) => StoredBitmap {
                    bits,
                    ..stored.swap_remove(place)
                },
                None => StoredBitmap::not_stored(bits),
            });
        }
        self.bitmaps.set(bitmaps);
        // The disk may have grown since they were made.
        self.grow_bitmaps(self.size());
    }

    /// The disk grows to `size`. The bitmaps are in use, and no request beyond the old end is accepted yet. The new part
    /// is clean, as in QEMU: it was not written.
    pub(super) fn grow_bitmaps(&self, size: u64) {
        for (bits, why) in self.bitmaps.reserve(size, BITMAP_BYTES_MAX) {
            let why = match why {
                CannotGrow::Limit => {
                    "the bitmaps of the larger disk would take more than 128 MiB of memory"
                }
                CannotGrow::NoSpace(_) => "there is no space for the bits of the larger disk",
            };
            self.bitmap_lost(&bits, &ImageError::Unsupported(why));
        }
        self.bitmaps.grow(size);
    }

    /// It is not known which size the disk has in the file, so it is not known which size its bitmaps must have.
    pub(super) fn lose_bitmaps(&self, state: &ImageState) {
        for bitmap in &state.bitmaps.loaded {
            let why = "the disk's new size could not be written";
            self.bitmap_lost(&bitmap.bits, &ImageError::Unsupported(why));
        }
    }
}
