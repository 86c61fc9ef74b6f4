//! What a quiet VM costs: `--open-loop`. The other loads of the bench are closed loops at full speed; most disks of a
//! host do a few hundred requests a second, and the guest does not wait for each of them.
//!
//! A sample is a fresh server on its core and a fresh client on another one; in each round, all contestants take turns
//! in random order, with the same times of arrival.

mod idle;
mod picture;
mod report;
mod server;

use std::fs::File;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::Bench;
use super::backing::{Prepared, written_file};
use super::plan::{Backing, Client, Rw, Server, Workload};
use super::report::Report;
use super::server::{CLIENT_CPU, SERVER_CPU};
use super::setting::{Cache, Setting};
use super::turns::{Progress, Random};
use idle::Idle;
use lab::client::pace::Pace;
use lab::client::{Job, Sample};
use lab::plan::words::Arrival;
use lab::process;
use server::{Disk, Polling, Running, Serving};

pub use picture::write as draw;
pub use report::write;

/// Options of `--open-loop`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Args {
    /// Measure what disks cost that are not at full load [default: all parts], instead of the workloads
    #[arg(long, value_delimiter = ',', num_args = 0.., value_name = "PART")]
    open_loop: Option<Vec<Part>>,

    /// With --open-loop: offered requests per second [default: 100,1000,4000,16000,64000]
    #[arg(
        long,
        requires = "open_loop",
        value_delimiter = ',',
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    rate: Vec<u32>,

    /// With --open-loop: the distances between requests
    #[arg(long, requires = "open_loop", default_value = "poisson", value_parser = Arrival::from_str)]
    arrivals: Arrival,

    /// With --open-loop: connected disks without I/O [default: 1000]
    #[arg(
        long,
        requires = "open_loop",
        value_name = "N",
        value_parser = clap::value_parser!(u16).range(2..=4096)
    )]
    disks: Option<u16>,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// An open loop at several rates
    Rates,
    /// A closed loop at depth 1, with pauses
    Think,
    /// A disk with a limit, in a closed loop
    Throttle,
    /// 64 disks with 100 requests a second each
    Disks,
    /// 1000 connected disks without I/O
    Idle,
    /// Requests after a silence of 100 ms
    Bursts,
}

/// What is asked of the disks of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "part")]
pub enum Load {
    /// Requests at their own times, at most `depth` of them under way.
    Rates {
        per_second: u32,
        depth: usize,
        arrivals: Arrival,
    },
    /// One request, a pause, the next one.
    Think { pause_us: u64 },
    /// A closed loop on a disk with a limit of so many IOPS.
    Throttle { limit: u32, depth: usize },
    /// Each of the disks has an open loop.
    Disks {
        disks: usize,
        iothreads: usize,
        per_second: u32,
    },
    /// Connected disks without I/O.
    Idle { disks: usize },
    /// Requests at once after a silence; the latency is that of the first answer.
    Bursts { requests: usize },
}

/// One line of a table: everything in it is measured in the same minutes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    pub backing: Backing,
    pub write: bool,
    pub client: Client,
    #[serde(flatten)]
    pub load: Load,
}

/// One sample.
#[derive(Clone, Serialize, Deserialize)]
pub struct Measured {
    #[serde(flatten)]
    pub cell: Cell,
    pub server: Server,
    pub round: usize,
    #[serde(flatten)]
    pub sample: Sample,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub polling: Option<Polling>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<Idle>,
}

const RATES: [u32; 5] = [100, 1000, 4000, 16_000, 64_000];
const DEPTH: usize = 32;
const PAUSES_US: [u64; 4] = [0, 20, 100, 500];
const LIMITS: [u32; 3] = [500, 2000, 10_000];
const LIMITED_DEPTHS: [usize; 3] = [1, 32, 128];
const DISKS: usize = 64;
const DISKS_PER_SECOND: u32 = 100;
const IDLE_DISKS: usize = 1000;
const BURSTS: [usize; 2] = [1, 8];
const SILENCE_US: u64 = 100_000;

