//! Landlock: which files this process may open, in addition to those that are open (landlock(7)).

use std::fmt;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};

use super::OutsideSandbox;

/// What this process may open, by kind of access.
#[derive(Default)]
pub struct AllowedPaths {
    /// Directories of disks, with everything below them, and block devices.
    storage: Vec<PathBuf>,
    /// Directories and devices of backing files.
    backing: Vec<PathBuf>,
    sockets: Vec<PathBuf>,
    readable: Vec<PathBuf>,
    /// Directories of files that ringdisk creates and removes.
    kept: Vec<PathBuf>,
    /// Disks may be anywhere.
    pub anywhere: bool,
    /// Disks may be in Ceph clusters: librbd needs the network and reads files of its choice.
    pub cluster: bool,
}

impl AllowedPaths {
    /// Adds a disk, with its directory: backing files and replacements may be there. For a device, only the device.
    pub fn disk(&mut self, path: &Path) {
        // Paths of devices are often links.
        let Ok(path) = fs::canonicalize(path) else {
            // An inherited file may have been renamed. Never the directory of a device, which contains other devices.
            let directory = directory_of(path);
            self.storage
                .extend(directory.filter(|d| !d.starts_with("/dev")));
            return;
        };
        let is_device = fs::metadata(&path).is_ok_and(|m| m.file_type().is_block_device());
        match path.parent() {
            Some(directory) if !is_device => self.storage.push(directory.into()),
            _ => self.storage.push(path),
        }
    }

    /// Adds a directory of disks.
    pub fn storage(&mut self, directory: &Path) {
        self.storage.extend(fs::canonicalize(directory));
    }

    /// Adds a directory of backing files, and the devices to which its links lead, as in `/dev/VG`, for reading. If a disk
    /// is such a device, the others may replace it, as files in the directory of a disk may.
    pub fn backing(&mut self, directory: &Path, has_disk: bool) {
        self.backing.extend(fs::canonicalize(directory));
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let targets = entries.filter_map(|entry| fs::canonicalize(entry.path()).ok());
        let devices = targets
            .filter(|path| fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device()));
        if has_disk {
            self.storage.extend(devices);
        } else {
            self.backing.extend(devices);
        }
    }

    /// Adds the directory of a socket, and creates it if necessary.
    pub fn socket(&mut self, path: &Path) {
        if let Ok(path) = std::path::absolute(path)
            && let Some(directory) = path.parent()
        {
            let _ = fs::create_dir_all(directory);
            self.sockets(directory);
        }
    }

    /// Adds a directory of sockets.
    pub fn sockets(&mut self, directory: &Path) {
        self.sockets.extend(fs::canonicalize(directory));
    }

    /// Adds a directory for ringdisk's own files.
    pub fn kept(&mut self, directory: &Path) {
        self.kept.extend(fs::canonicalize(directory));
    }

    /// Adds a path for reading, with everything below.
    pub fn readable(&mut self, path: &Path) {
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        self.readable.extend(fs::canonicalize(path));
    }
}

/// The restrictions that apply.
pub struct Files {
    paths: AllowedPaths,
    /// This kernel supports only a part of the restrictions.
    partly: bool,
}

