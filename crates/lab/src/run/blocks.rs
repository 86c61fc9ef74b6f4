//! Block by block, until every question is decided, the budget is used up, or the user stops the run. An error while a
//! configuration is measured becomes the record of that cell; the run continues.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::boot::{Booted, Testbed, keep_logs};
use super::recorder::Recorder;
use super::validity;
use crate::analysis::{Analysis, arm_and_load};
use crate::guest::version;
use crate::host::{Cost, Facts, now_ms};
use crate::journal::{BootRecord, Ceiling, Cell, Journal, Sample};
use crate::plan::words::{Device, Until};
use crate::plan::{Backing, Plan, Settings, Workload};
use crate::schedule::{Boot, Schedule};
use crate::stats::{Sequential, Verdict};
use crate::storage::Files;

/// After this many failed boots in a row, a configuration is not tried again.
const FAILURES_MAX: u32 = 2;
/// The host's own disk is measured in this many blocks from the first.
const CEILING_BLOCKS: u32 = 2;

/// Runs the blocks of a plan.
pub struct Runner<'a> {
    pub testbed: Testbed<'a>,
    pub files: Files,
    /// The ringdisk that is measured.
    pub ringdisk: &'a Path,
    /// The folder for the logs of failed boots.
    pub logs: PathBuf,
    /// The host and the versions of all programs when this run began.
    pub facts: Facts,
    /// Facts that have changed since the result was begun.
    pub changed: Vec<String>,
    /// Failed boots of each arm since its last success.
    pub failures: BTreeMap<usize, u32>,
}

