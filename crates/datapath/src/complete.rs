//! Stage 5: from completions of the engine to the status of requests. A short transfer goes on
//! where it ended.

use std::mem;

use crate::blocking_pool::RequestEnd;
use crate::clock::now_ns;
use crate::error_policy;
use crate::queue::Event;
use crate::slot::Redo;
use crate::worker::Worker;
use crate::zeroes;
use block::{Engine, Request};
use guest::blk::Status;

/// Times that an operation is tried again which the kernel had no means for at the moment.
const RETRIES_MAX: u8 = 100;

const EINTR: i32 = -4;
const EAGAIN: i32 = -11;
const EOPNOTSUPP: i32 = -95;

/// What becomes of a request after a completion.
enum AfterCompletion {
    Finish(Status),
    Fail,
    Again,
}

impl<E: Engine> Worker<E> {
    /// Handles what [`wait`](Self::wait) reaped.
    pub fn complete(&mut self) {
        self.reaped_ns = 0;
        for i in 0..self.completions.len() {
            let completion = self.completions[i];
            match Event::from(completion.token) {
                Event::Operation { queue, slot } => {
                    self.complete_one(queue, slot, completion.result);
                }
                Event::Kick { queue } => {
                    if queue < self.queues.len() {
                        self.activate(queue);
                    }
                }
                // `run` looks at the commands.
                Event::Wake => {}
                Event::Timer => self.handle_timer(),
            }
        }
        if self.waiting_for_buffer > 0 {
            self.retry_bounced();
        }
        if mem::take(&mut self.syncs_postponed) {
            self.check_syncs();
        }
        self.reaped_ns = 0;
    }

    #[inline]
    fn complete_one(&mut self, number: usize, slot: u16, result: i32) {
        let Some(queue) = &mut self.queues[number] else {
            debug_assert!(false, "a queue was dropped with operations in flight");
            return;
        };
        let s = queue.slots.get(slot);
        let next = match (result, s.request) {
            (EINTR | EAGAIN, _) if s.retries < RETRIES_MAX => {
                s.retries += 1;
                AfterCompletion::Again
            }
            _ if s.is_syncing => {
                let place = queue.thread_disk;
                return self.sync_ended(place, result);
            }
            (EOPNOTSUPP, Request::WriteZeroes { .. }) if s.detected => {
                zeroes::undo(&queue.disk, s);
                AfterCompletion::Again
            }
            (EOPNOTSUPP, Request::Discard { .. } | Request::WriteZeroes { .. }) => {
                AfterCompletion::Finish(Status::Unsupported)
            }
            (..0, _) => AfterCompletion::Fail,
            // The file ends before the disk does.
            (0, Request::Read { .. } | Request::Write { .. }) => AfterCompletion::Fail,
            (moved, Request::Read { .. } | Request::Write { .. }) => {
                let moved = (moved as u64).min(s.left) as usize;
                s.retries = 0;
                if let Some(mut bounce) = s.bounce.take() {
                    if let Request::Read { .. } = s.request {
                        queue.ring.copy_to(s.segments(), &bounce.bytes()[..moved]);
                    }
                    s.bounce = Some(bounce);
                }
                s.left -= moved as u64;
                match s.left {
                    0 if !queue.pieces.is_empty() => return self.piece_moved(number, slot),
                    0 => AfterCompletion::Finish(Status::Ok),
                    _ => {
                        s.at.0 += moved as u64;
                        s.advance(moved);
                        AfterCompletion::Again
                    }
                }
            }
            _ => AfterCompletion::Finish(Status::Ok),
        };
        match next {
            AfterCompletion::Finish(Status::Ok) => self.moved(number, slot),
            // What completed before it in this batch may have taken the room that it left.
            AfterCompletion::Again => self.submit_or_wait(number, slot),
            AfterCompletion::Fail => self.fail(number, slot, -result, Redo::Operation),
            AfterCompletion::Finish(status) => self.finish(number, slot, status, result),
        }
    }

    /// All that a request moves has been moved. If it changed the disk, and that must be durable first,
    /// it waits for an fdatasync.
    #[inline]
    pub fn moved(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let s = queue.slots.get(slot);
        match s.request {
            Request::Write { .. } | Request::Discard { .. } | Request::WriteZeroes { .. }
                // A write that is stable by itself may be to a cluster that no table in the file leads to yet.
                if queue.disk.completes_when_durable()
                    && (s.unstable || queue.image.chain().is_some_and(|c| c.needs_flush()))
                    // Whatever the cache mode: it may rest on a change that a kill would take back.
                    || queue.image.chain().is_some_and(|c| c.must_flush()) =>
            {
                self.sync_request(number, slot);
            }
            _ => self.finish(number, slot, Status::Ok, 0),
        }
    }

    #[inline]
    pub fn finish(&mut self, number: usize, slot: u16, status: Status, result: i32) {
        self.release_bounce(number, slot);
        if status != Status::Ok
            && self.start_abort(number, slot, RequestEnd::Finish(status, result))
        {
            return;
        }
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        queue.release_piece(slot, &mut self.disks, &mut self.cow_buffers);
        let s = queue.slots.get(slot);
        let written = match status {
            Status::Ok => s.written + 1,
            _ => 1,
        };
        if status != Status::Ok {
            error_policy::report(&queue.disk, s, status, -result);
        }
        let ticket = s.ticket;
        let request = zeroes::asked(s);
        queue.tally.finished(&request, status);
        if s.stamps.fetched > 0 {
            if self.reaped_ns == 0 {
                self.reaped_ns = now_ns();
            }
            queue.tally.measured(&request, s.stamps, self.reaped_ns);
            // One that was stalled has stamps, wanted or not.
            if s.stalled {
                s.stalled = false;
                let thread_disk = self.disks[queue.thread_disk].as_mut();
                error_policy::stalled_ended(&queue.disk, thread_disk, &mut self.timer, status);
            }
        }
        queue.slots.give_back(slot);
        match queue.is_retired() {
            false => queue.ring.complete(&ticket, status as u8, written),
            true => queue.ring.abandon(&ticket),
        }
        match queue.is_running() {
            // The guest is likely to follow up at once.
            true => self.activate(number),
            false => {
                self.notify_queue(number);
                self.finish_stop(number);
            }
        }
    }
}
