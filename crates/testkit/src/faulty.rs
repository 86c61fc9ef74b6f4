//! An engine that does everything that storage may do: short transfers, errors, delays, reordering, misdirected writes,
//! late completions, an outage, a hang, and a power cut that tears writes. Its disk is in memory, and records what is
//! stable. The same seed has the same effect on the same operations.
//!
//! Operations are executed late, just before their completion is reaped: until then, memory and lists of segments must
//! stay valid.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::random::Random;
use block::{Aio, Backing, Completion, Engine, FileId, FileOffset, Op, Remote, Segment, Token};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

const SECTOR: u64 = 512;

/// How often each fault occurs, per 1000 operations, and what the backing requires of buffers.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Fewer bytes are transferred than requested.
    pub short: u32,
    /// Nothing is transferred, and the operation must be retried: EAGAIN or EINTR.
    pub again: u32,
    /// The operation fails, possibly after a partial transfer: EIO; also ENOSPC for writes and zeroing, EOPNOTSUPP for
    /// zeroing and discards.
    pub fail: u32,
    /// The most rounds that an operation is late, while others overtake it.
    pub late: u64,
    /// The most operations in flight.
    pub room: usize,
    /// A buffer's address must be a multiple of this.
    pub address_alignment: u32,
    /// Offsets and lengths of buffers must be multiples of this.
    pub length_alignment: u32,
}

impl Faults {
    /// No faults: 16 operations in flight, with buffers anywhere.
    pub const NONE: Faults = Faults {
        short: 0,
        again: 0,
        fail: 0,
        late: 0,
        room: 16,
        address_alignment: 1,
        length_alignment: 1,
    };
}

/// The bytes of a disk, and a record of what happened to them. The engine and the test share it.
pub struct MemoryDisk {
    /// The bytes that a read returns.
    pub bytes: Vec<u8>,
    /// Operations that failed permanently: their range (start and length in bytes) and errno.
    pub failures: Vec<(u64, u64, i32)>,
    /// Mistakes of the submitter, which a kernel would have refused.
    pub mistakes: Vec<String>,
    /// The number of each fault so far: short, again, failed.
    pub struck: [u64; 3],
    /// Flushes that were executed, and those of them that failed.
    pub flushes: [u64; 2],
    /// Writes that were submitted as stable.
    pub stable_writes: u64,
    /// Ranges to be zeroed, and those of them whose space may be freed.
    pub zeroed: [u64; 2],
    /// Data of a failed flush never becomes stable, as in Linux' page cache.
    pub forgets: bool,
    /// The files of the submitted operations, in order, by the engine's number.
    pub submitted: Vec<u32>,
    /// Zeroing fails with EOPNOTSUPP.
    pub cannot_zero: bool,
    /// The engine itself fails, instead of an operation.
    pub broken: bool,
    /// How many descriptors the engines watch.
    pub watched: usize,
    /// How often completions were reaped.
    pub turns: u64,
    /// Writes beyond the end extend the disk, as with a file.
    pub grows: bool,
    /// Every operation fails with this errno and has no effect.
    pub outage: Option<i32>,
    /// How many of 1000 writes go to another place and report success.
    pub misdirect: u32,
    /// The writes that went to another place.
    pub misdirected: Vec<Misdirected>,
    /// How often, of 1000 times, the completion queue overflows: further completions appear only after the next push.
    pub overflow: u32,
    hangs: bool,
    /// The stable content of a sector, where `bytes` has another content.
    before: BTreeMap<u64, [u8; SECTOR as usize]>,
    /// Descriptors that wake the engines.
    wakes: Vec<OwnedFd>,
    /// For each sector, the number of the last write that is not stable yet, or 0.
    unstable: Vec<u64>,
    writes: u64,
}

/// A write that went to another place, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Misdirected {
    /// The offset at which it should have been written.
    pub meant: u64,
    /// The offset at which it was written.
    pub landed: u64,
    /// Its length.
    pub len: u64,
}

