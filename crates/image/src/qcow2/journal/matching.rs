//! Whether a journal belongs to an image, and what is in it.

use std::io;

use super::records::{Change, READ_MAX, RECORDS_AT, Slot};
use super::{GENERATION, JournalFile, MARK, OVERTAKEN, STAMPS_MAX, generation};
use crate::qcow2::header::{AUTOCLEAR_JOURNAL, Header};
use crate::storage::{Storage, read_padded};

/// What the header of an image says about its journal.
#[derive(Clone, Copy)]
pub(in crate::qcow2) struct JournalBits {
    bits: u64,
    /// The image is also dirty: no program has written to it and closed it since.
    dirty: bool,
}

impl JournalBits {
    /// Whether the image has a journal, or had one.
    pub fn has_any(self) -> bool {
        self.bits != 0
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
pub(in crate::qcow2) fn read(file: &JournalFile, image: JournalBits) -> io::Result<Found> {
    let marked = image.bits & MARK != 0;
    let contents = match Contents::read(&*file.storage)? {
        Ok(contents) => contents,
        Err(NoSlot::Damaged) if marked => {
            let problem = "its first bytes, which describe its content, are damaged";
            return Err(io::Error::other(problem));
        }
        Err(NoSlot::Damaged) => return Ok(Found::Outdated),
        Err(NoSlot::Empty) if marked => return Ok(Found::Missing),
        Err(NoSlot::Empty) => return Ok(Found::Nothing),
    };
    match (contents.match_image(&file.identity, image), contents.empty) {
        (JournalMatch::Complete, true) => Ok(Found::Nothing),
        (JournalMatch::Complete, false) => Ok(Found::Changes {
            changes: contents.changes,
            all: image.bits & OVERTAKEN == 0,
        }),
        (JournalMatch::Truncated, _) => Err(io::Error::other(
            "its end is missing or damaged, so acknowledged changes are lost",
        )),
        // The image does not mean this old journal, whose changes have all been applied.
        (JournalMatch::None, true) if marked => Ok(Found::Missing),
        (JournalMatch::None, true) => Ok(Found::Nothing),
        (JournalMatch::None, false) => Ok(Found::Outdated),
    }
}

/// Whether there is a journal here for an image whose header says this, even one that keeps the image from being
/// opened.
pub(in crate::qcow2) fn fits(file: &JournalFile, image: JournalBits) -> bool {
    match Contents::read(&*file.storage) {
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
    /// Unknown: the journal cannot be read, and this image has a journal.
    Unreadable,
    /// Another image, an earlier state of this one, or none.
    Other,
}

/// Whether a journal that was found somewhere belongs to the image with this header.
pub(in crate::qcow2) fn owner(
    journal: &dyn Storage,
    identity: &[u8; 32],
    header: &Header,
) -> JournalOwner {
    let journal_bits = journal_bits(header);
    match Contents::read(journal) {
        Ok(Ok(contents)) => match contents.match_image(identity, journal_bits) {
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
    fn read(journal: &dyn Storage) -> io::Result<Result<Self, NoSlot>> {
        let size = journal.size()?;
        let Some(slot) = Slot::newest(journal)? else {
            return Ok(Err(if size > RECORDS_AT.0 {
                NoSlot::Damaged
            } else {
                NoSlot::Empty
            }));
        };
        let bytes = size.saturating_sub(slot.start.0);
        if bytes > READ_MAX {
            return Err(io::Error::other(format!("it has {bytes} bytes")));
        }
        let mut records = vec![0; bytes as usize];
        read_padded(journal, slot.start, &mut records)?;
        let (changes, generation) = slot.changes(&records);
        Ok(Ok(Self {
            slot,
            changes,
            generation,
            empty: bytes == 0,
        }))
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
