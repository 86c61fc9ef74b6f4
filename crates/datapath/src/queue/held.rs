//! The requests of a queue that a limit holds back.
//!
//! Each takes a slot as soon as it is fetched, and waits there. There is a slot for every request that a guest can have in
//! flight, so that no other bound is needed. Reads wait apart from writes, discards and zeroes; flushes are not held.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block::{FileOffset, Request, Segment};
use guest::Ticket;

use super::slot::{RequestState, Slot, Slots};
use crate::stats::Stamps;
use crate::throttle::admission::{Admission, AdmissionState};
use crate::throttle::{Direction, Gate, PAUSE_MIN_NS, Sharer, TICK_NS, Work, try_lock};

#[cfg(test)]
mod tests;

/// The disk counts as throttled for this long after a limit kept a request from going: as long as a burst can last that
/// was saved up.
const THROTTLED_NS: u64 = 50_000_000;

/// If a limit lets nothing go for a time between these two, kicks are useless until then: whatever the guest sends is
/// fetched when the limit lets it go. Flushes have no limit, so a guest that has sent one to the disk
/// within [`FREE_NS`] can kick at any time. The first flush after that may wait for [`SHUT_MAX_NS`].
const SHUT_MIN_NS: u64 = 200_000;
const SHUT_MAX_NS: u64 = 3_000_000;
const FREE_NS: u64 = 1_000_000_000;

/// Bytes for which a discard or a write of zeroes counts at most. They move no data, so a guest can
/// have them cover the whole disk, for which the others of its group would wait for hours.
const DISCARD_COUNTS_MAX: u64 = 16 << 20;

/// What became of the requests that a queue holds back.
pub(crate) enum Verdict {
    /// All have gone.
    Empty,
    /// As many have gone as there was room for.
    NoRoom,
    /// The rest waits until then.
    Until(u64),
}

/// The requests of one queue that are held.
pub(crate) struct HeldRequests {
    admission: Arc<Admission>,
    sharer: Sharer,
    /// By direction, each in the order in which they came.
    lanes: [VecDeque<HeldRequest>; 2],
    /// The number of the next request.
    next_number: u32,
    /// Nothing that is held may go before this time.
    held_until: u64,
    /// When a limit last kept something from going.
    throttled_at: u64,
    /// Nothing that a limit concerns may go before this time, held or not.
    shut_until: u64,
    /// The lane that goes first where reads and writes are limited separately. They take turns.
    first: usize,
}

#[derive(Clone, Copy)]
struct HeldRequest {
    slot: u16,
    /// Its place in the order of all requests of the queue.
    number: u32,
}

impl HeldRequests {
    pub fn new(admission: Arc<Admission>) -> Self {
        let sharer = admission.lock().own.join();
        Self {
            admission,
            sharer,
            lanes: Default::default(),
            next_number: 0,
            held_until: 0,
            throttled_at: 0,
            shut_until: 0,
            first: 0,
        }
    }

    /// Whether limits apply to this request.
    pub fn concerns(request: &Request) -> bool {
        work(request).is_some()
    }

    /// Takes a slot for a request and keeps it. There must be a free one.
    pub fn hold(
        &mut self,
        slots: &mut Slots,
        ticket: Ticket,
        request: Request,
        segments: &[Segment],
        fetched: u64,
    ) {
        let stamps = Stamps {
            fetched,
            admitted: 0,
            submitted: 0,
        };
        let slot = slots.take(ticket, request, FileOffset(0), segments, stamps);
        slots.get(slot).state = RequestState::Held;
        let Work { direction, .. } = work(&request).expect("the caller asked");
        let lane = &mut self.lanes[direction as usize];
        if lane.capacity() == 0 {
            lane.reserve_exact(slots.len());
        }
        if lane.is_empty() {
            // The limits have not been asked about this lane.
            self.held_until = 0;
        }
        lane.push_back(HeldRequest {
            slot,
            number: self.next_number,
        });
        self.next_number = self.next_number.wrapping_add(1);
    }

    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(VecDeque::is_empty)
    }

    /// Whether the guest has waited for a limit lately.
    pub fn was_throttled(&self, now: u64) -> bool {
        now.saturating_sub(self.throttled_at) < THROTTLED_NS
    }

    /// The guest has sent a request to which no limit applies.
    #[cold]
    pub fn note_unlimited(&self, now: u64) {
        self.admission.free.store(now, Ordering::Relaxed);
    }

    /// Until when the guest need not kick, if a limit lets nothing go that it is likely to send.
    pub fn shut_until(&self, now: u64) -> Option<u64> {
        let time = self.shut_until.saturating_sub(now);
        if !(SHUT_MIN_NS..=SHUT_MAX_NS).contains(&time) {
            return None;
        }
        let free = self.admission.free.load(Ordering::Relaxed);
        (now.saturating_sub(free) >= FREE_NS).then_some(self.shut_until)
    }

    /// Asks the limits again at the next turn.
    pub fn ask_limits_again(&mut self) {
        self.held_until = 0;
    }

    /// Moves all slots to `to`, which grows.
    pub fn drain(&mut self, to: &mut Vec<u16>) {
        let lanes = self.lanes.iter_mut();
        to.extend(lanes.flat_map(|lane| lane.drain(..)).map(|w| w.slot));
    }

    /// Lets all go without asking the limits, `room` at most.
    pub fn release_all(&mut self, room: usize, released: &mut Vec<u16>) -> Verdict {
        let all = self.lanes.iter_mut();
        for lane in all {
            let n = lane.len().min(room - released.len());
            released.extend(lane.drain(..n).map(|waiting| waiting.slot));
        }
        if self.is_empty() {
            Verdict::Empty
        } else {
            Verdict::NoRoom
        }
    }

    /// Lets nothing go until [`ask_limits_again`](Self::ask_limits_again).
    pub fn stop(&mut self) -> Verdict {
        self.held_until = u64::MAX;
        Verdict::Until(self.held_until)
    }

    /// Gives all slots back: the requests are left without an answer.
    pub fn drop_all(&mut self, slots: &mut Slots) {
        for waiting in self.lanes.iter_mut().flat_map(|lane| lane.drain(..)) {
            slots.give_back(waiting.slot);
        }
    }

    /// The lane whose first request goes next, if reads and writes wait for each other.
    fn oldest(&self) -> usize {
        match [self.lanes[0].front(), self.lanes[1].front()] {
            [Some(a), Some(b)] => usize::from((a.number.wrapping_sub(b.number) as i32) > 0),
            [None, _] => 1,
            [_, None] => 0,
        }
    }
}

