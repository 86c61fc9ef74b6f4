//! `cargo xtask soak`: runs the soak tests for a given time.

use crate::{cargo, packages};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;

/// The duration and the random seed
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo xtask soak --minutes 60
  cargo xtask soak --seed 4711       repeat the same random choices
  cargo xtask soak --only 4711       repeat one case of the random operations

Two tests share the time: one does everything at once; the other compares random sequences of operations with a model of
the disks that are served, listed and stored in the state. A failure is printed with the seed. The exit code is then 1.")]
pub struct Args {
    /// Duration in minutes
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    minutes: u64,
    /// The random seed [default: a different one each time]
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Run only this case of random operations
    #[arg(long, value_name = "NUMBER", conflicts_with = "seed")]
    only: Option<u64>,
    /// Run only the random sequences of operations
    #[arg(long)]
    operations: bool,
    /// Seconds for removing steps from a failing case
    #[arg(long, value_name = "S", default_value_t = 300)]
    shrink: u64,
    /// Test the release build, without the checks of a debug build
    #[arg(long)]
    release: bool,
    /// Test this program instead of building one
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
}

/// Installs what the tests need, and runs them.
pub fn run(args: &Args) -> Result<()> {
    packages::ensure()?;
    let (tests, seconds) = if args.operations || args.only.is_some() {
        ("soak::operations", args.minutes * 60)
    } else {
        ("soak::", args.minutes * 30)
    };
    let mut test = cargo();
    test.args(["test", "--locked", "-p", "ringdisk", "--test", "all", tests]);
    if args.release {
        test.arg("--release");
    }
    test.args(["--", "--nocapture", "--test-threads=1"]);
    test.env("RINGDISK_SOAK_SECONDS", seconds.to_string());
    test.env("RINGDISK_SOAK_SHRINK_SECONDS", args.shrink.to_string());
    if let Some(seed) = args.only.or(args.seed) {
        test.env("RINGDISK_TEST_SEED", seed.to_string());
    }
    if args.only.is_some() {
        test.env("RINGDISK_SOAK_ONLY", "1");
    }
    if let Some(program) = &args.program {
        test.env("RINGDISK_SOAK_PROGRAM", program.canonicalize()?);
    }
    let status = test.status().context("starting cargo test")?;
    ensure!(status.success(), "the soak tests failed ({status})");
    Ok(())
}
