//! Answers to NBD_CMD_BLOCK_STATUS.

use std::io;
use std::time::{Duration, Instant};

use datapath::AllocatedExtent;
use nbd::{BASE_ALLOCATION, BlockStatus, Context, EXTENTS_MAX, STATE_HOLE, STATE_ZERO};

/// How long one request may look for extents. Then it is answered with those that were found; the client asks for the rest.
pub const TIME_MAX: Duration = Duration::from_millis(100);

/// The states of a range in one context.
pub struct States {
    pub context: Context,
    pub extents: Vec<BlockStatus>,
}

/// The states of a range from its beginning, for each context: of all of it, of the first extent if the client wants `one`,
/// or of as much as is found until `deadline` and fits into a reply. Extents are multiples of `block`. `look_up` returns the
/// state of the beginning of a range.
///
/// # Errors
/// `look_up` failed.
pub fn states(
    look_up: impl Fn(u64, u64) -> io::Result<AllocatedExtent>,
    contexts: &[Context],
    (at, len): (u64, u64),
    one: bool,
    block: u64,
    deadline: Instant,
) -> io::Result<Vec<States>> {
    let end = at + len;
    let mut all: Vec<States> = Vec::new();
    for &context in contexts {
        let (mut at, mut extents) = (at, Vec::<BlockStatus>::new());
        // Neighbours in the same state are one extent, so there may be more look-ups than extents.
        for _ in 0..EXTENTS_MAX / contexts.len() {
            if at == end || !extents.is_empty() && Instant::now() >= deadline {
                break;
            }
            let extent = whole_blocks(&look_up, (at, end - at), block)?;
            let len = extent.len;
            let flags = flags(context, &extent);
            match extents.last_mut() {
                Some(last) if last.flags == flags => last.len += len,
                Some(_) if one => break,
                _ => extents.push(BlockStatus { len, flags }),
            }
            at += len;
        }
        all.push(States { context, extents });
    }
    Ok(all)
}

/// The state of whole blocks from `at` on. A block whose parts differ is data if one of them is, and in the first image that
/// has one of them: a client that copies what is in an image copies the whole block.
fn whole_blocks(
    look_up: &impl Fn(u64, u64) -> io::Result<AllocatedExtent>,
    (at, rest): (u64, u64),
    block: u64,
) -> io::Result<AllocatedExtent> {
    let mut extent = look_up(at, rest)?;
    if extent.len == rest {
        return Ok(extent);
    }
    if extent.len >= block {
        extent.len = extent.len / block * block;
        return Ok(extent);
    }
    let len = block.min(rest);
    while extent.len < len {
        let part = look_up(at + extent.len, len - extent.len)?;
        extent.len += part.len;
        extent.is_hole &= part.is_hole;
        extent.depth = match (extent.depth, part.depth) {
            (0, depth) | (depth, 0) => depth,
            (one, other) => one.min(other),
        };
    }
    Ok(extent)
}

fn flags(context: Context, extent: &AllocatedExtent) -> u32 {
    if context != BASE_ALLOCATION {
        extent.depth
    } else if extent.is_hole {
        STATE_HOLE | STATE_ZERO
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk whose blocks are a hole and data in turn.
    fn striped(contexts: &[Context], len: u64, one: bool, deadline: Instant) -> Vec<States> {
        let look_up = |at: u64, _| {
            Ok(AllocatedExtent {
                len: 4096,
                depth: 1,
                is_hole: (at / 4096).is_multiple_of(2),
            })
        };
        states(look_up, contexts, (0, len), one, 512, deadline).unwrap()
    }

    #[test]
    fn extents_of_a_reply_are_limited() {
        let both = [BASE_ALLOCATION, nbd::DEPTH];
        let never = Instant::now() + Duration::from_secs(3600);
        let all = striped(&both, 40960, false, never);
        assert_eq!((all[0].extents.len(), all[1].extents.len()), (10, 1));
        assert_eq!(all[1].extents[0].len, 40960);
        let one = striped(&both, 40960, true, never);
        assert_eq!(one[0].extents.len(), 1);
        // Those of both contexts are in memory at the same time.
        let many = striped(&both, 1 << 40, false, never);
        assert_eq!(many[0].extents.len(), EXTENTS_MAX / 2);
        assert_eq!(many[1].extents[0].len, EXTENTS_MAX as u64 / 2 * 4096);
    }

    /// A client that asks for much delays neither itself nor the end of its connection.
    #[test]
    fn late_requests_have_one_extent() {
        let contexts = [BASE_ALLOCATION, nbd::DEPTH];
        for state in striped(&contexts, 1 << 40, false, Instant::now()) {
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
            let (mut at, mut found) = (0, Vec::new());
            while at < all {
                let extent = whole_blocks(&look_up, (at, all - at), 4096).unwrap();
                assert_eq!(extent.is_hole, extent.depth == 0);
                found.push((extent.len, extent.depth));
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
}
