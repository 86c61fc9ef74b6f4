//! All I/O methods behind one [`Engine`]: each file uses the method that suits it, and a thread waits for all
//! of them in one place.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use block::{Aio, Backing, Completion, Engine, FileId, Op, Remote, Segment, Token};

use crate::blocking::{Blocking, Job, Target};
use crate::choice::{Support, choose};
use crate::inline::Inline;
use crate::native::Native;
use crate::poller::Poller;
use crate::uring::{IN_FLIGHT_MAX, Uring, UringError};

/// Marks the id of a file that the ring does not serve.
const BESIDE: u32 = 1 << 31;

/// Maximum number of files outside the ring, one per queue of every disk.
const FILES_MAX: usize = 16384;

/// io_uring, Linux AIO and a thread pool for the files of one thread. That thread must create this value.
///
/// If io_uring works, the thread waits on its ring, and the other methods add no cost to files that the ring
/// serves. Otherwise the thread waits on an epoll instance. Linux AIO and the pool are set up when the first
/// file needs them.
pub struct Engines {
    main: Main,
    native: Option<Native>,
    /// Completions of operations that were performed as they were submitted.
    done: Vec<Completion>,
    /// Number of operations not yet reaped that were given to Linux AIO or performed as they were submitted.
    /// It is counted separately because the ring's path reads it.
    beside: usize,
    /// Files that the ring does not serve.
    files: Vec<Option<Beside>>,
    support: Arc<Support>,
}

/// The object that the thread waits on.
#[expect(
    clippy::large_enum_variant,
    reason = "there is one per thread, and the large one is the fast one"
)]
enum Main {
    Ring(Uring),
    Poller { poller: Poller, pool: Blocking },
}

/// A file that the ring does not serve.
struct Beside {
    target: Arc<Target>,
    native: bool,
    inline: Inline,
}

impl Engines {
    /// Sets up the methods that `support` lists, for the calling thread.
    ///
    /// # Errors
    /// The kernel refuses, although the test of the method succeeded.
    pub fn new(support: Arc<Support>) -> Result<Self, UringError> {
        let main = match &support.io_uring {
            Ok(()) => Main::Ring(Uring::new()?),
            Err(_) => Main::poller().map_err(UringError::Other)?,
        };
        Ok(Self {
            main,
            native: None,
            done: Vec::with_capacity(IN_FLIGHT_MAX),
            beside: 0,
            files: Vec::new(),
            support,
        })
    }

    fn attach_beside(
        &mut self,
        file: &Arc<OwnedFd>,
        backing: Backing,
        native: bool,
        aio: Aio,
    ) -> io::Result<FileId> {
        if native && self.native.is_none() {
            self.native = Some(self.main.make_native()?);
        }
        let free = self.files.iter().position(Option::is_none);
        let number = free.unwrap_or(self.files.len());
        if number == FILES_MAX {
            return Err(io::Error::other(format!(
                "one I/O thread serves at most {FILES_MAX} queues; use more --iothreads"
            )));
        }
        let beside = Some(Beside {
            inline: match aio {
                // If `io_submit` performs an operation synchronously, it costs more than a plain system call.
                Aio::Auto | Aio::Native => Inline::probe(file.as_fd(), backing),
                Aio::IoUring | Aio::Threads => Inline::NoNeed,
            },
            target: Arc::new(Target {
                file: file.clone(),
                backing,
            }),
            native,
        });
        match free {
            Some(free) => self.files[free] = beside,
            None => self.files.push(beside),
        }
        Ok(FileId(BESIDE | number as u32))
    }

    #[inline]
    fn push_native(&mut self) -> io::Result<()> {
        match &mut self.native {
            Some(native) if self.beside > 0 => native.push(),
            _ => Ok(()),
        }
    }

    #[inline]
    fn ready_beside(&self) -> bool {
        self.beside > 0
            && (!self.done.is_empty() || self.native.as_ref().is_some_and(Native::ready))
    }

    /// Submits an operation on a file that the ring does not serve.
    ///
    /// # Safety
    /// As for [`Engine::submit`].
    #[expect(unsafe_code, reason = "the trait's contract")]
    unsafe fn submit_beside(&mut self, file: FileId, op: Op<'_>, token: Token) {
        let file = self.files[(file.0 & !BESIDE) as usize].as_mut();
        let file = file.expect("the file is attached while it is used");
        if let Some((write, at, segments)) = Inline::suits(op)
            && file.inline.wanted()
        {
            self.beside += 1;
            // SAFETY: the caller's promise.
            let result = unsafe {
                file.inline
                    .run(file.target.file.as_fd(), write, at, segments)
            };
            return self.done.push(Completion { token, result });
        }
        let ranged = matches!(op, Op::Discard { .. } | Op::WriteZeroes { .. });
        if let Some(native) = &mut self.native
            && file.native
            && !ranged
            && (native.flushes || !matches!(op, Op::Flush))
        {
            self.beside += 1;
            // SAFETY: the caller's promise; the file stays open while it is attached.
            return unsafe { native.submit(file.target.file.as_raw_fd(), op, token) };
        }
        // SAFETY: the caller's promise.
        let job = unsafe { Job::new(file.target.clone(), op, token) };
        match &mut self.main {
            Main::Ring(ring) => ring.start(job),
            Main::Poller { pool, .. } => pool.start(job),
        }
    }
}

