//! Clients that are Python packages, each in a virtual environment in the cache.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};

use crate::vm::cache_dir;

/// A package, in the version for which the tests were written.
pub struct Package {
    /// As pip names it, with its version.
    pub requirement: &'static str,
    /// What a program imports.
    pub module: &'static str,
}

/// QEMU's own QMP client.
pub const QMP: Package = Package {
    requirement: "qemu.qmp==0.0.6",
    module: "qemu.qmp",
};

/// oVirt's client for images, with which backup programs read NBD exports.
pub const IMAGEIO: Package = Package {
    requirement: "ovirt-imageio==2.5.1",
    module: "ovirt_imageio._internal.nbd",
};

impl Package {
    /// The folder of the virtual environment; each version of a package has its own.
    pub fn environment(&self) -> PathBuf {
        cache_dir().join("python").join(self.requirement)
    }

    /// A Python interpreter that has the package.
    ///
    /// # Errors
    /// There is none; `cargo xtask install` makes one.
    pub fn python(&self) -> Result<PathBuf> {
        let python = self.environment().join("bin/python3");
        let mut import = Command::new(&python);
        let program = format!("import {}", self.module);
        import.args(["-c", &program]).stderr(Stdio::null());
        ensure!(
            import.status().is_ok_and(|status| status.success()),
            "{} has no {}; `cargo xtask install` makes a Python that has",
            self.environment().display(),
            self.requirement
        );
        Ok(python)
    }
}
