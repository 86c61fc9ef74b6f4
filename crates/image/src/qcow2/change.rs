//! Changes to the metadata in memory: how one is made under the lock of the state, and the entries that it sets.
//!
//! A change that finds something missing gives up with a [`Retry`], which says what must be done first without the
//! lock; [`Qcow2::change`] does that and tries again. Nothing here writes to the file, except the first content of a
//! new L2 table; [`flush`](super::flush) writes the rest, in an order that a crash cannot break.

use super::entry::{COPIED, Entry, Standard, table_at};
use super::error::ImageError;
use super::file::FileEnd;
use super::journal::Change;
use super::types::{GuestCluster, HostOffset, L1Index, Run, SliceIndex};
use super::{Load, Qcow2, State};

/// Changed metadata that is held back for the next flush, in bytes: 8192 pieces of 4 KiB, which is
/// what 4 Mi allocated clusters change, if they are beside each other.
const DIRTY_BYTES_MAX: u64 = 32 << 20;

/// Clusters that are given up, but may be reused only after a flush: 1 GiB at 64 KiB a cluster.
const UNLINKED_MAX: u64 = 16384;

/// Why a change under the lock of the state stops: something must be done first, without that lock.
#[derive(Debug)]
pub(crate) enum Retry {
    /// The refcount table must grow.
    TableFull,
    /// A slice must be loaded.
    Load(SliceIndex),
    /// All places for a slice have changes that must be written.
    CacheFull,
    /// The file must be read or made longer, or more be looked at than the caller has time for.
    WouldBlock,
    /// So much has been looked at that others come first; it goes on where it was.
    Later,
    Error(ImageError),
}

impl From<ImageError> for Retry {
    fn from(error: ImageError) -> Self {
        Self::Error(error)
    }
}

/// Whether a change may read the file and make it longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MayBlock {
    Yes,
    No,
}

impl MayBlock {
    /// Whether the file reaches so far, or may be made to.
    pub fn grow(self, end: &FileEnd, to: HostOffset) -> Result<(), Retry> {
        match self {
            Self::No if end.get() < to => Err(Retry::WouldBlock),
            _ => Ok(()),
        }
    }
}

impl Qcow2 {
    /// Does a change under the lock of the state, and whatever it needs done first without it.
    pub(super) fn change<T>(
        &self,
        mut change: impl FnMut(&mut State) -> Result<T, Retry>,
    ) -> Result<T, ImageError> {
        self.check_writable()?;
        self.begin()?;
        loop {
            let mut state = self.lock();
            let retry = if self.is_full(&state) {
                Retry::CacheFull
            } else {
                match change(&mut state) {
                    Ok(done) => return Ok(done),
                    Err(Retry::Error(error)) => return Err(self.report(&mut state, error)),
                    Err(retry) => retry,
                }
            };
            drop(state);
            match retry {
                Retry::Load(slice) => self.load(Load::Slice(slice))?,
                Retry::TableFull => self.grow_refcount_table()?,
                Retry::CacheFull => self.flush()?,
                Retry::Later => {}
                Retry::WouldBlock => unreachable!("it may block"),
                Retry::Error(error) => return Err(error),
            }
        }
    }

    /// Whether so much is held back that it must be flushed first.
    pub(super) fn is_full(&self, state: &State) -> bool {
        let held_back = (state.dirty_l2.len() + state.dirty_l1.len()) as u64 * self.g.piece()
            + state.refcounts.dirty_bytes();
        held_back > DIRTY_BYTES_MAX
            || state.unlinked_clusters > UNLINKED_MAX
            || state.journal_full()
    }

    /// The entry of a cluster.
    pub(super) fn entry(&self, cluster: GuestCluster) -> Result<Entry, Retry> {
        let (slice, entry) = self.g.slice_of(cluster);
        let found = self.cache.find(slice).ok_or(Retry::Load(slice))?;
        let (word, bitmap) = found.words(&self.g, entry);
        Entry::decode(&self.g, word, bitmap).map_err(|_| {
            let what = "an L2 entry leads nowhere, or to metadata; offset of the disk";
            ImageError::damaged(what, cluster.start(&self.g).bytes()).into()
        })
    }

