//! When a thread polls before it sleeps: what it has learned of each disk, what a sleep costs here, and how much CPU
//! polling may take. It has no clock: the caller passes the time, in nanoseconds.
//!
//! Polling saves a sleep and a wake-up: their CPU, and their latency. The latency matters only if the guest waits for
//! this very request: it has one request at a time, and sends the next one soon after the last one has ended. Such a
//! guest always takes some time to send the next request. A guest that sends requests at its own times often has the
//! next one ready at once. It is not polled for, unless polling takes less CPU than a sleep.

use std::time::Duration;

/// How an I/O thread may poll before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polling {
    /// Longest time before one sleep; zero for never.
    pub max: Duration,
    /// What polling may cost beyond the sleeps that it saves, in percent of a core: 1 to 100.
    pub cpu: u8,
}

impl Default for Polling {
    fn default() -> Self {
        Self {
            max: Duration::from_micros(100),
            cpu: 80,
        }
    }
}

impl Polling {
    /// Never longer than this, and the default otherwise.
    pub fn up_to(max: Duration) -> Self {
        Self {
            max,
            ..Self::default()
        }
    }
}

/// How long something takes. All zero before the first.
#[derive(Clone, Copy, Default)]
struct TypicalTime {
    /// The moving average, and the average distance of single times from it.
    mean: u64,
    deviation: u64,
    /// About half of the times are longer. A few long ones do not move it, unlike the mean.
    median: u64,
    /// Of 1024, how many took less than half of the median.
    early: u64,
}

impl TypicalTime {
    fn add(&mut self, ns: u64) {
        if self.mean == 0 {
            *self = Self {
                mean: ns.max(1),
                deviation: ns,
                median: ns,
                early: EARLY_MAX * 5 / 4,
            };
            return;
        }
        let early = if ns * 2 < self.median { 1024 } else { 0 };
        self.early = (self.early * 31 + early) / 32;
        let step = self.median / 16 + 1;
        self.median = if ns > self.median {
            self.median + step
        } else {
            self.median.saturating_sub(step)
        };
        self.deviation = (self.deviation * 7 + ns.abs_diff(self.mean)) / 8;
        self.mean = (self.mean * 7 + ns) / 8;
    }

    /// The time that nearly all of them stay below.
    fn usual_max(&self) -> u64 {
        self.mean + 2 * self.deviation
    }

    /// Whether nearly all take at least half as long as the median. Of times between independent events, 29 % are
    /// shorter than that.
    fn is_steady(&self) -> bool {
        self.early <= EARLY_MAX
    }
}

const EARLY_MAX: u64 = 100;

/// What a thread has learned of a disk.
#[derive(Default)]
pub(crate) struct PollEstimator {
    /// From the end of the only request in flight to the guest's next one, where the thread polled.
    return_time: TypicalTime,
    /// The same where it slept: longer by a wake-up.
    return_time_asleep: TypicalTime,
    /// An operation of a request that is alone.
    operation: TypicalTime,
    /// When the thread first saw that no request is in flight; 0 while one is.
    idle_since: u64,
    /// The guest is polled for.
    is_polled_for: bool,
    /// A trial has shown that it pays.
    is_proven: bool,
    /// Requests of a trial so far, or requests until the next trial.
    count: u16,
    /// Requests until the next trial, after the next one that fails.
    pause: u16,
}

/// Requests for which polling is tried before it is judged.
const TRIAL: u16 = 8;

/// Requests until the next trial after one that failed: at first, and after many.
const PAUSE_MIN: u16 = 200;
const PAUSE_MAX: u16 = 1600;

impl PollEstimator {
    /// No request of the disk is in flight.
    #[inline]
    pub fn note_idle(&mut self, now: u64) {
        if self.idle_since == 0 {
            self.idle_since = now;
        }
    }

    /// The guest sent its next request after this time.
    fn learn_return(&mut self, ns: u64, polled: bool, max: u64, sleep: u64) {
        match (self.is_polled_for, polled) {
            (true, true) => {
                // A single time that the thread had to wait for a CPU, or the guest for something else, says little.
                self.return_time.add(ns.min(max * 3 / 5));
                self.count = (self.count + 1).min(TRIAL);
                if self.count == TRIAL {
                    self.is_proven = self.pays(max, sleep);
                    if self.is_proven {
                        self.pause = PAUSE_MIN;
                    } else {
                        (self.is_polled_for, self.count) = (false, self.pause.max(PAUSE_MIN));
                        self.pause = (self.count * 2).min(PAUSE_MAX);
                    }
                }
            }
            // The thread was not allowed to poll now.
            (true, false) => {}
            (false, _) => {
                self.return_time_asleep.add(ns.min(max * 3 / 2));
                self.count = self.count.saturating_sub(1);
                let TypicalTime {
                    mean, deviation, ..
                } = self.return_time_asleep;
                if self.count == 0 && mean <= max && deviation * 2 <= mean {
                    self.return_time = TypicalTime::default();
                    self.is_polled_for = true;
                }
            }
        }
    }

