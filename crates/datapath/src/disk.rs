//! A disk, as all threads that serve it share it.

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
use outage::Outage;
use source::{Source, Storage};

use crate::report::{IoEvent, LogLimiter};
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
    /// Its image goes by tables.
    is_mapped: AtomicBool,
    /// What it is in may be changed by somebody else at the moment.
    is_released: AtomicBool,
    /// Held while the file is replaced.
    pub(crate) replacing: Mutex<()>,
    pub(crate) options: Options,
    pub(crate) errors: LogLimiter,
    image_errors: LogLimiter,
    /// A front-end of it has held up an I/O thread.
    blocks_threads: AtomicBool,
    pub(crate) admission: Admission,
    pub(crate) statistics: Statistics,
    pub(crate) outage: Outage,
    failures: LogLimiter,
    on_event: OnceLock<OnEvent>,
    size: AtomicU64,
    write_cache: AtomicBool,
    /// Writes of zeroes are looked for.
    detect_zeroes: AtomicBool,
}

/// What a disk is in, as far as it may have to be read anew.
#[derive(Clone)]
pub(crate) struct Content {
    pub image: Image,
    /// All files of an image that goes by tables, by their numbers in it.
    pub files: Vec<Arc<Source>>,
}

type OnEvent = Box<dyn Fn(&IoEvent) + Send + Sync>;

/// Longer than any storage takes that works, and shorter than service managers wait for a process to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

impl Content {
    /// From where it is, as for [`Disk::new`]; with the one that is written.
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
    /// What is durable when. The file was opened for it: here, it says whether flushes are obeyed, and
    /// whether the guest is told of a write cache at first.
    pub cache: CacheMode,
    /// Whether the guest is offered to give space back, and whether its write-zeroes may do so.
    pub discard: Discard,
    /// What becomes of writes of nothing but zeroes.
    pub detect_zeroes: DetectZeroes,
    /// Guest memory may be registered with the engine, which is right only if no page of it is ever
    /// replaced (no balloon, no free page reporting).
    pub fixed_buffers: bool,
    /// What is done about a read that storage failed to serve.
    pub rerror: OnError,
    /// The same for whatever changes the disk, and for flushes.
    pub werror: OnError,
    /// How long a queue that stops waits for operations that storage does not answer.
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
    /// A disk of `size` bytes in these files: none, one, or, if its image goes by tables, all of them by
    /// their numbers there. A serial longer than GET_ID can carry is cut.
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

