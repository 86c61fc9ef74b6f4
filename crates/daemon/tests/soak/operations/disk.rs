//! One of the disks: its expected state, and its guest.

use std::path::{Path, PathBuf};

use testkit::load::BlockContent;
use testkit::qemu_img;

use super::super::driver::{Driver, Guest};

pub const MIB: u64 = 1 << 20;
pub const SIZE: u64 = 8 * MIB;
pub const SIZE_MAX: u64 = 32 * MIB;

/// Where the disk is configured, if at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    CommandLine,
    Config,
    Command,
}

/// For each disk: whether it is an image, its origin, its options, and whether its rings are packed.
const KINDS: [(bool, Origin, &str, bool); super::steps::DISKS] = [
    (false, Origin::CommandLine, "cache=none", false),
    (true, Origin::CommandLine, "cache=none", true),
    (
        false,
        Origin::CommandLine,
        "cache=writeback,aio=threads",
        false,
    ),
    (false, Origin::Config, "cache=none", false),
    (true, Origin::Config, "cache=writethrough", false),
    (false, Origin::Config, "cache=none", true),
    (false, Origin::Config, "cache=writeback", false),
    (true, Origin::Command, "cache=none", false),
    (false, Origin::Command, "cache=none,aio=native", false),
    (true, Origin::Command, "cache=writeback", false),
];

/// The disk's entry in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub file: PathBuf,
    pub qcow2: bool,
    pub iops: u32,
    pub group: bool,
    pub serial: u32,
    pub socket: PathBuf,
}

impl Entry {
    /// Whether a change to `new` disconnects the VM.
    pub fn is_cut_by(&self, new: &Self) -> bool {
        (self.serial, &self.socket) != (new.serial, &new.socket)
    }

    pub fn has_file_of(&self, other: &Self) -> bool {
        (&self.file, self.qcow2) == (&other.file, other.qcow2)
    }
}

pub struct Disk {
    pub name: String,
    pub options: &'static str,
    pub origin: Origin,
    pub entry: Option<Entry>,
    /// Its file and all backing files.
    pub files: Vec<PathBuf>,
    pub qcow2: bool,
    pub size: u64,
    pub iops: u32,
    pub group: bool,
    pub socket: PathBuf,
    pub attached: bool,
    /// Its VM runs.
    pub working: bool,
    /// Its requests may fail.
    pub may_fail: bool,
    /// The process was killed: an image may have leaked clusters.
    pub killed: bool,
    pub driver: Driver,
}

impl Disk {
    /// Creates the file of a disk in this directory, and its guest.
    pub fn make(directory: &Path, sockets: &Path, number: usize) -> Self {
        let (qcow2, origin, options, packed) = KINDS[number];
        let name = format!("d{number}");
        let file = directory.join(format!("{name}.{}", format(qcow2)));
        let create = format!("create -q -f {} {} {SIZE}", format(qcow2), file.display());
        qemu_img::img(directory, &create);
        let socket = sockets.join(format!("{name}.sock"));
        let entry = (origin == Origin::Config).then(|| Entry {
            file: file.clone(),
            qcow2,
            iops: 0,
            group: false,
            serial: 0,
            socket: socket.clone(),
        });
        let driver = Driver::start(Guest {
            socket: socket.clone(),
            held: BlockContent::Zeroes,
            packed,
            seed: number as u64,
            blocks: 128,
            pause_us: 20_000,
        });
        Self {
            name,
            options,
            origin,
            entry,
            files: vec![file],
            qcow2,
            size: SIZE,
            iops: 0,
            group: false,
            socket,
            attached: origin != Origin::Command,
            working: false,
            may_fail: false,
            killed: false,
            driver,
        }
    }

    pub fn file(&self) -> &Path {
        self.files.last().expect("a disk has a file")
    }

    /// The argument of `attach`.
    pub fn argument(&self) -> String {
        format!(
            "file={},name={},format={},socket={},queues=2,queue-size=64,{}",
            self.file().display(),
            self.name,
            format(self.qcow2),
            self.socket.display(),
            self.options
        )
    }

    /// Its section in a configuration.
    pub fn section(&self, entry: &Entry) -> String {
        let mut text = format!(
            "[[disk]]\nname = \"{}\"\nfile = \"{}\"\nformat = \"{}\"\nsocket = \"{}\"\nqueues = 2\nqueue-size = 64\n",
            self.name,
            entry.file.display(),
            format(entry.qcow2),
            entry.socket.display()
        );
        for option in self.options.split(',') {
            let (key, value) = option.split_once('=').expect("key=value");
            text += &format!("{key} = \"{value}\"\n");
        }
        if entry.serial > 0 {
            text += &format!("serial = \"{}\"\n", entry.serial);
        }
        if entry.iops > 0 {
            text += &format!("iops = {}\n", entry.iops);
        }
        if entry.group {
            text += "throttle-group = \"group\"\n";
        }
        text
    }
}

pub fn format(qcow2: bool) -> &'static str {
    if qcow2 { "qcow2" } else { "raw" }
}
