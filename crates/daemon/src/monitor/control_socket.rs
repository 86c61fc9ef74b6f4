//! The control socket: accepts clients and serves each in a thread of its own.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use control::EventHub;
use datapath::LogLimiter;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tracing::{debug, error, warn};

use crate::config::sockets;
use crate::monitor::qmp::{Qmp, QmpClient};
use crate::server::Server;
use crate::server::handover::locked;
use crate::socket::Socket;
use crate::socket::accept::{Acceptor, Backoff};

/// The control socket. Dropping it ends all sessions, after running commands have been completed and answered, so that no
/// disk stays half removed.
pub struct ControlSocket {
    hub: Arc<EventHub>,
    stop: Arc<OwnedFd>,
    listener: Option<JoinHandle<()>>,
}

impl ControlSocket {
    /// Serves a control socket, from threads of its own.
    ///
    /// # Errors
    /// No thread or event descriptor is available.
    pub fn start(socket: Socket, qmp: Qmp) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(eventfd(0, flags)?);
        let hub = qmp.server.events.clone();
        let handover = &qmp.server.handover;
        *locked(&handover.control) = Some(socket.listener.as_fd().try_clone_to_owned()?);
        let wakers = [stop.clone(), handover.socket_watch(socket.place())?];
        let listener = thread::Builder::new()
            .name("control".into())
            .spawn(move || listen(socket, &Arc::new(qmp), &wakers))?;
        Ok(Self {
            hub,
            stop,
            listener: Some(listener),
        })
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.hub.close();
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        let Some(listener) = self.listener.take() else {
            return;
        };
        let deadline = Instant::now() + STOP_TIMEOUT;
        while !listener.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        if !listener.is_finished() {
            warn!("control socket: a command still waits for storage; ringdisk stops without it");
        }
    }
}

/// Time between two checks whether the new process has taken over.
const LEAVING_PAUSE: Duration = Duration::from_millis(10);

/// How long stopping waits for running commands.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// `wakers` become readable when the process stops, and when the socket file has to be checked.
fn listen(mut socket: Socket, qmp: &Arc<Qmp>, wakers: &[Arc<OwnedFd>; 2]) {
    let mut clients = Vec::new();
    accept_clients(&mut socket, qmp, wakers, &mut clients);
    for client in clients {
        let _ = client.join();
    }
}

fn accept_clients(
    socket: &mut Socket,
    qmp: &Arc<Qmp>,
    [stop, socket_watch]: &[Arc<OwnedFd>; 2],
    clients: &mut Vec<JoinHandle<()>>,
) {
    let (mut acceptor, mut accepting) = (Acceptor::new(), Backoff::default());
    let refusals = LogLimiter::default();
    loop {
        let mut ready = [
            PollFd::new(stop, PollFlags::IN),
            PollFd::new(socket_watch, PollFlags::IN),
            PollFd::new(&socket.listener, PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return error!("control socket: cannot wait for clients: {e}"),
            Ok(_) if !ready[0].revents().is_empty() => return,
            Ok(_) if !ready[1].revents().is_empty() => {
                let _ = rustix::io::read(socket_watch, &mut [0; 8]);
                if let Err(e) = make_again(socket, &qmp.server) {
                    error!("control socket: was removed, and cannot be created again: {e}");
                }
                continue;
            }
            Ok(_) => {}
        }
        if qmp.server.handover.is_leaving() {
            // It waits in the socket's queue for the new process, or for this one if that fails.
            thread::sleep(LEAVING_PAUSE);
            continue;
        }
        clients.retain(|client| !client.is_finished());
        match acceptor.accept(&socket.listener) {
            Ok((stream, refused)) => {
                accepting.succeeded();
                let stream = Arc::new(stream);
                let started = match refused {
                    None => start_client(&stream, qmp),
                    Some(e) => Err(block::explain(&e, "")),
                };
                match started {
                    Ok(client) => clients.push(client),
                    Err(why) => {
                        refusals.log(|left_out| {
                            warn!("control socket: cannot serve a client: {why}{left_out}");
                        });
                        let _ = control::refuse(&stream, &why);
                    }
                }
            }
            Err(e) => accepting.failed(|left_out| {
                let e = block::explain(&e, "ringdisk tries again");
                warn!("control socket: cannot accept a client, which waits: {e}{left_out}");
            }),
        }
    }
}

/// Serves a client from a thread of its own; or says why not.
fn start_client(stream: &Arc<UnixStream>, qmp: &Arc<Qmp>) -> Result<JoinHandle<()>, String> {
    let events = qmp.server.events.subscribe().map_err(|e| e.to_string())?;
    let (stream, qmp) = (stream.clone(), qmp.clone());
    let serve = move || {
        let client = QmpClient {
            qmp: &qmp,
            stream: &stream,
        };
        if let Err(e) = control::serve_socket(&stream, &events, &client) {
            debug!("control socket: a client was cut off: {e}");
        }
    };
    let thread = thread::Builder::new().name("control-client".into());
    thread.spawn(serve).map_err(|e| block::explain_thread(&e))
}

/// Makes the socket again if it has been removed.
fn make_again(socket: &mut Socket, server: &Server) -> io::Result<()> {
    if socket.is_removed() {
        let new = Socket::bind_private(socket.path()).map_err(io::Error::other)?;
        *locked(&server.handover.control) = Some(new.listener.as_fd().try_clone_to_owned()?);
        warn!(
            "{} had been removed; ringdisk has created it again",
            new.path().display()
        );
        socket.renew(new);
    }
    Ok(())
}

/// The control socket of a ringdisk that root runs, such as the service.
pub fn of_service() -> PathBuf {
    PathBuf::from("/run/ringdisk/control.qmp")
}

/// Whether the service seems to run, with a socket other than this one, which is not there.
pub fn is_service_elsewhere(path: &Path) -> bool {
    let service = of_service();
    path != service && service.parent().is_some_and(Path::exists)
}

/// The default path of the control socket. No disk's socket has this name, since those end in `.sock`.
pub fn default_path() -> PathBuf {
    sockets::directory().join("control.qmp")
}
