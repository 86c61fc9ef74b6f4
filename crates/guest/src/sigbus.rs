//! Handles guest memory that a front-end takes away: it may truncate the file that holds the memory, and an
//! access to the missing pages then raises SIGBUS.
//!
//! A signal handler replaces the whole mapping with empty memory, which is not shared, and notifies the
//! session, which ends. Until then, reads return zeroes, which are checked like everything that a guest
//! writes. Any other SIGBUS, for example for a bad page of the host's own memory, ends the process as usual.
//! When the kernel itself accesses guest memory for ringdisk, it returns EFAULT and raises no signal.

#![expect(unsafe_code, reason = "a signal handler, and what it may do")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// Ends a session from another thread, or from the signal handler.
#[derive(Clone)]
pub struct SessionAbort(Arc<OwnedFd>);

impl SessionAbort {
    /// Creates a handle that has not been triggered.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(event)))
    }

    /// Makes the session end. Does not block.
    pub fn trigger(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Readable after the handle was triggered.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Registers a mapping with the handler until dropped. The mapping must be unmapped after that.
pub(crate) struct SigbusGuard {
    entry: &'static Entry,
    _abort: Option<SessionAbort>,
}

impl SigbusGuard {
    /// Guards whole pages at `start`, which must stay mapped while this value lives.
    pub fn new(start: usize, len: usize, abort: Option<SessionAbort>) -> Self {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let _alone = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = free_entry();
        entry.change(
            start,
            len,
            abort.as_ref().map_or(-1, |abort| abort.0.as_raw_fd()),
        );
        Self {
            entry,
            _abort: abort,
        }
    }
}

impl Drop for SigbusGuard {
    fn drop(&mut self) {
        let _alone = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        self.entry.change(0, 0, -1);
    }
}

/// Held while entries change. The handler does not take it.
static CHANGES: Mutex<()> = Mutex::new(());

/// The list that the handler searches: blocks of entries. Blocks are never freed; their entries are reused.
static BLOCKS: AtomicPtr<Block> = AtomicPtr::new(ptr::null_mut());

const BLOCK_ENTRIES: usize = 64;

struct Block {
    entries: [Entry; BLOCK_ENTRIES],
    next: *mut Block,
}

/// A registered mapping. The handler may read it while it changes; a changing entry is never the one in which
/// a thread has just faulted, because that mapping does not change until the access has finished.
struct Entry {
    /// Odd while the other fields change.
    version: AtomicUsize,
    start: AtomicUsize,
    /// 0 if the entry is free.
    len: AtomicUsize,
    event: AtomicI32,
}

impl Entry {
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

    /// Start, length and event, if the mapping contains `addr`.
    fn containing(&self, addr: usize) -> Option<(usize, usize, i32)> {
        let version = self.version.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        let event = self.event.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let stable = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (stable && addr.wrapping_sub(start) < len).then_some((start, len, event))
    }
}

/// Returns a free entry; the caller holds `CHANGES`.
fn free_entry() -> &'static Entry {
    let free = |entry: &&Entry| entry.len.load(Ordering::Relaxed) == 0;
    if let Some(entry) = entries().find(free) {
        return entry;
    }
    let block = Box::leak(Box::new(Block {
        entries: [const { Entry::empty() }; BLOCK_ENTRIES],
        next: BLOCKS.load(Ordering::Relaxed),
    }));
    BLOCKS.store(block, Ordering::Release);
    &block.entries[0]
}

fn entries() -> impl Iterator<Item = &'static Entry> {
    // SAFETY: blocks are leaked, and only their atomic fields change.
    let block = |at: *mut Block| unsafe { at.as_ref::<'static>() };
    std::iter::successors(block(BLOCKS.load(Ordering::Acquire)), move |b| {
        block(b.next)
    })
    .flat_map(|b| &b.entries)
}

/// The SIGBUS action before ours was installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install() {
    // SAFETY: an all-zero `sigaction` is valid, and both calls get valid actions. The handler does only what
    // signal-safety(7) allows: it reads atomics and calls mmap, write, sigaction and raise.
    unsafe {
        let mut previous: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut previous);
        if PREVIOUS.set(previous).is_ok() {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
        }
    }
}

extern "C" fn handler(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`, which contains an address if the signal is about one.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // The page is no longer in the file. Memory lost to a hardware error and signals sent by a process have
    // other codes.
    if code == libc::BUS_ADRERR
        && let Some((start, len, event)) = entries().find_map(|entry| entry.containing(addr))
        && replace(start, len)
    {
        // SAFETY: this writes eight bytes to a nonblocking event counter that the registered mapping keeps
        // open. At worst, the counter is full.
        unsafe { libc::write(event, (&raw const ONE).cast(), size_of::<u64>()) };
        return;
    }
    // SAFETY: both functions may be called in a handler. The action is the one that was in force before this
    // handler was installed, or all zeroes, which is the default action.
    unsafe {
        if code > 0 {
            // The instruction faults again, and the previous action handles that fault.
            if let Some(previous) = PREVIOUS.get() {
                libc::sigaction(signal, previous, ptr::null_mut());
                return;
            }
        }
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const default, ptr::null_mut());
        libc::raise(signal);
    }
}

static ONE: u64 = 1;

/// Replaces a mapping with empty memory. `errno` keeps its value.
fn replace(start: usize, len: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range is whole pages of one of our mappings, which exists while it is in use, and a thread
    // has just faulted in it. Rust code never borrows from it: it is read and written as memory that a guest
    // can change at any time.
    unsafe {
        let errno = *libc::__errno_location();
        let mapped = libc::mmap(start as *mut _, len, protection, flags, -1, 0);
        *libc::__errno_location() = errno;
        mapped != libc::MAP_FAILED
    }
}
