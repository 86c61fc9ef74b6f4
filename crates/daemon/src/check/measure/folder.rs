//! The directory for scratch files beside a VM's disk. A measurement that is killed leaves it, and the next one removes it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

/// A directory for scratch files, which is removed when this is dropped.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// The directory itself, whose lock ends with the process; `None` where directories cannot be locked (NFS)
    _lock: Option<File>,
}

impl Folder {
    /// Creates the directory.
    ///
    /// # Errors
    /// It exists and is not that of a killed measurement, or it cannot be created.
    pub fn create(path: PathBuf) -> Result<Self, String> {
        let mut created = fs::create_dir(&path);
        if is_existing(&created) {
            remove_left(&path).map_err(|why| exists(&path, &why))?;
            eprintln!(
                "ringdisk: an earlier measurement was killed: {} is removed",
                path.display()
            );
            created = fs::create_dir(&path);
        }
        created.map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => exists(&path, "another measurement runs"),
            io::ErrorKind::NotFound => format!(
                "{}: its directory does not exist on this host; run this on the VM's host, or name another place with \
                 --scratch DIRECTORY",
                path.display()
            ),
            _ => format!(
                "{}: cannot be created: {e}; run ringdisk as root, or name another place with --scratch DIRECTORY",
                path.display()
            ),
        })?;
        let lock = lock(&path).ok().flatten();
        Ok(Self { path, _lock: lock })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // The lab has removed its files and this folder in it.
        let _ = fs::remove_dir(self.path.join("disks"));
        if let Err(e) = fs::remove_dir(&self.path) {
            eprintln!("ringdisk: {}: cannot be removed: {e}", self.path.display());
        }
    }
}

fn is_existing(created: &io::Result<()>) -> bool {
    created
        .as_ref()
        .is_err_and(|e| e.kind() == io::ErrorKind::AlreadyExists)
}

fn exists(path: &Path, why: &str) -> String {
    format!(
        "{} exists, and {why}; wait until no measurement runs, then remove it",
        path.display()
    )
}

/// Removes the directory of a measurement that was killed.
///
/// # Errors
/// It belongs to a running measurement or to somebody else.
fn remove_left(path: &Path) -> Result<(), String> {
    let lock = match lock(path) {
        Ok(Some(lock)) => lock,
        Ok(None) => return Err("another measurement runs".into()),
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(format!("whether it is in use is unknown: {e}")),
    };
    let found = lock.metadata().map_err(|e| e.to_string())?;
    if found.uid() != rustix::process::geteuid().as_raw() {
        return Err("it is another user's".into());
    }
    for entry in fs::read_dir(path).map_err(|e| e.to_string())? {
        let name = entry.map_err(|e| e.to_string())?.file_name();
        let name = name.to_string_lossy();
        if name != "disks" && !name.starts_with("ringdisk-lab-") {
            let name = advisor::text::printable(&name);
            return Err(format!("it contains '{name}', which is not the lab's"));
        }
    }
    fs::remove_dir_all(path).map_err(|e| format!("it cannot be removed: {e}"))
}

/// Locks a directory; `None` if another process has it.
fn lock(path: &Path) -> Result<Option<File>, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path);
    let folder = opened.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(folder)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_killed_measurement_left_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("ringdisk-measure-vm-vda");
        let running = Folder::create(path.clone()).unwrap();
        let disks = path.join("ringdisk-lab-0-1-0");
        fs::create_dir(&disks).unwrap();
        fs::write(disks.join("disk-0-0.raw"), "x").unwrap();
        let refused = Folder::create(path.clone()).unwrap_err();
        assert!(refused.contains("another measurement runs"), "{refused}");
        assert!(disks.exists());
        // As after SIGKILL: nothing is removed, and the kernel ends the lock.
        let Folder { path: _, _lock } = &running;
        rustix::fs::flock(_lock.as_ref().unwrap(), FlockOperation::Unlock).unwrap();
        std::mem::forget(running);
        fs::write(path.join("mine"), "mine").unwrap();
        let refused = Folder::create(path.clone()).unwrap_err();
        assert!(refused.contains("'mine'"), "{refused}");
        assert!(disks.exists());
        fs::remove_file(path.join("mine")).unwrap();
        drop(Folder::create(path.clone()).unwrap());
        assert!(!path.exists());
        // A link to a directory of somebody else's is not followed.
        let other = parent.path().join("other");
        fs::create_dir(&other).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        let refused = Folder::create(path.clone()).unwrap_err();
        assert!(refused.contains("is unknown"), "{refused}");
        assert!(other.exists() && path.is_symlink());
    }
}
