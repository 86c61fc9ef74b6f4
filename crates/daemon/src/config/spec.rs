//! A disk as the operator configures it.

use std::fmt::{self, Display};
use std::path::PathBuf;

use block::{Aio, CacheMode, DetectZeroes, Discard, OnError, ThrottleError, ThrottleLimits};
use image::Format;
use rbd::Location;
use thiserror::Error;

const QUEUE_SIZE_DEFAULT: u16 = 256;

/// A disk to be served. [`DISK_KEYS`](super::disk_keys::DISK_KEYS) says how each field is written and what it means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    pub name: String,
    pub file: FileSpec,
    /// None if it follows from the file.
    pub format: Option<Format>,
    /// The external data file of a qcow2 image.
    pub data_file: Option<PathBuf>,
    /// None if it follows from the name.
    pub socket: Option<PathBuf>,
    pub socket_access: SocketAccess,
    pub cache: CacheMode,
    pub aio: Aio,
    /// None for the number that the [server](crate::server::Server) decides once for the disk.
    pub queues: Option<u16>,
    pub queue_size: u16,
    pub read_only: bool,
    pub serial: String,
    pub labels: Labels,
    pub discard: Discard,
    pub detect_zeroes: DetectZeroes,
    /// The error policy for reads.
    pub rerror: OnError,
    /// The error policy for requests that change the disk, and for flushes.
    pub werror: OnError,
    /// Memory for the tables of an image; none for as much as they need, up to 1 GiB.
    pub l2_cache_bytes: Option<u64>,
    /// In bytes; none for that of the storage.
    pub logical_block: Option<u32>,
    /// In bytes; none for that of the storage.
    pub physical_block: Option<u32>,
    pub fixed_buffers: bool,
    pub lock: Lock,
    /// Ids or numbers of the I/O threads that serve the queues in turn; none for the next ones of the pool.
    pub iothreads: Vec<String>,
    pub limits: ThrottleLimits,
    /// The group of disks whose limits this disk shares.
    pub throttle_group: Option<String>,
}

/// When the files of a writable disk are locked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lock {
    /// While the disk is served, except while its VM moves to another host.
    #[default]
    Always,
    /// While a VM runs on the disk.
    Running,
}

/// What statistics call a disk beside its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// The libvirt domain that has the disk. Unless a configuration has it as well, it belongs to the domain, and is detached
    /// when that ends.
    pub domain: Option<String>,
    /// Its name there.
    pub target: Option<String>,
}

/// Who may connect to a socket. What is absent is as for any file that ringdisk creates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    pub mode: Option<u32>,
    pub group: Option<u32>,
    pub owner: Option<u32>,
}

/// Where a disk's data is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileSpec {
    Path(PathBuf),
    /// An image in a Ceph cluster.
    Rbd(Box<Location>),
    /// Nowhere: requests complete at once. The disk has this size in bytes.
    Null(u64),
}

/// The keys of a disk that say on which files it is. They are compared, kept and changed together.
#[derive(PartialEq)]
struct Files<'a> {
    file: &'a FileSpec,
    format: Option<Format>,
    data_file: Option<&'a PathBuf>,
}

/// A mistake in a disk.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("disk '{disk}': {problem}")]
pub struct SpecError {
    /// The disk as the operator wrote it.
    pub disk: String,
    pub problem: Problem,
}

