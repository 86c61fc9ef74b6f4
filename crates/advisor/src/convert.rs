//! Converts disks from QEMU to ringdisk and back: the VM's configuration and ringdisk's change together.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use crate::fix::{machines, reread};
use crate::input::{Input, Kind};
use crate::model::Disk;
use crate::model::carried::Dialect;
use crate::parsed::ParsedInput;
use crate::setting::Setting;
use crate::text::{Edit, apply};

/// The directory of the service's sockets.
const SOCKETS: &str = "/run/ringdisk";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From QEMU's own disks to vhost-user-blk.
    ToRingdisk,
    /// From vhost-user-blk to QEMU's own disks; ringdisk's configuration must be among the inputs.
    ToQemu,
}

#[derive(Debug)]
pub struct Converted {
    /// The changed inputs, in their order.
    pub inputs: Vec<Input>,
    /// Messages to the user.
    pub messages: Vec<String>,
    /// ringdisk's configuration of the converted disks.
    pub config: Option<String>,
}

/// How ringdisk serves a disk.
struct Served {
    name: String,
    socket: String,
    queues: u64,
    queue_size: u64,
}

/// Converts all disks that can be converted.
///
/// # Errors
/// None can. The error says why.
pub fn convert(inputs: Vec<Input>, direction: Direction) -> Result<Converted, String> {
    match direction {
        Direction::ToRingdisk => to_ringdisk(inputs),
        Direction::ToQemu => to_qemu(inputs),
    }
}

/// The disks that ringdisk cannot serve, by the numbers of the VM and of the disk, with the reasons. A reason is empty if
/// the disk is not one that QEMU serves.
pub fn refused(input: Input) -> BTreeMap<(usize, usize), String> {
    let mut conversion = Conversion::default();
    let before: Vec<usize> = input.vms.iter().map(|vm| vm.disks.len()).collect();
    let changed = conversion.input(input);
    let mut refused: BTreeMap<_, _> = conversion.refused.into_iter().collect();
    for (vm, disks) in before.into_iter().enumerate() {
        for disk in 0..disks {
            let machine = changed.vms.get(vm);
            let found = machine.and_then(|machine| machine.disks.get(disk));
            let bus = found.and_then(|disk| disk.table.word("disk.bus"));
            if bus != Some("vhost-user-blk") {
                let why = || "its changes overlap with those of another VM".to_owned();
                refused.entry((vm, disk)).or_insert_with(why);
            }
        }
    }
    refused
}

/// A configuration as a patch that creates a new file.
pub fn as_new_file(config: &str) -> String {
    let diff = similar::TextDiff::from_lines("", config);
    let mut unified = diff.unified_diff();
    unified.header("/dev/null", "ringdisk.toml");
    unified.to_string()
}

fn to_ringdisk(inputs: Vec<Input>) -> Result<Converted, String> {
    let mut conversion = Conversion::default();
    let mut changed = Vec::new();
    for input in inputs {
        changed.push(conversion.input(input));
    }
    let Conversion {
        messages, config, ..
    } = conversion;
    if !config.is_empty() {
        return Ok(Converted {
            inputs: changed,
            messages,
            config: Some(config),
        });
    }
    if messages.is_empty() {
        return Err("there is no disk that ringdisk could serve".into());
    }
    Err(messages.join("; "))
}

/// The conversion of all inputs to ringdisk.
#[derive(Default)]
struct Conversion {
    messages: Vec<String>,
    /// The disks that are not converted: the numbers of the VM and of the disk, and the reason.
    refused: Vec<((usize, usize), String)>,
    config: String,
    names: Names,
    groups: Names,
}

/// The names in use, each with the number for the next disk of that name.
#[derive(Default)]
struct Names(HashMap<String, u64>);

impl Names {
    /// The name if it is free, or the name with a number.
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

/// A disk that can be converted.
struct Candidate {
    disk: usize,
    group: Option<String>,
    served: Served,
    edits: Vec<Edit>,
}

impl Conversion {
    fn input(&mut self, input: Input) -> Input {
        // Split by VM, because the text is read again after the changes.
        let Some(machines) = machines(&input) else {
            return (0..input.vms.len()).fold(input, |input, vm| self.vm(input, vm, vm));
        };
        let mut edits = Vec::new();
        for (number, (vm, machine)) in input.vms.iter().zip(machines).enumerate() {
            let moved = self.vm(machine, 0, number);
            edits.push(Edit::replace(vm.span, moved.sources[0].text.as_str()));
        }
        with_edits(&input, &edits).unwrap_or(input)
    }

