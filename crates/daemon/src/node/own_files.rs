//! The files that are disks of this process, served or released. No image of another disk may build on them: who makes an
//! image names its backing file, and the file of another tenant's disk is often next to it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use engine::Identity;

/// All files that are disks of this process.
#[derive(Clone, Default)]
pub struct OwnFiles {
    files: Arc<Mutex<Vec<Weak<OwnFile>>>>,
    /// The names and files of the configured disks, which may be detached or absent.
    configured: Arc<Mutex<Vec<(String, PathBuf)>>>,
}

/// The files of a disk, as long as this value exists.
pub struct OwnFile {
    disk: String,
    files: Vec<Identity>,
    read_only: bool,
}

impl OwnFiles {
    /// Adds the file of a disk, and its data file if it has one.
    pub fn add(&self, disk: &str, files: Vec<Identity>, read_only: bool) -> Arc<OwnFile> {
        let file = Arc::new(OwnFile {
            disk: disk.into(),
            files,
            read_only,
        });
        let mut all = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|file| file.strong_count() > 0);
        all.push(Arc::downgrade(&file));
        file
    }

    /// Sets the names and files of the configured disks.
    pub fn set_configured(&self, disks: Vec<(String, PathBuf)>) {
        *self
            .configured
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = disks;
    }

    /// The name of another configured disk than `disk` whose file this is, in the directory of `path`. Files elsewhere are
    /// not looked at, since their storage may not answer.
    pub fn other_configured(&self, path: &Path, file: Identity, disk: &str) -> Option<String> {
        let all = self
            .configured
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut beside = all
            .iter()
            .filter(|(name, other)| name != disk && other.parent() == path.parent());
        let found = beside
            .find(|(_, other)| fs::metadata(other).is_ok_and(|there| Identity::of(&there) == file));
        found.map(|(name, _)| name.clone())
    }

    /// The name of another disk than `disk` that has this file, if there is one; with `may_share_reading`, only one that may
    /// be written.
    pub fn other_user(
        &self,
        file: Identity,
        disk: &str,
        may_share_reading: bool,
    ) -> Option<String> {
        let all = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let mut others = all.iter().filter_map(Weak::upgrade);
        let is_other = |other: &Arc<OwnFile>| {
            other.files.contains(&file)
                && other.disk != disk
                && !(may_share_reading && other.read_only)
        };
        others.find(is_other).map(|other| other.disk.clone())
    }
}
