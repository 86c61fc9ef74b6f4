//! Journals of images: they contain the changes of acknowledged writes that are not flushed yet, in case ringdisk is
//! killed.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use engine::DiskFile;
use image::{JournalEvent, JournalFile, JournalOwner, PlainFile, journal_owner, may_have_journal};
use thiserror::Error;
use tracing::{error, info, warn};

use crate::config::sockets;
use crate::credentials::{self, UserAccount};
use crate::node::storage::FileStorage;

/// The extension of the files.
const EXTENSION: &str = "journal";

/// The directory of the journals, one for each writable image, in the directory of the disks' default sockets. That
/// directory is a tmpfs on nearly every host, which suffices: journals are useless after a crash of the host.
#[derive(Clone, Debug)]
pub struct Journals {
    pub directory: PathBuf,
    /// The owner of the files, if this process will become another user.
    owner: Option<(u32, u32)>,
    /// Why the directory cannot be used.
    problem: Option<String>,
    /// Those of other users at the start, which the sandbox lets this process read.
    others: Arc<[PathBuf]>,
}

/// Whether another user has the journal of an image.
enum Elsewhere {
    Nothing,
    Found(PathBuf),
    /// It is perhaps this file, which this process cannot read.
    Unreadable(PathBuf, io::Error),
    /// It may be here, where this process cannot look.
    Hidden(PathBuf, io::Error),
}

/// How a journal of another user is opened.
fn options_of_others() -> OpenOptions {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

/// The directories of journals in the directory `sockets`, but for `own`.
fn others(sockets: &Path, own: &Path) -> io::Result<Vec<PathBuf>> {
    let mut directories = Vec::new();
    for entry in std::fs::read_dir(sockets)? {
        let entry = entry?;
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(b"journals") && entry.path() != own {
            directories.push(entry.path());
        }
    }
    Ok(directories)
}

/// An image has a journal that cannot be replayed.
#[derive(Debug, Error)]
pub enum JournalError {
    #[error(
        "{} is the journal of a killed ringdisk, which ran as another user: start ringdisk with the same --user as \
         before, to replay it; without this file, acknowledged writes that were not flushed are lost",
        .0.display()
    )]
    AnotherUsers(PathBuf),
    #[error(
        "its journal {path} cannot be opened: {error}; it may contain acknowledged writes of a killed ringdisk: {advice}; \
         without it, those that were not flushed are lost",
        advice = match .1.raw_os_error() {
            Some(libc::EACCES | libc::EPERM | libc::ELOOP | libc::EISDIR | libc::ENXIO) => {
                "make it a file that this user may read and write"
            }
            _ => "leave it there, solve this problem, and start ringdisk again",
        },
        path = .0.display(), error = .1
    )]
    Unusable(PathBuf, io::Error),
    #[error(
        "it says that it has a journal, and whether that is {path} cannot be seen: {error}; it may contain acknowledged writes \
         of a killed ringdisk, which would be lost. Start ringdisk as the same user as before; or, if the image is a copy, or \
         the host has crashed since, 'qemu-img amend -o compat=v3' clears the mark",
        path = .0.display(), error = .1
    )]
    Hidden(PathBuf, io::Error),
    #[error(
        "it says that it has a journal, which may be {path}, of a ringdisk of another user: this process cannot read that: \
         {error}. It may contain acknowledged writes of a killed ringdisk, which would be lost. 'ringdisk upgrade' (or a \
         restart) lets ringdisk read it; or stop this ringdisk from serving the image, and serve it as that user first",
        path = .0.display(), error = .1
    )]
    Unreadable(PathBuf, io::Error),
    #[error(
        "acknowledged writes of a killed ringdisk are not yet in {image}, but in its journal {journal}, and would be \
         missing: serve that image itself once, writable, as the same user and with the same runtime directory as before, \
         and stop ringdisk (SIGTERM); then this works",
        image = .image.display(), journal = .journal.display()
    )]
    NotReplayed { image: PathBuf, journal: PathBuf },
}

