//! Runs a plan: block by block, until all is decided, the budget is used up, or the user wants an end. Whatever goes
//! wrong in a cell is that cell's matter.

pub mod available;
mod boot;
mod effective;
pub mod outside;
pub mod progress;
pub mod search;
mod validity;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::analysis::{Analysis, Outcome};
use crate::guest::{Accel, Kernel, Stop, accel, version, write_initramfs};
use crate::host::{Cost, Facts, facts, now_ms};
use crate::journal::{BootRecord, Ceiling, Cell, Header, Journal, Rates, Record, Sample, Writer};
use crate::plan::words::{Device, GuestKind, Until};
use crate::plan::{Backing, Filter, Plan, Settings, Workload};
use crate::schedule::{Boot, Schedule};
use crate::stats::{Sequential, Verdict};
use crate::storage::Files;
use boot::{Bench, Up, keep_logs};
use progress::Progress;

/// What is not the plan's matter.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the result goes.
    pub folder: PathBuf,
    /// The ringdisk that is measured.
    pub ringdisk: PathBuf,
    /// How guests run; `None` finds out.
    pub accel: Option<Accel>,
    /// Goes on with the result in `folder`.
    pub resume: bool,
    /// The plan's file, for messages.
    pub file: PathBuf,
    /// Another budget than the plan's.
    pub budget: Option<Duration>,
    /// What of the plan is measured.
    pub only: Vec<Filter>,
}

/// Boots that a configuration may fail before it is given up.
const FAILURES_MAX: u32 = 2;
/// Blocks in which the host's own disk is measured too.
const CEILING_BLOCKS: u32 = 2;

/// Runs a plan, from its text. What was measured when it ended, for whatever reason.
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
    let accel = options.accel.unwrap_or_else(accel);
    let disks = plan
        .directory
        .clone()
        .unwrap_or_else(|| options.folder.clone());
    fs::create_dir_all(&disks).with_context(|| format!("making {}", disks.display()))?;
    let facts = all_facts(&plan, options, accel, &disks);
    let (mut journal, mut writer) = begin(text, &plan, options, &facts)?;
    journal.plan.budget = plan.budget;
    for (case, why) in &journal.header.left_out {
        progress.say(&format!("left out: {case}: {why}"));
    }
    let runtime = Runtime::new()?;
    let kernel = match plan.guest {
        GuestKind::Linux => {
            let kernel = Kernel::find()?;
            let initramfs = runtime.0.join("initramfs.cpio");
            write_initramfs(&initramfs, &kernel)?;
            Some((kernel, initramfs))
        }
        GuestKind::None | GuestKind::Ssh => None,
    };
    let changed: Vec<String> = facts
        .iter()
        .filter(|(key, value)| {
            journal
                .header
                .facts
                .get(*key)
                .is_some_and(|before| before != *value)
        })
        .map(|(key, _)| key.clone())
        .collect();
    let mut files = Files::new(disks.join("disks"), plan.size);
    let mut plan = journal.plan.clone();
    for load in plan.workloads.clone().iter().filter(|load| load.search) {
        let since = Instant::now();
        let bench = Bench {
            plan: &plan,
            ringdisk: &options.ringdisk,
            accel,
            kernel: kernel.clone(),
            folder: runtime.0.clone(),
            stop,
        };
        let rates = match search::rates(&bench, &mut files, load, progress) {
            Ok(rates) => rates,
            Err(_) if stop.is_wanted() => return Ok(journal),
            Err(error) => return Err(error),
        };
        let rates = Rates {
            workload: load.name.clone(),
            rates,
            took_s: since.elapsed().as_secs_f64(),
        };
        journal.plan = journal.plan.with_rates(&rates.workload, &rates.rates);
        journal.searched_s += rates.took_s;
        writer.write(&Record::Rates(rates))?;
        plan = journal.plan.clone();
    }
    let bench = Bench {
        plan: &plan,
        ringdisk: &options.ringdisk,
        accel,
        kernel,
        folder: runtime.0.clone(),
        stop,
    };
    let mut runner = Runner {
        files,
        failures: BTreeMap::new(),
        changed,
        logs: options.folder.join("failed"),
        versions: facts,
        bench,
        options,
    };
    runner.blocks(&mut journal, &mut writer, progress)?;
    Ok(journal)
}

