//! `cargo xtask fuzz`: every fuzz target for a while.

use crate::root;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::process::{Command, Stdio};

/// How long, and which
#[derive(clap::Args)]
pub struct Args {
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Only this target
    #[arg(long)]
    target: Option<String>,
}

/// Runs the targets one after the other; fails at the end if one has found something.
pub fn run(args: &Args) -> Result<()> {
    if !succeeds(Command::new("cargo").args(["+nightly", "fuzz", "--version"])) {
        bail!(
            "fuzzing needs a nightly toolchain and cargo-fuzz: 'rustup toolchain install nightly' \
             and 'cargo install cargo-fuzz'"
        );
    }
    let mut targets = Vec::new();
    for file in fs::read_dir(root().join("fuzz/fuzz_targets")).context("reading fuzz_targets")? {
        let path = file.context("reading fuzz_targets")?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        targets.push(name.into_owned());
    }
    targets.sort();
    if let Some(only) = &args.target {
        ensure!(
            targets.contains(only),
            "there is no target {only}; there are {}",
            targets.join(", ")
        );
        targets.retain(|target| target == only);
    }
    let mut failed = Vec::new();
    for target in targets {
        println!("fuzz: {target} for {} s", args.seconds);
        let corpus = format!("fuzz/corpus/{target}");
        fs::create_dir_all(root().join(&corpus)).with_context(|| format!("making {corpus}"))?;
        let mut fuzz = Command::new("cargo");
        fuzz.current_dir(root())
            .args(["+nightly", "fuzz", "run", &target, &corpus])
            // What is new goes into the first directory; the seeds stay as they are.
            .args([&format!("fuzz/seeds/{target}"), "--"])
            .arg(format!("-max_total_time={}", args.seconds))
            .args(["-max_len=4096", "-print_final_stats=1", "-verbosity=0"]);
        let status = fuzz.status().context("starting cargo fuzz")?;
        if !status.success() {
            failed.push(target);
        }
    }
    ensure!(
        failed.is_empty(),
        "{}: found something; the input is in fuzz/artifacts",
        failed.join(", ")
    );
    Ok(())
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}
