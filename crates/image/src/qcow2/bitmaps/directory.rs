//! Adding bitmaps to an image and removing them, which replaces the directory. The order:
//!
//! 1. The new directory, in clusters that were allocated for it. Flush: it and its refcounts are durable.
//! 2. The header's extension, which refers to it. fdatasync.
//! 3. The clusters of the old directory, and of bitmaps that were removed, are freed.
//!
//! A crash before the end of 2 leaves {the old directory} or {the new one}. Where the 24 bytes of the extension are in two
//! sectors, or the image had no bitmaps, the header says meanwhile that none of its bitmaps is consistent: a crash then
//! leaves {the old directory}, {no consistent bitmaps} or {the new one}.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use block::DirtyBitmap;

use super::{
    AUTO, BITMAP_DIRECTORY_BYTES_MAX, BitmapEntry, ENTRY_BYTES, LOADED_MAX, TYPE_DIRTY_TRACKING,
    bitmap_directory,
};
use crate::bytes::{be32, be64, put32, put64};
use crate::qcow2::error::ImageError;
use crate::qcow2::header::{
    AUTOCLEAR_BITMAPS, BITMAPS_EXTENSION, BITMAPS_EXTENSION_BYTES, BitmapsExtension, EXTENSION_HEAD,
};
use crate::qcow2::types::{HostCluster, HostOffset, Run};
use crate::qcow2::{ImageState, Qcow2};

/// An extension that programs ignore. It takes the place of one that is no longer needed, and is not the last.
const IGNORED_EXTENSION: u32 = 0x7644_6973;
const SECTOR: u64 = 512;

/// An entry of a directory that is being made.
pub(super) struct Part {
    pub of: PartOf,
    pub bytes: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PartOf {
    /// The entry that was here in the old directory, in bytes.
    Old(usize),
    /// A bitmap that had no entry, by its number among those that were loaded.
    New(usize),
}

/// Where a new extension of the header goes.
struct Insertion {
    /// The end of the list of extensions.
    at: u64,
    /// The name of the backing file is in the way: where it is, its length, and where it goes.
    name: Option<(u64, u64, u64)>,
}

/// The bytes of an entry of a directory.
pub(super) fn entry_bytes(bits: &DirtyBitmap, table_at: HostOffset, table_entries: u32) -> Vec<u8> {
    let name = bits.name().as_bytes();
    let mut bytes = vec![0; (ENTRY_BYTES + name.len()).next_multiple_of(8)];
    put64(&mut bytes, 0, table_at.bytes());
    put32(&mut bytes, 8, table_entries);
    put32(&mut bytes, 12, if bits.is_recording() { AUTO } else { 0 });
    bytes[16] = TYPE_DIRTY_TRACKING;
    // Both were checked when the bitmap was made.
    bytes[17] = bits.granularity_bits() as u8;
    bytes[18..20].copy_from_slice(&(name.len() as u16).to_be_bytes());
    bytes[ENTRY_BYTES..ENTRY_BYTES + name.len()].copy_from_slice(name);
    bytes
}

impl Qcow2 {
    /// Checks that a new bitmap can be stored in the image.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_new_bitmap(&self) -> Result<(), String> {
        let state = self.lock();
        if state.header.version < 3 {
            let why = "Cannot store dirty bitmaps in qcow2 v2 files; 'qemu-img amend -o compat=v3' makes it version 3, while \
                the disk is not in use";
            return Err(why.into());
        }
        if state.bitmaps.is_broken {
            return Err(
                "its bitmaps could not be written before; detach and attach the disk".into(),
            );
        }
        let entries = self.directory(&state).map_err(|error| error.to_string())?;
        let new = state.bitmaps.loaded.iter();
        let new = new.filter(|bitmap| bitmap.entry_at.is_none()).count();
        if entries.len() + new >= LOADED_MAX {
            return Err("it has 256 bitmaps, which is the limit".into());
        }
        if state.header.bitmaps.is_none() && self.insertion(&state).is_none() {
            return Err("its first cluster has no space for another header extension".into());
        }
        Ok(())
    }

