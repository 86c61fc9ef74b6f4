//! An opened disk: its file, and what the data path needs of it. QEMU calls it a block node.

pub mod bitmaps;
pub mod checkpoint;
pub mod context;
pub mod journal;
pub mod progress;
pub mod storage;

mod chain;
mod close;
mod open;
pub mod own_files;
pub mod paths;
mod recorded_bitmaps;
mod released;
pub mod snapshot;

use std::cmp::Ordering;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use block::{Aio, Backing, BlockSizeError, CacheMode, DiskFacts, format_size};
use datapath::{Disk, Options, Replacement, Storage};
use engine::{Choice, ChoiceError, DiskFile, Identity, OpenError};
use image::{ChainError, Damage, Format, Image, UnknownFormat};
use rbd::{RbdError, RbdImage};
use thiserror::Error;
use tracing::{info, warn};

use crate::config::spec::DiskSpec;
use crate::inherited::FileIdentity;
use crate::node::context::{AllowBacking, OpenContext};
use crate::node::journal::JournalError;
use crate::node::own_files::OwnFile;
use crate::node::recorded_bitmaps::RecordedBitmaps;

pub use paths::FileUse;
#[cfg(any(test, fuzzing))]
pub use recorded_bitmaps::check_record;

/// An opened disk. Its file stays locked while this lives, except when it is [released](Node::release).
pub struct Node {
    pub spec: DiskSpec,
    shared: Arc<SharedNode>,
    /// The image in a Ceph cluster that the operator named.
    rbd: Option<Arc<RbdImage>>,
    context: OpenContext,
    /// Keeps other disks from building on its files.
    _own: Arc<OwnFile>,
    /// The engine, and why it was chosen.
    pub choice: Option<Choice>,
    facts: DiskFacts,
    /// Bytes, when it was opened.
    size: u64,
    /// The name of the file in messages.
    pub filename: String,
    pub format: Format,
}

/// Shared by nodes on the same file. Locks are taken in the order of the fields.
struct SharedNode {
    /// Held while files are grown, closed or opened, so that nothing is written to a file after its lock has been
    /// released. Its holder may wait for storage: it must not be taken while a lock is held that all disks need, such
    /// as the server's state.
    changes: Mutex<()>,
    /// Held while storage is queried for sizes.
    refreshing: Mutex<()>,
    /// Held while the size of the file is asked for and noted, so that an older answer does not follow a newer one. Its
    /// holder may wait for storage, as that of `changes`.
    sizing: Mutex<()>,
    /// Held only to read or replace it, never while storage is accessed.
    state: Mutex<NodeState>,
}

/// What changes when the files are reopened.
struct NodeState {
    /// `None` while the disk is released.
    image: Option<Image>,
    /// The file that the operator named.
    file: Option<Arc<DiskFile>>,
    /// All files of a mapped image, by their index in it.
    files: Vec<Arc<DiskFile>>,
    /// Bytes, when last queried.
    size: u64,
    /// How often the file was found cut off.
    cuts: u64,
    /// Bytes that the file occupies, when last queried.
    allocated: Option<u64>,
    /// The file had no name, when last looked for.
    is_deleted: bool,
    depth: usize,
    /// The journal of an image that is writable.
    journal: Option<PathBuf>,
    /// The bitmaps of a disk that is writable, and not in an image that keeps them alone.
    recorded_bitmaps: Option<Arc<RecordedBitmaps>>,
    on_damage: Option<OnDamage>,
}

type OnDamage = Arc<dyn Fn(&Damage) + Send + Sync>;

/// Why something cannot be done with a released disk.
pub const RELEASED: &str = "no VM runs on it here, so that it may be in use on another host (lock=running, or its VM \
    was moved there)";

