//! Storage with faults on command, for an unmodified server under test: one file in a FUSE file system that this module
//! serves. It can be absent or hang; it can be slow, transfer less than requested, reorder and sometimes fail; and at a
//! power cut it can lose what was not made durable. Its random behaviour depends on a seed.
//!
//! It implements the protocol of `fuse(4)` and `linux/fuse.h` as far as one file needs it.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::random::Random;

const SECTOR: u64 = 512;
/// A shortened transfer moves whole pages.
const PAGE: u64 = 4096;
/// The largest write in bytes that the kernel may send.
const WRITE_MAX: usize = 1 << 20;
const NAME: &[u8] = b"disk";
/// The node id of the file; 1 is the directory.
const FILE: u64 = 2;

const EIO: i32 = 5;
const ENOENT: i32 = 2;
const EAGAIN: i32 = 11;
const ENOSPC: i32 = 28;
const ENOSYS: i32 = 38;
const EOPNOTSUPP: i32 = 95;

/// How often the storage misbehaves at random, per 1000 operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mishaps {
    /// A read or write transfers less than requested.
    pub short: u32,
    /// An operation fails: EIO, or ENOSPC for operations that write. A failed write may have been done in part.
    pub fail: u32,
    /// An operation must be retried: EAGAIN.
    pub again: u32,
    /// The most milliseconds that an operation is late, while others overtake it.
    pub late_ms: u64,
}

/// The state of the storage; a test changes it during use.
#[derive(Default)]
pub struct Control {
    /// Every operation fails with this errno.
    pub outage: Option<i32>,
    /// Operations that write fail with ENOSPC.
    pub full: bool,
    /// Operations that read, write or make data durable get no answer.
    pub hangs: bool,
    /// With `hangs`, the other operations get no answer either, such as those for the file's existence and length.
    pub silent: bool,
    /// Random faults.
    pub mishaps: Mishaps,
    /// The number of failed operations.
    pub failed: u64,
    /// The number of answered operations.
    pub answered: u64,
    /// The number of operations to be answered later.
    pub held: usize,
    bytes: Vec<u8>,
    /// The durable content of a sector, where `bytes` has another content.
    durable: BTreeMap<u64, [u8; SECTOR as usize]>,
}

impl Control {
    /// The bytes that a read returns now.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn keep(&mut self, at: u64, len: u64) {
        for sector in at / SECTOR..(at + len).div_ceil(SECTOR) {
            let from = (sector * SECTOR) as usize;
            let mut old = [0; SECTOR as usize];
            let end = (from + SECTOR as usize).min(self.bytes.len());
            if from < end {
                old[..end - from].copy_from_slice(&self.bytes[from..end]);
            }
            self.durable.entry(sector).or_insert(old);
        }
    }

    fn write(&mut self, at: u64, bytes: &[u8]) {
        self.keep(at, bytes.len() as u64);
        let end = at as usize + bytes.len();
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        self.bytes[at as usize..end].copy_from_slice(bytes);
    }

    fn set_len(&mut self, len: u64) {
        let old = self.bytes.len() as u64;
        if len < old {
            self.keep(len, old - len);
        }
        self.bytes.resize(len as usize, 0);
    }

    fn flush(&mut self) {
        self.durable.clear();
    }

    /// Cuts the power: each sector that was not made durable gets its old or its current content. A file that has grown
    /// keeps its length, as on a journaling file system.
    pub fn cut_power(&mut self, random: &mut Random) {
        for (sector, old) in std::mem::take(&mut self.durable) {
            let from = (sector * SECTOR) as usize;
            if random.below(2) == 0
                && let Some(place) = self.bytes.get_mut(from..from + SECTOR as usize)
            {
                place.copy_from_slice(&old);
            }
        }
    }
}

/// What the kernel does when an operation on the file is submitted to io_uring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submission {
    /// It sends the operation to the server (`FUSE_ASYNC_DIO`).
    Asynchronous,
    /// The thread that submits a read waits for the server's answer, as with most FUSE servers.
    Blocking,
}

/// A file system with one file, `disk`. Dropping this unmounts it; operations in flight then fail.
pub struct Storage {
    directory: PathBuf,
    control: Arc<Mutex<Control>>,
    wake: Arc<OwnedFd>,
    server: Option<JoinHandle<()>>,
}

