//! The back-end side of a vhost-user session: one connected front-end, from the first message to the end of
//! the connection (QEMU's `docs/interop/vhost-user.rst`).

mod memory;
mod rings;
mod saving;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tracing::debug;

use crate::aio_notifier::AioNotifier;
use crate::blk::{self, CONFIG_BYTES};
use crate::inflight::{Inflight, InflightError};
use crate::log::{DirtyLog, LogError};
use crate::memory::{GuestMemory, MemoryError};
use crate::message::{Config, Deferred, Header, MAX_MEM_SLOTS, Message, MessageError};
use crate::ring::{RingBase, RingError};
use crate::saved::SavedSession;
use crate::sigbus::SessionAbort;
use crate::socket::{self, FrontendChannel, NoMessage};
use crate::virtqueue::Virtqueue;
use rings::{Ring, event};

/// The feature bit that announces protocol features.
const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// The feature bit with which a front-end requests that all writes to guest memory are marked
/// (VHOST_F_LOG_ALL).
const F_LOG_ALL: u64 = 1 << 26;

/// Feature bits of the session, not of the device.
const SESSION_FEATURES: u64 = F_PROTOCOL_FEATURES | F_LOG_ALL;

const P_MQ: u64 = 1 << 0;
const P_LOG_SHMFD: u64 = 1 << 1;
const P_REPLY_ACK: u64 = 1 << 3;
const P_BACKEND_REQ: u64 = 1 << 5;
const P_CONFIG: u64 = 1 << 9;
const P_INFLIGHT_SHMFD: u64 = 1 << 12;
const P_RESET_DEVICE: u64 = 1 << 13;
const P_CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
const P_STATUS: u64 = 1 << 16;
const PROTOCOL_FEATURES: u64 = P_MQ
    | P_LOG_SHMFD
    | P_REPLY_ACK
    | P_BACKEND_REQ
    | P_CONFIG
    | P_INFLIGHT_SHMFD
    | P_RESET_DEVICE
    | P_CONFIGURE_MEM_SLOTS
    | P_STATUS;

/// A ring that the front-end has set up and enabled.
pub struct NewQueue {
    /// The ring.
    pub virtqueue: Virtqueue,
    /// Becomes readable when the guest has made requests available.
    pub kick: Arc<OwnedFd>,
    /// Written when requests have been completed; without it, the guest polls.
    pub call: Option<Arc<OwnedFd>>,
    /// Written when the device has given up the ring.
    pub error: Option<Arc<OwnedFd>>,
    /// Written when something may have been marked in the dirty log.
    pub marked: Option<Arc<OwnedFd>>,
    /// Notified when the ring can no longer be served for a reason that is not the guest's fault; the session
    /// then ends.
    pub abort: SessionAbort,
}

/// Where the driver of a ring was served before, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Nowhere: it starts.
    Starts,
    /// By another device, perhaps on another host.
    GoesOn,
    /// On this host: the record of its requests in flight is memory of this host.
    GoesOnHere,
    /// Nobody knows, as there is no such record.
    GoesOnSomewhere,
}

/// Why no ring of a device is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// The front-end has stopped the device, and is still connected: the guest may go on, be reset, or be saved.
    Stopped,
    /// The guest goes on on another machine.
    Moving,
    /// The front-end is gone.
    Disconnected,
}

