//! Rebuilding the refcounts of an image that is marked dirty (lazy refcounts).
//!
//! The new refcounts are written after everything else in the file; or, where there is no space, to clusters that nothing
//! refers to, also none of the old refcounts. Then the header, in one sector, refers to them and marks the image as clean. A
//! crash before that leaves the image unchanged. The clusters of the old refcounts are free afterwards.

use super::error::{Doing, ImageError};
use super::geometry::Geometry;
use super::header::{Header, REFCOUNT_TABLE_BYTES_MAX};
use super::progress::ReportProgress;
use super::refcount::{put, refcount_max};
use super::scan::{Scan, ScanError};
use super::types::{BlockIndex, HostCluster, HostOffset, Run};
use crate::bytes::put64;
use crate::storage::{Storage, read_padded};

/// The most runs of free clusters that are remembered: as many as a refcount table can have blocks.
const RUNS_MAX: usize = 1 << 20;

const NO_ROOM: &str = "a crash has left its refcounts invalid (lazy_refcounts=on), and there is no space to write new ones: \
     extend what it is on. 'qemu-img check -r all' repairs it in place, but removes the internal snapshots of an image with bitmaps";

/// Writes new refcounts, and a header that refers to them.
pub(super) fn repair(
    storage: &dyn Storage,
    header: &mut Header,
    header_block: &mut [u8],
    progress: ReportProgress<'_>,
) -> Result<(), ScanError> {
    let g = header.geometry();
    let size = storage
        .size()
        .doing("asking for the file's size", HostOffset::START)?;
    let end = HostCluster::new(g.clusters(size));
    let behind = Run {
        first: end,
        clusters: u64::MAX,
    };
    let room = Room::choose(&g, end, &[behind])?;
    match rebuild(storage, header, header_block, &room, progress) {
        // A block device has the size that it has.
        Err(ScanError::Image(e)) if e.is_no_space() => {}
        done => return done,
    }
    let (end, free) = unused(storage, header, progress)?;
    let room = Room::choose(&g, end, &free)?;
    rebuild(storage, header, header_block, &room, progress)
}

/// The end of all clusters that are in use, and those that are not, with the refcounts that the image has.
fn unused(
    storage: &dyn Storage,
    header: &Header,
    progress: ReportProgress<'_>,
) -> Result<(HostCluster, Vec<Run>), ScanError> {
    let mut scan = Scan::new(storage, header, true)?;
    let size = storage
        .size()
        .doing("asking for the file's size", HostOffset::START)?;
    // The last cluster of a device may be incomplete.
    let whole = HostCluster::new(size >> scan.g.cluster_bits);
    let (mut end, mut free) = (HostCluster::default(), Vec::<Run>::new());
    for window in 0..scan.windows() {
        let (range, counts) = scan.count(window, progress)?;
        if let Some(damage) = scan.findings.first() {
            return Err(ImageError::Damaged(damage.clone()).into());
        }
        for (cluster, &count) in range.each().zip(&counts) {
            let is_full = free.len() == RUNS_MAX;
            match free.last_mut() {
                _ if count > 0 => end = Run::one(cluster).end(),
                _ if cluster >= whole => {}
                Some(run) if run.end() == cluster => run.clusters += 1,
                _ if is_full => {}
                _ => free.push(Run::one(cluster)),
            }
        }
    }
    Ok((end, free))
}

/// Where new refcounts are written.
struct Room {
    table: Run,
    /// In ascending order, as are the clusters that they count.
    blocks: Vec<HostCluster>,
    /// All clusters, in ascending order.
    all: Vec<HostCluster>,
}

impl Room {
    /// For refcounts of the clusters before `end`, and of their own, which are among `free`.
    ///
    /// # Errors
    /// These are not enough; or the table would be too large.
    fn choose(g: &Geometry, end: HostCluster, free: &[Run]) -> Result<Self, ImageError> {
        let mut number = end.number().div_ceil(g.block_entries());
        loop {
            let clusters = g.clusters(number * 8);
            if clusters << g.cluster_bits > REFCOUNT_TABLE_BYTES_MAX.max(g.cluster()) {
                let why = "its refcount table would have more than 8 MiB";
                return Err(ImageError::Full(why));
            }
            let of_table = free.iter().position(|run| run.clusters >= clusters);
            let of_table = of_table.ok_or(ImageError::Full(NO_ROOM))?;
            let table = Run {
                clusters,
                ..free[of_table]
            };
            let others = free.iter().enumerate().flat_map(|(at, run)| {
                let taken = if at == of_table { clusters } else { 0 };
                run.each().skip(taken as usize)
            });
            let blocks: Vec<_> = others.take(number as usize).collect();
            if (blocks.len() as u64) < number {
                return Err(ImageError::Full(NO_ROOM));
            }
            let mut all: Vec<_> = table.each().chain(blocks.iter().copied()).collect();
            all.sort_unstable();
            let last = all.last().map_or(end, |last| Run::one(*last).end());
            let needed = end.max(last).number().div_ceil(g.block_entries());
            if needed <= number {
                return Ok(Self { table, blocks, all });
            }
            number = needed;
        }
    }

