//! Rules are asked of machines, disks and hosts; what holds is a finding.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde::Serialize;

use crate::facts::Facts;
use crate::input::{Input, Kind};
use crate::measured::Gain;
use crate::model::{Origin, Table, Vm};
use crate::rules::{Clause, Lookup, Rule, Rules, Scope, Severity, Verdict, evaluate, say};
use crate::text::{Position, Source, Span, printable};

/// Something that holds and should not, or that is worth to know.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The rule.
    pub rule: String,
    /// How bad it is.
    pub severity: Severity,
    /// The machine.
    pub vm: String,
    /// The disk.
    pub disk: String,
    /// What is the matter, with its values.
    pub text: String,
    /// The file.
    pub file: String,
    /// Where in it, if it stands there.
    #[serde(serialize_with = "position")]
    pub at: Option<Position>,
    /// The values on which it rests.
    pub because: Vec<Because>,
    /// What was measured on this host.
    pub measured: Vec<Gain>,
    #[serde(skip)]
    pub(crate) vm_index: Option<usize>,
    /// Its bytes in the first text of the input.
    #[serde(skip)]
    pub span: Span,
}

fn position<S: serde::Serializer>(at: &Option<Position>, to: S) -> Result<S::Ok, S::Error> {
    at.map(|at| (at.line, at.column)).serialize(to)
}

impl Finding {
    /// The machine and the disk.
    pub fn place(&self) -> String {
        place(&self.vm, &self.disk)
    }
}

fn place(vm: &str, disk: &str) -> String {
    match (vm, disk) {
        (vm, "") => vm.to_owned(),
        ("", disk) => disk.to_owned(),
        (vm, disk) => format!("{vm} {disk}"),
    }
}

/// A value on which a finding rests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Because {
    /// The property.
    pub property: &'static str,
    /// What it is.
    pub value: String,
    /// Where it comes from: a place in the input, or whose default.
    pub from: String,
}

/// What was found in an input.
#[derive(Clone, Debug, Default)]
pub struct Checked {
    /// The worst first.
    pub findings: Vec<Finding>,
    /// Findings that a comment in the input takes back.
    pub ignored: usize,
    /// What could not be known, with the number of rules that it leaves open.
    pub unknown: BTreeMap<&'static str, BTreeSet<String>>,
}

/// A rule that holds of a machine, or of one of its disks.
#[derive(Clone, Copy)]
pub(crate) struct Hit<'a> {
    /// The rule.
    pub rule: &'a Rule,
    /// Number of the machine.
    pub vm: usize,
    /// Number of its disk.
    pub disk: Option<usize>,
}

impl Hit<'_> {
    /// The machine and the disk.
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

/// What holds of an input to which the facts of its host were added.
pub(crate) struct Hits<'a> {
    /// The worst first; those of one rule in the order in which disks change.
    pub hits: Vec<Hit<'a>>,
    ignored: usize,
    unknown: BTreeMap<&'static str, BTreeSet<String>>,
}

/// Asks all rules of an input, after adding to it what is known of the host.
pub fn check(
    input: &mut Input,
    rules: &Rules,
    facts: Option<&Facts>,
    ignore: &[String],
) -> Checked {
    if let Some(facts) = facts {
        input.vms.iter_mut().for_each(|vm| facts.join(vm));
    }
    let Hits {
        hits,
        ignored,
        unknown,
    } = hits(input, rules, facts, ignore);
    let host = facts.map(Facts::table);
    let findings = hits.iter().filter_map(|hit| {
        let vm = input.vms.get(hit.vm)?;
        let lookup = lookup(vm, hit.disk, host.as_ref());
        Some(finding(hit, vm, &lookup, &input.sources))
    });
    let mut findings: Vec<Finding> = findings.collect();
    sort(&mut findings);
    Checked {
        findings,
        ignored,
        unknown,
    }
}

/// The rules that hold, without the words in which a finding says so.
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
                Verdict::Unknown(names) => open(&mut found.unknown, rule, &names),
                Verdict::Fails => {}
            }
        }
    };
    for (number, vm) in input.vms.iter().enumerate() {
        ask(&of_machines, number, None, &lookup(vm, None, host.as_ref()));
        // All rules of one disk after the other: its table is in the processor's cache then.
        for disk in 0..vm.disks.len() {
            let lookup = lookup(vm, Some(disk), host.as_ref());
            ask(&of_disks, number, Some(disk), &lookup);
        }
    }
    // Disks of a command line change one after the other; elsewhere they are renamed in the order of their names.
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

