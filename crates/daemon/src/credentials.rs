//! Users and groups by name, from `/etc/passwd` and `/etc/group` as they were at the start: the sandbox hides them later.
//! Users and groups of other sources (LDAP, SSSD) can be given by number.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, fchown};
use std::path::Path;
use std::sync::OnceLock;

use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
use rustix::fs::{Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{getegid, geteuid};

/// A user that this process can become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserAccount {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    /// All groups.
    groups: Vec<u32>,
}

struct Accounts {
    users: String,
    groups: String,
}

fn accounts() -> &'static Accounts {
    static ACCOUNTS: OnceLock<Accounts> = OnceLock::new();
    ACCOUNTS.get_or_init(|| {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Accounts {
            users: read("/etc/passwd"),
            groups: read("/etc/group"),
        }
    })
}

/// Reads both files, before the sandbox hides them, and decides what depends on the user at the start.
pub fn read() {
    accounts();
    qemu_group();
}

/// The id of a group, given by name or number.
///
/// # Errors
/// There is no such group.
pub fn group(name: &str) -> Result<u32, String> {
    number(name)
        .or_else(|| column(&accounts().groups, name, 2))
        .ok_or_else(|| {
            format!("there is no group '{name}' in /etc/group; a number below 4294967295 will do")
        })
}

/// QEMU's group: `qemu` on Fedora, RHEL and Gentoo, `kvm` on Debian and its kin. None for a user whose own QEMU needs no
/// group, and who may not give files to this one. Decided once: who becomes another user has sockets of this group already.
pub fn qemu_group() -> Option<u32> {
    static GROUP: OnceLock<Option<u32>> = OnceLock::new();
    *GROUP.get_or_init(find_qemu_group)
}

fn find_qemu_group() -> Option<u32> {
    let group = qemu_group_of_host()?;
    let is_given = match LATER_USER.get() {
        // Who must be able to make the same sockets again.
        Some(later) => later.groups.contains(&group),
        None => geteuid().is_root() || getegid().as_raw() == group,
    };
    is_given.then_some(group)
}

/// QEMU's group on this host, also if this process may not give files to it.
pub fn qemu_group_of_host() -> Option<u32> {
    let groups = &accounts().groups;
    let mut there = ["qemu", "kvm"].iter();
    there.find_map(|name| column(groups, name, 2))
}

static LATER_USER: OnceLock<UserAccount> = OnceLock::new();

/// The user that this process, which root has started, becomes.
pub fn later_user() -> Option<u32> {
    LATER_USER.get().map(|user| user.uid)
}

/// This process becomes that user later.
pub fn set_later_user(user: &UserAccount) {
    let _ = LATER_USER.set(user.clone());
}

/// The name of a group, or its number.
pub fn group_name(id: u32) -> String {
    name_in(&accounts().groups, id)
}

/// The name of a user, or its number.
pub fn user_name(id: u32) -> String {
    name_in(&accounts().users, id)
}

fn name_in(file: &str, id: u32) -> String {
    let is_it = |line: &&str| line.split(':').nth(2).and_then(|n| n.parse().ok()) == Some(id);
    let name = file
        .lines()
        .find(is_it)
        .and_then(|line| line.split(':').next());
    name.map_or_else(|| id.to_string(), str::to_owned)
}

/// The users of whom a group consists, or whose main group it is.
pub fn members(group: u32) -> Vec<u32> {
    let Accounts { users, groups } = accounts();
    let number = |line: &str, at| line.split(':').nth(at).and_then(|n| n.parse().ok());
    let mut named = groups.lines().filter(|line| number(line, 2) == Some(group));
    let named = named.next().and_then(|line| line.rsplit(':').next());
    let named = named.unwrap_or_default().split(',');
    let named = named.filter_map(|name| column(users, name, 2));
    let main = users.lines().filter(|line| number(line, 3) == Some(group));
    named
        .chain(main.filter_map(|line| number(line, 2)))
        .collect()
}

/// The id of a user, given by name or number.
///
/// # Errors
/// There is no such user.
pub fn user(name: &str) -> Result<u32, String> {
    number(name)
        .or_else(|| column(&accounts().users, name, 2))
        .ok_or_else(|| {
            format!("there is no user '{name}' in /etc/passwd; a number below 4294967295 will do")
        })
}

/// chown(2) and setuid(2) reserve the largest number for "unchanged".
fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

/// A number in a file of lines such as `kvm:x:104:`.
fn column(file: &str, name: &str, at: usize) -> Option<u32> {
    let mut lines = file.lines().map(|line| line.split(':'));
    let mut line = lines.find(|line| line.clone().next() == Some(name))?;
    line.nth(at)?.parse().ok()
}