impl Storage {
    /// Mounts the file system at an empty directory. The file has this content, all of it durable.
    ///
    /// # Errors
    /// FUSE is not available, or this user may not mount.
    pub fn mount(directory: &Path, content: Vec<u8>, seed: u64) -> io::Result<Self> {
        Self::mount_as(directory, content, seed, Submission::Asynchronous)
    }

    /// The same; on the second kind of file system, threads that submit reads to io_uring wait for them.
    ///
    /// # Errors
    /// As for [`mount`](Self::mount).
    pub fn mount_as(
        directory: &Path,
        content: Vec<u8>,
        seed: u64,
        submission: Submission,
    ) -> io::Result<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let text = |s: String| CString::new(s).map_err(io::Error::other);
        let options = text(format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,max_read=1048576",
            device.as_raw_fd()
        ))?;
        let place = CString::new(directory.as_os_str().as_bytes()).map_err(io::Error::other)?;
        // SAFETY: four strings that outlive the call.
        let failed = unsafe {
            libc::mount(
                c"ringdisk-test".as_ptr(),
                place.as_ptr(),
                c"fuse".as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV,
                options.as_ptr().cast(),
            )
        };
        if failed != 0 {
            return Err(io::Error::last_os_error());
        }
        let control = Control {
            bytes: content,
            ..Control::default()
        };
        let control = Arc::new(Mutex::new(control));
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let server = Server {
            device,
            control: control.clone(),
            wake: wake.clone(),
            submission,
            random: Random(seed),
            late: VecDeque::new(),
        };
        let server = thread::Builder::new()
            .name("faulty-storage".into())
            .spawn(move || server.serve())?;
        Ok(Self {
            directory: directory.into(),
            control,
            wake,
            server: Some(server),
        })
    }

    /// The path of the file.
    pub fn file(&self) -> PathBuf {
        self.directory.join("disk")
    }

    /// The state, which is read before each operation.
    pub fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Changes the state, and has the held operations checked again.
    pub fn change(&self, change: impl FnOnce(&mut Control)) {
        change(&mut self.control());
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let place = CString::new(self.directory.as_os_str().as_bytes()).unwrap_or_default();
        // SAFETY: a string that outlives the call.
        unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH | libc::MNT_FORCE) };
        // No other wake-up writes this number: it ends the server, and with it the connection.
        let _ = rustix::io::write(&*self.wake, &END.to_ne_bytes());
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

const END: u64 = 1 << 32;

struct Request {
    opcode: u32,
    unique: u64,
    node: u64,
    body: Vec<u8>,
}

struct Server {
    device: File,
    control: Arc<Mutex<Control>>,
    wake: Arc<OwnedFd>,
    submission: Submission,
    random: Random,
    /// Requests to be answered later, and the time of the answer.
    late: VecDeque<(Instant, Request)>,
}

impl Server {
    fn serve(mut self) {
        let mut buffer = vec![0; WRITE_MAX + 4096];
        loop {
            let now = Instant::now();
            let hangs = self.control().hangs;
            if !hangs {
                for _ in 0..self.late.len() {
                    if let Some((due, request)) = self.late.pop_front() {
                        match due <= now {
                            true => self.answer(&request),
                            false => self.late.push_back((due, request)),
                        }
                    }
                }
            }
            self.control().held = self.late.len();
            let next = self.late.iter().map(|(due, _)| *due).min();
            let wait = next.filter(|_| !hangs).map(|due| {
                let wait = due.saturating_duration_since(now);
                Timespec {
                    tv_sec: wait.as_secs() as i64,
                    tv_nsec: i64::from(wait.subsec_nanos()),
                }
            });
            let mut ready = [
                PollFd::new(&self.device, PollFlags::IN),
                PollFd::new(&*self.wake, PollFlags::IN),
            ];
            let _ = poll(&mut ready, wait.as_ref());
            let [device, wake] = ready.map(|fd| fd.revents());
            if !wake.is_empty() {
                let mut count = [0; 8];
                let _ = rustix::io::read(&*self.wake, &mut count);
                if u64::from_ne_bytes(count) >= END {
                    return;
                }
            }
            if device.is_empty() {
                continue;
            }
            match self.device.read(&mut buffer) {
                Ok(n) if n >= 40 => self.take(&buffer[..n]),
                Ok(_) => return,
                Err(e) if e.raw_os_error() == Some(ENOENT) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // The file system has been unmounted.
                Err(_) => return,
            }
        }
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn take(&mut self, bytes: &[u8]) {
        let request = Request {
            opcode: u32_at(bytes, 4),
            unique: u64_at(bytes, 8),
            node: u64_at(bytes, 16),
            body: bytes[40..].to_vec(),
        };
        let control = self.control();
        let (hangs, late) = (control.hangs, control.mishaps.late_ms);
        let silent = hangs && control.silent;
        drop(control);
        let moves = matches!(request.opcode, READ | WRITE | FSYNC | FALLOCATE);
        let asks = matches!(request.opcode, LOOKUP | GETATTR | SETATTR | OPEN);
        if (moves || asks && silent) && (hangs || late > 0) {
            let late = Duration::from_millis(self.random.below(late + 1));
            self.late.push_back((Instant::now() + late, request));
        } else {
            self.answer(&request);
        }
    }

    fn answer(&mut self, request: &Request) {
        if matches!(request.opcode, FORGET | BATCH_FORGET | INTERRUPT) {
            return;
        }
        let answer = self.execute(request);
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(errno) => (-errno, Vec::new()),
        };
        let mut bytes = Vec::with_capacity(16 + body.len());
        bytes.extend((16 + body.len() as u32).to_ne_bytes());
        bytes.extend(error.to_ne_bytes());
        bytes.extend(request.unique.to_ne_bytes());
        bytes.extend(body);
        // The process that asked may have ended.
        let _ = self.device.write(&bytes);
    }

