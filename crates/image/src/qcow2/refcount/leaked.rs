//! What a [search for leaked clusters](crate::qcow2::leaks) needs of the refcounts.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use super::{Refcounts, get};
use crate::qcow2::error::ImageError;
use crate::qcow2::file::FileEnd;
use crate::qcow2::metadata::Metadata;
use crate::qcow2::types::{BlockIndex, HostCluster, HostOffset, RefcountIndex, Run};

/// Which clusters a [search for leaked clusters](crate::qcow2::leaks) must leave alone, whatever the tables in the file say.
#[derive(Default)]
pub(super) struct LeakSearch {
    /// Before the file grows beyond this, leaked clusters are searched for. `None` when that was done.
    pub before_growth_beyond: Option<HostOffset>,
    /// While a search is in progress: the clusters whose use has changed since it began.
    pub touched: Option<HashSet<HostCluster>>,
    /// Clusters allocated for structures to which the file may refer only much later: bitmaps, their tables and directories.
    pub held: BTreeSet<HostCluster>,
}

/// Clusters to which no table in the file refers, in ascending order.
#[derive(Default)]
pub(crate) struct Unused {
    /// They are counted.
    pub leaked: Vec<Run>,
    pub free: Vec<Run>,
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
    }

    /// Has the search leave clusters alone that are in use without the tables in the file.
    pub fn leave_alone(&mut self, run: Run) {
        if let Some(touched) = &mut self.search.touched {
            touched.extend(run.each());
        }
    }

    /// Ends the search.
    pub fn end_search(&mut self) {
        self.search.touched = None;
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
            if !is_unused(cluster) || self.is_in_use_otherwise(metadata, cluster) {
                continue;
            }
            let index = RefcountIndex::new(cluster - first);
            let runs = match bytes.map_or(0, |bytes| get(bytes, order, index)) {
                0 => &mut found.free,
                _ => &mut found.leaked,
            };
            match runs.last_mut() {
                Some(last) if last.end() == cluster => last.clusters += 1,
                _ => runs.push(Run::one(cluster)),
            }
        }
        Ok(found)
    }

    /// Returns the space of free clusters, which somebody misses.
    pub fn return_free(&mut self, end: &FileEnd, free: &[Run]) {
        for run in free {
            end.give_back(
                run.first.start(&self.g),
                run.clusters << self.g.cluster_bits,
            );
            // What found no space may find it now.
            self.reclaimed += 1;
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
