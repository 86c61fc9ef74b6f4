//! All tests of this crate that use it from outside, as one program: linked once.

mod any_bytes;
mod checks;
mod convert;
mod corpus;
mod external_tools;
mod libvirt;
mod network;
mod preservation;
mod scripts;
mod support;
mod unsafe_fixes;
