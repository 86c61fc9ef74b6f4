//! A client's connection: the handshake, and then its requests.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::ops::Bound;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use datapath::LogLimiter;
use guest::LocalQueue;
use nbd::{
    ExportInfo, GREETING, Handshake, HandshakeError, ListedExport, Negotiated, OPTION_BYTES_MAX,
    Step, Tls, flags,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use thiserror::Error;
use tracing::info;

use super::export::{Exports, NbdExport, locked};
use super::memory::{ConnectionMemory, SharedMemory, connection_max};
use super::places::{CLIENTS_MAX, ClientPlace, HandshakePlace, Places, STALLED, WAITING_MAX};
use super::queue::ClientQueue;
use super::stream::{Received, Stream};
use super::transfer::{Offered, Transfer, TransferError};
use crate::server::clients::Client;
use crate::server::share::Unfinished;
use crate::server::tls::TlsCredentials;

/// How long the handshake of TLS may take, and the time from one option to the next.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// How long all of the handshake may take, without the wait for a place. A client may ask for 4096 exports over long distances.
const WHOLE_HANDSHAKE: Duration = Duration::from_secs(600);

// What a client is told that gets no place.
const OPT_GO: u32 = 7;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REP_ERR_SHUTDOWN: u32 = 7 | 1 << 31;

#[derive(Debug, Error)]
pub enum ConnectionError {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("it has negotiated nothing for {} s", HANDSHAKE.as_secs())]
    TooSlow,
    #[error("its handshake has taken {} s", WHOLE_HANDSHAKE.as_secs())]
    TooLong,
    #[error("{CLIENTS_MAX} clients use exports, and {WAITING_MAX} wait until one of them leaves")]
    NoPlace,
    #[error(
        "it waited for one of {CLIENTS_MAX} places of clients, none of which has finished a request for {} s; use fewer \
         connections at the same time",
        STALLED.as_secs()
    )]
    InVain,
    #[error(
        "it has sent {0} bytes between STARTTLS and the reply, which an attacker may have added"
    )]
    BeforeTls(usize),
    #[error("export '{0}': {1}")]
    Queue(String, io::Error),
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error(transparent)]
    Socket(#[from] io::Error),
}

/// What the connections of a server have in common.
pub struct Serving {
    pub exports: Arc<Mutex<Exports>>,
    pub memory: Arc<SharedMemory>,
    pub places: Arc<Places>,
    /// Limits lines of the log about clients that wait.
    pub waits: LogLimiter,
    /// Clients must use TLS.
    pub tls: Option<Arc<TlsCredentials>>,
}

/// Serves a client until it disconnects, or `stop` becomes readable.
///
/// # Errors
/// The client was disconnected.
pub fn serve(
    socket: &OwnedFd,
    server: &Serving,
    place: HandshakePlace,
    stop: &Arc<OwnedFd>,
    peer: &str,
) -> Result<(), ConnectionError> {
    let exports = &*server.exports;
    let mut greeted = Greeted {
        stream: Stream::new(socket),
        server,
        peer,
        place,
        stop,
        deadlines: Deadlines::new(Instant::now()),
        input: Vec::new(),
    };
    let agreed = greeted.negotiate()?;
    let Some((Agreed { negotiated, reply }, _its_place)) = agreed else {
        return Ok(());
    };
    let name = negotiated.export.name.clone();
    let failed = |e| ConnectionError::Queue(name.clone(), e);
    let export = {
        let exports = locked(exports);
        let found = exports.named(&name).filter(|_| exports.pauses == 0);
        let found = found.cloned();
        found.ok_or_else(|| failed(io::Error::other("was removed during the handshake")))?
    };
    // Given back when the queue has stopped.
    let mut memory = ConnectionMemory::new(server.memory.clone());
    let mut unfinished = Unfinished {
        share: export.share().clone(),
        operations: Vec::new(),
    };
    let (queue, new) = LocalQueue::new(connection_max()).map_err(failed)?;
    let client = Client {
        export: export.number,
        stop: stop.clone(),
    };
    // Stops the queue when this function ends.
    let (_served, bitmaps) = ClientQueue::start(client, new, &export).map_err(failed)?;
    if !is_exported(exports, &export) {
        // It was removed before the client was known.
        return Ok(());
    }
    // The export's share of the storage depends on the guest's latencies.
    let _measuring = export.device.disk.measure();
    info!("NBD: {peer} uses export '{name}'");
    greeted.send(&reply)?;
    let Greeted {
        input,
        stream,
        place,
        ..
    } = greeted;
    drop(place);
    let queue = (queue, &mut memory, &mut unfinished);
    let offered = Offered {
        export: &export,
        negotiated,
        bitmaps,
    };
    let ends = (stop.as_fd(), &*server.places);
    let transfer = Transfer::new(stream, ends, queue, offered, &input).map_err(failed)?;
    Ok(transfer.run()?)
}

fn is_exported(exports: &Mutex<Exports>, export: &Arc<NbdExport>) -> bool {
    let exports = locked(exports);
    let same = exports.by_id.get(&export.id);
    exports.pauses == 0 && same.is_some_and(|same| Arc::ptr_eq(same, export))
}

