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

use block::{FileId, FileOffset, GuestOffset, Request};
use guest::Virtqueue;
use guest::blk::Status;
use image::{Allocation, Chain, Image, ImageError, ReadLocation, WriteLocation, ZeroMode};
use rustix::io::Errno;

use super::map_jobs;
use super::next::{Next, SyncResult};
use super::zeroes;
use crate::clock::now_ns;
use crate::disk::Disk;
use crate::disk::source::Alignment;
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
#[inline(always)]
pub(crate) fn start(
    queue: &mut Queue,
    slot: u16,
    disk: &mut ThreadDisk,
    zero_budget: &mut u64,
    buffers: &mut CowBuffers,
) -> Next {
    queue.mapped.ensure(slot);
    Stage::of(queue, slot, disk, zero_budget, buffers).start()
}

/// Looks up the next piece of a request, after what is done of it.
pub(crate) fn next_piece(
    queue: &mut Queue,
    slot: u16,
    disk: &mut ThreadDisk,
    zero_budget: &mut u64,
    buffers: &mut CowBuffers,
) -> Next {
    Stage::of(queue, slot, disk, zero_budget, buffers).next_piece()
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
    Stage::of(queue, slot, disk, zero_budget, buffers).piece_moved()
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
    queue.mapped.ensure(slot);
    Stage::of(queue, slot, disk, zero_budget, buffers).take_result(result)
}

/// One request, and what this stage needs for it.
struct Stage<'a> {
    s: &'a mut Slot,
    request: &'a mut MappedRequest,
    chain: &'a Arc<Chain>,
    ring: &'a mut Virtqueue,
    disk: &'a Arc<Disk>,
    alignment: Alignment,
    thread_disk: &'a mut ThreadDisk,
    /// Bytes that may be zeroed or looked at in this turn.
    zero_budget: &'a mut u64,
    buffers: &'a mut CowBuffers,
}

impl<'a> Stage<'a> {
    #[inline(always)]
    fn of(
        queue: &'a mut Queue,
        slot: u16,
        thread_disk: &'a mut ThreadDisk,
        zero_budget: &'a mut u64,
        buffers: &'a mut CowBuffers,
    ) -> Self {
        Self {
            s: queue.slots.get(slot),
            request: queue.mapped.get(slot),
            chain: chain(&queue.image),
            ring: &mut queue.ring,
            disk: &queue.disk,
            alignment: queue.alignment,
            thread_disk,
            zero_budget,
            buffers,
        }
    }

    #[inline(always)]
    fn start(mut self) -> Next {
        self.s.state = RequestState::Mapping;
        if !zeroes::detect(self.disk, self.ring, self.s, self.zero_budget) {
            return Next::WaitForTurn;
        }
        let (Request::Read { at, len }
        | Request::Write { at, len }
        | Request::Discard { at, len }
        | Request::WriteZeroes { at, len, .. }) = self.s.request
        else {
            unreachable!("a request without a range is not mapped");
        };
        let pin = self.thread_disk.pins.pin(self.chain.pins());
        self.request.begin(at, len, pin);
        self.look_up()
    }

    fn next_piece(mut self) -> Next {
        self.s.state = RequestState::Mapping;
        self.look_up()
    }

    #[inline(always)]
    fn look_up(&mut self) -> Next {
        while self.request.rest > 0 {
            let next = match self.s.request {
                Request::Read { .. } => self.next_read(),
                Request::Write { .. } => Some(self.next_write()),
                Request::Discard { .. } => Some(self.give_up_range(ZeroMode::Discard)),
                Request::WriteZeroes { unmap, .. } => {
                    Some(self.give_up_range(ZeroMode::Zeroes { unmap }))
                }
                Request::Flush | Request::GetId => Some(damaged()),
            };
            if let Some(next) = next {
                return next;
            }
        }
        Next::Moved
    }

