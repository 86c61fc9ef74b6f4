//! Changes to a VM's configuration, line by line.

use super::{Line, disk_key, lines, parts, pending};
use crate::qemu::{self, ParsedCommand};
use crate::setting::Setting;
use crate::target::{Edits, Target};
use crate::text::{Edit, Span};

/// The edits for a setting. `command` parses `args:`.
///
/// # Errors
/// The reason why the setting cannot be made.
pub fn edits<'a>(
    target: &Target<'_>,
    command: impl Fn() -> Result<&'a ParsedCommand, String>,
    setting: Setting,
) -> Edits {
    let text = target
        .input
        .sources
        .first()
        .map_or("", |source| source.text.as_str());
    if let Some(key) = pending(text) {
        return Err(format!(
            "[PENDING] sets {key} at the next start, which may undo this or touch the same disk: stop and start the VM \
             first"
        ));
    }
    let (lines, _) = lines(text);
    let args = lines.iter().rev().find(|line| line.key == "args");
    let in_args = |span: Span| {
        args.is_some_and(|args| args.span.start <= span.start && span.end <= args.span.end)
    };
    match setting {
        Setting::SharedMemory => {
            let own = |line: &Line<'_>| match line.key {
                "numa" => line.value != "0",
                key => key.starts_with("numa") || key == "hugepages",
            };
            if lines.iter().any(own) {
                return Err(
                    "Proxmox says where its memory is, by numa or hugepages: make that shared by \
                     hand"
                        .into(),
                );
            }
            return qemu::edits(target, command()?, setting);
        }
        Setting::TrimThreads => return qemu::edits(target, command()?, setting),
        _ => {}
    }
    let disk = target.disk()?;
    if in_args(disk.span) {
        return qemu::edits(target, command()?, setting);
    }
    let line = lines
        .iter()
        .find(|line| line.span == disk.span)
        .ok_or("the disk is missing")?;
    let set = |key: &str, value: &str| {
        let parts = parts(line);
        let known = parts.iter().rev().find(|part| part.key == key);
        vec![match known {
            Some(part) => Edit::replace(part.span, format!("{key}={value}")),
            None => Edit::replace(line.value_span.after(), format!(",{key}={value}")),
        }]
    };
    match setting {
        Setting::Cache(mode) => Ok(set("cache", mode)),
        Setting::CacheDirect => Ok(match disk.table.word("disk.cache") {
            Some("writethrough") => set("cache", "directsync"),
            _ => set("cache", "none"),
        }),
        Setting::Aio(word) => Ok(set("aio", word)),
        Setting::Discard => Ok(set("discard", "on")),
        Setting::OwnThread => Ok(set("iothread", "1")),
        Setting::SingleController if disk.table.word("disk.bus") == Some("virtio-scsi") => {
            controller(&lines)
        }
        Setting::SingleController => {
            Err("it is not on virtio-scsi; move it there first, or remove iothread".into())
        }
        Setting::QueuesAsVcpus if disk.name.starts_with("scsi") => {
            let vcpus = target.vm()?.table.number("vm.vcpus").unwrap_or(1);
            Ok(set("queues", &vcpus.to_string()))
        }
        Setting::QueuesAsVcpus => Err(
            "Proxmox supports queues only for SCSI disks; use a newer machine version instead"
                .into(),
        ),
        Setting::Virtio if disk.name.starts_with("scsi") => controller(&lines),
        Setting::Virtio => to_scsi(target, &lines, line),
        _ => Err("Proxmox has no such setting".into()),
    }
}

