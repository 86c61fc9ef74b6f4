//! A disk as the operator writes it: a path, or `key=value` pairs in QEMU's words.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use block::{Aio, CacheMode, DetectZeroes, Discard, OnError, ThrottleLimits, parse_size};
use guest::{Virtqueue, blk};
use image::Format;
use rbd::Location;
use thiserror::Error;

use crate::config::limits;
use crate::credentials;

/// Most queues of a disk: what a PCI device has interrupt vectors for in QEMU, less one for
/// configuration changes, and far more than a guest has use for.
pub const QUEUES_MAX: u16 = 256;

/// Queues by default: one per CPU, up to this.
const QUEUES_DEFAULT_MAX: usize = 16;

const QUEUE_SIZE_DEFAULT: u16 = 256;
const QUEUE_SIZE_MIN: u16 = 16;

const KEYS: &str = "name, file, format, socket, socket-mode, socket-group, socket-owner, cache, aio, queues, \
    queue-size, readonly, serial, discard, detect-zeroes, rerror, werror, l2-cache-size, logical-block-size, \
    physical-block-size, fixed-buffers, lock, iothreads, throttle-group, conf, id, keyring, cluster, connections";

/// Those that say how a Ceph cluster is reached.
const ACCESS_KEYS: [&str; 5] = ["conf", "id", "keyring", "cluster", "connections"];

/// A disk to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    pub name: String,
    pub file: FileSpec,
    /// As given; otherwise it follows from the file.
    pub format: Option<Format>,
    /// As given; otherwise it follows from the name.
    pub socket: Option<PathBuf>,
    pub socket_access: SocketAccess,
    pub cache: CacheMode,
    pub aio: Aio,
    pub queues: u16,
    pub queue_size: u16,
    pub read_only: bool,
    pub serial: String,
    pub discard: Discard,
    pub detect_zeroes: DetectZeroes,
    /// What is done about reads that storage failed to serve.
    pub rerror: OnError,
    /// The same for whatever changes the disk, and for flushes.
    pub werror: OnError,
    /// Memory for the tables of an image in bytes, as given; otherwise for all of them, up to 1 GiB.
    pub l2_cache_bytes: Option<u64>,
    /// In bytes, as given; otherwise it is the backing's.
    pub logical_block: Option<u32>,
    /// In bytes, as given; otherwise it is the backing's.
    pub physical_block: Option<u32>,
    pub fixed_buffers: bool,
    pub lock: Lock,
    /// I/O threads by id or number, to which the queues go in turn; none for the next ones of the pool.
    pub iothreads: Vec<String>,
    pub limits: ThrottleLimits,
    /// The group of disks whose limits it shares.
    pub throttle_group: Option<String>,
}

/// When the files of a disk that is written are locked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lock {
    /// As long as it is served, but for a VM that is moved to another host.
    #[default]
    Always,
    /// While a VM runs on it.
    Running,
}

/// Who may connect to a socket, as far as that is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    pub mode: Option<u32>,
    pub group: Option<u32>,
    pub owner: Option<u32>,
}

/// What holds the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileSpec {
    Path(PathBuf),
    /// An image in a Ceph cluster.
    Rbd(Box<Location>),
    /// Nothing: requests complete at once. Bytes.
    Null(u64),
}

/// A mistake in a disk.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("disk '{disk}': {problem}")]
pub struct SpecError {
    /// The disk as it was written.
    pub disk: String,
    pub problem: Problem,
}

#[derive(Debug, Error, PartialEq, Eq)]
pub enum Problem {
    #[error("'{0}' is not key=value; a comma inside a value is doubled, as in a,,b.raw")]
    NoValue(String),
    #[error("there is no option '{0}'; there are {all}", all = keys().collect::<Vec<_>>().join(", "))]
    UnknownKey(String),
    #[error("{0} is given twice")]
    Twice(&'static str),
    #[error("{0}: {1}")]
    Value(&'static str, String),
    #[error("no file; write its path, as in 'vm1.raw' or 'file=/dev/vg0/vm1'")]
    NoFile,
}

impl Problem {
    /// The key that it is about.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::UnknownKey(key) => Some(key),
            Self::Twice(key) | Self::Value(key, _) => Some(key),
            Self::NoValue(_) | Self::NoFile => None,
        }
    }
}

