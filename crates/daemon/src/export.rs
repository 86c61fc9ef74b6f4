//! A node in service: its socket, and the thread that serves the front-ends which connect there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{io, mem};

use block::{CacheMode, Request};
use control::{BlockErrorAction, BlockIoError, BlockIoResumed, Event, EventHub, IoOperationType};
use datapath::{Disk, IoAction, IoEvent, IoFailure, IoThread, Measuring};
use guest::End;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use thiserror::Error;
use tracing::{error, info, warn};

use crate::device::{BlockDevice, ServedDisk};
use crate::iothreads::NamedThread;
use crate::node::{AWAY, Node};
use crate::paste::{self, Ready};
use crate::socket::{self, Socket, SocketError};
use crate::spec::{DiskSpec, SocketAccess};

/// A node in service. Dropping it stops that: what is under way is finished, the front-end is disconnected,
/// and the socket goes away.
pub struct Export {
    pub id: String,
    pub node: Arc<Node>,
    pub disk: Arc<Disk>,
    pub socket: PathBuf,
    pub device: Arc<ServedDisk>,
    /// Latencies are measured as long as this is there.
    measuring: Option<Measuring>,
    connected: Arc<AtomicBool>,
    stop: Arc<OwnedFd>,
    listener: Option<JoinHandle<()>>,
}

/// How a disk is served, apart from what it is.
#[derive(Clone, Debug)]
pub struct ExportSpec {
    pub id: String,
    pub socket: PathBuf,
    pub socket_access: SocketAccess,
    pub queues: u16,
    pub queue_size: u16,
    /// I/O threads by id or number; none for the next ones of the pool.
    pub iothreads: Vec<String>,
    pub read_only: bool,
    pub cache: CacheMode,
    /// In bytes; the node's if absent.
    pub logical_block: Option<u32>,
}

impl From<&DiskSpec> for ExportSpec {
    fn from(disk: &DiskSpec) -> Self {
        Self {
            id: disk.name.clone(),
            socket: socket::path(disk),
            socket_access: disk.socket_access,
            queues: disk.queues,
            queue_size: disk.queue_size,
            iothreads: disk.iothreads.clone(),
            read_only: disk.read_only,
            cache: disk.cache,
            logical_block: None,
        }
    }
}

#[derive(Debug, Error)]
pub enum ExportError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("disk {0}: cannot {1}: {2}")]
    System(String, &'static str, io::Error),
}

