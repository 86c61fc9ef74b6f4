//! The engine: it sends requests for images to librbd and all others to the inner engine, on which the thread sleeps.

use std::any::Any;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use block::{Aio, Backing, Completion, Engine, FileId, Op, Remote, Segment, Token};

use crate::cluster::check;
use crate::error::BLOCKLISTED;
use crate::image::RbdImage;
use crate::inbox::{Inbox, Operation};
use crate::library::{Library, Pointer};
use crate::watch::Size;

/// The bit that marks the `FileId` of an image.
const IMAGE: u32 = 1 << 30;

/// The largest number of operations of one thread: as many as the inner engine accepts.
const IN_FLIGHT_MAX: usize = 4096;

/// The largest operation in bytes: librbd keeps copies of the data. A longer request completes short, and the caller
/// submits the rest.
const BYTES_MAX: usize = 4 << 20;

/// Adjacent reads, or adjacent writes, are merged into one operation (a run) of at most this many bytes and segments. A
/// cluster does so much work per operation that the speed of small sequential I/O depends on this.
const RUN_BYTES_MAX: usize = 512 << 10;
const RUN_SEGMENTS_MAX: usize = 256;

/// Bytes that one thread may have in flight for one image. Further operations wait here, and delay no other image. This
/// is twice what a network of 100 Gbit/s moves in 2 ms.
const IMAGE_BYTES_MAX: usize = 64 << 20;

/// The token with which the inner engine reports that the inbox's event was written.
const INBOX_EVENT: Token = Token(1 << 58);

/// RBD_WRITE_ZEROES_FLAG_THICK_PROVISION: librbd writes zeroes and does not punch a hole.
const THICK: i32 = 1;

/// An engine that serves images itself and passes everything else to another engine.
pub struct RbdEngine<E> {
    inner: E,
    inbox: Arc<Inbox>,
    /// The inner engine watches the inbox's event.
    watched: bool,
    images: Vec<Option<Attached>>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// The run that librbd does not have yet, because the next operation may extend it.
    run: Option<Run>,
    /// Operations in flight, or completed and not yet reaped.
    in_flight: usize,
    /// Completions that have not been reaped.
    ended: VecDeque<Completion>,
}

struct Attached {
    image: Arc<RbdImage>,
    /// Bytes in flight.
    bytes: usize,
    /// Runs that wait until fewer bytes are in flight, or until the size is known; each by the index of its first
    /// operation.
    waiting: VecDeque<usize>,
}

/// An operation in the engine's table.
struct Slot {
    /// The pointer that librbd passes back; what it points to is never moved.
    operation: *mut Operation,
    token: Token,
    image: usize,
    /// Bytes to transfer; 0 if the operation transfers none.
    bytes: usize,
    action: Action,
    /// The next operation in the run.
    next: Option<usize>,
    /// In the first operation of a run: the bytes of the run, and its segments if it has more than one operation.
    run_bytes: usize,
    run_segments: Vec<Segment>,
    /// In the first operation of a run: the image's number of changes when the run was submitted to librbd.
    changes: u64,
}

/// One or more operations that are submitted as one.
#[derive(Clone, Copy)]
struct Run {
    first: usize,
    last: usize,
    segments: usize,
}

#[derive(Clone, Copy)]
enum Action {
    Move {
        write: bool,
        at: u64,
        list: *const Segment,
        n: usize,
    },
    Flush,
    Discard {
        at: u64,
        len: u64,
    },
    Zero {
        at: u64,
        len: u64,
        unmap: bool,
    },
}

// SAFETY: the pointers are to operations that this engine owns, and to lists of segments that their submitters have
// promised to keep valid.
unsafe impl<E: Send> Send for RbdEngine<E> {}

impl<E: Engine> RbdEngine<E> {
    /// Adds images to what `inner` serves.
    ///
    /// # Errors
    /// The system cannot create an event descriptor.
    pub fn new(inner: E) -> io::Result<Self> {
        Ok(Self {
            inner,
            inbox: Inbox::new()?,
            watched: false,
            images: Vec::new(),
            slots: Vec::new(),
            free: Vec::new(),
            run: None,
            in_flight: 0,
            ended: VecDeque::new(),
        })
    }

