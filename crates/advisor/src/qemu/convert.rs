//! Converts a disk on a command line from QEMU to ringdisk and back.

use std::fmt::Write;

use super::editor::{Editor, ParsedCommand};
use super::options::{Opt, Pair, Syntax};
use super::words;
use crate::model::Disk;
use crate::model::carried::{Dialect, Limit};
use crate::target::{Edits, Target};
use crate::text::{Edit, Span};

/// The keys that the device of a convertible disk may have, with their values; no values mean any value.
const DEVICE: &[Known] = &[
    (
        "driver",
        &[
            "virtio-blk",
            "virtio-blk-pci",
            "virtio-blk-pci-transitional",
            "virtio-blk-pci-non-transitional",
        ],
    ),
    ("drive", &[]),
    ("id", &[]),
    ("bootindex", &[]),
    ("bus", &[]),
    ("addr", &[]),
    ("multifunction", &[]),
    ("acpi-index", &[]),
    ("packed", &[]),
    ("event_idx", &[]),
    ("indirect_desc", &[]),
    ("page-per-vq", &[]),
    ("disable-legacy", &[]),
    ("disable-modern", &[]),
    ("num-queues", &[]),
    ("queue-size", &[]),
    ("iothread", &[]),
    ("iothread-vq-mapping.", &[]),
    ("ioeventfd", &[]),
    ("scsi", &["off"]),
    ("serial", &[]),
    ("logical_block_size", &["512", "4096"]),
    ("physical_block_size", &["512", "4096"]),
    ("write-cache", &[]),
    ("config-wce", &["on"]),
    ("request-merging", &[]),
    ("discard", &["on"]),
    ("write-zeroes", &["on"]),
    ("share-rw", &["off"]),
    ("iommu_platform", &["off"]),
    ("ats", &["off"]),
    ("werror", &["auto", "report", "stop", "enospc"]),
    ("rerror", &["auto", "report", "stop"]),
];

/// The keys that the new device keeps, because the guest sees them.
const KEPT: &[&str] = &[
    "driver",
    "id",
    "bootindex",
    "bus",
    "addr",
    "multifunction",
    "acpi-index",
    "packed",
    "event_idx",
    "indirect_desc",
    "page-per-vq",
    "disable-legacy",
    "disable-modern",
];

/// The keys of a `-drive`.
const DRIVE: &[Known] = &[
    ("id", &[]),
    ("node-name", &[]),
    ("if", &["none"]),
    ("media", &["disk"]),
    ("index", &[]),
    ("file", &[]),
    ("file.filename", &[]),
    ("file.driver", &["file", "host_device"]),
    ("format", &["raw", "qcow2"]),
    ("driver", &["raw", "qcow2"]),
    ("cache", &[]),
    ("cache.direct", &[]),
    ("cache.no-flush", &[]),
    ("cache.writeback", &[]),
    ("aio", &[]),
    ("discard", &[]),
    ("detect-zeroes", &[]),
    ("readonly", &[]),
    ("read-only", &[]),
    ("auto-read-only", &[]),
    ("snapshot", &["off"]),
    ("copy-on-read", &["off"]),
    ("l2-cache-size", &[]),
    ("serial", &[]),
    ("werror", &["auto", "report", "stop", "enospc"]),
    ("rerror", &["auto", "report", "stop"]),
    ("throttling.group", &[]),
];

/// The keys of a `-blockdev` node.
const NODE: &[Known] = &[
    (
        "driver",
        &["raw", "qcow2", "throttle", "file", "host_device"],
    ),
    ("node-name", &[]),
    ("filename", &[]),
    ("file", &[]),
    ("file.", &[]),
    // libvirt writes this at the end of a chain.
    ("backing", &["null"]),
    ("cache.direct", &[]),
    ("cache.no-flush", &[]),
    ("aio", &[]),
    ("discard", &[]),
    ("detect-zeroes", &[]),
    ("read-only", &[]),
    ("auto-read-only", &[]),
    ("force-share", &["off"]),
    ("locking", &["auto", "on"]),
    ("l2-cache-size", &[]),
    ("throttle-group", &[]),
];

