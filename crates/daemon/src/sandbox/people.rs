//! Users and groups by name, as `/etc/passwd` and `/etc/group` had them at the start: later they cannot be read any
//! more. Whoever is known only elsewhere (LDAP, SSSD) goes by number.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::path::Path;
use std::sync::OnceLock;

use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};

/// Who this process is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Person {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    /// All groups.
    groups: Vec<u32>,
}

struct People {
    users: String,
    groups: String,
}

fn people() -> &'static People {
    static PEOPLE: OnceLock<People> = OnceLock::new();
    PEOPLE.get_or_init(|| {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        People {
            users: read("/etc/passwd"),
            groups: read("/etc/group"),
        }
    })
}

/// Reads what is known of them.
pub fn read() {
    people();
}

/// The number of a group, by its name or as it is.
///
/// # Errors
/// There is no such group.
pub fn group(name: &str) -> Result<u32, String> {
    number(name)
        .or_else(|| column(&people().groups, name, 2))
        .ok_or_else(|| format!("there is no group '{name}' in /etc/group; a number will do"))
}

/// The number of a user, by its name or as it is.
///
/// # Errors
/// There is no such user.
pub fn user(name: &str) -> Result<u32, String> {
    number(name)
        .or_else(|| column(&people().users, name, 2))
        .ok_or_else(|| format!("there is no user '{name}' in /etc/passwd; a number will do"))
}

fn number(text: &str) -> Option<u32> {
    text.parse().ok()
}

/// A number in a file of lines such as `kvm:x:104:`.
fn column(file: &str, name: &str, at: usize) -> Option<u32> {
    let mut lines = file.lines().map(|line| line.split(':'));
    let mut line = lines.find(|line| line.clone().next() == Some(name))?;
    line.nth(at)?.parse().ok()
}

impl Person {
    /// A user with all groups.
    ///
    /// # Errors
    /// There is no such user, or it is root.
    pub fn find(name: &str) -> Result<Self, String> {
        let People { users, groups } = people();
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

    /// Makes all threads of this process that user, for good.
    ///
    /// # Errors
    /// Only root may.
    pub fn take_over(&self) -> io::Result<()> {
        let groups: Vec<Gid> = self.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
        setgroups(&groups)?;
        setgid(Gid::from_raw(self.gid))?;
        setuid(Uid::from_raw(self.uid))?;
        Ok(())
    }
}

/// Makes a directory for files that ringdisk keeps, now and when it has become `user`, if it is not there.
///
/// # Errors
/// It cannot be made, or is somebody else's, who could put other files there.
pub fn make_directory(directory: &Path, user: Option<&Person>) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    let there = fs::metadata(directory)?;
    let owner = there.uid();
    if there.mode() & 0o022 != 0 {
        return Err(io::Error::other("others may write to it"));
    }
    match user {
        Some(user) if owner == user.uid => Ok(()),
        _ if owner != rustix::process::geteuid().as_raw() => {
            Err(io::Error::other("it belongs to another user"))
        }
        Some(user) => {
            // Not a directory that somebody has named by mistake.
            for entry in fs::read_dir(directory)? {
                let name = entry?.file_name();
                let ours = ["lock", "state.json", "state.new"]
                    .iter()
                    .any(|ours| name == *ours)
                    || Path::new(&name).extension().is_some_and(|e| e == "journal");
                if !ours {
                    return Err(io::Error::other(format!(
                        "it is not {0}'s, and has other files, as {1}; if it is there for ringdisk alone, 'chown {0}' \
                         gives it away",
                        user.name,
                        name.display()
                    )));
                }
            }
            chown(directory, Some(user.uid), Some(user.gid))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn lines_are_found_by_their_whole_name() {
        let file = "root:x:0:\nkvm2:x:7:\nkvm:x:104:a,b\nbroken\n";
        assert_eq!(column(file, "kvm", 2), Some(104));
        assert_eq!(column(file, "kv", 2), None);
        assert_eq!(column(file, "broken", 2), None);
        assert_eq!(group("65534"), Ok(65534));
        assert!(group("there is none").is_err());
        assert!(Person::find("root").is_err());
    }

    #[test]
    fn only_a_directory_for_ringdisk_is_given_away() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only_a_directory_for_ringdisk_is_given_away: needs root");
        }
        let nobody = Person::find("nobody").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("state.json"), "").unwrap();
        make_directory(&path, Some(&nobody)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().uid(), nobody.uid);
        fs::write(dir.path().join("mail"), "").unwrap();
        let refused = make_directory(dir.path(), Some(&nobody)).unwrap_err();
        assert!(refused.to_string().contains("mail"), "{refused}");
        let open = fs::Permissions::from_mode(0o1777);
        fs::set_permissions(&path, open).unwrap();
        let refused = make_directory(&path, None).unwrap_err();
        assert!(refused.to_string().contains("others"), "{refused}");
    }
}
