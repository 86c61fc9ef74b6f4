//! Refcounts, and the allocation of free clusters (docs/interop/qcow2 "Host cluster management"). The
//! caller holds the state lock.

mod dirty;
mod larger;
mod leaked;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;

use super::ChangeCount;
use super::error::ImageError;
use super::file::FileEnd;
use super::geometry::Geometry;
use super::journal::{Change, Changes};
use super::metadata::Metadata;
use super::retry::{MayBlock, Retry};
use super::types::{
    BlockIndex, HOST_BITS, HostCluster, HostOffset, PieceIndex, RefcountIndex, Run,
};
use crate::bytes::be64;
pub(crate) use dirty::Dirty;
use leaked::LeakSearch;

/// Refcount blocks kept in memory, in bytes, in addition to those with changes: 32 MiB count 1 TiB of
/// 64 KiB clusters with 16 bits each.
const CACHE_BYTES: u64 = 32 << 20;

/// Refcounts that a search for free clusters examines before it releases the lock: by a thread that may
/// block, and by one that may not. A block counts as [`SEARCH_BLOCK`] at least.
const SEARCH: (u64, u64) = (1 << 20, 1 << 16);
const SEARCH_BLOCK: u64 = 4096;

/// Bytes of refcounts that are read to find the last used cluster. If more are free, the file is not truncated, which
/// costs no space.
const USED_END_BYTES: u64 = 64 << 20;

pub(crate) struct Refcounts {
    g: Geometry,
    /// Offsets of the blocks as in the file, unchecked; [`HostOffset::START`] where there is none.
    table: Vec<HostOffset>,
    table_at: HostOffset,
    blocks: HashMap<BlockIndex, Block>,
    /// Blocks, each with one of its changed pieces.
    dirty_blocks: BTreeSet<(BlockIndex, PieceIndex)>,
    dirty_table: BTreeSet<PieceIndex>,
    /// Blocks that a flush is writing: the file still has old ones.
    writing: HashSet<BlockIndex>,
    /// The dirty pieces that have no changes but freed clusters. A flush that has failed cannot lose more of them than space.
    only_freed: BTreeSet<(BlockIndex, PieceIndex)>,
    /// No cluster before this one is free.
    cursor: HostCluster,
    /// From this cluster on, no cluster was ever used: the file was extended for them, and they read as zeroes.
    fresh: HostCluster,
    clock: u64,
    /// Clusters that no table in memory refers to any more, and that are not free yet.
    reclaimable: u64,
    /// Clusters that were reclaimed so far.
    reclaimed: u64,
    /// The file may grow next, although not all clusters could be reclaimed.
    may_grow: bool,
    /// What a search for leaked clusters must leave alone.
    search: LeakSearch,
    /// Changes not recorded in the journal yet.
    pub changes: Changes,
    count: ChangeCount,
}

struct Block {
    bytes: Box<[u8]>,
    used: u64,
}

impl Refcounts {
    /// Makes it from the table in the file.
    pub fn new(
        g: Geometry,
        table: &[u8],
        table_at: HostOffset,
        end: &FileEnd,
        count: ChangeCount,
    ) -> Self {
        Self {
            g,
            count,
            table: (0..table.len())
                .step_by(8)
                .map(|at| HostOffset::new(be64(table, at)))
                .collect(),
            table_at,
            blocks: HashMap::new(),
            dirty_blocks: BTreeSet::new(),
            dirty_table: BTreeSet::new(),
            writing: HashSet::new(),
            only_freed: BTreeSet::new(),
            cursor: HostCluster::default(),
            fresh: HostCluster::new(g.clusters(end.get().bytes())),
            clock: 0,
            reclaimable: 0,
            reclaimed: 0,
            may_grow: false,
            search: LeakSearch::default(),
            changes: Changes::default(),
        }
    }

    /// Offsets of all blocks.
    pub fn block_offsets(&self) -> impl Iterator<Item = HostOffset> {
        let exists = |at: &HostOffset| *at != HostOffset::START;
        self.table.iter().copied().filter(exists)
    }

    pub fn table_run(&self) -> Run {
        Run {
            first: self.table_at.cluster(&self.g),
            clusters: self.g.clusters(self.table.len() as u64 * 8),
        }
    }

