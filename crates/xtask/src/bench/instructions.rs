//! Instructions per I/O of a server, in user mode: steadier than time.
//!
//! Counted by single-stepping the I/O thread (`ptrace(2)`): virtual machines often have no hardware counters, and
//! valgrind 3.19 lets no other thread run while one waits in `io_uring_enter`. A stepped server is a thousand times
//! slower than its client, so what is counted is the path of a server that always has work, on the null disk. A string
//! instruction (`rep stos`) counts once per repetition, which makes a server that clears large structures look worse here
//! than its time does.

use std::fmt::{self, Write};
use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::Bench;
use super::machine::{CLIENT_CPU, SERVER_CPU};
use super::setting::{Ring, Setting};
use super::words::{Client, Server, Workload};
use harness::cpu;
use harness::process::Stop;
use lab::client::{Job, RING_QUEUE_SIZE, Sample};
use lab::plan::words::{Device, RingKind};
use lab::plan::{Backing, IoThread, Server as LabServer, Settings};
use lab::storage::{Disk, Served};

/// Instructions per I/O of one server.
#[derive(Serialize, Deserialize)]
pub struct Instructions {
    pub server: Server,
    #[serde(default)]
    pub setting: Setting,
    /// On the one I/O thread.
    #[serde(default = "one")]
    pub disks: usize,
    /// Of each queue.
    pub depth: usize,
    pub per_io: f64,
}

fn one() -> usize {
    1
}

/// A server on one I/O thread, since one thread is stepped.
pub struct Plan {
    pub server: Server,
    pub setting: Setting,
    pub disks: u16,
    pub depth: usize,
}

/// Bytes of each null disk.
const DISK_BYTES: u64 = 64 << 30;

impl Plan {
    /// Starts the server and a client, and counts.
    pub fn count(&self, bench: &Bench) -> anyhow::Result<Instructions> {
        let served = Served::start(
            &self.settings(bench)?,
            &bench.programs.ringdisk,
            &bench.dir.join("server"),
            &vec![Disk::Null; self.disks.into()],
            DISK_BYTES,
            &[SERVER_CPU],
            &Stop::default(),
        )?;
        let server_pid = served.pid().context("the server is not ours")?;
        let job = self.job(bench, &served, server_pid);
        let mut command = Command::new(&bench.programs.lab);
        command
            .args(["lab", "client"])
            .arg(serde_json::to_string(&job)?)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let client =
            cpu::start_on(&[CLIENT_CPU], || command.spawn())?.context("starting the client")?;
        Ok(Instructions {
            server: self.server,
            setting: self.setting,
            disks: self.disks.into(),
            depth: self.depth,
            per_io: per_io(server_pid, &job, client)?,
        })
    }

    fn settings(&self, bench: &Bench) -> anyhow::Result<Settings> {
        let server = match self.server {
            Server::Ringdisk | Server::RingdiskFixed | Server::RingdiskNoPolling => {
                LabServer::Ringdisk
            }
            Server::Baseline => {
                let binary = bench.programs.baseline.clone();
                LabServer::Build(binary.context("no --baseline was given")?)
            }
            Server::Qsd | Server::QsdNative => LabServer::QemuStorageDaemon,
            Server::Host => bail!("the host is no server"),
        };
        let poll_max_us = self.setting.poll.map(|poll| poll.max_us());
        Ok(Settings {
            device: Device::VhostUserBlk,
            server,
            backing: Backing::Null,
            client: Client::RingPoll,
            iothread: IoThread::One,
            queues: Some(self.setting.queues),
            volumes: self.disks,
            fixed_buffers: self.server == Server::RingdiskFixed,
            poll_max_us: match self.server {
                Server::RingdiskNoPolling => Some(0),
                _ => poll_max_us,
            },
            ring: match self.setting.ring {
                Ring::Split => RingKind::Split,
                Ring::Packed => RingKind::Packed,
            },
            ..Settings::default()
        })
    }

