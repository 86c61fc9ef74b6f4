//! Stops disks: waits until requests in flight are done and durable, up to a limit.

use std::io;
use std::time::Instant;

use tracing::error;

use super::deadline::{SHUTDOWN_TIMEOUT, begin, end};
use super::{Server, ServerError, ServerState};
use crate::node::Node;
use crate::server::export::Export;
use crate::server::handover::HandoverInhibitor;

impl Server {
    /// Commands that wait for others fail from now on, and new ones.
    pub fn end_commands(&self) {
        self.claims.close();
        self.reloads.close();
    }

    /// Finishes requests in flight, disconnects front-ends, and makes everything durable. Waits at most a minute for storage
    /// that does not answer. Not after a handover.
    ///
    /// # Errors
    /// The last disk that could not be made durable.
    pub fn shut_down(&self, _inhibitor: HandoverInhibitor<'_>) -> Result<(), ServerError> {
        // A guest may have changed its write cache just now.
        if self.state().persist_scheduled {
            self.persist();
        }
        if let Some(store) = self.store.get() {
            store.end();
        }
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        self.fail_backups(None, "ringdisk ends");
        let _ = self.stop_nbd();
        let ServerState {
            mut nodes, exports, ..
        } = std::mem::take(&mut *self.state());
        // All at once, not one after the other.
        exports.values().for_each(Export::tell_to_stop);
        let exports = exports.into_values();
        let stopped = all_in_time(
            deadline,
            exports.map(|export| {
                let (id, in_cluster) = (export.id.clone(), export.node.rbd().is_some());
                (id, in_cluster, move || stop(export))
            }),
        );
        // After all exports. A node above another shares its file.
        nodes.retain(|_, entry| entry.child.is_none());
        let nodes = nodes.into_iter();
        let closed = all_in_time(
            deadline,
            nodes.map(|(name, entry)| {
                let in_cluster = entry.node.rbd().is_some();
                (name, in_cluster, move || sync(&entry.node))
            }),
        );
        closed.and(stopped)
    }
}

/// Runs all works at once; each has the name of its disk and whether that is in a Ceph cluster. Logs failures, and returns
/// the last one.
fn all_in_time<W>(
    deadline: Instant,
    works: impl Iterator<Item = (String, bool, W)>,
) -> Result<(), ServerError>
where
    W: FnOnce() -> Result<(), ServerError> + Send + 'static,
{
    let tasks = works.map(|(name, in_cluster, work)| {
        let task = begin(&name, work);
        (name, in_cluster, task)
    });
    let tasks: Vec<_> = tasks.collect();
    let mut result = Ok(());
    for (name, in_cluster, task) in tasks {
        if let Err(e) = task.and_then(|task| end(&name, deadline, &task)) {
            let e = if in_cluster { e.in_cluster() } else { e };
            error!("{e}");
            result = Err(e);
        }
    }
    result
}

/// Finishes requests in flight, and makes them durable: through the disk, which knows of writes that the page cache has
/// lost. The kernel reports each loss only once per file.
pub(super) fn stop(export: Export) -> Result<(), ServerError> {
    let (disk, node) = (export.disk.clone(), export.node.clone());
    drop(export);
    if disk.is_abandoned() {
        return Err(ServerError::NotResponding(disk.name.clone()));
    }
    disk.sync().map_err(|e| {
        let e = match node.rbd() {
            Some(rbd) if rbd.is_blocklisted() => io::Error::other(
                "this client is on the cluster's blocklist, and data in librbd's cache can no longer be written",
            ),
            _ => e,
        };
        not_synced(&node, &disk.name, e)
    })
}

fn not_synced(node: &Node, name: &str, error: io::Error) -> ServerError {
    match node.journal_of_all(&error) {
        Some(journal) => ServerError::InJournal(name.into(), error, journal),
        None => ServerError::Sync(name.into(), error),
    }
}

pub(super) fn sync(node: &Node) -> Result<(), ServerError> {
    let name = node.name();
    node.sync().map_err(|e| not_synced(node, name, e))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn hung_cluster_error_mentions_no_file() {
        let (answer, storage) = mpsc::channel::<()>();
        let storage = std::sync::Arc::new(std::sync::Mutex::new(storage));
        for (in_cluster, part) in [(false, "stays locked"), (true, "'rbd status'")] {
            let storage = storage.clone();
            let waits = move || {
                let _ = storage.lock().unwrap().recv();
                Ok(())
            };
            let ended = all_in_time(
                Instant::now(),
                [("vm".into(), in_cluster, waits)].into_iter(),
            );
            let error = ended.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
            assert_eq!(error.contains("file"), !in_cluster, "{error}");
        }
        drop(answer);
    }
}
