//! The storage of a device: a `-drive`, or a graph of `-blockdev` nodes.

use std::collections::HashMap;

use super::line::Line;
use super::options::{Opt, Pair};
use crate::model::carried::{Dialect, is_limit};
use crate::model::{CephAccess, Data, Disk, MONITORS_MAX, Origin, is_device, monitor};
use crate::text::Span;

/// The maximum number of nodes between a device and its storage.
const NODES_MAX: usize = 32;

/// Drives by id, nodes by name, throttle groups by id.
pub struct Graph<'a> {
    drives: HashMap<&'a str, &'a Opt>,
    nodes: HashMap<&'a str, &'a Opt>,
    groups: HashMap<&'a str, &'a Opt>,
}

/// The device that QEMU creates for a drive.
pub struct Interface {
    pub bus: &'static str,
    /// The span of `if=`
    pub given: Option<Span>,
    /// The disk's name in messages
    pub name: String,
}

impl Interface {
    /// The origin of a bus without `if=`.
    pub fn origin(&self) -> Origin {
        Origin::Default("QEMU for a drive without if=".into())
    }
}

/// The device that QEMU creates for a drive; none with `if=none`, and for other options.
pub fn interface(option: &Opt, machine: &str) -> Option<Interface> {
    let default = match machine {
        "q35" => "sata",
        "pc" | "isapc" => "ide",
        "virt" | "microvm" => "virtio-blk",
        machine if machine.starts_with("s390") => "virtio-blk",
        machine if machine.starts_with("pseries") => "scsi-emulated",
        _ => "ide",
    };
    let named = |bus, name: &str| {
        Some(Interface {
            bus,
            given: None,
            name: name.to_owned(),
        })
    };
    match option.group.as_str() {
        "hda" | "hdb" | "hdc" | "hdd" => named(default, &option.group),
        "cdrom" => named(default, "cdrom"),
        "sd" => named("sd", "sd"),
        "drive" => {
            let given = option.get("if");
            let bus = match given.map(|pair| pair.value.as_str()) {
                None => default,
                Some("virtio") => "virtio-blk",
                Some("ide") if machine == "q35" => "sata",
                Some("ide") => "ide",
                Some("scsi") => "scsi-emulated",
                Some("sd") => "sd",
                Some("floppy") => "fdc",
                Some("none" | "pflash" | "mtd") => return None,
                Some(_) => "other",
            };
            let index = option.value("index").unwrap_or("?");
            Some(Interface {
                bus,
                given: given.map(|pair| pair.span),
                name: format!("{bus}{index}").trim_end_matches('?').to_owned(),
            })
        }
        _ => None,
    }
}

/// `media=cdrom`, or `-cdrom`.
pub fn media(option: &Opt) -> Option<(&'static str, Span)> {
    match option.value("media") {
        _ if option.group == "cdrom" => Some(("cdrom", option.whole)),
        Some("cdrom") => option.get("media").map(|pair| ("cdrom", pair.span)),
        _ => None,
    }
}

impl<'a> Graph<'a> {
    pub fn new(line: &'a Line) -> Self {
        let drives = line
            .group("drive")
            .filter_map(|drive| Some((drive.value("id")?, drive)));
        let nodes = line
            .group("blockdev")
            .filter_map(|node| Some((node.value("node-name")?, node)));
        let groups = line
            .group("object")
            .filter(|object| object.value("qom-type") == Some("throttle-group"))
            .filter_map(|group| Some((group.value("id")?, group)));
        Self {
            drives: drives.collect(),
            nodes: nodes.collect(),
            groups: groups.collect(),
        }
    }

    /// Adds the storage of the drive or node `id` to a disk; false if it does not exist.
    pub fn behind(&self, id: &str, disk: &mut Disk) -> bool {
        if let Some(drive) = self.drives.get(id) {
            if let Some((device, span)) = media(drive) {
                disk.table.give("disk.device", device, span);
            }
            self.drive(drive, disk);
            return true;
        }
        let Some(node) = self.nodes.get(id) else {
            return false;
        };
        disk.table.give("disk.syntax", "blockdev", node.span);
        let mut visited = Vec::new();
        self.node(node, disk, &mut visited);
        visited.into_iter().for_each(|option| hide(option, disk));
        true
    }

