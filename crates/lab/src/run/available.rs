//! What this host lacks for a configuration.

use std::fs;
use std::path::Path;

use harness::paths::find_program;

use crate::plan::words::{Aio, Device, GuestKind};
use crate::plan::{Backing, Plan, Server, Settings};

/// Why a configuration cannot be measured here, and what to do about it; `None` if nothing speaks against it.
pub fn missing(guest: GuestKind, settings: &Settings, ringdisk: &Path) -> Option<String> {
    let program = |name: &str, package: &str| {
        find_program(name)
            .is_none()
            .then(|| format!("{name} is missing; on Debian, 'apt install {package}'"))
    };
    let file = |path: &Path| (!path.exists()).then(|| format!("there is no {}", path.display()));
    if settings.device == Device::Host {
        return program("fio", "fio").or_else(|| backing(settings));
    }
    let server = match (&settings.device, &settings.server) {
        (Device::VhostUserBlk, Server::QemuStorageDaemon) => {
            program("qemu-storage-daemon", "qemu-utils")
        }
        (Device::VhostUserBlk, Server::Ringdisk) => file(ringdisk),
        (Device::VhostUserBlk, Server::Socket(path) | Server::Build(path)) => file(path),
        _ => None,
    };
    let qemu = match &settings.qemu {
        _ if guest == GuestKind::None => None,
        Some(path) => file(path),
        None => program("qemu-system-x86_64", "qemu-system-x86"),
    };
    qemu.or(server)
        .or_else(|| settings.preload.as_deref().and_then(file))
        .or_else(|| hugepages(settings))
        .or_else(|| backing(settings))
        .or_else(|| ring(settings))
}

fn backing(settings: &Settings) -> Option<String> {
    match &settings.backing {
        Backing::Zram if !rustix::process::geteuid().is_root() => {
            Some("setting up zram needs root".into())
        }
        Backing::Path(path) if !path.exists() => Some(format!("there is no {}", path.display())),
        Backing::Rbd(image) if !Path::new("/etc/ceph/ceph.conf").exists() => Some(format!(
            "rbd:{image} needs a Ceph cluster, and there is no /etc/ceph/ceph.conf"
        )),
        _ => None,
    }
}

fn hugepages(settings: &Settings) -> Option<String> {
    if !settings.hugepages {
        return None;
    }
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |key: &str| {
        let line = meminfo.lines().find(|line| line.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let free_mib =
        field("HugePages_Free:").unwrap_or(0) * field("Hugepagesize:").unwrap_or(0) / 1024;
    let wanted_mib = settings.memory_mib * u64::from(settings.guests);
    (free_mib < wanted_mib).then(|| {
        format!(
            "{wanted_mib} MiB of huge pages are needed and {free_mib} are free; see vm.nr_hugepages"
        )
    })
}

fn ring(settings: &Settings) -> Option<String> {
    let off = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    (settings.aio == Some(Aio::IoUring) && off.trim() == "2")
        .then(|| "io_uring is switched off here (kernel.io_uring_disabled=2)".into())
}

/// Disks that the plan writes to and that the lab did not make: the user is asked.
pub fn overwritten(plan: &Plan) -> Vec<String> {
    if !plan.workloads.iter().any(crate::plan::Workload::writes) {
        return Vec::new();
    }
    let mut names: Vec<String> = Vec::new();
    for case in &plan.cases {
        let settings = &case.settings;
        match (&settings.device, &settings.server, &settings.backing) {
            (Device::VhostUserBlk, Server::Socket(path), _) => {
                names.push(format!("the disk behind {}", path.display()))
            }
            (_, _, backing @ (Backing::Path(_) | Backing::Rbd(_))) => {
                names.push(backing.to_string())
            }
            _ => {}
        }
    }
    if let Some(ssh) = &plan.ssh {
        names.extend(ssh.disks.iter().map(|disk| {
            format!(
                "{disk} in the guest {}",
                ssh.host.as_deref().unwrap_or("that is booted")
            )
        }));
    }
    names.sort();
    names.dedup();
    names
}
