//! The client of the open loop: it sends each request when it is due, and sleeps until then or until one completes.
//!
//! A latency counts from the time at which the request was due, so it includes the time in which a slow server kept the
//! client from sending. After a think time, it counts from the time at which the request was sent, so it does not include
//! delays of the client's timer.

use std::num::NonZeroU64;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use harness::histogram::Bins;
use harness::random::mix;

use super::drivers::{BlkioDriver, Driver, RingDriver};
use super::job::{Job, Sample};
use super::pace::{Pace, Schedule};
use super::window::{self, Lap};
use crate::plan::words::Client;
use harness::cpu;

/// Up to this pause, a client computes, as a guest does between two reads. It sleeps for longer pauses. In a virtual
/// machine, a timer wakes a thread about 50 us late.
pub const BUSY_PAUSE_US_MAX: u64 = 50;

/// Measures a job with a pace.
pub fn run(job: &Job, pace: Pace) -> Result<Sample> {
    match job.client {
        Client::Blkio => {
            let (drivers, _devices) = BlkioDriver::connect(job)?;
            window::measure(job, drivers, |job, number, driver, edge| {
                drive(job, pace, number, driver, edge)
            })
        }
        Client::Ring | Client::RingPoll => {
            let mut drivers = Vec::new();
            let mut devices = Vec::new();
            for socket in &job.sockets {
                let alone = Job {
                    sockets: vec![socket.clone()],
                    ..job.clone()
                };
                let (its_drivers, its_devices) = RingDriver::connect(&alone)?;
                drivers.extend(its_drivers);
                devices.extend(its_devices);
            }
            window::measure(job, drivers, |job, number, driver, edge| {
                drive(job, pace, number, driver, edge)
            })
        }
    }
}

/// Runs the I/O of one disk. All disks meet at the edges of the window, with no request in flight, so that requests and CPU
/// time match even if there are few requests.
fn drive(job: &Job, pace: Pace, number: usize, driver: impl Driver, edge: &Barrier) -> Result<Lap> {
    if !job.cpus.is_empty() {
        cpu::pin_thread(&[job.cpus[number % job.cpus.len()]])?;
    }
    // The default slack of 50 us would be in all latencies.
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1))
        .context("setting the timer slack")?;
    let seed = |what: u64| mix(job.schedule_seed.wrapping_add((number as u64) << 8 | what));
    let mut requests = Requests::new(Timed::new(job, pace, number, driver));
    requests.run(pace, seed(0), nanoseconds(job.warmup_s))?;
    edge.wait();
    edge.wait();
    requests.restart();
    requests.run(pace, seed(1), nanoseconds(job.runtime_s))?;
    edge.wait();
    edge.wait();
    Ok(Lap {
        latencies: requests.latencies,
        ios: requests.ios,
        unsent: requests.unsent,
    })
}

fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

/// A disk with a clock, which tests replace.
trait Disk {
    /// The numbers of its request slots.
    fn slots(&self) -> Vec<usize>;
    /// The time since [`Disk::restart`].
    fn now_ns(&mut self) -> u64;
    fn restart(&mut self);
    /// Sends requests in free slots.
    fn send(&mut self, slots: &[usize]) -> Result<()>;
    /// Adds the slots of completed requests. If there are none, sleeps until one completes, or until `until_ns`.
    fn wait(&mut self, until_ns: u64, done: &mut Vec<usize>) -> Result<()>;
}

/// The requests of one disk.
struct Requests<D> {
    disk: D,
    free: Vec<usize>,
    in_flight: usize,
    /// For each slot, the time from which its latency counts
    since_ns: Vec<u64>,
    latencies: Bins,
    ios: u64,
    unsent: u64,
}

impl<D: Disk> Requests<D> {
    fn new(mut disk: D) -> Requests<D> {
        disk.restart();
        let free = disk.slots();
        let end = free.iter().max().map_or(0, |last| last + 1);
        Requests {
            disk,
            free,
            in_flight: 0,
            since_ns: vec![0; end],
            latencies: Bins::default(),
            ios: 0,
            unsent: 0,
        }
    }

    /// Clears all figures, and restarts the clock at 0.
    fn restart(&mut self) {
        self.latencies = Bins::default();
        (self.ios, self.unsent) = (0, 0);
        self.disk.restart();
    }

