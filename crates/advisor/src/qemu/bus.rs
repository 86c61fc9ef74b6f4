//! Moves a disk to virtio-blk such that the guest boots from the same disk.

use std::collections::HashSet;

use super::boot::{Boot, Made, Rank};
use super::editor::Editor;
use super::line::EMULATED_SCSI;
use super::options::Opt;
use super::words;
use crate::model::Disk;
use crate::round::OrderChange;
use crate::target::{Edits, Target};
use crate::text::Edit;

/// The properties that a device keeps when it becomes virtio-blk.
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

/// The position on the old bus, and properties without meaning on the new one.
const DROPPED: &[&str] = &["bus", "unit", "port", "rotation_rate", "removable"];

/// The reason why a disk keeps its bus.
const ANOTHER: &str = "no disk has a bootindex, and the guest might boot from another disk";

const ONE_BY_ONE: &str = "only one disk can change its position at a time";

const VIRTIO_SCSI: u8 = 0x60;
const VIRTIO_BLK: u8 = 0x61;

impl<'a> Editor<'a> {
    /// The edits that move a disk to virtio.
    pub fn virtio(&self, disk: &Disk) -> Edits {
        let option = self.at(disk.span).ok_or("the disk is missing")?;
        self.keeps_globals()?;
        if !self.line.is_ata_clear(option) {
            return Err(
                "there are several controllers, and its bus does not name one of them by id".into(),
            );
        }
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
                self.has_virtio_pci()?;
                let mut edits = self.set(option, "", "driver", "virtio-blk-pci")?;
                for pair in &option.pairs {
                    match pair.key.as_str() {
                        "removable" if pair.value == "on" => {
                            return Err("virtio-blk has no removable disks".into());
                        }
                        key if DROPPED.contains(&key) => edits.push(self.without(option, key)?),
                        key if KEPT.contains(&key) => {}
                        key => {
                            return Err(format!(
                                "virtio-blk has no {key}, by which the guest may identify the disk"
                            ));
                        }
                    }
                }
                Ok(edits)
            }
            "drive" => {
                let mut edits = self.set(option, "", "if", "virtio")?;
                for key in ["bus", "unit"] {
                    if option.get(key).is_some() {
                        edits.push(self.without(option, key)?);
                    }
                }
                Ok(edits)
            }
            _ if option.is_unknown() => Err("it contains a shell variable".into()),
            _ => {
                let file = option.value("file").unwrap_or_default().replace(',', ",,");
                let word = words::quoted(&format!("file={file},if=virtio"));
                Ok(vec![Edit::replace(option.whole, format!("-drive {word}"))])
            }
        }
    }

    /// Replaces the controller of a SCSI disk by virtio-scsi.
    fn virtio_scsi(&self, device: &Opt) -> Edits {
        let controller = self.line.scsi_controller(device);
        let controller = controller.ok_or("its controller is missing")?;
        if self.line.is_scsi_unclear() {
            return Err("another disk may be on its controller".into());
        }
        let kept = ["driver", "id", "bus", "addr", "multifunction"];
        if let Some(pair) = controller
            .pairs
            .iter()
            .find(|pair| !kept.contains(&pair.key.as_str()))
        {
            return Err(format!(
                "its controller has {}, which virtio-scsi does not have",
                pair.key
            ));
        }
        self.set(controller, "", "driver", "virtio-scsi-pci")
    }

    /// Whether the guest boots from the same disk after this one has moved to virtio, and others that may move with it.
    ///
    /// With a bootindex, or a kernel on the command line, it does. UEFI stores its own boot order.
    fn boots_the_same(&self, moved: &Disk) -> Result<(), String> {
        let vm = self.target.vm()?;
        let boot = self.parsed.boot.get_or_init(|| self.boot(&vm.disks));
        let Target { round, vm, .. } = *self.target;
        let (is_same, order) = match *boot {
            Boot::Fixed => return Ok(()),
            Boot::Unclear => (false, OrderChange::Moved),
            // All move together, in their order.
            Boot::OneController => (disk_bus(moved) == "scsi-emulated", OrderChange::Moved),
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
                // The boot disk moves last.
                let stays_first = || {
                    let option = self.at(moved.span);
                    let new = option.map(|option| (kind, Made::of(option), option.whole.start));
                    last_to_move && kind == VIRTIO_BLK && new.is_some_and(|new| new < second)
                };
                if is_first {
                    (stays_first(), OrderChange::Moved)
                } else {
                    // The disks after it may move together.
                    (rank.0 < kind, OrderChange::MovedBehind)
                }
            }
        };
        match (round.order(vm), order) {
            (OrderChange::Nothing, _) | (OrderChange::MovedBehind, OrderChange::MovedBehind) => {}
            _ => return Err(ONE_BY_ONE.into()),
        }
        round.reorder(vm, order);
        if is_same { Ok(()) } else { Err(ANOTHER.into()) }
    }

    /// The option after which a drive gets a separate device. QEMU creates the devices in `key=value` syntax in their order,
    /// and then those for drives. So drives are changed from the first one on, each with its device after all others: then
    /// no device changes its slot on the PCI bus or its rank in the boot order.
    pub fn may_have_device(&self, disk: &Disk, drive: &'a Opt) -> Result<&'a Opt, String> {
        let Target { round, vm, .. } = *self.target;
        let drives = self.parsed.virtio_drives.get_or_init(|| {
            let disks = self.target.vm().map_or(&[][..], |vm| &vm.disks);
            let made = |disk: &&Disk| {
                let option = self.at(disk.span);
                disk_bus(disk) == "virtio-blk"
                    && option.is_some_and(|option| Made::of(option) == Made::Drive)
            };
            disks.iter().filter(made).map(|disk| disk.span).collect()
        });
        let done = match round.order(vm) {
            OrderChange::Nothing => 0,
            OrderChange::Moved | OrderChange::MovedBehind => return Err(ONE_BY_ONE.into()),
            OrderChange::Devices(count) => count,
        };
        if drives.get(done) != Some(&disk.span) {
            return Err(
                "a drive before it has no separate -device, and the order of the disks would change"
                    .into(),
            );
        }
        round.reorder(vm, OrderChange::Devices(done + 1));
        let last = self.parsed.last_device.get_or_init(|| {
            let makes_device = |option: &Opt| match option.group.as_str() {
                "device" => Made::of(option) == Made::Pairs,
                // These options also create devices.
                group => matches!(group, "virtfs" | "watchdog" | "balloon"),
            };
            self.line.all().rposition(makes_device)
        });
        let own = self.place(drive.span);
        match own.max(*last).map(|at| self.line.at(at)) {
            Some(option) if option.span.source == drive.span.source => Ok(option),
            _ => Err("its device would have to follow one in another file".into()),
        }
    }

    /// Determines what the firmware boots.
    fn boot(&self, disks: &[Disk]) -> Boot {
        let disks: Vec<&Disk> = disks
            .iter()
            .filter(|disk| !matches!(disk.table.word("disk.device"), Some("cdrom" | "floppy")))
            .collect();
        // The disk with the lowest bootindex is before all disks without one. The bootindex of other devices, such as a
        // network card, does not order the disks.
        let is_ordered = disks.iter().any(|disk| {
            let device = self.at(disk.span).filter(|option| option.group == "device");
            let index = device.and_then(|device| device.number("bootindex"));
            index.is_some()
        });
        if is_ordered || self.line.has_kernel {
            return Boot::Fixed;
        }
        // A device whose driver is a shell variable may be a disk before all others.
        let mut devices = self.line.group("device");
        if devices.any(Opt::has_unknown_driver) {
            return Boot::Unclear;
        }
        if disks.len() < 2 {
            return Boot::Fixed;
        }
        let mut options = disks.iter().filter_map(|disk| self.at(disk.span));
        let is_unclear = |option| has_unknown_place(option) || !self.line.is_ata_clear(option);
        if self.line.has_firmware || self.line.is_scsi_unclear() || options.any(is_unclear) {
            return Boot::Unclear;
        }
        let ata = disks
            .iter()
            .filter(|disk| matches!(disk_bus(disk), "ide" | "sata"))
            .filter_map(|disk| self.at(disk.span));
        // Either all have explicit positions on the buses of one controller, or none has.
        let ata: Vec<_> = ata
            .map(|option| ata_place(option).map(|_| ata_controller(option)))
            .collect();
        // Options in different texts have no order.
        let sources: HashSet<u16> = disks.iter().map(|disk| disk.span.source).collect();
        // With explicit PCI addresses, the order of the command line is not that of the devices.
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
            ata.windows(2).all(|pair| pair[0] == pair[1]) && sources.len() == 1,
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
        let made = Made::of(option);
        Some(match (kind, ata_place(option)) {
            // A SATA bus has only one disk.
            (0x50, Some(place)) if made == Made::Drive => (kind, Made::Machine, place * 2),
            (0x20 | 0x50, Some(place)) => (kind, Made::Machine, place),
            // QEMU attaches drives before it creates devices.
            (0x20 | 0x50, None) if made == Made::Drive => (kind, Made::Machine, option.whole.start),
            _ => (kind, made, option.whole.start),
        })
    }
}

/// Whether a shell variable contains a disk's position.
fn has_unknown_place(option: &Opt) -> bool {
    let is_place = |key: &str| matches!(key, "addr" | "bus" | "if" | "index" | "unit");
    let mut pairs = option.pairs.iter();
    option.may_have_more || pairs.any(|pair| pair.unknown && is_place(&pair.key))
}

/// The controller of an IDE or SATA disk; the built-in one is `ide`.
fn ata_controller(option: &Opt) -> &str {
    let bus = option.value("bus").filter(|_| option.group == "device");
    bus.and_then(|bus| bus.split('.').next()).unwrap_or("ide")
}

/// The explicit position of a disk on the IDE or SATA buses.
fn ata_place(option: &Opt) -> Option<u32> {
    let number = |text: &str| text.parse::<u32>().ok();
    match option.group.as_str() {
        "hda" => Some(0),
        "hdb" => Some(1),
        "hdc" => Some(2),
        "hdd" => Some(3),
        // A real index is below 8.
        "drive" => number(option.value("index")?).filter(|index| *index < 1 << 16),
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
