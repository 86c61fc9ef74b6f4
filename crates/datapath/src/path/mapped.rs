//! Stage 4: requests to a mapped image, piece by piece. The image says where the next piece is, the engine moves it, and so
//! on. What the image cannot say or do from memory goes to the [blocking pool](crate::resources::blocking_pool).
//!
//! The order of a write that needs clusters: its data is moved first. Then the image's tables lead there
//! ([`Chain::commit_or_keep`]), in memory. They reach the file with the next flush, in the order that the image knows to be
//! right. The guest is told of the write after the commit, so a flush that it sends then covers both.
//!
//! A request holds a pin from before its first look-up until it ends. While pinned, looked-up clusters are not reused.

use std::sync::Arc;
use std::task::{Poll, Wake as TaskWake, Waker};

use block::Request;
use guest::Virtqueue;
use guest::blk::Status;
use image::{Allocation, Chain, Image, ReadLocation, WriteLocation, ZeroMode};
use rustix::io::Errno;

use super::map_jobs::{self, blocking};
use super::next::{Next, SyncResult};
use super::zeroes;
use crate::clock::now_ns;
use crate::queue::Queue;
use crate::queue::mapped_request::MappedRequest;
use crate::queue::slot::{RequestState, Slot};
use crate::request::{Ending, Retry};
use crate::resources::Buffers;
use crate::resources::blocking_pool::{AbortEnd, Job, JobResult};
use crate::resources::cow::{CowBuffers, CowRead, CowWrite, FillSource};
use crate::thread_disk::{ThreadDisk, ThreadDisks};

/// Touches the table entries of the requests in these slots, before the first of them is looked up: random I/O finds
/// little of a table in the processor's caches, and lookups one by one would each wait for memory.
#[inline]
pub(crate) fn touch(queue: &mut Queue, slots: &[u16]) {
    if slots.len() < 2 {
        return;
    }
    let chain = chain(&queue.image);
    for &slot in slots {
        if let Request::Read { at, .. } | Request::Write { at, .. } = queue.slots.get(slot).request
        {
            chain.prefetch(at);
        }
    }
}

/// Looks up the first piece of a request in a slot that holds its segments.
pub(crate) fn start(
    queue: &mut Queue,
    slot: u16,
    disk: &mut ThreadDisk,
    zero_budget: &mut u64,
    buffers: &mut CowBuffers,
) -> Next {
    let s = queue.slots.get(slot);
    s.state = RequestState::Mapping;
    let request = queue.mapped.get_or_add(slot);
    if !zeroes::detect(&queue.disk, &queue.ring, s, zero_budget) {
        return Next::WaitForTurn;
    }
    let (Request::Read { at, len }
    | Request::Write { at, len }
    | Request::Discard { at, len }
    | Request::WriteZeroes { at, len, .. }) = s.request
    else {
        unreachable!("a request without a range is not mapped");
    };
    request.begin(at, len, disk.pins.pin(chain(&queue.image).pins()));
    next_piece(queue, slot, disk, zero_budget, buffers)
}

/// Looks up the next piece of a request, after what is done of it.
pub(crate) fn next_piece(
    queue: &mut Queue,
    slot: u16,
    disk: &mut ThreadDisk,
    zero_budget: &mut u64,
    buffers: &mut CowBuffers,
) -> Next {
    queue.slots.get(slot).state = RequestState::Mapping;
    loop {
        if queue.mapped.get(slot).rest == 0 {
            return Next::Moved;
        }
        let next = match queue.slots.get(slot).request {
            Request::Read { .. } => next_read(queue, slot, disk, zero_budget),
            Request::Write { .. } => Some(next_write(queue, slot, disk, buffers)),
            Request::Discard { .. } => Some(give_up_range(queue, slot, ZeroMode::Discard)),
            Request::WriteZeroes { unmap, .. } => {
                Some(give_up_range(queue, slot, ZeroMode::Zeroes { unmap }))
            }
            Request::Flush | Request::GetId => Some(damaged()),
        };
        if let Some(next) = next {
            return next;
        }
    }
}

