//! What a measurement found, as text and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::lab::analysis::{Analysis, Question};
use ::lab::guest::Accel;
use ::lab::plan::units::{size_text, time_text};
use ::lab::report::HTML;
use advisor::check::Finding;
use advisor::measured::Gain;
use serde_json::{Value, json};

use super::derive::NotMeasured;
use super::target::{Comparison, Load, NOW, RINGDISK, Target};

/// All measurements of a run.
pub struct Outcome {
    measured: Vec<Measured>,
    not_measured: Vec<NotMeasured>,
    /// What the figures are subject to.
    caveat: Option<&'static str>,
}

/// The measurement of a plan.
struct Measured {
    target: Target,
    /// The gains of each comparison, in the order of the target's.
    gains: Vec<Vec<Gain>>,
    /// The folder with the lab's report; none if the plan did not run.
    folder: Option<PathBuf>,
    took: Duration,
    /// Why the plan did not run, or some of its configurations did not.
    problems: Vec<String>,
    /// Whether the plan ran to its end.
    is_complete: bool,
}

/// What a report says of a run that the user ended.
const INTERRUPTED: &str = "interrupted; the report is of what was measured until then";

impl Outcome {
    pub fn new(not_measured: Vec<NotMeasured>, accel: Accel, load: Load) -> Self {
        Self {
            measured: Vec::new(),
            not_measured,
            caveat: match (load, accel) {
                (Load::Servers, _) => Some("without a guest"),
                (Load::Guests, Accel::Tcg) => Some("under emulation, not stored"),
                (Load::Guests, Accel::Kvm) => None,
            },
        }
    }

    /// Adds what the lab measured; if it was interrupted, until then.
    pub fn add(
        &mut self,
        target: Target,
        folder: &Path,
        analysis: &Analysis,
        took: Duration,
        is_complete: bool,
    ) {
        let gains = target.comparisons().map(|comparison| {
            let mut gains = gains(analysis, &comparison, self.caveat);
            // Those loads first that the rule is about.
            gains.sort_by_key(|(load, _)| !comparison.loads.contains(load));
            gains.into_iter().map(|(_, gain)| gain).collect()
        });
        let gains: Vec<Vec<Gain>> = gains.collect();
        let missing = target
            .comparisons()
            .zip(&gains)
            .filter(|(_, gains)| gains.is_empty());
        let problems = missing.map(|(comparison, _)| {
            let why = why_missing(analysis, comparison.to, is_complete);
            format!("{}: {why}", comparison.name)
        });
        let problems = problems.collect();
        self.measured.push(Measured {
            target,
            gains,
            folder: Some(folder.to_owned()),
            took,
            problems,
            is_complete,
        });
    }

    /// Adds a plan that did not run.
    pub fn skip(&mut self, target: Target, why: String) {
        let gains = vec![Vec::new(); target.comparisons().count()];
        self.measured.push(Measured {
            target,
            gains,
            folder: None,
            took: Duration::ZERO,
            problems: vec![why],
            is_complete: false,
        });
    }

    /// Replaces older results of the findings by those of this run.
    pub fn add_to(&self, findings: &mut [Finding]) {
        for measured in &self.measured {
            for (comparison, gains) in measured.target.comparisons().zip(&measured.gains) {
                for finding in comparison.findings {
                    if let Some(finding) = findings.get_mut(*finding)
                        && !gains.is_empty()
                    {
                        finding.measured = gains.clone();
                    }
                }
            }
        }
    }

    /// The plans that did not run, or not to their end.
    pub fn failure(&self) -> Option<String> {
        let failed = self
            .measured
            .iter()
            .filter(|measured| !measured.is_complete);
        let lines: Vec<String> = failed
            .map(|measured| {
                let why = match measured.folder {
                    Some(_) => INTERRUPTED.to_owned(),
                    None => measured.problems.join("; "),
                };
                format!("{}: {why}", measured.target.disks.join(", "))
            })
            .collect();
        (!lines.is_empty()).then(|| lines.join("\nringdisk: "))
    }

    /// What follows the findings in the report.
    pub fn text(&self, findings: &[Finding]) -> String {
        let mut text = String::new();
        for measured in self
            .measured
            .iter()
            .filter(|measured| measured.folder.is_some())
        {
            measured.write(&mut text, self.caveat);
        }
        let lines = not_measured(&self.not_measured, findings);
        if !lines.is_empty() {
            text += "\nnot measured:\n";
        }
        for line in lines {
            let _ = writeln!(text, "  {line}");
        }
        text
    }

    pub fn json(&self, findings: &[Finding]) -> Value {
        let disks: Vec<Value> = self.measured.iter().map(Measured::json).collect();
        let not_measured: Vec<Value> = self
            .not_measured
            .iter()
            .filter_map(|one| {
                let finding = findings.get(one.finding)?;
                Some(json!({ "rule": finding.rule, "vm": finding.vm, "disk": finding.disk, "why": one.why }))
            })
            .collect();
        json!({ "caveat": self.caveat, "disks": disks, "not-measured": not_measured })
    }
}