    /// Removes bitmaps from the image, durably, also unusable ones. Those that are loaded stay in memory, and would be
    /// stored again. No request is in flight.
    ///
    /// # Errors
    /// The image has them, or does not.
    pub fn remove_stored_bitmaps(&self, names: &[&str]) -> Result<(), ImageError> {
        self.begin_writing()?;
        if self.remove_outdated()? {
            return Ok(());
        }
        let has_name = |entry: &BitmapEntry| names.contains(&&*entry.name());
        let all = self.directory(&self.lock())?.into_iter();
        let (removed, kept): (Vec<_>, Vec<_>) = all.partition(|(entry, _)| has_name(entry));
        if removed.is_empty() {
            return Ok(());
        }
        let removed: Vec<_> = removed.into_iter().map(|(entry, _)| entry).collect();
        let clusters = self.clusters_of_removed(&removed);
        let parts: Vec<_> = kept.into_iter().map(|(_, part)| part).collect();
        let at = if parts.is_empty() {
            None
        } else {
            let at = self.allocate_directory(&parts)?;
            self.write_new_directory(at, &parts)?;
            Some(at)
        };
        self.replace_directory(at, &parts)?;
        {
            let mut state = self.lock();
            let has_name = |name: &str| names.contains(&name);
            state
                .bitmaps
                .unusable
                .retain(|bitmap| !has_name(&bitmap.name));
            for bitmap in &mut state.bitmaps.loaded {
                if has_name(bitmap.bits.name()) {
                    (bitmap.table, bitmap.table_entries) = (Vec::new(), 0);
                    bitmap.table_at = HostOffset::START;
                    bitmap.is_in_use = true;
                }
            }
        }
        self.free_clusters(&clusters)?;
        self.flush()
    }

    /// Removes all bitmaps if a program that does not know them has written to the image: none of them is of use. Their
    /// clusters may have been freed since, and are left alone. Returns false if there are no such bitmaps.
    fn remove_outdated(&self) -> Result<bool, ImageError> {
        let _flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        let is_valid = state.header.autoclear & AUTOCLEAR_BITMAPS != 0;
        if is_valid || state.header.bitmaps.is_none() || state.bitmaps.is_broken {
            return Ok(false);
        }
        self.remove_extension(&mut state)?;
        state.bitmaps.unusable.clear();
        Ok(true)
    }

    /// The clusters that only these bitmaps use. Those of a damaged bitmap are left alone, and leak.
    fn clusters_of_removed(&self, removed: &[BitmapEntry]) -> Vec<HostCluster> {
        let mut state = self.lock();
        let state = &mut *state;
        let mut clusters = Vec::new();
        for entry in removed {
            let mut loaded = state.bitmaps.loaded.iter();
            match loaded.find(|bitmap| bitmap.entry_at == Some(entry.at)) {
                Some(bitmap) => {
                    let words = bitmap.table.iter().map(|word| word & super::OFFSET);
                    let bits = words.filter(|&at| at != 0).map(HostOffset::new);
                    clusters.extend(bits.map(|at| at.cluster(&self.g)));
                    clusters.extend(self.table_run(bitmap).each());
                }
                None => clusters.extend(self.claim_all(state, entry)),
            }
        }
        clusters
    }

    /// The entries of the present directory; none if it is not valid any more.
    pub(super) fn directory(
        &self,
        state: &ImageState,
    ) -> Result<Vec<(BitmapEntry, Part)>, ImageError> {
        let Some(extension) = state.header.bitmaps else {
            return Ok(Vec::new());
        };
        if state.header.autoclear & AUTOCLEAR_BITMAPS == 0 {
            return Ok(Vec::new());
        }
        let unknown = ImageError::Unsupported(
            "the bitmap directory is damaged, or has bitmaps of an unknown type",
        );
        let (at, len) = (extension.directory_at, extension.directory_bytes);
        if len > BITMAP_DIRECTORY_BYTES_MAX || !at.is_of_cluster(self.g.cluster()) {
            return Err(unknown);
        }
        // Whole pieces are read.
        let mut bytes = vec![0; len.next_multiple_of(self.g.piece()) as usize];
        self.file
            .read_at("reading the bitmap directory", at, &mut bytes)?;
        bytes.truncate(len as usize);
        let entries = bitmap_directory(&bytes, extension.bitmaps).ok_or(unknown)?;
        let ends: Vec<_> = (entries.iter().skip(1))
            .map(|entry| entry.at)
            .chain([bytes.len()])
            .collect();
        let part = |(entry, end): (BitmapEntry, usize)| {
            let part = Part {
                of: PartOf::Old(entry.at),
                bytes: bytes[entry.at..end].to_vec(),
            };
            (entry, part)
        };
        Ok(entries.into_iter().zip(ends).map(part).collect())
    }

