//! What disks on one I/O thread cost each other: `--fairness`.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use testkit::server::Server;

use super::plan::{Client, Workload};
use super::server::{CLIENT_CPU, Programs, SERVER_CPU};
use harness::cpu;
use lab::client::{Job, Sample};

/// Depth of the disk that has much to do.
const BUSY_DEPTH: usize = 128;

/// What the quiet disk's p99 may be with a busy neighbour, times its p99 alone.
const RATIO_MAX: f64 = 3.0;

/// The latency at depth 1 of a disk, alone and beside one at depth 128, on one I/O thread. `files` are two disks, as
/// `ringdisk serve` takes them.
pub fn fairness(
    programs: &Programs,
    dir: &Path,
    files: &[String; 2],
    rounds: usize,
    runtime_s: f64,
) -> anyhow::Result<()> {
    let mut ratios = Vec::new();
    for round in 0..rounds {
        let server = Serving::ONE.start(&programs.ringdisk, programs, dir, files)?;
        let [quiet, busy] = &server.sockets[..] else {
            bail!("two disks are served on {} sockets", server.sockets.len());
        };
        let job = |socket: &Path, depth, extra_s: f64| Job {
            sockets: vec![socket.into()],
            driven: 1,
            queues: 1,
            packed: false,
            client: Client::Ring,
            queue_size: lab::client::RING_QUEUE_SIZE,
            pace: None,
            schedule_seed: 0,
            latencies: false,
            access: Workload {
                write: false,
                sequential: false,
                block: 4 << 10,
                depth,
            },
            warmup_s: 0.5,
            runtime_s: runtime_s + extra_s,
            cooldown_s: 0.0,
            idle_s: None,
            server_pid: server.pid(),
            server_cpu: Some(SERVER_CPU),
            cpus: vec![CLIENT_CPU],
            mark: None,
            once: 0,
            seed: round as u64 + 1,
        };
        let alone = finish(start(programs, &job(quiet, 1, 0.0))?)?;
        // Longer than the one that is measured, and begun before it.
        let neighbour = start(programs, &job(busy, BUSY_DEPTH, 2.0))?;
        std::thread::sleep(Duration::from_millis(500));
        let beside = finish(start(programs, &job(quiet, 1, 0.0))?)?;
        let neighbour = finish(neighbour)?;
        ratios.push(beside.p99_us / alone.p99_us);
        println!(
            "depth 1: p50 {:.0} p99 {:.0} us alone; p50 {:.0} p99 {:.0} us beside depth {BUSY_DEPTH} at {:.0} kIOPS",
            alone.p50_us,
            alone.p99_us,
            beside.p50_us,
            beside.p99_us,
            neighbour.iops / 1e3
        );
    }
    ratios.sort_by(f64::total_cmp);
    let median = ratios[ratios.len() / 2];
    println!(
        "{}p99 ratio, median: {median:.2}",
        verdict(median <= RATIO_MAX)
    );
    Ok(())
}

pub fn verdict(reached: bool) -> &'static str {
    if reached { "reached: " } else { "MISSED: " }
}

/// How ringdisk serves several disks.
pub struct Serving<'a> {
    /// What its sockets are called.
    pub name: &'a str,
    /// Queues of each disk.
    pub queues: u16,
    pub iothreads: usize,
    /// For the I/O threads in turn, and for all that it does besides.
    pub cpus: &'a [usize],
}

impl Serving<'_> {
    /// One queue each, on one I/O thread on the server's core.
    const ONE: Serving<'static> = Serving {
        name: "neighbour",
        queues: 1,
        iothreads: 1,
        cpus: &[SERVER_CPU],
    };

    /// Starts `binary` with `files` as disks.
    pub fn start(
        &self,
        binary: &Path,
        programs: &Programs,
        dir: &Path,
        files: &[String],
    ) -> anyhow::Result<Server> {
        let cpus: Vec<String> = self.cpus.iter().map(usize::to_string).collect();
        let cpus = cpus.join(",");
        let mut command = Command::new("taskset");
        command.args(["-c", &cpus]).arg(binary);
        // The lines of many disks would hide the table.
        command.env("RINGDISK_LOG", "error");
        command.args([
            "serve",
            "--json",
            &format!("--iothreads={}", self.iothreads),
        ]);
        command.arg(format!("--cpus={cpus}"));
        command.args(&programs.ringdisk_args);
        for (i, file) in files.iter().enumerate() {
            let name = format!("{}-{i}", self.name);
            let socket = dir.join(format!("{name}.sock"));
            let socket = socket
                .to_str()
                .context("the bench's directory is not UTF-8")?;
            let socket = socket.replace(',', ",,");
            let queues = self.queues;
            command.arg(format!(
                "{file},name={name},queues={queues},socket={socket}"
            ));
        }
        Server::ringdisk_command(command).context("starting ringdisk")
    }
}

/// Starts a client, on its own core unless the job names others.
pub fn start(programs: &Programs, job: &Job) -> anyhow::Result<Child> {
    let mut command = Command::new(&programs.xtask);
    command
        .args(["bench", "client"])
        .arg(serde_json::to_string(job)?);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    cpu::start_on(&[CLIENT_CPU], || command.spawn())?.context("starting a client")
}

/// Waits for a client's sample.
pub fn finish(client: Child) -> anyhow::Result<Sample> {
    let output = client.wait_with_output()?;
    if !output.status.success() {
        bail!("a client failed: {}", output.status);
    }
    serde_json::from_slice(&output.stdout).context("reading a client's sample")
}
