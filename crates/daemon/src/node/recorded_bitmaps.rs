//! Persistent bitmaps in the state directory: of disks that are in no qcow2 image, which are raw files, block devices and
//! [images in Ceph clusters](medium), and of qcow2 images [while they are in use](in_image).
//!
//! A *record* in the state directory says which bitmaps a disk has. It is [found](find) by the storage, whatever its name. While the disk is in use, their bits are in files that
//! are [mapped](engine::MappedWords), next to the journals of images: on a tmpfs. The record is
//!
//! - *in use*: with the boot of the host, the file or device, the names of the files with the bits and of the notes, and the
//!   bits as they were when it was written; or
//! - *stored*: with the bits, and what the disk's file or device looked like then ([`Seen`]).
//!
//! The order:
//!
//! 1. When the disk is opened for writing: the files with the bits, and then the record, in use, durably. Nothing has been
//!    written to the disk.
//! 2. A request sets bits before its write is submitted.
//! 3. A command that changes bitmaps: new files for the bits of those that change, then the record, durably. No request is
//!    in flight. Then old files are removed.
//! 4. When nothing writes to the disk any more, and what was written is durable: the record, stored, durably. Then the files
//!    with the bits are removed.
//!
//! A kill leaves {in use} with files whose bits are exact or a superset, and the next process continues with them; so does
//! the successor in an upgrade, which writes nothing, so that the old process can continue if the upgrade fails.
//!
//! A crash of the host leaves {stored, if it was not in use} or {in use, by another boot}. The files with the bits are gone
//! then. A record that is in use therefore has the bits too, as they were when it was written, and names a file with
//! [notes](intent) of the regions that may have been written to since: in the state directory, and durable before such a
//! write. Both together are a superset of what may have reached the disk.
//!
//! A bitmap that was stored is continued only if the disk looks as it did then: another program that writes to a file changes
//! its times. The files with the bits have the time of the last write, so that such writes are noticed after a kill too, if
//! they come at least two seconds later. In a cluster, [the lock of the image](medium) shows whether others may have written.

mod find;
mod in_cluster;
mod in_image;
mod intent;
mod lost;
mod mark;
mod medium;
mod place;
mod record;
mod seen;

#[cfg(any(test, fuzzing))]
pub use record::check as check_record;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use block::{DirtyBitmap, DirtyBitmaps, NoteStore};
use image::UnusableBitmap;
use tracing::{error, info, warn};

use super::context::OpenContext;
use crate::config::spec::{DiskSpec, Lock};
use intent::{Checkpoints, Notes, Tag};
use place::{Inner, Intent, Place, Usable, is_bits};
use record::{BitmapRecord, IntentRecord, Record, State};

pub use medium::Medium;
pub use place::Prepared;

const NO_STATE: &str = "there is no state directory: start ringdisk with --state DIRECTORY";

/// A checkpoint is at least this long after the last one, for each MiB of bits.
const CHECKPOINT_PAUSE_PER_MIB: Duration = Duration::from_secs(5);

/// The bitmaps of a disk that are kept outside of its image.
pub struct RecordedBitmaps {
    disk: String,
    /// Where they are stored, or why they cannot be.
    place: Result<Place, String>,
    bitmaps: Arc<DirtyBitmaps>,
    /// Locked while the record is written.
    inner: Mutex<Inner>,
    known: Mutex<Known>,
    /// When the last checkpoint was made.
    checkpoint: Mutex<Option<Instant>>,
    this: Weak<Self>,
}

/// What is looked at without waiting for the state directory. Its lock is never held over a call that may wait.
#[derive(Default)]
struct Known {
    lost: Vec<UnusableBitmap>,
    intent: Option<Intent>,
}

impl RecordedBitmaps {
    /// For a disk whose bitmaps cannot be stored.
    pub fn temporary(disk: &str, size: u64, why: &str) -> Arc<Self> {
        Self::new(disk, size, Err(why.into()))
    }

