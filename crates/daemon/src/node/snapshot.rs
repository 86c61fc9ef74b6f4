//! External snapshots: a disk moves to an image that builds on the one that it used. This is
//! [a replacement of a file](datapath::Disk::replace) in which the old file stays in use, for reading:
//!
//! 1. The new image is opened and locked, with all that it builds on. The old file is locked for reading as well, through a
//!    descriptor of its own, although it is locked for writing: each lock keeps other writers away, so that there is no gap
//!    when the write lock is released.
//! 2. The guest pauses, requests in flight finish, and the old file is made durable.
//! 3. The old image is written completely: its tables, the space that it no longer uses, and that it has no journal.
//! 4. The new image is read again, with all that it builds on, since its copy of the old image's tables is out of date.
//!    Now it reads what the guest has read.
//! 5. It is persisted that the disk is on the new image, and the guest continues there.
//! 6. The old image is closed, with nothing left to write, and its write lock is released.
//!
//! An error before 5 leaves the disk on the old image, still locked: its next write begins a new journal. A kill before 5
//! leaves {the old image, as it was closed in 3 or with its journal}; while 5 is persisted, the new image has no writes yet,
//! and {either} is right; afterwards {the new one}, above an old one that nothing writes to.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use block::Backing;
use engine::{DiskFile, Identity};
use image::{FileIndex, Format, Image};

use super::{Node, NodeError};
use crate::config::spec::FileSpec;
use crate::state::left::FileMark;

/// A file that is being closed, which may have another name than before.
pub struct Closing {
    spec: FileSpec,
    open: Option<(PathBuf, File)>,
}

impl Closing {
    /// The file as it is. Asks storage.
    pub fn mark(&self) -> Option<FileMark> {
        match &self.open {
            Some((path, file)) => Some(FileMark::of_regular(path, &file.metadata().ok()?)),
            None => FileMark::of(&self.spec),
        }
    }

    pub fn spec(&self) -> &FileSpec {
        &self.spec
    }
}

impl Node {
    /// The files that it has locked for writing.
    pub fn written(&self) -> Vec<Identity> {
        let state = self.state();
        if state.image.is_none() {
            return Vec::new();
        }
        let files = state.files.iter().chain(&state.file);
        let written = files.filter(|file| !file.facts().read_only);
        written.map(|file| file.identity()).collect()
    }

    /// The first of these files that this image builds on, without having it as its own, if it has data above that.
    fn below_its_data(&self, files: &[Arc<DiskFile>]) -> Option<FileIndex> {
        let (chain, ours) = {
            let state = self.state();
            let chain = state.image.as_ref().and_then(Image::chain)?.clone();
            let ours: Vec<_> = state.files.iter().map(|file| file.identity()).collect();
            (chain, ours)
        };
        let index = |found: usize| FileIndex(found as u16);
        let is_below = |file: &Arc<DiskFile>| {
            let there = file.identity();
            let ours = ours.iter().position(|ours| *ours == there);
            !self.is_on(there) && ours.is_some_and(|ours| !chain.is_unwritten_above(index(ours)))
        };
        files.iter().position(is_below).map(index)
    }

    /// Checks that this image is no fresh overlay over a file below what a disk is on: it would lack the data above.
    ///
    /// # Errors
    /// It is.
    pub fn check_not_older(&self, before: &Self) -> Result<(), NodeError> {
        let (chain, files) = {
            let state = self.state();
            let chain = state.image.as_ref().and_then(Image::chain).cloned();
            (chain, state.files.clone())
        };
        let below = before.below_its_data(&files);
        let is_fresh = |below| chain.is_some_and(|chain| chain.is_unwritten_above(below));
        if below.is_some_and(is_fresh) {
            let why = "has nothing of its own, and builds on a file below what the disk is on";
            let (above, below) = (self.filename.clone(), before.filename.clone());
            return Err(NodeError::Above(above, why, below, before.format));
        }
        Ok(())
    }

    /// What tells about its file once that is closed.
    pub fn closing(&self) -> Closing {
        let state = self.state();
        let file = state.files.first().or(state.file.as_ref());
        let file = file.filter(|file| file.backing() == Backing::File);
        let name = file.and_then(|file| file.name());
        let reference = file.and_then(|file| file.reference().ok());
        Closing {
            spec: self.spec.file.clone(),
            open: name.zip(reference),
        }
    }

    /// Its file, and those below that, as they were opened, each with whether the images above have no data. Asks storage.
    pub fn marks(&self) -> Vec<(FileMark, bool)> {
        let (chain, files, top) = {
            let state = self.state();
            let chain = state.image.as_ref().and_then(Image::chain).cloned();
            let top = state.files.first().or(state.file.as_ref()).cloned();
            (chain, state.files.clone(), top)
        };
        let mark = |file: &DiskFile| {
            let path = file.name()?;
            match file.backing() {
                Backing::File => Some(FileMark::of_regular(&path, file.found())),
                Backing::BlockDevice => FileMark::at(&path),
            }
        };
        let top = top.filter(|file| file.backing() == Backing::File);
        let top = top.and_then(|file| mark(&file));
        let Some(top) = top.or_else(|| FileMark::of(&self.spec.file)) else {
            return Vec::new();
        };
        let below = files
            .iter()
            .enumerate()
            .skip(1)
            .filter_map(|(index, file)| {
                let mark = mark(file)?;
                let index = FileIndex(index as u16);
                let nothing_above = chain
                    .as_ref()
                    .is_some_and(|it| it.is_unwritten_above(index));
                Some((mark, nothing_above))
            });
        std::iter::once((top, true)).chain(below).collect()
    }

    /// If this node builds on the files of `before`, which the disk uses until now, writes that one completely and reads it
    /// again, so that this node can replace it. No request is in flight there, and everything is durable. Returns whether
    /// this node builds on the other.
    ///
    /// # Errors
    /// This image describes the other one wrongly, or one of them could not be written or read. The other one stays usable.
    pub fn reopen_over(&self, before: &Self) -> Result<bool, NodeError> {
        let ours = before.written();
        let (chain, file, files) = {
            let state = self.state();
            let chain = state.image.as_ref().and_then(Image::chain);
            (chain.cloned(), state.file.clone(), state.files.clone())
        };
        let builds_on_ours = files.iter().any(|file| ours.contains(&file.identity()));
        if !builds_on_ours {
            self.check_not_older(before)?;
        }
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
            let (above, below) = (self.filename.clone(), before.filename.clone());
            return Err(NodeError::Above(above, why, below, before.format));
        }
        let fail = |e| NodeError::Io(before.filename.clone(), "be written to its end", e);
        before.write_clean_state().map_err(fail)?;
        let _changes = self.lock_changes();
        let (state, _) = self.read_anew(path, &file, &ours, &files)?;
        self.put_in(state);
        Ok(true)
    }
}
