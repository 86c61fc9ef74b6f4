//! `cargo xtask test`: installs what the tests need, and runs all tests of the workspace.
//!
//! The test programs are built once. Then each group of tests runs with a suitable number of threads, and its time is
//! reported.

mod limit;

use crate::{cargo, compatibility, packages, root};
use anyhow::{Context, Result, anyhow, ensure};
use limit::End;
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The tests to run
#[derive(clap::Args, Default)]
#[command(after_help = "Examples:
  cargo xtask test
  cargo xtask test --group guests --group ceph

The exit code is 1 if a test fails.")]
pub struct Args {
    /// Only this group; can be repeated
    #[arg(long, value_name = "GROUP", value_parser = GROUPS.map(|group| group.name))]
    group: Vec<String>,
}

/// Tests that run together.
struct Group {
    name: &'static str,
    /// Prefixes of test names, with the package. A test belongs to the first group that matches.
    tests: &'static [&'static str],
    /// The number of concurrent tests on two CPUs.
    threads: &'static str,
    /// Another group, which leaves the CPUs idle at times: this one runs at the same time, and is printed after it.
    beside: Option<&'static str>,
}

/// Run from the last to the first: quick tests reveal errors early.
const GROUPS: [Group; 9] = [
    Group {
        name: "guests",
        tests: &[
            "ringdisk boot::",
            "ringdisk front_ends::u_boot::",
            "ringdisk inflight::guest",
            "ringdisk libvirt::",
            "ringdisk migration::",
            "ringdisk nbd::guestfish::",
            "ringdisk nbd::kernel::",
            "ringdisk packed::",
            "ringdisk upgrade::guests_",
            "ringdisk vm::",
            "testkit vm::",
            "xtask deb::",
        ],
        threads: "2",
        beside: None,
    },
    Group {
        name: "matrix",
        tests: &["ringdisk matrix::"],
        threads: "2",
        beside: None,
    },
    Group {
        name: "ceph",
        tests: &["ringdisk rbd::"],
        // For each of two clusters, a test that uses it and one that waits for it.
        threads: "4",
        beside: None,
    },
    Group {
        name: "soak",
        tests: &["ringdisk model::", "ringdisk soak::"],
        threads: "1",
        beside: Some("ceph"),
    },
    // These wait for storage that does not answer.
    Group {
        name: "hung",
        tests: &["ringdisk storage_errors::hung::"],
        threads: "4",
        beside: Some("images"),
    },
    // These keep the CPUs busy.
    Group {
        name: "images",
        tests: &["image "],
        threads: "2",
        beside: None,
    },
    Group {
        name: "lab",
        tests: &["lab "],
        threads: "2",
        beside: None,
    },
    // These mostly wait for each other, for timers and for the disk.
    Group {
        name: "server",
        tests: &["ringdisk "],
        threads: "6",
        beside: None,
    },
    Group {
        name: "parts",
        tests: &[""],
        threads: "3",
        beside: None,
    },
];

/// A test program that runs longer is killed, and its tests that have not ended are named. The slowest takes a third of
/// this on two CPUs.
const PROGRAM_LIMIT: Duration = Duration::from_secs(20 * 60);

/// Runs the tests, and then lists the skipped tests with the reasons.
pub fn run(args: &Args) -> Result<()> {
    install();
    if args.group.is_empty() {
        compatibility::forget()?;
    }
    let started = Instant::now();
    let programs = build()?;
    let mut times = vec![("build", started.elapsed())];
    let mut totals = Totals::default();
    let is_selected =
        |group: &Group| args.group.is_empty() || args.group.iter().any(|name| name == group.name);
    let selected = || {
        GROUPS
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, group)| is_selected(group))
    };
    let is_beside = |group: &Group, name| group.beside == Some(name);
    for (at, group) in selected() {
        // It runs with the other one.
        if selected().any(|(_, other)| is_beside(group, other.name)) {
            continue;
        }
        let run = |at, threads, print: &mut dyn FnMut(&str)| {
            programs
                .iter()
                .try_for_each(|program: &Program| program.run(at, threads, print))
        };
        println!("\ngroup: {}", group.name);
        let started = Instant::now();
        thread::scope(|scope| {
            let at_the_same_time: Vec<_> = selected()
                .filter(|(_, other)| is_beside(other, group.name))
                .map(|(at, other)| {
                    let running = scope.spawn(move || {
                        let mut lines = Vec::new();
                        let ran = run(at, other.threads, &mut |line| lines.push(line.to_owned()));
                        ran.map(|()| (lines, started.elapsed()))
                    });
                    (other.name, running)
                })
                .collect();
            run(at, group.threads, &mut |line| totals.read(line))?;
            times.push((group.name, started.elapsed()));
            for (name, running) in at_the_same_time {
                println!("\ngroup: {name}, at the same time");
                let ran = running
                    .join()
                    .map_err(|_| anyhow!("group {name} panicked"))?;
                let (lines, time) = ran?;
                lines.iter().for_each(|line| totals.read(line));
                times.push((name, time));
            }
            anyhow::Ok(())
        })?;
    }
    totals.print(&times);
    ensure!(totals.failed.is_empty(), "tests failed");
    ensure!(totals.passed > 0, "no tests ran");
    Ok(())
}

