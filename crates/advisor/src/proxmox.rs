//! Configurations of Proxmox VMs (`qm.conf(5)`) and storages (`storage.cfg`).

mod carried;
mod compared;
mod cpus;
pub mod description;
mod edit;

pub use compared::options_of_disks;
pub use edit::edits;

use crate::input::{Input, Mistake, Reading, Surroundings};
use crate::model::{CephAccess, Disk, Origin, Table, Thread, ThreadUse, Vm, is_device};
use crate::qemu::{self, ParsedCommand, describe_machine};
use crate::text::Span;

/// Buses and the number of disks on each (`qm.conf(5)`).
const BUSES: &[(&str, usize)] = &[("ide", 4), ("sata", 6), ("scsi", 31), ("virtio", 16)];

/// A line `key: value` of the VM's section.
#[derive(Clone, Debug)]
pub struct Line<'a> {
    pub key: &'a str,
    pub value: &'a str,
    /// The line without its end
    pub span: Span,
    pub value_span: Span,
}

/// Keys that no other kind of file has.
const OWN_KEYS: &[&str] = &[
    "scsihw", "ostype", "vmgenid", "cores", "sockets", "bootdisk", "smbios1", "memory", "boot",
];

/// The other keys (`qm.conf(5)`) without their numbers. Other kinds of files may also have them.
const OTHER_KEYS: &[&str] = &[
    "acpi",
    "affinity",
    "agent",
    "allow-ksm",
    "amd-sev",
    "arch",
    "args",
    "audio",
    "autostart",
    "balloon",
    "bios",
    "cdrom",
    "cicustom",
    "cipassword",
    "citype",
    "ciupgrade",
    "ciuser",
    "cpu",
    "cpulimit",
    "cpuunits",
    "description",
    "efidisk",
    "freeze",
    "hookscript",
    "hostpci",
    "hotplug",
    "hugepages",
    "intel-tdx",
    "ipconfig",
    "ivshmem",
    "keephugepages",
    "keyboard",
    "kvm",
    "localtime",
    "lock",
    "machine",
    "meta",
    "migrate_downtime",
    "migrate_speed",
    "name",
    "nameserver",
    "net",
    "numa",
    "onboot",
    "parallel",
    "parent",
    "protection",
    "reboot",
    "rng",
    "running-nets-host-mtu",
    "runningcpu",
    "runningmachine",
    "searchdomain",
    "serial",
    "shares",
    "smp",
    "snaptime",
    "spice_enhancements",
    "sshkeys",
    "startdate",
    "startup",
    "tablet",
    "tags",
    "tdf",
    "template",
    "tpmstate",
    "unused",
    "usb",
    "vcpus",
    "vga",
    "virtiofs",
    "vmstate",
    "vmstatestorage",
    "watchdog",
];

/// Whether a text is a VM's configuration: it has one of its own keys, or all keys are those of a VM.
pub fn looks_like(text: &str) -> bool {
    let (lines, _) = lines(text);
    let own = |line: &Line<'_>| OWN_KEYS.contains(&line.key) || disk_key(line.key);
    let other = |line: &Line<'_>| {
        OTHER_KEYS.contains(&line.key.trim_end_matches(|c: char| c.is_ascii_digit()))
    };
    let first_section = text.lines().take_while(|line| !line.starts_with('['));
    let settings = first_section.filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    lines.iter().any(own)
        || !lines.is_empty() && lines.len() == settings.count() && lines.iter().all(other)
}

/// Whether a key names a disk.
pub fn disk_key(key: &str) -> bool {
    BUSES.iter().any(|(bus, count)| {
        key.strip_prefix(bus)
            .and_then(|index| index.parse::<usize>().ok())
            .is_some_and(|index| index < *count)
    })
}

/// A key that Proxmox changes at the next start, and that affects disks or their controllers.
pub fn pending(text: &str) -> Option<&str> {
    let mut section = text
        .lines()
        .skip_while(|line| line.trim_end() != "[PENDING]");
    section.next()?;
    let keys = section
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| Some(line.split_once(':')?.0.trim()));
    let others = [
        "args", "bios", "boot", "bootdisk", "delete", "machine", "ostype", "scsihw",
    ];
    let mut keys = keys.filter(|key| disk_key(key) || others.contains(key));
    keys.next()
}

