use thiserror::Error;

use crate::CacheMode;

/// What kind of object holds the bytes; it decides how space is zeroed and deallocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A regular file.
    File,
    /// A block device.
    BlockDevice,
}

/// Properties that never change while a disk is served; they are read when it is opened. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskFacts {
    /// Unit in which the guest must address the disk.
    pub logical_block: u32,
    /// Unit that the backing writes without a read-modify-write; a power of two, at least `logical_block`.
    pub physical_block: u32,
    /// Preferred I/O size of the backing; 0 if it reports none.
    pub optimal_io: u32,
    /// Alignment that a buffer's address needs to reach the backing without a copy; a power of two, 1 if
    /// there is no requirement.
    pub address_alignment: u32,
    /// Alignment that a buffer's length needs to reach the backing without a copy.
    pub length_alignment: u32,
    /// Unit in which space can be deallocated; 0 if it cannot be.
    pub discard_granularity: u32,
    /// The guest may not write.
    pub read_only: bool,
}

/// Block sizes that a disk cannot have. Each message says what to do next.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum BlockSizeError {
    /// The logical block size is smaller than the backing can write.
    #[error(
        "logical-block-size={asked} is less than the {backing} bytes that its file is written in; \
        leave it out or give {backing}, or, if cache={direct} is what asks for {backing}, use \
        cache={cached}", direct = CacheMode::None, cached = CacheMode::Writeback
    )]
    Logical {
        /// The requested size in bytes.
        asked: u32,
        /// The smallest size that the backing supports, in bytes.
        backing: u32,
    },
    /// The physical block size is smaller than the logical one: a physical block consists of whole logical
    /// blocks.
    #[error(
        "physical-block-size={asked} is less than the logical block size of {logical}; \
        leave it out or give {logical} or more"
    )]
    Physical {
        /// The requested size in bytes.
        asked: u32,
        /// The logical block size, in bytes.
        logical: u32,
    },
    /// The disk would end inside a block.
    #[error(
        "the size, {size} bytes, is not a multiple of logical-block-size={logical}; make the file \
        longer ('truncate -s %{logical} FILE'), or leave logical-block-size out"
    )]
    Size {
        /// The disk's size in bytes.
        size: u64,
        /// The logical block size, in bytes.
        logical: u32,
    },
}

impl DiskFacts {
    /// Returns these facts with the block sizes that the operator chose for the guest; `size` is the disk's
    /// size. The alignment that the backing needs for buffers does not change.
    ///
    /// # Errors
    /// The backing or the disk's size does not allow these block sizes.
    pub fn with_blocks(
        self,
        logical: Option<u32>,
        physical: Option<u32>,
        size: u64,
    ) -> Result<Self, BlockSizeError> {
        let backing = self.logical_block;
        let logical = logical.unwrap_or(backing);
        let asked = physical.unwrap_or(self.physical_block.max(logical));
        if logical < backing {
            let asked = logical;
            return Err(BlockSizeError::Logical { asked, backing });
        }
        if asked < logical {
            return Err(BlockSizeError::Physical { asked, logical });
        }
        if !size.is_multiple_of(u64::from(logical)) {
            return Err(BlockSizeError::Size { size, logical });
        }
        let discard_granularity = match self.discard_granularity {
            0 => 0,
            n => n.max(logical),
        };
        Ok(Self {
            logical_block: logical,
            physical_block: asked,
            discard_granularity,
            ..self
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: DiskFacts = DiskFacts {
        logical_block: 512,
        physical_block: 512,
        optimal_io: 0,
        address_alignment: 4,
        length_alignment: 512,
        discard_granularity: 512,
        read_only: false,
    };

    #[test]
    fn guest_may_see_larger_blocks() {
        let facts = FACTS.with_blocks(Some(4096), None, 8192).unwrap();
        assert_eq!((facts.logical_block, facts.physical_block), (4096, 4096));
        assert_eq!(
            (facts.discard_granularity, facts.length_alignment),
            (4096, 512)
        );
        let facts = FACTS.with_blocks(None, Some(4096), 512).unwrap();
        assert_eq!((facts.logical_block, facts.physical_block), (512, 4096));
        assert_eq!(FACTS.with_blocks(None, None, 512), Ok(FACTS));
    }

    #[test]
    fn invalid_block_sizes_are_refused() {
        let native = DiskFacts {
            logical_block: 4096,
            physical_block: 4096,
            ..FACTS
        };
        let says = |facts: DiskFacts, logical, physical, size| {
            facts
                .with_blocks(logical, physical, size)
                .unwrap_err()
                .to_string()
        };
        assert!(says(native, Some(512), None, 4096).contains("give 4096"));
        assert!(says(FACTS, Some(4096), Some(512), 4096).contains("give 4096 or more"));
        assert!(says(FACTS, Some(4096), None, 4608).contains("truncate -s %4096"));
    }
}
