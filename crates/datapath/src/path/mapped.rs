//! Stage 4: requests to a mapped image, piece by piece. The image says where the next piece is, the engine moves it, and so
//! on. What the image cannot say or do from memory goes to the [blocking pool](crate::resources::blocking_pool).
//!
//! The order of a write that needs clusters: its data is moved first. Then the image's tables lead there
//! ([`Chain::commit_or_keep`]), in memory. They reach the file with the next flush, in the order that the image knows to be
//! right. The guest is told of the write after the commit, so a flush that it sends then covers both.
//!
//! A request holds a pin from before a look-up until it ends. While pinned, looked-up clusters are not reused. A request that
//! may wait for such clusters itself, or is stalled, gives its pin back, and takes another with its next look-up.

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

/// A request to a mapped image, and what this stage needs for it.
pub(crate) struct MappedStage<'a> {
    slot: &'a mut Slot,
    mapped: &'a mut MappedRequest,
    chain: &'a Arc<Chain>,
    ring: &'a mut Virtqueue,
    disk: &'a Arc<Disk>,
    alignment: Alignment,
    thread_disk: &'a mut ThreadDisk,
    /// Bytes that may be zeroed or looked at in this turn.
    zero_budget: &'a mut u64,
    buffers: &'a mut CowBuffers,
    is_client: bool,
}

impl<'a> MappedStage<'a> {
    #[inline(always)]
    pub fn new(
        queue: &'a mut Queue,
        slot: u16,
        thread_disk: &'a mut ThreadDisk,
        zero_budget: &'a mut u64,
        buffers: &'a mut CowBuffers,
    ) -> Self {
        Self {
            slot: queue.slots.get(slot),
            mapped: queue.mapped.get_or_add(slot),
            chain: chain(&queue.image),
            ring: &mut queue.ring,
            disk: &queue.disk,
            alignment: queue.alignment,
            thread_disk,
            zero_budget,
            buffers,
            is_client: queue.is_client,
        }
    }

    /// Looks up the next piece of the request; of one that has not begun, the first.
    #[inline(always)]
    pub fn map(mut self) -> Next {
        self.slot.state = RequestState::Mapping;
        if self.mapped.pin.is_none() {
            if self.mapped.has_begun() {
                self.pin_again();
            } else {
                if !zeroes::detect(self.disk, self.ring, self.slot, self.zero_budget) {
                    return Next::WaitForTurn;
                }
                self.begin();
            }
        }
        self.look_up()
    }

    #[inline(always)]
    fn begin(&mut self) {
        let (Request::Read { at, len }
        | Request::Write { at, len }
        | Request::Discard { at, len }
        | Request::WriteZeroes { at, len, .. }) = self.slot.request
        else {
            unreachable!("a request without a range is not mapped");
        };
        let pin = self.thread_disk.pins.pin(self.chain.pins());
        self.mapped.begin(at, len, pin);
    }

    #[cold]
    fn pin_again(&mut self) {
        self.mapped.pin = Some(self.thread_disk.pins.pin(self.chain.pins()));
    }

