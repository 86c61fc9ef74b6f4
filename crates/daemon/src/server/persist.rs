//! Persists changes that were made at run time: see [`store`](crate::state::store).

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use datapath::ThrottleGroup;
use tracing::error;

use super::{DISKS_MAX, NodeEntry, Server, ServerError, ServerState};
use crate::config::export::ExportSpec;
use crate::config::sockets;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::server::export::Export;
use crate::state::store::{Configured, Inventory, StateStore, write_left};
use crate::state::{DiskOverride, NodeOverride, Overrides, Remembered, Start};

/// Time between two writes of what guests have chosen.
const CHOICES: Duration = Duration::from_secs(1);

/// The most queues that a disk has by default.
const QUEUES_DEFAULT_MAX: usize = 16;

/// Limit of exports and sockets of which something is remembered: as many as can be served, and as many again that were removed.
const REMEMBERED_MAX: usize = 2 * DISKS_MAX;

impl Server {
    /// Persists all changes, those until now and those to come. Called once.
    pub fn set_store(&self, store: StateStore) {
        let _ = self.store.set(store);
        self.persist();
    }

    /// Where to save what disks leave until [`set_store`](Self::set_store). Called once, before disks are started.
    pub fn set_state_directory(&self, directory: &Path) {
        let _ = self.state_directory.set(directory.to_owned());
    }

    /// Persists what disks have left, before everything else. Logs a failure.
    pub(super) fn persist_left(&self) {
        let left = || self.state().left.clone();
        let saved = match (self.store.get(), self.state_directory.get()) {
            (Some(store), _) => store.save_left(left),
            (None, Some(directory)) => write_left(directory, &left()),
            (None, None) => Ok(()),
        };
        if let Err(e) = saved {
            error!("which files disks have left is not saved: {e}");
        }
    }

    /// Persists the current state. Logs a failure.
    pub fn persist(&self) {
        let _ = self.save();
    }

    /// How many changes could not be persisted until now.
    pub fn unsaved_changes(&self) -> u64 {
        self.store.get().map_or(0, StateStore::unsaved_changes)
    }

    /// The same as [`persist`](Self::persist), for a command that began when there were so many
    /// [unsaved changes](Self::unsaved_changes).
    ///
    /// # Errors
    /// What has changed since could not be persisted, by this attempt or by that of another command.
    pub fn persist_change(&self, before: u64) -> Result<(), ServerError> {
        match self.save() {
            Err(error) if self.unsaved_changes() > before => Err(ServerError::Unsaved(error)),
            _ => Ok(()),
        }
    }

    fn save(&self) -> io::Result<()> {
        let saved = self
            .store
            .get()
            .map(|store| store.save(|| self.inventory()));
        let saved = saved.unwrap_or(Ok(()));
        saved.inspect_err(|e| error!("changes apply, but a restart will lose them: {e}"))
    }

    /// Like [`persist`](Self::persist), for changes that a guest can make at any rate: writes at most once a second for all
    /// guests together.
    pub fn persist_choice(&self) {
        let mut state = self.state();
        if state.persist_scheduled {
            return;
        }
        let since = state.choices_persisted.map(|kept| kept.elapsed());
        let wait = CHOICES.saturating_sub(since.unwrap_or(CHOICES));
        if wait.is_zero() {
            state.choices_persisted = Some(Instant::now());
            drop(state);
            return self.persist();
        }
        state.persist_scheduled = true;
        drop(state);
        let me = self.me.clone();
        let later = thread::Builder::new().name("keep".to_owned());
        let later = later.spawn(move || {
            thread::sleep(wait);
            let Some(server) = me.upgrade() else { return };
            // After a handover, the new process persists.
            let Ok(_inhibitor) = server.handover.wait_and_inhibit() else {
                return;
            };
            let mut state = server.state();
            (state.choices_persisted, state.persist_scheduled) = (Some(Instant::now()), false);
            drop(state);
            server.persist();
        });
        if later.is_err() {
            self.state().persist_scheduled = false;
            self.persist();
        }
    }

    /// Sets what the operator has configured, after a start or a reload.
    ///
    /// # Errors
    /// It could not be persisted, or what was changed before.
    pub fn set_configured(&self, configured: Configured) -> io::Result<()> {
        self.protect_configured(&configured.disks);
        {
            let mut state = self.state();
            state.configured = configured;
            let ServerState {
                detached,
                configured,
                ..
            } = &mut *state;
            let find = |name: &str| configured.disks.iter().find(|disk| disk.name == name);
            // Until it is served again, it was on that file last.
            detached.retain(|detached| find(&detached.disk.name).is_some());
        }
        self.save()
    }