    /// The entry of the table for a block; `None` after the end of the table.
    fn in_table(&self, block: BlockIndex) -> Option<HostOffset> {
        self.table.get(block.number() as usize).copied()
    }

    /// Whether the table has such a block.
    fn has_block(&self, block: BlockIndex) -> bool {
        self.in_table(block)
            .is_some_and(|at| at != HostOffset::START)
    }

    /// The refcount of a cluster.
    pub fn get(&mut self, end: &FileEnd, cluster: HostCluster) -> Result<u64, ImageError> {
        let (block, entry) = cluster.refcount_at(&self.g);
        if !self.has_block(block) {
            return Ok(0);
        }
        let order = self.g.refcount_order;
        Ok(get(&self.load(end, block)?.bytes, order, entry))
    }

    /// Sets a refcount whose block exists.
    fn set(
        &mut self,
        end: &FileEnd,
        cluster: HostCluster,
        refcount: u64,
    ) -> Result<(), ImageError> {
        let (block, entry) = cluster.refcount_at(&self.g);
        let order = self.g.refcount_order;
        self.count.add();
        put(&mut self.load(end, block)?.bytes, order, entry, refcount);
        let byte = (entry.number() << order) / 8;
        let piece = (block, PieceIndex::of(byte, &self.g));
        self.dirty_blocks.insert(piece);
        self.only_freed.remove(&piece);
        if let Some(touched) = &mut self.search.touched {
            touched.insert(cluster);
        }
        if refcount == 0 {
            self.search.held.remove(&cluster);
        } else {
            self.taken(Run::one(cluster));
        }
        self.changes.push(Change::Refcount {
            run: Run::one(cluster),
            refcount,
        });
        Ok(())
    }

    /// Sets a refcount from a journal; unless `also_less`, only if it increases. A refcount beyond the table is ignored:
    /// it is of a larger table that was never adopted.
    pub fn put_refcount(
        &mut self,
        end: &FileEnd,
        cluster: HostCluster,
        refcount: u64,
        also_less: bool,
    ) -> Result<(), ImageError> {
        let (block, _) = cluster.refcount_at(&self.g);
        match self.in_table(block) {
            None => Ok(()),
            Some(HostOffset::START) => {
                let at = cluster.start(&self.g);
                Err(ImageError::damaged("a cluster has no refcount", at))
            }
            Some(_) => {
                if also_less || self.get(end, cluster)? < refcount {
                    self.set(end, cluster, refcount)?;
                }
                if refcount > 0 {
                    self.used_up_to(cluster + 1);
                }
                Ok(())
            }
        }
    }

    /// Adds a block from a journal; false if the table has it at another offset.
    pub fn put_block(&mut self, block: BlockIndex, at: HostOffset) -> bool {
        match self.in_table(block) {
            // Of a larger table that was never adopted.
            None => true,
            Some(HostOffset::START) => {
                self.insert_block(block, at);
                true
            }
            Some(there) => there == at,
        }
    }

    /// Gives up a cluster that the file referred to, durably not any more.
    pub fn release(&mut self, end: &FileEnd, cluster: HostCluster) -> Result<(), ImageError> {
        if self.decrement(end, cluster)? == 0 {
            end.return_space(cluster.start(&self.g), self.g.cluster());
        }
        Ok(())
    }

    /// Gives up a new cluster, to which nothing refers, because it could not be used. It must not occupy space: others may
    /// miss that for other clusters.
    pub fn give_back(&mut self, end: &FileEnd, cluster: HostCluster) -> Result<(), ImageError> {
        if self.decrement(end, cluster)? == 0 {
            end.give_back(cluster.start(&self.g), self.g.cluster());
        }
        Ok(())
    }

    /// Decrements the refcount of a cluster in use, and returns it.
    pub fn decrement(&mut self, end: &FileEnd, cluster: HostCluster) -> Result<u64, ImageError> {
        let refcount = self.get(end, cluster)?;
        let Some(less) = refcount.checked_sub(1) else {
            let what = "a cluster in use has the refcount 0";
            return Err(ImageError::damaged(what, cluster.start(&self.g)));
        };
        self.set(end, cluster, less)?;
        if less == 0 {
            self.cursor = self.cursor.min(cluster);
        }
        Ok(less)
    }

