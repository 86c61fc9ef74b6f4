//! A disk from QEMU to ringdisk and back, on a command line.

use std::fmt::Write;

use super::edit::Changed;
use super::options::{Opt, Syntax};
use super::words;
use crate::fix::{Edits, Target};
use crate::model::Disk;
use crate::model::carried::Dialect;
use crate::text::{Edit, Span};

/// A disk of virtio-blk goes to ringdisk: the device becomes vhost-user-blk, and its drive a socket.
pub fn to_ringdisk(
    target: &Target<'_>,
    name: &str,
    socket: &str,
    queues: u64,
    queue_size: u64,
) -> Edits {
    let changed = Changed::of(target)?;
    let disk = target.disk()?;
    let device = changed.device(disk)?;
    let mut edits = changed.set(device, "", "driver", "vhost-user-blk-pci");
    let old = device.get("drive").ok_or("the device has no drive")?;
    match device.syntax {
        Syntax::Pairs => edits.push(Edit::replace(
            old.span,
            format!("chardev={name},num-queues={queues},queue-size={queue_size}"),
        )),
        _ => return Err("its device is not written as key=value".into()),
    }
    let stays = [
        "id",
        "bootindex",
        "bus",
        "addr",
        "multifunction",
        "packed",
        "disable-legacy",
        "disable-modern",
    ];
    for pair in &device.pairs {
        if !stays.contains(&pair.key.as_str()) && pair.key != "driver" && pair.key != "drive" {
            edits.push(changed.without(device, &pair.key)?);
        }
    }
    let described: Vec<&Opt> = changed
        .nodes(disk)?
        .into_iter()
        .map(|(option, _)| option)
        .collect();
    let chardev = format!(
        "-chardev {}",
        words::quoted(&format!(
            "socket,id={name},path={},reconnect-ms=1000",
            socket.replace(',', ",,")
        ))
    );
    let mut first = true;
    let mut done: Vec<Span> = Vec::new();
    for option in described {
        if done.contains(&option.whole) {
            continue;
        }
        done.push(option.whole);
        if option.syntax == Syntax::Section {
            return Err("its drive is in a file for -readconfig".into());
        }
        match first {
            true => edits.push(Edit::replace(option.whole, chardev.clone())),
            false => {
                let apart = changed.before(option, "").text.len() as u32;
                let span = Span {
                    start: option.whole.start.saturating_sub(apart),
                    ..option.whole
                };
                edits.push(Edit::replace(span, ""));
            }
        }
        first = false;
    }
    Ok(edits)
}

/// The way back.
pub fn from_ringdisk(target: &Target<'_>, storage: &Disk) -> Edits {
    let changed = Changed::of(target)?;
    let device = changed.device(target.disk()?)?;
    let id = device.value("chardev").ok_or("the device has no chardev")?;
    let chardev = changed
        .line
        .group("chardev")
        .find(|chardev| chardev.value("id") == Some(id))
        .ok_or("its chardev is not there")?;
    if device.syntax != Syntax::Pairs || chardev.syntax == Syntax::Section {
        return Err("its device is not written as key=value".into());
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
    let carried = &storage.carried;
    for (limit, value) in &carried.limits {
        let _ = write!(drive, ",throttling.{}={value}", limit.name(Dialect::Qemu));
    }
    if let Some(group) = &carried.group {
        let _ = write!(drive, ",throttling.group={}", group.replace(',', ",,"));
    }
    let mut of_device = format!("drive={id}");
    if let Some(serial) = carried.serial.as_deref().filter(|text| !text.is_empty()) {
        // The device may stand in quotes of any kind.
        if words::quoted(serial) != serial {
            return Err("its serial number would have to be quoted for a shell".into());
        }
        let _ = write!(of_device, ",serial={}", serial.replace(',', ",,"));
    }
    for (key, bytes) in carried.block_sizes() {
        if let Some(bytes) = bytes {
            let _ = write!(of_device, ",{key}={bytes}");
        }
    }
    let mut edits = vec![Edit::replace(
        chardev.whole,
        format!("-drive {}", words::quoted(&drive)),
    )];
    edits.extend(changed.set(device, "", "driver", "virtio-blk-pci"));
    if let Some(pair) = device.get("chardev") {
        edits.push(Edit::replace(pair.span, of_device));
    }
    Ok(edits)
}
