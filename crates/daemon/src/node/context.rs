//! What opening a disk needs in addition to its description, and how the files that an image names are opened.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};

use block::{Backing, CacheMode};
use engine::{DiskFile, Identity, Locking, OpenError};
use image::{AllowedDirectories, DataFile, FileRole, OpenFiles, Storage};
use tracing::{info, warn};

use crate::config::spec::{DiskSpec, FileSpec};
use crate::inherited::Inherited;
use crate::node::journal::Journals;
use crate::node::own_files::OwnFiles;
use crate::node::storage::FileStorage;
use crate::rights::{OpenedAhead, Rights};

/// Directories in which an image may name backing files and data files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AllowBacking {
    /// The directory of the image, and those below.
    #[default]
    Beside,
    /// These directories, and those below.
    In(Vec<PathBuf>),
}

impl AllowBacking {
    /// From the operator's list: directories, or `none`.
    pub fn new(given: &[PathBuf]) -> Self {
        match given {
            [] => Self::Beside,
            given => {
                let directories = given.iter().filter(|d| d.as_os_str() != "none");
                Self::In(directories.cloned().collect())
            }
        }
    }

    /// Warns of directories that no image could be opened with.
    pub fn warn_missing(&self) {
        if let Self::In(directories) = self
            && let Err(e) = AllowedDirectories::new(directories)
        {
            warn!("--allow-backing: {e}; until it exists, no qcow2 image can be opened");
        }
    }

    /// The directories for an image.
    ///
    /// # Errors
    /// One of the directories cannot be opened.
    pub fn allowed_directories(
        &self,
        image: &Path,
        rights: &Rights,
    ) -> io::Result<AllowedDirectories> {
        match self {
            Self::Beside => AllowedDirectories::of_image(&std::path::absolute(image)?),
            Self::In(directories) => {
                let open = || AllowedDirectories::new(directories);
                rights.as_operator(open).map_err(|e| {
                    let text = format!("{e}; --allow-backing names directories that are there");
                    io::Error::new(e.kind(), text)
                })
            }
        }
    }

    /// Opens files that images name: as the operator, if the operator has named their directories.
    pub fn open_with<T>(&self, rights: &Rights, open: impl FnOnce() -> T) -> T {
        match self {
            Self::Beside => open(),
            Self::In(_) => rights.as_operator(open),
        }
    }
}

/// A record in the state directory whose name does not say which storage it is about, and what it says of that.
pub struct OldRecord {
    pub file: PathBuf,
    /// As [`Identity`] has it.
    pub inode: u64,
    /// That of a device, if no other device has it.
    pub id: Option<String>,
}

/// They are read once: this version gives no such names to records of files and devices.
pub type OldRecords = OnceLock<Vec<OldRecord>>;

/// What opening a disk depends on in addition to its description.
#[derive(Clone)]
pub struct OpenContext {
    pub allow_backing: AllowBacking,
    pub journals: Journals,
    /// The state directory.
    pub state: Option<PathBuf>,
    /// Records in it of earlier versions.
    pub old_records: Arc<OldRecords>,
    /// This process has been told to stop: long operations end early.
    pub stop: Arc<AtomicBool>,
    /// Files that were inherited.
    pub inherited: Arc<Inherited>,
    /// With whose rights files are opened.
    pub rights: Arc<Rights>,
    /// What was opened for the disk before this process became another user, while that is kept.
    pub ahead: Weak<OpenedAhead>,
    /// Files that no image of another disk may name.
    pub own_files: OwnFiles,
    /// Disks whose storage did not answer before the sandbox was entered.
    pub hanging: Vec<String>,
}

impl OpenContext {
    /// Whether the storage of a disk did not answer before the sandbox was entered.
    pub fn hangs(&self, disk: &str) -> bool {
        self.hanging.iter().any(|name| name == disk)
    }

