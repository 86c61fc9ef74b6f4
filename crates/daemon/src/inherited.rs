//! What a process inherits from the one that served before it: open files, sockets and sessions. Without such a process,
//! it inherits nothing.

mod carry;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use block::DirtyBitmap;
use engine::Identity;
use guest::SavedSession;
use rustix::fs::{OFlags, fcntl_getfl};
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::config::nbd::{NbdAddress, NbdConfig, NbdExportSpec, TlsSpec};
use crate::config::spec::{DiskSpec, FileSpec};
use crate::state::Overrides;

/// What was inherited and has not been taken yet.
#[derive(Default)]
pub struct Inherited {
    parts: Mutex<InheritedParts>,
}

/// An NBD server, as one process passes it to the next.
pub struct NbdService {
    pub address: NbdAddress,
    pub listener: OwnedFd,
    /// Clients must use TLS.
    pub tls: Option<TlsSpec>,
    pub exports: Vec<NbdExportSpec>,
}

#[derive(Default)]
pub struct InheritedParts {
    /// The old process continues to serve if this one exits now.
    pub uncommitted: bool,
    /// Open and locked.
    pub files: Vec<OwnedFd>,
    /// The lock on the state directory.
    pub lock: Option<File>,
    pub control: Option<UnixListener>,
    pub upgrade: Option<UnixListener>,
    pub metrics: Option<TcpListener>,
    pub nbd: Option<NbdService>,
    /// Certificates for NBD clients that commands have added, by id.
    pub tls: Vec<(String, TlsSpec)>,
    /// By name.
    pub disks: BTreeMap<String, InheritedDisk>,
    /// How what the old process serves differs from the configuration.
    pub overrides: Option<Overrides>,
    /// The old process has passed on which numbers of queues are defaults. Older versions do not.
    pub knows_default_queues: bool,
    /// What the configuration says about NBD that is in force in the old process. Older versions do not pass it on.
    pub nbd_config: Option<NbdConfig>,
    /// The configuration in force there has a directory with more files.
    pub has_directory: bool,
    /// Disks that the old process was to serve and could not.
    pub absent: Vec<String>,
    /// Disks that other hosts may have locked.
    pub released: Vec<String>,
    /// The files of all sockets.
    pub sockets: Vec<(PathBuf, FileIdentity)>,
    pub exports: Vec<(PathBuf, InheritedExport)>,
    /// Temporary bitmaps, each with the name of its disk.
    pub bitmaps: Vec<(String, DirtyBitmap)>,
    /// Opened when this process serves.
    pub gate: Option<Arc<Gate>>,
}

impl InheritedParts {
    /// A configured disk on the files of `before`. Versions without the key `data-file` opened the data file that the
    /// image named: the key stays if it names a file that the old process has open.
    fn with_file_of(&self, disk: &DiskSpec, before: &DiskSpec) -> DiskSpec {
        let kept = disk.with_file_of(before);
        let (None, Some(path)) = (&kept.data_file, &disk.data_file) else {
            return kept;
        };
        let named = DiskSpec {
            data_file: Some(path.clone()),
            ..kept.clone()
        };
        let is_open = |there: fs::Metadata| self.has_file(Identity::of(&there));
        if named.has_file_of(disk) && fs::metadata(path).is_ok_and(is_open) {
            named
        } else {
            kept
        }
    }

    /// Whether the old process has a file open.
    fn has_file(&self, file: Identity) -> bool {
        let mut files = self.files.iter();
        files.any(|fd| Identity::of_fd(fd).is_ok_and(|open| open == file))
    }
}

/// A disk of the old process, served or not.
pub struct InheritedDisk {
    /// As it is now.
    pub spec: DiskSpec,
    /// As it is configured.
    pub configured: Option<DiskSpec>,
    /// Its file, if it is in one that is locked.
    pub file: Option<FileIdentity>,
}

/// An [`Identity`] that can be sent to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity(u64, u64);

impl From<Identity> for FileIdentity {
    fn from(file: Identity) -> Self {
        Self(file.device, file.inode)
    }
}

impl From<FileIdentity> for Identity {
    fn from(FileIdentity(device, inode): FileIdentity) -> Self {
        Self { device, inode }
    }
}

