//! The journal of a result: one line of JSON for each boot, cell and so on, written when it is done. A run that was killed
//! continues from it, and all reports are made from it.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use harness::histogram::Histogram;
use harness::text::printable;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::client::footprint::Footprint;
use crate::host::Facts;
use crate::plan::{Filter, Plan, RATES_MAX};
use crate::profile::Profile;
use crate::storage::named::Log;
use crate::storage::{Fill, OwnDisk, Polling};
use crate::window::Point;

/// The journal's name in a result's folder.
pub const JOURNAL: &str = "journal.jsonl";
/// The format of the lines.
const VERSION: u32 = 1;
/// The maximum number of points in a sample's series.
const SERIES_MAX: usize = 100_000;
/// How the first line starts.
const FIRST: &[u8] = b"{\"what\":\"plan\"";
/// The largest journal that is read: hundreds of thousands of cells.
const BYTES_MAX: u64 = 4 << 30;

/// A line of the journal.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "what")]
pub enum Record {
    /// The first line.
    Plan(Header),
    /// A configuration came up.
    Boot(BootRecord),
    /// A load ran.
    Cell(Cell),
    /// fio ran on the host's own disk.
    Ceiling(Ceiling),
    /// The rates of an open loop were found.
    Rates(Rates),
    /// A disk was filled.
    Fill(Fill),
    /// A disk that the plan names is about to be created.
    Created(OwnDisk),
    /// Such a disk was removed, or could not be created.
    Removed(OwnDisk),
}

impl Record {
    /// Whether its figures are possible. Code that reads them relies on it.
    fn is_sound(&self) -> bool {
        let is_possible = |value: f64| (0.0..1e15).contains(&value);
        match self {
            Record::Plan(_) | Record::Created(_) | Record::Removed(_) => true,
            Record::Boot(boot) => is_possible(boot.boot_s),
            Record::Cell(cell) => {
                is_possible(cell.took_s) && cell.sample.as_ref().is_none_or(Sample::is_sound)
            }
            Record::Fill(fill) => is_possible(fill.took_s),
            Record::Ceiling(ceiling) => is_possible(ceiling.iops) && is_possible(ceiling.mean_ns),
            Record::Rates(found) => {
                let rate = |rate: &u32| (1..=100_000_000).contains(rate);
                is_possible(found.took_s)
                    && found.rates.len() <= RATES_MAX
                    && found.rates.is_sorted_by(|a, b| a < b)
                    && found.rates.iter().all(rate)
            }
        }
    }
}

/// The first line: the plan and the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Header {
    /// Format of the journal.
    pub version: u32,
    /// The plan's file name, for messages.
    pub file: String,
    /// The plan's text.
    pub plan: String,
    /// The job files that it names, with their texts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub jobs: BTreeMap<String, String>,
    /// The seed for the order of the runs.
    pub seed: u64,
    /// When the run was started, in milliseconds since 1970.
    pub started_ms: u64,
    /// The host, and the versions of all programs.
    pub facts: Facts,
    /// The filters that selected a part of the plan.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub only: Vec<Filter>,
    /// Cases that this host cannot run, with the reasons.
    pub left_out: BTreeMap<String, String>,
}

/// A configuration that came up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BootRecord {
    /// Which block, from 0.
    pub block: u32,
    /// The configuration, or its twin's.
    pub case: String,
    /// Whether this is the twin of the first configuration.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub twin: bool,
    /// The effective settings that QEMU and the guest report.
    pub effective: BTreeMap<String, String>,
    /// Seconds until the guest was up.
    pub boot_s: f64,
}

/// One sample: one load in one boot.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Cell {
    /// Which block, from 0.
    pub block: u32,
    /// The configuration, or its twin's.
    pub case: String,
    /// Whether this is the twin of the first configuration.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub twin: bool,
    /// The load.
    pub workload: String,
    /// When it ended, in milliseconds since 1970.
    pub at_ms: u64,
    /// Seconds that it took, including its share of the boot.
    pub took_s: f64,
    /// Why there is no sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Reasons to doubt the sample.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<String>,
    /// The figures, unless the cell failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<Sample>,
}

