//! Collects facts about the host. Facts that cannot be read are left out, and rules report them as unknown.

mod cpus;
mod lvm;
mod network;
mod paths;

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use super::{FORMAT, Facts, Map};
use crate::version::Version;

/// The time limit for a program that prints its version, or the logical volumes.
const PROGRAM_TIME: Duration = Duration::from_secs(5);

/// Collects facts about this host and about the storage at these paths.
pub fn collect(files: &[String]) -> Facts {
    let root = Host { root: "/".into() };
    let mut facts = root.facts();
    root.programs(&mut facts.host);
    root.add_path_groups(&mut facts);
    let volumes = lvm::volumes();
    for file in files {
        let map = root.file(file, &volumes);
        if !map.is_empty() {
            facts.files.insert(file.clone(), map);
        }
    }
    facts
}

/// Identifies this host in results of `ringdisk lab`.
pub fn fingerprint() -> String {
    let host = Host { root: "/".into() };
    host.fingerprint(&host.text("/proc/cpuinfo").unwrap_or_default())
}

/// A host whose /proc, /sys and /etc are below a directory.
pub struct Host {
    /// `/`, or another in tests.
    pub root: PathBuf,
}

impl Host {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn text(&self, path: &str) -> Option<String> {
        let file = fs::File::open(self.path(path)).ok()?;
        let mut text = String::new();
        file.take(1 << 20).read_to_string(&mut text).ok()?;
        Some(text.trim().to_owned())
    }

    fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// The word in brackets, as in `always [madvise] never`.
    fn chosen(&self, path: &str) -> Option<String> {
        let text = self.text(path)?;
        let inside = text
            .split_once('[')
            .and_then(|(_, rest)| rest.split_once(']'));
        Some(inside.map_or(text.clone(), |(word, _)| word.to_owned()))
    }

    /// The facts that need no other program.
    pub fn facts(&self) -> Facts {
        let cpuinfo = self.text("/proc/cpuinfo").unwrap_or_default();
        let mut host = Map::new();
        self.system(&cpuinfo, &mut host);
        self.memory(&mut host);
        self.settings(&mut host);
        self.nfs(&mut host);
        Facts {
            format: FORMAT.into(),
            name: self.text("/proc/sys/kernel/hostname").unwrap_or_default(),
            fingerprint: self.fingerprint(&cpuinfo),
            host,
            ceph: self.ceph(),
            devices: self.devices(),
            ..Facts::default()
        }
    }

