//! Persists changes that are made at run time in a state file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use block::ThrottleLimits;
use engine::Identity;
use rustix::fs::{FlockOperation, flock};
use thiserror::Error;
use tracing::error;

use crate::config::export::ExportSpec;
use crate::config::spec::DiskSpec;
use crate::config::{Config, ThreadSpec};
use crate::state::{BYTES_MAX, DiskOverride, ExportOverride, NodeOverride, Overrides};

/// The file in the directory.
const NAME: &str = "state.json";

/// The process may be root and the directory another user's: does not follow a link there, or wait for a pipe.
const OPEN_FLAGS: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK;

/// What the operator has configured: on the command line, and in the configuration that applies.
#[derive(Clone, Default)]
pub struct Configured {
    pub disks: Vec<DiskSpec>,
    pub groups: Vec<(String, ThrottleLimits)>,
    pub threads: Vec<(String, ThreadSpec)>,
}

impl Configured {
    pub fn new(command_line: &[DiskSpec], config: &Config) -> Self {
        let mut disks = command_line.to_vec();
        disks.extend(config.disks.iter().cloned());
        Self {
            disks,
            groups: config.groups.clone(),
            threads: config.threads.clone(),
        }
    }
}

/// Everything that a server serves, in terms of configuration.
pub struct Inventory {
    pub written: Configured,
    /// Configured disks that have been detached, if their last file was not the configured one.
    pub left: Vec<DiskSpec>,
    /// Opened files, with the limits of the disks on them.
    pub nodes: Vec<NodeOverride>,
    pub exports: Vec<ExportOverride>,
    pub groups: Vec<(String, ThrottleLimits)>,
    pub threads: Vec<(String, ThreadSpec)>,
    /// Write caches that guests have chosen, by export.
    pub write_caches: Vec<(String, bool)>,
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
        "{0}: cannot be read: {1}; mend that if it can be. Move it away only to start with what is written down: disks that \
         were put on other files by command would be served from those that they left"
    )]
    Read(PathBuf, String),
}

/// The state directory, locked by this process.
pub struct StateStore {
    directory: PathBuf,
    lock: File,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// What could not be served when this process started, and stays in the file.
    absent: Overrides,
    /// Disks that are being moved: they are on their new files in the state file already, and not in the server yet.
    moved: Vec<DiskSpec>,
    /// The content of the file, if it is known.
    text: Option<String>,
    ended: bool,
}