    /// Sends the requests that are due before `end_ns`, and returns after that time when no request is in flight.
    fn run(&mut self, pace: Pace, seed: u64, end_ns: u64) -> Result<()> {
        let mut schedule = Schedule::new(pace, seed);
        let (mut batch, mut done) = (Vec::new(), Vec::new());
        // Of a burst, only the first answer counts: the others depend more on the storage.
        let only_first = matches!(pace, Pace::Bursts { .. });
        let mut first = true;
        loop {
            let now_ns = self.disk.now_ns();
            if now_ns >= end_ns && self.in_flight == 0 {
                break;
            }
            batch.clear();
            let due = |schedule: &Schedule| schedule.next_ns().filter(|due_ns| *due_ns <= now_ns);
            while now_ns < end_ns && due(&schedule).is_some() {
                let Some(slot) = self.free.pop() else { break };
                let due_ns = schedule.take();
                self.since_ns[slot] = if only_first { now_ns } else { due_ns };
                batch.push(slot);
            }
            if !batch.is_empty() {
                self.in_flight += batch.len();
                self.disk.send(&batch)?;
            }
            let next_ns = schedule.next_ns().filter(|_| !self.free.is_empty());
            let until_ns = match next_ns {
                Some(next_ns) if now_ns < end_ns => next_ns.min(end_ns),
                // The next request needs a free slot, or there is none left to send.
                _ if self.in_flight > 0 => u64::MAX,
                _ => end_ns,
            };
            done.clear();
            self.disk.wait(until_ns, &mut done)?;
            if done.is_empty() {
                continue;
            }
            let now_ns = self.disk.now_ns();
            for &slot in &done {
                if !only_first || first {
                    let latency_ns = now_ns.saturating_sub(self.since_ns[slot]);
                    self.latencies.add(latency_ns);
                }
                first = false;
            }
            self.ios += done.len() as u64;
            self.in_flight -= done.len();
            self.free.append(&mut done);
            if self.in_flight == 0 {
                schedule.all_done(now_ns);
                first = true;
            }
        }
        self.unsent += schedule.skip_to(end_ns);
        Ok(())
    }
}

/// A driver and the clock of the machine.
struct Timed<D> {
    driver: D,
    job: Job,
    begun: Instant,
    blocks: u64,
    random: u64,
    in_flight: usize,
    /// Whether it computes in pauses instead of sleeping
    busy: bool,
}

impl<D: Driver> Timed<D> {
    fn new(job: &Job, pace: Pace, number: usize, driver: D) -> Timed<D> {
        let job = job.clone();
        Timed {
            blocks: driver.capacity() / job.access.block as u64,
            random: mix(job.seed.wrapping_add((number as u64) << 32)),
            begun: Instant::now(),
            in_flight: 0,
            busy: matches!(pace, Pace::Bursts { pause_us, .. } if pause_us <= BUSY_PAUSE_US_MAX),
            driver,
            job,
        }
    }
}

impl<D: Driver> Disk for Timed<D> {
    fn slots(&self) -> Vec<usize> {
        self.driver.slots()
    }

