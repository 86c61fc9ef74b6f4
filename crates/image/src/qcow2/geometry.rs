use block::GuestOffset;

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
pub mod tests {
    use super::*;

    pub fn geometry(cluster_bits: u32, extended: bool) -> Geometry {
        Geometry {
            cluster_bits,
            refcount_order: 4,
            extended,
            version: 3,
            external: false,
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
