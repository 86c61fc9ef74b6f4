//! All that this process serves, and every change to it: whoever asks (the command line, the
//! configuration, the control socket) comes here.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;
use tracing::{error, info};

use crate::export::{Export, ExportError};
use crate::iothreads::{IoThreadError, IoThreads};
use crate::node::{Node, NodeError};
use crate::paste::Ready;
use crate::spec::DiskSpec;

/// Disks that one process serves at most: each takes a thread and a few descriptors.
const DISKS_MAX: usize = 4096;

pub struct Host {
    pub threads: IoThreads,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<String, Arc<Node>>,
    exports: BTreeMap<String, Export>,
}

/// How a disk is served, apart from what it is.
#[derive(Clone, Debug)]
pub struct ExportSpec {
    pub id: String,
    pub socket: PathBuf,
    pub queues: u16,
    pub queue_size: u16,
    /// I/O threads by id or number; none for the next ones of the pool.
    pub iothreads: Vec<String>,
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
    #[error("there is a disk '{0}' already; choose another name with name=")]
    SameName(String),
    #[error("disks '{0}' and '{1}' have the same socket, {2}")]
    SameSocket(String, String, PathBuf),
    #[error("there is no disk '{0}'; 'ringdisk list' shows those that are served")]
    NoNode(String),
    #[error("there is no export '{0}'")]
    NoExport(String),
    #[error("disk '{0}' is in use by export '{1}'; remove that first")]
    NodeInUse(String, String),
    #[error("a VM is connected to disk '{0}'; shut it down first, or force the removal")]
    Connected(String),
    #[error("{DISKS_MAX} disks are served already; use another process for more")]
    TooMany,
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(transparent)]
    IoThread(#[from] IoThreadError),
    #[error("disk {0}: cannot be resized: {1}")]
    Resize(String, String),
    #[error("{0} could not be made durable, acknowledged writes may be lost: {1}")]
    Sync(String, io::Error),
}

impl Host {
    pub fn new(threads: IoThreads) -> Self {
        Self {
            threads,
            state: Mutex::default(),
        }
    }

    /// Opens a disk and serves it, under one name.
    ///
    /// # Errors
    /// Nothing is left of it then.
    pub fn attach(&self, spec: DiskSpec) -> Result<Ready, HostError> {
        let export = ExportSpec {
            id: spec.name.clone(),
            socket: spec.socket_path(),
            queues: spec.queues,
            queue_size: spec.queue_size,
            iothreads: spec.iothreads.clone(),
        };
        let name = spec.name.clone();
        self.add_node(spec)?;
        self.add_export(&name, export).inspect_err(|_| {
            let _ = self.remove_node(&name);
        })
    }

    /// Ends the service of a disk and closes it.
    ///
    /// # Errors
    /// There is none of this name; or a VM is connected, and it is to be removed safely; or what the VM
    /// wrote could not be made durable, in which case the disk is gone all the same.
    pub fn detach(&self, name: &str, removal: Removal) -> Result<(), HostError> {
        if self.state().exports.contains_key(name) {
            self.remove_export(name, removal)?;
        }
        self.remove_node(name)
    }

    /// Opens a disk without serving it.
    pub fn add_node(&self, spec: DiskSpec) -> Result<(), HostError> {
        let name = spec.name.clone();
        let check = |state: &State| match () {
            () if state.nodes.contains_key(&name) => Err(HostError::SameName(name.clone())),
            () if state.nodes.len() >= DISKS_MAX => Err(HostError::TooMany),
            () => Ok(()),
        };
        check(&self.state())?;
        // Takes seconds where a lock is waited for; nobody else has to wait meanwhile.
        let node = Arc::new(Node::open(spec)?);
        let mut state = self.state();
        check(&state)?;
        state.nodes.insert(name.clone(), node);
        Ok(())
    }

    /// Closes a disk that is not served.
    ///
    /// # Errors
    /// There is none of this name, or it is served; or what was written could not be made durable, in
    /// which case it is closed all the same.
    pub fn remove_node(&self, name: &str) -> Result<(), HostError> {
        let mut state = self.state();
        if !state.nodes.contains_key(name) {
            return Err(HostError::NoNode(name.into()));
        }
        if let Some(export) = state.exports.values().find(|e| e.node.name() == name) {
            return Err(HostError::NodeInUse(name.into(), export.id.clone()));
        }
        let node = state.nodes.remove(name);
        drop(state);
        node.map_or(Ok(()), |node| sync(&node))
    }

