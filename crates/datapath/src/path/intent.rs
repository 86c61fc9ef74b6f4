//! A request that changes a range which is not noted yet as being written to: it waits until the note is durable, so that
//! the dirty bitmaps survive a power cut, and is then planned again.

use block::Engine;

use crate::clock::now_ns;
use crate::queue::Queue;
use crate::queue::slot::RequestState;
use crate::request::RequestId;
use crate::resources::blocking_pool::{Job, JobResult};
use crate::worker::Worker;

/// What the blocking pool does for the request. One note serves all requests that wait.
#[cold]
pub(crate) fn note(queue: &mut Queue, slot: u16) -> Job {
    let s = queue.slots.get(slot);
    s.state = RequestState::Noting;
    let range = s.request.range();
    let intent = queue.bitmaps.intent();
    Box::new(move || {
        if let (Some(intent), Some((at, len))) = (intent, range) {
            intent.note(at.0, len);
        }
        JobResult::Noted
    })
}

impl<E: Engine> Worker<E> {
    /// Plans a request whose range has been noted.
    #[cold]
    pub(super) fn plan_noted(&mut self, id: RequestId) {
        let stamps = &mut self.queues.get(id.queue).slots.get(id.slot).stamps;
        if stamps.fetched > 0 {
            stamps.submitted = now_ns();
        }
        self.plan(id);
        // It may have ended at once.
        if (self.queues.find(id.queue)).is_some_and(|queue| !queue.is_running()) {
            self.notify_queue(id.queue);
            self.finish_stop(id.queue);
        }
    }
}
