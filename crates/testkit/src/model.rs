//! A random tester of the whole program. ringdisk serves images of every kind, and is killed, upgraded and stopped at
//! any moment; QEMU's tools use the images in between; and [an oracle](oracle) knows what each sector may contain.
//!
//! A [case](steps::Case) depends only on a seed: it is an image and a list of steps. A case that fails is run again,
//! shortened, and reported with its seed. Requests are sent in the order of the list, but the kernel decides which is
//! executed first.

mod backups;
mod commands;
mod config;
mod copies;
mod failure;
mod files;
mod guest;
mod image_state;
mod neighbour;
mod oracle;
mod process;
mod shrink;
mod steps;
mod tools;
mod world;

use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use config::{Journal, Place};
use failure::{Failure, HANG_S, Outcome};
use steps::Case;
use world::{Counts, run_case};

/// What to test, and for how long.
pub struct Options {
    /// The path of ringdisk.
    pub binary: PathBuf,
    /// The directory for images, on a file system that supports O_DIRECT.
    pub directory: PathBuf,
    /// How long to test.
    pub length: Duration,
    /// The first seed; the following cases use the following seeds.
    pub seed: u64,
    /// Run the case of the first seed only.
    pub only: bool,
    /// The number of cases that run at a time.
    pub jobs: usize,
    /// How long to shorten a failing case.
    pub shrink: Duration,
    /// Continue after a failure.
    pub go_on: bool,
}

/// The result of a run.
#[derive(Default)]
pub struct Report {
    counts: Counts,
    /// The failures, a paragraph each.
    pub findings: Vec<String>,
    /// What could not be tested on this host.
    pub skipped: Vec<String>,
}

impl Report {
    /// A summary of the run, in one paragraph.
    pub fn summary(&self) -> String {
        let numbers = self.counts.numbers.iter();
        let numbers: Vec<_> = numbers
            .filter(|(what, _)| **what != "names")
            .map(|(what, count)| format!("{count} {what}"))
            .collect();
        format!(
            "{}, {} configurations, {} findings",
            numbers.join(", "),
            self.counts.configurations.len(),
            self.findings.len()
        )
    }
}

/// Runs cases until the time is over.
///
/// # Errors
/// The directory cannot be used.
pub fn run(options: &Options) -> io::Result<Report> {
    fs::create_dir_all(&options.directory)?;
    let probe = tempfile::tempdir_in(&options.directory)?;
    let mounts = files::can_mount(probe.path());
    let start = Instant::now();
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let report = Mutex::new(Report::default());
    if !mounts {
        let all = "full file systems and power cuts: tmpfs and FUSE cannot be mounted here";
        report.lock().expect("no panic").skipped.push(all.into());
    }
    let has_loop_devices = files::has_loop_devices(probe.path());
    if !has_loop_devices {
        let all = "block devices without spare space: there are no loop devices here";
        report.lock().expect("no panic").skipped.push(all.into());
    }
    let job = || {
        while start.elapsed() < options.length && !stop.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if options.only && number > 0 {
                return;
            }
            let seed = options.seed.wrapping_add(number);
            let mut case = Case::draw(seed);
            if case.image.place == Place::ExactDevice && !has_loop_devices {
                case.image.place = Place::Plain;
            }
            if !mounts {
                (case.image.place, case.image.journal) = (Place::Plain, Journal::Plain);
            }
            let (counts, outcome) = attempt(options, &case);
            let finding = outcome
                .err()
                .map(|failure| explain(options, &case, failure));
            let mut report = report.lock().unwrap_or_else(|e| e.into_inner());
            report.counts.merge(counts);
            if let Some(finding) = finding {
                println!("{finding}\n");
                report.findings.push(finding);
                stop.fetch_or(!options.go_on, Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(job);
        }
        if options.length > Duration::from_secs(60) {
            let over = || {
                start.elapsed() >= options.length
                    || stop.load(Ordering::Relaxed)
                    || options.only && next.load(Ordering::Relaxed) > 0
            };
            let mut told = Instant::now();
            while !over() {
                thread::sleep(Duration::from_millis(100));
                if told.elapsed() > Duration::from_secs(60) {
                    told = Instant::now();
                    let left = options.length.saturating_sub(start.elapsed()).as_secs();
                    let report = report.lock().unwrap_or_else(|e| e.into_inner());
                    println!("{left} s to go: {}", report.summary());
                }
            }
        }
    });
    Ok(report.into_inner().unwrap_or_else(|e| e.into_inner()))
}

/// Runs a case in its own directory.
fn attempt(options: &Options, case: &Case) -> (Counts, Outcome<()>) {
    let directory = match tempfile::tempdir_in(&options.directory) {
        Ok(directory) => directory,
        Err(e) => return (Counts::default(), Err(e.into())),
    };
    let (counts, outcome) = attempt_in(options, case, directory.path());
    if std::env::var_os("RINGDISK_MODEL_KEEP").is_some() && outcome.is_err() {
        println!("kept: {}", directory.keep().display());
    }
    (counts, outcome)
}

fn attempt_in(options: &Options, case: &Case, directory: &Path) -> (Counts, Outcome<()>) {
    let run = AssertUnwindSafe(|| run_case(&options.binary, directory, case));
    let (counts, outcome) = catch_unwind(run).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        let failure = Failure::new("panic", text.unwrap_or_default());
        (Counts::default(), Err(failure))
    });
    let log = fs::read_to_string(directory.join("log")).unwrap_or_default();
    let outcome = match log.lines().find(|line| line.contains("panicked")) {
        Some(line) => Err(Failure::new("panic", format!("ringdisk: {line}"))),
        None => outcome,
    };
    let outcome = outcome.map_err(|e| {
        let said = |line: &&str| {
            ["WARN", "ERROR", "done again"]
                .iter()
                .any(|w| line.contains(w))
        };
        let lines: Vec<_> = log.lines().filter(said).rev().take(3).collect();
        let last: Vec<_> = lines.into_iter().rev().collect();
        e.told(|what| format!("{}\n  The log: {}", what.trim(), last.join(" | ")))
    });
    (counts, outcome)
}

/// Shortens a failing case, and describes it.
fn explain(options: &Options, case: &Case, failure: Failure) -> String {
    println!("seed {}: {failure}", case.seed);
    let first = failure.clone();
    let again = |case: &Case| attempt(options, case).1.err();
    let patience = (failure.kind == "hang").then(|| HANG_S.swap(10, Ordering::Relaxed));
    let shrunk = shrink::shrink(case, failure, options.shrink, again);
    if let Some(patience) = patience {
        HANG_S.store(patience, Ordering::Relaxed);
    }
    let steps: Vec<_> = shrunk
        .case
        .steps
        .iter()
        .map(|s| format!("  {s:?}"))
        .collect();
    format!(
        "FINDING, seed {}: {first}\n  It failed again in {} of {} times. cargo xtask model --only {}\n  Image: {:?}\n  The \
         shortest list of steps that was found, which fails with {}:\n{}",
        case.seed,
        shrunk.again.0,
        shrunk.again.1,
        case.seed,
        shrunk.case.image,
        shrunk.failure,
        steps.join("\n")
    )
}
