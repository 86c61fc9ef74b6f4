//! `cargo xtask miri`: what needs nothing of the system, run by an interpreter that sees undefined behaviour and tries
//! many interleavings of threads.

use crate::root;
use anyhow::{Result, ensure};
use std::process::{Command, Stdio};

/// Crates, and the tests of each that are run.
const TESTS: &[(&str, &[&str])] = &[
    ("datapath", &["slot::", "histogram::"]),
    ("image", &["qcow2::pins::", "qcow2::l1::", "qcow2::cache::"]),
];

/// Threads are scheduled in so many ways.
const SEEDS: u32 = 4;

/// Runs them, or says why not.
pub fn run() -> Result<()> {
    let mut version = Command::new("cargo");
    version.args(["+nightly", "miri", "--version"]);
    let quiet = version.stdout(Stdio::null()).stderr(Stdio::null());
    if !quiet.status().is_ok_and(|status| status.success()) {
        println!(
            "skipped: miri: there is no nightly toolchain with it; 'rustup toolchain install nightly -c miri'"
        );
        return Ok(());
    }
    for (package, tests) in TESTS {
        let mut miri = Command::new("cargo");
        miri.current_dir(root())
            .env("MIRIFLAGS", format!("-Zmiri-many-seeds=0..{SEEDS}"))
            // It has one of its own, so that nothing else is built anew.
            .args(["+nightly", "miri", "test", "--locked", "--target-dir"])
            .args(["target/miri", "-p", package, "--lib", "--"])
            .args(*tests);
        ensure!(
            miri.status()?.success(),
            "Miri found something in {package}"
        );
    }
    Ok(())
}
