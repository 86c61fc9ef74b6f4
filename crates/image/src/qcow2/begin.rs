//! Preparing an image for its first write (docs/interop/qcow2 "autoclear_features", "Bitmap directory"):
//! programs that open it later must not rely on structures that ringdisk does not update.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use super::bitmaps::bitmap_directory;
use super::error::ImageError;
use super::header::{AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_EXTERNAL};
use super::journal::Journal;
use super::types::PieceIndex;
use super::{ImageState, Qcow2};
use crate::bytes::put32;

impl Qcow2 {
    /// Prepares the image for its first write. Later calls do nothing. Blocks.
    pub(super) fn begin_writing(&self) -> Result<(), ImageError> {
        if self.has_begun_writing.load(SeqCst) {
            return Ok(());
        }
        self.check_writable()?;
        if self.has_refused.load(SeqCst) {
            let why = "a running guest needs the journal of this image, which is not here: nothing is written to it until that \
                was replayed, or the VM was reset";
            return Err(ImageError::Unsupported(why));
        }
        let _flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        if self.has_begun_writing.load(SeqCst) {
            return Ok(());
        }
        self.try_to_fill_holes(&mut state)?;
        state.begin_journal();
        self.outdate_bitmaps(&mut state, false)?;
        if let Some(journal) = &mut state.journal {
            journal.forget_other();
        }
        self.has_begun_writing.store(true, SeqCst);
        Ok(())
    }

    /// Fills holes in tables, unless space is missing: a guest can still write where it has written before, and discard. The
    /// next flush tries again.
    pub(super) fn try_to_fill_holes(&self, state: &mut ImageState) -> Result<(), ImageError> {
        match self.fill_holes(state) {
            Err(e) if e.is_no_space() => state.has_holes = true,
            result => {
                result?;
                state.has_holes = false;
            }
        }
        Ok(())
    }

    /// Writes zeroes to the parts of the L1 table and of the refcount table that have only zeroes, so that no flush needs space
    /// for them: a new image has holes there. Those of refcount blocks are filled when clusters are taken that they count. L2
    /// tables have none, unless the file is a sparse copy.
    fn fill_holes(&self, state: &mut ImageState) -> Result<(), ImageError> {
        let mut pieces = state.refcounts.zero_pieces();
        let l1_bytes = self.l1.entries() * 8;
        for index in (0..l1_bytes.div_ceil(self.g.piece())).map(PieceIndex::new) {
            let piece = self.l1_piece(state, index);
            if piece.is_zero() && !state.dirty_l1.contains(&index) {
                pieces.push(piece);
            }
        }
        if let Some(last) = pieces.iter().map(|piece| piece.at).max() {
            self.file.grow(last + self.g.piece())?;
        }
        self.file.write("filling holes in tables", &pieces)
    }

    /// Marks bitmaps that should track writes (or all of them, if the disk changes its size) as in use, so that
    /// their owner knows that they are outdated. Clears unknown autoclear features, as the format requires.
    pub(super) fn outdate_bitmaps(
        &self,
        state: &mut ImageState,
        all: bool,
    ) -> Result<(), ImageError> {
        // The generation first: with it, bitmaps that are in use after a crash may still be continued.
        self.set_autoclear(state, AUTOCLEAR_RAW_EXTERNAL | AUTOCLEAR_BITMAPS)?;
        if !self.mark_bitmaps(state, all)? {
            self.set_autoclear(state, AUTOCLEAR_RAW_EXTERNAL)?;
        }
        Ok(())
    }

    /// Clears all autoclear features but these, and those of the journal, durably.
    fn set_autoclear(&self, state: &mut ImageState, known: u64) -> Result<(), ImageError> {
        let journal = state.journal.as_ref().map_or(0, Journal::autoclear);
        let before = state.header.clone();
        state.header.autoclear &= known;
        state.header.set_journal(journal);
        let header_changed = state.header.features() != before.features();
        if header_changed {
            self.write_header(state)
                .inspect_err(|_| state.header = before)?;
        }
        // A header that an earlier attempt has written may not be durable.
        if header_changed || self.file.unflushed() {
            self.file.flush()?;
        }
        Ok(())
    }

    /// Marks bitmaps as in use; false if the whole extension must be marked as outdated.
    fn mark_bitmaps(&self, state: &mut ImageState, all: bool) -> Result<bool, ImageError> {
        let Some(extension) = state.header.bitmaps else {
            return Ok(false);
        };
        let (at, len) = (extension.directory_at, extension.directory_bytes);
        if state.header.autoclear & AUTOCLEAR_BITMAPS == 0 || state.bitmaps.is_damaged {
            return Ok(false);
        }
        // Whole pieces are written: the last cluster of the directory holds nothing else.
        let piece = self.g.piece();
        let mut bytes = vec![0; len.next_multiple_of(piece) as usize];
        self.file
            .read_at("reading the bitmap directory", at, &mut bytes)?;
        let Some(entries) = bitmap_directory(&bytes[..len as usize], extension.bitmaps) else {
            return Ok(false);
        };
        let mut any_marked = false;
        for entry in entries {
            if !all && !entry.tracks_writes() {
                continue;
            }
            if !entry.is_in_use() {
                let (at, flags) = entry.marked_in_use();
                put32(&mut bytes, at, flags);
                any_marked = true;
            }
            state.bitmaps.set_in_use(entry.at());
        }
        if any_marked {
            self.file
                .write_at("marking bitmaps as in use", at, &bytes)?;
            self.file.flush()?;
        }
        Ok(true)
    }
}
