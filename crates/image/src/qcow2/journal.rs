//! What the end of this process must not cost: changes to tables that were acknowledged and that no flush
//! has written yet.
//!
//! A write into clusters that were taken for it is acknowledged when its data is in the file and the
//! tables *in memory* lead there. The host's crash may take that back until the guest flushes; a kill of
//! this process may not, because the guest goes on and believes what it was told. To write the tables
//! themselves with each such write would cost a write to the device, in an order that a crash must find
//! ([`flush`](super::flush)): two fdatasyncs. So before a change is acknowledged, it is appended to a
//! journal: a file that outlives the process and not the host, in a tmpfs. That is one call of about 70
//! bytes for each write that allocates, and nothing for any other. Whoever opens the image next does the
//! changes again, and has a flush write them.
//!
//! - A change is absolute (entry 17 *is* this, the refcount of cluster 9 *is* 1): done twice, or done
//!   though a flush has written it already, it leaves the same.
//! - Changes stand in the order in which they were made. Those before [`Journal::rotate`] are in the
//!   flush that follows it; when that has succeeded, the journal begins behind them.
//! - *Does it belong to this image, as it is now?* The image says so itself: autoclear features are bits
//!   that every program clears which opens an image for writing and does not know them (qcow2.txt:
//!   "autoclear_features"), and QEMU does. The uppermost of them says that there is one, and 38 of them hold
//!   a number that is drawn at the first write and raised by each flush, with what the flush writes. The
//!   journal has the same number, or that before it if the flush was not ended. An image that was opened elsewhere since,
//!   or that was put there from a copy, has another one, and the journal is left alone. Besides, it names
//!   the file and the host's boot: after a crash of the host, it is nothing.
//! - A record counts only with its checksum, over its place and its session too; the first that does not
//!   ends the journal. What was cut off there was not acknowledged.
//! - A journal that cannot be written (a full tmpfs) makes nothing unsafe, but slow: until the next flush
//!   has made it unnecessary, each change is flushed before it is acknowledged.
//! - *Before* tables are written that have more in them than the journal, the image says so, with another of these
//!   bits: a cluster that was free when the journal ended may be somebody's in the file, and so no refcount goes
//!   down when its changes are done again. Afterwards the number is raised by two, and the journal is nothing.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::sync::Arc;

use block::FileOffset;
use flate2::Crc;

use super::open::read_header;
use super::refcount::Piece;
use super::{Qcow2, State};
use crate::storage::{Storage, read_padded};

/// Bytes of records that a flush makes unnecessary before they become more: 25 for each cluster and 25
/// for each run of refcounts, so that a flush comes after about 80,000 small writes that allocate.
const BYTES_MAX: u64 = 4 << 20;

/// Bytes of records that are read; one record may go beyond [`BYTES_MAX`].
const READ_MAX: u64 = 64 << 20;

/// Space that no record counts in is given back in pieces of so many bytes.
const PUNCH: u64 = 1 << 20;

/// Two places for what is said of the whole, of which the newer one counts.
const SLOT: u64 = 128;
const SLOT_BYTES: usize = 76;
const RECORDS_AT: u64 = 4096;
const MAGIC: u64 = u64::from_be_bytes(*b"ringdkJ1");

/// Length and checksum.
const HEAD: usize = 8;
const CHANGE: usize = 25;

/// The bits of the autoclear features that are the journal's.
pub(super) const AUTOCLEAR_JOURNAL: u64 = MARK | OVERTAKEN | GENERATION << GENERATION_SHIFT;
const MARK: u64 = 1 << 63;
/// Tables in the file may be newer than the end of the journal.
const OVERTAKEN: u64 = 1 << 62;
const GENERATION: u64 = (1 << 38) - 1;
const GENERATION_SHIFT: u32 = 24;

/// Where the journal of an image is kept.
pub struct JournalPlace {
    /// A file of its own, which nobody else uses, and which need not be durable.
    pub storage: Arc<dyn Storage>,
    /// What file the image is in, and the boot of the host: a journal with anything else here is not this
    /// image's.
    pub identity: [u8; 32],
    /// Told what becomes of it. It must not use the image.
    pub tell: Box<dyn Fn(JournalEvent) + Send + Sync>,
}