impl Export {
    /// Listens at the socket for front-ends of a disk, which lies on a node; queue i is served by thread i
    /// of `threads`. What goes wrong with it is told to `events`.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn start(
        node: Arc<Node>,
        disk: Disk,
        spec: &ExportSpec,
        threads: Vec<NamedThread>,
        events: Arc<EventHub>,
    ) -> Result<Self, ExportError> {
        let id = spec.id.clone();
        let system = |what| {
            let id = id.clone();
            move |e| ExportError::System(id, what, e)
        };
        let bound = Socket::bind(&spec.socket, spec.socket_access)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| system("make an event descriptor")(e.into()))?;
        let stop = Arc::new(stop);
        let connected = Arc::new(AtomicBool::new(false));
        let (its_id, its_node) = (id.clone(), node.name().to_owned());
        disk.on_event(move |event| events.emit(&told(&its_id, &its_node, event)));
        let disk = Arc::new(disk);
        let device = Arc::new(ServedDisk::new(
            disk.clone(),
            node.clone(),
            spec.queue_size,
            threads,
        ));
        tell_changes(&node, &disk, &device);
        let front = Frontends {
            name: id.clone(),
            socket: bound,
            device: device.clone(),
            connected: connected.clone(),
        };
        let its_stop = stop.clone();
        let listener = thread::Builder::new()
            .name(format!("vhost-{id}"))
            .spawn(move || front.serve(its_stop.as_fd()))
            .map_err(system("start a thread"))?;
        Ok(Self {
            id,
            node,
            disk,
            socket: spec.socket.clone(),
            device,
            measuring: None,
            connected,
            stop,
            listener: Some(listener),
        })
    }

    /// Measures latencies, or no longer.
    pub fn measure(&mut self, on: bool) {
        self.measuring = on.then(|| self.disk.measure());
    }

    /// Whether a front-end is connected.
    pub fn connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Puts another node under the disk while its guest runs, which notices a pause.
    ///
    /// # Errors
    /// The disk goes on with the node that it had.
    pub fn replace(&mut self, node: Arc<Node>) -> Result<(), ExportError> {
        let fail = |e| ExportError::System(self.id.clone(), "be put on another file", e);
        if !self.node.is_here() {
            return Err(fail(io::Error::other(AWAY)));
        }
        node.be_here().map_err(|e| fail(io::Error::other(e)))?;
        let threads = self.threads();
        let new = node.replacement().map_err(|e| fail(io::Error::other(e)))?;
        // Which file holds the disk is what the operator has written down, in the configuration or in
        // the VM's own; there is no record of ours.
        self.disk.replace(&threads, new, || Ok(())).map_err(fail)?;
        if let Some(rbd) = self.node.rbd() {
            rbd.on_change(None);
        }
        self.node = node.clone();
        self.device.set_node(node);
        self.device.tell_size();
        Ok(())
    }

    /// Has requests go on that wait for storage, or, with `report`, their guest told.
    pub fn resume(&self, report: bool) {
        self.disk.resume(&self.threads(), report);
    }

    /// The threads of its queues, each once.
    fn threads(&self) -> Vec<Arc<IoThread>> {
        let mut threads: Vec<_> = self.device.threads.iter().map(|t| &t.thread).collect();
        threads.sort_by_key(|thread| thread.thread_id());
        threads.dedup_by_key(|thread| thread.thread_id());
        threads.into_iter().cloned().collect()
    }

    /// Tells the listening thread to end, without waiting for it.
    pub fn tell_to_stop(&self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    /// What to paste to connect a VM.
    pub fn ready(&self) -> Ready {
        let (node, device) = (&self.node, &self.device);
        let socket = self.socket.display().to_string();
        let (queues, queue_size) = (device.queues(), device.queue_size);
        let fixed_buffers = node.spec.fixed_buffers;
        Ready {
            name: self.id.clone(),
            file: node.filename.clone(),
            format: node.format.to_string(),
            size: self.disk.size(),
            qemu: paste::qemu(&self.id, &socket, queues, queue_size),
            libvirt: paste::libvirt(&socket, queues, queue_size, fixed_buffers),
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

/// Lets the disk grow, and tells its guest, when an image in a Ceph cluster grows.
fn tell_changes(node: &Arc<Node>, disk: &Arc<Disk>, device: &Arc<ServedDisk>) {
    if let Some(rbd) = node.rbd() {
        let (node, disk, device) = (Arc::downgrade(node), disk.clone(), device.clone());
        rbd.on_change(Some(Box::new(move || {
            if let Some(node) = node.upgrade() {
                node.look_for_growth(&disk);
                device.tell_size();
            }
        })));
    }
}

fn told(export: &str, node: &str, event: &IoEvent) -> Event {
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
        errno => io::Error::from_raw_os_error(errno).to_string(),
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
        nospace: Some(failure.errno == rustix::io::Errno::NOSPC.raw_os_error()),
        reason,
    })
}

struct Frontends {
    name: String,
    socket: Socket,
    device: Arc<ServedDisk>,
    connected: Arc<AtomicBool>,
}

impl Frontends {
    /// Accepts front-ends, one at a time, until `stop` becomes readable. A second one waits until the
    /// first has gone.
    fn serve(self, stop: BorrowedFd<'_>) {
        let name = &self.name;
        loop {
            let mut ready = [
                PollFd::new(&stop, PollFlags::IN),
                PollFd::new(&self.socket.listener, PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return error!("disk {name}: cannot wait for front-ends: {e}"),
                Ok(_) if !ready[0].revents().is_empty() => return,
                Ok(_) => {}
            }
            let socket = match self.socket.listener.accept() {
                Ok((socket, _)) => socket,
                Err(e) => {
                    // Out of descriptors, most likely: those in service go on, this one waits.
                    warn!("disk {name}: cannot accept a front-end: {e}; trying again in a second");
                    thread::sleep(Duration::from_secs(1));
                    continue;
                }
            };
            info!("disk {name}: front-end connected");
            self.connected.store(true, Ordering::Relaxed);
            let mut device = BlockDevice::new(&self.device);
            let end = guest::serve(&socket, &mut device, stop);
            self.connected.store(false, Ordering::Relaxed);
            match end {
                End::Disconnected => info!("disk {name}: front-end disconnected"),
                End::Stopped => return,
                End::Failed(e) => warn!("disk {name}: front-end cut off: {e}"),
            }
        }
    }
}