    /// Adds an operation to the table, and to the current run if it extends it.
    ///
    /// # Safety
    /// As for [`Engine::submit`].
    unsafe fn submit_to_image(&mut self, file: FileId, op: Op<'_>, token: Token) {
        let index = self.free.pop().unwrap_or_else(|| {
            let index = self.slots.len();
            let operation = Operation::new(self.inbox.clone(), index);
            self.slots.push(Slot {
                operation: Box::into_raw(operation),
                token,
                image: 0,
                bytes: 0,
                action: Action::Flush,
                next: None,
                run_bytes: 0,
                run_segments: Vec::new(),
                changes: 0,
            });
            index
        });
        self.in_flight += 1;
        let slot = &mut self.slots[index];
        (slot.token, slot.image) = (token, (file.0 & !IMAGE) as usize);
        slot.bytes = 0;
        slot.action = match op {
            Op::Read { at, to } => slot.transfer(false, at.0, to),
            Op::Write { at, from, .. } => slot.transfer(true, at.0, from),
            Op::Flush => Action::Flush,
            Op::Discard { at, len, .. } => Action::Discard { at: at.0, len },
            Op::WriteZeroes { at, len, unmap, .. } => Action::Zero {
                at: at.0,
                len,
                unmap,
            },
        };
        (slot.next, slot.run_bytes) = (None, slot.bytes);
        let segments = match slot.action {
            Action::Move { n, .. } => n,
            _ => 0,
        };
        if let Some(run) = &mut self.run
            && follows(&self.slots, run, index, segments)
        {
            self.slots[run.first].run_bytes += self.slots[index].bytes;
            self.slots[run.last].next = Some(index);
            (run.last, run.segments) = (index, run.segments + segments);
            return;
        }
        self.end_run();
        self.run = Some(Run {
            first: index,
            last: index,
            segments,
        });
    }

    /// Ends the current run: no further operation will extend it.
    #[inline]
    fn end_run(&mut self) {
        if let Some(Run { first, .. }) = self.run.take() {
            self.start_or_wait(first);
        }
    }

    /// Starts a run, or queues it if its image has too many bytes in flight or its size is not known.
    #[inline]
    fn start_or_wait(&mut self, first: usize) {
        let slot = &self.slots[first];
        match &mut self.images[slot.image] {
            Some(image) if !image.waiting.is_empty() || !image.can_start(slot) => {
                image.waiting.push_back(first);
            }
            _ => self.start(first),
        }
    }

    /// Submits a run to librbd.
    fn start(&mut self, index: usize) {
        gather(&mut self.slots, index);
        let slot = &mut self.slots[index];
        let Some(attached) = &mut self.images[slot.image] else {
            debug_assert!(false, "the image is attached while it is used");
            return;
        };
        if let Some(end) = slot.end_of_change() {
            let known = attached.image.tracker().known();
            slot.changes = known.changes;
            match known.size {
                Size::Bytes(size) if end <= size => {}
                // Some of its operations may lie before the end.
                Size::Bytes(_) if slot.next.is_some() => return self.start_each(index),
                Size::Bytes(_) => {
                    let result = slot.beyond_end();
                    return self.finish(index, result);
                }
                Size::Unknown => return attached.waiting.push_front(index),
                Size::Failed(errno) => return self.finish(index, -errno),
            }
        }
        attached.bytes += slot.run_bytes;
        let (library, image) = (attached.image.library(), attached.image.handle());
        let mut completion = ptr::null_mut();
        // SAFETY: the operation is not moved until it has been taken from the inbox, to which `completed` adds it.
        let result = unsafe {
            (library.rbd_aio_create_completion)(
                slot.operation.cast(),
                Some(completed),
                &mut completion,
            )
        };
        // SAFETY: memory and list are valid until the operation completes, as its submitter promised; the completion is
        // new, and the image open.
        let result = check(result).and_then(|()| unsafe {
            check(slot.call(library, image, completion)).inspect_err(|_| {
                // librbd did not accept the operation, so only this function holds the completion.
                (library.rbd_aio_release)(completion);
            })
        });
        if let Err(e) = result {
            let errno = e.raw_os_error().unwrap_or(libc::ESHUTDOWN);
            self.end(index, -(errno as isize));
        }
    }

