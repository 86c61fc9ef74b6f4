//! The journal keeps what a kill of this process must not cost: changes to tables that were acknowledged and
//! that no flush has written yet.
//!
//! A write into new clusters is acknowledged when its data is in the file and the tables *in memory* lead
//! there. A crash of the host may take that back until the guest flushes. A kill of this process may not: the
//! guest goes on and believes what it was told. Writing the tables with each such write would take two
//! fdatasyncs, because a crash must find them in order ([`flush`](super::flush)). Instead, before a change is
//! acknowledged it is appended to a journal: a file that outlives the process but not the host, on a tmpfs. That
//! is one call of about 80 bytes for each write that allocates, and nothing for any other. The next process
//! that opens the image does the changes again and flushes them ([`replay`](super::replay)).
//!
//! - A change is absolute (entry 17 *is* this, the refcount of cluster 9 *is* 1): doing it twice, or after a
//!   flush has written it, leaves the same.
//! - **A change is recorded before it can be found** ([`Qcow2::record`], then the entry in memory). If it cannot be
//!   recorded, [`Qcow2::must_flush`] holds before it can be found, and until a flush has written it: no write is
//!   acknowledged meanwhile without a flush, since it may rest on that change.
//! - Changes stand in the order in which they were made. Those before [`Journal::rotate`] are written by the
//!   flush that follows; when it has succeeded, the journal begins behind them.
//! - A record counts only with its checksum, over its position and its session too; the first that does not ends
//!   the journal. What was cut off there had not been acknowledged.
//! - A journal that cannot be written (a full tmpfs) makes nothing unsafe, but slow: until a flush has made what is
//!   missing in it unnecessary, each change is flushed before it is acknowledged.
//!
//! # Which image a journal belongs to
//!
//! A journal must never be replayed on anything but the very file, in the very state, that it was written for:
//! not on a backup that was put back in its place, nor on an image that another program has written since. The
//! journal names the boot of the host and the file (device and inode). The image names the journal, by its
//! *generation*: 38 of its autoclear features, with one more to say that there is one. Autoclear features are bits
//! that every program clears which opens an image for writing and does not know them (qcow2.txt:
//! "autoclear_features"), and QEMU does, unless it has opened the image for reading and opens it again (a commit into it).
//! So the image is also "dirty" while it has a journal (qcow2.txt: "incompatible_features"), and QEMU clears that when it has
//! written and ends, in any case. The generation is drawn when the first change is recorded, and raised in
//! the image ([`Qcow2::stamp`])
//!
//! - before the first change after a flush is recorded, so that a copy made while all was flushed is another;
//! - before a change is recorded when the last stamp is older than [`STAMP_MS`], so that the same holds for a copy
//!   made between two flushes.
//!
//! Each record has the generation that the image had when it was written. The journal fits an image that has the
//! generation of its last record, or the next one. What a kill leaves, step by step:
//!
//! | the process dies after | image | last record | the journal |
//! |---|---|---|---|
//! | a record | g | g | fits |
//! | the stamp, before the record | g + 1 | g | fits; what has no record was not acknowledged |
//! | the record | g + 1 | g + 1 | fits |
//!
//! A copy has the generation of the moment at which its first sector was read. Either that is another one than the
//! last record's, and the journal does not fit, or all records were written before or within the same
//! interval, and the data that they lead to before them.
//!
//! # When the image becomes newer than the journal
//!
//! Changes that could not be recorded are flushed. Before that flush writes anything, the image says so with another
//! bit ([`OVERTAKEN`]): a cluster that was free when the journal ended may be in use in the file, and a replay
//! lowers no refcount. With the last write of that flush the image gets a generation that is drawn anew, and the journal fits
//! no more.
//!
//! # When the journal is older than the image
//!
//! A generation rises by one with each stamp, and everything that makes a journal unnecessary draws another. So an image
//! that is only a few stamps ahead of the last record has lost records that had been acknowledged: somebody has cut the
//! journal off, or damaged it. It is then not opened, and neither is an image with a journal of which the slots cannot be
//! read. Records of the last stamp are the exception: that the last of them is missing is what a kill leaves, too.
//!
//! # Internal snapshots
//!
//! An image with internal snapshots has no journal, and never these bits: `qemu-img check -r` of every QEMU from 4.2
//! on writes the header of an image that has unknown autoclear bits before it has read how many snapshots there
//! are, and so removes them all. Each change to such an image is flushed before it is acknowledged, as to one of
//! version 2, which has no such bits.

mod found;
mod records;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use block::FileOffset;

