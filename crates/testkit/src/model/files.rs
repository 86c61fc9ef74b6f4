//! The files of a case: how they are made, copied and restored, and file systems that can become full or lose their
//! power.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::config::{Image, Journal, Place};
use super::failure::{Failure, Outcome, hang};
use super::oracle::{Oracle, SECTOR};
use super::process::run;
use crate::qemu_img;
use crate::random::Random;
use crate::storage::Storage;

/// The size in bytes of a tmpfs for an image.
const IMAGE_ROOM: u64 = 96 << 20;

/// A tmpfs; dropping this unmounts it.
pub struct Mount(PathBuf);

impl Mount {
    fn tmpfs(at: &Path, bytes: u64) -> io::Result<Self> {
        fs::create_dir_all(at)?;
        let place = CString::new(at.as_os_str().as_bytes()).map_err(io::Error::other)?;
        let options = CString::new(format!("size={bytes}")).map_err(io::Error::other)?;
        // SAFETY: four strings that outlive the call.
        let failed = unsafe {
            libc::mount(
                c"ringdisk-model".as_ptr(),
                place.as_ptr(),
                c"tmpfs".as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV,
                options.as_ptr().cast(),
            )
        };
        if failed != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(at.into()))
    }
}

/// A loop device; dropping this detaches it.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn new(file: &Path) -> io::Result<Self> {
        let output = Command::new("losetup")
            .args(["-f", "--show"])
            .arg(file)
            .output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(io::Error::other(said.into_owned()));
        }
        let name = String::from_utf8_lossy(&output.stdout);
        Ok(Self(name.trim().into()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // A killed process may still have it open; then the kernel detaches it afterwards.
        let _ = Command::new("losetup").arg("-d").arg(&self.0).output();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let place = CString::new(self.0.as_os_str().as_bytes()).unwrap_or_default();
        // SAFETY: a string that outlives the call.
        unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Whether file systems can be mounted here, which needs root and `/dev/fuse`.
pub fn can_mount(directory: &Path) -> bool {
    let at = directory.join("mount");
    let mounted = Mount::tmpfs(&at, 64 << 10).and_then(|_| {
        let fuse = directory.join("fuse");
        fs::create_dir_all(&fuse)?;
        Storage::mount(&fuse, vec![0; SECTOR], 0).map(drop)
    });
    mounted.is_ok()
}

/// Whether there are loop devices here.
pub fn has_loop_devices(directory: &Path) -> bool {
    let file = directory.join("device");
    fs::write(&file, [0; 4096]).is_ok() && LoopDevice::new(&file).is_ok()
}

pub struct Files {
    pub directory: PathBuf,
    /// The image's current path.
    pub image: PathBuf,
    pub data: Option<PathBuf>,
    /// The image was made with a data file.
    pub has_data_file: bool,
    pub qcow2: bool,
    /// The image's initial backing file, and its format.
    pub backing: Option<(PathBuf, &'static str)>,
    pub storage: Option<Storage>,
    /// The directory of the journals.
    pub runtime: PathBuf,
    names: u64,
    journal_mount: Option<Mount>,
    image_mount: Option<Mount>,
    device: Option<LoopDevice>,
    has_just_its_space: bool,
}

impl Files {
    /// Makes an image, and the files and mounts that it needs.
    pub fn make(directory: &Path, image: &Image) -> Outcome<Self> {
        let disks = directory.join("disks");
        let runtime = directory.join("run");
        for made in [&disks, &runtime] {
            fs::create_dir_all(made)?;
        }
        let mount = |at: &Path, bytes| {
            Mount::tmpfs(at, bytes).map_err(|e| Failure::new("skipped", format!("tmpfs: {e}")))
        };
        let mut files = Self {
            image_mount: match image.place {
                Place::Tmpfs => Some(mount(&disks, IMAGE_ROOM)?),
                Place::ExactTmpfs => Some(mount(&disks, exact_room(image))?),
                _ => None,
            },
            journal_mount: match image.journal {
                Journal::Tmpfs(kib) => Some(mount(&runtime, kib << 10)?),
                Journal::Plain => None,
                Journal::Unusable => {
                    // A file in place of the directory: it cannot be created then.
                    fs::write(runtime.join("journals"), [])?;
                    None
                }
            },
            image: disks.join("disk"),
            data: image.data_file.then(|| disks.join("data")),
            has_data_file: image.data_file,
            directory: directory.into(),
            qcow2: image.qcow2,
            backing: None,
            storage: None,
            device: None,
            has_just_its_space: image.place.is_exact(),
            runtime,
            names: 0,
        };
        let mut random = Random(image.seed);
        for (number, below) in image.backing.iter().enumerate().rev() {
            let file = directory.join(format!("base{number}"));
            let format = match below.options {
                Some(_) => "qcow2",
                None => "raw",
            };
            let options = below.options.clone().unwrap_or_default();
            files.create(&file, format, &options, below.size)?;
            files.scribble(&file, format, below.size, &mut random, false)?;
            files.backing = Some((file, format));
        }
        let mut options = image.options.clone();
        if let Some(data) = &files.data {
            options += &format!(",data_file={}", data.display());
            if image.data_file_raw {
                options += ",data_file_raw=on";
            }
        }
        let file = files.image.clone();
        let format = files.format();
        files.create(&file, format, &options, image.size)?;
        if image.windows.len() == 1 {
            files.scribble(&file, format, image.size, &mut random, image.compressed)?;
        }
        if image.place == Place::Fuse {
            let mnt = directory.join("fuse");
            fs::create_dir_all(&mnt)?;
            let storage = Storage::mount(&mnt, fs::read(&file)?, image.seed)
                .map_err(|e| Failure::new("skipped", format!("FUSE: {e}")))?;
            fs::remove_file(&file)?;
            files.image = storage.file();
            files.storage = Some(storage);
        }
        if image.place == Place::ExactDevice {
            let full = full_size(image).next_multiple_of(4096);
            File::options().write(true).open(&file)?.set_len(full)?;
            let device = LoopDevice::new(&file)
                .map_err(|e| Failure::new("skipped", format!("losetup: {e}")))?;
            files.image.clone_from(&device.0);
            files.device = Some(device);
        }
        Ok(files)
    }

    pub fn format(&self) -> &'static str {
        if self.qcow2 { "qcow2" } else { "raw" }
    }

    fn create(&self, file: &Path, format: &str, options: &str, size: u64) -> Outcome<()> {
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", format]);
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        if let Some((below, format)) = &self.backing {
            command.arg("-b").arg(below).args(["-F", format]);
        }
        command.arg(file).arg(size.to_string());
        self.expect(&mut command).map(drop)
    }

    /// Runs a tool that must succeed.
    pub fn expect(&self, command: &mut Command) -> Outcome<String> {
        match run(command, &self.directory)? {
            (Some(0), said) => Ok(said),
            (code, said) => {
                let what = format!("{command:?}: {code:?}, {said}");
                Err(Failure::new("tool", what))
            }
        }
    }

    /// Writes patterns all over a new image.
    fn scribble(
        &self,
        file: &Path,
        format: &str,
        size: u64,
        random: &mut Random,
        compressed: bool,
    ) -> Outcome<()> {
        let mut command = Command::new("qemu-io");
        command.args(["-t", "writeback", "-f", format]);
        for number in 0..random.below(14) {
            let (at, len) = random.range(size, 65536);
            let pattern = 1 + random.below(250);
            let words = match number % 6 {
                4 => format!("write -q -z {at} {len}"),
                5 => format!("discard -q {at} {len}"),
                _ => format!("write -q -P {pattern} {at} {len}"),
            };
            command.args(["-c", &words]);
        }
        self.expect(command.arg(file))?;
        if !compressed {
            return Ok(());
        }
        let cluster = 1u64 << fs::read(file)?[23];
        let mut command = Command::new("qemu-io");
        command.args(["-t", "writeback", "-d", "unmap", "-f", format]);
        for _ in 0..6 {
            let at = random.below(size.div_ceil(cluster)) * cluster;
            let len = cluster.min(size - at);
            let pattern = 1 + random.below(250);
            // A cluster can only be written compressed if it is not allocated.
            command.args(["-c", &format!("discard -q {at} {len}")]);
            command.args(["-c", &format!("write -q -c -P {pattern} {at} {len}")]);
        }
        // Some versions of QEMU refuse some of the commands.
        run(command.arg(file), &self.directory).map(drop)
    }

    /// A new path in the image's directory.
    pub fn fresh(&mut self) -> PathBuf {
        self.names += 1;
        self.directory.join(format!("disks/disk-{}", self.names))
    }

    /// A 32-bit field of the image's header.
    fn header(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        let read = File::open(&self.image).and_then(|f| f.read_exact_at(&mut bytes, at as u64));
        read.map_or(0, |()| u32::from_be_bytes(bytes))
    }

    pub fn is_version_2(&self) -> bool {
        self.qcow2 && self.header(4) == 2
    }

    /// Whether the image is where there is no more space than the disk needs.
    pub fn has_just_its_space(&self) -> bool {
        self.has_just_its_space
    }

    /// Whether the image is on a device with no more space than the disk needs.
    pub fn is_on_exact_device(&self) -> bool {
        self.device.is_some()
    }

    /// Whether the image's bitmaps are in use (autoclear bit 0).
    pub fn has_bitmaps(&self) -> bool {
        self.qcow2 && self.header(4) > 2 && self.header(92) & 1 != 0
    }

    /// Whether QEMU has marked the image's refcounts for repair. An image with a journal of ringdisk (autoclear bit 63)
    /// is also marked dirty, but its refcounts are correct.
    pub fn is_dirty(&self) -> bool {
        self.qcow2 && self.header(4) > 2 && self.header(76) & 1 != 0 && !self.has_journal()
    }

    /// Whether the header says that the image has a journal.
    pub fn has_journal(&self) -> bool {
        self.qcow2 && self.header(4) > 2 && self.header(88) >> 31 != 0
    }

    /// Converts the image, or a snapshot in it, to a raw file with QEMU.
    pub fn converted(&self, snapshot: Option<&str>, size: u64) -> Outcome<Converted> {
        let out = self.directory.join("content.raw");
        let _ = fs::remove_file(&out);
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-f", self.format(), "-O", "raw"]);
        if let Some(name) = snapshot {
            command.args(["-l", &format!("snapshot.name={name}")]);
        }
        self.expect(command.arg(&self.image).arg(&out))?;
        let len = fs::metadata(&out)?.len();
        // QEMU converts a snapshot with the current size of the disk.
        if snapshot.is_none() && len != size.next_multiple_of(SECTOR as u64) {
            let what = format!("the disk has {len} bytes, and must have {size}");
            return Err(Failure::new("size", what));
        }
        Ok(Converted(out))
    }

    /// Waits until the image is unlocked.
    pub fn wait_until_free(&self) -> Outcome<()> {
        let mut all = [Some(&self.image), self.data.as_ref()]
            .into_iter()
            .flatten();
        all.try_for_each(|path| wait_until_free(path))
    }

    /// Fills a file system, and leaves `leave_kib` KiB free.
    fn fill(directory: &Path, leave_kib: u64) -> io::Result<()> {
        let path = directory.join("filler");
        let mut file = File::options().create(true).append(true).open(path)?;
        let page = [1; 4096];
        // ENOSPC ends the loop.
        while file.write_all(&page).is_ok() {}
        let len = file.metadata()?.len();
        file.set_len(len.saturating_sub(leave_kib << 10))
    }

    pub fn fill_journals(&self, leave_kib: u64) -> io::Result<bool> {
        match &self.journal_mount {
            Some(mount) => Self::fill(&mount.0, leave_kib).map(|()| true),
            None => Ok(false),
        }
    }

    pub fn free_journals(&self) {
        let _ = fs::remove_file(self.runtime.join("filler"));
    }

    pub fn fill_images(&self, leave_kib: u64) -> io::Result<bool> {
        match &self.image_mount {
            Some(mount) => Self::fill(&mount.0, leave_kib).map(|()| true),
            None => Ok(false),
        }
    }

    pub fn free_images(&self) {
        let _ = fs::remove_file(self.directory.join("disks/filler"));
    }

    /// Cuts the power, if the storage allows it: each sector that was not made durable is there or not, and a tmpfs is
    /// empty.
    pub fn cut_power(&self, seed: u64) -> io::Result<bool> {
        let Some(storage) = &self.storage else {
            return Ok(false);
        };
        storage.control().cut_power(&mut Random(seed));
        for entry in fs::read_dir(&self.runtime)?.flatten() {
            if entry.file_type()?.is_dir() {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(true)
    }
}

/// The space of a file system for the image with any content, and for what requests in flight may need more.
fn exact_room(image: &Image) -> u64 {
    full_size(image).next_multiple_of(4096) + (2 * image.cluster).max(64 << 10)
}

/// The size of the image with any content, without backing files, snapshots and bitmaps.
fn full_size(image: &Image) -> u64 {
    qemu_img::fully_allocated_size(&image.options, image.size)
}

/// Waits until a file is unlocked: the kernel may still be executing I/O of a killed process, and keeps its locks until then.
pub fn wait_until_free(path: &Path) -> Outcome<()> {
    let start = Instant::now();
    let file = File::options().read(true).write(true).open(path)?;
    while is_locked(&file) {
        if start.elapsed() > hang() {
            let what = format!("{} stays locked", path.display());
            return Err(Failure::new("hang", what));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Whether any process has a lock on any part of a file.
fn is_locked(file: &File) -> bool {
    // SAFETY: the type allows all zeroes, which mean a lock of the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: the file is open, and the lock outlives the call.
    let failed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    failed == 0 && i32::from(lock.l_type) != libc::F_UNLCK
}

/// The raw file to which a disk was converted.
pub struct Converted(PathBuf);

impl Converted {
    /// The bytes of all windows.
    pub fn windows(&self, oracle: &Oracle) -> io::Result<Vec<u8>> {
        windows(&self.0, oracle)
    }
}

impl Drop for Converted {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The bytes of all windows in a raw file.
pub fn windows(file: &Path, oracle: &Oracle) -> io::Result<Vec<u8>> {
    let file = File::open(file)?;
    let mut all = Vec::new();
    for window in &oracle.windows {
        let start = all.len();
        all.resize(start + window.sectors * SECTOR, 0);
        let (mut at, mut into) = (window.sector * SECTOR as u64, &mut all[start..]);
        while !into.is_empty() {
            match file.read_at(into, at)? {
                // The file ends in the middle of a sector, which is padded.
                0 => break,
                n => {
                    at += n as u64;
                    into = &mut into[n..];
                }
            }
        }
    }
    Ok(all)
}

/// Copies a file with its holes. An existing target keeps its inode.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let mut source = File::open(from)?;
    let mut target = File::options()
        .create(true)
        .write(true)
        .truncate(true)
        .open(to)?;
    let len = source.metadata()?.len();
    let mut chunk = vec![0; 64 << 10];
    let mut at = 0;
    while at < len {
        let n = source.read(&mut chunk)?;
        if n == 0 {
            break;
        }
        if chunk[..n].iter().any(|b| *b != 0) {
            target.seek(SeekFrom::Start(at))?;
            target.write_all(&chunk[..n])?;
        }
        at += n as u64;
    }
    target.set_len(len)
}
