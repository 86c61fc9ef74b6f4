//! Converts disks from QEMU to ringdisk and back: the VM's configuration and ringdisk's change together.

mod to_qemu;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::path::Path;

use crate::disk_keys::{Served, attributes_of, check_storage, keys_of};
use crate::fix::{machines, reread};
use crate::input::{Input, Kind};
use crate::model::carried::Dialect;
use crate::model::{Disk, Vm};
use crate::parsed::ParsedInput;
use crate::served::{self, Request};
use crate::setting::Setting;
use crate::text::{Edit, Source, apply};

/// Limit of a name, whose socket has to fit into the path of one.
const NAME_MAX: usize = 50;

/// The directory of the service's sockets.
const SOCKETS: &str = "/run/ringdisk";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From QEMU's own disks to vhost-user-blk, with all disks in ringdisk's configuration.
    ToRingdisk,
    /// The same, with the disks of libvirt's domains in their metadata, from which ringdisk's hook serves them.
    ToMetadata,
    /// From vhost-user-blk to QEMU's own disks; ringdisk's configuration must be among the inputs for those that the
    /// metadata of their domain does not name.
    ToQemu,
}

/// A disk that QEMU has instead of ringdisk.
#[derive(Debug)]
pub struct Moved {
    /// Its VM and its name there, for a message.
    pub place: String,
    /// Where ringdisk serves it.
    pub socket: String,
    /// Its storage, as QEMU opens it now.
    pub file: String,
}

#[derive(Debug)]
pub struct Converted {
    /// The changed inputs, in their order.
    pub inputs: Vec<Input>,
    /// Messages to the user.
    pub messages: Vec<String>,
    /// ringdisk's configuration of the converted disks.
    pub config: Option<String>,
    /// The disks that moved to QEMU.
    pub moved: Vec<Moved>,
}