/// What became of a journal.
#[derive(Debug)]
pub enum JournalEvent {
    /// So many changes were in it that a killed process had acknowledged; they are in the image now.
    Replayed(u64),
    /// It was not used: the image has been written by something else since, or is another one.
    Outdated,
    /// There is none, though the image says that it has one: the host has crashed since, or it is a copy of one
    /// that was in use; or else the journal of a killed process is elsewhere.
    Missing,
    /// It cannot be written: until it can, changes to tables are flushed before they are acknowledged.
    Failed(io::Error),
}

/// A change to a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The words of the L2 entry of a cluster of the disk.
    Entry { cluster: u64, words: [u64; 2] },
    /// An entry of the L1 table.
    Table { index: u64, word: u64 },
    /// The refcount of clusters beside each other.
    Refcount {
        first: u64,
        clusters: u64,
        refcount: u64,
    },
    /// A new refcount block, and where it is.
    Block { number: u64, at: u64 },
}

/// Changes on their way to the journal, if there is one.
#[derive(Default)]
pub(super) struct Changes {
    on: bool,
    changes: Vec<Change>,
}

impl Changes {
    pub fn push(&mut self, change: Change) {
        if !self.on {
            return;
        }
        if let Change::Refcount {
            first,
            clusters,
            refcount,
        } = change
            && let Some(Change::Refcount {
                first: before,
                clusters: so_far,
                refcount: same,
            }) = self.changes.last_mut()
            && *same == refcount
            && *before + *so_far == first
        {
            *so_far += clusters;
            return;
        }
        self.changes.push(change);
    }

    /// Leaves out what was said of refcount blocks from one on, which count clusters from one on: they were
    /// made for a larger table that never came into force, and the next one may have them elsewhere.
    pub fn forget_blocks(&mut self, from: u64, from_cluster: u64) {
        self.changes.retain_mut(|change| match change {
            Change::Block { number, .. } => *number < from,
            Change::Refcount {
                first, clusters, ..
            } => {
                *clusters = from_cluster.saturating_sub(*first).min(*clusters);
                *clusters > 0
            }
            Change::Entry { .. } | Change::Table { .. } => true,
        });
    }
}

/// A journal that is being written.
pub(super) struct Journal {
    place: JournalPlace,
    /// Its image says that it belongs to it.
    active: bool,
    /// What the image says instead is of a journal of which all has been done.
    ended: bool,
    session: u64,
    sequence: u64,
    generation: u64,
    /// Where the records begin that no flush has made unnecessary, and where they end.
    start: u64,
    end: u64,
    punched: u64,
    /// Changes were left out: what comes after them must not be written.
    broken: bool,
    /// How often.
    left_out: u64,
    /// Some of these may be in the file.
    overtaken: bool,
    told: bool,
    record: Vec<u8>,
}

/// How far a flush makes the journal unnecessary.
pub(super) struct Rotated {
    end: u64,
    left_out: u64,
    generation: u64,
}

impl Journal {
    /// With nothing in it. What the image says is of an earlier one, which has `ended` or is elsewhere.
    pub fn new(place: JournalPlace, ended: bool) -> Self {
        Self {
            place,
            active: false,
            ended,
            session: 0,
            sequence: 0,
            generation: 0,
            start: RECORDS_AT,
            end: RECORDS_AT,
            punched: RECORDS_AT,
            broken: false,
            left_out: 0,
            overtaken: false,
            told: false,
            record: Vec::new(),
        }
    }

    /// Empties it. What the image must say from now on is [`autoclear`](Self::autoclear).
    pub fn begin(&mut self) -> io::Result<()> {
        self.generation = random() & GENERATION;
        // What is there has been done, or is of another image.
        self.place.storage.set_size(0)?;
        self.restart()?;
        self.active = true;
        Ok(())
    }

    /// Begins at the start of its file again. Records that are still there count no longer.
    fn restart(&mut self) -> io::Result<()> {
        self.session = random();
        (self.start, self.end, self.punched) = (RECORDS_AT, RECORDS_AT, RECORDS_AT);
        self.put_slot()
    }

    /// What the image says of the journal.
    pub fn autoclear(&self) -> u64 {
        match (self.active, self.overtaken) {
            (false, _) => 0,
            (true, false) => autoclear(self.generation),
            (true, true) => autoclear(self.generation) | OVERTAKEN,
        }
    }

    /// Ends it, when the image is closed and says nothing of it any more.
    pub fn end(&mut self) {
        self.active = false;
        // What is left of it belongs to no image.
        let _ = self.place.storage.set_size(0);
    }

    pub fn tell(&self, event: JournalEvent) {
        (self.place.tell)(event);
    }

