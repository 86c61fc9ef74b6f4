//! Notes of the regions of a disk that may have changed, for a power cut: see [`block::WriteIntent`].
//!
//! They are in a file of the state directory: the bits of the regions in one sector, and in the next one the time and the
//! generations of the disk's image. Both are overwritten in place, so that a note needs no space, and costs one fdatasync
//! for all requests that wait. Between two durable notes, each bit of the file is as in the one or as in the other. A bit that
//! is added is needed only once its note is durable, and a bit that is removed is not needed any more, because the bits of the
//! bitmaps are durable in the record (a *checkpoint*). So a crash leaves any mixture, and all are legal:
//!
//! | crash | record | notes |
//! |---|---|---|
//! | before a note is durable | any | {old, new}: nothing was written to the new regions |
//! | after it | any | {new}: all of the region counts as dirty |
//! | during a checkpoint | {old, new} | {old}: covers what changed since the old one |
//! | after it | {new} | {old, without regions that have left}: these have not changed since the new one |
//!
//! A thread runs while regions are noted, and makes a checkpoint when some of them have not been written to for a while.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use block::{NoteStore, REGIONS_MAX, WriteIntent};
use image::Generations;

/// So often regions are looked at that are not written to any more.
const TICK: Duration = Duration::from_secs(30);
/// The latest write is at most this much after the time in the notes.
pub const TIME_SLACK: Duration = Duration::from_secs(30 + 90);

/// Guests have noticed when a note takes longer.
const SLOW: Duration = Duration::from_secs(2);

const BITS_BYTES: usize = REGIONS_MAX / 8;
const TIME_AT: usize = BITS_BYTES;
const TAG_AT: usize = TIME_AT + 8;
const NOTE_BYTES: usize = TAG_AT + TAG_BYTES;
/// Bytes of a [`Tag`].
const TAG_BYTES: usize = Generations::BYTES;
/// In whole blocks of most devices.
const FILE_BYTES: usize = 4096;
/// Of the file's id.
const ID_AT: usize = FILE_BYTES - 8;

pub type Regions = [u8; BITS_BYTES];

/// What tells whether an image is as the process that noted this has left it: [`Generations`]. 0 for other disks.
pub type Tag = [u8; TAG_BYTES];

/// What the notes are part of.
pub trait Checkpoints: Send + Sync {
    /// Makes the bits of all bitmaps durable, as they are now.
    ///
    /// # Errors
    /// They are not durable.
    fn checkpoint(&self) -> io::Result<()>;

    /// Notes cannot be written: the bitmaps are inconsistent from now on, or at least after a crash.
    fn failed(&self, error: &io::Error);

    /// A note has taken so long that the guest may have noticed.
    fn was_slow(&self, time: Duration);

    /// What is noted with the regions.
    fn tag(&self) -> Tag;
}

/// A place for the notes, which are overwritten there.
pub trait NotesFile: Send + Sync {
    /// Replaces the first bytes.
    ///
    /// # Errors
    /// Some of them may have been replaced.
    fn write(&self, bytes: &[u8]) -> io::Result<()>;

    /// Makes them durable.
    ///
    /// # Errors
    /// They may not be durable.
    fn sync(&self) -> io::Result<()>;

    /// Reads the first bytes.
    ///
    /// # Errors
    /// They cannot be read.
    fn read(&self, bytes: &mut [u8]) -> io::Result<()>;
}

impl NotesFile for File {
    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, 0)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(bytes, 0)
    }
}

/// The content of a new file: no region is noted. Its `id` stays.
pub fn fresh(tag: Tag, id: u64) -> [u8; FILE_BYTES] {
    let mut bytes = [0; FILE_BYTES];
    bytes[..NOTE_BYTES].copy_from_slice(&encode(&[0; BITS_BYTES], tag));
    bytes[ID_AT..].copy_from_slice(&id.to_le_bytes());
    bytes
}

/// The id of a file.
///
/// # Errors
/// It cannot be read.
pub fn id_of(file: &File) -> io::Result<u64> {
    let mut id = [0; 8];
    file.read_exact_at(&mut id, ID_AT as u64)?;
    Ok(u64::from_le_bytes(id))
}

fn encode(regions: &Regions, tag: Tag) -> [u8; NOTE_BYTES] {
    let mut bytes = [0; NOTE_BYTES];
    bytes[..BITS_BYTES].copy_from_slice(regions);
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs();
    bytes[TIME_AT..TAG_AT].copy_from_slice(&now.to_le_bytes());
    bytes[TAG_AT..].copy_from_slice(&tag);
    bytes
}

/// What is noted in a file.
pub struct Note {
    pub regions: Regions,
    /// When it was written, since the epoch.
    pub time: Duration,
    pub tag: Tag,
}

/// Reads what is noted in a file.
///
/// # Errors
/// It cannot be read.
pub fn read(file: &impl NotesFile) -> io::Result<Note> {
    let mut bytes = [0; NOTE_BYTES];
    file.read(&mut bytes)?;
    let (mut regions, mut time, mut tag) = ([0; BITS_BYTES], [0; 8], [0; TAG_BYTES]);
    regions.copy_from_slice(&bytes[..BITS_BYTES]);
    time.copy_from_slice(&bytes[TIME_AT..TAG_AT]);
    tag.copy_from_slice(&bytes[TAG_AT..]);
    let time = Duration::from_secs(u64::from_le_bytes(time));
    Ok(Note { regions, time, tag })
}

