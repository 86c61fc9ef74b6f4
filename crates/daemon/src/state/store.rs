//! Persists changes that are made at run time in a state file.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use block::ThrottleLimits;
use engine::Identity;
use rustix::fs::{FlockOperation, flock};
use serde::de::DeserializeOwned;
use thiserror::Error;
use tracing::{error, warn};

use crate::config::export::ExportSpec;
use crate::config::nbd::NbdConfig;
use crate::config::sockets;
use crate::config::spec::DiskSpec;
use crate::config::{Config, ThreadSpec, directory_of};
use crate::state::left::LeftFiles;
use crate::state::{BYTES_MAX, DiskOverride, ExportOverride, NodeOverride, Overrides, Remembered};

/// The file in the directory.
const NAME: &str = "state.json";

/// The file beside it, with what the previous version would not accept in the first. That version leaves it alone.
const QUEUES_NAME: &str = "queues.json";

/// The file with all that guests depend on. Older versions leave it alone, and have parts of it in the two others, which are
/// written after it.
const GUESTS_NAME: &str = "guests.json";

/// The files that disks have left, which older versions do not know.
const LEFT_NAME: &str = "left.json";

/// The file beside it with the path of the directory that the configuration has.
const DIRECTORY_NAME: &str = "directory";

/// The process may be root and the directory another user's: does not follow a link there, or wait for a pipe.
const OPEN_FLAGS: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK;

/// What the operator has configured: on the command line, and in the configuration that applies.
#[derive(Clone, Default)]
pub struct Configured {
    pub disks: Vec<DiskSpec>,
    pub groups: Vec<(String, ThrottleLimits)>,
    pub threads: Vec<(String, ThreadSpec)>,
    pub nbd: NbdConfig,
    /// The directory with more files of the configuration, if there is one.
    pub directory: Option<PathBuf>,
}

impl Configured {
    pub fn new(command_line: &[DiskSpec], config: &Config) -> Self {
        let mut disks = command_line.to_vec();
        disks.extend(config.disks.iter().cloned());
        Self {
            disks,
            groups: config.groups.clone(),
            threads: config.threads.clone(),
            nbd: config.nbd_config(),
            directory: config.directory.clone().filter(|_| config.has_files),
        }
    }
}

/// Everything that a server serves, in terms of configuration.
pub struct Inventory {
    pub configured: Configured,
    /// Configured disks that have been detached, if their last file was not the configured one.
    pub detached: Vec<DiskOverride>,
    /// Disks that are to be served and cannot be.
    pub absent: Vec<DiskSpec>,
    /// Opened files, with the limits of the disks on them.
    pub nodes: Vec<NodeOverride>,
    pub exports: Vec<ExportOverride>,
    pub groups: Vec<(String, ThrottleLimits)>,
    pub threads: Vec<(String, ThreadSpec)>,
    /// What guests depend on, by export.
    pub remembered: BTreeMap<String, Remembered>,
    /// The files that disks have left.
    pub left: LeftFiles,
}

#[derive(Debug, Error)]
pub enum StateError {
    #[error(
        "{0}: cannot be used as state directory: {cause}",
        cause = block::explain(.1, "--state names a directory of this user's own")
    )]
    Directory(PathBuf, io::Error),
    #[error(
        "{0}: in use by another ringdisk; stop that one, or give each its own directory with --state"
    )]
    InUse(PathBuf),
    #[error(
        "{0}: is not there, and was part of the configuration: without it, what commands have changed of its disks would be \
         forgotten; put it back, or make an empty one if it is not needed any more"
    )]
    DirectoryGone(PathBuf),
    #[error(
        "{0}: cannot be read: {1}; remove it, if the configuration's directory with more files, if it has one, is there"
    )]
    ReadDirectory(PathBuf, String),
    #[error(
        "{0}: cannot be read: {1}; repair it if possible. Without it, ringdisk starts with the configuration alone: disks \
         that commands have moved to other files would be served from their old ones"
    )]
    Read(PathBuf, String),
    #[error(
        "{0}: cannot be read: {1}; repair it if possible. Without it, a configuration that names a file that a VM has left \
         would put the VM back there"
    )]
    ReadLeft(PathBuf, String),
    #[error(
        "{0}: cannot be read: {1}; repair it if possible. Without it, each disk whose configuration gives no number of queues \
         gets the one that follows from this host's CPUs now: if that is another than before, VMs that were made for the \
         previous number may not connect"
    )]
    ReadQueues(PathBuf, String),
    #[error(
        "{0}: cannot be read: {1}; repair it if possible. Without it, a VM whose disk has got another name in the configuration may \
         find another number of queues, or its write cache on again"
    )]
    ReadGuests(PathBuf, String),
}

