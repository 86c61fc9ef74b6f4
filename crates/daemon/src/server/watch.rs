//! How disks are looked at, and for how long their latencies are measured.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use block::{CacheMode, ThrottleLimits};
use tracing::{error, warn};

use super::shutdown::{ANSWER_TIMEOUT, with_deadline};
use super::{Server, ServerState};
use crate::node::Node;
use crate::server::export::Export;

/// How long latencies are measured after somebody has asked for statistics.
const WATCH: Duration = Duration::from_secs(120);

/// Whether latencies are measured, which costs a little.
#[derive(Clone, Copy, Default)]
pub(super) enum LatencyMode {
    #[default]
    No,
    Until(Instant),
    Always,
}

/// A disk, as `each` shows it.
pub struct DiskView<'a> {
    pub node: &'a Arc<Node>,
    /// How it is served, if it is.
    pub export: Option<&'a Export>,
    pub limits: &'a ThrottleLimits,
    pub group: Option<&'a str>,
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
    /// Calls `look` for every disk, in the order of their names. It may not wait for anything.
    pub fn each_disk(&self, mut look: impl FnMut(DiskView<'_>)) {
        let state = self.state();
        for entry in state.nodes.values() {
            let its = |export: &&Export| Arc::ptr_eq(&export.node, &entry.node);
            // Most have the same name, and there can be thousands.
            let same = state.exports.get(entry.node.name()).filter(its);
            look(DiskView {
                node: &entry.node,
                export: same.or_else(|| state.exports.values().find(its)),
                limits: &entry.limits,
                group: entry.group.as_deref(),
            });
        }
    }

    /// Looks at what is served under this name, if it is. It may not wait for anything.
    pub fn served<T>(&self, id: &str, look: impl FnOnce(&Export) -> T) -> Option<T> {
        self.state().exports.get(id).map(look)
    }

    /// Has all sockets made again that somebody has removed. Returns, and logs, a sentence for each of those in whose place
    /// something else is.
    pub fn recreate_sockets(&self) -> Vec<String> {
        let mut taken: Vec<String> = {
            let state = self.state();
            let taken = |export: &Export| {
                let what = export.recreate_socket()?;
                let (id, path) = (&export.id, export.socket.display());
                Some(format!(
                    "disk {id}: no VM can connect any more: {what} is at {path} by now, where its socket was. It is left alone; \
                     move it away, and 'ringdisk reload' or SIGHUP makes the socket again. A VM that is connected goes on"
                ))
            };
            state.exports.values().filter_map(taken).collect()
        };
        taken.extend(self.handover.recreate_sockets());
        taken.iter().for_each(|sentence| error!("{sentence}"));
        taken
    }

    /// Finds out anew what is shown of files, of all or of those that are not served: a disk knows its size. Of storage
    /// that does not answer, what it has said last is shown.
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
        // A node that hangs keeps the thread, and is passed over by the next one.
        let ask = move || {
            let nodes = nodes.iter().filter_map(Weak::upgrade);
            nodes.for_each(|node| node.refresh_sizes());
            Ok(())
        };
        if with_deadline("all", Instant::now() + ANSWER_TIMEOUT, ask).is_err() {
            warn!("storage does not answer; sizes of files are shown as they were before");
        }
    }

    /// Measures the latencies of all disks from now on.
    pub fn watch_always(&self) {
        self.state().set_watch(LatencyMode::Always);
    }

    /// Measures the latencies of all disks for as long as somebody asks for statistics now and then.
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
                    Err(e) => warn!("latencies are not measured, for want of a thread: {e}"),
                }
            }
        }
    }

    /// Measures no longer if nobody has asked lately; or how long to wait.
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
