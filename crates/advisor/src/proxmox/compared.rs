//! The keys of a Proxmox VM that may change the speed of its disks, for comparisons of VMs.

use std::collections::BTreeMap;

use super::{Line, Part, disk_key, lines, options, parts};
use crate::input::{Input, Kind};
use crate::model::Vm;
use crate::qemu::{Options, Pair, options_in};

/// The keys that are compared, beside those of disks.
const COMPARED: &[&str] = &[
    "affinity",
    "amd-sev",
    "cores",
    "cpu",
    "cpulimit",
    "cpuunits",
    "hugepages",
    "intel-tdx",
    "kvm",
    "machine",
    "memory",
    "numa",
    "scsihw",
    "sockets",
    "vcpus",
];

/// The parts of a disk with names, or that only other programs use.
const NOT_COMPARED: &[&str] = &[
    "",
    "backup",
    "bootdisk",
    "file",
    "import-from",
    "media",
    "model",
    "product",
    "replicate",
    "rerror",
    "ro",
    "serial",
    "shared",
    "size",
    "snapshot",
    "ssd",
    "trans",
    "vendor",
    "volume",
    "werror",
    "wwn",
];

/// The options of a VM's disks, controllers and CPUs; none unless it is a configuration of Proxmox.
pub fn options_of_disks(input: &Input, vm: &Vm) -> Options {
    let mut found = Options::new();
    let text = match (input.kind, input.sources.first()) {
        (Kind::Proxmox, Some(source)) => &source.text,
        _ => return found,
    };
    if let Some((args, start)) = options(text) {
        found = options_in(args, start, &input.surroundings);
    }
    let (lines, _) = lines(text);
    // Of a key that is there twice, the last counts.
    let mut own = BTreeMap::new();
    for line in lines.iter().filter(|line| is_compared(line.key)) {
        if !["cpu", "machine"].contains(&line.key) {
            own.insert(line.key.to_owned(), pair(line, line.key, line.value));
            continue;
        }
        let parts = parts(line).into_iter();
        for part in parts.filter(|part| !["", "cputype", "type"].contains(&part.key)) {
            let key = format!("{}.{}", line.key, part.key);
            own.insert(key.clone(), pair_of(line, &key, &part));
        }
    }
    found.insert("VM".into(), own);
    for disk in &vm.disks {
        let mut lines = lines.iter().filter(|line| disk_key(line.key));
        if let Some(line) = lines.find(|line| line.span == disk.span) {
            let parts = parts(line).into_iter();
            let parts = parts.filter(|part| !NOT_COMPARED.contains(&part.key));
            let pairs = parts.map(|part| (part.key.to_owned(), pair_of(line, part.key, &part)));
            found.insert(format!("disk {}", disk.name), pairs.collect());
        }
    }
    found
}

fn is_compared(key: &str) -> bool {
    let name = key.trim_end_matches(|c: char| c.is_ascii_digit());
    COMPARED.contains(&key) || name == "numa"
}

fn pair(line: &Line<'_>, key: &str, value: &str) -> Pair {
    Pair {
        key: key.to_owned(),
        value: value.to_owned(),
        span: line.span,
        value_span: line.value_span,
        unknown: false,
    }
}

fn pair_of(line: &Line<'_>, key: &str, part: &Part<'_>) -> Pair {
    Pair {
        span: part.span,
        value_span: part.span,
        ..pair(line, key, part.value)
    }
}
