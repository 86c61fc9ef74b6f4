//! Replay of a journal in an image that has just been opened.
//!
//! 1. Check all changes against the image and against each other, and change the refcounts and the L1 table in
//!    memory. If a change is invalid, the image is not opened, and nothing has been written.
//! 2. Flush the refcounts and then the L1 table, like [any flush](super::flush).
//! 3. Write L2 entries directly to the file, and flush. No slice of a table is in memory yet.
//! 4. Later flushes free the clusters that no table refers to any more, as usual.
//!
//! This takes two passes over the changes and a fixed number of flushes, whatever the size of the cache. A kill in
//! step 1 leaves {the file unchanged}. A kill in 2 or 3 leaves {old} or {new} for each table and entry independently, and
//! the journal and the journal bits of the image unchanged: the next process replays all changes, and those that are in
//! the file already change nothing. A crash of the host leaves the same, and no journal: after 2 everything that entries
//! refer to is counted and durable, so the image is consistent, with {any part} of what was not flushed. The image gets
//! the bits of another journal, or none, only with the first write that follows, after the flush of 3.
//!
//! Clusters that the changes unlink stay counted only if an entry changed more than once between two flushes. They are
//! leaked until they are [searched for](super::leaks).

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering::SeqCst;

use super::entry::{COPIED, Entry, table_at};
use super::error::ImageError;
use super::file::Piece;
use super::journal::{
    Change, Found, Journal, JournalEvent, JournalFile, empty, journal_bits, read,
};
use super::progress::{Progress, ReportProgress};
use super::types::{BlockIndex, GuestCluster, HOST_BITS, HostOffset, L1Index, Run};
use super::{ImageState, Qcow2, Qcow2Error};
use crate::bytes::{be64, put64};

/// A new L2 entry: the cluster of the disk, and the words of its entry.
type NewEntry = (GuestCluster, [u64; 2]);

/// Entries in a piece: the offset in it in bytes, the cluster and the words.
type Entries<'a> = &'a mut dyn Iterator<Item = (usize, GuestCluster, [u64; 2])>;

/// Changes between two progress reports. Each change may have to read a refcount block from slow storage.
const PROGRESS_EVERY: u64 = 64;

enum ReplayError {
    Image(ImageError),
    /// The caller has stopped it.
    Stopped,
}

impl From<ImageError> for ReplayError {
    fn from(error: ImageError) -> Self {
        Self::Image(error)
    }
}

impl Qcow2 {
    /// Reads the journal of an image that has just been opened for writing, and replays it.
    pub(super) fn replay_journal(
        &self,
        file: JournalFile,
        tell: ReportProgress<'_>,
    ) -> Result<(), Qcow2Error> {
        let (bits, snapshots) = {
            let header = &self.lock().header;
            (journal_bits(header), header.snapshots > 0)
        };
        let (contents, lost) = read(&file, bits).map_err(Qcow2Error::Journal)?;
        // Journal bits put internal snapshots at risk: they stay only if the journal may still be found.
        let elsewhere = match &contents {
            Found::Missing => true,
            Found::Outdated => !snapshots,
            Found::Nothing | Found::Changes { .. } => false,
        };
        let foreign = matches!(contents, Found::Outdated);
        let is_there = matches!(contents, Found::Nothing | Found::Changes { .. });
        self.lock().lineage.found_journal(is_there);
        self.has_outdated_journal.store(lost.here, SeqCst);
        if lost.any() && !matches!(contents, Found::Changes { .. }) {
            self.lock().outdated_journal = Some(file.storage.clone());
        }
        match contents {
            Found::Nothing => {}
            Found::Outdated => (file.on_event)(JournalEvent::Outdated),
            Found::Missing => (file.on_event)(JournalEvent::Missing { snapshots }),
            Found::Changes { changes, .. } if changes.is_empty() => {}
            Found::Changes { changes, all } => {
                self.replay(&changes, all, tell)
                    .map_err(|stop| match stop {
                        ReplayError::Image(error) => Qcow2Error::Replay(error),
                        ReplayError::Stopped => Qcow2Error::Stopped,
                    })?;
                self.mark_complete().map_err(Qcow2Error::Image)?;
                // Otherwise it is replayed again, or counts as missing if the image is closed by a process that is killed then.
                let bits = journal_bits(&self.lock().header);
                let _ = empty(&file, bits);
                (file.on_event)(JournalEvent::Replayed(changes.len() as u64));
            }
        }
        self.lock().journal = Some(Journal::new(file, !elsewhere, foreign, lost));
        Ok(())
    }

