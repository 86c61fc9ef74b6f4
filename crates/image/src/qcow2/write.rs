//! Writes that need clusters: clusters are allocated in memory, the caller writes the data, and then the
//! tables in memory change. [`flush`](super::flush) decides what is written to the file, and when.

use std::pin::pin;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use block::{FileOffset, GuestOffset};

use super::entry::{COPIED, Entry, Kind, Standard};
use super::error::ImageError;
use super::retry::{MayBlock, Retry};
use super::types::{GuestCluster, HostCluster, HostOffset, Run};
use super::{ImageState, Qcow2};

/// What the caller must do for a write that may need clusters.
#[derive(Debug)]
#[must_use]
pub enum Prepared {
    /// Clusters were allocated for the first bytes of the range.
    Allocated(Allocation),
    /// Something must end first: then try again. The caller gives its pin back while it waits.
    Wait(Awaited),
    /// No cluster is needed: look the range up again.
    Mapped,
}

/// Clusters allocated for a write. The caller does [`fills`](Self::fills), writes `len` bytes of guest
/// data to `to`, and then calls [`commit`](Qcow2::commit), or [`abort`](Qcow2::abort) if any of that
/// failed. Until then the range reads as before.
#[derive(Debug)]
#[must_use = "others wait until it is committed or aborted"]
pub struct Allocation {
    /// First byte on the disk.
    pub at: GuestOffset,
    /// Bytes; possibly fewer than requested.
    pub len: u64,
    /// Where the guest's data goes, in the file that holds it.
    pub to: FileOffset,
    /// The rest of the clusters, which the caller must fill.
    pub fills: Vec<Fill>,
    write: PendingWrite,
    first: GuestCluster,
    last: GuestCluster,
    /// Where the first cluster is.
    host: HostOffset,
    /// The clusters were free before.
    new: bool,
    /// As of [`reclaimed`](Qcow2::reclaimed) when they were taken.
    reclaimed: u64,
    /// They read as zeroes.
    fresh: bool,
}

/// A part of an allocated cluster that the guest does not write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Where it goes, in the same file.
    pub to: FileOffset,
    /// Bytes.
    pub len: u64,
    /// The offset on the disk to copy from, looked up like any other read; `None` for zeroes.
    pub from: Option<GuestOffset>,
}

/// What a write, or the end of a range, must wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// The end of another write, which has an allocation in progress for the range.
    Write(PendingWrite),
    /// The end of requests that use clusters that were freed. The image has no others.
    FreedClusters,
}

/// An allocation in progress, for clusters of the disk.
pub(super) struct Pending {
    /// The last of these clusters.
    last: GuestCluster,
    write: PendingWrite,
    /// The new clusters of the file, to which no table refers yet.
    pub hosts: Option<Run>,
}

/// A write with an allocation in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PendingWrite {
    /// Of its allocation.
    number: u64,
}

impl Allocation {
    /// What [`reclaimed`](Qcow2::reclaimed) was when the clusters were taken.
    pub fn reclaimed_before(&self) -> u64 {
        self.reclaimed
    }

    /// Replaces copies of ranges for which `is_zero` is true by zeroes.
    pub(crate) fn find_zeroes(&mut self, is_zero: impl Fn(GuestOffset, GuestOffset) -> bool) {
        let fresh = self.fresh;
        self.fills.retain_mut(|fill| {
            let zero = |from: GuestOffset| is_zero(from, from + fill.len);
            fill.from = fill.from.filter(|&from| !zero(from));
            fill.from.is_some() || !fresh
        });
    }
}

impl Qcow2 {
    /// Allocates clusters for a write inside the disk, or for its first bytes. Blocks: usually only on a short
    /// lock, sometimes to read refcounts or to write an empty L2 table.
    ///
    /// # Errors
    /// The write cannot be done.
    pub fn prepare_write(&self, at: GuestOffset, len: u64) -> Result<Prepared, ImageError> {
        let prepared =
            self.change_or_wait(|state| self.prepare_in(state, at, len, MayBlock::Yes))?;
        Ok(prepared.unwrap_or_else(Prepared::Wait))
    }

