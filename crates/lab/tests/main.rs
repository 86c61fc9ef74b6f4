//! All tests that use this crate from outside, in one program that is linked once.

mod any_bytes;
mod browser;
mod checks;
mod guests;
mod host;
mod statistics;
