//! `cargo xtask bench --backup`: what a guest notices of a backup, with ringdisk and with the copy-before-write filter of
//! qemu-storage-daemon (clusters of 64 KiB).
//!
//! A client over vhost-user is the guest. In each round, all situations of all servers take turns: no backup, an open one,
//! and one that `nbdcopy` reads at full speed with four connections. At full load, writes go once to each 4 KiB, so that each
//! of them meets old data. Both servers keep that in memory. A server has one core; the guest and `nbdcopy` share another.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use harness::cpu;
use harness::process::{Process, Stop};
use harness::spread::Spread;
use lab::client::pace::Pace;
use lab::client::{Job, RING_QUEUE_SIZE, Sample};
use lab::plan::words::{Arrival, Client};
use testkit::ceph::{Ceph, POOL};

use super::Bench;
use super::machine::{CLIENT_CPU, SERVER_CPU};
use super::nbd::new_disk;
use super::words::Workload;

/// How long a server may take to start.
const START: Duration = Duration::from_secs(20);

const SITUATIONS: [Situation; 3] = [Situation::None, Situation::Open, Situation::Read];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Server {
    Ringdisk,
    /// An earlier one.
    Baseline,
    Qsd,
}

/// Where the disk is.
enum Storage {
    File(PathBuf),
    /// An image in a cluster, which runs as long as this.
    Ceph(Box<Ceph>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Situation {
    /// No backup.
    None,
    /// A backup is open.
    Open,
    /// A backup is open, and is read.
    Read,
}

/// What the guest does.
struct Work {
    name: &'static str,
    write: bool,
    depth: usize,
    /// Requests per second; `None` is as many as it gets.
    per_second: Option<f64>,
}

const WORK: [Work; 3] = [
    Work {
        name: "4k writes, depth 32",
        write: true,
        depth: 32,
        per_second: None,
    },
    Work {
        name: "4k writes, 2,000 a second",
        write: true,
        depth: 32,
        per_second: Some(2000.0),
    },
    Work {
        name: "4k reads, depth 32",
        write: false,
        depth: 32,
        per_second: None,
    },
];

struct Measured {
    guest: Sample,
    /// What `nbdcopy` got, in bytes per second.
    reader: f64,
}

/// Measures everything, and prints a table.
pub fn run(bench: &Bench) -> Result<()> {
    let folder = bench.dir.join("backup");
    let storage = Storage::new(bench, &folder)?;
    let mut servers = vec![Server::Ringdisk, Server::Qsd];
    if bench.programs.baseline.is_some() {
        servers.insert(1, Server::Baseline);
    }
    println!(
        "{:28} {:20} {:8} {:>9} {:>9} {:>9}   beside no backup: IOPS, p99; nbdcopy",
        "random, medians", "server", "backup", "IOPS", "p50 us", "p99 us"
    );
    for work in &WORK {
        let mut results: Vec<_> = (servers.iter())
            .map(|_| SITUATIONS.map(|_| Vec::new()))
            .collect();
        for _ in 0..bench.rounds() {
            for (server, results) in servers.iter().zip(&mut results) {
                for (situation, results) in SITUATIONS.iter().zip(results) {
                    ensure!(!bench.interrupted(), "interrupted");
                    cpu::wait_for_quiet(Duration::from_secs_f64(bench.args.patience))?;
                    let files = Files::in_folder(&folder, &storage, bench)?;
                    results.push(server.measure(bench, &files, *situation, work)?);
                }
            }
        }
        for (server, results) in servers.iter().zip(&results) {
            server.print(work, results);
        }
    }
    fs::remove_dir_all(&folder).context("removing what was measured")
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    Spread::of(values).map_or(f64::NAN, |spread| spread.median)
}

impl Server {
    /// The ringdisk that it is, if it is one.
    fn program(self, bench: &Bench) -> Option<&Path> {
        match self {
            Self::Ringdisk => Some(&bench.programs.ringdisk),
            Self::Baseline => bench.programs.baseline.as_deref(),
            Self::Qsd => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Ringdisk => "ringdisk",
            Self::Baseline => "baseline",
            Self::Qsd => "qemu-storage-daemon",
        }
    }

    fn print(self, work: &Work, results: &[Vec<Measured>; 3]) {
        for (situation, all) in SITUATIONS.iter().zip(results) {
            let of = |figure: fn(&Measured) -> f64| median(all.iter().map(figure));
            let beside = |figure: fn(&Measured) -> f64| {
                let pairs = all.iter().zip(&results[0]);
                median(pairs.map(|(this, without)| figure(this) / figure(without)))
            };
            let iops: fn(&Measured) -> f64 = |it| it.guest.iops;
            let p99: fn(&Measured) -> f64 = |it| it.guest.p99_us;
            let ratios = match situation {
                Situation::None => String::new(),
                _ => format!("   x {:.2}, x {:.2}", beside(iops), beside(p99)),
            };
            let reader = match situation {
                Situation::Read => format!("; {:.0} MiB/s", of(|it| it.reader) / 1048576.0),
                _ => String::new(),
            };
            println!(
                "{:28} {:20} {:8} {:9.0} {:9.0} {:9.0}{ratios}{reader}",
                work.name,
                self.name(),
                situation.name(),
                of(iops),
                of(|it| it.guest.p50_us),
                of(p99)
            );
        }
    }

    fn measure(
        self,
        bench: &Bench,
        files: &Files,
        situation: Situation,
        work: &Work,
    ) -> Result<Measured> {
        let server = self.start(bench, files, situation)?;
        let job = job(bench, files, server.pid(), work);
        let mut client = Command::new(&bench.programs.lab);
        client
            .args(["lab", "client"])
            .arg(serde_json::to_string(&job)?)
            .stdin(Stdio::null());
        let stop = AtomicBool::new(false);
        let (output, reader) = thread::scope(|scope| {
            let reader = (situation == Situation::Read).then(|| {
                scope.spawn(|| {
                    read(
                        &files.uri(self),
                        &files.folder,
                        bench.args.size << 30,
                        &stop,
                    )
                })
            });
            let output = cpu::start_on(&[CLIENT_CPU], || client.output());
            stop.store(true, Ordering::Relaxed);
            let reader = reader.map_or(Ok(0.0), |it| it.join().expect("the reader panicked"));
            anyhow::Ok((output?.context("starting the client")?, reader?))
        })?;
        ensure!(
            output.status.success(),
            "the client failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let guest =
            serde_json::from_slice(&output.stdout).context("reading the client's sample")?;
        Ok(Measured { guest, reader })
    }

    fn start(self, bench: &Bench, files: &Files, situation: Situation) -> Result<Process> {
        let mut command = match self.program(bench) {
            Some(program) => ringdisk(program, files),
            None => qemu_storage_daemon(files, situation),
        };
        let log = files.folder.join("disk.log");
        let start = || Process::start(self.name(), &mut command, &log);
        let mut server = cpu::start_on(&[SERVER_CPU], start)??.with_grace(START);
        let is_ready = || {
            files.socket.exists()
                && match self {
                    Self::Ringdisk | Self::Baseline => files.control.exists(),
                    Self::Qsd => situation == Situation::None || files.nbd.exists(),
                }
        };
        server.wait_until(START, &Stop::default(), is_ready)?;
        if let Some(program) = self.program(bench)
            && situation != Situation::None
        {
            let mut begin = Command::new(program);
            begin
                .args(["backup", "begin", "disk", "--memory"])
                .arg(format!("{}G", bench.args.size + 1))
                .arg("--control")
                .arg(&files.control);
            let output = begin.output().context("starting ringdisk backup")?;
            let error = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{error}");
        }
        Ok(server)
    }
}

impl Storage {
    /// A new disk without holes.
    fn new(bench: &Bench, folder: &Path) -> Result<Self> {
        if !bench.args.ceph.ceph {
            return Ok(Self::File(new_disk(bench, folder)?));
        }
        crate::packages::ceph::ensure()?;
        let cluster = bench.dir.join("ceph");
        if cluster.exists() {
            fs::remove_dir_all(&cluster)
                .with_context(|| format!("removing {}", cluster.display()))?;
        }
        let file = new_disk(bench, folder)?;
        let ceph = Ceph::start(&cluster, testkit::ceph::Options::default())?;
        let (file, image) = (file.display().to_string(), format!("{POOL}/disk"));
        ceph.rbd(&["import", "--no-progress", &file, &image])?;
        fs::remove_file(file)?;
        Ok(Self::Ceph(Box::new(ceph)))
    }

    /// As `ringdisk serve` opens it.
    fn disk(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Ceph(ceph) => format!("rbd:{POOL}/disk{}", ceph.options()),
        }
    }

    /// As QEMU opens it.
    fn blockdev(&self) -> String {
        match self {
            Self::File(path) => format!(
                "driver=file,cache.direct=on,aio=io_uring,filename={}",
                path.display()
            ),
            Self::Ceph(ceph) => format!(
                "driver=rbd,pool={POOL},image=disk,user=vm,conf={}",
                ceph.conf().display()
            ),
        }
    }
}

impl Situation {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Open => "open",
            Self::Read => "read",
        }
    }
}

