//! An opened image.

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{CacheMode, DataExtents, DiskFacts, Remote};
use tracing::error;

use crate::allocation;
use crate::cluster::{Connection, c_string, text_of};
use crate::error::{BLOCKLISTED, RbdError};
use crate::library::{Library, Pointer, allocator};
use crate::location::Location;
use crate::settings::{IMAGE_SETTINGS, Origin, Setting};
use crate::watch::{OnChange, SizeTracker, Watch, WatchedImage};

/// The unit in bytes that BlueStore by default writes without reading first.
const PHYSICAL_BLOCK: u32 = 4096;

/// RBD_FEATURE_EXCLUSIVE_LOCK of `rbd/features.h`.
const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;

/// How to open an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The image, and how to reach its cluster.
    pub location: Location,
    /// How caches are used. librbd's cache is on with `writeback` and `unsafe` only.
    pub cache: CacheMode,
    /// Refuse writes. A snapshot is always opened read-only.
    pub read_only: bool,
}

/// An opened image (`rbd_image_t`). Dropping it closes the image once all operations in flight have completed.
///
/// If the image has an exclusive lock, librbd acquires it with the first write, and releases it to another client that
/// asks for it.
pub struct RbdImage {
    location: Location,
    connection: Arc<Connection>,
    pool: Pointer,
    image: Pointer,
    facts: DiskFacts,
    settings: Vec<Setting>,
    tracker: Arc<SizeTracker>,
    watch: Option<Watch>,
    /// librbd's cache is on; it holds writes back until a flush.
    cached: bool,
    /// The log already says that the client is on the blocklist.
    blocklist_reported: AtomicBool,
}

// SAFETY: any thread may use an `rbd_image_t`, and several threads may use it at a time.
unsafe impl Send for RbdImage {}
// SAFETY: as above.
unsafe impl Sync for RbdImage {}

impl RbdImage {
    /// Opens an image.
    ///
    /// # Errors
    /// The image cannot be served as requested; the error says why and what to do.
    pub fn open(options: OpenOptions) -> Result<Arc<Self>, RbdError> {
        let cached = matches!(options.cache, CacheMode::Writeback | CacheMode::Unsafe);
        loop {
            let connection = Connection::to(&options.location, cached)?;
            let is_shared = Arc::strong_count(&connection) > 1;
            let opened = Self::open_on(connection.clone(), &options, cached);
            // A shared connection may turn out only here to be on the blocklist. The next attempt uses another
            // connection.
            if opened.is_ok() || !is_shared || !connection.is_blocklisted() {
                return opened;
            }
        }
    }

