//! Before [plan](super::plan), and only while a backup of the disk is open: the old data of what a request changes is copied
//! to the [fleece](crate::disk::fleece), piece by piece, in a bounce buffer. A granule is copied once; later writes to it pay
//! one look at a bitmap.
//!
//! It never fails a request. If the old data cannot be copied, the backup ends, and the request goes on.

use std::sync::Arc;

use block::{Engine, GuestOffset, Request};
use image::{Extent, ReadLocation};

use super::map_jobs;
use super::next::Next;
use crate::disk::fleece::{Claim, GRANULE, RUN_MAX};
use crate::queue::slot::RequestState;
use crate::queue::{Queue, QueueState};
use crate::request::RequestId;
use crate::resources::blocking_pool::JobResult;
use crate::resources::bounce::{BOUNCE_BYTES, BouncePool};
use crate::thread_disk::ThreadDisk;
use crate::wake::Wake;
use crate::worker::Worker;

// A run fits into a bounce buffer.
const _: () = assert!(RUN_MAX * GRANULE <= BOUNCE_BYTES as u64);

impl<E: Engine> Worker<E> {
    /// Has the old data preserved that a request changes, and plans it then.
    pub(super) fn preserve(&mut self, id: RequestId) {
        self.queues.get(id.queue).slots.get(id.slot).state = RequestState::Preserving;
        self.advance(id, Next::Preserve);
    }

    /// Copies the next piece of the old data that a request changes.
    #[cold]
    pub(super) fn preserve_next(&mut self, id: RequestId) -> Next {
        let queue = self.queues.get(id.queue);
        let is_copying = queue.preserving[usize::from(id.slot)].is_copying();
        if !is_copying && matches!(queue.state, QueueState::Abandoned) {
            self.release_bounce(id);
            return Next::Leave;
        }
        // Zeroes need no operation: others have their turn.
        if !is_copying && self.zeroing.budget == 0 {
            self.release_bounce(id);
            return Next::WaitForTurn;
        }
        let disk = self.disks.get(queue.thread_disk);
        let pool = &mut self.buffers.bounce;
        let next = next(queue, id.slot, disk, pool, &self.wake);
        if let Next::Preserve = next {
            let len = queue.preserving[usize::from(id.slot)].len();
            self.zeroing.budget = self.zeroing.budget.saturating_sub(len);
        }
        next
    }

    /// Plans a request whose old data is preserved.
    pub(super) fn plan_preserved(&mut self, id: RequestId) {
        self.release_bounce(id);
        self.plan(id);
        // It may have ended at once.
        match self.queues.find(id.queue) {
            Some(queue) if queue.is_running() => self.queues.activate(id.queue),
            Some(_) => {
                self.notify_queue(id.queue);
                self.finish_stop(id.queue);
            }
            None => {}
        }
    }

    /// Continues requests that waited for copies of others, or for space.
    pub(super) fn retry_copies(&mut self) {
        if self.waiting_for_copy.is_empty() {
            return;
        }
        for id in std::mem::take(&mut self.waiting_for_copy) {
            self.advance(id, Next::Preserve);
        }
    }
}

/// The range that a request changes.
fn changed(request: &Request) -> Option<(u64, u64)> {
    match *request {
        Request::Write { at, len }
        | Request::Discard { at, len }
        | Request::WriteZeroes { at, len, .. } => Some((at.0, len)),
        Request::Read { .. } | Request::Flush | Request::GetId => None,
    }
}

/// Whether a request must pass this stage.
#[inline]
pub(crate) fn is_needed(queue: &Queue, request: &Request) -> bool {
    let fleece = queue.fleece.as_deref();
    fleece.is_some_and(|fleece| changed(request).is_some_and(|(at, len)| fleece.concerns(at, len)))
}

/// Copies the next piece of what a request changes.
pub(crate) fn next(
    queue: &mut Queue,
    slot: u16,
    disk: &mut ThreadDisk,
    pool: &mut BouncePool,
    wake: &Arc<Wake>,
) -> Next {
    if queue.preserving[usize::from(slot)].run.is_some() {
        return look_up(queue, slot, disk);
    }
    let (Some(fleece), Some((at, len))) = (
        queue.fleece.clone(),
        changed(&queue.slots.get(slot).request),
    ) else {
        return Next::Plan;
    };
    let s = queue.slots.get(slot);
    if s.bounce.is_none() {
        // Nothing is claimed by a request that waits for a buffer.
        s.bounce = pool.take(&mut disk.bounces);
        if s.bounce.is_none() {
            return Next::WaitForBuffer;
        }
    }
    let claim = match fleece.claim(at, len) {
        Claim::Wait => {
            fleece.wait(wake);
            fleece.claim(at, len)
        }
        claim => claim,
    };
    match claim {
        Claim::Ready => Next::Plan,
        Claim::Wait => Next::WaitForCopy,
        Claim::Copy(run) => {
            let preserving = &mut queue.preserving[usize::from(slot)];
            (preserving.run, preserving.done) = (Some((run, fleece)), 0);
            look_up(queue, slot, disk)
        }
    }
}