/// Looks up the next piece of a read; `None` if that was of zeroes, which the guest has now.
#[inline(always)]
fn next_read(
    queue: &mut Queue,
    slot: u16,
    disk: &ThreadDisk,
    zero_budget: &mut u64,
) -> Option<Next> {
    let (s, request) = (queue.slots.get(slot), queue.mapped.get(slot));
    let chain = chain(&queue.image);
    let pin = request.pin.as_ref().expect("a request that has begun");
    let (at, rest) = (request.at, request.rest);
    Some(match chain.map(pin, at, rest) {
        ReadLocation::Data {
            file,
            at: from,
            len,
        } => match map_jobs::whole_blocks(from, len, queue.alignment.len) {
            Ok(len) => {
                request.set_piece(s, disk.files[usize::from(file.0)], from, len);
                s.state = RequestState::Moving;
                Next::Submit
            }
            Err(len) => {
                let chain = chain.clone();
                Next::Block(blocking(&queue.disk, move || {
                    map_jobs::part_of_block(&chain, at, len).map(JobResult::Bytes)
                }))
            }
        },
        ReadLocation::Zero { .. } if *zero_budget == 0 => Next::WaitForTurn,
        ReadLocation::Zero { len } => {
            let len = len.min(*zero_budget);
            *zero_budget -= len;
            request.set_len(s, len);
            queue.ring.zero(s.segments());
            request.advance(len);
            return None;
        }
        ReadLocation::Compressed(packed) => {
            let chain = chain.clone();
            Next::Block(blocking(&queue.disk, move || {
                chain.unpack(&packed).map(JobResult::Bytes)
            }))
        }
        ReadLocation::Load(missing) => {
            let chain = chain.clone();
            Next::Block(blocking(&queue.disk, move || {
                chain.load(missing).map(|()| JobResult::Again)
            }))
        }
        ReadLocation::Damaged { .. } => damaged(),
    })
}

/// Looks up the next piece of a write, or takes clusters for it.
#[inline(always)]
fn next_write(queue: &mut Queue, slot: u16, disk: &ThreadDisk, buffers: &mut CowBuffers) -> Next {
    let (s, request) = (queue.slots.get(slot), queue.mapped.get(slot));
    let chain = chain(&queue.image);
    let pin = request.pin.as_ref().expect("a request that has begun");
    let at = request.at;
    match chain.map_write(pin, at, request.rest) {
        WriteLocation::InPlace { file, at, len } => {
            request.set_piece(s, disk.files[usize::from(file.0)], at, len);
            s.state = RequestState::Moving;
            Next::Submit
        }
        WriteLocation::Allocate { len } => match chain.try_prepare_write(pin, at, len) {
            Some(allocation) if allocation.fills.is_empty() => {
                write_allocation(s, request, disk, allocation)
            }
            Some(allocation) => {
                let plan = CowWrite::plan(chain, pin, &allocation, queue.alignment, buffers);
                let Some((write, source)) = plan else {
                    let chain = chain.clone();
                    return Next::Block(blocking(&queue.disk, move || {
                        map_jobs::fill(&chain, allocation)
                    }));
                };
                (request.allocation, request.cow) = (Some(allocation), Some(write));
                match source {
                    FillSource::Zeroes => write_cow(&mut queue.ring, s, request, disk),
                    FillSource::Bytes(read) => fill(s, request, disk, read),
                }
            }
            None => {
                let chain = chain.clone();
                Next::Block(blocking(&queue.disk, move || {
                    map_jobs::prepare(&chain, at, len)
                }))
            }
        },
        WriteLocation::Load(missing) => {
            let chain = chain.clone();
            Next::Block(blocking(&queue.disk, move || {
                chain.load(missing).map(|()| JobResult::Again)
            }))
        }
        // To prepare it says what is wrong, and sees to it that nothing more is written.
        WriteLocation::Damaged { len } => {
            let chain = chain.clone();
            Next::Block(blocking(&queue.disk, move || {
                map_jobs::prepare(&chain, at, len)
            }))
        }
    }
}

/// Writes the guest's bytes to clusters that were taken for them.
fn write_allocation(
    s: &mut Slot,
    request: &mut MappedRequest,
    disk: &ThreadDisk,
    allocation: Allocation,
) -> Next {
    request.set_piece(s, disk.written_file(), allocation.to, allocation.len);
    request.allocation = Some(allocation);
    s.state = RequestState::Moving;
    Next::Submit
}

