//! Keeps VMs from files that their disks have left.

use engine::OpenError;
use tracing::warn;

use super::replace::close;
use super::{Server, ServerError};
use crate::config::sockets;
use crate::config::spec::DiskSpec;
use crate::log;
use crate::node::snapshot::Closing;
use crate::node::{Node, NodeError};
use crate::state::left::{DiskId, FileMark, LeftFiles, Refused, Served};
use crate::state::{DiskOverride, Overrides};

impl Server {
    /// Remembers what was left before this process started. A kill may have prevented that a move was recorded which the state
    /// has: then the disk has left its file now, whatever the configuration says.
    pub(super) fn remember_left(&self, overrides: &Overrides) {
        self.state().left.clone_from(&overrides.left);
        for DiskOverride { disk, configured } in &overrides.disks {
            let id = id(disk);
            let is_same = configured.as_ref().is_some_and(|it| it.file == disk.file);
            if is_same || disk.read_only {
                continue;
            }
            let before = self.state().left.served_as(&id);
            let from = configured.as_ref().map(|disk| disk.file.clone());
            let to = disk.file.clone();
            let look = move |_: &Self| {
                let from = match before {
                    Some(before) => Some(before.present()),
                    None => from.and_then(|from| FileMark::of(&from)),
                };
                Ok((from, FileMark::of(&to)))
            };
            let looked = self.in_time(&disk.name, Some(&disk.file), look, |_, _| {});
            let (from, to) = looked.unwrap_or_default();
            if let (Some(from), Some(to)) = (from, to) {
                self.note(&id, |left, is_here| {
                    left.moved(&id, Some(from), to, is_here)
                });
            }
        }
    }

    /// Checks that nobody has left the file of a disk, which is open and not served yet, and that it is no fresh overlay over one
    /// that the disk has left.
    ///
    /// # Errors
    /// The VM would lose what it has written since.
    pub(super) fn check_not_left(&self, node: &Node) -> Result<(), ServerError> {
        if !self.state().left.has_left() {
            return Ok(());
        }
        self.check_marks(&node.spec, &self.marks(node))
    }

    /// The same for the file of a disk that is not open. Asks storage if a file has been left.
    pub(super) fn check_file_not_left(&self, disk: &DiskSpec) -> Result<(), ServerError> {
        if !self.state().left.has_left() {
            return Ok(());
        }
        let mark = FileMark::of(&disk.file).map(|mark| (mark, true));
        self.check_marks(disk, mark.as_slice())
    }

    /// Both within a command's time.
    ///
    /// # Errors
    /// As above, or its storage does not answer.
    pub fn check_file_in_time(&self, disk: DiskSpec) -> Result<(), ServerError> {
        let (name, file) = (disk.name.clone(), disk.file.clone());
        let check = move |server: &Self| {
            server.check_file_not_left(&disk)?;
            // And what it builds on, if it can be opened now.
            let mut read = disk.clone();
            read.read_only = true;
            let Ok(node) = server.open(read, &[]) else {
                return Ok(());
            };
            let checked = server.check_marks(&disk, &node.marks());
            close(node.into(), "which is not served");
            checked
        };
        self.in_time(&name, Some(&file), check, |_, ()| {})
    }

    /// The files of an open disk. Those of one that is free for other hosts are opened for that, to be read; if that fails, only the
    /// first is known.
    fn marks(&self, node: &Node) -> Vec<(FileMark, bool)> {
        if !node.is_acquired() {
            let read_only = DiskSpec {
                read_only: true,
                ..node.spec.clone()
            };
            let (opened, lines) = log::hold(|| self.open(read_only, &[]));
            lines.forget();
            if let Ok(read) = opened {
                let marks = read.marks();
                close(read.into(), "which was only looked at");
                return marks;
            }
        }
        node.marks()
    }

    /// The error for a disk that a command has put on a file that is not there: a new one would not be what it had.
    pub(super) fn explain_missing_file(&self, disk: &DiskSpec, e: ServerError) -> ServerError {
        let file = disk.file.to_string();
        let is_missing = matches!(
            &e,
            ServerError::Node(NodeError::Open(OpenError::Missing(path))) if *path == file
        );
        let state = self.state();
        let mut configured = state.configured.disks.iter();
        let configured = configured.find(|it| it.name == disk.name);
        if !is_missing || configured.is_some_and(|it| it.file == disk.file) {
            return e;
        }
        let before = configured.map(|it| it.file.to_string());
        let before = before.or_else(|| Some(state.left.left_for(&id(disk), &file)?.to_owned()));
        let disk = disk.name.clone();
        match before {
            Some(before) => ServerError::MovedFileMissing(file, disk, before),
            None => ServerError::AttachedFileMissing(file, disk),
        }
    }