/// The figures of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Requests per second, of all guests and volumes.
    pub iops: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Mean latency in nanoseconds.
    pub mean_ns: f64,
    /// Latencies of all requests.
    pub latencies: Histogram,
    /// The same over time.
    pub series: Vec<Point>,
    /// Seconds that all jobs ran together.
    pub window_s: f64,
    /// CPU time of QEMU and the servers, in microseconds per request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_us: Option<f64>,
    /// Their context switches per request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switches: Option<f64>,
    /// KVM's exits per request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exits: Option<f64>,
    /// CPU time per second of the client, if it drove the server without a guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_cpu: Option<f64>,
    /// Requests of a rate that were due but could not be sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsent: Option<u64>,
    /// The server of disks without I/O.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<Box<Idle>>,
    /// How ringdisk's I/O threads waited, including the time before the window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub polling: Option<Polling>,
    /// Where the time went, if the run was profiled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Box<Profile>>,
}

/// A server whose disks are connected and have no I/O.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Idle {
    /// CPU time of the server per second.
    pub core: f64,
    /// Seconds from its start until it listened on all sockets.
    pub ready_s: f64,
    /// Its memory and descriptors.
    #[serde(flatten)]
    pub footprint: Footprint,
}

impl Sample {
    fn is_sound(&self) -> bool {
        let is_possible = |value: f64| (0.0..1e15).contains(&value);
        let own = [self.iops, self.bytes_per_s, self.mean_ns, self.window_s];
        let costs = [self.cpu_us, self.switches, self.exits, self.client_cpu];
        let of_idle = self.idle.iter();
        let of_idle = of_idle.flat_map(|it| [it.core, it.ready_s, it.footprint.private_kib]);
        own.into_iter().chain(of_idle).all(is_possible)
            && costs.into_iter().flatten().all(is_possible)
            && self.series.len() <= SERIES_MAX
            && self
                .profile
                .as_ref()
                .is_none_or(|profile| profile.is_sound())
            && self
                .series
                .iter()
                .all(|point| is_possible(point.at_s) && is_possible(point.iops))
    }

    /// The latency in microseconds that this share of the requests does not exceed.
    pub fn percentile_us(&self, share: f64) -> f64 {
        self.latencies.percentile(share).unwrap_or(0) as f64 / 1000.0
    }
}

/// A result of fio on the host's own disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ceiling {
    /// The load.
    pub workload: String,
    /// The number of disks: guests times volumes.
    pub disks: u32,
    /// Requests per second.
    pub iops: f64,
    /// Mean latency in nanoseconds.
    pub mean_ns: f64,
}

/// The rates that a search found for a load.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Rates {
    /// The load.
    pub workload: String,
    /// Requests per second of each volume.
    pub rates: Vec<u32>,
    /// Seconds that the search took.
    pub took_s: f64,
}

/// A journal that has been read.
#[derive(Clone, Debug)]
pub struct Journal {
    /// The first line.
    pub header: Header,
    /// The plan in the first line, with the rates that were found, and without the cases that cannot run here.
    pub plan: Plan,
    /// The boots.
    pub boots: Vec<BootRecord>,
    /// The samples.
    pub cells: Vec<Cell>,
    /// What the host's own disk reaches.
    pub ceilings: Vec<Ceiling>,
    /// Disks that were filled.
    pub fills: Vec<Fill>,
    /// Disks that the run created and has not removed: it still runs, or it was killed.
    pub left: Vec<OwnDisk>,
    /// Seconds that searches for rates took.
    pub searched_s: f64,
    /// Whether the last line is truncated: the lab was killed while it wrote the line.
    pub truncated: bool,
}