    fn has(&self, cluster: HostCluster) -> bool {
        self.all.binary_search(&cluster).is_ok()
    }
}

fn rebuild(
    storage: &dyn Storage,
    header: &mut Header,
    header_block: &mut [u8],
    room: &Room,
    progress: ReportProgress<'_>,
) -> Result<(), ScanError> {
    let before = header.clone();
    let mut scan = Scan::new(storage, &before, false)?;
    let mut blocks = Blocks {
        storage,
        g: scan.g,
        room,
        block: vec![0; scan.g.cluster() as usize],
        number: BlockIndex::default(),
    };
    for window in 0..scan.windows() {
        let (range, counts) = scan.count(window, progress)?;
        if let Some(damage) = scan.findings.first() {
            return Err(ImageError::Damaged(damage.clone()).into());
        }
        for (cluster, &count) in range.each().zip(&counts) {
            if u64::from(count) > refcount_max(scan.g.refcount_order) {
                let at = cluster.start(&scan.g);
                let what = "a cluster is used more often than refcounts can say";
                return Err(ImageError::damaged(what, at).into());
            }
            blocks.set(cluster, count + u32::from(room.has(cluster)))?;
        }
        let piece = scan.g.piece();
        scan.wrong_copied(&range, &counts, |at, entry| {
            let mut bytes = vec![0; piece as usize];
            let start = at.down_to(piece);
            let read = read_padded(storage, start.in_file(), &mut bytes);
            read.doing("reading a table", at)?;
            bytes[(at - start) as usize..][..8].copy_from_slice(&entry);
            let result = storage.write_at(start.in_file(), &bytes);
            result.doing("writing a table", at)
        })?;
    }
    let behind = |cluster: &&HostCluster| **cluster >= scan.clusters.end();
    for &cluster in room.all.iter().filter(behind) {
        blocks.set(cluster, 1)?;
    }
    blocks.finish()?;
    header.refcount_table_at = room.table.first.start(&scan.g);
    header.refcount_table_clusters = room.table.clusters as u32;
    header.clear_dirty();
    header.put(header_block);
    let result = storage
        .flush()
        .and_then(|()| storage.write_at(HostOffset::START.in_file(), header_block))
        .and_then(|()| storage.flush());
    Ok(result.doing("writing the header", HostOffset::START)?)
}

/// Writes refcounts to the file, in ascending order.
struct Blocks<'a> {
    storage: &'a dyn Storage,
    g: Geometry,
    room: &'a Room,
    /// The current block, which is not written yet.
    block: Vec<u8>,
    number: BlockIndex,
}

impl Blocks<'_> {
    fn set(&mut self, cluster: HostCluster, count: u32) -> Result<(), ImageError> {
        if count == 0 {
            return Ok(());
        }
        let (block, entry) = cluster.refcount_at(&self.g);
        while block > self.number {
            self.end_block()?;
        }
        let count = u64::from(count);
        put(&mut self.block, self.g.refcount_order, entry, count);
        Ok(())
    }

    fn end_block(&mut self) -> Result<(), ImageError> {
        let at = self.room.blocks[self.number.number() as usize].start(&self.g);
        let result = self.storage.write_at(at.in_file(), &self.block);
        result.doing("writing refcounts", at)?;
        self.block.fill(0);
        self.number += 1;
        Ok(())
    }

    /// Writes what is left, and the table.
    fn finish(mut self) -> Result<(), ImageError> {
        while self.number.number() < self.room.blocks.len() as u64 {
            self.end_block()?;
        }
        let mut bytes = vec![0; (self.room.table.clusters << self.g.cluster_bits) as usize];
        for (index, block) in self.room.blocks.iter().enumerate() {
            put64(&mut bytes, index * 8, block.start(&self.g).bytes());
        }
        let at = self.room.table.first.start(&self.g);
        let result = self.storage.write_at(at.in_file(), &bytes);
        result.doing("writing the refcount table", at)
    }
}