    pub(crate) fn open_on(
        connection: Arc<Connection>,
        options: &OpenOptions,
        cached: bool,
    ) -> Result<Arc<Self>, RbdError> {
        let (location, cache) = (options.location.clone(), options.cache);
        let name = location.to_string();
        let read_only = options.read_only || location.snapshot.is_some();
        let library = connection.library;
        let pool_name = c_string(&location.pool);
        let mut pool = ptr::null_mut();
        // SAFETY: the name ends with a zero byte and outlives the call; the cluster is connected.
        let found = unsafe {
            (library.rados_ioctx_create)(connection.cluster(), pool_name.as_ptr(), &mut pool)
        };
        connection
            .check(found)
            .map_err(|e| match e.raw_os_error() {
                Some(libc::ENOENT) => RbdError::Pool(name.clone(), location.pool.clone()),
                _ => RbdError::Io(name.clone(), "open its pool", e),
            })?;
        let mut this = Self {
            location,
            connection,
            pool,
            image: ptr::null_mut(),
            facts: DiskFacts {
                logical_block: 512,
                physical_block: PHYSICAL_BLOCK,
                optimal_io: 0,
                address_alignment: 1,
                length_alignment: 1,
                discard_granularity: 0,
                read_only,
            },
            settings: Vec::new(),
            tracker: SizeTracker::new(),
            watch: None,
            cached,
            blocklist_reported: AtomicBool::new(false),
        };
        // When the pool is full, librbd by default holds every write until the pool has space, and reports nothing.
        // With this setting the cluster refuses the writes that need space, and completes overwrites and discards; the
        // disk's `werror` decides what happens to refused writes. It is not set with librbd's cache: a write that the
        // cache has accepted can no longer be refused.
        if let (false, Some(try_it)) = (cached, library.rados_set_pool_full_try) {
            // SAFETY: the pool was opened above.
            unsafe { try_it(this.pool) };
        }
        this.open_image(read_only)?;
        if !read_only {
            let watch = Watch::start(this.watched(), this.tracker.clone());
            this.watch = Some(watch.map_err(|e| this.io("watch for changes", e))?);
        }
        let size = this.size();
        this.tracker.record_size(&size);
        let size = size.map_err(|e| this.io("read its size", e))?;
        if size == 0 || !size.is_multiple_of(512) {
            return Err(RbdError::Size(name, size));
        }
        this.settings = this.find_settings();
        if let Some(cache_setting) = this.setting("rbd_cache")
            && cache_setting.value == "true"
            && cache.direct()
        {
            return Err(RbdError::Cached {
                image: this.location.image_spec(),
                origin: format!("the {}'s own configuration", cache_setting.origin),
                cache: cache.to_string(),
            });
        }
        let granularity = this.setting("rbd_discard_granularity_bytes");
        let granularity = granularity.and_then(|s| s.value.parse::<u32>().ok());
        let mut unit = 0;
        // SAFETY: the image is open; the call writes one number.
        unsafe { (library.rbd_get_stripe_unit)(this.image, &mut unit) };
        this.facts.optimal_io = u32::try_from(unit).unwrap_or(0);
        if !read_only {
            this.facts.discard_granularity = granularity.unwrap_or(0).max(512);
        }
        Ok(Arc::new(this))
    }

