//! Plain system calls on a few threads: for `aio=threads`, and for the operations that an engine cannot
//! do without blocking.
//!
//! The lock between the I/O thread and the pool is taken once for all that is handed over, once for all
//! that is collected, and once per operation by the thread that does it, where it leaves what it has
//! done and takes the next. Nothing is allocated once the lists have grown to what is in flight, which
//! `Engine::room` bounds.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use block::{Backing, Completion, FileOffset, Op, Segment, Token};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::ranges::{self, Range};

/// Threads per engine, started as they are needed: what keeps a disk array or a file server busy, and
/// little enough memory.
pub(crate) const THREADS_MAX: usize = 16;

/// A thread that has had nothing to do for this long ends.
const IDLE: Duration = Duration::from_secs(10);

/// What an operation works on.
pub(crate) struct Target {
    pub file: Arc<OwnedFd>,
    pub backing: Backing,
}

/// An operation, on its way to a thread.
pub(crate) struct Job {
    target: Arc<Target>,
    work: Work,
    token: Token,
}

/// A pool of threads that block in the engine's place.
pub(crate) struct Blocking {
    shared: Arc<Shared>,
    /// What [`push`](Self::push) hands over.
    queued: Vec<Job>,
    /// Started, and not collected.
    pending: usize,
}

impl Blocking {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                work: Condvar::new(),
                done: AtomicUsize::new(0),
                event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            }),
            queued: Vec::new(),
            pending: 0,
        })
    }

    /// Is written to when there is something to collect after there was nothing, and never read from.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Takes an operation, to be handed over with the next [`push`](Self::push).
    pub fn start(&mut self, job: Job) {
        self.pending += 1;
        self.queued.push(job);
    }

    /// Hands over what was started.
    #[inline]
    pub fn push(&mut self) {
        if !self.queued.is_empty() {
            self.hand_over();
        }
    }

    /// Whether [`collect`](Self::collect) will find something.
    #[inline]
    pub fn ready(&self) -> bool {
        self.shared.done.load(Ordering::Acquire) > 0
    }

    /// Started, and not collected.
    #[inline]
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Takes what has ended, as long as `out` has room.
    #[inline]
    pub fn collect(&mut self, out: &mut Vec<Completion>) {
        if self.pending == 0 || !self.ready() {
            return;
        }
        let mut state = self.shared.lock();
        let n = state.done.len().min(out.capacity() - out.len());
        out.extend(state.done.drain(..n));
        self.shared.done.store(state.done.len(), Ordering::Release);
        self.pending -= n;
    }

    fn hand_over(&mut self) {
        let mut state = self.shared.lock();
        state.jobs.extend(self.queued.drain(..));
        let jobs = state.jobs.len();
        let wake = state.idle.min(jobs);
        let start = (jobs - wake).min(THREADS_MAX - state.threads);
        state.threads += start;
        drop(state);
        (0..wake).for_each(|_| self.shared.work.notify_one());
        for _ in 0..start {
            let shared = self.shared.clone();
            let thread = thread::Builder::new().name("blocking".into());
            if thread.spawn(move || shared.work()).is_err() {
                self.do_without(start);
                break;
            }
        }
    }

    /// No thread can be started. With none at all, the jobs are done here: late, but done.
    #[cold]
    fn do_without(&self, start: usize) {
        let mut state = self.shared.lock();
        state.threads -= start;
        if state.threads == 0 {
            let jobs = std::mem::take(&mut state.jobs);
            drop(state);
            for job in jobs {
                let mut state = self.shared.lock();
                self.shared.leave(&mut state, job.run());
            }
            self.shared.signal();
        }
    }
}

impl Drop for Blocking {
    /// The threads end when they have done what was handed over.
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
    }
}

struct Shared {
    state: Mutex<State>,
    /// There are jobs.
    work: Condvar,
    /// Length of `state.done`, for looking without the lock.
    done: AtomicUsize,
    event: OwnedFd,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    done: Vec<Completion>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn signal(&self) {
        // Never full: it would take 2⁶⁴ − 2 signals.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// What a thread does.
    fn work(&self) {
        let mut done = None;
        loop {
            let (job, signal) = self.exchange(done.take());
            if signal {
                self.signal();
            }
            match job {
                Some(job) => done = Some(job.run()),
                None if self.sleep() => {}
                None => return,
            }
        }
    }

    /// Leaves what is done and takes the next job. The engine is to be told if nothing was there yet;
    /// otherwise it has been told, and has not come to collect.
    fn exchange(&self, done: Option<Completion>) -> (Option<Job>, bool) {
        let mut state = self.lock();
        let signal = match done {
            Some(done) => self.leave(&mut state, done),
            None => false,
        };
        (state.jobs.pop_front(), signal)
    }

    fn leave(&self, state: &mut State, done: Completion) -> bool {
        state.done.push(done);
        self.done.store(state.done.len(), Ordering::Release);
        state.done.len() == 1
    }

    /// Waits for a job. False means that the thread has to end.
    fn sleep(&self) -> bool {
        let mut state = self.lock();
        while state.jobs.is_empty() {
            if state.closed {
                state.threads -= 1;
                return false;
            }
            state.idle += 1;
            let (woken, timeout) = match self.work.wait_timeout(state, IDLE) {
                Ok(result) => result,
                Err(e) => e.into_inner(),
            };
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return false;
            }
        }
        true
    }
}