/// The state directory, locked by this process.
pub struct StateStore {
    directory: PathBuf,
    lock: File,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Changes that could not be applied when this process started, and stay in the file.
    absent: Overrides,
    /// Disks that are being moved: the state file already has their new files, the server does not.
    moved: Vec<DiskSpec>,
    /// The contents of the files, if they are known.
    text: Option<String>,
    queues: Option<BTreeMap<String, u16>>,
    guests: Option<BTreeMap<String, Remembered>>,
    left: Option<LeftFiles>,
    directory: Option<PathBuf>,
    /// What could not be written last.
    unsaved: Option<Overrides>,
    /// How often there was something else that could not be written.
    unsaved_changes: u64,
    ended: bool,
}

impl StateStore {
    /// Locks a directory and reads the state file. `lock` is the inherited lock, if there is one.
    ///
    /// # Errors
    /// The directory or the file cannot be used.
    pub fn open(directory: &Path, lock: Option<File>) -> Result<(Self, Overrides), StateError> {
        let fail = |e| StateError::Directory(directory.into(), e);
        let new_lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(OPEN_FLAGS)
            .open(directory.join("lock"))
            .map_err(|e| StateError::Directory(directory.join("lock"), e))?;
        let identity = Identity::of_fd(&new_lock).map_err(fail)?;
        // The inherited lock may be that of another directory.
        let is_same = |lock: &File| Identity::of_fd(lock).is_ok_and(|other| other == identity);
        let lock = lock.filter(is_same).unwrap_or(new_lock);
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(StateError::InUse(directory.into())),
            Err(e) => return Err(fail(e.into())),
        }
        let overrides = read(directory)?;
        let remembered = directory.join(DIRECTORY_NAME);
        let remembered = match read_file(&remembered) {
            Ok(Some(path)) if path.is_empty() => Err("it is empty".into()),
            read => read,
        }
        .map_err(|e| StateError::ReadDirectory(remembered, e))?
        .map(|path| PathBuf::from(OsString::from_vec(path)));
        let store = Self {
            directory: directory.into(),
            lock,
            inner: Mutex::new(Inner {
                directory: remembered,
                ..Inner::default()
            }),
        };
        Ok((store, overrides))
    }

    /// Checks that the directory of the configuration at `path` is not away. The path that the state has is not used: it may be another
    /// user's.
    ///
    /// # Errors
    /// The configuration has no directory, and had one when the state was saved last.
    pub fn check_directory(&self, config: &Config, path: &Path) -> Result<(), StateError> {
        match self.inner().directory.is_some() && config.directory.is_none() {
            true => Err(StateError::DirectoryGone(directory_of(path))),
            false => Ok(()),
        }
    }

    pub fn lock(&self) -> &File {
        &self.lock
    }

    /// Durably saves how the inventory differs from the configuration. Takes the inventory under the lock, so that the
    /// newest one is written last.
    ///
    /// # Errors
    /// It could not be written; the previous state file is still there.
    pub fn save(&self, inventory: impl FnOnce() -> Inventory) -> io::Result<()> {
        let mut inner = self.inner();
        if inner.ended {
            return Ok(());
        }
        let inventory = inventory();
        let directory = inventory.configured.directory.clone();
        let overrides = inner.difference(inventory);
        if let Err(problem) = self.write_directory(&mut inner, directory) {
            error!("{}", self.not_written(DIRECTORY_NAME, &problem));
        }
        match self.write_overrides(&mut inner, &overrides) {
            Ok(()) => {
                inner.unsaved = None;
                Ok(())
            }
            Err(error) => {
                inner.unsaved_changes += u64::from(inner.unsaved.as_ref() != Some(&overrides));
                inner.unsaved = Some(overrides);
                Err(error)
            }
        }
    }

    /// Durably saves what disks have left, and nothing else, until a start or a reload saves everything.
    ///
    /// # Errors
    /// It could not be written.
    pub fn save_left(&self, left: impl FnOnce() -> LeftFiles) -> io::Result<()> {
        let mut inner = self.inner();
        let left = left();
        if inner.ended || inner.left.as_ref() == Some(&left) {
            return Ok(());
        }
        write_left(&self.directory, &left)?;
        inner.left = Some(left);
        Ok(())
    }

    /// The directory, for [`write_left`].
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// How often something could not be saved that the attempt before did not have.
    pub fn unsaved_changes(&self) -> u64 {
        self.inner().unsaved_changes
    }

    /// Durably saves that a disk is being moved. Until [`finish_move`](Self::finish_move), every save counts it as on its new
    /// file.
    ///
    /// # Errors
    /// It could not be written, or the process is stopping: the state file has the disk on its old file.
    pub fn save_move(
        &self,
        inventory: impl FnOnce() -> Inventory,
        moved: &DiskSpec,
    ) -> io::Result<()> {
        let mut inner = self.inner();
        if inner.ended {
            return Err(io::Error::other("ringdisk is stopping"));
        }
        inner.moved.push(moved.clone());
        let saved = self.write(&mut inner, inventory());
        saved.inspect_err(|_| inner.moved.retain(|other| other.name != moved.name))
    }

    /// The server serves the disk from its new file.
    pub fn finish_move(&self, disk: &str) {
        self.inner().moved.retain(|moved| moved.name != disk);
    }

    fn write(&self, inner: &mut Inner, inventory: Inventory) -> io::Result<()> {
        let overrides = inner.difference(inventory);
        self.write_overrides(inner, &overrides)
    }

    fn write_directory(
        &self,
        inner: &mut Inner,
        directory: Option<PathBuf>,
    ) -> Result<(), WriteError> {
        if inner.directory == directory {
            return Ok(());
        }
        match &directory {
            Some(now) => write(&self.directory, DIRECTORY_NAME, now.as_os_str().as_bytes())?,
            // It was emptied, and nothing is lost with it.
            None => fs::remove_file(self.directory.join(DIRECTORY_NAME))?,
        }
        inner.directory = directory;
        Ok(())
    }

    fn write_overrides(&self, inner: &mut Inner, overrides: &Overrides) -> io::Result<()> {
        let text = overrides.text();
        let guests = overrides.guests();
        if inner.guests.as_ref() != Some(&guests) {
            let text = serde_json::to_string_pretty(&guests)? + "\n";
            let written = write(&self.directory, GUESTS_NAME, text.as_bytes());
            written.map_err(|problem| self.not_written(GUESTS_NAME, &problem))?;
            inner.guests = Some(guests);
        }
        let queues = overrides.queues();
        if inner.queues.as_ref() != Some(&queues) {
            let text = serde_json::to_string_pretty(&queues)? + "\n";
            let written = write(&self.directory, QUEUES_NAME, text.as_bytes());
            written.map_err(|problem| self.not_written(QUEUES_NAME, &problem))?;
            inner.queues = Some(queues);
        }
        // Before the record: a start adds a move to that which only the state has.
        self.write_text(inner, text)?;
        if inner.left.as_ref() != Some(&overrides.left) {
            let text = left_text(&overrides.left)?;
            let written = write(&self.directory, LEFT_NAME, text.as_bytes());
            written.map_err(|problem| self.not_written(LEFT_NAME, &problem))?;
            inner.left = Some(overrides.left.clone());
        }
        Ok(())
    }

    fn write_text(&self, inner: &mut Inner, text: String) -> io::Result<()> {
        if inner.text.as_ref() == Some(&text) {
            return Ok(());
        }
        let Err(problem) = write(&self.directory, NAME, text.as_bytes()) else {
            inner.text = Some(text);
            return Ok(());
        };
        if problem.in_place {
            // The caller reports that the change was not saved, so a restart must not find it.
            let before = inner.text.take();
            match before.map(|text| (write(&self.directory, NAME, text.as_bytes()), text)) {
                Some((Ok(()), text)) => inner.text = Some(text),
                _ => error!(
                    "{}: may contain a change that has failed: {}; the next change writes it again",
                    self.directory.join(NAME).display(),
                    problem.error
                ),
            }
        }
        Err(self.not_written(NAME, &problem))
    }

    fn not_written(&self, name: &str, problem: &WriteError) -> io::Error {
        let text = format!(
            "{} cannot be written: {}; make room there, or let this user write there",
            self.directory.join(name).display(),
            problem.error
        );
        io::Error::new(problem.error.kind(), text)
    }

    /// The process is stopping: saves nothing from now on.
    pub fn end(&self) {
        self.inner().ended = true;
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How the inventory differs from the configuration.
    pub fn overrides(&self, inventory: impl FnOnce() -> Inventory) -> Overrides {
        self.inner().difference(inventory())
    }

    /// Sets the changes that could not be applied when this process started.
    pub fn set_absent(&self, absent: Overrides) {
        self.inner().absent = absent;
    }
}