    /// Loads the bitmaps of a disk that is locked for writing, and marks them as in use. `path` is that of its file.
    ///
    /// # Errors
    /// They could not be marked, nor removed.
    pub fn load(
        spec: &DiskSpec,
        context: &OpenContext,
        path: &Path,
        medium: Medium,
        size: u64,
    ) -> io::Result<Arc<Self>> {
        let path = &medium.path(path)?;
        let state = match state_of(spec, context) {
            Ok(state) => state,
            Err(why) => {
                return Self::without_place(spec, context, path, Some(&medium), size, why);
            }
        };
        let place = Place::new(state, context, path, medium, None)?;
        let this = Self::new(&spec.name, size, Ok(place));
        this.load_record()?;
        this.publish(&this.inner());
        Ok(this)
    }

    fn new(disk: &str, size: u64, place: Result<Place, String>) -> Arc<Self> {
        let inner = Inner {
            size,
            ..Inner::default()
        };
        let image = place.as_ref().ok().and_then(Place::image);
        let bitmaps = image.map(|image| image.bitmaps().clone());
        Arc::new_cyclic(|this| Self {
            disk: disk.into(),
            place,
            bitmaps: bitmaps.unwrap_or_default(),
            inner: Mutex::new(inner),
            known: Mutex::default(),
            checkpoint: Mutex::default(),
            this: this.clone(),
        })
    }

    fn owner(&self) -> Weak<dyn Checkpoints> {
        self.this.clone()
    }

    /// All that can be used.
    pub fn bitmaps(&self) -> &Arc<DirtyBitmaps> {
        &self.bitmaps
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Others look at this from now on.
    fn publish(&self, inner: &Inner) {
        *self.known() = Known {
            lost: inner.lost.clone(),
            intent: inner.intent.clone(),
        };
    }

    /// The bitmaps that can only be removed. Does not wait.
    pub fn unusable(&self) -> Vec<UnusableBitmap> {
        self.known().lost.clone()
    }

    /// Checks that a bitmap can be stored.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_new(&self) -> Result<(), String> {
        self.place.as_ref().map(drop).map_err(Clone::clone)
    }

    /// The record of the disk, if there is one that can be read.
    fn read_record(&self, place: &Place, inner: &mut Inner) -> Option<Record> {
        let file = place.record.display();
        match record::read(&place.record) {
            Ok(None) => None,
            Ok(Some(record)) if !record.is_image => Some(record),
            Ok(Some(_)) => {
                warn!(
                    "disk {}: {file} is about another disk, and is replaced",
                    self.disk
                );
                None
            }
            Err(why) => {
                inner.has_record = true;
                self.lose(
                    inner,
                    String::new(),
                    0,
                    &format!("{file} is damaged: {why}"),
                );
                None
            }
        }
    }

