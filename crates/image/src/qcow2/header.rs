//! The header and its extensions (docs/interop/qcow2 "Header", "Header extensions").

use thiserror::Error;

use super::compressed::Compression;
use super::geometry::Geometry;
use super::types::{HOST_BITS, HostOffset};
use crate::bytes::{be16, be32, be64, put32, put64};

/// The largest cluster, as a power of two, as in QEMU.
pub(crate) const CLUSTER_BITS_MAX: u32 = 21;
/// The largest L1 table in bytes, as in QEMU.
pub(crate) const L1_BYTES_MAX: u64 = 32 << 20;
/// The largest refcount table in bytes, as in QEMU.
pub(crate) const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
/// The most internal snapshots, as in QEMU.
const SNAPSHOTS_MAX: u32 = 65536;
/// The longest name of a backing file in bytes, from the specification.
const BACKING_NAME_MAX: u64 = 1023;
/// Bytes of the header that this module changes. They are in the first sector.
pub(crate) const HEADER_BYTES: usize = 112;

const MAGIC: u32 = 0x5146_49fb;
const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
/// A compatible feature.
const LAZY_REFCOUNTS: u64 = 1;
const INCOMPATIBLE_KNOWN: u64 = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION | EXTENDED_L2;
/// The bitmaps are consistent.
pub(crate) const AUTOCLEAR_BITMAPS: u64 = 1;
/// The external data file is the disk, byte for byte.
pub(crate) const AUTOCLEAR_RAW_EXTERNAL: u64 = 1 << 1;

/// The autoclear feature bits that belong to the journal.
pub(super) const AUTOCLEAR_JOURNAL: u64 = !0 << 22;

/// The content of the header, checked as far as possible without reading anything else.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub version: u32,
    pub cluster_bits: u32,
    pub refcount_order: u32,
    /// The size of the disk in bytes.
    pub size: u64,
    pub l1_entries: u32,
    pub l1_at: HostOffset,
    pub refcount_table_at: HostOffset,
    pub refcount_table_clusters: u32,
    pub snapshots: u32,
    pub snapshots_at: HostOffset,
    incompatible: u64,
    /// QEMU may leave the refcounts wrong and the image dirty.
    pub lazy_refcounts: bool,
    pub autoclear: u64,
    pub compression: Compression,
    /// The name of the backing file, and its format if the image names it.
    pub backing: Option<(String, Option<String>)>,
    pub data_file: Option<String>,
    pub bitmaps: Option<BitmapsExtension>,
    /// Where another extension could begin: where the list of extensions ends, in bytes.
    pub extensions_end: u64,
}

/// The type of the bitmaps extension.
pub(crate) const BITMAPS_EXTENSION: u32 = 0x2385_2875;
/// Bytes of an extension's type and length, which precede its data.
pub(crate) const EXTENSION_HEAD: u64 = 8;
/// Bytes of the data of the bitmaps extension.
pub(crate) const BITMAPS_EXTENSION_BYTES: u64 = 24;

#[derive(Clone, Copy, Debug)]
pub(crate) struct BitmapsExtension {
    /// Where its data is in the file, in bytes.
    pub at: u64,
    pub bitmaps: u32,
    /// Must be 0.
    pub reserved: u32,
    pub directory_bytes: u64,
    /// Not checked: nothing but the bitmaps depends on it.
    pub directory_at: HostOffset,
}

/// Why a header is rejected.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HeaderError {
    /// The first bytes are not those of the format.
    #[error(
        "it is not a qcow2 image, or its header is damaged; use format=raw only if a guest has used it as a \
        raw disk: any other content would be overwritten"
    )]
    Magic,
    /// The version is neither 2 nor 3.
    #[error(
        "version {0} of qcow2 is not supported; 'qemu-img convert -O qcow2' creates a supported one"
    )]
    Version(u32),
    /// The guest's data cannot be read without a key.
    #[error(
        "it is encrypted ({0}), which is not supported; decrypt it with 'qemu-img convert', \
        and encrypt the disk in the guest or below the file"
    )]
    Encrypted(&'static str),
    /// The image needs a feature that is not supported.
    #[error(
        "it uses unsupported features: {0}; 'qemu-img convert -O qcow2' creates an image without them"
    )]
    Feature(String),
    /// A field has an invalid value.
    #[error("its header is damaged: {field} is {value}, {why}; try 'qemu-img check'")]
    Field {
        /// The name of the field in the specification.
        field: &'static str,
        value: u64,
        /// What is wrong with the value.
        why: &'static str,
    },
}

