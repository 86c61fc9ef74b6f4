//! The state of one I/O thread: its engine, the queues that it serves, and what their requests share.
//!
//! [The path of a request](crate::path) and [control operations](crate::control) work on it.

use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use block::{Completion, Engine, Segment};
use guest::{Notifier, StoppedRing, Virtqueue};
use rustix::io::Errno;

use crate::command::{Command, QueueId, QueueStart};
use crate::disk::Disk;
use crate::disk::fleece::Fleece;
use crate::disk::source::Source;
use crate::polling::{Poller, Polling};
use crate::queue::token::{TIMER, WAKE};
use crate::queue::{QueueState, Queues};
use crate::request::RequestId;
use crate::resources::Buffers;
use crate::resources::blocking_pool::BlockingPool;
use crate::resources::timer::Timer;
use crate::stats::activity::Activity;
use crate::thread_disk::{Attached, Rotation, ThreadDisks};
use crate::wake::Wake;

/// Most completions that are handled before the guest is told of them. Few, so that the guest works on the first while
/// the thread is at the last; enough to share the cost of telling it.
const COMPLETIONS: usize = 32;

/// Most operations submitted in one turn for one queue, so that completions are looked at meanwhile.
pub(crate) const CHUNK_MAX: usize = 32;

/// Most held requests that are let go in one turn for one queue: the other queues wait meanwhile.
pub(crate) const RELEASE_MAX: usize = 64;

pub(crate) struct Worker<E> {
    pub engine: E,
    pub queues: Queues,
    pub disks: ThreadDisks,
    pub fetching: Fetching,
    pub throttling: Throttling,
    pub zeroing: Zeroing,
    pub buffers: Buffers,
    /// Requests that wait for a bounce buffer, or for room in the engine.
    pub waiting_for_buffer: Rotation,
    /// Requests that wait until others have copied old data, or for space.
    pub waiting_for_copy: Vec<RequestId>,
    pub blocking_pool: BlockingPool,
    /// Some fdatasync could not begin because the engine had no room.
    pub is_sync_postponed: bool,
    pub waiting: Waiting,
    pub timer: Timer,
    pub notifier: Notifier,
    pub wake: Arc<Wake>,
    pub control: Control,
}

/// What the fetch stage works with.
pub(crate) struct Fetching {
    /// The segments of the chain that is fetched.
    pub scratch: Box<[Segment]>,
    /// Fetched requests to a mapped image, which start together.
    pub starting: Vec<u16>,
}

/// What the admit stage works with.
pub(crate) struct Throttling {
    /// Queues with requests that a limit holds back.
    pub queues: Vec<usize>,
    /// The slots of requests that are let go.
    pub released: Vec<u16>,
}

/// Requests that wait for their turn to read zeroes, or to look for them.
#[derive(Default)]
pub(crate) struct Zeroing {
    pub rotation: Rotation,
    /// Bytes that may be zeroed or looked at before others have their turn.
    pub budget: u64,
}

/// What the wait and complete stages work with.
pub(crate) struct Waiting {
    pub completions: Vec<Completion>,
    pub poller: Poller,
    /// What the thread does with its time.
    pub activity: Arc<Activity>,
    /// The last operations were done when `submit` returned.
    pub is_instant: bool,
    /// When the completions at hand were reaped; 0 until it is asked for.
    pub reaped_ns: u64,
}

/// What control operations work with.
pub(crate) struct Control {
    pub commands: Receiver<Command>,
    /// Stops of queues that have not fetched yet what a predecessor left them.
    pub postponed: Vec<StopRequest>,
    /// Disks whose files are being replaced.
    pub pauses: Vec<Pause>,
    /// Writes that were in flight at the moment of a backup.
    pub preceding: Vec<Preceding>,
    pub has_quit: bool,
}

/// A queue is to stop.
pub(crate) struct StopRequest {
    pub queue: QueueId,
    /// In nanoseconds of the monotonic clock.
    pub since: u64,
    pub reply: Sender<StoppedRing>,
}

/// A disk of which this thread serves nothing while its file is replaced.
pub(crate) struct Pause {
    pub disk: Arc<Disk>,
    /// Answered when no request of the disk is in flight.
    pub drained: Option<Sender<io::Result<()>>>,
    /// The new file, as this thread's engine knows it.
    pub next: Option<(Arc<Source>, Attached)>,
    /// Starts of queues, which wait.
    pub waiting: Vec<QueueStart>,
}

/// Writes that were in flight at the moment of a cut, and have not ended.
pub(crate) struct Preceding {
    pub fleece: Arc<Fleece>,
    /// Each with its range.
    pub writes: Vec<(RequestId, (u64, u64))>,
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
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let mut worker = Self {
            engine,
            queues: Queues::default(),
            disks: ThreadDisks::new(thread as usize),
            fetching: Fetching {
                scratch: vec![Segment { addr: 0, len: 0 }; Virtqueue::MAX_SEGMENTS].into(),
                starting: Vec::with_capacity(CHUNK_MAX),
            },
            throttling: Throttling {
                queues: Vec::new(),
                released: Vec::with_capacity(RELEASE_MAX),
            },
            zeroing: Zeroing::default(),
            buffers: Buffers::default(),
            waiting_for_buffer: Rotation::default(),
            waiting_for_copy: Vec::new(),
            blocking_pool: BlockingPool::new(wake.clone()),
            is_sync_postponed: false,
            waiting: Waiting {
                completions: Vec::with_capacity(COMPLETIONS),
                poller: Poller::new(polling),
                activity,
                is_instant: false,
                reaped_ns: 0,
            },
            timer: Timer::new()?,
            notifier: Notifier::new()?,
            wake,
            control: Control {
                commands,
                postponed: Vec::new(),
                pauses: Vec::new(),
                preceding: Vec::new(),
                has_quit: false,
            },
        };
        worker.engine.watch(worker.wake.event(), WAKE)?;
        worker.engine.watch(worker.timer.event(), TIMER)?;
        Ok(worker)
    }

    /// Ends with operations in flight: the memory that the kernel works on is never freed. Sessions that wait for a queue
    /// to stop learn that the thread has ended.
    pub fn abandon(self) {
        // Engine and memory stay.
        let worker = &mut *mem::ManuallyDrop::new(self);
        for queue in worker.queues.iter_mut() {
            queue.state = QueueState::Retired;
            queue.abort.trigger();
            // Requests of other threads may wait for copies of this one.
            if let Some(fleece) = &queue.fleece {
                fleece.fail("an I/O thread has ended");
            }
        }
        for disk in worker.disks.iter_mut().filter(|disk| disk.is_syncing) {
            disk.coalescer().end(Errno::IO.raw_os_error());
        }
        // The replies that others wait for never come, which tells them that the thread has ended.
        drop(mem::replace(
            &mut worker.control.commands,
            mpsc::channel().1,
        ));
        drop(mem::take(&mut worker.control.postponed));
        drop(mem::take(&mut worker.control.pauses));
    }
}
