//! Bitmaps that lack changes.
//!
//! What this process says of a bitmap is what the next one says. A persistent bitmap is
//!
//! - *consistent*: its bits are in a file, which a process uses after a kill, and the record has them for after a crash, together
//!   with the notes;
//! - *withdrawn*: neither a kill nor a crash brings it back, and nobody has been told;
//! - *inconsistent*: its flag is set, and the log, queries and clients say so.
//!
//! [`make_inconsistent`](RecordedBitmaps::make_inconsistent) is the only way from the first to the last, and goes through
//! the second:
//!
//! | step | after a kill | after a crash of the host |
//! |---|---|---|
//! | 1. the file with its bits is removed | {no bits: inconsistent} | {consistent: nobody has been told} |
//! | 2. the record says why it is lost, durably | {inconsistent} | {inconsistent} |
//! | 3. the flag is set, then it is logged | | |
//!
//! If there is no space for the record, 2 empties the notes, without which no record is used after a crash. If that is
//! impossible too, the record is removed. Neither needs space. The other bitmaps of the disk then do not survive the crash either.
//!
//! A disk whose bitmaps cannot be stored any more ([`without_place`](RecordedBitmaps::without_place)), or that is released to
//! another host ([`lose_all`](RecordedBitmaps::lose_all)), is not written to before its record says so, or is removed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;

use block::{CannotGrow, DirtyBitmap};
use image::{BITMAP_BYTES_MAX, UnusableBitmap};
use tracing::{error, info, warn};

use super::RecordedBitmaps;
use super::find::find;
use super::medium::Medium;
use super::place::{self, Inner, Place};
use super::record::{self, BitmapRecord, Record, State};
use crate::config::spec::DiskSpec;
use crate::node::checkpoint;
use crate::node::context::OpenContext;

/// Its data beyond is lost.
pub(super) const CUT: &str = "the disk's file has become smaller";

