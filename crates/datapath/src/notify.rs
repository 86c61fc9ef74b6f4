//! Stage 6: the guest is shown what was completed, once per batch and queue, and interrupted only
//! if it wants that.

use std::os::fd::OwnedFd;

use block::Engine;

use crate::worker::Worker;

impl<E: Engine> Worker<E> {
    /// Publishes what was completed this turn. Only hot queues can have anything.
    pub fn notify(&mut self) {
        for i in 0..self.hot.len() {
            self.notify_queue(self.hot[i]);
        }
    }

    #[inline]
    pub fn notify_queue(&mut self, number: usize) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        queue.tally.count(queue.slots.taken());
        if queue.ring.publish()
            && let Some(call) = &queue.call
        {
            signal(call);
        }
        queue.tally.publish();
    }
}

/// Adds one to an event counter. A plain write: as an operation on the ring it costs twice as much.
/// A counter that is full is as good as one that was written to.
pub(crate) fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}