    /// Whether to poll for the guest: polling takes no more CPU than a sleep; or the guest waits for each request
    /// before it sends the next one, so soon that a wake-up is a good part of the time of a request.
    fn pays(&self, max: u64, sleep: u64) -> bool {
        let little = (max * 3 / 10).max(self.operation.mean / 2);
        // If polling was found to pay, it continues until it clearly does not.
        let little = if self.is_proven {
            little * 3 / 2
        } else {
            little
        };
        let instant = self.operation.mean <= max / 10;
        let soon =
            self.return_time.mean <= max * 11 / 20 && (instant || self.return_time.mean <= little);
        self.return_time.mean <= sleep
            || soon && self.return_time.is_steady() && self.operation.mean <= max * 2
    }

    /// Whether to poll through operations too: they take about as much CPU as a sleep, or the guest does nothing but
    /// wait for them.
    fn pays_for_operations(&self, max: u64, sleep: u64) -> bool {
        let waits = if self.is_proven { max / 4 } else { max / 5 };
        self.operation.usual_max() <= sleep * 2
            || self.return_time.median <= waits.max(sleep * 3 / 2)
    }
}

/// Decides whether a thread polls.
pub(crate) struct Poller {
    max: u64,
    /// Percent of the time that polling may take.
    share: u64,
    /// What polling may cost now; negative after it has cost too much. Refilled at `refilled`.
    budget: i64,
    refilled: u64,
    /// CPU time of a sleep and of being woken.
    sleep_cost: u64,
    sleeps: u32,
    /// Whether it polled the last time that it waited.
    has_polled: bool,
}

/// What a disk waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PollTarget {
    Guest,
    Operation,
}

/// The assumed cost of a sleep before one was measured.
const SLEEP_NS: u64 = 10_000;

/// No sleep costs more: a larger value measured something else.
const SLEEP_MAX_NS: u64 = 40_000;

/// The first sleeps are measured, and then each one after so many.
const MEASURED_FIRST: u32 = 8;
const MEASURED_EACH: u32 = 32;

/// How much of the CPU time for polling can be saved up.
const SAVED_UP_NS: i64 = 10_000_000;

impl Poller {
    pub fn new(polling: Polling) -> Self {
        let mut poller = Self {
            max: polling.max.as_nanos() as u64,
            share: u64::from(polling.cpu.clamp(1, 100)),
            budget: 0,
            refilled: 0,
            sleep_cost: SLEEP_NS,
            sleeps: 0,
            has_polled: false,
        };
        poller.budget = poller.budget_max();
        poller
    }

    /// Whether it never polls.
    #[inline]
    pub fn is_off(&self) -> bool {
        self.max == 0
    }

    /// How long to poll for this disk. A disk that a limit holds back mostly waits for the limit: it is polled for only
    /// where that takes less CPU than a sleep.
    #[inline]
    pub fn window(&self, estimator: &PollEstimator, target: PollTarget, limited: bool) -> u64 {
        let PollEstimator {
            return_time,
            operation,
            ..
        } = estimator;
        if !estimator.is_polled_for || limited && return_time.usual_max() > self.sleep_cost {
            return 0;
        }
        match target {
            PollTarget::Guest if estimator.count < TRIAL => self.max * 3 / 5,
            PollTarget::Guest => return_time.usual_max().min(self.max),
            PollTarget::Operation
                if !limited
                    && estimator.count == TRIAL
                    && estimator.pays_for_operations(self.max, self.sleep_cost)
                    // While the thread sleeps, this is longer by a wake-up.
                    && operation.mean <= self.max * 3 / 2 =>
            {
                operation.usual_max().min(self.max)
            }
            PollTarget::Operation => 0,
        }
    }

    /// The guest of this disk has sent a request; `now` is asked for only if it was quiet.
    #[inline]
    pub fn request_arrived(&self, estimator: &mut PollEstimator, now: impl FnOnce() -> u64) {
        if estimator.idle_since > 0 {
            let time = now().saturating_sub(estimator.idle_since);
            estimator.idle_since = 0;
            estimator.learn_return(time, self.has_polled, self.max, self.sleep_cost);
        }
    }