    /// Starts each operation of a run on its own.
    fn start_each(&mut self, first: usize) {
        let mut next = Some(first);
        while let Some(index) = next {
            let slot = &mut self.slots[index];
            (next, slot.run_bytes) = (slot.next.take(), slot.bytes);
            self.start_or_wait(index);
        }
    }

    /// Handles the completion of a run. If the run failed, each of its operations is tried on its own: the error may
    /// concern only one of them.
    fn end(&mut self, first: usize, result: isize) {
        let slot = &self.slots[first];
        let Some(attached) = &mut self.images[slot.image] else {
            debug_assert!(false, "the image is attached while it is used");
            return;
        };
        attached.bytes -= slot.run_bytes;
        let result = i32::try_from(result).unwrap_or(-libc::EIO);
        if result < 0 && slot.next.is_some() {
            return self.start_each(first);
        }
        // librbd may have truncated the operation at an end that was not known when it was submitted.
        if result >= 0
            && slot.end_of_change().is_some()
            && slot.changes != attached.image.tracker().changes()
        {
            return self.start_or_wait(first);
        }
        let result = match slot.action {
            // librbd returns 0 for a completed write.
            Action::Move { write: true, .. } if result == 0 => slot.run_bytes as i32,
            // The guest sees an exhausted quota as a full disk.
            _ if result == -libc::EDQUOT => -libc::ENOSPC,
            _ => result,
        };
        self.finish(first, result);
    }

    /// Completes all operations of a run and frees their entries in the table.
    fn finish(&mut self, first: usize, result: i32) {
        if result == -BLOCKLISTED
            && let Some(attached) = &self.images[self.slots[first].image]
        {
            attached.image.report_blocklisted();
        }
        let (mut next, mut left) = (Some(first), result);
        while let Some(index) = next {
            let slot = &self.slots[index];
            next = slot.next;
            let result = match slot.action {
                Action::Move { .. } if result >= 0 => left.min(slot.bytes as i32),
                _ => result,
            };
            left -= result.max(0);
            let token = slot.token;
            self.ended.push_back(Completion { token, result });
            self.free.push(index);
        }
    }

    /// Handles completed operations, and starts the runs that waited for them.
    fn collect(&mut self) {
        let inbox = self.inbox.clone();
        inbox.take(|index, result| self.end(index, result));
        for image in 0..self.images.len() {
            while let Some(attached) = &mut self.images[image]
                && let Some(&index) = attached.waiting.front()
                && attached.can_start(&self.slots[index])
            {
                attached.waiting.pop_front();
                self.start(index);
            }
        }
    }

    fn idle(&self) -> bool {
        self.in_flight == 0
    }
}

impl Attached {
    /// Whether a run can be started now.
    #[inline]
    fn can_start(&self, run: &Slot) -> bool {
        let has_room = self.bytes == 0 || self.bytes + run.run_bytes <= IMAGE_BYTES_MAX;
        has_room
            && (run.end_of_change().is_none() || self.image.tracker().known().size != Size::Unknown)
    }
}

/// Whether an operation with `segments` segments extends the run.
fn follows(slots: &[Slot], run: &Run, index: usize, segments: usize) -> bool {
    let (first, last, this) = (&slots[run.first], &slots[run.last], &slots[index]);
    match (last.action, this.action) {
        (
            Action::Move { write, at, .. },
            Action::Move {
                write: same,
                at: here,
                ..
            },
        ) => {
            write == same
                && first.image == this.image
                && at + last.bytes as u64 == here
                && first.run_bytes + this.bytes <= RUN_BYTES_MAX
                && run.segments + segments <= RUN_SEGMENTS_MAX
        }
        _ => false,
    }
}

