//! The socket on which `ringdisk upgrade` asks the running process to hand over.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use tracing::{error, warn};

use crate::inherited::Inherited;
use crate::server::Server;
use crate::server::handover::locked;
use crate::socket::accept::{Acceptor, Backoff, Client};
use crate::socket::{Socket, SocketError, canonical_path};
use crate::upgrade::donor;
use crate::upgrade::launch_record::{self, LaunchRecord, REPLACED_CONTROL, path_of};
use crate::upgrade::protocol::program;

/// The socket, and the file that records how this process was started.
pub struct UpgradeSocket {
    /// Shared with the thread that listens.
    socket: Arc<Mutex<Socket>>,
    /// The control socket: both files are in its directory.
    control: PathBuf,
}

impl UpgradeSocket {
    /// Creates both files while this process may still write there. If that fails, it logs why, and disks are served
    /// without live upgrades. Until `patience` is over, waits for a process that is exiting to release the socket.
    pub fn open(control: &Path, patience: Duration) -> Option<Self> {
        let deadline = Instant::now() + patience;
        loop {
            match Socket::bind_for_packets(&path_of(control, "upgrade")) {
                Err(SocketError::InUse(_)) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(20));
                }
                socket => return Self::new(control, socket),
            }
        }
    }

    /// The same for a process that takes over, if its control socket has another path than that of the other process, which
    /// hands its socket over, and may be about to stop.
    pub fn open_if_new(control: &Path) -> Option<Self> {
        let before = std::env::var_os(REPLACED_CONTROL);
        if before.is_some_and(|path| canonical_path(path.as_ref()) == canonical_path(control)) {
            return None;
        }
        match Socket::bind_for_packets(&path_of(control, "upgrade")) {
            Err(SocketError::InUse(_)) => None,
            socket => Self::new(control, socket),
        }
    }

    fn new(control: &Path, socket: Result<Socket, SocketError>) -> Option<Self> {
        // The socket is bound: no other process writes the file now.
        let opened = socket.map_err(io::Error::other).and_then(|socket| {
            LaunchRecord::here()?.write(control)?;
            let (socket, control) = (Arc::new(Mutex::new(socket)), control.into());
            Ok(Self { socket, control })
        });
        opened
            .inspect_err(|e| warn!("live upgrade disabled: {e}"))
            .ok()
    }

    /// Takes the socket that was inherited, if there is one.
    pub fn adopt(inherited: &Inherited, control: &Path) -> Option<Self> {
        let path = path_of(control, "upgrade");
        let listener = inherited.upgrade(&path)?;
        let socket = Socket::adopt(listener, &path, inherited.made(&path));
        Some(Self {
            socket: Arc::new(Mutex::new(socket)),
            control: control.into(),
        })
    }

    /// Makes this value remove the files when it is dropped, even if it was adopted.
    pub fn own(&self) {
        locked(&self.socket).own();
    }

    /// Serves requests in a thread of its own.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub fn serve(&self, server: &Arc<Server>) -> io::Result<()> {
        let socket = self.socket.clone();
        let mut listener = listener_of(&socket, server)?;
        let watch = server.handover.socket_watch(locked(&socket).place())?;
        // Now, because the program's file may be replaced later.
        let (program, server, control) = (program(), server.clone(), self.control.clone());
        let serve = move || {
            let (mut acceptor, mut accepting) = (Acceptor::new(), Backoff::default());
            loop {
                match wait_for_client(&watch, &listener, &mut acceptor) {
                    Ok(Some(client)) => {
                        accepting.succeeded();
                        donor::upgrade(&server, client, program.as_deref());
                    }
                    Ok(None) => {
                        rewrite_launch(&control);
                        match recreate(&socket, &server) {
                            Ok(Some(new)) => listener = new,
                            Ok(None) => {}
                            Err(e) => error!(
                                "upgrade: the upgrade socket was removed and cannot be created again: {e}"
                            ),
                        }
                    }
                    Err(e) => accepting.failed(|left_out| {
                        let e = block::explain(&e, "ringdisk tries again");
                        warn!("upgrade: cannot accept a request: {e}{left_out}");
                    }),
                }
            }
        };
        let thread = thread::Builder::new().name("upgrade".into());
        thread.spawn(serve).map(drop)
    }
}

impl Drop for UpgradeSocket {
    fn drop(&mut self) {
        // The thread that listens ends with the process and removes nothing.
        let mut socket = locked(&self.socket);
        if socket.is_own() {
            socket.remove();
            let _ = std::fs::remove_file(launch_record::path(&self.control));
        }
    }
}

/// A copy of the listener for this thread; a second copy is for a handover.
fn listener_of(socket: &Mutex<Socket>, server: &Server) -> io::Result<UnixListener> {
    let socket = locked(socket);
    *locked(&server.handover.upgrade) = Some(socket.listener.as_fd().try_clone_to_owned()?);
    socket.listener.try_clone()
}

/// Writes the file that records how this process was started, if it has been removed. The sandbox may prevent that.
fn rewrite_launch(control: &Path) {
    let path = launch_record::path(control);
    if path.symlink_metadata().is_ok() {
        return;
    }
    let path = path.display();
    match LaunchRecord::here().and_then(|record| record.write(control)) {
        Ok(()) => warn!("{path} had been removed; ringdisk has created it again"),
        Err(e) => warn!(
            "live upgrade disabled: {path}, which records how ringdisk was started, has been removed and cannot be written \
             again: {e}"
        ),
    }
}

/// Creates the socket again if it has been removed, and returns its new listener.
fn recreate(socket: &Mutex<Socket>, server: &Server) -> io::Result<Option<UnixListener>> {
    {
        let mut socket = locked(socket);
        if !socket.is_removed() {
            return Ok(None);
        }
        let new = Socket::bind_for_packets(socket.path()).map_err(io::Error::other)?;
        warn!(
            "{} had been removed; ringdisk has created it again",
            new.path().display()
        );
        socket.renew(new);
    }
    listener_of(socket, server).map(Some)
}

/// The next client, or `None` if the files have to be checked.
fn wait_for_client(
    watch: &OwnedFd,
    listener: &UnixListener,
    acceptor: &mut Acceptor,
) -> io::Result<Option<Client>> {
    let mut ready = [
        PollFd::new(watch, PollFlags::IN),
        PollFd::new(listener, PollFlags::IN),
    ];
    loop {
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => continue,
            polled => polled?,
        };
        if !ready[0].revents().is_empty() {
            let _ = rustix::io::read(watch, &mut [0; 8]);
            return Ok(None);
        }
        return acceptor.accept(listener).map(Some);
    }
}