pub(super) use found::{Found, fits, read, said};
pub use found::{JournalOf, journal_of};
pub(super) use records::{Change, Changes};
use records::{READ_MAX, RECORD_MIN, RECORDS_AT, Slot, record};

use super::change::MayBlock;
use super::file::Piece;
use super::types::HostOffset;
use super::{ImageError, Qcow2, State};
use crate::storage::Storage;

/// Bytes of records that a flush makes unnecessary before they become more: 25 for each cluster and 25
/// for each run of refcounts, so that a flush comes after about 70,000 small writes that allocate.
const BYTES_MAX: u64 = 4 << 20;

/// Space that no record counts in is given back in pieces of so many bytes.
const PUNCH: u64 = 1 << 20;

/// Least and most milliseconds between two stamps while changes are recorded. In between, it is 50 times as long as the last
/// one took: they take 2% of the time.
const STAMP_MS: (u64, u64) = (1, 100);
const STAMP_SHARE: u32 = 50;

/// How far an image can be ahead of the last record of its journal that can still be found. Each stamp comes with a record,
/// a flush comes before they are more than `BYTES_MAX`, and the older slot, if the newer is damaged, is one flush older:
/// 2 × 4 MiB / 41 bytes = 204,601.
const STAMPS_MAX: u64 = 2 * (BYTES_MAX / RECORD_MIN + 1);

const MARK: u64 = 1 << 63;
/// Tables in the file may be newer than the end of the journal.
const OVERTAKEN: u64 = 1 << 62;
const GENERATION: u64 = (1 << 38) - 1;
const GENERATION_SHIFT: u32 = 24;

/// Where the journal of an image is kept.
pub struct JournalPlace {
    /// A file of its own, which nobody else uses, and which need not be durable.
    pub storage: Arc<dyn Storage>,
    /// Names the file that the image is in, and the boot of the host.
    pub identity: [u8; 32],
    /// Is told what becomes of the journal. It must not use the image.
    pub tell: Box<dyn Fn(JournalEvent) + Send + Sync>,
}

/// What became of a journal.
#[derive(Debug)]
pub enum JournalEvent {
    /// So many changes that a killed process had acknowledged were in it. They are in the image now.
    Replayed(u64),
    /// It was not used: the image has been written by another program since, or is another one.
    Outdated,
    /// There is none, though the image says that it has one: the host has crashed since, or the image is a copy of
    /// one that was in use, or the journal of a killed process is elsewhere.
    Missing {
        /// The image has internal snapshots, which `qemu-img check -r` removes while the image says so.
        snapshots: bool,
    },
    /// It cannot be written. Until it can, changes to tables are flushed before they are acknowledged.
    Failed(io::Error),
    /// None is kept for an image of version 2, which cannot say that a journal is its own: changes to tables are flushed
    /// before they are acknowledged.
    NotForVersion2,
    /// None is kept for an image with internal snapshots, with the same consequence.
    NotWithSnapshots,
}

/// A journal that is being written.
pub(super) struct Journal {
    place: JournalPlace,
    /// It has been begun, and what the image says is about it.
    active: bool,
    /// What the image says is about a journal of which all has been done.
    ended: bool,
    /// What is in the file is that of another image, or of another state of this one.
    foreign: bool,
    session: u64,
    sequence: u64,
    /// What the image says.
    generation: u64,
    /// When the image got it, if it need not get another one before the next record.
    stamped: Option<Instant>,
    stamp_interval: Duration,
    /// Where the records begin that no flush has made unnecessary, and where they end.
    start: u64,
    end: u64,
    punched: u64,
    /// Changes were left out: what comes after them must not be recorded.
    broken: bool,
    /// Some of these may be in the file.
    overtaken: bool,
    told: bool,
    record: Vec<u8>,
}

/// How far a flush makes the journal unnecessary.
pub(super) struct Rotated {
    end: u64,
    /// What the image says afterwards, if the flush changes it.
    generation: Option<u64>,
}

impl Journal {
    /// With nothing in it. What the image says is about an earlier one, which has `ended` or is elsewhere. What is in its
    /// file may be `foreign`.
    pub fn new(place: JournalPlace, ended: bool, foreign: bool) -> Self {
        Self {
            place,
            active: false,
            ended,
            foreign,
            session: 0,
            sequence: 0,
            generation: 0,
            stamped: None,
            stamp_interval: Duration::ZERO,
            start: RECORDS_AT,
            end: RECORDS_AT,
            punched: RECORDS_AT,
            broken: false,
            overtaken: false,
            told: false,
            record: Vec::new(),
        }
    }

