use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2};
use rustix::io::Errno;
use thiserror::Error;

/// Which files an image may name: those below directories that the operator allows.
///
/// A name in an image is input from whoever made the image. The kernel holds the border while it
/// resolves the name (`openat2`, `RESOLVE_BENEATH`), so that neither `..` nor a symbolic link leads out
/// of a directory, whatever changes at the same time. Links inside work, also absolute ones: what these lead to is
/// found out first, and then opened in the same way. Only regular files and block devices are let through.
#[derive(Debug)]
pub struct Gate {
    directories: Vec<Directory>,
}

#[derive(Debug)]
struct Directory {
    fd: OwnedFd,
    /// As the operator wrote it, and where it is.
    paths: [PathBuf; 2],
}

/// A file that an image named, and that it may.
#[derive(Debug)]
pub(crate) struct Passed {
    pub fd: OwnedFd,
    pub path: PathBuf,
    pub identity: Identity,
}

/// What tells a file from all others: of what, device and inode.
pub(crate) type Identity = (u64, u64);

/// Why a file is not opened that an image names.
#[derive(Debug, Error)]
pub enum GateError {
    /// Not a file at all.
    #[error(
        "it names '{0}', which is not a file; only files and block devices are opened for an \
        image ('qemu-img rebase -u' changes the name)"
    )]
    Protocol(String),
    /// In none of the directories.
    #[error(
        "it names '{name}', which is in none of the directories that its images may be in \
        ({allowed}); --allow-backing DIR allows another one, if you trust whoever made the image"
    )]
    Outside {
        /// The name in the image.
        name: String,
        /// The directories.
        allowed: String,
    },
    /// It is a link that leads out of the directories.
    #[error(
        "it names '{name}', a symbolic link to '{target}', which is in none of the directories that its images may be in \
        ({allowed}); --allow-backing DIR allows another one, if you trust whoever made the image"
    )]
    Link {
        /// The name in the image.
        name: String,
        /// Where it leads.
        target: String,
        /// The directories.
        allowed: String,
    },
    /// It is not there.
    #[error(
        "it names '{0}', and there is no such file; put it back where it was: the image needs what is in it, which is not in \
        a new and empty one"
    )]
    Missing(String),
    /// The kernel does not open it.
    #[error("it names '{name}', which cannot be opened: {source}")]
    Open {
        /// The name in the image.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Neither a regular file nor a block device.
    #[error("it names '{0}', which is neither a file nor a block device")]
    Kind(String),
}

impl Gate {
    /// Allows these directories, and all below them.
    ///
    /// # Errors
    /// One of them cannot be opened; the message says which.
    pub fn new<P: AsRef<Path>>(directories: impl IntoIterator<Item = P>) -> io::Result<Self> {
        let directory = |path: P| {
            let path = path.as_ref();
            let path = if path.as_os_str().is_empty() {
                Path::new(".")
            } else {
                path
            };
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let open = || -> io::Result<Directory> {
                Ok(Directory {
                    fd: open(path, flags, Mode::empty())?,
                    paths: [std::path::absolute(path)?, path.canonicalize()?],
                })
            };
            open().map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
        };
        let directories = directories.into_iter().map(directory);
        Ok(Self {
            directories: directories.collect::<io::Result<_>>()?,
        })
    }

    /// Allows the directory of an image, which is what holds without the operator's word.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn beside(image: &Path) -> io::Result<Self> {
        Self::new([image.parent().unwrap_or(Path::new("/"))])
    }

    /// Opens a file that an image in the directory `from` names.
    pub(crate) fn pass(&self, from: &Path, name: &str, write: bool) -> Result<Passed, GateError> {
        let plain = name.strip_prefix("file:").unwrap_or(name);
        let colon = plain.find(':').unwrap_or(plain.len());
        if plain.is_empty() || colon < plain.find('/').unwrap_or(plain.len()) {
            return Err(GateError::Protocol(name.to_owned()));
        }
        let path = from.join(plain);
        let straight = without_dots(&path);
        let open_error = |errno: Errno| match errno {
            Errno::NOENT => GateError::Missing(name.to_owned()),
            errno => GateError::Open {
                name: name.to_owned(),
                source: errno.into(),
            },
        };
        let mut leads_out = false;
        for directory in &self.directories {
            let below = [&path, &straight].into_iter().find_map(|path| {
                let mut paths = directory.paths.iter();
                paths.find_map(|directory| path.strip_prefix(directory).ok())
            });
            let Some(below) = below.filter(|below| !below.as_os_str().is_empty()) else {
                continue;
            };
            match directory.open(below, write) {
                Ok(fd) => return passed(fd, straight, name),
                Err(Errno::XDEV) => leads_out = true,
                Err(errno) => return Err(open_error(errno)),
            }
        }
        // An absolute link leads out of any directory, as the kernel sees it, also to a file that is in one.
        let target = leads_out.then(|| path.canonicalize().ok()).flatten();
        if let Some(target) = &target {
            for directory in &self.directories {
                let Ok(below) = target.strip_prefix(&directory.paths[1]) else {
                    continue;
                };
                // If it has changed meanwhile, the border still holds.
                match directory.open(below, write) {
                    Ok(fd) => return passed(fd, straight, name),
                    Err(Errno::XDEV) => {}
                    Err(errno) => return Err(open_error(errno)),
                }
            }
        }
        let allowed = self
            .directories
            .iter()
            .map(|d| d.paths[0].display().to_string());
        let (name, allowed) = (name.to_owned(), allowed.collect::<Vec<_>>().join(", "));
        Err(match target.map(|target| target.display().to_string()) {
            Some(target) => GateError::Link {
                name,
                target,
                allowed,
            },
            None => GateError::Outside { name, allowed },
        })
    }
}

impl Directory {
    /// Opens what is below it, with whatever links are in between.
    fn open(&self, below: &Path, write: bool) -> Result<OwnedFd, Errno> {
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        // Opening a pipe must not block; what it is shows after.
        let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        openat2(&self.fd, below, flags, Mode::empty(), resolve)
    }
}

fn passed(fd: OwnedFd, path: PathBuf, name: &str) -> Result<Passed, GateError> {
    let stat = fstat(&fd).map_err(|errno| GateError::Open {
        name: name.to_owned(),
        source: errno.into(),
    })?;
    let identity = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => (stat.st_dev, stat.st_ino),
        // Any number of nodes lead to one device.
        FileType::BlockDevice => (u64::MAX, stat.st_rdev),
        _ => return Err(GateError::Kind(name.to_owned())),
    };
    Ok(Passed { fd, path, identity })
}

/// The path without `.` and `..`, as if there were no links. Where a link makes that another file, it
/// is one below the same directory.
fn without_dots(path: &Path) -> PathBuf {
    let mut straight = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                straight.pop();
            }
            component => straight.push(component),
        }
    }
    straight
}

#[cfg(test)]
mod tests;
