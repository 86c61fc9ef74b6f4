//! Listening sockets, and what is at their paths.

pub mod accept;
pub mod reach;

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

use crate::config::spec::SocketAccess;

#[derive(Debug, Error)]
pub enum SocketError {
    #[error(
        "{0}: a live server has this socket; choose another with socket=PATH (--control PATH, --nbd PATH, --listen PATH), \
         or stop that server if no VM uses it"
    )]
    InUse(PathBuf),
    #[error(
        "{0}: exists, is not a socket, and is left alone; choose another path with socket=PATH (--control PATH, --nbd PATH, \
         --listen PATH)"
    )]
    NotASocket(PathBuf),
    #[error(
        "{0}: cannot make the socket: {cause}",
        cause = block::explain(.1, "choose a directory that this user may write to with socket=PATH (--control PATH, --nbd PATH, --listen PATH)")
    )]
    Bind(PathBuf, io::Error),
    #[error(
        "{0}: cannot make the directory of the socket: {1}; make it first: a running ringdisk may not be allowed to"
    )]
    Directory(PathBuf, io::Error),
    #[error(
        "{0}: cannot set the owner, group or mode of the socket: {cause}",
        cause = block::explain(.1, "only root can set an owner, and other users only a group of their own: make ringdisk's user \
            a member of it ('usermod -aG GROUP USER'), then restart or upgrade ringdisk")
    )]
    Access(PathBuf, io::Error),
}

/// Limit of connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// A listening socket. Its file is removed with this value.
pub struct Socket {
    pub listener: UnixListener,
    place: Arc<BoundPath>,
    /// The file is removed with this value. False for a socket of another process.
    owned: bool,
}

/// The path of a socket, shared with threads that check whether the file is still there.
pub struct BoundPath {
    path: PathBuf,
    /// The file that was made there.
    made: Mutex<Option<Identity>>,
}

/// What is at the path of a socket.
#[derive(Debug, PartialEq, Eq)]
pub enum PathStatus {
    Itself,
    Nothing,
    /// Something else, with a description.
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

