//! virtio-blk: features, configuration space and requests (virtio 1.3 §5.2).

use block::{DiskFacts, GuestOffset, Request, SECTOR_BYTES, Sector};
use virtio_bindings::{virtio_blk as b, virtio_config as c, virtio_ring as r};

use crate::Chain;

/// The status byte of a request (virtio 1.3 §5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The request succeeded.
    Ok = b::VIRTIO_BLK_S_OK as u8,
    /// The request failed or is not allowed.
    IoError = b::VIRTIO_BLK_S_IOERR as u8,
    /// The device does not support this request type.
    Unsupported = b::VIRTIO_BLK_S_UNSUPP as u8,
    /// The storage is full. No guest sees this: only a [`LocalQueue`](crate::LocalQueue) does.
    NoSpace = 0x80,
}

/// Length of the reply to GET_ID in bytes.
pub const ID_BYTES: usize = b::VIRTIO_BLK_ID_BYTES as usize;

/// Length of the configuration space up to and including `write_zeroes_may_unmap`, padded, in bytes.
pub const CONFIG_BYTES: usize = 60;

/// Offset of `writeback` in the configuration space.
pub const CONFIG_WRITEBACK: usize = 32;

/// VIRTIO_BLK_F_FLUSH: without it, the driver cannot request durability, so every write must be durable.
pub const F_FLUSH: u64 = 1 << b::VIRTIO_BLK_F_FLUSH;
/// VIRTIO_RING_F_EVENT_IDX.
pub const F_EVENT_IDX: u64 = 1 << r::VIRTIO_RING_F_EVENT_IDX;
/// VIRTIO_F_RING_PACKED.
pub const F_RING_PACKED: u64 = 1 << c::VIRTIO_F_RING_PACKED;

/// Features that only some disks offer. A guest that reconnects may have accepted them when its disk was on
/// other storage or had other options; such requests are then answered as unsupported.
pub const F_DISK_DEPENDENT: u64 =
    1 << b::VIRTIO_BLK_F_DISCARD | 1 << b::VIRTIO_BLK_F_WRITE_ZEROES | 1 << b::VIRTIO_BLK_F_RO;

/// Maximum length of a discard or write-zeroes request in bytes. It limits how long such a request takes if
/// zeroes must be written, and therefore how long a queue takes to stop.
pub(crate) const ZEROES_BYTES_MAX: u64 = 256 << 20;

/// Maximum length of a read or write in bytes, as in QEMU (BDRV_REQUEST_MAX_BYTES): a chain can name the same
/// memory a thousand times.
const REQUEST_BYTES_MAX: u64 = 1 << 31;

/// The bit of a request's type that marks a transfer from the guest to the device (virtio 1.3 §5.2.6).
const TYPE_OUT: u32 = b::VIRTIO_BLK_T_OUT;

/// The bit of a request's type with which drivers before virtio 1.0 requested a barrier. It is not offered
/// and is ignored, as in QEMU.
const TYPE_BARRIER: u32 = 1 << 31;

/// The feature bits that a disk offers.
pub fn features(facts: &DiskFacts) -> u64 {
    let mut bits = 1 << c::VIRTIO_F_VERSION_1
        // Drivers before virtio 1.0 may accept this bit; QEMU offers it to them without asking the back-end.
        | 1 << c::VIRTIO_F_ANY_LAYOUT
        | 1 << r::VIRTIO_RING_F_INDIRECT_DESC
        | F_EVENT_IDX
        | F_RING_PACKED
        | 1 << b::VIRTIO_BLK_F_SEG_MAX
        | 1 << b::VIRTIO_BLK_F_BLK_SIZE
        | 1 << b::VIRTIO_BLK_F_TOPOLOGY
        | F_FLUSH
        | 1 << b::VIRTIO_BLK_F_CONFIG_WCE
        | 1 << b::VIRTIO_BLK_F_MQ;
    if facts.read_only {
        bits |= 1 << b::VIRTIO_BLK_F_RO;
    } else {
        bits |= 1 << b::VIRTIO_BLK_F_WRITE_ZEROES;
        if facts.discard_granularity != 0 {
            bits |= 1 << b::VIRTIO_BLK_F_DISCARD;
        }
    }
    bits
}

/// Values in the configuration space that are not among the disk's facts.
#[derive(Clone, Copy, Debug)]
pub struct ConfigSpace {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Completed writes may be lost until the next flush.
    pub write_cache: bool,
    /// Number of queues.
    pub queues: u16,
    /// Maximum number of data segments in a request.
    pub seg_max: u16,
}

