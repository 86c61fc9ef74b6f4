//! The engine: what is asked of images goes to librbd, all else to the engine beneath, on which the thread sleeps.

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

/// Marks the number of an image.
const IMAGE: u32 = 1 << 30;

/// Operations of one thread: as many as the engine beneath has room for.
const IN_FLIGHT_MAX: usize = 4096;

/// Bytes of one operation, which librbd holds copies of; a longer one comes back short and goes on.
const BYTES_MAX: usize = 4 << 20;

/// Reads, or writes, that stand beside each other go as one operation, of so many bytes and segments at most. A cluster
/// does so much per operation that this is what sequential I/O in small pieces lives by.
const RUN_BYTES_MAX: usize = 512 << 10;
const RUN_SEGMENTS_MAX: usize = 256;

/// Bytes that one thread may have under way of one image; what comes then waits here, and nobody else with it. Twice
/// what a network of 100 Gbit/s moves in 2 ms.
const IMAGE_BYTES_MAX: usize = 64 << 20;

/// With this the engine beneath reports that something is in the inbox.
const CAME: Token = Token(1 << 58);

/// RBD_WRITE_ZEROES_FLAG_THICK_PROVISION: zeroes are written, not punched.
const THICK: i32 = 1;

/// An engine that knows images too, beside another one.
pub struct WithRbd<E> {
    inner: E,
    inbox: Arc<Inbox>,
    /// The engine beneath watches the inbox.
    watched: bool,
    images: Vec<Option<Attached>>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Not handed to librbd yet: what comes next may follow on it.
    run: Option<Run>,
    /// Under way, or ended and not reaped.
    in_flight: usize,
    /// Ended, not reaped.
    ended: VecDeque<Completion>,
}

struct Attached {
    image: Arc<RbdImage>,
    /// Bytes under way.
    bytes: usize,
    /// Operations that wait until there are fewer.
    waiting: VecDeque<usize>,
}

/// An operation that has a place in the table.
struct Slot {
    /// What librbd gives back; it is never moved.
    operation: *mut Operation,
    token: Token,
    image: usize,
    /// Bytes that it moves; 0 if none.
    bytes: usize,
    what: What,
    /// The one behind it in its run.
    next: Option<usize>,
    /// Of the first of a run: bytes of all, and, if there are more than one, the segments of all.
    run_bytes: usize,
    run_segments: Vec<Segment>,
    /// Of the first of a run: how often the image had changed when it was handed to librbd.
    changes: u64,
}

/// Operations, one or more, that go as one.
#[derive(Clone, Copy)]
struct Run {
    first: usize,
    last: usize,
    segments: usize,
}

#[derive(Clone, Copy)]
enum What {
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

// SAFETY: the pointers are to operations that belong to this engine, and to lists of segments that their submitters have
// promised to keep.
unsafe impl<E: Send> Send for WithRbd<E> {}

impl<E: Engine> WithRbd<E> {
    /// Puts images beside what `inner` serves.
    ///
    /// # Errors
    /// There is no event descriptor to be had.
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

