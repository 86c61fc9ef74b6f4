//! tcmalloc, with which librados is faster than with the C library's malloc. The package is built with it.

use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;

use super::install;

/// The argument for cargo that links ringdisk with it.
pub const FEATURE: &str = "--features=ringdisk/tcmalloc";

/// The library itself, so that neither the headers nor the symbolic link of a -dev package are needed.
const LIBRARY: &str = "libtcmalloc_minimal.so.4";

/// Debian's package. In later releases, libtcmalloc-minimal4t64 provides it.
pub const PACKAGE: &str = "libtcmalloc-minimal4";

/// Installs it if it is missing. If it is installed, this is quick and does not run apt.
pub fn ensure() -> Result<()> {
    if !is_installed()? {
        install(&[PACKAGE])?;
        ensure!(
            is_installed()?,
            "{PACKAGE} is installed, but cc finds no {LIBRARY}"
        );
    }
    Ok(())
}

/// Whether the linker finds it. `cc` prints its path then, and otherwise the name.
pub fn is_installed() -> Result<bool> {
    let answer = Command::new("cc")
        .arg(format!("-print-file-name={LIBRARY}"))
        .output()
        .context("starting cc")?;
    let found = String::from_utf8_lossy(&answer.stdout).into_owned();
    Ok(Path::new(found.trim()).is_absolute())
}