impl ConfigSpace {
    /// Encodes the configuration space as the guest reads it (virtio 1.3 §5.2.4).
    pub fn bytes(&self, facts: &DiskFacts) -> [u8; CONFIG_BYTES] {
        let block = facts.logical_block;
        let sectors_per_block = block / SECTOR_BYTES as u32;
        let physical_exp = (facts.physical_block / block).max(1).trailing_zeros() as u8;
        let min_io = (facts.physical_block / block).max(1) as u16;
        let optimal_io = facts.optimal_io / block;
        let zeroes_max = (ZEROES_BYTES_MAX / SECTOR_BYTES) as u32;

        let mut space = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.size / SECTOR_BYTES).to_le_bytes());
        put(12, &u32::from(self.seg_max).to_le_bytes());
        put(20, &block.to_le_bytes());
        put(24, &[physical_exp, 0]);
        put(26, &min_io.to_le_bytes());
        put(28, &optimal_io.to_le_bytes());
        put(CONFIG_WRITEBACK, &[u8::from(self.write_cache)]);
        put(34, &self.queues.to_le_bytes());
        if !facts.read_only {
            if facts.discard_granularity != 0 {
                put(36, &zeroes_max.to_le_bytes());
                put(40, &1u32.to_le_bytes());
                let granularity =
                    (facts.discard_granularity / SECTOR_BYTES as u32).max(sectors_per_block);
                put(44, &granularity.to_le_bytes());
            }
            put(48, &zeroes_max.to_le_bytes());
            put(52, &1u32.to_le_bytes());
            put(56, &[u8::from(facts.discard_granularity != 0)]);
        }
        space
    }
}

/// Parses a request. `payload` supplies the first bytes that the device reads after the header; only discard
/// and write-zeroes use it, and they need 16 bytes.
///
/// # Errors
/// The status with which to answer the request: it is out of range, misaligned, of invalid length, not
/// allowed on this disk, or unknown.
#[inline(always)]
pub fn parse(
    chain: &Chain,
    size: u64,
    facts: &DiskFacts,
    payload: impl FnOnce(&mut [u8; 16]) -> usize,
) -> Result<Request, Status> {
    let field = |at: usize| u32::from_le_bytes(chain.header[at..at + 4].try_into().expect("4"));
    let sector = Sector(u64::from(field(8)) | u64::from(field(12)) << 32);
    let kind = field(0) & !TYPE_BARRIER;
    match kind {
        b::VIRTIO_BLK_T_IN => {
            let len = chain.writable_len;
            let at = range(sector, len, size, facts)?;
            Ok(Request::Read { at, len })
        }
        b::VIRTIO_BLK_T_OUT => {
            if facts.read_only {
                return Err(Status::IoError);
            }
            let len = chain.readable_len;
            let at = range(sector, len, size, facts)?;
            Ok(Request::Write { at, len })
        }
        b::VIRTIO_BLK_T_DISCARD | b::VIRTIO_BLK_T_WRITE_ZEROES => {
            let mut bytes = [0; 16];
            // The configuration space allows one range per request: more are unsupported, as in QEMU.
            if !facts.read_only && chain.readable_len > 16 {
                return Err(Status::Unsupported);
            }
            if facts.read_only || chain.readable_len != 16 || payload(&mut bytes) != 16 {
                return Err(Status::IoError);
            }
            zeroes(kind, &bytes, size, facts)
        }
        // Some drivers set the direction bit on requests without data: a flush is 4 or 5
        // (VIRTIO_BLK_T_FLUSH_OUT).
        _ => match kind & !TYPE_OUT {
            b::VIRTIO_BLK_T_FLUSH => Ok(Request::Flush),
            b::VIRTIO_BLK_T_GET_ID => Ok(Request::GetId),
            _ => Err(Status::Unsupported),
        },
    }
}

/// Parses the single range of a discard or write-zeroes request (`struct virtio_blk_discard_write_zeroes`).
fn zeroes(kind: u32, bytes: &[u8; 16], size: u64, facts: &DiskFacts) -> Result<Request, Status> {
    let sector = Sector(u64::from_le_bytes(bytes[..8].try_into().expect("8")));
    let sectors = u32::from_le_bytes(bytes[8..12].try_into().expect("4"));
    let flags = u32::from_le_bytes(bytes[12..].try_into().expect("4"));
    let len = u64::from(sectors) * SECTOR_BYTES;
    let unmap = flags & b::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
    let discard = kind == b::VIRTIO_BLK_T_DISCARD;
    // virtio 1.3 §5.2.6.2: unknown flags, and unmap in a discard, are unsupported.
    if flags & !b::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || discard && unmap {
        return Err(Status::Unsupported);
    }
    if discard && facts.discard_granularity == 0 {
        return Err(Status::Unsupported);
    }
    if len > ZEROES_BYTES_MAX {
        return Err(Status::IoError);
    }
    let at = range(sector, len, size, facts)?;
    Ok(if discard {
        Request::Discard { at, len }
    } else {
        Request::WriteZeroes { at, len, unmap }
    })
}

#[inline]
fn range(sector: Sector, len: u64, size: u64, facts: &DiskFacts) -> Result<GuestOffset, Status> {
    let at = sector.offset().ok_or(Status::IoError)?;
    let block_mask = u64::from(facts.logical_block) - 1;
    let fits = at.0 <= size && len <= (size - at.0).min(REQUEST_BYTES_MAX);
    if len == 0 || (at.0 | len) & block_mask != 0 || !fits {
        return Err(Status::IoError);
    }
    Ok(at)
}
