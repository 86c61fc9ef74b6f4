//! Watches an image for changes by other clients: reports them, and keeps the image's size up to date.
//!
//! librbd truncates a write, discard or write-zeroes that exceeds the end of its image, and returns 0 as if the whole
//! operation were done. It uses the size that it knows when the operation begins, which it may have learnt only a
//! moment before. The [engine](crate::engine) therefore submits only operations that end within the size known here,
//! and accepts a success only if the image has not changed since; otherwise it repeats the operation.
//!
//! This suffices because of how a shrink proceeds. A client that shrinks the image asks the owner of the exclusive lock
//! to do it; while the guest writes, that owner is this process. The client is told of the completion after every
//! client that watches the image has acknowledged the change. librbd acknowledges it for ringdisk after
//! [`SizeTracker::change`] has returned. An operation that completed before then was in flight at the same time as the
//! shrink. It is equivalent to one that was done in full just before the shrink, which then removed what lay beyond the
//! end. An operation that completes later is recognised as older than the change.
//!
//! One case is not covered: the cluster stops waiting for a client that has not acknowledged a change for 10 s
//! (`client_notify_timeout`), for example a process that is stopped or cut off from the cluster. If the image has an
//! exclusive lock, such a process writes nothing until it holds the lock again, and librbd then reads the size again.
//! If it has none, the process learns of the change when it is connected again; until then it acknowledges writes
//! beyond the end.

use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::cluster::{Connection, check};
use crate::error::{BLOCKLISTED, errno_of};
use crate::inbox::Inbox;
use crate::library::Pointer;

/// The callback for a possible change of an image.
pub type OnChange = Box<dyn Fn() + Send + Sync>;

/// The image has changed, and its new size is not known yet.
const UNKNOWN: i64 = i64::MIN;

/// The delay before the size is requested again after the cluster failed to report it.
const PAUSE: Duration = Duration::from_secs(1);

/// So long a caller waits for the size after a change.
const SETTLE: Duration = Duration::from_secs(5);

/// Watches an image. librbd reports changes on a thread that must not wait for librbd, so ringdisk has its own thread,
/// which requests the size and calls the callback.
pub(crate) struct Watch {
    handle: u64,
    tracker: Arc<SizeTracker>,
    thread: JoinHandle<()>,
}

/// What ringdisk knows of a watched image.
pub(crate) struct SizeTracker {
    /// The size in bytes; [`UNKNOWN`]; or the negated errno with which the cluster refused to report it. Written under
    /// the lock of `state`.
    size: AtomicI64,
    /// The number of changes so far.
    changes: AtomicU64,
    /// The least size since it was last [asked for](Self::lowest).
    lowest: AtomicU64,
    state: Mutex<TrackerState>,
    change: Condvar,
    /// The inboxes of threads whose operations may wait for the size.
    inboxes: Mutex<Vec<Weak<Inbox>>>,
}

#[derive(Default)]
struct TrackerState {
    changed: bool,
    /// The thread is asking for the size.
    reading: bool,
    ended: bool,
    tell: Option<Arc<dyn Fn() + Send + Sync>>,
}

/// What an I/O thread knows of an image when it submits an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownSize {
    pub size: Size,
    pub changes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Bytes(u64),
    /// A request for the size is under way.
    Unknown,
    /// The cluster refuses to report the size, with this errno.
    Failed(i32),
}

/// The image to watch; it stays open as long as it is watched.
pub(crate) struct WatchedImage {
    pub connection: Arc<Connection>,
    pub image: Pointer,
}

// SAFETY: any thread may use an `rbd_image_t`, and several threads may use it at a time.
unsafe impl Send for WatchedImage {}

impl WatchedImage {
    fn size(&self) -> io::Result<u64> {
        let mut size = 0;
        // SAFETY: the image stays open until this thread has ended; the call writes one number.
        let asked = unsafe { (self.connection.library.rbd_get_size)(self.image, &mut size) };
        self.connection.check(asked)?;
        Ok(size)
    }
}

