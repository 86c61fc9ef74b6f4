//! With whose rights this process opens files while it is root and will become another user (`--user`).
//!
//! The process must not lend root's access to the user that it becomes: what a process of that user has written (the
//! state file, a handover, the names in an image) may have been written by an attacker. So from [`Rights::assume`] on,
//! everything is opened with the rights of that user. The exceptions are what the operator has named on the command
//! line or in the configuration, which this process has read itself: [`Rights::as_operator`]. Of these, files that only root
//! may open are opened before root's rights are given up, for disks that can be served only later.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::Identity;
use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::process::geteuid;
use rustix::thread::{Gid as ThreadGroup, set_thread_groups};
use tracing::debug;

use crate::config::sockets;
use crate::config::spec::{DiskSpec, FileSpec, Lock, SocketAccess};
use crate::credentials::UserAccount;

/// With whose rights files are opened.
#[derive(Default)]
pub struct Rights {
    /// The user that root becomes later; `None` if this process stays what it is.
    switch: Option<Switch>,
    /// The files that the operator has named, and whether they may be written.
    files: Vec<(FileSpec, bool)>,
    sockets: Vec<(PathBuf, SocketAccess)>,
}

/// The files of a disk that only the operator may open, opened before this process became another user. They are open as long
/// as the disk is to be served and is not.
pub struct OpenedAhead(Vec<FileAhead>);

impl OpenedAhead {
    /// The file at a path that the operator has named. `None` if another one is there now.
    pub fn file(&self, path: &Path, writable: bool) -> Option<OwnedFd> {
        let mut files = self.0.iter();
        let opened = files.find(|it| it.named == path && it.writable == writable)?;
        let is_there = place_of(&opened.file).is_some_and(|now| now == opened.at);
        let is_deleted = opened.file.metadata().is_ok_and(|found| found.nlink() == 0);
        let file = opened.file.try_clone().ok();
        file.filter(|_| is_there && !is_deleted).map(OwnedFd::from)
    }

    /// Whether the file that the disk is on is among them.
    pub fn has(&self, disk: &DiskSpec) -> bool {
        matches!(&disk.file, FileSpec::Path(path) if self.file(path, !disk.read_only).is_some())
    }

    /// Whether no other process can open one of them as long as this exists.
    pub fn is_claim(&self) -> bool {
        self.0.iter().any(|it| it.is_claim)
    }

    /// The disk could not be served: its locks would stay with these descriptors.
    pub fn unlock(&self) {
        for it in &self.0 {
            let all = libc::flock {
                l_type: libc::F_UNLCK as i16,
                l_whence: libc::SEEK_SET as i16,
                l_start: 0,
                // To the end.
                l_len: 0,
                l_pid: 0,
            };
            if let Err(e) = fcntl(&it.file, FcntlArg::F_OFD_SETLK(&all)) {
                // Without locks, there are none to release.
                debug!("{}: cannot be unlocked: {e}", it.named.display());
            }
        }
    }
}

struct FileAhead {
    named: PathBuf,
    writable: bool,
    file: File,
    /// Where it was then.
    at: PathBuf,
    /// A block device that the kernel gives to one process only.
    is_claim: bool,
}

impl FileAhead {
    /// As the operator, whose file the user may not open. `None` if it cannot be a disk at present.
    fn open(path: &Path, writable: bool, exclusive: bool) -> Option<Self> {
        let is_disk = |found: &Metadata| {
            let kind = found.file_type();
            kind.is_file() || kind.is_block_device()
        };
        // Opening anything else may have side effects.
        let found = fs::metadata(path).ok().filter(is_disk)?;
        let mut flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let is_claim = exclusive && found.file_type().is_block_device();
        if is_claim {
            // As for any disk: not while it is mounted.
            flags |= libc::O_EXCL;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(writable).custom_flags(flags);
        let file = options.open(path).ok()?;
        file.metadata().ok().filter(is_disk)?;
        Some(Self {
            named: path.into(),
            writable,
            at: place_of(&file)?,
            file,
            is_claim,
        })
    }
}

/// Where the kernel finds an open file. Looking there takes no rights.
fn place_of(file: &File) -> Option<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

struct Switch {
    user: UserAccount,
    /// The group and the groups of this process before.
    gid: u32,
    groups: Vec<u32>,
}

impl Rights {
    /// Makes this thread, and those that it starts, open files with the rights of `user`. `named` are the disks that the
    /// operator has configured.
    ///
    /// # Errors
    /// Only root can.
    pub fn assume(user: Option<&UserAccount>, named: &[DiskSpec]) -> io::Result<Self> {
        let switch = user.map(Switch::new).transpose()?;
        if let Some(switch) = &switch {
            switch.to_user()?;
        }
        let file = |disk: &DiskSpec| (disk.file.clone(), !disk.read_only);
        let data_file = |disk: &DiskSpec| {
            let path = disk.data_file.clone()?;
            Some((FileSpec::Path(path), !disk.read_only))
        };
        let socket = |disk: &DiskSpec| (sockets::path(disk), disk.socket_access);
        Ok(Self {
            switch,
            files: (named.iter().map(file))
                .chain(named.iter().filter_map(data_file))
                .collect(),
            sockets: named.iter().map(socket).collect(),
        })
    }

