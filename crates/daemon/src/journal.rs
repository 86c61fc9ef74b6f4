//! Where the journals of images are: what a killed process had acknowledged and not flushed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;

use block::{Backing, FileOffset};
use engine::DiskFile;
use image::{JournalEvent, JournalPlace, Storage};
use rustix::fs::{FallocateFlags, fallocate};
use tracing::{error, info, warn};

use crate::sandbox::people::{Person, make_directory};
use crate::socket;

/// A file for each image that is written, in a directory beside the disks' default sockets: that is a tmpfs nearly
/// everywhere, as it should be, since they are of no use after a crash of the host.
#[derive(Clone, Debug)]
pub struct Journals {
    pub directory: PathBuf,
    /// Why it cannot be used.
    problem: Option<String>,
}

impl Journals {
    /// For a process that will be `user`. Each has a directory of its own: nobody may have another's image written to.
    pub fn new(user: Option<&Person>) -> Self {
        let name = user.map_or("journals".into(), |user| format!("journals-{}", user.name));
        let directory = socket::directory().join(name);
        let problem = make_directory(&directory, user).err();
        Self {
            directory,
            problem: problem.map(|e| e.to_string()),
        }
    }

    /// A place for the journal of an image, whose file is locked for us; and its path. `None`, and a warning,
    /// if there can be none.
    pub fn place(&self, disk: &str, file: &DiskFile) -> Option<(JournalPlace, PathBuf)> {
        self.try_place(disk, file)
            .inspect_err(|e| {
                warn!(
                    "disk {disk}: no journal can be kept in {}: {e}; after a kill of ringdisk, what was \
                     written to new clusters and not flushed is lost",
                    self.directory.display()
                );
            })
            .ok()
    }

    fn try_place(&self, disk: &str, file: &DiskFile) -> io::Result<(JournalPlace, PathBuf)> {
        let stat = rustix::fs::fstat(file)?;
        // Any number of nodes lead to one device.
        let (device, inode) = match file.backing() {
            Backing::File => (stat.st_dev, stat.st_ino),
            Backing::BlockDevice => (u64::MAX, stat.st_rdev),
        };
        let mut identity = [0; 32];
        identity[..16].copy_from_slice(&boot()?);
        identity[16..24].copy_from_slice(&device.to_le_bytes());
        identity[24..].copy_from_slice(&inode.to_le_bytes());
        if let Some(problem) = &self.problem {
            return Err(io::Error::other(problem.as_str()));
        }
        let path = self.directory.join(format!("{device:x}-{inode:x}.journal"));
        let storage = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            // Whoever has put a link there is not followed.
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)?;
        let (disk, at) = (disk.to_owned(), path.display().to_string());
        let tell = move |event| match event {
            JournalEvent::Replayed(n) => info!(
                "disk {disk}: {n} changes to its image that a killed process had acknowledged are done again"
            ),
            JournalEvent::Outdated => warn!(
                "disk {disk}: {at} is of no use: the image is another one, or was written by something else \
                 since; what a killed process had not flushed is lost"
            ),
            JournalEvent::Failed(e) => error!(
                "disk {disk}: {at} cannot be written: {e}; until it can, writes to new clusters are flushed, \
                 and slow"
            ),
        };
        let place = JournalPlace {
            storage: Arc::new(Plain(storage)),
            identity,
            tell: Box::new(tell),
        };
        Ok((place, path))
    }
}

/// The boot of this host: what was only in memory before it is gone.
fn boot() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16)
        .map(u128::to_be_bytes)
        .map_err(io::Error::other)
}

/// A file that is read and written through the page cache, and never made durable.
struct Plain(File);

impl Storage for Plain {
    fn read_at(&self, at: FileOffset, to: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < to.len() {
            match self.0.read_at(&mut to[done..], at.0 + done as u64)? {
                0 => break,
                n => done += n,
            }
        }
        Ok(done)
    }

    fn write_at(&self, at: FileOffset, from: &[u8]) -> io::Result<()> {
        self.0.write_all_at(from, at.0)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn forgets(&self) -> bool {
        false
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.0.set_len(size)
    }

    fn punch(&self, at: FileOffset, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.0, flags, at.0, len)?)
    }

    fn block(&self) -> u32 {
        1
    }
}
