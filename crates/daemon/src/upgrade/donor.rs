//! The old process's side of an upgrade: see [`hand`](crate::upgrade::protocol).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    TryLockError,
};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use thiserror::Error;
use tracing::{error, info, warn};

use crate::log;
use crate::node::Node;
use crate::sd_notify;
use crate::server::Server;
use crate::server::device::ServedDisk;
use crate::server::export::Paused;
use crate::socket::accept::{Acceptor, Backoff, Client};
use crate::socket::{BoundPath, PathStatus, Socket, SocketError};
use crate::upgrade::launcher::{self, Launch, beside};
use crate::upgrade::protocol::{
    Channel, FileIdentity, FirstMessage, Handover, HandoverExport, HandoverSession, Launched,
    Outcome, PROTOCOL, Step, UpgradeReply, UpgradeRequest, program,
};
use crate::upgrade::successor::Inherited;

/// How long the new process may take for anything while guests go on.
const PATIENCE: Duration = Duration::from_secs(15);

/// How long requests under way may take to end, and the new process to take over, while guests wait.
const PAUSE: Duration = Duration::from_secs(5);

/// How often tables of images are written at most while guests go on, and how quickly it is done when the next time may
/// be that while they wait.
const FLUSH_ROUNDS: usize = 8;
const FLUSH_IS_SHORT: Duration = Duration::from_millis(15);

/// What a host needs to be handed over, beside its disks.
#[derive(Default)]
pub struct HandoverState {
    /// The listening sockets, as far as there are any.
    pub control: Mutex<Option<OwnedFd>>,
    pub upgrade: Mutex<Option<OwnedFd>>,
    pub metrics: OnceLock<OwnedFd>,
    /// Sockets that are not disks', with what becomes readable for those who listen there and are to look at them.
    socket_watches: Mutex<Vec<(Arc<BoundPath>, Arc<OwnedFd>)>>,
    /// Whether all has been handed over. Read by whoever changes something, written by who hands over.
    gone: RwLock<bool>,
    /// This process is told to stop.
    stopping: AtomicBool,
    /// The new process is told to serve, and accepts the clients that come from now on.
    leaving: AtomicBool,
}

/// The content of a lock that nobody leaves half changed.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps everything from being handed over.
pub type HandoverInhibitor<'a> = RwLockReadGuard<'a, bool>;

/// Why nothing can be changed now.
#[derive(Debug, Error)]
#[error("another ringdisk is taking over from this one; try again in a moment")]
pub struct HandoverInProgress;

