//! Another file for a disk that is being served: the guest notices a pause.
//!
//! 1. Every thread holds the disk's queues: it fetches nothing from them, and lets what is under way
//!    end. Queues can stop meanwhile; those that start wait.
//! 2. The old file is made durable, unless the cache mode ignores flushes.
//! 3. Every thread that serves the disk makes the new file known to its engine.
//! 4. The caller records that the disk is in the new file from now on.
//! 5. Every thread goes on: with the new file, or, if anything failed so far, with the old one.
//!
//! What a crash leaves: until the caller has recorded the new file, {the old one, with all that was
//! ever acknowledged}. From then on, {the new one, with all that was acknowledged, as durable as the
//! caller made it}. While it records, nothing is under way and both hold the same, so {either} is
//! right. It must not return before its record is durable: what the guest writes next goes to the new
//! file alone.

use std::borrow::Borrow;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, MutexGuard};

use block::{Aio, Backing, DiskFacts, Engine, FileId, Remote};
use guest::NewQueue;

use crate::disk::Disk;
use crate::queue::State;
use crate::source::{Holder, Source};
use crate::thread::{Command, IoThread, QueueId};
use crate::worker::Worker;

/// Where bytes are from now on.
pub enum Place {
    /// In a file: open as the disk's cache mode demands, and locked; and how its bytes are to be moved.
    File(OwnedFd, Backing, Aio),
    /// In storage that is no file.
    Remote(Arc<dyn Remote>),
}

/// Storage that takes the place of another.
pub struct Replacement {
    /// Where it is.
    pub place: Place,
    /// What is true of it.
    pub facts: DiskFacts,
    /// Its size in bytes, at least the disk's.
    pub size: u64,
}

impl Disk {
    /// Replaces the file of a disk that `threads` (and no others) serve. The new one must hold what
    /// the old one does by the time that `record` returns, which is called while no request is under
    /// way, and must make durable which file the disk is in. Blocks until all threads have gone on;
    /// not to be called by a thread that has to start or stop queues meanwhile.
    ///
    /// # Errors
    /// The disk goes on with the old file: the new one does not fit, the old one could not be made
    /// durable, a thread's engine has no room for it, or `record` failed.
    pub fn replace(
        self: &Arc<Self>,
        threads: &[impl Borrow<IoThread>],
        new: Replacement,
        record: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        self.check(&new)?;
        let _alone: MutexGuard<'_, ()> = self.replacing.lock().unwrap_or_else(|e| e.into_inner());
        let size = new.size;
        let cached = !self.options.cache.direct();
        let holder = match new.place {
            Place::File(file, backing, aio) => Holder::File(file, backing, aio),
            Place::Remote(remote) => Holder::Remote(remote),
        };
        let source = Source::new(holder, &new.facts, cached);
        let source = Arc::new(source);

        let result = ask_all(threads, |reply| Command::Hold {
            disk: self.clone(),
            reply,
        })
        .and_then(|()| self.sync())
        .and_then(|()| {
            ask_all(threads, |reply| Command::Adopt {
                disk: self.clone(),
                source: source.clone(),
                reply,
            })
        })
        .and_then(|()| record());
        let replaced = result.is_ok();
        if replaced {
            self.set_source(source);
            self.grow(size);
        }
        // A thread that has ended serves nothing that could go on.
        let _ = ask_all(threads, |reply| Command::GoOn {
            disk: self.clone(),
            replaced,
            reply,
        });
        result
    }

    fn check(&self, new: &Replacement) -> io::Result<()> {
        let problem = if self.source().is_none() {
            "it is in no file".to_owned()
        } else if new.size < self.size() {
            format!("it has {} bytes, and the disk {}", new.size, self.size())
        } else if new.facts.logical_block > self.facts.logical_block {
            format!(
                "it is written in blocks of {}, and the guest knows of blocks of {}",
                new.facts.logical_block, self.facts.logical_block
            )
        } else if new.facts.read_only && !self.facts.read_only {
            "it is read-only, and the disk is not".to_owned()
        } else {
            return Ok(());
        };
        Err(io::Error::other(format!(
            "disk {}: the new file cannot take the place of the old one: {problem}",
            self.name
        )))
    }
}

/// Sends a command to every thread, and waits for all of them.
fn ask_all(
    threads: &[impl Borrow<IoThread>],
    command: impl Fn(Sender<io::Result<()>>) -> Command,
) -> io::Result<()> {
    let ask = |thread| {
        let (reply, result) = mpsc::channel();
        IoThread::send(thread, command(reply));
        result
    };
    // All at once: each waits for its own requests.
    let results: Vec<Receiver<_>> = threads.iter().map(Borrow::borrow).map(ask).collect();
    let wait = |result: &Receiver<io::Result<()>>| crate::thread::answer(result)?;
    let results: Vec<_> = results.iter().map(wait).collect();
    results.into_iter().collect()
}

