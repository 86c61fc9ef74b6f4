//! Where librbd's threads put what they have finished, and the I/O thread takes it from.
//!
//! librbd can write to an event descriptor for each completion, and keep a list of them for each image
//! (`rbd_set_image_notification`). That is one system call for each I/O, and one list for all threads that serve the
//! image. Here each thread has a list of its own, and is written to only when it sleeps.

use std::cell::UnsafeCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use block::Segment;
use rustix::event::{EventfdFlags, eventfd};

/// An operation under way, where librbd finds it: it stays where it is until it has been taken from the inbox.
pub(crate) struct Operation {
    inbox: Arc<Inbox>,
    /// The next one in the inbox.
    next: UnsafeCell<*mut Operation>,
    /// What the library returned.
    result: UnsafeCell<isize>,
    /// Its place in the engine's table.
    pub place: usize,
    /// Its only segment, if it has no more, for the library to find for as long as it looks.
    pub one: UnsafeCell<Segment>,
}

// SAFETY: `next` and `result` are written by the thread that finishes the operation, before it puts it into the inbox,
// and read by the one that takes it from there; `one` is written before the operation is under way.
unsafe impl Send for Operation {}
// SAFETY: as above.
unsafe impl Sync for Operation {}

pub(crate) struct Inbox {
    first: AtomicPtr<Operation>,
    /// The I/O thread sleeps, or is about to.
    sleeping: AtomicBool,
    /// There is something to be done that waited for more than an operation.
    nudged: AtomicBool,
    event: OwnedFd,
}

impl Operation {
    pub fn new(inbox: Arc<Inbox>, place: usize) -> Box<Self> {
        Box::new(Self {
            inbox,
            next: UnsafeCell::new(ptr::null_mut()),
            result: UnsafeCell::new(0),
            place,
            one: UnsafeCell::new(Segment { addr: 0, len: 0 }),
        })
    }

    /// It has ended; the thread that it belongs to will find it.
    ///
    /// # Safety
    /// `this` is under way, and this is called once for it. It must not be used after.
    pub unsafe fn finish(this: *mut Self, result: isize) {
        // SAFETY: it is under way, so that it is there, and nobody else looks at its result or the next one. The inbox is
        // kept for as long as its event is written to, by which time the operation may be somebody else's.
        let inbox = unsafe {
            *(*this).result.get() = result;
            (*this).inbox.clone()
        };
        let mut first = inbox.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: as above.
            unsafe { *(*this).next.get() = first };
            let put = Ordering::SeqCst;
            match inbox
                .first
                .compare_exchange_weak(first, this, put, Ordering::Relaxed)
            {
                Ok(_) => break,
                Err(now) => first = now,
            }
        }
        inbox.wake();
    }
}

impl Inbox {
    pub fn new() -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            first: AtomicPtr::new(ptr::null_mut()),
            sleeping: AtomicBool::new(false),
            nudged: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        }))
    }

    /// Is written to when something comes while the thread sleeps.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.first.load(Ordering::Acquire).is_null()
    }

    /// From now on, what comes writes to the event. Whether there is nothing yet, so that there is to be slept.
    pub fn fall_asleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        // What came before `sleeping` was seen has to be seen here.
        let nudged = self.nudged.swap(false, Ordering::SeqCst);
        let empty = self.first.load(Ordering::SeqCst).is_null() && !nudged;
        if !empty {
            self.wake_up();
        }
        empty
    }

    /// Has the thread not sleep before it has looked at what waits.
    pub fn nudge(&self) {
        self.nudged.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if self.sleeping.load(Ordering::SeqCst) && self.sleeping.swap(false, Ordering::SeqCst) {
            // The counter is never read, and has room for more than will ever be written.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// The thread is awake, and looks by itself.
    pub fn wake_up(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }

    /// Takes all that has come, the oldest first: its place in the table, and what the library returned.
    pub fn take(&self, mut each: impl FnMut(usize, isize)) {
        if self.is_empty() {
            return;
        }
        // The list has the newest first; turned round, it gives back what came first, first.
        let mut newest = self.first.swap(ptr::null_mut(), Ordering::Acquire);
        let mut oldest = ptr::null_mut::<Operation>();
        while !newest.is_null() {
            // SAFETY: what is in the inbox is there until the engine, whose thread this is, has been told of it below; and
            // whoever put it there has let go of it.
            unsafe {
                let next = *(*newest).next.get();
                *(*newest).next.get() = oldest;
                (oldest, newest) = (newest, next);
            }
        }
        while !oldest.is_null() {
            // SAFETY: as above; it is read before the engine is told.
            let (place, result, next) = unsafe {
                let result = *(*oldest).result.get();
                ((*oldest).place, result, *(*oldest).next.get())
            };
            each(place, result);
            oldest = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::thread;

    #[test]
    fn what_several_threads_finish_comes_once_and_wakes_a_sleeper() {
        const EACH: usize = 2000;
        let inbox = Inbox::new().unwrap();
        let operations: Vec<_> = (0..4 * EACH)
            .map(|place| Operation::new(inbox.clone(), place))
            .collect();
        let mut seen = HashSet::new();
        let pointers: Vec<usize> = operations
            .iter()
            .map(|o| ptr::from_ref(&**o) as usize)
            .collect();
        thread::scope(|scope| {
            for part in pointers.chunks(EACH) {
                scope.spawn(move || {
                    for &pointer in part {
                        let this = pointer as *mut Operation;
                        // SAFETY: each is finished once, and lives until the end of the test.
                        unsafe { Operation::finish(this, 7) };
                    }
                });
            }
            while seen.len() < 4 * EACH {
                if inbox.fall_asleep() {
                    let mut ready = [rustix::event::PollFd::new(
                        &inbox.event,
                        rustix::event::PollFlags::IN,
                    )];
                    rustix::event::poll(&mut ready, None).unwrap();
                    let _ = rustix::io::read(&inbox.event, &mut [0; 8]);
                    inbox.wake_up();
                }
                inbox.take(|place, result| {
                    assert_eq!(result, 7);
                    assert!(seen.insert(place), "{place} came twice");
                });
            }
        });
    }

    #[test]
    fn a_nudge_keeps_from_sleeping_once() {
        let inbox = Inbox::new().unwrap();
        inbox.nudge();
        assert!(!inbox.fall_asleep());
        assert!(inbox.fall_asleep());
        inbox.nudge();
        let mut ready = [rustix::event::PollFd::new(
            &inbox.event,
            rustix::event::PollFlags::IN,
        )];
        assert_eq!(rustix::event::poll(&mut ready, None), Ok(1));
    }

    #[test]
    fn the_oldest_comes_first() {
        let inbox = Inbox::new().unwrap();
        let mut operations: Vec<_> = (0..3)
            .map(|place| Operation::new(inbox.clone(), place))
            .collect();
        for operation in &mut operations {
            // SAFETY: each is finished once.
            unsafe { Operation::finish(&mut **operation, operation.place as isize) };
        }
        let mut came = Vec::new();
        inbox.take(|place, result| came.push((place, result)));
        assert_eq!(came, [(0, 0), (1, 1), (2, 2)]);
    }
}
