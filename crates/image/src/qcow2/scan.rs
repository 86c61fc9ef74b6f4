//! All references of an image to its clusters, read from the file for checks and repairs.

use std::collections::BTreeMap;

use super::bitmaps::{BITMAP_DIRECTORY_BYTES_MAX, bitmap_directory};
use super::entry::{COPIED, Entry, table_at};
use super::error::{Damage, Doing, ImageError};
use super::geometry::Geometry;
use super::header::{AUTOCLEAR_BITMAPS, Header, Snapshot, snapshot};
use super::progress::{Progress, ReportProgress};
use super::types::{HostCluster, HostOffset, Run};
use crate::bytes::{be64, put64};
use crate::storage::{Storage, read_padded};

/// Clusters counted at a time: 64 MiB of memory, 1 TiB of file at 64 KiB a cluster.
pub(crate) const WINDOW: u64 = 1 << 24;
/// Passes over all L2 tables at most: 64 TiB of file at 64 KiB a cluster.
const WINDOWS_MAX: u64 = 64;
/// L1 tables of an image and its snapshots, in bytes.
const L1_BYTES_MAX: u64 = 256 << 20;
/// Distinct L2 tables at most: 2 PiB of disk at 64 KiB a cluster.
const TABLES_MAX: usize = 4 << 20;
/// Bytes of all L2 tables: what a disk reads in some minutes.
const TABLE_BYTES_MAX: u64 = 64 << 30;
/// Bytes of all bitmaps' tables and directories.
const BITMAP_BYTES_MAX: u64 = 16 << 20;
/// Findings kept at most; one is enough to refuse an image.
const FINDINGS_MAX: usize = 10_000;

/// An image's references. L2 tables are not kept: each pass reads them again.
pub(crate) struct Scan<'a> {
    storage: &'a dyn Storage,
    header: &'a Header,
    pub g: Geometry,
    /// Runs of clusters, each referenced once.
    runs: Vec<Run>,
    /// The L2 tables, with the number of references to each, and whether the active L1 table has one.
    tables: BTreeMap<HostOffset, (u32, bool)>,
    /// Entries of the active L1 table.
    l1: Vec<u64>,
    /// The refcount table; [`HostOffset::START`] where there is no block.
    pub refcount_table: Vec<HostOffset>,
    /// All clusters of the file.
    pub clusters: Run,
    /// Errors in the structure other than refcounts.
    pub findings: Vec<Damage>,
}

/// Why a scan has no result.
#[derive(Debug)]
pub(crate) enum ScanError {
    /// A table could not be read.
    Image(ImageError),
    /// The image is too large to be scanned in a reasonable time.
    TooMuch,
    /// The caller has stopped it.
    Stopped,
}

impl From<ImageError> for ScanError {
    fn from(error: ImageError) -> Self {
        Self::Image(error)
    }
}

impl<'a> Scan<'a> {
    /// Reads everything but the L2 tables. With `refcounts`, the refcount structures count as references too.
    pub fn new(
        storage: &'a dyn Storage,
        header: &'a Header,
        refcounts: bool,
    ) -> Result<Self, ScanError> {
        let g = header.geometry();
        let size = storage
            .size()
            .doing("asking for the file's size", HostOffset::START)?;
        let mut scan = Self {
            storage,
            header,
            g,
            runs: vec![Run::one(HostCluster::default())],
            tables: BTreeMap::new(),
            l1: Vec::new(),
            refcount_table: Vec::new(),
            clusters: Run {
                first: HostCluster::default(),
                clusters: g.clusters(size),
            },
            findings: Vec::new(),
        };
        if scan.clusters.clusters > WINDOW * WINDOWS_MAX {
            return Err(ScanError::TooMuch);
        }
        if refcounts {
            scan.refcounts()?;
        }
        scan.l1_tables()?;
        scan.bitmaps()?;
        if scan.tables.len() as u64 > TABLE_BYTES_MAX >> g.cluster_bits {
            return Err(ScanError::TooMuch);
        }
        Ok(scan)
    }

    fn read(&self, at: HostOffset, bytes: u64) -> Result<Vec<u8>, ImageError> {
        let mut buffer = vec![0; bytes as usize];
        let read = read_padded(self.storage, at.in_file(), &mut buffer);
        read.doing("reading a table", at)?;
        Ok(buffer)
    }

    fn words(&self, at: HostOffset, entries: u64) -> Result<Vec<u64>, ImageError> {
        let bytes = self.read(at, entries * 8)?;
        Ok((0..bytes.len())
            .step_by(8)
            .map(|at| be64(&bytes, at))
            .collect())
    }