impl RecordedBitmaps {
    /// For a disk whose bitmaps cannot be stored because of `why`. Those that an earlier process has stored can only be removed:
    /// the record says so from now on, because it would not get what is written to the disk. `path` is that of its file, or
    /// the full name of its image in a cluster.
    ///
    /// # Errors
    /// The record could be neither changed nor removed.
    pub(super) fn without_place(
        spec: &DiskSpec,
        context: &OpenContext,
        path: &Path,
        medium: Option<&Medium>,
        size: u64,
        why: &str,
    ) -> io::Result<Arc<Self>> {
        let this = Self::temporary(&spec.name, size, why);
        let Some(state) = context.state.as_deref() else {
            return Ok(this);
        };
        let Some(file) = find(state, &context.old_records, path, medium, false)?.record else {
            return Ok(this);
        };
        let mut inner = this.inner();
        match record::read(&file) {
            Ok(Some(record)) if !record.is_image => {
                this.lose_record(&mut inner, context, &file, record, why)?;
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
        Ok(this)
    }

    /// Makes all bitmaps of a record inconsistent, durably.
    fn lose_record(
        &self,
        inner: &mut Inner,
        context: &OpenContext,
        file: &Path,
        mut record: Record,
        why: &str,
    ) -> io::Result<()> {
        let is_new = |bitmap: &BitmapRecord| bitmap.lost.is_none() || bitmap.bits.is_some();
        let is_changed = record.bitmaps.iter().any(is_new);
        let bits: Vec<_> = (record.bitmaps.iter_mut())
            .filter_map(|bitmap| bitmap.bits.take())
            .collect();
        for bitmap in &mut record.bitmaps {
            bitmap.lost.get_or_insert_with(|| why.into());
        }
        record.intent = None;
        record.version = record::version(false, record.is_image);
        if is_changed && !context.inherited.is_uncommitted() {
            let owner = context.journals.owner();
            let written = record::write(file, &record, &[], |new| place::give(new, owner));
            written.or_else(|_| record::remove(file))?;
            place::remove_bits_of(&context.journals.directory, bits);
        }
        for bitmap in record.bitmaps {
            let granularity = 1_u64.checked_shl(bitmap.granularity_bits).unwrap_or(0);
            let why = bitmap.lost.as_deref().unwrap_or(why);
            self.lose(inner, bitmap.name, granularity, why);
        }
        Ok(())
    }

    pub(super) fn warn_lost(&self, name: &str, why: &str) {
        if checkpoint::bitmap_of(name).is_some() {
            // Nothing relies on it without its bitmap.
            return;
        }
        warn!(
            "disk {}: bitmap '{name}' is not continued: {why}; an incremental backup that relies on it must be followed by a \
             full one; 'ringdisk bitmap remove' deletes it",
            self.disk
        );
    }

    /// Another file or device had the path of the disk, and bitmaps: the operator learns that they are not those of this one.
    pub(super) fn lose_replaced(&self, place: &Place, inner: &mut Inner) {
        let Some(file) = &place.replaced else { return };
        let Ok(Some(record)) = record::read(file) else {
            return;
        };
        for bitmap in record.bitmaps {
            let granularity = 1_u64.checked_shl(bitmap.granularity_bits).unwrap_or(0);
            self.lose(inner, bitmap.name, granularity, place::FOREIGN);
        }
        // It may be in use, at another path.
        let may_be_used = matches!(&record.state, State::InUse(then) if then.is_of_this_boot());
        inner.leftover = Some(file.clone()).filter(|_| !may_be_used);
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

    /// Lets them cover the whole disk. An image does that itself.
    pub(super) fn grow_all(&self, inner: &mut Inner) {
        if self.image().is_some() || inner.is_preparing {
            return;
        }
        let size = inner.size;
        self.lose_unfit(inner, size);
        let before: Vec<_> = (self.bitmaps.all().into_iter())
            .map(|bitmap| (bitmap.size(), bitmap))
            .collect();
        self.bitmaps.grow(size);
        for (old, bitmap) in before {
            if bitmap.is_recording() && !bitmap.is_inconsistent() {
                bitmap.mark(old, size.saturating_sub(old));
            }
        }
    }

    /// The disk will grow to `size`: makes space for its bits.
    pub fn reserve(&self, size: u64) {
        self.lose_unfit(&mut self.inner(), size);
    }

    /// Makes space for the bits of a disk of `size` bytes. Those for which there is none become inconsistent.
    fn lose_unfit(&self, inner: &mut Inner, size: u64) {
        for (bitmap, why) in self.bitmaps.reserve(size, BITMAP_BYTES_MAX) {
            let why = match (why, &self.place) {
                (CannotGrow::Limit, _) => format!(
                    "the disk's bitmaps would have more than {} MiB of bits when it has {size} bytes",
                    BITMAP_BYTES_MAX >> 20
                ),
                (CannotGrow::NoSpace(e), Ok(place)) => format!(
                    "{} has no space for its bits when the disk has {size} bytes: {e}",
                    place.bits.0.display()
                ),
                (CannotGrow::NoSpace(e), Err(_)) => format!("there is no space for its bits: {e}"),
            };
            self.make_inconsistent(inner, &why, |other| std::ptr::eq(other, &*bitmap));
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
        self.make_inconsistent(inner, CUT, |_| true);
    }

    /// The bitmaps that were prepared are in use, or given up: what has happened meanwhile is about those in use.
    pub(super) fn catch_up(&self, inner: &mut Inner) {
        inner.is_preparing = false;
        self.grow_all(inner);
        self.lose_cut(inner);
        if let Some(why) = inner.not_noted.take() {
            self.make_inconsistent(inner, &why, DirtyBitmap::is_persistent);
        }
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

    /// The bitmaps for which `is_lost` lack changes from now on. Nobody is told before neither a kill nor a crash brings them
    /// back. Other bitmaps are not prepared.
    pub(super) fn make_inconsistent(
        &self,
        inner: &mut Inner,
        why: &str,
        is_lost: impl Fn(&DirtyBitmap) -> bool,
    ) {
        let mut lost = self.bitmaps.all();
        lost.retain(|bitmap| !bitmap.is_inconsistent() && is_lost(bitmap));
        if lost.is_empty() {
            return;
        }
        let names: BTreeSet<_> = (lost.iter().filter(|bitmap| bitmap.is_persistent()))
            .map(|bitmap| bitmap.name().to_owned())
            .collect();
        if let (Ok(place), false) = (&self.place, names.is_empty()) {
            self.withdraw(place, inner, &names, why);
        }
        lost.iter().for_each(|bitmap| bitmap.set_inconsistent());
        if let Some(intent) = inner.intent.as_ref().filter(|_| inner.files.is_empty()) {
            // No write waits for a note that is of no use.
            intent.regions.give_up();
        }
        let names: Vec<_> = lost.iter().map(|b| format!("'{}'", b.name())).collect();
        error!(
            "disk {}: bitmaps {} are inconsistent from now on: {why}; incremental backups that rely on them must be followed by full \
             ones; 'ringdisk bitmap remove' deletes them",
            self.disk,
            names.join(", ")
        );
    }

    /// The image has found some of its bitmaps inconsistent, because of `why`.
    pub fn record_lost(&self, why: &str) {
        let Ok(place) = &self.place else { return };
        let mut inner = self.inner();
        let mut lost = self.bitmaps.all();
        lost.retain(|bitmap| bitmap.is_inconsistent() && inner.files.contains_key(bitmap.name()));
        let names: BTreeSet<_> = lost.iter().map(|bitmap| bitmap.name().to_owned()).collect();
        if !names.is_empty() {
            self.withdraw(place, &mut inner, &names, why);
        }
    }

    /// No later process continues these bitmaps.
    fn withdraw(&self, place: &Place, inner: &mut Inner, names: &BTreeSet<String>, why: &str) {
        let mut after_kill = Ok(());
        for name in names {
            inner.failures.insert(name.clone(), why.to_owned());
            let file = inner.files.remove(name).unwrap_or_default();
            // Until it has handed over, the old process continues with it.
            if !place.inherited.is_uncommitted() {
                after_kill = after_kill.and(place.withdraw_bits(&file));
            }
        }
        let Err(e) = place.write_in_use(inner, &self.bitmaps.all()) else {
            return;
        };
        let record = place.record.display();
        let after_crash = match &inner.intent {
            Some(intent) => place.invalidate(&intent.record),
            // A crash makes all of them inconsistent.
            None => Ok(()),
        };
        if after_kill.and(after_crash).is_err()
            && let Err(removed) = record::remove(&place.record)
        {
            error!(
                "disk {}: {record} can be neither written ({e}) nor removed ({removed}); remove it before ringdisk is started again, \
                 or the disk's bitmaps may lack changes",
                self.disk
            );
        } else if !inner.files.is_empty() {
            warn!(
                "disk {}: {record} cannot be written: {e}; if the host crashes, all bitmaps of the disk are inconsistent; make the \
                 state directory writable, and attach the disk again or restart ringdisk",
                self.disk
            );
        }
        // The next command that changes bitmaps begins new notes.
        if let Some(intent) = &inner.intent {
            intent.regions.give_up();
        }
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