impl FromStr for DiskSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        pairs(text)
            .and_then(Self::from_pairs)
            .map_err(|problem| SpecError {
                disk: text.into(),
                problem,
            })
    }
}

impl DiskSpec {
    /// A disk from its options.
    ///
    /// # Errors
    /// An option is not known, given twice, or its value is none.
    pub fn from_pairs<K: AsRef<str>>(
        pairs: impl IntoIterator<Item = (K, String)>,
    ) -> Result<Self, Problem> {
        let mut given = Given::default();
        for (key, value) in pairs {
            given.add(key.as_ref(), value)?;
        }
        let file = given.take("file", |text| match text.split_once(':') {
            Some(("null", size)) => null(size),
            Some(("rbd", image)) => match Location::parse(image) {
                Ok(location) => Ok(FileSpec::Rbd(Box::new(location))),
                Err(problem) => Err(format!("'{text}' {problem}")),
            },
            _ if text.is_empty() => Err("is empty".into()),
            _ => Ok(FileSpec::Path(text.into())),
        })?;
        let mut file = file.ok_or(Problem::NoFile)?;
        for key in ACCESS_KEYS {
            given.take(key, |value| match &mut file {
                FileSpec::Rbd(location) => location.access.set(key, value),
                _ => Err("is for images in a Ceph cluster: file=rbd:POOL/IMAGE".into()),
            })?;
        }
        let name = match given.take("name", name)? {
            Some(name) => name,
            None => default_name(&file),
        };
        let mut disk = Self::new(name, file);
        disk.format = given.take("format", Format::from_str)?;
        disk.socket = given.take("socket", socket)?;
        disk.socket_access = SocketAccess {
            mode: given.take("socket-mode", mode)?,
            group: given.take("socket-group", credentials::group)?,
            owner: given.take("socket-owner", credentials::user)?,
        };
        given.set(&mut disk.cache, "cache", CacheMode::from_str)?;
        given.set(&mut disk.aio, "aio", Aio::from_str)?;
        given.set(&mut disk.queues, "queues", queues)?;
        given.set(&mut disk.queue_size, "queue-size", queue_size)?;
        disk.read_only = match given.take("readonly", on_off)? {
            Some(false) if disk.is_snapshot() => {
                let problem =
                    "a snapshot is read-only; leave it out, or serve a clone ('rbd clone')";
                return Err(Problem::Value("readonly", problem.into()));
            }
            given => given.unwrap_or(disk.is_snapshot()),
        };
        given.set(&mut disk.serial, "serial", serial)?;
        given.set(&mut disk.discard, "discard", Discard::from_str)?;
        let detect_zeroes = DetectZeroes::from_str;
        given.set(&mut disk.detect_zeroes, "detect-zeroes", detect_zeroes)?;
        given.set(&mut disk.rerror, "rerror", rerror)?;
        given.set(&mut disk.werror, "werror", OnError::from_str)?;
        disk.l2_cache_bytes = given.take("l2-cache-size", parse_size)?;
        disk.logical_block = given.take("logical-block-size", block_size)?;
        disk.physical_block = given.take("physical-block-size", block_size)?;
        given.set(&mut disk.fixed_buffers, "fixed-buffers", on_off)?;
        given.set(&mut disk.lock, "lock", lock)?;
        given.set(&mut disk.iothreads, "iothreads", iothreads)?;
        limits::change(&mut disk.limits, |key| {
            given.take(key, |text| limits::parse(key, text))
        })?;
        disk.limits
            .check()
            .map_err(|e| Problem::Value(limits::key_of(&e), e.to_string()))?;
        disk.throttle_group = given.take("throttle-group", self::name)?;
        disk.check_rbd()?;
        Ok(disk)
    }