/// What the handshake asks of the exports.
struct Named<'a> {
    exports: &'a Mutex<Exports>,
    /// The client may open several connections.
    allows_more: bool,
}

impl nbd::Exports for Named<'_> {
    fn next(&self, after: Option<&str>) -> Option<ListedExport> {
        let exports = locked(self.exports);
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let (id, export) = exports
            .by_id
            .range::<str, _>((after, Bound::Unbounded))
            .next()?;
        Some(ListedExport {
            key: id.clone(),
            name: export.name.clone(),
            description: export.description.clone(),
        })
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        let export = locked(self.exports).named(name).cloned()?;
        let mut info = export.info();
        if !self.allows_more {
            info.flags &= !flags::CAN_MULTI_CONN;
        }
        Some(info)
    }
}

/// The result of a handshake.
struct Agreed {
    negotiated: Box<Negotiated>,
    /// To be sent before requests are served.
    reply: Vec<u8>,
}

/// Until when a handshake must have advanced, and ended.
struct Deadlines {
    step: Instant,
    whole: Instant,
}

impl Deadlines {
    fn new(now: Instant) -> Self {
        Self {
            step: now + HANDSHAKE,
            whole: now + WHOLE_HANDSHAKE,
        }
    }

    /// The client has sent an option.
    fn advanced(&mut self, now: Instant) {
        self.step = now + HANDSHAKE;
    }

    /// The client has waited for others, which is not its fault.
    fn waited_for_place(&mut self, since: Instant, now: Instant) {
        self.whole += now.saturating_duration_since(since);
        self.advanced(now);
    }

    /// How long the client may still take for its next step.
    fn left(&self, now: Instant) -> Result<Duration, ConnectionError> {
        if now >= self.whole {
            return Err(ConnectionError::TooLong);
        }
        match self.step.min(self.whole).saturating_duration_since(now) {
            Duration::ZERO => Err(ConnectionError::TooSlow),
            left => Ok(left),
        }
    }
}

/// A connection before requests are served. The socket does not block.
struct Greeted<'a> {
    stream: Stream<'a>,
    server: &'a Serving,
    peer: &'a str,
    place: HandshakePlace,
    stop: &'a OwnedFd,
    deadlines: Deadlines,
    /// Bytes that have arrived and were not used yet.
    input: Vec<u8>,
}

