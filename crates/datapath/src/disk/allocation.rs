//! Where a disk has data: for clients that copy only what there is.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use block::{DataExtents, GuestOffset, Remote};
use image::{AllocatedIn, Extent};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::Disk;

/// The state of the beginning of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatedExtent {
    /// For how many bytes it holds.
    pub len: u64,
    /// The image of the chain that has it, from 1; 0 if none has it.
    pub depth: u32,
    /// It reads as zeroes, and has no space of its own.
    pub is_hole: bool,
}

/// What storage has said that is slow to ask. It is for one query of a range.
#[derive(Default)]
pub struct AllocationCache {
    remote: DataExtents,
    /// A part of a file of the chain without holes: to find where one ends, a file system looks at all of it.
    data: Option<(usize, Range<u64>)>,
}

impl AllocationCache {
    /// The length of the beginning of a range that is in one state, and whether it is a hole.
    fn in_file(
        &mut self,
        number: usize,
        file: &OwnedFd,
        at: u64,
        len: u64,
    ) -> io::Result<(u64, bool)> {
        if let Some((known, data)) = &self.data
            && *known == number
            && data.contains(&at)
        {
            return Ok((len.min(data.end - at), false));
        }
        Ok(match beginning(file, at)? {
            Beginning::Hole(hole) => (len.min(hole), true),
            Beginning::Data(data) => {
                self.data = Some((number, at..at.saturating_add(data)));
                (len.min(data), false)
            }
        })
    }

    /// The length of the beginning of a range that is in one state, and whether it is a hole.
    fn in_remote(&mut self, remote: &dyn Remote, at: u64, len: u64) -> io::Result<(u64, bool)> {
        if self.remote.beginning(at, len).is_none() {
            self.remote = remote.data_in(at, len)?.unwrap_or_default();
        }
        let found = self.remote.beginning(at, len);
        Ok(found.map_or((len, false), |(len, is_data)| (len, !is_data)))
    }
}

impl Disk {
    /// The state of the beginning of a range, which is inside the disk and not empty. Blocks: it may read tables of an image.
    /// A write since `cache` was made may or may not be seen.
    ///
    /// # Errors
    /// A table could not be read, or the disk is released.
    pub fn allocated(
        &self,
        at: u64,
        len: u64,
        cache: &mut AllocationCache,
    ) -> io::Result<AllocatedExtent> {
        if self.is_released.load(Ordering::Relaxed) {
            return Err(io::Error::other("the disk is released"));
        }
        let extent = |len, depth, is_hole| AllocatedExtent {
            len,
            depth,
            is_hole,
        };
        let content = self.content();
        let Some(chain) = content.image.chain() else {
            let is_nowhere = matches!(content.image.map(GuestOffset(at)), Extent::Nowhere);
            let (len, is_hole) = match self.source() {
                Some(source) if !is_nowhere => match (source.file(), source.remote()) {
                    (Some(file), _) => cache.in_file(0, file, at, len)?,
                    (None, Some(remote)) => cache.in_remote(remote, at, len)?,
                    (None, None) => (len, false),
                },
                _ => (len, is_nowhere),
            };
            return Ok(extent(len, 1, is_hole));
        };
        let found = chain.allocated(GuestOffset(at), len);
        let found = found.map_err(io::Error::other)?;
        let (len, is_hole) = match found.form {
            AllocatedIn::Zeroes => (found.len, true),
            AllocatedIn::Clusters => (found.len, false),
            AllocatedIn::File { file, at } => {
                let number = usize::from(file.0);
                match content.files.get(number).and_then(|source| source.file()) {
                    Some(file) => cache.in_file(number, file, at.0, found.len)?,
                    None => (found.len, false),
                }
            }
        };
        Ok(extent(len, found.depth, is_hole))
    }
}

/// What a file has from an offset on, and for how many bytes.
enum Beginning {
    Hole(u64),
    Data(u64),
}

/// All other users of the descriptor say where they read and write, so that its position does not matter.
fn beginning(file: &OwnedFd, at: u64) -> io::Result<Beginning> {
    let data = match seek(file, SeekFrom::Data(at)) {
        Ok(data) => data,
        // No data up to the end of the file. What should be behind it is no hole: reading it says what is wrong.
        Err(Errno::NXIO) => {
            let end = rustix::fs::fstat(file)?.st_size as u64;
            return Ok(match end.saturating_sub(at) {
                0 => Beginning::Data(u64::MAX),
                hole => Beginning::Hole(hole),
            });
        }
        // The file system does not know.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Beginning::Data(u64::MAX)),
        Err(e) => return Err(e.into()),
    };
    if data > at {
        return Ok(Beginning::Hole(data - at));
    }
    match seek(file, SeekFrom::Hole(at)) {
        Ok(hole) if hole > at => Ok(Beginning::Data(hole - at)),
        // It was punched meanwhile.
        Ok(_) | Err(Errno::NXIO) => Ok(Beginning::Data(4096)),
        Err(e) => Err(e.into()),
    }
}
