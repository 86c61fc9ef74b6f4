//! The folder in which a run has its sockets and logs.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Removed when dropped.
pub struct RuntimeFolder(pub PathBuf);

/// The folder's name starts with this; the process's id follows.
const PREFIX: &str = "ringdisk-lab-";

impl RuntimeFolder {
    /// Makes a folder with a short path, because paths of sockets are short.
    ///
    /// # Errors
    /// The directory for temporary files cannot be written.
    pub fn new() -> Result<RuntimeFolder> {
        let parent = std::env::temp_dir();
        remove_abandoned(&parent);
        let name = |attempt: u32| format!("{PREFIX}{}-{attempt}", std::process::id());
        // A folder that exists already is not used: its owner could replace the sockets in it.
        for folder in (0..100).map(|attempt| parent.join(name(attempt))) {
            match fs::DirBuilder::new().mode(0o700).create(&folder) {
                Ok(()) => return Ok(RuntimeFolder(folder)),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e).with_context(|| format!("making {}", folder.display())),
            }
        }
        bail!("{} is full of folders {PREFIX}*", parent.display())
    }
}

impl Drop for RuntimeFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes the folders of runs that were killed: an initramfs takes 90 MB. Folders of other users cannot be removed.
fn remove_abandoned(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX)?.split_once('-'))
            .and_then(|(pid, _)| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
