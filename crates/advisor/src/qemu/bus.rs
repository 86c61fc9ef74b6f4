//! A disk goes to virtio-blk, and the guest boots from the same one as before.

use super::devices::scsi_bus;
use super::edit::Changed;
use super::options::Opt;
use super::words;
use crate::fix::Edits;
use crate::model::Disk;
use crate::text::{Edit, Span};

/// SCSI controllers of a PCI bus that virtio-scsi can take the place of.
const EMULATED_SCSI: &[&str] = &["lsi", "megasas", "mptsas", "pvscsi", "am53c974", "dc390"];

/// What a device keeps when it becomes virtio-blk.
const KEPT: &[&str] = &[
    "account-failed",
    "account-invalid",
    "bootindex",
    "cyls",
    "discard_granularity",
    "drive",
    "driver",
    "heads",
    "id",
    "logical_block_size",
    "min_io_size",
    "opt_io_size",
    "physical_block_size",
    "rerror",
    "secs",
    "serial",
    "share-rw",
    "werror",
    "write-cache",
];

/// Its place on the bus that it leaves, and what means nothing on the new one.
const DROPPED: &[&str] = &["bus", "unit", "port", "rotation_rate", "removable"];

/// Where a device stands in the order in which SeaBIOS tries what has no bootindex: by the kind of its controller (SeaBIOS,
/// `DTYPE_`), then in the order of the command line: devices first, then those that QEMU makes for drives.
type Rank = (u8, bool, u32);

/// Why a disk stays.
const ANOTHER: &str = "no disk has a bootindex, and the guest might boot from another one";

const VIRTIO_SCSI: u8 = 0x60;
const VIRTIO_BLK: u8 = 0x61;

/// What the firmware of a machine boots.
pub enum Boot {
    /// The same disk, wherever the others are.
    Fixed,
    /// Nobody knows.
    Unclear,
    /// The first disk of the one controller that all are on.
    OneController,
    /// This disk: with its rank, that of the next, and whether it alone may still go to virtio.
    First {
        disk: Span,
        rank: Rank,
        second: Rank,
        last_to_move: bool,
    },
}

