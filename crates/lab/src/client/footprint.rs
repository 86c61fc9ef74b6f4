//! The memory and descriptors of a process.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Memory and descriptors of a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Footprint {
    /// Memory that no other process shares.
    pub private_kib: f64,
    /// Open descriptors by kind.
    pub descriptors: BTreeMap<String, usize>,
}

impl Footprint {
    /// Reads the footprint of a process.
    ///
    /// # Errors
    /// The process has ended, or belongs to another user.
    pub fn of(pid: u32) -> Result<Footprint> {
        let dir = PathBuf::from(format!("/proc/{pid}"));
        let rollup = dir.join("smaps_rollup");
        let rollup =
            fs::read_to_string(&rollup).with_context(|| format!("reading {}", rollup.display()))?;
        let kib = |name: &str| -> f64 {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
            number.unwrap_or(0.0)
        };
        let open = dir.join("fd");
        let open = fs::read_dir(&open).with_context(|| format!("reading {}", open.display()))?;
        let mut descriptors = BTreeMap::new();
        for entry in open.flatten() {
            if let Ok(target) = fs::read_link(entry.path()) {
                *descriptors.entry(kind(&target)).or_insert(0) += 1;
            }
        }
        Ok(Footprint {
            private_kib: kib("Private_Clean:") + kib("Private_Dirty:"),
            descriptors,
        })
    }

    /// The number of open descriptors.
    pub fn open(&self) -> usize {
        self.descriptors.values().sum()
    }
}

/// The kind of a descriptor, from the target of its link in `/proc`.
fn kind(target: &Path) -> String {
    let text = target.to_string_lossy();
    match text.strip_prefix("anon_inode:") {
        Some(kind) => kind.trim_matches(['[', ']']).to_owned(),
        None if text.starts_with("socket:") => "socket".into(),
        None if text.starts_with("pipe:") => "pipe".into(),
        None if text.starts_with("/memfd:") => "memfd".into(),
        None => "file".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_counted_by_kind() {
        let kinds = [
            "anon_inode:[eventfd]",
            "socket:[123]",
            "/memfd:mem (deleted)",
            "/var/disk.raw",
        ];
        let kinds = kinds.map(|target| kind(Path::new(target)));
        assert_eq!(kinds, ["eventfd", "socket", "memfd", "file"]);
        let own = Footprint::of(std::process::id()).unwrap();
        assert!(own.private_kib > 0.0 && own.open() >= 3, "{own:?}");
    }
}
