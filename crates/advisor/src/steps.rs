//! Compares consecutive configurations, each a step of a tuning. If more than one factor changed between two steps, a gain
//! cannot be attributed to either.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fmt::Write;

use serde::Serialize;

use crate::check::check;
use crate::facts::Facts;
use crate::input::{Input, Kind};
use crate::model::carried::Dialect;
use crate::model::{Disk, Vm};
use crate::qemu::Options;
use crate::rules::{Rules, Severity};
use crate::text::{Span, printable};
use crate::{libvirt, proxmox, qemu};

/// Properties that affect a disk's speed, without those that follow from others.
const FACTORS: &[&str] = &[
    "disk.bus",
    "disk.protocol",
    "disk.format",
    "disk.cache",
    "disk.aio",
    "disk.discard",
    "disk.detect-zeroes",
    "disk.queues",
    "disk.queue-size",
    "disk.threads",
    "disk.thread-disks",
    "disk.syntax",
    "disk.ioeventfd",
    "disk.data-plane",
    "disk.throttled",
    "disk.encrypted",
    "disk.copy-on-read",
    "disk.packed",
    "disk.l2-cache-size",
    "vm.machine",
    "vm.machine-version",
    "vm.accel",
    "vm.cpu-model",
    "vm.cpu-x2apic",
    "vm.cpu-pv-eoi",
    "vm.vcpus",
    "vm.memory",
    "vm.hugepages",
    "vm.memory-shared",
    "vm.malloc",
    "vm.library-path",
];

/// Factors of which the first also changes the second; both together are one change.
const TOGETHER: &[(&str, &str)] = &[
    // A drive without an explicit device has neither queues nor threads.
    ("disk.bus", "disk.queues"),
    ("disk.bus", "disk.queue-size"),
    ("disk.bus", "disk.threads"),
    ("disk.bus", "disk.ioeventfd"),
    ("disk.threads", "disk.thread-disks"),
    ("disk.throttled", "disk.limits"),
    // A disk that is added or removed changes the number of disks on the threads of others.
    ("disk", "disk.thread-disks"),
    // The larger size is at least the smaller one.
    ("logical_block_size", "physical_block_size"),
    ("vm.vcpus", "disk.queues"),
];

/// A value that changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Empty for a property of the VM.
    pub disk: String,
    pub property: String,
    pub from: String,
    pub to: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The VM's name.
    pub name: String,
    /// The changes since the previous step.
    pub changes: Vec<Change>,
    /// Other options of its disks that changed, as in `-device vda virtio-blk-pci: event_idx: none -> off`.
    pub others: Vec<String>,
    /// Whether more than one factor or option changed.
    pub confounded: bool,
    /// Changes without effect, such as a variable that is not exported.
    pub inert: Vec<String>,
    /// The rules that still apply.
    pub findings: Vec<String>,
}

/// Compares each VM with the one before it.
pub fn steps(
    inputs: Vec<Input>,
    rules: &Rules,
    facts: Option<&Facts>,
    ignore: &[String],
) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut before: Option<(Vm, Options)> = None;
    for mut input in inputs {
        let checked = check(&mut input, rules, facts, ignore);
        for (index, vm) in input.vms.iter().enumerate() {
            let found = checked
                .findings
                .iter()
                .filter(|f| f.vm_index == Some(index) && f.severity != Severity::Info);
            let mut findings: Vec<String> = found.map(|finding| finding.rule.clone()).collect();
            findings.dedup();
            let options = match input.kind {
                Kind::Libvirt => libvirt::options_of_disks(&input, vm),
                Kind::Proxmox => proxmox::options_of_disks(&input, vm),
                Kind::Qemu => qemu::options_of_disks(&input, vm),
                Kind::Ringdisk => Options::new(),
            };
            let (changes, others) = before.as_ref().map_or_else(Default::default, |before| {
                let changes = changes(&before.0, vm);
                let others = others(before, (vm, &options), &changes);
                (changes, others)
            });
            let (inert, changes): (Vec<_>, Vec<_>) =
                factors(changes).into_iter().partition(|change| {
                    change.to == "inert"
                        || (change.property == "vm.library-path" && change.from == "inert")
                });
            steps.push(Step {
                name: vm.name.clone(),
                confounded: changes.len() + others.len() > 1,
                others,
                inert: inert
                    .into_iter()
                    .map(|change| {
                        format!(
                            "{} {}: set but not exported, so it has no effect",
                            change.disk, change.property
                        )
                        .trim()
                        .to_owned()
                    })
                    .collect(),
                changes,
                findings,
            });
            before = Some((vm.clone(), options));
        }
    }
    steps
}

/// The changes that do not follow from other changes.
fn factors(changes: Vec<Change>) -> Vec<Change> {
    let follows = |change: &Change| {
        TOGETHER.iter().any(|(first, second)| {
            change.property == *second
                && changes.iter().any(|other| {
                    let is_disk = other.disk == change.disk || other.disk.is_empty();
                    other.property == *first && (is_disk || *first == "disk")
                })
        })
    };
    changes
        .iter()
        .filter(|change| !follows(change))
        .cloned()
        .collect()
}