    /// Changes the entry of a cluster. The caller records its changes before the lock is given up.
    pub(super) fn set_entry(
        &self,
        state: &mut State,
        cluster: GuestCluster,
        entry: Entry,
    ) -> Result<(), Retry> {
        self.will_set_entry(state, cluster, entry);
        self.publish_entry(state, cluster, entry)
    }

    /// Has a change to be recorded, which is made after that.
    pub(super) fn will_set_entry(&self, state: &mut State, cluster: GuestCluster, entry: Entry) {
        state.changes.push(Change::Entry {
            cluster,
            words: entry.encode(&self.g),
        });
    }

    /// Has the entry of a cluster found from now on, and written by the next flush.
    pub(super) fn publish_entry(
        &self,
        state: &mut State,
        cluster: GuestCluster,
        entry: Entry,
    ) -> Result<(), Retry> {
        let (slice, place) = self.g.slice_of(cluster);
        let frame = self.cache.find(slice).ok_or(Retry::Load(slice))?.frame;
        let words = self.g.words();
        // Before it is found: who writes there asks whether it must be flushed.
        self.changes.add();
        self.cache
            .set(frame, place, &entry.encode(&self.g)[..words]);
        let piece = (place.number() * words * 8) as u64 / self.g.piece();
        *state.dirty_l2.entry(frame).or_default() |= 1 << piece;
        Ok(())
    }

    /// Sees to it that a slice is in memory, and its table nobody else's.
    ///
    /// A new table is written here, as it is at first: empty, or a copy. The L1 table in the file does
    /// not lead to it before that is durable, see [`flush`](super::flush).
    pub(super) fn own_table(&self, state: &mut State, slice: SliceIndex) -> Result<(), Retry> {
        let g = &self.g;
        let (table, _) = g.table_of(slice);
        let l1_entry = self.l1.get(table);
        let Ok(old) = table_at(g, l1_entry) else {
            return Err(ImageError::damaged("an L1 entry leads nowhere", l1_entry).into());
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
        let (run, fresh) = refcounts.allocate(&self.file, &mut state.metadata, 1, MayBlock::Yes)?;
        let at = run.first.start(g);
        if let Err(error) = self.write_table(old, at, fresh) {
            let _ = state.refcounts.release(&self.file, run.first);
            return Err(error.into());
        }
        state.metadata.add_table(run.first);
        if let Some(old) = old {
            state.unlinked_clusters += 1;
            state.unlinked.push(Run::one(old.cluster(g)));
        }
        let word = at.bytes() | COPIED;
        self.set_table(state, table, word);
        state.changes.push(Change::Table { index: table, word });
        Ok(())
    }

    /// Changes an entry of the L1 table.
    pub(super) fn set_table(&self, state: &mut State, index: L1Index, word: u64) {
        self.changes.add();
        self.l1.set(index, word);
        state.dirty_l1.insert(index.number() * 8 / self.g.piece());
    }

    fn write_table(
        &self,
        old: Option<HostOffset>,
        at: HostOffset,
        fresh: bool,
    ) -> Result<(), ImageError> {
        let mut bytes = vec![0; self.g.cluster() as usize];
        if let Some(old) = old {
            self.file.read_at("reading an L2 table", old, &mut bytes)?;
        }
        if fresh && old.is_none() {
            return Ok(());
        }
        self.file.write_at("writing a new L2 table", at, &bytes)
    }

    /// Nothing leads to what this entry led to any more, if that is not `kept`.
    pub(super) fn unlink(&self, state: &mut State, entry: Entry, kept: Option<HostOffset>) {
        let run = match entry {
            Entry::Compressed(compressed) => compressed.clusters(&self.g),
            Entry::Standard(Standard {
                host: Some(host), ..
            }) if Some(host) != kept && !self.g.external => Run::one(host.cluster(&self.g)),
            Entry::Standard(_) => return,
        };
        state.unlinked_clusters += run.clusters;
        match state.unlinked.last_mut() {
            Some(last) if last.end() == run.first => last.clusters += run.clusters,
            _ => state.unlinked.push(run),
        }
    }
}
