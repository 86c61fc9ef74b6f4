//! The io_uring engine: one ring, owned by one thread.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use block::{Aio, Backing, Completion, Engine, FileId, Op, Remote, Segment, Token};
use io_uring::register::Restriction;
use io_uring::types::{Fd, Fixed, FsyncFlags};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};
use rustix::process::Resource;
use thiserror::Error;

use crate::blocking::{BlockingPool, Job};
use crate::buffers::Buffers;
use crate::inline::Inline;
use crate::iovec::iovec;
use crate::ranges::Target as BlockingTarget;
use crate::workers::Workers;

/// Number of submissions that can be queued for one system call. If there are more, the call is made earlier.
const SUBMISSIONS: u32 = 256;

/// Maximum number of operations in flight on one ring: four of the largest queues. Further requests wait in
/// their virtqueues. The completion queue has twice this size, because it also carries kicks and wake-ups.
pub(crate) const IN_FLIGHT_MAX: usize = 4096;

/// Maximum number of files per thread: one per queue of every disk.
const FILES_MAX: u32 = 16384;

/// Maximum length of an operation on one segment, in bytes. A longer operation completes short, and the
/// submitter continues it.
const LEN_MAX: usize = 1 << 30;

/// Bits in the user data of a completion that is not an operation of the submitter.
const WATCH: u64 = 1 << 63;
const INTERNAL: u64 = 3 << 62;
const IGNORED: u64 = INTERNAL;
const BLOCKING_DONE: u64 = INTERNAL | 1;
const AUXILIARY_DONE: u64 = INTERNAL | 2;

/// Why io_uring is not available.
#[derive(Debug, Error)]
pub enum UringError {
    /// The administrator disabled io_uring.
    #[error(
        "io_uring is switched off (kernel.io_uring_disabled = {0}); \
        'sysctl -w kernel.io_uring_disabled=0' switches it on"
    )]
    Disabled(String),
    /// A seccomp filter or a container runtime forbids it.
    #[error(
        "io_uring is forbidden here ({0}); a container or service manager filters the system call \
        io_uring_setup; configure it to allow the call"
    )]
    Forbidden(io::Error),
    /// The kernel is older than 5.1 or was built without io_uring.
    #[error("this kernel has no io_uring; use Linux 5.19 or newer")]
    Absent,
    /// Another error.
    #[error("io_uring cannot be set up: {cause}", cause = block::explain(.0, ""))]
    Other(io::Error),
}

impl UringError {
    /// The cause without the next step, for a message that says why another method is used.
    pub(crate) fn cause(&self) -> String {
        match self {
            Self::Disabled(value) => {
                format!("io_uring is switched off (kernel.io_uring_disabled = {value})")
            }
            Self::Forbidden(_) => "io_uring is forbidden here by a seccomp filter".into(),
            Self::Absent => "this kernel has no io_uring".into(),
            Self::Other(_) => self.to_string(),
        }
    }

    /// Whether this was a lack of file descriptors, which says nothing about the method.
    pub(crate) fn is_limit(&self) -> bool {
        matches!(self, Self::Other(e) if block::is_out_of_descriptors(e))
    }
}

/// An engine that uses one io_uring.
pub struct Uring {
    ring: IoUring,
    workers: Workers,
    files_max: u32,
    files: Vec<Option<Target>>,
    /// Watched descriptors by user data; their owners keep them open.
    watches: Vec<(u64, RawFd)>,
    buffers: Buffers,
    blocking: BlockingPool,
    /// Completions of operations that were performed as they were submitted.
    inline: Vec<Completion>,
    in_flight: usize,
}

struct Target {
    file: Arc<BlockingTarget>,
    inline: Inline,
}