/// An export's socket, and the front-end that is connected there.
pub struct InheritedExport {
    pub listener: UnixListener,
    /// The file of that socket, if it is known.
    pub made: Option<Identity>,
    /// The file that its guest uses, if the disk is in one that is locked.
    pub file: Option<FileIdentity>,
    pub session: Option<(UnixStream, SavedSession)>,
    pub write_cache: Option<bool>,
    pub capacity_read: Option<u64>,
    /// The disk's size in bytes, if it is known.
    pub size: Option<u64>,
    /// The guest is served only after it opens.
    pub gate: Arc<Gate>,
}

/// Opens once, for all who wait.
#[derive(Default)]
pub struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub fn wait(&self) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = self.opened.wait_while(open, |open| !*open);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    fn open(&self) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }
}

/// The file that the old process made for a socket.
pub fn made_at(sockets: &[(PathBuf, FileIdentity)], path: &Path) -> Option<Identity> {
    let mut sockets = sockets.iter();
    let made = sockets.find(|(socket, _)| socket == path)?.1;
    Some(made.into())
}

/// Removes a socket, unless something else has taken its place.
fn remove_made(sockets: &[(PathBuf, FileIdentity)], path: &Path) {
    let there = fs::symlink_metadata(path);
    let is_it = |there: fs::Metadata| match made_at(sockets, path) {
        Some(made) => Identity::of(&there) == made,
        None => there.file_type().is_socket(),
    };
    if there.is_ok_and(is_it) {
        let _ = fs::remove_file(path);
    }
}

impl Inherited {
    pub fn new(parts: InheritedParts) -> Self {
        let parts = InheritedParts {
            uncommitted: true,
            ..parts
        };
        Self {
            parts: Mutex::new(parts),
        }
    }

    /// The file that the old process made for a socket, if it is known.
    pub fn made(&self, socket: &Path) -> Option<Identity> {
        made_at(&self.parts().sockets, socket)
    }

    /// The file of a disk at a path, as the old process has it open. If this process cannot find the path, this is the
    /// file that the old process used for the disk: its guest continues there. The old process may say of a file that it
    /// has open what it likes: this process will have the same user, and no more rights.
    pub fn file(&self, disk: &str, path: &Path, write: bool) -> Option<OwnedFd> {
        let there = match fs::metadata(path) {
            Ok(there) => Identity::of(&there).into(),
            Err(e)
                if [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied]
                    .contains(&e.kind()) =>
            {
                let parts = self.parts();
                let inherited = parts.disks.get(disk)?;
                let was_there =
                    matches!(&inherited.spec.file, FileSpec::Path(before) if before == path);
                inherited.file.filter(|_| was_there)?
            }
            Err(_) => return None,
        };
        self.same_as(there, write)
    }

    /// The same file as this one, as the old process has it open.
    pub fn file_like(&self, file: &OwnedFd, write: bool) -> Option<OwnedFd> {
        self.same_as(Identity::of_fd(file).ok()?.into(), write)
    }

    fn same_as(&self, wanted: FileIdentity, write: bool) -> Option<OwnedFd> {
        let mut parts = self.parts();
        let place = parts.files.iter().position(|fd| {
            let same = Identity::of_fd(fd).is_ok_and(|there| wanted == there.into());
            let access = fcntl_getfl(fd).unwrap_or(OFlags::empty()) & OFlags::ACCMODE;
            same && (access == OFlags::RDWR) == write
        })?;
        Some(parts.files.swap_remove(place))
    }

    /// A configured disk, on the file that it has now.
    pub fn on_its_file(&self, disk: DiskSpec) -> DiskSpec {
        let parts = self.parts();
        match parts.disks.get(&disk.name) {
            Some(inherited) if inherited.configured.is_some() => {
                parts.with_file_of(&disk, &inherited.spec)
            }
            _ => disk,
        }
    }

    /// The number of queues of a disk in the old process, if that is of a version that gave every disk one. Others pass
    /// on defaults with the [changes made at run time](Self::overrides).
    pub fn queues(&self, disk: &str) -> Option<u16> {
        self.parts().disks.get(disk)?.spec.queues
    }

    /// Whether the old process has a disk of this name.
    pub fn has_disk(&self, name: &str) -> bool {
        self.parts().disks.contains_key(name)
    }

