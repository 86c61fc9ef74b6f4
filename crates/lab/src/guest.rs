//! Guests that the lab makes and boots itself, as any user: QEMU, a kernel, and an initramfs of busybox and fio.
//!
//! A guest reads shell scripts from a virtio-serial port and answers with what they print. So does the host, and so
//! does any guest over ssh: whoever measures sees a [`Shell`].

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
