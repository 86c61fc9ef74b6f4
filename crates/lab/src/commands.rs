//! The subcommands of `ringdisk lab`.

use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use thiserror::Error;

use crate::analysis::Analysis;
use crate::guest::{Accel, Stop};
use crate::journal::{JOURNAL, Journal};
use crate::plan::units::{time, time_text};
use crate::plan::{Filter, Plan, PlanError, RATES_MAX, changes};
use crate::run::progress::Display;
use crate::run::search::RUNS;
use crate::run::trial::accel_of_guests;
use crate::run::{self, Options, available};
use crate::schedule::{Schedule, estimate};
use crate::{compare, import, recipes, report};

/// The error of a command, with its exit code.
#[derive(Debug, Error)]
#[error("{problem}")]
pub struct Failed {
    /// The exit code of the process.
    pub code: u8,
    /// The message.
    pub problem: String,
}

impl Failed {
    /// An error with this exit code.
    pub(crate) fn new(code: u8, problem: impl Into<String>) -> Self {
        Self {
            code,
            problem: problem.into(),
        }
    }

    /// The user stopped the run whose result is in `folder`.
    pub(crate) fn interrupted(folder: &Path) -> Self {
        let folder = folder.display();
        let problem = format!("interrupted; --resume --output {folder} continues it");
        Self { code: 130, problem }
    }

    /// Wrong usage, or an error in a plan.
    pub(crate) fn usage(problem: impl Into<String>) -> Self {
        Self::new(2, problem)
    }
}

impl From<anyhow::Error> for Failed {
    fn from(error: anyhow::Error) -> Self {
        let code = if error.downcast_ref::<PlanError>().is_some() {
            2
        } else {
            1
        };
        Self {
            code,
            problem: format!("{error:#}"),
        }
    }
}

/// The options of `run` and `compare`.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Replaces the plan's budget.
    pub budget: Option<String>,
    /// The result's folder.
    pub output: Option<PathBuf>,
    /// Continue that result.
    pub resume: bool,
    /// Only describe what would run.
    pub dry_run: bool,
    /// Do not ask before disks are overwritten.
    pub overwrite: bool,
    /// How guests run.
    pub accel: Option<Accel>,
    /// The ringdisk that is measured; `None` is this program.
    pub ringdisk: Option<PathBuf>,
    /// Another build of ringdisk, as one more case.
    pub baseline: Option<PathBuf>,
    /// Values instead of the plan's, as `TABLE.KEY=VALUE`.
    pub set: Vec<String>,
    /// Selects a part of the plan, as `KEY=VALUE`.
    pub only: Vec<String>,
    /// Whether each load is profiled.
    pub profile: bool,
    /// Print nothing but progress.
    pub quiet: bool,
}

/// What to compare.
#[derive(Clone, Debug, Default)]
pub struct CompareOptions {
    /// Names from [`recipes::comparison`].
    pub configurations: Vec<String>,
    /// The user's disk.
    pub disk: Option<PathBuf>,
    /// A profile's name.
    pub profile: Option<String>,
}

/// Runs a recipe or a plan's file.
///
/// # Errors
/// It cannot be run; see [`Failed::code`].
pub fn run(plan: &str, options: &RunOptions) -> Result<(), Failed> {
    if let Some(text) = recipes::text(plan) {
        return run_text(&PathBuf::from(format!("{plan}.toml")), text, options);
    }
    let path = PathBuf::from(plan);
    let text = fs::read(&path).map_err(|e| {
        let names: Vec<_> = recipes::RECIPES.iter().map(|recipe| recipe.0).collect();
        let words = crate::plan::words::not_one_of(plan, &names);
        Failed::usage(format!("{plan}: {e}; and as a recipe: {words}"))
    })?;
    let text = String::from_utf8(text).map_err(|e| {
        let valid = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count();
        Failed::usage(format!("{plan}, line {line}: this is not UTF-8"))
    })?;
    run_text(&path, &text, options)
}

