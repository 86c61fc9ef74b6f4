//! `cargo xtask miri`: runs tests without system calls under Miri, which detects undefined behaviour and tries many
//! interleavings of threads.

use crate::root;
use anyhow::{Result, ensure};
use std::process::{Command, Stdio};

/// The tests of each crate to run.
const TESTS: &[(&str, &[&str])] = &[
    ("datapath", &["slot::", "histogram::"]),
    ("image", &["qcow2::pins::", "qcow2::l1::", "qcow2::cache::"]),
];

/// The number of schedules to try.
const SEEDS: u32 = 4;

/// Runs the tests, or prints why they are skipped.
pub fn run() -> Result<()> {
    let mut version = Command::new("cargo");
    version.args(["+nightly", "miri", "--version"]);
    let quiet = version.stdout(Stdio::null()).stderr(Stdio::null());
    if !quiet.status().is_ok_and(|status| status.success()) {
        println!(
            "skipped: miri: no nightly toolchain with Miri; run 'rustup toolchain install nightly -c miri'"
        );
        return Ok(());
    }
    for (package, tests) in TESTS {
        let mut miri = Command::new("cargo");
        miri.current_dir(root())
            .env("MIRIFLAGS", format!("-Zmiri-many-seeds=0..{SEEDS}"))
            // A separate target directory, because its builds would replace the others.
            .args(["+nightly", "miri", "test", "--locked", "--target-dir"])
            .args(["target/miri", "-p", package, "--lib", "--"])
            .args(*tests);
        ensure!(miri.status()?.success(), "Miri found an error in {package}");
    }
    Ok(())
}
