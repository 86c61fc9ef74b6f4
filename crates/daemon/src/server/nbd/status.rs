//! Answers to NBD_CMD_BLOCK_STATUS.

use std::io;
use std::time::{Duration, Instant};

use block::DirtyBitmap;
use datapath::AllocatedExtent;
use nbd::{BlockStatus, Context, EXTENTS_MAX, STATE_HOLE, STATE_ZERO};
use thiserror::Error;

/// How long one request may look for extents. Then it is answered with those that were found; the client asks for the rest.
pub const TIME_MAX: Duration = Duration::from_millis(100);

/// NBD_STATE_DIRTY of `qemu:dirty-bitmap:NAME`.
const STATE_DIRTY: u32 = 1 << 0;

/// The states of a range in one context.
pub struct States {
    pub context: Context,
    pub extents: Vec<BlockStatus>,
}

/// A bitmap cannot be queried any more.
#[derive(Debug, Error)]
#[error(
    "a dirty bitmap of the export is inconsistent now, or is not on the disk; remove the export"
)]
pub struct BitmapLost;

impl From<BitmapLost> for io::Error {
    fn from(lost: BitmapLost) -> Self {
        Self::other(lost)
    }
}

/// Returns the state of the beginning of a range, which is given by its offset and length.
type LookUp<'a> = &'a dyn Fn(u64, u64) -> io::Result<AllocatedExtent>;

