//! The server's part in an upgrade: pauses the disks, collects what is handed over, and keeps commands and handovers
//! from overlapping.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    TryLockError,
};
use std::thread;
use std::time::{Duration, Instant};
use std::{io, mem};

use datapath::{Disk, IoThread};
use image::Format;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{AtFlags, StatxFlags, statx};
use thiserror::Error;
use tracing::info;

use super::deadline::with_deadline;
use super::{NodeEntry, Server, ServerError};
use crate::inherited::{FileIdentity, InheritedDisk};
use crate::node::Node;
use crate::server::device::ServedDisk;
use crate::server::export::AskedPause;
use crate::socket::{BoundPath, PathStatus};
use crate::state::Overrides;

/// The state of a handover to a new process, and the sockets that are handed over in addition to those of disks.
#[derive(Default)]
pub struct HandoverState {
    pub control: Mutex<Option<OwnedFd>>,
    pub upgrade: Mutex<Option<OwnedFd>>,
    pub metrics: OnceLock<OwnedFd>,
    /// Paths of the control and upgrade sockets, each with an event descriptor that asks its thread to check the path.
    socket_watches: Mutex<Vec<(Arc<BoundPath>, Arc<OwnedFd>)>>,
    /// Whether everything has been handed over. Commands hold it for reading, a handover for writing.
    handed_over: RwLock<bool>,
    /// A handover waits for commands to end. Others wait for it, or there could always be one.
    is_awaited: AtomicBool,
    /// This process has been told to stop.
    stopping: AtomicBool,
    /// The new process has been told to serve, and accepts clients from now on.
    leaving: AtomicBool,
}

/// Locks a mutex, also after a panic: its content is replaced as a whole.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prevents handovers while it exists.
pub type HandoverInhibitor<'a> = RwLockReadGuard<'a, bool>;

/// A handover is under way or has succeeded: this process changes nothing.
#[derive(Debug, Error)]
#[error("another ringdisk is taking over from this one; try again in a moment")]
pub struct HandoverInProgress;

impl HandoverState {
    /// Registers a socket. Returns a descriptor that becomes readable when the thread of the socket has to check whether
    /// the file of the socket was removed.
    ///
    /// # Errors
    /// No event descriptor is available.
    pub fn socket_watch(&self, path: &Arc<BoundPath>) -> io::Result<Arc<OwnedFd>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let watch = Arc::new(eventfd(0, flags)?);
        locked(&self.socket_watches).push((path.clone(), watch.clone()));
        Ok(watch)
    }

    /// Whether the new process accepts clients: this one may exit at any time.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    pub fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, Ordering::Release);
    }

    /// Asks the threads of all registered sockets to create removed ones again. Returns a message for each socket whose path
    /// something else occupies.
    pub fn recreate_sockets(&self) -> Vec<String> {
        let mut taken = Vec::new();
        for (path, watch) in &*locked(&self.socket_watches) {
            let _ = rustix::io::write(watch, &1u64.to_ne_bytes());
            if let PathStatus::Other(what) = path.look() {
                taken.push(format!(
                    "no command gets to {path} any more: its place is taken by {what}, which ringdisk leaves alone; move it away \
                     and send SIGHUP, which creates the socket again",
                    path = path.path().display()
                ));
            }
        }
        taken
    }

    /// The files of all registered sockets.
    pub fn socket_files(&self) -> Vec<(PathBuf, FileIdentity)> {
        let watches = locked(&self.socket_watches);
        let files = watches.iter().map(|(path, _)| path);
        files.filter_map(socket_file).collect()
    }

    /// Prevents handovers while the returned guard exists. Waits until one has begun that waits for its turn, or has given up.
    ///
    /// # Errors
    /// A handover is under way or has succeeded.
    pub fn inhibit(&self) -> Result<HandoverInhibitor<'_>, HandoverInProgress> {
        while self.is_awaited.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(2));
        }
        let handed_over = match self.handed_over.try_read() {
            Ok(handed_over) => handed_over,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(HandoverInProgress),
        };
        if *handed_over {
            return Err(HandoverInProgress);
        }
        Ok(handed_over)
    }

    /// Like [`inhibit`](Self::inhibit), but first waits for a handover that is under way.
    ///
    /// # Errors
    /// A handover has succeeded.
    pub fn wait_and_inhibit(&self) -> Result<HandoverInhibitor<'_>, HandoverInProgress> {
        let handed_over = self.handed_over.read().unwrap_or_else(|e| e.into_inner());
        if *handed_over {
            return Err(HandoverInProgress);
        }
        Ok(handed_over)
    }

    /// This process has been told to stop: cancels a handover if that is still possible.
    ///
    /// # Errors
    /// The new process has taken over.
    pub fn stop(&self) -> Result<HandoverInhibitor<'_>, HandoverInProgress> {
        self.stopping.store(true, Ordering::Release);
        if matches!(self.handed_over.try_read(), Err(TryLockError::WouldBlock)) {
            info!(
                "stopping: an upgrade is under way; it is cancelled if the new process does not serve yet"
            );
        }
        self.wait_and_inhibit()
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Begins a handover: waits until no command runs, and prevents others from starting. The caller sets the guard's
    /// value to true once the handover has succeeded. `None` if a command still runs at the deadline.
    pub fn begin(&self, deadline: Instant) -> Option<RwLockWriteGuard<'_, bool>> {
        self.is_awaited.store(true, Ordering::Release);
        let begun = loop {
            match self.handed_over.try_write() {
                Ok(handed_over) => break Some(handed_over),
                Err(TryLockError::Poisoned(e)) => break Some(e.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() > deadline => break None,
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(2)),
            }
        };
        self.is_awaited.store(false, Ordering::Release);
        begun
    }
}

