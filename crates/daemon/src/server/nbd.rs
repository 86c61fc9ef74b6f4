//! The NBD server: clients such as backup programs read and write served disks.
//!
//! Each connection has a thread for its socket and a [virtqueue](guest::LocalQueue) of its own on one of the disk's I/O
//! threads, which serves its requests like a guest's. A client that does not read delays only its own thread.

mod bitmaps;
pub mod export;
pub mod listener;

mod connection;
mod memory;
mod output;
mod places;
mod queue;
pub mod rbd_snapshot;
mod status;
mod stream;
mod transfer;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use control::{BlockExportDeleted, Event};
use nbd::EXPORTS_MAX;
use tracing::{error, info, warn};

use super::clients::END_TIMEOUT;
use super::device::ServedDisk;
use super::error::{BackupError, NbdError};
use super::tls::TlsCredentials;
use super::{Claim, Removal, Server, ServerError, ServerState};
use crate::config::nbd::{NbdAddress, NbdExportSpec, TlsSpec};
use crate::inherited::NbdService;
use crate::state::store::Configured;
use export::{Exports, Moment, NbdExport, locked};
use listener::{BoundNbd, Listener};

/// The exports, and the listening socket.
#[derive(Default)]
pub struct NbdServer {
    exports: Arc<Mutex<Exports>>,
    listener: Mutex<Option<Listener>>,
    /// Certificates by the id that `nbd-server-start` refers to.
    tls: Mutex<BTreeMap<String, Arc<TlsCredentials>>>,
}

/// Limit of [`NbdServer::tls`].
const TLS_MAX: usize = 64;

impl NbdServer {
    /// All exports.
    pub fn exports(&self) -> Vec<Arc<NbdExport>> {
        locked(&self.exports).by_id.values().cloned().collect()
    }

    /// Accepts no clients until the returned value is dropped; they wait in the socket's queue.
    pub fn pause(&self) -> PausedNbd<'_> {
        locked(&self.exports).pauses += 1;
        PausedNbd(self)
    }

    /// Where the server listens.
    pub fn address(&self) -> Option<NbdAddress> {
        let listener = locked(&self.listener);
        listener.as_ref().map(|listener| listener.address().clone())
    }

    /// Whether clients must use TLS.
    pub fn has_tls(&self) -> bool {
        let listener = locked(&self.listener);
        listener.as_ref().is_some_and(|l| l.tls().is_some())
    }

    /// The certificates that commands have added, by id.
    pub fn tls(&self) -> Vec<(String, TlsSpec)> {
        let all = locked(&self.tls);
        all.iter()
            .map(|(id, tls)| (id.clone(), tls.spec.clone()))
            .collect()
    }

    /// What a process that takes over needs, with a copy of the socket.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn handover(&self) -> io::Result<Option<NbdService>> {
        let listener = locked(&self.listener);
        let Some(listener) = listener.as_ref() else {
            return Ok(None);
        };
        let exports = self.exports();
        Ok(Some(NbdService {
            address: listener.address().clone(),
            tls: listener.tls().map(|tls| tls.spec.clone()),
            listener: listener.copy()?,
            exports: exports.iter().map(|export| export.spec()).collect(),
        }))
    }
}

/// A socket, and the certificates that its clients are shown: all that the sandbox may refuse later.
pub struct ReadyNbd {
    bound: BoundNbd,
    tls: Option<Arc<TlsCredentials>>,
}

/// No client is accepted while this exists.
pub struct PausedNbd<'a>(&'a NbdServer);

impl PausedNbd<'_> {
    /// Disconnects all clients.
    ///
    /// # Errors
    /// The name of a disk whose storage does not answer: clients of it are still there at the deadline.
    pub fn disconnect(&self, deadline: Instant) -> Result<(), String> {
        for export in self.0.exports() {
            if !export.device.clients.end(|_| true, deadline) {
                return Err(export.device.disk.name.clone());
            }
        }
        Ok(())
    }
}

impl Drop for PausedNbd<'_> {
    fn drop(&mut self) {
        locked(&self.0.exports).pauses -= 1;
    }
}

