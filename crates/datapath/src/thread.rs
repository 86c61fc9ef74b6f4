//! I/O threads, as the rest of the program sees them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use block::Engine;
use guest::{NewQueue, StoppedRing};

use crate::command::{Command, QueueId, QueueStart, answer, gone};
use crate::disk::Disk;
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
