//! Flushes and closes the files of a disk.

use std::path::PathBuf;
use std::sync::Arc;
use std::{fs, io};

use engine::DiskFile;
use image::{Image, ImageError};

use super::{Node, NodeError};

/// The image may go on, and its bitmaps may not be as large as the disk any more.
const NOT_STORED: &str = "it could not be stored in its image";

impl Node {
    /// Writes metadata that an image has only in memory. No request is in flight, or this will be called again.
    ///
    /// # Errors
    /// It could not be written.
    pub fn flush_metadata(&self) -> io::Result<()> {
        let _changes = self.lock_changes();
        self.note_generation();
        let image = self.state().image.clone();
        match image {
            Some(Image::Chain(chain)) => chain
                .flush_for_handover()
                .map_err(|e| io::Error::other(e.to_string())),
            _ => Ok(()),
        }
    }

    /// As [`flush_metadata`](Self::flush_metadata), when no request is in flight. The bitmaps of the image are stored too.
    ///
    /// # Errors
    /// They could not be written.
    pub fn flush_for_successor(&self) -> io::Result<()> {
        self.flush_metadata()?;
        let _changes = self.lock_changes();
        let (image, recorded_bitmaps) = {
            let state = self.state();
            (state.image.clone(), state.recorded_bitmaps.clone())
        };
        (recorded_bitmaps.as_ref()).inspect(|bitmaps| bitmaps.suspend());
        let is_kept = |name: &str, error: &ImageError| {
            (recorded_bitmaps.as_ref()).is_some_and(|bitmaps| bitmaps.is_kept(name, error))
        };
        let Some(image) = image.as_ref().and_then(|image| image.chain()?.image()) else {
            return Ok(());
        };
        image.store_bitmaps_for_handover(is_kept).map_err(|e| {
            (recorded_bitmaps.as_ref()).inspect(|bitmaps| bitmaps.record_lost(NOT_STORED));
            io::Error::other(e)
        })
    }

    /// Makes durable what other processes have written to its files, unless flushes are ignored.
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

    /// Writes an image as if it was closed, though it may continue: then it starts its journal again. No request is in
    /// flight.
    ///
    /// # Errors
    /// It could not be written. The image is still consistent.
    pub(super) fn write_clean_state(&self) -> io::Result<()> {
        let _changes = self.lock_changes();
        self.note_generation();
        let (image, recorded_bitmaps) = {
            let state = self.state();
            (state.image.clone(), state.recorded_bitmaps.clone())
        };
        (recorded_bitmaps.as_ref()).inspect(|bitmaps| bitmaps.suspend());
        let closed = match image.as_ref().and_then(Image::chain) {
            Some(chain) if !self.facts.read_only => chain.close().map_err(io::Error::other),
            _ => Ok(()),
        };
        recorded_bitmaps.inspect(|bitmaps| bitmaps.record_lost(NOT_STORED));
        closed
    }

    /// Makes the guests' writes durable at the end. Their requests have finished, but writes without a flush may be in
    /// a write cache.
    ///
    /// # Errors
    /// It could not be made durable.
    pub fn sync(&self) -> io::Result<()> {
        let _changes = self.lock_changes();
        let (image, file, last) = {
            let state = self.state();
            // `recorded_bitmaps` is one of them.
            let others = usize::from(state.recorded_bitmaps.is_some());
            let users = match &state.image {
                Some(Image::Chain(chain)) => Arc::strong_count(chain) - others,
                Some(Image::Raw(bitmaps)) if others > 0 => Arc::strong_count(bitmaps) - others,
                _ => 1,
            };
            // No disk uses it, nor a node above or below.
            let last = users == 1 && Arc::strong_count(&self.shared) == 1;
            (state.image.clone(), state.file.clone(), last)
        };
        let Some(image) = image else {
            return Ok(());
        };
        if let Image::Chain(chain) = &image
            && !self.facts.read_only
        {
            if last {
                self.close_image(&image, &[])?;
                self.store_recorded_bitmaps();
                return Ok(());
            }
            return chain.flush().map_err(io::Error::other);
        }
        if self.facts.read_only {
            return Ok(());
        }
        if self.spec.cache.flushes() {
            match (file, &self.rbd) {
                (Some(file), _) => file.sync()?,
                (None, Some(rbd)) => block::Remote::sync(&**rbd)?,
                (None, None) => {}
            }
        }
        if last {
            self.store_recorded_bitmaps();
        }
        Ok(())
    }

    /// The journal that has all acknowledged writes, if metadata of the image could not be written because space ran
    /// out.
    pub fn journal_of_all(&self, error: &io::Error) -> Option<PathBuf> {
        let error = error.get_ref()?.downcast_ref::<ImageError>()?;
        // Other errors may have lost data.
        let is_space = !error.is_permanent() && block::is_no_space(error.errno());
        let state = self.state();
        let image = state.image.as_ref()?.chain()?.image()?;
        if is_space && image.is_journaled() {
            state.journal.clone()
        } else {
            None
        }
    }

    /// Closes a node that no disk uses: writes the final state of its image, removes its journal, and releases the
    /// locks. All writes are durable.
    ///
    /// # Errors
    /// The image is not closed, but consistent. The locks are released regardless.
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
        if closed.is_ok() {
            self.store_recorded_bitmaps();
        }
        unlock(&files)?;
        closed
    }

    /// Writes the final state of an image, makes `files` durable in every cache mode, and then removes the journal.
    /// After an error, the image stays in use with its journal.
    pub(super) fn close_image(&self, image: &Image, files: &[Arc<DiskFile>]) -> io::Result<()> {
        if let Some(chain) = image.chain() {
            self.note_generation();
            chain.close().map_err(|e| {
                let recorded_bitmaps = self.recorded_bitmaps();
                recorded_bitmaps.inspect(|bitmaps| bitmaps.record_lost(NOT_STORED));
                io::Error::other(e)
            })?;
        }
        files.iter().try_for_each(|file| file.sync())?;
        let journal = self.state().journal.take();
        // A journal that is not empty belongs to another image, or to one that could not be closed.
        if let Some(path) = journal.filter(|path| path.metadata().is_ok_and(|m| m.len() == 0)) {
            // Failure is harmless: the image records that it has no journal.
            let _ = fs::remove_file(path);
        }
        Ok(())
    }
}

/// Releases locks explicitly: the kernel may still hold descriptors of a file, which would keep its lock.
pub(super) fn unlock(files: &[Arc<DiskFile>]) -> io::Result<()> {
    let mut result = Ok(());
    for file in files {
        // All of them, also after an error.
        result = result.and(file.unlock());
    }
    result
}
