//! Whether a journal belongs to an image, and what is in it.

use std::io;

use block::FileOffset;

use super::records::{Change, Lost, READ_MAX, RECORDS_AT, Slot};
use super::{
    COMPLETE, GENERATION, JournalFile, LACKING, MARK, OVERTAKEN, STAMPS_MAX, generation, random,
};
use crate::qcow2::header::{AUTOCLEAR_JOURNAL, Header};
use crate::storage::{Storage, read_padded};

/// What the header of an image says about its journal.
#[derive(Clone, Copy, Default)]
pub(in crate::qcow2) struct JournalBits {
    bits: u64,
    /// The image is also dirty: no program has written to it and closed it since.
    dirty: bool,
}

impl JournalBits {
    /// Whether the image says anything about a journal.
    pub fn has_any(self) -> bool {
        self.bits != 0
    }

    /// Whether the image has a journal.
    pub fn has_journal(self) -> bool {
        self.bits & MARK != 0
    }

    /// Whether everything that was acknowledged is in the image.
    pub fn is_complete(self) -> bool {
        self.bits & (COMPLETE | LACKING) == COMPLETE
    }

    pub(super) fn bits(self) -> u64 {
        self.bits
    }

    /// Whether the image is dirty because it has a journal. Its refcounts are then right, unless it was dirty
    /// before as well.
    pub fn is_why_dirty(self) -> bool {
        self.dirty && self.bits & MARK != 0
    }
}

pub(in crate::qcow2) fn journal_bits(header: &Header) -> JournalBits {
    JournalBits {
        bits: header.autoclear & AUTOCLEAR_JOURNAL,
        dirty: header.dirty(),
    }
}

/// Reads the journal for an image whose header says this.
///
/// # Errors
/// The journal cannot be read, has lost acknowledged changes, or is longer than any journal can be.
pub(in crate::qcow2) fn read(file: &JournalFile, image: JournalBits) -> io::Result<(Found, Lost)> {
    let marked = image.has_journal();
    let contents = match Contents::read(&*file.storage, &file.identity, image)? {
        Ok(contents) => contents,
        Err(NoSlot::Damaged) if marked => {
            let problem = "its first bytes, which describe its content, are damaged";
            return Err(io::Error::other(problem));
        }
        Err(NoSlot::Damaged) => return Ok((Found::Outdated, Lost::default())),
        Err(NoSlot::Empty) if marked => return Ok((Found::Missing, Lost::default())),
        Err(NoSlot::Empty) => return Ok((Found::Nothing, Lost::default())),
    };
    let is_of_file = contents.slot.identity == file.identity && !file.is_of_earlier_file;
    let mut lost = contents.slot.lost();
    if !is_of_file {
        lost = Lost::default();
    } else if lost.elsewhere && image.is_complete() {
        // Somebody has found that journal since.
        lost.elsewhere = false;
        let _ = note_lost(file, image, lost);
    }
    let found = match (contents.match_image(&file.identity, image), contents.empty) {
        (JournalMatch::Complete, _) => Found::Changes {
            changes: contents.changes,
            all: image.bits & OVERTAKEN == 0,
        },
        (JournalMatch::Truncated, _) => {
            let problem = "its end is missing or damaged, so acknowledged changes are lost";
            return Err(io::Error::other(problem));
        }
        // The image does not mean this old journal, whose changes have all been applied.
        (JournalMatch::None, true) if marked => Found::Missing,
        (JournalMatch::None, true) => Found::Nothing,
        (JournalMatch::None, false) => {
            let is_lost =
                is_of_file && !contents.is_made_unnecessary(image) && contents.changes_anything();
            lost.here |= is_lost;
            Found::Outdated
        }
    };
    Ok((found, lost))
}

/// Whether there is a journal here for an image whose header says this, even one that keeps the image from being
/// opened.
pub(in crate::qcow2) fn fits(file: &JournalFile, image: JournalBits) -> bool {
    match Contents::read(&*file.storage, &file.identity, image) {
        Ok(Ok(found)) => found.match_image(&file.identity, image) != JournalMatch::None,
        Ok(Err(NoSlot::Empty)) => false,
        Ok(Err(NoSlot::Damaged)) | Err(_) => image.bits & MARK != 0,
    }
}

/// The image that a journal found somewhere belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JournalOwner {
    /// This image, as both say: only a program that can read the image knows the generation in it.
    ThisImage,
    /// This image, which has all of its changes.
    Unnecessary,
    /// Unknown: the journal cannot be read, and this image has a journal.
    Unreadable,
    /// Another image, an earlier state of this one, or none.
    Other,
}

/// The slot of the journal that belongs to an image whose header says this, with everything that was acknowledged.
pub(super) fn matching_slot(file: &JournalFile, image: JournalBits) -> Option<Slot> {
    let found = Contents::read(&*file.storage, &file.identity, image);
    let contents = found.ok()?.ok()?;
    let is_complete = contents.match_image(&file.identity, image) == JournalMatch::Complete;
    is_complete.then_some(contents.slot)
}

/// Notes in a journal whose changes are durable in its image that it has none any more, and still belongs to the image.
///
/// # Errors
/// It may have them as before, which changes nothing when they are replayed.
pub(in crate::qcow2) fn empty(file: &JournalFile, image: JournalBits) -> io::Result<()> {
    let end = FileOffset(file.storage.size()?);
    let Ok(contents) = Contents::read(&*file.storage, &file.identity, image)? else {
        return Ok(());
    };
    let mut slot = contents.slot.next();
    (slot.generation, slot.start) = (contents.generation, end);
    slot.write(&*file.storage)
}

