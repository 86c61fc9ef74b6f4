//! Everything that this process serves. All changes go through [`Server`], whether they come from the command line, the
//! configuration or the control socket.

pub mod backup;
pub mod bitmap_plan;
pub mod bitmaps;
pub mod clients;
pub mod connection_info;
pub mod device;
pub mod error;
pub mod export;
pub mod handover;
pub mod iothreads;
mod left;
pub mod nbd;
pub mod reload;
pub mod resources;

mod absent;
mod ahead;
mod attach;
mod claims;
mod deadline;
mod deleted;
mod guests;
mod hangs;
mod numa;
mod persist;
mod prepare;
mod replace;
mod resize;
mod share;
mod shutdown;
mod start;
mod throttle;
mod tls;
mod watch;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use block::{ThrottleLimits, format_size};
use control::{BlockExportDeleted, BlockImageCorrupted, Event, EventHub};
use datapath::{Disk, ThrottleGroup};
use engine::Identity;
use image::Format;
use tracing::{error, info, warn};

use crate::config::conflicts::ConflictError;
use crate::config::export::ExportSpec;
use crate::config::spec::{DiskSpec, FileSpec, Labels, Lock};
use crate::node::context::OpenContext;
use crate::node::{DiskParameters, FileUse, Node};
use crate::sandbox::Sandbox;
use crate::server::connection_info::ConnectionInfo;
use crate::server::error::ExportError;
use crate::server::export::{Export, ExportContext, ExportSocket};
use crate::server::iothreads::IoThreads;
use crate::socket::{Socket, reach};
use crate::state::DiskOverride;
use crate::state::left::LeftFiles;
use crate::state::store::{Configured, StateStore};

use absent::AbsentDisk;
use backup::OpenBackups;
use claims::Claims;
pub use claims::{Claim, Waiting};
use deadline::{SHUTDOWN_TIMEOUT, with_deadline};
use error::NbdError;
pub use error::ServerError;
use handover::HandoverState;
use nbd::NbdServer;
pub use prepare::{PreparedDisk, TargetState};
pub use replace::Move;
use shutdown::{stop, sync};
pub use watch::DiskView;
use watch::LatencyMode;

/// Limit of disks per process: each needs a thread and a few descriptors.
const DISKS_MAX: usize = 4096;

/// Limit of throttle groups.
const GROUPS_MAX: usize = 4096;

pub struct Server {
    pub threads: IoThreads,
    pub context: OpenContext,
    sandbox: Arc<Sandbox>,
    pub events: Arc<EventHub>,
    /// Persists changes, if there is a state directory.
    store: OnceLock<StateStore>,
    /// The directory of the state while disks are started: what they leave is saved at once, the state when all are there.
    state_directory: OnceLock<std::path::PathBuf>,
    pub handover: HandoverState,
    pub nbd: NbdServer,
    pub backups: OpenBackups,
    /// The order of commands, which comes before all locks.
    claims: Claims,
    reloads: Claims,
    /// For callbacks.
    me: Weak<Self>,
    /// Never held while something waits for storage: all disks, signals and sessions need it. Storage is queried
    /// before, and the result checked again under the lock. Locks are taken in this order: the node of a
    /// [`ServedDisk`](device::ServedDisk), a node's `changes` or the state store, this one, a node's state.
    state: Mutex<ServerState>,
}

