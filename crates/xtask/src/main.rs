//! `cargo xtask`: all commands for developers and CI.

mod bench;
mod ceph;
mod ci;
mod compatibility;
mod deb;
mod demo;
mod fuzz;
mod miri;
mod model;
mod packages;
mod release;
mod soak;
mod test;

use clap::Parser;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Commands for developers of ringdisk and for CI
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Xtask {
    /// Compare a disk of ringdisk with QEMU's own virtio-blk in the same guest
    Demo(demo::Args),
    /// Run all tests, including those in real guests
    Test(test::Args),
    /// Compare ringdisk with qemu-storage-daemon, and with fio on the host
    Bench(Box<bench::Args>),
    /// Start or stop a Ceph cluster on the loopback interface
    #[command(subcommand)]
    Ceph(ceph::Args),
    /// Kill, upgrade, reconfigure and load a ringdisk with eight disks for a long time
    Soak(soak::Args),
    /// Compare random operations on all image formats with a model, with kills, power cuts and QEMU's tools
    Model(model::Args),
    /// Fuzz every parser of untrusted bytes; needs a nightly toolchain
    Fuzz(fuzz::Args),
    /// Run tests without system calls under Miri; needs a nightly toolchain with Miri
    Miri,
    /// Build a Debian package of the program, its service and its manual
    Deb(deb::Args),
    /// Make a release: version, change log, packages built in clean roots and tested there, checksums, an SBOM, a signed tag
    Release(release::Args),
    /// Run what CI runs: format, clippy, crate borders, structure, unsafe policy, licences, documents, and the tests
    Ci(ci::Args),
    /// Write docs/compatibility.md from the records of the last `cargo xtask test`
    Compatibility,
    /// Generate the tables of keys in docs/operating/configuration.md
    Reference,
    /// Install the Debian packages that the other commands need
    Install,
}

fn main() -> ExitCode {
    let result = match Xtask::parse() {
        Xtask::Demo(args) => demo::run(&args),
        Xtask::Test(args) => test::run(&args),
        Xtask::Bench(args) => bench::run(*args),
        Xtask::Ceph(args) => ceph::run(&args),
        Xtask::Soak(args) => soak::run(&args),
        Xtask::Model(args) => model::run(&args),
        Xtask::Fuzz(args) => fuzz::run(&args),
        Xtask::Miri => miri::run(),
        Xtask::Deb(args) => deb::run(&args),
        Xtask::Release(args) => release::run(&args),
        Xtask::Ci(args) => ci::run(&args),
        Xtask::Compatibility => compatibility::run(),
        Xtask::Reference => reference(),
        Xtask::Install => packages::ALL.iter().try_for_each(|(ensure, _)| ensure()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// ringdisk has the keys of its configuration, and writes them into the document.
fn reference() -> anyhow::Result<()> {
    const DOCUMENT: &str = "docs/operating/configuration.md";
    let status = cargo()
        .args(["run", "--quiet", "-p", "ringdisk", "--", "manual"])
        .args(["--reference", DOCUMENT])
        .status()?;
    anyhow::ensure!(status.success(), "{DOCUMENT} was not generated");
    Ok(())
}

/// The root of the work tree.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The cargo that runs this program, with the root of the work tree as its directory.
fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(root());
    cargo
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    /// clap checks a command at its first use, and panics if it is invalid.
    #[test]
    fn the_options_of_all_commands_agree() {
        super::Xtask::command().debug_assert();
    }
}
