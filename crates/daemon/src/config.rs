//! The configuration file: many disks, groups of them, and I/O threads. What it says is checked as a
//! whole before anything of it takes effect.

pub mod conflicts;
pub mod cpus;
pub mod limits;
pub mod sockets;
pub mod spec;

mod sandbox_mode;

use std::collections::HashSet;
use std::fmt::Display;
use std::fs;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use block::ThrottleLimits;
use datapath::Polling;
use thiserror::Error;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub use sandbox_mode::SandboxMode;

use crate::config::conflicts::check_conflicts;
use crate::config::cpus::Cpus;
use crate::config::spec::DiskSpec;

/// Largest file that is read.
const BYTES_MAX: u64 = 4 << 20;

/// The keys of the file itself, and its tables.
const KEYS: [&str; 11] = [
    "iothreads",
    "cpus",
    "poll-max-us",
    "poll-cpu",
    "control",
    "metrics",
    "allow-backing",
    "sandbox",
    "allow-dir",
    "user",
    "state",
];
const TABLES: &str = "[[disk]], [[iothread]], [[throttle-group]]";

/// The keys of an `[[iothread]]`.
const THREAD_KEYS: [&str; 4] = ["id", "cpus", "poll-max-us", "poll-cpu"];

/// Longest that an I/O thread may be told to poll before a sleep, in microseconds.
pub const POLL_MAX_US_MAX: u64 = 10_000;

/// What polling may cost beyond the sleeps that it saves, in percent of a core.
pub const POLL_CPU: RangeInclusive<u64> = 1..=100;

/// Most threads of the pool, and of those added by name.
pub const THREADS_MAX: usize = 256;

/// What a file says. What it leaves out is as on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    pub iothreads: Option<usize>,
    pub cpus: Option<Cpus>,
    pub poll_max: Option<Duration>,
    pub poll_cpu: Option<u8>,
    pub control: Option<PathBuf>,
    pub metrics: Option<SocketAddr>,
    /// Directory in which is kept what is changed while disks are served.
    pub state: Option<PathBuf>,
    /// Directories of files that images name.
    pub allow_backing: Vec<PathBuf>,
    pub sandbox: Option<SandboxMode>,
    /// Where disks and sockets may be besides.
    pub allow: Vec<PathBuf>,
    /// Who ringdisk becomes when all is open.
    pub user: Option<String>,
    /// Threads with names of their own.
    pub threads: Vec<(String, ThreadSpec)>,
    /// Limits that groups of disks share.
    pub groups: Vec<(String, ThrottleLimits)>,
    pub disks: Vec<DiskSpec>,
}

/// How a thread works.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadSpec {
    /// CPUs that it may run on; if none are named, all, or on a host with several NUMA nodes those of the
    /// node where the rings lie that it serves.
    pub cpus: Cpus,
    pub polling: Polling,
}

#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("{0}: cannot be read: {1}; is it the path of the configuration?")]
    Read(PathBuf, io::Error),
    #[error("{0}: is larger than {BYTES_MAX} bytes; is it the right file?")]
    TooLarge(PathBuf),
    /// The line counts from 1.
    #[error("{file}, line {line}: {problem}")]
    Line {
        file: PathBuf,
        line: usize,
        problem: String,
    },
}

impl Config {
    /// How threads poll that are not told otherwise.
    pub fn polling(&self) -> Polling {
        let default = Polling::default();
        Polling {
            max: self.poll_max.unwrap_or(default.max),
            cpu: self.poll_cpu.unwrap_or(default.cpu),
        }
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// The first mistake in it: its line, its key, and what is allowed there.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let fail = |e| ConfigError::Read(path.into(), e);
        let mut text = String::new();
        let file = fs::File::open(path).map_err(fail)?;
        file.take(BYTES_MAX + 1)
            .read_to_string(&mut text)
            .map_err(fail)?;
        if text.len() as u64 > BYTES_MAX {
            return Err(ConfigError::TooLarge(path.into()));
        }
        Self::parse(&text).map_err(|Mistake { at, problem }| ConfigError::Line {
            file: path.into(),
            line: 1 + text[..at.min(text.len())].matches('\n').count(),
            problem,
        })
    }

