//! Stage 5: engine operations on the guest's own memory, or on a bounce buffer where that is not aligned as the backing
//! needs it.

use block::{Engine, Op, Request, Segment};
use guest::Virtqueue;

use super::next::Next;
use super::zeroes;
use crate::queue::Queue;
use crate::queue::slot::{RequestState, Slot};
use crate::queue::token::token;
use crate::request::RequestId;
use crate::resources::bounce::{self, BOUNCE_BYTES, BouncePool};
use crate::thread_disk::ThreadDisks;

/// Submits the operation that a request needs next. The engine has room for it.
#[inline(always)]
pub(crate) fn submit<E: Engine>(
    engine: &mut E,
    id: RequestId,
    queue: &mut Queue,
    disks: &mut ThreadDisks,
    pool: &mut BouncePool,
    zero_budget: &mut u64,
) -> Next {
    let s = queue.slots.get(id.slot);
    if s.state == RequestState::Preserving {
        return preserve(engine, id, queue);
    }
    let file = match queue.file {
        Some(_) if !zeroes::detect(&queue.disk, &queue.ring, s, zero_budget) => {
            return Next::WaitForTurn;
        }
        Some(file) => file,
        None => queue.mapped.get(id.slot).file,
    };
    let stable = queue.disk.writes_are_stable();
    s.needs_sync |= !stable || !matches!(s.request, Request::Write { .. });
    let mut bounced = [Segment { addr: 0, len: 0 }];
    // What a copy-on-write reads goes to a buffer that is aligned.
    if s.state == RequestState::Moving
        && let Request::Read { .. } | Request::Write { .. } = s.request
        && (s.bounce.is_some()
            || !bounce::is_aligned(s.segments(), queue.alignment.address, queue.alignment.len))
    {
        let disk = disks.get(queue.thread_disk);
        match prepare_bounce(s, &mut queue.ring, &mut disk.bounces, pool) {
            Some(segment) => bounced = [segment],
            None => return Next::WaitForBuffer,
        }
    }
    s.enters_engine();
    let (at, len) = (s.at, s.left);
    let segments = match bounced[0].len {
        0 => s.segments(),
        _ => &bounced,
    };
    let op = match s.request {
        _ if s.state == RequestState::Syncing => Op::Flush,
        Request::Write { .. } if s.state == RequestState::Filling => Op::Read { at, to: segments },
        Request::Read { .. } => Op::Read { at, to: segments },
        Request::Write { .. } => Op::Write {
            at,
            from: segments,
            stable,
        },
        Request::Flush | Request::GetId => Op::Flush,
        Request::Discard { .. } => Op::Discard {
            at,
            len,
            stable: false,
        },
        Request::WriteZeroes { unmap, .. } => Op::WriteZeroes {
            at,
            len,
            unmap,
            stable: false,
        },
    };
    // SAFETY: the segments lie in guest memory, which the queue's ring keeps mapped, or in a bounce buffer that the slot
    // owns, or in the copy-on-write buffer that the mapped request owns. The list itself is in the slot, or in `bounced`, of
    // which an engine copies a single segment. Queue and slot stay where they are until the completion has been reaped: a
    // queue is dropped only when no slot is taken.
    #[expect(unsafe_code, reason = "the kernel works on the guest's memory")]
    unsafe {
        engine.submit(file, op, token(id));
    }
    Next::InProgress
}

/// Submits the read of old data that a request changes; or has a request that waited for a buffer continue.
#[cold]
#[inline(never)]
fn preserve<E: Engine>(engine: &mut E, id: RequestId, queue: &mut Queue) -> Next {
    let preserving = &queue.preserving[usize::from(id.slot)];
    let (file, at, done) = (preserving.file, preserving.at, preserving.done());
    let len = preserving.len as usize;
    let s = queue.slots.get(id.slot);
    let (true, Some(bounce)) = (preserving.is_copying(), &mut s.bounce) else {
        return Next::Preserve;
    };
    let to = [bounce.segment_at(done, len)];
    s.enters_engine();
    let op = Op::Read { at, to: &to };
    // SAFETY: the segment lies in a bounce buffer that the slot owns until the completion has been reaped; an engine copies
    // a list of a single segment.
    #[expect(unsafe_code, reason = "the kernel reads into a bounce buffer")]
    unsafe {
        engine.submit(file, op, token(id));
    }
    Next::InProgress
}

/// A bounce buffer for the next bytes of a request, filled if it is a write; `None` if no buffer is free.
#[cold]
fn prepare_bounce(
    s: &mut Slot,
    ring: &mut Virtqueue,
    disk_bounces: &mut usize,
    pool: &mut BouncePool,
) -> Option<Segment> {
    let mut bounce = match s.bounce.take() {
        Some(bounce) => bounce,
        None => pool.take(disk_bounces)?,
    };
    let len = (s.left).min(BOUNCE_BYTES as u64) as usize;
    if let Request::Write { .. } = s.request {
        ring.copy_from(s.segments(), &mut bounce.bytes()[..len]);
    }
    let segment = bounce.segment(len);
    s.bounce = Some(bounce);
    Some(segment)
}

/// Gives back the bounce buffer that a request has, if any.
#[inline]
pub(crate) fn release_bounce(
    s: &mut Slot,
    thread_disk: usize,
    disks: &mut ThreadDisks,
    pool: &mut BouncePool,
) {
    if let Some(bounce) = s.bounce.take() {
        pool.give_back(bounce, &mut disks.get(thread_disk).bounces);
    }
}
