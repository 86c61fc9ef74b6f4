//! `ringdisk lab study`: the runs of a study, one after another, and the verdicts on its claims.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use harness::text::{printable, printable_json};
use serde::{Deserialize, Serialize};

use super::findings::{Finding, Results, findings};
use super::{Run, STUDIES, Storage, Study, bundle, document};
use crate::commands::{Failed, RunOptions, run_text};
use crate::journal::{Journal, journal_path};
use crate::plan::units::{time, time_text};
use crate::plan::{Plan, changes};

/// The options of `ringdisk lab study`.
#[derive(Clone, Debug, Default)]
pub struct StudyOptions {
    /// The study's name; `None` lists them.
    pub study: Option<String>,
    /// The storage.
    pub storage: Storage,
    /// Only these runs; empty means all.
    pub runs: Vec<String>,
    /// Print the verdicts as JSON, and nothing else.
    pub json: bool,
    /// Write small results below this folder.
    pub bundle: Option<PathBuf>,
    /// A remark on the host, for the bundles.
    pub note: Option<String>,
    /// Print the document of all studies, with the bundles below this folder.
    pub document: Option<PathBuf>,
    /// As for each run; `budget` is that of all runs together.
    pub common: RunOptions,
}

/// The state of a study in its folder: what `--resume` need not run again, and the verdicts.
#[derive(Default, Serialize, Deserialize)]
struct State {
    /// The study's name
    #[serde(default)]
    study: String,
    complete: Vec<String>,
    #[serde(skip_deserializing)]
    claims: Vec<Finding>,
}

/// The file of the [state](State).
const STATE: &str = "study.json";

/// Runs a study, lists the studies, or prints their document.
///
/// # Errors
/// There is no such study, or nothing of it could be measured.
pub fn study(options: &StudyOptions) -> Result<(), Failed> {
    if let Some(results) = &options.document {
        out!("{}", document::document(results)?);
        return Ok(());
    }
    let Some(name) = &options.study else {
        for (name, _) in STUDIES {
            let study = Study::named(name).map_err(Failed::usage)?;
            outln!("{name}  {} ({}, {})", study.title, study.author, study.year);
        }
        return Ok(());
    };
    let study = Study::named(name).map_err(Failed::usage)?;
    let runs = selected(&study, &options.runs)?;
    let folder = options.common.output.clone();
    let folder = folder.unwrap_or_else(|| format!("study-{name}").into());
    let mut state = match options.common.resume {
        true => read_state(&folder, name)?,
        false => State::default(),
    };
    state.study.clone_from(name);
    if !options.common.dry_run {
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    }
    let budgets = budgets(&runs, options)?;
    let mut results = Results::new();
    for (run, budget) in runs.into_iter().zip(budgets) {
        let result = match state.complete.contains(&run.name) {
            true => completed(run, &folder, options)?,
            false => one(run, budget, &folder, options)?,
        };
        if options.common.dry_run {
            continue;
        }
        if result.is_ok() && !state.complete.contains(&run.name) {
            state.complete.push(run.name.clone());
        }
        results.insert(run.name.clone(), result);
        state.claims = findings(&study, &results);
        write_state(&folder, &state)?;
        if let Some(bundles) = &options.bundle {
            let journal = journal_path(&folder.join(&run.name));
            if results.get(&run.name).is_some_and(Result::is_ok) {
                bundle::write(
                    &journal,
                    &bundle::path(bundles, name, run),
                    options.note.as_deref(),
                )?;
            }
        }
    }
    if options.common.dry_run {
        return Ok(());
    }
    if options.json {
        let json = serde_json::to_string_pretty(&state.claims).context("writing JSON")?;
        outln!("{}", printable_json(&json));
    } else {
        out!("{}", table(&study, &state.claims));
    }
    match results.values().any(Result::is_ok) {
        true => Ok(()),
        false => Err(Failed::new(
            1,
            "nothing of this study could be measured here",
        )),
    }
}

