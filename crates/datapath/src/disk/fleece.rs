//! A fleece: what a disk was at one moment, for as long as a backup reads it.
//!
//! The disk itself holds what the guest has not written since. Before the guest's first write to a granule of 4 KiB, its old
//! data is copied here ([`preserve`](crate::path::preserve)), and then the write goes on as usual. A reader reads the disk
//! first, and then replaces what was copied meanwhile ([`overlay`](Fleece::overlay)). It locks nothing.
//!
//! Why that is enough: a granule is marked as copied before the first write to it is submitted. If the disk has returned
//! anything newer, the mark is there when the reader looks for it.
//!
//! Writes that were in flight at the moment are part of it. Until they have ended, writes to the same granules wait, and
//! nobody reads ([`is_settled`](Fleece::is_settled)).
//!
//! If something else has what was not copied until now, a snapshot of the storage, the fleece is [sealed](Fleece::seal), and
//! readers read that instead of the disk. A request may be copying a granule then. Others write to that granule without
//! waiting, so what is copied is thrown away: the snapshot has it.
//!
//! A fleece that cannot continue (it is full, or the old data cannot be read) ends: readers get errors, and the guest's
//! writes are not preserved any more. A crash ends it too. Nothing of it is ever durable.

mod store;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use block::DirtyBitmap;
use thiserror::Error;

use crate::wake::Wake;
use store::{Location, Room, Store};

/// The unit in which old data is copied, in bytes.
pub const GRANULE: u64 = 4096;

/// The least limit of a fleece's memory, in bytes: four chunks of the store.
pub const FLEECE_MEMORY_MIN: u64 = 4 << 20;
const GRANULE_BITS: u32 = GRANULE.ilog2();

/// Most granules that are copied at once.
pub(crate) const RUN_MAX: u64 = 64;

/// Most granules whose old data is stored: 64 GiB of it, whose index takes about 1 GiB of memory.
const STORED_MAX: usize = 16 << 20;

/// Granules are spread over so many locks, 64 neighbours to each.
const SHARDS: usize = 256;

/// How long writes of the guest wait for space before the fleece fails.
const HANG: Duration = Duration::from_secs(5);

/// Limits of a fleece.
#[derive(Clone, Copy, Debug)]
pub struct FleeceLimits {
    /// Bytes of old data in memory; at least 4 MiB.
    pub memory: u64,
}

/// Why a fleece cannot be read.
#[derive(Clone, Debug, Error)]
pub enum FleeceError {
    #[error("the backup has ended: {0}")]
    Ended(String),
    #[error("the old data at byte {0} was trimmed: it can be read only once")]
    Trimmed(u64),
    #[error("the old data at byte {0} cannot be read: {1}")]
    Io(u64, Arc<io::Error>),
}

/// How a fleece is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct FleeceUse {
    /// Bytes of old data in memory.
    pub memory: u64,
    /// Bytes of old data in the file.
    pub file: u64,
}

/// What a disk was at one moment.
pub struct Fleece {
    /// Bytes of the disk at that moment.
    size: u64,
    /// Granules whose old data is here, or was trimmed.
    copied: DirtyBitmap,
    /// Those of them that are zeroes.
    zeroes: DirtyBitmap,
    shards: Box<[Mutex<HashMap<u64, Granule>>]>,
    store: Store,
    /// Granules that were ever stored.
    stored: AtomicUsize,
    /// Ranges of writes that were in flight at the moment.
    preceding: Mutex<Vec<(u64, u64)>>,
    /// Their number.
    preceding_left: AtomicUsize,
    settled: Condvar,
    /// Threads with requests that wait.
    waiting: Mutex<Vec<Arc<Wake>>>,
    has_waiting: AtomicBool,
    has_ended: AtomicBool,
    /// Nothing is copied any more: it is sealed, or has ended.
    is_closed: AtomicBool,
    why: OnceLock<String>,
    on_failure: OnceLock<OnFailure>,
}

type OnFailure = Box<dyn Fn(&str) + Send + Sync>;

enum Granule {
    /// A request copies it.
    Copying,
    Stored(Location),
}

/// Granules of the disk in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Where they begin, in bytes.
    pub at: u64,
    /// Bytes; the last granule of the disk may be shorter.
    pub len: u64,
}

/// What a write must do first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Nothing: all of its old data is here, or nobody needs it any more.
    Ready,
    /// Copy these granules; nobody else does.
    Copy(Run),
    /// Wait for another request, or for space.
    Wait,
}

