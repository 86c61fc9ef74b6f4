//! The dirty bitmaps of a disk in an image.

use std::io;
use std::sync::Arc;

use block::DirtyBitmap;
use image::{Chain, Image, Qcow2, UnusableBitmap};

use super::Node;

impl Node {
    /// Does something with the image that has the bitmaps, if there is one.
    fn with_bitmaps<T>(&self, f: impl FnOnce(&Qcow2) -> T) -> Option<T> {
        let chain: Option<Arc<Chain>> = self.state().image.as_ref().and_then(Image::chain).cloned();
        chain?.image().filter(|_| !self.facts.read_only).map(f)
    }

    /// Whether the disk can have bitmaps: it is in an image that is open for writing.
    pub fn has_bitmaps(&self) -> bool {
        self.with_bitmaps(|_| ()).is_some()
    }

    /// Marks the bitmaps that are stored in the image as in use.
    ///
    /// # Errors
    /// They could not be marked.
    pub fn use_bitmaps(&self) -> io::Result<()> {
        let _changes = self.lock_changes();
        let used = self.with_bitmaps(|image| image.use_bitmaps());
        used.unwrap_or(Ok(())).map_err(io::Error::other)
    }

    /// The bitmaps that are loaded.
    pub fn bitmaps(&self) -> Vec<Arc<DirtyBitmap>> {
        let all = self.with_bitmaps(|image| image.bitmaps().all());
        all.unwrap_or_default()
    }

    /// The bitmaps that are stored in the image and cannot be used.
    pub fn unusable_bitmaps(&self) -> Vec<UnusableBitmap> {
        let unusable = self.with_bitmaps(|image| image.unusable_bitmaps());
        unusable.unwrap_or_default()
    }

    /// Checks that a new bitmap can be stored in the image.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_new_bitmap(&self) -> Result<(), String> {
        let checked = self.with_bitmaps(|image| image.check_new_bitmap());
        checked.unwrap_or(Ok(()))
    }

    /// Removes bitmaps from the image, durably. No request is in flight.
    ///
    /// # Errors
    /// Some may still be there.
    pub fn remove_stored_bitmaps(&self, names: &[&str]) -> io::Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        let _changes = self.lock_changes();
        let removed = self.with_bitmaps(|image| image.remove_stored_bitmaps(names));
        removed.unwrap_or(Ok(())).map_err(io::Error::other)
    }

    /// Replaces the bitmaps that are loaded. No request is in flight.
    pub fn set_bitmaps(&self, bitmaps: Vec<Arc<DirtyBitmap>>) {
        let _changes = self.lock_changes();
        self.with_bitmaps(|image| image.set_bitmaps(bitmaps));
    }

    /// Continues the temporary bitmaps that the process before had, and nobody writes to the disk yet.
    pub fn add_temporary_bitmaps(&self, bitmaps: Vec<DirtyBitmap>) {
        self.with_bitmaps(|image| {
            for bitmap in bitmaps {
                let is_new = image.bitmaps().find(bitmap.name()).is_none();
                if is_new && bitmap.size() == image.size() {
                    image.bitmaps().add(Arc::new(bitmap));
                }
            }
        });
    }

    /// The cluster size of the image in bytes, or 0.
    pub fn cluster_bytes(&self) -> u64 {
        self.with_bitmaps(Qcow2::cluster_bytes).unwrap_or(0)
    }
}
