//! Disks that are images in a Ceph cluster.
//!
//! librbd and librados are loaded at run time, so that whoever has no such disk needs no such library. An opened
//! [`RbdImage`] is a [`block::Remote`]; [`WithRbd`] is an engine that knows what to do with one, beside another engine
//! that serves everything else and on which the thread sleeps.

mod cluster;
mod engine;
mod error;
mod image;
mod inbox;
mod library;
mod location;
mod settings;
mod watch;

pub use cluster::CONNECTIONS_MAX;
pub use engine::WithRbd;
pub use error::RbdError;
pub use image::{Open, RbdImage};
pub use library::{Library, LibraryError};
pub use location::{Access, Location};
pub use settings::{Origin, Setting};