    /// Empties it. What the image must say from now on is [`autoclear`](Self::autoclear).
    fn begin(&mut self) {
        self.generation = random() & GENERATION;
        self.stamped = None;
        self.foreign = false;
        // What is there has been done, or is of no use since the image is written now.
        let emptied = self.place.storage.set_size(0);
        match emptied.and_then(|()| self.restart()) {
            Ok(()) => (self.active, self.broken) = (true, false),
            Err(e) => self.failed(e),
        }
    }

    /// Begins at the start of its file again. Records that are still there count no longer.
    fn restart(&mut self) -> io::Result<()> {
        self.session = random();
        (self.start, self.end, self.punched) = (RECORDS_AT, RECORDS_AT, RECORDS_AT);
        self.write_slot()
    }

    /// What the image says of the journal.
    pub fn autoclear(&self) -> u64 {
        match (self.active, self.overtaken) {
            (false, _) => 0,
            (true, false) => autoclear(self.generation),
            (true, true) => autoclear(self.generation) | OVERTAKEN,
        }
    }

    /// Ends it, when the image is closed and says nothing of it any more. What is left of it belongs to no image.
    fn end(&mut self) {
        self.active = false;
        if !self.foreign {
            let _ = self.place.storage.set_size(0);
        }
    }

    pub fn tell(&self, event: JournalEvent) {
        (self.place.tell)(event);
    }

    /// Whether the image must get another generation before the next record.
    fn needs_stamp(&self) -> bool {
        let due = |at: Instant| at.elapsed() >= self.stamp_interval;
        !self.broken && self.stamped.is_none_or(due)
    }

    /// Appends changes. Whether they, and all before them, outlive this process now.
    fn append(&mut self, lists: [&mut Changes; 2]) -> bool {
        if lists.iter().all(|list| list.is_empty()) {
            return !self.broken;
        }
        if self.broken {
            lists.into_iter().for_each(Changes::clear);
            return false;
        }
        record(
            &mut self.record,
            lists,
            self.generation,
            self.end,
            self.session,
        );
        let at = FileOffset(self.end);
        match self.place.storage.write_at(at, &self.record) {
            Ok(()) => self.end += self.record.len() as u64,
            Err(e) => self.failed(e),
        }
        !self.broken
    }

    fn failed(&mut self, error: io::Error) {
        self.broken = true;
        if !std::mem::replace(&mut self.told, true) {
            self.tell(JournalEvent::Failed(error));
        }
    }

    /// That flush has succeeded, and has written all changes that were left out if it was a flush of `all`.
    fn checkpoint(&mut self, rotated: &Rotated, all: bool) {
        if !self.active {
            if all {
                self.begin();
            }
            return;
        }
        self.generation = rotated.generation.unwrap_or(self.generation);
        self.start = rotated.end;
        self.stamped = None;
        self.overtaken = false;
        let was_broken = self.broken;
        self.broken &= !all;
        let mut result;
        // There may be no space but what is given back here.
        let worth_it = self.end - RECORDS_AT > PUNCH || was_broken;
        if self.start == self.end && worth_it {
            result = self
                .restart()
                .and_then(|()| self.place.storage.set_size(RECORDS_AT));
        } else {
            // First what says that the records there are needed no longer.
            result = self.write_slot();
            if result.is_ok() && self.start - self.punched > PUNCH {
                let (at, len) = (FileOffset(self.punched), self.start - self.punched);
                match self.place.storage.punch(at, len) {
                    Ok(()) => self.punched = self.start,
                    // What takes no more records soon begins again.
                    Err(e) if len > READ_MAX => result = Err(e),
                    Err(_) => {}
                }
            }
        }
        if let Err(e) = result {
            // The next process finds changes that the image has already, or a journal that does not fit.
            self.failed(e);
        }
    }

    fn write_slot(&mut self) -> io::Result<()> {
        self.sequence += 1;
        Slot::new(
            self.sequence,
            self.session,
            self.generation,
            self.start,
            self.place.identity,
        )
        .write(&*self.place.storage)
    }
}

impl State {
    /// Begins the journal, with the first write to the image. What the image must say of it is for the caller to write.
    pub(super) fn begin_journal(&mut self) {
        let why_not = match &self.header {
            header if header.version < 3 => Some(JournalEvent::NotForVersion2),
            header if header.snapshots > 0 => Some(JournalEvent::NotWithSnapshots),
            _ => None,
        };
        if let (Some(journal), Some(why_not)) = (&self.journal, why_not) {
            journal.tell(why_not);
            self.flush_changes = true;
            self.journal = None;
        }
        if let Some(journal) = &mut self.journal {
            journal.begin();
        }
        let on = self.journal.is_some() || self.flush_changes;
        (self.changes.on, self.refcounts.changes.on) = (on, on);
    }