    fn open_image(&mut self, read_only: bool) -> Result<(), RbdError> {
        let (library, location) = (self.connection.library, &self.location);
        if let Some(namespace) = &location.namespace {
            let namespace = c_string(namespace);
            // SAFETY: the name ends with a zero byte and outlives the call.
            unsafe { (library.rados_ioctx_set_namespace)(self.pool, namespace.as_ptr()) };
        }
        let image = c_string(&location.image);
        let snapshot = location.snapshot.as_deref().map(c_string);
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |s| s.as_ptr());
        let open = if read_only {
            library.rbd_open_read_only
        } else {
            library.rbd_open
        };
        // SAFETY: the names end with zero bytes and outlive the call.
        let opened = unsafe { open(self.pool, image.as_ptr(), &mut self.image, snapshot) };
        let opened = self.connection.check(opened);
        opened.map_err(|e| match e.raw_os_error() {
            Some(libc::ENOENT) => RbdError::Missing(location.to_string()),
            Some(libc::EPERM | libc::EACCES) => RbdError::Permission(location.to_string()),
            _ => self.io("open it", e),
        })
    }

    fn io(&self, what: &'static str, e: io::Error) -> RbdError {
        RbdError::Io(self.location.to_string(), what, e)
    }

    /// The image's pool, name and cluster access.
    pub fn location(&self) -> &Location {
        &self.location
    }

    /// The properties that never change while the image is open.
    pub fn facts(&self) -> DiskFacts {
        self.facts
    }

    /// Whether librbd's cache is on.
    pub(crate) fn is_cached(&self) -> bool {
        self.cached
    }

    /// Bytes that may be in an image that this one was cloned from.
    ///
    /// # Errors
    /// The cluster does not tell.
    pub fn overlap(&self) -> io::Result<u64> {
        let mut overlap = 0;
        // SAFETY: the image is open; the call writes one number.
        self.check(unsafe { (self.library().rbd_get_overlap)(self.image, &mut overlap) })?;
        Ok(overlap)
    }

    /// The current size in bytes.
    ///
    /// # Errors
    /// The cluster does not report the size.
    pub fn size(&self) -> io::Result<u64> {
        let mut size = 0;
        // SAFETY: the image is open; the call writes one number.
        self.check(unsafe { (self.library().rbd_get_size)(self.image, &mut size) })?;
        Ok(size)
    }

    /// The least size in bytes that was seen since the last call. An image that was opened read-only is not watched.
    pub fn lowest_size(&self) -> u64 {
        self.tracker.lowest()
    }

    /// Waits until [`lowest_size`](Self::lowest_size) is right after all changes that the cluster has reported.
    pub fn settle(&self) {
        self.tracker.settle();
    }

    /// Grows the image to `size` bytes.
    ///
    /// # Errors
    /// `size` is less than the current size, or the cluster refuses.
    pub fn grow(&self, size: u64) -> io::Result<()> {
        extern "C" fn progress(_: u64, _: u64, _: *mut c_void) -> c_int {
            0
        }
        // SAFETY: the image is open; the progress callback needs no argument.
        let grown = unsafe {
            (self.library().rbd_resize2)(self.image, size, false, progress, ptr::null_mut())
        };
        self.check(grown)
    }

    /// Sets the callback for changes: a dedicated thread calls `tell` when another client may have resized the image or
    /// made a snapshot. `None` removes the callback. An image that was opened read-only is not watched.
    pub fn on_change(&self, tell: Option<OnChange>) {
        self.tracker.on_change(tell);
    }

    /// Whether this client holds the exclusive lock; `None` if the image has none.
    pub fn lock(&self) -> Option<bool> {
        let mut owner = 0;
        let is_owner = self.library().rbd_is_exclusive_lock_owner;
        // SAFETY: the image is open; the call writes one number.
        if !self.has_lock().ok()? || unsafe { is_owner(self.image, &mut owner) } < 0 {
            return None;
        }
        Some(owner != 0)
    }

    /// Whether the image has the feature `exclusive-lock`.
    ///
    /// # Errors
    /// The cluster does not tell.
    pub fn has_lock(&self) -> io::Result<bool> {
        let mut features = 0;
        // SAFETY: the image is open; the call writes one number.
        self.check(unsafe { (self.library().rbd_get_features)(self.image, &mut features) })?;
        Ok(features & FEATURE_EXCLUSIVE_LOCK != 0)
    }

    /// The settings that decide the image's speed, and their sources.
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }

    fn setting(&self, name: &str) -> Option<&Setting> {
        self.settings.iter().find(|s| s.name == name)
    }

    fn find_settings(&self) -> Vec<Setting> {
        let mut settings = self.connection.settings().to_vec();
        for setting in &mut settings {
            if !IMAGE_SETTINGS.iter().any(|(name, _)| *name == setting.name) {
                continue;
            }
            let key = format!("conf_{}", setting.name);
            let library = self.library();
            for (origin, get, of) in [
                (Origin::Pool, library.rbd_pool_metadata_get, self.pool),
                (Origin::Image, library.rbd_metadata_get, self.image),
            ] {
                if let Some(value) = metadata(get, of, &key) {
                    setting.set(origin, &value);
                }
            }
        }
        let (librbd, librados) = self.library().versions();
        let (allocator, about) = allocator();
        let more = [
            ("allocator", allocator.to_owned(), about),
            ("librbd", librbd, "the library's version"),
            ("librados", librados, "the library's version"),
            (
                "connection",
                self.connection.number.to_string(),
                "which of the connections to the cluster; each has threads of its own (connections=N)",
            ),
            (
                "client",
                format!("client.{}", self.connection.client()),
                "its number in the cluster, as in `rbd lock ls` and `ceph osd blocklist ls`",
            ),
        ];
        settings.extend(more.map(|(name, value, about)| Setting {
            name: name.into(),
            value,
            origin: Origin::Ringdisk,
            overridden: Vec::new(),
            about,
        }));
        settings
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.connection.library
    }

    pub(crate) fn shared_connection(&self) -> Arc<Connection> {
        self.connection.clone()
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(crate) fn handle(&self) -> Pointer {
        self.image
    }

    fn watched(&self) -> WatchedImage {
        WatchedImage {
            connection: self.connection.clone(),
            image: self.image,
        }
    }

    pub(crate) fn tracker(&self) -> &Arc<SizeTracker> {
        &self.tracker
    }

    /// Whether the cluster refuses all requests of this client.
    pub fn is_blocklisted(&self) -> bool {
        self.connection.is_blocklisted()
    }

    pub(crate) fn check(&self, result: c_int) -> io::Result<()> {
        if result == -BLOCKLISTED {
            self.report_blocklisted();
        }
        self.connection.check(result)
    }

    /// Records that the cluster refused a request because the client is on its blocklist, and logs it once per image.
    #[cold]
    pub(crate) fn report_blocklisted(&self) {
        self.connection.set_blocklisted();
        if !self.blocklist_reported.swap(true, Ordering::Relaxed) {
            error!(
                "{}: this client (client.{}) is on the cluster's blocklist (RBD_BLOCKLISTED): another client took \
                 over its lock, or an administrator added it. ringdisk stops reading and writing the image to \
                 avoid overwriting data; make sure that no other VM uses the image, then attach it again \
                 ('ringdisk detach', 'ringdisk attach'), which creates a new client",
                self.location,
                self.connection.client()
            );
        }
    }
}

