//! All tests of this crate that use it from outside, as one program: linked once.

mod any_bytes;
mod as_qemu;
mod checks;
mod qemu_qmp;
mod sockets;
mod support;
mod transcripts;
