//! Compares consecutive configurations, each a step of a tuning. If more than one factor changed between two steps, a gain
//! cannot be attributed to either.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use crate::check::check;
use crate::facts::Facts;
use crate::input::Input;
use crate::model::{Data, Vm};
use crate::rules::{Rules, Severity};

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
    /// Whether more than one factor changed.
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
    let mut before: Option<Vm> = None;
    for mut input in inputs {
        let checked = check(&mut input, rules, facts, ignore);
        for (index, vm) in input.vms.iter().enumerate() {
            let found = checked
                .findings
                .iter()
                .filter(|f| f.vm_index == Some(index) && f.severity != Severity::Info);
            let mut findings: Vec<String> = found.map(|finding| finding.rule.clone()).collect();
            findings.dedup();
            let changes = before
                .as_ref()
                .map_or(Vec::new(), |before| changes(before, vm));
            let (inert, changes): (Vec<_>, Vec<_>) =
                factors(changes).into_iter().partition(|change| {
                    change.to == "inert"
                        || (change.property == "vm.library-path" && change.from == "inert")
                });
            steps.push(Step {
                name: vm.name.clone(),
                confounded: changes.len() > 1,
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
            before = Some(vm.clone());
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
                    other.property == *first && (other.disk == change.disk || other.disk.is_empty())
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
    let mut changes = Vec::new();
    let mut compare = |disk: &str, property: &str, from: Option<&Data>, to: Option<&Data>| {
        if from == to {
            return;
        }
        let text = |data: Option<&Data>| data.map_or("none".into(), ToString::to_string);
        changes.push(Change {
            disk: disk.to_owned(),
            property: property.to_owned(),
            from: text(from),
            to: text(to),
        });
    };
    for property in FACTORS
        .iter()
        .filter(|property| property.starts_with("vm."))
    {
        let data = |vm: &'_ Vm| vm.table.get(property).map(|value| value.data.clone());
        compare("", property, data(before).as_ref(), data(after).as_ref());
    }
    // Disks are identified by their storage, since names change.
    let old: BTreeMap<&str, _> = before
        .disks
        .iter()
        .map(|disk| (disk.file.as_str(), disk))
        .collect();
    for disk in &after.disks {
        let Some(was) = old.get(disk.file.as_str()) else {
            compare(&disk.name, "disk", None, Some(&Data::Word("added".into())));
            continue;
        };
        for property in FACTORS
            .iter()
            .filter(|property| property.starts_with("disk."))
        {
            let data =
                |table: &crate::model::Table| table.get(property).map(|value| value.data.clone());
            compare(
                &disk.name,
                property,
                data(&was.table).as_ref(),
                data(&disk.table).as_ref(),
            );
        }
    }
    changes
}

/// The steps as text.
pub fn text(steps: &[Step]) -> String {
    let mut text = String::new();
    for (i, step) in steps.iter().enumerate() {
        let _ = write!(text, "step {}  {}", i + 1, step.name);
        match (i, step.confounded, step.changes.len()) {
            (0, ..) => {}
            (_, true, _) => text.push_str(": CONFOUNDED, more than one factor changed"),
            (_, false, 0) => text.push_str(": no change that affects QEMU"),
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