impl ServerState {
    /// The device of a served disk, by the name of its node.
    pub(super) fn device_of(&self, name: &str) -> Result<Arc<ServedDisk>, ServerError> {
        let node = &self.top(name)?.node;
        let mut disks = self.exports.values();
        let found = disks.find(|export| Arc::ptr_eq(&export.node, node));
        let export = found.ok_or_else(|| NbdError::NotServed(name.into()))?;
        Ok(export.device.clone())
    }
}

fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

impl Server {
    /// Adds certificates for [`start_nbd`](Self::start_nbd).
    ///
    /// # Errors
    /// The id is taken, or the files cannot be used.
    pub fn add_tls(&self, id: &str, spec: TlsSpec) -> Result<(), ServerError> {
        let mut all = locked(&self.nbd.tls);
        if all.contains_key(id) {
            return Err(NbdError::SameTls(id.into()).into());
        }
        if all.len() >= TLS_MAX {
            return Err(ServerError::TooMany(format!("{TLS_MAX} tls-creds-x509")));
        }
        let credentials = TlsCredentials::read(spec).map_err(NbdError::from)?;
        all.insert(id.into(), Arc::new(credentials));
        Ok(())
    }

    /// Removes certificates. Returns false if there are none with this id.
    ///
    /// # Errors
    /// The NBD server uses them.
    pub fn remove_tls(&self, id: &str) -> Result<bool, ServerError> {
        let listener = locked(&self.nbd.listener);
        let mut all = locked(&self.nbd.tls);
        let used = listener.as_ref().and_then(|listener| listener.tls());
        match (all.get(id), used) {
            (None, _) => Ok(false),
            (Some(tls), Some(used)) if Arc::ptr_eq(tls, used) => {
                Err(NbdError::TlsInUse(id.into()).into())
            }
            _ => {
                all.remove(id);
                Ok(true)
            }
        }
    }

    /// Serves NBD clients at this address, with the certificates of this id.
    ///
    /// # Errors
    /// The server is running, or cannot listen there, or there are no such certificates.
    pub fn start_nbd(&self, address: &NbdAddress, tls: Option<&str>) -> Result<(), ServerError> {
        let tls = match tls {
            Some(id) => {
                let tls = locked(&self.nbd.tls).get(id).cloned();
                Some(tls.ok_or_else(|| NbdError::NoTls(id.into()))?)
            }
            None => None,
        };
        let mut listener = locked(&self.nbd.listener);
        if let Some(running) = &*listener {
            return Err(NbdError::Running(running.address().clone()).into());
        }
        if let NbdAddress::Unix(path) = address {
            self.sandbox.check_socket(path)?;
        }
        let bound = BoundNbd::bind(address).map_err(|e| match e {
            ServerError::Nbd(NbdError::Listen(address, e)) if is_denied(&e) => {
                NbdError::Sandboxed(address).into()
            }
            e => e,
        })?;
        *listener = Some(Listener::start(bound, self.nbd.exports.clone(), tls)?);
        Ok(())
    }

    /// Reads the certificates for a socket, unless they are those that were added with an id. The operator has named
    /// `configured`.
    ///
    /// # Errors
    /// They cannot be used.
    pub fn ready_nbd(
        &self,
        bound: BoundNbd,
        tls: Option<TlsSpec>,
        configured: Option<&TlsSpec>,
    ) -> Result<ReadyNbd, ServerError> {
        let Some(spec) = tls else {
            return Ok(ReadyNbd { bound, tls: None });
        };
        let added = locked(&self.nbd.tls);
        let same = added.values().find(|tls| tls.spec == spec).cloned();
        let tls = match same {
            Some(tls) => tls,
            None => {
                let read = || TlsCredentials::read(spec.clone());
                let is_named =
                    |dir: &Path| std::path::absolute(dir).is_ok_and(|dir| dir == spec.dir);
                let read = match configured {
                    Some(named) if named.dir == spec.dir || is_named(&named.dir) => {
                        self.context.rights.as_operator(read)
                    }
                    _ => read(),
                };
                Arc::new(read.map_err(NbdError::from)?)
            }
        };
        let tls = Some(tls);
        Ok(ReadyNbd { bound, tls })
    }

