//! Ceph, for a cluster on the loopback interface: the system's packages, and a newer release in the cache.

use anyhow::{Context, Result, ensure};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use testkit::ceph::{PRODUCT, PROGRAMS, Release, UNPACKED, WITH_LIBRARIES};
use testkit::vm::find_program;

use super::unpacked::{Product, Source, ensure_unpacked};
use super::{install, output};

const CEPH: Product = Product {
    name: PRODUCT,
    packages: &[
        "ceph-osd",
        "ceph-mon",
        "ceph-mgr",
        "ceph-common",
        "librbd1",
        "libtcmalloc-minimal4t64",
    ],
    write_programs,
};

const SOURCE: Source = Source {
    name: UNPACKED,
    codename: "sid",
    suites: &["sid"],
};

/// Fetches the newer release.
pub fn ensure_newer() -> Result<()> {
    ensure_unpacked(&CEPH, &SOURCE)
}

/// Writes a script for every program, and one that starts any other program with the same libraries.
fn write_programs(folder: &Path) -> Result<String> {
    let programs = folder.join("bin");
    fs::create_dir(&programs).context("making the folder of programs")?;
    let python = "export PYTHONHOME=\"$root/usr\"\n";
    let write = |name: &str, setting: &str, started: &str| {
        let script = format!(
            "#!/bin/sh\n\
             root=${{0%/*}}/../root\n\
             libraries=\"$root/usr/lib/x86_64-linux-gnu\"\n\
             {setting}exec \"$libraries/ld-linux-x86-64.so.2\" --library-path \"$libraries:$libraries/ceph\" \\\n\
             \x20   {started} \"$@\"\n"
        );
        let program = programs.join(name);
        fs::write(&program, script)?;
        fs::set_permissions(&program, Permissions::from_mode(0o755))
    };
    write(WITH_LIBRARIES, "", "")?;
    for (name, _) in PROGRAMS {
        let program = match *name {
            "ceph" => "\"$root/usr/bin/python3\" \"$root/usr/bin/ceph\"".to_owned(),
            name => format!("--argv0 {name} \"$root/usr/bin/{name}\""),
        };
        write(name, python, &program)?;
    }
    let printed = output(&programs.join("rbd").to_string_lossy(), &["--version"])?;
    let version = printed.split_whitespace().nth(2);
    Ok(version
        .with_context(|| format!("no version in {printed}"))?
        .to_owned())
}

/// Installs what is missing. If nothing is missing, this is quick and does not run apt.
pub fn ensure() -> Result<()> {
    let mut packages: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(program, _)| find_program(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    packages.sort();
    packages.dedup();
    // QEMU's own driver is a package apart.
    if !qemu_has_rbd() {
        packages.push("qemu-block-extra");
    }
    if !packages.is_empty() {
        install(&packages)?;
        ensure!(qemu_has_rbd(), "qemu-block-extra has no rbd driver");
    }
    Release::system().map(drop)
}

/// Whether QEMU can load the driver: it complains of something else then, of an image that can't be there.
fn qemu_has_rbd() -> bool {
    let info = Command::new("qemu-img")
        .args(["info", "rbd:none/none:conf=/nonexistent"])
        .output();
    info.is_ok_and(|info| {
        let said = String::from_utf8_lossy(&info.stderr);
        !said.contains("Unable to load module") && !said.contains("Unknown driver")
    })
}
