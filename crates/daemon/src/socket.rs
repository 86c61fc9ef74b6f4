//! The sockets on which front-ends connect.

pub mod accept;

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::Identity;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid, chmod, chownat, fchmod, fstat, open};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustix::net::{bind, connect, listen};
use rustix::process::geteuid;
use thiserror::Error;

use crate::config::spec::{DiskSpec, SocketAccess};

#[derive(Debug, Error)]
pub enum SocketError {
    #[error(
        "{0}: a live server has this socket; choose another with socket=PATH (--control PATH), or stop that server if no VM \
         uses it"
    )]
    InUse(PathBuf),
    #[error(
        "{0}: is there and not a socket, and is left alone; choose another path with socket=PATH (--control PATH)"
    )]
    NotASocket(PathBuf),
    #[error(
        "{0}: cannot make the socket: {cause}",
        cause = block::explain(.1, "choose a directory that this user may write to with socket=PATH (--control PATH)")
    )]
    Bind(PathBuf, io::Error),
    #[error(
        "{0}: the socket cannot be given the owner, group or mode that was asked for: {1}; only root may give \
        it away, others to a group that they are in"
    )]
    Access(PathBuf, io::Error),
}

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// A listening socket that goes away with this value.
pub struct Socket {
    pub listener: UnixListener,
    place: Arc<BoundPath>,
    /// It goes away with this value, whatever has become of its file.
    owned: bool,
}

/// Where a socket is, for those who look whether it is still there.
pub struct BoundPath {
    path: PathBuf,
    /// Device and inode of what was made.
    made: Mutex<Option<Identity>>,
}

/// What is at the path of a socket.
#[derive(Debug, PartialEq, Eq)]
pub enum PathStatus {
    Itself,
    Nothing,
    /// Something that somebody else has put there.
    Other(String),
}

impl BoundPath {
    fn new(path: &Path, made: Option<Identity>) -> Arc<Self> {
        let (path, made) = (path.into(), Mutex::new(made));
        Arc::new(Self { path, made })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What was made there, unless that is another's by now.
    pub fn made(&self) -> Option<Identity> {
        *self.lock()
    }

    /// Nobody leaves it half changed.
    fn lock(&self) -> MutexGuard<'_, Option<Identity>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn look(&self) -> PathStatus {
        match fs::symlink_metadata(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => PathStatus::Nothing,
            Err(e) => PathStatus::Other(format!("what cannot be looked at ({e})")),
            Ok(there) if Some(Identity::of(&there)) == self.made() => PathStatus::Itself,
            Ok(there) => PathStatus::Other(kind(there.file_type()).into()),
        }
    }
}

fn kind(file: fs::FileType) -> &'static str {
    match () {
        () if file.is_socket() => "another socket",
        () if file.is_dir() => "a directory",
        () if file.is_symlink() => "a symbolic link",
        () if file.is_file() => "a file",
        () => "a device or pipe",
    }
}

impl Socket {
    /// Listens at `path`. A socket that a dead server left there is replaced.
    pub fn bind(path: &Path, access: SocketAccess) -> Result<Self, SocketError> {
        if access == SocketAccess::default() {
            return Self::bind_for(path, None, SocketType::STREAM);
        }
        // For nobody else before it is as it is to be.
        let socket = Self::bind_private(path)?;
        give(path, access).map_err(|e| SocketError::Access(path.into(), e.into()))?;
        Ok(socket)
    }

    /// The same, for a socket on which only this user may connect.
    pub fn bind_private(path: &Path) -> Result<Self, SocketError> {
        let private = Mode::RUSR | Mode::WUSR;
        Self::bind_for(path, Some(private), SocketType::STREAM)
    }

    /// The same, for packets instead of a stream.
    pub fn bind_for_packets(path: &Path) -> Result<Self, SocketError> {
        let private = Mode::RUSR | Mode::WUSR;
        Self::bind_for(path, Some(private), SocketType::SEQPACKET)
    }

