//! The socket of the NBD server: accepts clients, and serves each from a thread of its own.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use datapath::LogLimiter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use tracing::{error, info, warn};

use super::connection::{self, Serving};
use super::export::{Exports, locked};
use super::memory::SharedMemory;
use super::places::{HANDSHAKES_MAX, Places, Room, event, signal};
use crate::config::nbd::NbdAddress;
use crate::server::error::{NbdError, ServerError};
use crate::server::tls::TlsCredentials;
use crate::socket::Socket;
use crate::socket::accept::Backoff;

/// A socket that listens.
pub struct BoundNbd {
    address: NbdAddress,
    kind: Kind,
}

enum Kind {
    Unix(Socket),
    Tcp(TcpListener),
}

impl BoundNbd {
    /// Only this user may connect to a Unix socket.
    ///
    /// # Errors
    /// The address is in use, or not of this machine; or this process may not listen there.
    pub fn bind(address: &NbdAddress) -> Result<Self, ServerError> {
        let (address, kind) = match address {
            NbdAddress::Unix(path) => {
                let socket = Socket::bind_private(path).map_err(NbdError::from)?;
                (address.clone(), Kind::Unix(socket))
            }
            NbdAddress::Tcp(wanted) => {
                let fail = |e| NbdError::Listen(address.clone(), e);
                let listener = TcpListener::bind(wanted).map_err(fail)?;
                let address = listener.local_addr().map_err(fail)?;
                (NbdAddress::Tcp(address), Kind::Tcp(listener))
            }
        };
        Ok(Self { address, kind })
    }

    /// A socket of the process that served before, which owns it until [`own`](Self::own) is called.
    pub fn adopt(address: NbdAddress, listener: OwnedFd) -> Self {
        let kind = match &address {
            NbdAddress::Unix(path) => {
                let listener = UnixListener::from(listener);
                Kind::Unix(Socket::adopt(listener, path, None))
            }
            NbdAddress::Tcp(_) => Kind::Tcp(listener.into()),
        };
        Self { address, kind }
    }

    /// This process owns the socket from now on.
    pub fn own(&mut self) {
        if let Kind::Unix(socket) = &mut self.kind {
            socket.own();
        }
    }

    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match &self.kind {
            Kind::Unix(socket) => socket.listener.as_fd(),
            Kind::Tcp(listener) => listener.as_fd(),
        }
    }

    /// The next client, and its name for the log.
    fn accept(&self) -> io::Result<(OwnedFd, String)> {
        let (socket, peer) = match &self.kind {
            Kind::Unix(socket) => {
                let (client, _) = socket.listener.accept()?;
                let pid = sockopt::socket_peercred(&client).map(|peer| peer.pid.as_raw_nonzero());
                let peer = pid.map_or("a client".into(), |pid| format!("process {pid}"));
                (OwnedFd::from(client), peer)
            }
            Kind::Tcp(listener) => {
                let (client, peer) = listener.accept()?;
                client.set_nodelay(true)?;
                sockopt::set_socket_keepalive(&client, true)?;
                (OwnedFd::from(client), peer.to_string())
            }
        };
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok((socket, peer))
    }
}

/// A listening socket, and the threads of its clients. Dropping it closes the socket and tells clients to end, without
/// waiting for them: their storage may not answer.
pub struct Listener {
    address: NbdAddress,
    tls: Option<Arc<TlsCredentials>>,
    copy: OwnedFd,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// # Errors
    /// There is no thread or descriptor left.
    pub fn start(
        bound: BoundNbd,
        exports: Arc<Mutex<Exports>>,
        tls: Option<Arc<TlsCredentials>>,
    ) -> Result<Self, ServerError> {
        let address = bound.address.clone();
        let fail = |e: io::Error| NbdError::Listen(address.clone(), e);
        let copy = bound.fd().try_clone_to_owned().map_err(fail)?;
        let stop = Arc::new(event().map_err(fail)?);
        let its_stop = stop.clone();
        let serving = Arc::new(Serving {
            exports,
            memory: Arc::new(SharedMemory::default()),
            places: Places::new().map_err(fail)?,
            waits: LogLimiter::default(),
            tls: tls.clone(),
        });
        let thread = thread::Builder::new()
            .name("nbd".into())
            .spawn(move || listen(&bound, &its_stop, &serving))
            .map_err(fail)?;
        let with = if tls.is_some() { ", with TLS" } else { "" };
        info!("NBD: listening at {address}{with}");
        Ok(Self {
            address,
            tls,
            copy,
            stop,
            thread: Some(thread),
        })
    }