    /// Adds a contiguous structure.
    fn run(&mut self, at: HostOffset, bytes: u64) {
        self.runs.push(Run {
            first: at.cluster(&self.g),
            clusters: self.g.clusters(bytes),
        });
    }

    fn refcounts(&mut self) -> Result<(), ScanError> {
        let bytes = u64::from(self.header.refcount_table_clusters) << self.g.cluster_bits;
        self.run(self.header.refcount_table_at, bytes);
        for word in self.words(self.header.refcount_table_at, bytes / 8)? {
            let at = HostOffset::of_cluster(word, &self.g);
            match at {
                Some(HostOffset::START) => {}
                Some(at) => self.run(at, self.g.cluster()),
                None => {
                    let what = "a refcount block cannot be where it should";
                    self.findings.push(Damage::in_entry(what, word));
                }
            }
            self.refcount_table.push(at.unwrap_or_default());
        }
        Ok(())
    }

    fn l1_tables(&mut self) -> Result<(), ScanError> {
        let active = Snapshot {
            l1_at: self.header.l1_at,
            l1_entries: self.header.l1_entries,
        };
        let (snapshots, bytes) = snapshots(self.storage, self.header)?;
        self.run(self.header.snapshots_at, bytes);
        let all = || std::iter::once(&active).chain(&snapshots);
        let l1_bytes: u64 = all().map(|table| u64::from(table.l1_entries) * 8).sum();
        if l1_bytes > L1_BYTES_MAX {
            return Err(ScanError::TooMuch);
        }
        for (number, table) in all().enumerate() {
            let entries = u64::from(table.l1_entries);
            self.run(table.l1_at, entries * 8);
            let words = self.words(table.l1_at, entries)?;
            for &word in &words {
                match table_at(&self.g, word) {
                    Ok(None) => {}
                    Ok(Some(at)) => {
                        let (uses, active) = self.tables.entry(at).or_default();
                        *uses += 1;
                        *active |= number == 0;
                    }
                    Err(_) => {
                        let what = "an L1 entry leads nowhere";
                        self.findings.push(Damage::in_entry(what, word));
                    }
                }
            }
            if self.tables.len() > TABLES_MAX {
                return Err(ScanError::TooMuch);
            }
            if number == 0 {
                self.l1 = words;
            }
        }
        Ok(())
    }

    fn bitmaps(&mut self) -> Result<(), ScanError> {
        let Some(extension) = self.header.bitmaps else {
            return Ok(());
        };
        let (at, len) = (extension.directory_at, extension.directory_bytes);
        let sound = at.is_of_cluster(self.g.cluster());
        if self.header.autoclear & AUTOCLEAR_BITMAPS == 0 {
            return Ok(());
        }
        let entries = if sound && len <= BITMAP_DIRECTORY_BYTES_MAX {
            bitmap_directory(&self.read(at, len)?, extension.bitmaps)
        } else {
            None
        };
        let Some(entries) = entries else {
            let what = "the bitmap directory is not understood";
            self.findings.push(Damage::in_file(what, at));
            return Ok(());
        };
        self.run(at, len);
        let bytes: u64 = entries
            .iter()
            .map(|entry| u64::from(entry.table_entries) * 8)
            .sum();
        if bytes > BITMAP_BYTES_MAX {
            return Err(ScanError::TooMuch);
        }
        for bitmap in entries {
            let entries = u64::from(bitmap.table_entries);
            self.run(bitmap.table_at, entries * 8);
            for word in self.words(bitmap.table_at, entries)? {
                let at = word & 0x00ff_ffff_ffff_fe00;
                if at != 0 {
                    self.run(HostOffset::new(at), self.g.cluster());
                }
            }
        }
        Ok(())
    }

    /// Bytes of all L2 tables.
    pub fn table_bytes(&self) -> u64 {
        (self.tables.len() as u64) << self.g.cluster_bits
    }

    /// The number of windows.
    pub fn windows(&self) -> u64 {
        self.clusters.clusters.div_ceil(WINDOW).max(1)
    }