#[derive(Default)]
struct ServerState {
    nodes: BTreeMap<String, NodeEntry>,
    exports: BTreeMap<String, Export>,
    groups: BTreeMap<String, Arc<ThrottleGroup>>,
    watch: LatencyMode,
    /// Configured services that could not be started, each with the reason.
    unavailable: Vec<String>,
    /// What the operator has configured, as far as it applies.
    configured: Configured,
    /// Configured disks that have been detached, if their last file was not the configured one.
    detached: Vec<DiskOverride>,
    /// The files that disks have left.
    left: LeftFiles,
    /// Exports that finish their requests in flight, by id, with their nodes.
    stopping: Vec<(String, Arc<Node>)>,
    /// Disks that a reload has stopped and starts again.
    restarting: Vec<resources::Restarting>,
    /// Disks that are to be served and cannot be, by name.
    absent: BTreeMap<String, AbsentDisk>,
    /// A thread tries them again.
    is_retrying: bool,
    /// Disks for which a command has something done that may wait for storage, and since when.
    under_way: Vec<deadline::Work>,
    /// Detached disks whose storage had not answered, with their files.
    still_open: Vec<(String, Vec<Identity>)>,
    /// What guests depend on, served or not.
    guests: guests::Guests,
    /// The configured disks and their sockets, as soon as a reload begins.
    wanted: Vec<(String, PathBuf)>,
    /// When the guests' choices were last persisted.
    choices_persisted: Option<Instant>,
    /// A thread will persist them again.
    persist_scheduled: bool,
}

/// A node, with settings that it keeps while it is not served.
struct NodeEntry {
    node: Arc<Node>,
    limits: ThrottleLimits,
    group: Option<String>,
    labels: Labels,
    /// The node below it, whose file it uses.
    child: Option<String>,
}

impl NodeEntry {
    /// Its configuration as it is now.
    fn spec(&self) -> DiskSpec {
        DiskSpec {
            limits: self.limits,
            throttle_group: self.group.clone(),
            labels: self.labels.clone(),
            ..self.node.spec.clone()
        }
    }
}

/// What happens to a connected front-end when its disk is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The removal fails.
    Safe,
    /// It is disconnected once its requests in flight have finished.
    Hard,
}

