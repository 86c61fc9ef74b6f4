//! Which settings and loads a plan may have with a guest, and which without.

use super::settings::{self, Settings};
use super::sockets;
use super::words::{Client, Device};
use super::workload::{self, Workload};

/// The most volumes of a guest.
const VOLUMES_MAX: u16 = 24;

/// With a guest, its driver and fio in it make the load.
///
/// # Errors
/// A setting or a load that needs another driver.
pub fn with(settings: &Settings, loads: &[Workload]) -> Result<(), String> {
    if settings.client != Client::Blkio {
        return Err("client is for guest = \"none\": a guest has a driver of its own".into());
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

/// fio does not make all loads.
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

/// Without a guest, a server's socket is driven directly, or fio runs on the host.
///
/// # Errors
/// A setting of guests, or a load that only a guest makes.
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
        return Err(format!("{key} is a guest's, and guest = \"none\" has none"));
    }
    loads.iter().try_for_each(|load| {
        sockets::check(settings, load).map_err(|e| format!("{}: {e}", load.name))
    })
}
