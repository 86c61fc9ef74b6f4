//! QMP, the protocol in which QEMU's tools talk to a running disk server: framing, schema, commands, replies and
//! events, for both ends of the socket.
//!
//! A [`Session`] parses bytes into a [`Command`] once; a [`Handler`] executes it. The arguments and reply of each
//! command are defined once (`commands.rs`, `replies.rs`, `events.rs`). The parser, `query-commands` and
//! `query-qmp-schema` are all generated from that definition, so the schema always describes what the server accepts.
//!
//! This crate starts no threads and does not know how disks are served.

#[macro_use]
mod qapi;

mod client;
mod commands;
mod error;
mod events;
mod framing;
mod json;
mod limits;
mod replies;
mod serve;
mod session;

pub use client::{Client, ClientError, HangUpHandle};
pub use commands::*;
pub use error::{CommandError, ErrorClass};
pub use events::{
    BlockErrorAction, BlockExportDeleted, BlockImageCorrupted, BlockIoError, BlockIoResumed, Event,
    EventHub, IoOperationType, Pending, Subscription, TooManySessions,
};
pub use framing::{Framer, FramingError, Limits};
pub use qapi::{ArgumentPath, Id, Qapi, Schema};
pub use replies::*;
pub use serve::{refuse, serve, serve_socket};
pub use session::{Handler, Session};
