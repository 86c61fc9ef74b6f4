//! Disks that are to be served and cannot be: each is listed with the reason and tried again, while the others are served.

use std::fs::{self, Metadata, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::Access;
use tracing::{error, info, warn};

use super::replace::close;
use super::{Claim, Server, ServerError, ServerState, Waiting};
use crate::config::export::ExportSpec;
use crate::config::nbd::NbdExportSpec;
use crate::config::sockets;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::log;
use crate::node::context::OpenContext;
use crate::rights::OpenedAhead;
use crate::sd_notify;
use crate::server::connection_info::ConnectionInfo;
use crate::socket::Socket;

/// How long the start waits for one disk, and for all of them together beyond a moment for each. A file that another
/// process has locked is waited for, for 3 s.
const PATIENCE: Duration = Duration::from_secs(5);
const PATIENCE_OF_ALL: Duration = Duration::from_secs(20);
pub(super) const MOMENT: Duration = Duration::from_millis(100);

/// How long an opened disk waits for commands about it.
const BUSY: Duration = Duration::from_secs(1);

/// How often disks are tried again, and how many at a time.
const RETRY: Duration = Duration::from_secs(5);
const RETRIED_MAX: usize = 64;

const BEING_OPENED: &str = "it is being opened";

/// A disk that is to be served, and is not.
pub struct AbsentDisk {
    pub spec: DiskSpec,
    /// Why it is not.
    pub reason: String,
    /// Its NBD exports, which are added with it.
    exports: Vec<NbdExportSpec>,
    /// A thread is opening it.
    pub(super) is_opening: bool,
    tried: Instant,
    /// It was reported.
    is_known: bool,
    /// Its file can be opened by this user, but not in the sandbox, which was made without it.
    is_denied: bool,
    /// Its file as it was at the last attempt.
    file: Option<FileState>,
    /// Another process has its file. When that lets go of it, it may be about to continue: only the operator knows.
    is_locked: bool,
    /// What only root may open of it, and was opened when this process was root.
    pub(super) ahead: Option<Arc<OpenedAhead>>,
    /// Its socket, which only root may be able to make. Nobody can connect before the disk is served.
    pub(super) socket: Option<Socket>,
    /// The operator wants it: it was configured before an upgrade, during which nobody had time for it.
    is_new: bool,
}

/// What changes while a file is being written: device, inode, length, and time of the last change.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileState([u64; 3], i64, i64);

impl FileState {
    /// `None` for devices, and if there is no file.
    fn of(file: &FileSpec) -> Option<Self> {
        let FileSpec::Path(path) = file else {
            return None;
        };
        let found = fs::metadata(path).ok().filter(Metadata::is_file)?;
        let which = [found.dev(), found.ino(), found.len()];
        Some(Self(which, found.mtime(), found.mtime_nsec()))
    }
}

/// Who wants a disk to be tried again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// The operator: at the start, or by a reload.
    Asked,
    /// Nobody. A file that is being restored must not be served before it is complete.
    Unasked,
}

/// Arrives when a disk is served, or cannot be.
type Opened = Receiver<Result<ConnectionInfo, ServerError>>;

/// Whether a disk was absent for the same reason before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reason {
    New,
    Known,
}

/// How the start waits for disks.
pub(super) struct StartPatience(Instant);

impl StartPatience {
    pub(super) fn new() -> Self {
        Self(Instant::now() + PATIENCE_OF_ALL)
    }

    /// The deadline of the next disk.
    fn deadline(&self) -> Instant {
        let now = Instant::now();
        (now + PATIENCE).min(self.0.max(now + MOMENT))
    }
}

