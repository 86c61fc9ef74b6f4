//! Write-zeroes and discards.

use std::ops::Range;

use block::GuestOffset;

use super::entry::{Entry, Kind, Standard, table_at};
use super::error::ImageError;
use super::file::FileEnd;
use super::retry::{MayBlock, Retry};
use super::types::{GuestCluster, HostOffset};
use super::write::Awaited;
use super::{ImageState, Qcow2};

/// How a range is zeroed or discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroMode {
    /// It must read as zeroes.
    Zeroes {
        /// Whether its space may be freed.
        unmap: bool,
    },
    /// It may read as before or as zeroes, but never as data of the backing file.
    Discard,
}

/// What the caller must do with the first bytes of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ZeroStep {
    /// Nothing: this many bytes are done.
    Done(u64),
    /// Write this many zero bytes like any other write, unless they read as zeroes already.
    Write(u64),
    /// Zero this many bytes in the data file, at the same offset.
    File(u64),
    /// Wait for something to end first.
    Wait(Awaited),
}

impl Qcow2 {
    /// Zeroes or discards the first bytes of a range inside the disk; the caller continues with the rest. Blocks,
    /// usually only on a short lock. The change is durable after the next flush.
    ///
    /// `zeroes_around`: the backing file has only zeroes in the rest of the subcluster of `at`
    /// ([`subcluster_of`](Self::subcluster_of)), so that all of it may become a zero subcluster.
    ///
    /// # Errors
    /// It failed; the rest of the range is unchanged.
    pub(crate) fn zero_step(
        &self,
        at: GuestOffset,
        len: u64,
        mode: ZeroMode,
        zeroes_around: bool,
    ) -> Result<ZeroStep, ImageError> {
        let stepped = self.change_or_wait(|state| {
            let step = self.try_zero(state, at, len, mode, zeroes_around)?;
            Ok((step, self.record(state, MayBlock::Yes)))
        })?;
        let (step, recorded) = match stepped {
            Ok(stepped) => stepped,
            Err(awaited) => return Ok(ZeroStep::Wait(awaited)),
        };
        if !recorded {
            self.flush()?;
        }
        if let (ZeroStep::Done(done), Some(data)) = (step, &self.data)
            && mode != (ZeroMode::Zeroes { unmap: false })
        {
            self.punch_outside(data, at, done);
        }
        Ok(step)
    }

    /// Frees the space of a range in the data file after it was zeroed or discarded. This needs no flush first: a cluster
    /// has the same offset there forever and is never reused, and a concurrent write to the range has no defined order
    /// with the discard. If a crash leaves the old tables, the range reads as zeroes from the file.
    fn punch_outside(&self, data: &FileEnd, at: GuestOffset, len: u64) {
        let unit = 1 << self.g.subcluster_bits();
        let end = at + len;
        let end = if end < self.end() {
            end.down_to(unit)
        } else {
            end
        };
        let at = at.up_to(unit);
        if at < end {
            data.return_space(HostOffset::in_data_file(at), end - at);
        }
    }

