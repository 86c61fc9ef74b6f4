//! The files of an image, in memory: an engine moves the guest's bytes in them, the image reads and writes its tables.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use block::{Aio, Backing, DiskFacts, FileOffset};
use datapath::{Disk, Options};
use image::{
    AllowedDirectories, Chain, ChainOptions, DataFile, FileRole, Image, JournalFile, LayerFormat,
    OpenFiles, Storage, TopFile,
};
use testkit::faulty::MemoryDisk;
use testkit::random::Random;

/// A file may become longer by as much as it had, and this many bytes, so that it grows by little.
const GROWTH_MAX: u64 = 2 << 20;

/// What happens to the tables' reads and writes.
#[derive(Default)]
pub struct Trouble {
    /// Of 1000 operations, so many fail; ten times as many are late.
    pub often: AtomicU32,
    /// How many have failed.
    pub struck: AtomicU64,
    /// The files opened from now on are in the page cache.
    pub cached: AtomicBool,
    /// There is no room.
    pub full: AtomicBool,
    /// Nothing becomes durable.
    pub broken: AtomicBool,
    /// Nothing returns.
    hangs: Mutex<bool>,
    goes_on: Condvar,
    /// How many are waiting for that.
    pub hanging: AtomicU64,
    random: Mutex<Option<Random>>,
}

impl Trouble {
    /// From now on.
    pub fn set(&self, often: u32, seed: u64) {
        *self.random.lock().unwrap() = Some(Random(seed));
        self.often.store(often, Ordering::Relaxed);
    }

    /// From now on nothing returns, until it may again.
    pub fn hang(&self, on: bool) {
        *self.hangs.lock().unwrap() = on;
        self.goes_on.notify_all();
    }

    fn strike(&self, errno: i32) -> io::Result<()> {
        let hangs = self.hangs.lock().unwrap();
        self.hanging.fetch_add(1, Ordering::Relaxed);
        drop(self.goes_on.wait_while(hangs, |hangs| *hangs).unwrap());
        self.hanging.fetch_sub(1, Ordering::Relaxed);
        let often = self.often.load(Ordering::Relaxed);
        let mut random = self.random.lock().unwrap();
        let Some(random) = random.as_mut().filter(|_| often > 0) else {
            return Ok(());
        };
        let (late, fails) = (
            random.occurs_in_1000(often * 10),
            random.occurs_in_1000(often),
        );
        if late {
            thread::sleep(Duration::from_micros(random.below(200)));
        }
        if !fails {
            return Ok(());
        }
        self.struck.fetch_add(1, Ordering::Relaxed);
        Err(io::Error::from_raw_os_error(errno))
    }
}

/// One of them.
pub struct Memory {
    pub disk: Arc<Mutex<MemoryDisk>>,
    bytes_max: u64,
    trouble: Arc<Trouble>,
}

impl Memory {
    fn disk(&self) -> MutexGuard<'_, MemoryDisk> {
        self.disk.lock().unwrap()
    }
}

fn fails(on: &AtomicBool, errno: i32) -> io::Result<()> {
    if on.load(Ordering::Relaxed) {
        Err(io::Error::from_raw_os_error(errno))
    } else {
        Ok(())
    }
}

const EIO: i32 = 5;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;

impl Storage for Memory {
    fn read_at(&self, at: FileOffset, to: &mut [u8]) -> io::Result<usize> {
        self.trouble.strike(EIO)?;
        let disk = self.disk();
        let from = usize::try_from(at.0).unwrap_or(usize::MAX);
        let from = from.min(disk.bytes.len());
        let n = to.len().min(disk.bytes.len() - from);
        to[..n].copy_from_slice(&disk.bytes[from..from + n]);
        Ok(n)
    }

    fn write_at(&self, at: FileOffset, from: &[u8]) -> io::Result<()> {
        self.trouble.strike(ENOSPC)?;
        fails(&self.trouble.full, ENOSPC)?;
        let mut disk = self.disk();
        let end = at.0 as usize + from.len();
        if end > disk.bytes.len() {
            disk.set_len(end);
        }
        disk.bytes[at.0 as usize..end].copy_from_slice(from);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.trouble.strike(EIO)?;
        fails(&self.trouble.broken, EIO)
    }

    fn loses_data_on_failed_flush(&self) -> bool {
        self.trouble.cached.load(Ordering::Relaxed)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.disk().bytes.len() as u64)
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        if size > self.bytes_max {
            return Err(io::Error::from_raw_os_error(EFBIG));
        }
        self.trouble.strike(ENOSPC)?;
        self.disk().set_len(size as usize);
        Ok(())
    }

    fn punch(&self, at: FileOffset, len: u64) -> io::Result<()> {
        let mut disk = self.disk();
        let len_there = disk.bytes.len() as u64;
        let (from, to) = (at.0.min(len_there), (at.0 + len).min(len_there));
        disk.bytes[from as usize..to as usize].fill(0);
        Ok(())
    }

    fn block_size(&self) -> u32 {
        512
    }
}

