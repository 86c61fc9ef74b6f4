//! Whether this host can run a configuration.

use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use harness::cpu;
use harness::paths::{find_program, is_block_device};
use harness::qemu::SYSTEM;

use crate::guest::{Accel, version};
use crate::plan::backing::Name;
use crate::plan::cpus::CpuList;
use crate::plan::host_queue::HostQueue;
use crate::plan::words::{Aio, Device, FileSystem, Format, GuestKind};
use crate::plan::{Backing, IoThread, Plan, Server, Settings};
use crate::storage::named::is_thin;
use crate::storage::rbd::Image;
use crate::storage::{Disk, host_queue as queue};

/// Why a configuration cannot run here, and what to do about it; `None` if it can.
pub fn missing(plan: &Plan, settings: &Settings, ringdisk: &Path, accel: Accel) -> Option<String> {
    let (guest, create) = (plan.guest, plan.create);
    let file = |path: &Path| (!path.exists()).then(|| format!("there is no {}", path.display()));
    if settings.device == Device::Host {
        return program("fio", "fio")
            .or_else(|| backing(settings, create))
            .or_else(|| in_use(plan, settings))
            .or_else(|| cpus(plan, settings))
            .or_else(|| host_queue(plan, settings));
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
        .or_else(|| preloaded(settings).iter().find_map(|path| file(path)))
        .or_else(|| hugepages(settings))
        .or_else(|| backing(settings, create))
        .or_else(|| in_use(plan, settings))
        .or_else(|| ring(settings))
        .or_else(|| processor(plan, settings, accel))
        .or_else(|| mapping(plan, settings))
        .or_else(|| file_system(plan, settings))
        .or_else(|| cpus(plan, settings))
        .or_else(|| host_queue(plan, settings))
}

/// A block device that would be overwritten and that this host uses: the writes would destroy a mounted file system.
pub fn in_use(plan: &Plan, settings: &Settings) -> Option<String> {
    let Backing::Named(disks) = &settings.backing else {
        return None;
    };
    let is_busy = |path: &Path| {
        let mut open = fs::OpenOptions::new();
        open.read(true)
            .custom_flags(rustix::fs::OFlags::EXCL.bits().cast_signed());
        is_block_device(path)
            && open
                .open(path)
                .is_err_and(|e| e.kind() == io::ErrorKind::ResourceBusy)
    };
    let disks = disks.all(settings.guests, settings.volumes);
    disks.iter().find_map(|name| match name {
        Name::Path(path) if is_busy(path) && is_written(plan, settings, name) => Some(format!(
            "{} is in use on this host (mounted, or part of LVM or RAID), and this plan overwrites it",
            path.display()
        )),
        _ => None,
    })
}

/// Whether a run writes to a disk that the plan names. Thin disks are filled, even for loads that only read.
fn is_written(plan: &Plan, settings: &Settings, name: &Name) -> bool {
    plan.workloads.iter().any(crate::plan::Workload::writes)
        || settings.file_system != FileSystem::None
        || plan.create
        || settings.prefill && settings.format == Format::Raw && may_be_thin(name, settings)
}

/// A file system is made only in guests that the lab makes.
fn file_system(plan: &Plan, settings: &Settings) -> Option<String> {
    let name = settings.file_system;
    match plan.guest {
        _ if name == FileSystem::None => None,
        GuestKind::Linux => {
            let package = match name {
                FileSystem::Xfs => "xfsprogs",
                FileSystem::Ext4 | FileSystem::None => "e2fsprogs",
            };
            program(&format!("mkfs.{name}"), package)
        }
        GuestKind::Ssh | GuestKind::None => Some(format!(
            "file-system={name} is for guests that the lab makes (guest = \"linux\")"
        )),
    }
}

/// Whether QEMU is too old to spread queues over threads.
fn mapping(plan: &Plan, settings: &Settings) -> Option<String> {
    let spread = settings.has_iothreads() && matches!(settings.iothread, IoThread::Mapping(_));
    let needed = match settings.device {
        _ if !spread || plan.guest == GuestKind::None => return None,
        Device::VirtioScsi => (10, 0),
        _ => (9, 0),
    };
    let path = settings.qemu.clone().unwrap_or_else(|| SYSTEM.into());
    let said = version(&path);
    let found = qemu_version(&said)?;
    (found < needed).then(|| {
        format!(
            "iothread={} with {} needs QEMU {}.{}; this is {}.{}",
            settings.iothread, settings.device, needed.0, needed.1, found.0, found.1
        )
    })
}

/// The version in the first line of QEMU's `--version`.
fn qemu_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_once("version ")?.1.split(['.', ' ']);
    let mut number = || numbers.next()?.parse().ok();
    Some((number()?, number()?))
}