    fn try_zero(
        &self,
        state: &mut ImageState,
        at: GuestOffset,
        len: u64,
        mode: ZeroMode,
        zeroes_around: bool,
    ) -> Result<ZeroStep, Retry> {
        let g = &self.g;
        let first = GuestCluster::of(at, g);
        let (slice, _) = first.slice(g);
        let mut end = (at + len).min(slice.end(g).start(g));
        let last = GuestCluster::of(end.before(), g);
        if let Some((cluster, waiting)) = Self::pending_in(state, first, last) {
            if cluster == first {
                return Ok(ZeroStep::Wait(Awaited::Write(waiting)));
            }
            end = cluster.start(g);
        }
        if self.raw_external {
            return Ok(ZeroStep::File(end - at));
        }
        let (table, _) = slice.table(g);
        let empty = matches!(table_at(g, self.l1.get(table)), Ok(None));
        if empty && at >= self.backing_end() {
            return Ok(ZeroStep::Done(end - at));
        }
        if empty && g.version < 3 {
            return Ok(self.step_without_tables(mode, end - at));
        }
        // The cluster at the end of the disk counts as whole if all of it inside the disk is.
        let disk_end = self.end();
        let whole = |cluster: GuestCluster| {
            let start = cluster.start(g);
            start >= at && (start + g.cluster()).min(disk_end) <= end
        };
        if !whole(first) {
            return self.zero_part(state, (at, end), mode, zeroes_around);
        }
        self.own_table(state, slice)?;
        let mut cluster = first;
        while cluster.start(g) < end && whole(cluster) {
            if !self.zero_cluster(state, cluster, mode)? {
                break;
            }
            cluster += 1;
        }
        let reached = cluster.start(g);
        let done = reached.min(end) - at.min(reached);
        Ok(match done {
            0 => self.step_without_tables(mode, self.len_in_cluster(at, end - at)),
            done => ZeroStep::Done(done),
        })
    }

    /// The step for a part that the tables cannot express.
    fn step_without_tables(&self, mode: ZeroMode, len: u64) -> ZeroStep {
        match mode {
            ZeroMode::Zeroes { .. } => ZeroStep::Write(len),
            ZeroMode::Discard => ZeroStep::Done(len),
        }
    }

    /// Handles a part of a cluster: whole subclusters, or a part of one whose rest reads as zeroes.
    fn zero_part(
        &self,
        state: &mut ImageState,
        (at, end): (GuestOffset, GuestOffset),
        mode: ZeroMode,
        zeroes_around: bool,
    ) -> Result<ZeroStep, Retry> {
        let g = &self.g;
        let cluster = GuestCluster::of(at, g);
        let end = at + self.len_in_cluster(at, end - at);
        let first = self.subcluster_of(at);
        let whole = first.start == at && first.end <= end;
        let end = if whole {
            first.end.max(end.down_to(self.allocation_bytes()))
        } else {
            first.end.min(end)
        };
        let len = end - at;
        if !whole && mode == ZeroMode::Discard {
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
        self.own_table(state, cluster.slice(g).0)?;
        let Entry::Standard(old) = self.entry(cluster)? else {
            return Ok(self.step_without_tables(mode, len));
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
        let cluster = GuestCluster::of(at, g);
        let (table, _) = cluster.slice(g).0.table(g);
        if let Ok(None) = table_at(g, self.l1.get(table)) {
            return Ok(Kind::Hole);
        }
        let (kind, _) = self.entry(cluster)?.at(g, g.in_cluster(at));
        Ok(kind)
    }

    /// The subcluster that contains an offset, or the cluster if there are no subclusters, up to the end of the disk.
    pub(crate) fn subcluster_of(&self, at: GuestOffset) -> Range<GuestOffset> {
        let unit = self.allocation_bytes();
        let (start, end) = (at.down_to(unit), self.end());
        if at < end {
            start..end.min(start + unit)
        } else {
            start..start + unit
        }
    }

    /// Zeroes or discards a whole cluster; false if zeroes must be written instead.
    fn zero_cluster(
        &self,
        state: &mut ImageState,
        cluster: GuestCluster,
        mode: ZeroMode,
    ) -> Result<bool, Retry> {
        let g = &self.g;
        let old = self.entry(cluster)?;
        let backed = cluster.start(g) < self.backing_end();
        let unmap = mode != ZeroMode::Zeroes { unmap: false };
        if !backed && old == Entry::NONE {
            return Ok(true);
        }
        let zero = Standard {
            zero: g.all(),
            ..Standard::default()
        };
        let new = match old {
            _ if g.version < 3 && (backed || !unmap) => return Ok(mode == ZeroMode::Discard),
            _ if g.version < 3 => Entry::NONE,
            Entry::Standard(s) if s.host.is_some() && (g.external || s.is_exclusive && !unmap) => {
                Entry::Standard(Standard {
                    host: s.host,
                    is_exclusive: true,
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
