//! Views of disks for queries, and how long their latencies are measured.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use block::{CacheMode, ThrottleLimits};
use tracing::{error, warn};

use super::deadline::{ANSWER_TIMEOUT, with_deadline};
use super::{Server, ServerState};
use crate::config::spec::Labels;
use crate::node::Node;
use crate::server::export::Export;

/// How long latencies are measured after a query for statistics.
const WATCH: Duration = Duration::from_secs(120);

/// Whether latencies are measured. Measuring costs a little CPU.
#[derive(Clone, Copy, Default)]
pub(super) enum LatencyMode {
    #[default]
    No,
    Until(Instant),
    Always,
}

/// A disk, as queries see it.
pub struct DiskView<'a> {
    pub node: &'a Arc<Node>,
    /// How it is served, if it is.
    pub export: Option<&'a Export>,
    pub limits: &'a ThrottleLimits,
    pub group: Option<&'a str>,
    pub labels: &'a Labels,
    /// Whether the configuration has it.
    pub is_configured: bool,
}

impl DiskView<'_> {
    /// Bytes that the guest can address.
    pub fn size(&self) -> u64 {
        match self.export {
            Some(export) => export.disk.size(),
            None => self.node.known_size(),
        }
    }

    pub fn cache(&self) -> CacheMode {
        self.node.spec.cache
    }
}

impl Server {
    /// Calls `look` for every disk, in the order of their names, under the lock: it must not wait.
    pub fn each_disk(&self, mut look: impl FnMut(DiskView<'_>)) {
        let state = self.state();
        let configured = state.configured.disks.iter();
        let configured: HashSet<_> = configured.map(|disk| disk.name.as_str()).collect();
        for entry in state.nodes.values() {
            let its = |export: &&Export| Arc::ptr_eq(&export.node, &entry.node);
            // Nearly all exports have the name of their node, so try that first: there can be thousands.
            let same = state.exports.get(entry.node.name()).filter(its);
            look(DiskView {
                node: &entry.node,
                export: same.or_else(|| state.exports.values().find(its)),
                limits: &entry.limits,
                group: entry.group.as_deref(),
                labels: &entry.labels,
                is_configured: configured.contains(entry.node.name()),
            });
        }
    }

    /// Calls `look` for the export of this name, if there is one, under the lock: it must not wait.
    pub fn served<T>(&self, id: &str, look: impl FnOnce(&Export) -> T) -> Option<T> {
        self.state().exports.get(id).map(look)
    }

    /// Recreates sockets that have been removed. Logs and returns a sentence for each socket that is not there.
    pub fn recreate_sockets(&self) -> Vec<String> {
        let mut taken: Vec<String> = {
            let state = self.state();
            let taken = |export: &Export| {
                let why = export.recreate_socket()?;
                let id = &export.id;
                Some(format!(
                    "disk {id}: no VM can connect: {why}; then 'ringdisk reload' or SIGHUP makes the socket again. A connected VM is \
                     not affected"
                ))
            };
            state.exports.values().filter_map(taken).collect()
        };
        taken.extend(self.handover.recreate_sockets());
        taken.iter().for_each(|sentence| error!("{sentence}"));
        taken
    }

    /// All nodes, which may end meanwhile.
    pub(super) fn weak_nodes(&self) -> Vec<Weak<Node>> {
        let state = self.state();
        let nodes = state.nodes.values();
        nodes.map(|entry| Arc::downgrade(&entry.node)).collect()
    }

    /// Refreshes the sizes of files that queries show, of all or only of nodes without an export (a served disk knows its
    /// size). If storage does not answer, its last answer is shown.
    pub fn refresh_sizes(&self, all: bool) {
        let nodes: Vec<_> = {
            let state = self.state();
            let served = |node| state.exports.values().any(|e| Arc::ptr_eq(&e.node, node));
            let nodes = state.nodes.values().map(|entry| &entry.node);
            let nodes = nodes.filter(|node| all || !served(node));
            nodes.map(Arc::downgrade).collect()
        };
        if nodes.is_empty() {
            return;
        }
        // A node that hangs keeps this thread; the next refresh skips it.
        let asked = Arc::new(Mutex::new(String::new()));
        let asking = asked.clone();
        let ask = move || {
            for node in nodes.iter().filter_map(Weak::upgrade) {
                node.name()
                    .clone_into(&mut asking.lock().unwrap_or_else(PoisonError::into_inner));
                node.refresh_sizes();
            }
            Ok(())
        };
        if with_deadline("all", Instant::now() + ANSWER_TIMEOUT, ask).is_err() {
            let name = asked.lock().unwrap_or_else(PoisonError::into_inner).clone();
            warn!(
                "disk {name}: its storage does not answer; the sizes of its and other files may be out of date"
            );
        }
    }

    /// Measures the latencies of all disks from now on.
    pub fn watch_always(&self) {
        self.state().set_watch(LatencyMode::Always);
    }

    /// Measures the latencies of all disks until queries for statistics stop.
    pub fn watch(self: &Arc<Self>) {
        let mut state = self.state();
        let until = LatencyMode::Until(Instant::now() + WATCH);
        match state.watch {
            LatencyMode::Always => {}
            LatencyMode::Until(_) => state.watch = until,
            LatencyMode::No => {
                let server = Arc::downgrade(self);
                let stop_later = move || {
                    let mut wait = WATCH;
                    loop {
                        thread::sleep(wait);
                        match server.upgrade().and_then(|server| server.end_watch()) {
                            Some(more) => wait = more,
                            None => return,
                        }
                    }
                };
                let thread = thread::Builder::new().name("watch".into());
                match thread.spawn(stop_later) {
                    Ok(_) => state.set_watch(until),
                    Err(e) => warn!("latencies are not measured: no thread available: {e}"),
                }
            }
        }
    }

    /// Stops measuring if there was no query lately. Otherwise returns how long to wait.
    fn end_watch(&self) -> Option<Duration> {
        let mut state = self.state();
        let LatencyMode::Until(until) = state.watch else {
            return None;
        };
        let more = until.saturating_duration_since(Instant::now());
        if more.is_zero() {
            state.set_watch(LatencyMode::No);
            return None;
        }
        Some(more)
    }
}

impl ServerState {
    fn set_watch(&mut self, watch: LatencyMode) {
        let on = !matches!(watch, LatencyMode::No);
        self.exports.values_mut().for_each(|e| e.measure(on));
        self.watch = watch;
    }
}
