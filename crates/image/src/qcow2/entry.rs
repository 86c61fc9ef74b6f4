//! L1 and L2 entries (docs/interop/qcow2 "Cluster mapping", "Extended L2 Entries").

use super::geometry::Geometry;
use super::types::{HOST_BITS, HostOffset, Run};

/// Of an L1 or L2 entry: the refcount of the table or cluster that it refers to is 1.
pub(crate) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
/// Bits 9 to 55 of an entry.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bits of a standard L2 entry that must be 0.
const RESERVED: u64 = 0x3f00_0000_0000_01fe;
/// Only in memory: the entry refers to a metadata cluster. Uses one of the reserved bits.
pub(crate) const BAD: u64 = 1 << 61;

/// The L2 table of an L1 entry, if it has one.
///
/// # Errors
/// The entry is invalid.
#[inline]
pub(crate) fn table_at(geometry: &Geometry, entry: u64) -> Result<Option<HostOffset>, BadEntry> {
    let at = entry & OFFSET;
    if entry & !(OFFSET | COPIED) != 0 || !at.is_multiple_of(geometry.cluster()) {
        return Err(BadEntry);
    }
    if at == 0 {
        // The header is not a table.
        return if entry == 0 { Ok(None) } else { Err(BadEntry) };
    }
    Ok(Some(HostOffset::new(at)))
}

/// The entry is invalid: reserved bits are set, or its offset is not that of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadEntry;

/// A decoded L2 entry. Images without subclusters are treated as having one per cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    Standard(Standard),
    Compressed(Compressed),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Standard {
    /// Offset of the host cluster.
    pub host: Option<HostOffset>,
    /// The host cluster has no other user, and can be written in place.
    pub is_exclusive: bool,
    /// Subclusters with data in the host cluster.
    pub data: u32,
    /// Subclusters that read as zeroes. Those in neither mask read from the backing file.
    pub zero: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Compressed {
    /// Where the compressed bytes begin.
    pub at: HostOffset,
    /// The upper bound of their length.
    pub len: u64,
    word: u64,
}

/// The kind of a run of bytes within a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// In the file, from this offset.
    Data(HostOffset),
    Zero,
    Compressed(Compressed),
    /// In the backing file, if there is one.
    Hole,
}

impl Entry {
    pub const NONE: Self = Self::Standard(Standard {
        host: None,
        is_exclusive: false,
        data: 0,
        zero: 0,
    });

    /// # Errors
    /// The entry is invalid.
    #[inline]
    pub fn decode(g: &Geometry, word: u64, bitmap: u64) -> Result<Self, BadEntry> {
        if word & COMPRESSED != 0 {
            return Compressed::decode(g, word).map(Self::Compressed);
        }
        let at = word & OFFSET;
        // In an external data file, every cluster has its own fixed offset.
        let is_exclusive = word & COPIED != 0 || g.external && at != 0;
        let has_bad_bits = word & RESERVED != 0 || !at.is_multiple_of(g.cluster());
        // Offset 0 is that of the header, or of the first cluster of an external file.
        let host = (at != 0 || g.external && is_exclusive).then_some(HostOffset::new(at));
        let (data, zero) = if g.extended {
            (bitmap as u32, (bitmap >> 32) as u32)
        } else {
            let zero = word & ZERO != 0;
            (u32::from(host.is_some() && !zero), u32::from(zero))
        };
        let is_zero_flag_invalid = word & ZERO != 0 && (g.extended || g.version < 3);
        let lacks_host = host.is_none() && (data != 0 || is_exclusive);
        if has_bad_bits || is_zero_flag_invalid || lacks_host || data & zero != 0 {
            return Err(BadEntry);
        }
        Ok(Self::Standard(Standard {
            host,
            is_exclusive,
            data,
            zero,
        }))
    }

    /// The words of the entry; only extended entries have the second.
    pub fn encode(self, g: &Geometry) -> [u64; 2] {
        match self {
            Self::Compressed(c) => [c.word, 0],
            Self::Standard(s) => {
                let copied = if s.is_exclusive { COPIED } else { 0 };
                let word = s.host.unwrap_or_default().bytes() | copied;
                if g.extended {
                    [word, u64::from(s.zero) << 32 | u64::from(s.data)]
                } else {
                    [word | u64::from(s.zero & 1), 0]
                }
            }
        }
    }

    /// The kind of data at an offset within the cluster, and for how many bytes that holds.
    #[inline]
    pub fn at(&self, g: &Geometry, offset: u64) -> (Kind, u64) {
        let s = match self {
            Self::Compressed(c) => return (Kind::Compressed(*c), g.cluster() - offset),
            Self::Standard(s) => s,
        };
        let sub = (offset >> g.subcluster_bits()) as u32;
        let (mask, kind) = if s.data >> sub & 1 != 0 {
            (s.data, Kind::Data(s.host.unwrap_or_default() + offset))
        } else if s.zero >> sub & 1 != 0 {
            (s.zero, Kind::Zero)
        } else {
            (!(s.data | s.zero) & g.all(), Kind::Hole)
        };
        let subclusters = u64::from((mask >> sub).trailing_ones());
        let end = (u64::from(sub) + subclusters) << g.subcluster_bits();
        (kind, end - offset)
    }

    /// Whether these subclusters can be written in place.
    #[inline]
    pub fn in_place(&self, touched: u32) -> bool {
        matches!(self, Self::Standard(s) if s.is_exclusive && s.data & touched == touched)
    }
}

impl Compressed {
    fn decode(g: &Geometry, word: u64) -> Result<Self, BadEntry> {
        if g.external || word & COPIED != 0 {
            return Err(BadEntry);
        }
        let x = 62 - (g.cluster_bits - 8);
        let at = word & ((1 << x) - 1);
        if at >> HOST_BITS != 0 {
            return Err(BadEntry);
        }
        let more_sectors = (word & (COMPRESSED - 1)) >> x;
        let len = (more_sectors + 1) * 512 - at % 512;
        let at = HostOffset::new(at);
        Ok(Self { at, len, word })
    }

    /// The host clusters that contain it.
    pub fn clusters(&self, g: &Geometry) -> Run {
        let last = (self.at + (self.len - 1)).cluster(g);
        Run::between(self.at.cluster(g), last + 1)
    }
}

#[cfg(test)]
mod tests;
