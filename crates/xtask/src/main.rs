//! `cargo xtask`: everything a developer or CI runs, as one program.

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
mod soak;
mod test;

use clap::Parser;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// What a developer of ringdisk or CI runs
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Xtask {
    /// Serve a disk to a real guest, and the same guest on QEMU's own virtio-blk, side by side
    Demo(demo::Args),
    /// Run all tests, those in real guests too
    Test(test::Args),
    /// Measure ringdisk beside qemu-storage-daemon and fio on the host
    Bench(Box<bench::Args>),
    /// Start or end a real Ceph cluster on the loopback interface
    #[command(subcommand)]
    Ceph(ceph::Args),
    /// Kill, upgrade, reconfigure and load a ringdisk with eight disks, all at once and for long
    Soak(soak::Args),
    /// Test images of every kind at random against a model, with kills, power cuts and QEMU's tools
    Model(model::Args),
    /// Feed every parser of hostile bytes with such bytes; needs a nightly toolchain
    Fuzz(fuzz::Args),
    /// Run what needs nothing of the system under Miri; needs a nightly toolchain with it
    Miri,
    /// Make a Debian package of the program, its service and its manual
    Deb,
    /// Run what CI runs: format, clippy, crate borders, structure, unsafe policy, licences, documents, and the tests
    Ci(ci::Args),
    /// Write docs/compatibility.md from what the last `cargo xtask test` has run
    Compatibility,
    /// Install what the other commands need, on Debian
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
        Xtask::Deb => deb::run(),
        Xtask::Ci(args) => ci::run(&args),
        Xtask::Compatibility => compatibility::run(),
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

/// The root of the work tree.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The cargo that runs this program, in the root of the work tree.
fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(root());
    cargo
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    /// clap checks a command only when it is used, and then panics.
    #[test]
    fn the_options_of_all_commands_agree() {
        super::Xtask::command().debug_assert();
    }
}