#[derive(Debug, Error, PartialEq, Eq)]
pub enum Problem {
    #[error("'{0}' is not key=value; a comma inside a value is doubled, as in a,,b.raw")]
    NoValue(String),
    /// A key that does not exist, and all that do.
    #[error("there is no option '{0}'; there are {all}", all = .1.join(", "))]
    UnknownKey(String, Vec<&'static str>),
    #[error("{0} is given twice")]
    Twice(&'static str),
    #[error("{0}: {1}")]
    Value(&'static str, String),
    /// The limits contradict each other.
    #[error(transparent)]
    Limits(#[from] ThrottleError),
    #[error("no file; write its path, as in 'vm1.raw' or 'file=/dev/vg0/vm1'")]
    NoFile,
}

impl Problem {
    /// The key with the mistake.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::UnknownKey(key, _) => Some(key),
            Self::Twice(key) | Self::Value(key, _) => Some(key),
            Self::Limits(error) => Some(crate::config::limits::key_of(error)),
            Self::NoValue(_) | Self::NoFile => None,
        }
    }
}

impl DiskSpec {
    /// A disk on this file, with the default of every other key.
    pub fn new(name: String, file: FileSpec) -> Self {
        Self {
            name,
            file,
            format: None,
            data_file: None,
            socket: None,
            socket_access: SocketAccess::default(),
            cache: CacheMode::None,
            aio: Aio::Auto,
            queues: None,
            queue_size: QUEUE_SIZE_DEFAULT,
            read_only: false,
            serial: String::new(),
            labels: Labels::default(),
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

    /// Whether the disk is a snapshot in a Ceph cluster.
    pub fn is_snapshot(&self) -> bool {
        matches!(&self.file, FileSpec::Rbd(location) if location.snapshot.is_some())
    }

    /// Checks that a disk in a Ceph cluster asks only for what is possible there.
    ///
    /// # Errors
    /// It asks for something else; the message says what to do instead.
    pub fn check_rbd(&self) -> Result<(), Problem> {
        let FileSpec::Rbd(location) = &self.file else {
            return Ok(());
        };
        let image = location.image_spec();
        if self.format == Some(Format::Qcow2) {
            let problem = format!(
                "qcow2 inside {image} would add tables, snapshots and a backing file to an image that has all of these \
                 itself, and a second I/O to many requests; make a copy that shares the image's data ('rbd snap create \
                 {image}@base', 'rbd clone {image}@base {image}-copy') and serve that, or convert a qcow2 file with \
                 'qemu-img convert -O raw FILE rbd:{image}'"
            );
            return Err(Problem::Value("format", problem));
        }
        if self.aio != Aio::Auto {
            let problem = "is for files; librbd moves the bytes of an image in a Ceph cluster";
            return Err(Problem::Value("aio", problem.into()));
        }
        Ok(())
    }

    /// The disk on another file, in the given format. If none is given, it follows from the file's name. If that does
    /// not say, the file is raw if raw was configured for the previous one. An image in a Ceph cluster is reached like
    /// the previous image unless it says otherwise; `aio` does not apply to it and is reset.
    ///
    /// # Errors
    /// The previous file was configured as qcow2, and neither format nor name says what the other file is. A guest may
    /// have written an image into it, and would choose which files of the host are opened.
    pub fn moved(&self, file: FileSpec, format: Option<Format>) -> Result<Self, Problem> {
        let format = match (&file, format, self.format) {
            (_, Some(given), _) => Some(given),
            (_, None, None) => None,
            (FileSpec::Path(path), None, Some(before)) => match (Format::of_name(path), before) {
                (Some(named), _) => Some(named),
                (None, Format::Raw) => Some(Format::Raw),
                (None, Format::Qcow2) => {
                    let problem = format!(
                        "the name of {} does not say, and the file need not be qcow2 like the previous one; say \
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
            data_file: None,
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

    fn files(&self) -> Files<'_> {
        Files {
            file: &self.file,
            format: self.format,
            data_file: self.data_file.as_ref(),
        }
    }

    fn set_files(&mut self, files: Files<'_>) {
        let Files {
            file,
            format,
            data_file,
        } = files;
        self.file = file.clone();
        self.format = format;
        self.data_file = data_file.cloned();
    }

    /// Whether both are configured with the same files and format.
    pub fn has_file_of(&self, other: &Self) -> bool {
        self.files() == other.files()
    }

    /// This disk on the file of another, in its format.
    pub fn with_file_of(&self, other: &Self) -> Self {
        let mut disk = self.clone();
        disk.set_files(other.files());
        if matches!(other.file, FileSpec::Rbd(_)) {
            disk.aio = other.aio;
        }
        disk
    }

    /// Whether both are configured with the same limits.
    pub fn has_limits_of(&self, other: &Self) -> bool {
        (&self.limits, &self.throttle_group) == (&other.limits, &other.throttle_group)
    }

    /// This disk, as it is configured now, with the changes that commands made while `before` was configured: the file
    /// and the limits of `now`, each unless its configuration has changed since.
    pub fn with_overrides(&self, before: &Self, now: &Self) -> Self {
        let mut disk = if before.has_file_of(self) {
            self.with_file_of(now)
        } else {
            self.clone()
        };
        if before.has_limits_of(self) {
            disk.limits = now.limits;
            disk.throttle_group = now.throttle_group.clone();
        }
        disk
    }

    /// Moves this disk to the file of another.
    pub fn take_file_of(&mut self, other: &Self) {
        self.set_files(other.files());
        self.aio = other.aio;
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

/// A name by QEMU's rule for ids, so that it can be used as one.
///
/// # Errors
/// The text breaks the rule.
pub fn name(text: &str) -> Result<String, String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    if text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(good)
        && text.len() <= 64
    {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "'{text}' is not a letter followed by letters, digits, '-', '.' or '_', 64 at most"
        ))
    }
}