#[derive(Debug, Error)]
pub enum NodeError {
    #[error("{0}: {1}")]
    Format(String, UnknownFormat),
    #[error(
        "{0}: begins like an image in {1} format, but would be served as raw, which destroys such an image: {advice}, or \
        format=raw if every byte of it is the disk's (a guest can write such bytes itself)",
        advice = match *.1 {
            "qcow2" => "add format=qcow2 if it is one",
            _ => "convert it with 'qemu-img convert -O raw' if it is one",
        }
    )]
    LooksLike(String, &'static str),
    #[error(
        "{0}: has no external data file, so that data-file={path} says something wrong about it; remove data-file, or name \
        the image that has this data file", path = .1.display()
    )]
    NoDataFile(String, PathBuf),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error("{0}: {1}")]
    Blocks(String, BlockSizeError),
    #[error("{0}: {1}")]
    Aio(String, ChoiceError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Rbd(#[from] RbdError),
    #[error("{0}: cannot look for files that it names in {1}")]
    Allow(String, io::Error),
    #[error("{0}: {1}")]
    Journal(String, JournalError),
    #[error(
        "{0}: {1}, so it does not contain the disk's data; leave it, and create another one, with a new name, with 'qemu-img create -f qcow2 -b {2} -F {3} NAME'"
    )]
    Above(String, &'static str, String, Format),
    #[error(
        "{0}: is the disk's image, but from there it would not find the files that it builds on{1}; leave it in its directory \
         while the disk is served"
    )]
    Elsewhere(String, String),
    #[error(
        "{0}: may lack writes that its running guest relies on: ringdisk was killed while it served this image, and its journal is \
         not here, or does not belong to this state of the image (another program has written to it since, or a copy was put \
         back). If the kill was on another host, detach the disk here, let ringdisk there serve the image once with lock=always, \
         which replays the journal, and end it; then attach the disk again, and the guest goes on. If the journal is lost, reset \
         the VM: it is as after a power failure"
    )]
    WithoutJournal(String),
    #[error("{1} (the journal is {path})", path = .0.display())]
    Replay(PathBuf, ChainError),
    #[error(
        "{0}: is no longer the disk's file{1}; put that back, or name its new path ('ringdisk replace', or the configuration)"
    )]
    Another(String, String),
    #[error(
        "{0}: the disk's file is no longer there{1}; put it back, or name its new path ('ringdisk replace', or the configuration); \
         a new file would not have the guest's data"
    )]
    Gone(String, String),
    #[error(
        "{0}: its bitmaps can neither be marked as in use nor removed: {1}; if that is about the state directory, make room \
         there, or let this user write there"
    )]
    Bitmaps(String, io::Error),
    #[error("{0}: {RELEASED}")]
    Released(String),
    #[error("{0}: cannot {1}: {cause}", cause = block::explain(.2, ""))]
    Io(String, &'static str, io::Error),
}

impl Node {
    /// Whether it is on this file or device.
    pub fn is_on(&self, there: Identity) -> bool {
        self.file().is_some_and(|file| file.identity() == there)
    }

    /// Whether its image builds on this file, which is not to be a disk as well. The operator allows both to read it by
    /// naming the directories of backing files.
    pub fn builds_on(&self, there: Identity) -> bool {
        !self.is_on(there) && self.context.allow_backing == AllowBacking::Beside
    }

    /// The identity of its file, if it has one that is locked.
    pub fn identity(&self) -> Option<FileIdentity> {
        let file = self.is_acquired().then(|| self.file())??;
        Some(file.identity().into())
    }

