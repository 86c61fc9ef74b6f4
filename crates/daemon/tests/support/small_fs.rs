//! Small file systems that tests can fill or freeze.

use std::fs::{self, File};
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

/// Its mount point; unmounted on drop.
pub struct FreezableFs(pub PathBuf);

impl FreezableFs {
    /// An ext4 of 16 MiB; `None` without permission to mount.
    pub fn mount(at: &Path) -> Option<Self> {
        Self::mount_with(at, &[])
    }

    /// The same with options of mkfs.
    pub fn mount_with(at: &Path, options: &[&str]) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let image = at.with_extension("ext4");
        File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let is_done = |command: &mut Command| command.output().is_ok_and(|o| o.status.success());
        let mut mkfs = Command::new("mkfs.ext4");
        assert!(is_done(mkfs.arg("-q").args(options).arg(&image)));
        if !is_done(Command::new("mount").arg("-oloop").arg(&image).arg(at)) {
            println!("skipped: a file system of one's own: none can be mounted here");
            return None;
        }
        Some(Self(at.into()))
    }

    /// It answers no change until it is thawed.
    pub fn freeze(&self, on: bool) {
        let option = if on { "-f" } else { "-u" };
        let done = Command::new("fsfreeze").arg(option).arg(&self.0).status();
        assert!(done.unwrap().success());
    }
}

impl Drop for FreezableFs {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.0).output();
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
