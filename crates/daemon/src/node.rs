//! An opened disk: its file, and what the data path needs of it. QEMU's word for it is a block node.

pub mod context;
pub mod journal;
pub mod progress;
pub mod storage;

mod chain;
mod close;
mod open;
mod paths;
mod released;
mod snapshot;

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
use crate::node::context::OpenContext;
use crate::node::journal::JournalError;

pub use paths::FileUse;

/// An opened disk. Its file stays locked as long as this lives, but while it is [away](Node::release).
pub struct Node {
    pub spec: DiskSpec,
    shared: Arc<SharedNode>,
    /// The image in a Ceph cluster that the operator named.
    rbd: Option<Arc<RbdImage>>,
    context: OpenContext,
    /// How bytes are moved, and why so.
    pub choice: Option<Choice>,
    facts: DiskFacts,
    /// Bytes, when it was opened.
    size: u64,
    /// What to call the file when speaking of it.
    pub filename: String,
    pub format: Format,
}

/// What nodes on one file have in common. Who takes both locks takes them in this order.
struct SharedNode {
    /// Held by whoever lengthens, closes or opens files, until all of that is done: one after the other, so that nothing
    /// is written to a file whose lock has been given up. That waits for storage: it is not taken by anybody who holds
    /// what all disks need, which is above all the server's state.
    changes: Mutex<()>,
    /// Held by whoever asks storage what is to be shown of the files.
    refreshing: Mutex<()>,
    /// Held to look at it or to exchange it, and never while storage is asked for anything.
    state: Mutex<NodeState>,
}

/// What is read from its file, and may have to be read anew.
struct NodeState {
    /// Not while the disk is away.
    image: Option<Image>,
    /// The file that the operator named.
    file: Option<Arc<DiskFile>>,
    /// All files of an image that goes by tables, by their numbers in it.
    files: Vec<Arc<DiskFile>>,
    /// Bytes, as last known.
    size: u64,
    /// Bytes that the file occupies, as last known.
    allocated: Option<u64>,
    depth: usize,
    /// Of an image that is written.
    journal: Option<PathBuf>,
    on_damage: Option<OnDamage>,
}

type OnDamage = Arc<dyn Fn(&Damage) + Send + Sync>;

/// Why something cannot be done with a disk that is away.
pub const RELEASED: &str = "no VM runs on it here, so that it may be in use on another host (lock=running, or its VM \
    was moved there)";