/// The device that a session drives: a virtio-blk device with its queues.
pub trait Device {
    /// Feature bits of the virtio device.
    fn features(&self) -> u64;
    /// Number of queues.
    fn queues(&self) -> u16;
    /// Maximum number of data segments in a request.
    fn seg_max(&self) -> u16;
    /// The current configuration space.
    fn config(&self) -> [u8; CONFIG_BYTES];
    /// Called when the front-end has read this disk size, in sectors, from the configuration space.
    fn capacity_read(&self, sectors: u64);
    /// Switches the write cache on or off, at the driver's request.
    fn set_write_cache(&mut self, on: bool);
    /// Called with the feature bits that the driver has accepted.
    fn set_features(&mut self, accepted: u64);
    /// Sets the channel for notifying the front-end of changes; `None` if there is none any more.
    fn set_frontend(&mut self, channel: Option<FrontendChannel>);
    /// Called when a ring cannot be served with the address or size that the guest set.
    fn ring_failed(&self, ring: u16, error: &RingError);
    /// Called when a ring of `size` descriptors is served without a record of its requests in flight, because
    /// the front-end's region is too small. Called at most once in a session.
    fn untracked(&self, ring: u16, size: u16);
    /// Called between two messages, when `stop` has become readable and rings are about to stop. Returns whether they are:
    /// otherwise `stop` is not readable any more, and the session goes on. May block.
    fn may_stop(&mut self) -> bool {
        true
    }
    /// Starts serving a ring that is not being served.
    ///
    /// # Errors
    /// The device lacks the resources to serve it.
    fn start(&mut self, ring: u16, queue: NewQueue, driver: Driver) -> io::Result<()>;
    /// Asks for a ring to be stopped and does not wait: the ring fetches no more requests, and those in
    /// flight go on. The next call for this ring is [`finish_stop`](Self::finish_stop).
    fn begin_stop(&mut self, ring: u16);
    /// Waits for a ring that was asked to stop. Returns when the ring has nothing in flight, or when the device
    /// has waited for its storage for long enough.
    fn finish_stop(&mut self, ring: u16) -> StoppedRing;
    /// Called when no ring is being served and none will be until the front-end asks for it. May be called more than once.
    ///
    /// # Errors
    /// The guest's writes could not be handed over; the front-end must not assume that they were.
    fn quiesce(&mut self, why: Pause) -> io::Result<()>;
    /// Whether storage has answered every operation or may never answer it: no unfinished request of a
    /// stopped ring can change the disk any more.
    fn storage_answered(&self) -> bool;
    /// Changes the descriptors that a running ring signals.
    fn set_event_fds(&mut self, ring: u16, call: Option<Arc<OwnedFd>>, error: Option<Arc<OwnedFd>>);
}

/// The state of a ring when it stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoppedRing {
    /// The position where a successor continues.
    pub base: RingBase,
    /// The ring has requests that storage has not finished. The record of requests in flight stays valid.
    pub unfinished: bool,
}

/// Why a session ended.
#[derive(Debug)]
pub enum SessionEnd {
    /// The front-end closed the connection.
    Disconnected,
    /// `stop` became readable.
    Stopped,
    /// The front-end broke the protocol, or the socket failed.
    Failed(SessionError),
}

