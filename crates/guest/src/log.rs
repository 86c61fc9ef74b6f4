//! The dirty log records which pages of guest memory this process has written, so that a front-end that
//! migrates its guest knows which pages to copy again (vhost-user: "Migration").
//!
//! It has one bit for each page of 4096 bytes by guest physical address, the lowest bit of a byte first. The
//! front-end clears bits while ringdisk sets them, and copies a page after it has cleared its bit. ringdisk
//! therefore sets a bit after it has written the page: if a copy clears the bit, the copy sees what was
//! written before. The bit is set even if it already appears to be set, because a copy that this bit caused
//! may be in progress.

#![expect(unsafe_code, reason = "the log is memory shared with the front-end")]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use thiserror::Error;

use crate::memory::{MAX_MAPPED_BYTES, Mapping, MemoryError, RegionLayout};
use crate::sigbus::SessionAbort;

/// Bytes of guest memory per bit (VHOST_LOG_PAGE).
const PAGE_BYTES: u64 = 4096;

/// Bytes of guest memory per byte of the log.
const BYTE_COVERS: u64 = 8 * PAGE_BYTES;

/// Maximum length of a log in bytes: physical addresses have 52 bits on x86-64 and 48 on most other
/// architectures, and a byte covers 2^15 bytes.
const LOG_BYTES_MAX: u64 = 1 << (52 - 15);

/// The log's position in its file (vhost-user: "Log description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLayout {
    /// Length of the log in bytes.
    pub len: u64,
    /// Offset of the log in the file.
    pub file_offset: u64,
}

/// Why a log was rejected.
#[derive(Debug, Error)]
pub enum LogError {
    /// The log is empty or longer than any guest needs.
    #[error("dirty log {0:x?} is empty or larger than {LOG_BYTES_MAX} bytes")]
    Malformed(LogLayout),
    /// The log cannot be mapped.
    #[error("dirty log: {0}")]
    Memory(#[from] MemoryError),
    /// The log does not cover memory that ringdisk may write.
    #[error(
        "the dirty log has {0} bytes, which do not reach to guest address {1:#x}; \
         the front-end must set a longer one before it shares that memory"
    )]
    Short(u64, u64),
}

/// A mapped dirty log.
pub struct DirtyLog {
    mapping: Mapping,
    layout: LogLayout,
    /// For another process that continues with the log.
    file: Arc<OwnedFd>,
}

impl DirtyLog {
    /// Maps a log that a front-end sends. `abort` is notified if the front-end truncates the file.
    ///
    /// # Errors
    /// The log's length is invalid, it extends beyond its file, or it cannot be mapped.
    pub fn map(
        layout: LogLayout,
        file: impl Into<Arc<OwnedFd>>,
        abort: Option<SessionAbort>,
    ) -> Result<Self, LogError> {
        let file = file.into();
        if !(1..=LOG_BYTES_MAX).contains(&layout.len) {
            return Err(LogError::Malformed(layout));
        }
        let region = RegionLayout {
            guest: 0,
            len: layout.len,
            user: 0,
            file_offset: layout.file_offset,
        };
        let mapping = Mapping::new(region, &file, MAX_MAPPED_BYTES, abort)?;
        Ok(Self {
            mapping,
            layout,
            file,
        })
    }

    /// The log's layout and its file.
    pub(crate) fn region(&self) -> (LogLayout, Arc<OwnedFd>) {
        (self.layout, self.file.clone())
    }

    /// Checks that all guest addresses below `end` can be marked.
    ///
    /// # Errors
    /// The log is too short.
    pub fn check_covers(&self, end: u64) -> Result<(), LogError> {
        if end.div_ceil(BYTE_COVERS) <= self.layout.len {
            Ok(())
        } else {
            Err(LogError::Short(self.layout.len, end))
        }
    }

    /// Marks a range of guest addresses that has been written. Addresses that the log does not cover are not
    /// marked; callers have checked the coverage before.
    pub(crate) fn mark(&self, guest: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (first, last) = (
            guest / PAGE_BYTES,
            guest.saturating_add(len - 1) / PAGE_BYTES,
        );
        let last_byte = (last / 8).min(self.layout.len - 1);
        for at in first / 8..=last_byte {
            let low = first.saturating_sub(at * 8).min(8);
            let high = (last - at * 8).min(7);
            // Bits `low` to `high`.
            let bits = (0xffu16 << low & 0xffu16 >> (7 - high)) as u8;
            // Release: a reader that sees the bit also sees the data written before it.
            self.byte(at).fetch_or(bits, Ordering::Release);
        }
    }

    fn byte(&self, at: u64) -> &AtomicU8 {
        debug_assert!(at < self.layout.len);
        let addr = self.mapping.at(self.layout.file_offset + at);
        // SAFETY: `at` is inside the log, which is mapped while `self` lives; every value is valid in an
        // atomic, even if another process writes there.
        unsafe { &*(addr as *const AtomicU8) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn file(len: u64) -> OwnedFd {
        let fd = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        fd
    }

    fn layout(len: u64, file_offset: u64) -> LogLayout {
        LogLayout { len, file_offset }
    }

    proptest! {
        /// Exactly the pages of each range are marked, at any log offset, and nothing outside the log.
        #[test]
        fn what_was_written_is_marked_and_nothing_else(
            offset in 0u64..5000,
            ranges in proptest::collection::vec((0u64..40 * BYTE_COVERS, 0u64..9 * PAGE_BYTES), 1..20),
        ) {
            const LEN: u64 = 32;
            let file = file(offset + LEN + 8);
            let log = DirtyLog::map(layout(LEN, offset), file.try_clone().unwrap(), None).unwrap();
            let mut expected = vec![0u8; offset as usize + LEN as usize + 8];
            for &(at, len) in &ranges {
                log.mark(at, len);
                for page in (0..LEN * 8).filter(|p| p * PAGE_BYTES < at + len && at < (p + 1) * PAGE_BYTES && len > 0) {
                    expected[(offset + page / 8) as usize] |= 1 << (page % 8);
                }
            }
            let mut found = vec![0; expected.len()];
            rustix::io::pread(&file, &mut found, 0).unwrap();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn invalid_logs_are_refused() {
        let file = file(4096);
        let map = |layout| DirtyLog::map(layout, file.try_clone().unwrap(), None);
        assert!(map(layout(4096, 0)).is_ok());
        for bad in [
            layout(0, 0),
            layout(LOG_BYTES_MAX + 1, 0),
            layout(u64::MAX, 1),
        ] {
            assert!(matches!(map(bad), Err(LogError::Malformed(_))), "{bad:?}");
        }
        for bad in [layout(4097, 0), layout(4096, 1), layout(1, u64::MAX)] {
            assert!(matches!(map(bad), Err(LogError::Memory(_))), "{bad:?}");
        }
        let log = map(layout(1, 17)).unwrap();
        assert!(log.check_covers(BYTE_COVERS).is_ok());
        assert!(matches!(
            log.check_covers(BYTE_COVERS + 1),
            Err(LogError::Short(1, _))
        ));
        log.mark(BYTE_COVERS - 1, u64::MAX);
        log.mark(u64::MAX, 1);
    }
}
