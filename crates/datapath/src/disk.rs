//! A disk, as all threads that serve it share it.

mod allocation;
pub(crate) mod fleece;
pub(crate) mod flush_coalescer;
pub(crate) mod outage;
pub(crate) mod source;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use block::{
    Aio, Backing, CacheMode, DetectZeroes, Discard, DiskFacts, OnError, Remote, ThrottleError,
    ThrottleLimits,
};
use guest::{RingError, blk};
use image::{Image, ImageError};
use tracing::warn;

use crate::throttle::admission::Admission;
use fleece::Fleece;
use outage::Outage;
use source::{Source, Storage};

use crate::clock::now_ns;
use crate::report::{IoEvent, LogLimiter};
pub use allocation::{AllocatedExtent, AllocationCache};

use crate::stats::histogram::Histogram;
use crate::stats::{DiskStats, Statistics};
use crate::throttle::ThrottleGroup;

/// What is served: an image, the file it is in, and what the guest is told of it.
pub struct Disk {
    /// The operator's name for it.
    pub name: String,
    /// What never changes.
    pub facts: DiskFacts,
    /// The answer to GET_ID: the serial, padded with zeroes.
    pub id: [u8; blk::ID_BYTES],
    content: Mutex<Content>,
    pub(crate) source: Option<Mutex<Arc<Source>>>,
    /// Its image is mapped.
    is_mapped: AtomicBool,
    /// It was released: another process may change its files.
    is_released: AtomicBool,
    /// Where old data goes while a backup is open.
    fleece: Mutex<Option<Arc<Fleece>>>,
    /// Held while the file is replaced.
    pub(crate) replacing: Mutex<()>,
    pub(crate) options: Options,
    /// Limits log lines about requests that storage failed to serve. Nothing else uses it, or a guest could hide them.
    pub(crate) storage_errors: LogLimiter,
    /// Limits log lines that the guest or its front-end can cause.
    pub(crate) guest_errors: LogLimiter,
    image_errors: LogLimiter,
    /// A front-end of the disk has blocked an I/O thread.
    blocks_threads: AtomicBool,
    pub(crate) admission: Arc<Admission>,
    pub(crate) statistics: Statistics,
    pub(crate) outage: Outage,
    failures: LogLimiter,
    on_event: OnceLock<OnEvent>,
    size: AtomicU64,
    write_cache: AtomicBool,
    /// Writes of nothing but zeroes become write-zeroes.
    detect_zeroes: AtomicBool,
}

/// The image that a disk is in, with its files. It is replaced when the image is opened again.
#[derive(Clone)]
pub(crate) struct Content {
    pub image: Image,
    /// All files of a mapped image, by their numbers in it.
    pub files: Vec<Arc<Source>>,
}

type OnEvent = Box<dyn Fn(&IoEvent) + Send + Sync>;

/// Storage is said to hang when it has not answered for this long. Working storage seldom takes as long, and guests report
/// hung tasks much later.
pub const HANG: Duration = Duration::from_secs(4);

/// Longer than working storage takes, and shorter than service managers wait for a process to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

impl Content {
    /// From the storage, as for [`Disk::new`]. Also returns the file that is written.
    pub fn new(
        image: Image,
        storage: impl IntoIterator<Item = impl Into<Storage>>,
        facts: &DiskFacts,
        cache: CacheMode,
    ) -> (Self, Option<Arc<Source>>) {
        let source = |storage: Storage| Arc::new(Source::new(storage, facts, !cache.direct()));
        let storage = storage.into_iter().map(Into::into);
        let mut files: Vec<_> = storage.map(source).collect();
        let source = match image.chain() {
            Some(chain) => files.get(usize::from(chain.written_file().0)).cloned(),
            None => files.pop(),
        };
        (Self { image, files }, source)
    }
}

/// What the operator chose for a disk.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// When writes are durable. The file was opened for this mode; here it says whether flushes do anything, and
    /// whether the guest is offered a write cache at first.
    pub cache: CacheMode,
    /// Whether the guest may give space back with discards, and with write-zeroes.
    pub discard: Discard,
    /// What becomes of writes of nothing but zeroes.
    pub detect_zeroes: DetectZeroes,
    /// Guest memory may be registered with the engine. That is safe only if no page of it is ever replaced (no balloon,
    /// no free page reporting).
    pub fixed_buffers: bool,
    /// What is done about a read that storage failed to serve.
    pub rerror: OnError,
    /// The same for requests that change the disk, and for flushes.
    pub werror: OnError,
    /// How long a queue that stops waits for storage that does not answer.
    pub stop_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cache: CacheMode::None,
            discard: Discard::Unmap,
            detect_zeroes: DetectZeroes::Off,
            fixed_buffers: false,
            rerror: OnError::Report,
            werror: OnError::Enospc,
            stop_timeout: STOP_TIMEOUT,
        }
    }
}

