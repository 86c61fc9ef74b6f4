//! qcow2, versions 2 and 3 (docs/interop/qcow2): where each part of the disk is in the file, and how
//! clusters are allocated and freed. The caller moves guest data.
//!
//! - [`types`] has one type per coordinate: offsets and clusters of the disk and of the file.
//! - [`map`] looks up a range in memory, without locks, or reports that a table must be loaded.
//! - [`write`] allocates clusters for a write and, once the data is written, links them into the tables;
//!   [`zero`] unlinks them. Both change the tables in memory through [`change`].
//! - [`flush`] writes the changed tables; its comment explains the order. [`reclaim`] makes freed clusters usable again,
//!   and [`leaks`] those that crashes have leaked.
//! - [`journal`] records acknowledged changes so that they survive a kill of the process; [`replay`] applies them.
//! - [`open`], [`begin`], [`grow`] and [`close`] are the events in an image's life.
//! - [`bitmaps`] continues the dirty bitmaps that are stored in an image.
//! - [`check`](mod@check) compares refcounts with references; [`repair`] rebuilds them.
//!
//! Lock order: `growing`, `flushing`, `state`. Tables are loaded without any lock held.

mod begin;
mod bitmaps;
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
mod leaks;
mod load;
mod map;
mod metadata;
mod open;
mod pins;
mod progress;
mod raw_data_file;
mod reclaim;
mod refcount;
mod repair;
mod replay;
mod retry;
mod scan;
mod types;
mod write;
mod zero;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::iter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;

use block::{DirtyBitmaps, GuestOffset};

pub use bitmaps::{BITMAP_BYTES_MAX, UnusableBitmap};
pub use check::CheckReport;
pub use compressed::Compression;
pub use error::{Damage, DamagedPart, ImageError};
pub use header::HeaderError;
pub use journal::{Generations, JournalEvent, JournalFile, JournalOwner};
pub use open::{OpenOptions, Qcow2Error, journal_owner, may_have_journal};
pub use pins::{Pin, Pins, ThreadPins};
pub use progress::Progress;
pub use reclaim::Reclaimed;
pub use write::{Allocation, Awaited, Fill, Prepared};
pub use zero::{ZeroMode, ZeroStep};

pub(crate) use map::{Load, Mapping, WriteMapping};
pub(crate) use open::read_header;

use bitmaps::{OnBitmapLost, StoredBitmaps};
use cache::Cache;
use file::FileEnd;
use geometry::Geometry;
use header::Header;
use journal::{Changes, Journal, Lineage};
use l1::L1;
use metadata::Metadata;
use pins::Mark;
use refcount::Refcounts;
use types::{Frame, GuestCluster, HostOffset, L1Index, PieceIndex, Run, SliceIndex};
use write::PendingWrite;

/// An open image, shared by any number of threads.
pub struct Qcow2 {
    g: Geometry,
    file: FileEnd,
    /// The external data file, if there is one.
    data: Option<FileEnd>,
    size: AtomicU64,
    /// Bytes of the disk, from the start, that a backing file covers.
    backing_size: AtomicU64,
    l1: L1,
    cache: Cache,
    pins: Pins,
    state: Mutex<ImageState>,
    /// Signalled when loading a slice has succeeded or failed.
    loaded: Condvar,
    flushing: Mutex<flush::Flushed>,
    /// Held while the disk grows.
    growing: Mutex<()>,
    /// Flushes requested so far.
    asked: AtomicU64,
    /// Changes to the tables in memory so far, and how many of them are durable.
    changes: ChangeCount,
    durable: AtomicU64,
    /// Some changes are neither recorded in the journal nor flushed.
    unrecorded: AtomicBool,
    compression: Compression,
    read_only: bool,
    /// The data file must equal the disk at all times (`data_file_raw`).
    raw_external: bool,
    /// Unused space is returned to the file system.
    /// The preparations for the first write are done.
    has_begun_writing: AtomicBool,
    /// Changes are missing that were acknowledged: they are in a journal that is not here.
    lacks_journal: AtomicBool,
    /// Changes are missing that guests relied on which were served on this host: the journal here has them, and the image does not
    /// mean it any more, or it says that they are lost.
    has_outdated_journal: AtomicBool,
    /// A guest that goes on was refused because of either.
    has_refused: AtomicBool,
    /// Why writing has stopped.
    damage: OnceLock<Damage>,
    on_damage: OnceLock<OnDamage>,
    /// The bitmaps that were loaded.
    bitmaps: Arc<DirtyBitmaps>,
    on_bitmap_lost: OnceLock<OnBitmapLost>,
}

type OnDamage = Box<dyn Fn(&Damage) + Send + Sync>;