/// Compares configurations of one disk.
///
/// # Errors
/// As [`run`].
pub fn compare(what: &CompareOptions, options: &RunOptions) -> Result<(), Failed> {
    let text = recipes::comparison(
        &what.configurations,
        what.disk.as_deref(),
        what.profile.as_deref(),
    );
    run_text(
        Path::new("compare.toml"),
        &text.map_err(Failed::usage)?,
        options,
    )
}

/// Runs the text of a plan, and writes its reports.
pub(crate) fn run_text(file: &Path, text: &str, options: &RunOptions) -> Result<(), Failed> {
    let text = &with_changes(text, options).map_err(Failed::usage)?;
    let (plan, options_of_run) = checked(file, text, options)?;
    let Options {
        folder,
        ringdisk,
        accel,
        ..
    } = &options_of_run;
    let left_out: Vec<String> = run::left_out(&plan, ringdisk, *accel).into_keys().collect();
    let reduced = plan.without(&left_out);
    reduced.check_compared().map_err(Failed::usage)?;
    if !options.quiet {
        describe(&reduced, &plan, ringdisk, *accel);
    }
    if options.dry_run {
        return Ok(());
    }
    if !options.overwrite {
        ask(&available::overwritten(&reduced))?;
    }
    let stop = stop_on_signals()?;
    let mut display = Display::new(&reduced);
    let journal = run::run(text, &options_of_run, &stop, &mut display);
    drop(display);
    let journal = journal?;
    write_report(&Analysis::of(&journal), folder, options.quiet)?;
    if stop.is_wanted() {
        return Err(Failed::interrupted(folder));
    }
    if journal.cells.iter().any(|cell| cell.sample.is_some()) {
        return Ok(());
    }
    let mut errors = journal.cells.iter().filter_map(|cell| cell.error.as_ref());
    let error = errors.next().map_or("", String::as_str);
    Err(Failed {
        code: 1,
        problem: format!("no cell was measured; the first error: {error}"),
    })
}

/// The plan's text with the changes of the command line.
fn with_changes(text: &str, options: &RunOptions) -> Result<String, String> {
    let mut text = text.to_owned();
    if !options.set.is_empty() {
        text = changes::set(&text, &options.set).map_err(|e| format!("--set: {e}"))?;
    }
    match &options.baseline {
        Some(build) => changes::with_baseline(&text, build),
        None => Ok(text),
    }
}

/// The plan, with the filters and the budget of the command line, and the options for [`run::run`].
fn checked(file: &Path, text: &str, options: &RunOptions) -> Result<(Plan, Options), Failed> {
    let only: Vec<Filter> = options
        .only
        .iter()
        .map(|filter| filter.parse())
        .collect::<Result<_, String>>()
        .map_err(|problem| Failed::usage(format!("--only: {problem}")))?;
    let mut plan = Plan::parse(file, text)
        .map_err(|error| error.to_string())
        .and_then(|plan| plan.selected_by(&only).map_err(|e| format!("--only: {e}")))
        .map_err(Failed::usage)?;
    let budget = options.budget.as_deref().map(time).transpose();
    let budget = budget.map_err(|problem| Failed::usage(format!("--budget: {problem}")))?;
    plan.budget = budget.unwrap_or(plan.budget);
    let ringdisk = match &options.ringdisk {
        Some(path) => path.clone(),
        None => std::env::current_exe().context("finding this program")?,
    };
    let output = options.output.clone();
    let options = Options {
        folder: output.unwrap_or_else(|| format!("lab-{}", plan.name).into()),
        ringdisk,
        accel: if plan.has_guests() {
            let trial = || accel_of_guests(&Stop::default()).0;
            options.accel.unwrap_or_else(trial)
        } else {
            Accel::Kvm
        },
        resume: options.resume,
        file: file.to_owned(),
        budget,
        only,
        profile: options.profile,
    };
    Ok((plan, options))
}

