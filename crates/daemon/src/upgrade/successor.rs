//! What a process takes over from the one that served before it.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::Identity;
use guest::SavedSession;
use rustix::fs::{OFlags, fcntl_getfl};
use tracing::warn;

use crate::config::Config;
use crate::config::spec::{DiskSpec, FileSpec, SpecError};
use crate::state::Overrides;
use crate::upgrade::protocol::{
    Channel, FileIdentity, Handover, HandoverDisk, HandoverExport, Hello, PROTOCOL, Step,
};

/// How long the old process may take to pause all disks. It gives up sooner.
const PATIENCE: Duration = Duration::from_secs(60);

/// What was handed over and has not been taken yet. Of a process that has taken nothing over, nothing.
#[derive(Default)]
pub struct Inherited {
    state: Mutex<InheritedState>,
}

#[derive(Default)]
struct InheritedState {
    channel: Option<Channel>,
    /// Open and locked.
    files: Vec<OwnedFd>,
    lock: Option<File>,
    control: Option<UnixListener>,
    upgrade: Option<UnixListener>,
    metrics: Option<TcpListener>,
    /// By name.
    disks: BTreeMap<String, InheritedDisk>,
    changed: Option<Overrides>,
    away: Vec<String>,
    sockets: Vec<(PathBuf, FileIdentity)>,
    exports: Vec<(PathBuf, InheritedExport)>,
    gate: Option<Arc<Gate>>,
}

/// A disk as it is now, and as it is written down: a [`HandoverDisk`].
struct InheritedDisk {
    disk: DiskSpec,
    written: Option<DiskSpec>,
    file: Option<FileIdentity>,
}

impl TryFrom<&HandoverDisk> for InheritedDisk {
    type Error = SpecError;

    fn try_from(handed: &HandoverDisk) -> Result<Self, SpecError> {
        Ok(Self {
            disk: handed.disk.parse()?,
            written: handed.written.as_deref().map(str::parse).transpose()?,
            file: handed.file,
        })
    }
}

/// An export's socket, and the front-end that is connected there.
pub struct InheritedExport {
    pub listener: UnixListener,
    /// What was made where it listens, if that is known.
    pub made: Option<Identity>,
    /// What its guest has been served, if that is a file and here.
    pub file: Option<FileIdentity>,
    pub session: Option<(UnixStream, SavedSession)>,
    pub write_cache: Option<bool>,
    pub capacity_read: Option<u64>,
    /// Nobody is to be served before it opens.
    pub gate: Arc<Gate>,
}

/// Opens once.
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

fn made_at(sockets: &[(PathBuf, FileIdentity)], path: &Path) -> Option<Identity> {
    let mut sockets = sockets.iter();
    let made = sockets.find(|(socket, _)| socket == path)?.1;
    Some(made.into())
}