impl Uring {
    /// Sets up a ring for the calling thread; only that thread may use it.
    ///
    /// # Errors
    /// io_uring is not available; the error gives the cause and the next step.
    pub fn new() -> Result<Self, UringError> {
        let ring = set_up().map_err(explain)?;
        let workers = Workers::of(&ring);
        // The kernel rejects a table with more entries than the process may have descriptors.
        let limit = rustix::process::getrlimit(Resource::Nofile).current;
        let files_max = limit.map_or(FILES_MAX, |n| n.min(FILES_MAX.into()) as u32);
        ring.submitter()
            .register_files_sparse(files_max)
            .and_then(|()| restrict(&ring))
            .map_err(explain)?;
        let blocking = BlockingPool::new().map_err(UringError::Other)?;
        let mut engine = Self {
            ring,
            workers,
            files_max,
            files: Vec::new(),
            watches: Vec::new(),
            buffers: Buffers::default(),
            blocking,
            inline: Vec::with_capacity(IN_FLIGHT_MAX),
            in_flight: 0,
        };
        let event = engine.blocking.event().as_raw_fd();
        engine.arm(event, BLOCKING_DONE);
        engine.push().map_err(UringError::Other)?;
        Ok(engine)
    }

    fn arm(&mut self, fd: RawFd, user_data: u64) {
        // A multishot poll reports each wake-up, and the event counter need not be read.
        let poll = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).multi(true);
        self.queue(poll.build().user_data(user_data));
    }

    fn queue(&mut self, entry: squeue::Entry) {
        // SAFETY: an entry names either descriptors that this engine watches or, for `submit`, memory that
        // the caller keeps valid until completion.
        #[expect(unsafe_code, reason = "submission queue entries name memory")]
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            // The queue is full: submit what it holds. The kernel accepts at least one entry; otherwise
            // `push` and `wait`, which are called next, return its error.
            let _ = self.ring.submit();
        }
    }

    fn enter(&mut self, want: u32) -> io::Result<()> {
        let submitter = self.ring.submitter();
        // SAFETY: no argument structure is passed.
        #[expect(unsafe_code, reason = "the safe calls cannot reap without waiting")]
        let result = unsafe {
            let queued = self.ring.submission_shared().len() as u32;
            submitter.enter::<libc::sigset_t>(queued, want, EnterFlags::GETEVENTS.bits(), None)
        };
        match result {
            Ok(_) => Ok(()),
            // A signal arrived, or completions must be reaped first, which happens next.
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) =>
            {
                Ok(())
            }
            Err(e) => Err(e),
        }
    }
}

fn set_up() -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder
        .setup_cqsize(2 * IN_FLIGHT_MAX as u32)
        .setup_clamp()
        .setup_r_disabled();
    // Linux 6.1: completions are processed only when this thread asks for them.
    let modern = builder
        .clone()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(SUBMISSIONS);
    match modern {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => builder.build(SUBMISSIONS),
        result => result,
    }
}

/// Restricts the ring to the operations that this file uses, so that an attacker who takes over the process
/// cannot make other system calls through it. Enables the ring for the calling thread.
fn restrict(ring: &IoUring) -> io::Result<()> {
    /// `IORING_REGISTER_FILES_UPDATE`, `_BUFFERS2`, `_BUFFERS_UPDATE` and `_IOWQ_AFF` of `linux/io_uring.h`.
    const REGISTRATIONS: [u8; 4] = [6, 15, 16, 17];
    const OPERATIONS: [u8; 9] = [
        opcode::Read::CODE,
        opcode::Readv::CODE,
        opcode::ReadFixed::CODE,
        opcode::Write::CODE,
        opcode::Writev::CODE,
        opcode::WriteFixed::CODE,
        opcode::Fsync::CODE,
        opcode::PollAdd::CODE,
        opcode::PollRemove::CODE,
    ];
    let operations = OPERATIONS.map(Restriction::sqe_op);
    let registrations = REGISTRATIONS.map(Restriction::register_op);
    let flags = Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits());
    let mut all: Vec<_> = operations.into_iter().chain(registrations).collect();
    all.push(flags);
    ring.submitter().register_restrictions(&mut all)?;
    ring.submitter().register_enable_rings()
}

fn explain(e: io::Error) -> UringError {
    match e.raw_os_error() {
        Some(libc::EPERM) => match std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled") {
            Ok(text) if text.trim() != "0" => UringError::Disabled(text.trim().to_owned()),
            _ => UringError::Forbidden(e),
        },
        Some(libc::EACCES) => UringError::Forbidden(e),
        Some(libc::ENOSYS) => UringError::Absent,
        _ => UringError::Other(e),
    }
}