impl Disk {
    /// A disk of `size` bytes in these files: none, one, or, if its image is mapped, all of them by their numbers in
    /// it. A serial longer than GET_ID can carry is truncated.
    pub fn new(
        name: String,
        image: Image,
        files: impl IntoIterator<Item = (Arc<OwnedFd>, Backing, Aio)>,
        facts: DiskFacts,
        size: u64,
        serial: &str,
        options: Options,
    ) -> Self {
        Self::at(name, image, files, facts, size, serial, options)
    }

    /// A disk of `size` bytes in storage that is not a file; otherwise as [`new`](Self::new).
    pub fn remote(
        name: String,
        image: Image,
        remote: Arc<dyn Remote>,
        facts: DiskFacts,
        size: u64,
        serial: &str,
        options: Options,
    ) -> Self {
        let storage = [Storage::Remote(remote)];
        Self::at(name, image, storage, facts, size, serial, options)
    }

    fn at(
        name: String,
        image: Image,
        storage: impl IntoIterator<Item = impl Into<Storage>>,
        mut facts: DiskFacts,
        size: u64,
        serial: &str,
        options: Options,
    ) -> Self {
        let mut id = [0; blk::ID_BYTES];
        let len = serial.len().min(id.len());
        id[..len].copy_from_slice(&serial.as_bytes()[..len]);
        let is_mapped = AtomicBool::new(image.chain().is_some());
        let (content, source) = Content::new(image, storage, &facts, options.cache);
        let source = source.map(Mutex::new);
        // Storage that cannot give space back would write the zeroes all the same, and slower.
        let detect_zeroes = options.detect_zeroes != DetectZeroes::Off
            && source.is_some()
            && !facts.read_only
            && facts.discard_granularity != 0;
        if options.discard == Discard::Ignore {
            facts.discard_granularity = 0;
        }
        Self {
            name,
            facts,
            id,
            content: Mutex::new(content),
            source,
            is_mapped,
            is_released: AtomicBool::new(false),
            fleece: Mutex::default(),
            replacing: Mutex::default(),
            options,
            storage_errors: LogLimiter::default(),
            guest_errors: LogLimiter::default(),
            image_errors: LogLimiter::default(),
            blocks_threads: AtomicBool::new(false),
            admission: Arc::default(),
            statistics: Statistics::default(),
            outage: Outage::default(),
            failures: LogLimiter::default(),
            on_event: OnceLock::new(),
            size: AtomicU64::new(size),
            write_cache: AtomicBool::new(options.cache.write_cache()),
            detect_zeroes: AtomicBool::new(detect_zeroes),
        }
    }

    /// Whether a front-end of the disk has blocked an I/O thread. This is remembered for the disk, because the
    /// front-end may connect again at any time.
    pub(crate) fn blocks_threads(&self) -> bool {
        self.blocks_threads.load(Ordering::Relaxed)
    }

    pub(crate) fn set_blocks_threads(&self) {
        self.blocks_threads.store(true, Ordering::Relaxed);
    }

