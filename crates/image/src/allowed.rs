use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, open, openat, openat2, readlinkat};
use rustix::io::Errno;
use thiserror::Error;

/// The files that an image may name: those below directories that the operator allows.
///
/// A name in an image is input from the person who made the image. The kernel enforces the limit while it resolves
/// the name (`openat2`, `RESOLVE_BENEATH`): neither `..` nor a symbolic link leads out of a directory, whatever
/// changes at the same time. Links inside the directories work, including absolute ones: ringdisk first finds out
/// where an absolute link leads, and then opens that path in the same way. Only regular files and block devices are
/// admitted.
#[derive(Debug)]
pub struct AllowedDirectories {
    directories: Vec<Directory>,
}

#[derive(Debug)]
struct Directory {
    /// Or why it cannot be opened, which matters only if an image names a file there.
    fd: Result<OwnedFd, Errno>,
    /// The absolute path as the operator wrote it, and the canonical path.
    paths: [PathBuf; 2],
    /// Links of root to block devices are followed out of it: see [`device_behind`].
    links_to_devices: bool,
}

/// A file that an image names and may use.
#[derive(Debug)]
pub(crate) struct OpenedReference {
    pub fd: OwnedFd,
    pub path: PathBuf,
    pub identity: Identity,
}

/// Identifies a file by its device and inode, or a block device by `u64::MAX` and its device number.
pub(crate) type Identity = (u64, u64);

/// Why a file that an image names is not opened.
#[derive(Debug, Error)]
pub enum AllowedError {
    /// The name is not the name of a file.
    #[error(
        "it names '{0}', which is not a file; only files and block devices are opened for an \
        image ('qemu-img rebase -u' changes the name)"
    )]
    Protocol(String),
    /// The file is in none of the allowed directories.
    #[error(
        "it names '{name}', which is in none of the directories that its images may be in \
        ({allowed}); --allow-backing DIR (allow-backing in the configuration) allows another one, if you trust the creator of the image"
    )]
    Outside { name: String, allowed: String },
    /// The file is a symbolic link that leads out of the allowed directories.
    #[error(
        "it names '{name}', which leads to '{target}', and that is in none of the directories that its images may be in \
        ({allowed}); --allow-backing DIR (allow-backing in the configuration) allows another one, if you trust the creator of the image"
    )]
    Link {
        name: String,
        target: String,
        allowed: String,
    },
    /// The file does not exist.
    #[error(
        "it names '{0}', and there is no such file; restore the file: the image needs its content, and a new, \
        empty file would not have it"
    )]
    Missing(String),
    /// The kernel does not open the file.
    #[error(
        "it names '{name}', which cannot be opened: {source}{advice}",
        advice = match source.kind() {
            io::ErrorKind::PermissionDenied => {
                "; the user as which ringdisk runs must be able to open it; with --user, root opens it only in a directory that \
                --allow-backing names"
            }
            _ => "",
        }
    )]
    Open { name: String, source: io::Error },
    /// The file is neither a regular file nor a block device.
    #[error("it names '{0}', which is neither a file nor a block device")]
    Kind(String),
}

impl AllowedDirectories {
    /// Allows these directories and everything below them.
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
                    fd: Ok(open(path, flags, Mode::empty())?),
                    paths: [std::path::absolute(path)?, path.canonicalize()?],
                    links_to_devices: true,
                })
            };
            open().map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
        };
        let directories = directories.into_iter().map(directory);
        Ok(Self {
            directories: directories.collect::<io::Result<_>>()?,
        })
    }

    /// Allows the directory of an image: the default if the operator does not say otherwise. Most images name no file, so
    /// a directory that this process may not search is an error only for an image that does.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub fn of_image(image: &Path) -> io::Result<Self> {
        let directory = image.parent().unwrap_or(Path::new("/"));
        match Self::new([directory]) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                let path = std::path::absolute(directory)?;
                let fd = Err(Errno::ACCESS);
                let paths = [path.clone(), path];
                let links_to_devices = false;
                Ok(Self {
                    directories: vec![Directory {
                        fd,
                        paths,
                        links_to_devices,
                    }],
                })
            }
            directories => {
                let mut directories = directories?;
                for directory in &mut directories.directories {
                    directory.links_to_devices = false;
                }
                Ok(directories)
            }
        }
    }

    /// Opens a file that an image in the directory `from` names.
    pub(crate) fn open_reference(
        &self,
        from: &Path,
        name: &str,
        write: bool,
    ) -> Result<OpenedReference, AllowedError> {
        let plain = name.strip_prefix("file:").unwrap_or(name);
        let colon = plain.find(':').unwrap_or(plain.len());
        if plain.is_empty() || colon < plain.find('/').unwrap_or(plain.len()) {
            return Err(AllowedError::Protocol(name.to_owned()));
        }
        let path = from.join(plain);
        let straight = without_dots(&path);
        let open_error = |errno: Errno| match errno {
            Errno::NOENT => AllowedError::Missing(name.to_owned()),
            errno => AllowedError::Open {
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
                Ok(fd) => return opened(fd, straight, name),
                Err(Errno::XDEV) => {
                    if let Some(device) = directory.device_behind(below, write) {
                        return opened(device.map_err(open_error)?, straight, name);
                    }
                    leads_out = true;
                }
                Err(errno) => return Err(open_error(errno)),
            }
        }
        // To the kernel, an absolute link leads out of any directory, even to a file that is inside.
        let target = leads_out.then(|| path.canonicalize().ok()).flatten();
        if let Some(target) = &target {
            for directory in &self.directories {
                let Ok(below) = target.strip_prefix(&directory.paths[1]) else {
                    continue;
                };
                // If the link has changed meanwhile, the kernel still enforces the limit.
                match directory.open(below, write) {
                    Ok(fd) => return opened(fd, straight, name),
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
            Some(target) => AllowedError::Link {
                name,
                target,
                allowed,
            },
            None => AllowedError::Outside { name, allowed },
        })
    }
}

