//! Disks from QEMU to ringdisk and back: the configuration of the guest and that of the host, together.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use crate::fix::{Setting, Target, machines, reread};
use crate::input::{Input, Kind};
use crate::model::Disk;
use crate::model::carried::Dialect;
use crate::round::Round;
use crate::text::{Edit, apply};
use crate::{libvirt, qemu};

/// Where sockets are that ringdisk makes as a service.
const SOCKETS: &str = "/run/ringdisk";

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From QEMU's own disks to vhost-user-blk.
    ToRingdisk,
    /// From vhost-user-blk to QEMU's own disks, with ringdisk's configuration among the inputs.
    ToQemu,
}

/// Both sides.
#[derive(Debug)]
pub struct Converted {
    /// The inputs, in their order, changed.
    pub inputs: Vec<Input>,
    /// What a person has to know.
    pub said: Vec<String>,
    /// A configuration for ringdisk, if disks went there.
    pub config: Option<String>,
}

/// A disk of both sides.
struct Served {
    name: String,
    socket: String,
    queues: u64,
    queue_size: u64,
}

/// Converts all disks that can be.
///
/// # Errors
/// None can, and why.
pub fn convert(inputs: Vec<Input>, direction: Direction) -> Result<Converted, String> {
    match direction {
        Direction::ToRingdisk => to_ringdisk(inputs),
        Direction::ToQemu => to_qemu(inputs),
    }
}

/// A configuration as a patch that makes a new file.
pub fn as_new_file(config: &str) -> String {
    let diff = similar::TextDiff::from_lines("", config);
    let mut unified = diff.unified_diff();
    unified.header("/dev/null", "ringdisk.toml");
    unified.to_string()
}

fn to_ringdisk(inputs: Vec<Input>) -> Result<Converted, String> {
    let mut move_ = Move::default();
    let mut changed = Vec::new();
    for input in inputs {
        changed.push(move_.input(input));
    }
    let Move { said, config, .. } = move_;
    match config.is_empty() {
        true if said.is_empty() => Err("there is no disk that ringdisk could serve".into()),
        true => Err(said.join("; ")),
        false => Ok(Converted {
            inputs: changed,
            said,
            config: Some(config),
        }),
    }
}

/// What disks of all inputs have in common on their way to ringdisk.
#[derive(Default)]
struct Move {
    said: Vec<String>,
    config: String,
    names: Names,
    groups: Names,
}

/// Names that are taken, with the number that the next one of the same name gets.
#[derive(Default)]
struct Names(HashMap<String, u64>);

impl Names {
    /// The name if it is free, or one like it.
    fn take(&mut self, name: &str) -> String {
        let mut candidate = name.to_owned();
        while self.0.contains_key(&candidate) {
            let number = self.0.entry(name.to_owned()).or_insert(1);
            *number += 1;
            candidate = format!("{name}-{number}");
        }
        self.0.insert(candidate.clone(), 1);
        candidate
    }
}

/// A disk that can go.
struct Going {
    disk: usize,
    group: Option<String>,
    served: Served,
    edits: Vec<Edit>,
}

impl Move {
    fn input(&mut self, input: Input) -> Input {
        // Each machine as a text of its own: it is read again after the changes.
        let Some(machines) = machines(&input) else {
            return (0..input.vms.len()).fold(input, |input, vm| self.vm(input, vm));
        };
        let mut edits = Vec::new();
        for (vm, machine) in input.vms.iter().zip(machines) {
            let moved = self.vm(machine, 0);
            edits.push(Edit::replace(vm.span, moved.sources[0].text.as_str()));
        }
        again(&input, &edits).unwrap_or(input)
    }

