//! Opening the file or block device that holds a disk, and finding out what is true of it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use block::{Backing, CacheMode, DiskFacts};
use rustix::fs::{AtFlags, FallocateFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use thiserror::Error;
use tracing::{info, warn};

use crate::lock;

/// The largest unit of address that a disk may ask of a guest, and the buffer alignment that any
/// backing accepts.
const BLOCK_MAX: u32 = 4096;

/// A disk's file or block device, open, and locked unless it is said otherwise.
pub struct DiskFile {
    file: Arc<OwnedFd>,
    backing: Backing,
    identity: Identity,
    facts: DiskFacts,
    cached: bool,
}

/// Which file or device something is, under whatever name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The device that the file is on, or a marker for one that is a device itself.
    pub device: u64,
    /// The number of the file there, or of the device.
    pub inode: u64,
}

impl Identity {
    /// Of what these are the facts of.
    pub fn of(file: &fs::Metadata) -> Self {
        // Any number of nodes lead to one device.
        let (device, inode) = match file.file_type().is_block_device() {
            true => (u64::MAX, file.rdev()),
            false => (file.dev(), file.ino()),
        };
        Self { device, inode }
    }

    /// Of what is open.
    ///
    /// # Errors
    /// The kernel cannot say.
    pub fn of_open(file: impl AsFd) -> io::Result<Self> {
        let file = File::from(file.as_fd().try_clone_to_owned()?);
        Ok(Self::of(&file.metadata()?))
    }
}

/// When a file is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locking {
    /// As it is opened.
    Now,
    /// It is locked already, through this very descriptor.
    Held,
    /// As it is opened, to be read: this process has it locked through another descriptor to write to it, and is to give that
    /// up. By then nobody else can get hold of it to write.
    Handover,
    /// Not at all: it is only looked at, and somebody else may be writing to it.
    Later,
}

/// Why a file cannot be served. Each says what to do next.
#[derive(Debug, Error)]
pub enum OpenError {
    /// It is not there.
    #[error("{0}: no such file; is the path right, and its file system mounted? For a disk that is to be new and empty, \
        'qemu-img create -f {format} {0} 10G' makes one",
        format = if .0.ends_with(".qcow2") { "qcow2" } else { "raw" })]
    Missing(String),
    /// We may not open it.
    #[error("{path}: permission denied{}; let this user read{} it, or run as one who may",
        if *.write { " for writing" } else { "" }, if *.write { " and write" } else { "" })]
    Permission {
        /// The file.
        path: String,
        /// It was to be written.
        write: bool,
    },
    /// It lies where nothing can be written.
    #[error("{0}: its file system or device is read-only; serve it with readonly=on")]
    ReadOnly(String),
    /// It is something else than a disk can be.
    #[error("{0}: is {1}; a disk is a regular file or a block device")]
    Kind(String, &'static str),
    /// The block device is in use by the host.
    #[error(
        "{0}: the block device is in use on this host (mounted, or part of an LVM or RAID volume); \
        'lsblk {0}' shows by what, and it must be released first"
    )]
    InUse(String),
    /// Somebody else has locked it.
    #[error(
        "{0}: in use by another process (another ringdisk, or QEMU); stop that one first, \
        or serve it with readonly=on if the other only reads"
    )]
    Locked(String),
    /// The size does not fit.
    #[error(
        "{path}: size {size} is not a multiple of {unit} bytes; is it a disk at all? If so, \
        'truncate -s %{unit} {path}' makes it longer{hint}"
    )]
    Size {
        /// The file.
        path: String,
        /// Its size in bytes.
        size: u64,
        /// What it must be a multiple of.
        unit: u32,
        /// Another way out, if there is one.
        hint: &'static str,
    },
    /// It is empty.
    #[error(
        "{0}: is empty; has a copy or a restore not ended, or is it to be a new disk? Of that, 'truncate -s 10G {0}' \
        sets the size"
    )]
    Empty(String),
    /// It is a device without any.
    #[error("{0}: the block device has no size; is it set up, and its medium there?")]
    EmptyDevice(String),
    /// The file system has no O_DIRECT.
    #[error(
        "{0}: the file system does not support O_DIRECT, which cache=none needs; \
        use cache=writeback, or move the file to one that does (ext4, XFS)"
    )]
    Direct(String),
    /// Anything else that the kernel said.
    #[error("{0}: cannot {1}: {cause}", cause = block::explain(.2, ""))]
    Io(String, &'static str, io::Error),
}

impl DiskFile {
    /// Opens and locks a file or block device of any size.
    ///
    /// # Errors
    /// It cannot be served as asked; the error says why and what to do.
    pub fn open(path: &Path, cache: CacheMode, read_only: bool) -> Result<Self, OpenError> {
        Self::open_and(path, cache, read_only, Locking::Now)
    }

