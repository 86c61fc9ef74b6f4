//! A small Debian with systemd on a disk of its own: where the package is installed as it would be by a user.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::PathBuf;
use testkit::vm::{cache_dir, find_program};

use super::{as_root, codename, install, mirror, output, tcmalloc};

/// Changes whenever what is made does.
const VERSION: u32 = 1;

/// Besides those that no Debian is without.
const PACKAGES: [&str; 3] = ["systemd", "udev", tcmalloc::PACKAGE];

/// The disk, a raw file with an ext4 file system, of this host's release: programs that were built here run there. When it
/// has booted, it unpacks the archive that the disk with the serial `script` is, and runs its `script.sh` with `sh -eu`;
/// as in [`testkit::vm`], what that prints goes to the second serial port, and `vm-exit: STATUS` in the end.
///
/// # Errors
/// It is not there; [`ensure`] makes it.
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

/// Makes it if it is missing; quick, and without network, when it is there.
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
