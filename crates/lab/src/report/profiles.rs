//! Where the time went, and what limits each configuration, if the run was profiled.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use harness::svg::escape;
use serde_json::{Value, json};

use crate::analysis::Analysis;
use crate::profile::Profile;
use crate::profile::report::bars;
use crate::profile::verdict::Stage;

/// The maximum number of charts. The JSON has the rest.
const CHARTS_MAX: usize = 24;

/// The profiles of a configuration under a load, in the order of the runs.
fn profiles<'a>(analysis: &Analysis<'a>, arm: usize, load: usize) -> Vec<&'a Profile> {
    let samples = analysis.samples(arm, load);
    samples
        .filter_map(|(_, sample)| sample.profile.as_deref())
        .collect()
}

/// The stage that was named most often, how often, and the last profile that names it.
fn usual<'a>(profiles: &[&'a Profile]) -> Option<(Stage, usize, &'a Profile)> {
    let mut counts: BTreeMap<Stage, usize> = BTreeMap::new();
    for profile in profiles {
        *counts.entry(profile.verdict.stage).or_default() += 1;
    }
    let (stage, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    let last = profiles.iter().rfind(|its| its.verdict.stage == stage)?;
    Some((stage, count, last))
}

fn cells<'a>(analysis: &Analysis<'a>) -> impl Iterator<Item = (String, Vec<&'a Profile>)> {
    let plan = analysis.plan();
    let arms = 0..plan.cases.len();
    let cells = arms.flat_map(move |arm| (0..plan.workloads.len()).map(move |load| (arm, load)));
    cells.filter_map(move |(arm, load)| {
        let its = profiles(analysis, arm, load);
        let name = format!("{}, {}", analysis.name(arm), plan.workloads[load].name);
        (!its.is_empty()).then_some((name, its))
    })
}

/// A line for each configuration and load; empty if nothing was profiled.
pub fn text(analysis: &Analysis) -> String {
    let mut text = String::new();
    for (name, its) in cells(analysis) {
        if let Some((_, count, last)) = usual(&its) {
            let _ = writeln!(
                text,
                "{name}: {}{}",
                last.verdict.sentence,
                runs(count, its.len())
            );
        }
    }
    text
}

/// Charts for the page; empty if nothing was profiled.
pub fn html(analysis: &Analysis) -> String {
    let mut page = String::new();
    for (name, its) in cells(analysis).take(CHARTS_MAX) {
        let Some((stage, count, last)) = usual(&its) else {
            continue;
        };
        let _ = writeln!(
            page,
            "<figure>{}<figcaption><b>{}</b>{}: {}</figcaption></figure>",
            bars(&name, last),
            stage.word(),
            runs(count, its.len()),
            escape(&last.verdict.sentence)
        );
    }
    if page.is_empty() {
        return page;
    }
    format!(
        "<h2>Where the time goes</h2>\n<p>The threads from the guest to the storage, and the stage that limits. Each bar is \
         the time of all threads of one role: on CPU, runnable but waiting for a CPU, and asleep.</p>\n<div class=\"charts\">\n\
         {page}</div>\n"
    )
}

/// The stages that were named, with the number of runs, and the last profile that names the most frequent one.
pub fn json(analysis: &Analysis, arm: usize, load: usize) -> Value {
    let its = profiles(analysis, arm, load);
    let Some((stage, _, last)) = usual(&its) else {
        return Value::Null;
    };
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for profile in &its {
        *counts.entry(profile.verdict.stage.word()).or_default() += 1;
    }
    json!({ "stage": stage.word(), "runs": counts, "profile": last })
}

fn runs(count: usize, of: usize) -> String {
    match of {
        1 => String::new(),
        of => format!(" ({count} of {of} runs)"),
    }
}
