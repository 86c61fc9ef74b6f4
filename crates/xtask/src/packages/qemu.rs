//! The QEMU of several Debian releases (see [`testkit::qemu`]).

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use testkit::qemu::{PRODUCT, RELEASES, Release};

use super::unpacked::{Product, Source, ensure_unpacked};
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
const SOURCES: [Source; 5] = [
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
    let source = SOURCES.iter().find(|source| source.name == name);
    let source = source.with_context(|| format!("{name} is not a known release"))?;
    ensure_unpacked(&QEMU, source)?;
    Release::find(name)
}

/// Writes a script for every program, runs them, and returns QEMU's version.
fn write_programs(folder: &Path) -> Result<String> {
    let programs = folder.join("bin");
    fs::create_dir(&programs).context("making the folder of programs")?;
    let mut printed = String::new();
    for name in PROGRAMS {
        // QEMU would look for firmware next to the running program, which is the loader here.
        let firmware = match name {
            "qemu-system-x86_64" => "-L \"$root/usr/share/qemu\" -L \"$root/usr/share/seabios\"",
            _ => "",
        };
        let script = format!(
            "#!/bin/sh\n\
             root=${{0%/*}}/../root\n\
             for libraries in \"$root/usr/lib/x86_64-linux-gnu\" \"$root/lib/x86_64-linux-gnu\"; do\n\
             \x20   [ ! -e \"$libraries/ld-linux-x86-64.so.2\" ] || loader=$libraries/ld-linux-x86-64.so.2\n\
             done\n\
             export QEMU_MODULE_DIR=\"$root/usr/lib/x86_64-linux-gnu/qemu\"\n\
             exec \"$loader\" --argv0 {name} --library-path \\\n\
             \x20   \"$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu\" \\\n\
             \x20   \"$root/usr/bin/{name}\" {firmware} \"$@\"\n"
        );
        let program = programs.join(name);
        fs::write(&program, script)?;
        fs::set_permissions(&program, Permissions::from_mode(0o755))?;
        printed = output(&program.to_string_lossy(), &["--version"])?;
    }
    let version = printed.split_once("version ").map(|(_, rest)| rest);
    let version = version.and_then(|rest| rest.split_whitespace().next());
    Ok(version
        .with_context(|| format!("no version in {printed}"))?
        .to_owned())
}
