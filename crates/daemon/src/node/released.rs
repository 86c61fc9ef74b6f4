//! A disk that is left to another host for a while, since its VM is moved there, and taken back when the VM is.
//!
//! While a disk is away, its files are not locked, nothing is written to them, and nothing is known of them but a
//! size. It goes away only when no queue of it is served, so that nothing is under way:
//!
//! 1. What the guest wrote is made durable, tables of an image included, and the image is closed.
//! 2. What the page cache has of it is dropped.
//! 3. The locks are given up.
//! 4. The front-end is told that its rings have stopped. Only then can it let the VM go on elsewhere.
//!
//! It comes back before the first queue is served: locked first, then read as it is now. Whatever
//! dies at any point: each host writes only while it has the lock, and after 1. there is nothing left to be written.

use std::path::Path;
use std::sync::Arc;

use block::DiskFacts;
use datapath::Disk;
use engine::{DiskFile, Identity, Locking};
use image::{Format, Image};
use tracing::warn;

use super::chain::{chain_facts, open_chain};
use super::close::unlock;
use super::{Node, NodeError, NodeState};
use crate::config::spec::FileSpec;

impl Node {
    /// Whether its files are locked, and may be written to.
    pub fn is_acquired(&self) -> bool {
        self.state().image.is_some()
    }

    /// Leaves the disk to another host. No queue of it is served. Returns whether that is news.
    ///
    /// # Errors
    /// Something could not be made durable, and it is not left.
    pub fn release(&self, disk: &Disk) -> Result<bool, NodeError> {
        let fail = |what, e| NodeError::Io(self.filename.clone(), what, e);
        let FileSpec::Path(path) = &self.spec.file else {
            return Ok(false);
        };
        if self.facts.read_only {
            return Ok(false);
        }
        let _changes = self.lock_changes();
        let (image, file, mut files) = {
            let state = self.state();
            let (Some(image), Some(file)) = (&state.image, &state.file) else {
                return Ok(false);
            };
            (image.clone(), file.clone(), state.files.clone())
        };
        files.retain(|other| !Arc::ptr_eq(other, &file));
        files.push(file.clone());
        // Before anything is changed: there may be no descriptor to be had. Of a device, an open one is a lock as well.
        let cache = self.spec.cache;
        let unlocked = match DiskFile::open_with(path, cache, false, Locking::None) {
            Ok(unlocked) => Arc::new(unlocked),
            Err(e) => {
                warn!("{e}; what is open of it stays so");
                file
            }
        };
        let left = self.described(&unlocked);
        disk.sync().map_err(|e| fail("be made durable", e))?;
        let written = files.iter().filter(|file| !file.facts().read_only);
        let written: Vec<_> = written.cloned().collect();
        // Whatever the cache mode says: this is no crash.
        self.close_image(&image, &written)
            .map_err(|e| fail("be closed", e))?;
        let size = self.file_size();
        let mut state = self.state();
        state.size = size.unwrap_or(disk.size());
        state.image = None;
        state.files.clear();
        state.file = Some(unlocked);
        drop(state);
        disk.release(Some(left));
        unlock(&files).map_err(|e| fail("give up its lock", e))?;
        Ok(true)
    }

    /// Takes a disk that is away: locks it, and reads it anew. Returns whether that is news.
    ///
    /// # Errors
    /// Somebody else has it, or it cannot be served any more; it stays away.
    pub fn reacquire(&self, disk: &Disk) -> Result<bool, NodeError> {
        self.take(&[], |state, facts| {
            let image = state.image.clone().unwrap_or(Image::Raw);
            let files = self.descriptors(state);
            disk.reacquire(image, files, facts, state.size)
                .map_err(|e| NodeError::Io(self.filename.clone(), "be taken back", e))
        })
    }

    /// Takes what is away and takes the place of what is here. It may build on what is `ours`, as in
    /// [`open`](Self::open).
    ///
    /// # Errors
    /// Somebody else has it, or it cannot be served.
    pub fn acquire(&self, ours: &[Identity]) -> Result<(), NodeError> {
        self.take(ours, |_, _| Ok(())).map(drop)
    }

    /// Locks what is away, reads it anew, and does `then` with it, or leaves it away.
    fn take(
        &self,
        ours: &[Identity],
        then: impl FnOnce(&NodeState, &DiskFacts) -> Result<(), NodeError>,
    ) -> Result<bool, NodeError> {
        let FileSpec::Path(path) = &self.spec.file else {
            return Ok(false);
        };
        let _changes = self.lock_changes();
        if self.is_acquired() || self.file().is_none() {
            return Ok(false);
        }
        self.check_there()?;
        // Anew: so do network file systems learn what was written elsewhere.
        let file = Arc::new(DiskFile::open(path, self.spec.cache, false)?);
        file.drop_cached();
        let taken = self.read_anew(path, &file, ours);
        let taken = taken.and_then(|(state, facts)| {
            then(&state, &facts)?;
            self.put_in(state);
            Ok(true)
        });
        taken.inspect_err(|_| drop(file.unlock()))
    }

    /// Has this content from now on.
    pub(super) fn put_in(&self, new: NodeState) {
        let mut state = self.state();
        let on_damage = state.on_damage.take();
        *state = NodeState { on_damage, ..new };
        state.watch_damage();
    }

    /// Reads what is in a file that is locked.
    pub(super) fn read_anew(
        &self,
        path: &Path,
        file: &Arc<DiskFile>,
        ours: &[Identity],
    ) -> Result<(NodeState, DiskFacts), NodeError> {
        let state = NodeState {
            image: Some(Image::Raw),
            file: Some(file.clone()),
            files: Vec::new(),
            size: 0,
            allocated: None,
            depth: 0,
            journal: None,
            on_damage: None,
        };
        match self.format {
            Format::Raw => {
                let size = file.raw_size(path)?;
                Ok((NodeState { size, ..state }, self.facts))
            }
            Format::Qcow2 => {
                let (spec, context) = (&self.spec, &self.context);
                let opened = open_chain(spec, path, file, context, Locking::Now, ours)?;
                let (chain, files) = (opened.chain, opened.files);
                let facts = chain_facts(&chain, &files);
                let state = NodeState {
                    size: chain.size(),
                    depth: chain.depth() - 1,
                    image: Some(Image::Chain(Arc::new(chain))),
                    files,
                    journal: opened.journal,
                    ..state
                };
                Ok((state, facts))
            }
        }
    }
}
