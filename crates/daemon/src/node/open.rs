//! Opens disks.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use block::{DiskFacts, FileOffset, format_size};
use engine::{DiskFile, Identity, Locking, OpenError, Support, choose};
use image::{FORMAT_BYTES, Format, Image, Storage, foreign_format};
use rbd::{Location, RbdImage};
use tracing::{info, warn};

use super::chain::{chain_facts, open_chain};
use super::recorded_bitmaps::{Medium, RecordedBitmaps};
use super::{Node, NodeError, NodeState, SharedNode, format_of};
use crate::config::spec::{DiskSpec, FileSpec, Lock};
use crate::node::context::OpenContext;
use crate::node::storage::FileStorage;

/// A disk that has been opened, before its options apply.
struct Opened {
    image: Image,
    file: Option<Arc<DiskFile>>,
    /// All files of a mapped image.
    files: Vec<Arc<DiskFile>>,
    rbd: Option<Arc<RbdImage>>,
    journal: Option<PathBuf>,
    recorded_bitmaps: Option<Arc<RecordedBitmaps>>,
    locking: Locking,
    format: Format,
    facts: DiskFacts,
    /// Bytes.
    size: u64,
    filename: String,
}

impl Node {
    /// Opens and locks a disk. It may build on `ours`: files that the disk [writes to](Self::written) while it is on another
    /// node.
    ///
    /// # Errors
    /// It cannot be served as asked; the error says why and what to do.
    pub fn open(
        spec: DiskSpec,
        context: &OpenContext,
        ours: &[Identity],
    ) -> Result<Self, NodeError> {
        let mut opened = match &spec.file {
            FileSpec::Null(size) => open_null(&spec, *size),
            FileSpec::Rbd(location) => {
                let open = || open_rbd(&spec, location);
                context
                    .rights
                    .with_file(&spec.file, !spec.read_only, open)?
            }
            FileSpec::Path(path) => open_file(&spec, path, context, ours)?,
        };
        let filename = opened.filename;
        let facts = opened
            .facts
            .with_blocks(spec.logical_block, spec.physical_block, opened.size)
            .map_err(|e| NodeError::Blocks(filename.clone(), e))?;
        if (opened.file.is_some() || opened.rbd.is_some()) && !spec.cache.flushes() {
            warn!(
                "disk {}: cache=unsafe IGNORES FLUSHES: a crash or power cut of this host loses data \
                 that the guest made durable, and may ruin its file systems; for disks that can be \
                 thrown away",
                spec.name
            );
        }
        let choice = match &opened.file {
            Some(file) => {
                let choice = choose(file, spec.aio, &Support::here())
                    .map_err(|e| NodeError::Aio(filename.clone(), e))?;
                info!("disk {}: aio={choice}", spec.name);
                Some(choice)
            }
            None => None,
        };
        let depth = opened.image.chain().map_or(0, |chain| chain.depth() - 1);
        let released = opened.file.is_some() && opened.locking == Locking::None;
        if released {
            info!(
                "disk {}: lock=running: it is locked when a VM starts on it",
                spec.name
            );
            opened.files.clear();
        }
        // Last, since the bitmaps are in use from now on.
        if let (Some(file), FileSpec::Path(path), Format::Raw, false) =
            (&opened.file, &spec.file, opened.format, released)
        {
            let bitmaps = load_recorded_bitmaps(&spec, context, path, file, opened.size)?;
            opened.image = raw_image(bitmaps.as_ref());
            opened.recorded_bitmaps = bitmaps;
        }
        if let Some(rbd) = opened.rbd.as_ref().filter(|_| !spec.read_only) {
            let bitmaps = RecordedBitmaps::load_of_cluster(&spec, context, rbd, opened.size);
            let bitmaps = bitmaps.map_err(|e| NodeError::Bitmaps(filename.clone(), e))?;
            opened.image = raw_image(Some(&bitmaps));
            opened.recorded_bitmaps = Some(bitmaps);
        }
        let mut own: Vec<_> = opened.file.iter().map(|file| file.identity()).collect();
        own.extend(context.rights.data_file_identity(&spec));
        Ok(Self {
            _own: context.own_files.add(&spec.name, own, spec.read_only),
            shared: Arc::new(SharedNode {
                changes: Mutex::new(()),
                refreshing: Mutex::new(()),
                sizing: Mutex::new(()),
                state: Mutex::new(NodeState {
                    image: (!released).then_some(opened.image),
                    file: opened.file,
                    files: opened.files,
                    size: opened.size,
                    cuts: 0,
                    allocated: None,
                    is_deleted: false,
                    depth,
                    journal: opened.journal,
                    recorded_bitmaps: opened.recorded_bitmaps,
                    on_damage: None,
                }),
            }),
            rbd: opened.rbd,
            context: context.clone(),
            choice,
            facts,
            size: opened.size,
            filename,
            format: opened.format,
            spec,
        })
    }
}

fn open_null(spec: &DiskSpec, size: u64) -> Opened {
    let filename = format!("null:{}", format_size(size));
    warn!(
        "disk {}: {filename} STORES NOTHING: writes are thrown away and reads leave memory as it is; it is meant \
         for measurements only",
        spec.name
    );
    Opened {
        image: Image::Null,
        file: None,
        files: Vec::new(),
        rbd: None,
        journal: None,
        recorded_bitmaps: None,
        locking: Locking::None,
        format: Format::Raw,
        facts: null_facts(spec.read_only),
        size,
        filename,
    }
}

