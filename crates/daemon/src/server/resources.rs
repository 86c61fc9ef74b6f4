//! What disks need beside their names: files, sockets, throttle groups, I/O threads and names of NBD exports. Commands claim
//! these as well, since nobody has them while a reload has stopped a disk and not started it again.

use std::path::Path;

use engine::Identity;
use tracing::info;

use super::{Claim, Server, ServerError, ServerState, identity};
use crate::config::sockets;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::node::{FileUse, Node};
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

/// All files of a disk that is being started again, down to the last that its image builds on. Nobody knows those of another
/// image before it is open.
pub(super) struct Restarting {
    disk: String,
    files: Vec<(Identity, FileUse)>,
}

impl ServerState {
    /// Checks that an open node has no file that a disk needs which another command is starting again. That one waits for
    /// longer than it takes to close the node.
    pub(super) fn check_not_restarting(
        &self,
        claim: &Claim<'_>,
        node: &Node,
    ) -> Result<(), ServerError> {
        let conflicts = |&(file, theirs): &(Identity, FileUse)| {
            let ours = node.uses(file);
            ours == Some(FileUse::Write) || ours.is_some() && theirs == FileUse::Write
        };
        let others = self.restarting.iter();
        let mut others = others.filter(|other| !claim.has(&other.disk));
        match others.find(|other| other.files.iter().any(conflicts)) {
            Some(other) => {
                let file = node.filename.clone().into();
                Err(ServerError::FileInUse(file, other.disk.clone()))
            }
            None => Ok(()),
        }
    }
}

impl Server {
    /// Keeps the files of a disk that is to be stopped from other commands, until it is started again.
    pub(super) fn keep_files(&self, disk: &str) {
        let mut state = self.state();
        let Some(node) = state.nodes.get(disk).map(|entry| entry.node.clone()) else {
            return;
        };
        let files = node.files().into_iter();
        let files = files.filter_map(|file| Some((file, node.uses(file)?)));
        let disk = disk.to_owned();
        let files = files.collect();
        state.restarting.push(Restarting { disk, files });
    }

    /// A disk has been started again, or could not be.
    pub(super) fn free_files(&self, disk: &str) {
        let mut state = self.state();
        state.restarting.retain(|other| other.disk != disk);
    }

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
        let (name, path) = (disk.to_owned(), file.clone());
        let late = move |_: &Self, _| info!("disk {name}: {path}: its storage answers again");
        let there = self.in_time(disk, Some(file), look, late).ok().flatten();
        let identity = there.map(|there| format!("file:{}:{}", there.device, there.inode));
        [format!("file:{file}")]
            .into_iter()
            .chain(identity)
            .collect()
    }
}