/// Why ringdisk ended a session.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The front-end sent an invalid message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Memory cannot be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The region for requests in flight is invalid.
    #[error(transparent)]
    Inflight(#[from] InflightError),
    /// The dirty log is invalid or too short.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A ring index is beyond the number of queues.
    #[error("ring {0} does not exist, the disk has {1} queues")]
    NoRing(u32, u16),
    /// The front-end accepted features that were not offered.
    #[error("the front-end accepted features {0:#x}, which include some that were not offered")]
    Features(u64),
    /// The front-end added more memory regions than ringdisk accepts.
    #[error("more than {MAX_MEM_SLOTS} memory regions")]
    MemorySlots,
    /// Guest memory was truncated, or a thread that served a ring failed.
    #[error(
        "the guest's memory file was truncated while mapped, or an I/O thread failed (see above); the \
         front-end may reconnect"
    )]
    Aborted,
    /// The front-end asked for something that this back-end does not support.
    #[error("{0}")]
    Refused(&'static str),
    /// The socket or an event descriptor failed.
    #[error("{cause}", cause = block::explain(.0, ""))]
    Io(#[from] io::Error),
}

/// Serves a front-end until it disconnects, breaks the protocol, or `stop` becomes readable. No ring is being
/// served when this returns.
pub fn serve(socket: &UnixStream, device: &mut dyn Device, stop: BorrowedFd<'_>) -> SessionEnd {
    serve_from(socket, device, stop, None).0
}

/// Like [`serve`], but continues a session that this process or another one [`SavedSession`]. If the session was
/// asked to stop between two messages, also returns the state with which it can be continued.
pub fn serve_from(
    socket: &UnixStream,
    device: &mut dyn Device,
    stop: BorrowedFd<'_>,
    saved: Option<SavedSession>,
) -> (SessionEnd, Option<SavedSession>) {
    // A session that continues in this process keeps its notifier: there may be no descriptor for another.
    let abort = saved.as_ref().and_then(|saved| saved.abort.clone());
    let abort = match abort.map_or_else(SessionAbort::new, Ok) {
        Ok(abort) => abort,
        Err(e) => return (SessionEnd::Failed(e.into()), None),
    };
    let rings = (0..device.queues()).map(|_| Ring::default()).collect();
    let mut session = Session {
        socket,
        device,
        rings,
        memory: Arc::new(GuestMemory::watched(abort.clone())),
        abort,
        notifier: AioNotifier::default(),
        inflight: None,
        log: None,
        log_event: None,
        channel: None,
        torn: false,
        reported_untracked: false,
        features: 0,
        owned: false,
        protocol: None,
        status: 0,
        deferred: None,
    };
    let mut end = saved.and_then(|saved| session.restore(saved).err().map(SessionEnd::Failed));
    let end = loop {
        match end.take() {
            Some(SessionEnd::Stopped) if !session.torn && !session.device.may_stop() => {}
            Some(end) => break end,
            None => end = session.step(stop).err(),
        }
    };
    session.stop_all();
    session.device.set_frontend(None);
    // The process that continues the session finds the disk in its current state, also during a migration.
    if matches!(end, SessionEnd::Stopped) && !session.torn {
        return (end, Some(session.save()));
    }
    // The front-end is gone; the device has already reported the error.
    let _ = session.quiesce(Pause::Disconnected);
    (end, None)
}

struct Session<'a> {
    socket: &'a UnixStream,
    device: &'a mut dyn Device,
    rings: Vec<Ring>,
    memory: Arc<GuestMemory>,
    abort: SessionAbort,
    notifier: AioNotifier,
    /// The record of requests in flight.
    inflight: Option<Inflight>,
    /// Marks writes to guest memory while the front-end requests this.
    log: Option<Arc<DirtyLog>>,
    log_event: Option<Arc<OwnedFd>>,
    /// The channel for notifying the front-end of changes.
    channel: Option<Arc<OwnedFd>>,
    /// The stop arrived in the middle of a message.
    torn: bool,
    /// The device has been told of a ring for which the region is too small.
    reported_untracked: bool,
    features: u64,
    /// The front-end has created a device on this connection.
    owned: bool,
    /// The protocol features, after the front-end has asked for them or set them.
    protocol: Option<u64>,
    status: u8,
    /// The message that the front-end waits for until storage answers.
    deferred: Option<(Header, Deferred)>,
}

/// Interval at which the session checks whether storage has answered while a front-end waits for it.
const AWAIT: Duration = Duration::from_millis(200);

/// The reply to a message.
enum Reply {
    None,
    /// The request was refused and nothing has changed: the session continues.
    Refused,
    /// No reply yet: the message is [`deferred`](Session::deferred).
    Deferred(Deferred),
    Word(u64),
    Bytes(Vec<u8>),
    File(Vec<u8>, OwnedFd),
    /// The position at which a stopped ring would continue.
    Base(u32, RingBase),
}

/// The reply to a message that has been handled.
fn done((): ()) -> Reply {
    Reply::None
}

