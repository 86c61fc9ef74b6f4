//! cargo-deb, which makes the Debian package. It is installed in the cache, and does not replace the user's own.

use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use testkit::vm::cache_dir;

use super::run;
use crate::cargo;

/// The version with which the package was tested.
const VERSION: &str = "3.8.0";

fn folder() -> PathBuf {
    cache_dir().join(format!("cargo-deb-{VERSION}"))
}

/// The path of the program.
///
/// # Errors
/// It is missing; [`ensure`] builds it.
pub fn program() -> Result<PathBuf> {
    let program = folder().join("bin/cargo-deb");
    ensure!(
        program.is_file(),
        "{} is missing; `cargo xtask install` builds it",
        program.display()
    );
    Ok(program)
}

/// Builds it if it is missing. Otherwise this is quick and needs no network.
pub fn ensure() -> Result<()> {
    if program().is_ok() {
        return Ok(());
    }
    println!("building cargo-deb {VERSION} into {}", folder().display());
    let mut install = cargo();
    install
        .args(["install", "cargo-deb", "--locked", "--quiet"])
        .arg(format!("--version={VERSION}"))
        .arg("--root")
        .arg(folder());
    run(&mut install).context("cargo can't build cargo-deb; it needs the network")
}
