//! How long storage has not answered an operation. What counts is the operation, and not its request: a request may also
//! wait for others, for memory or for space. The engine's operations are not timed: another thread asks once a second, if
//! there are requests in flight, and the first time that an operation is seen counts. Jobs of the blocking pool, most of
//! which work with an image's file, are timed.

use block::Engine;

use crate::clock::now_ns;
use crate::worker::Worker;

impl<E: Engine> Worker<E> {
    /// Finds the operation of each queue that storage has not answered for the longest time.
    pub fn check_ages(&mut self) {
        let now = now_ns();
        let jobs = self.blocking_pool.running();
        for number in 0..self.queues.len() {
            let Some(queue) = self.queues.find(number) else {
                continue;
            };
            let its_jobs = jobs.iter().filter(|(id, _)| id.queue == number);
            let job = its_jobs.filter_map(|&(id, since)| {
                let slot = queue.slots.find(id.slot)?;
                Some(since + slot.extra_ns())
            });
            let job = job.min();
            let slots = queue.slots.iter_mut();
            let operation = slots.filter_map(|(_, s)| s.in_engine_since(now)).min();
            let oldest = job.into_iter().chain(operation).min();
            queue.tally.unanswered_since(oldest);
        }
        self.waiting.activity.answered_check();
    }
}
