//! ringdisk's own configuration (`docs/operating/configuration.md`), as far as it decides how fast its disks are.
//! `ringdisk serve` reports its errors.

mod edit;

pub use edit::edits;

use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::input::{Mistake, Reading};
use crate::model::carried::{Carried, Dialect, Limit};
use crate::model::{Disk, Vm};
use crate::text::Span;

/// Whether a text is TOML with a table that only ringdisk has.
pub fn looks_like(text: &str) -> bool {
    let tables = ["[[disk]]", "[[iothread]]", "[[throttle-group]]"];
    text.lines().any(|line| tables.contains(&line.trim()))
}

fn span(range: std::ops::Range<usize>) -> Span {
    Span::new(0, range.start, range.end)
}

/// Reads the disks.
///
/// # Errors
/// It is no TOML.
pub fn read(text: &str, name: &str, reading: &mut Reading) -> Result<(), Mistake> {
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        Mistake::new(at, error.message().trim())
    })?;
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        if let Some(at) = line.find('#') {
            reading.comment(
                &line[at..],
                Span::new(0, start + at, start + line.trim_end().len()),
            );
        }
        start += line.len();
    }
    let mut vm = Vm {
        name: name.to_owned(),
        span: span(table.span()),
        ..Vm::default()
    };
    vm.table.give("vm.front-end", "ringdisk", vm.span);
    let find = |name: &str| {
        let mut tables = table.get_ref().iter();
        tables.find(|(key, _)| key.get_ref().as_ref() == name)
    };
    let groups = groups(find("throttle-group").map(|(_, tables)| tables));
    let disks = find("disk");
    let Some((_, disks)) = disks else {
        reading.vms.push(vm);
        return Ok(());
    };
    let DeValue::Array(disks) = disks.get_ref() else {
        return Err(Mistake::new(
            disks.span().start,
            "disk must be a list of tables: [[disk]]",
        ));
    };
    for disk in disks.iter() {
        let DeValue::Table(pairs) = disk.get_ref() else {
            return Err(Mistake::new(
                disk.span().start,
                "disk must be a list of tables: [[disk]]",
            ));
        };
        vm.disks.push(read_disk(disk.span(), pairs, &groups));
    }
    reading.vms.push(vm);
    Ok(())
}

type Limits = BTreeMap<Limit, u64>;

/// The limits of each `[[throttle-group]]`, by its name.
fn groups(tables: Option<&Spanned<DeValue<'_>>>) -> BTreeMap<String, Limits> {
    let mut groups = BTreeMap::new();
    let Some(DeValue::Array(tables)) = tables.map(Spanned::get_ref) else {
        return groups;
    };
    for table in tables.iter() {
        let DeValue::Table(pairs) = table.get_ref() else {
            continue;
        };
        let mut group = Carried::default();
        let mut name = String::new();
        for (key, value) in pairs {
            match key.get_ref().as_ref() {
                "name" => name = text_of(value),
                key => limit(&mut group, key, &text_of(value)),
            }
        }
        groups.insert(name, group.limits);
    }
    groups
}

fn limit(carried: &mut Carried, key: &str, value: &str) {
    let value = crate::qemu::size_of(value);
    carried.limit(&key.replace('_', "-"), Dialect::Ringdisk, value);
}

fn text_of(value: &Spanned<DeValue<'_>>) -> String {
    match value.get_ref() {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(number) => number.as_str().replace('_', ""),
        DeValue::Boolean(true) => "on".into(),
        DeValue::Boolean(false) => "off".into(),
        _ => String::new(),
    }
}

fn read_disk(
    range: std::ops::Range<usize>,
    pairs: &DeTable<'_>,
    groups: &BTreeMap<String, Limits>,
) -> Disk {
    // The table's own span is its header; its pairs follow.
    let end = pairs
        .values()
        .map(|value| value.span().end)
        .max()
        .unwrap_or(range.end);
    let span_of_disk = span(range.start..end.max(range.end));
    let pairs = pairs.iter().map(|(key, value)| {
        let at = span(key.span().start..value.span().end);
        (key.get_ref().as_ref(), text_of(value), at)
    });
    disk_of(span_of_disk, pairs, groups)
}

/// A disk in the metadata of a domain: the attributes are keys.
pub fn disk_of_attributes<'a>(pairs: impl Iterator<Item = (&'a str, String, Span)>) -> Disk {
    disk_of(Span::default(), pairs, &BTreeMap::new())
}