/// The files of one server.
struct Files {
    folder: PathBuf,
    /// The disk for ringdisk, and for QEMU.
    disk: String,
    blockdev: String,
    socket: PathBuf,
    nbd: PathBuf,
    control: PathBuf,
    /// Where qemu-storage-daemon keeps old data.
    fleece: tempfile::NamedTempFile,
}

impl Files {
    fn in_folder(folder: &Path, storage: &Storage, bench: &Bench) -> Result<Self> {
        let bytes = bench.args.size << 30;
        let fleece = tempfile::NamedTempFile::new_in("/dev/shm").context("memory for old data")?;
        fleece.as_file().set_len(bytes)?;
        let files = Self {
            folder: folder.into(),
            disk: storage.disk(),
            blockdev: storage.blockdev(),
            socket: folder.join("disk.sock"),
            nbd: folder.join("nbd.sock"),
            control: folder.join("control.qmp"),
            fleece,
        };
        for file in [&files.socket, &files.nbd, &files.control] {
            let _ = fs::remove_file(file);
        }
        Ok(files)
    }

    fn uri(&self, server: Server) -> String {
        let export = match server {
            Server::Ringdisk | Server::Baseline => "disk-backup",
            Server::Qsd => "snapshot",
        };
        format!("nbd+unix:///{export}?socket={}", self.nbd.display())
    }
}

