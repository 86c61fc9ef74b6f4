//! What a request needs that blocks (a table of its image that is not in memory, a
//! cluster to be copied or unpacked, a flush of what the image has changed) is done by a few threads
//! beside the I/O thread, which goes on with other requests meanwhile.
//!
//! A job is plain blocking code. It never touches guest memory: what it read for the guest comes back
//! with it, and the I/O thread copies it. So a job may outlive the queue's memory, and its slot stays
//! taken until the I/O thread has collected it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use image::{Allocation, PendingWrite};

use super::cow::CowWrite;
use crate::request::{Ending, RequestId};
use crate::wake::Wake;

/// Jobs of one disk that are done at a time: as many reads as keep it busy.
const DISK_MAX: usize = 16;

/// Jobs that an I/O thread has done at a time beyond the first of each disk, which no other disk can take from it: storage
/// that hangs holds up its own disks, and no more. Threads are started as they are needed.
const SHARED_MAX: usize = 64;

/// A thread that has had nothing to do for this long ends.
const IDLE: Duration = Duration::from_secs(10);

/// How a request ends whose clusters a job gives back.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AbortEnd {
    Finish(Ending),
    /// It is left for the next server of the ring.
    Leave,
}

/// What a job came to.
#[derive(Debug)]
pub(crate) enum JobResult {
    /// What stood in the way is gone: the request is looked at anew.
    Again,
    /// These bytes are what the guest reads next.
    Bytes(Vec<u8>),
    /// Clusters are ready for the next bytes of a write.
    Prepared(Allocation),
    /// The same, with all that these clusters get but the guest's bytes: one write for both.
    Merged(Allocation, CowWrite),
    /// What was written is the disk's.
    Committed,
    /// So many more bytes are given up.
    Zeroed { done: u64 },
    /// Somebody else's write must end first.
    Wait(PendingWrite),
    /// It has been seen to that the request is looked at anew: the I/O thread hears nothing of this.
    Waits,
    /// What was taken for the request is given back, and so it ends.
    Aborted(AbortEnd),
    /// With this errno; it is of no use to try again if that lasts.
    Failed { errno: i32, lasting: bool },
    /// What was written is not the disk's yet, with this errno. It may be tried again.
    NotCommitted(Allocation, i32),
    /// The image is durable; if not, this errno says why, and whether it never will be.
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
    work: Condvar,
    /// Length of `state.done`, for looking without the lock.
    done: AtomicUsize,
    /// The I/O thread's.
    wake: Arc<Wake>,
}

#[derive(Default)]
struct PoolState {
    /// To be done next, with the disk of each: for these and what is under way, there are threads.
    ready: VecDeque<(usize, RequestId, Job)>,
    /// By disk.
    disks: Vec<DiskJobs>,
    /// Jobs in `lanes`.
    waiting: usize,
    /// Jobs that are ready or under way.
    admitted: usize,
    /// The same, but for the first of each disk.
    shared: usize,
    /// The disk that had a job made ready last, among those that had to wait for it.
    turn: usize,
    done: Vec<(RequestId, JobResult)>,
    threads: usize,
    closed: bool,
}

/// The jobs of a disk.
#[derive(Default)]
struct DiskJobs {
    /// Those that wait for others to end.
    waiting: VecDeque<(RequestId, Job)>,
    /// How many are ready or under way.
    admitted: usize,
}

impl PoolState {
    /// Takes a job for a disk. Whether it is ready.
    fn add(&mut self, disk: usize, request: RequestId, job: Job) -> bool {
        if self.disks.len() <= disk {
            self.disks.resize_with(disk + 1, DiskJobs::default);
        }
        // None of its jobs waits while there is room for one.
        let room = self.has_room(disk);
        match room {
            true => self.admit(disk, request, job),
            false => {
                self.disks[disk].waiting.push_back((request, job));
                self.waiting += 1;
            }
        }
        room
    }

    fn has_room(&self, disk: usize) -> bool {
        match self.disks[disk].admitted {
            0 => true,
            admitted => admitted < DISK_MAX && self.shared < SHARED_MAX,
        }
    }

    fn admit(&mut self, disk: usize, request: RequestId, job: Job) {
        let jobs = &mut self.disks[disk];
        self.shared += usize::from(jobs.admitted > 0);
        jobs.admitted += 1;
        self.admitted += 1;
        self.ready.push_back((disk, request, job));
    }