impl HandoverState {
    /// For somebody who listens at a socket: what becomes readable when the socket may have been removed, and is to be made
    /// again.
    ///
    /// # Errors
    /// There is no event descriptor to be had.
    pub fn socket_watch(&self, place: &Arc<BoundPath>) -> io::Result<Arc<OwnedFd>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let socket_watch = Arc::new(eventfd(0, flags)?);
        locked(&self.socket_watches).push((place.clone(), socket_watch.clone()));
        Ok(socket_watch)
    }

    /// Whether clients are to be left to the new process: this one may end at any time.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Tells all of them. Returns a sentence for each socket in whose place something else is.
    pub fn recreate_sockets(&self) -> Vec<String> {
        let mut taken = Vec::new();
        for (place, socket_watch) in &*locked(&self.socket_watches) {
            let _ = rustix::io::write(socket_watch, &1u64.to_ne_bytes());
            if let PathStatus::Other(what) = place.look() {
                taken.push(format!(
                    "no command gets to {path} any more: {what} is there by now, which is left alone; move it away, and SIGHUP \
                     makes the socket again",
                    path = place.path().display()
                ));
            }
        }
        taken
    }

    /// What was made at the sockets that are not disks'.
    fn made(&self) -> Vec<(PathBuf, FileIdentity)> {
        let socket_watches = locked(&self.socket_watches);
        let made = socket_watches.iter().map(|(place, _)| place);
        made.filter_map(made_at).collect()
    }

    /// Keeps everything from being handed over as long as this is there.
    ///
    /// # Errors
    /// It is being handed over, or has been.
    pub fn inhibit(&self) -> Result<HandoverInhibitor<'_>, HandoverInProgress> {
        let gone = match self.gone.try_read() {
            Ok(gone) => gone,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(HandoverInProgress),
        };
        match *gone {
            true => Err(HandoverInProgress),
            false => Ok(gone),
        }
    }

    /// The same, after a hand-over that is under way has failed.
    ///
    /// # Errors
    /// It has succeeded.
    pub fn wait_and_inhibit(&self) -> Result<HandoverInhibitor<'_>, HandoverInProgress> {
        let gone = self.gone.read().unwrap_or_else(|e| e.into_inner());
        match *gone {
            true => Err(HandoverInProgress),
            false => Ok(gone),
        }
    }

    /// The process is told to stop: nobody takes over any more who has not yet.
    ///
    /// # Errors
    /// Somebody has taken over.
    pub fn stop(&self) -> Result<HandoverInhibitor<'_>, HandoverInProgress> {
        self.stopping.store(true, Ordering::Release);
        self.wait_and_inhibit()
    }

    /// For who hands over.
    ///
    /// # Errors
    /// The process has been told to stop meanwhile.
    fn check_not_stopping(&self) -> Result<(), UpgradeError> {
        match self.stopping.load(Ordering::Acquire) {
            true => Err(UpgradeError::Stopping),
            false => Ok(()),
        }
    }

    /// For who hands over, when no command is under way any more.
    fn lock_exclusively(
        &self,
        deadline: Instant,
    ) -> Result<RwLockWriteGuard<'_, bool>, UpgradeError> {
        loop {
            match self.gone.try_write() {
                Ok(gone) => return Ok(gone),
                Err(TryLockError::Poisoned(e)) => return Ok(e.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() > deadline => {
                    return Err(UpgradeError::Busy);
                }
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

#[derive(Debug, Error)]
enum UpgradeError {
    #[error(
        "'ringdisk upgrade' has not started a new process: {cause}",
        cause = block::explain(.0, "the log says more")
    )]
    Launch(io::Error),
    #[error("the new process has not come up: {}", told(.0))]
    Start(io::Error),
    #[error("the new process speaks version {0} of the hand-over, and this one {PROTOCOL}")]
    Protocol(u32),
    #[error("a command is under way on the control socket; try again when it is done")]
    Busy,
    #[error("{0}")]
    Storage(String),
    #[error(
        "there are no descriptors to hand disk {0} over with: {cause}; then upgrade again",
        cause = block::explain(.1, "the process that serves goes on")
    )]
    Descriptors(String, io::Error),
    #[error("requests under way on disk {0} do not end; is its storage stuck?")]
    Stuck(String),
    #[error(
        "requests of disk {0} wait for its storage to work again: it may be full, and the log says more; once it works, \
         'ringdisk resume {0}' has them tried again, and 'ringdisk resume {0} --report' ends them with errors; then upgrade"
    )]
    Waiting(String),
    #[error("disks could not be handed over: {cause}", cause = block::explain(.0, ""))]
    Hand(io::Error),
    #[error("the new process cannot serve what this one does: {}", told(.0))]
    Prepare(io::Error),
    #[error("this process has been told to stop")]
    Stopping,
    #[error("the new process has failed as it took over: {0}")]
    Take(io::Error),
}

/// What the new process has said, or where it may have said it.
fn told(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            "it has ended without a word; what it has written to the log says why".into()
        }
        io::ErrorKind::TimedOut => "it does not answer".into(),
        _ => error.to_string(),
    }
}

/// Where `ringdisk upgrade` asks, and how this process was started.
pub struct UpgradeSocket {
    /// Shared with who listens there.
    socket: Arc<Mutex<Socket>>,
    /// The control socket, beside which all of it is.
    control: PathBuf,
}