fn program(name: &str, package: &str) -> Option<String> {
    find_program(name)
        .is_none()
        .then(|| format!("{name} is missing; on Debian, 'apt install {package}'"))
}

fn processor(plan: &Plan, settings: &Settings, accel: Accel) -> Option<String> {
    let cpu = settings
        .cpu
        .as_ref()
        .filter(|_| plan.guest != GuestKind::None)?;
    let part = cpu.kvm_only().filter(|_| accel == Accel::Tcg)?;
    Some(format!(
        "cpu={cpu}: only KVM has {part}, and guests run under TCG here; without KVM, the best model is max"
    ))
}

/// CPUs that this process may not use.
fn cpus(plan: &Plan, settings: &Settings) -> Option<String> {
    let wanted = plan.cpus(settings);
    let guest = plan.guest != GuestKind::None;
    let mut all = [wanted.server, wanted.vcpu].concat();
    if !guest {
        all.extend(wanted.load);
    }
    if guest && !all.is_empty() && plan.ssh.as_ref().is_some_and(|ssh| ssh.host.is_some()) {
        return Some(
            "a guest that runs already has its CPUs: the lab pins only what it starts".into(),
        );
    }
    let allowed = cpu::affinity(None).ok()?;
    let other = all.into_iter().find(|cpu| !allowed.contains(cpu))?;
    Some(format!(
        "CPU {other} is needed, and this process may use {}",
        CpuList::of(allowed)
    ))
}

/// Why the queue of the host's block device cannot be set, as far as the device is known before the run.
fn host_queue(plan: &Plan, settings: &Settings) -> Option<String> {
    let wanted = &settings.host_queue;
    if *wanted == HostQueue::default() {
        return None;
    }
    if !rustix::process::geteuid().is_root() {
        return Some("host-scheduler and host-read-ahead need root".into());
    }
    let own = plan.directory.clone();
    let path = match &settings.backing {
        Backing::File => own.filter(|directory| directory.exists()),
        Backing::Directory(path) => Some(path.clone()),
        _ => match settings.backing.first() {
            Some(Name::Path(path)) if !plan.create => Some(path),
            _ => None,
        },
    };
    queue::missing(wanted, &path?)
}

/// The libraries of `preload`, which has colons between them, as LD_PRELOAD.
fn preloaded(settings: &Settings) -> Vec<PathBuf> {
    settings
        .preload
        .iter()
        .flat_map(std::env::split_paths)
        .collect()
}

fn backing(settings: &Settings, create: bool) -> Option<String> {
    match &settings.backing {
        Backing::Zram if !rustix::process::geteuid().is_root() => {
            Some("setting up zram needs root".into())
        }
        Backing::Directory(path) if !path.is_dir() => {
            Some(format!("there is no folder {}", path.display()))
        }
        Backing::Named(names) => names
            .all(settings.guests, settings.volumes)
            .iter()
            .find_map(|name| named(name, settings, create)),
        _ => None,
    }
}

