//! Which journal is an image's, and what is in it.

use std::io;

use block::FileOffset;

use super::records::{Change, READ_MAX, RECORDS_AT, Slot};
use super::{GENERATION, JournalPlace, MARK, OVERTAKEN, STAMPS_MAX, generation};
use crate::qcow2::header::{AUTOCLEAR_JOURNAL, Header};
use crate::qcow2::open::read_header;
use crate::storage::{Storage, read_padded};

/// What an image says of its journal.
#[derive(Clone, Copy)]
pub(in crate::qcow2) struct Said {
    bits: u64,
    /// It is dirty, as well: nobody has written to it and closed it since.
    dirty: bool,
}

impl Said {
    /// It has one, or had one.
    pub fn has_any(self) -> bool {
        self.bits != 0
    }

    /// It is dirty because it has a journal, and its refcounts are right, unless it was dirty before as well.
    pub fn is_why_dirty(self) -> bool {
        self.dirty && self.bits & MARK != 0
    }
}

pub(in crate::qcow2) fn said(header: &Header) -> Said {
    Said {
        bits: header.autoclear & AUTOCLEAR_JOURNAL,
        dirty: header.dirty(),
    }
}

/// What is in a journal for an image that says this.
///
/// # Errors
/// It cannot be read, or has lost what had been acknowledged, or is longer than any.
pub(in crate::qcow2) fn read(place: &JournalPlace, image: Said) -> io::Result<Found> {
    let marked = image.bits & MARK != 0;
    let contents = match Contents::read(&*place.storage)? {
        Ok(contents) => contents,
        Err(NoSlot::Damaged) if marked => {
            let problem = "nothing can be made of its first bytes, which say what is in it";
            return Err(io::Error::other(problem));
        }
        Err(NoSlot::Damaged) => return Ok(Found::Outdated),
        Err(NoSlot::Empty) if marked => return Ok(Found::Missing),
        Err(NoSlot::Empty) => return Ok(Found::Nothing),
    };
    match (contents.belonging(&place.identity, image), contents.empty) {
        (Belonging::Whole, true) => Ok(Found::Nothing),
        (Belonging::Whole, false) => Ok(Found::Changes {
            changes: contents.changes,
            all: image.bits & OVERTAKEN == 0,
        }),
        (Belonging::CutOff, _) => Err(io::Error::other(
            "its end is missing, or damaged, and with it what had been acknowledged",
        )),
        // An old one, of which all has been done, is not the one that the image means.
        (Belonging::Other, true) if marked => Ok(Found::Missing),
        (Belonging::Other, true) => Ok(Found::Nothing),
        (Belonging::Other, false) => Ok(Found::Outdated),
    }
}

/// Whether there is a journal here for an image that says this, be it one that keeps the image from being opened.
pub(in crate::qcow2) fn fits(place: &JournalPlace, image: Said) -> bool {
    match Contents::read(&*place.storage) {
        Ok(Ok(found)) => found.belonging(&place.identity, image) != Belonging::Other,
        Ok(Err(NoSlot::Empty)) => false,
        Ok(Err(NoSlot::Damaged)) | Err(_) => image.bits & MARK != 0,
    }
}

/// Whose a journal is that was found somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JournalOf {
    /// That of this image, as both say: the image has a number that nobody knows who cannot read it.
    ThisImage,
    /// Nobody can say: it cannot be read, and this image has a journal.
    Unreadable,
    /// That of another image, or of an earlier state of this one, or of none.
    Other,
}

/// Whether a journal that was found somewhere is that of an image.
pub fn journal_of(journal: &dyn Storage, identity: &[u8; 32], image: &dyn Storage) -> JournalOf {
    let Ok((header, _)) = read_header(image) else {
        return JournalOf::Other;
    };
    let said = said(&header);
    match Contents::read(journal) {
        Ok(Ok(contents)) => match contents.belonging(identity, said) {
            Belonging::Whole | Belonging::CutOff => JournalOf::ThisImage,
            Belonging::Other => JournalOf::Other,
        },
        Ok(Err(NoSlot::Damaged)) | Err(_) if said.bits & MARK != 0 => JournalOf::Unreadable,
        Ok(Err(_)) | Err(_) => JournalOf::Other,
    }
}

pub(in crate::qcow2) enum Found {
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

/// What a journal's file has.
struct Contents {
    slot: Slot,
    changes: Vec<Change>,
    /// What the image had with the last of them.
    generation: u64,
    /// There is nothing behind the start, not even a part of a record.
    empty: bool,
}

/// Why nothing says what is in a journal's file.
enum NoSlot {
    /// Nothing was ever in it.
    Empty,
    /// There are records in it, before which a slot was written.
    Damaged,
}

/// How a journal and an image belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Belonging {
    /// It is the image's, with all that was acknowledged.
    Whole,
    /// It was the image's, and has lost what was acknowledged.
    CutOff,
    /// It is that of another image, or of another state of this one.
    Other,
}

impl Contents {
    fn read(journal: &dyn Storage) -> io::Result<Result<Self, NoSlot>> {
        let size = journal.size()?;
        let Some(slot) = Slot::newest(journal)? else {
            return Ok(Err(match size > RECORDS_AT {
                true => NoSlot::Damaged,
                false => NoSlot::Empty,
            }));
        };
        let bytes = size.saturating_sub(slot.start);
        if bytes > READ_MAX {
            return Err(io::Error::other(format!("it has {bytes} bytes")));
        }
        let mut records = vec![0; bytes as usize];
        read_padded(journal, FileOffset(slot.start), &mut records)?;
        let (changes, generation) = slot.changes(&records);
        Ok(Ok(Self {
            slot,
            changes,
            generation,
            empty: bytes == 0,
        }))
    }

    fn belonging(&self, identity: &[u8; 32], image: Said) -> Belonging {
        let untouched = image.dirty || !self.slot.image_is_dirty();
        let marked = image.bits & MARK != 0;
        if self.slot.identity != *identity || !marked || !untouched || self.generation > GENERATION
        {
            return Belonging::Other;
        }
        let ahead = generation(image.bits).wrapping_sub(self.generation) & GENERATION;
        match ahead {
            0 | 1 => Belonging::Whole,
            2..=STAMPS_MAX => Belonging::CutOff,
            _ => Belonging::Other,
        }
    }
}