impl Header {
    /// The size of the first cluster in bytes. [`parse`](Self::parse) needs that cluster.
    ///
    /// # Errors
    /// The bytes are not a header.
    pub fn cluster_bytes(first: &[u8]) -> Result<usize, HeaderError> {
        if be32(first, 0) != MAGIC {
            return Err(HeaderError::Magic);
        }
        let version = be32(first, 4);
        if version != 2 && version != 3 {
            return Err(HeaderError::Version(version));
        }
        let bits = be32(first, 20);
        if !(9..=CLUSTER_BITS_MAX).contains(&bits) {
            return Err(field("cluster_bits", bits, "not 9 to 21"));
        }
        Ok(1 << bits)
    }

    /// Parses the first cluster. Missing bytes count as zeroes.
    ///
    /// # Errors
    /// The image cannot be used.
    pub fn parse(first: &[u8]) -> Result<Self, HeaderError> {
        let cluster = Self::cluster_bytes(first)? as u64;
        let version = be32(first, 4);
        let v3 = version >= 3;
        let of_v3 = |at| if v3 { be64(first, at) } else { 0 };
        let length = if v3 { u64::from(be32(first, 100)) } else { 72 };
        if v3 && (length < 104 || length > cluster || !length.is_multiple_of(8)) {
            let why = "not a multiple of 8 from 104 to the size of a cluster";
            return Err(field("header_length", length, why));
        }
        let extensions = Extensions::parse(first, length as usize)?;
        let incompatible = of_v3(72);
        let unknown = incompatible & !INCOMPATIBLE_KNOWN;
        if unknown != 0 {
            return Err(HeaderError::Feature(extensions.feature_names(unknown)));
        }
        let refcount_order = if v3 { be32(first, 96) } else { 4 };
        let compression = match (incompatible & COMPRESSION, length > 104, first.get(104)) {
            (0, false, _) | (0, true, Some(0)) => Compression::Deflate,
            (1.., true, Some(1)) => Compression::Zstd,
            (_, _, kind) => {
                let kind = kind.copied().unwrap_or(0);
                let why = "which is not known, or not what the features say";
                return Err(field("compression_type", kind, why));
            }
        };
        let header = Self {
            version,
            cluster_bits: be32(first, 20),
            refcount_order,
            size: be64(first, 24),
            l1_entries: be32(first, 36),
            l1_at: HostOffset::new(be64(first, 40)),
            refcount_table_at: HostOffset::new(be64(first, 48)),
            refcount_table_clusters: be32(first, 56),
            snapshots: be32(first, 60),
            snapshots_at: HostOffset::new(be64(first, 64)),
            incompatible,
            lazy_refcounts: of_v3(80) & LAZY_REFCOUNTS != 0,
            autoclear: of_v3(88),
            compression,
            backing: backing(first, cluster, extensions.backing_format)?,
            data_file: extensions.data_file,
            bitmaps: extensions.bitmaps,
            extensions_end: extensions.end,
        };
        match be32(first, 32) {
            0 => {}
            1 => return Err(HeaderError::Encrypted("AES")),
            2 => return Err(HeaderError::Encrypted("LUKS")),
            other => return Err(field("crypt_method", other, "which is not known")),
        }
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), HeaderError> {
        let cluster = 1_u64 << self.cluster_bits;
        let ends_in_reach = |at: HostOffset, len: u64| {
            let end = at.bytes().checked_add(len);
            end.is_some_and(|end| end < 1 << HOST_BITS)
        };
        if self.refcount_order > 6 {
            return Err(field("refcount_order", self.refcount_order, "more than 6"));
        }
        if self.extended_l2() && self.cluster_bits < 14 {
            let why = "less than the 14 that extended L2 entries need";
            return Err(field("cluster_bits", self.cluster_bits, why));
        }
        let aligned = [
            ("l1_table_offset", self.l1_at),
            ("refcount_table_offset", self.refcount_table_at),
            (
                "snapshots_offset",
                if self.snapshots > 0 {
                    self.snapshots_at
                } else {
                    HostOffset::START
                },
            ),
        ];
        for (name, at) in aligned {
            if !at.is_of_cluster(cluster) {
                return Err(field(name, at.bytes(), "not the offset of a cluster"));
            }
        }
        let l1_bytes = u64::from(self.l1_entries) * 8;
        if l1_bytes > L1_BYTES_MAX || !ends_in_reach(self.l1_at, l1_bytes) {
            return Err(field(
                "l1_size",
                self.l1_entries,
                "more than 32 MiB of entries",
            ));
        }
        let entry_bits = if self.extended_l2() { 4 } else { 3 };
        let reach = 1_u64 << (2 * self.cluster_bits - entry_bits);
        if self.size.div_ceil(reach) > u64::from(self.l1_entries) {
            let why = "too few for the size of the disk";
            return Err(field("l1_size", self.l1_entries, why));
        }
        if self.size > i64::MAX as u64 {
            return Err(field("size", self.size, "more than 63 bits"));
        }
        if self.l1_entries > 0 && self.l1_at == HostOffset::START {
            return Err(field("l1_table_offset", 0_u32, "the offset of the header"));
        }
        let clusters = self.refcount_table_clusters;
        if u64::from(clusters) << self.cluster_bits > REFCOUNT_TABLE_BYTES_MAX.max(cluster) {
            let why = "more than 8 MiB";
            return Err(field("refcount_table_clusters", clusters, why));
        }
        if self.snapshots > SNAPSHOTS_MAX {
            return Err(field("nb_snapshots", self.snapshots, "more than 65536"));
        }
        if self.external_data() && self.snapshots > 0 {
            let why = "though the data is in another file";
            return Err(field("nb_snapshots", self.snapshots, why));
        }
        let raw = self.autoclear & AUTOCLEAR_RAW_EXTERNAL != 0;
        if raw && (!self.external_data() || self.backing.is_some()) {
            let why = "with a raw data file, but without any, or with a backing file";
            return Err(field("autoclear_features", self.autoclear, why));
        }
        Ok(())
    }

