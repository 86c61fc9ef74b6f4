//! Limits as leaky buckets, and turns among those who share them. It has no clock: the caller passes the time.
//!
//! Bytes and operations are poured into a bucket that leaks at the limit's rate, and nothing more is let through while
//! the bucket is too full. Those who share buckets take turns by what each has had so far, and not by how often each
//! asks: with a depth of 128, a disk gets no more of its group than one with a depth of 8.

pub(crate) mod admission;

use std::sync::{Mutex, MutexGuard, TryLockError};

use block::{Rate, ThrottleError, ThrottleLimits};

use crate::clock::now_ns;

/// Limits that any number of disks share.
pub struct ThrottleGroup {
    /// The operator's name for it.
    pub name: String,
    shares: Mutex<Shares>,
}

impl ThrottleGroup {
    /// A group without disks.
    ///
    /// # Errors
    /// The limits contradict each other.
    pub fn new(name: String, limits: &ThrottleLimits) -> Result<Self, ThrottleError> {
        limits.check()?;
        Ok(Self {
            name,
            shares: Mutex::new(Shares::new(limits)),
        })
    }

    /// The limits of all disks of the group together.
    pub fn limits(&self) -> ThrottleLimits {
        self.shares().limits
    }

    /// Changes them, for requests that are waiting and for new ones.
    ///
    /// # Errors
    /// The limits contradict each other; the old ones stay.
    pub fn set_limits(&self, limits: &ThrottleLimits) -> Result<(), ThrottleError> {
        limits.check()?;
        self.shares().set(limits, now_ns());
        Ok(())
    }

    pub(crate) fn shares(&self) -> MutexGuard<'_, Shares> {
        self.shares.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn try_shares(&self) -> Option<MutexGuard<'_, Shares>> {
        try_lock(&self.shares)
    }
}

/// The lock, if it is free: an I/O thread does not wait for another one.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// What can have limits of its own: reads; and writes, with everything else that changes the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// What a request counts for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub direction: Direction,
    pub bytes: u64,
}

/// One of those who share: a disk in its group, a queue in its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharer(usize);

/// Requests that a disk's own limits hold are let go when the clock passes a multiple of this, so that one wake-up lets
/// go all that are due at nearly the same time: ten of a disk with 10,000 requests a second, and those of all other
/// disks of the thread. A bucket has room for fifty times as much ([`SLACK_S`]), so that this does not lower the rate.
/// In a group it is not done: a disk of little depth would come too late for its share.
pub(crate) const TICK_NS: u64 = 1_000_000;

/// Time after which a thread asks again that found the limits of a group locked by another thread.
pub(crate) const PAUSE_MIN_NS: u64 = 100_000;

/// Longest time after which limits are asked again, so that a change of limits is seen soon.
pub(crate) const PAUSE_MAX_NS: u64 = 20_000_000;

/// Buckets, and those who share them.
pub(crate) struct Shares {
    limits: ThrottleLimits,
    buckets: Buckets,
    /// By lane. Reads and writes wait in one lane, unless a limit applies to only one of them.
    turns: [Turns; 2],
}

impl Shares {
    pub fn new(limits: &ThrottleLimits) -> Self {
        Self {
            limits: *limits,
            buckets: Buckets::new(limits),
            turns: Default::default(),
        }
    }

    pub fn limits(&self) -> &ThrottleLimits {
        &self.limits
    }

    pub fn set(&mut self, limits: &ThrottleLimits, now: u64) {
        self.buckets.leak(now);
        self.buckets = self.buckets.changed(limits);
        self.limits = *limits;
    }

    /// Whether reads can be held while writes are not.
    pub fn split(&self) -> bool {
        let l = &self.limits;
        [l.bps_read, l.bps_write, l.iops_read, l.iops_write]
            .iter()
            .any(|rate| rate.average > 0)
    }