impl UpgradeSocket {
    /// Makes it, beside a control socket, while this process may still write there. Without one, it is served all the
    /// same. With `patience`, a process that is just ending may still have it for a moment.
    pub fn open(control: &Path, patience: Duration) -> Option<Self> {
        let path = beside(control, "upgrade");
        let deadline = Instant::now() + patience;
        let socket = loop {
            match Socket::bind_for_packets(&path) {
                Err(SocketError::InUse(_)) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(20));
                }
                socket => break socket,
            }
        };
        // Nobody else is here.
        let upgrade_socket = socket.map_err(io::Error::other).and_then(|socket| {
            Launch::here()?.write(control)?;
            let (socket, control) = (Arc::new(Mutex::new(socket)), control.into());
            Ok(Self { socket, control })
        });
        upgrade_socket
            .inspect_err(|e| warn!("no upgrade without a restart: {e}"))
            .ok()
    }

    /// That of the process that served before.
    pub fn adopt(inherited: &Inherited, control: &Path) -> Option<Self> {
        let path = beside(control, "upgrade");
        let listener = inherited.upgrade(&path)?;
        Some(Self {
            socket: Arc::new(Mutex::new(Socket::adopt(
                listener,
                &path,
                inherited.made(&path),
            ))),
            control: control.into(),
        })
    }

    /// It goes away with this value from now on.
    pub fn own(&self) {
        locked(&self.socket).own();
    }

    /// Serves it, from a thread of its own.
    ///
    /// # Errors
    /// There is no thread or descriptor to be had.
    pub fn serve(&self, server: &Arc<Server>) -> io::Result<()> {
        let socket = self.socket.clone();
        let mut listener = listener_of(&socket, server)?;
        let socket_watch = server.handover.socket_watch(locked(&socket).place())?;
        // Asked now: its file may be replaced.
        let (program, server, control) = (program(), server.clone(), self.control.clone());
        let thread = thread::Builder::new().name("upgrade".into());
        let serve = move || {
            let (mut acceptor, mut accepting) = (Acceptor::new(), Backoff::default());
            loop {
                match wait_for_client(&socket_watch, &listener, &mut acceptor) {
                    Ok(Some(client)) => {
                        accepting.succeeded();
                        upgrade(&server, client, program.as_deref());
                    }
                    Ok(None) => {
                        write_start_again(&control);
                        match make_again(&socket, &server) {
                            Ok(Some(new)) => listener = new,
                            Ok(None) => {}
                            Err(e) => error!(
                                "upgrade: the socket for it was removed and cannot be made again: {e}"
                            ),
                        }
                    }
                    Err(e) => accepting.failed(|left_out| {
                        let e = block::explain(&e, "it is tried again");
                        warn!("upgrade: cannot be asked for one: {e}{left_out}");
                    }),
                }
            }
        };
        thread.spawn(serve).map(drop)
    }
}

/// A copy of where it listens, of which another is handed over.
fn listener_of(socket: &Mutex<Socket>, server: &Server) -> io::Result<UnixListener> {
    let socket = locked(socket);
    *locked(&server.handover.upgrade) = Some(socket.listener.as_fd().try_clone_to_owned()?);
    socket.listener.try_clone()
}

/// Writes down again how this process was started, if somebody has removed that. Its sandbox may not let it.
fn write_start_again(control: &Path) {
    let path = launcher::path(control);
    if path.symlink_metadata().is_ok() {
        return;
    }
    let path = path.display();
    match Launch::here().and_then(|launch| launch.write(control)) {
        Ok(()) => warn!("{path} had been removed, and is there again"),
        Err(e) => warn!(
            "no upgrade without a restart: {path} has been removed, which says how ringdisk was started, and cannot be \
             written again: {e}"
        ),
    }
}