fn install() {
    for (ensure, without) in packages::ALL {
        if let Err(error) = ensure() {
            println!("warning: {without}: {error:#}");
        }
    }
}

/// An executable with tests.
struct Program {
    path: PathBuf,
    /// The working directory of its tests, as in cargo.
    folder: PathBuf,
    /// The names of its tests, each with the index of the group.
    tests: Vec<(String, usize)>,
}

/// Builds all test programs with tcmalloc, as in the package.
fn build() -> Result<Vec<Program>> {
    let mut tests = cargo();
    tests.args(["test", "--workspace", "--locked", "--no-run"]);
    tests.arg("--message-format=json-render-diagnostics");
    if packages::tcmalloc::is_installed()? {
        tests.arg(packages::tcmalloc::FEATURE);
    }
    let output = tests.stderr(Stdio::inherit()).output();
    let output = output.context("starting cargo test")?;
    ensure!(
        output.status.success(),
        "cargo test failed ({})",
        output.status
    );
    let mut programs = Vec::new();
    for line in output.stdout.split(|&byte| byte == b'\n') {
        let Ok(message) = serde_json::from_slice::<Value>(line) else {
            continue;
        };
        let (Some(path), true) = (
            message["executable"].as_str(),
            message["profile"]["test"].as_bool() == Some(true),
        ) else {
            continue;
        };
        let manifest = message["manifest_path"].as_str().map(PathBuf::from);
        let folder = manifest.and_then(|manifest| Some(manifest.parent()?.to_owned()));
        let folder = folder.context("cargo names no manifest")?;
        let package = metadata_name(&message)?;
        programs.push(Program::list(path.into(), folder, &package)?);
    }
    programs.sort_by(|a, b| a.folder.cmp(&b.folder));
    Ok(programs)
}

/// The name of the package in a message of cargo, such as `path+file:///…/crates/daemon#ringdisk@0.1.0`. If the package
/// is called as its folder, only the version follows `#`.
fn metadata_name(message: &Value) -> Result<String> {
    let id = message["package_id"]
        .as_str()
        .context("no package in cargo's message")?;
    let (path, name) = id.rsplit_once('#').context("a package without a name")?;
    let name = match name.split_once('@') {
        Some((name, _)) => name,
        None => path.rsplit('/').next().unwrap_or(path),
    };
    Ok(name.to_owned())
}

impl Program {
    fn list(path: PathBuf, folder: PathBuf, package: &str) -> Result<Program> {
        let output = Command::new(&path)
            .args(["--list", "--format", "terse"])
            .output()
            .with_context(|| format!("starting {}", path.display()))?;
        ensure!(
            output.status.success(),
            "{} cannot list its tests",
            path.display()
        );
        let tests = String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| line.strip_suffix(": test"))
            .map(|test| (test.to_owned(), group_of(package, test)))
            .collect();
        Ok(Program {
            path,
            folder,
            tests,
        })
    }

    /// Runs the tests of a group. Each line of output is passed to `print`.
    fn run(&self, group: usize, threads: &str, print: &mut dyn FnMut(&str)) -> Result<()> {
        let tests: Vec<&String> = self
            .tests
            .iter()
            .filter_map(|(test, index)| (*index == group).then_some(test))
            .collect();
        if tests.is_empty() {
            return Ok(());
        }
        let path = self.path.display();
        print(&format!("{path} ({} tests)", tests.len()));
        let child = Command::new(&self.path)
            // A test that cannot run here prints the reason and passes; without --show-output, that is hidden.
            .args(["--exact", "--show-output", "--test-threads", threads])
            .args(&tests)
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .env("CARGO", std::env::var_os("CARGO").unwrap_or("cargo".into()))
            .env("RUST_LIB_BACKTRACE", "0") // a failed check names its cause; the stack frames are noise
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {path}"))?;
        let end = limit::follow(child, &tests, PROGRAM_LIMIT, &mut *print);
        let failure = match end.with_context(|| format!("running {path}"))? {
            End::Exited(status) if status.success() => return Ok(()),
            End::Exited(status) => status.to_string(),
            End::Killed(tests) => format!(
                "killed after {} min, before the end of:    {}",
                PROGRAM_LIMIT.as_secs() / 60,
                tests.join("    ")
            ),
        };
        let path = self.path.strip_prefix(root()).unwrap_or(&self.path);
        print(&format!("{FAILED}{} ({failure})", path.display()));
        Ok(())
    }
}

