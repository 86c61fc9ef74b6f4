//! The display while a plan runs.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use harness::text::{printable, printable_lines};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::analysis::Analysis;
use crate::journal::Cell;
use crate::plan::Plan;
use crate::plan::units::time_text;
use crate::schedule::Boot;
use crate::stats::Verdict;

/// Receives the progress of a run.
pub trait Progress {
    /// A message for the user.
    fn say(&mut self, line: &str);
    /// A part of a thin disk is filled, of so many bytes.
    fn filled(&mut self, disk: &str, done: u64, of: u64);
    /// A block begins.
    fn block(&mut self, number: u32, boots: &[Boot], open: &[bool]);
    /// A configuration boots.
    fn boot(&mut self, case: &str, twin: bool);
    /// A load begins.
    fn cell(&mut self, workload: &str);
    /// A cell is done.
    fn finished(&mut self, cell: &Cell);
    /// A block is done.
    fn verdicts(&mut self, analysis: &Analysis);
}

/// Bars on a terminal, lines elsewhere.
pub struct Display {
    bars: MultiProgress,
    budget: ProgressBar,
    block: ProgressBar,
    verdicts: ProgressBar,
    limit: Duration,
    started: Instant,
    on_terminal: bool,
    case: String,
}

impl Display {
    /// For a plan.
    pub fn new(plan: &Plan) -> Display {
        let on_terminal = stderr().is_terminal();
        let bars = MultiProgress::new();
        let bar = |template: &str, length: u64| {
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(length).with_style(style);
            if on_terminal { bars.add(bar) } else { bar }
        };
        let budget = bar(
            "budget   {wide_bar} {elapsed} of {prefix}",
            plan.budget.as_secs().max(1),
        );
        budget.set_prefix(time_text(plan.budget));
        let block = bar("{prefix:8} {wide_bar} {pos}/{len}, {eta} to go: {msg}", 1);
        let verdicts = bar("{msg}", 1);
        if !on_terminal {
            [&budget, &block, &verdicts]
                .into_iter()
                .for_each(|bar| bar.set_draw_target(indicatif::ProgressDrawTarget::hidden()));
        }
        Display {
            bars,
            budget,
            block,
            verdicts,
            limit: plan.budget,
            started: Instant::now(),
            on_terminal,
            case: String::new(),
        }
    }
}

impl Progress for Display {
    fn say(&mut self, line: &str) {
        let line = printable_lines(line);
        if self.on_terminal {
            drop(self.bars.println(line))
        } else {
            eprintln!("[{:>5} s] {line}", self.started.elapsed().as_secs())
        }
    }

    fn filled(&mut self, disk: &str, done: u64, of: u64) {
        if done == 0 {
            self.say(&format!("filling {disk}, {} MiB", of >> 20));
            self.block.set_prefix("filling");
            self.block.set_length(of >> 20);
            self.block.reset();
        }
        self.block
            .set_message(format!("MiB of {}", printable(disk)));
        self.block.set_position(done >> 20);
        self.budget.set_position(self.started.elapsed().as_secs());
    }

    fn block(&mut self, number: u32, boots: &[Boot], open: &[bool]) {
        let runs: usize = boots.iter().map(|boot| boot.workloads.len()).sum();
        self.block.set_prefix(format!("block {}", number + 1));
        self.block.set_length(runs as u64);
        self.block.reset();
        let open = open.iter().filter(|open| **open).count();
        let left = self.limit.saturating_sub(self.started.elapsed());
        self.say(&format!(
            "block {}: {runs} runs in {} boots for {open} open questions; at most {} to go",
            number + 1,
            boots.len(),
            time_text(left)
        ));
    }

    fn boot(&mut self, case: &str, twin: bool) {
        self.case = printable(case) + if twin { " again" } else { "" };
        self.block.set_message(format!("booting {}", self.case));
        self.budget.set_position(self.started.elapsed().as_secs());
    }

    fn cell(&mut self, workload: &str) {
        let workload = printable(workload);
        self.block.set_message(format!("{}: {workload}", self.case));
        self.budget.set_position(self.started.elapsed().as_secs());
    }

    fn finished(&mut self, cell: &Cell) {
        self.block.inc(1);
        self.budget.set_position(self.started.elapsed().as_secs());
        let name = format!("{}{}", cell.case, if cell.twin { " again" } else { "" });
        match (&cell.sample, &cell.error) {
            (Some(sample), _) => {
                let flags = cell.flags.join("; ");
                let flags = if flags.is_empty() {
                    flags
                } else {
                    format!(" [{flags}]")
                };
                let figures = match &sample.idle {
                    Some(idle) => format!(
                        "{:.1} % of a core, {:.0} KiB, {} descriptors",
                        idle.core * 100.0,
                        idle.footprint.private_kib,
                        idle.footprint.open()
                    ),
                    None => {
                        let (iops, mean_us) = (sample.iops, sample.mean_ns / 1000.0);
                        format!("{iops:.0} IOPS, {mean_us:.0} µs")
                    }
                };
                self.say(&format!("{name}, {}: {figures}{flags}", cell.workload));
            }
            (None, error) => {
                let error = error.as_deref().unwrap_or("no sample");
                self.say(&format!("{name}, {}: FAILED: {error}", cell.workload));
            }
        }
    }

    fn verdicts(&mut self, analysis: &Analysis) {
        let count = |verdict| {
            analysis
                .verdicts
                .iter()
                .filter(|found| **found == verdict)
                .count()
        };
        let noise = analysis.noise().map_or_else(String::new, |noise| {
            format!("; noise of a pair {:.1} %", noise * 100.0)
        });
        let line = format!(
            "so far: {} gain, {} loss, {} equivalent, {} undecided{noise}",
            count(Verdict::Gain),
            count(Verdict::Loss),
            count(Verdict::Equivalent),
            count(Verdict::Undecided)
        );
        self.verdicts.set_message(line.clone());
        if !self.on_terminal {
            self.say(&line);
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        [&self.block, &self.verdicts, &self.budget]
            .into_iter()
            .for_each(ProgressBar::finish_and_clear);
    }
}
