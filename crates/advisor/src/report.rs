//! Reports as text and as JSON.

mod markdown;
mod sarif;

pub use markdown::markdown;
pub use sarif::sarif;

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use crate::check::{Checked, Finding};
use crate::fix::Remedy;
use crate::input::Input;
use crate::measured::Gain;
use crate::rules::{Measurement, Rule, Rules, Scope, Severity, Status};
use crate::text::printable;

/// The number of places that a finding names; the rest is only counted.
const PLACES_MAX: usize = 3;

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Sorted by severity, the worst first.
    pub findings: Vec<Finding>,
    /// The number of VMs checked.
    pub vms: usize,
    /// The number of disks checked.
    pub disks: usize,
    /// The number of findings that comments suppress.
    pub ignored: usize,
    /// Unknown properties, each with the rules that could not be evaluated without it.
    pub unknown: BTreeMap<&'static str, std::collections::BTreeSet<String>>,
    /// Parts of the inputs that were skipped, with their positions.
    pub notes: Vec<String>,
}

impl Report {
    /// Adds the result of checking an input.
    pub fn add(&mut self, input: &Input, checked: Checked) {
        self.vms += input.vms.len();
        self.disks += input.vms.iter().map(|vm| vm.disks.len()).sum::<usize>();
        for note in &input.notes {
            let place = input.sources.get(usize::from(note.span.source));
            let place = place.map_or(String::new(), |source| {
                format!(
                    "{}:{}: ",
                    crate::text::printable(&source.name),
                    source.position(note.span.start)
                )
            });
            self.notes.push(format!("{place}{}", note.text));
        }
        self.absorb(checked);
    }

    /// Adds findings without an input, such as those about the host.
    pub fn absorb(&mut self, mut checked: Checked) {
        self.findings.append(&mut checked.findings);
        self.ignored += checked.ignored;
        for (name, rules) in checked.unknown {
            self.unknown.entry(name).or_default().extend(rules);
        }
        crate::check::sort(&mut self.findings);
    }

    /// Whether all findings are notes.
    pub fn is_clean(&self) -> bool {
        self.findings
            .iter()
            .all(|finding| finding.severity == Severity::Info)
    }

    /// The findings grouped by rule.
    fn groups(&self, notes: bool) -> Vec<Vec<&Finding>> {
        let mut groups: Vec<Vec<&Finding>> = Vec::new();
        let shown = self
            .findings
            .iter()
            .filter(|finding| notes || finding.severity != Severity::Info);
        for finding in shown {
            match groups.last_mut() {
                Some(group) if group[0].rule == finding.rule => group.push(finding),
                _ => groups.push(vec![finding]),
            }
        }
        groups
    }
}

/// The gain of a change: measured on this host, or expected.
pub fn worth(finding: &Finding, rule: &Rule) -> String {
    match finding.measured.as_slice() {
        [] => match &rule.gain {
            Some(gain) => format!("expected {gain}{}", grades(rule)),
            None => String::new(),
        },
        [one] => format!("measured here {one} ({})", of_what(one)),
        [one, rest @ ..] => format!(
            "measured here {one} ({}), and {} more",
            of_what(one),
            rest.len()
        ),
    }
}

/// The load, and the figure if it is not the usual one.
fn of_what(gain: &Gain) -> String {
    let figure = match gain.metric.as_str() {
        "cpu" => "; CPU time per request",
        "latency" => "; latency",
        _ => "",
    };
    let emulated = match gain.accelerator.as_str() {
        "tcg" => "; emulated guest",
        _ => "",
    };
    format!("{}{figure}{emulated}", gain.load)
}

/// The best grade of a rule's evidence, in brackets.
fn grades(rule: &Rule) -> String {
    let mut grades: Vec<String> = rule
        .evidence
        .iter()
        .map(|evidence| format!("{:?}", evidence.grade))
        .collect();
    grades.sort_by_key(|grade| "PCBO".find(grade.as_str()));
    grades.dedup();
    match grades.first() {
        Some(best) => format!(" [{best}]"),
        None => String::new(),
    }
}

