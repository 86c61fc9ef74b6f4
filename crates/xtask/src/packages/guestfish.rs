//! libguestfs's shell, and the appliance that it boots: this system's programs on the guests' kernel.
//!
//! guestfish would make one itself, of a kernel in /boot. Tests do not need a kernel there.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use testkit::guestfish::{Appliance, appliances};
use testkit::vm::{Kernel, find_program};

use super::{as_root, install, run, succeeds};

/// What [`Appliance`] is made of.
const SUPERMIN: &str = "/usr/lib/x86_64-linux-gnu/guestfs/supermin.d";

/// supermin reads this folder, and does not need anything in it.
const MODULES: &str = "/lib/modules";

/// Installs guestfish and makes the appliance, if either is missing.
pub fn ensure() -> Result<()> {
    let kernel = Kernel::cached()?;
    if find_program("guestfish").is_none() {
        install(&["guestfish"])?;
    }
    if Appliance::find().is_ok() {
        return Ok(());
    }
    let cache = appliances();
    fs::create_dir_all(&cache).with_context(|| format!("making {}", cache.display()))?;
    let folder = tempfile::tempdir_in(&cache).context("making a folder for the appliance")?;

    // An unpacked kernel has no list of its modules' dependencies.
    let modules = folder.path().join("lib/modules");
    fs::create_dir_all(&modules)?;
    run(Command::new("cp")
        .arg("--recursive")
        .args([kernel.modules_folder(), &modules]))?;
    let depmod = find_program("depmod").context("depmod is missing")?;
    run(Command::new(depmod)
        .arg("--basedir")
        .args([folder.path().as_os_str(), kernel.release.as_ref()]))?;
    if !fs::exists(MODULES)? {
        as_root("mkdir", &[MODULES])?;
    }

    println!("making an appliance for guestfish in {}", cache.display());
    let made = folder.path().join("appliance");
    let mut supermin = Command::new("supermin");
    supermin
        .args(["--build", "--copy-kernel", "--format", "ext2"])
        .args(["--host-cpu", "x86_64", SUPERMIN, "-o"])
        .arg(&made)
        .env("SUPERMIN_KERNEL", &kernel.image)
        .env("SUPERMIN_KERNEL_VERSION", &kernel.release)
        .env("SUPERMIN_MODULES", modules.join(&kernel.release));
    ensure!(succeeds(&mut supermin), "{supermin:?} failed");
    // By this name, libguestfs recognises a complete appliance.
    fs::write(made.join("README.fixed"), "Made by cargo xtask install.\n")?;
    let target = Appliance::folder()?;
    fs::rename(&made, &target).with_context(|| format!("making {}", target.display()))?;
    Appliance::find().map(drop)
}
