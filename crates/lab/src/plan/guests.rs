//! Checks which settings and loads need a guest, and which need none.

use super::settings::{self, Settings};
use super::sockets;
use super::units::size_text;
use super::words::{Client, Device, GuestKind};
use super::workload::{self, Workload};

/// The maximum number of volumes of a guest.
const VOLUMES_MAX: u16 = 200;

/// The device of a configuration that names none.
pub fn default_device(guest: GuestKind) -> Device {
    match guest {
        GuestKind::None => Device::Host,
        GuestKind::Linux | GuestKind::Ssh => Device::VirtioBlk,
    }
}

/// Checks a configuration with a guest, in which fio makes the load.
///
/// # Errors
/// A setting or a load needs a driver of the lab.
pub fn with(settings: &Settings, loads: &[Workload], size: u64) -> Result<(), String> {
    let disk_min = settings.file_system.disk_min();
    if let Some(disk_min) = disk_min.filter(|disk_min| size < *disk_min) {
        return Err(format!(
            "file-system={} needs a size of {} or more in [storage]",
            settings.file_system,
            size_text(disk_min)
        ));
    }
    let is_job = |load: &Workload| load.job.is_some();
    if disk_min.is_some() && loads.iter().any(is_job) {
        return Err(
            "a job file runs on disks; describe the load with rw and bs for a file-system".into(),
        );
    }
    if settings.client != Client::Blkio {
        return Err("client is for guest = \"none\": a guest has its own driver".into());
    }
    if settings.volumes > VOLUMES_MAX {
        return Err(format!("a guest has at most {VOLUMES_MAX} volumes"));
    }
    let key = settings::WITHOUT_GUEST
        .into_iter()
        .find(|key| settings.value(key) != Settings::default().value(key));
    if let Some(key) = key {
        return Err(format!("{key} is for guest = \"none\""));
    }
    loads.iter().try_for_each(made_by_fio)
}

/// Refuses loads that fio cannot make.
fn made_by_fio(load: &Workload) -> Result<(), String> {
    let key = workload::WITHOUT_FIO
        .into_iter()
        .find(|key| !["-", "off", "none"].contains(&load.get(key).as_str()));
    match key {
        Some(key) => Err(format!(
            "{}: {key} is for a vhost-user socket, with guest = \"none\" and client = \"ring\"",
            load.name
        )),
        None => Ok(()),
    }
}

/// Checks a configuration without a guest: the lab drives the server's socket, or fio runs on the host.
///
/// # Errors
/// A setting or a load needs a guest.
pub fn without(settings: &Settings, loads: &[Workload]) -> Result<(), String> {
    if settings.device == Device::Host {
        return loads
            .iter()
            .try_for_each(|load| match load.once > 0 || load.idle {
                true => made_by_fio(load),
                false => Ok(()),
            });
    }
    if settings.device != Device::VhostUserBlk {
        return Err(format!(
            "guest = \"none\" has the devices host and vhost-user-blk; {} is for a guest",
            settings.device
        ));
    }
    let plain = Settings {
        device: settings.device,
        ..Settings::default()
    };
    let of_guests = settings::OF_GUESTS
        .into_iter()
        .find(|key| settings.get(key) != plain.get(key));
    if let Some(key) = of_guests {
        return Err(format!(
            "{key} needs a guest, and guest = \"none\" has none"
        ));
    }
    loads.iter().try_for_each(|load| {
        sockets::check(settings, load).map_err(|e| format!("{}: {e}", load.name))
    })
}
