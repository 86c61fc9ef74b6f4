use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use super::error::{Doing, ImageError};
use super::types::HostOffset;
use crate::storage::{Storage, read_padded};

/// The file is extended by a sixteenth of its length, within these bounds in bytes, so that this is rare.
/// The excess occupies no space, and is truncated when the image is closed.
const GROWTH: (u64, u64) = (16 << 20, 1 << 30);

const EIO: i32 = 5;

/// Metadata to be written, or written.
#[derive(Debug)]
pub(crate) struct Piece {
    pub at: HostOffset,
    pub bytes: Vec<u8>,
}

impl Piece {
    pub fn is_zero(&self) -> bool {
        self.bytes.iter().all(|&byte| byte == 0)
    }
}

/// An image's file, and where it ends.
pub(crate) struct FileEnd {
    storage: Arc<dyn Storage>,
    /// In bytes.
    end: AtomicU64,
    /// Where the file ended when it was opened.
    first: HostOffset,
    forgets: bool,
    /// It is on a block device, which others extend, and not with zeroes.
    is_device: AtomicBool,
    /// What is given up is returned to the file system.
    returns_space: AtomicBool,
    /// The storage has refused to take space back.
    cannot_punch: AtomicBool,
    /// A flush has failed, and none has succeeded since.
    unflushed: AtomicBool,
    /// The errno of a flush that has lost data for good.
    lost: OnceLock<i32>,
}

impl FileEnd {
    pub fn new(storage: Arc<dyn Storage>, end: HostOffset, returns_space: bool) -> Self {
        let forgets = storage.loses_data_on_failed_flush();
        Self {
            storage,
            end: AtomicU64::new(end.bytes()),
            first: end,
            forgets,
            is_device: AtomicBool::new(false),
            returns_space: AtomicBool::new(returns_space),
            cannot_punch: AtomicBool::new(false),
            unflushed: AtomicBool::new(false),
            lost: OnceLock::new(),
        }
    }

    pub fn storage(&self) -> &dyn Storage {
        &*self.storage
    }

    /// Where the file ends. Reads after the end return zeroes.
    #[inline]
    pub fn get(&self) -> HostOffset {
        HostOffset::new(self.end.load(SeqCst))
    }

    /// Extends the file to at least `to`. Only one thread at a time may call this.
    pub fn grow(&self, to: HostOffset) -> Result<(), ImageError> {
        let end = self.get();
        if to <= end {
            return Ok(());
        }
        let (end, least) = (end.bytes(), to.bytes());
        let more = (end / 16).clamp(GROWTH.0, GROWTH.1);
        let ample = end.saturating_add(more).max(least).min(i64::MAX as u64);
        let mut reached = ample;
        let mut result = self.storage.set_size(ample);
        if result.is_err() && ample > least {
            reached = least;
            result = self.storage.set_size(least);
        }
        match result {
            Ok(()) => {
                self.end.store(reached, SeqCst);
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                match self.grow_with_device(to)? {
                    size if size < least => Err(ImageError::NoSpace),
                    _ => Ok(()),
                }
            }
            Err(error) => Err(error).doing("making the file longer", to),
        }
    }

    /// Takes what was added to the block device since its size was last read. Returns its size in bytes, which may be less
    /// than `to`.
    fn grow_with_device(&self, to: HostOffset) -> Result<u64, ImageError> {
        self.is_device.store(true, SeqCst);
        let size = self.storage.size();
        let size = size.doing("reading the size of the block device", to)?;
        self.end.fetch_max(size, SeqCst);
        Ok(size)
    }

    /// Whether what is given up is returned to the file system.
    pub fn returns_space(&self) -> bool {
        self.returns_space.load(SeqCst) && !self.cannot_punch.load(SeqCst)
    }

    /// Sets whether what is given up is returned to the file system.
    pub fn set_returns_space(&self, returns: bool) {
        self.returns_space.store(returns, SeqCst);
    }

    /// Returns the space of what was in use, if that is wanted. Nothing depends on it.
    pub fn return_space(&self, at: HostOffset, len: u64) {
        if self.returns_space() {
            self.give_back(at, len);
        }
    }

