//! What a [search for leaked clusters](crate::qcow2::leaks) needs of the refcounts.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use super::{Refcounts, get};
use crate::qcow2::error::ImageError;
use crate::qcow2::file::FileEnd;
use crate::qcow2::metadata::Metadata;
use crate::qcow2::types::{BlockIndex, HostCluster, HostOffset, RefcountIndex, Run};

/// File systems make space of so many bytes at most for a small write, from a multiple of it: XFS what the file's extent size
/// hint says, which is 1 MiB for the files that `qemu-img` makes.
const AROUND: u64 = 16 << 20;

/// Which clusters a [search for leaked clusters](crate::qcow2::leaks) must leave alone, whatever the tables in the file say.
#[derive(Default)]
pub(super) struct LeakSearch {
    /// Before the file grows beyond this, leaked clusters are searched for. `None` when that was done.
    pub before_growth_beyond: Option<HostOffset>,
    /// While a search is in progress: the clusters whose use has changed since it began.
    pub touched: Option<HashSet<HostCluster>>,
    /// Clusters allocated for structures to which the file may refer only much later: bitmaps, their tables and directories.
    pub held: BTreeSet<HostCluster>,
    /// Where clusters were taken since the space of the free ones around them was returned: the first clusters of parts of
    /// [`AROUND`] bytes. `None` unless a search has found that no table refers to a free cluster.
    pub taken: Option<BTreeSet<HostCluster>>,
    /// A table has begun to refer to a new cluster since then.
    pub linked: bool,
}

/// Clusters to which no table in the file refers, in ascending order.
#[derive(Default)]
pub(crate) struct Unused {
    /// They are counted.
    pub leaked: Vec<Run>,
    pub free: Vec<Run>,
    /// A table in the file refers to a cluster that is not counted.
    pub is_damaged: bool,
}

/// Adds a cluster to runs in ascending order.
fn add(runs: &mut Vec<Run>, cluster: HostCluster) {
    match runs.last_mut() {
        Some(last) if last.end() == cluster => last.clusters += 1,
        _ => runs.push(Run::one(cluster)),
    }
}

impl Refcounts {
    /// Before the file grows beyond `full`, leaked clusters are to be searched for, once.
    pub fn search_before_growth_beyond(&mut self, full: HostOffset) {
        self.search.before_growth_beyond = Some(full);
    }

    /// Whether no search has begun yet.
    pub fn may_search(&self) -> bool {
        self.search.before_growth_beyond.is_some()
    }

    /// Begins the only search. From now on, clusters whose use changes are left alone.
    pub fn begin_search(&mut self) {
        self.search.before_growth_beyond = None;
        self.search.touched = Some(HashSet::new());
        self.search.taken = Some(BTreeSet::new());
        self.search.linked = false;
    }

    /// Has the search leave clusters alone that are in use without the tables in the file.
    pub fn leave_alone(&mut self, run: Run) {
        if let Some(touched) = &mut self.search.touched {
            touched.extend(run.each());
        }
    }

    /// Ends the search. `all_free_unused`: no table refers to a free cluster, and none will.
    pub fn end_search(&mut self, all_free_unused: bool) {
        self.search.touched = None;
        if !all_free_unused {
            self.search.taken = None;
        }
    }

    /// Notes that something may be written to these clusters, or was.
    pub fn taken(&mut self, run: Run) {
        if let Some(taken) = &mut self.search.taken {
            let part = (AROUND >> self.g.cluster_bits).max(1);
            let parts = run.first.number() / part..run.end().number().div_ceil(part);
            taken.extend(parts.map(|number| HostCluster::new(number * part)));
        }
    }

    /// The same, and a table refers to them now.
    pub fn linked(&mut self, run: Run) {
        self.taken(run);
        self.search.linked = true;
    }

    /// Returns the space of the free clusters around one place where clusters were taken; false if there is no such place.
    pub fn return_around_taken(
        &mut self,
        end: &FileEnd,
        metadata: &Metadata,
    ) -> Result<bool, ImageError> {
        let taken = self.search.taken.as_mut();
        let Some(first) = taken.and_then(BTreeSet::pop_first) else {
            return Ok(false);
        };
        let clusters = (AROUND >> self.g.cluster_bits).max(1);
        let mut free = Vec::new();
        for cluster in (Run { first, clusters }).each() {
            if self.get(end, cluster)? == 0 && metadata.within(Run::one(cluster)).is_none() {
                add(&mut free, cluster);
            }
        }
        self.return_free(end, &free);
        Ok(true)
    }

    /// Whether a table has begun to refer to new clusters since this was asked last.
    pub fn take_linked(&mut self) -> bool {
        std::mem::take(&mut self.search.linked)
    }

    /// Space was found: what found none may find it now.
    pub fn found_space(&mut self) {
        self.reclaimed += 1;
    }

    /// The leaked and the free clusters among those of a block that no table in the file refers to: `is_unused` says which.
    pub fn unused_in(
        &mut self,
        end: &FileEnd,
        metadata: &Metadata,
        block: BlockIndex,
        within: Run,
        is_unused: impl Fn(HostCluster) -> bool,
    ) -> Result<Unused, ImageError> {
        let mut found = Unused::default();
        let (first, order) = (block.first(&self.g), self.g.refcount_order);
        let entries: Range<HostCluster> =
            first.max(within.first)..(block + 1).first(&self.g).min(within.end());
        if entries.is_empty() {
            return Ok(found);
        }
        if self.has_block(block) {
            self.load(end, block)?;
        }
        let bytes = self.blocks.get(&block).map(|block| &block.bytes);
        for cluster in Run::between(entries.start, entries.end).each() {
            let index = RefcountIndex::new(cluster - first);
            let is_free = bytes.is_none_or(|bytes| get(bytes, order, index) == 0);
            match (is_unused(cluster), is_free) {
                (false, false) => {}
                _ if self.is_in_use_otherwise(metadata, cluster) => {}
                (false, true) => found.is_damaged = true,
                (true, true) => add(&mut found.free, cluster),
                (true, false) => add(&mut found.leaked, cluster),
            }
        }
        Ok(found)
    }

    /// Returns the space of free clusters, which somebody misses.
    pub fn return_free(&self, end: &FileEnd, free: &[Run]) {
        for run in free {
            end.give_back(
                run.first.start(&self.g),
                run.clusters << self.g.cluster_bits,
            );
        }
    }

    fn is_in_use_otherwise(&self, metadata: &Metadata, cluster: HostCluster) -> bool {
        let LeakSearch { touched, held, .. } = &self.search;
        let is_touched = touched
            .as_ref()
            .is_none_or(|touched| touched.contains(&cluster));
        is_touched || held.contains(&cluster) || metadata.within(Run::one(cluster)).is_some()
    }

    /// Frees a cluster that was found to be leaked, and that nothing can have begun to use since.
    pub fn free_leaked(&mut self, end: &FileEnd, cluster: HostCluster) -> Result<(), ImageError> {
        self.free_with(cluster, |refcounts| {
            refcounts.set(end, cluster, 0)?;
            refcounts.cursor = refcounts.cursor.min(cluster);
            Ok(0)
        })
    }
}