    /// Opens the file that the operator has named for a disk, and locks it if `locking` says so. Returns how it is
    /// locked: an inherited file is locked already.
    ///
    /// # Errors
    /// It cannot be served as asked; the error says why and what to do.
    pub fn open(
        &self,
        disk: &str,
        path: &Path,
        cache: CacheMode,
        read_only: bool,
        locking: Locking,
    ) -> Result<(DiskFile, Locking), OpenError> {
        let open = || {
            let (opened, locking) = match self.inherited.file(disk, path, !read_only) {
                Some(file) => {
                    let held = Locking::Held;
                    (DiskFile::adopt(file, path, cache, read_only, held), held)
                }
                None => {
                    let ahead = self.ahead.upgrade();
                    let ahead = ahead.and_then(|ahead| ahead.file(path, !read_only));
                    let opened = match ahead {
                        Some(file) => DiskFile::adopt(file, path, cache, read_only, locking),
                        None => DiskFile::open_with(path, cache, read_only, locking),
                    };
                    (opened, locking)
                }
            };
            opened.map(|file| {
                if locking == Locking::Held {
                    warn_if_renamed(disk, path, &file);
                }
                (file, locking)
            })
        };
        let file = FileSpec::Path(path.into());
        self.rights.with_file(&file, !read_only, open)
    }

    /// Like [`open`](Self::open), for an open file that an image has named. `ours` are the files that this process has
    /// locked for writing.
    ///
    /// # Errors
    /// As above.
    fn adopt(
        &self,
        file: OwnedFd,
        path: &Path,
        cache: CacheMode,
        read_only: bool,
        ours: &[Identity],
    ) -> Result<DiskFile, OpenError> {
        let is_ours = || Identity::of_fd(&file).is_ok_and(|file| ours.contains(&file));
        let (file, locking) = match self.inherited.file_like(&file, !read_only) {
            Some(held) => (held, Locking::Held),
            None if read_only && is_ours() => (file, Locking::Handover),
            None => (file, Locking::Now),
        };
        DiskFile::adopt(file, path, cache, read_only, locking)
    }
}

/// Opens the files that an image names, and keeps them.
pub struct Opener<'a> {
    pub spec: &'a DiskSpec,
    /// The image's data file has been opened.
    pub has_data_file: bool,
    pub cache: CacheMode,
    /// When writable files are locked that an image names.
    pub locking: Locking,
    /// Files that the disk writes to until it moves to this image.
    pub ours: &'a [Identity],
    /// Files that the disk has open already. A data file among them is used as it is: it is locked through its descriptor.
    pub held: &'a [Arc<DiskFile>],
    pub context: &'a OpenContext,
    pub opened: Vec<Arc<FileStorage>>,
}

impl Opener<'_> {
    /// Adds a file that is open already.
    pub fn keep(&mut self, file: Arc<DiskFile>) -> Arc<FileStorage> {
        let storage = Arc::new(FileStorage {
            file,
            flushes: self.cache.flushes(),
        });
        self.opened.push(storage.clone());
        storage
    }

    /// The file that an image knows as this storage.
    pub fn file_of(&self, storage: &Arc<dyn Storage>) -> Option<Arc<DiskFile>> {
        let same = |opened: &&Arc<FileStorage>| {
            std::ptr::addr_eq(Arc::as_ptr(opened), Arc::as_ptr(storage))
        };
        self.opened.iter().find(same).map(|s| s.file.clone())
    }
}

fn not_shareable() -> io::Error {
    let e = "a data file of its own cannot be shared with another host; leave out lock=running";
    io::Error::other(e)
}

/// The image is the one that the process before has open, and its data file is not.
fn other_data_file(disk: &str, path: &Path) -> io::Error {
    io::Error::other(format!(
        "{} is another file than the data file that the running process has open; if another file has taken its place, \
         put the disk's own one back, or stop the VM, then 'ringdisk detach {disk}'",
        path.display()
    ))
}