/// Removes a socket, unless something else is there by now.
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
    /// Asks the old process, at the other end of standard input, for all that it serves.
    ///
    /// # Errors
    /// There is none, or it does not hand over.
    pub fn receive() -> io::Result<Self> {
        let channel = Channel::from(io::stdin().as_fd().try_clone_to_owned()?);
        let deadline = Instant::now() + PATIENCE;
        let hello = Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
        };
        channel.send(&hello, &[], deadline)?;
        let (handed, descriptors) = channel.receive::<Handover>(deadline)?;
        Self::of(handed, descriptors, channel)
    }

    fn of(
        handed: Handover,
        mut descriptors: VecDeque<OwnedFd>,
        channel: Channel,
    ) -> io::Result<Self> {
        let gate = Arc::new(Gate::default());
        let mut next = || {
            let next = descriptors.pop_front();
            next.ok_or_else(|| io::Error::other("fewer descriptors came than were announced"))
        };
        let files = (0..handed.files).map(|_| next());
        let files = files.collect::<io::Result<_>>()?;
        let lock = handed.lock.then(&mut next).transpose()?;
        let control = handed.control.then(&mut next).transpose()?;
        let upgrade = handed.upgrade.then(&mut next).transpose()?;
        let metrics = handed.metrics.then(&mut next).transpose()?;
        let sockets = handed.sockets;
        let made_at = |path: &Path| made_at(&sockets, path);
        let mut export = |handed: HandoverExport| {
            let listener = next()?.into();
            let session = match handed.session {
                None => None,
                Some(session) => {
                    let connection = next()?.into();
                    let its = (0..session.descriptors).map(|_| next());
                    let its = its.collect::<io::Result<Vec<_>>>()?;
                    let saved = SavedSession::parse(&session.words, its)
                        .map_err(|_| io::Error::other("a session came that is none"))?;
                    Some((connection, saved))
                }
            };
            let export = InheritedExport {
                listener,
                made: made_at(&handed.socket),
                file: handed.file,
                session,
                write_cache: handed.write_cache,
                capacity_read: handed.capacity_read,
                gate: gate.clone(),
            };
            Ok((handed.socket, export))
        };
        let exports = handed.exports.into_iter().map(&mut export);
        let exports = exports.collect::<io::Result<_>>()?;
        let disk = |handed: &HandoverDisk| {
            let disk = InheritedDisk::try_from(handed)?;
            Ok::<_, SpecError>((disk.disk.name.clone(), disk))
        };
        let disks = handed.disks.iter().map(disk);
        let disks = disks.collect::<Result<_, _>>();
        let disks =
            disks.map_err(|e| io::Error::other(format!("a disk came that is none: {e}")))?;
        let changed = handed.changed.map(|text| Overrides::parse(text.as_bytes()));
        let changed = changed.transpose().map_err(|e| {
            io::Error::other(format!(
                "what was changed by command came with a mistake: {e}"
            ))
        })?;
        Ok(Self {
            state: Mutex::new(InheritedState {
                channel: Some(channel),
                files,
                lock: lock.map(File::from),
                control: control.map(UnixListener::from),
                upgrade: upgrade.map(UnixListener::from),
                metrics: metrics.map(TcpListener::from),
                disks,
                changed,
                away: handed.away,
                sockets,
                exports,
                gate: Some(gate),
            }),
        })
    }

    /// What the old process made at a socket, if it said so.
    pub fn made(&self, socket: &Path) -> Option<Identity> {
        made_at(&self.state().sockets, socket)
    }

    /// The file of a disk at a path, as the old process has it open. If nothing is at the path any more, that is what the
    /// old process had there for this disk: its guest goes on in it.
    pub fn file(&self, disk: &str, path: &Path, write: bool) -> Option<OwnedFd> {
        let there = match fs::metadata(path) {
            Ok(there) => Identity::of(&there).into(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let state = self.state();
                let handed = state.disks.get(disk)?;
                let was_there =
                    matches!(&handed.disk.file, FileSpec::Path(before) if before == path);
                handed.file.filter(|_| was_there)?
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
        let mut state = self.state();
        let place = state.files.iter().position(|fd| {
            let same = Identity::of_fd(fd).is_ok_and(|there| wanted == there.into());
            let access = fcntl_getfl(fd).unwrap_or(OFlags::empty()) & OFlags::ACCMODE;
            same && (access == OFlags::RDWR) == write
        })?;
        Some(state.files.swap_remove(place))
    }

    /// Puts the files into a configuration that were in force of it, if others are written down by now. A guest goes on
    /// in the one that it has; that it is to have another is for a reload to find. Returns whether there is any.
    pub fn keep_files(&self, config: &mut Config) -> bool {
        let state = self.state();
        let mut other = false;
        for disk in &mut config.disks {
            let handed = state.disks.get(&disk.name);
            if let Some(before) = handed.and_then(|handed| handed.written.as_ref())
                && !before.is_written_on_file_of(disk)
            {
                (disk.file, disk.format) = (before.file.clone(), before.format);
                other = true;
            }
        }
        other
    }

    /// A disk that is written down, on the file that it is on.
    pub fn on_its_file(&self, disk: DiskSpec) -> DiskSpec {
        match self.state().disks.get(&disk.name) {
            Some(handed) if handed.written.is_some() => disk.on_file_of(&handed.disk),
            _ => disk,
        }
    }

    /// Whether the old process has a disk of this name.
    pub fn has_disk(&self, name: &str) -> bool {
        self.state().disks.contains_key(name)
    }

    /// How what the old process serves differs from what is written down, if it has said so.
    pub fn changed(&self) -> Option<Overrides> {
        self.state().changed.take()
    }

    pub fn lock(&self) -> Option<File> {
        self.state().lock.take()
    }

    /// Whether a disk is left to another host for now.
    pub fn is_released(&self, disk: &str) -> bool {
        self.state().away.iter().any(|name| name == disk)
    }

    pub fn control(&self, path: &Path) -> Option<UnixListener> {
        let control = &mut self.state().control;
        control.take_if(|listener| is_at(listener, path))
    }

    pub fn upgrade(&self, path: &Path) -> Option<UnixListener> {
        let upgrade = &mut self.state().upgrade;
        upgrade.take_if(|listener| is_at(listener, path))
    }

    pub fn metrics(&self, address: std::net::SocketAddr) -> Option<TcpListener> {
        let mut state = self.state();
        let at = state.metrics.as_ref()?.local_addr().ok()?;
        let same = at.ip() == address.ip() && (at.port() == address.port() || address.port() == 0);
        state.metrics.take_if(|_| same)
    }

    /// The export at this socket.
    pub fn export(&self, socket: &Path) -> Option<InheritedExport> {
        let mut state = self.state();
        let place = state.exports.iter().position(|(path, _)| path == socket)?;
        Some(state.exports.swap_remove(place).1)
    }

    /// Whether the old process goes on if this one ends now.
    pub fn is_only_asked_for(&self) -> bool {
        self.state().channel.is_some()
    }

    /// All is ready: has the old process let go, and opens the gate. Without an old process, does nothing.
    ///
    /// # Errors
    /// It does not let go. Nothing may be served.
    pub fn commit(&self) -> io::Result<()> {
        let Some(channel) = self.state().channel.take() else {
            return Ok(());
        };
        let deadline = Instant::now() + PATIENCE;
        channel.send(&Step::Prepared, &[], deadline)?;
        let (step, _) = channel.receive::<Step>(deadline)?;
        if step != Step::Commit {
            return Err(io::Error::other(format!("{step:?} came instead of Commit")));
        }
        // From here on, it is this process that serves.
        channel.send(&Step::Serving, &[], deadline)?;
        let mut state = self.state();
        if let Some(gate) = state.gate.take() {
            gate.open();
        }
        // Of what is no longer written down, nobody has been told yet.
        for listener in [state.control.take(), state.upgrade.take()]
            .iter()
            .flatten()
        {
            if let Some(path) = listener
                .local_addr()
                .ok()
                .as_ref()
                .and_then(|at| at.as_pathname())
            {
                remove_made(&state.sockets, path);
            }
        }
        state.metrics = None;
        // What has the name of one of them from now on is another disk.
        state.disks.clear();
        state.away.clear();
        for file in state.files.drain(..) {
            if let Err(e) = rustix::fs::fdatasync(&file) {
                warn!("a disk that is no longer served could not be made durable: {e}");
            }
        }
        let sockets = std::mem::take(&mut state.sockets);
        for (socket, _) in state.exports.drain(..) {
            warn!(
                "{}: the disk that was served there is no longer written down, and no longer served",
                socket.display()
            );
            remove_made(&sockets, &socket);
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, InheritedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells the old process, at the other end of standard input, why this one does not take over. It goes on anyway.
pub fn report_failure(why: &str) {
    if let Ok(end) = io::stdin().as_fd().try_clone_to_owned() {
        let soon = Instant::now() + Duration::from_secs(1);
        let _ = Channel::from(end).send(&Step::Failed(why.into()), &[], soon);
    }
}

fn is_at(listener: &UnixListener, path: &Path) -> bool {
    let at = listener.local_addr();
    at.is_ok_and(|at| at.as_pathname() == Some(path))
}