/// What is missing for a disk that the plan names.
fn named(name: &Name, settings: &Settings, create: bool) -> Option<String> {
    match name {
        Name::Path(path) => {
            (!create && !path.exists()).then(|| format!("there is no {}", path.display()))
        }
        Name::Rbd { .. } if !settings.ceph.conf().exists() => Some(format!(
            "{name} needs a Ceph cluster, and there is no {}",
            settings.ceph.conf().display()
        )),
        Name::Rbd { .. } if settings.krbd && !Path::new("/sys/bus/rbd").exists() => Some(
            "krbd=on needs the kernel's client, which is not loaded; try 'modprobe rbd'".into(),
        ),
        Name::Rbd { .. }
            if find_program("rbd").is_none() && (create || settings.prefill || settings.krbd) =>
        {
            Some("rbd is missing; on Debian, 'apt install ceph-common'".into())
        }
        Name::Rbd { .. } if opened_by_qemu(settings) && !qemu_has_rbd() => {
            Some("QEMU has no rbd driver here; on Debian, 'apt install qemu-block-extra'".into())
        }
        Name::Rbd { .. } => None,
    }
}

/// Whether the QEMU of the distribution opens the images.
fn opened_by_qemu(settings: &Settings) -> bool {
    let daemon = settings.device == Device::VhostUserBlk;
    !settings.krbd
        && if daemon {
            settings.server == Server::QemuStorageDaemon
        } else {
            settings.device != Device::Host && settings.qemu.is_none()
        }
}

/// Whether QEMU can load the driver: it then complains of an image that cannot be there.
fn qemu_has_rbd() -> bool {
    let image = "rbd:none/none:conf=/nonexistent";
    let info = Command::new("qemu-img").args(["info", image]).output();
    info.is_ok_and(|info| {
        let said = String::from_utf8_lossy(&info.stderr);
        !said.contains("Unable to load module") && !said.contains("Unknown driver")
    })
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

/// Disks of the user's to which the plan writes, and disks that the lab creates under a name in the plan. The lab asks before
/// it uses them.
pub fn overwritten(plan: &Plan) -> Vec<String> {
    let writes = plan.workloads.iter().any(crate::plan::Workload::writes);
    let mut names: Vec<String> = Vec::new();
    for case in &plan.cases {
        let settings = &case.settings;
        match (&settings.device, &settings.server, &settings.backing) {
            (Device::VhostUserBlk, Server::Socket(path), _) if writes => {
                names.push(format!("the disk behind {}", path.display()))
            }
            (Device::VhostUserBlk, Server::Socket(_), _) => {}
            (_, _, Backing::Named(disks)) => {
                let disks = disks.all(settings.guests, settings.volumes);
                let disks = disks.iter().filter(|name| is_written(plan, settings, name));
                names.extend(disks.map(|name| {
                    if plan.create {
                        format!("{name} (which is created, and removed at the end)")
                    } else {
                        name.to_string()
                    }
                }));
            }
            _ => {}
        }
    }
    if !writes {
        names.sort();
        names.dedup();
        return names;
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

/// Whether a disk may be filled before the first sample: `true` unless it is certainly not thin.
fn may_be_thin(name: &Name, settings: &Settings) -> bool {
    let disk = match name {
        Name::Path(path) => Disk::Path(path.clone()),
        Name::Rbd { pool, image } => Disk::Rbd(Image {
            pool: pool.clone(),
            name: image.clone(),
            conf: settings.ceph.conf(),
            user: settings.ceph.user(),
        }),
    };
    is_thin(&disk).unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_qemu_is_read() {
        let debian = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)";
        assert_eq!(qemu_version(debian), Some((10, 0)));
        assert_eq!(qemu_version("QEMU emulator version 7.2.22"), Some((7, 2)));
        assert!(qemu_version("QEMU emulator version 7.2.22") < Some((10, 0)));
        assert_eq!(qemu_version(""), None);
    }
}
