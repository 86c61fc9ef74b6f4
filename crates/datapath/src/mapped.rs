//! Requests to a disk whose image maps: each goes piece by piece. The image says where the next piece
//! is, the engine moves it, and so on. What the image cannot say or do from memory goes to the
//! [blocking pool](crate::blocking_pool).
//!
//! In which order things happen, and why nothing is lost by it: a write that needs clusters moves its
//! data first, and the image's tables lead there only after that ([`Chain::commit`]), in memory. They
//! reach the file with the next flush, in the order that the image knows to be right. The guest is told
//! of the write after the commit, so that a flush which it sends then covers both.
//!
//! A request holds a [`Pin`] from before its first look-up until it is finished: so long, space that it
//! was told of is not used for anything else.

use std::sync::Arc;
use std::task::{Poll, Wake as TaskWake, Waker};

use block::{Engine, FileId, FileOffset, Request, Segment};
use guest::blk::Status;
use image::{Allocation, Chain, ImageError, Pin, Prepared, ReadLocation, WriteLocation, ZeroMode};

use crate::blocking_pool::{JobId, JobResult, RequestEnd};
use crate::clock::now_ns;
use crate::cow::{CowBuffers, CowRead, CowWrite, FillSource};
use crate::disk::Disk;
use crate::fetch::FetchResult;
use crate::queue::Queue;
use crate::slot::Redo;
use crate::thread_disk::ThreadDisk;
use crate::worker::Worker;
use crate::zeroes;

/// Bytes that a thread zeroes of its guests' memory, or looks for zeroes in, in one turn, so that what else it serves waits for
/// no more than that.
const ZEROES_PER_TURN: u64 = 1 << 20;

/// How far a request is.
pub(crate) struct MappedRequest {
    /// Where on the disk the piece under way begins.
    at: u64,
    /// Its bytes.
    len: u64,
    /// Bytes of the request from `at` on.
    rest: u64,
    /// Where the piece is.
    pub file: FileId,
    pin: Option<Pin>,
    /// Taken for the piece under way.
    allocation: Option<Allocation>,
    /// What is written for it, if that is more than the guest's bytes.
    merge: Option<CowWrite>,
    /// What stands beside these is being read first.
    pub copying: bool,
    /// Segments of `rest`, once the request turned out to have several pieces.
    segments: Vec<Segment>,
    /// The first of these that is not used up.
    first: usize,
    /// Those of the piece.
    cut: Vec<Segment>,
}

impl MappedRequest {
    pub fn new() -> Self {
        Self {
            at: 0,
            len: 0,
            rest: 0,
            file: FileId(0),
            pin: None,
            allocation: None,
            merge: None,
            copying: false,
            segments: Vec::new(),
            first: 0,
            cut: Vec::new(),
        }
    }

    /// Takes the segments of the next `len` bytes off the front.
    fn cut(&mut self, mut len: u64) -> &[Segment] {
        self.cut.clear();
        while len > 0
            && let Some(segment) = self.segments.get_mut(self.first)
        {
            let n = (segment.len as u64).min(len) as usize;
            self.cut.push(Segment {
                addr: segment.addr,
                len: n,
            });
            len -= n as u64;
            segment.addr += n;
            segment.len -= n;
            self.first += usize::from(segment.len == 0);
        }
        &self.cut
    }
}

/// What is known of the request in this slot.
#[inline]
pub(crate) fn mapped_of(pieces: &mut Vec<MappedRequest>, slot: u16) -> &mut MappedRequest {
    let place = usize::from(slot);
    if place >= pieces.len() {
        add(pieces, place + 1);
    }
    &mut pieces[place]
}

/// Makes those that are not there, for which there is memory.
#[cold]
#[inline(never)]
fn add(pieces: &mut Vec<MappedRequest>, len: usize) {
    debug_assert!(len <= pieces.capacity());
    pieces.resize_with(len, MappedRequest::new);
}

/// Has a request looked at anew.
struct Requeue<F>(F);

impl<F: Fn() + Send + Sync> TaskWake for Requeue<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