    /// A node with another name on the same file.
    pub fn renamed(&self, spec: DiskSpec) -> Self {
        Self {
            spec,
            shared: self.shared.clone(),
            rbd: self.rbd.clone(),
            context: self.context.clone(),
            _own: self._own.clone(),
            choice: self.choice.clone(),
            facts: self.facts,
            size: self.size,
            filename: self.filename.clone(),
            format: self.format,
        }
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// How many images or files it builds on.
    pub fn depth(&self) -> usize {
        self.state().depth
    }

    /// Calls `tell` once if the image turns out to be corrupt.
    pub fn on_damage(&self, tell: impl Fn(&Damage) + Send + Sync + 'static) {
        let mut state = self.state();
        state.on_damage = Some(Arc::new(tell));
        state.watch_damage();
    }

    /// The kind of file that it is on.
    pub fn backing(&self) -> Option<Backing> {
        self.file().map(|file| file.backing())
    }

    /// A disk of this node for the data path. It may be read-only or have larger blocks than the node.
    ///
    /// # Errors
    /// It cannot have such blocks.
    pub fn disk(&self, wanted: &DiskParameters) -> Result<Disk, NodeError> {
        let mut facts = self
            .facts
            .with_blocks(wanted.logical_block, None, self.size)
            .map_err(|e| NodeError::Blocks(self.filename.clone(), e))?;
        facts.read_only |= wanted.read_only;
        let options = Options {
            cache: wanted.cache,
            discard: self.spec.discard,
            detect_zeroes: self.spec.detect_zeroes,
            fixed_buffers: self.spec.fixed_buffers,
            rerror: self.spec.rerror,
            werror: self.spec.werror,
            ..Options::default()
        };
        let (name, serial) = (wanted.name.clone(), &self.spec.serial);
        let size = self.known_size();
        if let Some(rbd) = &self.rbd {
            let image = self.state().image.clone().unwrap_or_else(Image::raw);
            return Ok(Disk::remote(
                name,
                image,
                rbd.clone(),
                facts,
                size,
                serial,
                options,
            ));
        }
        let state = self.state();
        let files = self.descriptors(&state);
        // The real image is known once the node is acquired.
        let image = state.image.clone().unwrap_or_else(Image::raw);
        let disk = Disk::new(name, image, files, facts, size, serial, options);
        if state.image.is_none() {
            disk.release(self.descriptors(&state).pop());
        }
        Ok(disk)
    }

    fn lock_changes(&self) -> MutexGuard<'_, ()> {
        let changes = &self.shared.changes;
        changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, NodeState> {
        let state = &self.shared.state;
        state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file that the operator named.
    fn file(&self) -> Option<Arc<DiskFile>> {
        self.state().file.clone()
    }

    /// Descriptors of its files, shared with the data path.
    fn descriptors(&self, state: &NodeState) -> Vec<(Arc<OwnedFd>, Backing, Aio)> {
        let files = match state.image {
            Some(Image::Chain(_)) => &state.files[..],
            _ => state.file.as_slice(),
        };
        let files = files.iter().map(|file| self.described(file));
        files.collect()
    }

    fn described(&self, file: &DiskFile) -> (Arc<OwnedFd>, Backing, Aio) {
        let method = file.method(self.spec.aio);
        (file.descriptor().clone(), file.backing(), method)
    }

    /// What the data path needs to replace another node by this one.
    ///
    /// # Errors
    /// It has no file, or is released.
    pub fn replacement(&self) -> Result<Replacement, NodeError> {
        let fail = |what, e| NodeError::Io(self.filename.clone(), what, e);
        let size = self.file_size();
        let size = size.map_err(|e| fail("find out its size", e))?;
        let state = self.state();
        let image = match &state.image {
            Some(Image::Null) => {
                let e = io::Error::other("it stores nothing");
                return Err(fail("take the place of a file", e));
            }
            Some(image) => image.clone(),
            None => return Err(NodeError::Released(self.filename.clone())),
        };
        let storage = match &self.rbd {
            Some(rbd) => vec![Storage::Remote(rbd.clone())],
            None => {
                let files = self.descriptors(&state).into_iter();
                files.map(Storage::from).collect()
            }
        };
        Ok(Replacement {
            image,
            storage,
            facts: self.facts,
            size,
        })
    }

    /// Grows a disk to the size of its file, if that is known. The caller notifies the guest.
    pub fn let_grow(disk: &Disk, size: &io::Result<u64>) {
        let (name, old) = (&disk.name, disk.size());
        match *size {
            Ok(size) if size > old => {
                disk.grow(size);
                let (old, size) = (format_size(old), format_size(size));
                info!("disk {name}: grown from {old} to {size}");
            }
            Ok(size) if size < old => warn!(
                "disk {name}: its file has shrunk from {} to {}; requests beyond will fail",
                format_size(old),
                format_size(size)
            ),
            Ok(_) => {}
            Err(ref e) => warn!("disk {name}: cannot find out its size: {e}"),
        }
    }

    /// The file's size now, in whole blocks. Waits for storage.
    ///
    /// # Errors
    /// The query failed.
    pub fn file_size(&self) -> io::Result<u64> {
        let file = {
            let state = self.state();
            match &state.image {
                Some(Image::Chain(chain)) => return Ok(chain.size()),
                None => return Ok(state.size),
                Some(_) => state.file.clone(),
            }
        };
        let sizing = &self.shared.sizing;
        let _sizing = sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let size = match (file, &self.rbd) {
            (Some(file), _) => file.size()?,
            (None, Some(rbd)) => rbd.size()?,
            (None, None) => return Ok(self.size),
        };
        let lowest = self.rbd.as_ref().map_or(size, |rbd| rbd.lowest_size());
        let size = size - size % u64::from(self.facts.logical_block);
        // Before anything is written to what is new.
        let recorded_bitmaps = self.state().recorded_bitmaps.clone();
        recorded_bitmaps.inspect(|bitmaps| bitmaps.resize(size, lowest.min(size)));
        let mut state = self.state();
        state.cuts += u64::from(lowest.min(size) < state.size);
        state.size = size;
        Ok(size)
    }

    /// The file was cut off, and may have grown again. Waits for the state directory.
    pub fn cut_off(&self) {
        let recorded_bitmaps = {
            let mut state = self.state();
            state.cuts += 1;
            state.recorded_bitmaps.clone()
        };
        recorded_bitmaps.inspect(|bitmaps| bitmaps.resize(0, 0));
    }

    /// How often the file was found cut off, which loses data, also if it has grown again. Does not wait.
    pub fn cuts(&self) -> u64 {
        self.state().cuts
    }

    /// Its size when last queried. Does not wait.
    pub fn known_size(&self) -> u64 {
        let state = self.state();
        match &state.image {
            Some(Image::Chain(chain)) => chain.size(),
            _ => state.size,
        }
    }

    /// Bytes that the file occupied when that was last [refreshed](Self::refresh_sizes).
    pub fn allocated(&self) -> Option<u64> {
        self.state().allocated
    }

    /// Refreshes the sizes that queries show. Waits for storage, unless another thread is doing so already.
    pub fn refresh_sizes(&self) {
        let asking = self.shared.refreshing.try_lock();
        if matches!(asking, Err(TryLockError::WouldBlock)) {
            return;
        }
        let _ = self.file_size();
        if let Some(file) = self.file()
            && file.backing() == Backing::File
            && let Ok(stat) = rustix::fs::fstat(&file)
        {
            self.state().allocated = Some(stat.st_blocks as u64 * 512);
        }
    }

    /// Finds out whether its file still has a name. Waits for storage.
    pub fn look_for_name(&self) {
        if let Some(file) = self.file()
            && file.backing() == Backing::File
            && let Ok(stat) = rustix::fs::fstat(&file)
        {
            self.state().is_deleted = stat.st_nlink == 0;
        }
    }

    /// Whether its file had no name when that was last [looked for](Self::look_for_name): it ends with this process.
    pub fn is_deleted(&self) -> bool {
        self.state().is_deleted
    }

    /// Grows the file, if it is a regular one, to `size` bytes. Never shrinks it.
    ///
    /// # Errors
    /// Why it cannot, and what to do.
    pub fn grow_file(&self, size: u64) -> Result<(), String> {
        let block = u64::from(self.facts.logical_block);
        if !size.is_multiple_of(block) {
            return Err(format!("{size} is not a multiple of {block} bytes"));
        }
        if let Some(rbd) = &self.rbd {
            let now = self
                .file_size()
                .map_err(|e| format!("finding its size: {e}"))?;
            return match size.cmp(&now) {
                Ordering::Less => Err(cut_off(now)),
                Ordering::Equal => Ok(()),
                Ordering::Greater => rbd.grow(size).map_err(|e| e.to_string()),
            };
        }
        let Some(file) = self.file() else {
            return Err("it stores nothing; serve another null:SIZE".into());
        };
        // Until it has grown, it must not be released or closed.
        let _changes = self.lock_changes();
        let now = file.size().map_err(|e| format!("finding its size: {e}"))?;
        let image = self.state().image.clone();
        match image {
            Some(Image::Chain(chain)) => {
                let recorded_bitmaps = self.state().recorded_bitmaps.clone();
                (recorded_bitmaps.as_ref()).inspect(|bitmaps| {
                    bitmaps.note_again();
                    bitmaps.reserve(size);
                });
                chain.grow(size).map_err(|e| {
                    (recorded_bitmaps.as_ref()).inspect(|all| all.record_lost(&e.to_string()));
                    e.to_string()
                })?;
                recorded_bitmaps.inspect(|bitmaps| bitmaps.resize(size, size));
                return Ok(());
            }
            None => return Err(RELEASED.into()),
            Some(_) => {}
        }
        match size.cmp(&now) {
            Ordering::Less => Err(cut_off(now)),
            Ordering::Equal => Ok(()),
            Ordering::Greater if file.backing() == Backing::BlockDevice => Err(format!(
                "the device has only {}; make it longer first (lvextend -L {} {})",
                format_size(now),
                format_size(size),
                self.filename
            )),
            Ordering::Greater if self.facts.read_only => Err("it is read-only".into()),
            // Durable before the guest can rely on it.
            Ordering::Greater => rustix::fs::ftruncate(&file, size)
                .and_then(|()| rustix::fs::fdatasync(&file))
                .map_err(|e| format!("making its file longer: {}", block::explain(&e.into(), ""))),
        }
    }

    /// Copies of the descriptors of its files; none if the disk is released.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn copies(&self) -> io::Result<Vec<OwnedFd>> {
        let state = self.state();
        let files = match state.image {
            None => &[],
            Some(Image::Chain(_)) => &state.files[..],
            Some(_) => state.file.as_slice(),
        };
        let copies = files.iter().map(|file| file.as_fd().try_clone_to_owned());
        copies.collect()
    }

    /// The image in a Ceph cluster that it is on.
    pub fn rbd(&self) -> Option<&Arc<RbdImage>> {
        self.rbd.as_ref()
    }
}

fn cut_off(now: u64) -> String {
    format!(
        "it has {} and cannot become shorter, which would cut off what the guest has stored",
        format_size(now)
    )
}

impl NodeState {
    /// Registers `on_damage` with an image that has just been opened.
    fn watch_damage(&self) {
        let image = self.image.as_ref().and_then(|i| i.chain()?.image());
        if let (Some(image), Some(tell)) = (image, &self.on_damage) {
            let tell = tell.clone();
            image.on_damage(move |damage| tell(damage));
        }
    }
}

impl NodeError {
    /// The file that could not be locked, if that is the error.
    pub fn locked(&self) -> Option<&str> {
        let open = match self {
            Self::Open(error) => error,
            Self::Chain(error) => error.file_error()?.get_ref()?.downcast_ref::<OpenError>()?,
            _ => return None,
        };
        match open {
            OpenError::Locked(file) | OpenError::InUse(file) => Some(file),
            _ => None,
        }
    }
}

/// How a node appears to a guest.
#[derive(Clone, Debug)]
pub struct DiskParameters {
    pub name: String,
    pub read_only: bool,
    pub cache: CacheMode,
    /// In bytes; the node's if absent.
    pub logical_block: Option<u32>,
}

/// The configured format of a disk's file, or that of its name.
///
/// # Errors
/// Neither is known.
pub fn format_of(spec: &DiskSpec, path: &Path, backing: Backing) -> Result<Format, NodeError> {
    let named = || {
        let named = Format::of(path, backing);
        named.map_err(|e| NodeError::Format(path.display().to_string(), e))
    };
    spec.format.map_or_else(named, Ok)
}