/// The first Ctrl-C (or SIGHUP, SIGQUIT, SIGTERM) ends the current cell, and the second ends the process.
///
/// # Errors
/// The handlers cannot be installed.
pub fn stop_on_signals() -> Result<Stop, Failed> {
    let stop = Stop::default();
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        // A lost session sends SIGHUP, which nohup makes the process ignore.
        if signal == SIGHUP && ignores_sighup() {
            continue;
        }
        signal_hook::flag::register_conditional_shutdown(signal, 130, stop.flag())
            .and_then(|_| signal_hook::flag::register(signal, stop.flag()))
            .context("handling signals")?;
    }
    Ok(stop)
}

fn ignores_sighup() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (SIGHUP - 1) != 0)
}

/// Writes the reports of a result, and prints their path.
fn write_report(analysis: &Analysis, folder: &Path, quiet: bool) -> Result<(), Failed> {
    let measured = report::write(analysis, folder)?;
    if quiet {
        return Ok(());
    }
    outln!("{}", report::text(analysis));
    if let Some(path) = measured {
        outln!("'ringdisk check' uses the measurements: {}", path.display());
    }
    outln!("report: {}", folder.join(report::HTML).display());
    Ok(())
}

/// Prints what a plan measures, and how long it takes.
fn describe(plan: &Plan, whole: &Plan, ringdisk: &Path, accel: Accel) {
    // A guest boots in 3 s under KVM, and in 20 s under TCG.
    let boot = match accel {
        _ if !plan.has_guests() => Duration::from_millis(100),
        Accel::Kvm => Duration::from_secs(3),
        Accel::Tcg => Duration::from_secs(20),
    };
    let most: Vec<u32> = (1..=RATES_MAX as u32).collect();
    let searching: Vec<&str> = plan
        .workloads
        .iter()
        .filter(|load| load.search)
        .map(|load| load.name.as_str())
        .collect();
    let widest = searching
        .iter()
        .fold(plan.clone(), |plan, load| plan.with_rates(load, &most));
    let estimate = estimate(&widest, boot);
    outln!(
        "{}: {}",
        plan.name,
        if plan.title.is_empty() {
            "a plan without a title"
        } else {
            &plan.title
        }
    );
    if accel == Accel::Tcg {
        outln!(
            "NOTE: KVM does not work here, so guests run under emulation: absolute figures mean nothing."
        );
    }
    if plan.cases.is_empty() {
        outln!("no configuration of this plan can be measured here");
    } else {
        outln!(
            "{} configurations, the first of them twice; {} loads",
            plan.cases.len(),
            plan.workloads.len()
        );
    }
    for case in &plan.cases {
        outln!("  {}: {}", case.name, case.settings.label());
    }
    for uncompared in plan.uncompared() {
        outln!("  {uncompared}");
    }
    for left_out in &whole.left_out {
        outln!("  left out: {left_out}");
    }
    for (case, why) in run::left_out(whole, ringdisk, accel) {
        outln!("  left out: {case}: {why}");
    }
    if plan.cases.is_empty() {
        return;
    }
    for load in &plan.workloads {
        outln!("  load: {}", load.name);
    }
    if !searching.is_empty() {
        let each = boot + plan.run_time() * RUNS;
        let searches = plan.cases.len() as u32 * searching.len() as u32;
        outln!(
            "before the first block, a search for at most {} rates takes about {}",
            RATES_MAX * searching.len(),
            time_text(each * searches)
        );
    }
    let questions = Schedule::of(&widest, 0).questions();
    outln!(
        "{questions} questions; a block of {} runs takes about {}; at most {} blocks in {}",
        estimate.runs,
        time_text(estimate.block),
        estimate.affordable.max(1),
        time_text(plan.budget)
    );
    match estimate.blocks {
        Some(blocks) => outln!(
            "an effect of {} % with a noise of {} % would be found in {blocks} blocks, {}; clearer comparisons end sooner",
            plan.effect * 100.0,
            plan.noise * 100.0,
            time_text(estimate.block * blocks as u32)
        ),
        None => outln!(
            "these are too few to find an effect of {} % with a noise of {} %: only larger effects will be decided",
            plan.effect * 100.0,
            plan.noise * 100.0
        ),
    }
}

