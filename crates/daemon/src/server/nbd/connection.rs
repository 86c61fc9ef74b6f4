//! A client's connection: the handshake, and then its requests.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guest::LocalQueue;
use nbd::{
    ExportInfo, GREETING, Handshake, HandshakeError, Negotiated, OPTION_BYTES_MAX, Step, Tls,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use thiserror::Error;
use tracing::info;

use super::export::{Exports, NbdExport, locked};
use super::memory::{CONNECTION_MAX, ConnectionMemory, SharedMemory};
use super::queue::ClientQueue;
use super::stream::{Received, Stream};
use super::transfer::{Offered, Transfer, TransferError};
use crate::server::clients::Client;
use crate::server::share::Unfinished;
use crate::server::tls::TlsCredentials;

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
pub enum ConnectionError {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("the handshake has taken more than {} s", HANDSHAKE.as_secs())]
    TooSlow,
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
    stop: &Arc<OwnedFd>,
    peer: &str,
) -> Result<(), ConnectionError> {
    let exports = &*server.exports;
    let mut greeted = Greeted {
        stream: Stream::new(socket),
        stop,
        deadline: Instant::now() + HANDSHAKE,
        input: Vec::new(),
    };
    let tls = server.tls.as_deref();
    let Some(Agreed { negotiated, reply }) = greeted.negotiate(&Named(exports), tls)? else {
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
    let (queue, new) = LocalQueue::new(CONNECTION_MAX).map_err(failed)?;
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
    let Greeted { input, stream, .. } = greeted;
    let queue = (queue, &mut memory, &mut unfinished);
    let offered = Offered {
        export: &export,
        negotiated,
        bitmaps,
    };
    let transfer = Transfer::new(stream, stop.as_fd(), queue, offered, &input).map_err(failed)?;
    Ok(transfer.run()?)
}

fn is_exported(exports: &Mutex<Exports>, export: &Arc<NbdExport>) -> bool {
    let exports = locked(exports);
    let same = exports.by_id.get(&export.id);
    exports.pauses == 0 && same.is_some_and(|same| Arc::ptr_eq(same, export))
}

/// What the handshake asks of the exports.
struct Named<'a>(&'a Mutex<Exports>);

impl nbd::Exports for Named<'_> {
    fn list(&self) -> Vec<(String, String)> {
        let exports = locked(self.0);
        let listed = |e: &Arc<NbdExport>| (e.name.clone(), e.description.clone());
        exports.by_id.values().map(listed).collect()
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        let export = locked(self.0).named(name).cloned()?;
        Some(export.info())
    }
}

/// The result of a handshake.
struct Agreed {
    negotiated: Box<Negotiated>,
    /// To be sent before requests are served.
    reply: Vec<u8>,
}

/// A connection before requests are served. The socket does not block.
struct Greeted<'a> {
    stream: Stream<'a>,
    stop: &'a OwnedFd,
    deadline: Instant,
    /// Bytes that have arrived and were not used yet.
    input: Vec<u8>,
}

impl Greeted<'_> {
    /// Returns `None` if the client or this process ends the connection.
    fn negotiate(
        &mut self,
        exports: &Named<'_>,
        tls: Option<&TlsCredentials>,
    ) -> Result<Option<Agreed>, ConnectionError> {
        self.send(&GREETING)?;
        let mut handshake = Handshake::new(tls.map_or(Tls::Off, |_| Tls::Required));
        let mut out = Vec::new();
        loop {
            let (used, step) = handshake.advance(&self.input, exports, &mut out)?;
            self.input.drain(..used);
            match step {
                Step::Ready(negotiated) => {
                    let reply = out;
                    return Ok(Some(Agreed { negotiated, reply }));
                }
                Step::End => {
                    // It may have closed the socket already, as the specification lets it.
                    if self.send(&out).is_ok() {
                        self.stream.close();
                    }
                    return Ok(None);
                }
                Step::StartTls => {
                    self.send(&out)?;
                    out.clear();
                    if !self.input.is_empty() {
                        return Err(ConnectionError::BeforeTls(self.input.len()));
                    }
                    if let Some(tls) = tls {
                        self.stream.start_tls(tls.config.clone())?;
                    }
                    handshake = handshake.protected();
                }
                Step::Continue => {}
            }
            self.send(&out)?;
            out.clear();
            if used == 0 && !self.receive()? {
                return Ok(None);
            }
        }
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
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ConnectionError::TooSlow);
        }
        let left = Timespec::try_from(left).ok();
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