    /// `all`: nothing in the file is newer than these changes.
    fn replay(
        &self,
        changes: &[Change],
        all: bool,
        tell: ReportProgress<'_>,
    ) -> Result<(), ReplayError> {
        let mut count = Counted {
            tell,
            done: 0,
            total: 3 * changes.len() as u64,
        };
        let (entries, unlinked) = {
            let mut state = self.lock();
            let entries = self.replay_tables(&mut state, changes, all, &mut count)?;
            let unlinked = self.check_entries(&mut state, &entries, &mut count)?;
            (entries, unlinked)
        };
        self.flush()?;
        self.write_entries(&entries, &mut count)?;
        self.file.flush()?;
        let mut state = self.lock();
        for (old, host) in unlinked {
            self.unlink(&mut state, old, host);
        }
        self.changes.add();
        drop(state);
        Ok(self.flush()?)
    }

    /// Changes refcounts and the L1 table in memory; returns the new L2 entries.
    fn replay_tables(
        &self,
        state: &mut ImageState,
        changes: &[Change],
        all: bool,
        count: &mut Counted<'_>,
    ) -> Result<Vec<NewEntry>, ReplayError> {
        let mut entries = BTreeMap::new();
        for &change in changes {
            count.one()?;
            match change {
                Change::Block { number, at } => self.replay_block(state, number, at)?,
                Change::Refcount { run, refcount } => {
                    self.replay_refcounts(state, run, refcount, all, count)?;
                }
                Change::Table { index, word } => self.replay_table(state, index, word)?,
                Change::Entry { cluster, words } => {
                    entries.insert(cluster, words);
                }
            }
        }
        Ok(entries.into_iter().collect())
    }

    fn replay_block(
        &self,
        state: &mut ImageState,
        number: BlockIndex,
        at: HostOffset,
    ) -> Result<(), ImageError> {
        let cluster = self.g.cluster();
        let known = at.is_of_cluster(cluster) && at != HostOffset::START;
        if !known || at + cluster > self.file.get() || !state.refcounts.put_block(number, at) {
            return Err(ImageError::damaged("a refcount block is elsewhere", at));
        }
        state.metadata.add_table(at.cluster(&self.g));
        Ok(())
    }

    fn replay_refcounts(
        &self,
        state: &mut ImageState,
        run: Run,
        refcount: u64,
        all: bool,
        count: &mut Counted<'_>,
    ) -> Result<(), ReplayError> {
        if run.end().number() > 1 << (HOST_BITS - self.g.cluster_bits) {
            let what = "a refcount is that of no cluster";
            return Err(ImageError::bad_entry(what, run.first.number()).into());
        }
        // No process takes more clusters at a time than its file has.
        if run.clusters > self.g.clusters(self.file.get().bytes()) {
            let end = run.end().start(&self.g);
            return Err(ImageError::damaged("the file is shorter than it was", end).into());
        }
        for cluster in run.each() {
            let refcounts = &mut state.refcounts;
            refcounts.put_refcount(&self.file, cluster, refcount, all)?;
            if cluster.number() % PROGRESS_EVERY == 0 {
                count.tell()?;
            }
        }
        Ok(())
    }

    fn replay_table(
        &self,
        state: &mut ImageState,
        index: L1Index,
        word: u64,
    ) -> Result<(), ImageError> {
        let Ok(Some(at)) = table_at(&self.g, word) else {
            return Err(ImageError::bad_entry("an L1 entry leads nowhere", word));
        };
        let file_end = self.file.get();
        if word & COPIED == 0
            || index.number() >= self.l1.entries()
            || at + self.g.cluster() > file_end
        {
            return Err(ImageError::damaged("an L2 table is elsewhere", at));
        }
        let old = self.l1.get(index);
        let Ok(old) = table_at(&self.g, old) else {
            return Err(ImageError::bad_entry("an L1 entry leads nowhere", old));
        };
        if old == Some(at) {
            return Ok(());
        }
        if let Some(old) = old {
            state.unlink(Run::one(old.cluster(&self.g)));
        }
        state.metadata.add_table(at.cluster(&self.g));
        self.set_table(state, index, word);
        Ok(())
    }

