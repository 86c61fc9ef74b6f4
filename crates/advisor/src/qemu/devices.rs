//! Devices that are disks.

use std::collections::HashMap;

use super::graph;
use super::line::Line;
use super::options::{Opt, Pair};
use crate::input::Reading;
use crate::model::{Disk, ThreadUse, Vm};
use crate::text::Span;

/// The disks of a command line: of devices, and of drives for which QEMU makes one.
pub fn disks(line: &Line, graph: &graph::Graph<'_>, vm: &mut Vm, reading: &mut Reading) {
    let mut attached: HashMap<&str, ()> = HashMap::new();
    let mut mates: HashMap<Span, u64> = HashMap::new();
    for device in line.group("device") {
        if !device
            .value("driver")
            .is_some_and(|driver| driver.starts_with("scsi-"))
        {
            continue;
        }
        match line.scsi_controller(device) {
            Some(controller) => *mates.entry(controller.span).or_default() += 1,
            None => reading.note(
                device.span,
                "the SCSI controller of this disk is unclear, and its bus is not changed: \
                 name the controller by its id with bus=ID.0",
            ),
        }
    }
    for device in line.group("device") {
        let Some(driver) = device.get("driver") else {
            continue;
        };
        let Some(mut disk) = of_device(device, &driver.value, line, vm) else {
            continue;
        };
        if disk.table.word("disk.bus") == Some("virtio-scsi") {
            let controller = line.scsi_controller(device);
            let count = controller.and_then(|controller| mates.get(&controller.span));
            let alone = count == Some(&1) && !line.is_scsi_unclear();
            let word = if alone { "own" } else { "shared" };
            disk.table
                .derive("disk.controller", word, "counted in the input");
        }
        if let Some(drive) = device.get("drive") {
            attached.insert(&drive.value, ());
            if !graph.behind(&drive.value, &mut disk) {
                reading.note(
                    drive.value_span,
                    format!("there is no drive '{}' on this command line", drive.value),
                );
            }
            write_cache(&mut disk);
        }
        vm.disks.push(disk);
    }
    // Drives with a device of their own, that QEMU makes by itself.
    for drive in line.all() {
        let Some(interface) =
            graph::interface(drive, vm.table.word("vm.machine").unwrap_or_default())
        else {
            continue;
        };
        let id = drive.value("id").unwrap_or_default();
        if !id.is_empty() && attached.contains_key(id) {
            continue;
        }
        let mut disk = Disk {
            span: drive.span,
            name: if id.is_empty() {
                interface.name.clone()
            } else {
                id.to_owned()
            },
            ..Disk::default()
        };
        match interface.given {
            Some(span) => disk.table.give("disk.bus", interface.bus, span),
            None => disk
                .table
                .set("disk.bus", interface.bus, interface.origin()),
        }
        if let Some((device, span)) = graph::media(drive) {
            disk.table.give("disk.device", device, span);
        }
        graph.drive(drive, &mut disk);
        vm.disks.push(disk);
    }
}

