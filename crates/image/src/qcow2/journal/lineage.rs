//! Whether only ringdisk has written to an image since something was recorded about it elsewhere.
//!
//! Every process that writes to an image gives it a random generation, which it chose before, and increments that. Any
//! other program removes the generation, or the "dirty" mark ([`super`]). So if an image has one of the [generations](Generations)
//! that a process has recorded durably, this process was the last one that wrote to it.

use super::matching::JournalBits;
use super::{Change, GENERATION, generation};
use crate::qcow2::retry::MayBlock;
use crate::qcow2::types::{HostOffset, Run};
use crate::qcow2::{ImageError, Qcow2};

/// A generation is this much older at most, in stamps, when the next one is recorded. That is 4 minutes with the shortest
/// interval, and a chance of one in a million that it is a random one.
const STAMPS_MAX: u64 = 1 << 18;

/// No generation.
const NONE: u64 = u64::MAX;

/// The generations that an image may have for some minutes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generations {
    /// What the present one was incremented from.
    first: u64,
    present: u64,
    /// The random one that takes its place at the next write, or after a failure of the journal.
    next: u64,
}

impl Generations {
    /// Bytes of its encoding.
    pub const BYTES: usize = 24;

    /// The encoding. Zeroes are that of no generation which an image is likely to have.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (to, word) in (bytes.chunks_mut(8)).zip([self.first, self.present, self.next]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Any bytes are valid.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Self {
            first: word(0),
            present: word(8),
            next: word(16),
        }
    }

    /// Whether this is one of them.
    pub fn include(&self, generation: u64) -> bool {
        let is_after = |from: u64, stamps: u64| {
            from <= GENERATION && (generation.wrapping_sub(from) & GENERATION) <= stamps
        };
        let since_first = self.present.wrapping_sub(self.first) & GENERATION;
        is_after(self.first, since_first + STAMPS_MAX) || is_after(self.next, STAMPS_MAX)
    }
}

/// What an image said of its journal when it was opened.
#[derive(Default)]
pub(in crate::qcow2) struct Lineage {
    /// Its generation, if it had one, and was dirty.
    found: Option<u64>,
    /// Its journal was there, with all that was acknowledged.
    has_journal: bool,
}

impl Lineage {
    pub fn new(found: JournalBits) -> Self {
        Self {
            found: found.generation(),
            has_journal: false,
        }
    }

    /// The journal of the image was read.
    pub fn found_journal(&mut self, is_there: bool) {
        self.has_journal = is_there && self.found.is_some();
    }
}

impl Qcow2 {
    /// The generations that the image may have from now on, for some minutes. `None` if it has no journal.
    pub fn generations(&self) -> Option<Generations> {
        let state = self.lock();
        if state.header.version < 3 || state.header.snapshots > 0 {
            return None;
        }
        let journal = state.journal.as_ref()?;
        let (first, present) = match state.lineage.found {
            _ if journal.active => (journal.first_generation, journal.generation),
            // Until the first write, if it is not closed before.
            Some(found) => (found, found),
            None => (NONE, NONE),
        };
        Some(Generations {
            first,
            present,
            next: journal.next_generation,
        })
    }

    /// Whether the process that recorded these generations was the last one that wrote to the image before this one opened it.
    /// `was_killed`: the host has not crashed since, so that its journal must be there too.
    pub fn is_continued(&self, recorded: &Generations, was_killed: bool) -> bool {
        let state = self.lock();
        let is_whole = state.lineage.has_journal || !was_killed;
        is_whole && (state.lineage.found).is_some_and(|found| recorded.include(found))
    }

    /// Gives the image another generation, and the journal with it: a copy of the image that was made before has another one.
    ///
    /// # Errors
    /// It may have the same.
    pub(in crate::qcow2) fn outdate_copies(&self) -> Result<(), ImageError> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(journal) = state.journal.as_mut().filter(|journal| journal.active) else {
            return Ok(());
        };
        // A copy may have been made after the last stamp, however short ago that was.
        journal.stamped = None;
        let was_complete = journal.complete;
        // The journal has a generation only with a change: this one changes nothing.
        let header = HostOffset::START.cluster(&self.g);
        let refcount = state.refcounts.get(&self.file, header)?;
        let (run, list) = (Run::one(header), &mut state.refcounts.changes);
        list.push(Change::Refcount { run, refcount });
        if !self.record(state, MayBlock::Yes) {
            // The flush gives it a generation that the journal, which cannot be written, does not have.
            self.changes.add();
            drop(guard);
            return self.flush();
        }
        // It still has everything.
        if let Some(journal) = state.journal.as_mut().filter(|_| was_complete) {
            (journal.complete, journal.stamped) = (true, None);
            state.set_journal_bits();
            self.write_header(state)?;
        }
        let journal = state.journal.as_ref();
        let renewed = journal.map(|journal| (journal.first_generation, journal.generation));
        drop(guard);
        // No crash of the host brings back an earlier one, so that none counts any more.
        self.file.flush()?;
        if let (Some(journal), Some((first, reached))) = (&mut self.lock().journal, renewed)
            && journal.first_generation == first
        {
            journal.first_generation = reached;
        }
        Ok(())
    }
}

impl JournalBits {
    /// The generation, if the image is dirty because of its journal.
    fn generation(self) -> Option<u64> {
        self.is_why_dirty().then(|| generation(self.bits()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_are_those_of_the_last_minutes() {
        let recorded = Generations {
            first: GENERATION - 5,
            present: 10,
            next: 1 << 30,
        };
        let read = Generations::from_bytes(&recorded.to_bytes());
        assert_eq!(read, recorded);
        for (found, is_included) in [
            (GENERATION - 6, false),
            (GENERATION - 5, true),
            (10 + STAMPS_MAX, true),
            (11 + STAMPS_MAX, false),
            ((1 << 30) - 1, false),
            ((1 << 30) + STAMPS_MAX, true),
            ((1 << 30) + STAMPS_MAX + 1, false),
        ] {
            assert_eq!(recorded.include(found), is_included, "{found}");
        }
        let none = Generations {
            first: NONE,
            present: NONE,
            next: NONE,
        };
        assert!(!none.include(0) && !none.include(GENERATION));
    }
}
