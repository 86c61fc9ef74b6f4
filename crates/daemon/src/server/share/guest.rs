//! How much clients may have in flight, so that the disk's guest hardly notices them.
//!
//! How long storage takes for the clients does not tell what it would take for the guest alone: a guest that is always busy
//! makes it slow, too. So clients pause for a moment again and again, and the latency of the guest's requests in the pause
//! is compared with that between pauses.

use std::time::{Duration, Instant};

use datapath::Histogram;

use super::SHARE_MAX;

/// Fewest bytes that clients have in flight, on average over time: a backup must end some day.
const LIMIT_MIN: u64 = 32 << 10;

/// How long clients do what they may between two pauses.
const BUSY: Duration = Duration::from_millis(500);

/// How long a pause is, after the guest's requests that have met those of clients are done.
const PAUSE: Duration = Duration::from_millis(20);

/// When the guest's requests count as done, at the latest.
const SETTLE_MAX: Duration = Duration::from_millis(20);

/// The latency that is compared is one that so many percent of the requests do not exceed.
const PERCENT: f64 = 90.0;

/// How many times the latency without clients it may be with them; and from where on they may have no more than now.
const LATENCY_MAX: f64 = 1.25;
const LATENCY_GOOD: f64 = 1.15;

/// Requests of the guest from which a latency is taken.
const REQUESTS_MIN: u64 = 32;

/// What clients may do for the guest's sake.
pub struct GuestPace {
    /// Bytes in flight, on average.
    limit: u64,
    phase: Phase,
    /// The guest's latencies in the last pauses and between them; the older ones count less.
    alone: Histogram,
    beside_clients: Histogram,
}

enum Phase {
    /// Nothing is known.
    New,
    /// Nothing begins. What is in flight ends.
    Draining,
    /// The guest's requests that have met those of clients end.
    Settling { until: Instant },
    /// Nobody but the guest has requests in flight.
    Pausing { until: Instant, before: Histogram },
    /// Clients may begin.
    Busy { until: Instant, before: Histogram },
}

impl Default for GuestPace {
    fn default() -> Self {
        Self {
            limit: SHARE_MAX,
            phase: Phase::New,
            alone: Histogram::default(),
            beside_clients: Histogram::default(),
        }
    }
}

impl GuestPace {
    #[cfg(test)]
    pub fn with_limit(limit: u64) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Most bytes that clients may have in flight; less than a request means that there are times with none.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// When clients may begin again, if they may not now. `None` also if that depends on what is in flight.
    pub fn pauses_until(&self) -> Option<Instant> {
        match self.phase {
            Phase::Settling { until } | Phase::Pausing { until, .. } => Some(until),
            _ => None,
        }
    }

    /// Whether nothing may begin.
    pub fn is_pausing(&self) -> bool {
        !matches!(self.phase, Phase::New | Phase::Busy { .. })
    }

    /// Looks what time it is. Clients have bytes in flight, and might have so many were it not for the guest. `latencies` are
    /// all of the guest's so far; `was_limited` says whether clients would have done more than they were allowed to for the
    /// guest's sake, and is reset when that has been used.
    pub fn advance(
        &mut self,
        now: Instant,
        (in_flight, might_have): (u64, u64),
        was_limited: &mut bool,
        latencies: impl Fn() -> Histogram,
    ) {
        match &mut self.phase {
            Phase::New => self.begin_busy(now, latencies()),
            Phase::Busy { until, before } if now >= *until => {
                let new = latencies().since(before);
                if now - *until > BUSY {
                    // Clients did nothing for a while.
                    self.begin_busy(now, latencies());
                } else if new.count() == 0 {
                    // The guest does nothing.
                    self.limit = SHARE_MAX;
                    self.begin_busy(now, latencies());
                } else {
                    self.beside_clients.fade();
                    self.beside_clients.add(&new);
                    self.phase = Phase::Draining;
                }
            }
            _ => {}
        }
        if matches!(self.phase, Phase::Draining) && in_flight == 0 {
            let last = self.beside_clients.percentile_ns(PERCENT);
            let settle = Duration::from_nanos(last.unwrap_or(0)).min(SETTLE_MAX);
            let until = now + settle;
            self.phase = Phase::Settling { until };
        }
        match &mut self.phase {
            Phase::Settling { until } if now >= *until => {
                let (until, before) = (now + PAUSE, latencies());
                self.phase = Phase::Pausing { until, before };
            }
            Phase::Pausing { until, before } if now >= *until => {
                let latencies = latencies();
                self.alone.fade();
                self.alone.add(&latencies.since(before));
                self.change_limit(might_have, std::mem::take(was_limited));
                self.begin_busy(now, latencies);
            }
            _ => {}
        }
    }

    fn begin_busy(&mut self, now: Instant, before: Histogram) {
        let until = now + BUSY;
        self.phase = Phase::Busy { until, before };
    }