impl UserAccount {
    /// A user with all groups.
    ///
    /// # Errors
    /// There is no such user, or it is root.
    pub fn find(name: &str) -> Result<Self, String> {
        let Accounts { users, groups } = accounts();
        let (Some(uid), Some(gid)) = (column(users, name, 2), column(users, name, 3)) else {
            return Err(format!("there is no user '{name}' in /etc/passwd"));
        };
        if uid == 0 {
            return Err(format!(
                "'{name}' is root; name another user, or leave it out"
            ));
        }
        let is_member = |line: &&str| {
            let members = line.rsplit(':').next().unwrap_or_default();
            members.split(',').any(|member| member == name)
        };
        let others = groups.lines().filter(is_member);
        let others = others.filter_map(|line| line.split(':').nth(2)?.parse().ok());
        let mut groups: Vec<u32> = others.chain([gid]).collect();
        groups.sort_unstable();
        groups.dedup();
        Ok(Self {
            name: name.into(),
            uid,
            gid,
            groups,
        })
    }

    /// All groups of the user.
    pub fn groups(&self) -> &[u32] {
        &self.groups
    }

    /// Makes all threads of this process run as that user, permanently.
    ///
    /// # Errors
    /// Only root can.
    pub fn become_user(&self) -> io::Result<()> {
        let groups: Vec<Gid> = self.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
        setgroups(&groups)?;
        setgid(Gid::from_raw(self.gid))?;
        setuid(Uid::from_raw(self.uid))?;
        Ok(())
    }
}

/// The files that ringdisk makes in directories of its own: locks, and its state.
const OWN_FILES: [&str; 6] = [
    "lock",
    "state.json",
    "queues.json",
    "guests.json",
    "left.json",
    "directory",
];

/// The extensions of others: journals of images, records of bitmaps, and new versions of files.
const OWN_EXTENSIONS: [&str; 4] = ["journal", "bitmaps", "intent", "new"];

/// Whether a file in a directory for ringdisk's own files may be one of them, going by its name.
fn is_own_file(name: &OsStr) -> bool {
    let mut extensions = OWN_EXTENSIONS.iter();
    OWN_FILES.iter().any(|own| name == *own)
        || extensions.any(|own| Path::new(name).extension().is_some_and(|e| e == *own))
}

/// Creates a directory for ringdisk's own files, if it does not exist, for this user and for `user` later. One that this user
/// has used before is given to `user` with its files.
///
/// # Errors
/// It cannot be created, or belongs to another user, who could place files there.
pub fn make_directory(directory: &Path, user: Option<&UserAccount>) -> io::Result<()> {
    if let Some(parent) = directory.parent() {
        // Such as the directory of the sockets, which others must be able to pass.
        let mut passable = DirBuilder::new();
        passable.recursive(true).mode(0o755).create(parent)?;
    }
    let mut private = DirBuilder::new();
    private.recursive(true).mode(0o700).create(directory)?;
    // The directory that is checked is the one that is given away: links are not followed.
    let mut flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    flags.set(OFlags::NOFOLLOW, user.is_some());
    let opened = match rustix::fs::open(directory, flags, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) if directory.is_symlink() => {
            return Err(io::Error::other("it is a link; name what it leads to"));
        }
        opened => File::from(opened?),
    };
    let there = opened.metadata()?;
    let owner = there.uid();
    if there.mode() & 0o022 != 0 {
        return Err(io::Error::other("others may write to it"));
    }
    match user {
        Some(user) if owner == user.uid => Ok(()),
        _ if owner != geteuid().as_raw() => Err(io::Error::other(of_another(directory, owner))),
        Some(user) => {
            // A ringdisk that runs as this user keeps it. Locked until it is given away.
            let _lock = lock_to_give(&opened)?;
            // The operator may have named this directory by mistake.
            let mut own = Vec::new();
            for entry in Dir::read_from(&opened)? {
                let entry = entry?;
                let name = OsStr::from_bytes(entry.file_name().to_bytes());
                let itself = [".", ".."].iter().any(|itself| name == *itself);
                if itself {
                    continue;
                }
                if is_own_file(name) {
                    own.push(entry.file_name().to_owned());
                } else {
                    return Err(io::Error::other(format!(
                        "it is not {0}'s, and has other files, as {1}; if it is there for ringdisk alone, 'chown {0}' \
                         gives it away",
                        user.name,
                        name.display()
                    )));
                }
            }
            // While nobody else can write to the directory.
            for name in own {
                let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = rustix::fs::openat(&opened, &name, flags, Mode::empty())?;
                give(&File::from(file), (user.uid, user.gid))?;
            }
            fchown(&opened, Some(user.uid), Some(user.gid))
        }
        None => Ok(()),
    }
}

