use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use block::{FileOffset, GuestOffset};
use thiserror::Error;

use super::bitmaps::StoredBitmaps;
use super::cache::Cache;
use super::entry::table_at;
use super::error::{Doing, ImageError};
use super::file::FileEnd;
use super::flush::Flushed;
use super::geometry::Geometry;
use super::header::{HEADER_BYTES, Header, HeaderError};
use super::journal::{self, Changes, JournalFile, JournalOwner, Lineage};
use super::l1::L1;
use super::metadata::Metadata;
use super::pins::Pins;
use super::progress::ReportProgress;
use super::refcount::Refcounts;
use super::repair::repair;
use super::scan::{ScanError, snapshots};
use super::types::{HostOffset, L1Index, Run};
use super::{ChangeCount, ImageState, Qcow2};
use crate::bytes::be64;
use crate::storage::{Storage, read_padded};

/// Bytes of L2 tables kept in memory by default: those of 8 TiB with 64 KiB clusters. Memory is allocated as tables
/// are read, and never for more tables than the disk has.
const L2_CACHE_BYTES: u64 = 1 << 30;

/// The most slices kept in memory: 25 bytes of tags and pointers for each, 6.5 MB.
const SLICES_MAX: u64 = 1 << 18;

/// Options for opening an image.
pub struct OpenOptions<'a> {
    /// Nothing is written to the image.
    pub read_only: bool,
    /// An image that is marked as corrupt may be read. Only with `read_only`.
    pub allow_corrupt: bool,
    /// Bytes of L2 tables kept in memory (`l2-cache-size`). The default is those of the whole disk, up to 1 GiB.
    pub l2_cache_bytes: Option<u64>,
    /// Unused space is returned to the file system (`discard=unmap`).
    pub punch: bool,
    /// Where changes that are only in memory are recorded, so that they survive a kill of this process. An image of
    /// version 2 or with internal snapshots has no journal, and its changes are flushed instead.
    pub journal: Option<JournalFile>,
    /// Changes also survive a kill of this process without a journal: they are flushed before they are
    /// acknowledged.
    pub flush_changes: bool,
    /// Receives the progress of a repair or a replay. It may stop it, and the image is then not opened.
    pub progress: ReportProgress<'a>,
}

/// Why an image was not opened. Each message says what to do next.
#[derive(Debug, Error)]
pub enum Qcow2Error {
    /// The header can't be used.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// A table is damaged or could not be read.
    #[error(transparent)]
    Image(ImageError),
    /// The image is marked as corrupt.
    #[error(
        "it is marked as corrupt; repair a copy of it with 'qemu-img check -r all', or open it read-only to \
        read what is still readable"
    )]
    Corrupt,
    /// The clusters are smaller than the unit in which the file can be written.
    #[error(
        "its clusters of {cluster} bytes are smaller than the {block} that its file is written \
        in; 'qemu-img convert -o cluster_size=64k' makes an image with larger ones"
    )]
    Block {
        cluster: u64,
        /// The unit of writes to the file in bytes.
        block: u32,
    },
    /// A repair would take too long while the image is opened.
    #[error(
        "it was not closed cleanly, and is too large to be repaired here; 'qemu-io -c quit IMAGE' \
        repairs it"
    )]
    TooMuchToRepair,
    /// The caller has stopped a repair or a replay.
    #[error("stopped while it was being opened; nothing is lost, and the next start continues")]
    Stopped,
    /// The journal cannot be read.
    #[error(
        "the journal of a killed process cannot be read: {0}; leave it in place, and start again when the \
        problem is fixed; move it away only if it cannot be fixed, because writes that the guest had not \
        flushed are then lost"
    )]
    Journal(#[source] std::io::Error),
    /// The journal belongs to the image, but cannot be replayed.
    #[error(
        "the journal of a killed process cannot be replayed: {0}; {advice}",
        advice = match .0 {
            ImageError::Damaged(_) | ImageError::Unsupported(_) => {
                "keep copies of the image and the journal; moving the journal away lets the image open, but \
                 loses writes that the guest had not flushed"
            }
            _ => {
                "nothing is lost: leave the journal in place, and start again when there is space and the \
                    storage works"
            }
        }
    )]
    Replay(#[source] ImageError),
    /// The data is in another file, which was not given.
    #[error("its data is in another file")]
    DataFile,
}

impl Qcow2Error {
    pub(super) fn from_scan(error: ScanError) -> Self {
        match error {
            ScanError::Image(error) => Self::Image(error),
            ScanError::TooMuch => Self::TooMuchToRepair,
            ScanError::Stopped => Self::Stopped,
        }
    }
}

/// Whether a journal that was found somewhere belongs to an image.
pub fn journal_owner(
    journal: &dyn Storage,
    identity: &[u8; 32],
    image: &dyn Storage,
) -> JournalOwner {
    match read_header(image) {
        Ok((header, _)) => journal::owner(journal, identity, &header),
        Err(_) => JournalOwner::Other,
    }
}

