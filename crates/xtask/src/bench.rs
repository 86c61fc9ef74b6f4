//! `cargo xtask bench`: ringdisk, qemu-storage-daemon and fio on the host, compared in one interleaved run.
//!
//! The tables of closed loops and fixed rates are [plans](plans) that the lab measures: `ringdisk lab run bench-disk`. This
//! program builds ringdisk, runs them, and prints what they gave together. It measures the other tables itself.
//!
//! One sample is one start of a server, one connection of a client, a warm-up and a window. Within a cell (a backing and a
//! workload) the contestants take turns in random order, round after round, so that a busy minute hits all of them;
//! what is reported are medians, and medians of the ratios within a round.

mod backing;
mod ceph;
mod images;
mod instructions;
mod machine;
mod neighbours;
mod open_loop;
mod picture;
mod plan;
mod plans;
mod report;
mod scaling;
mod server;
mod setting;

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use signal_hook::consts::{SIGINT, SIGTERM};

use backing::Prepared;
use instructions::Instructions;
use lab::client;
use lab::client::Job;
use plan::{Backing, Client, Rw, Server, Workload};
use report::{Idle, Report};
use server::{CLIENT_CPU, Programs, Running, SERVER_CPU};
use setting::{Aio, Cache, Lists, Poll, Ring, Setting};

/// Measure ringdisk beside qemu-storage-daemon and fio on the host
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    internal: Option<Internal>,

    #[command(flatten)]
    ceph: ceph::Args,

    #[command(flatten)]
    open_loop: open_loop::Args,

    /// Backings to measure [default: all]
    #[arg(long, value_delimiter = ',', value_name = "BACKING")]
    only: Vec<Backing>,

    /// Workloads to measure: 4k randread, randwrite; 128k read, write [default: all]
    #[arg(long, value_delimiter = ',')]
    rw: Vec<Rw>,

    /// Queue depths of the plan to measure [default: 1,8,32,128; sequential: 32]
    #[arg(long, value_delimiter = ',')]
    depth: Vec<usize>,

    /// Clients: ring, ring-poll, blkio [default: ring, which sleeps while it waits]
    #[arg(long, value_delimiter = ',', value_parser = Client::from_str)]
    client: Vec<Client>,

    /// Engines of every server; the lists from here to --ring multiply [default: each server's choice]
    #[arg(long, value_delimiter = ',')]
    aio: Vec<Aio>,

    /// Cache modes of every server [default: none, on the page cache writeback]
    #[arg(long, value_delimiter = ',')]
    cache: Vec<Cache>,

    /// Queues in use, over which the row's depth is spread; one I/O thread serves them all [default: 1]
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: Vec<u16>,

    /// Whether servers may poll, adaptively for up to 100 us, before they sleep [default: each server's own limit]
    #[arg(long, value_delimiter = ',')]
    poll: Vec<Poll>,

    /// Kinds of virtqueues; qemu-storage-daemon and blkio have no packed ones [default: split]
    #[arg(long, value_delimiter = ',')]
    ring: Vec<Ring>,

    /// Contestants; the baseline takes part when --baseline is given [default: ringdisk,ringdisk-fixed,qsd,host; with
    /// --open-loop ringdisk,ringdisk-no-polling,qsd-native,qsd]
    #[arg(long, value_delimiter = ',')]
    servers: Vec<Server>,

    /// Another ringdisk binary, measured in the same rounds
    #[arg(long, value_name = "PATH")]
    baseline: Option<PathBuf>,

    /// Use this ringdisk binary instead of building one
    #[arg(long, value_name = "PATH")]
    ringdisk: Option<PathBuf>,

    /// One more argument for `ringdisk serve`, such as --ringdisk-arg=--poll-max-us=0, where no plan measures; repeatable
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    ringdisk_arg: Vec<String>,

    /// Only the cells that decide a target
    #[arg(long)]
    targets: bool,

    /// A first look: the cells that decide a target, 3 rounds of 1 s
    #[arg(long)]
    quick: bool,

    /// Samples per contestant and cell [default: 5; with --open-loop 3]
    #[arg(long)]
    rounds: Option<usize>,

    /// Seconds per sample, after the warm-up [default: 2; with --open-loop 0.7, and more where requests are few]
    #[arg(long, value_name = "SECONDS")]
    runtime: Option<f64>,

    /// Seconds of I/O before each sample [default: 0.5; with --open-loop 0.3]
    #[arg(long, value_name = "SECONDS")]
    warmup: Option<f64>,

    /// Measure the CPU use of a connected disk without I/O, over 30 s per server, instead of the workloads
    #[arg(long)]
    idle: bool,

    /// Measure what a disk at depth 128 does to the latency of one at depth 1 on the same I/O thread, on the first backing
    /// of --only [default: null], instead of the workloads
    #[arg(long)]
    fairness: bool,

    /// Measure what a second core with a second queue brings on the null disk, and what 32 disks of 4 queues cost per
    /// I/O on two I/O threads, instead of the workloads; with --instructions, instructions per I/O
    #[arg(long)]
    scaling: bool,

    /// Count the server's instructions per I/O on the null disk at depth 32, in each setting, instead of measuring the
    /// workloads
    #[arg(long)]
    instructions: bool,

    /// Measure what qcow2 costs: ringdisk raw, ringdisk qcow2 and qemu-storage-daemon qcow2 in turns, and the qcow2 of
    /// --baseline, instead of the workloads
    #[arg(long)]
    qcow2: bool,

    /// With --qcow2: what is done to the disk [default: all]
    #[arg(long, requires = "qcow2", value_delimiter = ',')]
    work: Vec<images::Work>,

    /// With --qcow2: on what kind of image, and by how many queues [default: all]
    #[arg(long, requires = "qcow2", value_delimiter = ',')]
    kind: Vec<images::Kind>,

    /// Wait up to this long before each sample until nothing else runs on the machine
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    patience: f64,

    /// GiB of the file on the real disk
    #[arg(long, value_name = "GIB", default_value_t = 4)]
    size: u64,

    /// Where the measured files, the sockets and the results of plans live [default: target/bench]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Where the raw samples go [default: DIR/bench.json]
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,

    /// Where the picture goes [default: DIR/bench.svg]
    #[arg(long, value_name = "PATH")]
    svg: Option<PathBuf>,

    /// Seed of the offsets and of the order of the contestants
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(clap::Subcommand)]
enum Internal {
    /// One client of one sample; the bench starts it as a process of its own
    #[command(hide = true)]
    Client {
        /// A [`Job`] as JSON
        job: String,
    },
    /// Print the table of an earlier run again, and draw its picture
    Show {
        /// The JSON of that run
        json: PathBuf,
        /// Where the picture goes
        #[arg(long)]
        svg: Option<PathBuf>,
    },
}

