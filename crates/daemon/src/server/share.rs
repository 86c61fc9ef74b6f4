//! How much the clients of an export may ask of the storage at a time, so that a guest does not wait behind them.
//!
//! A client that copies a disk has many long reads in flight, and storage serves more or less in order: each write of the
//! guest would wait for all of them. The bytes that all clients of an export have in flight together are therefore limited, to
//! as many as do not make the storage slower. That is found as in LEDBAT (RFC 6817 §2): operations that take longer than
//! they took at best wait in a queue, and then the limit shrinks; otherwise it grows. So clients use only what the storage
//! has left, however fast it is, and also if other programs or hosts use it. The
//! [latency of the guest](guest) limits them further.
//!
//! It applies while a guest uses the disk, and always to backups.

mod guest;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use datapath::Histogram;

use guest::GuestPace;

/// Least bytes that may be in flight: whatever the storage does, one operation of usual length. For the guest's sake there
/// may be times without.
const SHARE_MIN: u64 = 256 << 10;

/// The length of a piece is a multiple of this.
const SHARE_UNIT: u64 = 64 << 10;

/// Most bytes. All clients of the process have less memory.
const SHARE_MAX: u64 = 1 << 30;

/// An operation may take this much longer than at best before it counts as having waited: a part of it, and a time that
/// threads need to notice.
const SLOWER: f64 = 0.5;
const SLACK_NS: f64 = 100_000.0;

/// The best time is that of this period and the one before.
const PERIOD: Duration = Duration::from_secs(10);

/// Least operations in a round, after each of which the limit changes.
const ROUND_MIN: u64 = 4;

/// A connection that has waited for this long goes before those that came later, even if these need less.
const PATIENCE: Duration = Duration::from_millis(20);

/// A connection that has not asked again for this long does not delay others.
const STALE: Duration = Duration::from_millis(100);

/// Classes of operations by the binary logarithm of their length: up to 32 MiB.
const CLASSES: usize = 26;

/// Longest time in which no operation begins after one that is longer than the limit.
const REST_MAX: Duration = Duration::from_millis(250);

/// What the clients of an export share.
pub struct Share {
    state: Mutex<ShareState>,
    /// All latencies of the guest so far, as far as they are measured.
    latencies: Box<dyn Fn() -> Histogram + Send + Sync>,
}

/// Operations of a connection that has ended, which count until its queue has stopped.
pub struct Unfinished {
    pub share: Arc<Share>,
    pub operations: Vec<Entered>,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        for operation in self.operations.drain(..) {
            self.share.forget(operation);
        }
    }
}

struct ShareState {
    limit: u64,
    in_flight: u64,
    /// Nobody has waited in a queue so far: the limit doubles.
    is_starting: bool,
    best: [Best; CLASSES],
    round: Round,
    waiting: Vec<Waiting>,
    guest: GuestPace,
    /// The guest's limit has made somebody wait.
    was_limited_for_guest: bool,
    /// No operation begins before that.
    rests_until: Option<Instant>,
}

/// A connection with an operation that waits.
struct Waiting {
    waiter: Arc<OwnedFd>,
    since: Instant,
    /// When it asked last.
    asked: Instant,
}

/// The shortest times of operations of one class, in nanoseconds.
#[derive(Clone, Copy)]
struct Best {
    now: f64,
    before: f64,
    since: Option<Instant>,
}

/// Operations that ended since the limit was changed last.
#[derive(Default)]
struct Round {
    operations: u64,
    bytes: u64,
    took_ns: f64,
    best_ns: f64,
    /// Somebody has waited for the limit.
    was_limited: bool,
}

/// An operation that counts.
#[derive(Clone, Copy, Debug)]
pub struct Entered {
    bytes: u64,
    at: Instant,
}

