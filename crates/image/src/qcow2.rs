//! qcow2, versions 2 and 3 (docs/interop/qcow2): where the parts of a disk are in a file, and how they
//! come to be there. Guest data is moved by whoever asks.
//!
//! - [`map`] answers where a range is, from memory, without locks; or that a table must be loaded.
//! - [`write`] takes clusters for a write and, when the data is there, makes them the disk's;
//!   [`zero`] gives them up. Both change tables in memory by [`change`].
//! - [`flush`] writes what these changed, and says in which order and why.
//! - [`journal`] has what a kill must not cost, and [`replay`] does it again.
//! - [`open`], [`begin`], [`grow`] and [`close`] are the events in an image's life.
//! - [`check`](mod@check) compares refcounts with references, and repairs them.
//!
//! Locks, in the order in which they are taken: that of growing, that of the flush, that of the state.
//! Tables are loaded without any.

mod begin;
mod cache;
mod change;
pub(crate) mod check;
mod close;
mod compressed;
mod entry;
mod error;
mod file;
mod flush;
mod geometry;
mod grow;
pub(crate) mod header;
mod journal;
mod l1;
mod load;
mod map;
mod metadata;
mod open;
mod pins;
mod refcount;
mod repair;
mod replay;
mod scan;
mod types;
mod write;
mod zero;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;

pub use check::CheckReport;
pub use compressed::Compression;
pub use error::{Damage, ImageError};
pub use header::HeaderError;
pub use journal::{JournalEvent, JournalOf, JournalPlace, journal_of};
pub use open::{OpenOptions, Progress, Qcow2Error};
pub use pins::{Pin, Pins, ThreadPins};
pub use write::{Allocation, Fill, Prepared, Waiting};
pub use zero::{ZeroStep, Zeroing};

pub(crate) use map::{Load, Mapping, WriteMapping};
pub(crate) use open::read_header;

use cache::Cache;
use file::FileEnd;
use geometry::Geometry;
use header::Header;
use journal::{Changes, Journal};
use l1::L1;
use metadata::Metadata;
use pins::Mark;
use refcount::Refcounts;
use types::{GuestCluster, HostOffset, L1Index, Run, SliceIndex};

pub(crate) use types::GuestOffset;

/// An image that is open. Any number of threads use it at once.
pub struct Qcow2 {
    g: Geometry,
    file: FileEnd,
    /// Guest data, if that has a file of its own.
    data: Option<FileEnd>,
    size: AtomicU64,
    /// Bytes of disk, from the start, for which there is something in a backing file.
    backing_size: AtomicU64,
    l1: L1,
    cache: Cache,
    pins: Pins,
    state: Mutex<State>,
    /// A slice was loaded, or not.
    loaded: Condvar,
    flushing: Mutex<flush::Flushed>,
    /// Held while the disk becomes longer.
    growing: Mutex<()>,
    /// Flushes asked for.
    asked: AtomicU64,
    /// Changes to the tables in memory, and how many of them are durable.
    changes: ChangeCount,
    durable: AtomicU64,
    /// Some of them are neither recorded in the journal nor flushed.
    unrecorded: AtomicBool,
    compression: Compression,
    read_only: bool,
    /// The data file is the disk at any time.
    raw_external: bool,
    /// Space that is no longer used is given back to the file system.
    punch: AtomicBool,
    /// What must be done before the first write was done.
    begun: AtomicBool,
    /// Why nothing is written any more.
    damage: OnceLock<Damage>,
    on_damage: OnceLock<OnDamage>,
}

type OnDamage = Box<dyn Fn(&Damage) + Send + Sync>;

/// All that changes, except what readers look at.
struct State {
    header: Header,
    /// The first bytes of the file.
    header_block: Vec<u8>,
    refcounts: Refcounts,
    metadata: Metadata,
    journal: Option<Journal>,
    /// There is none, and so changes are flushed before they are acknowledged.
    flush_changes: bool,
    /// How often changes could not be recorded.
    unrecorded: u64,
    /// On their way to the journal, but for those of refcounts.
    changes: Changes,
    /// Slices being loaded, and the frames they are loaded into.
    loading: HashMap<SliceIndex, usize>,
    /// Frames with changes, and in which pieces.
    dirty_l2: BTreeMap<usize, u32>,
    /// Frames on their way to the file.
    writing_l2: HashSet<usize>,
    /// Pieces of the L1 table with changes.
    dirty_l1: BTreeSet<u64>,
    /// Clusters of the disk for which data is on its way: the first, and the last with the token.
    pending: BTreeMap<GuestCluster, (GuestCluster, u64)>,
    tokens: u64,
    /// Who waits for a token.
    waiters: HashMap<u64, Vec<Waker>>,
    /// Clusters that the tables in memory no longer lead to; those in the file still may.
    unlinked: Vec<Run>,
    unlinked_clusters: u64,
    /// Clusters that no table leads to, but requests may that began before.
    deferred_frees: Vec<(Mark, Vec<Run>)>,
}

