//! Storing bitmaps when nothing writes to the image any more.
//!
//! While a bitmap is in use, its clusters may have any content, so they are written where they are. The order:
//!
//! 1. The bits, in clusters that are allocated where there are none. Flush: the refcounts of new clusters are durable.
//! 2. The tables, which refer to these clusters. fdatasync.
//! 3. The offset of each table that has become larger, and is therefore elsewhere. fdatasync. Then its length. fdatasync. An
//!    entry of the directory may be in two sectors, and a table must never have a length that is not its own.
//! 4. The flags, without "in use". fdatasync. If there are new bitmaps, [the directory is replaced](super::directory)
//!    instead of 3 and 4.
//! 5. The clusters of the tables that were replaced are freed.
//!
//! A crash before the end of 4 leaves each bitmap {in use} or, if its flags were written, {stored}; and possibly leaked
//! clusters. No table refers to a cluster that is not counted.
//!
//! Everything of the guest is durable before 1. If space runs out in 1 to 4, bitmaps stay in use, and what was allocated for them
//! is freed, unless their tables in the file may refer to it. They are lost, unless another process has their bits from elsewhere.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use block::{DirtyBitmap, is_no_space};

use super::directory::{Part, PartOf, entry_bytes};
use super::{AUTO, IN_USE, OFFSET, StoredBitmap};
use crate::bytes::{be32, put32, put64};
use crate::qcow2::error::ImageError;
use crate::qcow2::retry::MayBlock;
use crate::qcow2::types::{HostCluster, HostOffset, Run};
use crate::qcow2::{ImageState, Qcow2};

/// EFBIG: the file has the maximum length of its file system.
const FILE_TOO_LARGE: i32 = 27;

/// Called for each bitmap for which there is no space.
type OnNoSpace<'a> = dyn Fn(&DirtyBitmap, &ImageError) + 'a;

/// What step 3 and 4 write of the entry of a bitmap.
struct NewEntry {
    number: usize,
    /// Where it is in the directory; `None` if the bitmap has no entry yet.
    at: Option<usize>,
    table_at: HostOffset,
    table_entries: u32,
    old_table: Run,
    is_recording: bool,
    /// The clusters that were allocated for it.
    new: Vec<HostCluster>,
}

impl Qcow2 {
    /// Stores the bitmaps that are in use. No request is in flight. The next write marks them as in use again.
    ///
    /// # Errors
    /// They could not be written, and stay in use. If space runs out for a bitmap, that is no error: the bitmap is
    /// [lost](Self::on_bitmap_lost).
    pub fn store_bitmaps(&self) -> Result<(), ImageError> {
        self.store_or(&|bits, error| self.bitmap_lost(bits, error))
    }

    /// The same for another process, which continues some bitmaps from elsewhere. If space runs out for a bitmap, `is_kept` tells
    /// whether this is one of them: then it is not lost, also not in this process.
    ///
    /// # Errors
    /// As of [`store_bitmaps`](Self::store_bitmaps).
    pub fn store_bitmaps_for_handover(
        &self,
        is_kept: impl Fn(&str, &ImageError) -> bool,
    ) -> Result<(), ImageError> {
        self.store_or(&|bits, error| {
            if !is_kept(bits.name(), error) {
                self.bitmap_lost(bits, error);
            }
        })
    }

    fn store_or(&self, on_no_space: &OnNoSpace<'_>) -> Result<(), ImageError> {
        if self.read_only || self.damage.get().is_some() {
            return Ok(());
        }
        // First, so that a full disk loses only the new bitmaps.
        let mut larger = self.allocate_larger_directory(on_no_space)?;
        let mut entries = self.write_bits(larger.is_some(), on_no_space)?;
        if !entries.is_empty() {
            self.flush()?;
            entries = self.write_tables(entries, on_no_space)?;
        }
        let has_new = entries.iter().any(|entry| entry.at.is_none());
        if let Some(unused) = larger.take_if(|_| !has_new) {
            self.free_clusters(&unused.each().collect::<Vec<_>>())?;
        }
        if entries.is_empty() {
            // What was freed.
            return if self.has_changes() {
                self.flush()
            } else {
                Ok(())
            };
        }
        let stored = match larger {
            Some(run) => self.extend_directory(run, &mut entries, on_no_space),
            None => self.write_directory(&mut entries, on_no_space),
        };
        // Also after an error, the flags may be in the file: the next write marks them again.
        self.has_begun_writing.store(false, SeqCst);
        stored?;
        self.end_of_use(&entries)
    }