    /// Serves NBD clients at a socket that was made before.
    ///
    /// # Errors
    /// There is no thread for it.
    pub fn adopt_nbd(&self, ready: ReadyNbd) -> Result<(), ServerError> {
        let ReadyNbd { mut bound, tls } = ready;
        bound.own();
        let started = Listener::start(bound, self.nbd.exports.clone(), tls)?;
        *locked(&self.nbd.listener) = Some(started);
        Ok(())
    }

    /// Removes all NBD exports, disconnects their clients, and closes the socket.
    ///
    /// # Errors
    /// The server is not running.
    pub fn stop_nbd(&self) -> Result<(), ServerError> {
        let listener = locked(&self.nbd.listener).take();
        let listener = listener.ok_or(NbdError::NotRunning)?;
        info!("NBD: {}: closed", listener.address());
        // Tells all clients to end, so that none of them waits for another.
        drop(listener);
        let deadline = Instant::now() + END_TIMEOUT;
        for export in self.nbd.exports() {
            self.end_nbd_export(&export, deadline);
        }
        Ok(())
    }

    /// Exports a served disk to NBD clients.
    ///
    /// # Errors
    /// The server is not running, the disk is not served, or the id or name is taken.
    pub fn add_nbd_export(
        &self,
        claim: &Claim<'_>,
        spec: NbdExportSpec,
    ) -> Result<(), ServerError> {
        if locked(&self.nbd.listener).is_none() {
            return Err(NbdError::NotRunning.into());
        }
        spec.limits.check()?;
        if !spec.bitmaps.is_empty() {
            let node = self.state().top(&spec.node).map(|entry| entry.node.clone());
            // Others are refused below.
            if let Ok(node) = node {
                let checked = node.check_owner();
                checked.map_err(|e| BackupError::Lock(node.name().into(), e))?;
            }
        }
        // While it is held, the disk cannot be removed.
        let state = self.state();
        let (device, moment) = match self.backups.find_access(&spec.node) {
            Some((device, moment)) => (device, Some(moment)),
            None => (state.device_of(&spec.node)?, None),
        };
        claim.covers(&device.disk.name);
        if moment.is_some() && !spec.bitmaps.is_empty() {
            // Its bitmap is there in any case; only that can be named.
            moment
                .iter()
                .try_for_each(|moment| moment.check_bitmaps(&spec))?;
        }
        if spec.name.len() > nbd::NAME_BYTES_MAX {
            let len = spec.name.len();
            let start = spec.name.chars().take(40).collect();
            return Err(NbdError::LongName(start, len).into());
        }
        if spec.description.len() > nbd::NAME_BYTES_MAX {
            return Err(NbdError::LongDescription(spec.id, spec.description.len()).into());
        }
        if spec.writable && device.disk.facts.read_only && moment.is_none() {
            return Err(NbdError::ReadOnly(device.disk.name.clone()).into());
        }
        let mut exports = locked(&self.nbd.exports);
        // The server may have been stopped just now, and removes those that are there then.
        if self.nbd.address().is_none() {
            return Err(NbdError::NotRunning.into());
        }
        if exports.by_id.values().any(|other| other.name == spec.name) {
            return Err(NbdError::SameName(spec.name).into());
        }
        if exports.by_id.contains_key(&spec.id) {
            return Err(NbdError::SameId(spec.id).into());
        }
        if state.exports.contains_key(&spec.id) {
            return Err(NbdError::IdOfDisk(spec.id).into());
        }
        if exports.by_id.len() >= EXPORTS_MAX {
            return Err(ServerError::TooMany(format!("{EXPORTS_MAX} NBD exports")));
        }
        if moment.is_none() {
            let node = &state.top(&spec.node)?.node;
            self.check_bitmaps(&spec, node)?;
        }
        exports.made += 1;
        let export = NbdExport::new(exports.made, spec, device, moment)?;
        info!(
            "NBD: disk {} is exported as '{}'",
            export.device.disk.name, export.name
        );
        exports.by_id.insert(export.id.clone(), Arc::new(export));
        Ok(())
    }

    /// The NBD exports of the configuration, but for those of disks whose name another has that was attached.
    pub fn configured_exports(&self) -> Vec<NbdExportSpec> {
        let Configured { nbd, disks, .. } = self.configured();
        let its_disk = |it: &NbdExportSpec| disks.iter().find(|disk| disk.name == it.node);
        let mut exports = nbd.exports;
        exports.retain(|it| its_disk(it).is_none_or(|disk| !self.is_hidden(disk)));
        exports
    }

