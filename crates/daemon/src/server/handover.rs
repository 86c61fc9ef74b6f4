//! What another process is given when it takes over: see [`hand`](crate::upgrade::protocol).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use image::Format;

use super::shutdown::with_deadline;
use super::{NodeEntry, Server, ServerError};
use crate::node::Node;
use crate::state::Overrides;
use crate::upgrade::donor::PendingPause;
use crate::upgrade::protocol::HandoverDisk;

impl Server {
    /// Writes what images have only in memory, so that another process finds all of it.
    ///
    /// # Errors
    /// It could not be written, or not until then, or storage has lost something that another process would not know of.
    pub fn flush_metadata(&self, deadline: Instant) -> Result<(), String> {
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
            let its = node.clone();
            let flush_metadata = move || {
                let name = its.name().to_owned();
                its.flush_metadata().map_err(|e| ServerError::Sync(name, e))
            };
            match node.format {
                Format::Qcow2 => with_deadline(node.name(), deadline, flush_metadata).map_err(|e| match e {
                    ServerError::NotResponding(name) => format!(
                        "disk {name}: its storage does not answer in time; this process goes on serving, try again \
                         when the storage answers"
                    ),
                    e => e.to_string(),
                }),
                Format::Raw => Ok(()),
            }
        };
        nodes.iter().try_for_each(flush_metadata)
    }

    /// Asks all exports to pause.
    pub fn pause(&self) -> Vec<PendingPause> {
        let state = self.state();
        let pausing = state.exports.values().map(|export| PendingPause {
            id: export.id.clone(),
            place: export.place.clone(),
            node: export.node.clone(),
            device: export.device.clone(),
            waits: export.disk.stalled() > 0,
            paused: export.pause(),
        });
        pausing.collect()
    }

    /// Copies of the descriptors of all files that are open for disks.
    ///
    /// # Errors
    /// There are no more to be had.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let state = self.state();
        // A node that lies on another has the same.
        let nodes = state.nodes.values().filter(|entry| entry.child.is_none());
        let mut files = Vec::new();
        for entry in nodes {
            files.extend(entry.node.copies()?);
        }
        Ok(files)
    }

    /// All disks, as they are and as they are written down.
    pub fn handover_disks(&self) -> Vec<HandoverDisk> {
        let state = self.state();
        let written = state
            .written
            .disks
            .iter()
            .map(|disk| (disk.name.as_str(), disk));
        let written: BTreeMap<_, _> = written.collect();
        let spec = |entry: &NodeEntry| HandoverDisk {
            disk: entry.spec().to_string(),
            written: written.get(entry.node.name()).map(ToString::to_string),
            file: entry.node.identity(),
        };
        state.nodes.values().map(spec).collect()
    }

    /// How what is served differs from what is written down, be that kept or not.
    pub fn changed(&self) -> Overrides {
        match self.store.get() {
            Some(store) => store.changed(self),
            None => self.inventory().difference(&Overrides::default()),
        }
    }

    /// Names of disks that are left to other hosts for now.
    pub fn away(&self) -> Vec<String> {
        let state = self.state();
        let nodes = state.nodes.values().map(|entry| &entry.node);
        let away = nodes.filter(|node| !node.is_acquired());
        away.map(|node| node.name().to_owned()).collect()
    }

    /// The lock on the directory in which state is kept.
    ///
    /// # Errors
    /// There is no descriptor to be had.
    pub fn state_lock(&self) -> io::Result<Option<OwnedFd>> {
        let lock = self.store.get().map(|store| store.lock().try_clone());
        Ok(lock.transpose()?.map(OwnedFd::from))
    }
}