/// Makes the socket again if somebody has removed it; where it listens then.
fn make_again(socket: &Mutex<Socket>, server: &Server) -> io::Result<Option<UnixListener>> {
    {
        let mut socket = locked(socket);
        if !socket.is_removed() {
            return Ok(None);
        }
        let new = Socket::bind_for_packets(socket.path()).map_err(io::Error::other)?;
        warn!(
            "{} had been removed, and is there again",
            new.path().display()
        );
        socket.renew(new);
    }
    listener_of(socket, server).map(Some)
}

/// A client, or `None` if the socket is to be looked at.
fn wait_for_client(
    socket_watch: &OwnedFd,
    listener: &UnixListener,
    acceptor: &mut Acceptor,
) -> io::Result<Option<Client>> {
    let mut ready = [
        PollFd::new(socket_watch, PollFlags::IN),
        PollFd::new(listener, PollFlags::IN),
    ];
    loop {
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => continue,
            polled => polled?,
        };
        if !ready[0].revents().is_empty() {
            let _ = rustix::io::read(socket_watch, &mut [0; 8]);
            return Ok(None);
        }
        return acceptor.accept(listener).map(Some);
    }
}

impl Drop for UpgradeSocket {
    fn drop(&mut self) {
        // Whoever listens ends with the process, and does not put this in order.
        let mut socket = locked(&self.socket);
        if socket.is_own() {
            socket.remove();
            let _ = std::fs::remove_file(launcher::path(&self.control));
        }
    }
}

fn upgrade(server: &Server, (asks, refused): Client, program: Option<&str>) {
    match socket_peercred(&asks).map(|who| who.uid) {
        Ok(user) if user == geteuid() || user.is_root() => {}
        _ => return warn!("upgrade: another user has asked for one, and is not answered"),
    }
    let launcher = Channel::from(OwnedFd::from(asks));
    let deadline = Instant::now() + PATIENCE;
    let unless = match launcher.receive::<UpgradeRequest>(deadline) {
        Ok((UpgradeRequest { unless_running }, _)) => unless_running,
        Err(e) => return warn!("{}", UpgradeError::Launch(e)),
    };
    if unless.is_some() && unless.as_deref() == program {
        let _ = launcher.send(&UpgradeReply::SameProgram, &[], deadline);
        return;
    }
    let mut outcome = Outcome {
        error: None,
        pause_us: 0,
        disks: 0,
        connected: 0,
    };
    let done = match refused {
        None => hand_over(server, &launcher, &mut outcome),
        Some(e) => Err(UpgradeError::Launch(e)),
    };
    let soon = Instant::now() + PATIENCE;
    match done {
        Ok(pid) => {
            sd_notify::tell(&format!("MAINPID={pid}"));
            let _ = launcher.send(&outcome, &[], soon);
            log::finish();
            // Nothing is left that could be put in order: it is all the other's.
            process::exit(0);
        }
        Err(e) => {
            error!("upgrade: {e}; this process goes on");
            outcome.error = Some(e.to_string());
            let _ = launcher.send(&outcome, &[], soon);
        }
    }
}

/// The new process.
struct Successor {
    channel: Channel,
    pid: u32,
}

