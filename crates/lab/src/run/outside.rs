//! Drives vhost-user sockets from a client process: see [`crate::client`].

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use harness::process::guarded;
use harness::random::mix;

use super::profiler::Profiler;
use crate::client::pace::Pace;
use crate::client::{self, Access, Job, RING_QUEUE_SIZE};
use crate::guest::Stop;
use crate::host::Cost;
use crate::journal::{Idle, Sample};
use crate::plan::cpus::Cpus;
use crate::plan::sockets::depth;
use crate::plan::words::RingKind;
use crate::plan::{Plan, Settings, Workload};
use crate::storage::Served;
use crate::window::{Point, Window};
use harness::cpu;

/// The interval at which a client is checked.
const TICK: Duration = Duration::from_millis(20);
/// The additional time for which the neighbour reads, because starting the measured client takes a while.
const NEIGHBOUR_S: f64 = 3.0;
/// How long a client may take beyond its own limit: it should say itself that it has reached that.
const GRACE: Duration = Duration::from_secs(60);

/// Measures a load on a server's sockets. `turn` is the same for all configurations of a block, so that requests of a rate
/// are due at the same times for all of them. `profiled` are the disks' files, if the load is profiled.
///
/// # Errors
/// The client fails, or the user stops the run.
pub fn measure(
    plan: &Plan,
    served: &Served,
    settings: &Settings,
    load: &Workload,
    turn: u64,
    profiled: Option<&[PathBuf]>,
    stop: &Stop,
) -> Result<(Sample, Option<Cost>)> {
    let server_pid = served
        .pid()
        .context("the server's CPU time cannot be read: the lab did not start it")?;
    let cpus = plan.cpus(settings);
    let job = job(plan, served, server_pid, settings, load, turn);
    let neighbour = match settings.neighbour {
        Some(depth) => Some(Neighbour::start(&job, served, depth, &cpus)?),
        None => None,
    };
    let limit = plan.run_time() + client::grace(&job) + GRACE;
    let client = start(&job, &cpus)?;
    let profiler = profiled.map(|paths| {
        Profiler::start(
            settings,
            Some(served),
            &[server_pid],
            Some(client.id()),
            paths,
        )
    });
    let answer = answer(client, limit, stop)?;
    if let Some(neighbour) = neighbour {
        neighbour.ended(limit, stop)?;
    }
    ensure!(
        answer.ios > 0 || load.once == 0,
        "every area of the disk was written before the measured time began; set a larger size in [storage], or a \
         shorter ramp"
    );
    let (mut sample, cost) = journal_sample(&answer, load, plan.runtime.as_secs_f64());
    sample.profile = profiler.and_then(|its| {
        let (start_ms, end_ms) = answer.window_ms;
        its.finish(Window { start_ms, end_ms }, sample.iops, sample.mean_ns)
    });
    sample.polling = served.polling();
    sample.idle = answer.footprint.map(|footprint| {
        Box::new(Idle {
            core: answer.server_core,
            ready_s: served.ready_s,
            footprint,
        })
    });
    if settings.neighbour.is_some() {
        // The CPU time of both disks together
        (sample.cpu_us, sample.switches) = (None, None);
    }
    Ok((sample, Some(cost)))
}

/// Starts a client.
fn start(job: &Job, cpus: &Cpus) -> Result<Child> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = guarded(&program);
    command
        .args(["lab", "client"])
        .arg(serde_json::to_string(job)?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = match &cpus.load[..] {
        [] => command.spawn(),
        load => cpu::start_on(load, || command.spawn())?,
    };
    child.context("starting the client")
}

/// A client that reads another disk of the server, for longer than the measurement.
struct Neighbour(Option<Child>);

impl Neighbour {
    /// Returns once it reads.
    fn start(measured: &Job, served: &Served, depth: u16, cpus: &Cpus) -> Result<Neighbour> {
        let mark = served.sockets[0].with_file_name("neighbour");
        let _ = std::fs::remove_file(&mark);
        let job = Job {
            sockets: served.sockets[measured.sockets.len()..].to_vec(),
            driven: 1,
            queues: 1,
            queue_size: RING_QUEUE_SIZE.max(depth.next_power_of_two()),
            access: Access {
                write: false,
                sequential: false,
                block: 4096,
                depth: depth.into(),
            },
            pace: None,
            warmup_s: 0.1,
            runtime_s: measured.warmup_s + measured.runtime_s + NEIGHBOUR_S,
            idle_s: None,
            cpus: measured.cpus.iter().take(1).copied().collect(),
            mark: Some(mark.clone()),
            once: 0,
            latencies: false,
            ..measured.clone()
        };
        let mut neighbour = Neighbour(Some(start(&job, cpus)?));
        let deadline = Instant::now() + client::grace(&job) + GRACE;
        while !mark.exists() {
            let ended = match &mut neighbour.0 {
                Some(child) => child.try_wait()?.is_some(),
                None => true,
            };
            ensure!(
                !ended && Instant::now() < deadline,
                "the client of the neighbour does not read its disk"
            );
            thread::sleep(TICK);
        }
        Ok(neighbour)
    }