impl Engine for Uring {
    fn attach(&mut self, file: &Arc<OwnedFd>, backing: Backing, aio: Aio) -> io::Result<FileId> {
        let free = self.files.iter().position(Option::is_none);
        let id = free.unwrap_or(self.files.len()) as u32;
        if id == self.files_max {
            return Err(io::Error::other(format!(
                "one I/O thread serves at most {id} queues; use more --iothreads, or raise the limit \
                 of open files (ulimit -n)"
            )));
        }
        self.workers.follow(&self.ring);
        let submitter = self.ring.submitter();
        submitter.register_files_update(id, &[file.as_raw_fd()])?;
        let target = Target {
            inline: match aio {
                Aio::Auto => Inline::probe(file.as_fd(), backing),
                _ => Inline::Off,
            },
            file: Arc::new(BlockingTarget {
                file: file.clone(),
                backing,
                // Files outside the ring have the odd numbers.
                number: 2 * id as usize,
            }),
        };
        match free {
            Some(free) => self.files[free] = Some(target),
            None => self.files.push(Some(target)),
        }
        Ok(FileId(id))
    }

    fn attach_remote(&mut self, _: &Arc<dyn Remote>) -> io::Result<FileId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn detach(&mut self, file: FileId) {
        self.files[file.0 as usize] = None;
        let result = self.ring.submitter().register_files_update(file.0, &[-1]);
        debug_assert!(result.is_ok());
    }

