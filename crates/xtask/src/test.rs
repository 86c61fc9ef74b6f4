//! `cargo xtask test`: all tests of the workspace, with what they need installed first.

use crate::{cargo, packages};
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::process::{ChildStdout, Stdio};

/// Runs all tests, and closes with what was skipped and why.
pub fn run() -> Result<()> {
    if let Err(error) = packages::ensure() {
        println!("warning: tests that need a guest are skipped: {error:#}");
    }
    if let Err(error) = packages::qmp::ensure() {
        println!("warning: tests with QEMU's QMP client are skipped: {error:#}");
    }
    if let Err(error) = packages::deb::ensure() {
        println!("warning: the test of the Debian package is skipped: {error:#}");
    }
    if let Err(error) = packages::debian::ensure() {
        println!("warning: the test of the service in a real systemd is skipped: {error:#}");
    }
    if let Err(error) = packages::qemu::ensure() {
        println!("warning: the matrix leaves out {error:#}");
    }
    if let Err(error) = packages::ceph::ensure() {
        println!("warning: tests on a Ceph cluster are skipped: {error:#}");
    }
    if let Err(error) = packages::browser::ensure() {
        println!("warning: the tests that look at reports are skipped: {error:#}");
    }
    let mut tests = cargo();
    tests.args(["test", "--workspace", "--locked", "--no-fail-fast"]);
    // What is tested is what is packaged.
    match packages::tcmalloc::ensure() {
        Ok(()) => drop(tests.arg(packages::tcmalloc::FEATURE)),
        Err(error) => println!("warning: ringdisk is tested without tcmalloc: {error:#}"),
    }
    // --show-output: a test that can't run here says so and passes, and cargo hides what a passed test says.
    let mut tests = tests
        .args(["--", "--show-output"])
        .env("RUST_LIB_BACKTRACE", "0") // a failed check names its cause; the frames under it are noise
        .stdout(Stdio::piped())
        .spawn()
        .context("starting cargo test")?;
    let totals = Totals::read(tests.stdout.take().context("cargo test has no stdout")?)?;
    let status = tests.wait().context("waiting for cargo test")?;

    println!();
    match totals.skipped.len() {
        0 => println!("Nothing was skipped."),
        count => println!(
            "Skipped here ({count}):\n    {}",
            totals.skipped.join("\n    ")
        ),
    }
    println!(
        "{} passed, {} failed, {} skipped",
        totals.passed - totals.skipped.len(),
        totals.failed,
        totals.skipped.len() + totals.ignored
    );
    ensure!(status.success(), "cargo test failed ({status})");
    ensure!(totals.passed > 0, "cargo test ran no test");
    Ok(())
}

/// What the test programs reported.
#[derive(Default)]
struct Totals {
    passed: usize,
    failed: usize,
    ignored: usize,
    skipped: Vec<String>,
}

impl Totals {
    /// Passes the output on, without what passed tests printed.
    fn read(stdout: ChildStdout) -> Result<Totals> {
        let mut totals = Totals::default();
        let mut in_successes = false;
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.context("reading cargo test's output")?;
            let line = String::from_utf8_lossy(&line);
            if line == "failures:" || line.starts_with("test result: ") {
                in_successes = false;
            } else if line == "successes:" {
                in_successes = true;
            }
            if !in_successes {
                println!("{line}");
            }
            totals.count(&line);
        }
        Ok(totals)
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
                Some((number, "failed")) => self.failed += number,
                Some((number, "ignored")) => self.ignored += number,
                _ => {}
            }
        }
    }
}
