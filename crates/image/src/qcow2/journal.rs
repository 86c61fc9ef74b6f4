//! The journal keeps acknowledged changes to tables that no flush has written yet, so that a kill of this process
//! does not lose them.
//!
//! A write into new clusters is acknowledged once its data is in the file and the tables *in memory* refer to it. A
//! crash of the host may lose that write until the guest flushes. A kill of this process must not lose it: the
//! guest keeps running and relies on the acknowledgement. Writing the tables with each such write would take two
//! fdatasyncs, because a crash must find the writes in order ([`flush`](super::flush)). Instead, each change is
//! appended to a journal before it is acknowledged. The journal is a file that outlives the process but not the
//! host, on a tmpfs. This costs one call of about 80 bytes for each write that allocates, and nothing for any
//! other. The next process that opens the image applies the changes again and flushes them
//! ([`replay`](super::replay)).
//!
//! - A change is absolute (entry 17 *is* this, the refcount of cluster 9 *is* 1). Applying it twice, or after a
//!   flush has written it, gives the same result.
//! - **A change is recorded before a lookup can find it** ([`Qcow2::record`], then the entry in memory). If it
//!   cannot be recorded, [`Qcow2::must_flush`] becomes true before a lookup can find the change, and stays true
//!   until a flush has written it. Meanwhile no write is acknowledged without a flush, because the write may depend
//!   on that change.
//! - Changes are in the order in which they were made. A flush writes the changes made before it calls
//!   [`Qcow2::rotate_journal`]; when the flush has succeeded, the journal begins after them.
//! - A record is valid only if its checksum is right, which also covers its position and its session. The first
//!   invalid record ends the journal. The changes cut off there had not been acknowledged.
//! - A journal that cannot be written (a full tmpfs) makes writes slow, but not unsafe: each change is flushed
//!   before it is acknowledged, until a flush has made the changes that the journal lacks unnecessary.
//!
//! # Which image a journal belongs to
//!
//! A journal must be replayed only on the file that it was written for, and only if that file is in the state that
//! it was written for. It must not be replayed on a backup that was restored in place of the file, nor on an image
//! that another program has written since. The journal names the boot of the host and the file (device and inode).
//! The image names the journal by a *generation*: 38 of its autoclear feature bits contain the generation, and
//! another one says that there is a journal. Every program that opens an image for writing clears the autoclear
//! bits that it does not know (qcow2.txt: "autoclear_features"). QEMU does so, unless it has opened the image for
//! reading and then reopens it (a commit into it). So the image is also marked "dirty" while it has a journal
//! (qcow2.txt: "incompatible_features"): QEMU always clears that bit when it exits after writing. A random
//! generation is chosen when the first change is recorded, and is then incremented in the image ([`Qcow2::stamp`]):
//!
//! - before the first change after a flush is recorded, so that a copy made while everything was flushed has
//!   another generation;
//! - before a change is recorded if the last stamp is older than [`STAMP_MS`], so that the same is true of a copy
//!   made between two flushes.
//!
//! Each record contains the generation that the image had when the record was written. The journal matches an image
//! that has the generation of the last record, or the next one. A kill leaves, step by step:
//!
//! | the process dies after | image | last record | the journal |
//! |---|---|---|---|
//! | a record | g | g | matches |
//! | the stamp, before the record | g + 1 | g | matches; changes without a record were not acknowledged |
//! | the record | g + 1 | g + 1 | matches |
//!
//! A copy of the image has the generation of the moment at which its first sector was read. Either this is not the
//! generation of the last record, and the journal does not match. Or all records were written before that moment or
//! within the same interval, and the data that they refer to was written before them.
//!
//! # When the image becomes newer than the journal
//!
//! Changes that could not be recorded are flushed. Before that flush writes anything, it sets another bit in the
//! image ([`OVERTAKEN`]): a cluster that was free when the journal ended may now be in use in the file, so a replay
//! decreases no refcount. The last write of that flush gives the image a new random generation, and the journal no
//! longer matches. It also sets a bit that says that the image has everything that was acknowledged ([`COMPLETE`]), until
//! the journal takes changes again.
//!
//! # When the journal is elsewhere
//!
//! A VM that moves to another host after a kill leaves the journal behind, and its image lacks writes that it relies on. So
//! an image whose bits are about a journal that is not here [lacks it](Qcow2::lacks_journal), and no guest may go on with it. The
//! same is true of a journal that is here and has changes, but does not match: another program has written to the image after a
//! kill and removed the bits, or a copy was put back. No guest may go on that was served on this host before.
//! That stays so if somebody else writes to the image, which then has a journal of its own: the image says so ([`LACKING`]) until
//! another program removes that, and the journal of this host ([`Slot::lost`]) whatever others do. A guest that starts on
//! it is as after a crash of the host: [`Qcow2::forget_journal`] removes both first, durably, so that this guest can be
//! connected again after another kill, also if it has written nothing. An image that a process has closed in order says that it is
//! [`COMPLETE`], without a journal, unless that process knows of a loss: what another host has noted of a journal that it did not
//! find means nothing then. Only what was lost here stays noted here, as the image may be a copy that was put back.
//!
//! # When the journal is older than the image
//!
//! Each stamp increments the generation, and everything that makes a journal unnecessary chooses a new random one.
//! So if the image is only a few stamps ahead of the last record, the journal has lost records of acknowledged
//! changes: it was truncated or damaged. The image is then not opened. An image with a journal whose slots cannot
//! be read is not opened either. The records of the last stamp are an exception: a kill, too, leaves a journal
//! without the last of them.
//!
//! # Internal snapshots
//!
//! An image with internal snapshots has no journal, and never has these bits. If an image has unknown autoclear
//! bits, `qemu-img check -r` of every QEMU from 4.2 on writes the header before it has read the number of
//! snapshots, and so removes all of them. Each change to such an image is flushed before it is acknowledged. The
//! same applies to an image of version 2, which has no autoclear bits.