impl Server {
    pub fn new(threads: IoThreads, context: OpenContext, sandbox: Arc<Sandbox>) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            context,
            sandbox,
            threads,
            events: EventHub::new(),
            store: OnceLock::new(),
            state_directory: OnceLock::new(),
            handover: HandoverState::default(),
            nbd: NbdServer::default(),
            backups: OpenBackups::default(),
            claims: Claims::default(),
            reloads: Claims::default(),
            me: me.clone(),
            state: Mutex::default(),
        })
    }

    /// Stops serving a disk and closes it.
    ///
    /// # Errors
    /// There is no such disk; a VM is connected, and the removal is not forced; or ([`ServerError::Detached`]) writes could
    /// not be made durable, or storage does not answer: then the disk is detached regardless.
    pub fn detach(
        &self,
        claim: &Claim<'_>,
        name: &str,
        removal: Removal,
    ) -> Result<(), ServerError> {
        claim.covers(name);
        if self.forget_absent(name) {
            return Ok(());
        }
        if removal == Removal::Safe {
            // A backup has temporary bitmaps of its own, which are not to be removed first.
            self.backups.check_none(name)?;
            self.check_not_deleted(name)?;
            let bitmaps = self.temporary_bitmaps_of(name);
            if !bitmaps.is_empty() {
                return Err(ServerError::TemporaryBitmaps(
                    name.into(),
                    bitmaps.join(", "),
                ));
            }
        }
        let (export, in_cluster) = {
            let state = self.state();
            let mut exports = state.exports.values();
            let export = exports.find(|e| e.node.name() == name);
            let node = state.nodes.get(name);
            let in_cluster = node.is_some_and(|entry| entry.node.rbd().is_some());
            (export.map(|e| e.id.clone()), in_cluster)
        };
        let ended = match export {
            Some(export) => self.remove_export(claim, &export, removal),
            None => Ok(()),
        };
        let wait = match &ended {
            Ok(()) | Err(ServerError::Sync(..) | ServerError::InJournal(..)) => SHUTDOWN_TIMEOUT,
            // The wait is over already.
            Err(ServerError::NotResponding(_)) => {
                let mut state = self.state();
                let files = state.nodes.get(name).map(|entry| entry.node.files());
                let files = files.map(|files| (name.to_owned(), files));
                state.still_open.extend(files);
                Duration::ZERO
            }
            Err(_) => return ended,
        };
        let removed = self.remove_node_within(claim, name, wait);
        match ended.and(removed) {
            Err(
                e @ (ServerError::Sync(..)
                | ServerError::InJournal(..)
                | ServerError::NotResponding(_)),
            ) => {
                let e = if in_cluster { e.in_cluster() } else { e };
                Err(ServerError::Detached(Box::new(e)))
            }
            result => result,
        }
    }

    /// Logs and reports corruption of the node's image, once it is found.
    fn watch_damage(&self, node: &Node) {
        let (name, events) = (node.name().to_owned(), self.events.clone());
        node.on_damage(move |damage| {
            error!("disk {name}: {damage}; nothing more is written to it");
            events.emit(&Event::BlockImageCorrupted(BlockImageCorrupted {
                device: String::new(),
                node_name: Some(name.clone()),
                msg: damage.what.into(),
                offset: damage.file_offset(),
                size: None,
                fatal: true,
            }));
        });
    }

    /// Adds a node on top of another one, which nothing else may use then.
    pub fn add_node_over(
        &self,
        claim: &Claim<'_>,
        child: &str,
        spec: DiskSpec,
    ) -> Result<(), ServerError> {
        claim.covers(child);
        claim.covers(&spec.name);
        self.backups.check_name(&spec.name)?;
        let mut state = self.state();
        state.check_new_node(&spec)?;
        let below = state.entry(child)?.node.clone();
        state.check_no_user(child)?;
        let name = spec.name.clone();
        let entry = NodeEntry {
            node: Arc::new(below.renamed(spec)),
            limits: ThrottleLimits::NONE,
            group: None,
            labels: Labels::default(),
            child: Some(child.into()),
        };
        state.nodes.insert(name, entry);
        Ok(())
    }

    /// Closes a disk that is not served.
    ///
    /// # Errors
    /// There is no such node, or it is in use; or writes could not be made durable: then it is closed regardless.
    pub fn remove_node(&self, claim: &Claim<'_>, name: &str) -> Result<(), ServerError> {
        self.remove_node_within(claim, name, SHUTDOWN_TIMEOUT)
    }

    fn remove_node_within(
        &self,
        claim: &Claim<'_>,
        name: &str,
        wait: Duration,
    ) -> Result<(), ServerError> {
        claim.covers(name);
        let mut state = self.state();
        state.entry(name)?;
        state.check_no_user(name)?;
        let entry = state.nodes.remove(name);
        let last = entry.as_ref().map(NodeEntry::spec);
        state.detached.retain(|detached| detached.disk.name != name);
        let moved = last.filter(|last| state.is_elsewhere(last));
        let mut configured = state.configured.disks.iter();
        let configured = configured.find(|disk| disk.name == name).cloned();
        let moved = moved.map(|disk| DiskOverride { disk, configured });
        state.detached.extend(moved);
        drop(state);
        match entry {
            // Closing an image writes to it, while the old process still uses it.
            Some(_) if self.context.inherited.is_uncommitted() => Ok(()),
            Some(entry) => {
                let files = entry.node.files();
                let ended = with_deadline(name, Instant::now() + wait, move || sync(&entry.node));
                if let Err(ServerError::NotResponding(_)) = ended {
                    self.state().still_open.push((name.into(), files));
                }
                ended
            }
            None => Ok(()),
        }
    }

    /// Serves an opened disk. Returns how to connect to it.
    pub fn add_export(
        &self,
        claim: &Claim<'_>,
        name: &str,
        spec: &ExportSpec,
    ) -> Result<ConnectionInfo, ServerError> {
        self.add_export_at(claim, name, spec, None)
    }

    /// Like [`add_export`](Self::add_export), with a socket that exists already.
    fn add_export_at(
        &self,
        claim: &Claim<'_>,
        name: &str,
        spec: &ExportSpec,
        socket: Option<Socket>,
    ) -> Result<ConnectionInfo, ServerError> {
        claim.covers(name);
        claim.covers(&spec.id);
        self.backups.check_name(&spec.id)?;
        let rights = self.context.rights.clone();
        let access = spec.socket_access;
        if socket.is_none() {
            let check = || self.sandbox.check_socket(&spec.socket);
            rights.with_socket(&spec.socket, access, check)?;
        }
        let node = self.state().entry(name)?.node.clone();
        // Refreshes the size that the new disk will have.
        let _ = node.file_size();
        let mut state = self.state();
        let entry = state.entry(name)?;
        let node = entry.node.clone();
        let (limits, group) = (entry.limits, entry.group.clone());
        let same = |other: &&Export| other.id == spec.id || other.socket == spec.socket;
        match state.exports.values().find(same) {
            Some(other) if other.id == spec.id => {
                return Err(ConflictError::SameName(spec.id.clone()).into());
            }
            Some(other) => {
                let (other, id) = (other.id.clone(), spec.id.clone());
                return Err(ConflictError::SameSocket(other, id, spec.socket.clone()).into());
            }
            None if state.stopping.iter().any(|(id, _)| *id == spec.id) => {
                return Err(ConflictError::SameName(spec.id.clone()).into());
            }
            None => {}
        }
        state.check_no_user(name)?;
        if node.spec.read_only && !spec.read_only {
            return Err(ServerError::ReadOnly(name.into()));
        }
        let queues = state.queues(spec, &node.spec.file, self.context.inherited.queues(name));
        let threads = self.threads.assign(queues, &spec.iothreads)?;
        let disk = node.disk(&DiskParameters {
            name: spec.id.clone(),
            read_only: spec.read_only,
            cache: spec.cache,
            logical_block: spec.logical_block,
        })?;
        disk.set_limits(&limits)?;
        disk.set_throttle_group(state.group(group.as_deref())?);
        let me = self.me.clone();
        let inherited = self.context.inherited.export(&spec.socket);
        // Whatever is configured, a guest continues on the file that it has written to.
        if inherited
            .as_ref()
            .is_some_and(|export| export.file != node.identity())
        {
            let (socket, path) = (spec.socket.clone(), node.filename.clone());
            return Err(ServerError::OtherFile(name.into(), socket, path));
        }
        if let Some(size) = inherited.as_ref().and_then(|export| export.size)
            && node.format == Format::Raw
        {
            keep_size(&disk, size);
        }
        let remembered = state.guests.write_cache(&spec.socket);
        let chosen = inherited.as_ref().map(|export| export.write_cache);
        let capacity_read = inherited.as_ref().and_then(|e| e.capacity_read);
        let socket = match (inherited, socket) {
            (Some(inherited), _) => ExportSocket::Inherited(Box::new(inherited)),
            (None, Some(socket)) => ExportSocket::Bound(socket),
            (None, None) => {
                let bind = || Socket::bind(&spec.socket, reach::of_guests(access));
                let bound = rights.with_socket(&spec.socket, access, bind);
                ExportSocket::Bound(bound.map_err(ExportError::from)?)
            }
        };
        let around = ExportContext {
            events: self.events.clone(),
            // What was handed over is newer than the state file, also if it is no choice.
            write_cache: chosen.unwrap_or(remembered),
            capacity_read,
            socket,
            changed: Box::new(move || {
                if let Some(server) = me.upgrade() {
                    server.persist_choice();
                }
            }),
        };
        let mut export = Export::start(node, disk, spec, threads, around)?;
        export.measure(!matches!(state.watch, LatencyMode::No));
        let ready = export.ready();
        state.exports.insert(spec.id.clone(), export);
        drop(state);
        reach::warn_if_closed(&spec.id, &spec.socket, reach::of_guests(access));
        Ok(ready)
    }

    /// How to connect a VM to a disk.
    ///
    /// # Errors
    /// The disk is not served.
    pub fn connect_info(&self, id: &str) -> Result<ConnectionInfo, ServerError> {
        let ready = self.state().exports.get(id).map(Export::ready);
        ready.ok_or_else(|| self.not_there(id))
    }

    /// Stops serving a disk, which stays open.
    ///
    /// # Errors
    /// There is no such export; a VM is connected, and the removal is not forced; or writes could not be made durable: then
    /// the export is removed regardless.
    pub fn remove_export(
        &self,
        claim: &Claim<'_>,
        id: &str,
        removal: Removal,
    ) -> Result<(), ServerError> {
        claim.covers(id);
        let export = self.take_export(id, removal)?;
        self.fail_backups(Some(id), "the disk was detached");
        // No other can be added now.
        self.end_nbd_exports_of(id);
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        let device = |export: &Export| (export.device.clone(), export.socket.clone());
        let device = export.as_ref().map(device);
        let result = with_deadline(id, deadline, move || export.map_or(Ok(()), stop));
        {
            let mut state = self.state();
            state.stopping.retain(|(other, _)| other != id);
            if let Some((device, socket)) = device {
                state.guests.choose(&socket, device.chosen_write_cache());
            }
        }
        info!("disk {id}: no longer served");
        let id = id.to_owned();
        let event = Event::BlockExportDeleted(BlockExportDeleted { id });
        self.events.emit(&event);
        result
    }

    /// The export, which is stopping from now on.
    fn take_export(&self, id: &str, removal: Removal) -> Result<Option<Export>, ServerError> {
        let mut state = self.state();
        let Some(export) = state.exports.get(id) else {
            return Err(ServerError::NoExport(id.into()));
        };
        if removal == Removal::Safe && export.connected() {
            return Err(ServerError::Connected(id.into()));
        }
        if removal == Removal::Safe {
            // It has exports of its own, which are not to be removed first.
            self.backups.check_none(id)?;
            if let Some(export) = self.nbd_export_of(id) {
                return Err(NbdError::InUse(export.name.clone()).into());
            }
        }
        let stopping = (id.to_owned(), export.node.clone());
        state.stopping.push(stopping);
        Ok(state.exports.remove(id))
    }

    /// Resumes requests that wait because storage failed: tries them again, or, with `report`, returns their errors to
    /// the guest.
    pub fn resume(&self, name: &str, report: bool) -> Result<(), ServerError> {
        let state = self.state();
        let node = &state.top(name)?.node;
        let export = state.exports.values().find(|e| Arc::ptr_eq(&e.node, node));
        let export = export.ok_or_else(|| ServerError::NoExport(name.into()))?;
        export.resume(report);
        Ok(())
    }

    /// The node of an export, or the node of this name.
    pub fn node_of(&self, name: &str) -> Option<String> {
        let state = self.state();
        match (state.exports.get(name), state.nodes.contains_key(name)) {
            (Some(export), _) => Some(export.node.name().to_owned()),
            (None, true) => Some(name.into()),
            (None, false) => None,
        }
    }

    /// The configuration of a served disk as it is now.
    pub fn spec_of(&self, name: &str) -> Option<DiskSpec> {
        let state = self.state();
        let entry = state.nodes.get(name)?;
        let served = state.exports.get(name)?;
        Arc::ptr_eq(&served.node, &entry.node).then(|| entry.spec())
    }

    /// Whether a disk is free for other hosts: locked only while its VM runs, which is not connected here.
    fn is_for_others(&self, name: &str) -> bool {
        let state = self.state();
        let export = state.exports.get(name);
        export.is_some_and(|it| it.node.spec.lock == Lock::Running && !it.connected())
    }

    fn state(&self) -> MutexGuard<'_, ServerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the size that a disk had in the old process, if its file is shorter now: a guest's disk never shrinks, and a file
