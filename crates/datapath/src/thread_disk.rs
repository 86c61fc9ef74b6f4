//! What one thread knows of each disk of which it serves a queue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::{io, mem};

use block::{Engine, FileId};
use image::ThreadPins;

use crate::disk::flush_coalescer::FlushCoalescer;
use crate::disk::source::Source;
use crate::disk::{Content, Disk};
use crate::polling::PollEstimator;
use crate::request::RequestId;

pub(crate) struct ThreadDisk {
    pub disk: Arc<Disk>,
    pub source: Option<Arc<Source>>,
    /// The file that the guest's data is written to, as this thread's engine knows it.
    pub file: Option<FileId>,
    /// All files of a mapped image, by their numbers in it.
    pub files: Vec<FileId>,
    /// The clusters that requests in flight use.
    pub pins: ThreadPins,
    /// Queues of the disk that this thread serves.
    queues: usize,
    /// Requests that these can have in flight.
    requests: usize,
    /// Requests that complete once an fdatasync has ended, by the number that serves them. The first of them leads the
    /// fdatasync, if this thread does it.
    pub sync_waiters: VecDeque<SyncWaiter>,
    /// The fdatasync in progress is this thread's.
    pub is_syncing: bool,
    /// Requests that wait for a bounce buffer.
    pub waiting_for_buffer: VecDeque<RequestId>,
    /// Requests that read more zeroes, or look for them, when it is their turn.
    pub zeroing: VecDeque<RequestId>,
    pub stalled: Stalled,
    /// Bounce buffers that its requests have.
    pub bounces: usize,
    /// Says whether to poll for it.
    pub estimator: PollEstimator,
}

/// A request that waits for the fdatasync with this number, or a later one.
pub(crate) struct SyncWaiter {
    pub number: u64,
    pub request: RequestId,
}

/// The requests of a disk that storage failed to serve, and that wait.
#[derive(Default)]
pub(crate) struct Stalled {
    /// In the order in which they failed.
    pub waiting: VecDeque<RequestId>,
    /// When they are tried again.
    pub at: RetryTime,
    /// The last pause, in nanoseconds; 0 if something was served since.
    pub pause_ns: u64,
}

/// When stalled requests are tried again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RetryTime {
    /// Nothing waits.
    #[default]
    Unset,
    /// Then, in nanoseconds of the monotonic clock.
    At(u64),
    /// When the operator resumes the disk.
    OnResume,
}

/// The files of a disk, as a thread's engine knows them: as in [`ThreadDisk`].
pub(crate) struct Attached {
    file: Option<FileId>,
    files: Vec<FileId>,
}

impl Attached {
    /// Makes all files of a disk known to an engine, or none.
    pub fn new<E: Engine>(
        engine: &mut E,
        content: &Content,
        source: Option<&Source>,
    ) -> io::Result<Self> {
        let mut attached = Self {
            file: None,
            files: Vec::with_capacity(content.files.len()),
        };
        for file in &content.files {
            match file.attach(engine) {
                Ok(file) => attached.files.push(file),
                Err(e) => {
                    attached.detach(engine);
                    return Err(e);
                }
            }
        }
        attached.file = match (content.image.chain(), source) {
            (Some(chain), _) => Some(attached.files[usize::from(chain.written_file().0)]),
            (None, Some(source)) => Some(source.attach(engine)?),
            (None, None) => None,
        };
        Ok(attached)
    }

    pub fn detach<E: Engine>(self, engine: &mut E) {
        let Self { file, files } = self;
        // The one that is written may be one of the others.
        let other = file.filter(|file| !files.contains(file));
        for file in files.into_iter().chain(other) {
            engine.detach(file);
        }
    }
}

impl ThreadDisk {
    fn new(
        disk: Arc<Disk>,
        source: Option<Arc<Source>>,
        files: Attached,
        pins: ThreadPins,
    ) -> Self {
        Self {
            disk,
            source,
            file: files.file,
            files: files.files,
            pins,
            queues: 0,
            requests: 0,
            sync_waiters: VecDeque::new(),
            is_syncing: false,
            waiting_for_buffer: VecDeque::new(),
            zeroing: VecDeque::new(),
            stalled: Stalled::default(),
            bounces: 0,
            estimator: PollEstimator::default(),
        }
    }

    /// The disk is in other files from now on. Returns the ones it was in.
    pub fn set_content(&mut self, source: Arc<Source>, new: Attached) -> Attached {
        debug_assert!(self.pins.is_empty());
        self.source = Some(source);
        let old = Attached {
            file: mem::replace(&mut self.file, new.file),
            files: mem::replace(&mut self.files, new.files),
        };
        self.reserve_zeroing();
        old
    }