    /// Checks the new entries against the tables and refcounts in memory. Returns the entries in the file that they
    /// replace, each with the host cluster that stays in use.
    fn check_entries(
        &self,
        state: &mut ImageState,
        entries: &[NewEntry],
        count: &mut Counted<'_>,
    ) -> Result<Vec<(Entry, Option<HostOffset>)>, ReplayError> {
        let mut replaced = Vec::new();
        self.each_piece(entries, count, |piece, changes| {
            for (offset, cluster, words) in changes {
                let at = cluster.start(&self.g);
                let new = match Entry::decode(&self.g, words[0], words[1]) {
                    Ok(Entry::Standard(new)) => new,
                    _ => return Err(ImageError::damaged_disk("a new L2 entry is invalid", at)),
                };
                let bitmap = if self.g.extended {
                    be64(&piece.bytes, offset + 8)
                } else {
                    0
                };
                let Ok(old) = Entry::decode(&self.g, be64(&piece.bytes, offset), bitmap) else {
                    return Err(ImageError::damaged_disk("an L2 entry leads nowhere", at));
                };
                if let Some(host) = new.host.filter(|_| !self.g.external) {
                    self.check_host(state, host, new.data != 0)?;
                }
                if old != Entry::Standard(new) {
                    replaced.push((old, new.host));
                }
            }
            Ok(())
        })?;
        Ok(replaced)
    }

    /// Checks that a cluster may hold guest data, and that the data is inside the file.
    fn check_host(
        &self,
        state: &mut ImageState,
        host: HostOffset,
        data: bool,
    ) -> Result<(), ImageError> {
        let cluster = host.cluster(&self.g);
        let is_in_file = !data || host + self.g.cluster() <= self.file.get();
        if !is_in_file
            || state.metadata.within(Run::one(cluster)).is_some()
            || state.refcounts.get(&self.file, cluster)? == 0
        {
            return Err(ImageError::damaged("data is where it cannot be", host));
        }
        Ok(())
    }

    fn write_entries(
        &self,
        entries: &[NewEntry],
        count: &mut Counted<'_>,
    ) -> Result<(), ReplayError> {
        self.each_piece(entries, count, |piece, changes| {
            for (offset, _, words) in changes {
                let words = &words[..self.g.words()];
                for (at, &word) in (offset..).step_by(8).zip(words) {
                    put64(&mut piece.bytes, at, word);
                }
            }
            self.file
                .write_at("writing an L2 table", piece.at, &piece.bytes)
        })
    }

    /// Calls `visit` for each piece of an L2 table that contains some of these entries, with the piece as in the file
    /// and its entries.
    fn each_piece(
        &self,
        entries: &[NewEntry],
        count: &mut Counted<'_>,
        mut visit: impl FnMut(&mut Piece, Entries<'_>) -> Result<(), ImageError>,
    ) -> Result<(), ReplayError> {
        let entry_bytes = 8 * self.g.words();
        let per_piece = self.g.piece() / entry_bytes as u64;
        let piece_of = |(cluster, _): &NewEntry| cluster.number() / per_piece;
        for group in entries.chunk_by(|a, b| piece_of(a) == piece_of(b)) {
            let first = GuestCluster::new(piece_of(&group[0]) * per_piece);
            let (slice, index) = first.slice(&self.g);
            let (table, offset) = slice.table(&self.g);
            let word = self.l1.get(table);
            let disk_at = first.start(&self.g);
            let Ok(Some(at)) = table_at(&self.g, word) else {
                return Err(ImageError::damaged_disk("an L2 entry has no table", disk_at).into());
            };
            if word & COPIED == 0 {
                let what = "an L2 entry has no table of its own";
                return Err(ImageError::damaged_disk(what, disk_at).into());
            }
            let at = at + (offset + (index.number() * entry_bytes) as u64);
            let mut bytes = vec![0; self.g.piece() as usize];
            let read = self.file.read_at("reading an L2 table", at, &mut bytes)?;
            if read < bytes.len() {
                return Err(ImageError::damaged("the file ends before an L2 table", at).into());
            }
            let mut piece = Piece { at, bytes };
            let entries = group.iter().map(|&(cluster, words)| {
                let offset = (cluster - first) as usize * entry_bytes;
                (offset, cluster, words)
            });
            visit(&mut piece, &mut { entries })?;
            count.done += group.len() as u64;
            count.tell()?;
        }
        Ok(())
    }
}

/// Reports progress to the caller.
struct Counted<'a> {
    tell: ReportProgress<'a>,
    done: u64,
    total: u64,
}

impl Counted<'_> {
    /// Counts a change.
    fn one(&mut self) -> Result<(), ReplayError> {
        self.done += 1;
        if self.done.is_multiple_of(PROGRESS_EVERY) {
            self.tell()
        } else {
            Ok(())
        }
    }

    fn tell(&mut self) -> Result<(), ReplayError> {
        let (done, total) = (self.done, self.total);
        match (self.tell)(Progress { done, total }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ReplayError::Stopped),
        }
    }
}
