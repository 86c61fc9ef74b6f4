//! All tests of this crate that use it from outside, as one program: linked once.

mod boot;
mod check;
mod control;
mod device;
mod drivers;
mod front_ends;
mod hostile;
mod inflight;
mod lab;
mod libvirt;
mod memory;
mod moving;
mod outage;
mod packed;
mod qcow2;
mod rbd;
mod regions;
mod sandbox;
mod serve;
mod soak;
mod starved;
mod stats;
mod storage;
mod support;
mod upgrade;
mod vm;
