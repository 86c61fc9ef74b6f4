//! Proxmox' archive of a VM (VMA), as `vma_spec.txt` of pve-qemu describes it.
//!
//! A header has configurations and the names and sizes of devices; extents of up to 59 clusters of 64 KiB have their data, in any
//! order, without blocks of 4 KiB that are zero. Each cluster of each device is in one extent, also those without data.

use md5::{Digest, Md5};

const BLOCK: usize = 4 << 10;
const BLOCKS: usize = 16;
const CLUSTER: usize = BLOCK * BLOCKS;

/// Clusters of an extent.
const CLUSTERS: usize = 59;

/// Bytes of a device that an extent has at most.
pub const EXTENT: u64 = (CLUSTERS * CLUSTER) as u64;

const EXTENT_HEADER: usize = 512;

/// Where the names and configurations are.
const BLOBS: usize = 12288;
/// All sizes in the header are multiples of this.
const SECTOR: usize = 512;

const TABLE: usize = 256;
const CONFIG_NAMES: usize = 2044;
const CONFIG_DATA: usize = 3068;
const DEVICES: usize = 4096;
const DEVICE: usize = 32;

/// Names and configurations, each with its length before it. No offset is 0.
struct Blobs(Vec<u8>);

impl Blobs {
    /// Returns the offset.
    fn add(&mut self, name: &str, bytes: &[u8]) -> Result<u32, String> {
        let length = u16::try_from(bytes.len()).map_err(|_| {
            format!(
                "{name} has {} bytes, and an archive has room for 65535",
                bytes.len()
            )
        })?;
        let at = u32::try_from(self.0.len()).map_err(|e| e.to_string())?;
        // Alone among all numbers, little endian.
        self.0.extend(length.to_le_bytes());
        self.0.extend(bytes);
        Ok(at)
    }

    fn add_name(&mut self, name: &str) -> Result<u32, String> {
        self.add(name, &[name.as_bytes(), b"\0"].concat())
    }
}

/// Writes the parts of an archive.
pub struct Archive {
    uuid: [u8; 16],
}

impl Archive {
    pub fn new(uuid: [u8; 16]) -> Self {
        Self { uuid }
    }

    /// The header of an archive of devices with these names and bytes, made at a time in seconds since 1970. Devices are
    /// numbered from 1 on.
    ///
    /// # Errors
    /// The format has no room for them.
    pub fn header(
        &self,
        time: u64,
        configs: &[(&str, &[u8])],
        devices: &[(&str, u64)],
    ) -> Result<Vec<u8>, String> {
        if configs.len() > TABLE || devices.len() >= TABLE {
            return Err("an archive has at most 255 devices".into());
        }
        let mut header = vec![0; BLOBS];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        let mut blobs = Blobs(vec![0]);
        for (index, (name, text)) in configs.iter().enumerate() {
            let at = index * 4;
            put(CONFIG_NAMES + at, &blobs.add_name(name)?.to_be_bytes());
            put(CONFIG_DATA + at, &blobs.add(name, text)?.to_be_bytes());
        }
        for (index, (name, bytes)) in devices.iter().enumerate() {
            if bytes.div_ceil(CLUSTER as u64) > u64::from(u32::MAX) {
                return Err(format!("{name} is larger than 256 TiB"));
            }
            let at = DEVICES + (index + 1) * DEVICE;
            put(at, &blobs.add_name(name)?.to_be_bytes());
            put(at + 8, &bytes.to_be_bytes());
        }
        let mut blobs = blobs.0;
        blobs.resize(blobs.len().next_multiple_of(SECTOR), 0);
        let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes();
        put(0, b"VMA\0");
        put(4, &1_u32.to_be_bytes());
        put(8, &self.uuid);
        put(24, &time.to_be_bytes());
        put(48, &word(BLOBS));
        put(52, &word(blobs.len()));
        put(56, &word(BLOBS + blobs.len()));
        header.extend(blobs);
        sign(&mut header, 32);
        Ok(header)
    }

    /// An extent with data of a device (from 1 on) that begins at `offset`, a multiple of [`EXTENT`]. `data` has at most
    /// [`EXTENT`] bytes, and only the last of a device has less.
    pub fn extent(&self, device: u8, offset: u64, data: &[u8]) -> Vec<u8> {
        debug_assert!(data.len() as u64 <= EXTENT && offset.is_multiple_of(EXTENT));
        let mut extent = Vec::with_capacity(EXTENT_HEADER + data.len().next_multiple_of(BLOCK));
        extent.resize(EXTENT_HEADER, 0);
        let first = offset / CLUSTER as u64;
        let mut count: u16 = 0;
        for (index, cluster) in data.chunks(CLUSTER).enumerate() {
            let mut mask: u16 = 0;
            for (bit, block) in cluster.chunks(BLOCK).enumerate() {
                if is_zero(block) {
                    continue;
                }
                mask |= 1 << bit;
                count += 1;
                extent.extend(block);
                // The end of a device.
                extent.resize(extent.len() + BLOCK - block.len(), 0);
            }
            let number = u32::try_from(first + index as u64).unwrap_or(u32::MAX);
            let info = &mut extent[40 + index * 8..][..8];
            info[..2].copy_from_slice(&mask.to_be_bytes());
            info[3] = device;
            info[4..].copy_from_slice(&number.to_be_bytes());
        }
        extent[..4].copy_from_slice(b"VMAE");
        extent[6..8].copy_from_slice(&count.to_be_bytes());
        extent[8..24].copy_from_slice(&self.uuid);
        sign(&mut extent[..EXTENT_HEADER], 24);
        extent
    }
}

/// Puts the sum of a header into it, where it has zeros.
fn sign(header: &mut [u8], at: usize) {
    let sum = Md5::digest(&*header);
    header[at..at + 16].copy_from_slice(&sum);
}

fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}