fn of_another(directory: &Path, owner: u32) -> String {
    let (name, me) = (user_name(owner), user_name(geteuid().as_raw()));
    format!(
        "it belongs to user {name}; if no ringdisk runs as {name}, 'chown -R {me}: {0}' gives it to {me}",
        directory.display()
    )
}

/// The lock in a directory that is to be given away, if there is one.
///
/// # Errors
/// Another process uses the directory.
fn lock_to_give(directory: &File) -> io::Result<Option<File>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let lock = match rustix::fs::openat(directory, OWN_FILES[0], flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        lock => File::from(lock?),
    };
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(io::Error::other(
            "another ringdisk uses it; stop that one, or name another directory",
        )),
        locked => Ok(locked.map(|()| Some(lock))?),
    }
}

/// Gives a file in such a directory to a user and a group. The user may have placed it there: it is opened once,
/// checked, and the path is not used again.
///
/// # Errors
/// It belongs to another user, or has a second name, which may be in use elsewhere.
pub fn give(file: &File, (uid, gid): (u32, u32)) -> io::Result<()> {
    let there = file.metadata()?;
    let is_ours = [geteuid().as_raw(), uid].contains(&there.uid());
    if !there.is_file() || there.nlink() != 1 || !is_ours {
        let e = "it is no file that ringdisk has made: another user's, or one that has other names";
        return Err(io::Error::other(e));
    }
    fchown(file, Some(uid), Some(gid))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use rustix::fs::{CWD, mknodat};

    use super::*;

    #[test]
    fn lines_are_found_by_their_whole_name() {
        let file = "root:x:0:\nkvm2:x:7:\nkvm:x:104:a,b\nbroken\n";
        assert_eq!(column(file, "kvm", 2), Some(104));
        assert_eq!(column(file, "kv", 2), None);
        assert_eq!(column(file, "broken", 2), None);
        assert_eq!(group("65534"), Ok(65534));
        assert!(group("there is none").is_err());
        // The kernel takes it for "unchanged".
        assert!(group("4294967295").is_err() && user("4294967295").is_err());
        assert!(UserAccount::find("root").is_err());
    }

    #[test]
    fn only_a_directory_for_ringdisk_is_given_away() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only_a_directory_for_ringdisk_is_given_away: needs root");
        }
        let nobody = UserAccount::find("nobody").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        fs::create_dir(&path).unwrap();
        let own = [
            "lock",
            "state.json",
            "queues.json",
            "guests.json",
            "a.bitmaps",
            "a.intent",
            "a.journal",
        ];
        for name in own {
            fs::write(path.join(name), "").unwrap();
        }
        make_directory(&path, Some(&nobody)).unwrap();
        for name in own.iter().copied().chain(["."]) {
            assert_eq!(fs::metadata(path.join(name)).unwrap().uid(), nobody.uid);
        }
        fs::write(dir.path().join("mail"), "").unwrap();
        let refused = make_directory(dir.path(), Some(&nobody)).unwrap_err();
        assert!(refused.to_string().contains("mail"), "{refused}");
        let open = fs::Permissions::from_mode(0o1777);
        fs::set_permissions(&path, open).unwrap();
        let refused = make_directory(&path, None).unwrap_err();
        assert!(refused.to_string().contains("others"), "{refused}");
        // A user who can write to the parent directory chooses the target of a link.
        let (roots, link) = (dir.path().join("roots"), dir.path().join("link"));
        fs::create_dir(&roots).unwrap();
        symlink(&roots, &link).unwrap();
        let refused = make_directory(&link, Some(&nobody)).unwrap_err();
        assert!(refused.to_string().contains("link"), "{refused}");
        assert_eq!(fs::metadata(&roots).unwrap().uid(), 0);
        make_directory(&link, None).unwrap();
    }

    #[test]
    fn only_a_file_of_its_own_is_given_away() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only_a_file_of_its_own_is_given_away: needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (nobody, daemon) = ((65534, 65534), 1);
        for name in ["new", "its", "daemons", "linked"] {
            fs::write(path(name), "").unwrap();
        }
        chown(path("its"), Some(nobody.0), None).unwrap();
        chown(path("daemons"), Some(daemon), None).unwrap();
        fs::hard_link(path("linked"), path("link")).unwrap();
        let (fifo, mode) = (rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR);
        mknodat(CWD, path("fifo"), fifo, mode, 0).unwrap();
        for (name, owner) in [
            ("new", nobody.0),
            ("its", nobody.0),
            ("daemons", daemon),
            ("link", 0),
            ("fifo", 0),
        ] {
            let file = File::options().read(true).write(true).open(path(name));
            let file = file.unwrap();
            let given = give(&file, nobody);
            assert_eq!(given.is_ok(), owner == nobody.0, "{name}: {given:?}");
            assert_eq!(file.metadata().unwrap().uid(), owner, "{name}");
        }
    }
}