impl Inner {
    fn difference(&self, mut inventory: Inventory) -> Overrides {
        self.moved.iter().for_each(|moved| inventory.move_to(moved));
        inventory.difference(&self.absent)
    }
}

impl Inventory {
    /// Puts a disk, and the nodes below it, on the file of `moved`.
    fn move_to(&mut self, moved: &DiskSpec) {
        let mut next = Some(moved.name.clone());
        while let Some(name) = next.take() {
            let mut nodes = self.nodes.iter_mut();
            if let Some(node) = nodes.find(|node| node.disk.name == name) {
                node.disk.take_file_of(moved);
                next = node.child.clone();
            }
        }
    }

    /// Whether a node is served like an attached disk: once, under its own name and with its own settings.
    fn is_disk(&self, node: &NodeOverride) -> bool {
        let name = &node.disk.name;
        let mut exports = self.exports.iter().filter(|e| e.node == *name);
        let itself = ExportSpec::from(&node.disk);
        node.child.is_none()
            && !self.nodes.iter().any(|n| n.child.as_ref() == Some(name))
            && exports.next().is_some_and(|e| e.spec == itself)
            && exports.next().is_none()
    }

    /// How this inventory differs from the configuration, together with `absent`.
    pub fn difference(&self, absent: &Overrides) -> Overrides {
        let Self {
            configured,
            detached,
            absent: absent_disks,
            nodes,
            exports,
            groups,
            threads,
            remembered,
            left,
        } = self;
        let mut overrides = absent.clone();
        let find = |name: &str| configured.disks.iter().find(|disk| disk.name == name);
        let has_node = |name: &String| nodes.iter().any(|node| node.disk.name == *name);
        overrides.disks.retain(|disk| !has_node(&disk.disk.name));
        overrides.nodes.retain(|node| !has_node(&node.disk.name));
        let exported = |id: &String| exports.iter().any(|export| export.spec.id == *id);
        overrides
            .exports
            .retain(|export| !exported(&export.spec.id));
        for node in nodes {
            let disk = node.disk.clone();
            let before = find(&disk.name);
            // Otherwise it was attached, and has the name of another one.
            let its = before.filter(|before| !sockets::are_of_two_vms(before, &disk));
            match (self.is_disk(node), before) {
                (true, Some(before)) if *before == disk => {}
                (true, _) => overrides.disks.push(DiskOverride {
                    configured: its.cloned(),
                    disk,
                }),
                (false, before) => {
                    overrides.detached.extend(before.cloned());
                    overrides.nodes.push(node.clone());
                    let exports = exports.iter().filter(|e| e.node == disk.name);
                    overrides.exports.extend(exports.cloned());
                }
            }
        }
        for disk in absent_disks {
            let before = find(&disk.name);
            let before = before.filter(|before| !sockets::are_of_two_vms(before, disk));
            if before != Some(disk) {
                overrides.disks.push(DiskOverride {
                    disk: disk.clone(),
                    configured: before.cloned(),
                });
            }
        }
        let is_absent = |name: &str| absent_disks.iter().any(|disk| disk.name == name);
        let is_gone = |disk: &&DiskSpec| !has_node(&disk.name) && !is_absent(&disk.name);
        for before in configured.disks.iter().filter(is_gone) {
            overrides.detached.push(before.clone());
            // Attached again, the disk uses the file that the guest has written to last.
            let last = detached.iter().find(|last| last.disk.name == before.name);
            overrides.disks.extend(last.cloned());
        }
        // Each node after the node below it.
        let depth = |node: &NodeOverride| {
            let mut depth = 0;
            let mut below = node.child.as_ref();
            while let Some(name) = below
                && depth < nodes.len()
            {
                depth += 1;
                let child = nodes.iter().find(|node| node.disk.name == *name);
                below = child.and_then(|node| node.child.as_ref());
            }
            depth
        };
        overrides.nodes.sort_by_key(depth);
        // Those of the configuration too, if a command has put a disk there: the next start may find them gone from it.
        let is_own = |name: &str| !configured.groups.iter().any(|(other, _)| other == name);
        let own = groups.iter();
        let own = own.filter(|(name, _)| is_own(name) || overrides.needs_group(name));
        let own: Vec<_> = own.cloned().collect();
        overrides.groups.extend(own);
        let is_own = |id: &str| !configured.threads.iter().any(|(other, _)| other == id);
        let own = threads.iter();
        let own = own.filter(|(id, _)| is_own(id) || overrides.needs_thread(id));
        let own: Vec<_> = own.cloned().collect();
        overrides.threads.extend(own);
        overrides.remembered = remembered.clone();
        overrides.left = left.clone();
        overrides
    }
}