    /// Where a disk is that has left the file that it is configured with, if that is a file as well.
    pub(super) fn left_for(&self, disk: &DiskSpec) -> Option<String> {
        let mark = FileMark::of(&disk.file)?;
        let now = self.state().left.where_is(&id(disk), &mark);
        now.filter(|now| now.starts_with('/'))
    }

    /// Checks a file, and those below it, each with whether the images above have no data.
    fn check_marks(&self, disk: &DiskSpec, marks: &[(FileMark, bool)]) -> Result<(), ServerError> {
        let checked = self.state().left.check(&id(disk), disk.read_only, marks);
        checked.map_err(|Refused { depth, to }| {
            let file = marks[0].0.file.clone();
            match depth {
                0 => ServerError::LeftFile(file, to),
                _ => ServerError::AboveLeft(file, marks[depth].0.file.clone(), to),
            }
        })
    }

    /// Remembers that a disk has moved from this file, which is closed, or only read; `None` if it did not write there. The file
    /// of the disk is that of its node.
    pub(super) fn note_moved(&self, name: &str, from: Option<Closing>) {
        let Ok(node) = self.state().top(name).map(|entry| entry.node.clone()) else {
            return;
        };
        if node.spec.read_only {
            return;
        }
        let file = from.as_ref().map(|from| from.spec().clone());
        let after = node.spec.file.clone();
        let look = move |_: &Self| {
            let was = from.and_then(|from| from.mark());
            Ok((was, FileMark::of(&after)))
        };
        // The storage that the disk has left may be the one that hangs.
        let looked = self.in_time(name, file.as_ref(), look, |_, _| {});
        let looked = looked.inspect_err(|e| {
            warn!("disk {name}: the file that it has left is not remembered: {e}")
        });
        let (was, now) = looked.unwrap_or_default();
        let now = now.unwrap_or_else(|| FileMark::named(&node.spec.file));
        let id = id(&node.spec);
        self.note(&id, |left, is_here| left.moved(&id, was, now, is_here));
    }

    /// Remembers that the file of a disk has another name.
    pub(super) fn note_renamed(&self, name: &str) {
        self.note_moved(name, None);
    }

    /// Remembers the file from which a disk is served, and that the disk has left the one before if it builds on that now, or
    /// has gone back.
    pub(super) fn note_served(&self, name: &str) {
        // A guest continues with what it has.
        if self.context.inherited.has_disk(name) {
            return;
        }
        let Ok(node) = self.state().top(name).map(|entry| entry.node.clone()) else {
            return;
        };
        // A look changes nothing.
        if node.spec.read_only {
            return;
        }
        let id = id(&node.spec);
        let before = self.state().left.served_before(&id);
        let opened = node.clone();
        let look = move |server: &Self| {
            let marks = server.marks(&opened).into_iter().map(|(mark, _)| mark);
            let before = before.into_iter().map(Served::present);
            Ok((marks.collect::<Vec<_>>(), before.collect()))
        };
        let looked = self.in_time(name, Some(&node.spec.file), look, |_, _| {});
        let looked = looked.inspect_err(|e| warn!("disk {name}: its file is not remembered: {e}"));
        let Ok((mut marks, before)) = looked else {
            return;
        };
        if marks.is_empty() {
            return;
        }
        let now = marks.remove(0);
        let mut has_left = false;
        self.note(&id, |left, is_here| {
            has_left = left.served(&id, now, &marks, before, is_here);
        });
        if has_left {
            // The guest is connected now; a start or a reload may take long.
            self.persist_left();
        }
    }

    /// Changes the record. Of disks that are not here, it may forget something.
    fn note(&self, id: &DiskId, change: impl FnOnce(&mut LeftFiles, &dyn Fn(&DiskId) -> bool)) {
        let mut state = self.state();
        let mut left = std::mem::take(&mut state.left);
        let is_here = |disk: &DiskId| disk == id || state.nodes.contains_key(&disk.name);
        change(&mut left, &is_here);
        state.left = left;
    }
}

fn id(disk: &DiskSpec) -> DiskId {
    DiskId {
        name: disk.name.clone(),
        socket: sockets::path(disk).display().to_string(),
    }
}