    /// Moves the disks of a machine: all that can go, or none if the machine cannot have them.
    fn vm(&mut self, input: Input, index: usize) -> Input {
        let vm = &input.vms[index];
        let round = Round::new(&input);
        let (mut going, mut staying) = (Vec::new(), Vec::new());
        for at in 0..vm.disks.len() {
            match self.disk(&round, index, at) {
                Ok(disk) => going.push(disk),
                Err(why) => staying.push((at, why)),
            }
        }
        // Disks that share limits go together.
        let mut apart = BTreeMap::new();
        for (disk, _) in &staying {
            if let Some(group) = &vm.disks[*disk].carried.group {
                apart.insert(group.clone(), vm.disks[*disk].name.clone());
            }
        }
        going.retain(|disk| {
            let other = disk.group.as_ref().and_then(|group| apart.get(group));
            if let Some(other) = other {
                staying.push((
                    disk.disk,
                    format!("it shares its limits with {other}, which stays"),
                ));
            }
            other.is_none()
        });
        let changed = match going.is_empty() {
            true => None,
            false => match moved(&input, index, &going) {
                Ok(changed) => Some(changed),
                Err(why) => {
                    staying.extend(going.drain(..).map(|disk| (disk.disk, why.clone())));
                    None
                }
            },
        };
        staying.sort();
        for (at, why) in staying {
            if !why.is_empty() {
                self.said
                    .push(format!("{} {} stays: {why}", vm.name, vm.disks[at].name));
            }
        }
        let mut groups: BTreeMap<String, String> = BTreeMap::new();
        for Going {
            disk,
            group,
            served,
            ..
        } in &going
        {
            let disk = &vm.disks[*disk];
            let mut is_new = false;
            let group = group.as_ref().map(|group| {
                groups.entry(group.clone()).or_insert_with(|| {
                    is_new = true;
                    self.groups.take(&named(&vm.name, group))
                })
            });
            let group = group.map(|group| group.as_str());
            self.config.push_str(&toml_of(disk, served, group, is_new));
            for note in notes(disk) {
                self.said.push(format!("{} {}: {note}", vm.name, disk.name));
            }
        }
        let Some(changed) = changed else {
            return input;
        };
        if changed.vms[index]
            .table
            .number("vm.threads-unused")
            .unwrap_or(0)
            == 0
        {
            return changed;
        }
        match set(&changed, index, Setting::TrimThreads).and_then(|edits| again(&changed, &edits)) {
            Ok(trimmed) => trimmed,
            Err(why) => {
                self.said
                    .push(format!("{}: {why}", changed.vms[index].name));
                changed
            }
        }
    }

    /// What moves a disk; why it stays, or nothing for what is no disk of QEMU's at all.
    fn disk(&mut self, round: &Round<'_>, vm: usize, at: usize) -> Result<Going, String> {
        let input = round.input;
        let machine = &input.vms[vm];
        let disk = &machine.disks[at];
        movable(input, disk)?;
        let vcpus = machine.table.number("vm.vcpus").unwrap_or(1).clamp(1, 256);
        let given = |name| {
            let number = disk.table.number(name)?;
            disk.table.given(name).map(|_| number)
        };
        let name = named(&machine.name, &disk.name);
        let mut served = Served {
            socket: String::new(),
            name,
            queues: given("disk.queues").unwrap_or(vcpus).clamp(1, 256),
            queue_size: 256,
        };
        let target = Target::new(round, vm, Some(at));
        served.name = self.names.take(&served.name);
        served.socket = format!("{SOCKETS}/{}.sock", served.name);
        let edits = match input.kind {
            Kind::Libvirt => {
                libvirt::to_ringdisk(&target, &served.socket, served.queues, served.queue_size)
            }
            _ => qemu::to_ringdisk(
                &target,
                &served.name,
                &served.socket,
                served.queues,
                served.queue_size,
            ),
        };
        match edits {
            Ok(edits) => Ok(Going {
                disk: at,
                group: disk.carried.group.clone(),
                served,
                edits,
            }),
            Err(why) => {
                self.names.0.remove(&served.name);
                Err(why)
            }
        }
    }
}

/// The machine with its disks moved and its memory shared: both or nothing, since it would not start with one alone.
fn moved(input: &Input, vm: usize, going: &[Going]) -> Result<Input, String> {
    let mut edits: Vec<Edit> = Vec::new();
    for disk in going {
        edits.extend(disk.edits.iter().cloned());
    }
    if input.vms[vm].table.word("vm.memory-shared") == Some("no") {
        let shared = set(input, vm, Setting::SharedMemory);
        edits
            .extend(shared.map_err(|why| format!("the machine's memory cannot be shared: {why}"))?);
    }
    again(input, &edits)
}

