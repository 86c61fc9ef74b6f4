//! What disks need beside their names: files, sockets, throttle groups, I/O threads and names of NBD exports. Commands claim
//! these as well, since nobody has them while a reload has stopped a disk and not started it again.

use std::collections::BTreeSet;
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

/// A disk that a reload has stopped or is moving, until all disks of the reload are served again.
pub(super) struct Restarting {
    /// Its configuration as it was served, which the state has until then.
    pub(super) disk: DiskSpec,
    /// Whether it is stopped, and not moved while it is served.
    pub(super) is_stopped: bool,
    /// All its files, down to the last that its image builds on. Nobody knows those of another image before it is open.
    files: Vec<(Identity, FileUse)>,
    /// What the reload has claimed.
    claimed: BTreeSet<String>,
}

impl Restarting {
    fn conflicts(&self, (file, ours): (Identity, FileUse)) -> bool {
        let mut files = self.files.iter();
        files.any(|&(its, theirs)| {
            its == file && (ours == FileUse::Write || theirs == FileUse::Write)
        })
    }
}

impl ServerState {
    /// Checks that an open node has no file that a disk needs which another command is starting again. That one waits for
    /// longer than it takes to close the node.
    pub(super) fn check_not_restarting(
        &self,
        claim: &Claim<'_>,
        node: &Node,
    ) -> Result<(), ServerError> {
        let files = node.files();
        let used = files
            .iter()
            .filter_map(|&file| Some((file, node.uses(file)?)));
        let used: Vec<_> = used.collect();
        let others = self.restarting.iter();
        let mut others = others.filter(|other| !claim.has(&other.disk.name));
        match others.find(|other| used.iter().any(|file| other.conflicts(*file))) {
            Some(other) => {
                let file = node.filename.clone().into();
                Err(ServerError::FileInUse(file, other.disk.name.clone()))
            }
            None => Ok(()),
        }
    }

    /// The same for the file of a disk that is to be opened, which may begin a journal there.
    pub(super) fn check_file_not_restarting(
        &self,
        disk: &DiskSpec,
        there: Option<Identity>,
    ) -> Result<(), ServerError> {
        let usage = if disk.read_only {
            FileUse::Read
        } else {
            FileUse::Write
        };
        let conflicts =
            |other: &&Restarting| there.is_some_and(|there| other.conflicts((there, usage)));
        let others = self.restarting.iter();
        let mut others = others.filter(|other| !other.claimed.contains(&disk.name));
        match others.find(conflicts) {
            Some(other) => {
                let (file, user) = (disk.file.to_string().into(), other.disk.name.clone());
                Err(ServerError::FileInUse(file, user))
            }
            None => Ok(()),
        }
    }
}

/// Disks whose files other commands cannot open until this is dropped.
pub(super) struct ReservedFiles<'a>(&'a Server, BTreeSet<String>);

impl Drop for ReservedFiles<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state
            .restarting
            .retain(|other| !self.1.contains(&other.disk.name));
    }
}

impl Server {
    /// Reserves the files of disks that a reload stops or moves for the other disks of the reload.
    pub(super) fn reserve_files(
        &self,
        claim: &Claim<'_>,
        stopped: BTreeSet<String>,
        moved: BTreeSet<String>,
    ) -> ReservedFiles<'_> {
        let mut state = self.state();
        let mut kept = Vec::new();
        for disk in stopped.iter().chain(&moved) {
            let Some(entry) = state.nodes.get(disk) else {
                continue;
            };
            let files = entry.node.files().into_iter();
            let files = files.filter_map(|file| Some((file, entry.node.uses(file)?)));
            kept.push(Restarting {
                disk: entry.spec(),
                is_stopped: stopped.contains(disk),
                files: files.collect(),
                claimed: claim.names().clone(),
            });
        }
        state.restarting.extend(kept);
        ReservedFiles(self, stopped.into_iter().chain(moved).collect())
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