impl OpenFiles for Opener<'_> {
    fn open(&mut self, file: OwnedFd, path: &Path, role: FileRole) -> io::Result<Arc<dyn Storage>> {
        let (context, disk) = (self.context, &self.spec.name);
        let what = match role {
            FileRole::Backing => "backing file",
            FileRole::Data => "data file of a backing file",
        };
        if role == FileRole::Data && self.locking == Locking::None {
            return Err(not_shareable());
        }
        let identity = Identity::of_fd(&file)?;
        if !self.ours.contains(&identity) {
            let may_share_reading = context.allow_backing != AllowBacking::Beside;
            let own = &context.own_files;
            let other = own
                .other_user(identity, disk, may_share_reading)
                .or_else(|| {
                    let unserved = || own.other_configured(path, identity, disk);
                    (!may_share_reading).then(unserved).flatten()
                });
            if let Some(other) = other {
                return Err(io::Error::other(format!(
                    "its {what} {} is in use by disk '{other}' of this ringdisk; a file cannot be a disk and a part of another \
                     one, except if that disk is only read and --allow-backing names the directory",
                    path.display()
                )));
            }
        }
        let opened = context.adopt(file, path, self.cache, true, self.ours);
        let opened = opened.map_err(io::Error::other)?;
        info!(
            "disk {disk}: its image names {}: opened for reading, as {what}",
            path.display()
        );
        Ok(self.keep(Arc::new(opened)))
    }

    fn data_file(
        &mut self,
        image: &Path,
        named: Option<&str>,
        write: bool,
    ) -> io::Result<DataFile> {
        let (context, spec) = (self.context, self.spec);
        let Some(path) = &spec.data_file else {
            let named = named.unwrap_or_default();
            // An upgrade keeps the disk on the files that it has.
            let same = match self.locking {
                Locking::Held => ", with the file that the running process has open",
                _ => "",
            };
            return Err(io::Error::other(format!(
                "its data is in an external file, which is opened only if the operator names it: add data-file=PATH{same} \
                 (the image names '{named}', in {})",
                image.parent().unwrap_or(image).display()
            )));
        };
        if !write && self.locking == Locking::None {
            return Err(not_shareable());
        }
        self.has_data_file = true;
        let there = context.rights.data_file_identity(spec);
        let mut held = self.held.iter().filter(|_| write);
        let held = held.find(|held| Some(held.identity()) == there).cloned();
        let file = match held {
            Some(held) => held,
            None => {
                let now = Locking::Now;
                let opened = context.open(&spec.name, path, self.cache, !write, now);
                let (file, locking) = opened.map_err(io::Error::other)?;
                if self.locking == Locking::Held && locking != Locking::Held {
                    return Err(other_data_file(&spec.name, path));
                }
                Arc::new(file)
            }
        };
        let identity = file.identity();
        if let Some(other) = context.own_files.other_user(identity, &spec.name, false) {
            return Err(io::Error::other(format!(
                "its data file {} is in use: it is disk '{other}' of this ringdisk",
                path.display()
            )));
        }
        info!(
            "disk {}: opened the data file {}",
            spec.name,
            path.display()
        );
        Ok(DataFile {
            identity: (identity.device, identity.inode),
            storage: self.keep(file),
        })
    }
}

/// Warns if an inherited file is no longer at its path.
fn warn_if_renamed(disk: &str, path: &Path, file: &DiskFile) {
    if !path.exists() {
        let now = match file.current_path() {
            None if file.backing() == Backing::BlockDevice => format!(
                "which has no device node in that directory; a restart needs a device node at that path, or at another \
                 one that 'ringdisk replace {disk} PATH' names"
            ),
            Some(now) => format!(
                "which is now at {0}; with 'ringdisk replace {disk} {0}', a restart finds it there",
                now.display()
            ),
            None => {
                "whose present path is unknown; if it was deleted, it is lost when the disk is closed".into()
            }
        };
        let file = match file.backing() {
            Backing::BlockDevice => "device",
            Backing::File => "file",
        };
        warn!(
            "disk {disk}: {} no longer exists; the disk continues on the {file} that it has open, {now}",
            path.display()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_open_files_only_in_allowed_directories() {
        assert_eq!(AllowBacking::new(&[]), AllowBacking::Beside);
        assert_eq!(
            AllowBacking::new(&["none".into()]),
            AllowBacking::In(vec![])
        );
        let two = AllowBacking::In(vec!["/a".into(), "/b".into()]);
        assert_eq!(AllowBacking::new(&["/a".into(), "/b".into()]), two);
    }
}
