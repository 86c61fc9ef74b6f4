//! A disk's bytes by blocking calls, for threads that may block: for the copies that a write needs, and for
//! compressed clusters.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use block::{FileOffset, GuestOffset};

use super::{Chain, Compressed, FileIndex, LayerImage, ReadLocation, WriteLocation};
use crate::qcow2::{
    Allocation, Awaited, ImageError, Mapping, Pin, Prepared, Qcow2, ZeroMode, ZeroStep,
};
use crate::storage::Storage;

/// Zeroes to write where there is no other way to zero a range.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

impl Chain {
    /// Fills `to` with the disk's content from `at` on.
    ///
    /// # Errors
    /// Something could not be read.
    pub fn read(&self, pin: &Pin, at: GuestOffset, to: &mut [u8]) -> Result<(), ImageError> {
        let mut done = 0;
        while done < to.len() {
            let (at, rest) = (at + done as u64, &mut to[done..]);
            let n = match self.map(pin, at, rest.len() as u64) {
                ReadLocation::Load(missing) => {
                    self.load(missing)?;
                    0
                }
                ReadLocation::Data { file, at, len } => {
                    self.read_file(file, at, &mut rest[..len as usize])?;
                    len
                }
                ReadLocation::Zero { len } => {
                    rest[..len as usize].fill(0);
                    len
                }
                ReadLocation::Compressed(compressed) => {
                    let bytes = self.unpack(&compressed)?;
                    rest[..bytes.len()].copy_from_slice(&bytes);
                    compressed.len
                }
                ReadLocation::Damaged { .. } => {
                    let what = "a table entry of the disk is invalid";
                    return Err(ImageError::damaged_disk(what, at));
                }
            };
            done += n as usize;
        }
        Ok(())
    }

    /// Reads and decompresses a piece of a compressed cluster.
    ///
    /// # Errors
    /// It could not be read, or does not decompress.
    pub fn unpack(&self, piece: &Compressed) -> Result<Vec<u8>, ImageError> {
        let error = |source| ImageError::Io {
            doing: "reading a compressed cluster",
            at: piece.at,
            source,
        };
        let mut packed = vec![0; piece.bytes as usize];
        let n = self.file(piece.file).read_at(piece.at, &mut packed);
        packed.truncate(n.map_err(error)?);
        let mut cluster = vec![0; piece.cluster_bytes as usize];
        let inflated = piece.compression.inflate(&packed, &mut cluster);
        inflated.map_err(error)?;
        cluster.truncate((piece.skip + piece.len) as usize);
        cluster.drain(..piece.skip as usize);
        Ok(cluster)
    }

    /// Writes to the file that contains what the guest writes.
    ///
    /// # Errors
    /// Any part may have been written.
    pub fn write_file(&self, at: FileOffset, from: &[u8]) -> Result<(), ImageError> {
        let result = self.file(self.written_file()).write_at(at, from);
        result.map_err(|source| ImageError::Io {
            doing: "writing data",
            at,
            source,
        })
    }

    /// Does the fills of an allocation. The caller writes the guest's data afterwards.
    ///
    /// # Errors
    /// The clusters were freed.
    pub fn fill(&self, allocation: Allocation) -> Result<Allocation, ImageError> {
        let filled = self.pinned(|pin| {
            allocation.fills.iter().try_for_each(|fill| {
                let mut bytes = vec![0; fill.len as usize];
                if let Some(from) = fill.from {
                    self.read(pin, from, &mut bytes)?;
                }
                self.write_file(fill.to, &bytes)
            })
        });
        match filled {
            Ok(()) => Ok(allocation),
            Err(e) => {
                self.abort(allocation);
                Err(e)
            }
        }
    }

    /// Zeroes or discards a range, as far as possible without waiting for other requests. Returns how many bytes are
    /// done and, if that is not all, what to wait for before continuing. The caller holds no pin while it waits.
    ///
    /// # Errors
    /// The rest of the range is unchanged.
    pub fn zero(
        &self,
        at: GuestOffset,
        len: u64,
        mode: ZeroMode,
    ) -> Result<(u64, Option<Awaited>), ImageError> {
        let mut done = 0;
        while done < len {
            let step_at = at + done;
            let step = match self.zero_step(step_at, len - done, mode)? {
                ZeroStep::Done(n) => Ok(n),
                ZeroStep::File(n) if self.punches_hole(step_at, n, mode) => Ok(n),
                // The range keeps its content.
                ZeroStep::File(n) if mode == ZeroMode::Discard => Ok(n),
                ZeroStep::File(n) => {
                    for skip in (0..n).step_by(ZEROES.len()) {
                        let part = (n - skip).min(ZEROES.len() as u64) as usize;
                        self.write_file(FileOffset(step_at.0 + skip), &ZEROES[..part])?;
                    }
                    Ok(n)
                }
                ZeroStep::Write(n) => {
                    let n = n.min(ZEROES.len() as u64);
                    self.write_zeroes(step_at, n)?
                }
                ZeroStep::Wait(waiting) => Err(waiting),
            };
            match step {
                Ok(n) => done += n,
                Err(waiting) => return Ok((done, Some(waiting))),
            }
        }
        Ok((done, None))
    }

