//! The bill of materials (CycloneDX) of a release, by cargo-cyclonedx, which is installed in the cache.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testkit::vm::cache_dir;

use super::run;
use crate::{cargo, root};

/// The version with which this was tested.
const VERSION: &str = "0.5.9";

/// Writes the bill of the program into a directory.
///
/// # Errors
/// cargo-cyclonedx cannot be built, or fails.
pub fn write(to: &Path, version: &str) -> Result<PathBuf> {
    let folder = cache_dir().join(format!("cargo-cyclonedx-{VERSION}"));
    let program = folder.join("bin/cargo-cyclonedx");
    if !program.is_file() {
        println!(
            "building cargo-cyclonedx {VERSION} into {}",
            folder.display()
        );
        let mut install = cargo();
        install.args(["install", "cargo-cyclonedx", "--locked", "--quiet"]);
        install
            .arg(format!("--version={VERSION}"))
            .arg("--root")
            .arg(&folder);
        run(&mut install).context("cargo can't build cargo-cyclonedx; it needs the network")?;
    }
    // It writes beside the manifest of each crate.
    let name = format!("ringdisk-{version}.cdx");
    let mut bill = std::process::Command::new(&program);
    bill.current_dir(root());
    bill.args([
        "cyclonedx",
        "--format=json",
        "--spec-version=1.5",
        "--override-filename",
        &name,
    ]);
    bill.arg("--manifest-path").arg("crates/daemon/Cargo.toml");
    run(&mut bill)?;
    let file = format!("{name}.json");
    let target = to.join(&file);
    let mut found = false;
    for entry in fs::read_dir(root().join("crates")).context("reading crates")? {
        let written = entry.context("reading crates")?.path().join(&file);
        if !written.is_file() {
            continue;
        }
        if written
            .parent()
            .is_some_and(|folder| folder.ends_with("daemon"))
        {
            fs::copy(&written, &target).with_context(|| format!("writing {}", target.display()))?;
            found = true;
        }
        fs::remove_file(&written).with_context(|| format!("removing {}", written.display()))?;
    }
    found
        .then_some(target)
        .context("cargo-cyclonedx wrote no bill of the program")
}