/// A disk without what is behind it, if a device is one.
fn of_device(device: &Opt, driver: &str, line: &Line, vm: &Vm) -> Option<Disk> {
    let mut disk = Disk {
        span: device.span,
        ..Disk::default()
    };
    let base = driver
        .trim_end_matches("-non-transitional")
        .trim_end_matches("-transitional");
    let base = ["-pci", "-ccw", "-device"]
        .iter()
        .find_map(|suffix| base.strip_suffix(suffix))
        .unwrap_or(base);
    let (bus, carrier) = bus(base, device, line, vm)?;
    // A namespace has its controller's queues, and a controller with namespaces is no disk.
    if base == "nvme" && device.get("drive").is_none() {
        return None;
    }
    let driver_span = device
        .get("driver")
        .map_or(device.span, |pair| pair.value_span);
    let table = &mut disk.table;
    table.give("disk.bus", bus, driver_span);
    disk.name = device
        .value("id")
        .or(device.value("drive"))
        .or(device.value("chardev"))
        .unwrap_or(driver)
        .to_owned();
    if matches!(base, "ide-cd" | "scsi-cd") {
        table.give("disk.device", "cdrom", driver_span);
    } else if base == "floppy" {
        table.give("disk.device", "floppy", driver_span);
    } else if matches!(base, "scsi-block" | "scsi-generic") {
        table.give("disk.device", "lun", driver_span);
    }
    for (key, _) in NUMBERS {
        if let Some(pair) = carrier.get(key) {
            number(&mut disk, pair);
        }
    }
    let table = &mut disk.table;
    let mut flag = |key: &str, property: &'static str| {
        if let Some(pair) = carrier.get(key) {
            table.give(property, pair.value == "on", pair.span);
        }
    };
    flag("ioeventfd", "disk.ioeventfd");
    flag("packed", "disk.packed");
    disk.others.extend(others(carrier));
    if let Some(pair) = carrier.get("x-data-plane") {
        table.give("disk.data-plane", true, pair.span);
    }
    if bus == "virtio-blk"
        && let Some(pair) = carrier.get("scsi")
    {
        table.give("disk.scsi-property", true, pair.span);
    }
    if let Some(pair) = carrier.get("config-wce") {
        table.give(
            "disk.config-wce",
            if pair.value == "off" { "off" } else { "on" },
            pair.span,
        );
    }
    if let Some(pair) = device.get("write-cache") {
        let word = match pair.value.as_str() {
            "on" => "on",
            "off" => "off",
            _ => "auto",
        };
        table.give("disk.write-cache", word, pair.span);
    }
    if let Some(serial) = device.value("serial") {
        disk.carried.serial = Some(serial.to_owned());
    }
    graph::policies(device, &mut disk);
    disk.carried.logical_block = device.number("logical_block_size");
    disk.carried.physical_block = device.number("physical_block_size");
    let table = &mut disk.table;
    if let Some(pair) = device.get("removable") {
        table.give("disk.removable", pair.value == "on", pair.span);
    }
    if let Some(pair) = device.get("rotation_rate") {
        table.give("disk.ssd", pair.value == "1", pair.span);
    }
    if bus.starts_with("vhost-user") {
        vhost_user(device, line, &mut disk);
    }
    uses(carrier, &mut disk);
    graph::hide(device, &mut disk);
    graph::hide(carrier, &mut disk);
    Some(disk)
}

/// Settings of a virtio device that no rule is about, unlike their defaults.
fn others(carrier: &Opt) -> impl Iterator<Item = String> {
    let settings = [
        ("event_idx", "off"),
        ("indirect_desc", "off"),
        ("iommu_platform", "on"),
    ];
    let is_set = |(key, value): &(&str, &str)| carrier.value(key) == Some(*value);
    let set = settings.into_iter().filter(is_set);
    set.map(|(key, value)| format!("{key}={value}"))
}

/// The bus of a disk, and the device with its queues and threads: the disk, or its SCSI controller.
fn bus<'a>(
    base: &str,
    device: &'a Opt,
    line: &'a Line,
    vm: &Vm,
) -> Option<(&'static str, &'a Opt)> {
    let bus = match base {
        "virtio-blk" => "virtio-blk",
        "vhost-user-blk" => "vhost-user-blk",
        "vhost-user-scsi" => "vhost-user-scsi",
        "nvme" | "nvme-ns" => "nvme",
        "usb-storage" | "usb-bot" | "usb-uas" => "usb",
        "floppy" => "fdc",
        "sd-card" => "sd",
        "ide-hd" | "ide-cd" | "ide-drive" => {
            let is_ahci = |bus: &str| {
                let id = bus.split('.').next().unwrap_or(bus);
                let controller = line.find("device", id);
                let driver = controller.and_then(|controller| controller.value("driver"));
                driver.is_some_and(|driver| driver.contains("ahci"))
            };
            let is_sata = vm.table.word("vm.machine") == Some("q35")
                || device.value("bus").is_some_and(is_ahci);
            if is_sata { "sata" } else { "ide" }
        }
        "scsi-hd" | "scsi-cd" | "scsi-disk" | "scsi-block" | "scsi-generic" => {
            let Some(controller) = line.scsi_controller(device) else {
                return Some(("other", device));
            };
            let driver = controller.value("driver").unwrap_or_default();
            if driver.starts_with("virtio-scsi") {
                return Some(("virtio-scsi", controller));
            }
            "scsi-emulated"
        }
        _ => return None,
    };
    Some((bus, device))
}

