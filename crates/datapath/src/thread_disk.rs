//! What one thread keeps for each disk of which it serves a queue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::{io, mem};

use block::{Engine, FileId};
use image::ThreadPins;

use crate::disk::{Content, Disk};
use crate::error_policy::Stalled;
use crate::flush_coalescer::FlushCoalescer;
use crate::polling::PollEstimator;
use crate::source::Source;
use crate::worker::Worker;

pub(crate) struct ThreadDisk {
    pub disk: Arc<Disk>,
    pub source: Option<Arc<Source>>,
    /// The file that the guest's data is written to, as this thread's engine knows it.
    pub file: Option<FileId>,
    /// All files of an image that goes by tables, by their numbers in it.
    pub files: Vec<FileId>,
    /// What requests hold of the image while they are under way.
    pub pins: ThreadPins,
    /// Queues of the disk that this thread serves.
    queues: usize,
    /// Requests that these can have under way.
    requests: usize,
    /// Requests that complete once an fdatasync has ended, by the number that serves them; the first
    /// of them leads it while it is this thread's.
    pub sync_waiters: VecDeque<SyncWaiter>,
    /// The fdatasync under way is this thread's.
    pub syncing: bool,
    /// Requests that wait for a bounce buffer: queue and slot.
    pub waiting_for_buffer: VecDeque<(usize, u16)>,
    /// Requests that go on with zeroes, to be read or looked for: queue and slot.
    pub zeroing: VecDeque<(usize, u16)>,
    /// Requests that storage failed to serve.
    pub stalled: Stalled,
    /// Bounce buffers that its requests have.
    pub bounces: usize,
    /// What decides whether to poll for it.
    pub estimator: PollEstimator,
}

/// What a disk is in, as a thread's engine knows it: as in [`ThreadDisk`].
pub(crate) struct Attached {
    file: Option<FileId>,
    files: Vec<FileId>,
}

impl ThreadDisk {
    /// The disk is in something else from now on. Returns what it was in.
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

    fn reserve_zeroing(&mut self) {
        if !self.files.is_empty() || self.disk.detects_zeroes() {
            self.zeroing.reserve(self.requests - self.zeroing.len());
        }
    }

    /// Of the disk's file; only disks in files have anything to make durable.
    pub fn coalescer(&self) -> &FlushCoalescer {
        &self.source.as_ref().expect("a file").coalescer
    }

    /// Where the guest's data is written to.
    pub fn written(&self) -> FileId {
        self.file.expect("a file")
    }
}

pub(crate) struct SyncWaiter {
    pub number: u64,
    pub queue: usize,
    pub slot: u16,
}

impl<E: Engine> Worker<E> {
    /// The place of what is kept for this disk, for one more queue of it with so many requests.
    pub fn join_disk(&mut self, disk: &Arc<Disk>, requests: usize) -> io::Result<usize> {
        let place = self.find_or_make_disk(disk)?;
        if let Some(thread_disk) = &mut self.disks[place] {
            thread_disk.queues += 1;
            thread_disk.requests += requests;
            // Not while they are served.
            thread_disk
                .sync_waiters
                .reserve(thread_disk.requests - thread_disk.sync_waiters.len());
            thread_disk
                .waiting_for_buffer
                .reserve(thread_disk.requests - thread_disk.waiting_for_buffer.len());
            thread_disk.reserve_zeroing();
        }
        Ok(place)
    }

    fn find_or_make_disk(&mut self, disk: &Arc<Disk>) -> io::Result<usize> {
        let same = |l: &Option<ThreadDisk>| l.as_ref().is_some_and(|l| Arc::ptr_eq(&l.disk, disk));
        if let Some(place) = self.disks.iter().position(same) {
            return Ok(place);
        }
        let source = disk.source();
        let Attached { file, files } = self.attach(&disk.content(), source.as_deref())?;
        let thread_disk = Some(ThreadDisk {
            disk: disk.clone(),
            source,
            file,
            files,
            pins: ThreadPins::new(self.lane),
            queues: 0,
            requests: 0,
            sync_waiters: VecDeque::new(),
            syncing: false,
            waiting_for_buffer: VecDeque::new(),
            zeroing: VecDeque::new(),
            stalled: Stalled::default(),
            bounces: 0,
            estimator: PollEstimator::default(),
        });
        let free = self.disks.iter().position(Option::is_none);
        let place = free.unwrap_or(self.disks.len());
        match free {
            Some(free) => self.disks[free] = thread_disk,
            None => self.disks.push(thread_disk),
        }
        Ok(place)
    }

    /// Makes all that a disk is in known to the engine, or nothing of it.
    pub fn attach(&mut self, content: &Content, source: Option<&Source>) -> io::Result<Attached> {
        let mut attached = Attached {
            file: None,
            files: Vec::with_capacity(content.files.len()),
        };
        for file in &content.files {
            match file.attach(&mut self.engine) {
                Ok(file) => attached.files.push(file),
                Err(e) => {
                    self.detach(attached);
                    return Err(e);
                }
            }
        }
        attached.file = match (content.image.chain(), source) {
            (Some(chain), _) => Some(attached.files[usize::from(chain.written_file().0)]),
            (None, Some(source)) => Some(source.attach(&mut self.engine)?),
            (None, None) => None,
        };
        Ok(attached)
    }

    pub fn detach(&mut self, attached: Attached) {
        let Attached { file, files } = attached;
        // The one that is written may be one of the others.
        let other = file.filter(|file| !files.contains(file));
        for file in files.into_iter().chain(other) {
            self.engine.detach(file);
        }
    }

    /// One queue less. Nothing of it is under way.
    pub fn leave_disk(&mut self, place: usize, requests: usize) {
        let Some(thread_disk) = &mut self.disks[place] else {
            return;
        };
        thread_disk.queues -= 1;
        thread_disk.requests -= requests;
        if thread_disk.queues > 0 {
            return;
        }
        debug_assert!(
            thread_disk.sync_waiters.is_empty() && thread_disk.waiting_for_buffer.is_empty()
        );
        debug_assert!(thread_disk.zeroing.is_empty());
        debug_assert!(thread_disk.stalled.waiting.is_empty());
        if let Some(ThreadDisk { file, files, .. }) = self.disks[place].take() {
            self.detach(Attached { file, files });
        }
    }
}
