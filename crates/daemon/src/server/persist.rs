//! Persists changes that were made at run time: see [`store`](crate::state::store).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use datapath::ThrottleGroup;
use tracing::error;

use super::{DISKS_MAX, NodeEntry, Server, ServerError, ServerState};
use crate::config::export::ExportSpec;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::server::export::Export;
use crate::state::store::{Configured, Inventory, StateStore, Unsaved};
use crate::state::{NodeOverride, Overrides, Remembered};

/// Time between two writes of what guests have chosen.
const CHOICES: Duration = Duration::from_secs(1);

/// The most queues that a disk has by default.
const QUEUES_DEFAULT_MAX: usize = 16;

/// Limit of exports of which something is remembered: as many as can be served, and as many again that were removed.
const REMEMBERED_MAX: usize = 2 * DISKS_MAX;

impl Server {
    /// Persists all changes, those until now and those to come. Called once.
    pub fn set_store(&self, store: StateStore) {
        let _ = self.store.set(store);
        self.persist();
    }

    /// Persists the current state. Logs a failure.
    pub fn persist(&self) {
        let _ = self.save();
    }

    /// The same, for a command.
    ///
    /// # Errors
    /// The command has changed something, which could not be persisted.
    pub fn persist_change(&self) -> Result<(), ServerError> {
        match self.save() {
            Err(Unsaved { error, is_new }) if is_new => Err(ServerError::Unsaved(error)),
            _ => Ok(()),
        }
    }

    fn save(&self) -> Result<(), Unsaved> {
        let saved = self
            .store
            .get()
            .map(|store| store.save(|| self.inventory()));
        let saved = saved.unwrap_or(Ok(()));
        saved.inspect_err(|e| error!("changes apply, but a restart will lose them: {}", e.error))
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
        let file = |disk: &DiskSpec| match &disk.file {
            FileSpec::Path(path) => Some((disk.name.clone(), path.clone())),
            FileSpec::Rbd(_) | FileSpec::Null(_) => None,
        };
        let files = configured.disks.iter().filter_map(file).collect();
        self.context.own_files.set_configured(files);
        {
            let mut state = self.state();
            let before = std::mem::replace(&mut state.configured, configured);
            let ServerState {
                detached,
                configured,
                ..
            } = &mut *state;
            // A disk whose configured file has changed is started on that file.
            detached.retain(|disk| {
                let find =
                    |all: &Configured| all.disks.iter().find(|d| d.name == disk.name).cloned();
                let both = find(&before).zip(find(configured));
                both.is_some_and(|(before, now)| before.has_file_of(&now))
            });
        }
        self.save().map_err(|unsaved| unsaved.error)
    }

    /// What the operator has configured, as far as it applies.
    pub fn configured(&self) -> Configured {
        self.state().configured.clone()
    }

    /// Remembers the last files of disks that were detached before this process started, where these files differ from
    /// the configured ones.
    pub fn remember_detached(&self, overrides: &Overrides) {
        let mut state = self.state();
        let disks = overrides.disks.iter().map(|changed| &changed.disk);
        let detached = disks.filter(|disk| {
            overrides.is_detached(&disk.name) && !state.nodes.contains_key(&disk.name)
        });
        let detached: Vec<_> = detached.cloned().collect();
        state.detached.extend(detached);
    }

    /// Remembers what guests depend on, for exports that are configured or will be added. Others are gone for good.
    pub fn remember(&self, configured: &Configured, overrides: &Overrides) {
        let Overrides {
            disks,
            detached,
            nodes,
            exports,
            ..
        } = overrides;
        let disks = disks.iter().map(|changed| &changed.disk);
        let nodes = nodes.iter().map(|node| &node.disk);
        let disks = disks.chain(nodes).chain(detached).chain(&configured.disks);
        let exports = exports.iter().map(|export| export.spec.id.as_str());
        let ids: BTreeSet<&str> = disks
            .map(|disk| disk.name.as_str())
            .chain(exports)
            .collect();
        let remembered = overrides.remembered.iter();
        let remembered = remembered.filter(|(id, _)| ids.contains(id.as_str()));
        self.state().remembered = remembered.map(|(id, it)| (id.clone(), *it)).collect();
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
            // None of these is possible during a handover.
            stopping: _,
            under_way: _,
            restarting: _,
            absent,
            is_retrying: _,
            // Files of this process.
            still_open: _,
            // With the choices of the guests, above.
            remembered: _,
            choices_persisted: _,
            persist_scheduled: _,
        } = &*state;
        let node = |entry: &NodeEntry| NodeOverride {
            disk: entry.spec(),
            child: entry.child.clone(),
        };
        let group = |(name, group): (&String, &Arc<ThrottleGroup>)| (name.clone(), group.limits());
        Inventory {
            configured: configured.clone(),
            detached: detached.clone(),
            absent: absent.values().map(|a| a.spec.clone()).collect(),
            nodes: nodes.values().map(node).collect(),
            exports: exports.values().map(Export::carried).collect(),
            groups: groups.iter().map(group).collect(),
            threads: self.threads.added(),
            remembered,
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
        }
        all.retain(|_, it| *it != Remembered::default());
        all
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
        let remembered = self.remembered.entry(id.to_owned()).or_default();
        remembered.write_cache = write_cache;
        if self.remembered.len() > REMEMBERED_MAX {
            let Self {
                exports,
                configured,
                remembered,
                ..
            } = self;
            remembered.retain(|other, _| {
                let is_configured = configured.disks.iter().any(|disk| disk.name == *other);
                other == id || is_configured || exports.contains_key(other)
            });
        }
    }
}