impl MemoryDisk {
    /// A disk of zeroes.
    pub fn new(len: usize) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            bytes: vec![0; len],
            failures: Vec::new(),
            mistakes: Vec::new(),
            struck: [0; 3],
            flushes: [0; 2],
            stable_writes: 0,
            zeroed: [0; 2],
            forgets: false,
            submitted: Vec::new(),
            cannot_zero: false,
            broken: false,
            watched: 0,
            turns: 0,
            grows: false,
            outage: None,
            misdirect: 0,
            misdirected: Vec::new(),
            overflow: 0,
            hangs: false,
            before: BTreeMap::new(),
            wakes: Vec::new(),
            unstable: vec![0; len / SECTOR as usize],
            writes: 0,
        }))
    }

    /// A file with this content. Writes beyond its end extend it.
    pub fn file(bytes: Vec<u8>) -> Arc<Mutex<Self>> {
        let file = Self::new(0);
        let mut disk = file.lock().unwrap_or_else(|e| e.into_inner());
        disk.grows = true;
        disk.set_len(bytes.len());
        disk.bytes = bytes;
        drop(disk);
        file
    }

    /// Grows or shrinks the disk; added bytes are zero.
    pub fn set_len(&mut self, len: usize) {
        self.bytes.resize(len, 0);
        self.unstable.resize(len.div_ceil(SECTOR as usize), 0);
    }

    /// Whether this range would survive a power cut unchanged.
    pub fn is_stable(&self, at: u64, len: u64) -> bool {
        self.unstable[(at / SECTOR) as usize..(at + len).div_ceil(SECTOR) as usize]
            .iter()
            .all(|&write| write == 0)
    }

    /// Switches a hang on or off. During a hang no operation on this disk completes; if it is the engine's first disk,
    /// no operation of the engine does.
    pub fn hang(&mut self, on: bool) {
        self.hangs = on;
        for wake in &self.wakes {
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }

    /// Cuts the power: each sector that is not stable gets its old or its current content.
    pub fn cut_power(&mut self, random: &mut Random) {
        for (at, old) in std::mem::take(&mut self.before) {
            let end = self.bytes.len().min((at + SECTOR) as usize);
            if random.below(2) == 0
                && let Some(bytes) = self.bytes.get_mut(at as usize..end)
            {
                bytes.copy_from_slice(&old[..bytes.len()]);
            }
        }
        self.unstable.fill(0);
    }

    /// The old content that a power cut may restore in a sector.
    pub fn before(&self, sector: u64) -> Option<&[u8; SECTOR as usize]> {
        self.before.get(&(sector * SECTOR))
    }

    /// Removes and returns the first failure in a range.
    pub fn take_failure(&mut self, at: u64, len: u64) -> Option<i32> {
        let is_here = |f: &(u64, u64, i32)| f.0 >= at && f.0 < at + len;
        let place = self.failures.iter().position(is_here)?;
        Some(self.failures.remove(place).2)
    }

    /// Records a flush for the writes up to this number that have not been overwritten since.
    fn flushed(&mut self, up_to: u64, failed: bool) {
        self.flushes[0] += 1;
        self.flushes[1] += u64::from(failed);
        let mark = match (failed, self.forgets) {
            (false, _) => 0,
            (true, true) => FORGOTTEN,
            (true, false) => return,
        };
        let unstable = (0..).zip(&mut self.unstable);
        for (sector, write) in unstable.filter(|(_, write)| (1..=up_to).contains(*write)) {
            *write = mark;
            if mark == 0 {
                self.before.remove(&(sector * SECTOR));
            }
        }
    }

    /// Saves the content that is about to be overwritten.
    fn keep(&mut self, at: u64, len: u64) {
        let first = at / SECTOR;
        for sector in (first..(at + len).div_ceil(SECTOR)).map(|sector| sector * SECTOR) {
            let mut old = [0; SECTOR as usize];
            let end = self.bytes.len().min((sector + SECTOR) as usize);
            if let Some(bytes) = self.bytes.get(sector as usize..end) {
                old[..bytes.len()].copy_from_slice(bytes);
            }
            self.before.entry(sector).or_insert(old);
        }
    }

    fn wrote(&mut self, at: u64, len: u64, stable: bool) {
        self.writes += 1;
        let mark = if stable { 0 } else { self.writes };
        self.stable_writes += u64::from(stable);
        if stable {
            let end = at + len;
            let sectors = (at.next_multiple_of(SECTOR)..end).step_by(SECTOR as usize);
            for sector in sectors {
                self.before.remove(&sector);
            }
        }
        if len > 0 {
            self.unstable[(at / SECTOR) as usize..(at + len).div_ceil(SECTOR) as usize].fill(mark);
        }
    }
}

/// The number of a write that no flush can make stable any more.
const FORGOTTEN: u64 = u64::MAX;