    /// A job of a disk has ended: there is room for one that waits, of each disk in turn.
    fn ended(&mut self, disk: usize) {
        let jobs = &mut self.disks[disk];
        jobs.admitted -= 1;
        self.admitted -= 1;
        self.shared -= usize::from(jobs.admitted > 0);
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
                work: Condvar::new(),
                done: AtomicUsize::new(0),
                wake,
            }),
        }
    }

    /// Has a job done for a request of a disk, which is known by a small number. The I/O thread is woken when it is.
    pub fn start(
        &self,
        disk: usize,
        request: RequestId,
        job: impl FnOnce() -> JobResult + Send + 'static,
    ) {
        let mut state = self.shared.lock();
        if !state.add(disk, request, Box::new(job)) {
            return;
        }
        if state.threads >= state.admitted {
            return self.shared.work.notify_one();
        }
        state.threads += 1;
        drop(state);
        let shared = self.shared.clone();
        let thread = thread::Builder::new().name("blocking".into());
        if thread.spawn(move || shared.work()).is_err() {
            self.do_without();
        }
    }

    /// A handle with which somebody else can say that a request is to be looked at anew.
    pub fn waker(&self, request: RequestId) -> impl Fn() + Send + Sync + 'static {
        let shared = self.shared.clone();
        move || shared.leave(request, JobResult::Again)
    }

    /// Takes what has been done since the last time.
    pub fn collect(&self) -> Vec<(RequestId, JobResult)> {
        if self.shared.done.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let mut state = self.shared.lock();
        self.shared.done.store(0, Ordering::Release);
        std::mem::take(&mut state.done)
    }

    /// No thread can be started. With none at all, the jobs are done here: late, but done.
    #[cold]
    fn do_without(&self) {
        let mut state = self.shared.lock();
        state.threads -= 1;
        while state.threads == 0
            && let Some((disk, request, job)) = state.ready.pop_front()
        {
            drop(state);
            self.shared.leave(request, job());
            state = self.shared.lock();
            state.ended(disk);
        }
    }
}

impl Drop for BlockingPool {
    /// The threads end when they have done what there was.
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl PoolShared {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn leave(&self, request: RequestId, outcome: JobResult) {
        if let JobResult::Waits = outcome {
            return;
        }
        let mut state = self.lock();
        state.done.push((request, outcome));
        self.done.store(state.done.len(), Ordering::Release);
        let first = state.done.len() == 1;
        drop(state);
        // Otherwise it has been woken, and has not come to collect.
        if first {
            self.wake.wake();
        }
    }

    /// What a thread does.
    fn work(&self) {
        let mut last = None;
        while let Some((disk, request, job)) = self.next(last) {
            self.leave(request, job());
            last = Some(disk);
        }
    }

    /// The next job after one of this disk; none if the thread has to end.
    fn next(&self, last: Option<usize>) -> Option<(usize, RequestId, Job)> {
        let mut state = self.lock();
        if let Some(disk) = last {
            state.ended(disk);
        }
        loop {
            if let Some(job) = state.ready.pop_front() {
                return Some(job);
            }
            if state.closed {
                state.threads -= 1;
                return None;
            }
            let (woken, timeout) = match self.work.wait_timeout(state, IDLE) {
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
            let done = pool.collect();
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
    fn every_job_is_done_once_and_many_at_a_time() {
        let wake = Arc::new(Wake::new().unwrap());
        let pool = BlockingPool::new(wake.clone());
        // None of these ends before all have begun.
        let barrier = Arc::new(Barrier::new(DISK_MAX));
        for slot in 0..DISK_MAX as u16 {
            let barrier = barrier.clone();
            pool.start(0, RequestId { queue: 1, slot }, move || {
                barrier.wait();
                JobResult::Again
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
        for (request, outcome) in done {
            let JobResult::Bytes(bytes) = outcome else {
                panic!("{outcome:?}")
            };
            assert_eq!(bytes, [request.slot as u8]);
        }
        assert!(pool.shared.lock().threads <= DISK_MAX);
    }

    /// Storage hangs, and all jobs of its disks with it: those of other disks are done, each once.
    #[test]
    fn a_disk_that_hangs_holds_up_no_other() {
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
                    JobResult::Again
                });
            }
        }
        let start = |slot| {
            for queue in HUNG..HUNG + 3 {
                pool.start(queue, RequestId { queue, slot }, || JobResult::Again);
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
                assert_eq!((state.shared, state.waiting, state.ready.len()), (0, 0, 0));
                assert!(state.disks.iter().all(|jobs| jobs.admitted == 0));
                break;
            }
            drop(state);
            thread::yield_now();
        }
    }

    #[test]
    fn others_can_have_a_request_looked_at_anew() {
        let wake = Arc::new(Wake::new().unwrap());
        let pool = BlockingPool::new(wake.clone());
        let request = RequestId { queue: 3, slot: 4 };
        let waker = pool.waker(request);
        thread::spawn(waker);
        let done = wait(&pool, &wake, 1);
        assert!(matches!(done[..], [(r, JobResult::Again)] if r == request));
        assert!(pool.collect().is_empty());
    }
}
