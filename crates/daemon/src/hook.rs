//! Serves the disks of a VM when its manager starts it, and ends that when the VM has gone.

pub mod disks;
pub mod host;
pub mod libvirt;
pub mod proxmox;

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
    /// What a VM's hookscript runs in Proxmox VE: serves the disks that 'ringdisk proxmox enable' has given to ringdisk
    Proxmox(proxmox::Args),
    /// What the script of vzdump runs: makes a backup job fail that lacks disks of a VM because ringdisk serves them
    Vzdump(proxmox::VzdumpArgs),
}

/// Does what the manager's step asks for.
///
/// # Errors
/// A disk cannot be served, or is not let go.
pub fn run(args: &Args) -> CommandResult {
    match &args.manager {
        Manager::Libvirt(args) => libvirt::run(args),
        Manager::Proxmox(args) => proxmox::run(args),
        Manager::Vzdump(args) => proxmox::vzdump(args),
    }
}
