//! Moves bytes between memory and files: opens and locks files, and provides the engines that perform the
//! operations of [`block::Engine`].

mod blocking;
mod buffers;
mod choice;
mod file;
mod inline;
mod iovec;
mod linux_aio;
mod lock;
mod mapped_words;
mod multi_engine;
mod numa;
mod poller;
mod ranges;
mod signals;
mod submission;
mod uring;
mod workers;

pub use choice::{Choice, ChoiceError, Support, choose};
pub use file::{DiskFile, Identity, Locking, OpenError};
pub use linux_aio::LinuxAioError;
pub use mapped_words::MappedWords;
pub use multi_engine::MultiEngine;
pub use numa::node_of;
pub use signals::ignore_signals;
pub use uring::{Uring, UringError};
