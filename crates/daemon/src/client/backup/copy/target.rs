//! Where a disk is copied to.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use harness::process::guarded;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{
    Access, AtFlags, FallocateFlags, FlockOperation, accessat, fallocate, fcntl_lock,
};
use rustix::process::{Pid, Signal, kill_process};

use super::TargetFormat;
use crate::client::CommandLineError;
use crate::client::nbd_client::{Address, NbdClient, Stop};
use crate::log::complain;
use crate::token::token;

/// What a new file is called until it is complete, after its name.
const PARTIAL: &str = ".partial";
/// What marks a raw file, after its name, while it has no state that a checkpoint names.
const UPDATING: &str = ".updating";
/// The suffixes of all names that a copy to a file uses.
pub const USED: [&str; 3] = ["", PARTIAL, UPDATING];

/// A file that is being written. Unless it is [kept](Self::keep), a new one is removed.
pub struct Target {
    /// The file as it is named at the end, without symbolic links.
    to: PathBuf,
    /// As the user names it.
    name: PathBuf,
    format: TargetFormat,
    /// As it is named now, if that differs.
    partial: Option<PathBuf>,
    kind: Kind,
    /// The length of the file that is updated.
    had: Option<u64>,
    /// A new file with its [lock](new_partial).
    lock: Option<File>,
}

enum Kind {
    /// `is_empty`: zeroes need not be written.
    Raw {
        file: File,
        is_empty: bool,
    },
    Qcow2(QemuNbd),
    Finished,
}

