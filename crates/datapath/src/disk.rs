//! A disk, as all threads that serve it share it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use block::{Backing, DiskFacts};
use guest::blk;
use image::Image;

use crate::report::Limiter;

/// What is served: an image, the file it is in, and what the guest is told of it.
pub struct Disk {
    /// The operator's name for it.
    pub name: String,
    /// What never changes.
    pub facts: DiskFacts,
    /// The answer to GET_ID: the serial, padded with zeroes.
    pub id: [u8; blk::ID_BYTES],
    pub(crate) image: Image,
    pub(crate) file: Option<(OwnedFd, Backing)>,
    /// Guest memory may be registered with the engine: the operator says that no page of it is ever
    /// replaced.
    pub(crate) fixed_buffers: bool,
    pub(crate) errors: Limiter,
    size: AtomicU64,
    write_cache: AtomicBool,
}

impl Disk {
    /// A disk of `size` bytes, whose image is in `file` unless it needs none. A serial longer than
    /// GET_ID can carry is cut. With `fixed_buffers`, guest memory is registered with the engine,
    /// which is right only if no page of it is ever replaced (no balloon, no free page reporting).
    pub fn new(
        name: String,
        image: Image,
        file: Option<(OwnedFd, Backing)>,
        facts: DiskFacts,
        size: u64,
        serial: &str,
        fixed_buffers: bool,
    ) -> Self {
        let mut id = [0; blk::ID_BYTES];
        let len = serial.len().min(id.len());
        id[..len].copy_from_slice(&serial.as_bytes()[..len]);
        Self {
            name,
            facts,
            id,
            image,
            file,
            fixed_buffers,
            errors: Limiter::default(),
            size: AtomicU64::new(size),
            write_cache: AtomicBool::new(true),
        }
    }

    /// Bytes that the guest can address.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// The disk has become longer.
    pub fn grow(&self, size: u64) {
        self.size.fetch_max(size, Ordering::Relaxed);
    }

    /// Whether a completed write may be lost until the next flush. If not, every write is made
    /// durable before it completes.
    pub fn write_cache(&self) -> bool {
        self.write_cache.load(Ordering::Relaxed)
    }

    /// Changes that for requests that have not been fetched yet.
    pub fn set_write_cache(&self, on: bool) {
        self.write_cache.store(on, Ordering::Relaxed);
    }

    pub(crate) fn descriptor(&self) -> Option<(BorrowedFd<'_>, Backing)> {
        self.file
            .as_ref()
            .map(|(fd, backing)| (fd.as_fd(), *backing))
    }
}