/// Asks before the lab writes to disks that it did not create.
fn ask(disks: &[String]) -> Result<(), Failed> {
    if disks.is_empty() {
        return Ok(());
    }
    let list = disks.join(", ");
    if !io::stdin().is_terminal() {
        return Err(Failed::usage(format!(
            "this plan OVERWRITES {list}; to allow that, use --overwrite"
        )));
    }
    out!(
        "This plan OVERWRITES {list}. All data there will be lost. Type 'overwrite' to continue: "
    );
    let _ = io::stdout().flush();
    let mut line = String::new();
    let read = io::stdin().lock().read_line(&mut line);
    if read.is_ok() && line.trim() == "overwrite" {
        return Ok(());
    }
    Err(Failed {
        code: 1,
        problem: "cancelled; nothing was written".into(),
    })
}

/// Lists the recipes, or prints one.
///
/// # Errors
/// There is no such recipe.
pub fn recipes(name: Option<&str>) -> Result<(), Failed> {
    if let Some(name) = name {
        let names: Vec<_> = recipes::RECIPES.iter().map(|recipe| recipe.0).collect();
        let text = recipes::text(name)
            .ok_or_else(|| Failed::usage(crate::plan::words::not_one_of(name, &names)))?;
        out!("{text}");
        return Ok(());
    }
    out!(
        "{}",
        recipe_list().map_err(|e| Failed::usage(e.to_string()))?
    );
    Ok(())
}

/// The recipes with their titles, which start in the same column.
fn recipe_list() -> Result<String, PlanError> {
    let names = recipes::RECIPES.iter().map(|(name, _)| name.len());
    let width = names.max().unwrap_or(0);
    let line = |(name, text): (&str, &str)| {
        let plan = Plan::parse(Path::new(name), text)?;
        Ok(format!("{name:<width$}  {}\n", plan.title))
    };
    recipes::RECIPES.into_iter().map(line).collect()
}

/// Writes a result's report again.
///
/// # Errors
/// It is not a result, or the files cannot be written.
pub fn report(result: &Path, output: Option<&Path>) -> Result<(), Failed> {
    let journal = Journal::read(result)?;
    let analysis = Analysis::of(&journal);
    let folder = match output {
        Some(folder) => folder.to_owned(),
        None if result.is_dir() => result.to_owned(),
        None if result.file_name() == Some(JOURNAL.as_ref()) => {
            result.parent().map_or_else(PathBuf::new, Path::to_owned)
        }
        None => {
            return Err(Failed::usage(format!(
                "{} is a journal without a folder of its own; --output DIR says where its report goes",
                result.display()
            )));
        }
    };
    write_report(&analysis, &folder, false)?;
    Ok(())
}

/// Prints what changed from one result to another.
///
/// # Errors
/// They cannot be compared.
pub fn diff(before: &Path, after: &Path, force: bool) -> Result<(), Failed> {
    let (before, after) = (Journal::read(before)?, Journal::read(after)?);
    let changes =
        compare::changes(&before, &after, force).map_err(|problem| Failed { code: 4, problem })?;
    out!("{}", compare::text(&changes));
    Ok(())
}

