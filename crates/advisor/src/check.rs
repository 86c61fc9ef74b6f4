//! Evaluates rules for VMs, disks and hosts. A rule that applies becomes a finding.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::facts::Facts;
use crate::fix::{Remedy, remedies};
use crate::hits::{Hit, Hits, hits, lookup, place, record_unknown};
use crate::input::Input;
use crate::measured::{Gain, Measured, Subject};
use crate::model::{Origin, Table, Vm};
use crate::rules::{Clause, Lookup, Rule, Rules, Scope, Severity, Verdict, evaluate, fill_in};
use crate::text::{Position, Source, Span, printable};

/// A rule that applies to a VM, a disk or a host.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The rule's id.
    pub rule: String,
    pub severity: Severity,
    /// The VM's name, or `host NAME`.
    pub vm: String,
    /// Empty if the finding concerns the whole VM or host.
    pub disk: String,
    /// The rule's text with the values filled in.
    pub text: String,
    pub file: String,
    /// The position in the file; none for a finding about the host.
    #[serde(serialize_with = "position")]
    pub at: Option<Position>,
    /// The values that the rule compares.
    pub because: Vec<Because>,
    /// Results of `ringdisk lab` on this host for the same change.
    pub measured: Vec<Gain>,
    /// Whether `--fix` fixes it.
    #[serde(skip)]
    pub remedy: Remedy,
    /// What measured results must be about.
    #[serde(skip)]
    pub subject: Subject,
    /// Index into the input's VMs; none for a finding about the host.
    #[serde(skip)]
    pub vm_index: Option<usize>,
    /// The bytes at `at`.
    #[serde(skip)]
    pub span: Span,
}

fn position<S: serde::Serializer>(at: &Option<Position>, to: S) -> Result<S::Ok, S::Error> {
    at.map(|at| (at.line, at.column)).serialize(to)
}

impl Finding {
    /// The VM and the disk, for messages.
    pub fn place(&self) -> String {
        place(&self.vm, &self.disk)
    }
}

/// A value that a rule compares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Because {
    pub property: &'static str,
    pub value: String,
    /// Its origin: a position in the input, or the program whose default it is.
    pub from: String,
}

/// The result of checking an input.
#[derive(Clone, Debug, Default)]
pub struct Checked {
    /// Sorted by severity, the worst first.
    pub findings: Vec<Finding>,
    /// The number of findings that comments in the input suppress.
    pub ignored: usize,
    /// Unknown properties, each with the rules that could not be evaluated without it.
    pub unknown: BTreeMap<&'static str, BTreeSet<String>>,
}

/// Adds the facts of the host to the input, and evaluates all rules.
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
    let remedies = remedies(input, &hits, facts);
    let findings = hits.iter().zip(remedies).filter_map(|(hit, remedy)| {
        let vm = input.vms.get(hit.vm)?;
        let lookup = lookup(vm, hit.disk, host.as_ref());
        let finding = finding(hit, vm, &lookup, &input.sources);
        Some(Finding { remedy, ..finding })
    });
    let mut findings: Vec<Finding> = findings.collect();
    sort(&mut findings);
    Checked {
        findings,
        ignored,
        unknown,
    }
}

/// Evaluates the rules about a host and about its devices.
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
                    text: fill_in(&rule.says, device, "", &lookup),
                    file: String::new(),
                    at: None,
                    because: because(&rule.when, &lookup, &[]),
                    measured: Vec::new(),
                    remedy: Remedy::None,
                    subject: match rule.scope {
                        Scope::Device => Subject::of_device(device, lookup.own.unwrap_or(&extra)),
                        _ => Subject::default(),
                    },
                    vm_index: None,
                    span: Span::default(),
                }),
                Verdict::Unknown(names) => record_unknown(&mut checked.unknown, rule, &names),
                Verdict::Fails => {}
            }
        }
    }
    sort(&mut checked.findings);
    checked
}

fn finding(hit: &Hit<'_>, vm: &Vm, lookup: &Lookup<'_>, sources: &[Source]) -> Finding {
    let rule = hit.rule;
    let disk = hit.disk.and_then(|index| vm.disks.get(index));
    // Point at the last value in the input that the rule compares, or at the disk if there is none.
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
        text: fill_in(
            &rule.says,
            disk.map_or("", |disk| &disk.name),
            disk.map_or("", |disk| &disk.file),
            lookup,
        ),
        file: source.map_or(String::new(), |source| printable(&source.name)),
        at: source.map(|source| source.position(span.start)),
        because: because(&rule.when, lookup, sources),
        measured: Vec::new(),
        remedy: Remedy::None,
        subject: disk.map_or_else(|| Subject::of_vm(vm), Subject::of),
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
            Origin::Default(program) => format!("default of {program}"),
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

/// Adds to each finding the measured results for its rule.
pub fn add_measured(findings: &mut [Finding], measured: &Measured, rules: &Rules) {
    for finding in findings {
        let rule = rules.get(&finding.rule);
        if let Some(contrast) = rule.and_then(Rule::contrast) {
            finding.measured = measured.join(contrast, &finding.subject);
        }
    }
}

/// Sorts by severity, then by rule.
pub fn sort(findings: &mut [Finding]) {
    findings.sort_by(|a, b| {
        (a.severity, &a.rule, &a.vm, &a.disk).cmp(&(b.severity, &b.rule, &b.vm, &b.disk))
    });
}
