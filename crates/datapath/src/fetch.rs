//! Stage 1: from the available rings to slots and operations, a bounded batch at a time.

use std::mem;

use block::{Engine, FileOffset, Request};
use guest::blk::{self, Status};
use guest::{Chain, RingError};
use tracing::warn;

use crate::admit::HeldRequests;
use crate::clock::now_ns;
use crate::disk::Disk;
use crate::plan::{self, Plan};
use crate::queue::{Queue, QueueState};
use crate::stats::Stamps;
use crate::worker::Worker;

/// Operations submitted in one turn for one queue that has nothing under way. Storage that idles is
/// given something to do soon, rather than much of it later.
const CHUNK_FIRST: usize = 4;

/// While the storage works on one operation, this many more can be built.
const CHUNK_GROWTH: usize = 4;

/// Most operations submitted in one turn for one queue, so that completions are looked at meanwhile.
pub(crate) const CHUNK_MAX: usize = 32;

/// Operations to submit in one turn for a queue with `under_way`. Each turn costs a doorbell, so there
/// are as few as keep the storage busy: a burst of 32 goes as 4, 16 and 12.
#[inline]
fn chunk(under_way: usize) -> usize {
    (under_way * CHUNK_GROWTH).clamp(CHUNK_FIRST, CHUNK_MAX)
}

/// The same where operations are done as soon as they are handed over, so that no storage idles: half
/// of what waits, within these bounds. The guest works on one half while we are at the other, and is
/// interrupted less often the more there is.
const CHUNK_INSTANT_MIN: usize = 2;
const CHUNK_INSTANT_MAX: usize = 32;

/// Requests fetched in one turn from one queue, with those that need no operation: the other queues
/// wait meanwhile.
const BATCH: usize = 64;

/// Requests that need no operation, after which the guest is told of them: it works on these while
/// we are at the next.
const PUBLISH: usize = 8;

/// What is wanted of a batch beside that it is served.
#[derive(Clone, Copy, Default)]
struct BatchNeeds {
    /// Requests may have to wait for leave to go on.
    limited: bool,
    /// When they were fetched, if they are measured.
    stamps: Stamps,
}

impl BatchNeeds {
    fn is_none(&self) -> bool {
        !self.limited && self.stamps.fetched == 0
    }
}

/// What fetching left behind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FetchResult {
    /// Nothing was there.
    Nothing,
    /// Something was, but for want of room nothing was taken: an operation must complete first.
    Full,
    /// All that was there.
    All,
    /// A bounded batch: there is more.
    More,
}

impl<E: Engine> Worker<E> {
    /// Takes requests from every active queue and submits their operations.
    pub fn fetch(&mut self) -> FetchResult {
        let mut result = FetchResult::Nothing;
        // Where there may not be room for all, the first must not always be the same.
        if self.active.len() > 1 && self.engine.room() < self.active.len() * CHUNK_INSTANT_MAX {
            self.active.rotate_left(1);
        }
        // By index: a queue that is retired leaves the list.
        let mut i = 0;
        while i < self.active.len() {
            let number = self.active[i];
            match self.fetch_queue(number) {
                Ok(FetchResult::Nothing) => {}
                Ok(fetched) => result = result.max(fetched),
                Err(e) => {
                    self.retire(number, &e);
                    continue;
                }
            }
            i += 1;
        }
        result
    }

    fn fetch_queue(&mut self, number: usize) -> Result<FetchResult, RingError> {
        let fetched = self.fetch_some(number);
        // Also if the ring cannot be trusted: these were taken before that showed.
        self.start_taken(number);
        fetched
    }

    fn fetch_some(&mut self, number: usize) -> Result<FetchResult, RingError> {
        let Some(queue) = &mut self.queues[number] else {
            return Ok(FetchResult::Nothing);
        };
        let waiting = usize::from(queue.ring.available()?);
        if waiting == 0 {
            return Ok(FetchResult::Nothing);
        }
        if queue.slots.taken() == 0
            && let Some(thread_disk) = &mut self.disks[queue.thread_disk]
        {
            self.poller.came(&mut thread_disk.estimator, now_ns);
        }
        let chunk = match self.instant {
            true => (waiting / 2).clamp(CHUNK_INSTANT_MIN, CHUNK_INSTANT_MAX),
            false => chunk(queue.slots.taken()),
        };
        let needs = BatchNeeds {
            limited: queue.disk.admission.limits_any(),
            stamps: Stamps::all(queue.disk.statistics.stamp()),
        };
        match needs.is_none() {
            true => self.fetch_batch::<false>(number, waiting, chunk, needs),
            false => self.fetch_with_needs(number, waiting, chunk, needs),
        }
    }

    #[inline(never)]
    fn fetch_with_needs(
        &mut self,
        number: usize,
        waiting: usize,
        chunk: usize,
        needs: BatchNeeds,
    ) -> Result<FetchResult, RingError> {
        self.fetch_batch::<true>(number, waiting, chunk, needs)
    }

