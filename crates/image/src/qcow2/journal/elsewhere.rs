//! What an image lacks because of a journal that this process does not write: one that is elsewhere, has ended, or is outdated.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use block::FileOffset;

use super::{
    COMPLETE, GENERATION, GENERATION_SHIFT, Journal, LACKING, Lost, autoclear, journal_bits,
    note_lost, random,
};
use crate::qcow2::header::Header;
use crate::qcow2::{ImageError, ImageState, Qcow2};

/// Whether an image can say anything about a journal.
fn can_say(header: &Header) -> bool {
    header.version >= 3 && header.snapshots == 0
}

/// The bits of an image without a journal that has everything.
fn complete() -> u64 {
    (random() & GENERATION) << GENERATION_SHIFT | COMPLETE
}

impl ImageState {
    /// A guest starts: nothing is missing any more that was written before.
    fn forget_lost(&mut self) -> io::Result<()> {
        let image = journal_bits(&self.header);
        if let Some(journal) = &mut self.journal {
            journal.lost = Lost::default();
        }
        match (self.outdated_journal.take(), &mut self.journal) {
            (Some(outdated), _) => outdated.set_size(0),
            (None, Some(journal)) if journal.follows_another => Ok(()),
            (None, Some(journal)) if journal.active => journal.write_slot(),
            (None, Some(journal)) => note_lost(&journal.file, image, Lost::default()),
            (None, None) => Ok(()),
        }
    }
}

impl Qcow2 {
    /// Whether the image says that it has a journal, but no process was to replay it: the image is open for reading
    /// only, or there is no place for journals.
    pub fn has_unreplayed_journal(&self) -> bool {
        let state = self.lock();
        state.journal.is_none()
            && journal_bits(&state.header).has_journal()
            && !self.has_begun_writing.load(SeqCst)
    }

    /// Whether the image lacks changes that were acknowledged. It says that it has a journal, which is not here: the host has
    /// crashed since, or the image is a copy of one that was in use, or the journal is on another host. Or the journal of its file
    /// is here, and the image does not mean it any more: another program has written to it since, or a copy was put back.
    pub fn lacks_journal(&self) -> bool {
        self.lacks_journal.load(SeqCst) || self.has_outdated_journal.load(SeqCst)
    }

    /// Refuses a guest that goes on, if the image [lacks its journal](Self::lacks_journal): returns whether it does. Nothing is
    /// written to the image then which would make that journal worthless. `was_here`: this guest was served on this host, as far as is
    /// known. One that comes from another does not rely on a journal that was left here before. Does not wait.
    pub fn refuses_guest(&self, was_here: bool) -> bool {
        let is_outdated = was_here && self.has_outdated_journal.load(SeqCst);
        let is_refused = is_outdated || self.lacks_journal.load(SeqCst);
        if is_refused {
            self.has_refused.store(true, SeqCst);
        }
        is_refused
    }

    /// A guest is here that relies on something which the image lacks: the image says so, if it does not yet and can.
    ///
    /// # Errors
    /// It may say so or not.
    pub fn note_lacking(&self) -> Result<(), ImageError> {
        let mut state = self.lock();
        let bits = journal_bits(&state.header);
        let is_own = state.journal.as_ref().is_some_and(|journal| journal.active);
        // What another ringdisk has said since is right: the guest may have started there.
        let is_said = bits.has_any() && !is_own;
        if is_said || !can_say(&state.header) || self.check_writable().is_err() {
            return Ok(());
        }
        self.lacks_journal.store(true, SeqCst);
        let own = state.journal.as_mut().map_or(0, |journal| {
            journal.lacking = true;
            journal.autoclear()
        });
        let before = state.header.clone();
        state.header.set_journal(match own {
            0 => autoclear(random() & GENERATION) | LACKING,
            own => own,
        });
        self.write_header(&mut state)
            .inspect_err(|_| state.header = before)?;
        self.file.flush()
    }

