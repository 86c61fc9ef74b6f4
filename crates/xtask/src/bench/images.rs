//! What qcow2 costs: `--qcow2`. ringdisk with a raw file, ringdisk with an image and qemu-storage-daemon with the same
//! image take turns, past the page cache, on the file system that the bench's directory is on.
//!
//! Images that a sample fills are made anew before it, and so is the file of the raw disk beside them, which is sparse.
//! There, each 64 KiB of the disk (or each cluster, if clusters are larger) is written at most once, so that every write
//! finds nothing; a sample ends when there is none left.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use harness::random::mix;
use serde::{Deserialize, Serialize};
use testkit::server::Server as Process;

use super::backing::Prepared;
use super::neighbours::{Serving, finish, start, verdict};
use super::plan::{Backing, Client, Limit, Workload};
use super::report::{Report, short};
use super::server::{CLIENT_CPU, Programs, SERVER_CPU};
use harness::cpu;
use harness::spread::Spread;
use lab::client::{Job, Sample};

const DEPTH: usize = 32;

/// Seconds of writes before a sample that fills its image: what it fills by then is not measured.
const WARMUP_ONCE_S: f64 = 0.2;

/// What is done to the disk.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// 4k random reads of an image that has all its clusters.
    Read,
    /// The same with writes.
    Write,
    /// 4k random reads that fall through two backing files to a third, which has all its clusters.
    Through,
    /// 4k random writes to a new image without a backing file.
    First,
    /// 4k random writes to a new image over one that has all its clusters.
    Copy,
    /// 1 MiB sequential writes to a new image without a backing file.
    Fill,
}

/// On what, and by how many.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Clusters of 64 KiB; one queue on one thread.
    Plain,
    /// Two queues, of ringdisk on two threads. Servers and clients share both cores.
    Queues,
    /// Clusters of 128 KiB with subclusters; one queue on one thread.
    Extended,
}

/// Who serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contestant {
    Raw,
    Qcow2,
    Qsd,
    /// Another ringdisk, with the image.
    Baseline,
}

/// Those that always take part.
const CONTESTANTS: [Contestant; 3] = [Contestant::Raw, Contestant::Qcow2, Contestant::Qsd];

/// One sample.
#[derive(Serialize, Deserialize)]
pub struct Imaged {
    pub work: Work,
    pub kind: Kind,
    pub contestant: Contestant,
    pub round: usize,
    #[serde(flatten)]
    pub sample: Sample,
}

/// What is promised of a row: of which figure over whose.
struct Promise {
    cpu: bool,
    over: Contestant,
    limit: Limit,
}

const fn promise(cpu: bool, over: Contestant, limit: Limit) -> Promise {
    Promise { cpu, over, limit }
}

impl Work {
    fn promises(self) -> &'static [Promise] {
        use Contestant::{Qsd, Raw};
        use Limit::{AtLeast, AtMost};
        const ALLOCATED: [Promise; 3] = [
            promise(false, Raw, AtLeast(0.97)),
            promise(true, Raw, AtMost(1.10)),
            promise(true, Qsd, AtMost(0.5)),
        ];
        const THROUGH: [Promise; 1] = [promise(false, Raw, AtLeast(0.90))];
        const FIRST: [Promise; 1] = [promise(false, Qsd, AtLeast(1.5))];
        const COPY: [Promise; 1] = [promise(false, Qsd, AtLeast(1.3))];
        match self {
            Work::Read | Work::Write => &ALLOCATED,
            Work::Through | Work::Fill => &THROUGH,
            Work::First => &FIRST,
            Work::Copy => &COPY,
        }
    }

    /// Whether images are made anew for it.
    fn fills(self) -> bool {
        matches!(self, Work::First | Work::Copy | Work::Fill)
    }

    fn workload(self) -> Workload {
        Workload {
            write: self != Work::Read && self != Work::Through,
            sequential: self == Work::Fill,
            block: if self == Work::Fill { 1 << 20 } else { 4 << 10 },
            depth: DEPTH,
        }
    }
}

impl Kind {
    fn options(self) -> &'static str {
        match self {
            Kind::Plain | Kind::Queues => "cluster_size=64k",
            Kind::Extended => "cluster_size=128k,extended_l2=on",
        }
    }

    fn cluster(self) -> u64 {
        match self {
            Kind::Plain | Kind::Queues => 64 << 10,
            Kind::Extended => 128 << 10,
        }
    }

    fn queues(self) -> u16 {
        match self {
            Kind::Plain | Kind::Extended => 1,
            Kind::Queues => 2,
        }
    }
}