/// Whether an image says that it has a journal somewhere, which may contain what the image lacks.
pub fn may_have_journal(image: &dyn Storage) -> bool {
    read_header(image).is_ok_and(|(header, _)| journal::journal_bits(&header).is_why_dirty())
}

/// Reads the header. Also returns the bytes of the first cluster.
pub(crate) fn read_header(storage: &dyn Storage) -> Result<(Header, Vec<u8>), Qcow2Error> {
    let mut first = vec![0; 512];
    let read = |bytes: &mut Vec<u8>| {
        let read = read_padded(storage, FileOffset(0), bytes);
        read.doing("reading the header", HostOffset::START)
            .map_err(Qcow2Error::Image)
    };
    read(&mut first)?;
    first.resize(Header::cluster_bytes(&first)?, 0);
    read(&mut first)?;
    Ok((Header::parse(&first)?, first))
}

impl Qcow2 {
    /// Opens an image whose header was [read](read_header). `data` is the external data file if the header says
    /// that there is one.
    pub(crate) fn open(
        storage: Arc<dyn Storage>,
        data: Option<Arc<dyn Storage>>,
        (mut header, first): (Header, Vec<u8>),
        mut options: OpenOptions<'_>,
    ) -> Result<Self, Qcow2Error> {
        let g = header.geometry();
        if header.corrupt() && !(options.read_only && options.allow_corrupt) {
            return Err(Qcow2Error::Corrupt);
        }
        if g.external != data.is_some() {
            return Err(Qcow2Error::DataFile);
        }
        let block = data.iter().fold(storage.block_size(), |most, data| {
            most.max(data.block_size())
        });
        if !options.read_only && u64::from(block) > g.cluster() {
            let cluster = g.cluster();
            return Err(Qcow2Error::Block { cluster, block });
        }
        let unit = (block as usize).max(512).max(HEADER_BYTES);
        let mut header_block = first[..unit.min(first.len())].to_vec();
        let journal = options.journal.take();
        let lineage = Lineage::new(journal::journal_bits(&header));
        if header.dirty() && !options.read_only && !counts_are_right(&header, journal.as_ref()) {
            repair(&*storage, &mut header, &mut header_block, options.progress)
                .map_err(Qcow2Error::from_scan)?;
        }
        let image = Self::assemble(storage, data, header, header_block, &options)
            .map_err(Qcow2Error::Image)?;
        image.lock().lineage = lineage;
        if let Some(file) = journal.filter(|_| !options.read_only) {
            image.replay_journal(file, options.progress)?;
        }
        if !options.read_only {
            image.look_for_journal();
            image.load_bitmaps();
            let full = image.full_size();
            image.lock().refcounts.search_before_growth_beyond(full);
        }
        Ok(image)
    }

    /// The most bytes of L2 tables that are kept in memory.
    pub(crate) fn cache_bytes(&self) -> u64 {
        self.cache.slices() * self.g.slice_bytes()
    }

    fn assemble(
        storage: Arc<dyn Storage>,
        data: Option<Arc<dyn Storage>>,
        header: Header,
        header_block: Vec<u8>,
        options: &OpenOptions<'_>,
    ) -> Result<Self, ImageError> {
        let g = header.geometry();
        let size = storage
            .size()
            .doing("asking for the file's size", HostOffset::START)?;
        let file = FileEnd::new(storage, HostOffset::new(size), options.punch);
        let data = match data {
            Some(data) => {
                let size = data
                    .size()
                    .doing("asking for the data file's size", HostOffset::START)?;
                let data = FileEnd::new(data, HostOffset::new(size), options.punch);
                if !options.read_only {
                    data.grow_exactly(HostOffset::in_data_file(GuestOffset(header.size)))?;
                }
                Some(data)
            }
            None => None,
        };
        let l1 = read_l1(&file, &header)?;
        let changes = ChangeCount::default();
        let (refcounts, metadata) = if options.read_only {
            let none = Refcounts::new(g, &[], HostOffset::START, &file, changes.clone());
            (none, Metadata::default())
        } else {
            let refcounts = read_refcounts(&file, g, &header, &changes)?;
            let metadata = find_metadata(&file, g, &header, &refcounts, &l1)?;
            (refcounts, metadata)
        };
        let bytes = options.l2_cache_bytes.unwrap_or(L2_CACHE_BYTES);
        let reach = g.slice_entries() << g.cluster_bits;
        let slices = (bytes / g.slice_bytes())
            .min(header.size.div_ceil(reach))
            .clamp(1, SLICES_MAX);
        Ok(Self {
            g,
            file,
            data,
            size: AtomicU64::new(header.size),
            backing_size: AtomicU64::new(0),
            l1,
            cache: Cache::new(&g, slices),
            pins: Pins::new(),
            loaded: Condvar::new(),
            flushing: Mutex::new(Flushed::default()),
            growing: Mutex::default(),
            asked: AtomicU64::new(0),
            changes,
            durable: AtomicU64::new(0),
            unrecorded: AtomicBool::new(false),
            compression: header.compression,
            read_only: options.read_only,
            raw_external: header.raw_external(),
            has_begun_writing: AtomicBool::new(false),
            lacks_journal: AtomicBool::new(false),
            has_outdated_journal: AtomicBool::new(false),
            has_refused: AtomicBool::new(false),
            damage: OnceLock::new(),
            on_damage: OnceLock::new(),
            bitmaps: Arc::default(),
            on_bitmap_lost: OnceLock::new(),
            state: Mutex::new(ImageState {
                header,
                header_block,
                refcounts,
                metadata,
                journal: None,
                outdated_journal: None,
                lineage: Lineage::default(),
                bitmaps: StoredBitmaps::default(),
                has_holes: false,
                flush_changes: options.flush_changes,
                unrecorded: 0,
                changes: Changes::default(),
                loading: HashMap::new(),
                dirty_l2: BTreeMap::new(),
                writing_l2: HashSet::new(),
                dirty_l1: BTreeSet::new(),
                pending: BTreeMap::new(),
                allocations: 0,
                waiters: HashMap::new(),
                unlinked: Vec::new(),
                unlinked_clusters: 0,
                deferred_frees: Vec::new(),
            }),
        })
    }
}