    /// A table in memory does not refer to these clusters any more.
    pub fn unlinked(&mut self, run: Run) {
        self.reclaimable += run.clusters;
        if let Some(touched) = &mut self.search.touched {
            touched.extend(run.each());
        }
    }

    /// One of the clusters that were [`unlinked`](Self::unlinked) is free, once its space was returned.
    pub fn reclaim(&mut self, end: &FileEnd, cluster: HostCluster) -> Result<(), ImageError> {
        self.free_with(cluster, |refcounts| refcounts.decrement(end, cluster))?;
        self.reclaimable = self.reclaimable.saturating_sub(1);
        Ok(())
    }

    /// Decrements a refcount. If its piece has no other changes, [`take_freed`](Self::take_freed) returns it.
    fn free_with(
        &mut self,
        cluster: HostCluster,
        free: impl FnOnce(&mut Self) -> Result<u64, ImageError>,
    ) -> Result<(), ImageError> {
        let piece = self.piece_of(cluster);
        let only_freed = !self.dirty_blocks.contains(&piece) || self.only_freed.contains(&piece);
        free(self)?;
        if only_freed {
            self.only_freed.insert(piece);
        }
        self.reclaimed += 1;
        Ok(())
    }

    /// The piece of a block that has the refcount of a cluster.
    fn piece_of(&self, cluster: HostCluster) -> (BlockIndex, PieceIndex) {
        let (block, entry) = cluster.refcount_at(&self.g);
        let byte = (entry.number() << self.g.refcount_order) / 8;
        (block, PieceIndex::of(byte, &self.g))
    }

    /// Unlinked clusters that are not free yet.
    pub fn reclaimable(&self) -> u64 {
        self.reclaimable
    }

    /// Clusters that were reclaimed so far: if it has changed, an allocation that failed may succeed.
    pub fn reclaimed(&self) -> u64 {
        self.reclaimed
    }

    /// Clusters cannot be reclaimed now: the file may grow by a step instead.
    pub fn let_grow(&mut self) {
        self.may_grow = true;
    }

    /// Whether clusters are to be reclaimed before the file grows.
    fn reclaims_first(&self, end: &FileEnd) -> bool {
        let searches = self.search.before_growth_beyond;
        let may_leak = || searches.is_some_and(|full| end.get() >= full);
        !self.may_grow && (self.reclaimable > 0 || may_leak())
    }

    /// Extends the file.
    fn grow(&mut self, end: &FileEnd, to: HostOffset) -> Result<(), ImageError> {
        if end.get() < to {
            self.may_grow = false;
            end.grow(to)?;
        }
        Ok(())
    }

    /// Whether a run that begins here reads as zeroes because it was never used; call it before the run is
    /// allocated.
    pub fn is_fresh(&self, cluster: HostCluster) -> bool {
        cluster >= self.fresh
    }

    /// Notes that the clusters before this one may have been used.
    pub fn used_up_to(&mut self, cluster: HostCluster) {
        self.fresh = self.fresh.max(cluster);
    }