/// Gathers the segments of all operations of a run in one list.
fn gather(slots: &mut [Slot], first: usize) {
    if slots[first].next.is_none() {
        return;
    }
    let mut all = std::mem::take(&mut slots[first].run_segments);
    all.clear();
    let mut next = Some(first);
    while let Some(index) = next {
        if let Action::Move { list, n, .. } = slots[index].action {
            // SAFETY: the list is valid until its operation completes, as its submitter promised; or it is the segment
            // in the operation itself, which librbd does not have yet.
            all.extend_from_slice(unsafe { std::slice::from_raw_parts(list, n) });
        }
        next = slots[index].next;
    }
    slots[first].run_segments = all;
}

impl Slot {
    /// The end of a run in the image, in bytes, if the run changes the image.
    #[inline]
    fn end_of_change(&self) -> Option<u64> {
        let (at, len) = match self.action {
            Action::Move {
                write: true, at, ..
            } => (at, self.run_bytes as u64),
            Action::Discard { at, len } | Action::Zero { at, len, .. } => (at, len),
            Action::Move { .. } | Action::Flush => return None,
        };
        Some(at.saturating_add(len))
    }

    /// The result of an operation that ends beyond the end of the image.
    fn beyond_end(&self) -> i32 {
        match self.action {
            // The result at the end of a file.
            Action::Move { .. } => 0,
            _ => -libc::EIO,
        }
    }

    /// Takes as many of the segments as one operation may hold, and returns the transfer.
    fn transfer(&mut self, write: bool, at: u64, segments: &[Segment]) -> Action {
        let mut n = 0;
        for segment in segments {
            if n > 0 && self.bytes + segment.len > BYTES_MAX {
                break;
            }
            self.bytes += segment.len;
            n += 1;
        }
        let list = match segments {
            // A single segment is copied into the operation, because the list may not outlive this call, and shortened
            // if it is too long.
            &[first, ..] if n == 1 => {
                self.bytes = first.len.min(BYTES_MAX);
                let one = Segment {
                    addr: first.addr,
                    len: self.bytes,
                };
                // SAFETY: the operation is not in flight, so no other thread reads it.
                unsafe {
                    *(*self.operation).one.get() = one;
                    (*self.operation).one.get().cast_const()
                }
            }
            segments => segments.as_ptr(),
        };
        Action::Move { write, at, list, n }
    }

    /// Calls librbd's function for this operation.
    ///
    /// # Safety
    /// Memory and list of segments are valid until the operation completes; the image is open, and the completion new.
    unsafe fn call(&self, library: &Library, image: Pointer, completion: Pointer) -> i32 {
        const {
            assert!(size_of::<Segment>() == size_of::<libc::iovec>());
            assert!(align_of::<Segment>() == align_of::<libc::iovec>());
        }
        // SAFETY: the caller guarantees it. A segment has the layout of an iovec.
        unsafe {
            match self.action {
                Action::Move { write, at, list, n } => {
                    let (list, n) = match self.next {
                        None => (list, n),
                        Some(_) => (self.run_segments.as_ptr(), self.run_segments.len()),
                    };
                    let move_data = if write {
                        library.rbd_aio_writev
                    } else {
                        library.rbd_aio_readv
                    };
                    move_data(image, list.cast(), n as i32, at, completion)
                }
                Action::Flush => (library.rbd_aio_flush)(image, completion),
                Action::Discard { at, len } => {
                    (library.rbd_aio_discard)(image, at, len, completion)
                }
                Action::Zero { at, len, unmap } => match library.rbd_aio_write_zeroes {
                    Some(zero) => {
                        let how = if unmap { 0 } else { THICK };
                        zero(image, at, len as usize, completion, how, 0)
                    }
                    None => -libc::EOPNOTSUPP,
                },
            }
        }
    }
}

/// The callback for librbd's threads.
extern "C" fn completed(completion: Pointer, operation: *mut c_void) {
    // librbd makes this call, so the libraries are loaded and this never fails.
    let Ok(library) = Library::get() else {
        return;
    };
    // SAFETY: the completion has ended and belongs to this function to release; the operation was passed with it, and
    // librbd makes this call once.
    unsafe {
        let result = (library.rbd_aio_get_return_value)(completion);
        (library.rbd_aio_release)(completion);
        Operation::finish(operation.cast(), result);
    }
}

