//! Growth: of the disk, and of the refcount table of a file that becomes longer.
//!
//! The guest must not see what the image, a backing file or a data file has after the old end of the disk. So
//! the size in the header changes last:
//!
//! 1. Make the new part addressable: an L1 table and a data file that are large enough. Durable. The size
//!    of the disk is unchanged.
//! 2. Zero the new part like a write-zeroes request, and flush.
//! 3. Write the new size to the header. Durable. Only then are requests to the new part accepted.
//!
//! A crash before the end of 2 leaves {the old size}; what is after it is invisible, and the next attempt zeroes
//! it again. A crash before the end of 3 leaves {the old size} or {the new size, and zeroes}.
//!
//! The header also changes where a larger refcount or L1 table replaces the old one. The new table, and all that it
//! refers to, is durable before, and the fields are in one sector: a crash leaves {the old table} or {the new one}.

use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{MutexGuard, PoisonError};

use block::GuestOffset;

use super::error::ImageError;
use super::header::L1_BYTES_MAX;
use super::reclaim::Reclaimed;
use super::retry::Retry;
use super::types::{HostOffset, L1Index, Run};
use super::{ImageState, Qcow2};

/// A disk that is being enlarged, by one thread at a time.
pub(crate) struct Growth<'a> {
    /// The new part, which must be zeroed.
    pub new: Range<GuestOffset>,
    _alone: MutexGuard<'a, ()>,
}