    /// Opens a file or block device of any size, and locks it now or not yet.
    ///
    /// # Errors
    /// As above.
    pub fn open_and(
        path: &Path,
        cache: CacheMode,
        read_only: bool,
        locking: Locking,
    ) -> Result<Self, OpenError> {
        let name = path.display().to_string();
        // Looked at before it is opened: opening a FIFO or a tape has effects.
        let kind = fs::metadata(path)
            .map_err(|e| open_failed(&name, e, cache, read_only))?
            .file_type();
        let backing = match kind {
            k if k.is_file() => Backing::File,
            k if k.is_block_device() => Backing::BlockDevice,
            k if k.is_dir() => return Err(OpenError::Kind(name, "a directory")),
            k if k.is_char_device() => return Err(OpenError::Kind(name, "a character device")),
            _ => return Err(OpenError::Kind(name, "a socket or a FIFO")),
        };
        let mut flags = libc::O_CLOEXEC | libc::O_NOCTTY;
        if cache.direct() {
            flags |= libc::O_DIRECT;
        }
        if backing == Backing::BlockDevice && !read_only && locking == Locking::Now {
            // The kernel refuses this while the device is mounted or part of another one.
            flags |= libc::O_EXCL;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(!read_only).custom_flags(flags);
        let file = open_patiently(&options, path, &name)
            .map_err(|e| open_failed(&name, e, cache, read_only))?;

        Self::of(file, backing, name, cache, read_only, locking)
    }

    /// Makes a disk's file of one that somebody else has opened, and locks it.
    ///
    /// # Errors
    /// It cannot be served as asked; the error says why and what to do.
    pub fn adopt(
        file: OwnedFd,
        path: &Path,
        cache: CacheMode,
        read_only: bool,
        locking: Locking,
    ) -> Result<Self, OpenError> {
        let name = path.display().to_string();
        let file = File::from(file);
        let kind = file
            .metadata()
            .map_err(|e| open_failed(&name, e, cache, read_only))?
            .file_type();
        let backing = match kind.is_block_device() {
            true => Backing::BlockDevice,
            false => Backing::File,
        };
        let mut flags = rustix::fs::fcntl_getfl(&file).unwrap_or(OFlags::empty());
        flags.remove(OFlags::NONBLOCK);
        flags.set(OFlags::DIRECT, cache.direct());
        rustix::fs::fcntl_setfl(&file, flags)
            .map_err(|e| open_failed(&name, e.into(), cache, read_only))?;
        Self::of(file, backing, name, cache, read_only, locking)
    }

    fn of(
        file: File,
        backing: Backing,
        name: String,
        cache: CacheMode,
        read_only: bool,
        locking: Locking,
    ) -> Result<Self, OpenError> {
        // The time of the last read would be looked at for every read. Only the owner may switch that
        // off, so that it is tried, and not asked for when opening.
        if let Ok(flags) = rustix::fs::fcntl_getfl(&file) {
            let _ = rustix::fs::fcntl_setfl(&file, flags | OFlags::NOATIME);
        }

        let locked = match locking {
            Locking::Now => lock_patiently(&file, &name, !read_only),
            Locking::Handover => lock::share(file.as_fd()).map(|()| true),
            Locking::Held | Locking::Later => Ok(true),
        };
        match locked {
            Ok(true) => {}
            Ok(false) => return Err(OpenError::Locked(name)),
            // QEMU goes on without locks where a file system has none (some NFS mounts).
            Err(e) => warn!("{name}: cannot be locked ({e}); nothing keeps a second writer away"),
        }
        let facts = match backing {
            Backing::File => regular_facts(&file, cache, read_only, locking),
            Backing::BlockDevice => device_facts(&file, cache, read_only),
        }
        .map_err(|e| OpenError::Io(name.clone(), "find out its block size", e))?;
        let identity = Identity::of_open(&file);
        let identity = identity.map_err(|e| OpenError::Io(name, "find out which it is", e))?;
        Ok(Self {
            file: Arc::new(file.into()),
            backing,
            identity,
            facts,
            cached: !cache.direct(),
        })
    }

    /// Its descriptor. As long as anything holds it, the file is open, and locked unless that was given up.
    pub fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// Gives the lock up, before its descriptor and the last duplicate of it are closed. All that was written must be
    /// durable by now.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn unlock(&self) -> io::Result<()> {
        self.forget_cached();
        match lock::release(self.file.as_fd()) {
            // There was none, and a line in the log that says so.
            Err(e) if e.raw_os_error() == Some(libc::ENOLCK) => Ok(()),
            result => result,
        }
    }