    fn load_record(&self) -> io::Result<()> {
        let Ok(place) = &self.place else {
            return Ok(());
        };
        let mut guard = self.inner();
        let inner = &mut *guard;
        let Some(record) = self.read_record(place, inner) else {
            self.lose_replaced(place, inner);
            return Ok(());
        };
        inner.has_record = true;
        let mut usable = place.usable(&record, inner.size);
        if usable.is_ok() && record.bitmaps.iter().any(|bitmap| bitmap.lost.is_none()) {
            let (State::InUse(then) | State::Stored(then)) = &record.state;
            if let Err(why) = place.medium.take_over(then)? {
                usable = Err(why);
            }
        }
        if let (Ok(Usable::AsTheyAre), Some(of)) = (&usable, &record.intent) {
            inner.intent = self.continue_notes(place, of)?;
        }
        let (mut is_changed, mut bits_at, mut left) = (false, 0, Vec::new());
        for bitmap in &record.bitmaps {
            let granularity = 1_u64.checked_shl(bitmap.granularity_bits).unwrap_or(0);
            let bytes = bitmap.stored_bytes(&record);
            let loaded = match (&bitmap.lost, &usable) {
                (Some(why), _) | (None, Err(why)) => Err(why.clone()),
                (None, Ok(usable)) => place
                    .load(&record, bitmap, bits_at, usable, inner.size)
                    .map_err(|e| e.to_string()),
            };
            bits_at += bytes;
            match loaded {
                Ok((loaded, name)) => {
                    // A kill may have left it when the bitmap was stored.
                    left.extend(
                        bitmap
                            .bits
                            .clone()
                            .filter(|old| *old != name && is_bits(old)),
                    );
                    is_changed |= bitmap.bits.as_ref() != Some(&name);
                    if name.is_empty() {
                        self.warn_unsafe(place, bitmap);
                    }
                    if let Ok(Usable::With(_)) = usable {
                        info!(
                            "disk {}: bitmap '{}' continues after the crash of the host; it may show more changes than there were",
                            self.disk, bitmap.name
                        );
                    }
                    inner.files.insert(bitmap.name.clone(), name);
                    self.bitmaps.add(Arc::new(loaded));
                }
                Err(why) => {
                    is_changed |= bitmap.lost.is_none() || bitmap.bits.is_some();
                    left.extend(bitmap.bits.clone().filter(|name| is_bits(name)));
                    self.lose(inner, bitmap.name.clone(), granularity, &why);
                }
            }
        }
        self.grow_all(inner);
        // A process that hands over may continue after all, and then notes nothing if it is of an older version.
        let is_other = place.inherited.is_uncommitted();
        is_changed |= inner.intent.is_none() && !inner.files.is_empty() && !is_other;
        is_changed |= place.medium.is_unconfirmed();
        is_changed |= record.path != place.path && !is_other;
        let is_in_use = matches!(record.state, State::InUse(_));
        if is_in_use && matches!(usable, Ok(Usable::AsTheyAre)) && !inner.files.is_empty() {
            info!(
                "disk {}: its bitmaps continue where the process before has left them",
                self.disk
            );
        }
        if !is_changed {
            self.set_intent(inner);
            return Ok(());
        }
        if is_other && is_in_use {
            return self.continue_record(place, inner);
        }
        self.begin_record(place, inner, record.intent.as_ref())?;
        place.remove_bits(left.into_iter());
        Ok(())
    }

    /// The notes that the process before has left. Without them, the bitmaps get a new record.
    fn continue_notes(&self, place: &Place, of: &IntentRecord) -> io::Result<Option<Intent>> {
        match place.continued_intent(of, self.owner()) {
            // Nothing would be noted, and the record, which stays valid, would be wrong after a power cut.
            Err(e) if place.inherited.is_uncommitted() => {
                let file = place.record.with_file_name(&of.file);
                let text = format!("{} cannot be opened: {e}", file.display());
                Err(io::Error::new(e.kind(), text))
            }
            continued => Ok(continued.ok()),
        }
    }

    /// Writes a record of the bitmaps that were loaded, and leaves all files: the old process may continue with them.
    fn continue_record(&self, place: &Place, inner: &mut Inner) -> io::Result<()> {
        if inner.files.is_empty() {
            // New bitmaps get new ones.
            inner.intent = None;
        }
        place.write_in_use(inner, &self.bitmaps.all())?;
        self.set_intent(inner);
        Ok(())
    }

    /// Writes a record of the bitmaps that were loaded, with new notes in place of the old ones.
    fn begin_record(
        &self,
        place: &Place,
        inner: &mut Inner,
        old: Option<&IntentRecord>,
    ) -> io::Result<()> {
        // The old notes go with the old record.
        inner.intent = None;
        let begun = (|| {
            if !inner.files.is_empty() {
                let old = old.map(|of| &*of.file);
                inner.intent = Some(place.new_intent(inner.size, old, self.owner())?);
            }
            place.write_in_use(inner, &self.bitmaps.all())
        })();
        match begun {
            Ok(()) => place.medium.confirm()?,
            Err(e) => self.record_as_lost(place, inner, e)?,
        }
        old.inspect(|of| place.remove_intent(of));
        self.set_intent(inner);
        Ok(())
    }