impl Journal {
    /// Reads a result; `result` is its folder, or the journal itself.
    ///
    /// # Errors
    /// It is not a result, or a line other than the last is invalid.
    pub fn read(result: &Path) -> Result<Journal> {
        let path = journal_path(result);
        let file = File::open(&path)
            .with_context(|| format!("{}: is this a result of 'ringdisk lab'?", path.display()))?;
        let mut bytes = Vec::new();
        file.take(BYTES_MAX)
            .read_to_end(&mut bytes)
            .with_context(|| format!("reading {}", path.display()))?;
        Self::parse_bytes(bytes).with_context(|| path.display().to_string())
    }

    /// Reads a journal whose last line may end within a character.
    fn parse_bytes(bytes: Vec<u8>) -> Result<Journal> {
        let (text, is_cut) = match String::from_utf8(bytes) {
            Ok(text) => (text, false),
            Err(error) => {
                let valid = error.utf8_error().valid_up_to();
                let mut bytes = error.into_bytes();
                let number = 1 + bytes[..valid].iter().filter(|byte| **byte == b'\n').count();
                ensure!(
                    !bytes[valid..].contains(&b'\n'),
                    "line {number}: this is not UTF-8"
                );
                bytes.truncate(valid);
                (String::from_utf8(bytes)?, true)
            }
        };
        let mut journal = Self::parse(&text)?;
        journal.truncated |= is_cut;
        Ok(journal)
    }

    /// Reads a journal's text.
    ///
    /// # Errors
    /// As [`Journal::read`].
    pub fn parse(text: &str) -> Result<Journal> {
        let mut lines = text.lines().enumerate();
        let first = lines.next().map_or("", |(_, line)| line);
        let Ok(Record::Plan(header)) = serde_json::from_str(first) else {
            bail!("line 1: the first line of a journal must be its plan");
        };
        ensure!(
            header.version == VERSION,
            "the journal has format version {}, and this program reads version {VERSION}",
            header.version
        );
        let plan = Plan::recorded(Path::new(&header.file), &header.plan, &header.jobs)
            .context("the plan in the journal")?
            .selected_by(&header.only)
            .map_err(|problem| anyhow!("the selection in the journal: {problem}"))?;
        let mut journal = Journal {
            header,
            plan,
            boots: Vec::new(),
            cells: Vec::new(),
            ceilings: Vec::new(),
            fills: Vec::new(),
            left: Vec::new(),
            searched_s: 0.0,
            truncated: false,
        };
        for (number, line) in lines {
            match serde_json::from_str(line) {
                Ok(record) if !record.is_sound() => {
                    bail!("line {}: impossible figures", number + 1)
                }
                Ok(Record::Boot(boot)) => journal.boots.push(boot),
                Ok(Record::Cell(cell)) => journal.cells.push(cell),
                Ok(Record::Ceiling(ceiling)) => journal.ceilings.push(ceiling),
                Ok(Record::Fill(fill)) => journal.fills.push(fill),
                Ok(Record::Created(disk)) => journal.left.push(disk),
                Ok(Record::Removed(disk)) => journal.left.retain(|it| *it != disk),
                Ok(Record::Rates(found)) => {
                    journal.plan = journal.plan.with_rates(&found.workload, &found.rates);
                    journal.searched_s += found.took_s;
                }
                Ok(Record::Plan(_)) => bail!("line {}: a second plan", number + 1),
                Err(_) if !text.ends_with('\n') && text.lines().count() == number + 1 => {
                    journal.truncated = true
                }
                Err(e) => bail!("line {}: {}", number + 1, printable(&e.to_string())),
            }
        }
        let left_out: Vec<_> = journal.header.left_out.keys().cloned().collect();
        journal.plan = journal.plan.without(&left_out);
        Ok(journal)
    }
}

/// The journal in a folder, or `result` itself if it is a file.
pub fn journal_path(result: &Path) -> PathBuf {
    if result.is_dir() {
        result.join(JOURNAL)
    } else {
        result.into()
    }
}

/// Writes a journal line by line. Each line survives a crash of the host.
#[derive(Debug)]
pub struct Writer {
    file: File,
    path: PathBuf,
}