    /// Allocates 1 to `want` contiguous clusters, and returns whether they read as zeroes. Their refcounts are
    /// set to 1 in memory; a later flush writes them.
    pub fn allocate(
        &mut self,
        end: &FileEnd,
        metadata: &mut Metadata,
        want: u64,
        may_block: MayBlock,
    ) -> Result<(Run, bool), Retry> {
        let per_block = self.g.block_entries();
        let mut at = self.cursor;
        let (mut left, later) = match may_block {
            MayBlock::Yes | MayBlock::Grow => (SEARCH.0, Retry::Later),
            MayBlock::No => (SEARCH.1, Retry::WouldBlock),
        };
        loop {
            // All clusters before it are in use.
            self.cursor = at;
            if left == 0 {
                return Err(later);
            }
            let (block, from) = at.refcount_at(&self.g);
            self.check_reach(block)?;
            if !self.has_block(block) {
                if may_block == MayBlock::No {
                    return Err(Retry::WouldBlock);
                }
                let first = self.reclaims_first(end);
                may_block.grow_for_new(end, (at + 1).start(&self.g), first)?;
                self.make_block(end, metadata, block, at)?;
                at += 1;
                continue;
            }
            self.have(block, may_block)?;
            let order = self.g.refcount_order;
            let bytes = &self.load(end, block)?.bytes;
            let entries = from..(from + left).min(RefcountIndex::new(per_block));
            let looked = entries.end - from;
            let Some(run) = free_run(bytes, order, entries, want) else {
                at += looked;
                left = left.saturating_sub(looked.max(SEARCH_BLOCK));
                continue;
            };
            let first = block.first(&self.g) + run.start.number();
            // What the file has already is used first: it may be unable to grow.
            let in_file = HostCluster::new(end.get().bytes() >> self.g.cluster_bits);
            let clusters = match in_file - first.min(in_file) {
                0 => run.end - run.start,
                left => left.min(run.end - run.start),
            };
            let run = Run { first, clusters };
            let first = self.reclaims_first(end);
            may_block.grow_for_new(end, run.end().start(&self.g), first)?;
            if may_block == MayBlock::No && !self.holes_for(run).is_empty() {
                return Err(Retry::WouldBlock);
            }
            self.take(end, metadata, run)?;
            if may_block == MayBlock::Grow {
                self.search.held.extend(run.each());
            }
            let fresh = self.is_fresh(run.first) && end.grows_with_zeroes();
            self.cursor = run.end();
            self.used_up_to(self.cursor);
            return Ok((run, fresh));
        }
    }

    /// Allocates exactly `clusters` contiguous clusters.
    pub fn allocate_contiguous(
        &mut self,
        end: &FileEnd,
        metadata: &mut Metadata,
        clusters: u64,
    ) -> Result<Run, Retry> {
        let per_block = self.g.block_entries();
        // Include the blocks that may be missing, which count themselves too: one for each block touched.
        let mut need = clusters;
        loop {
            let more = clusters + need.div_ceil(per_block) + 1;
            if more <= need {
                break;
            }
            need = more;
        }
        let mut start = self.cursor;
        let mut at = start;
        while at < start + need {
            self.check_reach(at.refcount_at(&self.g).0)?;
            if self.get(end, at)? != 0 {
                start = at + 1;
            }
            at += 1;
        }
        // Nothing has changed if this fails.
        self.grow(end, (start + need).start(&self.g))?;
        let mut first = start;
        let last = (start + (need - 1)).refcount_at(&self.g).0;
        let mut block = start.refcount_at(&self.g).0;
        while block <= last {
            if !self.has_block(block) {
                self.make_block_in(end, metadata, block, first, start + need)?;
                first += 1;
            }
            block += 1;
        }
        let run = Run { first, clusters };
        self.take(end, metadata, run)?;
        self.search.held.extend(run.each());
        self.used_up_to(first + clusters);
        Ok(run)
    }

    /// The entries that the table has, with or without blocks.
    pub fn table_entries(&self) -> u64 {
        self.table.len() as u64
    }

    fn check_reach(&self, block: BlockIndex) -> Result<(), Retry> {
        if block.first(&self.g).number() >= 1 << (HOST_BITS - self.g.cluster_bits) {
            return Err(ImageError::Full("qcow2 addresses 64 PiB of a file").into());
        }
        if block.number() >= self.table_entries() {
            return Err(Retry::TableFull(self.table_entries()));
        }
        Ok(())
    }

    /// Sets refcounts from 0 to 1, and extends the file.
    fn take(&mut self, end: &FileEnd, metadata: &Metadata, run: Run) -> Result<(), ImageError> {
        if let Some(_what) = metadata.within(run) {
            let what = "metadata is in a cluster that has the refcount 0";
            return Err(ImageError::damaged(what, run.first.start(&self.g)));
        }
        self.grow(end, run.end().start(&self.g))?;
        // So that the flush that writes these refcounts needs no space.
        end.write("filling holes in refcounts", &self.holes_for(run))?;
        for cluster in run.each() {
            self.set(end, cluster, 1)?;
        }
        Ok(())
    }

    /// Makes a missing block, in the free cluster `at`, which is one of those that it counts.
    fn make_block(
        &mut self,
        end: &FileEnd,
        metadata: &mut Metadata,
        block: BlockIndex,
        at: HostCluster,
    ) -> Result<(), ImageError> {
        self.make_block_in(end, metadata, block, at, at + 1)
    }