/// Bytes of each of the many disks.
const MANY_BYTES: u64 = 32 << 20;
const IDLE_BYTES: u64 = 1 << 30;

/// The contestants if none are named.
const SERVERS: [Server; 4] = [
    Server::Ringdisk,
    Server::RingdiskNoPolling,
    Server::QsdNative,
    Server::Qsd,
];

/// Seconds of a sample where requests are many, if none are named.
pub fn runtime_s(quick: bool) -> f64 {
    if quick { 0.5 } else { 0.7 }
}

impl Args {
    /// Whether this is what is to be measured.
    pub fn wanted(&self) -> bool {
        self.open_loop.is_some()
    }

    fn has(&self, part: Part) -> bool {
        let parts = self.open_loop.as_deref().unwrap_or_default();
        parts.is_empty() || parts.contains(&part)
    }
}

/// Measures all that the command line selects.
pub fn measure(bench: &Bench) -> anyhow::Result<Report> {
    let cells = cells(bench);
    if cells.is_empty() {
        bail!("no cell is left by these filters");
    }
    let mut random = Random(bench.args.seed);
    let mut report = bench.new_report();
    let turns = |cell: &Cell| servers(bench, cell).len() * rounds(bench, cell);
    let mut progress = Progress::new(cells.iter().map(turns).sum());
    for cells in cells.chunk_by(|a, b| a.ground() == b.ground()) {
        let ground = match Ground::new(&cells[0], bench) {
            Ok(ground) => ground,
            Err(reason) => {
                report
                    .skipped
                    .push(format!("{}: {reason:#}", cells[0].backing));
                progress.total -= cells.iter().map(turns).sum::<usize>();
                continue;
            }
        };
        for round in 0..bench.rounds() {
            let mut order: Vec<&Cell> = cells.iter().collect();
            order.retain(|cell| round < rounds(bench, cell));
            random.shuffle(&mut order);
            for cell in order {
                let mut servers = servers(bench, cell);
                random.shuffle(&mut servers);
                for server in servers {
                    if bench.interrupted() {
                        report.skipped.push("the rest: interrupted".into());
                        return Ok(report);
                    }
                    progress.show(&cell.to_string(), server, round);
                    match sample(bench, cell, server, &ground, round, random.next()) {
                        Ok(measured) => report.open_loop.push(measured),
                        // Ctrl-C ends the server and the client as well.
                        Err(_) if bench.interrupted() => {}
                        Err(error) => {
                            let text = format!("{cell}, {server}: {error:#}");
                            progress.complain(&text);
                            report.failures.push(text);
                        }
                    }
                }
            }
            bench.save(&report)?;
        }
    }
    progress.clear();
    Ok(report)
}

/// Idle disks are measured once: their figures hardly differ.
fn rounds(bench: &Bench, cell: &Cell) -> usize {
    match cell.load {
        Load::Idle { .. } => bench.args.rounds.unwrap_or(1),
        _ => bench.rounds(),
    }
}

/// Who takes part in a cell.
fn servers(bench: &Bench, cell: &Cell) -> Vec<Server> {
    let named = match (&bench.args.servers[..], cell.load) {
        // With native AIO, qemu-storage-daemon takes a minute to open so many files.
        ([], Load::Idle { .. }) => &[Server::Ringdisk, Server::Qsd],
        ([], _) => &SERVERS[..],
        (named, _) => named,
    };
    let baseline = bench.args.baseline.as_ref().map(|_| Server::Baseline);
    let others = named.iter().copied();
    others
        .filter(|server| !matches!(server, Server::Host | Server::Baseline))
        .chain(baseline)
        .filter(|server| Setting::default().concerns(*server, cell.backing))
        .collect()
}