    /// Keeps the images of other disks from building on the configured files of these, which may not be served.
    pub(super) fn protect_configured(&self, disks: &[DiskSpec]) {
        let file = |disk: &DiskSpec| match &disk.file {
            FileSpec::Path(path) => Some((disk.name.clone(), path.clone())),
            FileSpec::Rbd(_) | FileSpec::Null(_) => None,
        };
        let files = disks.iter().filter_map(file).collect();
        self.context.own_files.set_configured(files);
    }

    /// What the operator has configured, as far as it applies.
    pub fn configured(&self) -> Configured {
        self.state().configured.clone()
    }

    /// Remembers the last files of disks that were detached before this process started, where these files differ from
    /// the configured ones.
    pub fn remember_detached(&self, overrides: &Overrides) {
        let mut state = self.state();
        let detached = overrides.disks.iter().filter(|DiskOverride { disk, .. }| {
            overrides.is_detached(&disk.name) && !state.nodes.contains_key(&disk.name)
        });
        let detached: Vec<_> = detached.cloned().collect();
        state.detached.extend(detached);
    }

    /// Remembers what guests depend on, for exports that are configured or will be added, of which these disks are served.
    /// Others are gone for good.
    pub(super) fn remember(&self, configured: &Configured, overrides: &Overrides, served: &Start) {
        let Overrides {
            detached,
            nodes,
            exports,
            ..
        } = overrides;
        let disks = served.disks.iter().chain(&served.attached);
        let nodes = nodes.iter().map(|node| &node.disk);
        let disks = disks.chain(nodes).chain(detached).chain(&configured.disks);
        let each = |disk: &DiskSpec| (disk.name.clone(), sockets::path(disk));
        let exports = (exports.iter()).map(|it| (it.spec.id.clone(), it.spec.socket.clone()));
        let mut all: BTreeMap<String, PathBuf> = BTreeMap::new();
        for (id, socket) in disks.map(each).chain(exports) {
            // What a command has changed, if that is still in effect, comes first.
            all.entry(id).or_insert(socket);
        }
        let all: Vec<_> = all.into_iter().collect();
        let mut state = self.state();
        state.remembered = overrides.remembered.clone();
        state.follow_sockets(&all);
        let is_there = |id: &String| all.iter().any(|(there, _)| there == id);
        (state.remembered).retain(|id, it| is_there(id) || it.is_of_socket(id));
        state.bound_remembered();
    }

    /// What guests depend on follows the sockets of these disks, which are about to be served.
    pub(super) fn follow_sockets<'a>(&self, disks: impl Iterator<Item = &'a DiskSpec>) {
        let all: Vec<_> = disks
            .map(|disk| (disk.name.clone(), sockets::path(disk)))
            .collect();
        self.state().follow_sockets(&all);
    }

    /// A configuration of a served disk, with the number of queues that it has by default if `other` configures just that
    /// number.
    pub fn with_queues(&self, before: &DiskSpec, other: &DiskSpec) -> DiskSpec {
        let mut before = before.clone();
        let state = self.state();
        let remembered = state.remembered.get(&before.name);
        if before.queues.is_none() && remembered.is_some_and(|it| it.queues == other.queues) {
            before.queues = other.queues;
        }
        before
    }

    /// Everything that is served.
    pub fn inventory(&self) -> Inventory {
        let state = self.state();
        let remembered = state.remembered();
        // An upgrade and a restart carry this, and nothing else of the state, so a field that is added is decided here.
        let ServerState {
            nodes,
            exports,
            groups,
            // Clients that watch ask again.
            watch: _,
            configured,
            detached,
            // Neither is possible during a handover.
            stopping: _,
            under_way: _,
            restarting,
            absent,
            is_retrying: _,
            left,
            // Files of this process.
            still_open: _,
            // With the choices of the guests, above.
            remembered: _,
            choices_persisted: _,
            persist_scheduled: _,
        } = &*state;
        // Until all of them is there again.
        let stopped = restarting.iter().filter(|it| it.is_stopped);
        let stopped: Vec<_> = stopped.map(|it| &it.disk).collect();
        let is_up = |node: &str| stopped.iter().all(|disk| disk.name != node);
        let node = |entry: &NodeEntry| NodeOverride {
            disk: entry.spec(),
            child: entry.child.clone(),
        };
        let group = |(name, group): (&String, &Arc<ThrottleGroup>)| (name.clone(), group.limits());
        Inventory {
            configured: configured.clone(),
            detached: detached.clone(),
            nodes: nodes
                .values()
                .filter(|entry| is_up(entry.node.name()))
                .map(node)
                .collect(),
            exports: exports
                .values()
                .filter(|it| is_up(it.node.name()))
                .map(Export::carried)
                .collect(),
            absent: absent
                .values()
                .map(|a| &a.spec)
                .chain(stopped)
                .cloned()
                .collect(),
            groups: groups.iter().map(group).collect(),
            threads: self.threads.added(),
            remembered,
            left: left.clone(),
        }
    }
}

