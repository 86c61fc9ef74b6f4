//! Closing an image, or leaving it to another process.

use std::sync::PoisonError;

use super::Qcow2;
use super::error::ImageError;

impl Qcow2 {
    /// Closes the image after its last use: frees unlinked clusters, and truncates the file after the last
    /// used cluster. An image that is not closed is equally consistent, but may have leaked space.
    ///
    /// # Errors
    /// Something may not be durable.
    pub fn close(&self) -> Result<(), ImageError> {
        self.flush()?;
        if self.read_only || self.damage.get().is_some() {
            return Ok(());
        }
        self.store_bitmaps()?;
        // What storing them has freed.
        self.flush()?;
        let mut state = self.lock();
        if let Some(end) = state.refcounts.used_end(&self.file)? {
            self.file.trim(end.start(&self.g))?;
        }
        self.close_journal(&mut state)
    }

    /// Writes what only this process knows, so that another process can continue with the file. Allocations in progress
    /// are left out, and clusters unlinked recently may stay counted.
    ///
    /// # Errors
    /// As of [`flush`](Self::flush).
    pub fn flush_for_handover(&self) -> Result<(), ImageError> {
        if self.read_only || self.damage.get().is_some() {
            return Ok(());
        }
        // Requests that use freed clusters may end meanwhile.
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