impl Main {
    fn poller() -> io::Result<Self> {
        let (poller, pool) = (Poller::new()?, Blocking::new()?);
        poller.watch_quietly(pool.event())?;
        Ok(Self::Poller { poller, pool })
    }

    fn make_native(&mut self) -> io::Result<Native> {
        let native = Native::new().map_err(io::Error::other)?;
        match self {
            Self::Ring(ring) => ring.watch_quietly(native.event())?,
            Self::Poller { poller, .. } => poller.watch_quietly(native.event())?,
        }
        Ok(native)
    }
}

impl Engine for Engines {
    fn attach(&mut self, file: &Arc<OwnedFd>, backing: Backing, aio: Aio) -> io::Result<FileId> {
        let choice = choose(file.as_fd(), backing, aio, &self.support).map_err(io::Error::other)?;
        match (choice.aio, &mut self.main) {
            (Aio::IoUring | Aio::Auto, Main::Ring(ring)) => ring.attach(file, backing, aio),
            (chosen, _) => self.attach_beside(file, backing, chosen == Aio::Native, aio),
        }
    }

    fn attach_remote(&mut self, _: &Arc<dyn Remote>) -> io::Result<FileId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn detach(&mut self, file: FileId) {
        match (&mut self.main, file.0 & BESIDE) {
            (Main::Ring(ring), 0) => ring.detach(file),
            _ => self.files[(file.0 & !BESIDE) as usize] = None,
        }
    }

    #[expect(unsafe_code, reason = "the trait's contract")]
    unsafe fn register(&mut self, memory: &[Segment]) -> io::Result<()> {
        match &mut self.main {
            // SAFETY: the caller's promise is the same.
            Main::Ring(ring) => unsafe { ring.register(memory) },
            Main::Poller { .. } => Ok(()),
        }
    }

    fn unregister(&mut self, memory: &[Segment]) {
        if let Main::Ring(ring) = &mut self.main {
            ring.unregister(memory);
        }
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        match &mut self.main {
            Main::Ring(ring) => ring.watch(fd, token),
            Main::Poller { poller, .. } => poller.watch(fd, token),
        }
    }

    fn unwatch(&mut self, token: Token) -> io::Result<()> {
        match &mut self.main {
            Main::Ring(ring) => ring.unwatch(token),
            Main::Poller { poller, .. } => poller.unwatch(token),
        }
    }

    #[inline]
    fn room(&self) -> usize {
        match &self.main {
            Main::Ring(ring) => ring.room().saturating_sub(self.beside),
            Main::Poller { pool, .. } => IN_FLIGHT_MAX - (self.beside + pool.pending()),
        }
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.beside
            + match &self.main {
                Main::Ring(ring) => ring.in_flight(),
                Main::Poller { pool, .. } => pool.pending(),
            }
    }

    #[inline]
    fn ready(&mut self) -> bool {
        let main = match &mut self.main {
            Main::Ring(ring) => ring.ready(),
            Main::Poller { poller, pool } => poller.ready() || pool.ready(),
        };
        main || self.ready_beside()
    }

    #[inline]
    #[expect(unsafe_code, reason = "the trait's contract")]
    unsafe fn submit(&mut self, file: FileId, op: Op<'_>, token: Token) {
        match &mut self.main {
            // SAFETY: the caller's promise.
            Main::Ring(ring) if file.0 & BESIDE == 0 => unsafe { ring.submit(file, op, token) },
            // SAFETY: the caller's promise.
            _ => unsafe { self.submit_beside(file, op, token) },
        }
    }

    #[inline]
    fn push(&mut self) -> io::Result<()> {
        self.push_native()?;
        match &mut self.main {
            Main::Ring(ring) => ring.push(),
            Main::Poller { poller, pool } => {
                pool.push();
                poller.glance()
            }
        }
    }

    #[inline]
    fn wait(&mut self) -> io::Result<()> {
        self.push_native()?;
        let ready = self.ready_beside();
        match &mut self.main {
            Main::Ring(ring) if ready => ring.push(),
            Main::Ring(ring) => ring.wait(),
            Main::Poller { poller, pool } => {
                pool.push();
                match ready || pool.ready() {
                    true => poller.glance(),
                    false => poller.look(true),
                }
            }
        }
    }

    #[inline]
    fn reap(&mut self, out: &mut Vec<Completion>) {
        match &mut self.main {
            Main::Ring(ring) => ring.reap(out),
            Main::Poller { poller, pool } => {
                poller.reap(out);
                pool.collect(out);
            }
        }
        if self.beside > 0 {
            let n = self.done.len().min(out.capacity() - out.len());
            out.extend(self.done.drain(..n));
            self.beside = self.done.len();
            if let Some(native) = &mut self.native {
                native.reap(out);
                self.beside += native.in_flight();
            }
        }
    }
}