    /// Where old data goes that requests change, while a backup is open.
    pub fn fleece(&self) -> Option<Arc<Fleece>> {
        let fleece = self.fleece.lock();
        fleece.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_fleece(&self, fleece: Option<Arc<Fleece>>) {
        *self.fleece.lock().unwrap_or_else(PoisonError::into_inner) = fleece;
    }

    pub(crate) fn content(&self) -> Content {
        let content = self.content.lock();
        content.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Releases the disk to another process, which may change its files. The disk is durable, and none of its queues is
    /// served before [`reacquire`](Self::reacquire). Only `file` stays open, and nothing of it is read or written.
    pub fn release(&self, file: Option<(Arc<OwnedFd>, Backing, Aio)>) {
        self.is_released.store(true, Ordering::Relaxed);
        let cache = self.options.cache;
        let (content, source) = Content::new(Image::raw(), file, &self.facts, cache);
        self.set_content(content, source);
    }

    /// The disk is in this content from now on. None of its queues is served meanwhile.
    pub(crate) fn set_content(&self, content: Content, source: Option<Arc<Source>>) {
        let is_mapped = content.image.chain().is_some();
        self.is_mapped.store(is_mapped, Ordering::Relaxed);
        if let Some(source) = source {
            self.set_source(source);
        }
        *self.content.lock().unwrap_or_else(PoisonError::into_inner) = content;
    }

    /// Continues with files that were opened again. Files as for [`new`](Self::new).
    ///
    /// # Errors
    /// The files do not fit the disk that the guest knows. The disk stays released.
    pub fn reacquire(
        &self,
        image: Image,
        files: impl IntoIterator<Item = (Arc<OwnedFd>, Backing, Aio)>,
        facts: &DiskFacts,
        size: u64,
    ) -> io::Result<()> {
        let problem = if size < self.size() {
            format!("its size shrank from {} to {size} bytes", self.size())
        } else if facts.logical_block > self.facts.logical_block {
            format!("its block size grew to {} bytes", facts.logical_block)
        } else {
            let cache = self.options.cache;
            let (content, source) = Content::new(image, files, facts, cache);
            self.set_content(content, source);
            self.grow(size);
            self.is_released.store(false, Ordering::Relaxed);
            return Ok(());
        };
        Err(io::Error::other(format!(
            "disk {}: cannot continue with the changed file: {problem}",
            self.name
        )))
    }

    /// Bytes that the guest can address.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// The disk has grown.
    pub fn grow(&self, size: u64) {
        self.size.fetch_max(size, Ordering::Relaxed);
    }

    /// Whether a completed write may be lost until the next flush. If not, every write is made
    /// durable before it completes.
    pub fn write_cache(&self) -> bool {
        self.write_cache.load(Ordering::Relaxed)
    }

    /// Whether the page cache has lost writes: nothing is durable any more.
    pub fn lost_writes(&self) -> bool {
        let source = self.source();
        source.is_some_and(|source| source.coalescer.lost().is_some())
    }

    /// Makes every completed write durable, and waits for it. With `cache=unsafe` it does nothing, like a guest's
    /// flush.
    ///
    /// # Errors
    /// The writes could not be made durable, or the page cache has lost writes before.
    pub fn sync(&self) -> io::Result<()> {
        if self.is_released.load(Ordering::Relaxed) {
            return Ok(());
        }
        if let Some(chain) = self.content().image.chain() {
            return if self.flushes() {
                chain.flush().map_err(io::Error::other)
            } else {
                Ok(())
            };
        }
        match self.source() {
            Some(source) if self.flushes() && self.options.cache.flushes() => source.sync(),
            _ => Ok(()),
        }
    }

    /// Whether requests that change the disk complete only when they are durable.
    #[inline]
    pub(crate) fn completes_when_durable(&self) -> bool {
        !self.write_cache() && self.flushes() && self.options.cache.flushes()
    }

    /// Whether writes are made durable one by one, as they are written (`RWF_DSYNC`).
    ///
    /// With O_DIRECT, that took 0.5 to 0.7 of the time of a write and a shared fdatasync at depths 1 and 8 (ext4 on a
    /// virtual disk, 4k random writes), and 1.3 times as long at depth 32, which guests without a write cache seldom
    /// reach. Through the page cache it would be wrong: the error of one write would be reported to another.
    #[inline]
    pub(crate) fn writes_are_stable(&self) -> bool {
        self.completes_when_durable() && self.options.cache.direct()
    }

    /// Whether a flush does anything. With `cache=unsafe`, it writes the changed tables of an image to its file, so
    /// that nothing is lost when this process ends, as in QEMU.
    pub(crate) fn flushes(&self) -> bool {
        let obeyed = self.options.cache.flushes() || self.is_mapped.load(Ordering::Relaxed);
        self.source.is_some() && obeyed && !self.facts.read_only
    }

    /// Changes the write cache for operations that are submitted from now on. To switch it off, stop the queues,
    /// switch, and [`sync`](Self::sync).
    pub fn set_write_cache(&self, on: bool) {
        self.write_cache.store(on, Ordering::Relaxed);
    }

    /// Has `tell` called when a request fails because storage does (not because the guest made a mistake), once a
    /// second at most, and when no request is stalled any more. I/O threads call it: it must not block. It can be set
    /// once; returns whether it was.
    pub fn on_event(&self, tell: impl Fn(&IoEvent) + Send + Sync + 'static) -> bool {
        self.on_event.set(Box::new(tell)).is_ok()
    }

    pub(crate) fn send_event(&self, event: &IoEvent) {
        if let Some(tell) = self.on_event.get() {
            tell(event);
        }
    }

    /// A request failed; `event` makes the message, with the number of messages that were suppressed.
    #[cold]
    pub(crate) fn failed(&self, event: impl FnOnce(u64) -> IoEvent) {
        self.failures
            .log(|left_out| self.send_event(&event(left_out.0)));
    }

    /// The disk's own limits.
    pub fn limits(&self) -> ThrottleLimits {
        self.admission.limits()
    }

    /// Changes them, for requests that are waiting and for new ones.
    ///
    /// # Errors
    /// The limits contradict each other; the old ones stay.
    pub fn set_limits(&self, limits: &ThrottleLimits) -> Result<(), ThrottleError> {
        self.admission.set_limits(limits)
    }

    /// The group whose limits apply as well.
    pub fn throttle_group(&self) -> Option<Arc<ThrottleGroup>> {
        self.admission.group()
    }

    /// Moves the disk to a group, or out of the one it is in.
    pub fn set_throttle_group(&self, group: Option<Arc<ThrottleGroup>>) {
        self.admission.set_group(group);
    }

    #[inline]
    pub(crate) fn detects_zeroes(&self) -> bool {
        self.detect_zeroes.load(Ordering::Relaxed)
    }

    /// Whether the space of writes of zeroes is given back.
    pub(crate) fn detected_unmap(&self) -> bool {
        self.options.detect_zeroes == DetectZeroes::Unmap && self.options.discard == Discard::Unmap
    }

    pub(crate) fn stop_detecting_zeroes(&self) {
        self.detect_zeroes.store(false, Ordering::Relaxed);
    }

    /// Logs an image's error for a request or flush. What is done about it is logged separately.
    #[cold]
    pub(crate) fn image_failed(&self, error: &ImageError) {
        self.image_errors.log(|left_out| {
            warn!("disk {}: {error}{left_out}", self.name);
        });
    }

    /// Logs that a queue cannot be served with the address or size that the guest set.
    pub fn ring_failed(&self, ring: u16, error: &RingError) {
        self.guest_errors.log(|left_out| {
            warn!(
                "disk {}: queue {ring} cannot be served as the guest set it up: {error}{left_out}",
                self.name
            );
        });
    }

    /// Logs that a queue is served without a record of its requests in flight.
    pub fn ring_untracked(&self, ring: u16, size: u16) {
        self.guest_errors.log(|left_out| {
            warn!(
                "disk {}: queue {ring} is served without a record of its requests in flight: the region that the \
                 front-end keeps for it has fewer entries than the queue, which has {size}; it is slower, and if \
                 ringdisk is killed, its guest may have to be reset; reboot or reset the guest (or unplug and plug \
                 the disk) to get a larger region{left_out}",
                self.name
            );
        });
    }

    /// The file that the disk is in now, if it needs one.
    pub(crate) fn source(&self) -> Option<Arc<Source>> {
        Some(self.lock_source()?.clone())
    }

    /// Whether the page cache has lost writes of the disk, with this errno.
    pub(crate) fn has_lost(&self, errno: i32) -> bool {
        self.source().and_then(|s| s.coalescer.lost()) == Some(errno)
    }

    fn set_source(&self, new: Arc<Source>) {
        if let Some(mut source) = self.lock_source() {
            *source = new;
        }
    }

    fn lock_source(&self) -> Option<MutexGuard<'_, Arc<Source>>> {
        let source = self.source.as_ref()?;
        Some(source.lock().unwrap_or_else(|e| e.into_inner()))
    }

    /// What has been counted so far, without latencies. Allocates nothing.
    pub fn counts(&self) -> DiskStats {
        self.statistics.counts(self.stalled())
    }

    /// What has been counted and measured so far.
    pub fn stats(&self) -> DiskStats {
        let mut stats = self.counts();
        self.statistics.add_latencies(&mut stats);
        stats
    }

    /// How long reads and writes of the guest took, from the available ring to the used ring, while a caller had that
    /// [measured](Self::measure). Those of clients do not count.
    pub fn guest_latencies(&self) -> Histogram {
        self.statistics.guest_latencies()
    }

    /// Measures latencies from now on, for as long as the returned value lives.
    pub fn measure(self: &Arc<Self>) -> Measuring {
        self.statistics.start_measuring();
        Measuring(self.clone())
    }

    /// Requests that storage failed to serve, and that wait for it to work again.
    pub fn stalled(&self) -> u64 {
        self.outage.stalled() as u64
    }

    /// How long storage has not answered an operation, if that is longer than [`HANG`]. Nothing is known before threads have
    /// been [told to check](crate::IoThread::check_ages), and not more than they found at the last check.
    pub fn hangs_for(&self) -> Option<Duration> {
        let since = self.statistics.unanswered_since()?;
        let time = Duration::from_nanos(now_ns().saturating_sub(since));
        (time >= HANG).then_some(time)
    }

    /// Whether new requests wait until the operator resumes the disk.
    pub fn is_stopped(&self) -> bool {
        self.admission.is_stopped()
    }

    /// Whether storage has not answered operations of queues that have stopped.
    pub fn is_abandoned(&self) -> bool {
        self.outage.abandoned.load(Ordering::Relaxed) > 0
    }
}

/// The latencies of a disk are measured while this lives.
pub struct Measuring(Arc<Disk>);

impl Drop for Measuring {
    fn drop(&mut self) {
        self.0.statistics.stop_measuring();
    }
}