/// What is measured, where.
pub struct Plan<'a> {
    pub programs: &'a Programs,
    pub dir: PathBuf,
    pub bytes: u64,
    pub rounds: usize,
    pub warmup_s: f64,
    pub runtime_s: f64,
    pub patience_s: f64,
    /// All if empty.
    pub works: Vec<Work>,
    /// All if empty.
    pub kinds: Vec<Kind>,
}

/// The images from the top down, and the raw disk.
struct Disks {
    images: Vec<PathBuf>,
    raw: PathBuf,
}

/// Measures the rows one after the other, the contestants of each in turn; all goes into `report`.
pub fn measure(plan: &Plan, interrupted: &AtomicBool, report: &mut Report) -> anyhow::Result<()> {
    use clap::ValueEnum;
    let all = |kinds: &[Kind]| match kinds {
        [] => Kind::value_variants().to_vec(),
        named => named.to_vec(),
    };
    let works = match &plan.works[..] {
        [] => Work::value_variants(),
        named => named,
    };
    fs::create_dir_all(&plan.dir).with_context(|| format!("creating {}", plan.dir.display()))?;
    let written = Prepared::new(Backing::Disk, &plan.dir, plan.bytes)?;
    let written = written.path().context("a disk in a file")?.to_owned();
    for kind in all(&plan.kinds) {
        let full = plan.full(kind, &written)?;
        for work in works {
            for round in 0..plan.rounds {
                let mut turns = CONTESTANTS.to_vec();
                if plan.programs.baseline.is_some() {
                    turns.push(Contestant::Baseline);
                }
                turns
                    .sort_by_key(|&it| mix((round as u64) << 32 | (it as u64) << 8 | *work as u64));
                eprintln!("{work} {kind}, round {} of {} ...", round + 1, plan.rounds);
                for contestant in turns {
                    if interrupted.load(Ordering::Relaxed) {
                        report.skipped.push("the rest: interrupted".into());
                        return Ok(());
                    }
                    let disks = plan.prepare(*work, kind, &written, &full)?;
                    cpu::wait_for_quiet(Duration::from_secs_f64(plan.patience_s))?;
                    let sample = plan
                        .sample(*work, kind, contestant, &disks, round)
                        .with_context(|| format!("{work} {kind}: {contestant}"))?;
                    report.images.push(Imaged {
                        work: *work,
                        kind,
                        contestant,
                        round,
                        sample,
                    });
                }
            }
        }
    }
    for name in ["new.qcow2", "middle.qcow2", "new.raw"] {
        let _ = fs::remove_file(plan.dir.join(name));
    }
    Ok(())
}