/// A key with its values, or a prefix of keys if it ends with a dot.
type Known = (&'static str, &'static [&'static str]);

fn is_known(known: &[Known], pair: &Pair, key: &str) -> bool {
    known.iter().any(|(name, values)| {
        (*name == key || (name.ends_with('.') && key.starts_with(name)))
            && (values.is_empty() || values.contains(&pair.value.as_str()))
    })
}

/// Whether ringdisk supports all settings of a device and its nodes.
fn is_movable(editor: &Editor<'_>, device: &Opt, nodes: &[(&Opt, String)]) -> Result<(), String> {
    let foreign = |option: &Opt, pair: &Pair| {
        let Pair { key, value, .. } = pair;
        Err(format!(
            "ringdisk has no counterpart for {key}={value} of -{}",
            option.group
        ))
    };
    for pair in &device.pairs {
        if !is_known(DEVICE, pair, &pair.key) {
            return foreign(device, pair);
        }
    }
    let mut formats = 0;
    for (option, prefix) in nodes {
        if option.is_unknown() || device.is_unknown() {
            return Err("it contains a shell variable".into());
        }
        let is_drive = option.group == "drive";
        for pair in &option.pairs {
            let Some(key) = pair.key.strip_prefix(prefix.as_str()) else {
                continue;
            };
            let limit = key.strip_prefix("throttling.").map_or_else(
                || Limit::named(key, Dialect::OldDrive),
                |name| Limit::named(name, Dialect::Qemu),
            );
            let known = if is_drive {
                limit.is_some() || is_known(DRIVE, pair, key)
            } else {
                is_known(NODE, pair, key)
            };
            if !known {
                return foreign(option, pair);
            }
            formats +=
                usize::from(key == "driver" && matches!(pair.value.as_str(), "raw" | "qcow2"));
        }
    }
    if formats > 1 {
        return Err("its storage has nested formats".into());
    }
    if editor.parsed.is_snapshot {
        return Err("-snapshot discards all writes".into());
    }
    // No other option may refer to one of these by name.
    let mut names: Vec<&str> = Vec::new();
    for (option, prefix) in nodes {
        for key in ["id", "node-name"] {
            names.extend(option.value(&format!("{prefix}{key}")));
        }
    }
    let is_own = |option: &Opt| {
        option.whole == device.whole || nodes.iter().any(|(node, _)| node.whole == option.whole)
    };
    let known: Vec<&str> = names.iter().copied().chain(device.value("id")).collect();
    for option in editor.parsed.users(&known).filter(|option| !is_own(option)) {
        let named = option.pairs.iter().find(|pair| {
            let is_name = |key: &str| {
                matches!(
                    key,
                    "drive" | "file" | "backing" | "node" | "top" | "device"
                ) || key.ends_with(".file")
            };
            is_name(&pair.key) && names.contains(&pair.value.as_str())
        });
        if let Some(pair) = named {
            return Err(format!("-{} also uses '{}'", option.group, pair.value));
        }
        let set = option.group == "set"
            && option.pairs.first().is_some_and(|pair| {
                let id = pair.key.split('.').nth(1);
                id.is_some()
                    && (id == device.value("id") || id.is_some_and(|id| names.contains(&id)))
            });
        if set {
            return Err("-set changes it".into());
        }
    }
    Ok(())
}

/// The edits that move a virtio-blk disk to ringdisk: the device becomes vhost-user-blk, and its drive a socket.
///
/// # Errors
/// A setting of the disk that ringdisk does not support.
pub fn to_ringdisk(
    target: &Target<'_>,
    parsed: &ParsedCommand,
    name: &str,
    socket: &str,
    queues: u64,
    queue_size: u64,
) -> Edits {
    let editor = Editor::of(target, parsed);
    let disk = target.disk()?;
    let device = editor.device(disk)?;
    let nodes = editor.nodes(disk)?;
    editor.keeps_globals()?;
    if editor.line.may_have_more {
        return Err("a shell variable may contain more options".into());
    }
    is_movable(&editor, device, &nodes)?;
    let old = device.get("drive").ok_or("the device has no drive")?;
    if device.syntax != Syntax::Pairs || !device.writes(old) {
        return Err("its device is not in key=value syntax".into());
    }
    let driver = match device.value("driver") {
        Some("virtio-blk-pci-transitional") => "vhost-user-blk-pci-transitional",
        Some("virtio-blk-pci-non-transitional") => "vhost-user-blk-pci-non-transitional",
        _ => "vhost-user-blk-pci",
    };
    let mut edits = editor.set(device, "", "driver", driver)?;
    edits.push(Edit::replace(
        old.span,
        format!("chardev={name},num-queues={queues},queue-size={queue_size}"),
    ));
    for pair in &device.pairs {
        if !KEPT.contains(&pair.key.as_str()) && pair.key != "drive" {
            edits.push(editor.without(device, &pair.key)?);
        }
    }
    let chardev = format!(
        "-chardev {}",
        words::quoted(&format!(
            "socket,id={name},path={},reconnect-ms=1000",
            socket.replace(',', ",,")
        ))
    );
    let mut done: Vec<Span> = Vec::new();
    for (option, _) in nodes {
        if done.contains(&option.whole) {
            continue;
        }
        if option.syntax == Syntax::Section {
            return Err("its drive is in a file for -readconfig".into());
        }
        if done.is_empty() {
            edits.push(Edit::replace(option.whole, chardev.clone()));
        } else {
            edits.push(editor.removed(option.whole));
        }
        edits.extend(editor.sets_removed(option));
        done.push(option.whole);
    }
    Ok(edits)
}

/// The edits that move a disk back to QEMU.
pub fn from_ringdisk(target: &Target<'_>, parsed: &ParsedCommand, storage: &Disk) -> Edits {
    let editor = Editor::of(target, parsed);
    editor.keeps_globals()?;
    let device = editor.device(target.disk()?)?;
    let id = device.value("chardev").ok_or("the device has no chardev")?;
    let chardev = editor.line.find("chardev", id);
    let chardev = chardev.ok_or("its chardev is missing")?;
    let is_written = device
        .get("chardev")
        .is_some_and(|pair| device.writes(pair));
    if device.syntax != Syntax::Pairs || !is_written || chardev.syntax == Syntax::Section {
        return Err("its device is not in key=value syntax".into());
    }
    let word = |name| storage.table.word(name).unwrap_or_default();
    let format = match word("disk.format") {
        "" if storage.file.ends_with(".qcow2") => "qcow2",
        "" => "raw",
        format => format,
    };
    let aio = match (storage.table.word("disk.direct"), word("disk.protocol")) {
        (Some("yes"), "block") => ",aio=native",
        (Some("yes"), _) => ",aio=io_uring",
        _ => "",
    };
    let mut drive = format!(
        "file={},format={format},if=none,id={id},cache={},discard={}{aio}",
        storage.file.replace(',', ",,"),
        word("disk.cache"),
        word("disk.discard")
    );
    if let found @ ("on" | "unmap") = word("disk.detect-zeroes") {
        let _ = write!(drive, ",detect-zeroes={found}");
    }
    if storage.table.is_yes("disk.readonly") {
        drive.push_str(",readonly=on");
    }
    let carried = &storage.carried;
    for (limit, value) in &carried.limits {
        let _ = write!(drive, ",throttling.{}={value}", limit.name(Dialect::Qemu));
    }
    if let Some(group) = &carried.group {
        let _ = write!(drive, ",throttling.group={}", group.replace(',', ",,"));
    }
    let mut of_device = format!("drive={id}");
    if let Some(serial) = carried.serial.as_deref().filter(|text| !text.is_empty()) {
        // The device may be in quotes of any kind.
        if words::quoted(serial) != serial {
            return Err("its serial number needs quotes".into());
        }
        let _ = write!(of_device, ",serial={}", serial.replace(',', ",,"));
    }
    for (key, bytes) in carried.block_sizes() {
        if let Some(bytes) = bytes {
            let _ = write!(of_device, ",{key}={bytes}");
        }
    }
    for (key, policy) in [("rerror", &carried.rerror), ("werror", &carried.werror)] {
        match policy.as_deref() {
            // QEMU does not retry by itself; stopping also hides the error from the guest.
            Some("retry") => of_device.push_str(&format!(",{key}=stop")),
            Some(word) => of_device.push_str(&format!(",{key}={word}")),
            None => {}
        }
    }
    let mut edits = vec![Edit::replace(
        chardev.whole,
        format!("-drive {}", words::quoted(&drive)),
    )];
    edits.extend(editor.sets_removed(chardev));
    edits.extend(editor.set(device, "", "driver", "virtio-blk-pci")?);
    if let Some(pair) = device.get("chardev") {
        edits.push(Edit::replace(pair.span, of_device));
    }
    Ok(edits)
}
