//! Changes to the tables in memory, made under the state lock.
//!
//! A change that needs something first returns a [`Retry`], which names it. [`Qcow2::change`] does that without the
//! lock and tries again. A lack of space is met the same way: clusters that were freed in memory are
//! [reclaimed](Qcow2::reclaim) before anything fails for it, and before the file grows. Nothing here writes to the file except the first content of a new L2 table, and the entries
//! of a [raw data file](super::raw_data_file); [`flush`](super::flush) writes the tables, in an order that keeps the
//! image consistent after a crash.

use super::entry::{COPIED, Entry, Standard, table_at};
use super::error::ImageError;
use super::journal::Change;
use super::reclaim::Reclaimed;
use super::retry::{MayBlock, Retry};
use super::types::{GuestCluster, HostOffset, L1Index, PieceIndex, Run, SliceIndex};
use super::write::Awaited;
use super::{ImageState, Load, Qcow2};

/// Changed metadata kept for the next flush at most, in bytes: 8192 pieces of 4 KiB, which is what 4 Mi
/// contiguous allocated clusters change.
const DIRTY_BYTES_MAX: u64 = 32 << 20;

/// Unlinked clusters, which only a flush makes reusable, at most: 1 GiB at 64 KiB a cluster.
const UNLINKED_MAX: u64 = 16384;

impl Qcow2 {
    /// Makes a change under the state lock, after doing what it needs without the lock. Returns what to wait for if
    /// it needs clusters that older requests still use; the caller holds no pin then, or they would never be free.
    pub(super) fn change_or_wait<T>(
        &self,
        mut change: impl FnMut(&mut ImageState) -> Result<T, Retry>,
    ) -> Result<Result<T, Awaited>, ImageError> {
        self.check_writable()?;
        self.begin_writing()?;
        loop {
            let mut state = self.lock();
            let reclaimed = state.refcounts.reclaimed();
            let retry = if self.is_full(&state) {
                Retry::CacheFull
            } else {
                match change(&mut state) {
                    Ok(done) => return Ok(Ok(done)),
                    Err(Retry::Error(error)) if error.is_no_space() => Retry::Error(error),
                    Err(Retry::Error(error)) => return Err(self.report(&mut state, error)),
                    Err(retry) => retry,
                }
            };
            drop(state);
            let ready = match retry {
                Retry::Load(slice) => self.load(Load::Slice(slice)),
                Retry::TableFull(entries) => self.grow_refcount_table(entries),
                Retry::CacheFull => self.flush(),
                Retry::MapFirst(cluster) => self.map_in_raw_data_file(cluster),
                Retry::Later => Ok(()),
                Retry::Reclaim => match self.reclaim(reclaimed)? {
                    // A request that hangs delays others only where the file would grow without need.
                    Reclaimed::InUse if self.has_full_size() => {
                        return Ok(Err(Awaited::FreedClusters));
                    }
                    Reclaimed::InUse => {
                        self.lock().refcounts.let_grow();
                        Ok(())
                    }
                    Reclaimed::Some | Reclaimed::None => Ok(()),
                },
                Retry::WouldBlock => unreachable!("it may block"),
                Retry::Error(error) => Err(error),
            };
            match ready {
                Err(error) if error.is_no_space() => match self.reclaim(reclaimed)? {
                    Reclaimed::Some => {}
                    Reclaimed::InUse => return Ok(Err(Awaited::FreedClusters)),
                    Reclaimed::None => return Err(error),
                },
                ready => ready?,
            }
        }
    }

    /// The same for a change that does not wait: it fails if there is no space without those clusters.
    pub(super) fn change<T>(
        &self,
        change: impl FnMut(&mut ImageState) -> Result<T, Retry>,
    ) -> Result<T, ImageError> {
        self.change_or_wait(change)?
            .map_err(|_| ImageError::NoSpace)
    }

    /// Whether so many changes are only in memory that a flush must come first.
    pub(super) fn is_full(&self, state: &ImageState) -> bool {
        let held_back = (state.dirty_l2.len() + state.dirty_l1.len()) as u64 * self.g.piece()
            + state.refcounts.dirty_bytes();
        held_back > DIRTY_BYTES_MAX
            || state.unlinked_clusters > UNLINKED_MAX
            || state.journal_full()
    }

    /// The L2 entry of a cluster.
    pub(super) fn entry(&self, cluster: GuestCluster) -> Result<Entry, Retry> {
        let (slice, entry) = cluster.slice(&self.g);
        let found = self.cache.find(slice).ok_or(Retry::Load(slice))?;
        let (word, bitmap) = found.words(&self.g, entry);
        Entry::decode(&self.g, word, bitmap).map_err(|_| {
            let what = "an L2 entry leads nowhere, or to metadata";
            ImageError::damaged_disk(what, cluster.start(&self.g)).into()
        })
    }