    fn is_snapshot(&self) -> bool {
        matches!(&self.file, FileSpec::Rbd(location) if location.snapshot.is_some())
    }

    /// Whether what was asked for is there for an image in a Ceph cluster, if it is on one.
    ///
    /// # Errors
    /// It is not, and what there is.
    pub fn check_rbd(&self) -> Result<(), Problem> {
        let FileSpec::Rbd(location) = &self.file else {
            return Ok(());
        };
        let image = location.image_spec();
        if self.format == Some(Format::Qcow2) {
            let problem = format!(
                "qcow2 inside of {image} would keep tables, snapshots and a backing file of its own above an image that \
                 has all of these itself, at the price of a second I/O for many; make a copy of the image that shares \
                 its data ('rbd snap create {image}@base', 'rbd clone {image}@base {image}-copy') and serve that, or \
                 bring a qcow2 file in with 'qemu-img convert -O raw FILE rbd:{image}'"
            );
            return Err(Problem::Value("format", problem));
        }
        if self.aio != Aio::Auto {
            let problem =
                "is for files; the bytes of an image in a Ceph cluster are moved by librbd";
            return Err(Problem::Value("aio", problem.into()));
        }
        Ok(())
    }

    /// The disk on another file. That has this format; or the one that its name says; or, where that says nothing,
    /// raw, if that was said of the file before. An image is in the cluster that the image before was in, unless it
    /// says another, and how bytes are moved is said for files alone.
    ///
    /// # Errors
    /// The file before was said to be qcow2, and nothing is said of this one. A guest may have written an image into
    /// it, and would choose which files of the host are opened.
    pub fn moved(&self, file: FileSpec, format: Option<Format>) -> Result<Self, Problem> {
        let format = match (&file, format, self.format) {
            (_, Some(given), _) => Some(given),
            (_, None, None) => None,
            (FileSpec::Path(path), None, Some(before)) => match (Format::of_name(path), before) {
                (Some(named), _) => Some(named),
                (None, Format::Raw) => Some(Format::Raw),
                (None, Format::Qcow2) => {
                    let problem = format!(
                        "the name of {} says none, and that of the file before, qcow2, need not be its own; say \
                         --format raw, or --format qcow2",
                        path.display()
                    );
                    return Err(Problem::Value("format", problem));
                }
            },
            (FileSpec::Rbd(_) | FileSpec::Null(_), None, Some(_)) => Some(Format::Raw),
        };
        let mut moved = Self {
            file,
            format,
            ..self.clone()
        };
        if let FileSpec::Rbd(location) = &mut moved.file {
            moved.aio = Aio::Auto;
            if let FileSpec::Rbd(before) = &self.file
                && location.access == rbd::Access::default()
            {
                location.access = before.access.clone();
            }
        }
        Ok(moved)
    }

    /// Whether both are written down on the same, in the same words.
    pub fn is_written_on_file_of(&self, other: &Self) -> bool {
        (&self.file, self.format) == (&other.file, other.format)
    }

    /// The disk as it is written down, on what it is on now.
    pub fn on_file_of(&self, now: &Self) -> Self {
        let aio = match now.file {
            FileSpec::Rbd(_) => now.aio,
            FileSpec::Path(_) | FileSpec::Null(_) => self.aio,
        };
        Self {
            file: now.file.clone(),
            format: now.format,
            aio,
            ..self.clone()
        }
    }

    /// Whether both have the same limits written down.
    pub fn has_limits_of(&self, other: &Self) -> bool {
        (&self.limits, &self.throttle_group) == (&other.limits, &other.throttle_group)
    }

    /// The disk as it is written down by now, with what commands have changed of it since `before` was: its file and its
    /// limits, each unless something else is written of it since.
    pub fn as_changed(&self, before: &Self, now: &Self) -> Self {
        let mut disk = match before.is_written_on_file_of(self) {
            true => self.on_file_of(now),
            false => self.clone(),
        };
        if before.has_limits_of(self) {
            disk.limits = now.limits;
            disk.throttle_group = now.throttle_group.clone();
        }
        disk
    }