    /// Hardware, kernel and libraries.
    fn system(&self, cpuinfo: &str, host: &mut Map) {
        let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
        let is_guest = flags.map(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"));
        put(host, "guest", is_guest);
        put(host, "kernel", self.text("/proc/sys/kernel/osrelease"));
        put(host, "arch", Some(std::env::consts::ARCH));
        let os = self.text("/etc/os-release").map(|text| {
            let value = |key: &str| {
                let line = text
                    .lines()
                    .find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
                line.unwrap_or_default().trim_matches('"').to_owned()
            };
            let both = format!("{} {}", value("ID"), value("VERSION_ID"));
            both.trim().to_owned()
        });
        put(host, "os", os);
        let cpus = cpuinfo.lines().filter(|line| line.starts_with("processor"));
        let cpus = cpus.count();
        put(host, "cpus", Some(cpus));
        self.add_running(cpus, host);
        let nodes = self.count("/sys/devices/system/node", "node");
        put(host, "numa-nodes", nodes);
        put(host, "zfs", self.text("/sys/module/zfs/version"));
        put(host, "librbd", self.librbd());
    }

    fn memory(&self, host: &mut Map) {
        let huge_pages = "/sys/kernel/mm/transparent_hugepage";
        put(host, "thp", self.chosen(&format!("{huge_pages}/enabled")));
        let shmem = self.chosen(&format!("{huge_pages}/shmem_enabled"));
        put(host, "shmem-thp", shmem);
        put(host, "hugepages-bytes", self.hugepages());
        let meminfo = self.text("/proc/meminfo").unwrap_or_default();
        let bytes = |key: &str| {
            let line = meminfo
                .lines()
                .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            let kib = line?.split_whitespace().next()?.parse::<u64>().ok()?;
            Some(kib << 10)
        };
        put(host, "memory", bytes("MemTotal"));
        let swap = bytes("SwapTotal").zip(bytes("SwapFree"));
        let used = swap.map(|(total, free)| total.saturating_sub(free));
        put(host, "swap-used", used);
        put(host, "ksm", self.flag("/sys/kernel/mm/ksm/run"));
    }

    /// Settings of the kernel.
    fn settings(&self, host: &mut Map) {
        put(host, "io-uring", self.io_uring());
        let cpu = "/sys/devices/system/cpu";
        let governor = self.text(&format!("{cpu}/cpu0/cpufreq/scaling_governor"));
        put(host, "governor", governor);
        let cpuidle = self.text(&format!("{cpu}/cpuidle/current_governor"));
        put(host, "cpuidle", cpuidle);
        let halt_poll = self.number("/sys/module/kvm/parameters/halt_poll_ns");
        put(host, "halt-poll-ns", halt_poll);
        let clock = self.text("/sys/devices/system/clocksource/clocksource0/current_clocksource");
        put(host, "clocksource", clock);
        let accounting = self.flag("/proc/sys/kernel/task_delayacct");
        put(host, "delay-accounting", accounting);
        let command_line = self.text("/proc/cmdline").unwrap_or_default();
        let mut words = command_line.split_whitespace();
        let use_bio = words.any(|word| word == "virtio_blk.use_bio=1");
        put(host, "use-bio", Some(use_bio));
    }

    fn nfs(&self, host: &mut Map) {
        let threads = self.number("/proc/fs/nfsd/threads");
        put(host, "nfsd-threads", threads);
        let exports = self.text("/etc/exports").unwrap_or_default();
        let mut exports = exports
            .lines()
            .filter(|line| !line.trim_start().starts_with('#') && line.contains('('))
            .peekable();
        if exports.peek().is_some() {
            let delays = |line: &str| !line.contains("no_wdelay") && !line.contains("async");
            put(host, "nfs-wdelay", Some(exports.any(delays)));
        }
    }

    fn flag(&self, path: &str) -> Option<bool> {
        self.text(path).map(|text| text == "1")
    }

    /// Identifies the host by its name and its processor.
    fn fingerprint(&self, cpuinfo: &str) -> String {
        let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
        let model = model
            .and_then(|line| line.split_once(':'))
            .map_or("unknown", |(_, model)| model.trim());
        let host = self.text("/proc/sys/kernel/hostname").unwrap_or_default();
        format!("{host} / {model}")
    }

    fn io_uring(&self) -> Option<&'static str> {
        match self.number("/proc/sys/kernel/io_uring_disabled") {
            Some(2) => Some("off"),
            Some(1) => Some("root"),
            Some(_) => Some("on"),
            // Linux 6.6 added the setting, and 5.1 io_uring.
            None => {
                let kernel: Version = self.text("/proc/sys/kernel/osrelease")?.parse().ok()?;
                Some(if kernel >= Version(5, 1, 0) {
                    "on"
                } else {
                    "off"
                })
            }
        }
    }