impl Journals {
    /// For a process that will become `user`. Each user has a directory of its own: a journal must not cause writes to
    /// another user's image.
    pub fn new(user: Option<&UserAccount>) -> Self {
        let name = user.map_or("journals".into(), |user| format!("journals-{}", user.name));
        let sockets = sockets::directory();
        let directory = sockets.join(name);
        let problem = credentials::make_directory(&directory, user).err();
        Self {
            others: others(&sockets, &directory).unwrap_or_default().into(),
            directory,
            owner: user.map(|user| (user.uid, user.gid)),
            problem: problem.map(|e| e.to_string()),
        }
    }

    /// The owner that new files must get, if this process will become another user.
    pub fn owner(&self) -> Option<(u32, u32)> {
        self.owner
    }

    /// Opens the journal of an image that this process has locked, or creates it. Returns the journal and its path. If no
    /// journal is possible, logs a warning and returns `None`.
    ///
    /// # Errors
    /// There is a journal that cannot be used.
    pub fn open(
        &self,
        disk: &str,
        file: &Arc<DiskFile>,
    ) -> Result<Option<(JournalFile, PathBuf)>, JournalError> {
        let opened = Identity::of(file).and_then(|identity| {
            let path = self.directory.join(&identity.file_name);
            match self.of_another_user(disk, file, &identity) {
                Elsewhere::Found(path) => return Ok(Err(JournalError::AnotherUsers(path))),
                Elsewhere::Unreadable(other, e)
                    if !journal_at(&path, &identity, file).is_some_and(is_its)
                        && may_have_journal(&readable(file)) =>
                {
                    return Ok(Err(JournalError::Unreadable(other, e)));
                }
                // Most images that say so have lost their journal in a crash of the host, or are copies.
                Elsewhere::Hidden(other, e)
                    if look(&path).is_ok_and(|is_there| !is_there)
                        && may_have_journal(&readable(file)) =>
                {
                    warn!(
                        "disk {disk}: whether its journal is {}, of a ringdisk of another user, cannot be seen: {e}. If such a \
                         ringdisk was killed while it served this image, stop this one now, and serve the image as that user first",
                        other.display()
                    );
                }
                Elsewhere::Unreadable(..) | Elsewhere::Hidden(..) | Elsewhere::Nothing => {}
            }
            let e = match self.try_open(disk, &identity, &path, created(file)) {
                Ok(journal) => return Ok(Ok((journal, path))),
                Err(e) => e,
            };
            match look(&path) {
                Ok(true) => Ok(Err(JournalError::Unusable(path, e))),
                Ok(false) => Err(e),
                Err(_) if !may_have_journal(&readable(file)) => Err(e),
                Err(hidden) => Ok(Err(JournalError::Hidden(path, hidden))),
            }
        });
        match opened {
            Ok(opened) => opened.map(Some),
            Err(e) => {
                warn!(
                    "disk {disk}: no journal possible in {}: {e}; each write to new clusters is flushed before it completes, which \
                     is slow",
                    self.directory.display()
                );
                Ok(None)
            }
        }
    }

    /// Checks that an image which is only read, and says that it has a journal, has none here. Logs a warning.
    ///
    /// # Errors
    /// There is a journal: the image lacks acknowledged writes.
    pub fn check_none(&self, disk: &str, file: &Arc<DiskFile>) -> Result<(), JournalError> {
        let name = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let image = std::fs::read_link(name).unwrap_or_default();
        let identity = Identity::of(file).ok();
        let found = identity.map_or(Ok(false), |identity| {
            let path = self.directory.join(&identity.file_name);
            look(&path).map_err(|hidden| JournalError::Hidden(path.clone(), hidden))?;
            let journal = match journal_at(&path, &identity, file) {
                Some(JournalOwner::Unnecessary) => return Ok(true),
                // Errors are reported when the image is opened for writing.
                Some(JournalOwner::ThisImage | JournalOwner::Unreadable) => path,
                _ => match self.of_another_user(disk, file, &identity) {
                    Elsewhere::Found(path) => path,
                    Elsewhere::Unreadable(path, e) => {
                        return Err(JournalError::Unreadable(path, e));
                    }
                    Elsewhere::Hidden(..) | Elsewhere::Nothing => return Ok(false),
                },
            };
            Err(JournalError::NotReplayed {
                image: image.clone(),
                journal,
            })
        });
        if found? {
            return Ok(());
        }
        warn!(
            "disk {disk}: {} says that it has a journal, but there is none in {}. This is normal after a crash of the host, and \
             for a copy of a disk in use. If ringdisk was killed, writes that the guest had not flushed are missing",
            image.display(),
            self.directory.display()
        );
        Ok(())
    }