    /// Whether to record a change takes a flush, or what only a thread that may block can do.
    pub(super) fn recording_blocks(&self) -> bool {
        match &self.journal {
            Some(journal) => journal.broken || journal.needs_stamp(),
            None => self.flush_changes,
        }
    }

    fn nothing_to_record(&self) -> bool {
        self.changes.is_empty() && self.refcounts.changes.is_empty()
    }

    /// Whether the journal has become so long that a flush must come first.
    pub(super) fn journal_full(&self) -> bool {
        let journal = self.journal.as_ref();
        journal.is_some_and(|journal| journal.end - journal.start > BYTES_MAX)
    }

    /// Has the header in memory say of the journal what is so.
    fn say_of_journal(&mut self) {
        if let Some(journal) = self.journal.as_ref().filter(|journal| journal.active) {
            self.header.set_journal(journal.autoclear());
        }
    }

    /// As [`Journal::checkpoint`].
    pub(super) fn checkpoint_journal(&mut self, rotated: &Rotated, all: bool) {
        if let Some(journal) = &mut self.journal {
            journal.checkpoint(rotated, all);
        }
        self.say_of_journal();
    }
}

impl Qcow2 {
    /// Records the changes so far, so that they outlive this process. If it returns false, only a flush makes them
    /// do so, and [`must_flush`](Self::must_flush) holds until there was one. Nothing may rest on the changes before
    /// this returns.
    #[must_use]
    pub(super) fn record(&self, state: &mut State, may_block: MayBlock) -> bool {
        if state.nothing_to_record() {
            return !self.must_flush();
        }
        let recorded = self.try_record(state, may_block);
        if !recorded {
            state.unrecorded += 1;
            self.unrecorded.store(true, SeqCst);
        }
        recorded
    }

    /// Whether changes are in memory that neither the journal nor a flush has kept: a write that completes now may rest
    /// on them, and is not to be acknowledged before a [`flush`](Self::flush).
    #[inline]
    pub fn must_flush(&self) -> bool {
        self.unrecorded.load(SeqCst)
    }

    /// The same without the consequence, for changes that nobody else can find before a flush has written them.
    fn try_record(&self, state: &mut State, may_block: MayBlock) -> bool {
        // Who may not block has asked `recording_blocks`, under the same lock.
        let needs_stamp = || state.journal.as_ref().is_some_and(Journal::needs_stamp);
        if may_block == MayBlock::Yes && !state.nothing_to_record() && needs_stamp() {
            self.stamp(state);
        }
        let State {
            journal,
            changes,
            refcounts,
            ..
        } = state;
        let lists = [&mut refcounts.changes, changes];
        match journal {
            Some(journal) => journal.append(lists),
            None => {
                lists.into_iter().for_each(Changes::clear);
                !state.flush_changes
            }
        }
    }

    /// Gives the image another generation. If that fails, nothing is recorded with it, and the file has the old or the new
    /// one: the journal fits either.
    fn stamp(&self, state: &mut State) {
        let Some(mut journal) = state.journal.take() else {
            return;
        };
        let before = journal.generation;
        journal.generation = next(before);
        state.header.set_journal(journal.autoclear());
        let begun = Instant::now();
        match self.write_header(state) {
            Ok(()) => {
                journal.stamped = Some(begun);
                let [least, most] = [STAMP_MS.0, STAMP_MS.1].map(Duration::from_millis);
                journal.stamp_interval = (begun.elapsed() * STAMP_SHARE).clamp(least, most);
            }
            Err(e) => {
                journal.generation = before;
                state.header.set_journal(journal.autoclear());
                journal.failed(io::Error::other(e));
            }
        }
        state.journal = Some(journal);
    }

    /// A flush of all changes so far begins: records what is not recorded yet, or has the file say, before anything else is
    /// written to it, that it will be newer than the journal. Returns how far the flush makes the journal unnecessary, and
    /// the header to be written with the end of the flush, if any.
    pub(super) fn rotate_journal(
        &self,
        state: &mut State,
    ) -> Result<Option<(Rotated, Option<Piece>)>, ImageError> {
        let recorded = self.try_record(state, MayBlock::Yes);
        self.say_if_overtaken(state, recorded)?;
        let Some(journal) = &state.journal else {
            return Ok(None);
        };
        let mut rotated = Rotated {
            end: journal.end,
            generation: None,
        };
        let mut after = None;
        if journal.active && journal.overtaken {
            // Done again, what is in the journal would undo the flush: it must fit no more.
            let generation = random() & GENERATION;
            rotated.generation = Some(generation);
            let mut header = state.header.clone();
            header.set_journal(autoclear(generation));
            let mut bytes = state.header_block.clone();
            header.put(&mut bytes);
            let at = HostOffset::START;
            after = Some(Piece { at, bytes });
        }
        Ok(Some((rotated, after)))
    }

