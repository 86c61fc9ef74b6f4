//! Memory that a front-end takes away: it may cut the file short that holds its guest's memory, and whoever touches
//! what is missing then gets a SIGBUS.
//!
//! A handler puts empty memory in the place of the whole mapping, of which nobody else sees anything,
//! and tells the session, which ends. Whatever is read from there until then is zero, and is checked like
//! everything that comes from a guest. A SIGBUS anywhere else, say for a bad page of the host's own
//! memory, ends the process as ever. The kernel, where it reads or writes guest memory for us, answers
//! EFAULT instead of a signal.

#![expect(unsafe_code, reason = "a signal handler, and what it may do")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// Tells a session that it cannot go on.
#[derive(Clone)]
pub struct Lost(Arc<OwnedFd>);

impl Lost {
    /// Nothing is lost yet.
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(event)))
    }

    /// Has the session end. Does not block.
    pub fn tell(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Readable once something is lost.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A mapping that the handler knows of, until dropped. It must be unmapped after that.
pub(crate) struct Guarded {
    place: &'static Place,
    _lost: Option<Lost>,
}

impl Guarded {
    /// Guards whole pages at `start`, which stay mapped as long as this value lives.
    pub fn new(start: usize, len: usize, lost: Option<Lost>) -> Self {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let _alone = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        let place = free_place();
        place.change(
            start,
            len,
            lost.as_ref().map_or(-1, |lost| lost.0.as_raw_fd()),
        );
        Self { place, _lost: lost }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _alone = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        self.place.change(0, 0, -1);
    }
}

/// Held while places change. The handler does not ask for it.
static CHANGES: Mutex<()> = Mutex::new(());

/// What the handler looks through: blocks of places, which are never freed, and used again.
static BLOCKS: AtomicPtr<Block> = AtomicPtr::new(ptr::null_mut());

const PLACES: usize = 64;

struct Block {
    places: [Place; PLACES],
    next: *mut Block,
}

/// A mapping. The handler may look while it changes: then it is not the one in which somebody has just
/// faulted, because that one stays as it is until he is done.
struct Place {
    /// Odd while the rest changes.
    version: AtomicUsize,
    start: AtomicUsize,
    /// 0 if nothing is mapped here.
    len: AtomicUsize,
    event: AtomicI32,
}

impl Place {
    const fn empty() -> Self {
        Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            event: AtomicI32::new(-1),
        }
    }

    fn change(&self, start: usize, len: usize, event: i32) {
        let version = self.version.load(Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.event.store(event, Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
    }

    /// Start, length and event, if `addr` lies in it.
    fn holding(&self, addr: usize) -> Option<(usize, usize, i32)> {
        let version = self.version.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        let event = self.event.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let stable = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (stable && addr.wrapping_sub(start) < len).then_some((start, len, event))
    }
}

/// A place that nothing uses; `CHANGES` is held.
fn free_place() -> &'static Place {
    let free = |place: &&Place| place.len.load(Ordering::Relaxed) == 0;
    if let Some(place) = places().find(free) {
        return place;
    }
    let block = Box::leak(Box::new(Block {
        places: [const { Place::empty() }; PLACES],
        next: BLOCKS.load(Ordering::Relaxed),
    }));
    BLOCKS.store(block, Ordering::Release);
    &block.places[0]
}

fn places() -> impl Iterator<Item = &'static Place> {
    // SAFETY: blocks are leaked, and do not change but for what is atomic in them.
    let block = |at: *mut Block| unsafe { at.as_ref::<'static>() };
    std::iter::successors(block(BLOCKS.load(Ordering::Acquire)), move |b| {
        block(b.next)
    })
    .flat_map(|b| &b.places)
}

/// What was done at a SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

fn install() {
    // SAFETY: all zeroes is a signal action, and both calls are given valid ones. The handler does
    // nothing but what is allowed in one (signal-safety(7)): it reads atomics, and calls mmap, write,
    // sigaction and raise.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before);
        if BEFORE.set(before).is_ok() {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
        }
    }
}

extern "C" fn handler(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel hands over a valid description, which has an address if the signal is about one.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // A page that is not in the file any more; not one that the hardware lost, nor a signal that was sent.
    if code == libc::BUS_ADRERR
        && let Some((start, len, event)) = places().find_map(|place| place.holding(addr))
        && replace(start, len)
    {
        // SAFETY: writes eight bytes to an event counter that does not block, and that the mapping keeps
        // open. It is full at worst.
        unsafe { libc::write(event, (&raw const ONE).cast(), size_of::<u64>()) };
        return;
    }
    // SAFETY: both may be called in a handler, with what was in force before this one was installed, or with
    // all zeroes, which is the default action.
    unsafe {
        if code > 0 {
            // The instruction faults again, and what would have been done before is done then.
            if let Some(before) = BEFORE.get() {
                libc::sigaction(signal, before, ptr::null_mut());
                return;
            }
        }
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const default, ptr::null_mut());
        libc::raise(signal);
    }
}

static ONE: u64 = 1;

/// Puts empty memory in the place of a mapping. `errno` stays as it was.
fn replace(start: usize, len: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: whole pages, which are a mapping of ours that stays for as long as somebody uses it, and in
    // which somebody just faulted. Nothing in it is ever borrowed: it is read and written as what a guest
    // can change at any time.
    unsafe {
        let errno = *libc::__errno_location();
        let mapped = libc::mmap(start as *mut _, len, protection, flags, -1, 0);
        *libc::__errno_location() = errno;
        mapped != libc::MAP_FAILED
    }
}