    /// A journal of this image in the directory of another user. It is not replayed: that user may not be allowed to
    /// write the image.
    fn of_another_user(&self, disk: &str, file: &Arc<DiskFile>, identity: &Identity) -> Elsewhere {
        let mut found = Elsewhere::Nothing;
        // At each opening: another ringdisk may have come since the start.
        let Some(sockets) = self.directory.parent() else {
            return found;
        };
        let others = match others(sockets, &self.directory) {
            Ok(others) => others,
            Err(e) if is_absence(&e) => return found,
            Err(e) => return Elsewhere::Hidden(self.directory.clone(), e),
        };
        for other in others {
            let path = other.join(&identity.file_name);
            let owner = match options_of_others().open(&path) {
                Ok(journal) => owner_of(journal, identity, file),
                Err(e) if is_absence(&e) => continue,
                // The sandbox does not keep this process from seeing whether it is there.
                Err(e) => match look(&path) {
                    Ok(false) => continue,
                    Ok(true) => return Elsewhere::Unreadable(path, e),
                    Err(_) => {
                        found = Elsewhere::Hidden(path, e);
                        continue;
                    }
                },
            };
            if is_its(owner) {
                return Elsewhere::Found(path);
            }
            warn!(
                "disk {disk}: {} has the name of this image's journal, but is not that of this image, or is damaged; \
                 ringdisk leaves it alone",
                path.display()
            );
        }
        found
    }

    /// The directories of other users' journals at the start, which the sandbox lets this process read. Where there is a newer
    /// one, an image may have a journal there that cannot be seen.
    pub fn of_others(&self) -> impl Iterator<Item = PathBuf> {
        self.others.iter().cloned()
    }

    /// `created`: when the image was, if that is known.
    fn try_open(
        &self,
        disk: &str,
        identity: &Identity,
        path: &Path,
        created: Option<SystemTime>,
    ) -> io::Result<JournalFile> {
        if let Some(problem) = &self.problem {
            return Err(io::Error::other(problem.as_str()));
        }
        let storage = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            // Does not follow links.
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)?;
        if let Some(owner) = self.owner
            && rustix::process::geteuid().is_root()
        {
            credentials::give(&storage, owner)?;
        }
        let (disk, at) = (disk.to_owned(), path.display().to_string());
        let log = move |event| match event {
            JournalEvent::Replayed(n) => info!(
                "disk {disk}: replayed {n} changes to its image from the journal of a killed process"
            ),
            JournalEvent::Outdated => warn!(
                "disk {disk}: {at} is not used: it belongs to another image, or to another state of this one (because a \
                 backup was restored, or another program has written to the image); writes that the guest had not flushed \
                 when ringdisk was killed are not in this image"
            ),
            JournalEvent::Missing { snapshots } => {
                warn!(
                    "disk {disk}: its image says that it has a journal, but there is none at {at}, or an empty one. This is \
                     normal after a crash of the host, and for a copy of a disk in use. If ringdisk was killed, stop it \
                     now, and start it as the same user, with the same runtime directory, and with the image on the same \
                     device number as before (another mount, loop device or volume may have another number): as soon as a VM \
                     starts on this disk, or it is written to, writes that were not flushed before the kill are lost"
                );
                if snapshots {
                    warn!(
                        "disk {disk}: until ringdisk has written to this image and closed it, 'qemu-img check -r' would \
                         DESTROY its internal snapshots; to use it without ringdisk, first run 'qemu-img amend -o \
                         compat=v3' on it"
                    );
                }
            }
            JournalEvent::Failed(e) => error!(
                "disk {disk}: {at} cannot be written: {e}; until it can, each write to new clusters is flushed before it \
                 completes, which is slow"
            ),
            JournalEvent::NotForVersion2 => warn!(
                "disk {disk}: a qcow2 image of version 2 cannot have a journal: each write to new clusters is flushed before \
                 it completes, which is slow; 'qemu-img amend -o compat=v3' makes it version 3 (stop ringdisk first)"
            ),
            JournalEvent::NotWithSnapshots => info!(
                "disk {disk}: an image with internal snapshots has no journal: each write to new clusters is flushed \
                 before it completes, which is slow"
            ),
        };
        let written = storage.metadata()?.modified().ok();
        Ok(JournalFile {
            storage: Arc::new(PlainFile(storage)),
            identity: identity.bytes,
            is_of_earlier_file: created.zip(written).is_some_and(|(it, last)| it > last),
            on_event: Box::new(log),
        })
    }
}

