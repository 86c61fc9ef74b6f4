//! A small file system that tests can fill.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Its mount point; unmounted on drop.
pub struct SmallFs(pub PathBuf);

impl SmallFs {
    /// A tmpfs of this size, in mount's syntax; `None` without permission to mount.
    pub fn mount(at: &Path, size: &str) -> Option<Self> {
        fs::create_dir(at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "small"]);
        let mounted = mount.arg(at).output();
        if !mounted.is_ok_and(|output| output.status.success()) {
            println!("skipped: a full disk: a file system cannot be mounted here");
            return None;
        }
        Some(Self(at.into()))
    }
}

impl Drop for SmallFs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