fn hand_over(
    server: &Server,
    launcher: &Channel,
    outcome: &mut Outcome,
) -> Result<u32, UpgradeError> {
    let deadline = Instant::now() + PATIENCE;
    let Successor { channel, pid } = launch(launcher, deadline).map_err(UpgradeError::Launch)?;
    let hello = match channel.receive::<FirstMessage>(deadline) {
        Ok((FirstMessage::Hello(hello), _)) => hello,
        Ok((FirstMessage::Failed(step), _)) => return Err(UpgradeError::Start(unexpected(step))),
        Err(e) => return Err(UpgradeError::Start(e)),
    };
    if hello.protocol != PROTOCOL {
        return Err(UpgradeError::Protocol(hello.protocol));
    }
    info!(
        "upgrade: handing over to process {pid}, version {}",
        hello.version
    );
    let mut gone = server.handover.lock_exclusively(Instant::now() + PAUSE)?;
    // What has come up meanwhile is written while guests wait: little, if this time was short.
    let deadline = Instant::now() + PATIENCE;
    for _ in 0..FLUSH_ROUNDS {
        server.handover.check_not_stopping()?;
        let began = Instant::now();
        server
            .flush_metadata(deadline)
            .map_err(UpgradeError::Storage)?;
        let took = began.elapsed();
        // Nor is what would not be done in time begun.
        if took < FLUSH_IS_SHORT || Instant::now() + took > deadline {
            break;
        }
    }
    server.handover.check_not_stopping()?;

    let begin = Instant::now();
    // What is paused goes on when this is dropped, unless it is told otherwise.
    let paused = pause(server, begin + PAUSE)?;
    server.handover.check_not_stopping()?;
    outcome.disks = paused.len();
    outcome.connected = paused.iter().filter(|p| p.connection.is_some()).count();
    let finished = begin.elapsed();
    server
        .flush_metadata(begin + PAUSE)
        .map_err(UpgradeError::Storage)?;
    let settled = begin.elapsed();
    let deadline = Instant::now() + PAUSE;
    hand(server, &paused, &channel, deadline).map_err(UpgradeError::Hand)?;
    expect(&channel, Step::Prepared, deadline).map_err(UpgradeError::Prepare)?;
    server.handover.check_not_stopping()?;
    server.handover.leaving.store(true, Ordering::Release);
    if let Err(e) = commit(&channel) {
        server.handover.leaving.store(false, Ordering::Release);
        return Err(UpgradeError::Take(e));
    }
    let all = begin.elapsed();
    outcome.pause_us = all.as_micros() as u64;
    info!(
        "process {pid} serves the disks from now on; guests waited {:.1} ms: {:.1} for what was under way, {:.1} for \
         tables of images, {:.1} for the new process",
        ms(all),
        ms(finished),
        ms(settled - finished),
        ms(all - settled)
    );
    *gone = true;
    for export in paused {
        let _ = export.leave.send(());
    }
    Ok(pid)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Lets the new process serve. When this returns, it is settled who does: see [`hand`](crate::upgrade::protocol).
///
/// # Errors
/// The new process does not, and never will.
fn commit(channel: &Channel) -> io::Result<()> {
    let deadline = Instant::now() + PAUSE;
    let said = channel
        .send(&Step::Commit, &[], deadline)
        .and_then(|()| expect(channel, Step::Serving, deadline));
    let Err(e) = said else { return Ok(()) };
    channel.close_for_receiving();
    // What came until then counts, however late it was.
    match expect(channel, Step::Serving, Instant::now() + PAUSE) {
        Ok(()) => Ok(()),
        Err(_) => Err(e),
    }
}

/// Has the launcher start the new process.
fn launch(launcher: &Channel, deadline: Instant) -> io::Result<Successor> {
    let (channel, its) = Channel::pair()?;
    let its = its.into_descriptor();
    let (out, errors) = (io::stdout(), io::stderr());
    let descriptors = [its.as_fd(), out.as_fd(), errors.as_fd()];
    launcher.send(&UpgradeReply::Start, &descriptors, deadline)?;
    drop(its);
    let (Launched { pid }, _) = launcher.receive(deadline)?;
    Ok(Successor { channel, pid })
}

/// Stops serving all disks, when what is under way has ended.
fn pause(server: &Server, deadline: Instant) -> Result<Vec<PausedExport>, UpgradeError> {
    let pausing = server.pause();
    let each = pausing.into_iter().map(|pausing| {
        let left = deadline.saturating_duration_since(Instant::now());
        let unfinished = |paused: &Paused| {
            let session = paused.connection.as_ref();
            pausing.device.disk.is_abandoned()
                || session.is_some_and(|(_, saved)| saved.is_unfinished())
        };
        let unended = |id| match pausing.waits {
            true => UpgradeError::Waiting(id),
            false => UpgradeError::Stuck(id),
        };
        match pausing.paused.recv_timeout(left) {
            Ok(Err(e)) => Err(UpgradeError::Descriptors(pausing.id, e)),
            Ok(Ok(paused)) if unfinished(&paused) => Err(unended(pausing.id)),
            Ok(Ok(paused)) => Ok(PausedExport {
                place: pausing.place,
                file: pausing.node.identity(),
                // As its last front-end has left it.
                write_cache: pausing.device.chosen_write_cache(),
                capacity_read: pausing.device.capacity_read(),
                listener: paused.listener,
                connection: paused.connection,
                leave: paused.leave,
            }),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(unended(pausing.id))
            }
        }
    });
    each.collect()
}