    fn parse(text: &str) -> Result<Self, Mistake> {
        let table = DeTable::parse(text).map_err(|e| {
            let at = e.span().map_or(0, |span| span.start);
            Mistake::new(at..at, e.message().trim())
        })?;
        let mut config = Self::default();
        let mut tables = Tables::default();
        for (key, value) in table.get_ref() {
            let name = key.get_ref().as_ref();
            let scalar = || scalar(name, value);
            let unknown = || {
                let all = KEYS.join(", ");
                let problem = format!("there is no key '{name}'; there are {all}, and {TABLES}");
                Err(Mistake::new(key.span(), problem))
            };
            match name {
                // So that there are no others than those that are named.
                _ if !KEYS.contains(&name) && !TABLES.contains(&format!("[[{name}]]")) => {
                    return unknown();
                }
                "iothreads" => {
                    config.iothreads = Some(number(name, value, 1..=THREADS_MAX as u64)? as usize);
                }
                "cpus" => config.cpus = Some(parsed(name, value, &scalar()?)?),
                "poll-max-us" => {
                    let us = number(name, value, 0..=POLL_MAX_US_MAX)?;
                    config.poll_max = Some(Duration::from_micros(us));
                }
                "poll-cpu" => config.poll_cpu = Some(number(name, value, POLL_CPU)? as u8),
                "state" => config.state = Some(scalar()?.into()),
                "control" => config.control = Some(scalar()?.into()),
                "metrics" => {
                    let address = address(&scalar()?);
                    let mistake = |e| Mistake::new(value.span(), format!("{name}: {e}"));
                    config.metrics = Some(address.map_err(mistake)?);
                }
                "allow-backing" => {
                    config.allow_backing = paths(name, value)?;
                }
                "sandbox" => config.sandbox = Some(parsed(name, value, &scalar()?)?),
                "allow-dir" => config.allow = paths(name, value)?,
                "user" => config.user = Some(scalar()?),
                "iothread" => tables.threads = each(name, value)?,
                "throttle-group" => tables.groups = each(name, value)?,
                "disk" => tables.disks = each(name, value)?,
                _ => return unknown(),
            }
        }
        let polling = config.polling();
        for table in &tables.threads {
            config.threads.push(thread(table, polling)?);
        }
        for table in &tables.groups {
            config.groups.push(group(table)?);
        }
        unique("[[iothread]]", &config.threads, &tables.threads)?;
        unique("[[throttle-group]]", &config.groups, &tables.groups)?;
        for table in &tables.disks {
            let disk = disk(table)?;
            let mut groups = config.groups.iter().map(|(name, _)| name);
            if let Some(wanted) = &disk.throttle_group
                && !groups.any(|name| name == wanted)
            {
                let problem = format!("there is no [[throttle-group]] with name = \"{wanted}\"");
                return Err(Mistake::new(table.span_of("throttle-group"), problem));
            }
            if let Some(id) = unknown_thread(&disk, &config.threads) {
                let problem = format!("there is no [[iothread]] with id = \"{id}\"");
                return Err(Mistake::new(
                    table.span_of_any(&["iothreads", MAPPING]),
                    problem,
                ));
            }
            config.disks.push(disk);
            check_conflicts(&config.disks)
                .map_err(|e| Mistake::new(table.span(), e.to_string()))?;
        }
        Ok(config)
    }
}

/// Where metrics are, as the operator says it.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| format!("'{text}' is not an IP address with a port, as in 127.0.0.1:9747"))
}