/// Durably writes what disks have left to the state directory, which this process has locked.
///
/// # Errors
/// It could not be written.
pub fn write_left(directory: &Path, left: &LeftFiles) -> io::Result<()> {
    let written = write(directory, LEFT_NAME, left_text(left)?.as_bytes());
    written.map_err(|problem| problem.error)
}

/// The files that disks have left, without the oldest if there are too many for the file.
fn left_text(all: &LeftFiles) -> io::Result<String> {
    let mut all = all.clone();
    loop {
        let text = serde_json::to_string(&all)? + "\n";
        if text.len() as u64 <= BYTES_MAX {
            return Ok(text);
        }
        warn!("{LEFT_NAME}: has more than {BYTES_MAX} bytes; the oldest entries are forgotten");
        all = all.newest();
    }
}

/// The disks of the state file in a directory: nothing else is read, and a file that cannot be read has none.
pub fn disks_at(directory: &Path) -> Vec<DiskSpec> {
    let parse = |bytes: Option<Vec<u8>>| bytes.as_deref().map(Overrides::parse).transpose();
    let state = read_file(&directory.join(NAME)).and_then(parse);
    let Overrides { disks, nodes, .. } = state.ok().flatten().unwrap_or_default();
    let nodes = nodes.into_iter().map(|node| node.disk);
    disks.into_iter().map(|it| it.disk).chain(nodes).collect()
}

