//! What is done about requests that storage failed to serve: `report`, `enospc`, `stop`, `retry`.
//!
//! A request that is not reported is *stalled* ([`fail`](crate::path::fail)): it keeps its slot, with where it was, and
//! waits in the thread's list for the disk. It continues from there when its pause is over, when another request of the
//! disk has been served on this thread, or when the operator resumes the disk. The pause grows until something is served.
//!
//! With `stop`, what the guest sends after a failure waits as well: reads, writes and discards in
//! [admit](crate::path::admit), as behind a limit. A flush makes durable what has completed, and is not held.
//!
//! A stalled request blocks nothing else: it gives its bounce buffer back, and when its queue stops, it is left. Where the
//! front-end keeps a record of requests in flight, the next server of the ring does it again. Otherwise the guest is told
//! of the error, because no other server would ever answer the request.
//!
//! An operation that the kernel still works on cannot be left: it would write to the guest's memory, or an old write would
//! land on a newer one. A queue that stops waits for it, up to its disk's stop timeout. Then the queue is *abandoned*: its
//! memory stays mapped, and no queue of the disk starts in this process before the operation has ended. The lock on the
//! file keeps other processes away for the same time.

use std::borrow::Borrow;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block::{Engine, Request};
use guest::StoppedRing;
use rustix::io::Errno;
use tracing::{error, info, warn};

use crate::clock::now_ns;
use crate::command::Command;
use crate::disk::Disk;
use crate::path::next::Next;
use crate::path::{fail, mapped, submit};
use crate::queue::QueueState;
use crate::queue::slot::RequestState;
use crate::request::{Ending, RequestId, Retry};
use crate::resources::blocking_pool::AbortEnd;
use crate::thread::IoThread;
use crate::thread_disk::RetryTime;
use crate::worker::Worker;

/// Pause where an operation must end first, so that there is room for another.
const NO_ROOM_NS: u64 = 1_000_000;

impl Disk {
    /// Continues requests that wait because storage failed to serve them: they are tried again at once, or, with `report`,
    /// the guest is told of their errors. `threads` are those that serve the disk.
    pub fn resume(self: &Arc<Self>, threads: &[impl Borrow<IoThread>], report: bool) {
        self.admission.set_stopped(false);
        self.send_resume(threads, report);
    }

    /// Tries requests again that wait because storage failed to serve them, unless they wait for the operator.
    pub fn retry(self: &Arc<Self>, threads: &[impl Borrow<IoThread>]) {
        if !self.is_stopped() {
            self.send_resume(threads, false);
        }
    }

    fn send_resume(self: &Arc<Self>, threads: &[impl Borrow<IoThread>], report: bool) {
        for thread in threads {
            thread.borrow().send(Command::Resume {
                disk: self.clone(),
                report,
            });
        }
    }

    /// The last operation of an abandoned queue has ended.
    pub(crate) fn answered(&self) {
        if self.outage.abandoned.fetch_sub(1, Ordering::Relaxed) == 1 {
            info!(
                "disk {}: its storage has answered the last operation; it can be served again",
                self.name
            );
        }
    }
}

impl<E: Engine> Worker<E> {
    /// A request was stalled.
    #[cold]
    pub fn stalled(&mut self, id: RequestId) {
        let queue = self.queues.get(id.queue);
        submit::release_bounce(
            queue.slots.get(id.slot),
            queue.thread_disk,
            &mut self.disks,
            &mut self.buffers.bounce,
        );
        let (disk, is_stopping) = (queue.disk.clone(), queue.is_stopping());
        // The disk will not be without requests in flight for long.
        self.cancel_pauses(&disk);
        if is_stopping {
            self.leave_stalled(id.queue);
        }
    }

    /// Tries stalled requests again whose pause is over, and abandons queues that have waited for as long as they may.
    #[cold]
    pub fn handle_timer(&mut self) {
        let now = now_ns();
        for index in 0..self.disks.len() {
            match self.disks.find(index).map(|disk| disk.stalled.at) {
                Some(RetryTime::At(at)) if at > now => self.timer.set(now, at),
                Some(RetryTime::At(_)) => self.retry_stalled(index, now),
                _ => {}
            }
        }
        for number in 0..self.queues.len() {
            match self.queues.find(number).map(|queue| &queue.state) {
                Some(&QueueState::Stopping { until, .. }) if until > now => {
                    self.timer.set(now, until);
                }
                Some(QueueState::Stopping { .. }) => self.abandon_queue(number),
                _ => {}
            }
        }
    }

    fn retry_stalled(&mut self, index: usize, now: u64) {
        let stalled = &mut self.disks.get(index).stalled;
        stalled.at = RetryTime::Unset;
        for _ in 0..stalled.waiting.len() {
            // The last queue of the disk may stop with one of them.
            let Some(disk) = self.disks.find(index) else {
                return;
            };
            if self.engine.room() == 0 {
                let at = now + NO_ROOM_NS;
                disk.stalled.at = RetryTime::At(at);
                return self.timer.set(now, at);
            }
            if let Some(id) = disk.stalled.waiting.pop_front() {
                self.retry(id);
            }
        }
    }

