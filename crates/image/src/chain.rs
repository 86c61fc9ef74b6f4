//! A disk as a chain: images, their backing files and their data files.

mod access;
mod allocation;
mod open;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use block::{FileOffset, GuestOffset};

pub use allocation::{Allocated, AllocatedIn};
pub use open::{ChainError, ChainOptions, DataFile, FileRole, LayerFormat, OpenFiles, TopFile};

use crate::qcow2::{
    Allocation, Compression, Damage, ImageError, Load, Mapping, Pin, Pins, Prepared, Qcow2,
    Reclaimed, WriteMapping, ZeroMode, ZeroStep,
};
use crate::storage::Storage;

/// A file of a chain, by its index in [`Chain::files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIndex(pub u16);

/// A disk. The guest writes to the first layer. Where a layer has no data, the next one is visible.
///
/// Every request takes a [`Pin`] from [`pins`](Self::pins), directly or through its thread's
/// [`ThreadPins`](crate::ThreadPins). It looks up its range piece by piece, moves the bytes, and returns the pin:
///
/// - A read calls [`map`](Self::map), and does what the [`ReadLocation`] says.
/// - A write calls [`map_write`](Self::map_write). If clusters must be allocated, a thread that may block calls
///   [`prepare_write`](Self::prepare_write), does the fills, writes the guest's bytes, and calls
///   [`commit`](Self::commit), before the write completes.
/// - Write-zeroes and discards use [`zero_step`](Self::zero_step).
/// - A flush calls [`flush`](Self::flush) if [`needs_flush`](Self::needs_flush) is true when the guest's request
///   arrives. Otherwise an fdatasync of [`written_file`](Self::written_file) is enough.
///
/// Requests for overlapping ranges may be in progress at once. Each byte then has the value that one of them wrote.
pub struct Chain {
    layers: Vec<Layer>,
    files: Vec<Arc<dyn Storage>>,
    /// Used if the first layer has no pins of its own.
    pins: Pins,
}

struct Layer {
    image: LayerImage,
    /// The file that contains its guest data.
    file: FileIndex,
}

enum LayerImage {
    /// The size in bytes.
    Raw(AtomicU64),
    Qcow2(Box<Qcow2>),
}

/// Where to read a piece of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadLocation {
    /// In a file, contiguous.
    Data {
        file: FileIndex,
        at: FileOffset,
        len: u64,
    },
    /// In no file: it reads as zeroes.
    Zero { len: u64 },
    /// In a compressed cluster.
    Compressed(Compressed),
    /// Unknown until a thread that may block has called [`Chain::load`]. Then look the range up again.
    Load(MissingMetadata),
    /// The table entry is invalid: reading it is an error.
    Damaged { len: u64 },
}

/// Where to write a piece of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteLocation {
    /// To a file, contiguous.
    InPlace {
        file: FileIndex,
        at: FileOffset,
        len: u64,
    },
    /// To clusters that [`Chain::prepare_write`] allocates for it.
    Allocate { len: u64 },
    /// As with [`ReadLocation::Load`].
    Load(MissingMetadata),
    /// The table entry is invalid: writing it is an error.
    Damaged { len: u64 },
}

/// A piece of a compressed cluster. To read it, read `bytes` from the file at `at` (fewer if the file ends before),
/// have [`inflate`](Compression::inflate) fill a buffer of `cluster_bytes`, and take `len` bytes of the buffer from
/// `skip` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    pub file: FileIndex,
    /// The offset in the file, not aligned to anything.
    pub at: FileOffset,
    /// The compressed length in bytes: at most two clusters.
    pub bytes: u64,
    /// How it is compressed.
    pub compression: Compression,
    /// The decompressed length in bytes.
    pub cluster_bytes: u64,
    /// Bytes in the decompressed cluster before the piece.
    pub skip: u64,
    /// The length of the piece in bytes.
    pub len: u64,
}

/// Metadata that is not in memory; [`Chain::load`] loads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingMetadata {
    layer: u16,
    what: Load,
}