    /// Listens beside `path`, where another socket of this process is until this one is [moved there](Self::move_to).
    pub fn bind_beside(path: &Path, access: SocketAccess) -> Result<Self, SocketError> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        match Self::bind(&path.with_file_name(name), access) {
            // A path of a socket has an end.
            Err(SocketError::Bind(_, e)) if e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
                Self::bind(&path.with_file_name(".new"), access)
            }
            result => result,
        }
    }

    /// Takes this place, whatever socket is there.
    pub fn move_to(&mut self, path: &Path) -> Result<(), SocketError> {
        fs::rename(self.path(), path).map_err(|e| SocketError::Bind(path.into(), e))?;
        self.place = BoundPath::new(path, self.place.made());
        Ok(())
    }

    /// Takes a socket that another process listens at, and has `made`, as far as is known. It stays that one's until it is
    /// [`own`](Self::own)ed.
    pub fn adopt(listener: UnixListener, path: &Path, made: Option<Identity>) -> Self {
        Self {
            listener,
            place: BoundPath::new(path, made),
            owned: false,
        }
    }

    /// It goes away with this value from now on.
    pub fn own(&mut self) {
        self.owned = true;
        let mut made = self.place.lock();
        *made = made.or_else(|| identity(&self.place.path));
    }

    pub fn path(&self) -> &Path {
        &self.place.path
    }

    pub fn place(&self) -> &Arc<BoundPath> {
        &self.place
    }

    /// Whether somebody has removed it: who is connected goes on, and nobody else can connect.
    pub fn is_removed(&self) -> bool {
        self.owned && self.place.look() == PathStatus::Nothing
    }

    /// Listens where `new` does from now on, which has been made in its place.
    pub fn renew(&mut self, mut new: Self) {
        std::mem::swap(&mut self.listener, &mut new.listener);
        *self.place.lock() = new.place.lock().take();
    }

    /// Whether it goes away with this value.
    pub fn is_own(&self) -> bool {
        self.owned
    }

    /// Removes its file, if it is its own.
    pub fn remove(&mut self) {
        // Not if somebody has put another one there.
        let is_its = self.place.look() == PathStatus::Itself;
        if self.place.lock().take().is_some() && is_its {
            let _ = fs::remove_file(self.path());
        }
    }

    /// It stays when this value goes.
    pub fn disown(&mut self) {
        self.owned = false;
        *self.place.lock() = None;
    }

    fn bind_for(path: &Path, mode: Option<Mode>, kind: SocketType) -> Result<Self, SocketError> {
        let fail = |e| SocketError::Bind(path.into(), e);
        match fs::symlink_metadata(path) {
            Ok(there) if !there.file_type().is_socket() => {
                return Err(SocketError::NotASocket(path.into()));
            }
            Ok(_) => match is_served(path) {
                Ok(false) => fs::remove_file(path).map_err(fail)?,
                Ok(true) => return Err(SocketError::InUse(path.into())),
                Err(Errno::NOENT) => {}
                Err(e) => return Err(fail(e.into())),
            },
            Err(_) => {
                if let Some(directory) = path.parent() {
                    fs::create_dir_all(directory).map_err(fail)?;
                }
            }
        }
        let listener = make(path, mode, kind).map_err(|e| fail(e.into()))?;
        Ok(Self {
            listener,
            place: BoundPath::new(path, identity(path)),
            owned: true,
        })
    }
}

/// Gives a socket to whom it is to belong. Whoever may write to its directory may have put something else there: what
/// is opened is looked at, and nothing is looked up again.
fn give(path: &Path, access: SocketAccess) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let there = open(path, flags, Mode::empty())?;
    let stat = fstat(&there)?;
    let is_ours = stat.st_uid == geteuid().as_raw() && stat.st_nlink == 1;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket || !is_ours {
        return Err(Errno::NOTSOCK);
    }
    let owner = access.owner.map(Uid::from_raw);
    let group = access.group.map(Gid::from_raw);
    chownat(&there, "", owner, group, AtFlags::EMPTY_PATH)?;
    let all = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP;
    let default = if group.is_some() {
        all
    } else {
        Mode::RUSR | Mode::WUSR
    };
    let mode = access.mode.map_or(default, Mode::from_raw_mode);
    // Not even a descriptor leads to the file of a socket but this way.
    chmod(format!("/proc/self/fd/{}", there.as_raw_fd()), mode)
}

/// Whether somebody listens at a socket. A server that is too busy to accept is one that does, and is not
/// waited for.
fn is_served(path: &Path) -> Result<bool, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&probe, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(e) => Err(e),
    }
}

fn make(path: &Path, mode: Option<Mode>, kind: SocketType) -> Result<UnixListener, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    if let Some(mode) = mode {
        // The file gets the mode that its socket has: there is no moment at which others may connect.
        fchmod(&socket, mode)?;
    }
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.remove();
    }
}

fn identity(path: &Path) -> Option<Identity> {
    let there = fs::symlink_metadata(path).ok()?;
    Some(Identity::of(&there))
}

/// The one path of a socket, however its directory is written.
pub fn canonical_path(path: &Path) -> PathBuf {
    let directory = path
        .parent()
        .and_then(|directory| fs::canonicalize(directory).ok());
    match (directory, path.file_name()) {
        (Some(directory), Some(name)) => directory.join(name),
        _ => path.into(),
    }
}

/// Where a disk's socket is.
pub fn path(spec: &DiskSpec) -> PathBuf {
    let default = || directory().join(format!("{}.sock", spec.name));
    spec.socket.clone().unwrap_or_else(default)
}

/// Where sockets are if the operator does not say: where a service manager has made a directory for them
/// (systemd.exec(5), `RuntimeDirectory`), or else where this user has one. Never in a directory that others
/// may write to: whoever swaps the socket is handed the guest's memory.
pub fn directory() -> PathBuf {
    let root = rustix::process::geteuid().is_root();
    if let Some(first) = std::env::var_os("RUNTIME_DIRECTORY")
        .and_then(|all| std::env::split_paths(&all).next())
        .filter(|first| first.is_absolute())
    {
        return first;
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if root => "/run/ringdisk".into(),
        Some(directory) => PathBuf::from(directory).join("ringdisk"),
        None => std::env::current_dir().unwrap_or_default(),
    }
}