    /// Adds the NBD exports that the configuration has for a disk which a command serves again.
    pub fn add_configured_exports(&self, claim: &Claim<'_>, disk: &str) {
        if self.nbd.address().is_none() {
            return;
        }
        let there = self.nbd.exports();
        let is_there = |id: &String| there.iter().any(|other| other.id == *id);
        let exports = self.configured_exports().into_iter();
        for export in exports.filter(|it| it.node == disk && !is_there(&it.id)) {
            let name = export.name.clone();
            if let Err(e) = self.add_nbd_export(claim, export) {
                error!("NBD: '{name}' is not exported: {e}");
            }
        }
    }

    /// Removes an NBD export. Returns false if there is none with this id.
    ///
    /// # Errors
    /// Clients are connected, and the removal is not forced.
    pub fn remove_nbd_export(
        &self,
        claim: &Claim<'_>,
        id: &str,
        removal: Removal,
    ) -> Result<bool, ServerError> {
        let export = {
            let mut exports = locked(&self.nbd.exports);
            let Some(export) = exports.by_id.get(id) else {
                drop(exports);
                return Ok(self.forget_waiting_export(id));
            };
            if removal == Removal::Safe && export.device.clients.count(export.number) > 0 {
                return Err(NbdError::Connected(id.into()).into());
            }
            let export = export.clone();
            claim.covers(&export.device.disk.name);
            // From now on, no client connects.
            exports.by_id.remove(id);
            export
        };
        disconnect(&export, Instant::now() + END_TIMEOUT);
        self.say_removed(&export);
        Ok(true)
    }

    /// An NBD export of this disk.
    pub(super) fn nbd_export_of(&self, disk: &str) -> Option<Arc<NbdExport>> {
        let mut exports = self.nbd.exports().into_iter();
        exports.find(|export| export.device.disk.name == disk)
    }

    /// The NBD exports of a disk, without those of backups.
    pub fn nbd_exports_of(&self, disk: &str) -> Vec<NbdExportSpec> {
        let exports = self.nbd.exports().into_iter();
        let its = exports.filter(|e| e.moment.is_none() && e.device.disk.name == disk);
        its.map(|export| export.spec()).collect()
    }

    /// Removes the NBD exports of a disk that is no longer served, and disconnects their clients.
    pub(super) fn end_nbd_exports_of(&self, disk: &str) {
        let deadline = Instant::now() + END_TIMEOUT;
        while let Some(export) = self.nbd_export_of(disk) {
            self.end_nbd_export(&export, deadline);
        }
    }

    /// Removes the NBD exports that show this, and disconnects their clients.
    pub(super) fn end_nbd_exports_at(&self, moment: &Arc<Moment>, deadline: Instant) {
        let shows = |export: &&Arc<NbdExport>| {
            let its = export.moment.as_ref();
            its.is_some_and(|its| Arc::ptr_eq(its, moment))
        };
        let exports = self.nbd.exports();
        for export in exports.iter().filter(shows) {
            self.end_nbd_export(export, deadline);
        }
    }

    /// Removes an export, unless another thread does so, and disconnects its clients.
    fn end_nbd_export(&self, export: &Arc<NbdExport>, deadline: Instant) {
        let is_removed = locked(&self.nbd.exports).remove(export);
        disconnect(export, deadline);
        if is_removed {
            self.say_removed(export);
        }
    }

    fn say_removed(&self, export: &NbdExport) {
        let id = export.id.clone();
        info!("NBD: export '{id}' removed");
        let event = Event::BlockExportDeleted(BlockExportDeleted { id });
        self.events.emit(&event);
    }
}

/// Disconnects the clients of an export, but not those of a new one with the same id.
fn disconnect(export: &NbdExport, deadline: Instant) {
    let device = &export.device;
    if !device
        .clients
        .end(|client| client.export == export.number, deadline)
    {
        warn!(
            "NBD: export '{}': clients were disconnected without replies, because the storage of disk {} does not answer",
            export.id, device.disk.name
        );
    }
}