impl Directory {
    /// Opens a file below the directory, also through symbolic links.
    fn open(&self, below: &Path, write: bool) -> Result<OwnedFd, Errno> {
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        // Opening a pipe must not block. The kind of the file is checked afterwards.
        let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let fd = self.fd.as_ref().map_err(|&errno| errno)?;
        openat2(fd, below, flags, Mode::empty(), resolve)
    }
}

impl Directory {
    /// The block device to which a link leads out of the directory, or why it is not opened. udev makes such links:
    /// `/dev/VG/LV` leads to `../dm-3`. The operator, who has named the directory, has named what its entries stand for;
    /// but only as far as nobody else can make one: the link is root's, and so are all directories down to it, in which
    /// only root may write. `None` if it is not such a link.
    fn device_behind(&self, below: &Path, write: bool) -> Option<Result<OwnedFd, Errno>> {
        if !self.links_to_devices {
            return None;
        }
        let mut components = below.components();
        let Some(Component::Normal(name)) = components.next_back() else {
            return None;
        };
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let mut parent = self.fd.as_ref().ok()?.try_clone().ok()?;
        is_roots_alone(&parent)?;
        for component in components {
            let Component::Normal(next) = component else {
                return None;
            };
            parent = openat2(&parent, next, directory, Mode::empty(), resolve).ok()?;
            is_roots_alone(&parent)?;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let link = openat(&parent, name, flags, Mode::empty()).ok()?;
        let stat = fstat(&link).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink || stat.st_uid != 0 {
            return None;
        }
        let target = readlinkat(&link, "", Vec::new()).ok()?;
        let target = Path::new(OsStr::from_bytes(target.to_bytes()));
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        // A link that leads to another link is not udev's.
        let found = openat(&parent, target, flags, Mode::empty()).ok()?;
        let stat = fstat(&found).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
            return None;
        }
        let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = openat(&parent, target, flags, Mode::empty());
        Some(opened.and_then(|opened| {
            let now = fstat(&opened)?;
            match (now.st_dev, now.st_ino) == (stat.st_dev, stat.st_ino) {
                true => Ok(opened),
                false => Err(Errno::XDEV),
            }
        }))
    }
}

/// Whether a directory is root's and nobody else may write there.
fn is_roots_alone(directory: &OwnedFd) -> Option<()> {
    let stat = fstat(directory).ok()?;
    (stat.st_uid == 0 && stat.st_mode & 0o022 == 0).then_some(())
}

fn opened(fd: OwnedFd, path: PathBuf, name: &str) -> Result<OpenedReference, AllowedError> {
    let stat = fstat(&fd).map_err(|errno| AllowedError::Open {
        name: name.to_owned(),
        source: errno.into(),
    })?;
    let identity = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => (stat.st_dev, stat.st_ino),
        // Several device nodes can refer to the same device.
        FileType::BlockDevice => (u64::MAX, stat.st_rdev),
        _ => return Err(AllowedError::Kind(name.to_owned())),
    };
    Ok(OpenedReference { fd, path, identity })
}

/// The path without `.` and `..`, as if there were no links. If a link makes this another file, that file is below
/// the same directory too.
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
