//! Who may connect to the socket of a disk: by default QEMU's group, and whether its members can reach the socket at all.
//!
//! A VM whose QEMU cannot reach the socket hangs at its start without a message: QEMU retries for ever.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::geteuid;
use tracing::warn;

use crate::config::spec::{DiskSpec, SocketAccess};
use crate::credentials::{self, UserAccount};

/// The access of a disk's socket that is made now. If the operator has set nothing, [QEMU's group](credentials::qemu_group)
/// may connect, if there is one. Root makes it for the user that this process becomes, who may have to replace it.
pub fn of_guests(configured: SocketAccess) -> SocketAccess {
    let mut access = configured;
    if configured == SocketAccess::default() {
        access.group = credentials::qemu_group();
        if access.group.is_none() {
            return configured;
        }
    }
    let later = || geteuid().is_root().then(credentials::later_user).flatten();
    access.owner = configured.owner.or_else(later);
    access
}

/// Logs that the user that this process becomes cannot give sockets to QEMU's group, if these disks have no other setting.
pub fn warn_if_not_member(user: &UserAccount, disks: &[DiskSpec]) {
    let is_default = |disk: &DiskSpec| disk.socket_access == SocketAccess::default();
    let Some(group) =
        credentials::qemu_group_of_host().filter(|group| !user.groups().contains(group))
    else {
        return;
    };
    if disks.iter().any(is_default) {
        let (group, user) = (credentials::group_name(group), &user.name);
        warn!(
            "user {user} is not a member of group {group}, QEMU's: the sockets of disks stay root's, and a QEMU of another user \
             cannot connect; 'usermod -aG {group} {user}' and a restart of ringdisk let it, or socket-group and socket-owner"
        );
    }
}

/// Logs what keeps the group of a disk's socket from connecting to it.
pub fn warn_if_closed(disk: &str, socket: &Path, access: SocketAccess) {
    const GROUP_MAY_WRITE: u32 = 0o020;
    let Some(group) = access.group else {
        return;
    };
    // Otherwise the operator keeps the group out.
    let is_open = access.mode.is_none_or(|mode| mode & GROUP_MAY_WRITE != 0);
    if is_open && let Some(directory) = closed_directory(socket, group) {
        let (directory, group) = (directory.display(), credentials::group_name(group));
        warn!(
            "disk {disk}: its socket {} is for group {group}, as QEMU's, whose members may not pass directory {directory}: a VM \
             would wait for ever; 'setfacl -m g:{group}:x {directory}' lets them, or choose another place with socket=PATH",
            socket.display(),
        );
    }
}

/// The first directory on the way to a file that members of a group may not pass.
fn closed_directory(file: &Path, group: u32) -> Option<PathBuf> {
    let directory = fs::canonicalize(file.parent()?).ok()?;
    let members = credentials::members(group);
    let mut all: Vec<&Path> = directory.ancestors().collect();
    all.reverse();
    let closed = all.into_iter().find(|directory| {
        fs::metadata(directory).is_ok_and(|there| !may_pass(&there, group, &members))
            && !has_acl(directory)
    });
    closed.map(Path::to_owned)
}

/// Whether members of a group may pass a directory, as far as owner and mode tell: other groups than root's may be theirs,
/// too.
fn may_pass(directory: &fs::Metadata, group: u32, members: &[u32]) -> bool {
    const OWNER: u32 = 0o100;
    const GROUP: u32 = 0o010;
    const OTHERS: u32 = 0o001;
    let may = |class| directory.mode() & class != 0;
    let (of_owner, of_group) = (members.contains(&directory.uid()), directory.gid() == group);
    of_owner && may(OWNER)
        || of_group && may(GROUP)
        || !of_group && (may(OTHERS) || directory.gid() != 0 && may(GROUP))
}

/// Whether a directory has an access list, which may let them pass (acl(5)). True if that is unknown.
fn has_acl(directory: &Path) -> bool {
    let none: &mut [u8] = &mut [];
    let found = rustix::fs::getxattr(directory, "system.posix_acl_access", none);
    !matches!(found, Err(Errno::NODATA | Errno::NOTSUP))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn the_directory_that_keeps_a_group_out_is_found() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: the_directory_that_keeps_a_group_out_is_found: needs root");
        }
        const GROUP: u32 = 61_000;
        let place = tempfile::tempdir_in("/run").unwrap();
        let outer = place.path().canonicalize().unwrap();
        let inner = outer.join("inner");
        fs::create_dir(&inner).unwrap();
        let socket = inner.join("vm.sock");
        let set = |directory: &Path, mode, gid| {
            chown(directory, Some(0), Some(gid)).unwrap();
            fs::set_permissions(directory, PermissionsExt::from_mode(mode)).unwrap();
        };
        let found = |outer_mode, outer_group, inner_mode, inner_group| {
            set(&outer, outer_mode, outer_group);
            set(&inner, inner_mode, inner_group);
            closed_directory(&socket, GROUP)
        };
        assert_eq!(found(0o755, 0, 0o750, GROUP), None);
        assert_eq!(found(0o711, 0, 0o755, 0), None);
        assert_eq!(found(0o700, 0, 0o700, 0).as_ref(), Some(&outer));
        assert_eq!(found(0o755, 0, 0o750, 0).as_ref(), Some(&inner));
        // The class of the group counts, not that of the others.
        assert_eq!(found(0o755, 0, 0o705, GROUP).as_ref(), Some(&inner));
        // QEMU may be a member of this group as well.
        assert_eq!(found(0o755, 0, 0o750, GROUP + 1), None);
    }
}
