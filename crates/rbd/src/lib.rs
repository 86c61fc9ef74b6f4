//! Disks that are images in a Ceph cluster.
//!
//! librbd and librados are loaded at run time, so a host without such disks does not need the libraries. An opened
//! [`RbdImage`] is a [`block::Remote`]. [`RbdEngine`] is an engine that sends requests for such images to librbd; it
//! wraps another engine, which serves everything else and on which the thread sleeps.

mod allocation;
mod cluster;
mod engine;
mod error;
mod image;
mod inbox;
mod library;
mod location;
mod lock;
mod settings;
mod snapshot;
mod watch;

pub use engine::RbdEngine;
pub use error::RbdError;
pub use image::{OpenOptions, RbdImage};
pub use library::{Library, LibraryError};
pub use location::{Access, CONNECTIONS_MAX, Location};
#[cfg(fuzzing)]
pub use lock::check_lock_answer;
pub use lock::{Header, OwnError};
pub use settings::{Origin, Setting};
pub use snapshot::AbandonedSnapshot;
