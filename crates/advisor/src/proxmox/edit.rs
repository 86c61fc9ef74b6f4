//! Changes to a VM's configuration, line by line.

use super::{Line, disk_key, lines, parts};
use crate::fix::{Edits, Setting, Target};
use crate::qemu;
use crate::text::{Edit, Span};

/// The changes for a setting.
///
/// # Errors
/// Why there are none.
pub fn edits(target: &Target<'_>, setting: Setting) -> Edits {
    let text = target
        .input
        .sources
        .first()
        .map_or("", |source| source.text.as_str());
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
            return qemu::edits(target, setting);
        }
        Setting::TrimThreads => return qemu::edits(target, setting),
        _ => {}
    }
    let disk = target.disk()?;
    if in_args(disk.span) {
        return qemu::edits(target, setting);
    }
    let line = lines
        .iter()
        .find(|line| line.span == disk.span)
        .ok_or("the disk is not there")?;
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
        Setting::SingleController => controller(&lines),
        Setting::QueuesAsVcpus if disk.name.starts_with("scsi") => {
            let vcpus = target.vm()?.table.number("vm.vcpus").unwrap_or(1);
            Ok(set("queues", &vcpus.to_string()))
        }
        Setting::QueuesAsVcpus => {
            Err("Proxmox has queues only for SCSI disks; raise the machine version instead".into())
        }
        Setting::Virtio if disk.name.starts_with("scsi") => controller(&lines),
        Setting::Virtio => to_scsi(&lines, line),
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
        .ok_or("there is no disk")?;
    Ok(vec![Edit::replace(
        first.span.before(),
        "scsihw: virtio-scsi-single\n",
    )])
}

/// Moves a disk to the SCSI bus, and its name in the boot order.
fn to_scsi(lines: &[Line<'_>], line: &Line<'_>) -> Edits {
    let free = (0..31)
        .map(|index| format!("scsi{index}"))
        .find(|key| !lines.iter().any(|line| line.key == key));
    let free = free.ok_or("all SCSI disks are taken")?;
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
    // What only IDE and SATA disks have.
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
        None => edits.insert(
            0,
            Edit::replace(line.span.before(), "scsihw: virtio-scsi-single\n"),
        ),
    }
    Ok(edits)
}