    /// Requests note what they change from now on, if persistent bitmaps need that.
    fn set_intent(&self, inner: &Inner) {
        let regions = inner.intent.as_ref().map(|intent| intent.regions.clone());
        // An image must have a generation that was noted a short time ago, whatever its bitmaps record.
        self.bitmaps.set_intent(regions, self.image().is_some());
    }

    /// Whether [`suspend`](Self::suspend) may wait for the state directory.
    pub fn has_notes(&self) -> bool {
        self.known().intent.is_some()
    }

    /// Another process may continue with the bitmaps. No request is in flight. This waits for a note or a checkpoint that is
    /// being written. If requests continue before it ends, they note their regions again.
    pub fn suspend(&self) {
        let intent = self.known().intent.clone();
        intent.inspect(|intent| intent.log.suspend(&intent.regions));
    }

    fn warn_unsafe(&self, place: &Place, bitmap: &BitmapRecord) {
        warn!(
            "disk {}: there is no space for the bits of bitmap '{}' in {}: a kill of ringdisk, or an upgrade, makes it inconsistent",
            self.disk,
            bitmap.name,
            place.bits.0.display()
        );
    }

    fn lose(&self, inner: &mut Inner, name: String, granularity: u64, why: &str) {
        self.warn_lost(&name, why);
        inner.lost.push(UnusableBitmap {
            name,
            granularity,
            why: why.into(),
        });
    }

    /// Makes `bitmaps` those of the next process too, without the unusable ones in `removed`, durably. No request is in
    /// flight.
    ///
    /// # Errors
    /// The present ones stay.
    pub fn prepare(
        &self,
        removed: &[&str],
        bitmaps: Vec<Arc<DirtyBitmap>>,
    ) -> io::Result<Prepared> {
        let mut inner = self.inner();
        let mut lost = inner.lost.clone();
        lost.retain(|bitmap| !removed.contains(&&*bitmap.name));
        let mut new = Prepared {
            bitmaps,
            lost,
            files: BTreeMap::new(),
            intent: None,
        };
        let Ok(place) = &self.place else {
            return Ok(new);
        };
        inner.is_preparing = true;
        let prepared = place.prepare(&inner, &mut new, self.owner());
        drop(inner);
        if prepared.is_err() {
            self.give_up(&new);
        }
        prepared.map(|()| new)
    }

    /// The prepared bitmaps take the place of the present ones.
    pub fn replace(&self, new: Prepared) {
        let mut inner = self.inner();
        let old = std::mem::replace(&mut inner.files, new.files);
        inner.lost = new.lost;
        inner.keep_failures_of(&new.bitmaps);
        let unused = if new.intent.is_some() {
            std::mem::replace(&mut inner.intent, new.intent)
        } else if inner.files.is_empty() {
            inner.intent.take()
        } else {
            None
        };
        self.set_intent(&inner);
        self.publish(&inner);
        let has_none = inner.files.is_empty() && inner.lost.is_empty();
        inner.has_record = !(has_none && inner.failures.is_empty());
        match self.image() {
            Some(image) => image.set_bitmaps(new.bitmaps),
            None => self.bitmaps.set(new.bitmaps),
        }
        if inner.lost.is_empty() {
            self.remove_leftover(&mut inner);
        }
        if let Ok(place) = &self.place {
            place.remove_bits(old.into_values().filter(|file| !is_used(&inner, file)));
            if let Some(unused) = unused {
                unused.log.stop();
                place.remove_intent(&unused.record);
            }
        }
        // The disk may have grown since they were made.
        self.catch_up(&mut inner);
    }

    /// The prepared bitmaps are not used: the next process continues the present ones.
    pub fn give_up(&self, new: &Prepared) {
        let Ok(place) = &self.place else { return };
        let mut inner = self.inner();
        if !new.is_same(&inner) {
            self.record_present(place, &inner, new);
        }
        self.catch_up(&mut inner);
    }