    /// Whether the old process serves a disk at this socket, which has not been taken yet.
    pub fn has_export_at(&self, socket: &Path) -> bool {
        self.parts().exports.iter().any(|(path, _)| path == socket)
    }

    /// How what the old process serves differs from the configuration, if it is known.
    pub fn overrides(&self) -> Option<Overrides> {
        self.parts().overrides.take()
    }

    pub fn lock(&self) -> Option<File> {
        self.parts().lock.take()
    }

    /// Whether the old process was to serve a disk and could not.
    pub fn is_absent(&self, disk: &str) -> bool {
        self.parts().absent.iter().any(|name| name == disk)
    }

    /// Whether another host may have a disk locked.
    pub fn is_released(&self, disk: &str) -> bool {
        self.parts().released.iter().any(|name| name == disk)
    }

    pub fn control(&self, path: &Path) -> Option<UnixListener> {
        let control = &mut self.parts().control;
        control.take_if(|listener| is_at(listener, path))
    }

    pub fn upgrade(&self, path: &Path) -> Option<UnixListener> {
        let upgrade = &mut self.parts().upgrade;
        upgrade.take_if(|listener| is_at(listener, path))
    }

    pub fn metrics(&self, address: std::net::SocketAddr) -> Option<TcpListener> {
        let mut parts = self.parts();
        let at = parts.metrics.as_ref()?.local_addr().ok()?;
        let same = at.ip() == address.ip() && (at.port() == address.port() || address.port() == 0);
        parts.metrics.take_if(|_| same)
    }

    /// The NBD server of the old process.
    pub fn nbd(&self) -> Option<NbdService> {
        self.parts().nbd.take()
    }

    /// The certificates for NBD clients that commands had added, by id.
    pub fn tls(&self) -> Vec<(String, TlsSpec)> {
        std::mem::take(&mut self.parts().tls)
    }

    /// The export at this socket.
    pub fn export(&self, socket: &Path) -> Option<InheritedExport> {
        let mut parts = self.parts();
        let place = parts.exports.iter().position(|(path, _)| path == socket)?;
        Some(parts.exports.swap_remove(place).1)
    }

    /// The temporary bitmaps of a disk.
    pub fn bitmaps(&self, disk: &str) -> Vec<DirtyBitmap> {
        let mut parts = self.parts();
        let all = std::mem::take(&mut parts.bitmaps).into_iter();
        let (its, others): (Vec<_>, Vec<_>) = all.partition(|(of, _)| of == disk);
        parts.bitmaps = others;
        its.into_iter().map(|(_, bitmap)| bitmap).collect()
    }

    /// Whether the configuration in force in the old process has a directory with more files.
    pub fn has_directory(&self) -> bool {
        self.parts().has_directory
    }

    /// Whether the old process continues to serve if this one exits now.
    pub fn is_uncommitted(&self) -> bool {
        self.parts().uncommitted
    }

    /// The old process is about to be told that this one is ready.
    pub fn begin_commit(&self) {
        self.parts().uncommitted = false;
    }

    /// This process serves from now on: opens the gate, and closes what was inherited and is no longer configured.
    pub fn finish_commit(&self) {
        let mut parts = self.parts();
        if let Some(gate) = parts.gate.take() {
            gate.open();
        }
        let sockets = std::mem::take(&mut parts.sockets);
        for listener in [parts.control.take(), parts.upgrade.take()]
            .iter()
            .flatten()
        {
            let address = listener.local_addr().ok();
            if let Some(path) = address.as_ref().and_then(|at| at.as_pathname()) {
                remove_made(&sockets, path);
            }
        }
        parts.metrics = None;
        // A disk that gets one of these names from now on is another one.
        parts.disks.clear();
        parts.released.clear();
        parts.bitmaps.clear();
        for file in parts.files.drain(..) {
            if let Err(e) = rustix::fs::fdatasync(&file) {
                warn!("a disk that is no longer served could not be made durable: {e}");
            }
        }
        for (socket, _) in parts.exports.drain(..) {
            warn!(
                "{}: the disk that was served there is no longer configured, and no longer served",
                socket.display()
            );
            remove_made(&sockets, &socket);
        }
    }

    fn parts(&self) -> MutexGuard<'_, InheritedParts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_at(listener: &UnixListener, path: &Path) -> bool {
    let at = listener.local_addr();
    at.is_ok_and(|at| at.as_pathname() == Some(path))
}
