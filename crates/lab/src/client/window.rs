//! The window of a measurement. At both edges, all threads of the client pause while the counters of the server and of the
//! machine are read, so that requests and CPU time match.

use std::fs::File;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};

use super::drivers::Driver;
use super::footprint::Footprint;
use super::job::{Job, Sample};
use harness::cpu::{self, Cores, Usage};
use harness::histogram::{Bins, Histogram};

/// The requests of a thread in the window.
pub struct Lap {
    pub latencies: Bins,
    /// The number of requests; more than latencies if not all count
    pub ios: u64,
    /// Requests that were due but could not be sent
    pub unsent: u64,
}

/// Runs `drive` in a thread for each driver. All threads pause while the counters are read.
pub fn measure<D: Driver>(
    job: &Job,
    drivers: Vec<D>,
    drive: impl Fn(&Job, usize, D, &Barrier) -> Result<Lap> + Sync,
) -> Result<Sample> {
    let edge = Barrier::new(drivers.len() + 1);
    thread::scope(|scope| {
        let start = |(number, driver)| {
            let (drive, edge) = (&drive, &edge);
            // The other threads would wait for this one at the next edge.
            scope.spawn(move || drive(job, number, driver, edge).unwrap_or_else(|e| give_up(&e)))
        };
        let laps: Vec<_> = drivers.into_iter().enumerate().map(start).collect();
        let used = window(job, &edge).unwrap_or_else(|e| give_up(&e));
        let mut all = Lap {
            latencies: Bins::default(),
            ios: 0,
            unsent: 0,
        };
        for lap in laps {
            let lap = lap
                .join()
                .map_err(|_| anyhow!("a client thread panicked"))?;
            all.latencies.merge(&lap.latencies);
            all.ios += lap.ios;
            all.unsent += lap.unsent;
        }
        let mut sample = used.sample(all);
        if !job.latencies {
            sample.latencies = Histogram::default();
        }
        Ok(sample)
    })
}

/// The CPU time of this process, which is the client.
fn give_up(error: &anyhow::Error) -> ! {
    eprintln!("{error:#}");
    std::process::exit(1)
}

/// The counters' differences between the edges.
fn window(job: &Job, edge: &Barrier) -> Result<Window> {
    edge.wait();
    if let Some(cpu) = job.server_cpu {
        cpu::pin(job.server_pid, &[cpu])?;
    }
    if job.idle_s.is_some() {
        thread::sleep(Duration::from_secs(1));
    }
    let before = Counters::read(job)?;
    if let Some(mark) = &job.mark {
        File::create(mark).with_context(|| format!("creating {}", mark.display()))?;
    }
    edge.wait();
    if let Some(idle) = job.idle_s {
        thread::sleep(Duration::from_secs_f64(idle));
    }
    edge.wait();
    if let Some(mark) = &job.mark {
        std::fs::remove_file(mark).with_context(|| format!("removing {}", mark.display()))?;
    }
    let mut used = Counters::read(job)?.since(&before);
    if job.idle_s.is_some() {
        used.footprint = Some(Footprint::of(job.server_pid)?);
    }
    edge.wait();
    Ok(used)
}

/// The counters at an edge of the window.
struct Counters {
    at: Instant,
    /// Since 1970
    at_ms: u64,
    server: Usage,
    client: Usage,
    cores: Cores,
}

impl Counters {
    fn read(job: &Job) -> Result<Counters> {
        Ok(Counters {
            at_ms: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_millis() as u64),
            server: Usage::of(job.server_pid).context("reading the server's CPU time")?,
            client: Usage::of(std::process::id())?,
            cores: Cores::read()?,
            at: Instant::now(),
        })
    }

    fn since(&self, before: &Counters) -> Window {
        Window {
            seconds: self.at.duration_since(before.at).as_secs_f64(),
            edges_ms: (before.at_ms, self.at_ms),
            server: self.server.since(&before.server),
            client: self.client.since(&before.client),
            cores: self.cores.since(&before.cores),
            footprint: None,
        }
    }
}

struct Window {
    seconds: f64,
    edges_ms: (u64, u64),
    server: Usage,
    client: Usage,
    cores: Cores,
    footprint: Option<Footprint>,
}

impl Window {
    fn sample(self, mut lap: Lap) -> Sample {
        let (mean_ns, max_ns) = (lap.latencies.mean_ns(), lap.latencies.max_ns());
        let mut latencies = Histogram::default();
        lap.latencies.move_to(&mut latencies);
        let us = |share: f64| latencies.percentile(share).unwrap_or(0) as f64 / 1e3;
        let ios = lap.ios as f64;
        let per_io = |total: f64| if ios > 0.0 { total / ios } else { 0.0 };
        let (server_s, client_s) = (self.server.ran_s(), self.client.ran_s());
        Sample {
            iops: ios / self.seconds,
            ios: lap.ios,
            mean_us: mean_ns / 1e3,
            p50_us: us(0.50),
            p99_us: us(0.99),
            max_us: max_ns as f64 / 1e3,
            cpu_us_per_io: per_io(server_s * 1e6),
            cpu_user_us_per_io: per_io(server_s * 1e6 * self.server.user_share()),
            cpu_system_us_per_io: per_io(server_s * 1e6 * (1.0 - self.server.user_share())),
            switches_per_io: per_io(self.server.switches as f64),
            server_core: server_s / self.seconds,
            client_core: client_s / self.seconds,
            server_starved: self.server.waited_s() / self.seconds,
            others_cores: (self.cores.tasks_s() - server_s - client_s).max(0.0) / self.seconds,
            stolen_cores: self.cores.stolen_s() / self.seconds,
            unsent: lap.unsent,
            footprint: self.footprint,
            window_ms: self.edges_ms,
            latencies,
        }
    }
}
