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
            let extent = look_up(at, end - at)?;
            let (len, extent) = whole_blocks(extent, block, end - at);
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

/// What is smaller than a block counts as data.
fn whole_blocks(extent: AllocatedExtent, block: u64, rest: u64) -> (u64, AllocatedExtent) {
    let len = extent.len / block * block;
    if extent.len == rest {
        return (rest, extent);
    }
    match extent {
        AllocatedExtent { is_hole: true, .. } if len > 0 => (len, extent),
        _ => {
            let is_hole = false;
            let len = extent.len.next_multiple_of(block).min(rest);
            (len, AllocatedExtent { is_hole, ..extent })
        }
    }
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

    #[test]
    fn extents_are_whole_blocks() {
        let extent = |len, is_hole| AllocatedExtent {
            len,
            depth: 1,
            is_hole,
        };
        let blocks = |len, is_hole, rest| {
            let (len, extent) = whole_blocks(extent(len, is_hole), 4096, rest);
            (len, extent.is_hole)
        };
        assert_eq!(blocks(8192, true, 1 << 20), (8192, true));
        assert_eq!(blocks(8193, true, 1 << 20), (8192, true));
        assert_eq!(blocks(4095, true, 1 << 20), (4096, false));
        assert_eq!(blocks(8193, false, 1 << 20), (12288, false));
        assert_eq!(blocks(1000, true, 1000), (1000, true));
    }
}
