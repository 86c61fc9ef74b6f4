//! Serves the disks of a VM when its manager starts it, and ends that when the VM has gone.

pub mod libvirt;

use clap::{Args as ClapArgs, Subcommand};

use crate::client::CommandResult;

#[derive(ClapArgs)]
pub struct Args {
    #[command(subcommand)]
    manager: Manager,
}

#[derive(Subcommand)]
enum Manager {
    /// What libvirt's hook runs: serves the disks that a domain names in its metadata
    Libvirt(libvirt::Args),
}

/// Does what the manager's step asks for.
///
/// # Errors
/// A disk cannot be served, or is not let go.
pub fn run(args: &Args) -> CommandResult {
    match &args.manager {
        Manager::Libvirt(args) => libvirt::run(args),
    }
}
