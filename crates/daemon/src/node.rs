//! An opened disk: its file, and what the data path needs of it. QEMU's word for it is a block node.

use std::cmp::Ordering;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use block::{Backing, BlockSizeError, DiskFacts, format_size};
use datapath::{Disk, Options};
use engine::{ChoiceError, DiskFile, OpenError, Support, choose};
use image::{Format, Image, UnknownFormat};
use thiserror::Error;
use tracing::{info, warn};

use crate::spec::{DiskSpec, FileSpec};

/// An opened disk. Its file stays locked as long as this lives.
pub struct Node {
    pub spec: DiskSpec,
    pub disk: Arc<Disk>,
    file: Option<DiskFile>,
    /// What to call the file when speaking of it.
    pub filename: String,
    pub format: Format,
}

#[derive(Debug, Error)]
pub enum NodeError {
    #[error("{0}: {1}")]
    Format(String, UnknownFormat),
    #[error("{0}: {1}")]
    Blocks(String, BlockSizeError),
    #[error("{0}: {1}")]
    Aio(String, ChoiceError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("{0}: cannot {1}: {2}")]
    Io(String, &'static str, io::Error),
}

impl Node {
    /// Opens and locks what a disk is on.
    ///
    /// # Errors
    /// It cannot be served as asked; the error says why and what to do.
    pub fn open(spec: DiskSpec) -> Result<Self, NodeError> {
        let (image, file, facts, size, filename) = match &spec.file {
            FileSpec::Null(size) => {
                warn!(
                    "disk {}: null:{} STORES NOTHING: writes are thrown away and reads leave \
                     memory as it is; it is there to measure with",
                    spec.name,
                    format_size(*size)
                );
                let filename = format!("null:{}", format_size(*size));
                let facts = null_facts(spec.read_only);
                (Image::Null, None, facts, *size, filename)
            }
            FileSpec::Path(path) => {
                let filename = path.display().to_string();
                let file = DiskFile::open(path, spec.cache, spec.read_only)?;
                let format = match spec.format {
                    Some(format) => format,
                    None => Format::of(path, file.backing())
                        .map_err(|e| NodeError::Format(filename.clone(), e))?,
                };
                let image = match format {
                    Format::Raw => Image::Raw,
                };
                let size = file
                    .size()
                    .map_err(|e| NodeError::Io(filename.clone(), "find out its size", e))?;
                let facts = file.facts();
                (image, Some(file), facts, size, filename)
            }
        };
        let facts = facts
            .with_blocks(spec.logical_block, spec.physical_block, size)
            .map_err(|e| NodeError::Blocks(filename.clone(), e))?;
        if file.is_some() && !spec.cache.flushes() {
            warn!(
                "disk {}: cache=unsafe IGNORES FLUSHES: a crash or power cut of this host loses data \
                 that the guest made durable, and may ruin its file systems; for disks that can be \
                 thrown away",
                spec.name
            );
        }
        let descriptor = match &file {
            Some(file) => {
                let choice = choose(file.as_fd(), file.backing(), spec.aio, &Support::here())
                    .map_err(|e| NodeError::Aio(filename.clone(), e))?;
                info!("disk {}: aio={choice}", spec.name);
                Some((duplicate(file, &filename)?, file.backing(), spec.aio))
            }
            None => None,
        };
        let disk = Disk::new(
            spec.name.clone(),
            image,
            descriptor,
            facts,
            size,
            &spec.serial,
            Options {
                cache: spec.cache,
                discard: spec.discard,
                detect_zeroes: spec.detect_zeroes,
                fixed_buffers: spec.fixed_buffers,
            },
        );
        Ok(Self {
            disk: Arc::new(disk),
            file,
            filename,
            format: Format::Raw,
            spec,
        })
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Looks whether the file has become longer, and if so, lets the disk grow. The guest is to be told by
    /// whoever knows it.
    pub fn look_for_growth(&self) {
        let (Some(file), name) = (&self.file, self.name()) else {
            return;
        };
        let block = u64::from(self.disk.facts.logical_block);
        let old = self.disk.size();
        match file.size().map(|size| size - size % block) {
            Ok(size) if size > old => {
                self.disk.grow(size);
                let (old, size) = (format_size(old), format_size(size));
                info!("disk {name}: grown from {old} to {size}");
            }
            Ok(size) if size < old => warn!(
                "disk {name}: its file has shrunk from {} to {}; requests beyond will fail",
                format_size(old),
                format_size(size)
            ),
            Ok(_) => {}
            Err(e) => warn!("disk {name}: cannot find out its size: {e}"),
        }
    }

    /// Makes the file `size` bytes long, if it is a regular one. Never shorter.
    ///
    /// # Errors
    /// Why not, and what to do.
    pub fn grow_file(&self, size: u64) -> Result<(), String> {
        let block = u64::from(self.disk.facts.logical_block);
        if !size.is_multiple_of(block) {
            return Err(format!("{size} is not a multiple of {block} bytes"));
        }
        let Some(file) = &self.file else {
            self.disk.grow(size);
            return Ok(());
        };
        let now = file.size().map_err(|e| format!("finding its size: {e}"))?;
        match size.cmp(&now) {
            Ordering::Less if size < self.disk.size() => Err(format!(
                "it has {} and cannot become shorter, which would cut off what the guest has stored",
                format_size(self.disk.size())
            )),
            Ordering::Less | Ordering::Equal => Ok(()),
            Ordering::Greater if file.backing() == Backing::BlockDevice => Err(format!(
                "the device has only {}; make it longer first (lvextend -L {} {})",
                format_size(now),
                format_size(size),
                self.filename
            )),
            Ordering::Greater if self.spec.read_only => Err("it is read-only".into()),
            Ordering::Greater => rustix::fs::ftruncate(file, size)
                .map_err(|e| format!("making its file longer: {e}")),
        }
    }

    /// Makes what guests wrote durable, at the end: their requests are done by then, but what they did not
    /// flush is only in the write cache.
    ///
    /// # Errors
    /// It could not be made durable.
    pub fn sync(&self) -> io::Result<()> {
        // Not on the file itself: what the page cache lost is known to the disk.
        self.disk.sync()
    }
}

fn duplicate(file: &DiskFile, filename: &str) -> Result<OwnedFd, NodeError> {
    file.as_fd()
        .try_clone_to_owned()
        .map_err(|e| NodeError::Io(filename.into(), "duplicate its descriptor", e))
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