    /// Gives an operation a place in the table, and in the run before it if it can go with that.
    ///
    /// # Safety
    /// As for [`Engine::submit`].
    unsafe fn submit_to_image(&mut self, file: FileId, op: Op<'_>, token: Token) {
        let place = self.free.pop().unwrap_or_else(|| {
            let place = self.slots.len();
            let operation = Operation::new(self.inbox.clone(), place);
            self.slots.push(Slot {
                operation: Box::into_raw(operation),
                token,
                image: 0,
                bytes: 0,
                what: What::Flush,
                next: None,
                run_bytes: 0,
                run_segments: Vec::new(),
                changes: 0,
            });
            place
        });
        self.in_flight += 1;
        let slot = &mut self.slots[place];
        (slot.token, slot.image) = (token, (file.0 & !IMAGE) as usize);
        slot.bytes = 0;
        slot.what = match op {
            Op::Read { at, to } => slot.moves(false, at.0, to),
            Op::Write { at, from, .. } => slot.moves(true, at.0, from),
            Op::Flush => What::Flush,
            Op::Discard { at, len, .. } => What::Discard { at: at.0, len },
            Op::WriteZeroes { at, len, unmap, .. } => What::Zero {
                at: at.0,
                len,
                unmap,
            },
        };
        (slot.next, slot.run_bytes) = (None, slot.bytes);
        let segments = match slot.what {
            What::Move { n, .. } => n,
            _ => 0,
        };
        if let Some(run) = &mut self.run
            && follows(&self.slots, run, place, segments)
        {
            self.slots[run.first].run_bytes += self.slots[place].bytes;
            self.slots[run.last].next = Some(place);
            (run.last, run.segments) = (place, run.segments + segments);
            return;
        }
        self.end_run();
        self.run = Some(Run {
            first: place,
            last: place,
            segments,
        });
    }

    /// Nothing more comes that could go with the run.
    #[inline]
    fn end_run(&mut self) {
        if let Some(Run { first, .. }) = self.run.take() {
            self.start_or_wait(first);
        }
    }

    /// Starts a run, unless its image has too much under way or its size is not known.
    #[inline]
    fn start_or_wait(&mut self, first: usize) {
        let slot = &self.slots[first];
        match &mut self.images[slot.image] {
            Some(image) if !image.waiting.is_empty() || !image.takes(slot) => {
                image.waiting.push_back(first);
            }
            _ => self.start(first),
        }
    }

    /// Hands a run to librbd.
    fn start(&mut self, place: usize) {
        gather(&mut self.slots, place);
        let slot = &mut self.slots[place];
        let Some(attached) = &mut self.images[slot.image] else {
            debug_assert!(false, "the image is attached while it is used");
            return;
        };
        if let Some(end) = slot.changes_up_to() {
            let known = attached.image.watched().known();
            slot.changes = known.changes;
            match known.size {
                Size::Bytes(size) if end <= size => {}
                // Some of it may lie before the end.
                Size::Bytes(_) if slot.next.is_some() => return self.start_each(place),
                Size::Bytes(_) => {
                    let result = slot.beyond_end();
                    return self.finish(place, result);
                }
                Size::Unknown => return attached.waiting.push_front(place),
                Size::Failed(errno) => return self.finish(place, -errno),
            }
        }
        attached.bytes += slot.run_bytes;
        let (library, image) = (attached.image.library(), attached.image.handle());
        let mut completion = ptr::null_mut();
        // SAFETY: the operation stays where it is until it has been taken from the inbox, into which `completed` puts it.
        let result = unsafe {
            (library.rbd_aio_create_completion)(slot.operation.cast(), completed, &mut completion)
        };
        // SAFETY: memory and list are valid until the operation has ended, as its submitter promised; the completion is
        // fresh, and the image open.
        let result = check(result).and_then(|()| unsafe {
            check(slot.call(library, image, completion)).inspect_err(|_| {
                // It was not taken, so that nobody else has it.
                (library.rbd_aio_release)(completion);
            })
        });
        if let Err(e) = result {
            let errno = e.raw_os_error().unwrap_or(libc::ESHUTDOWN);
            self.end(place, -(errno as isize));
        }
    }

    /// Starts all in a run, each by itself.
    fn start_each(&mut self, first: usize) {
        let mut next = Some(first);
        while let Some(place) = next {
            let slot = &mut self.slots[place];
            (next, slot.run_bytes) = (slot.next.take(), slot.bytes);
            self.start_or_wait(place);
        }
    }