/// A disk with these keys, values, and their places.
fn disk_of<'a>(
    place: Span,
    pairs: impl Iterator<Item = (&'a str, String, Span)>,
    groups: &BTreeMap<String, Limits>,
) -> Disk {
    let mut disk = Disk {
        span: place,
        name: "disk".into(),
        ..Disk::default()
    };
    disk.table
        .derive("disk.served", true, "it is in ringdisk's configuration");
    disk.table.derive(
        "disk.bus",
        "vhost-user-blk",
        "ringdisk serves vhost-user-blk",
    );
    for (key, word, at) in pairs {
        let table = &mut disk.table;
        let mut known = |property: &'static str, words: &[&'static str]| {
            if let Some(known) = words.iter().find(|known| **known == word) {
                table.give(property, *known, at);
            }
        };
        match key.replace('_', "-").as_str() {
            "file" => disk.file = word,
            "name" => disk.name = word,
            "socket" => disk.socket = Some(word),
            "cache" => known(
                "disk.cache",
                &["none", "writeback", "writethrough", "directsync", "unsafe"],
            ),
            "aio" => known("disk.aio", &["threads", "native", "io_uring"]),
            "discard" => known("disk.discard", &["ignore", "unmap"]),
            "detect-zeroes" => known("disk.detect-zeroes", &["off", "on", "unmap"]),
            "format" => table.give("disk.format", word, at),
            "readonly" => table.give("disk.readonly", word == "on", at),
            "fixed-buffers" => table.give("disk.fixed-buffers", word == "on", at),
            key @ ("queues" | "queue-size") => {
                if let Ok(number) = word.parse::<u64>() {
                    let property = if key == "queues" {
                        "disk.queues"
                    } else {
                        "disk.queue-size"
                    };
                    table.give(property, number, at);
                }
            }
            "l2-cache-size" => {
                if let Some(bytes) = crate::qemu::size_of(&word) {
                    table.give("disk.l2-cache-size", bytes, at);
                }
            }
            "serial" => disk.carried.serial = Some(word),
            "werror" => disk.carried.werror = Some(word),
            "rerror" => disk.carried.rerror = Some(word),
            "logical-block-size" => disk.carried.logical_block = crate::qemu::size_of(&word),
            "physical-block-size" => disk.carried.physical_block = crate::qemu::size_of(&word),
            "data-file" => disk.others.push(format!("data-file={word}")),
            "throttle-group" => disk.carried.group = Some(word),
            key => limit(&mut disk.carried, key, &word),
        }
    }
    let carried = &mut disk.carried;
    match carried.group.as_ref().map(|name| (name, groups.get(name))) {
        Some((_, Some(group))) => {
            carried.has_own_limits = !carried.limits.is_empty();
            carried.limits = group.clone();
        }
        Some((name, None)) => disk.others.push(format!(
            "the limits of its throttle group '{name}', which no given configuration has"
        )),
        None => {}
    }
    if carried.limits.keys().any(|limit| limit.is_rate()) {
        let how = "it has limits, or a group that has";
        disk.table.derive("disk.throttled", true, how);
    }
    if disk.name == "disk" && !disk.file.is_empty() {
        let name = disk.file.rsplit('/').next().unwrap_or_default();
        disk.name = name.split('.').next().unwrap_or(name).to_owned();
    }
    fill_defaults(&mut disk);
    disk
}

/// Sets the defaults, and the properties that follow from others.
fn fill_defaults(disk: &mut Disk) {
    let table = &mut disk.table;
    table.default_to("disk.device", "disk", "ringdisk");
    table.default_to("disk.cache", "none", "ringdisk");
    table.default_to("disk.discard", "unmap", "ringdisk");
    table.default_to("disk.detect-zeroes", "off", "ringdisk");
    table.default_to("disk.queue-size", 256u64, "ringdisk");
    let block = disk.file.starts_with("/dev/") && !disk.file.starts_with("/dev/shm/");
    let word = match &disk.file {
        file if file.starts_with("null:") => "null",
        _ if block => "block",
        _ => "file",
    };
    table.derive("disk.protocol", word, "from its name");
    let cache = table.word("disk.cache").unwrap_or("none").to_owned();
    table.derive(
        "disk.direct",
        matches!(cache.as_str(), "none" | "directsync"),
        "follows from the cache mode",
    );
    table.derive(
        "disk.flush",
        cache != "unsafe",
        "follows from the cache mode",
    );
}
