//! A disk as its image and all that this builds on: overlays, their backing files, their data files.

mod access;
mod open;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use block::FileOffset;

pub use open::{ChainError, ChainOptions, LayerFormat, OpenFiles, Role, Top};

use crate::qcow2::{
    Allocation, Compression, Damage, GuestOffset, ImageError, Load, Mapping, Pin, Pins, Prepared,
    Qcow2, WriteMapping, ZeroStep, Zeroing,
};
use crate::storage::Storage;

/// A file of a chain, by its number in [`Chain::files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIndex(pub u16);

/// A disk. The first layer is what the guest writes to; where it has nothing, the next one shows.
///
/// Every request takes a [`Pin`] from [`pins`](Self::pins), itself or by its thread's
/// [`ThreadPins`](crate::ThreadPins), looks up where its range is, piece by piece, moves the bytes, and
/// gives the pin back:
///
/// - A read asks [`map`](Self::map), and follows the [`Place`].
/// - A write asks [`map_write`](Self::map_write). Where that says that clusters must be taken, a thread
///   that may block calls [`prepare_write`](Self::prepare_write), does the fills, writes the guest's
///   bytes, and calls [`commit`](Self::commit), before the write completes.
/// - Write-zeroes and discards go by [`zero_step`](Self::zero_step).
/// - A flush is [`flush`](Self::flush), if [`needs_flush`](Self::needs_flush) says so when the guest's
///   request arrives; else an fdatasync of [`written_file`](Self::written_file) does.
///
/// Requests for overlapping ranges may be under way at once; each byte is then that of one of them.
pub struct Chain {
    layers: Vec<Layer>,
    files: Vec<Arc<dyn Storage>>,
    /// Of a first layer that has none of its own.
    pins: Pins,
}

struct Layer {
    image: LayerImage,
    /// Where its guest data is.
    file: FileIndex,
}

enum LayerImage {
    /// Bytes.
    Raw(AtomicU64),
    Qcow2(Box<Qcow2>),
}

/// Where a piece of a disk is that is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a file, beside each other.
    Data {
        /// Which file.
        file: FileIndex,
        /// Where in it.
        at: FileOffset,
        /// Bytes.
        len: u64,
    },
    /// Nowhere: it reads as zeroes.
    Zero {
        /// Bytes.
        len: u64,
    },
    /// In a compressed cluster.
    Compressed(Compressed),
    /// Not known before [`Chain::load`] has been called, by a thread that may block; then ask again.
    Load(Missing),
    /// Nowhere that could be: reading it is an error.
    Damaged {
        /// Bytes.
        len: u64,
    },
}

/// Where a piece of a disk goes that is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePlace {
    /// To a file, beside each other.
    InPlace {
        /// Which file.
        file: FileIndex,
        /// Where in it.
        at: FileOffset,
        /// Bytes.
        len: u64,
    },
    /// To clusters that [`Chain::prepare_write`] takes for it.
    Allocate {
        /// Bytes.
        len: u64,
    },
    /// As with [`Place::Load`].
    Load(Missing),
    /// Writing it is an error.
    Damaged {
        /// Bytes.
        len: u64,
    },
}

/// A piece of a compressed cluster. Read `bytes` from the file at `at` (fewer, if it ends before),
/// have [`inflate`](Compression::inflate) fill a buffer of `cluster_bytes`, and take `len` from there,
/// from `skip` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// Which file.
    pub file: FileIndex,
    /// Where in it; not aligned to anything.
    pub at: FileOffset,
    /// Compressed bytes, at most two clusters.
    pub bytes: u64,
    /// How it is compressed.
    pub compression: Compression,
    /// What it decompresses to, in bytes.
    pub cluster_bytes: u64,
    /// Bytes before the piece.
    pub skip: u64,
    /// Bytes of the piece.
    pub len: u64,
}

/// Metadata that is not in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    layer: u16,
    what: Load,
}

impl Chain {
    /// All files, in the order of their numbers: what an engine must know to move bytes.
    pub fn files(&self) -> &[Arc<dyn Storage>] {
        &self.files
    }

    /// The files of images that [say that they have a journal](Qcow2::journal_waits) which nobody does.
    pub fn waiting(&self) -> Vec<FileIndex> {
        let waiting = self.layers.iter().filter_map(|layer| match &layer.image {
            // Its data file comes next.
            LayerImage::Qcow2(image) if image.journal_waits() => {
                Some(FileIndex(layer.file.0 - u16::from(image.has_data_file())))
            }
            _ => None,
        });
        waiting.collect()
    }

