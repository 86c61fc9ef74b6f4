//! Opens the file or block device that holds a disk and determines its properties.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use block::{Aio, Backing, CacheMode, DiskFacts};
use rustix::fs::{AtFlags, FallocateFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use thiserror::Error;
use tracing::{info, warn};

use crate::lock;
use crate::submission::Submission;

/// The largest logical block size that a disk may require of a guest, and a buffer alignment that every
/// backing accepts.
const BLOCK_MAX: u32 = 4096;

/// A disk's file or block device, open and, depending on [`Locking`], locked.
pub struct DiskFile {
    file: Arc<OwnedFd>,
    backing: Backing,
    identity: Identity,
    found: Metadata,
    facts: DiskFacts,
    cached: bool,
    submission: Submission,
}

/// Identifies a file or device independently of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The device that holds the file, or a marker if the object is itself a device.
    pub device: u64,
    /// The inode number of the file, or the number of the device.
    pub inode: u64,
}

impl Identity {
    /// The identity of the file with this metadata.
    pub fn of(file: &fs::Metadata) -> Self {
        // Several device nodes may refer to one device.
        let (device, inode) = if file.file_type().is_block_device() {
            (u64::MAX, file.rdev())
        } else {
            (file.dev(), file.ino())
        };
        Self { device, inode }
    }

    /// The identity of an open file.
    ///
    /// # Errors
    /// The kernel does not return the file's metadata.
    pub fn of_fd(file: impl AsFd) -> io::Result<Self> {
        let file = File::from(file.as_fd().try_clone_to_owned()?);
        Ok(Self::of(&file.metadata()?))
    }
}

/// When a file is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locking {
    /// When it is opened.
    Now,
    /// It is already locked, through this descriptor.
    Held,
    /// When it is opened, for reading: this process holds a write lock through another descriptor and will
    /// release it. When it does, no other process can obtain a write lock.
    Handover,
    /// Not at all: the file is only inspected, and another process may be writing to it.
    None,
}

/// Why a file cannot be served. Each message says what to do next.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The file does not exist.
    #[error(
        "{0}: no such file; check the path, and that its file system is mounted. Only if this is to be a \
        new, empty disk, create the file first ('qemu-img create')"
    )]
    Missing(String),
    /// ringdisk has no permission to open it.
    #[error("{path}: permission denied{}; {}", if *.write { " for writing" } else { "" }, denied(*.write))]
    Permission {
        path: String,
        /// Whether it was opened for writing.
        write: bool,
    },
    /// Its file system or device is read-only.
    #[error("{0}: its file system or device is read-only; serve it with readonly=on")]
    ReadOnly(String),
    /// It is neither a regular file nor a block device.
    #[error("{0}: is {1}; a disk is a regular file or a block device")]
    Kind(String, &'static str),
    /// The block device is in use by the host.
    #[error(
        "{0}: the block device is in use on this host (mounted, or part of an LVM or RAID volume); \
        'lsblk {0}' shows by what, and it must be released first"
    )]
    InUse(String),
    /// Another process holds a lock on it.
    #[error(
        "{0}: in use by another process (another ringdisk, or QEMU); stop that one first, \
        or serve it with readonly=on if the other only reads"
    )]
    Locked(String),
    /// The size is not a multiple of the block size.
    #[error(
        "{path}: size {size} is not a multiple of {unit} bytes; check that it is a disk image. If so, \
        'truncate -s %{unit} {path}' extends it{hint}"
    )]
    Size {
        path: String,
        size: u64,
        /// The unit that its size must be a multiple of.
        unit: u32,
        /// An alternative remedy, or an empty string.
        hint: &'static str,
    },
    /// The file is empty.
    #[error(
        "{0}: is empty; if it is being copied or restored, wait for that to end; for a new disk, set the size \
        with 'truncate -s 10G {0}'"
    )]
    Empty(String),
    /// The block device has no size.
    #[error(
        "{0}: the block device has no size; check that it is set up and its medium is inserted"
    )]
    EmptyDevice(String),
    /// The file system does not support O_DIRECT.
    #[error(
        "{0}: the file system does not support O_DIRECT, which cache=none needs; \
        use cache=writeback, or move the file to one that does (ext4, XFS)"
    )]
    Direct(String),
    /// Another error of the kernel.
    #[error("{0}: cannot {1}: {cause}", cause = block::explain(.2, ""))]
    Io(String, &'static str, io::Error),
}