    /// Up to `chunk` operations of the requests that wait. Twice in the program, so that where nothing special is
    /// wanted, nothing of it is looked at for each request.
    #[inline]
    fn fetch_batch<const HAS_NEEDS: bool>(
        &mut self,
        number: usize,
        waiting: usize,
        chunk: usize,
        needs: BatchNeeds,
    ) -> Result<FetchResult, RingError> {
        let BatchNeeds { limited, stamps } = match HAS_NEEDS {
            true => needs,
            false => BatchNeeds::default(),
        };
        let mut submitted = 0;
        let mut fetched = 0;
        while fetched < waiting.min(BATCH) && submitted < chunk {
            let Some(queue) = &mut self.queues[number] else {
                break;
            };
            // There is always a slot, unless the ring is larger than the table, or the guest made a descriptor
            // available twice.
            if queue.slots.none_free() || self.engine.room() <= self.starting.len() {
                break;
            }
            let Queue {
                disk,
                image,
                ring,
                slots,
                held,
                tally,
                ..
            } = queue;
            fetched += 1;
            let chain = ring.fetch(&mut self.scratch[..ring.max_segments()])?;
            let (readable, rest) = self.scratch.split_at(usize::from(chain.readable));
            let writable = &rest[..usize::from(chain.writable)];
            let payload = |to: &mut [u8; 16]| ring.copy_from(readable, to);
            let request = match blk::parse(&chain, disk.size(), &disk.facts, payload) {
                Ok(request) => request,
                Err(status) => {
                    tally.refused();
                    refused(disk, &chain);
                    ring.complete(&chain.ticket(), status as u8, 1);
                    continue;
                }
            };
            let segments = match request {
                Request::Read { .. } => writable,
                _ => readable,
            };
            if limited {
                if HeldRequests::concerns(&request) {
                    if held.is_empty() {
                        self.throttled_queues.push(number);
                    }
                    held.pause(slots, chain.ticket(), request, segments, stamps.fetched);
                    continue;
                }
                held.note_unlimited(now_ns());
            }
            match plan::plan(disk, image, request) {
                Plan::Done(status, written) => {
                    tally.answered(&request, status, stamps);
                    ring.complete(&chain.ticket(), status as u8, written + 1);
                }
                Plan::Id => {
                    let written = ring.copy_to(writable, &disk.id) as u32;
                    ring.complete(&chain.ticket(), Status::Ok as u8, written + 1);
                }
                Plan::Pieces(request) => {
                    let at = FileOffset(0);
                    let slot = slots.take(chain.ticket(), request, at, segments, stamps);
                    self.starting.push(slot);
                    submitted += 1;
                    continue;
                }
                Plan::Operation(request, at) => {
                    let slot = slots.take(chain.ticket(), request, at, segments, stamps);
                    self.submit(number, slot);
                    submitted += 1;
                    continue;
                }
            }
            if fetched % PUBLISH == 0 {
                self.notify_queue(number);
            }
        }
        Ok(match fetched {
            0 => FetchResult::Full,
            n if n < waiting => FetchResult::More,
            _ => FetchResult::All,
        })
    }

    /// Starts the requests that were fetched from a queue.
    #[inline]
    fn start_taken(&mut self, number: usize) {
        if self.starting.is_empty() {
            return;
        }
        let mut starting = mem::take(&mut self.starting);
        if starting.len() > 1
            && let Some(Queue { image, slots, .. }) = &mut self.queues[number]
            && let Some(chain) = image.chain()
        {
            for &slot in &starting {
                if let Request::Read { at, .. } | Request::Write { at, .. } =
                    slots.get(slot).request
                {
                    chain.prefetch(at.0);
                }
            }
        }
        for slot in starting.drain(..) {
            self.start_pieces(number, slot);
        }
        self.starting = starting;
    }

    /// Gives up a queue whose ring cannot be trusted, until the driver resets it: what is under way goes on to its end,
    /// and is not given back. A buffer that is not in guest memory says nothing against the ring: front-ends take memory
    /// away for a moment, and put it back.
    fn retire(&mut self, number: usize, reason: &RingError) {
        self.notify_queue(number);
        self.deactivate(number);
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let (state, until) = match reason {
            RingError::Buffer(..) => (
                QueueState::Unmapped,
                "its front-end maps memory there, or the guest resets the device",
            ),
            _ => (QueueState::Retired, "the guest resets the device"),
        };
        queue.state = state;
        let disk = &queue.disk;
        disk.errors.log(|left_out| {
            warn!(
                "disk {}: queue {} is given up at {:?} until {until}: {reason}{left_out}",
                disk.name,
                queue.ring.number(),
                queue.ring.base(),
            );
        });
        queue.report(&self.notifier);
    }
}

#[cold]
fn refused(disk: &Disk, chain: &Chain) {
    disk.errors.log(|left_out| {
        warn!(
            "disk {}: refused request {:02x?} with {} bytes out and {} in: not what a disk of {} \
             bytes allows{left_out}",
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
    fn idle_storage_gets_little_at_once_and_busy_storage_much_at_a_time() {
        let chunks = |burst: usize| {
            let mut chunks = Vec::new();
            let mut under_way = 0;
            while under_way < burst {
                let next = chunk(under_way).min(burst - under_way);
                chunks.push(next);
                under_way += next;
            }
            chunks
        };
        assert_eq!(chunks(1), [1]);
        assert_eq!(chunks(32), [4, 16, 12]);
        assert_eq!(chunks(128), [4, 16, 32, 32, 32, 12]);
        assert_eq!(chunk(usize::from(Virtqueue::MAX_SIZE)), CHUNK_MAX);
    }
}