/// Looks up where the rest of the run is.
fn look_up(queue: &mut Queue, slot: u16, disk: &mut ThreadDisk) -> Next {
    let preserving = &mut queue.preserving[usize::from(slot)];
    let Some((run, _)) = &preserving.run else {
        return Next::Preserve;
    };
    let (at, left) = (
        GuestOffset(run.at + preserving.done),
        run.len - preserving.done,
    );
    if left == 0 {
        return end(queue, slot, disk);
    }
    let Some(chain) = queue.image.chain() else {
        match (queue.image.map(at), queue.file) {
            (Extent::File(at), Some(file)) => {
                (preserving.file, preserving.at, preserving.len) = (file, at, left);
                return Next::Submit;
            }
            _ => return zeroes(queue, slot, left),
        }
    };
    let pin = preserving
        .pin
        .get_or_insert_with(|| disk.pins.pin(chain.pins()));
    let chain = chain.clone();
    let job = match chain.map(pin, at, left) {
        ReadLocation::Data {
            file,
            at: from,
            len,
        } => match map_jobs::whole_blocks(from, len, queue.alignment.len) {
            Ok(len) => {
                preserving.file = disk.files[usize::from(file.0)];
                (preserving.at, preserving.len) = (from, len);
                return Next::Submit;
            }
            Err(len) => map_jobs::blocking(&queue.disk, move || {
                map_jobs::part_of_block(&chain, at, len).map(JobResult::Bytes)
            }),
        },
        ReadLocation::Zero { len } => return zeroes(queue, slot, len),
        ReadLocation::Compressed(packed) => map_jobs::blocking(&queue.disk, move || {
            chain.unpack(&packed).map(JobResult::Bytes)
        }),
        ReadLocation::Load(missing) => map_jobs::blocking(&queue.disk, move || {
            chain.load(missing).map(|()| JobResult::LookUpAgain)
        }),
        ReadLocation::Damaged { .. } => return failed(queue, slot, disk, rustix::io::Errno::IO),
    };
    Next::StartJob(job)
}

/// The next bytes of the run are zeroes.
fn zeroes(queue: &mut Queue, slot: u16, len: u64) -> Next {
    let preserving = &mut queue.preserving[usize::from(slot)];
    if let Some(bounce) = &mut queue.slots.get(slot).bounce {
        bounce.bytes()[preserving.done as usize..][..len as usize].fill(0);
    }
    preserving.done += len;
    Next::Preserve
}

/// A read of old data has ended, with so many bytes or a negative errno.
#[cold]
pub(crate) fn read_ended(queue: &mut Queue, slot: u16, disk: &mut ThreadDisk, result: i32) -> Next {
    let errno = match result {
        1.. => {
            let preserving = &mut queue.preserving[usize::from(slot)];
            preserving.done += (result as u64).min(preserving.len);
            queue.slots.get(slot).retries = 0;
            return look_up(queue, slot, disk);
        }
        // The file ends before the disk does.
        0 => rustix::io::Errno::IO,
        errno => rustix::io::Errno::from_raw_os_error(-errno),
    };
    failed(queue, slot, disk, errno)
}

/// The blocking pool has done something for a request that copies old data.
pub(crate) fn take_result(
    queue: &mut Queue,
    slot: u16,
    disk: &mut ThreadDisk,
    result: JobResult,
) -> Next {
    match result {
        JobResult::Bytes(bytes) => {
            let preserving = &mut queue.preserving[usize::from(slot)];
            if let Some(bounce) = &mut queue.slots.get(slot).bounce {
                bounce.bytes()[preserving.done as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            preserving.done += bytes.len() as u64;
            Next::Preserve
        }
        JobResult::Failed { errno, .. } => {
            let errno = rustix::io::Errno::from_raw_os_error(errno);
            failed(queue, slot, disk, errno)
        }
        _ => Next::Preserve,
    }
}

/// The run is in the buffer.
fn end(queue: &mut Queue, slot: u16, disk: &mut ThreadDisk) -> Next {
    let preserving = &mut queue.preserving[usize::from(slot)];
    let bounce = &mut queue.slots.get(slot).bounce;
    if let (Some((run, fleece)), Some(bounce)) = (preserving.run.take(), bounce) {
        fleece.copied(run, &bounce.bytes()[..run.len as usize]);
    }
    unpin(queue, slot, disk);
    Next::Preserve
}

#[cold]
fn failed(queue: &mut Queue, slot: u16, disk: &mut ThreadDisk, errno: rustix::io::Errno) -> Next {
    let preserving = &mut queue.preserving[usize::from(slot)];
    if let Some((run, fleece)) = preserving.run.take() {
        fleece.not_copied(run, &errno.into());
    }
    queue.slots.get(slot).retries = 0;
    unpin(queue, slot, disk);
    Next::Preserve
}

fn unpin(queue: &mut Queue, slot: u16, disk: &mut ThreadDisk) {
    let pin = queue.preserving[usize::from(slot)].pin.take();
    if let (Some(pin), Some(chain)) = (pin, queue.image.chain()) {
        disk.pins.unpin(chain.pins(), pin);
    }
}
