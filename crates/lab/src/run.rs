//! Runs a plan: begins or resumes a result, searches for rates, and runs [blocks].

pub mod available;
mod blocks;
mod boot;
mod effective;
mod file_system;
pub mod outside;
mod pin;
mod profiler;
pub mod progress;
mod recorder;
pub mod search;
pub mod trial;
mod validity;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::analysis::ClaimResult;
use crate::guest::{Accel, Kernel, Stop, version, write_initramfs};
use crate::host::{Facts, facts, now_ms};
use crate::journal::{Header, JOURNAL, Journal, Rates, Record, Writer, is_unbegun};
use crate::own_folder::OwnFolder;
use crate::plan::words::{FileSystem, GuestKind};
use crate::plan::{Filter, Plan};
use crate::storage::named::Named;
use crate::storage::{Files, host_queue, zram};
use blocks::Runner;
use boot::Testbed;
use progress::Progress;
use recorder::Recorder;

/// What the command line adds to a plan.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folder of the result.
    pub folder: PathBuf,
    /// The ringdisk that is measured.
    pub ringdisk: PathBuf,
    /// How guests run.
    pub accel: Accel,
    /// Whether to continue the result in `folder`.
    pub resume: bool,
    /// The plan's file, for messages.
    pub file: PathBuf,
    /// Replaces the plan's budget.
    pub budget: Option<Duration>,
    /// Selects a part of the plan.
    pub only: Vec<Filter>,
    /// Whether each load is profiled.
    pub profile: bool,
}

/// Runs a plan from its text. Returns the journal when all is decided, the budget is used up, or the user stops the run.
///
/// # Errors
/// Nothing could be measured, or the journal cannot be written.
pub fn run(
    text: &str,
    options: &Options,
    stop: &Stop,
    progress: &mut dyn Progress,
) -> Result<Journal> {
    let mut plan = Plan::parse(&options.file, text)?
        .selected_by(&options.only)
        .map_err(|problem| anyhow!("--only: {problem}"))?;
    if let Some(budget) = options.budget {
        plan.budget = budget;
    }
    // First of all: this host's facts, and what is missing here, are those without the changes of a killed run.
    let left = [host_queue::restore_after_kill(), zram::remove_after_kill()];
    for said in left.concat() {
        progress.say(&said);
    }
    let accel = options.accel;
    let disks = plan
        .directory
        .clone()
        .unwrap_or_else(|| options.folder.clone());
    fs::create_dir_all(&disks).with_context(|| format!("making {}", disks.display()))?;
    let left_out = left_out(&plan, &options.ringdisk, accel);
    let names: Vec<String> = left_out.keys().cloned().collect();
    let facts = all_facts(&plan.without(&names), options, accel, &disks);
    let (mut journal, writer) = begin(text, &plan, options, &facts, left_out)?;
    journal.plan.budget = plan.budget;
    for (case, why) in &journal.header.left_out {
        progress.say(&format!("left out: {case}: {why}"));
    }
    for uncompared in journal.plan.uncompared() {
        progress.say(&uncompared);
    }
    raise_descriptor_limit();
    let runtime = OwnFolder::new(&std::env::temp_dir())?;
    let kernel = match plan.guest {
        GuestKind::Linux => {
            let kernel = Kernel::find()?;
            let initramfs = runtime.path().join("initramfs.cpio");
            write_initramfs(&initramfs, &kernel, &file_systems(&plan))?;
            Some((kernel, initramfs))
        }
        GuestKind::None | GuestKind::Ssh => None,
    };
    let named = Named::new(plan.create, plan.size, runtime.path().to_owned());
    let mut named = named.recorded_in(Box::new(writer.another()?));
    let mut recorder = Recorder::new(journal, writer, progress);
    let plan = recorder.journal.plan.clone();
    // Of a run that is resumed, devices may have been mounted in the meantime.
    for case in &plan.cases {
        if let Some(why) = available::in_use(&plan, &case.settings) {
            bail!("{why}");
        }
    }
    for said in named.remove_left(&plan, &std::mem::take(&mut recorder.journal.left))? {
        recorder.progress.say(&said);
    }
    let mut files = Files::new(disks, plan.size, named);
    if let Err(error) = recorder.fill(&mut files, &plan, stop)
        && !stop.is_wanted()
    {
        return Err(error);
    }
    if stop.is_wanted() {
        return Ok(recorder.journal);
    }
    let testbed = Testbed {
        plan: &plan,
        ringdisk: &options.ringdisk,
        accel,
        kernel,
        folder: runtime.path().to_owned(),
        profile: options.profile,
        stop,
    };
    search_rates(&testbed, &mut files, &mut recorder)?;
    if stop.is_wanted() {
        return Ok(recorder.journal);
    }
    let plan_with_rates = recorder.journal.plan.clone();
    let mut runner = Runner {
        testbed: Testbed {
            plan: &plan_with_rates,
            ..testbed
        },
        files,
        ringdisk: &options.ringdisk,
        logs: options.folder.join("failed"),
        changed: changed_facts(&recorder.journal.header.facts, &facts),
        facts,
        failures: BTreeMap::new(),
    };
    runner.run(&mut recorder)?;
    Ok(recorder.journal)
}