    /// librbd has ended a run. If it failed, each in it is tried by itself: where one cannot be read or written, the
    /// others may be.
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
        // librbd may have cut it off at an end that was not known when it was handed over.
        if result >= 0
            && slot.changes_up_to().is_some()
            && slot.changes != attached.image.watched().changes()
        {
            return self.start_or_wait(first);
        }
        let result = match slot.what {
            // librbd says 0 for a write that is done.
            What::Move { write: true, .. } if result == 0 => slot.run_bytes as i32,
            // A quota is as good as a full disk.
            _ if result == -libc::EDQUOT => -libc::ENOSPC,
            _ => result,
        };
        self.finish(first, result);
    }

    /// Gives the places of all in a run back.
    fn finish(&mut self, first: usize, result: i32) {
        if result == -BLOCKLISTED
            && let Some(attached) = &self.images[self.slots[first].image]
        {
            attached.image.say_blocklisted();
        }
        let (mut next, mut left) = (Some(first), result);
        while let Some(place) = next {
            let slot = &self.slots[place];
            next = slot.next;
            let result = match slot.what {
                What::Move { .. } if result >= 0 => left.min(slot.bytes as i32),
                _ => result,
            };
            left -= result.max(0);
            let token = slot.token;
            self.ended.push_back(Completion { token, result });
            self.free.push(place);
        }
    }

