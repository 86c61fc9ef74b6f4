//! Opens an image with all that it builds on.

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use block::{Discard, DiskFacts};
use engine::{DiskFile, Identity, Locking};
use image::{Chain, ChainOptions, LayerFormat, Qcow2, TopFile, UnusableBitmap};
use tracing::{error, warn};

use super::{Node, NodeError};
use crate::config::spec::{DiskSpec, Lock};
use crate::node::context::{OpenContext, Opener};
use crate::node::progress::Progress;
use crate::node::recorded_bitmaps::RecordedBitmaps;

/// An image, its files by index, its journal, and what keeps its bitmaps through a kill.
pub(super) struct OpenedChain {
    pub chain: Arc<Chain>,
    pub files: Vec<Arc<DiskFile>>,
    pub journal: Option<PathBuf>,
    pub bitmaps: Option<Arc<RecordedBitmaps>>,
}

/// Opens an image and all that it builds on.
pub(super) fn open_chain(
    spec: &DiskSpec,
    path: &Path,
    file: &Arc<DiskFile>,
    context: &OpenContext,
    locking: Locking,
    ours: &[Identity],
    held: &[Arc<DiskFile>],
) -> Result<OpenedChain, NodeError> {
    // Without the lock, the image is only read.
    let read_only = spec.read_only || locking == Locking::None;
    let filename = || path.display().to_string();
    let directories = context
        .allow_backing
        .allowed_directories(path, &context.rights)
        .map_err(|e| NodeError::Allow(filename(), e))?;
    let mut opener = Opener {
        spec,
        has_data_file: false,
        cache: spec.cache,
        locking,
        ours,
        held,
        context,
        opened: Vec::new(),
    };
    let top = TopFile {
        storage: opener.keep(file.clone()),
        path,
        format: LayerFormat::Qcow2,
    };
    let mut repair = Progress::new(format!("{}: opening", path.display()));
    let journal = if read_only {
        None
    } else {
        // Those of other users too, which only root sees.
        let open = || context.journals.open(&spec.name, file);
        let journal = context.rights.as_operator(open);
        journal.map_err(|e| NodeError::Journal(filename(), e))?
    };
    let (journal, journal_path) = journal.unzip();
    let options = ChainOptions {
        read_only,
        // As in QEMU, a corrupt image may be read.
        allow_corrupt: read_only,
        l2_cache_bytes: spec.l2_cache_bytes,
        punch: spec.discard == Discard::Unmap,
        journal,
        flush_changes: true,
        progress: &mut |progress| {
            repair.at(progress.done, progress.total);
            if context.stop.load(SeqCst) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        },
    };
    let open = || Chain::open(top, &directories, &mut opener, options);
    let chain = context.allow_backing.open_with(&context.rights, open);
    let chain = chain.map_err(|e| match journal_path.clone() {
        Some(path) if e.is_journal_error() => NodeError::Replay(path, e),
        path => {
            remove_if_empty(path);
            e.into()
        }
    })?;
    if let (Some(path), false) = (&spec.data_file, opener.has_data_file) {
        return Err(NodeError::NoDataFile(filename(), path.clone()));
    }
    let files = chain.files().iter();
    let files = files.map(|storage| opener.file_of(storage));
    let files = files.collect::<Option<Vec<_>>>().ok_or_else(|| {
        let e = io::Error::other("one of its files is not known");
        NodeError::Io(filename(), "be opened", e)
    })?;
    check_unreplayed(spec, path, context, &chain, &files, locking, ours)?;
    let chain = Arc::new(chain);
    // Last, since the bitmaps are in use from now on.
    let bitmaps = if read_only {
        None
    } else {
        RecordedBitmaps::of_image(spec, context, path, file, &chain)
    };
    report_bitmaps(&spec.name, &chain);
    Ok(OpenedChain {
        chain,
        files,
        journal: journal_path,
        bitmaps,
    })
}

/// Checks that no file of a chain waits for a journal that only another process or disk can replay.
fn check_unreplayed(
    spec: &DiskSpec,
    path: &Path,
    context: &OpenContext,
    chain: &Chain,
    files: &[Arc<DiskFile>],
    locking: Locking,
    ours: &[Identity],
) -> Result<(), NodeError> {
    for waiting in chain.unreplayed_journals() {
        let file = &files[usize::from(waiting.0)];
        // A released image is opened again, with its journal, before it is written. Files that this process writes have
        // a journal in use.
        let is_top = Arc::ptr_eq(file, &files[0]);
        let opened_again = is_top && locking == Locking::None && !spec.read_only;
        if !opened_again && !ours.contains(&file.identity()) {
            let check = || context.journals.check_none(&spec.name, file);
            let checked = context.rights.as_operator(check);
            checked.map_err(|e| NodeError::Journal(path.display().to_string(), e))?;
        }
    }
    Ok(())
}

