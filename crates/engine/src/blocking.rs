//! A thread pool for blocking system calls: it serves `aio=threads`, and operations that an engine cannot
//! perform without blocking.
//!
//! A file that does not answer keeps only threads of its own: each file is sure of one, and has its share of the
//! others.
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

/// Maximum number of operations on one file that run at a time. This keeps a disk array or a file server busy
/// and uses little memory.
pub(crate) const FILE_MAX: usize = 16;

/// Maximum number of operations of an engine that run at a time, without the first of each file. Threads start
/// on demand.
const SHARED_MAX: usize = 64;

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
        self.queued.drain(..).for_each(|job| state.add(job));
        let wake = state.idle.min(state.ready.len());
        let start = state.admitted.saturating_sub(state.threads);
        state.threads += start;
        drop(state);
        (0..wake).for_each(|_| self.shared.work.notify_one());
        for started in 0..start {
            let shared = self.shared.clone();
            let thread = thread::Builder::new().name("blocking".into());
            if thread.spawn(move || shared.work()).is_err() {
                self.run_without_threads(start - started);
                break;
            }
        }
    }

    /// Called when no thread can be started. If the pool has no thread at all, the calling thread performs
    /// the jobs: late, but they complete.
    #[cold]
    fn run_without_threads(&self, not_started: usize) {
        let mut state = self.shared.lock();
        state.threads -= not_started;
        let mut signal = false;
        while state.threads == 0
            && let Some(job) = state.ready.pop_front()
        {
            drop(state);
            let done = job.run();
            state = self.shared.lock();
            state.ended(job.target.number);
            signal |= self.shared.store(&mut state, done);
        }
        drop(state);
        if signal {
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
    /// Jobs that threads take next. There are threads for all of these.
    ready: VecDeque<Job>,
    /// By [number](Target::number).
    files: Vec<FileJobs>,
    /// Jobs that wait in `files`.
    waiting: usize,
    /// Jobs that are ready or run.
    admitted: usize,
    /// The same, without the first of each file.
    admitted_beyond_first: usize,
    /// The file whose waiting job was made ready last.
    turn: usize,
    done: Vec<Completion>,
    threads: usize,
    idle: usize,
    closed: bool,
}

/// The jobs of a file.
#[derive(Default)]
struct FileJobs {
    /// Jobs that wait until others have ended.
    waiting: VecDeque<Job>,
    /// How many are ready or run.
    admitted: usize,
}

impl PoolState {
    fn add(&mut self, job: Job) {
        let file = job.target.number;
        if self.files.len() <= file {
            self.files.resize_with(file + 1, FileJobs::default);
        }
        // No job of a file waits while another one of it could be ready.
        if self.has_room(file) {
            self.admit(job);
        } else {
            self.files[file].waiting.push_back(job);
            self.waiting += 1;
        }
    }

    fn has_room(&self, file: usize) -> bool {
        match self.files[file].admitted {
            0 => true,
            admitted => admitted < FILE_MAX && self.admitted_beyond_first < SHARED_MAX,
        }
    }

    fn admit(&mut self, job: Job) {
        let jobs = &mut self.files[job.target.number];
        self.admitted_beyond_first += usize::from(jobs.admitted > 0);
        jobs.admitted += 1;
        self.admitted += 1;
        self.ready.push_back(job);
    }

    /// A job of a file has ended: another one that waits becomes ready, of each file in turn.
    fn ended(&mut self, file: usize) {
        let jobs = &mut self.files[file];
        jobs.admitted -= 1;
        self.admitted -= 1;
        self.admitted_beyond_first -= usize::from(jobs.admitted > 0);
        if self.waiting == 0 {
            return;
        }
        for _ in 0..self.files.len() {
            self.turn = (self.turn + 1) % self.files.len();
            let turn = self.turn;
            if self.has_room(turn)
                && let Some(job) = self.files[turn].waiting.pop_front()
            {
                self.waiting -= 1;
                return self.admit(job);
            }
        }
    }
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
                Some(job) => done = Some((job.target.number, job.run())),
                None if self.sleep() => {}
                None => return,
            }
        }
    }

    /// Stores a completion and fetches the next job. Returns whether the engine must be signalled: only if
    /// the list was empty before. Otherwise the engine was signalled already and has not collected yet.
    fn exchange(&self, done: Option<(usize, Completion)>) -> (Option<Job>, bool) {
        let mut state = self.lock();
        let signal = match done {
            Some((file, done)) => {
                state.ended(file);
                self.store(&mut state, done)
            }
            None => false,
        };
        (state.ready.pop_front(), signal)
    }

    fn store(&self, state: &mut PoolState, done: Completion) -> bool {
        state.done.push(done);
        self.done.store(state.done.len(), Ordering::Release);
        state.done.len() == 1
    }

    /// Waits for a job. Returns false if the thread must end.
    fn sleep(&self) -> bool {
        let mut state = self.lock();
        while state.ready.is_empty() {
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
            if timeout.timed_out() && state.ready.is_empty() {
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
    /// Reads from a pipe.
    #[cfg(test)]
    Wait,
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
            #[cfg(test)]
            Operation::Wait => rustix::io::read(&target.file, &mut [0; 1]).map(|n| n as i32),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Operations on a file that does not answer, more than there are threads for all files, delay none of
    /// another file.
    #[test]
    fn file_that_hangs_delays_no_other() {
        // Reads of a pipe wait until its other end is written to.
        let (silent, other_end) = rustix::pipe::pipe().unwrap();
        let (silent, answering) = (Arc::new(silent), tempfile::tempfile().unwrap());
        let target = |file, number| {
            let backing = block::Backing::File;
            Arc::new(Target {
                file,
                backing,
                number,
            })
        };
        let silent: Vec<_> = (0..8).map(|n| target(silent.clone(), n)).collect();
        let answering = target(Arc::new(answering.into()), 8);
        let mut pool = BlockingPool::new().unwrap();
        for n in 0..32 * silent.len() as u64 {
            let target = silent[n as usize % silent.len()].clone();
            pool.start(Job {
                target,
                operation: Operation::Wait,
                token: Token(n),
            });
        }
        pool.push();
        let flushes = 1000..1032;
        for n in flushes.clone() {
            pool.start(Job {
                target: answering.clone(),
                operation: Operation::Flush,
                token: Token(n),
            });
        }
        pool.push();
        let mut done = Vec::with_capacity(512);
        while done.len() < flushes.clone().count() {
            rustix::event::poll(
                &mut [rustix::event::PollFd::new(
                    &pool.event(),
                    rustix::event::PollFlags::IN,
                )],
                None,
            )
            .unwrap();
            pool.collect(&mut done);
        }
        assert!(
            done.iter().all(|c| flushes.contains(&c.token.0)),
            "{done:?}"
        );
        drop(other_end);
        while done.len() < flushes.clone().count() + 32 * silent.len() {
            pool.collect(&mut done);
            thread::yield_now();
        }
    }
}
