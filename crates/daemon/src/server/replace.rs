//! Moves a disk to another file while its guest runs.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use engine::OpenError;
use image::Format;
use tracing::{info, warn};

use super::deadline::{SHUTDOWN_TIMEOUT, with_deadline};
use super::{Claim, Server, ServerError, identity};
use crate::config::spec::{DiskSpec, FileSpec, Problem};
use crate::node::{Node, NodeError, format_of};
use crate::server::device::ServedDisk;

/// The file that a disk is to move to.
enum To<'a> {
    /// As a command names it. Everything else follows from the previous file ([`DiskSpec::moved`]).
    Command {
        file: FileSpec,
        format: Option<Format>,
        data_file: Option<PathBuf>,
    },
    /// From the configuration, which is complete.
    Configured(&'a DiskSpec),
}

impl To<'_> {
    fn file(&self) -> &FileSpec {
        match self {
            Self::Command { file, .. } => file,
            Self::Configured(disk) => &disk.file,
        }
    }

    /// The disk after the move.
    fn spec(&self, disk: &DiskSpec) -> Result<DiskSpec, Problem> {
        match self {
            Self::Command {
                file,
                format,
                data_file,
            } => Ok(DiskSpec {
                data_file: data_file.clone(),
                ..disk.moved(file.clone(), *format)?
            }),
            Self::Configured(configured) => {
                let mut disk = disk.clone();
                disk.take_file_of(configured);
                Ok(disk)
            }
        }
    }

    /// The same, if this is another name of its file. It keeps its format if neither the command nor the name has one.
    fn spec_of_same(&self, disk: &Node, path: &Path) -> Result<DiskSpec, ServerError> {
        let spec = match self {
            Self::Command {
                format, data_file, ..
            } => {
                let format = format.or(disk.spec.format).or(Format::of_name(path));
                DiskSpec {
                    file: self.file().clone(),
                    data_file: data_file.clone().or(disk.spec.data_file.clone()),
                    format: format.or(Some(disk.format)),
                    ..disk.spec.clone()
                }
            }
            Self::Configured(_) => self
                .spec(&disk.spec)
                .map_err(|problem| ServerError::Unfit(disk.name().into(), problem))?,
        };
        if let Some(backing) = disk.backing()
            && format_of(&spec, path, backing)? != disk.format
        {
            let (name, file) = (disk.name().into(), disk.filename.clone());
            return Err(ServerError::SameFile(name, file, disk.format));
        }
        match (&disk.spec.data_file, &spec.data_file) {
            (Some(old), Some(new)) if old != new => {
                let (old, new) = (old.clone(), new.clone());
                Err(ServerError::OtherDataFile(disk.name().into(), old, new))
            }
            _ => Ok(spec),
        }
    }
}

/// A disk that is about to move to another file.
pub struct Move {
    name: String,
    before: Arc<Node>,
    new: New,
}

enum New {
    /// Its present node.
    Same,
    /// The same file by another name.
    Name(Arc<Node>),
    /// Another file, open and locked.
    File(Arc<Node>),
    /// Another file, once the disk of this name has left it.
    After(String, Box<DiskSpec>),
}

impl Move {
    pub fn disk(&self) -> &str {
        &self.name
    }

    /// The disk that has to leave the file first.
    pub fn waits_for(&self) -> Option<&str> {
        match &self.new {
            New::After(user, _) => Some(user),
            New::Same | New::Name(_) | New::File(_) => None,
        }
    }
}

impl Server {
    /// Moves a disk to another file or image while its guest runs. The new one must contain the same bytes, and be at
    /// least as long. What is not given follows from the previous file ([`DiskSpec::moved`]).
    ///
    /// The new file is locked before the old one is released, so that no other process can take either. If it is the
    /// same file by another name, only the name changes.
    ///
    /// # Errors
    /// The disk stays on its previous file.
    pub fn replace(
        &self,
        claim: &Claim<'_>,
        name: &str,
        file: FileSpec,
        format: Option<Format>,
        data_file: Option<PathBuf>,
    ) -> Result<(), ServerError> {
        let to = To::Command {
            file,
            format,
            data_file,
        };
        self.put_on(claim, name, &to)
    }

    /// Like [`replace`](Self::replace), to the file of the configuration.
    pub fn follow(
        &self,
        claim: &Claim<'_>,
        name: &str,
        configured: &DiskSpec,
    ) -> Result<(), ServerError> {
        self.put_on(claim, name, &To::Configured(configured))
    }

