//! Ranges that are to read as zeroes, or are not needed any more.

use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;

use super::change::{MayBlock, Retry};
use super::entry::{Entry, Kind, Standard, table_at};
use super::error::ImageError;
use super::file::FileEnd;
use super::types::{GuestCluster, GuestOffset};
use super::write::Waiting;
use super::{Qcow2, State};

/// Why a range is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// It must read as zeroes. With `unmap`, its space may be given back.
    Zeroes {
        /// Whether its space may be given back.
        unmap: bool,
    },
    /// It may read as anything: as before, or as zeroes, but never as something from below.
    Discard,
}

/// What to do with the first bytes of a range that is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ZeroStep {
    /// Nothing more; so many bytes are done.
    Done(u64),
    /// So many bytes must be written as zeroes, like any other write (if they don't read as zeroes).
    Write(u64),
    /// So many bytes must be zeroed in the data file, where they have the same offset.
    File(u64),
    /// Somebody else's write must end first.
    Wait(Waiting),
}

impl Qcow2 {
    /// Gives up the beginning of a range inside the disk; the caller goes on with the rest. Blocks,
    /// mostly for a short lock. What is done is durable after the next flush.
    ///
    /// `zeroes_around` says that the backing file has nothing but zeroes in the rest of the subcluster of `at`
    /// ([`subcluster_of`](Self::subcluster_of)), which then becomes a zero subcluster.
    ///
    /// # Errors
    /// It cannot be done; the rest of the range is as it was.
    pub(crate) fn zero_step(
        &self,
        at: GuestOffset,
        len: u64,
        why: Zeroing,
        zeroes_around: bool,
    ) -> Result<ZeroStep, ImageError> {
        let (step, recorded) = self.change(|state| {
            let step = self.try_zero(state, at, len, why, zeroes_around)?;
            Ok((step, self.record(state, MayBlock::Yes)))
        })?;
        if !recorded {
            self.flush()?;
        }
        if let (ZeroStep::Done(done), Some(data)) = (step, &self.data)
            && why != (Zeroing::Zeroes { unmap: false })
        {
            self.punch_outside(data, at, done);
        }
        Ok(step)
    }

    /// Gives the space of what now reads as zeroes back that is in a data file. There, a cluster keeps its
    /// place, and nobody else ever gets it; who writes to it meanwhile writes to what is being given up.
    /// Before the tables are durable that say so, the range reads as zeroes from the file.
    fn punch_outside(&self, data: &FileEnd, at: GuestOffset, len: u64) {
        let unit = 1 << self.g.subcluster_bits();
        let end = at + len;
        let end = if end < self.end() {
            end.down_to(unit)
        } else {
            end
        };
        let at = at.up_to(unit);
        let in_file = at.in_data_file().in_file();
        if at < end && self.punch.load(SeqCst) && data.storage().punch(in_file, end - at).is_err() {
            self.punch.store(false, SeqCst);
        }
    }

    fn try_zero(
        &self,
        state: &mut State,
        at: GuestOffset,
        len: u64,
        why: Zeroing,
        zeroes_around: bool,
    ) -> Result<ZeroStep, Retry> {
        let g = &self.g;
        let first = at.cluster(g);
        let (slice, _) = g.slice_of(first);
        let mut end = (at + len).min(g.slice_end(slice).start(g));
        let last = end.before().cluster(g);
        if let Some((cluster, waiting)) = Self::pending_in(state, first, last) {
            if cluster == first {
                return Ok(ZeroStep::Wait(waiting));
            }
            end = cluster.start(g);
        }
        if self.raw_external {
            return Ok(ZeroStep::File(end - at));
        }
        let (table, _) = g.table_of(slice);
        let empty = matches!(table_at(g, self.l1.get(table)), Ok(None));
        if empty && at >= self.backing_end() {
            return Ok(ZeroStep::Done(end - at));
        }
        if empty && g.version < 3 {
            return Ok(self.left(why, end - at));
        }
        // A part of a cluster that reaches to the end of the disk is all of it.
        let disk_end = self.end();
        let whole = |cluster: GuestCluster| {
            let start = cluster.start(g);
            start >= at && (start + g.cluster()).min(disk_end) <= end
        };
        if !whole(first) {
            return self.zero_part(state, (at, end), why, zeroes_around);
        }
        self.own_table(state, slice)?;
        let mut cluster = first;
        while cluster.start(g) < end && whole(cluster) {
            if !self.zero_cluster(state, cluster, why)? {
                break;
            }
            cluster = cluster + 1;
        }
        let reached = cluster.start(g);
        let done = reached.min(end) - at.min(reached);
        Ok(match done {
            0 => self.left(why, self.one_cluster(at, end - at)),
            done => ZeroStep::Done(done),
        })
    }