impl DiskFile {
    /// Opens and locks a file or block device of any size.
    ///
    /// # Errors
    /// The file cannot be served as requested; the error gives the cause and the next step.
    pub fn open(path: &Path, cache: CacheMode, read_only: bool) -> Result<Self, OpenError> {
        Self::open_with(path, cache, read_only, Locking::Now)
    }

    /// Opens a file or block device of any size, and locks it as `locking` says.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_with(
        path: &Path,
        cache: CacheMode,
        read_only: bool,
        locking: Locking,
    ) -> Result<Self, OpenError> {
        let name = path.display().to_string();
        // The type is checked before the file is opened, because opening a FIFO or a tape has side effects.
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
            // The kernel refuses this flag while the device is mounted or part of another device.
            flags |= libc::O_EXCL;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(!read_only).custom_flags(flags);
        let file = open_patiently(&options, path, &name)
            .map_err(|e| open_failed(&name, e, cache, read_only))?;

        Self::of(file, backing, name, cache, read_only, locking)
    }

    /// Takes over a file that another process or component has opened, and locks it as `locking` says.
    ///
    /// # Errors
    /// The file cannot be served as requested; the error gives the cause and the next step.
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
        let backing = if kind.is_block_device() {
            Backing::BlockDevice
        } else {
            Backing::File
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
        // Without O_NOATIME, the kernel considers updating the access time for every read. Only the file's
        // owner may set the flag; therefore it is attempted here and not passed to open.
        if let Ok(flags) = rustix::fs::fcntl_getfl(&file) {
            let _ = rustix::fs::fcntl_setfl(&file, flags | OFlags::NOATIME);
        }

        let locked = match locking {
            Locking::Now => lock_patiently(&file, &name, !read_only),
            Locking::Handover => lock::share(file.as_fd()).map(|()| true),
            Locking::Held | Locking::None => Ok(true),
        };
        match locked {
            Ok(true) => {}
            Ok(false) => return Err(OpenError::Locked(name)),
            // QEMU also continues without locks if a file system does not support them (some NFS mounts).
            Err(e) => {
                warn!("{name}: cannot be locked ({e}); a second writer would not be detected")
            }
        }
        let found = file.metadata();
        let found = found.map_err(|e| OpenError::Io(name.clone(), "examine it", e))?;
        let facts = match backing {
            Backing::File => regular_facts(&file, cache, read_only, locking),
            Backing::BlockDevice => device_facts(&file, cache, read_only),
        }
        .map_err(|e| OpenError::Io(name.clone(), "read its block size", e))?;
        let identity = Identity::of_fd(&file);
        let identity = identity.map_err(|e| OpenError::Io(name, "read its identity", e))?;
        let submission = Submission::of(file.as_fd(), backing);
        Ok(Self {
            file: Arc::new(file.into()),
            backing,
            identity,
            found,
            facts,
            cached: !cache.direct(),
            submission,
        })
    }

    /// The file's descriptor. While any clone of it exists, the file stays open, and also locked unless the
    /// lock was released.
    pub fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// Releases the lock before the descriptor and its last duplicate are closed. All written data must
    /// already be durable.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn unlock(&self) -> io::Result<()> {
        self.drop_cached();
        match lock::release(self.file.as_fd()) {
            // The file system has no locks; a log line has already said so.
            Err(e) if e.raw_os_error() == Some(libc::ENOLCK) => Ok(()),
            result => result,
        }
    }

    /// Checks whether a write lock could be obtained in place of the current lock.
    ///
    /// # Errors
    /// Another process holds a conflicting lock.
    pub fn check_lock(&self, name: &str) -> Result<(), OpenError> {
        match lock::is_free(self.file.as_fd(), true) {
            Ok(false) => Err(OpenError::Locked(name.into())),
            // A file system without locks is treated as unlocked, as in `of`.
            Ok(true) | Err(_) => Ok(()),
        }
    }

    /// Whether another process reads the file and keeps everybody from writing to it, as its images do that build on it. A file
    /// system without locks does not tell.
    pub fn is_only_read(&self) -> bool {
        lock::is_only_read(self.file.as_fd()).unwrap_or(false)
    }

    /// Whether reads and writes go through the page cache.
    pub fn is_cached(&self) -> bool {
        self.cached
    }

    /// Drops the file's pages from the page cache, so that data written on another host is read again. This
    /// host's page cache is not notified of such writes.
    pub fn drop_cached(&self) {
        if self.cached {
            let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }

    /// The file's size in bytes, checked for use as a raw disk: it is not zero and is a multiple of the block
    /// size.
    ///
    /// # Errors
    /// The size is not valid; the error says what to do.
    pub fn raw_size(&self, path: &Path) -> Result<u64, OpenError> {
        let (name, facts) = (path.display().to_string(), self.facts);
        let size = self.size();
        let size = size.map_err(|e| OpenError::Io(name.clone(), "read its size", e))?;
        if size == 0 {
            return Err(match self.backing {
                Backing::File => OpenError::Empty(name),
                Backing::BlockDevice => OpenError::EmptyDevice(name),
            });
        }
        if !size.is_multiple_of(u64::from(facts.logical_block)) {
            let hint = if facts.logical_block > 512 {
                ", or use cache=writeback, which needs only 512"
            } else {
                ""
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

    /// Properties of the file that never change while it is open.
    pub fn facts(&self) -> DiskFacts {
        self.facts
    }

    /// The file's identity, determined when it was opened.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// What the file was like once it was locked.
    pub fn found(&self) -> &Metadata {
        &self.found
    }

    /// A current path of the file, if the kernel knows one; it may differ from the path at which it was
    /// opened.
    pub fn current_path(&self) -> Option<PathBuf> {
        let path = fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd())).ok()?;
        let there = Identity::of(&fs::metadata(&path).ok()?);
        (there == self.identity).then_some(path)
    }

    /// The same where this user may not enter the directory.
    pub fn name(&self) -> Option<PathBuf> {
        let path = fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd())).ok()?;
        let there = fs::metadata(&path);
        let is_hidden = there.is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied);
        self.current_path().or(is_hidden.then_some(path))
    }

    /// A reference to the file that does not keep it open for I/O, nor locked: for its times after it has been closed.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn reference(&self) -> io::Result<File> {
        let mut options = File::options();
        let options = options.read(true).custom_flags(libc::O_PATH);
        options.open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    /// Whether it is a regular file or a block device.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// The method to [attach](block::Engine::attach) the file with, if the operator wants this one: threads,
    /// if another method could make all disks of an I/O thread wait for the server that has the file.
    pub fn method(&self, wanted: Aio) -> Aio {
        self.submission.method(wanted)
    }

    /// The current size in bytes.
    ///
    /// # Errors
    /// The kernel does not return the size.
    pub fn size(&self) -> io::Result<u64> {
        Ok(rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0))?)
    }

    /// Makes every completed write durable, and waits until it is.
    ///
    /// # Errors
    /// The writes could not be made durable.
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

