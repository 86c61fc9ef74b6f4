//! Programs of other Debian releases, each unpacked in the cache with all its dependencies.
//!
//! `cargo xtask install` and `cargo xtask test` fetch them. A program is a script that starts the real one with the
//! dynamic loader and the libraries of its release; the host needs none of them.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use harness::paths::cache_dir;

/// The file in an unpacked release that contains the program's version and the package's version, in one line.
pub const VERSIONS: &str = "versions";

/// The product with the NBD clients of a release.
pub const LIBNBD: &str = "libnbd";

/// The releases whose NBD clients must work.
pub const LIBNBD_RELEASES: [&str; 2] = ["debian-12", "debian-13"];

/// QEMU's own test program for devices, `qos-test`, and a QEMU that it can drive. Both are built from Debian's source package.
pub const QTEST: &str = "qtest";

/// The release whose sources [`QTEST`] is built from.
pub const QTEST_RELEASE: &str = "debian-12";

/// An unpacked product of a release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unpacked {
    /// The program's version, such as `7.2.22`.
    pub version: String,
    /// Debian's version of the package, such as `1:7.2+dfsg-7+deb12u18+b3`.
    pub package: String,
    /// The folder into which it is unpacked.
    pub folder: PathBuf,
}

impl Unpacked {
    /// Finds a product, such as `qemu`, of the release with this name, such as `debian-12`.
    ///
    /// # Errors
    /// The product is not in the cache. The message says how to fetch it.
    pub fn find(product: &str, name: &str) -> Result<Self> {
        let folder = folder(product, name);
        let versions = fs::read_to_string(folder.join(VERSIONS)).ok();
        let versions = versions
            .as_deref()
            .and_then(|both| both.trim().split_once(' '));
        let (version, package) = versions.with_context(|| {
            format!("the {product} of {name} is not in the cache; `cargo xtask install` fetches it")
        })?;
        Ok(Self {
            version: version.to_owned(),
            package: package.to_owned(),
            folder,
        })
    }

    /// The path of a program.
    pub fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }
}

/// The folder into which a product of a release is unpacked.
pub fn folder(product: &str, name: &str) -> PathBuf {
    cache_dir().join(product).join(name)
}