/// An export that is asked to pause.
pub struct PendingPause {
    pub id: String,
    pub place: Arc<BoundPath>,
    pub node: Arc<Node>,
    pub device: Arc<ServedDisk>,
    /// Requests waited for its storage to work again before it was asked.
    pub waits: bool,
    pub paused: Receiver<io::Result<Paused>>,
}

struct PausedExport {
    place: Arc<BoundPath>,
    file: Option<FileIdentity>,
    write_cache: Option<bool>,
    capacity_read: Option<u64>,
    listener: OwnedFd,
    connection: Option<(OwnedFd, guest::SavedSession)>,
    leave: Sender<()>,
}

fn made_at(place: &Arc<BoundPath>) -> Option<(PathBuf, FileIdentity)> {
    Some((place.path().into(), place.made()?.into()))
}

fn hand(
    server: &Server,
    paused: &[PausedExport],
    channel: &Channel,
    deadline: Instant,
) -> io::Result<()> {
    let files = server.descriptors()?;
    let lock = server.state_lock()?;
    let handover = &server.handover;
    let (control, upgrade) = (locked(&handover.control), locked(&handover.upgrade));
    let (control, upgrade, metrics) = (control.as_ref(), upgrade.as_ref(), handover.metrics.get());
    let mut handed = Handover {
        files: files.len(),
        lock: lock.is_some(),
        control: control.is_some(),
        upgrade: upgrade.is_some(),
        metrics: metrics.is_some(),
        disks: server.handover_disks(),
        changed: Some(server.changed().text()),
        away: server.away(),
        sockets: handover.made(),
        exports: Vec::new(),
    };
    let exports = paused.iter().map(|export| &export.place);
    handed.sockets.extend(exports.filter_map(made_at));
    let singles = lock.iter().chain(control).chain(upgrade).chain(metrics);
    let mut descriptors: Vec<BorrowedFd<'_>> =
        files.iter().chain(singles).map(AsFd::as_fd).collect();
    for export in paused {
        descriptors.push(export.listener.as_fd());
        let session = export.connection.as_ref().map(|(connection, saved)| {
            let its = saved.descriptors();
            let session = HandoverSession {
                words: saved.words(),
                descriptors: its.len(),
            };
            descriptors.push(connection.as_fd());
            descriptors.extend(its);
            session
        });
        handed.exports.push(HandoverExport {
            socket: export.place.path().into(),
            file: export.file,
            write_cache: export.write_cache,
            capacity_read: export.capacity_read,
            session,
        });
    }
    channel.send(&handed, &descriptors, deadline)
}

fn expect(channel: &Channel, step: Step, deadline: Instant) -> io::Result<()> {
    let (came, _) = channel.receive::<Step>(deadline)?;
    match came == step {
        true => Ok(()),
        false => Err(unexpected(came)),
    }
}

/// Why what came is no success.
fn unexpected(step: Step) -> io::Error {
    match step {
        Step::Failed(why) => io::Error::other(why),
        step => io::Error::other(format!("{step:?} came, which was not its turn")),
    }
}
