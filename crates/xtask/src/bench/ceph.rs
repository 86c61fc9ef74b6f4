//! `cargo xtask bench --ceph`: ringdisk on RBD images beside qemu-storage-daemon's rbd driver and fio's rbd engine.
//!
//! All on one machine: the OSD that answers takes cores from who asks, so that the figure that counts is the client's CPU
//! time per I/O, and of the IOPS who was the limit. The cluster is one OSD with its objects in memory, which leaves the
//! client the most. Nobody is pinned: clients and OSDs have many threads.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use testkit::ceph::{Ceph, Options, POOL};

use super::Bench;
use super::plan::{Client, Workload};
use super::server::fio_on_images;
use crate::packages;
use harness::cpu::Usage;
use harness::random::Rng;
use harness::spread::Spread;
use lab::client::{Job, Sample};

/// What to measure on a Ceph cluster
#[derive(clap::Args)]
#[group(skip)]
pub struct Args {
    /// Measure RBD images on a Ceph cluster that is started for it, with --rounds, --runtime and --depth
    #[arg(long)]
    pub ceph: bool,

    /// With --ceph: bytes of an I/O
    #[arg(long, value_delimiter = ',', default_value = "4k,16k", value_parser = block, value_name = "SIZE")]
    block: Vec<usize>,

    /// With --ceph: images, each at the row's depth
    #[arg(long, value_delimiter = ',', default_value = "1,4", value_name = "N", value_parser = clap::value_parser!(u8).range(1..=4))]
    images: Vec<u8>,

    /// With --ceph: checksums or encryption on the wire
    #[arg(long, value_delimiter = ',', default_value = "crc,secure")]
    wire: Vec<Wire>,

    /// With --ceph: reads or writes, at random or (seq) one behind the other
    #[arg(long, value_delimiter = ',', default_value = "read,write")]
    direction: Vec<Direction>,

    /// With --ceph: a library for LD_PRELOAD (an allocator), with which all contestants take part once more
    #[arg(long, value_name = "PATH")]
    preload: Option<PathBuf>,

    /// With --ceph: an option of librbd or librados with which ringdisk takes part once more, as in
    /// rbd_non_blocking_aio=true; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    rbd_option: Vec<String>,