    /// Is on the file that another is on.
    pub fn follow(&mut self, other: &Self) {
        self.file = other.file.clone();
        (self.format, self.aio) = (other.format, other.aio);
    }

    /// A disk on this file, all else as it is by default.
    pub fn new(name: String, file: FileSpec) -> Self {
        Self {
            name,
            file,
            format: None,
            socket: None,
            socket_access: SocketAccess::default(),
            cache: CacheMode::None,
            aio: Aio::Auto,
            queues: default_queues(),
            queue_size: QUEUE_SIZE_DEFAULT,
            read_only: false,
            serial: String::new(),
            discard: Discard::Unmap,
            detect_zeroes: DetectZeroes::Off,
            rerror: OnError::Report,
            werror: OnError::Enospc,
            l2_cache_bytes: None,
            logical_block: None,
            physical_block: None,
            fixed_buffers: false,
            lock: Lock::Always,
            iothreads: Vec::new(),
            limits: ThrottleLimits::NONE,
            throttle_group: None,
        }
    }
}

impl Display for FileSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Rbd(location) => write!(f, "rbd:{}", location.option_text()),
            Self::Null(size) => write!(f, "null:{size}"),
        }
    }
}

/// As on a command line, with every choice that does not follow from others written out.
impl Display for DiskSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on_off = |on| if on { "on" } else { "off" };
        let file = self.file.to_string();
        let bytes = |size: Option<u64>| size.map(|n| n.to_string());
        let block = |size: Option<u32>| size.map(|n| n.to_string());
        let given = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let socket = self.socket.as_ref().map(|path| path.display().to_string());
        let access = &self.socket_access;
        let mode = access.mode.map(|mode| format!("{mode:04o}"));
        let number = |id: Option<u32>| id.map(|id| id.to_string());
        let lock = match self.lock {
            Lock::Always => None,
            Lock::Running => Some("running".into()),
        };
        let each: [(&str, Option<String>); 24] = [
            ("file", Some(file)),
            ("name", Some(self.name.clone())),
            ("format", self.format.map(|format| format.to_string())),
            ("socket", socket),
            ("socket-mode", mode),
            ("socket-group", number(access.group)),
            ("socket-owner", number(access.owner)),
            ("cache", Some(self.cache.to_string())),
            ("aio", Some(self.aio.to_string())),
            ("queues", Some(self.queues.to_string())),
            ("queue-size", Some(self.queue_size.to_string())),
            ("readonly", Some(on_off(self.read_only).into())),
            ("serial", given(&self.serial)),
            ("discard", Some(self.discard.to_string())),
            ("detect-zeroes", Some(self.detect_zeroes.to_string())),
            ("rerror", Some(self.rerror.to_string())),
            ("werror", Some(self.werror.to_string())),
            ("l2-cache-size", bytes(self.l2_cache_bytes)),
            ("logical-block-size", block(self.logical_block)),
            ("physical-block-size", block(self.physical_block)),
            ("fixed-buffers", Some(on_off(self.fixed_buffers).into())),
            ("lock", lock),
            ("iothreads", given(&self.iothreads.join(","))),
            ("throttle-group", self.throttle_group.clone()),
        ];
        let limits = limits::pairs(&self.limits).into_iter();
        let limits = limits.map(|(key, value)| (key, Some(value.to_string())));
        let mut separator = "";
        for (key, value) in each.into_iter().chain(limits) {
            if let Some(value) = value {
                write!(f, "{separator}{key}={}", value.replace(',', ",,"))?;
                separator = ",";
            }
        }
        Ok(())
    }
}