/// The path of a socket and the file there, if ringdisk created that file.
pub fn socket_file(path: &Arc<BoundPath>) -> Option<(PathBuf, FileIdentity)> {
    Some((path.path().into(), path.made()?.into()))
}

/// Copies of descriptors of disks' files. Closing one flushes the file on FUSE and NFS, for as long as that takes, so it is
/// not done by the thread that drops this: guests wait for it.
pub struct DiskCopies(Vec<OwnedFd>);

impl Deref for DiskCopies {
    type Target = [OwnedFd];

    fn deref(&self) -> &[OwnedFd] {
        &self.0
    }
}

impl Drop for DiskCopies {
    fn drop(&mut self) {
        let files = mem::take(&mut self.0);
        // Without a thread, they are closed here.
        let _ = thread::Builder::new().spawn(move || drop(files));
    }
}

/// An export that has been asked to pause.
pub struct PendingPause {
    pub id: String,
    pub socket: Arc<BoundPath>,
    pub node: Arc<Node>,
    pub device: Arc<ServedDisk>,
    /// Requests were waiting for failed storage before the pause.
    pub has_stalled: bool,
    pub asked: AskedPause,
}

impl Server {
    /// Writes the metadata that images have only in memory, so that another process finds it, with `flush`:
    /// [`Node::flush_metadata`], or, while no request is in flight, [`Node::flush_for_successor`].
    ///
    /// # Errors
    /// It could not be written by the deadline, or a disk cannot be handed over.
    pub fn flush_metadata(
        &self,
        deadline: Instant,
        flush: fn(&Node) -> io::Result<()>,
    ) -> Result<(), String> {
        let (nodes, lost): (Vec<_>, Vec<_>) = {
            let state = self.state();
            let nodes = state.nodes.values().map(|entry| entry.node.clone());
            let lost = state.exports.values().filter(|e| e.disk.lost_writes());
            (nodes.collect(), lost.map(|e| e.id.clone()).collect())
        };
        if let Some(id) = lost.first() {
            return Err(format!(
                "disk {id} has lost writes (see PAGECACHE_LOST above)"
            ));
        }
        if let Some(node) = nodes.iter().find(|node| node.rbd().is_some()) {
            return Err(format!(
                "disk {} is in a Ceph cluster, whose lock on the image cannot be handed over; restart ringdisk \
                 instead",
                node.name()
            ));
        }
        let flush_metadata = |node: &Arc<Node>| {
            let flushed = node.clone();
            let flush_metadata = move || {
                let name = flushed.name().to_owned();
                flush(&flushed).map_err(|e| ServerError::Sync(name, e))
            };
            let storage = match node.format {
                Format::Qcow2 => "its storage",
                Format::Raw if node.has_notes() => "the state directory",
                // It has none, and a release that waits for its storage must not delay the others.
                Format::Raw => return Ok(()),
            };
            with_deadline(node.name(), deadline, flush_metadata).map_err(|e| match e {
                ServerError::NotResponding(name) => format!(
                    "disk {name}: {storage} does not answer in time; this process continues to serve; upgrade again \
                     when it answers"
                ),
                ServerError::Sync(name, e) => format!(
                    "disk {name}: what {storage} must have before another process serves the disk cannot be written: {}",
                    block::explain(&e, "upgrade again when it can")
                ),
                e => e.to_string(),
            })
        };
        nodes.iter().try_for_each(flush_metadata)
    }