impl Plan<'_> {
    /// An image that has all its clusters, with the same content as the raw file.
    fn full(&self, kind: Kind, written: &Path) -> anyhow::Result<PathBuf> {
        let (clusters, mib) = (kind.cluster() >> 10, self.bytes >> 20);
        let path = self.dir.join(format!("full-{clusters}k-{mib}M.qcow2"));
        if !path.exists() {
            eprintln!("writing {} ...", path.display());
            let unfinished = path.with_extension("unfinished");
            qemu_img(&self.dir, |command| {
                command.args(["convert", "-t", "none", "-f", "raw", "-O", "qcow2", "-o"]);
                command.arg(kind.options()).arg(written).arg(&unfinished);
            })?;
            fs::rename(&unfinished, &path)?;
        }
        // Some storage is slow to read for the first time what was just written; that is not the server's.
        io::copy(&mut fs::File::open(&path)?, &mut io::sink())?;
        Ok(path)
    }

    fn create(&self, kind: Kind, name: &str, backing: Option<&Path>) -> anyhow::Result<PathBuf> {
        let path = self.dir.join(name);
        let _ = fs::remove_file(&path);
        qemu_img(&self.dir, |command| {
            command.args(["create", "-q", "-f", "qcow2", "-o", kind.options()]);
            if let Some(backing) = backing {
                command.arg("-b").arg(backing).args(["-F", "qcow2"]);
            }
            command.arg(&path).arg(self.bytes.to_string());
        })?;
        Ok(path)
    }

    fn prepare(
        &self,
        work: Work,
        kind: Kind,
        written: &Path,
        full: &Path,
    ) -> anyhow::Result<Disks> {
        let mut raw = written.to_owned();
        if matches!(work, Work::First | Work::Fill) {
            raw = self.dir.join("new.raw");
            let _ = fs::remove_file(&raw);
            fs::File::create(&raw)?.set_len(self.bytes)?;
        }
        let images = match work {
            Work::Read | Work::Write => vec![full.to_owned()],
            Work::First | Work::Fill => vec![self.create(kind, "new.qcow2", None)?],
            Work::Copy => vec![self.create(kind, "new.qcow2", Some(full))?, full.to_owned()],
            Work::Through => {
                let middle = self.create(kind, "middle.qcow2", Some(full))?;
                let top = self.create(kind, "new.qcow2", Some(&middle))?;
                vec![top, middle, full.to_owned()]
            }
        };
        // What the one before left to the file system is not this one's to wait for.
        for path in images.iter().chain([&raw]) {
            let file = fs::File::open(path)?;
            file.sync_all()?;
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        }
        Ok(Disks { images, raw })
    }

    fn sample(
        &self,
        work: Work,
        kind: Kind,
        contestant: Contestant,
        disks: &Disks,
        round: usize,
    ) -> anyhow::Result<Sample> {
        let both = [SERVER_CPU, CLIENT_CPU];
        let (server_cpus, client_cpus) = match kind {
            Kind::Queues => (&both[..], &both[..]),
            Kind::Plain | Kind::Extended => (&both[..1], &both[1..]),
        };
        let ours = |binary: &Path, path: &Path, format: &str| {
            let serving = Serving {
                name: "image",
                queues: kind.queues(),
                iothreads: kind.queues().into(),
                cpus: server_cpus,
            };
            let path = path.display().to_string().replace(',', ",,");
            let file = format!("file={path},format={format},cache=none,queue-size=1024");
            serving.start(binary, self.programs, &self.dir, &[file])
        };
        let Programs {
            ringdisk, baseline, ..
        } = self.programs;
        let baseline = baseline.as_ref().unwrap_or(ringdisk);
        let server = match contestant {
            Contestant::Raw => ours(ringdisk, &disks.raw, "raw")?,
            Contestant::Qcow2 => ours(ringdisk, &disks.images[0], "qcow2")?,
            Contestant::Baseline => ours(baseline, &disks.images[0], "qcow2")?,
            Contestant::Qsd => self.qsd(kind, server_cpus, &disks.images)?,
        };
        let job = Job {
            sockets: server.sockets.clone(),
            driven: 1,
            queues: kind.queues(),
            packed: false,
            client: Client::Ring,
            access: work.workload(),
            queue_size: lab::client::RING_QUEUE_SIZE,
            pace: None,
            schedule_seed: 0,
            latencies: false,
            warmup_s: match work.fills() {
                true => WARMUP_ONCE_S,
                false => self.warmup_s,
            },
            runtime_s: self.runtime_s,
            cooldown_s: 0.0,
            idle_s: None,
            server_pid: server.pid(),
            server_cpu: (kind != Kind::Queues).then_some(SERVER_CPU),
            cpus: client_cpus.to_vec(),
            mark: None,
            once: match work.fills() {
                true => kind.cluster().max(work.workload().block as u64),
                false => 0,
            },
            seed: round as u64 + 1,
        };
        finish(start(self.programs, &job)?)
    }

    /// All images are opened alike; a backing file that is not named here would get other options.
    fn qsd(&self, kind: Kind, cpus: &[usize], images: &[PathBuf]) -> anyhow::Result<Process> {
        let mut node = String::new();
        for (depth, path) in images.iter().enumerate() {
            let at = "backing.".repeat(depth);
            let path = path.display().to_string().replace(',', ",,");
            let comma = if depth > 0 { "," } else { "" };
            write!(
                node,
                "{comma}{at}driver=qcow2,{at}cache.direct=on,{at}file.driver=file,{at}file.filename={path},\
                 {at}file.cache.direct=on,{at}file.aio=io_uring"
            )?;
        }
        let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
        let mut command = Command::new("taskset");
        command.args(["-c", &cpus.join(","), "qemu-storage-daemon"]);
        let socket = self.dir.join("qsd-image.sock");
        let _ = fs::remove_file(&socket);
        Process::qemu_command(&mut command, &node, &socket, kind.queues())
            .context("starting qemu-storage-daemon")
    }
}

fn qemu_img(dir: &Path, arguments: impl FnOnce(&mut Command)) -> anyhow::Result<()> {
    let mut command = Command::new("qemu-img");
    arguments(command.current_dir(dir));
    let output = command
        .output()
        .context("starting qemu-img; is it installed?")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("qemu-img: {}", text.trim());
    }
    Ok(())
}