    /// When the next request of any kind may go. Only if reads and writes wait in one lane.
    pub fn due(&self, now: u64) -> u64 {
        debug_assert!(!self.split());
        let any = Work {
            direction: Direction::Read,
            bytes: 0,
        };
        self.buckets.due(&any, now)
    }

    pub fn join(&mut self) -> Sharer {
        let sharer = self.turns[0].join();
        assert_eq!(self.turns[1].join(), sharer, "both lanes have the same");
        sharer
    }

    pub fn leave(&mut self, sharer: Sharer) {
        self.turns.iter_mut().for_each(|turns| turns.leave(sharer));
    }

    /// Opens a lane for a batch of one of the sharers.
    pub fn open(&mut self, sharer: Sharer, lane: usize, now: u64) -> Gate<'_> {
        self.buckets.leak(now);
        let turns = &mut self.turns[lane];
        turns.begin(sharer);
        Gate {
            latest: turns.others(sharer, now).saturating_add(SPREAD_NS),
            buckets: &mut self.buckets,
            turns,
            sharer,
            now,
        }
    }

    /// Nothing of this sharer waits in this lane any more.
    pub fn rest(&mut self, sharer: Sharer, lane: usize) {
        self.turns[lane].claims[sharer.0].waiting = false;
    }

    /// Whether a sharer waits in this lane.
    pub fn waited_for(&self, lane: usize) -> bool {
        self.turns[lane].claims.iter().any(|claim| claim.waiting)
    }
}

/// Lets a batch of one sharer through, one by one.
pub(crate) struct Gate<'a> {
    buckets: &'a mut Buckets,
    turns: &'a mut Turns,
    sharer: Sharer,
    now: u64,
    /// A sharer that has had more than this waits for the others.
    latest: u64,
}

impl Gate<'_> {
    pub fn open_for(&self, work: &Work) -> bool {
        self.turns.claims[self.sharer.0].had <= self.latest && self.due(work)
    }

    /// Whether the limits allow it, regardless of turns.
    pub fn due(&self, work: &Work) -> bool {
        self.buckets.due(work, self.now) <= self.now
    }

    /// It waits, but not for this.
    pub fn rest(&mut self) {
        self.turns.claims[self.sharer.0].waiting = false;
    }

    /// Nanoseconds of the tightest limit that this takes.
    pub fn cost(&self, work: &Work) -> u64 {
        self.buckets.cost(work)
    }

    /// Lets it through. It counts as `cost` for the turns.
    pub fn pass(&mut self, work: &Work, cost: u64) {
        self.buckets.pour(work);
        self.turns.had(self.sharer, cost);
    }

    /// When it is likely to be let through.
    pub fn turn(&self, work: &Work) -> u64 {
        let due = self.buckets.due(work, self.now);
        let others = self.turns.before(self.sharer, self.now) as u64;
        let turn = due.saturating_add(others.saturating_mul(self.buckets.cost(work)));
        turn.clamp(self.now + PAUSE_MIN_NS, self.now + PAUSE_MAX_NS)
    }

    /// It waits, and asks again then.
    pub fn ask_again(&mut self, at: u64) {
        let claim = &mut self.turns.claims[self.sharer.0];
        // The queues of a disk share its claim.
        claim.again = claim.again.max(at);
    }
}

/// How much more a sharer may have had than another one that waits, in nanoseconds of the limit. It covers the time in
/// which a thread wakes up.
const SPREAD_NS: u64 = 1_000_000;

/// A sharer that is this late in asking again is not waited for any more: its thread is busy. It catches up when it
/// asks.
const LATE_NS: u64 = 2_000_000;

/// What a late sharer can catch up.
const ARREARS_NS: u64 = 50_000_000;

/// Who has had how much.
#[derive(Default)]
struct Turns {
    claims: Vec<Claim>,
    /// What a sharer has had that waited all the time.
    had: u64,
}

#[derive(Clone, Copy, Default)]
struct Claim {
    joined: bool,
    waiting: bool,
    /// Nanoseconds of the limit.
    had: u64,
    /// When it asks again.
    again: u64,
}