    fn put_on(&self, claim: &Claim<'_>, name: &str, to: &To<'_>) -> Result<(), ServerError> {
        let prepared = self.prepare_to_put(name, to, &|_| false)?;
        self.carry_out(claim, prepared)
    }

    /// Opens the configured file of a disk, and changes nothing. A file that a disk still uses which `leaves` it is
    /// only checked.
    ///
    /// # Errors
    /// As for [`follow`](Self::follow), as far as is known.
    pub fn prepare_to_follow(
        &self,
        configured: &DiskSpec,
        leaves: &dyn Fn(&str) -> bool,
    ) -> Result<Move, ServerError> {
        // Only a command goes back on purpose. Before it is opened, which may change it.
        self.check_file_not_left(configured)?;
        let to = To::Configured(configured);
        let prepared = self.prepare_to_put(&configured.name, &to, leaves)?;
        if let New::File(new) = &prepared.new
            && let Err(e) = self.check_not_left(new)
        {
            self.release(prepared);
            return Err(e);
        }
        Ok(prepared)
    }

    fn prepare_to_put(
        &self,
        name: &str,
        to: &To<'_>,
        leaves: &dyn Fn(&str) -> bool,
    ) -> Result<Move, ServerError> {
        let file = to.file();
        self.sandbox.check_file(file)?;
        let unfit = |problem| ServerError::Unfit(name.into(), problem);
        if let FileSpec::Path(path) = file
            && is_in_proc(path)
        {
            let problem = format!(
                "{} is a name for a descriptor of one process, and leads elsewhere in the next; give the file's own name",
                path.display()
            );
            return Err(unfit(Problem::Value("file", problem)));
        }
        let there = identity(file);
        let before = self.state().top(name)?.node.clone();
        let prepared = |new| Move {
            name: name.to_owned(),
            before: before.clone(),
            new,
        };
        if let (FileSpec::Path(path), Some(there)) = (file, there)
            && before.is_on(there)
        {
            let spec = to.spec_of_same(&before, path)?;
            return Ok(prepared(if spec == before.spec {
                New::Same
            } else {
                New::Name(Arc::new(before.at(spec, path)?))
            }));
        }
        let spec = to.spec(&before.spec).map_err(unfit)?;
        spec.check_rbd().map_err(unfit)?;
        self.sandbox.check_disk(&spec)?;
        let in_use = self.state().check_file(&spec, there);
        match in_use {
            Err(ServerError::FileInUse(file, user)) if user == name => {
                return Err(ServerError::Older(
                    file.display().to_string(),
                    before.filename.clone(),
                ));
            }
            Err(ServerError::FileInUse(_, user)) if leaves(&user) => {
                let wanted = spec.clone();
                let check =
                    move |server: &Self| Ok(Node::check_openable(&wanted, &server.context)?);
                self.in_time(name, Some(file), check, |_, ()| {})?;
                return Ok(prepared(New::After(user, Box::new(spec))));
            }
            in_use => in_use?,
        }
        // Without the lock: waiting for a file lock takes seconds.
        let new = self.open(spec, &before.written());
        let new = Arc::new(new.map_err(|e| nothing_there(name, e))?);
        if matches!(to, To::Command { format: None, .. }) {
            // Raw like the previous file, if its name does not say.
            new.check_raw()?;
        }
        self.watch_damage(&new);
        Ok(prepared(New::File(new)))
    }

    /// Moves a disk to the file that has been prepared.
    ///
    /// # Errors
    /// The disk stays on its previous file.
    pub fn carry_out(&self, claim: &Claim<'_>, prepared: Move) -> Result<(), ServerError> {
        let Move { name, before, new } = prepared;
        let name = name.as_str();
        claim.covers(name);
        let new = match new {
            New::File(new) => new,
            New::Name(new) => {
                self.exchange(claim, name, &before, &new)?;
                self.note_renamed(name);
                return Ok(());
            }
            New::After(_, spec) => return self.follow(claim, name, &spec),
            New::Same => {
                info!("disk {name}: already uses {}", before.filename);
                return Ok(());
            }
        };
        // The file may be new: it must survive a loss of power before the move is persisted.
        let durable = new.make_durable().map_err(ServerError::from);
        let moved = durable.and_then(|()| self.exchange(claim, name, &before, &new));
        // No disk uses the old file now.
        let (left, is_old) = match &moved {
            Ok(()) => (before, true),
            Err(_) => (new, false),
        };
        let role = if is_old {
            // Everything is durable, and the disk has moved.
            "where it was"
        } else {
            "where it was to be"
        };
        let closing = (!left.spec.read_only).then(|| left.closing());
        close(left, role);
        if is_old {
            // Nothing is written there any more.
            self.note_moved(name, closing);
        }
        moved
    }