fn set(input: &Input, vm: usize, setting: Setting) -> Result<Vec<Edit>, String> {
    let round = Round::new(input);
    let target = Target::new(&round, vm, None);
    match input.kind {
        Kind::Libvirt => libvirt::edits(&target, setting),
        _ => qemu::edits(&target, setting),
    }
}

fn again(input: &Input, edits: &[Edit]) -> Result<Input, String> {
    let sources = apply(&input.sources, edits).ok_or("two changes at one place")?;
    reread(input, sources).map_err(|e| format!("it would not be read again: {e}"))
}

/// Why a disk stays; an empty reason for what is no disk of QEMU's at all.
fn movable(input: &Input, disk: &Disk) -> Result<(), String> {
    let word = |name| disk.table.word(name).unwrap_or_default();
    if word("disk.device") != "disk"
        || word("disk.bus").starts_with("vhost-user")
        || disk.file.is_empty()
    {
        return Err(String::new());
    }
    match input.kind {
        Kind::Proxmox => {
            return Err("Proxmox has no vhost-user disks; they would need args: by hand".into());
        }
        Kind::Ringdisk => return Err(String::new()),
        _ => {}
    }
    match word("disk.protocol") {
        "file" | "block" => {}
        "rbd" => {
            return Err(
                "an image in a Ceph cluster is brought over by hand: file=rbd:POOL/IMAGE in \
                 ringdisk.toml"
                    .into(),
            );
        }
        "" => return Err("a variable of the shell says what is behind it".into()),
        other => return Err(format!("ringdisk does not serve {other}")),
    }
    if !matches!(word("disk.format"), "raw" | "qcow2") {
        return Err("its format is neither raw nor qcow2, or not known".into());
    }
    if word("disk.bus") != "virtio-blk" {
        return Err(format!(
            "it is {}; bring it to virtio-blk first (--fix)",
            word("disk.bus")
        ));
    }
    disk.carried.serial()?;
    for bytes in [disk.carried.logical_block, disk.carried.physical_block] {
        if let Some(bytes) = bytes.filter(|bytes| !matches!(bytes, 512 | 4096)) {
            return Err(format!(
                "it has blocks of {bytes} bytes, and ringdisk has 512 and 4096"
            ));
        }
    }
    Ok(())
}

/// A name as ringdisk takes it: the machine's and what is its own.
fn named(vm: &str, own: &str) -> String {
    let text = format!("{vm}-{own}");
    let good = |c: char| {
        if c.is_ascii_alphanumeric() || "-._".contains(c) {
            c
        } else {
            '-'
        }
    };
    let name: String = text.chars().map(good).take(50).collect();
    match name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        true => name,
        false => format!("vm{name}"),
    }
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// The tables of a disk, and of its group of throttles if that is new.
fn toml_of(disk: &Disk, served: &Served, group: Option<&str>, is_new: bool) -> String {
    let word = |name| disk.table.word(name).unwrap_or_default();
    let mut limits = String::new();
    for (limit, value) in &disk.carried.limits {
        let _ = writeln!(limits, "{} = {value}", limit.name(Dialect::Ringdisk));
    }
    let mut text = String::new();
    if let Some(group) = group {
        if is_new {
            let _ = writeln!(text, "[[throttle-group]]\nname = {}", quoted(group));
            let _ = writeln!(text, "{limits}");
        }
        limits = format!("throttle-group = {}\n", quoted(group));
    }
    text.push_str("[[disk]]\n");
    let mut put = |key: &str, value: String| {
        let _ = writeln!(text, "{key} = {value}");
    };
    put("name", quoted(&served.name));
    put("file", quoted(&disk.file));
    put("format", quoted(word("disk.format")));
    put("socket", quoted(&served.socket));
    // Past the page cache, unless somebody chose otherwise; never less durable than it was.
    let cache = match word("disk.cache") {
        "writeback" if disk.table.given("disk.cache").is_none() => "none",
        "unsafe" => "none",
        cache => cache,
    };
    put("cache", quoted(cache));
    put("queues", served.queues.to_string());
    put("queue-size", served.queue_size.to_string());
    let discards = word("disk.discard") != "ignore";
    if !discards {
        put("discard", quoted("ignore"));
    }
    if disk.table.is_yes("disk.readonly") {
        put("readonly", "true".into());
    }
    match word("disk.detect-zeroes") {
        // Without discard, QEMU writes zeroes instead of unmapping.
        "unmap" if discards => put("detect-zeroes", quoted("unmap")),
        "on" | "unmap" => put("detect-zeroes", quoted("on")),
        _ => {}
    }
    for (key, policy) in [
        ("rerror", &disk.carried.rerror),
        ("werror", &disk.carried.werror),
    ] {
        if let Some(policy) = policy {
            put(key, quoted(policy));
        }
    }
    if let (Some(bytes), "qcow2") = (disk.table.number("disk.l2-cache-size"), word("disk.format")) {
        put("l2-cache-size", bytes.to_string());
    }
    if let Ok(Some(serial)) = disk.carried.serial() {
        put("serial", quoted(serial));
    }
    // A partition table counts in them; QEMU's are of 512 bytes whatever is behind the disk.
    let logical = disk.carried.logical_block.unwrap_or(512);
    put("logical-block-size", logical.to_string());
    if let Some(physical) = disk.carried.physical_block {
        put("physical-block-size", physical.to_string());
    }
    text.push_str(&limits);
    text.push('\n');
    text
}

