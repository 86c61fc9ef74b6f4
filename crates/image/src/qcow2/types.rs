//! One type per coordinate, so that the compiler rejects an offset on the disk where one in the file is meant, or
//! a byte offset where a cluster number is.
//!
//! `new` makes a coordinate from a number, and named methods convert it into another one. Numbers that come from
//! the file are checked by [`HostOffset::of_cluster`] or [`HostOffset::is_of_cluster`]; all other arithmetic is plain
//! `u64` arithmetic on checked values. The types cost nothing at run time.

use std::ops::{Add, AddAssign, Sub};

use block::{FileOffset, GuestOffset};

use super::geometry::Geometry;

/// Bits of the offsets that table entries can hold.
pub(crate) const HOST_BITS: u32 = 56;

/// Defines a coordinate: a number to which a distance can be added.
macro_rules! coordinate {
    ($(#[$doc:meta])* $name:ident, $number:ident) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(crate) struct $name(u64);

        impl $name {
            #[inline]
            pub const fn new($number: u64) -> Self {
                Self($number)
            }

            #[inline]
            pub const fn $number(self) -> u64 {
                self.0
            }
        }

        impl Add<u64> for $name {
            type Output = Self;

            #[inline]
            fn add(self, distance: u64) -> Self {
                Self(self.0 + distance)
            }
        }

        impl AddAssign<u64> for $name {
            #[inline]
            fn add_assign(&mut self, distance: u64) {
                self.0 += distance;
            }
        }

        impl Sub for $name {
            type Output = u64;

            #[inline]
            fn sub(self, before: Self) -> u64 {
                self.0 - before.0
            }
        }
    };
}

coordinate!(
    /// A position in the image's file, or in its data file if there is one, in bytes.
    HostOffset,
    bytes
);

coordinate!(
    /// A cluster of the file, counted from its start.
    HostCluster,
    number
);

coordinate!(
    /// A cluster of the disk, counted from its start.
    GuestCluster,
    number
);

coordinate!(
    /// An entry of the L1 table, and the L2 table that it refers to.
    L1Index,
    number
);

coordinate!(
    /// A slice of an L2 table, counted over the whole disk.
    SliceIndex,
    number
);

/// An entry of an L2 table, counted from the start of its slice.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct L2Index(usize);

coordinate!(
    /// A refcount, counted from the start of its block.
    RefcountIndex,
    number
);

coordinate!(
    /// A piece of a table, counted from its start: the unit in which changed metadata is written.
    PieceIndex,
    number
);

/// A frame of the cache of slices.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Frame(pub usize);

coordinate!(
    /// A refcount block, by the number of its entry in the refcount table.
    BlockIndex,
    number
);

impl GuestCluster {
    /// The cluster that contains `at`.
    #[inline]
    pub fn of(at: GuestOffset, g: &Geometry) -> Self {
        Self(at.0 >> g.cluster_bits)
    }

    /// Where it begins.
    #[inline]
    pub fn start(self, g: &Geometry) -> GuestOffset {
        GuestOffset(self.0 << g.cluster_bits)
    }

    /// The cluster before; not for cluster 0.
    #[inline]
    pub fn before(self) -> Self {
        Self(self.0 - 1)
    }

    /// The slice that maps it, and the index of its entry in the slice.
    #[inline]
    pub fn slice(self, g: &Geometry) -> (SliceIndex, L2Index) {
        let entries = g.slice_entries();
        (
            SliceIndex(self.0 / entries),
            L2Index((self.0 % entries) as usize),
        )
    }
}

impl SliceIndex {
    /// The first cluster after those that it maps.
    #[inline]
    pub fn end(self, g: &Geometry) -> GuestCluster {
        GuestCluster((self.0 + 1) * g.slice_entries())
    }

    /// The L2 table that it belongs to, and its offset in the table, in bytes.
    #[inline]
    pub fn table(self, g: &Geometry) -> (L1Index, u64) {
        let slices = g.cluster() / g.slice_bytes();
        (L1Index(self.0 / slices), self.0 % slices * g.slice_bytes())
    }
}

impl L1Index {
    /// The first byte of the disk that its L2 table maps.
    #[inline]
    pub fn start(self, g: &Geometry) -> GuestOffset {
        GuestOffset(self.0 * g.table_reach())
    }

    /// The piece of the L1 table that contains its entry.
    pub fn piece(self, g: &Geometry) -> PieceIndex {
        PieceIndex::of(self.0 * 8, g)
    }
}

impl PieceIndex {
    /// The piece that contains a byte of a table.
    pub fn of(byte: u64, g: &Geometry) -> Self {
        Self(byte / g.piece())
    }

    /// Where it begins in its table, in bytes.
    pub fn start(self, g: &Geometry) -> u64 {
        self.0 * g.piece()
    }
}

impl L2Index {
    #[inline]
    pub const fn number(self) -> usize {
        self.0
    }
}

impl HostOffset {
    /// The offset of the header, and of the start of an external data file.
    pub const START: Self = Self(0);

    /// Checks a number from the file: an offset where a cluster can be.
    #[inline]
    pub fn of_cluster(bytes: u64, g: &Geometry) -> Option<Self> {
        Some(Self(bytes)).filter(|at| at.is_of_cluster(g.cluster()))
    }

    /// Whether a cluster of `cluster_bytes` can be at this offset.
    #[inline]
    pub fn is_of_cluster(self, cluster_bytes: u64) -> bool {
        self.0.is_multiple_of(cluster_bytes) && self.0 >> HOST_BITS == 0
    }

    /// The offset in an external data file of a position on the disk, which is the same.
    #[inline]
    pub fn in_data_file(at: GuestOffset) -> Self {
        Self(at.0)
    }

    /// The cluster that contains it.
    #[inline]
    pub fn cluster(self, g: &Geometry) -> HostCluster {
        HostCluster(self.0 >> g.cluster_bits)
    }

    /// The same offset, for a [`Storage`](crate::Storage).
    #[inline]
    pub fn in_file(self) -> FileOffset {
        FileOffset(self.0)
    }

    /// The distance from `before`, or 0 if this is less.
    #[inline]
    pub fn distance_from(self, before: Self) -> u64 {
        self.0.saturating_sub(before.0)
    }

    /// Rounds down to a multiple of `unit`.
    #[inline]
    pub fn down_to(self, unit: u64) -> Self {
        Self(self.0 / unit * unit)
    }
}

impl HostCluster {
    /// Where it begins.
    #[inline]
    pub fn start(self, g: &Geometry) -> HostOffset {
        HostOffset(self.0 << g.cluster_bits)
    }

    /// The refcount block that counts it, and the index of its refcount in the block.
    #[inline]
    pub fn refcount_at(self, g: &Geometry) -> (BlockIndex, RefcountIndex) {
        let entries = g.block_entries();
        (
            BlockIndex(self.0 / entries),
            RefcountIndex(self.0 % entries),
        )
    }
}

impl BlockIndex {
    /// The first cluster that it counts.
    #[inline]
    pub fn first(self, g: &Geometry) -> HostCluster {
        HostCluster(self.0 * g.block_entries())
    }

    /// The piece of the refcount table that contains its entry.
    pub fn piece(self, g: &Geometry) -> PieceIndex {
        PieceIndex::of(self.0 * 8, g)
    }
}

/// A contiguous run of clusters in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub first: HostCluster,
    pub clusters: u64,
}

