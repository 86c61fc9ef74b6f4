//! Requests to a disk whose image maps: each goes piece by piece. The image says where the next piece
//! is, the engine moves it, and so on. What the image cannot say or do from memory goes to the
//! [slow lane](crate::slow).
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
use image::{Allocation, Chain, ImageError, Pin, Place, Prepared, WritePlace, Zeroing};

use crate::clock::now_ns;
use crate::disk::Disk;
use crate::fetch::Fetched;
use crate::local::Local;
use crate::merge::{Beside, Buffers, Merge, Read};
use crate::queue::Queue;
use crate::slot::Redo;
use crate::slow::{End, For, Outcome};
use crate::worker::Worker;
use crate::zeroes;

/// Bytes that a thread zeroes of its guests' memory, or looks for zeroes in, in one turn, so that what else it serves waits for
/// no more than that.
const ZEROES_PER_TURN: u64 = 1 << 20;

/// How far a request is.
pub(crate) struct Piece {
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
    merge: Option<Merge>,
    /// What stands beside these is being read first.
    pub copying: bool,
    /// Segments of `rest`, once the request turned out to have several pieces.
    segments: Vec<Segment>,
    /// The first of these that is not used up.
    first: usize,
    /// Those of the piece.
    cut: Vec<Segment>,
}