/// What is to be done next for a request.
enum NextPiece {
    /// Its piece is ready for the engine.
    Submit,
    /// Its piece reads as zeroes, and they are there.
    Go,
    /// Its piece reads as zeroes, but first it is somebody else's turn.
    Later,
    /// Nothing, before the blocking pool has done this.
    BlockingPool(Box<dyn FnOnce() -> JobResult + Send>),
    Fail(i32),
}

impl<E: Engine> Worker<E> {
    /// Starts a request in a slot that holds its segments.
    pub fn start_pieces(&mut self, number: usize, slot: u16) {
        let Some(Queue {
            disk,
            image,
            ring,
            slots,
            pieces,
            thread_disk,
            ..
        }) = &mut self.queues[number]
        else {
            return;
        };
        let (Some(chain), Some(thread_disk), s) = (
            image.chain(),
            &mut self.disks[*thread_disk],
            slots.get(slot),
        ) else {
            return;
        };
        let piece = mapped_of(pieces, slot);
        if !zeroes::detect(disk, ring, s, &mut self.zeroes_left) {
            return self.defer_zeroing(number, slot);
        }
        let (Request::Read { at, len }
        | Request::Write { at, len }
        | Request::Discard { at, len }
        | Request::WriteZeroes { at, len, .. }) = s.request
        else {
            return;
        };
        (piece.at, piece.len, piece.rest) = (at.0, 0, len);
        piece.segments.clear();
        piece.first = 0;
        piece.pin = Some(thread_disk.pins.pin(chain.pins()));
        self.step(number, slot);
    }

    /// Goes on with a request behind what is done of it.
    pub fn step(&mut self, number: usize, slot: u16) {
        loop {
            let Some(queue) = &mut self.queues[number] else {
                return;
            };
            let piece = &mut queue.pieces[usize::from(slot)];
            if piece.rest == 0 {
                return self.moved(number, slot);
            }
            let (left, buffers) = (&mut self.zeroes_left, &mut self.cow_buffers);
            match next(queue, slot, &self.disks, left, buffers) {
                NextPiece::Go => {}
                NextPiece::Later => return self.defer_zeroing(number, slot),
                NextPiece::Submit => return self.submit_or_wait(number, slot),
                NextPiece::BlockingPool(job) => {
                    return self.start_job(number, slot, job);
                }
                NextPiece::Fail(errno) => {
                    return self.finish(number, slot, Status::IoError, -errno);
                }
            }
        }
    }

    /// Others have their turn before this one goes on with zeroes.
    #[cold]
    pub fn defer_zeroing(&mut self, number: usize, slot: u16) {
        if let Some(queue) = &self.queues[number]
            && let Some(thread_disk) = &mut self.disks[queue.thread_disk]
        {
            thread_disk.zeroing.push_back((number, slot));
            self.zeroing += 1;
        }
    }

    /// Goes on with requests that read more zeroes than one turn allows, or may write them, of each disk in
    /// turn.
    pub fn continue_zeroing(&mut self) -> FetchResult {
        self.zeroes_left = ZEROES_PER_TURN;
        while self.zeroing > 0 && self.zeroes_left > 0 {
            self.zero_turn = (self.zero_turn + 1) % self.disks.len();
            if let Some(thread_disk) = &mut self.disks[self.zero_turn]
                && let Some((number, slot)) = thread_disk.zeroing.pop_front()
            {
                self.zeroing -= 1;
                self.go_on_with_zeroes(number, slot);
            }
        }
        match self.zeroing {
            0 => FetchResult::Nothing,
            _ => FetchResult::More,
        }
    }

    fn go_on_with_zeroes(&mut self, number: usize, slot: u16) {
        let queue = self.queues[number].as_ref();
        match queue.map(|queue| queue.pieces.get(usize::from(slot))) {
            None => {}
            Some(None) => self.submit_or_wait(number, slot),
            Some(Some(piece)) if piece.pin.is_none() => self.start_pieces(number, slot),
            Some(Some(_)) => self.step(number, slot),
        }
    }

    /// The piece under way has been moved.
    pub fn piece_moved(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let piece = &mut queue.pieces[usize::from(slot)];
        if std::mem::take(&mut piece.copying) {
            return self.write_merged(number, slot);
        }
        if let Some(merge) = piece.merge.take() {
            self.cow_buffers.give_back(merge);
        }
        if let Some(allocation) = piece.allocation.take() {
            queue.slots.get(slot).unstable = true;
            let Some(chain) = queue.image.chain().cloned() else {
                return;
            };
            if let Err(allocation) = chain.try_commit(allocation) {
                let disk = queue.disk.clone();
                let job = move || commit(&chain, &disk, allocation);
                return self.start_job(number, slot, job);
            }
        }
        self.next_piece(number, slot);
    }