impl Fleece {
    /// A fleece for a disk of `size` bytes. `file` takes what does not fit into memory.
    ///
    /// # Errors
    /// Threads cannot be started, or the disk is too large.
    pub fn new(size: u64, limits: &FleeceLimits, file: Option<File>) -> io::Result<Arc<Self>> {
        let bitmap = || {
            let new = DirtyBitmap::new(String::new(), GRANULE_BITS, size, false, false);
            new.map_err(|_| io::Error::other("the disk is too large"))
        };
        let fleece = Arc::new(Self {
            size,
            copied: bitmap()?,
            zeroes: bitmap()?,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            store: Store::new(limits, file),
            stored: AtomicUsize::new(0),
            preceding: Mutex::default(),
            preceding_left: AtomicUsize::new(0),
            settled: Condvar::new(),
            waiting: Mutex::default(),
            has_waiting: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            why: OnceLock::new(),
            on_failure: OnceLock::new(),
        });
        let its = fleece.clone();
        let run = move || {
            if let Err(e) = its.store.run(|| its.wake_waiting()) {
                its.fail(&format!("its file cannot be written: {e}"));
            }
            its.store.truncate();
        };
        thread::Builder::new().name("fleece".into()).spawn(run)?;
        if fleece.store.has_file() {
            let its = fleece.clone();
            let watch = move || {
                if its.store.wait_for_hang(HANG) {
                    let seconds = HANG.as_secs();
                    its.fail(&format!(
                        "its file has not taken old data for {seconds} s, which writes of the guest wait for"
                    ));
                }
            };
            let watched = thread::Builder::new()
                .name("fleece-watch".into())
                .spawn(watch);
            if let Err(e) = watched {
                fleece.end("it has not begun");
                return Err(e);
            }
        }
        Ok(fleece)
    }

    /// Has `tell` called if the fleece fails. I/O threads call it: it must not block. It can be set once.
    pub fn on_failure(&self, tell: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.on_failure.set(Box::new(tell));
    }

    /// Bytes of the disk at the moment.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// How much is stored.
    pub fn usage(&self) -> FleeceUse {
        let (memory, file) = self.store.bytes();
        FleeceUse { memory, file }
    }

    /// Why it has ended, if it has.
    pub fn failure(&self) -> Option<FleeceError> {
        self.has_ended
            .load(SeqCst)
            .then(|| FleeceError::Ended(self.why.get().cloned().unwrap_or_default()))
    }

    /// Ends it: old data is not preserved any more, and what is here cannot be read.
    pub fn end(&self, why: &str) {
        let _ = self.why.set(why.into());
        self.has_ended.store(true, SeqCst);
        self.is_closed.store(true, SeqCst);
        self.store.close();
        self.wake_waiting();
        self.settled.notify_all();
    }

    /// Nothing more is preserved: from now on, readers read a copy of the disk in which all is as it was at the moment, except
    /// for what is here. The copy was made after the [preceding](Self::is_settled) writes had ended.
    pub fn seal(&self) {
        self.is_closed.store(true, SeqCst);
        self.wake_waiting();
    }

    /// It cannot continue.
    #[cold]
    pub fn fail(&self, why: &str) {
        if self.has_ended.load(SeqCst) {
            return;
        }
        self.end(why);
        if let Some(tell) = self.on_failure.get() {
            tell(why);
        }
    }

