//! The Ceph release of a cluster: the system's own, or a newer one that is unpacked in the cache.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use super::PROGRAMS;
use crate::unpacked::Unpacked;
use crate::vm::find_program;

/// The name of the newer Ceph in the cache.
pub const PRODUCT: &str = "ceph";

/// The Debian release of the newer Ceph.
pub const UNPACKED: &str = "debian-unstable";

/// The program in the unpacked release that starts another program, such as `ringdisk`, with the release's libraries.
pub const WITH_LIBRARIES: &str = "with-libraries";

/// A Ceph release. The default is the system's own.
#[derive(Clone, Debug, Default)]
pub struct Release {
    unpacked: Option<Unpacked>,
}

impl Release {
    /// The system's own Ceph.
    ///
    /// # Errors
    /// Ceph is not installed; the error names the missing packages.
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

    /// The newer Ceph.
    ///
    /// # Errors
    /// It is not in the cache.
    pub fn newer() -> Result<Self> {
        let unpacked = Unpacked::find(PRODUCT, UNPACKED)?;
        Ok(Self {
            unpacked: Some(unpacked),
        })
    }

    /// The path of one of Ceph's programs.
    pub fn program(&self, name: &str) -> PathBuf {
        match &self.unpacked {
            Some(unpacked) => unpacked.program(name),
            None => name.into(),
        }
    }

    /// Makes a command for a program that loads librbd, which is then the one of this release.
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

    /// Lines for `[global]` of the configuration: the paths of what the daemons load.
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