/// The runs with these names; all without names.
fn selected<'a>(study: &'a Study, names: &[String]) -> Result<Vec<&'a Run>, Failed> {
    let known: Vec<&str> = study.runs.iter().map(|run| run.name.as_str()).collect();
    if let Some(name) = names.iter().find(|name| !known.contains(&name.as_str())) {
        let words = crate::plan::words::not_one_of(name, &known);
        return Err(Failed::usage(format!("--run: {words}")));
    }
    let is_wanted = |run: &&Run| names.is_empty() || names.contains(&run.name);
    Ok(study.runs.iter().filter(is_wanted).collect())
}

/// The plan of a run with the changes of the command line.
fn text(run: &Run, options: &StudyOptions) -> Result<String, String> {
    let text = run.text(&options.storage)?;
    match options.common.set.is_empty() {
        true => Ok(text),
        false => changes::set(&text, &options.common.set).map_err(|e| format!("--set: {e}")),
    }
}

/// The budget of each run: its share of `--budget`, or that of its plan.
fn budgets(runs: &[&Run], options: &StudyOptions) -> Result<Vec<Option<String>>, Failed> {
    let Some(budget) = &options.common.budget else {
        return Ok(vec![None; runs.len()]);
    };
    let budget = time(budget).map_err(|e| Failed::usage(format!("--budget: {e}")))?;
    let own = |run: &&Run| {
        let text = text(run, options).ok()?;
        let plan = Plan::parse(Path::new(run.recipe()), &text).ok()?;
        Some(plan.budget.as_secs_f64())
    };
    let own: Vec<Option<f64>> = runs.iter().map(own).collect();
    let all: f64 = own.iter().flatten().sum();
    let share = |own: &Option<f64>| Some(format!("{:.0}s", budget.as_secs_f64() * (*own)? / all));
    Ok(own.iter().map(share).collect())
}

/// Does one run. An error other than an interruption is the run's result, and the others follow.
fn one(
    run: &Run,
    budget: Option<String>,
    folder: &Path,
    options: &StudyOptions,
) -> Result<Result<Journal, String>, Failed> {
    let output = folder.join(&run.name);
    if !options.json {
        let budget = budget
            .as_deref()
            .and_then(|it| time(it).ok())
            .map_or_else(String::new, within);
        outln!("\n{}{budget}", run.name);
    }
    let text = match text(run, options) {
        Ok(text) => text,
        Err(why) => return Ok(not_run(why, options)),
    };
    if let Some(disks) = changes::own_disks(&text)
        && options.storage.backing.is_some()
        && !options.json
    {
        let disks = disks.join(" and ");
        outln!("--pool, --backing and --create are not for this run: it measures {disks}");
    }
    let common = RunOptions {
        budget,
        resume: options.common.resume && journal_path(&output).exists(),
        output: Some(output.clone()),
        only: [run.only.clone(), options.common.only.clone()].concat(),
        set: Vec::new(),
        quiet: options.json,
        ..options.common.clone()
    };
    let file = format!("{}.toml", run.recipe());
    let selected = super::filters(&common.only).and_then(|only| {
        let plan = Plan::parse(Path::new(&file), &text).map_err(|e| e.to_string())?;
        plan.selected_by(&only).map_err(|e| format!("--only: {e}"))
    });
    if let Err(why) = selected {
        return Ok(not_run(why, options));
    }
    match run_text(Path::new(&file), &text, &common) {
        Err(failed) => match of_study(failed, folder) {
            failed if failed.code == 130 || failed.code == 2 => Err(failed),
            failed => Ok(not_run(failed.problem, options)),
        },
        Ok(()) if options.common.dry_run => Ok(Err(String::new())),
        Ok(()) => Ok(Journal::read(&output).map_err(|e| format!("{e:#}"))),
    }
}

/// The journal of a run that an earlier part of the study has completed.
///
/// # Errors
/// It is the result of other options, which would give the claims of this study other verdicts.
fn completed(
    run: &Run,
    folder: &Path,
    options: &StudyOptions,
) -> Result<Result<Journal, String>, Failed> {
    let output = folder.join(&run.name);
    let journal = match Journal::read(&output) {
        Ok(journal) => journal,
        Err(error) => return Ok(Err(format!("{error:#}"))),
    };
    let only = [run.only.clone(), options.common.only.clone()].concat();
    let is_same = super::filters(&only).is_ok_and(|only| only == journal.header.only)
        && text(run, options).is_ok_and(|text| text == journal.header.plan);
    if is_same {
        return Ok(Ok(journal));
    }
    Err(Failed::usage(format!(
        "{} was measured with other options (--pool, --backing, --create, --set, --only) or by another version; use the same \
         with --resume, or another --output",
        output.display()
    )))
}