/// Notes which acknowledged changes were lost, in the journal that belongs to the image, or in any other.
///
/// # Errors
/// It may say so or not.
pub(super) fn note_lost(file: &JournalFile, image: JournalBits, lost: Lost) -> io::Result<()> {
    let slot = match Contents::read(&*file.storage, &file.identity, image)? {
        // Another image's may still be wanted.
        Ok(contents) if contents.slot.identity != file.identity => return Ok(()),
        Ok(contents) => contents.slot.next(),
        Err(_) => Slot::new(1, random(), 0, RECORDS_AT, file.identity),
    };
    slot.with_lost(lost).write(&*file.storage)
}

/// Whether a journal that was found somewhere belongs to the image with this header.
pub(in crate::qcow2) fn owner(
    journal: &dyn Storage,
    identity: &[u8; 32],
    header: &Header,
) -> JournalOwner {
    let journal_bits = journal_bits(header);
    match Contents::read(journal, identity, journal_bits) {
        Ok(Ok(contents)) => match contents.match_image(identity, journal_bits) {
            JournalMatch::Complete if !contents.changes_anything() => JournalOwner::Unnecessary,
            JournalMatch::Complete | JournalMatch::Truncated => JournalOwner::ThisImage,
            JournalMatch::None => JournalOwner::Other,
        },
        Ok(Err(NoSlot::Damaged)) | Err(_) if journal_bits.bits & MARK != 0 => {
            JournalOwner::Unreadable
        }
        Ok(Err(_)) | Err(_) => JournalOwner::Other,
    }
}

pub(in crate::qcow2) enum Found {
    Nothing,
    /// There is no journal, although the image says that it has one.
    Missing,
    /// There is a journal, but not one of this image in its current state.
    Outdated,
    /// The journal of the image, perhaps without changes.
    Changes {
        changes: Vec<Change>,
        /// Nothing in the file is newer than these changes.
        all: bool,
    },
}

/// The content of a journal's file.
struct Contents {
    slot: Slot,
    changes: Vec<Change>,
    /// The generation that the image had with the last of the changes.
    generation: u64,
    /// There is nothing after the start, not even a part of a record.
    empty: bool,
}

/// Why a journal's file has no valid slot.
enum NoSlot {
    /// Nothing was ever written to it.
    Empty,
    /// It contains records, and a slot is always written before records.
    Damaged,
}

/// How a journal relates to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JournalMatch {
    /// It is the image's journal, with everything that was acknowledged.
    Complete,
    /// It was the image's journal, and has lost acknowledged changes.
    Truncated,
    /// It is the journal of another image, or of another state of this one.
    None,
}

impl Contents {
    /// That of the newest slot, or of the other one if that is of an earlier process and belongs to the image with these bits.
    fn read(
        journal: &dyn Storage,
        identity: &[u8; 32],
        image: JournalBits,
    ) -> io::Result<Result<Self, NoSlot>> {
        let size = journal.size()?;
        let mut slots = Slot::read(journal)?.into_iter();
        let Some(newest) = slots.next() else {
            return Ok(Err(if size > RECORDS_AT.0 {
                NoSlot::Damaged
            } else {
                NoSlot::Empty
            }));
        };
        let other = slots.next().filter(|slot| slot.session != newest.session);
        let newest = Self::of(newest, journal, size)?;
        if let Some(other) = other
            && newest.match_image(identity, image) == JournalMatch::None
            && let Ok(other) = Self::of(other, journal, size)
            && other.match_image(identity, image) != JournalMatch::None
        {
            return Ok(Ok(other));
        }
        Ok(Ok(newest))
    }

    fn of(slot: Slot, journal: &dyn Storage, size: u64) -> io::Result<Self> {
        let bytes = size.saturating_sub(slot.start.0);
        let mut records = vec![0; bytes.min(READ_MAX) as usize];
        read_padded(journal, slot.start, &mut records)?;
        let (changes, generation, used) = slot.changes(&records);
        // What follows may be of an earlier journal, but not of a record that was cut off here.
        if bytes > READ_MAX && used > records.len() / 2 {
            return Err(io::Error::other(format!("it has {bytes} bytes")));
        }
        Ok(Self {
            slot,
            changes,
            generation,
            empty: bytes == 0,
        })
    }

    /// Whether a flush has written everything into the image with these bits, and the process died before it could say so here:
    /// see [`Journal::new_session`](super::Journal::new_session).
    fn is_made_unnecessary(&self, image: JournalBits) -> bool {
        let next = self.slot.session & GENERATION;
        image.bits & COMPLETE != 0 && generation(image.bits) == next
    }

    fn changes_anything(&self) -> bool {
        self.changes.iter().any(Change::changes_anything)
    }

    fn match_image(&self, identity: &[u8; 32], image: JournalBits) -> JournalMatch {
        let untouched = image.dirty || !self.slot.image_is_dirty();
        let marked = image.bits & MARK != 0;
        if self.slot.identity != *identity || !marked || !untouched || self.generation > GENERATION
        {
            return JournalMatch::None;
        }
        let ahead = generation(image.bits).wrapping_sub(self.generation) & GENERATION;
        match ahead {
            0 | 1 => JournalMatch::Complete,
            2..=STAMPS_MAX => JournalMatch::Truncated,
            _ => JournalMatch::None,
        }
    }
}