/// The lines and the comments of the first section; other sections are snapshots.
pub fn lines(text: &str) -> (Vec<Line<'_>>, Vec<(String, Span)>) {
    let mut lines = Vec::new();
    let mut comments = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let at = start;
        start += line.len();
        let line = line.trim_end_matches(['\n', '\r']);
        if line.starts_with('[') {
            break;
        }
        let span = Span::new(0, at, at + line.len());
        if line.starts_with('#') {
            comments.push((line.to_owned(), span));
            continue;
        }
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        if key.is_empty()
            || !key
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
        {
            continue;
        }
        let value_start = at + key.len() + 1 + (value.len() - value.trim_start().len());
        let value = value.trim();
        lines.push(Line {
            key,
            value,
            span,
            value_span: Span::new(0, value_start, value_start + value.len()),
        });
    }
    (lines, comments)
}

/// A part `key=value` of a line; the first may have no key.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// Empty if it is omitted
    pub key: &'a str,
    pub value: &'a str,
    pub span: Span,
}

/// The parts of a line.
pub fn parts<'a>(line: &Line<'a>) -> Vec<Part<'a>> {
    let mut start = line.value_span.start as usize;
    let mut parts = Vec::new();
    for part in line.value.split(',') {
        let span = Span::new(line.value_span.source, start, start + part.len());
        start += part.len() + 1;
        let (key, value) = part.split_once('=').unwrap_or(("", part));
        parts.push(Part { key, value, span });
    }
    parts
}

/// The command of QEMU's options in `args:`.
///
/// # Errors
/// There are none, or they are invalid.
pub fn command(input: &Input) -> Result<ParsedCommand, String> {
    let text = input.sources.first().map_or("", |source| &source.text);
    let (options, start) = options(text).ok_or("the command is missing")?;
    ParsedCommand::of_options(options, start, &input.surroundings)
}

/// QEMU's options in `args:`, and their first byte.
fn options(text: &str) -> Option<(&str, usize)> {
    let (lines, _) = lines(text);
    let line = lines.iter().rev().find(|line| line.key == "args")?;
    Some((line.value, line.value_span.start as usize))
}