    /// What can't be done by changing tables.
    fn left(&self, why: Zeroing, len: u64) -> ZeroStep {
        match why {
            Zeroing::Zeroes { .. } => ZeroStep::Write(len),
            Zeroing::Discard => ZeroStep::Done(len),
        }
    }

    /// Gives up a part of a cluster: whole subclusters, or a part of one whose rest reads as zeroes.
    fn zero_part(
        &self,
        state: &mut State,
        (at, end): (GuestOffset, GuestOffset),
        why: Zeroing,
        zeroes_around: bool,
    ) -> Result<ZeroStep, Retry> {
        let g = &self.g;
        let cluster = at.cluster(g);
        let end = at + self.one_cluster(at, end - at);
        let first = self.subcluster_of(at);
        let whole = first.start == at && first.end <= end;
        let end = if whole {
            first.end.max(end.down_to(self.allocation_bytes()))
        } else {
            first.end.min(end)
        };
        let len = end - at;
        if !whole && why == Zeroing::Discard {
            return Ok(ZeroStep::Done(len));
        }
        if !whole {
            match self.kind_of_part(at)? {
                Kind::Zero => return Ok(ZeroStep::Done(len)),
                Kind::Hole if at >= self.backing_end() => {
                    return Ok(ZeroStep::Done(len));
                }
                Kind::Hole if zeroes_around && g.version >= 3 => {}
                _ => return Ok(ZeroStep::Write(len)),
            }
        }
        self.own_table(state, g.slice_of(cluster).0)?;
        let Entry::Standard(old) = self.entry(cluster)? else {
            return Ok(self.left(why, len));
        };
        let start = cluster.start(g);
        let touched = g.touched(at - start, end - start);
        let new = Standard {
            data: old.data & !touched,
            zero: old.zero | touched,
            ..old
        };
        if new != old {
            self.set_entry(state, cluster, Entry::Standard(new))?;
        }
        Ok(ZeroStep::Done(len))
    }

    /// The kind of the subcluster of `at`.
    fn kind_of_part(&self, at: GuestOffset) -> Result<Kind, Retry> {
        let g = &self.g;
        let cluster = at.cluster(g);
        let (table, _) = g.table_of(g.slice_of(cluster).0);
        if let Ok(None) = table_at(g, self.l1.get(table)) {
            return Ok(Kind::Hole);
        }
        let (kind, _) = self.entry(cluster)?.at(g, at.in_cluster(g));
        Ok(kind)
    }

    /// What is of one kind around a place: its subcluster, or its cluster if there are none, as far as it is in the disk.
    pub(crate) fn subcluster_of(&self, at: GuestOffset) -> Range<GuestOffset> {
        let unit = self.allocation_bytes();
        let (start, end) = (at.down_to(unit), self.end());
        if at < end {
            start..end.min(start + unit)
        } else {
            start..start + unit
        }
    }

    /// Gives up a cluster; false if it must be written instead.
    fn zero_cluster(
        &self,
        state: &mut State,
        cluster: GuestCluster,
        why: Zeroing,
    ) -> Result<bool, Retry> {
        let g = &self.g;
        let old = self.entry(cluster)?;
        let backed = cluster.start(g) < self.backing_end();
        let unmap = why != Zeroing::Zeroes { unmap: false };
        if !backed && old == Entry::NONE {
            return Ok(true);
        }
        let zero = Standard {
            zero: g.all(),
            ..Standard::default()
        };
        let new = match old {
            _ if g.version < 3 && (backed || !unmap) => return Ok(why == Zeroing::Discard),
            _ if g.version < 3 => Entry::NONE,
            Entry::Standard(s) if s.host.is_some() && (g.external || s.own && !unmap) => {
                Entry::Standard(Standard {
                    host: s.host,
                    own: true,
                    ..zero
                })
            }
            _ => Entry::Standard(zero),
        };
        if new != old {
            let kept = match new {
                Entry::Standard(s) => s.host,
                Entry::Compressed(_) => None,
            };
            self.set_entry(state, cluster, new)?;
            self.unlink(state, old, kept);
        }
        Ok(true)
    }
}