mod elsewhere;
mod lineage;
mod matching;
mod records;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use block::FileOffset;

pub use lineage::Generations;
pub(super) use lineage::Lineage;
pub use matching::JournalOwner;
pub(super) use matching::{Found, empty, fits, journal_bits, owner, read};
use matching::{JournalBits, matching_slot, note_lost};
pub(super) use records::{Change, Changes, Lost};
use records::{READ_MAX, RECORD_MIN, RECORDS_AT, Slot, record};

use super::file::Piece;
use super::retry::MayBlock;
use super::types::HostOffset;
use super::{ImageError, ImageState, Qcow2};
use crate::storage::Storage;

/// The bytes of records beyond which a flush must make them unnecessary. A record has 25 bytes for each cluster and
/// 25 for each run of refcounts, so a flush comes after about 70,000 small writes that allocate.
const BYTES_MAX: u64 = 4 << 20;

/// The space of records that are no longer needed is freed in pieces of this many bytes.
const PUNCH: u64 = 1 << 20;

/// The minimum and maximum interval between two stamps while changes are recorded, in milliseconds. In between, the
/// interval is 50 times as long as the last stamp took, so stamps take 2% of the time.
const STAMP_MS: (u64, u64) = (1, 100);
const STAMP_SHARE: u32 = 50;

/// The most stamps by which an image can be ahead of the last record that can still be found in its journal. Each
/// stamp comes with a record, and a flush comes before the records exceed `BYTES_MAX`. If the newer slot is
/// damaged, the older one is from one flush earlier. So the limit is 2 × 4 MiB / 41 bytes = 204,601.
const STAMPS_MAX: u64 = 2 * (BYTES_MAX / RECORD_MIN + 1);

const MARK: u64 = 1 << 63;
/// Tables in the file may be newer than the end of the journal.
const OVERTAKEN: u64 = 1 << 62;
/// Everything that was acknowledged is in the image, with or without a journal.
const COMPLETE: u64 = 1 << 23;
/// Something that was acknowledged is missing, whatever journal there is: a guest that goes on relies on it.
const LACKING: u64 = 1 << 22;
const GENERATION: u64 = (1 << 38) - 1;
const GENERATION_SHIFT: u32 = 24;

/// Where the journal of an image is kept.
pub struct JournalFile {
    /// The journal's own file, which nothing else uses. It need not be durable.
    pub storage: Arc<dyn Storage>,
    /// Identifies the image's file and the boot of the host.
    pub identity: [u8; 32],
    /// What it contains was written before the image's file was created: for an earlier one with the same identity.
    pub is_of_earlier_file: bool,
    /// Called for each event of the journal. It must not use the image.
    pub on_event: Box<dyn Fn(JournalEvent) + Send + Sync>,
}

