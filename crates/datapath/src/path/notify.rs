//! Stage 9: the guest is shown what was completed, once per batch and queue, and interrupted only if it wants that.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest::{Blocked, Notifier};
use tracing::warn;

use crate::disk::Disk;
use crate::queue::{Interrupt, Queue, Queues};

/// Publishes what was completed for a queue.
///
/// # Errors
/// The front-end has blocked this thread, and all other front-ends that are served here.
#[inline(always)]
pub(crate) fn publish(queue: &mut Queue, notifier: &Notifier) -> Result<(), Blocked> {
    queue.tally.count(queue.slots.taken());
    let interrupted = if queue.ring.publish() {
        interrupt(queue, notifier)
    } else {
        Ok(())
    };
    if queue.marked.is_some() {
        tell_marks(queue, notifier);
    }
    queue.tally.publish();
    interrupted
}

/// Interrupts the guest, whether it wants that or not.
///
/// # Errors
/// As for [`publish`].
#[inline]
pub(crate) fn interrupt(queue: &Queue, notifier: &Notifier) -> Result<(), Blocked> {
    match &queue.interrupt {
        Interrupt::ByWrite(event) => notifier.notify(event),
        Interrupt::ByAio(event) => {
            notify_by_aio(queue, notifier, event);
            Ok(())
        }
        Interrupt::None => Ok(()),
    }
}

/// From now on, signals the front-end of a disk without blocking, on all its queues. It could block a thread again with each
/// queue, each descriptor that it sends and each connection that it makes.
#[cold]
pub(crate) fn avoid_blocking(queues: &mut Queues, disk: &Arc<Disk>) {
    disk.set_blocks_threads();
    disk.guest_errors.log(|left_out| {
        warn!(
            "disk {}: its front-end has blocked an I/O thread, for up to a second: its call eventfd was full; from now \
             on ringdisk signals it without blocking, which takes more CPU{left_out}",
            disk.name
        );
    });
    for queue in queues.iter_mut() {
        if Arc::ptr_eq(&queue.disk, disk)
            && let Interrupt::ByWrite(event) = &queue.interrupt
        {
            queue.interrupt = Interrupt::ByAio(event.clone());
        }
    }
}

/// Tells the front-end that the queue is no longer served.
pub(crate) fn report_error(queue: &Queue, notifier: &Notifier) {
    if let Some(error) = &queue.error {
        notify_by_aio(queue, notifier, error);
    }
}

/// Tells the front-end to look at its dirty log, if there is anything new.
#[cold]
fn tell_marks(queue: &mut Queue, notifier: &Notifier) {
    if queue.ring.take_marked()
        && let Some(marked) = &queue.marked
    {
        notify_by_aio(queue, notifier, marked);
    }
}

#[cold]
fn notify_by_aio(queue: &Queue, notifier: &Notifier, event: &OwnedFd) {
    if let Err(e) = notifier.notify_by_aio(event) {
        queue.disk.guest_errors.log(|left_out| {
            warn!(
                "disk {}: a signal to the front-end of queue {} is lost: {e} (is fs.aio-max-nr too \
                 low?){left_out}",
                queue.disk.name,
                queue.ring.number(),
            );
        });
    }
}