impl Measured {
    fn write(&self, text: &mut String, caveat: Option<&str>) {
        let Self { target, .. } = self;
        let caveat = caveat.map_or_else(String::new, |caveat| format!(", {caveat}"));
        let _ = writeln!(
            text,
            "\n{}: measured in {} on {} ({}){caveat}",
            target.disks.join(", "),
            time_text(self.took),
            target.scratch.text(),
            size_text(target.scratch.size),
        );
        let _ = writeln!(text, "  now: {}", target.now_text());
        for note in target.notes() {
            let _ = writeln!(text, "  note: {note}");
        }
        if !self.is_complete {
            let _ = writeln!(text, "  {INTERRUPTED}");
        }
        for (comparison, gains) in target.comparisons().zip(&self.gains) {
            let name = match (comparison.name, comparison.change) {
                (RINGDISK, _) => "with ringdisk".to_owned(),
                (name, Some(change)) => format!("{name} ({change}{})", since(comparison.from)),
                (name, None) => name.to_owned(),
            };
            for gain in gains {
                let _ = writeln!(text, "  {name}: {gain} {}, {}", gain.verdict, gain.load);
            }
        }
        for problem in self.problems.iter().chain(&target.left_out) {
            let _ = writeln!(text, "  not measured: {problem}");
        }
        if let Some(folder) = &self.folder {
            let _ = writeln!(text, "  report: {}", folder.join(HTML).display());
        }
    }

    fn json(&self) -> Value {
        let Self { target, .. } = self;
        let cases: Vec<Value> = target
            .comparisons()
            .zip(&self.gains)
            .map(|(comparison, gains)| {
                let change = comparison.change.map(ToString::to_string);
                json!({ "name": comparison.name, "change": change, "from": comparison.from, "gains": gains })
            })
            .collect();
        let problems: Vec<&String> = self.problems.iter().chain(&target.left_out).collect();
        json!({
            "disks": target.disks, "scratch": target.scratch.text(), "bytes": target.scratch.size,
            "now": target.now_text(), "notes": target.notes().collect::<Vec<_>>(), "comparisons": cases,
            "problems": problems, "complete": self.is_complete, "seconds": self.took.as_secs_f64(), "result": self.folder,
        })
    }
}

/// What a comparison starts from, unless it is the disk's own configuration.
fn since(from: &str) -> String {
    match from {
        NOW => String::new(),
        from => format!(", from '{from}'"),
    }
}

/// Why a configuration has no figures.
fn why_missing(analysis: &Analysis, case: &str, is_complete: bool) -> String {
    let journal = analysis.journal;
    if let Some(why) = journal.header.left_out.get(case) {
        return why.clone();
    }
    let mut of_case = journal.cells.iter().filter(|cell| cell.case == case);
    let failed = of_case.find_map(|cell| cell.error.clone());
    failed.unwrap_or_else(|| {
        let why = if is_complete {
            "too few samples; use a longer --budget"
        } else {
            "interrupted"
        };
        why.to_owned()
    })
}

/// The gains of a comparison, with the names of the loads.
fn gains(
    analysis: &Analysis,
    comparison: &Comparison,
    caveat: Option<&str>,
) -> Vec<(String, Gain)> {
    let plan = analysis.plan();
    let is = |arm: usize, name: &str| plan.cases.get(arm).is_some_and(|case| case.name == name);
    let questions = analysis.questions().into_iter();
    let of_case = questions
        .filter(|question| is(question.from, comparison.from) && is(question.to, comparison.to));
    let accelerator = analysis.journal.header.facts.get("accelerator");
    let gain = |question: Question| {
        let load = &plan.workloads[question.workload];
        let (low, high) = question.interval?;
        let caveat = caveat.map_or_else(String::new, |caveat| format!("; {caveat}"));
        let accelerator = accelerator.map_or("none", String::as_str);
        let Question {
            from, to, workload, ..
        } = question;
        let context = ::lab::measured::Comparison::of(plan, from, to, workload, accelerator);
        let with = context.map_or_else(BTreeMap::new, |context| context.with);
        let gain = Gain {
            recipe: plan.name.clone(),
            load: format!("{}{caveat}", load.name),
            metric: if load.rate.is_some() {
                "latency"
            } else {
                "iops"
            }
            .into(),
            percent: question.gain? * 100.0,
            interval: [low * 100.0, high * 100.0],
            verdict: question.verdict.to_string(),
            accelerator: accelerator.to_owned(),
            with: with
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect(),
        };
        Some((load.name.clone(), gain))
    };
    of_case.filter_map(gain).collect()
}

/// A line for each finding that is not measured.
pub fn not_measured(all: &[NotMeasured], findings: &[Finding]) -> Vec<String> {
    let line = |one: &NotMeasured| {
        let finding = findings.get(one.finding)?;
        Some(format!(
            "{} ({}): {}",
            finding.rule,
            finding.place(),
            one.why
        ))
    };
    all.iter().filter_map(line).collect()
}