const IDLE_SECONDS: f64 = 30.0;

/// The contestants if none are named.
const SERVERS: [Server; 4] = [
    Server::Ringdisk,
    Server::RingdiskFixed,
    Server::Qsd,
    Server::Host,
];

/// Runs the bench as `args` say.
pub fn run(args: Args) -> anyhow::Result<()> {
    match &args.internal {
        Some(Internal::Client { job }) => return client::run(job),
        Some(Internal::Show { json, svg }) => return report::show(json, svg.as_deref()),
        None => {}
    }
    let bench = Bench::prepare(args)?;
    if bench.args.ceph.ceph {
        return ceph::run(&bench);
    }
    if bench.args.fairness {
        return bench.fairness();
    }
    let report = if bench.args.open_loop.wanted() {
        plans::open_loop(&bench)?
    } else if bench.args.idle {
        bench.idle()?
    } else if bench.args.scaling {
        bench.scaling()?
    } else if bench.args.qcow2 {
        bench.images()?
    } else if bench.args.instructions {
        bench.instructions()?
    } else {
        plans::closed(&bench)?
    };
    print!("{}", report.table());
    bench.save(&report)?;
    eprintln!(
        "raw samples: {}\npicture:     {}",
        bench.json().display(),
        bench.svg().display()
    );
    Ok(())
}

struct Bench {
    args: Args,
    programs: Programs,
    dir: PathBuf,
    interrupted: Arc<AtomicBool>,
}