#[cfg(any(test, fuzzing))]
impl DiskSpec {
    /// Panics unless this is a disk that the rest of the program can take: for tests and fuzzing.
    pub fn assert_sound(&self) {
        assert!(name(&self.name).is_ok(), "{self:?}");
        assert!((1..=QUEUES_MAX).contains(&self.queues), "{self:?}");
        assert!(self.queue_size.is_power_of_two(), "{self:?}");
        assert!((QUEUE_SIZE_MIN..=Virtqueue::MAX_SIZE).contains(&self.queue_size));
        assert!(self.serial.len() <= blk::ID_BYTES && self.serial.is_ascii());
        match &self.file {
            FileSpec::Path(path) => assert!(!path.as_os_str().is_empty()),
            FileSpec::Null(size) => assert!(*size > 0 && size.is_multiple_of(512)),
            FileSpec::Rbd(it) => assert!(!it.pool.is_empty() && !it.image.is_empty()),
        }
        for block in [self.logical_block, self.physical_block] {
            assert!([None, Some(512), Some(4096)].contains(&block), "{self:?}");
        }
        if let Some(socket) = &self.socket {
            assert!((1..108).contains(&socket.as_os_str().len()));
        }
    }
}

/// The pairs of a disk as it is written on a command line.
fn pairs(text: &str) -> Result<Vec<(String, String)>, Problem> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for (i, part) in split(text).into_iter().enumerate() {
        match (part.split_once('='), pairs.last_mut()) {
            (Some((key, value)), _) if i > 0 || is_word(key) => {
                pairs.push((key.into(), value.into()));
            }
            // As in QEMU, the first part may leave out its key.
            _ if i == 0 => pairs.push(("file".into(), part)),
            // As in iothreads=0,2.
            (None, Some((key, list))) if key == "iothreads" && is_number(&part) => {
                *list += &format!(",{part}");
            }
            _ => return Err(Problem::NoValue(part)),
        }
    }
    Ok(pairs)
}

/// The pairs of a disk, each taken once.
#[derive(Default)]
struct Given(Vec<(&'static str, String)>);

impl Given {
    fn add(&mut self, key: &str, value: String) -> Result<(), Problem> {
        let known = KEYS.split(", ").find(|&k| k == key);
        let Some(key) = known.or_else(|| limits::key(key)) else {
            return Err(Problem::UnknownKey(key.into()));
        };
        if self.0.iter().any(|(k, _)| *k == key) {
            return Err(Problem::Twice(key));
        }
        self.0.push((key, value));
        Ok(())
    }

    /// Replaces a default if there is something to replace it with.
    fn set<T, E: Display>(
        &mut self,
        field: &mut T,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<(), Problem> {
        if let Some(value) = self.take(key, parse)? {
            *field = value;
        }
        Ok(())
    }

    fn take<T, E: Display>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<Option<T>, Problem> {
        let Some(place) = self.0.iter().position(|(k, _)| *k == key) else {
            return Ok(None);
        };
        let (_, value) = self.0.swap_remove(place);
        parse(&value)
            .map(Some)
            .map_err(|problem| Problem::Value(key, problem.to_string()))
    }
}

/// The keys of all that can be said of a disk. In those of limits, `-` is as good as `_`.
pub fn keys() -> impl Iterator<Item = &'static str> {
    KEYS.split(", ").chain(limits::keys())
}

/// Splits at single commas; a doubled one is a comma in a value.
fn split(spec: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = spec.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            ',' if chars.next_if_eq(&',').is_none() => parts.push(String::new()),
            c => parts.last_mut().expect("there is one").push(c),
        }
    }
    parts
}

fn is_word(text: &str) -> bool {
    !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_lowercase() || c == '-' || c == '_')
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_digit())
}

fn null(size: &str) -> Result<FileSpec, String> {
    match parse_size(size)? {
        n if n == 0 || !n.is_multiple_of(512) => Err(format!("{n} bytes are no whole sectors")),
        n => Ok(FileSpec::Null(n)),
    }
}

/// QEMU's rule for ids, so that a name can be used as one.
pub fn name(text: &str) -> Result<String, String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    match text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(good)
        && text.len() <= 64
    {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "'{text}' is not a letter followed by letters, digits, '-', '.' or '_', 64 at most"
        )),
    }
}