    fn retry(&mut self, id: RequestId) {
        let queue = self.queues.get(id.queue);
        let s = queue.slots.get(id.slot);
        if !matches!(s.request, Request::Read { .. }) {
            queue.bitmaps.note_again();
        }
        let RequestState::Stalled(retry) = s.state else {
            unreachable!("it waits because it is stalled");
        };
        s.retries = 0;
        s.state = match retry {
            Retry::Operation | Retry::Commit => RequestState::Moving,
            Retry::Fill => RequestState::Filling,
            Retry::Piece => RequestState::Mapping,
            Retry::Sync => RequestState::Syncing,
        };
        let next = match retry {
            Retry::Operation | Retry::Fill => Next::Submit,
            Retry::Sync => Next::Sync,
            Retry::Piece => Next::Map,
            Retry::Commit => self.mapped(id).retry_commit(),
        };
        self.advance(id, next);
    }

    /// The operator has resumed the disk: stalled requests are tried again at once, or, with `report`, the guest is told
    /// of the errors.
    pub fn resume(&mut self, disk: &Arc<Disk>, report: bool) {
        let now = now_ns();
        for queue in self.queues.iter_mut() {
            if Arc::ptr_eq(&queue.disk, disk) {
                queue.held.ask_limits_again();
            }
        }
        let Some(index) = self.disks.index_of(disk) else {
            return;
        };
        if !report {
            return self.retry_stalled(index, now);
        }
        let stalled = &mut self.disks.get(index).stalled;
        for id in mem::take(&mut stalled.waiting) {
            self.finish(id, Ending::io_error(Errno::IO.raw_os_error()));
        }
    }

    /// Leaves the stalled requests of a queue that stops.
    pub fn leave_stalled(&mut self, number: usize) {
        let queue = self.queues.get(number);
        let is_tracked = queue.ring.is_tracked();
        let mut left = Vec::new();
        self.disks
            .get(queue.thread_disk)
            .stalled
            .waiting
            .retain(|id| {
                let stays = id.queue != number;
                left.extend((!stays).then_some(id.slot));
                stays
            });
        if queue.disk.is_stopped() {
            queue.held.drain(&mut left);
        }
        if left.is_empty() {
            return;
        }
        let name = &queue.disk.name;
        if is_tracked {
            info!(
                "disk {name}: queue {} stops with {} requests that storage failed to serve; the next \
                 server of the queue does them again",
                queue.ring.number(),
                left.len()
            );
        } else {
            warn!(
                "disk {name}: queue {} stops with {} requests that storage failed to serve; the guest is told \
                 of the errors, since its front-end keeps no record of requests in flight",
                queue.ring.number(),
                left.len()
            );
        }
        for slot in left {
            let id = RequestId::new(number, slot);
            if !is_tracked {
                self.finish(id, Ending::io_error(Errno::IO.raw_os_error()));
                continue;
            }
            match mapped::abort(self.queues.get(number), slot, AbortEnd::Leave) {
                Some(job) => self.advance(id, Next::StartJob(job)),
                None => self.leave(id),
            }
        }
        self.finish_stop(number);
    }

    /// Gives up a request without an answer: the next server of the ring does it again.
    pub fn leave(&mut self, id: RequestId) {
        let queue = self.queues.get(id.queue);
        mapped::release(queue, id.slot, &mut self.disks, &mut self.buffers);
        if mem::take(&mut queue.slots.get(id.slot).counts_as_stalled) {
            queue.disk.outage.leave(|| fail::served(&queue.disk));
        }
        queue.slots.give_back(id.slot);
        queue.has_unfinished = true;
    }

    /// Abandons a queue whose storage does not answer: the session that waits for it to stop continues.
    fn abandon_queue(&mut self, number: usize) {
        let queue = self.queues.get(number);
        let in_flight = queue.slots.taken();
        queue.held.drop_all(&mut queue.slots);
        let state = mem::replace(&mut queue.state, QueueState::Abandoned);
        let QueueState::Stopping { reply, .. } = state else {
            unreachable!("only a queue that stops is abandoned");
        };
        queue.disk.outage.abandoned.fetch_add(1, Ordering::Relaxed);
        error!(
            "disk {}: its storage does not answer: queue {} stops with {in_flight} requests in flight{}; \
             no front-end is served until they have ended",
            queue.disk.name,
            queue.ring.number(),
            if queue.ring.is_tracked() {
                ", which are done again when the queue is served again"
            } else {
                ", which the guest gets no answer to"
            },
        );
        let base = queue.ring.base();
        self.notify_queue(number);
        let _ = reply.send(StoppedRing {
            base,
            unfinished: true,
        });
        // Some were only waiting for a limit.
        self.finish_stop(number);
    }
}