impl Runner<'_> {
    /// Runs the blocks that `recorder` does not have yet.
    ///
    /// # Errors
    /// The journal cannot be written, or the host's own disk cannot be measured.
    pub fn run(&mut self, recorder: &mut Recorder<'_>) -> Result<()> {
        let plan = self.testbed.plan;
        let sequential = Arc::new(Sequential::new(plan.blocks_max as usize));
        let schedule = Schedule::of(plan, recorder.journal.header.seed);
        let cells_s: f64 = recorder.journal.cells.iter().map(|cell| cell.took_s).sum();
        let spent_before = recorder.journal.searched_s + cells_s;
        let started = Instant::now();
        for block in 0..plan.blocks_max {
            let open = match plan.until {
                Until::Decided => {
                    Schedule::open(&verdicts_before(&recorder.journal, block, &sequential))
                }
                Until::Blocks => vec![true; schedule.questions()],
            };
            let boots = schedule.block(block, |question| open[question]);
            if boots.is_empty() {
                recorder.progress.say("every question is decided");
                return Ok(());
            }
            let remaining = self.remaining(&recorder.journal, block, &boots);
            if remaining.is_empty() && boots.iter().all(|boot| self.has_failed(boot.arm)) {
                recorder
                    .progress
                    .say("every configuration that is left has failed twice");
                return Ok(());
            }
            recorder.progress.block(block, &remaining, &open);
            let measures_host = plan
                .cases
                .iter()
                .any(|case| case.settings.device == Device::Host);
            if block < CEILING_BLOCKS && !measures_host {
                self.ceilings(recorder, block)?;
            }
            for boot in remaining {
                let spent = Duration::from_secs_f64(spent_before) + started.elapsed();
                // A report needs at least the first block.
                if block > 0 && spent >= plan.budget {
                    recorder.progress.say("the budget is used up");
                    return Ok(());
                }
                if self.testbed.stop.is_wanted() {
                    return Ok(());
                }
                self.boot(recorder, block, &boot)?;
            }
            if self.testbed.stop.is_wanted() {
                return Ok(());
            }
            let analysis = Analysis::with(&recorder.journal, sequential.clone());
            recorder.progress.verdicts(&analysis);
        }
        recorder.progress.say("all blocks of the plan have run");
        Ok(())
    }

    /// The boots of a block without the loads that a resumed result has already, and without configurations that failed.
    fn remaining(&self, journal: &Journal, block: u32, boots: &[Boot]) -> Vec<Boot> {
        let done = cells_of_block(journal, block);
        let due = |boot: &Boot| Boot {
            arm: boot.arm,
            workloads: boot
                .workloads
                .iter()
                .copied()
                .filter(|load| !done.contains(&(boot.arm, *load)))
                .collect(),
        };
        boots
            .iter()
            .map(due)
            .filter(|boot| !boot.workloads.is_empty() && !self.has_failed(boot.arm))
            .collect()
    }

    fn has_failed(&self, arm: usize) -> bool {
        self.failures
            .get(&arm)
            .is_some_and(|failures| *failures >= FAILURES_MAX)
    }

    /// Boots a configuration once and runs its loads.
    fn boot(&mut self, recorder: &mut Recorder<'_>, block: u32, boot: &Boot) -> Result<()> {
        let plan = self.testbed.plan;
        let twin = boot.arm >= plan.cases.len();
        let case = plan.cases.get(boot.arm).unwrap_or(&plan.cases[0]);
        recorder.progress.boot(&case.name, twin);
        let since = Instant::now();
        let booted = self.testbed.boot(&case.settings, &mut self.files);
        let boot_s = since.elapsed().as_secs_f64();
        let cell = |load: usize| Cell {
            block,
            case: case.name.clone(),
            twin,
            workload: plan.workloads[load].name.clone(),
            took_s: boot_s / boot.workloads.len() as f64,
            ..Cell::default()
        };
        let mut up = match booted {
            Ok(up) => up,
            Err(_) if self.testbed.stop.is_wanted() => return Ok(()),
            Err(error) => {
                *self.failures.entry(boot.arm).or_default() += 1;
                self.keep_logs(block, &case.name);
                let error = format!("{error:#}");
                return boot.workloads.iter().try_for_each(|load| {
                    recorder.cell(Cell {
                        at_ms: now_ms(),
                        error: Some(error.clone()),
                        ..cell(*load)
                    })
                });
            }
        };
        recorder.boot(BootRecord {
            block,
            case: case.name.clone(),
            twin,
            effective: up.effective.clone(),
            boot_s,
        })?;
        for (number, load) in boot.workloads.iter().enumerate() {
            recorder.progress.cell(&plan.workloads[*load].name);
            let settings = &case.settings;
            let measured = self.measure(&recorder.journal, &mut up, settings, *load, cell(*load));
            let Some(cell) = measured else {
                return Ok(());
            };
            let failed = cell.error.is_some();
            recorder.cell(cell)?;
            if failed {
                // The load may have left the guest in any state: the remaining loads get another boot.
                drop(up);
                let rest = Boot {
                    arm: boot.arm,
                    workloads: boot.workloads[number + 1..].to_vec(),
                };
                *self.failures.entry(boot.arm).or_default() += 1;
                if self.has_failed(boot.arm) || rest.workloads.is_empty() {
                    return Ok(());
                }
                return self.boot(recorder, block, &rest);
            }
        }
        self.failures.remove(&boot.arm);
        Ok(())
    }

    /// Runs a load in a configuration that is up; `None` if the user stops the run. `cell` names the load, and has its
    /// share of the boot's time.
    fn measure(
        &self,
        journal: &Journal,
        up: &mut Booted,
        settings: &Settings,
        load: usize,
        cell: Cell,
    ) -> Option<Cell> {
        let workload = &self.testbed.plan.workloads[load];
        let since = Instant::now();
        let turn = u64::from(cell.block);
        let measured = self.testbed.measure(up, settings, workload, turn);
        if self.testbed.stop.is_wanted() {
            return None;
        }
        let cell = Cell {
            at_ms: now_ms(),
            took_s: cell.took_s + since.elapsed().as_secs_f64(),
            ..cell
        };
        Some(match measured {
            Ok((sample, cost)) => Cell {
                flags: self.flags(journal, settings, workload, &sample, cost),
                sample: Some(compacted(sample)),
                ..cell
            },
            Err(error) => {
                self.keep_logs(cell.block, &cell.case);
                Cell {
                    error: Some(format!("{error:#}")),
                    ..cell
                }
            }
        })
    }

    /// Keeps the logs of servers and guests after an error.
    fn keep_logs(&self, block: u32, case: &str) {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "=-_".contains(c);
        let name = case.replace(|c| !is_plain(c), "_");
        keep_logs(
            &self.testbed.folder,
            &self.logs.join(format!("{block}-{name}")),
        );
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
        let ceiling = ceilings
            .map(|found| found.iops)
            .reduce(f64::max)
            .filter(|_| is_on_our_disk(settings));
        let mut changed = self.changed.clone();
        // Packages may be upgraded during a long run.
        let version_at_start = self.facts.get("ringdisk");
        if version_at_start.is_some_and(|before| *before != version(self.ringdisk)) {
            changed.push("ringdisk".into());
        }
        validity::flags(&validity::Evidence {
            sample,
            settings,
            workload,
            cost,
            ceiling,
            changed: &changed,
            planned_s: self.testbed.plan.runtime.as_secs_f64(),
            accel: self.testbed.accel,
        })
    }

    /// Measures the host's own disk, for the loads whose guests use it.
    fn ceilings(&mut self, recorder: &mut Recorder<'_>, block: u32) -> Result<()> {
        let plan = self.testbed.plan;
        let mut disk_counts: Vec<u16> = plan
            .cases
            .iter()
            .filter(|case| is_on_our_disk(&case.settings))
            .map(|case| case.settings.guests * case.settings.volumes)
            .collect();
        disk_counts.sort_unstable();
        disk_counts.dedup();
        for disks in disk_counts {
            let loads = loads_without_ceiling(plan, &recorder.journal, disks, block);
            if loads.is_empty() {
                continue;
            }
            let settings = Settings {
                device: Device::Host,
                volumes: disks,
                ..Settings::default()
            };
            recorder.progress.boot("the host's own disk", false);
            // If it fails, for example because a disk more has no room, the report lacks this ceiling, and nothing else.
            let Ok(mut up) = self.testbed.boot(&settings, &mut self.files) else {
                continue;
            };
            for load in loads {
                recorder.progress.cell(&load.name);
                let measured = self
                    .testbed
                    .measure(&mut up, &settings, load, u64::from(block));
                if let Ok((sample, _)) = measured {
                    recorder.ceiling(Ceiling {
                        workload: load.name.clone(),
                        disks: u32::from(disks),
                        iops: sample.iops,
                        mean_ns: sample.mean_ns,
                    })?;
                }
                if self.testbed.stop.is_wanted() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Whether guests use files that the lab made on the host's disk.
fn is_on_our_disk(settings: &Settings) -> bool {
    settings.backing == Backing::File && settings.device != Device::Host
}

/// The loads whose ceiling has not been measured in this block.
fn loads_without_ceiling<'a>(
    plan: &'a Plan,
    journal: &Journal,
    disks: u16,
    block: u32,
) -> Vec<&'a Workload> {
    let measured = |load: &Workload| {
        let same =
            |found: &&Ceiling| found.workload == load.name && found.disks == u32::from(disks);
        journal.ceilings.iter().filter(same).count() as u32
    };
    plan.workloads
        .iter()
        .filter(|load| load.rate.is_none() && load.job.is_none())
        .filter(|load| load.once == 0 && !load.idle && measured(load) <= block)
        .collect()
}

/// The verdicts when a block began. A resumed run therefore asks the questions that it would have asked.
fn verdicts_before(journal: &Journal, block: u32, sequential: &Arc<Sequential>) -> Vec<Verdict> {
    let mut before = journal.clone();
    before.cells.retain(|cell| cell.block < block);
    Analysis::with(&before, sequential.clone()).verdicts
}

/// Arms and loads that the journal has for a block.
fn cells_of_block(journal: &Journal, block: u32) -> BTreeSet<(usize, usize)> {
    journal
        .cells
        .iter()
        .filter(|cell| cell.block == block)
        .filter_map(|cell| arm_and_load(&journal.plan, cell))
        .collect()
}

/// A sample as the journal stores it: latencies counted to 3 %, which takes a fraction of the bytes.
fn compacted(sample: Sample) -> Sample {
    Sample {
        latencies: sample.latencies.coarse(),
        ..sample
    }
}