    /// The clusters of a window, and the number of references to each.
    pub fn count(
        &mut self,
        window: u64,
        progress: ReportProgress<'_>,
    ) -> Result<(Run, Vec<u32>), ScanError> {
        let g = self.g;
        let first = HostCluster::new(window * WINDOW);
        let range = Run::between(first, (first + WINDOW).min(self.clusters.end()));
        let mut counts = vec![0_u32; range.clusters as usize];
        let mut beyond = Vec::new();
        let mut add = |run: Run, uses: u32| {
            let from = run.first.max(range.first);
            let to = run.end().min(range.end()).max(from);
            for cluster in Run::between(from, to).each() {
                let count = &mut counts[(cluster - range.first) as usize];
                *count = count.saturating_add(uses);
            }
            let ends = run.end() <= self.clusters.end();
            if window == 0 && !ends && beyond.len() < FINDINGS_MAX {
                let what = "a reference leads behind the end of the file";
                beyond.push(Damage::in_file(what, run.first.start(&g)));
            }
        };
        for &run in &self.runs {
            add(run, 1);
        }
        let total = self.windows() * self.tables.len() as u64;
        let done = window * self.tables.len() as u64;
        let mut bad = Vec::new();
        for (number, (&at, &(uses, _))) in (done..).zip(&self.tables) {
            add(Run::one(at.cluster(&self.g)), uses);
            let words = self.words(at, self.g.cluster() / 8)?;
            for entry in words.chunks_exact(self.g.words()) {
                let bitmap = entry.get(1).copied().unwrap_or(0);
                match Entry::decode(&self.g, entry[0], bitmap) {
                    Ok(Entry::Compressed(compressed)) => {
                        let mut run = compressed.clusters(&self.g);
                        // The last sectors may be in a cluster at or after the end of the file.
                        let clusters_in_file = self.clusters.end().max(run.first) - run.first;
                        run.clusters = clusters_in_file.clamp(1, run.clusters);
                        add(run, uses);
                    }
                    Ok(Entry::Standard(standard)) if !self.g.external => {
                        if let Some(host) = standard.host {
                            add(Run::one(host.cluster(&self.g)), uses);
                        }
                    }
                    Ok(Entry::Standard(_)) => {}
                    Err(_) if bad.len() < FINDINGS_MAX => {
                        bad.push(Damage::in_entry("an L2 entry leads nowhere", entry[0]));
                    }
                    Err(_) => {}
                }
            }
            let progress_now = Progress {
                done: number + 1,
                total,
            };
            if progress(progress_now).is_break() {
                return Err(ScanError::Stopped);
            }
        }
        if window == 0 {
            self.findings.extend(bad);
            self.findings.extend(beyond);
        }
        Ok((range, counts))
    }

    /// Calls `wrong` for every entry of the active tables that refers to a cluster of a window and has a wrong
    /// [`COPIED`] bit: with the offset of the entry in the file, and its right value.
    pub fn wrong_copied(
        &self,
        range: &Run,
        counts: &[u32],
        mut wrong: impl FnMut(HostOffset, [u8; 8]) -> Result<(), ImageError>,
    ) -> Result<(), ScanError> {
        let mut check = |at: HostOffset, word: u64, host: HostOffset| {
            let Some(index) = range.position(host.cluster(&self.g)) else {
                return Ok(());
            };
            let is_exclusive = counts[index] == 1;
            if is_exclusive == (word & COPIED != 0) {
                return Ok(());
            }
            let mut bytes = [0; 8];
            put64(&mut bytes, 0, word ^ COPIED);
            wrong(at, bytes)
        };
        for (index, &word) in self.l1.iter().enumerate() {
            if let Ok(Some(host)) = table_at(&self.g, word) {
                check(self.header.l1_at + index as u64 * 8, word, host)?;
            }
        }
        if self.g.external {
            return Ok(());
        }
        let each = self.g.words();
        for (&at, _) in self.tables.iter().filter(|(_, (_, active))| *active) {
            let words = self.words(at, self.g.cluster() / 8)?;
            for (index, entry) in words.chunks_exact(each).enumerate() {
                let bitmap = entry.get(1).copied().unwrap_or(0);
                if let Ok(Entry::Standard(standard)) = Entry::decode(&self.g, entry[0], bitmap)
                    && let Some(host) = standard.host
                {
                    check(at + (index * each * 8) as u64, entry[0], host)?;
                }
            }
        }
        Ok(())
    }
}

/// Reads the snapshot table; returns the snapshots, and its length in bytes.
pub(crate) fn snapshots(
    storage: &dyn Storage,
    header: &Header,
) -> Result<(Vec<Snapshot>, u64), ImageError> {
    let mut snapshots = Vec::new();
    let start = header.snapshots_at;
    let mut at = start;
    for _ in 0..header.snapshots {
        let mut entry = [0; 40];
        let read = read_padded(storage, at.in_file(), &mut entry);
        if read.doing("reading the snapshot table", at)? < entry.len() {
            let what = "the file ends before its snapshot table";
            return Err(ImageError::damaged(what, at));
        }
        let (found, len) = snapshot(1 << header.cluster_bits, &entry).map_err(|_| {
            let what = "an entry of the snapshot table cannot be";
            ImageError::damaged(what, at)
        })?;
        snapshots.push(found);
        at += len;
    }
    Ok((snapshots, at - start))
}
