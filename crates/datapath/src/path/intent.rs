//! A request that changes a range which is not noted yet as being written to: it waits until the note is durable, so that
//! the dirty bitmaps survive a power cut, and is then planned again.

use crate::queue::Queue;
use crate::queue::slot::RequestState;
use crate::resources::blocking_pool::{Job, JobResult};

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
