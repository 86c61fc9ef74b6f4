//! A thread pool for blocking system calls: it serves `aio=threads`, and operations that an engine cannot
//! perform without blocking.
//!
//! The I/O thread takes the pool's lock once per batch of submissions and once per batch of completions. A
//! pool thread takes it once per operation, to store the finished operation and fetch the next. After the
//! lists have grown to the number of operations in flight, which `Engine::room` limits, nothing is allocated.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use block::{Completion, FileOffset, Op, Segment, Token};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::iovec::{SEGMENTS_MAX, iovec};
use crate::ranges::{self, Range, Target};

/// Maximum number of threads per engine; they start on demand. This keeps a disk array or a file server busy
/// and uses little memory.
pub(crate) const THREADS_MAX: usize = 16;

/// A thread ends after it has been idle for this long.
const IDLE: Duration = Duration::from_secs(10);

/// An operation for a pool thread.
pub(crate) struct Job {
    target: Arc<Target>,
    operation: Operation,
    token: Token,
}

/// A pool of threads that make blocking system calls for an engine.
pub(crate) struct BlockingPool {
    shared: Arc<PoolShared>,
    /// Operations that the next [`push`](Self::push) hands to the threads.
    queued: Vec<Job>,
    /// Operations that were started and not collected.
    pending: usize,
}

impl BlockingPool {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            shared: Arc::new(PoolShared {
                state: Mutex::default(),
                work: Condvar::new(),
                done: AtomicUsize::new(0),
                event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            }),
            queued: Vec::new(),
            pending: 0,
        })
    }

    /// An eventfd that is written when the list of completions becomes non-empty. It is never read.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Queues an operation for the next [`push`](Self::push).
    pub fn start(&mut self, job: Job) {
        self.pending += 1;
        self.queued.push(job);
    }

    /// Hands all queued operations to the threads.
    #[inline]
    pub fn push(&mut self) {
        if !self.queued.is_empty() {
            self.submit();
        }
    }

    /// Whether [`collect`](Self::collect) will find a completion.
    #[inline]
    pub fn ready(&self) -> bool {
        self.shared.done.load(Ordering::Acquire) > 0
    }

    /// Number of operations that were started and not collected.
    #[inline]
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Moves completions to `out`, up to its capacity.
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

    fn submit(&mut self) {
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
                self.run_without_threads(start);
                break;
            }
        }
    }

    /// Called when no thread can be started. If the pool has no thread at all, the calling thread performs
    /// the jobs: late, but they complete.
    #[cold]
    fn run_without_threads(&self, start: usize) {
        let mut state = self.shared.lock();
        state.threads -= start;
        if state.threads == 0 {
            let jobs = std::mem::take(&mut state.jobs);
            drop(state);
            for job in jobs {
                let mut state = self.shared.lock();
                self.shared.store(&mut state, job.run());
            }
            self.shared.signal();
        }
    }
}

impl Drop for BlockingPool {
    /// The threads end after they have performed all operations that were handed over.
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
    }
}

struct PoolShared {
    state: Mutex<PoolState>,
    /// Signalled when there are jobs.
    work: Condvar,
    /// Length of `state.done`, so that it can be read without the lock.
    done: AtomicUsize,
    event: OwnedFd,
}