    /// Whether a lock to write could be had in place of the one that this has.
    ///
    /// # Errors
    /// Somebody else has one that conflicts.
    pub fn check_lock(&self, name: &str) -> Result<(), OpenError> {
        match lock::is_free(self.file.as_fd(), true) {
            Ok(false) => Err(OpenError::Locked(name.into())),
            // Without locks, as without one: see where they are taken.
            Ok(true) | Err(_) => Ok(()),
        }
    }

    /// Whether it is read and written through the page cache.
    pub fn is_cached(&self) -> bool {
        self.cached
    }

    /// Has what was written elsewhere read anew: nobody tells our page cache.
    pub fn forget_cached(&self) {
        if self.cached {
            let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }

    /// Its size in bytes, as that of a raw disk: it has some, and ends with a block.
    ///
    /// # Errors
    /// It is no such size, and what to do.
    pub fn raw_size(&self, path: &Path) -> Result<u64, OpenError> {
        let (name, facts) = (path.display().to_string(), self.facts);
        let size = self.size();
        let size = size.map_err(|e| OpenError::Io(name.clone(), "find out its size", e))?;
        if size == 0 {
            return Err(match self.backing {
                Backing::File => OpenError::Empty(name),
                Backing::BlockDevice => OpenError::EmptyDevice(name),
            });
        }
        if !size.is_multiple_of(u64::from(facts.logical_block)) {
            let hint = match facts.logical_block > 512 {
                true => ", or use cache=writeback, which needs only 512",
                false => "",
            };
            return Err(OpenError::Size {
                path: name,
                size,
                unit: facts.logical_block,
                hint,
            });
        }
        Ok(size)
    }

    /// What never changes about it.
    pub fn facts(&self) -> DiskFacts {
        self.facts
    }

    /// Which it is; found out when it was opened.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// A path at which it is now, whatever it was called when it was opened, as far as the kernel knows one.
    pub fn path_now(&self) -> Option<PathBuf> {
        let path = fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd())).ok()?;
        let there = Identity::of(&fs::metadata(&path).ok()?);
        (there == self.identity).then_some(path)
    }

    /// File or block device.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Its size in bytes, now.
    ///
    /// # Errors
    /// The kernel cannot say.
    pub fn size(&self) -> io::Result<u64> {
        Ok(rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0))?)
    }

    /// Makes every completed write durable, waiting for it.
    ///
    /// # Errors
    /// It could not be made durable.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::io::retry_on_intr(|| {
            rustix::fs::fdatasync(&self.file)
        })?)
    }
}

impl AsFd for DiskFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// How long a file may still be held by a process that was killed: until the kernel has finished its I/O
/// and taken down its ring, and only then is it safe to go on.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSES: u32 = 60;

/// Opens it, or gives up after a few seconds if it is a block device that somebody else holds.
fn open_patiently(options: &OpenOptions, path: &Path, name: &str) -> io::Result<File> {
    for pause in 0..PAUSES {
        match options.open(path) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
            result => return result,
        }
        wait_for_release(name, pause);
    }
    options.open(path)
}

/// Takes the lock, or gives up after a few seconds.
fn lock_patiently(file: &File, name: &str, writable: bool) -> io::Result<bool> {
    for pause in 0..PAUSES {
        if lock::acquire(file.as_fd(), writable)? {
            return Ok(true);
        }
        wait_for_release(name, pause);
    }
    Ok(false)
}

fn wait_for_release(name: &str, pause: u32) {
    if pause == 0 {
        let all = PAUSE * PAUSES;
        info!("{name}: is in use; waiting {all:?} for whoever holds it to go");
    }
    thread::sleep(PAUSE);
}

fn open_failed(name: &str, e: io::Error, cache: CacheMode, read_only: bool) -> OpenError {
    let path = name.to_owned();
    match e.raw_os_error() {
        Some(libc::ENOENT) => OpenError::Missing(path),
        Some(libc::EROFS) => OpenError::ReadOnly(path),
        Some(libc::EACCES | libc::EPERM) => OpenError::Permission {
            path,
            write: !read_only,
        },
        Some(libc::EBUSY) => OpenError::InUse(path),
        Some(libc::EINVAL) if cache.direct() => OpenError::Direct(path),
        _ => OpenError::Io(path, "open it", e),
    }
}

fn regular_facts(
    file: &File,
    cache: CacheMode,
    read_only: bool,
    locking: Locking,
) -> io::Result<DiskFacts> {
    let stat = file.metadata()?;
    let (logical_block, address_alignment) = match cache.direct() {
        true => direct_alignment(file)?,
        false => (512, 1),
    };
    let fs_block = (stat.blksize() as u32)
        .next_power_of_two()
        .clamp(512, BLOCK_MAX);
    // The device below, where the file system stands on one that sysfs names.
    let device = PathBuf::from(queue_directory(stat.dev()));
    let number = |name| read_number(&device.join(name));
    let physical_block = number("physical_block_size").unwrap_or(512).max(fs_block);
    let discard = !read_only && can_punch(file, stat.size(), locking);
    Ok(DiskFacts {
        logical_block,
        physical_block: physical_block.max(logical_block),
        optimal_io: number("optimal_io_size").unwrap_or(0),
        address_alignment,
        length_alignment: if cache.direct() { logical_block } else { 1 },
        discard_granularity: if discard {
            fs_block.max(logical_block)
        } else {
            0
        },
        read_only,
    })
}

