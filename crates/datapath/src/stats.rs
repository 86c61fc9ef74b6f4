//! Statistics of a disk. Each queue's thread counts separately, and a reader adds up, at any time, without stopping the
//! threads.
//!
//! Operations and bytes are always counted. Latencies are measured while a caller [asks for
//! them](crate::Disk::measure): one look at the clock per batch, and one entry in a list per request.
//!
//! What is not asked for must not cost the shortest path more than 2 %: 673 and 678 instructions per I/O on the null
//! disk with all of it and the limits, idle; 675 to 678 in a build without (`cargo xtask bench --instructions`, three
//! rounds).

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use block::Request;
use guest::blk::Status;

pub(crate) mod activity;
pub(crate) mod histogram;

use crate::clock::now_ns;
use histogram::{AtomicHistogram, Histogram, add};

/// The kinds of requests that are counted apart.
const KINDS: usize = 5;

/// The most frequent kinds.
const READ: usize = 0;
const WRITE: usize = 1;

/// The stages of a request whose time is measured.
const STAGES: usize = 5;

/// A disk's statistics at one moment, summed over its queues, including those that have stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// When, in nanoseconds of the monotonic clock; in a [difference](Self::since), how long.
    pub at_ns: u64,
    /// Reads.
    pub read: RequestStats,
    /// Writes.
    pub write: RequestStats,
    /// Flushes; they have no bytes.
    pub flush: RequestStats,
    /// Discards; their bytes are the ranges'.
    pub discard: RequestStats,
    /// Writes of zeroes; their bytes are the ranges'.
    pub write_zeroes: RequestStats,
    /// Requests that the disk does not allow.
    pub refused: u64,
    /// Requests in flight now, including those that a limit holds back.
    pub under_way: u64,
    /// Requests in flight that storage failed to serve, and that wait for it to work again.
    pub stalled: u64,
    /// Queues in service now.
    pub queues: u64,
}

/// What is counted of one kind of requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// Completed with success.
    pub operations: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Completed with an error.
    pub errors: u64,
    /// How long they took while that was measured, including those that failed.
    pub latency: Latency,
}

/// How long requests took, in total and in parts. The time of a part is taken per batch: the first request of a batch
/// waits for the last one in the part in which the batch is processed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// From the available ring to the used ring.
    pub total: Histogram,
    /// From the available ring until limits let it go.
    pub waiting: Histogram,
    /// From there to the engine, or to its last piece: includes what the image needs that is not in memory, such as a
    /// table, or a cluster to be copied.
    pub image: Histogram,
    /// From the engine's queue to its completion, including the time until it is durable, if it must be.
    pub engine: Histogram,
    /// From completion to the used ring.
    pub publishing: Histogram,
}