/// An event of a journal.
#[derive(Debug)]
pub enum JournalEvent {
    /// This many changes, which a killed process had acknowledged, were replayed. They are in the image now.
    Replayed(u64),
    /// The journal was not used: another program has written the image since, or it is another image.
    Outdated,
    /// There is no journal, although the image says that it has one. The host has crashed since, the image is a
    /// copy of one that was in use, or the journal of a killed process is elsewhere.
    Missing {
        /// The image has internal snapshots, which `qemu-img check -r` removes while the image says that it has a
        /// journal.
        snapshots: bool,
    },
    /// The journal cannot be written. Until it can, changes to tables are flushed before they are acknowledged.
    Failed(io::Error),
    /// An image of version 2 has no journal, because it cannot say which journal is its own. Changes to tables are
    /// flushed before they are acknowledged.
    NotForVersion2,
    /// An image with internal snapshots has no journal. Changes to tables are flushed before they are acknowledged.
    NotWithSnapshots,
}

/// A journal that is being written.
pub(super) struct Journal {
    file: JournalFile,
    /// The journal has begun, and the journal bits of the image are about it.
    active: bool,
    /// The journal bits of the image are about a journal whose changes have all been applied.
    ended: bool,
    /// The journal's file contains the journal of another image, or of another state of this one.
    foreign: bool,
    session: u64,
    sequence: u64,
    /// The generation that the image has.
    generation: u64,
    /// The random one from which it was incremented, or a later one that is durable.
    first_generation: u64,
    /// The random one that the image gets next.
    next_generation: u64,
    /// When the image got that generation; `None` if the next record needs another one.
    stamped: Option<Instant>,
    stamp_interval: Duration,
    /// Where the records that no flush has made unnecessary begin, and where they end.
    start: FileOffset,
    end: FileOffset,
    /// The space of the records before this was freed.
    punched: FileOffset,
    /// Changes were left out, so later changes must not be recorded.
    broken: bool,
    /// Some of the changes left out may be in the file.
    overtaken: bool,
    /// Nothing was recorded since everything was flushed and the image got its generation.
    complete: bool,
    /// As [`LACKING`].
    lacking: bool,
    /// As [`Slot::lost`]; what it follows may not say so.
    lost: Lost,
    failure_reported: bool,
    /// One of the slots is that of an earlier process.
    follows_another: bool,
    record: Vec<u8>,
}

/// How far a flush makes the journal unnecessary.
pub(super) struct Rotated {
    end: FileOffset,
    /// The generation that the image has after the flush, if the flush changes it.
    generation: Option<u64>,
}

impl Journal {
    /// An empty journal. The journal bits of the image are about an earlier one, which has `ended` or is elsewhere.
    /// The content of the file may be `foreign`.
    pub fn new(file: JournalFile, ended: bool, foreign: bool, lost: Lost) -> Self {
        Self {
            file,
            active: false,
            ended,
            foreign,
            session: 0,
            sequence: 0,
            generation: 0,
            first_generation: 0,
            next_generation: random() & GENERATION,
            stamped: None,
            stamp_interval: Duration::ZERO,
            start: RECORDS_AT,
            end: RECORDS_AT,
            punched: RECORDS_AT,
            broken: false,
            overtaken: false,
            complete: false,
            lacking: false,
            lost,
            failure_reported: false,
            follows_another: false,
            record: Vec::new(),
        }
    }

    /// Begins the journal of an image that has these bits. From now on, it must have those of [`autoclear`](Self::autoclear).
    fn begin(&mut self, image: JournalBits) {
        self.renew(self.next_generation);
        // Nothing is recorded yet.
        self.complete = true;
        self.stamped = None;
        self.foreign = false;
        match self.restart_after(image) {
            Ok(()) => (self.active, self.broken) = (true, false),
            Err(e) => self.failed(e),
        }
    }

    /// The image gets a generation that was chosen before.
    fn renew(&mut self, generation: u64) {
        (self.generation, self.first_generation) = (generation, generation);
        self.next_generation = random() & GENERATION;
    }

