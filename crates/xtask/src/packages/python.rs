//! Clients for the tests that are packages of Python: each has a virtual environment in the cache, so that neither the
//! system's Python nor the user's is touched.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::process::Command;
use testkit::python::{IMAGEIO, Package, QMP};
use testkit::vm::find_program;

use super::{install, run, succeeds};

/// QEMU's QMP client.
pub fn ensure_qmp() -> Result<()> {
    ensure_package(&QMP)
}

/// oVirt's NBD client, which pip compiles.
pub fn ensure_imageio() -> Result<()> {
    if IMAGEIO.python().is_ok() {
        return Ok(());
    }
    if find_program("python3-config").is_none() || find_program("cc").is_none() {
        install(&["gcc", "libc6-dev", "python3-dev"])?;
    }
    ensure_package(&IMAGEIO)
}

/// Creates the environment if it is missing. If it exists, this is quick and needs no network.
fn ensure_package(package: &Package) -> Result<()> {
    if package.python().is_ok() {
        return Ok(());
    }
    // Debian has a separate package for the part of venv that installs pip.
    if !succeeds(Command::new("python3").args(["-c", "import venv, ensurepip"])) {
        install(&["python3", "python3-venv"])?;
    }
    let (environment, name) = (package.environment(), package.requirement);
    println!("making {} with {name}", environment.display());
    if let Some(parent) = environment.parent() {
        fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
    }
    // --clear replaces a partial environment.
    run(Command::new("python3")
        .args(["-m", "venv", "--clear"])
        .arg(&environment))?;
    let mut pip = Command::new(environment.join("bin/python3"));
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    run(pip.arg(name)).with_context(|| {
        format!("pip can't install {name}; it needs a network with a Python package index")
    })?;
    let made = package.python();
    ensure!(
        made.is_ok(),
        "pip has installed {name}, but it can't be imported"
    );
    Ok(())
}