    /// Looks up the next piece of a read; `None` if that was of zeroes, which the guest has now.
    #[inline(always)]
    fn next_read(&mut self) -> Option<Next> {
        let (at, rest) = (self.request.at, self.request.rest);
        Some(match self.chain.map(self.request.pin(), at, rest) {
            ReadLocation::Data {
                file,
                at: from,
                len,
            } => match map_jobs::whole_blocks(from, len, self.alignment.len) {
                Ok(len) => self.move_piece(self.thread_disk.files[usize::from(file.0)], from, len),
                Err(len) => self.block(move |chain| {
                    map_jobs::part_of_block(chain, at, len).map(JobResult::Bytes)
                }),
            },
            ReadLocation::Zero { .. } if *self.zero_budget == 0 => Next::WaitForTurn,
            ReadLocation::Zero { len } => {
                let len = len.min(*self.zero_budget);
                *self.zero_budget -= len;
                self.request.set_len(self.s, len);
                self.ring.zero(self.s.segments());
                self.request.advance(len);
                return None;
            }
            ReadLocation::Compressed(packed) => {
                self.block(move |chain| chain.unpack(&packed).map(JobResult::Bytes))
            }
            ReadLocation::Load(missing) => {
                self.block(move |chain| chain.load(missing).map(|()| JobResult::Again))
            }
            ReadLocation::Damaged { .. } => damaged(),
        })
    }

    /// Looks up the next piece of a write, or takes clusters for it.
    #[inline(always)]
    fn next_write(&mut self) -> Next {
        let at = self.request.at;
        match self
            .chain
            .map_write(self.request.pin(), at, self.request.rest)
        {
            WriteLocation::InPlace { file, at, len } => {
                self.move_piece(self.thread_disk.files[usize::from(file.0)], at, len)
            }
            WriteLocation::Allocate { len } => self.allocate(at, len),
            WriteLocation::Load(missing) => {
                self.block(move |chain| chain.load(missing).map(|()| JobResult::Again))
            }
            // To prepare it says what is wrong, and sees to it that nothing more is written.
            WriteLocation::Damaged { len } => {
                self.block(move |chain| map_jobs::prepare(chain, at, len))
            }
        }
    }

    /// Takes clusters for the next piece of a write.
    fn allocate(&mut self, at: GuestOffset, len: u64) -> Next {
        let Some(allocation) = self.chain.try_prepare_write(self.request.pin(), at, len) else {
            return self.block(move |chain| map_jobs::prepare(chain, at, len));
        };
        if allocation.fills.is_empty() {
            return self.write_allocation(allocation);
        }
        let pin = self.request.pin();
        let plan = CowWrite::plan(self.chain, pin, &allocation, self.alignment, self.buffers);
        let Some((write, source)) = plan else {
            return self.block(move |chain| map_jobs::fill(chain, allocation));
        };
        (self.request.allocation, self.request.cow) = (Some(allocation), Some(write));
        match source {
            FillSource::Zeroes => self.write_cow(),
            FillSource::Bytes(read) => self.fill(read),
        }
    }

    /// Moves the guest's bytes of the next piece, which is at this place of this file.
    #[inline(always)]
    fn move_piece(&mut self, file: FileId, at: FileOffset, len: u64) -> Next {
        self.request.set_piece(self.s, file, at, len);
        self.s.state = RequestState::Moving;
        Next::Submit
    }

    /// Writes the guest's bytes to clusters that were taken for them.
    fn write_allocation(&mut self, allocation: Allocation) -> Next {
        let (to, len) = (allocation.to, allocation.len);
        self.request.allocation = Some(allocation);
        self.move_piece(self.thread_disk.written_file(), to, len)
    }

    /// Reads what a copy-on-write needs beside the guest's bytes.
    fn fill(&mut self, read: CowRead) -> Next {
        let (s, request) = (&mut *self.s, &mut *self.request);
        request.keep_segments(s);
        s.set_segments(&[read.to]);
        request.file = self.thread_disk.files[usize::from(read.file.0)];
        (s.at, s.left, s.state) = (read.at, read.len, RequestState::Filling);
        Next::Submit
    }