impl DiskStats {
    /// What was counted since `earlier`, an older state of the same disk. Values that say how many there are now stay
    /// as they are.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            at_ns: self.at_ns.saturating_sub(earlier.at_ns),
            read: self.read.since(&earlier.read),
            write: self.write.since(&earlier.write),
            flush: self.flush.since(&earlier.flush),
            discard: self.discard.since(&earlier.discard),
            write_zeroes: self.write_zeroes.since(&earlier.write_zeroes),
            refused: self.refused.saturating_sub(earlier.refused),
            under_way: self.under_way,
            stalled: self.stalled,
            queues: self.queues,
        }
    }

    /// What is counted of each kind of requests, by name.
    pub fn kinds(&self) -> [(&'static str, &RequestStats); KINDS] {
        [
            ("read", &self.read),
            ("write", &self.write),
            ("flush", &self.flush),
            ("discard", &self.discard),
            ("write-zeroes", &self.write_zeroes),
        ]
    }

    /// The same, to change it.
    pub fn kinds_mut(&mut self) -> [(&'static str, &mut RequestStats); KINDS] {
        // In the order of `kind`, as above.
        [
            ("read", &mut self.read),
            ("write", &mut self.write),
            ("flush", &mut self.flush),
            ("discard", &mut self.discard),
            ("write-zeroes", &mut self.write_zeroes),
        ]
    }
}

impl Latency {
    /// The total and its parts, by name.
    pub fn stages(&self) -> [(&'static str, &Histogram); STAGES] {
        [
            ("total", &self.total),
            ("waiting", &self.waiting),
            ("image", &self.image),
            ("engine", &self.engine),
            ("publishing", &self.publishing),
        ]
    }

    /// The same, to change it.
    pub fn stages_mut(&mut self) -> [(&'static str, &mut Histogram); STAGES] {
        [
            ("total", &mut self.total),
            ("waiting", &mut self.waiting),
            ("image", &mut self.image),
            ("engine", &mut self.engine),
            ("publishing", &mut self.publishing),
        ]
    }
}

impl RequestStats {
    fn since(&self, earlier: &Self) -> Self {
        let (new, old) = (&self.latency, &earlier.latency);
        Self {
            operations: self.operations.saturating_sub(earlier.operations),
            bytes: self.bytes.wrapping_sub(earlier.bytes),
            errors: self.errors.saturating_sub(earlier.errors),
            latency: Latency {
                total: new.total.since(&old.total),
                waiting: new.waiting.since(&old.waiting),
                image: new.image.since(&old.image),
                engine: new.engine.since(&old.engine),
                publishing: new.publishing.since(&old.publishing),
            },
        }
    }
}

/// Which kind a request is of, and how many bytes it counts for; `None` if it is not counted.
fn kind(request: &Request) -> Option<(usize, u64)> {
    match *request {
        Request::Read { len, .. } => Some((READ, len)),
        Request::Write { len, .. } => Some((WRITE, len)),
        Request::Flush => Some((2, 0)),
        Request::Discard { len, .. } => Some((3, len)),
        Request::WriteZeroes { len, .. } => Some((4, len)),
        Request::GetId => None,
    }
}

/// When a request passed the stages, in nanoseconds; all 0 if it is not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamps {
    pub fetched: u64,
    pub admitted: u64,
    pub submitted: u64,
}

impl Stamps {
    /// A request that was fetched at this time, and has not waited so far.
    #[inline]
    pub fn all(at: u64) -> Self {
        Self {
            fetched: at,
            admitted: at,
            submitted: at,
        }
    }
}

/// The counters of a queue, as its thread changes them.
pub(crate) struct Tally {
    counters: Arc<Counters>,
    /// Reads and writes that succeeded, including those before this queue: one addition per request, where the counters
    /// would need three instructions. The counters only store these sums.
    reads: Count,
    writes: Count,
    /// Measured requests of which the guest has not been told. Those of a batch share their times and form a run: this
    /// is the last run, and `runs` are those before.
    run: Run,
    runs: Vec<Run>,
    /// Most runs that are kept. Memory for all of them is allocated with the first.
    runs_max: usize,
}

#[derive(Default)]
struct Count {
    operations: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Default)]
struct Run {
    kind: usize,
    stamps: Stamps,
    reaped: u64,
    n: u64,
}

impl Tally {
    /// For a queue of a disk, with at most so many requests in flight.
    pub fn new(statistics: &Statistics, requests: usize, is_client: bool) -> Self {
        let counters = statistics.join(is_client);
        let count = |kind: usize| Count {
            operations: counters.operations[kind].load(Ordering::Relaxed),
            bytes: counters.bytes[kind].load(Ordering::Relaxed),
        };
        Self {
            reads: count(READ),
            writes: count(WRITE),
            counters,
            run: Run::default(),
            runs: Vec::new(),
            runs_max: requests,
        }
    }

    /// A request is answered without I/O.
    #[inline]
    pub fn answered(&mut self, request: &Request, status: Status, stamps: Stamps) {
        self.finished(request, status);
        if stamps.fetched > 0 {
            self.measured(request, stamps, stamps.submitted);
        }
    }

    /// A request is completed with this status.
    #[inline]
    pub fn finished(&mut self, request: &Request, status: Status) {
        let (count, len) = match (status, *request) {
            // Nearly all of them.
            (Status::Ok, Request::Read { len, .. }) => (&mut self.reads, len),
            (Status::Ok, Request::Write { len, .. }) => (&mut self.writes, len),
            _ => return self.finished_other(request, status),
        };
        count.operations += 1;
        // The sum of what a guest asks for may exceed 64 bits.
        count.bytes = count.bytes.wrapping_add(len);
    }

    #[cold]
    fn finished_other(&mut self, request: &Request, status: Status) {
        match (kind(request), status) {
            (None, _) => {}
            // Neither a read nor a write.
            (Some((kind, bytes)), Status::Ok) => self.counters.count(kind, bytes),
            (Some((kind, _)), _) => add(&self.counters.errors[kind], 1),
        }
    }

    #[cold]
    pub fn refused(&mut self) {
        add(&self.counters.refused, 1);
    }

    /// A request that is measured is done.
    #[inline]
    pub fn measured(&mut self, request: &Request, stamps: Stamps, reaped: u64) {
        let Some((kind, _)) = kind(request) else {
            return;
        };
        let run = &mut self.run;
        if (run.kind, run.stamps, run.reaped) == (kind, stamps, reaped) {
            run.n += 1;
            return;
        }
        self.measured_apart(kind, stamps, reaped);
    }

    #[cold]
    fn measured_apart(&mut self, kind: usize, stamps: Stamps, reaped: u64) {
        // There is room for all requests that can be in flight; a guest that makes a request available twice gets one
        // measurement less.
        if self.run.n > 0 && self.runs.len() < self.runs_max {
            if self.runs.capacity() == 0 {
                self.runs.reserve_exact(self.runs_max);
            }
            self.runs.push(self.run);
        }
        self.run = Run {
            kind,
            stamps,
            reaped,
            n: 1,
        };
    }

    /// The guest is about to be told of completed requests: from now on they are in the counters, with the number of
    /// requests in flight.
    #[inline]
    pub fn count(&mut self, under_way: usize) {
        let Counters {
            operations,
            bytes,
            under_way: now,
            ..
        } = &*self.counters;
        for (kind, count) in [(READ, &self.reads), (WRITE, &self.writes)] {
            operations[kind].store(count.operations, Ordering::Relaxed);
            bytes[kind].store(count.bytes, Ordering::Relaxed);
        }
        now.store(under_way as u64, Ordering::Relaxed);
    }

    /// Since when storage has not answered an operation of the queue, in nanoseconds of the monotonic clock.
    pub fn unanswered_since(&self, oldest: Option<u64>) {
        let since = &self.counters.unanswered_since;
        since.store(oldest.unwrap_or(0), Ordering::Relaxed);
    }

    /// The guest has been told of completed requests.
    #[inline]
    pub fn publish(&mut self) {
        if self.run.n > 0 {
            self.publish_times();
        }
    }

    #[cold]
    fn publish_times(&mut self) {
        let now = now_ns();
        for run in self.runs.iter().chain([&self.run]) {
            let Stamps {
                fetched,
                admitted,
                submitted,
            } = run.stamps;
            let times = self.counters.times[run.kind].get_or_init(Times::new);
            let [total, waiting, image, engine, publishing] = &times.0;
            total.add(now.saturating_sub(fetched), run.n);
            waiting.add(admitted.saturating_sub(fetched), run.n);
            image.add(submitted.saturating_sub(admitted), run.n);
            engine.add(run.reaped.saturating_sub(submitted), run.n);
            publishing.add(now.saturating_sub(run.reaped), run.n);
        }
        self.runs.clear();
        self.run.n = 0;
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.count(0);
        self.unanswered_since(None);
        self.publish();
        self.counters.in_use.store(false, Ordering::Release);
    }
}

/// The counters of one queue, written only by its thread. A later queue continues with them.
#[derive(Default)]
struct Counters {
    in_use: AtomicBool,
    /// Of queues of clients, not of the guest.
    is_client: bool,
    operations: [AtomicU64; KINDS],
    bytes: [AtomicU64; KINDS],
    errors: [AtomicU64; KINDS],
    refused: AtomicU64,
    under_way: AtomicU64,
    /// Since when storage has not answered an operation, in nanoseconds of the monotonic clock, as the last check found; 0
    /// if it has answered all.
    unanswered_since: AtomicU64,
    /// By kind, allocated when the first request of a kind has been measured.
    times: [OnceLock<Box<Times>>; KINDS],
}

/// How long requests of one kind took: 21 KiB.
struct Times([AtomicHistogram; STAGES]);

impl Times {
    fn new() -> Box<Self> {
        Box::new(Self(std::array::from_fn(|_| AtomicHistogram::new())))
    }
}

impl Counters {
    #[inline]
    fn count(&self, kind: usize, bytes: u64) {
        add(&self.operations[kind], 1);
        add(&self.bytes[kind], bytes);
    }
}

/// The counters of all queues of a disk.
#[derive(Default)]
pub(crate) struct Statistics {
    /// How many callers have latencies measured.
    measured_for: AtomicUsize,
    /// As many as the largest number of queues at a time.
    queues: Mutex<Vec<Arc<Counters>>>,
}

impl Statistics {
    fn queues(&self) -> MutexGuard<'_, Vec<Arc<Counters>>> {
        self.queues.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn join(&self, is_client: bool) -> Arc<Counters> {
        let mut queues = self.queues();
        let free =
            |c: &&Arc<Counters>| c.is_client == is_client && !c.in_use.load(Ordering::Acquire);
        let counters = match queues.iter().find(free) {
            Some(counters) => counters.clone(),
            None => {
                queues.push(Arc::new(Counters {
                    is_client,
                    ..Counters::default()
                }));
                queues[queues.len() - 1].clone()
            }
        };
        counters.in_use.store(true, Ordering::Relaxed);
        counters
    }

    /// What all queues have counted, without latencies. Allocates nothing.
    pub fn counts(&self, stalled: u64) -> DiskStats {
        let mut stats = DiskStats {
            at_ns: now_ns(),
            stalled,
            ..DiskStats::default()
        };
        let load = |n: &AtomicU64| n.load(Ordering::Relaxed);
        for counters in &*self.queues() {
            for (kind, (_, sum)) in stats.kinds_mut().into_iter().enumerate() {
                sum.operations += load(&counters.operations[kind]);
                sum.bytes = sum.bytes.wrapping_add(load(&counters.bytes[kind]));
                sum.errors += load(&counters.errors[kind]);
            }
            stats.refused += load(&counters.refused);
            stats.under_way += load(&counters.under_way);
            stats.queues += u64::from(counters.in_use.load(Ordering::Relaxed));
        }
        stats
    }

    /// Since when storage has not answered an operation of any queue, in nanoseconds of the monotonic clock, as the last
    /// check found.
    pub fn unanswered_since(&self) -> Option<u64> {
        let queues = self.queues();
        let all = queues
            .iter()
            .map(|c| c.unanswered_since.load(Ordering::Relaxed));
        all.filter(|&since| since > 0).min()
    }

    /// Adds the latencies that all queues have measured.
    pub fn add_latencies(&self, stats: &mut DiskStats) {
        for counters in &*self.queues() {
            for (times, (_, sum)) in counters.times.iter().zip(stats.kinds_mut()) {
                let histograms = times.get().into_iter().flat_map(|times| &times.0);
                for (histogram, (_, sum)) in histograms.zip(sum.latency.stages_mut()) {
                    histogram.add_to(sum);
                }
            }
        }
    }

    /// How long reads and writes of the guest took while that was measured.
    pub fn guest_latencies(&self) -> Histogram {
        let mut sum = Histogram::default();
        for counters in self.queues().iter().filter(|c| !c.is_client) {
            for times in [READ, WRITE].map(|kind| counters.times[kind].get()) {
                times.iter().for_each(|times| times.0[0].add_to(&mut sum));
            }
        }
        sum
    }

    /// Measures latencies from now on, until [`stop_measuring`](Self::stop_measuring) was called as often.
    pub fn start_measuring(&self) {
        self.measured_for.fetch_add(1, Ordering::Relaxed);
    }

    pub fn stop_measuring(&self) {
        self.measured_for.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether latencies are wanted.
    #[inline]
    pub fn is_measuring(&self) -> bool {
        self.measured_for.load(Ordering::Relaxed) > 0
    }

    /// The time of a batch, or 0 if its requests are not measured.
    #[inline]
    pub fn stamp(&self) -> u64 {
        if self.is_measuring() { now_ns() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// They are larger than everything else that a queue needs, and most disks of a host have no discards, and little
    /// to do.
    #[test]
    fn a_queue_allocates_only_histograms_that_it_fills() {
        let statistics = Statistics::default();
        statistics.start_measuring();
        let mut tally = Tally {
            counters: statistics.join(false),
            reads: Count::default(),
            writes: Count::default(),
            run: Run::default(),
            runs: Vec::new(),
            runs_max: 2,
        };
        let made = |tally: &Tally| tally.counters.times.each_ref().map(|t| t.get().is_some());
        tally.publish();
        assert_eq!(made(&tally), [false; KINDS]);
        let at = block::GuestOffset(0);
        let read = Request::Read { at, len: 512 };
        for (request, from) in [(read, 1), (Request::Flush, 2), (read, 3), (read, 4)] {
            tally.measured(&request, Stamps::all(from), from);
        }
        tally.publish();
        assert_eq!(made(&tally), [true, false, true, false, false]);
        let mut total = Histogram::default();
        let [reads, ..] = tally.counters.times.each_ref().map(|times| times.get());
        reads.unwrap().0[0].add_to(&mut total);
        // Of four runs, one found no room.
        assert_eq!(total.count(), 2);
    }
}
