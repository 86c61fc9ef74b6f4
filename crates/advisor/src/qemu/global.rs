//! Properties that `-global` sets for a driver, and that another driver would not have.

use super::editor::Editor;
use super::options::Opt;

/// The prefixes of the drivers of disks and SCSI controllers, and of their base types, which QEMU also accepts.
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

/// The driver in `-global DRIVER.PROPERTY=VALUE`, or in a separate pair; none if it is unknown.
fn driver(global: &Opt) -> Option<&str> {
    let first = global.pairs.first()?;
    match first.key.split_once('.') {
        Some((driver, _)) => Some(driver),
        None => {
            let pair = global.get("driver").filter(|_| !global.may_have_more)?;
            (!pair.unknown).then_some(pair.value.as_str())
        }
    }
}

impl Editor<'_> {
    /// Whether a disk may get another driver: no `-global` sets a property that the disk would lose or get.
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
