//! What is there after a restart: see [`store`](crate::state::store).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use datapath::ThrottleGroup;
use tracing::error;

use super::{NodeEntry, Server, ServerState};
use crate::config::spec::DiskSpec;
use crate::server::export::Export;
use crate::state::store::{Configured, Inventory, StateStore};
use crate::state::{ExportOverride, NodeOverride, Overrides};

/// Between two times that guests have their choices written down.
const CHOICES: Duration = Duration::from_secs(1);

impl Server {
    /// Keeps what is changed from now on, and what was until now. It can be set once.
    pub fn set_store(&self, store: StateStore) {
        let _ = self.store.set(store);
        self.persist();
    }

    /// Keeps how things are now, so that they are so after a restart.
    pub fn persist(&self) {
        if let Some(store) = self.store.get()
            && let Err(e) = store.save(|| self.inventory())
        {
            error!("what was changed is in force, and will be forgotten at a restart: {e}");
        }
    }

    /// The same for what a guest may change as often as it likes: at most about once a second, for all guests together.
    /// What comes sooner is kept later.
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
            // What has been handed over is another's.
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

    /// The operator has written this down, from now on.
    pub fn set_configured(&self, written: Configured) {
        {
            let mut state = self.state();
            let before = std::mem::replace(&mut state.written, written);
            let ServerState { left, written, .. } = &mut *state;
            // Where another file is written down since, that is meant.
            left.retain(|left| {
                let its =
                    |all: &Configured| all.disks.iter().find(|d| d.name == left.name).cloned();
                let both = its(&before).zip(its(written));
                both.is_some_and(|(before, now)| before.is_written_on_file_of(&now))
            });
        }
        self.persist();
    }

    /// What disks were on that were detached before this process ran, as they were last.
    pub fn remember_left(&self, changed: &Overrides) {
        let is_gone = |disk: &DiskSpec| changed.gone.iter().any(|gone| gone.name == disk.name);
        let mut state = self.state();
        let disks = changed.disks.iter().map(|changed| &changed.disk);
        let left = disks.filter(|disk| is_gone(disk) && !state.nodes.contains_key(&disk.name));
        let left: Vec<_> = left.cloned().collect();
        state.left.extend(left);
    }

    /// What guests had chosen of their write caches, for exports that will be added.
    pub fn remember_write_caches(&self, choices: &BTreeMap<String, bool>) {
        self.state().write_caches.clone_from(choices);
    }

    /// All that is served.
    pub fn inventory(&self) -> Inventory {
        let state = self.state();
        let node = |entry: &NodeEntry| NodeOverride {
            disk: entry.spec(),
            over: entry.child.clone(),
        };
        let export = |export: &Export| ExportOverride {
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
            written: state.written.clone(),
            left: state.left.clone(),
            nodes: state.nodes.values().map(node).collect(),
            exports: state.exports.values().map(export).collect(),
            groups: state.groups.iter().map(group).collect(),
            threads: self.threads.added(),
            write_caches: state.exports.values().filter_map(choice).collect(),
        }
    }
}