    /// Converts the disks of a VM: all that can be converted, or none if the VM cannot have vhost-user disks.
    /// `number` is the VM's number in the whole input.
    fn vm(&mut self, input: Input, index: usize, number: usize) -> Input {
        let vm = &input.vms[index];
        let parsed = ParsedInput::new(&input);
        let (mut candidates, mut unchanged) = (Vec::new(), Vec::new());
        for at in 0..vm.disks.len() {
            match self.disk(&parsed, index, at) {
                Ok(candidate) => candidates.push(candidate),
                Err(reason) => unchanged.push((at, reason)),
            }
        }
        // Disks that share limits are converted together, or not at all.
        let mut unchanged_groups = BTreeMap::new();
        for (disk, _) in &unchanged {
            if let Some(group) = &vm.disks[*disk].carried.group {
                unchanged_groups.insert(group.clone(), vm.disks[*disk].name.clone());
            }
        }
        candidates.retain(|candidate| {
            let group = candidate.group.as_ref();
            let other = group.and_then(|group| unchanged_groups.get(group));
            if let Some(other) = other {
                let reason = format!("it shares its limits with {other}, which is not converted");
                unchanged.push((candidate.disk, reason));
            }
            other.is_none()
        });
        let mut changed = None;
        if !candidates.is_empty() {
            match with_disks_converted(&input, index, &candidates) {
                Ok(input) => changed = Some(input),
                Err(reason) => {
                    let failed = candidates.drain(..);
                    unchanged.extend(failed.map(|candidate| (candidate.disk, reason.clone())));
                }
            }
        }
        unchanged.sort();
        for (at, reason) in unchanged {
            if !reason.is_empty() {
                let disk = &vm.disks[at].name;
                self.messages
                    .push(format!("{} {disk} is not converted: {reason}", vm.name));
            }
            self.refused.push(((number, at), reason));
        }
        let mut groups: BTreeMap<String, String> = BTreeMap::new();
        for Candidate {
            disk,
            group,
            served,
            ..
        } in &candidates
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
                self.messages
                    .push(format!("{} {}: {note}", vm.name, disk.name));
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
        let trimmed = set(&changed, index, Setting::TrimThreads)
            .and_then(|edits| with_edits(&changed, &edits));
        trimmed.unwrap_or_else(|reason| {
            self.messages
                .push(format!("{}: {reason}", changed.vms[index].name));
            changed
        })
    }

