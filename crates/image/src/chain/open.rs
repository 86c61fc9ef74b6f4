use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use thiserror::Error;

use super::{Chain, FileIndex, Layer, LayerImage};
use crate::allowed::{AllowedDirectories, AllowedError, Identity, OpenedReference};
use crate::qcow2::header::Header;
use crate::qcow2::{JournalFile, OpenOptions, Pins, Progress, Qcow2, Qcow2Error, read_header};
use crate::storage::{PlainFile, Storage};

/// The most layers, as in QEMU's tests. A deeper chain is a mistake.
const DEPTH_MAX: usize = 200;

/// The most memory for the L1 tables of all layers, in bytes: eight tables of the largest size, or 200 tables of a
/// disk of 80 TiB with 64 KiB clusters.
const L1_BYTES_MAX: u64 = 256 << 20;

/// The most bytes of L2 tables of all backing files kept in memory, and the limit that each file has at least.
const BACKING_CACHE_BYTES: u64 = 1 << 30;
const BACKING_CACHE_BYTES_MIN: u64 = 1 << 20;

/// The format of a layer, with QEMU's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerFormat {
    /// The file is the disk.
    Raw,
    /// qcow2, of version 2 or 3.
    Qcow2,
}

impl FromStr for LayerFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            // QEMU's names for raw files and devices in images made by older versions.
            "raw" | "file" | "host_device" => Ok(Self::Raw),
            "qcow2" => Ok(Self::Qcow2),
            _ => Err(format!(
                "'{text}' is not a supported format; use raw or qcow2"
            )),
        }
    }
}

/// The role of a file in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRole {
    /// A backing file, which is only read.
    Backing,
    /// The data file of a backing file, which is only read.
    Data,
}

/// The data file of the first image.
pub struct DataFile {
    pub storage: Arc<dyn Storage>,
    /// Its device and inode, or `u64::MAX` and the number of a block device.
    pub identity: (u64, u64),
}

/// Makes [`Storage`] of the files that [`AllowedDirectories`] contain, with locks and the cache mode of the disk.
pub trait OpenFiles {
    /// The storage for a file that is open as its role needs it. The descriptor is non-blocking. `path` is for
    /// messages.
    ///
    /// # Errors
    /// The file can't be used.
    fn open(&mut self, file: OwnedFd, path: &Path, role: FileRole) -> io::Result<Arc<dyn Storage>>;

    /// Opens the data file of the first image at `image`, for writing if `write` says so. The image calls it `named`, but
    /// what is written must be named by the operator: the creator of an image could name anybody's file.
    ///
    /// # Errors
    /// The operator has not named it, or it can't be used.
    fn data_file(&mut self, image: &Path, named: Option<&str>, write: bool)
    -> io::Result<DataFile>;
}

/// The file that the operator named.
pub struct TopFile<'a> {
    /// The open file.
    pub storage: Arc<dyn Storage>,
    /// The names in the file are relative to the directory of this path.
    pub path: &'a Path,
    /// Given by the operator, never guessed.
    pub format: LayerFormat,
}

/// Options for opening a chain.
pub struct ChainOptions<'a> {
    /// Nothing is written.
    pub read_only: bool,
    /// As in [`OpenOptions`].
    pub allow_corrupt: bool,
    /// Bytes of L2 tables of the first image kept in memory, as in [`OpenOptions`].
    pub l2_cache_bytes: Option<u64>,
    /// As in [`OpenOptions`].
    pub punch: bool,
    /// The journal of the first image, as in [`OpenOptions`].
    pub journal: Option<JournalFile>,
    /// As in [`OpenOptions`].
    pub flush_changes: bool,
    /// As in [`OpenOptions`].
    pub progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

/// Why a chain was not opened, with the file that is the reason.
#[derive(Debug, Error)]
#[error("{}: {source}", path.display())]
pub struct ChainError {
    path: PathBuf,
    source: LayerError,
}

impl ChainError {
    /// Whether the error is about the journal of the first image.
    pub fn is_journal_error(&self) -> bool {
        let LayerError::Image(error) = &self.source else {
            return false;
        };
        matches!(error, Qcow2Error::Journal(_) | Qcow2Error::Replay(_))
    }

    /// The error of [`OpenFiles`], if a file that an image names could not be used.
    pub fn file_error(&self) -> Option<&io::Error> {
        match &self.source {
            LayerError::Io(error) => Some(error),
            _ => None,
        }
    }
}

