//! QEMU from several Debian releases, each [unpacked](crate::unpacked) in the cache with its libraries, modules and
//! firmware.

use std::path::PathBuf;

use anyhow::Result;

use crate::unpacked::Unpacked;

/// The name of QEMU in the cache.
pub const PRODUCT: &str = "qemu";

/// The releases that the tests run on, oldest QEMU first.
pub const RELEASES: [&str; 4] = [
    "debian-12",
    "debian-12-backports",
    "debian-13",
    "debian-unstable",
];

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
    /// Finds the release with this name.
    ///
    /// # Errors
    /// The release is not in the cache. The message says how to fetch it.
    pub fn find(name: &str) -> Result<Self> {
        let Unpacked {
            version,
            package,
            folder,
        } = Unpacked::find(PRODUCT, name)?;
        Ok(Self {
            name: name.to_owned(),
            version,
            package,
            folder,
        })
    }

    /// The path of `qemu-system-x86_64`, `qemu-img`, `qemu-io`, `qemu-nbd` or `qemu-storage-daemon`.
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs().join(name)
    }

    /// The folder of the programs, for the front of `PATH`.
    pub fn programs(&self) -> PathBuf {
        self.folder.join("bin")
    }

    /// OVMF for guests without secure boot: the code, and a template of the variables, to which a guest writes.
    pub fn ovmf(&self) -> [PathBuf; 2] {
        let files = ["OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"];
        files.map(|file| self.folder.join("root/usr/share/OVMF").join(file))
    }
}