/// Fails with code 3 if any cell of a result is worse than in another.
///
/// # Errors
/// It is worse, or the results cannot be compared.
pub fn gate(result: &Path, against: &Path, force: bool) -> Result<(), Failed> {
    let (before, after) = (Journal::read(against)?, Journal::read(result)?);
    let comparison =
        compare::changes(&before, &after, force).map_err(|problem| Failed { code: 4, problem })?;
    out!("{}", compare::text(&comparison));
    let all = comparison.changes.len() + comparison.missing.len();
    let mut problems = Vec::new();
    let is_worse = |change: &&compare::Change| change.verdict == crate::stats::Verdict::Loss;
    let worse = comparison.changes.iter().filter(is_worse).count();
    if worse > 0 {
        problems.push(format!("{worse} of {all} cells are worse"));
    }
    let missing = comparison.missing.len();
    if missing > 0 {
        problems.push(format!("{missing} of {all} cells have too few samples now"));
    }
    if problems.is_empty() {
        return Ok(());
    }
    let problem = problems.join(", and ");
    Err(Failed { code: 3, problem })
}

/// Makes a result from files of fio, DiskSpd or CrystalDiskMark.
///
/// # Errors
/// A file is from none of these tools.
pub fn import(files: &[String], output: &Path) -> Result<(), Failed> {
    for note in import::import(files, output)? {
        eprintln!("ringdisk: {}", note.replace(char::is_control, " "));
    }
    report(output, None)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::journal::{Cell, Header, JOURNAL, Record, Sample};

    #[test]
    fn a_bundle_has_its_report_elsewhere_and_is_not_stored() {
        let folder = tempfile::tempdir().unwrap();
        let bundle = folder.path().join("servers.jsonl");
        let header = Header {
            version: 1,
            file: "p.toml".into(),
            plan:
                "guest = \"none\"\n[config]\ndevice = \"host\"\naio = [\"native\", \"threads\"]\n"
                    .into(),
            jobs: Default::default(),
            seed: 1,
            started_ms: 7,
            facts: Default::default(),
            only: Vec::new(),
            left_out: Default::default(),
        };
        let cell = |block, case: &str| {
            Record::Cell(Cell {
                block,
                case: case.into(),
                workload: "randread 4k, depth 1".into(),
                sample: Some(Sample {
                    iops: 100.0,
                    ..Sample::default()
                }),
                ..Cell::default()
            })
        };
        let blocks =
            (0..4).flat_map(|block| [cell(block, "aio=native"), cell(block, "aio=threads")]);
        let lines: Vec<String> = std::iter::once(Record::Plan(header))
            .chain(blocks)
            .map(|record| serde_json::to_string(&record).unwrap() + "\n")
            .collect();
        fs::write(&bundle, lines.concat()).unwrap();
        let refused = super::report(&bundle, None).unwrap_err();
        assert!(refused.problem.contains("--output"), "{}", refused.problem);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let journal = crate::journal::Journal::read(&bundle).unwrap();
        let analysis = crate::analysis::Analysis::of(&journal);
        let stored = crate::measured::write(&analysis, folder.path()).unwrap();
        assert_eq!(stored, None, "of another host, perhaps");
        // A result's own journal has its report beside it.
        fs::rename(&bundle, folder.path().join(JOURNAL)).unwrap();
        super::report(&folder.path().join(JOURNAL), None).unwrap();
        assert!(folder.path().join(crate::report::HTML).exists());
    }

    #[test]
    fn a_plan_that_is_not_utf8_has_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let plan = folder.path().join("p.toml");
        fs::write(&plan, b"title = \"x\"\nname = \"\xff\"\n").unwrap();
        let failed = super::run(plan.to_str().unwrap(), &super::RunOptions::default()).unwrap_err();
        assert!(failed.problem.contains("line 2: "), "{}", failed.problem);
    }

    #[test]
    fn titles_of_recipes_are_aligned() {
        let list = super::recipe_list().unwrap();
        let column = |line: &str| {
            let name = line.find(' ').unwrap();
            name + line[name..].find(|c| c != ' ').unwrap()
        };
        let first = column(list.lines().next().unwrap());
        for line in list.lines() {
            assert_eq!(column(line), first, "{line}");
        }
    }
}
