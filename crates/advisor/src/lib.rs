//! `ringdisk check`: finds what slows down a VM's disks.
//!
//! An [input](input::read) is a libvirt domain, a QEMU command line, a Proxmox VM or ringdisk's configuration. Each is
//! converted to one [model](model) of disks with effective values and their origins. [Rules](rules) are data and are
//! [evaluated](check::check) on the model. [Fixes](fix::fix) are settings that each front-end writes in its own syntax.
//!
//! The crate is independent of the data path.

pub mod check;
pub mod convert;
mod defaults;
mod disk_keys;
pub mod facts;
pub mod fix;
mod hits;
pub mod input;
mod libvirt;
pub mod measured;
pub mod model;
mod parsed;
mod proxmox;
mod qemu;
pub mod read;
pub mod report;
mod ringdisk;
mod round;
pub mod rules;
pub mod served;
mod setting;
pub mod steps;
mod target;
pub mod text;
mod version;
mod work;

pub use qemu::{has_command as is_qemu, shell as command_line};
pub use version::Version;
