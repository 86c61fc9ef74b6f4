//! The configuration file, and those in the directory beside it: disks, groups of disks, and I/O threads. All of it is
//! checked before any of it takes effect.

pub mod conflicts;
pub mod cpus;
pub mod disk_keys;
pub mod export;
pub mod file_keys;
pub mod limits;
pub mod nbd;
pub mod reference;
pub mod sockets;
pub mod spec;

pub mod disk_text;
mod files;
mod keys;
mod sandbox_mode;
mod values;

use std::collections::HashSet;
use std::fmt::Display;
use std::fs;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::ThrottleLimits;
use datapath::Polling;
use thiserror::Error;
use toml::de::DeTable;

pub use file_keys::{POLL_CPU, POLL_MAX_US_MAX, THREADS_MAX, address};
pub use files::read_directories;
pub use sandbox_mode::SandboxMode;
use tracing::error;

use self::conflicts::CheckedDisks;
use self::cpus::Cpus;
use self::disk_keys::QUEUES_MAX;
use self::file_keys::{EXPORT_KEYS, GROUP_NAME, MAPPING, NewThread, THREAD_KEYS, TOP_KEYS, named};
pub use self::files::directory_of;
use self::keys::Form;
use self::nbd::{NbdAddress, NbdConfig, NbdExportSpec};
use self::spec::DiskSpec;
use self::values::{Entry, Mistake, Table, entries};

/// The most that is read, in bytes, of all files together.
const BYTES_MAX: u64 = 4 << 20;

/// The contents of a file. What is absent has the default of the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    pub iothreads: Option<usize>,
    pub cpus: Option<Cpus>,
    pub poll_max: Option<Duration>,
    pub poll_cpu: Option<u8>,
    pub control: Option<PathBuf>,
    pub metrics: Option<SocketAddr>,
    /// Where NBD clients connect.
    pub nbd: Option<NbdAddress>,
    /// Directory with the certificates for NBD clients.
    pub nbd_tls: Option<PathBuf>,
    /// NBD clients need no certificate.
    pub nbd_tls_any_peer: bool,
    /// Directory for old data of backups.
    pub fleece: Option<PathBuf>,
    /// Directory for persisted state.
    pub state: Option<PathBuf>,
    /// Directories where files named by images may lie.
    pub allow_backing: Vec<PathBuf>,
    pub sandbox: Option<SandboxMode>,
    /// More directories where disks and sockets may lie.
    pub allow: Vec<PathBuf>,
    /// The user that ringdisk switches to once everything is open.
    pub user: Option<String>,
    /// Threads outside the pool, by name.
    pub threads: Vec<(String, ThreadSpec)>,
    /// Limits that groups of disks share.
    pub groups: Vec<(String, ThrottleLimits)>,
    pub disks: Vec<DiskSpec>,
    /// What NBD clients find.
    pub exports: Vec<NbdExportSpec>,
    /// The directory with more files, if it was there.
    pub directory: Option<PathBuf>,
    /// Whether it had any.
    pub has_files: bool,
}

/// The settings of an I/O thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadSpec {
    /// CPUs that the thread may run on. None means all, or on a host with several NUMA nodes those of the node with the
    /// rings that it serves.
    pub cpus: Cpus,
    pub polling: Polling,
}

#[derive(Debug, Error)]
pub enum ConfigError {
    #[error(
        "{0}: cannot be read: {1}; {advice}",
        advice = match .1.kind() {
            ErrorKind::PermissionDenied => {
                "let ringdisk's user read it; if it is a link to a directory that was not there when ringdisk started, \
                 'ringdisk upgrade' reads it"
            }
            _ => "is it the path of the configuration?",
        }
    )]
    Read(PathBuf, io::Error),
    #[error(
        "{0}: is not there any more, so that all its disks would be removed; put it back, or make an empty one if that is meant"
    )]
    DirectoryGone(PathBuf),
    #[error(
        "{0}: is larger than {BYTES_MAX} bytes, with the files before it; is it the right file?"
    )]
    TooLarge(PathBuf),
    #[error("{0}: is empty; is it being written? Delete it if it is not needed")]
    Empty(PathBuf),
    #[error(
        "{0}: is not a file; move it out of the directory, or give it a name that does not end in .toml"
    )]
    NotAFile(PathBuf),
    #[error("{0}: its files change while they are read; try again when that is done")]
    Changing(PathBuf),
    /// The line counts from 1.
    #[error("{file}, line {line}: {problem}")]
    Line {
        file: PathBuf,
        line: usize,
        problem: String,
    },
}