    /// The same, where `at` may be counted by another block that exists already. All clusters from `at` to
    /// `clear` are free.
    fn make_block_in(
        &mut self,
        end: &FileEnd,
        metadata: &mut Metadata,
        block: BlockIndex,
        at: HostCluster,
        clear: HostCluster,
    ) -> Result<(), ImageError> {
        debug_assert!(at < clear);
        let offset = at.start(&self.g);
        if metadata.within(Run::one(at)).is_some() {
            let what = "metadata is in a cluster that has the refcount 0";
            return Err(ImageError::damaged(what, offset));
        }
        self.grow(end, offset + self.g.cluster())?;
        // So that the flush that writes it needs no space. No table in the file refers to it yet.
        let zeroes = vec![0; self.g.cluster() as usize];
        end.write_new("writing a new refcount block", offset, &zeroes)?;
        self.insert_block(block, offset);
        self.changes.push(Change::Block {
            number: block,
            at: offset,
        });
        metadata.add_table(at);
        self.set(end, at, 1)?;
        self.linked(Run::one(at));
        self.used_up_to(at + 1);
        Ok(())
    }

    /// Adds an empty block in memory.
    fn insert_block(&mut self, block: BlockIndex, offset: HostOffset) {
        self.count.add();
        let bytes = vec![0; self.g.cluster() as usize].into_boxed_slice();
        self.table[block.number() as usize] = offset;
        let used = self.clock;
        self.blocks.insert(block, Block { bytes, used });
        // All of it: the cluster in the file may hold old data.
        let pieces = self.g.cluster() / self.g.piece();
        self.dirty_blocks
            .extend((0..pieces).map(|piece| (block, PieceIndex::new(piece))));
        self.dirty_table.insert(block.piece(&self.g));
    }

    /// Fails if the block that counts a cluster must be read and the caller may not block.
    pub fn have_cluster(&self, cluster: HostCluster, may_block: MayBlock) -> Result<(), Retry> {
        self.have(cluster.refcount_at(&self.g).0, may_block)
    }

    fn have(&self, block: BlockIndex, may_block: MayBlock) -> Result<(), Retry> {
        match may_block {
            MayBlock::No if !self.blocks.contains_key(&block) => Err(Retry::WouldBlock),
            _ => Ok(()),
        }
    }

    fn load(&mut self, end: &FileEnd, block: BlockIndex) -> Result<&mut Block, ImageError> {
        self.clock += 1;
        if !self.blocks.contains_key(&block) {
            let at = self.table[block.number() as usize];
            if !at.is_of_cluster(self.g.cluster()) || at == HostOffset::START {
                let what = "a refcount block cannot be where it should";
                return Err(ImageError::damaged(what, at));
            }
            self.make_room();
            let mut bytes = vec![0; self.g.cluster() as usize].into_boxed_slice();
            if end.read_at("reading refcounts", at, &mut bytes)? < bytes.len() {
                let what = "the file ends before its refcounts";
                return Err(ImageError::damaged(what, at));
            }
            self.blocks.insert(block, Block { bytes, used: 0 });
        }
        let clock = self.clock;
        let block = self.blocks.get_mut(&block).expect("it was just put there");
        block.used = clock;
        Ok(block)
    }

    fn make_room(&mut self) {
        let most = (CACHE_BYTES >> self.g.cluster_bits).max(4) as usize;
        if self.blocks.len() < most {
            return;
        }
        let first = PieceIndex::default();
        let pieces = |block: BlockIndex| (block, first)..(block + 1, first);
        let clean = self.blocks.iter().filter(|&(&block, _)| {
            !self.writing.contains(&block)
                && self.dirty_blocks.range(pieces(block)).next().is_none()
        });
        let oldest = clean.min_by_key(|(_, b)| b.used).map(|(&block, _)| block);
        if let Some(oldest) = oldest {
            self.blocks.remove(&oldest);
        }
    }