/// Reads what a copy-on-write needs beside the guest's bytes.
fn fill(s: &mut Slot, request: &mut MappedRequest, disk: &ThreadDisk, read: CowRead) -> Next {
    request.keep_segments(s);
    s.set_segments(&[read.to]);
    request.file = disk.files[usize::from(read.file.0)];
    (s.at, s.left, s.state) = (read.at, read.len, RequestState::Filling);
    Next::Submit
}

/// Adds the guest's bytes to the others of a copy-on-write, and writes all of them.
fn write_cow(
    ring: &mut Virtqueue,
    s: &mut Slot,
    request: &mut MappedRequest,
    disk: &ThreadDisk,
) -> Next {
    let allocation = request.allocation.as_ref();
    let len = allocation.expect("a copy-on-write has clusters").len;
    request.set_len(s, len);
    let write = request.cow.as_mut().expect("a copy-on-write has a buffer");
    ring.copy_from(s.segments(), write.gap(len));
    let (at, segment) = write.write();
    s.set_segments(&[segment]);
    request.file = disk.written_file();
    (s.at, s.left, s.state) = (at, segment.len as u64, RequestState::Moving);
    Next::Submit
}

fn give_up_range(queue: &mut Queue, slot: u16, why: ZeroMode) -> Next {
    let request = queue.mapped.get(slot);
    let (at, rest) = (request.at, request.rest);
    let chain = chain(&queue.image).clone();
    Next::Block(blocking(&queue.disk, move || {
        map_jobs::zero(&chain, at, rest, why)
    }))
}

/// What comes next for a request whose turn it is to continue with zeroes.
pub(crate) fn next_turn(queue: &mut Queue, slot: u16) -> Next {
    match queue.mapped.find(slot) {
        None => Next::Submit,
        Some(request) if request.pin.is_none() => Next::Start,
        Some(_) => Next::Map,
    }
}

/// The operation of a piece has moved all its bytes.
#[inline(always)]
pub(crate) fn piece_moved(
    queue: &mut Queue,
    slot: u16,
    disk: &mut ThreadDisk,
    zero_budget: &mut u64,
    buffers: &mut CowBuffers,
) -> Next {
    let (s, request) = (queue.slots.get(slot), queue.mapped.get(slot));
    if s.state == RequestState::Filling {
        return write_cow(&mut queue.ring, s, request, disk);
    }
    if let Some(write) = request.cow.take() {
        buffers.give_back(write);
    }
    if let Some(allocation) = request.allocation.take() {
        s.needs_sync = true;
        let chain = chain(&queue.image);
        if let Err(allocation) = chain.try_commit(allocation) {
            let (chain, disk) = (chain.clone(), queue.disk.clone());
            return Next::Block(Box::new(move || {
                map_jobs::commit(&chain, &disk, allocation)
            }));
        }
    }
    piece_done(queue, slot, disk, zero_budget, buffers)
}

/// The piece is done, and what comes after it is looked up.
#[inline(always)]
fn piece_done(
    queue: &mut Queue,
    slot: u16,
    disk: &mut ThreadDisk,
    zero_budget: &mut u64,
    buffers: &mut CowBuffers,
) -> Next {
    let request = queue.mapped.get(slot);
    request.advance(request.len);
    next_piece(queue, slot, disk, zero_budget, buffers)
}

/// Tries again to commit what could not be committed.
pub(crate) fn commit(queue: &mut Queue, slot: u16) -> Next {
    let allocation = queue.mapped.get(slot).allocation.take();
    let allocation = allocation.expect("it was kept to be committed again");
    let (chain, disk) = (chain(&queue.image).clone(), queue.disk.clone());
    Next::Block(Box::new(move || {
        map_jobs::commit(&chain, &disk, allocation)
    }))
}

