//! Persists changes that were made at run time: see [`store`](crate::state::store).

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use datapath::ThrottleGroup;
use tracing::error;

use super::guests::Guests;
use super::{NodeEntry, Server, ServerError, ServerState};
use crate::config::sockets;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::server::export::Export;
use crate::state::store::{Configured, Inventory, StateStore, write_left};
use crate::state::{DiskOverride, NodeOverride, Overrides, Start};

/// Time between two writes of what guests have chosen.
const CHOICES: Duration = Duration::from_secs(1);

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
        self.aim_at(&configured.disks);
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

    /// These are the configured disks from now on: images of others do not build on their files, which may not be served, and what
    /// guests depend on at their sockets is theirs.
    pub(super) fn aim_at(&self, disks: &[DiskSpec]) {
        let file = |disk: &DiskSpec| match &disk.file {
            FileSpec::Path(path) => Some((disk.name.clone(), path.clone())),
            FileSpec::Rbd(_) | FileSpec::Null(_) => None,
        };
        let files = disks.iter().filter_map(file).collect();
        self.context.own_files.set_configured(files);
        let at = |disk: &DiskSpec| (disk.name.clone(), sockets::path(disk));
        self.state().wanted = disks.iter().map(at).collect();
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

    /// Remembers what guests depend on, of which these disks are about to be served.
    pub(super) fn remember(&self, configured: &Configured, overrides: &Overrides, served: &Start) {
        let disks = served.disks.iter().chain(&served.attached);
        let nodes = overrides.nodes.iter().map(|node| &node.disk);
        let at = |disk: &DiskSpec| (disk.name.clone(), sockets::path(disk));
        let exports = overrides.exports.iter().map(|it| &it.spec);
        let exports = exports.map(|spec| (spec.id.clone(), spec.socket.clone()));
        let others = overrides.detached.iter().chain(&configured.disks);
        let all = disks.chain(nodes).map(at);
        let all: Vec<_> = all.chain(exports).chain(others.map(at)).collect();
        self.state().guests = Guests::new(&overrides.remembered, &all);
    }

    /// Whether a disk that was attached for another VM has the name of this configured one.
    pub fn is_hidden(&self, configured: &DiskSpec) -> bool {
        self.hidden_by(configured).is_some()
    }

    /// That disk.
    pub(super) fn hidden_by(&self, configured: &DiskSpec) -> Option<DiskSpec> {
        let name = &configured.name;
        let now = self.spec_of(name).or_else(|| self.absent_spec(name));
        now.filter(|now| sockets::are_of_two_vms(now, configured))
    }

    /// A configuration of a served disk, with the number of queues that it has by default if `other` configures just that
    /// number.
    pub fn with_queues(&self, before: &DiskSpec, other: &DiskSpec) -> DiskSpec {
        let mut before = before.clone();
        let default = self.state().guests.queues(&sockets::path(&before));
        if before.queues.is_none() && default == other.queues {
            before.queues = default;
        }
        before
    }

    /// Everything that is served.
    pub fn inventory(&self) -> Inventory {
        let state = self.state();
        let remembered = state.records_of_guests();
        // An upgrade and a restart carry this, and nothing else of the state, so a field that is added is decided here.
        let ServerState {
            nodes,
            exports,
            groups,
            // Clients that watch ask again.
            watch: _,
            // The next process tries to start them.
            unavailable: _,
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
            guests: _,
            // As configured.
            wanted: _,
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