impl Config {
    /// How threads poll unless they are configured otherwise.
    pub fn polling(&self) -> Polling {
        let default = Polling::default();
        Polling {
            max: self.poll_max.unwrap_or(default.max),
            cpu: self.poll_cpu.unwrap_or(default.cpu),
        }
    }

    /// What it says about NBD.
    pub fn nbd_config(&self) -> NbdConfig {
        NbdConfig {
            address: self.nbd.clone(),
            tls: self.nbd_tls.clone(),
            tls_any_peer: self.nbd_tls_any_peer,
            exports: self.exports.clone(),
        }
    }

    /// This configuration with what another one says about NBD.
    pub fn with_nbd(self, nbd: NbdConfig) -> Self {
        let NbdConfig {
            address,
            tls,
            tls_any_peer,
            exports,
        } = nbd;
        Self {
            nbd: address,
            nbd_tls: tls,
            nbd_tls_any_peer: tls_any_peer,
            exports,
            ..self
        }
    }

    /// Reads and checks a file, and the files `*.toml` in [the directory beside it](directory_of), in the order of their names.
    ///
    /// # Errors
    /// A file has a mistake; the error gives the file, the line, the key and the allowed values of the first one.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::read_as(path, true)
    }

    fn read_as(path: &Path, is_start: bool) -> Result<Self, ConfigError> {
        let (beside, files) = files::read(path, is_start)?;
        for (empty, _) in files[1..].iter().filter(|(_, text)| text.trim().is_empty()) {
            error!(
                "{}; all others are served",
                ConfigError::Empty(empty.clone())
            );
        }
        let directory = beside.is_some().then(|| directory_of(path));
        let has_files = beside.is_some_and(|beside| beside.has_files());
        let texts: Vec<_> = files.iter().map(|(_, text)| text.as_str()).collect();
        let config = Self::parse_all(&texts);
        let config = config.map_err(|(which, Mistake { at, problem })| {
            let (file, text) = &files[which];
            ConfigError::Line {
                file: file.clone(),
                line: line_at(text, at),
                problem,
            }
        })?;
        Ok(Self {
            directory,
            has_files,
            ..config
        })
    }

    /// As [`read`](Self::read), when this configuration is in effect.
    ///
    /// # Errors
    /// As of [`read`](Self::read); or the directory, which this configuration has, is gone.
    pub fn read_again(&self, path: &Path) -> Result<Self, ConfigError> {
        let new = Self::read_as(path, false)?;
        new.check_directory(path, self.has_files)?;
        Ok(new)
    }

    /// # Errors
    /// The configuration in force `had` a directory, and this one has none.
    pub fn check_directory(&self, path: &Path, had: bool) -> Result<(), ConfigError> {
        match had && self.directory.is_none() {
            true => Err(ConfigError::DirectoryGone(directory_of(path))),
            false => Ok(()),
        }
    }

    /// A mistake in the value of a key at the top of a file that was read before, which shows only when it is used.
    pub fn mistake(path: &Path, key: &str, problem: impl Display) -> ConfigError {
        let text = fs::read_to_string(path).unwrap_or_default();
        let table = DeTable::parse(&text);
        let mut entries = table.iter().flat_map(|table| entries(table.get_ref()));
        let at = entries.find(|entry| entry.key == key);
        let at = at.map_or(0, |entry| entry.key_span.start);
        ConfigError::Line {
            file: path.into(),
            line: line_at(&text, at),
            problem: format!("{key}: {problem}"),
        }
    }

    /// Reads the text of the file, and those of the files beside it, which have only tables. A mistake is in the text with
    /// that index.
    fn parse_all(texts: &[&str]) -> Result<Self, (usize, Mistake)> {
        let parsed = texts.iter().enumerate().map(|(which, text)| {
            DeTable::parse(text).map_err(|e| {
                let at = e.span().map_or(0, |span| span.start);
                (which, Mistake::new(at..at, e.message().trim()))
            })
        });
        let parsed = parsed.collect::<Result<Vec<_>, _>>()?;
        let mut config = Self::default();
        let mut tables = Tables::default();
        for (which, table) in parsed.iter().enumerate() {
            for entry in entries(table.get_ref()) {
                config
                    .read_entry(which, &entry, &mut tables)
                    .map_err(|mistake| (which, mistake))?;
            }
        }
        let polling = config.polling();
        let (mut threads, mut groups) = (HashSet::new(), HashSet::new());
        each(&tables.threads, |table| {
            let (id, spec) = thread(table, polling)?;
            unique("[[iothread]]", &id, &mut threads, table)?;
            config.threads.push((id, spec));
            Ok(())
        })?;
        each(&tables.groups, |table| {
            let (name, limits) = group(table)?;
            unique("[[throttle-group]]", &name, &mut groups, table)?;
            config.groups.push((name, limits));
            Ok(())
        })?;
        let mut checked = CheckedDisks::default();
        each(&tables.disks, |table| config.add_disk(table, &mut checked))?;
        let mut names = HashSet::new();
        each(&tables.exports, |table| {
            config.add_export(table, &checked, &mut names)
        })?;
        Ok(config)
    }

    fn read_entry<'a>(
        &mut self,
        which: usize,
        entry: &Entry<'a>,
        tables: &mut Tables<'a>,
    ) -> Result<(), Mistake> {
        let list = match entry.key {
            "iothread" => &mut tables.threads,
            "throttle-group" => &mut tables.groups,
            "disk" => &mut tables.disks,
            "export" => &mut tables.exports,
            _ => {
                return match TOP_KEYS.iter().find(|top| top.key.name == entry.key) {
                    Some(top) if which == 0 => top.read(self, entry),
                    Some(_) => {
                        let problem = format!(
                            "{} is for all disks, and belongs into the file beside this directory",
                            entry.key
                        );
                        Err(Mistake::new(entry.key_span.clone(), problem))
                    }
                    None => Err(entry.unknown(&known_at_top())),
                };
            }
        };
        list.extend(entry.tables()?.into_iter().map(|table| (which, table)));
        Ok(())
    }

    #[cfg(any(test, fuzzing))]
    fn parse(text: &str) -> Result<Self, Mistake> {
        Self::parse_all(&[text]).map_err(|(_, mistake)| mistake)
    }

    fn add_disk(&mut self, table: &Table<'_>, checked: &mut CheckedDisks) -> Result<(), Mistake> {
        let disk = disk(table)?;
        let mut groups = self.groups.iter().map(|(name, _)| name);
        if let Some(wanted) = &disk.throttle_group
            && !groups.any(|name| name == wanted)
        {
            let problem = format!("there is no [[throttle-group]] with name = \"{wanted}\"");
            return Err(Mistake::new(table.span_of(&["throttle-group"]), problem));
        }
        if let Some(id) = unknown_thread(&disk, &self.threads) {
            let problem = format!("there is no [[iothread]] with id = \"{id}\"");
            let span = table.span_of(&["iothreads", MAPPING.name]);
            return Err(Mistake::new(span, problem));
        }
        let added = checked.add(&disk);
        self.disks.push(disk);
        added.map_err(|e| Mistake::new(table.span(), e.to_string()))
    }
}

