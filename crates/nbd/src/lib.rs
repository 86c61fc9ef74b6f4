//! The NBD protocol as a server speaks it (NetworkBlockDevice/nbd, `doc/proto.md`), without I/O: the [handshake](Handshake)
//! takes bytes and returns bytes, and so do [requests](RequestHeader) and [replies](Replies).
//!
//! Bytes from a client are untrusted. Every length is checked before anything is allocated for it, and a client that breaks
//! the protocol in a way that leaves the position in the stream unknown is disconnected.

#![warn(missing_docs)]

mod fields;
mod handshake;
mod reply;
mod request;

pub use handshake::{
    BASE_ALLOCATION, BlockSizes, Context, DEPTH, EXPORTS_MAX, ExportInfo, Exports, GREETING,
    Handshake, HandshakeError, ListedExport, NAME_BYTES_MAX, Negotiated, OPTION_BYTES_MAX,
    OPTIONS_MAX, QUERIES_MAX, Step, Tls, flags,
};
pub use reply::{BlockStatus, EXTENTS_MAX, Replies, STATE_HOLE, STATE_ZERO};
pub use request::{Command, ErrorCode, PAYLOAD_BYTES_MAX, ProtocolError, Refusal, RequestHeader};

/// The form of requests and replies that was negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Short headers, and replies without structure.
    #[default]
    Simple,
    /// Short headers, and replies in chunks (NBD_OPT_STRUCTURED_REPLY).
    Structured,
    /// Headers with 64-bit lengths (NBD_OPT_EXTENDED_HEADERS).
    Extended,
}
