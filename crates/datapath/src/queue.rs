//! A virtqueue in service: the ring, its disk, and the requests under way.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use block::{FileId, Segment, Token};
use guest::{NewQueue, SessionAbort, StoppedRing, Virtqueue};
use image::Image;

use crate::admit::HeldRequests;
use crate::disk::Disk;
use crate::mapped::MappedRequest;
use crate::notify::Interrupt;
use crate::slot::Slots;
use crate::source::Alignment;
use crate::stats::Tally;
use crate::thread_disk::ThreadDisk;

pub(crate) struct Queue {
    pub disk: Arc<Disk>,
    /// Where ranges of the disk are. It does not change while requests are under way.
    pub image: Image,
    pub ring: Virtqueue,
    pub slots: Slots,
    /// What is done and not published yet.
    pub tally: Tally,
    /// Requests that a limit holds back.
    pub held: HeldRequests,
    /// The disk's file, as this thread's engine knows it; none if each piece says where it is.
    pub file: Option<FileId>,
    /// By slot, for a disk whose image goes by tables; [made](crate::mapped::mapped_of) as slots are first taken, like these.
    pub pieces: Vec<MappedRequest>,
    pub alignment: Alignment,
    /// Place of what the thread keeps for the disk.
    pub thread_disk: usize,
    /// Guest memory that is registered with this thread's engine for this queue.
    pub registered: Vec<Segment>,
    pub state: QueueState,
    /// Some of its requests were left for whoever takes it up next.
    pub unfinished: bool,
    /// The queue is looked at every turn, and the guest need not kick.
    pub active: bool,
    /// Watched by the engine, and open as long as it is.
    _kick: Arc<OwnedFd>,
    pub call: Interrupt,
    pub error: Option<Arc<OwnedFd>>,
    /// Told that something may have been marked in the dirty log.
    pub marked: Option<Arc<OwnedFd>>,
    /// Told when this thread cannot go on.
    pub abort: SessionAbort,
}

pub(crate) enum QueueState {
    Running,
    /// Nothing is fetched for now: the disk's file is being replaced.
    HeldRequests,
    /// A buffer is not in guest memory. Nothing is fetched until the front-end changes its memory, and with that stops
    /// and starts the queue; what was fetched before goes on.
    Unmapped,
    /// The guest broke the protocol: nothing is fetched or given back any more.
    Retired,
    /// Nothing is fetched any more; whoever asked is told when nothing is under way, or at `until`, in
    /// nanoseconds of the monotonic clock.
    Stopping {
        reply: Sender<StoppedRing>,
        is_retired: bool,
        until: u64,
    },
    /// It has stopped, with operations that storage has not answered. Nothing is given back any more.
    Abandoned,
}

impl Queue {
    pub fn new(
        disk: Arc<Disk>,
        new: NewQueue,
        place: usize,
        thread_disk: Option<&ThreadDisk>,
    ) -> Self {
        let requests = requests_max(&new.virtqueue);
        let mut queue = Self {
            image: Image::Null,
            ring: new.virtqueue,
            slots: Slots::new(requests),
            tally: Tally::new(&disk, requests.into()),
            held: HeldRequests::new(disk.clone()),
            file: None,
            pieces: Vec::new(),
            alignment: Alignment { address: 1, len: 1 },
            thread_disk: place,
            registered: Vec::new(),
            state: QueueState::Running,
            unfinished: false,
            active: false,
            _kick: new.kick,
            call: Interrupt::new(new.call, &disk),
            error: new.error,
            marked: new.marked,
            abort: new.abort,
            disk,
        };
        queue.update_content(thread_disk);
        queue
    }

    /// Looks where the disk is now. Nothing of the queue is under way.
    pub fn update_content(&mut self, thread_disk: Option<&ThreadDisk>) {
        self.image = self.disk.content().image;
        let is_mapped = self.image.chain().is_some();
        self.file = thread_disk.and_then(|l| l.file).filter(|_| !is_mapped);
        match is_mapped {
            true => self
                .pieces
                .reserve_exact(self.slots.len() - self.pieces.len()),
            false => self.pieces = Vec::new(),
        }
        if let Some(source) = thread_disk.and_then(|l| l.source.as_ref()) {
            self.alignment = source.alignment;
        }
    }

    /// Whether nothing is given back any more.
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

    /// Whether what was fetched goes on as ever: nobody waits for it to end.
    pub fn is_in_service(&self) -> bool {
        matches!(self.state, QueueState::Running | QueueState::Unmapped)
    }
}

/// Requests of a queue that are under way at a time. In a ring that is larger than any of QEMU's, the rest waits:
/// its size is the guest's choice, and 32768 slots would take 8 MiB.
pub(crate) fn requests_max(ring: &Virtqueue) -> u16 {
    ring.size().min(Virtqueue::MAX_SIZE)
}

/// The token of an operation: which queue of the thread, which slot of the queue.
#[inline]
pub(crate) fn token(queue: usize, slot: u16) -> Token {
    Token((queue as u64) << 16 | u64::from(slot))
}

/// The token of a queue's kick.
pub(crate) fn kick_token(queue: usize) -> Token {
    Token(KICK | (queue as u64) << 16)
}

/// The token of the thread's own wake-up.
pub(crate) const WAKE: Token = Token(1 << 61);

/// The token of the thread's timer.
pub(crate) const TIMER: Token = Token(1 << 59);

const KICK: u64 = 1 << 60;

/// What a completion is about.
pub(crate) enum Event {
    Operation { queue: usize, slot: u16 },
    Kick { queue: usize },
    Wake,
    Timer,
}

impl From<Token> for Event {
    #[inline]
    fn from(token: Token) -> Self {
        let queue = (token.0 as u32 >> 16) as usize;
        match token {
            WAKE => Self::Wake,
            TIMER => Self::Timer,
            Token(n) if n & KICK != 0 => Self::Kick { queue },
            Token(n) => Self::Operation {
                queue,
                slot: n as u16,
            },
        }
    }
}
