//! Conflicts between disks that one process is to serve.

use std::collections::BTreeMap;
use std::path::PathBuf;

use thiserror::Error;

use crate::config::sockets;
use crate::config::spec::DiskSpec;

#[derive(Debug, Error)]
pub enum ConflictError {
    #[error("there is a disk '{0}' already; choose another name with name=")]
    SameName(String),
    #[error("disks '{0}' and '{1}' have the same socket, {2}")]
    SameSocket(String, String, PathBuf),
}

/// Checks that one process can serve all these disks.
///
/// # Errors
/// Two of them have the same name or the same socket.
pub fn check_conflicts(specs: &[DiskSpec]) -> Result<(), ConflictError> {
    let mut sockets: BTreeMap<PathBuf, &str> = BTreeMap::new();
    for (i, spec) in specs.iter().enumerate() {
        if specs[..i].iter().any(|other| other.name == spec.name) {
            return Err(ConflictError::SameName(spec.name.clone()));
        }
        let path = sockets::path(spec);
        if let Some(other) = sockets.insert(path.clone(), &spec.name) {
            let (other, name) = (other.to_owned(), spec.name.clone());
            return Err(ConflictError::SameSocket(other, name, path));
        }
    }
    Ok(())
}
