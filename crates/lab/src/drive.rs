//! A load on vhost-user sockets, without a guest: what a server gives at most.
//!
//! What fio does in a guest: a closed loop that replaces each request as it completes, or an open one whose requests
//! come when they come. There, a latency counts from when a request was due, however late it was sent.

use std::path::{Path, PathBuf};
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use harness::histogram::{Bins, Histogram};
use harness::random::Rng;

use crate::fio::{Interval, Run};
use crate::guest::Stop;
use crate::host::now_ms;
use crate::plan::sockets::depth;
use crate::plan::words::{Arrival, Rw};
use crate::plan::{Settings, Workload};
use crate::vhost::{DESCRIPTORS, Device, Queue, Shape};
use harness::cpu;

/// Longest that a server may take to greet, or to complete a request.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a wait is looked up from, for an end that is wanted.
const TICK: Duration = Duration::from_millis(100);
/// Bytes that do not compress, written over and over.
const FILL: usize = 1 << 20;

/// How long, and at which times.
#[derive(Clone, Debug)]
pub struct Times {
    /// Before it counts.
    pub ramp: Duration,
    /// While it counts.
    pub runtime: Duration,
    /// Of one point of the series.
    pub interval: Duration,
    /// Where all threads of the load run; an empty list leaves them to the scheduler.
    pub cpus: Vec<usize>,
}

/// Drives all of these disks at the same time: a thread for each queue that has something to do.
///
/// # Errors
/// A disk cannot be connected to, a request fails or never ends, or an end is wanted.
pub fn drive(
    sockets: &[PathBuf],
    settings: &Settings,
    load: &Workload,
    times: &Times,
    stop: &Stop,
) -> Result<Run> {
    let queues = usize::from(settings.queues.unwrap_or(1)).min(depth(settings, load));
    let share = depth(settings, load).div_ceil(queues);
    let least = (share * DESCRIPTORS).next_power_of_two().max(128) as u16;
    let shape = Shape {
        queues: settings.queues.unwrap_or(1),
        queue_size: settings.queue_size.unwrap_or(least),
        depth: share,
        block: load.bs as usize,
    };
    let mut fill = vec![0; FILL];
    let mut rng = Rng::new(u64::from(load.iodepth));
    fill.chunks_exact_mut(8)
        .for_each(|word| word.copy_from_slice(&rng.bits().to_ne_bytes()));
    let (mut devices, mut lanes) = (Vec::new(), Vec::new());
    for socket in sockets {
        let (device, its) = connect(socket, shape, fill.clone())?;
        let blocks = device.capacity / load.bs;
        ensure!(
            blocks > 0,
            "{} is smaller than a request of {} bytes",
            socket.display(),
            load.bs
        );
        for (number, queue) in its.into_iter().take(queues).enumerate() {
            // The first queues have one request more if it does not go up.
            let depth = depth(settings, load) / queues
                + usize::from(number < depth(settings, load) % queues);
            lanes.push(Lane {
                queue,
                depth,
                blocks,
                next_block: blocks / queues as u64 * number as u64,
                rng: Rng::new(((lanes.len() as u64) << 32) | rng.bits() >> 32),
                rate: load.rate.map(|rate| f64::from(rate) / queues as f64),
                in_flight: 0,
            });
        }
        devices.push(device);
    }
    let start = Barrier::new(lanes.len());
    let jobs: Vec<Result<Vec<Interval>>> = thread::scope(|scope| {
        let running: Vec<_> = lanes
            .iter_mut()
            .map(|lane| {
                let start = &start;
                scope.spawn(move || {
                    let pinned = match &times.cpus[..] {
                        [] => Ok(()),
                        cpus => cpu::pin_thread(cpus),
                    };
                    start.wait();
                    pinned?;
                    lane.run(load, times, stop)
                })
            })
            .collect();
        running
            .into_iter()
            .map(|job| {
                job.join()
                    .unwrap_or_else(|_| Err(anyhow!("a thread of the load panicked")))
            })
            .collect()
    });
    let mut run = Run {
        version: "blkio".into(),
        ..Run::default()
    };
    for job in jobs {
        let job = job.context("the load without a guest")?;
        job.iter()
            .for_each(|interval| run.latencies.merge(&interval.latencies));
        run.jobs.push(job);
    }
    run.requests = run.latencies.requests();
    run.bytes = run.requests.saturating_mul(load.bs);
    run.iops = run.requests as f64 / times.runtime.as_secs_f64();
    ensure!(run.requests > 0, "no request was completed in time");
    Ok(run)
}

/// A server that accepts and then says nothing would be waited for without end: not here.
fn connect(socket: &Path, shape: Shape, fill: Vec<u8>) -> Result<(Device, Vec<Queue>)> {
    let (sender, receiver) = mpsc::channel();
    let path = socket.to_owned();
    thread::spawn(move || drop(sender.send(Device::connect(&path, shape, &fill))));
    receiver.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        Err(anyhow!(
            "{} has not greeted for {} s",
            socket.display(),
            PATIENCE.as_secs()
        ))
    })
}

