//! Changes of an image that other clients make: who is told of them, and what its size is since.
//!
//! librbd cuts off a write, discard or write-zeroes that goes beyond the end of its image, and returns 0 as if it had
//! done all of it. Its end is where librbd knows it to be when the operation begins, which it may have learnt a moment
//! ago. So the [engine](crate::engine) submits only what ends within the size that is known here, and takes a success
//! only if the image did not change since; otherwise it does the operation again.
//!
//! That is enough because of how a shrink goes. A client that wants one has the owner of the exclusive lock do it, which
//! is this process while its guest writes, and is told that it is done after every client that watches the image has
//! acknowledged the change. librbd does so for us after [`Watched::change`] has returned. An operation that completed
//! before was under way at the same time as the shrink, and is as good as one that was done in full just before it: the
//! shrink took away what lay beyond the end. One that completes later is found to be older than the change.
//!
//! What this cannot do: a client is no longer waited for when it has not acknowledged a change for 10 s
//! (`client_notify_timeout`, say of a process that is stopped or cut off from the cluster). With an exclusive lock, such
//! a process writes nothing before it has the lock again, and librbd reads the size anew for that. Without one, it learns
//! of the change when it is connected again, and acknowledges until then what it writes beyond the end.

use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::cluster::{Connection, check};
use crate::error::{BLOCKLISTED, errno_of};
use crate::image::RbdImage;
use crate::inbox::Inbox;
use crate::library::Pointer;

/// What is called when an image may have changed.
pub type OnChange = Box<dyn Fn() + Send + Sync>;

/// The image has changed, and its size since is not known yet.
const UNKNOWN: i64 = i64::MIN;

/// Between attempts to find out the size, where the cluster does not say.
const PAUSE: Duration = Duration::from_secs(1);

/// Waits for changes of an image. librbd calls from a thread that must not wait for librbd, so that another one asks
/// for the size, and tells.
pub(crate) struct Watch {
    handle: u64,
    watched: Arc<Watched>,
    thread: JoinHandle<()>,
}

/// What is known of an image.
pub(crate) struct Watched {
    /// Bytes; [`UNKNOWN`]; or the negated errno with which the cluster refuses to say. Written under the lock of `state`.
    size: AtomicI64,
    /// How often the image has changed.
    changes: AtomicU64,
    state: Mutex<State>,
    change: Condvar,
    /// Of threads whose operations may wait for the size.
    inboxes: Mutex<Vec<Weak<Inbox>>>,
}

#[derive(Default)]
struct State {
    changed: bool,
    ended: bool,
    tell: Option<Arc<dyn Fn() + Send + Sync>>,
}

/// What an I/O thread knows of an image when it submits an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub size: Size,
    pub changes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Bytes(u64),
    /// It is being asked for.
    Unknown,
    /// The cluster refuses to say, with this errno.
    Failed(i32),
}

/// An opened image, for the thread that asks for its size.
struct Handle {
    connection: Arc<Connection>,
    image: Pointer,
}

// SAFETY: an `rbd_image_t` may be used by any thread, several at a time.
unsafe impl Send for Handle {}

impl Handle {
    fn size(&self) -> io::Result<u64> {
        let mut size = 0;
        // SAFETY: the image is open until this thread has ended; writes one number.
        let asked = unsafe { (self.connection.library.rbd_get_size)(self.image, &mut size) };
        self.connection.check(asked)?;
        Ok(size)
    }
}

