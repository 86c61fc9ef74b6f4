//! The dirty bitmaps of a disk: in its image, or, if it is in none or in use, in [files of their own](super::recorded_bitmaps).

use std::io;
use std::sync::Arc;

use block::{Backing, DirtyBitmap, DirtyBitmaps};
use image::{BITMAP_BYTES_MAX, Chain, Image, Qcow2, UnusableBitmap};
use tracing::warn;

use super::Node;
use super::recorded_bitmaps::{self, RecordedBitmaps};

/// The default granularity of disks without clusters, in bytes, as in QEMU.
const GRANULARITY_OF_RAW: u64 = 65536;

/// Bitmaps that take the place of the present ones.
pub enum PreparedBitmaps {
    InImage(Vec<Arc<DirtyBitmap>>),
    Recorded(recorded_bitmaps::Prepared),
}

impl Node {
    /// Does something with the image that has the bitmaps, if there is one.
    pub(super) fn with_image<T>(&self, f: impl FnOnce(&Qcow2) -> T) -> Option<T> {
        let chain: Option<Arc<Chain>> = self.state().image.as_ref().and_then(Image::chain).cloned();
        chain?.image().filter(|_| !self.facts.read_only).map(f)
    }

    /// The bitmaps of a disk that is writable, and that the state directory may keep.
    pub(super) fn recorded_bitmaps(&self) -> Option<Arc<RecordedBitmaps>> {
        self.state().recorded_bitmaps.clone()
    }

    /// Whether the state directory notes what changes, because of persistent bitmaps.
    pub fn has_notes(&self) -> bool {
        self.recorded_bitmaps()
            .is_some_and(|recorded| recorded.has_notes())
    }

    /// Whether the disk can have bitmaps: it is writable, and stores something.
    pub fn has_bitmaps(&self) -> bool {
        self.with_image(|_| ()).is_some() || self.recorded_bitmaps().is_some()
    }

    /// Acquires the lock of an image in a cluster that can have persistent bitmaps, so that they record all changes from now on.
    /// Bitmaps become inconsistent if another client has had it. Returns the lock's mark, which is a new one each time that
    /// this has happened; `None` for other disks.
    ///
    /// # Errors
    /// It cannot be acquired, or the cluster does not say which client has had it.
    pub fn own_image(&self) -> io::Result<Option<String>> {
        let owned = self.recorded_bitmaps().map(|recorded| recorded.own());
        owned.unwrap_or(Ok(None))
    }

    /// Makes the bitmaps inconsistent if another client has had the lock of an image in a cluster.
    ///
    /// # Errors
    /// The cluster does not say.
    pub fn check_owner(&self) -> io::Result<()> {
        let checked = self
            .recorded_bitmaps()
            .map(|recorded| recorded.check_owner());
        checked.unwrap_or(Ok(false)).map(drop)
    }

    /// Marks the bitmaps that are stored in the image as in use. An image in a cluster is [locked](Self::own_image).
    ///
    /// # Errors
    /// They could not be marked.
    pub fn use_bitmaps(&self) -> io::Result<()> {
        self.own_image()?;
        let _changes = self.lock_changes();
        let recorded = self.recorded_bitmaps();
        recorded.as_ref().inspect(|recorded| recorded.note_again());
        let used = self.with_image(|image| image.use_bitmaps());
        used.unwrap_or(Ok(())).map_err(io::Error::other)?;
        // A copy from before does not have what is noted from now on.
        recorded.inspect(|recorded| recorded.note_again());
        Ok(())
    }

    /// Call it before the image changes without a request of the guest, so that a kill in the middle loses no bit of its bitmaps.
    pub(super) fn note_generation(&self) {
        let recorded = self.recorded_bitmaps();
        recorded.inspect(|recorded| recorded.note_generation());
    }

    fn all_bitmaps(&self) -> Option<Arc<DirtyBitmaps>> {
        let in_image = self.with_image(|image| image.bitmaps().clone());
        in_image.or_else(|| Some(self.recorded_bitmaps()?.bitmaps().clone()))
    }

    /// The bitmaps that are loaded.
    pub fn bitmaps(&self) -> Vec<Arc<DirtyBitmap>> {
        self.all_bitmaps().map(|all| all.all()).unwrap_or_default()
    }

    /// The bitmaps that are stored and cannot be used.
    pub fn unusable_bitmaps(&self) -> Vec<UnusableBitmap> {
        let unusable = self.with_image(|image| image.unusable_bitmaps());
        let unusable = unusable.or_else(|| Some(self.recorded_bitmaps()?.unusable()));
        unusable.unwrap_or_default()
    }