    fn shard(&self, granule: u64) -> MutexGuard<'_, HashMap<u64, Granule>> {
        let shard = &self.shards[(granule / 64) as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a write to this range must [claim](Self::claim) something first.
    #[inline]
    pub(crate) fn concerns(&self, at: u64, len: u64) -> bool {
        let len = len.min(self.size.saturating_sub(at));
        let is_closed = self.is_closed.load(Relaxed);
        !is_closed && len > 0 && self.copied.extent_within(at, len) != Some((true, len))
    }

    /// What a write to this range must do first.
    pub(crate) fn claim(&self, at: u64, len: u64) -> Claim {
        let end = at.saturating_add(len).min(self.size);
        if self.is_closed.load(SeqCst) || at >= end {
            return Claim::Ready;
        }
        let mut at = at / GRANULE * GRANULE;
        while at < end {
            let (is_copied, len) = beginning(&self.copied, at, end - at);
            if !is_copied {
                return self.claim_run(at, end);
            }
            at += len;
        }
        Claim::Ready
    }

    /// Claims granules from `at` on, of which the first is not copied.
    fn claim_run(&self, at: u64, end: u64) -> Claim {
        if self.preceding_left.load(SeqCst) > 0 && self.overlaps_preceding(at, end) {
            return Claim::Wait;
        }
        if self.stored.load(Relaxed) >= STORED_MAX {
            self.fail("it has 64 GiB of old data, which is the limit");
            return Claim::Ready;
        }
        let first = at / GRANULE;
        let last = end.div_ceil(GRANULE).min(first + RUN_MAX);
        let mut granules = 0;
        while first + granules < last {
            let granule = first + granules;
            let mut shard = self.shard(granule);
            if shard.contains_key(&granule) || beginning(&self.copied, granule * GRANULE, 1).0 {
                break;
            }
            match self.store.reserve(1) {
                Room::Reserved => {}
                Room::Later => break,
                Room::Never => {
                    drop(shard);
                    if granules == 0 {
                        self.fail("its memory is full, and it has no file (--fleece)");
                        return Claim::Ready;
                    }
                    break;
                }
            }
            shard.insert(granule, Granule::Copying);
            granules += 1;
        }
        if granules == 0 {
            return Claim::Wait;
        }
        let len = (granules * GRANULE).min(self.size - at);
        Claim::Copy(Run { at, len })
    }

    /// The old data of granules that were claimed.
    pub(crate) fn copied(&self, run: Run, data: &[u8]) {
        // Until it is closed, nobody else has written to these granules. Whether it is, is asked after they were read.
        if self.is_closed.load(SeqCst) {
            return self.forget(run);
        }
        for (granule, bytes) in (run.at / GRANULE..).zip(data.chunks(GRANULE as usize)) {
            let is_zero = bytes.iter().fold(0, |all, byte| all | byte) == 0;
            let stored = if is_zero {
                self.store.unreserve(1);
                None
            } else {
                self.stored.fetch_add(1, Relaxed);
                Some(Granule::Stored(self.store.put(bytes)))
            };
            // Under one lock: otherwise another write could copy it again, after it has changed.
            let mut shard = self.shard(granule);
            match stored {
                Some(stored) => drop(shard.insert(granule, stored)),
                None => {
                    self.zeroes.mark(granule * GRANULE, GRANULE);
                    shard.remove(&granule);
                }
            }
            self.copied.mark(granule * GRANULE, GRANULE);
        }
        self.wake_waiting();
    }

    /// Nobody needs granules that were claimed.
    #[cold]
    fn forget(&self, run: Run) {
        for granule in run.at / GRANULE..(run.at + run.len).div_ceil(GRANULE) {
            self.store.unreserve(1);
            self.shard(granule).remove(&granule);
        }
        self.wake_waiting();
    }

    /// The old data of granules that were claimed cannot be read.
    #[cold]
    pub(crate) fn not_copied(&self, run: Run, error: &io::Error) {
        if self.is_closed.load(SeqCst) {
            return self.forget(run);
        }
        self.fail(&format!(
            "old data at byte {} of the disk cannot be read: {error}",
            run.at
        ));
    }

    /// Has a thread woken when something has changed for requests that [wait](Claim::Wait). Claim once more afterwards.
    pub(crate) fn wait(&self, wake: &Arc<Wake>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if !waiting.iter().any(|other| Arc::ptr_eq(other, wake)) {
            waiting.push(wake.clone());
        }
        self.has_waiting.store(true, SeqCst);
    }

    fn wake_waiting(&self) {
        if !self.has_waiting.load(SeqCst) {
            return;
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_waiting.store(false, SeqCst);
        waiting.drain(..).for_each(|wake| wake.wake());
    }

    /// Adds writes that are in flight at the moment.
    pub(crate) fn add_preceding(&self, ranges: &[(u64, u64)]) {
        let mut preceding = self.lock_preceding();
        preceding.extend_from_slice(ranges);
        self.preceding_left.store(preceding.len(), SeqCst);
    }

    /// The moment was not reached: it is tried again.
    pub(crate) fn clear_preceding(&self) {
        self.lock_preceding().clear();
        self.preceding_left.store(0, SeqCst);
    }

    /// One of these writes has ended.
    pub(crate) fn preceding_ended(&self, range: (u64, u64)) {
        let mut preceding = self.lock_preceding();
        if let Some(place) = preceding.iter().position(|&other| other == range) {
            preceding.swap_remove(place);
        }
        self.preceding_left.store(preceding.len(), SeqCst);
        if preceding.is_empty() {
            self.settled.notify_all();
        }
        drop(preceding);
        self.wake_waiting();
    }

    fn lock_preceding(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        self.preceding
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn overlaps_preceding(&self, at: u64, end: u64) -> bool {
        let end = end.next_multiple_of(GRANULE);
        let preceding = self.lock_preceding();
        let mut all = preceding.iter();
        all.any(|&(other, len)| other < end && at < other.saturating_add(len))
    }

    /// Whether all writes have ended that were in flight at the moment.
    pub fn is_settled(&self) -> bool {
        self.preceding_left.load(SeqCst) == 0
    }

    /// Waits until all writes have ended that were in flight at the moment. Returns whether they have.
    pub fn wait_settled(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut preceding = self.lock_preceding();
        while !preceding.is_empty() && !self.has_ended.load(SeqCst) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.settled.wait_timeout(preceding, left);
            (preceding, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    /// Replaces what was copied of a range in `bytes`, which were read from the disk before this call.
    ///
    /// # Errors
    /// The old data is not there.
    pub fn overlay(&self, at: u64, bytes: &mut [u8]) -> Result<(), FleeceError> {
        let end = at + bytes.len() as u64;
        let mut from = at;
        while from < end {
            let (is_copied, len) = beginning(&self.copied, from, end - from);
            if is_copied {
                let part = &mut bytes[(from - at) as usize..][..len as usize];
                self.read_copied(from, part)?;
            }
            from += len;
        }
        // If a write was not preserved, it had ended before.
        self.failure().map_or(Ok(()), Err)
    }

    fn read_copied(&self, at: u64, bytes: &mut [u8]) -> Result<(), FleeceError> {
        let mut done = 0;
        while done < bytes.len() {
            let at = at + done as u64;
            let (granule, skip) = (at / GRANULE, at % GRANULE);
            let len = (bytes.len() - done).min((GRANULE - skip) as usize);
            let part = &mut bytes[done..done + len];
            done += len;
            let shard = self.shard(granule);
            let location = match shard.get(&granule) {
                Some(Granule::Stored(location)) => *location,
                _ if beginning(&self.zeroes, at, 1).0 => {
                    part.fill(0);
                    continue;
                }
                _ => return Err(self.failure().unwrap_or(FleeceError::Trimmed(at))),
            };
            drop(shard);
            let read = self.store.read(location, skip, part);
            read.map_err(|e| {
                self.failure()
                    .unwrap_or_else(|| FleeceError::Io(at, Arc::new(e)))
            })?;
        }
        Ok(())
    }

    /// For how many bytes from `at` on the following holds: `None` if the disk has what it had, and otherwise whether it was
    /// data; zeroes are not. Look at the disk before.
    pub fn extent(&self, at: u64, len: u64) -> (u64, Option<bool>) {
        let (is_copied, len) = beginning(&self.copied, at, len);
        if !is_copied {
            return (len, None);
        }
        let (is_zero, len) = beginning(&self.zeroes, at, len);
        (len, Some(!is_zero))
    }

    /// Forgets what the range was: nobody reads it any more. The guest's writes to it need no copies from now on. Only
    /// whole granules are forgotten.
    ///
    /// # Errors
    /// Space in the file could not be given back; nothing else is wrong.
    pub fn trim(&self, at: u64, len: u64) -> io::Result<()> {
        let end = at.saturating_add(len).min(self.size);
        let first = at.div_ceil(GRANULE);
        let last = if end == self.size {
            end.div_ceil(GRANULE)
        } else {
            end / GRANULE
        };
        let mut result = Ok(());
        for granule in first..last {
            // A disk has many granules, and nobody waits for the rest of an ended fleece.
            if self.has_ended.load(Relaxed) {
                break;
            }
            let mut shard = self.shard(granule);
            match shard.get(&granule) {
                // It will be here in a moment, and is of no use to anybody. That wastes a granule.
                Some(Granule::Copying) => {}
                Some(Granule::Stored(location)) => {
                    let location = *location;
                    shard.remove(&granule);
                    result = result.and(self.store.drop_granule(location));
                }
                None => self.copied.mark(granule * GRANULE, GRANULE),
            }
        }
        self.wake_waiting();
        result
    }
}

/// Whether the beginning of a range is marked, and for how many bytes that holds; what is after the end is not.
fn beginning(bitmap: &DirtyBitmap, at: u64, len: u64) -> (bool, u64) {
    bitmap.extent_within(at, len).unwrap_or((false, len))
}

#[cfg(test)]
mod tests;