    /// The record is that of bitmaps that were prepared, and becomes that of the present ones.
    fn record_present(&self, place: &Place, inner: &Inner, new: &Prepared) {
        if let Err(e) = place.write_in_use(inner, &self.bitmaps.all()) {
            error!(
                "disk {}: {} may be about bitmaps that a failed command made: {e}; if ringdisk is killed now, the disk's bitmaps \
                 may be inconsistent",
                self.disk,
                place.record.display()
            );
        }
        let files = new.files.values().filter(|file| !is_used(inner, file));
        place.remove_bits(files.cloned());
        (new.intent.as_ref()).inspect(|intent| place.remove_intent(&intent.record));
    }

    /// The disk's file has this size from now on, and no request beyond the old end is accepted yet. What is new there counts
    /// as dirty: it may contain anything. `lowest` is the least size since the last call: where the file was cut off, it has
    /// changed, and no bitmap shows that.
    pub fn resize(&self, size: u64, lowest: u64) {
        let mut inner = self.inner();
        if lowest < inner.size && self.image().is_none() {
            inner.is_cut = true;
            self.lose_cut(&mut inner);
        }
        if size <= inner.size {
            return;
        }
        inner.size = size;
        self.grow_all(&mut inner);
        drop(inner);
        // Its file may have changed now: that was not another program.
        self.note_again();
    }

    /// The disk's file has another name, which has changed its times: that was not another program.
    pub fn renamed(&self) {
        self.bitmaps
            .all()
            .iter()
            .for_each(|bitmap| bitmap.note_time());
        self.note_again();
    }

    /// Writes the notes with the present time, and what the image has from its next change on. That comes before any change
    /// which is not a request of the guest.
    pub fn note_again(&self) {
        let intent = self.inner().intent.clone();
        let is_ours = |place: &Place| !place.inherited.is_uncommitted();
        if let Some(intent) = intent.filter(|_| self.place.as_ref().is_ok_and(is_ours)) {
            Notes(intent.log, Arc::downgrade(&intent.regions)).note(&intent.regions);
        }
    }

    /// Call it before the image changes without a request of the guest. The first change in this process gives the image a
    /// generation that is noted with the guest's first write at the latest, which the new process of an upgrade may not have
    /// had. An image with a generation that was not noted is taken for one that another program has written to.
    pub fn note_generation(&self) {
        let intent = self.known().intent.clone();
        let is_foreign = intent.is_some_and(|intent| !intent.log.is_own());
        if is_foreign && self.image().is_some() {
            self.note_again();
        }
    }

    /// Stores the bitmaps. The disk is durable, and nothing writes to it any more. An image is closed, and has stored them.
    pub fn store(&self) {
        let Ok(place) = &self.place else { return };
        self.suspend();
        if place.chain.is_some() {
            return self.remove_record_of_image(place);
        }
        // If the cluster does not say, the next process asks it.
        let _ = self.check_owner();
        let mut inner = self.inner();
        // Until it has handed over, the old process continues with them.
        let is_other = place.inherited.is_uncommitted();
        if is_other || inner.files.is_empty() && !inner.has_record {
            return;
        }
        let (medium, all) = (&place.medium, self.bitmaps.all());
        let stored = (|| {
            // Another client that changes the size from now on has the lock then.
            let (at_rest, size) = (medium.at_rest()?, medium.size()?);
            let is_cut = size.min(medium.lowest_size()) < inner.size;
            // It may have grown unnoticed.
            inner.size = size.max(inner.size);
            self.grow_all(&mut inner);
            let mut record = place.record_of(State::Stored(at_rest), &inner, &all);
            for bitmap in record.bitmaps.iter_mut().filter(|_| is_cut) {
                bitmap.lost.get_or_insert_with(|| lost::CUT.into());
            }
            place.write(&record, &all)
        })();
        match stored {
            Ok(()) => {
                let files = std::mem::take(&mut inner.files);
                place.remove_bits(files.into_values());
                let intent = inner.intent.take();
                self.publish(&inner);
                intent.inspect(|intent| place.remove_intent(&intent.record));
            }
            Err(e) => error!(
                "disk {}: its bitmaps could not be stored in {}: {e}; they are continued if ringdisk starts again before {}",
                self.disk,
                place.record.display(),
                match medium {
                    Medium::File(_) => "the host does",
                    Medium::Image(_) => "another client has the lock of the image",
                }
            ),
        }
    }
}

