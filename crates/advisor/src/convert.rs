//! Disks from QEMU to ringdisk and back: the configuration of the guest and that of the host, together.

use std::fmt::Write;

use roxmltree::Node;

use crate::fix::{Setting, Target, reread};
use crate::input::{Input, Kind};
use crate::model::Disk;
use crate::model::carried::{Carried, Dialect};
use crate::text::{Edit, Span, apply};
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
    let mut converted = Converted {
        inputs: Vec::new(),
        said: Vec::new(),
        config: None,
    };
    let mut config = String::new();
    let mut names: Vec<String> = Vec::new();
    // Groups of throttles are a machine's own with QEMU, and the host's with ringdisk.
    let mut groups: Vec<((String, String), String)> = Vec::new();
    for mut input in inputs {
        for index in 0..input.vms.len() {
            let mut moved = false;
            // One after the other: places move as the text is changed.
            let mut at = 0;
            while let Some(disk) = input.vms.get(index).and_then(|vm| vm.disks.get(at)) {
                let vm = &input.vms[index];
                let place = format!("{} {}", vm.name, disk.name);
                at += 1;
                let groups_before = groups.len();
                if let Err(why) = movable(&input, disk) {
                    if !why.is_empty() {
                        converted.said.push(format!("{place} stays: {why}"));
                    }
                    continue;
                }
                let vcpus = vm.table.number("vm.vcpus").unwrap_or(1).clamp(1, 256);
                let name = unique(&names, &named(&vm.name, &disk.name));
                let served = Served {
                    socket: format!("{SOCKETS}/{name}.sock"),
                    name,
                    queues: disk
                        .table
                        .number("disk.queues")
                        .filter(|_| disk.table.given("disk.queues").is_some())
                        .unwrap_or(vcpus),
                    queue_size: 256,
                };
                let group = disk.carried.group.as_ref().map(|group| {
                    let group = (vm.name.clone(), group.clone());
                    let known = groups.iter().position(|(known, _)| *known == group);
                    known.unwrap_or_else(|| {
                        let taken: Vec<String> =
                            groups.iter().map(|(_, name)| name.clone()).collect();
                        let name = unique(&taken, &named(&group.0, &group.1));
                        groups.push((group, name));
                        groups.len() - 1
                    })
                });
                let is_new = group.is_some() && groups.len() > groups_before;
                let group = group.map(|place| groups[place].1.as_str());
                let mut problems = Vec::new();
                let table = toml_of(disk, &served, group, is_new, &mut problems);
                for problem in problems {
                    converted.said.push(format!("{place}: {problem}"));
                }
                let target = Target {
                    input: &input,
                    vm: index,
                    disk: Some(at - 1),
                };
                let edits = match input.kind {
                    Kind::Libvirt => libvirt_to_ringdisk(&target, &served),
                    _ => qemu::to_ringdisk(
                        &target,
                        &served.name,
                        &served.socket,
                        served.queues,
                        served.queue_size,
                    ),
                };
                match edits.and_then(|edits| again(&input, &edits)) {
                    Ok(changed) => {
                        let before = input.vms[index].disks.len();
                        input = changed;
                        // A device may have moved in the order, but none is gone.
                        debug_assert_eq!(before, input.vms[index].disks.len());
                        names.push(served.name);
                        config.push_str(&table);
                        moved = true;
                    }
                    Err(why) => {
                        groups.truncate(groups_before);
                        converted.said.push(format!("{place} stays: {why}"));
                    }
                }
            }
            if !moved {
                continue;
            }
            let after = [Setting::SharedMemory, Setting::TrimThreads];
            for setting in after {
                let vm = &input.vms[index];
                let needed = match setting {
                    Setting::SharedMemory => vm.table.word("vm.memory-shared") == Some("no"),
                    _ => vm.table.number("vm.threads-unused").unwrap_or(0) > 0,
                };
                if !needed {
                    continue;
                }
                let target = Target {
                    input: &input,
                    vm: index,
                    disk: None,
                };
                let edits = match input.kind {
                    Kind::Libvirt => libvirt::edits(&target, setting),
                    _ => qemu::edits(&target, setting),
                };
                match edits.and_then(|edits| again(&input, &edits)) {
                    Ok(changed) => input = changed,
                    Err(why) => converted
                        .said
                        .push(format!("{}: {why}", input.vms[index].name)),
                }
            }
        }
        converted.inputs.push(input);
    }
    match config.is_empty() {
        true if converted.said.is_empty() => {
            Err("there is no disk that ringdisk could serve".into())
        }
        true => Err(converted.said.join("; ")),
        false => {
            converted.config = Some(config);
            Ok(converted)
        }
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

fn unique(names: &[String], name: &str) -> String {
    let mut candidate = name.to_owned();
    let mut number = 2;
    while names.contains(&candidate) {
        candidate = format!("{name}-{number}");
        number += 1;
    }
    candidate
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// The tables of a disk, and of its group of throttles if that is new.
fn toml_of(
    disk: &Disk,
    served: &Served,
    group: Option<&str>,
    is_new: bool,
    problems: &mut Vec<String>,
) -> String {
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
    if word("disk.discard") == "ignore" {
        put("discard", quoted("ignore"));
    }
    if disk.table.is_yes("disk.readonly") {
        put("readonly", "true".into());
    }
    if let found @ ("on" | "unmap") = word("disk.detect-zeroes") {
        put("detect-zeroes", quoted(found));
    }
    match disk.carried.serial() {
        Ok(Some(serial)) => put("serial", quoted(serial)),
        Ok(None) => {}
        Err(problem) => problems.push(problem),
    }
    // A partition table counts in them; QEMU's are of 512 bytes whatever is behind the disk.
    let logical = disk.carried.logical_block.unwrap_or(512);
    let physical = disk.carried.physical_block;
    for (key, bytes) in [("logical", Some(logical)), ("physical", physical)] {
        match bytes {
            Some(512 | 4096) => put(
                &format!("{key}-block-size"),
                bytes.unwrap_or(512).to_string(),
            ),
            Some(other) => problems.push(format!(
                "its {key} blocks of {other} bytes are left out; ringdisk has 512 and 4096"
            )),
            None => {}
        }
    }
    text.push_str(&limits);
    text.push('\n');
    text
}

/// The disk's element, written anew; what says where the guest sees it stays.
fn libvirt_to_ringdisk(target: &Target<'_>, served: &Served) -> Result<Vec<Edit>, String> {
    let driver = format!(
        "<driver name='qemu' type='raw' queues='{}' queue_size='{}'/>",
        served.queues, served.queue_size
    );
    let source = format!("<source type='unix' path='{}'>", escaped(&served.socket));
    with_disk(target, "vhostuser", &|indent| {
        vec![
            driver.clone(),
            format!(
                "{source}\n{indent}  <reconnect enabled='yes' timeout='1'/>\n{indent}</source>"
            ),
        ]
    })
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('\'', "&apos;")
}

/// Replaces what is behind a disk: its type, driver and source.
fn with_disk(
    target: &Target<'_>,
    kind: &str,
    written: &dyn Fn(&str) -> Vec<String>,
) -> Result<Vec<Edit>, String> {
    let text = target
        .input
        .sources
        .first()
        .map_or("", |source| source.text.as_str());
    let document = libvirt::parse(text).map_err(|_| "is no XML")?;
    let span = target.disk()?.span;
    let of = |node: &Node<'_, '_>| Span::new(0, node.range().start, node.range().end);
    let disk = document
        .descendants()
        .find(|node| node.has_tag_name("disk") && of(node) == span)
        .ok_or("the disk is not there")?;
    let elements: Vec<_> = disk.children().filter(Node::is_element).collect();
    let first = elements.first().ok_or("the disk is empty")?;
    let line = text[..first.range().start]
        .rfind('\n')
        .map_or(0, |at| at + 1);
    let indent = &text[line..first.range().start];
    let indent = if indent.chars().all(char::is_whitespace) {
        indent
    } else {
        ""
    };
    let mut edits = Vec::new();
    match disk.attribute_node("type") {
        Some(attribute) => {
            let range = attribute.range_value();
            edits.push(Edit::replace(Span::new(0, range.start, range.end), kind));
        }
        None => return Err("the disk has no type".into()),
    }
    // What belongs to the old storage goes with it.
    let goes = [
        "driver",
        "source",
        "backingStore",
        "iotune",
        "serial",
        "blockio",
        "encryption",
        "mirror",
        "auth",
        "transient",
    ];
    let mut place = None;
    for node in &elements {
        if !goes.contains(&node.tag_name().name()) {
            continue;
        }
        let range = node.range();
        match place {
            None => place = Some(range),
            Some(_) => {
                let start = text[..range.start].trim_end().len();
                edits.push(Edit::replace(Span::new(0, start, range.end), ""));
            }
        }
    }
    let written = written(indent).join(&format!("\n{indent}"));
    match place {
        Some(range) => edits.push(Edit::replace(Span::new(0, range.start, range.end), written)),
        None => edits.push(Edit::replace(
            of(first).before(),
            format!("{written}\n{indent}"),
        )),
    }
    Ok(edits)
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
                let target = Target {
                    input: &input,
                    vm: index,
                    disk: Some(at - 1),
                };
                if storage.carried.own_besides {
                    converted.said.push(format!(
                        "{place}: it keeps the limits of its group, not those of its own"
                    ));
                }
                let edits = match input.kind {
                    Kind::Libvirt => libvirt_to_qemu(&target, storage),
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

fn libvirt_to_qemu(target: &Target<'_>, storage: &Disk) -> Result<Vec<Edit>, String> {
    let word = |name| storage.table.word(name).unwrap_or_default();
    let block = word("disk.protocol") == "block";
    let format = match word("disk.format") {
        "" if storage.file.ends_with(".qcow2") => "qcow2",
        "" => "raw",
        format => format,
    };
    let mut driver = format!(
        "<driver name='qemu' type='{format}' cache='{}'",
        word("disk.cache")
    );
    if storage.table.word("disk.direct") == Some("yes") {
        driver.push_str(if block {
            " io='native'"
        } else {
            " io='io_uring'"
        });
    }
    let _ = write!(driver, " discard='{}'", word("disk.discard"));
    if let found @ ("on" | "unmap") = word("disk.detect-zeroes") {
        let _ = write!(driver, " detect_zeroes='{found}'");
    }
    driver.push_str("/>");
    let attribute = if block { "dev" } else { "file" };
    let source = format!("<source {attribute}='{}'/>", escaped(&storage.file));
    with_disk(target, if block { "block" } else { "file" }, &|indent| {
        let mut elements = vec![driver.clone(), source.clone()];
        elements.extend(libvirt_carried(&storage.carried, indent));
        elements
    })
}

/// Elements for what goes with a disk.
fn libvirt_carried(carried: &Carried, indent: &str) -> Vec<String> {
    let mut elements = Vec::new();
    let sizes: String = carried
        .block_sizes()
        .into_iter()
        .filter_map(|(name, bytes)| Some(format!(" {name}='{}'", bytes?)))
        .collect();
    if !sizes.is_empty() {
        elements.push(format!("<blockio{sizes}/>"));
    }
    if !carried.limits.is_empty() {
        let mut tune = String::from("<iotune>");
        for (limit, value) in &carried.limits {
            let name = limit.name(Dialect::Libvirt);
            let _ = write!(tune, "\n{indent}  <{name}>{value}</{name}>");
        }
        if let Some(group) = &carried.group {
            let _ = write!(
                tune,
                "\n{indent}  <group_name>{}</group_name>",
                escaped(group)
            );
        }
        let _ = write!(tune, "\n{indent}</iotune>");
        elements.push(tune);
    }
    if let Some(serial) = carried.serial.as_deref().filter(|text| !text.is_empty()) {
        elements.push(format!("<serial>{}</serial>", escaped(serial)));
    }
    elements
}
