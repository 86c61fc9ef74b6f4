//! The bitmap directory (docs/interop/qcow2 "Bitmap directory").

use super::types::HostOffset;
use crate::bytes::{be16, be32, be64};

/// Most bytes of a bitmap directory: 65535 bitmaps, as in QEMU, of 1024 bytes.
pub(crate) const BITMAP_DIRECTORY_BYTES_MAX: u64 = 65535 * 1024;

const IN_USE: u32 = 1;
const AUTO: u32 = 2;
const FLAGS_KNOWN: u32 = 7;

/// An entry of a bitmap directory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BitmapEntry {
    /// Where in the directory it begins, in bytes.
    at: usize,
    /// The bitmap table, which refers to the clusters of the bitmap.
    pub table_at: HostOffset,
    pub table_entries: u32,
    flags: u32,
}

impl BitmapEntry {
    pub fn is_in_use(&self) -> bool {
        self.flags & IN_USE != 0
    }

    pub fn tracks_writes(&self) -> bool {
        self.flags & AUTO != 0
    }

    /// Where its flags are in the directory, and their value with the "in use" bit.
    pub fn marked_in_use(&self) -> (usize, u32) {
        (self.at + 12, self.flags | IN_USE)
    }
}

/// Parses a bitmap directory; `None` if it contains anything unknown.
pub(crate) fn bitmap_directory(directory: &[u8], bitmaps: u32) -> Option<Vec<BitmapEntry>> {
    let mut entries = Vec::new();
    let mut at = 0;
    while at < directory.len() {
        let entry = directory.get(at..).filter(|rest| rest.len() >= 24)?;
        let flags = be32(entry, 12);
        let (kind, extra) = (entry[16], be32(entry, 20));
        if kind != 1 || flags & !FLAGS_KNOWN != 0 || extra != 0 {
            return None;
        }
        entries.push(BitmapEntry {
            at,
            table_at: HostOffset::new(be64(entry, 0)),
            table_entries: be32(entry, 8),
            flags,
        });
        at += (24 + usize::from(be16(entry, 18))).next_multiple_of(8);
    }
    (entries.len() == bitmaps as usize && at == directory.len()).then_some(entries)
}