/// The engine. Attached files are assigned to its disks in turn.
pub struct Faulty {
    disks: Vec<Arc<Mutex<MemoryDisk>>>,
    faults: Faults,
    random: Random,
    pending: Vec<Pending>,
    round: u64,
    files: u32,
    epoll: OwnedFd,
    watches: Vec<(Token, OwnedFd)>,
    woken: Vec<Token>,
    /// No completion appears before the next push.
    overflowed: bool,
}

/// The token of the engine's own wake-up.
const RESUMED: u64 = u64::MAX;

struct Pending {
    /// The index of the operation's disk.
    disk: usize,
    token: Token,
    due: u64,
    what: Operation,
}

/// An [`Op`] without its lifetime: the submitter guarantees that it stays valid.
enum Operation {
    Read(u64, SegmentList),
    Write(u64, SegmentList, bool),
    /// The number of the last write that the flush makes stable.
    Flush(u64),
    Discard(u64, u64, bool),
    WriteZeroes(u64, u64, bool),
}

/// Segments as io_uring takes them: a single segment by value, a longer list by its address.
enum SegmentList {
    One(Segment),
    Many(*const Segment, usize),
}

// SAFETY: an engine moves to the thread that uses it before any operation is submitted.
unsafe impl Send for SegmentList {}

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const EOPNOTSUPP: i32 = 95;

impl Faulty {
    /// An engine in which every file is on `disk`.
    ///
    /// # Errors
    /// The system cannot create an epoll instance or an event descriptor.
    pub fn new(disk: Arc<Mutex<MemoryDisk>>, faults: Faults, seed: u64) -> io::Result<Self> {
        Self::over(vec![disk], faults, seed)
    }

