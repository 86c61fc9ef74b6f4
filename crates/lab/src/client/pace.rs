//! When each request is sent: at fixed times, or after pauses in bursts. This file does no I/O and reads no clock.

use harness::random::mix;
use serde::{Deserialize, Serialize};

use crate::plan::words::Arrival;

/// The rule for the time of the next request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "pace")]
pub enum Pace {
    /// Each request has its own time, whether or not earlier requests have completed.
    Open {
        /// Requests per second.
        per_second: f64,
        /// The distances between them.
        arrivals: Arrival,
    },
    /// The client sends `requests` together, waits for all of them, pauses, and repeats. One request with a short pause is
    /// like a guest that computes between two reads; a long pause is silence before a burst.
    Bursts {
        /// Requests of a burst.
        requests: usize,
        /// Microseconds from the last answer to the next burst.
        pause_us: u64,
    },
}

/// The times at which requests are due, in nanoseconds since the start of the schedule.
pub struct Schedule {
    pace: Pace,
    /// `None` while a burst is in flight
    next_ns: Option<u64>,
    /// Requests of the burst that have not been taken yet
    left: usize,
    /// The next time of an open loop before rounding
    exact_ns: f64,
    random: u64,
}

impl Schedule {
    /// A schedule that starts now. The same seed gives the same times.
    pub fn new(pace: Pace, seed: u64) -> Schedule {
        let mut schedule = Schedule {
            pace,
            next_ns: None,
            left: 0,
            exact_ns: 0.0,
            random: mix(seed),
        };
        match pace {
            Pace::Open { .. } => schedule.advance(),
            Pace::Bursts { .. } => schedule.all_done(0),
        }
        schedule
    }

    /// When the next request is due; `None` while a burst is in flight.
    pub fn next_ns(&self) -> Option<u64> {
        self.next_ns
    }

    /// Takes the next request from the schedule, and returns the time from which its latency counts.
    ///
    /// # Panics
    /// If no request is due.
    pub fn take(&mut self) -> u64 {
        let due_ns = self.next_ns.expect("a request is taken only if one is due");
        match self.pace {
            Pace::Open { .. } => self.advance(),
            Pace::Bursts { .. } => {
                self.left -= 1;
                self.next_ns = (self.left > 0).then_some(due_ns);
            }
        }
        due_ns
    }

    /// Tells the schedule that all requests have completed at `now_ns`.
    pub fn all_done(&mut self, now_ns: u64) {
        if let Pace::Bursts { requests, pause_us } = self.pace
            && self.left == 0
        {
            self.left = requests;
            self.next_ns = Some(now_ns + pause_us * 1000);
        }
    }

    /// Removes the requests that are due before `end_ns`, and returns their number.
    pub fn skip_to(&mut self, end_ns: u64) -> u64 {
        let mut skipped = 0;
        while matches!(self.pace, Pace::Open { .. }) && self.next_ns.is_some_and(|it| it < end_ns) {
            self.advance();
            skipped += 1;
        }
        skipped
    }

    fn advance(&mut self) {
        let Pace::Open {
            per_second,
            arrivals,
        } = self.pace
        else {
            return;
        };
        let mean_ns = 1e9 / per_second;
        self.exact_ns += match arrivals {
            Arrival::Linear => mean_ns,
            Arrival::Poisson => {
                self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
                // Uniform in (0, 1]: the logarithm of 0 is none.
                let uniform = ((mix(self.random) >> 11) + 1) as f64 / (1_u64 << 53) as f64;
                -uniform.ln() * mean_ns
            }
        };
        self.next_ns = Some(self.exact_ns as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(arrivals: Arrival) -> Pace {
        Pace::Open {
            per_second: 1000.0,
            arrivals,
        }
    }

    #[test]
    fn even_arrivals_are_one_period_apart() {
        let mut schedule = Schedule::new(open(Arrival::Linear), 1);
        let times: Vec<u64> = (0..4).map(|_| schedule.take()).collect();
        assert_eq!(times, [1_000_000, 2_000_000, 3_000_000, 4_000_000]);
    }

    #[test]
    fn poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() {
        let mut schedule = Schedule::new(open(Arrival::Poisson), 7);
        let times: Vec<u64> = (0..100_000).map(|_| schedule.take()).collect();
        let gaps_ms = times
            .windows(2)
            .map(|pair| (pair[1] - pair[0]) as f64 / 1e6);
        let mean = gaps_ms.clone().sum::<f64>() / 99_999.0;
        let variance = gaps_ms.map(|gap| (gap - mean).powi(2)).sum::<f64>() / 99_999.0;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        assert!((variance - 1.0).abs() < 0.05, "{variance}");
    }

    #[test]
    fn a_seed_gives_the_same_times_again_and_another_gives_others() {
        let times = |seed| {
            let mut schedule = Schedule::new(open(Arrival::Poisson), seed);
            (0..100).map(|_| schedule.take()).collect::<Vec<_>>()
        };
        assert_eq!(times(3), times(3));
        assert_ne!(times(3), times(4));
    }

    #[test]
    fn an_open_loop_does_not_wait_for_answers() {
        let mut schedule = Schedule::new(open(Arrival::Linear), 1);
        schedule.take();
        assert_eq!(schedule.next_ns(), Some(2_000_000));
        schedule.all_done(50_000_000);
        assert_eq!(schedule.next_ns(), Some(2_000_000));
        assert_eq!(schedule.skip_to(5_000_000), 3);
        assert_eq!(schedule.next_ns(), Some(5_000_000));
    }

    #[test]
    fn a_burst_comes_a_pause_after_the_last_answer() {
        let pace = Pace::Bursts {
            requests: 2,
            pause_us: 100,
        };
        let mut schedule = Schedule::new(pace, 1);
        assert_eq!([schedule.take(), schedule.take()], [100_000; 2]);
        assert_eq!(schedule.next_ns(), None, "two are under way");
        schedule.all_done(130_000);
        assert_eq!([schedule.take(), schedule.take()], [230_000; 2]);
        assert_eq!(schedule.skip_to(u64::MAX), 0, "no burst is missed");
    }
}
