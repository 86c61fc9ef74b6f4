//! A few threads that do what would block the I/O thread: load a table of an image, copy or unpack a cluster, flush
//! what an image has changed. The I/O thread continues with other requests meanwhile.
//!
//! A job is plain blocking code. It never touches guest memory: the bytes that it read for the guest are part of its
//! result, and the I/O thread copies them. So a job may outlive the mapping of the queue's memory. The slot of its
//! request stays taken until the I/O thread has taken the result.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, ThreadId};
use std::time::Duration;

use image::{Allocation, Awaited};

use super::cow::CowWrite;
use crate::clock::now_ns;
use crate::request::{Ending, RequestId};
use crate::wake::Wake;

/// Most jobs of one disk that run at a time: as many reads as keep it busy.
const DISK_MAX: usize = 16;

/// Most jobs of an I/O thread that run at a time, without the first of each disk. No other disk can take that first
/// one, so that storage that hangs delays only its own disks. Threads are started as they are needed.
const SHARED_MAX: usize = 64;

/// A thread that was idle for this long ends.
const IDLE: Duration = Duration::from_secs(10);

/// How a request ends whose clusters a job gives back.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AbortEnd {
    Finish(Ending),
    /// It is left for the next server of the ring.
    Leave,
}

/// The result of a job.
#[derive(Debug)]
pub(crate) enum JobResult {
    /// The obstacle is gone: the request is looked up again.
    LookUpAgain,
    /// The request's range is noted: it is planned again.
    Noted,
    /// These bytes are what the guest reads next.
    Bytes(Vec<u8>),
    /// Clusters were taken for the next bytes of a write.
    Prepared(Allocation),
    /// The same, with the bytes that these clusters need beside the guest's: one write for both.
    PreparedCow(Allocation, CowWrite),
    /// The image's tables lead to what was written.
    Committed,
    /// This many more bytes were discarded or zeroed.
    Zeroed { done: u64 },
    /// Other requests must end first.
    WaitFor(Awaited),
    /// The request waits for others, whose end wakes it. The I/O thread is not told of this.
    WillBeWoken,
    /// The clusters that were taken for the request were given back, and it ends.
    Aborted(AbortEnd),
    /// The job failed with this errno. If that is permanent, trying again is useless.
    Failed { errno: i32, is_permanent: bool },
    /// The tables could not be changed, with this errno; that may be tried again.
    NotCommitted(Allocation, i32),
    /// The image was flushed: 0 or an errno, and whether writes are lost for good.
    Flushed { errno: i32, lost: bool },
}

/// Work that blocks.
pub(crate) type Job = Box<dyn FnOnce() -> JobResult + Send>;

/// The blocking pool of an I/O thread.
pub(crate) struct BlockingPool {
    shared: Arc<PoolShared>,
}

struct PoolShared {
    state: Mutex<PoolState>,
    /// A job is ready, or the pool closes.
    job_ready: Condvar,
    /// Length of `state.results`, which can be read without the lock.
    results: AtomicUsize,
    /// Jobs that have not ended, which can be read without the lock.
    jobs: AtomicUsize,
    /// The I/O thread's.
    wake: Arc<Wake>,
}

#[derive(Default)]
struct PoolState {
    /// Jobs that threads take next, with the disk of each. There are threads for all of these.
    ready: VecDeque<(usize, RequestId, Job)>,
    /// By disk.
    disks: Vec<DiskJobs>,
    /// Jobs that wait in `disks`.
    waiting: usize,
    /// Jobs that are ready or run.
    admitted: usize,
    /// The same, without the first of each disk.
    admitted_beyond_first: usize,
    /// The disk whose waiting job was made ready last.
    turn: usize,
    /// Results that the I/O thread has not taken yet.
    results: Vec<(RequestId, JobResult)>,
    threads: usize,
    /// Jobs that run.
    running: Vec<RunningJob>,
    is_closed: bool,
}

/// A job that a thread is doing.
struct RunningJob {
    request: RequestId,
    /// When it began, in nanoseconds of the monotonic clock.
    since: u64,
    /// Its thread.
    thread: ThreadId,
}

/// The jobs of a disk.
#[derive(Default)]
struct DiskJobs {
    /// Jobs that wait until others have ended.
    waiting: VecDeque<(RequestId, Job)>,
    /// How many are ready or run.
    admitted: usize,
}

impl PoolState {
    /// Adds a job for a disk. Returns whether it is ready.
    fn add(&mut self, disk: usize, request: RequestId, job: Job) -> bool {
        if self.disks.len() <= disk {
            self.disks.resize_with(disk + 1, DiskJobs::default);
        }
        // No job of a disk waits while it may have another one ready.
        let room = self.has_room(disk);
        if room {
            self.admit(disk, request, job);
        } else {
            self.disks[disk].waiting.push_back((request, job));
            self.waiting += 1;
        }
        room
    }