    /// Changes the L2 entry of a cluster. The caller records its changes before it releases the lock.
    pub(super) fn set_entry(
        &self,
        state: &mut ImageState,
        cluster: GuestCluster,
        entry: Entry,
    ) -> Result<(), Retry> {
        self.will_set_entry(state, cluster, entry);
        self.publish_entry(state, cluster, entry)
    }

    /// Queues a change for the journal; the change itself is made after it is recorded.
    pub(super) fn will_set_entry(
        &self,
        state: &mut ImageState,
        cluster: GuestCluster,
        entry: Entry,
    ) {
        state.changes.push(Change::Entry {
            cluster,
            words: entry.encode(&self.g),
        });
    }

    /// Makes an entry visible to lookups, and marks it for the next flush.
    pub(super) fn publish_entry(
        &self,
        state: &mut ImageState,
        cluster: GuestCluster,
        entry: Entry,
    ) -> Result<(), Retry> {
        let (slice, index) = cluster.slice(&self.g);
        let frame = self.cache.find(slice).ok_or(Retry::Load(slice))?.frame;
        let words = self.g.words();
        // Before a lookup can find it: a writer that finds it asks whether a flush is needed.
        self.changes.add();
        self.cache
            .set(frame, index, &entry.encode(&self.g)[..words]);
        let piece = PieceIndex::of((index.number() * words * 8) as u64, &self.g);
        *state.dirty_l2.entry(frame).or_default() |= 1 << piece.number();
        Ok(())
    }

    /// Ensures that a slice is in memory, and that its L2 table is not shared.
    ///
    /// The first content of a new table, empty or a copy, is written here. The L1 table in the file refers to
    /// it only after that is durable, see [`flush`](super::flush).
    pub(super) fn own_table(&self, state: &mut ImageState, slice: SliceIndex) -> Result<(), Retry> {
        let g = &self.g;
        let (table, _) = slice.table(g);
        let l1_entry = self.l1.get(table);
        let Ok(old) = table_at(g, l1_entry) else {
            return Err(ImageError::bad_entry("an L1 entry leads nowhere", l1_entry).into());
        };
        if old.is_some() && self.cache.find(slice).is_none() {
            return Err(Retry::Load(slice));
        }
        if l1_entry & COPIED != 0 {
            return Ok(());
        }
        if old.is_none() {
            self.insert_empty(state, slice)?;
        }
        let refcounts = &mut state.refcounts;
        let (run, _) = refcounts.allocate(&self.file, &mut state.metadata, 1, MayBlock::Yes)?;
        let at = run.first.start(g);
        if let Err(error) = self.write_table(old, at) {
            let _ = state.refcounts.give_back(&self.file, run.first);
            return Err(error.into());
        }
        state.metadata.add_table(run.first);
        state.refcounts.linked(run);
        if let Some(old) = old {
            state.unlink(Run::one(old.cluster(g)));
        }
        let word = at.bytes() | COPIED;
        self.set_table(state, table, word);
        state.changes.push(Change::Table { index: table, word });
        Ok(())
    }

    /// Changes an entry of the L1 table.
    pub(super) fn set_table(&self, state: &mut ImageState, index: L1Index, word: u64) {
        self.changes.add();
        self.l1.set(index, word);
        state.dirty_l1.insert(index.piece(&self.g));
    }

    /// Writes all of it, even if the file has zeroes there already: the flush that writes entries needs no space then.
    fn write_table(&self, old: Option<HostOffset>, at: HostOffset) -> Result<(), ImageError> {
        let mut bytes = vec![0; self.g.cluster() as usize];
        if let Some(old) = old {
            self.file.read_at("reading an L2 table", old, &mut bytes)?;
        }
        self.file.write_at("writing a new L2 table", at, &bytes)
    }

    /// Unlinks the clusters of an entry that was replaced, except the one at `kept`.
    pub(super) fn unlink(&self, state: &mut ImageState, entry: Entry, kept: Option<HostOffset>) {
        let run = match entry {
            Entry::Compressed(compressed) => compressed.clusters(&self.g),
            Entry::Standard(Standard {
                host: Some(host), ..
            }) if Some(host) != kept && !self.g.external => Run::one(host.cluster(&self.g)),
            Entry::Standard(_) => return,
        };
        state.unlink(run);
    }
}
