//! Reports of a result: an HTML page, tables for programs, and a summary for the terminal.

mod advice;
mod charts;
mod grid;
mod html;
mod profiles;
mod ratios;
mod tables;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::analysis::{Analysis, Replication};
use crate::measured;
use crate::plan::Claim;

/// The page's name in a result's folder.
pub const HTML: &str = "report.html";

/// Writes the page, the tables, and the measurements for `ringdisk check`. Returns the path at which `ringdisk check` finds
/// these by itself, unless there are none.
///
/// # Errors
/// A file cannot be written.
pub fn write(analysis: &Analysis, folder: &Path) -> Result<Option<PathBuf>> {
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    for (name, text) in files(analysis)? {
        // An earlier report stays if the disk is full.
        let (path, new) = (folder.join(name), folder.join(format!("{name}.new")));
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &path))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    measured::write(analysis, folder)
}

/// The page and the tables, with their names.
///
/// # Errors
/// The result cannot be written as JSON.
pub fn files(analysis: &Analysis) -> Result<[(&'static str, String); 3]> {
    let pretty = |value| serde_json::to_string_pretty(&value).map(|text| text + "\n");
    Ok([
        (HTML, html::page(analysis)),
        ("cells.csv", tables::cells_csv(analysis)),
        ("result.json", pretty(tables::result_json(analysis))?),
    ])
}

/// The published and the measured size of a claim.
fn sizes(claim: &Claim, found: &Replication) -> String {
    let has_number = claim.size.is_some() || claim.won.is_some();
    let published = has_number.then(|| format!("published {}", claim.published()));
    let measured = measured_size(found).map(|it| format!("measured {it}"));
    let both: Vec<String> = published.into_iter().chain(measured).collect();
    match both.is_empty() {
        true => String::new(),
        false => format!(": {}", both.join(", ")),
    }
}

/// The measured size of a claim's effect with its interval.
pub fn measured_size(found: &Replication) -> Option<String> {
    let measured = charts::percent(found.measured?);
    Some(match found.interval {
        Some((low, high)) => {
            let (low, high) = (charts::percent(low), charts::percent(high));
            format!("{measured} [{low}, {high}]")
        }
        None => measured,
    })
}

/// The summary for a terminal: all comparisons, and the recommendation.
pub fn text(analysis: &Analysis) -> String {
    let plan = analysis.plan();
    let mut text = String::from("\n");
    for question in analysis.questions() {
        let interval = question.interval.map_or_else(String::new, |(low, high)| {
            format!(" [{}, {}]", charts::percent(low), charts::percent(high))
        });
        let gain = question
            .gain
            .map_or_else(|| "not measured".into(), charts::percent);
        let confounded = analysis
            .confounded(question.from, question.to)
            .map_or_else(String::new, |settings| {
                format!("; confounded: {}", settings.join(", "))
            });
        let _ = writeln!(
            text,
            "{:<11} {gain}{interval}: {} → {}, {}{confounded}",
            question.verdict,
            analysis.name(question.from),
            analysis.name(question.to),
            plan.workloads[question.workload].name
        );
    }
    for uncompared in plan.uncompared() {
        let _ = writeln!(text, "{uncompared}");
    }
    for (claim, found) in plan.claims.iter().zip(analysis.replications()) {
        let _ = writeln!(
            text,
            "published ({}): {}: {}{} ({})",
            claim.source,
            claim.figure,
            found.outcome,
            sizes(claim, &found),
            found.why
        );
    }
    let failed = analysis
        .journal
        .cells
        .iter()
        .filter(|cell| cell.error.is_some())
        .count();
    let flagged = analysis
        .journal
        .cells
        .iter()
        .filter(|cell| !cell.flags.is_empty())
        .count();
    if failed + flagged > 0 {
        let _ = writeln!(
            text,
            "{failed} cells failed and {flagged} are flagged, of {}",
            analysis.journal.cells.len()
        );
    }
    if ratios::are_shown(plan) {
        text += &ratios::text(analysis);
    }
    let limits = profiles::text(analysis);
    if !limits.is_empty() {
        let _ = write!(text, "\nWhere the time goes:\n{limits}");
    }
    let advice = advice::advice(analysis);
    let _ = write!(text, "\n{}", advice.sentence);
    for cost in &advice.costs {
        let _ = write!(
            text,
            "
{cost}"
        );
    }
    text
}