    /// A client as long as the counting takes.
    fn job(&self, bench: &Bench, served: &Served, server_pid: u32) -> Job {
        Job {
            sockets: served.sockets.clone(),
            driven: self.disks.into(),
            queues: self.setting.queues,
            queue_size: RING_QUEUE_SIZE,
            packed: self.setting.ring == Ring::Packed,
            client: Client::RingPoll,
            access: Workload {
                write: false,
                sequential: false,
                block: 4 << 10,
                depth: self.depth,
            },
            pace: None,
            schedule_seed: 0,
            warmup_s: WARMUP.as_secs_f64(),
            runtime_s: WINDOW.as_secs_f64(),
            cooldown_s: COOLDOWN.as_secs_f64(),
            idle_s: None,
            server_pid,
            server_cpu: Some(SERVER_CPU),
            cpus: vec![CLIENT_CPU],
            mark: Some(bench.dir.join("window")),
            once: 0,
            seed: bench.args.seed,
            latencies: false,
        }
    }
}

/// The counts as text, each over the first of its server.
pub fn write(out: &mut String, counts: &[Instructions]) -> fmt::Result {
    if counts.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\ninstructions per I/O in user mode, null disk, one I/O thread, repetitions of string instructions counted"
    )?;
    for it in counts {
        let first = counts.iter().find(|first| first.server == it.server);
        let ratio = it.per_io / first.map_or(it.per_io, |first| first.per_io);
        let (server, disks, depth) = (it.server, it.disks, it.depth);
        let (setting, per_io) = (it.setting.to_string(), it.per_io);
        writeln!(
            out,
            "{server:10} {disks:>3} disks, depth {depth} {setting:28} {per_io:8.1}  x {ratio:.3}"
        )?;
    }
    Ok(())
}

/// The client's phases. Stepping starts and ends outside the window, yet while I/O goes on: a thread that sleeps cannot be
/// stepped. In the window, a few thousand I/Os are done.
const WARMUP: Duration = Duration::from_secs(2);
const WINDOW: Duration = Duration::from_secs(8);
const COOLDOWN: Duration = Duration::from_secs(2);

/// Steps between two looks at whether the window is open: less than one I/O.
const LOOK_EVERY: u64 = 200;

/// Steps the busiest thread of `server` while `client` does its I/O, and counts while `job`'s mark is there. Gives the
/// steps per I/O.
fn per_io(server: u32, job: &Job, client: Child) -> anyhow::Result<f64> {
    let mark = job.mark.as_deref().context("the client makes no mark")?;
    sleep(WARMUP / 4);
    let thread = busiest(server)?;
    sleep(WARMUP / 4);
    ptrace::attach(thread).context("attaching to the I/O thread")?;
    stopped(thread)?;
    let deadline = Instant::now() + WARMUP + WINDOW + COOLDOWN / 2;
    let mut steps = 0_u64;
    loop {
        for _ in 0..LOOK_EVERY {
            ptrace::step(thread, None)?;
            stopped(thread)?;
        }
        match mark.exists() {
            true => steps += LOOK_EVERY,
            false if steps > 0 => break,
            false => {}
        }
        if Instant::now() > deadline {
            bail!("the client's window does not begin or end in time");
        }
    }
    ptrace::detach(thread, None)?;
    let output = client.wait_with_output()?;
    if !output.status.success() {
        bail!("the client failed: {}", output.status);
    }
    let sample: Sample =
        serde_json::from_slice(&output.stdout).context("reading the client's sample")?;
    Ok(steps as f64 / sample.ios as f64)
}

fn stopped(thread: Pid) -> anyhow::Result<()> {
    match waitpid(thread, Some(WaitPidFlag::__WALL))? {
        WaitStatus::Stopped(..) => Ok(()),
        other => bail!("the I/O thread did not stop after a step: {other:?}"),
    }
}

/// The thread that has run longest: the one that does the I/O.
fn busiest(pid: u32) -> anyhow::Result<Pid> {
    let ran = |thread: &i32| -> u64 {
        let schedstat = fs::read_to_string(format!("/proc/{pid}/task/{thread}/schedstat"));
        let first = schedstat
            .ok()
            .and_then(|it| it.split(' ').next()?.parse().ok());
        first.unwrap_or(0)
    };
    let threads = harness::cpu::threads(pid)?;
    let thread = threads
        .into_iter()
        .max_by_key(ran)
        .context("a process has a thread")?;
    Ok(Pid::from_raw(thread))
}