    /// Opens, as the operator, what a disk needs and the user may not open. A disk that cannot be served now, because another
    /// process has locked it for example, can be served later. The storage of these files must answer.
    pub fn open_ahead(&self, disk: &DiskSpec) -> Option<Arc<OpenedAhead>> {
        if !self.will_change() {
            return None;
        }
        let file = match &disk.file {
            FileSpec::Path(path) => Some(path),
            FileSpec::Rbd(_) | FileSpec::Null(_) => None,
        };
        let writable = !disk.read_only;
        let mut access = Access::READ_OK;
        access.set(Access::WRITE_OK, writable);
        let exclusive = writable && disk.lock == Lock::Always;
        let open = |path: &PathBuf| {
            // With the rights of the user, which this thread has.
            if accessat(CWD, path, access, AtFlags::EACCESS).is_ok() {
                return None;
            }
            self.with_file(&FileSpec::Path(path.clone()), writable, || {
                FileAhead::open(path, writable, exclusive)
            })
        };
        let files: Vec<_> = file
            .into_iter()
            .chain(&disk.data_file)
            .filter_map(open)
            .collect();
        (!files.is_empty()).then(|| OpenedAhead(files).into())
    }

    /// Whether this process was root, and has become another user.
    pub fn has_changed(&self) -> bool {
        self.switch.is_some() && !geteuid().is_root()
    }

    /// Whether this process will become another user. That ends only when no thread is in a system call that cannot be
    /// interrupted, such as one that waits for storage.
    pub fn will_change(&self) -> bool {
        self.switch.is_some() && geteuid().is_root()
    }

    /// Opens what the operator has named, with root's rights until this process has become another user.
    pub fn as_operator<T>(&self, open: impl FnOnce() -> T) -> T {
        let switch = self.switch.as_ref();
        let Some(switch) = switch.filter(|_| geteuid().is_root() && !is_root_here()) else {
            return open();
        };
        if switch.to_root().is_err() {
            // What follows reports that it is not permitted.
            return open();
        }
        let _back = Back(switch);
        open()
    }

    /// Opens the file of a disk: as the operator, if the operator has named it for this access.
    pub fn with_file<T>(&self, file: &FileSpec, write: bool, open: impl FnOnce() -> T) -> T {
        let is_named = |(named, writable): &(FileSpec, bool)| named == file && *writable >= write;
        if self.files.iter().any(is_named) {
            self.as_operator(open)
        } else {
            open()
        }
    }

    /// The identity of the data file of an image that the operator has named: its directory may be root's alone.
    pub fn data_file_identity(&self, disk: &DiskSpec) -> Option<Identity> {
        let path = disk.data_file.as_ref()?;
        let file = FileSpec::Path(path.clone());
        let there = self.with_file(&file, !disk.read_only, || fs::metadata(path));
        there.ok().map(|there| Identity::of(&there))
    }

    /// Makes the socket of a disk: as the operator, if the operator has named it with this access.
    pub fn with_socket<T>(&self, path: &Path, access: SocketAccess, make: impl FnOnce() -> T) -> T {
        let is_named = |named: &(PathBuf, SocketAccess)| named.0 == path && named.1 == access;
        if self.sockets.iter().any(is_named) {
            self.as_operator(make)
        } else {
            make()
        }
    }
}

/// Returns to the rights of the user.
struct Back<'a>(&'a Switch);

impl Drop for Back<'_> {
    fn drop(&mut self) {
        // If the process has become the user meanwhile, so has this thread.
        if self.0.to_user().is_err() && is_root_here() {
            // Root's rights must not stay.
            std::process::abort();
        }
    }
}

impl Switch {
    fn new(user: &UserAccount) -> io::Result<Self> {
        let groups = nix::unistd::getgroups()?;
        Ok(Self {
            user: user.clone(),
            gid: rustix::process::getegid().as_raw(),
            groups: groups.into_iter().map(Gid::as_raw).collect(),
        })
    }

    fn to_user(&self) -> io::Result<()> {
        set_rights(self.user.uid, self.user.gid, self.user.groups())
    }

    fn to_root(&self) -> io::Result<()> {
        set_rights(0, self.gid, &self.groups)
    }
}