    /// Checks that a new bitmap can be stored.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_new_bitmap(&self) -> Result<(), String> {
        let checked = self.with_image(|image| image.check_new_bitmap());
        let checked = checked.or_else(|| Some(self.recorded_bitmaps()?.check_new()));
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
        if !removed.is_empty() {
            // First: one that is only in the record is stored again.
            let removed = self.with_image(|image| image.remove_stored_bitmaps(removed));
            removed.unwrap_or(Ok(())).map_err(io::Error::other)?;
        }
        match self.recorded_bitmaps() {
            Some(recorded) => recorded
                .prepare(removed, bitmaps)
                .map(PreparedBitmaps::Recorded),
            None => Ok(PreparedBitmaps::InImage(bitmaps)),
        }
    }

    /// Replaces the bitmaps that are loaded. No request is in flight.
    pub fn set_bitmaps(&self, new: PreparedBitmaps) {
        let _changes = self.lock_changes();
        match (new, self.recorded_bitmaps()) {
            (PreparedBitmaps::InImage(bitmaps), _) => {
                self.with_image(|image| image.set_bitmaps(bitmaps));
            }
            (PreparedBitmaps::Recorded(new), Some(recorded)) => recorded.replace(new),
            (PreparedBitmaps::Recorded(_), None) => {}
        }
    }

    /// The present bitmaps stay.
    pub fn give_up_bitmaps(&self, new: &PreparedBitmaps) {
        let _changes = self.lock_changes();
        if let (PreparedBitmaps::Recorded(new), Some(recorded)) = (new, self.recorded_bitmaps()) {
            recorded.give_up(new);
        }
    }

    /// Adds a bitmap with a new name. Queues record in it once they take over which bitmaps do.
    pub fn add_bitmap(&self, bitmap: Arc<DirtyBitmap>) {
        if let Some(all) = self.all_bitmaps() {
            all.add(bitmap);
        }
    }

    /// Removes a temporary bitmap. Queues record in it until they take over which bitmaps do.
    pub fn remove_bitmap(&self, bitmap: &Arc<DirtyBitmap>) {
        if let Some(all) = self.all_bitmaps() {
            all.remove(bitmap);
        }
    }

    /// Continues the temporary bitmaps that the process before had, and nobody writes to the disk yet.
    pub fn add_temporary_bitmaps(&self, bitmaps: Vec<DirtyBitmap>) {
        let Some(all) = self.all_bitmaps() else {
            return;
        };
        let size = self.known_size();
        for bitmap in bitmaps {
            if all.find(bitmap.name()).is_some() {
                continue;
            }
            // The file may have grown. What is new counts as dirty.
            let old = bitmap.size();
            let fits = old <= size && bitmap.bytes_at(size) <= BITMAP_BYTES_MAX;
            if !fits || bitmap.grow(size).is_err() {
                let (disk, name) = (self.name(), bitmap.name());
                warn!(
                    "disk {disk}: temporary bitmap '{name}' is lost: the size of the disk has changed"
                );
                continue;
            }
            if bitmap.is_recording() {
                bitmap.mark(old, size - old);
            }
            all.add(Arc::new(bitmap));
        }
    }

    /// Its file has another name now.
    pub fn file_renamed(&self) {
        let recorded_bitmaps = self.recorded_bitmaps();
        recorded_bitmaps.inspect(|recorded| recorded.renamed());
    }

    /// Stores the bitmaps of a disk outside of its image. It is durable, and nothing writes to it any more. The image is closed.
    pub(super) fn store_recorded_bitmaps(&self) {
        let recorded_bitmaps = self.state().recorded_bitmaps.take();
        recorded_bitmaps.inspect(|recorded| recorded.store());
    }

    /// The same for a disk that other hosts may write to from now on.
    ///
    /// # Errors
    /// Their writes would not be noticed, and the bitmaps could not be marked as inconsistent.
    pub(super) fn release_recorded_bitmaps(&self) -> io::Result<()> {
        let Some(recorded) = self.recorded_bitmaps() else {
            return Ok(());
        };
        if self.backing() == Some(Backing::BlockDevice) && self.with_image(|_| ()).is_none() {
            recorded.lose_all(
                "the disk was released to another host, whose writes to a device are not noticed",
            )?;
        } else {
            recorded.store();
        }
        self.state().recorded_bitmaps = None;
        Ok(())
    }

    /// The default granularity of its bitmaps follows this, in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        let clusters = self.with_image(Qcow2::cluster_bytes);
        clusters.unwrap_or(GRANULARITY_OF_RAW)
    }
}
