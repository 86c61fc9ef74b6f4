//! Guests that the lab makes and boots itself, without root: QEMU, a kernel, and an initramfs with busybox and fio.
//!
//! A [`Shell`] runs a script and returns its output: in such a guest over a virtio-serial port, in other guests over ssh, or
//! on the host.

mod initrd;
mod qemu;
mod shell;
mod ssh;

pub use harness::initramfs::Kernel;
pub use harness::process::Stop;
pub use harness::qemu::{Accel, accel, version};
pub use initrd::write as write_initramfs;
pub use qemu::{Boot, Guest, Setup, Volume};
pub use shell::{Answer, Host, Shell};
pub use ssh::Ssh;