fn changes(before: &Vm, after: &Vm) -> Vec<Change> {
    let mut changes = Changes(Vec::new());
    for property in FACTORS
        .iter()
        .filter(|property| property.starts_with("vm."))
    {
        let data = |vm: &'_ Vm| vm.table.get(property).map(|value| value.data.clone());
        changes.compare("", property, data(before), data(after));
    }
    changes.compare("", "vm.thread-poll", polling(before), polling(after));
    for (was, disk) in pairs(&before.disks, &after.disks) {
        let (was, disk) = match (was, disk) {
            (Some(was), Some(disk)) => (was, disk),
            (None, Some(disk)) => {
                changes.compare(&disk.name, "disk", None, Some(storage(disk)));
                continue;
            }
            (Some(was), None) => {
                changes.compare(&was.name, "disk", Some(storage(was)), None);
                continue;
            }
            (None, None) => continue,
        };
        let name = &disk.name;
        changes.compare(name, "disk", Some(storage(was)), Some(storage(disk)));
        for property in FACTORS
            .iter()
            .filter(|property| property.starts_with("disk."))
        {
            let data = |disk: &Disk| disk.table.get(property).map(|value| value.data.clone());
            changes.compare(name, property, data(was), data(disk));
        }
        changes.compare(name, "disk.limits", limits(was), limits(disk));
        let sizes = was.carried.block_sizes().into_iter();
        for ((property, from), (_, to)) in sizes.zip(disk.carried.block_sizes()) {
            changes.compare(name, property, from, to);
        }
    }
    changes.0
}

struct Changes(Vec<Change>);

impl Changes {
    fn compare<T: PartialEq + ToString>(
        &mut self,
        disk: &str,
        property: &str,
        from: Option<T>,
        to: Option<T>,
    ) {
        if from == to {
            return;
        }
        let text = |value: Option<T>| value.map_or("none".into(), |value| value.to_string());
        self.0.push(Change {
            disk: disk.to_owned(),
            property: property.to_owned(),
            from: text(from),
            to: text(to),
        });
    }
}

/// Each disk with the one that it was before: that of the same storage, because names change; then that of the same name,
/// whose storage is now another; then the only one that is left.
fn pairs<'a>(before: &'a [Disk], after: &'a [Disk]) -> Vec<(Option<&'a Disk>, Option<&'a Disk>)> {
    let mut was: Vec<Option<&Disk>> = vec![None; after.len()];
    let mut left: Vec<bool> = vec![true; before.len()];
    let keys: [fn(&Disk) -> &str; 2] = [|disk| &disk.file, |disk| &disk.name];
    for key in keys {
        let mut known: BTreeMap<&str, VecDeque<usize>> = BTreeMap::new();
        for (place, disk) in before.iter().enumerate() {
            if left[place] && !key(disk).is_empty() {
                known.entry(key(disk)).or_default().push_back(place);
            }
        }
        for (was, disk) in was.iter_mut().zip(after) {
            if was.is_none()
                && let Some(place) = known.get_mut(key(disk)).and_then(VecDeque::pop_front)
            {
                (*was, left[place]) = (before.get(place), false);
            }
        }
    }
    let removed = before.iter().zip(&left).filter(|(_, left)| **left);
    let removed: Vec<&Disk> = removed.map(|(disk, _)| disk).collect();
    let added = was.iter().filter(|was| was.is_none()).count();
    let renamed = (removed.len() == 1 && added == 1).then(|| removed[0]);
    let pairs = was.into_iter().zip(after);
    let mut pairs: Vec<_> = pairs
        .map(|(was, disk)| (was.or(renamed), Some(disk)))
        .collect();
    if renamed.is_none() {
        pairs.extend(removed.into_iter().map(|disk| (Some(disk), None)));
    }
    pairs
}

fn storage(disk: &Disk) -> &str {
    if disk.file.is_empty() {
        "unnamed storage"
    } else {
        &disk.file
    }
}

/// How long the I/O threads poll, if the VM says so.
fn polling(vm: &Vm) -> Option<String> {
    let times = vm.threads.iter().filter_map(|thread| thread.poll_max_ns);
    let times: BTreeSet<u64> = times.collect();
    let times: Vec<String> = times.iter().map(|ns| format!("{ns} ns")).collect();
    (!times.is_empty()).then(|| times.join(", "))
}

fn limits(disk: &Disk) -> Option<String> {
    let limits = disk.carried.limits.iter();
    let limits: Vec<String> = limits
        .map(|(limit, value)| format!("{}={value}", limit.name(Dialect::Qemu)))
        .collect();
    (!limits.is_empty()).then(|| limits.join(","))
}

