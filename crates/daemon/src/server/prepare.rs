//! Applies many changes at once. They are checked against the target state, and everything that they need is prepared
//! before the first disk is disturbed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use engine::Identity;

use super::replace::close;
use super::{Claim, DISKS_MAX, Server, ServerError, ServerState, identity};
use crate::config::conflicts::ConflictError;
use crate::config::export::ExportSpec;
use crate::config::sockets;
use crate::config::spec::{DiskSpec, FileSpec};
use crate::node::Node;
use crate::server::connection_info::ConnectionInfo;
use crate::socket::{self, Socket, reach};

/// How the target state differs from what is served now.
pub struct TargetState<'a> {
    /// Disks that stop, or stop and start again.
    pub ends: BTreeSet<&'a str>,
    /// New disks.
    pub starts: Vec<&'a DiskSpec>,
    /// Disks that move to other files while they are served, in their new form.
    pub moves: Vec<&'a DiskSpec>,
    /// Disks that are absent, in their new form.
    pub absent: Vec<&'a DiskSpec>,
}

impl TargetState<'_> {
    /// Whether a disk leaves its file, if only temporarily.
    pub fn leaves(&self, disk: &str) -> bool {
        self.ends.contains(disk) || self.moves.iter().any(|moved| moved.name == disk)
    }
}

/// A disk that is about to be served.
pub struct PreparedDisk {
    spec: DiskSpec,
    /// Open and locked; not yet if a disk that is served has to leave its file first.
    node: Option<Node>,
    socket: Socket,
}

impl PreparedDisk {
    /// Whether its file is open: no other disk has to leave that first.
    pub(super) fn is_open(&self) -> bool {
        self.node.is_some()
    }
}

impl Server {
    /// Checks that the disks do not conflict, and that those to be stopped can be stopped.
    ///
    /// # Errors
    /// Why not, with the name of the disk.
    pub fn check_target_state(&self, end: &TargetState<'_>) -> Result<(), ServerError> {
        let fail = |disk: &str, e: ServerError| e.of_disk(disk);
        for disk in &end.starts {
            let free = self.backups.check_name(&disk.name);
            free.map_err(|e| fail(&disk.name, e.into()))?;
        }
        let new = end.starts.iter().chain(&end.moves);
        for disk in new.clone() {
            self.check_answers(disk)?;
        }
        // Without the lock, since this waits for storage.
        let new = new.map(|&disk| (disk, identity(&disk.file)));
        let new: Vec<_> = new.collect();
        let (mut files, sockets) = {
            let state = self.state();
            for disk in &end.ends {
                state.check_may_end(disk).map_err(|e| fail(disk, e))?;
            }
            let stays = |name: &str| !end.ends.contains(name);
            let inhibit = state
                .nodes
                .values()
                .filter(|entry| stays(entry.node.name()));
            let disks = inhibit.clone().count() + end.starts.len();
            let mut files = Files::default();
            for entry in inhibit.filter(|entry| !end.leaves(entry.node.name())) {
                files.add(&entry.node.spec, entry.node.file_identity());
            }
            for &disk in &end.starts {
                let is_there =
                    state.nodes.contains_key(&disk.name) || state.absent.contains_key(&disk.name);
                let problem = if is_there && stays(&disk.name) {
                    ConflictError::SameName(disk.name.clone()).into()
                } else if disks > DISKS_MAX {
                    ServerError::TooMany(format!("{DISKS_MAX} disks"))
                } else {
                    continue;
                };
                return Err(fail(&disk.name, problem));
            }
            let exports = state.exports.values();
            let exports = exports.filter(|export| stays(export.node.name()));
            let exports = exports.map(|e| (e.socket.clone(), e.id.clone()));
            // Their VMs wait there.
            let absent = state.absent.values().map(|absent| &absent.spec);
            let is_double = |disk: &&DiskSpec| end.starts.iter().any(|it| it.file == disk.file);
            let absent = absent.filter(|disk| stays(&disk.name) && !is_double(disk));
            let absent = absent.map(|disk| {
                let mut changed = end.absent.iter();
                let changed = changed.find(|it| it.name == disk.name);
                (sockets::path(changed.unwrap_or(&disk)), disk.name.clone())
            });
            let sockets: Vec<_> = exports.chain(absent).collect();
            (files, sockets)
        };
        for (disk, there) in new {
            files.check(disk, there).map_err(|e| fail(&disk.name, e))?;
            files.add(disk, there);
        }
        let context = sockets
            .into_iter()
            .map(|(path, id)| (socket::canonical_path(&path), id));
        let mut sockets: BTreeMap<PathBuf, String> = context.collect();
        for disk in &end.starts {
            let path = sockets::path(disk);
            if let Some(other) = sockets.insert(socket::canonical_path(&path), disk.name.clone()) {
                let e = ConflictError::SameSocket(other, disk.name.clone(), path);
                return Err(fail(&disk.name, e.into()));
            }
        }
        Ok(())
    }