#[cfg(any(test, fuzzing))]
impl Config {
    /// Panics unless `text` is a configuration that the rest of the program can take, or a mistake at a
    /// place in it: for tests and fuzzing.
    pub fn check(text: &str) {
        let config = match Self::parse(text) {
            Ok(config) => config,
            Err(Mistake { at, problem }) => {
                assert!(at <= text.len() && !problem.is_empty(), "{at}: {problem}");
                return;
            }
        };
        config.disks.iter().for_each(DiskSpec::assert_sound);
        assert!(check_conflicts(&config.disks).is_ok(), "{config:?}");
        for disk in &config.disks {
            let group = disk.throttle_group.as_ref();
            let known = |name| config.groups.iter().any(|(group, _)| group == name);
            assert!(group.is_none_or(known), "{disk:?}");
        }
        assert!(
            config
                .iothreads
                .is_none_or(|n| (1..=THREADS_MAX).contains(&n))
        );
        let polls = config.threads.iter().map(|(_, spec)| spec.polling.max);
        for poll in polls.chain(config.poll_max) {
            assert!(poll <= Duration::from_micros(POLL_MAX_US_MAX), "{config:?}");
        }
        for (i, (name, limits)) in config.groups.iter().enumerate() {
            assert!(limits.check().is_ok(), "{config:?}");
            let before = &config.groups[..i];
            assert!(!before.iter().any(|(other, _)| other == name), "{name}");
        }
        // What nobody reads changes nothing.
        let more = format!("{text}\n# and so on\n");
        assert_eq!(Self::parse(&more).ok(), Some(config));
    }
}

/// What is wrong, and where in the text.
struct Mistake {
    at: usize,
    problem: String,
}

impl Mistake {
    fn new(span: Range<usize>, problem: impl Into<String>) -> Self {
        Self {
            at: span.start,
            problem: problem.into(),
        }
    }
}

#[derive(Default)]
struct Tables<'a> {
    threads: Vec<Table<'a>>,
    groups: Vec<Table<'a>>,
    disks: Vec<Table<'a>>,
}

/// One `[[table]]`.
#[derive(Clone, Copy)]
struct Table<'a>(&'a Spanned<DeValue<'a>>, &'a DeTable<'a>);

impl Table<'_> {
    fn span(&self) -> Range<usize> {
        self.0.span()
    }

    /// Where a key of it is, or where it starts itself.
    fn span_of(&self, wanted: &str) -> Range<usize> {
        self.span_of_any(&[wanted])
    }

    /// The same for one of several keys.
    fn span_of_any(&self, wanted: &[&str]) -> Range<usize> {
        let mut keys = self.1.iter();
        let found = keys.find(|(key, _)| wanted.contains(&key.get_ref().as_ref()));
        found.map_or(self.span(), |(key, _)| key.span())
    }
}

/// Directories: one, or a list of them.
fn paths(key: &str, value: &Spanned<DeValue<'_>>) -> Result<Vec<PathBuf>, Mistake> {
    let path = |value: &Spanned<DeValue<'_>>| match value.get_ref() {
        DeValue::String(text) if !text.is_empty() => Ok(PathBuf::from(text.as_ref())),
        _ => Err(Mistake::new(
            value.span(),
            format!("{key} is a directory, a list of them, or \"none\""),
        )),
    };
    match value.get_ref() {
        DeValue::Array(array) => array.iter().map(path).collect(),
        _ => Ok(vec![path(value)?]),
    }
}

fn each<'a>(name: &str, value: &'a Spanned<DeValue<'a>>) -> Result<Vec<Table<'a>>, Mistake> {
    let wrong = || {
        Mistake::new(
            value.span(),
            format!("{name} is written [[{name}]], once for each"),
        )
    };
    let DeValue::Array(array) = value.get_ref() else {
        return Err(wrong());
    };
    let table = |value: &'a Spanned<DeValue<'a>>| match value.get_ref() {
        DeValue::Table(table) => Ok(Table(value, table)),
        _ => Err(wrong()),
    };
    array.iter().map(table).collect()
}

/// A value as it would be written on the command line.
fn scalar(key: &str, value: &Spanned<DeValue<'_>>) -> Result<String, Mistake> {
    Ok(match value.get_ref() {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(n) if n.radix() == 10 => n.as_str().replace('_', ""),
        DeValue::Boolean(true) => "on".into(),
        DeValue::Boolean(false) => "off".into(),
        DeValue::Array(array) => {
            let each: Vec<_> = array
                .iter()
                .map(|value| match value.get_ref() {
                    DeValue::Array(_) => Err(Mistake::new(
                        value.span(),
                        format!("{key}: a list within a list has no meaning here"),
                    )),
                    _ => scalar(key, value),
                })
                .collect::<Result<_, _>>()?;
            each.join(",")
        }
        _ => {
            return Err(Mistake::new(
                value.span(),
                format!("{key}: is neither a text, nor a whole number, nor true or false"),
            ));
        }
    })
}