    /// The same without blocking: `None` if it would have to wait for a lock or to access the file, or if no
    /// cluster can be allocated.
    pub fn try_prepare_write(&self, at: GuestOffset, len: u64) -> Option<Allocation> {
        let mut state = self.ready()?;
        let (slice, _) = GuestCluster::of(at, &self.g).slice(&self.g);
        let (table, _) = slice.table(&self.g);
        if self.l1.get(table) & COPIED == 0 {
            return None;
        }
        match self.prepare_in(&mut state, at, len, MayBlock::No) {
            Ok(Prepared::Allocated(allocation)) => Some(allocation),
            _ => None,
        }
    }

    /// As [`commit`](Self::commit), without blocking.
    ///
    /// # Errors
    /// It would have to wait for a lock or to access the file: nothing was done.
    pub fn try_commit(&self, allocation: Allocation) -> Result<(), Allocation> {
        let state = self.ready().filter(|state| !state.recording_blocks());
        let Some(mut state) = state else {
            return Err(allocation);
        };
        match self.commit_in(&mut state, &allocation, MayBlock::No) {
            Ok(true) => Ok(()),
            // If it is committed, only a flush follows the second time.
            Ok(false) | Err(_) => Err(allocation),
        }
    }

    /// The locked state, if a change can be made without blocking.
    fn ready(&self) -> Option<MutexGuard<'_, ImageState>> {
        if !self.has_begun_writing.load(SeqCst) || self.check_writable().is_err() {
            return None;
        }
        let state = self.state.try_lock().ok()?;
        (!self.is_full(&state)).then_some(state)
    }

    /// Links the clusters into the tables, after the data was written. Lookups find them from now on; they are
    /// durable after the next [`flush`](Self::flush) that begins from now on.
    ///
    /// # Errors
    /// The range is unchanged, and the clusters were freed. Exception: if neither the journal nor a flush could
    /// be written, the range has the new data, which may be lost.
    pub fn commit(&self, allocation: Allocation) -> Result<(), ImageError> {
        self.commit_or_keep(allocation).map_err(|(e, allocation)| {
            self.abort(allocation);
            e
        })
    }

    /// The same for a caller that may try again: the error comes with the allocation.
    ///
    /// # Errors
    /// The range is unchanged; the exception of [`commit`](Self::commit) applies.
    #[expect(clippy::result_large_err, reason = "an error is rare, and moved once")]
    pub fn commit_or_keep(&self, allocation: Allocation) -> Result<(), (ImageError, Allocation)> {
        let committed = self.change(|state| self.commit_in(state, &allocation, MayBlock::Yes));
        let kept = match committed {
            Ok(true) => Ok(()),
            Ok(false) => self.flush(),
            Err(e) => Err(e),
        };
        kept.map_err(|e| (e, allocation))
    }

    /// Frees the clusters, after writing the data failed; the range is unchanged. Does nothing for an allocation
    /// that is linked already, because a commit got that far and then could not be recorded.
    #[expect(clippy::needless_pass_by_value, reason = "an allocation ends once")]
    pub fn abort(&self, allocation: Allocation) {
        if !is_pending(&self.lock(), &allocation) {
            return;
        }
        if allocation.new {
            // What was written before there was no space any more.
            let clusters = allocation.last - allocation.first + 1;
            let bytes = clusters << self.g.cluster_bits;
            self.file.give_back(allocation.host, bytes);
        }
        let mut state = self.lock();
        if allocation.new {
            state.refcounts.taken(self.host_run(&allocation));
            for cluster in self.host_run(&allocation).each() {
                // A cluster that cannot be freed is leaked; `qemu-img check` finds it.
                let _ = state.refcounts.decrement(&self.file, cluster);
            }
        }
        end_of(&mut state, &allocation);
    }

    fn host_run(&self, allocation: &Allocation) -> Run {
        Run {
            first: allocation.host.cluster(&self.g),
            clusters: allocation.last - allocation.first + 1,
        }
    }

    /// Ready when what is awaited has ended; otherwise wakes `waker` when it ends.
    pub fn poll_wait(&self, awaited: &Awaited, waker: &Waker) -> Poll<()> {
        let mut state = self.lock();
        let Awaited::Write(waiting) = awaited else {
            return match state.deferred_frees.first() {
                Some((mark, _)) => self.pins.poll_passed(*mark, waker),
                None => Poll::Ready(()),
            };
        };
        if state
            .pending
            .values()
            .all(|pending| pending.write != *waiting)
        {
            return Poll::Ready(());
        }
        let waiters = state.waiters.entry(*waiting).or_default();
        if !waiters.iter().any(|known| known.will_wake(waker)) {
            waiters.push(waker.clone());
        }
        Poll::Pending
    }

    /// The same for a thread that has nothing else to do, and holds no pin.
    pub fn wait(&self, awaited: &Awaited) {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let ended = std::future::poll_fn(|context| self.poll_wait(awaited, context.waker()));
        let mut ended = pin!(ended);
        while ended
            .as_mut()
            .poll(&mut Context::from_waker(&waker))
            .is_pending()
        {
            thread::park();
        }
    }

    /// The first of these clusters with an allocation in progress, and that allocation.
    pub(super) fn pending_in(
        state: &ImageState,
        first: GuestCluster,
        last: GuestCluster,
    ) -> Option<(GuestCluster, PendingWrite)> {
        let before = state.pending.range(..=first).next_back();
        let over = before.filter(|(_, pending)| pending.last >= first);
        let next = || state.pending.range(first..=last).next();
        let (&at, pending) = over.or_else(next)?;
        Some((at.max(first), pending.write))
    }

    fn prepare_in(
        &self,
        state: &mut ImageState,
        at: GuestOffset,
        len: u64,
        may_block: MayBlock,
    ) -> Result<Prepared, Retry> {
        let g = &self.g;
        let first = GuestCluster::of(at, g);
        // Within one slice, so that a commit needs only that slice.
        let (slice, _) = first.slice(g);
        let end = (at + len).min(slice.end(g).start(g));
        let mut last = GuestCluster::of(end.before(), g);
        if let Some((cluster, waiting)) = Self::pending_in(state, first, last) {
            if cluster == first {
                return Ok(Prepared::Wait(Awaited::Write(waiting)));
            }
            last = cluster.before();
        }
        self.own_table(state, slice)?;
        let part = |cluster: GuestCluster| {
            let start = cluster.start(g);
            (at.max(start) - start, end.min(start + g.cluster()) - start)
        };
        let (from, to) = part(first);
        let target = match self.write_target(first, from, to)? {
            WriteTarget::InPlace(host) => {
                // The lookup led here because the file ends before this cluster.
                self.reach(state, host, may_block)?;
                return Ok(Prepared::Mapped);
            }
            WriteTarget::Owned(_) if self.raw_external => return Err(Retry::MapFirst(first)),
            target => target,
        };
        let mut clusters = 1;
        while first + clusters <= last {
            let (from, to) = part(first + clusters);
            let goes_on = match (target, self.write_target(first + clusters, from, to)?) {
                (WriteTarget::New, WriteTarget::New) => true,
                (WriteTarget::Owned(host), WriteTarget::Owned(next)) => {
                    next == host + (clusters << g.cluster_bits)
                }
                _ => false,
            };
            if !goes_on {
                break;
            }
            clusters += 1;
        }
        let mut end = end.min((first + clusters).start(g));
        if let WriteTarget::Owned(host) = target {
            // Subclusters at the edges that hold data are written in place, possibly by other requests at this
            // moment: they must not be copied.
            if self.has_data(at)? {
                self.reach(state, host, may_block)?;
                return Ok(Prepared::Mapped);
            }
            if self.has_data(end.before())? {
                end = end.before().down_to(self.allocation_bytes());
            }
        }
        let (host, new, fresh) = match target {
            WriteTarget::Owned(host) => (host, false, false),
            _ => {
                let refcounts = &mut state.refcounts;
                let (run, fresh) =
                    refcounts.allocate(&self.file, &mut state.metadata, clusters, may_block)?;
                clusters = run.clusters;
                (run.first.start(g), true, fresh)
            }
        };
        if !new {
            self.reach(state, host + ((clusters - 1) << g.cluster_bits), may_block)?;
        }
        let last = first + (clusters - 1);
        let end = end.min((last + 1).start(g));
        let fills = self.fills(at, end, host, fresh)?;
        state.allocations += 1;
        let write = PendingWrite {
            number: state.allocations,
        };
        let hosts = new.then(|| Run {
            first: host.cluster(g),
            clusters,
        });
        state.pending.insert(first, Pending { last, write, hosts });
        Ok(Prepared::Allocated(Allocation {
            at,
            len: end - at,
            to: (host + from).in_file(),
            fills,
            write,
            first,
            last,
            host,
            new,
            reclaimed: state.refcounts.reclaimed(),
            fresh,
        }))
    }

    /// Where a part of a cluster can be written; its slice is loaded.
    fn write_target(
        &self,
        cluster: GuestCluster,
        from: u64,
        to: u64,
    ) -> Result<WriteTarget, Retry> {
        let g = &self.g;
        let entry = self.entry(cluster)?;
        let in_data_file = HostOffset::in_data_file(cluster.start(g));
        Ok(match entry {
            Entry::Standard(s) if g.external && s.host.is_some_and(|host| host != in_data_file) => {
                let what = "data is not where it should be in the data file";
                return Err(ImageError::damaged_disk(what, cluster.start(g)).into());
            }
            Entry::Standard(Standard {
                host: Some(host),
                is_exclusive: true,
                ..
            }) => {
                if entry.in_place(g.touched(from, to)) {
                    WriteTarget::InPlace(host)
                } else {
                    WriteTarget::Owned(host)
                }
            }
            _ if g.external => WriteTarget::Owned(in_data_file),
            _ => WriteTarget::New,
        })
    }

    /// Whether the subcluster at an offset of the disk holds data.
    fn has_data(&self, at: GuestOffset) -> Result<bool, Retry> {
        let entry = self.entry(GuestCluster::of(at, &self.g))?;
        let (kind, _) = entry.at(&self.g, self.g.in_cluster(at));
        Ok(matches!(kind, Kind::Data(_)))
    }

    /// Extends the file to the end of an allocated cluster.
    fn reach(
        &self,
        state: &mut ImageState,
        host: HostOffset,
        may_block: MayBlock,
    ) -> Result<(), Retry> {
        let end = host + self.g.cluster();
        may_block.grow(self.data.as_ref().unwrap_or(&self.file), end)?;
        match &self.data {
            // A raw data file ends where the disk ends.
            Some(data) if self.raw_external => {
                Ok(data.grow_exactly(end.min(HostOffset::in_data_file(self.end())))?)
            }
            Some(data) => Ok(data.grow_exactly(end)?),
            None => {
                let cluster = host.cluster(&self.g);
                state.refcounts.have_cluster(cluster, may_block)?;
                if state.refcounts.get(&self.file, cluster)? == 0 {
                    let what = "a cluster in use has the refcount 0";
                    return Err(ImageError::damaged(what, host).into());
                }
                self.file.grow(end)?;
                state.refcounts.used_up_to(cluster + 1);
                Ok(())
            }
        }
    }

    /// The fills around the range from `at` to `end`; its first cluster is at `host`.
    fn fills(
        &self,
        at: GuestOffset,
        end: GuestOffset,
        host: HostOffset,
        fresh: bool,
    ) -> Result<Vec<Fill>, Retry> {
        let g = &self.g;
        let (first, last) = (GuestCluster::of(at, g), GuestCluster::of(end.before(), g));
        let begin = if self.copied_whole(first)? {
            first.start(g)
        } else {
            at.down_to(self.allocation_bytes())
        };
        let stop = if self.copied_whole(last)? {
            (last + 1).start(g)
        } else {
            end.up_to(self.allocation_bytes())
        };
        let mut fills = Vec::new();
        // The part after the end of the disk becomes zeroes.
        let disk_end = self.end().max(end);
        for (from, to, on_disk) in [
            (begin, at, true),
            (end, stop.min(disk_end), true),
            (stop.min(disk_end), stop, false),
        ] {
            if from >= to {
                continue;
            }
            let zero = !on_disk || self.reads_zero(from, to)?;
            if !(zero && fresh) {
                fills.push(Fill {
                    to: (host + (from - first.start(g))).in_file(),
                    len: to - from,
                    from: (!zero).then_some(from),
                });
            }
        }
        Ok(fills)
    }

    /// Whether a cluster is copied as a whole when it is allocated again.
    fn copied_whole(&self, cluster: GuestCluster) -> Result<bool, Retry> {
        Ok(is_copied_whole(&self.entry(cluster)?))
    }

    /// Whether a part of one cluster is known to read as zeroes.
    fn reads_zero(&self, from: GuestOffset, to: GuestOffset) -> Result<bool, Retry> {
        let entry = self.entry(GuestCluster::of(from, &self.g))?;
        let backing_end = self.backing_end();
        let mut at = from;
        while at < to {
            let (kind, len) = entry.at(&self.g, self.g.in_cluster(at));
            match kind {
                Kind::Zero => {}
                Kind::Hole if at >= backing_end => {}
                _ => return Ok(false),
            }
            at += len;
        }
        Ok(true)
    }

    /// Links the clusters of an allocation into the tables. Returns whether the change is recorded; otherwise it must
    /// be flushed before the write is acknowledged.
    fn commit_in(
        &self,
        state: &mut ImageState,
        allocation: &Allocation,
        may_block: MayBlock,
    ) -> Result<bool, Retry> {
        let clusters = || {
            let hosts = (0..).zip(self.host_run(allocation).each());
            hosts.map(|(index, host)| (allocation.first + index, host))
        };
        if !is_pending(state, allocation) {
            // It was linked before, and only not recorded. Its clusters may have been freed and reused since.
            return Ok(self.record(state, may_block));
        }
        // Everything that can fail comes first.
        for (cluster, _) in clusters() {
            self.entry(cluster)?;
        }
        for (cluster, host) in clusters() {
            let new = self.committed(allocation, self.entry(cluster)?, cluster, host);
            self.will_set_entry(state, cluster, new);
        }
        // Before lookups can find it. Otherwise a write into it could be acknowledged first, and a kill would lose it.
        let recorded = self.record(state, may_block);
        for (cluster, host) in clusters() {
            let old = self.entry(cluster)?;
            let new = self.committed(allocation, old, cluster, host);
            self.publish_entry(state, cluster, new)?;
            self.unlink(state, old, Some(host.start(&self.g)));
        }
        if allocation.new {
            state.refcounts.linked(self.host_run(allocation));
        }
        end_of(state, allocation);
        Ok(recorded)
    }

    /// The new L2 entry of a cluster of an allocation.
    fn committed(
        &self,
        allocation: &Allocation,
        old: Entry,
        cluster: GuestCluster,
        host: HostCluster,
    ) -> Entry {
        let g = &self.g;
        let (start, at) = (cluster.start(g), allocation.at);
        let from = at.max(start) - start;
        let end = at + allocation.len;
        let touched = g.touched(from, end.min(start + g.cluster()) - start);
        let (data, zero) = match old {
            Entry::Standard(s) if !is_copied_whole(&old) => (s.data | touched, s.zero & !touched),
            _ => (g.all(), 0),
        };
        Entry::Standard(Standard {
            host: Some(host.start(g)),
            is_exclusive: true,
            data,
            zero,
        })
    }
}

/// Where a part of a cluster is written.
#[derive(Clone, Copy, Debug)]
enum WriteTarget {
    /// In place.
    InPlace(HostOffset),
    /// In the cluster that it has already, whose content is not in use.
    Owned(HostOffset),
    /// In a cluster that must be allocated.
    New,
}

/// True for compressed and shared clusters. All of their subclusters become data: those that are zero or in
/// the backing file are copied too.
fn is_copied_whole(entry: &Entry) -> bool {
    match entry {
        Entry::Compressed(_) => true,
        Entry::Standard(s) => s.host.is_some() && !s.is_exclusive && s.data != 0,
    }
}

/// Whether an allocation was neither committed nor aborted yet.
fn is_pending(state: &ImageState, allocation: &Allocation) -> bool {
    let pending = state.pending.get(&allocation.first);
    pending.is_some_and(|pending| pending.write == allocation.write)
}

/// Ends an allocation, and wakes those that wait for it.
fn end_of(state: &mut ImageState, allocation: &Allocation) {
    state.pending.remove(&allocation.first);
    for waiter in state.waiters.remove(&allocation.write).unwrap_or_default() {
        waiter.wake();
    }
}
