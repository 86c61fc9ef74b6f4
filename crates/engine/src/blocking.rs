//! Discards and write-zeroes: operations for which the kernel has no asynchronous form on every
//! version and backing, done by a few threads that may block.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;

use block::{Backing, Completion, FileOffset, Token};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

/// Threads per engine, started as they are needed: enough that one slow device does not hold up
/// the others for long, few enough not to matter.
const THREADS_MAX: usize = 4;

/// Zeroes are written in pieces of this size where the file system can do no better.
const ZEROES: usize = 1 << 20;

/// What is to be done to a range of a file.
pub(crate) enum Action {
    Discard,
    WriteZeroes { unmap: bool },
}

pub(crate) struct Job {
    pub file: Arc<File>,
    pub backing: Backing,
    pub action: Action,
    pub at: FileOffset,
    pub len: u64,
    pub stable: bool,
    pub token: Token,
}

/// A pool of threads that block in the engine's place.
pub(crate) struct Blocking {
    jobs: Sender<Job>,
    queue: Arc<Mutex<Receiver<Job>>>,
    done: Arc<Done>,
    threads: usize,
    pending: usize,
}

struct Done {
    list: Mutex<Vec<Completion>>,
    event: OwnedFd,
}

impl Blocking {
    pub(crate) fn new() -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel();
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            jobs,
            queue: Arc::new(Mutex::new(queue)),
            done: Arc::new(Done {
                list: Mutex::default(),
                event,
            }),
            threads: 0,
            pending: 0,
        })
    }

    /// Is written to whenever a job has ended, and never read from.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.done.event.as_fd()
    }

    pub(crate) fn start(&mut self, job: Job) {
        self.pending += 1;
        if self.pending > self.threads && self.threads < THREADS_MAX {
            let (queue, done) = (self.queue.clone(), self.done.clone());
            let thread = thread::Builder::new().name("discard".into());
            match thread.spawn(move || work(&queue, &done)) {
                Ok(_) => self.threads += 1,
                // With no thread at all, the job is done here: late, but done.
                Err(_) if self.threads == 0 => return self.done.push(run(&job)),
                Err(_) => {}
            }
        }
        if let Err(mpsc::SendError(job)) = self.jobs.send(job) {
            // The receiver lives in `self`: this cannot be.
            self.done.push(run(&job));
        }
    }

    /// Takes what has ended, as long as `out` has room.
    pub(crate) fn collect(&mut self, out: &mut Vec<Completion>) {
        if self.pending == 0 || out.len() == out.capacity() {
            return;
        }
        let mut list = self.done.lock();
        let n = list.len().min(out.capacity() - out.len());
        out.extend(list.drain(..n));
        self.pending -= n;
    }
}

impl Done {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Completion>> {
        self.list.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn push(&self, completion: Completion) {
        self.lock().push(completion);
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

fn work(queue: &Mutex<Receiver<Job>>, done: &Done) {
    loop {
        let next = queue.lock().unwrap_or_else(|e| e.into_inner()).recv();
        match next {
            Ok(job) => done.push(run(&job)),
            // The engine is gone.
            Err(mpsc::RecvError) => return,
        }
    }
}

fn run(job: &Job) -> Completion {
    let result = match job.action {
        Action::Discard => discard(job),
        Action::WriteZeroes { unmap } => write_zeroes(job, unmap),
    }
    .and_then(|()| match job.stable {
        true => rustix::fs::fdatasync(&job.file),
        false => Ok(()),
    });
    Completion {
        token: job.token,
        result: match result {
            Ok(()) => 0,
            Err(e) => -e.raw_os_error(),
        },
    }
}

/// Gives space back. Not being able to is no error: the guest only said that it needs it no more.
fn discard(job: &Job) -> Result<(), Errno> {
    let result = match job.backing {
        Backing::File => fallocate(job, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE),
        Backing::BlockDevice => ioctl_range(job, BLKDISCARD),
    };
    ignore_unsupported(result)
}

/// Makes a range zero by the first way that the backing knows, best one first.
fn write_zeroes(job: &Job, unmap: bool) -> Result<(), Errno> {
    const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
    const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE);
    let done = match (job.backing, unmap) {
        // On a device, to punch is to zero and unmap, or to fail; BLKZEROOUT zeroes in any case.
        (_, true) => fallocate(job, PUNCH),
        (Backing::BlockDevice, false) => ioctl_range(job, BLKZEROOUT),
        (Backing::File, false) => match fallocate(job, ZERO) {
            // A hole reads as zeroes, and allocated again it still does (tmpfs has no other way).
            Err(Errno::OPNOTSUPP) => {
                fallocate(job, PUNCH).and_then(|()| fallocate(job, FallocateFlags::KEEP_SIZE))
            }
            result => result,
        },
    };
    match done {
        Err(Errno::OPNOTSUPP | Errno::NOTTY) => match job.backing {
            Backing::BlockDevice => ioctl_range(job, BLKZEROOUT),
            Backing::File => fallocate(job, ZERO),
        },
        result => return result,
    }
    .or_else(|e| match e {
        Errno::OPNOTSUPP | Errno::NOTTY => pwrite_zeroes(job),
        e => Err(e),
    })
}

fn pwrite_zeroes(job: &Job) -> Result<(), Errno> {
    // O_DIRECT wants an aligned buffer.
    let storage = vec![0u8; ZEROES + 4096];
    let skip = storage.as_ptr().align_offset(4096);
    let zeroes = &storage[skip..skip + ZEROES];
    let (mut at, end) = (job.at.0, job.at.0 + job.len);
    while at < end {
        let n = (end - at).min(ZEROES as u64) as usize;
        match rustix::io::pwrite(&job.file, &zeroes[..n], at) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(n) => at += n as u64,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn ignore_unsupported(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::OPNOTSUPP | Errno::NOTTY) => Ok(()),
        result => result,
    }
}

fn fallocate(job: &Job, flags: FallocateFlags) -> Result<(), Errno> {
    loop {
        match rustix::fs::fallocate(&job.file, flags, job.at.0, job.len) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// `_IO(0x12, 119)` and `_IO(0x12, 127)` of `linux/fs.h`.
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKZEROOUT: libc::Ioctl = 0x127f;

#[expect(unsafe_code, reason = "rustix has no BLKDISCARD and BLKZEROOUT")]
fn ioctl_range(job: &Job, request: libc::Ioctl) -> Result<(), Errno> {
    let range = [job.at.0, job.len];
    // SAFETY: both requests read two 64-bit numbers, start and length in bytes.
    match unsafe { libc::ioctl(job.file.as_raw_fd(), request, range.as_ptr()) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}
