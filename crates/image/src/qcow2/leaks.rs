//! Searching for leaked clusters, which are counted although nothing refers to them, and for free clusters that occupy space.
//!
//! A crash leaks the clusters that were allocated and not linked, or unlinked and not freed, in the last [flush](super::flush)
//! or since. That is harmless until space is missing: a disk whose volume has just its size, and of which all was trimmed
//! before a crash, would have no space for anything. So before a request fails because there is no space, and before the
//! file grows beyond the size of the fully allocated disk, the leaked clusters are freed. Searching when an image is
//! opened would delay the start of each large disk after a crash, most often for space that nobody misses.
//!
//! A leaked cluster stays leaked: it is counted, so nothing allocates it, and nothing refers to it, so nothing frees it.
//! So the search need not stop the guest. It frees what is counted, unless
//!
//! - a table in the file refers to it. The search holds the flush lock, so no table in the file changes while they are read;
//! - it was unlinked but not freed yet, or is of an allocation in progress, when the search began;
//! - its refcount has changed since the search began, or a table in memory has dropped it. A table in memory can begin to
//!   refer only to a cluster of these or of the previous kind; the flush at the beginning of the search has written all
//!   earlier changes;
//! - it is of a bitmap or table that this process is making, to which the file may refer much later.
//!
//! A free cluster may occupy space in the file system: a kill has interrupted a write to it, or another program has freed it.
//! An allocation takes it, but what is missing may be the space of a part of a cluster that is in use already. So the space of
//! all free clusters to which no table refers is returned. Those that an allocation may take meanwhile are its own: this is
//! done under the state lock, for the clusters of one refcount block at a time.
//!
//! That is done again when space is missing later, around the clusters that were taken since. A file system may make more space
//! for a write than the write needs, as XFS does, so a new cluster makes its free neighbours occupy space. No table has to be
//! read then: after a search that found no table to refer to a free cluster, none ever does. This process frees a cluster only
//! when no durable table refers to it any more, and a free cluster may be overwritten at any moment ([flush](super::flush)).
//! What a write that failed had around its clusters is returned too, but is no reason to try again: the same write would only
//! occupy it again. Only a cluster that a table has begun to refer to since is one, so that requests that find no space end.
//!
//! An image in which anything is not understood keeps its leaks. So does one whose tables would take too long to read; a
//! flush waits meanwhile. There is one search for each time that an image is opened: this process leaks nothing
//! itself.

use std::ops::ControlFlow;

use super::Qcow2;
use super::error::ImageError;
use super::header::AUTOCLEAR_BITMAPS;
use super::scan::{Scan, ScanError};
use super::types::{BlockIndex, Run};

/// Bytes of L2 tables that are read at most, which takes seconds: those of 5 TiB at 64 KiB a cluster, which are read
/// once for each TiB of the file.
const READ_MAX: u64 = 4 << 30;

/// Leaked runs that are freed in one search at most. The journal records them with 25 bytes each.
const RUNS_MAX: usize = 1 << 16;

impl Qcow2 {
    /// Frees leaked clusters, and returns the space of free ones. If they were searched for before, only the latter, around
    /// those taken since. The caller holds the flush lock. Blocks.
    pub(super) fn free_leaked(&self) -> Result<(), ImageError> {
        if !self.begin_leak_search() {
            return self.return_around_taken();
        }
        let result = self.write_back().and_then(|()| {
            // Damage is reported when it is in the way of a request.
            let (leaked, is_sound) = self.find_leaked().unwrap_or_default();
            for run in &leaked {
                let bytes = run.clusters << self.g.cluster_bits;
                self.file.give_back(run.first.start(&self.g), bytes);
                let mut state = self.lock();
                for cluster in run.each() {
                    state.refcounts.free_leaked(&self.file, cluster)?;
                }
            }
            Ok((leaked.len(), is_sound))
        });
        let mut state = self.lock();
        let is_sound = result.as_ref().is_ok_and(|&(_, is_sound)| is_sound);
        state.refcounts.end_search(is_sound);
        if result.as_ref().is_ok_and(|&(runs, _)| runs >= RUNS_MAX) {
            // There are more.
            let full = self.full_size();
            state.refcounts.search_before_growth_beyond(full);
        }
        drop(state);
        self.write_freed();
        result.map(|_| ())
    }

    /// Returns the space of the free clusters around those that were taken since this was done last.
    fn return_around_taken(&self) -> Result<(), ImageError> {
        // Before it is done: what is linked meanwhile may need it again.
        let linked = self.lock().refcounts.take_linked();
        let mut found = false;
        loop {
            let mut state = self.lock();
            let state = &mut *state;
            let (refcounts, metadata) = (&mut state.refcounts, &state.metadata);
            if !refcounts.return_around_taken(&self.file, metadata)? {
                if found && linked {
                    refcounts.found_space();
                }
                return Ok(());
            }
            found = true;
        }
    }

    /// Returns false if there was a search before.
    fn begin_leak_search(&self) -> bool {
        let mut state = self.lock();
        let state = &mut *state;
        if !state.refcounts.may_search() {
            return false;
        }
        state.refcounts.begin_search();
        let deferred = state.deferred_frees.iter().flat_map(|(_, runs)| runs);
        let pending = state.pending.values().filter_map(|p| p.hosts.as_ref());
        for &run in deferred.chain(&state.unlinked).chain(pending) {
            state.refcounts.leave_alone(run);
        }
        true
    }

    /// Finds leaked runs, in ascending order. Returns also whether all free clusters were seen, and no table refers to one.
    fn find_leaked(&self) -> Result<(Vec<Run>, bool), ScanError> {
        let header = self.lock().header.clone();
        if header.bitmaps.is_some() && header.autoclear & AUTOCLEAR_BITMAPS == 0 {
            // Nobody knows whether anything is still in their clusters.
            return Ok(<_>::default());
        }
        let mut leaked: Vec<Run> = Vec::new();
        let mut is_sound = true;
        let mut scan = Scan::new(self.file.storage(), &header, true)?;
        if scan.windows() * scan.table_bytes() > READ_MAX {
            return Err(ScanError::TooMuch);
        }
        for window in 0..scan.windows() {
            let (range, counts) = scan.count(window, &mut |_| ControlFlow::Continue(()))?;
            if !scan.findings.is_empty() {
                return Ok(<_>::default());
            }
            let unused = |cluster| range.position(cluster).is_some_and(|at| counts[at] == 0);
            let first = range.first.refcount_at(&self.g).0.number();
            let blocks = range.end().number().div_ceil(self.g.block_entries());
            for block in (first..blocks).map(BlockIndex::new) {
                let mut state = self.lock();
                let state = &mut *state;
                let (refcounts, metadata) = (&mut state.refcounts, &state.metadata);
                let found = refcounts.unused_in(&self.file, metadata, block, range, unused)?;
                leaked.extend(found.leaked);
                is_sound &= !found.is_damaged;
                refcounts.return_free(&self.file, &found.free);
                if !found.free.is_empty() {
                    refcounts.found_space();
                }
                if leaked.len() >= RUNS_MAX {
                    leaked.truncate(RUNS_MAX);
                    return Ok((leaked, false));
                }
            }
        }
        Ok((leaked, is_sound))
    }
}