    /// Whether a range begins in a subcluster that is in the backing file and covers only a part of it, and the
    /// rest of that subcluster reads as zeroes. To find out, this reads the rest, which a write to the range would
    /// do too.
    pub(super) fn has_zeroes_around(
        &self,
        image: &Qcow2,
        at: GuestOffset,
        len: u64,
    ) -> Result<bool, ImageError> {
        let (end, around) = (at + len, image.subcluster_of(at));
        if around.start == at && around.end <= end {
            return Ok(false);
        }
        self.pinned(|pin| {
            loop {
                match image.map(pin, at, 1) {
                    Mapping::Load(what) => image.load(what)?,
                    Mapping::Hole { .. } if self.depth() > 1 => break,
                    _ => return Ok(false),
                }
            }
            Ok(self.holds_zeroes(pin, around.start, at)?
                && self.holds_zeroes(pin, end, around.end)?)
        })
    }

    fn holds_zeroes(
        &self,
        pin: &Pin,
        mut from: GuestOffset,
        to: GuestOffset,
    ) -> Result<bool, ImageError> {
        let mut bytes = [0; 4096];
        while from < to {
            let part = &mut bytes[..(to - from).min(4096) as usize];
            self.read(pin, from, part)?;
            if part.iter().any(|&byte| byte != 0) {
                return Ok(false);
            }
            from += part.len() as u64;
        }
        Ok(true)
    }

    /// Enlarges the disk, durably. The new part reads as zeroes, whatever the layers below contain. Blocks.
    /// [`grow`](crate::qcow2) of images explains the order of the steps.
    ///
    /// # Errors
    /// The disk keeps its size; the caller may try again.
    pub fn grow(&self, size: u64) -> Result<(), ImageError> {
        let image = match &self.layers[0].image {
            LayerImage::Qcow2(image) => image,
            LayerImage::Raw(old) => return self.grow_raw(old, size),
        };
        let growth = image.begin_growing(size)?;
        let mut new = growth.new.clone();
        while !new.is_empty() {
            let mode = ZeroMode::Zeroes { unmap: true };
            let (done, waiting) = self.zero(new.start, new.end - new.start, mode)?;
            new.start += done;
            if let Some(waiting) = waiting {
                image.wait(&waiting);
            }
        }
        self.flush()?;
        image.end_growing(&growth)
    }

    fn grow_raw(&self, old: &AtomicU64, size: u64) -> Result<(), ImageError> {
        let file = self.file(self.written_file());
        if size < old.load(SeqCst) {
            return Err(ImageError::Unsupported(
                "a disk cannot become smaller while it is in use",
            ));
        }
        // The part added to a file reads as zeroes.
        file.set_size(size).map_err(|source| ImageError::Io {
            doing: "making the file longer",
            at: FileOffset(size),
            source,
        })?;
        self.flush()?;
        old.fetch_max(size, SeqCst);
        Ok(())
    }

    /// Frees the space of a range in the file, where it is at the same offset. Returns false if the mode or the file
    /// system does not allow it.
    fn punches_hole(&self, at: GuestOffset, len: u64, mode: ZeroMode) -> bool {
        let may_unmap = mode != (ZeroMode::Zeroes { unmap: false });
        let punches = self.image().is_some_and(Qcow2::punches);
        let file = self.file(self.written_file());
        may_unmap && punches && file.punch(FileOffset(at.0), len).is_ok()
    }

    /// Writes zeroes like any other data. Returns how many bytes were written, or what to wait for first.
    fn write_zeroes(&self, at: GuestOffset, len: u64) -> Result<Result<u64, Awaited>, ImageError> {
        loop {
            // Only what is written in place needs a pin.
            let place = self.pinned(|pin| {
                let place = self.map_write(pin, at, len);
                if let WriteLocation::InPlace { at, len, .. } = place {
                    self.write_file(at, &ZEROES[..len as usize])?;
                }
                Ok(place)
            })?;
            let len = match place {
                WriteLocation::InPlace { len, .. } => return Ok(Ok(len)),
                WriteLocation::Load(missing) => {
                    self.load(missing)?;
                    continue;
                }
                // Preparing a write to a damaged part returns the error that describes the damage.
                WriteLocation::Allocate { len } | WriteLocation::Damaged { len } => len,
            };
            match self.prepare_write(at, len)? {
                Prepared::Mapped => {}
                Prepared::Wait(waiting) => return Ok(Err(waiting)),
                Prepared::Allocated(allocation) => {
                    let allocation = self.fill(allocation)?;
                    let (to, n) = (allocation.to, allocation.len);
                    if let Err(e) = self.write_file(to, &ZEROES[..n as usize]) {
                        self.abort(allocation);
                        return Err(e);
                    }
                    self.commit(allocation)?;
                    return Ok(Ok(n));
                }
            }
        }
    }

    /// Calls `f` with a pin, for a thread that is not an I/O thread.
    fn pinned<T>(&self, f: impl FnOnce(&Pin) -> T) -> T {
        let pin = self.pins().pin(0);
        let result = f(&pin);
        self.pins().unpin(pin);
        result
    }

    fn read_file(&self, file: FileIndex, at: FileOffset, to: &mut [u8]) -> Result<(), ImageError> {
        let read = self.file(file).read_at(at, to);
        let n = read.map_err(|source: io::Error| ImageError::Io {
            doing: "reading data",
            at,
            source,
        })?;
        to[n..].fill(0);
        Ok(())
    }

    fn file(&self, index: FileIndex) -> &dyn Storage {
        &*self.files[usize::from(index.0)]
    }
}
