//! A VM's storage configuration.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::backing::Backing;
use super::ceph::{self, Ceph};
use super::cpu_model::CpuModel;
use super::cpus::{self, Pinning};
use super::host_queue::{self, HostQueue};
use super::image::{self, Image};
use super::units::{default_or, number, on_off, size, size_text, switch};
use super::words::{
    Aio, Cache, Client, Device, FileSystem, Format, Machine, RingKind, Scheduler, Syntax,
    not_one_of,
};

/// Limits: guests that one host boots, virtual CPUs of a guest, and volumes that one server opens.
const GUESTS_MAX: u16 = 256;
const VOLUMES_MAX: u16 = 4096;
const VCPUS_MAX: u16 = 256;

/// One configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// The guest's device.
    pub device: Device,
    /// The server of a vhost-user-blk disk.
    pub server: Server,
    /// QEMU's cache mode.
    pub cache: Cache,
    /// The host's I/O interface; `None` leaves the choice to the server.
    pub aio: Option<Aio>,
    /// Threads for the disk's I/O.
    pub iothread: IoThread,
    /// The number of virtqueues; `None` is the front-end's default.
    pub queues: Option<u16>,
    /// The size of a virtqueue; `None` is the front-end's default.
    pub queue_size: Option<u16>,
    /// The image's format.
    pub format: Format,
    /// Where the bytes are.
    pub backing: Backing,
    /// How images in a Ceph cluster are reached.
    pub ceph: Ceph,
    /// Whether images in a Ceph cluster are block devices of the kernel's client.
    pub krbd: bool,
    /// Whether what is thin is filled before the first sample.
    pub prefill: bool,
    /// The layout of an image that the lab creates.
    pub image: Image,
    /// The machine type.
    pub machine: Machine,
    /// Whether the guest's memory uses huge pages.
    pub hugepages: bool,
    /// The model of the virtual CPUs; `None` is the best one.
    pub cpu: Option<CpuModel>,
    /// Virtual CPUs.
    pub vcpus: u16,
    /// The guest's memory, in MiB.
    pub memory_mib: u64,
    /// The guest's I/O scheduler.
    pub scheduler: Scheduler,
    /// The file system in the guest, on which the load's file is.
    pub file_system: FileSystem,
    /// The number of guests at the same time.
    pub guests: u16,
    /// The number of disks of each guest.
    pub volumes: u16,
    /// The option that describes the disk on QEMU's command line.
    pub syntax: Syntax,
    /// The driver of a vhost-user socket, without a guest.
    pub client: Client,
    /// The kind of virtqueues that the driver requests, without a guest.
    pub ring: RingKind,
    /// The longest time in microseconds that a server, or an I/O thread of QEMU, polls before it sleeps; `None` is its
    /// default.
    pub poll_max_us: Option<u32>,
    /// Whether ringdisk registers the guest's memory with the kernel.
    pub fixed_buffers: bool,
    /// The limit of each disk in requests per second; `None` is no limit.
    pub iops: Option<u32>,
    /// The number of disks with I/O, without a guest; `None` is all.
    pub active: Option<u16>,
    /// The reads in flight on an additional disk of the server, without a guest; `None` is no such disk.
    pub neighbour: Option<u16>,
    /// The CPUs on which threads run.
    pub pinning: Pinning,
    /// The queue of the host's block device below the disk.
    pub host_queue: HostQueue,
    /// Another QEMU.
    pub qemu: Option<PathBuf>,
    /// A library to preload, such as another malloc, into the program that opens the disks: QEMU, a server, or fio on the host.
    pub preload: Option<PathBuf>,
}

/// The server of a vhost-user-blk disk.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Server {
    /// The ringdisk that is measured.
    Ringdisk,
    /// Another build of ringdisk, to compare with.
    Build(PathBuf),
    /// QEMU's own daemon.
    QemuStorageDaemon,
    /// Any server that listens at this socket.
    Socket(PathBuf),
}

/// Threads for a disk's I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoThread {
    /// QEMU's main loop, or a server's default.
    Off,
    /// One thread.
    One,
    /// The queues are spread over this number of threads (`iothread-vq-mapping`).
    Mapping(u16),
}

