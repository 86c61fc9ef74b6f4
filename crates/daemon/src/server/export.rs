//! A node in service: its socket, and the thread that serves front-ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::{io, mem};

use block::Request;
use control::{BlockErrorAction, BlockIoError, BlockIoResumed, Event, EventHub, IoOperationType};
use datapath::{Disk, IoAction, IoEvent, IoFailure, LogLimiter, Measuring};
use guest::{SavedSession, SessionEnd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tracing::{error, info, warn};

use crate::config::export::ExportSpec;
use crate::inherited::{Gate, InheritedExport};
use crate::node::Node;
use crate::server::connection_info::{self, ConnectionInfo};
use crate::server::device::{BlockDevice, ServedDisk};
use crate::server::error::ExportError;
use crate::server::iothreads::NamedThread;
use crate::socket::accept::Backoff;
use crate::socket::{self, PathStatus, Socket, reach};
use crate::state::ExportOverride;

/// A node in service. Dropping it finishes requests in flight, disconnects the front-end, and removes the socket.
pub struct Export {
    pub id: String,
    pub node: Arc<Node>,
    pub disk: Arc<Disk>,
    pub socket: PathBuf,
    /// The current path of the socket, and the file that was made there.
    pub place: Arc<socket::BoundPath>,
    pub spec: ExportSpec,
    pub device: Arc<ServedDisk>,
    /// Latencies are measured while this exists.
    measuring: Option<Measuring>,
    front_end: Arc<FrontEnd>,
    stop: Arc<OwnedFd>,
    /// If present, `stop` means a pause.
    pause: Arc<Mutex<Option<WantedPause>>>,
    /// `stop` means the end, even if a pause is requested.
    stopping: Arc<AtomicBool>,
    renewed: Arc<RenewedSocket>,
    listener: Option<JoinHandle<()>>,
}

/// A socket that was made again, until the thread of front-ends listens there. The session of a connected front-end is not
/// interrupted for it.
struct RenewedSocket {
    socket: Mutex<Option<Socket>>,
    /// Readable when there may be one.
    event: OwnedFd,
}

impl RenewedSocket {
    fn new() -> io::Result<Self> {
        Ok(Self {
            socket: Mutex::default(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    fn set(&self, socket: Socket) {
        *self.socket() = Some(socket);
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    fn take(&self) -> Option<Socket> {
        // Consumes the event.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.socket().take()
    }

    fn socket(&self) -> MutexGuard<'_, Option<Socket>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The front-end that is connected.
#[derive(Default)]
struct FrontEnd {
    connected: AtomicBool,
    /// 0 if it is unknown.
    pid: AtomicI32,
}

/// What an export needs from the rest of the server.
pub struct ExportContext {
    /// Receives events.
    pub events: Arc<EventHub>,
    /// The write cache that the guest has chosen before.
    pub write_cache: Option<bool>,
    /// The size that an inherited front-end has read, in sectors.
    pub capacity_read: Option<u64>,
    /// Called when the guest changes its write cache.
    pub changed: Box<dyn Fn() + Send + Sync>,
    pub socket: ExportSocket,
}

/// The socket of an export.
pub enum ExportSocket {
    Bound(Socket),
    /// With everything else of the export of the old process.
    Inherited(Box<InheritedExport>),
}

/// A paused export: copies of its socket and of its front-end's connection and session. The export continues with its
/// own unless it is told to leave.
pub struct Paused {
    pub listener: OwnedFd,
    pub connection: Option<(OwnedFd, SavedSession)>,
    /// Tells the export that another process continues. If it is dropped, the export continues.
    pub leave: Sender<()>,
}

/// A pause that an export has been asked for, in two steps: first the thread of its front-end stops between two messages, so
/// that no queue starts or stops any more; then, when all exports have done so, its queues stop.
struct WantedPause {
    ready: Sender<()>,
    begin: Receiver<()>,
    /// It may begin.
    has_begun: bool,
    answer: Sender<io::Result<Paused>>,
}

impl WantedPause {
    /// Waits until the pause may begin. Returns false if it does not: nothing is to stop.
    fn begins(&mut self) -> bool {
        if !self.has_begun {
            self.has_begun = self.ready.send(()).is_ok() && self.begin.recv().is_ok();
        }
        self.has_begun
    }
}

/// An export that has been asked to pause. If this is dropped before it may begin, the export goes on.
pub struct AskedPause {
    /// No queue of this export starts or stops any more.
    pub ready: Receiver<()>,
    /// Lets the queues stop.
    pub begin: Sender<()>,
    /// The answer, when no request is in flight.
    pub paused: Receiver<io::Result<Paused>>,
}

impl Export {
    /// Listens for front-ends of a disk, which is on `node`. Thread i of `threads` serves queue i.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn start(
        node: Arc<Node>,
        disk: Disk,
        spec: &ExportSpec,
        threads: Vec<NamedThread>,
        around: ExportContext,
    ) -> Result<Self, ExportError> {
        let ExportContext {
            events,
            write_cache,
            capacity_read,
            changed,
            socket,
        } = around;
        let id = spec.id.clone();
        let system = |what| {
            let id = id.clone();
            move |e| ExportError::System(id, what, e)
        };
        let (bound, first) = match socket {
            ExportSocket::Bound(socket) => (socket, First::default()),
            ExportSocket::Inherited(inherited) => (
                Socket::adopt(inherited.listener, &spec.socket, inherited.made),
                First {
                    session: inherited.session,
                    gate: Some(inherited.gate),
                },
            ),
        };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| system("make an event descriptor")(e.into()))?;
        let stop = Arc::new(stop);
        let renewed = RenewedSocket::new().map_err(system("make an event descriptor"))?;
        let renewed = Arc::new(renewed);
        let front_end = Arc::new(FrontEnd::default());
        let (export_id, node_name) = (id.clone(), node.name().to_owned());
        let on_node = Arc::downgrade(&node);
        disk.on_event(move |event| {
            if matches!(event, IoEvent::Failed(failure) if failure.errno == 0) {
                tell_cut_off(on_node.clone());
            }
            events.emit(&qmp_event(&export_id, &node_name, event));
        });
        let disk = Arc::new(disk);
        let device = Arc::new(ServedDisk::new(
            disk.clone(),
            node.clone(),
            spec.queue_size,
            threads,
            write_cache,
            capacity_read,
            changed,
        ));
        tell_changes(&node, &disk, &device);
        let place = bound.place().clone();
        let front = Frontends {
            name: id.clone(),
            socket: bound,
            device: device.clone(),
            front_end: front_end.clone(),
            pause: Arc::default(),
            stopping: Arc::default(),
            renewed: renewed.clone(),
            lines: Lines::default(),
            accepting: Backoff::default(),
        };
        let (pause, stopping) = (front.pause.clone(), front.stopping.clone());
        let its_stop = stop.clone();
        let listener = thread::Builder::new()
            .name(format!("vhost-{id}"))
            .spawn(move || front.serve(its_stop.as_fd(), first))
            .map_err(|e| ExportError::Thread(id.clone(), e))?;
        Ok(Self {
            id,
            node,
            disk,
            socket: spec.socket.clone(),
            place,
            spec: spec.clone(),
            device,
            measuring: None,
            front_end,
            stop,
            pause,
            stopping,
            renewed,
            listener: Some(listener),
        })
    }

    /// Starts or stops measuring latencies.
    pub fn measure(&mut self, on: bool) {
        self.measuring = on.then(|| self.disk.measure());
    }

    /// Whether a front-end is connected.
    pub fn connected(&self) -> bool {
        self.front_end.connected.load(Ordering::Relaxed)
    }

    /// The process that has connected; `None` if there is none, or it is in another PID namespace.
    pub fn front_end_pid(&self) -> Option<i32> {
        let pid = self.front_end.pid.load(Ordering::Relaxed);
        (self.connected() && pid > 0).then_some(pid)
    }

    /// Resumes requests that wait for storage, or, with `report`, returns their errors to the guest.
    pub fn resume(&self, report: bool) {
        self.disk.resume(&self.device.io_threads(), report);
    }

    /// Retries requests that wait for storage at once, unless `resume` is to do it.
    pub fn retry(&self) {
        self.disk.retry(&self.device.io_threads());
    }

    /// Tells the listening thread to stop, without waiting for it.
    pub fn tell_to_stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.interrupt();
    }

    fn interrupt(&self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    /// Makes its socket again if it has been removed. Returns why nobody can connect, if nobody can.
    pub fn recreate_socket(&self) -> Option<String> {
        match self.place.look() {
            PathStatus::Itself => None,
            PathStatus::Nothing => self.make_socket_again().err(),
            PathStatus::Other(what) => {
                let path = self.place.path().display();
                Some(format!(
                    "{what} has taken the place of its socket {path}. It is left alone; move it away"
                ))
            }
        }
    }

    fn make_socket_again(&self) -> Result<(), String> {
        let (id, path) = (&self.id, self.place.path());
        match Socket::bind(path, reach::of_guests(self.spec.socket_access)) {
            Ok(mut socket) => {
                self.place.renew(&mut socket);
                self.renewed.set(socket);
                let path = path.display();
                warn!("disk {id}: {path} had been removed; ringdisk has created it again");
                Ok(())
            }
            Err(e) => Err(format!(
                "its socket had been removed, and cannot be created again: {e}"
            )),
        }
    }

    /// What a reload, an upgrade and a restart carry of it, apart from what the device
    /// [has learned](ServedDisk::carried) and the front-end's session, which only an upgrade carries.
    pub fn carried(&self) -> ExportOverride {
        let Self {
            // In its description.
            id: _,
            socket: _,
            node,
            // Made from the node and the description.
            disk: _,
            place: _,
            spec,
            device: _,
            // Begins again with those who watch.
            measuring: _,
            // Of the session, and of the thread that serves it.
            front_end: _,
            stop: _,
            pause: _,
            stopping: _,
            renewed: _,
            listener: _,
        } = self;
        ExportOverride {
            node: node.name().to_owned(),
            spec: spec.clone(),
        }
    }

    /// Asks it to pause. The answer is an error if there are no descriptors left; the export then continues.
    pub fn pause(&self) -> AskedPause {
        let (was_ready, ready) = mpsc::channel();
        let (begin, begins) = mpsc::channel();
        let (answer, paused) = mpsc::channel();
        *self.pause.lock().unwrap_or_else(PoisonError::into_inner) = Some(WantedPause {
            ready: was_ready,
            begin: begins,
            has_begun: false,
            answer,
        });
        self.interrupt();
        AskedPause {
            ready,
            begin,
            paused,
        }
    }

    /// How to connect a VM.
    pub fn ready(&self) -> ConnectionInfo {
        let (node, device) = (&self.node, &self.device);
        let socket = self.socket.display().to_string();
        let (queues, queue_size) = (device.queues(), device.queue_size);
        let fixed_buffers = node.spec.fixed_buffers;
        ConnectionInfo {
            name: self.id.clone(),
            file: node.filename.clone(),
            format: node.format.to_string(),
            size: self.disk.size(),
            qemu: connection_info::qemu(&self.id, &socket, queues, queue_size),
            libvirt: connection_info::libvirt(&socket, queues, queue_size, fixed_buffers),
            proxmox: connection_info::proxmox(&self.id, &socket, queues, queue_size),
            socket: self.socket.clone(),
            queues,
            queue_size,
            readonly: self.disk.facts.read_only,
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if let Some(rbd) = self.node.rbd() {
            rbd.on_change(None);
        }
        self.tell_to_stop();
        if let Some(listener) = mem::take(&mut self.listener) {
            let _ = listener.join();
        }
    }
}

/// Grows the disk and notifies its guest when its image in a Ceph cluster grows.
pub fn tell_changes(node: &Arc<Node>, disk: &Arc<Disk>, device: &Arc<ServedDisk>) {
    if let Some(rbd) = node.rbd() {
        let (node, disk, device) = (Arc::downgrade(node), disk.clone(), device.clone());
        rbd.on_change(Some(Box::new(move || {
            if let Some(node) = node.upgrade() {
                Node::let_grow(&disk, &node.file_size());
                device.tell_size();
            }
        })));
    }
}

/// The file ended before the disk did. An I/O thread must not wait for what follows.
fn tell_cut_off(node: Weak<Node>) {
    let cut_off = move || node.upgrade().inspect(|node| node.cut_off());
    let started = thread::Builder::new().name("cut-off".into()).spawn(cut_off);
    if let Err(e) = started {
        warn!("bitmaps of a disk whose file was cut off may lack that: {e}");
    }
}

fn qmp_event(export: &str, node: &str, event: &IoEvent) -> Event {
    match event {
        IoEvent::Failed(failure) => io_error(export, node, failure),
        IoEvent::Resumed(_) => Event::BlockIoResumed(BlockIoResumed {
            device: export.into(),
            node_name: Some(node.into()),
        }),
    }
}

fn io_error(export: &str, node: &str, failure: &IoFailure) -> Event {
    let reason = match failure.errno {
        0 => "the file ends before the disk does".into(),
        errno => block::explain(&io::Error::from_raw_os_error(errno), ""),
    };
    Event::BlockIoError(BlockIoError {
        qom_path: None,
        device: export.into(),
        node_name: Some(node.into()),
        operation: match failure.request {
            Request::Read { .. } => IoOperationType::Read,
            _ => IoOperationType::Write,
        },
        action: match failure.action {
            IoAction::Report => BlockErrorAction::Report,
            IoAction::Stop | IoAction::Retry => BlockErrorAction::Stop,
        },
        nospace: Some(block::is_no_space(failure.errno)),
        reason,
    })
}

/// The front-end to begin with.
#[derive(Default)]
struct First {
    session: Option<(UnixStream, SavedSession)>,
    /// It is served only after this opens.
    gate: Option<Arc<Gate>>,
}

struct Frontends {
    name: String,
    socket: Socket,
    device: Arc<ServedDisk>,
    front_end: Arc<FrontEnd>,
    pause: Arc<Mutex<Option<WantedPause>>>,
    stopping: Arc<AtomicBool>,
    renewed: Arc<RenewedSocket>,
    lines: Lines,
    accepting: Backoff,
}

/// Limiters of log lines that front-ends can cause at any rate.
#[derive(Default)]
struct Lines {
    connected: LogLimiter,
    disconnected: LogLimiter,
    cut_off: LogLimiter,
}

/// How the wait for a front-end ended.
enum Waited {
    Connected(UnixStream),
    Stopped,
    Failed,
}

impl Frontends {
    /// Serves front-ends, one at a time, until `stop` becomes readable and no pause is requested. A second one waits
    /// until the first has disconnected.
    fn serve(mut self, stop: BorrowedFd<'_>, first: First) {
        let mut next = first.session.map(|(socket, saved)| (socket, Some(saved)));
        if let Some(gate) = first.gate {
            gate.wait();
            self.socket.own();
        }
        loop {
            let stopped = match next.take() {
                Some((socket, saved)) => self.serve_one(socket, saved, stop),
                None => match self.wait(stop) {
                    Waited::Connected(socket) => {
                        self.lines.connected.log(|left_out| {
                            info!("disk {}: front-end connected{left_out}", self.name);
                        });
                        next = Some((socket, None));
                        continue;
                    }
                    Waited::Stopped => Some(None),
                    Waited::Failed => return,
                },
            };
            let Some(session) = stopped else { continue };
            match self.paused(session, stop) {
                Some(session) => next = session.map(|(socket, saved)| (socket, Some(saved))),
                None => return,
            }
        }
    }

    /// Listens at the socket that was made again, if it was.
    fn renew_socket(&mut self) {
        if let Some(socket) = self.renewed.take() {
            self.socket.listen_at(socket);
        }
    }

    fn wait(&mut self, stop: BorrowedFd<'_>) -> Waited {
        loop {
            self.renew_socket();
            let name = &self.name;
            let mut ready = [
                PollFd::new(&stop, PollFlags::IN),
                PollFd::new(&self.renewed.event, PollFlags::IN),
                PollFd::new(&self.socket.listener, PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => {
                    error!("disk {name}: cannot wait for front-ends: {e}");
                    return Waited::Failed;
                }
                Ok(_) if !ready[0].revents().is_empty() => return Waited::Stopped,
                Ok(_) if !ready[1].revents().is_empty() => continue,
                Ok(_) => {}
            }
            match self.socket.listener.accept() {
                Ok((socket, _)) => {
                    self.accepting.succeeded();
                    return Waited::Connected(socket);
                }
                // Probably out of descriptors: connected front-ends continue, this one waits.
                Err(e) => self.accepting.failed(|left_out| {
                    let e = block::explain(&e, "it is tried again");
                    warn!("disk {name}: cannot accept a front-end, which waits: {e}{left_out}");
                }),
            }
        }
    }

    /// Serves a front-end. If it was stopped, returns the session to continue with, if there is one.
    fn serve_one(
        &self,
        socket: UnixStream,
        saved: Option<SavedSession>,
        stop: BorrowedFd<'_>,
    ) -> Option<Option<(UnixStream, SavedSession)>> {
        let name = &self.name;
        let pid = guest::peer_pid(&socket).unwrap_or(0);
        self.front_end.pid.store(pid, Ordering::Relaxed);
        self.front_end.connected.store(true, Ordering::Relaxed);
        let may_stop = || self.may_stop(stop);
        let mut device = BlockDevice::new(&self.device, &may_stop);
        let (end, saved) = guest::serve_from(&socket, &mut device, stop, saved);
        self.front_end.connected.store(false, Ordering::Relaxed);
        match end {
            SessionEnd::Disconnected => self.lines.disconnected.log(|left_out| {
                info!("disk {name}: front-end disconnected{left_out}");
            }),
            SessionEnd::Stopped => return Some(saved.map(|saved| (socket, saved))),
            SessionEnd::Failed(e) => self.lines.cut_off.log(|left_out| {
                warn!("disk {name}: front-end cut off: {e}{left_out}");
            }),
        }
        None
    }

    fn wanted_pause(&self) -> MutexGuard<'_, Option<WantedPause>> {
        self.pause.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// After `stop`, between two messages of a front-end. False if a pause was wanted that does not begin: its queues go on.
    fn may_stop(&self, stop: BorrowedFd<'_>) -> bool {
        // Taken out: a thread that asks for the end must not wait for the lock.
        let Some(mut wanted) = self.wanted_pause().take() else {
            return true;
        };
        if wanted.begins() {
            *self.wanted_pause() = Some(wanted);
            return true;
        }
        // Consumes the event. Another that sets it sets this first.
        let _ = rustix::io::read(stop, &mut [0; 8]);
        self.stopping.load(Ordering::Acquire)
    }

    /// After `stop`: pauses and sends copies for a handover, and continues if that fails. `None` means the end.
    fn paused(
        &mut self,
        session: Option<(UnixStream, SavedSession)>,
        stop: BorrowedFd<'_>,
    ) -> Option<Option<(UnixStream, SavedSession)>> {
        // Consumes the event.
        let _ = rustix::io::read(stop, &mut [0; 8]);
        if self.stopping.load(Ordering::Acquire) {
            return None;
        }
        self.renew_socket();
        let wanted = self.wanted_pause().take();
        let Some(wanted) = wanted.and_then(|mut wanted| wanted.begins().then_some(wanted)) else {
            return Some(session);
        };
        let copy = || {
            let listener = self.socket.listener.as_fd().try_clone_to_owned()?;
            let copy = |(socket, saved): &(UnixStream, SavedSession)| {
                Ok::<_, io::Error>((socket.as_fd().try_clone_to_owned()?, saved.clone()))
            };
            Ok::<_, io::Error>((listener, session.as_ref().map(copy).transpose()?))
        };
        let (leave, left) = mpsc::channel();
        let sent = match copy() {
            Ok((listener, connection)) => wanted.answer.send(Ok(Paused {
                listener,
                connection,
                leave,
            })),
            Err(e) => {
                let _ = wanted.answer.send(Err(e));
                return Some(session);
            }
        };
        if sent.is_ok() && left.recv().is_ok() {
            self.socket.disown();
            return None;
        }
        Some(session)
    }
}