/// Reads the socket of a vhost-user device.
fn vhost_user(device: &Opt, line: &Line, disk: &mut Disk) {
    let chardev = device.value("chardev");
    let chardev = chardev.and_then(|id| line.find("chardev", id));
    disk.table
        .derive("disk.protocol", "vhost-user", "from the device");
    disk.file = chardev
        .and_then(|chardev| chardev.value("path"))
        .unwrap_or_default()
        .to_owned();
    let seconds = |key| {
        chardev
            .and_then(|chardev| chardev.get(key))
            .filter(|pair| pair.value != "0")
    };
    match seconds("reconnect").or(seconds("reconnect-ms")) {
        Some(pair) => disk.table.give("disk.reconnect", true, pair.span),
        None => disk.table.default_to("disk.reconnect", "no", "QEMU"),
    }
}

/// Properties that are numbers.
const NUMBERS: &[(&str, &str)] = &[
    ("num-queues", "disk.queues"),
    ("num_queues", "disk.queues"),
    ("queue-size", "disk.queue-size"),
    ("virtqueue_size", "disk.queue-size"),
];

fn number(disk: &mut Disk, pair: &Pair) {
    let known = NUMBERS.iter().find(|(key, _)| *key == pair.key);
    if let (Some((_, property)), Ok(number @ 1..=65_534)) = (known, pair.value.parse::<u64>()) {
        disk.table.give(property, number, pair.value_span);
    }
}

/// A property of a disk whose device another front-end makes: `-set device.virtio0.iothread=a`.
pub fn set(disk: &mut Disk, pair: &Pair) {
    match pair.key.as_str() {
        "iothread" => disk.threads.push(ThreadUse {
            id: pair.value.clone(),
            span: pair.value_span,
            queues: None,
            is_mapped: false,
        }),
        _ => number(disk, pair),
    }
}

/// `iothread=` and `iothread-vq-mapping`.
fn uses(device: &Opt, disk: &mut Disk) {
    if let Some(pair) = device.get("iothread") {
        disk.threads.push(ThreadUse {
            id: pair.value.clone(),
            span: pair.value_span,
            queues: None,
            is_mapped: false,
        });
    }
    for (place, pair) in device.pairs.iter().filter_map(|pair| {
        let rest = pair.key.strip_prefix("iothread-vq-mapping.")?;
        Some((rest.strip_suffix(".iothread")?, pair))
    }) {
        let prefix = format!("iothread-vq-mapping.{place}.vqs.");
        let queues: Vec<u64> = device
            .pairs
            .iter()
            .filter(|pair| pair.key.starts_with(&prefix))
            .filter_map(|pair| pair.value.parse().ok())
            .collect();
        disk.threads.push(ThreadUse {
            id: pair.value.clone(),
            span: pair.value_span,
            queues: (!queues.is_empty()).then_some(queues),
            is_mapped: true,
        });
    }
}

/// With -blockdev, whether writes are written through is the device's matter.
fn write_cache(disk: &mut Disk) {
    if disk.table.word("disk.write-cache") != Some("off") {
        return;
    }
    let Some(span) = disk.table.given("disk.write-cache") else {
        return;
    };
    match disk.table.word("disk.cache") {
        Some("none") => disk.table.give("disk.cache", "directsync", span),
        Some("writeback") | None => disk.table.give("disk.cache", "writethrough", span),
        _ => {}
    }
}