    /// Takes what has ended, and starts what waited for that.
    fn collect(&mut self) {
        let inbox = self.inbox.clone();
        inbox.take(|place, result| self.end(place, result));
        for image in 0..self.images.len() {
            while let Some(attached) = &mut self.images[image]
                && let Some(&place) = attached.waiting.front()
                && attached.takes(&self.slots[place])
            {
                attached.waiting.pop_front();
                self.start(place);
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
    fn takes(&self, run: &Slot) -> bool {
        let has_room = self.bytes == 0 || self.bytes + run.run_bytes <= IMAGE_BYTES_MAX;
        has_room
            && (run.changes_up_to().is_none() || self.image.watched().known().size != Size::Unknown)
    }
}

/// Whether an operation with so many segments goes on where a run ends.
fn follows(slots: &[Slot], run: &Run, place: usize, segments: usize) -> bool {
    let (first, last, this) = (&slots[run.first], &slots[run.last], &slots[place]);
    match (last.what, this.what) {
        (
            What::Move { write, at, .. },
            What::Move {
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

/// Makes one list of the segments of all in a run.
fn gather(slots: &mut [Slot], first: usize) {
    if slots[first].next.is_none() {
        return;
    }
    let mut all = std::mem::take(&mut slots[first].run_segments);
    all.clear();
    let mut next = Some(first);
    while let Some(place) = next {
        if let What::Move { list, n, .. } = slots[place].what {
            // SAFETY: the list is valid until its operation has ended, as its submitter promised, or it is in the
            // operation itself, which nobody has yet.
            all.extend_from_slice(unsafe { std::slice::from_raw_parts(list, n) });
        }
        next = slots[place].next;
    }
    slots[first].run_segments = all;
}

impl Slot {
    /// Where a run ends in its image, if it changes that.
    #[inline]
    fn changes_up_to(&self) -> Option<u64> {
        let (at, len) = match self.what {
            What::Move {
                write: true, at, ..
            } => (at, self.run_bytes as u64),
            What::Discard { at, len } | What::Zero { at, len, .. } => (at, len),
            What::Move { .. } | What::Flush => return None,
        };
        Some(at.saturating_add(len))
    }

    /// What becomes of an operation that lies beyond the end of the image, or partly so.
    fn beyond_end(&self) -> i32 {
        match self.what {
            // As of a file that ends there.
            What::Move { .. } => 0,
            _ => -libc::EIO,
        }
    }

    /// Takes as much of the segments as goes at once.
    fn moves(&mut self, write: bool, at: u64, segments: &[Segment]) -> What {
        let mut n = 0;
        for segment in segments {
            if n > 0 && self.bytes + segment.len > BYTES_MAX {
                break;
            }
            self.bytes += segment.len;
            n += 1;
        }
        let list = match segments {
            // One that may be in a place that does not stay, or that is too long, which is cut.
            &[first, ..] if n == 1 => {
                self.bytes = first.len.min(BYTES_MAX);
                let one = Segment {
                    addr: first.addr,
                    len: self.bytes,
                };
                // SAFETY: the operation is not under way, so that nobody else looks at it.
                unsafe {
                    *(*self.operation).one.get() = one;
                    (*self.operation).one.get().cast_const()
                }
            }
            segments => segments.as_ptr(),
        };
        What::Move { write, at, list, n }
    }

    /// Calls librbd.
    ///
    /// # Safety
    /// Memory and list of segments are valid until the operation ends; the image is open, and the completion fresh.
    unsafe fn call(&self, library: &Library, image: Pointer, completion: Pointer) -> i32 {
        const {
            assert!(size_of::<Segment>() == size_of::<libc::iovec>());
            assert!(align_of::<Segment>() == align_of::<libc::iovec>());
        }
        // SAFETY: the caller's promise. A segment is laid out like an iovec.
        unsafe {
            match self.what {
                What::Move { write, at, list, n } => {
                    let (list, n) = match self.next {
                        None => (list, n),
                        Some(_) => (self.run_segments.as_ptr(), self.run_segments.len()),
                    };
                    let move_them = match write {
                        true => library.rbd_aio_writev,
                        false => library.rbd_aio_readv,
                    };
                    move_them(image, list.cast(), n as i32, at, completion)
                }
                What::Flush => (library.rbd_aio_flush)(image, completion),
                What::Discard { at, len } => (library.rbd_aio_discard)(image, at, len, completion),
                What::Zero { at, len, unmap } => match library.rbd_aio_write_zeroes {
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

/// librbd's threads call this.
extern "C" fn completed(completion: Pointer, operation: *mut c_void) {
    // The libraries are loaded, or nobody would call.
    let Ok(library) = Library::get() else {
        return;
    };
    // SAFETY: the completion has ended and is ours to release; the operation was given with it, and this is called once.
    unsafe {
        let result = (library.rbd_aio_get_return_value)(completion);
        (library.rbd_aio_release)(completion);
        Operation::finish(operation.cast(), result);
    }
}

impl<E: Engine> Engine for WithRbd<E> {
    fn attach(&mut self, file: &Arc<OwnedFd>, backing: Backing, aio: Aio) -> io::Result<FileId> {
        self.inner.attach(file, backing, aio)
    }

    fn attach_remote(&mut self, remote: &Arc<dyn Remote>) -> io::Result<FileId> {
        let any: Arc<dyn Any + Send + Sync> = remote.clone();
        let Ok(image) = any.downcast::<RbdImage>() else {
            return self.inner.attach_remote(remote);
        };
        if !self.watched {
            self.inner.watch(self.inbox.event(), CAME)?;
            self.watched = true;
        }
        let free = self.images.iter().position(Option::is_none);
        let number = free.unwrap_or(self.images.len());
        image.watched().wake(&self.inbox);
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
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.register(memory) }
    }

    fn unregister(&mut self, memory: &[Segment]) {
        self.inner.unregister(memory);
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        debug_assert_ne!(token, CAME);
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
            // SAFETY: the caller's promise.
            IMAGE => unsafe { self.submit_to_image(file, op, token) },
            // SAFETY: the caller's promise.
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
        // It has done what it is for, which is to end the sleep.
        let mut i = before;
        while i < out.len() {
            match out[i].token == CAME {
                true => drop(out.remove(i)),
                false => i += 1,
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

impl<E> Drop for WithRbd<E> {
    fn drop(&mut self) {
        // With some under way, librbd still has them; then they stay where they are.
        if self.in_flight == 0 {
            for slot in &self.slots {
                // SAFETY: it was made of a box, and nothing of it is under way.
                drop(unsafe { Box::from_raw(slot.operation) });
            }
        }
    }
}
