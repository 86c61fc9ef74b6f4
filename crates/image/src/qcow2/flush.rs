//! What the tables in memory say comes into the file, and in which order.
//!
//! A crash may leave any part of what was written since the last fdatasync, in units of 512 bytes. So:
//!
//! 1. Refcount blocks. A block counts only what it is led to by; if the refcount table leads to new
//!    ones, they are made durable before it does.
//! 2. The refcount table. fdatasync: it also covers the data of all allocations committed so far, and
//!    the first content (empty, or a copy) of new L2 tables, which was written when they were made.
//! 3. L2 entries and L1 entries, in any order. An L1 entry leads to a table whose first content is
//!    durable, and that says the same as what it replaces; an L2 entry leads to data that is durable,
//!    in clusters whose refcounts are. fdatasync.
//! 4. What no durable table leads to any more is free, once those have gone who found it before: its
//!    refcount goes down in memory, and in the file with a later flush. Only then can it be used again.
//!
//! A crash before the end of 2 leaves {the old state}, with clusters counted that nothing leads to:
//! leaks. One before the end of 3 leaves, for every entry by itself, {old} or {new}; both lead to
//! clusters that are counted. One after leaves {the new state}, with what 4 frees still counted. At
//! no time does the file lead to a cluster that is not counted, or to one that has been given to
//! another part of the disk.
//!
//! A flush that fails leaves all that it took as changed as it was, and the next one begins anew. Any
//! thread may have to flush, for want of room for more changes; what failed there is not forgotten either:
//! [`needs_flush`](Qcow2::needs_flush) holds until a flush of everything has succeeded. What the page cache
//! has lost comes back with none, and so from then on every flush fails, and no table is written that
//! leads to what may not be there ([`FileEnd::flush`]).
//!
//! A kill of this process, unlike a crash of the host, loses no write, and so keeps their order. What it leaves is
//! completed from the [journal](super::journal). Where that could not take all changes, the header says so before 1.
//!
//! The header changes where a larger refcount or L1 table takes the place of the old one: what it
//! will lead to is durable before, and its fields share one sector.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use block::FileOffset;

use super::entry::table_at;
use super::error::ImageError;
use super::file::FileEnd;
use super::journal::Rotated;
use super::refcount::{Dirty, Piece, Run};
use super::{Qcow2, State};
use crate::bytes::put64;

/// Held by whoever writes tables.
#[derive(Default)]
pub(super) struct Flushed {
    /// The last flush asked for that has been done.
    asked: u64,
}

/// What is taken out of the state to be written.
struct Batch {
    changes: u64,
    refcounts: Dirty,
    blocks: Vec<Piece>,
    table: Vec<Piece>,
    l2: BTreeMap<usize, u32>,
    l1: BTreeSet<u64>,
    entries: Vec<Piece>,
    unlinked: Vec<Run>,
    unlinked_clusters: u64,
    /// Changes that only this flush keeps.
    unrecorded: u64,
    journal: Option<Rotated>,
}

impl Qcow2 {
    /// Makes all that was written and committed before this call durable, guest data and tables. Blocks.
    ///
    /// # Errors
    /// Something may not be durable. It may be tried again, unless the error is
    /// [lasting](ImageError::is_lasting): then so is that.
    pub fn flush(&self) -> Result<(), ImageError> {
        if self.read_only {
            return Ok(());
        }
        let number = self.asked.fetch_add(1, SeqCst) + 1;
        let mut flushed = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        if flushed.asked >= number {
            // It began after this one was asked for.
            return Ok(());
        }
        let asked = self.asked.load(SeqCst);
        self.write_back()?;
        flushed.asked = asked;
        Ok(())
    }

    /// Whether only [`flush`](Self::flush) makes everything durable: tables have changed, a flush has failed,
    /// or the page cache is between, which tells only one of two at a time what it has lost. Otherwise, an
    /// fdatasync of the file that holds the data does.
    #[inline]
    pub fn needs_flush(&self) -> bool {
        let data = self.data.as_ref().unwrap_or(&self.file);
        self.has_changes() || data.forgets()
    }

    /// Whether its data is in another file.
    pub fn has_data_file(&self) -> bool {
        self.data.is_some()
    }

