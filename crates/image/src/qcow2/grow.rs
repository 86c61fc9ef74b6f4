use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use super::error::ImageError;
use super::header::L1_BYTES_MAX;
use super::refcount::Stop;
use super::{Qcow2, State};

impl Qcow2 {
    /// Makes the disk longer. Blocks. The caller must zero the range that comes back, by
    /// [`zero_step`](Self::zero_step), and flush, before the guest learns of it: what an image or its
    /// backing file has behind its old end is not the guest's.
    ///
    /// # Errors
    /// The disk stays as long as it was.
    pub fn grow(&self, size: u64) -> Result<Range<u64>, ImageError> {
        self.check_writable()?;
        self.begin()?;
        loop {
            let flushing = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state = self.lock();
            match self.try_grow(&mut state, size) {
                Ok(range) => return Ok(range),
                Err(Stop::TableFull) => {}
                Err(Stop::Error(error)) => return Err(self.report(&mut state, error)),
                Err(Stop::Load(_) | Stop::CacheFull) => {
                    return Err(ImageError::Unsupported(
                        "an L1 table needs no L2 table to grow",
                    ));
                }
            }
            drop(state);
            drop(flushing);
            self.grow_refcount_table()?;
        }
    }

    fn try_grow(&self, state: &mut State, size: u64) -> Result<Range<u64>, Stop> {
        let old = self.size();
        let unsupported = |why| Err(ImageError::Unsupported(why).into());
        if size < old {
            return unsupported(
                "a disk cannot become smaller while it is in use; \
                stop it and use 'qemu-img resize --shrink'",
            );
        }
        if !size.is_multiple_of(512) {
            return unsupported("the size of a disk is a multiple of 512 bytes");
        }
        if size == old {
            return Ok(old..old);
        }
        if state.header.snapshots > 0 && state.header.version < 3 {
            return unsupported(
                "snapshots of version 2 don't know how long their disk was; \
                'qemu-img amend -o compat=v3' makes it version 3",
            );
        }
        let entries = self.g.l1_entries(size);
        if entries * 8 > L1_BYTES_MAX || size > i64::MAX as u64 {
            return unsupported(
                "clusters of this size can't address so long a disk; \
                'qemu-img convert -o cluster_size=2M' makes an image that can",
            );
        }
        self.outdate_bitmaps(state, true)?;
        if let Some(data) = &self.data {
            data.grow_exactly(size)?;
        }
        let moved = match entries > self.l1.entries() {
            true => Some(self.write_larger_l1(state, entries)?),
            false => None,
        };
        state.header.size = size;
        self.switch_header(state)?;
        if let Some((first, clusters)) = moved {
            state.metadata.remove_run(first);
            for cluster in first..first + clusters {
                state.refcounts.release(&self.file, cluster)?;
            }
            self.l1.extend((self.l1.entries()..entries).map(|_| 0));
            self.changed();
        }
        self.size.store(size, SeqCst);
        Ok(old..size)
    }

    /// Writes an L1 table with so many entries, durably, and all that it leads to as far as it is only
    /// in memory: refcounts (new L2 tables are in the file since they were made). The header in memory
    /// leads to it; returns where the old one is.
    fn write_larger_l1(&self, state: &mut State, entries: u64) -> Result<(u64, u64), Stop> {
        let g = &self.g;
        let clusters = g.clusters(entries * 8);
        let (file, refcounts) = (&self.file, &mut state.refcounts);
        let run = refcounts.allocate_contiguous(file, &mut state.metadata, clusters)?;
        let at = run.first << g.cluster_bits;
        let bytes = self.l1_bytes(0, clusters * g.cluster() / 8);
        let written = file
            .write_at("writing a larger L1 table", at, &bytes)
            .and_then(|()| self.write_refcounts(state));
        if let Err(error) = written {
            for cluster in run.first..run.first + run.clusters {
                state.refcounts.release(file, cluster)?;
            }
            return Err(error.into());
        }
        state
            .metadata
            .add_run(run.first, run.clusters, "the L1 table");
        let old_clusters = g.clusters(u64::from(state.header.l1_entries) * 8);
        let old = (state.header.l1_at >> g.cluster_bits, old_clusters);
        state.header.l1_at = at;
        state.header.l1_entries = entries as u32;
        Ok(old)
    }
}
