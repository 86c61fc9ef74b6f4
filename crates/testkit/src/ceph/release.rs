//! Which Ceph a cluster is of: the system's own, or a newer one that is unpacked in the cache.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use super::PROGRAMS;
use crate::unpacked::Unpacked;
use crate::vm::find_program;

/// What the newer one is called in the cache.
pub const PRODUCT: &str = "ceph";

/// The Debian release that it is of.
pub const UNPACKED: &str = "debian-unstable";

/// Its program that starts any other one, such as `ringdisk`, with its libraries.
pub const WITH_LIBRARIES: &str = "with-libraries";

/// A Ceph. The default is the system's own.
#[derive(Clone, Debug, Default)]
pub struct Release {
    unpacked: Option<Unpacked>,
}

impl Release {
    /// The system's own.
    ///
    /// # Errors
    /// It is not installed; the error names the packages that are missing.
    pub fn system() -> Result<Self> {
        let missing: Vec<&str> = PROGRAMS
            .iter()
            .filter(|(program, _)| find_program(program).is_none())
            .map(|(_, package)| *package)
            .collect();
        ensure!(
            missing.is_empty(),
            "Ceph is not installed ({}); `cargo xtask install` installs it",
            missing.join(", ")
        );
        Ok(Self::default())
    }

    /// The newer one.
    ///
    /// # Errors
    /// It is not in the cache.
    pub fn newer() -> Result<Self> {
        let unpacked = Unpacked::find(PRODUCT, UNPACKED)?;
        Ok(Self {
            unpacked: Some(unpacked),
        })
    }

    /// One of Ceph's programs.
    pub fn program(&self, name: &str) -> PathBuf {
        match &self.unpacked {
            Some(unpacked) => unpacked.program(name),
            None => name.into(),
        }
    }

    /// Starts a program that loads librbd, with the one of this Ceph.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        match &self.unpacked {
            Some(unpacked) => {
                let mut command = Command::new(unpacked.program(WITH_LIBRARIES));
                command.arg(program);
                command
            }
            None => Command::new(program),
        }
    }

    /// Where the daemons find what they load, for `[global]` of their configuration.
    pub(super) fn places(&self) -> String {
        let Some(unpacked) = &self.unpacked else {
            return String::new();
        };
        let root = unpacked.folder.join("root/usr");
        let under = |path: &str| root.join(Path::new(path)).display().to_string();
        format!(
            "osd class dir = {}\nplugin dir = {plugins}\nerasure code dir = {plugins}/erasure-code\nmgr module path = {}\n",
            under("lib/x86_64-linux-gnu/rados-classes"),
            under("share/ceph/mgr"),
            plugins = under("lib/x86_64-linux-gnu/ceph"),
        )
    }
}