    /// Writes changes. Says whether they, and all before them, outlive this process now.
    fn append(&mut self, lists: [&mut Changes; 2]) -> bool {
        if lists.iter().all(|list| list.changes.is_empty()) {
            return !self.broken;
        }
        self.record.clear();
        self.record.resize(HEAD, 0);
        for list in lists {
            for change in list.changes.drain(..) {
                put(&mut self.record, change);
            }
        }
        if !self.broken {
            seal(&mut self.record, self.end, self.session);
            let at = FileOffset(self.end);
            match self.place.storage.write_at(at, &self.record) {
                Ok(()) => {
                    self.end += self.record.len() as u64;
                    return true;
                }
                Err(e) => self.failed(e),
            }
        }
        self.left_out += 1;
        false
    }

    fn failed(&mut self, error: io::Error) {
        self.broken = true;
        if !std::mem::replace(&mut self.told, true) {
            self.tell(JournalEvent::Failed(error));
        }
    }

    /// A flush of all changes so far begins.
    fn rotate(&mut self, lists: [&mut Changes; 2]) -> Rotated {
        self.overtaken = !self.append(lists);
        // With what was left out of it, the image is newer than what is in the journal: done again, that
        // would undo the flush. So its number must be none that fits, until the journal says so itself.
        let raised = if self.overtaken { 2 } else { 1 };
        Rotated {
            end: self.end,
            left_out: self.left_out,
            generation: (self.generation + raised) & GENERATION,
        }
    }

    /// That flush has succeeded, and the image has the new number.
    fn checkpoint(&mut self, rotated: &Rotated) {
        self.generation = rotated.generation;
        self.overtaken = false;
        if self.broken && self.left_out == rotated.left_out {
            self.broken = false;
        }
        self.start = rotated.end;
        let storage = &self.place.storage;
        let mut result = Ok(());
        if self.start == self.end && self.end - RECORDS_AT > PUNCH {
            result = self
                .restart()
                .and_then(|()| self.place.storage.set_size(RECORDS_AT));
        } else {
            if self.start - self.punched > PUNCH {
                let (at, len) = (FileOffset(self.punched), self.start - self.punched);
                match storage.punch(at, len) {
                    Ok(()) => self.punched = self.start,
                    // What takes no more records soon begins anew.
                    Err(e) if len > READ_MAX => result = Err(e),
                    Err(_) => {}
                }
            }
            result = result.and_then(|()| self.put_slot());
        }
        if let Err(e) = result {
            // Whoever opens the image finds another number, or changes that it has.
            self.failed(e);
        }
    }

    fn put_slot(&mut self) -> io::Result<()> {
        self.sequence += 1;
        let mut slot = Vec::with_capacity(SLOT_BYTES);
        for word in [
            MAGIC,
            self.sequence,
            self.session,
            self.generation,
            self.start,
        ] {
            slot.extend(word.to_le_bytes());
        }
        slot.extend(self.place.identity);
        slot.extend(checksum(&[&slot]).to_le_bytes());
        let at = FileOffset(self.sequence % 2 * SLOT);
        self.place.storage.write_at(at, &slot)
    }
}

impl State {
    /// Starts the journal with the image's first write. One that cannot be written is done without.
    pub(super) fn begin_journal(&mut self) {
        if let Some(mut journal) = self.journal.take()
            && self.header.version >= 3
        {
            match journal.begin() {
                Ok(()) => self.journal = Some(journal),
                Err(e) => journal.tell(JournalEvent::Failed(e)),
            }
        }
        self.changes.on = self.journal.is_some();
        self.refcounts.changes.on = self.journal.is_some();
    }

    /// Has the changes so far outlive this process. If that is not so now, only a flush makes it so.
    #[must_use]
    pub(super) fn keep_changes(&mut self) -> bool {
        let Self {
            journal,
            changes,
            refcounts,
            ..
        } = self;
        match journal {
            Some(journal) => journal.append([&mut refcounts.changes, changes]),
            None => true,
        }
    }

    /// Whether changes must be flushed before they are acknowledged.
    pub(super) fn journal_broken(&self) -> bool {
        self.journal.as_ref().is_some_and(|journal| journal.broken)
    }

    /// Whether the journal has become so long that a flush must come first.
    pub(super) fn journal_full(&self) -> bool {
        let journal = self.journal.as_ref();
        journal.is_some_and(|journal| journal.end - journal.start > BYTES_MAX)
    }