fn parsed<T: FromStr<Err: Display>>(
    key: &str,
    value: &Spanned<DeValue<'_>>,
    text: &str,
) -> Result<T, Mistake> {
    text.parse()
        .map_err(|e| Mistake::new(value.span(), format!("{key}: '{text}': {e}")))
}

fn number(
    key: &str,
    value: &Spanned<DeValue<'_>>,
    allowed: std::ops::RangeInclusive<u64>,
) -> Result<u64, Mistake> {
    let text = scalar(key, value)?;
    match text.parse() {
        Ok(n) if allowed.contains(&n) => Ok(n),
        _ => {
            let (first, last) = allowed.into_inner();
            let problem = format!("{key}: '{text}' is not a number from {first} to {last}");
            Err(Mistake::new(value.span(), problem))
        }
    }
}

fn thread(table: &Table<'_>, polling: Polling) -> Result<(String, ThreadSpec), Mistake> {
    let mut id = None;
    let mut spec = ThreadSpec {
        polling,
        ..ThreadSpec::default()
    };
    for (key, value) in table.1 {
        let name = key.get_ref().as_ref();
        let unknown = || {
            let all = THREAD_KEYS.join(", ");
            let problem = format!("there is no key '{name}'; there are {all}");
            Err(Mistake::new(key.span(), problem))
        };
        match name {
            _ if !THREAD_KEYS.contains(&name) => return unknown(),
            "id" => id = Some(named(name, value)?),
            "cpus" => spec.cpus = parsed(name, value, &scalar(name, value)?)?,
            "poll-max-us" => {
                let us = number(name, value, 0..=POLL_MAX_US_MAX)?;
                spec.polling.max = Duration::from_micros(us);
            }
            "poll-cpu" => spec.polling.cpu = number(name, value, POLL_CPU)? as u8,
            _ => return unknown(),
        }
    }
    match id {
        Some(id) if id.starts_with("iothread") && id[8..].parse::<usize>().is_ok() => {
            let problem = format!("id: '{id}' is the name of a thread of the pool; choose another");
            Err(Mistake::new(table.span_of("id"), problem))
        }
        Some(id) => Ok((id, spec)),
        None => Err(Mistake::new(table.span(), "an [[iothread]] needs an id")),
    }
}

fn group(table: &Table<'_>) -> Result<(String, ThrottleLimits), Mistake> {
    let mut name = None;
    let mut given = Vec::new();
    for (key, value) in table.1 {
        let text = key.get_ref().as_ref();
        match limits::key(text) {
            _ if text == "name" => name = Some(named(text, value)?),
            Some(key) => {
                let number = limits::parse(key, &scalar(text, value)?)
                    .map_err(|e| Mistake::new(value.span(), format!("{text}: {e}")))?;
                given.push((key, number));
            }
            None => {
                let all: Vec<_> = limits::keys().collect();
                let all = all.join(", ");
                let problem = format!("there is no key '{text}'; there are name, {all}");
                return Err(Mistake::new(key.span(), problem));
            }
        }
    }
    let mut limits = ThrottleLimits::NONE;
    let value = |key| Ok(given.iter().find(|(k, _)| *k == key).map(|(_, n)| *n));
    limits::change(&mut limits, value)?;
    limits
        .check()
        .map_err(|e| Mistake::new(table.span(), e.to_string()))?;
    let name =
        name.ok_or_else(|| Mistake::new(table.span(), "a [[throttle-group]] needs a name"))?;
    Ok((name, limits))
}