impl Watched {
    /// Of an image whose size is not known yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            size: AtomicI64::new(UNKNOWN),
            changes: AtomicU64::new(0),
            state: Mutex::default(),
            change: Condvar::new(),
            inboxes: Mutex::default(),
        })
    }

    /// What is known now.
    #[inline]
    pub fn known(&self) -> Known {
        // A size that belongs to a later change than this one is no harm: what completes is found to be older.
        let changes = self.changes();
        let size = match self.size.load(Ordering::SeqCst) {
            UNKNOWN => Size::Unknown,
            bytes @ 0.. => Size::Bytes(bytes as u64),
            errno => Size::Failed(-errno as i32),
        };
        Known { size, changes }
    }

    /// How often the image has changed.
    #[inline]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Has a thread woken up when the size is known.
    pub fn wake(&self, inbox: &Arc<Inbox>) {
        let mut inboxes = self.inboxes.lock().unwrap_or_else(PoisonError::into_inner);
        inboxes.retain(|other| other.upgrade().is_some_and(|o| !Arc::ptr_eq(&o, inbox)));
        inboxes.push(Arc::downgrade(inbox));
    }

    /// Has `tell` called, by a thread for the purpose, when the image may have changed.
    pub fn on_change(&self, tell: Option<OnChange>) {
        self.lock().tell = tell.map(Arc::from);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image has changed.
    fn change(&self) {
        let mut state = self.lock();
        state.changed = true;
        self.size.store(UNKNOWN, Ordering::SeqCst);
        self.changes.fetch_add(1, Ordering::SeqCst);
        self.change.notify_one();
    }

    /// Notes what the size is, unless the image has changed since that was asked.
    pub fn learn(&self, size: &io::Result<u64>) {
        let state = self.lock();
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
            .for_each(|inbox| inbox.nudge());
    }

    /// Asks for the size after each change, and tells of the change.
    fn follow(&self, image: &Handle) {
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
            let was_told = again && !state.changed;
            state.changed = false;
            drop(state);
            let size = image.size();
            self.learn(&size);
            again = matches!(self.known().size, Size::Failed(errno) if errno != BLOCKLISTED);
            state = self.lock();
            if !(was_told && again) {
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
    pub fn start(image: &RbdImage) -> io::Result<Self> {
        extern "C" fn changed(watched: *mut c_void) {
            // SAFETY: this was made of an `Arc<Watched>`, which `stop` gives back after the last call.
            unsafe { &*watched.cast::<Watched>() }.change();
        }
        let watched = image.watched().clone();
        let its = watched.clone();
        let opened = Handle {
            connection: image.connection().clone(),
            image: image.handle(),
        };
        let thread = thread::Builder::new()
            .name("rbd-watch".into())
            .spawn(move || its.follow(&opened))?;
        let mut handle = 0;
        let arg = Arc::into_raw(watched.clone()).cast_mut().cast();
        // SAFETY: the argument is what the function takes it for, for as long as it may be called.
        let result = unsafe {
            (image.library().rbd_update_watch)(image.handle(), &mut handle, changed, arg)
        };
        let watch = Self {
            handle,
            watched,
            thread,
        };
        if let Err(e) = check(result) {
            watch.end(arg);
            return Err(e);
        }
        Ok(watch)
    }

    pub fn stop(self, image: &RbdImage) {
        // SAFETY: the handle is that of a watch of this image. After this, nothing is called any more.
        unsafe { (image.library().rbd_update_unwatch)(image.handle(), self.handle) };
        let arg = Arc::as_ptr(&self.watched).cast_mut().cast();
        self.end(arg);
    }

    fn end(self, arg: *mut c_void) {
        // SAFETY: `start` has turned one `Arc` into this pointer, and nobody uses it any more.
        drop(unsafe { Arc::from_raw(arg.cast::<Watched>().cast_const()) });
        self.watched.lock().ended = true;
        self.watched.change.notify_one();
        // What it tells may be what drops the image: then it ends by itself.
        if thread::current().id() != self.thread.thread().id() {
            let _ = self.thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_was_asked_before_a_change_is_not_taken() {
        let watched = Watched::new();
        assert_eq!(watched.known().size, Size::Unknown);
        watched.learn(&Ok(4096));
        assert_eq!(watched.known().size, Size::Bytes(4096));
        watched.change();
        assert_eq!(watched.known().size, Size::Unknown);
        watched.learn(&Ok(4096));
        assert_eq!(watched.known().size, Size::Unknown);
        assert_eq!(watched.changes(), 1);
        watched.lock().changed = false;
        watched.learn(&Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)));
        assert_eq!(watched.known().size, Size::Failed(libc::ETIMEDOUT));
        watched.learn(&Ok(0));
        assert_eq!(watched.known().size, Size::Bytes(0));
    }
}