impl Chain {
    /// All files, by [`FileIndex`]. An I/O engine needs them to move bytes.
    pub fn files(&self) -> &[Arc<dyn Storage>] {
        &self.files
    }

    /// The files of images that [say that they have a journal](Qcow2::has_unreplayed_journal) which no process was to
    /// replay.
    pub fn unreplayed_journals(&self) -> Vec<FileIndex> {
        let waiting = self.layers.iter().filter_map(|layer| match &layer.image {
            // If there is a data file, `layer.file` is that; the image is the file before it.
            LayerImage::Qcow2(image) if image.has_unreplayed_journal() => {
                Some(FileIndex(layer.file.0 - u16::from(image.has_data_file())))
            }
            _ => None,
        });
        waiting.collect()
    }

    /// The file that contains what the guest writes.
    pub fn written_file(&self) -> FileIndex {
        self.layers[0].file
    }

    /// Whether this file is a raw layer: the layer's content byte for byte.
    pub fn is_raw(&self, file: FileIndex) -> bool {
        let raw = |layer: &Layer| layer.file == file && matches!(layer.image, LayerImage::Raw(_));
        self.layers.iter().any(raw)
    }

    /// Whether nothing has been written to the images above the layer of this file. If that layer has two files,
    /// this must be the first.
    pub fn is_unwritten_above(&self, file: FileIndex) -> bool {
        // Files are numbered from the top layer.
        let mut above = self.layers.iter().take_while(|layer| layer.file.0 < file.0);
        above.all(|layer| matches!(&layer.image, LayerImage::Qcow2(image) if image.is_unwritten()))
    }

    /// The size of the disk in bytes.
    #[inline]
    pub fn size(&self) -> u64 {
        self.layers[0].size()
    }

    /// The number of layers.
    pub fn depth(&self) -> usize {
        self.layers.len()
    }

    fn top(&self) -> Option<&Qcow2> {
        match &self.layers[0].image {
            LayerImage::Qcow2(image) => Some(image),
            LayerImage::Raw(_) => None,
        }
    }

    /// The pins that keep looked-up clusters from being reused.
    #[inline]
    pub fn pins(&self) -> &Pins {
        self.top().map_or(&self.pins, Qcow2::pins)
    }

    /// Where the range that starts at `at` is: the longest piece that is in one place. Uses memory only, without
    /// locks or system calls. Bytes after the end of the disk read as zeroes.
    #[inline]
    pub fn map(&self, pin: &Pin, at: GuestOffset, len: u64) -> ReadLocation {
        let mut len = len;
        for (number, layer) in self.layers.iter().enumerate() {
            let Some(inside) = layer.size().checked_sub(at.0).filter(|&inside| inside > 0) else {
                return ReadLocation::Zero { len };
            };
            len = len.min(inside);
            let file = layer.file;
            let image = match &layer.image {
                LayerImage::Raw(_) => {
                    let at = FileOffset(at.0);
                    return ReadLocation::Data { file, at, len };
                }
                LayerImage::Qcow2(image) => image,
            };
            match image.map(pin, at, len) {
                Mapping::Hole { len: hole } => len = hole,
                Mapping::Data { at, len } => {
                    let at = at.in_file();
                    return ReadLocation::Data { file, at, len };
                }
                Mapping::Zero { len } => return ReadLocation::Zero { len },
                Mapping::Damaged { len } => return ReadLocation::Damaged { len },
                Mapping::Load(what) => {
                    let layer = number as u16;
                    return ReadLocation::Load(MissingMetadata { layer, what });
                }
                Mapping::Compressed { from, skip, len } => {
                    return ReadLocation::Compressed(Compressed {
                        file,
                        at: from.at.in_file(),
                        bytes: from.len,
                        compression: image.compression(),
                        cluster_bytes: image.cluster_bytes(),
                        skip,
                        len,
                    });
                }
            }
        }
        ReadLocation::Zero { len }
    }

