//! Between move and complete: requests that must be durable first. Flushes, and, where the guest has
//! no write cache, whatever changed the disk and is not on stable storage by itself.
//!
//! They wait in the order in which they came, and one fdatasync serves all that came before it began:
//! see [`Syncs`](crate::syncs::Syncs) for why that is enough.

use block::Engine;
use guest::blk::Status;

use crate::local::Unsettled;
use crate::slot::Redo;
use crate::syncs::{Ended, Syncs, Turn};
use crate::worker::Worker;

impl<E: Engine> Worker<E> {
    /// Completes a request once all that has completed by now is durable, it included.
    pub fn settle(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let place = queue.local;
        queue.slots.get(slot).settling = true;
        // It needs its buffer no more, and may have to wait for long.
        self.release_bounce(number, slot);
        let Some(local) = &mut self.locals[place] else {
            return;
        };
        local.unsettled.push_back(Unsettled {
            number: local.syncs().ask(),
            queue: number,
            slot,
        });
        // If others wait already, somebody's fdatasync is under way, and its end leads on.
        if local.unsettled.len() == 1 {
            self.sync(place);
        }
    }

    /// The fdatasync that this thread has begun for a disk has ended.
    pub fn synced(&mut self, place: usize, result: i32) {
        self.end_sync(place, |syncs| syncs.end(-result));
    }

    /// The same of an image's flush, with 0 or an errno, and whether that is final.
    pub fn flushed(&mut self, place: usize, errno: i32, lost: bool) {
        self.end_sync(place, |syncs| syncs.end_with(errno, lost));
    }

    fn end_sync(&mut self, place: usize, end: impl FnOnce(&Syncs) -> Ended) {
        let Some(local) = &mut self.locals[place] else {
            return;
        };
        local.syncing = false;
        let ended = end(local.syncs());
        self.serve_up_to(place, ended);
        self.sync(place);
    }

    /// Somebody's fdatasync may have ended.
    pub fn look_at_syncs(&mut self) {
        for place in 0..self.locals.len() {
            if let Some(local) = &self.locals[place]
                && !local.unsettled.is_empty()
                && !local.syncing
            {
                let ended = local.syncs().ended();
                self.serve_up_to(place, ended);
                self.sync(place);
            }
        }
    }

    /// Begins an fdatasync for those who wait, or sees to it that this thread is woken when it can.
    fn sync(&mut self, place: usize) {
        let Some(local) = &mut self.locals[place] else {
            return;
        };
        let Some(&Unsettled { queue, slot, .. }) = local.unsettled.front() else {
            return;
        };
        if self.engine.room() == 0 {
            // Something is under way then, and its completion looks again.
            self.syncs_postponed = true;
            return;
        }
        match local.syncs().take_turn(&self.wake) {
            Turn::Begin => {
                local.syncing = true;
                self.begin_sync(queue, slot);
            }
            Turn::Wait => {}
            Turn::Lost(result) => {
                let number = u64::MAX;
                self.serve_up_to(place, Ended { number, result });
            }
        }
    }

    /// Completes those that an fdatasync serves.
    fn serve_up_to(&mut self, place: usize, ended: Ended) {
        // The disk is gone from this thread with the last queue that was stopping.
        while let Some(local) = &mut self.locals[place]
            && let Some(first) = local.unsettled.front()
            && first.number <= ended.number
        {
            let (number, slot) = (first.queue, first.slot);
            local.unsettled.pop_front();
            match ended.result {
                0 => self.finish(number, slot, Status::Ok, 0),
                errno => self.fail(number, slot, errno, Redo::Operation),
            }
        }
    }
}