impl Writer {
    /// Begins a journal in a new folder.
    ///
    /// # Errors
    /// The folder already has one, or cannot be written.
    pub fn create(folder: &Path, header: Header) -> Result<Writer> {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let path = folder.join(JOURNAL);
        if !is_unbegun(&path)? {
            bail!("{} exists; to continue it, use --resume", path.display());
        }
        let file = OpenOptions::new().append(true).create(true).open(&path);
        let file = file.with_context(|| format!("making {}", path.display()))?;
        lock(&file).with_context(|| path.display().to_string())?;
        ensure!(
            is_unbegun(&path)?,
            "another run has begun {}",
            path.display()
        );
        file.set_len(0)
            .with_context(|| format!("emptying {}", path.display()))?;
        let mut writer = Writer { file, path };
        writer.write(&Record::Plan(Header {
            version: VERSION,
            ..header
        }))?;
        Ok(writer)
    }

    /// Continues a journal, and returns it. Removes a truncated last line.
    ///
    /// # Errors
    /// Another run writes it, or it cannot be read or written.
    pub fn resume(folder: &Path) -> Result<(Writer, Journal)> {
        let path = folder.join(JOURNAL);
        let what = || format!("continuing {}", path.display());
        let mut file = OpenOptions::new()
            .append(true)
            .open(&path)
            .with_context(what)?;
        lock(&file).with_context(what)?;
        let mut journal = Journal::read(folder)?;
        let bytes = fs::read(&path).with_context(what)?;
        if std::mem::take(&mut journal.truncated) {
            let end = bytes.iter().rposition(|byte| *byte == b'\n');
            let complete = end.map_or(0, |end| end + 1);
            file.set_len(complete as u64).with_context(what)?;
        } else if !bytes.ends_with(b"\n") {
            // Only the end of the line is missing. The next record would continue the line.
            file.write_all(b"\n").with_context(what)?;
        }
        Ok((Writer { file, path }, journal))
    }

    /// Another writer of the same file, under the same lock.
    ///
    /// # Errors
    /// There are too many open files.
    pub fn another(&self) -> Result<Writer> {
        let file = self.file.try_clone();
        let file = file.with_context(|| format!("opening {} again", self.path.display()))?;
        let path = self.path.clone();
        Ok(Writer { file, path })
    }

    /// Writes a line, and waits until it is durable.
    ///
    /// # Errors
    /// The disk is full, or fails.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        let mut line = serde_json::to_string(record)?;
        line.push('\n');
        let before = self.file.metadata().map(|metadata| metadata.len());
        let written = self
            .file
            .write_all(line.as_bytes())
            .and_then(|()| self.file.sync_data());
        if let (Err(_), Ok(before)) = (&written, before) {
            // A part of the line would damage the next record: that of a disk which is removed, say.
            let _ = self.file.set_len(before);
        }
        written.with_context(|| {
            format!(
                "writing {}; --resume continues after its last complete line",
                self.path.display()
            )
        })
    }
}

impl Log for Writer {
    fn created(&mut self, disk: &OwnDisk) -> Result<()> {
        self.write(&Record::Created(disk.clone()))
    }

    fn removed(&mut self, disk: &OwnDisk) -> Result<()> {
        self.write(&Record::Removed(disk.clone()))
    }
}

/// Whether a journal does not exist or has no complete line, because the run was killed or its disk was full when it began.
pub fn is_unbegun(path: &Path) -> Result<bool> {
    let what = || format!("reading {}", path.display());
    match File::open(path) {
        Ok(file) => {
            let mut first = Vec::new();
            BufReader::new(file.take(BYTES_MAX))
                .read_until(b'\n', &mut first)
                .with_context(what)?;
            let is_of_lab = first.starts_with(FIRST) || FIRST.starts_with(&first);
            Ok(is_of_lab && !first.ends_with(b"\n"))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(e) => Err(e).with_context(what),
    }
}

/// Keeps other runs from writing the journal, until this process ends.
fn lock(file: &File) -> Result<()> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => bail!("another run writes it; wait until it ends, or stop it"),
        // Not on this file system.
        Err(Errno::NOTSUP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        Err(e) => Err(e).context("locking it"),
    }
}

#[cfg(test)]
mod tests;