    /// The file that holds what the guest writes.
    pub fn written_file(&self) -> FileIndex {
        self.layers[0].file
    }

    /// Whether a layer is a file byte by byte.
    pub fn is_raw(&self, file: FileIndex) -> bool {
        let raw = |layer: &Layer| layer.file == file && matches!(layer.image, LayerImage::Raw(_));
        self.layers.iter().any(raw)
    }

    /// Whether nothing has been written to the images above that which this file is, or is the first of.
    pub fn is_bare_above(&self, file: FileIndex) -> bool {
        // Files are numbered from the top.
        let mut above = self.layers.iter().take_while(|layer| layer.file.0 < file.0);
        above.all(|layer| matches!(&layer.image, LayerImage::Qcow2(image) if image.is_bare()))
    }

    /// Bytes of the disk.
    #[inline]
    pub fn size(&self) -> u64 {
        self.layers[0].size()
    }

    /// How many layers there are.
    pub fn depth(&self) -> usize {
        self.layers.len()
    }

    fn top(&self) -> Option<&Qcow2> {
        match &self.layers[0].image {
            LayerImage::Qcow2(image) => Some(image),
            LayerImage::Raw(_) => None,
        }
    }

    /// Who looks things up.
    #[inline]
    pub fn pins(&self) -> &Pins {
        self.top().map_or(&self.pins, Qcow2::pins)
    }