impl Default for ShareState {
    fn default() -> Self {
        let best = Best {
            now: f64::INFINITY,
            before: f64::INFINITY,
            since: None,
        };
        Self {
            limit: SHARE_MIN,
            in_flight: 0,
            is_starting: true,
            best: [best; CLASSES],
            round: Round::default(),
            waiting: Vec::new(),
            guest: GuestPace::default(),
            was_limited_for_guest: false,
            rests_until: None,
        }
    }
}

impl Share {
    /// Of a disk whose guest's requests so far took this long, as far as that is measured.
    pub fn new(latencies: impl Fn() -> Histogram + Send + Sync + 'static) -> Self {
        Self {
            state: Mutex::default(),
            latencies: Box::new(latencies),
        }
    }

    /// The length of the next operation for a request of so many bytes: all of them, or as many as the limit allows.
    pub fn piece(&self, bytes: u64) -> u64 {
        let mut state = self.lock();
        // Pieces end at the boundaries of blocks.
        let max = state.limit().max(SHARE_MIN) / SHARE_UNIT * SHARE_UNIT;
        if bytes > max {
            state.note_limited();
        }
        bytes.min(max)
    }

    /// When a connection that waits must ask again, even if it is not woken.
    pub fn ask_again_at(&self) -> Option<Instant> {
        let state = self.lock();
        state.guest.pauses_until().max(state.rests_until)
    }

    /// Counts an operation, if it may begin now. Otherwise `waiter` is signalled when it may: ask again then.
    pub fn enter(&self, bytes: u64, waiter: &Arc<OwnedFd>) -> Option<Entered> {
        self.enter_at(bytes, waiter, Instant::now())
    }

    fn enter_at(&self, bytes: u64, waiter: &Arc<OwnedFd>, now: Instant) -> Option<Entered> {
        let mut state = self.lock();
        state.advance(now, &self.latencies);
        let is_its = |other: &Waiting| Arc::ptr_eq(&other.waiter, waiter);
        let place = state.waiting.iter().position(is_its);
        let since = place.map_or(now, |place| state.waiting[place].since);
        let is_before = |other: &Waiting| {
            other.since < since && other.since + PATIENCE <= now && now <= other.asked + STALE
        };
        let is_late = state.waiting.iter().any(is_before);
        let is_full = state.in_flight + bytes > state.limit();
        let is_next = state.in_flight == 0 || !(is_late || is_full);
        let is_resting = state.rests_until.is_some();
        if !is_next || is_resting || state.guest.is_pausing() {
            if !is_next || is_resting {
                state.note_limited();
            }
            match place {
                Some(place) => state.waiting[place].asked = now,
                None => state.waiting.push(Waiting {
                    waiter: waiter.clone(),
                    since,
                    asked: now,
                }),
            }
            return None;
        }
        if let Some(place) = place {
            state.waiting.swap_remove(place);
        }
        state.in_flight += bytes;
        Some(Entered { bytes, at: now })
    }

    /// A connection asks for nothing more.
    pub fn leave_queue(&self, waiter: &Arc<OwnedFd>) {
        let is_other = |other: &Waiting| !Arc::ptr_eq(&other.waiter, waiter);
        self.lock().waiting.retain(is_other);
    }

    /// The storage has done an operation.
    pub fn leave(&self, entered: Entered) {
        let now = Instant::now();
        let mut state = self.lock();
        let took = now.duration_since(entered.at);
        state.ended(entered.bytes, took, now);
        state.rest(entered.bytes, took, now);
        state.give_back(entered);
    }

    /// An operation is not waited for any more.
    pub fn forget(&self, entered: Entered) {
        self.lock().give_back(entered);
    }

    fn lock(&self) -> MutexGuard<'_, ShareState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ShareState {
    fn limit(&self) -> u64 {
        self.limit.min(self.guest.limit())
    }

    /// The smaller limit has made somebody wait.
    fn note_limited(&mut self) {
        if self.guest.limit() < self.limit {
            self.was_limited_for_guest = true;
        } else {
            self.round.was_limited = true;
        }
    }

