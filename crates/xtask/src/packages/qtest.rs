//! QEMU's own test of vhost-user-blk servers, built from Debian's source package, which no binary package contains.
//!
//! The test drives a QEMU without a guest, through the accelerator `qtest`. Debian 12's QEMU lacks that, so a small QEMU
//! with the few devices that the test needs is built as well.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use testkit::unpacked::{QTEST, QTEST_RELEASE, Unpacked, VERSIONS, folder};
use testkit::vm::find_program;

use super::unpacked::Apt;
use super::{install, run, succeeds};

/// The suite of the sources.
const SUITE: &str = "bookworm";

/// What the build needs in addition to a compiler.
const PACKAGES: [&str; 7] = [
    "meson",
    "ninja-build",
    "pkg-config",
    "libglib2.0-dev",
    "libpixman-1-dev",
    "libfdt-dev",
    "zlib1g-dev",
];

/// The libraries among them, for pkg-config.
const LIBRARIES: [&str; 3] = ["glib-2.0", "pixman-1", "zlib"];

/// The devices of the small QEMU.
const DEVICES: &str = "CONFIG_I440FX=y\nCONFIG_VIRTIO_PCI=y\nCONFIG_VHOST_USER_BLK=y\n";

/// Archives of firmware that Debian removes from the sources. The build wants them to be there, and does not use them.
const REMOVED: [&str; 8] = [
    "aarch64-code",
    "arm-code",
    "arm-vars",
    "i386-code",
    "i386-secure-code",
    "i386-vars",
    "x86_64-code",
    "x86_64-secure-code",
];

const OPTIONS: [&str; 18] = [
    "--meson=/usr/bin/meson",
    "--ninja=/usr/bin/ninja",
    "--without-default-features",
    "--without-default-devices",
    "--with-devices-x86_64=qtest",
    "--target-list=x86_64-softmmu",
    "--disable-install-blobs",
    "--enable-tools",
    "--enable-vhost-user",
    "--enable-vhost-user-blk-server",
    "--disable-docs",
    "--disable-user",
    "--disable-werror",
    "--disable-tcg",
    "--enable-kvm", // one of the two is demanded
    "--enable-trace-backends=nop",
    "--disable-debug-info",
    "--extra-cflags=-O0", // half the time, and the test is quick anyway
];

const PROGRAMS: [&str; 2] = ["tests/qtest/qos-test", "qemu-system-x86_64"];

/// Builds the programs if they are missing, which takes two minutes on two CPUs.
///
/// # Errors
/// They are missing, and cannot be built.
pub fn ensure() -> Result<()> {
    if Unpacked::find(QTEST, QTEST_RELEASE).is_ok() {
        return Ok(());
    }
    ensure!(
        cfg!(target_arch = "x86_64"),
        "only builds for x86-64 are supported"
    );
    let has_programs = ["meson", "ninja"]
        .map(find_program)
        .iter()
        .all(Option::is_some);
    if !has_programs || !succeeds(Command::new("pkg-config").arg("--exists").args(LIBRARIES)) {
        install(&PACKAGES)?;
    }
    println!("building QEMU's own test of vhost-user-blk servers into the cache");
    let target = folder(QTEST, QTEST_RELEASE);
    let cache = target.parent().context("the cache has no parent folder")?;
    fs::create_dir_all(cache).with_context(|| format!("making {}", cache.display()))?;
    let temporary = tempfile::tempdir_in(cache).context("making a folder for the sources")?;
    let version = build(temporary.path())?;
    let result = temporary.path().join("result");
    fs::create_dir_all(result.join("bin"))?;
    for program in PROGRAMS {
        let path = temporary.path().join("build").join(program);
        let name = path.file_name().context("a program has a name")?;
        fs::rename(&path, result.join("bin").join(name))
            .with_context(|| format!("the build has made no {program}"))?;
    }
    fs::write(result.join(VERSIONS), format!("{version} {version}"))?;
    // Renamed when complete: the cache never has a partial folder.
    fs::rename(&result, &target).with_context(|| format!("making {}", target.display()))
}

/// Builds in a folder, and returns QEMU's version.
fn build(folder: &Path) -> Result<String> {
    let apt = Apt::open()?;
    let sources = apt.source_packages(&[SUITE.to_owned()])?;
    apt.get(&sources, &["update"])?;
    let archive = apt.source_archive(&sources, "qemu", folder)?;
    drop(apt);
    let source = folder.join("source");
    fs::create_dir(&source)?;
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(&archive);
    tar.arg("--directory").arg(&source);
    run(tar.args(["--strip-components=1", "--no-same-owner"]))?;
    for name in REMOVED {
        fs::write(source.join(format!("pc-bios/edk2-{name}.fd.bz2")), "")?;
    }
    fs::write(
        source.join("configs/devices/x86_64-softmmu/qtest.mak"),
        DEVICES,
    )?;
    let build = folder.join("build");
    fs::create_dir(&build)?;
    // Debian's own Python, which has what meson needs.
    let in_build = |program: &Path| {
        let mut command = Command::new(program);
        command.current_dir(&build).env("PATH", "/usr/bin:/bin");
        command
    };
    log(in_build(&source.join("configure")).args(OPTIONS))?;
    log(in_build(Path::new("/usr/bin/ninja")).args(PROGRAMS))?;
    let version = fs::read_to_string(source.join("VERSION")).context("reading QEMU's version")?;
    Ok(version.trim().to_owned())
}

/// Runs a command whose output is only of interest if it fails.
fn log(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("starting {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    let lines: Vec<_> = text.lines().collect();
    let end = lines[lines.len().saturating_sub(12)..].join("\n");
    ensure!(
        output.status.success(),
        "{:?}: {end}",
        command.get_program()
    );
    Ok(())
}
