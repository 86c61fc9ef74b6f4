//! The end of an image's life in this process: closed for good, or left to another process.

use std::sync::PoisonError;

use super::Qcow2;
use super::error::ImageError;

impl Qcow2 {
    /// Closes the image, when nobody uses it any more: what was given up is freed, and the file ends
    /// where it is used. An image that is not closed is just as sound, and may have lost some space.
    ///
    /// # Errors
    /// Something may not be durable.
    pub fn close(&self) -> Result<(), ImageError> {
        self.flush()?;
        if self.read_only || self.damage.get().is_some() {
            return Ok(());
        }
        // What the flush has freed.
        self.flush()?;
        let mut state = self.lock();
        if let Some(end) = state.refcounts.used_end(&self.file)? {
            self.file.trim(end.start(&self.g))?;
        }
        self.end_journal(&mut state)
    }

    /// Writes what only this process knows, so that another one can go on with the file. What is begun meanwhile is left
    /// out, and what was given up by then may stay counted.
    ///
    /// # Errors
    /// As of [`flush`](Self::flush).
    pub fn settle(&self) -> Result<(), ImageError> {
        if self.read_only || self.damage.get().is_some() {
            return Ok(());
        }
        // Each flush frees what the next one writes; the last is that of what the second has freed.
        for _ in 0..3 {
            let flushing = self.flushing.lock();
            let flushing = flushing.unwrap_or_else(PoisonError::into_inner);
            self.free_unused()?;
            drop(flushing);
            if !self.has_changes() {
                break;
            }
            self.flush()?;
        }
        Ok(())
    }
}