    /// Before a header leads to tables elsewhere: of the clusters that these are in, the journal must say
    /// nothing older.
    pub(super) fn keep_changes_or_say(&mut self) {
        let kept = self.keep_changes();
        if let Some(journal) = &mut self.journal {
            journal.overtaken |= !kept;
        }
        self.say_of_journal();
    }

    /// Has the header in memory say of the journal what is so.
    fn say_of_journal(&mut self) {
        if let Some(journal) = self.journal.as_ref().filter(|journal| journal.active) {
            let others = self.header.autoclear & !AUTOCLEAR_JOURNAL;
            self.header.autoclear = others | journal.autoclear();
        }
    }

    /// As [`Journal::rotate`]; and the header that is to be written with the flush, and that which must be in the file
    /// before anything else of it.
    pub(super) fn rotate_journal(&mut self) -> Option<(Rotated, Piece, Option<Piece>)> {
        let Self {
            journal,
            changes,
            refcounts,
            ..
        } = self;
        let journal = journal.as_mut().filter(|journal| journal.active)?;
        let rotated = journal.rotate([&mut refcounts.changes, changes]);
        let overtaken = journal.overtaken;
        self.say_of_journal();
        let with = |autoclear| {
            let mut header = self.header.clone();
            header.autoclear = autoclear;
            let mut bytes = self.header_block.clone();
            header.put(&mut bytes);
            let at = FileOffset(0);
            Piece { at, bytes }
        };
        let others = self.header.autoclear & !AUTOCLEAR_JOURNAL;
        let after = with(others | autoclear(rotated.generation));
        let before = overtaken.then(|| with(self.header.autoclear));
        Some((rotated, after, before))
    }

    /// As [`Journal::checkpoint`].
    pub(super) fn checkpoint_journal(&mut self, rotated: &Rotated) {
        if let Some(journal) = &mut self.journal {
            journal.checkpoint(rotated);
        }
        self.say_of_journal();
    }
}

impl Qcow2 {
    /// Ends the journal of an image that is being closed, of which all is in the file.
    pub(super) fn end_journal(&self, state: &mut State) -> Result<(), super::ImageError> {
        // One that is elsewhere may still be found: then the image must know it.
        let says = state.header.autoclear & AUTOCLEAR_JOURNAL != 0;
        let is_ours = |journal: &Journal| journal.active || says && journal.ended;
        if state.journal.as_ref().is_some_and(is_ours) {
            state.header.autoclear &= !AUTOCLEAR_JOURNAL;
            self.write_header(state)?;
            self.file.flush()?;
            if let Some(journal) = &mut state.journal {
                journal.end();
            }
            (state.changes.on, state.refcounts.changes.on) = (false, false);
            // Whoever writes after all begins anew.
            self.begun.store(false, std::sync::atomic::Ordering::SeqCst);
        }
        Ok(())
    }
}

/// What is in a journal for an image that says this.
///
/// # Errors
/// It cannot be read, or is longer than any.
pub(super) fn read(place: &JournalPlace, image: u64) -> io::Result<Found> {
    let Some(slot) = newest_slot(&*place.storage)? else {
        return Ok(match image & MARK {
            0 => Found::Nothing,
            _ => Found::Missing,
        });
    };
    let fits = slot.fits(&place.identity, image);
    let size = place.storage.size()?;
    let bytes = size.saturating_sub(slot.start);
    match (fits, bytes, image & MARK) {
        (true, 0, _) | (false, 0, 0) => return Ok(Found::Nothing),
        // An old one, of which all has been done, is not the one that the image means.
        (false, 0, _) => return Ok(Found::Missing),
        (false, ..) => return Ok(Found::Outdated),
        (true, ..) => {}
    }
    if bytes > READ_MAX {
        return Err(io::Error::other(format!("it has {bytes} bytes")));
    }
    let mut records = vec![0; bytes as usize];
    read_padded(&*place.storage, FileOffset(slot.start), &mut records)?;
    Ok(Found::Changes {
        changes: parse(&records, slot.start, slot.session),
        all: image & OVERTAKEN == 0,
    })
}

/// Whether a journal that was found somewhere is that of an image, as both say: the image has a number that whoever cannot
/// read it does not know.
pub fn is_journal_of(journal: &dyn Storage, identity: &[u8; 32], image: &dyn Storage) -> bool {
    let Ok((header, _)) = read_header(image) else {
        return false;
    };
    let says = header.autoclear & AUTOCLEAR_JOURNAL;
    newest_slot(journal).is_ok_and(|slot| slot.is_some_and(|slot| slot.fits(identity, says)))
}

