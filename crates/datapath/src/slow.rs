//! The slow lane: what a request needs that blocks (a table of its image that is not in memory, a
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

use image::{Allocation, Waiting};

use crate::merge::Merge;
use crate::thread::Wake;

/// Threads of one I/O thread, started as they are needed: as many reads as keep a disk busy.
const THREADS_MAX: usize = 16;

/// A thread that has had nothing to do for this long ends.
const IDLE: Duration = Duration::from_secs(10);

/// Which request a job is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct For {
    pub queue: usize,
    pub slot: u16,
}

/// What a job came to.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// What stood in the way is gone: the request is looked at anew.
    Again,
    /// These bytes are what the guest reads next.
    Bytes(Vec<u8>),
    /// Clusters are ready for the next bytes of a write.
    Prepared(Allocation),
    /// The same, with all that these clusters get but the guest's bytes: one write for both.
    Merged(Allocation, Merge),
    /// What was written is the disk's.
    Committed,
    /// So many more bytes are given up; if there is something to wait for, not all.
    Zeroed { done: u64, waiting: Option<Waiting> },
    /// Somebody else's write must end first.
    Wait(Waiting),
    /// With this errno; it is of no use to try again if that lasts.
    Failed { errno: i32, lasting: bool },
    /// What was written is not the disk's yet, with this errno. It may be tried again.
    NotCommitted(Allocation, i32),
    /// The image is durable; if not, this errno says why, and whether it never will be.
    Flushed { errno: i32, lost: bool },
}

type Job = Box<dyn FnOnce() -> Outcome + Send>;

/// The slow lane of an I/O thread.
pub(crate) struct Slow {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// Length of `state.done`, for looking without the lock.
    done: AtomicUsize,
    /// The I/O thread's.
    wake: Arc<Wake>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<(For, Job)>,
    done: Vec<(For, Outcome)>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Slow {
    pub fn new(wake: Arc<Wake>) -> Self {
        Self {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                work: Condvar::new(),
                done: AtomicUsize::new(0),
                wake,
            }),
        }
    }

    /// Has a job done for a request. The I/O thread is woken when it is.
    pub fn start(&self, request: For, job: impl FnOnce() -> Outcome + Send + 'static) {
        let mut state = self.shared.lock();
        state.jobs.push_back((request, Box::new(job)));
        if state.idle >= state.jobs.len() {
            return self.shared.work.notify_one();
        }
        if state.threads == THREADS_MAX {
            return;
        }
        state.threads += 1;
        drop(state);
        let shared = self.shared.clone();
        let thread = thread::Builder::new().name("slow-lane".into());
        if thread.spawn(move || shared.work()).is_err() {
            self.do_without();
        }
    }

    /// A handle with which somebody else can say that a request is to be looked at anew.
    pub fn waker(&self, request: For) -> impl Fn() + Send + Sync + 'static {
        let shared = self.shared.clone();
        move || shared.leave(request, Outcome::Again)
    }

    /// Takes what has been done since the last time.
    pub fn collect(&self) -> Vec<(For, Outcome)> {
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
            && let Some((request, job)) = state.jobs.pop_front()
        {
            drop(state);
            self.shared.leave(request, job());
            state = self.shared.lock();
        }
    }
}

impl Drop for Slow {
    /// The threads end when they have done what there was.
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn leave(&self, request: For, outcome: Outcome) {
        let mut state = self.lock();
        state.done.push((request, outcome));
        self.done.store(state.done.len(), Ordering::Release);
        let first = state.done.len() == 1;
        drop(state);
        // Otherwise it has been woken, and has not come to collect.
        if first {
            self.wake.up();
        }
    }

    /// What a thread does.
    fn work(&self) {
        while let Some((request, job)) = self.next() {
            self.leave(request, job());
        }
    }

    /// The next job; none if the thread has to end.
    fn next(&self) -> Option<(For, Job)> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                state.threads -= 1;
                return None;
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

    fn wait(slow: &Slow, wake: &Wake, n: usize) -> Vec<(For, Outcome)> {
        let mut all = Vec::new();
        while all.len() < n {
            // What comes after this brings a wake-up of its own.
            wake.take();
            let done = slow.collect();
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
        let slow = Slow::new(wake.clone());
        // None of these ends before all have begun.
        let barrier = Arc::new(Barrier::new(THREADS_MAX));
        for slot in 0..THREADS_MAX as u16 {
            let barrier = barrier.clone();
            slow.start(For { queue: 1, slot }, move || {
                barrier.wait();
                Outcome::Again
            });
        }
        wait(&slow, &wake, THREADS_MAX);
        for slot in 0..1000 {
            slow.start(For { queue: 0, slot }, move || {
                Outcome::Bytes(vec![slot as u8])
            });
        }
        let done = wait(&slow, &wake, 1000);
        let slots: HashSet<_> = done.iter().map(|(request, _)| request.slot).collect();
        assert_eq!(slots.len(), 1000);
        for (request, outcome) in done {
            let Outcome::Bytes(bytes) = outcome else {
                panic!("{outcome:?}")
            };
            assert_eq!(bytes, [request.slot as u8]);
        }
        assert!(slow.shared.lock().threads <= THREADS_MAX);
    }

    #[test]
    fn others_can_have_a_request_looked_at_anew() {
        let wake = Arc::new(Wake::new().unwrap());
        let slow = Slow::new(wake.clone());
        let request = For { queue: 3, slot: 4 };
        let waker = slow.waker(request);
        thread::spawn(waker);
        let done = wait(&slow, &wake, 1);
        assert!(matches!(done[..], [(r, Outcome::Again)] if r == request));
        assert!(slow.collect().is_empty());
    }
}
