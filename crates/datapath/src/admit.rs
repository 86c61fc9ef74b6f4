//! Between fetch and plan: requests that a limit holds back, until it lets them go.
//!
//! A disk without limits pays one look per batch. With limits, each request takes a slot as soon as it
//! is fetched, and waits there: there is one for every request that a guest can have under way, so
//! nothing needs bounds of its own. Reads wait apart from writes, discards and zeroes; flushes are not
//! held. A timer wakes the thread.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use block::{Engine, FileOffset, Request, Segment, ThrottleError, ThrottleLimits};
use guest::Ticket;

use crate::clock::now_ns;
use crate::disk::Disk;
use crate::fetch::FetchResult;
use crate::plan::{self, Plan};
use crate::slot::{Slot, Slots};
use crate::stats::Stamps;
use crate::throttle::{
    Direction, Gate, PAUSE_MIN_NS, Sharer, Shares, TICK_NS, ThrottleGroup, Work, try_lock,
};
use crate::worker::Worker;

#[cfg(test)]
mod tests;

/// For so long after a limit kept a request from going, the disk is one that waits for its limit: as long as what was
/// saved up can flow.
const KEPT_NS: u64 = 50_000_000;

/// A limit that lets nothing go for at least so long, and at most so long, makes kicks useless until then: whatever the
/// guest sends is taken when the limit lets it go. Flushes have no limit, so a guest that has sent one to the disk
/// within [`FREE_NS`] can kick at any time. The first flush after that may wait for [`SHUT_MAX_NS`].
const SHUT_MIN_NS: u64 = 200_000;
const SHUT_MAX_NS: u64 = 3_000_000;
const FREE_NS: u64 = 1_000_000_000;

/// Requests let go in one turn for one queue: the other queues wait meanwhile.
pub(crate) const RELEASE: usize = 64;

/// Bytes for which a discard or a write of zeroes counts at most. They move no data, so a guest can
/// have them cover the whole disk, for which the others of its group would wait for hours.
const DISCARD_COUNTS_MAX: u64 = 16 << 20;

impl<E: Engine> Worker<E> {
    /// Lets go what is held and may go.
    #[inline]
    pub fn admit(&mut self) -> FetchResult {
        match self.throttled_queues.is_empty() {
            true => FetchResult::Nothing,
            false => self.admit_held(),
        }
    }

    #[cold]
    fn admit_held(&mut self) -> FetchResult {
        let now = now_ns();
        let mut again = u64::MAX;
        let mut result = FetchResult::Nothing;
        let mut released = std::mem::take(&mut self.released);
        for i in (0..self.throttled_queues.len()).rev() {
            let number = self.throttled_queues[i];
            let room = self.engine.room().min(RELEASE);
            let verdict = match &mut self.queues[number] {
                Some(queue) if queue.is_retired() => {
                    queue.held.drop_all(&mut queue.slots);
                    Verdict::Empty
                }
                Some(queue) if queue.is_in_service() && queue.disk.is_stopped() => {
                    queue.held.until = u64::MAX;
                    continue;
                }
                Some(queue) if queue.is_in_service() && queue.disk.admission.limits_any() => {
                    if now < queue.held.until {
                        again = again.min(queue.held.until);
                        continue;
                    }
                    let disk = &queue.disk.admission;
                    disk.pass(&mut queue.held, &mut queue.slots, now, room, &mut released)
                }
                Some(queue) => queue.held.take_all(room, &mut released),
                None => Verdict::Empty,
            };
            if !released.is_empty() {
                // The guest is likely to follow up at once.
                self.activate(number);
            }
            for slot in released.drain(..) {
                self.start_admitted(number, slot, now);
                result = FetchResult::All;
            }
            match verdict {
                Verdict::Empty => {
                    self.throttled_queues.swap_remove(i);
                }
                Verdict::NoRoom if room > 0 => result = FetchResult::More,
                // A completion makes room, and wakes.
                Verdict::NoRoom => {}
                Verdict::Until(at) => {
                    again = again.min(at);
                    if let Some(queue) = &mut self.queues[number] {
                        queue.held.until = at;
                        queue.held.kept = now;
                    }
                }
            }
            if self.queues[number]
                .as_ref()
                .is_some_and(|q| !q.is_running())
            {
                self.notify_queue(number);
                self.finish_stop(number);
            }
        }
        self.released = released;
        if again < u64::MAX {
            self.timer.set(now, again);
        }
        result
    }

