//! Tools for tests and benchmarks: a vhost-user front-end and a virtio-blk driver, written from the specifications and
//! not from the server, so that both sides do not share a mistake.

pub mod ceph;
pub mod chain;
pub mod compatibility;
pub mod conformance;
pub mod faulty;
pub mod guestfish;
pub mod images;
pub mod load;
pub mod model;
pub mod python;
pub mod qemu;
pub mod qemu_img;
pub mod random;
pub mod server;
pub mod storage;
pub mod unpacked;
pub mod vm;

pub use driver::{self, frontend, memory, ring};