/// Keys that change together with a property.
const FOLLOWING: &[(&str, &[&str])] = &[
    // Threads that take the place of one thread have a mapping that the one had not.
    ("iothread-vq-mapping", &["threads"]),
    ("driver.iothreads", &["threads"]),
    ("iothreadids", &["threads"]),
    ("scsihw", &["bus", "threads"]),
    ("cores", &["vcpus"]),
    ("sockets", &["vcpus"]),
    ("cpu.topology", &["vcpus"]),
    ("cpu.numa", &["memory"]),
    ("cpu.m", &["cpu-model"]),
    ("memoryBacking.access", &["memory-shared"]),
    ("memoryBacking.hugepages", &["hugepages"]),
    ("iotune", &["limits", "throttled"]),
    ("throttling", &["limits", "throttled"]),
    ("iops", &["limits", "throttled"]),
    ("bps", &["limits", "throttled"]),
    ("mbps", &["limits", "throttled"]),
];

/// Properties that do not tell the whole value of their settings.
const PARTLY_READ: &[&str] = &["disk.throttled", "vm.hugepages", "vm.memory-shared"];

/// The options of disks that both configurations have and that no property describes, as far as their keys differ.
fn others(before: &(Vm, Options), after: (&Vm, &Options), changes: &[Change]) -> Vec<String> {
    let read = [read_by_factors(&before.0), read_by_factors(after.0)];
    let changed: BTreeSet<&str> = changes
        .iter()
        .map(|change| change.property.rsplit('.').next().unwrap_or_default())
        .collect();
    // A property of a domain may come from a whole element.
    let is_domain = after.0.table.word("vm.front-end") == Some("libvirt");
    let pairs = pairs(&before.0.disks, &after.0.disks).into_iter();
    let of_disk = |disk: &Disk| format!("disk {}", disk.name);
    let renamed: BTreeMap<String, String> = pairs
        .filter_map(|(was, disk)| Some((of_disk(disk?), of_disk(was?))))
        .collect();
    let mut others = Vec::new();
    for (option, now) in after.1 {
        let old_name = renamed.get(option).unwrap_or(option);
        let Some(was) = before.1.get(old_name) else {
            continue;
        };
        let keys: BTreeSet<&String> = was.keys().chain(now.keys()).collect();
        for key in keys {
            let sides = [was.get(key), now.get(key)];
            let [from, to] = sides.map(|pair| pair.map(|pair| pair.value.as_str()));
            let is_read = sides.iter().zip(&read).any(|(pair, read)| {
                pair.is_some_and(|pair| {
                    let is_inside = |outer: &Span| is_domain && outer.contains(pair.value_span);
                    read.contains(&pair.span)
                        || read.contains(&pair.value_span)
                        || read.iter().any(is_inside)
                })
            });
            let last = key.rsplit('.').next().unwrap_or(key);
            let mut following = FOLLOWING.iter();
            let follows = following.any(|(start, properties)| {
                key.starts_with(start) && properties.iter().any(|its| changed.contains(its))
            });
            if from == to || is_read || changed.contains(last) || follows {
                continue;
            }
            let [from, to] = [from, to].map(|value| value.unwrap_or("none"));
            others.push(format!("{option}: {key}: {from} -> {to}"));
        }
    }
    others
}

/// The places in a configuration that factors come from.
fn read_by_factors(vm: &Vm) -> HashSet<Span> {
    let tables = vm.disks.iter().map(|disk| &disk.table);
    let tables = tables.chain([&vm.table]);
    let whole = || {
        FACTORS
            .iter()
            .filter(|factor| !PARTLY_READ.contains(factor))
    };
    let factors = tables.flat_map(|table| whole().filter_map(|factor| table.given(factor)));
    let threads = vm.disks.iter().flat_map(|disk| &disk.threads);
    factors.chain(threads.map(|thread| thread.span)).collect()
}

/// The steps as text.
pub fn text(steps: &[Step]) -> String {
    let mut text = String::new();
    for (i, step) in steps.iter().enumerate() {
        let _ = write!(text, "step {}  {}", i + 1, step.name);
        match (i, step.confounded, step.changes.len() + step.others.len()) {
            (0, ..) => {}
            (_, true, _) => text.push_str(": CONFOUNDED, more than one factor changed"),
            (_, false, 0) => text.push_str(": no change that affects disks"),
            (_, false, _) => text.push_str(": one factor changed"),
        }
        text.push('\n');
        for Change {
            disk,
            property,
            from,
            to,
        } in &step.changes
        {
            let of = if disk.is_empty() {
                String::new()
            } else {
                format!(" of {disk}")
            };
            let _ = writeln!(text, "        {property}{of}: {from} -> {to}");
        }
        for other in &step.others {
            let _ = writeln!(text, "        {}", printable(other));
        }
        for inert in &step.inert {
            let _ = writeln!(text, "        {inert}");
        }
        let remaining = if step.findings.is_empty() {
            "none".to_owned()
        } else {
            step.findings.join(", ")
        };
        let _ = writeln!(text, "        remaining findings: {remaining}");
    }
    text
}

#[cfg(test)]
mod tests;
