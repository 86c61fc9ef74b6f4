//! Stage 6: the guest is shown what was completed, once per batch and queue, and interrupted only
//! if it wants that.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use block::Engine;
use guest::{Blocked, Notifier};
use tracing::warn;

use crate::disk::Disk;
use crate::queue::Queue;
use crate::worker::Worker;

/// How a guest is interrupted.
pub(crate) enum Interrupt {
    /// It polls.
    None,
    /// By a plain write: as an operation on the ring it costs twice as much.
    ByWrite(Arc<OwnedFd>),
    /// With care, since its front-end has held up a thread.
    ByAio(Arc<OwnedFd>),
}

impl Interrupt {
    pub fn new(event: Option<Arc<OwnedFd>>, disk: &Disk) -> Self {
        match event {
            None => Self::None,
            Some(event) if disk.blocks_threads() => Self::ByAio(event),
            Some(event) => Self::ByWrite(event),
        }
    }
}

impl<E: Engine> Worker<E> {
    /// Publishes what was completed this turn. Only active queues can have anything.
    pub fn notify(&mut self) {
        for i in 0..self.active.len() {
            self.notify_queue(self.active[i]);
        }
    }

    #[inline]
    pub fn notify_queue(&mut self, number: usize) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        queue.tally.count(queue.slots.taken());
        let mark_blocking = queue.ring.publish() && queue.interrupt(&self.notifier).is_err();
        if queue.marked.is_some() {
            queue.tell_marks(&self.notifier);
        }
        queue.tally.publish();
        if mark_blocking {
            self.mark_blocking(number);
        }
    }

    /// Has the guest look at its used ring, whether it wants that or not.
    #[cold]
    pub fn interrupt(&mut self, number: usize) {
        if let Some(queue) = &self.queues[number]
            && queue.interrupt(&self.notifier).is_err()
        {
            self.mark_blocking(number);
        }
    }

    /// The front-end has held up this thread, and whoever else is served here. It could again with each queue, each
    /// descriptor that it sends and each connection that it makes.
    #[cold]
    fn mark_blocking(&mut self, number: usize) {
        let Some(disk) = self.queues[number].as_ref().map(|q| q.disk.clone()) else {
            return;
        };
        disk.set_blocks_threads();
        disk.errors.log(|left_out| {
            warn!(
                "disk {}: its front-end has held up an I/O thread, for up to a second, with a call that is full and \
                 blocks; from now on it is signalled so that this cannot happen, which takes more CPU{left_out}",
                disk.name
            );
        });
        for queue in self.queues.iter_mut().flatten() {
            if Arc::ptr_eq(&queue.disk, &disk)
                && let Interrupt::ByWrite(event) = &queue.call
            {
                queue.call = Interrupt::ByAio(event.clone());
            }
        }
    }
}

impl Queue {
    #[inline]
    fn interrupt(&self, notifier: &Notifier) -> Result<(), Blocked> {
        match &self.call {
            Interrupt::ByWrite(event) => notifier.notify(event),
            Interrupt::ByAio(event) => {
                self.notify_by_aio(notifier, event);
                Ok(())
            }
            Interrupt::None => Ok(()),
        }
    }

    /// Tells the front-end that the queue is given up.
    pub fn report(&self, notifier: &Notifier) {
        if let Some(error) = &self.error {
            self.notify_by_aio(notifier, error);
        }
    }

    /// Tells the front-end to look at its dirty log, if there is anything new.
    #[cold]
    fn tell_marks(&mut self, notifier: &Notifier) {
        if self.ring.take_marked()
            && let Some(marked) = &self.marked
        {
            self.notify_by_aio(notifier, marked);
        }
    }

    #[cold]
    fn notify_by_aio(&self, notifier: &Notifier, event: &OwnedFd) {
        if let Err(e) = notifier.notify_by_aio(event) {
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