    /// Prefetches the entry for `at` into the processor's cache. Call it for each of several requests before
    /// looking up the first of them. Their entries are spread over a large table, and the processor then waits for
    /// all of them at once instead of one after the other. There is no other effect.
    #[inline]
    pub fn prefetch(&self, at: GuestOffset) {
        for layer in &self.layers {
            match &layer.image {
                LayerImage::Qcow2(image) if !image.prefetch(at) => {}
                _ => return,
            }
        }
    }

    /// Where a write goes that starts at `at` and ends inside the disk. Uses memory only, without locks or system
    /// calls.
    #[inline]
    pub fn map_write(&self, pin: &Pin, at: GuestOffset, len: u64) -> WriteLocation {
        let file = self.written_file();
        let Some(image) = self.top() else {
            let at = FileOffset(at.0);
            return WriteLocation::InPlace { file, at, len };
        };
        match image.map_write(pin, at, len) {
            WriteMapping::InPlace { at, len } => {
                let at = at.in_file();
                WriteLocation::InPlace { file, at, len }
            }
            WriteMapping::Allocate { len } => WriteLocation::Allocate { len },
            WriteMapping::Load(what) => WriteLocation::Load(MissingMetadata { layer: 0, what }),
            WriteMapping::Damaged { len } => WriteLocation::Damaged { len },
        }
    }

    /// Loads what a lookup found missing. Blocks. If several threads ask for the same, one of them loads it and the
    /// others wait.
    ///
    /// # Errors
    /// It could not be read.
    pub fn load(&self, missing: MissingMetadata) -> Result<(), ImageError> {
        match &self.layers[usize::from(missing.layer)].image {
            LayerImage::Qcow2(image) => image.load(missing.what),
            LayerImage::Raw(_) => Ok(()),
        }
    }

    /// Allocates clusters for a write, as [`Qcow2::prepare_write`]. They are in
    /// [`written_file`](Self::written_file).
    ///
    /// # Errors
    /// The write cannot be done.
    pub fn prepare_write(&self, at: GuestOffset, len: u64) -> Result<Prepared, ImageError> {
        let Some(image) = self.top() else {
            return Ok(Prepared::Mapped);
        };
        let mut prepared = image.prepare_write(at, len)?;
        if let Prepared::Allocated(allocation) = &mut prepared {
            let pin = self.pins().pin(0);
            allocation.find_zeroes(|from, to| self.is_zero(&pin, from, to));
            self.pins().unpin(pin);
        }
        Ok(prepared)
    }

    /// Whether a range is known to read as zeroes.
    fn is_zero(&self, pin: &Pin, mut from: GuestOffset, to: GuestOffset) -> bool {
        while from < to {
            match self.map(pin, from, to - from) {
                ReadLocation::Zero { len } => from += len,
                _ => return false,
            }
        }
        true
    }

    /// As [`prepare_write`](Self::prepare_write), without blocking. `None` if it would have to block, or if the
    /// result is anything but an allocation.
    #[inline]
    pub fn try_prepare_write(&self, pin: &Pin, at: GuestOffset, len: u64) -> Option<Allocation> {
        let mut allocation = self.top()?.try_prepare_write(at, len)?;
        allocation.find_zeroes(|from, to| self.is_zero(pin, from, to));
        Some(allocation)
    }

    /// As [`Qcow2::try_commit`].
    ///
    /// # Errors
    /// It would have to block. Call [`commit`](Self::commit) instead.
    pub fn try_commit(&self, allocation: Allocation) -> Result<(), Allocation> {
        match self.top() {
            Some(image) => image.try_commit(allocation),
            None => Ok(()),
        }
    }

    /// As [`Qcow2::commit`].
    ///
    /// # Errors
    /// The range is unchanged; the exception of [`Qcow2::commit`] applies.
    pub fn commit(&self, allocation: Allocation) -> Result<(), ImageError> {
        self.top().map_or(Ok(()), |image| image.commit(allocation))
    }

