//! Replaces the file of a disk that is being served: the guest notices a pause.
//!
//! 1. Every thread pauses the disk's queues: it fetches nothing from them, and requests in flight end. Queues can
//!    stop meanwhile; starts of queues wait.
//! 2. The old file is made durable, with the tables of its image, unless the cache mode ignores flushes: then the
//!    tables are written. Most of this is done before step 1, while the guest continues.
//! 3. The caller looks at the new file again, if that builds on the old one.
//! 4. Every thread that serves the disk makes the new file known to its engine, or all files of the new image.
//! 5. The caller records that the disk is in the new file from now on.
//! 6. Every thread continues: with the new file, or, if a step has failed, with the old one.
//! 7. The caller closes the old image, or, if a step has failed, the new one.
//!
//! What a crash leaves: until the caller has recorded the new file, {the old one, with all acknowledged writes}. From
//! then on, {the new one, with all acknowledged writes, as durable as the caller made it}. While it records, no request
//! is in flight and both hold the same, so {either} is right. It must not return before its record is durable: later
//! writes of the guest go to the new file alone. An image that was not closed is sound, and may have lost some space.

use std::borrow::Borrow;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use block::{DiskFacts, Engine};
use image::Image;

use crate::command::{Command, QueueStart, answer};
use crate::disk::source::{Source, Storage};
use crate::disk::{Content, Disk};
use crate::queue::QueueState;
use crate::thread::IoThread;
use crate::thread_disk::Attached;
use crate::worker::{Pause, Worker};

/// The files that replace those of a disk.
pub struct Replacement {
    /// Where ranges of it are.
    pub image: Image,
    /// One storage, or, if the image is mapped, all its files by their numbers in it.
    pub storage: Vec<Storage>,
    /// The facts of the new files.
    pub facts: DiskFacts,
    /// Its size in bytes, at least the disk's.
    pub size: u64,
}

impl Disk {
    /// Replaces the file of a disk that `threads` (and no others) serve, or all files of its image. The new one must hold
    /// what the old one does when `record` returns.
    ///
    /// When the old file is durable and no request is in flight, `ready` is given the new file. It returns the file to use:
    /// the same, or, if that builds on the old one, what it has become. Then `record` must make durable which file the disk
    /// is in.
    ///
    /// Blocks until all threads continue. A thread that has to start or stop queues meanwhile must not call it. The old
    /// image is then durable, and the caller closes it.
    ///
    /// # Errors
    /// The disk continues with the old file: the new one does not fit, the old one could not be made
    /// durable, a thread's engine has no room for it, or `ready` or `record` failed.
    pub fn replace(
        self: &Arc<Self>,
        threads: &[impl Borrow<IoThread>],
        new: Replacement,
        ready: impl FnOnce(Replacement) -> io::Result<Replacement>,
        record: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        self.check(&new)?;
        let _alone: MutexGuard<'_, ()> = self.replacing.lock().unwrap_or_else(|e| e.into_inner());
        // Little is then left to be done while guests wait. Nothing is expected of storage that fails.
        if self.stalled() == 0 {
            self.sync()?;
        }
        let result = self.exchange(threads, new, ready, record);
        // A thread that has ended serves nothing that could continue.
        let _ = ask_all(threads, |reply| Command::Unpause {
            disk: self.clone(),
            replaced: result.is_ok(),
            reply,
        });
        result
    }

    /// The steps while the disk is paused.
    fn exchange(
        self: &Arc<Self>,
        threads: &[impl Borrow<IoThread>],
        new: Replacement,
        ready: impl FnOnce(Replacement) -> io::Result<Replacement>,
        record: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        ask_all(threads, |reply| Command::Pause {
            disk: self.clone(),
            reply,
        })?;
        self.sync()?;
        let new = ready(new)?;
        // It may have grown.
        self.check(&new)?;
        let Replacement {
            image,
            storage,
            facts,
            size,
        } = new;
        let (content, source) = Content::new(image, storage, &facts, self.options.cache);
        let source = source.ok_or_else(|| self.unfit("the new image has no file"))?;
        ask_all(threads, |reply| Command::AttachNext {
            disk: self.clone(),
            content: content.clone(),
            source: source.clone(),
            reply,
        })?;
        record()?;
        self.set_content(content, Some(source));
        self.grow(size);
        Ok(())
    }

    fn check(&self, new: &Replacement) -> io::Result<()> {
        let (facts, size) = (&new.facts, new.size);
        if self.source().is_none() {
            return Err(self.unfit("it is in no file"));
        }
        if size < self.size() {
            let problem = format!("the new one has {size} bytes, and the disk {}", self.size());
            return Err(self.unfit(&problem));
        }
        if facts.logical_block > self.facts.logical_block {
            let problem = format!(
                "the new one needs blocks of {} bytes, and the guest uses blocks of {}",
                facts.logical_block, self.facts.logical_block
            );
            return Err(self.unfit(&problem));
        }
        if facts.read_only && !self.facts.read_only {
            return Err(self.unfit("the new one is read-only, and the disk is not"));
        }
        Ok(())
    }

    fn unfit(&self, problem: &str) -> io::Error {
        io::Error::other(format!(
            "disk {}: its file cannot be replaced: {problem}",
            self.name
        ))
    }
}