    /// Adds the guest's bytes to the others of a copy-on-write, and writes all of them.
    fn write_cow(&mut self) -> Next {
        let (s, request) = (&mut *self.s, &mut *self.request);
        let allocation = request.allocation.as_ref();
        let len = allocation.expect("a copy-on-write has clusters").len;
        request.set_len(s, len);
        let write = request.cow.as_mut().expect("a copy-on-write has a buffer");
        self.ring.copy_from(s.segments(), write.gap(len));
        let (at, segment) = write.write();
        s.set_segments(&[segment]);
        request.file = self.thread_disk.written_file();
        (s.at, s.left, s.state) = (at, segment.len as u64, RequestState::Moving);
        Next::Submit
    }

    fn give_up_range(&self, mode: ZeroMode) -> Next {
        let (at, rest) = (self.request.at, self.request.rest);
        self.block(move |chain| map_jobs::zero(chain, at, rest, mode))
    }

    /// Has the blocking pool do this with the image. Its errors are logged, and fail the request.
    #[cold]
    #[inline(never)]
    fn block(
        &self,
        job: impl FnOnce(&Chain) -> Result<JobResult, ImageError> + Send + 'static,
    ) -> Next {
        let chain = self.chain.clone();
        Next::Block(map_jobs::blocking(self.disk, move || job(&chain)))
    }

    #[inline(always)]
    fn piece_moved(mut self) -> Next {
        if self.s.state == RequestState::Filling {
            return self.write_cow();
        }
        if let Some(write) = self.request.cow.take() {
            self.buffers.give_back(write);
        }
        if let Some(allocation) = self.request.allocation.take() {
            self.s.needs_sync = true;
            if let Err(allocation) = self.chain.try_commit(allocation) {
                let (chain, disk) = (self.chain.clone(), self.disk.clone());
                return Next::Block(Box::new(move || {
                    map_jobs::commit(&chain, &disk, allocation)
                }));
            }
        }
        self.piece_done()
    }

    /// Ends this piece, and finds the next step of its request.
    #[inline(always)]
    fn piece_done(self) -> Next {
        self.request.advance(self.request.len);
        if self.request.rest == 0 {
            return Next::Moved;
        }
        self.next_piece()
    }

    fn take_result(mut self, result: JobResult) -> Next {
        let is_before_engine = !matches!(
            result,
            JobResult::Committed | JobResult::NotCommitted(..) | JobResult::Flushed { .. }
        );
        if self.s.stamps.fetched > 0 && is_before_engine {
            self.s.stamps.submitted = now_ns();
        }
        match result {
            JobResult::Again => self.next_piece(),
            JobResult::Bytes(bytes) => {
                self.request.set_len(self.s, bytes.len() as u64);
                self.ring.copy_to(self.s.segments(), &bytes);
                self.piece_done()
            }
            JobResult::Prepared(allocation) => self.write_allocation(allocation),
            JobResult::Merged(allocation, write) => {
                (self.request.allocation, self.request.cow) = (Some(allocation), Some(write));
                self.write_cow()
            }
            JobResult::Committed => self.piece_done(),
            JobResult::Zeroed { done } => {
                self.s.needs_sync = true;
                self.request.advance(done);
                self.next_piece()
            }
            JobResult::Wait(_) | JobResult::Waits => {
                unreachable!("a job that waits has no result")
            }
            JobResult::Aborted(AbortEnd::Finish(ending)) => Next::Finish(ending),
            JobResult::Aborted(AbortEnd::Leave) => Next::Leave,
            JobResult::Failed { errno, lasting } if lasting => {
                Next::Finish(Ending::io_error(errno))
            }
            JobResult::Failed { errno, .. } => Next::Fail {
                errno,
                retry: Retry::Piece,
            },
            JobResult::NotCommitted(allocation, errno) => {
                self.request.allocation = Some(allocation);
                Next::Fail {
                    errno,
                    retry: Retry::Commit,
                }
            }
            JobResult::Flushed { errno, lost } => Next::Synced(SyncResult::Image { errno, lost }),
        }
    }
}

/// What comes next for a request whose turn it is to continue with zeroes.
pub(crate) fn next_turn(queue: &mut Queue, slot: u16) -> Next {
    match queue.mapped.find(slot) {
        None => Next::Submit,
        Some(request) if request.pin.is_none() => Next::Start,
        Some(_) => Next::Map,
    }
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