/// All files that were opened, by their paths. They are read once: what is done to them stays in memory.
#[derive(Default)]
pub struct Files {
    opened: HashMap<PathBuf, Arc<Memory>>,
    room: u64,
    pub trouble: Arc<Trouble>,
    /// What happens to the journal of the images that are opened from now on, if they are to have one.
    pub journal: Option<Arc<Trouble>>,
}

impl OpenFiles for Files {
    fn open(&mut self, file: OwnedFd, path: &Path, _: FileRole) -> io::Result<Arc<dyn Storage>> {
        Ok(self.memory(file.into(), path)?)
    }

    fn data_file(
        &mut self,
        image: &Path,
        named: Option<&str>,
        write: bool,
    ) -> io::Result<DataFile> {
        let path = image.with_file_name(named.expect("the tests name it"));
        let file = File::options().read(true).write(write).open(&path)?;
        let stat = file.metadata()?;
        Ok(DataFile {
            identity: (stat.dev(), stat.ino()),
            storage: self.memory(file, &path)?,
        })
    }
}

impl Files {
    /// With so many bytes behind the end of an image when it is first opened: for clusters that the I/O thread can take
    /// itself.
    pub fn with_room(room: u64) -> Self {
        Self {
            room,
            ..Self::default()
        }
    }

    fn memory(&mut self, mut file: File, path: &Path) -> io::Result<Arc<Memory>> {
        if let Some(memory) = self.opened.get(path) {
            return Ok(memory.clone());
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let memory = Arc::new(Memory {
            bytes_max: 2 * bytes.len() as u64 + GROWTH_MAX,
            disk: MemoryDisk::file(bytes),
            trouble: self.trouble.clone(),
        });
        self.opened.insert(path.to_owned(), memory.clone());
        Ok(memory)
    }

    /// The chain of an image, and its files by their numbers there.
    pub fn chain(&mut self, path: &Path, cache: Option<u64>) -> (Chain, Vec<Arc<Memory>>) {
        let path = path.canonicalize().unwrap();
        let allowed = AllowedDirectories::of_image(&path).unwrap();
        let is_new = !self.opened.contains_key(&path);
        let storage = self.memory(File::open(&path).unwrap(), &path).unwrap();
        if is_new {
            let size = storage.size().unwrap() + self.room;
            storage.disk().set_len(size as usize);
        }
        let top = TopFile {
            storage,
            path: &path,
            format: LayerFormat::Qcow2,
        };
        let options = ChainOptions {
            read_only: false,
            allow_corrupt: false,
            l2_cache_bytes: cache,
            punch: true,
            journal: self.journal.clone().map(|trouble| JournalFile {
                storage: Arc::new(Memory {
                    bytes_max: u64::MAX,
                    disk: MemoryDisk::file(Vec::new()),
                    trouble,
                }),
                identity: [7; 32],
                is_of_earlier_file: false,
                on_event: Box::new(drop),
            }),
            flush_changes: self.journal.is_some(),
            progress: &mut |_| ControlFlow::Continue(()),
        };
        let chain = Chain::open(top, &allowed, self, options).unwrap();
        let memory = |storage: &Arc<dyn Storage>| {
            let mut all = self.opened.values();
            let same = all.find(|m| std::ptr::addr_eq(Arc::as_ptr(m), Arc::as_ptr(storage)));
            same.cloned().expect("a file that was opened")
        };
        let files = chain.files().iter().map(memory).collect();
        (chain, files)
    }

    /// Writes all of them to another directory, under their names.
    pub fn save(&self, directory: &Path) {
        for (path, memory) in &self.opened {
            let name = path.file_name().unwrap();
            std::fs::write(directory.join(name), &memory.disk().bytes).unwrap();
        }
    }
}

/// A disk of such an image.
pub fn disk(chain: Arc<Chain>, files: usize, facts: DiskFacts, options: Options) -> Arc<Disk> {
    // The engine knows its files itself, but a disk has some.
    let file = || {
        (
            Arc::new(tempfile::tempfile().unwrap().into()),
            Backing::File,
            Aio::Auto,
        )
    };
    let (size, files) = (chain.size(), (0..files).map(|_| file()));
    let image = Image::Chain(chain);
    Arc::new(Disk::new(
        "image".into(),
        image,
        files,
        facts,
        size,
        "",
        options,
    ))
}