impl Server {
    /// Serves a disk at the start. `None` if it cannot be served and others can do without it: it is absent.
    ///
    /// # Errors
    /// The disk is required, or a guest has it already; or the process is told to stop.
    pub(super) fn start_disk(
        &self,
        spec: DiskSpec,
        is_required: bool,
        patience: &StartPatience,
    ) -> Result<Option<ConnectionInfo>, ServerError> {
        let name = spec.name.clone();
        if self.context.inherited.is_uncommitted() {
            // Guests wait, so a disk that the old process did not serve is tried when they have gone on.
            let inherited = &self.context.inherited;
            let is_absent = inherited.is_absent(&name);
            // A guest at its socket has it under another name, or must not get it.
            let is_new =
                !inherited.has_disk(&name) && !inherited.has_export_at(&sockets::path(&spec));
            let is_new = is_new && !is_required;
            // Root's files are opened before this process becomes another user, except on storage that was seen to hang.
            let is_new =
                is_new && (!self.context.rights.will_change() || self.context.hangs(&name));
            if is_absent || is_new {
                self.add_absent(spec, "it is tried in a moment", true);
                if let Some(absent) = self.state().absent.get_mut(&name) {
                    absent.is_new = !is_absent;
                }
                return Ok(None);
            }
            return self.attach_at_start(spec).map(Some);
        }
        let hangs = self.context.hangs(&name) && !is_required;
        if hangs && self.context.rights.will_change() {
            // No thread may wait for storage when this process becomes another user. After that, it is tried.
            self.add_absent(spec, "its storage does not answer", false);
            self.report_absent(&name);
            return Ok(None);
        }
        self.add_absent(spec, BEING_OPENED, false);
        let Some(opened) = self.open_absent(&name, Attempt::Asked) else {
            return Ok(None);
        };
        self.await_opened(&name, &opened, is_required, patience)
    }

    /// Serves the disks that were configured before an upgrade, which has just succeeded. Storage that does not answer is
    /// not waited for long.
    pub fn start_new(&self) {
        let new: Vec<_> = {
            let mut state = self.state();
            let absent = state.absent.values_mut();
            let new =
                absent.filter_map(|a| std::mem::take(&mut a.is_new).then(|| a.spec.name.clone()));
            new.collect()
        };
        let opened = new.into_iter().filter_map(|name| {
            let opened = self.open_absent(&name, Attempt::Asked)?;
            Some((name, opened))
        });
        let opened: Vec<_> = opened.collect();
        let patience = StartPatience::new();
        for (name, opened) in opened {
            // If the process is told to stop, it does so in a moment.
            let _ = self.await_opened(&name, &opened, false, &patience);
        }
    }

