//! The dirty bitmaps of a disk: in its image, or, if it is in none, in [files of their own](super::raw_bitmaps).

use std::io;
use std::sync::Arc;

use block::{Backing, DirtyBitmap, DirtyBitmaps};
use image::{Chain, Image, Qcow2, UnusableBitmap};

use super::Node;
use super::raw_bitmaps::{self, RawBitmaps};

/// The default granularity of disks without clusters, in bytes, as in QEMU.
const GRANULARITY_OF_RAW: u64 = 65536;

/// Bitmaps that take the place of the present ones.
pub enum PreparedBitmaps {
    InImage(Vec<Arc<DirtyBitmap>>),
    OfRaw(raw_bitmaps::Prepared),
}

impl Node {
    /// Does something with the image that has the bitmaps, if there is one.
    fn with_image<T>(&self, f: impl FnOnce(&Qcow2) -> T) -> Option<T> {
        let chain: Option<Arc<Chain>> = self.state().image.as_ref().and_then(Image::chain).cloned();
        chain?.image().filter(|_| !self.facts.read_only).map(f)
    }

    /// The bitmaps of a disk that is writable and in no image.
    fn raw_bitmaps(&self) -> Option<Arc<RawBitmaps>> {
        self.state().raw_bitmaps.clone()
    }

    /// Whether the state directory notes what changes, because of persistent bitmaps in no image.
    pub fn has_notes(&self) -> bool {
        self.raw_bitmaps().is_some_and(|raw| raw.has_notes())
    }

    /// Whether the disk can have bitmaps: it is writable, and stores something.
    pub fn has_bitmaps(&self) -> bool {
        self.with_image(|_| ()).is_some() || self.raw_bitmaps().is_some()
    }

    /// Marks the bitmaps that are stored in the image as in use.
    ///
    /// # Errors
    /// They could not be marked.
    pub fn use_bitmaps(&self) -> io::Result<()> {
        let _changes = self.lock_changes();
        let used = self.with_image(|image| image.use_bitmaps());
        used.unwrap_or(Ok(())).map_err(io::Error::other)
    }

    fn all_bitmaps(&self) -> Option<Arc<DirtyBitmaps>> {
        let in_image = self.with_image(|image| image.bitmaps().clone());
        in_image.or_else(|| Some(self.raw_bitmaps()?.bitmaps().clone()))
    }

    /// The bitmaps that are loaded.
    pub fn bitmaps(&self) -> Vec<Arc<DirtyBitmap>> {
        self.all_bitmaps().map(|all| all.all()).unwrap_or_default()
    }

    /// The bitmaps that are stored and cannot be used.
    pub fn unusable_bitmaps(&self) -> Vec<UnusableBitmap> {
        let unusable = self.with_image(|image| image.unusable_bitmaps());
        let unusable = unusable.or_else(|| Some(self.raw_bitmaps()?.unusable()));
        unusable.unwrap_or_default()
    }

    /// Checks that a new bitmap can be stored.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_new_bitmap(&self) -> Result<(), String> {
        let checked = self.with_image(|image| image.check_new_bitmap());
        let checked = checked.or_else(|| Some(self.raw_bitmaps()?.check_new()));
        checked.unwrap_or(Ok(()))
    }

    /// Prepares to replace the bitmaps that are loaded by `bitmaps`; those in `removed` are not stored any more, durably. No
    /// request is in flight, until the new ones are [set](Self::set_bitmaps) or [given up](Self::give_up_bitmaps).
    ///
    /// # Errors
    /// Some of `removed` may not be stored any more.
    pub fn prepare_bitmaps(
        &self,
        removed: &[&str],
        bitmaps: Vec<Arc<DirtyBitmap>>,
    ) -> io::Result<PreparedBitmaps> {
        let _changes = self.lock_changes();
        if let Some(raw) = self.raw_bitmaps() {
            return raw.prepare(removed, bitmaps).map(PreparedBitmaps::OfRaw);
        }
        if !removed.is_empty() {
            let removed = self.with_image(|image| image.remove_stored_bitmaps(removed));
            removed.unwrap_or(Ok(())).map_err(io::Error::other)?;
        }
        Ok(PreparedBitmaps::InImage(bitmaps))
    }

    /// Replaces the bitmaps that are loaded. No request is in flight.
    pub fn set_bitmaps(&self, new: PreparedBitmaps) {
        let _changes = self.lock_changes();
        match (new, self.raw_bitmaps()) {
            (PreparedBitmaps::InImage(bitmaps), _) => {
                self.with_image(|image| image.set_bitmaps(bitmaps));
            }
            (PreparedBitmaps::OfRaw(new), Some(raw)) => raw.replace(new),
            (PreparedBitmaps::OfRaw(_), None) => {}
        }
    }

    /// The present bitmaps stay.
    pub fn give_up_bitmaps(&self, new: &PreparedBitmaps) {
        let _changes = self.lock_changes();
        if let (PreparedBitmaps::OfRaw(new), Some(raw)) = (new, self.raw_bitmaps()) {
            raw.give_up(new);
        }
    }

    /// Adds a bitmap with a new name. Queues record in it once they take over which bitmaps do.
    pub fn add_bitmap(&self, bitmap: Arc<DirtyBitmap>) {
        if let Some(all) = self.all_bitmaps() {
            all.add(bitmap);
        }
    }

    /// Removes a temporary bitmap. Queues record in it until they take over which bitmaps do.
    pub fn remove_bitmap(&self, name: &str) {
        if let Some(all) = self.all_bitmaps() {
            all.remove(name);
        }
    }

    /// Continues the temporary bitmaps that the process before had, and nobody writes to the disk yet.
    pub fn add_temporary_bitmaps(&self, bitmaps: Vec<DirtyBitmap>) {
        let Some(all) = self.all_bitmaps() else {
            return;
        };
        let size = self.known_size();
        for bitmap in bitmaps {
            let is_new = all.find(bitmap.name()).is_none();
            if is_new && bitmap.size() == size {
                all.add(Arc::new(bitmap));
            }
        }
    }

    /// Stores the bitmaps of a disk that is in no image. It is durable, and nothing writes to it any more.
    pub(super) fn store_raw_bitmaps(&self) {
        let raw_bitmaps = self.state().raw_bitmaps.take();
        raw_bitmaps.inspect(|raw| raw.store());
    }

    /// The same for a disk that other hosts may write to from now on.
    ///
    /// # Errors
    /// Their writes would not be noticed, and the bitmaps could not be marked as inconsistent.
    pub(super) fn release_raw_bitmaps(&self) -> io::Result<()> {
        let Some(raw) = self.raw_bitmaps() else {
            return Ok(());
        };
        if self.backing() == Some(Backing::BlockDevice) {
            raw.lose_all(
                "the disk was released to another host, whose writes to a device are not noticed",
            )?;
        } else {
            raw.store();
        }
        self.state().raw_bitmaps = None;
        Ok(())
    }

    /// The default granularity of its bitmaps follows this, in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        let clusters = self.with_image(Qcow2::cluster_bytes);
        clusters.unwrap_or(GRANULARITY_OF_RAW)
    }
}