    /// Returns space that others miss, or that a part of what could not be written as a whole occupies. Nothing refers to it.
    pub fn give_back(&self, at: HostOffset, len: u64) {
        if self.cannot_punch.load(SeqCst) {
            return;
        }
        // A device refuses what lies beyond its end.
        let len = len.min(self.get().bytes().saturating_sub(at.bytes()));
        if len == 0 {
            return;
        }
        let Err(error) = self.storage.punch(at.in_file(), len) else {
            return;
        };
        let passes = [
            ErrorKind::Interrupted,
            ErrorKind::StorageFull,
            ErrorKind::OutOfMemory,
        ];
        if !passes.contains(&error.kind()) {
            self.cannot_punch.store(true, SeqCst);
        }
    }

    /// Whether a part that was added to the file reads as zeroes.
    pub fn grows_with_zeroes(&self) -> bool {
        !self.is_device.load(SeqCst)
    }

    /// Truncates the file to `to`, but not below the length that it had when it was opened.
    pub fn trim(&self, to: HostOffset) -> Result<(), ImageError> {
        let to = to.max(self.first);
        if to < self.get() && !self.is_device.load(SeqCst) {
            let trimmed = self.storage.set_size(to.bytes());
            trimmed.doing("cutting the file's end off", to)?;
            self.end.store(to.bytes(), SeqCst);
        }
        Ok(())
    }

    /// Extends the file to exactly `to`, if it is shorter: other programs may read a data file, and take its
    /// length for that of the disk. Only one thread at a time may call this.
    pub fn grow_exactly(&self, to: HostOffset) -> Result<(), ImageError> {
        if to <= self.get() {
            return Ok(());
        }
        let needed = to.bytes();
        match self.storage.set_size(needed) {
            Ok(()) => {
                self.end.store(needed, SeqCst);
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                match self.grow_with_device(to)? {
                    size if size < needed => Err(ImageError::ShortDataDevice { size, needed }),
                    _ => Ok(()),
                }
            }
            Err(error) => Err(error).doing("making the data file longer", to),
        }
    }

    pub fn write(&self, doing: &'static str, pieces: &[Piece]) -> Result<(), ImageError> {
        // Adjacent pieces are written together.
        let mut at = 0;
        while let Some(first) = pieces.get(at) {
            let mut bytes = std::borrow::Cow::Borrowed(&first.bytes);
            let mut next = at + 1;
            while let Some(piece) = pieces.get(next)
                && piece.at == first.at + bytes.len() as u64
            {
                bytes.to_mut().extend_from_slice(&piece.bytes);
                next += 1;
            }
            self.write_at(doing, first.at, &bytes)?;
            at = next;
        }
        Ok(())
    }

    pub fn write_at(
        &self,
        doing: &'static str,
        at: HostOffset,
        from: &[u8],
    ) -> Result<(), ImageError> {
        let result = self.storage.write_at(at.in_file(), from);
        result.doing(doing, at)
    }

    /// The same for what nothing refers to yet. If it fails, what was written of it occupies no space.
    pub fn write_new(
        &self,
        doing: &'static str,
        at: HostOffset,
        from: &[u8],
    ) -> Result<(), ImageError> {
        let result = self.write_at(doing, at, from);
        result.inspect_err(|_| self.give_back(at, from.len() as u64))
    }

    /// Fills `to`, with zeroes after the end of the file; returns the number of bytes that the file had.
    pub fn read_at(
        &self,
        doing: &'static str,
        at: HostOffset,
        to: &mut [u8],
    ) -> Result<usize, ImageError> {
        read_padded(&*self.storage, at.in_file(), to).doing(doing, at)
    }

    /// Makes everything durable that was written. Only one thread at a time may call this: the kernel reports a write
    /// error once, and a second thread would take the lost data for durable.
    pub fn flush(&self) -> Result<(), ImageError> {
        if let Some(&errno) = self.lost.get() {
            let source = io::Error::from_raw_os_error(errno);
            return Err(ImageError::Lost { source });
        }
        let Err(source) = self.storage.flush() else {
            self.unflushed.store(false, SeqCst);
            return Ok(());
        };
        self.unflushed.store(true, SeqCst);
        let refused = [ErrorKind::Interrupted, ErrorKind::WouldBlock];
        if self.forgets && !refused.contains(&source.kind()) {
            let _ = self.lost.set(source.raw_os_error().unwrap_or(EIO));
            return Err(ImageError::Lost { source });
        }
        Err(source).doing("making the image durable", HostOffset::START)
    }

    /// Whether no flush can succeed after one that failed.
    #[inline]
    pub fn loses_data_on_failed_flush(&self) -> bool {
        self.forgets
    }

    /// Whether the last flush failed: data may not be durable although nothing was changed since.
    pub fn unflushed(&self) -> bool {
        self.unflushed.load(SeqCst)
    }
}