/// What a person has to know of a disk that goes to ringdisk.
fn notes(disk: &Disk) -> Vec<&'static str> {
    let mut notes = Vec::new();
    let stops = |policy: &Option<String>| policy.as_deref() == Some("stop");
    if stops(&disk.carried.werror) || stops(&disk.carried.rerror) {
        notes.push(
            "where QEMU paused the VM after an I/O error, ringdisk lets requests wait until 'ringdisk resume', \
             and the VM runs on",
        );
    }
    if !disk.file.starts_with('/') {
        notes.push("its file has no absolute path: ringdisk looks for it where it is started");
    }
    notes
}

fn to_qemu(inputs: Vec<Input>) -> Result<Converted, String> {
    let served: Vec<Disk> = inputs
        .iter()
        .filter(|input| input.kind == Kind::Ringdisk)
        .flat_map(|input| &input.vms)
        .flat_map(|vm| &vm.disks)
        .cloned()
        .collect();
    if served.is_empty() {
        return Err("name ringdisk's configuration too: it says what is behind its disks".into());
    }
    let mut converted = Converted {
        inputs: Vec::new(),
        said: Vec::new(),
        config: None,
    };
    let mut moved = 0;
    for mut input in inputs {
        for index in 0..input.vms.len() {
            let mut at = 0;
            while let Some(disk) = input.vms.get(index).and_then(|vm| vm.disks.get(at)) {
                at += 1;
                let is_ours = disk.table.word("disk.bus") == Some("vhost-user-blk")
                    && !disk.table.is_yes("disk.served");
                if !is_ours {
                    continue;
                }
                let place = format!("{} {}", input.vms[index].name, disk.name);
                let stem = disk.file.rsplit('/').next().unwrap_or_default();
                let name = stem.strip_suffix(".sock").unwrap_or(stem).to_owned();
                let Some(storage) = served.iter().find(|known| known.name == name) else {
                    converted.said.push(format!(
                        "{place} stays: no disk '{name}' is in ringdisk's configuration"
                    ));
                    continue;
                };
                let round = Round::new(&input);
                let target = Target::new(&round, index, Some(at - 1));
                if storage.carried.own_besides {
                    converted.said.push(format!(
                        "{place}: it keeps the limits of its group, not those of its own"
                    ));
                }
                let edits = match input.kind {
                    Kind::Libvirt => libvirt::from_ringdisk(&target, storage),
                    _ => qemu::from_ringdisk(&target, storage),
                };
                match edits.and_then(|edits| again(&input, &edits)) {
                    Ok(changed) => {
                        input = changed;
                        moved += 1;
                        converted.said.push(format!("take the disk '{name}' out of ringdisk's configuration, before the machine starts"));
                    }
                    Err(why) => converted.said.push(format!("{place} stays: {why}")),
                }
            }
        }
        converted.inputs.push(input);
    }
    match moved {
        0 => Err(match converted.said.as_slice() {
            [] => "there is no vhost-user-blk disk".into(),
            said => said.join("; "),
        }),
        _ => Ok(converted),
    }
}
