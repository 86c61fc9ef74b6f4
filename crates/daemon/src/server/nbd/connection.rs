//! A client's connection: the handshake, and then its requests.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guest::LocalQueue;
use nbd::{ExportInfo, GREETING, Handshake, HandshakeError, Negotiated, OPTION_BYTES_MAX, Step};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use thiserror::Error;
use tracing::info;

use super::export::{Exports, NbdExport, locked};
use super::memory::{CONNECTION_MAX, ConnectionMemory, SharedMemory};
use super::queue::ClientQueue;
use super::transfer::{Transfer, TransferError};
use crate::server::clients::Client;

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
pub enum ConnectionError {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("the handshake has taken more than {} s", HANDSHAKE.as_secs())]
    TooSlow,
    #[error("export '{0}': {1}")]
    Queue(String, io::Error),
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error(transparent)]
    Socket(#[from] io::Error),
}

/// Serves a client until it disconnects, or `stop` becomes readable.
///
/// # Errors
/// The client was disconnected.
pub fn serve(
    socket: &OwnedFd,
    exports: &Mutex<Exports>,
    memory: &Arc<SharedMemory>,
    stop: &Arc<OwnedFd>,
    peer: &str,
) -> Result<(), ConnectionError> {
    let mut greeted = Greeted {
        socket,
        stop,
        deadline: Instant::now() + HANDSHAKE,
        input: Vec::new(),
    };
    let Some(Agreed { negotiated, reply }) = greeted.negotiate(&Named(exports))? else {
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
    let mut memory = ConnectionMemory::new(memory.clone());
    let (queue, new) = LocalQueue::new(CONNECTION_MAX).map_err(failed)?;
    let client = Client {
        export: export.number,
        stop: stop.clone(),
    };
    let started = ClientQueue::start(&export.device, client, new, export.limits.clone());
    // Stops the queue when this function ends.
    let _served = started.map_err(failed)?;
    if !is_exported(exports, &export) {
        // It was removed before the client was known.
        return Ok(());
    }
    info!("NBD: {peer} uses export '{name}'");
    greeted.send(&reply)?;
    let Greeted { input, .. } = greeted;
    let queue = (queue, &mut memory);
    let transfer = Transfer::new(socket, stop.as_fd(), queue, &export, negotiated, &input);
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
    fn names(&self) -> Vec<String> {
        let exports = locked(self.0);
        exports.by_id.values().map(|e| e.name.clone()).collect()
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
    socket: &'a OwnedFd,
    stop: &'a OwnedFd,
    deadline: Instant,
    /// Bytes that have arrived and were not used yet.
    input: Vec<u8>,
}

impl Greeted<'_> {
    /// Returns `None` if the client or this process ends the connection.
    fn negotiate(&mut self, exports: &Named<'_>) -> Result<Option<Agreed>, ConnectionError> {
        self.send(&GREETING)?;
        let mut handshake = Handshake::default();
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
                    self.send(&out)?;
                    return Ok(None);
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
            match rustix::io::read(self.socket, &mut bytes) {
                Ok(0) => return Ok(false),
                Ok(n) => {
                    self.input.extend_from_slice(&bytes[..n]);
                    return Ok(true);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !self.wait(PollFlags::IN)? {
                        return Ok(false);
                    }
                }
                Err(e) => return Err(io::Error::from(e).into()),
            }
        }
    }

    fn send(&self, mut bytes: &[u8]) -> Result<(), ConnectionError> {
        while !bytes.is_empty() {
            match rustix::io::write(self.socket, bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !self.wait(PollFlags::OUT)? {
                        return Err(io::Error::from(Errno::SHUTDOWN).into());
                    }
                }
                Err(e) => return Err(io::Error::from(e).into()),
            }
        }
        Ok(())
    }

    /// Returns false if this process ends the connection.
    fn wait(&self, what: PollFlags) -> Result<bool, ConnectionError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ConnectionError::TooSlow);
        }
        let left = Timespec::try_from(left).ok();
        let mut ready = [
            PollFd::new(self.stop, PollFlags::IN),
            PollFd::new(self.socket, what),
        ];
        match poll(&mut ready, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(ready[0].revents().is_empty()),
            Err(e) => Err(io::Error::from(e).into()),
        }
    }
}