    /// Prepares the conversion of a disk.
    ///
    /// # Errors
    /// The reason why it cannot be converted; empty if it is not a disk that QEMU serves.
    fn disk(
        &mut self,
        parsed: &ParsedInput<'_>,
        vm: usize,
        at: usize,
    ) -> Result<Candidate, String> {
        let input = parsed.round.input;
        let machine = &input.vms[vm];
        let disk = &machine.disks[at];
        check_convertible(input, disk)?;
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
        let target = parsed.target(vm, Some(at));
        served.name = self.names.take(&served.name);
        served.socket = format!("{SOCKETS}/{}.sock", served.name);
        let queues = (served.queues, served.queue_size);
        match parsed.move_to_ringdisk(&target, &served.name, &served.socket, queues) {
            Ok(edits) => Ok(Candidate {
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

/// Converts a VM's disks and shares its memory. The VM would not start with only one of the two.
fn with_disks_converted(
    input: &Input,
    vm: usize,
    candidates: &[Candidate],
) -> Result<Input, String> {
    let mut edits: Vec<Edit> = Vec::new();
    for candidate in candidates {
        edits.extend(candidate.edits.iter().cloned());
    }
    if input.vms[vm].table.word("vm.memory-shared") == Some("no") {
        let shared = set(input, vm, Setting::SharedMemory);
        edits.extend(
            shared.map_err(|reason| format!("the VM's memory cannot be shared: {reason}"))?,
        );
    }
    with_edits(input, &edits)
}

fn set(input: &Input, vm: usize, setting: Setting) -> Result<Vec<Edit>, String> {
    let parsed = ParsedInput::new(input);
    parsed.edits(&parsed.target(vm, None), setting)
}

fn with_edits(input: &Input, edits: &[Edit]) -> Result<Input, String> {
    let sources = apply(&input.sources, edits).ok_or("two changes overlap")?;
    reread(input, sources).map_err(|e| format!("the result could not be read: {e}"))
}

/// # Errors
/// The reason why a disk cannot be converted; empty if it is not a disk that QEMU serves.
fn check_convertible(input: &Input, disk: &Disk) -> Result<(), String> {
    let word = |name| disk.table.word(name).unwrap_or_default();
    if word("disk.device") != "disk"
        || word("disk.bus").starts_with("vhost-user")
        || disk.file.is_empty()
    {
        return Err(String::new());
    }
    match input.kind {
        Kind::Proxmox => {
            return Err("Proxmox has no vhost-user disks; add them manually with args:".into());
        }
        Kind::Ringdisk => return Err(String::new()),
        _ => {}
    }
    match word("disk.protocol") {
        "file" | "block" => {}
        "rbd" => {
            return Err(
                "images in a Ceph cluster must be converted manually: file=rbd:POOL/IMAGE in \
                 ringdisk.toml"
                    .into(),
            );
        }
        "" => return Err("a shell variable names its storage".into()),
        other => return Err(format!("ringdisk does not serve {other}")),
    }
    if !matches!(word("disk.format"), "raw" | "qcow2") {
        return Err("its format is unknown, or neither raw nor qcow2".into());
    }
    if word("disk.bus") != "virtio-blk" {
        return Err(format!(
            "it is {}; change it to virtio-blk first (--fix)",
            word("disk.bus")
        ));
    }
    disk.carried.serial()?;
    for bytes in [disk.carried.logical_block, disk.carried.physical_block] {
        if let Some(bytes) = bytes.filter(|bytes| !matches!(bytes, 512 | 4096)) {
            return Err(format!(
                "its block size is {bytes} bytes, and ringdisk supports 512 and 4096"
            ));
        }
    }
    Ok(())
}

/// A valid ringdisk name from the names of a VM and of its disk or group.
fn named(vm: &str, name: &str) -> String {
    let text = format!("{vm}-{name}");
    let good = |c: char| {
        if c.is_ascii_alphanumeric() || "-._".contains(c) {
            c
        } else {
            '-'
        }
    };
    let name: String = text.chars().map(good).take(50).collect();
    if name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return name;
    }
    format!("vm{name}")
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// The TOML tables of a disk, and of its throttle group if that is new.
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
    // Bypass the page cache unless the input sets the cache mode. Never less durable than before.
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
    // Partition tables count in logical blocks. QEMU's default is 512 bytes, whatever the storage has.
    let logical = disk.carried.logical_block.unwrap_or(512);
    put("logical-block-size", logical.to_string());
    if let Some(physical) = disk.carried.physical_block {
        put("physical-block-size", physical.to_string());
    }
    text.push_str(&limits);
    text.push('\n');
    text
}

/// Messages about a converted disk.
fn notes(disk: &Disk) -> Vec<&'static str> {
    let mut notes = Vec::new();
    let stops = |policy: &Option<String>| policy.as_deref() == Some("stop");
    if stops(&disk.carried.werror) || stops(&disk.carried.rerror) {
        notes.push(
            "after an I/O error, QEMU paused the VM; ringdisk holds requests until 'ringdisk resume', and the VM \
             continues to run",
        );
    }
    if !disk.file.starts_with('/') {
        notes.push("its path is relative: ringdisk resolves it from its working directory");
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
        return Err(
            "also name ringdisk's configuration: it says where its disks are stored".into(),
        );
    }
    let mut converted = Converted {
        inputs: Vec::new(),
        messages: Vec::new(),
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
                    converted.messages.push(format!(
                        "{place} is not converted: ringdisk's configuration has no disk '{name}'"
                    ));
                    continue;
                };
                let parsed = ParsedInput::new(&input);
                let target = parsed.target(index, Some(at - 1));
                if storage.carried.has_own_limits {
                    converted
                        .messages
                        .push(format!("{place}: it keeps only the limits of its group"));
                }
                let edits = parsed.move_to_qemu(&target, storage);
                match edits.and_then(|edits| with_edits(&input, &edits)) {
                    Ok(changed) => {
                        input = changed;
                        moved += 1;
                        converted.messages.push(format!(
                            "remove the disk '{name}' from ringdisk's configuration before the VM starts"
                        ));
                    }
                    Err(reason) => {
                        let message = format!("{place} is not converted: {reason}");
                        converted.messages.push(message);
                    }
                }
            }
        }
        converted.inputs.push(input);
    }
    match moved {
        0 => Err(match converted.messages.as_slice() {
            [] => "there is no vhost-user-blk disk".into(),
            messages => messages.join("; "),
        }),
        _ => Ok(converted),
    }
}
