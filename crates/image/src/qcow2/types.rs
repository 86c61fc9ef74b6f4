//! One type per coordinate: an offset on the disk is none in the file, a byte is no cluster, and the compiler knows it.
//!
//! A coordinate is made of a number by `new`, where its meaning is known, and turned into another by a method that
//! says which. Where the number comes from the file, [`HostOffset::of_cluster`] checks it; all other arithmetic is
//! that of `u64`, for values that were checked. All of it compiles to what it would be without the types.

use std::ops::{Add, Sub};

use block::FileOffset;

use super::geometry::Geometry;

/// Offsets in a file that a table entry can hold have so many bits.
pub(crate) const HOST_BITS: u32 = 56;

/// Defines a coordinate: a number in a type of its own, to which a distance can be added.
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
    /// A position on the guest's disk, in bytes.
    GuestOffset,
    bytes
);

coordinate!(
    /// A cluster of the disk, counted from its start.
    GuestCluster,
    number
);

coordinate!(
    /// An entry of the L1 table, and the L2 table that it leads to.
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
    /// A refcount block, by the number of its entry in the refcount table.
    BlockIndex,
    number
);

impl GuestOffset {
    /// The cluster that it is in.
    #[inline]
    pub fn cluster(self, g: &Geometry) -> GuestCluster {
        GuestCluster(self.0 >> g.cluster_bits)
    }

    /// Bytes of its cluster before it.
    #[inline]
    pub fn in_cluster(self, g: &Geometry) -> u64 {
        self.0 & (g.cluster() - 1)
    }

    /// The same place in an external data file.
    #[inline]
    pub fn in_data_file(self) -> HostOffset {
        HostOffset(self.0)
    }

    /// The byte before, of an end that is not that of an empty range.
    #[inline]
    pub fn before(self) -> Self {
        Self(self.0 - 1)
    }

    /// The multiple of `unit` at or before it; `unit` is a power of two.
    #[inline]
    pub fn down_to(self, unit: u64) -> Self {
        Self(self.0 & !(unit - 1))
    }

    /// The multiple of `unit` at or behind it.
    #[inline]
    pub fn up_to(self, unit: u64) -> Self {
        Self(self.0.next_multiple_of(unit))
    }
}

impl GuestCluster {
    /// Where it begins.
    #[inline]
    pub fn start(self, g: &Geometry) -> GuestOffset {
        GuestOffset(self.0 << g.cluster_bits)
    }

    /// The one before, of a cluster that is not the first.
    #[inline]
    pub fn before(self) -> Self {
        Self(self.0 - 1)
    }
}

impl L2Index {
    #[inline]
    pub const fn new(number: usize) -> Self {
        Self(number)
    }

    #[inline]
    pub const fn number(self) -> usize {
        self.0
    }
}

impl HostOffset {
    /// The header's, and the start of an external data file.
    pub const START: Self = Self(0);

    /// A number from the file, if a cluster can be there.
    #[inline]
    pub fn of_cluster(bytes: u64, g: &Geometry) -> Option<Self> {
        Some(Self(bytes)).filter(|at| at.is_of_cluster(g.cluster()))
    }

    /// Whether a cluster of so many bytes can be there.
    #[inline]
    pub fn is_of_cluster(self, cluster_bytes: u64) -> bool {
        self.0.is_multiple_of(cluster_bytes) && self.0 >> HOST_BITS == 0
    }

    /// The cluster that it is in.
    #[inline]
    pub fn cluster(self, g: &Geometry) -> HostCluster {
        HostCluster(self.0 >> g.cluster_bits)
    }

    /// The same for a [`Storage`](crate::Storage).
    #[inline]
    pub fn in_file(self) -> FileOffset {
        FileOffset(self.0)
    }

    /// How far it is behind `before`, or 0.
    #[inline]
    pub fn distance_from(self, before: Self) -> u64 {
        self.0.saturating_sub(before.0)
    }

    /// The multiple of `unit` at or before it.
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
}

/// Clusters beside each other in the file.
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

    /// The clusters from one to another, which is not one of them.
    pub fn between(first: HostCluster, end: HostCluster) -> Self {
        Self {
            first,
            clusters: end - first,
        }
    }

    /// The cluster behind the last.
    pub fn end(&self) -> HostCluster {
        HostCluster(self.first.0.saturating_add(self.clusters))
    }

    /// Which of the clusters this is, counted from 0.
    pub fn place_of(&self, cluster: HostCluster) -> Option<usize> {
        let inside = self.first <= cluster && cluster < self.end();
        inside.then(|| (cluster - self.first) as usize)
    }

    /// Each of the clusters.
    pub fn each(self) -> impl Iterator<Item = HostCluster> {
        (self.first.0..self.end().0).map(HostCluster)
    }
}
