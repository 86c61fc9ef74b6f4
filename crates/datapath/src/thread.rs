//! I/O threads, as the rest of the program sees them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use block::Engine;
use guest::{NewQueue, StoppedRing};

use crate::clock::now_ns;
use crate::command::{Command, QueueId, QueueStart, answer, gone};
use crate::disk::{Disk, HANG};
use crate::polling::Polling;
use crate::stats::activity::{Activity, ThreadStats};
use crate::throttle::admission::Admission;
use crate::wake::Wake;
use crate::worker::Worker;

/// A thread that serves queues of any number of disks with one engine. Dropping it ends the thread,
/// which must not be serving any queue by then.
pub struct IoThread {
    commands: Sender<Command>,
    wake: Arc<Wake>,
    activity: Arc<Activity>,
    thread: Option<JoinHandle<()>>,
    thread_id: u32,
    /// It had nothing in flight when its requests were to be checked last.
    was_idle: AtomicBool,
}

impl IoThread {
    /// Starts a thread whose engine `make` builds, in the thread itself.
    ///
    /// # Errors
    /// The thread or its engine could not be made.
    pub fn spawn<E: Engine, X: From<io::Error> + Send + 'static>(
        name: String,
        polling: Polling,
        make: impl FnOnce() -> Result<E, X> + Send + 'static,
    ) -> Result<Self, X> {
        let (commands, queue) = mpsc::channel();
        let wake = Arc::new(Wake::new()?);
        let (made, result) = mpsc::channel();
        let activity = Arc::new(Activity::default());
        let (its_wake, its_activity) = (wake.clone(), activity.clone());
        let thread = thread::Builder::new().name(name).spawn(move || {
            let worker = make().and_then(|engine| {
                Worker::new(engine, polling, queue, its_wake, its_activity).map_err(X::from)
            });
            match worker {
                Ok(worker) => {
                    let _ = made.send(Ok(rustix::thread::gettid()));
                    worker.run();
                }
                Err(e) => {
                    let _ = made.send(Err(e));
                }
            }
        })?;
        let thread_id = result.recv().map_err(|_| gone())??;
        Ok(Self {
            commands,
            wake,
            activity,
            thread: Some(thread),
            thread_id: thread_id.as_raw_nonzero().get() as u32,
            was_idle: AtomicBool::new(true),
        })
    }

    /// The kernel's number of the thread (gettid(2)).
    pub fn thread_id(&self) -> u32 {
        self.thread_id
    }

    /// Starts to serve a queue of a disk.
    ///
    /// # Errors
    /// The engine has no room for it, or the thread has ended.
    pub fn start(&self, disk: Arc<Disk>, queue: NewQueue) -> io::Result<QueueId> {
        let (reply, result) = mpsc::channel();
        self.send(Command::Start(QueueStart {
            disk,
            queue,
            client: None,
            reply,
        }));
        answer(&result)?
    }

    /// Starts to serve a queue of a client of the disk, which is not its guest: it has limits of its own, and errors of
    /// storage are reported to it, whatever is done for the guest.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_client(
        &self,
        disk: Arc<Disk>,
        queue: NewQueue,
        limits: Arc<Admission>,
    ) -> io::Result<QueueId> {
        let (reply, result) = mpsc::channel();
        self.send(Command::Start(QueueStart {
            disk,
            queue,
            client: Some(limits),
            reply,
        }));
        answer(&result)?
    }

    /// Asks for a queue to be stopped, and does not wait. The queue fetches no more requests, and stops when none is in
    /// flight, or when the disk's stop timeout is over.
    pub fn begin_stop(&self, queue: QueueId) -> StoppingQueue {
        let (reply, result) = mpsc::channel();
        self.send(Command::Stop { queue, reply });
        StoppingQueue(result)
    }

    /// Changes the eventfds that a queue signals, and returns when that is done: a front-end that sends one descriptor
    /// after another is slowed down to the thread's pace.
    pub fn set_event_fds(
        &self,
        queue: QueueId,
        call: Option<Arc<OwnedFd>>,
        error: Option<Arc<OwnedFd>>,
    ) {
        let (reply, result) = mpsc::channel();
        self.send(Command::SetEventFds {
            queue,
            call,
            error,
            reply,
        });
        // Fails if the thread has ended, which the session learns otherwise.
        let _ = result.recv();
    }

    /// What the thread has done so far. It is not disturbed.
    pub fn stats(&self) -> ThreadStats {
        self.activity.stats()
    }

    /// Has the thread find out how long storage has not answered its operations, for [`Disk::hangs_for`]. Does not wait
    /// for it, and does not wake a thread that has nothing in flight. To be called about once a second.
    pub fn check_ages(&self) {
        // Once more after it has become idle: nothing waits any more.
        let (is_idle, activity) = (self.activity.is_idle(), &self.activity);
        let was_idle = self.was_idle.swap(is_idle, Ordering::Relaxed);
        if !(is_idle && was_idle) && activity.begin_check(now_ns()) {
            self.send(Command::CheckAges);
        }
    }

    /// How long the thread has not done what it was told, if that is longer than [`HANG`]: something blocks it.
    pub fn blocked_for(&self) -> Option<Duration> {
        match self.activity.checking_since() {
            0 => None,
            since => Some(Duration::from_nanos(now_ns().saturating_sub(since))),
        }
        .filter(|&time| time >= HANG)
    }

    pub(crate) fn send(&self, command: Command) {
        // Fails only if the thread has ended. Then the reply never comes, which tells the caller the same.
        let _ = self.commands.send(command);
        self.wake.wake();
    }
}

/// A queue that was asked to stop.
pub struct StoppingQueue(Receiver<StoppedRing>);

impl StoppingQueue {
    /// Waits until the queue has stopped. Returns where in the ring the next server continues.
    ///
    /// # Errors
    /// The thread has ended, with a line in the log that says why.
    pub fn wait(self) -> io::Result<StoppedRing> {
        answer(&self.0)
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.send(Command::Quit);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