    /// The file that was made there, if it is still this process's.
    pub fn made(&self) -> Option<Identity> {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Identity>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file of `new`, which was made at this path again, is the one of this path's socket from now on.
    pub fn renew(&self, new: &mut Socket) {
        *self.lock() = new.place.lock().take();
        new.owned = false;
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
    /// Listens at `path`. Replaces a socket that a dead server has left there.
    pub fn bind(path: &Path, access: SocketAccess) -> Result<Self, SocketError> {
        Self::reserve(path, access)?.listening()
    }

    /// Like [`bind`](Self::bind), without listening yet: a client that connects is refused at once.
    pub fn reserve(path: &Path, access: SocketAccess) -> Result<Self, SocketError> {
        if access == SocketAccess::default() {
            return Self::bind_for(path, None, SocketType::STREAM);
        }
        // Private until owner and mode are set.
        let private = Mode::RUSR | Mode::WUSR;
        let socket = Self::bind_for(path, Some(private), SocketType::STREAM)?;
        give(path, access).map_err(|e| SocketError::Access(path.into(), e.into()))?;
        Ok(socket)
    }

    /// Like [`bind`](Self::bind), for a socket to which only this user may connect.
    pub fn bind_private(path: &Path) -> Result<Self, SocketError> {
        let private = Mode::RUSR | Mode::WUSR;
        Self::bind_for(path, Some(private), SocketType::STREAM)?.listening()
    }

    /// Like [`bind_private`](Self::bind_private), for packets instead of a stream.
    pub fn bind_for_packets(path: &Path) -> Result<Self, SocketError> {
        let private = Mode::RUSR | Mode::WUSR;
        Self::bind_for(path, Some(private), SocketType::SEQPACKET)?.listening()
    }

    fn listening(self) -> Result<Self, SocketError> {
        let listens = listen(&self.listener, BACKLOG);
        listens.map_err(|e| SocketError::Bind(self.path().into(), e.into()))?;
        Ok(self)
    }

    /// A [reserved](Self::reserve) socket that listens from now on: the file is that of the value that is returned, and stays
    /// with this one. `None` if something else is at its path.
    ///
    /// # Errors
    /// It cannot listen.
    pub fn listen_here(&self) -> Option<Result<Self, SocketError>> {
        let is_there = self.place.look() == PathStatus::Itself;
        let copy = || {
            let fail = |e| SocketError::Bind(self.path().into(), e);
            let listener = self.listener.try_clone().map_err(fail)?;
            let mut copy = Self::adopt(listener, self.path(), self.place.made());
            copy.own();
            copy.listening()
        };
        is_there.then(copy)
    }

    /// Listens at a path next to `path`, which another socket of this process has until this one is [moved
    /// there](Self::move_to).
    pub fn bind_beside(path: &Path, access: SocketAccess) -> Result<Self, SocketError> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        match Self::bind(&path.with_file_name(name), access) {
            // The length of a socket's path is limited.
            Err(SocketError::Bind(_, e)) if e.raw_os_error() == Some(libc::ENAMETOOLONG) => {
                Self::bind(&path.with_file_name(".new"), access)
            }
            result => result,
        }
    }

    /// Moves the socket to `path`, and replaces what is there.
    pub fn move_to(&mut self, path: &Path) -> Result<(), SocketError> {
        fs::rename(self.path(), path).map_err(|e| SocketError::Bind(path.into(), e))?;
        self.place = BoundPath::new(path, self.place.made());
        Ok(())
    }

    /// A socket that was inherited, with the file that the old process has `made`, if it is known. The old process owns
    /// it until [`own`](Self::own) is called.
    pub fn adopt(listener: UnixListener, path: &Path, made: Option<Identity>) -> Self {
        Self {
            listener,
            place: BoundPath::new(path, made),
            owned: false,
        }
    }

    /// This process owns the socket from now on.
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

    /// Whether the file has been removed: existing connections continue, and new ones are impossible.
    pub fn is_removed(&self) -> bool {
        self.owned && self.place.look() == PathStatus::Nothing
    }

    /// Continues with the listener of `new`, which was made at the same path.
    pub fn renew(&mut self, mut new: Self) {
        self.place.renew(&mut new);
        self.listen_at(new);
    }

    /// Continues with the listener of `new`, whose file its path [has](BoundPath::renew) already.
    pub fn listen_at(&mut self, mut new: Self) {
        std::mem::swap(&mut self.listener, &mut new.listener);
    }

    /// Whether this process owns it.
    pub fn is_own(&self) -> bool {
        self.owned
    }

    /// Removes its file, if this process owns it.
    pub fn remove(&mut self) {
        if !self.owned {
            return;
        }
        // Not if another one is there now.
        let is_its = self.place.look() == PathStatus::Itself;
        if self.place.lock().take().is_some() && is_its {
            let _ = fs::remove_file(self.path());
        }
    }

    /// Has the file stay when this value is dropped.
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
                    let fail = |e| SocketError::Directory(path.into(), e);
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

/// Sets owner, group and mode of a socket. Another user may be able to replace the file: it is opened once, checked,
/// and the path is not used again.
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
    // An O_PATH descriptor does not allow fchmod(2).
    chmod(format!("/proc/self/fd/{}", there.as_raw_fd()), mode)
}

/// Whether a process listens at a socket. Does not wait: a server that is too busy to accept counts.
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
        // The file gets the mode of its socket, so that others can never connect.
        fchmod(&socket, mode)?;
    }
    bind(&socket, &SocketAddrUnix::new(path)?)?;
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

/// The path of a socket in canonical form.
pub fn canonical_path(path: &Path) -> PathBuf {
    let directory = path
        .parent()
        .and_then(|directory| fs::canonicalize(directory).ok());
    match (directory, path.file_name()) {
        (Some(directory), Some(name)) => directory.join(name),
        _ => path.into(),
    }
}