fn device_facts(file: &File, cache: CacheMode, read_only: bool) -> io::Result<DiskFacts> {
    let logical = rustix::fs::ioctl_blksszget(file)?;
    let physical = rustix::fs::ioctl_blkpbszget(file)?;
    let device = PathBuf::from(queue_directory(file.metadata()?.rdev()));
    let number = |name| read_number(&device.join(name));
    let (logical_block, address_alignment) = match cache.direct() {
        true => (logical, direct_alignment(file)?.1),
        false => (logical, 1),
    };
    let can_discard = !read_only && number("discard_max_bytes").unwrap_or(0) > 0;
    let granularity = number("discard_granularity").unwrap_or(0).max(logical);
    Ok(DiskFacts {
        logical_block,
        physical_block: physical.max(logical_block),
        optimal_io: number("optimal_io_size").unwrap_or(0),
        address_alignment,
        length_alignment: if cache.direct() { logical_block } else { 1 },
        discard_granularity: if can_discard { granularity } else { 0 },
        read_only,
    })
}

/// What O_DIRECT asks of offsets and of buffers, in bytes.
fn direct_alignment(file: &File) -> io::Result<(u32, u32)> {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(s) = stat
        && s.stx_dio_offset_align != 0
    {
        let offset = s.stx_dio_offset_align.max(512);
        return Ok((offset, s.stx_dio_mem_align.max(1)));
    }
    // Before Linux 6.1: what reads at all. A buffer aligned like an offset is always good.
    let unit = [512u32, 1024, 2048, BLOCK_MAX].into_iter().find(|&unit| {
        let mut buffer = vec![0u8; 2 * BLOCK_MAX as usize];
        let skip = buffer.as_ptr().align_offset(BLOCK_MAX as usize);
        let part = &mut buffer[skip..skip + unit as usize];
        rustix::io::pread(file, part, 0).is_ok()
    });
    unit.map(|unit| (unit, unit))
        .ok_or_else(|| io::Error::other("no read with O_DIRECT succeeds"))
}

/// Whether the file system can punch holes: tried beyond the end, where there is nothing to lose. While
/// somebody else may be making the file longer, that is far beyond.
fn can_punch(file: &File, size: u64, locking: Locking) -> bool {
    const FAR: u64 = 1 << 40;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let end = size.next_multiple_of(u64::from(BLOCK_MAX));
    let beyond = match locking {
        Locking::Now => end,
        Locking::Held | Locking::Handover | Locking::Later => end + FAR,
    };
    match rustix::fs::fallocate(file, flags, beyond, u64::from(BLOCK_MAX)) {
        // Files may not be so long here. If it cannot, the guest is told at its first discard.
        Err(Errno::FBIG) => true,
        result => result.is_ok(),
    }
}

/// Where sysfs describes the request queue of a device; a partition has its disk's.
fn queue_directory(device: u64) -> String {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let node = format!("/sys/dev/block/{major}:{minor}");
    match Path::new(&node).join("partition").exists() {
        true => format!("{node}/../queue"),
        false => format!("{node}/queue"),
    }
}

fn read_number(path: &Path) -> Option<u32> {
    let text = fs::read_to_string(path).ok()?;
    let number: u64 = text.trim().parse().ok()?;
    Some(u32::try_from(number).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// We own the file, so that the kernel must have agreed, and O_DIRECT must have outlived it.
    #[test]
    fn reads_of_our_own_file_leave_no_time_behind_and_stay_direct() {
        // Where the test was built: the file system for temporary files may have no O_DIRECT.
        let built = std::env::current_exe().unwrap();
        let directory = tempfile::tempdir_in(built.parent().unwrap()).unwrap();
        let path = directory.path().join("disk.raw");
        fs::write(&path, [0; 4096]).unwrap();
        for cache in [CacheMode::None, CacheMode::Writeback] {
            let disk = match DiskFile::open(&path, cache, false) {
                Err(e @ OpenError::Direct(_)) => {
                    println!("skipped: {e}");
                    continue;
                }
                disk => disk.unwrap(),
            };
            let flags = rustix::fs::fcntl_getfl(&disk).unwrap();
            assert!(flags.contains(OFlags::NOATIME));
            assert_eq!(flags.contains(OFlags::DIRECT), cache.direct());
        }
    }
}
