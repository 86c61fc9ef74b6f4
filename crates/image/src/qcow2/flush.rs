//! Writing the changed tables to the file, in an order that keeps the image consistent after a crash.
//!
//! A crash may keep any subset of the writes since the last fdatasync, in units of 512 bytes. So a flush
//! writes:
//!
//! 1. Refcount blocks. A block takes effect only once the refcount table refers to it. If the refcount
//!    table has changed, fdatasync: new blocks are durable before the table refers to them.
//! 2. The refcount table. fdatasync: it also covers the data of all allocations committed so far, and
//!    the first content (empty, or a copy) of new L2 tables, which was written when they were made.
//! 3. L2 entries and L1 entries, in any order. An L1 entry refers to a table whose first content is
//!    durable and equivalent to what it replaces; an L2 entry refers to durable data in clusters whose
//!    refcounts are durable. fdatasync.
//! 4. Clusters that no durable table refers to any more are freed, if no request that looked them up is left: their
//!    refcounts are decremented, and these refcount blocks are written. Only after that decrement can they be allocated
//!    again. No fdatasync: the next one, at the latest that of step 2, makes it durable before a table refers to them
//!    again. Clusters that requests still use are freed by a later flush.
//!
//! A crash before the end of 2 leaves {the old state}, with leaks: clusters that are counted but not
//! referenced. A crash before the end of 3 leaves {old} or {new} for each entry independently; both refer to
//! counted clusters. A crash after that leaves {the new state}, with {any part} of the clusters that 4 frees still
//! counted. A kill of this process leaves only those counted that requests were using. What leaks accumulates over many
//! crashes, and is [searched for](super::leaks) before space is missed. The file never refers to a cluster that is not counted, nor to one that has been reused for
//! another part of the disk.
//!
//! A flush that fails leaves everything that it took marked as changed, and the next flush starts over. Any
//! thread may have to flush, because too many changes are only in memory. Its failure is not forgotten either:
//! [`needs_flush`](Qcow2::needs_flush) is true until a flush of everything has succeeded. No later flush brings
//! back what the page cache has lost, so every flush after that fails, and no table is written that refers to
//! data that may be lost ([`FileEnd::flush`]).
//!
//! A kill of this process, unlike a crash of the host, loses no write, so the order of writes is kept. The
//! [journal](super::journal) completes what the kill interrupted. If the journal could not record all changes, the
//! header says so before step 1.
//!
//! The entries of a [raw data file](super::raw_data_file) do not come this way: they are durable before their data.
//!
//! [`grow`](super::grow) replaces a full table by a larger one. [`reclaim`](super::reclaim) has 4 come early.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use super::entry::table_at;
use super::error::ImageError;
use super::file::{FileEnd, Piece};
use super::journal::Rotated;
use super::pins::Mark;
use super::refcount::Dirty;
use super::types::{Frame, HostCluster, L1Index, PieceIndex, Run};
use super::{ImageState, Qcow2};
use crate::bytes::put64;

/// Protected by the flush lock, which a thread holds while it writes tables.
#[derive(Default)]
pub(super) struct Flushed {
    /// The number of the last flush request that has been completed.
    asked: u64,
}

/// The changes that a flush takes from the state.
struct Batch {
    changes: u64,
    refcounts: Dirty,
    blocks: Vec<Piece>,
    table: Vec<Piece>,
    l2: BTreeMap<Frame, u32>,
    l1: BTreeSet<PieceIndex>,
    entries: Vec<Piece>,
    /// When `unlinked` were unlinked, at the latest.
    mark: Mark,
    unlinked: Vec<Run>,
    unlinked_clusters: u64,
    /// The count of unrecorded changes, which only this flush makes survive a kill.
    unrecorded: u64,
    journal: Option<Rotated>,
}

impl Qcow2 {
    /// Makes everything durable that was written and committed before this call: guest data and tables. Blocks.
    ///
    /// # Errors
    /// Something may not be durable. A retry may succeed unless the error is [permanent](ImageError::is_permanent).
    pub fn flush(&self) -> Result<(), ImageError> {
        if self.read_only {
            return Ok(());
        }
        let number = self.asked.fetch_add(1, SeqCst) + 1;
        let mut flushed = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        if flushed.asked >= number {
            // Another flush that began after this request has covered it.
            return Ok(());
        }
        let asked = self.asked.load(SeqCst);
        self.write_back()?;
        flushed.asked = asked;
        Ok(())
    }

    /// Whether only [`flush`](Self::flush) makes everything durable: tables have changed, a flush has failed,
    /// or the page cache is in use, which reports an error to only one of two concurrent fdatasyncs. Otherwise an
    /// fdatasync of the file that holds the data is enough.
    #[inline]
    pub fn needs_flush(&self) -> bool {
        let data = self.data.as_ref().unwrap_or(&self.file);
        self.has_changes() || data.loses_data_on_failed_flush()
    }

    /// Whether the image has an external data file.
    pub fn has_data_file(&self) -> bool {
        self.data.is_some()
    }

    /// Whether the next flush has metadata to write to the file.
    pub fn has_changes(&self) -> bool {
        let unflushed = |file: &FileEnd| file.unflushed();
        self.changes.get() != self.durable.load(SeqCst)
            || unflushed(&self.file)
            || self.data.as_ref().is_some_and(unflushed)
    }