    /// Adds the settings of a `-drive`.
    pub fn drive(&self, drive: &Opt, disk: &mut Disk) {
        self.drive_settings(drive, disk);
        hide(drive, disk);
    }

    fn drive_settings(&self, drive: &Opt, disk: &mut Disk) {
        let table = &mut disk.table;
        table.give("disk.syntax", "drive", drive.span);
        words(
            drive,
            table_words(
                &["cache"],
                "disk.cache",
                &["none", "writeback", "writethrough", "directsync", "unsafe"],
            ),
            disk,
        );
        if let Some(pair) = drive.get("cache").filter(|pair| pair.value == "off") {
            disk.table.give("disk.cache", "none", pair.span);
        }
        let direct = drive.get("cache.direct");
        let flush = drive.get("cache.no-flush");
        let writeback = drive.get("cache.writeback");
        if let Some(pair) = direct.or(flush).or(writeback) {
            let on = |pair: Option<&Pair>, default| pair.map_or(default, |pair| pair.value == "on");
            let word = mode(on(direct, false), on(flush, false), on(writeback, true));
            disk.table.give("disk.cache", word, pair.span);
        }
        words(drive, table_words(&["aio"], "disk.aio", AIO), disk);
        words(
            drive,
            table_words(&["discard"], "disk.discard", &["ignore", "unmap"]),
            disk,
        );
        match drive.value("discard") {
            Some("on") => set(drive, "discard", "disk.discard", "unmap", disk),
            Some("off") => set(drive, "discard", "disk.discard", "ignore", disk),
            _ => {}
        }
        words(
            drive,
            table_words(
                &["detect-zeroes"],
                "disk.detect-zeroes",
                &["off", "on", "unmap"],
            ),
            disk,
        );
        if drive.value("readonly").or(drive.value("read-only")) == Some("on") {
            disk.table.give("disk.readonly", true, drive.span);
        }
        for pair in &drive.pairs {
            match pair.key.strip_prefix("throttling.") {
                Some("group") => disk.carried.group = Some(pair.value.clone()),
                Some(name) => limit(name, Dialect::Qemu, pair, disk),
                None => limit(&pair.key, Dialect::OldDrive, pair, disk),
            }
        }
        if let Some(serial) = drive.value("serial") {
            disk.carried.serial = Some(serial.to_owned());
        }
        policies(drive, disk);
        cache_size(drive, "", disk);
        encryption(drive, "", disk);
        part_of_file(drive, "", disk);
        if let Some(pair) = drive.get("copy-on-read").filter(|pair| pair.value == "on") {
            disk.table.give("disk.copy-on-read", true, pair.span);
        }
        let format = drive.get("format").or(drive.get("driver"));
        let format = format.map(|pair| (pair.value.clone(), pair.span));
        let file = drive.get("file").or(drive.get("file.filename"));
        match (
            file,
            drive.get("file.driver").or(drive
                .get("driver")
                .filter(|pair| protocol(&pair.value).is_some())),
        ) {
            (_, Some(driver)) if protocol(&driver.value).is_some() => {
                let protocol = protocol(&driver.value).unwrap_or("other");
                disk.table.give("disk.protocol", protocol, driver.span);
                disk.file = file.map(|pair| pair.value.clone()).unwrap_or_default();
            }
            (Some(file), _) => of_name(file, disk),
            (None, _) => return,
        }
        if let Some((format, span)) = format.filter(|(format, _)| protocol(format).is_none()) {
            disk.table.give("disk.format", format, span);
        } else if disk.table.word("disk.protocol") == Some("file")
            && disk.table.get("disk.format").is_none()
        {
            disk.table.set(
                "disk.format",
                Data::Unknown,
                Origin::Default("QEMU detects the format".into()),
            );
        }
    }

