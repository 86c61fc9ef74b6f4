//! How disks are looked at, and for how long their latencies are measured.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use block::{CacheMode, ThrottleLimits};
use tracing::warn;

use super::{Host, State};
use crate::export::Export;
use crate::node::Node;

/// How long latencies are measured after somebody has asked for statistics.
const WATCH: Duration = Duration::from_secs(120);

/// Whether latencies are measured, which costs a little.
#[derive(Clone, Copy, Default)]
pub(super) enum Watch {
    #[default]
    No,
    Until(Instant),
    Always,
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

impl Host {
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
}

impl State {
    fn set_watch(&mut self, watch: Watch) {
        let on = !matches!(watch, Watch::No);
        self.exports.values_mut().for_each(|e| e.measure(on));
        self.watch = watch;
    }
}