    /// An engine with several disks, at least one.
    ///
    /// # Errors
    /// The system cannot create an epoll instance or an event descriptor.
    pub fn over(disks: Vec<Arc<Mutex<MemoryDisk>>>, faults: Faults, seed: u64) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(RESUMED), flags)?;
        for disk in &disks {
            let mut disk = disk.lock().unwrap_or_else(|e| e.into_inner());
            disk.wakes.push(wake.try_clone()?);
        }
        Ok(Self {
            disks,
            overflowed: false,
            faults,
            random: Random(seed),
            pending: Vec::new(),
            round: 0,
            files: 0,
            epoll,
            watches: Vec::new(),
            woken: Vec::new(),
        })
    }

    /// The first disk, which also controls the engine itself.
    fn disk(&self) -> MutexGuard<'_, MemoryDisk> {
        self.disk_of(0)
    }

    fn hangs(&self, pending: &Pending) -> bool {
        self.disk().hangs || self.disk_of(pending.disk).hangs
    }

    fn disk_of(&self, number: usize) -> MutexGuard<'_, MemoryDisk> {
        self.disks[number].lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Collects wake-ups, and waits for one if `wait`.
    fn poll(&mut self, wait: bool) -> io::Result<()> {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 8];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let timeout = if wait { None } else { Some(&now) };
        let n = match epoll::wait(&self.epoll, &mut events[..], timeout) {
            Err(rustix::io::Errno::INTR) => 0,
            n => n?,
        };
        let tokens = events[..n].iter().map(|e| Token(e.data.u64()));
        self.woken.extend(tokens.filter(|token| token.0 != RESUMED));
        Ok(())
    }

    fn execute(&mut self, on: usize, what: &Operation) -> i32 {
        let outage = self.disk_of(on).outage;
        if let Some(errno) = outage {
            return -errno;
        }
        if self.random.occurs_in_1000(self.faults.again) {
            self.disk_of(on).struck[1] += 1;
            return -[EAGAIN, EINTR][self.random.below(2) as usize];
        }
        match what {
            Operation::Read(at, list) | Operation::Write(at, list, _) => {
                let is_write = matches!(what, Operation::Write(..));
                let stable = matches!(what, Operation::Write(_, _, true));
                self.transfer(on, *at, &list.segments(), is_write, stable)
            }
            Operation::Flush(up_to) => {
                let failed = self.fails(on, 0, 0, &[EIO]);
                self.disk_of(on).flushed(*up_to, failed.is_some());
                failed.map_or(0, |errno| -errno)
            }
            Operation::Discard(at, len, stable) => {
                match self.fails(on, *at, *len, &[EIO, EOPNOTSUPP]) {
                    Some(errno) => -errno,
                    // The backing decides whether a discard frees space.
                    None if self.random.below(2) == 0 => 0,
                    None => self.zero(on, *at, *len, *stable),
                }
            }
            Operation::WriteZeroes(..) if self.disk_of(on).cannot_zero => -EOPNOTSUPP,
            Operation::WriteZeroes(at, len, stable) => {
                match self.fails(on, *at, *len, &[EIO, ENOSPC, EOPNOTSUPP]) {
                    Some(errno) => {
                        let part = self.random.below(len / SECTOR + 1) * SECTOR;
                        self.zero(on, *at, part, false);
                        -errno
                    }
                    None => self.zero(on, *at, *len, *stable),
                }
            }
        }
    }

    fn transfer(
        &mut self,
        on: usize,
        at: u64,
        segments: &[Segment],
        is_write: bool,
        stable: bool,
    ) -> i32 {
        let len: u64 = segments.iter().map(|s| s.len as u64).sum();
        let unit = u64::from(self.faults.length_alignment);
        let address = self.faults.address_alignment as usize;
        let bad = |s: &Segment| {
            !s.addr.is_multiple_of(address) || !(s.len as u64).is_multiple_of(unit) || s.len == 0
        };
        if !at.is_multiple_of(unit) || len == 0 || segments.iter().any(bad) {
            let mistake = format!("byte {at}, {segments:x?}");
            self.disk_of(on).mistakes.push(mistake);
            return -EINVAL;
        }
        let errnos: &[i32] = if is_write { &[EIO, ENOSPC] } else { &[EIO] };
        let failed = self.fails(on, at, len, errnos);
        let moved = match failed {
            Some(_) => self.random.below(len / unit + 1) * unit,
            None if len > unit && self.random.occurs_in_1000(self.faults.short) => {
                self.disk_of(on).struck[0] += 1;
                (1 + self.random.below(len / unit - 1)) * unit
            }
            None => len,
        };
        let misdirect = self.disk_of(on).misdirect;
        let astray =
            is_write && failed.is_none() && misdirect > 0 && self.random.occurs_in_1000(misdirect);
        let meant = at;
        let at = match astray {
            true => {
                let bytes = self.disk_of(on).bytes.len() as u64;
                self.random.below(bytes.saturating_sub(moved) / unit + 1) * unit
            }
            false => at,
        };
        let mut disk = self.disk_of(on);
        let (end, mut moved) = ((at + moved) as usize, moved);
        if disk.grows && end > disk.bytes.len() {
            match is_write {
                true => disk.set_len(end),
                false => moved = (disk.bytes.len() as u64).saturating_sub(at),
            }
        }
        if is_write {
            disk.keep(at, moved);
        }
        if astray {
            disk.misdirected.push(Misdirected {
                meant,
                landed: at,
                len: moved,
            });
        }
        let (mut place, mut left) = (at as usize, moved as usize);
        for s in segments {
            let n = s.len.min(left);
            if n == 0 {
                break;
            }
            let bytes = &mut disk.bytes[place..place + n];
            // SAFETY: the submitter promises that the segment stays valid until the completion is reaped, and `n` bytes
            // of it are used; the disk's bytes do not overlap it.
            unsafe {
                match is_write {
                    true => ptr::copy_nonoverlapping(s.addr as *const u8, bytes.as_mut_ptr(), n),
                    false => ptr::copy_nonoverlapping(bytes.as_ptr(), s.addr as *mut u8, n),
                }
            }
            (place, left) = (place + n, left - n);
        }
        if is_write {
            disk.wrote(at, moved, stable && failed.is_none());
        }
        failed.map_or(moved as i32, |errno| -errno)
    }

    fn zero(&self, on: usize, at: u64, len: u64, stable: bool) -> i32 {
        let mut disk = self.disk_of(on);
        disk.keep(at, len);
        disk.bytes[at as usize..(at + len) as usize].fill(0);
        disk.wrote(at, len, stable);
        0
    }

    fn fails(&mut self, on: usize, at: u64, len: u64, errnos: &[i32]) -> Option<i32> {
        if !self.random.occurs_in_1000(self.faults.fail) {
            return None;
        }
        let errno = errnos[self.random.below(errnos.len() as u64) as usize];
        let mut disk = self.disk_of(on);
        disk.struck[2] += 1;
        // The submitter decides whom a failed flush concerns.
        if len > 0 {
            disk.failures.push((at, len, errno));
        }
        Some(errno)
    }
}

impl Engine for Faulty {
    fn attach(&mut self, _: &Arc<OwnedFd>, _: Backing, _: Aio) -> io::Result<FileId> {
        self.files += 1;
        Ok(FileId(self.files - 1))
    }