impl Drop for HeldRequests {
    fn drop(&mut self) {
        let mut state = self.admission.lock();
        state.own.leave(self.sharer);
        state.rest_in_group();
    }
}

impl HeldRequests {
    /// Lets go what the limits allow, `room` at most, unless they said to wait until later than `now`.
    pub fn pass_limits(
        &mut self,
        slots: &mut Slots,
        now: u64,
        room: usize,
        released: &mut Vec<u16>,
    ) -> Verdict {
        if now < self.held_until {
            return Verdict::Until(self.held_until);
        }
        let verdict = self.pass(slots, now, room, released);
        if let Verdict::Until(at) = verdict {
            (self.held_until, self.throttled_at) = (at, now);
        }
        verdict
    }

    fn pass(
        &mut self,
        slots: &mut Slots,
        now: u64,
        room: usize,
        released: &mut Vec<u16>,
    ) -> Verdict {
        // If another thread has the lock, nothing goes for now: no thread waits for another one.
        let later = Verdict::Until(now + PAUSE_MIN_NS);
        let Some(mut state) = try_lock(&self.admission.state) else {
            return later;
        };
        let AdmissionState { own, group } = &mut *state;
        let mut group = match group {
            None => None,
            Some(membership) => match membership.group.try_shares() {
                Some(shares) => Some((shares, membership.sharer)),
                None => return later,
            },
        };
        let split = own.split() || group.as_ref().is_some_and(|(shares, _)| shares.split());
        let mut again = u64::MAX;
        let lanes = if split {
            [self.first, 1 - self.first]
        } else {
            [0, 0]
        };
        self.first = 1 - self.first;
        for &lane in &lanes[..1 + usize::from(split)] {
            let mut gates = Gates {
                own: own.open(self.sharer, lane, now),
                group: group.as_mut().map(|(shares, s)| shares.open(*s, lane, now)),
            };
            loop {
                let from = if split { lane } else { self.oldest() };
                let Some(first) = self.lanes[from].front() else {
                    own.rest(self.sharer, lane);
                    break;
                };
                if released.len() == room {
                    break;
                }
                match gates.pass(slots.get(first.slot)) {
                    Ok(()) => released.push(first.slot),
                    Err(at) => {
                        again = again.min(at);
                        break;
                    }
                }
                self.lanes[from].pop_front();
            }
            if let Some((shares, sharer)) = &mut group
                && !own.waited_for(lane)
            {
                shares.rest(*sharer, lane);
            }
        }
        self.shut_until = match (split, &group) {
            (false, None) => Some(own.due(now)).filter(|&due| due > now),
            _ => None,
        }
        .map_or(0, |due| due.next_multiple_of(TICK_NS));
        if self.is_empty() {
            Verdict::Empty
        } else if released.len() == room {
            Verdict::NoRoom
        } else {
            Verdict::Until(again)
        }
    }
}

/// The disk's own limits and those of its group, open for one batch.
struct Gates<'a> {
    own: Gate<'a>,
    group: Option<Gate<'a>>,
}

impl Gates<'_> {
    /// Lets a request through both, or returns when to ask again.
    fn pass(&mut self, slot: &Slot) -> Result<(), u64> {
        let Some(work) = work(&slot.request) else {
            return Ok(());
        };
        let (own, group) = (&mut self.own, &mut self.group);
        if !own.open_for(&work) || group.as_ref().is_some_and(|gate| !gate.open_for(&work)) {
            let at = match group {
                None => own.turn(&work).next_multiple_of(TICK_NS),
                Some(gate) => own.turn(&work).max(gate.turn(&work)),
            };
            own.ask_again(at);
            if let Some(gate) = group {
                gate.ask_again(at);
                if !own.due(&work) {
                    // It takes no turn in the group that it could not use.
                    gate.rest();
                }
            }
            return Err(at);
        }
        let in_group = group.as_ref().map_or(0, |gate| gate.cost(&work));
        own.pass(&work, own.cost(&work).max(in_group));
        if let Some(gate) = group {
            gate.pass(&work, in_group);
        }
        Ok(())
    }
}

/// What a request counts for; `None` if no limit concerns it.
fn work(request: &Request) -> Option<Work> {
    let (direction, bytes) = match *request {
        Request::Read { len, .. } => (Direction::Read, len),
        Request::Write { len, .. } => (Direction::Write, len),
        Request::Discard { len, .. } | Request::WriteZeroes { len, .. } => {
            (Direction::Write, len.min(DISCARD_COUNTS_MAX))
        }
        Request::Flush | Request::GetId => return None,
    };
    Some(Work { direction, bytes })
}
