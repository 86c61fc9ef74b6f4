//! `docs/studies.md`: every table and figure of the studies, and what their runs found.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::findings::{Results, findings};
use super::{Part, Run, STUDIES, Storage, Study, bundle};
use crate::analysis::{Analysis, ClaimResult};
use crate::journal::Journal;
use crate::plan::units::{size_text, time_text};
use crate::plan::{Plan, settings, workload};

/// The start of the document.
const HEAD: &str = "# The studies, reproduced

ringdisk starts from five published studies of VM storage. Here is each of their tables and figures, the command that
measures it on your storage, and what this repository's results in [results](results) say about it.

This file is generated: `ringdisk lab study --document docs/results > docs/studies.md`.

    ringdisk lab study 004 --pool bench                                    on images that it creates in a pool of Ceph
    ringdisk lab study 003 --backing \"/dev/vg0/lab-{guest}-{volume}\" --create   on logical volumes
    ringdisk lab study 001 --budget 2h --dry-run                           on local files; what would run

A verdict compares the measured interval with the published size as [lab.md](lab.md#published-claims) describes. *Cannot
run here* names what the host of these results lacks; the command is ready for one that has it. Rows without a claim
are figures without a comparison: the report of the run shows them. Results of shorter or smaller runs than those of the
command say how they differ.
";

/// The document, from the bundles in a folder.
///
/// # Errors
/// A bundle is invalid.
pub fn document(results: &Path) -> Result<String> {
    let mut text = HEAD.to_owned();
    for (name, _) in STUDIES {
        let study = Study::named(name).map_err(anyhow::Error::msg)?;
        let results = bundle::read(results, name, &study)?;
        section(&mut text, name, &study, &results);
    }
    Ok(text)
}

fn section(text: &mut String, name: &str, study: &Study, results: &Results) {
    let Study {
        title,
        author,
        year,
        about,
        ..
    } = study;
    let _ = writeln!(text, "\n## {name}: {title}\n\n{author}, {year}. {about}\n");
    text.push_str("| table or figure | what it shows | command |\n|---|---|---|\n");
    for part in &study.parts {
        let command = match (study.run_of(part), &part.needs) {
            (Some(run), _) => format!("`{}`", run.command(name, &part.only)),
            (None, needs) => format!("needs {}", needs.as_deref().unwrap_or_default()),
        };
        row(text, &[&part.name, &part.shows, &command]);
    }
    let findings = findings(study, results);
    text.push_str(
        "\n### Claims\n\n| claim | published | measured here | verdict |\n|---|---|---|---|\n",
    );
    for found in &findings {
        let untestable = found.verdict == ClaimResult::Untestable.to_string();
        let verdict = match untestable {
            true => format!("{}: {}", found.verdict, found.why),
            false => format!("**{}** ({})", found.verdict, found.why),
        };
        let claim = format!("{}: {}", place(study, &found.part), found.figure);
        let measured = found.measured.as_deref().unwrap_or("–");
        row(text, &[&claim, &found.published, measured, &verdict]);
    }
    runs(text, name, study, results);
}

/// The number of a part's row, so that rows of claims need not repeat its name.
fn place(study: &Study, part: &str) -> String {
    let is_it = |it: &Part| it.name == part;
    let name = study
        .parts
        .iter()
        .find(|it| is_it(it))
        .map_or(part, |it| &it.name);
    name.split_once(": ")
        .map_or(name, |(_, title)| title)
        .to_owned()
}

/// The runs of the results, with their hosts and flags.
fn runs(text: &mut String, name: &str, study: &Study, results: &Results) {
    let measured: Vec<(&Run, &Journal)> = study
        .runs
        .iter()
        .filter_map(|run| Some((run, results.get(&run.name)?.as_ref().ok()?)))
        .collect();
    if measured.is_empty() {
        return;
    }
    text.push_str("\n### Results\n\n");
    for (run, journal) in measured {
        let cells = &journal.cells;
        let failed = cells.iter().filter(|cell| cell.error.is_some()).count();
        let blocks = cells.iter().map(|cell| cell.block + 1).max().unwrap_or(0);
        let noise = Analysis::of(journal).noise();
        let noise = noise.map_or_else(String::new, |noise| {
            format!(", noise of a pair {:.0} %", noise * 100.0)
        });
        let _ = writeln!(
            text,
            "- `{}`: {} samples in {blocks} blocks, {failed} failed{noise}.{} {}.{}",
            run.command(name, &[]),
            cells.len() - failed,
            unlike(run, journal),
            host(journal),
            flags(journal),
        );
    }
}

/// How a result's plan differs from that of the command, in a sentence.
fn unlike(run: &Run, journal: &Journal) -> String {
    let Ok(plan) = run.plan(&Storage::default()) else {
        return String::new();
    };
    let all = differences(&plan, &journal.plan);
    if all.is_empty() {
        return String::new();
    }
    format!(" Unlike the command: {}.", all.join("; "))
}

/// What says where a host's disks are, which is no difference between runs.
const PLACES: [&str; 4] = ["backing", "ceph-conf", "ceph-user", "ceph-keyring"];

/// How a plan that was measured differs from that of a recipe.
fn differences(recipe: &Plan, measured: &Plan) -> Vec<String> {
    let mut all = Vec::new();
    let mut compare = |what: &str, of: &dyn Fn(&Plan) -> String| {
        let (wanted, found) = (of(recipe), of(measured));
        // What one of them does not have follows from the storage or from the selected cases.
        if wanted != found && ![&wanted, &found].iter().any(|it| it.is_empty()) {
            all.push(format!("{what} {found} instead of {wanted}"));
        }
    };
    compare("run time", &|plan| time_text(plan.runtime));
    compare("ramp", &|plan| time_text(plan.ramp));
    compare("disks of", &|plan| size_text(plan.size));
    compare("blocks, at most", &|plan| plan.blocks_max.to_string());
    for key in settings::KEYS
        .into_iter()
        .filter(|key| !PLACES.contains(key))
    {
        compare(key, &|plan| {
            listed(plan.cases.iter().map(|case| case.settings.get(key)))
        });
    }
    for key in workload::KEYS {
        compare(key, &|plan| {
            listed(plan.workloads.iter().map(|load| load.get(key)))
        });
    }
    all
}

/// The different values that apply, in their order.
fn listed(values: impl Iterator<Item = String>) -> String {
    let mut all: Vec<String> = Vec::new();
    for value in values.filter(|value| value != "-") {
        if !all.contains(&value) {
            all.push(value);
        }
    }
    all.join(", ")
}

/// The host of a result in one line.
fn host(journal: &Journal) -> String {
    let facts = &journal.header.facts;
    let keys = [
        "cpus",
        "cpu",
        "memory",
        "storage",
        "kernel",
        "fio",
        "qemu",
        "ringdisk",
        "accelerator",
        bundle::NOTE,
    ];
    let known = keys.iter().filter_map(|key| {
        let value = facts.get(*key)?;
        if *key == "accelerator" && !journal.plan.has_guests() {
            return None;
        }
        Some(match *key {
            "cpus" => format!("{value} CPUs"),
            "cpu" | bundle::NOTE => value.clone(),
            key => format!("{key} {value}"),
        })
    });
    known.collect::<Vec<_>>().join(", ")
}

/// How many samples have which reasons for doubt.
fn flags(journal: &Journal) -> String {
    let mut kinds = BTreeMap::<&str, usize>::new();
    for flag in journal.cells.iter().flat_map(|cell| &cell.flags) {
        let kind = flag.split_once(':').map_or(flag.as_str(), |(kind, _)| kind);
        *kinds.entry(kind).or_default() += 1;
    }
    let kinds: Vec<String> = kinds
        .into_iter()
        .map(|(kind, count)| format!("{kind} ({count})"))
        .collect();
    match kinds.is_empty() {
        true => String::new(),
        false => format!(" Flags: {}.", kinds.join(", ")),
    }
}

/// A row of a table.
fn row(text: &mut String, cells: &[&str]) {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    let _ = writeln!(text, "| {} |", cells.join(" | "));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_says_how_it_differs_from_its_command() {
        let study = Study::named("001").unwrap();
        let run = study.runs.iter().find(|it| it.name == "servers").unwrap();
        let recipe = run.plan(&Storage::default()).unwrap();
        assert_eq!(differences(&recipe, &recipe), [""; 0]);
        let mut measured = recipe.selected(&"iodepth=1,8".parse().unwrap()).unwrap();
        measured.runtime = std::time::Duration::from_millis(300);
        measured.size = 512 << 20;
        assert_eq!(
            differences(&recipe, &measured),
            [
                "run time 0.3 s instead of 5.0 s",
                "disks of 512M instead of 1G",
                "iodepth 1, 8 instead of 1, 2, 4, 8, 16, 32, 64, 128"
            ]
        );
    }

    #[test]
    fn the_document_is_that_of_the_studies_and_the_results() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        let wanted = document(&docs.join("results")).unwrap();
        let path = docs.join("studies.md");
        // As expect-test has it, so that no program must be built for a change of a recipe.
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            std::fs::write(&path, &wanted).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap();
        assert!(
            found == wanted,
            "docs/studies.md is out of date; 'ringdisk lab study --document docs/results > docs/studies.md' writes it"
        );
    }
}