fn group_of(package: &str, test: &str) -> usize {
    let name = format!("{package} {test}");
    let position = |group: &Group| group.tests.iter().any(|tests| name.starts_with(tests));
    GROUPS.iter().position(position).unwrap_or(GROUPS.len() - 1)
}

/// What the test programs reported.
#[derive(Default)]
struct Totals {
    passed: usize,
    ignored: usize,
    skipped: Vec<String>,
    /// Programs that failed, with or without a failed test.
    failed: Vec<String>,
    failed_tests: usize,
    /// Whether the lines that are read are the output of passed tests.
    in_successes: bool,
    /// For each failed test, its name and what it said when it failed.
    reasons: Vec<String>,
    /// The test whose output follows, until it says why it failed.
    speaker: Option<String>,
    /// How many of the next lines belong to the last reason.
    more_of_reason: usize,
}

/// Begins the line about a program that failed.
const FAILED: &str = "failed: ";

/// Lines of a panic that are repeated at the end.
const REASON_LINES: usize = 8;

impl Totals {
    /// Prints and counts a line of a test program's output. The output of passed tests is not printed.
    fn read(&mut self, line: &str) {
        if let Some(program) = line.strip_prefix(FAILED) {
            self.in_successes = false;
            self.failed.push(program.to_owned());
        }
        if line == "failures:" || line.starts_with("test result: ") {
            self.in_successes = false;
        } else if line == "successes:" {
            self.in_successes = true;
        }
        // The duration of a part of a long test is printed.
        if !self.in_successes || line.starts_with("time: ") {
            println!("{line}");
        }
        self.note_reason(line);
        self.count(line);
    }

    /// Keeps the first lines of each panic of a failed test: they are repeated at the end, where a reader looks first, and
    /// which is kept if the middle of a long output is cut out.
    fn note_reason(&mut self, line: &str) {
        let test = line
            .strip_prefix("---- ")
            .and_then(|line| line.strip_suffix(" stdout ----"));
        if self.in_successes {
            self.more_of_reason = 0;
        } else if let Some(test) = test {
            self.speaker = Some(test.to_owned());
            self.more_of_reason = 0;
        } else {
            if line.starts_with("thread '") && line.contains("panicked at") {
                self.reasons.extend(self.speaker.take());
                self.more_of_reason = REASON_LINES;
            }
            if self.more_of_reason > 0 && !line.is_empty() {
                self.more_of_reason -= 1;
                let line: String = line.chars().take(500).collect();
                self.reasons.push(format!("    {line}"));
            }
        }
    }

    fn count(&mut self, line: &str) {
        if let Some(skipped) = line.strip_prefix("skipped: ") {
            self.skipped.push(skipped.to_owned());
        }
        let Some(result) = line.strip_prefix("test result: ") else {
            return;
        };
        let result = result.split_once(". ").map_or("", |(_, counts)| counts);
        for count in result.split("; ") {
            match count
                .split_once(' ')
                .map(|(number, what)| (number.parse().unwrap_or(0), what))
            {
                Some((number, "passed")) => self.passed += number,
                Some((number, "failed")) => self.failed_tests += number,
                Some((number, "ignored")) => self.ignored += number,
                _ => {}
            }
        }
    }

    fn print(&self, times: &[(&str, Duration)]) {
        println!("\nTime of each group:");
        for (name, time) in times {
            let seconds = time.as_secs();
            println!("{name:>10} {:3} min {:2} s", seconds / 60, seconds % 60);
        }
        match self.skipped.len() {
            0 => println!("Nothing was skipped."),
            count => println!(
                "Skipped here ({count}):\n    {}",
                self.skipped.join("\n    ")
            ),
        }
        if !self.reasons.is_empty() {
            println!("Why tests failed:\n    {}", self.reasons.join("\n    "));
        }
        for program in &self.failed {
            println!("{FAILED}{program}");
        }
        println!(
            "{} passed, {} failed, {} skipped",
            self.passed - self.skipped.len(),
            self.failed_tests.max(self.failed.len()),
            self.skipped.len() + self.ignored
        );
    }
}
