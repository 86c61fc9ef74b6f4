//! The end of what is written to a disk's files: for now, or for good.

use std::path::PathBuf;
use std::sync::Arc;
use std::{fs, io};

use engine::DiskFile;
use image::{Image, ImageError};

use super::{Node, NodeError};

impl Node {
    /// Writes what an image has only in memory. Nothing is under way, or all of it will be written again.
    ///
    /// # Errors
    /// It could not be written.
    pub fn flush_metadata(&self) -> io::Result<()> {
        let _changes = self.lock_changes();
        let image = self.state().image.clone();
        match image {
            Some(Image::Chain(chain)) => chain
                .flush_for_handover()
                .map_err(|e| io::Error::other(e.to_string())),
            _ => Ok(()),
        }
    }

    /// Makes durable what others have written to its files, unless flushes are ignored.
    ///
    /// # Errors
    /// It could not be made durable.
    pub fn make_durable(&self) -> Result<(), NodeError> {
        if !self.spec.cache.flushes() {
            return Ok(());
        }
        let (file, files) = {
            let state = self.state();
            (state.file.clone(), state.files.clone())
        };
        let mut files = file.iter().chain(&files);
        let synced = files.try_for_each(|file| file.sync());
        synced.map_err(|e| NodeError::Io(self.filename.clone(), "be made durable", e))
    }

    /// Writes what an image has to say at its end, though it may yet go on: then it begins anew, in the journal that it has.
    /// Nothing is under way.
    ///
    /// # Errors
    /// It could not be written, and the image is no less sound for that.
    pub(super) fn write_clean_state(&self) -> io::Result<()> {
        let _changes = self.lock_changes();
        let image = self.state().image.clone();
        match image.as_ref().and_then(Image::chain) {
            Some(chain) if !self.facts.read_only => chain.close().map_err(io::Error::other),
            _ => Ok(()),
        }
    }

    /// Makes what guests wrote durable, at the end: their requests are done by then, but what they did not
    /// flush is only in the write cache.
    ///
    /// # Errors
    /// It could not be made durable.
    pub fn sync(&self) -> io::Result<()> {
        let _changes = self.lock_changes();
        let (image, file, last) = {
            let state = self.state();
            let users = match &state.image {
                Some(Image::Chain(chain)) => Arc::strong_count(chain),
                _ => 1,
            };
            // Neither a disk has it, nor a node above or below.
            let last = users == 1 && Arc::strong_count(&self.shared) == 1;
            (state.image.clone(), state.file.clone(), last)
        };
        let Some(image) = image else {
            return Ok(());
        };
        if let Image::Chain(chain) = &image
            && !self.facts.read_only
        {
            return match last {
                true => self.close_image(&image, &[]),
                false => chain.flush().map_err(io::Error::other),
            };
        }
        if self.facts.read_only || !self.spec.cache.flushes() {
            return Ok(());
        }
        match (file, &self.rbd) {
            (Some(file), _) => file.sync(),
            (None, Some(rbd)) => block::Remote::sync(&**rbd),
            (None, None) => Ok(()),
        }
    }

    /// The journal in which all is that guests wrote, if what an image has in memory could not be written for want of space.
    pub fn journal_of_all(&self, error: &io::Error) -> Option<PathBuf> {
        let error = error.get_ref()?.downcast_ref::<ImageError>()?;
        // Another error may have cost data.
        let is_space = !error.is_permanent() && block::is_no_space(error.errno());
        let state = self.state();
        let image = state.image.as_ref()?.chain()?.image()?;
        match is_space && image.is_journaled() {
            true => state.journal.clone(),
            false => None,
        }
    }

    /// Closes what no disk is on any more, or was not yet: writes what an image has to say at its end, removes its
    /// journal, and gives the locks up. All that guests wrote is durable.
    ///
    /// # Errors
    /// The image is not closed, and no less sound for that. The locks are given up all the same.
    pub fn close(&self) -> io::Result<()> {
        let _changes = self.lock_changes();
        let (image, files) = {
            let mut state = self.state();
            let mut files: Vec<_> = state.files.drain(..).collect();
            files.extend(state.file.take());
            (state.image.take(), files)
        };
        let closed = match image {
            Some(image) if !self.facts.read_only => self.close_image(&image, &[]),
            _ => Ok(()),
        };
        unlock(&files)?;
        closed
    }

    /// Writes what an image has to say at its end, makes `files` durable, whatever the cache mode says, and removes the
    /// journal. Not before: if anything fails, the image stays in use, and what is written from then on is kept there.
    pub(super) fn close_image(&self, image: &Image, files: &[Arc<DiskFile>]) -> io::Result<()> {
        if let Some(chain) = image.chain() {
            chain.close().map_err(io::Error::other)?;
        }
        files.iter().try_for_each(|file| file.sync())?;
        let journal = self.state().journal.take();
        // One that has something in it is that of another image, or of an image that could not be closed.
        if let Some(path) = journal.filter(|path| path.metadata().is_ok_and(|m| m.len() == 0)) {
            // What stays does no harm: the image knows that it is not its journal.
            let _ = fs::remove_file(path);
        }
        Ok(())
    }
}

/// Gives locks up, one by one: the kernel may still hold descriptors of each file, which would keep its lock.
pub(super) fn unlock(files: &[Arc<DiskFile>]) -> io::Result<()> {
    let mut result = Ok(());
    for file in files {
        // All of them, whatever becomes of one.
        result = result.and(file.unlock());
    }
    result
}