/// Continues a request for which the blocking pool has done something.
pub(crate) fn take_result(
    queue: &mut Queue,
    slot: u16,
    disk: &mut ThreadDisk,
    zero_budget: &mut u64,
    buffers: &mut CowBuffers,
    result: JobResult,
) -> Next {
    let (s, request) = (queue.slots.get(slot), queue.mapped.get_or_add(slot));
    let is_before_engine = !matches!(
        result,
        JobResult::Committed | JobResult::NotCommitted(..) | JobResult::Flushed { .. }
    );
    if s.stamps.fetched > 0 && is_before_engine {
        s.stamps.submitted = now_ns();
    }
    match result {
        JobResult::Again => next_piece(queue, slot, disk, zero_budget, buffers),
        JobResult::Bytes(bytes) => {
            request.set_len(s, bytes.len() as u64);
            queue.ring.copy_to(s.segments(), &bytes);
            piece_done(queue, slot, disk, zero_budget, buffers)
        }
        JobResult::Prepared(allocation) => write_allocation(s, request, disk, allocation),
        JobResult::Merged(allocation, write) => {
            (request.allocation, request.cow) = (Some(allocation), Some(write));
            write_cow(&mut queue.ring, s, request, disk)
        }
        JobResult::Committed => piece_done(queue, slot, disk, zero_budget, buffers),
        JobResult::Zeroed { done } => {
            s.needs_sync = true;
            request.advance(done);
            next_piece(queue, slot, disk, zero_budget, buffers)
        }
        JobResult::Wait(_) | JobResult::Waits => {
            unreachable!("a job that waits has no result")
        }
        JobResult::Aborted(AbortEnd::Finish(ending)) => Next::Finish(ending),
        JobResult::Aborted(AbortEnd::Leave) => Next::Leave,
        JobResult::Failed { errno, lasting } if lasting => Next::Finish(Ending::io_error(errno)),
        JobResult::Failed { errno, .. } => Next::Fail {
            errno,
            retry: Retry::Piece,
        },
        JobResult::NotCommitted(allocation, errno) => {
            request.allocation = Some(allocation);
            Next::Fail {
                errno,
                retry: Retry::Commit,
            }
        }
        JobResult::Flushed { errno, lost } => Next::Synced(SyncResult::Image { errno, lost }),
    }
}

/// A job that gives back the clusters of a request that ends before they were used; the request ends after that. `None` if
/// it has none.
#[inline]
pub(crate) fn abort(queue: &mut Queue, slot: u16, end: AbortEnd) -> Option<Job> {
    let allocation = queue.mapped.find(slot)?.allocation.take()?;
    let chain = chain(&queue.image).clone();
    Some(Box::new(move || {
        chain.abort(allocation);
        JobResult::Aborted(end)
    }))
}

/// Gives back the pin and the buffer that a request has.
#[inline]
pub(crate) fn release(
    queue: &mut Queue,
    slot: u16,
    disks: &mut ThreadDisks,
    buffers: &mut Buffers,
) {
    let Some(request) = queue.mapped.find(slot) else {
        return;
    };
    debug_assert!(request.allocation.is_none(), "it is given back first");
    if let Some(write) = request.cow.take() {
        buffers.cow.give_back(write);
    }
    if let Some(pin) = request.pin.take() {
        let disk = disks.get(queue.thread_disk);
        disk.pins.unpin(chain(&queue.image).pins(), pin);
    }
}

/// Adds to a job that, if it has to wait for the write of another request, the request is woken when that has ended.
pub(crate) fn wait_in_job(image: Image, wake: impl Fn() + Send + Sync + 'static, job: Job) -> Job {
    Box::new(move || match job() {
        JobResult::Wait(waiting) => {
            let image = image.chain().and_then(|chain| chain.image());
            let waker = Waker::from(Arc::new(WakeRequest(wake)));
            match image.map(|image| image.poll_wait(&waiting, &waker)) {
                Some(Poll::Pending) => JobResult::Waits,
                _ => JobResult::Again,
            }
        }
        result => result,
    })
}

/// Wakes a request. It is called under the image's lock, which is held while its files are read and written: it only puts
/// the request in a list.
struct WakeRequest<F>(F);

impl<F: Fn() + Send + Sync> TaskWake for WakeRequest<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

#[inline]
fn chain(image: &Image) -> &Arc<Chain> {
    image.chain().expect("a mapped image is a chain")
}

fn damaged() -> Next {
    Next::Finish(Ending {
        status: Status::IoError,
        result: -Errno::IO.raw_os_error(),
    })
}
