//! tcmalloc, with which librados is faster than with the C library's malloc. The package is built with it.

use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;

use super::install;

/// For cargo, with which ringdisk is linked with it.
pub const FEATURE: &str = "--features=ringdisk/tcmalloc";

/// What it is linked with: the library itself, so that no header or link of a -dev package is needed.
const LIBRARY: &str = "libtcmalloc_minimal.so.4";

/// Debian's package of it; where that is called libtcmalloc-minimal4t64, it provides this.
pub const PACKAGE: &str = "libtcmalloc-minimal4";

/// Installs it if it is missing. If it is installed, this is quick and does not run apt.
pub fn ensure() -> Result<()> {
    if !is_there()? {
        install(&[PACKAGE])?;
        ensure!(
            is_there()?,
            "{PACKAGE} is installed, but cc finds no {LIBRARY}"
        );
    }
    Ok(())
}

/// Whether the linker finds it: then it has a path, and else it is the name again.
pub fn is_there() -> Result<bool> {
    let asked = Command::new("cc")
        .arg(format!("-print-file-name={LIBRARY}"))
        .output()
        .context("starting cc")?;
    let found = String::from_utf8_lossy(&asked.stdout).into_owned();
    Ok(Path::new(found.trim()).is_absolute())
}