    /// Has what stands beside the guest's bytes: writes all of it.
    fn write_merged(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let Some(thread_disk) = &self.disks[queue.thread_disk] else {
            return;
        };
        join(queue, slot, thread_disk.written());
        self.submit_or_wait(number, slot);
    }

    /// Tries to commit again what could not be committed.
    pub fn commit(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let allocation = queue.pieces[usize::from(slot)].allocation.take();
        if let (Some(allocation), Some(chain)) = (allocation, queue.image.chain().cloned()) {
            let disk = queue.disk.clone();
            let job = move || commit(&chain, &disk, allocation);
            self.start_job(number, slot, job);
        }
    }

    fn next_piece(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let piece = &mut queue.pieces[usize::from(slot)];
        piece.at += piece.len;
        piece.rest -= piece.len;
        self.step(number, slot);
    }

    /// Takes up the requests for which the blocking pool has done something.
    pub fn take_job_results(&mut self) {
        for (request, outcome) in self.blocking_pool.collect() {
            self.take_up(request, outcome);
        }
    }

    fn take_up(&mut self, request: JobId, outcome: JobResult) {
        let JobId {
            queue: number,
            slot,
        } = request;
        let Some(queue) = &mut self.queues[number] else {
            debug_assert!(false, "a queue was dropped with a job under way");
            return;
        };
        let piece = &mut queue.pieces[usize::from(slot)];
        let s = queue.slots.get(slot);
        let before = !matches!(
            outcome,
            JobResult::Committed | JobResult::NotCommitted(..) | JobResult::Flushed { .. }
        );
        if s.stamps.fetched > 0 && before {
            s.stamps.submitted = now_ns();
        }
        match outcome {
            JobResult::Again => self.step(number, slot),
            JobResult::Bytes(bytes) => {
                whole_or_cut(s, piece, bytes.len() as u64);
                queue.ring.copy_to(s.segments(), &bytes);
                self.next_piece(number, slot);
            }
            JobResult::Prepared(allocation) => {
                let (to, len) = (allocation.to, allocation.len);
                piece.allocation = Some(allocation);
                if let Some(thread_disk) = &self.disks[queue.thread_disk] {
                    begin(s, piece, thread_disk.written(), to, len);
                }
                self.submit_or_wait(number, slot);
            }
            JobResult::Merged(allocation, merge) => {
                (piece.allocation, piece.merge) = (Some(allocation), Some(merge));
                self.write_merged(number, slot);
            }
            JobResult::Committed => self.next_piece(number, slot),
            JobResult::Zeroed { done } => {
                s.unstable = true;
                piece.at += done;
                piece.rest -= done;
                self.step(number, slot);
            }
            JobResult::Wait(_) | JobResult::Waits => {
                debug_assert!(false, "who waits has no outcome");
            }
            JobResult::Aborted(RequestEnd::Finish(status, result)) => {
                self.finish(number, slot, status, result);
            }
            JobResult::Aborted(RequestEnd::Leave) => {
                self.leave(number, slot);
                self.finish_stop(number);
            }
            JobResult::Failed {
                errno,
                lasting: true,
            } => {
                self.finish(number, slot, Status::IoError, -errno);
            }
            JobResult::Failed { errno, .. } => self.fail(number, slot, errno, Redo::MappedRequest),
            JobResult::NotCommitted(allocation, errno) => {
                piece.allocation = Some(allocation);
                self.fail(number, slot, errno, Redo::Commit);
            }
            JobResult::Flushed { errno, lost } => {
                let place = queue.thread_disk;
                self.image_flush_ended(place, errno, lost);
            }
        }
    }