/// The keys, in the order of messages.
pub const KEYS: [&str; 42] = [
    "device",
    "server",
    "cache",
    "aio",
    "iothread",
    "queues",
    "queue-size",
    "format",
    "backing",
    "ceph-conf",
    "ceph-user",
    "ceph-keyring",
    "ceph-options",
    "krbd",
    "prefill",
    "cluster-size",
    "extended-l2",
    "backing-files",
    "machine",
    "hugepages",
    "cpu",
    "vcpus",
    "memory",
    "scheduler",
    "file-system",
    "host-scheduler",
    "host-read-ahead",
    "guests",
    "volumes",
    "syntax",
    "client",
    "ring",
    "poll-max-us",
    "fixed-buffers",
    "iops",
    "active",
    "neighbour",
    "vcpu-cpus",
    "server-cpus",
    "load-cpus",
    "qemu",
    "preload",
];

/// The keys that need a load without a guest.
pub const WITHOUT_GUEST: [&str; 3] = ["active", "neighbour", "load-cpus"];

/// The keys that need a guest.
pub const OF_GUESTS: [&str; 10] = [
    "machine",
    "hugepages",
    "cpu",
    "vcpus",
    "vcpu-cpus",
    "memory",
    "scheduler",
    "file-system",
    "guests",
    "qemu",
];

impl Default for Settings {
    fn default() -> Self {
        Self {
            device: Device::VirtioBlk,
            server: Server::Ringdisk,
            cache: Cache::None,
            aio: None,
            iothread: IoThread::Off,
            queues: None,
            queue_size: None,
            format: Format::Raw,
            backing: Backing::File,
            ceph: Ceph::default(),
            krbd: false,
            prefill: true,
            image: Image::default(),
            machine: Machine::Q35,
            hugepages: false,
            cpu: None,
            vcpus: 1,
            memory_mib: 512,
            scheduler: Scheduler::Default,
            file_system: FileSystem::None,
            guests: 1,
            volumes: 1,
            syntax: Syntax::Blockdev,
            client: Client::Blkio,
            ring: RingKind::Split,
            poll_max_us: None,
            fixed_buffers: false,
            iops: None,
            active: None,
            neighbour: None,
            pinning: Pinning::default(),
            host_queue: HostQueue::default(),
            qemu: None,
            preload: None,
        }
    }
}