/// An [`Op`] without its lifetime, which is the submitter's promise.
enum Work {
    Read(FileOffset, List),
    Write(FileOffset, List, bool),
    Flush,
    Discard(FileOffset, u64, bool),
    WriteZeroes(FileOffset, u64, bool, bool),
}

/// Segments: a single one by value, a longer list by its address.
enum List {
    One(Segment),
    Many(*const Segment, usize),
}

// SAFETY: whoever makes a job promises that the list and what it names stay valid until the job's
// completion has been reaped, on whichever thread it is done.
#[expect(unsafe_code, reason = "a raw pointer goes to another thread")]
unsafe impl Send for List {}

impl Job {
    /// An operation on a file.
    ///
    /// # Safety
    /// As for `block::Engine::submit`, from now on.
    #[expect(
        unsafe_code,
        reason = "the caller promises that the memory stays valid"
    )]
    pub unsafe fn new(target: Arc<Target>, op: Op<'_>, token: Token) -> Self {
        let work = match op {
            Op::Read { at, to } => Work::Read(at, List::new(to)),
            Op::Write { at, from, stable } => Work::Write(at, List::new(from), stable),
            Op::Flush => Work::Flush,
            Op::Discard { at, len, stable } => Work::Discard(at, len, stable),
            Op::WriteZeroes {
                at,
                len,
                unmap,
                stable,
            } => Work::WriteZeroes(at, len, unmap, stable),
        };
        Self {
            target,
            work,
            token,
        }
    }

    fn run(&self) -> Completion {
        let target = &*self.target;
        let sync = |stable| match stable {
            true => rustix::fs::fdatasync(&target.file),
            false => Ok(()),
        };
        let range = |at, len| Range { target, at, len };
        let result = match self.work {
            Work::Read(at, ref list) => list.transfer(target.file.as_raw_fd(), at, None),
            Work::Write(at, ref list, stable) => {
                list.transfer(target.file.as_raw_fd(), at, Some(stable))
            }
            Work::Flush => sync(true).map(|()| 0),
            Work::Discard(at, len, stable) => ranges::discard(&range(at, len))
                .and_then(|()| sync(stable))
                .map(|()| 0),
            Work::WriteZeroes(at, len, unmap, stable) => {
                ranges::write_zeroes(&range(at, len), unmap)
                    .and_then(|()| sync(stable))
                    .map(|()| 0)
            }
        };
        Completion {
            token: self.token,
            result: result.unwrap_or_else(|e| -e.raw_os_error()),
        }
    }
}

impl List {
    fn new(segments: &[Segment]) -> Self {
        match segments {
            [one] => Self::One(*one),
            many => Self::Many(many.as_ptr(), many.len()),
        }
    }

    /// Reads, or writes and perhaps makes it stable.
    fn transfer(&self, fd: RawFd, at: FileOffset, write: Option<bool>) -> Result<i32, Errno> {
        let (list, n) = match self {
            Self::One(segment) => crate::uring::iovec(std::slice::from_ref(segment)),
            Self::Many(list, n) => (list.cast(), (*n).min(crate::uring::SEGMENTS_MAX) as u32),
        };
        let (n, at) = (n as libc::c_int, at.0 as libc::off_t);
        loop {
            // SAFETY: whoever made the job promised that the list and the memory that it names are valid
            // until its completion has been reaped, which is later; a segment is laid out like an iovec.
            #[expect(unsafe_code, reason = "the kernel works on memory that segments name")]
            let moved = unsafe {
                match write {
                    None => libc::preadv(fd, list, n, at),
                    Some(false) => libc::pwritev(fd, list, n, at),
                    Some(true) => libc::pwritev2(fd, list, n, at, libc::RWF_DSYNC),
                }
            };
            match i32::try_from(moved) {
                Ok(moved @ 0..) => return Ok(moved),
                // More than 2 GiB never moves at once.
                _ => match Errno::from_io_error(&io::Error::last_os_error()) {
                    Some(Errno::INTR) => {}
                    e => return Err(e.unwrap_or(Errno::IO)),
                },
            }
        }
    }
}