    /// Asks the storage of all disks, also of those that no VM uses: another process could not take them over.
    ///
    /// # Errors
    /// One has not answered by the deadline.
    pub fn check_storage(&self, deadline: Instant) -> Result<(), String> {
        let nodes: Vec<_> = {
            let state = self.state();
            state.nodes.values().map(|e| e.node.clone()).collect()
        };
        nodes.into_iter().try_for_each(|node| {
            let name = node.name().to_owned();
            let ask = move || {
                for file in node.copies().into_iter().flatten() {
                    // An answer that is an error is one.
                    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
                    let _ = statx(&file, c"", flags, StatxFlags::BASIC_STATS);
                }
                Ok(())
            };
            with_deadline(&name, deadline, ask).map_err(|_| {
                format!("disk {name}: its storage does not answer; upgrade again when it answers")
            })
        })
    }

    /// A disk with requests that wait until its storage works again.
    pub fn stalled_disk(&self) -> Option<String> {
        let state = self.state();
        let mut exports = state.exports.values();
        let stalled = exports.find(|export| export.disk.stalled() > 0);
        stalled.map(|export| export.id.clone())
    }

    /// All disks that are served, each with its threads.
    pub fn disks_with_threads(&self) -> Vec<(Arc<Disk>, Vec<Arc<IoThread>>)> {
        let state = self.state();
        let exports = state.exports.values();
        exports
            .map(|export| (export.disk.clone(), export.device.io_threads()))
            .collect()
    }

    /// Asks all exports to pause.
    pub fn pause(&self) -> Vec<PendingPause> {
        let state = self.state();
        let pausing = state.exports.values().map(|export| PendingPause {
            id: export.id.clone(),
            socket: export.place.clone(),
            node: export.node.clone(),
            device: export.device.clone(),
            has_stalled: export.disk.stalled() > 0,
            asked: export.pause(),
        });
        pausing.collect()
    }

    /// Copies of the descriptors of all files that are open for disks.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn descriptors(&self) -> io::Result<DiskCopies> {
        let state = self.state();
        // A node above another shares the files of that one.
        let nodes = state.nodes.values().filter(|entry| entry.child.is_none());
        let mut files = DiskCopies(Vec::new());
        for entry in nodes {
            files.0.extend(entry.node.copies()?);
        }
        Ok(files)
    }

    /// All disks, each with its present settings and the configured ones.
    pub fn handover_disks(&self) -> Vec<InheritedDisk> {
        let state = self.state();
        let configured = state.configured.disks.iter();
        let configured: BTreeMap<_, _> = configured.map(|d| (d.name.as_str(), d)).collect();
        let disk = |entry: &NodeEntry| {
            let spec = entry.spec();
            let NodeEntry {
                node,
                // In the specification.
                limits: _,
                group: _,
                labels: _,
                // With the changes made at run time.
                child: _,
            } = entry;
            InheritedDisk {
                spec,
                configured: configured.get(node.name()).copied().cloned(),
                file: node.identity(),
            }
        };
        state.nodes.values().map(disk).collect()
    }

    /// Changes made at run time, persisted or not.
    pub fn overrides(&self) -> Overrides {
        match self.store.get() {
            Some(store) => store.overrides(|| self.inventory()),
            None => self.inventory().difference(&Overrides::default()),
        }
    }

    /// Names of disks that are released: other hosts may have locked them.
    pub fn released(&self) -> Vec<String> {
        let state = self.state();
        let nodes = state.nodes.values().map(|entry| &entry.node);
        let released = nodes.filter(|node| !node.is_acquired());
        released.map(|node| node.name().to_owned()).collect()
    }

    /// A descriptor of the lock on the state directory.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn state_lock(&self) -> io::Result<Option<OwnedFd>> {
        let lock = self.store.get().map(|store| store.lock().try_clone());
        Ok(lock.transpose()?.map(OwnedFd::from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Commands of several clients follow each other without a gap.
    #[test]
    fn handover_gets_its_turn_beside_endless_commands() {
        let state = HandoverState::default();
        let is_over = AtomicBool::new(false);
        let running = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        if let Ok(_inhibitor) = state.inhibit() {
                            running.store(true, Ordering::Relaxed);
                            thread::sleep(Duration::from_millis(3));
                        }
                    }
                });
            }
            while !running.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            let begun = state.begin(Instant::now() + Duration::from_secs(10));
            let refused = state.inhibit().is_err();
            is_over.store(true, Ordering::Relaxed);
            assert!(begun.is_some() && refused);
            drop(begun);
        });
        // Afterwards, commands run again.
        assert!(state.inhibit().is_ok());
        let command = state.inhibit();
        assert!(state.begin(Instant::now()).is_none());
        assert!(state.inhibit().is_ok());
        drop(command);
    }
}