/// The notes of a disk.
pub struct IntentLog<F: NotesFile = File> {
    file: F,
    owner: Weak<dyn Checkpoints>,
    state: Mutex<LogState>,
    changed: Condvar,
}

#[derive(Default)]
struct LogState {
    /// A thread is writing.
    is_writing: bool,
    /// What is noted in the file is known.
    is_read: bool,
    /// This process has written the file.
    is_own: bool,
    /// The thread with the checkpoints runs.
    has_thread: bool,
    /// It must end.
    is_suspended: bool,
}

/// As [`NoteStore`] of the data path.
pub struct Notes<F: NotesFile = File>(pub Arc<IntentLog<F>>, pub Weak<WriteIntent>);

impl NoteStore for Notes {
    fn note(&self, intent: &WriteIntent) {
        self.0.note(intent);
        if let Some(intent) = self.1.upgrade() {
            self.0.start_thread(intent);
        }
    }
}

impl<F: NotesFile> IntentLog<F> {
    /// Notes in a file, which has the size of a [fresh] one.
    pub fn new(file: F, owner: Weak<dyn Checkpoints>) -> Self {
        Self {
            file,
            owner,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, LogState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, LogState>,
        condition: impl FnMut(&mut LogState) -> bool,
    ) -> MutexGuard<'a, LogState> {
        let waited = self.changed.wait_while(state, condition);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this process has written a note. Before, the file has what another one noted.
    pub fn is_own(&self) -> bool {
        self.lock().is_own
    }

    /// Makes the notes of all regions that are wanted durable, or waits until another thread has done that.
    pub fn note(&self, intent: &WriteIntent) {
        let state = self.lock();
        if intent.is_given_up() {
            return;
        }
        if state.is_writing {
            // This may be in that note, or not: the caller looks.
            drop(self.wait(state, |state| state.is_writing));
        } else {
            self.write(state, intent);
        }
    }

    /// Writes what is noted now, durably. No other thread is writing.
    fn write(&self, mut state: MutexGuard<'_, LogState>, intent: &WriteIntent) {
        if intent.is_given_up() {
            return;
        }
        state.is_writing = true;
        let is_read = state.is_read;
        drop(state);
        let begun = Instant::now();
        let written = self.write_notes(intent, is_read);
        let time = begun.elapsed();
        if let Some(owner) = self.owner.upgrade().filter(|_| time > SLOW) {
            owner.was_slow(time);
        }
        if let Err(e) = &written {
            // Before others write: that would make the notes valid again.
            if let Some(owner) = self.owner.upgrade() {
                owner.failed(e);
            }
            intent.give_up();
        }
        let mut state = self.lock();
        state.is_writing = false;
        state.is_read |= written.is_ok();
        state.is_own |= written.is_ok();
        drop(state);
        self.changed.notify_all();
    }

    fn write_notes(&self, intent: &WriteIntent, is_read: bool) -> io::Result<()> {
        if !is_read {
            intent.found(&read(&self.file)?.regions);
        }
        let regions = intent.wanted();
        let tag = self.owner.upgrade().map(|owner| owner.tag());
        self.file
            .write(&encode(&regions, tag.unwrap_or_default()))?;
        self.file.sync()?;
        intent.noted(&regions);
        Ok(())
    }

    /// Lets regions go that were not written to since the last tick. Ticks are at least some seconds apart.
    pub fn tick(&self, intent: &WriteIntent) {
        let is_durable = intent.begin_tick()
            && self
                .owner
                .upgrade()
                .is_some_and(|owner| owner.checkpoint().is_ok());
        intent.end_tick(is_durable);
        let state = self.wait(self.lock(), |state| state.is_writing);
        self.write(state, intent);
    }

    /// Stops making checkpoints, until the next note. Another process may write the notes meanwhile. No request is in flight.
    pub fn suspend(&self, intent: &WriteIntent) {
        let mut state = self.lock();
        state.is_suspended = true;
        self.changed.notify_all();
        let mut state = self.wait(state, |state| state.has_thread || state.is_writing);
        (state.is_suspended, state.is_read) = (false, false);
        intent.forget();
    }

    /// Has the thread end, without waiting for it.
    pub fn stop(&self) {
        self.lock().is_suspended = true;
        self.changed.notify_all();
    }
}

impl IntentLog {
    fn start_thread(self: &Arc<Self>, intent: Arc<WriteIntent>) {
        let mut state = self.lock();
        if state.has_thread || state.is_suspended || intent.is_given_up() {
            return;
        }
        let log = self.clone();
        let thread = thread::Builder::new().name("bitmaps".into());
        // Without it, regions stay noted.
        state.has_thread = thread.spawn(move || log.run(&intent)).is_ok();
    }

    fn run(&self, intent: &WriteIntent) {
        loop {
            let state = self.lock();
            let waited = (self.changed)
                .wait_timeout_while(state, TICK, |state| !state.is_suspended)
                .unwrap_or_else(PoisonError::into_inner);
            let (mut state, _) = waited;
            let is_idle = intent.wanted().iter().all(|&byte| byte == 0);
            if state.is_suspended || is_idle || intent.is_given_up() {
                state.has_thread = false;
                drop(state);
                return self.changed.notify_all();
            }
            drop(state);
            self.tick(intent);
        }
    }
}

#[cfg(test)]
mod tests;
