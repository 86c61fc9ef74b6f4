//! Writes of nothing but zeroes, where the operator wants them found: they become write-zeroes.
//!
//! Guest memory may change while it is looked at. A guest that does that to a write under way may find
//! zeroes where it wrote something else a moment later, and has nobody else's data to harm.

use block::{Request, Segment};
use guest::Virtqueue;

use crate::disk::Disk;
use crate::slot::Slot;

/// Bytes that are looked at first: most writes betray themselves there.
const FIRST: usize = 64;
const CHUNK: usize = 4096;

/// Makes a write that starts a write-zeroes, if that is all that it does. Once, so that what the
/// backing does not support can go the plain way. Looks at `left` more bytes at most: false if there are
/// more, for another turn.
#[inline]
pub(crate) fn detect(disk: &Disk, ring: &Virtqueue, slot: &mut Slot, left: &mut u64) -> bool {
    let Request::Write { at, len } = slot.request else {
        return true;
    };
    if slot.detected || slot.left != len || !disk.detects_zeroes() {
        return true;
    }
    if slot.zeroes == 0 && !begins_with_zeroes(ring, slot.segments()) {
        return true;
    }
    let found = zeroes_from(ring, slot.segments(), slot.zeroes, left);
    match found {
        None => {}
        Some(zeroes) if zeroes < len => {
            slot.zeroes = zeroes;
            return false;
        }
        Some(_) => {
            slot.detected = true;
            let unmap = disk.detected_unmap();
            slot.request = Request::WriteZeroes { at, len, unmap };
        }
    }
    slot.zeroes = 0;
    true
}

/// The backing cannot do it: makes it the write again that it was.
pub(crate) fn undo(disk: &Disk, slot: &mut Slot) {
    if let Request::WriteZeroes { at, len, .. } = slot.request {
        disk.stop_detecting_zeroes();
        slot.request = Request::Write { at, len };
    }
}

/// What the guest asked for.
#[inline]
pub(crate) fn asked(slot: &Slot) -> Request {
    match slot.request {
        Request::WriteZeroes { at, len, .. } if slot.detected => Request::Write { at, len },
        request => request,
    }
}

fn begins_with_zeroes(ring: &Virtqueue, segments: &[Segment]) -> bool {
    let first = segments.first();
    first.is_some_and(|s| is_zero(ring, s.addr, s.len.min(FIRST)))
}

/// How many bytes from the start on are known to be zeroes, after looking at `left` more behind `known`;
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
