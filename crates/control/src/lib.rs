//! QMP, the language in which QEMU's tools talk to a running disk server: framing, schema, commands, replies, events,
//! for both ends of the socket.
//!
//! Bytes become a [`Command`] once, in a [`Session`]; a [`Handler`] executes it. What each command takes and returns
//! is written down once (`commands.rs`, `replies.rs`, `events.rs`), and parser, `query-commands` and
//! `query-qmp-schema` all come from there, so what clients are told is what is served.
//!
//! Nothing here starts a thread or knows how disks are served.

#[macro_use]
mod qapi;

mod client;
mod commands;
mod error;
mod events;
mod framing;
mod json;
mod replies;
mod serve;
mod session;

pub use client::{Client, ClientError};
pub use commands::*;
pub use error::{CommandError, ErrorClass};
pub use events::{
    BlockErrorAction, BlockExportDeleted, BlockImageCorrupted, BlockIoError, BlockIoResumed, Event,
    EventHub, IoOperationType, Pending, Subscription, TooManySessions,
};
pub use framing::{Framer, FramingError, Limits};
pub use qapi::{At, Id, Qapi, Schema};
pub use replies::*;
pub use serve::{refuse, serve, serve_socket};
pub use session::{Handler, Session};