/// The journal of a new result, or of one that is resumed.
fn begin(
    text: &str,
    plan: &Plan,
    options: &Options,
    facts: &Facts,
    left_out: BTreeMap<String, String>,
) -> Result<(Journal, Writer)> {
    let journal = options.folder.join(JOURNAL);
    let has_begun = !journal.exists() || !is_unbegun(&journal)?;
    if options.resume && has_begun {
        let (writer, journal) = Writer::resume(&options.folder)?;
        ensure!(
            journal.header.plan == text
                && journal.header.jobs == plan.jobs
                && journal.header.only == options.only,
            "{} is the result of another plan; run that plan, or write to another folder",
            options.folder.display()
        );
        return Ok((journal, writer));
    }
    let seed = plan.seed.unwrap_or_else(|| now_ms() % 1_000_000);
    ensure!(
        left_out.len() < plan.cases.len(),
        "no configuration of this plan can be measured here:\n{}",
        left_out
            .iter()
            .map(|(case, why)| format!("  {case}: {why}"))
            .chain(plan.claims.iter().map(|claim| format!(
                "  published ({}): {}: {} ({})",
                claim.source,
                claim.figure,
                ClaimResult::Untestable,
                claim.untestable.as_deref().unwrap_or("see above")
            )))
            .collect::<Vec<_>>()
            .join("\n")
    );
    let header = Header {
        version: 1,
        file: options.file.display().to_string(),
        plan: text.to_owned(),
        jobs: plan.jobs.clone(),
        seed,
        started_ms: now_ms(),
        facts: facts.clone(),
        only: options.only.clone(),
        left_out,
    };
    let first = serde_json::to_string(&Record::Plan(header.clone()))?;
    Ok((
        Journal::parse(&first)?,
        Writer::create(&options.folder, header)?,
    ))
}

/// The file systems that guests of the plan make.
fn file_systems(plan: &Plan) -> Vec<FileSystem> {
    let of_cases = plan.cases.iter().map(|case| case.settings.file_system);
    let mut all: Vec<_> = of_cases.filter(|it| *it != FileSystem::None).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Cases that this host cannot run.
pub fn left_out(plan: &Plan, ringdisk: &Path, accel: Accel) -> BTreeMap<String, String> {
    let missing = |case: &crate::plan::Case| {
        Some((
            case.name.clone(),
            available::missing(plan, &case.settings, ringdisk, accel)?,
        ))
    };
    plan.cases.iter().filter_map(missing).collect()
}

fn all_facts(plan: &Plan, options: &Options, accel: Accel, disks: &Path) -> Facts {
    let mut facts = facts(disks);
    let mut add = |key: &str, text: String| {
        if !text.is_empty() {
            facts.insert(key.into(), text);
        }
    };
    add("fio", version(Path::new("fio")));
    add("ringdisk", version(&options.ringdisk));
    if plan.guest != GuestKind::None {
        add("qemu", version(Path::new("qemu-system-x86_64")));
    }
    if plan.has_guests() {
        add("accelerator", accel.word().into());
        if let Ok(kernel) = Kernel::find() {
            add("guest kernel", kernel.release);
        }
    }
    facts
}

/// For servers of many disks and for their clients, which inherit it.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // If it fails, what needs more descriptors says so.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// The keys of facts whose values have changed since the result was begun.
fn changed_facts(before: &Facts, now: &Facts) -> Vec<String> {
    let has_changed =
        |(key, value): &(&String, &String)| before.get(*key).is_some_and(|before| before != *value);
    now.iter()
        .filter(has_changed)
        .map(|(key, _)| key.clone())
        .collect()
}

/// Searches the rates of each load that leaves them open. Ends early if the user stops the run.
fn search_rates(
    testbed: &Testbed<'_>,
    files: &mut Files,
    recorder: &mut Recorder<'_>,
) -> Result<()> {
    for load in testbed.plan.workloads.iter().filter(|load| load.search) {
        let since = Instant::now();
        let rates = match search::rates(testbed, files, load, recorder.progress) {
            Ok(rates) => rates,
            Err(_) if testbed.stop.is_wanted() => return Ok(()),
            Err(error) => return Err(error),
        };
        recorder.rates(Rates {
            workload: load.name.clone(),
            rates,
            took_s: since.elapsed().as_secs_f64(),
        })?;
    }
    Ok(())
}
