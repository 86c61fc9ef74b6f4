use block::GuestOffset;

use super::header::Header;
use super::types::{BlockIndex, GuestCluster, HostCluster, L1Index, L2Index, SliceIndex};

/// The largest slice of an L2 table that is read and kept at a time, as a power of two in bytes: 8192 clusters, 512
/// MiB of disk at 64 KiB a cluster.
const SLICE_BITS_MAX: u32 = 16;

/// The unit in which changed metadata is written, in bytes, unless clusters are smaller.
const PIECE: u64 = 4096;

/// How an image divides the disk and the file. All sizes are powers of two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub cluster_bits: u32,
    pub refcount_order: u32,
    /// L2 entries have a second word, with bits for 32 subclusters.
    pub extended: bool,
    /// The version of the format. Zero clusters exist from version 3 on.
    pub version: u32,
    /// Guest data is in an external data file, at the same offset as on the disk.
    pub external: bool,
}

impl Geometry {
    pub fn new(header: &Header) -> Self {
        Self {
            cluster_bits: header.cluster_bits,
            refcount_order: header.refcount_order,
            extended: header.extended_l2(),
            version: header.version,
            external: header.external_data(),
        }
    }

    /// The size of a cluster in bytes.
    #[inline]
    pub fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The number of 64-bit words of an L2 entry.
    #[inline]
    pub fn words(&self) -> usize {
        1 + usize::from(self.extended)
    }

    /// The offset within its cluster, in bytes.
    #[inline]
    pub fn in_cluster(&self, at: GuestOffset) -> u64 {
        at.0 & (self.cluster() - 1)
    }

    #[inline]
    fn entry_bits(&self) -> u32 {
        3 + u32::from(self.extended)
    }

    /// The number of clusters that an L2 table maps.
    #[inline]
    pub fn table_entries(&self) -> u64 {
        1 << (self.cluster_bits - self.entry_bits())
    }

    /// Bytes of the disk that an L2 table maps.
    #[inline]
    pub fn table_reach(&self) -> u64 {
        self.table_entries() << self.cluster_bits
    }

    #[inline]
    fn slice_bits(&self) -> u32 {
        self.cluster_bits.min(SLICE_BITS_MAX)
    }

    /// The size of a slice of an L2 table in bytes.
    #[inline]
    pub fn slice_bytes(&self) -> u64 {
        1 << self.slice_bits()
    }

    /// The number of clusters that a slice maps.
    #[inline]
    pub fn slice_entries(&self) -> u64 {
        1 << (self.slice_bits() - self.entry_bits())
    }

    /// The slice that maps a cluster, and the index of the entry in it.
    #[inline]
    pub fn slice_of(&self, cluster: GuestCluster) -> (SliceIndex, L2Index) {
        let (cluster, entries) = (cluster.number(), self.slice_entries());
        (
            SliceIndex::new(cluster / entries),
            L2Index::new((cluster % entries) as usize),
        )
    }

    /// The first cluster after those that a slice maps.
    #[inline]
    pub fn slice_end(&self, slice: SliceIndex) -> GuestCluster {
        GuestCluster::new((slice.number() + 1) * self.slice_entries())
    }

    /// The L2 table that a slice belongs to, and the offset of the slice in it, in bytes.
    #[inline]
    pub fn table_of(&self, slice: SliceIndex) -> (L1Index, u64) {
        let (slice, slices) = (slice.number(), self.cluster() / self.slice_bytes());
        (
            L1Index::new(slice / slices),
            slice % slices * self.slice_bytes(),
        )
    }

    /// The first byte of the disk that an L2 table maps.
    #[inline]
    pub fn table_start(&self, table: L1Index) -> GuestOffset {
        GuestOffset(table.number() * self.table_reach())
    }

    #[inline]
    pub fn subcluster_bits(&self) -> u32 {
        self.cluster_bits - if self.extended { 5 } else { 0 }
    }

    /// A mask with one bit for each subcluster.
    #[inline]
    pub fn all(&self) -> u32 {
        if self.extended { u32::MAX } else { 1 }
    }

    /// The mask of the subclusters that a range within a cluster touches. The range must not be empty.
    #[inline]
    pub fn touched(&self, from: u64, to: u64) -> u32 {
        let first = from >> self.subcluster_bits();
        let last = (to - 1) >> self.subcluster_bits();
        let upto = u32::MAX >> (31 - last);
        upto & !((1 << first) - 1) & self.all()
    }

    /// The number of refcounts in a block.
    #[inline]
    pub fn block_entries(&self) -> u64 {
        (self.cluster() * 8) >> self.refcount_order
    }

    /// The refcount block that counts a cluster, and the index of the cluster's refcount in it.
    #[inline]
    pub fn block_of(&self, cluster: HostCluster) -> (BlockIndex, u64) {
        let (cluster, entries) = (cluster.number(), self.block_entries());
        (BlockIndex::new(cluster / entries), cluster % entries)
    }

    /// The first cluster that a refcount block counts.
    #[inline]
    pub fn counted_by(&self, block: BlockIndex) -> HostCluster {
        HostCluster::new(block.number() * self.block_entries())
    }

    /// The unit in which changed metadata is written, in bytes.
    #[inline]
    pub fn piece(&self) -> u64 {
        PIECE.min(self.cluster())
    }

    /// The number of L1 entries that a disk of this size needs.
    pub fn l1_entries(&self, size: u64) -> u64 {
        size.div_ceil(self.table_reach())
    }

    /// The number of clusters that this many bytes occupy.
    pub fn clusters(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(cluster_bits: u32, extended: bool) -> Geometry {
        Geometry {
            cluster_bits,
            refcount_order: 4,
            extended,
            version: 3,
            external: false,
        }
    }

    #[test]
    fn slices_cover_tables_without_gaps() {
        for (bits, extended) in [(9, false), (16, false), (21, false), (14, true), (21, true)] {
            let g = geometry(bits, extended);
            let entry_bytes = 8 * g.words() as u64;
            for cluster in [0, 1, g.slice_entries(), g.table_entries() * 3 + 17] {
                let (slice, entry) = g.slice_of(GuestCluster::new(cluster));
                let (table, at) = g.table_of(slice);
                assert_eq!(table.number(), cluster / g.table_entries());
                assert_eq!(
                    g.slice_end(slice) - GuestCluster::new(cluster),
                    g.slice_entries() - entry.number() as u64
                );
                let want = cluster % g.table_entries() * entry_bytes;
                let found = at + entry.number() as u64 * entry_bytes;
                assert_eq!(found, want, "{bits} {extended}");
            }
        }
    }

    #[test]
    fn subclusters_touched() {
        let g = geometry(16, true);
        assert_eq!(g.touched(0, 1), 1);
        assert_eq!(g.touched(2047, 2049), 3);
        assert_eq!(g.touched(2048, 4096), 2);
        assert_eq!(g.touched(0, 65536), u32::MAX);
        assert_eq!(g.touched(65535, 65536), 1 << 31);
        assert_eq!(geometry(16, false).touched(5, 65536), 1);
    }
}