    /// Writes all changes in the order above. The caller holds the flush lock.
    pub(super) fn write_back(&self) -> Result<(), ImageError> {
        self.check_writable()?;
        if !self.has_changes() && self.lock().is_clean() {
            // Data that the guest wrote in place.
            self.data.as_ref().unwrap_or(&self.file).flush()?;
            return self.free_what_can_be();
        }
        self.begin_journal_in_flush()?;
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
            state.deferred_frees.push((batch.mark, batch.unlinked));
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

    /// Frees clusters. Everything is durable already, so an error that is not lasting is left for the next flush.
    fn free_what_can_be(&self) -> Result<(), ImageError> {
        self.free_unused().or_else(|error| {
            if error.is_permanent() {
                Err(error)
            } else {
                Ok(())
            }
        })
    }

    fn take_batch(&self) -> Result<Batch, ImageError> {
        let mut state = self.lock();
        let state = &mut *state;
        if state.has_holes {
            self.try_to_fill_holes(state)?;
        }
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
            // The last write: from then on, the journal does not match the image.
            entries.extend(header);
            rotated
        });
        let mark = self.pins.mark();
        // Requests that use these clusters may end while the tables are written; those that begin now delay nothing.
        self.pins.passed(mark);
        Ok(Batch {
            mark,
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

    fn l2_pieces(&self, state: &ImageState, frame: Frame, pieces: u32, entries: &mut Vec<Piece>) {
        let Some(slice) = self.cache.slice_in(frame) else {
            return;
        };
        let (table, offset) = slice.table(&self.g);
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
                at: at + (offset + number * piece),
                bytes: copy.iter().flat_map(|word| word.to_be_bytes()).collect(),
            });
        }
    }

    pub(super) fn l1_piece(&self, state: &ImageState, piece: PieceIndex) -> Piece {
        let start = piece.start(&self.g);
        Piece {
            at: state.header.l1_at + start,
            bytes: self.l1_bytes(L1Index::new(start / 8), self.g.piece() / 8),
        }
    }

    /// Entries of the L1 table as written to the file; entries after its end are 0.
    pub(super) fn l1_bytes(&self, first: L1Index, entries: u64) -> Vec<u8> {
        let mut bytes = vec![0; entries as usize * 8];
        for (at, entry) in (0..bytes.len()).step_by(8).zip(0..entries) {
            put64(&mut bytes, at, self.l1.get(first + entry));
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

    /// Frees unlinked clusters that no request uses any more. The caller holds the flush lock.
    pub(super) fn free_unused(&self) -> Result<(), ImageError> {
        let mut state = self.lock();
        let deferred_frees = std::mem::take(&mut state.deferred_frees);
        let (unused, in_use): (Vec<_>, Vec<_>) = deferred_frees
            .into_iter()
            .partition(|(mark, _)| self.pins.passed(*mark));
        state.deferred_frees = in_use;
        let mut last_users = BTreeSet::new();
        let runs = unused.into_iter().flat_map(|(_, runs)| runs);
        let mut clusters = runs.flat_map(Run::each);
        while let Some(cluster) = clusters.next() {
            // The last reference is dropped only after the space was punched, because the cluster can be
            // reused from then on. Clusters with compressed data may have several references.
            let freed = match state.refcounts.get(&self.file, cluster) {
                Ok(1) if last_users.insert(cluster) => continue,
                Ok(1) => Err(ImageError::damaged(
                    "a cluster is used more often than its refcount says",
                    cluster.start(&self.g),
                )),
                Ok(_) => state.refcounts.reclaim(&self.file, cluster),
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
            self.write_freed();
            return Ok(());
        }
        self.punch(last_users.iter().copied());
        let mut state = self.lock();
        while let Some(cluster) = last_users.pop_first() {
            if let Err(error) = state.refcounts.reclaim(&self.file, cluster) {
                self.free_later(&mut state, iter::once(cluster).chain(last_users));
                return Err(error);
            }
            state.metadata.remove_table(cluster);
        }
        drop(state);
        self.write_freed();
        Ok(())
    }

    /// Writes refcounts that have only been decremented since the last flush, so that a kill does not leak these clusters. The
    /// caller holds the flush lock. If that fails, the next flush writes them.
    pub(super) fn write_freed(&self) {
        let mut state = self.lock();
        let (dirty, blocks) = state.refcounts.take_freed();
        if blocks.is_empty() {
            return;
        }
        let (changes, is_clean) = (self.changes.get(), state.is_clean());
        drop(state);
        let written = self.file.write("writing refcounts", &blocks);
        let mut state = self.lock();
        match written {
            Ok(()) => {
                state.refcounts.written(&dirty);
                // The next fdatasync of the file is enough for them.
                if is_clean && state.unlinked.is_empty() && self.data.is_none() {
                    self.durable.store(changes, SeqCst);
                }
            }
            Err(_) => state.refcounts.not_written(dirty),
        }
    }

    /// Leaves clusters that could not be freed to the next flush.
    fn free_later(&self, state: &mut ImageState, clusters: impl Iterator<Item = HostCluster>) {
        let runs = clusters.map(Run::one);
        state
            .deferred_frees
            .push((self.pins.mark(), runs.collect()));
    }

    /// Returns space to the file system. Nothing depends on it: the clusters, in ascending order, are free either way.
    fn punch(&self, clusters: impl Iterator<Item = HostCluster>) {
        let mut clusters = clusters.peekable();
        while self.file.returns_space()
            && let Some(first) = clusters.next()
        {
            let mut end = first + 1;
            while clusters.next_if_eq(&end).is_some() {
                end += 1;
            }
            let (at, end) = (first.start(&self.g), end.start(&self.g));
            self.file.return_space(at, end - at);
        }
    }
}