/// that grows again does not have the lost data.
fn keep_size(disk: &Disk, size: u64) {
    let now = disk.size();
    if now < size {
        let (name, now, before) = (&disk.name, format_size(now), format_size(size));
        warn!(
            "disk {name}: its file has only {now} and the disk {before}, as in the old process; requests beyond will fail"
        );
        disk.grow(size);
    }
}

/// The identity of a disk's file. Waits for storage.
fn identity(file: &FileSpec) -> Option<Identity> {
    match file {
        FileSpec::Path(path) => fs::metadata(path).ok().map(|file| Identity::of(&file)),
        FileSpec::Rbd(_) | FileSpec::Null(_) => None,
    }
}

impl ServerState {
    fn entry(&self, name: &str) -> Result<&NodeEntry, ServerError> {
        let entry = self.nodes.get(name);
        entry.ok_or_else(|| self.not_there(name))
    }

    /// Whether a configured disk is on another file than the configured one.
    fn is_elsewhere(&self, disk: &DiskSpec) -> bool {
        let mut all = self.configured.disks.iter();
        let configured = all.find(|other| other.name == disk.name);
        configured.is_some_and(|configured| !configured.has_file_of(disk))
    }

    fn check_new_node(&self, spec: &DiskSpec) -> Result<(), ServerError> {
        if self.nodes.contains_key(&spec.name) {
            return Err(ConflictError::SameName(spec.name.clone()).into());
        }
        if self.nodes.len() >= DISKS_MAX {
            return Err(ServerError::TooMany(format!("{DISKS_MAX} disks")));
        }
        self.group(spec.throttle_group.as_deref()).map(drop)
    }

