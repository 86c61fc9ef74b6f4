//! Guests that the lab makes and boots itself, as any user: QEMU, a kernel, and an initramfs of busybox and fio.
//!
//! A guest reads shell scripts from a virtio-serial port and answers with what they print. So does the host, and so
//! does any guest over ssh: whoever measures sees a [`Shell`].

mod initrd;
mod qemu;
mod shell;
mod ssh;

pub use harness::initramfs::Kernel;
pub use harness::paths::find_program;
pub use initrd::write as write_initramfs;
pub use qemu::{Accel, Boot, Guest, Setup, Volume, accel, is_block_device, version};
pub use shell::{Answer, Host, Shell};
pub use ssh::Ssh;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set when the user wants an end. Whoever waits looks at it.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// The flag itself, for a signal handler.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }

    /// Whether to end.
    pub fn is_wanted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The last lines of a log, for an error.
pub fn tail(log: &Path, lines: usize) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
        .collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
