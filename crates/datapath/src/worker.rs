//! One I/O thread: its engine, the queues that it serves, and the path of their requests.

use std::io;
use std::mem;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use block::{Completion, Engine, Segment};
use guest::{NewQueue, Notifier, StoppedRing, Virtqueue};
use rustix::io::Errno;
use tracing::{error, info, warn};

use crate::activity::Activity;
use crate::admit::RELEASE;
use crate::blocking_pool::BlockingPool;
use crate::bounce::Pool;
use crate::clock::now_ns;
use crate::cow::CowBuffers;
use crate::disk::Disk;
use crate::fetch::CHUNK_MAX;
use crate::notify::Interrupt;
use crate::polling::{Poller, Polling};
use crate::queue::{Queue, QueueState, TIMER, WAKE, kick_token, requests_max};
use crate::replace::Pause;
use crate::thread::{Command, QueueId, Wake};
use crate::thread_disk::ThreadDisk;
use crate::timer::Timer;

/// Completions handled before the guest is told of them. Small, so that the guest works on the first
/// while we are at the last; large enough to share the cost of telling.
const COMPLETIONS: usize = 32;

/// Commands obeyed before requests are looked at again. Sessions wait for the answers to theirs, so that there are seldom
/// more than one from each; but many front-ends can send many messages.
const COMMANDS: usize = 16;

pub(crate) struct Worker<E> {
    pub engine: E,
    /// By number; a number is used again once its queue has stopped.
    pub queues: Vec<Option<Queue>>,
    /// Queues that are looked at every turn.
    pub active: Vec<usize>,
    pub completions: Vec<Completion>,
    /// Fetched requests to an image that goes by tables, which start together.
    pub starting: Vec<u16>,
    /// Where the chain being fetched is written to.
    pub scratch: Box<[Segment]>,
    pub bounce: Pool,
    /// Queues with requests that a limit holds back.
    pub throttled_queues: Vec<usize>,
    /// Where those are put that it lets go.
    pub released: Vec<u16>,
    /// Goes off when it lets the next ones go.
    pub timer: Timer,
    /// What is kept for each disk; a place is used again once its last queue has stopped.
    pub disks: Vec<Option<ThreadDisk>>,
    /// Does what blocks.
    pub blocking_pool: BlockingPool,
    /// For copy-on-write.
    pub cow_buffers: CowBuffers,
    /// Which of the places that threads have for pins is this one's.
    pub lane: usize,
    /// Disks whose files are being replaced.
    pub pauses: Vec<Pause>,
    /// Requests of all disks that wait for a bounce buffer, and the disk whose turn it is.
    pub waiting_for_buffer: usize,
    pub buffer_turn: usize,
    /// Requests of all disks that go on with zeroes, the disk whose turn it is, and bytes that may be
    /// zeroed or looked at before others have theirs.
    pub zeroing: usize,
    pub zero_turn: usize,
    pub zeroes_left: u64,
    /// Some fdatasync could not begin for want of room.
    pub syncs_postponed: bool,
    pub poller: Poller,
    /// The last operations were done by the time that they were handed over.
    pub instant: bool,
    /// When the completions at hand were reaped, once somebody asked; else 0.
    pub reaped_ns: u64,
    /// What the thread does with its time.
    pub activity: Arc<Activity>,
    pub notifier: Notifier,
    commands: Receiver<Command>,
    /// Stops of queues that have not done yet what a predecessor left them.
    postponed: Vec<StopRequest>,
    pub wake: Arc<Wake>,
    quit: bool,
}

/// A queue is to stop.
struct StopRequest {
    queue: QueueId,
    /// In nanoseconds of the monotonic clock.
    since: u64,
    reply: Sender<StoppedRing>,
}

impl<E: Engine> Worker<E> {
    pub fn new(
        engine: E,
        polling: Polling,
        commands: Receiver<Command>,
        wake: Arc<Wake>,
        activity: Arc<Activity>,
    ) -> io::Result<Self> {
        activity.begin();
        let mut worker = Self {
            engine,
            queues: Vec::new(),
            active: Vec::new(),
            completions: Vec::with_capacity(COMPLETIONS),
            starting: Vec::with_capacity(CHUNK_MAX),
            scratch: vec![Segment { addr: 0, len: 0 }; Virtqueue::MAX_SEGMENTS].into(),
            bounce: Pool::default(),
            throttled_queues: Vec::new(),
            released: Vec::with_capacity(RELEASE),
            timer: Timer::new()?,
            disks: Vec::new(),
            blocking_pool: BlockingPool::new(wake.clone()),
            cow_buffers: CowBuffers::default(),
            lane: rustix::thread::gettid().as_raw_nonzero().get() as usize,
            pauses: Vec::new(),
            waiting_for_buffer: 0,
            buffer_turn: 0,
            zeroing: 0,
            zero_turn: 0,
            zeroes_left: 0,
            syncs_postponed: false,
            poller: Poller::new(polling),
            instant: false,
            reaped_ns: 0,
            activity,
            notifier: Notifier::new()?,
            commands,
            postponed: Vec::new(),
            wake,
            quit: false,
        };
        worker.engine.watch(worker.wake.event(), WAKE)?;
        worker.engine.watch(worker.timer.event(), TIMER)?;
        Ok(worker)
    }