/// The cells that the command line selects. Those that need the same preparation stand together.
fn cells(bench: &Bench) -> Vec<Cell> {
    let (args, quick) = (&bench.args, bench.args.quick);
    let part = |part| args.open_loop.has(part);
    let or = |named: &[Backing], default: &[Backing]| match named {
        [] => default.to_vec(),
        named => named.to_vec(),
    };
    let first = &[Backing::Disk][..];
    let all = &[Backing::Disk, Backing::Zram, Backing::Cache][..];
    let client = args.client.first().copied().unwrap_or(Client::Ring);
    let rates = match &args.open_loop.rate[..] {
        [] => &RATES[..],
        named => named,
    };
    let mut cells = Vec::new();
    for backing in or(&args.only, if quick { first } else { all }) {
        for write in [false, true] {
            let mut add = |load| {
                cells.push(Cell {
                    backing,
                    write,
                    client,
                    load,
                })
            };
            let rw = [Rw::Randread, Rw::Randwrite][usize::from(write)];
            let named = args.rw.contains(&rw);
            if !named && !args.rw.is_empty() {
                continue;
            }
            // All but the rates is measured on the real disk and with reads, unless more is asked for.
            let asked = named || !write;
            let here = backing == Backing::Disk || !args.only.is_empty();
            if part(Part::Rates) && (asked || !quick) {
                for &per_second in rates {
                    add(Load::Rates {
                        per_second,
                        depth: args.depth.first().copied().unwrap_or(DEPTH),
                        arrivals: args.open_loop.arrivals,
                    });
                }
            }
            if part(Part::Think) && asked && here {
                for pause_us in PAUSES_US {
                    add(Load::Think { pause_us });
                }
            }
            if part(Part::Throttle) && asked && here {
                let depths = match &args.depth[..] {
                    [] if quick => &LIMITED_DEPTHS[1..2],
                    [] => &LIMITED_DEPTHS[..],
                    named => named,
                };
                for &limit in if quick { &LIMITS[1..] } else { &LIMITS[..] } {
                    for &depth in depths {
                        add(Load::Throttle { limit, depth });
                    }
                }
            }
            if part(Part::Bursts) && asked && here {
                for &requests in if quick { &BURSTS[..1] } else { &BURSTS[..] } {
                    add(Load::Bursts { requests });
                }
            }
        }
    }
    let cell = |load| Cell {
        backing: Backing::Disk,
        write: false,
        client: Client::Ring,
        load,
    };
    let real = args.only.is_empty() || args.only.contains(&Backing::Disk);
    if part(Part::Disks) && real {
        for iothreads in 1..=if quick { 1 } else { 2 } {
            cells.push(cell(Load::Disks {
                disks: DISKS,
                iothreads,
                per_second: DISKS_PER_SECOND,
            }));
        }
    }
    if part(Part::Idle) && real {
        let disks = args.open_loop.disks.map_or(IDLE_DISKS, usize::from);
        cells.push(cell(Load::Idle { disks }));
    }
    cells
}

impl Cell {
    /// Cells for which this is equal use the same disks.
    fn ground(&self) -> (Backing, usize) {
        match self.load {
            Load::Disks { disks, .. } => (self.backing, disks),
            Load::Idle { disks } => (self.backing, disks),
            _ => (self.backing, 1),
        }
    }
}

/// The disks of some cells.
struct Ground {
    disks: Vec<Disk>,
    cache: Cache,
    /// Where it is one disk.
    prepared: Option<Prepared>,
}

impl Ground {
    fn new(cell: &Cell, bench: &Bench) -> anyhow::Result<Ground> {
        let dir = std::path::absolute(&bench.dir)?;
        let files = |disks: usize, make: &dyn Fn(&Path, usize) -> anyhow::Result<Disk>| {
            let dir = dir.join("open");
            std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
            let disks: anyhow::Result<Vec<Disk>> = (0..disks).map(|i| make(&dir, i)).collect();
            Ok(Ground {
                disks: disks?,
                cache: Cache::None,
                prepared: None,
            })
        };
        match cell.load {
            Load::Disks { disks, .. } => files(disks, &|dir, i| {
                let file = written_file(dir, &format!("disk{i}"), MANY_BYTES)?;
                Ok(Disk::File(file))
            }),
            Load::Idle { disks } => files(disks, &|dir, i| {
                let path = dir.join(format!("idle{i}.raw"));
                File::create(&path)?.set_len(IDLE_BYTES)?;
                Ok(Disk::File(path))
            }),
            _ => {
                let prepared = Prepared::new(cell.backing, &dir, bench.args.size << 30)?;
                Ok(Ground {
                    disks: vec![Disk::of(&prepared)],
                    cache: Setting::default().cache_on(cell.backing),
                    prepared: Some(prepared),
                })
            }
        }
    }
}