    /// Has something done for a request that blocks. If that has to wait for somebody else's write, the request goes on
    /// when it has ended.
    fn start_job(
        &mut self,
        number: usize,
        slot: u16,
        job: impl FnOnce() -> JobResult + Send + 'static,
    ) {
        let Some(queue) = &self.queues[number] else {
            return;
        };
        let request = JobId {
            queue: number,
            slot,
        };
        let (image, wake) = (queue.image.clone(), self.blocking_pool.waker(request));
        // Under the image's lock, which is held while its files are read and written.
        self.blocking_pool
            .start(queue.thread_disk, request, move || match job() {
                JobResult::Wait(waiting) => {
                    let image = image.chain().and_then(|chain| chain.image());
                    let waker = Waker::from(Arc::new(Requeue(wake)));
                    match image.map(|image| image.poll_wait(&waiting, &waker)) {
                        Some(Poll::Pending) => JobResult::Waits,
                        _ => JobResult::Again,
                    }
                }
                outcome => outcome,
            });
    }

    /// Gives back what was taken for a request that ends before it was used; the request ends after that. Returns
    /// whether there is such.
    #[inline]
    pub fn start_abort(&mut self, number: usize, slot: u16, end: RequestEnd) -> bool {
        let Some(queue) = &mut self.queues[number] else {
            return false;
        };
        let piece = queue.pieces.get_mut(usize::from(slot));
        let Some(allocation) = piece.and_then(|piece| piece.allocation.take()) else {
            return false;
        };
        let image = queue.image.clone();
        self.start_job(number, slot, move || {
            if let Some(chain) = image.chain() {
                chain.abort(allocation);
            }
            JobResult::Aborted(end)
        });
        true
    }

    /// Begins to make a disk durable for this request, which leads all that wait for it.
    pub fn begin_sync(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        if let Some(chain) = queue.image.chain() {
            if chain.needs_flush() {
                let (chain, disk) = (chain.clone(), queue.disk.clone());
                return self.start_job(number, slot, move || flush(&chain, &disk));
            }
            if !queue.disk.options.cache.flushes() {
                let place = queue.thread_disk;
                return self.sync_ended(place, 0);
            }
            if let Some(thread_disk) = &self.disks[queue.thread_disk] {
                mapped_of(&mut queue.pieces, slot).file = thread_disk.written();
            }
        }
        self.submit(number, slot);
    }
}

impl Queue {
    /// Gives back what a request has of its image.
    #[inline]
    pub fn release_piece(
        &mut self,
        slot: u16,
        disks: &mut [Option<ThreadDisk>],
        buffers: &mut CowBuffers,
    ) {
        if let Some(piece) = self.pieces.get_mut(usize::from(slot))
            && let Some(chain) = self.image.chain()
        {
            debug_assert!(piece.allocation.is_none(), "it is given back first");
            if let Some(merge) = piece.merge.take() {
                buffers.give_back(merge);
                piece.copying = false;
            }
            if let Some(pin) = piece.pin.take()
                && let Some(thread_disk) = &mut disks[self.thread_disk]
            {
                thread_disk.pins.unpin(chain.pins(), pin);
            }
        }
    }
}

/// Puts the guest's bytes to what stands beside them, and makes all of it ready for the engine.
fn join(queue: &mut Queue, slot: u16, file: FileId) {
    let (s, piece) = (queue.slots.get(slot), &mut queue.pieces[usize::from(slot)]);
    let Some(len) = piece.allocation.as_ref().map(|allocation| allocation.len) else {
        return;
    };
    whole_or_cut(s, piece, len);
    if let Some(merge) = &mut piece.merge {
        queue.ring.copy_from(s.segments(), merge.gap(len));
        let (at, segment) = merge.write();
        s.set_segments(&[segment]);
        (s.at, s.left, piece.file) = (at, segment.len as u64, file);
    }
}