    fn has_changes(&self) -> bool {
        let unflushed = |file: &FileEnd| file.unflushed();
        self.changes.get() != self.durable.load(SeqCst)
            || unflushed(&self.file)
            || self.data.as_ref().is_some_and(unflushed)
    }

    /// Closes the image, when nobody uses it any more: what was given up is freed, and the file ends
    /// where it is used. An image that is not closed is just as sound, and may have lost some space.
    ///
    /// # Errors
    /// Something may not be durable.
    pub fn close(&self) -> Result<(), ImageError> {
        self.flush()?;
        if self.read_only || self.damage.get().is_some() {
            return Ok(());
        }
        // What the flush has freed.
        self.flush()?;
        let mut state = self.lock();
        if let Some(end) = state.refcounts.used_end(&self.file)? {
            self.file.trim(end << self.g.cluster_bits)?;
        }
        self.end_journal(&mut state)
    }

    /// Writes what only this process knows, so that another one can go on with the file. What is begun meanwhile is left
    /// out, and what was given up by then may stay counted.
    ///
    /// # Errors
    /// As of [`flush`](Self::flush).
    pub fn settle(&self) -> Result<(), ImageError> {
        if self.read_only || self.damage.get().is_some() {
            return Ok(());
        }
        // Each flush frees what the next one writes; the last is that of what the second has freed.
        for _ in 0..3 {
            let flushing = self.flushing.lock();
            let flushing = flushing.unwrap_or_else(PoisonError::into_inner);
            self.free_unused()?;
            drop(flushing);
            if !self.has_changes() {
                break;
            }
            self.flush()?;
        }
        Ok(())
    }

    /// Writes all changes, in the order above. The lock of the flush is held.
    fn write_back(&self) -> Result<(), ImageError> {
        self.check_writable()?;
        if !self.has_changes() && self.lock().is_clean() {
            // What the guest wrote in place.
            self.data.as_ref().unwrap_or(&self.file).flush()?;
            return self.free_what_can_be();
        }
        let batch = self.take_batch()?;
        if let Err(error) = self.write_batch(&batch) {
            self.put_back(batch);
            return Err(error);
        }
        let mut state = self.lock();
        state.refcounts.written(&batch.refcounts);
        for frame in batch.l2.keys() {
            state.writing_l2.remove(frame);
        }
        if !batch.unlinked.is_empty() {
            state
                .deferred_frees
                .push((self.pins.mark(), batch.unlinked));
        }
        self.durable.store(batch.changes, SeqCst);
        let all = state.unrecorded == batch.unrecorded;
        if let Some(rotated) = &batch.journal {
            state.checkpoint_journal(rotated, all);
        }
        if all {
            self.unrecorded.store(false, SeqCst);
        }
        // A slice may wait for a frame.
        self.loaded.notify_all();
        drop(state);
        self.free_what_can_be()
    }

    /// All is durable, whatever becomes of this: what cannot be freed now is tried with the next flush.
    fn free_what_can_be(&self) -> Result<(), ImageError> {
        self.free_unused().or_else(|error| {
            if error.is_lasting() {
                Err(error)
            } else {
                Ok(())
            }
        })
    }

    fn take_batch(&self) -> Result<Batch, ImageError> {
        let mut state = self.lock();
        let state = &mut *state;
        let journal = self.rotate_journal(state)?;
        let changes = self.changes.get();
        let (refcounts, blocks) = state.refcounts.take_dirty_blocks();
        let table = state.refcounts.table_pieces(&refcounts);
        let l2 = std::mem::take(&mut state.dirty_l2);
        let l1 = std::mem::take(&mut state.dirty_l1);
        state.writing_l2.extend(l2.keys());
        let mut entries = Vec::new();
        for (&frame, &pieces) in &l2 {
            self.l2_pieces(state, frame, pieces, &mut entries);
        }
        entries.extend(l1.iter().map(|&piece| self.l1_piece(state, piece)));
        let journal = journal.map(|(rotated, header)| {
            // The last: with it, the journal fits no more.
            entries.extend(header);
            rotated
        });
        Ok(Batch {
            unrecorded: state.unrecorded,
            journal,
            changes,
            refcounts,
            blocks,
            table,
            l2,
            l1,
            entries,
            unlinked: std::mem::take(&mut state.unlinked),
            unlinked_clusters: std::mem::take(&mut state.unlinked_clusters),
        })
    }