    /// Adds the limits of a throttle group.
    fn group(&self, id: &str, disk: &mut Disk) {
        disk.carried.group = Some(id.to_owned());
        let Some(group) = self.groups.get(id) else {
            let origin = Origin::Derived("its throttle group is not on the command line".into());
            disk.table.set("disk.throttled", Data::Unknown, origin);
            return;
        };
        for pair in &group.pairs {
            let name = pair.key.strip_prefix("x-");
            if let Some(name) = name.or(pair.key.strip_prefix("limits.")) {
                limit(name, Dialect::Qemu, pair, disk);
            }
        }
    }

    /// Adds the settings of a node and of the nodes below it.
    fn node<'b>(&'b self, top: &'b Opt, disk: &mut Disk, visited: &mut Vec<&'b Opt>) {
        let mut option = top;
        visited.push(top);
        let mut prefix = String::new();
        let mut first = true;
        let mut driver_above: Option<&str> = None;
        // A nested node inherits these from the node above it.
        let mut direct: Option<&Pair> = None;
        let mut no_flush: Option<&Pair> = None;
        for _ in 0..NODES_MAX {
            let key = |name: &str| format!("{prefix}{name}");
            let Some(driver) = option.get(&key("driver")) else {
                return;
            };
            direct = option.get(&key("cache.direct")).or(direct);
            no_flush = option.get(&key("cache.no-flush")).or(no_flush);
            if let Some(pair) = option
                .get(&key("read-only"))
                .filter(|pair| pair.value == "on")
            {
                disk.table.give("disk.readonly", true, pair.span);
            }
            if let Some(pair) = option.get(&key("discard")) {
                // A discard must pass through all nodes.
                let word = if pair.value == "unmap" {
                    "unmap"
                } else {
                    "ignore"
                };
                if first || word == "ignore" {
                    disk.table.give("disk.discard", word, pair.span);
                }
            } else if prefix.is_empty() {
                // By default, a nested node passes discards on, and a named node does not (QEMU,
                // `bdrv_inherited_options`).
                let origin = Origin::Default("QEMU for a named node".into());
                disk.table.set("disk.discard", "ignore", origin);
            }
            for (name, words) in [("detect-zeroes", &["off", "on", "unmap"])] {
                if let Some(pair) = option.get(&key(name))
                    && let Some(word) = words.iter().find(|word| **word == pair.value)
                {
                    disk.table.give("disk.detect-zeroes", *word, pair.span);
                }
            }
            cache_size(option, &prefix, disk);
            encryption(option, &prefix, disk);
            part_of_file(option, &prefix, disk);
            if let Some(protocol) = protocol(&driver.value) {
                storage(option, &prefix, driver, protocol, disk);
                if protocol == "rbd" {
                    let is_raw = driver_above == Some("raw");
                    disk.table.give("disk.raw-layer", is_raw, driver.span);
                }
                break;
            }
            match driver.value.as_str() {
                "throttle" => {
                    if let Some(group) = option.value(&key("throttle-group")) {
                        self.group(group, disk);
                    }
                }
                "copy-on-read" => disk.table.give("disk.copy-on-read", true, driver.span),
                // Filters that do not change the format.
                "compress" | "preallocate" | "blkdebug" | "blkverify" | "blklogwrites"
                | "snapshot-access" => {}
                // The first format is that of the guest's disk; those below belong to that image.
                format if disk.table.get("disk.format").is_none() => {
                    disk.table
                        .give("disk.format", format.to_owned(), driver.span);
                }
                _ => {}
            }
            driver_above = Some(&driver.value);
            first = false;
            // The next node: a name, or a nested node.
            match option.get(&key("file")) {
                Some(file) => match self.nodes.get(file.value.as_str()) {
                    Some(node) => {
                        option = node;
                        visited.push(node);
                        prefix.clear();
                        (direct, no_flush) = (None, None);
                    }
                    None => return,
                },
                None => prefix = key("file."),
            }
        }
        let on = |pair: Option<&Pair>| pair.is_some_and(|pair| pair.value == "on");
        let word = mode(on(direct), on(no_flush), true);
        match direct
            .filter(|_| on(direct))
            .or(no_flush.filter(|_| on(no_flush)))
            .or(direct)
        {
            Some(pair) => disk.table.give("disk.cache", word, pair.span),
            None => disk.table.default_to("disk.cache", "writeback", "QEMU"),
        }
    }
}

