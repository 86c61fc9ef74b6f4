//! Stage 1: from the available rings to parsed requests, a bounded batch at a time.

use block::{Discard, Request, Segment};
use guest::blk::{self, Status};
use guest::{Chain, Notifier, RingError};
use tracing::warn;

use crate::disk::Disk;
use crate::queue::{Queue, QueueState};
use crate::stats::Stamps;
use crate::worker::CHUNK_MAX;

/// Operations submitted in one turn for one queue that has none in flight. An idle device is given something to do soon,
/// rather than much of it later.
const CHUNK_FIRST: usize = 4;

/// While the storage works on one operation, this many more can be built.
const CHUNK_GROWTH: usize = 4;

/// Operations to submit in one turn for a queue with this many `in_flight`. Each turn costs a doorbell, so there are as few
/// turns as keep the storage busy: a burst of 32 is submitted as 4, 16 and 12.
#[inline]
fn chunk(in_flight: usize) -> usize {
    (in_flight * CHUNK_GROWTH).clamp(CHUNK_FIRST, CHUNK_MAX)
}

/// The same where operations are done when `submit` returns, so that no device idles: half of what waits, within these
/// bounds. The guest works on one half while the thread is at the other, and is interrupted less often the more there is.
const CHUNK_INSTANT_MIN: usize = 2;
pub(crate) const CHUNK_INSTANT_MAX: usize = 32;

/// Most requests fetched in one turn from one queue, with those that need no operation: the other queues wait meanwhile.
pub(crate) const BATCH: usize = 64;

/// The guest is told after this many requests that need no operation: it works on these while the thread is at the next.
pub(crate) const PUBLISH: usize = 8;

/// Operations to submit in one turn for a queue. `is_instant` if the last operations were done when `submit` returned.
#[inline]
pub(crate) fn chunk_size(waiting: usize, in_flight: usize, is_instant: bool) -> usize {
    if is_instant {
        (waiting / 2).clamp(CHUNK_INSTANT_MIN, CHUNK_INSTANT_MAX)
    } else {
        chunk(in_flight)
    }
}

/// What a batch needs beyond being served.
#[derive(Clone, Copy, Default)]
pub(crate) struct BatchNeeds {
    /// A limit may hold its requests back.
    pub is_limited: bool,
    /// Old data is preserved before it is changed.
    pub preserves: bool,
    /// When it was fetched, if it is measured.
    pub stamps: Stamps,
}

impl BatchNeeds {
    pub fn of(queue: &Queue) -> Self {
        Self {
            is_limited: queue.admission.limits_any(),
            preserves: queue.fleece.is_some(),
            stamps: Stamps::all(queue.disk.statistics.stamp()),
        }
    }

    pub fn is_none(&self) -> bool {
        !self.is_limited && !self.preserves && self.stamps.fetched == 0
    }
}

/// What fetching left behind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FetchResult {
    /// There were no requests.
    Nothing,
    /// There were requests, but no room: an operation must complete first.
    NoRoom,
    /// All requests were fetched.
    All,
    /// A bounded batch was fetched: there are more.
    More,
}

/// The guest's buffers of a chain that was fetched into `scratch`, without header and status: those that the guest lets
/// ringdisk read, and those that it lets ringdisk write to.
#[inline(always)]
pub(crate) fn buffers<'a>(chain: &Chain, scratch: &'a [Segment]) -> (&'a [Segment], &'a [Segment]) {
    let (readable, rest) = scratch.split_at(usize::from(chain.readable));
    (readable, &rest[..usize::from(chain.writable)])
}

/// Parses a request that was fetched. It may unmap only where the operator lets it. `None` if the disk does not allow the
/// request, and it was refused.
#[inline(always)]
pub(crate) fn parse(queue: &mut Queue, chain: &Chain, readable: &[Segment]) -> Option<Request> {
    let Queue {
        disk, ring, tally, ..
    } = queue;
    let payload = |to: &mut [u8; 16]| ring.copy_from(readable, to);
    match blk::parse(chain, disk.size(), &disk.facts, payload) {
        Ok(Request::WriteZeroes { at, len, unmap }) => Some(Request::WriteZeroes {
            at,
            len,
            unmap: unmap && disk.options.discard == Discard::Unmap,
        }),
        Ok(request) => Some(request),
        Err(status) => {
            tally.refused();
            refused(disk, chain);
            ring.complete(&chain.ticket(), status as u8, 1);
            None
        }
    }
}

/// Answers a request for the disk's serial.
pub(crate) fn answer_id(queue: &mut Queue, chain: &Chain, writable: &[Segment]) {
    let written = queue.ring.copy_to(writable, &queue.disk.id) as u32;
    let ticket = chain.ticket();
    queue.ring.complete(&ticket, Status::Ok as u8, written + 1);
}

/// Stops fetching from a queue whose ring cannot be trusted, until the driver resets it. Requests in flight are served to
/// their end and are not completed. A buffer that is not in guest memory says nothing against the ring: front-ends take
/// memory away for a moment, and put it back.
pub(crate) fn retire(queue: &mut Queue, reason: &RingError, notifier: &Notifier) {
    let (state, until) = match reason {
        RingError::Buffer(..) => (
            QueueState::Unmapped,
            "its front-end maps memory there, or the guest resets the device",
        ),
        _ => (QueueState::Retired, "the guest resets the device"),
    };
    queue.state = state;
    let disk = &queue.disk;
    disk.guest_errors.log(|left_out| {
        warn!(
            "disk {}: queue {} is given up at position {:#x} until {until}: {reason}{left_out}",
            disk.name,
            queue.ring.number(),
            queue.ring.base().0,
        );
    });
    super::notify::report_error(queue, notifier);
}

#[cold]
fn refused(disk: &Disk, chain: &Chain) {
    disk.guest_errors.log(|left_out| {
        warn!(
            "disk {}: refused request {:02x?} with {} bytes out and {} in: a disk of {} bytes does \
             not allow it{left_out}",
            disk.name,
            chain.header,
            chain.readable_len,
            chain.writable_len,
            disk.size(),
        );
    });
}

#[cfg(test)]
mod tests {
    use guest::Virtqueue;

    use super::*;

    #[test]
    fn chunks_grow_with_what_is_in_flight() {
        let chunks = |burst: usize| {
            let mut chunks = Vec::new();
            let mut in_flight = 0;
            while in_flight < burst {
                let next = chunk(in_flight).min(burst - in_flight);
                chunks.push(next);
                in_flight += next;
            }
            chunks
        };
        assert_eq!(chunks(1), [1]);
        assert_eq!(chunks(32), [4, 16, 12]);
        assert_eq!(chunks(128), [4, 16, 32, 32, 32, 12]);
        assert_eq!(chunk(usize::from(Virtqueue::MAX_SIZE)), CHUNK_MAX);
    }
}
