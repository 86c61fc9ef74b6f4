//! Writes of nothing but zeroes, where the operator wants them found: they become write-zeroes.
//!
//! Guest memory may change while it is looked at. A guest that does that to a write under way may find
//! zeroes where it wrote something else a moment later, and has nobody else's data to harm.

use block::{Request, Segment};
use guest::Virtqueue;

use crate::disk::Disk;
use crate::queue::slot::{Slot, ZeroSearch};

/// Bytes that are looked at first: most writes betray themselves there.
const FIRST: usize = 64;
const CHUNK: usize = 4096;

/// Makes a write-zeroes of a write that starts, if it writes nothing but zeroes. Each write is looked at once, so that it
/// stays a write where the backing does not support write-zeroes. Looks at `budget` more bytes at most; false if there are
/// more, for another turn.
#[inline]
pub(crate) fn detect(disk: &Disk, ring: &Virtqueue, slot: &mut Slot, budget: &mut u64) -> bool {
    let Request::Write { at, len } = slot.request else {
        return true;
    };
    let ZeroSearch::Known(known) = slot.zero_search else {
        return true;
    };
    if slot.left != len || !disk.detects_zeroes() {
        return true;
    }
    if known == 0 && !begins_with_zeroes(ring, slot.segments()) {
        return true;
    }
    match zeroes_from(ring, slot.segments(), known, budget) {
        None => slot.zero_search = ZeroSearch::Known(0),
        Some(zeroes) if zeroes < len => {
            slot.zero_search = ZeroSearch::Known(zeroes);
            return false;
        }
        Some(_) => {
            slot.zero_search = ZeroSearch::Found;
            let unmap = disk.detected_unmap();
            slot.request = Request::WriteZeroes { at, len, unmap };
        }
    }
    true
}

/// The backing does not support write-zeroes: the request is a write again.
pub(crate) fn undo(disk: &Disk, slot: &mut Slot) {
    if let Request::WriteZeroes { at, len, .. } = slot.request {
        disk.stop_detecting_zeroes();
        slot.request = Request::Write { at, len };
    }
}

fn begins_with_zeroes(ring: &Virtqueue, segments: &[Segment]) -> bool {
    let first = segments.first();
    first.is_some_and(|s| is_zero(ring, s.addr, s.len.min(FIRST)))
}

/// How many bytes from the start on are known to be zeroes, after looking at `left` more after the first `known`;
/// `None` if there is anything else.
fn zeroes_from(ring: &Virtqueue, segments: &[Segment], known: u64, left: &mut u64) -> Option<u64> {
    let (mut done, mut skip) = (known, known);
    for s in segments {
        let mut at = skip.min(s.len as u64) as usize;
        skip -= at as u64;
        while at < s.len {
            if *left == 0 {
                return Some(done);
            }
            let n = CHUNK.min(s.len - at);
            if !is_zero(ring, s.addr + at, n) {
                return None;
            }
            *left = left.saturating_sub(n as u64);
            done += n as u64;
            at += n;
        }
    }
    Some(done)
}

fn is_zero(ring: &Virtqueue, addr: usize, len: usize) -> bool {
    let mut copy = [0; CHUNK];
    let n = ring.copy_from(&[Segment { addr, len }], &mut copy);
    copy[..n].iter().fold(0, |all, byte| all | byte) == 0
}