    fn execute(&mut self, request: &Request) -> Result<Vec<u8>, i32> {
        let body = &request.body[..];
        match request.opcode {
            INIT => Ok(init(body, self.submission)),
            LOOKUP if body.strip_suffix(b"\0") == Some(NAME) => {
                let mut entry = Vec::new();
                // Attributes are never cached: a power cut changes lengths without the kernel's knowledge.
                put(&mut entry, &[FILE, 0, 0, 0, 0]);
                entry.extend(self.attributes(FILE));
                Ok(entry)
            }
            LOOKUP => Err(ENOENT),
            GETATTR => {
                let mut attributes = vec![0; 16];
                attributes.extend(self.attributes(request.node));
                Ok(attributes)
            }
            SETATTR => {
                const SIZE: u32 = 1 << 3;
                if u32_at(body, 0) & SIZE != 0 {
                    self.fails(true)?;
                    self.control().set_len(u64_at(body, 16));
                }
                let mut attributes = vec![0; 16];
                attributes.extend(self.attributes(request.node));
                Ok(attributes)
            }
            OPEN | OPENDIR => Ok(vec![0; 16]),
            READ => {
                let (at, len) = (u64_at(body, 8) as usize, u32_at(body, 16) as usize);
                self.fails(false)?;
                let len = self.shortened(len as u64) as usize;
                let control = self.control();
                let end = (at + len).min(control.bytes.len());
                Ok(control.bytes.get(at..end).unwrap_or_default().to_vec())
            }
            WRITE => {
                let (at, len) = (u64_at(body, 8), u32_at(body, 16) as usize);
                let data = body.get(40..40 + len).ok_or(EIO)?;
                if let Err(errno) = self.fails(true) {
                    // The write may have been done in part.
                    if errno == EIO && self.control().outage.is_none() {
                        let part = self.random.below(len as u64 / SECTOR + 1) * SECTOR;
                        self.control().write(at, &data[..part as usize]);
                    }
                    return Err(errno);
                }
                const O_DSYNC: u32 = 0o10_000;
                let len = self.shortened(len as u64);
                let mut control = self.control();
                control.write(at, &data[..len as usize]);
                if u32_at(body, 32) & O_DSYNC != 0 {
                    let sectors = at / SECTOR..(at + len).div_ceil(SECTOR);
                    for sector in sectors {
                        control.durable.remove(&sector);
                    }
                }
                let mut out = (len as u32).to_ne_bytes().to_vec();
                out.extend([0; 4]);
                Ok(out)
            }
            FSYNC => {
                self.fails(false)?;
                self.control().flush();
                Ok(Vec::new())
            }
            FALLOCATE => {
                const KEEP: u32 = 1;
                const PUNCH: u32 = 2;
                const ZERO: u32 = 16;
                let (at, len, mode) = (u64_at(body, 8), u64_at(body, 16), u32_at(body, 24));
                if mode & !(KEEP | PUNCH | ZERO) != 0 || mode & (PUNCH | ZERO) == 0 {
                    return Err(EOPNOTSUPP);
                }
                self.fails(true)?;
                let mut control = self.control();
                let old = control.bytes.len() as u64;
                let end = match mode & KEEP {
                    0 => at + len,
                    _ => (at + len).min(old),
                };
                if end > at {
                    control.write(at, &vec![0; (end - at) as usize]);
                }
                Ok(Vec::new())
            }
            RELEASE | RELEASEDIR | FLUSH | DESTROY | ACCESS => Ok(Vec::new()),
            STATFS => Ok(vec![0; 80]),
            _ => Err(ENOSYS),
        }
    }

