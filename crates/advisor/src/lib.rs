//! `ringdisk check`: what slows a VM's disk?
//!
//! An [input](input::read) is a libvirt domain, a command line of QEMU, a Proxmox VM or ringdisk's configuration. Each
//! is brought to one [model](model) of disks with effective values and their origins; [rules](rules) are data and are
//! [asked](check::check) of it; [fixes](fix::fix) are settings that every front-end writes in its own syntax.
//!
//! The crate looks from outside: it knows nothing of the data path.

pub mod check;
pub mod convert;
mod defaults;
pub mod facts;
pub mod fix;
pub mod input;
mod libvirt;
pub mod measured;
pub mod model;
mod proxmox;
mod qemu;
pub mod report;
mod ringdisk;
mod round;
pub mod rules;
pub mod steps;
pub mod text;
mod version;
mod work;

pub use qemu::{has_command as is_qemu, shell as command_line};
pub use version::Version;
