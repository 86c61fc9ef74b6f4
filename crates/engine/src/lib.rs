//! Moves bytes between memory and files: opening and locking a file, and the engines that do the
//! operations of [`block::Engine`].

mod blocking;
mod buffers;
mod file;
mod inline;
mod lock;
mod uring;

pub use file::{DiskFile, OpenError};
pub use uring::{Uring, UringError};
