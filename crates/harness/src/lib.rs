//! What measurements and tests from outside have in common: guests and their kernels, background programs, QMP,
//! latencies, random numbers, charts.
//!
//! Used by the lab, which ships, and by testkit and xtask, which do not. It depends on nothing of the data path, and on
//! nothing that only tests need.

pub mod cpu;
pub mod histogram;
pub mod initramfs;
pub mod paths;
pub mod process;
pub mod qemu;
pub mod qmp;
pub mod random;
pub mod spread;
pub mod svg;
pub mod text;