    /// As [`Qcow2::commit_or_keep`].
    ///
    /// # Errors
    /// The range is unchanged; the exception of [`Qcow2::commit`] applies.
    #[expect(clippy::result_large_err, reason = "an error is rare, and moved once")]
    pub fn commit_or_keep(&self, allocation: Allocation) -> Result<(), (ImageError, Allocation)> {
        let commit = |image: &Qcow2| image.commit_or_keep(allocation);
        self.top().map_or(Ok(()), commit)
    }

    /// As [`Qcow2::reclaim`].
    ///
    /// # Errors
    /// The tables could not be made durable.
    pub fn reclaim(&self, since: u64) -> Result<Reclaimed, ImageError> {
        self.top()
            .map_or(Ok(Reclaimed::None), |image| image.reclaim(since))
    }

    /// As [`Qcow2::reclaimed`].
    pub fn reclaimed(&self) -> u64 {
        self.top().map_or(0, Qcow2::reclaimed)
    }

    /// As [`Qcow2::abort`].
    pub fn abort(&self, allocation: Allocation) {
        if let Some(image) = self.top() {
            image.abort(allocation);
        }
    }

    /// Zeroes or discards the first bytes of a range inside the disk; the caller continues with the rest. For a raw
    /// disk, the step is [`ZeroStep::File`] for the whole range. Blocks. The change is durable after the next
    /// flush.
    ///
    /// # Errors
    /// The rest of the range is unchanged.
    pub fn zero_step(
        &self,
        at: GuestOffset,
        len: u64,
        mode: ZeroMode,
    ) -> Result<ZeroStep, ImageError> {
        let Some(image) = self.top() else {
            return Ok(ZeroStep::File(len));
        };
        let zeroes_around = match mode {
            ZeroMode::Zeroes { .. } => self.has_zeroes_around(image, at, len)?,
            ZeroMode::Discard => false,
        };
        image.zero_step(at, len, mode, zeroes_around)
    }

    /// The image that the guest writes to, for operations that only images have.
    pub fn image(&self) -> Option<&Qcow2> {
        self.top()
    }

    /// Whether only [`flush`](Self::flush) makes everything durable. Otherwise an fdatasync of
    /// [`written_file`](Self::written_file) is enough.
    #[inline]
    pub fn needs_flush(&self) -> bool {
        self.top().is_some_and(Qcow2::needs_flush)
    }

    /// As [`Qcow2::must_flush`].
    #[inline]
    pub fn must_flush(&self) -> bool {
        self.top().is_some_and(Qcow2::must_flush)
    }

    /// Makes everything durable that was written and committed before this call. Blocks.
    ///
    /// # Errors
    /// Something may not be durable.
    pub fn flush(&self) -> Result<(), ImageError> {
        match self.top() {
            Some(image) => image.flush(),
            None => {
                let file = &self.files[usize::from(self.written_file().0)];
                file.flush().map_err(|source| {
                    if file.loses_data_on_failed_flush() {
                        ImageError::Lost { source }
                    } else {
                        ImageError::Io {
                            doing: "making the disk durable",
                            at: FileOffset(0),
                            source,
                        }
                    }
                })
            }
        }
    }

    /// Writes what only this process knows, so that another process can continue with the files.
    ///
    /// # Errors
    /// Something may not have been written.
    pub fn flush_for_handover(&self) -> Result<(), ImageError> {
        self.top().map_or(Ok(()), Qcow2::flush_for_handover)
    }

    /// Closes the disk after its last use.
    ///
    /// # Errors
    /// Something may not be durable.
    pub fn close(&self) -> Result<(), ImageError> {
        match self.top() {
            Some(image) => image.close(),
            None => self.flush(),
        }
    }

    /// Why writing has stopped, if it has.
    pub fn damage(&self) -> Option<&Damage> {
        self.top().and_then(Qcow2::damage)
    }
}

impl Layer {
    #[inline]
    fn size(&self) -> u64 {
        match &self.image {
            LayerImage::Raw(size) => size.load(SeqCst),
            LayerImage::Qcow2(image) => image.size(),
        }
    }
}
