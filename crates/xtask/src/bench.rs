//! `cargo xtask bench`: ringdisk, qemu-storage-daemon and fio on the host, compared in one interleaved run.
//!
//! The tables are [plans](plans) that the lab measures: `ringdisk lab run bench-disk`. This program builds ringdisk and runs
//! them. It prints the results of closed loops and fixed rates together, with what is wanted of them; those of other
//! plans (`--plan`) the lab prints itself. Instructions per I/O, NBD exports and
//! backups are measured here.

mod backup;
mod ceph;
mod frame;
mod instructions;
mod machine;
mod nbd;
mod open_loop;
mod picture;
mod plan;
mod plans;
mod report;
mod setting;
mod show;
mod words;

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use signal_hook::consts::{SIGINT, SIGTERM};

use report::Report;
use setting::{Aio, Cache, Lists, Poll, Ring, Setting};
use words::{Backing, Client, Rw, Server};

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

    /// Run these plans of the lab, which prints their tables: bench-qcow2, bench-idle and others of `ringdisk lab recipes`
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    plan: Vec<String>,

    /// With --plan: another value, as in --set config.queues=2; repeatable
    #[arg(long, requires = "plan", value_name = "[TABLE.]KEY=VALUE")]
    set: Vec<String>,

    /// Count the server's instructions per I/O on the null disk, in each setting, instead of measuring the workloads; the
    /// depth is the first of --depth [default: 32]
    #[arg(long)]
    instructions: bool,

    /// With --instructions: disks on the one I/O thread, each with the queues of the setting
    #[arg(
        long,
        requires = "instructions",
        value_delimiter = ',',
        value_name = "N",
        default_value = "1"
    )]
    disks: Vec<u16>,

    /// Measure NBD exports beside those of qemu-nbd and qemu-storage-daemon, with --rounds, --runtime and --size
    #[arg(long)]
    nbd: bool,

    /// Measure what a guest notices of a backup, with ringdisk and with copy-before-write of qemu-storage-daemon, with
    /// --rounds, --runtime and --size; also of the --baseline; with --ceph, of an image in a cluster of three OSDs
    #[arg(long)]
    backup: bool,

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
    /// Print the table of an earlier run again, and draw its picture
    Show {
        /// The JSON of that run
        json: PathBuf,
        /// Where the picture goes
        #[arg(long)]
        svg: Option<PathBuf>,
    },
}

/// The contestants if none are named.
const SERVERS: [Server; 4] = [
    Server::Ringdisk,
    Server::RingdiskFixed,
    Server::Qsd,
    Server::Host,
];

/// Runs the bench as `args` say.
pub fn run(args: Args) -> anyhow::Result<()> {
    if let Some(Internal::Show { json, svg }) = &args.internal {
        return show::show(json, svg.as_deref());
    }
    let bench = Bench::prepare(args)?;
    if bench.args.backup {
        return backup::run(&bench);
    }
    if bench.args.ceph.ceph {
        return ceph::run(&bench);
    }
    if bench.args.nbd {
        return nbd::run(&bench);
    }
    if !bench.args.plan.is_empty() {
        return plans::by_name(&bench);
    }
    let report = if bench.args.open_loop.wanted() {
        plans::open_loop(&bench)?
    } else if bench.args.instructions {
        bench.instructions()?
    } else {
        plans::closed(&bench)?
    };
    print!("{}", show::table(&report));
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

/// The programs that take part.
struct Programs {
    ringdisk: PathBuf,
    baseline: Option<PathBuf>,
    /// The ringdisk that runs plans of the lab, and is the client of what is measured here.
    lab: PathBuf,
}

impl Bench {
    fn prepare(args: Args) -> anyhow::Result<Bench> {
        if std::thread::available_parallelism()?.get() < 2 {
            bail!("the bench needs two cores: one for the server, one for the client");
        }
        let target = target_dir();
        let dir = args.dir.clone().unwrap_or_else(|| target.join("bench"));
        std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
        if args.ceph.ceph {
            crate::packages::tcmalloc::ensure()?;
        }
        build(args.ceph.ceph)?;
        let programs = Programs {
            ringdisk: args
                .ringdisk
                .clone()
                .unwrap_or_else(|| target.join("release/ringdisk")),
            baseline: args.baseline.clone(),
            lab: target.join("release/ringdisk"),
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

    /// What one I/O costs before time comes into it.
    fn instructions(&self) -> anyhow::Result<Report> {
        let mut report = self.new_report();
        let depth = self.args.depth.first().copied().unwrap_or(32);
        for setting in plan::settings(&self.settings(), Backing::Null) {
            for server in self.servers() {
                if !setting.concerns(server, Backing::Null) {
                    continue;
                }
                for disks in &self.args.disks {
                    eprintln!("{server}, {disks} disks {setting}: counting instructions ...");
                    let counted = instructions::Plan {
                        server,
                        setting,
                        disks: *disks,
                        depth,
                    };
                    report.instructions.push(counted.count(self)?);
                }
            }
        }
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

    fn interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    fn new_report(&self) -> Report {
        Report::new(self.args.seed, self.rounds(), self.runtime())
    }

    fn save(&self, report: &Report) -> anyhow::Result<()> {
        report.write_json(&self.json())?;
        show::draw(report, &self.svg())
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

/// A debug build would measure itself. For a cluster, ringdisk is built as it is packaged.
fn build(ceph: bool) -> anyhow::Result<()> {
    let mut command = crate::cargo();
    command.args([
        "build",
        "--release",
        "--quiet",
        "--workspace",
        "--bin",
        "ringdisk",
    ]);
    if ceph {
        command.arg(crate::packages::tcmalloc::FEATURE);
    }
    let status = command.status().context("starting cargo")?;
    if !status.success() {
        bail!("the release build failed: {status}");
    }
    Ok(())
}
