//! Raw external data files (docs/interop/qcow2 "autoclear_features", bit 1): at every moment, also after a kill or a
//! power cut, the data file is the disk, byte for byte, so that a program that does not know the image can read it.
//!
//! In other images, the data of a new cluster is written before the table that leads to it, and a crash in between
//! leaves data in the file where guests read zeroes. Here the table comes first:
//!
//! 1. Whatever the data file has where the disk reads as zeroes is overwritten with zeroes. fdatasync of the data file.
//! 2. The L2 entries of a whole neighbourhood are written: they lead to the zeroes. fdatasync.
//! 3. Lookups find them, and all writes to these clusters are in place from then on.
//!
//! A crash leaves for each entry {zeroes by the table} or {zeroes in the data file}. Images that qemu-img 6.1 and newer
//! make have all their entries from the start; only what QEMU zeroed or discarded, or what was added to the disk here,
//! comes this way.

use std::sync::PoisonError;

use block::GuestOffset;

use super::entry::{Entry, Kind, Standard, table_at};
use super::error::ImageError;
use super::file::FileEnd;
use super::retry::Retry;
use super::types::{GuestCluster, HostOffset};
use super::{ImageState, Load, Qcow2};

/// Bytes of the disk whose entries are written together, unless one cluster is larger. All other changes to the tables
/// wait while so much of the data file is read.
const NEIGHBOURHOOD: u64 = 16 << 20;

/// Bytes of the data file that are looked at together.
const PIECE: u64 = 1 << 20;

/// A cluster that gets a new entry, and its entry until then.
struct Unmapped {
    cluster: GuestCluster,
    entry: Entry,
}

impl Qcow2 {
    /// Gives a cluster without data, and its neighbours, their place in the raw data file. The table that has their
    /// entries is the image's own. Blocks.
    pub(super) fn map_in_raw_data_file(&self, cluster: GuestCluster) -> Result<(), ImageError> {
        // The table may be new: from here on, the file leads to it.
        self.flush()?;
        loop {
            let flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state = self.lock();
            let missing = match self.map_neighbourhood(&state, cluster) {
                Ok(()) => return Ok(()),
                Err(Retry::Load(slice)) => Some(slice),
                Err(Retry::Error(error)) => return Err(self.report(&mut state, error)),
                Err(_) => None,
            };
            drop(state);
            drop(flushing);
            match missing {
                Some(slice) => self.load(Load::Slice(slice))?,
                None => self.flush()?,
            }
        }
    }

    /// The caller holds the flush lock: no other thread flushes a file or writes tables.
    fn map_neighbourhood(&self, state: &ImageState, around: GuestCluster) -> Result<(), Retry> {
        let g = &self.g;
        let (slice, _) = around.slice(g);
        let found = self.cache.find(slice).ok_or(Retry::Load(slice))?;
        let (table, offset) = slice.table(g);
        let l1_entry = self.l1.get(table);
        let (Some(data), Ok(Some(at))) = (&self.data, table_at(g, l1_entry)) else {
            return Err(ImageError::bad_entry("an L1 entry leads nowhere", l1_entry).into());
        };
        // What is written here must not have changes that need a flush's order.
        if state.dirty_l2.contains_key(&found.frame) {
            return Err(Retry::CacheFull);
        }
        let unmapped = self.unmapped_around(around)?;
        let Some(end) = unmapped.last().map(|last| (last.cluster + 1).start(g)) else {
            return Ok(());
        };
        data.grow_exactly(HostOffset::in_data_file(end.min(self.end())))?;
        for Unmapped { cluster, entry } in &unmapped {
            self.zero_unmapped(data, *cluster, entry)?;
        }
        data.flush()?;
        let mut words = self
            .cache
            .copy(found.frame, 0..g.slice_bytes() as usize / 8);
        let mapped = unmapped.iter().map(|Unmapped { cluster, .. }| {
            let entry = Entry::Standard(Standard {
                host: Some(HostOffset::in_data_file(cluster.start(g))),
                is_exclusive: true,
                data: g.all(),
                zero: 0,
            });
            (cluster.slice(g).1, entry.encode(g))
        });
        for (index, entry) in mapped.clone() {
            let from = index.number() * g.words();
            words[from..from + g.words()].copy_from_slice(&entry[..g.words()]);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.file
            .write_at("writing an L2 table", at + offset, &bytes)?;
        self.file.flush()?;
        for (index, entry) in mapped {
            self.cache.set(found.frame, index, &entry[..g.words()]);
        }
        Ok(())
    }

    /// The clusters of the neighbourhood whose place in the data file is not in use, or not in whole.
    fn unmapped_around(&self, around: GuestCluster) -> Result<Vec<Unmapped>, Retry> {
        let g = &self.g;
        let (slice, index) = around.slice(g);
        let clusters = (NEIGHBOURHOOD >> g.cluster_bits).max(1);
        let before = index.number() as u64 % clusters;
        let mut cluster = GuestCluster::new(around.number() - before);
        let end = (cluster + clusters).min(slice.end(g));
        let mut unmapped = Vec::new();
        while cluster < end && cluster.start(g) < self.end() {
            let entry = self.entry(cluster)?;
            let place = HostOffset::in_data_file(cluster.start(g));
            if let Entry::Standard(s) = entry
                && s.host.is_none_or(|host| host == place)
                && s.data != g.all()
            {
                unmapped.push(Unmapped { cluster, entry });
            }
            cluster += 1;
        }
        Ok(unmapped)
    }

    /// Zeroes what the data file has where a cluster has no data.
    fn zero_unmapped(
        &self,
        data: &FileEnd,
        cluster: GuestCluster,
        entry: &Entry,
    ) -> Result<(), ImageError> {
        let g = &self.g;
        let mut at = cluster.start(g);
        let end = (cluster + 1).start(g).min(self.end());
        while at < end {
            let (kind, len) = entry.at(g, g.in_cluster(at));
            let part_end = (at + len).min(end);
            if !matches!(kind, Kind::Data(_)) {
                zero(data, at, part_end)?;
            }
            at = part_end;
        }
        Ok(())
    }
}

/// Writes zeroes only where something else is: holes stay holes.
fn zero(data: &FileEnd, from: GuestOffset, end: GuestOffset) -> Result<(), ImageError> {
    let mut at = from;
    while at < end {
        let mut bytes = vec![0; PIECE.min(end - at) as usize];
        let in_file = HostOffset::in_data_file(at);
        data.read_at("reading the data file", in_file, &mut bytes)?;
        if bytes.iter().any(|&byte| byte != 0) {
            bytes.fill(0);
            data.write_at("zeroing the data file", in_file, &bytes)?;
        }
        at += bytes.len() as u64;
    }
    Ok(())
}