/// Most bitmaps that are not continued and are logged one by one. An image may have 65535.
const UNUSABLE_NAMED: usize = 8;

/// Logs which bitmaps of an image are not continued, now and later.
fn report_bitmaps(disk: &str, chain: &Chain) {
    let Some(image) = chain.image() else {
        return;
    };
    let advice = "an incremental backup that relies on it must be followed by a full one; 'ringdisk bitmap remove' deletes it";
    let unusable = image.unusable_bitmaps();
    for UnusableBitmap { name, why, .. } in unusable.iter().take(UNUSABLE_NAMED) {
        warn!("disk {disk}: bitmap '{name}' of its image is not continued: {why}; {advice}");
    }
    if let Some(more @ 1..) = unusable.len().checked_sub(UNUSABLE_NAMED) {
        warn!(
            "disk {disk}: {more} more bitmaps of its image are not continued; 'ringdisk bitmap list {disk}' shows all"
        );
    }
    let disk = disk.to_owned();
    image.on_bitmap_lost(move |name, error| {
        error!("disk {disk}: bitmap '{name}' of its image is lost: {error}; {advice}");
    });
}

/// Removes the journal that was made for an image that could not be opened.
fn remove_if_empty(journal: Option<PathBuf>) {
    if let Some(path) = journal
        && fs::metadata(&path).is_ok_and(|metadata| metadata.len() == 0)
    {
        let _ = fs::remove_file(path);
    }
}

/// The facts of a disk that uses all these files.
pub(super) fn chain_facts(chain: &Chain, files: &[Arc<DiskFile>]) -> DiskFacts {
    let written = files[usize::from(chain.written_file().0)].facts();
    let cluster = chain.image().map_or(0, |image| image.cluster_bytes());
    let facts = files.iter().map(|file| file.facts());
    facts.fold(
        DiskFacts {
            // Discards free clusters in the image, whatever the file system supports.
            discard_granularity: if written.read_only {
                0
            } else {
                u32::try_from(cluster).unwrap_or(0)
            },
            ..written
        },
        |all, one| DiskFacts {
            logical_block: all.logical_block.max(one.logical_block),
            physical_block: all.physical_block.max(one.logical_block),
            address_alignment: all.address_alignment.max(one.address_alignment),
            length_alignment: all.length_alignment.max(one.length_alignment),
            ..all
        },
    )
}

impl Node {
    /// Whether another process reads its file, which is locked only while a guest runs, and keeps everybody from writing to it.
    pub fn is_read_elsewhere(&self) -> bool {
        let is_unlocked = self.spec.lock == Lock::Running && !self.spec.read_only;
        is_unlocked && self.file().is_some_and(|file| file.is_only_read())
    }

    /// Whether a flush has something to write to its image. Does not wait.
    pub fn has_unflushed_changes(&self) -> bool {
        self.with_image(Qcow2::has_changes) == Some(true)
    }

    /// Checks that its image has what a guest relies on which goes on, and was served here if `was_here`. Does not wait.
    ///
    /// # Errors
    /// That is in a journal which is elsewhere, or is not used.
    pub fn check_journal(&self, was_here: bool) -> Result<(), NodeError> {
        match self.with_image(|image| image.refuses_guest(was_here)) {
            Some(true) => Err(NodeError::WithoutJournal(self.filename.clone())),
            _ => Ok(()),
        }
    }

    /// A guest that was served on this host relies on what its image lacks: the image says so, for the host to which it may move.
    pub fn note_lacking(&self) {
        if let Some(Err(e)) = self.with_image(Qcow2::note_lacking) {
            warn!(
                "{}: does not say that it lacks writes that its running guest relies on: {e}; do not move that VM to another host",
                self.filename
            );
        }
    }

    /// A guest is served that does not rely on what a journal contains which is elsewhere, or is not used: that is lost. Durable
    /// before that guest can write anything, so that it can go on after a kill.
    pub fn forget_journal(&self) {
        let forget = |image: &Qcow2| {
            if !image.lacks_journal() {
                return Ok(());
            }
            image.forget_journal()?;
            // That was left out when the image was opened.
            match self.recorded_bitmaps() {
                Some(_) => image.use_bitmaps(),
                None => Ok(()),
            }
        };
        if let Some(Err(e)) = self.with_image(forget) {
            warn!(
                "{}: may still say that it has a journal, which is not here: {e}; if ringdisk is killed before something is \
                 written to it, its VM cannot go on",
                self.filename
            );
        }
    }
}