impl SizeTracker {
    /// The state for an image whose size is not known yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            size: AtomicI64::new(UNKNOWN),
            changes: AtomicU64::new(0),
            lowest: AtomicU64::new(u64::MAX),
            state: Mutex::default(),
            change: Condvar::new(),
            inboxes: Mutex::default(),
        })
    }

    /// The current size and number of changes.
    #[inline]
    pub fn known(&self) -> KnownSize {
        // The number of changes is read first. A size that belongs to a later change does no harm: the operation is
        // recognised as older when it completes.
        let changes = self.changes();
        let size = match self.size.load(Ordering::SeqCst) {
            UNKNOWN => Size::Unknown,
            bytes @ 0.. => Size::Bytes(bytes as u64),
            errno => Size::Failed(-errno as i32),
        };
        KnownSize { size, changes }
    }

    /// The least size in bytes that was seen since the last call. What was undone before the size was asked for is not known:
    /// a snapshot makes several changes in a row, too.
    pub fn lowest(&self) -> u64 {
        self.lowest.swap(u64::MAX, Ordering::SeqCst)
    }

    /// Waits until the size is known after all changes that librbd has reported, but not for long.
    pub fn settle(&self) {
        let begun = Instant::now();
        let mut state = self.lock();
        while state.changed || state.reading {
            let Some(left) = SETTLE.checked_sub(begun.elapsed()) else {
                return;
            };
            let waited = self.change.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The number of changes so far.
    #[inline]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Registers a thread's inbox, to be woken when the size becomes known.
    pub fn wake(&self, inbox: &Arc<Inbox>) {
        let mut inboxes = self.inboxes.lock().unwrap_or_else(PoisonError::into_inner);
        inboxes.retain(|other| other.upgrade().is_some_and(|o| !Arc::ptr_eq(&o, inbox)));
        inboxes.push(Arc::downgrade(inbox));
    }

    /// Sets the callback for changes; a dedicated thread calls it. `None` removes it.
    pub fn on_change(&self, tell: Option<OnChange>) {
        self.lock().tell = tell.map(Arc::from);
    }

    fn lock(&self) -> MutexGuard<'_, TrackerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a change of the image. librbd's callback calls this.
    fn change(&self) {
        let mut state = self.lock();
        state.changed = true;
        self.size.store(UNKNOWN, Ordering::SeqCst);
        self.changes.fetch_add(1, Ordering::SeqCst);
        self.change.notify_all();
    }

    /// Records the size, unless the image has changed since it was requested.
    pub fn record_size(&self, size: &io::Result<u64>) {
        let state = self.lock();
        if let Ok(bytes) = size {
            self.lowest.fetch_min(*bytes, Ordering::SeqCst);
        }
        if state.changed {
            return;
        }
        let known = match size {
            Ok(bytes) => i64::try_from(*bytes).unwrap_or(i64::MAX),
            Err(e) => -i64::from(errno_of(e)),
        };
        self.size.store(known, Ordering::SeqCst);
        drop(state);
        let inboxes = self.inboxes.lock().unwrap_or_else(PoisonError::into_inner);
        inboxes
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|inbox| inbox.notify());
    }

    /// Requests the size after each change, and calls the callback. This is the dedicated thread's loop.
    fn run(&self, image: &WatchedImage) {
        let mut again = false;
        let mut state = self.lock();
        loop {
            while !state.changed && !state.ended && !again {
                let waited = self.change.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
            }
            if again && !state.changed && !state.ended {
                let waited = self.change.wait_timeout(state, PAUSE);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.ended {
                return;
            }
            let was_reported = again && !state.changed;
            (state.changed, state.reading) = (false, true);
            drop(state);
            let size = image.size();
            self.record_size(&size);
            self.lock().reading = false;
            self.change.notify_all();
            again = matches!(self.known().size, Size::Failed(errno) if errno != BLOCKLISTED);
            state = self.lock();
            if !(was_reported && again) {
                let tell = state.tell.clone();
                drop(state);
                if let Some(tell) = tell {
                    tell();
                }
                state = self.lock();
            }
        }
    }
}

impl Watch {
    pub fn start(watched: WatchedImage, tracker: Arc<SizeTracker>) -> io::Result<Self> {
        extern "C" fn changed(tracker: *mut c_void) {
            // SAFETY: the pointer was made from an `Arc<SizeTracker>`, which `stop` releases only after the last call.
            unsafe { &*tracker.cast::<SizeTracker>() }.change();
        }
        let (library, image) = (watched.connection.library, watched.image);
        let thread_tracker = tracker.clone();
        let thread = thread::Builder::new()
            .name("rbd-watch".into())
            .spawn(move || thread_tracker.run(&watched))?;
        let mut handle = 0;
        let arg = Arc::into_raw(tracker.clone()).cast_mut().cast();
        // SAFETY: the argument is the `SizeTracker` that `changed` expects, and stays valid as long as librbd may call it.
        let result = unsafe { (library.rbd_update_watch)(image, &mut handle, changed, arg) };
        let watch = Self {
            handle,
            tracker,
            thread,
        };
        if let Err(e) = check(result) {
            watch.end(arg);
            return Err(e);
        }
        Ok(watch)
    }

    pub fn stop(self, watched: &WatchedImage) {
        let library = watched.connection.library;
        // SAFETY: the handle belongs to a watch of this image. librbd makes no call after this one returns.
        unsafe { (library.rbd_update_unwatch)(watched.image, self.handle) };
        let arg = Arc::as_ptr(&self.tracker).cast_mut().cast();
        self.end(arg);
    }

    fn end(self, arg: *mut c_void) {
        // SAFETY: `start` turned one `Arc` into this pointer, and librbd no longer uses it.
        drop(unsafe { Arc::from_raw(arg.cast::<SizeTracker>().cast_const()) });
        self.tracker.lock().ended = true;
        self.tracker.change.notify_one();
        // The callback may drop the image on this very thread, which cannot join itself; it then ends on its own.
        if thread::current().id() != self.thread.thread().id() {
            let _ = self.thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_size_is_discarded() {
        let tracker = SizeTracker::new();
        assert_eq!(tracker.known().size, Size::Unknown);
        tracker.record_size(&Ok(4096));
        assert_eq!(tracker.known().size, Size::Bytes(4096));
        tracker.change();
        assert_eq!(tracker.known().size, Size::Unknown);
        tracker.record_size(&Ok(4096));
        assert_eq!(tracker.known().size, Size::Unknown);
        assert_eq!(tracker.changes(), 1);
        tracker.lock().changed = false;
        tracker.record_size(&Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)));
        assert_eq!(tracker.known().size, Size::Failed(libc::ETIMEDOUT));
        tracker.record_size(&Ok(0));
        assert_eq!(tracker.known().size, Size::Bytes(0));
    }
}