/// Reads a VM.
///
/// # Errors
/// `args:` is invalid. Anything else that is not understood gets a note.
pub fn read(
    text: &str,
    name: &str,
    surroundings: &Surroundings,
    reading: &mut Reading,
) -> Result<(), Mistake> {
    let (lines, comments) = lines(text);
    for (text, span) in comments {
        // Proxmox encodes special characters in descriptions as in a URL.
        reading.comment(&text.replace("%3A", ":"), span);
    }
    let get = |key: &str| lines.iter().rev().find(|line| line.key == key);
    let mut vm = Vm {
        name: name.to_owned(),
        span: Span::new(0, 0, lines.last().map_or(0, |line| line.span.end as usize)),
        ..Vm::default()
    };
    if let Some(line) = get("name") {
        vm.name = format!("{name} ({})", line.value);
    }
    let table = &mut vm.table;
    table.give("vm.front-end", "proxmox", vm.span);
    match get("kvm") {
        Some(line) if line.value == "0" => table.give("vm.accel", "tcg", line.value_span),
        _ => table.default_to("vm.accel", "kvm", "Proxmox"),
    }
    match get("machine") {
        Some(line) => {
            let part = parts(line)
                .into_iter()
                .find(|part| matches!(part.key, "" | "type"));
            let machine = part.map_or("pc", |part| part.value);
            describe_machine(machine, line.value_span, table);
        }
        None => table.default_to("vm.machine", "pc", "Proxmox"),
    }
    let number = |key: &str| {
        get(key).and_then(|line| Some((line.value.parse::<u64>().ok()?, line.value_span)))
    };
    let (cores, at) = number("cores").unwrap_or((1, vm.span));
    let (sockets, _) = number("sockets").unwrap_or((1, vm.span));
    match get("cores") {
        Some(_) => table.give("vm.vcpus", cores.saturating_mul(sockets).max(1), at),
        None => table.default_to("vm.vcpus", sockets.max(1), "Proxmox: one core"),
    }
    memory(&lines, table, reading);
    cpus::model(&lines, table);
    cpus::of_host(&lines, &mut vm);
    let table = &mut vm.table;
    match get("ostype") {
        Some(line) => {
            let system = match line.value {
                "l26" => "linux",
                "wxp" | "w2k" | "w2k3" | "w2k8" | "wvista" | "win7" | "win8" | "win10"
                | "win11" => "windows",
                // Linux 2.4 is older than virtio.
                _ => "other",
            };
            table.give("vm.os", system, line.value_span);
        }
        None => table.default_to("vm.os", "other", "Proxmox: ostype other"),
    }
    if let Some(line) = lines.iter().find(|line| line.key.starts_with("hostpci")) {
        table.give("vm.pass-through", true, line.span);
    }
    let scsihw = get("scsihw");
    for line in lines.iter().filter(|line| disk_key(line.key)) {
        if let Some(disk) = disk(line, scsihw, surroundings, &mut vm.threads, reading) {
            vm.disks.push(disk);
        }
    }
    let single = scsihw.is_some_and(|line| line.value == "virtio-scsi-single");
    for disk in vm
        .disks
        .iter_mut()
        .filter(|disk| disk.name.starts_with("scsi"))
    {
        // The model decides, not the current number of disks.
        let word = if single { "own" } else { "shared" };
        let origin = match scsihw {
            Some(line) => Origin::Given(line.value_span),
            None => Origin::Default("Proxmox: scsihw lsi".into()),
        };
        disk.table.set("disk.controller", word, origin);
    }
    if let Some(line) = get("args") {
        let start = line.value_span.start as usize;
        qemu::add_options(line.value, start, &mut vm, surroundings, reading)?;
    }
    reading.vms.push(vm);
    Ok(())
}