    fn now_ns(&mut self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    fn restart(&mut self) {
        self.begun = Instant::now();
    }

    fn send(&mut self, slots: &[usize]) -> Result<()> {
        let access = &self.job.access;
        for &slot in slots {
            self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let block = (u128::from(mix(self.random)) * u128::from(self.blocks)) >> 64;
            let offset = block as u64 * access.block as u64;
            self.driver
                .prepare(slot, access.write, offset, access.block)?;
        }
        self.in_flight += slots.len();
        self.driver.submit()
    }

    fn wait(&mut self, until_ns: u64, done: &mut Vec<usize>) -> Result<()> {
        // An Instant cannot represent 2^64 ns from now.
        let left = Duration::from_nanos(until_ns.min(3_600_000_000_000));
        let until = self.begun + left;
        if self.in_flight > 0 {
            self.driver.reap_until(until, done)?;
            self.in_flight -= done.len();
        } else if self.busy {
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        } else {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::words::Arrival;

    /// A disk with the same service time for each request. Its clock advances only while the client sleeps.
    struct Fake {
        now_ns: u64,
        service_ns: u64,
        /// Slots in flight, with their completion times
        in_flight: Vec<(usize, u64)>,
        sent_ns: Vec<u64>,
        slots: usize,
    }

    impl Disk for Fake {
        fn slots(&self) -> Vec<usize> {
            (0..self.slots).collect()
        }

        fn now_ns(&mut self) -> u64 {
            self.now_ns
        }

        fn restart(&mut self) {
            self.now_ns = 0;
        }

        fn send(&mut self, slots: &[usize]) -> Result<()> {
            for &slot in slots {
                assert!(self.in_flight.iter().all(|(other, _)| *other != slot));
                self.in_flight.push((slot, self.now_ns + self.service_ns));
                self.sent_ns.push(self.now_ns);
            }
            Ok(())
        }

        fn wait(&mut self, until_ns: u64, done: &mut Vec<usize>) -> Result<()> {
            let first = self.in_flight.iter().map(|(_, at)| *at).min();
            let wake = first.unwrap_or(u64::MAX).min(until_ns);
            assert_ne!(wake, u64::MAX, "the client would sleep for ever");
            self.now_ns = self.now_ns.max(wake);
            let now_ns = self.now_ns;
            self.in_flight.retain(|(slot, at)| {
                if *at <= now_ns {
                    done.push(*slot);
                }
                *at > now_ns
            });
            Ok(())
        }
    }

    fn requests(service_ns: u64, slots: usize) -> Requests<Fake> {
        Requests::new(Fake {
            now_ns: 0,
            service_ns,
            in_flight: Vec::new(),
            sent_ns: Vec::new(),
            slots,
        })
    }

    fn times(pace: Pace, seed: u64, end_ns: u64) -> Vec<u64> {
        let mut schedule = Schedule::new(pace, seed);
        let due = || schedule.next_ns()?.lt(&end_ns).then(|| schedule.take());
        std::iter::from_fn(due).collect()
    }

    const OPEN: Pace = Pace::Open {
        per_second: 1000.0,
        arrivals: Arrival::Poisson,
    };

    #[test]
    fn each_request_is_sent_when_it_is_due() {
        let mut requests = requests(3_000_000, 64);
        requests.run(OPEN, 5, 1_000_000_000).unwrap();
        assert_eq!(requests.disk.sent_ns, times(OPEN, 5, 1_000_000_000));
        assert_eq!(requests.ios, requests.disk.sent_ns.len() as u64);
        assert_eq!(requests.latencies.requests(), requests.ios);
        assert!(requests.latencies.max_ns() < 3_010_000, "nobody waited");
        assert_eq!(requests.unsent, 0);
    }

    #[test]
    fn a_latency_counts_from_when_the_request_was_due() {
        // One slot and 3 ms each, every 2 ms: the n-th is sent n - 1 ms late.
        let pace = Pace::Open {
            per_second: 500.0,
            arrivals: Arrival::Linear,
        };
        let mut requests = requests(3_000_000, 1);
        requests.run(pace, 1, 20_000_000).unwrap();
        assert_eq!(
            requests.disk.sent_ns[..3],
            [2_000_000, 5_000_000, 8_000_000]
        );
        assert_eq!(requests.ios, 6, "the last one at 17 ms");
        let max_ms = requests.latencies.max_ns() as f64 / 1e6;
        assert!((max_ms - 8.0).abs() < 0.02, "{max_ms}");
        assert_eq!(requests.unsent, 3, "due at 14, 16 and 18 ms");
    }

    #[test]
    fn nothing_is_under_way_when_a_run_is_over_and_the_next_begins_at_0() {
        let mut requests = requests(3_000_000, 64);
        requests.run(OPEN, 5, 100_000_000).unwrap();
        assert!(requests.disk.in_flight.is_empty());
        requests.restart();
        requests.disk.sent_ns.clear();
        requests.run(OPEN, 6, 100_000_000).unwrap();
        assert_eq!(requests.disk.sent_ns, times(OPEN, 6, 100_000_000));
        assert_eq!(requests.ios, requests.disk.sent_ns.len() as u64);
    }

    #[test]
    fn a_client_that_thinks_sends_a_pause_after_each_answer() {
        let pace = Pace::Bursts {
            requests: 1,
            pause_us: 20,
        };
        let mut requests = requests(80_000, 1);
        requests.run(pace, 1, 400_000).unwrap();
        assert_eq!(requests.disk.sent_ns, [20_000, 120_000, 220_000, 320_000]);
    }

    #[test]
    fn of_a_burst_the_first_answer_counts() {
        let pace = Pace::Bursts {
            requests: 8,
            pause_us: 100_000,
        };
        let mut requests = requests(80_000, 8);
        requests.run(pace, 1, 250_000_000).unwrap();
        assert_eq!(requests.ios, 16);
        assert_eq!(requests.latencies.requests(), 2);
    }
}