/// The start of a queue, and who is told of it.
pub(crate) type Start = (Arc<Disk>, NewQueue, Sender<io::Result<QueueId>>);

/// A disk that a thread holds.
pub(crate) struct Hold {
    pub disk: Arc<Disk>,
    /// Told when nothing of the disk is under way.
    drained: Option<Sender<io::Result<()>>>,
    /// The new file, as this thread's engine knows it.
    next: Option<(FileId, Arc<Source>)>,
    /// Starts of queues, which wait.
    pub waiting: Vec<Start>,
}

impl<E: Engine> Worker<E> {
    /// Fetches nothing from the disk's queues any more, and says so when all is done that was fetched.
    pub fn hold(&mut self, disk: Arc<Disk>, drained: Sender<io::Result<()>>) {
        for number in self.queues_of(&disk) {
            self.notify_queue(number);
            self.cool(number);
            if let Some(queue) = &mut self.queues[number]
                && queue.running()
            {
                queue.state = State::Held;
            }
        }
        let stalled = disk.stalled() > 0;
        self.holds.push(Hold {
            disk,
            drained: Some(drained),
            next: None,
            waiting: Vec::new(),
        });
        self.look_at_holds();
        if stalled && let Some(disk) = self.holds.last().map(|h| h.disk.clone()) {
            self.cancel_holds(&disk);
        }
    }

    /// Tells those who hold the disk that it will not be idle: storage failed to serve it.
    pub fn cancel_holds(&mut self, disk: &Arc<Disk>) {
        let same = |hold: &&mut Hold| Arc::ptr_eq(&hold.disk, disk);
        for hold in self.holds.iter_mut().filter(same) {
            if let Some(reply) = hold.drained.take() {
                let _ = reply.send(Err(io::Error::other(
                    "requests wait for its storage to work again; 'ringdisk resume --report' ends them",
                )));
            }
        }
    }

    /// Tells those who hold disks of which nothing is under way any more.
    pub fn look_at_holds(&mut self) {
        for i in 0..self.holds.len() {
            let disk = self.holds[i].disk.clone();
            let idle = |&n: &usize| {
                let queue = self.queues[n].as_ref();
                queue.is_none_or(|q| q.slots.taken() == 0)
            };
            if self.holds[i].drained.is_some() && self.queues_of(&disk).iter().all(idle) {
                let drained = self.holds[i].drained.take();
                drained.inspect(|reply| drop(reply.send(Ok(()))));
            }
        }
    }

    /// Makes the new file known to the engine, if this thread serves the disk.
    pub fn adopt(&mut self, disk: &Arc<Disk>, source: Arc<Source>) -> io::Result<()> {
        let Some(hold) = self.holds.iter_mut().find(|h| Arc::ptr_eq(&h.disk, disk)) else {
            return Ok(());
        };
        let mut locals = self.locals.iter().flatten();
        if locals.any(|l| Arc::ptr_eq(&l.disk, disk)) {
            let file = source.attach(&mut self.engine)?;
            hold.next = Some((file, source));
        }
        Ok(())
    }

    /// Serves the disk again, from the new file if it was replaced.
    pub fn go_on(&mut self, disk: &Arc<Disk>, replaced: bool) -> Vec<Start> {
        let same = |h: &Hold| Arc::ptr_eq(&h.disk, disk);
        let Some(place) = self.holds.iter().position(same) else {
            return Vec::new();
        };
        let hold = self.holds.swap_remove(place);
        let mut locals = self.locals.iter_mut().flatten();
        let local = locals.find(|l| Arc::ptr_eq(&l.disk, disk));
        match (hold.next, local) {
            (Some((file, source)), Some(local)) if replaced => {
                let (alignment, old) = (source.alignment, local.file.replace(file));
                local.source = Some(source);
                if let Some(old) = old {
                    self.engine.detach(old);
                }
                for number in self.queues_of(disk) {
                    if let Some(queue) = &mut self.queues[number] {
                        (queue.file, queue.alignment) = (Some(file), alignment);
                    }
                }
            }
            // Its last queue has stopped meanwhile, or the old file stays.
            (Some((file, _)), _) => self.engine.detach(file),
            (None, _) => {}
        }
        for number in self.queues_of(disk) {
            if let Some(queue) = &mut self.queues[number]
                && matches!(queue.state, State::Held)
            {
                queue.state = State::Running;
                self.heat(number);
            }
        }
        hold.waiting
    }

    fn queues_of(&self, disk: &Arc<Disk>) -> Vec<usize> {
        let queue = |n: &usize| self.queues[*n].as_ref();
        (0..self.queues.len())
            .filter(|n| queue(n).is_some_and(|q| Arc::ptr_eq(&q.disk, disk)))
            .collect()
    }
}