impl Checkpoints for RecordedBitmaps {
    fn checkpoint(&self) -> io::Result<()> {
        let Ok(place) = &self.place else {
            return Ok(());
        };
        if self.check_owner()? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let inner = self.inner();
        let is_given_up = |intent: &Intent| intent.regions.is_given_up();
        let has_changes = place.image().is_some_and(image::Qcow2::has_changes);
        if has_changes || inner.intent.as_ref().is_some_and(is_given_up) {
            // Until an image's tables are written, the time of its file may change without a write of the guest.
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let all = self.bitmaps.all();
        let mib = all.iter().map(|bitmap| bitmap.bytes()).sum::<u64>() >> 20;
        let pause = CHECKPOINT_PAUSE_PER_MIB.saturating_mul(u32::try_from(mib).unwrap_or(u32::MAX));
        let mut last = self
            .checkpoint
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if inner.is_preparing || last.is_some_and(|last| last.elapsed() < pause) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        *last = Some(Instant::now());
        place.write_in_use(&inner, &all).inspect_err(|e| {
            warn!(
                "disk {}: {} cannot be written: {e}; after a crash of the host, its bitmaps would show more changes than necessary",
                self.disk,
                place.record.display()
            );
        })
    }

    fn was_slow(&self, time: Duration) {
        let Ok(place) = &self.place else { return };
        warn!(
            "disk {}: {} has answered after {:.1} s; writes to new parts of the disk waited for it; put the state directory on \
             storage that answers",
            self.disk,
            place.record.display(),
            time.as_secs_f64()
        );
    }

    fn failed(&self, e: &io::Error) {
        let Ok(place) = &self.place else { return };
        let mut inner = self.inner();
        let intent = inner.intent.clone();
        let file = intent.as_ref().map(|intent| &*intent.record.file);
        let file = place.record.with_file_name(file.unwrap_or_default());
        let why = format!("changes could not be noted in {}: {e}", file.display());
        if place.chain.is_some() {
            return self.give_up_record_of_image(place, intent.as_ref(), &why);
        }
        if inner.is_preparing {
            inner.not_noted = Some(why);
        } else {
            self.make_inconsistent(&mut inner, &why, DirtyBitmap::is_persistent);
        }
    }

    fn tag(&self) -> Tag {
        self.place.as_ref().map(Place::tag).unwrap_or_default()
    }
}

impl Drop for RecordedBitmaps {
    fn drop(&mut self) {
        let intent = self.inner().intent.take();
        intent.inspect(|intent| intent.log.stop());
    }
}

/// The state directory; or why the bitmaps of a disk cannot be stored there.
fn state_of<'a>(spec: &DiskSpec, context: &'a OpenContext) -> Result<&'a Path, &'static str> {
    let state = context.state.as_deref().ok_or(NO_STATE)?;
    if spec.lock == Lock::Running {
        return Err("other hosts write to it while no VM runs on it here (lock=running)");
    }
    Ok(state)
}

fn is_used(inner: &Inner, file: &String) -> bool {
    inner.files.values().any(|used| used == file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkpoint holds the other lock while it waits for the state directory.
    #[test]
    fn queries_do_not_wait_for_the_record() {
        let bitmaps = RecordedBitmaps::temporary("d", 1 << 20, "it is a test");
        let inner = bitmaps.inner();
        assert!(bitmaps.unusable().is_empty() && !bitmaps.has_notes());
        drop(inner);
        let lost = UnusableBitmap {
            name: "b".into(),
            granularity: 65536,
            why: "it is a test".into(),
        };
        let mut new = bitmaps.prepare(&[], Vec::new()).unwrap();
        new.lost.push(lost.clone());
        bitmaps.replace(new);
        let _inner = bitmaps.inner();
        assert_eq!(bitmaps.unusable(), [lost]);
    }
}