    pub fn address(&self) -> &NbdAddress {
        &self.address
    }

    pub fn tls(&self) -> Option<&Arc<TlsCredentials>> {
        self.tls.as_ref()
    }

    /// # Errors
    /// There is no descriptor left.
    pub fn copy(&self) -> io::Result<OwnedFd> {
        self.copy.try_clone()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        signal(&self.stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen(bound: &BoundNbd, stop: &OwnedFd, serving: &Arc<Serving>) {
    // What ends each client, while its thread runs. Nobody waits for the threads, so nothing is left when they end.
    let mut clients: Vec<Weak<OwnedFd>> = Vec::new();
    let (mut accepting, lines) = (Backoff::default(), Arc::new(LogLimiter::default()));
    loop {
        let room = serving.places.room(Instant::now());
        let until = match &room {
            Room::Full(until) => *until,
            Room::Free | Room::Replacing(_) => None,
        };
        if let Room::Replacing(peer) = &room {
            lines.log(|left_out| {
                warn!(
                    "NBD: {peer} was disconnected: {HANDSHAKES_MAX} peers are in the handshake, and it came first{left_out}"
                );
            });
        }
        let has_room = matches!(room, Room::Free);
        let wanted = if has_room {
            PollFlags::IN
        } else {
            PollFlags::empty()
        };
        let mut ready = [
            PollFd::new(stop, PollFlags::IN),
            PollFd::from_borrowed_fd(bound.fd(), wanted),
            PollFd::new(serving.places.ended(), PollFlags::IN),
        ];
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match poll(&mut ready, timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => {
                error!("NBD: cannot wait for clients: {e}");
                break;
            }
            Ok(_) if !ready[0].revents().is_empty() => break,
            Ok(_) if !has_room || ready[1].revents().is_empty() => continue,
            Ok(_) => {}
        }
        clients.retain(|client| client.strong_count() > 0);
        if locked(&serving.exports).pauses > 0 {
            // Clients wait in the socket's queue: for the new process, or for this one if that fails.
            thread::sleep(std::time::Duration::from_millis(10));
            continue;
        }
        let (socket, peer) = match bound.accept() {
            Ok(accepted) => accepted,
            Err(e) => {
                accepting.failed(|left_out| {
                    let e = block::explain(&e, "ringdisk tries again");
                    warn!("NBD: cannot accept a client, which waits: {e}{left_out}");
                });
                continue;
            }
        };
        accepting.succeeded();
        match start_client(socket, peer, serving, &lines) {
            Ok(client) => clients.push(client),
            Err(e) => lines.log(|left_out| {
                let e = block::explain_thread(&e);
                warn!("NBD: a client was disconnected: {e}{left_out}");
            }),
        }
    }
    for stop in clients.iter().filter_map(Weak::upgrade) {
        signal(&stop);
    }
}

fn start_client(
    socket: OwnedFd,
    peer: String,
    serving: &Arc<Serving>,
    lines: &Arc<LogLimiter>,
) -> io::Result<Weak<OwnedFd>> {
    let stop = Arc::new(event()?);
    let client = Arc::downgrade(&stop);
    let place = serving.places.enter(&peer, &stop);
    let (serving, lines) = (serving.clone(), lines.clone());
    let serve = move || {
        if let Err(e) = connection::serve(&socket, &serving, place, &stop, &peer) {
            lines.log(|left_out| warn!("NBD: {peer} was disconnected: {e}{left_out}"));
        }
    };
    thread::Builder::new()
        .name("nbd-client".into())
        .spawn(serve)?;
    Ok(client)
}
