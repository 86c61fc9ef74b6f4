//! `cargo xtask bench --nbd`: exports of the same raw file by ringdisk, qemu-nbd and qemu-storage-daemon, which fio reads and
//! writes as an NBD client.
//!
//! Each sample has a server of its own on one core, and fio on another. What counts as the server's CPU time is all that its
//! process used while fio ran. For reads of 64k, there is a bound beside it: what the copies of the data alone cost.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use harness::cpu::{self, Usage};
use harness::process::{Process, Stop};
use harness::random::Rng;
use harness::spread::Spread;
use rustix::time::{ClockId, clock_gettime};

use super::Bench;
use super::machine::{CLIENT_CPU, SERVER_CPU};

/// Name of the export.
const EXPORT: &str = "disk";
/// How long a server may take to start.
const START: Duration = Duration::from_secs(20);

const RIVALS: [Rival; 3] = [Rival::Ringdisk, Rival::QemuNbd, Rival::Qsd];

/// What is measured: fio's access, block size, depth and number of connections.
const CELLS: [Cell; 6] = [
    Cell::new("read", "64k", 16, 1),
    Cell::new("read", "64k", 16, 4),
    Cell::new("randread", "4k", 32, 1),
    Cell::new("randread", "4k", 32, 4),
    Cell::new("randwrite", "4k", 32, 1),
    Cell::new("randwrite", "4k", 32, 4),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rival {
    Ringdisk,
    QemuNbd,
    Qsd,
}

struct Cell {
    rw: &'static str,
    block: &'static str,
    depth: u32,
    connections: u32,
}

impl Cell {
    const fn new(rw: &'static str, block: &'static str, depth: u32, connections: u32) -> Self {
        Self {
            rw,
            block,
            depth,
            connections,
        }
    }
}

#[derive(Clone, Copy)]
struct Sample {
    iops: f64,
    /// CPU time of the server for each request.
    cpu_us: f64,
}

/// Measures all cells, and prints a table.
pub fn run(bench: &Bench) -> Result<()> {
    let folder = bench.dir.join("nbd");
    let disk = new_disk(bench, &folder)?;
    println!(
        "{:32} {:20} {:>9} {:>9}   ringdisk: IOPS, CPU per request",
        "", "server", "IOPS", "CPU us"
    );
    for cell in &CELLS {
        let mut samples = RIVALS.map(|_| Vec::new());
        let mut copies = Vec::new();
        for _ in 0..bench.rounds() {
            if cell.rw == "read" {
                copies.push(copies_alone(&disk)?);
            }
            for (rival, samples) in RIVALS.iter().zip(&mut samples) {
                ensure!(!bench.interrupted(), "interrupted");
                cpu::wait_for_quiet(Duration::from_secs_f64(bench.args.patience))?;
                samples.push(rival.measure(bench, &folder, &disk, cell)?);
            }
        }
        print(cell, &samples);
        if let Some(copies) = Spread::of(copies) {
            println!(
                "{:53} {:>9} {:9.1}",
                "  its two copies alone", "", copies.median
            );
        }
    }
    fs::remove_dir_all(&folder).context("removing what was measured")
}

fn print(cell: &Cell, samples: &[Vec<Sample>]) {
    let median = |samples: &[Sample], of: fn(&Sample) -> f64| {
        Spread::of(samples.iter().map(of)).map_or(f64::NAN, |spread| spread.median)
    };
    let medians: Vec<_> = samples
        .iter()
        .map(|samples| (median(samples, |s| s.iops), median(samples, |s| s.cpu_us)))
        .collect();
    for (rival, (iops, cpu_us)) in RIVALS.iter().zip(&medians) {
        let Cell {
            rw,
            block,
            depth,
            connections,
        } = cell;
        let what = format!("{rw} {block}, depth {depth}, {connections} connections");
        let beside = match rival {
            Rival::Ringdisk => String::new(),
            _ => format!(
                "   x {:.2}, x {:.2}",
                medians[0].0 / iops,
                medians[0].1 / cpu_us
            ),
        };
        println!(
            "{what:32} {:20} {iops:9.0} {cpu_us:9.1}{beside}",
            rival.name()
        );
    }
}

impl Rival {
    fn name(self) -> &'static str {
        match self {
            Self::Ringdisk => "ringdisk",
            Self::QemuNbd => "qemu-nbd",
            Self::Qsd => "qemu-storage-daemon",
        }
    }

    fn measure(self, bench: &Bench, folder: &Path, disk: &Path, cell: &Cell) -> Result<Sample> {
        let socket = folder.join("nbd.sock");
        let _ = fs::remove_file(&socket);
        let server = self.start(bench, folder, disk, &socket)?;
        let uri = format!("nbd+unix:///{EXPORT}?socket={}", socket.display());
        let seconds = bench.runtime();
        let mut fio = Command::new("fio");
        fio.args([
            "--name=nbd",
            "--ioengine=nbd",
            "--thread",
            "--group_reporting",
            "--output-format=json",
            "--time_based",
            "--norandommap",
        ]);
        fio.arg(format!("--uri={uri}"))
            .arg(format!("--size={}g", bench.args.size))
            .arg(format!("--runtime={seconds}"))
            .arg(format!("--rw={}", cell.rw))
            .arg(format!("--bs={}", cell.block))
            .arg(format!("--iodepth={}", cell.depth))
            .arg(format!("--numjobs={}", cell.connections));
        let before = Usage::of(server.pid())?;
        let output = cpu::start_on(&[CLIENT_CPU], || fio.output())?
            .context("starting fio; is it installed?")?;
        let used = Usage::of(server.pid())?.since(&before);
        let text = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            bail!(
                "fio failed: {}{text}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        let json = text.find('{').map_or("", |at| &text[at..]);
        let json: serde_json::Value = serde_json::from_str(json).context("fio's output")?;
        let direction = if cell.rw.contains("read") {
            "read"
        } else {
            "write"
        };
        let job = &json["jobs"][0][direction];
        let number = |key: &str| {
            job[key]
                .as_f64()
                .with_context(|| format!("fio gives no {key}"))
        };
        Ok(Sample {
            iops: number("iops")?,
            cpu_us: 1e6 * used.ran_s() / number("total_ios")?.max(1.0),
        })
    }

    fn start(self, bench: &Bench, folder: &Path, disk: &Path, socket: &Path) -> Result<Process> {
        let (file, path) = (disk.display(), socket.display());
        let mut command = Command::new(match self {
            Self::Ringdisk => bench.programs.ringdisk.clone(),
            Self::QemuNbd | Self::Qsd => PathBuf::from(self.name()),
        });
        let control = folder.join("control.qmp");
        match self {
            Self::Ringdisk => {
                let _ = fs::remove_file(&control);
                let disk_socket = folder.join("disk.sock");
                command
                    .args(["serve", "--control"])
                    .arg(&control)
                    .arg("--nbd")
                    .arg(socket)
                    .arg(format!(
                        "file={file},name={EXPORT},socket={}",
                        disk_socket.display()
                    ));
            }
            Self::QemuNbd => {
                command
                    .args([
                        "-f",
                        "raw",
                        "-t",
                        "-e",
                        "16",
                        "--cache=none",
                        "--aio=io_uring",
                    ])
                    .args(["-x", EXPORT, "-k"])
                    .args([socket, disk]);
            }
            Self::Qsd => {
                command
                    .args(["--object", "iothread,id=io0", "--blockdev"])
                    .arg(format!("driver=file,filename={file},node-name={EXPORT},cache.direct=on,aio=io_uring"))
                    .args(["--nbd-server", &format!("addr.type=unix,addr.path={path}")])
                    .args(["--export", &format!("type=nbd,id=e,node-name={EXPORT},name={EXPORT},writable=on,iothread=io0")]);
            }
        }
        let log = folder.join("server.log");
        let start = || Process::start(self.name(), &mut command, &log);
        let mut server = cpu::start_on(&[SERVER_CPU], start)??.with_grace(START);
        let is_ready = || socket.exists() && (self != Self::Ringdisk || control.exists());
        server.wait_until(START, &Stop::default(), is_ready)?;
        if self == Self::Ringdisk {
            let mut export = Command::new(&bench.programs.ringdisk);
            export
                .args(["export", EXPORT, "--writable", "--control"])
                .arg(&control);
            let output = export.output().context("starting ringdisk export")?;
            ensure!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(server)
    }
}

/// Microseconds of CPU time to read 64k of a file from the page cache into a buffer, and write them to a socket that another
/// core reads: what is left of a request if nothing but its data must be copied.
fn copies_alone(disk: &Path) -> Result<f64> {
    const BLOCK: usize = 64 << 10;
    const TIME: Duration = Duration::from_millis(500);
    let file = File::open(disk).with_context(|| format!("opening {}", disk.display()))?;
    let bytes = file.metadata()?.len();
    let (mut to, mut from) = UnixStream::pair()?;
    thread::scope(|scope| {
        let client = scope.spawn(move || {
            cpu::pin_thread(&[CLIENT_CPU])?;
            let mut buffer = vec![0; BLOCK];
            while from.read(&mut buffer)? > 0 {}
            anyhow::Ok(())
        });
        let server = scope.spawn(move || {
            cpu::pin_thread(&[SERVER_CPU])?;
            let used = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime));
            let mut buffer = vec![0; BLOCK];
            let (mut at, mut blocks) = (0, 0_u32);
            let (before, began) = (used()?, Instant::now());
            while began.elapsed() < TIME {
                file.read_exact_at(&mut buffer, at)?;
                to.write_all(&buffer)?;
                at = (at + BLOCK as u64) % (bytes - BLOCK as u64);
                blocks += 1;
            }
            Ok(1e6 * (used()? - before).as_secs_f64() / f64::from(blocks))
        });
        let cost = server.join().expect("the thread panicked");
        client.join().expect("the thread panicked")?;
        cost
    })
}

/// Makes the disk that is measured, in a new folder: random bytes, so that nothing in it is a hole.
pub(super) fn new_disk(bench: &Bench, folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("removing {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let path = folder.join("disk.raw");
    eprintln!("filling {} GiB ...", bench.args.size);
    let mut file = File::create(&path).with_context(|| format!("making {}", path.display()))?;
    let mut random = Rng::new(1);
    let mut buffer = vec![0; 4 << 20];
    for _ in 0..(bench.args.size << 30) / buffer.len() as u64 {
        for word in buffer.chunks_exact_mut(8) {
            word.copy_from_slice(&random.bits().to_le_bytes());
        }
        file.write_all(&buffer)?;
    }
    file.sync_all().context("writing the file")?;
    Ok(path)
}