    /// Checks that an absent disk with the name of this one is not another VM's, whose exports this one would get.
    ///
    /// # Errors
    /// It is.
    pub fn check_absent_is_same(&self, disk: &DiskSpec) -> Result<(), ServerError> {
        match self.absent_spec(&disk.name) {
            Some(absent) if sockets::are_of_two_vms(&absent, disk) => {
                Err(ConflictError::SameName(disk.name.clone()).into())
            }
            _ => Ok(()),
        }
    }

    /// Checks that storage says whether the file of a disk is there.
    pub fn check_answers(&self, disk: &DiskSpec) -> Result<(), ServerError> {
        let file = disk.file.clone();
        let look = move |_: &Self| Ok(identity(&file));
        match self.in_time(&disk.name, Some(&disk.file), look, |_, _| {}) {
            Err(ServerError::NotResponding(name)) => {
                let problem = format!("{}: its storage does not answer", disk.file);
                Err(ServerError::Silent(name, problem))
            }
            looked => looked.map(drop),
        }
    }

    /// Checks that a disk is served from this file still, for a command that ends it because of that.
    ///
    /// # Errors
    /// It has moved.
    pub fn check_file_is(&self, node: &str, file: &str) -> Result<(), ServerError> {
        let now = {
            let state = self.state();
            let served = state
                .nodes
                .get(node)
                .map(|entry| entry.node.filename.clone());
            served.or_else(|| {
                state
                    .absent
                    .get(node)
                    .map(|absent| absent.spec.file.to_string())
            })
        };
        match now {
            Some(now) if now != file => Err(ServerError::HasMoved(node.into(), file.into(), now)),
            _ => Ok(()),
        }
    }

    /// The same, and that the file still has this name. Asks storage, up to a limit.
    ///
    /// # Errors
    /// It has moved, another file has its name, or the storage does not answer.
    pub fn check_is_at(&self, node: &str, file: &str) -> Result<(), ServerError> {
        self.check_file_is(node, file)?;
        let entry = self.state().nodes.get(node).map(|entry| entry.node.clone());
        let Some(open) = entry else {
            return Ok(());
        };
        let file = open.spec.file.clone();
        let check = move |_: &Self| Ok(open.check_same()?);
        self.in_time(node, Some(&file), check, |_, ()| {})
    }

    /// Opens what a new disk needs, without disturbing others. A file that a disk still uses which `leaves` it is only
    /// checked.
    ///
    /// # Errors
    /// It cannot be served, as far as is known.
    pub fn prepare(
        &self,
        spec: DiskSpec,
        leaves: &dyn Fn(&str) -> bool,
    ) -> Result<PreparedDisk, ServerError> {
        self.threads.check(&spec.iothreads)?;
        self.sandbox.check_disk(&spec)?;
        let there = identity(&spec.file);
        let user = {
            let state = self.state();
            state.group(spec.throttle_group.as_deref())?;
            match state.check_file(&spec, there) {
                Err(ServerError::FileInUse(_, user)) if leaves(&user) => {
                    state.nodes.get(&user).map(|entry| entry.node.clone())
                }
                in_use => {
                    in_use?;
                    None
                }
            }
        };
        let served = {
            let state = self.state();
            let entry = state.nodes.get(&spec.name);
            entry.map(|entry| entry.node.clone())
        };
        let (same, other) = match &served {
            Some(served) if served.spec.file == spec.file => (Some(served), None),
            served => (None, served.as_ref()),
        };
        if let Some(same) = same {
            let same = same.clone();
            let check = move |_: &Self| Ok(same.check_same()?);
            self.in_time(&spec.name, Some(&spec.file), check, |_, ()| {})?;
        }
        if let (Some(served), Some(there)) = (other, there)
            && served.files().contains(&there)
            && !served.is_on(there)
        {
            let (file, present) = (spec.file.to_string(), served.filename.clone());
            return Err(ServerError::Older(file, present));
        }
        if same.is_none() {
            // Before it is opened, which may change it.
            self.check_file_not_left(&spec)?;
        }
        let export = ExportSpec::from(&spec);
        let node = match user {
            Some(user) => {
                let wanted = spec.clone();
                let check = move |server: &Self| {
                    Node::check_openable(&wanted, &server.context)?;
                    Ok(user.check_lock(&wanted)?)
                };
                self.in_time(&spec.name, Some(&spec.file), check, |_, ()| {})?;
                None
            }
            None => Some(self.open_in_time(spec.clone(), |server, spec| server.open(spec, &[]))?),
        };
        let checked = match (&node, other) {
            (Some(node), Some(served)) => {
                let newer = node.check_not_older(served).map_err(ServerError::from);
                newer.and_then(|()| self.check_not_left(node))
            }
            (Some(node), None) => self.check_not_left(node),
            _ => Ok(()),
        };
        if let Err(e) = checked {
            release(node);
            return Err(e);
        }
        match self.make_socket(&export) {
            Ok(socket) => Ok(PreparedDisk { spec, node, socket }),
            Err(e) => {
                release(node);
                Err(e)
            }
        }
    }

