//! Bitmaps that a process had in use when it ended, and whose bits are known from elsewhere.
//!
//! What the file has of them is of no use, except their clusters, which are written when they are
//! [stored](Qcow2::store_bitmaps).

use std::sync::Arc;

use block::DirtyBitmap;

use super::load::Unusable;
use super::{BITMAP_BYTES_MAX, BitmapEntry, LOADED_MAX, OFFSET, StoredBitmap, UnusableBitmap};
use crate::qcow2::error::ImageError;
use crate::qcow2::header::AUTOCLEAR_BITMAPS;
use crate::qcow2::types::HostOffset;
use crate::qcow2::{ImageState, Qcow2};

impl Qcow2 {
    /// Continues bitmaps with these bits, in addition to those that were loaded: they are in use in the file, or not in it yet.
    /// They have the bits of all changes up to now, because the image [is continued](Self::is_continued). Nothing has been
    /// written to it yet. Returns those that cannot be continued.
    ///
    /// # Errors
    /// The image's bitmaps are not valid any more, or cannot be read: none is continued.
    pub fn continue_bitmaps(
        &self,
        bitmaps: Vec<Arc<DirtyBitmap>>,
    ) -> Result<Vec<UnusableBitmap>, ImageError> {
        let mut state = self.lock();
        let state = &mut *state;
        let is_valid = state.header.autoclear & AUTOCLEAR_BITMAPS != 0;
        if state.bitmaps.is_damaged || state.header.bitmaps.is_some() && !is_valid {
            let why = "the header says that none of the bitmaps is consistent";
            return Err(ImageError::Unsupported(why));
        }
        let entries = self.directory(state)?;
        let entries: Vec<_> = entries.into_iter().map(|(entry, _)| entry).collect();
        let mut unusable = Vec::new();
        for bits in bitmaps {
            let entry = entries.iter().find(|entry| entry.name() == bits.name());
            match self.continue_bitmap(state, entry, &bits) {
                Ok(()) => (state.bitmaps.unusable).retain(|other| other.name != bits.name()),
                Err(why) => unusable.push(UnusableBitmap {
                    name: bits.name().into(),
                    granularity: bits.granularity(),
                    why: why.text(),
                }),
            }
        }
        let loaded = state.bitmaps.loaded.iter();
        self.bitmaps
            .set(loaded.map(|bitmap| bitmap.bits.clone()).collect());
        Ok(unusable)
    }

    fn continue_bitmap(
        &self,
        state: &mut ImageState,
        entry: Option<&BitmapEntry>,
        bits: &Arc<DirtyBitmap>,
    ) -> Result<(), Unusable> {
        // It may have grown since they were recorded.
        let grown = bits.grow(self.size());
        grown.map_err(|_| "there is no space for its bits")?;
        let mut loaded = state.bitmaps.loaded.iter_mut();
        if let Some(loaded) = loaded.find(|loaded| loaded.bits.name() == bits.name()) {
            if loaded.bits.granularity_bits() != bits.granularity_bits() {
                return Err("it has another granularity in the image".into());
            }
            bits.merge(&loaded.bits);
            loaded.bits = bits.clone();
            return Ok(());
        }
        let all = state.bitmaps.loaded.iter();
        let bytes = all.map(|loaded| loaded.bits.bytes()).sum::<u64>() + bits.bytes();
        if bytes > BITMAP_BYTES_MAX || state.bitmaps.loaded.len() >= LOADED_MAX {
            return Err("more than 256 bitmaps, or 128 MiB of bits, are not loaded".into());
        }
        let stored = match entry {
            Some(entry) => self.claim_in_use(state, entry, bits)?,
            None => StoredBitmap::not_stored(bits.clone()),
        };
        state.bitmaps.loaded.push(stored);
        Ok(())
    }

    /// Takes over the clusters of a bitmap that is in use in the file.
    fn claim_in_use(
        &self,
        state: &mut ImageState,
        entry: &BitmapEntry,
        bits: &Arc<DirtyBitmap>,
    ) -> Result<StoredBitmap, Unusable> {
        if !entry.is_in_use() {
            return Err("it could not be loaded".into());
        }
        let new = self.new_bitmap(entry, self.size())?;
        // The disk may have grown while it was in use.
        let clusters = self.g.clusters(new.bytes());
        if new.granularity_bits != bits.granularity_bits()
            || u64::from(entry.table_entries) > clusters
        {
            return Err("its granularity or size is not that of the image".into());
        }
        let table = if entry.table_entries == 0 {
            Vec::new()
        } else {
            self.read_table(state, entry)?
        };
        for at in table.iter().map(|word| word & OFFSET) {
            if at != 0 {
                self.claim(state, HostOffset::new(at), 1)?;
            }
        }
        Ok(StoredBitmap {
            bits: bits.clone(),
            entry_at: Some(entry.at),
            table_at: entry.table_at,
            table,
            table_entries: entry.table_entries,
            is_in_use: true,
        })
    }
}