    /// The job of this thread does not run any more.
    fn done(&mut self) {
        let thread = thread::current().id();
        self.running.retain(|job| job.thread != thread);
    }

    fn has_room(&self, disk: usize) -> bool {
        match self.disks[disk].admitted {
            0 => true,
            admitted => admitted < DISK_MAX && self.admitted_beyond_first < SHARED_MAX,
        }
    }

    fn admit(&mut self, disk: usize, request: RequestId, job: Job) {
        let jobs = &mut self.disks[disk];
        self.admitted_beyond_first += usize::from(jobs.admitted > 0);
        jobs.admitted += 1;
        self.admitted += 1;
        self.ready.push_back((disk, request, job));
    }

    /// A job of a disk has ended: another one that waits becomes ready, of each disk in turn.
    fn ended(&mut self, disk: usize) {
        let jobs = &mut self.disks[disk];
        jobs.admitted -= 1;
        self.admitted -= 1;
        self.admitted_beyond_first -= usize::from(jobs.admitted > 0);
        if self.waiting == 0 {
            return;
        }
        for _ in 0..self.disks.len() {
            self.turn = (self.turn + 1) % self.disks.len();
            let turn = self.turn;
            if self.has_room(turn)
                && let Some((request, job)) = self.disks[turn].waiting.pop_front()
            {
                self.waiting -= 1;
                return self.admit(turn, request, job);
            }
        }
    }
}

impl BlockingPool {
    pub fn new(wake: Arc<Wake>) -> Self {
        Self {
            shared: Arc::new(PoolShared {
                state: Mutex::default(),
                job_ready: Condvar::new(),
                results: AtomicUsize::new(0),
                jobs: AtomicUsize::new(0),
                wake,
            }),
        }
    }

    /// Runs a job for a request of the disk with this index. The I/O thread is woken when it has ended.
    pub fn start(
        &self,
        disk: usize,
        request: RequestId,
        job: impl FnOnce() -> JobResult + Send + 'static,
    ) {
        self.shared.jobs.fetch_add(1, Ordering::Relaxed);
        let mut state = self.shared.lock();
        if !state.add(disk, request, Box::new(job)) {
            return;
        }
        if state.threads >= state.admitted {
            return self.shared.job_ready.notify_one();
        }
        state.threads += 1;
        drop(state);
        let shared = self.shared.clone();
        let thread = thread::Builder::new().name("blocking".into());
        if thread.spawn(move || shared.run_jobs()).is_err() {
            self.run_jobs_here();
        }
    }

    /// Whether a job has not ended.
    #[inline]
    pub fn has_jobs(&self) -> bool {
        self.shared.jobs.load(Ordering::Relaxed) > 0
    }

    /// The requests whose jobs run, and since when, in nanoseconds of the monotonic clock.
    pub fn running(&self) -> Vec<(RequestId, u64)> {
        if !self.has_jobs() {
            return Vec::new();
        }
        let state = self.shared.lock();
        let running = state.running.iter();
        running.map(|job| (job.request, job.since)).collect()
    }

    /// A handle that has a request looked up again.
    pub fn waker(&self, request: RequestId) -> impl Fn() + Send + Sync + 'static {
        let shared = self.shared.clone();
        move || shared.add_result(request, JobResult::LookUpAgain)
    }

    /// Takes the results since the last call.
    pub fn take_results(&self) -> Vec<(RequestId, JobResult)> {
        if self.shared.results.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let mut state = self.shared.lock();
        self.shared.results.store(0, Ordering::Release);
        std::mem::take(&mut state.results)
    }

    /// No thread can be started. If there are none at all, the jobs run here, on the I/O thread: late, but done.
    #[cold]
    fn run_jobs_here(&self) {
        let mut state = self.shared.lock();
        state.threads -= 1;
        while state.threads == 0
            && let Some((disk, request, job)) = state.ready.pop_front()
        {
            drop(state);
            self.shared.add_result(request, job());
            self.shared.jobs.fetch_sub(1, Ordering::Relaxed);
            state = self.shared.lock();
            state.ended(disk);
        }
    }
}

impl Drop for BlockingPool {
    /// The threads end when they have done all jobs.
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.job_ready.notify_all();
    }
}

impl PoolShared {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn add_result(&self, request: RequestId, result: JobResult) {
        if let JobResult::WillBeWoken = result {
            return;
        }
        let mut state = self.lock();
        state.results.push((request, result));
        self.results.store(state.results.len(), Ordering::Release);
        let is_first = state.results.len() == 1;
        drop(state);
        // If there were results before, the I/O thread has been woken, and has not taken them yet.
        if is_first {
            self.wake.wake();
        }
    }

    /// The loop of a thread of the pool.
    fn run_jobs(&self) {
        let mut last = None;
        while let Some((disk, request, job)) = self.next_job(last) {
            let result = job();
            self.lock().done();
            self.add_result(request, result);
            self.jobs.fetch_sub(1, Ordering::Relaxed);
            last = Some(disk);
        }
    }