fn open_rbd(spec: &DiskSpec, location: &Location) -> Result<Opened, NodeError> {
    let image = RbdImage::open(rbd::OpenOptions {
        location: location.clone(),
        cache: spec.cache,
        read_only: spec.read_only,
    })?;
    let filename = location.to_string();
    let size = image.size();
    let size = size.map_err(|e| NodeError::Io(filename.clone(), "find out its size", e))?;
    Ok(Opened {
        image: Image::raw(),
        file: None,
        files: Vec::new(),
        facts: image.facts(),
        rbd: Some(image),
        journal: None,
        recorded_bitmaps: None,
        locking: Locking::None,
        format: Format::Raw,
        size,
        filename,
    })
}

fn open_file(
    spec: &DiskSpec,
    path: &Path,
    context: &OpenContext,
    ours: &[Identity],
) -> Result<Opened, NodeError> {
    let released = context.inherited.is_released(&spec.name);
    // A read-only disk is locked at once in any case: readers do not exclude each other.
    let locking = match spec.lock {
        Lock::Running if !spec.read_only => Locking::None,
        _ if released => Locking::None,
        _ => Locking::Now,
    };
    let (file, locking) = context.open(&spec.name, path, spec.cache, spec.read_only, locking)?;
    let format = format_of(spec, path, file.backing())?;
    let file = Arc::new(file);
    let mut opened = Opened {
        image: Image::raw(),
        file: Some(file.clone()),
        files: Vec::new(),
        rbd: None,
        journal: None,
        recorded_bitmaps: None,
        locking,
        format,
        facts: file.facts(),
        size: 0,
        filename: path.display().to_string(),
    };
    match format {
        Format::Raw => {
            opened.size = raw_size(spec, path, &file, locking == Locking::Held)?;
        }
        Format::Qcow2 => {
            let chain = open_chain(spec, path, &file, context, locking, ours, &[])?;
            opened.facts = chain_facts(&chain.chain, &chain.files);
            opened.size = chain.chain.size();
            opened.image = Image::Chain(chain.chain);
            (opened.files, opened.journal) = (chain.files, chain.journal);
            opened.recorded_bitmaps = chain.bitmaps;
        }
    }
    Ok(opened)
}

/// The size of a raw disk. A file that is raw only by its name or kind, and begins like an image, is refused, unless a
/// process has served it before: its guest may have written what it begins with.
pub(super) fn raw_size(
    spec: &DiskSpec,
    path: &Path,
    file: &Arc<DiskFile>,
    was_served: bool,
) -> Result<u64, NodeError> {
    let filename = || path.display().to_string();
    if let Some(data_file) = &spec.data_file {
        return Err(NodeError::NoDataFile(filename(), data_file.clone()));
    }
    let looks_like = |format| NodeError::LooksLike(filename(), format);
    let foreign = format_of_content(file);
    if let (Some(format), None, false) = (foreign, spec.format, was_served) {
        return Err(looks_like(format));
    }
    file.raw_size(path).map_err(|e| match foreign {
        // Making it longer would damage it.
        Some(format) if matches!(e, OpenError::Size { .. }) => looks_like(format),
        _ => e.into(),
    })
}

/// The format of which a file looks like an image, if it can be read.
fn format_of_content(file: &Arc<DiskFile>) -> Option<&'static str> {
    let storage = FileStorage {
        file: file.clone(),
        flushes: false,
    };
    let mut first = [0; FORMAT_BYTES];
    let n = storage.read_at(FileOffset(0), &mut first).ok()?;
    foreign_format(&first[..n])
}

impl Node {
    /// Checks that a raw disk does not begin like an image, because nobody has said that it is raw.
    ///
    /// # Errors
    /// It does.
    pub fn check_raw(&self) -> Result<(), NodeError> {
        match self.file() {
            Some(file) if self.format == Format::Raw => match format_of_content(&file) {
                Some(format) => Err(NodeError::LooksLike(self.filename.clone(), format)),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }
}

/// The bitmaps of a disk that is in a locked file, unless it is read-only.
pub(super) fn load_recorded_bitmaps(
    spec: &DiskSpec,
    context: &OpenContext,
    path: &Path,
    file: &Arc<DiskFile>,
    size: u64,
) -> Result<Option<Arc<RecordedBitmaps>>, NodeError> {
    if file.facts().read_only {
        return Ok(None);
    }
    // In whole blocks, as the disk.
    let size = size - size % u64::from(file.facts().logical_block);
    let medium = Medium::File(file.clone());
    let bitmaps = RecordedBitmaps::load(spec, context, path, medium, size);
    let bitmaps = bitmaps.map_err(|e| NodeError::Bitmaps(path.display().to_string(), e))?;
    Ok(Some(bitmaps))
}

/// The image of a disk that has these bitmaps.
pub(super) fn raw_image(bitmaps: Option<&Arc<RecordedBitmaps>>) -> Image {
    bitmaps.map_or_else(Image::raw, |all| Image::Raw(all.bitmaps().clone()))
}

fn null_facts(read_only: bool) -> DiskFacts {
    DiskFacts {
        logical_block: 512,
        physical_block: 4096,
        optimal_io: 0,
        address_alignment: 1,
        length_alignment: 1,
        discard_granularity: 512,
        read_only,
    }
}
