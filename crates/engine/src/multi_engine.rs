//! All I/O methods behind one [`Engine`]: each file uses the method that suits it, and a thread waits for all
//! of them in one place.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use block::{Aio, Backing, Completion, Engine, FileId, Op, Remote, Segment, Token};

use crate::blocking::{BlockingPool, Job};
use crate::choice::{Support, choose_local};
use crate::inline::Inline;
use crate::linux_aio::LinuxAio;
use crate::poller::Poller;
use crate::ranges::Target;
use crate::uring::{IN_FLIGHT_MAX, Uring, UringError};

/// Marks the id of a file that the ring does not serve.
const AUXILIARY: u32 = 1 << 31;

/// Maximum number of files outside the ring, one per queue of every disk.
const FILES_MAX: usize = 16384;

/// io_uring, Linux AIO and a thread pool for the files of one thread. That thread must create this value.
///
/// If io_uring works, the thread waits on its ring, and the other methods add no cost to files that the ring
/// serves. Otherwise the thread waits on an epoll instance. Linux AIO and the pool are set up when the first
/// file needs them.
pub struct MultiEngine {
    main: Main,
    linux_aio: Option<LinuxAio>,
    /// Completions of operations that were performed as they were submitted.
    done: Vec<Completion>,
    /// Number of operations not yet reaped that were given to Linux AIO or performed as they were submitted.
    /// It is counted separately because the ring's path reads it.
    auxiliary: usize,
    /// Files that the ring does not serve.
    files: Vec<Option<AuxiliaryFile>>,
    support: Arc<Support>,
}

/// The object that the thread waits on.
#[expect(
    clippy::large_enum_variant,
    reason = "there is one per thread, and the large one is the fast one"
)]
enum Main {
    Ring(Uring),
    Poller { poller: Poller, pool: BlockingPool },
}

/// A file that the ring does not serve.
struct AuxiliaryFile {
    target: Arc<Target>,
    linux_aio: bool,
    inline: Inline,
}

impl MultiEngine {
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
            linux_aio: None,
            done: Vec::with_capacity(IN_FLIGHT_MAX),
            auxiliary: 0,
            files: Vec::new(),
            support,
        })
    }

    fn attach_auxiliary(
        &mut self,
        file: &Arc<OwnedFd>,
        backing: Backing,
        linux_aio: bool,
        aio: Aio,
    ) -> io::Result<FileId> {
        if linux_aio && self.linux_aio.is_none() {
            self.linux_aio = Some(self.main.make_linux_aio()?);
        }
        let free = self.files.iter().position(Option::is_none);
        let number = free.unwrap_or(self.files.len());
        if number == FILES_MAX {
            return Err(io::Error::other(format!(
                "one I/O thread serves at most {FILES_MAX} queues; use more --iothreads"
            )));
        }
        let file = Some(AuxiliaryFile {
            inline: match aio {
                // If `io_submit` performs an operation synchronously, it costs more than a plain system call.
                Aio::Auto | Aio::Native => Inline::probe(file.as_fd(), backing),
                Aio::IoUring | Aio::Threads => Inline::Off,
            },
            target: Arc::new(Target {
                file: file.clone(),
                backing,
                // Files of the ring have the even numbers.
                number: 2 * number + 1,
            }),
            linux_aio,
        });
        match free {
            Some(free) => self.files[free] = file,
            None => self.files.push(file),
        }
        Ok(FileId(AUXILIARY | number as u32))
    }

    #[inline]
    fn push_linux_aio(&mut self) -> io::Result<()> {
        match &mut self.linux_aio {
            Some(linux_aio) if self.auxiliary > 0 => linux_aio.push(),
            _ => Ok(()),
        }
    }

    #[inline]
    fn ready_auxiliary(&self) -> bool {
        self.auxiliary > 0
            && (!self.done.is_empty() || self.linux_aio.as_ref().is_some_and(LinuxAio::ready))
    }

    /// Submits an operation on a file that the ring does not serve.
    ///
    /// # Safety
    /// As for [`Engine::submit`].
    #[expect(unsafe_code, reason = "the trait's contract")]
    unsafe fn submit_auxiliary(&mut self, file: FileId, op: Op<'_>, token: Token) {
        let file = self.files[(file.0 & !AUXILIARY) as usize].as_mut();
        let file = file.expect("the file is attached while it is used");
        if let Some((write, at, segments)) = Inline::transfer_of(op)
            && file.inline.is_wanted()
        {
            self.auxiliary += 1;
            // SAFETY: the caller's promise.
            let result = unsafe {
                file.inline
                    .run(file.target.file.as_fd(), write, at, segments)
            };
            return self.done.push(Completion { token, result });
        }
        let ranged = matches!(op, Op::Discard { .. } | Op::WriteZeroes { .. });
        if let Some(linux_aio) = &mut self.linux_aio
            && file.linux_aio
            && !ranged
            && (linux_aio.flushes || !matches!(op, Op::Flush))
        {
            self.auxiliary += 1;
            // SAFETY: the caller's promise; the file stays open while it is attached.
            return unsafe { linux_aio.submit(file.target.file.as_raw_fd(), op, token) };
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
        let (poller, pool) = (Poller::new()?, BlockingPool::new()?);
        poller.watch_internal(pool.event())?;
        Ok(Self::Poller { poller, pool })
    }

    fn make_linux_aio(&mut self) -> io::Result<LinuxAio> {
        let linux_aio = LinuxAio::new().map_err(io::Error::other)?;
        match self {
            Self::Ring(ring) => ring.watch_internal(linux_aio.event())?,
            Self::Poller { poller, .. } => poller.watch_internal(linux_aio.event())?,
        }
        Ok(linux_aio)
    }
}

