//! Persistent bitmaps that are in the disk's image while it is not in use.
//!
//! An image says itself that its bitmaps are in use, and of which process: by the [generation](image::Generations) of its
//! journal, which is noted with the regions. So the record is needed only while the image is in use:
//!
//! 1. When the image is opened for writing and has persistent bitmaps: files with their bits, and then the record, with notes
//!    that name the generation that the image will have. Nothing has been written to the image.
//! 2. The image gets this generation, and its bitmaps are marked as in use, durably: at once, or before the first write after an
//!    upgrade and while the image's journal is elsewhere.
//! 3. When the image is closed, it has its bitmaps, and no generation. Then the record is removed.
//!
//! | kill or crash | image | record |
//! |---|---|---|
//! | before 2 | {its bitmaps, consistent} | continues, if the image still has the generation with which it was opened |
//! | after 2 | {bitmaps in use, the generation} | continues |
//! | in 3 | {its bitmaps, no generation} | not used any more, for no image has its generations |
//!
//! The new process of an upgrade writes nothing before the old one has handed over, so the notes name the generations of the old
//! one at first. The first request of the guest that is noted, or [`note_generation`](RecordedBitmaps::note_generation) before
//! any other change of the image, notes the generation that the new process gives it.
//!
//! Any other program that opens the image for writing removes or replaces the generation. A record that is left over is
//! therefore never used again. If a record cannot be written, the bitmaps do not survive the next kill; nothing else is lost.

use std::io;
use std::path::Path;
use std::sync::Arc;

use engine::DiskFile;
use image::{Chain, ImageError, Qcow2, UnusableBitmap};
use tracing::{error, info, warn};

use super::RecordedBitmaps;
use super::medium::Medium;
use super::place::{Inner, Intent, Place, Usable, is_bits};
use super::record::{self, BitmapRecord, Record};
use crate::config::spec::{DiskSpec, Lock};
use crate::node::checkpoint;
use crate::node::context::OpenContext;

impl RecordedBitmaps {
    /// Continues the bitmaps that a process had in use in an image when it ended, and keeps those of the image through the
    /// next kill or crash. `None` if that is impossible: they are then inconsistent afterwards, as in QEMU.
    pub fn of_image(
        spec: &DiskSpec,
        context: &OpenContext,
        path: &Path,
        file: &Arc<DiskFile>,
        chain: &Arc<Chain>,
    ) -> Option<Arc<Self>> {
        let (state, image) = (context.state.as_ref()?, chain.image()?);
        image.generations()?;
        if spec.lock == Lock::Running {
            return None;
        }
        let medium = Medium::File(file.clone());
        let path = medium.path(path).ok()?;
        let place = Place::new(state, context, &path, medium, Some(chain.clone()))
            .inspect_err(|e| {
                warn!(
                    "disk {}: {} cannot be read: {e}; if ringdisk is killed or the host crashes, the bitmaps of its image are \
                     inconsistent",
                    spec.name,
                    state.display()
                );
            })
            .ok()?;
        let this = Self::new(&spec.name, image.size(), Ok(place));
        this.load_record_of_image();
        this.publish(&this.inner());
        // The journal was replayed: that was not another program.
        this.note_again();
        Some(this)
    }

    /// The image with the bitmaps, while it is not in use.
    pub(super) fn image(&self) -> Option<&Qcow2> {
        self.place.as_ref().ok()?.image()
    }

    fn load_record_of_image(&self) {
        let (Ok(place), Some(image)) = (&self.place, self.image()) else {
            return;
        };
        let mut guard = self.inner();
        let inner = &mut *guard;
        let record = match record::read(&place.record) {
            Ok(record) => record.filter(|record| record.is_image),
            Err(why) => {
                warn!(
                    "disk {}: {} is damaged: {why}",
                    self.disk,
                    place.record.display()
                );
                None
            }
        };
        let usable = record.as_ref().map(|record| -> Result<Usable, String> {
            let usable = place.usable(record, inner.size)?;
            self.continue_record_of_image(place, image, inner, record, &usable)?;
            Ok(usable)
        });
        if let (Some(record), Some(Err(why))) = (&record, &usable) {
            self.warn_not_used(place, image, record, why);
        }
        let usable: Option<Usable> = usable.and_then(Result::ok);
        if place.inherited.is_uncommitted() {
            // The process that hands over may continue after all. What it has written stays as it is, and is not used after
            // this process, which notes nothing, if some of it was not continued.
            if !record
                .as_ref()
                .is_some_and(|record| has_all_usable(record, inner))
            {
                inner.intent = None;
                inner.files.clear();
            }
        } else {
            self.keep_through_crashes(place, image, inner, record.as_ref(), usable.as_ref());
        }
        self.set_intent(inner);
        inner.has_record = !inner.files.is_empty();
    }