    fn change_limit(&mut self, might_have: u64, was_limited: bool) {
        let latency = |of: &Histogram| {
            let n = of.count();
            let latency = of.percentile_ns(PERCENT).filter(|_| n >= REQUESTS_MIN);
            latency.map(|ns| ns as f64)
        };
        let times = match (latency(&self.beside_clients), latency(&self.alone)) {
            (Some(beside), Some(alone)) => beside / alone.max(1.0),
            // A guest with few requests.
            _ => 1.0,
        };
        if times > LATENCY_MAX {
            let part = (LATENCY_MAX / times).max(0.5);
            let had = self.limit.min(might_have);
            self.limit = ((had as f64 * part) as u64).max(LIMIT_MIN);
        } else if times < LATENCY_GOOD && was_limited {
            self.limit = (self.limit + self.limit / 4).min(SHARE_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Requests per millisecond, and how many microseconds each takes, and longer for each 64 KiB of the clients.
    struct Guest {
        per_ms: u64,
        alone_us: u64,
        more_us: u64,
    }

    /// What the clients may have in flight at the end of this time.
    fn settled(pace: &mut GuestPace, guest: &Guest, seconds: std::ops::Range<u32>) -> u64 {
        let Guest {
            per_ms,
            alone_us,
            more_us,
        } = *guest;
        let begin = Instant::now();
        let mut latencies = Histogram::default();
        for ms in seconds.start * 1000..seconds.end * 1000 {
            let now = begin + MS * ms;
            let mut was_limited = true;
            pace.advance(now, (0, SHARE_MAX), &mut was_limited, || latencies.clone());
            let in_flight = if pace.is_pausing() { 0 } else { pace.limit() };
            let took = (alone_us + more_us * in_flight / (64 << 10)) * 1000;
            if per_ms > 0 {
                latencies.add(&Histogram::from_buckets([(took, per_ms)], took * per_ms));
            }
        }
        pace.limit()
    }

    #[test]
    fn the_guest_is_slowed_down_a_little() {
        // It may take 250 us longer for 1000 us, which are 50 times 64 KiB.
        for (alone_us, more_us, units) in [(1000, 5, 50.0), (100, 10, 2.5), (20_000, 40, 125.0)] {
            for per_ms in [2, 60] {
                let mut pace = GuestPace::default();
                let guest = Guest {
                    per_ms,
                    alone_us,
                    more_us,
                };
                let limit = settled(&mut pace, &guest, 0..60);
                let limit = limit as f64 / f64::from(64 << 10);
                assert!(
                    (units * 0.3..units * 1.3).contains(&limit),
                    "{limit} of {units}, {per_ms} requests per ms"
                );
            }
        }
    }

    /// However long a busy guest's storage is slow, clients do not take it for how it always is.
    #[test]
    fn clients_stay_at_the_least_if_they_always_hurt() {
        let mut pace = GuestPace::default();
        let mut guest = Guest {
            per_ms: 30,
            alone_us: 100,
            more_us: 1000,
        };
        assert_eq!(settled(&mut pace, &guest, 0..300), LIMIT_MIN);
        // Without a guest they have what they want.
        guest.per_ms = 0;
        assert_eq!(settled(&mut pace, &guest, 301..310), SHARE_MAX);
    }

    /// Clients begin again after a pause, whether or not the guest does anything.
    #[test]
    fn pauses_are_short() {
        let mut pace = GuestPace::default();
        let mut latencies = Histogram::default();
        let (mut now, mut pausing) = (Instant::now(), 0);
        for ms in 0..10_000 {
            now += MS;
            if ms < 5_000 {
                latencies.add(&Histogram::from_buckets([(50_000_000, 1)], 50_000_000));
            }
            pace.advance(now, (0, SHARE_MAX), &mut false, || latencies.clone());
            pausing += u32::from(pace.is_pausing());
            let wait = pace
                .pauses_until()
                .map_or(Duration::ZERO, |until| until - now);
            assert!(wait <= SETTLE_MAX.max(PAUSE));
        }
        assert!((100..500).contains(&pausing), "{pausing} ms of 10 s");
    }

    /// What is in flight is waited for.
    #[test]
    fn a_pause_begins_when_nothing_is_in_flight() {
        let mut pace = GuestPace::default();
        let one = Histogram::from_buckets([(1000, 100)], 100_000);
        let now = Instant::now();
        pace.advance(now, (0, SHARE_MAX), &mut false, Histogram::default);
        assert!(!pace.is_pausing());
        let now = now + BUSY;
        pace.advance(now, (4096, SHARE_MAX), &mut false, || one.clone());
        assert!(pace.is_pausing() && pace.pauses_until().is_none());
        pace.advance(now + BUSY, (4096, SHARE_MAX), &mut false, || one.clone());
        assert!(pace.is_pausing() && pace.pauses_until().is_none());
        pace.advance(now + BUSY, (0, SHARE_MAX), &mut false, || one.clone());
        assert!(pace.pauses_until().is_some());
    }
}
