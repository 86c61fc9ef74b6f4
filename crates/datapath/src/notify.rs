//! Stage 6: the guest is shown what was completed, once per batch and queue, and interrupted only
//! if it wants that.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use block::Engine;
use guest::{HeldUp, Signals};
use tracing::warn;

use crate::disk::Disk;
use crate::queue::Queue;
use crate::worker::Worker;

/// How a guest is interrupted.
pub(crate) enum Call {
    /// It polls.
    None,
    /// By a plain write: as an operation on the ring it costs twice as much.
    Written(Arc<OwnedFd>),
    /// With care, since its front-end has held up a thread.
    WithCare(Arc<OwnedFd>),
}

impl Call {
    pub fn new(event: Option<Arc<OwnedFd>>, disk: &Disk) -> Self {
        match event {
            None => Self::None,
            Some(event) if disk.holds_up() => Self::WithCare(event),
            Some(event) => Self::Written(event),
        }
    }
}

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
        let held_up = queue.ring.publish() && queue.interrupt(&self.signals).is_err();
        if queue.marked.is_some() {
            queue.tell_marks(&self.signals);
        }
        queue.tally.publish();
        if held_up {
            self.held_up(number);
        }
    }

    /// Has the guest look at its used ring, whether it wants that or not.
    #[cold]
    pub fn interrupt(&mut self, number: usize) {
        if let Some(queue) = &self.queues[number]
            && queue.interrupt(&self.signals).is_err()
        {
            self.held_up(number);
        }
    }

    /// The front-end has held up this thread, and whoever else is served here. It could again with each queue, each
    /// descriptor that it sends and each connection that it makes.
    #[cold]
    fn held_up(&mut self, number: usize) {
        let Some(disk) = self.queues[number].as_ref().map(|q| q.disk.clone()) else {
            return;
        };
        disk.set_holds_up();
        disk.errors.log(|left_out| {
            warn!(
                "disk {}: its front-end has held up an I/O thread, for up to a second, with a call that is full and \
                 blocks; from now on it is signalled so that this cannot happen, which takes more CPU{left_out}",
                disk.name
            );
        });
        for queue in self.queues.iter_mut().flatten() {
            if Arc::ptr_eq(&queue.disk, &disk)
                && let Call::Written(event) = &queue.call
            {
                queue.call = Call::WithCare(event.clone());
            }
        }
    }
}

impl Queue {
    #[inline]
    fn interrupt(&self, signals: &Signals) -> Result<(), HeldUp> {
        match &self.call {
            Call::Written(event) => signals.send(event),
            Call::WithCare(event) => {
                self.send_with_care(signals, event);
                Ok(())
            }
            Call::None => Ok(()),
        }
    }

    /// Tells the front-end that the queue is given up.
    pub fn report(&self, signals: &Signals) {
        if let Some(error) = &self.error {
            self.send_with_care(signals, error);
        }
    }

    /// Tells the front-end to look at its dirty log, if there is anything new.
    #[cold]
    fn tell_marks(&mut self, signals: &Signals) {
        if self.ring.take_marked()
            && let Some(marked) = &self.marked
        {
            self.send_with_care(signals, marked);
        }
    }

    #[cold]
    fn send_with_care(&self, signals: &Signals, event: &OwnedFd) {
        if let Err(e) = signals.send_with_care(event) {
            self.disk.errors.log(|left_out| {
                warn!(
                    "disk {}: a signal to the front-end of queue {} is lost: {e} (is fs.aio-max-nr too \
                     low?){left_out}",
                    self.disk.name,
                    self.ring.number(),
                );
            });
        }
    }
}