/// Looks up the next piece of a request.
fn next(
    queue: &mut Queue,
    slot: u16,
    disks: &[Option<ThreadDisk>],
    zeroes_left: &mut u64,
    buffers: &mut CowBuffers,
) -> NextPiece {
    let Queue {
        image,
        ring,
        slots,
        pieces,
        thread_disk,
        alignment,
        disk,
        ..
    } = queue;
    let (s, piece) = (slots.get(slot), &mut pieces[usize::from(slot)]);
    let (Some(chain), Some(pin), Some(thread_disk)) =
        (image.chain(), &piece.pin, disks[*thread_disk].as_ref())
    else {
        return NextPiece::Fail(rustix::io::Errno::IO.raw_os_error());
    };
    let damaged = NextPiece::Fail(rustix::io::Errno::IO.raw_os_error());
    let (at, rest) = (piece.at, piece.rest);
    match s.request {
        Request::Read { .. } => match chain.map(pin, at, rest) {
            ReadLocation::Data {
                file,
                at: from,
                len,
            } => match whole_blocks(from, len, alignment.len) {
                Ok(len) => {
                    begin(s, piece, thread_disk.files[usize::from(file.0)], from, len);
                    NextPiece::Submit
                }
                Err(len) => {
                    let chain = chain.clone();
                    blocking(disk, move || {
                        part_of_block(&chain, at, len).map(JobResult::Bytes)
                    })
                }
            },
            ReadLocation::Zero { .. } if *zeroes_left == 0 => NextPiece::Later,
            ReadLocation::Zero { len } => {
                let len = zeroes_now(len, zeroes_left);
                whole_or_cut(s, piece, len);
                ring.zero(s.segments());
                piece.at += len;
                piece.rest -= len;
                NextPiece::Go
            }
            ReadLocation::Compressed(packed) => {
                let chain = chain.clone();
                blocking(disk, move || chain.unpack(&packed).map(JobResult::Bytes))
            }
            ReadLocation::Load(missing) => {
                let chain = chain.clone();
                blocking(disk, move || chain.load(missing).map(|()| JobResult::Again))
            }
            ReadLocation::Damaged { .. } => damaged,
        },
        Request::Write { .. } => match chain.map_write(pin, at, rest) {
            WriteLocation::InPlace { file, at, len } => {
                begin(s, piece, thread_disk.files[usize::from(file.0)], at, len);
                NextPiece::Submit
            }
            WriteLocation::Allocate { len } => match chain.try_prepare_write(pin, at, len) {
                Some(allocation) if allocation.fills.is_empty() => {
                    let (to, len) = (allocation.to, allocation.len);
                    piece.allocation = Some(allocation);
                    begin(s, piece, thread_disk.written(), to, len);
                    NextPiece::Submit
                }
                Some(allocation) => {
                    let planned = CowWrite::plan(chain, pin, &allocation, *alignment, buffers);
                    let Some((merge, beside)) = planned else {
                        let chain = chain.clone();
                        return blocking(disk, move || fill(&chain, allocation));
                    };
                    (piece.allocation, piece.merge) = (Some(allocation), Some(merge));
                    match beside {
                        FillSource::Zeroes => join(queue, slot, thread_disk.written()),
                        FillSource::Bytes(read) => {
                            copy(s, piece, thread_disk.files[usize::from(read.file.0)], read);
                        }
                    }
                    NextPiece::Submit
                }
                None => {
                    let chain = chain.clone();
                    blocking(disk, move || prepare(&chain, at, len))
                }
            },
            WriteLocation::Load(missing) => {
                let chain = chain.clone();
                blocking(disk, move || chain.load(missing).map(|()| JobResult::Again))
            }
            // To prepare it says what is wrong, and sees to it that nothing more is written.
            WriteLocation::Damaged { len } => {
                let chain = chain.clone();
                blocking(disk, move || prepare(&chain, at, len))
            }
        },
        Request::Discard { .. } => {
            let chain = chain.clone();
            blocking(disk, move || zero(&chain, at, rest, ZeroMode::Discard))
        }
        Request::WriteZeroes { unmap, .. } => {
            let chain = chain.clone();
            blocking(disk, move || {
                zero(&chain, at, rest, ZeroMode::Zeroes { unmap })
            })
        }
        Request::Flush | Request::GetId => damaged,
    }
}

fn blocking(
    disk: &Arc<Disk>,
    job: impl FnOnce() -> Result<JobResult, ImageError> + Send + 'static,
) -> NextPiece {
    let disk = disk.clone();
    NextPiece::BlockingPool(Box::new(move || {
        job().unwrap_or_else(|e| {
            disk.image_failed(&e);
            JobResult::Failed {
                errno: e.errno(),
                lasting: e.is_permanent(),
            }
        })
    }))
}