impl State {
    /// Whether nothing is marked as changed that a flush would write.
    fn is_clean(&self) -> bool {
        self.dirty_l2.is_empty() && self.dirty_l1.is_empty() && self.refcounts.dirty_bytes() == 0
    }
}

impl Qcow2 {
    /// Bytes of the disk.
    #[inline]
    pub fn size(&self) -> u64 {
        self.size.load(SeqCst)
    }

    /// Where the disk ends.
    #[inline]
    fn end(&self) -> GuestOffset {
        GuestOffset::new(self.size())
    }

    /// Where the backing file ends, on the disk.
    #[inline]
    fn backing_end(&self) -> GuestOffset {
        GuestOffset::new(self.backing_size.load(SeqCst))
    }

    /// Bytes of a cluster.
    pub fn cluster_bytes(&self) -> u64 {
        self.g.cluster()
    }

    /// Whether no table leads anywhere: all of it is its backing file's.
    pub(crate) fn is_bare(&self) -> bool {
        (0..self.l1.entries()).all(|table| self.l1.get(L1Index::new(table)) == 0)
    }

    /// Unit, in bytes, in which a write that allocates needs nothing copied: a cluster or subcluster.
    pub fn allocation_bytes(&self) -> u64 {
        1 << self.g.subcluster_bits()
    }

    /// How its compressed clusters are compressed.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Who looks things up, so that nothing is reused under them.
    #[inline]
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Why nothing is written any more, if that is so.
    pub fn damage(&self) -> Option<&Damage> {
        self.damage.get()
    }

    /// Has `tell` called once, when the image is found to contradict itself. It can be set once;
    /// returns whether it was.
    pub fn on_damage(&self, tell: impl Fn(&Damage) + Send + Sync + 'static) -> bool {
        self.on_damage.set(Box::new(tell)).is_ok()
    }

    /// Whether space that is no longer used is given back to the file system (`discard=unmap`).
    pub fn set_punch(&self, punch: bool) {
        self.punch.store(punch, SeqCst);
    }

    pub(crate) fn punches(&self) -> bool {
        self.punch.load(SeqCst)
    }

    pub(crate) fn set_backing_size(&self, size: u64) {
        self.backing_size.store(size, SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_writable(&self) -> Result<(), ImageError> {
        match self.damage.get() {
            _ if self.read_only => Err(ImageError::ReadOnly),
            Some(damage) => Err(ImageError::Damaged(damage.clone())),
            None => Ok(()),
        }
    }

    /// Stops all writing, if this error says that the image contradicts itself, and has the file say
    /// so as well. The flag is best effort: nothing is written either way.
    fn report(&self, state: &mut State, error: ImageError) -> ImageError {
        if let ImageError::Damaged(damage) = &error
            && !self.read_only
            && self.damage.set(damage.clone()).is_ok()
        {
            if state.header.set_corrupt() {
                let _ = self.write_header(state).and_then(|()| self.file.flush());
            }
            if let Some(tell) = self.on_damage.get() {
                tell(damage);
            }
        }
        error
    }

    /// Writes the header as it is in memory.
    fn write_header(&self, state: &mut State) -> Result<(), ImageError> {
        state.header.put(&mut state.header_block);
        self.file
            .write_at("writing the header", HostOffset::START, &state.header_block)
    }
}

/// Counts changes to the tables in memory. Whatever makes one counts it itself, before it can be found, under the lock of
/// the state: a flush writes what is marked as changed, and counts as durable what had been counted when it looked.
#[derive(Clone, Default)]
pub(crate) struct ChangeCount(Arc<AtomicU64>);

impl ChangeCount {
    #[inline]
    fn get(&self) -> u64 {
        self.0.load(SeqCst)
    }

    #[inline]
    fn add(&self) {
        self.0.fetch_add(1, SeqCst);
    }
}
