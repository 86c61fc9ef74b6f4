//! A journal's changes, done again in an image that has just been opened, and then flushed. A kill in the
//! midst of that leaves the journal as it was, and the image with some of the changes: the next one does
//! them all again.
//!
//! Clusters that the changes give up stay counted only if more than one change of an entry came between
//! two flushes; `qemu-img check -r leaks` gives these back.

use std::collections::BTreeMap;
use std::ops::Range;

use super::entry::{COPIED, Entry, Standard, table_at};
use super::error::ImageError;
use super::journal::{AUTOCLEAR_JOURNAL, Change, Found, Journal, JournalEvent, JournalPlace, read};
use super::refcount::{Run, Stop};
use super::{Load, Qcow2, Qcow2Error, State};

impl Qcow2 {
    /// Takes up the journal of an image that has just been opened for writing, and does what it has.
    pub(super) fn take_up(&self, place: JournalPlace) -> Result<(), Qcow2Error> {
        let said = self.lock().header.autoclear & AUTOCLEAR_JOURNAL;
        let found = read(&place, said).map_err(Qcow2Error::Journal)?;
        let ended = !matches!(found, Found::Outdated | Found::Missing);
        match found {
            Found::Nothing => {}
            Found::Outdated => (place.tell)(JournalEvent::Outdated),
            Found::Missing => (place.tell)(JournalEvent::Missing),
            Found::Changes { changes, .. } if changes.is_empty() => {}
            Found::Changes { changes, all } => {
                let done = self.replay(&changes, all).and_then(|()| self.flush());
                done.map_err(Qcow2Error::Replay)?;
                (place.tell)(JournalEvent::Replayed(changes.len() as u64));
            }
        }
        self.lock().journal = Some(Journal::new(place, ended));
        Ok(())
    }

    /// `all`: nothing in the file is newer than these.
    fn replay(&self, changes: &[Change], all: bool) -> Result<(), ImageError> {
        let mut entries = BTreeMap::new();
        {
            let mut state = self.lock();
            for &change in changes {
                let done = match change {
                    Change::Block { number, at } => self.replay_block(&mut state, number, at),
                    Change::Refcount {
                        first,
                        clusters,
                        refcount,
                    } => self.replay_refcounts(
                        &mut state,
                        first..first.saturating_add(clusters),
                        refcount,
                        all,
                    ),
                    Change::Table { index, word } => self.replay_table(&mut state, index, word),
                    Change::Entry { cluster, words } => {
                        entries.insert(cluster, words);
                        Ok(())
                    }
                };
                done?;
            }
            self.changed();
        }
        for (cluster, words) in entries {
            self.replay_entry(cluster, words)?;
        }
        Ok(())
    }

    fn replay_block(&self, state: &mut State, number: u64, at: u64) -> Result<(), ImageError> {
        let known = at.is_multiple_of(self.g.cluster()) && at >> 56 == 0 && at != 0;
        if !known || !state.refcounts.put_block(number, at) {
            return misfit("a refcount block is elsewhere", at);
        }
        self.file.grow(at + self.g.cluster())?;
        state.metadata.add_table(at >> self.g.cluster_bits);
        Ok(())
    }

    fn replay_refcounts(
        &self,
        state: &mut State,
        clusters: Range<u64>,
        refcount: u64,
        all: bool,
    ) -> Result<(), ImageError> {
        let (first, end) = (clusters.start, clusters.end);
        if end > 1 << (56 - self.g.cluster_bits) {
            return misfit("a refcount is that of no cluster", first);
        }
        // No process takes more clusters at a time than its file has.
        if end - first > self.g.clusters(self.file.get()) {
            return misfit(
                "the file is shorter than it was",
                end << self.g.cluster_bits,
            );
        }
        for cluster in clusters {
            state
                .refcounts
                .put_refcount(&self.file, cluster, refcount, all)?;
        }
        Ok(())
    }

    fn replay_table(&self, state: &mut State, index: u64, word: u64) -> Result<(), ImageError> {
        let Ok(Some(at)) = table_at(&self.g, word) else {
            return misfit("an L1 entry leads nowhere", word);
        };
        let file_end = self.file.get();
        if word & COPIED == 0 || index >= self.l1.entries() || at + self.g.cluster() > file_end {
            return misfit("an L2 table is elsewhere", at);
        }
        let Ok(old) = table_at(&self.g, self.l1.get(index)) else {
            return misfit("an L1 entry leads nowhere", self.l1.get(index));
        };
        if old == Some(at) {
            return Ok(());
        }
        if let Some(old) = old {
            state.unlinked_clusters += 1;
            state.unlinked.push(Run {
                first: old >> self.g.cluster_bits,
                clusters: 1,
            });
        }
        state.metadata.add_table(at >> self.g.cluster_bits);
        self.l1.set(index, word);
        state.dirty_l1.insert(index * 8 / self.g.piece());
        Ok(())
    }

    fn replay_entry(&self, cluster: u64, words: [u64; 2]) -> Result<(), ImageError> {
        let disk_at = cluster << self.g.cluster_bits;
        let new = match Entry::decode(&self.g, words[0], words[1]) {
            // Also behind the end of the disk, where it was about to grow.
            Ok(new @ Entry::Standard(_)) if self.addresses(cluster) => new,
            _ => return misfit("an L2 entry cannot be; offset of the disk", disk_at),
        };
        loop {
            let mut state = self.lock();
            let stop = if self.is_full(&state) {
                Stop::CacheFull
            } else {
                match self.replay_entry_in(&mut state, cluster, new) {
                    Ok(()) => return Ok(()),
                    Err(Stop::Error(error)) => return Err(error),
                    Err(stop) => stop,
                }
            };
            drop(state);
            match stop {
                Stop::Load(slice) => {
                    let (table, _) = self.g.table_of(slice);
                    if self.l1.get(table) & COPIED == 0 {
                        return misfit("an L2 entry has no table; offset of the disk", disk_at);
                    }
                    self.load(Load::Slice(slice))?;
                }
                // What the file has then is as sound as any: entries lead to what is counted.
                _ => self.flush()?,
            }
        }
    }

    /// Whether there is an entry of the L1 table for a cluster of the disk.
    fn addresses(&self, cluster: u64) -> bool {
        let (table, _) = self.g.table_of(self.g.slice_of(cluster).0);
        table < self.l1.entries()
    }

    fn replay_entry_in(&self, state: &mut State, cluster: u64, new: Entry) -> Result<(), Stop> {
        let old = self.entry(cluster)?;
        let Entry::Standard(Standard { host, data, .. }) = new else {
            return Ok(());
        };
        if let Some(host) = host.filter(|_| !self.g.external) {
            let number = host >> self.g.cluster_bits;
            let there = data == 0 || host + self.g.cluster() <= self.file.get();
            if !there
                || state.metadata.within(number, 1).is_some()
                || state.refcounts.get(&self.file, number)? == 0
            {
                misfit("data is where it cannot be", host)?;
            }
        }
        if old != new {
            self.set_entry(state, cluster, new)?;
            self.unlink(state, old, host);
        }
        Ok(())
    }
}

/// The journal is this image's, and says what cannot be.
fn misfit(what: &'static str, at: u64) -> Result<(), ImageError> {
    Err(ImageError::damaged(what, at))
}