/// Adds what the lowest node says about the storage.
fn storage(option: &Opt, prefix: &str, driver: &Pair, protocol: &'static str, disk: &mut Disk) {
    let key = |name: &str| format!("{prefix}{name}");
    disk.table.give("disk.protocol", protocol, driver.span);
    let name = [
        "filename",
        "image",
        "path",
        "device",
        "export",
        "socket.path",
    ];
    disk.file = name
        .iter()
        .find_map(|name| option.value(&key(name)))
        .unwrap_or_default()
        .to_owned();
    if let (Some(pool), "rbd") = (option.value(&key("pool")), protocol) {
        let namespace = option
            .value(&key("namespace"))
            .filter(|its| !its.is_empty());
        let pool = namespace.map_or(pool.to_owned(), |its| format!("{pool}/{its}"));
        disk.file = format!("{pool}/{}", disk.file);
        ceph(option, prefix, &mut disk.ceph);
    }
    let is_file = matches!(driver.value.as_str(), "file" | "host_device");
    if is_file && disk.file.starts_with("/dev/fdset/") {
        disk.table.give("disk.protocol", "other", driver.span);
    }
    if driver.value == "file" && is_device(&disk.file) {
        disk.table.give("disk.block-as-file", true, driver.span);
    }
    if let Some(pair) = option.get(&key("aio"))
        && let Some(word) = AIO.iter().find(|word| **word == pair.value)
    {
        disk.table.give("disk.aio", *word, pair.span);
    }
}

const AIO: &[&str] = &["threads", "native", "io_uring"];

/// Whether QEMU encrypts the image with a key of its own: qcow2 and RBD can. The driver `luks` is a format.
fn encryption(option: &Opt, prefix: &str, disk: &mut Disk) {
    let start = format!("{prefix}encrypt.");
    if let Some(pair) = option
        .pairs
        .iter()
        .find(|pair| pair.key.starts_with(&start))
    {
        disk.table.give("disk.encrypted", true, pair.span);
    }
}

/// A raw image may be a part of a file, which may begin inside a block.
fn part_of_file(option: &Opt, prefix: &str, disk: &mut Disk) {
    let format = option.value(&format!("{prefix}driver"));
    let format = format.or_else(|| option.value(&format!("{prefix}format")));
    if format == Some("raw")
        && let Some(offset) = option.value(&format!("{prefix}offset"))
        && offset != "0"
    {
        disk.others.push(format!("offset={offset}"));
    }
}

/// How an RBD image is accessed.
fn ceph(option: &Opt, prefix: &str, access: &mut CephAccess) {
    let text = |name: &str| option.value(&format!("{prefix}{name}"));
    access.conf = text("conf").map(str::to_owned);
    access.user = text("user").map(str::to_owned);
    access.has_key = text("key-secret").is_some();
    let monitors = (0..MONITORS_MAX).map_while(|number| {
        let host = text(&format!("server.{number}.host"))?;
        Some(monitor(host, text(&format!("server.{number}.port"))))
    });
    access.monitors(monitors.collect());
}

/// A part of a file name of librbd, `KEY=VALUE` after a colon.
fn ceph_part(part: &str, access: &mut CephAccess) {
    match part.split_once('=') {
        Some(("id", user)) => access.user = Some(user.to_owned()),
        Some(("conf", conf)) => access.conf = Some(conf.to_owned()),
        Some(("keyring", file)) => access.keyring = Some(file.to_owned()),
        Some(("key", _)) => access.has_key = true,
        // How the key is used.
        Some(("auth_supported" | "auth_client_required", _)) | None => {}
        Some((option, value)) => access.options.push((option.to_owned(), value.to_owned())),
    }
}

