//! Folders for the files of one run, in directories that others use too.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// A new folder. Dropping this removes it and its files.
#[derive(Debug)]
pub struct OwnFolder {
    path: PathBuf,
}

/// The folder's name starts with this; the start of the kernel's boot id and the process's id follow.
const PREFIX: &str = "ringdisk-lab-";

impl OwnFolder {
    /// Makes a folder with a short path, because paths of sockets are short. Removes those of earlier runs that were killed.
    ///
    /// # Errors
    /// The directory does not exist, or cannot be written.
    pub fn new(directory: &Path) -> Result<OwnFolder> {
        let boot = boot()?;
        remove_abandoned(directory, &boot);
        let name = |attempt: u32| format!("{PREFIX}{boot}-{}-{attempt}", std::process::id());
        // A folder that exists already is not used: its owner could replace the files in it.
        for path in (0..100).map(|attempt| directory.join(name(attempt))) {
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(OwnFolder { path }),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e).with_context(|| format!("making {}", path.display())),
            }
        }
        bail!("{} is full of folders {PREFIX}*", directory.display())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The start of the kernel's boot id. It tells the processes of this host from those of others, with which it may share a
/// directory, and from those before it was started.
fn boot() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let id = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
    Ok(id.chars().take_while(char::is_ascii_hexdigit).collect())
}

/// Removes the folders of this host's runs that were killed: an initramfs takes 90 MB, a disk more. Folders of other users
/// cannot be removed.
fn remove_abandoned(directory: &Path, boot: &str) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| {
                name.strip_prefix(PREFIX)?
                    .strip_prefix(boot)?
                    .strip_prefix('-')
            })
            .and_then(|rest| rest.split_once('-')?.0.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_this_hosts_ended_processes_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let boot = boot().unwrap();
        assert!(boot.len() == 8, "{boot}");
        // No process has the highest id.
        let names = [
            format!("{PREFIX}{boot}-4194304-0"),
            format!("{PREFIX}{boot}-1-0"),
            format!("{PREFIX}00000000-4194304-0"),
            "ringdisk-lab-results".into(),
        ];
        for name in &names {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        let own = OwnFolder::new(directory.path()).unwrap();
        let second = OwnFolder::new(directory.path()).unwrap();
        assert_ne!(own.path(), second.path());
        fs::write(own.path().join("file"), "x").unwrap();
        let path = own.path().to_owned();
        drop(own);
        assert!(!path.exists() && second.path().exists());
        let exists = names.map(|name| directory.path().join(name).exists());
        assert_eq!(exists, [false, true, true, true]);
    }
}