#[derive(Default)]
struct PoolState {
    jobs: VecDeque<Job>,
    done: Vec<Completion>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl PoolShared {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn signal(&self) {
        // The counter never overflows: that would take 2⁶⁴ − 2 signals.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// The main loop of a pool thread.
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

    /// Stores a completion and fetches the next job. Returns whether the engine must be signalled: only if
    /// the list was empty before. Otherwise the engine was signalled already and has not collected yet.
    fn exchange(&self, done: Option<Completion>) -> (Option<Job>, bool) {
        let mut state = self.lock();
        let signal = match done {
            Some(done) => self.store(&mut state, done),
            None => false,
        };
        (state.jobs.pop_front(), signal)
    }

    fn store(&self, state: &mut PoolState, done: Completion) -> bool {
        state.done.push(done);
        self.done.store(state.done.len(), Ordering::Release);
        state.done.len() == 1
    }

    /// Waits for a job. Returns false if the thread must end.
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

/// An [`Op`] without its lifetime; the submitter guarantees that its memory stays valid.
enum Operation {
    Read(FileOffset, SegmentList),
    Write(FileOffset, SegmentList, bool),
    Flush,
    Discard(FileOffset, u64, bool),
    WriteZeroes(FileOffset, u64, bool, bool),
}

/// Segments of an operation: a single one by value, a longer list by its address.
enum SegmentList {
    One(Segment),
    Many(*const Segment, usize),
}

// SAFETY: the creator of a job guarantees that the list and the memory it names stay valid until the job's
// completion has been reaped, on whichever thread the job runs.
#[expect(unsafe_code, reason = "a raw pointer goes to another thread")]
unsafe impl Send for SegmentList {}

impl Job {
    /// An operation on a file.
    ///
    /// # Safety
    /// As for `block::Engine::submit`, starting with this call.
    #[expect(
        unsafe_code,
        reason = "the caller promises that the memory stays valid"
    )]
    pub unsafe fn new(target: Arc<Target>, op: Op<'_>, token: Token) -> Self {
        let operation = match op {
            Op::Read { at, to } => Operation::Read(at, SegmentList::new(to)),
            Op::Write { at, from, stable } => Operation::Write(at, SegmentList::new(from), stable),
            Op::Flush => Operation::Flush,
            Op::Discard { at, len, stable } => Operation::Discard(at, len, stable),
            Op::WriteZeroes {
                at,
                len,
                unmap,
                stable,
            } => Operation::WriteZeroes(at, len, unmap, stable),
        };
        Self {
            target,
            operation,
            token,
        }
    }

    fn run(&self) -> Completion {
        let target = &*self.target;
        let sync = |stable| {
            if stable {
                rustix::fs::fdatasync(&target.file)
            } else {
                Ok(())
            }
        };
        let range = |at, len| Range { target, at, len };
        let result = match self.operation {
            Operation::Read(at, ref list) => list.transfer(target.file.as_raw_fd(), at, None),
            Operation::Write(at, ref list, stable) => {
                list.transfer(target.file.as_raw_fd(), at, Some(stable))
            }
            Operation::Flush => sync(true).map(|()| 0),
            Operation::Discard(at, len, stable) => ranges::discard(&range(at, len))
                .and_then(|()| sync(stable))
                .map(|()| 0),
            Operation::WriteZeroes(at, len, unmap, stable) => {
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

impl SegmentList {
    fn new(segments: &[Segment]) -> Self {
        match segments {
            [one] => Self::One(*one),
            many => Self::Many(many.as_ptr(), many.len()),
        }
    }

    /// Reads if `write` is `None`; otherwise writes, and makes the data stable if it is `Some(true)`.
    fn transfer(&self, fd: RawFd, at: FileOffset, write: Option<bool>) -> Result<i32, Errno> {
        let (list, n) = match self {
            Self::One(segment) => iovec(std::slice::from_ref(segment)),
            Self::Many(list, n) => (list.cast(), (*n).min(SEGMENTS_MAX) as u32),
        };
        let (n, at) = (n as libc::c_int, at.0 as libc::off_t);
        loop {
            // SAFETY: the creator of the job guarantees that the list and the memory it names stay valid
            // until its completion has been reaped, which happens later; a segment is laid out like an iovec.
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
                // One call never transfers more than 2 GiB.
                _ => match Errno::from_io_error(&io::Error::last_os_error()) {
                    Some(Errno::INTR) => {}
                    e => return Err(e.unwrap_or(Errno::IO)),
                },
            }
        }
    }
}