/// The parts of a file name of librbd: a backslash protects the next character.
fn ceph_parts(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match (c, parts.last_mut()) {
            (':', _) => parts.push(String::new()),
            ('\\', Some(last)) => last.extend(rest.next()),
            (c, Some(last)) => last.push(c),
            (_, None) => {}
        }
    }
    parts
}

fn limit(name: &str, dialect: Dialect, pair: &Pair, disk: &mut Disk) {
    if is_limit(name, dialect, &pair.value) {
        disk.table.give("disk.throttled", true, pair.span);
    }
    // QEMU expects a number without a unit.
    disk.carried.limit(name, dialect, pair.value.parse().ok());
}

/// Adds the error policies of a drive or a device, unless they are the default.
pub fn policies(option: &Opt, disk: &mut Disk) {
    let given = |key| {
        let word = option.value(key).filter(|word| *word != "auto")?;
        Some(word.to_owned())
    };
    if let Some(werror) = given("werror") {
        disk.carried.werror = Some(werror);
    }
    if let Some(rerror) = given("rerror") {
        disk.carried.rerror = Some(rerror);
    }
}

/// QEMU's name for a cache mode.
fn mode(direct: bool, no_flush: bool, writeback: bool) -> &'static str {
    match (direct, no_flush, writeback) {
        (_, true, _) => "unsafe",
        (true, false, true) => "none",
        (true, false, false) => "directsync",
        (false, false, true) => "writeback",
        (false, false, false) => "writethrough",
    }
}

/// The kind of storage that a driver accesses; none for formats and filters.
fn protocol(driver: &str) -> Option<&'static str> {
    Some(match driver {
        "file" => "file",
        "host_device" | "host_cdrom" => "block",
        "rbd" => "rbd",
        "nbd" => "nbd",
        "iscsi" => "iscsi",
        "nvme" | "nvme-io_uring" => "nvme",
        "nfs" => "nfs",
        "gluster" => "gluster",
        "ssh" => "ssh",
        "http" | "https" | "ftp" | "ftps" => "http",
        "null-co" | "null-aio" => "null",
        "virtio-blk-vhost-user" => "vhost-user",
        "virtio-blk-vhost-vdpa" => "vdpa",
        "vvfat" | "quorum" | "replication" => "other",
        _ => return None,
    })
}

/// The kind of storage that `file=` names.
fn of_name(pair: &Pair, disk: &mut Disk) {
    let name = pair.value.as_str();
    let scheme = name
        .split(':')
        .next()
        .filter(|scheme| name.len() > scheme.len() && !scheme.contains('/'));
    let protocol = match scheme {
        Some("json") => {
            disk.table.give("disk.protocol", "other", pair.span);
            return;
        }
        Some("rbd") => "rbd",
        Some(scheme) if scheme.starts_with("nbd") => "nbd",
        Some("iscsi") => "iscsi",
        Some("nvme") => "nvme",
        Some("nfs") => "nfs",
        Some(scheme) if scheme.starts_with("gluster") => "gluster",
        Some("ssh") => "ssh",
        Some("http" | "https" | "ftp" | "ftps") => "http",
        Some("null-co" | "null-aio") => "null",
        Some("fat") => "other",
        // A descriptor may be of any kind.
        _ if name.starts_with("/dev/fdset/") => "other",
        _ if is_device(name) => "block",
        _ => "file",
    };
    let path = match protocol {
        "rbd" => name.strip_prefix("rbd:").unwrap_or(name),
        "file" => name.strip_prefix("file:").unwrap_or(name),
        _ => name,
    };
    path.clone_into(&mut disk.file);
    // Leave out keys and monitors after the image's name.
    if protocol == "rbd" {
        let mut parts = ceph_parts(path).into_iter();
        disk.file = parts.next().unwrap_or_default();
        parts.for_each(|part| ceph_part(&part, &mut disk.ceph));
    }
    disk.table.give("disk.protocol", protocol, pair.value_span);
}