    /// Before a header leads to tables elsewhere: of the clusters that these are in, the journal must say
    /// nothing older. The header in memory is to be written.
    pub(super) fn record_or_say(&self, state: &mut State) {
        let recorded = self.try_record(state, MayBlock::Yes);
        if let Some(journal) = &mut state.journal {
            journal.overtaken |= !recorded;
        }
        state.say_of_journal();
    }

    fn say_if_overtaken(&self, state: &mut State, recorded: bool) -> Result<(), ImageError> {
        let Some(journal) = state.journal.as_mut().filter(|journal| journal.active) else {
            return Ok(());
        };
        if recorded && !journal.overtaken {
            return Ok(());
        }
        journal.overtaken = true;
        state.say_of_journal();
        self.write_header(state)
    }

    /// Whether all that was acknowledged and not flushed is in the journal: it outlives this process, though not the host.
    pub fn is_kept(&self) -> bool {
        let state = self.lock();
        let journal = state.journal.as_ref();
        journal.is_some_and(|journal| journal.active && !journal.broken) && !self.must_flush()
    }

    /// Whether the image says that it has a journal, and nobody was to do what is in it: it is only read, or there is no
    /// place for journals.
    pub fn journal_waits(&self) -> bool {
        let state = self.lock();
        state.journal.is_none() && said(&state.header).has_any() && !self.begun.load(SeqCst)
    }

    /// Ends the journal of an image that is being closed, of which all is in the file. A journal's file is empty then, unless
    /// it has what may still be wanted.
    pub(super) fn end_journal(&self, state: &mut State) -> Result<(), ImageError> {
        // One that is elsewhere may still be found: then the image must know it.
        let is_ours = |journal: &Journal| journal.active || journal.ended;
        if state.journal.as_ref().is_some_and(is_ours) {
            if said(&state.header).has_any() {
                state.header.set_journal(0);
                self.write_header(state)?;
                self.file.flush()?;
            }
            if let Some(journal) = &mut state.journal {
                journal.end();
            }
            (state.changes.on, state.refcounts.changes.on) = (false, false);
            // The next write begins it again.
            self.begun.store(false, SeqCst);
        }
        Ok(())
    }
}

fn next(generation: u64) -> u64 {
    (generation + 1) & GENERATION
}

fn autoclear(generation: u64) -> u64 {
    MARK | generation << GENERATION_SHIFT
}

/// That of an image with these bits.
fn generation(bits: u64) -> u64 {
    bits >> GENERATION_SHIFT & GENERATION
}

/// A number that nobody has had, most likely.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Knows what was asked of it.
    #[derive(Default)]
    struct Asked(Mutex<Vec<&'static str>>);

    impl Asked {
        fn for_it(&self, what: &'static str) -> io::Result<()> {
            self.0.lock().unwrap().push(what);
            Ok(())
        }
    }

    impl Storage for Asked {
        fn read_at(&self, _: FileOffset, _: &mut [u8]) -> io::Result<usize> {
            Ok(0)
        }

        fn write_at(&self, _: FileOffset, _: &[u8]) -> io::Result<()> {
            self.for_it("write")
        }

        fn flush(&self) -> io::Result<()> {
            self.for_it("flush")
        }

        fn forgets(&self) -> bool {
            false
        }

        fn size(&self) -> io::Result<u64> {
            Ok(0)
        }

        fn set_size(&self, _: u64) -> io::Result<()> {
            self.for_it("set size")
        }

        fn punch(&self, _: FileOffset, _: u64) -> io::Result<()> {
            self.for_it("punch")
        }

        fn block(&self) -> u32 {
            512
        }
    }

    /// A kill between the two must not leave a slot that says that the records begin where nothing is: those behind them,
    /// which came while the flush was under way, would be lost.
    #[test]
    fn records_are_given_back_when_no_slot_needs_them() {
        let storage = Arc::new(Asked::default());
        let place = JournalPlace {
            storage: storage.clone(),
            identity: [7; 32],
            tell: Box::new(|_| ()),
        };
        let mut journal = Journal::new(place, true, false);
        journal.begin();
        let end = RECORDS_AT + 2 * PUNCH;
        journal.end = end + 100;
        storage.0.lock().unwrap().clear();
        let rotated = Rotated {
            end,
            generation: None,
        };
        journal.checkpoint(&rotated, true);
        assert_eq!(*storage.0.lock().unwrap(), ["write", "punch"]);
    }
}