/// Sends a command to every thread, and waits for all of them.
pub(super) fn ask_all(
    threads: &[impl Borrow<IoThread>],
    command: impl Fn(Sender<io::Result<()>>) -> Command,
) -> io::Result<()> {
    // All at once: each waits for its own requests.
    answers(&ask(threads, command), None)
}

/// Sends a command to every thread.
pub(super) fn ask(
    threads: &[impl Borrow<IoThread>],
    command: impl Fn(Sender<io::Result<()>>) -> Command,
) -> Vec<Receiver<io::Result<()>>> {
    let ask = |thread| {
        let (reply, result) = mpsc::channel();
        IoThread::send(thread, command(reply));
        result
    };
    threads.iter().map(Borrow::borrow).map(ask).collect()
}

/// Waits until all threads have answered, or until the deadline. Returns the first error.
pub(super) fn answers(
    results: &[Receiver<io::Result<()>>],
    deadline: Option<Instant>,
) -> io::Result<()> {
    let wait = |result: &Receiver<io::Result<()>>| {
        let Some(deadline) = deadline else {
            return answer(result)?;
        };
        let left = deadline.saturating_duration_since(Instant::now());
        match result.recv_timeout(left) {
            Err(RecvTimeoutError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
            Err(RecvTimeoutError::Disconnected) => answer(result)?,
            Ok(answered) => answered,
        }
    };
    let results: Vec<_> = results.iter().map(wait).collect();
    results.into_iter().collect()
}

impl<E: Engine> Worker<E> {
    /// Fetches nothing from the disk's queues any more, and replies when no request of it is in flight.
    pub fn pause(&mut self, disk: Arc<Disk>, drained: Sender<io::Result<()>>) {
        for number in self.queues.of_disk(&disk) {
            self.notify_queue(number);
            self.queues.deactivate(number);
            let queue = self.queues.get(number);
            if queue.is_running() {
                queue.state = QueueState::Paused;
            }
        }
        self.control.pauses.push(Pause {
            disk: disk.clone(),
            drained: Some(drained),
            next: None,
            waiting: Vec::new(),
        });
        self.report_paused();
        if disk.stalled() > 0 {
            self.cancel_pauses(&disk);
        }
    }

    /// Fails the pauses of a disk that wait for its requests to end: storage failed to serve it.
    pub fn cancel_pauses(&mut self, disk: &Arc<Disk>) {
        let is_same = |pause: &&mut Pause| Arc::ptr_eq(&pause.disk, disk);
        for pause in self.control.pauses.iter_mut().filter(is_same) {
            if let Some(reply) = pause.drained.take() {
                let _ = reply.send(Err(io::Error::other(format!(
                    "requests wait for its storage to work again; when it does, 'ringdisk resume {}' retries them",
                    disk.name
                ))));
            }
        }
    }

    /// Replies to pauses of disks that have no request in flight any more.
    pub fn report_paused(&mut self) {
        for pause in &mut self.control.pauses {
            let mut queues = self.queues.of_disk(&pause.disk).into_iter();
            if pause.drained.is_some() && queues.all(|n| self.queues.get(n).slots.taken() == 0) {
                let drained = pause.drained.take();
                drained.inspect(|reply| drop(reply.send(Ok(()))));
            }
        }
    }

    /// Makes the new file known to the engine, if this thread serves the disk.
    pub fn attach_next(
        &mut self,
        disk: &Arc<Disk>,
        content: &Content,
        source: Arc<Source>,
    ) -> io::Result<()> {
        let mut pauses = self.control.pauses.iter_mut();
        if let Some(pause) = pauses.find(|pause| Arc::ptr_eq(&pause.disk, disk))
            && self.disks.index_of(disk).is_some()
        {
            let attached = Attached::new(&mut self.engine, content, Some(&source))?;
            pause.next = Some((source, attached));
        }
        Ok(())
    }

    /// Serves the disk again, from the new file if it was replaced. Returns the starts of queues that waited.
    pub fn unpause(&mut self, disk: &Arc<Disk>, is_replaced: bool) -> Vec<QueueStart> {
        let is_same = |pause: &Pause| Arc::ptr_eq(&pause.disk, disk);
        // The pause may have failed on another thread before this one heard of it.
        let Some(place) = self.control.pauses.iter().position(is_same) else {
            return Vec::new();
        };
        let pause = self.control.pauses.swap_remove(place);
        match (pause.next, self.disks.index_of(disk)) {
            (Some((source, new)), Some(index)) if is_replaced => {
                let old = self.disks.get(index).set_content(source, new);
                old.detach(&mut self.engine);
                for number in self.queues.of_disk(disk) {
                    let thread_disk = self.disks.get(index);
                    self.queues.get(number).update_content(thread_disk);
                    self.register_memory(number);
                }
            }
            // Its last queue has stopped meanwhile, or the old file stays.
            (Some((_, new)), _) => new.detach(&mut self.engine),
            (None, _) => {}
        }
        for number in self.queues.of_disk(disk) {
            let queue = self.queues.get(number);
            queue.update_bitmaps();
            if matches!(queue.state, QueueState::Paused) {
                queue.state = QueueState::Running;
                self.queues.activate(number);
            }
        }
        pause.waiting
    }
}