    fn hugepages(&self) -> Option<u64> {
        let directory = fs::read_dir(self.path("/sys/kernel/mm/hugepages")).ok()?;
        let mut bytes = 0u64;
        for entry in directory.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let kib = name
                .strip_prefix("hugepages-")
                .and_then(|rest| rest.strip_suffix("kB")?.parse::<u64>().ok());
            let count = self.number(&format!("/sys/kernel/mm/hugepages/{name}/nr_hugepages"));
            bytes = bytes.saturating_add(
                kib.unwrap_or(0)
                    .saturating_mul(1024)
                    .saturating_mul(count.unwrap_or(0)),
            );
        }
        Some(bytes)
    }

    fn count(&self, directory: &str, prefix: &str) -> Option<usize> {
        let names = fs::read_dir(self.path(directory)).ok()?.flatten();
        let is = |name: &str| {
            name.strip_prefix(prefix)
                .is_some_and(|rest| rest.parse::<u32>().is_ok())
        };
        Some(
            names
                .filter(|entry| is(&entry.file_name().to_string_lossy()))
                .count(),
        )
    }

    /// The release of librbd from dpkg's database ([`programs`](Self::programs) asks rpm). File names have only the version
    /// of its interface.
    fn librbd(&self) -> Option<String> {
        let status = self.text_long("/var/lib/dpkg/status")?;
        let (_, package) = status.split_once("Package: librbd1\n")?;
        let version = package
            .lines()
            .take_while(|line| !line.is_empty())
            .find_map(|line| line.strip_prefix("Version: "))?;
        Some(version.rsplit(':').next().unwrap_or(version).to_owned())
    }

    fn text_long(&self, path: &str) -> Option<String> {
        let file = fs::File::open(self.path(path)).ok()?;
        let mut bytes = Vec::new();
        file.take(64 << 20).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn ceph(&self) -> Map {
        let mut map = Map::new();
        let Some(text) = self
            .text("/etc/ceph/ceph.conf")
            .or_else(|| self.text("/etc/pve/ceph.conf"))
        else {
            return map;
        };
        map.insert("msgr-threads".into(), json!(3));
        for line in text.lines() {
            let Some((key, value)) = line.split_once('=') else {
                continue;
            };
            let key = key.trim().replace([' ', '-'], "_");
            let value = value.trim();
            match key.as_str() {
                "rbd_cache" => map.insert(
                    "rbd-cache".into(),
                    json!(matches!(value, "true" | "1" | "yes" | "on")),
                ),
                "ms_client_mode" => map.insert(
                    "ms-mode".into(),
                    json!(value.split_whitespace().next().unwrap_or(value)),
                ),
                "ms_async_op_threads" => value
                    .parse::<u64>()
                    .ok()
                    .and_then(|n| map.insert("msgr-threads".into(), json!(n))),
                "filestore_flusher" => map.insert("filestore-flusher".into(), json!(true)),
                "mon_host" => {
                    self.add_link(value, &mut map);
                    None
                }
                _ => None,
            };
        }
        map
    }

    fn devices(&self) -> std::collections::BTreeMap<String, Map> {
        let mut devices = std::collections::BTreeMap::new();
        for entry in fs::read_dir(self.path("/sys/block"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name().to_string_lossy().into_owned();
            let empty = self.number(&format!("/sys/block/{name}/size")) == Some(0);
            // A path of an NVMe namespace, which has a device of its own.
            let hidden = self.flag(&format!("/sys/block/{name}/hidden")) == Some(true);
            if empty
                || hidden
                || ["loop", "ram", "sr", "fd", "zram"]
                    .iter()
                    .any(|prefix| name.starts_with(prefix))
            {
                continue;
            }
            devices.insert(name.clone(), self.device(&name));
        }
        devices
    }

    fn device(&self, name: &str) -> Map {
        let mut map = Map::new();
        let block = format!("/sys/block/{name}");
        map.insert(
            "virtio".into(),
            json!(name.starts_with("vd") || name.starts_with("xvd")),
        );
        map.insert("nvme".into(), json!(name.starts_with("nvme")));
        map.insert("rbd".into(), json!(name.starts_with("rbd")));
        if let Some(sectors) = self.number(&format!("{block}/size")) {
            map.insert("size".into(), json!(sectors.saturating_mul(512)));
        }
        if let Some(queues) = fs::read_dir(self.path(&format!("{block}/mq")))
            .ok()
            .map(Iterator::count)
        {
            map.insert("hardware-queues".into(), json!(queues));
        }
        self.queue(&block, &mut map, true);
        if let Some(percent) = self.pcie(&block) {
            map.insert("pcie-speed-percent".into(), json!(percent));
        }
        self.add_paths(name, &mut map);
        if let Some(table) = partition_table(&self.path(&format!("/dev/{name}"))) {
            map.insert("partition-table".into(), json!(table));
        }
        map
    }

    fn queue(&self, block: &str, map: &mut Map, is_device: bool) {
        let queue = |name: &str| format!("{block}/queue/{name}");
        if let Some(flag) = self.number(&queue("rotational")) {
            map.insert("rotational".into(), json!(flag == 1));
        }
        if let Some(word) = self.chosen(&queue("scheduler")) {
            map.insert("scheduler".into(), json!(word));
        }
        if let Some(kib) = self.number(&queue("read_ahead_kb")) {
            map.insert("read-ahead-kb".into(), json!(kib));
        }
        if let Some(flag) = self.number(&queue("add_random")) {
            map.insert("add-random".into(), json!(flag == 1));
        }
        if !is_device && let Some(depth) = self.number(&queue("nr_requests")) {
            map.insert("queue-depth".into(), json!(depth));
        }
    }

    /// The speed of a device's PCIe link in percent of the device's; none if the device is not itself on PCIe.
    fn pcie(&self, block: &str) -> Option<u64> {
        for device in ["device/device", "device"] {
            let read = |name: &str| -> Option<f64> {
                let text = self.text(&format!("{block}/{device}/{name}"))?;
                text.split_whitespace().next()?.parse().ok()
            };
            let link = |which: &str| {
                Some(read(&format!("{which}_link_speed"))? * read(&format!("{which}_link_width"))?)
            };
            if let (Some(current), Some(max)) = (link("current"), link("max"))
                && max > 0.0
                && current > 0.0
            {
                return Some((current / max * 100.0).round().clamp(0.0, 100.0) as u64);
            }
        }
        None
    }

    fn programs(&self, host: &mut Map) {
        let query = ["--query", "--queryformat", "%{VERSION}", "librbd1"];
        if !host.contains_key("librbd")
            && let Some(version) = output("rpm", &query).as_deref().and_then(Version::find)
        {
            host.insert("librbd".into(), json!(version.to_string()));
        }
        let mut version = |key: &str, program: &str, arguments: &[&str]| {
            let text = output(program, arguments);
            if let Some(version) = text.as_deref().and_then(Version::find) {
                host.insert(key.into(), json!(version.to_string()));
            }
        };
        for program in ["qemu-system-x86_64", "/usr/libexec/qemu-kvm", "kvm"] {
            version("qemu", program, &["--version"]);
        }
        version("libvirt", "libvirtd", &["--version"]);
        if let Some(text) = output("pveversion", &[])
            && let Some(version) = text
                .split('/')
                .nth(1)
                .and_then(|text| text.parse::<Version>().ok())
        {
            host.insert("proxmox".into(), json!(version.to_string()));
        }
    }

    /// The properties of the storage at a path.
    fn file(&self, file: &str, volumes: &[lvm::Volume]) -> Map {
        let mut map = Map::new();
        let path = Path::new(file);
        let Ok(metadata) = fs::metadata(path) else {
            return map;
        };
        let block = metadata.file_type().is_block_device();
        if !block && !metadata.is_file() {
            return map;
        }
        map.insert("kind".into(), json!(if block { "block" } else { "file" }));
        let number = if block {
            metadata.rdev()
        } else {
            metadata.dev()
        };
        if let Some(block) = self.disk_of(number) {
            self.queue(&block, &mut map, false);
            if let Some(percent) = self.pcie(&block) {
                map.insert("pcie-speed-percent".into(), json!(percent));
            }
        }
        if block {
            let zvol = fs::canonicalize(path).is_ok_and(|path| path.starts_with("/dev/zd"));
            let number_of =
                |name: &str| self.number(&format!("/sys/dev/block/{}/{name}", major_minor(number)));
            if path.starts_with("/dev/zvol") || zvol {
                // OpenZFS reports volblocksize as the physical block size.
                put(
                    &mut map,
                    "zvol-block",
                    number_of("queue/physical_block_size"),
                );
            }
            if let Some(sectors) =
                self.number(&format!("/sys/dev/block/{}/size", major_minor(number)))
            {
                map.insert("size".into(), json!(sectors.saturating_mul(512)));
            }
            if let Some(table) = partition_table(path) {
                map.insert("partition-table".into(), json!(table));
            }
            lvm::add_volume(path, volumes, &mut map);
        } else {
            map.insert("size".into(), json!(metadata.len()));
            map.insert(
                "sparse".into(),
                json!(metadata.blocks().saturating_mul(512) < metadata.len()),
            );
            self.file_system(path, &mut map);
            qcow2(path, &mut map);
        }
        map
    }

    /// The directory in /sys of the disk below a device number, through partitions and device-mapper.
    fn disk_of(&self, number: u64) -> Option<String> {
        let mut at =
            fs::canonicalize(self.path(&format!("/sys/dev/block/{}", major_minor(number)))).ok()?;
        for _ in 0..16 {
            if at.join("partition").exists() {
                at.pop();
            }
            let below = fs::read_dir(at.join("slaves"))
                .ok()
                .and_then(|mut entries| entries.next()?.ok());
            match below {
                Some(below) => at = fs::canonicalize(below.path()).ok()?,
                None => break,
            }
        }
        Some(at.to_str()?.to_owned())
    }

    fn file_system(&self, path: &Path, map: &mut Map) {
        let Ok(path) = fs::canonicalize(path) else {
            return;
        };
        let mounts = self.text("/proc/self/mountinfo").unwrap_or_default();
        let mut best: Option<(usize, &str, &str, &str)> = None;
        for line in mounts.lines() {
            let Some((before, after)) = line.split_once(" - ") else {
                continue;
            };
            let Some(point) = before.split(' ').nth(4) else {
                continue;
            };
            let mut fields = after.split(' ');
            let kind = fields.next().unwrap_or_default();
            let source = fields.next().unwrap_or_default();
            let options = fields.next().unwrap_or_default();
            let length = point.len();
            if path.starts_with(point) && best.is_none_or(|(longest, ..)| length >= longest) {
                best = Some((length, kind, source, options));
            }
        }
        let Some((_, kind, source, options)) = best else {
            return;
        };
        let kind = if kind.starts_with("nfs") { "nfs" } else { kind };
        map.insert("fs".into(), json!(kind));
        if kind == "nfs" {
            for option in options.split(',') {
                if let Some(address) = option.strip_prefix("addr=") {
                    self.add_link(address, map);
                }
                let size = |name: &str| {
                    option
                        .strip_prefix(name)?
                        .strip_prefix('=')?
                        .parse::<u64>()
                        .ok()
                };
                if let Some(bytes) = size("rsize") {
                    map.insert("nfs-rsize".into(), json!(bytes));
                }
                if let Some(bytes) = size("wsize") {
                    map.insert("nfs-wsize".into(), json!(bytes));
                }
            }
            map.insert(
                "nfs-sync".into(),
                json!(options.split(',').any(|option| option == "sync")),
            );
        }
        if kind == "zfs" {
            // OpenZFS before 2.3 has no such property.
            let value = output("zfs", &["get", "-H", "-o", "value", "direct", source]);
            let value = value.map(|value| value.trim().to_owned());
            let is_known =
                |value: &String| matches!(value.as_str(), "standard" | "always" | "disabled");
            put(map, "zfs-direct", value.filter(is_known));
        }
        if matches!(kind, "zfs" | "gpfs" | "lustre" | "beegfs")
            && let Ok(metadata) = fs::metadata(&path)
        {
            map.insert("record-size".into(), json!(metadata.blksize()));
        }
    }
}

fn put(map: &mut Map, key: &str, value: Option<impl Into<Json>>) {
    if let Some(value) = value {
        map.insert(key.into(), value.into());
    }
}

fn major_minor(number: u64) -> String {
    let major = ((number >> 8) & 0xfff) | ((number >> 32) & !0xfff);
    let minor = (number & 0xff) | ((number >> 12) & 0xffff_ff00);
    format!("{major}:{minor}")
}

/// The kind of partition table; none if the first sectors cannot be read.
fn partition_table(path: &Path) -> Option<&'static str> {
    let mut sectors = [0u8; 1024];
    fs::File::open(path).ok()?.read_exact(&mut sectors).ok()?;
    let is_gpt = &sectors[512..520] == b"EFI PART";
    let is_mbr = sectors[510..512] == [0x55, 0xaa];
    Some(match (is_gpt, is_mbr) {
        (true, _) => "gpt",
        (false, true) => "dos",
        (false, false) => "none",
    })
}