impl StateStore {
    /// Locks a directory and reads the state file. `lock` is the inherited lock, if there is one.
    ///
    /// # Errors
    /// The directory or the file cannot be used.
    pub fn open(directory: &Path, lock: Option<File>) -> Result<(Self, Overrides), StateError> {
        let fail = |e| StateError::Directory(directory.into(), e);
        let its = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(OPEN_FLAGS)
            .open(directory.join("lock"))
            .map_err(|e| StateError::Directory(directory.join("lock"), e))?;
        let there = Identity::of_fd(&its).map_err(fail)?;
        // It may be the lock of another directory.
        let is_its = |lock: &File| Identity::of_fd(lock).is_ok_and(|handed| handed == there);
        let handed = lock.filter(is_its);
        let lock = handed.unwrap_or(its);
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(StateError::InUse(directory.into())),
            Err(e) => return Err(fail(e.into())),
        }
        let path = directory.join(NAME);
        let changed = read(&path).map_err(|problem| StateError::Read(path, problem))?;
        let store = Self {
            directory: directory.into(),
            lock,
            inner: Mutex::default(),
        };
        Ok((store, changed))
    }

    pub fn lock(&self) -> &File {
        &self.lock
    }

    /// Durably saves how the inventory differs from the configuration. The inventory is taken under the lock, so that the
    /// newest is written last.
    ///
    /// # Errors
    /// It could not be written; the previous state file is still there.
    pub fn save(&self, inventory: impl FnOnce() -> Inventory) -> io::Result<()> {
        let mut inner = self.inner();
        match inner.ended {
            true => Ok(()),
            false => self.write(&mut inner, inventory()),
        }
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
        let kept = self.write(&mut inner, inventory());
        kept.inspect_err(|_| inner.moved.retain(|other| other.name != moved.name))
    }

    /// The server has the disk on its new file.
    pub fn finish_move(&self, disk: &str) {
        self.inner().moved.retain(|moved| moved.name != disk);
    }

    fn write(&self, inner: &mut Inner, inventory: Inventory) -> io::Result<()> {
        let text = inner.difference(inventory).text();
        if inner.text.as_ref() == Some(&text) {
            return Ok(());
        }
        let Err(problem) = write(&self.directory, &text) else {
            inner.text = Some(text);
            return Ok(());
        };
        if problem.in_place {
            // A restart must not find a state that the caller was told is not saved.
            let before = inner.text.take();
            match before.map(|text| (write(&self.directory, &text), text)) {
                Some((Ok(()), text)) => inner.text = Some(text),
                _ => error!(
                    "{}: may contain a change that has failed: {}; the next change writes it again",
                    self.directory.join(NAME).display(),
                    problem.error
                ),
            }
        }
        let text = format!(
            "{} cannot be written: {}; make room there, or let this user write there",
            self.directory.join(NAME).display(),
            problem.error
        );
        Err(io::Error::new(problem.error.kind(), text))
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

    /// What could not be served when this process started.
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
    fn move_to(&mut self, moved: &DiskSpec) {
        let mut next = Some(moved.name.clone());
        while let Some(name) = next.take() {
            let mut nodes = self.nodes.iter_mut();
            if let Some(node) = nodes.find(|node| node.disk.name == name) {
                node.disk.take_file_of(moved);
                next = node.over.clone();
            }
        }
    }

    /// Whether a node is served like an attached disk: once, under its own name and with its own settings.
    fn is_disk(&self, node: &NodeOverride) -> bool {
        let name = &node.disk.name;
        let mut exports = self.exports.iter().filter(|e| e.node == *name);
        let itself = ExportSpec::from(&node.disk);
        node.over.is_none()
            && !self.nodes.iter().any(|n| n.over.as_ref() == Some(name))
            && exports.next().is_some_and(|e| e.spec == itself)
            && exports.next().is_none()
    }

    /// How it differs from the configuration, together with `absent`.
    pub fn difference(&self, absent: &Overrides) -> Overrides {
        let written = &self.written;
        let mut changed = absent.clone();
        let here = |name: &String| self.nodes.iter().any(|node| node.disk.name == *name);
        changed.disks.retain(|disk| !here(&disk.disk.name));
        changed.nodes.retain(|node| !here(&node.disk.name));
        let exported = |id: &String| self.exports.iter().any(|export| export.spec.id == *id);
        changed.exports.retain(|export| !exported(&export.spec.id));
        for node in &self.nodes {
            let disk = node.disk.clone();
            let before = written.disks.iter().find(|other| other.name == disk.name);
            match (self.is_disk(node), before) {
                (true, Some(before)) if *before == disk => {}
                (true, before) => changed.disks.push(DiskOverride {
                    disk,
                    instead_of: before.cloned(),
                }),
                (false, before) => {
                    changed.gone.extend(before.cloned());
                    changed.nodes.push(node.clone());
                    let its = self.exports.iter().filter(|e| e.node == disk.name);
                    changed.exports.extend(its.cloned());
                }
            }
        }
        for before in written.disks.iter().filter(|disk| !here(&disk.name)) {
            changed.gone.push(before.clone());
            // When it is attached again, it is on the file that the guest has written to last.
            let left = self.left.iter().find(|left| left.name == before.name);
            changed.disks.extend(left.map(|left| DiskOverride {
                disk: left.clone(),
                instead_of: Some(before.clone()),
            }));
        }
        // A node follows the node that it lies on.
        let depth = |node: &NodeOverride| {
            let mut depth = 0;
            let mut below = node.over.as_ref();
            while let Some(name) = below
                && depth < self.nodes.len()
            {
                depth += 1;
                let child = self.nodes.iter().find(|node| node.disk.name == *name);
                below = child.and_then(|node| node.over.as_ref());
            }
            depth
        };
        changed.nodes.sort_by_key(depth);
        let new = |(name, _): &&(String, _)| !written.groups.iter().any(|(n, _)| n == name);
        changed
            .groups
            .extend(self.groups.iter().filter(new).cloned());
        let new = |(id, _): &&(String, _)| !written.threads.iter().any(|(n, _)| n == id);
        changed
            .threads
            .extend(self.threads.iter().filter(new).cloned());
        changed.write_caches = self.write_caches.iter().cloned().collect();
        changed
    }
}

fn read(path: &Path) -> Result<Overrides, String> {
    let mut options = OpenOptions::new();
    let file = match options.read(true).custom_flags(OPEN_FLAGS).open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Overrides::default()),
        file => file.map_err(|e| e.to_string())?,
    };
    let mut bytes = Vec::new();
    let read = file.take(BYTES_MAX + 1).read_to_end(&mut bytes);
    read.map_err(|e| e.to_string())?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(format!("it is larger than {BYTES_MAX} bytes"));
    }
    Overrides::parse(&bytes)
}

/// Why text is not kept.
struct NotKept {
    error: io::Error,
    /// It is in the file all the same, until the host crashes, or beyond that.
    in_place: bool,
}

impl From<io::Error> for NotKept {
    fn from(error: io::Error) -> Self {
        let in_place = false;
        Self { error, in_place }
    }
}

/// A crash leaves the old file or the new one.
fn write(directory: &Path, text: &str) -> Result<(), NotKept> {
    let (path, new) = (directory.join(NAME), directory.join("state.new"));
    // Before anything changes: there may be no descriptor to be had.
    let directory = File::open(directory)?;
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, &path)?;
    let in_place = true;
    let durable = directory.sync_all();
    durable.map_err(|error| NotKept { error, in_place })
}