    fn attach_remote(&mut self, _: &Arc<dyn Remote>) -> io::Result<FileId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn detach(&mut self, _file: FileId) {}

    unsafe fn register(&mut self, _memory: &[Segment]) -> io::Result<()> {
        Ok(())
    }

    fn unregister(&mut self, _memory: &[Segment]) {}

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        let fd = fd.try_clone_to_owned()?;
        // Edge-triggered: each write to the descriptor is an edge, whether or not it is read.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.epoll, &fd, epoll::EventData::new_u64(token.0), flags)?;
        self.watches.push((token, fd));
        self.disk().watched += 1;
        Ok(())
    }

    fn unwatch(&mut self, token: Token) -> io::Result<()> {
        if let Some(place) = self.watches.iter().position(|w| w.0 == token) {
            let (_, fd) = self.watches.swap_remove(place);
            epoll::delete(&self.epoll, fd.as_fd())?;
            self.disk().watched -= 1;
        }
        Ok(())
    }

    fn ready(&mut self) -> bool {
        // Time passes between two calls.
        self.round += 1;
        let due = || self.pending.iter().any(|p| p.due <= self.round);
        !self.woken.is_empty() || due() && !self.disk().hangs
    }

    fn room(&self) -> usize {
        self.faults.room - self.pending.len()
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    unsafe fn submit(&mut self, file: FileId, op: Op<'_>, token: Token) {
        assert!(self.room() > 0, "more is submitted than there is room for");
        self.disk().submitted.push(file.0);
        let disk = file.0 as usize % self.disks.len();
        let what = match op {
            Op::Read { at, to } => Operation::Read(at.0, SegmentList::new(to)),
            Op::Write { at, from, stable } => {
                Operation::Write(at.0, SegmentList::new(from), stable)
            }
            Op::Flush => Operation::Flush(self.disk_of(disk).writes),
            Op::Discard { at, len, stable } => Operation::Discard(at.0, len, stable),
            Op::WriteZeroes {
                at: FileOffset(at),
                len,
                unmap,
                stable,
            } => {
                let zeroed = &mut self.disk_of(disk).zeroed;
                zeroed[0] += 1;
                zeroed[1] += u64::from(unmap);
                Operation::WriteZeroes(at, len, stable)
            }
        };
        let due = self.round + self.random.below(self.faults.late + 1);
        self.pending.push(Pending {
            disk,
            token,
            due,
            what,
        });
    }

    fn push(&mut self) -> io::Result<()> {
        if self.disk().broken {
            return Err(rustix::io::Errno::IO.into());
        }
        self.round += 1;
        self.overflowed = false;
        self.poll(false)
    }

    fn wait(&mut self) -> io::Result<()> {
        let idle = self.pending.iter().all(|p| self.hangs(p));
        self.overflowed = false;
        self.poll(idle)?;
        if self.woken.is_empty()
            && let Some(next) = self.pending.iter().map(|p| p.due).min()
        {
            self.round = self.round.max(next);
            // Gives the guest time to run.
            if self.random.below(64) == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        self.disk().turns += 1;
        while out.len() < out.capacity()
            && let Some(token) = self.woken.pop()
        {
            out.push(Completion { token, result: 0 });
        }
        let disk = self.disk();
        let (hangs, overflow) = (disk.hangs, disk.overflow);
        drop(disk);
        while out.len() < out.capacity() && !hangs && !self.overflowed {
            self.overflowed = overflow > 0 && self.random.occurs_in_1000(overflow);
            let due = |p: &(usize, &Pending)| p.1.due <= self.round && !self.hangs(p.1);
            let due: Vec<usize> = self
                .pending
                .iter()
                .enumerate()
                .filter(due)
                .map(|(i, _)| i)
                .collect();
            let Some(&any) = due.get(self.random.below(due.len().max(1) as u64) as usize) else {
                return;
            };
            let Pending {
                disk, token, what, ..
            } = self.pending.swap_remove(any);
            let result = self.execute(disk, &what);
            out.push(Completion { token, result });
        }
    }
}

impl SegmentList {
    fn new(segments: &[Segment]) -> Self {
        match segments {
            [one] => Self::One(*one),
            many => Self::Many(many.as_ptr(), many.len()),
        }
    }

    fn segments(&self) -> Vec<Segment> {
        match *self {
            Self::One(segment) => vec![segment],
            // SAFETY: the submitter promises that the list stays in place until the completion is reaped.
            Self::Many(list, len) => unsafe { std::slice::from_raw_parts(list, len) }.to_vec(),
        }
    }
}
