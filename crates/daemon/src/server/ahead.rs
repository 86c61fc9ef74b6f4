//! What absent disks need and only root may do, while this process is root and will become another user.

use std::sync::mpsc;
use std::thread;

use super::absent::{AbsentDisk, MOMENT};
use super::{Server, ServerError};
use crate::config::sockets;
use crate::socket::{Socket, reach};

impl Server {
    /// Opens what absent disks need and only root may open, and makes their sockets where VMs look for them, before this
    /// process becomes another user. Storage that did not answer is not waited for.
    pub(super) fn open_ahead(&self) {
        let rights = &self.context.rights;
        if !rights.will_change() {
            return;
        }
        for (spec, _) in self.absent() {
            let (path, access) = (sockets::path(&spec), spec.socket_access);
            let reserve = || Socket::reserve(&path, reach::of_guests(access));
            // Without one, it is tried again, and reported, when the disk is there.
            let socket = rights.with_socket(&path, access, reserve).ok();
            let ahead = match self.context.hangs(&spec.name) {
                true => None,
                false => rights.open_ahead(&spec),
            };
            if let Some(absent) = self.state().absent.get_mut(&spec.name) {
                (absent.ahead, absent.socket) = (ahead, socket);
            }
        }
    }

    /// The socket that was made for an absent disk; from now on, it listens.
    pub(super) fn reserved_socket(&self, name: &str) -> Result<Option<Socket>, ServerError> {
        let state = self.state();
        let absent = state.absent.get(name);
        let reserved = absent.and_then(|absent| absent.socket.as_ref());
        let listens = reserved.and_then(Socket::listen_here).transpose();
        listens.map_err(|e| ServerError::Export(e.into()))
    }

    /// Closes block devices of absent disks that only one process can have open, for the process that takes over: it opens them
    /// as root, while this process cannot open them any more. Storage that does not answer is not waited for.
    pub fn close_claims(&self) {
        let claims: Vec<_> = {
            let mut state = self.state();
            let absent = state.absent.values_mut();
            let claims = absent.filter(|a| a.ahead.as_ref().is_some_and(|it| it.is_claim()));
            let close = |absent: &mut AbsentDisk| {
                absent.is_opening = false;
                absent.ahead.take()
            };
            claims.filter_map(close).collect()
        };
        if claims.is_empty() {
            return;
        }
        let (done, closed) = mpsc::channel::<()>();
        let close = move || {
            drop(claims);
            drop(done);
        };
        // Without a thread, they are closed here.
        let _ = thread::Builder::new().name("closing".into()).spawn(close);
        let _ = closed.recv_timeout(MOMENT);
    }
}