    /// Fails, with the errno, if the operation is to fail now.
    fn fails(&mut self, writes: bool) -> Result<(), i32> {
        let Control {
            outage,
            full,
            mishaps,
            ..
        } = *self.control();
        let errno = match outage {
            Some(errno) => Some(errno),
            None if full && writes => Some(ENOSPC),
            None if mishaps.again > 0 && self.random.occurs_in_1000(mishaps.again) => Some(EAGAIN),
            None if mishaps.fail > 0 && self.random.occurs_in_1000(mishaps.fail) => {
                let nospace = writes && self.random.below(2) == 0;
                Some(if nospace { ENOSPC } else { EIO })
            }
            None => None,
        };
        let mut control = self.control();
        control.answered += 1;
        control.failed += u64::from(errno.is_some());
        errno.map_or(Ok(()), Err)
    }

    fn shortened(&mut self, len: u64) -> u64 {
        let short = self.control().mishaps.short;
        if len > PAGE && short > 0 && self.random.occurs_in_1000(short) {
            part_of(len, &mut self.random)
        } else {
            len
        }
    }

    fn attributes(&self, node: u64) -> Vec<u8> {
        let (mode, size) = match node {
            FILE => (0o100_600, self.control().bytes.len() as u64),
            _ => (0o040_700, 0),
        };
        let mut bytes = Vec::new();
        put(&mut bytes, &[node, size, size.div_ceil(SECTOR), 0, 0, 0]);
        for word in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes
    }
}

/// The length of a shortened transfer: at least a page, and less than `len`, which is more than a page.
fn part_of(len: u64, random: &mut Random) -> u64 {
    (1 + random.below(len.div_ceil(PAGE) - 1)) * PAGE
}

fn init(body: &[u8], submission: Submission) -> Vec<u8> {
    const ASYNC_READ: u32 = 1;
    const BIG_WRITES: u32 = 1 << 5;
    const ASYNC_DIO: u32 = 1 << 15;
    const PARALLEL_DIROPS: u32 = 1 << 18;
    const MAX_PAGES: u32 = 1 << 22;
    let mut wanted = ASYNC_READ | BIG_WRITES | PARALLEL_DIROPS | MAX_PAGES;
    if submission == Submission::Asynchronous {
        wanted |= ASYNC_DIO;
    }
    let mut bytes = Vec::new();
    for word in [7, 31, 0, u32_at(body, 12) & wanted] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes.extend(64u16.to_ne_bytes());
    bytes.extend(48u16.to_ne_bytes());
    bytes.extend((WRITE_MAX as u32).to_ne_bytes());
    bytes.extend(1u32.to_ne_bytes());
    bytes.extend(((WRITE_MAX / 4096) as u16).to_ne_bytes());
    bytes.resize(64, 0);
    bytes
}

fn put(to: &mut Vec<u8>, words: &[u64]) {
    to.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let field = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    field.map_or(0, u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let field = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
    field.map_or(0, u64::from_ne_bytes)
}

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const RELEASEDIR: u32 = 29;
const ACCESS: u32 = 34;
const INTERRUPT: u32 = 36;
const DESTROY: u32 = 38;
const BATCH_FORGET: u32 = 42;
const FALLOCATE: u32 = 43;

#[cfg(test)]
mod tests {
    use super::*;

    /// Once, a length between one and two pages was a division by zero, which ended the file system.
    #[test]
    fn shortened_transfers_move_whole_pages_but_not_all() {
        let mut random = Random(1);
        for len in (PAGE + 1..=4 * PAGE).step_by(SECTOR as usize - 1) {
            let part = part_of(len, &mut random);
            assert!(
                part >= PAGE && part < len && part.is_multiple_of(PAGE),
                "{part} of {len}"
            );
        }
    }
}