/// When an image's file was created. A file system may use the number of a deleted one again. Of device nodes, it says nothing.
fn created(file: &DiskFile) -> Option<SystemTime> {
    let name = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    let there = std::fs::metadata(name).ok().filter(Metadata::is_file);
    there.and_then(|there| there.created().ok())
}

/// Whether there is something at a path. An error means that nobody knows.
fn look(path: &Path) -> io::Result<bool> {
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(e) if is_absence(&e) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Whether an error says that nothing is there.
fn is_absence(e: &io::Error) -> bool {
    [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&e.kind())
}

fn is_its(owner: JournalOwner) -> bool {
    matches!(owner, JournalOwner::ThisImage | JournalOwner::Unnecessary)
}

fn readable(file: &Arc<DiskFile>) -> FileStorage {
    FileStorage {
        file: file.clone(),
        flushes: false,
    }
}

/// Which image the journal at a path belongs to; `None` if there is none or it cannot be opened.
fn journal_at(path: &Path, identity: &Identity, file: &Arc<DiskFile>) -> Option<JournalOwner> {
    let journal = options_of_others().open(path).ok()?;
    Some(owner_of(journal, identity, file))
}

fn owner_of(journal: File, identity: &Identity, file: &Arc<DiskFile>) -> JournalOwner {
    journal_owner(&PlainFile(journal), &identity.bytes, &readable(file))
}

/// Identifies an image, within a boot of the host.
struct Identity {
    bytes: [u8; 32],
    file_name: String,
}

impl Identity {
    fn of(file: &DiskFile) -> io::Result<Self> {
        let engine::Identity { device, inode } = file.identity();
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&boot()?);
        bytes[16..24].copy_from_slice(&device.to_le_bytes());
        bytes[24..].copy_from_slice(&inode.to_le_bytes());
        Ok(Self {
            bytes,
            file_name: format!("{device:x}-{inode:x}.{EXTENSION}"),
        })
    }
}

/// The id of this boot: journals of earlier boots do not count.
pub(super) fn boot() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16)
        .map(u128::to_be_bytes)
        .map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    /// systemd.exec(5), `RuntimeDirectoryPreserve`: with `restart`, the directory is removed when a start fails, and when the
    /// service is stopped.
    #[test]
    fn systemd_never_removes_journals() {
        let unit = include_str!("../../../../packaging/ringdisk.service");
        let values = |key: &str| {
            let lines = unit.lines().filter_map(|line| line.split_once('='));
            let values = lines.filter(|(name, _)| *name == key);
            values
                .map(|(_, value)| value.to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(values("RuntimeDirectory"), ["ringdisk"]);
        assert_eq!(values("RuntimeDirectoryPreserve"), ["yes"]);
        // In none of them would the next start find them.
        for key in ["DynamicUser", "TemporaryFileSystem", "ExecStopPost"] {
            assert!(values(key).is_empty(), "{key}");
        }
    }
}
