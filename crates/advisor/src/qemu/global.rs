//! What `-global` gives the devices of a driver, which another driver does not have.

use super::edit::Changed;
use super::options::Opt;

/// How the names of drivers start that disks have, or their SCSI controllers, and those of the types that these come from:
/// QEMU takes the name of such a type as well.
const OF_DISKS: &[&str] = &[
    "am53c974",
    "dc390",
    "device",
    "esp",
    "ide-",
    "lsi",
    "megasas",
    "mptsas",
    "object",
    "pci-device",
    "pvscsi",
    "scsi-",
    "usb-bot",
    "usb-device",
    "usb-storage",
    "usb-uas",
    "vhost-user-b",
    "virtio-blk",
    "virtio-ccw",
    "virtio-device",
    "virtio-pci",
    "virtio-scsi",
];

/// The driver that a `-global` names, as `DRIVER.PROPERTY=VALUE`, or as a pair of its own; none if it is not known.
fn driver(global: &Opt) -> Option<&str> {
    let first = global.pairs.first()?;
    match first.key.split_once('.') {
        Some((driver, _)) => Some(driver),
        None => {
            let pair = global.get("driver").filter(|_| !global.open)?;
            (!pair.unknown).then_some(pair.value.as_str())
        }
    }
}

impl Changed<'_> {
    /// Whether a disk may get another driver: no `-global` gives a driver of disks anything, which the disk would lose with
    /// the old one, or get with the new one.
    pub fn keeps_globals(&self) -> Result<(), String> {
        for global in self.line.group("global") {
            let Some(driver) = driver(global) else {
                return Err("a -global may set properties of disk drivers".into());
            };
            if OF_DISKS.iter().any(|start| driver.starts_with(start)) {
                return Err(format!(
                    "-global sets a property of {driver}, and the disk would get another driver"
                ));
            }
        }
        Ok(())
    }
}
