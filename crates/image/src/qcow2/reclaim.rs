//! Making freed clusters usable before their space is missed.
//!
//! What a discard frees can be allocated again only after a [flush](super::flush) has made the tables durable that do not
//! refer to it any more, and after the last request that looked it up has ended. A guest that discards and writes without
//! flushing would need ever more space. So these clusters are reclaimed, by a flush that the guest did not ask for,
//!
//! - before the file grows, which is rare, because it grows in large steps: it never becomes longer than the fully
//!   allocated disk by more than one step;
//! - when an allocation finds no space, or a write of data to new clusters does, before an error is reported.
//!
//! Requests that need space wait for others that still use freed clusters, but hold no pin themselves meanwhile: two that
//! wait for each other would wait forever.
//!
//! If there are none, clusters that earlier crashes have leaked are [searched for](super::leaks).
//!
//! The flush itself needs no new space: L2 tables and refcount blocks are written when they are made, and holes in other
//! tables are filled before they are needed ([`begin`](super::begin), [`Refcounts::holes_for`](super::refcount::Refcounts)).

use std::sync::PoisonError;

use super::Qcow2;
use super::error::ImageError;
use super::types::{HostCluster, HostOffset};

/// What was reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reclaimed {
    /// There are free clusters that were not free before.
    Some,
    /// There will be, once requests have ended that use them: [`Awaited::FreedClusters`](super::Awaited).
    InUse,
    /// Nothing was freed.
    None,
}

impl Qcow2 {
    /// Makes freed clusters usable. `since` is what [`reclaimed`](Self::reclaimed) was before space was found missing:
    /// another thread may have reclaimed something since. Blocks.
    ///
    /// # Errors
    /// The tables could not be made durable.
    pub fn reclaim(&self, since: u64) -> Result<Reclaimed, ImageError> {
        let _flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let has_more = || self.lock().refcounts.reclaimed() != since;
        if has_more() {
            return Ok(Reclaimed::Some);
        }
        if !self.lock().unlinked.is_empty() {
            self.write_back()?;
        }
        self.free_unused()?;
        if has_more() {
            return Ok(Reclaimed::Some);
        }
        {
            let state = self.lock();
            if !state.deferred_frees.is_empty() || !state.unlinked.is_empty() {
                return Ok(Reclaimed::InUse);
            }
            debug_assert_eq!(state.refcounts.reclaimable(), 0);
        }
        self.free_leaked()?;
        Ok(if has_more() {
            Reclaimed::Some
        } else {
            Reclaimed::None
        })
    }

    /// Whether the file has space for all of the disk.
    pub(super) fn has_full_size(&self) -> bool {
        self.file.get() >= self.full_size()
    }

    /// The length of a file with all of the disk: its data, its L2 tables, and what counts them.
    pub(super) fn full_size(&self) -> HostOffset {
        let g = &self.g;
        let tables = g.l1_entries(self.size());
        let used = 1 + g.clusters(self.size()) + tables + g.clusters(tables * 8);
        let blocks = used.div_ceil(g.block_entries()) + 1;
        let counted = used + blocks + g.clusters(blocks * 8);
        HostCluster::new(counted).start(g)
    }

    /// A number that changes whenever clusters are reclaimed.
    pub fn reclaimed(&self) -> u64 {
        self.lock().refcounts.reclaimed()
    }
}