    /// A lone operation of this disk took this long.
    #[inline]
    pub fn record_operation(&self, estimator: &mut PollEstimator, ns: u64) {
        estimator.operation.add(ns.min(self.max * 4));
    }

    /// Whether to poll now for so long.
    #[inline]
    pub fn may_poll(&mut self, now: u64, window: u64) -> bool {
        self.has_polled = false;
        if window == 0 {
            return false;
        }
        let time = now.saturating_sub(self.refilled).min(1_000_000_000);
        self.refilled = now;
        let more = (time * self.share / 100) as i64;
        self.budget = self.budget.saturating_add(more).min(self.budget_max());
        self.budget >= 0
    }

    /// It polled for so long. Returns what this saved.
    #[inline]
    pub fn record_poll(&mut self, ns: u64, hit: bool) -> u64 {
        self.has_polled = true;
        let saved = if hit { self.sleep_cost } else { 0 };
        // Beyond the longest time to poll, the thread was waiting for a CPU.
        let ns = ns.min(self.max);
        self.budget = (self.budget + saved as i64 - ns as i64).min(self.budget_max());
        saved
    }

    /// Whether to measure the sleep that comes now.
    #[inline]
    pub fn measures_next_sleep(&mut self) -> bool {
        self.sleeps = self.sleeps.wrapping_add(1);
        !self.is_off()
            && (self.sleeps <= MEASURED_FIRST || self.sleeps.is_multiple_of(MEASURED_EACH))
    }

    /// A sleep took so much CPU time.
    pub fn record_sleep(&mut self, cpu_ns: u64) {
        self.sleep_cost = (self.sleep_cost * 3 + cpu_ns.min(SLEEP_MAX_NS)) / 4;
    }

    fn budget_max(&self) -> i64 {
        SAVED_UP_NS * self.share as i64 / 100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 100_000;

    fn poller(cpu: u8) -> Poller {
        Poller::new(Polling {
            max: Duration::from_nanos(MAX),
            cpu,
        })
    }

    /// What a wake-up takes.
    const WAKE: u64 = 30_000;

    /// The guest of this disk sends requests after these times, one after another.
    fn send(estimator: &mut PollEstimator, times: impl IntoIterator<Item = u64>) {
        let mut poller = poller(50);
        for time in times {
            let polls = poller.window(estimator, PollTarget::Guest, false);
            poller.has_polled = polls > 0;
            let result = if time <= polls { time } else { time + WAKE };
            estimator.note_idle(1);
            poller.request_arrived(estimator, || result + 1);
        }
    }

    fn guest(times: impl IntoIterator<Item = u64>) -> PollEstimator {
        let mut estimator = PollEstimator::default();
        send(&mut estimator, times);
        estimator
    }

    /// Times between independent requests, with this average.
    fn independent(mean: f64) -> impl Iterator<Item = u64> {
        let mut state = 1u64;
        std::iter::repeat_with(move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let uniform = ((state >> 11) as f64 + 1.0) / (1u64 << 53) as f64;
            (-uniform.ln() * mean) as u64
        })
    }

    #[test]
    fn polls_for_a_guest_at_depth_one_and_not_for_a_silent_one() {
        let poller = poller(50);
        let window = |estimator: &PollEstimator, what| poller.window(estimator, what, false);
        assert_eq!(window(&PollEstimator::default(), PollTarget::Guest), 0);
        assert_eq!(window(&PollEstimator::default(), PollTarget::Operation), 0);

        let times = [18_000, 20_000, 21_000, 19_000].repeat(16);
        let mut estimator = guest(times.clone());
        poller.record_operation(&mut estimator, 80_000);
        let guest_window = window(&estimator, PollTarget::Guest);
        assert!((20_000..=30_000).contains(&guest_window), "{guest_window}");
        assert_eq!(window(&estimator, PollTarget::Operation), MAX);

        send(&mut estimator, [1 << 50]);
        assert!(
            window(&estimator, PollTarget::Guest) > 0,
            "once is no habit"
        );
        send(&mut estimator, [1 << 50; 32]);
        assert_eq!(window(&estimator, PollTarget::Guest), 0, "it does not wait");
        send(&mut estimator, times.repeat(4));
        assert!(window(&estimator, PollTarget::Guest) > 0, "it is forgotten");
    }

