//! Loading bitmaps when an image is opened.

use std::sync::Arc;

use block::DirtyBitmap;

use super::{
    ALL_ONES, AUTO, BITMAP_BYTES_MAX, BITMAP_DIRECTORY_BYTES_MAX, BitmapEntry,
    EXTRA_DATA_COMPATIBLE, LOADED_MAX, OFFSET, StoredBitmap, UnusableBitmap, bitmap_directory,
};
use crate::bytes::be64;
use crate::qcow2::error::ImageError;
use crate::qcow2::header::AUTOCLEAR_BITMAPS;
use crate::qcow2::types::{HostCluster, HostOffset, Run};
use crate::qcow2::{ImageState, Qcow2};

/// Granularities that the specification allows, as powers of two.
const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// The longest name in bytes.
const NAME_MAX: usize = 1023;

/// Why a bitmap cannot be used.
pub(super) enum Unusable {
    Why(&'static str),
    Image(ImageError),
}

impl From<&'static str> for Unusable {
    fn from(why: &'static str) -> Self {
        Self::Why(why)
    }
}

impl From<ImageError> for Unusable {
    fn from(error: ImageError) -> Self {
        Self::Image(error)
    }
}

const DAMAGED: &str =
    "it is damaged: its entry or table refers to clusters that cannot belong to it";

impl Qcow2 {
    /// Loads the bitmaps that are consistent, also those that do not track writes: they must follow the size of the disk.
    /// A bitmap that cannot be loaded does not keep the image from being used.
    pub(in crate::qcow2) fn load_bitmaps(&self) {
        let mut state = self.lock();
        let state = &mut *state;
        let entries = match self.read_directory(state) {
            Ok(entries) => entries,
            Err(why) => {
                state.bitmaps.is_damaged = true;
                let (name, granularity, why) = (String::new(), 0, why.text());
                return state.bitmaps.unusable.push(UnusableBitmap {
                    name,
                    granularity,
                    why,
                });
            }
        };
        let is_valid = state.header.autoclear & AUTOCLEAR_BITMAPS != 0;
        let mut bytes = 0;
        for entry in &entries {
            let loaded = if is_valid {
                self.load_bitmap(state, entry, &mut bytes)
            } else {
                Err("a program that does not know bitmaps has written to the image".into())
            };
            if let Err(why) = loaded {
                state.bitmaps.unusable.push(UnusableBitmap {
                    name: entry.name().into_owned(),
                    granularity: 1_u64
                        .checked_shl(entry.granularity_bits.into())
                        .unwrap_or(0),
                    why: why.text(),
                });
            }
        }
    }

    /// The entries of the directory. Its clusters count as metadata only if they can be that: the guest's I/O must not depend
    /// on what the header says about bitmaps.
    fn read_directory(&self, state: &mut ImageState) -> Result<Vec<BitmapEntry>, Unusable> {
        let Some(extension) = state.header.bitmaps else {
            return Ok(Vec::new());
        };
        if extension.reserved != 0 {
            return Err("a reserved field of the header's extension for bitmaps is not 0".into());
        }
        let (at, len) = (extension.directory_at, extension.directory_bytes);
        let in_file = at.bytes().checked_add(len);
        let in_file = in_file.is_some_and(|end| end <= self.file.get().bytes());
        if len > BITMAP_DIRECTORY_BYTES_MAX || !at.is_of_cluster(self.g.cluster()) || !in_file {
            return Err("the bitmap directory cannot be where the header says".into());
        }
        let mut bytes = vec![0; len as usize];
        let doing = "reading the bitmap directory";
        self.file.read_at(doing, at, &mut bytes)?;
        let unknown = "the bitmap directory is damaged, or has bitmaps of an unknown type";
        let entries = bitmap_directory(&bytes, extension.bitmaps).ok_or(unknown)?;
        // Without the bit, its place may have been given to anything else since.
        if state.header.autoclear & AUTOCLEAR_BITMAPS != 0 {
            let run = Run {
                first: at.cluster(&self.g),
                clusters: self.g.clusters(len),
            };
            if !self.is_free_for_bitmaps(state, run)? {
                return Err("the bitmap directory cannot be where the header says".into());
            }
            state.metadata.add_run(run, "the bitmap directory");
        }
        Ok(entries)
    }

    fn load_bitmap(
        &self,
        state: &mut ImageState,
        entry: &BitmapEntry,
        bytes: &mut u64,
    ) -> Result<(), Unusable> {
        if entry.is_in_use() {
            let why = "it was in use when a process was killed, or the host crashed, and lacks changes since";
            return Err(why.into());
        }
        let size = self.size();
        let bits = self.new_bitmap(entry, size)?;
        if u64::from(entry.table_entries) != self.g.clusters(bits.bytes()) {
            return Err("its size is not that of the disk".into());
        }
        *bytes += bits.bytes();
        if *bytes > BITMAP_BYTES_MAX || state.bitmaps.loaded.len() >= LOADED_MAX {
            let why = "more than 256 bitmaps, or 128 MiB of bits, are not loaded; delete bitmaps, or use a larger \
                granularity";
            return Err(why.into());
        }
        let bits = bits.make(size)?;
        debug_assert_eq!(self.g.clusters(bits.bytes()), entry.table_entries.into());
        let table = self.read_table(state, entry)?;
        let mut buffer = vec![0; self.g.cluster() as usize];
        for (number, &word) in (0..).zip(&table) {
            match word & OFFSET {
                0 if word & ALL_ONES == 0 => continue,
                0 => buffer.fill(0xff),
                at => {
                    let at = HostOffset::new(at);
                    self.claim(state, at, 1)?;
                    self.file.read_at("reading a bitmap", at, &mut buffer)?;
                }
            }
            bits.merge_bytes(number * self.g.cluster(), &buffer);
        }
        let bits = Arc::new(bits);
        self.bitmaps.add(bits.clone());
        state.bitmaps.loaded.push(StoredBitmap {
            bits,
            entry_at: Some(entry.at),
            table_at: entry.table_at,
            table,
            table_entries: entry.table_entries,
            is_in_use: false,
        });
        Ok(())
    }