impl Run {
    pub fn one(cluster: HostCluster) -> Self {
        Self {
            first: cluster,
            clusters: 1,
        }
    }

    /// The clusters from `first` up to, but not including, `end`.
    pub fn between(first: HostCluster, end: HostCluster) -> Self {
        Self {
            first,
            clusters: end - first,
        }
    }

    /// The cluster after the last.
    pub fn end(&self) -> HostCluster {
        HostCluster(self.first.0.saturating_add(self.clusters))
    }

    /// The position of a cluster in the run, if it is in it.
    pub fn position(&self, cluster: HostCluster) -> Option<usize> {
        let inside = self.first <= cluster && cluster < self.end();
        inside.then(|| (cluster - self.first) as usize)
    }

    /// Each of the clusters.
    pub fn each(self) -> impl Iterator<Item = HostCluster> {
        (self.first.0..self.end().0).map(HostCluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::geometry::tests::geometry;

    #[test]
    fn slices_cover_tables_without_gaps() {
        for (bits, extended) in [(9, false), (16, false), (21, false), (14, true), (21, true)] {
            let g = geometry(bits, extended);
            let entry_bytes = 8 * g.words() as u64;
            for cluster in [0, 1, g.slice_entries(), g.table_entries() * 3 + 17] {
                let (slice, entry) = GuestCluster::new(cluster).slice(&g);
                let (table, at) = slice.table(&g);
                assert_eq!(table.number(), cluster / g.table_entries());
                assert_eq!(
                    slice.end(&g) - GuestCluster::new(cluster),
                    g.slice_entries() - entry.number() as u64
                );
                let want = cluster % g.table_entries() * entry_bytes;
                let found = at + entry.number() as u64 * entry_bytes;
                assert_eq!(found, want, "{bits} {extended}");
            }
        }
    }
}
