//! A disk with a small Debian and systemd, on which a test installs the package as a user would.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::PathBuf;
use testkit::vm::{cache_dir, find_program};

use super::{as_root, codename, install, mirror, output, tcmalloc};

/// Increase it when the contents of the disk change.
const VERSION: u32 = 1;

/// In addition to those that every Debian has.
const PACKAGES: [&str; 3] = ["systemd", "udev", tcmalloc::PACKAGE];

/// The disk: a raw file with an ext4 file system. It has the same release as this host, so that it runs programs that
/// were built here.
///
/// After booting, the system unpacks the archive on the disk with the serial `script`, and runs the archive's `script.sh`
/// with `sh -eu`. As in [`testkit::vm`], the output goes to the second serial port and ends with `vm-exit: STATUS`.
///
/// # Errors
/// It is missing; [`ensure`] makes it.
pub fn disk() -> Result<PathBuf> {
    let disk = path()?;
    ensure!(
        disk.is_file(),
        "{} is missing; `cargo xtask install` makes it",
        disk.display()
    );
    Ok(disk)
}

fn path() -> Result<PathBuf> {
    let name = format!("{}-{VERSION}.raw", codename()?);
    Ok(cache_dir().join("debian").join(name))
}

/// Makes it if it is missing. Otherwise this is quick and needs no network.
pub fn ensure() -> Result<()> {
    if disk().is_ok() {
        return Ok(());
    }
    let (codename, target) = (codename()?, path()?);
    if find_program("debootstrap").is_none() {
        install(&["debootstrap"])?;
    }
    let mirror = mirror(&codename)?
        .with_context(|| format!("apt has no mirror of {codename} in its sources"))?;
    println!("making {} from {mirror}", target.display());
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    let owner = output("id", &["-u"])?;
    let (packages, target) = (PACKAGES.join(","), target.display().to_string());
    let script = include_str!("debian.sh");
    as_root(
        "sh",
        &[
            "-euc",
            script,
            "debian.sh",
            &codename,
            &mirror,
            &packages,
            &target,
            owner.trim(),
        ],
    )
    .context("debootstrap failed; it needs root and a network with a Debian mirror")?;
    disk().map(drop)
}