/// The file's name without its suffix, with what a name cannot have replaced.
fn default_name(file: &FileSpec) -> String {
    let stem = match file {
        FileSpec::Path(path) => path.file_stem().unwrap_or_default().to_string_lossy(),
        FileSpec::Rbd(location) => location.image.as_str().into(),
        FileSpec::Null(_) => return "null".into(),
    };
    let mut name: String = stem
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "-._".contains(c) {
                c
            } else {
                '-'
            }
        })
        .take(60)
        .collect();
    if !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        name.insert_str(0, "disk");
    }
    name
}

fn socket(text: &str) -> Result<PathBuf, String> {
    // `sockaddr_un` has room for 108 bytes, the last of which is a zero.
    match text.len() {
        0 => Err("is empty".into()),
        1..=107 => Ok(Path::new(text).into()),
        n => Err(format!(
            "has {n} bytes, and the path of a socket has at most 107"
        )),
    }
}

/// Permissions as chmod(1) takes them, of which connecting needs to write.
fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode @ 0..=0o777) => Ok(mode),
        _ => Err(format!("'{text}' is not a mode such as 0660")),
    }
}

fn default_queues() -> u16 {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(QUEUES_DEFAULT_MAX) as u16)
}

fn queues(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(n @ 1..=QUEUES_MAX) => Ok(n),
        _ => Err(format!("'{text}' is not a number from 1 to {QUEUES_MAX}")),
    }
}

fn queue_size(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(n) if n.is_power_of_two() && (QUEUE_SIZE_MIN..=Virtqueue::MAX_SIZE).contains(&n) => {
            Ok(n)
        }
        _ => Err(format!(
            "'{text}' is not a power of two from {QUEUE_SIZE_MIN} to {}",
            Virtqueue::MAX_SIZE
        )),
    }
}

fn block_size(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" | "4k" | "4K" => Ok(4096),
        _ => Err(format!("'{text}' is neither 512 nor 4096")),
    }
}

/// Reads do not run out of space.
fn rerror(text: &str) -> Result<OnError, String> {
    match text.parse()? {
        OnError::Enospc => Err("'enospc' is for werror; there are report, stop, retry".into()),
        policy => Ok(policy),
    }
}

fn iothreads(text: &str) -> Result<Vec<String>, String> {
    let each = text.split(',').map(|id| match is_number(id) {
        true => Ok(id.to_owned()),
        false => name(id),
    });
    let ids: Vec<_> = each.collect::<Result<_, _>>()?;
    match ids.len() <= usize::from(QUEUES_MAX) {
        true => Ok(ids),
        false => Err(format!("more than {QUEUES_MAX} threads")),
    }
}

fn lock(text: &str) -> Result<Lock, String> {
    match text {
        "always" => Ok(Lock::Always),
        "running" => Ok(Lock::Running),
        _ => Err(format!("'{text}' is neither always nor running")),
    }
}

fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("'{text}' is neither on nor off")),
    }
}