    /// Waits for a disk that is being opened. `None` if it cannot be served, or not yet.
    fn await_opened(
        &self,
        name: &str,
        opened: &Opened,
        is_required: bool,
        patience: &StartPatience,
    ) -> Result<Option<ConnectionInfo>, ServerError> {
        let deadline = patience.deadline();
        let mut has_told = false;
        loop {
            match opened.recv_timeout(MOMENT / 2) {
                Ok(Ok(ready)) => return Ok(Some(ready)),
                // A mistake in the configuration concerns more than this disk.
                Ok(Err(e))
                    if (is_required && !e.needs_command())
                        || matches!(e, ServerError::IoThread(_)) =>
                {
                    self.forget_absent(name);
                    return Err(e.of_disk(name));
                }
                Ok(Err(_)) => {
                    self.report_absent(name);
                    return Ok(None);
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if self.context.stop.load(Ordering::SeqCst) {
                return Err(ServerError::Stopped(name.into()));
            }
            if Instant::now() < deadline || has_told {
                continue;
            }
            has_told = true;
            let reason = "it cannot be opened yet: its storage does not answer, or its image takes long to repair";
            // The thread stays, and nobody else tries meanwhile.
            self.set_reason(name, reason.into(), true);
            // Before this process becomes another user, none of its threads may wait for storage.
            if is_required || self.context.rights.will_change() {
                error!("disk {name}: {reason}; ringdisk waits for it");
            } else {
                self.report_absent(name);
                return Ok(None);
            }
        }
    }

    fn add_absent(&self, spec: DiskSpec, reason: &str, is_known: bool) {
        let disk = AbsentDisk {
            reason: reason.into(),
            exports: Vec::new(),
            is_opening: false,
            tried: Instant::now(),
            is_known,
            is_denied: false,
            file: None,
            is_locked: false,
            ahead: None,
            socket: None,
            is_new: false,
            spec,
        };
        self.state().absent.insert(disk.spec.name.clone(), disk);
    }

    /// A disk that was served cannot be served any more: it is listed with the reason, and tried again.
    pub(super) fn becomes_absent(&self, spec: DiskSpec, e: &ServerError) {
        let name = spec.name.clone();
        self.add_absent(spec, &e.to_string(), false);
        self.report_absent(&name);
    }

    /// A disk is no longer to be served. Returns whether it was absent. The caller has claimed it.
    pub(super) fn forget_absent(&self, name: &str) -> bool {
        let was_absent = {
            let mut state = self.state();
            // It may have been opened a moment ago.
            !state.nodes.contains_key(name) && state.absent.remove(name).is_some()
        };
        if was_absent {
            self.tell_status();
        }
        was_absent
    }

    /// The configuration of an absent disk has changed. The caller has claimed it.
    pub(super) fn change_absent(&self, spec: DiskSpec) {
        let mut state = self.state();
        if let Some(absent) = state.absent.get_mut(&spec.name) {
            let files = |disk: &DiskSpec| {
                let (file, data_file) = (disk.file.clone(), disk.data_file.clone());
                (file, data_file, disk.read_only, disk.lock)
            };
            if files(&absent.spec) != files(&spec) {
                absent.ahead = None;
            }
            let socket = |disk: &DiskSpec| (sockets::path(disk), disk.socket_access);
            if socket(&absent.spec) != socket(&spec) {
                absent.socket = None;
            }
            absent.spec = spec;
            BEING_OPENED.clone_into(&mut absent.reason);
            // A thread that opens the previous one finds that it is not wanted. Until then, it alone uses what was opened
            // ahead: the locks of that would be common to both.
            absent.is_opening &= absent.ahead.is_some();
        }
    }

    /// The configuration of an absent disk.
    pub(super) fn absent_spec(&self, name: &str) -> Option<DiskSpec> {
        let state = self.state();
        state.absent.get(name).map(|absent| absent.spec.clone())
    }

    /// The disks that are to be served and are not, with the reasons.
    pub fn absent(&self) -> Vec<(DiskSpec, String)> {
        let state = self.state();
        let each = state.absent.values();
        each.map(|absent| (absent.spec.clone(), absent.reason.clone()))
            .collect()
    }

    /// Whether a disk is served, or is to be served.
    pub(super) fn is_there(&self, name: &str) -> bool {
        self.node_of(name).is_some() || self.is_absent(name)
    }

    /// Whether a disk is to be served, and is not.
    pub fn is_absent(&self, name: &str) -> bool {
        self.state().absent.contains_key(name)
    }

    /// The error for a disk that is not served.
    pub fn not_there(&self, name: &str) -> ServerError {
        self.state().not_there(name)
    }

    /// Adds an NBD export when its disk comes, if that is absent. Returns whether it is.
    pub fn export_when_there(&self, export: &NbdExportSpec) -> bool {
        let mut state = self.state();
        let absent = state.absent.get_mut(&export.node);
        absent.is_some_and(|absent| {
            absent.exports.retain(|other| other.id != export.id);
            absent.exports.push(export.clone());
            true
        })
    }

    /// An NBD export is not to be added any more when its disk comes. Returns whether it was.
    pub(super) fn forget_waiting_export(&self, id: &str) -> bool {
        let mut state = self.state();
        let mut exports = state.absent.values_mut().map(|absent| &mut absent.exports);
        exports.any(|exports| {
            let before = exports.len();
            exports.retain(|export| export.id != id);
            exports.len() < before
        })
    }

    /// NBD exports of absent disks.
    pub fn waiting_exports(&self) -> Vec<NbdExportSpec> {
        let state = self.state();
        let absent = state.absent.values();
        absent.flat_map(|absent| absent.exports.clone()).collect()
    }

    /// Whether an absent disk could be served by a process whose sandbox knows of it.
    pub fn needs_new_sandbox(&self) -> bool {
        let state = self.state();
        state.absent.values().any(|absent| absent.is_denied)
    }

    /// Tries absent disks again until there are none. The first attempt begins at once.
    pub fn retry_absent(&self) {
        {
            let mut state = self.state();
            if state.absent.is_empty() || state.is_retrying {
                return;
            }
            state.is_retrying = true;
        }
        let me = self.me.clone();
        let retry = move || {
            while let Some(server) = me.upgrade() {
                if server.handover.is_stopping() || server.retry_once(Attempt::Unasked).is_none() {
                    return;
                }
                drop(server);
                thread::sleep(RETRY);
            }
        };
        let thread = thread::Builder::new().name("retry".into());
        if let Err(e) = thread.spawn(retry) {
            self.state().is_retrying = false;
            warn!("absent disks are not tried again: no thread available: {e}");
        }
    }

    /// Tries all absent disks, which the operator may have repaired, and waits a moment for them, longer than for a lock.
    pub(super) fn retry_as_asked(&self) {
        let deadline = Instant::now() + PATIENCE;
        for opened in self.retry_once(Attempt::Asked).into_iter().flatten() {
            let _ = opened.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }

    /// Tries those that were not tried for the longest time. Returns `None` if none is absent.
    fn retry_once(&self, attempt: Attempt) -> Option<Vec<Opened>> {
        let names: Vec<_> = {
            let mut state = self.state();
            if state.absent.is_empty() {
                state.is_retrying = false;
                return None;
            }
            let absent = state.absent.values().filter(|absent| !absent.is_opening);
            let absent = absent.filter(|a| attempt == Attempt::Asked || !a.is_locked);
            let mut absent: Vec<_> = absent.map(|a| (a.tried, a.spec.name.clone())).collect();
            absent.sort();
            absent.into_iter().take(RETRIED_MAX).collect()
        };
        let opened = names.iter();
        let opened = opened.filter_map(|(_, name)| self.open_absent(name, attempt));
        Some(opened.collect())
    }

    /// Begins to open an absent disk, in a thread that stays while its storage does not answer. The result arrives when
    /// the disk is served, or cannot be.
    fn open_absent(&self, name: &str, attempt: Attempt) -> Option<Opened> {
        let me = self.me.upgrade()?;
        let (spec, ahead) = {
            let mut state = self.state();
            let absent = state.absent.get_mut(name).filter(|a| !a.is_opening)?;
            (absent.is_opening, absent.tried) = (true, Instant::now());
            (absent.spec.clone(), absent.ahead.clone())
        };
        let (done, result) = mpsc::channel();
        let open = move || {
            if attempt == Attempt::Unasked && !me.is_at_rest(&spec) {
                return;
            }
            if let Some(served) = me.serve_absent(&spec, ahead) {
                let _ = done.send(served);
            }
        };
        let thread = thread::Builder::new().name("open".into());
        if let Err(e) = thread.spawn(open) {
            self.set_reason(name, format!("no thread is available: {e}"), false);
            return None;
        }
        Some(result)
    }

    /// Whether the file of an absent disk is as it was at the last attempt. If not, it may be a copy that is not complete.
    fn is_at_rest(&self, spec: &DiskSpec) -> bool {
        let now = FileState::of(&spec.file);
        let is_at_rest = {
            let mut state = self.state();
            let Some(absent) = state.absent.get_mut(&spec.name) else {
                return false;
            };
            std::mem::replace(&mut absent.file, now) == now
        };
        if !is_at_rest {
            let reason = format!(
                "{}: has just appeared or changed; it is served when it has not changed for {} s, or at once by 'ringdisk reload'",
                spec.file,
                RETRY.as_secs()
            );
            self.set_reason(&spec.name, reason, false);
        }
        is_at_rest
    }

    /// Opens and serves an absent disk. `None` if it is not wanted any more.
    fn serve_absent(
        &self,
        spec: &DiskSpec,
        ahead: Option<Arc<OpenedAhead>>,
    ) -> Option<Result<ConnectionInfo, ServerError>> {
        let name = &spec.name;
        // Without an inhibitor: storage that does not answer must not hold up an upgrade.
        let context = OpenContext {
            ahead: ahead.as_ref().map_or_else(Weak::new, Arc::downgrade),
            ..self.context.clone()
        };
        let (opened, lines) = log::hold(|| self.open_current_in(spec.clone(), &context));
        let opened = opened.map_err(|e| self.explain_missing_file(spec, e));
        let is_open = ahead.as_ref().is_some_and(|ahead| ahead.has(spec));
        let is_denied = opened.is_err() && !is_open && self.is_denied(spec);
        if let (Err(_), Some(ahead)) = (&opened, &ahead) {
            ahead.unlock();
        }
        // A handover, which is waited for, may close it.
        let ahead = ahead.map(|ahead| Arc::downgrade(&ahead));
        let inhibitor = self.handover.wait_and_inhibit();
        // Commands that are under way may not want it any more when they have ended. They may want its file: not for long.
        let waiting = Waiting::until(Instant::now() + BUSY);
        let claim = (inhibitor.is_ok()).then(|| self.claim_as(&waiting, "start", || vec![name]));
        let is_wanted = {
            let state = self.state();
            let absent = state.absent.get(name);
            absent.is_some_and(|absent| absent.spec == *spec)
        };
        let claim = claim.and_then(|claim| match claim {
            Ok(claim) => Some(claim),
            Err(e) => {
                self.set_reason(name, e.to_string(), false);
                None
            }
        });
        let Some(claim) = claim.filter(|_| !self.handover.is_stopping() && is_wanted) else {
            lines.release();
            if let (Ok(node), Ok(_)) = (opened, inhibitor) {
                close(node.into(), "which is not to be served any more");
            }
            if let Some(ahead) = &ahead {
                self.end_opening(name, ahead);
            }
            return None;
        };
        let served = opened.and_then(|node| {
            let reserved = || self.reserved_socket(name);
            self.serve_opened(&claim, node, &ExportSpec::from(spec), reserved)
        });
        match &served {
            Ok(_) => {
                lines.release();
                self.came_back(&claim, name);
            }
            Err(e) => {
                if let Some(ahead) = ahead.and_then(|ahead| ahead.upgrade()) {
                    ahead.unlock();
                }
                let reason = self.why_absent(spec, e, is_denied);
                // An image may name many files, and is tried again every few seconds.
                match self.set_reason(name, reason, false) {
                    Reason::New => lines.release(),
                    Reason::Known => lines.forget(),
                }
            }
        }
        Some(served)
    }

    /// Notes what has kept an absent disk from being served, and says it.
    fn why_absent(&self, spec: &DiskSpec, e: &ServerError, is_denied: bool) -> String {
        let is_locked = e.is_locked();
        let socket = sockets::path(spec);
        let is_outside = || self.sandbox.check_socket(&socket).is_err();
        let was_root = self.context.rights.has_changed();
        let is_refused = was_root && e.is_socket_refused();
        let is_socket_denied = self.is_known_absent(spec) && (is_outside() || is_refused);
        if let Some(absent) = self.state().absent.get_mut(&spec.name) {
            absent.is_denied = is_denied || is_socket_denied;
            absent.is_locked = is_locked;
            absent.file = FileState::of(&spec.file);
        }
        if !is_denied && !is_socket_denied {
            return match is_locked {
                true => format!("{e}; when it is free, 'ringdisk reload' has it served"),
                false => e.to_string(),
            };
        }
        let since = match was_root {
            true => "became another user",
            false => "entered its sandbox",
        };
        let what = match is_denied {
            true => format!("{}: cannot be opened", spec.file),
            false => format!("{}: the socket cannot be made", socket.display()),
        };
        format!(
            "{what} since ringdisk {since}; 'ringdisk reload --upgrade' ('systemctl reload ringdisk') has the disk served, and \
             VMs stay connected"
        )
    }

    /// A thread does not open an absent disk any more, and has not served it. Others may use now what was opened ahead.
    fn end_opening(&self, name: &str, ahead: &Weak<OpenedAhead>) {
        let mut state = self.state();
        let Some((absent, ahead)) = state.absent.get_mut(name).zip(ahead.upgrade()) else {
            return;
        };
        if (absent.ahead.as_ref()).is_some_and(|its| Arc::ptr_eq(its, &ahead)) {
            ahead.unlock();
            absent.is_opening = false;
        }
    }

    /// Whether a new process could serve a disk of the configuration or of the state, whose failure was reported before: only the
    /// sandbox is in the way, which does not keep this process from asking what its user may do; or the disk is root's, and this
    /// process has become another user.
    fn is_denied(&self, spec: &DiskSpec) -> bool {
        let FileSpec::Path(path) = &spec.file else {
            return false;
        };
        let was_root = self.context.rights.has_changed();
        let opened = || {
            let mut options = OpenOptions::new();
            // Not to wait for the other end of a FIFO.
            options.read(true).custom_flags(libc::O_NONBLOCK);
            options.open(path)
        };
        let is_refused = || opened().is_err_and(|e| e.kind() == ErrorKind::PermissionDenied);
        self.is_known_absent(spec)
            && (was_root || is_there(path, spec.read_only))
            && (self.sandbox.check_file(&spec.file).is_err() || is_refused())
    }

    /// Whether a disk is absent, and was so before: the next process finds it in the configuration or in the state.
    fn is_known_absent(&self, spec: &DiskSpec) -> bool {
        let state = self.state();
        let absent = state.absent.get(&spec.name);
        absent.is_some_and(|absent| absent.is_known && absent.spec == *spec)
    }

    /// A disk is served, which may have been absent.
    pub(super) fn came_back(&self, claim: &Claim<'_>, name: &str) {
        let Some(absent) = self.state().absent.remove(name) else {
            return;
        };
        if let Some(mut socket) = absent.socket {
            // The file is that of the disk.
            socket.disown();
        }
        for export in absent.exports {
            let id = export.name.clone();
            if let Err(e) = self.add_nbd_export(claim, export) {
                error!("NBD: '{id}' is not exported: {e}");
            }
        }
        if absent.is_known {
            info!("disk {name}: can be served now, and is");
            self.persist();
            self.tell_status();
        }
    }

    /// A disk could not be opened, for this reason. A reason that is new is reported, if the disk has been.
    fn set_reason(&self, name: &str, reason: String, is_opening: bool) -> Reason {
        let mut state = self.state();
        let Some(absent) = state.absent.get_mut(name) else {
            return Reason::New;
        };
        absent.is_opening = is_opening;
        if absent.reason == reason {
            return Reason::Known;
        }
        let is_known = absent.is_known;
        absent.reason = reason;
        drop(state);
        if is_known {
            self.report_absent(name);
        }
        Reason::New
    }

    fn report_absent(&self, name: &str) {
        let reason = {
            let mut state = self.state();
            let Some(absent) = state.absent.get_mut(name) else {
                return;
            };
            absent.is_known = true;
            absent.reason.clone()
        };
        error!("disk {name}: is not served: {reason}; ringdisk serves the others, and tries again");
        self.tell_status();
    }

    /// Tells the service manager which disks are missing.
    pub fn tell_status(&self) {
        const SHOWN: usize = 5;
        let absent = self.absent();
        let mut status = match self.unavailable().first() {
            None => "STATUS=all disks are served".to_owned(),
            Some(reason) => format!("STATUS=degraded: all disks are served; {reason}"),
        };
        if !absent.is_empty() {
            let names: Vec<_> = absent.iter().map(|(spec, _)| spec.name.as_str()).collect();
            let more = if names.len() > SHOWN { ", ..." } else { "" };
            let names = names[..names.len().min(SHOWN)].join(", ");
            status = format!(
                "STATUS=degraded: {} disks are not served, and tried again: {names}{more}",
                absent.len()
            );
        }
        sd_notify::tell(&status);
    }
}

impl ServerState {
    pub(super) fn not_there(&self, name: &str) -> ServerError {
        match self.absent.get(name) {
            Some(absent) => ServerError::Absent(name.into(), absent.reason.clone()),
            None => ServerError::NoNode(name.into()),
        }
    }
}

fn is_there(path: &Path, read_only: bool) -> bool {
    let access = if read_only {
        Access::READ_OK
    } else {
        Access::READ_OK | Access::WRITE_OK
    };
    rustix::fs::access(path, access).is_ok()
}
