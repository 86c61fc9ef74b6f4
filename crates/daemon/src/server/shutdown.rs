//! How the end of a disk is waited for: until what is under way is done and durable, but not for ever.

use std::io;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use tracing::error;

use super::{Server, ServerError, ServerState};
use crate::node::Node;
use crate::server::export::Export;
use crate::server::handover::HandoverInhibitor;

/// How long the end of a disk, or of all, may take: what is under way, and to make it durable. Less than the 90 s
/// after which systemd kills.
pub(super) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);

/// How long storage may take to say what is only to be shown, or not changed if it doesn't.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

impl Server {
    /// Finishes what is under way, disconnects everybody, and makes everything durable. Storage that does
    /// not answer is not waited for longer than a minute. What has been handed over is another's to end.
    ///
    /// # Errors
    /// The last disk that could not be made durable.
    pub fn shut_down(&self, _inhibitor: HandoverInhibitor<'_>) -> Result<(), ServerError> {
        // What a guest has chosen just now.
        if self.state().persist_scheduled {
            self.persist();
        }
        if let Some(store) = self.store.get() {
            store.end();
        }
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        let ServerState {
            mut nodes, exports, ..
        } = std::mem::take(&mut *self.state());
        // All at once, rather than each after the other.
        exports.values().for_each(Export::tell_to_stop);
        let exports = exports.into_values();
        let stopped = all_in_time(
            deadline,
            exports.map(|export| {
                let (id, in_cluster) = (export.id.clone(), export.node.rbd().is_some());
                (id, in_cluster, move || stop(export))
            }),
        );
        // Once no export uses them any more. One that lies on another has the same file.
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

/// Does all of it at once, of each disk with whether it is in a cluster. Logs what fails, and returns the last of that.
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

type Task<T> = mpsc::Receiver<Result<T, ServerError>>;

/// Does what may wait for storage in a thread of its own.
fn begin<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T, ServerError> + Send + 'static,
) -> Result<Task<T>, ServerError> {
    let (done, result) = mpsc::channel();
    let thread = thread::Builder::new().name("closing".into());
    thread
        .spawn(move || drop(done.send(work())))
        .map_err(|e| ServerError::Sync(name.into(), e))?;
    Ok(result)
}

/// Waits for it, but not for ever: the thread stays with what it waits for.
fn end<T>(name: &str, deadline: Instant, task: &Task<T>) -> Result<T, ServerError> {
    // What is done already counts, however late it is.
    let left = deadline.saturating_duration_since(Instant::now());
    let left = left.max(Duration::from_millis(100));
    match task.recv_timeout(left) {
        Ok(result) => result,
        Err(_) => Err(ServerError::NotResponding(name.into())),
    }
}

pub(super) fn with_deadline<T: Send + 'static>(
    name: &str,
    deadline: Instant,
    work: impl FnOnce() -> Result<T, ServerError> + Send + 'static,
) -> Result<T, ServerError> {
    end(name, deadline, &begin(name, work)?)
}

/// Waits until what is under way is finished, and makes it durable. The disk knows what its page cache has
/// lost, which its file does not tell twice.
pub(super) fn stop(export: Export) -> Result<(), ServerError> {
    let (disk, node) = (export.disk.clone(), export.node.clone());
    drop(export);
    if disk.is_abandoned() {
        return Err(ServerError::NotResponding(disk.name.clone()));
    }
    disk.sync().map_err(|e| {
        let e = match node.rbd() {
            Some(rbd) if rbd.is_blocklisted() => io::Error::other(
                "this client is on the cluster's blocklist, and what librbd's cache kept cannot be written any more",
            ),
            _ => e,
        };
        not_synced(&node, &disk.name, e)
    })
}

fn not_synced(node: &Node, name: &str, error: io::Error) -> ServerError {
    match node.journal_of_all(&error) {
        Some(journal) => ServerError::Kept(name.into(), error, journal),
        None => ServerError::Sync(name.into(), error),
    }
}

pub(super) fn sync(node: &Node) -> Result<(), ServerError> {
    let name = node.name();
    node.sync().map_err(|e| not_synced(node, name, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_that_keeps_one_waiting_locks_no_file() {
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
            let said = ended.unwrap_err().to_string();
            assert!(said.contains(part), "{said}");
            assert_eq!(said.contains("file"), !in_cluster, "{said}");
        }
        drop(answer);
    }
}