/// Sets the rights of this thread. The kernel takes the capabilities away that override them unless the user is root,
/// and gives them back (capabilities(7), "Effect of user ID changes on capabilities").
fn set_rights(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    let all: Vec<_> = groups
        .iter()
        .map(|&gid| ThreadGroup::from_raw(gid))
        .collect();
    set_thread_groups(&all)?;
    // These calls report no errors.
    setfsgid(Gid::from_raw(gid));
    setfsuid(Uid::from_raw(uid));
    let (now_uid, now_gid) = (setfsuid(NONE_UID), setfsgid(NONE_GID));
    if (now_uid.as_raw(), now_gid.as_raw()) == (uid, gid) {
        Ok(())
    } else {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

/// An id that is not valid: the calls change nothing, and return the present one.
const NONE_UID: Uid = Uid::from_raw(u32::MAX);
const NONE_GID: Gid = Gid::from_raw(u32::MAX);

fn is_root_here() -> bool {
    setfsuid(NONE_UID).is_root()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn root_opens_only_what_the_operator_has_named() {
        if !geteuid().is_root() {
            return println!("skipped: root_opens_only_what_the_operator_has_named: needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["named", "read", "other"] {
            fs::write(path(name), "").unwrap();
            fs::set_permissions(path(name), fs::Permissions::from_mode(0o600)).unwrap();
        }
        let disk = |name: &str| FileSpec::Path(path(name));
        let named = [
            DiskSpec::new("named".into(), disk("named")),
            DiskSpec {
                read_only: true,
                ..DiskSpec::new("read".into(), disk("read"))
            },
        ];
        // Another thread, so that the other tests keep their rights.
        let in_a_thread = || {
            let user = UserAccount::find("nobody").unwrap();
            let rights = Rights::assume(Some(&user), &named).unwrap();
            let open = |name: &str, write: bool| {
                let open = || File::options().read(true).write(write).open(path(name));
                rights.with_file(&disk(name), write, open).is_ok()
            };
            assert!(open("named", true) && open("named", false) && open("read", false));
            assert!(!open("read", true) && !open("other", false));
            assert!(
                File::open(path("named")).is_err(),
                "root's rights have stayed"
            );
            let nested = || {
                rights.as_operator(|| ());
                File::open(path("other")).is_ok()
            };
            assert!(rights.as_operator(nested));
            let panics = || rights.as_operator(|| panic!("in the tests"));
            let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics));
            assert!(panics.is_err() && File::open(path("other")).is_err());
            // A thread that is started now has the same rights.
            let other = path("other");
            let opened = std::thread::spawn(move || File::open(other).is_ok());
            assert!(!opened.join().unwrap());
            let socket = path("s");
            let access = SocketAccess::default();
            rights
                .with_socket(&socket, access, || File::create(&socket))
                .unwrap_err();
        };
        std::thread::scope(|scope| scope.spawn(in_a_thread).join().unwrap());
        assert_eq!(fs::metadata(dir.path()).unwrap().uid(), 0);
    }

    /// What the user may not open stays open, as long as it is where the operator has named it.
    #[test]
    fn files_of_root_are_opened_ahead() {
        if !geteuid().is_root() {
            return println!("skipped: files_of_root_are_opened_ahead: needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = |name: &str| dir.path().join(name);
        let modes = [
            ("roots", 0o600),
            ("open", 0o666),
            ("moved", 0o600),
            ("other", 0o600),
        ];
        for (name, mode) in modes {
            fs::write(path(name), "").unwrap();
            fs::set_permissions(path(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        let names = ["roots", "open", "moved", "missing"];
        let named = names.map(|name| DiskSpec::new(name.into(), FileSpec::Path(path(name))));
        let in_a_thread = || {
            let user = UserAccount::find("nobody").unwrap();
            let rights = Rights::assume(Some(&user), &named).unwrap();
            let ahead = named.each_ref().map(|disk| rights.open_ahead(disk));
            let has = |place: usize, writable| {
                let ahead = ahead[place].as_ref();
                ahead.is_some_and(|it| it.file(&path(names[place]), writable).is_some())
            };
            assert_eq!(
                [0, 1, 2, 3].map(|n| has(n, true)),
                [true, false, true, false]
            );
            assert!(!has(0, false));
            let other = DiskSpec::new("other".into(), FileSpec::Path(path("other")));
            assert!(rights.open_ahead(&other).is_none(), "nobody has named it");
            rights.as_operator(|| {
                fs::rename(path("moved"), path("elsewhere")).unwrap();
                fs::write(path("moved"), "").unwrap();
            });
            assert!(has(0, true) && !has(2, true), "another file is there");
        };
        std::thread::scope(|scope| scope.spawn(in_a_thread).join().unwrap());
    }

    #[test]
    fn without_another_user_nothing_changes() {
        let rights = Rights::assume(None, &[]).unwrap();
        let before = setfsuid(NONE_UID);
        assert_eq!(rights.as_operator(|| setfsuid(NONE_UID)), before);
    }
}
