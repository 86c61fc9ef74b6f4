//! One I/O thread: its engine, the queues that it serves, and the path of their requests.

use std::io;
use std::mem;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use block::{Completion, Engine, Segment};
use guest::{NewQueue, Signals, Stopped, Virtqueue};
use rustix::io::Errno;
use tracing::{error, info, warn};

use crate::activity::Activity;
use crate::admit::RELEASE;
use crate::bounce::Pool;
use crate::clock::now_ns;
use crate::disk::Disk;
use crate::fetch::CHUNK_MAX;
use crate::local::Local;
use crate::merge::Buffers;
use crate::notify::Call;
use crate::polling::{Poller, Polling};
use crate::queue::{Queue, State, TIMER, WAKE, kick_token, requests_max};
use crate::replace::Hold;
use crate::slow::Slow;
use crate::thread::{Command, QueueId, Wake};
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
    pub hot: Vec<usize>,
    pub completions: Vec<Completion>,
    /// Fetched requests to an image that goes by tables, which start together.
    pub starting: Vec<u16>,
    /// Where the chain being fetched is written to.
    pub scratch: Box<[Segment]>,
    pub bounce: Pool,
    /// Queues with requests that a limit holds back.
    pub holding: Vec<usize>,
    /// Where those are put that it lets go.
    pub released: Vec<u16>,
    /// Goes off when it lets the next ones go.
    pub timer: Timer,
    /// What is kept for each disk; a place is used again once its last queue has stopped.
    pub locals: Vec<Option<Local>>,
    /// Does what blocks.
    pub slow: Slow,
    /// For copy-on-write.
    pub merges: Buffers,
    /// Which of the places that threads have for pins is this one's.
    pub lane: usize,
    /// Disks whose files are being replaced.
    pub holds: Vec<Hold>,
    /// Requests of all disks that wait for a bounce buffer, and the disk whose turn it is.
    pub starved: usize,
    pub fed: usize,
    /// Requests of all disks that go on with zeroes, the disk whose turn it is, and bytes that may be
    /// zeroed or looked at before others have theirs.
    pub zeroing: usize,
    pub zeroed: usize,
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
    pub signals: Signals,
    commands: Receiver<Command>,
    /// Stops of queues that have not done yet what a predecessor left them.
    postponed: Vec<Stop>,
    pub wake: Arc<Wake>,
    quit: bool,
}

