//! libguestfs's shell, which boots a small system (an appliance) to look into disks.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use harness::initramfs::Kernel;
use harness::paths::{cache_dir, find_program};
use harness::qemu::Accel;

use crate::vm::accel;

/// The system that guestfish boots.
#[derive(Debug)]
pub struct Appliance(PathBuf);

/// The folder in the cache in which `cargo xtask install` makes appliances.
pub fn appliances() -> PathBuf {
    cache_dir().join("guestfish")
}

impl Appliance {
    /// The folder of the appliance with the kernel of the guests.
    ///
    /// # Errors
    /// There is no kernel for guests.
    pub fn folder() -> Result<PathBuf> {
        Ok(appliances().join(Kernel::cached()?.release))
    }

    /// The appliance with the kernel of the guests.
    ///
    /// # Errors
    /// It is missing, or guestfish is.
    pub fn find() -> Result<Self> {
        find_program("guestfish")
            .context("there is no guestfish; `cargo xtask install` installs it")?;
        let folder = Self::folder()?;
        ensure!(
            folder.join("README.fixed").is_file(),
            "guestfish has no appliance in {}; `cargo xtask install` makes one",
            folder.display()
        );
        Ok(Self(folder))
    }

    /// A guestfish that reads commands from its standard input.
    ///
    /// # Errors
    /// It is not known whether guests can use KVM.
    pub fn guestfish(&self) -> Result<Command> {
        let mut guestfish = Command::new("guestfish");
        guestfish
            .env("LIBGUESTFS_PATH", &self.0)
            .env("LIBGUESTFS_BACKEND", "direct");
        if accel()? == Accel::Tcg {
            guestfish.env("LIBGUESTFS_BACKEND_SETTINGS", "force_tcg");
        }
        Ok(guestfish)
    }
}