    /// With --ceph: contestants; so does the ringdisk of --baseline
    #[arg(long, value_delimiter = ',', default_value = "ringdisk,qsd,fio")]
    ceph_servers: Vec<Program>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Wire {
    Crc,
    Secure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Direction {
    Read,
    Write,
    Seqread,
    Seqwrite,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Program {
    Ringdisk,
    #[value(skip)]
    Baseline,
    Qsd,
    Fio,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Contestant {
    program: Program,
    /// With --preload and --rbd-option.
    changed: bool,
}

impl Contestant {
    /// Whom the others are compared with.
    const OURS: Self = Self {
        program: Program::Ringdisk,
        changed: false,
    };

    fn all(bench: &Bench) -> Vec<Self> {
        let args = &bench.args.ceph;
        let baseline = bench.programs.baseline.iter().map(|_| Program::Baseline);
        let programs: Vec<_> = args.ceph_servers.iter().copied().chain(baseline).collect();
        let changes = |program| match program {
            Program::Ringdisk => args.preload.is_some() || !args.rbd_option.is_empty(),
            Program::Baseline => false,
            Program::Qsd | Program::Fio => args.preload.is_some(),
        };
        let changed = programs.iter().filter(|&&program| changes(program));
        let changed = changed.map(|&program| (program, true));
        let plain = programs.iter().map(|&program| (program, false));
        let all = plain.chain(changed);
        all.map(|(program, changed)| Self { program, changed })
            .collect()
    }

    /// The program, in the environment that it is to have.
    fn command(self, bench: &Bench) -> Result<Command> {
        let mut command = match self.program {
            Program::Ringdisk => Command::new(&bench.programs.ringdisk),
            Program::Baseline => {
                let baseline = bench.programs.baseline.as_ref();
                Command::new(baseline.context("--baseline names no program")?)
            }
            Program::Qsd => Command::new("qemu-storage-daemon"),
            Program::Fio => Command::new("fio"),
        };
        if let (true, Some(library)) = (self.changed, &bench.args.ceph.preload) {
            command.env("LD_PRELOAD", library);
        }
        Ok(command)
    }
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.program {
            Program::Ringdisk => "ringdisk",
            Program::Baseline => "ringdisk, baseline",
            Program::Qsd => "qemu-storage-daemon",
            Program::Fio => "fio",
        };
        match self.changed {
            true => f.pad(&format!("{name}, changed")),
            false => f.pad(name),
        }
    }
}

fn block(text: &str) -> Result<usize, String> {
    match text {
        "4k" => Ok(4 << 10),
        "16k" => Ok(16 << 10),
        _ => Err("is neither 4k nor 16k".into()),
    }
}

/// MiB of each image; all of them lie in the memory of the OSD.
const IMAGE_MIB: u64 = 256;

const DEPTHS: [usize; 3] = [1, 32, 128];

/// One line of the table.
struct Cell {
    wire: Wire,
    workload: Workload,
    images: usize,
}

struct Record {
    round: usize,
    who: Contestant,
    sample: Sample,
    /// Cores that the OSD used.
    osd_cores: f64,
}

/// Measures and prints all cells that `args` select.
pub fn run(bench: &Bench) -> Result<()> {
    packages::ceph::ensure_rivals()?;
    let args = &bench.args.ceph;
    let folder = bench.dir.join("ceph");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let options = Options {
        osds: 1,
        replicas: 1,
        in_memory: true,
        ..Options::default()
    };
    let ceph = Ceph::start(&folder, options)?;
    let most = args.images.iter().max().copied().unwrap_or(1);
    for i in 0..most {
        ceph.create(&image(i), IMAGE_MIB)?;
        let image = format!("{POOL}/{}", image(i));
        let total = format!("{IMAGE_MIB}M");
        let fill = [
            "bench",
            "--io-type=write",
            "--io-size=4M",
            "--io-pattern=seq",
            "--io-total",
            &total,
            &image,
        ];
        ceph.rbd(&fill)?;
    }
    for wire in [Wire::Crc, Wire::Secure] {
        write_conf(&ceph, wire)?;
    }
    let contestants = Contestant::all(bench);
    let cells = cells(bench);
    let mut random = Rng::new(bench.args.seed);
    println!(
        "{:<32}{:<29}{:>9}{:>12}{:>9}{:>9}{:>9}{:>8}{:>8}",
        "", "", "IOPS", "client µs/IO", "p50 µs", "p99 µs", "switches", "client", "OSD"
    );
    for cell in &cells {
        let mut records = Vec::new();
        for round in 0..bench.rounds() {
            let mut order = contestants.clone();
            random.shuffle(&mut order);
            for who in order {
                if bench.interrupted() {
                    bail!("interrupted");
                }
                let before = osds(&ceph)?;
                let start = Instant::now();
                let sample = sample(bench, &ceph, cell, who, random.bits())
                    .with_context(|| format!("{cell}, {who}"))?;
                let used = osds(&ceph)? - before;
                records.push(Record {
                    round,
                    who,
                    sample,
                    osd_cores: used / start.elapsed().as_secs_f64(),
                });
            }
        }
        print(cell, &contestants, &records);
    }
    println!(
        "client, OSD: cores in use. Medians of {} rounds of {} s; ratios are medians of those within a round.",
        bench.rounds(),
        bench.runtime()
    );
    Ok(())
}

fn cells(bench: &Bench) -> Vec<Cell> {
    let args = &bench.args.ceph;
    let depths = match &bench.args.depth[..] {
        [] => &DEPTHS[..],
        depths => depths,
    };
    let mut cells = Vec::new();
    for &wire in &args.wire {
        for &direction in &args.direction {
            for &block in &args.block {
                for &images in &args.images {
                    cells.extend(depths.iter().map(|&depth| Cell {
                        wire,
                        images: images.into(),
                        workload: Workload {
                            write: matches!(direction, Direction::Write | Direction::Seqwrite),
                            sequential: matches!(
                                direction,
                                Direction::Seqread | Direction::Seqwrite
                            ),
                            block,
                            depth,
                        },
                    }));
                }
            }
        }
    }
    cells
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Workload {
            write,
            sequential,
            block,
            depth,
        } = self.workload;
        let direction = match (sequential, write) {
            (false, false) => "read",
            (false, true) => "write",
            (true, false) => "seqread",
            (true, true) => "seqwrite",
        };
        let wire = match self.wire {
            Wire::Crc => "crc",
            Wire::Secure => "secure",
        };
        let images = self.images;
        f.pad(&format!(
            "{wire} {}k {direction}, depth {depth} × {images}",
            block >> 10
        ))
    }
}

fn image(number: u8) -> String {
    format!("bench{number}")
}

fn conf(ceph: &Ceph, wire: Wire) -> PathBuf {
    ceph.conf().with_file_name(format!("{wire:?}.conf"))
}

/// All contestants read the same: the user, the mode on the wire, no cache.
fn write_conf(ceph: &Ceph, wire: Wire) -> Result<()> {
    let mode = match wire {
        Wire::Crc => "crc",
        Wire::Secure => "secure",
    };
    let text = fs::read_to_string(ceph.conf())?;
    let text = format!("{text}[client]\nms client mode = {mode}\nrbd cache = false\n");
    Ok(fs::write(conf(ceph, wire), text)?)
}

/// Seconds of CPU that the OSDs have used.
fn osds(ceph: &Ceph) -> Result<f64> {
    let pids = ceph.osd_pids().into_iter();
    pids.map(|pid| Ok(Usage::of(pid)?.ran_s())).sum()
}

fn sample(bench: &Bench, ceph: &Ceph, cell: &Cell, who: Contestant, seed: u64) -> Result<Sample> {
    let conf = conf(ceph, cell.wire);
    let (warmup, runtime) = (bench.warmup(), bench.runtime());
    if who.program == Program::Fio {
        let images: Vec<String> = (0..cell.images as u8).map(image).collect();
        let mut command = who.command(bench)?;
        command.env("CEPH_CONF", conf);
        return fio_on_images(command, &images, &cell.workload, warmup, runtime, seed);
    }
    let sockets: Vec<PathBuf> = (0..cell.images)
        .map(|i| bench.dir.join(format!("ceph{i}.sock")))
        .collect();
    let server = Server::start(bench, who, &conf, &sockets)?;
    let job = Job {
        driven: sockets.len(),
        sockets,
        queues: 1,
        packed: false,
        client: Client::Ring,
        access: cell.workload,
        queue_size: lab::client::RING_QUEUE_SIZE,
        pace: None,
        schedule_seed: 0,
        latencies: false,
        warmup_s: warmup,
        runtime_s: runtime,
        cooldown_s: 0.0,
        idle_s: None,
        server_pid: server.0.id(),
        server_cpu: None,
        cpus: Vec::new(),
        mark: None,
        once: 0,
        seed,
    };
    let output = Command::new(&bench.programs.xtask)
        .args(["bench", "client", &serde_json::to_string(&job)?])
        .output()
        .context("starting the client")?;
    ensure!(
        output.status.success(),
        "{}; the server: {}",
        String::from_utf8_lossy(&output.stderr).trim(),
        fs::read_to_string(bench.dir.join("ceph-server.log"))
            .unwrap_or_default()
            .trim()
    );
    serde_json::from_slice(&output.stdout).context("reading the client's sample")
}

/// A server that is up, or about to be; ended when dropped.
struct Server(Child);

impl Server {
    fn start(bench: &Bench, who: Contestant, conf: &Path, sockets: &[PathBuf]) -> Result<Self> {
        for socket in sockets {
            let _ = fs::remove_file(socket);
        }
        let mut command = who.command(bench)?;
        if who.program == Program::Qsd {
            arguments_of_qsd(&mut command, conf, sockets);
        } else {
            let options = match who.changed {
                true => bench.args.ceph.rbd_option.iter(),
                false => [].iter(),
            };
            let options: String = options.map(|option| format!(":{option}")).collect();
            command
                .args(["serve", "--control"])
                .arg(bench.dir.join("ceph.qmp"))
                .args(&bench.programs.ringdisk_args);
            for (i, socket) in sockets.iter().enumerate() {
                command.arg(format!(
                    "file=rbd:{POOL}/{}{options},conf={},id=vm,cache=none,queues=1,queue-size=1024,socket={}",
                    image(i as u8),
                    conf.display(),
                    socket.display()
                ));
            }
        }
        let log = fs::File::create(bench.dir.join("ceph-server.log"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn();
        Ok(Self(child.with_context(|| format!("starting {who}"))?))
    }
}

fn arguments_of_qsd(command: &mut Command, conf: &Path, sockets: &[PathBuf]) {
    for (i, socket) in sockets.iter().enumerate() {
        command
            .arg("--object")
            .arg(format!("iothread,id=t{i}"))
            .arg("--blockdev")
            .arg(format!(
                "driver=rbd,pool={POOL},image={},conf={},user=vm,cache.direct=on,node-name=n{i}",
                image(i as u8),
                conf.display()
            ))
            .arg("--export")
            .arg(format!(
                "vhost-user-blk,id=e{i},node-name=n{i},addr.type=unix,addr.path={},iothread=t{i},num-queues=1,\
                 writable=on",
                socket.display()
            ));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let deadline = Instant::now() + Duration::from_secs(10);
        while let Ok(None) = self.0.try_wait() {
            if Instant::now() > deadline {
                let _ = self.0.kill();
                let _ = self.0.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn print(cell: &Cell, contestants: &[Contestant], records: &[Record]) {
    let mut first = format!("{cell}");
    for &who in contestants {
        let of = |value: &dyn Fn(&Record) -> f64| {
            let its = records.iter().filter(|r| r.who == who);
            Spread::of(its.map(value)).map_or(f64::NAN, |spread| spread.median)
        };
        println!(
            "{:<32}{who:<29}{:>9.0}{:>12.1}{:>9.0}{:>9.0}{:>9.1}{:>8.2}{:>8.2}{}",
            first,
            of(&|r| r.sample.iops),
            of(&|r| r.sample.cpu_us_per_io),
            of(&|r| r.sample.p50_us),
            of(&|r| r.sample.p99_us),
            of(&|r| r.sample.switches_per_io),
            of(&|r| r.sample.server_core),
            of(&|r| r.osd_cores),
            ratio(who, records)
        );
        first.clear();
    }
}

/// What ringdisk takes of the contestant's CPU time per I/O, where there is something to compare.
fn ratio(who: Contestant, records: &[Record]) -> String {
    if who == Contestant::OURS {
        return String::new();
    }
    let pairs = records.iter().filter(|r| r.who == who).filter_map(|other| {
        let ours = |r: &&Record| r.who == Contestant::OURS && r.round == other.round;
        let ours = records.iter().find(ours)?;
        Some(ours.sample.cpu_us_per_io / other.sample.cpu_us_per_io)
    });
    match Spread::of(pairs) {
        Some(ratio) => format!("   ringdisk takes {:.2} of it", ratio.median),
        None => String::new(),
    }
}