/// A queue is to stop.
struct Stop {
    queue: QueueId,
    /// In nanoseconds of the monotonic clock.
    since: u64,
    reply: Sender<Stopped>,
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
            hot: Vec::new(),
            completions: Vec::with_capacity(COMPLETIONS),
            starting: Vec::with_capacity(CHUNK_MAX),
            scratch: vec![Segment { addr: 0, len: 0 }; Virtqueue::MAX_SEGMENTS].into(),
            bounce: Pool::default(),
            holding: Vec::new(),
            released: Vec::with_capacity(RELEASE),
            timer: Timer::new()?,
            locals: Vec::new(),
            slow: Slow::new(wake.clone()),
            merges: Buffers::default(),
            lane: rustix::thread::gettid().as_raw_nonzero().get() as usize,
            holds: Vec::new(),
            starved: 0,
            fed: 0,
            zeroing: 0,
            zeroed: 0,
            zeroes_left: 0,
            syncs_postponed: false,
            poller: Poller::new(polling),
            instant: false,
            reaped_ns: 0,
            activity,
            signals: Signals::new()?,
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
                self.obey();
                self.look_at_syncs();
                self.look_at_slow();
                // What has ended there may have left a buffer.
                if self.starved > 0 {
                    self.feed_starved();
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
            queue.state = State::Retired;
            queue.lost.tell();
        }
        for local in worker.locals.iter().flatten().filter(|l| l.syncing) {
            local.syncs().end(Errno::IO.raw_os_error());
        }
        // Whoever has asked for something learns that there is nobody any more.
        drop(mem::replace(&mut worker.commands, mpsc::channel().1));
        drop(mem::take(&mut worker.postponed));
        drop(mem::take(&mut worker.holds));
    }

    /// The path of one I/O, for as many as are there at each stage.
    fn turn(&mut self) -> io::Result<()> {
        let fetched = self.fetch().max(self.admit()).max(self.zero_on());
        self.notify();
        self.wait(fetched)?;
        self.complete();
        Ok(())
    }

    /// Whether there are commands to look at.
    #[inline]
    pub fn commanded(&self) -> bool {
        self.wake.pending()
    }

    fn obey(&mut self) {
        for stop in mem::take(&mut self.postponed) {
            self.stop(stop);
        }
        for _ in 0..COMMANDS {
            let Ok(command) = self.commands.try_recv() else {
                return;
            };
            match command {
                Command::Start { disk, queue, reply } => {
                    let mut holds = self.holds.iter_mut();
                    match holds.find(|h| Arc::ptr_eq(&h.disk, &disk)) {
                        Some(hold) => hold.waiting.push((disk, queue, reply)),
                        None => drop(reply.send(self.start(disk, queue))),
                    }
                }
                Command::Hold { disk, reply } => self.hold(disk, reply),
                Command::Adopt {
                    disk,
                    content,
                    source,
                    reply,
                } => drop(reply.send(self.adopt(&disk, &content, source))),
                Command::GoOn {
                    disk,
                    replaced,
                    reply,
                } => {
                    for (disk, queue, reply) in self.go_on(&disk, replaced) {
                        let _ = reply.send(self.start(disk, queue));
                    }
                    let _ = reply.send(Ok(()));
                }
                Command::Stop { queue, reply } => self.stop(Stop {
                    queue,
                    since: now_ns(),
                    reply,
                }),
                Command::Resume { disk, report } => self.resume(&disk, report),
                Command::Signals {
                    queue: QueueId(number),
                    call,
                    error,
                    reply,
                } => {
                    if let Some(queue) = &mut self.queues[number] {
                        queue.call = Call::new(call, &queue.disk);
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
        let local = self.join_local(&disk, requests_max(&new.virtqueue).into())?;
        let free = self.queues.iter().position(Option::is_none);
        let number = free.unwrap_or(self.queues.len());
        let kick = new.kick.clone();
        let queue = Some(Queue::new(disk, new, local, self.locals[local].as_ref()));
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
        self.heat(number);
        Ok(QueueId(number))
    }

    fn stop(&mut self, stop: Stop) {
        let number = stop.queue.0;
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let patience = match queue.disk.is_abandoned() {
            // It has been waited for once.
            true => Duration::ZERO,
            false => queue.disk.options.patience,
        };
        let (now, until) = (
            now_ns(),
            stop.since.saturating_add(patience.as_nanos() as u64),
        );
        if !queue.retired() && queue.ring.resubmits() > 0 {
            let fetches = matches!(queue.state, State::Running | State::Held);
            if fetches && now < until {
                // Whoever goes on where the ring stops would never do it.
                self.postponed.push(stop);
                self.wake.up();
                return;
            }
            queue.unfinished = true;
        }
        let reply = stop.reply;
        let retired = queue.retired();
        queue.state = State::Stopping {
            reply,
            retired,
            until,
        };
        self.cool(number);
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
        if !self.holds.is_empty() {
            self.look_at_holds();
        }
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        match &queue.state {
            State::Stopping { reply, .. } => {
                let reply = reply.clone();
                let stopped = Stopped {
                    base: queue.ring.base(),
                    unfinished: queue.unfinished,
                };
                self.notify_queue(number);
                let _ = self.engine.unwatch(kick_token(number));
                self.forget(number);
                let _ = reply.send(stopped);
            }
            State::Abandoned => {
                let disk = queue.disk.clone();
                let _ = self.engine.unwatch(kick_token(number));
                self.forget(number);
                disk.answered();
            }
            State::Running | State::Held | State::Unmapped | State::Retired => {}
        }
    }

    fn forget(&mut self, number: usize) {
        if let Some(queue) = self.queues[number].take() {
            self.engine.unregister(&queue.registered);
            self.leave_local(queue.local, queue.slots.len());
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
    pub fn heat(&mut self, number: usize) {
        if let Some(queue) = &mut self.queues[number]
            && !queue.hot
            && queue.running()
        {
            queue.hot = true;
            queue.ring.disable_kicks();
            self.hot.push(number);
        }
    }

    /// From now on, the queue is left alone until it is heated again.
    pub fn cool(&mut self, number: usize) {
        self.hot.retain(|&n| n != number);
        if let Some(queue) = &mut self.queues[number] {
            queue.hot = false;
        }
    }
}