/// Reads the memory and its backing.
fn memory(lines: &[Line<'_>], table: &mut Table, reading: &mut Reading) {
    let get = |key: &str| lines.iter().rev().find(|line| line.key == key);
    match get("memory").map(|line| (parts(line), line.value_span)) {
        Some((parts, at)) => {
            let amount = parts.iter().find(|part| matches!(part.key, "" | "current"));
            match amount.and_then(|part| part.value.parse::<u64>().ok()?.checked_mul(1 << 20)) {
                Some(bytes) => table.give("vm.memory", bytes, at),
                None => reading.note(at, "invalid amount of memory"),
            }
        }
        None => table.default_to("vm.memory", 512u64 << 20, "Proxmox"),
    }
    match get("hugepages") {
        Some(line) => table.give("vm.hugepages", true, line.value_span),
        None => table.default_to("vm.hugepages", "no", "Proxmox"),
    }
    let balloon =
        get("balloon").and_then(|line| Some((line.value.parse::<u64>().ok()?, line.value_span)));
    match balloon {
        Some((mib, at)) => table.give("vm.balloon", mib > 0, at),
        None => table.default_to("vm.balloon", "yes", "Proxmox"),
    }
    // Proxmox shares the memory of VMs with these.
    let shared = lines
        .iter()
        .find(|line| line.key == "hugepages" || line.key.starts_with("virtiofs"));
    if let Some(line) = shared {
        table.give("vm.memory-shared", true, line.span);
    }
    let numa = get("numa0").filter(|line| line.value.contains("hostnodes="));
    match numa {
        Some(line) => table.give("vm.numa-bound", true, line.value_span),
        None => table.default_to("vm.numa-bound", "no", "Proxmox"),
    }
}

fn disk(
    line: &Line<'_>,
    scsihw: Option<&Line<'_>>,
    surroundings: &Surroundings,
    threads: &mut Vec<Thread>,
    reading: &mut Reading,
) -> Option<Disk> {
    let parts = parts(line);
    let get = |key: &str| parts.iter().rev().find(|part| part.key == key);
    let volume = get("").or_else(|| get("file")).or_else(|| get("volume"))?;
    let mut disk = Disk {
        name: line.key.to_owned(),
        span: line.span,
        file: volume.value.to_owned(),
        carried: carried::of(&parts),
        ..Disk::default()
    };
    let table = &mut disk.table;
    let cdrom = get("media").filter(|part| part.value == "cdrom");
    let cloudinit = volume.value.contains("cloudinit");
    match cdrom {
        Some(part) => table.give("disk.device", "cdrom", part.span),
        None if cloudinit => table.give("disk.device", "cdrom", volume.span),
        None => table.default_to("disk.device", "disk", "Proxmox"),
    }
    let bus = line.key.trim_end_matches(|c: char| c.is_ascii_digit());
    set_bus(line, bus, scsihw, table);
    if volume.value == "none" || volume.value == "cdrom" {
        return Some(disk);
    }
    let storage = storage(volume.value, surroundings);
    storage.describe(&mut disk, volume.span, surroundings);
    set_caching(&mut disk, &parts, &storage, reading);
    let table = &mut disk.table;
    let cd = table.word("disk.device") == Some("cdrom");
    let discard = get("discard").filter(|part| part.value == "on");
    match discard {
        Some(part) => table.give("disk.discard", "unmap", part.span),
        None => table.default_to("disk.discard", "ignore", "Proxmox"),
    }
    match get("detect_zeroes") {
        Some(part) if matches!(part.value, "0" | "off" | "no") => {
            table.give("disk.detect-zeroes", "off", part.span)
        }
        _ if cd => {}
        _ if discard.is_some() => table.default_to("disk.detect-zeroes", "unmap", "Proxmox"),
        _ => table.default_to("disk.detect-zeroes", "on", "Proxmox"),
    }
    if let Some(part) = get("ssd") {
        table.give("disk.ssd", part.value == "1", part.span);
    } else if !cd && bus != "virtio" {
        table.default_to("disk.ssd", "no", "Proxmox");
    }
    if let Some(part) = get("ro").filter(|part| part.value == "1") {
        table.give("disk.readonly", true, part.span);
    }
    if let Some(part) = parts
        .iter()
        .find(|part| carried::RATES.contains(&part.key) && part.value.parse() != Ok(0_f64))
    {
        table.give("disk.throttled", true, part.span);
    }
    carried::least_limits(&parts, table);
    if let Some(part) = get("queues") {
        match part.value.parse::<u64>() {
            Ok(queues @ 1..=1024) => table.give("disk.queues", queues, part.span),
            _ => reading.note(part.span, "invalid number of queues"),
        }
    }
    if let Some(part) = get("size")
        && let Some(bytes) = size(part.value)
    {
        table.give("disk.size", bytes, part.span);
    }
    if let Some(part) =
        get("iothread").filter(|part| matches!(part.value, "1" | "on" | "yes" | "true"))
    {
        let model = scsihw.map(|line| line.value);
        let is_supported =
            bus == "virtio" || (bus == "scsi" && model == Some("virtio-scsi-single"));
        if is_supported {
            let id = format!("iothread-{}", line.key);
            threads.push(Thread {
                id: id.clone(),
                span: part.span,
                poll_max_ns: None,
                others: Vec::new(),
            });
            disk.threads.push(ThreadUse {
                id,
                span: part.span,
                queues: None,
                is_mapped: false,
            });
        } else {
            disk.table.give("disk.thread-ignored", true, part.span);
        }
    }
    Some(disk)
}

fn set_bus(line: &Line<'_>, bus: &str, scsihw: Option<&Line<'_>>, table: &mut Table) {
    let start = line.span.start as usize;
    let at = Span::new(0, start, start + line.key.len());
    match bus {
        "virtio" => table.give("disk.bus", "virtio-blk", at),
        "scsi" => match scsihw {
            Some(line) if line.value.starts_with("virtio-scsi") => {
                table.give("disk.bus", "virtio-scsi", line.value_span);
            }
            Some(line) => table.give("disk.bus", "scsi-emulated", line.value_span),
            None => table.default_to("disk.bus", "scsi-emulated", "Proxmox: scsihw lsi"),
        },
        "ide" => table.give("disk.bus", "ide", at),
        _ => table.give("disk.bus", "sata", at),
    }
}

/// Reads the format, the cache mode and `aio`, whose defaults depend on the storage.
fn set_caching(disk: &mut Disk, parts: &[Part<'_>], storage: &Storage<'_>, reading: &mut Reading) {
    let get = |key: &str| parts.iter().rev().find(|part| part.key == key);
    let table = &mut disk.table;
    let cd = table.word("disk.device") == Some("cdrom");
    for (key, property, words) in [
        (
            "cache",
            "disk.cache",
            &["none", "writeback", "writethrough", "directsync", "unsafe"][..],
        ),
        ("aio", "disk.aio", &["threads", "native", "io_uring"]),
    ] {
        let Some(part) = get(key) else {
            continue;
        };
        match words.iter().find(|word| **word == part.value) {
            Some(word) => table.give(property, *word, part.span),
            None => reading.note(part.span, format!("unknown {key}={}", part.value)),
        }
    }
    if let Some(part) = get("format") {
        table.give("disk.format", part.value.to_owned(), part.span);
    }
    let btrfs = storage.kind == Some("btrfs") && storage.nocow != Some("1");
    match (cd, btrfs) {
        (true, _) => table.default_to("disk.cache", "writeback", "QEMU"),
        (_, true) => table.default_to(
            "disk.cache",
            "writeback",
            "Proxmox on btrfs with copy-on-write",
        ),
        _ => table.default_to("disk.cache", "none", "Proxmox"),
    }
    let direct = matches!(table.word("disk.cache"), Some("none" | "directsync"));
    if matches!(
        table.word("disk.protocol"),
        Some("file" | "block" | "other")
    ) {
        let buffered_krbd = storage.kind == Some("rbd") && !direct;
        match (
            matches!(storage.kind, Some("lvm" | "cifs")) || buffered_krbd,
            direct,
        ) {
            (false, _) => table.default_to("disk.aio", "io_uring", "Proxmox"),
            (true, true) => table.default_to("disk.aio", "native", "Proxmox on this storage"),
            (true, false) => table.default_to("disk.aio", "threads", "Proxmox on this storage"),
        }
    }
}

/// Bytes of a size such as `32G`.
fn size(text: &str) -> Option<u64> {
    let (number, factor) = match text.char_indices().next_back()? {
        (at, 'K') => (&text[..at], 1u64 << 10),
        (at, 'M') => (&text[..at], 1 << 20),
        (at, 'G') => (&text[..at], 1 << 30),
        (at, 'T') => (&text[..at], 1 << 40),
        _ => (text, 1),
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// The known settings of a storage.
#[derive(Default)]
struct Storage<'a> {
    kind: Option<&'a str>,
    krbd: Option<&'a str>,
    nocow: Option<&'a str>,
    path: Option<&'a str>,
    vg: Option<&'a str>,
    pool: Option<&'a str>,
    user: Option<&'a str>,
    /// The storage's name.
    id: &'a str,
}

/// The storage of a volume `storage:volume`.
fn storage<'a>(volume: &str, surroundings: &'a Surroundings) -> Storage<'a> {
    let mut found = Storage::default();
    let (Some(source), Some((wanted, _))) = (&surroundings.storages, volume.split_once(':')) else {
        return found;
    };
    let mut inside = false;
    for line in source.text.lines() {
        if let Some((kind, id)) = line
            .split_once(':')
            .filter(|_| !line.starts_with([' ', '\t', '#']))
        {
            inside = id.trim() == wanted;
            if inside {
                found.kind = Some(kind.trim());
                found.id = id.trim();
            }
        } else if inside {
            let line = line.trim();
            let (key, value) = line.split_once(char::is_whitespace).unwrap_or((line, "1"));
            let value = Some(value.trim());
            match key {
                "krbd" => found.krbd = value,
                "nocow" => found.nocow = value,
                "path" => found.path = value,
                "vgname" => found.vg = value,
                "pool" | "thinpool" => found.pool = value,
                "username" => found.user = value,
                _ => {}
            }
        }
    }
    found
}

impl Storage<'_> {
    /// Adds the storage's properties to a disk.
    fn describe(&self, disk: &mut Disk, at: Span, surroundings: &Surroundings) {
        let volume = disk.file.clone();
        let name = volume.split_once(':').map(|(_, name)| name);
        let table = &mut disk.table;
        // The suffix determines the format of files.
        let suffix = volume.rsplit_once('.').map(|(_, suffix)| suffix.to_owned());
        let format = match suffix.as_deref() {
            Some("qcow2") => "qcow2",
            Some("vmdk") => "vmdk",
            _ => "raw",
        };
        table.give("disk.format", format, at);
        if volume.starts_with('/') {
            let word = if is_device(&volume) { "block" } else { "file" };
            table.give("disk.protocol", word, at);
            return;
        }
        let Some(kind) = self.kind else {
            // Only files in a directory have a suffix.
            if suffix.is_some() {
                table.give("disk.protocol", "file", at);
            } else {
                let why = match surroundings.storages {
                    Some(_) => "the storage is not in storage.cfg",
                    None => "without storage.cfg",
                };
                table.derive("disk.protocol", "other", why);
                table.set(
                    "disk.storage",
                    crate::model::Data::Unknown,
                    Origin::Derived(why.into()),
                );
            }
            return;
        };
        table.derive("disk.storage", kind.to_owned(), "from storage.cfg");
        let krbd = self.krbd == Some("1");
        let protocol = match kind {
            "rbd" if krbd => "block",
            "rbd" => "rbd",
            "iscsidirect" => "iscsi",
            "zfs" => "iscsi",
            "lvm" | "lvmthin" | "zfspool" | "iscsi" => "block",
            "dir" | "nfs" | "cifs" | "btrfs" | "cephfs" | "glusterfs" => "file",
            // Plugins (LINSTOR, StorPool, arrays behind iSCSI or NVMe/TCP) give block devices; files have a suffix.
            _ if suffix.is_some() => "file",
            _ => "block",
        };
        table.derive("disk.protocol", protocol, "from storage.cfg");
        let thin = matches!(kind, "lvmthin" | "rbd" | "zfspool" | "zfs") || format == "qcow2";
        table.derive("disk.store-thin", thin, "from storage.cfg");
        match kind {
            "lvm" => table.derive("backing.lvm", "thick", "from storage.cfg"),
            "lvmthin" => table.derive("backing.lvm", "thin", "from storage.cfg"),
            "nfs" | "cifs" | "btrfs" => {
                table.derive("backing.fs", kind.to_owned(), "from storage.cfg")
            }
            "zfspool" => table.derive("backing.fs", "zfs", "from storage.cfg"),
            _ => {}
        }
        if kind == "btrfs" {
            table.derive(
                "backing.no-cow",
                self.nocow == Some("1"),
                "from storage.cfg",
            );
        }
        if kind == "rbd" {
            disk.ceph = CephAccess {
                conf: Some("/etc/pve/ceph.conf".into()),
                user: self.user.map(str::to_owned),
                keyring: Some(format!("/etc/pve/priv/ceph/{}.keyring", self.id)),
                ..CephAccess::default()
            };
        }
        // Use the path on the host if the storage has one, so that facts about the host apply.
        disk.file = match (kind, self.vg, self.path, self.pool, name) {
            ("lvm" | "lvmthin", Some(vg), _, _, Some(name)) => format!("/dev/{vg}/{name}"),
            ("zfspool", _, _, Some(pool), Some(name)) => format!("/dev/zvol/{pool}/{name}"),
            ("dir" | "nfs" | "cifs" | "btrfs", _, Some(path), _, Some(name)) => {
                format!("{path}/images/{name}")
            }
            ("rbd", _, _, pool, Some(name)) => format!("{}/{name}", pool.unwrap_or("rbd")),
            _ => volume,
        };
    }
}