    /// Serves an opened disk. Returns what to paste.
    pub fn add_export(&self, node: &str, spec: ExportSpec) -> Result<Ready, HostError> {
        let mut state = self.state();
        let Some(node) = state.nodes.get(node).cloned() else {
            return Err(HostError::NoNode(node.into()));
        };
        for other in state.exports.values() {
            if other.id == spec.id {
                return Err(HostError::SameName(spec.id));
            }
            if other.node.name() == node.name() {
                return Err(HostError::NodeInUse(node.name().into(), other.id.clone()));
            }
            if other.socket == spec.socket {
                let (other, socket) = (other.id.clone(), spec.socket);
                return Err(HostError::SameSocket(other, spec.id, socket));
            }
        }
        let threads = self.threads.assign(spec.queues, &spec.iothreads)?;
        let (id, socket) = (spec.id.clone(), &spec.socket);
        let export = Export::start(id, node, socket, spec.queue_size, threads)?;
        let ready = export.ready();
        state.exports.insert(spec.id, export);
        Ok(ready)
    }

    /// Ends the service of a disk, which stays open.
    pub fn remove_export(&self, id: &str, removal: Removal) -> Result<(), HostError> {
        let mut state = self.state();
        let Some(export) = state.exports.get(id) else {
            return Err(HostError::NoExport(id.into()));
        };
        if removal == Removal::Safe && export.connected() {
            return Err(HostError::Connected(id.into()));
        }
        let export = state.exports.remove(id);
        drop(state);
        // Waits until what is under way is finished.
        drop(export);
        info!("disk {id}: no longer served");
        Ok(())
    }

    /// Makes a disk longer, or finds out that it has become longer, and tells its guest. Without a size it
    /// becomes as long as its file.
    pub fn resize(&self, name: &str, size: Option<u64>) -> Result<u64, HostError> {
        let node = self.node(name)?;
        if let Some(size) = size {
            node.grow_file(size)
                .map_err(|e| HostError::Resize(name.into(), e))?;
        }
        node.look_for_growth();
        self.tell_size(&node);
        Ok(node.disk.size())
    }

    /// Looks at all disks for growth.
    pub fn look_for_growth(&self) {
        let nodes: Vec<_> = self.state().nodes.values().cloned().collect();
        for node in nodes {
            node.look_for_growth();
            // Also if it grew earlier: the front-end may have been away then.
            self.tell_size(&node);
        }
    }

    /// What to paste for every disk that is served, in the order of their names.
    pub fn ready(&self) -> Vec<Ready> {
        self.state().exports.values().map(Export::ready).collect()
    }

    /// Calls `look` for every disk, with its export if it is served.
    pub fn each(&self, mut look: impl FnMut(&Node, Option<&Export>)) {
        let state = self.state();
        for node in state.nodes.values() {
            let export = state.exports.values();
            look(
                node,
                export.into_iter().find(|e| Arc::ptr_eq(&e.node, node)),
            );
        }
    }

    /// Finishes what is under way, disconnects everybody, and makes everything durable.
    ///
    /// # Errors
    /// The last disk that could not be made durable.
    pub fn shut_down(&self) -> Result<(), HostError> {
        let State { nodes, exports } = std::mem::take(&mut *self.state());
        // All at once, rather than each after the other.
        exports.values().for_each(Export::tell_to_stop);
        drop(exports);
        let mut result = Ok(());
        for node in nodes.values() {
            if let Err(e) = sync(node) {
                error!("{e}");
                result = Err(e);
            }
        }
        result
    }

    fn node(&self, name: &str) -> Result<Arc<Node>, HostError> {
        let node = self.state().nodes.get(name).cloned();
        node.ok_or_else(|| HostError::NoNode(name.into()))
    }

    fn tell_size(&self, node: &Arc<Node>) {
        let state = self.state();
        let exports = state.exports.values();
        for export in exports.filter(|e| Arc::ptr_eq(&e.node, node)) {
            export.device.tell_size();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn sync(node: &Node) -> Result<(), HostError> {
    let name = node.name();
    node.sync().map_err(|e| HostError::Sync(name.to_owned(), e))
}

/// Whether two disks of a list cannot be served together.
///
/// # Errors
/// Which two, and why.
pub fn check_together(specs: &[DiskSpec]) -> Result<(), HostError> {
    let mut sockets: BTreeMap<PathBuf, &str> = BTreeMap::new();
    for (i, spec) in specs.iter().enumerate() {
        if specs[..i].iter().any(|other| other.name == spec.name) {
            return Err(HostError::SameName(spec.name.clone()));
        }
        let path = spec.socket_path();
        if let Some(other) = sockets.insert(path.clone(), &spec.name) {
            let (other, name) = (other.to_owned(), spec.name.clone());
            return Err(HostError::SameSocket(other, name, path));
        }
    }
    Ok(())
}
