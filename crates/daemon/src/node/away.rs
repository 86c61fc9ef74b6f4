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

use std::io;
use std::sync::Arc;

use block::DiskFacts;
use datapath::Disk;
use engine::{DiskFile, Locking};
use image::{Format, Image};
use tracing::warn;

use super::{Content, Node, NodeError, chain_facts, open_chain};
use crate::spec::FileSpec;

impl Node {
    /// Whether its files are locked, and may be written to.
    pub fn is_here(&self) -> bool {
        self.content().image.is_some()
    }

    /// Leaves the disk to another host. No queue of it is served. Returns whether that is news.
    ///
    /// # Errors
    /// Something could not be made durable, and it is not left.
    pub fn give_up(&self, disk: &Disk) -> Result<bool, NodeError> {
        let fail = |what, e| NodeError::Io(self.filename.clone(), what, e);
        let mut content = self.content();
        let (Some(image), Some(file), FileSpec::Path(path)) =
            (content.image.clone(), content.file.clone(), &self.spec.file)
        else {
            return Ok(false);
        };
        if self.facts.read_only {
            return Ok(false);
        }
        disk.sync().map_err(|e| fail("be made durable", e))?;
        if let Image::Chain(chain) = &image {
            let closed = chain.close().map_err(io::Error::other);
            closed.map_err(|e| fail("be closed", e))?;
        }
        let mut files = content.files.clone();
        files.retain(|other| !Arc::ptr_eq(other, &file));
        files.push(file);
        for file in files.iter().filter(|file| !file.facts().read_only) {
            // Whatever the cache mode says: this is no crash.
            file.sync().map_err(|e| fail("be made durable", e))?;
        }
        // Not before: if it stays here, what is written from now on is kept in it.
        content.remove_journal();
        content.size = disk.size();
        content.image = None;
        content.files.clear();
        // Of a device, an open descriptor is a lock as well.
        let cache = self.spec.cache;
        match DiskFile::open_and(path, cache, false, Locking::Later) {
            Ok(unlocked) => content.file = Some(Arc::new(unlocked)),
            Err(e) => warn!("{e}; what is open of it stays so"),
        }
        disk.go_away(self.descriptors(&content)?.pop());
        for file in files {
            // One by one: the kernel may still hold descriptors of each, which would keep the lock.
            file.unlock().map_err(|e| fail("give up its lock", e))?;
        }
        Ok(true)
    }

    /// Takes a disk that is away: locks it, and reads it anew. Returns whether that is news.
    ///
    /// # Errors
    /// Somebody else has it, or it cannot be served any more; it stays away.
    pub fn take_back(&self, disk: &Disk) -> Result<bool, NodeError> {
        self.take(|content, facts| {
            let image = content.image.clone().unwrap_or(Image::Raw);
            let files = self.descriptors(content)?;
            disk.come_back(image, files, facts, content.size)
                .map_err(|e| NodeError::Io(self.filename.clone(), "be taken back", e))
        })
    }

    /// Takes what is away and takes the place of what is here.
    ///
    /// # Errors
    /// Somebody else has it, or it cannot be served.
    pub fn be_here(&self) -> Result<(), NodeError> {
        self.take(|_, _| Ok(())).map(drop)
    }

    /// Locks what is away, reads it anew, and does `then` with it, or leaves it away.
    fn take(
        &self,
        then: impl FnOnce(&Content, &DiskFacts) -> Result<(), NodeError>,
    ) -> Result<bool, NodeError> {
        let mut content = self.content();
        let (None, Some(unlocked), FileSpec::Path(path)) =
            (&content.image, content.file.clone(), &self.spec.file)
        else {
            return Ok(false);
        };
        // Anew: so do network file systems learn what was written elsewhere.
        let file = Arc::new(DiskFile::open(path, self.spec.cache, false)?);
        file.forget_cached();
        content.file = Some(file.clone());
        let result = (|| {
            let mut facts = self.facts;
            match self.format {
                Format::Raw => {
                    content.size = file.raw_size(path)?;
                    content.image = Some(Image::Raw);
                }
                Format::Qcow2 => {
                    let opened = open_chain(&self.spec, path, &file, &self.places, Locking::Now)?;
                    let (chain, files) = (opened.chain, opened.files);
                    facts = chain_facts(&chain, &files);
                    (content.size, content.depth) = (chain.size(), chain.depth() - 1);
                    (content.image, content.files) = (Some(Image::Chain(Arc::new(chain))), files);
                    content.journal = opened.journal;
                }
            }
            then(&content, &facts)
        })();
        match result {
            Ok(()) => content.watch_damage(),
            Err(_) => {
                content.image = None;
                content.files.clear();
                content.file = Some(unlocked);
                let _ = file.unlock();
            }
        }
        result.map(|()| true)
    }
}
