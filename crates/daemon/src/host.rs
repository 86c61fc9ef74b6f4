//! All that this process serves, and every change to it: whoever asks (the command line, the
//! configuration, the control socket) comes here.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use block::{CacheMode, ThrottleError, ThrottleLimits};
use control::{BlockExportDeleted, BlockImageCorrupted, Event, EventHub};
use datapath::ThrottleGroup;
use thiserror::Error;
use tracing::{error, info, warn};

use crate::device::ServedDisk;
use crate::export::{Around, Export, ExportError, ExportSpec};
use crate::iothreads::{IoThreadError, IoThreads};
use crate::keeper::{Inventory, Keeper, Written};
use crate::node::{DiskWanted, Node, NodeError};
use crate::paste::Ready;
use crate::sandbox::{Outside, Sandbox};
use crate::spec::{DiskSpec, FileSpec, Problem};
use crate::state::{ChangedExport, ChangedNode};
use crate::storage::Places;
use crate::together::TogetherError;
use crate::upgrade::{Handing, Pausing};

/// Disks that one process serves at most: each takes a thread and a few descriptors.
const DISKS_MAX: usize = 4096;

/// Groups of disks with common limits.
const GROUPS_MAX: usize = 4096;

/// How long the end of a disk, or of all, may take: what is under way, and to make it durable. Less than the 90 s
/// after which systemd kills.
const SHUTDOWN: Duration = Duration::from_secs(60);

/// How long latencies are measured after somebody has asked for statistics.
const WATCH: Duration = Duration::from_secs(120);

pub struct Host {
    pub threads: IoThreads,
    pub places: Places,
    /// Where this process may be at all.
    sandbox: Arc<Sandbox>,
    pub events: Arc<EventHub>,
    /// Where what is changed is kept, if it is.
    keeper: OnceLock<Keeper>,
    pub handing: Handing,
    /// For those who tell of changes from elsewhere.
    me: Weak<Self>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<String, NodeEntry>,
    exports: BTreeMap<String, Export>,
    groups: BTreeMap<String, Arc<ThrottleGroup>>,
    watch: Watch,
    /// Exports by id that finish what is under way, with the nodes to which that goes.
    stopping: Vec<(String, Arc<Node>)>,
    /// Disks that are being moved to other files.
    moving: Vec<String>,
    /// What guests chose of their write caches before this process ran, by export.
    write_caches: BTreeMap<String, bool>,
}

/// Whether latencies are measured, which costs a little.
#[derive(Clone, Copy, Default)]
enum Watch {
    #[default]
    No,
    Until(Instant),
    Always,
}

/// A node, and what it keeps while it is not served.
struct NodeEntry {
    node: Arc<Node>,
    limits: ThrottleLimits,
    group: Option<String>,
    /// The node that it lies on.
    child: Option<String>,
}

impl NodeEntry {
    /// As it would have to be written to be as it is now.
    fn spec(&self) -> DiskSpec {
        DiskSpec {
            limits: self.limits,
            throttle_group: self.group.clone(),
            ..self.node.spec.clone()
        }
    }
}

/// What is to become of a front-end that is connected when its disk is to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The disk stays, and the caller is told.
    Safe,
    /// It is disconnected, once what it has under way is finished.
    Hard,
}

