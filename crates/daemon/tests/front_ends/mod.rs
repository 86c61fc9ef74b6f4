//! Front-ends other than QEMU's vhost-user-blk device: some run here; of the others, their messages are replayed.

mod libblkio;
mod qtest;
mod replay;
mod rust_vmm;
mod scripts;
mod u_boot;