    pub fn run(mut self) {
        loop {
            if self.wake.take() {
                self.handle_commands();
                self.check_syncs();
                self.take_job_results();
                // What has ended there may have left a buffer.
                if self.waiting_for_buffer > 0 {
                    self.retry_bounced();
                }
            }
            if self.quit {
                if self.queues.iter().any(Option::is_some) {
                    // The engine waits for what is under way when it is dropped.
                    self.abandon();
                }
                return;
            }
            if let Err(e) = self.turn() {
                // The ring itself fails, not an operation on it: nothing in this thread can go on.
                error!(
                    "I/O thread: the kernel refuses to work on the ring: {e}; front-ends that it serves are \
                     disconnected, and can be served again once ringdisk is restarted"
                );
                return self.abandon();
            }
        }
    }

    /// Ends with operations in flight: the memory that the kernel works on is never freed. Whoever
    /// waits for a queue to stop learns that the thread is gone.
    fn abandon(self) {
        // Engine and memory.
        let worker = &mut *mem::ManuallyDrop::new(self);
        for queue in worker.queues.iter_mut().flatten() {
            queue.state = QueueState::Retired;
            queue.abort.trigger();
        }
        for thread_disk in worker.disks.iter().flatten().filter(|l| l.syncing) {
            thread_disk.coalescer().end(Errno::IO.raw_os_error());
        }
        // Whoever has asked for something learns that there is nobody any more.
        drop(mem::replace(&mut worker.commands, mpsc::channel().1));
        drop(mem::take(&mut worker.postponed));
        drop(mem::take(&mut worker.pauses));
    }

    /// The path of one I/O, for as many as are there at each stage.
    fn turn(&mut self) -> io::Result<()> {
        let fetched = self.fetch().max(self.admit()).max(self.continue_zeroing());
        self.notify();
        self.wait(fetched)?;
        self.complete();
        Ok(())
    }

    /// Whether there are commands to look at.
    #[inline]
    pub fn has_commands(&self) -> bool {
        self.wake.pending()
    }

    fn handle_commands(&mut self) {
        for stop in mem::take(&mut self.postponed) {
            self.stop(stop);
        }
        for _ in 0..COMMANDS {
            let Ok(command) = self.commands.try_recv() else {
                return;
            };
            match command {
                Command::Start { disk, queue, reply } => {
                    let mut pauses = self.pauses.iter_mut();
                    match pauses.find(|h| Arc::ptr_eq(&h.disk, &disk)) {
                        Some(pause) => pause.waiting.push((disk, queue, reply)),
                        None => drop(reply.send(self.start(disk, queue))),
                    }
                }
                Command::Pause { disk, reply } => self.pause(disk, reply),
                Command::AttachNext {
                    disk,
                    content,
                    source,
                    reply,
                } => drop(reply.send(self.attach_next(&disk, &content, source))),
                Command::Unpause {
                    disk,
                    replaced,
                    reply,
                } => {
                    for (disk, queue, reply) in self.unpause(&disk, replaced) {
                        let _ = reply.send(self.start(disk, queue));
                    }
                    let _ = reply.send(Ok(()));
                }
                Command::Stop { queue, reply } => self.stop(StopRequest {
                    queue,
                    since: now_ns(),
                    reply,
                }),
                Command::Resume { disk, report } => self.resume(&disk, report),
                Command::SetEventFds {
                    queue: QueueId(number),
                    call,
                    error,
                    reply,
                } => {
                    if let Some(queue) = &mut self.queues[number] {
                        queue.call = Interrupt::new(call, &queue.disk);
                        queue.error = error;
                    }
                    self.interrupt(number);
                    let _ = reply.send(());
                }
                Command::Quit => self.quit = true,
            }
        }
        // There may be more, and others wait as well.
        self.wake.up();
    }