    /// Begins beside the journal that belongs to the image so far, if there is one: a kill must find it until the image has the
    /// new generation. No record is written before. Anything else in the file is useless.
    fn restart_after(&mut self, image: JournalBits) -> io::Result<()> {
        let slot = matching_slot(&self.file, image).filter(|slot| slot.sequence < u64::MAX / 2);
        let Some(slot) = slot else {
            if self.lost.any() {
                // That must be known at all times.
                let newest = Slot::read(&*self.file.storage)?.into_iter().next();
                let newest = newest.map_or(0, |slot| slot.sequence);
                if newest >= u64::MAX / 2 {
                    return Err(io::Error::other("its sequence numbers are used up"));
                }
                self.sequence = newest;
                self.restart()?;
                return self.file.storage.set_size(RECORDS_AT.0);
            }
            self.file.storage.set_size(0)?;
            return self.restart();
        };
        self.follows_another = true;
        (self.session, self.sequence) = (self.new_session(), slot.sequence);
        (self.start, self.end, self.punched) = (RECORDS_AT, RECORDS_AT, RECORDS_AT);
        self.write_slot()
    }

    /// The image has the generation of this journal. Leaves nothing of the one before.
    pub fn forget_other(&mut self) {
        if !std::mem::take(&mut self.follows_another) {
            return;
        }
        let written = self.write_slot();
        if let Err(e) = written.and_then(|()| self.file.storage.set_size(RECORDS_AT.0)) {
            self.failed(e);
        }
    }

    /// A random number that names the generation which the image gets if a flush overtakes this journal: a kill then leaves both,
    /// and the next process sees that they belong together.
    fn new_session(&self) -> u64 {
        random() & !GENERATION | self.next_generation
    }

    /// Begins at the start of the file again. Records that are still there are no longer valid.
    fn restart(&mut self) -> io::Result<()> {
        self.session = self.new_session();
        (self.start, self.end, self.punched) = (RECORDS_AT, RECORDS_AT, RECORDS_AT);
        // None of an earlier session stays.
        self.write_slot()?;
        self.write_slot()
    }

    /// The journal bits that the image must have.
    pub fn autoclear(&self) -> u64 {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        match self.active {
            false => 0,
            true => {
                autoclear(self.generation)
                    | flag(self.overtaken, OVERTAKEN)
                    | flag(self.complete && !self.lost.here, COMPLETE)
                    | flag(self.lacking, LACKING)
            }
        }
    }

    /// Ends the journal when the image is closed and no longer has journal bits. Content left in the file belongs
    /// to no image, but may still say that something was lost.
    fn end(&mut self) {
        self.active = false;
        if !self.foreign && !self.lost.any() {
            let _ = self.file.storage.set_size(0);
        }
    }

    pub fn tell(&self, event: JournalEvent) {
        (self.file.on_event)(event);
    }

    /// Whether the image must get another generation before the next record.
    fn needs_stamp(&self) -> bool {
        let due = |at: Instant| at.elapsed() >= self.stamp_interval;
        !self.broken && self.stamped.is_none_or(due)
    }

    /// Appends changes. Returns whether they, and all changes before them, survive a kill of this process.
    fn append(&mut self, lists: [&mut Changes; 2]) -> bool {
        if lists.iter().all(|list| list.is_empty()) {
            return !self.broken;
        }
        if self.broken {
            lists.into_iter().for_each(Changes::clear);
            return false;
        }
        debug_assert!(!self.follows_another, "the image has no stamp yet");
        record(
            &mut self.record,
            lists,
            self.generation,
            self.end,
            self.session,
        );
        match self.file.storage.write_at(self.end, &self.record) {
            Ok(()) => self.end += self.record.len() as u64,
            Err(e) => self.failed(e),
        }
        !self.broken
    }

    fn failed(&mut self, error: io::Error) {
        self.broken = true;
        if !std::mem::replace(&mut self.failure_reported, true) {
            self.tell(JournalEvent::Failed(error));
        }
    }