impl Settings {
    /// Sets the value of `key`, one of [`KEYS`].
    ///
    /// # Errors
    /// The value is invalid; the message says what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "device" => self.device = value.parse()?,
            "server" => self.server = value.parse()?,
            "cache" => self.cache = value.parse()?,
            "aio" => self.aio = default_or(value, Aio::from_str)?,
            "iothread" => self.iothread = value.parse()?,
            "queues" => self.queues = default_or(value, |v| number(v, 1, 1024))?,
            "queue-size" => {
                self.queue_size = default_or(value, |v| number(v, 2, 1024))?;
                if self.queue_size.is_some_and(|n| !n.is_power_of_two()) {
                    return Err(format!("{value} is not a power of two"));
                }
            }
            "format" => self.format = value.parse()?,
            "backing" => self.backing = value.parse()?,
            "ceph-conf" => self.ceph.conf = path(value)?,
            "ceph-user" => self.ceph.user = default_or(value, ceph::user)?,
            "ceph-keyring" => self.ceph.keyring = path(value)?,
            "ceph-options" => {
                self.ceph.options = default_or(value, ceph::options)?.unwrap_or_default()
            }
            "krbd" => self.krbd = switch(value)?,
            "prefill" => self.prefill = switch(value)?,
            "machine" => self.machine = value.parse()?,
            "hugepages" => self.hugepages = switch(value)?,
            "cpu" => self.cpu = default_or(value, CpuModel::from_str)?,
            "vcpus" => self.vcpus = number(value, 1, VCPUS_MAX)?,
            "memory" => {
                self.memory_mib = size(value)? >> 20;
                if !(256..=1 << 20).contains(&self.memory_mib) {
                    return Err(format!("'{value}' is not between 256M and 1T"));
                }
            }
            "scheduler" => self.scheduler = value.parse()?,
            "file-system" => self.file_system = value.parse()?,
            "guests" => self.guests = number(value, 1, GUESTS_MAX)?,
            "volumes" => self.volumes = number(value, 1, VOLUMES_MAX)?,
            "syntax" => self.syntax = value.parse()?,
            "client" => self.client = value.parse()?,
            "ring" => self.ring = value.parse()?,
            "poll-max-us" => self.poll_max_us = default_or(value, |v| number(v, 0, 1_000_000))?,
            "fixed-buffers" => self.fixed_buffers = switch(value)?,
            "iops" => self.iops = default_or(value, |v| number(v, 1, 100_000_000))?,
            "active" => self.active = default_or(value, |v| number(v, 1, VOLUMES_MAX))?,
            "neighbour" => {
                self.neighbour = match value {
                    "off" => None,
                    _ => Some(number(value, 1, 1024).map_err(|e| e + ", nor off")?),
                }
            }
            _ if cpus::KEYS.contains(&key) => self.pinning.set(key, value)?,
            _ if host_queue::KEYS.contains(&key) => self.host_queue.set(key, value)?,
            _ if image::KEYS.contains(&key) => self.image.set(key, value)?,
            "qemu" => self.qemu = path(value)?,
            "preload" => self.preload = path(value)?,
            _ => return Err(not_one_of(key, &KEYS)),
        }
        Ok(())
    }

    /// The value of `key`, one of [`KEYS`], as a plan writes it; `-` if it does not apply to this configuration.
    pub fn get(&self, key: &str) -> String {
        match self.has(key) {
            true => self.value(key),
            false => "-".into(),
        }
    }

    /// The value of a key, whether or not it applies.
    pub fn value(&self, key: &str) -> String {
        let or_default = |value: Option<String>| value.unwrap_or_else(|| "default".into());
        let number = |value: Option<u16>| or_default(value.map(|n| n.to_string()));
        let path =
            |value: &Option<PathBuf>| or_default(value.as_ref().map(|p| p.display().to_string()));
        match key {
            "device" => self.device.to_string(),
            "server" => self.server.to_string(),
            "cache" => self.cache.to_string(),
            "aio" => or_default(self.aio.map(|aio| aio.to_string())),
            "iothread" => self.iothread.to_string(),
            "queues" => number(self.queues),
            "queue-size" => number(self.queue_size),
            "format" => self.format.to_string(),
            "backing" => self.backing.to_string(),
            "ceph-conf" => path(&self.ceph.conf),
            "ceph-user" => or_default(self.ceph.user.clone()),
            "ceph-keyring" => path(&self.ceph.keyring),
            "ceph-options" => or_default(self.ceph.options_text()),
            "krbd" => on_off(self.krbd),
            "prefill" => on_off(self.prefill),
            "machine" => self.machine.to_string(),
            "hugepages" => on_off(self.hugepages),
            "cpu" => or_default(self.cpu.as_ref().map(CpuModel::to_string)),
            "vcpus" => self.vcpus.to_string(),
            "memory" => size_text(self.memory_mib << 20),
            "scheduler" => self.scheduler.to_string(),
            "file-system" => self.file_system.to_string(),
            "guests" => self.guests.to_string(),
            "volumes" => self.volumes.to_string(),
            "syntax" => self.syntax.to_string(),
            "client" => self.client.to_string(),
            "ring" => self.ring.to_string(),
            "poll-max-us" => or_default(self.poll_max_us.map(|us| us.to_string())),
            "fixed-buffers" => on_off(self.fixed_buffers),
            "iops" => or_default(self.iops.map(|iops| iops.to_string())),
            "active" => number(self.active),
            "neighbour" => self
                .neighbour
                .map_or_else(|| "off".into(), |depth| depth.to_string()),
            _ if cpus::KEYS.contains(&key) => self.pinning.value(key),
            _ if host_queue::KEYS.contains(&key) => self.host_queue.value(key),
            _ if image::KEYS.contains(&key) => self.image.value(key),
            "qemu" => path(&self.qemu),
            "preload" => path(&self.preload),
            _ => "-".into(),
        }
    }

    /// Whether a setting applies to this configuration. Others are ignored in comparisons.
    fn has(&self, key: &str) -> bool {
        let guest = self.device != Device::Host;
        let vhost = self.device == Device::VhostUserBlk;
        let socket = !self.opens_disks();
        let null = self.backing == Backing::Null;
        match key {
            "server" => vhost,
            "client" => vhost,
            "ring" => vhost && self.client != Client::Blkio,
            "iops" => vhost && !socket,
            "poll-max-us" | "server-cpus" => vhost && !socket || self.has_iothreads(),
            "host-scheduler" | "host-read-ahead" => {
                !socket && !null && self.backing != Backing::Ram && !self.is_librbd()
            }
            "fixed-buffers" => vhost && matches!(self.server, Server::Ringdisk | Server::Build(_)),
            "cache" => !socket && !null,
            "aio" => !socket && !null && !self.is_librbd(),
            "iothread" => guest && !socket && self.device != Device::Ide,
            "queues" | "queue-size" => guest && self.device != Device::Ide,
            "format" | "backing" => !socket,
            "ceph-conf" | "ceph-user" | "ceph-keyring" | "ceph-options" | "krbd" => {
                !socket && self.backing.is_rbd()
            }
            "prefill" => !socket && !null,
            "preload" => !socket,
            "cluster-size" | "extended-l2" => {
                !socket && self.backing.is_own() && self.format == Format::Qcow2
            }
            "backing-files" => self.device != Device::Host && self.has("cluster-size"),
            _ if WITHOUT_GUEST.contains(&key) => vhost,
            "syntax" => guest && !vhost,
            _ if OF_GUESTS.contains(&key) => guest,
            _ => true,
        }
    }

    /// The number of backing files.
    pub fn backing_files(&self) -> u8 {
        match self.has("backing-files") {
            true => self.image.backing_files,
            false => 0,
        }
    }

    /// The settings in which two configurations differ.
    pub fn differences(&self, other: &Self) -> Vec<&'static str> {
        KEYS.into_iter()
            .filter(|key| self.differs(other, key))
            .collect()
    }

    /// A setting that only one of the configurations has, such as a setting of its server, is a difference only if the
    /// plan gives it different values. Otherwise it follows from another difference.
    fn differs(&self, other: &Self, key: &str) -> bool {
        self.get(key) != other.get(key) && self.value(key) != other.value(key)
    }

    /// Checks whether the configuration is possible.
    ///
    /// # Errors
    /// It is not; the message says what to set instead.
    pub fn check(&self) -> Result<(), String> {
        let direct = self.cache.direct();
        if self.has("aio") && self.aio == Some(Aio::Native) && !direct {
            return Err(format!(
                "aio=native needs cache=none or directsync, not {}: Linux AIO is asynchronous only with O_DIRECT",
                self.cache
            ));
        }
        if self.has_iothreads()
            && let IoThread::Mapping(threads) = self.iothread
            && self.queues.unwrap_or(self.vcpus) < threads
        {
            return Err(format!(
                "{threads} iothreads need as many queues; set queues={threads} or more vcpus"
            ));
        }
        if self.device == Device::Ide && self.machine == Machine::Q35 {
            return Err(
                "device=ide needs machine=pc: q35's disks are AHCI, which cloud kernels lack"
                    .into(),
            );
        }
        if self.device == Device::Ide && self.volumes > 4 {
            return Err("an IDE controller has at most 4 disks".into());
        }
        self.check_daemon()?;
        if self.device == Device::Host && self.backing == Backing::Null {
            return Err("the host has no null disk; use a guest, or backing=file".into());
        }
        if self.device == Device::Host && (self.format != Format::Raw || self.guests != 1) {
            return Err("the host reads raw files only, and is one".into());
        }
        if self.has("cluster-size") {
            self.image.check()?;
        }
        if self.backing_files() > 0 && !self.prefill {
            return Err(
                "backing-files are for prefilled disks: the lowest file has the data; use prefill=on"
                    .into(),
            );
        }
        if self.has("active") && self.active.is_some_and(|active| active > self.volumes) {
            return Err(format!(
                "there are {} volumes; active=N is at most that",
                self.volumes
            ));
        }
        self.check_place()?;
        if self.has("krbd") {
            self.ceph.check(self.krbd)?;
        }
        if self.is_librbd() && self.format != Format::Raw {
            return Err("an RBD image holds a raw disk here; use format=raw".into());
        }
        if self.backing == Backing::Zram && self.format != Format::Raw {
            return Err("zram holds raw disks; use format=raw".into());
        }
        if self.format == Format::Qcow2 && self.backing == Backing::Null {
            return Err("a null disk has no format; use format=raw".into());
        }
        match &self.backing {
            Backing::Named(names) if self.has("backing") => names.check(self.guests, self.volumes),
            _ => Ok(()),
        }
    }

    /// Whether a program that the lab starts opens the disks, and not a server at a socket of the user's.
    pub fn opens_disks(&self) -> bool {
        self.device != Device::VhostUserBlk || !matches!(self.server, Server::Socket(_))
    }

    /// Whether librbd opens the disks, in any program.
    pub fn is_librbd(&self) -> bool {
        self.backing.is_rbd() && !self.krbd
    }

    /// Whether QEMU has I/O threads of its own for the disks.
    pub fn has_iothreads(&self) -> bool {
        matches!(self.device, Device::VirtioBlk | Device::VirtioScsi)
            && self.iothread != IoThread::Off
    }

    /// Refuses settings of a server, a thread or a block device that the configuration does not have.
    fn check_place(&self) -> Result<(), String> {
        let plain = Settings::default();
        let is_lost = |key: &str| !self.has(key) && self.value(key) != plain.value(key);
        let pinned = self.device != Device::Host && self.opens_disks();
        for (key, whose) in [
            ("iops", "ringdisk and qemu-storage-daemon"),
            ("fixed-buffers", "ringdisk"),
            (
                "poll-max-us",
                "ringdisk, qemu-storage-daemon and QEMU's iothreads (iothread=on)",
            ),
            (
                "host-scheduler",
                "block devices, and neither RAM nor librbd has one",
            ),
            (
                "host-read-ahead",
                "block devices, and neither RAM nor librbd has one",
            ),
        ] {
            if is_lost(key) {
                return Err(format!("{key} is a setting of {whose}"));
            }
        }
        if pinned && is_lost("server-cpus") {
            return Err(
                "server-cpus are those of a server or of QEMU's iothreads; use iothread=on".into(),
            );
        }
        Ok(())
    }

    fn check_daemon(&self) -> Result<(), String> {
        if self.device != Device::VhostUserBlk || self.server != Server::QemuStorageDaemon {
            return Ok(());
        }
        if let IoThread::Mapping(threads) = self.iothread
            && self.volumes < threads
        {
            return Err(
                "qemu-storage-daemon has one iothread for a disk; use iothread=on or off, or more volumes".into(),
            );
        }
        if self.poll_max_us.is_some() && self.iothread == IoThread::Off {
            return Err(
                "poll-max-us is a setting of qemu-storage-daemon's iothreads; use iothread=on"
                    .into(),
            );
        }
        if self.ring == RingKind::Packed && self.has("ring") {
            return Err("qemu-storage-daemon has no packed rings; use ring=split".into());
        }
        Ok(())
    }

    /// The settings that differ from the defaults, such as `device=ide cache=writeback`.
    pub fn label(&self) -> String {
        let plain = Settings::default();
        let words = KEYS.into_iter().filter_map(|key| match key {
            "device" => Some(self.device.to_string()),
            "server" => self.has(key).then(|| format!("by {}", self.server)),
            _ => (self.has(key) && self.value(key) != plain.value(key))
                .then(|| format!("{key}={}", self.value(key))),
        });
        words.collect::<Vec<_>>().join(" ")
    }
}