/// What one thread drives.
struct Lane {
    queue: Queue,
    depth: usize,
    blocks: u64,
    next_block: u64,
    rng: Rng,
    /// Requests per second that come; `None` is a closed loop.
    rate: Option<f64>,
    in_flight: usize,
}

impl Lane {
    fn run(&mut self, load: &Workload, times: &Times, stop: &Stop) -> Result<Vec<Interval>> {
        let count_from = Instant::now() + times.ramp;
        let start_ms = now_ms() + times.ramp.as_millis() as u64;
        let end = count_from + times.runtime;
        let intervals = times.runtime.as_millis() / times.interval.as_millis().max(1);
        let mut series = vec![Histogram::default(); intervals.clamp(1, 100_000) as usize];
        let (mut bins, mut current) = (Bins::default(), None);
        let mut free: Vec<usize> = (0..self.queue.slots().min(self.depth)).collect();
        let mut since = vec![Instant::now(); self.queue.slots()];
        let mut done = Vec::with_capacity(self.queue.slots());
        let (mut due, mut heard) = (Instant::now(), Instant::now());
        loop {
            let now = Instant::now();
            if now >= end {
                break;
            }
            ensure!(!stop.is_wanted(), "stopped");
            while let Some(slot) = free.pop_if(|_| self.rate.is_none() || due <= now) {
                since[slot] = if self.rate.is_some() { due } else { now };
                if let Some(rate) = self.rate {
                    due += self.gap(rate, load.arrival);
                }
                let (write, block) = self.next(load);
                self.queue.prepare(slot, write, block * load.bs);
                self.in_flight += 1;
            }
            // With a slot free, the next request is what is waited for.
            let wait = match (self.rate, free.is_empty()) {
                (Some(_), false) => due.saturating_duration_since(now).min(TICK),
                _ => TICK,
            };
            done.clear();
            if self.in_flight > 0 {
                self.queue.reap(1, Some(wait), &mut done)?;
            } else {
                thread::sleep(wait);
                heard = Instant::now();
            }
            let now = Instant::now();
            let place = now
                .checked_duration_since(count_from)
                .map(|time| (time.as_nanos() / times.interval.as_nanos().max(1)) as usize);
            if place != current {
                // What came before it counts is counted by nobody.
                match current.and_then(|place| series.get_mut(place)) {
                    Some(histogram) => bins.move_to(histogram),
                    None => bins = Bins::default(),
                }
                current = place;
            }
            match done.is_empty() {
                true => ensure!(
                    heard.elapsed() < PATIENCE,
                    "no request has been completed for {} s",
                    PATIENCE.as_secs()
                ),
                false => heard = now,
            }
            for slot in done.drain(..) {
                bins.add(now.saturating_duration_since(since[slot]).as_nanos() as u64);
                self.in_flight -= 1;
                free.push(slot);
            }
        }
        if let Some(histogram) = current.and_then(|place| series.get_mut(place)) {
            bins.move_to(histogram);
        }
        self.drain(stop)?;
        let length_ms = times.interval.as_millis() as u64;
        let interval = |(place, latencies): (usize, Histogram)| Interval {
            end_ms: start_ms + (place as u64 + 1) * length_ms,
            length_ms,
            latencies,
        };
        Ok(series.into_iter().enumerate().map(interval).collect())
    }

    /// Until the next request comes.
    fn gap(&mut self, rate: f64, arrival: Arrival) -> Duration {
        let share = match arrival {
            Arrival::Linear => 1.0,
            Arrival::Poisson => -(1.0 - self.rng.unit()).max(f64::MIN_POSITIVE).ln(),
        };
        Duration::from_secs_f64((share / rate).min(3600.0))
    }

    fn next(&mut self, load: &Workload) -> (bool, u64) {
        let write = match load.rw {
            Rw::Read | Rw::RandRead => false,
            Rw::Write | Rw::RandWrite => true,
            Rw::ReadWrite | Rw::RandRw => self.rng.below(100) >= u64::from(load.rwmixread),
        };
        let block = match load.rw {
            Rw::Read | Rw::Write | Rw::ReadWrite => {
                let block = self.next_block;
                self.next_block = (block + 1) % self.blocks;
                block
            }
            _ => self.rng.below(self.blocks),
        };
        (write, block)
    }

    /// Waits for what is still under way.
    fn drain(&mut self, stop: &Stop) -> Result<()> {
        let since = Instant::now();
        let mut done = Vec::new();
        while self.in_flight > 0 {
            ensure!(!stop.is_wanted(), "stopped");
            ensure!(
                since.elapsed() < PATIENCE,
                "{} requests were never completed",
                self.in_flight
            );
            done.clear();
            self.queue.reap(1, Some(TICK), &mut done)?;
            self.in_flight -= done.len();
        }
        Ok(())
    }
}
