//! A virtqueue in service: the ring, its disk, and the requests in flight.

pub(crate) mod held;
pub(crate) mod mapped_request;
pub(crate) mod preserving;
pub(crate) mod slot;
pub(crate) mod token;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use block::{FileId, RecordingBitmaps, Segment};
use guest::{NewQueue, SessionAbort, StoppedRing, Virtqueue};
use image::Image;

use crate::disk::Disk;
use crate::disk::fleece::Fleece;
use crate::disk::source::Alignment;
use crate::stats::Tally;
use crate::thread_disk::ThreadDisk;
use crate::throttle::admission::Admission;
use held::HeldRequests;
use mapped_request::MappedRequests;
use preserving::Preserving;
use slot::Slots;

pub(crate) struct Queue {
    pub disk: Arc<Disk>,
    /// Where ranges of the disk are. It does not change while requests are in flight.
    pub image: Image,
    /// The bitmaps that record changes. They do not change while requests are in flight.
    pub bitmaps: RecordingBitmaps,
    /// Where the old data goes that its requests change, while a backup of the disk is open.
    pub fleece: Option<Arc<Fleece>>,
    /// What its requests are copying, by slot.
    pub preserving: Vec<Preserving>,
    pub ring: Virtqueue,
    pub slots: Slots,
    /// What is counted of its requests.
    pub tally: Tally,
    /// The limits of its requests.
    pub admission: Arc<Admission>,
    /// Its requests come from a client of the disk, not from its guest: an error is always reported, whatever is done for
    /// the guest.
    pub is_client: bool,
    /// Requests that a limit holds back.
    pub held: HeldRequests,
    /// The disk's file, as this thread's engine knows it; `None` if each piece of a request names its file.
    pub file: Option<FileId>,
    /// How far the requests to a mapped image are.
    pub mapped: MappedRequests,
    pub alignment: Alignment,
    /// Index of the thread's record of the disk.
    pub thread_disk: usize,
    /// Guest memory that is registered with this thread's engine for this queue.
    pub registered: Vec<Segment>,
    pub state: QueueState,
    /// Some of its requests were left for the next server of the ring.
    pub has_unfinished: bool,
    /// The thread looks at the ring every turn, and the guest need not kick.
    pub is_active: bool,
    /// Open while the engine watches it.
    _kick: Arc<OwnedFd>,
    pub interrupt: Interrupt,
    pub error: Option<Arc<OwnedFd>>,
    /// Signalled when something may have been marked in the dirty log.
    pub marked: Option<Arc<OwnedFd>>,
    /// Signalled when this thread cannot continue.
    pub abort: SessionAbort,
}

pub(crate) enum QueueState {
    Running,
    /// Nothing is fetched for now: the disk's file is being replaced.
    Paused,
    /// A buffer is not in guest memory. Nothing is fetched until the front-end changes its memory, for which it stops
    /// and starts the queue. Requests that were fetched before continue.
    Unmapped,
    /// The guest broke the protocol: nothing is fetched or completed any more.
    Retired,
    /// Nothing is fetched any more. `reply` is answered when no request is in flight, or at `until`, in nanoseconds of
    /// the monotonic clock.
    Stopping {
        reply: Sender<StoppedRing>,
        is_retired: bool,
        until: u64,
    },
    /// The queue has stopped, with operations that storage has not answered. Nothing is completed any more.
    Abandoned,
}

impl Queue {
    /// `thread_disk` is the thread's record of the disk, at this index. `client` are the limits of a client's queue.
    pub fn new(
        disk: Arc<Disk>,
        new: NewQueue,
        client: Option<Arc<Admission>>,
        index: usize,
        thread_disk: &ThreadDisk,
    ) -> Self {
        let is_client = client.is_some();
        let admission = client.unwrap_or_else(|| disk.admission.clone());
        let requests = requests_max(&new.virtqueue);
        let mut queue = Self {
            image: Image::Null,
            bitmaps: RecordingBitmaps::default(),
            fleece: None,
            preserving: Vec::new(),
            ring: new.virtqueue,
            slots: Slots::new(requests),
            tally: Tally::new(&disk.statistics, requests.into(), is_client),
            held: HeldRequests::new(admission.clone()),
            admission,
            is_client,
            file: None,
            mapped: MappedRequests::default(),
            alignment: Alignment { address: 1, len: 1 },
            thread_disk: index,
            registered: Vec::new(),
            state: QueueState::Running,
            has_unfinished: false,
            is_active: false,
            _kick: new.kick,
            interrupt: Interrupt::new(new.call, disk.blocks_threads()),
            error: new.error,
            marked: new.marked,
            abort: new.abort,
            disk,
        };
        queue.update_content(thread_disk);
        queue
    }

    /// Takes over where the disk is now. No request of the queue is in flight.
    pub fn update_content(&mut self, thread_disk: &ThreadDisk) {
        self.image = self.disk.content().image;
        self.update_bitmaps();
        self.set_fleece(self.disk.fleece());
        if self.image.chain().is_some() {
            self.file = None;
            self.mapped.reserve(self.slots.len());
        } else {
            self.file = thread_disk.file;
            self.mapped.clear();
        }
        if let Some(source) = &thread_disk.source {
            self.alignment = source.alignment;
        }
    }