    /// The cluster after the last one in use; `None` if finding it would take long.
    pub fn used_end(&mut self, end: &FileEnd) -> Result<Option<HostCluster>, ImageError> {
        let per_block = self.g.block_entries();
        let blocks = (0..self.table.len() as u64).rev().map(BlockIndex::new);
        let existing: Vec<_> = blocks.filter(|&block| self.has_block(block)).collect();
        let most = (USED_END_BYTES >> self.g.cluster_bits) as usize;
        for &block in existing.iter().take(most) {
            let order = self.g.refcount_order;
            let bytes = &self.load(end, block)?.bytes;
            let last = (0..per_block)
                .rev()
                .find(|&entry| get(bytes, order, RefcountIndex::new(entry)) != 0);
            if let Some(last) = last {
                return Ok(Some(block.first(&self.g) + (last + 1)));
            }
        }
        Ok(None)
    }
}

/// The first run of free entries, at most `want`.
fn free_run(
    bytes: &[u8],
    order: u32,
    within: Range<RefcountIndex>,
    want: u64,
) -> Option<Range<RefcountIndex>> {
    let is_free = |entry: u64| get(bytes, order, RefcountIndex::new(entry)) == 0;
    let (from, to) = (within.start.number(), within.end.number());
    let first = (from..to).find(|&entry| is_free(entry))?;
    let most = to.min(first.saturating_add(want));
    let end = (first..most).find(|&entry| !is_free(entry));
    Some(RefcountIndex::new(first)..RefcountIndex::new(end.unwrap_or(most)))
}

/// Reads a refcount of `1 << order` bits. Refcounts narrower than a byte begin with the lowest bits.
#[inline]
pub(crate) fn get(bytes: &[u8], order: u32, entry: RefcountIndex) -> u64 {
    let width = 1_usize << order;
    if width < 8 {
        let bit = entry.number() as usize * width;
        let mask = (1_u8 << width) - 1;
        return u64::from(bytes[bit / 8] >> (bit % 8) & mask);
    }
    let len = width / 8;
    let from = entry.number() as usize * len;
    let value = bytes[from..from + len].iter();
    value.fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Writes a refcount, limited to the highest that fits.
pub(crate) fn put(bytes: &mut [u8], order: u32, entry: RefcountIndex, refcount: u64) {
    let width = 1_usize << order;
    let refcount = refcount.min(refcount_max(order));
    if width < 8 {
        let bit = entry.number() as usize * width;
        let mask = ((1_u16 << width) - 1) as u8;
        let byte = &mut bytes[bit / 8];
        *byte = *byte & !(mask << (bit % 8)) | (refcount as u8) << (bit % 8);
        return;
    }
    let len = width / 8;
    let from = entry.number() as usize * len;
    bytes[from..from + len].copy_from_slice(&refcount.to_be_bytes()[8 - len..]);
}

/// The highest refcount of this width.
pub(crate) fn refcount_max(order: u32) -> u64 {
    u64::MAX >> (64 - (1_u32 << order))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_all_widths_read_back() {
        for order in 0..=6 {
            let mut bytes = vec![0; 512];
            let entries = (512 * 8) >> order;
            let value = |entry: u64| (entry * 0x9e37_79b9) & refcount_max(order);
            for entry in (0..entries).rev() {
                put(&mut bytes, order, RefcountIndex::new(entry), value(entry));
            }
            for entry in 0..entries {
                let found = get(&bytes, order, RefcountIndex::new(entry));
                assert_eq!(found, value(entry), "{order} {entry}");
            }
        }
        // As QEMU writes them: big-endian, and the lowest bits first.
        let mut bytes = vec![0; 8];
        put(&mut bytes, 4, RefcountIndex::new(1), 0x102);
        put(&mut bytes, 0, RefcountIndex::new(0), 1);
        assert_eq!(bytes[..4], [1, 0, 1, 2]);
    }

    #[test]
    fn free_runs() {
        let bytes = [0b0110_0001];
        let index = RefcountIndex::new;
        let free = |within: Range<u64>, want| {
            let run = free_run(&bytes, 0, index(within.start)..index(within.end), want);
            run.map(|run| run.start.number()..run.end.number())
        };
        assert_eq!(free(0..8, 2), Some(1..3));
        assert_eq!(free(0..8, 9), Some(1..5));
        assert_eq!(free(5..8, 9), Some(7..8));
        assert_eq!(free(5..7, 9), None);
    }
}
