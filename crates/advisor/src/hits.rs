//! The rules that apply to an input, without the texts of findings.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::facts::Facts;
use crate::input::{Input, Kind};
use crate::model::{Table, Vm};
use crate::rules::{Lookup, Rule, Rules, Scope, Severity, Verdict, evaluate};
use crate::text::printable;

/// A rule that applies to a VM, or to one of its disks.
#[derive(Clone, Copy)]
pub(crate) struct Hit<'a> {
    pub rule: &'a Rule,
    /// Index into the input's VMs.
    pub vm: usize,
    /// Index into the VM's disks; none if the rule is about the VM.
    pub disk: Option<usize>,
}

impl Hit<'_> {
    /// The VM and the disk, for messages.
    pub fn place(&self, input: &Input) -> String {
        let vm = input.vms.get(self.vm);
        let disk = self.disk.and_then(|disk| vm?.disks.get(disk));
        let vm = vm.map_or("", |vm| &vm.name);
        place(
            &printable(vm),
            &printable(disk.map_or("", |disk| &disk.name)),
        )
    }
}

/// The rules that apply to an input.
pub(crate) struct Hits<'a> {
    /// Sorted by severity and rule; hits of one rule in the order in which the fixes change disks.
    pub hits: Vec<Hit<'a>>,
    pub ignored: usize,
    pub unknown: BTreeMap<&'static str, BTreeSet<String>>,
}

/// Evaluates all rules without writing the findings' texts.
pub(crate) fn hits<'a>(
    input: &Input,
    rules: &'a Rules,
    facts: Option<&Facts>,
    ignore: &[String],
) -> Hits<'a> {
    let mut found = Hits {
        hits: Vec::new(),
        ignored: 0,
        unknown: BTreeMap::new(),
    };
    let host = facts.map(Facts::table);
    let ignored: HashSet<&str> = input.ignores.iter().map(|i| i.rule.as_str()).collect();
    let of_scope = |scope| {
        let asked = |rule: &&Rule| rule.scope == scope && !ignore.contains(&rule.id);
        rules.rules.iter().filter(asked).collect::<Vec<&Rule>>()
    };
    let (of_machines, of_disks) = (of_scope(Scope::Vm), of_scope(Scope::Disk));
    let mut ask = |rules: &[&'a Rule], vm: usize, disk: Option<usize>, lookup: &Lookup<'_>| {
        for &rule in rules {
            match evaluate(&rule.when, lookup) {
                Verdict::Holds if ignored.contains(rule.id.as_str()) => found.ignored += 1,
                Verdict::Holds => found.hits.push(Hit { rule, vm, disk }),
                Verdict::Unknown(names) => record_unknown(&mut found.unknown, rule, &names),
                Verdict::Fails => {}
            }
        }
    };
    for (number, vm) in input.vms.iter().enumerate() {
        ask(&of_machines, number, None, &lookup(vm, None, host.as_ref()));
        // All rules for one disk, then the next disk: the disk's table stays in the CPU cache.
        for disk in 0..vm.disks.len() {
            let lookup = lookup(vm, Some(disk), host.as_ref());
            ask(&of_disks, number, Some(disk), &lookup);
        }
    }
    // On a command line, disks change in their order; elsewhere they are renamed in the order of their names.
    let is_named = input.kind != Kind::Qemu;
    let place = |hit: &Hit<'_>| {
        let disk = hit.disk.filter(|_| is_named);
        let name = disk.map_or("", |disk| input.vms[hit.vm].disks[disk].name.as_str());
        (hit.vm, name.len(), name, hit.disk)
    };
    found.hits.sort_by(|a, b| {
        let rules = (a.rule.severity, &a.rule.id).cmp(&(b.rule.severity, &b.rule.id));
        rules.then_with(|| place(a).cmp(&place(b)))
    });
    found
}

/// The tables of a disk, its VM and the host.
pub(crate) fn lookup<'a>(vm: &'a Vm, disk: Option<usize>, host: Option<&'a Table>) -> Lookup<'a> {
    Lookup {
        own: disk.and_then(|disk| Some(&vm.disks.get(disk)?.table)),
        vm: Some(&vm.table),
        host,
    }
}

/// Records unknown properties, except for notes: these do not affect the result.
pub(crate) fn record_unknown(
    unknown: &mut BTreeMap<&'static str, BTreeSet<String>>,
    rule: &Rule,
    names: &[&'static str],
) {
    if rule.severity == Severity::Info {
        return;
    }
    for name in names {
        let rules = unknown.entry(name).or_default();
        if !rules.contains(&rule.id) {
            rules.insert(rule.id.clone());
        }
    }
}

/// A VM and a disk, for messages.
pub(crate) fn place(vm: &str, disk: &str) -> String {
    match (vm, disk) {
        (vm, "") => vm.to_owned(),
        ("", disk) => disk.to_owned(),
        (vm, disk) => format!("{vm} {disk}"),
    }
}