    /// Has old data preserved from now on, or no more.
    pub fn set_fleece(&mut self, fleece: Option<Arc<Fleece>>) {
        if fleece.is_some() {
            (self.preserving).resize_with(self.slots.len(), Preserving::default);
        }
        self.fleece = fleece;
    }

    /// Takes over which bitmaps record changes, for requests that are planned from now on.
    pub fn update_bitmaps(&mut self) {
        let all = self.image.bitmaps();
        self.bitmaps = all.map_or_else(Default::default, |all| all.recording());
    }

    /// Whether nothing is completed any more.
    pub fn is_retired(&self) -> bool {
        matches!(
            self.state,
            QueueState::Retired
                | QueueState::Abandoned
                | QueueState::Stopping {
                    is_retired: true,
                    ..
                }
        )
    }

    pub fn is_stopping(&self) -> bool {
        matches!(self.state, QueueState::Stopping { .. })
    }

    pub fn is_running(&self) -> bool {
        matches!(self.state, QueueState::Running)
    }

    /// Whether requests that were fetched continue as usual: nobody waits for them to end.
    pub fn is_in_service(&self) -> bool {
        matches!(self.state, QueueState::Running | QueueState::Unmapped)
    }
}

/// How a guest is interrupted.
pub(crate) enum Interrupt {
    /// The guest polls.
    None,
    /// By a plain write: as an operation on the ring it costs twice as much.
    ByWrite(Arc<OwnedFd>),
    /// By a write that cannot block the thread, since the front-end has blocked one.
    ByAio(Arc<OwnedFd>),
}

impl Interrupt {
    /// `blocks_threads` if a front-end of the disk has blocked a thread with its descriptor.
    pub fn new(event: Option<Arc<OwnedFd>>, blocks_threads: bool) -> Self {
        match event {
            None => Self::None,
            Some(event) if blocks_threads => Self::ByAio(event),
            Some(event) => Self::ByWrite(event),
        }
    }
}

/// Requests of a queue that can be in flight. In a ring that is larger than any of QEMU's, the rest waits: its size is the
/// guest's choice, and 32768 slots would take 8 MiB.
pub(crate) fn requests_max(ring: &Virtqueue) -> u16 {
    ring.size().min(Virtqueue::MAX_SIZE)
}

/// The queues that a thread serves.
#[derive(Default)]
pub(crate) struct Queues {
    /// By number; a number is used again once its queue has stopped.
    queues: Vec<Option<Queue>>,
    /// The queues whose rings the thread looks at every turn.
    pub active: Vec<usize>,
}

impl Queues {
    /// The queue of a request in flight, or of an operation of the driver on a queue that it has just seen. A queue is
    /// removed only when none of its slots is taken, so the absence of one is an error in ringdisk.
    #[inline]
    pub fn get(&mut self, number: usize) -> &mut Queue {
        self.queues[number]
            .as_mut()
            .expect("a queue stays as long as one of its slots is taken")
    }

    /// The queue with this number, if it has not stopped.
    #[inline]
    pub fn find(&mut self, number: usize) -> Option<&mut Queue> {
        self.queues.get_mut(number)?.as_mut()
    }

    pub fn add(&mut self, queue: Queue) -> usize {
        let queue = Some(queue);
        match self.queues.iter().position(Option::is_none) {
            Some(free) => {
                self.queues[free] = queue;
                free
            }
            None => {
                self.queues.push(queue);
                self.queues.len() - 1
            }
        }
    }

    /// No request of it is in flight.
    pub fn remove(&mut self, number: usize) -> Queue {
        self.deactivate(number);
        self.queues[number].take().expect("it is removed once")
    }

    /// From now on, the thread looks at the queue's ring every turn, if it is served at all.
    #[inline]
    pub fn activate(&mut self, number: usize) {
        let queue = self.get(number);
        if !queue.is_active && queue.is_running() {
            queue.is_active = true;
            queue.ring.disable_kicks();
            self.active.push(number);
        }
    }

    /// The thread leaves the queue alone until it is activated again.
    pub fn deactivate(&mut self, number: usize) {
        self.active.retain(|&n| n != number);
        self.get(number).is_active = false;
    }

    /// One more than the highest number.
    pub fn len(&self) -> usize {
        self.queues.len()
    }

    pub fn is_empty(&self) -> bool {
        self.queues.iter().all(Option::is_none)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Queue> {
        self.queues.iter_mut().flatten()
    }

    /// The numbers of a disk's queues.
    pub fn of_disk(&self, disk: &Arc<Disk>) -> Vec<usize> {
        let is_of_disk = |queue: &&Queue| Arc::ptr_eq(&queue.disk, disk);
        (0..self.queues.len())
            .filter(|&n| self.queues[n].as_ref().is_some_and(|q| is_of_disk(&q)))
            .collect()
    }
}
