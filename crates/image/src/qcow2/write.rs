//! Writes that need clusters. Nothing here writes anything but new, empty L2 tables: the clusters are
//! taken in memory, the caller moves the data, and then the tables in memory change. What comes into
//! the file, and when, is decided in [`flush`](super::flush).

use std::pin::pin;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use block::FileOffset;

use super::change::{MayBlock, Retry};
use super::entry::{COPIED, Entry, Kind, Standard};
use super::error::ImageError;
use super::types::{GuestCluster, GuestOffset, HostCluster, HostOffset, Run};
use super::{Qcow2, State};

/// What is to be done for a write that needs clusters.
#[derive(Debug)]
#[must_use]
pub enum Prepared {
    /// Clusters were taken for the first bytes of the range.
    Allocated(Allocation),
    /// Somebody else has taken clusters for this range, and their data is on its way: try again
    /// after that.
    Wait(Waiting),
    /// Nothing: look up again where the range is.
    Mapped,
}

/// Clusters taken for a write. The caller does [`fills`](Self::fills), writes `len` bytes of the
/// guest's to `to`, and then [`commit`](Qcow2::commit)s, or [`abort`](Qcow2::abort)s if any of that
/// failed. Until then the range reads as before.
#[derive(Debug)]
#[must_use = "others wait until it is committed or aborted"]
pub struct Allocation {
    /// First byte on the disk.
    pub at: u64,
    /// Bytes; may be less than was asked for.
    pub len: u64,
    /// Where they go, in the file that holds the guest's data.
    pub to: FileOffset,
    /// What stands beside them in the same clusters, to be put there by the caller.
    pub fills: Vec<Fill>,
    token: u64,
    first: GuestCluster,
    last: GuestCluster,
    /// Where the first cluster is.
    host: HostOffset,
    /// The clusters were free before.
    new: bool,
    /// They read as zeroes.
    fresh: bool,
}

/// Bytes that are not written by the guest, but come into a cluster with what is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Where they go, in the same file.
    pub to: FileOffset,
    /// Bytes.
    pub len: u64,
    /// From where on the disk they are read, by the same look-up as any other read; `None` if they
    /// are zeroes.
    pub from: Option<u64>,
}

/// A write of somebody else that must end first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    token: u64,
}

impl Allocation {
    /// Leaves out reading what `is_zero` knows to be zeroes.
    pub(crate) fn find_zeroes(&mut self, is_zero: impl Fn(u64, u64) -> bool) {
        let fresh = self.fresh;
        self.fills.retain_mut(|fill| {
            let zero = |from| is_zero(from, from + fill.len);
            fill.from = fill.from.filter(|&from| !zero(from));
            fill.from.is_some() || !fresh
        });
    }
}

impl Qcow2 {
    /// Takes clusters for a write to a range inside the disk, or for its beginning. Blocks, mostly for
    /// a short lock; now and then to read refcounts or to write an empty L2 table.
    ///
    /// # Errors
    /// The write cannot be done.
    pub fn prepare_write(&self, at: u64, len: u64) -> Result<Prepared, ImageError> {
        let at = GuestOffset::new(at);
        self.change(|state| self.prepare_in(state, at, len, MayBlock::Yes))
    }

    /// The same, if it needs neither to wait for a lock nor to read or write the file, and clusters can
    /// be taken.
    pub fn try_prepare_write(&self, at: u64, len: u64) -> Option<Allocation> {
        let mut state = self.ready()?;
        let at = GuestOffset::new(at);
        let (slice, _) = self.g.slice_of(at.cluster(&self.g));
        let (table, _) = self.g.table_of(slice);
        if self.l1.get(table) & COPIED == 0 {
            return None;
        }
        match self.prepare_in(&mut state, at, len, MayBlock::No) {
            Ok(Prepared::Allocated(allocation)) => Some(allocation),
            _ => None,
        }
    }

    /// As [`commit`](Self::commit), if that needs neither to wait for a lock nor to read or write the file.
    ///
    /// # Errors
    /// It would: nothing was done.
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