    fn start_admitted(&mut self, number: usize, slot: u16, now: u64) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let s = queue.slots.get(slot);
        (s.stamps.admitted, s.stamps.submitted) = (now, now);
        match plan::plan(&queue.disk, &queue.image, s.request) {
            Plan::Operation(request, at) => {
                (s.request, s.at) = (request, at);
                self.submit(number, slot);
            }
            Plan::Pieces(request) => {
                s.request = request;
                self.start_pieces(number, slot);
            }
            Plan::Done(status, written) => {
                let ticket = s.ticket;
                queue.tally.answered(&s.request, status, s.stamps);
                queue.slots.give_back(slot);
                if !queue.is_retired() {
                    queue.ring.complete(&ticket, status as u8, written + 1);
                }
            }
            Plan::Id => unreachable!("a request for the serial is not held"),
        }
    }
}

/// What became of the requests held for a queue.
enum Verdict {
    /// None is held any more.
    Empty,
    /// All that there was room for have gone.
    NoRoom,
    /// They are to wait until then.
    Until(u64),
}

/// The requests of one queue that are held.
pub(crate) struct HeldRequests {
    disk: Arc<Disk>,
    sharer: Sharer,
    /// By direction, each in the order in which they came.
    lanes: [VecDeque<HeldRequest>; 2],
    next: u32,
    /// Until then, nothing of what is held may go.
    until: u64,
    /// When a limit last kept something from going.
    kept: u64,
    /// Until then, nothing that a limit concerns may go, held or not.
    shut: u64,
    /// The lane that goes first when they go apart; then the other one.
    first: usize,
}

#[derive(Clone, Copy)]
struct HeldRequest {
    slot: u16,
    /// Its number among all of the queue.
    number: u32,
}

impl HeldRequests {
    pub fn new(disk: Arc<Disk>) -> Self {
        let sharer = disk.admission.state().own.join();
        Self {
            disk,
            sharer,
            lanes: Default::default(),
            next: 0,
            until: 0,
            kept: 0,
            shut: 0,
            first: 0,
        }
    }

    /// Whether it is for a limit to say when this request goes on.
    pub fn concerns(request: &Request) -> bool {
        work(request).is_some()
    }

    /// Takes a slot for a request and keeps it. There must be a free one.
    pub fn pause(
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
        let Some(Work { direction, .. }) = work(&request) else {
            unreachable!("the caller asked");
        };
        let lane = &mut self.lanes[direction as usize];
        if lane.capacity() == 0 {
            lane.reserve_exact(slots.len());
        }
        if lane.is_empty() {
            // It may be that nothing holds it back.
            self.until = 0;
        }
        lane.push_back(HeldRequest {
            slot,
            number: self.next,
        });
        self.next = self.next.wrapping_add(1);
    }

    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(VecDeque::is_empty)
    }

    /// Whether a limit is what the guest lately waited for.
    pub fn was_throttled(&self, now: u64) -> bool {
        now.saturating_sub(self.kept) < KEPT_NS
    }

    /// The guest has sent something that no limit concerns.
    #[cold]
    pub fn note_unlimited(&self, now: u64) {
        self.disk.admission.free.store(now, Ordering::Relaxed);
    }

    /// Until when the guest need not kick, if a limit lets nothing go that it is likely to send.
    pub fn shut_until(&self, now: u64) -> Option<u64> {
        let time = self.shut.saturating_sub(now);
        if !(SHUT_MIN_NS..=SHUT_MAX_NS).contains(&time) {
            return None;
        }
        let free = self.disk.admission.free.load(Ordering::Relaxed);
        (now.saturating_sub(free) >= FREE_NS).then_some(self.shut)
    }

    /// Asks the limits again at once.
    pub fn look_again(&mut self) {
        self.until = 0;
    }

    /// Moves all to `to`, which grows.
    pub fn drain(&mut self, to: &mut Vec<u16>) {
        let lanes = self.lanes.iter_mut();
        to.extend(lanes.flat_map(|lane| lane.drain(..)).map(|w| w.slot));
    }

    fn take_all(&mut self, room: usize, released: &mut Vec<u16>) -> Verdict {
        let all = self.lanes.iter_mut();
        for lane in all {
            let n = lane.len().min(room - released.len());
            released.extend(lane.drain(..n).map(|waiting| waiting.slot));
        }
        match self.is_empty() {
            true => Verdict::Empty,
            false => Verdict::NoRoom,
        }
    }

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
        let mut state = self.disk.admission.state();
        state.own.leave(self.sharer);
        state.rest_in_group();
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