impl Remote for RbdImage {
    fn sync(&self) -> io::Result<()> {
        if !self.cached && self.lock() == Some(false) {
            // Completed writes are in the cluster, and librbd would take the lock from its owner.
            return Ok(());
        }
        // SAFETY: the image is open.
        let flushed = self.check(unsafe { (self.library().rbd_flush)(self.image) });
        match flushed {
            // Completed writes are in the cluster: it completed them before it refused any request.
            Err(_) if self.is_blocklisted() && !self.cached => Ok(()),
            flushed => flushed,
        }
    }

    fn data_in(&self, at: u64, len: u64) -> io::Result<Option<DataExtents>> {
        // SAFETY: the image is open.
        let found = unsafe { allocation::data_in(self.library(), self.image, (at, len)) };
        found.or_else(|error| self.check(error).map(|()| None))
    }
}

impl Drop for RbdImage {
    fn drop(&mut self) {
        if let Some(watch) = self.watch.take() {
            watch.stop(&self.watched());
        }
        if !self.image.is_null() {
            // SAFETY: the image is open, and every user of it holds an `Arc` of this, so none is left.
            let closed = unsafe { (self.library().rbd_close)(self.image) };
            if let Err(e) = self.connection.check(closed)
                && !self.is_blocklisted()
            {
                error!("{}: closing it failed: {e}", self.location);
            }
        }
        // SAFETY: the pool is open, and its image is closed.
        unsafe { (self.library().rados_ioctx_destroy)(self.pool) };
    }
}

type MetadataGet = unsafe extern "C" fn(
    Pointer,
    *const std::ffi::c_char,
    *mut std::ffi::c_char,
    *mut usize,
) -> c_int;

fn metadata(get: MetadataGet, of: Pointer, key: &str) -> Option<String> {
    let (key, mut buffer) = (c_string(key), [0u8; 256]);
    let mut len = buffer.len();
    // SAFETY: the key ends with a zero byte; the buffer is `len` bytes long; `of` is an open image or pool, whichever
    // `get` takes.
    let got = unsafe { get(of, key.as_ptr(), buffer.as_mut_ptr().cast(), &mut len) };
    (got >= 0).then(|| text_of(&buffer))
}