impl Greeted<'_> {
    /// Returns `None` if the client or this process ends the connection.
    fn negotiate(&mut self) -> Result<Option<(Agreed, ClientPlace)>, ConnectionError> {
        self.send(&GREETING)?;
        let tls = self.server.tls.as_deref();
        let mut handshake = Handshake::new(tls.map_or(Tls::Off, |_| Tls::Required));
        let mut is_protected = tls.is_none();
        let mut out = Vec::new();
        loop {
            // Before the export is looked up: it may change while the client waits.
            let client_place = if is_protected && handshake.asks_to_begin(&self.input) {
                match self.wait_for_place()? {
                    Some(place) => Some(place),
                    None => return Ok(None),
                }
            } else {
                None
            };
            let exports = Named {
                exports: &self.server.exports,
                allows_more: self.place.allows_more(client_place.as_ref()),
            };
            let (used, step) = handshake.advance(&self.input, &exports, &mut out)?;
            let waits = used == 0 && step == Step::Continue;
            self.input.drain(..used);
            if used > 0 && is_protected {
                self.deadlines.advanced(Instant::now());
            }
            match (step, client_place) {
                (Step::Ready(negotiated), Some(place)) => {
                    let reply = out;
                    return Ok(Some((Agreed { negotiated, reply }, place)));
                }
                (Step::Ready(_), None) => return Ok(None),
                (Step::End, _) => {
                    // It may have closed the socket already, as the specification lets it.
                    if self.send(&out).is_ok() {
                        self.stream.close();
                    }
                    return Ok(None);
                }
                (Step::StartTls, _) => {
                    self.send(&out)?;
                    out.clear();
                    if !self.input.is_empty() {
                        return Err(ConnectionError::BeforeTls(self.input.len()));
                    }
                    if let Some(tls) = tls {
                        self.stream.start_tls(tls.config.clone())?;
                        if !self.shake_hands()? {
                            return Ok(None);
                        }
                        if tls.spec.verify_peer {
                            self.place.keep();
                        }
                    }
                    handshake = handshake.protected();
                    is_protected = true;
                }
                (Step::Continue | Step::More, _) => {}
            }
            self.send(&out)?;
            out.clear();
            if waits && !self.receive()? {
                return Ok(None);
            }
        }
    }

    /// The handshake of TLS. Returns false if this process ends the connection.
    fn shake_hands(&mut self) -> Result<bool, ConnectionError> {
        loop {
            match self.stream.shake_hands() {
                Ok(()) => return Ok(true),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if !self.wait(PollFlags::IN)? {
                        return Ok(false);
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Returns `None` if the client or this process ends the connection meanwhile.
    fn wait_for_place(&mut self) -> Result<Option<ClientPlace>, ConnectionError> {
        let Some(mut place) = self.place.ask()? else {
            return Err(self.refuse(ConnectionError::NoPlace));
        };
        let began = Instant::now();
        if place.turn().is_some() {
            let peer = self.peer;
            self.server.waits.log(|left_out| {
                info!("NBD: {peer} waits until one of {CLIENTS_MAX} clients leaves{left_out}");
            });
        }
        while let Some(turn) = place.turn() {
            let mut ready = [
                PollFd::new(self.stop, PollFlags::IN),
                PollFd::new(self.stream.socket(), PollFlags::RDHUP),
                PollFd::new(turn, PollFlags::IN),
            ];
            let left = place.ask_again_at();
            let left = left.saturating_duration_since(Instant::now());
            match poll(&mut ready, Timespec::try_from(left).ok().as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(io::Error::from(e).into()),
            }
            if ready[..2].iter().any(|fd| !fd.revents().is_empty()) {
                return Ok(None);
            }
            if place.gives_up(Instant::now()) {
                return Err(self.refuse(ConnectionError::InVain));
            }
        }
        self.deadlines.waited_for_place(began, Instant::now());
        Ok(Some(place))
    }

    /// Tells the client why it is disconnected, if its option can be answered.
    fn refuse(&mut self, why: ConnectionError) -> ConnectionError {
        let option = self.input.get(8..12);
        if let Some(option) = option.filter(|option| **option == OPT_GO.to_be_bytes()) {
            let text = format!("too many clients: {why}");
            let mut reply = REPLY_MAGIC.to_be_bytes().to_vec();
            reply.extend(option);
            reply.extend(REP_ERR_SHUTDOWN.to_be_bytes());
            reply.extend((text.len() as u32).to_be_bytes());
            reply.extend(text.as_bytes());
            self.deadlines.advanced(Instant::now());
            if self.send(&reply).is_ok() {
                self.stream.close();
            }
        }
        why
    }

    /// Returns false if the connection ends.
    fn receive(&mut self) -> Result<bool, ConnectionError> {
        let mut bytes = [0; 4096];
        debug_assert!(self.input.len() < OPTION_BYTES_MAX + 16);
        loop {
            match self.stream.read(&mut [IoSliceMut::new(&mut bytes)]) {
                Ok(Received { bytes: 0, .. }) => return Ok(false),
                Ok(received) => {
                    self.input.extend_from_slice(&bytes[..received.bytes]);
                    return Ok(true);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if !self.wait(PollFlags::IN)? {
                        return Ok(false);
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), ConnectionError> {
        loop {
            let sent = match bytes {
                [] => self
                    .stream
                    .flush()
                    .map(|all| if all { Some(0) } else { None }),
                bytes => self.stream.write(&[IoSlice::new(bytes)]).map(Some),
            };
            match sent {
                Ok(Some(_)) if bytes.is_empty() => return Ok(()),
                Ok(Some(n)) => bytes = &bytes[n..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() != ErrorKind::WouldBlock => return Err(e.into()),
                Ok(None) | Err(_) => {
                    if !self.wait(PollFlags::OUT)? {
                        return Err(io::Error::from(Errno::SHUTDOWN).into());
                    }
                }
            }
        }
    }

    /// Returns false if this process ends the connection.
    fn wait(&mut self, what: PollFlags) -> Result<bool, ConnectionError> {
        let left = Timespec::try_from(self.deadlines.left(Instant::now())?).ok();
        // The server's part of the TLS handshake.
        let unsent = if self.stream.flush()? {
            PollFlags::empty()
        } else {
            PollFlags::OUT
        };
        let mut ready = [
            PollFd::new(self.stop, PollFlags::IN),
            PollFd::new(self.stream.socket(), what | unsent),
        ];
        match poll(&mut ready, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(ready[0].revents().is_empty()),
            Err(e) => Err(io::Error::from(e).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client that sends an option now and then is not cut off for its pauses, but for the time of all of them. What it
    /// waits for others does not count.
    #[test]
    fn handshake_ends_at_its_deadlines() {
        let began = Instant::now();
        let at = |s| began + Duration::from_secs(s);
        let silent = Deadlines::new(began);
        assert_eq!(
            silent.left(at(4)).unwrap(),
            HANDSHAKE - Duration::from_secs(4)
        );
        assert!(matches!(silent.left(at(10)), Err(ConnectionError::TooSlow)));
        for (waits, end) in [(0, 600), (1000, 1600)] {
            let mut deadlines = Deadlines::new(began);
            deadlines.waited_for_place(began, at(waits));
            let mut now = waits;
            while let Ok(left) = deadlines.left(at(now)) {
                assert!(now < end && left <= HANDSHAKE && at(now) + left <= at(end));
                now += 9;
                deadlines.advanced(at(now));
            }
            assert!(now >= end && now < end + 9, "{now}");
            let ended = deadlines.left(at(now));
            assert!(matches!(ended, Err(ConnectionError::TooLong)));
        }
    }
}
