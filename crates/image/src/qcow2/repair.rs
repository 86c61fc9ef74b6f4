//! Rebuilding the refcounts of an image that is marked dirty (lazy refcounts).
//!
//! The new refcounts are written after everything else in the file. Then the header, in one sector, refers to them and marks
//! the image as clean. A crash before that leaves the image unchanged. The clusters of the old refcounts are free afterwards.
//!
//! Where there is no space behind the end, as on a block device, they are written in the place of the old ones: as long as the
//! image is marked dirty, nobody uses these, and a crash leaves an image that is repaired again.

use super::error::{Doing, ImageError};
use super::geometry::Geometry;
use super::header::{Header, REFCOUNT_TABLE_BYTES_MAX};
use super::progress::ReportProgress;
use super::refcount::{put, refcount_max};
use super::scan::{Scan, ScanError};
use super::types::{BlockIndex, HostCluster, HostOffset, Run};
use crate::bytes::put64;
use crate::storage::{Storage, read_padded};

const NO_ROOM: &str = "a crash has left its refcounts invalid (lazy_refcounts=on), and there is no space to write new ones; \
     make space where it is, or extend that";

/// Writes new refcounts, and a header that refers to them.
pub(super) fn repair(
    storage: &dyn Storage,
    header: &mut Header,
    header_block: &mut [u8],
    progress: ReportProgress<'_>,
) -> Result<(), ScanError> {
    let behind = Room::behind(storage, header).map_err(ScanError::from);
    let behind = behind.and_then(|room| {
        rebuild(storage, header, &room, progress)?;
        Ok(room)
    });
    let room = match behind {
        Ok(room) => room,
        Err(ScanError::Image(e)) if e.is_no_space() || matches!(e, ImageError::Full(_)) => {
            let room = Room::in_place(storage, header, progress)?;
            match rebuild(storage, header, &room, progress) {
                Err(ScanError::Image(e)) if e.is_no_space() => {
                    return Err(ImageError::Full(NO_ROOM).into());
                }
                done => done?,
            }
            room
        }
        Err(e) => return Err(e),
    };
    header.refcount_table_at = room.table.first.start(&header.geometry());
    header.refcount_table_clusters = room.table.clusters as u32;
    header.clear_dirty();
    header.put(header_block);
    // If this fails, the file may have either header, and is not touched again.
    let result = storage
        .write_at(HostOffset::START.in_file(), header_block)
        .and_then(|()| storage.flush());
    Ok(result.doing("writing the header", HostOffset::START)?)
}

/// Where new refcounts are written.
struct Room {
    table: Run,
    /// Where each block is, if anything that it counts is in use.
    blocks: Vec<Option<HostCluster>>,
    /// All these clusters, in ascending order.
    all: Vec<HostCluster>,
}

impl Room {
    fn new(table: Run, blocks: Vec<Option<HostCluster>>) -> Self {
        let mut all: Vec<_> = table
            .each()
            .chain(blocks.iter().flatten().copied())
            .collect();
        all.sort_unstable();
        Self { table, blocks, all }
    }

    /// Behind the end of the file.
    ///
    /// # Errors
    /// The table would be too large.
    fn behind(storage: &dyn Storage, header: &Header) -> Result<Self, ImageError> {
        let g = header.geometry();
        let size = storage
            .size()
            .doing("asking for the file's size", HostOffset::START)?;
        let first = HostCluster::new(g.clusters(size));
        let mut number = 0;
        loop {
            let clusters = g.clusters(number * 8);
            if clusters << g.cluster_bits > REFCOUNT_TABLE_BYTES_MAX.max(g.cluster()) {
                let why = "its refcount table would have more than 8 MiB";
                return Err(ImageError::Full(why));
            }
            let end = first + (clusters + number);
            let needed = end.number().div_ceil(g.block_entries());
            if needed <= number {
                let table = Run { first, clusters };
                let blocks = Run::between(table.end(), end).each().map(Some).collect();
                return Ok(Self::new(table, blocks));
            }
            number = needed;
        }
    }

    /// Where the old ones are. Blocks that are missing are made of clusters that nothing refers to.
    ///
    /// # Errors
    /// There are not enough of these; or the old ones are used for something else as well.
    fn in_place(
        storage: &dyn Storage,
        header: &Header,
        progress: ReportProgress<'_>,
    ) -> Result<Self, ScanError> {
        let mut scan = Scan::new(storage, header, true)?;
        let g = scan.g;
        let size = storage
            .size()
            .doing("asking for the file's size", HostOffset::START)?;
        // The last cluster of a device may be incomplete.
        let whole = HostCluster::new(size >> g.cluster_bits);
        let table = Run {
            first: header.refcount_table_at.cluster(&g),
            clusters: u64::from(header.refcount_table_clusters),
        };
        let old = scan.refcount_table.iter();
        let old = old.map(|&at| (at != HostOffset::START).then(|| at.cluster(&g)));
        let mut room = Self::new(table, old.collect());
        let no_room = || ScanError::from(ImageError::Full(NO_ROOM));
        let (mut is_needed, mut free) = (vec![false; room.blocks.len()], Vec::new());
        for window in 0..scan.windows() {
            let (range, counts) = scan.count(window, progress)?;
            if let Some(damage) = scan.findings.first() {
                return Err(ImageError::Damaged(damage.clone()).into());
            }
            for (cluster, &count) in range.each().zip(&counts) {
                if count == 0 {
                    if cluster < whole && free.len() < room.blocks.len() {
                        free.push(cluster);
                    }
                    continue;
                }
                if count > 1 && room.has(cluster) {
                    let what = "refcounts are in a cluster that is used for something else as well";
                    return Err(ImageError::damaged(what, cluster.start(&g)).into());
                }
                let block = cluster.refcount_at(&g).0.number() as usize;
                *is_needed.get_mut(block).ok_or_else(no_room)? = true;
            }
        }
        let mut free = free.into_iter();
        let all = is_needed.iter().enumerate();
        let mut missing: Vec<_> = all
            .filter(|(_, needed)| **needed)
            .map(|(at, _)| at)
            .collect();
        while let Some(block) = missing.pop() {
            if room.blocks[block].is_some() {
                continue;
            }
            let cluster = free.next().ok_or_else(no_room)?;
            room.blocks[block] = Some(cluster);
            let counted_by = cluster.refcount_at(&g).0.number() as usize;
            if counted_by >= room.blocks.len() {
                return Err(no_room());
            }
            missing.push(counted_by);
        }
        Ok(Self::new(room.table, room.blocks))
    }

    fn has(&self, cluster: HostCluster) -> bool {
        self.all.binary_search(&cluster).is_ok()
    }
}

/// Writes all refcounts to their room, durably.
fn rebuild(
    storage: &dyn Storage,
    header: &Header,
    room: &Room,
    progress: ReportProgress<'_>,
) -> Result<(), ScanError> {
    let mut scan = Scan::new(storage, header, false)?;
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
    let result = storage.flush();
    Ok(result.doing("writing refcounts", HostOffset::START)?)
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
        if let Some(cluster) = self.room.blocks[self.number.number() as usize] {
            let at = cluster.start(&self.g);
            let result = self.storage.write_at(at.in_file(), &self.block);
            result.doing("writing refcounts", at)?;
            self.block.fill(0);
        }
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
            let at = block.map_or(HostOffset::START, |block| block.start(&self.g));
            put64(&mut bytes, index * 8, at.bytes());
        }
        let at = self.room.table.first.start(&self.g);
        let result = self.storage.write_at(at.in_file(), &bytes);
        result.doing("writing the refcount table", at)
    }
}