    /// Call it when the flush of `rotated` has succeeded. `all`: the flush has written every change that was left
    /// out.
    fn checkpoint(&mut self, rotated: &Rotated, all: bool, image: JournalBits) {
        if !self.active {
            // It could not begin.
            if all && self.broken {
                self.begin(image);
            }
            return;
        }
        if let Some(generation) = rotated.generation {
            self.renew(generation);
            self.complete = true;
        }
        self.start = rotated.end;
        self.stamped = None;
        self.overtaken = false;
        let was_broken = self.broken;
        self.broken &= !all;
        let mut result;
        // The space that is freed here may be the only free space.
        let worth_it = self.end - RECORDS_AT > PUNCH || was_broken;
        if self.start == self.end && worth_it {
            result = self
                .restart()
                .and_then(|()| self.file.storage.set_size(RECORDS_AT.0));
        } else {
            // First write the slot, which says that the records before `start` are no longer needed.
            result = self.write_slot();
            if result.is_ok() && self.start - self.punched > PUNCH {
                let len = self.start - self.punched;
                match self.file.storage.punch(self.punched, len) {
                    Ok(()) => self.punched = self.start,
                    // A journal that takes no more records is soon restarted.
                    Err(e) if len > READ_MAX => result = Err(e),
                    Err(_) => {}
                }
            }
        }
        if let Err(e) = result {
            // The next process finds changes that the image has already, or a journal that does not match, or none.
            if rotated.generation.is_some() && !self.lost.any() {
                let _ = self.file.storage.set_size(0);
            }
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
            self.file.identity,
        )
        .with_lost(self.lost)
        .write(&*self.file.storage)
    }
}

impl ImageState {
    /// Begins the journal, at the first write to the image. The caller writes the journal bits to the image.
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
        let image = journal_bits(&self.header);
        if let Some(journal) = self.journal.as_mut().filter(|journal| !journal.active) {
            journal.begin(image);
            self.outdated_journal = None;
        }
        let on = self.journal.is_some() || self.flush_changes;
        (self.changes.on, self.refcounts.changes.on) = (on, on);
    }

    /// Whether recording a change takes a flush, or something that only a thread that may block can do.
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

    /// Updates the journal bits in the header in memory.
    fn set_journal_bits(&mut self) {
        if let Some(journal) = self.journal.as_ref().filter(|journal| journal.active) {
            self.header.set_journal(journal.autoclear());
        }
    }

    /// As [`Journal::checkpoint`].
    pub(super) fn checkpoint_journal(&mut self, rotated: &Rotated, all: bool) {
        let image = journal_bits(&self.header);
        if let Some(journal) = &mut self.journal {
            journal.checkpoint(rotated, all, image);
        }
        self.set_journal_bits();
    }
}