impl ServerState {
    /// What guests depend on, with the present choices of those that are connected.
    fn remembered(&self) -> BTreeMap<String, Remembered> {
        let mut all = self.remembered.clone();
        for export in self.exports.values() {
            let remembered = all.entry(export.id.clone()).or_default();
            remembered.write_cache = export.device.chosen_write_cache();
            remembered.socket = Some(export.socket.clone());
        }
        all.retain(|_, it| !it.is_empty());
        all
    }

    /// What is remembered of the guest that connects at a socket belongs to the export that is added there, whatever its name is
    /// now. An export with no such guest takes what was remembered under its name, if no other of these exports is where that
    /// was. That stays remembered of its socket as well: its guest may come back under another name.
    pub(super) fn follow_sockets(&mut self, added: &[(String, PathBuf)]) {
        let exports = &self.exports;
        let added = added.iter().filter(|(id, _)| !exports.contains_key(id));
        let added: Vec<_> = added.collect();
        let all = std::mem::take(&mut self.remembered);
        let (mut next, mut left): (BTreeMap<_, _>, BTreeMap<_, _>) = all
            .into_iter()
            .partition(|(id, _)| exports.contains_key(id));
        for (id, socket) in &added {
            let is_at = |it: &Remembered| it.socket.as_ref() == Some(socket);
            let own = left.get(id).is_some_and(is_at).then(|| id.clone());
            let found = || left.iter().find(|(_, it)| is_at(it));
            let its = own.or_else(|| found().map(|(other, _)| other.clone()));
            if let Some(its) = its.and_then(|its| left.remove(&its)) {
                next.insert(id.clone(), its);
            }
        }
        for (id, socket) in &added {
            if !next.contains_key(id)
                && let Some(its) = left.remove(id)
            {
                if let Some(before) = its.socket.as_ref().filter(|before| *before != socket) {
                    next.insert(before.display().to_string(), its.clone());
                }
                next.insert(id.clone(), its);
            }
            next.entry(id.clone()).or_default().socket = Some(socket.clone());
        }
        for (id, its) in left {
            next.entry(id).or_insert(its);
        }
        self.remembered = next;
        self.bound_remembered();
    }

    /// The number of queues of an export: the configured one, otherwise the one that it had before, otherwise one for each
    /// CPU, which is remembered from now on.
    pub(super) fn queues(&mut self, spec: &ExportSpec, inherited: Option<u16>) -> u16 {
        let remembered = self.remembered.entry(spec.id.clone()).or_default();
        if let Some(queues) = spec.queues {
            remembered.queues = None;
            return queues;
        }
        let default = || thread::available_parallelism().map_or(1, usize::from);
        let default = || default().min(QUEUES_DEFAULT_MAX) as u16;
        let queues = inherited.or(remembered.queues).unwrap_or_else(default);
        remembered.queues = Some(queues);
        queues
    }

    /// Remembers the choice of a guest whose export has been removed.
    pub(super) fn remember_choice(&mut self, id: &str, write_cache: Option<bool>) {
        self.bound_remembered();
        let remembered = self.remembered.entry(id.to_owned()).or_default();
        remembered.write_cache = write_cache;
    }

    /// Forgets what was remembered of exports that are neither there nor configured, if it is too much.
    fn bound_remembered(&mut self) {
        if self.remembered.len() <= REMEMBERED_MAX {
            return;
        }
        let Self {
            exports,
            configured,
            remembered,
            ..
        } = self;
        remembered.retain(|id, _| {
            let is_configured = configured.disks.iter().any(|disk| disk.name == *id);
            is_configured || exports.contains_key(id)
        });
    }
}