fn ringdisk(program: &Path, files: &Files) -> Command {
    let mut command = Command::new(program);
    command
        .args(["serve", "--control"])
        .arg(&files.control)
        .arg("--nbd")
        .arg(&files.nbd)
        .arg(format!(
            "file={},name=disk,socket={}",
            files.disk,
            files.socket.display()
        ));
    command
}

fn qemu_storage_daemon(files: &Files, situation: Situation) -> Command {
    let mut command = Command::new("qemu-storage-daemon");
    command
        .args(["--object", "iothread,id=io0", "--blockdev"])
        .arg(format!("{},node-name=disk", files.blockdev));
    let node = if situation == Situation::None {
        "disk"
    } else {
        command
            .arg("--blockdev")
            .arg(format!(
                "driver=file,node-name=fleece,filename={}",
                files.fleece.path().display()
            ))
            .args([
                "--blockdev",
                "driver=copy-before-write,node-name=guest,file=disk,target=fleece",
                "--blockdev",
                "driver=snapshot-access,node-name=snapshot,file=guest",
                "--nbd-server",
            ])
            .arg(format!("addr.type=unix,addr.path={}", files.nbd.display()))
            .args([
                "--export",
                "type=nbd,id=n,node-name=snapshot,name=snapshot,iothread=io0",
            ]);
        "guest"
    };
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=v,node-name={node},addr.type=unix,addr.path={},writable=on,iothread=io0",
        files.socket.display()
    ));
    command
}

fn job(bench: &Bench, files: &Files, server_pid: u32, work: &Work) -> Job {
    Job {
        sockets: vec![files.socket.clone()],
        driven: 1,
        queues: 1,
        queue_size: RING_QUEUE_SIZE,
        packed: false,
        client: Client::Ring,
        access: Workload {
            write: work.write,
            sequential: false,
            block: 4 << 10,
            depth: work.depth,
        },
        pace: work.per_second.map(|per_second| Pace::Open {
            per_second,
            arrivals: Arrival::Poisson,
        }),
        schedule_seed: 0,
        warmup_s: bench.warmup(),
        runtime_s: bench.runtime(),
        cooldown_s: 0.0,
        idle_s: None,
        server_pid,
        server_cpu: Some(SERVER_CPU),
        cpus: vec![CLIENT_CPU],
        mark: None,
        once: if work.write && work.per_second.is_none() {
            4 << 10
        } else {
            0
        },
        seed: bench.args.seed,
        latencies: false,
    }
}

/// Reads a backup again and again with `nbdcopy`, until `stop`. Returns the bytes per second.
fn read(uri: &str, folder: &Path, bytes: u64, stop: &AtomicBool) -> Result<f64> {
    let log = folder.join("nbdcopy.log");
    let (began, mut done) = (Instant::now(), 0.0);
    while !stop.load(Ordering::Relaxed) {
        let mut command = Command::new("nbdcopy");
        command.args(["--connections=4", "--progress=1", uri, "null:"]);
        let start = || Process::start("nbdcopy", &mut command, &log);
        let mut reader = cpu::start_on(&[CLIENT_CPU], start)??;
        let status = loop {
            match reader.ended()? {
                None if stop.load(Ordering::Relaxed) => break None,
                None => thread::sleep(Duration::from_millis(5)),
                ended => break ended,
            }
        };
        let text = harness::process::tail(&log, 2);
        if let Some(status) = status {
            ensure!(status.success(), "nbdcopy failed: {text}");
        }
        // Lines such as 17/100.
        let percent = text.lines().filter_map(|line| line.strip_suffix("/100"));
        let percent = percent.filter_map(|it| it.parse::<f64>().ok()).next_back();
        done += bytes as f64 * percent.unwrap_or(0.0) / 100.0;
    }
    Ok(done / began.elapsed().as_secs_f64())
}
