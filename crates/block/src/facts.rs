/// What kind of thing holds the bytes; it decides how space is zeroed and given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A regular file.
    File,
    /// A block device.
    BlockDevice,
}

/// What never changes while a disk is served, read once when it is opened. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskFacts {
    /// Unit in which the guest must address the disk.
    pub logical_block: u32,
    /// Unit that the backing writes without reading first; a power of two, at least `logical_block`.
    pub physical_block: u32,
    /// I/O size that the backing likes best; 0 if it does not say.
    pub optimal_io: u32,
    /// What a buffer's address must be a multiple of to reach the backing without a copy; a power
    /// of two, 1 if anything goes.
    pub address_alignment: u32,
    /// What a buffer's length must be a multiple of, likewise.
    pub length_alignment: u32,
    /// Unit in which space can be given back; 0 where it cannot.
    pub discard_granularity: u32,
    /// Writes are refused.
    pub read_only: bool,
}