impl Turns {
    fn join(&mut self) -> Sharer {
        let claim = Claim {
            joined: true,
            ..Claim::default()
        };
        match self.claims.iter().position(|claim| !claim.joined) {
            Some(free) => {
                self.claims[free] = claim;
                Sharer(free)
            }
            None => {
                self.claims.push(claim);
                Sharer(self.claims.len() - 1)
            }
        }
    }

    fn leave(&mut self, sharer: Sharer) {
        self.claims[sharer.0] = Claim::default();
    }

    /// A sharer has requests waiting. It has no claim to what others had while it had none.
    fn begin(&mut self, sharer: Sharer) {
        let claim = &mut self.claims[sharer.0];
        let least = if claim.waiting {
            self.had.saturating_sub(ARREARS_NS)
        } else {
            self.had
        };
        claim.had = claim.had.max(least);
        claim.waiting = true;
    }

    /// The least that another waiting sharer has had.
    fn others(&self, sharer: Sharer, now: u64) -> u64 {
        self.waiting(sharer, now)
            .map(|claim| claim.had)
            .min()
            .unwrap_or(u64::MAX)
    }

    /// How many other sharers come first.
    fn before(&self, sharer: Sharer, now: u64) -> usize {
        let had = self.claims[sharer.0].had;
        self.waiting(sharer, now)
            .filter(|claim| claim.had < had)
            .count()
    }

    fn waiting(&self, sharer: Sharer, now: u64) -> impl Iterator<Item = &Claim> {
        self.claims
            .iter()
            .enumerate()
            .filter(move |(i, claim)| {
                *i != sharer.0 && claim.waiting && now <= claim.again + LATE_NS
            })
            .map(|(_, claim)| claim)
    }

    fn had(&mut self, sharer: Sharer, cost: u64) {
        let claim = &mut self.claims[sharer.0];
        self.had = self.had.max(claim.had);
        claim.had = claim.had.saturating_add(cost);
    }
}

/// One bucket for each limit.
struct Buckets {
    bytes: Limited,
    operations: Limited,
    /// Bytes that count as one operation.
    size: u64,
    /// When all of them leaked last.
    leaked: u64,
}

/// The buckets of one unit.
#[derive(Default)]
struct Limited {
    total: Option<Bucket>,
    read: Option<Bucket>,
    write: Option<Bucket>,
}

impl Limited {
    fn new(total: Rate, read: Rate, write: Rate) -> Self {
        Self {
            total: Bucket::new(total),
            read: Bucket::new(read),
            write: Bucket::new(write),
        }
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Bucket> {
        [&mut self.total, &mut self.read, &mut self.write]
            .into_iter()
            .flatten()
    }

    fn of(&self, direction: Direction) -> impl Iterator<Item = &Bucket> {
        let part = match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
        };
        [&self.total, part].into_iter().flatten()
    }

    fn of_mut(&mut self, direction: Direction) -> impl Iterator<Item = &mut Bucket> {
        let part = match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
        };
        [&mut self.total, part].into_iter().flatten()
    }
}

impl Buckets {
    fn new(limits: &ThrottleLimits) -> Self {
        Self {
            bytes: Limited::new(limits.bps_total, limits.bps_read, limits.bps_write),
            operations: Limited::new(limits.iops_total, limits.iops_read, limits.iops_write),
            size: limits.iops_size,
            leaked: 0,
        }
    }

    /// The same buckets with other limits. They stay as full as they were, so that frequent changes do not allow a
    /// burst each time.
    fn changed(&mut self, limits: &ThrottleLimits) -> Self {
        let mut new = Self::new(limits);
        new.leaked = self.leaked;
        let old = self.bytes.slots().zip(new.bytes.slots());
        let old = old.chain(self.operations.slots().zip(new.operations.slots()));
        for (old, new) in old {
            if let (Some(old), Some(new)) = (old, new) {
                new.average.level = old.average.level.min(new.average.full);
            }
        }
        new
    }