#[derive(Debug, Error)]
enum LayerError {
    #[error(transparent)]
    Image(#[from] Qcow2Error),
    #[error(transparent)]
    Reference(#[from] AllowedError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(
        "it does not name the format of its backing file '{0}', which cannot be guessed safely; set it with \
        'qemu-img rebase -u -F FORMAT -b {0}', where FORMAT is raw or qcow2"
    )]
    FormatMissing(String),
    #[error("its backing file '{0}': {1}; 'qemu-img convert' changes the format")]
    Format(String, String),
    #[error(
        "it is directly or indirectly its own backing file; 'qemu-img rebase' changes the backing file"
    )]
    Loop,
    #[error(
        "it is the {DEPTH_MAX}th backing file in a row and has another; 'qemu-img rebase' of the first image \
        makes the chain shorter"
    )]
    Depth,
    #[error(
        "its data is in an external file that it does not name; set the name with 'qemu-img amend -o \
        data_file=NAME'"
    )]
    DataFileUnnamed,
    #[error(
        "its data is in an external file ('{0}'), which is opened only if the operator names it: add data-file=PATH"
    )]
    DataFileUnknown(String),
    #[error("the tables of the chain need more than {} MiB", L1_BYTES_MAX >> 20)]
    TooLarge,
}

impl Chain {
    /// Opens a disk: the file that the operator named, and all files that its images name, if they are in the allowed directories.
    /// Memory and time are bounded whatever the files contain. An exception is an image that must be repaired;
    /// `progress` can stop the repair.
    ///
    /// # Errors
    /// One of the files can't be used; the message says which, why, and what to do.
    pub fn open<'a>(
        top: TopFile<'_>,
        allowed: &'a AllowedDirectories,
        files: &'a mut dyn OpenFiles,
        options: ChainOptions<'a>,
    ) -> Result<Self, ChainError> {
        let directory = std::path::absolute(top.path);
        let path = directory.unwrap_or_else(|_| top.path.to_owned());
        let seen = rustix::fs::stat(&path).ok();
        let seen = seen.map(|stat| (stat.st_dev, stat.st_ino));
        let mut opening = Opening {
            references: References {
                allowed,
                seen: seen.into_iter().collect(),
            },
            files,
            options,
            layers: Vec::new(),
            opened: Vec::new(),
            l1_bytes: 0,
            cache_bytes: BACKING_CACHE_BYTES,
        };
        let mut next = Some((top.storage, path, top.format));
        while let Some((storage, path, format)) = next {
            let layer = opening.layer(storage, &path, format);
            next = layer.map_err(|source| ChainError { path, source })?;
        }
        let Opening { layers, opened, .. } = opening;
        let chain = Self {
            layers,
            files: opened,
            pins: Pins::new(),
        };
        for pair in chain.layers.windows(2) {
            if let LayerImage::Qcow2(image) = &pair[0].image {
                image.set_backing_size(pair[1].size());
            }
        }
        Ok(chain)
    }

    /// The files that an image refers to, found by name, relative to the path of the image. Returns the device and
    /// inode of each, in the order in which an opened chain has the files, without the first. `data_file` is the data file
    /// of the first image that the operator has named. Reads only headers, so the image may be in use.
    ///
    /// # Errors
    /// As of [`open`](Self::open), as far as names and formats are concerned.
    pub fn referenced_files(
        top: TopFile<'_>,
        data_file: Option<(u64, u64)>,
        allowed: &AllowedDirectories,
    ) -> Result<Vec<(u64, u64)>, ChainError> {
        let mut references = References {
            allowed,
            seen: HashSet::new(),
        };
        let mut files = Vec::new();
        let mut depth = 0;
        let mut next = Some((top.storage, top.path.to_owned(), top.format));
        while let Some((storage, path, format)) = next.take() {
            if format == LayerFormat::Raw {
                break;
            }
            depth += 1;
            let mut layer = || -> Result<NextLayer, LayerError> {
                let (header, _) = read_header(&*storage)?;
                if depth > 1 {
                    let data = references.data_file(&path, &header)?;
                    files.extend(data.map(|data| data.identity));
                } else if header.external_data() {
                    files.push(data_file.ok_or_else(|| {
                        LayerError::DataFileUnknown(header.data_file.clone().unwrap_or_default())
                    })?);
                }
                let Some((backing, format)) = references.backing(&path, &header, depth)? else {
                    return Ok(None);
                };
                files.push(backing.identity);
                let storage = Arc::new(PlainFile(File::from(backing.fd)));
                Ok(Some((storage, backing.path, format)))
            };
            next = layer().map_err(|source| ChainError {
                path: path.clone(),
                source,
            })?;
        }
        Ok(files)
    }
}

/// The files that images name. A chain contains each file only once.
struct References<'a> {
    allowed: &'a AllowedDirectories,
    seen: HashSet<Identity>,
}