/// The samples as text, with what they say of the promises.
pub fn write(out: &mut String, samples: &[Imaged]) -> fmt::Result {
    if samples.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\nqcow2, O_DIRECT, depth {DEPTH} of each queue; ringdisk raw (first writes and filling: a new sparse file), \
         ringdisk qcow2, qemu-storage-daemon qcow2"
    )?;
    writeln!(
        out,
        "{:38} | {:^26} | {:^26} | {:^31} | {:^31}",
        "", "kIOPS", "server CPU us/IO", "qcow2 / raw", "qcow2 / qsd"
    )?;
    write!(out, "{:38}", "")?;
    for _ in 0..2 {
        write!(out, " | {:>8} {:>8} {:>8}", "raw", "qcow2", "qsd")?;
    }
    for _ in 0..2 {
        write!(out, " | {:15} {:15}", "IOPS", "CPU per IO")?;
    }
    writeln!(out)?;
    let mut rows: BTreeMap<_, Vec<&Imaged>> = BTreeMap::new();
    for it in samples {
        rows.entry((it.kind, it.work)).or_default().push(it);
    }
    let mut verdicts = String::new();
    for ((kind, work), row) in &rows {
        let name = format!("{work}, {kind}");
        write!(out, "{name:38}")?;
        for metric in [iops as Metric, cpu_us] {
            write!(out, " |")?;
            for contestant in CONTESTANTS {
                let of = row.iter().filter(|it| it.contestant == contestant);
                let median = Spread::of(of.map(|it| metric(&it.sample)));
                let text = median.map_or("-".into(), |s| short(s.median));
                write!(out, " {text:>8}")?;
            }
        }
        for over in [Contestant::Raw, Contestant::Qsd] {
            write!(out, " |")?;
            for metric in [iops as Metric, cpu_us] {
                let text = ratio(row, over, metric).map_or("-".into(), |s| {
                    format!("{:.2} [{:.2}..{:.2}]", s.median, s.min, s.max)
                });
                write!(out, " {text:15}")?;
            }
        }
        writeln!(out)?;
        for Promise { cpu, over, limit } in work.promises() {
            let metric = if *cpu { cpu_us as Metric } else { iops };
            let Some(spread) = ratio(row, *over, metric) else {
                continue;
            };
            let what = if *cpu { "CPU per I/O" } else { "IOPS" };
            let wanted = match limit {
                Limit::AtLeast(limit) => format!("at least {limit}"),
                Limit::AtMost(limit) => format!("at most {limit}"),
            };
            writeln!(
                verdicts,
                "{}{name}: {what} / {over}'s {:.2}, wanted {wanted}",
                verdict(limit.holds(spread.median)),
                spread.median
            )?;
        }
        let beside = |metric| ratio(row, Contestant::Baseline, metric);
        if let (Some(iops), Some(cpu)) = (beside(iops), beside(cpu_us)) {
            writeln!(
                verdicts,
                "{name}: over the baseline's, IOPS {:.3} [{:.2}..{:.2}], CPU per I/O {:.3} [{:.2}..{:.2}]",
                iops.median, iops.min, iops.max, cpu.median, cpu.min, cpu.max
            )?;
        }
    }
    writeln!(out, "{}", verdicts.trim_end())
}

type Metric = fn(&Sample) -> f64;

fn iops(sample: &Sample) -> f64 {
    sample.iops / 1e3
}

fn cpu_us(sample: &Sample) -> f64 {
    sample.cpu_us_per_io
}

/// ringdisk's qcow2 over another, round by round.
fn ratio(row: &[&Imaged], over: Contestant, metric: Metric) -> Option<Spread> {
    let of = |contestant| row.iter().filter(move |it| it.contestant == contestant);
    let pairs = of(Contestant::Qcow2).filter_map(|ours| {
        let theirs = of(over).find(|it| it.round == ours.round)?;
        // A fast one may have filled its disk before the window.
        let ratio = metric(&ours.sample) / metric(&theirs.sample);
        ratio.is_finite().then_some(ratio)
    });
    Spread::of(pairs)
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Work::Read => "4k reads",
            Work::Write => "4k writes",
            Work::Through => "4k reads through 2",
            Work::First => "4k first writes",
            Work::Copy => "4k copy-on-write",
            Work::Fill => "1M filling",
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Kind::Plain => "64k clusters",
            Kind::Queues => "64k, 2 queues",
            Kind::Extended => "128k extended",
        })
    }
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Contestant::Raw => "raw",
            Contestant::Qcow2 => "qcow2",
            Contestant::Qsd => "qsd",
            Contestant::Baseline => "baseline",
        })
    }
}