/// Whether a dirty image is dirty only because of its journal; its refcounts are then right. An image with lazy
/// refcounts may be dirty for both reasons, if QEMU has written to it since and did not exit cleanly.
fn counts_are_right(header: &Header, journal: Option<&JournalFile>) -> bool {
    let journal_bits = journal::journal_bits(header);
    let has_fitting_journal = || journal.is_some_and(|file| journal::fits(file, journal_bits));
    journal_bits.is_why_dirty() && (!header.lazy_refcounts || has_fitting_journal())
}

fn read_l1(file: &FileEnd, header: &Header) -> Result<L1, ImageError> {
    let bytes = read_all(
        file,
        header.l1_at,
        u64::from(header.l1_entries) * 8,
        "the L1 table",
    )?;
    let l1 = L1::default();
    l1.extend((0..bytes.len()).step_by(8).map(|at| be64(&bytes, at)));
    Ok(l1)
}

fn read_refcounts(
    file: &FileEnd,
    g: Geometry,
    header: &Header,
    changes: &ChangeCount,
) -> Result<Refcounts, ImageError> {
    let at = header.refcount_table_at;
    let bytes = u64::from(header.refcount_table_clusters) << g.cluster_bits;
    if at == HostOffset::START || bytes == 0 {
        let what = "it has no refcount table";
        return Err(ImageError::damaged(what, at));
    }
    let table = read_all(file, at, bytes, "the refcount table")?;
    let refcounts = Refcounts::new(g, &table, at, file, changes.clone());
    // If blocks could be shared, a few bytes could mark any number of clusters as in use.
    let mut blocks: Vec<_> = refcounts.block_offsets().collect();
    blocks.sort_unstable();
    match blocks.windows(2).find(|two| two[0] == two[1]) {
        Some(two) => Err(ImageError::damaged(
            "its refcount table refers to a block more than once",
            two[0],
        )),
        None => Ok(refcounts),
    }
}

/// Reads all of a table that the header refers to.
fn read_all(
    file: &FileEnd,
    at: HostOffset,
    bytes: u64,
    name: &'static str,
) -> Result<Vec<u8>, ImageError> {
    // Memory is allocated only for bytes that the file has.
    if at.bytes().saturating_add(bytes) > file.get().bytes().next_multiple_of(512) {
        let what = "the file ends before a table; was it cut off?";
        return Err(ImageError::damaged(what, at));
    }
    let mut buffer = vec![0; bytes as usize];
    file.read_at(name, at, &mut buffer)?;
    Ok(buffer)
}

/// Where the image's metadata is, as far as that is known without reading L2 tables.
fn find_metadata(
    file: &FileEnd,
    g: Geometry,
    header: &Header,
    refcounts: &Refcounts,
    l1: &L1,
) -> Result<Metadata, ImageError> {
    let mut metadata = Metadata::default();
    let mut add = |at: HostOffset, bytes: u64, name| {
        let run = Run {
            first: at.cluster(&g),
            clusters: g.clusters(bytes),
        };
        metadata.add_run(run, name);
    };
    add(HostOffset::START, 1, "the header");
    add(
        header.l1_at,
        u64::from(header.l1_entries) * 8,
        "the L1 table",
    );
    let table = refcounts.table_run();
    add(
        header.refcount_table_at,
        table.clusters << g.cluster_bits,
        "the refcount table",
    );
    let (snapshots, bytes) = snapshots(file.storage(), header)?;
    add(header.snapshots_at, bytes, "the snapshot table");
    for snapshot in snapshots {
        add(
            snapshot.l1_at,
            u64::from(snapshot.l1_entries) * 8,
            "a snapshot's L1 table",
        );
    }
    let entries = (0..l1.entries()).map(|index| l1.get(L1Index::new(index)));
    let tables = entries.filter_map(|entry| table_at(&g, entry).ok().flatten());
    let all = refcounts.block_offsets().chain(tables);
    metadata.set_tables(all.map(|at| at.cluster(&g)).collect());
    Ok(metadata)
}