    #[inline(always)]
    fn look_up(mut self) -> Next {
        while self.mapped.rest > 0 {
            let next = match self.slot.request {
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
        let (at, rest) = (self.mapped.at, self.mapped.rest);
        Some(match self.chain.map(self.mapped.pin(), at, rest) {
            ReadLocation::Data {
                file,
                at: from,
                len,
            } => match map_jobs::whole_blocks(from, len, self.alignment.len) {
                Ok(len) => self.move_piece(self.thread_disk.files[usize::from(file.0)], from, len),
                Err(len) => self.start_job(move |chain| {
                    map_jobs::part_of_block(chain, at, len).map(JobResult::Bytes)
                }),
            },
            ReadLocation::Zero { .. } if *self.zero_budget == 0 => Next::WaitForTurn,
            ReadLocation::Zero { len } => {
                let len = len.min(*self.zero_budget);
                *self.zero_budget -= len;
                self.mapped.set_len(self.slot, len);
                self.ring.zero(self.slot.segments());
                self.mapped.advance(len);
                return None;
            }
            ReadLocation::Compressed(packed) => {
                self.start_job(move |chain| chain.unpack(&packed).map(JobResult::Bytes))
            }
            ReadLocation::Load(missing) => {
                self.start_job(move |chain| chain.load(missing).map(|()| JobResult::LookUpAgain))
            }
            ReadLocation::Damaged { .. } => damaged(),
        })
    }

    /// Looks up the next piece of a write, or takes clusters for it.
    #[inline(always)]
    fn next_write(&mut self) -> Next {
        let at = self.mapped.at;
        let pin = self.mapped.pin();
        match self.chain.map_write(pin, at, self.mapped.rest) {
            WriteLocation::InPlace { file, at, len } => {
                self.move_piece(self.thread_disk.files[usize::from(file.0)], at, len)
            }
            WriteLocation::Allocate { len } => self.allocate(at, len),
            WriteLocation::Load(missing) => {
                self.start_job(move |chain| chain.load(missing).map(|()| JobResult::LookUpAgain))
            }
            // To prepare it says what is wrong, and sees to it that nothing more is written.
            WriteLocation::Damaged { len } => {
                self.start_change(move |chain| map_jobs::prepare(chain, at, len))
            }
        }
    }

    /// Takes clusters for the next piece of a write.
    fn allocate(&mut self, at: GuestOffset, len: u64) -> Next {
        let Some(allocation) = self.chain.try_prepare_write(self.mapped.pin(), at, len) else {
            return self.start_change(move |chain| map_jobs::prepare(chain, at, len));
        };
        if allocation.fills.is_empty() {
            return self.write_allocation(allocation);
        }
        let pin = self.mapped.pin();
        let plan = CowWrite::plan(self.chain, pin, &allocation, self.alignment, self.buffers);
        let Some((write, source)) = plan else {
            return self.start_change(move |chain| map_jobs::fill(chain, allocation));
        };
        (self.mapped.allocation, self.mapped.cow) = (Some(allocation), Some(write));
        match source {
            FillSource::Zeroes => self.write_cow(),
            FillSource::Bytes(read) => self.fill(read),
        }
    }

    /// Moves the guest's bytes of the next piece, which is at this place of this file.
    #[inline(always)]
    fn move_piece(&mut self, file: FileId, at: FileOffset, len: u64) -> Next {
        self.mapped.set_piece(self.slot, file, at, len);
        self.slot.state = RequestState::Moving;
        Next::Submit
    }

    /// Writes the guest's bytes to clusters that were taken for them.
    fn write_allocation(&mut self, allocation: Allocation) -> Next {
        let (to, len) = (allocation.to, allocation.len);
        self.mapped.allocation = Some(allocation);
        self.move_piece(self.thread_disk.written_file(), to, len)
    }

    /// Reads what a copy-on-write needs beside the guest's bytes.
    fn fill(&mut self, read: CowRead) -> Next {
        let (slot, mapped) = (&mut *self.slot, &mut *self.mapped);
        mapped.keep_segments(slot);
        slot.set_segments(&[read.to]);
        mapped.file = self.thread_disk.files[usize::from(read.file.0)];
        (slot.at, slot.left, slot.state) = (read.at, read.len, RequestState::Filling);
        Next::Submit
    }

    /// Adds the guest's bytes to the others of a copy-on-write, and writes all of them.
    fn write_cow(&mut self) -> Next {
        let (slot, mapped) = (&mut *self.slot, &mut *self.mapped);
        let allocation = mapped.allocation.as_ref();
        let len = allocation.expect("a copy-on-write has clusters").len;
        mapped.keep_segments(slot);
        mapped.set_len(slot, len);
        let write = mapped.cow.as_mut().expect("a copy-on-write has a buffer");
        self.ring.copy_from(slot.segments(), write.gap(len));
        let (at, segment) = write.write();
        slot.set_segments(&[segment]);
        mapped.file = self.thread_disk.written_file();
        (slot.at, slot.left, slot.state) = (at, segment.len as u64, RequestState::Moving);
        Next::Submit
    }

    fn give_up_range(&mut self, mode: ZeroMode) -> Next {
        let (at, rest) = (self.mapped.at, self.mapped.rest);
        self.start_change(move |chain| map_jobs::zero(chain, at, rest, mode))
    }

    /// Has the blocking pool do this with the image. Its errors are logged, and fail the request.
    #[cold]
    #[inline(never)]
    fn start_job(
        &self,
        job: impl FnOnce(&Chain) -> Result<JobResult, ImageError> + Send + 'static,
    ) -> Next {
        let chain = self.chain.clone();
        Next::StartJob(map_jobs::blocking(self.disk, move || job(&chain)))
    }

    /// The same for what may need clusters, and wait for them.
    #[cold]
    #[inline(never)]
    fn start_change(
        &mut self,
        job: impl FnOnce(&Chain) -> Result<JobResult, ImageError> + Send + 'static,
    ) -> Next {
        unpin(self.mapped, self.chain, self.thread_disk);
        Next::StartJob(map_jobs::changing(self.disk, self.chain, job))
    }

    /// The operation of a piece of a write found no space, with this errno. Freed clusters are reclaimed, and the piece is
    /// looked up again.
    #[cold]
    pub fn make_space(self, errno: i32) -> Next {
        self.mapped.restart_piece();
        self.slot.state = RequestState::Mapping;
        unpin(self.mapped, self.chain, self.thread_disk);
        if let Some(write) = self.mapped.cow.take() {
            self.buffers.give_back(write);
        }
        let (chain, allocation) = (self.chain.clone(), self.mapped.allocation.take());
        Next::StartJob(map_jobs::blocking(self.disk, move || {
            map_jobs::make_space(&chain, allocation, errno)
        }))
    }

    /// The operation of a piece has moved all its bytes.
    #[inline(always)]
    pub fn piece_moved(mut self) -> Next {
        if self.slot.state == RequestState::Filling {
            return self.write_cow();
        }
        if let Some(write) = self.mapped.cow.take() {
            self.buffers.give_back(write);
        }
        if let Some(allocation) = self.mapped.allocation.take() {
            self.slot.needs_sync = true;
            if let Err(allocation) = self.chain.try_commit(allocation) {
                return self.commit_in_job(allocation);
            }
        }
        self.piece_done()
    }

    /// Tries again to commit what could not be committed.
    pub fn retry_commit(self) -> Next {
        let allocation = self.mapped.allocation.take();
        self.commit_in_job(allocation.expect("it was kept to be committed again"))
    }

    fn commit_in_job(&self, allocation: Allocation) -> Next {
        let (chain, disk) = (self.chain.clone(), self.disk.clone());
        Next::StartJob(Box::new(move || {
            map_jobs::commit(&chain, &disk, allocation)
        }))
    }

    #[inline(always)]
    fn piece_done(self) -> Next {
        self.mapped.advance(self.mapped.len);
        if self.mapped.rest == 0 {
            Next::Moved
        } else {
            Next::Map
        }
    }

    /// Continues a request for which the blocking pool has done something.
    pub fn take_result(mut self, result: JobResult) -> Next {
        let is_before_engine = !matches!(
            result,
            JobResult::Committed | JobResult::NotCommitted(..) | JobResult::Flushed { .. }
        );
        if self.slot.stamps.fetched > 0 && is_before_engine {
            self.slot.stamps.submitted = now_ns();
        }
        match result {
            JobResult::LookUpAgain => Next::Map,
            JobResult::Bytes(bytes) => {
                self.mapped.set_len(self.slot, bytes.len() as u64);
                self.ring.copy_to(self.slot.segments(), &bytes);
                self.piece_done()
            }
            JobResult::Prepared(allocation) => self.write_allocation(allocation),
            JobResult::PreparedCow(allocation, write) => {
                (self.mapped.allocation, self.mapped.cow) = (Some(allocation), Some(write));
                self.write_cow()
            }
            JobResult::Committed => self.piece_done(),
            JobResult::Zeroed { done } => {
                self.slot.needs_sync = true;
                self.mapped.advance(done);
                Next::Map
            }
            JobResult::WaitFor(_) | JobResult::WillBeWoken => {
                unreachable!("a job that waits has no result")
            }
            JobResult::Noted => unreachable!("it is planned again, before this stage"),
            JobResult::Aborted(AbortEnd::Finish(ending)) => Next::Finish(ending),
            JobResult::Aborted(AbortEnd::Leave) => Next::Leave,
            JobResult::Failed {
                errno,
                is_permanent: true,
            } => Next::Finish(Ending::error(errno, self.is_client)),
            JobResult::Failed { errno, .. } => Next::Fail {
                errno,
                retry: Retry::Piece,
            },
            JobResult::NotCommitted(allocation, errno) => {
                self.mapped.allocation = Some(allocation);
                Next::Fail {
                    errno,
                    retry: Retry::Commit,
                }
            }
            JobResult::Flushed { errno, lost } => Next::Synced(SyncResult::Image { errno, lost }),
        }
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

/// A request is stalled for this: gives back its pin, and returns what is to be tried again. Clusters that it has taken
/// remain its own; everything else is looked up again.
#[cold]
pub(crate) fn stalled(queue: &mut Queue, slot: u16, disk: &mut ThreadDisk, retry: Retry) -> Retry {
    let Some(mapped) = queue.mapped.find(slot) else {
        return retry;
    };
    unpin(mapped, chain(&queue.image), disk);
    if retry == Retry::Operation && mapped.allocation.is_none() {
        mapped.restart_piece();
        return Retry::Piece;
    }
    retry
}

fn unpin(mapped: &mut MappedRequest, chain: &Chain, disk: &mut ThreadDisk) {
    if let Some(pin) = mapped.pin.take() {
        disk.pins.unpin(chain.pins(), pin);
    }
}

/// Gives back the pin and the buffer that a request has.
#[inline]
pub(crate) fn release(
    queue: &mut Queue,
    slot: u16,
    disks: &mut ThreadDisks,
    buffers: &mut Buffers,
) {
    let Some(mapped) = queue.mapped.find(slot) else {
        return;
    };
    debug_assert!(mapped.allocation.is_none(), "it is given back first");
    mapped.end();
    if let Some(write) = mapped.cow.take() {
        buffers.cow.give_back(write);
    }
    if let Some(pin) = mapped.pin.take() {
        let disk = disks.get(queue.thread_disk);
        disk.pins.unpin(chain(&queue.image).pins(), pin);
    }
}

/// Does `job`. If it has to wait for other requests, the image calls `wake` when they have ended.
pub(crate) fn wait_in_job(image: Image, wake: impl Fn() + Send + Sync + 'static, job: Job) -> Job {
    Box::new(move || match job() {
        JobResult::WaitFor(waiting) => {
            let image = image.chain().and_then(|chain| chain.image());
            let waker = Waker::from(Arc::new(WakeRequest(wake)));
            match image.map(|image| image.poll_wait(&waiting, &waker)) {
                Some(Poll::Pending) => JobResult::WillBeWoken,
                _ => JobResult::LookUpAgain,
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
