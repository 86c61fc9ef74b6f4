//! How long requests have been waiting for storage. Nothing is measured as a request is served: another thread asks once a
//! second, if there are requests in flight, and the first time that a request is seen counts.

use block::Engine;

use crate::clock::now_ns;
use crate::worker::Worker;

impl<E: Engine> Worker<E> {
    /// Finds the request of each queue that has been waiting the longest.
    pub fn check_ages(&mut self) {
        let now = now_ns();
        for queue in self.queues.iter_mut() {
            let slots = queue.slots.iter_mut();
            let oldest = slots.filter_map(|(_, s)| s.waits_since(now)).min();
            queue.tally.waits_since(oldest);
        }
        self.waiting.activity.answered_check();
    }
}
