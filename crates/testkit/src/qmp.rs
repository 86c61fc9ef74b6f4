//! QEMU's own QMP client, the Python package `qemu.qmp`, in a virtual environment in the cache.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};

use crate::vm::cache_dir;

/// The package, in the version for which the tests were written.
pub const PACKAGE: &str = "qemu.qmp==0.0.6";

/// The folder of the virtual environment; each version of the package has its own.
pub fn environment() -> PathBuf {
    cache_dir().join("python").join(PACKAGE)
}

/// A Python interpreter that has the package.
///
/// # Errors
/// There is none; `cargo xtask install` makes one.
pub fn python() -> Result<PathBuf> {
    let python = environment().join("bin/python3");
    let mut import = Command::new(&python);
    import.args(["-c", "import qemu.qmp"]).stderr(Stdio::null());
    ensure!(
        import.status().is_ok_and(|status| status.success()),
        "{} has no {PACKAGE}; `cargo xtask install` makes a Python that has",
        environment().display()
    );
    Ok(python)
}