fn newest_slot(journal: &dyn Storage) -> io::Result<Option<Slot>> {
    let mut slots = [0; 2 * SLOT as usize];
    read_padded(journal, FileOffset(0), &mut slots)?;
    let slots = slots.chunks_exact(SLOT as usize);
    Ok(slots.filter_map(Slot::parse).max_by_key(|s| s.sequence))
}

pub(super) enum Found {
    Nothing,
    /// Nothing, and the image says otherwise.
    Missing,
    /// Something, but not of this image as it is.
    Outdated,
    Changes {
        changes: Vec<Change>,
        /// Nothing in the file is newer.
        all: bool,
    },
}

struct Slot {
    sequence: u64,
    session: u64,
    generation: u64,
    start: u64,
    identity: [u8; 32],
}

impl Slot {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (said, sum) = bytes.get(..SLOT_BYTES)?.split_at(SLOT_BYTES - 4);
        let word = |i: usize| le64(said, 8 * i);
        let sound = word(0) == MAGIC && sum == checksum(&[said]).to_le_bytes();
        let slot = Self {
            sequence: word(1),
            session: word(2),
            generation: word(3),
            start: word(4),
            identity: said[40..72].try_into().ok()?,
        };
        let possible = slot.generation <= GENERATION && slot.start >= RECORDS_AT;
        (sound && possible).then_some(slot)
    }

    /// Whether it is of an image that says this.
    fn fits(&self, identity: &[u8; 32], image: u64) -> bool {
        let next = (self.generation + 1) & GENERATION;
        let numbers = [self.generation, next].map(autoclear);
        self.identity == *identity && numbers.contains(&(image & !OVERTAKEN))
    }
}

/// The changes in the records that are whole, up to the first that is not.
fn parse(records: &[u8], start: u64, session: u64) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut at = 0;
    while let Some(head) = records.get(at..at + HEAD) {
        let len = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let end = (at + HEAD).saturating_add(len);
        let Some(body) = records.get(at + HEAD..end) else {
            break;
        };
        let sum = record_checksum(head, body, start + at as u64, session);
        if len == 0 || !len.is_multiple_of(CHANGE) || head[4..] != sum.to_le_bytes() {
            break;
        }
        let Some(these) = body
            .chunks_exact(CHANGE)
            .map(get)
            .collect::<Option<Vec<_>>>()
        else {
            break;
        };
        changes.extend(these);
        at = end;
    }
    changes
}

/// Puts length and checksum before a record.
fn seal(record: &mut [u8], at: u64, session: u64) {
    let len = (record.len() - HEAD) as u32;
    record[..4].copy_from_slice(&len.to_le_bytes());
    let (head, body) = record.split_at(HEAD);
    let sum = record_checksum(head, body, at, session);
    record[4..HEAD].copy_from_slice(&sum.to_le_bytes());
}

fn record_checksum(head: &[u8], body: &[u8], at: u64, session: u64) -> u32 {
    checksum(&[&head[..4], &at.to_le_bytes(), &session.to_le_bytes(), body])
}

fn checksum(parts: &[&[u8]]) -> u32 {
    let mut crc = Crc::new();
    parts.iter().for_each(|part| crc.update(part));
    crc.sum()
}

fn put(record: &mut Vec<u8>, change: Change) {
    let (kind, words) = match change {
        Change::Entry { cluster, words } => (1, [cluster, words[0], words[1]]),
        Change::Table { index, word } => (2, [index, word, 0]),
        Change::Refcount {
            first,
            clusters,
            refcount,
        } => (3, [first, clusters, refcount]),
        Change::Block { number, at } => (4, [number, at, 0]),
    };
    record.push(kind);
    words
        .iter()
        .for_each(|word| record.extend(word.to_le_bytes()));
}

fn get(bytes: &[u8]) -> Option<Change> {
    let [a, b, c] = [1, 9, 17].map(|at| le64(bytes, at));
    Some(match bytes.first()? {
        1 => Change::Entry {
            cluster: a,
            words: [b, c],
        },
        2 => Change::Table { index: a, word: b },
        3 => Change::Refcount {
            first: a,
            clusters: b,
            refcount: c,
        },
        4 => Change::Block { number: a, at: b },
        _ => return None,
    })
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..at + 8).and_then(|word| word.try_into().ok());
    word.map_or(0, u64::from_le_bytes)
}

fn autoclear(generation: u64) -> u64 {
    MARK | generation << GENERATION_SHIFT
}

/// A number that nobody has had, most likely.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