fn disk(table: &Table<'_>) -> Result<DiskSpec, Mistake> {
    let mut pairs = Vec::new();
    for (key, value) in table.1 {
        let name = key.get_ref().as_ref();
        if name == MAPPING {
            continue;
        }
        pairs.push((name, scalar(name, value)?));
    }
    let mut disk = DiskSpec::from_pairs(pairs).map_err(|problem| {
        let span = problem.key().map_or(table.span(), |key| {
            let dashed = key.replace('_', "-");
            let keys = table.1.iter().map(|(key, _)| key);
            let found = keys.into_iter().find(|k| {
                let text = k.get_ref().as_ref();
                text == key || text == dashed
            });
            found.map_or(table.span(), Spanned::span)
        });
        Mistake::new(span, problem.to_string())
    })?;
    if let Some((key, value)) = table.1.iter().find(|(key, _)| key.get_ref() == MAPPING) {
        if !disk.iothreads.is_empty() {
            let problem = format!("iothreads and {MAPPING} exclude each other");
            return Err(Mistake::new(key.span(), problem));
        }
        disk.iothreads = mapping(value, disk.queues)?;
    }
    Ok(disk)
}

/// A thread that a disk asks for, and that is neither one of the pool, whose size the command line may
/// change, nor in the file.
fn unknown_thread<'a>(disk: &'a DiskSpec, threads: &[(String, ThreadSpec)]) -> Option<&'a str> {
    let known = |id: &str| {
        let number = id.strip_prefix("iothread").unwrap_or(id);
        number.parse::<usize>().is_ok() || threads.iter().any(|(other, _)| other == id)
    };
    let mut ids = disk.iothreads.iter();
    ids.find(|id| !known(id)).map(String::as_str)
}

const MAPPING: &str = "iothread-vq-mapping";

/// QEMU's map of queues to I/O threads: either none of the threads names its queues, and they take turns;
/// or all do, and each queue is named once. Returns the thread of each queue.
fn mapping(value: &Spanned<DeValue<'_>>, queues: u16) -> Result<Vec<String>, Mistake> {
    let mut threads: Vec<(String, Option<Vec<u16>>)> = Vec::new();
    for table in each(MAPPING, value)? {
        let (mut id, mut vqs) = (None, None);
        for (key, value) in table.1 {
            let name = key.get_ref().as_ref();
            match (name, value.get_ref()) {
                ("iothread", _) => id = Some(scalar(name, value)?),
                ("vqs", DeValue::Array(array)) => {
                    let number = |value| number(name, value, 0..=u64::from(queues) - 1);
                    let each = array.iter().map(|value| number(value).map(|n| n as u16));
                    vqs = Some(each.collect::<Result<Vec<_>, _>>()?);
                }
                _ => {
                    let problem = format!("{MAPPING} has iothread = ID and vqs = [QUEUE, ...]");
                    return Err(Mistake::new(key.span(), problem));
                }
            }
        }
        let id = id.ok_or_else(|| Mistake::new(table.span(), "names no iothread"))?;
        threads.push((id, vqs));
    }
    let wrong = |problem| Err(Mistake::new(value.span(), format!("{MAPPING}: {problem}")));
    if threads.iter().all(|(_, vqs)| vqs.is_none()) {
        return match threads.is_empty() {
            true => wrong("is empty".to_owned()),
            false => Ok(threads.into_iter().map(|(id, _)| id).collect()),
        };
    }
    let mut map = vec![None; usize::from(queues)];
    for (id, vqs) in &threads {
        let Some(vqs) = vqs else {
            return wrong("either all threads name their vqs, or none does".into());
        };
        for &vq in vqs {
            if map[usize::from(vq)].replace(id.clone()).is_some() {
                return wrong(format!("queue {vq} is given to two threads"));
            }
        }
    }
    match map.iter().position(Option::is_none) {
        Some(queue) => wrong(format!("queue {queue} has no thread")),
        None => Ok(map.into_iter().flatten().collect()),
    }
}

fn named(key: &str, value: &Spanned<DeValue<'_>>) -> Result<String, Mistake> {
    spec::name(&scalar(key, value)?)
        .map_err(|problem| Mistake::new(value.span(), format!("{key}: {problem}")))
}

fn unique<T>(what: &str, named: &[(String, T)], tables: &[Table<'_>]) -> Result<(), Mistake> {
    let mut seen = HashSet::new();
    for ((name, _), table) in named.iter().zip(tables) {
        if !seen.insert(name) {
            let problem = format!("there are two {what} named '{name}'");
            return Err(Mistake::new(table.span(), problem));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
