//! All tests of this crate that use it from outside, as one program: linked once.

mod any_bytes;
mod checks;
mod hugepages;
mod inflight;
mod log;
mod migration;
mod sigbus;
mod virtqueue;