impl Engine for MultiEngine {
    fn attach(&mut self, file: &Arc<OwnedFd>, backing: Backing, aio: Aio) -> io::Result<FileId> {
        // Files that a server has are attached with these methods, and nothing else is asked of the server: it
        // may hang.
        match (aio, &mut self.main) {
            (Aio::Threads, _) => return self.attach_auxiliary(file, backing, false, aio),
            (Aio::IoUring, Main::Ring(ring)) => return ring.attach(file, backing, aio),
            _ => {}
        }
        let choice = choose_local(file.as_fd(), backing, aio, &self.support);
        match (choice.map_err(io::Error::other)?.aio, &mut self.main) {
            (Aio::IoUring | Aio::Auto, Main::Ring(ring)) => ring.attach(file, backing, aio),
            (chosen, _) => self.attach_auxiliary(file, backing, chosen == Aio::Native, aio),
        }
    }

    fn attach_remote(&mut self, _: &Arc<dyn Remote>) -> io::Result<FileId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn detach(&mut self, file: FileId) {
        match (&mut self.main, file.0 & AUXILIARY) {
            (Main::Ring(ring), 0) => ring.detach(file),
            _ => self.files[(file.0 & !AUXILIARY) as usize] = None,
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
            Main::Ring(ring) => ring.room().saturating_sub(self.auxiliary),
            Main::Poller { pool, .. } => IN_FLIGHT_MAX - (self.auxiliary + pool.pending()),
        }
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.auxiliary
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
        main || self.ready_auxiliary()
    }

    #[inline]
    #[expect(unsafe_code, reason = "the trait's contract")]
    unsafe fn submit(&mut self, file: FileId, op: Op<'_>, token: Token) {
        match &mut self.main {
            // SAFETY: the caller's promise.
            Main::Ring(ring) if file.0 & AUXILIARY == 0 => unsafe { ring.submit(file, op, token) },
            // SAFETY: the caller's promise.
            _ => unsafe { self.submit_auxiliary(file, op, token) },
        }
    }

    #[inline]
    fn push(&mut self) -> io::Result<()> {
        self.push_linux_aio()?;
        match &mut self.main {
            Main::Ring(ring) => ring.push(),
            Main::Poller { poller, pool } => {
                pool.push();
                poller.check_sometimes()
            }
        }
    }

    #[inline]
    fn wait(&mut self) -> io::Result<()> {
        self.push_linux_aio()?;
        let ready = self.ready_auxiliary();
        match &mut self.main {
            Main::Ring(ring) if ready => ring.push(),
            Main::Ring(ring) => ring.wait(),
            Main::Poller { poller, pool } => {
                pool.push();
                if ready || pool.ready() {
                    poller.check_sometimes()
                } else {
                    poller.fetch_events(true)
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
        if self.auxiliary > 0 {
            let n = self.done.len().min(out.capacity() - out.len());
            out.extend(self.done.drain(..n));
            self.auxiliary = self.done.len();
            if let Some(linux_aio) = &mut self.linux_aio {
                linux_aio.reap(out);
                self.auxiliary += linux_aio.in_flight();
            }
        }
    }
}