    fn advance(&mut self, now: Instant, latencies: &dyn Fn() -> Histogram) {
        self.rests_until = self.rests_until.filter(|until| *until > now);
        let clients = (self.in_flight, self.limit);
        (self.guest).advance(now, clients, &mut self.was_limited_for_guest, latencies);
    }

    /// After an operation that is longer than the guest's limit, none begins for a while: on average, the limit holds.
    fn rest(&mut self, bytes: u64, took: Duration, now: Instant) {
        let times = bytes as f64 / self.guest.limit() as f64 - 1.0;
        if times > 0.0 {
            let rest = took.mul_f64(times).min(REST_MAX);
            self.rests_until = self.rests_until.max(Some(now + rest));
        }
    }

    fn give_back(&mut self, entered: Entered) {
        self.in_flight -= entered.bytes;
        for waiting in &self.waiting {
            // An eventfd that cannot be written is signalled already.
            let _ = rustix::io::write(&waiting.waiter, &1u64.to_ne_bytes());
        }
    }

    fn ended(&mut self, bytes: u64, took: Duration, now: Instant) {
        let class = bytes.max(1).ilog2() as usize;
        let took_ns = took.as_nanos() as f64;
        let best_ns = self.best[class.min(CLASSES - 1)].seen(took_ns, now);
        let round = &mut self.round;
        round.operations += 1;
        round.bytes += bytes;
        round.took_ns += took_ns;
        round.best_ns += best_ns;
        if round.operations >= ROUND_MIN && round.bytes >= self.limit {
            let round = std::mem::take(round);
            self.change_limit(&round);
        }
    }

    fn change_limit(&mut self, round: &Round) {
        let allowed = round.best_ns * (1.0 + SLOWER) + SLACK_NS * round.operations as f64;
        let mean = round.bytes / round.operations;
        if round.took_ns > allowed {
            self.is_starting = false;
            // As if the limit alone made the storage slow, but at most by half.
            let part = (allowed / round.took_ns).max(0.5);
            self.limit = (self.limit as f64 * part) as u64;
        } else if round.was_limited && self.is_starting {
            self.limit *= 2;
        } else if round.was_limited {
            self.limit += mean.min(self.limit);
        }
        self.limit = self.limit.clamp(SHARE_MIN, SHARE_MAX);
    }
}

