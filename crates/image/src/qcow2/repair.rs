//! Rebuilding the refcounts of an image that is marked dirty (lazy refcounts).
//!
//! The new refcounts are written after everything else in the file. Then the header, in one sector, refers to
//! them and marks the image as clean. A crash before that leaves the image unchanged. The clusters of the old
//! refcounts are free afterwards.

use super::error::{Doing, ImageError};
use super::geometry::Geometry;
use super::header::{Header, REFCOUNT_TABLE_BYTES_MAX};
use super::progress::ReportProgress;
use super::refcount::{put, refcount_max};
use super::scan::{Scan, ScanError};
use super::types::{BlockIndex, HostCluster, HostOffset, Run};
use crate::bytes::put64;
use crate::storage::{Storage, read_padded};

/// Writes new refcounts, and a header that refers to them.
pub(super) fn repair(
    storage: &dyn Storage,
    header: &mut Header,
    header_block: &mut [u8],
    progress: ReportProgress<'_>,
) -> Result<(), ScanError> {
    let before = header.clone();
    let mut scan = Scan::new(storage, &before, false)?;
    let mut blocks = Blocks {
        storage,
        g: scan.g,
        next: scan.clusters.end(),
        table: Vec::new(),
        block: vec![0; scan.g.cluster() as usize],
        number: BlockIndex::default(),
        used: false,
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
            blocks.set(cluster, count)?;
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
    let table = blocks.finish(scan.clusters.end())?;
    header.refcount_table_at = table.first.start(&scan.g);
    header.refcount_table_clusters = table.clusters as u32;
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
    /// The next cluster after all that are in use.
    next: HostCluster,
    /// Where the written blocks are.
    table: Vec<HostOffset>,
    block: Vec<u8>,
    number: BlockIndex,
    /// The current block has a refcount that is not 0.
    used: bool,
}

impl Blocks<'_> {
    fn set(&mut self, cluster: HostCluster, count: u32) -> Result<(), ImageError> {
        let (block, entry) = cluster.refcount_at(&self.g);
        while block > self.number {
            self.end_block()?;
        }
        if count > 0 {
            put(
                &mut self.block,
                self.g.refcount_order,
                entry,
                u64::from(count),
            );
            self.used = true;
        }
        Ok(())
    }

    /// Writes the current block, if it has a refcount that is not 0.
    fn end_block(&mut self) -> Result<(), ImageError> {
        let mut at = HostOffset::START;
        if self.used {
            at = self.next.start(&self.g);
            self.next += 1;
            let result = self.storage.write_at(at.in_file(), &self.block);
            result.doing("writing refcounts", at)?;
            self.block.fill(0);
            self.used = false;
        }
        self.table.push(at);
        self.number += 1;
        Ok(())
    }

    /// Counts the clusters of the new refcounts, which begin at `first`, and writes the table; returns where it is.
    fn finish(mut self, first: HostCluster) -> Result<Run, ImageError> {
        let per_block = self.g.block_entries();
        // The blocks not written yet, beginning with the current one, count the clusters from `first` on:
        // the written blocks, themselves, and the table.
        let written_blocks = self.next - first;
        let (mut more, mut table) = (1, 1);
        loop {
            let end = first + (written_blocks + more + table);
            let blocks = end.number().div_ceil(per_block);
            let need = (blocks - self.number.number(), self.g.clusters(blocks * 8));
            if need.0 <= more && need.1 <= table {
                break;
            }
            (more, table) = (more.max(need.0), table.max(need.1));
        }
        if table << self.g.cluster_bits > REFCOUNT_TABLE_BYTES_MAX.max(self.g.cluster()) {
            return Err(ImageError::Full(
                "its refcount table would have more than 8 MiB",
            ));
        }
        let end = first + (written_blocks + more + table);
        let last_block = self.number + more;
        for cluster in Run::between(first, end).each() {
            self.set(cluster, 1)?;
        }
        while self.number < last_block {
            // Write all of them, so that their number is the one that was counted.
            self.used = true;
            self.end_block()?;
        }
        let mut bytes = vec![0; (table << self.g.cluster_bits) as usize];
        for (index, &block) in self.table.iter().enumerate() {
            put64(&mut bytes, index * 8, block.bytes());
        }
        let at = self.next.start(&self.g);
        let result = self.storage.write_at(at.in_file(), &bytes);
        result.doing("writing the refcount table", at)?;
        Ok(Run {
            first: self.next,
            clusters: table,
        })
    }
}
