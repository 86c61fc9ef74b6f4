//! Between move and complete: requests that must be durable first. Flushes, and, where the guest has
//! no write cache, whatever changed the disk and is not on stable storage by itself.
//!
//! They wait in the order in which they came, and one fdatasync serves all that came before it began:
//! see [`FlushCoalescer`](crate::flush_coalescer::FlushCoalescer) for why that is enough.

use block::Engine;
use guest::blk::Status;

use crate::flush_coalescer::{FlushCoalescer, SyncEnd, SyncTurn};
use crate::slot::Redo;
use crate::thread_disk::SyncWaiter;
use crate::worker::Worker;

impl<E: Engine> Worker<E> {
    /// Completes a request once all that has completed by now is durable, it included.
    pub fn sync_request(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let place = queue.thread_disk;
        queue.slots.get(slot).is_syncing = true;
        // It needs its buffer no more, and may have to wait for long.
        self.release_bounce(number, slot);
        let Some(thread_disk) = &mut self.disks[place] else {
            return;
        };
        thread_disk.sync_waiters.push_back(SyncWaiter {
            number: thread_disk.coalescer().ask(),
            queue: number,
            slot,
        });
        // If others wait already, somebody's fdatasync is under way, and its end leads on.
        if thread_disk.sync_waiters.len() == 1 {
            self.sync(place);
        }
    }

    /// The fdatasync that this thread has begun for a disk has ended.
    pub fn sync_ended(&mut self, place: usize, result: i32) {
        self.end_sync(place, |coalescer| coalescer.end(-result));
    }

    /// The same of an image's flush, with 0 or an errno, and whether that is final.
    pub fn image_flush_ended(&mut self, place: usize, errno: i32, lost: bool) {
        self.end_sync(place, |coalescer| coalescer.end_with(errno, lost));
    }

    fn end_sync(&mut self, place: usize, end: impl FnOnce(&FlushCoalescer) -> SyncEnd) {
        let Some(thread_disk) = &mut self.disks[place] else {
            return;
        };
        thread_disk.syncing = false;
        let ended = end(thread_disk.coalescer());
        self.serve_up_to(place, ended);
        self.sync(place);
    }

    /// Somebody's fdatasync may have ended.
    pub fn check_syncs(&mut self) {
        for place in 0..self.disks.len() {
            if let Some(thread_disk) = &self.disks[place]
                && !thread_disk.sync_waiters.is_empty()
                && !thread_disk.syncing
            {
                let ended = thread_disk.coalescer().ended();
                self.serve_up_to(place, ended);
                self.sync(place);
            }
        }
    }

    /// Begins an fdatasync for those who wait, or sees to it that this thread is woken when it can.
    fn sync(&mut self, place: usize) {
        let Some(thread_disk) = &mut self.disks[place] else {
            return;
        };
        let Some(&SyncWaiter { queue, slot, .. }) = thread_disk.sync_waiters.front() else {
            return;
        };
        if self.engine.room() == 0 {
            // Something is under way then, and its completion looks again.
            self.syncs_postponed = true;
            return;
        }
        match thread_disk.coalescer().take_turn(&self.wake) {
            SyncTurn::Begin => {
                thread_disk.syncing = true;
                self.begin_sync(queue, slot);
            }
            SyncTurn::Wait => {}
            SyncTurn::Lost(result) => {
                let number = u64::MAX;
                self.serve_up_to(place, SyncEnd { number, result });
            }
        }
    }

    /// Completes those that an fdatasync serves.
    fn serve_up_to(&mut self, place: usize, ended: SyncEnd) {
        // The disk is gone from this thread with the last queue that was stopping.
        while let Some(thread_disk) = &mut self.disks[place]
            && let Some(first) = thread_disk.sync_waiters.front()
            && first.number <= ended.number
        {
            let (number, slot) = (first.queue, first.slot);
            thread_disk.sync_waiters.pop_front();
            match ended.result {
                0 => self.finish(number, slot, Status::Ok, 0),
                errno => self.fail(number, slot, errno, Redo::Operation),
            }
        }
    }
}