    /// Clusters for a directory.
    pub(super) fn allocate_directory(&self, parts: &[Part]) -> Result<HostOffset, ImageError> {
        let bytes = parts.iter().map(|part| part.bytes.len() as u64).sum();
        self.allocate_for_bitmap(self.g.clusters(bytes), &mut Vec::new())
    }

    /// Writes a directory to clusters that nothing refers to yet.
    pub(super) fn write_new_directory(
        &self,
        at: HostOffset,
        parts: &[Part],
    ) -> Result<(), ImageError> {
        let mut bytes: Vec<_> = parts.iter().flat_map(|part| part.bytes.clone()).collect();
        // Whole pieces are written, and read.
        bytes.resize(bytes.len().next_multiple_of(self.g.piece() as usize), 0);
        self.file
            .write_at("writing the bitmap directory", at, &bytes)
    }

    /// Replaces the directory by one that was [written](Self::write_new_directory), or by none.
    pub(super) fn replace_directory(
        &self,
        at: Option<HostOffset>,
        parts: &[Part],
    ) -> Result<(), ImageError> {
        let len = parts.iter().map(|part| part.bytes.len() as u64).sum();
        self.flush()?;
        let old = {
            let _flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state = self.lock();
            let state = &mut *state;
            self.file.flush()?;
            let is_valid = state.header.autoclear & AUTOCLEAR_BITMAPS != 0;
            let old = state.header.bitmaps.filter(|_| is_valid);
            let new = at.map(|at| (parts.len() as u32, len, at));
            if let Err(error) = self.switch_extension(state, new) {
                self.give_up_bitmaps(state, &error);
                return Err(error);
            }
            state.bitmaps.set_places(parts);
            old.map(|old| Run {
                first: old.directory_at.cluster(&self.g),
                clusters: self.g.clusters(old.directory_bytes),
            })
        };
        let Some(old) = old else { return Ok(()) };
        self.lock().metadata.remove_run(old.first);
        self.free_clusters(&old.each().collect::<Vec<_>>())
    }

    /// Frees clusters that no table or directory in the file refers to.
    pub(super) fn free_clusters(&self, clusters: &[HostCluster]) -> Result<(), ImageError> {
        let mut state = self.lock();
        let state = &mut *state;
        for &cluster in clusters {
            state.refcounts.release(&self.file, cluster)?;
            state.metadata.remove_table(cluster);
        }
        Ok(())
    }

    /// The header may refer to the old or to the new directory. The next write marks all bitmaps as outdated.
    fn give_up_bitmaps(&self, state: &mut ImageState, error: &ImageError) {
        state.bitmaps.is_broken = true;
        state.header.bitmaps = None;
        state.header.autoclear |= AUTOCLEAR_BITMAPS;
        self.has_begun_writing.store(false, SeqCst);
        for bitmap in &state.bitmaps.loaded {
            self.bitmap_lost(&bitmap.bits, error);
        }
    }

    /// Step 2.
    fn switch_extension(
        &self,
        state: &mut ImageState,
        new: Option<(u32, u64, HostOffset)>,
    ) -> Result<(), ImageError> {
        let Some((bitmaps, directory_bytes, directory_at)) = new else {
            return self.remove_extension(state);
        };
        let mut data = [0; BITMAPS_EXTENSION_BYTES as usize];
        put32(&mut data, 0, bitmaps);
        put64(&mut data, 8, directory_bytes);
        put64(&mut data, 16, directory_at.bytes());
        let at = match state.header.bitmaps {
            Some(old) => {
                let last = old.at + BITMAPS_EXTENSION_BYTES - 1;
                if old.at / SECTOR != last / SECTOR {
                    self.set_bitmaps_valid(state, false)?;
                }
                self.write_extension(state, old.at, &data)?;
                old.at
            }
            None => self.insert_extension(state, &data)?,
        };
        state.header.bitmaps = Some(BitmapsExtension {
            at,
            bitmaps,
            reserved: 0,
            directory_bytes,
            directory_at,
        });
        state.bitmaps.is_damaged = false;
        self.set_bitmaps_valid(state, true)
    }