fn serial(text: &str) -> Result<String, String> {
    match text.len() <= blk::ID_BYTES && text.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "'{text}' is not up to {} ASCII characters",
            blk::ID_BYTES
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(spec: &str) -> Result<DiskSpec, SpecError> {
        spec.parse()
    }

    #[test]
    fn a_path_alone_is_a_disk() {
        let disk = parse("/vms/vm1.raw").unwrap();
        assert_eq!(disk.name, "vm1");
        assert_eq!(disk.file, FileSpec::Path("/vms/vm1.raw".into()));
        assert_eq!((disk.cache, disk.queue_size), (CacheMode::None, 256));
        assert!(disk.queues >= 1 && !disk.read_only);
        assert_eq!(parse("/dev/vg0/5 % full").unwrap().name, "disk5---full");
    }

    #[test]
    fn pairs_say_the_rest() {
        let disk = parse(
            "file=/a,,b.img,name=x,cache=writeback,queues=3,queue-size=1024,readonly=on,\
             serial=S 1,socket=/run/x.sock,aio=native,format=raw",
        )
        .unwrap();
        assert_eq!(disk.file, FileSpec::Path("/a,b.img".into()));
        assert_eq!(disk.name, "x");
        assert_eq!(disk.cache, CacheMode::Writeback);
        assert_eq!((disk.queues, disk.queue_size), (3, 1024));
        assert_eq!((disk.read_only, disk.serial.as_str()), (true, "S 1"));
        assert_eq!(disk.socket, Some("/run/x.sock".into()));
        let disk = parse(
            "a.raw,cache=unsafe,discard=ignore,detect-zeroes=unmap,logical-block-size=4096,\
             physical-block-size=4k",
        )
        .unwrap();
        assert_eq!(disk.cache, CacheMode::Unsafe);
        assert_eq!(disk.discard, Discard::Ignore);
        assert_eq!(disk.detect_zeroes, DetectZeroes::Unmap);
        let blocks = (disk.logical_block, disk.physical_block);
        assert_eq!(blocks, (Some(4096), Some(4096)));
        let disk = parse("a,iothreads=0,2,iops=100,iops-max=200,throttle-group=bronze").unwrap();
        assert_eq!(disk.iothreads, ["0", "2"]);
        assert_eq!(disk.limits.iops_total.max, 200);
        assert_eq!(disk.throttle_group.as_deref(), Some("bronze"));
        assert_eq!(parse("null:64G").unwrap().file, FileSpec::Null(64 << 30));
        assert_eq!(parse("vm1.raw,queues=2").unwrap().queues, 2);
        assert_eq!(
            parse("/x/A=b.raw").unwrap().file,
            FileSpec::Path("/x/A=b.raw".into())
        );
    }

    #[test]
    fn mistakes_are_named() {
        for (spec, says) in [
            ("", "is empty"),
            ("name=x", "no file"),
            ("file=a,cach=none", "no option 'cach'"),
            ("file=a,queues", "'queues' is not key=value"),
            ("file=a,queues=0", "1 to 256"),
            ("file=a,queue-size=100", "power of two"),
            ("file=a,queue-size=2048", "power of two"),
            ("file=a,file=b", "given twice"),
            ("file=a,cache=fast", "none, writeback"),
            ("file=a,discard=on", "unmap, ignore"),
            ("file=a,detect-zeroes=yes", "off, on, unmap"),
            ("file=a,logical-block-size=1024", "neither 512 nor 4096"),
            ("file=a,readonly=yes", "neither on nor off"),
            ("file=a,name=9", "not a letter"),
            ("file=a,serial=123456789012345678901", "20 ASCII"),
            ("null:1000", "no whole sectors"),
            ("null:", "no size"),
            ("a,iops=1,iops_rd=1", "exclude each other"),
            ("a,iops-max=5", "needs a limit"),
            ("a,queues=2,3", "'3' is not key=value"),
            ("file=a,aio=epoll", "auto, io_uring, native, threads"),
            ("file=a,format=vmdk", "not a format"),
        ] {
            let error = parse(spec).unwrap_err().to_string();
            assert!(error.contains(says), "{spec}: {error}");
        }
    }

    /// What fuzzing starts from, and what it has found.
    #[test]
    fn fuzzing_seeds_are_sound() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/disk_spec");
        let mut sound = 0;
        for file in std::fs::read_dir(seeds).unwrap() {
            let bytes = std::fs::read(file.unwrap().path()).unwrap();
            if let Ok(disk) = parse(&String::from_utf8_lossy(&bytes)) {
                disk.assert_sound();
                sound += 1;
            }
        }
        assert!(sound >= 3);
    }

    proptest! {
        #[test]
        fn no_text_panics(spec in "([a-z-]{1,10}=)?.{0,80}(,[a-z-]{1,10}=.{0,20}){0,3}") {
            if let Ok(disk) = parse(&spec) {
                disk.assert_sound();
                prop_assert_eq!(parse(&disk.to_string()), Ok(disk));
            }
        }

        #[test]
        fn any_path_can_be_written(path in "[^\0]{1,60}") {
            let spec = format!("file={},format=raw", path.replace(',', ",,"));
            prop_assume!(!path.starts_with("null:"));
            prop_assert_eq!(parse(&spec).unwrap().file, FileSpec::Path(path.into()));
        }
    }
}