    /// Reserves memory for one more queue with so many requests: nothing is allocated while they are served.
    fn add_queue(&mut self, requests: usize) {
        self.queues += 1;
        self.requests += requests;
        self.sync_waiters
            .reserve(self.requests - self.sync_waiters.len());
        self.waiting_for_buffer
            .reserve(self.requests - self.waiting_for_buffer.len());
        self.reserve_zeroing();
    }

    fn reserve_zeroing(&mut self) {
        if !self.files.is_empty() || self.disk.detects_zeroes() {
            self.zeroing.reserve(self.requests - self.zeroing.len());
        }
    }

    /// Who makes the disk durable. Only disks in files have anything to make durable.
    pub fn coalescer(&self) -> &FlushCoalescer {
        &self.source.as_ref().expect("a disk in a file").coalescer
    }

    /// The file that the guest's data is written to.
    pub fn written_file(&self) -> FileId {
        self.file.expect("a disk in a file")
    }
}

/// The disks of which a thread serves queues.
pub(crate) struct ThreadDisks {
    /// An index is used again once the last queue of its disk has stopped.
    disks: Vec<Option<ThreadDisk>>,
    /// Which shard of the pins of an image this thread uses.
    pins_shard: usize,
}

impl ThreadDisks {
    pub fn new(pins_shard: usize) -> Self {
        Self {
            disks: Vec::new(),
            pins_shard,
        }
    }

    /// The disk of a queue in service.
    #[inline]
    pub fn get(&mut self, index: usize) -> &mut ThreadDisk {
        self.disks[index]
            .as_mut()
            .expect("a disk stays as long as one of its queues")
    }

    /// The disk at this index, if it still has queues here.
    #[inline]
    pub fn find(&mut self, index: usize) -> Option<&mut ThreadDisk> {
        self.disks.get_mut(index)?.as_mut()
    }

    /// One more than the highest index.
    pub fn len(&self) -> usize {
        self.disks.len()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut ThreadDisk> {
        self.disks.iter_mut().flatten()
    }

    /// The index of a disk, if this thread serves it.
    pub fn index_of(&self, disk: &Arc<Disk>) -> Option<usize> {
        let is_same =
            |d: &Option<ThreadDisk>| d.as_ref().is_some_and(|d| Arc::ptr_eq(&d.disk, disk));
        self.disks.iter().position(is_same)
    }

    /// Adds a queue with so many requests to a disk, which is new to the engine if this is its first queue here. Returns
    /// the disk's index.
    pub fn add_queue<E: Engine>(
        &mut self,
        engine: &mut E,
        disk: &Arc<Disk>,
        requests: usize,
    ) -> io::Result<usize> {
        let index = match self.index_of(disk) {
            Some(index) => index,
            None => self.add(engine, disk)?,
        };
        self.get(index).add_queue(requests);
        Ok(index)
    }

    fn add<E: Engine>(&mut self, engine: &mut E, disk: &Arc<Disk>) -> io::Result<usize> {
        let source = disk.source();
        let attached = Attached::new(engine, &disk.content(), source.as_deref())?;
        let pins = ThreadPins::new(self.pins_shard);
        let new = Some(ThreadDisk::new(disk.clone(), source, attached, pins));
        Ok(match self.disks.iter().position(Option::is_none) {
            Some(free) => {
                self.disks[free] = new;
                free
            }
            None => {
                self.disks.push(new);
                self.disks.len() - 1
            }
        })
    }

    /// Removes a queue with so many requests, none of which is in flight; with the last one, the disk.
    pub fn remove_queue<E: Engine>(&mut self, engine: &mut E, index: usize, requests: usize) {
        let disk = self.get(index);
        disk.queues -= 1;
        disk.requests -= requests;
        if disk.queues > 0 {
            return;
        }
        debug_assert!(disk.sync_waiters.is_empty() && disk.waiting_for_buffer.is_empty());
        debug_assert!(disk.zeroing.is_empty());
        debug_assert!(disk.stalled.waiting.is_empty());
        let (file, files) = (disk.file, mem::take(&mut disk.files));
        self.disks[index] = None;
        Attached { file, files }.detach(engine);
    }
}

/// Requests of all disks that wait for the same thing, and the disk whose turn it is.
#[derive(Default)]
pub(crate) struct Rotation {
    /// Requests that wait.
    pub waiting: usize,
    turn: usize,
}

impl Rotation {
    /// The index of the next disk.
    pub fn next_disk(&mut self, disks: &ThreadDisks) -> usize {
        self.turn = (self.turn + 1) % disks.len();
        self.turn
    }
}
