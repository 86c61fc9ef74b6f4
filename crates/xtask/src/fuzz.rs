//! `cargo xtask fuzz`: runs the fuzz targets one after the other.

use crate::root;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// The duration and the targets
#[derive(clap::Args)]
pub struct Args {
    /// Duration for each target in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Only this target
    #[arg(long)]
    target: Option<String>,
}

/// Runs the targets, and fails at the end if one has found an error.
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
            "there is no target {only}; the targets are {}",
            targets.join(", ")
        );
        targets.retain(|target| target == only);
    }
    let (mut failed, mut counts) = (Vec::new(), Vec::new());
    for target in targets {
        println!("fuzz: {target} for {} s", args.seconds);
        let corpus = format!("fuzz/corpus/{target}");
        fs::create_dir_all(root().join(&corpus)).with_context(|| format!("making {corpus}"))?;
        let mut fuzz = Command::new("cargo");
        fuzz.current_dir(root())
            .args(["+nightly", "fuzz", "run", &target, &corpus])
            // cargo-fuzz adds new inputs to the first directory, and does not change the seeds.
            .args([&format!("fuzz/seeds/{target}"), "--"])
            .arg(format!("-max_total_time={}", args.seconds))
            .args(["-max_len=4096", "-print_final_stats=1", "-verbosity=0"]);
        let mut fuzz = fuzz
            .stderr(Stdio::piped())
            .spawn()
            .context("starting cargo fuzz")?;
        let mut executions = 0;
        for line in fuzz
            .stderr
            .take()
            .into_iter()
            .flat_map(|e| BufReader::new(e).lines())
        {
            let line = line.context("reading the fuzzer's output")?;
            if let Some(count) = line.strip_prefix("stat::number_of_executed_units:") {
                executions = count.trim().parse().unwrap_or(0);
            }
            eprintln!("{line}");
        }
        counts.push((target.clone(), executions));
        if !fuzz.wait().context("waiting for cargo fuzz")?.success() {
            failed.push(target);
        }
    }
    println!("\n| target | executions in {} s |\n|---|---|", args.seconds);
    for (target, executions) in &counts {
        println!("| `{target}` | {executions} |");
    }
    let all: u64 = counts.iter().map(|(_, executions)| executions).sum();
    println!("| all | {all} |");
    ensure!(
        failed.is_empty(),
        "{}: found an error; the input is in fuzz/artifacts",
        failed.join(", ")
    );
    Ok(())
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}
