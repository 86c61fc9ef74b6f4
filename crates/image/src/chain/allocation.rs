//! Which image of a chain has a range: for clients that copy only what there is.

use block::{FileOffset, GuestOffset};

use super::{Chain, FileIndex, LayerImage};
use crate::qcow2::{ImageError, Mapping};

/// The state of the beginning of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// For how many bytes it holds.
    pub len: u64,
    /// The number of the image that has it: 1 for the first, 0 if none has it.
    pub depth: u32,
    /// How it is stored.
    pub form: AllocatedIn,
}

/// How a range is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocatedIn {
    /// In a file, which may have holes there: that of a raw image, or clusters that were only reserved or not filled.
    File { file: FileIndex, at: FileOffset },
    /// Compressed, or damaged: reading it is an error, which the client should see.
    Clusters,
    /// It reads as zeroes.
    Zeroes,
}

impl Chain {
    /// The state of the beginning of a range inside the disk. Loads what is not in memory: blocks.
    ///
    /// # Errors
    /// A table could not be read.
    pub fn allocated(&self, at: GuestOffset, len: u64) -> Result<Allocated, ImageError> {
        let pin = self.pins().pin(0);
        let found = self.allocated_while_pinned(&pin, at, len);
        self.pins().unpin(pin);
        found
    }

    fn allocated_while_pinned(
        &self,
        pin: &crate::Pin,
        at: GuestOffset,
        len: u64,
    ) -> Result<Allocated, ImageError> {
        let mut len = len;
        let found = |depth, len, form| Ok(Allocated { len, depth, form });
        for (depth, layer) in (1..).zip(&self.layers) {
            // Behind its end, an image hides those below it.
            let Some(inside) = layer.size().checked_sub(at.0).filter(|&inside| inside > 0) else {
                return found(depth, len, AllocatedIn::Zeroes);
            };
            len = len.min(inside);
            let image = match &layer.image {
                LayerImage::Raw(_) => {
                    let (file, at) = (layer.file, FileOffset(at.0));
                    return found(depth, len, AllocatedIn::File { file, at });
                }
                LayerImage::Qcow2(image) => image,
            };
            let mapping = loop {
                match image.map(pin, at, len) {
                    Mapping::Load(what) => image.load(what)?,
                    mapping => break mapping,
                }
            };
            match mapping {
                Mapping::Hole { len: hole } => len = hole,
                Mapping::Zero { len } => return found(depth, len, AllocatedIn::Zeroes),
                Mapping::Data { at, len } => {
                    let (file, at) = (layer.file, at.in_file());
                    return found(depth, len, AllocatedIn::File { file, at });
                }
                Mapping::Compressed { len, .. } | Mapping::Damaged { len } => {
                    return found(depth, len, AllocatedIn::Clusters);
                }
                Mapping::Load(_) => unreachable!("it was loaded"),
            }
        }
        found(0, len, AllocatedIn::Zeroes)
    }
}