impl Best {
    /// Returns the best time, which may be this one.
    fn seen(&mut self, took_ns: f64, now: Instant) -> f64 {
        let since = *self.since.get_or_insert(now);
        if now.duration_since(since) >= PERIOD {
            (self.before, self.now, self.since) = (self.now, f64::INFINITY, Some(now));
        }
        self.now = self.now.min(took_ns);
        self.now.min(self.before)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// Without a guest.
    fn share() -> Share {
        Share::new(Histogram::default)
    }

    /// Storage that serves `parallel` operations at once, each in `time_us`; others wait their turn.
    fn settled_limit(share: &Share, parallel: u64, time_us: u64, rounds: usize) -> u64 {
        let mut now = Instant::now();
        for _ in 0..rounds {
            let mut state = share.lock();
            let in_flight = (state.limit / SHARE_MIN).max(1);
            let turns = in_flight.div_ceil(parallel);
            state.round.was_limited = true;
            for _ in 0..in_flight.max(ROUND_MIN) {
                let took = Duration::from_micros(time_us * turns);
                now += took / in_flight as u32;
                state.ended(SHARE_MIN, took, now);
            }
        }
        share.piece(u64::MAX)
    }

    #[test]
    fn the_limit_is_what_storage_does_at_once() {
        for (parallel, time_us) in [(1, 500), (8, 500), (64, 5_000), (200, 20_000)] {
            let share = share();
            let limit = settled_limit(&share, parallel, time_us, 300) / SHARE_MIN;
            assert!(share.piece(u64::MAX).is_multiple_of(4096));
            // It swings around it.
            assert!(
                (parallel / 2..=parallel * 2).contains(&limit),
                "{limit} of {parallel} at {time_us} us"
            );
        }
    }

    /// Others come, and the storage takes three times as long: clients leave it to them. When these have gone, they have
    /// it back.
    #[test]
    fn clients_give_way() {
        let share = share();
        let alone = settled_limit(&share, 16, 1_000, 100);
        let beside_others = settled_limit(&share, 16, 3_000, 20);
        assert_eq!(beside_others, SHARE_MIN, "{alone} before");
        let again = settled_limit(&share, 16, 1_000, 100);
        assert!(again * 2 >= alone, "{again}, {alone} before");
    }

    /// What is always so counts as best after a while.
    #[test]
    fn slower_storage_is_used_fully_after_a_while() {
        let share = share();
        settled_limit(&share, 16, 1_000, 100);
        let slower = settled_limit(&share, 16, 3_000, 20_000);
        assert!(slower >= 8 * SHARE_MIN, "{slower}");
    }

    #[test]
    fn waiting_connections_are_woken() {
        let share = share();
        let waiter = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let told = || rustix::io::read(&waiter, &mut [0; 8]).is_ok();
        // However long, the first may begin.
        let first = share.enter(SHARE_MAX, &waiter).unwrap();
        assert!(share.enter(1, &waiter).is_none());
        assert!(share.enter(1, &waiter).is_none());
        assert!(!told());
        share.forget(first);
        assert!(told());
        let all = [(); 2].map(|()| share.enter(SHARE_MIN / 2, &waiter).unwrap());
        assert!(share.enter(1, &waiter).is_none());
        all.into_iter().for_each(|one| share.leave(one));
        assert!(told());
        assert_eq!(share.lock().in_flight, 0);
        assert!(share.enter(SHARE_MIN, &waiter).is_some());
        assert!(!told());
        assert!(share.lock().waiting.is_empty());
    }

    /// The storage's limit makes nobody rest; the guest's does.
    #[test]
    fn clients_rest_only_for_a_guest() {
        let share = share();
        let waiter = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let long = |share: &Share| {
            let entered = share.enter(32 << 20, &waiter).unwrap();
            std::thread::sleep(Duration::from_millis(1));
            share.leave(entered);
        };
        long(&share);
        assert_eq!(share.ask_again_at(), None);
        share.lock().guest = GuestPace::with_limit(SHARE_MIN);
        long(&share);
        assert!(share.enter(4096, &waiter).is_none());
        let again = share.ask_again_at().unwrap();
        assert!(again <= Instant::now() + REST_MAX);
        assert!(share.enter_at(4096, &waiter, again).is_some());
    }

    /// A long operation is not delayed by short ones that always fit. A connection that never asks again delays the others
    /// only for a moment.
    #[test]
    fn long_waits_come_first() {
        let share = share();
        let [long, short] = [(); 2].map(|()| Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()));
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let first = share.enter_at(4096, &short, at(0)).unwrap();
        assert!(share.enter_at(SHARE_MAX, &long, at(1)).is_none());
        let second = share.enter_at(4096, &short, at(2)).unwrap();
        share.leave(first);
        assert!(share.enter_at(SHARE_MAX, &long, at(22)).is_none());
        assert!(share.enter_at(4096, &short, at(23)).is_none());
        share.leave(second);
        let entered = share.enter_at(SHARE_MAX, &long, at(24)).unwrap();
        assert!(share.enter_at(4096, &short, at(25)).is_none());
        share.leave(entered);
        let first = share.enter_at(4096, &short, at(26)).unwrap();
        assert!(share.enter_at(SHARE_MAX, &long, at(27)).is_none());
        assert!(share.enter_at(4096, &short, at(50)).is_none());
        assert!(share.enter_at(4096, &short, at(128)).is_some());
        share.leave(first);
        share.leave_queue(&long);
        assert!(share.lock().waiting.is_empty());
    }
}
