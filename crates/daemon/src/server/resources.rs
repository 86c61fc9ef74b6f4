//! What disks need beside their names: files, sockets, throttle groups, I/O threads and names of NBD exports. Commands claim
//! these as well, since nobody has them while a reload has stopped a disk and not started it again.

use std::path::Path;

use super::{Server, identity};
use crate::config::sockets;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::socket::canonical_path;

/// A throttle group, as it is claimed.
pub fn group(name: &str) -> String {
    format!("group:{name}")
}

/// An I/O thread, as it is claimed.
pub fn thread(id: &str) -> String {
    format!("iothread:{id}")
}

/// The name of an NBD export, as it is claimed.
pub fn nbd_name(name: &str) -> String {
    format!("nbd:{name}")
}

/// A socket of a guest, as it is claimed.
pub fn socket(path: &Path) -> String {
    format!("socket:{}", canonical_path(path).display())
}

/// The groups and threads that a disk uses. Other disks may use them as well.
pub(super) fn shared(disk: &DiskSpec) -> impl Iterator<Item = String> {
    let groups = disk.throttle_group.iter().map(|name| group(name));
    groups.chain(disk.iothreads.iter().map(|id| thread(id)))
}

impl Server {
    /// The files and the socket that a disk has for itself, as they are claimed. Asks storage, up to a limit.
    pub fn own_resources(&self, disk: &DiskSpec) -> Vec<String> {
        let mut names = self.file_resources(&disk.name, &disk.file);
        names.extend(
            disk.data_file
                .iter()
                .map(|path| format!("file:{}", path.display())),
        );
        names.push(socket(&sockets::path(disk)));
        names
    }

    /// A file that a command names for a disk, as it is claimed: by its name, and, if its storage answers, by its identity.
    pub fn file_resources(&self, disk: &str, file: &FileSpec) -> Vec<String> {
        if let FileSpec::Null(_) = file {
            return Vec::new();
        }
        let path = file.clone();
        let look = move |_: &Self| Ok(identity(&path));
        let there = self
            .in_time(disk, Some(file), look, |_, _| {})
            .ok()
            .flatten();
        let identity = there.map(|there| format!("file:{}:{}", there.device, there.inode));
        [format!("file:{file}")]
            .into_iter()
            .chain(identity)
            .collect()
    }
}
