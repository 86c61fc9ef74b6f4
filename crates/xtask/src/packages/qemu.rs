//! The QEMU of several Debian releases (see [`testkit::qemu`]).

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use testkit::qemu::{PRODUCT, RELEASES, Release};

use super::unpacked::{Product, Source, ensure_unpacked, write_program};
use super::{codename, output};

/// The packages of every release.
const QEMU: Product = Product {
    name: PRODUCT,
    packages: &[
        "qemu-system-x86",
        "qemu-utils",
        "qemu-block-extra",
        "seabios",
        "ovmf",
    ],
    write_programs,
};

/// The programs that tests may start.
const PROGRAMS: [&str; 5] = [
    "qemu-system-x86_64",
    "qemu-img",
    "qemu-io",
    "qemu-nbd",
    "qemu-storage-daemon",
];

/// The last entry of a release is its newest QEMU.
static SOURCES: [Source; 5] = [
    Source {
        name: "debian-12",
        codename: "bookworm",
        suites: &["bookworm-updates", "bookworm-security", "bookworm"],
    },
    Source {
        name: "debian-12-backports",
        codename: "bookworm",
        suites: &["bookworm", "bookworm-backports"],
    },
    Source {
        name: "debian-13",
        codename: "trixie",
        suites: &["trixie-updates", "trixie-security", "trixie"],
    },
    Source {
        name: "debian-13-backports",
        codename: "trixie",
        suites: &["trixie", "trixie-backports"],
    },
    Source {
        name: "debian-unstable",
        codename: "sid",
        suites: &["sid"],
    },
];

/// Fetches the missing packages of [`RELEASES`] and, once a day, newer ones.
///
/// # Errors
/// A release is still missing. The others are available.
pub fn ensure() -> Result<()> {
    let mut missing = Vec::new();
    for name in RELEASES {
        if let Err(error) = ensure_release(name) {
            missing.push(format!("QEMU of {name}: {error:#}"));
        }
    }
    ensure!(missing.is_empty(), "{}", missing.join("\n"));
    Ok(())
}

/// The newest QEMU that the archives of this system's release offer, backports included.
///
/// # Errors
/// It cannot be fetched, or this system is not in [`SOURCES`].
pub fn newest_of_system() -> Result<Release> {
    let codename = codename()?;
    let source = SOURCES.iter().rfind(|source| source.codename == codename);
    let source = source.with_context(|| format!("there is no known QEMU for {codename}"))?;
    ensure_release(source.name)
}

/// Fetches a release if it is missing or, once a day, if the archives have a newer one.
fn ensure_release(name: &str) -> Result<Release> {
    ensure_unpacked(&QEMU, source(name)?)?;
    Release::find(name)
}

/// Where the packages of a release are.
///
/// # Errors
/// It is not in [`SOURCES`].
pub(super) fn source(name: &str) -> Result<&'static Source> {
    let source = SOURCES.iter().find(|source| source.name == name);
    source.with_context(|| format!("{name} is not a known release"))
}

/// Writes a script for every program, runs them, and returns QEMU's version.
fn write_programs(folder: &Path) -> Result<String> {
    fs::create_dir(folder.join("bin")).context("making the folder of programs")?;
    let mut printed = String::new();
    for name in PROGRAMS {
        // QEMU would look for firmware next to the running program, which is the loader here.
        let firmware = match name {
            "qemu-system-x86_64" => "-L \"$root/usr/share/qemu\" -L \"$root/usr/share/seabios\"",
            _ => "",
        };
        let modules = "export QEMU_MODULE_DIR=\"$root/usr/lib/x86_64-linux-gnu/qemu\"\n";
        let program = write_program(folder, name, modules, firmware)?;
        printed = output(&program.to_string_lossy(), &["--version"])?;
    }
    let version = printed.split_once("version ").map(|(_, rest)| rest);
    let version = version.and_then(|rest| rest.split_whitespace().next());
    Ok(version
        .with_context(|| format!("no version in {printed}"))?
        .to_owned())
}
