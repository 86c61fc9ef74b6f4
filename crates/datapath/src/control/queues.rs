//! Starting and stopping queues.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use block::{Engine, Segment};
use guest::StoppedRing;
use tracing::{info, warn};

use crate::clock::now_ns;
use crate::command::{QueueId, QueueStart};
use crate::path::notify;
use crate::queue::token::kick_token;
use crate::queue::{Queue, QueueState, requests_max};
use crate::worker::{StopRequest, Worker};

impl<E: Engine> Worker<E> {
    /// Starts a queue, or has it wait until the file of its disk has been replaced.
    pub fn start_or_wait(&mut self, start: QueueStart) {
        let mut pauses = self.control.pauses.iter_mut();
        match pauses.find(|pause| Arc::ptr_eq(&pause.disk, &start.disk)) {
            Some(pause) => pause.waiting.push(start),
            None => {
                let reply = start.reply.clone();
                drop(reply.send(self.start(start)));
            }
        }
    }

    pub fn start(&mut self, start: QueueStart) -> io::Result<QueueId> {
        let QueueStart {
            disk,
            queue: new,
            client,
            ..
        } = start;
        if disk.is_abandoned() {
            return Err(io::Error::other(
                "its storage has not answered requests of an earlier connection; it can be served \
                 again when they have ended",
            ));
        }
        let requests = requests_max(&new.virtqueue).into();
        let index = self.disks.add_queue(&mut self.engine, &disk, requests)?;
        let kick = new.kick.clone();
        let number = self
            .queues
            .add(Queue::new(disk, new, client, index, self.disks.get(index)));
        if let Err(e) = self.engine.watch(kick.as_fd(), kick_token(number)) {
            self.remove(number);
            return Err(e);
        }
        self.register_memory(number);
        // What a server that is gone has signalled may never have been seen. One interrupt too many does no harm.
        self.interrupt(number);
        let queue = self.queues.get(number);
        if queue.ring.resubmits() > 0 {
            info!(
                "disk {}: queue {}: {} requests in flight had no answer when it was last served; they are done again",
                queue.disk.name,
                queue.ring.number(),
                queue.ring.resubmits(),
            );
        }
        // Requests may have been made available before the kick was watched.
        self.queues.activate(number);
        Ok(QueueId(number))
    }

    pub fn stop(&mut self, stop: StopRequest) {
        let number = stop.queue.0;
        // An abandoned queue has stopped before, and may have ended.
        let Some(queue) = self.queues.find(number) else {
            return;
        };
        let timeout = if queue.disk.is_abandoned() {
            // Its storage has been waited for once.
            Duration::ZERO
        } else {
            queue.disk.options.stop_timeout
        };
        let now = now_ns();
        let until = stop.since.saturating_add(timeout.as_nanos() as u64);
        if !queue.is_retired() && queue.ring.resubmits() > 0 {
            let fetches = matches!(queue.state, QueueState::Running | QueueState::Paused);
            if fetches && now < until {
                // The next server, which continues where the ring stops, would never do them.
                self.control.postponed.push(stop);
                self.wake.wake();
                return;
            }
            queue.has_unfinished = true;
        }
        queue.state = QueueState::Stopping {
            reply: stop.reply,
            is_retired: queue.is_retired(),
            until,
        };
        self.queues.deactivate(number);
        self.leave_stalled(number);
        self.finish_stop(number);
        if self.queues.find(number).is_some() {
            self.timer.set(now, until.max(now));
        }
    }

    /// Removes a queue that was asked to stop and has no request in flight.
    pub fn finish_stop(&mut self, number: usize) {
        // The queue may have ended with the request before, of several that end together.
        let Some(queue) = self.queues.find(number) else {
            return;
        };
        if queue.slots.taken() > 0 {
            return;
        }
        if !self.control.pauses.is_empty() {
            self.report_paused();
        }
        let queue = self.queues.get(number);
        match &queue.state {
            QueueState::Stopping { reply, .. } => {
                let reply = reply.clone();
                let stopped = StoppedRing {
                    base: queue.ring.base(),
                    unfinished: queue.has_unfinished,
                };
                self.notify_queue(number);
                let _ = self.engine.unwatch(kick_token(number));
                self.remove(number);
                let _ = reply.send(stopped);
            }
            QueueState::Abandoned => {
                let disk = queue.disk.clone();
                let _ = self.engine.unwatch(kick_token(number));
                self.remove(number);
                disk.answered();
            }
            QueueState::Running
            | QueueState::Paused
            | QueueState::Unmapped
            | QueueState::Retired => {}
        }
    }

    fn remove(&mut self, number: usize) {
        let queue = self.queues.remove(number);
        self.engine.unregister(&queue.registered);
        let requests = queue.slots.len();
        self.disks
            .remove_queue(&mut self.engine, queue.thread_disk, requests);
    }

    /// Interrupts the guest, whether it wants that or not.
    pub fn interrupt(&mut self, number: usize) {
        let queue = self.queues.get(number);
        if notify::interrupt(queue, &self.notifier).is_err() {
            let disk = queue.disk.clone();
            notify::avoid_blocking(&mut self.queues, &disk);
        }
    }

    /// Makes the guest's memory known to the engine, if that is wanted and has not been done.
    pub fn register_memory(&mut self, number: usize) {
        let queue = self.queues.get(number);
        // A client's queue gives memory back, and then has other pages at the same addresses.
        let wanted = queue.file.is_some() && queue.disk.options.fixed_buffers && !queue.is_client;
        if !wanted || !queue.registered.is_empty() {
            return;
        }
        let memory: Vec<Segment> = queue.ring.memory().mappings().collect();
        // SAFETY: the queue's ring keeps the memory mapped, and it is unregistered before the queue is dropped. That no
        // page is replaced is what the operator said with `fixed_buffers`.
        #[expect(unsafe_code, reason = "the kernel pins the guest's memory")]
        match unsafe { self.engine.register(&memory) } {
            Ok(()) => queue.registered = memory,
            Err(e) => warn!(
                "disk {}: guest memory cannot be pinned ({e}), which fixed-buffers=on asks for; \
                 continuing without (is the limit of locked memory too low?)",
                queue.disk.name
            ),
        }
    }
}
