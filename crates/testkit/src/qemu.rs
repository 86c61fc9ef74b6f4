//! The QEMU of several Debian releases, each unpacked in the cache with its libraries and firmware.
//!
//! `cargo xtask install` and `cargo xtask test` fetch them. A program of a release is a script that starts the real
//! one with that release's dynamic loader, libraries, modules and firmware; the host needs none of them.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use initramfs::cache_dir;

/// The releases that the tests run on, oldest QEMU first.
pub const RELEASES: [&str; 4] = [
    "debian-12",
    "debian-12-backports",
    "debian-13",
    "debian-unstable",
];

/// The file in an unpacked release with QEMU's version and the package's, in one line.
pub const VERSIONS: &str = "versions";

/// An unpacked QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// One of [`RELEASES`].
    pub name: String,
    /// QEMU's version, such as `7.2.22`.
    pub version: String,
    /// Debian's version of the package, such as `1:7.2+dfsg-7+deb12u18+b3`.
    pub package: String,
    folder: PathBuf,
}

impl Release {
    /// The release with this name.
    ///
    /// # Errors
    /// It is not in the cache. The message says how to fetch it.
    pub fn find(name: &str) -> Result<Self> {
        let folder = folder(name);
        let versions = fs::read_to_string(folder.join(VERSIONS)).ok();
        let versions = versions
            .as_deref()
            .and_then(|both| both.trim().split_once(' '));
        let (version, package) = versions.with_context(|| {
            format!("the QEMU of {name} is not in the cache; `cargo xtask install` fetches it")
        })?;
        Ok(Self {
            name: name.to_owned(),
            version: version.to_owned(),
            package: package.to_owned(),
            folder,
        })
    }

    /// The path of `qemu-system-x86_64`, `qemu-img`, `qemu-io`, `qemu-nbd` or `qemu-storage-daemon`.
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs().join(name)
    }

    /// The folder of the programs, to be put in front of `PATH`.
    pub fn programs(&self) -> PathBuf {
        self.folder.join("bin")
    }

    /// OVMF for guests without secure boot: the code, and a template of its variables, which a guest writes to.
    pub fn ovmf(&self) -> [PathBuf; 2] {
        let files = ["OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"];
        files.map(|file| self.folder.join("root/usr/share/OVMF").join(file))
    }
}

/// Where the release with this name is unpacked.
pub fn folder(name: &str) -> PathBuf {
    cache_dir().join("qemu").join(name)
}
