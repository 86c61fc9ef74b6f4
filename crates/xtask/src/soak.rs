//! `cargo xtask soak`: the soak test, for as long as one likes.

use crate::{cargo, packages};
use anyhow::{Context, Result, ensure};

/// How long, and from where.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo xtask soak --minutes 60
  cargo xtask soak --seed 4711       the same random choices again

What goes wrong is printed with the seed; the exit code is 1 then.")]
pub struct Args {
    /// Minutes that it lasts
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    minutes: u64,
    /// Where random choices begin; default: another one each time
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Test the program as it is built for use, and not with the checks of a debug build
    #[arg(long)]
    release: bool,
}

/// Runs it, with what it needs installed first.
pub fn run(args: &Args) -> Result<()> {
    packages::ensure()?;
    let mut test = cargo();
    test.args([
        "test", "--locked", "-p", "ringdisk", "--test", "all", "soak::",
    ]);
    if args.release {
        test.arg("--release");
    }
    test.args(["--", "--nocapture"]);
    test.env("RINGDISK_SOAK_SECONDS", (args.minutes * 60).to_string());
    if let Some(seed) = args.seed {
        test.env("RINGDISK_TEST_SEED", seed.to_string());
    }
    let status = test.status().context("starting cargo test")?;
    ensure!(status.success(), "something went wrong ({status})");
    Ok(())
}
