//! Ceph itself, for a cluster on the loopback interface.

use anyhow::Result;
use testkit::ceph::{PROGRAMS, available};
use testkit::vm::find_program;

use super::install;

/// Installs what is missing; quick, and without apt, when nothing is.
pub fn ensure() -> Result<()> {
    let mut packages: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(program, _)| find_program(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    packages.sort();
    packages.dedup();
    if !packages.is_empty() {
        install(&packages)?;
    }
    available()
}