    /// Checks that no other disk of this process uses the file of a disk, whose identity is `there`. The file locks
    /// would detect this too, but later, and without the name of the other disk.
    fn check_file(&self, spec: &DiskSpec, there: Option<Identity>) -> Result<(), ServerError> {
        let path = match &spec.file {
            FileSpec::Path(path) => path,
            FileSpec::Rbd(location) => {
                let mut entries = self.nodes.values();
                let both_read = |node: &Node| node.spec.read_only && spec.read_only;
                let same = |node: &Node| matches!(&node.spec.file, FileSpec::Rbd(l) if l.is_same_image(location));
                return match entries.find(|e| same(&e.node) && !both_read(&e.node)) {
                    Some(entry) => {
                        let name = entry.node.name().to_owned();
                        Err(ServerError::FileInUse(location.to_string().into(), name))
                    }
                    None => Ok(()),
                };
            }
            FileSpec::Null(_) => return Ok(()),
        };
        let uses = |node: &Node| there.and_then(|there| node.uses(there));
        let excludes = |node: &Node| match uses(node) {
            None => false,
            Some(FileUse::Read) => {
                !spec.read_only || there.is_some_and(|there| node.builds_on(there))
            }
            Some(FileUse::Write) => true,
        };
        match self.nodes.values().find(|entry| excludes(&entry.node)) {
            Some(entry) => {
                let name = entry.node.name().to_owned();
                Err(ServerError::FileInUse(path.clone(), name))
            }
            None => Ok(()),
        }
    }

