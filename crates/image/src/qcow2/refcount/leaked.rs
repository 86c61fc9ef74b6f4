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

    /// The leaked clusters among those that a block counts and that no table in the file refers to: `is_unused` says which.
    pub fn leaked_in(
        &mut self,
        end: &FileEnd,
        metadata: &Metadata,
        block: BlockIndex,
        within: Run,
        is_unused: impl Fn(HostCluster) -> bool,
    ) -> Result<Vec<Run>, ImageError> {
        let mut leaked: Vec<Run> = Vec::new();
        if !self.has_block(block) {
            return Ok(leaked);
        }
        let (first, order) = (block.first(&self.g), self.g.refcount_order);
        let entries: Range<HostCluster> =
            first.max(within.first)..(block + 1).first(&self.g).min(within.end());
        if entries.is_empty() {
            return Ok(leaked);
        }
        self.load(end, block)?;
        let bytes = &self.blocks[&block].bytes;
        for cluster in Run::between(entries.start, entries.end).each() {
            let count = get(bytes, order, RefcountIndex::new(cluster - first));
            if count > 0 && is_unused(cluster) && self.is_leaked(metadata, cluster) {
                match leaked.last_mut() {
                    Some(last) if last.end() == cluster => last.clusters += 1,
                    _ => leaked.push(Run::one(cluster)),
                }
            }
        }
        Ok(leaked)
    }

    fn is_leaked(&self, metadata: &Metadata, cluster: HostCluster) -> bool {
        let LeakSearch { touched, held, .. } = &self.search;
        let is_touched = touched
            .as_ref()
            .is_none_or(|touched| touched.contains(&cluster));
        !is_touched && !held.contains(&cluster) && metadata.within(Run::one(cluster)).is_none()
    }

    /// Frees a cluster that was found to be leaked, and that nothing can have begun to use since.
    pub fn free_leaked(&mut self, end: &FileEnd, cluster: HostCluster) -> Result<(), ImageError> {
        self.free_with(cluster, |refcounts| {
            refcounts.set(end, cluster, 0)?;
            refcounts.cursor = refcounts.cursor.min(cluster);
            Ok(())
        })
    }
}