    #[expect(unsafe_code, reason = "the trait's contract")]
    unsafe fn register(&mut self, memory: &[Segment]) -> io::Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.buffers.add(&self.ring.submitter(), memory) }
    }

    fn unregister(&mut self, memory: &[Segment]) {
        self.buffers.remove(&self.ring.submitter(), memory);
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        debug_assert_eq!(token.0 & INTERNAL, 0);
        let user_data = token.0 | WATCH;
        self.watches.push((user_data, fd.as_raw_fd()));
        self.arm(fd.as_raw_fd(), user_data);
        self.push()
    }

    fn unwatch(&mut self, token: Token) -> io::Result<()> {
        let user_data = token.0 | WATCH;
        self.watches.retain(|w| w.0 != user_data);
        self.queue(
            opcode::PollRemove::new(user_data)
                .build()
                .user_data(IGNORED),
        );
        self.push()
    }

    #[inline]
    fn ready(&mut self) -> bool {
        !self.inline.is_empty()
            || self.blocking.ready()
            || self.ring.submission().taskrun()
            || !self.ring.completion().is_empty()
    }

    #[inline]
    fn room(&self) -> usize {
        IN_FLIGHT_MAX.saturating_sub(self.in_flight)
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.in_flight
    }

    #[inline]
    #[expect(unsafe_code, reason = "the trait's contract")]
    unsafe fn submit(&mut self, file: FileId, op: Op<'_>, token: Token) {
        debug_assert!(self.in_flight < IN_FLIGHT_MAX);
        self.in_flight += 1;
        if let Some((write, at, segments)) = Inline::transfer_of(op)
            && let Some(target) = &mut self.files[file.0 as usize]
            && target.inline.is_wanted()
        {
            // SAFETY: the caller's promise.
            let result = unsafe {
                target
                    .inline
                    .run(target.file.file.as_fd(), write, at, segments)
            };
            return self.inline.push(Completion { token, result });
        }
        let fixed = Fixed(file.0);
        let entry = match op {
            Op::Read { at, to: &[s] } => {
                let (start, len) = (s.addr as *mut u8, s.len.min(LEN_MAX) as u32);
                match self.buffers.find(s) {
                    Some(buffer) => opcode::ReadFixed::new(fixed, start, len, buffer)
                        .offset(at.0)
                        .build(),
                    None => opcode::Read::new(fixed, start, len).offset(at.0).build(),
                }
            }
            Op::Read { at, to } => {
                let (list, n) = iovec(to);
                opcode::Readv::new(fixed, list, n).offset(at.0).build()
            }
            Op::Write {
                at,
                from: &[s],
                stable,
            } => {
                let (start, len) = (s.addr as *const u8, s.len.min(LEN_MAX) as u32);
                match self.buffers.find(s) {
                    Some(buffer) => opcode::WriteFixed::new(fixed, start, len, buffer)
                        .offset(at.0)
                        .rw_flags(write_flags(stable))
                        .build(),
                    None => opcode::Write::new(fixed, start, len)
                        .offset(at.0)
                        .rw_flags(write_flags(stable))
                        .build(),
                }
            }
            Op::Write { at, from, stable } => {
                let (list, n) = iovec(from);
                opcode::Writev::new(fixed, list, n)
                    .offset(at.0)
                    .rw_flags(write_flags(stable))
                    .build()
            }
            Op::Flush => opcode::Fsync::new(fixed)
                .flags(FsyncFlags::DATASYNC)
                .build(),
            Op::Discard { .. } | Op::WriteZeroes { .. } => {
                let target = self.files[file.0 as usize].as_ref();
                let target = target.expect("the file is attached while it is used");
                // SAFETY: the caller's promise.
                let job = unsafe { Job::new(target.file.clone(), op, token) };
                return self.blocking.start(job);
            }
        };
        self.queue(entry.user_data(token.0));
    }

    fn push(&mut self) -> io::Result<()> {
        self.blocking.push();
        let all_done = self.inline.len() == self.in_flight;
        let queue = self.ring.submission();
        // Kicks and wake-ups also need a system call to be reported; the taskrun flag shows that there are
        // some.
        let nothing_to_do = all_done && queue.is_empty() && !queue.taskrun();
        drop(queue);
        if nothing_to_do { Ok(()) } else { self.enter(0) }
    }

    fn wait(&mut self) -> io::Result<()> {
        // Completions that did not fit into the last reap cause no further event.
        if self.inline.is_empty() && !self.blocking.ready() {
            self.blocking.push();
            self.enter(1)
        } else {
            self.push()
        }
    }

    #[inline]
    fn reap(&mut self, out: &mut Vec<Completion>) {
        let before = out.len();
        let n = self.inline.len().min(out.capacity() - before);
        out.extend(self.inline.drain(..n));
        let mut watched = 0;
        let mut rearm = None;
        if out.len() == out.capacity() {
            self.in_flight -= n;
            return;
        }
        for entry in self.ring.completion() {
            let user_data = entry.user_data();
            if user_data & WATCH == 0 {
                let token = Token(user_data);
                let result = entry.result();
                out.push(Completion { token, result });
            } else if entry.result() != -libc::ECANCELED && user_data != IGNORED {
                // A poll that failed for lack of memory counts as an event, and is armed again.
                if user_data & INTERNAL != INTERNAL {
                    let token = Token(user_data & !WATCH);
                    out.push(Completion { token, result: 0 });
                    watched += 1;
                }
                if !cqueue::more(entry.flags()) {
                    rearm = Some(user_data);
                }
            }
            if out.len() == out.capacity() || rearm.is_some() {
                break;
            }
        }
        // The pool is collected after the ring, which reports its event: a completion that a pool thread adds
        // later causes another event.
        self.blocking.collect(out);
        self.in_flight -= out.len() - before - watched;
        if let Some(user_data) = rearm {
            self.rearm(user_data);
        }
    }
}

impl Uring {
    /// Performs an operation on a file that is not attached to this ring, on a pool thread.
    pub(crate) fn start(&mut self, job: Job) {
        self.in_flight += 1;
        self.blocking.start(job);
    }

    /// Ends a wait when `fd` is written; reports no token. The owner must keep `fd` open as long as this ring
    /// exists.
    pub(crate) fn watch_internal(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.watches.push((AUXILIARY_DONE, fd.as_raw_fd()));
        self.arm(fd.as_raw_fd(), AUXILIARY_DONE);
        self.push()
    }

