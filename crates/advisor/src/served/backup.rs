//! What a backup of a VM has, as Proxmox' own backups have it (`PVE::VZDump::QemuServer`).

use std::fmt::Write;

use super::{
    Request, ServedDisk, has_no_backup, is_of_storage, other_devices, served, without_ringdisk,
};
use crate::proxmox::{disk_key, lines, parts};

/// A part of a backup that Proxmox restores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupDevice {
    /// As in `scsi0` or `efidisk0`.
    pub drive: String,
    /// The name of its data in the backup.
    pub name: String,
    /// The volume's name in Proxmox.
    pub volume: String,
    /// The name of ringdisk's disk; `None` for small volumes that QEMU has itself.
    pub disk: Option<String>,
}

/// What a backup has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backup {
    /// `qemu-server.conf`: the VM as if Proxmox had all drives, with a line for each device that says where it was.
    pub config: String,
    pub devices: Vec<BackupDevice>,
    /// All disks that ringdisk serves, in the backup or not.
    pub served: Vec<ServedDisk>,
    /// Drives that are left out because they have `backup=0`.
    pub left_out: Vec<String>,
    /// Whether the guest has an agent that freezes its file systems for backups.
    pub has_agent: bool,
}

/// # Errors
/// The configuration contradicts itself, or the VM has a disk that ringdisk does not serve.
pub fn backup(text: &str, request: &Request<'_>) -> Result<Backup, String> {
    let served = served(text, request)?;
    if served.is_empty() {
        return Err(
            "ringdisk serves no disk of it: Proxmox' own backup (vzdump) has all its disks".into(),
        );
    }
    let others = other_devices(text);
    if !others.is_empty() {
        return Err(format!(
            "'args:' has a disk at {}, which this backup would lack: 'ringdisk backup copy' copies it",
            others.join(", ")
        ));
    }
    let whole = without_ringdisk(text)?;
    let (all, _) = lines(&whole);
    let (mut devices, mut left_out) = (Vec::new(), Vec::new());
    for line in all {
        let parts = parts(&line);
        let volume = parts
            .iter()
            .find(|part| matches!(part.key, "" | "file" | "volume"))
            .map_or("", |part| part.value);
        let is_disk = disk_key(line.key)
            && volume != "none"
            && !parts
                .iter()
                .any(|part| part.key == "media" && part.value == "cdrom");
        let is_small = matches!(line.key, "efidisk0" | "tpmstate0");
        if !is_disk && !is_small {
            continue;
        }
        let disk = served.iter().find(|disk| disk.drive == line.key);
        if is_disk && has_no_backup(line.value) {
            left_out.push(line.key.to_owned());
            continue;
        }
        if is_disk && disk.is_none() {
            return Err(format!(
                "ringdisk does not serve its {}, and one backup cannot have both: 'ringdisk proxmox enable {} --disk {}' while \
                 the VM is stopped, or set backup=0 in the drive's line",
                line.key, request.vm, line.key
            ));
        }
        let name = match line.key {
            "tpmstate0" => "drive-tpmstate0-backup".into(),
            drive => format!("drive-{drive}"),
        };
        devices.push(BackupDevice {
            drive: line.key.to_owned(),
            name,
            volume: volume.to_owned(),
            disk: disk.map(|disk| disk.name.clone()),
        });
    }
    if devices.iter().all(|device| device.disk.is_none()) {
        return Err("all its disks have backup=0".into());
    }
    Ok(Backup {
        config: stored(&whole, &devices),
        devices,
        served,
        left_out,
        has_agent: has_agent(&whole),
    })
}

/// The first section without what belongs to this host and moment, and with the places of the devices.
fn stored(whole: &str, devices: &[BackupDevice]) -> String {
    let mut text = String::new();
    for line in whole.lines().take_while(|line| !line.starts_with('[')) {
        let key = line.split(':').next().unwrap_or_default();
        let is_left_out = matches!(key, "lock" | "parent")
            || key.starts_with("unused")
            || line.starts_with("#vzdump#")
            || line.starts_with("#qmdump#");
        if !is_left_out {
            text += line;
            text.push('\n');
        }
    }
    for device in devices {
        let storage = match device.volume.split_once(':') {
            Some((storage, _)) if is_of_storage(&device.volume) => storage,
            _ => "",
        };
        let format = match device.volume.rsplit_once('.') {
            Some((_, format @ ("qcow2" | "vmdk"))) => format,
            _ => "raw",
        };
        let (drive, name) = (&device.drive, &device.name);
        let _ = writeln!(text, "#qmdump#map:{drive}:{name}:{storage}:{format}:");
    }
    text
}

/// As `agent:` in `qm.conf(5)`.
fn has_agent(text: &str) -> bool {
    let (all, _) = lines(text);
    let Some(line) = all.iter().rev().find(|line| line.key == "agent") else {
        return false;
    };
    let says = |keys: &[&str], values: &[&str]| {
        let parts = parts(line);
        let mut parts = parts.iter();
        parts.any(|part| keys.contains(&part.key) && values.contains(&part.value))
    };
    // The first is today's name of the other two.
    let freezes = ["freeze-fs", "freeze-fs-on-backup", "guest-fsfreeze"];
    says(&["", "enabled"], &["1", "on", "yes", "true"])
        && !says(&freezes, &["0", "off", "no", "false"])
}
