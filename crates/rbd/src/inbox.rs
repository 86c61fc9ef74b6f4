//! A list of completed operations: librbd's threads add to it, and the I/O thread takes them from it.
//!
//! librbd itself can write to an event descriptor for each completion, and keep a list of completions for each image
//! (`rbd_set_image_notification`). That takes one system call per I/O, and all threads that serve the image share one
//! list. Here each thread has its own list, and its event is written only while the thread sleeps.

use std::cell::UnsafeCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use block::Segment;
use rustix::event::{EventfdFlags, eventfd};

/// An operation in flight, at an address that librbd holds. It is not moved until it has been taken from the inbox.
pub(crate) struct Operation {
    inbox: Arc<Inbox>,
    /// The next one in the inbox.
    next: UnsafeCell<*mut Operation>,
    /// The library's return value.
    result: UnsafeCell<isize>,
    /// Its index in the engine's table.
    pub index: usize,
    /// The segment of an operation that has only one. librbd reads it here while the operation is in flight.
    pub one: UnsafeCell<Segment>,
}

// SAFETY: the thread that finishes the operation writes `next` and `result` before it adds the operation to the inbox,
// and the thread that takes it from there reads them; `one` is written before the operation is in flight.
unsafe impl Send for Operation {}
// SAFETY: as above.
unsafe impl Sync for Operation {}

pub(crate) struct Inbox {
    first: AtomicPtr<Operation>,
    /// The I/O thread sleeps, or is about to.
    sleeping: AtomicBool,
    /// Work is ready that was waiting for something other than a completion.
    notified: AtomicBool,
    event: OwnedFd,
}

impl Operation {
    pub fn new(inbox: Arc<Inbox>, index: usize) -> Box<Self> {
        Box::new(Self {
            inbox,
            next: UnsafeCell::new(ptr::null_mut()),
            result: UnsafeCell::new(0),
            index,
            one: UnsafeCell::new(Segment { addr: 0, len: 0 }),
        })
    }

    /// Marks the operation as completed, for its thread to find.
    ///
    /// # Safety
    /// `this` is in flight, and this is called once for it. The caller must not use it afterwards.
    pub unsafe fn finish(this: *mut Self, result: isize) {
        // SAFETY: the operation is in flight, so it exists, and no other thread accesses its result or its `next`. This
        // `Arc` keeps the inbox alive while its event is written; by then another request may use the operation.
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
            notified: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        }))
    }

    /// The event that is written when an operation completes, or work becomes ready, while the thread sleeps.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.first.load(Ordering::Acquire).is_null()
    }

    /// From now on, a completion writes to the event. Returns whether nothing has arrived yet, so that the thread may
    /// sleep.
    pub fn fall_asleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        // A thread that did not see `sleeping` has not written the event, so its work must be seen here.
        let notified = self.notified.swap(false, Ordering::SeqCst);
        let empty = self.first.load(Ordering::SeqCst).is_null() && !notified;
        if !empty {
            self.wake_up();
        }
        empty
    }

    /// Makes the thread check its waiting operations before it sleeps again.
    pub fn notify(&self) {
        self.notified.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if self.sleeping.load(Ordering::SeqCst) && self.sleeping.swap(false, Ordering::SeqCst) {
            // The counter is never read; it cannot overflow within the number of writes that are possible.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// The thread is awake, and checks the inbox without the event.
    pub fn wake_up(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }

    /// Takes all completed operations, the oldest first, and passes each one's index in the table and the library's
    /// return value to `each`.
    pub fn take(&self, mut each: impl FnMut(usize, isize)) {
        if self.is_empty() {
            return;
        }
        // The list starts with the newest; reversed, it starts with the oldest.
        let mut newest = self.first.swap(ptr::null_mut(), Ordering::Acquire);
        let mut oldest = ptr::null_mut::<Operation>();
        while !newest.is_null() {
            // SAFETY: an operation in the inbox exists until `each` below tells the engine, on this thread, that it has
            // completed; the thread that added it no longer uses it.
            unsafe {
                let next = *(*newest).next.get();
                *(*newest).next.get() = oldest;
                (oldest, newest) = (newest, next);
            }
        }
        while !oldest.is_null() {
            // SAFETY: as above; the operation is read before the engine is told.
            let (index, result, next) = unsafe {
                let result = *(*oldest).result.get();
                ((*oldest).index, result, *(*oldest).next.get())
            };
            each(index, result);
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
    fn completions_arrive_once_and_wake_the_thread() {
        const EACH: usize = 2000;
        let inbox = Inbox::new().unwrap();
        let operations: Vec<_> = (0..4 * EACH)
            .map(|index| Operation::new(inbox.clone(), index))
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
                        // SAFETY: each operation is finished once, and lives until the end of the test.
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
                inbox.take(|index, result| {
                    assert_eq!(result, 7);
                    assert!(seen.insert(index), "{index} came twice");
                });
            }
        });
    }

    #[test]
    fn notification_prevents_one_sleep() {
        let inbox = Inbox::new().unwrap();
        inbox.notify();
        assert!(!inbox.fall_asleep());
        assert!(inbox.fall_asleep());
        inbox.notify();
        let mut ready = [rustix::event::PollFd::new(
            &inbox.event,
            rustix::event::PollFlags::IN,
        )];
        assert_eq!(rustix::event::poll(&mut ready, None), Ok(1));
    }

    #[test]
    fn oldest_completion_comes_first() {
        let inbox = Inbox::new().unwrap();
        let mut operations: Vec<_> = (0..3)
            .map(|index| Operation::new(inbox.clone(), index))
            .collect();
        for operation in &mut operations {
            // SAFETY: each operation is finished once.
            unsafe { Operation::finish(&mut **operation, operation.index as isize) };
        }
        let mut came = Vec::new();
        inbox.take(|index, result| came.push((index, result)));
        assert_eq!(came, [(0, 0), (1, 1), (2, 2)]);
    }
}