/// How long to wait for a file that a killed process still holds. The kernel releases it after it has
/// finished the process's I/O and torn down its ring; only then is it safe to continue.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSES: u32 = 60;

/// Opens the file. If it is a block device that another process holds, retries for a few seconds and then
/// gives up.
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

/// Takes the lock; retries for a few seconds and then gives up.
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
        info!("{name}: is in use; waiting up to {all:?} for its release");
    }
    thread::sleep(PAUSE);
}

/// What to do about a file to which access is denied.
fn denied(write: bool) -> String {
    let access = if write { "read and write" } else { "read" };
    if rustix::process::geteuid().is_root() {
        format!(
            "ringdisk runs as root: either the server of a network file system refuses root, or the sandbox does, \
             because a directory was mounted or replaced after ringdisk had started; then restart ringdisk. \
             Otherwise let root {access} it"
        )
    } else {
        let user = rustix::process::geteuid().as_raw();
        format!(
            "ringdisk runs as user {user}: let that user {access} it (chown {user}) and pass its directories, or run ringdisk as a \
             user who can"
        )
    }
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
    let (logical_block, address_alignment) = if cache.direct() {
        direct_alignment(file)?
    } else {
        (512, 1)
    };
    let fs_block = (stat.blksize() as u32)
        .next_power_of_two()
        .clamp(512, BLOCK_MAX);
    // The device under the file system, if sysfs lists one.
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
    let (logical_block, address_alignment) = if cache.direct() {
        (logical, direct_alignment(file)?.1)
    } else {
        (logical, 1)
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

/// The alignment that O_DIRECT requires of offsets and of buffers, in bytes.
fn direct_alignment(file: &File) -> io::Result<(u32, u32)> {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(s) = stat
        && s.stx_dio_offset_align != 0
    {
        let offset = s.stx_dio_offset_align.max(512);
        return Ok((offset, s.stx_dio_mem_align.max(1)));
    }
    // Before Linux 6.1: the smallest read that succeeds. A buffer that is aligned like an offset is always
    // valid.
    let unit = [512u32, 1024, 2048, BLOCK_MAX].into_iter().find(|&unit| {
        let mut buffer = vec![0u8; 2 * BLOCK_MAX as usize];
        let skip = buffer.as_ptr().align_offset(BLOCK_MAX as usize);
        let part = &mut buffer[skip..skip + unit as usize];
        rustix::io::pread(file, part, 0).is_ok()
    });
    unit.map(|unit| (unit, unit))
        .ok_or_else(|| io::Error::other("no read with O_DIRECT succeeds"))
}

/// File systems of Linux that punch holes in every file, by the numbers that `statfs(2)` has for them: ext4, XFS, Btrfs, tmpfs,
/// F2FS, bcachefs and ZFS.
const PUNCHERS: &[u64] = &[
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0xf2f5_2010,
    0xca45_1a4e,
    0x2fc1_2fc1,
];

/// Whether the file system can punch holes. Of those that are not known, this tests it, beyond the end of the file, where there
/// is no data, and far beyond it if another process may be extending the file.
fn can_punch(file: &File, size: u64, locking: Locking) -> bool {
    const FAR: u64 = 1 << 40;
    // The test changes the time of the file, by which others tell whether somebody has written to it.
    let kind = rustix::fs::fstatfs(file).map(|facts| facts.f_type as u64);
    if kind.is_ok_and(|kind| PUNCHERS.contains(&kind)) {
        return true;
    }
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let end = size.next_multiple_of(u64::from(BLOCK_MAX));
    let beyond = match locking {
        Locking::Now => end,
        Locking::Held | Locking::Handover | Locking::None => end + FAR,
    };
    let before = file.metadata();
    let punched = rustix::fs::fallocate(file, flags, beyond, u64::from(BLOCK_MAX));
    if let (Ok(before), Locking::Now) = (before, locking) {
        // Nothing has changed, and those who compare times are to see that. Without a lock, somebody may write meanwhile.
        let last_modification = rustix::fs::Timespec {
            tv_sec: before.mtime(),
            tv_nsec: before.mtime_nsec(),
        };
        let last_access = rustix::fs::Timespec {
            tv_sec: 0,
            tv_nsec: rustix::fs::UTIME_OMIT,
        };
        let times = rustix::fs::Timestamps {
            last_access,
            last_modification,
        };
        // Only the owner may.
        let _ = rustix::fs::futimens(file, &times);
    }
    match punched {
        // The file system does not allow files of this length. If it cannot punch holes, the guest gets an
        // error at its first discard.
        Err(Errno::FBIG) => true,
        result => result.is_ok(),
    }
}

/// The sysfs directory of a device's request queue; a partition uses the queue of its disk.
fn queue_directory(device: u64) -> String {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let node = format!("/sys/dev/block/{major}:{minor}");
    if Path::new(&node).join("partition").exists() {
        format!("{node}/../queue")
    } else {
        format!("{node}/queue")
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

    /// The test owns the file, so the kernel must have accepted O_NOATIME, and O_DIRECT must have been kept.
    #[test]
    fn reads_of_our_own_file_leave_no_time_behind_and_stay_direct() {
        // The directory of the build: the file system for temporary files may not support O_DIRECT.
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
