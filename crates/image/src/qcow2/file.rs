use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use super::error::{Doing, ImageError};
use super::types::HostOffset;
use crate::storage::{Storage, read_padded};

/// The file grows by a sixteenth of what it has, within these bounds in bytes, so that it seldom
/// does. What is too much costs no space, and is cut off when the image is closed.
const GROWTH: (u64, u64) = (16 << 20, 1 << 30);

const EIO: i32 = 5;

/// Metadata to be written, or written.
#[derive(Debug)]
pub(crate) struct Piece {
    pub at: HostOffset,
    pub bytes: Vec<u8>,
}

/// An image's file, and where it ends.
pub(crate) struct FileEnd {
    storage: Arc<dyn Storage>,
    /// In bytes.
    end: AtomicU64,
    /// Its length when it was opened.
    first: HostOffset,
    forgets: bool,
    /// A flush has failed, and none has succeeded since.
    unflushed: AtomicBool,
    /// The errno with which a flush has lost something for good.
    lost: OnceLock<i32>,
}

impl FileEnd {
    pub fn new(storage: Arc<dyn Storage>, bytes: u64) -> Self {
        let forgets = storage.forgets();
        Self {
            storage,
            end: AtomicU64::new(bytes),
            first: HostOffset::new(bytes),
            forgets,
            unflushed: AtomicBool::new(false),
            lost: OnceLock::new(),
        }
    }

    pub fn storage(&self) -> &dyn Storage {
        &*self.storage
    }

    /// Where the file ends. What lies behind reads as zeroes.
    #[inline]
    pub fn get(&self) -> HostOffset {
        HostOffset::new(self.end.load(SeqCst))
    }

    /// Makes the file at least so long. One thread at a time may do that.
    pub fn grow(&self, to: HostOffset) -> Result<(), ImageError> {
        let end = self.get();
        if to <= end {
            return Ok(());
        }
        let (end, to) = (end.bytes(), to.bytes());
        let more = (end / 16).clamp(GROWTH.0, GROWTH.1);
        let ample = end.saturating_add(more).max(to).min(i64::MAX as u64);
        let mut reached = ample;
        let mut result = self.storage.set_size(ample);
        if result.is_err() && ample > to {
            reached = to;
            result = self.storage.set_size(to);
        }
        match result {
            Ok(()) => {
                self.end.store(reached, SeqCst);
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => Err(ImageError::Full(
                "the block device that it is on has no room left; extend it",
            )),
            Err(error) => Err(error).doing("making the file longer", to),
        }
    }

    /// Cuts off what is behind, as far as the file was made longer here.
    pub fn trim(&self, to: HostOffset) -> Result<(), ImageError> {
        let to = to.max(self.first);
        if to < self.get() {
            let to = to.bytes();
            self.storage
                .set_size(to)
                .doing("cutting the file's end off", to)?;
            self.end.store(to, SeqCst);
        }
        Ok(())
    }

    /// Makes the file at least so long, and no longer: others may read a data file, and take its
    /// length for that of the disk. One thread at a time may do that.
    pub fn grow_exactly(&self, to: HostOffset) -> Result<(), ImageError> {
        if to > self.get() {
            let to = to.bytes();
            let grown = self.storage.set_size(to);
            grown.doing("making the data file longer", to)?;
            self.end.store(to, SeqCst);
        }
        Ok(())
    }

    pub fn write(&self, doing: &'static str, pieces: &[Piece]) -> Result<(), ImageError> {
        // Neighbours go together.
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
        let written = self.storage.write_at(at.in_file(), from);
        written.doing(doing, at.bytes())
    }

    /// Fills `to`, with zeroes behind the end of the file; returns how many bytes the file had.
    pub fn read_at(
        &self,
        doing: &'static str,
        at: HostOffset,
        to: &mut [u8],
    ) -> Result<usize, ImageError> {
        read_padded(&*self.storage, at.in_file(), to).doing(doing, at.bytes())
    }

    /// Makes everything durable that was written. One thread at a time may do that: the kernel tells of what
    /// it could not write once, and the other one would take it for durable.
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
        Err(source).doing("making the image durable", 0)
    }

    /// Whether a flush that fails is the last one.
    #[inline]
    pub fn forgets(&self) -> bool {
        self.forgets
    }

    /// Whether the last flush failed: something that was written may not be durable, whatever was not changed
    /// since.
    pub fn unflushed(&self) -> bool {
        self.unflushed.load(SeqCst)
    }
}