    #[test]
    fn polls_for_a_guest_with_think_time_on_instant_storage() {
        let poller = poller(50);
        for (think, operation, guest_polled, operation_polled) in [
            (12_000, 80_000, true, true),
            (28_000, 80_000, true, false),
            (28_000, 8_000, true, true),
            (35_000, 80_000, true, false),
            (50_000, 80_000, false, false),
            (50_000, 0, true, false),
            (80_000, 0, false, false),
            (25_000, 5_000_000, false, false),
            (4_000, 5_000_000, true, false),
        ] {
            let mut estimator = PollEstimator::default();
            let mut polled = [0, 0];
            for _ in 0..1000 {
                send(&mut estimator, [think]);
                if operation > 0 {
                    poller.record_operation(&mut estimator, operation);
                }
                for (n, what) in polled
                    .iter_mut()
                    .zip([PollTarget::Guest, PollTarget::Operation])
                {
                    *n += u32::from(poller.window(&estimator, what, false) > 0);
                }
            }
            for (n, wanted) in polled.into_iter().zip([guest_polled, operation_polled]) {
                let right = if wanted { n > 900 } else { n < 150 };
                assert!(right, "{think} {operation}: {polled:?} of 1000");
            }
        }
    }

    #[test]
    fn does_not_poll_for_independent_requests() {
        for mean in [15_000.0, 62_500.0, 250_000.0, 1e6, 1e7] {
            let mut estimator = PollEstimator::default();
            let poller = poller(50);
            let mut polled = 0;
            for time in independent(mean).take(10_000) {
                polled += time.min(poller.window(&estimator, PollTarget::Guest, false));
                send(&mut estimator, [time]);
            }
            assert!(
                polled < 10_000 * 1_500,
                "{} ns each at {mean}",
                polled / 10_000
            );
        }
    }

    #[test]
    fn polls_for_a_guest_that_is_sometimes_late() {
        let poller = poller(50);
        let mut estimator = guest([7_000; 64]);
        poller.record_operation(&mut estimator, 60_000);
        let mut polled = [0, 0];
        for n in 0..1000 {
            let late = n % 7 == 0 || n % 11 == 0;
            send(&mut estimator, [if late { 55_000 } else { 7_000 }]);
            for (n, what) in polled
                .iter_mut()
                .zip([PollTarget::Guest, PollTarget::Operation])
            {
                *n += u32::from(poller.window(&estimator, what, false) > 0);
            }
        }
        assert!(polled.iter().all(|&n| n > 950), "{polled:?} of 1000");
    }

    #[test]
    fn does_not_poll_for_a_limit() {
        let poller = poller(50);
        let often = guest([3_000; 64]);
        assert!(
            poller.window(&often, PollTarget::Guest, true) > 0,
            "a sleep costs more"
        );
        assert_eq!(poller.window(&often, PollTarget::Operation, true), 0);
        let waits = guest([25_000; 64]);
        assert!(poller.window(&waits, PollTarget::Guest, false) > 0);
        assert_eq!(poller.window(&waits, PollTarget::Guest, true), 0);
    }

    #[test]
    fn the_net_cost_of_polling_is_bounded() {
        for (cpu, saved_each) in [(1, 0), (10, 0), (50, 0), (50, SLEEP_NS)] {
            let mut poller = poller(cpu);
            let (mut now, mut cost) = (1_000_000_000, 0u64);
            let start = now;
            while now < start + 1_000_000_000 {
                if poller.may_poll(now, 50_000) {
                    now += 50_000;
                    let saved = poller.record_poll(50_000, saved_each > 0);
                    assert_eq!(saved, saved_each);
                    cost += 50_000 - saved;
                }
                now += 1_000;
            }
            let bound = 10_100_000 * u64::from(cpu) + 50_000;
            assert!(cost <= bound, "{cpu} %: {cost} ns of a second");
            assert!(cost * 10 >= bound * 8, "{cpu} %: {cost} ns of a second");
        }
    }

    #[test]
    fn a_sleep_is_measured_and_zero_means_never() {
        let mut poller = poller(50);
        let measured = (0..MEASURED_EACH * 10)
            .filter(|_| poller.measures_next_sleep())
            .count();
        assert_eq!(measured, 8 + 10);
        (0..32).for_each(|_| poller.record_sleep(3_000));
        assert!(poller.record_poll(1, true).abs_diff(3_000) < 10);
        let mut never = Poller::new(Polling::up_to(Duration::ZERO));
        assert!(never.is_off() && !never.measures_next_sleep());
        assert_eq!(never.window(&guest([0; 64]), PollTarget::Guest, false), 0);
    }
}