    /// Allocates clusters for a directory that has the new bitmaps, if there are any. If there is no space, they are not stored.
    fn allocate_larger_directory(
        &self,
        on_no_space: &OnNoSpace<'_>,
    ) -> Result<Option<Run>, ImageError> {
        let mut parts: Vec<_> = {
            let state = self.lock();
            let parts = self.directory(&state)?.into_iter();
            parts.map(|(_, part)| part).collect()
        };
        let old = parts.len();
        let new: Vec<_> = {
            let state = self.lock();
            let loaded = state.bitmaps.loaded.iter();
            let new = loaded.filter(|b| b.entry_at.is_none() && !b.bits.is_inconsistent());
            new.map(|bitmap| bitmap.bits.clone()).collect()
        };
        parts.extend(new.iter().enumerate().map(|(number, bits)| Part {
            of: PartOf::New(number),
            bytes: entry_bytes(bits, HostOffset::START, 0),
        }));
        if parts.len() == old {
            return Ok(None);
        }
        let bytes = parts.iter().map(|part| part.bytes.len() as u64).sum();
        match self.allocate_directory(&parts) {
            Ok(at) => Ok(Some(Run {
                first: at.cluster(&self.g),
                clusters: self.g.clusters(bytes),
            })),
            Err(error) if is_full(&error) => {
                new.iter().for_each(|bits| on_no_space(bits, &error));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Steps 3 and 4 if there are new bitmaps: the directory that was allocated takes the place of the old one.
    fn extend_directory(
        &self,
        run: Run,
        entries: &mut Vec<NewEntry>,
        on_no_space: &OnNoSpace<'_>,
    ) -> Result<(), ImageError> {
        let old = self.directory(&self.lock())?;
        let mut parts: Vec<_> = old.into_iter().map(|(_, part)| part).collect();
        for part in &mut parts {
            let same = |entry: &&NewEntry| entry.at.map(PartOf::Old) == Some(part.of);
            if let Some(entry) = entries.iter().find(same) {
                for change in [set_table_offset, set_table_length, set_flags] {
                    change(&mut part.bytes, entry);
                }
            }
        }
        let new = entries.iter().filter(|entry| entry.at.is_none());
        parts.extend(new.map(|entry| {
            let bits = self.lock().bitmaps.loaded[entry.number].bits.clone();
            Part {
                of: PartOf::New(entry.number),
                bytes: entry_bytes(&bits, entry.table_at, entry.table_entries),
            }
        }));
        let at = run.first.start(&self.g);
        if let Err(error) = self.write_new_directory(at, &parts) {
            // Nothing refers to it, nor to the new bitmaps.
            self.free_clusters(&run.each().collect::<Vec<_>>())?;
            if !is_full(&error) {
                return Err(error);
            }
            for entry in entries.extract_if(.., |entry| entry.at.is_none()) {
                self.give_up(&entry, &error, on_no_space)?;
            }
            return self.write_directory(entries, on_no_space);
        }
        self.replace_directory(Some(at), &parts)?;
        // A bitmap for which there was no space has no entry.
        let bytes = parts.iter().map(|part| part.bytes.len() as u64).sum();
        let unused = Run::between(run.first + self.g.clusters(bytes), run.end());
        self.free_clusters(&unused.each().collect::<Vec<_>>())
    }

    /// Step 1. `with_new`: the directory has space for new bitmaps.
    fn write_bits(
        &self,
        with_new: bool,
        on_no_space: &OnNoSpace<'_>,
    ) -> Result<Vec<NewEntry>, ImageError> {
        let bitmaps = self.lock().bitmaps.loaded.len();
        let mut entries = Vec::new();
        for number in 0..bitmaps {
            let bits = {
                let state = self.lock();
                let bitmap = &state.bitmaps.loaded[number];
                let has_entry = bitmap.entry_at.is_some() || with_new;
                if !bitmap.is_in_use || bitmap.bits.is_inconsistent() || !has_entry {
                    continue;
                }
                bitmap.bits.clone()
            };
            let mut new = Vec::new();
            match self.write_bitmap(number, &mut new) {
                Ok(entry) => entries.push(NewEntry { new, ..entry }),
                Err(error) => {
                    self.free_new(number, &new)?;
                    if !is_full(&error) {
                        return Err(error);
                    }
                    on_no_space(&bits, &error);
                }
            }
        }
        Ok(entries)
    }

    /// Writes the bits of a bitmap. Clusters that it allocates are added to `new`.
    fn write_bitmap(
        &self,
        number: usize,
        new: &mut Vec<HostCluster>,
    ) -> Result<NewEntry, ImageError> {
        let (bits, mut table, mut entry) = {
            let state = self.lock();
            let bitmap = &state.bitmaps.loaded[number];
            let entry = NewEntry {
                number,
                at: bitmap.entry_at,
                table_at: bitmap.table_at,
                table_entries: bitmap.table_entries,
                old_table: self.table_run(bitmap),
                is_recording: bitmap.bits.is_recording(),
                new: Vec::new(),
            };
            (bitmap.bits.clone(), bitmap.table.clone(), entry)
        };
        let cluster = self.g.cluster();
        let clusters = self.g.clusters(bits.bytes());
        table.resize(clusters as usize, 0);
        let mut buffer = vec![0; cluster as usize];
        for (index, word) in (0..).zip(&mut table) {
            bits.copy_to(index * cluster, &mut buffer);
            let mut at = HostOffset::new(*word & OFFSET);
            if at == HostOffset::START && buffer.iter().any(|&byte| byte != 0) {
                at = self.allocate_for_bitmap(1, new)?;
            }
            if at != HostOffset::START {
                self.file.write_at("writing a bitmap", at, &buffer)?;
            }
            *word = at.bytes();
        }
        let table_clusters = self.g.clusters(clusters * 8);
        if table_clusters > entry.old_table.clusters {
            entry.table_at = self.allocate_for_bitmap(table_clusters, new)?;
        }
        entry.table_entries = clusters as u32;
        self.lock().bitmaps.loaded[number].table = table;
        Ok(entry)
    }

    pub(super) fn table_run(&self, bitmap: &StoredBitmap) -> Run {
        Run {
            first: bitmap.table_at.cluster(&self.g),
            clusters: self.g.clusters(u64::from(bitmap.table_entries) * 8),
        }
    }

    pub(super) fn allocate_for_bitmap(
        &self,
        clusters: u64,
        new: &mut Vec<HostCluster>,
    ) -> Result<HostOffset, ImageError> {
        let run = self.change(|state| {
            let ImageState {
                refcounts,
                metadata,
                ..
            } = state;
            let run = if clusters == 1 {
                refcounts
                    .allocate(&self.file, metadata, 1, MayBlock::Grow)?
                    .0
            } else {
                refcounts.allocate_contiguous(&self.file, metadata, clusters)?
            };
            run.each().for_each(|cluster| metadata.add_table(cluster));
            Ok(run)
        })?;
        new.extend(run.each());
        Ok(run.first.start(&self.g))
    }

    /// Frees clusters that were allocated for a bitmap that could not be written.
    fn free_new(&self, number: usize, new: &[HostCluster]) -> Result<(), ImageError> {
        let mut state = self.lock();
        let state = &mut *state;
        for &cluster in new {
            state.refcounts.give_back(&self.file, cluster)?;
            state.metadata.remove_table(cluster);
        }
        let table = &mut state.bitmaps.loaded[number].table;
        let is_new = |word: u64| new.contains(&HostOffset::new(word & OFFSET).cluster(&self.g));
        table
            .iter_mut()
            .filter(|word| is_new(**word))
            .for_each(|word| *word = 0);
        Ok(())
    }

    /// Step 2. Returns the entries of the bitmaps that have their tables.
    fn write_tables(
        &self,
        entries: Vec<NewEntry>,
        on_no_space: &OnNoSpace<'_>,
    ) -> Result<Vec<NewEntry>, ImageError> {
        let mut written = Vec::new();
        for entry in entries {
            let table = self.lock().bitmaps.loaded[entry.number].table.clone();
            let mut bytes: Vec<_> = table.iter().flat_map(|word| word.to_be_bytes()).collect();
            // Whole pieces are written: the last cluster of the table holds nothing else.
            bytes.resize(bytes.len().next_multiple_of(self.g.piece() as usize), 0);
            let doing = "writing a bitmap table";
            match self.file.write_at(doing, entry.table_at, &bytes) {
                Ok(()) => written.push(entry),
                Err(error) if is_full(&error) => self.give_up(&entry, &error, on_no_space)?,
                Err(error) => return Err(error),
            }
        }
        self.file.flush()?;
        Ok(written)
    }

    /// There was no space for the table of a bitmap, or for its entry.
    fn give_up(
        &self,
        entry: &NewEntry,
        error: &ImageError,
        on_no_space: &OnNoSpace<'_>,
    ) -> Result<(), ImageError> {
        let bits = self.lock().bitmaps.loaded[entry.number].bits.clone();
        on_no_space(&bits, error);
        // A table where it was may be partly written, and refer to new clusters.
        if entry.table_at != entry.old_table.first.start(&self.g) {
            self.free_new(entry.number, &entry.new)?;
        }
        Ok(())
    }

    /// Steps 3 and 4.
    fn write_directory(
        &self,
        entries: &mut Vec<NewEntry>,
        on_no_space: &OnNoSpace<'_>,
    ) -> Result<(), ImageError> {
        let extension = self.lock().header.bitmaps;
        let Some(extension) = extension else {
            return Ok(());
        };
        // Whole pieces are written: the last cluster of the directory holds nothing else.
        let len = extension.directory_bytes.next_multiple_of(self.g.piece());
        let (at, mut bytes) = (extension.directory_at, vec![0; len as usize]);
        let doing = "reading the bitmap directory";
        self.file.read_at(doing, at, &mut bytes)?;
        let write = |bytes: &[u8]| {
            self.file
                .write_at("writing the bitmap directory", at, bytes)?;
            self.file.flush()
        };
        for change in [set_table_offset, set_table_length, set_flags] {
            let before = bytes.clone();
            for entry in &*entries {
                if let Some(at) = entry.at {
                    change(&mut bytes[at..], entry);
                }
            }
            if bytes == before {
                continue;
            }
            match write(&bytes) {
                Err(error) if is_full(&error) => {
                    // It may be partly written: their new tables stay counted.
                    for entry in entries.drain(..) {
                        let bits = self.lock().bitmaps.loaded[entry.number].bits.clone();
                        on_no_space(&bits, &error);
                    }
                    return Ok(());
                }
                written => written?,
            }
        }
        Ok(())
    }

    /// Step 5.
    fn end_of_use(&self, entries: &[NewEntry]) -> Result<(), ImageError> {
        let flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        let state_ref = &mut *state;
        for entry in entries {
            let bitmap = &mut state_ref.bitmaps.loaded[entry.number];
            bitmap.is_in_use = false;
            bitmap.table_entries = entry.table_entries;
            if std::mem::replace(&mut bitmap.table_at, entry.table_at) == entry.table_at {
                continue;
            }
            for cluster in entry.old_table.each() {
                state_ref.refcounts.release(&self.file, cluster)?;
                state_ref.metadata.remove_table(cluster);
            }
        }
        drop(state);
        drop(flushing);
        self.flush()
    }
}

/// Whether there is no space for more.
fn is_full(error: &ImageError) -> bool {
    let is_lost = matches!(error, ImageError::Lost { .. });
    !is_lost && (is_no_space(error.errno()) || error.errno() == FILE_TOO_LARGE)
}

fn set_table_offset(directory_entry: &mut [u8], entry: &NewEntry) {
    put64(directory_entry, 0, entry.table_at.bytes());
}

fn set_table_length(directory_entry: &mut [u8], entry: &NewEntry) {
    put32(directory_entry, 8, entry.table_entries);
}

fn set_flags(directory_entry: &mut [u8], entry: &NewEntry) {
    let flags = be32(directory_entry, 12);
    let auto = if entry.is_recording { AUTO } else { 0 };
    put32(directory_entry, 12, flags & !(IN_USE | AUTO) | auto);
}