    fn start(&mut self, disk: Arc<Disk>, new: NewQueue) -> io::Result<QueueId> {
        if disk.is_abandoned() {
            return Err(io::Error::other(
                "its storage has not answered requests of an earlier connection; it can be served \
                 again when these have ended",
            ));
        }
        let thread_disk = self.join_disk(&disk, requests_max(&new.virtqueue).into())?;
        let free = self.queues.iter().position(Option::is_none);
        let number = free.unwrap_or(self.queues.len());
        let kick = new.kick.clone();
        let queue = Some(Queue::new(
            disk,
            new,
            thread_disk,
            self.disks[thread_disk].as_ref(),
        ));
        match free {
            Some(free) => self.queues[free] = queue,
            None => self.queues.push(queue),
        }
        if let Err(e) = self.engine.watch(kick.as_fd(), kick_token(number)) {
            self.forget(number);
            return Err(e);
        }
        self.register_memory(number);
        // What a server that is gone has signalled may never have been seen. One too many does no harm.
        self.interrupt(number);
        if let Some(queue) = &self.queues[number]
            && queue.ring.resubmits() > 0
        {
            info!(
                "disk {}: queue {}: {} requests in flight had no answer when it was last served; they are done again",
                queue.disk.name,
                queue.ring.number(),
                queue.ring.resubmits(),
            );
        }
        // Requests may have been made available before anybody watched.
        self.activate(number);
        Ok(QueueId(number))
    }

    fn stop(&mut self, stop: StopRequest) {
        let number = stop.queue.0;
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let stop_timeout = match queue.disk.is_abandoned() {
            // It has been waited for once.
            true => Duration::ZERO,
            false => queue.disk.options.stop_timeout,
        };
        let (now, until) = (
            now_ns(),
            stop.since.saturating_add(stop_timeout.as_nanos() as u64),
        );
        if !queue.is_retired() && queue.ring.resubmits() > 0 {
            let fetches = matches!(queue.state, QueueState::Running | QueueState::HeldRequests);
            if fetches && now < until {
                // Whoever goes on where the ring stops would never do it.
                self.postponed.push(stop);
                self.wake.up();
                return;
            }
            queue.unfinished = true;
        }
        let reply = stop.reply;
        let is_retired = queue.is_retired();
        queue.state = QueueState::Stopping {
            reply,
            is_retired,
            until,
        };
        self.deactivate(number);
        self.leave_stalled(number);
        self.finish_stop(number);
        if self.queues[number].is_some() {
            self.timer.set(now, until.max(now));
        }
    }

    /// Lets a queue go that was asked to stop and has nothing under way.
    pub fn finish_stop(&mut self, number: usize) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        if queue.slots.taken() > 0 {
            return;
        }
        if !self.pauses.is_empty() {
            self.report_paused();
        }
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        match &queue.state {
            QueueState::Stopping { reply, .. } => {
                let reply = reply.clone();
                let stopped = StoppedRing {
                    base: queue.ring.base(),
                    unfinished: queue.unfinished,
                };
                self.notify_queue(number);
                let _ = self.engine.unwatch(kick_token(number));
                self.forget(number);
                let _ = reply.send(stopped);
            }
            QueueState::Abandoned => {
                let disk = queue.disk.clone();
                let _ = self.engine.unwatch(kick_token(number));
                self.forget(number);
                disk.answered();
            }
            QueueState::Running
            | QueueState::HeldRequests
            | QueueState::Unmapped
            | QueueState::Retired => {}
        }
    }

    fn forget(&mut self, number: usize) {
        if let Some(queue) = self.queues[number].take() {
            self.engine.unregister(&queue.registered);
            self.leave_disk(queue.thread_disk, queue.slots.len());
        }
    }

    /// Makes the guest's memory known to the engine, if that is wanted and has not been done.
    pub fn register_memory(&mut self, number: usize) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let wanted = queue.file.is_some() && queue.disk.options.fixed_buffers;
        if !wanted || !queue.registered.is_empty() {
            return;
        }
        let memory: Vec<Segment> = queue.ring.memory().mappings().collect();
        // SAFETY: the queue's ring keeps the memory mapped, and it is unregistered before the queue
        // is dropped. That no page is replaced is what the operator said with `fixed_buffers`.
        #[expect(unsafe_code, reason = "the kernel pins the guest's memory")]
        match unsafe { self.engine.register(&memory) } {
            Ok(()) => queue.registered = memory,
            Err(e) => warn!(
                "disk {}: guest memory cannot be pinned ({e}), which fixed-buffers=on asks for; \
                 going on without (is the limit of locked memory too low?)",
                queue.disk.name
            ),
        }
    }

    /// From now on, the queue is looked at every turn.
    #[inline]
    pub fn activate(&mut self, number: usize) {
        if let Some(queue) = &mut self.queues[number]
            && !queue.active
            && queue.is_running()
        {
            queue.active = true;
            queue.ring.disable_kicks();
            self.active.push(number);
        }
    }

    /// From now on, the queue is left alone until it is activated again.
    pub fn deactivate(&mut self, number: usize) {
        self.active.retain(|&n| n != number);
        if let Some(queue) = &mut self.queues[number] {
            queue.active = false;
        }
    }
}