    /// Succeeds if it has read during the whole measurement.
    fn ended(mut self, limit: Duration, stop: &Stop) -> Result<()> {
        let Some(mut child) = self.0.take() else {
            return Ok(());
        };
        let early = child.try_wait()?.is_some();
        answer(child, limit, stop).context("the neighbour")?;
        ensure!(!early, "the neighbour ended before the measured disk did");
        Ok(())
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn job(
    plan: &Plan,
    served: &Served,
    server_pid: u32,
    settings: &Settings,
    load: &Workload,
    turn: u64,
) -> Job {
    let queues = settings.queues.unwrap_or(1);
    let depth = depth(settings, load);
    let pace = match (load.rate, load.thinktime_us) {
        (Some(rate), _) => Some(Pace::Open {
            per_second: f64::from(rate),
            arrivals: load.arrival,
        }),
        (None, Some(pause_us)) => Some(Pace::Bursts {
            requests: load.burst as usize,
            pause_us,
        }),
        (None, None) => None,
    };
    let cpus = plan.cpus(settings);
    let sockets = served.sockets[..settings.volumes.into()].to_vec();
    Job {
        driven: settings.active.map_or(sockets.len(), usize::from),
        sockets,
        queues,
        queue_size: settings.queue_size.unwrap_or(RING_QUEUE_SIZE),
        packed: settings.ring == RingKind::Packed,
        client: settings.client,
        access: Access {
            write: load.rw.writes(),
            sequential: load.sequential(),
            block: load.bs as usize,
            depth: depth / usize::from(queues),
        },
        pace,
        schedule_seed: mix(turn) << 32,
        warmup_s: plan.ramp.as_secs_f64(),
        runtime_s: plan.runtime.as_secs_f64(),
        cooldown_s: 0.0,
        idle_s: load.idle.then_some(plan.runtime.as_secs_f64()),
        server_pid,
        server_cpu: match cpus.server[..] {
            [cpu] => Some(cpu),
            // ringdisk has pinned its threads itself.
            _ => None,
        },
        cpus: cpus.load,
        mark: None,
        once: load.once,
        seed: mix(turn.wrapping_add(u64::from(server_pid) << 32)),
        latencies: true,
    }
}

/// Waits for the client's output.
fn answer(mut child: Child, limit: Duration, stop: &Stop) -> Result<client::Sample> {
    let output = collect(child.stdout.take());
    let errors = collect(child.stderr.take());
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().context("waiting for the client")? {
            break status;
        }
        if stop.is_wanted() || Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            ensure!(!stop.is_wanted(), "stopped");
            bail!("the client has not finished after {} s", limit.as_secs());
        }
        thread::sleep(TICK);
    };
    let text = |reader: thread::JoinHandle<String>| reader.join().unwrap_or_default();
    let (output, errors) = (text(output), text(errors));
    ensure!(status.success(), "the client: {}", errors.trim());
    serde_json::from_str(&output).context("reading the client's sample")
}

fn collect(stream: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut text = String::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_string(&mut text);
        }
        text
    })
}

fn journal_sample(sample: &client::Sample, load: &Workload, runtime_s: f64) -> (Sample, Cost) {
    let cpus = thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
    let some = |value: f64| (sample.ios > 0).then_some(value);
    let found = Sample {
        iops: sample.iops,
        bytes_per_s: sample.iops * load.bs as f64,
        mean_ns: sample.mean_us * 1000.0,
        latencies: sample.latencies.clone(),
        series: vec![Point {
            at_s: runtime_s / 2.0,
            iops: sample.iops,
            p50_ns: (sample.p50_us * 1000.0) as u64,
            p99_ns: (sample.p99_us * 1000.0) as u64,
            max_ns: (sample.max_us * 1000.0) as u64,
        }],
        window_s: runtime_s,
        cpu_us: some(sample.cpu_us_per_io),
        switches: some(sample.switches_per_io),
        client_cpu: Some(sample.client_core),
        unsent: load.rate.map(|_| sample.unsent),
        ..Sample::default()
    };
    let cost = Cost {
        cpus_used: sample.server_core,
        switches_per_s: sample.switches_per_io * sample.iops,
        exits_per_s: None,
        // Server and client have their own CPUs, or sleep: a busy CPU does not mean that one of them lacks time.
        idle: 1.0,
        stolen: sample.stolen_cores / cpus,
        others: sample.others_cores / cpus,
    };
    (found, cost)
}