    /// Continues the bitmaps of a record.
    fn continue_record_of_image(
        &self,
        place: &Place,
        image: &Qcow2,
        inner: &mut Inner,
        record: &Record,
        usable: &Usable,
    ) -> Result<(), String> {
        let (mut bits_at, mut found) = (0, Vec::new());
        for bitmap in record.bitmaps.iter().filter(|bitmap| bitmap.lost.is_none()) {
            match place.load(record, bitmap, bits_at, usable, inner.size) {
                Ok((loaded, file)) => {
                    if !file.is_empty() {
                        inner.files.insert(bitmap.name.clone(), file);
                    }
                    found.push(Arc::new(loaded));
                }
                Err(e) => self.warn_not_continued(&bitmap.name, &e.to_string()),
            }
            bits_at += bitmap.stored_bytes(record);
        }
        let remove_bits = |files: Vec<String>| {
            // The process that hands over may continue with them after all.
            if !place.inherited.is_uncommitted() {
                place.remove_bits(files.into_iter());
            }
        };
        let continued = image.continue_bitmaps(found);
        let unusable = continued.map_err(|e| {
            remove_bits(std::mem::take(&mut inner.files).into_values().collect());
            e.to_string()
        })?;
        for UnusableBitmap { name, why, .. } in unusable {
            self.warn_not_continued(&name, &why);
            remove_bits(inner.files.remove(&name).into_iter().collect());
        }
        if let (Usable::AsTheyAre, Some(of)) = (usable, &record.intent) {
            inner.intent = place.continued_intent(of, self.owner()).ok();
        }
        let how = match usable {
            _ if inner.files.is_empty() => return Ok(()),
            Usable::AsTheyAre => "its bitmaps continue where the process before has left them",
            Usable::With(_) => {
                "its bitmaps continue after the crash of the host; they may show more changes than there were"
            }
        };
        info!("disk {}: {how}", self.disk);
        Ok(())
    }

    /// The bits in a record are not used for the bitmaps of the image, because of `why`.
    fn warn_not_used(&self, place: &Place, image: &Qcow2, record: &Record, why: &str) {
        let unusable = image.unusable_bitmaps();
        if !unusable.is_empty() {
            warn!(
                "disk {}: the bits in {} are not used for the bitmaps of its image: {why}",
                self.disk,
                place.record.display()
            );
        }
        // The image has them only after an orderly end, and another program has written it since it had that.
        let in_record = record.bitmaps.iter().filter(|of| of.lost.is_none());
        for BitmapRecord { name, .. } in in_record {
            let is_there = self.bitmaps.find(name).is_some()
                || unusable.iter().any(|bitmap| bitmap.name == *name);
            if !is_there && checkpoint::bitmap_of(name).is_none() {
                warn!(
                    "disk {}: bitmap '{name}' is gone: its image does not have it, and its bits in {} are not used: {why}; an \
                     incremental backup that relies on it must be followed by a full one",
                    self.disk,
                    place.record.display()
                );
            }
        }
    }

    fn warn_not_continued(&self, name: &str, why: &str) {
        warn!(
            "disk {}: the bits of bitmap '{name}' of its image are lost: {why}",
            self.disk
        );
    }

    /// Makes sure that the bitmaps of the image survive the next kill or crash. `old` is the record that there is, and `usable`
    /// what could be done with it.
    fn keep_through_crashes(
        &self,
        place: &Place,
        image: &Qcow2,
        inner: &mut Inner,
        old: Option<&Record>,
        usable: Option<&Usable>,
    ) {
        if usable.is_some()
            && let Err(e) = place.medium.sync()
        {
            // Only the generation that was found is noted from now on. A crash must not bring back an earlier one.
            warn!(
                "disk {}: its image could not be made durable: {e}; if the host crashes now, its bitmaps may be inconsistent",
                self.disk
            );
        }
        let is_new = self.share_all(place, image, inner);
        let is_as_it_was = matches!(usable, Some(Usable::AsTheyAre)) && inner.intent.is_some();
        if is_as_it_was && !is_new && old.is_some_and(|old| has_all(old, inner)) {
            return;
        }
        let of = old.and_then(|old| old.intent.as_ref());
        inner.intent = None;
        if let Err(e) = self.begin_record_of_image(place, inner, of.map(|of| &*of.file)) {
            inner.intent = None;
            warn!(
                "disk {}: {} cannot be written: {e}; if ringdisk is killed or the host crashes, the bitmaps of its image are \
                 inconsistent; make the state directory writable, and attach the disk again or restart ringdisk",
                self.disk,
                place.record.display()
            );
        }
        let files = &inner.files;
        let left = old
            .iter()
            .flat_map(|old| &old.bitmaps)
            .filter_map(|of| of.bits.clone());
        let is_left = |file: &String| is_bits(file) && !files.values().any(|used| used == file);
        place.remove_bits(left.filter(is_left));
        let is_used = |name: &str| {
            inner
                .intent
                .as_ref()
                .is_some_and(|new| new.record.file == name)
        };
        if let Some(of) = of.filter(|of| !is_used(&of.file)) {
            place.remove_intent(of);
        }
        // The next process finds its journal, and not that of the last boot. But one that is elsewhere may still be wanted.
        let is_elsewhere = image.lacks_journal() && !matches!(usable, Some(Usable::With(_)));
        if !is_elsewhere
            && inner.intent.is_some()
            && let Err(e) = image.use_bitmaps()
        {
            warn!(
                "disk {}: the bitmaps of its image could not be marked as in use: {e}",
                self.disk
            );
        }
    }

