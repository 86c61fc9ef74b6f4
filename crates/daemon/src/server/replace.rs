//! Other files for disks whose guests run.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use engine::OpenError;
use image::Format;
use tracing::{info, warn};

use super::shutdown::{SHUTDOWN_TIMEOUT, with_deadline};
use super::{Server, ServerError, identity};
use crate::config::spec::{DiskSpec, FileSpec, Problem};
use crate::node::{Node, NodeError, format_of};
use crate::server::device::ServedDisk;

/// What a disk is to be put on.
enum To<'a> {
    /// What a command says of it. The rest follows from the file before ([`DiskSpec::moved`]).
    Said(FileSpec, Option<Format>),
    /// A disk that is written down, where all is said of its file.
    Configured(&'a DiskSpec),
}

impl To<'_> {
    fn file(&self) -> &FileSpec {
        match self {
            Self::Said(file, _) => file,
            Self::Configured(disk) => &disk.file,
        }
    }

    /// The disk, once it is there.
    fn spec(&self, disk: &DiskSpec) -> Result<DiskSpec, Problem> {
        match self {
            Self::Said(file, format) => disk.moved(file.clone(), *format),
            Self::Configured(written) => {
                let mut disk = disk.clone();
                disk.follow(written);
                Ok(disk)
            }
        }
    }

    /// The same, if that is another name of the file that it is on. Where neither a command nor the name says a format,
    /// it has the one that it had.
    fn spec_of_same(&self, disk: &Node, path: &Path) -> Result<DiskSpec, ServerError> {
        let spec = match self {
            Self::Said(_, format) => {
                let format = format.or(disk.spec.format).or(Format::of_name(path));
                DiskSpec {
                    file: self.file().clone(),
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
            let (name, its) = (disk.name().into(), disk.filename.clone());
            return Err(ServerError::SameFile(name, its, disk.format));
        }
        Ok(spec)
    }
}

/// A disk that is about to be put on something else.
pub struct Move {
    name: String,
    before: Arc<Node>,
    new: New,
}

enum New {
    /// What it is on.
    Same,
    /// The file that it is on, by another name.
    Name(Arc<Node>),
    /// Another, open and locked.
    File(Arc<Node>),
    /// Another, once the disk of this name has left it.
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
    /// Puts a disk on another file while its guest runs, or on another image with all that this builds on. The
    /// new one must hold the same bytes, and be as long or longer. What is not said of it follows from the file
    /// before ([`DiskSpec::moved`]).
    ///
    /// The new one is locked before the old one is let go, so that nobody gets hold of either in between. If it is the
    /// file that the disk is on, by another name, the disk goes by that name from now on.
    ///
    /// # Errors
    /// The disk goes on with the file that it had.
    pub fn replace(
        &self,
        name: &str,
        file: FileSpec,
        format: Option<Format>,
    ) -> Result<(), ServerError> {
        self.put_on(name, &To::Said(file, format))
    }

    /// The same, where all that is to be said of the file is written down.
    pub fn follow(&self, name: &str, written: &DiskSpec) -> Result<(), ServerError> {
        self.put_on(name, &To::Configured(written))
    }

    fn put_on(&self, name: &str, to: &To<'_>) -> Result<(), ServerError> {
        let prepared = self.prepare_to_put(name, to, &|_| false)?;
        self.carry_out(prepared)
    }

    /// Opens what a disk is to be put on as it is written down, and changes nothing. A file that another disk is on which
    /// `leaves` it is only looked at.
    ///
    /// # Errors
    /// As for [`follow`](Self::follow), as far as can be known.
    pub fn prepare_to_follow(
        &self,
        written: &DiskSpec,
        leaves: &dyn Fn(&str) -> bool,
    ) -> Result<Move, ServerError> {
        self.prepare_to_put(&written.name, &To::Configured(written), leaves)
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
            return Ok(prepared(match spec == before.spec {
                true => New::Same,
                false => New::Name(Arc::new(before.at(spec, path)?)),
            }));
        }
        let spec = to.spec(&before.spec).map_err(unfit)?;
        spec.check_rbd().map_err(unfit)?;
        let in_use = self.state().check_file(&spec, there);
        match in_use {
            Err(ServerError::FileInUse(_, user)) if leaves(&user) => {
                Node::check_openable(&spec, &self.context)?;
                return Ok(prepared(New::After(user, Box::new(spec))));
            }
            in_use => in_use?,
        }
        // Takes seconds where a lock is waited for; nobody else has to wait meanwhile.
        let new = self.open(spec, &before.written());
        let new = Arc::new(new.map_err(|e| nothing_there(name, e))?);
        self.watch_damage(&new);
        Ok(prepared(New::File(new)))
    }

    /// Puts a disk on what has been prepared.
    ///
    /// # Errors
    /// The disk goes on with the file that it had.
    pub fn carry_out(&self, prepared: Move) -> Result<(), ServerError> {
        let Move { name, before, new } = prepared;
        let name = name.as_str();
        let new = match new {
            New::File(new) => new,
            New::Name(new) => return self.exchange(name, &before, &new),
            New::After(_, spec) => return self.follow(name, &spec),
            New::Same => {
                info!("disk {name}: is on {} already", before.filename);
                return Ok(());
            }
        };
        // Whoever made it, be it a moment ago: once it is recorded, a loss of power must not take it away.
        let durable = new.make_durable().map_err(ServerError::from);
        let moved = durable.and_then(|()| self.exchange(name, &before, &new));
        // Nobody uses the other one any more.
        let (left, is_old) = match &moved {
            Ok(()) => (before, true),
            Err(_) => (new, false),
        };
        let role = match is_old {
            // All of it is durable, and the disk is elsewhere.
            true => "where it was",
            false => "where it was to be",
        };
        close(left, role);
        moved
    }

    /// Lets go of what has been opened.
    pub fn release(&self, prepared: Move) {
        if let New::File(new) = prepared.new {
            close(new, "where it was to be");
        }
    }

    /// Has a disk go on with another node.
    fn exchange(&self, name: &str, before: &Arc<Node>, new: &Arc<Node>) -> Result<(), ServerError> {
        let served = {
            let mut state = self.state();
            if !Arc::ptr_eq(&state.top(name)?.node, before) {
                return Err(ServerError::Overrides(name.into()));
            }
            if let Some(id) = state.stops(before.name()) {
                return Err(ServerError::NodeInUse(name.into(), id));
            }
            if state.is_moving(before.name()) {
                return Err(ServerError::Moving(name.into()));
            }
            let mut exports = state.exports.values();
            let export = exports.find(|e| Arc::ptr_eq(&e.node, before));
            let served = export.map(|export| export.device.clone());
            state.moving.push(before.name().to_owned());
            served
        };
        // Takes as long as the slowest of the requests under way.
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
                // Of the same name, something else has been said.
                true if was == is => {}
                true => info!("disk {name}: its file, {was} until now, goes by {is}"),
                false => info!("disk {name}: was on {was}, is on {is}"),
            }
            // Who keeps what there is looks here while it is kept.
            if let Some(store) = self.store.get() {
                store.finish_move(before.name());
            }
        }
        let mut state = self.state();
        state.moving.retain(|moving| moving != before.name());
        moved
    }

    fn move_to(
        &self,
        served: Option<&ServedDisk>,
        before: &Node,
        new: &Arc<Node>,
    ) -> Result<(), ServerError> {
        // A restart must find the disk where the guest has written since.
        let keep = || match self.store.get() {
            Some(store) => store.save_move(|| self.inventory(), &new.spec),
            None => Ok(()),
        };
        let same = before.shares_file(new);
        match served {
            Some(served) if same => Ok(served.rename(new, keep)?),
            Some(served) => Ok(served.replace(new, keep)?),
            None => {
                if !same {
                    new.reopen_over(before)?;
                }
                keep().map_err(|e| ServerError::Keep(new.name().into(), e))
            }
        }
    }
}

/// That there is nothing is told otherwise of a disk that is to be new.
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

/// Closes what no disk is on.
pub(super) fn close(node: Arc<Node>, role: &str) {
    let (name, filename) = (node.name().to_owned(), node.filename.clone());
    let its_name = name.clone();
    let closed = with_deadline(&name, Instant::now() + SHUTDOWN_TIMEOUT, move || {
        node.close().map_err(|e| ServerError::Sync(its_name, e))
    });
    if let Err(e) = closed {
        warn!("disk {name}: {filename}, {role}, is not closed in order: {e}");
    }
}

/// Whether a path is one of those by which the kernel names what processes have open.
fn is_in_proc(path: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|there| there.dev());
    match (path.parent().map(device), device(Path::new("/proc"))) {
        (Some(Ok(directory)), Ok(proc)) => directory == proc,
        _ => false,
    }
}