    /// How the image divides the disk and the file.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            cluster_bits: self.cluster_bits,
            refcount_order: self.refcount_order,
            extended: self.extended_l2(),
            version: self.version,
            external: self.external_data(),
        }
    }

    /// The incompatible and autoclear features.
    pub fn features(&self) -> (u64, u64) {
        (self.incompatible, self.autoclear)
    }

    /// Whether refcounts may be wrong, or there is a [journal](Self::set_journal).
    pub fn dirty(&self) -> bool {
        self.incompatible & DIRTY != 0
    }

    /// Whether anything may be wrong. The image must not be written.
    pub fn corrupt(&self) -> bool {
        self.incompatible & CORRUPT != 0
    }

    pub fn external_data(&self) -> bool {
        self.incompatible & EXTERNAL_DATA != 0
    }

    /// Whether the data file must equal the disk at all times.
    pub fn raw_external(&self) -> bool {
        self.external_data() && self.autoclear & AUTOCLEAR_RAW_EXTERNAL != 0
    }

    pub fn extended_l2(&self) -> bool {
        self.incompatible & EXTENDED_L2 != 0
    }

    /// Sets the corrupt bit; false if the header has none (version 2).
    pub fn set_corrupt(&mut self) -> bool {
        self.incompatible |= if self.version >= 3 { CORRUPT } else { 0 };
        self.version >= 3
    }

    pub fn clear_dirty(&mut self) {
        self.incompatible &= !DIRTY;
    }

    /// Sets the [journal bits](AUTOCLEAR_JOURNAL); without the first, there is no journal. With a journal, the image is
    /// also "dirty". Every program clears that after it has written to the image, even one that did not clear the
    /// journal bits when it opened the image.
    pub fn set_journal(&mut self, bits: u64) {
        self.autoclear = self.autoclear & !AUTOCLEAR_JOURNAL | bits;
        match bits >> 63 {
            0 => self.incompatible &= !DIRTY,
            _ => self.incompatible |= DIRTY,
        }
    }

    /// Writes the fields that change during the life of an image into `first`, the first bytes of the file, and
    /// leaves everything else unchanged. The fields are in one sector, so a crash leaves either all of them old or
    /// all of them new.
    pub fn put(&self, first: &mut [u8]) {
        put64(first, 24, self.size);
        put32(first, 36, self.l1_entries);
        put64(first, 40, self.l1_at.bytes());
        put64(first, 48, self.refcount_table_at.bytes());
        put32(first, 56, self.refcount_table_clusters);
        if self.version >= 3 {
            put64(first, 72, self.incompatible);
            put64(first, 88, self.autoclear);
        }
    }
}

fn field(field: &'static str, value: impl Into<u64>, why: &'static str) -> HeaderError {
    HeaderError::Field {
        field,
        value: value.into(),
        why,
    }
}

fn backing(
    first: &[u8],
    cluster: u64,
    format: Option<String>,
) -> Result<Option<(String, Option<String>)>, HeaderError> {
    let at = be64(first, 8);
    if at == 0 {
        return Ok(None);
    }
    let len = u64::from(be32(first, 16));
    if len == 0 || len > BACKING_NAME_MAX {
        return Err(field("backing_file_size", len, "not 1 to 1023"));
    }
    let end = at.checked_add(len).filter(|&end| end <= cluster);
    let name = end.and_then(|end| first.get(at as usize..end as usize));
    let Some(name) = name else {
        let why = "so that the name is not in the first cluster";
        return Err(field("backing_file_offset", at, why));
    };
    Ok(Some((text("backing_file", name)?, format)))
}