/// Reads all files.
fn read(directory: &Path) -> Result<Overrides, StateError> {
    let [path, queues_path, guests_path, left_path] =
        [NAME, QUEUES_NAME, GUESTS_NAME, LEFT_NAME].map(|name| directory.join(name));
    let parse = |bytes: Option<Vec<u8>>| bytes.as_deref().map(Overrides::parse).transpose();
    let state = read_file(&path).and_then(parse);
    let mut overrides = state
        .map_err(|problem| StateError::Read(path.clone(), problem))?
        .unwrap_or_default();
    let added = read_json(&queues_path).and_then(|queues| overrides.add_queues(queues));
    added.map_err(|problem| StateError::ReadQueues(queues_path.clone(), problem))?;
    let guests = read_json(&guests_path).and_then(|guests| {
        // Otherwise an older version has written the others since.
        let is_newest = || is_newer(&guests_path, &[&path, &queues_path]);
        match overrides.agrees_with(&guests) || is_newest() {
            true => overrides.set_guests(guests),
            false => Ok(()),
        }
    });
    guests.map_err(|e| StateError::ReadGuests(guests_path.clone(), e))?;
    let left = read_json(&left_path);
    overrides.left = left.map_err(|problem| StateError::ReadLeft(left_path, problem))?;
    Ok(overrides)
}

/// Whether a file is there, and was written after the others.
fn is_newer(path: &Path, others: &[&Path]) -> bool {
    let written = |path: &Path| fs::metadata(path).and_then(|found| found.modified()).ok();
    let mut others = others.iter().map(|path| written(path));
    written(path).is_some_and(|at| others.all(|other| other.is_none_or(|other| other < at)))
}

/// What a file has; that of an empty one if there is none.
fn read_json<T: DeserializeOwned + Default>(path: &Path) -> Result<T, String> {
    read_file(path)?.map_or(Ok(T::default()), |bytes| {
        serde_json::from_slice(&bytes).map_err(|e| e.to_string())
    })
}

fn read_file(path: &Path) -> Result<Option<Vec<u8>>, String> {
    let mut options = OpenOptions::new();
    let file = match options.read(true).custom_flags(OPEN_FLAGS).open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|e| e.to_string())?,
    };
    let mut bytes = Vec::new();
    let read = file.take(BYTES_MAX + 1).read_to_end(&mut bytes);
    read.map_err(|e| e.to_string())?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(format!("it is larger than {BYTES_MAX} bytes"));
    }
    Ok(Some(bytes))
}

/// Why the file was not saved durably.
struct WriteError {
    error: io::Error,
    /// The new file is in place nevertheless. It may or may not survive a crash of the host.
    in_place: bool,
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        let in_place = false;
        Self { error, in_place }
    }
}

/// Replaces a file. A crash leaves the old file or the new one.
fn write(directory: &Path, name: &str, text: &[u8]) -> Result<(), WriteError> {
    let (path, new) = (directory.join(name), directory.join("state.new"));
    // Before anything changes, because descriptors may have run out.
    let directory = File::open(directory)?;
    // Left by a process that was killed, or placed there by another user.
    match fs::remove_file(&new) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(&new)?;
    file.write_all(text)?;
    file.sync_all()?;
    fs::rename(&new, &path)?;
    let in_place = true;
    let durable = directory.sync_all();
    durable.map_err(|error| WriteError { error, in_place })
}