    /// Closes what has been opened.
    pub fn release(&self, prepared: Move) {
        if let New::File(new) = prepared.new {
            close(new, "where it was to be");
        }
    }

    /// Continues a disk on another node.
    fn exchange(
        &self,
        claim: &Claim<'_>,
        name: &str,
        before: &Arc<Node>,
        new: &Arc<Node>,
    ) -> Result<(), ServerError> {
        let served = {
            let state = self.state();
            if !Arc::ptr_eq(&state.top(name)?.node, before) {
                return Err(ServerError::ChangedMeanwhile(name.into()));
            }
            state.check_not_restarting(claim, new)?;
            self.backups.check_none(before.name())?;
            let mut exports = state.exports.values();
            let export = exports.find(|e| Arc::ptr_eq(&e.node, before));
            export.map(|export| export.device.clone())
        };
        // Waits for the slowest request in flight.
        let moved = self.move_to(served.as_deref(), before, new);
        if moved.is_ok() {
            if let Some(rbd) = before.rbd() {
                rbd.on_change(None);
            }
            let mut state = self.state();
            let mut exports = state.exports.values_mut();
            if let Some(export) = exports.find(|e| Arc::ptr_eq(&e.node, before)) {
                export.node = new.clone();
                crate::server::export::tell_changes(new, &export.disk, &export.device);
            }
            state.put_on(new);
            drop(state);
            let (was, is) = (&before.filename, &new.filename);
            match before.shares_file(new) {
                // Only other settings have changed.
                true if was == is => {}
                true => info!("disk {name}: its file {was} is now named {is}"),
                false => info!("disk {name}: moved from {was} to {is}"),
            }
            // After the change of `state`, which a concurrent save reads.
            if let Some(store) = self.store.get() {
                store.finish_move(before.name());
            }
        }
        moved
    }

    fn move_to(
        &self,
        served: Option<&ServedDisk>,
        before: &Node,
        new: &Arc<Node>,
    ) -> Result<(), ServerError> {
        // A restart must find the disk on the file that the guest has written to last.
        let keep = || match self.store.get() {
            Some(store) => store.save_move(|| self.inventory(), &new.spec),
            None => Ok(()),
        };
        let same = before.shares_file(new);
        match served {
            Some(served) if same => {
                served.rename(new, keep)?;
                new.file_renamed();
                Ok(())
            }
            Some(served) => Ok(served.replace(new, keep)?),
            None => {
                if !same {
                    new.reopen_over(before)?;
                }
                keep().map_err(|e| ServerError::Persist(new.name().into(), e))
            }
        }
    }
}

/// A missing or empty file needs another message than for a new disk.
fn nothing_there(disk: &str, error: ServerError) -> ServerError {
    let (path, problem) = match error {
        ServerError::Node(NodeError::Open(OpenError::Missing(path))) => (path, "no such file"),
        ServerError::Node(NodeError::Open(OpenError::Empty(path))) => (path, "is empty"),
        error => return error,
    };
    let disk = disk.to_owned();
    ServerError::FileMissing {
        disk,
        path,
        problem,
    }
}

/// Closes a node that no disk uses.
pub(super) fn close(node: Arc<Node>, role: &str) {
    let (name, filename) = (node.name().to_owned(), node.filename.clone());
    let its_name = name.clone();
    let closed = with_deadline(&name, Instant::now() + SHUTDOWN_TIMEOUT, move || {
        node.close().map_err(|e| ServerError::Sync(its_name, e))
    });
    if let Err(e) = closed {
        warn!("disk {name}: {filename}, {role}, could not be closed cleanly: {e}");
    }
}

/// Whether a path is in /proc, where the kernel names open files of processes.
fn is_in_proc(path: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|there| there.dev());
    match (path.parent().map(device), device(Path::new("/proc"))) {
        (Some(Ok(directory)), Ok(proc)) => directory == proc,
        _ => false,
    }
}