#[derive(Debug, Error)]
pub enum HostError {
    #[error(transparent)]
    Together(#[from] TogetherError),
    #[error("there is no disk '{0}'; 'ringdisk list' shows those that are served")]
    NoNode(String),
    #[error("there is no export '{0}'")]
    NoExport(String),
    #[error("disk '{0}' is in use by '{1}'; remove that first")]
    NodeInUse(String, String),
    #[error("{0}: in use by disk '{1}'; detach that first, or serve both with readonly=on")]
    FileInUse(PathBuf, String),
    #[error("disk '{0}' was changed by somebody else meanwhile; look at it again")]
    Changed(String),
    #[error("a VM is connected to disk '{0}'; shut it down first, or force the removal")]
    Connected(String),
    #[error("disk '{0}' is read-only; it can only be exported with writable=false")]
    ReadOnly(String),
    #[error("there are {0} already, which is the limit")]
    TooMany(String),
    #[error("there is no throttle group '{0}'; object-add or [[throttle-group]] makes one")]
    NoGroup(String),
    #[error("there is a throttle group '{0}' already")]
    SameGroup(String),
    #[error("throttle group '{0}' is in use by disk '{1}'; take that out of it first")]
    GroupInUse(String, String),
    #[error(transparent)]
    Outside(#[from] Outside),
    #[error(transparent)]
    Throttle(#[from] ThrottleError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(transparent)]
    IoThread(#[from] IoThreadError),
    #[error("disk {0}: {1}")]
    Unfit(String, Problem),
    #[error("disk {0}: cannot be resized: {1}")]
    Resize(String, String),
    #[error("disk {0}: where it is now cannot be kept: {1}")]
    Keep(String, io::Error),
    #[error("{0} could not be made durable, acknowledged writes may be lost: {1}")]
    Sync(String, io::Error),
    #[error(
        "disk {0}: its storage does not answer; what the VM wrote and did not flush may be lost, and the \
         file stays locked until the kernel gives up"
    )]
    Hangs(String),
}

impl Host {
    pub fn new(threads: IoThreads, places: Places, sandbox: Arc<Sandbox>) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            places,
            sandbox,
            threads,
            events: EventHub::new(),
            keeper: OnceLock::new(),
            handing: Handing::default(),
            me: me.clone(),
            state: Mutex::default(),
        })
    }

    /// Opens a disk and serves it, under one name.
    ///
    /// # Errors
    /// Nothing is left of it then.
    pub fn attach(&self, spec: DiskSpec) -> Result<Ready, HostError> {
        let name = spec.name.clone();
        let export = ExportSpec::from(&spec);
        self.add_node(spec)?;
        self.add_export(&name, &export).inspect_err(|_| {
            let _ = self.remove_node(&name);
        })
    }

    /// Ends the service of a disk and closes it.
    ///
    /// # Errors
    /// There is none of this name; or a VM is connected, and it is to be removed safely; or what the VM
    /// wrote could not be made durable, in which case the disk is gone all the same.
    pub fn detach(&self, name: &str, removal: Removal) -> Result<(), HostError> {
        let export = {
            let state = self.state();
            let mut exports = state.exports.values();
            let export = exports.find(|e| e.node.name() == name);
            export.map(|e| e.id.clone())
        };
        if let Some(export) = export {
            self.remove_export(&export, removal)?;
        }
        self.remove_node(name)
    }

    /// Opens a disk without serving it.
    pub fn add_node(&self, spec: DiskSpec) -> Result<(), HostError> {
        let name = spec.name.clone();
        self.sandbox.check_file(&spec.file)?;
        {
            let state = self.state();
            state.check_new_node(&spec)?;
            state.check_file(&spec)?;
        }
        let (limits, group) = (spec.limits, spec.throttle_group.clone());
        // Takes seconds where a lock is waited for; nobody else has to wait meanwhile.
        let node = Node::open(spec, &self.places)?;
        let (its_name, events) = (name.clone(), self.events.clone());
        node.on_damage(move |damage| {
            error!("disk {its_name}: {damage}; nothing more is written to it");
            events.emit(&Event::BlockImageCorrupted(BlockImageCorrupted {
                device: String::new(),
                node_name: Some(its_name.clone()),
                msg: damage.what.into(),
                offset: Some(damage.at),
                size: None,
                fatal: true,
            }));
        });
        let mut state = self.state();
        state.check_new_node(&node.spec)?;
        let entry = NodeEntry {
            node: Arc::new(node),
            limits,
            group,
            child: None,
        };
        state.nodes.insert(name, entry);
        Ok(())
    }

    /// Makes a node that lies on another one, which nothing else may use from now on.
    pub fn add_node_over(&self, child: &str, spec: DiskSpec) -> Result<(), HostError> {
        let mut state = self.state();
        state.check_new_node(&spec)?;
        let below = state.entry(child)?.node.clone();
        if let Some(user) = state.user_of(child) {
            return Err(HostError::NodeInUse(child.into(), user));
        }
        let name = spec.name.clone();
        let entry = NodeEntry {
            node: Arc::new(below.renamed(spec)),
            limits: ThrottleLimits::NONE,
            group: None,
            child: Some(child.into()),
        };
        state.nodes.insert(name, entry);
        Ok(())
    }

    /// Closes a disk that is not served.
    ///
    /// # Errors
    /// There is none of this name, or it is served; or what was written could not be made durable, in
    /// which case it is closed all the same.
    pub fn remove_node(&self, name: &str) -> Result<(), HostError> {
        let mut state = self.state();
        state.entry(name)?;
        if let Some(user) = state.user_of(name) {
            return Err(HostError::NodeInUse(name.into(), user));
        }
        let entry = state.nodes.remove(name);
        drop(state);
        match entry {
            Some(entry) => in_time(name, Instant::now() + SHUTDOWN, move || sync(&entry.node)),
            None => Ok(()),
        }
    }

    /// Serves an opened disk. Returns what to paste.
    pub fn add_export(&self, name: &str, spec: &ExportSpec) -> Result<Ready, HostError> {
        self.sandbox.check_socket(&spec.socket)?;
        let mut state = self.state();
        let entry = state.entry(name)?;
        let node = entry.node.clone();
        let (limits, group) = (entry.limits, entry.group.clone());
        let same = |other: &&Export| other.id == spec.id || other.socket == spec.socket;
        match state.exports.values().find(same) {
            Some(other) if other.id == spec.id => {
                return Err(TogetherError::SameName(spec.id.clone()).into());
            }
            Some(other) => {
                let (other, id) = (other.id.clone(), spec.id.clone());
                return Err(TogetherError::SameSocket(other, id, spec.socket.clone()).into());
            }
            None if state.stopping.iter().any(|(id, _)| *id == spec.id) => {
                return Err(TogetherError::SameName(spec.id.clone()).into());
            }
            None => {}
        }
        if let Some(user) = state.user_of(name) {
            return Err(HostError::NodeInUse(name.into(), user));
        }
        if node.spec.read_only && !spec.read_only {
            return Err(HostError::ReadOnly(name.into()));
        }
        let threads = self.threads.assign(spec.queues, &spec.iothreads)?;
        let disk = node.disk(&DiskWanted {
            name: spec.id.clone(),
            read_only: spec.read_only,
            cache: spec.cache,
            logical_block: spec.logical_block,
        })?;
        disk.set_limits(&limits)?;
        disk.set_throttle_group(state.group(group.as_deref())?);
        let me = self.me.clone();
        let inherited = self.places.inherited.export(&spec.socket);
        let chosen = inherited.as_ref().and_then(|export| export.write_cache);
        let around = Around {
            events: self.events.clone(),
            write_cache: state.write_caches.remove(&spec.id).or(chosen),
            inherited,
            changed: Box::new(move || {
                if let Some(host) = me.upgrade() {
                    host.keep();
                }
            }),
        };
        let mut export = Export::start(node, disk, spec, threads, around)?;
        export.measure(!matches!(state.watch, Watch::No));
        let ready = export.ready();
        state.exports.insert(spec.id.clone(), export);
        Ok(ready)
    }

    /// Ends the service of a disk, which stays open.
    ///
    /// # Errors
    /// There is none of this name; or a VM is connected, and it is to be removed safely; or what the VM
    /// wrote could not be made durable, in which case it is served no longer all the same.
    pub fn remove_export(&self, id: &str, removal: Removal) -> Result<(), HostError> {
        let mut state = self.state();
        let Some(export) = state.exports.get(id) else {
            return Err(HostError::NoExport(id.into()));
        };
        if removal == Removal::Safe && export.connected() {
            return Err(HostError::Connected(id.into()));
        }
        let stopping = (id.to_owned(), export.node.clone());
        state.stopping.push(stopping);
        let export = state.exports.remove(id);
        drop(state);
        let deadline = Instant::now() + SHUTDOWN;
        let result = match export {
            Some(export) => in_time(id, deadline, move || stop(export)),
            None => Ok(()),
        };
        self.state().stopping.retain(|(other, _)| other != id);
        info!("disk {id}: no longer served");
        let id = id.to_owned();
        let event = Event::BlockExportDeleted(BlockExportDeleted { id });
        self.events.emit(&event);
        result
    }

    /// Makes a disk longer, or finds out that it has become longer, and tells its guest. Without a size it
    /// becomes as long as its file. Returns its size in bytes.
    pub fn resize(&self, name: &str, size: Option<u64>) -> Result<u64, HostError> {
        let node = self.state().top(name)?.node.clone();
        if let Some(size) = size {
            // Its storage may not answer, which is no reason for others to wait.
            node.grow_file(size)
                .map_err(|e| HostError::Resize(name.into(), e))?;
        }
        let state = self.state();
        let export = state.exports.values().find(|e| Arc::ptr_eq(&e.node, &node));
        match export {
            Some(export) => {
                node.look_for_growth(&export.disk);
                export.device.tell_size();
                Ok(export.disk.size())
            }
            None => node
                .file_size()
                .map_err(|e| HostError::Resize(name.into(), e.to_string())),
        }
    }

    /// Puts a disk on another file while its guest runs. The new one must hold the same bytes, and be as
    /// long or longer.
    ///
    /// # Errors
    /// The disk goes on with the file that it had.
    pub fn replace(&self, name: &str, file: FileSpec) -> Result<(), HostError> {
        self.sandbox.check_file(&file)?;
        let (before, spec) = {
            let state = self.state();
            let before = state.top(name)?.node.clone();
            if let FileSpec::Path(path) = &file
                && before.is_on(path)
            {
                info!("disk {name}: is on {} already", path.display());
                return Ok(());
            }
            let mut spec = DiskSpec {
                file,
                ..before.spec.clone()
            };
            spec.for_other_storage(&before.spec.file);
            spec.check_rbd()
                .map_err(|problem| HostError::Unfit(name.into(), problem))?;
            state.check_file(&spec)?;
            (before, spec)
        };
        // Takes seconds where a lock is waited for; nobody else has to wait meanwhile.
        let new = Arc::new(Node::open(spec, &self.places)?);
        let served = {
            let mut state = self.state();
            if !Arc::ptr_eq(&state.top(name)?.node, &before) {
                return Err(HostError::Changed(name.into()));
            }
            if let Some(id) = state.stops(before.name()) {
                return Err(HostError::NodeInUse(name.into(), id));
            }
            let mut exports = state.exports.values();
            let export = exports.find(|e| Arc::ptr_eq(&e.node, &before));
            let served = export.map(|export| export.device.clone());
            state.moving.push(before.name().to_owned());
            served
        };
        // Takes as long as the slowest of the requests under way.
        let moved = self.move_to(served.as_deref(), &new);
        let mut state = self.state();
        state.moving.retain(|moving| moving != before.name());
        moved?;
        info!(
            "disk {name}: was on {}, is on {}",
            before.filename, new.filename
        );
        if let Some(rbd) = before.rbd() {
            rbd.on_change(None);
        }
        let mut exports = state.exports.values_mut();
        if let Some(export) = exports.find(|e| Arc::ptr_eq(&e.node, &before)) {
            export.node = new.clone();
            crate::export::tell_changes(&new, &export.disk, &export.device);
        }
        state.put_on(new);
        Ok(())
    }

    /// Has requests of a disk go on that wait because storage failed to serve them: they are tried again at
    /// once, or, with `report`, the guest is told of their errors.
    pub fn resume(&self, name: &str, report: bool) -> Result<(), HostError> {
        let state = self.state();
        let node = &state.top(name)?.node;
        let export = state.exports.values().find(|e| Arc::ptr_eq(&e.node, node));
        let export = export.ok_or_else(|| HostError::NoExport(name.into()))?;
        export.resume(report);
        Ok(())
    }

    fn move_to(&self, served: Option<&ServedDisk>, new: &Arc<Node>) -> Result<(), HostError> {
        // A restart must find the disk where the guest has written since.
        let keep = || match self.keeper.get() {
            Some(keeper) => keeper.keep(self, Some((new.name(), &new.spec.file))),
            None => Ok(()),
        };
        match served {
            Some(served) => Ok(served.replace(new, keep)?),
            None => keep().map_err(|e| HostError::Keep(new.name().into(), e)),
        }
    }

    /// Looks at all disks for growth.
    pub fn look_for_growth(&self) {
        for export in self.state().exports.values() {
            export.node.look_for_growth(&export.disk);
            // Also if it grew earlier: the front-end may have been away then.
            export.device.tell_size();
        }
    }

    /// Sets a disk's own limits, and the group whose limits it shares.
    pub fn throttle(
        &self,
        name: &str,
        limits: &ThrottleLimits,
        group: Option<&str>,
    ) -> Result<(), HostError> {
        limits.check()?;
        let mut state = self.state();
        let shared = state.group(group)?;
        let name = state.top(name)?.node.name().to_owned();
        let Some(entry) = state.nodes.get_mut(&name) else {
            return Err(HostError::NoNode(name));
        };
        (entry.limits, entry.group) = (*limits, group.map(str::to_owned));
        let node = entry.node.clone();
        let mut exports = state.exports.values();
        if let Some(export) = exports.find(|e| Arc::ptr_eq(&e.node, &node)) {
            export.disk.set_limits(limits)?;
            export.disk.set_throttle_group(shared);
        }
        Ok(())
    }

    /// Adds a group of disks with common limits.
    pub fn add_group(&self, name: &str, limits: &ThrottleLimits) -> Result<(), HostError> {
        let mut state = self.state();
        if state.groups.contains_key(name) {
            return Err(HostError::SameGroup(name.into()));
        }
        if state.groups.len() >= GROUPS_MAX {
            return Err(HostError::TooMany(format!("{GROUPS_MAX} throttle groups")));
        }
        let group = ThrottleGroup::new(name.into(), limits)?;
        state.groups.insert(name.into(), Arc::new(group));
        Ok(())
    }

    /// Changes the limits of a group.
    pub fn change_group(&self, name: &str, limits: &ThrottleLimits) -> Result<(), HostError> {
        match self.state().group(Some(name))? {
            Some(group) => Ok(group.set_limits(limits)?),
            None => Ok(()),
        }
    }

    /// Removes a group that no disk is in.
    pub fn remove_group(&self, name: &str) -> Result<(), HostError> {
        let mut state = self.state();
        let mut nodes = state.nodes.values();
        if let Some(user) = nodes.find(|entry| entry.group.as_deref() == Some(name)) {
            let user = user.node.name().to_owned();
            return Err(HostError::GroupInUse(name.into(), user));
        }
        match state.groups.remove(name) {
            Some(_) => Ok(()),
            None => Err(HostError::NoGroup(name.into())),
        }
    }

    /// Writes what images have only in memory, so that another process finds all of it.
    ///
    /// # Errors
    /// It could not be written, or storage has lost something that another process would not know of.
    pub fn settle(&self) -> Result<(), String> {
        let (nodes, lost): (Vec<_>, Vec<_>) = {
            let state = self.state();
            let nodes = state.nodes.values().map(|entry| entry.node.clone());
            let lost = state.exports.values().filter(|e| e.disk.lost_writes());
            (nodes.collect(), lost.map(|e| e.id.clone()).collect())
        };
        if let Some(id) = lost.first() {
            return Err(format!(
                "disk {id} has lost writes (see PAGECACHE_LOST above)"
            ));
        }
        if let Some(node) = nodes.iter().find(|node| node.rbd().is_some()) {
            return Err(format!(
                "disk {} is in a Ceph cluster, whose lock on the image cannot be handed over; restart ringdisk \
                 instead",
                node.name()
            ));
        }
        let settle =
            |node: &Arc<Node>| node.settle().map_err(|e| format!("{}: {e}", node.filename));
        nodes.iter().try_for_each(settle)
    }

    /// Asks all exports to pause.
    pub fn pause(&self) -> Vec<Pausing> {
        let state = self.state();
        let pausing = state.exports.values().map(|export| Pausing {
            id: export.id.clone(),
            socket: export.socket.clone(),
            write_cache: export.device.chosen_write_cache(),
            paused: export.pause(),
        });
        pausing.collect()
    }

    /// Copies of the descriptors of all files that are open for disks.
    ///
    /// # Errors
    /// There are no more to be had.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let state = self.state();
        // A node that lies on another has the same.
        let nodes = state.nodes.values().filter(|entry| entry.child.is_none());
        let mut files = Vec::new();
        for entry in nodes {
            files.extend(entry.node.copies()?);
        }
        Ok(files)
    }

    /// Names of disks that are left to other hosts for now.
    pub fn away(&self) -> Vec<String> {
        let state = self.state();
        let nodes = state.nodes.values().map(|entry| &entry.node);
        let away = nodes.filter(|node| !node.is_here());
        away.map(|node| node.name().to_owned()).collect()
    }

    /// The lock on the directory in which state is kept.
    ///
    /// # Errors
    /// There is no descriptor to be had.
    pub fn state_lock(&self) -> io::Result<Option<OwnedFd>> {
        let lock = self.keeper.get().map(|keeper| keeper.lock().try_clone());
        Ok(lock.transpose()?.map(OwnedFd::from))
    }

    /// Keeps what is changed from now on, and what was until now. It can be set once.
    pub fn set_keeper(&self, keeper: Keeper) {
        let _ = self.keeper.set(keeper);
        self.keep();
    }

    /// Keeps how things are now, so that they are so after a restart.
    pub fn keep(&self) {
        if let Some(keeper) = self.keeper.get()
            && let Err(e) = keeper.keep(self, None)
        {
            error!("what was changed is in force, and will be forgotten at a restart: {e}");
        }
    }

    /// The operator has written this down, from now on.
    pub fn set_written(&self, written: Written) {
        if let Some(keeper) = self.keeper.get() {
            keeper.set_written(written);
        }
        self.keep();
    }

    /// What guests had chosen of their write caches, for exports that will be added.
    pub fn remember_write_caches(&self, choices: &BTreeMap<String, bool>) {
        self.state().write_caches.clone_from(choices);
    }

    /// All that is served.
    pub fn inventory(&self) -> Inventory {
        let state = self.state();
        let node = |entry: &NodeEntry| ChangedNode {
            disk: entry.spec(),
            over: entry.child.clone(),
        };
        let export = |export: &Export| ChangedExport {
            id: export.id.clone(),
            node: export.node.name().to_owned(),
            socket: export.spec.socket.clone(),
            socket_access: export.spec.socket_access,
            queues: export.spec.queues,
            queue_size: export.spec.queue_size,
            iothreads: export.spec.iothreads.clone(),
            read_only: export.spec.read_only,
            cache: export.spec.cache,
            logical_block: export.spec.logical_block,
        };
        let group = |(name, group): (&String, &Arc<ThrottleGroup>)| (name.clone(), group.limits());
        let choice =
            |export: &Export| Some((export.id.clone(), export.device.chosen_write_cache()?));
        Inventory {
            nodes: state.nodes.values().map(node).collect(),
            exports: state.exports.values().map(export).collect(),
            groups: state.groups.iter().map(group).collect(),
            threads: self.threads.added(),
            write_caches: state.exports.values().filter_map(choice).collect(),
        }
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

    /// A disk that is served, as it would have to be written to be served as it is now.
    pub fn spec_of(&self, name: &str) -> Option<DiskSpec> {
        let state = self.state();
        let entry = state.nodes.get(name)?;
        let served = state.exports.get(name)?;
        Arc::ptr_eq(&served.node, &entry.node).then(|| entry.spec())
    }

    /// Calls `look` for every disk, in the order of their names.
    pub fn each(&self, mut look: impl FnMut(Look<'_>)) {
        let state = self.state();
        for entry in state.nodes.values() {
            let mut exports = state.exports.values();
            look(Look {
                node: &entry.node,
                export: exports.find(|e| Arc::ptr_eq(&e.node, &entry.node)),
                limits: &entry.limits,
                group: entry.group.as_deref(),
            });
        }
    }

    /// Measures the latencies of all disks from now on.
    pub fn watch_always(&self) {
        self.state().set_watch(Watch::Always);
    }

    /// Measures the latencies of all disks for as long as somebody asks for statistics now and then.
    pub fn watch(self: &Arc<Self>) {
        let mut state = self.state();
        let until = Watch::Until(Instant::now() + WATCH);
        match state.watch {
            Watch::Always => {}
            Watch::Until(_) => state.watch = until,
            Watch::No => {
                let host = Arc::downgrade(self);
                let stop_later = move || {
                    let mut wait = WATCH;
                    loop {
                        thread::sleep(wait);
                        match host.upgrade().and_then(|host| host.end_watch()) {
                            Some(more) => wait = more,
                            None => return,
                        }
                    }
                };
                let thread = thread::Builder::new().name("watch".into());
                match thread.spawn(stop_later) {
                    Ok(_) => state.set_watch(until),
                    Err(e) => warn!("latencies are not measured, for want of a thread: {e}"),
                }
            }
        }
    }

    /// Measures no longer if nobody has asked lately; or how long to wait.
    fn end_watch(&self) -> Option<Duration> {
        let mut state = self.state();
        let Watch::Until(until) = state.watch else {
            return None;
        };
        let more = until.saturating_duration_since(Instant::now());
        if more.is_zero() {
            state.set_watch(Watch::No);
            return None;
        }
        Some(more)
    }

    /// Finishes what is under way, disconnects everybody, and makes everything durable. Storage that does
    /// not answer is not waited for longer than a minute.
    ///
    /// # Errors
    /// The last disk that could not be made durable.
    pub fn shut_down(&self) -> Result<(), HostError> {
        // What has been handed over is another's.
        let Ok(_staying) = self.handing.stay_after() else {
            return Ok(());
        };
        if let Some(keeper) = self.keeper.get() {
            keeper.end();
        }
        let deadline = Instant::now() + SHUTDOWN;
        let State { nodes, exports, .. } = std::mem::take(&mut *self.state());
        // All at once, rather than each after the other.
        exports.values().for_each(Export::tell_to_stop);
        let stops = exports.into_values().map(|export| {
            let id = export.id.clone();
            (id.clone(), begin(&id, move || stop(export)))
        });
        let mut result = Ok(());
        let stops: Vec<_> = stops.collect();
        let stopped = stops
            .into_iter()
            .map(|(id, task)| end(&id, deadline, &task?));
        for error in stopped.filter_map(Result::err) {
            error!("{error}");
            result = Err(error);
        }
        // Once no export uses them any more.
        let closes = nodes.into_iter().map(|(name, entry)| {
            let task = begin(&name, move || sync(&entry.node));
            (name, task)
        });
        let closes: Vec<_> = closes.collect();
        let closed = closes
            .into_iter()
            .map(|(id, task)| end(&id, deadline, &task?));
        for error in closed.filter_map(Result::err) {
            error!("{error}");
            result = Err(error);
        }
        result
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A disk, as `each` shows it.
pub struct Look<'a> {
    pub node: &'a Node,
    /// How it is served, if it is.
    pub export: Option<&'a Export>,
    pub limits: &'a ThrottleLimits,
    pub group: Option<&'a str>,
}

impl Look<'_> {
    /// Bytes that the guest can address.
    pub fn size(&self) -> u64 {
        match self.export {
            Some(export) => export.disk.size(),
            None => self.node.file_size().unwrap_or(0),
        }
    }

    pub fn cache(&self) -> CacheMode {
        self.node.spec.cache
    }
}

impl State {
    fn set_watch(&mut self, watch: Watch) {
        let on = !matches!(watch, Watch::No);
        self.exports.values_mut().for_each(|e| e.measure(on));
        self.watch = watch;
    }

    fn entry(&self, name: &str) -> Result<&NodeEntry, HostError> {
        let entry = self.nodes.get(name);
        entry.ok_or_else(|| HostError::NoNode(name.into()))
    }

    fn check_new_node(&self, spec: &DiskSpec) -> Result<(), HostError> {
        if self.nodes.contains_key(&spec.name) {
            return Err(TogetherError::SameName(spec.name.clone()).into());
        }
        if self.nodes.len() >= DISKS_MAX {
            return Err(HostError::TooMany(format!("{DISKS_MAX} disks")));
        }
        self.group(spec.throttle_group.as_deref()).map(drop)
    }

    /// Whether a disk may be put on its file, so far as the others here are concerned. The locks would tell
    /// too, but neither at once nor by whom it is used.
    fn check_file(&self, spec: &DiskSpec) -> Result<(), HostError> {
        let path = match &spec.file {
            FileSpec::Path(path) => path,
            FileSpec::Rbd(location) => {
                let mut entries = self.nodes.values();
                let both_read = |node: &Node| node.spec.read_only && spec.read_only;
                let same = |node: &Node| matches!(&node.spec.file, FileSpec::Rbd(l) if l.same_image(location));
                return match entries.find(|e| same(&e.node) && !both_read(&e.node)) {
                    Some(entry) => {
                        let name = entry.node.name().to_owned();
                        Err(HostError::FileInUse(location.to_string().into(), name))
                    }
                    None => Ok(()),
                };
            }
            FileSpec::Null(_) => return Ok(()),
        };
        let excludes = |node: &Node| !(node.spec.read_only && spec.read_only) && node.is_on(path);
        match self.nodes.values().find(|entry| excludes(&entry.node)) {
            Some(entry) => {
                let name = entry.node.name().to_owned();
                Err(HostError::FileInUse(path.clone(), name))
            }
            None => Ok(()),
        }
    }

    /// The disk that a node is part of: the node that lies on it, or itself.
    fn top(&self, name: &str) -> Result<&NodeEntry, HostError> {
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

    /// Takes a node in place of that of the same name, and of those below it.
    fn put_on(&mut self, new: Arc<Node>) {
        let mut name = Some(new.name().to_owned());
        while let Some(entry) = name.and_then(|name| self.nodes.get_mut(&name)) {
            let spec = DiskSpec {
                file: new.spec.file.clone(),
                ..entry.node.spec.clone()
            };
            entry.node = match entry.node.name() == new.name() {
                true => new.clone(),
                false => Arc::new(new.renamed(spec)),
            };
            name = entry.child.clone();
        }
    }

    fn group(&self, name: Option<&str>) -> Result<Option<Arc<ThrottleGroup>>, HostError> {
        let Some(name) = name else {
            return Ok(None);
        };
        let group = self.groups.get(name).cloned();
        group
            .map(Some)
            .ok_or_else(|| HostError::NoGroup(name.into()))
    }

    /// The export or node that uses a node.
    fn user_of(&self, name: &str) -> Option<String> {
        let mut nodes = self.nodes.values();
        let above = nodes.find(|entry| entry.child.as_deref() == Some(name));
        let mut exports = self.exports.values();
        let export = exports.find(|e| e.node.name() == name);
        export
            .map(|e| e.id.clone())
            .or(above.map(|entry| entry.node.name().to_owned()))
            .or_else(|| self.stops(name))
            .or_else(|| self.moving.iter().find(|moving| *moving == name).cloned())
    }

    /// The export of a node that still finishes what is under way.
    fn stops(&self, name: &str) -> Option<String> {
        let mut stopping = self.stopping.iter();
        let found = stopping.find(|(_, node)| node.name() == name);
        found.map(|(id, _)| id.clone())
    }
}

type Task = mpsc::Receiver<Result<(), HostError>>;

/// Does what may wait for storage in a thread of its own.
fn begin(
    name: &str,
    work: impl FnOnce() -> Result<(), HostError> + Send + 'static,
) -> Result<Task, HostError> {
    let (done, result) = mpsc::channel();
    let thread = thread::Builder::new().name("closing".into());
    thread
        .spawn(move || drop(done.send(work())))
        .map_err(|e| HostError::Sync(name.into(), e))?;
    Ok(result)
}

/// Waits for it, but not for ever: the thread stays with what it waits for.
fn end(name: &str, deadline: Instant, task: &Task) -> Result<(), HostError> {
    // What is done already counts, however late it is.
    let left = deadline.saturating_duration_since(Instant::now());
    let left = left.max(Duration::from_millis(100));
    match task.recv_timeout(left) {
        Ok(result) => result,
        Err(_) => Err(HostError::Hangs(name.into())),
    }
}

fn in_time(
    name: &str,
    deadline: Instant,
    work: impl FnOnce() -> Result<(), HostError> + Send + 'static,
) -> Result<(), HostError> {
    end(name, deadline, &begin(name, work)?)
}

/// Waits until what is under way is finished, and makes it durable. The disk knows what its page cache has
/// lost, which its file does not tell twice.
fn stop(export: Export) -> Result<(), HostError> {
    let disk = export.disk.clone();
    drop(export);
    if disk.is_abandoned() {
        return Err(HostError::Hangs(disk.name.clone()));
    }
    disk.sync()
        .map_err(|e| HostError::Sync(disk.name.clone(), e))
}

fn sync(node: &Node) -> Result<(), HostError> {
    let name = node.name();
    node.sync().map_err(|e| HostError::Sync(name.to_owned(), e))
}
