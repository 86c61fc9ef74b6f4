//! Front-ends other than QEMU's vhost-user-blk: those that can be run here, and the messages of those that cannot.

mod libblkio;
mod replay;
mod rust_vmm;
mod scripts;
mod u_boot;
