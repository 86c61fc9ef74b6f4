//! Bitmaps that lack changes.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use block::DirtyBitmap;
use image::UnusableBitmap;
use tracing::{error, info, warn};

use super::RecordedBitmaps;
use super::place::{self, Inner, Place};
use super::record;
use crate::config::spec::DiskSpec;
use crate::node::context::OpenContext;

/// Its data beyond is lost.
pub(super) const CUT: &str = "the disk's file has become smaller";

impl RecordedBitmaps {
    /// For a disk whose bitmaps cannot be stored because of `why`. Those that an earlier process has stored can only be removed.
    /// `path` is that of its file, or the full name of its image in a cluster.
    pub(super) fn without_place(
        spec: &DiskSpec,
        context: &OpenContext,
        path: &Path,
        size: u64,
        why: &str,
    ) -> Arc<Self> {
        let this = Self::temporary(&spec.name, size, why);
        let Some(state) = context.state.as_deref() else {
            return this;
        };
        let file = place::record_path(state, path);
        let mut inner = this.inner();
        match record::read(&file) {
            Ok(Some(record)) if path == Path::new(&record.path) && !record.is_image => {
                for bitmap in record.bitmaps {
                    let granularity = 1_u64.checked_shl(bitmap.granularity_bits).unwrap_or(0);
                    let why = bitmap.lost.as_deref().unwrap_or(why);
                    this.lose(&mut inner, bitmap.name, granularity, why);
                }
                inner.leftover = Some(file);
            }
            Ok(_) => {}
            Err(damage) => {
                let why = format!("{} is damaged: {damage}", file.display());
                this.lose(&mut inner, String::new(), 0, &why);
                inner.leftover = Some(file);
            }
        }
        this.publish(&inner);
        drop(inner);
        this
    }

    /// All bitmaps that an earlier process has stored were removed.
    pub(super) fn remove_leftover(&self, inner: &mut Inner) {
        let Some(file) = inner.leftover.take() else {
            return;
        };
        if let Err(e) = record::remove(&file) {
            let file = file.display();
            warn!(
                "disk {}: {file} cannot be removed: {e}; its bitmaps will be shown again after the next start",
                self.disk
            );
        }
    }

    /// The disk's file was cut off, and may have grown again: the data there is gone, and no bitmap shows that.
    pub(super) fn lose_cut(&self, inner: &mut Inner) {
        // The bitmaps that are prepared would stay consistent.
        if !inner.is_cut || inner.is_preparing {
            return;
        }
        inner.is_cut = false;
        let all = self.bitmaps.all();
        if all.iter().all(|bitmap| bitmap.is_inconsistent()) {
            return;
        }
        match &self.place {
            Ok(place) => self.fail(place, inner, CUT.into(), |_| true),
            Err(_) => all.iter().for_each(|bitmap| bitmap.set_inconsistent()),
        }
        error!(
            "disk {}: its bitmaps are inconsistent from now on: {CUT}; incremental backups that rely on them must be followed by \
             full ones; 'ringdisk bitmap remove' deletes them",
            self.disk
        );
    }

    /// The record that there is must not be used again, and a new one cannot be written: most likely there is no space.
    pub(super) fn record_as_lost(
        &self,
        place: &Place,
        inner: &mut Inner,
        e: io::Error,
    ) -> io::Result<()> {
        warn!(
            "disk {}: {} cannot be written: {e}; if ringdisk is killed or upgraded, or the host crashes, the disk's bitmaps are \
             inconsistent; make the state directory writable, and attach the disk again or restart ringdisk",
            self.disk,
            place.record.display()
        );
        if let Some(intent) = inner.intent.take() {
            place.remove_intent(&intent.record);
        }
        record::remove(&place.record).map_err(|_| e)?;
        // Without bits, and in the space of the old one.
        let all = self.bitmaps.all();
        let why = "the state directory could not be written when the disk was opened";
        if let Err(e) = place.write_lost(inner, &all, why) {
            info!("disk {}: not even their names are recorded: {e}", self.disk);
        }
        Ok(())
    }

    /// The bitmaps for which `is_lost` lack changes from now on.
    pub(super) fn fail(
        &self,
        place: &Place,
        inner: &mut Inner,
        why: String,
        is_lost: impl Fn(&DirtyBitmap) -> bool,
    ) {
        inner.failure = Some(why);
        let all = self.bitmaps.all();
        for bitmap in all.iter().filter(|bitmap| is_lost(bitmap)) {
            bitmap.set_inconsistent();
        }
        // Without notes, the record is valid only after a kill, if at all.
        let Some(intent) = inner.intent.clone() else {
            return;
        };
        let invalidated = place.invalidate(&intent.record);
        if let (Err(e), Err(_)) = (place.write_in_use(inner, &all), invalidated) {
            error!(
                "disk {}: {} cannot be written either: {e}; if the host crashes now, its bitmaps may lack changes",
                self.disk,
                place.record.display()
            );
        }
        // Before a command continues with these notes.
        intent.regions.give_up();
    }

    /// Makes all of them inconsistent, durably: others may write to the disk, and nobody will know.
    ///
    /// # Errors
    /// They could not be marked, and continue.
    pub fn lose_all(&self, why: &str) -> io::Result<()> {
        let Ok(place) = &self.place else {
            return Ok(());
        };
        self.suspend();
        let mut inner = self.inner();
        let mut next = Inner {
            files: BTreeMap::new(),
            intent: None,
            ..inner.clone()
        };
        let all = self.bitmaps.all();
        let stored = || all.iter().filter(|bitmap| bitmap.is_persistent());
        next.lost.extend(stored().map(|bitmap| UnusableBitmap {
            name: bitmap.name().into(),
            granularity: bitmap.granularity(),
            why: why.into(),
        }));
        if next.has_record || !next.lost.is_empty() {
            place.write_in_use(&next, &[])?;
        }
        stored().for_each(|bitmap| self.warn_lost(bitmap.name(), why));
        let old = std::mem::replace(&mut *inner, next);
        self.publish(&inner);
        place.remove_bits(old.files.into_values());
        (old.intent).inspect(|intent| place.remove_intent(&intent.record));
        Ok(())
    }
}