    /// Where the range is that starts at `at`: the longest piece that is in one place. From memory,
    /// without locks or system calls. What is behind the end of the disk reads as zeroes.
    #[inline]
    pub fn map(&self, pin: &Pin, at: u64, len: u64) -> Place {
        let mut len = len;
        for (number, layer) in self.layers.iter().enumerate() {
            let Some(inside) = layer.size().checked_sub(at).filter(|&inside| inside > 0) else {
                return Place::Zero { len };
            };
            len = len.min(inside);
            let file = layer.file;
            let image = match &layer.image {
                LayerImage::Raw(_) => {
                    let at = FileOffset(at);
                    return Place::Data { file, at, len };
                }
                LayerImage::Qcow2(image) => image,
            };
            match image.map(pin, GuestOffset::new(at), len) {
                Mapping::Hole { len: hole } => len = hole,
                Mapping::Data { at, len } => {
                    let at = at.in_file();
                    return Place::Data { file, at, len };
                }
                Mapping::Zero { len } => return Place::Zero { len },
                Mapping::Damaged { len } => return Place::Damaged { len },
                Mapping::Load(what) => {
                    let layer = number as u16;
                    return Place::Load(Missing { layer, what });
                }
                Mapping::Compressed { from, skip, len } => {
                    return Place::Compressed(Compressed {
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
        Place::Zero { len }
    }

    /// To be called for each of several requests before the first of them is looked up: their entries are
    /// all over a large table, and the processor then waits for all of them at once, instead of for
    /// one after the other. Changes nothing but that.
    #[inline]
    pub fn touch(&self, at: u64) {
        for layer in &self.layers {
            match &layer.image {
                LayerImage::Qcow2(image) if !image.touch(GuestOffset::new(at)) => {}
                _ => return,
            }
        }
    }

    /// Where a write goes that starts at `at` and ends inside the disk. From memory, without locks or
    /// system calls.
    #[inline]
    pub fn map_write(&self, pin: &Pin, at: u64, len: u64) -> WritePlace {
        let file = self.written_file();
        let Some(image) = self.top() else {
            let at = FileOffset(at);
            return WritePlace::InPlace { file, at, len };
        };
        match image.map_write(pin, GuestOffset::new(at), len) {
            WriteMapping::InPlace { at, len } => {
                let at = at.in_file();
                WritePlace::InPlace { file, at, len }
            }
            WriteMapping::Allocate { len } => WritePlace::Allocate { len },
            WriteMapping::Load(what) => WritePlace::Load(Missing { layer: 0, what }),
            WriteMapping::Damaged { len } => WritePlace::Damaged { len },
        }
    }

    /// Brings into memory what a look-up found missing. Blocks. Threads that ask for the same wait for
    /// one of them.
    ///
    /// # Errors
    /// It could not be read.
    pub fn load(&self, missing: Missing) -> Result<(), ImageError> {
        match &self.layers[usize::from(missing.layer)].image {
            LayerImage::Qcow2(image) => image.load(missing.what),
            LayerImage::Raw(_) => Ok(()),
        }
    }

    /// Takes clusters for a write, as [`Qcow2::prepare_write`]; they are in
    /// [`written_file`](Self::written_file).
    ///
    /// # Errors
    /// The write cannot be done.
    pub fn prepare_write(&self, at: u64, len: u64) -> Result<Prepared, ImageError> {
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
    fn is_zero(&self, pin: &Pin, mut from: u64, to: u64) -> bool {
        while from < to {
            match self.map(pin, from, to - from) {
                Place::Zero { len } => from += len,
                _ => return false,
            }
        }
        true
    }

    /// The same without blocking: `None` if it would have to block, or anything else is to be said.
    #[inline]
    pub fn try_prepare_write(&self, pin: &Pin, at: u64, len: u64) -> Option<Allocation> {
        let mut allocation = self.top()?.try_prepare_write(at, len)?;
        allocation.find_zeroes(|from, to| self.is_zero(pin, from, to));
        Some(allocation)
    }

    /// As [`Qcow2::try_commit`].
    ///
    /// # Errors
    /// It would have to block: [`commit`](Self::commit) does it.
    pub fn try_commit(&self, allocation: Allocation) -> Result<(), Allocation> {
        match self.top() {
            Some(image) => image.try_commit(allocation),
            None => Ok(()),
        }
    }

    /// As [`Qcow2::commit`].
    ///
    /// # Errors
    /// The range is as it was before.
    pub fn commit(&self, allocation: Allocation) -> Result<(), ImageError> {
        self.top().map_or(Ok(()), |image| image.commit(allocation))
    }

    /// As [`Qcow2::commit_or_keep`].
    ///
    /// # Errors
    /// The range is as it was before.
    #[expect(clippy::result_large_err, reason = "an error is rare, and moved once")]
    pub fn commit_or_keep(&self, allocation: Allocation) -> Result<(), (ImageError, Allocation)> {
        let commit = |image: &Qcow2| image.commit_or_keep(allocation);
        self.top().map_or(Ok(()), commit)
    }

    /// As [`Qcow2::abort`].
    pub fn abort(&self, allocation: Allocation) {
        if let Some(image) = self.top() {
            image.abort(allocation);
        }
    }

    /// Gives up the beginning of a range inside the disk; the caller goes on with the rest. All of a raw disk is
    /// [`ZeroStep::File`]. Blocks. What is done is durable after the next flush.
    ///
    /// # Errors
    /// The rest of the range is as it was.
    pub fn zero_step(&self, at: u64, len: u64, why: Zeroing) -> Result<ZeroStep, ImageError> {
        let Some(image) = self.top() else {
            return Ok(ZeroStep::File(len));
        };
        let zeroes_around = match why {
            Zeroing::Zeroes { .. } => self.has_zeroes_around(image, GuestOffset::new(at), len)?,
            Zeroing::Discard => false,
        };
        image.zero_step(GuestOffset::new(at), len, why, zeroes_around)
    }

    /// The image that is written, for what only images do.
    pub fn image(&self) -> Option<&Qcow2> {
        self.top()
    }

    /// Whether only [`flush`](Self::flush) makes everything durable; otherwise an fdatasync of
    /// [`written_file`](Self::written_file) does.
    #[inline]
    pub fn needs_flush(&self) -> bool {
        self.top().is_some_and(Qcow2::needs_flush)
    }

    /// As [`Qcow2::must_flush`].
    #[inline]
    pub fn must_flush(&self) -> bool {
        self.top().is_some_and(Qcow2::must_flush)
    }

    /// Makes all that was written and committed before this call durable. Blocks.
    ///
    /// # Errors
    /// Something may not be durable.
    pub fn flush(&self) -> Result<(), ImageError> {
        match self.top() {
            Some(image) => image.flush(),
            None => {
                let file = &self.files[usize::from(self.written_file().0)];
                file.flush().map_err(|source| match file.forgets() {
                    true => ImageError::Lost { source },
                    false => ImageError::Io {
                        doing: "making the disk durable",
                        at: 0,
                        source,
                    },
                })
            }
        }
    }

    /// Writes what only this process knows of it, so that another one can go on with its files.
    ///
    /// # Errors
    /// Something may not be written.
    pub fn settle(&self) -> Result<(), ImageError> {
        self.top().map_or(Ok(()), Qcow2::settle)
    }

    /// Closes the disk, when nobody uses it any more.
    ///
    /// # Errors
    /// Something may not be durable.
    pub fn close(&self) -> Result<(), ImageError> {
        match self.top() {
            Some(image) => image.close(),
            None => self.flush(),
        }
    }

    /// Why nothing is written any more, if that is so.
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