    /// Arms a poll again: the kernel ends a multishot poll when its completion queue overflows.
    fn rearm(&mut self, user_data: u64) {
        if user_data == BLOCKING_DONE {
            let event = self.blocking.event().as_raw_fd();
            self.arm(event, BLOCKING_DONE);
        } else if let Some(&(_, fd)) = self.watches.iter().find(|w| w.0 == user_data) {
            self.arm(fd, user_data);
        }
    }
}

fn write_flags(stable: bool) -> i32 {
    if stable { libc::RWF_DSYNC } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    /// An io-wq worker performs an fdatasync; this test restricts the worker to a CPU other than its
    /// thread's.
    #[test]
    #[expect(unsafe_code, reason = "the contract of submit")]
    fn workers_run_on_given_cpus() {
        let flush = |cpu: usize| {
            let mut engine = Uring::new().unwrap();
            let file = Arc::new(tempfile::tempfile().unwrap().into());
            let id = engine.attach(&file, Backing::File, Aio::IoUring);
            engine.workers.run_on(&engine.ring, only(cpu));
            // SAFETY: a flush names no memory.
            unsafe { engine.submit(id.unwrap(), Op::Flush, Token(1)) };
            let mut done = Vec::with_capacity(4);
            while done.is_empty() {
                engine.wait().unwrap();
                engine.reap(&mut done);
            }
            workers_cpus()
        };
        for cpu in usable_cpus() {
            let found = std::thread::spawn(move || flush(cpu)).join().unwrap();
            assert_eq!(found, [cpu.to_string()]);
        }
    }

    /// The workers move when the thread attaches its next file, because the thread may have been moved for
    /// that file.
    #[test]
    fn workers_follow_their_thread() {
        let mut engine = Uring::new().unwrap();
        let file = Arc::new(tempfile::tempfile().unwrap().into());
        for cpu in usable_cpus() {
            let mut set = CpuSet::new();
            set.set(cpu);
            sched_setaffinity(None, &set).unwrap();
            let id = engine.attach(&file, Backing::File, Aio::IoUring);
            engine.detach(id.unwrap());
            let cpus = engine.workers.cpus();
            assert_eq!(cpus, [cpu]);
        }
    }

    fn usable_cpus() -> Vec<usize> {
        let allowed = sched_getaffinity(None).unwrap();
        let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
        cpus.take(4).collect()
    }

    #[expect(unsafe_code, reason = "libc's sets of CPUs")]
    fn only(cpu: usize) -> libc::cpu_set_t {
        // SAFETY: an all-zero set is empty, and `cpu` was found in a set, so it is in range.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            set
        }
    }

    /// The allowed CPUs of the calling thread's workers; each list appears once.
    fn workers_cpus() -> Vec<String> {
        let name = format!("iou-wrk-{}", rustix::thread::gettid());
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let status = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("status"));
        let mut lists: Vec<_> = tasks
            .filter_map(|task| status(task.ok()?).ok())
            .filter(|status| status.starts_with(&format!("Name:\t{name}\n")))
            .filter_map(|status| Some(status.split_once("Cpus_allowed_list:\t")?.1.to_owned()))
            .map(|rest| rest.lines().next().unwrap_or_default().to_owned())
            .collect();
        lists.sort();
        lists.dedup();
        lists
    }

    #[test]
    fn unused_ring_operations_are_refused() {
        let mut engine = Uring::new().unwrap();
        let mut done = Vec::with_capacity(4);
        let unused = [
            opcode::Nop::new().build(),
            opcode::Close::new(Fd(1)).build(),
            // An unused flag on an operation that is used.
            opcode::PollRemove::new(9)
                .build()
                .flags(squeue::Flags::ASYNC),
        ];
        for (i, entry) in unused.into_iter().enumerate() {
            engine.queue(entry.user_data(i as u64));
            engine.in_flight += 1;
            engine.wait().unwrap();
            engine.reap(&mut done);
            let Completion { token, result } = done.pop().unwrap();
            assert_eq!((token, result), (Token(i as u64), -libc::EACCES));
        }
        let event = engine.blocking.event().as_raw_fd();
        let refused = engine.ring.submitter().register_eventfd(event).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    }
}