impl<E: Engine> Engine for RbdEngine<E> {
    fn attach(&mut self, file: &Arc<OwnedFd>, backing: Backing, aio: Aio) -> io::Result<FileId> {
        self.inner.attach(file, backing, aio)
    }

    fn attach_remote(&mut self, remote: &Arc<dyn Remote>) -> io::Result<FileId> {
        let any: Arc<dyn Any + Send + Sync> = remote.clone();
        let Ok(image) = any.downcast::<RbdImage>() else {
            return self.inner.attach_remote(remote);
        };
        if !self.watched {
            self.inner.watch(self.inbox.event(), INBOX_EVENT)?;
            self.watched = true;
        }
        let free = self.images.iter().position(Option::is_none);
        let number = free.unwrap_or(self.images.len());
        image.tracker().wake(&self.inbox);
        let attached = Some(Attached {
            image,
            bytes: 0,
            waiting: VecDeque::new(),
        });
        match free {
            Some(free) => self.images[free] = attached,
            None => self.images.push(attached),
        }
        Ok(FileId(IMAGE | number as u32))
    }

    fn detach(&mut self, file: FileId) {
        match file.0 & IMAGE {
            0 => self.inner.detach(file),
            _ => self.images[(file.0 & !IMAGE) as usize] = None,
        }
    }

    unsafe fn register(&mut self, memory: &[Segment]) -> io::Result<()> {
        // SAFETY: the caller makes the same promise to this function.
        unsafe { self.inner.register(memory) }
    }

    fn unregister(&mut self, memory: &[Segment]) {
        self.inner.unregister(memory);
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        debug_assert_ne!(token, INBOX_EVENT);
        self.inner.watch(fd, token)
    }

    fn unwatch(&mut self, token: Token) -> io::Result<()> {
        self.inner.unwatch(token)
    }

    #[inline]
    fn room(&self) -> usize {
        self.inner.room().min(IN_FLIGHT_MAX - self.in_flight)
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.in_flight
    }

    #[inline]
    fn ready(&mut self) -> bool {
        self.inner.ready() || !(self.ended.is_empty() && self.inbox.is_empty())
    }

    #[inline]
    unsafe fn submit(&mut self, file: FileId, op: Op<'_>, token: Token) {
        match file.0 & (IMAGE | 1 << 31) {
            // SAFETY: as the caller promised.
            IMAGE => unsafe { self.submit_to_image(file, op, token) },
            // SAFETY: as the caller promised.
            _ => unsafe { self.inner.submit(file, op, token) },
        }
    }

    #[inline]
    fn push(&mut self) -> io::Result<()> {
        self.end_run();
        self.inner.push()
    }

    #[inline]
    fn wait(&mut self) -> io::Result<()> {
        self.end_run();
        if self.idle() {
            return self.inner.wait();
        }
        if !self.ended.is_empty() || !self.inbox.fall_asleep() {
            return self.inner.push();
        }
        let waited = self.inner.wait();
        self.inbox.wake_up();
        waited
    }

    #[inline]
    fn reap(&mut self, out: &mut Vec<Completion>) {
        let before = out.len();
        self.inner.reap(out);
        if !self.watched {
            return;
        }
        // The token's only purpose is to end the sleep; the caller does not see it.
        let mut i = before;
        while i < out.len() {
            if out[i].token == INBOX_EVENT {
                out.remove(i);
            } else {
                i += 1
            }
        }
        if self.idle() {
            return;
        }
        self.collect();
        let n = self.ended.len().min(out.capacity() - out.len());
        out.extend(self.ended.drain(..n));
        self.in_flight -= n;
    }
}

impl<E> Drop for RbdEngine<E> {
    fn drop(&mut self) {
        // If operations are in flight, librbd still uses them, so none is freed.
        if self.in_flight == 0 {
            for slot in &self.slots {
                // SAFETY: the pointer came from a box, and no operation is in flight.
                drop(unsafe { Box::from_raw(slot.operation) });
            }
        }
    }
}
