//! The protocol against bytes of real clients, against any bytes, and against a second implementation of its rules.

mod any_bytes;
mod checks;
mod handshake;
mod requests;
mod transcripts;
