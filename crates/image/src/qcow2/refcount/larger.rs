//! A larger refcount table, for a file that has outgrown the current one.

use super::Refcounts;
use crate::qcow2::error::ImageError;
use crate::qcow2::file::FileEnd;
use crate::qcow2::header::REFCOUNT_TABLE_BYTES_MAX;
use crate::qcow2::metadata::Metadata;
use crate::qcow2::retry::Retry;
use crate::qcow2::types::{BlockIndex, HostCluster, HostOffset, Run};

/// A larger table that is not the current one yet.
pub(crate) struct LargerTable {
    len: usize,
    cursor: HostCluster,
    pub run: Run,
}

impl Refcounts {
    /// Enlarges the table in memory, and allocates clusters for it. The file uses it only after
    /// [`adopt`](Self::adopt).
    pub fn larger_table(
        &mut self,
        end: &FileEnd,
        metadata: &mut Metadata,
    ) -> Result<LargerTable, ImageError> {
        let (len, cursor) = (self.table.len(), self.cursor);
        let per_cluster = self.g.cluster() as usize / 8;
        let entries = (len * 3 / 2 + 1).next_multiple_of(per_cluster);
        let most = (REFCOUNT_TABLE_BYTES_MAX / 8) as usize;
        let entries = entries.min(most);
        if entries <= len {
            return Err(ImageError::Full(
                "its refcount table has 8 MiB, which is the most",
            ));
        }
        self.table.resize(entries, HostOffset::START);
        let clusters = self.g.clusters(entries as u64 * 8);
        match self.allocate_contiguous(end, metadata, clusters) {
            Ok(run) => Ok(LargerTable { len, cursor, run }),
            Err(stop) => {
                self.forget_table(end, metadata, len);
                self.cursor = cursor;
                Err(match stop {
                    Retry::Error(error) => error,
                    _ => ImageError::Full("its refcount table cannot grow"),
                })
            }
        }
    }

    /// The bytes of the whole table.
    pub fn whole_table(&self) -> Vec<u8> {
        self.table_bytes(BlockIndex::default(), self.table.len() as u64)
    }

    /// Makes the larger table the current one; returns where the old one was.
    pub fn adopt(&mut self, larger: &LargerTable) -> Run {
        let old = Run {
            first: self.table_at.cluster(&self.g),
            clusters: self.g.clusters(larger.len as u64 * 8),
        };
        self.table_at = larger.run.first.start(&self.g);
        self.dirty_table.clear();
        old
    }

    /// Drops the larger table again.
    pub fn revoke(&mut self, end: &FileEnd, metadata: &mut Metadata, larger: &LargerTable) {
        let covered_end = BlockIndex::new(larger.len as u64).first(&self.g);
        for cluster in larger.run.each() {
            if cluster >= covered_end {
                end.give_back(cluster.start(&self.g), self.g.cluster());
            } else {
                // A cluster that is not released is only leaked.
                let _ = self.give_back(end, cluster);
            }
        }
        self.forget_table(end, metadata, larger.len);
        self.cursor = larger.cursor;
    }

    fn forget_table(&mut self, end: &FileEnd, metadata: &mut Metadata, len: usize) {
        for &at in &self.table[len..] {
            if at != HostOffset::START {
                metadata.remove_table(at.cluster(&self.g));
                end.give_back(at, self.g.cluster());
            }
        }
        self.table.truncate(len);
        let stop = BlockIndex::new(len as u64);
        self.changes.forget_blocks(stop, stop.first(&self.g));
        self.blocks.retain(|&block, _| block < stop);
        self.dirty_blocks.retain(|&(block, _)| block < stop);
        self.only_freed.retain(|&(block, _)| block < stop);
        self.writing.retain(|&block| block < stop);
        let bytes = len as u64 * 8;
        self.dirty_table
            .retain(|piece| piece.start(&self.g) < bytes);
    }
}