fn commit(chain: &Chain, disk: &Disk, allocation: Allocation) -> JobResult {
    let Err((e, allocation)) = chain.commit_or_keep(allocation) else {
        return JobResult::Committed;
    };
    disk.image_failed(&e);
    match e.is_permanent() {
        true => {
            chain.abort(allocation);
            JobResult::Failed {
                errno: e.errno(),
                lasting: true,
            }
        }
        false => JobResult::NotCommitted(allocation, e.errno()),
    }
}

fn flush(chain: &Chain, disk: &Disk) -> JobResult {
    let Err(e) = chain.flush() else {
        return JobResult::Flushed {
            errno: 0,
            lost: false,
        };
    };
    disk.image_failed(&e);
    JobResult::Flushed {
        errno: e.errno(),
        lost: matches!(e, ImageError::Lost { .. }),
    }
}

/// Makes a piece ready for the engine.
fn begin(
    s: &mut crate::slot::Slot,
    piece: &mut MappedRequest,
    file: FileId,
    at: FileOffset,
    len: u64,
) {
    whole_or_cut(s, piece, len);
    (s.at, s.left, piece.file) = (at, len, file);
}

/// Makes a read of what stands beside a piece ready for the engine.
fn copy(s: &mut crate::slot::Slot, piece: &mut MappedRequest, file: FileId, read: CowRead) {
    if piece.segments.is_empty() {
        // The guest's, for later.
        piece.segments.extend_from_slice(s.segments());
    }
    s.set_segments(&[read.to]);
    (s.at, s.left, piece.file) = (read.at, read.len, file);
    piece.copying = true;
}

/// So many of `len` bytes of zeroes are written now.
fn zeroes_now(len: u64, left: &mut u64) -> u64 {
    let now = len.min(*left);
    *left -= now;
    now
}

/// How many of these bytes the engine can read; or, as an error, how many it cannot read alone: those of
/// one block of the file, where a raw file ends or the piece begins in the middle of one.
fn whole_blocks(at: FileOffset, len: u64, block: u32) -> Result<u64, u64> {
    let block = u64::from(block);
    match (at.0 % block, len - len % block) {
        (0, 0) => Err(len),
        (0, whole) => Ok(whole),
        (skip, _) => Err(len.min(block - skip)),
    }
}

fn part_of_block(chain: &Chain, at: u64, len: u64) -> Result<Vec<u8>, ImageError> {
    let mut bytes = vec![0; len as usize];
    let pin = chain.pins().pin(0);
    let read = chain.read(&pin, at, &mut bytes);
    chain.pins().unpin(pin);
    read.map(|()| bytes)
}

/// The slot gets the segments of the next `len` bytes.
fn whole_or_cut(s: &mut crate::slot::Slot, piece: &mut MappedRequest, len: u64) {
    piece.len = len;
    if piece.segments.is_empty() {
        if len == piece.rest {
            return;
        }
        piece.segments.extend_from_slice(s.segments());
    }
    s.set_segments(piece.cut(len));
}

/// Takes clusters for a write, and puts what stands beside it there.
fn prepare(chain: &Chain, at: u64, len: u64) -> Result<JobResult, ImageError> {
    Ok(match chain.prepare_write(at, len)? {
        Prepared::Mapped => JobResult::Again,
        Prepared::Wait(waiting) => JobResult::Wait(waiting),
        Prepared::Allocated(allocation) => fill(chain, allocation)?,
    })
}

fn fill(chain: &Chain, allocation: Allocation) -> Result<JobResult, ImageError> {
    if allocation.fills.is_empty() {
        return Ok(JobResult::Prepared(allocation));
    }
    match CowWrite::read(chain, &allocation) {
        Ok(Some(merge)) => Ok(JobResult::Merged(allocation, merge)),
        Ok(None) => chain.fill(allocation).map(JobResult::Prepared),
        Err(e) => {
            chain.abort(allocation);
            Err(e)
        }
    }
}

/// Gives a range up, as far as that goes without waiting for others.
fn zero(chain: &Chain, at: u64, len: u64, why: ZeroMode) -> Result<JobResult, ImageError> {
    Ok(match chain.zero(at, len, why)? {
        (0, Some(waiting)) => JobResult::Wait(waiting),
        // What is left is looked at anew.
        (done, _) => JobResult::Zeroed { done },
    })
}
