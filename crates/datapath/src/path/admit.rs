//! Stage 2: requests that a limit holds back wait until it lets them go.
//!
//! A disk without limits pays one look per batch. With limits, each request takes [a slot](crate::queue::held) as soon as
//! it is fetched, and waits there. A timer wakes the thread.

use block::{Request, Segment};
use guest::Ticket;

use crate::clock::now_ns;
use crate::path::fetch::BatchNeeds;
use crate::queue::Queue;
use crate::queue::held::{HeldRequests, Verdict};

/// What admission says of a fetched request.
#[derive(PartialEq, Eq)]
pub(crate) enum Admitted {
    Yes,
    /// A limit holds it back.
    Held,
    /// A limit holds it back, as the first of its queue.
    HeldFirst,
}

/// Holds a request back if a limit applies to it. A slot must be free.
#[inline]
pub(crate) fn admit(
    queue: &mut Queue,
    ticket: Ticket,
    request: Request,
    segments: &[Segment],
    needs: BatchNeeds,
) -> Admitted {
    if !needs.is_limited {
        return Admitted::Yes;
    }
    if !HeldRequests::concerns(&request) {
        queue.held.note_unlimited(now_ns());
        return Admitted::Yes;
    }
    let is_first = queue.held.is_empty();
    queue.held.hold(
        &mut queue.slots,
        ticket,
        request,
        segments,
        needs.stamps.fetched,
    );
    if is_first {
        Admitted::HeldFirst
    } else {
        Admitted::Held
    }
}

/// Puts the slots of requests that may go into `released`, `room` at most.
pub(crate) fn release(
    queue: &mut Queue,
    now: u64,
    room: usize,
    released: &mut Vec<u16>,
) -> Verdict {
    let (is_retired, is_in_service) = (queue.is_retired(), queue.is_in_service());
    let Queue {
        admission,
        held,
        slots,
        ..
    } = queue;
    if is_retired {
        held.drop_all(slots);
        Verdict::Empty
    } else if is_in_service && admission.is_stopped() {
        held.stop()
    } else if is_in_service && admission.limits_any() {
        held.pass_limits(slots, now, room, released)
    } else {
        held.release_all(room, released)
    }
}
