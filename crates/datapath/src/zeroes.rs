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
/// backing does not support can go the plain way.
#[inline]
pub(crate) fn detect(disk: &Disk, ring: &Virtqueue, slot: &mut Slot) {
    if let Request::Write { at, len } = slot.request
        && !slot.detected
        && slot.left == len
        && disk.detects_zeroes()
        && all_zero(ring, slot.segments())
    {
        slot.detected = true;
        let unmap = disk.detected_unmap();
        slot.request = Request::WriteZeroes { at, len, unmap };
    }
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

fn all_zero(ring: &Virtqueue, segments: &[Segment]) -> bool {
    let mut copy = [0; CHUNK];
    let mut is_zero = |addr, len| {
        let n = ring.copy_from(&[Segment { addr, len }], &mut copy);
        copy[..n].iter().fold(0, |all, byte| all | byte) == 0
    };
    let [first, ..] = segments else {
        return false;
    };
    is_zero(first.addr, first.len.min(FIRST))
        && segments.iter().all(|s| {
            let mut chunks = (0..s.len).step_by(CHUNK);
            chunks.all(|skip| is_zero(s.addr + skip, CHUNK.min(s.len - skip)))
        })
}