/// Decodes a name in an image, which must be UTF-8. Other names are possible on the host, but rarer than damage.
fn text(name: &'static str, bytes: &[u8]) -> Result<String, HeaderError> {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text.to_owned()),
        _ => Err(field(name, bytes.len() as u64, "bytes that are not UTF-8")),
    }
}

#[derive(Default)]
struct Extensions<'a> {
    backing_format: Option<String>,
    data_file: Option<String>,
    bitmaps: Option<BitmapsExtension>,
    feature_names: &'a [u8],
    end: u64,
}

impl<'a> Extensions<'a> {
    fn parse(first: &'a [u8], mut at: usize) -> Result<Self, HeaderError> {
        let mut found = Self::default();
        // The name of the backing file is after the extensions.
        let end = match be64(first, 8) {
            0 => first.len(),
            backing => first
                .len()
                .min(usize::try_from(backing).unwrap_or(usize::MAX)),
        };
        while at + 8 <= end {
            let (kind, len) = (be32(first, at), be32(first, at + 4) as usize);
            if kind == 0 {
                break;
            }
            let Some(data) = first[..end].get(at + 8..).and_then(|rest| rest.get(..len)) else {
                return Err(field("header extension", kind, "longer than its cluster"));
            };
            match kind {
                0xe279_2aca => found.backing_format = Some(text("backing format", data)?),
                0x4441_5441 => found.data_file = Some(text("data file", data)?),
                0x6803_f857 => found.feature_names = data,
                BITMAPS_EXTENSION if len as u64 == BITMAPS_EXTENSION_BYTES => {
                    found.bitmaps = Some(BitmapsExtension {
                        at: at as u64 + EXTENSION_HEAD,
                        bitmaps: be32(data, 0),
                        reserved: be32(data, 4),
                        directory_bytes: be64(data, 8),
                        directory_at: HostOffset::new(be64(data, 16)),
                    });
                }
                BITMAPS_EXTENSION => {
                    return Err(field("bitmaps extension", len as u64, "not 24 bytes"));
                }
                _ => {}
            }
            at += 8 + len.next_multiple_of(8);
        }
        found.end = at as u64;
        Ok(found)
    }

    /// The image's own names for these incompatible features.
    fn feature_names(&self, features: u64) -> String {
        let name = |bit: u8| {
            let named = |entry: &&[u8]| entry[0] == 0 && entry[1] == bit;
            let entry = self.feature_names.chunks_exact(48).find(named)?;
            let text = String::from_utf8_lossy(&entry[2..]);
            let printable: String = text.chars().take_while(|c| !c.is_control()).collect();
            Some(format!("'{printable}'"))
        };
        let bits = (0..64).filter(|bit| features >> bit & 1 != 0);
        let names = bits.map(|bit| name(bit).unwrap_or_else(|| format!("feature bit {bit}")));
        names.collect::<Vec<_>>().join(", ")
    }
}

/// An entry of the snapshot table: the L1 table of a snapshot (docs/interop/qcow2 "Snapshots").
#[derive(Clone, Copy, Debug)]
pub(crate) struct Snapshot {
    pub l1_at: HostOffset,
    pub l1_entries: u32,
}

/// Parses the first 40 bytes of an entry of the snapshot table. Also returns the length of the whole entry.
///
/// # Errors
/// The L1 table cannot be where the entry says, or is too long, or the entry has too much extra data.
pub(crate) fn snapshot(cluster: u64, entry: &[u8]) -> Result<(Snapshot, u64), HeaderError> {
    let (l1_at, l1_entries) = (HostOffset::new(be64(entry, 0)), be32(entry, 8));
    if !l1_at.is_of_cluster(cluster) {
        return Err(field(
            "l1_table_offset of a snapshot",
            l1_at.bytes(),
            "not that of a cluster",
        ));
    }
    if u64::from(l1_entries) * 8 > L1_BYTES_MAX {
        return Err(field(
            "l1_size of a snapshot",
            l1_entries,
            "more than 32 MiB",
        ));
    }
    let names = u64::from(be16(entry, 12)) + u64::from(be16(entry, 14));
    let extra = be32(entry, 36);
    if extra > 1024 {
        return Err(field(
            "extra data of a snapshot",
            extra,
            "more than 1024 bytes",
        ));
    }
    let len = (40 + u64::from(extra) + names).next_multiple_of(8);
    Ok((Snapshot { l1_at, l1_entries }, len))
}

#[cfg(test)]
mod tests;