impl Files {
    /// Restricts this thread, and those that it starts, to these paths.
    ///
    /// # Errors
    /// The kernel does not support it, or refuses it.
    pub fn restrict(mut paths: AllowedPaths) -> Result<Self, String> {
        let AllowedPaths {
            storage,
            backing,
            sockets,
            readable,
            ..
        } = &mut paths;
        for list in [storage, backing, sockets, readable] {
            list.sort();
            list.dedup();
        }
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        let storage = read | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev;
        let sockets = AccessFs::ReadDir | AccessFs::MakeSock | AccessFs::RemoveFile;
        // The kernel's information about devices, NUMA nodes and this process.
        let system = ["/sys", "/proc/self", "/proc/sys/kernel"].map(PathBuf::from);
        let restrict = || {
            let mut ruleset = Ruleset::default()
                .handle_access(AccessFs::from_all(ABI::V6))?
                .scope(Scope::Signal)?;
            if !paths.cluster {
                ruleset = ruleset.handle_access(AccessNet::ConnectTcp)?;
            }
            let mut ruleset = ruleset.create()?;
            let mut allow = |paths: &[PathBuf], access: BitFlags<AccessFs>| {
                for path in paths {
                    let Ok(opened) = PathFd::new(path) else {
                        continue; // it does not exist
                    };
                    let access = if path.is_dir() {
                        access
                    } else {
                        access & AccessFs::from_file(ABI::V6)
                    };
                    let rule = PathBeneath::new(opened, access);
                    (&mut ruleset).add_rule(rule)?;
                }
                Ok::<_, landlock::RulesetError>(())
            };
            if paths.anywhere {
                allow(&["/".into()], storage | sockets | AccessFs::MakeDir)?
            } else {
                allow(&paths.storage, storage)?
            }
            allow(&paths.sockets, sockets)?;
            allow(&paths.readable, read)?;
            allow(&paths.backing, read | AccessFs::IoctlDev)?;
            let keep = storage | AccessFs::MakeReg | AccessFs::RemoveFile;
            allow(&paths.kept, keep)?;
            allow(&system, read)?;
            if paths.cluster {
                allow(&["/".into()], read)?;
                let library = ["/dev/null", "/dev/urandom", "/run/ceph", "/var/log/ceph"];
                allow(
                    &library.map(PathBuf::from),
                    storage | sockets | AccessFs::MakeReg,
                )?;
            }
            ruleset.restrict_self()
        };
        match restrict() {
            Ok(done) => match done.ruleset {
                RulesetStatus::NotEnforced => {
                    Err("this kernel does not have it, or it is disabled".into())
                }
                status => Ok(Self {
                    paths,
                    partly: status == RulesetStatus::PartiallyEnforced,
                }),
            },
            Err(e) => Err(e.to_string()),
        }
    }

    /// Checks that a disk may be at this path.
    pub fn check(&self, path: &Path) -> Result<(), OutsideSandbox> {
        // A missing file is reported when it is opened.
        let Ok(real) = fs::canonicalize(path) else {
            return Ok(());
        };
        self.is_in(&self.paths.storage, path, &real)
    }

    /// Checks that a socket may be at this path.
    pub fn check_socket(&self, path: &Path) -> Result<(), OutsideSandbox> {
        match directory_of(path) {
            Some(real) => self.is_in(&self.paths.sockets, path, &real.join("any")),
            // The directory would have to be created.
            None => self.is_in(&self.paths.sockets, path, path),
        }
    }

    fn is_in(&self, list: &[PathBuf], path: &Path, real: &Path) -> Result<(), OutsideSandbox> {
        if self.paths.anywhere || list.iter().any(|allowed| real.starts_with(allowed)) {
            return Ok(());
        }
        Err(OutsideSandbox::Path {
            path: path.into(),
            directory: real.parent().unwrap_or(real).into(),
            allowed: names(list),
        })
    }
}

/// The directory of a path, which may be that of this process. `None` if it does not exist.
fn directory_of(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    fs::canonicalize(path.parent()?).ok()
}

impl fmt::Display for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.paths.anywhere {
            write!(
                f,
                "disks may be at any path, because nothing is configured, or allow-dir says so; --allow-dir DIR restricts them"
            )?;
        } else if self.paths.storage.is_empty() {
            write!(f, "no files or devices of disks")?;
        } else {
            write!(f, "disks in {}", names(&self.paths.storage))?;
        }
        if self.paths.cluster && !self.paths.anywhere {
            write!(f, ", in Ceph clusters, and all files can be read")?;
        }
        if self.partly {
            write!(
                f,
                " (partly: this kernel does not support all restrictions)"
            )
        } else {
            Ok(())
        }
    }
}

fn names(list: &[PathBuf]) -> String {
    let names: Vec<String> = list.iter().map(|p| p.display().to_string()).collect();
    names.join(", ")
}