/// The header of a qcow2 image (qcow2.txt: "Header").
fn qcow2(path: &Path, map: &mut Map) {
    let mut header = [0u8; 104];
    let read = fs::File::open(path).and_then(|mut file| file.read_exact(&mut header));
    if read.is_err() || header[..4] != *b"QFI\xfb" {
        return;
    }
    let word = |at: usize| {
        header[at..at + 4]
            .iter()
            .fold(0u64, |all, byte| all << 8 | u64::from(*byte))
    };
    let long = |at: usize| word(at) << 32 | word(at + 4);
    let bits = word(20);
    if !(9..=21).contains(&bits) {
        return;
    }
    map.insert("qcow2-cluster-size".into(), json!(1u64 << bits));
    map.insert("qcow2-virtual-size".into(), json!(long(24)));
    map.insert("qcow2-backed".into(), json!(long(8) != 0));
    let extended = word(4) >= 3 && long(72) & (1 << 4) != 0;
    map.insert("qcow2-subclusters".into(), json!(extended));
}

/// A program's output, if the program exists, succeeds and finishes in time.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut stdout = child.stdout.take()?;
    // Read in a thread: a program with much output would otherwise block on the pipe.
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stdout.by_ref().take(1 << 20).read_to_end(&mut bytes);
        bytes
    });
    let end = Instant::now() + PROGRAM_TIME;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
        }
    };
    if !status?.success() {
        return None;
    }
    Some(String::from_utf8_lossy(&reader.join().ok()?).into_owned())
}
