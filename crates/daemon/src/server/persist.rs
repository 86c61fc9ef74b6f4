//! Persists changes that were made at run time: see [`store`](crate::state::store).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use datapath::ThrottleGroup;
use tracing::error;

use super::{NodeEntry, Server, ServerState};
use crate::server::export::Export;
use crate::state::store::{Configured, Inventory, StateStore};
use crate::state::{ExportOverride, NodeOverride, Overrides};

/// Time between two writes of what guests have chosen.
const CHOICES: Duration = Duration::from_secs(1);

impl Server {
    /// Persists all changes, those until now and those to come. Called once.
    pub fn set_store(&self, store: StateStore) {
        let _ = self.store.set(store);
        self.persist();
    }

    /// Persists the current state. Logs a failure.
    pub fn persist(&self) {
        if let Some(store) = self.store.get()
            && let Err(e) = store.save(|| self.inventory())
        {
            error!("changes apply, but a restart will lose them: {e}");
        }
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
    pub fn set_configured(&self, configured: Configured) {
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
        self.persist();
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

    /// Remembers the write caches that guests had chosen, for exports that will be added.
    pub fn remember_write_caches(&self, choices: &BTreeMap<String, bool>) {
        self.state().write_caches.clone_from(choices);
    }

    /// Everything that is served.
    pub fn inventory(&self) -> Inventory {
        let state = self.state();
        let node = |entry: &NodeEntry| NodeOverride {
            disk: entry.spec(),
            child: entry.child.clone(),
        };
        let export = |export: &Export| ExportOverride {
            node: export.node.name().to_owned(),
            spec: export.spec.clone(),
        };
        let group = |(name, group): (&String, &Arc<ThrottleGroup>)| (name.clone(), group.limits());
        let choice =
            |export: &Export| Some((export.id.clone(), export.device.chosen_write_cache()?));
        Inventory {
            configured: state.configured.clone(),
            detached: state.detached.clone(),
            nodes: state.nodes.values().map(node).collect(),
            exports: state.exports.values().map(export).collect(),
            groups: state.groups.iter().map(group).collect(),
            threads: self.threads.added(),
            write_caches: state.exports.values().filter_map(choice).collect(),
        }
    }
}
