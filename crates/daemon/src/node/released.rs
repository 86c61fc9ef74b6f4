//! Releases a disk for another host while its VM is migrated there, and acquires it again when the VM returns.
//!
//! While a disk is released, its files are unlocked, nothing is written to them, and only its size is known. A disk is
//! released only when none of its queues is served, so that no request is in flight:
//!
//! 1. The guest's writes are made durable, including the tables of an image, and the image is closed.
//! 2. Its pages are dropped from the page cache.
//! 3. The locks are released.
//! 4. The front-end is told that its rings have stopped. Only then can it resume the VM elsewhere.
//!
//! A disk is acquired before its first queue is served: it is locked first, then its files are read again. Crashes at any
//! point are safe: each host writes only while it holds the lock, and after step 1, nothing is left to be written.

use std::path::Path;
use std::sync::Arc;

use block::DiskFacts;
use datapath::Disk;
use engine::{DiskFile, Identity, Locking};
use image::{Format, Image};
use tracing::warn;

use super::chain::{chain_facts, open_chain};
use super::close::unlock;
use super::open::{load_recorded_bitmaps, raw_image};
use super::{Node, NodeError, NodeState};
use crate::config::spec::FileSpec;

impl Node {
    /// Whether this process has its files locked, and may write to them.
    pub fn is_acquired(&self) -> bool {
        self.state().image.is_some()
    }

    /// Releases the disk. None of its queues is served. Returns false if it was released before.
    ///
    /// # Errors
    /// Something could not be made durable, and it is not released.
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
        // First, since there may be no descriptor left. An open descriptor of a device is a lock as well.
        let cache = self.spec.cache;
        let unlocked = match DiskFile::open_with(path, cache, false, Locking::None) {
            Ok(unlocked) => Arc::new(unlocked),
            Err(e) => {
                warn!("{e}; its descriptor stays open");
                file
            }
        };
        let left = self.described(&unlocked);
        disk.sync().map_err(|e| fail("be made durable", e))?;
        let written = files.iter().filter(|file| !file.facts().read_only);
        let written: Vec<_> = written.cloned().collect();
        // In every cache mode: cache=unsafe gives up durability only for crashes.
        self.close_image(&image, &written)
            .map_err(|e| fail("be closed", e))?;
        self.release_recorded_bitmaps()
            .map_err(|e| fail("have its bitmaps marked as inconsistent", e))?;
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

    /// Acquires a released disk: locks it, and reopens its files. Returns false if it was not released.
    ///
    /// # Errors
    /// Another host has the lock, or the disk can no longer be served; it stays released.
    pub fn reacquire(&self, disk: &Disk) -> Result<bool, NodeError> {
        self.take(&[], |state, facts| {
            let image = state.image.clone().unwrap_or_else(Image::raw);
            let files = self.descriptors(state);
            disk.reacquire(image, files, facts, state.size)
                .map_err(|e| NodeError::Io(self.filename.clone(), "be taken back", e))
        })
    }

    /// Acquires a node that is to replace another. It may build on `ours`, as in [`open`](Self::open).
    ///
    /// # Errors
    /// Another host has the lock, or the node cannot be served.
    pub fn acquire(&self, ours: &[Identity]) -> Result<(), NodeError> {
        self.take(ours, |_, _| Ok(())).map(drop)
    }

    /// Locks a released node, reopens its files, and calls `then`. After an error, the node stays released.
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
        // Reopened, since network file systems then see what another host has written.
        let file = Arc::new(DiskFile::open(path, self.spec.cache, false)?);
        file.drop_cached();
        let taken = self.read_anew(path, &file, ours, &[]);
        let taken = taken.and_then(|(state, facts)| {
            then(&state, &facts)?;
            self.put_in(state);
            Ok(true)
        });
        taken.inspect_err(|_| drop(file.unlock()))
    }

    /// Replaces the state.
    pub(super) fn put_in(&self, new: NodeState) {
        let mut state = self.state();
        let on_damage = state.on_damage.take();
        *state = NodeState { on_damage, ..new };
        state.watch_damage();
    }

    /// Opens the image in a locked file.
    pub(super) fn read_anew(
        &self,
        path: &Path,
        file: &Arc<DiskFile>,
        ours: &[Identity],
        held: &[Arc<DiskFile>],
    ) -> Result<(NodeState, DiskFacts), NodeError> {
        let state = NodeState {
            image: Some(Image::raw()),
            file: Some(file.clone()),
            files: Vec::new(),
            size: 0,
            cuts: 0,
            allocated: None,
            is_deleted: false,
            depth: 0,
            journal: None,
            recorded_bitmaps: None,
            on_damage: None,
        };
        match self.format {
            Format::Raw => {
                let size = file.raw_size(path)?;
                let recorded_bitmaps =
                    load_recorded_bitmaps(&self.spec, &self.context, path, file, size)?;
                let state = NodeState {
                    size,
                    image: Some(raw_image(recorded_bitmaps.as_ref())),
                    recorded_bitmaps,
                    ..state
                };
                Ok((state, self.facts))
            }
            Format::Qcow2 => {
                let (spec, context) = (&self.spec, &self.context);
                let opened = open_chain(spec, path, file, context, Locking::Now, ours, held)?;
                let (chain, files) = (opened.chain, opened.files);
                let facts = chain_facts(&chain, &files);
                let state = NodeState {
                    size: chain.size(),
                    depth: chain.depth() - 1,
                    image: Some(Image::Chain(chain)),
                    files,
                    journal: opened.journal,
                    recorded_bitmaps: opened.bitmaps,
                    ..state
                };
                Ok((state, facts))
            }
        }
    }
}