    /// Checks what the entry of a bitmap says, except the number of its clusters.
    pub(super) fn new_bitmap(&self, entry: &BitmapEntry, size: u64) -> Result<NewBitmap, Unusable> {
        if entry.has_extra_data && entry.flags & EXTRA_DATA_COMPATIBLE == 0 {
            return Err("it has extra data of an unknown kind".into());
        }
        let name = entry.name().into_owned();
        // QEMU reads a name up to the first NUL.
        let is_named = (1..=NAME_MAX).contains(&entry.name.len())
            && !name.contains('\0')
            && self.bitmaps.find(&name).is_none();
        if !is_named || !GRANULARITY_BITS.contains(&entry.granularity_bits) {
            return Err("its name or granularity is invalid".into());
        }
        Ok(NewBitmap {
            name,
            granularity_bits: entry.granularity_bits.into(),
            bits: size.div_ceil(1 << entry.granularity_bits),
            is_recording: entry.flags & AUTO != 0,
        })
    }

    pub(super) fn read_table(
        &self,
        state: &mut ImageState,
        entry: &BitmapEntry,
    ) -> Result<Vec<u64>, Unusable> {
        let mut bytes = vec![0; entry.table_entries as usize * 8];
        let clusters = self.g.clusters(bytes.len() as u64);
        self.claim(state, entry.table_at, clusters)?;
        let doing = "reading a bitmap table";
        self.file.read_at(doing, entry.table_at, &mut bytes)?;
        let table: Vec<_> = (0..bytes.len())
            .step_by(8)
            .map(|at| be64(&bytes, at))
            .collect();
        let is_valid = |&word: &u64| {
            let at = word & OFFSET;
            word & !(OFFSET | ALL_ONES) == 0
                && (at == 0 || word & ALL_ONES == 0)
                && HostOffset::new(at).is_of_cluster(self.g.cluster())
        };
        match table.iter().all(is_valid) {
            true => Ok(table),
            false => Err("its table has an invalid entry".into()),
        }
    }

    /// The clusters of a bitmap that was not loaded, checked as if it was. None if it is damaged.
    pub(super) fn claim_all(
        &self,
        state: &mut ImageState,
        entry: &BitmapEntry,
    ) -> Vec<HostCluster> {
        let limit = BITMAP_BYTES_MAX / self.g.cluster();
        if u64::from(entry.table_entries) > limit {
            return Vec::new();
        }
        let Ok(table) = self.read_table(state, entry) else {
            return Vec::new();
        };
        let table_run = Run {
            first: entry.table_at.cluster(&self.g),
            clusters: self.g.clusters(table.len() as u64 * 8),
        };
        let mut clusters: Vec<_> = table_run.each().collect();
        for word in table.iter().map(|word| word & OFFSET) {
            let at = HostOffset::new(word);
            if at == HostOffset::START {
                continue;
            }
            if self.claim(state, at, 1).is_err() {
                return Vec::new();
            }
            clusters.push(at.cluster(&self.g));
        }
        clusters
    }

    /// Checks that clusters can be those of a bitmap, which will be written: they are used once, and for nothing that is
    /// known.
    pub(super) fn claim(
        &self,
        state: &mut ImageState,
        at: HostOffset,
        clusters: u64,
    ) -> Result<(), Unusable> {
        let run = Run {
            first: at.cluster(&self.g),
            clusters,
        };
        let is_in_file = run.end().start(&self.g) <= self.file.get();
        let is_placed = at != HostOffset::START && at.is_of_cluster(self.g.cluster());
        if !is_placed || !is_in_file || !self.is_free_for_bitmaps(state, run)? {
            return Err(DAMAGED.into());
        }
        run.each()
            .for_each(|cluster| state.metadata.add_table(cluster));
        Ok(())
    }

    /// Whether clusters are used once, and for nothing that is known.
    fn is_free_for_bitmaps(&self, state: &mut ImageState, run: Run) -> Result<bool, Unusable> {
        if state.metadata.within(run).is_some() {
            return Ok(false);
        }
        for cluster in run.each() {
            if state.refcounts.get(&self.file, cluster)? != 1 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A bitmap that has no memory yet.
pub(super) struct NewBitmap {
    name: String,
    pub granularity_bits: u32,
    bits: u64,
    is_recording: bool,
}

impl NewBitmap {
    pub fn bytes(&self) -> u64 {
        self.bits.div_ceil(8)
    }

    fn make(self, size: u64) -> Result<DirtyBitmap, Unusable> {
        DirtyBitmap::new(
            self.name,
            self.granularity_bits,
            size,
            self.is_recording,
            true,
        )
        .map_err(|_| "it has too many bits".into())
    }
}

impl Unusable {
    pub fn text(&self) -> String {
        match self {
            Self::Why(why) => (*why).to_owned(),
            Self::Image(error) => error.to_string(),
        }
    }
}
