//! Drives vhost-user sockets without a guest, to find the maximum of a server.
//!
//! It makes the same loads as fio in a guest: a closed loop replaces each request as it completes; in an open loop, each
//! request is due at its own time, and its latency counts from that time, however late it was sent.

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

/// How long no request completes until the server's process is looked at.
const SILENCE: Duration = Duration::from_secs(1);
/// How long a server may take to reply to a new connection, or to complete a request.
const PATIENCE: Duration = Duration::from_secs(60);
/// The interval at which a wait checks whether the user stops the run.
const TICK: Duration = Duration::from_millis(100);
/// The size of the incompressible data that fills the buffers.
const FILL: usize = 1 << 20;

/// The times of a load.
#[derive(Clone, Debug)]
pub struct Times {
    /// The time before the measurement.
    pub ramp: Duration,
    /// The measured time.
    pub runtime: Duration,
    /// The length of a point in the series.
    pub interval: Duration,
    /// The CPUs of the load's threads; an empty list leaves them to the scheduler.
    pub cpus: Vec<usize>,
    /// The server's process, if the lab started it. The load fails soon after it has ended.
    pub server: Option<u32>,
}

/// Drives all of these disks at the same time, with a thread for each queue that has requests.
///
/// # Errors
/// The connection to a disk fails, a request fails or never completes, or the user stops the run.
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
            // If the division has a remainder, the first queues have one request more.
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
    ensure!(run.requests > 0, "no request completed in time");
    Ok(run)
}

/// Connects, but does not wait forever for a server that accepts the connection and does not reply.
fn connect(socket: &Path, shape: Shape, fill: Vec<u8>) -> Result<(Device, Vec<Queue>)> {
    let (sender, receiver) = mpsc::channel();
    let path = socket.to_owned();
    thread::spawn(move || drop(sender.send(Device::connect(&path, shape, &fill))));
    receiver.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        Err(anyhow!(
            "{} has not replied for {} s",
            socket.display(),
            PATIENCE.as_secs()
        ))
    })
}

/// Succeeds while requests may still complete, of which none has since then.
///
/// # Errors
/// The server has ended, or has not completed a request for too long.
fn check(times: &Times, since: Instant) -> Result<()> {
    let silence = since.elapsed();
    ensure!(
        silence < PATIENCE,
        "no request has completed for {} s",
        PATIENCE.as_secs()
    );
    let has_ended = silence > SILENCE && times.server.is_some_and(has_ended);
    ensure!(!has_ended, "the server has ended");
    Ok(())
}

/// Whether a process has ended, also if its parent has not been told yet.
fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before it may contain parentheses.
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    state.is_none_or(|state| "ZX".contains(state))
}

/// The queue of one thread.
struct Lane {
    queue: Queue,
    depth: usize,
    blocks: u64,
    next_block: u64,
    rng: Rng,
    /// The offered requests per second; `None` is a closed loop
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
            // If a slot is free, wait only until the next request is due.
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
                // Requests before the measured time do not count.
                match current.and_then(|place| series.get_mut(place)) {
                    Some(histogram) => bins.move_to(histogram),
                    None => bins = Bins::default(),
                }
                current = place;
            }
            match done.is_empty() {
                true => check(times, heard)?,
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
        self.drain(times, stop)?;
        let length_ms = times.interval.as_millis() as u64;
        let interval = |(place, latencies): (usize, Histogram)| Interval {
            end_ms: start_ms + (place as u64 + 1) * length_ms,
            length_ms,
            latencies,
        };
        Ok(series.into_iter().enumerate().map(interval).collect())
    }

    /// The time until the next request is due.
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

    /// Waits for the requests that are still in flight.
    fn drain(&mut self, times: &Times, stop: &Stop) -> Result<()> {
        let since = Instant::now();
        let mut done = Vec::new();
        while self.in_flight > 0 {
            ensure!(!stop.is_wanted(), "stopped");
            check(times, since)?;
            done.clear();
            self.queue.reap(1, Some(TICK), &mut done)?;
            self.in_flight -= done.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_has_ended_is_not_waited_for() {
        let mut server = std::process::Command::new("sleep")
            .arg("600")
            .spawn()
            .unwrap();
        let times = Times {
            ramp: Duration::ZERO,
            runtime: Duration::from_secs(1),
            interval: Duration::from_secs(1),
            cpus: Vec::new(),
            server: Some(server.id()),
        };
        let silent = Instant::now() - 2 * SILENCE;
        assert!(check(&times, silent).is_ok());
        server.kill().unwrap();
        // Not waited for, it stays as a zombie.
        while !has_ended(server.id()) {
            thread::yield_now();
        }
        let error = check(&times, silent).unwrap_err();
        assert!(error.to_string().contains("has ended"), "{error}");
        assert!(
            check(&times, Instant::now()).is_ok(),
            "requests are in time"
        );
        server.wait().unwrap();
    }
}