fn cache_size(option: &Opt, prefix: &str, disk: &mut Disk) {
    if let Some(pair) = option.get(&format!("{prefix}l2-cache-size"))
        && let Some(bytes) = super::size(&pair.value, 1)
    {
        disk.table
            .give("disk.l2-cache-size", bytes, pair.value_span);
    }
}

type Words = (
    &'static [&'static str],
    &'static str,
    &'static [&'static str],
);

fn table_words(
    keys: &'static [&'static str],
    property: &'static str,
    words: &'static [&'static str],
) -> Words {
    (keys, property, words)
}

fn words(option: &Opt, (keys, property, words): Words, disk: &mut Disk) {
    if let Some(pair) = keys.iter().find_map(|key| option.get(key))
        && let Some(word) = words.iter().find(|word| **word == pair.value)
    {
        disk.table.give(property, *word, pair.span);
    }
}

fn set(option: &Opt, key: &str, property: &'static str, word: &'static str, disk: &mut Disk) {
    if let Some(pair) = option.get(key) {
        disk.table.give(property, word, pair.span);
    }
}

/// Why a value is unknown.
pub const SHELL: &str = "only a running shell knows it";

/// What the keys of drives, nodes and devices say of a disk.
const SAYS: &[(&str, &[&str])] = &[
    ("aio", &["disk.aio"]),
    ("cache", &["disk.cache"]),
    ("cache.direct", &["disk.cache"]),
    ("cache.no-flush", &["disk.cache"]),
    ("cache.writeback", &["disk.cache"]),
    ("detect-zeroes", &["disk.detect-zeroes"]),
    ("discard", &["disk.discard"]),
    ("driver", &["disk.protocol", "disk.format"]),
    ("format", &["disk.format"]),
    ("if", &["disk.bus"]),
    ("l2-cache-size", &["disk.l2-cache-size"]),
    ("media", &["disk.device"]),
    ("num-queues", &["disk.queues"]),
    ("num_queues", &["disk.queues"]),
    ("queue-size", &["disk.queue-size"]),
    ("read-only", &["disk.readonly"]),
    ("readonly", &["disk.readonly"]),
    ("virtqueue_size", &["disk.queue-size"]),
];

/// Keys of which no value changes what is found.
const NAMES: &[&str] = &[
    "addr",
    "backing",
    "bootindex",
    "bps",
    "bus",
    "chardev",
    "drive",
    "file",
    "filename",
    "host",
    "id",
    "image",
    "index",
    "iops",
    "logical_block_size",
    "node-name",
    "path",
    "physical_block_size",
    "pool",
    "port",
    "serial",
    "server",
    "size",
    "throttle-group",
    "unit",
    "user",
    "werror",
    "rerror",
];

/// Marks the properties of a disk as unknown if a shell variable sets them.
pub fn hide(option: &Opt, disk: &mut Disk) {
    disk.may_have_more |= option.may_have_more;
    for pair in option.pairs.iter().filter(|pair| pair.unknown) {
        let is = |key: &str| {
            let before = pair.key.strip_suffix(key);
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        // A path may have a variable in it; what is a variable from its first byte on may be any URL.
        let is_storage = is("file") || is("filename") || is("path");
        if is_storage && pair.value.starts_with(['$', '`']) {
            disk.table.hide("disk.protocol", SHELL);
            disk.table.remove("disk.block-as-file");
        }
        match SAYS.iter().find(|(key, _)| is(key)) {
            Some((_, properties)) => properties
                .iter()
                .for_each(|property| disk.table.hide(property, SHELL)),
            None => {
                let is_limit = pair.key.starts_with("throttling.")
                    || pair.key.contains("iops")
                    || pair.key.contains("bps");
                disk.may_have_more |= !is_limit && !NAMES.iter().any(|name| is(name));
            }
        }
    }
}