impl Qcow2 {
    /// Records all changes so far, so that they survive a kill of this process. If it returns false, they survive
    /// only after a flush, and [`must_flush`](Self::must_flush) is true until then. Nothing may depend on the
    /// changes before this returns.
    #[must_use]
    pub(super) fn record(&self, state: &mut ImageState, may_block: MayBlock) -> bool {
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

    /// Whether some changes in memory are neither in the journal nor flushed. A write that completes now may depend
    /// on them, and must not be acknowledged before a [`flush`](Self::flush).
    #[inline]
    pub fn must_flush(&self) -> bool {
        self.unrecorded.load(SeqCst)
    }

    /// As [`record`](Self::record), but without setting `must_flush`: for changes that no lookup can find before a
    /// flush has written them.
    fn try_record(&self, state: &mut ImageState, may_block: MayBlock) -> bool {
        // A caller that may not block has called `recording_blocks` under the same lock.
        let needs_stamp = || state.journal.as_ref().is_some_and(Journal::needs_stamp);
        if may_block == MayBlock::Yes && !state.nothing_to_record() && needs_stamp() {
            self.stamp(state);
        }
        let ImageState {
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

    /// Gives the image the next generation. If that fails, nothing is recorded with it, and the file has the old or
    /// the new generation: the journal matches both.
    fn stamp(&self, state: &mut ImageState) {
        let Some(mut journal) = state.journal.take() else {
            return;
        };
        let before = (journal.generation, journal.complete);
        (journal.generation, journal.complete) = (next(before.0), false);
        state.header.set_journal(journal.autoclear());
        let begun = Instant::now();
        match self.write_header(state) {
            Ok(()) => {
                journal.forget_other();
                journal.stamped = Some(begun);
                let [least, most] = [STAMP_MS.0, STAMP_MS.1].map(Duration::from_millis);
                journal.stamp_interval = (begun.elapsed() * STAMP_SHARE).clamp(least, most);
            }
            Err(e) => {
                (journal.generation, journal.complete) = before;
                state.header.set_journal(journal.autoclear());
                journal.failed(io::Error::other(e));
            }
        }
        state.journal = Some(journal);
    }

    /// Called when a flush of all changes so far begins. Records the changes that are not recorded yet. If that
    /// fails, marks the file as newer than the journal before anything else is written to it. Returns how far the
    /// flush makes the journal unnecessary, and the header to be written at the end of the flush, if any.
    pub(super) fn rotate_journal(
        &self,
        state: &mut ImageState,
    ) -> Result<Option<(Rotated, Option<Piece>)>, ImageError> {
        let recorded = self.try_record(state, MayBlock::Yes);
        self.mark_if_overtaken(state, recorded)?;
        let Some(journal) = &state.journal else {
            return Ok(None);
        };
        let mut rotated = Rotated {
            end: journal.end,
            generation: None,
        };
        let mut after = None;
        if journal.active && journal.overtaken {
            // A replay of this journal would undo the flush: the journal must no longer match.
            let generation = journal.next_generation;
            rotated.generation = Some(generation);
            let mut header = state.header.clone();
            let lacking = if journal.lacking { LACKING } else { 0 };
            let complete = if journal.lost.here { 0 } else { COMPLETE };
            header.set_journal(autoclear(generation) | complete | lacking);
            let mut bytes = state.header_block.clone();
            header.put(&mut bytes);
            let at = HostOffset::START;
            after = Some(Piece { at, bytes });
        }
        Ok(Some((rotated, after)))
    }

    /// Called before a header that refers to tables in other clusters is written: the journal must not contain
    /// anything older about these clusters. The caller writes the header in memory.
    pub(super) fn record_or_mark_overtaken(&self, state: &mut ImageState) {
        let recorded = self.try_record(state, MayBlock::Yes);
        if let Some(journal) = &mut state.journal {
            journal.overtaken |= !recorded;
        }
        state.set_journal_bits();
    }

    fn mark_if_overtaken(&self, state: &mut ImageState, recorded: bool) -> Result<(), ImageError> {
        let Some(journal) = state.journal.as_mut().filter(|journal| journal.active) else {
            return Ok(());
        };
        if recorded && !journal.overtaken {
            return Ok(());
        }
        journal.overtaken = true;
        state.set_journal_bits();
        self.write_header(state)
    }

    /// Whether the journal contains everything that was acknowledged and not flushed. That survives a kill of this
    /// process, but not a crash of the host.
    pub fn is_journaled(&self) -> bool {
        let state = self.lock();
        let journal = state.journal.as_ref();
        journal.is_some_and(|journal| journal.active && !journal.broken) && !self.must_flush()
    }

    /// Begins the journal if a flush has something to write before the guest has: clusters that a replay has freed. The
    /// journal that was replayed would not match the image any more. The caller holds the flush lock.
    pub(super) fn begin_journal_in_flush(&self) -> Result<(), ImageError> {
        let mut state = self.lock();
        let bits = journal_bits(&state.header).bits();
        let is_old = |journal: &Journal| match journal.active {
            false => !journal.broken,
            // Its bits could not be written when it began.
            true => journal.autoclear() != bits,
        };
        if !state.journal.as_ref().is_some_and(is_old) {
            return Ok(());
        }
        state.begin_journal();
        let bits = state.journal.as_ref().map_or(0, Journal::autoclear);
        state.header.set_journal(bits);
        self.write_header(&mut state)?;
        if let Some(journal) = &mut state.journal {
            journal.forget_other();
        }
        self.file.flush()
    }
}

fn next(generation: u64) -> u64 {
    (generation + 1) & GENERATION
}

fn autoclear(generation: u64) -> u64 {
    MARK | generation << GENERATION_SHIFT
}

/// The generation in these bits.
fn generation(bits: u64) -> u64 {
    bits >> GENERATION_SHIFT & GENERATION
}

/// A random number, most likely never used before.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests;
