//! Stage 3: engine operations on the guest's own memory, or on a bounce buffer where that is not
//! aligned as the backing needs it.

use block::{Engine, Op, Request, Segment};

use crate::bounce::{self, BOUNCE_BYTES};
use crate::mapped::mapped_of;
use crate::queue::{Queue, token};
use crate::worker::Worker;
use crate::zeroes;

impl<E: Engine> Worker<E> {
    /// Submits what is left of a request.
    #[inline]
    pub fn submit(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let disk = &queue.disk;
        let (file, copying) = match queue.file {
            Some(file) => (file, false),
            None => {
                let piece = mapped_of(&mut queue.pieces, slot);
                (piece.file, piece.copying)
            }
        };
        let stable = disk.writes_are_stable();
        let s = queue.slots.get(slot);
        if queue.pieces.is_empty() && !zeroes::detect(disk, &queue.ring, s, &mut self.zeroes_left) {
            return self.defer_zeroing(number, slot);
        }
        if s.request == Request::Flush && !s.is_syncing {
            return self.sync_request(number, slot);
        }
        s.unstable |= !stable || !matches!(s.request, Request::Write { .. });
        let (at, len, is_syncing) = (s.at, s.left, s.is_syncing);
        let mut piece = [Segment { addr: 0, len: 0 }];

        if let Request::Read { .. } | Request::Write { .. } = s.request
            && !is_syncing
        {
            // What stands beside a write is read to where it is written from, whatever its other pieces need.
            let bounced = !copying
                && (s.bounce.is_some()
                    || !bounce::is_aligned(
                        s.segments(),
                        queue.alignment.address,
                        queue.alignment.len,
                    ));
            if bounced {
                match self.prepare_bounce(number, slot) {
                    Some(segment) => piece = [segment],
                    None => return self.wait_for_buffer(number, slot),
                }
            }
        }
        let Some(Queue { slots, .. }) = &mut self.queues[number] else {
            return;
        };
        let s = slots.get(slot);
        let segments = match piece[0].len {
            0 => s.segments(),
            _ => &piece,
        };
        let op = match s.request {
            _ if is_syncing => Op::Flush,
            Request::Write { .. } if copying => Op::Read { at, to: segments },
            Request::Read { .. } => Op::Read { at, to: segments },
            Request::Write { .. } => Op::Write {
                at,
                from: segments,
                stable,
            },
            Request::Flush | Request::GetId => Op::Flush,
            Request::Discard { .. } => Op::Discard {
                at,
                len,
                stable: false,
            },
            Request::WriteZeroes { unmap, .. } => Op::WriteZeroes {
                at,
                len,
                unmap,
                stable: false,
            },
        };
        // SAFETY: the segments lie in guest memory, which the queue's ring keeps mapped, or in a
        // bounce buffer that the slot owns, or in the merge that its piece owns; the list itself is in the slot, or in `piece`, of which
        // an engine copies a single segment. Queue and slot stay where they are until the
        // completion has been reaped: a queue is dropped only when no slot is taken.
        #[expect(unsafe_code, reason = "the kernel works on the guest's memory")]
        unsafe {
            self.engine.submit(file, op, token(number, slot));
        }
    }

    /// A bounce buffer for the next piece of a request, filled if it is a write; `None` if there is
    /// none free.
    #[cold]
    fn prepare_bounce(&mut self, number: usize, slot: u16) -> Option<Segment> {
        let queue = self.queues[number].as_mut()?;
        let s = queue.slots.get(slot);
        if s.bounce.is_none() {
            let thread_disk = self.disks[queue.thread_disk].as_mut()?;
            s.bounce = Some(self.bounce.take(&mut thread_disk.bounces)?);
        }
        let mut bounce = s.bounce.take()?;
        let len = (s.left).min(BOUNCE_BYTES as u64) as usize;
        if let Request::Write { .. } = s.request {
            queue
                .ring
                .copy_from(s.segments(), &mut bounce.bytes()[..len]);
        }
        let segment = bounce.segment(len);
        s.bounce = Some(bounce);
        Some(segment)
    }
}
