//! A disk that goes on in an image that builds on the one that it was on: an external snapshot. It is
//! [a file that takes the place of another](datapath::Disk::replace), where the other stays in use, to be read:
//!
//! 1. The new image is opened and locked, and all that it builds on. What the disk writes to is locked to be read besides,
//!    through a descriptor of its own, though it is locked to be written: whoever wants to write to it is kept away by
//!    both, so that there is no moment in between when the second one goes.
//! 2. The guest pauses, what is under way ends, and the old file is made durable.
//! 3. The old image is written to its end: its tables, the space that it no longer uses, and that it has no journal.
//! 4. The new image is read again, with all that it builds on, since what it knows of the old one's tables is older. From
//!    here on, it reads what the guest has read.
//! 5. It is recorded that the disk is on the new image, and the guest goes on in it.
//! 6. The old image is closed, of which nothing is left to be written, and its lock to write is given up.
//!
//! What fails before 5 leaves the disk on the old image, locked as ever: it begins a journal anew with its next write. A
//! kill before 5 leaves {the old image, as it was closed in 3 or with its journal}; while it is recorded, the new one has
//! nothing written in it, and {either} is right; from then on {the new one}, above an old one that nobody writes to.

use engine::Identity;
use image::{FileIndex, Format, Image};

use super::{Node, NodeError};
use crate::config::spec::FileSpec;

impl Node {
    /// The files that it has locked to write to them.
    pub fn written(&self) -> Vec<Identity> {
        let state = self.state();
        if state.image.is_none() {
            return Vec::new();
        }
        let files = state.files.iter().chain(&state.file);
        let written = files.filter(|file| !file.facts().read_only);
        written.map(|file| file.identity()).collect()
    }

    /// If this builds on what the disk has been writing to on another node, has that one written to its end and reads it,
    /// so that this can take its place. Nothing is under way there, and all of it is durable. Returns whether it is so.
    ///
    /// # Errors
    /// It takes the other one for something else than it is, that one could not be written, or this not be read. The other
    /// one can go on.
    pub fn reopen_over(&self, before: &Self) -> Result<bool, NodeError> {
        let ours = before.written();
        let (chain, file, files) = {
            let state = self.state();
            let chain = state.image.as_ref().and_then(Image::chain);
            (chain.cloned(), state.file.clone(), state.files.clone())
        };
        let builds_on_ours = files.iter().any(|file| ours.contains(&file.identity()));
        let (Some(chain), Some(file), FileSpec::Path(path), true) =
            (chain, file, &self.spec.file, builds_on_ours)
        else {
            return Ok(false);
        };
        let below = files.iter().position(|file| before.is_on(file.identity()));
        let below = below.map(|below| FileIndex(below as u16));
        let same = |below| chain.is_raw(below) == (before.format == Format::Raw);
        let why = match below {
            Some(below) if !same(below) => "takes what the disk is on for something else",
            Some(below) if !chain.is_unwritten_above(below) => "has been written to",
            Some(_) => "",
            None => "builds on a part of what the disk is on",
        };
        if !why.is_empty() {
            let (its, below) = (self.filename.clone(), before.filename.clone());
            return Err(NodeError::Above(its, why, below, before.format));
        }
        let fail = |e| NodeError::Io(before.filename.clone(), "be written to its end", e);
        before.write_clean_state().map_err(fail)?;
        let _changes = self.lock_changes();
        let (state, _) = self.read_anew(path, &file, &ours)?;
        self.put_in(state);
        Ok(true)
    }
}