    fn leak(&mut self, now: u64) {
        let time = now.saturating_sub(self.leaked) as f64;
        self.leaked = self.leaked.max(now);
        let all = self.bytes.all().chain(self.operations.all());
        all.for_each(|bucket| bucket.leak(time));
    }

    fn operations(&self, bytes: u64) -> f64 {
        match self.size {
            0 => 1.0,
            size => (bytes as f64 / size as f64).max(1.0),
        }
    }

    fn due(&self, work: &Work, now: u64) -> u64 {
        let operations = self.operations.of(work.direction);
        let wait = self.bytes.of(work.direction).chain(operations);
        now.saturating_add(wait.map(Bucket::wait_ns).max().unwrap_or(0))
    }

    fn cost(&self, work: &Work) -> u64 {
        let bytes = self.bytes.of(work.direction);
        let bytes = bytes.map(|bucket| bucket.average.time_ns(work.bytes as f64));
        let n = self.operations(work.bytes);
        let operations = self.operations.of(work.direction);
        let operations = operations.map(|bucket| bucket.average.time_ns(n));
        bytes.chain(operations).max().unwrap_or(0)
    }

    fn pour(&mut self, work: &Work) {
        let n = self.operations(work.bytes);
        for bucket in self.bytes.of_mut(work.direction) {
            bucket.pour(work.bytes as f64);
        }
        for bucket in self.operations.of_mut(work.direction) {
            bucket.pour(n);
        }
    }
}

impl Limited {
    fn slots(&mut self) -> impl Iterator<Item = &mut Option<Bucket>> {
        [&mut self.total, &mut self.read, &mut self.write].into_iter()
    }
}

/// Seconds of a rate that may flow at once, so that a thread that is late catches up: tens of milliseconds on a busy
/// host. Over ten seconds, this is half a percent.
const SLACK_S: f64 = 0.05;

/// A limit with its burst.
struct Bucket {
    /// It holds what a burst may bring, and leaks at the rate that is allowed on average.
    average: Leaky,
    /// It holds next to nothing, and leaks at the rate that is allowed in a burst.
    burst: Option<Leaky>,
}

struct Leaky {
    level: f64,
    full: f64,
    per_ns: f64,
}

impl Bucket {
    fn new(rate: Rate) -> Option<Self> {
        let leaky = |per_s: u64, full: f64| Leaky {
            level: 0.0,
            full,
            per_ns: per_s as f64 / 1e9,
        };
        let slack = |per_s: u64| leaky(per_s, per_s as f64 * SLACK_S);
        match rate {
            Rate { average: 0, .. } => None,
            Rate { max: 0, .. } => Some(Self {
                average: slack(rate.average),
                burst: None,
            }),
            _ => Some(Self {
                average: leaky(
                    rate.average,
                    rate.max as f64 * rate.max_length.max(1) as f64,
                ),
                burst: Some(slack(rate.max)),
            }),
        }
    }

    fn both(&mut self) -> impl Iterator<Item = &mut Leaky> {
        std::iter::once(&mut self.average).chain(&mut self.burst)
    }

    fn leak(&mut self, time_ns: f64) {
        self.both()
            .for_each(|b| b.level = (b.level - time_ns * b.per_ns).max(0.0));
    }

    fn pour(&mut self, n: f64) {
        self.both().for_each(|b| b.level += n);
    }

    fn wait_ns(&self) -> u64 {
        let burst = self.burst.as_ref().map_or(0, Leaky::wait_ns);
        self.average.wait_ns().max(burst)
    }
}

impl Leaky {
    /// Time until a request can be poured in. It goes in as a whole, whatever its size, and the next one waits for it.
    fn wait_ns(&self) -> u64 {
        if self.level > self.full {
            self.time_ns(self.level - self.full)
        } else {
            0
        }
    }

    fn time_ns(&self, n: f64) -> u64 {
        (n / self.per_ns).ceil() as u64
    }
}