fn lookup<'a>(vm: &'a Vm, disk: Option<usize>, host: Option<&'a Table>) -> Lookup<'a> {
    Lookup {
        own: disk.and_then(|disk| Some(&vm.disks.get(disk)?.table)),
        vm: Some(&vm.table),
        host,
    }
}

/// Asks the rules for a host of it and of its devices.
pub fn check_host(facts: &Facts, extra: Table, rules: &Rules, ignore: &[String]) -> Checked {
    let mut checked = Checked::default();
    let host = facts.table();
    let devices = facts.devices();
    for rule in rules.rules.iter().filter(|rule| !ignore.contains(&rule.id)) {
        let mut asked: Vec<(&str, Lookup<'_>)> = Vec::new();
        match rule.scope {
            Scope::Host => asked.push((
                "",
                Lookup {
                    own: Some(&extra),
                    vm: None,
                    host: Some(&host),
                },
            )),
            Scope::Device => asked.extend(devices.iter().map(|(name, table)| {
                (
                    name.as_str(),
                    Lookup {
                        own: Some(table),
                        vm: None,
                        host: Some(&host),
                    },
                )
            })),
            _ => {}
        }
        for (device, lookup) in asked {
            match evaluate(&rule.when, &lookup) {
                Verdict::Holds => checked.findings.push(Finding {
                    rule: rule.id.clone(),
                    severity: rule.severity,
                    vm: format!("host {}", printable(&facts.name)),
                    disk: printable(device),
                    text: say(&rule.says, device, "", &lookup),
                    file: String::new(),
                    at: None,
                    because: because(&rule.when, &lookup, &[]),
                    measured: Vec::new(),
                    vm_index: None,
                    span: Span::default(),
                }),
                Verdict::Unknown(names) => open(&mut checked.unknown, rule, &names),
                Verdict::Fails => {}
            }
        }
    }
    sort(&mut checked.findings);
    checked
}

/// What could not be known is worth telling only where it would have been a finding.
fn open(
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

fn finding(hit: &Hit<'_>, vm: &Vm, lookup: &Lookup<'_>, sources: &[Source]) -> Finding {
    let rule = hit.rule;
    let disk = hit.disk.and_then(|index| vm.disks.get(index));
    // The value that is wrong is the last that is given, of those that the rule compares; else the disk it is of.
    let given = rule
        .when
        .iter()
        .rev()
        .flatten()
        .filter(|atom| atom.compares())
        .find_map(|atom| match lookup.get(atom.property)?.origin {
            Origin::Given(span)
                if !matches!(
                    atom.property,
                    "disk.device" | "vm.front-end" | "vm.vcpus" | "vm.os"
                ) =>
            {
                Some(span)
            }
            _ => None,
        });
    let span = given.or(disk.map(|disk| disk.span)).unwrap_or(vm.span);
    let source = sources.get(usize::from(span.source));
    Finding {
        rule: rule.id.clone(),
        severity: rule.severity,
        vm: printable(&vm.name),
        disk: disk.map_or(String::new(), |disk| printable(&disk.name)),
        text: say(
            &rule.says,
            disk.map_or("", |disk| &disk.name),
            disk.map_or("", |disk| &disk.file),
            lookup,
        ),
        file: source.map_or(String::new(), |source| printable(&source.name)),
        at: source.map(|source| source.position(span.start)),
        because: because(&rule.when, lookup, sources),
        measured: Vec::new(),
        vm_index: Some(hit.vm),
        span,
    }
}

fn because(clauses: &[Clause], lookup: &Lookup<'_>, sources: &[Source]) -> Vec<Because> {
    let mut because: Vec<Because> = Vec::new();
    for atom in clauses.iter().flatten() {
        let Some(value) = lookup.get(atom.property) else {
            continue;
        };
        let from = match &value.origin {
            Origin::Given(span) => {
                sources
                    .get(usize::from(span.source))
                    .map_or("given".into(), |source| {
                        format!(
                            "{}:{}",
                            printable(&source.name),
                            source.position(span.start)
                        )
                    })
            }
            Origin::Default(whose) => format!("default of {whose}"),
            Origin::Fact(what) => format!("fact: {what}"),
            Origin::Derived(how) => how.to_string(),
        };
        let entry = Because {
            property: atom.property,
            value: printable(&value.data.to_string()),
            from,
        };
        if !because.contains(&entry) {
            because.push(entry);
        }
    }
    because
}

/// The worst first; of equally bad ones those of one rule together.
pub fn sort(findings: &mut [Finding]) {
    findings.sort_by(|a, b| {
        (a.severity, &a.rule, &a.vm, &a.disk).cmp(&(b.severity, &b.rule, &b.vm, &b.disk))
    });
}