/// The mutable state, except the parts that lookups read without a lock.
struct ImageState {
    header: Header,
    /// The first bytes of the file.
    header_block: Vec<u8>,
    refcounts: Refcounts,
    metadata: Metadata,
    journal: Option<Journal>,
    /// A journal of this file that the image does not mean any more, which has changes that are missing, or says that they are.
    outdated_journal: Option<Arc<dyn crate::storage::Storage>>,
    lineage: Lineage,
    bitmaps: StoredBitmaps,
    /// There was no space to fill the holes of tables, so a flush may need space.
    has_holes: bool,
    /// There is no journal, so changes are flushed before they are acknowledged.
    flush_changes: bool,
    /// How many times changes could not be recorded.
    unrecorded: u64,
    /// Changes not recorded yet, except those of refcounts.
    changes: Changes,
    /// Slices being loaded, with the frame for each.
    loading: HashMap<SliceIndex, Frame>,
    /// Frames with changes, with a mask of the changed pieces.
    dirty_l2: BTreeMap<Frame, u32>,
    /// Frames that a flush is writing.
    writing_l2: HashSet<Frame>,
    /// Pieces of the L1 table with changes.
    dirty_l1: BTreeSet<PieceIndex>,
    /// Ranges of clusters with an allocation in progress, by their first cluster.
    pending: BTreeMap<GuestCluster, write::Pending>,
    /// Allocations begun so far.
    allocations: u64,
    /// Wakers of those that wait for a write to end.
    waiters: HashMap<PendingWrite, Vec<Waker>>,
    /// Clusters unlinked from the tables in memory; the tables in the file may still refer to them.
    unlinked: Vec<Run>,
    unlinked_clusters: u64,
    /// Clusters that no table refers to, but older requests may still access.
    deferred_frees: Vec<(Mark, Vec<Run>)>,
}

impl ImageState {
    /// No table in memory refers to these clusters any more.
    fn unlink(&mut self, run: Run) {
        self.unlinked_clusters += run.clusters;
        self.refcounts.unlinked(run);
        match self.unlinked.last_mut() {
            Some(last) if last.end() == run.first => last.clusters += run.clusters,
            _ => self.unlinked.push(run),
        }
    }

    /// Whether a flush has nothing to write.
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
        GuestOffset(self.size())
    }

    /// Where the backing file ends, on the disk.
    #[inline]
    fn backing_end(&self) -> GuestOffset {
        GuestOffset(self.backing_size.load(SeqCst))
    }

    /// Bytes of a cluster.
    pub fn cluster_bytes(&self) -> u64 {
        self.g.cluster()
    }

    /// Whether the image has no L2 tables: everything is in its backing file.
    pub(crate) fn is_unwritten(&self) -> bool {
        (0..self.l1.entries()).all(|table| self.l1.get(L1Index::new(table)) == 0)
    }

    /// Unit, in bytes, in which an allocating write needs no copy: a cluster or subcluster.
    pub fn allocation_bytes(&self) -> u64 {
        1 << self.g.subcluster_bits()
    }

    /// The compression type of the header.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// The pins that keep looked-up clusters from being reused.
    #[inline]
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Why writing has stopped, if it has.
    pub fn damage(&self) -> Option<&Damage> {
        self.damage.get()
    }

    /// Sets `tell`, which is called once, when the image is found to be damaged. It can be set only once;
    /// returns false if it was set already.
    pub fn on_damage(&self, tell: impl Fn(&Damage) + Send + Sync + 'static) -> bool {
        self.on_damage.set(Box::new(tell)).is_ok()
    }

    /// Whether to return unused space to the file system (`discard=unmap`).
    pub fn set_punch(&self, punch: bool) {
        for file in iter::once(&self.file).chain(&self.data) {
            file.set_returns_space(punch);
        }
    }

    pub(crate) fn punches(&self) -> bool {
        self.data.as_ref().unwrap_or(&self.file).returns_space()
    }

    pub(crate) fn set_backing_size(&self, size: u64) {
        self.backing_size.store(size, SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, ImageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_writable(&self) -> Result<(), ImageError> {
        match self.damage.get() {
            _ if self.read_only => Err(ImageError::ReadOnly),
            Some(damage) => Err(ImageError::Damaged(damage.clone())),
            None => Ok(()),
        }
    }

    /// Stops all writing if the error says that the image is damaged, and sets the corrupt bit in the
    /// file. The bit is best effort: nothing more is written either way.
    fn report(&self, state: &mut ImageState, error: ImageError) -> ImageError {
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
    fn write_header(&self, state: &mut ImageState) -> Result<(), ImageError> {
        state.header.put(&mut state.header_block);
        self.file
            .write_at("writing the header", HostOffset::START, &state.header_block)
    }
}

/// Counts changes to the tables in memory. A change is counted under the state lock, before a lookup can find it. A
/// flush writes what is marked as changed, and then counts as durable all changes counted when it began.
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
