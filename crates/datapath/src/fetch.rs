//! Stage 1: from the available rings to slots and operations, a bounded batch at a time.

use block::{Engine, Request};
use guest::RingError;
use guest::blk::{self, Status};
use tracing::warn;

use crate::plan::{self, Plan};
use crate::queue::State;
use crate::worker::Worker;

/// Operations submitted in one turn for one queue. All at once would let the storage idle while the
/// batch is built, and keep the guest waiting while it is reaped.
const CHUNK: usize = 8;

/// Requests fetched in one turn from one queue, with those that need no operation: the other queues
/// wait meanwhile.
const BATCH: usize = 64;

/// What fetching left behind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fetched {
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
    /// Takes requests from every hot queue and submits their operations.
    pub fn fetch(&mut self) -> Fetched {
        let mut result = Fetched::Nothing;
        // By index: a queue that is retired leaves the list.
        let mut i = 0;
        while i < self.hot.len() {
            let number = self.hot[i];
            match self.fetch_queue(number) {
                Ok(Fetched::Nothing) => {}
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

    fn fetch_queue(&mut self, number: usize) -> Result<Fetched, RingError> {
        let Some(queue) = &mut self.queues[number] else {
            return Ok(Fetched::Nothing);
        };
        let waiting = usize::from(queue.ring.waiting()?);
        if waiting == 0 {
            return Ok(Fetched::Nothing);
        }
        let disk = queue.disk.clone();
        let size = disk.size();
        let mut submitted = 0;
        let mut fetched = 0;
        while fetched < waiting.min(BATCH) && submitted < CHUNK && self.engine.room() > 0 {
            let Some(queue) = &mut self.queues[number] else {
                break;
            };
            // All slots are taken only if the guest made descriptors available twice.
            let Some(slot) = queue.slots.take() else {
                break;
            };
            fetched += 1;
            let chain = match queue
                .ring
                .fetch(&mut self.scratch[..queue.ring.max_segments()])
            {
                Ok(chain) => chain,
                Err(e) => {
                    queue.slots.give_back(slot);
                    return Err(e);
                }
            };
            let readable = usize::from(chain.readable);
            let segments = &self.scratch[..readable + usize::from(chain.writable)];
            let (readable, writable) = segments.split_at(readable);
            let payload = |to: &mut [u8; 16]| queue.ring.copy_from(readable, to);
            let plan = match blk::parse(&chain, size, &disk.facts, payload) {
                Ok(request) => plan::plan(&disk, request),
                Err(status) => {
                    disk.errors.log(|left_out| {
                        warn!(
                            "disk {}: refused request {:02x?} with {} bytes out and {} in: \
                             not what a disk of {size} bytes allows ({left_out} more of these \
                             left out)",
                            disk.name, chain.header, chain.readable_len, chain.writable_len,
                        );
                    });
                    Plan::Done(status, 0)
                }
            };
            match plan {
                Plan::Done(status, written) => {
                    queue.slots.give_back(slot);
                    queue
                        .ring
                        .complete(&chain.ticket(), status as u8, written + 1);
                }
                Plan::Id => {
                    queue.slots.give_back(slot);
                    let written = queue.ring.copy_to(writable, &disk.id) as u32;
                    queue
                        .ring
                        .complete(&chain.ticket(), Status::Ok as u8, written + 1);
                }
                Plan::Operation(request, at) => {
                    let s = queue.slots.get(slot);
                    s.ticket = chain.ticket();
                    s.request = request;
                    s.at = at;
                    s.retries = 0;
                    (s.left, s.written) = match request {
                        Request::Read { len, .. } => {
                            s.set_segments(writable);
                            (len, u32::try_from(len).unwrap_or(u32::MAX - 1))
                        }
                        Request::Write { len, .. } => {
                            s.set_segments(readable);
                            (len, 0)
                        }
                        Request::Discard { len, .. } | Request::WriteZeroes { len, .. } => (len, 0),
                        Request::Flush | Request::GetId => (0, 0),
                    };
                    self.submit(number, slot);
                    submitted += 1;
                }
            }
        }
        Ok(match fetched {
            0 => Fetched::Full,
            n if n < waiting => Fetched::More,
            _ => Fetched::All,
        })
    }

    /// Gives up a queue whose ring cannot be trusted, until the driver resets it. What is under way
    /// goes on to its end, and is not given back.
    fn retire(&mut self, number: usize, reason: &RingError) {
        self.notify_queue(number);
        self.cool(number);
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        queue.state = State::Retired;
        let disk = &queue.disk;
        disk.errors.log(|left_out| {
            warn!(
                "disk {}: a queue is given up until the guest resets the device: {reason} \
                 ({left_out} more of these left out)",
                disk.name
            );
        });
        if let Some(error) = &queue.error {
            crate::notify::signal(error);
        }
    }
}
