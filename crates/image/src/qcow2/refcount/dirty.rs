//! Changes of refcounts that are not in the file yet.

use std::collections::BTreeSet;

use super::Refcounts;
use crate::bytes::put64;
use crate::qcow2::file::Piece;
use crate::qcow2::types::{BlockIndex, PieceIndex, Run};

/// Changes taken to be written: blocks with their pieces, and pieces of the table.
pub(crate) struct Dirty {
    blocks: BTreeSet<(BlockIndex, PieceIndex)>,
    table: BTreeSet<PieceIndex>,
}

impl Refcounts {
    /// The pieces of blocks that count a run and may be holes in the file: unchanged, with only zeroes. These are rare, and
    /// found for few runs: from then on, the piece has a refcount.
    pub fn holes_for(&self, run: Run) -> Vec<Piece> {
        let mut holes = Vec::new();
        let mut cluster = run.first;
        while cluster < run.end() {
            let (block, index) = self.piece_of(cluster);
            let start = index.start(&self.g);
            let known = self.blocks.get(&block);
            let bytes =
                known.map(|known| &known.bytes[start as usize..][..self.g.piece() as usize]);
            if let Some(bytes) = bytes
                && !self.dirty_blocks.contains(&(block, index))
                && bytes.iter().all(|&byte| byte == 0)
            {
                holes.push(Piece {
                    at: self.table[block.number() as usize] + start,
                    bytes: bytes.to_vec(),
                });
            }
            let next = ((start + self.g.piece()) * 8) >> self.g.refcount_order;
            cluster = block.first(&self.g) + next;
        }
        holes
    }

    /// The unchanged pieces of the table that have only zeroes.
    pub fn zero_pieces(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let each = self.g.piece();
        for start in (0..self.table.len() as u64 * 8).step_by(each as usize) {
            let piece = Piece {
                at: self.table_at + start,
                bytes: self.table_bytes(BlockIndex::new(start / 8), each / 8),
            };
            if piece.is_zero() && !self.dirty_table.contains(&PieceIndex::of(start, &self.g)) {
                pieces.push(piece);
            }
        }
        pieces
    }

    /// Bytes of changes that are only in memory, and that no flush is writing.
    pub fn dirty_bytes(&self) -> u64 {
        (self.dirty_blocks.len() + self.dirty_table.len()) as u64 * self.g.piece()
    }

    /// Takes the changes to be written, with copies of those of blocks. The caller ends this with
    /// [`written`](Self::written) or [`not_written`](Self::not_written).
    pub fn take_dirty_blocks(&mut self) -> (Dirty, Vec<Piece>) {
        let blocks = std::mem::take(&mut self.dirty_blocks);
        self.only_freed.clear();
        let table = std::mem::take(&mut self.dirty_table);
        let copies = self.copies_to_write(&blocks);
        (Dirty { blocks, table }, copies)
    }

    /// The same for blocks with no changes but freed clusters.
    pub fn take_freed(&mut self) -> (Dirty, Vec<Piece>) {
        let blocks = std::mem::take(&mut self.only_freed);
        for piece in &blocks {
            self.dirty_blocks.remove(piece);
        }
        let table = BTreeSet::new();
        let copies = self.copies_to_write(&blocks);
        (Dirty { blocks, table }, copies)
    }

    fn copies_to_write(&mut self, dirty: &BTreeSet<(BlockIndex, PieceIndex)>) -> Vec<Piece> {
        self.writing.extend(dirty.iter().map(|&(block, _)| block));
        let piece = self.g.piece() as usize;
        let copies = dirty.iter().map(|&(block, index)| {
            let start = index.start(&self.g);
            Piece {
                at: self.table[block.number() as usize] + start,
                bytes: self.blocks[&block].bytes[start as usize..][..piece].to_vec(),
            }
        });
        copies.collect()
    }

    /// Copies of the changed pieces of the table.
    pub fn table_pieces(&self, dirty: &Dirty) -> Vec<Piece> {
        let copies = dirty.table.iter().map(|piece| {
            let start = piece.start(&self.g);
            Piece {
                at: self.table_at + start,
                bytes: self.table_bytes(BlockIndex::new(start / 8), self.g.piece() / 8),
            }
        });
        copies.collect()
    }

    /// Entries of the table as written to the file; entries after its end are 0.
    pub(super) fn table_bytes(&self, first: BlockIndex, entries: u64) -> Vec<u8> {
        let mut bytes = vec![0; entries as usize * 8];
        for (at, entry) in (0..bytes.len()).step_by(8).zip(0..entries) {
            let block = self.in_table(first + entry).unwrap_or_default();
            put64(&mut bytes, at, block.bytes());
        }
        bytes
    }

    /// These changes are in the file.
    pub fn written(&mut self, dirty: &Dirty) {
        for (block, _) in &dirty.blocks {
            self.writing.remove(block);
        }
    }

    /// These changes may not be in the file: marks them as changed again.
    pub fn not_written(&mut self, dirty: Dirty) {
        self.written(&dirty);
        self.dirty_blocks.extend(dirty.blocks);
        self.dirty_table.extend(dirty.table);
    }
}