/// The error of a run as that of its study: `--output` is the folder of the study.
fn of_study(failed: Failed, folder: &Path) -> Failed {
    if failed.code == 130 {
        Failed::interrupted(folder)
    } else {
        failed
    }
}

fn not_run(why: String, options: &StudyOptions) -> Result<Journal, String> {
    if !options.json {
        outln!("not run: {why}");
    }
    Err(why)
}

fn within(budget: Duration) -> String {
    format!(", in {}", time_text(budget))
}

fn read_state(folder: &Path, study: &str) -> Result<State, Failed> {
    let path = folder.join(STATE);
    match fs::read_to_string(&path) {
        Ok(text) => {
            let state: State =
                serde_json::from_str(&text).with_context(|| path.display().to_string())?;
            if state.study.is_empty() || state.study == study {
                return Ok(state);
            }
            Err(Failed::usage(format!(
                "{} is of study {}; resume that one, or use another --output",
                path.display(),
                printable(&state.study)
            )))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(State::default()),
        Err(e) => Err(anyhow::Error::new(e)
            .context(path.display().to_string())
            .into()),
    }
}

fn write_state(folder: &Path, state: &State) -> Result<(), Failed> {
    let path = folder.join(STATE);
    let text = serde_json::to_string_pretty(state).context("writing JSON")? + "\n";
    // A run that is killed, or a full disk, leaves the state from before.
    let new = folder.join(format!("{STATE}.new"));
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, &path))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(())
}

/// The verdicts for a terminal.
fn table(study: &Study, findings: &[Finding]) -> String {
    let mut text = format!("\n{} ({}, {})\n", study.title, study.author, study.year);
    let width = |of: &dyn Fn(&Finding) -> usize| findings.iter().map(of).max().unwrap_or(0);
    let published = width(&|it| it.published.chars().count()).max("published".len());
    let size = |it: &Finding| it.measured.clone().unwrap_or_else(|| "–".into());
    let measured = width(&|it| size(it).chars().count()).max("measured".len());
    let line = |a: &str, b: &str, c: &str, d: &str| {
        format!("{a:<published$}  {b:<measured$}  {c:<15}  {d}\n")
    };
    text += &line("published", "measured", "verdict", "claim");
    let mut part = "";
    for found in findings {
        if part != found.part {
            part = &found.part;
            text += &format!("{part}\n");
        }
        text += &line(
            &found.published,
            &size(found),
            &found.verdict,
            &found.figure,
        );
        if found.measured.is_none() || found.selected < found.comparisons {
            text += &line("", "", "", &format!("({})", found.why));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_study_is_continued_in_its_own_folder() {
        let of_run = Failed::interrupted(Path::new("s/servers"));
        let found = of_study(of_run, Path::new("s"));
        assert_eq!(found.code, 130);
        assert!(found.problem.contains("--output s continues"), "{found}");
        assert_eq!(of_study(Failed::usage("x"), Path::new("s")).problem, "x");
    }

    #[test]
    fn the_table_has_the_reason_of_a_verdict_on_a_part() {
        let study = Study::named("001").unwrap();
        let text = |selected| {
            let found = Finding {
                part: "part".into(),
                run: "servers".into(),
                figure: "figure".into(),
                published: "+15 %".into(),
                measured: Some("+3 %".into()),
                verdict: "undecided".into(),
                why: "mean of only 1 of 7 comparisons".into(),
                selected,
                comparisons: 7,
            };
            table(&study, &[found])
        };
        assert!(text(1).contains("(mean of only 1 of 7"), "{}", text(1));
        assert!(!text(7).contains("mean of"), "{}", text(7));
    }
}