impl Changed<'_> {
    /// The changes that bring a disk to virtio.
    pub fn virtio(&self, disk: &Disk) -> Edits {
        let option = self.at(disk.span).ok_or("the disk is not there")?;
        self.boots_the_same(disk)?;
        match option.group.as_str() {
            "device" => {
                let driver = option.value("driver").unwrap_or_default();
                if disk.table.word("disk.bus") == Some("scsi-emulated") {
                    return self.virtio_scsi(option);
                }
                if !matches!(driver, "ide-hd" | "usb-storage") {
                    return Err(format!("{driver} has no counterpart"));
                }
                let mut edits = self.set(option, "", "driver", "virtio-blk-pci");
                for pair in &option.pairs {
                    match pair.key.as_str() {
                        "removable" if pair.value == "on" => {
                            return Err("virtio-blk is not removable".into());
                        }
                        key if DROPPED.contains(&key) => edits.push(self.without(option, key)?),
                        key if KEPT.contains(&key) => {}
                        key => {
                            return Err(format!(
                                "virtio-blk has no {key}, which the guest may know the disk by"
                            ));
                        }
                    }
                }
                Ok(edits)
            }
            "drive" => {
                let mut edits = self.set(option, "", "if", "virtio");
                for key in ["bus", "unit"] {
                    if option.get(key).is_some() {
                        edits.push(self.without(option, key)?);
                    }
                }
                Ok(edits)
            }
            _ if option.is_unknown() => Err("a variable of the shell is part of it".into()),
            _ => {
                let file = option.value("file").unwrap_or_default().replace(',', ",,");
                let word = words::quoted(&format!("file={file},if=virtio"));
                Ok(vec![Edit::replace(option.whole, format!("-drive {word}"))])
            }
        }
    }

    /// The controller of a SCSI disk becomes virtio-scsi.
    fn virtio_scsi(&self, device: &Opt) -> Edits {
        let id = scsi_bus(device);
        let mut controllers = self.line.group("device").filter(|other| {
            let driver = other.value("driver").unwrap_or_default();
            EMULATED_SCSI.iter().any(|name| driver.starts_with(name))
        });
        let controller = controllers
            .find(|other| id.is_none() || other.value("id") == id)
            .ok_or("its controller is not there")?;
        let kept = ["driver", "id", "bus", "addr", "multifunction"];
        if let Some(pair) = controller
            .pairs
            .iter()
            .find(|pair| !kept.contains(&pair.key.as_str()))
        {
            return Err(format!(
                "its controller has {}, and virtio-scsi has not",
                pair.key
            ));
        }
        Ok(self.set(controller, "", "driver", "virtio-scsi-pci"))
    }

    /// Whether the guest boots from the same disk after this one has gone to virtio, and others that may go with it.
    ///
    /// With a bootindex, or a kernel on the command line, it does. UEFI keeps an order of its own.
    fn boots_the_same(&self, moved: &Disk) -> Result<(), String> {
        let vm = self.target.vm()?;
        let boot = self.parsed.boot.get_or_init(|| self.boot(&vm.disks));
        let is_same = match *boot {
            Boot::Fixed => true,
            Boot::Unclear => false,
            // All go together, in their order.
            Boot::OneController => disk_bus(moved) == "scsi-emulated",
            Boot::First {
                disk,
                rank,
                second,
                last_to_move,
            } => {
                let kind = match disk_bus(moved) {
                    "scsi-emulated" => VIRTIO_SCSI,
                    _ => VIRTIO_BLK,
                };
                let is_first = disk == moved.span;
                // The one that is booted goes last.
                let stays_first = || {
                    let option = self.at(moved.span);
                    let new =
                        option.map(|option| (kind, option.group != "device", option.whole.start));
                    last_to_move && kind == VIRTIO_BLK && new.is_some_and(|new| new < second)
                };
                match is_first {
                    true => stays_first(),
                    false => rank.0 < kind,
                }
            }
        };
        match is_same {
            true => Ok(()),
            false => Err(ANOTHER.into()),
        }
    }

    /// Whether the guest boots from the same disk after the drive of this one has got a device of its own: devices come
    /// before those that QEMU makes for drives.
    pub fn may_have_device(&self, disk: &Disk) -> Result<(), String> {
        let vm = self.target.vm()?;
        match *self.parsed.boot.get_or_init(|| self.boot(&vm.disks)) {
            Boot::Fixed => Ok(()),
            Boot::First {
                disk: first,
                rank: (kind, is_drive, place),
                ..
            } if first == disk.span
                || kind < VIRTIO_BLK
                || (!is_drive && place < disk.span.start) =>
            {
                Ok(())
            }
            _ => Err(ANOTHER.into()),
        }
    }

    /// What the firmware boots.
    fn boot(&self, disks: &[Disk]) -> Boot {
        let disks: Vec<&Disk> = disks
            .iter()
            .filter(|disk| !matches!(disk.table.word("disk.device"), Some("cdrom" | "floppy")))
            .collect();
        let is_ordered = self
            .line
            .group("device")
            .any(|device| device.get("bootindex").is_some());
        if disks.len() < 2 || is_ordered || self.line.kernel {
            return Boot::Fixed;
        }
        if self.line.firmware {
            return Boot::Unclear;
        }
        let ata = disks
            .iter()
            .filter(|disk| matches!(disk_bus(disk), "ide" | "sata"))
            .map(|disk| {
                self.at(disk.span)
                    .is_some_and(|option| ata_place(option).is_some())
            });
        let ata: Vec<bool> = ata.collect();
        // Where a device has a place of its own on the PCI bus, the order of the command line is not that of the devices.
        let is_placed = disks.iter().any(|disk| {
            let device = self.at(disk.span).filter(|option| option.group == "device");
            let is_virtio = matches!(disk_bus(disk), "virtio-blk" | "vhost-user-blk");
            is_virtio
                && device.is_some_and(|device| {
                    device.get("addr").is_some() || device.get("bus").is_some()
                })
        });
        let ranks: Option<Vec<(Rank, &Disk)>> = disks
            .iter()
            .map(|disk| Some((self.rank(disk)?, *disk)))
            .collect();
        let (Some(mut ranks), true, false) = (
            ranks,
            ata.windows(2).all(|pair| pair[0] == pair[1]),
            is_placed,
        ) else {
            return Boot::Unclear;
        };
        let controllers = self.line.group("device").filter(|other| {
            let driver = other.value("driver").unwrap_or_default();
            EMULATED_SCSI.iter().any(|name| driver.starts_with(name))
        });
        if ranks
            .iter()
            .all(|(_, disk)| disk_bus(disk) == "scsi-emulated")
        {
            return match controllers.count() {
                1 => Boot::OneController,
                _ => Boot::Unclear,
            };
        }
        ranks.sort_unstable_by_key(|(rank, _)| *rank);
        let emulated = |(_, disk): &(Rank, &Disk)| {
            matches!(disk_bus(disk), "ide" | "sata" | "usb" | "scsi-emulated")
        };
        match ranks.as_slice() {
            [(rank, first), rest @ ..] => Boot::First {
                disk: first.span,
                rank: *rank,
                second: rest.first().map_or(*rank, |(rank, _)| *rank),
                last_to_move: !rest.iter().any(emulated),
            },
            [] => Boot::Fixed,
        }
    }

    fn rank(&self, disk: &Disk) -> Option<Rank> {
        let kind = match disk_bus(disk) {
            "ide" => 0x20,
            "sata" => 0x50,
            "virtio-scsi" => VIRTIO_SCSI,
            "virtio-blk" | "vhost-user-blk" => VIRTIO_BLK,
            "usb" => 0x70,
            "scsi-emulated" => 0x80,
            "nvme" => 0x91,
            _ => return None,
        };
        let option = self.at(disk.span)?;
        let place = option.whole.start;
        match kind {
            0x20 | 0x50 => Some((kind, false, ata_place(option).unwrap_or(place))),
            _ => Some((kind, option.group != "device", place)),
        }
    }
}

/// The place of a disk on the IDE or SATA buses, if it is given one.
fn ata_place(option: &Opt) -> Option<u32> {
    let number = |text: &str| text.parse::<u32>().ok();
    match option.group.as_str() {
        "hda" => Some(0),
        "hdb" => Some(1),
        "hdc" => Some(2),
        "hdd" => Some(3),
        "drive" => number(option.value("index")?),
        _ => {
            let (_, bus) = option.value("bus")?.rsplit_once('.')?;
            let unit = option.value("unit").map_or(Some(0), number)?;
            number(bus)?.checked_mul(2)?.checked_add(unit)
        }
    }
}

fn disk_bus(disk: &Disk) -> &str {
    disk.table.word("disk.bus").unwrap_or_default()
}