    /// The state, if a change can be made at once.
    fn ready(&self) -> Option<MutexGuard<'_, State>> {
        if !self.begun.load(SeqCst) || self.check_writable().is_err() {
            return None;
        }
        let state = self.state.try_lock().ok()?;
        (!self.is_full(&state)).then_some(state)
    }

    /// The data is there: makes it the disk's. It is found from now on, and durable after the next
    /// [`flush`](Self::flush) that begins from now on.
    ///
    /// # Errors
    /// The range is as it was before, and the clusters were given back; or, if neither a journal nor a
    /// flush could be written, it is the new one, and may be lost.
    pub fn commit(&self, allocation: Allocation) -> Result<(), ImageError> {
        self.commit_or_keep(allocation).map_err(|(e, allocation)| {
            self.abort(allocation);
            e
        })
    }

    /// The same for whoever wants to try it again: the allocation comes back with the error.
    ///
    /// # Errors
    /// The range is as it was before; or as with [`commit`](Self::commit).
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

    /// The data is not there: gives the clusters back, and the range is as it was before. One that the disk
    /// has already, because a commit got so far and could not be kept, stays the disk's.
    #[expect(clippy::needless_pass_by_value, reason = "an allocation ends once")]
    pub fn abort(&self, allocation: Allocation) {
        let mut state = self.lock();
        if !is_pending(&state, &allocation) {
            return;
        }
        if allocation.new {
            for cluster in self.host_clusters(&allocation) {
                // What can't be given back is lost space, which `qemu-img check` finds.
                let _ = state.refcounts.release(&self.file, cluster);
            }
        }
        end_of(&mut state, &allocation);
    }

    fn host_clusters(&self, allocation: &Allocation) -> impl Iterator<Item = HostCluster> {
        let run = Run {
            first: allocation.host.cluster(&self.g),
            clusters: allocation.last - allocation.first + 1,
        };
        run.each()
    }

    /// Ready when what was waited for has ended; else `waker` is woken then.
    pub fn poll_wait(&self, waiting: &Waiting, waker: &Waker) -> Poll<()> {
        let mut state = self.lock();
        if state
            .pending
            .values()
            .all(|&(_, token)| token != waiting.token)
        {
            return Poll::Ready(());
        }
        let waiters = state.waiters.entry(waiting.token).or_default();
        if !waiters.iter().any(|known| known.will_wake(waker)) {
            waiters.push(waker.clone());
        }
        Poll::Pending
    }

    /// The same for a thread that has nothing else to do.
    pub fn wait(&self, waiting: &Waiting) {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let ended = std::future::poll_fn(|context| self.poll_wait(waiting, context.waker()));
        let mut ended = pin!(ended);
        while ended
            .as_mut()
            .poll(&mut Context::from_waker(&waker))
            .is_pending()
        {
            thread::park();
        }
    }

    /// Whoever has data on its way to a cluster among these, and the first such cluster.
    pub(super) fn pending_in(
        state: &State,
        first: GuestCluster,
        last: GuestCluster,
    ) -> Option<(GuestCluster, Waiting)> {
        let before = state.pending.range(..=first).next_back();
        let over = before.filter(|(_, (end, _))| *end >= first);
        let next = || state.pending.range(first..=last).next();
        let (&at, &(_, token)) = over.or_else(next)?;
        Some((at.max(first), Waiting { token }))
    }

    fn prepare_in(
        &self,
        state: &mut State,
        at: GuestOffset,
        len: u64,
        may_block: MayBlock,
    ) -> Result<Prepared, Retry> {
        let g = &self.g;
        let first = at.cluster(g);
        // Within one slice, so that all of it is at hand at the end.
        let (slice, _) = g.slice_of(first);
        let end = (at + len).min(g.slice_end(slice).start(g));
        let mut last = end.before().cluster(g);
        if let Some((cluster, waiting)) = Self::pending_in(state, first, last) {
            if cluster == first {
                return Ok(Prepared::Wait(waiting));
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
                // A cluster that the file does not reach yet; so the look-up sent us here.
                self.reach(state, host, may_block)?;
                return Ok(Prepared::Mapped);
            }
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
            // Subclusters at the edges that are data by now are written in place, also by others at this
            // moment: what stands in them is not to be copied.
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
        state.tokens += 1;
        let token = state.tokens;
        state.pending.insert(first, (last, token));
        Ok(Prepared::Allocated(Allocation {
            at: at.bytes(),
            len: end - at,
            to: (host + from).in_file(),
            fills,
            token,
            first,
            last,
            host,
            new,
            fresh,
        }))
    }

    /// Where a part of a cluster, which its slice is loaded for, can be written.
    fn write_target(
        &self,
        cluster: GuestCluster,
        from: u64,
        to: u64,
    ) -> Result<WriteTarget, Retry> {
        let g = &self.g;
        let entry = self.entry(cluster)?;
        let in_data_file = cluster.start(g).in_data_file();
        Ok(match entry {
            Entry::Standard(s) if g.external && s.host.is_some_and(|host| host != in_data_file) => {
                let what = "data is not where it should be in the data file; offset of the disk";
                return Err(ImageError::damaged(what, cluster.start(g).bytes()).into());
            }
            Entry::Standard(Standard {
                host: Some(host),
                own: true,
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

    /// Whether the subcluster at a place on the disk is data.
    fn has_data(&self, at: GuestOffset) -> Result<bool, Retry> {
        let entry = self.entry(at.cluster(&self.g))?;
        let (kind, _) = entry.at(&self.g, at.in_cluster(&self.g));
        Ok(matches!(kind, Kind::Data(_)))
    }

    /// Makes the file reach to the end of a cluster that it should have.
    fn reach(&self, state: &mut State, host: HostOffset, may_block: MayBlock) -> Result<(), Retry> {
        let end = host + self.g.cluster();
        may_block.grow(self.data.as_ref().unwrap_or(&self.file), end)?;
        match &self.data {
            // A raw disk ends where it ends.
            Some(data) if self.raw_external => {
                Ok(data.grow_exactly(end.min(self.end().in_data_file()))?)
            }
            Some(data) => Ok(data.grow_exactly(end)?),
            None => {
                let cluster = host.cluster(&self.g);
                state.refcounts.have_cluster(cluster, may_block)?;
                if state.refcounts.get(&self.file, cluster)? == 0 {
                    let what = "a cluster in use has the refcount 0";
                    return Err(ImageError::damaged(what, host.bytes()).into());
                }
                self.file.grow(end)?;
                state.refcounts.used_up_to(cluster + 1);
                Ok(())
            }
        }
    }

    /// What comes into the clusters beside the range from `at` to `end`; the first is at `host`.
    fn fills(
        &self,
        at: GuestOffset,
        end: GuestOffset,
        host: HostOffset,
        fresh: bool,
    ) -> Result<Vec<Fill>, Retry> {
        let g = &self.g;
        let (first, last) = (at.cluster(g), end.before().cluster(g));
        let begin = match self.copied_whole(first)? {
            true => first.start(g),
            false => at.down_to(self.allocation_bytes()),
        };
        let stop = match self.copied_whole(last)? {
            true => (last + 1).start(g),
            false => end.up_to(self.allocation_bytes()),
        };
        let mut fills = Vec::new();
        // What lies behind the end of the disk is nobody's: zeroes, where there is room for it.
        let disk_end = self.end().max(end);
        let room = if self.raw_external { disk_end } else { stop };
        for (from, to, on_disk) in [
            (begin, at, true),
            (end, stop.min(disk_end), true),
            (stop.min(disk_end), stop.min(room), false),
        ] {
            if from >= to {
                continue;
            }
            let zero = !on_disk || self.reads_zero(from, to)?;
            if !(zero && fresh) {
                fills.push(Fill {
                    to: (host + (from - first.start(g))).in_file(),
                    len: to - from,
                    from: (!zero).then_some(from.bytes()),
                });
            }
        }
        Ok(fills)
    }

    /// Whether a cluster, when it gets a new place, takes all of its data there.
    fn copied_whole(&self, cluster: GuestCluster) -> Result<bool, Retry> {
        Ok(is_copied_whole(&self.entry(cluster)?))
    }

    /// Whether a part of one cluster is known to read as zeroes.
    fn reads_zero(&self, from: GuestOffset, to: GuestOffset) -> Result<bool, Retry> {
        let entry = self.entry(from.cluster(&self.g))?;
        let backing_end = self.backing_end();
        let mut at = from;
        while at < to {
            let (kind, len) = entry.at(&self.g, at.in_cluster(&self.g));
            match kind {
                Kind::Zero => {}
                Kind::Hole if at >= backing_end => {}
                _ => return Ok(false),
            }
            at = at + len;
        }
        Ok(true)
    }

    /// Makes data that is there the disk's, and says whether that outlives this process; otherwise it must be flushed.
    fn commit_in(
        &self,
        state: &mut State,
        allocation: &Allocation,
        may_block: MayBlock,
    ) -> Result<bool, Retry> {
        let clusters = || {
            let hosts = (0..).zip(self.host_clusters(allocation));
            hosts.map(|(place, host)| (allocation.first + place, host))
        };
        if !is_pending(state, allocation) {
            // It was committed, and only not recorded: since then, its clusters may have been given up, and be
            // somebody else's.
            return Ok(self.record(state, may_block));
        }
        // All that can fail comes first.
        for (cluster, _) in clusters() {
            self.entry(cluster)?;
        }
        for (cluster, host) in clusters() {
            let new = self.committed(allocation, self.entry(cluster)?, cluster, host);
            self.will_set_entry(state, cluster, new);
        }
        // Before it can be found, or a write into it could be acknowledged first, and be lost with it.
        let recorded = self.record(state, may_block);
        for (cluster, host) in clusters() {
            let old = self.entry(cluster)?;
            let new = self.committed(allocation, old, cluster, host);
            self.publish_entry(state, cluster, new)?;
            self.unlink(state, old, Some(host.start(&self.g)));
        }
        end_of(state, allocation);
        Ok(recorded)
    }

    /// What the entry of a cluster becomes with an allocation.
    fn committed(
        &self,
        allocation: &Allocation,
        old: Entry,
        cluster: GuestCluster,
        host: HostCluster,
    ) -> Entry {
        let g = &self.g;
        let (start, at) = (cluster.start(g), GuestOffset::new(allocation.at));
        let from = at.max(start) - start;
        let end = at + allocation.len;
        let touched = g.touched(from, end.min(start + g.cluster()) - start);
        let (data, zero) = match old {
            Entry::Standard(s) if !is_copied_whole(&old) => (s.data | touched, s.zero & !touched),
            _ => (g.all(), 0),
        };
        Entry::Standard(Standard {
            host: Some(host.start(g)),
            own: true,
            data,
            zero,
        })
    }
}

/// Where a part of a cluster is written.
#[derive(Clone, Copy, Debug)]
enum WriteTarget {
    /// Where it is.
    InPlace(HostOffset),
    /// In a cluster that is the disk's already, but what stands in it does not count.
    Owned(HostOffset),
    /// In a cluster that is to be taken.
    New,
}

/// Compressed clusters, and those that somebody else has too. Of subclusters, all become data: what is
/// zero or in the backing file is copied with the rest.
fn is_copied_whole(entry: &Entry) -> bool {
    match entry {
        Entry::Compressed(_) => true,
        Entry::Standard(s) => s.host.is_some() && !s.own && s.data != 0,
    }
}

/// Whether its data is still on its way: it was neither committed nor aborted.
fn is_pending(state: &State, allocation: &Allocation) -> bool {
    let pending = state.pending.get(&allocation.first);
    pending.is_some_and(|&(_, token)| token == allocation.token)
}

/// The clusters are nobody's to wait for any more.
fn end_of(state: &mut State, allocation: &Allocation) {
    state.pending.remove(&allocation.first);
    for waiter in state.waiters.remove(&allocation.token).unwrap_or_default() {
        waiter.wake();
    }
}