impl References<'_> {
    fn open_reference(
        &mut self,
        path: &Path,
        name: &str,
        write: bool,
    ) -> Result<OpenedReference, LayerError> {
        let opened = self
            .allowed
            .open_reference(path.parent().unwrap_or(path), name, write)?;
        if !self.seen.insert(opened.identity) {
            return Err(LayerError::Loop);
        }
        Ok(opened)
    }

    /// The backing file of the layer with this number, counted from 1.
    fn backing(
        &mut self,
        path: &Path,
        header: &Header,
        depth: usize,
    ) -> Result<Option<(OpenedReference, LayerFormat)>, LayerError> {
        let Some((name, format)) = &header.backing else {
            return Ok(None);
        };
        if depth >= DEPTH_MAX {
            return Err(LayerError::Depth);
        }
        let Some(format) = format else {
            return Err(LayerError::FormatMissing(name.clone()));
        };
        let format = format
            .parse()
            .map_err(|why| LayerError::Format(name.clone(), why))?;
        Ok(Some((self.open_reference(path, name, false)?, format)))
    }

    /// The data file of a backing file: it is read like a backing file, of which the image could make as much.
    fn data_file(
        &mut self,
        path: &Path,
        header: &Header,
    ) -> Result<Option<OpenedReference>, LayerError> {
        if !header.external_data() {
            return Ok(None);
        }
        let Some(name) = &header.data_file else {
            return Err(LayerError::DataFileUnnamed);
        };
        self.open_reference(path, name, false).map(Some)
    }
}

struct Opening<'a> {
    references: References<'a>,
    files: &'a mut dyn OpenFiles,
    options: ChainOptions<'a>,
    layers: Vec<Layer>,
    opened: Vec<Arc<dyn Storage>>,
    l1_bytes: u64,
    cache_bytes: u64,
}

type NextLayer = Option<(Arc<dyn Storage>, PathBuf, LayerFormat)>;

impl Opening<'_> {
    /// Opens one layer, and the file of the next one.
    fn layer(
        &mut self,
        storage: Arc<dyn Storage>,
        path: &Path,
        format: LayerFormat,
    ) -> Result<NextLayer, LayerError> {
        if format == LayerFormat::Raw {
            let size = AtomicU64::new(storage.size()?);
            let file = self.add(storage);
            let image = LayerImage::Raw(size);
            self.layers.push(Layer { image, file });
            return Ok(None);
        }
        let (header, first) = read_header(&*storage)?;
        self.l1_bytes += u64::from(header.l1_entries) * 8;
        if self.l1_bytes > L1_BYTES_MAX {
            return Err(LayerError::TooLarge);
        }
        // A layer is not opened for writing before the files that it needs are known to exist.
        let next = self.backing(path, &header)?;
        let is_top = self.layers.is_empty();
        let read_only = self.options.read_only || !is_top;
        let data = self.data_file(path, &header, !read_only)?;
        let mut file = self.add(storage.clone());
        if let Some(data) = &data {
            file = self.add(data.clone());
        }
        let l2_cache_bytes = if is_top {
            self.options.l2_cache_bytes
        } else {
            Some(self.cache_bytes.max(BACKING_CACHE_BYTES_MIN))
        };
        let options = OpenOptions {
            read_only,
            allow_corrupt: self.options.allow_corrupt,
            l2_cache_bytes,
            punch: self.options.punch,
            journal: self.options.journal.take().filter(|_| is_top),
            flush_changes: self.options.flush_changes,
            progress: self.options.progress,
        };
        let image = Qcow2::open(storage, data, (header, first), options)?;
        if !is_top {
            let used = image.cache_bytes();
            self.cache_bytes = self.cache_bytes.saturating_sub(used);
        }
        let image = LayerImage::Qcow2(Box::new(image));
        self.layers.push(Layer { image, file });
        Ok(next)
    }

    fn add(&mut self, storage: Arc<dyn Storage>) -> FileIndex {
        // A layer has at most two files.
        let index = FileIndex(self.opened.len() as u16);
        self.opened.push(storage);
        index
    }

    fn backing(&mut self, path: &Path, header: &Header) -> Result<NextLayer, LayerError> {
        let depth = self.layers.len() + 1;
        let Some((opened, format)) = self.references.backing(path, header, depth)? else {
            return Ok(None);
        };
        let storage = self
            .files
            .open(opened.fd, &opened.path, FileRole::Backing)?;
        Ok(Some((storage, opened.path, format)))
    }

    fn data_file(
        &mut self,
        path: &Path,
        header: &Header,
        write: bool,
    ) -> Result<Option<Arc<dyn Storage>>, LayerError> {
        if self.layers.is_empty() && header.external_data() {
            let data = self
                .files
                .data_file(path, header.data_file.as_deref(), write)?;
            if !self.references.seen.insert(data.identity) {
                return Err(LayerError::Loop);
            }
            return Ok(Some(data.storage));
        }
        let Some(opened) = self.references.data_file(path, header)? else {
            return Ok(None);
        };
        Ok(Some(self.files.open(
            opened.fd,
            &opened.path,
            FileRole::Data,
        )?))
    }
}
