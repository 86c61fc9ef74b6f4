//! Stage 7: from completions of the engine to the status of requests. A short transfer continues where it ended.

use block::Request;
use guest::blk::Status;

use super::next::{Next, SyncResult};
use super::{mapped, submit, zeroes};
use crate::clock::now_ns;
use crate::queue::Queue;
use crate::queue::slot::RequestState;
use crate::request::{Ending, Retry};
use crate::resources::Buffers;
use crate::thread_disk::ThreadDisks;

/// Times that an operation is tried again for which the kernel lacked resources.
const RETRIES_MAX: u8 = 100;

const EINTR: i32 = -4;
const EAGAIN: i32 = -11;
const EOPNOTSUPP: i32 = -95;

/// What comes next for a request whose operation has this result: a number of bytes, or a negative errno.
#[inline(always)]
pub(crate) fn operation(queue: &mut Queue, slot: u16, result: i32) -> Next {
    let s = queue.slots.get(slot);
    s.leaves_engine();
    match (result, s.request) {
        (EINTR | EAGAIN, _) if s.retries < RETRIES_MAX => {
            s.retries += 1;
            Next::Submit
        }
        _ if s.state == RequestState::Preserving => Next::OldDataRead(result),
        _ if s.state == RequestState::Syncing => Next::Synced(SyncResult::File(-result)),
        (EOPNOTSUPP, Request::WriteZeroes { .. }) if s.is_detected_zeroes() => {
            zeroes::undo(&queue.disk, s);
            Next::Submit
        }
        (EOPNOTSUPP, Request::Discard { .. } | Request::WriteZeroes { .. }) => {
            Next::Finish(Ending {
                status: Status::Unsupported,
                result,
            })
        }
        // If no byte was moved, the file ends before the disk does.
        (..0, _) | (0, Request::Read { .. } | Request::Write { .. }) => Next::Fail {
            errno: -result,
            retry: match s.state {
                RequestState::Filling => Retry::Fill,
                _ => Retry::Operation,
            },
        },
        (moved, Request::Read { .. } | Request::Write { .. }) => {
            let moved = (moved as u64).min(s.left) as usize;
            s.retries = 0;
            if let Some(mut bounce) = s.bounce.take() {
                if let Request::Read { .. } = s.request {
                    queue.ring.copy_to(s.segments(), &bounce.bytes()[..moved]);
                }
                s.bounce = Some(bounce);
            }
            s.left -= moved as u64;
            if s.left > 0 {
                s.at.0 += moved as u64;
                if queue.file.is_none() {
                    // The whole piece may have to be looked up again.
                    queue.mapped.get(slot).keep_segments(s);
                }
                s.advance(moved);
                Next::Submit
            } else if queue.file.is_none() {
                Next::PieceMoved
            } else {
                Next::Moved
            }
        }
        _ => Next::Moved,
    }
}

/// Completes a request that was held back, and needs no I/O.
pub(crate) fn answer(queue: &mut Queue, slot: u16, status: Status, written: u32) {
    let s = queue.slots.get(slot);
    let (ticket, request, stamps) = (s.ticket, s.request, s.stamps);
    queue.tally.answered(&request, status, stamps);
    queue.slots.give_back(slot);
    if !queue.is_retired() {
        queue.ring.complete(&ticket, status as u8, written + 1);
    }
}

/// A request that has ended: the guest will be told of it.
pub(crate) struct Finished {
    /// It was stalled, and does not count as stalled any more.
    pub was_stalled: bool,
}

/// Gives back what a request has, and puts its status into the used ring. It has no clusters to be given back. `reaped_ns`
/// is when its completion was reaped; 0 until a request of the batch asks for it.
#[inline(always)]
pub(crate) fn finish(
    queue: &mut Queue,
    slot: u16,
    disks: &mut ThreadDisks,
    buffers: &mut Buffers,
    reaped_ns: &mut u64,
    status: Status,
) -> Finished {
    mapped::release(queue, slot, disks, buffers);
    let s = queue.slots.get(slot);
    submit::release_bounce(s, queue.thread_disk, disks, &mut buffers.bounce);
    let written = match status {
        Status::Ok => s.written + 1,
        _ => 1,
    };
    let ticket = s.ticket;
    let request = s.requested();
    queue.tally.finished(&request, status);
    let mut was_stalled = false;
    if s.stamps.fetched > 0 {
        if *reaped_ns == 0 {
            *reaped_ns = now_ns();
        }
        queue.tally.measured(&request, s.stamps, *reaped_ns);
        // A request that was stalled has stamps, whether it is measured or not.
        was_stalled = std::mem::take(&mut s.counts_as_stalled);
    }
    queue.slots.give_back(slot);
    if queue.is_retired() {
        queue.ring.abandon(&ticket);
    } else {
        queue.ring.complete(&ticket, status as u8, written);
    }
    Finished { was_stalled }
}