/// The report as text.
pub fn text(report: &Report, rules: &Rules, notes: bool) -> String {
    let mut text = String::new();
    for group in report.groups(notes) {
        let (Some(first), Some(rule)) = (
            group.first(),
            group.first().and_then(|first| rules.get(&first.rule)),
        ) else {
            continue;
        };
        let severity = severity_word(first.severity);
        let _ = write!(text, "{severity:<7} {:<24} ", rule.id);
        let places: Vec<String> = group
            .iter()
            .take(PLACES_MAX)
            .map(|finding| finding.place())
            .collect();
        text.push_str(&places.join(", "));
        if group.len() > PLACES_MAX {
            let _ = write!(text, ", and {} more", group.len() - PLACES_MAX);
        }
        if let Some(at) = first.at {
            let _ = write!(text, "  {}:{at}", first.file);
        }
        text.push('\n');
        // Findings of one rule may say different things, such as the names of two buses.
        let mut said: Vec<&str> = Vec::new();
        for finding in &group {
            if said.len() < PLACES_MAX && !said.contains(&finding.text.as_str()) {
                said.push(&finding.text);
                let _ = writeln!(text, "        {}", finding.text);
            }
        }
        let worth = worth(first, rule);
        let fix = remedy(group.iter().map(|finding| &finding.remedy));
        let line: Vec<&str> = [worth.as_str(), &fix]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect();
        if !line.is_empty() {
            let _ = writeln!(text, "        {}", line.join("; "));
        }
    }
    text.push_str(&summary(report, notes));
    text
}

/// What `--fix` does about findings of a rule, in a few words. Where it differs, the least is said.
fn remedy<'a>(all: impl Iterator<Item = &'a Remedy>) -> String {
    let rank = |remedy: &&Remedy| match remedy {
        Remedy::None => 0,
        Remedy::Refused(_) => 1,
        Remedy::Named(_) => 2,
        Remedy::Fix => 3,
    };
    match all.min_by_key(rank) {
        None | Some(Remedy::None) => String::new(),
        Some(Remedy::Refused(reason)) => format!("not fixable: {}", printable(reason)),
        Some(Remedy::Named(reason)) => {
            // The rest is in --fix's messages and in --json.
            let short = reason.split(':').next().unwrap_or(reason);
            format!("{}: --fix-rule", printable(short))
        }
        Some(Remedy::Fix) => "fixable: --fix".into(),
    }
}

pub fn severity_word(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "ERROR",
        Severity::High => "HIGH",
        Severity::Medium => "MEDIUM",
        Severity::Low => "LOW",
        Severity::Info => "note",
    }
}

fn summary(report: &Report, notes: bool) -> String {
    let count = |severity| {
        report
            .findings
            .iter()
            .filter(|finding| finding.severity == severity)
            .count()
    };
    let bad = [
        Severity::Error,
        Severity::High,
        Severity::Medium,
        Severity::Low,
    ];
    let counts: Vec<String> = bad
        .into_iter()
        .filter(|severity| count(*severity) > 0)
        .map(|severity| {
            format!(
                "{} {}",
                count(severity),
                severity_word(severity).to_lowercase()
            )
        })
        .collect();
    let mut text = format!(
        "{} in {}: ",
        plural(report.disks, "disk"),
        plural(report.vms, "VM")
    );
    text.push_str(&match counts.as_slice() {
        [] if report.findings.iter().any(|it| it.rule == "throttled") => {
            "nothing that costs performance, except I/O limits".into()
        }
        [] if report.disks == 0 && !report.notes.is_empty() => {
            "nothing was checked that could cost performance; what was skipped may have disks"
                .into()
        }
        [] => "nothing that costs performance".into(),
        counts => counts.join(", "),
    });
    let infos = count(Severity::Info);
    if infos > 0 && !notes {
        let _ = write!(text, "; {} (--notes)", plural(infos, "note"));
    }
    if report.ignored > 0 {
        let _ = write!(text, "; {} ignored", report.ignored);
    }
    text.push('\n');
    if !report.unknown.is_empty() {
        let rules: std::collections::BTreeSet<_> = report.unknown.values().flatten().collect();
        let names: Vec<&str> = report.unknown.keys().copied().collect();
        let _ = writeln!(
            text,
            "{} not evaluated; unknown: {} (--host on this host, --facts FILE for another)",
            plural(rules.len(), "rule"),
            names.join(", ")
        );
    }
    for note in report.notes.iter().take(20) {
        let _ = writeln!(text, "skipped: {note}");
    }
    if report.notes.len() > 20 {
        let _ = writeln!(text, "skipped: {} more", report.notes.len() - 20);
    }
    text
}

fn plural(count: usize, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    }
}

