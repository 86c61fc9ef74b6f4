//! Ceph itself, for a cluster on the loopback interface.

use anyhow::{Result, ensure};
use std::process::Command;
use testkit::ceph::{PROGRAMS, available};
use testkit::vm::find_program;

use super::install;

/// Installs what is missing; quick, and without apt, when nothing is.
pub fn ensure() -> Result<()> {
    let mut packages: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(program, _)| find_program(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    packages.sort();
    packages.dedup();
    if !packages.is_empty() {
        install(&packages)?;
    }
    available()
}

/// The same, and QEMU's own rbd driver to compare with, which is a package of its own.
pub fn ensure_rivals() -> Result<()> {
    ensure()?;
    if !qemu_has_rbd() {
        install(&["qemu-block-extra"])?;
        ensure!(qemu_has_rbd(), "qemu-block-extra has no rbd driver");
    }
    Ok(())
}

/// Whether QEMU can load the driver: it complains of something else then, of an image that can't be there.
fn qemu_has_rbd() -> bool {
    let info = Command::new("qemu-img")
        .args(["info", "rbd:none/none:conf=/nonexistent"])
        .output();
    info.is_ok_and(|info| {
        let said = String::from_utf8_lossy(&info.stderr);
        !said.contains("Unable to load module") && !said.contains("Unknown driver")
    })
}
