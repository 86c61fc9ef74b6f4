//! QEMU's own QMP client for the tests of the control socket: a package of Python, in a virtual environment in the
//! cache, so that neither the system's Python nor the user's is touched.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::process::Command;
use testkit::qmp::{PACKAGE, environment, python};

use super::{install, run, succeeds};

/// Creates the environment if it is missing. If it exists, this is quick and needs no network.
pub fn ensure() -> Result<()> {
    if python().is_ok() {
        return Ok(());
    }
    // Debian has a separate package for the part of venv that installs pip.
    if !succeeds(Command::new("python3").args(["-c", "import venv, ensurepip"])) {
        install(&["python3", "python3-venv"])?;
    }
    let environment = environment();
    println!("making {} with {PACKAGE}", environment.display());
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
    run(pip.arg(PACKAGE)).with_context(|| {
        format!("pip can't install {PACKAGE}; it needs a network with a Python package index")
    })?;
    let made = python();
    ensure!(
        made.is_ok(),
        "pip has installed {PACKAGE}, but it can't be imported"
    );
    Ok(())
}