/// Converts all disks that can be converted.
///
/// # Errors
/// None can. The error says why.
pub fn convert(inputs: Vec<Input>, direction: Direction) -> Result<Converted, String> {
    match direction {
        Direction::ToRingdisk => to_ringdisk(inputs, false),
        Direction::ToMetadata => to_ringdisk(inputs, true),
        Direction::ToQemu => to_qemu::to_qemu(inputs),
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

/// A configuration as a patch that creates a file of this name.
pub fn as_new_file(name: &str, config: &str) -> String {
    let diff = similar::TextDiff::from_lines("", config);
    let mut unified = diff.unified_diff();
    unified.header("/dev/null", name);
    unified.to_string()
}

fn to_ringdisk(inputs: Vec<Input>, in_metadata: bool) -> Result<Converted, String> {
    let mut conversion = Conversion {
        in_metadata,
        ..Conversion::default()
    };
    let mut changed = Vec::new();
    for input in inputs {
        changed.push(match input.kind {
            Kind::Proxmox => conversion.proxmox(input),
            _ => conversion.input(input),
        });
    }
    let Conversion {
        messages,
        config,
        converted,
        ..
    } = conversion;
    if converted > 0 {
        return Ok(Converted {
            inputs: changed,
            messages,
            config: (!config.is_empty()).then_some(config),
            moved: Vec::new(),
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
    /// Whether libvirt's domains name their disks themselves.
    in_metadata: bool,
    /// The number of converted disks.
    converted: usize,
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
            match self.with_disks_converted(&input, index, &candidates) {
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
        self.converted += candidates.len();
        self.configure(vm, &candidates, self.has_metadata(&input));
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

    /// A VM of Proxmox, whose configuration names its disks, and whose hookscript serves them.
    fn proxmox(&mut self, input: Input) -> Input {
        let (number, storages) = of_proxmox(&input);
        let request = Request {
            vm: &number,
            drives: &[],
            snippets: Some("local"),
            storages,
        };
        let changed = served::enable(&input.sources[0].text, &request).and_then(|changed| {
            self.messages.extend(changed.messages);
            with_text(&input, changed.text)
        });
        match changed {
            Ok(changed) => {
                self.converted += 1;
                self.messages.push(format!(
                    "VM {number} starts only if {} exists: 'ringdisk proxmox enable' makes it, too, and holds Proxmox' lock",
                    served::hookscript("local")
                ));
                changed
            }
            Err(problem) => {
                self.messages.push(format!("VM {number}: {problem}"));
                input
            }
        }
    }

    /// Whether the disks of this input are named there.
    fn has_metadata(&self, input: &Input) -> bool {
        self.in_metadata && input.kind == Kind::Libvirt
    }

    /// Writes the configuration of converted disks, unless it is elsewhere, and notes about them.
    fn configure(&mut self, vm: &Vm, candidates: &[Candidate], is_elsewhere: bool) {
        let mut groups: BTreeMap<String, String> = BTreeMap::new();
        for Candidate {
            disk,
            group,
            served,
            ..
        } in candidates
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
            if !is_elsewhere {
                self.config.push_str(&toml_of(disk, served, group, is_new));
            }
            for note in notes(disk) {
                self.messages
                    .push(format!("{} {}: {note}", vm.name, disk.name));
            }
        }
    }

    /// Converts a VM's disks and shares its memory. The VM would not start with only one of the two.
    fn with_disks_converted(
        &self,
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
        if self.has_metadata(input) {
            let parsed = ParsedInput::new(input);
            let machine = &input.vms[vm];
            let disks: Vec<_> = candidates
                .iter()
                .map(|candidate| {
                    let disk = &machine.disks[candidate.disk];
                    (
                        disk.name.clone(),
                        attributes_of(&machine.name, disk, &candidate.served),
                    )
                })
                .collect();
            edits.extend(parsed.add_metadata(&parsed.target(vm, None), &disks)?);
        }
        with_edits(input, &edits)
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
        if let (true, Some(group)) = (self.has_metadata(input), &disk.carried.group) {
            return Err(format!(
                "it shares its limits with other disks ({group}), which only ringdisk's configuration can have: name a \
                 file for that with --config"
            ));
        }
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

/// The number of a VM of Proxmox, which is its file's name, and the storages.
fn of_proxmox(input: &Input) -> (String, Option<&Source>) {
    let name = Path::new(&input.sources[0].name).file_stem();
    let number = name.unwrap_or_default().to_string_lossy().into_owned();
    (number, input.surroundings.storages.as_ref())
}

fn with_text(input: &Input, text: String) -> Result<Input, String> {
    let mut sources = input.sources.clone();
    sources[0] = Source::new(sources[0].name.clone(), text);
    reread(input, sources).map_err(|e| format!("the result could not be read: {e}"))
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
            return Err("'ringdisk proxmox enable' converts Proxmox' disks".into());
        }
        Kind::Ringdisk => return Err(String::new()),
        _ => {}
    }
    check_storage(disk)?;
    if word("disk.protocol") == "rbd" {
        return Err(
            "images in a Ceph cluster must be converted manually: file=rbd:POOL/IMAGE in ringdisk.toml".into(),
        );
    }
    if word("disk.bus") != "virtio-blk" {
        return Err(format!(
            "it is {}; change it to virtio-blk first (--fix)",
            word("disk.bus")
        ));
    }
    Ok(())
}

/// A valid ringdisk name from the names of a VM and of its disk or group. Other VMs have others, although some characters
/// are not allowed.
fn named(vm: &str, name: &str) -> String {
    let text = format!("{vm}-{name}");
    let is_good = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    if text.len() <= NAME_MAX
        && text.chars().all(is_good)
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
    {
        return text;
    }
    // FNV-1a.
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let readable = text.chars().filter(|c| is_good(*c)).take(NAME_MAX / 2);
    format!("vm{}-{hash:016x}", readable.collect::<String>())
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// The TOML tables of a disk, and of its throttle group if that is new.
fn toml_of(disk: &Disk, served: &Served, group: Option<&str>, is_new: bool) -> String {
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
    for (key, value) in keys_of(disk, served) {
        let _ = writeln!(text, "{key} = {value}");
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
