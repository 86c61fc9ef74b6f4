//! Stage 6: the guest is shown what was completed, once per batch and queue, and interrupted only
//! if it wants that.

use block::Engine;
use guest::{NotTaken, Signals};
use tracing::warn;

use crate::queue::Queue;
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
        if queue.ring.publish() {
            queue.interrupt(&self.signals);
        }
        if queue.marked.is_some() {
            queue.tell_marks(&self.signals);
        }
        queue.tally.publish();
    }
}

impl Queue {
    /// Has the guest look at its used ring. A plain write: as an operation on the ring it costs twice as much.
    #[inline]
    pub fn interrupt(&mut self, signals: &Signals) {
        if let Some(call) = &self.call
            && let Err(NotTaken) = signals.send(call)
        {
            self.call = None;
            self.not_taken();
        }
    }

    /// Tells the front-end that the queue is given up.
    pub fn report(&mut self, signals: &Signals) {
        if let Some(error) = &self.error
            && let Err(NotTaken) = signals.send(error)
        {
            self.error = None;
            self.not_taken();
        }
    }

    /// Tells the front-end to look at its dirty log.
    #[cold]
    fn tell_marks(&mut self, signals: &Signals) {
        if let Some(marked) = &self.marked
            && let Err(NotTaken) = signals.send(marked)
        {
            self.marked = None;
            self.not_taken();
        }
    }

    #[cold]
    fn not_taken(&self) {
        self.disk.errors.log(|left_out| {
            warn!(
                "disk {}: the front-end holds up the signals of queue {}, which gets no more of them until it is \
                 started again{left_out}",
                self.disk.name,
                self.ring.number(),
            );
        });
    }
}
