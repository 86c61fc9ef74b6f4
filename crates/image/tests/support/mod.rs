//! What the tests of images share: files, a mover of bytes as simple as can be, and qemu-img.

pub mod memory;

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use block::{FileOffset, GuestOffset};
use image::{
    AllowedDirectories, Awaited, Chain, ChainError, ChainOptions, DataFile, FileIndex, FileRole,
    ImageError, JournalFile, LayerFormat, OpenFiles, Pin, PlainFile, Prepared, ReadLocation,
    Reclaimed, Storage, TopFile, WriteLocation, ZeroMode, ZeroStep,
};

/// Opens allowed files as it is.
pub struct HostFiles;

impl OpenFiles for HostFiles {
    fn open(&mut self, file: OwnedFd, _: &Path, _: FileRole) -> io::Result<Arc<dyn Storage>> {
        Ok(Arc::new(PlainFile(file.into())))
    }

    fn data_file(
        &mut self,
        image: &Path,
        named: Option<&str>,
        write: bool,
    ) -> io::Result<DataFile> {
        let path = image.with_file_name(named.expect("the tests name it"));
        let file = File::options().read(true).write(write).open(path)?;
        let stat = file.metadata()?;
        Ok(DataFile {
            identity: (stat.dev(), stat.ino()),
            storage: Arc::new(PlainFile(file)),
        })
    }
}

/// How a test opens a disk.
#[derive(Clone, Copy)]
pub struct How {
    pub read_only: bool,
    pub allow_corrupt: bool,
    pub l2_cache_bytes: Option<u64>,
    /// What takes long while it is opened is stopped.
    pub stopped: bool,
}

pub const READ: How = How {
    read_only: true,
    allow_corrupt: false,
    l2_cache_bytes: None,
    stopped: false,
};

pub const WRITE: How = How {
    read_only: false,
    ..READ
};

/// A disk whose bytes are moved by plain calls.
pub struct Disk {
    pub chain: Chain,
}

impl Disk {
    pub fn open(path: &Path, how: How) -> Result<Self, ChainError> {
        let file = File::options()
            .read(true)
            .write(!how.read_only)
            .open(path)
            .unwrap();
        let allowed = AllowedDirectories::of_image(path).unwrap();
        let format = if path.extension().is_some_and(|e| e == "raw") {
            LayerFormat::Raw
        } else {
            LayerFormat::Qcow2
        };
        Self::with(Arc::new(PlainFile(file)), path, format, &allowed, how)
    }

    pub fn with(
        storage: Arc<dyn Storage>,
        path: &Path,
        format: LayerFormat,
        allowed: &AllowedDirectories,
        how: How,
    ) -> Result<Self, ChainError> {
        Self::with_files(storage, path, format, allowed, how, &mut HostFiles)
    }

    pub fn with_files(
        storage: Arc<dyn Storage>,
        path: &Path,
        format: LayerFormat,
        allowed: &AllowedDirectories,
        how: How,
        files: &mut dyn OpenFiles,
    ) -> Result<Self, ChainError> {
        Self::with_journal(storage, path, format, allowed, how, (files, None))
    }