    /// The next job, after one of this disk; `None` if the thread is to end.
    fn next_job(&self, last: Option<usize>) -> Option<(usize, RequestId, Job)> {
        let mut state = self.lock();
        if let Some(disk) = last {
            state.ended(disk);
        }
        loop {
            if let Some(job) = state.ready.pop_front() {
                state.running.push(RunningJob {
                    request: job.1,
                    since: now_ns(),
                    thread: thread::current().id(),
                });
                return Some(job);
            }
            if state.is_closed {
                state.threads -= 1;
                return None;
            }
            let (woken, timeout) = match self.job_ready.wait_timeout(state, IDLE) {
                Ok(result) => result,
                Err(e) => e.into_inner(),
            };
            state = woken;
            if timeout.timed_out() && state.ready.is_empty() {
                state.threads -= 1;
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;

    use super::*;

    fn wait(pool: &BlockingPool, wake: &Wake, n: usize) -> Vec<(RequestId, JobResult)> {
        let mut all = Vec::new();
        while all.len() < n {
            // What comes after this brings a wake-up of its own.
            wake.take();
            let done = pool.take_results();
            if done.is_empty() {
                let mut event = [rustix::event::PollFd::from_borrowed_fd(
                    wake.event(),
                    rustix::event::PollFlags::IN,
                )];
                rustix::event::poll(&mut event, None).unwrap();
                let _ = rustix::io::read(wake.event(), &mut [0; 8]);
            }
            all.extend(done);
        }
        all
    }

    #[test]
    fn each_job_runs_once_and_many_run_at_a_time() {
        let wake = Arc::new(Wake::new().unwrap());
        let pool = BlockingPool::new(wake.clone());
        // None of these ends before all have begun.
        let barrier = Arc::new(Barrier::new(DISK_MAX));
        for slot in 0..DISK_MAX as u16 {
            let barrier = barrier.clone();
            pool.start(0, RequestId { queue: 1, slot }, move || {
                barrier.wait();
                JobResult::LookUpAgain
            });
        }
        wait(&pool, &wake, DISK_MAX);
        for slot in 0..1000 {
            pool.start(0, RequestId { queue: 0, slot }, move || {
                JobResult::Bytes(vec![slot as u8])
            });
        }
        let done = wait(&pool, &wake, 1000);
        let slots: HashSet<_> = done.iter().map(|(request, _)| request.slot).collect();
        assert_eq!(slots.len(), 1000);
        for (request, result) in done {
            let JobResult::Bytes(bytes) = result else {
                panic!("{result:?}")
            };
            assert_eq!(bytes, [request.slot as u8]);
        }
        assert!(pool.shared.lock().threads <= DISK_MAX);
    }

    /// Storage hangs, with all jobs of its disks. Those of other disks run, each once.
    #[test]
    fn a_hung_disk_does_not_delay_others() {
        const HUNG: usize = 6;
        let wake = Arc::new(Wake::new().unwrap());
        let pool = BlockingPool::new(wake.clone());
        let hang = Arc::new(Mutex::new(()));
        let guard = hang.lock().unwrap();
        for slot in 0..100 {
            for disk in 0..HUNG {
                let hang = hang.clone();
                pool.start(disk, RequestId { queue: disk, slot }, move || {
                    drop(hang.lock());
                    JobResult::LookUpAgain
                });
            }
        }
        let start = |slot| {
            for queue in HUNG..HUNG + 3 {
                pool.start(queue, RequestId { queue, slot }, || JobResult::LookUpAgain);
            }
        };
        (0..100).for_each(start);
        let done = wait(&pool, &wake, 300);
        assert!(done.iter().all(|(request, _)| request.queue >= HUNG));
        let threads = pool.shared.lock().threads;
        assert!(threads <= SHARED_MAX + HUNG + 3, "{threads}");
        drop(guard);
        let done = wait(&pool, &wake, HUNG * 100);
        let all: HashSet<_> = done.iter().map(|(r, _)| (r.queue, r.slot)).collect();
        assert_eq!(all.len(), HUNG * 100);
        // The last ones say that they have ended after they were collected.
        loop {
            let state = pool.shared.lock();
            if state.admitted == 0 {
                assert_eq!((state.admitted_beyond_first, state.waiting), (0, 0));
                assert!(state.ready.is_empty());
                assert!(state.disks.iter().all(|jobs| jobs.admitted == 0));
                break;
            }
            drop(state);
            thread::yield_now();
        }
    }

    #[test]
    fn a_waker_requeues_its_request() {
        let wake = Arc::new(Wake::new().unwrap());
        let pool = BlockingPool::new(wake.clone());
        let request = RequestId { queue: 3, slot: 4 };
        let waker = pool.waker(request);
        thread::spawn(waker);
        let done = wait(&pool, &wake, 1);
        assert!(matches!(done[..], [(r, JobResult::LookUpAgain)] if r == request));
        assert!(pool.take_results().is_empty());
    }
}