    /// If another disk still has the path, a socket next to it.
    fn make_socket(&self, export: &ExportSpec) -> Result<Socket, ServerError> {
        let (path, access) = (&export.socket, reach::of_guests(export.socket_access));
        self.sandbox.check_socket(path)?;
        let ours: Vec<_> = {
            let state = self.state();
            state.exports.values().map(|e| e.socket.clone()).collect()
        };
        let place = socket::canonical_path(path);
        let same = |other: &&PathBuf| other.file_name() == path.file_name();
        let mut same = ours.iter().filter(same);
        let socket = if same.any(|other| socket::canonical_path(other) == place) {
            Socket::bind_beside(path, access)
        } else {
            Socket::bind(path, access)
        };
        socket.map_err(|e| ServerError::Export(e.into()))
    }

    /// Serves a disk.
    ///
    /// # Errors
    /// It is not served.
    pub fn serve(
        &self,
        claim: &Claim<'_>,
        prepared: PreparedDisk,
    ) -> Result<ConnectionInfo, ServerError> {
        let PreparedDisk {
            spec,
            node,
            mut socket,
        } = prepared;
        let export = ExportSpec::from(&spec);
        let node = match node {
            Some(node) => node,
            None => self.open_in_time(spec, Self::open_current)?,
        };
        self.serve_opened(claim, node, &export, || {
            let moved = socket.move_to(&export.socket);
            moved.map_err(|e| ServerError::Export(e.into()))?;
            Ok(Some(socket))
        })
    }

    /// Closes what was opened for a disk.
    pub fn forget(&self, prepared: PreparedDisk) {
        release(prepared.node);
    }
}

fn release(node: Option<Node>) {
    if let Some(node) = node {
        close(Arc::new(node), "which was to be served");
    }
}

impl ServerState {
    /// Checks that a disk can be stopped, if it is served.
    fn check_may_end(&self, name: &str) -> Result<(), ServerError> {
        let mut nodes = self.nodes.values();
        let above = nodes.find(|entry| entry.child.as_deref() == Some(name));
        match above.map(|entry| entry.node.name().to_owned()) {
            Some(above) => Err(ServerError::NodeInUse(name.into(), above)),
            None => Ok(()),
        }
    }
}

/// The files of disks, and whether they are only read.
#[derive(Default)]
struct Files {
    files: BTreeMap<(u64, u64), Vec<(String, bool)>>,
    images: Vec<(rbd::Location, String, bool)>,
}

impl Files {
    fn add(&mut self, disk: &DiskSpec, there: Option<Identity>) {
        let (name, read_only) = (disk.name.clone(), disk.read_only);
        if let Some(Identity { device, inode }) = there {
            let users = self.files.entry((device, inode)).or_default();
            users.push((name, read_only));
        } else if let FileSpec::Rbd(location) = &disk.file {
            let location = rbd::Location::clone(location);
            self.images.push((location, name, read_only));
        }
    }

    /// Several disks may read a file.
    fn check(&self, disk: &DiskSpec, there: Option<Identity>) -> Result<(), ServerError> {
        let excludes = |read_only: bool| !(read_only && disk.read_only);
        let (user, file) = match (&disk.file, there) {
            (FileSpec::Path(path), Some(Identity { device, inode })) => {
                let mut users = self.files.get(&(device, inode)).into_iter().flatten();
                let user = users.find(|(_, read_only)| excludes(*read_only));
                (user.map(|(name, _)| name), path.clone())
            }
            (FileSpec::Rbd(location), _) => {
                let mut images = self.images.iter();
                let same = |l: &&(rbd::Location, String, bool)| l.0.is_same_image(location);
                let user = images.find(|l| same(l) && excludes(l.2));
                (user.map(|(_, name, _)| name), location.to_string().into())
            }
            _ => return Ok(()),
        };
        match user {
            Some(user) => Err(ServerError::FileInUse(file, user.clone())),
            None => Ok(()),
        }
    }
}