impl Config {
    /// `names` are those of the exports before.
    fn add_export(
        &mut self,
        table: &Table<'_>,
        disks: &CheckedDisks,
        names: &mut HashSet<String>,
    ) -> Result<(), Mistake> {
        let fail = |keys: &[&str], problem: String| Err(Mistake::new(table.span_of(keys), problem));
        let export = export(table)?;
        if self.nbd.is_none() {
            let problem = "an [[export]] needs nbd = ADDRESS at the top of the file".to_owned();
            return fail(&[], problem);
        }
        if !disks.has(&export.node) {
            let problem = format!("there is no [[disk]] with name = \"{}\"", export.node);
            return fail(&["disk"], problem);
        }
        if !names.insert(export.name.clone()) {
            let problem = format!("there are two [[export]] named '{}'", export.name);
            return fail(&["name", "disk"], problem);
        }
        self.exports.push(export);
        Ok(())
    }
}

/// The tables of all files, each with the index of its file.
#[derive(Default)]
struct Tables<'a> {
    threads: Vec<(usize, Table<'a>)>,
    groups: Vec<(usize, Table<'a>)>,
    disks: Vec<(usize, Table<'a>)>,
    exports: Vec<(usize, Table<'a>)>,
}

fn each<'a>(
    tables: &[(usize, Table<'a>)],
    mut read: impl FnMut(&Table<'a>) -> Result<(), Mistake>,
) -> Result<(), (usize, Mistake)> {
    tables
        .iter()
        .try_for_each(|(which, table)| read(table).map_err(|mistake| (*which, mistake)))
}

/// The number of a line, from 1, by a place in it.
fn line_at(text: &str, at: usize) -> usize {
    1 + text[..at.min(text.len())].matches('\n').count()
}

fn known_at_top() -> String {
    let names: Vec<_> = TOP_KEYS.iter().map(|top| top.key.name).collect();
    let names = names.join(", ");
    format!("{names}, and [[disk]], [[export]], [[iothread]], [[throttle-group]]")
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
        assert!(
            conflicts::check_conflicts(&config.disks).is_ok(),
            "{config:?}"
        );
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
        // A comment changes nothing.
        let more = format!("{text}\n# and so on\n");
        assert_eq!(Self::parse(&more).ok(), Some(config));
    }
}

fn thread(table: &Table<'_>, polling: Polling) -> Result<(String, ThreadSpec), Mistake> {
    let mut thread = NewThread {
        id: None,
        spec: ThreadSpec {
            polling,
            ..ThreadSpec::default()
        },
    };
    for entry in table.entries() {
        match THREAD_KEYS.iter().find(|known| known.key.name == entry.key) {
            Some(known) => known.read(&mut thread, &entry)?,
            None => {
                let names: Vec<_> = THREAD_KEYS.iter().map(|known| known.key.name).collect();
                return Err(entry.unknown(&names.join(", ")));
            }
        }
    }
    match thread.id {
        Some(id) if id.starts_with("iothread") && id[8..].parse::<usize>().is_ok() => {
            let problem = format!("id: '{id}' is the name of a thread of the pool; choose another");
            Err(Mistake::new(table.span_of(&["id"]), problem))
        }
        Some(id) => Ok((id, thread.spec)),
        None => Err(Mistake::new(table.span(), "an [[iothread]] needs an id")),
    }
}

fn export(table: &Table<'_>) -> Result<NbdExportSpec, Mistake> {
    let mut export = NbdExportSpec::default();
    let mut given = Vec::new();
    for entry in table.entries() {
        let known = EXPORT_KEYS.iter().find(|known| known.key.name == entry.key);
        match (known, limits::key(entry.key)) {
            (Some(known), _) => known.read(&mut export, &entry)?,
            (None, Some(key)) => {
                let number = limits::parse(key, &entry.text()?).map_err(|e| entry.mistake(e))?;
                given.push((key, number));
            }
            (None, None) => {
                let names = EXPORT_KEYS.iter().map(|known| known.key.name);
                let names: Vec<_> = names.chain(limits::keys()).collect();
                return Err(entry.unknown(&names.join(", ")));
            }
        }
    }
    let value = |key| Ok(given.iter().find(|(k, _)| *k == key).map(|(_, n)| *n));
    limits::change(&mut export.limits, value)?;
    let fail = |problem: String| Err(Mistake::new(table.span(), problem));
    if let Err(e) = export.limits.check() {
        return fail(e.to_string());
    }
    if export.node.is_empty() {
        return fail("an [[export]] needs a disk".to_owned());
    }
    Ok(export.named())
}

fn group(table: &Table<'_>) -> Result<(String, ThrottleLimits), Mistake> {
    let mut name = None;
    let mut given = Vec::new();
    for entry in table.entries() {
        match limits::key(entry.key) {
            _ if entry.key == GROUP_NAME.name => name = Some(named(&entry)?),
            Some(key) => {
                let number = limits::parse(key, &entry.text()?).map_err(|e| entry.mistake(e))?;
                given.push((key, number));
            }
            None => {
                let limits: Vec<_> = limits::keys().collect();
                return Err(entry.unknown(&format!("name, {}", limits.join(", "))));
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
    let mut threads = None;
    for entry in table.entries() {
        if entry.key == MAPPING.name {
            threads = Some(entry)
        } else {
            pairs.push((entry.key, entry.text()?))
        }
    }
    let mut disk = DiskSpec::from_pairs(pairs).map_err(|problem| {
        let span = problem.key().map_or(table.span(), |key| {
            table.span_of(&[key, &key.replace('_', "-")])
        });
        Mistake::new(span, problem.to_string())
    })?;
    if let Some(entry) = threads {
        if !disk.iothreads.is_empty() {
            let problem = format!("iothreads and {} exclude each other", MAPPING.name);
            return Err(Mistake::new(entry.key_span, problem));
        }
        disk.iothreads = mapping(&entry, &mut disk.queues)?;
    }
    Ok(disk)
}

/// A thread that the disk names although the file does not have it. A thread of the pool is never unknown: the command
/// line may change the size of the pool.
fn unknown_thread<'a>(disk: &'a DiskSpec, threads: &[(String, ThreadSpec)]) -> Option<&'a str> {
    let known = |id: &str| {
        let number = id.strip_prefix("iothread").unwrap_or(id);
        number.parse::<usize>().is_ok() || threads.iter().any(|(other, _)| other == id)
    };
    let mut ids = disk.iothreads.iter();
    ids.find(|id| !known(id)).map(String::as_str)
}

/// QEMU's map of queues to I/O threads: either no thread names its queues, and they take turns; or all do, and each
/// queue is named once, which gives the disk its number of `queues` if it has none. Returns the thread of each queue.
fn mapping(entry: &Entry<'_>, queues: &mut Option<u16>) -> Result<Vec<String>, Mistake> {
    let mut threads: Vec<(String, Option<Vec<u16>>)> = Vec::new();
    for table in entry.tables()? {
        let (mut id, mut vqs) = (None, None);
        for part in table.entries() {
            match (part.key, part.elements()) {
                ("iothread", _) => id = Some(part.text()?),
                ("vqs", Some(elements)) => {
                    let form = Form::Number(0, u64::from(queues.unwrap_or(QUEUES_MAX)) - 1);
                    let queue = |queue: Entry<'_>| {
                        let text = queue.text()?;
                        form.check(&text).map_err(|e| queue.mistake(e))?;
                        text.parse::<u16>().map_err(|e| queue.mistake(e))
                    };
                    vqs = Some(
                        elements
                            .into_iter()
                            .map(queue)
                            .collect::<Result<Vec<_>, _>>()?,
                    );
                }
                _ => {
                    let name = MAPPING.name;
                    let problem = format!("{name} has iothread = ID and vqs = [QUEUE, ...]");
                    return Err(Mistake::new(part.key_span, problem));
                }
            }
        }
        let id = id.ok_or_else(|| Mistake::new(table.span(), "names no iothread"))?;
        threads.push((id, vqs));
    }
    if threads.iter().all(|(_, vqs)| vqs.is_none()) {
        return if threads.is_empty() {
            Err(entry.mistake("is empty"))
        } else {
            Ok(threads.into_iter().map(|(id, _)| id).collect())
        };
    }
    let named = threads.iter().filter_map(|(_, vqs)| vqs.as_ref()).flatten();
    let last = named.max().copied().unwrap_or(0);
    let queues = *queues.get_or_insert(last + 1);
    let mut map = vec![None; usize::from(queues)];
    for (id, vqs) in &threads {
        let Some(vqs) = vqs else {
            return Err(entry.mistake("either all threads name their vqs, or none does"));
        };
        for &vq in vqs {
            if map[usize::from(vq)].replace(id.clone()).is_some() {
                return Err(entry.mistake(format!("queue {vq} is given to two threads")));
            }
        }
    }
    match map.iter().position(Option::is_none) {
        Some(queue) => Err(entry.mistake(format!("queue {queue} has no thread"))),
        None => Ok(map.into_iter().flatten().collect()),
    }
}

fn unique(
    what: &str,
    name: &str,
    seen: &mut HashSet<String>,
    table: &Table<'_>,
) -> Result<(), Mistake> {
    if seen.insert(name.to_owned()) {
        return Ok(());
    }
    let problem = format!("there are two {what} named '{name}'");
    Err(Mistake::new(table.span(), problem))
}

#[cfg(test)]
mod tests;