impl Qcow2 {
    /// Step 1. Blocks.
    ///
    /// # Errors
    /// The disk cannot have this size, or I/O failed.
    pub(crate) fn begin_growing(&self, size: u64) -> Result<Growth<'_>, ImageError> {
        self.check_writable()?;
        self.begin_writing()?;
        let alone = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state = self.lock();
            let reclaimed = state.refcounts.reclaimed();
            let reached = match self.reach_to(&mut state, size) {
                Ok(()) => {
                    return Ok(Growth {
                        new: self.end()..GuestOffset(size),
                        _alone: alone,
                    });
                }
                Err(Retry::TableFull(entries)) => Ok(entries),
                Err(Retry::Error(error)) => Err(self.report(&mut state, error)),
                Err(
                    Retry::Load(_)
                    | Retry::MapFirst(_)
                    | Retry::CacheFull
                    | Retry::Reclaim
                    | Retry::WouldBlock
                    | Retry::Later,
                ) => {
                    return Err(ImageError::Unsupported(
                        "an L1 table needs no L2 table to grow",
                    ));
                }
            };
            drop(state);
            drop(flushing);
            match reached.and_then(|entries| self.grow_refcount_table(entries)) {
                Err(error)
                    if error.is_no_space() && self.reclaim(reclaimed)? == Reclaimed::Some => {}
                reached => reached?,
            }
        }
    }

    /// Step 3, after the zeroes of step 2 are durable. Blocks.
    ///
    /// # Errors
    /// The disk keeps its size until it is opened again: then it may have the new one.
    pub(crate) fn end_growing(&self, growth: &Growth<'_>) -> Result<(), ImageError> {
        if growth.new.is_empty() {
            return Ok(());
        }
        self.check_writable()?;
        let _flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        state.header.size = growth.new.end.0;
        let result = self
            .write_header(&mut state)
            .and_then(|()| self.file.flush());
        if let Err(error) = result {
            state.header.size = growth.new.start.0;
            self.lose_bitmaps(&state);
            return Err(error);
        }
        self.grow_bitmaps(growth.new.end.0);
        self.size.store(growth.new.end.0, SeqCst);
        if state.refcounts.may_search() {
            let full = self.full_size();
            state.refcounts.search_before_growth_beyond(full);
        }
        Ok(())
    }

    fn reach_to(&self, state: &mut ImageState, size: u64) -> Result<(), Retry> {
        let old = self.size();
        let unsupported = |why| Err(ImageError::Unsupported(why).into());
        if size < old {
            return unsupported(
                "a disk cannot become smaller while it is in use; once it is detached, 'qemu-img resize --shrink' cuts off \
                what is behind the new end, which the guest must have given up before",
            );
        }
        if !size.is_multiple_of(512) {
            return unsupported("the size of a disk is a multiple of 512 bytes");
        }
        if size == old {
            return Ok(());
        }
        if state.header.snapshots > 0 && state.header.version < 3 {
            return unsupported(
                "snapshots of version 2 don't know how long their disk was; \
                'qemu-img amend -o compat=v3' makes it version 3",
            );
        }
        let entries = self.g.l1_entries(size);
        if entries * 8 > L1_BYTES_MAX || size > i64::MAX as u64 {
            return unsupported(
                "clusters of this size can't address so long a disk; \
                'qemu-img convert -o cluster_size=2M' makes an image that can",
            );
        }
        self.outdate_bitmaps(state, true)?;
        if let Some(data) = &self.data {
            data.grow_exactly(HostOffset::in_data_file(GuestOffset(size)))?;
        }
        if entries > self.l1.entries() {
            let old = self.write_larger_l1(state, entries)?;
            self.switch_header(state)?;
            state.metadata.remove_run(old.first);
            for cluster in old.each() {
                state.refcounts.release(&self.file, cluster)?;
            }
            self.l1.extend((self.l1.entries()..entries).map(|_| 0));
        }
        Ok(())
    }

    /// Writes a larger L1 table, durably, and the refcounts that are only in memory (new L2 tables were written
    /// when they were made). The header in memory refers to it afterwards; returns where the old table is.
    fn write_larger_l1(&self, state: &mut ImageState, entries: u64) -> Result<Run, Retry> {
        let g = &self.g;
        let clusters = g.clusters(entries * 8);
        let (file, refcounts) = (&self.file, &mut state.refcounts);
        let run = refcounts.allocate_contiguous(file, &mut state.metadata, clusters)?;
        let at = run.first.start(g);
        let bytes = self.l1_bytes(L1Index::default(), clusters * g.cluster() / 8);
        let result = file
            .write_at("writing a larger L1 table", at, &bytes)
            .and_then(|()| self.write_refcounts(state));
        if let Err(error) = result {
            for cluster in run.each() {
                state.refcounts.give_back(file, cluster)?;
            }
            return Err(error.into());
        }
        state.metadata.add_run(run, "the L1 table");
        let old = Run {
            first: state.header.l1_at.cluster(g),
            clusters: g.clusters(u64::from(state.header.l1_entries) * 8),
        };
        state.header.l1_at = at;
        state.header.l1_entries = entries as u32;
        Ok(old)
    }

    /// Enlarges the refcount table that has so many `entries`. One that has more was enlarged for another request meanwhile.
    /// Blocks.
    pub(super) fn grow_refcount_table(&self, entries: u64) -> Result<(), ImageError> {
        let _flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        let state = &mut *state;
        if state.refcounts.table_entries() > entries {
            return Ok(());
        }
        let end = &self.file;
        let larger = match state.refcounts.larger_table(end, &mut state.metadata) {
            Ok(larger) => larger,
            Err(error) => return Err(self.report(state, error)),
        };
        let at = larger.run.first.start(&self.g);
        let table = state.refcounts.whole_table();
        let result = self
            .write_refcount_blocks(state)
            .and_then(|()| end.write_at("writing the refcount table", at, &table))
            .and_then(|()| end.flush());
        if let Err(error) = result {
            state.refcounts.revoke(end, &mut state.metadata, &larger);
            return Err(error);
        }
        state.header.refcount_table_at = at;
        state.header.refcount_table_clusters = larger.run.clusters as u32;
        self.switch_header(state)?;
        let old = state.refcounts.adopt(&larger);
        state.metadata.remove_run(old.first);
        state.metadata.add_run(larger.run, "the refcount table");
        for cluster in old.each() {
            state.refcounts.release(end, cluster)?;
        }
        Ok(())
    }

    /// Writes changed refcount blocks, not the table. They stay marked as changed, so that the next flush
    /// writes them again and makes them durable.
    fn write_refcount_blocks(&self, state: &mut ImageState) -> Result<(), ImageError> {
        let (dirty, blocks) = state.refcounts.take_dirty_blocks();
        let result = self.file.write("writing refcounts", &blocks);
        state.refcounts.not_written(dirty);
        result
    }

    /// The same, and the changed entries of the current table; all of it durable.
    pub(super) fn write_refcounts(&self, state: &mut ImageState) -> Result<(), ImageError> {
        let (dirty, blocks) = state.refcounts.take_dirty_blocks();
        let table = state.refcounts.table_pieces(&dirty);
        let result = self
            .file
            .write("writing refcounts", &blocks)
            .and_then(|()| self.file.flush())
            .and_then(|()| self.file.write("writing the refcount table", &table))
            .and_then(|()| self.file.flush());
        state.refcounts.not_written(dirty);
        result
    }

    /// Writes a header that refers to other tables. If that fails, the file may have the old or the new header,
    /// and the tables of the two would soon differ: so writing stops.
    pub(super) fn switch_header(&self, state: &mut ImageState) -> Result<(), ImageError> {
        self.record_or_mark_overtaken(state);
        let result = self.write_header(state).and_then(|()| self.file.flush());
        result.map_err(|_| {
            let what = "its header could not be written, and may be the old or the new one";
            self.report(state, ImageError::damaged(what, HostOffset::START))
        })
    }
}