/// The limits of a disk: its own, and those of the group that it belongs to.
pub(crate) struct Admission {
    /// There are limits, or the disk is stopped.
    limits_any: AtomicBool,
    stopped: AtomicBool,
    /// When the guest last sent something that no limit concerns, by any queue.
    free: AtomicU64,
    state: Mutex<AdmissionState>,
}

struct AdmissionState {
    own: Shares,
    group: Option<Membership>,
}

struct Membership {
    group: Arc<ThrottleGroup>,
    sharer: Sharer,
}

impl Default for Admission {
    fn default() -> Self {
        Self {
            limits_any: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            free: AtomicU64::new(0),
            state: Mutex::new(AdmissionState {
                own: Shares::new(&ThrottleLimits::NONE),
                group: None,
            }),
        }
    }
}

impl Admission {
    /// Whether requests have to wait for leave to go on.
    #[inline]
    pub fn limits_any(&self) -> bool {
        self.limits_any.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, AdmissionState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn changed(&self, state: &AdmissionState) {
        let any = state.own.limits().is_limited() || state.group.is_some() || self.is_stopped();
        self.limits_any.store(any, Ordering::Relaxed);
    }

    /// Whether nothing is let go at all.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Lets nothing go from now on, or what the limits allow.
    pub fn set_stopped(&self, stopped: bool) {
        let state = self.state();
        self.stopped.store(stopped, Ordering::Relaxed);
        self.changed(&state);
    }

    pub fn limits(&self) -> ThrottleLimits {
        *self.state().own.limits()
    }

    pub fn set_limits(&self, limits: &ThrottleLimits) -> Result<(), ThrottleError> {
        limits.check()?;
        let mut state = self.state();
        state.own.set(limits, now_ns());
        self.changed(&state);
        Ok(())
    }

    pub fn group(&self) -> Option<Arc<ThrottleGroup>> {
        self.state().group.as_ref().map(|m| m.group.clone())
    }

    pub fn set_group(&self, group: Option<Arc<ThrottleGroup>>) {
        let mut state = self.state();
        state.leave_group();
        state.group = group.map(|group| {
            let sharer = group.shares().join();
            Membership { group, sharer }
        });
        self.changed(&state);
    }

    /// Lets go what the limits allow of the requests held for a queue, `room` at most.
    fn pass(
        &self,
        held: &mut HeldRequests,
        slots: &mut Slots,
        now: u64,
        room: usize,
        released: &mut Vec<u16>,
    ) -> Verdict {
        // Who finds it locked is not let through for now; nobody waits for a thread that sleeps.
        let later = Verdict::Until(now + PAUSE_MIN_NS);
        let Some(mut state) = try_lock(&self.state) else {
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
        let lanes = match split {
            true => [held.first, 1 - held.first],
            false => [0, 0],
        };
        held.first = 1 - held.first;
        for &lane in &lanes[..1 + usize::from(split)] {
            let mut gates = Gates {
                own: own.open(held.sharer, lane, now),
                group: group.as_mut().map(|(shares, s)| shares.open(*s, lane, now)),
            };
            loop {
                let from = match split {
                    true => lane,
                    false => held.oldest(),
                };
                let Some(first) = held.lanes[from].front() else {
                    own.rest(held.sharer, lane);
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
                held.lanes[from].pop_front();
            }
            if let Some((shares, sharer)) = &mut group
                && !own.waited_for(lane)
            {
                shares.rest(*sharer, lane);
            }
        }
        held.shut = match (split, &group) {
            (false, None) => Some(own.due(now)).filter(|&due| due > now),
            _ => None,
        }
        .map_or(0, |due| due.next_multiple_of(TICK_NS));
        match held.is_empty() {
            true => Verdict::Empty,
            false if released.len() == room => Verdict::NoRoom,
            false => Verdict::Until(again),
        }
    }
}

impl AdmissionState {
    fn leave_group(&mut self) {
        if let Some(Membership { group, sharer }) = self.group.take() {
            group.shares().leave(sharer);
        }
    }

    /// Nobody waits for the disk that has nothing waiting.
    fn rest_in_group(&mut self) {
        let Some(Membership { group, sharer }) = &self.group else {
            return;
        };
        for lane in (0..2).filter(|&lane| !self.own.waited_for(lane)) {
            group.shares().rest(*sharer, lane);
        }
    }
}

impl Drop for AdmissionState {
    fn drop(&mut self) {
        self.leave_group();
    }
}

/// The ways past the disk's own limits and past those of its group.
struct Gates<'a> {
    own: Gate<'a>,
    group: Option<Gate<'a>>,
}

impl Gates<'_> {
    /// Lets a request through both, or says when to ask again.
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
