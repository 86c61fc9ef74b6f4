//! Conflicts between disks that one process is to serve.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use thiserror::Error;

use crate::config::sockets;
use crate::config::spec::DiskSpec;

#[derive(Debug, Error)]
pub enum ConflictError {
    #[error(
        "there is a disk '{0}' already, served or absent ('ringdisk list'); choose another name with name=, or end that one ('ringdisk \
         detach {0}')"
    )]
    SameName(String),
    #[error("disks '{0}' and '{1}' have the same socket, {2}; give one of them another")]
    SameSocket(String, String, PathBuf),
}

/// Checks that one process can serve all these disks.
///
/// # Errors
/// Two of them have the same name or the same socket.
pub fn check_conflicts(specs: &[DiskSpec]) -> Result<(), ConflictError> {
    let mut checked = CheckedDisks::default();
    specs.iter().try_for_each(|spec| checked.add(spec))
}

/// Disks that do not conflict with each other.
#[derive(Default)]
pub struct CheckedDisks {
    names: BTreeSet<String>,
    /// The names of the disks by their sockets.
    sockets: BTreeMap<PathBuf, String>,
}

impl CheckedDisks {
    /// Adds a disk.
    ///
    /// # Errors
    /// Another one has the same name or the same socket.
    pub fn add(&mut self, spec: &DiskSpec) -> Result<(), ConflictError> {
        let name = spec.name.clone();
        if !self.names.insert(name.clone()) {
            return Err(ConflictError::SameName(name));
        }
        let path = sockets::path(spec);
        match self.sockets.insert(path.clone(), name.clone()) {
            Some(other) => Err(ConflictError::SameSocket(other, name, path)),
            None => Ok(()),
        }
    }

    /// Whether there is a disk with this name.
    pub fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }
}
