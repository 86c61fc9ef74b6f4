//! The file that holds a disk. It may be replaced by another while the disk is served.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use block::{Aio, Backing, DiskFacts, Engine, FileId, Remote};

use super::flush_coalescer::FlushCoalescer;

pub(crate) struct Source {
    storage: Storage,
    pub alignment: Alignment,
    pub coalescer: FlushCoalescer,
}

/// Where bytes are.
pub enum Storage {
    /// In a file: open as the disk's cache mode demands, and locked; and how its bytes are to be moved.
    File(Arc<OwnedFd>, Backing, Aio),
    /// In storage that is no file.
    Remote(Arc<dyn Remote>),
}

impl From<(Arc<OwnedFd>, Backing, Aio)> for Storage {
    fn from((file, backing, aio): (Arc<OwnedFd>, Backing, Aio)) -> Self {
        Self::File(file, backing, aio)
    }
}

/// What a buffer must be a multiple of to reach a file without a copy, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Alignment {
    pub address: u32,
    pub len: u32,
}

impl Source {
    /// `cached` if it is read and written through the page cache.
    pub fn new(storage: Storage, facts: &DiskFacts, cached: bool) -> Self {
        let alignment = Alignment {
            address: facts.address_alignment,
            len: facts.length_alignment,
        };
        Self {
            storage,
            alignment,
            coalescer: FlushCoalescer::new(cached),
        }
    }

    /// Makes it known to an engine.
    pub fn attach(&self, engine: &mut impl Engine) -> io::Result<FileId> {
        match &self.storage {
            Storage::File(fd, backing, aio) => engine.attach(fd, *backing, *aio),
            Storage::Remote(remote) => engine.attach_remote(remote),
        }
    }

    /// Makes every write that has completed durable, waiting for it.
    pub fn sync(&self) -> io::Result<()> {
        self.coalescer.sync(|| match &self.storage {
            Storage::File(fd, ..) => Ok(rustix::io::retry_on_intr(|| rustix::fs::fdatasync(fd))?),
            Storage::Remote(remote) => remote.sync(),
        })
    }
}