    /// The topmost node above a node, or itself.
    fn top(&self, name: &str) -> Result<&NodeEntry, ServerError> {
        let mut entry = self.entry(name)?;
        let above = |name: &str| {
            let mut nodes = self.nodes.values();
            nodes.find(|entry| entry.child.as_deref() == Some(name))
        };
        while let Some(next) = above(entry.node.name()) {
            entry = next;
        }
        Ok(entry)
    }

    /// Replaces the node of the same name, and those below it.
    fn put_on(&mut self, new: &Arc<Node>) {
        let mut name = Some(new.name().to_owned());
        while let Some(entry) = name.and_then(|name| self.nodes.get_mut(&name)) {
            let mut spec = entry.node.spec.clone();
            spec.take_file_of(&new.spec);
            entry.node = if entry.node.name() == new.name() {
                new.clone()
            } else {
                Arc::new(new.renamed(spec))
            };
            name = entry.child.clone();
        }
    }

    /// Checks that no export or other node uses a node.
    fn check_no_user(&self, name: &str) -> Result<(), ServerError> {
        let mut nodes = self.nodes.values();
        let above = nodes.find(|entry| entry.child.as_deref() == Some(name));
        let mut exports = self.exports.values();
        let export = exports.find(|e| e.node.name() == name);
        let user = export
            .map(|e| e.id.clone())
            .or(above.map(|entry| entry.node.name().to_owned()))
            .or_else(|| self.stops(name));
        match user {
            Some(user) => Err(ServerError::NodeInUse(name.into(), user)),
            None => Ok(()),
        }
    }

    /// The export of a node that is stopping.
    fn stops(&self, name: &str) -> Option<String> {
        let mut stopping = self.stopping.iter();
        let found = stopping.find(|(_, node)| node.name() == name);
        found.map(|(id, _)| id.clone())
    }
}
