//! Opens disks and serves them, at run time.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use engine::Identity;
use tracing::{info, warn};

use super::deadline::SHUTDOWN_TIMEOUT;
use super::replace::close;
use super::{Claim, NodeEntry, Server, ServerError, identity};
use crate::config::export::ExportSpec;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::node::context::OpenContext;
use crate::node::{Node, NodeError};
use crate::server::connection_info::ConnectionInfo;
use crate::socket::Socket;

/// How long a disk waits for somebody who only reads its file.
const READERS: Duration = Duration::from_secs(1);

impl Server {
    /// Opens a disk and serves it under its name.
    ///
    /// # Errors
    /// It is not served, and closed again.
    pub fn attach(&self, claim: &Claim<'_>, spec: DiskSpec) -> Result<ConnectionInfo, ServerError> {
        let name = spec.name.clone();
        let export = ExportSpec::from(&spec);
        let open = |server: &Self, spec: DiskSpec| {
            if let Err(e) = server.check_file_not_left(&spec) {
                warn!("disk {}: is served nevertheless: {e}", spec.name);
            }
            server.open_new(spec)
        };
        let node = self.open_in_time(spec, open)?;
        let served = self.serve_opened(claim, node, &export, || Ok(None))?;
        self.came_back(claim, &name);
        Ok(served)
    }

    /// The same, for a manager of VMs: not from a file that the disk has left, here or on another host, from which its VM comes.
    ///
    /// # Errors
    /// It is not served, and closed again.
    pub fn attach_current(
        &self,
        claim: &Claim<'_>,
        spec: DiskSpec,
    ) -> Result<ConnectionInfo, ServerError> {
        self.attach_as(claim, spec, |server, spec| {
            let node = server.open_current(spec)?;
            let deadline = Instant::now() + READERS;
            while node.is_read_elsewhere() {
                if Instant::now() >= deadline {
                    let file = node.filename.clone();
                    close(node.into(), "which is not served");
                    return Err(ServerError::ReadElsewhere(file));
                }
                thread::sleep(Duration::from_millis(50));
            }
            Ok(node)
        })
    }

    fn attach_as(
        &self,
        claim: &Claim<'_>,
        spec: DiskSpec,
        open: impl FnOnce(&Self, DiskSpec) -> Result<Node, ServerError> + Send + 'static,
    ) -> Result<ConnectionInfo, ServerError> {
        let name = spec.name.clone();
        let export = ExportSpec::from(&spec);
        let node = self.open_in_time(spec, open)?;
        let served = self.serve_opened(claim, node, &export, || Ok(None))?;
        self.came_back(claim, &name);
        Ok(served)
    }

    /// Serves an opened disk at `socket`, or at a new one.
    ///
    /// # Errors
    /// It is not served, and closed again.
    pub(super) fn serve_opened(
        &self,
        claim: &Claim<'_>,
        node: Node,
        export: &ExportSpec,
        socket: impl FnOnce() -> Result<Option<Socket>, ServerError>,
    ) -> Result<ConnectionInfo, ServerError> {
        let name = node.name().to_owned();
        self.add_opened(claim, node)?;
        let served = socket().and_then(|socket| self.add_export_at(claim, &name, export, socket));
        match &served {
            Ok(_) => self.note_served(&name),
            Err(_) => drop(self.remove_node_within(claim, &name, SHUTDOWN_TIMEOUT)),
        }
        served
    }

    /// Like [`attach`](Self::attach), with the disk's name in errors.
    pub(super) fn attach_at_start(&self, spec: DiskSpec) -> Result<ConnectionInfo, ServerError> {
        let name = spec.name.clone();
        let claim = self.claim("start", || vec![&name])?;
        // A guest continues with what it has.
        let attached = if self.context.inherited.has_disk(&name) {
            self.attach(&claim, spec)
        } else {
            self.attach_as(&claim, spec, Self::open_current)
        };
        attached.map_err(|e| e.of_disk(&name))
    }

    /// Opens a disk without serving it.
    pub fn add_node(&self, claim: &Claim<'_>, spec: DiskSpec) -> Result<(), ServerError> {
        self.add_opened(claim, self.open_in_time(spec, Self::open_new)?)
    }

