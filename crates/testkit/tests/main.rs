//! All tests of this crate that use it from outside, as one program: linked once.

mod conformance;
mod qemu;