/// `qemu-nbd`, which writes an image. It ends with this.
struct QemuNbd {
    child: Child,
    directory: PathBuf,
    /// Zeroes need not be written: no other image is, or will be, below it.
    is_empty: bool,
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// What a thread writes to.
pub enum Writer {
    File {
        file: File,
        is_empty: bool,
    },
    Nbd(NbdClient),
    /// Writes no zeroes.
    Empty(NbdClient),
}

impl Target {
    /// For a disk of `size` bytes. Changes go into a raw file that is there, and into a new image on `base`. A full copy goes into
    /// a new file; `is_update`: that replaces the one that is there.
    ///
    /// # Errors
    /// It cannot be created, or opened; or it is there already.
    pub fn create(
        to: &Path,
        format: TargetFormat,
        size: u64,
        is_incremental: bool,
        is_update: bool,
        base: Option<&PathBuf>,
        stop: &Stop,
    ) -> io::Result<Self> {
        let name = to.to_path_buf();
        let to = &resolved(to);
        if format == TargetFormat::Raw && is_incremental {
            let file = not_in_use(to)?;
            let now = file.metadata()?;
            if !now.is_file() || now.len() > size {
                let text = "it is no regular file, or larger than the disk: it does not have the last backup";
                return Err(io::Error::other(text));
            }
            check_mark(to)?;
            return Ok(Self {
                to: to.into(),
                name,
                format,
                partial: None,
                kind: Kind::Raw {
                    file,
                    is_empty: false,
                },
                had: Some(now.len()),
                lock: None,
            });
        }
        let is_replaced = is_update && format == TargetFormat::Raw;
        match fs::symlink_metadata(to) {
            Ok(found) if found.is_file() && is_replaced => drop(not_in_use(to)?),
            Ok(_) => {
                let text = "it exists; name a new file, or remove it";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        let partial = beside(to, PARTIAL);
        let file = new_partial(&partial)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", partial.display())))?;
        // From now on, it is removed if something fails.
        let mut target = Self {
            to: to.into(),
            name,
            format,
            partial: Some(partial.clone()),
            kind: Kind::Finished,
            had: None,
            lock: Some(file.try_clone()?),
        };
        target.kind = match format {
            TargetFormat::Raw => {
                file.set_len(size)?;
                Kind::Raw {
                    file,
                    is_empty: true,
                }
            }
            TargetFormat::Qcow2 => {
                Kind::Qcow2(QemuNbd::start(&partial, size, base, is_incremental, stop)?)
            }
        };
        Ok(target)
    }

    /// Up to where it has what has not changed since the last backup: a raw file may have been cut off, or the disk has grown.
    /// Whole blocks.
    pub fn had(&self) -> u64 {
        self.had.map_or(u64::MAX, |bytes| bytes & !0xffff)
    }

    /// As it is named now.
    pub fn path(&self) -> PathBuf {
        self.partial.clone().unwrap_or_else(|| self.to.clone())
    }

    /// As it is named at the end.
    pub fn name(&self) -> String {
        self.name.to_string_lossy().into_owned()
    }

    /// Before the first byte is written: a file that is updated in place is [marked](is_updating), durably.
    ///
    /// # Errors
    /// It is as it was.
    pub fn begin(&mut self, size: u64) -> Result<(), CommandLineError> {
        if let Kind::Raw {
            file,
            is_empty: false,
        } = &self.kind
        {
            let mark = beside(&self.to, UPDATING);
            create_mark(&mark).map_err(|e| CommandLineError::Target(mark, e))?;
            let sized = file.set_len(size);
            sized.map_err(|e| CommandLineError::Target(self.to.clone(), e))?;
        }
        Ok(())
    }

    /// For a thread.
    ///
    /// # Errors
    /// There are too many descriptors, or `qemu-nbd` has ended; or `stop` is set.
    pub fn writer(&self, stop: &Stop) -> io::Result<Writer> {
        match &self.kind {
            Kind::Raw { file, is_empty } => Ok(Writer::File {
                file: file.try_clone()?,
                is_empty: *is_empty,
            }),
            Kind::Qcow2(server) => {
                let client = server.connect(stop)?;
                Ok(if server.is_empty {
                    Writer::Empty(client)
                } else {
                    Writer::Nbd(client)
                })
            }
            Kind::Finished => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Makes all of it durable, and checks its length.
    ///
    /// # Errors
    /// It is not durable, or has another length.
    pub fn finish(&mut self, size: u64, stop: &Stop) -> io::Result<()> {
        let length = match std::mem::replace(&mut self.kind, Kind::Finished) {
            Kind::Raw { file, .. } => {
                file.sync_all()?;
                file.metadata()?.len()
            }
            Kind::Qcow2(server) => {
                let length = server.end(stop)?;
                File::open(self.path())?.sync_all()?;
                length
            }
            Kind::Finished => size,
        };
        if length != size {
            let text = format!("it has {length} bytes, and the disk {size}");
            return Err(io::Error::other(text));
        }
        // A new file is found again after a crash.
        directory_of(&self.to)?.sync_all()
    }

    /// Gives it its name, durably, after the end of the backup. It has what the checkpoint of the backup names.
    ///
    /// # Errors
    /// It keeps the other one.
    pub fn keep(mut self) -> Result<(), CommandLineError> {
        self.rename(|| Ok(()))?;
        if self.format == TargetFormat::Raw {
            let mark = beside(&self.to, UPDATING);
            let removed = match fs::remove_file(&mark) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                removed => removed.and_then(|()| directory_of(&self.to)?.sync_all()),
            };
            // The copy is good, and the next one, too: it is full.
            if let Err(e) = removed {
                let (mark, file) = (mark.display(), self.name.display());
                complain(&format!(
                    "{mark}: {e}; remove it, otherwise the next copy to {file} is full"
                ));
            }
        }
        Ok(())
    }

    /// Gives it its name, durably, if it is complete and the backup has perhaps not ended: it has the state of no checkpoint that
    /// the user knows.
    ///
    /// # Errors
    /// It keeps the other one.
    pub fn keep_unended(mut self, has_bitmap: bool) -> Result<(), CommandLineError> {
        if !has_bitmap || self.format != TargetFormat::Raw {
            return self.rename(|| Ok(()));
        }
        let mark = beside(&self.to, UPDATING);
        self.rename(|| create_mark(&mark))?;
        let (mark, file) = (mark.display(), self.name.display());
        complain(&format!(
            "{mark}: remove it if 'ringdisk backup end' prints the checkpoint; while it is there, the next copy to {file} is full"
        ));
        Ok(())
    }

    /// Whether the new file is the one that was made.
    fn is_own(&self) -> bool {
        let made = self.partial.as_ref().zip(self.lock.as_ref());
        made.is_some_and(|(path, file)| is_at(file, path))
    }

    /// `before`: a step before, without which it keeps its name.
    fn rename(&mut self, before: impl FnOnce() -> io::Result<()>) -> Result<(), CommandLineError> {
        let is_own = self.is_own();
        let Some(partial) = self.partial.take() else {
            return before().map_err(|e| CommandLineError::Target(self.to.clone(), e));
        };
        let gone = || io::Error::other("another file has taken its place");
        let is_own = is_own.then_some(()).ok_or_else(gone);
        let renamed = is_own.and_then(|()| before());
        let renamed = renamed.and_then(|()| fs::rename(&partial, &self.to));
        let renamed = renamed.and_then(|()| directory_of(&self.to)?.sync_all());
        renamed.map_err(|e| {
            let text = format!("the copy is complete, and could not be renamed: {e}");
            CommandLineError::Target(partial, io::Error::new(e.kind(), text))
        })
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(partial) = self.partial.as_ref().filter(|_| self.is_own()) {
            let _ = fs::remove_file(partial);
        }
    }
}

/// Checks that no two of these files are the same one, also under another name. Each is a file with one of the `suffixes`.
///
/// # Errors
/// Says which are.
pub fn check_distinct(files: &[PathBuf], suffixes: &[&str]) -> Result<(), String> {
    let mut all: HashMap<FileId, &Path> = HashMap::new();
    for file in files {
        let real = resolved(file);
        for suffix in suffixes {
            // A directory that is missing is named when the file is created.
            let Ok(id) = FileId::of(&beside(&real, suffix)) else {
                continue;
            };
            if let Some(other) = all.insert(id, file) {
                let (file, other) = (file.display(), other.display());
                let text = format!("{other} and {file}: the same file would be used for two disks");
                return Err(text);
            }
        }
    }
    Ok(())
}

/// What makes two names those of one file.
#[derive(PartialEq, Eq, Hash)]
enum FileId {
    /// Its device and inode.
    Existing(u64, u64),
    /// The device and inode of its directory, and its name there.
    New(u64, u64, OsString),
}

impl FileId {
    fn of(file: &Path) -> io::Result<Self> {
        if let Ok(found) = fs::metadata(file) {
            return Ok(Self::Existing(found.dev(), found.ino()));
        }
        let directory = directory_of(file)?.metadata()?;
        let name = file.file_name().unwrap_or_default().to_owned();
        Ok(Self::New(directory.dev(), directory.ino(), name))
    }
}

/// Whether a raw file was being updated, and the backup has not ended with success since: it may have parts of several states, or
/// one that no checkpoint names. If the bitmap or the disk was put back, a bitmap that has the last checkpoint again does not say
/// what differs.
///
/// # Errors
/// Its directory does not say.
pub fn is_updating(file: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(beside(&resolved(file), UPDATING)) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// Checks that a file can be marked, before anything is copied. It is not marked yet: a kill would leave the mark.
///
/// # Errors
/// It cannot.
fn check_mark(file: &Path) -> io::Result<()> {
    let access = Access::WRITE_OK | Access::EXEC_OK;
    let checked = accessat(directory_of(file)?, ".", access, AtFlags::EACCESS);
    checked.map_err(|e| {
        let mark = beside(file, UPDATING);
        let text = format!("{} cannot be created: {e}", mark.display());
        io::Error::new(io::Error::from(e).kind(), text)
    })
}

fn create_mark(mark: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).mode(0o600);
    let created = options.custom_flags(libc::O_NOFOLLOW).open(mark)?;
    created.sync_all()?;
    directory_of(mark)?.sync_all()
}

/// The file itself, if this is a symbolic link to it.
fn resolved(file: &Path) -> PathBuf {
    fs::canonicalize(file).unwrap_or_else(|_| file.into())
}

/// The name of a file with a suffix.
fn beside(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Opens a file to which no other program writes, such as the disk itself: these lock their files.
fn not_in_use(file: &Path) -> io::Result<File> {
    let opened = OpenOptions::new().read(true).write(true).open(file)?;
    let locked = fcntl_lock(&opened, FlockOperation::NonBlockingLockExclusive);
    locked.map_err(|_| {
        let text = "another program uses it; name the file that has the last backup";
        io::Error::new(io::ErrorKind::ResourceBusy, text)
    })?;
    Ok(opened)
}

/// Makes the file of a copy that is not complete, and locks it as long as it is open. One that is there and that no copy has
/// locked was left by a copy that was killed, or placed there by another user: it is removed, and never written to.
///
/// # Errors
/// Another copy writes it; or something else has this name.
fn new_partial(path: &Path) -> io::Result<File> {
    let busy = || io::Error::new(io::ErrorKind::ResourceBusy, "another copy writes it");
    let open = |options: &mut OpenOptions| {
        let options = options.read(true).write(true).mode(0o600);
        options.custom_flags(libc::O_NOFOLLOW).open(path)
    };
    // It may have been another copy's until the lock, which has replaced it.
    let still_there = |file| is_at(&file, path).then_some(file).ok_or_else(busy);
    let _old = match fs::symlink_metadata(path) {
        Ok(there) if !there.is_file() => {
            return Err(io::Error::other("it is no regular file; remove it"));
        }
        Ok(_) => {
            let old = open(&mut OpenOptions::new())?;
            let locked = lock(&old).map_err(|e| match e {
                Errno::EAGAIN | Errno::EACCES => busy(),
                e => io::Error::other(format!("{e}; if no other copy writes it, remove it")),
            });
            let old = locked.and_then(|()| still_there(old))?;
            fs::remove_file(path)?;
            // Locked until the new one is: another copy that still has this one gets no lock.
            Some(old)
        }
        Err(_) => None,
    };
    let file = open(OpenOptions::new().create_new(true))?;
    match lock(&file) {
        Err(Errno::EAGAIN | Errno::EACCES) => Err(busy()),
        // Without locks, as on some network file systems, the next copy does not replace it.
        Ok(()) | Err(_) => still_there(file),
    }
}

/// Locks a byte behind all data: on some network file systems, nobody else could write to one that is locked.
fn lock(file: &File) -> Result<(), Errno> {
    let last = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: i64::MAX - 1,
        l_len: 1,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&last)).map(drop)
}

/// Whether an open file is the one at a path.
fn is_at(file: &File, path: &Path) -> bool {
    let found = fs::symlink_metadata(path).and_then(|there| Ok((there, file.metadata()?)));
    found.is_ok_and(|(there, own)| (there.dev(), there.ino()) == (own.dev(), own.ino()))
}

fn directory_of(file: &Path) -> io::Result<File> {
    let parent = file
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))
}

impl QemuNbd {
    fn start(
        file: &Path,
        size: u64,
        base: Option<&PathBuf>,
        is_incremental: bool,
        stop: &Stop,
    ) -> io::Result<Self> {
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2"]);
        if let Some(base) = base {
            create
                .args(["-F", "qcow2", "-b"])
                .arg(fs::canonicalize(base)?);
        }
        // Not a name with a protocol, as `vm:1.qcow2` would be.
        let file = &fs::canonicalize(file)?;
        create.arg("--").arg(file).arg(size.to_string());
        let created = create.output().map_err(of_program("qemu-img"))?;
        if !created.status.success() {
            let text = String::from_utf8_lossy(&created.stderr).trim().to_owned();
            return Err(io::Error::other(text));
        }
        let directory = std::env::temp_dir().join(format!("ringdisk-copy-{}", token()));
        fs::DirBuilder::new().mode(0o700).create(&directory)?;
        // The thread that starts it waits for its end: killed with this process, it hardly ever stays.
        let child = guarded(Path::new("qemu-nbd"))
            .args(["--format=qcow2", "--persistent", "--shared=0", "--socket"])
            .arg(directory.join("nbd"))
            .arg("--")
            .arg(file)
            .stdin(Stdio::null())
            .spawn();
        let child = child.inspect_err(|_| drop(fs::remove_dir_all(&directory)));
        let mut server = Self {
            child: child.map_err(of_program("qemu-nbd"))?,
            directory,
            is_empty: !is_incremental,
        };
        // It is asked for the export until it listens, or has ended.
        while server.connect(stop).is_err() {
            stop.check()?;
            if let Some(status) = server.child.try_wait()? {
                return Err(io::Error::other(format!("qemu-nbd has ended: {status}")));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    fn connect(&self, stop: &Stop) -> io::Result<NbdClient> {
        let socket = self.directory.join("nbd").to_string_lossy().into_owned();
        NbdClient::connect(&Address::Unix(socket), "", &[], stop)
    }

    /// Makes the image durable, and closes it. Returns its size.
    fn end(mut self, stop: &Stop) -> io::Result<u64> {
        let mut client = self.connect(stop)?;
        client.flush()?;
        let size = client.size;
        drop(client);
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM)?;
        let status = self.child.wait()?;
        if !status.success() {
            return Err(io::Error::other(format!("qemu-nbd: {status}")));
        }
        Ok(size)
    }
}

fn of_program(name: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |e| {
        io::Error::new(
            e.kind(),
            format!("{name}: {e}; Debian's package qemu-utils has it"),
        )
    }
}

impl Writer {
    /// # Errors
    /// Not all was written.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::File { file, .. } => file.write_all_at(bytes, at),
            Self::Nbd(client) | Self::Empty(client) => client.write(at, bytes),
        }
    }

    /// # Errors
    /// Not all are zeroes.
    pub fn zero(&mut self, at: u64, bytes: u64) -> io::Result<()> {
        match self {
            Self::File { is_empty: true, .. } | Self::Empty(_) => Ok(()),
            Self::Nbd(client) => client.zero(at, bytes),
            Self::File { file, .. } => {
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                if fallocate(&*file, punch, at, bytes).is_ok() {
                    return Ok(());
                }
                let zeroes = vec![0; 1 << 20];
                let mut done = 0;
                while done < bytes {
                    let part = (bytes - done).min(zeroes.len() as u64);
                    file.write_all_at(&zeroes[..part as usize], at + done)?;
                    done += part;
                }
                Ok(())
            }
        }
    }
}
