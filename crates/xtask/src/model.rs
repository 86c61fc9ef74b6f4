//! `cargo xtask model`: runs the random tester of the whole program for a given time.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testkit::model::{self, Options};

use crate::{cargo, packages, root};

/// The duration and the seeds
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo xtask model --minutes 60 --jobs 4
  cargo xtask model --only 4711      repeat the case of one seed

A failure is printed with its seed and the shortest list of steps that still fails. The exit code is then 1.")]
pub struct Args {
    /// Duration in minutes
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    minutes: u64,
    /// The first seed; the others follow [default: a different one each time]
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Run only this seed
    #[arg(long, value_name = "NUMBER", conflicts_with = "seed")]
    only: Option<u64>,
    /// The number of concurrent cases
    #[arg(long, value_name = "N", default_value_t = 1)]
    jobs: usize,
    /// Seconds for shortening a failing case
    #[arg(long, value_name = "S", default_value_t = 120)]
    shrink: u64,
    /// Continue after a failure
    #[arg(long)]
    go_on: bool,
    /// Test the release build, without the checks of a debug build
    #[arg(long)]
    release: bool,
    /// Test this program instead of building one
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
}

/// Runs the tester, and fails if it has found an error.
pub fn run(args: &Args) -> Result<()> {
    packages::ensure()?;
    let binary = match &args.program {
        Some(program) => program.canonicalize()?,
        None => build(args.release)?,
    };
    let seed = args.only.or(args.seed).unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |now| now.as_secs()) * 1_000_000
    });
    println!("seed {seed}");
    let report = model::run(&Options {
        binary,
        directory: root()
            .join("target/tmp")
            .canonicalize()
            .unwrap_or_else(|_| root()),
        length: Duration::from_secs(args.minutes * 60),
        seed,
        only: args.only.is_some(),
        jobs: args.jobs,
        shrink: Duration::from_secs(args.shrink),
        go_on: args.go_on,
    })?;
    for skipped in &report.skipped {
        println!("skipped: {skipped}");
    }
    println!("{}", report.summary());
    ensure!(report.findings.is_empty(), "the random tester found errors");
    Ok(())
}

/// Builds ringdisk and returns its path.
fn build(release: bool) -> Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--locked", "-p", "ringdisk"]);
    if release {
        build.arg("--release");
    }
    let status = build.status().context("starting cargo build")?;
    ensure!(status.success(), "ringdisk does not build ({status})");
    let profile = if release { "release" } else { "debug" };
    let path = root().join("target").join(profile).join("ringdisk");
    path.canonicalize()
        .with_context(|| path.display().to_string())
}