    fn l2_pieces(&self, state: &State, frame: usize, pieces: u32, entries: &mut Vec<Piece>) {
        let Some(slice) = self.cache.slice_in(frame) else {
            return;
        };
        let (table, offset) = self.g.table_of(slice);
        let Ok(Some(at)) = table_at(&self.g, self.l1.get(table)) else {
            return;
        };
        let piece = self.g.piece();
        let words = (piece / 8) as usize;
        for number in (0..32).filter(|number| pieces >> number & 1 != 0) {
            let from = number as usize * words;
            let mut copy = self.cache.copy(frame, from..from + words);
            self.unmark(&state.metadata, &mut copy);
            entries.push(Piece {
                at: FileOffset(at + offset + number * piece),
                bytes: copy.iter().flat_map(|word| word.to_be_bytes()).collect(),
            });
        }
    }

    fn l1_piece(&self, state: &State, number: u64) -> Piece {
        let piece = self.g.piece();
        Piece {
            at: FileOffset(state.header.l1_at + number * piece),
            bytes: self.l1_bytes(number * piece / 8, piece / 8),
        }
    }

    /// Entries of the L1 table as they are written; those behind its end are 0.
    pub(super) fn l1_bytes(&self, first: u64, entries: u64) -> Vec<u8> {
        let mut bytes = vec![0; entries as usize * 8];
        for place in 0..entries {
            put64(&mut bytes, place as usize * 8, self.l1.get(first + place));
        }
        bytes
    }

    fn write_batch(&self, batch: &Batch) -> Result<(), ImageError> {
        self.file.write("writing refcounts", &batch.blocks)?;
        if !batch.table.is_empty() {
            self.file.flush()?;
            self.file
                .write("writing the refcount table", &batch.table)?;
        }
        if let Some(data) = &self.data {
            data.flush()?;
        }
        self.file.flush()?;
        if !batch.entries.is_empty() {
            self.file
                .write("writing L1 and L2 tables", &batch.entries)?;
            self.file.flush()?;
        }
        Ok(())
    }

    fn put_back(&self, batch: Batch) {
        let mut state = self.lock();
        state.refcounts.not_written(batch.refcounts);
        for (frame, pieces) in batch.l2 {
            state.writing_l2.remove(&frame);
            *state.dirty_l2.entry(frame).or_default() |= pieces;
        }
        state.dirty_l1.extend(batch.l1);
        state.unlinked.extend(batch.unlinked);
        state.unlinked_clusters += batch.unlinked_clusters;
        self.loaded.notify_all();
    }

    /// Frees what nobody uses any more. The lock of the flush is held.
    fn free_unused(&self) -> Result<(), ImageError> {
        let mut state = self.lock();
        let deferred_frees = std::mem::take(&mut state.deferred_frees);
        let (gone, used): (Vec<_>, Vec<_>) = deferred_frees
            .into_iter()
            .partition(|(mark, _)| self.pins.passed(*mark));
        state.deferred_frees = used;
        let mut last_users = BTreeSet::new();
        let runs = gone.into_iter().flat_map(|(_, runs)| runs);
        let mut clusters = runs.flat_map(|run| run.first..run.first + run.clusters);
        while let Some(cluster) = clusters.next() {
            // The last user goes when the space has been given back: from then on, the cluster
            // can be somebody else's. Of a compressed cluster's, there may be several.
            let freed = match state.refcounts.get(&self.file, cluster) {
                Ok(1) if last_users.insert(cluster) => continue,
                Ok(1) => Err(ImageError::damaged(
                    "a cluster is used more often than its refcount says",
                    cluster << self.g.cluster_bits,
                )),
                Ok(_) => state.refcounts.release(&self.file, cluster),
                Err(error) => Err(error),
            };
            if let Err(error) = freed {
                let rest = clusters.chain(last_users);
                self.free_later(&mut state, iter::once(cluster).chain(rest));
                return Err(self.report(&mut state, error));
            }
        }
        drop(state);
        if last_users.is_empty() {
            return Ok(());
        }
        self.punch(&last_users);
        let mut state = self.lock();
        while let Some(cluster) = last_users.pop_first() {
            if let Err(error) = state.refcounts.release(&self.file, cluster) {
                self.free_later(&mut state, iter::once(cluster).chain(last_users));
                return Err(error);
            }
            state.metadata.remove_table(cluster);
        }
        Ok(())
    }