    /// Gives each bitmap that has none a file for its bits. Returns whether there was such a bitmap.
    fn share_all(&self, place: &Place, image: &Qcow2, inner: &mut Inner) -> bool {
        let mut shared = Vec::new();
        for bitmap in self.bitmaps.all() {
            if inner.files.contains_key(bitmap.name()) {
                continue;
            }
            match place.share(&bitmap) {
                Ok((copy, file)) => {
                    inner.files.insert(bitmap.name().into(), file);
                    shared.push(Arc::new(copy));
                }
                Err(e) => warn!(
                    "disk {}: {e}; if ringdisk is killed, bitmap '{}' of its image is inconsistent",
                    self.disk,
                    bitmap.name()
                ),
            }
        }
        if shared.is_empty() {
            return false;
        }
        let names: Vec<_> = shared.iter().map(|copy| copy.name().to_owned()).collect();
        // All of them are loaded, unless the directory of the bitmaps cannot be read again.
        let lost = match image.continue_bitmaps(shared) {
            Ok(unusable) => unusable.into_iter().map(|bitmap| bitmap.name).collect(),
            Err(_) => names,
        };
        for name in lost {
            place.remove_bits(inner.files.remove(&name).into_iter());
        }
        true
    }

    fn begin_record_of_image(
        &self,
        place: &Place,
        inner: &mut Inner,
        old_notes: Option<&str>,
    ) -> io::Result<()> {
        if inner.files.is_empty() {
            return record::remove(&place.record);
        }
        let begun = place
            .new_intent(inner.size, old_notes, self.owner())
            .and_then(|intent| {
                inner.intent = Some(intent);
                place.write_in_use(inner, &self.bitmaps.all())
            });
        begun.inspect_err(|_| drop(record::remove(&place.record)))
    }

    /// The image has its bitmaps.
    pub(super) fn remove_record_of_image(&self, place: &Place) {
        let mut inner = self.inner();
        // Until it has handed over, the old process continues with them.
        if place.inherited.is_uncommitted() || inner.files.is_empty() && !inner.has_record {
            return;
        }
        if let Err(e) = record::remove(&place.record) {
            // It is not used again.
            return info!(
                "disk {}: {} cannot be removed: {e}",
                self.disk,
                place.record.display()
            );
        }
        inner.has_record = false;
        let files = std::mem::take(&mut inner.files);
        place.remove_bits(files.into_values());
        let intent = inner.intent.take();
        self.publish(&inner);
        intent.inspect(|intent| place.remove_intent(&intent.record));
    }

    /// Whether the next process continues a bitmap that could not be stored in its image because of `error`. Then it is logged.
    pub fn is_kept(&self, name: &str, error: &ImageError) -> bool {
        let inner = self.inner();
        let is_valid = |intent: &Intent| !intent.regions.is_given_up();
        let is_kept = inner.files.contains_key(name) && inner.intent.as_ref().is_some_and(is_valid);
        if is_kept && checkpoint::bitmap_of(name).is_none() {
            warn!(
                "disk {}: bitmap '{name}' could not be stored in its image: {error}; its bits stay in the state \
                 directory; make space before the disk is closed, otherwise the bitmap is lost",
                self.disk
            );
        }
        is_kept
    }

    /// Changes cannot be noted any more. The bitmaps are right as long as this process lives.
    pub(super) fn give_up_record_of_image(
        &self,
        place: &Place,
        intent: Option<&Intent>,
        why: &str,
    ) {
        let invalidated = match intent {
            Some(intent) => place.invalidate(&intent.record),
            None => Ok(()),
        };
        let removed = record::remove(&place.record);
        error!(
            "disk {}: {why}; if ringdisk is killed or the host crashes from now on, the persistent bitmaps of its image are \
             inconsistent, and incremental backups that rely on them must be followed by full ones; make the state directory \
             writable, and attach the disk again or restart ringdisk",
            self.disk
        );
        if let (Err(e), Err(_)) = (removed, invalidated) {
            error!(
                "disk {}: {} cannot be removed: {e}; if the host crashes now, its bitmaps may lack changes",
                self.disk,
                place.record.display()
            );
        }
        // Before a command continues with these notes.
        intent.inspect(|intent| intent.regions.give_up());
    }
}

/// Whether a record is about exactly these bitmaps, with their bits in these files.
fn has_all(record: &Record, inner: &Inner) -> bool {
    record.bitmaps.iter().all(|bitmap| bitmap.lost.is_none()) && has_all_usable(record, inner)
}

/// The same, but for bitmaps that the record says are lost, which nobody continues.
fn has_all_usable(record: &Record, inner: &Inner) -> bool {
    let is_there = |bitmap: &BitmapRecord| inner.files.get(&bitmap.name) == bitmap.bits.as_ref();
    let mut usable = record.bitmaps.iter().filter(|of| of.lost.is_none());
    usable.clone().count() == inner.files.len() && usable.all(is_there)
}