/// The journal of a new result, or of one that is resumed.
fn begin(text: &str, plan: &Plan, options: &Options, facts: &Facts) -> Result<(Journal, Writer)> {
    if options.resume {
        let mut journal = Journal::read(&options.folder)?;
        ensure!(
            journal.header.plan == text
                && journal.header.jobs == plan.jobs
                && journal.header.only == options.only,
            "{} was made by another plan; run that one, or make a new result",
            options.folder.display()
        );
        let cut = std::mem::take(&mut journal.cut);
        return Ok((journal, Writer::resume(&options.folder, cut)?));
    }
    let seed = plan.seed.unwrap_or_else(|| now_ms() % 1_000_000);
    let left_out = left_out(plan, &options.ringdisk);
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
                Outcome::Untestable,
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

/// Cases that this host cannot run.
pub fn left_out(plan: &Plan, ringdisk: &Path) -> BTreeMap<String, String> {
    let missing = |case: &crate::plan::Case| {
        Some((
            case.name.clone(),
            available::missing(plan.guest, &case.settings, ringdisk)?,
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
        add("accelerator", accel.word().into());
        if let Ok(kernel) = Kernel::find() {
            add("guest kernel", kernel.release);
        }
    }
    facts
}

/// A folder for sockets and logs, gone when the run is.
struct Runtime(PathBuf);

impl Runtime {
    fn new() -> Result<Runtime> {
        let parent = std::env::temp_dir();
        sweep(&parent);
        let name = |try_: u32| format!("{RUNTIME}{}-{try_}", std::process::id());
        // A folder of somebody else's is not used: sockets in it would be theirs.
        for folder in (0..100).map(|try_| parent.join(name(try_))) {
            match fs::DirBuilder::new().mode(0o700).create(&folder) {
                Ok(()) => return Ok(Runtime(folder)),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e).with_context(|| format!("making {}", folder.display())),
            }
        }
        bail!("{} is full of folders {RUNTIME}*", parent.display())
    }
}

/// What such folders are called, before the process that made them.
const RUNTIME: &str = "ringdisk-lab-";

/// Removes what runs that were killed have left: an initramfs is 90 MB. What belongs to others cannot be removed.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name
            .to_str()
            .and_then(|name| name.strip_prefix(RUNTIME)?.split_once('-'))
            .and_then(|(maker, _)| maker.parse::<u32>().ok());
        if maker.is_some_and(|maker| !Path::new(&format!("/proc/{maker}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Runner<'a> {
    bench: Bench<'a>,
    files: Files,
    failures: BTreeMap<usize, u32>,
    /// Programs that are not what they were when this result was begun.
    changed: Vec<String>,
    versions: Facts,
    logs: PathBuf,
    options: &'a Options,
}

impl Runner<'_> {
    fn blocks(
        &mut self,
        journal: &mut Journal,
        writer: &mut Writer,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let plan = journal.plan.clone();
        let looks = Arc::new(Sequential::new(plan.blocks_max as usize));
        let schedule = Schedule::of(&plan, journal.header.seed);
        let cells_s: f64 = journal.cells.iter().map(|cell| cell.took_s).sum();
        let spent_before = journal.searched_s + cells_s;
        let begun = Instant::now();
        for block in 0..plan.blocks_max {
            let open = match plan.until {
                Until::Decided => Schedule::open(&verdicts_before(journal, block, &looks)),
                Until::Blocks => vec![true; schedule.questions()],
            };
            let boots = schedule.block(block, |question| open[question]);
            if boots.is_empty() {
                progress.say("every question is decided");
                return Ok(());
            }
            let done: BTreeSet<(usize, usize)> = done_in(journal, block);
            let due = |boot: &Boot| -> Vec<usize> {
                boot.workloads
                    .iter()
                    .copied()
                    .filter(|load| !done.contains(&(boot.arm, *load)))
                    .collect()
            };
            let due: Vec<Boot> = boots
                .iter()
                .map(|boot| Boot {
                    arm: boot.arm,
                    workloads: due(boot),
                })
                .filter(|boot| {
                    !boot.workloads.is_empty()
                        && self
                            .failures
                            .get(&boot.arm)
                            .is_none_or(|n| *n < FAILURES_MAX)
                })
                .collect();
            if due.is_empty()
                && boots.iter().all(|boot| {
                    self.failures
                        .get(&boot.arm)
                        .is_some_and(|n| *n >= FAILURES_MAX)
                })
            {
                progress.say("every configuration that is left has failed twice");
                return Ok(());
            }
            progress.block(block, &due, &open);
            let measures_host = plan
                .cases
                .iter()
                .any(|case| case.settings.device == Device::Host);
            if block < CEILING_BLOCKS && !measures_host {
                self.ceilings(journal, writer, block, progress)?;
            }
            for boot in due {
                let spent = Duration::from_secs_f64(spent_before) + begun.elapsed();
                // The first block is what a report cannot do without.
                if block > 0 && spent >= plan.budget {
                    progress.say("the budget is used up");
                    return Ok(());
                }
                if self.bench.stop.is_wanted() {
                    return Ok(());
                }
                self.boot(journal, writer, block, &boot, progress)?;
            }
            if self.bench.stop.is_wanted() {
                return Ok(());
            }
            let analysis = Analysis::with(journal, looks.clone());
            progress.verdicts(&analysis);
        }
        progress.say("all blocks of the plan have run");
        Ok(())
    }

    fn boot(
        &mut self,
        journal: &mut Journal,
        writer: &mut Writer,
        block: u32,
        boot: &Boot,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let plan = self.bench.plan;
        let twin = boot.arm >= plan.cases.len();
        let case = plan.cases.get(boot.arm).unwrap_or(&plan.cases[0]);
        let settings = &case.settings;
        progress.boot(&case.name, twin);
        let since = Instant::now();
        let cell = |load: usize| Cell {
            block,
            case: case.name.clone(),
            twin,
            workload: plan.workloads[load].name.clone(),
            ..Cell::default()
        };
        let up = self.bench.boot(settings, &mut self.files);
        let boot_s = since.elapsed().as_secs_f64();
        let mut up = match up {
            Ok(up) => up,
            Err(_) if self.bench.stop.is_wanted() => return Ok(()),
            Err(error) => {
                *self.failures.entry(boot.arm).or_default() += 1;
                let error = self.failed(block, &case.name, &error);
                let took_s = boot_s / boot.workloads.len() as f64;
                let cells = boot.workloads.iter().map(|load| Cell {
                    took_s,
                    ..cell(*load)
                });
                return self.fail(journal, writer, cells.collect(), &error, progress);
            }
        };
        let record = BootRecord {
            block,
            case: case.name.clone(),
            twin,
            effective: up.effective.clone(),
            boot_s,
        };
        writer.write(&Record::Boot(record.clone()))?;
        journal.boots.push(record);
        for (number, load) in boot.workloads.iter().enumerate() {
            let workload = &plan.workloads[*load];
            progress.cell(&workload.name);
            let since = Instant::now();
            let measured = self
                .bench
                .measure(&mut up, settings, workload, u64::from(block));
            if self.bench.stop.is_wanted() {
                return Ok(());
            }
            let took_s = since.elapsed().as_secs_f64() + boot_s / boot.workloads.len() as f64;
            let cell = Cell {
                at_ms: now_ms(),
                took_s,
                ..cell(*load)
            };
            match measured {
                Ok((sample, cost)) => {
                    let flags = self.flags(journal, settings, workload, &sample, cost);
                    self.finish(
                        journal,
                        writer,
                        Cell {
                            flags,
                            sample: Some(stored(sample)),
                            ..cell
                        },
                        progress,
                    )?;
                }
                Err(error) => {
                    let error = self.failed(block, &case.name, &error);
                    self.finish(
                        journal,
                        writer,
                        Cell {
                            error: Some(error),
                            ..cell
                        },
                        progress,
                    )?;
                    // What it left behind is not known: the rest of this boot's loads get a boot of their own.
                    drop(up);
                    let rest = Boot {
                        arm: boot.arm,
                        workloads: boot.workloads[number + 1..].to_vec(),
                    };
                    let failures = self.failures.entry(boot.arm).or_default();
                    *failures += 1;
                    if *failures < FAILURES_MAX && !rest.workloads.is_empty() {
                        return self.boot(journal, writer, block, &rest, progress);
                    }
                    return Ok(());
                }
            }
        }
        self.failures.remove(&boot.arm);
        Ok(())
    }

    /// Records the same error for several cells.
    fn fail(
        &mut self,
        journal: &mut Journal,
        writer: &mut Writer,
        cells: Vec<Cell>,
        error: &str,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        for cell in cells {
            let cell = Cell {
                at_ms: now_ms(),
                error: Some(error.to_owned()),
                ..cell
            };
            self.finish(journal, writer, cell, progress)?;
        }
        Ok(())
    }

    fn finish(
        &mut self,
        journal: &mut Journal,
        writer: &mut Writer,
        cell: Cell,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        writer.write(&Record::Cell(cell.clone()))?;
        progress.finished(&cell);
        journal.cells.push(cell);
        Ok(())
    }

    /// What an error says, with its logs kept.
    fn failed(&self, block: u32, case: &str, error: &anyhow::Error) -> String {
        let plain = |c: char| {
            if c.is_ascii_alphanumeric() || "=-_".contains(c) {
                c
            } else {
                '_'
            }
        };
        let name: String = case.chars().map(plain).collect();
        keep_logs(
            &self.bench.folder,
            &self.logs.join(format!("{block}-{name}")),
        );
        format!("{error:#}")
    }

    fn flags(
        &self,
        journal: &Journal,
        settings: &Settings,
        workload: &Workload,
        sample: &Sample,
        cost: Option<Cost>,
    ) -> Vec<String> {
        let disks = u32::from(settings.guests) * u32::from(settings.volumes);
        let ceilings = journal
            .ceilings
            .iter()
            .filter(|found| found.workload == workload.name && found.disks == disks);
        let on_our_disk = settings.backing == Backing::File && settings.device != Device::Host;
        let ceiling = ceilings
            .map(|found| found.iops)
            .reduce(f64::max)
            .filter(|_| on_our_disk);
        let mut changed = self.changed.clone();
        // Packages are upgraded while a long run is under way.
        if self
            .versions
            .get("ringdisk")
            .is_some_and(|before| *before != version(&self.options.ringdisk))
        {
            changed.push("ringdisk".into());
        }
        validity::flags(&validity::Evidence {
            sample,
            settings,
            workload,
            cost,
            ceiling,
            changed: &changed,
            planned_s: self.bench.plan.runtime.as_secs_f64(),
            accel: self.bench.accel,
        })
    }

    /// Measures what the host's own disk gives, for the loads whose guests use it.
    fn ceilings(
        &mut self,
        journal: &mut Journal,
        writer: &mut Writer,
        block: u32,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let plan = self.bench.plan;
        let mut shapes: Vec<u16> = plan
            .cases
            .iter()
            .filter(|case| {
                case.settings.backing == Backing::File && case.settings.device != Device::Host
            })
            .map(|case| case.settings.guests * case.settings.volumes)
            .collect();
        shapes.sort_unstable();
        shapes.dedup();
        for disks in shapes {
            let loads: Vec<&Workload> = plan
                .workloads
                .iter()
                .filter(|load| load.rate.is_none() && load.job.is_none())
                .filter(|load| {
                    let same = |found: &&Ceiling| {
                        found.workload == load.name && found.disks == u32::from(disks)
                    };
                    journal.ceilings.iter().filter(same).count() as u32 <= block
                })
                .collect();
            if loads.is_empty() {
                continue;
            }
            let settings = Settings {
                device: Device::Host,
                volumes: disks,
                ..Settings::default()
            };
            progress.boot("the host's own disk", false);
            let mut up: Up = self.bench.boot(&settings, &mut self.files)?;
            for load in loads {
                progress.cell(&load.name);
                // One that fails is a ceiling less, and no more.
                if let Ok((sample, _)) =
                    self.bench
                        .measure(&mut up, &settings, load, u64::from(block))
                {
                    let ceiling = Ceiling {
                        workload: load.name.clone(),
                        disks: u32::from(disks),
                        iops: sample.iops,
                        mean_ns: sample.mean_ns,
                    };
                    writer.write(&Record::Ceiling(ceiling.clone()))?;
                    journal.ceilings.push(ceiling);
                }
                if self.bench.stop.is_wanted() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Verdicts as they were when a block began: so a run that is resumed asks what it would have asked.
fn verdicts_before(journal: &Journal, block: u32, looks: &Arc<Sequential>) -> Vec<Verdict> {
    let mut before = journal.clone();
    before.cells.retain(|cell| cell.block < block);
    Analysis::with(&before, looks.clone()).verdicts
}

/// Arms and loads that a block has already.
fn done_in(journal: &Journal, block: u32) -> BTreeSet<(usize, usize)> {
    let plan = &journal.plan;
    let place = |cell: &Cell| {
        let arm = plan.cases.iter().position(|case| case.name == cell.case)?;
        let load = plan
            .workloads
            .iter()
            .position(|load| load.name == cell.workload)?;
        Some((if cell.twin { plan.cases.len() } else { arm }, load))
    };
    journal
        .cells
        .iter()
        .filter(|cell| cell.block == block)
        .filter_map(place)
        .collect()
}

/// A sample as it is kept: latencies counted to 3 %, which is a fraction of the bytes.
fn stored(sample: Sample) -> Sample {
    Sample {
        latencies: sample.latencies.coarse(),
        ..sample
    }
}