    /// Opens a disk. If its storage does not answer in time, it is not opened: when the storage answers, the file is closed
    /// again.
    pub(super) fn open_in_time(
        &self,
        spec: DiskSpec,
        open: impl FnOnce(&Self, DiskSpec) -> Result<Node, ServerError> + Send + 'static,
    ) -> Result<Node, ServerError> {
        let must_wait =
            self.context.inherited.is_uncommitted() || self.context.rights.will_change();
        if must_wait || !matches!(spec.file, FileSpec::Path(_)) {
            return open(self, spec);
        }
        let (name, file) = (spec.name.clone(), spec.file.clone());
        let open = move |server: &Self| open(server, spec);
        let close_late = |server: &Self, node: Node| {
            // After a handover, only the new process closes files.
            if server.handover.wait_and_inhibit().is_err() {
                return;
            }
            let name = node.name().to_owned();
            info!(
                "disk {name}: its file is open now, and is closed again, since no command waits for it any more; try again"
            );
            close(node.into(), "which was to be served");
        };
        self.in_time(&name, Some(&file), open, close_late)
            .map_err(|e| match e {
                ServerError::NotResponding(name) => ServerError::Silent(name, format!(
                    "{file}: its storage does not answer, or its image takes long to repair; the disk is not served. When \
                     that has ended, the log says so; then try again"
                )),
                e => e,
            })
    }

    pub(super) fn open_new(&self, spec: DiskSpec) -> Result<Node, ServerError> {
        self.open_new_in(spec, &self.context)
    }

    /// Opens a disk, unless it has left this file.
    pub(super) fn open_current(&self, spec: DiskSpec) -> Result<Node, ServerError> {
        self.open_current_in(spec, &self.context)
    }

    pub(super) fn open_current_in(
        &self,
        spec: DiskSpec,
        context: &OpenContext,
    ) -> Result<Node, ServerError> {
        // First: opening it may change it.
        self.check_file_not_left(&spec)?;
        let opened = self.open_new_in(spec, context)?;
        match self.check_not_left(&opened) {
            Ok(()) => Ok(opened),
            Err(e) => {
                close(opened.into(), "which is not served");
                Err(e)
            }
        }
    }

    pub(super) fn open_new_in(
        &self,
        spec: DiskSpec,
        context: &OpenContext,
    ) -> Result<Node, ServerError> {
        let rights = &self.context.rights;
        // The identity of the data file that the configuration names counts.
        let named = spec.data_file.clone().map(FileSpec::Path);
        let named = named.unwrap_or_else(|| spec.file.clone());
        let spec = rights.with_file(&named, !spec.read_only, || {
            self.context.inherited.on_its_file(spec)
        });
        let there = rights.with_file(&spec.file, !spec.read_only, || {
            self.sandbox.check_disk(&spec)?;
            Ok::<_, ServerError>(identity(&spec.file))
        })?;
        {
            let state = self.state();
            state.check_new_node(&spec)?;
            state.check_file(&spec, there)?;
            state.check_file_not_restarting(&spec, there)?;
        }
        // Without the lock: waiting for a file lock takes seconds.
        Node::open(spec, context, &[]).map_err(|e| self.whose(e))
    }

    /// Opens and locks the file of a disk; see [`Node::open`]. If a disk of this process has the lock, the error names
    /// it.
    pub(super) fn open(&self, spec: DiskSpec, ours: &[Identity]) -> Result<Node, ServerError> {
        Node::open(spec, &self.context, ours).map_err(|e| self.whose(e))
    }

    /// A detached disk as it was served last, if that was not from the configured file.
    pub(super) fn detached_from(&self, name: &str) -> Option<DiskSpec> {
        let state = self.state();
        let mut detached = state.detached.iter();
        let found = detached.find(|detached| detached.disk.name == name);
        found.map(|detached| detached.disk.clone())
    }

    fn whose(&self, error: NodeError) -> ServerError {
        let Some(path) = error.locked().map(PathBuf::from) else {
            return error.into();
        };
        let Ok(there) = fs::metadata(&path).map(|file| Identity::of(&file)) else {
            return error.into();
        };
        let state = self.state();
        let mut nodes = state.nodes.values().map(|entry| &entry.node);
        if let Some(node) = nodes.find(|node| node.uses(there).is_some()) {
            return ServerError::FileInUse(path, node.name().into());
        }
        let mut ended = state.still_open.iter();
        match ended.find(|(_, files)| files.contains(&there)) {
            Some((name, _)) => ServerError::StillOpen(path, name.clone()),
            None => error.into(),
        }
    }

    fn add_opened(&self, claim: &Claim<'_>, node: Node) -> Result<(), ServerError> {
        let (name, limits) = (node.name().to_owned(), node.spec.limits);
        claim.covers(&name);
        self.backups.check_name(&name)?;
        let group = node.spec.throttle_group.clone();
        let labels = node.spec.labels.clone();
        self.watch_damage(&node);
        node.add_temporary_bitmaps(self.context.inherited.bitmaps(&name));
        let mut state = self.state();
        state.check_new_node(&node.spec)?;
        state.check_not_restarting(claim, &node)?;
        if let Some(file) = node.file_identity() {
            state.still_open.retain(|(_, files)| !files.contains(&file));
        }
        let entry = NodeEntry {
            node: Arc::new(node),
            limits,
            group,
            labels,
            child: None,
        };
        state.nodes.insert(name, entry);
        Ok(())
    }
}