    /// Has clusters freed by another flush, since this one failed at it.
    fn free_later(&self, state: &mut State, clusters: impl Iterator<Item = u64>) {
        let runs = clusters.map(|first| Run { first, clusters: 1 });
        state
            .deferred_frees
            .push((self.pins.mark(), runs.collect()));
    }

    /// Gives space back to the file system. Nothing relies on it: the clusters are free either way.
    fn punch(&self, clusters: &BTreeSet<u64>) {
        let mut clusters = clusters.iter().copied().peekable();
        while self.punch.load(SeqCst)
            && let Some(first) = clusters.next()
        {
            let mut end = first + 1;
            while clusters.next_if_eq(&end).is_some() {
                end += 1;
            }
            let (at, len) = (
                first << self.g.cluster_bits,
                (end - first) << self.g.cluster_bits,
            );
            if self.file.storage().punch(FileOffset(at), len).is_err() {
                self.punch.store(false, SeqCst);
            }
        }
    }

    /// Makes the refcount table larger. Blocks.
    pub(super) fn grow_refcount_table(&self) -> Result<(), ImageError> {
        let _flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        let state = &mut *state;
        let end = &self.file;
        let larger = match state.refcounts.larger_table(end, &mut state.metadata) {
            Ok(larger) => larger,
            Err(error) => return Err(self.report(state, error)),
        };
        let at = larger.run.first << self.g.cluster_bits;
        let table = state.refcounts.whole_table();
        let written = self
            .write_refcount_blocks(state)
            .and_then(|()| end.write_at("writing the refcount table", at, &table))
            .and_then(|()| end.flush());
        if let Err(error) = written {
            state.refcounts.revoke(end, &mut state.metadata, &larger);
            return Err(error);
        }
        let clusters = larger.run.clusters;
        state.header.refcount_table_at = at;
        state.header.refcount_table_clusters = clusters as u32;
        self.switch_header(state)?;
        let old = state.refcounts.adopt(&larger);
        state.metadata.remove_run(old.first);
        let (first, name) = (larger.run.first, "the refcount table");
        state.metadata.add_run(first, clusters, name);
        for cluster in old.first..old.first + old.clusters {
            state.refcounts.release(end, cluster)?;
        }
        Ok(())
    }

    /// Writes the refcounts that have changed; the table stays as it is. They stay marked as changed,
    /// so that the next flush makes sure of them.
    fn write_refcount_blocks(&self, state: &mut State) -> Result<(), ImageError> {
        let (dirty, blocks) = state.refcounts.take_dirty_blocks();
        let written = self.file.write("writing refcounts", &blocks);
        state.refcounts.not_written(dirty);
        written
    }

    /// The same, and what the table in force must say of them; all of it durable.
    pub(super) fn write_refcounts(&self, state: &mut State) -> Result<(), ImageError> {
        let (dirty, blocks) = state.refcounts.take_dirty_blocks();
        let table = state.refcounts.table_pieces(&dirty);
        let written = self
            .file
            .write("writing refcounts", &blocks)
            .and_then(|()| self.file.flush())
            .and_then(|()| self.file.write("writing the refcount table", &table))
            .and_then(|()| self.file.flush());
        state.refcounts.not_written(dirty);
        written
    }

    /// Writes a header that leads elsewhere than the last one. If that fails, nobody knows which of
    /// the two is in the file, and they will soon not mean the same: nothing is written any more.
    pub(super) fn switch_header(&self, state: &mut State) -> Result<(), ImageError> {
        self.record_or_say(state);
        let written = self.write_header(state).and_then(|()| self.file.flush());
        written.map_err(|_| {
            let what = "its header could not be written, and may be the old or the new one";
            self.report(state, ImageError::damaged(what, 0))
        })
    }
}
