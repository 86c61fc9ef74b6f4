//! Loads what a lookup did not find in memory: reads a slice of an L2 table into the cache.

use std::sync::PoisonError;

use super::entry::{BAD, Entry, table_at};
use super::error::ImageError;
use super::metadata::Metadata;
use super::retry::Retry;
use super::types::{Frame, Run, SliceIndex};
use super::{ImageState, Load, Qcow2};
use crate::bytes::be64;

impl Qcow2 {
    /// Does what a lookup found missing. Blocks.
    pub(crate) fn load(&self, what: Load) -> Result<(), ImageError> {
        match what {
            Load::Slice(slice) => self.load_slice(slice),
            Load::FirstWrite => self.begin_writing(),
        }
    }

    /// Loads a slice of an L2 table. If another thread is loading it, waits for that.
    fn load_slice(&self, slice: SliceIndex) -> Result<(), ImageError> {
        let (table, offset) = slice.table(&self.g);
        let mut state = self.lock();
        let (frame, at) = loop {
            if self.cache.find(slice).is_some() {
                return Ok(());
            }
            let l1_entry = self.l1.get(table);
            let Ok(at) = table_at(&self.g, l1_entry) else {
                let error = ImageError::bad_entry("an L1 entry leads nowhere", l1_entry);
                return Err(self.report(&mut state, error));
            };
            let Some(at) = at else {
                return Ok(());
            };
            if !state.loading.contains_key(&slice) {
                match self.evict_for(&state, slice) {
                    Some(frame) => break (frame, at + offset),
                    None if state.dirty_l2.is_empty() && state.writing_l2.is_empty() => {}
                    None => {
                        drop(state);
                        self.flush()?;
                        state = self.lock();
                        continue;
                    }
                }
            }
            let waited = self.loaded.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        };
        state.loading.insert(slice, frame);
        drop(state);
        let mut bytes = vec![0; self.g.slice_bytes() as usize];
        let read = self.file.read_at("reading an L2 table", at, &mut bytes);
        let mut state = self.lock();
        state.loading.remove(&slice);
        self.loaded.notify_all();
        match read {
            Ok(read) if read == bytes.len() => {
                let words = self.checked(&state, &bytes);
                self.cache.fill(frame, slice, words.into_iter());
                Ok(())
            }
            Ok(_) => {
                let error = ImageError::damaged("the file ends before an L2 table", at);
                Err(self.report(&mut state, error))
            }
            Err(error) => Err(error),
        }
    }

    /// Empties a frame for a slice, if there is one without changes.
    fn evict_for(&self, state: &ImageState, slice: SliceIndex) -> Option<Frame> {
        self.cache.evict_for(slice, |frame| {
            state.dirty_l2.contains_key(&frame)
                || state.writing_l2.contains(&frame)
                || state.loading.values().any(|&loading| loading == frame)
        })
    }

    /// Adds a slice of a new table to the cache: all zeroes.
    pub(super) fn insert_empty(&self, state: &ImageState, slice: SliceIndex) -> Result<(), Retry> {
        if self.cache.find(slice).is_none() {
            let frame = self.evict_for(state, slice).ok_or(Retry::CacheFull)?;
            self.cache.fill(frame, slice, std::iter::empty());
        }
        Ok(())
    }

    /// The words of a slice. In an image that is written, entries that refer to metadata are marked, so that no guest
    /// data is ever written there.
    fn checked(&self, state: &ImageState, bytes: &[u8]) -> Vec<u64> {
        let words: Vec<u64> = (0..bytes.len())
            .step_by(8)
            .map(|at| be64(bytes, at))
            .collect();
        if self.read_only || self.g.external {
            return words;
        }
        let mut checked = words;
        for entry in checked.chunks_exact_mut(self.g.words()) {
            if self.leads_to_metadata(&state.metadata, entry) {
                entry[0] |= BAD;
            }
        }
        checked
    }

    /// Removes the marks before the words are written: the file keeps such entries unchanged.
    pub(super) fn unmark(&self, metadata: &Metadata, words: &mut [u64]) {
        if self.g.external {
            return;
        }
        for entry in words.chunks_exact_mut(self.g.words()) {
            // A mark that was not set here is damage in the file itself.
            if entry[0] & BAD != 0 {
                entry[0] &= !BAD;
                if !self.leads_to_metadata(metadata, entry) {
                    entry[0] |= BAD;
                }
            }
        }
    }

    fn leads_to_metadata(&self, metadata: &Metadata, entry: &[u64]) -> bool {
        let bitmap = entry.get(1).copied().unwrap_or(0);
        let Ok(Entry::Standard(standard)) = Entry::decode(&self.g, entry[0], bitmap) else {
            return false;
        };
        let host = standard.host.map(|host| Run::one(host.cluster(&self.g)));
        host.is_some_and(|host| metadata.within(host).is_some())
    }
}