/// The report as JSON.
pub fn json(report: &Report, rules: &Rules) -> Value {
    let findings: Vec<Value> = report
        .findings
        .iter()
        .map(|finding| {
            let mut value = json!(finding);
            if let Some(rule) = rules.get(&finding.rule) {
                value["title"] = json!(rule.title);
                value["advice"] = json!(rule.advice);
                value["expected"] = json!(rule.gain);
                value["fixable"] = json!(finding.remedy == Remedy::Fix);
                if let Remedy::Named(reason) | Remedy::Refused(reason) = &finding.remedy {
                    value["not-fixed-because"] = json!(printable(reason));
                }
                value["activate"] = json!(rule.activate);
                value["status"] = json!(rule.status);
            }
            value
        })
        .collect();
    json!({
        "clean": report.is_clean(),
        "machines": report.vms,
        "disks": report.disks,
        "ignored": report.ignored,
        "findings": findings,
        "unknown": report.unknown,
        "notes": report.notes,
    })
}

/// A rule with its conditions, advice and evidence.
pub fn explain(rule: &Rule, rules: &Rules) -> String {
    let mut text = format!(
        "{} ({}",
        rule.id,
        severity_word(rule.severity).to_lowercase()
    );
    match rule.status {
        Status::Current => {}
        Status::Disputed => text.push_str(", disputed"),
        Status::Obsolete => text.push_str(", obsolete"),
    }
    let _ = writeln!(text, ")\n  {}\n", rule.title);
    let _ = writeln!(
        text,
        "Applies if  {}",
        rule.conditions.join("\n            ")
    );
    let _ = writeln!(text, "Advice      {}", rule.advice);
    if let Some(depends) = &rule.depends {
        let _ = writeln!(text, "Depends     {depends}");
    }
    if let Some(gain) = &rule.gain {
        let _ = writeln!(text, "Expected    {gain}");
    }
    if !rule.cost.is_empty() {
        let _ = writeln!(text, "Costs       {}", rule.cost);
    }
    let activate = match rule.activate {
        crate::rules::Activation::Live => "immediately, while the VM runs",
        crate::rules::Activation::Reboot => "after a reboot of the guest",
        crate::rules::Activation::StopStart => "after a stop and start of the VM",
        crate::rules::Activation::HostReboot => "after a reboot of the host",
        crate::rules::Activation::None => "nothing to change",
    };
    let _ = writeln!(text, "Effective   {activate}");
    let fix = match (rule.fix.is_empty(), rule.lowers_durability) {
        (true, _) => "manual",
        (false, true) => "--fix with --fix-rule, because it lowers durability",
        (false, false) => "--fix",
    };
    let _ = writeln!(text, "Fix         {fix}");
    for evidence in &rule.evidence {
        let source = rules.sources.get(&evidence.source);
        let source = source.map_or(String::new(), |source| {
            format!("{}, {}", source.title, source.year)
        });
        let _ = writeln!(
            text,
            "Evidence    {} [{:?}: {}]\n            {source}",
            evidence.figure,
            evidence.grade,
            evidence.grade.about()
        );
    }
    let _ = match &rule.measurement {
        Measurement::By(contrast) => {
            let device = (rule.scope == Scope::Device).then_some("NAME");
            let command = contrast.command(rule.storage(), device);
            writeln!(text, "Measure it  {command}\n            {contrast}")
        }
        Measurement::None(why) => writeln!(text, "Unmeasured  {why}"),
    };
    text
}

/// All rules as JSON.
pub fn list_json(rules: &Rules) -> Value {
    let each = |rule: &Rule| {
        json!({
            "id": rule.id,
            "title": rule.title,
            "severity": rule.severity,
            "status": rule.status,
            "scope": rule.scope,
            "when": rule.conditions,
            "advice": rule.advice,
            "expected": rule.gain,
            "has-fix": !rule.fix.is_empty(),
            "lowers-durability": rule.lowers_durability,
            "activate": rule.activate,
            "evidence": rule.evidence,
        })
    };
    rules.rules.iter().map(each).collect()
}

/// A list of all rules, one per line.
pub fn list(rules: &Rules) -> String {
    let mut text = String::new();
    for rule in &rules.rules {
        let status = match rule.status {
            Status::Current => "",
            Status::Disputed => "disputed",
            Status::Obsolete => "obsolete",
        };
        let severity = severity_word(rule.severity);
        let _ = writeln!(
            text,
            "{severity:<7} {status:<9} {:<24} {}",
            rule.id, rule.title
        );
    }
    text
}