    /// Notes whether an image that has just been opened for writing lacks its journal.
    pub(in crate::qcow2) fn look_for_journal(&self) {
        let mut state = self.lock();
        let bits = journal_bits(&state.header).bits();
        let is_here = state.journal.as_ref().is_some_and(|journal| journal.ended);
        let is_missing = !is_here && bits != 0 && bits & COMPLETE == 0;
        let is_known = (state.journal.as_ref()).is_some_and(|it| it.lost.elsewhere);
        let lacking = is_missing || is_known || bits & LACKING != 0;
        self.lacks_journal.store(lacking, SeqCst);
        let image = journal_bits(&state.header);
        let Some(journal) = &mut state.journal else {
            return;
        };
        journal.lacking = lacking;
        if is_missing {
            journal.lost.elsewhere = true;
            // Without it, nothing knows that any more if another program removes what the image says.
            let _ = note_lost(&journal.file, image, journal.lost);
        }
    }

    /// Everything that was acknowledged is in the image, since its journal was replayed: it says so, unless more is missing.
    ///
    /// # Errors
    /// It may say so or not.
    pub(in crate::qcow2) fn mark_complete(&self) -> Result<(), ImageError> {
        if self.has_outdated_journal.load(SeqCst) {
            return Ok(());
        }
        let mut state = self.lock();
        let bits = journal_bits(&state.header).bits();
        state.header.set_journal(bits | COMPLETE);
        self.write_header(&mut state)?;
        self.file.flush()
    }

    /// Removes what the image says about a journal that it [lacks](Self::lacks_journal), durably, and what is left of that journal
    /// here: its changes are lost. The image does not lack them any more.
    ///
    /// # Errors
    /// The image still says so, or may say so after a crash; or the journal is still there.
    pub fn forget_journal(&self) -> Result<(), ImageError> {
        let _flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.lacks_journal() || self.check_writable().is_err() {
            return Ok(());
        }
        self.has_refused.store(false, SeqCst);
        let mut state = self.lock();
        let is_noted = (state.journal.as_ref()).is_some_and(|it| it.lost.any());
        if self.has_outdated_journal.swap(false, SeqCst) || is_noted {
            state.forget_lost().map_err(|source| ImageError::Io {
                doing: "emptying the journal",
                at: FileOffset(0),
                source,
            })?;
        }
        if !self.lacks_journal.swap(false, SeqCst) {
            return Ok(());
        }
        let before = state.header.clone();
        let own = state.journal.as_mut().map_or(0, |journal| {
            journal.lacking = false;
            journal.autoclear()
        });
        // Other hosts may still miss something.
        let bits = match own {
            0 if can_say(&state.header) => complete(),
            own => own,
        };
        state.header.set_journal(bits);
        self.write_header(&mut state)
            .inspect_err(|_| state.header = before)?;
        self.file.flush()
    }

    /// Ends the journal of an image that is being closed and whose changes are all in the file. The journal's file
    /// is empty then, unless its content may still be wanted.
    pub(in crate::qcow2) fn close_journal(&self, state: &mut ImageState) -> Result<(), ImageError> {
        // A journal that is elsewhere may still be found, so the image must keep the bits of that one.
        let is_ours = |journal: &Journal| journal.active || journal.ended;
        if state.journal.as_ref().is_some_and(is_ours) {
            let lacks = self.lacks_journal.load(SeqCst);
            let is_lost_here = self.has_outdated_journal.load(SeqCst);
            let image = journal_bits(&state.header);
            if image.has_journal() || image.has_any() && lacks {
                // What is missing stays missing, with no journal at all; and what is not missed any more is not, elsewhere.
                let bits = match lacks {
                    true => autoclear(random() & GENERATION) | LACKING,
                    false if is_lost_here || !can_say(&state.header) => 0,
                    false => complete(),
                };
                state.header.set_journal(bits);
                self.write_header(state)?;
                self.file.flush()?;
            }
            if let Some(journal) = &mut state.journal {
                journal.end();
            }
            (state.changes.on, state.refcounts.changes.on) = (false, false);
            // The next write begins the journal again.
            self.has_begun_writing.store(false, SeqCst);
        }
        Ok(())
    }
}