impl Piece {
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
pub(crate) fn piece_of(pieces: &mut Vec<Piece>, slot: u16) -> &mut Piece {
    let place = usize::from(slot);
    if place >= pieces.len() {
        add(pieces, place + 1);
    }
    &mut pieces[place]
}

/// Makes those that are not there, for which there is memory.
#[cold]
#[inline(never)]
fn add(pieces: &mut Vec<Piece>, len: usize) {
    debug_assert!(len <= pieces.capacity());
    pieces.resize_with(len, Piece::new);
}

/// Has a request looked at anew.
struct Anew<F>(F);

impl<F: Fn() + Send + Sync> TaskWake for Anew<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

/// What is to be done next for a request.
enum Next {
    /// Its piece is ready for the engine.
    Submit,
    /// Its piece reads as zeroes, and they are there.
    Go,
    /// Its piece reads as zeroes, but first it is somebody else's turn.
    Later,
    /// Nothing, before the slow lane has done this.
    Slow(Box<dyn FnOnce() -> Outcome + Send>),
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
            local,
            ..
        }) = &mut self.queues[number]
        else {
            return;
        };
        let (Some(chain), Some(local), s) =
            (image.chain(), &mut self.locals[*local], slots.get(slot))
        else {
            return;
        };
        let piece = piece_of(pieces, slot);
        if !zeroes::detect(disk, ring, s, &mut self.zeroes_left) {
            return self.zero_later(number, slot);
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
        piece.pin = Some(local.pins.pin(chain.pins()));
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
            let (left, buffers) = (&mut self.zeroes_left, &mut self.merges);
            match next(queue, slot, &self.locals, left, buffers) {
                Next::Go => {}
                Next::Later => return self.zero_later(number, slot),
                Next::Submit => return self.submit_or_starve(number, slot),
                Next::Slow(job) => {
                    return self.start_slow(number, slot, job);
                }
                Next::Fail(errno) => {
                    return self.finish(number, slot, Status::IoError, -errno);
                }
            }
        }
    }

    /// Others have their turn before this one goes on with zeroes.
    #[cold]
    pub fn zero_later(&mut self, number: usize, slot: u16) {
        if let Some(queue) = &self.queues[number]
            && let Some(local) = &mut self.locals[queue.local]
        {
            local.zeroing.push_back((number, slot));
            self.zeroing += 1;
        }
    }

    /// Goes on with requests that read more zeroes than one turn allows, or may write them, of each disk in
    /// turn.
    pub fn zero_on(&mut self) -> Fetched {
        self.zeroes_left = ZEROES_PER_TURN;
        while self.zeroing > 0 && self.zeroes_left > 0 {
            self.zeroed = (self.zeroed + 1) % self.locals.len();
            if let Some(local) = &mut self.locals[self.zeroed]
                && let Some((number, slot)) = local.zeroing.pop_front()
            {
                self.zeroing -= 1;
                self.go_on_with_zeroes(number, slot);
            }
        }
        match self.zeroing {
            0 => Fetched::Nothing,
            _ => Fetched::More,
        }
    }

    fn go_on_with_zeroes(&mut self, number: usize, slot: u16) {
        let queue = self.queues[number].as_ref();
        match queue.map(|queue| queue.pieces.get(usize::from(slot))) {
            None => {}
            Some(None) => self.submit_or_starve(number, slot),
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
            self.merges.give_back(merge);
        }
        if let Some(allocation) = piece.allocation.take() {
            queue.slots.get(slot).unstable = true;
            let Some(chain) = queue.image.chain().cloned() else {
                return;
            };
            if let Err(allocation) = chain.try_commit(allocation) {
                let disk = queue.disk.clone();
                let job = move || commit(&chain, &disk, allocation);
                return self.start_slow(number, slot, job);
            }
        }
        self.next_piece(number, slot);
    }

    /// Has what stands beside the guest's bytes: writes all of it.
    fn write_merged(&mut self, number: usize, slot: u16) {
        let Some(queue) = &mut self.queues[number] else {
            return;
        };
        let Some(local) = &self.locals[queue.local] else {
            return;
        };
        join(queue, slot, local.written());
        self.submit_or_starve(number, slot);
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
            self.start_slow(number, slot, job);
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

    /// Takes up the requests for which the slow lane has done something.
    pub fn look_at_slow(&mut self) {
        for (request, outcome) in self.slow.collect() {
            self.take_up(request, outcome);
        }
    }

    fn take_up(&mut self, request: For, outcome: Outcome) {
        let For {
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
            Outcome::Committed | Outcome::NotCommitted(..) | Outcome::Flushed { .. }
        );
        if s.stamps.fetched > 0 && before {
            s.stamps.submitted = now_ns();
        }
        match outcome {
            Outcome::Again => self.step(number, slot),
            Outcome::Bytes(bytes) => {
                whole_or_cut(s, piece, bytes.len() as u64);
                queue.ring.copy_to(s.segments(), &bytes);
                self.next_piece(number, slot);
            }
            Outcome::Prepared(allocation) => {
                let (to, len) = (allocation.to, allocation.len);
                piece.allocation = Some(allocation);
                if let Some(local) = &self.locals[queue.local] {
                    begin(s, piece, local.written(), to, len);
                }
                self.submit_or_starve(number, slot);
            }
            Outcome::Merged(allocation, merge) => {
                (piece.allocation, piece.merge) = (Some(allocation), Some(merge));
                self.write_merged(number, slot);
            }
            Outcome::Committed => self.next_piece(number, slot),
            Outcome::Zeroed { done } => {
                s.unstable = true;
                piece.at += done;
                piece.rest -= done;
                self.step(number, slot);
            }
            Outcome::Wait(_) | Outcome::Waits => {
                debug_assert!(false, "who waits has no outcome");
            }
            Outcome::Aborted(End::Finish(status, result)) => {
                self.finish(number, slot, status, result);
            }
            Outcome::Aborted(End::Leave) => {
                self.leave(number, slot);
                self.finish_stop(number);
            }
            Outcome::Failed {
                errno,
                lasting: true,
            } => {
                self.finish(number, slot, Status::IoError, -errno);
            }
            Outcome::Failed { errno, .. } => self.fail(number, slot, errno, Redo::Piece),
            Outcome::NotCommitted(allocation, errno) => {
                piece.allocation = Some(allocation);
                self.fail(number, slot, errno, Redo::Commit);
            }
            Outcome::Flushed { errno, lost } => {
                let place = queue.local;
                self.flushed(place, errno, lost);
            }
        }
    }

    /// Has something done for a request that blocks. If that has to wait for somebody else's write, the request goes on
    /// when it has ended.
    fn start_slow(
        &mut self,
        number: usize,
        slot: u16,
        job: impl FnOnce() -> Outcome + Send + 'static,
    ) {
        let Some(queue) = &self.queues[number] else {
            return;
        };
        let request = For {
            queue: number,
            slot,
        };
        let (image, wake) = (queue.image.clone(), self.slow.waker(request));
        // Under the image's lock, which is held while its files are read and written.
        self.slow.start(queue.local, request, move || match job() {
            Outcome::Wait(waiting) => {
                let image = image.chain().and_then(|chain| chain.image());
                let waker = Waker::from(Arc::new(Anew(wake)));
                match image.map(|image| image.poll_wait(&waiting, &waker)) {
                    Some(Poll::Pending) => Outcome::Waits,
                    _ => Outcome::Again,
                }
            }
            outcome => outcome,
        });
    }

    /// Gives back what was taken for a request that ends before it was used; the request ends after that. Returns
    /// whether there is such.
    #[inline]
    pub fn aborts(&mut self, number: usize, slot: u16, end: End) -> bool {
        let Some(queue) = &mut self.queues[number] else {
            return false;
        };
        let piece = queue.pieces.get_mut(usize::from(slot));
        let Some(allocation) = piece.and_then(|piece| piece.allocation.take()) else {
            return false;
        };
        let image = queue.image.clone();
        self.start_slow(number, slot, move || {
            if let Some(chain) = image.chain() {
                chain.abort(allocation);
            }
            Outcome::Aborted(end)
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
                return self.start_slow(number, slot, move || flush(&chain, &disk));
            }
            if !queue.disk.options.cache.flushes() {
                let place = queue.local;
                return self.synced(place, 0);
            }
            if let Some(local) = &self.locals[queue.local] {
                piece_of(&mut queue.pieces, slot).file = local.written();
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
        locals: &mut [Option<Local>],
        buffers: &mut Buffers,
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
                && let Some(local) = &mut locals[self.local]
            {
                local.pins.unpin(chain.pins(), pin);
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
    locals: &[Option<Local>],
    zeroes_left: &mut u64,
    buffers: &mut Buffers,
) -> Next {
    let Queue {
        image,
        ring,
        slots,
        pieces,
        local,
        alignment,
        disk,
        ..
    } = queue;
    let (s, piece) = (slots.get(slot), &mut pieces[usize::from(slot)]);
    let (Some(chain), Some(pin), Some(local)) =
        (image.chain(), &piece.pin, locals[*local].as_ref())
    else {
        return Next::Fail(rustix::io::Errno::IO.raw_os_error());
    };
    let damaged = Next::Fail(rustix::io::Errno::IO.raw_os_error());
    let (at, rest) = (piece.at, piece.rest);
    match s.request {
        Request::Read { .. } => match chain.map(pin, at, rest) {
            Place::Data {
                file,
                at: from,
                len,
            } => match whole_blocks(from, len, alignment.len) {
                Ok(len) => {
                    begin(s, piece, local.files[usize::from(file.0)], from, len);
                    Next::Submit
                }
                Err(len) => {
                    let chain = chain.clone();
                    slow(disk, move || {
                        part_of_block(&chain, at, len).map(Outcome::Bytes)
                    })
                }
            },
            Place::Zero { .. } if *zeroes_left == 0 => Next::Later,
            Place::Zero { len } => {
                let len = zeroes_now(len, zeroes_left);
                whole_or_cut(s, piece, len);
                ring.zero(s.segments());
                piece.at += len;
                piece.rest -= len;
                Next::Go
            }
            Place::Compressed(packed) => {
                let chain = chain.clone();
                slow(disk, move || chain.unpack(&packed).map(Outcome::Bytes))
            }
            Place::Load(missing) => {
                let chain = chain.clone();
                slow(disk, move || chain.load(missing).map(|()| Outcome::Again))
            }
            Place::Damaged { .. } => damaged,
        },
        Request::Write { .. } => match chain.map_write(pin, at, rest) {
            WritePlace::InPlace { file, at, len } => {
                begin(s, piece, local.files[usize::from(file.0)], at, len);
                Next::Submit
            }
            WritePlace::Allocate { len } => match chain.try_prepare_write(pin, at, len) {
                Some(allocation) if allocation.fills.is_empty() => {
                    let (to, len) = (allocation.to, allocation.len);
                    piece.allocation = Some(allocation);
                    begin(s, piece, local.written(), to, len);
                    Next::Submit
                }
                Some(allocation) => {
                    let planned = Merge::plan(chain, pin, &allocation, *alignment, buffers);
                    let Some((merge, beside)) = planned else {
                        let chain = chain.clone();
                        return slow(disk, move || fill(&chain, allocation));
                    };
                    (piece.allocation, piece.merge) = (Some(allocation), Some(merge));
                    match beside {
                        Beside::Zeroes => join(queue, slot, local.written()),
                        Beside::Bytes(read) => {
                            copy(s, piece, local.files[usize::from(read.file.0)], read);
                        }
                    }
                    Next::Submit
                }
                None => {
                    let chain = chain.clone();
                    slow(disk, move || prepare(&chain, at, len))
                }
            },
            WritePlace::Load(missing) => {
                let chain = chain.clone();
                slow(disk, move || chain.load(missing).map(|()| Outcome::Again))
            }
            // To prepare it says what is wrong, and sees to it that nothing more is written.
            WritePlace::Damaged { len } => {
                let chain = chain.clone();
                slow(disk, move || prepare(&chain, at, len))
            }
        },
        Request::Discard { .. } => {
            let chain = chain.clone();
            slow(disk, move || zero(&chain, at, rest, Zeroing::Discard))
        }
        Request::WriteZeroes { unmap, .. } => {
            let chain = chain.clone();
            slow(disk, move || {
                zero(&chain, at, rest, Zeroing::Zeroes { unmap })
            })
        }
        Request::Flush | Request::GetId => damaged,
    }
}

fn slow(
    disk: &Arc<Disk>,
    job: impl FnOnce() -> Result<Outcome, ImageError> + Send + 'static,
) -> Next {
    let disk = disk.clone();
    Next::Slow(Box::new(move || {
        job().unwrap_or_else(|e| {
            disk.image_failed(&e);
            Outcome::Failed {
                errno: e.errno(),
                lasting: e.is_lasting(),
            }
        })
    }))
}

fn commit(chain: &Chain, disk: &Disk, allocation: Allocation) -> Outcome {
    let Err((e, allocation)) = chain.commit_or_keep(allocation) else {
        return Outcome::Committed;
    };
    disk.image_failed(&e);
    match e.is_lasting() {
        true => {
            chain.abort(allocation);
            Outcome::Failed {
                errno: e.errno(),
                lasting: true,
            }
        }
        false => Outcome::NotCommitted(allocation, e.errno()),
    }
}

fn flush(chain: &Chain, disk: &Disk) -> Outcome {
    let Err(e) = chain.flush() else {
        return Outcome::Flushed {
            errno: 0,
            lost: false,
        };
    };
    disk.image_failed(&e);
    Outcome::Flushed {
        errno: e.errno(),
        lost: matches!(e, ImageError::Lost { .. }),
    }
}

/// Makes a piece ready for the engine.
fn begin(s: &mut crate::slot::Slot, piece: &mut Piece, file: FileId, at: FileOffset, len: u64) {
    whole_or_cut(s, piece, len);
    (s.at, s.left, piece.file) = (at, len, file);
}

/// Makes a read of what stands beside a piece ready for the engine.
fn copy(s: &mut crate::slot::Slot, piece: &mut Piece, file: FileId, read: Read) {
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
fn whole_or_cut(s: &mut crate::slot::Slot, piece: &mut Piece, len: u64) {
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
fn prepare(chain: &Chain, at: u64, len: u64) -> Result<Outcome, ImageError> {
    Ok(match chain.prepare_write(at, len)? {
        Prepared::Mapped => Outcome::Again,
        Prepared::Wait(waiting) => Outcome::Wait(waiting),
        Prepared::Allocated(allocation) => fill(chain, allocation)?,
    })
}

fn fill(chain: &Chain, allocation: Allocation) -> Result<Outcome, ImageError> {
    if allocation.fills.is_empty() {
        return Ok(Outcome::Prepared(allocation));
    }
    match Merge::read(chain, &allocation) {
        Ok(Some(merge)) => Ok(Outcome::Merged(allocation, merge)),
        Ok(None) => chain.fill(allocation).map(Outcome::Prepared),
        Err(e) => {
            chain.abort(allocation);
            Err(e)
        }
    }
}

/// Gives a range up, as far as that goes without waiting for others.
fn zero(chain: &Chain, at: u64, len: u64, why: Zeroing) -> Result<Outcome, ImageError> {
    Ok(match chain.zero(at, len, why)? {
        (0, Some(waiting)) => Outcome::Wait(waiting),
        // What is left is looked at anew.
        (done, _) => Outcome::Zeroed { done },
    })
}