impl Session<'_> {
    fn step(&mut self, stop: BorrowedFd<'_>) -> Result<(), SessionEnd> {
        let abort = self.abort.event();
        let incoming = match self.deferred.take() {
            None => socket::receive(self.socket, stop, abort).map(|incoming| {
                let header = incoming.header;
                let message = Message::parse(header.request, &incoming.payload, incoming.fds);
                (header, message)
            }),
            Some((header, deferred)) => {
                let paused = socket::pause(self.socket, stop, abort, AWAIT);
                // A process that takes over the session continues with this message.
                self.deferred = paused.is_err().then_some((header, deferred));
                paused.map(|()| (header, Ok(deferred.into())))
            }
        };
        let (header, message) = incoming.map_err(|none| match none {
            NoMessage::Closed => SessionEnd::Disconnected,
            NoMessage::Stopped { torn } => {
                self.torn = torn;
                SessionEnd::Stopped
            }
            NoMessage::Aborted => SessionEnd::Failed(SessionError::Aborted),
            NoMessage::Socket(e) => SessionEnd::Failed(e.into()),
            NoMessage::Malformed(e) => SessionEnd::Failed(e.into()),
        })?;
        let acknowledge = header.need_reply && self.protocol() & P_REPLY_ACK != 0;
        let result = message.map_err(SessionError::from).and_then(|message| {
            debug!(?message, "front-end");
            self.handle(message)
        });
        let sent = match result {
            Ok(Reply::Word(word)) => {
                socket::send_reply(self.socket, header.request, &word.to_ne_bytes())
            }
            Ok(Reply::Bytes(bytes)) => socket::send_reply(self.socket, header.request, &bytes),
            Ok(Reply::File(bytes, file)) => {
                socket::send_reply_with(self.socket, header.request, &bytes, file.as_fd())
            }
            Ok(Reply::Base(ring, base)) => {
                let bytes = [ring.to_ne_bytes(), base.0.to_ne_bytes()].concat();
                let sent = socket::send_reply(self.socket, header.request, &bytes);
                // Only after sending: if this process is killed before, the front-end does not know the
                // ring's position.
                self.forget_inflight(ring as u16);
                sent
            }
            Ok(reply @ (Reply::None | Reply::Refused)) if acknowledge => {
                let refused = u64::from(matches!(reply, Reply::Refused));
                socket::send_reply(self.socket, header.request, &refused.to_ne_bytes())
            }
            Ok(Reply::Deferred(deferred)) => {
                self.deferred = Some((header, deferred));
                Ok(())
            }
            Ok(Reply::None | Reply::Refused) => Ok(()),
            Err(e) => {
                // If the front-end asked for a reply, it learns of the failure. The state that it assumes
                // afterwards is unknown, so the connection ends in both cases.
                if acknowledge {
                    let _ = socket::send_reply(self.socket, header.request, &1u64.to_ne_bytes());
                }
                return Err(SessionEnd::Failed(e));
            }
        };
        sent.map_err(|e| SessionEnd::Failed(e.into()))
    }

    fn handle(&mut self, message: Message) -> Result<Reply, SessionError> {
        match message {
            Message::GetFeatures => Ok(Reply::Word(self.device.features() | SESSION_FEATURES)),
            Message::SetFeatures(bits) => self.set_features(bits).map(done),
            Message::GetProtocolFeatures => {
                self.protocol.get_or_insert(0);
                Ok(Reply::Word(PROTOCOL_FEATURES))
            }
            Message::SetProtocolFeatures(bits) => self.set_protocol_features(bits).map(done),
            Message::SetOwner => {
                self.reinitialize();
                Ok(Reply::None)
            }
            Message::ResetOwner | Message::ResetDevice => self.reset_device().map(done),
            Message::GetQueueNum => Ok(Reply::Word(u64::from(self.device.queues()))),
            Message::SetBackendReqFd(fd) => {
                self.open_channel(Arc::new(fd));
                Ok(Reply::None)
            }
            Message::GetConfig(window) => Ok(self.read_config(window)),
            Message::SetConfig(window) => self.write_config(&window),
            Message::SetStatus(status) => self.set_status(status),
            Message::GetStatus => Ok(Reply::Word(u64::from(self.status))),

            Message::SetMemTable(table) => self.set_memory(table).map(done),
            Message::GetMaxMemSlots => Ok(Reply::Word(MAX_MEM_SLOTS as u64)),
            Message::AddMemReg(layout, file) => self.add_memory(layout, file).map(done),
            Message::RemMemReg(layout) => {
                let memory = self.memory.without_region(layout)?;
                self.change_memory(memory).map(done)
            }
            Message::SetLogBase(layout, file) => self.set_log(layout, file),
            Message::SetLogFd(fd) => self.set_log_event(fd).map(done),
            Message::GetInflightFd { queues, queue_size } => self.make_inflight(queues, queue_size),
            Message::SetInflightFd(layout, file) => self.set_inflight(layout, file).map(done),

            Message::SetVringNum { ring, size } => self.set_ring_size(ring, size).map(done),
            Message::SetVringAddr(addr) => self
                .change_ring(addr.ring, |state| state.addr = Some(addr))
                .map(done),
            Message::SetVringBase { ring, base } => self.set_ring_base(ring, base).map(done),
            Message::GetVringBase { ring } => self.stop_for_base(ring),
            Message::SetVringKick { ring, fd } => self.set_kick(ring, fd).map(done),
            Message::SetVringCall { ring, fd } => {
                self.ring(ring)?.call = event(fd)?;
                self.update_event_fds(ring as u16);
                Ok(Reply::None)
            }
            Message::SetVringErr { ring, fd } => {
                self.ring(ring)?.error = event(fd)?;
                self.update_event_fds(ring as u16);
                Ok(Reply::None)
            }
            Message::SetVringEnable { ring, on } => self.enable_ring(ring, on).map(done),
        }
    }

    /// Whether a front-end may accept these features: they are offered, or may have been offered before.
    fn acceptable(&self, bits: u64) -> bool {
        let known = self.device.features() | blk::F_DISK_DEPENDENT | SESSION_FEATURES;
        bits & !known == 0
    }

    fn set_features(&mut self, bits: u64) -> Result<(), SessionError> {
        if !self.acceptable(bits) {
            return Err(SessionError::Features(bits));
        }
        // QEMU switches the log while the guest runs.
        let stopped = match (self.features ^ bits) & F_LOG_ALL {
            0 => Vec::new(),
            _ => self.stop_all(),
        };
        self.features = bits;
        self.device.set_features(bits & !F_LOG_ALL);
        self.start_again(stopped)?;
        // Without protocol features there is no SET_VRING_ENABLE: rings start enabled.
        if bits & F_PROTOCOL_FEATURES == 0 {
            self.rings.iter_mut().for_each(|r| r.enabled = true);
        }
        Ok(())
    }

    fn set_protocol_features(&mut self, bits: u64) -> Result<(), SessionError> {
        if bits & !PROTOCOL_FEATURES != 0 {
            return Err(SessionError::Features(bits));
        }
        self.protocol = Some(bits);
        Ok(())
    }

    fn read_config(&self, mut window: Config) -> Reply {
        window.read(&self.device.config());
        if let Some(sectors) = window.capacity() {
            self.device.capacity_read(sectors);
        }
        Reply::Bytes(window.payload())
    }

    /// Handles a write to the configuration space. A driver may write only the write cache field. Writes to
    /// other fields are refused, and the session continues: crosvm passes on everything that its guest
    /// writes, and the end of the session would cost the guest its disk.
    fn write_config(&mut self, window: &Config) -> Result<Reply, SessionError> {
        let at = blk::CONFIG_WRITEBACK.checked_sub(window.offset as usize);
        let Some(&byte) = at.and_then(|at| window.bytes.get(at)) else {
            debug!(?window, "a write to read-only fields");
            return Ok(Reply::Refused);
        };
        // A later completion is durable only if no older operation is in flight.
        let stopped = self.stop_all();
        self.device.set_write_cache(byte != 0);
        self.start_again(stopped)?;
        Ok(Reply::None)
    }

    fn open_channel(&mut self, fd: Arc<OwnedFd>) {
        let channel = FrontendChannel::new(fd.clone());
        self.channel = Some(fd);
        self.device.set_frontend(Some(channel));
    }

    /// The protocol features. If the back-end was restarted while the VM was paused, QEMU 7.2 does not ask
    /// for them again and continues as if the connection were the old one (`vhost_user_async_close_bh` has
    /// not marked it as closed).
    fn protocol(&self) -> u64 {
        match self.protocol {
            None if self.features & F_PROTOCOL_FEATURES != 0 => PROTOCOL_FEATURES,
            protocol => protocol.unwrap_or(0),
        }
    }

    fn negotiated(&self, protocol: u64) -> Result<(), SessionError> {
        match self.protocol() & protocol {
            0 => Err(SessionError::Refused(
                "a message belongs to a protocol feature that was not negotiated",
            )),
            _ => Ok(()),
        }
    }

    /// The front-end has created a device on this connection. If it is not the first one (QEMU's device was
    /// unplugged and another was plugged in on the same chardev), the state of the previous device is
    /// discarded.
    fn reinitialize(&mut self) {
        if !std::mem::replace(&mut self.owned, true) {
            return;
        }
        self.stop_all();
        self.rings.fill_with(Ring::default);
        self.memory = Arc::new(GuestMemory::watched(self.abort.clone()));
        (self.inflight, self.log, self.log_event) = (None, None, None);
    }

    /// The front-end resets the device. The guest need not have asked for this: QEMU resets it (SET_STATUS 0)
    /// whenever the VM is stopped, and starts the same rings when it continues. Requests that storage has not
    /// finished by then are still in flight. If the guest itself has reset its device, the front-end sends
    /// another region, or RESET_DEVICE as well.
    fn reset(&mut self) -> Result<(), SessionError> {
        self.stop_all();
        self.quiesce(Pause::Stopped)?;
        for ring in &mut self.rings {
            *ring = Ring {
                // The call and error descriptors stay: QEMU sends them once, when it connects.
                call: ring.call.take(),
                error: ring.error.take(),
                base_at_reset: ring.base.or(ring.base_at_reset),
                unfinished: ring.unfinished,
                requeued: ring.requeued,
                drained: ring.drained,
                outdated: ring.drained,
                ..Ring::default()
            };
        }
        self.status = 0;
        // QEMU 7.2 asks for the rings' positions only after this.
        self.features &= blk::F_RING_PACKED;
        self.device.set_features(0);
        Ok(())
    }

    /// Resets the device, and discards its requests in flight.
    fn reset_device(&mut self) -> Result<(), SessionError> {
        self.reset()?;
        (0..self.device.queues()).for_each(|ring| self.forget_inflight(ring));
        self.rings.iter_mut().for_each(|r| r.unfinished = false);
        self.features = 0;
        Ok(())
    }

    fn set_status(&mut self, status: u64) -> Result<Reply, SessionError> {
        if status == 0 {
            // QEMU 7.2 sends this before it asks for the rings' positions, and waits for the reply.
            self.stop_all();
            if self.migrating() && !self.device.storage_answered() {
                return Ok(Reply::Deferred(Deferred::Reset));
            }
            self.reset()?;
        }
        self.status = status as u8;
        Ok(Reply::None)
    }

    /// Whether the guest is being migrated to another machine.
    fn migrating(&self) -> bool {
        self.features & F_LOG_ALL != 0
    }

    /// Tells the device if no ring is being served any more.
    fn quiesce(&mut self, why: Pause) -> Result<(), SessionError> {
        let migrating = self.migrating();
        if migrating && self.rings.iter().any(|r| r.unfinished && !r.requeued) {
            return Err(SessionError::Refused(
                "the guest cannot migrate while its storage does not answer requests in flight",
            ));
        }
        if self.rings.iter().any(|r| r.running) {
            Ok(())
        } else {
            let why = if migrating { Pause::Moving } else { why };
            Ok(self.device.quiesce(why)?)
        }
    }
}
