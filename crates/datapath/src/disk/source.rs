//! The file that a disk is in. It may be replaced while the disk is served.

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

/// What holds the bytes of a disk.
pub enum Storage {
    /// A file, opened as the disk's cache mode requires, and locked; its type, and how its bytes are moved.
    File(Arc<OwnedFd>, Backing, Aio),
    /// Storage that is not a file.
    Remote(Arc<dyn Remote>),
}

impl From<(Arc<OwnedFd>, Backing, Aio)> for Storage {
    fn from((file, backing, aio): (Arc<OwnedFd>, Backing, Aio)) -> Self {
        Self::File(file, backing, aio)
    }
}

/// What the address and length of a buffer must be multiples of to reach a file without a copy, in bytes.
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

    /// The file, if it is one.
    pub fn file(&self) -> Option<&OwnedFd> {
        match &self.storage {
            Storage::File(fd, Backing::File, _) => Some(fd),
            Storage::File(..) | Storage::Remote(_) => None,
        }
    }

    /// The storage, if it is not a file.
    pub fn remote(&self) -> Option<&dyn Remote> {
        match &self.storage {
            Storage::Remote(remote) => Some(&**remote),
            Storage::File(..) => None,
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