#[derive(Debug, Error)]
pub enum NodeError {
    #[error("{0}: {1}")]
    Format(String, UnknownFormat),
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
        "{0}: {1}, and so does not hold what the disk does; leave it, and make another one, under a name that nothing has, \
         with 'qemu-img create -f qcow2 -b {2} -F {3} NAME'"
    )]
    Above(String, &'static str, String, Format),
    #[error(
        "{0}: is the image that the disk is on, but from there it would not find the files that it builds on{1}; leave it \
         in its directory as long as the disk is served"
    )]
    Elsewhere(String, String),
    #[error("{1} (the journal is {path})", path = .0.display())]
    Replay(PathBuf, ChainError),
    #[error(
        "{0}: is another file by now than the one that the disk is on{1}; put that back, or say where it is ('ringdisk \
         replace', or the configuration)"
    )]
    Another(String, String),
    #[error(
        "{0}: nothing is there any more, where the disk's file was{1}; put it back, or say where it is ('ringdisk replace', or \
             the configuration); what the guest has is not in a new file"
    )]
    Gone(String, String),
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

    /// Which file it is on, if it is on one and that is here.
    pub fn identity(&self) -> Option<FileIdentity> {
        let file = self.is_acquired().then(|| self.file())??;
        Some(file.identity().into())
    }

    /// The same for a disk of another name, for a node that lies on this one.
    pub fn renamed(&self, spec: DiskSpec) -> Self {
        Self {
            spec,
            shared: self.shared.clone(),
            rbd: self.rbd.clone(),
            context: self.context.clone(),
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

    /// Has `tell` called once if the image turns out to contradict itself.
    pub fn on_damage(&self, tell: impl Fn(&Damage) + Send + Sync + 'static) {
        let mut state = self.state();
        state.on_damage = Some(Arc::new(tell));
        state.watch_damage();
    }

    /// What holds it.
    pub fn backing(&self) -> Option<Backing> {
        self.file().map(|file| file.backing())
    }

    /// A disk of this node for the data path, which may be less than the node: read-only, or with larger
    /// blocks.
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
            return Ok(Disk::remote(
                name,
                rbd.clone(),
                facts,
                size,
                serial,
                options,
            ));
        }
        let state = self.state();
        let files = self.descriptors(&state);
        // Which it is, turns out when it is taken.
        let image = state.image.clone().unwrap_or(Image::Raw);
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

    /// Descriptors of what it is in, for the data path, which shares them.
    fn descriptors(&self, state: &NodeState) -> Vec<(Arc<OwnedFd>, Backing, Aio)> {
        let files = match state.image {
            Some(Image::Chain(_)) => &state.files[..],
            _ => state.file.as_slice(),
        };
        let files = files.iter().map(|file| self.described(file));
        files.collect()
    }

    fn described(&self, file: &DiskFile) -> (Arc<OwnedFd>, Backing, Aio) {
        (file.descriptor().clone(), file.backing(), self.spec.aio)
    }

    /// What the data path needs to put this node in the place of another.
    ///
    /// # Errors
    /// It is in no file, or away.
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

    /// Lets a disk grow whose file has this size now, as far as that could be found out. The guest is to be told by
    /// whoever knows it.
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
    /// The kernel cannot say.
    pub fn file_size(&self) -> io::Result<u64> {
        let file = {
            let state = self.state();
            match &state.image {
                Some(Image::Chain(chain)) => return Ok(chain.size()),
                None => return Ok(state.size),
                Some(_) => state.file.clone(),
            }
        };
        let size = match (file, &self.rbd) {
            (Some(file), _) => file.size()?,
            (None, Some(rbd)) => rbd.size()?,
            (None, None) => return Ok(self.size),
        };
        let size = size - size % u64::from(self.facts.logical_block);
        self.state().size = size;
        Ok(size)
    }

    /// Its size as last known. Asks nobody.
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

    /// Finds out anew what is shown of its file. Waits for storage, unless somebody else does so already.
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

    /// Makes the file `size` bytes long, if it is a regular one. Never shorter than the disk on it is.
    ///
    /// # Errors
    /// Why not, and what to do.
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
        // Until it is as long: it may be about to be left to another host, or to be closed.
        let _changes = self.lock_changes();
        let now = file.size().map_err(|e| format!("finding its size: {e}"))?;
        let image = self.state().image.clone();
        match image {
            Some(Image::Chain(chain)) => {
                return chain.grow(size).map_err(|e| e.to_string());
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
            Ordering::Greater => rustix::fs::ftruncate(&file, size)
                .map_err(|e| format!("making its file longer: {}", block::explain(&e.into(), ""))),
        }
    }

    /// Copies of the descriptors of its files, unless the disk is away.
    ///
    /// # Errors
    /// There are no more to be had.
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
    /// Tells of damage, of an image that has just been opened.
    fn watch_damage(&self) {
        let image = self.image.as_ref().and_then(|i| i.chain()?.image());
        if let (Some(image), Some(tell)) = (image, &self.on_damage) {
            let tell = tell.clone();
            image.on_damage(move |damage| tell(damage));
        }
    }
}

impl NodeError {
    /// The file that could not be locked, if that is what it is about.
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

/// How a node is shown to a guest.
#[derive(Clone, Debug)]
pub struct DiskParameters {
    pub name: String,
    pub read_only: bool,
    pub cache: CacheMode,
    /// In bytes; the node's if absent.
    pub logical_block: Option<u32>,
}

/// The format that is said of a disk's file, or that its name says.
///
/// # Errors
/// Neither does.
pub fn format_of(spec: &DiskSpec, path: &Path, backing: Backing) -> Result<Format, NodeError> {
    let named = || {
        let named = Format::of(path, backing);
        named.map_err(|e| NodeError::Format(path.display().to_string(), e))
    };
    spec.format.map_or_else(named, Ok)
}
