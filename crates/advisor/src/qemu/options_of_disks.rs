//! The options of a command line that may change the speed of disks, for comparisons of command lines.

use std::collections::BTreeMap;

use super::line::{Line, line};
use super::options::{Opt, Pair};
use super::{fragment, words};
use crate::input::{Input, Kind, Reading, Surroundings};
use crate::model::Vm;

/// Names and places, which change nothing, and settings that are compared as properties.
const NOT_COMPARED: &[&str] = &[
    "id",
    "node-name",
    "driver",
    "qom-type",
    "if",
    "drive",
    "bus",
    "addr",
    "channel",
    "scsi-id",
    "lun",
    "unit",
    "index",
    "serial",
    "wwn",
    "bootindex",
    "share-rw",
    "werror",
    "rerror",
    "file",
    "filename",
    "backing",
    "media",
    "read-only",
    "readonly",
    "auto-read-only",
    "multifunction",
    "format",
    "model",
    "x2apic",
    "kvm-pv-eoi",
    "poll-max-ns",
    "logical_block_size",
    "physical_block_size",
    "iothread",
];

/// Drivers of disks and of their controllers.
const DRIVERS: &[&str] = &[
    "virtio-blk",
    "virtio-scsi",
    "vhost-user-blk",
    "vhost-user-scsi",
    "scsi-",
    "ide-",
    "nvme",
];

/// An option that two command lines may both have, such as `-device vda`, with its keys.
pub type Options = BTreeMap<String, BTreeMap<String, Pair>>;

/// The options of a VM's disks, I/O threads, CPUs and interrupt controller; none unless it is a command line.
pub fn options_of_disks(input: &Input, vm: &Vm) -> Options {
    let mut options = Options::new();
    if input.kind != Kind::Qemu {
        return options;
    }
    let Some(source) = input.sources.first() else {
        return options;
    };
    let commands = words::commands(&source.text, 0).commands;
    let Some(command) = commands.iter().find(|command| command.span() == vm.span) else {
        return options;
    };
    let Ok(line) = line(command, &input.surroundings, &mut Reading::default(), false) else {
        return options;
    };
    add(&line, &mut options);
    options
}

/// The same of the options in another front-end's configuration, which start at the byte `start` of its text.
pub fn options_in(text: &str, start: usize, surroundings: &Surroundings) -> Options {
    let mut options = Options::new();
    if let Some(command) = fragment(text, start)
        && let Ok(line) = line(&command, surroundings, &mut Reading::default(), false)
    {
        add(&line, &mut options);
    }
    options
}

fn add(line: &Line, options: &mut Options) {
    // Without such an option, its keys have their defaults.
    for name in ["-cpu", "-machine"] {
        options.entry(name.to_owned()).or_default();
    }
    let mut nameless: BTreeMap<String, usize> = BTreeMap::new();
    for option in line.all().filter(|option| is_of_disks(option)) {
        let names = ["id", "node-name", "drive"];
        let name = names.iter().find_map(|key| option.value(key));
        let name = match (option.group.as_str(), name) {
            ("cpu" | "machine", _) => format!("-{}", option.group),
            (group, Some(name)) => format!("-{group} {name}"),
            (group, None) => {
                let number = nameless.entry(group.to_owned()).or_default();
                *number += 1;
                format!("-{group} number {number}")
            }
        };
        // Another driver has other keys.
        let driver = option.value("driver").unwrap_or_default();
        let name = format!("{name} {driver}").trim().to_owned();
        let pairs = option.pairs.iter().filter(|pair| is_compared(option, pair));
        let pairs = pairs.map(|pair| (pair.key.clone(), pair.clone()));
        options.entry(name).or_default().extend(pairs);
    }
}

fn is_of_disks(option: &Opt) -> bool {
    let is_disk = |driver: &str| DRIVERS.iter().any(|name| driver.starts_with(name));
    match option.group.as_str() {
        "drive" | "blockdev" | "cpu" | "machine" => true,
        "device" => option.value("driver").is_some_and(is_disk),
        "object" => option.value("qom-type") == Some("iothread"),
        _ => false,
    }
}

fn is_compared(option: &Opt, pair: &Pair) -> bool {
    let key = pair.key.rsplit('.').next().unwrap_or_default();
    match option.group.as_str() {
        "machine" => matches!(key, "kernel_irqchip" | "kernel-irqchip"),
        // How requests are cached is one property of several keys.
        _ => {
            !NOT_COMPARED.contains(&key.trim_start_matches(['+', '-']))
                && !pair.key.starts_with("cache")
                && !pair.key.contains(".cache.")
        }
    }
}