impl FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "ringdisk" => Ok(Self::Ringdisk),
            "qemu-storage-daemon" => Ok(Self::QemuStorageDaemon),
            _ if text.starts_with('/') => Ok(Self::Socket(text.into())),
            _ => match text.strip_prefix("ringdisk:") {
                Some(path) if path.starts_with('/') => Ok(Self::Build(path.into())),
                Some(_) => Err(format!("'{text}' is not ringdisk:/PATH")),
                None => Err(not_one_of(
                    text,
                    &[
                        "ringdisk",
                        "ringdisk:/PATH",
                        "qemu-storage-daemon",
                        "/PATH/OF/A/SOCKET",
                    ],
                )),
            },
        }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ringdisk => f.write_str("ringdisk"),
            Self::Build(path) => write!(f, "ringdisk:{}", path.display()),
            Self::QemuStorageDaemon => f.write_str("qemu-storage-daemon"),
            Self::Socket(path) => write!(f, "{}", path.display()),
        }
    }
}

impl FromStr for IoThread {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" | "false" => Ok(Self::Off),
            "on" | "true" => Ok(Self::One),
            _ => number(text, 2, 64).map(Self::Mapping).map_err(|_| {
                format!("'{text}' is not off, on, or a number of threads from 2 to 64")
            }),
        }
    }
}

impl fmt::Display for IoThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::One => f.write_str("on"),
            Self::Mapping(threads) => write!(f, "{threads}"),
        }
    }
}

fn path(value: &str) -> Result<Option<PathBuf>, String> {
    match value {
        "default" => Ok(None),
        _ if value.contains(char::is_control) => {
            Err(format!("{value:?} contains control characters"))
        }
        _ if value.starts_with('/') => Ok(Some(value.into())),
        _ => Err(format!("'{value}' is neither an absolute path nor default")),
    }
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
