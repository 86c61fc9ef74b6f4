//! What a request is copying before it changes the disk: [`Preserving`].

use std::sync::Arc;

use block::{FileId, FileOffset};
use image::Pin;

use crate::disk::fleece::{Fleece, Run};

/// What a request is copying.
pub(crate) struct Preserving {
    /// The granules, and where they go.
    pub run: Option<(Run, Arc<Fleece>)>,
    /// Bytes of the run that are in the buffer.
    pub done: u64,
    /// What is read next: the file, where in it, and how many bytes.
    pub file: FileId,
    pub at: FileOffset,
    pub len: u64,
    /// While pinned, looked-up clusters are not reused.
    pub pin: Option<Pin>,
}

impl Default for Preserving {
    fn default() -> Self {
        Self {
            run: None,
            done: 0,
            file: FileId(0),
            at: FileOffset(0),
            len: 0,
            pin: None,
        }
    }
}

impl Preserving {
    /// Whether granules are being copied.
    pub fn is_copying(&self) -> bool {
        self.run.is_some()
    }

    /// Bytes of the granules that are being copied.
    pub fn len(&self) -> u64 {
        self.run.as_ref().map_or(0, |(run, _)| run.len)
    }

    /// Where in the buffer the next bytes go.
    pub fn done(&self) -> usize {
        self.done as usize
    }
}