/// Where the states of a context come from.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// What the disk has space for.
    Allocation(LookUp<'a>),
    /// Which image of the chain has it.
    Depth(LookUp<'a>),
    Bitmap(&'a DirtyBitmap),
}

impl Source<'_> {
    /// The state of the beginning of a range.
    fn look_up(&self, at: u64, len: u64) -> io::Result<BlockStatus> {
        let status = |len, flags| BlockStatus { len, flags };
        Ok(match self {
            Self::Allocation(look_up) => {
                let extent = look_up(at, len)?;
                let hole = if extent.is_hole {
                    STATE_HOLE | STATE_ZERO
                } else {
                    0
                };
                status(extent.len, hole)
            }
            Self::Depth(look_up) => {
                let extent = look_up(at, len)?;
                status(extent.len, extent.depth)
            }
            Self::Bitmap(bitmap) => {
                let found = bitmap.extent_within(at, len);
                let found = found.filter(|_| !bitmap.is_inconsistent());
                let (is_dirty, len) = found.ok_or(BitmapLost)?;
                status(len, if is_dirty { STATE_DIRTY } else { 0 })
            }
        })
    }

    /// The state of a block whose parts differ: data if one of them is, in the first image that has one of them, and dirty if
    /// one of them is. A client that copies such parts copies the whole block.
    fn joined(&self, one: u32, other: u32) -> u32 {
        match self {
            Self::Allocation(_) => one & other,
            Self::Depth(_) if one == 0 || other == 0 => one.max(other),
            Self::Depth(_) => one.min(other),
            Self::Bitmap(_) => one | other,
        }
    }

    /// The state of whole blocks from `at` on.
    fn whole_blocks(&self, (at, rest): (u64, u64), block: u64) -> io::Result<BlockStatus> {
        let mut extent = self.look_up(at, rest)?;
        if extent.len == rest {
            return Ok(extent);
        }
        if extent.len >= block {
            extent.len = extent.len / block * block;
            return Ok(extent);
        }
        let len = block.min(rest);
        while extent.len < len {
            let part = self.look_up(at + extent.len, len - extent.len)?;
            extent.len += part.len;
            extent.flags = self.joined(extent.flags, part.flags);
        }
        Ok(extent)
    }
}

/// The states of a range from its beginning, for each context: of all of it, of the first extent if the client wants `one`,
/// or of as much as is found until `deadline` and fits into a reply. Extents are multiples of `block`.
///
/// # Errors
/// A source failed.
pub fn states(
    sources: &[(Context, Source<'_>)],
    (at, len): (u64, u64),
    one: bool,
    block: u64,
    deadline: Instant,
) -> io::Result<Vec<States>> {
    let end = at + len;
    let mut all: Vec<States> = Vec::new();
    for &(context, source) in sources {
        let (mut at, mut extents) = (at, Vec::<BlockStatus>::new());
        // Neighbours in the same state are one extent, so there may be more look-ups than extents.
        for _ in 0..EXTENTS_MAX / sources.len() {
            if at == end || !extents.is_empty() && Instant::now() >= deadline {
                break;
            }
            let extent = source.whole_blocks((at, end - at), block)?;
            match extents.last_mut() {
                Some(last) if last.flags == extent.flags => last.len += extent.len,
                Some(_) if one => break,
                _ => extents.push(extent),
            }
            at += extent.len;
        }
        all.push(States { context, extents });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use nbd::BASE_ALLOCATION;

    use super::*;

    /// A disk whose blocks are a hole and data in turn.
    fn striped(len: u64, one: bool, deadline: Instant) -> Vec<States> {
        let look_up = |at: u64, _| {
            Ok(AllocatedExtent {
                len: 4096,
                depth: 1,
                is_hole: (at / 4096).is_multiple_of(2),
            })
        };
        let sources = [
            (BASE_ALLOCATION, Source::Allocation(&look_up)),
            (nbd::DEPTH, Source::Depth(&look_up)),
        ];
        states(&sources, (0, len), one, 512, deadline).unwrap()
    }

    #[test]
    fn extents_of_a_reply_are_limited() {
        let never = Instant::now() + Duration::from_secs(3600);
        let all = striped(40960, false, never);
        assert_eq!((all[0].extents.len(), all[1].extents.len()), (10, 1));
        assert_eq!(all[1].extents[0].len, 40960);
        let one = striped(40960, true, never);
        assert_eq!(one[0].extents.len(), 1);
        // Those of both contexts are in memory at the same time.
        let many = striped(1 << 40, false, never);
        assert_eq!(many[0].extents.len(), EXTENTS_MAX / 2);
        assert_eq!(many[1].extents[0].len, EXTENTS_MAX as u64 / 2 * 4096);
    }

    /// A client that asks for much delays neither itself nor the end of its connection.
    #[test]
    fn late_requests_have_one_extent() {
        for state in striped(1 << 40, false, Instant::now()) {
            assert_eq!(state.extents[0].len, 4096);
            assert_eq!(state.extents.len(), 1);
        }
    }

    /// Backing files may have smaller clusters than the disk has blocks.
    #[test]
    fn extents_are_whole_blocks() {
        // The lengths of the parts of a disk, each with its depth; 0 is a hole.
        let blocks = |parts: &[(u64, u32)]| {
            let all: u64 = parts.iter().map(|(len, _)| len).sum();
            let look_up = |at: u64, max: u64| {
                let mut end = 0;
                let mut parts = parts.iter();
                let part = parts.find(|(len, _)| {
                    end += len;
                    at < end
                });
                let &(_, depth) = part.unwrap();
                Ok(AllocatedExtent {
                    len: max.min(end - at),
                    depth,
                    is_hole: depth == 0,
                })
            };
            let (depth, allocation) = (Source::Depth(&look_up), Source::Allocation(&look_up));
            let (mut at, mut found) = (0, Vec::new());
            while at < all {
                let extent = depth.whole_blocks((at, all - at), 4096).unwrap();
                let hole = allocation.whole_blocks((at, all - at), 4096).unwrap();
                assert_eq!(hole.flags != 0, extent.flags == 0);
                found.push((extent.len, extent.flags));
                at += extent.len;
            }
            found
        };
        assert_eq!(blocks(&[(8192, 0), (4096, 1)]), [(8192, 0), (4096, 1)]);
        assert_eq!(
            blocks(&[(8193, 0), (4095, 1), (4096, 0)]),
            [(8192, 0), (4096, 1), (4096, 0)]
        );
        // The first part is in the second image, or in none.
        for depth in [2, 0] {
            let parts = [(3584, depth), (512, 1), (4608, 2), (3584, 0)];
            assert_eq!(blocks(&parts), [(4096, 1), (4096, 2), (4096, 2)]);
        }
        assert_eq!(blocks(&[(4096, 1), (1000, 0)]), [(4096, 1), (1000, 0)]);
        assert_eq!(blocks(&[(500, 2), (500, 1)]), [(1000, 1)]);
    }

    /// The bits may be smaller than the blocks of the disk, and some of them may be lost.
    #[test]
    fn blocks_are_dirty_if_a_part_is() {
        let bitmap = DirtyBitmap::new("b".into(), 9, 65536, true, false).unwrap();
        bitmap.mark(4096 + 512, 1);
        bitmap.mark(16384, 8192);
        let dirty = |range| {
            let sources = [(Context::of_bitmap(0), Source::Bitmap(&bitmap))];
            let never = Instant::now() + Duration::from_secs(3600);
            let states = states(&sources, range, false, 4096, never)?;
            let extents = states[0].extents.iter();
            io::Result::Ok(extents.map(|e| (e.len, e.flags)).collect::<Vec<_>>())
        };
        let all = [(4096, 0), (4096, 1), (8192, 0), (8192, 1), (40960, 0)];
        assert_eq!(dirty((0, 65536)).unwrap(), all);
        assert_eq!(dirty((20480, 8192)).unwrap(), [(4096, 1), (4096, 0)]);
        bitmap.set_inconsistent();
        assert!(dirty((0, 65536)).is_err());
    }
}