    /// A disk of `size` bytes in what is no file; else as [`new`](Self::new).
    pub fn remote(
        name: String,
        remote: Arc<dyn Remote>,
        facts: DiskFacts,
        size: u64,
        serial: &str,
        options: Options,
    ) -> Self {
        let storage = [Storage::Remote(remote)];
        Self::at(name, Image::Raw, storage, facts, size, serial, options)
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
        // What cannot give space back would write the zeroes all the same, and slower.
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
            replacing: Mutex::default(),
            options,
            errors: LogLimiter::default(),
            image_errors: LogLimiter::default(),
            blocks_threads: AtomicBool::new(false),
            admission: Admission::default(),
            statistics: Statistics::default(),
            outage: Outage::default(),
            failures: LogLimiter::default(),
            on_event: OnceLock::new(),
            size: AtomicU64::new(size),
            write_cache: AtomicBool::new(options.cache.write_cache()),
            detect_zeroes: AtomicBool::new(detect_zeroes),
        }
    }

    /// Whether a front-end of it has held up an I/O thread. What that one is remembered for is the disk: it may connect
    /// anew at any time.
    pub(crate) fn blocks_threads(&self) -> bool {
        self.blocks_threads.load(Ordering::Relaxed)
    }

    /// It has.
    pub(crate) fn set_blocks_threads(&self) {
        self.blocks_threads.store(true, Ordering::Relaxed);
    }

    pub(crate) fn content(&self) -> Content {
        let content = self.content.lock();
        content.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Leaves what it is in to somebody else, who may change it. It is durable, and no queue is served before
    /// [`reacquire`](Self::reacquire). Nothing of it is kept open but `file`, of which nothing is
    /// read or written.
    pub fn release(&self, file: Option<(Arc<OwnedFd>, Backing, Aio)>) {
        self.is_released.store(true, Ordering::Relaxed);
        let cache = self.options.cache;
        let (content, source) = Content::new(Image::Raw, file, &self.facts, cache);
        self.set_content(content, source);
    }

    /// It is in this from now on. No queue of it is served meanwhile.
    pub(crate) fn set_content(&self, content: Content, source: Option<Arc<Source>>) {
        let is_mapped = content.image.chain().is_some();
        self.is_mapped.store(is_mapped, Ordering::Relaxed);
        if let Some(source) = source {
            self.set_source(source);
        }
        *self.content.lock().unwrap_or_else(PoisonError::into_inner) = content;
    }

    /// Goes on with what was read anew. Files as for [`new`](Self::new).
    ///
    /// # Errors
    /// It does not fit what the guest knows of its disk, which stays away.
    pub fn reacquire(
        &self,
        image: Image,
        files: impl IntoIterator<Item = (Arc<OwnedFd>, Backing, Aio)>,
        facts: &DiskFacts,
        size: u64,
    ) -> io::Result<()> {
        let problem = if size < self.size() {
            format!("it has {size} bytes, and had {}", self.size())
        } else if facts.logical_block > self.facts.logical_block {
            format!("it is written in blocks of {} now", facts.logical_block)
        } else {
            let cache = self.options.cache;
            let (content, source) = Content::new(image, files, facts, cache);
            self.set_content(content, source);
            self.grow(size);
            self.is_released.store(false, Ordering::Relaxed);
            return Ok(());
        };
        Err(io::Error::other(format!(
            "disk {}: cannot go on with what was changed elsewhere: {problem}",
            self.name
        )))
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

    /// Whether the page cache has lost something that was written: nothing is durable any more.
    pub fn lost_writes(&self) -> bool {
        let source = self.source();
        source.is_some_and(|source| source.coalescer.lost().is_some())
    }

    /// Makes every write that has completed durable, waiting for it; with `cache=unsafe` it does
    /// nothing, as a guest's flush.
    ///
    /// # Errors
    /// It could not be made durable, or what the page cache held was lost earlier.
    pub fn sync(&self) -> io::Result<()> {
        if self.is_released.load(Ordering::Relaxed) {
            return Ok(());
        }
        if let Some(chain) = self.content().image.chain() {
            return match self.flushes() {
                true => chain.flush().map_err(io::Error::other),
                false => Ok(()),
            };
        }
        match self.source() {
            Some(source) if self.flushes() && self.options.cache.flushes() => source.sync(),
            _ => Ok(()),
        }
    }

    /// Whether what changes the disk completes only once it is durable.
    #[inline]
    pub(crate) fn completes_when_durable(&self) -> bool {
        !self.write_cache() && self.flushes() && self.options.cache.flushes()
    }

    /// Whether writes are made durable one by one, as they are written (`RWF_DSYNC`).
    ///
    /// Past the page cache, that took 0.5 to 0.7 of the time of a write and a shared fdatasync
    /// at depths 1 and 8 (ext4 on a virtual disk, 4k random writes), and 1.3 times as long at depth 32,
    /// which guests without a write cache seldom reach. Through the page cache it must not be: one
    /// write would be told of the error of another, and that one of none.
    #[inline]
    pub(crate) fn writes_are_stable(&self) -> bool {
        self.completes_when_durable() && self.options.cache.direct()
    }

    /// Whether there is anything that a flush must do. With `cache=unsafe`, that is to write the changed
    /// tables of an image to its file, so that the end of this process costs nothing, as in QEMU.
    pub(crate) fn flushes(&self) -> bool {
        let obeyed = self.options.cache.flushes() || self.is_mapped.load(Ordering::Relaxed);
        self.source.is_some() && obeyed && !self.facts.read_only
    }

    /// Changes that for operations that are submitted from now on. To switch the cache off, stop the
    /// queues, switch, and [`sync`](Self::sync).
    pub fn set_write_cache(&self, on: bool) {
        self.write_cache.store(on, Ordering::Relaxed);
    }

    /// Has `tell` called when a request fails for want of working storage (not for what the guest did
    /// wrong), once a second at most, and when none waits for it any more. I/O threads call it: it must
    /// not block. It can be set once; returns whether it was.
    pub fn on_event(&self, tell: impl Fn(&IoEvent) + Send + Sync + 'static) -> bool {
        self.on_event.set(Box::new(tell)).is_ok()
    }

    pub(crate) fn tell(&self, event: &IoEvent) {
        if let Some(tell) = self.on_event.get() {
            tell(event);
        }
    }

    /// A request failed; `event` makes the message, with how many were left out.
    #[cold]
    pub(crate) fn failed(&self, event: impl FnOnce(u64) -> IoEvent) {
        self.failures.log(|left_out| self.tell(&event(left_out.0)));
    }

    /// The disk's own limits.
    pub fn limits(&self) -> ThrottleLimits {
        self.admission.limits()
    }

    /// Changes them, for requests that come or wait from now on.
    ///
    /// # Errors
    /// The limits contradict each other; the old ones stay.
    pub fn set_limits(&self, limits: &ThrottleLimits) -> Result<(), ThrottleError> {
        self.admission.set_limits(limits)
    }

    /// The group whose limits apply too.
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

    /// Whether the space of what was found to be zeroes is given back.
    pub(crate) fn detected_unmap(&self) -> bool {
        self.options.detect_zeroes == DetectZeroes::Unmap && self.options.discard == Discard::Unmap
    }

    pub(crate) fn stop_detecting_zeroes(&self) {
        self.detect_zeroes.store(false, Ordering::Relaxed);
    }

    /// Logs what an image says of a request or flush that failed; what becomes of that is another line.
    #[cold]
    pub(crate) fn image_failed(&self, error: &ImageError) {
        self.image_errors.log(|left_out| {
            warn!("disk {}: {error}{left_out}", self.name);
        });
    }

    /// Logs that a queue cannot be served where or as large as the guest says.
    pub fn ring_failed(&self, ring: u16, error: &RingError) {
        self.errors.log(|left_out| {
            warn!(
                "disk {}: queue {ring} cannot be served as the guest set it up: {error}{left_out}",
                self.name
            );
        });
    }

    /// Logs that a queue is served without a record of its requests in flight.
    pub fn ring_untracked(&self, ring: u16, size: u16) {
        self.errors.log(|left_out| {
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

    /// Whether its page cache has lost something with this errno.
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

    /// Measures latencies from now on, for as long as the returned value lives.
    pub fn measure(self: &Arc<Self>) -> Measuring {
        self.statistics.start_measuring();
        Measuring(self.clone())
    }

    /// Requests that storage failed to serve, and that wait for it to work again.
    pub fn stalled(&self) -> u64 {
        self.outage.stalled() as u64
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