    /// Adds the extension to an image whose header says that it has no consistent bitmaps. Returns where its data is.
    fn insert_extension(&self, state: &mut ImageState, data: &[u8]) -> Result<u64, ImageError> {
        let insertion = self.insertion(state).ok_or(ImageError::Unsupported(
            "its first cluster has no space for another header extension",
        ))?;
        if let Some((from, len, to)) = insertion.name {
            let name = self.read_first(state, from, len)?;
            self.write_extension(state, to, &name)?;
            self.write_extension(state, 8, &to.to_be_bytes())?;
        }
        let at = insertion.at + EXTENSION_HEAD;
        // Programs read up to here: the data, and a new end of the list, come first.
        let end_too = [data, &[0; EXTENSION_HEAD as usize]].concat();
        self.write_extension(state, at, &end_too)?;
        self.write_extension(state, insertion.at, &head(BITMAPS_EXTENSION, data.len()))?;
        state.header.extensions_end = at + BITMAPS_EXTENSION_BYTES;
        Ok(at)
    }

    fn insertion(&self, state: &ImageState) -> Option<Insertion> {
        let at = state.header.extensions_end;
        let end = at + EXTENSION_HEAD + BITMAPS_EXTENSION_BYTES + EXTENSION_HEAD;
        let (name_at, len) = (
            be64(&state.header_block, 8),
            u64::from(be32(&state.header_block, 16)),
        );
        let name = (name_at != 0 && name_at < end).then(|| {
            let behind = end.max(name_at + len).next_multiple_of(8);
            (name_at, len, behind)
        });
        let end = name.map_or(end, |(_, len, to)| to + len);
        (end <= self.g.cluster()).then_some(Insertion { at, name })
    }

    /// The header says that there are no consistent bitmaps, and then nothing about bitmaps.
    fn remove_extension(&self, state: &mut ImageState) -> Result<(), ImageError> {
        self.set_bitmaps_valid(state, false)?;
        let Some(old) = state.header.bitmaps else {
            return Ok(());
        };
        let begins = old.at - EXTENSION_HEAD;
        if old.at + BITMAPS_EXTENSION_BYTES == state.header.extensions_end {
            self.write_extension(state, begins, &head(0, 0))?;
            state.header.extensions_end = begins;
        } else {
            let len = BITMAPS_EXTENSION_BYTES as usize;
            self.write_extension(state, begins, &head(IGNORED_EXTENSION, len))?;
        }
        state.header.bitmaps = None;
        Ok(())
    }

    fn set_bitmaps_valid(&self, state: &mut ImageState, is_valid: bool) -> Result<(), ImageError> {
        let before = state.header.autoclear;
        state.header.autoclear &= !AUTOCLEAR_BITMAPS;
        state.header.autoclear |= if is_valid { AUTOCLEAR_BITMAPS } else { 0 };
        if state.header.autoclear == before {
            return Ok(());
        }
        self.write_header(state)?;
        self.file.flush()
    }

    /// Reads bytes of the first cluster, in the units in which it is written.
    fn read_first(&self, state: &ImageState, at: u64, len: u64) -> Result<Vec<u8>, ImageError> {
        let unit = state.header_block.len() as u64;
        let from = at / unit * unit;
        let mut bytes = vec![0; ((at + len).next_multiple_of(unit) - from) as usize];
        self.file
            .read_at("reading the header", HostOffset::new(from), &mut bytes)?;
        let skip = (at - from) as usize;
        Ok(bytes[skip..skip + len as usize].to_vec())
    }

    /// Writes bytes of the first cluster, durably.
    fn write_extension(
        &self,
        state: &mut ImageState,
        at: u64,
        bytes: &[u8],
    ) -> Result<(), ImageError> {
        let unit = state.header_block.len() as u64;
        let from = at / unit * unit;
        let to = (at + bytes.len() as u64).next_multiple_of(unit);
        let mut units = self.read_first(state, from, to - from)?;
        units[(at - from) as usize..][..bytes.len()].copy_from_slice(bytes);
        self.file
            .write_at("writing the header", HostOffset::new(from), &units)?;
        if from == 0 {
            // What this process writes of it from now on.
            let first = state.header_block.len();
            let changed = (at as usize).min(first)..(at as usize + bytes.len()).min(first);
            state.header_block[changed.clone()].copy_from_slice(&units[changed]);
        }
        self.file.flush()
    }
}

/// The type and the length of an extension.
fn head(kind: u32, len: usize) -> [u8; EXTENSION_HEAD as usize] {
    let mut head = [0; EXTENSION_HEAD as usize];
    put32(&mut head, 0, kind);
    put32(&mut head, 4, len as u32);
    head
}
