//! The NBD clients of Debian releases that users have (see [`testkit::unpacked`]).

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use testkit::unpacked::{LIBNBD, LIBNBD_RELEASES};

use super::unpacked::{Product, ensure_unpacked, write_program};
use super::{output, qemu};

const CLIENTS: Product = Product {
    name: LIBNBD,
    packages: &["libnbd-bin"],
    write_programs,
};

/// Fetches the missing clients and, once a day, newer ones.
///
/// # Errors
/// A release is still missing. The others are available.
pub fn ensure() -> Result<()> {
    let mut missing = Vec::new();
    for name in LIBNBD_RELEASES {
        let fetched = qemu::source(name).and_then(|source| ensure_unpacked(&CLIENTS, source));
        if let Err(error) = fetched {
            missing.push(format!("libnbd of {name}: {error:#}"));
        }
    }
    ensure!(missing.is_empty(), "{}", missing.join("\n"));
    Ok(())
}

fn write_programs(folder: &Path) -> Result<String> {
    fs::create_dir(folder.join("bin")).context("making the folder of programs")?;
    let mut printed = String::new();
    for name in ["nbdinfo", "nbdcopy"] {
        let program = write_program(folder, name, "", "")?;
        printed = output(&program.to_string_lossy(), &["--version"])?;
    }
    // `nbdcopy 1.14.2`, and then the library's version.
    let version = printed.split_whitespace().nth(1);
    Ok(version
        .with_context(|| format!("no version in {printed}"))?
        .to_owned())
}