impl Bench {
    fn prepare(args: Args) -> anyhow::Result<Bench> {
        if std::thread::available_parallelism()?.get() < 2 {
            bail!("the bench needs two cores: one for the server, one for the client");
        }
        let target = target_dir();
        let dir = args.dir.clone().unwrap_or_else(|| target.join("bench"));
        std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
        let by_plan = !(args.ceph.ceph
            || args.fairness
            || args.idle
            || args.scaling
            || args.qcow2
            || args.instructions);
        let build_ringdisk = by_plan || args.ringdisk.is_none() && serves_ringdisk(&args.servers);
        if args.ceph.ceph {
            crate::packages::tcmalloc::ensure()?;
        }
        build(build_ringdisk, args.ceph.ceph)?;
        let programs = Programs {
            ringdisk: args
                .ringdisk
                .clone()
                .unwrap_or_else(|| target.join("release/ringdisk")),
            baseline: args.baseline.clone(),
            lab: target.join("release/ringdisk"),
            xtask: if cfg!(debug_assertions) {
                target.join("release/xtask")
            } else {
                std::env::current_exe()?
            },
            ringdisk_args: args.ringdisk_arg.clone(),
        };
        // Between samples the bench looks at this; servers and zram devices are then given back as usual.
        let interrupted = Arc::new(AtomicBool::new(false));
        // A second Ctrl-C ends it at once. Not a second SIGTERM: timeout(1) always sends two.
        signal_hook::flag::register_conditional_shutdown(SIGINT, 130, Arc::clone(&interrupted))?;
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&interrupted))?;
        }
        Ok(Bench {
            args,
            programs,
            dir,
            interrupted,
        })
    }

    fn servers(&self) -> impl Iterator<Item = Server> {
        let baseline = self.args.baseline.as_ref().map(|_| Server::Baseline);
        let named = self.named_servers().iter().copied();
        named
            .filter(|server| !matches!(server, Server::Host | Server::Baseline))
            .chain(baseline)
    }

    fn named_servers(&self) -> &[Server] {
        match &self.args.servers[..] {
            [] => &SERVERS,
            named => named,
        }
    }

    /// A disk that had I/O a second ago and has none now.
    fn idle(&self) -> anyhow::Result<Report> {
        let mut report = self.new_report();
        let workload = Workload {
            write: false,
            sequential: false,
            block: 4 << 10,
            depth: 1,
        };
        let client = self.args.client.first().copied().unwrap_or(Client::Ring);
        let kind = self.args.only.first().copied().unwrap_or(Backing::Disk);
        let backing = Prepared::new(kind, &self.dir, self.args.size << 30)?;
        for server in self.servers() {
            eprintln!("{server}: connected and idle for {IDLE_SECONDS} s ...");
            let setting = Setting::default();
            let running = Running::start(server, &backing, setting, &self.programs, &self.dir)?;
            let job = Job {
                idle_s: Some(IDLE_SECONDS),
                ..self.job(&running, client, workload, setting, self.args.seed)
            };
            let sample = running.measure(&job, &self.programs)?;
            report.idle.push(Idle {
                server,
                client,
                backing: kind,
                seconds: IDLE_SECONDS,
                core: sample.server_core,
            });
        }
        Ok(report)
    }

    /// Two disks on one thread.
    fn fairness(&self) -> anyhow::Result<()> {
        let kind = self.args.only.first().copied().unwrap_or(Backing::Null);
        let size = self.args.size << 30;
        let prepare = |name| {
            let dir = self.dir.join(name);
            std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
            Prepared::new(kind, &dir, size)
        };
        let (quiet, busy) = (prepare("quiet")?, prepare("busy")?);
        let files = [&quiet, &busy].map(|disk| server::file(disk, Setting::default()));
        let rounds = self.args.rounds.unwrap_or(3);
        neighbours::fairness(&self.programs, &self.dir, &files, rounds, self.runtime())
    }

    /// What one I/O costs before time comes into it.
    fn instructions(&self) -> anyhow::Result<Report> {
        let mut report = self.new_report();
        let workload = Workload {
            write: false,
            sequential: false,
            block: 4 << 10,
            depth: 32,
        };
        let settings = plan::settings(&self.settings(), Backing::Null);
        for setting in settings {
            let servers = self.servers();
            for server in servers.filter(|it| setting.concerns(*it, Backing::Null)) {
                eprintln!("{server} {setting}: counting instructions ...");
                let backing = Prepared::Null;
                let running = Running::start(server, &backing, setting, &self.programs, &self.dir)?;
                let seed = self.args.seed;
                let job = self.job(&running, Client::RingPoll, workload, setting, seed);
                let job = instructions::job(job, &self.dir);
                let client = running.start_client(&job, &self.programs)?;
                let read = |client| running.finish(client);
                let per_io = instructions::per_io(running.pid(), &job, client, read)?;
                report.instructions.push(Instructions {
                    server,
                    setting,
                    disks: 1,
                    depth: workload.depth,
                    per_io,
                });
            }
        }
        Ok(report)
    }

    /// What more queues, threads and disks cost.
    fn scaling(&self) -> anyhow::Result<Report> {
        let mut report = self.new_report();
        let plan = scaling::Plan {
            programs: &self.programs,
            dir: &self.dir,
            rounds: self.rounds(),
            warmup_s: self.warmup(),
            runtime_s: self.runtime(),
            patience_s: self.args.patience,
            depth: self.args.depth.first().copied().unwrap_or(32),
            clients: match &self.args.client[..] {
                [] => vec![Client::Ring, Client::RingPoll],
                named => named.to_vec(),
            },
        };
        match self.args.instructions {
            true => scaling::count(&plan, &mut report)?,
            false => scaling::measure(&plan, &self.interrupted, &mut report)?,
        }
        Ok(report)
    }

    /// What images cost.
    fn images(&self) -> anyhow::Result<Report> {
        let mut report = self.new_report();
        let plan = images::Plan {
            programs: &self.programs,
            dir: std::path::absolute(&self.dir)?,
            bytes: self.args.size << 30,
            rounds: self.rounds(),
            warmup_s: self.warmup(),
            runtime_s: self.runtime(),
            patience_s: self.args.patience,
            works: self.args.work.clone(),
            kinds: self.args.kind.clone(),
        };
        images::measure(&plan, &self.interrupted, &mut report)?;
        Ok(report)
    }

    fn settings(&self) -> Vec<Setting> {
        let lists = Lists {
            aio: self.args.aio.clone(),
            cache: self.args.cache.clone(),
            queues: self.args.queues.clone(),
            poll: self.args.poll.clone(),
            ring: self.args.ring.clone(),
        };
        lists.settings()
    }

    fn job(
        &self,
        running: &Running,
        client: Client,
        workload: Workload,
        setting: Setting,
        seed: u64,
    ) -> Job {
        Job {
            sockets: vec![running.socket.clone()],
            driven: 1,
            queues: setting.queues,
            packed: setting.ring == Ring::Packed,
            client,
            access: workload,
            queue_size: lab::client::RING_QUEUE_SIZE,
            pace: None,
            schedule_seed: 0,
            latencies: false,
            warmup_s: self.warmup(),
            runtime_s: self.runtime(),
            cooldown_s: 0.0,
            idle_s: None,
            server_pid: running.pid(),
            server_cpu: Some(SERVER_CPU),
            cpus: vec![CLIENT_CPU],
            mark: None,
            once: 0,
            seed,
        }
    }

    fn interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    fn new_report(&self) -> Report {
        Report::new(self.args.seed, self.rounds(), self.runtime())
    }

    fn save(&self, report: &Report) -> anyhow::Result<()> {
        report.write_json(&self.json())?;
        report.draw(&self.svg())
    }

    fn rounds(&self) -> usize {
        let few = self.args.quick || self.args.open_loop.wanted();
        self.args.rounds.unwrap_or(if few { 3 } else { 5 })
    }

    fn warmup(&self) -> f64 {
        let open_loop = self.args.open_loop.wanted();
        self.args
            .warmup
            .unwrap_or(if open_loop { 0.3 } else { 0.5 })
    }

    fn runtime(&self) -> f64 {
        let usual = match (self.args.open_loop.wanted(), self.args.quick) {
            (true, quick) => open_loop::runtime_s(quick),
            (false, true) => 1.0,
            (false, false) => 2.0,
        };
        self.args.runtime.unwrap_or(usual)
    }

    fn json(&self) -> PathBuf {
        self.args
            .json
            .clone()
            .unwrap_or_else(|| self.dir.join("bench.json"))
    }

    fn svg(&self) -> PathBuf {
        self.args
            .svg
            .clone()
            .unwrap_or_else(|| self.dir.join("bench.svg"))
    }
}

fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| crate::root().join("target"), PathBuf::from)
}

/// `cargo xtask` itself is a debug build: as a client it would measure itself. For a cluster, ringdisk is built as it is
/// packaged.
fn build(ringdisk: bool, ceph: bool) -> anyhow::Result<()> {
    let mut command = crate::cargo();
    command.args(["build", "--release", "--quiet", "--workspace"]);
    if ringdisk && ceph {
        command.arg(crate::packages::tcmalloc::FEATURE);
    }
    match (cfg!(debug_assertions), ringdisk) {
        (true, true) => command.args(["--bin", "xtask", "--bin", "ringdisk"]),
        (true, false) => command.args(["--bin", "xtask"]),
        (false, true) => command.args(["--bin", "ringdisk"]),
        (false, false) => return Ok(()),
    };
    let status = command.status().context("starting cargo")?;
    if !status.success() {
        bail!("the release build failed: {status}");
    }
    Ok(())
}

/// Whether a contestant is the binary under test, in whatever setting. None named is the default, which it is part of.
fn serves_ringdisk(servers: &[Server]) -> bool {
    let ours = [
        Server::Ringdisk,
        Server::RingdiskFixed,
        Server::RingdiskNoPolling,
    ];
    servers.is_empty() || servers.iter().any(|server| ours.contains(server))
}