fn controller(lines: &[Line<'_>]) -> Edits {
    if let Some(line) = lines.iter().find(|line| line.key == "scsihw") {
        return Ok(vec![Edit::replace(line.value_span, "virtio-scsi-single")]);
    }
    let first = lines
        .iter()
        .find(|line| disk_key(line.key))
        .ok_or("there are no disks")?;
    Ok(vec![Edit::replace(
        first.span.before(),
        "scsihw: virtio-scsi-single\n",
    )])
}

/// Moves a disk to the SCSI bus, and its name in the boot order.
fn to_scsi(target: &Target<'_>, lines: &[Line<'_>], line: &Line<'_>) -> Edits {
    // Names are unique within a round.
    let keys = || lines.iter().map(|line| line.key.to_owned()).collect();
    let free = target
        .round
        .name(target.vm, "scsi", keys, |index| format!("scsi{index}"));
    if !disk_key(&free) {
        return Err("all SCSI disk names are in use".into());
    }
    let boots = first_disk(lines, None);
    let is_first = boots.as_deref() == Some(line.key);
    let others_move = lines.iter().any(|other| {
        let is_disk = disk_key(other.key) && !is_cdrom(other) && other.key != line.key;
        is_disk && (other.key.starts_with("ide") || other.key.starts_with("sata"))
    });
    // The boot disk moves last, when the order of the others is final.
    let changes = boots != first_disk(lines, Some((line.key, &free))) || is_first && others_move;
    if changes && !has_boot_disk(lines) {
        return Err(format!(
            "Proxmox might boot from a disk other than {}: set 'boot: order='",
            boots.unwrap_or_default()
        ));
    }
    let start = line.span.start as usize;
    let mut edits = vec![Edit::replace(
        Span::new(0, start, start + line.key.len()),
        free.clone(),
    )];
    for boot in lines
        .iter()
        .filter(|line| matches!(line.key, "boot" | "bootdisk"))
    {
        let mut at = boot.value_span.start as usize;
        for word in boot.value.split_inclusive(['=', ';', ',', ' ']) {
            let name = word.trim_end_matches(['=', ';', ',', ' ']);
            if name == line.key {
                edits.push(Edit::replace(
                    Span::new(0, at, at + name.len()),
                    free.clone(),
                ));
            }
            at += word.len();
        }
    }
    // Settings that only IDE and SATA disks have.
    let mut start = line.value_span.start as usize;
    for (i, part) in line.value.split(',').enumerate() {
        if part.starts_with("model=") && i > 0 {
            edits.push(Edit::replace(
                Span::new(0, start - 1, start + part.len()),
                "",
            ));
        }
        start += part.len() + 1;
    }
    let others = lines
        .iter()
        .any(|line| line.key.starts_with("scsi") && line.key != "scsihw");
    let model = lines.iter().find(|line| line.key == "scsihw");
    match model {
        Some(model) if model.value.starts_with("virtio-scsi") => {}
        Some(_) | None if others => {
            return Err(
                "other disks are on a SCSI controller that is not virtio: change scsihw first"
                    .into(),
            );
        }
        Some(model) => edits.push(Edit::replace(model.value_span, "virtio-scsi-single")),
        // Insert it at a fixed position, so that only one of several disks in a round adds it.
        None => edits.splice(0..0, controller(lines)?).for_each(drop),
    }
    Ok(edits)
}

fn is_cdrom(line: &Line<'_>) -> bool {
    line.value.contains("media=cdrom") || line.value.contains("cloudinit")
}

/// Whether the configuration names the boot disk.
fn has_boot_disk(lines: &[Line<'_>]) -> bool {
    lines.iter().any(|line| match line.key {
        "boot" => line.value.contains("order="),
        "bootdisk" => true,
        _ => false,
    })
}

/// The disk from which Proxmox boots by default, under its current name; `renamed` gives one disk another name.
fn first_disk(lines: &[Line<'_>], renamed: Option<(&str, &str)>) -> Option<String> {
    // Proxmox's order (PVE::QemuServer::Drive, `valid_drive_names`).
    let buses = ["ide", "scsi", "virtio", "sata"];
    let place = |key: &str| {
        let bus = key.trim_end_matches(|c: char| c.is_ascii_digit());
        let index: usize = key.get(bus.len()..)?.parse().ok()?;
        Some((buses.iter().position(|name| *name == bus)?, index))
    };
    lines
        .iter()
        .filter(|line| disk_key(line.key) && !is_cdrom(line))
        .min_by_key(|line| match renamed {
            Some((old, new)) if old == line.key => place(new),
            _ => place(line.key),
        })
        .map(|line| line.key.to_owned())
}
