//! A load on vhost-user sockets from a process of its own: see [`crate::client`].

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use harness::random::mix;

use crate::client::pace::Pace;
use crate::client::{self, Access, Job, RING_QUEUE_SIZE};
use crate::guest::Stop;
use crate::host::Cost;
use crate::journal::Sample;
use crate::plan::sockets::depth;
use crate::plan::words::RingKind;
use crate::plan::{Plan, Settings, Workload};
use crate::storage::Served;
use crate::window::Point;
use harness::cpu;

/// How often a client is looked at.
const TICK: Duration = Duration::from_millis(20);
/// How long a client may take beyond its times, to connect and to fill its buffers.
const GRACE: Duration = Duration::from_secs(60);

/// Measures a load on a server's sockets. `turn` is the same for all configurations of a block: requests of a rate are
/// then due at the same times for all of them.
///
/// # Errors
/// The client fails, or an end is wanted.
pub fn measure(
    plan: &Plan,
    served: &Served,
    settings: &Settings,
    load: &Workload,
    turn: u64,
    stop: &Stop,
) -> Result<(Sample, Option<Cost>)> {
    let server_pid = served
        .pid()
        .context("the server's CPU time cannot be read: the lab did not start it")?;
    let job = job(plan, served, server_pid, settings, load, turn);
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    command
        .args(["lab", "client"])
        .arg(serde_json::to_string(&job)?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = match plan.cpus {
        Some(cpus) => cpu::start_on(&[cpus.load], || command.spawn())?,
        None => command.spawn(),
    };
    let sample = answer(
        child.context("starting the client")?,
        plan.run_time() + GRACE,
        stop,
    )?;
    let mut sample = journal_sample(&sample, load, plan.runtime.as_secs_f64());
    sample.0.polling = served.polling();
    Ok((sample.0, Some(sample.1)))
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
    let depth = depth(load);
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
    Job {
        sockets: served.sockets.clone(),
        driven: served.sockets.len(),
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
        idle_s: None,
        server_pid,
        server_cpu: plan.cpus.map(|cpus| cpus.server),
        cpus: plan.cpus.map(|cpus| cpus.load).into_iter().collect(),
        mark: None,
        once: 0,
        seed: mix(turn.wrapping_add(u64::from(server_pid) << 32)),
        latencies: true,
    }
}

/// Waits for what the client prints.
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
            bail!("the client was not done after {} s", limit.as_secs());
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
        // Server and client have a CPU each, or sleep: a CPU that is busy with one of them starves nobody.
        idle: 1.0,
        stolen: sample.stolen_cores / cpus,
        others: sample.others_cores / cpus,
    };
    (found, cost)
}
