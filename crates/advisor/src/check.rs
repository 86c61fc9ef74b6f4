//! Rules are asked of machines, disks and hosts; what holds is a finding.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::facts::Facts;
use crate::input::Input;
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
    #[serde(skip)]
    pub(crate) disk_index: Option<usize>,
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
        match (self.vm.as_str(), self.disk.as_str()) {
            (vm, "") => vm.to_owned(),
            ("", disk) => disk.to_owned(),
            (vm, disk) => format!("{vm} {disk}"),
        }
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

/// Asks all rules of an input, after adding to it what is known of the host.
pub fn check(
    input: &mut Input,
    rules: &Rules,
    facts: Option<&Facts>,
    ignore: &[String],
) -> Checked {
    let mut checked = Checked::default();
    if let Some(facts) = facts {
        input.vms.iter_mut().for_each(|vm| facts.join(vm));
    }
    let host = facts.map(Facts::table);
    let ignored: Vec<&str> = input
        .ignores
        .iter()
        .map(|ignore| ignore.rule.as_str())
        .collect();
    for (vm_index, vm) in input.vms.iter().enumerate() {
        for rule in &rules.rules {
            if ignore.contains(&rule.id) {
                continue;
            }
            let mut found = Vec::new();
            match rule.scope {
                Scope::Vm => found.push((
                    None,
                    Lookup {
                        own: None,
                        vm: Some(&vm.table),
                        host: host.as_ref(),
                    },
                )),
                Scope::Disk => found.extend(vm.disks.iter().enumerate().map(|(index, disk)| {
                    (
                        Some(index),
                        Lookup {
                            own: Some(&disk.table),
                            vm: Some(&vm.table),
                            host: host.as_ref(),
                        },
                    )
                })),
                Scope::Host | Scope::Device => {}
            }
            for (disk_index, lookup) in found {
                match evaluate(&rule.when, &lookup) {
                    Verdict::Holds if ignored.contains(&rule.id.as_str()) => checked.ignored += 1,
                    Verdict::Holds => checked.findings.push(finding(
                        rule,
                        vm,
                        vm_index,
                        disk_index,
                        &lookup,
                        &input.sources,
                    )),
                    Verdict::Unknown(names) => open(&mut checked, rule, &names),
                    Verdict::Fails => {}
                }
            }
        }
    }
    sort(&mut checked.findings);
    checked
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
                    disk_index: None,
                    span: Span::default(),
                }),
                Verdict::Unknown(names) => open(&mut checked, rule, &names),
                Verdict::Fails => {}
            }
        }
    }
    sort(&mut checked.findings);
    checked
}

/// What could not be known is worth telling only where it would have been a finding.
fn open(checked: &mut Checked, rule: &Rule, names: &[&'static str]) {
    if rule.severity == Severity::Info {
        return;
    }
    for name in names {
        checked
            .unknown
            .entry(name)
            .or_default()
            .insert(rule.id.clone());
    }
}

fn finding(
    rule: &Rule,
    vm: &Vm,
    vm_index: usize,
    disk_index: Option<usize>,
    lookup: &Lookup<'_>,
    sources: &[Source],
) -> Finding {
    let disk = disk_index.and_then(|index| vm.disks.get(index));
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
        vm_index: Some(vm_index),
        disk_index,
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