    pub fn with_journal(
        storage: Arc<dyn Storage>,
        path: &Path,
        format: LayerFormat,
        allowed: &AllowedDirectories,
        how: How,
        (files, journal): (&mut dyn OpenFiles, Option<JournalFile>),
    ) -> Result<Self, ChainError> {
        let top = TopFile {
            storage,
            path,
            format,
        };
        let options = ChainOptions {
            read_only: how.read_only,
            allow_corrupt: how.allow_corrupt,
            l2_cache_bytes: how.l2_cache_bytes,
            punch: true,
            flush_changes: journal.is_some(),
            journal,
            progress: &mut |_| {
                if how.stopped {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            },
        };
        let chain = Chain::open(top, allowed, files, options)?;
        Ok(Self { chain })
    }

    fn file(&self, index: FileIndex) -> &dyn Storage {
        &*self.chain.files()[usize::from(index.0)]
    }

    fn pinned<T>(&self, f: impl FnOnce(&Pin) -> T) -> T {
        let pins = self.chain.pins();
        let pin = pins.pin(lane());
        let result = f(&pin);
        pins.unpin(pin);
        result
    }

    pub fn read(&self, at: u64, to: &mut [u8]) -> Result<(), ImageError> {
        self.pinned(|pin| self.read_pinned(pin, at, to))
    }

    fn read_pinned(&self, pin: &Pin, at: u64, to: &mut [u8]) -> Result<(), ImageError> {
        let mut done = 0;
        while done < to.len() {
            let rest = &mut to[done..];
            let piece = |len: u64| usize::try_from(len).unwrap();
            match self
                .chain
                .map(pin, GuestOffset(at + done as u64), rest.len() as u64)
            {
                ReadLocation::Load(missing) => self.chain.load(missing)?,
                ReadLocation::Data { file, at, len } => {
                    assert!(len > 0);
                    let to = &mut rest[..piece(len)];
                    let n = self.file(file).read_at(at, to).map_err(io_error)?;
                    to[n..].fill(0);
                    done += piece(len);
                }
                ReadLocation::Zero { len } => {
                    assert!(len > 0);
                    rest[..piece(len)].fill(0);
                    done += piece(len);
                }
                ReadLocation::Compressed(c) => {
                    let mut bytes = vec![0; piece(c.bytes)];
                    let n = self
                        .file(c.file)
                        .read_at(c.at, &mut bytes)
                        .map_err(io_error)?;
                    let mut cluster = vec![0; piece(c.cluster_bytes)];
                    let inflated = c.compression.inflate(&bytes[..n], &mut cluster);
                    inflated.map_err(io_error)?;
                    let from = piece(c.skip);
                    rest[..piece(c.len)].copy_from_slice(&cluster[from..from + piece(c.len)]);
                    done += piece(c.len);
                }
                ReadLocation::Damaged { len } => {
                    assert!(len > 0);
                    return Err(io_error(io::Error::other("damaged")));
                }
            }
        }
        Ok(())
    }

    pub fn write(&self, at: u64, from: &[u8]) -> Result<(), ImageError> {
        self.mark(at, from.len() as u64);
        let mut done = 0;
        while done < from.len() {
            done += self.write_piece(at + done as u64, &from[done..])?;
        }
        Ok(())
    }

    /// Writes the first bytes; returns how many. Clusters are taken without a pin, because that may wait for those that
    /// others use.
    fn write_piece(&self, at: u64, from: &[u8]) -> Result<usize, ImageError> {
        let chain = &self.chain;
        let place = self.pinned(|pin| {
            let place = chain.map_write(pin, GuestOffset(at), from.len() as u64);
            if let WriteLocation::InPlace { file, at, len } = place {
                let written = self.file(file).write_at(at, &from[..len as usize]);
                return written.map_err(io_error).map(|()| place);
            }
            Ok(place)
        });
        let place = match place {
            Ok(place) => place,
            Err(error) => return self.make_space(error, chain.reclaimed()),
        };
        let len = match place {
            WriteLocation::InPlace { len, .. } => {
                assert!(len > 0);
                return Ok(len as usize);
            }
            WriteLocation::Load(missing) => return chain.load(missing).map(|()| 0),
            WriteLocation::Allocate { len } => len,
            WriteLocation::Damaged { .. } => {
                // It says what is wrong.
                return Err(chain.prepare_write(GuestOffset(at), 1).unwrap_err());
            }
        };
        match chain.prepare_write(GuestOffset(at), len)? {
            Prepared::Mapped => Ok(0),
            Prepared::Wait(waiting) => {
                chain.image().unwrap().wait(&waiting);
                Ok(0)
            }
            Prepared::Allocated(allocation) => {
                assert_eq!(allocation.at, GuestOffset(at));
                let len = allocation.len as usize;
                assert!(len > 0 && len <= from.len());
                if let Err(error) =
                    self.pinned(|pin| self.move_data(pin, &allocation, &from[..len]))
                {
                    let reclaimed = allocation.reclaimed_before();
                    chain.abort(allocation);
                    return self.make_space(error, reclaimed);
                }
                chain.commit(allocation)?;
                Ok(len)
            }
        }
    }

    /// Data found no space: there may be some after freed clusters were reclaimed.
    fn make_space(&self, error: ImageError, reclaimed: u64) -> Result<usize, ImageError> {
        if !error.is_no_space() {
            return Err(error);
        }
        match self.chain.reclaim(reclaimed)? {
            Reclaimed::Some => Ok(0),
            Reclaimed::InUse => {
                self.chain.image().unwrap().wait(&Awaited::FreedClusters);
                Ok(0)
            }
            Reclaimed::None => Err(error),
        }
    }

    fn move_data(
        &self,
        pin: &Pin,
        allocation: &image::Allocation,
        data: &[u8],
    ) -> Result<(), ImageError> {
        let file = self.file(self.chain.written_file());
        for fill in &allocation.fills {
            let mut bytes = vec![0; fill.len as usize];
            if let Some(from) = fill.from {
                self.read_pinned(pin, from.0, &mut bytes)?;
            }
            file.write_at(fill.to, &bytes).map_err(io_error)?;
        }
        file.write_at(allocation.to, data).map_err(io_error)
    }

    /// What is done first with every request that changes the disk.
    fn mark(&self, at: u64, len: u64) {
        if let Some(image) = self.chain.image() {
            assert!(
                image
                    .bitmaps()
                    .recording()
                    .mark(at, len, &mut block::TimeNoted::default())
            );
        }
    }

    pub fn zero(&self, at: u64, len: u64, why: ZeroMode) -> Result<(), ImageError> {
        self.mark(at, len);
        let mut done = 0;
        while done < len {
            let (at, left) = (at + done, len - done);
            match self.chain.zero_step(GuestOffset(at), left, why)? {
                ZeroStep::Done(n) => {
                    assert!(n > 0 && n <= left, "{n} of {left}");
                    done += n;
                }
                ZeroStep::Write(n) => {
                    assert!(n > 0 && n <= left, "{n} of {left}");
                    self.write(at, &vec![0; n as usize])?;
                    done += n;
                }
                ZeroStep::File(n) => {
                    assert!(n > 0 && n <= left, "{n} of {left}");
                    let file = self.file(self.chain.written_file());
                    let zeroes = vec![0; n as usize];
                    file.write_at(FileOffset(at), &zeroes).map_err(io_error)?;
                    done += n;
                }
                ZeroStep::Wait(waiting) => self.chain.image().unwrap().wait(&waiting),
            }
        }
        Ok(())
    }

    /// A flush as a data path does it: the tables only if they have changes.
    pub fn flush(&self) -> Result<(), ImageError> {
        if self.chain.needs_flush() {
            return self.chain.flush();
        }
        let file = self.file(self.chain.written_file());
        file.flush().map_err(io_error)
    }

    pub fn grow(&self, size: u64) -> Result<(), ImageError> {
        self.chain.grow(size)
    }

    pub fn content(&self) -> Result<Vec<u8>, ImageError> {
        let mut content = vec![0; usize::try_from(self.chain.size()).unwrap()];
        for (number, piece) in content.chunks_mut(1 << 20).enumerate() {
            self.read((number as u64) << 20, piece)?;
        }
        Ok(content)
    }
}

pub fn io_error(source: io::Error) -> ImageError {
    ImageError::Io {
        doing: "moving data",
        at: FileOffset(0),
        source,
    }
}

/// A number for each thread.
fn lane() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static LANE: usize = NEXT.fetch_add(1, Ordering::Relaxed));
    LANE.with(|lane| *lane)
}