fn sample(
    bench: &Bench,
    cell: &Cell,
    server: Server,
    ground: &Ground,
    round: usize,
    seed: u64,
) -> anyhow::Result<Measured> {
    if let Some(prepared) = &ground.prepared {
        prepared.settle(ground.cache)?;
    }
    process::wait_for_quiet(Duration::from_secs_f64(bench.args.patience))?;
    let (iothreads, iops) = match cell.load {
        Load::Disks { iothreads, .. } => (iothreads, None),
        Load::Throttle { limit, .. } => (1, Some(limit)),
        _ => (1, None),
    };
    let serving = Serving {
        disks: &ground.disks,
        cache: ground.cache,
        iothreads,
        iops,
    };
    let mut measured = Measured {
        cell: *cell,
        server,
        round,
        sample: Sample::default(),
        polling: None,
        idle: None,
    };
    if let Load::Idle { .. } = cell.load {
        let (sample, idle) = idle::measure(&serving, server, bench)?;
        (measured.sample, measured.idle) = (sample, Some(idle));
        return Ok(measured);
    }
    let running = serving.start(server, &bench.programs, &bench.dir)?;
    let job = job(bench, cell, &running, seed);
    if let Load::Throttle { .. } = cell.load {
        measured.sample = running.measure(&job, &bench.programs)?;
    } else {
        let paced = Job {
            pace: Some(cell.load.pace()),
            // The same for all contestants of a round.
            schedule_seed: bench.args.seed.wrapping_add(round as u64) << 32,
            ..job
        };
        measured.sample = running.measure(&paced, &bench.programs)?;
    }
    measured.polling = running.polling();
    Ok(measured)
}

impl Load {
    /// When its client sends requests.
    fn pace(self) -> Pace {
        match self {
            Load::Rates {
                per_second,
                arrivals,
                ..
            } => Pace::Open {
                per_second: per_second.into(),
                arrivals,
            },
            Load::Disks { per_second, .. } => Pace::Open {
                per_second: per_second.into(),
                arrivals: Arrival::Poisson,
            },
            Load::Think { pause_us } => Pace::Bursts {
                requests: 1,
                pause_us,
            },
            Load::Bursts { requests } => Pace::Bursts {
                requests,
                pause_us: SILENCE_US,
            },
            Load::Throttle { .. } | Load::Idle { .. } => Pace::Bursts {
                requests: 1,
                pause_us: 0,
            },
        }
    }

    fn depth(self) -> usize {
        match self {
            Load::Rates { depth, .. } | Load::Throttle { depth, .. } => depth,
            Load::Disks { .. } => DEPTH,
            Load::Think { .. } | Load::Idle { .. } => 1,
            Load::Bursts { requests } => requests,
        }
    }

    /// Seconds of a sample that show more than chance, if none are named.
    fn runtime_s(self, quick: bool) -> f64 {
        let (usual, few) = (runtime_s(quick), if quick { 1.0 } else { 2.0 });
        match self {
            Load::Rates { per_second, .. } => (150.0 / f64::from(per_second)).clamp(usual, few),
            Load::Bursts { .. } | Load::Disks { .. } => few,
            _ => usual,
        }
    }
}

fn job(bench: &Bench, cell: &Cell, running: &Running, seed: u64) -> Job {
    let runtime_s = cell.load.runtime_s(bench.args.quick);
    Job {
        sockets: running.sockets.clone(),
        driven: 1,
        queues: 1,
        packed: false,
        client: cell.client,
        pace: None,
        schedule_seed: 0,
        latencies: false,
        access: Workload {
            write: cell.write,
            sequential: false,
            block: 4 << 10,
            depth: cell.load.depth(),
        },
        warmup_s: bench.warmup(),
        runtime_s: bench.args.runtime.unwrap_or(runtime_s),
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
