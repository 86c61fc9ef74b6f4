//! What every measurement and test from outside needs: guests and their kernels, QMP, latencies, random numbers.
//!
//! Used by the lab, which ships, and by testkit and xtask, which do not. It depends on nothing of the data path, and on
//! nothing that only tests need.

pub mod histogram;
pub mod initramfs;
pub mod paths;
pub mod process;
pub mod qemu;
pub mod qmp;
pub mod random;
