//! Which files disks have left: `replace`, a snapshot or a reload has moved the disk, and its VM has written elsewhere since.
//! A start or a reload must not take the VM back there by accident. If an administrator has written to such a file since, it is a
//! file like any other.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use engine::Identity;
use serde::{Deserialize, Serialize};

use crate::config::spec::FileSpec;

/// Limit of the files that are remembered of one disk; the oldest are forgotten.
const FILES_OF_DISK_MAX: usize = 256;

/// Limits of all that is remembered.
const FILES_MAX: usize = 8192;
const DISKS_MAX: usize = 4096;

/// Limit of the names and sockets of a disk that has left a file.
const ALIASES_MAX: usize = 8;

/// A disk: its VM knows it by the socket, and the administrator by its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskId {
    pub name: String,
    pub socket: String,
}

impl DiskId {
    fn may_be(&self, other: &Self) -> bool {
        self.name == other.name || self.socket == other.socket
    }
}

/// A file that a disk has left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Left {
    /// As nobody has changed it since.
    file: FileMark,
    /// The file for which the disk has left it.
    to: String,
    /// The disk, and what it was called later.
    disks: Vec<DiskId>,
}

impl Left {
    fn is_of(&self, disk: &DiskId) -> bool {
        self.disks.iter().any(|other| other.may_be(disk))
    }
}

/// The file from which a disk is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Served {
    disk: DiskId,
    file: FileMark,
}

impl Served {
    /// The same with the file as it is now. Asks storage.
    pub fn present(self) -> Self {
        Self {
            file: self.file.present(),
            ..self
        }
    }
}

/// Whether a disk is here, so that nothing of it is forgotten.
type IsHere<'a> = &'a dyn Fn(&DiskId) -> bool;

/// The files that disks have left, and those that they use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LeftFiles {
    /// Each was noted after those before it.
    disks: Vec<Served>,
    left: Vec<Left>,
}

/// A file that a disk is not to be served from.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused {
    /// How many files are above it.
    pub depth: usize,
    /// Where what the VM has written since is.
    pub to: String,
}

impl LeftFiles {
    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.disks.is_empty() && self.left.is_empty()
    }

    /// Whether any file has been left, so that [`check`](Self::check) has something to do.
    pub fn has_left(&self) -> bool {
        !self.left.is_empty()
    }

    /// Checks a file, and those below it, each with whether the images above have no data.
    ///
    /// What a VM has written since it left a file is missing there for every disk: another one may be the same
    /// one under another name and socket. Only a reader may be meant to see what was, and only a file that tells whether it has
    /// changed can be known to be the same. An image over the file may be the clone of another VM.
    ///
    /// # Errors
    /// The disk, or another, has left it, and nobody has written to it since.
    pub fn check(
        &self,
        disk: &DiskId,
        is_read_only: bool,
        marks: &[(FileMark, bool)],
    ) -> Result<(), Refused> {
        for (depth, (mark, nothing_above)) in marks.iter().enumerate() {
            if !nothing_above {
                return Ok(());
            }
            // Where it was last: another disk has left it before.
            if self
                .disks
                .iter()
                .any(|it| it.disk == *disk && it.file.is(mark))
            {
                return Ok(());
            }
            let is_for_all = depth == 0 && !is_read_only && mark.changed.is_some();
            let is_left = |left: &&Left| {
                left.file.is(mark)
                    && left.file.is_unchanged(mark)
                    && (is_for_all || left.is_of(disk))
            };
            if let Some(left) = self.left.iter().rev().find(is_left) {
                let to = self.end_of(left);
                // It builds on that: the disk is where it was, whatever its name and its socket are now.
                if marks[..depth].iter().any(|(above, _)| above.file == to) {
                    return Ok(());
                }
                return Err(Refused { depth, to });
            }
            let mut served = self.served_by(disk);
            if served.any(|served| served.file.is_at(mark)) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The file that a disk has left last for this one.
    pub fn left_for(&self, disk: &DiskId, to: &str) -> Option<&str> {
        let mut left = self.left.iter().rev();
        let left = left.find(|left| left.is_of(disk) && left.to == to)?;
        Some(&left.file.file)
    }

    /// Where the disk is that has left this file.
    pub fn where_is(&self, disk: &DiskId, mark: &FileMark) -> Option<String> {
        let refused = self.check(disk, true, &[(mark.clone(), true)]);
        refused.err().map(|refused| refused.to)
    }

    /// Where the disk is that has left this file, perhaps in several moves.
    fn end_of(&self, left: &Left) -> String {
        let mut to = &left.to;
        for _ in 0..FILES_OF_DISK_MAX {
            let next = self.left.iter().rev().find(|next| next.file.file == *to);
            match next {
                Some(next) if next.to != left.file.file => to = &next.to,
                _ => break,
            }
        }
        to.clone()
    }

    /// The files of the disk that was at this socket last, and of the one that had this name.
    pub fn served_before(&self, disk: &DiskId) -> Vec<Served> {
        self.served_by(disk).cloned().collect()
    }

    /// The file of this very disk.
    pub fn served_as(&self, disk: &DiskId) -> Option<FileMark> {
        let served = self.disks.iter().find(|served| served.disk == *disk);
        served.map(|served| served.file.clone())
    }

    fn served_by<'a>(&'a self, disk: &'a DiskId) -> impl Iterator<Item = &'a Served> {
        self.disks.iter().filter(|served| served.disk.may_be(disk))
    }

    /// A disk has moved from a file, if that can be told, to another.
    pub fn moved(
        &mut self,
        disk: &DiskId,
        was: Option<FileMark>,
        now: FileMark,
        is_here: IsHere<'_>,
    ) {
        if let Some(was) = was.filter(|was| !was.is(&now)) {
            self.leave(disk, disk, was, &now.file, is_here);
        }
        // It holds what the disk has now.
        self.left.retain(|left| !left.file.is(&now));
        self.note(disk, now, is_here);
    }

    /// A disk is served from a file. `below` are the files below that, and `before` the present state of
    /// [`served_before`](Self::served_before). Returns whether it has left one.
    pub fn served(
        &mut self,
        disk: &DiskId,
        now: FileMark,
        below: &[FileMark],
        before: Vec<Served>,
        is_here: IsHere<'_>,
    ) -> bool {
        // An administrator goes back, or to a file that was written to since. The number of a file that was removed may be used
        // again.
        let is_back = |left: &Left| {
            let is_same = left.file.file == now.file || left.file.changed == now.changed;
            left.is_of(disk) && left.file.is(&now) && is_same
        };
        let back = self.left.iter().filter(|left| is_back(left));
        // Another disk may have had the name or the socket.
        let went_from: Vec<DiskId> = back.flat_map(|left| left.disks.clone()).collect();
        let mut has_left = false;
        let before = before.into_iter().filter(|it| !it.file.is(&now));
        for Served { disk: other, file } in before.collect::<Vec<_>>() {
            // Another host may have put several above it: the disk has left them all.
            let depth = below.iter().position(|it| file.is(it));
            let left = match depth.zip(file.among(below.iter())) {
                Some((depth, file)) => [&[file], &below[..depth]].concat(),
                None if went_from.contains(&other) => vec![file],
                None => continue,
            };
            has_left = true;
            for file in left {
                self.leave(disk, &other, file, &now.file, is_here);
            }
        }
        // A VM goes on above a file to which somebody has written: it leaves that as it is now.
        for left in self.left.iter_mut().filter(|left| left.is_of(disk)) {
            if let Some(present) = left.file.among(below.iter()) {
                left.file = present;
            }
        }
        // The same disk under another name, or at another socket.
        let is_same = |served: &Served| {
            let mut files = std::iter::once(&now).chain(below);
            served.disk.may_be(disk) && files.any(|file| served.file.is_at(file))
        };
        let same: Vec<_> = self.disks.iter().filter(|served| is_same(served)).collect();
        let others: Vec<DiskId> = same.iter().map(|served| served.disk.clone()).collect();
        for left in &mut self.left {
            let is_its = others.iter().any(|other| left.is_of(other));
            if is_its && !left.disks.contains(disk) {
                left.disks.push(disk.clone());
                if left.disks.len() > ALIASES_MAX {
                    left.disks.remove(0);
                }
            }
        }
        self.disks
            .retain(|it| it.disk.socket == disk.socket || !others.contains(&it.disk));
        // Another disk has still left it, until it changes.
        let can_tell = now.changed.is_some();
        (self.left).retain(|left| !left.file.is(&now) || can_tell && !left.is_of(disk));
        self.note(disk, now, is_here);
        has_left
    }

    /// A disk leaves a file, which was served as `before`.
    fn leave(
        &mut self,
        disk: &DiskId,
        before: &DiskId,
        file: FileMark,
        to: &str,
        is_here: IsHere<'_>,
    ) {
        // Those that were there before it are there no more. One that came later has its place.
        let its_own = self
            .disks
            .iter()
            .position(|it| it.disk == *before && it.file.is(&file));
        let older = its_own.unwrap_or(self.disks.len());
        let mut at = 0;
        self.disks.retain(|it| {
            at += 1;
            at > older || !it.file.is(&file)
        });
        let mut disks = Vec::new();
        self.left.retain_mut(|left| {
            let is_same = left.file.is(&file);
            if is_same {
                disks.append(&mut left.disks);
            }
            !is_same
        });
        disks.retain(|other| other != disk);
        disks.push(disk.clone());
        let excess = disks.len().saturating_sub(ALIASES_MAX);
        disks.drain(..excess);
        let to = to.to_owned();
        self.left.push(Left { file, to, disks });
        let of_disk = self.left.iter().filter(|left| left.is_of(disk)).count();
        if of_disk > FILES_OF_DISK_MAX
            && let Some(at) = self.left.iter().position(|left| left.is_of(disk))
        {
            self.left.remove(at);
        }
        if self.left.len() > FILES_MAX {
            let is_used = |left: &Left| left.disks.iter().any(is_here);
            let unused = self.left.iter().position(|left| !is_used(left));
            self.left.remove(unused.unwrap_or(0));
        }
    }

    fn note(&mut self, disk: &DiskId, now: FileMark, is_here: IsHere<'_>) {
        let (disk, file) = (disk.clone(), now.without_change());
        let mut before = None;
        self.disks.retain(|served| {
            let is_it = served.disk.socket == disk.socket;
            if is_it {
                before = Some(served.clone());
            }
            !is_it
        });
        // The same file under another name.
        if let Some(before) = before.filter(|before| before.file.is(&file)) {
            let those = self
                .left
                .iter_mut()
                .filter(|left| left.to == before.file.file);
            those.for_each(|left| left.to.clone_from(&file.file));
        }
        self.disks.push(Served { disk, file });
        if self.disks.len() > DISKS_MAX {
            let gone = self.disks.iter().position(|served| !is_here(&served.disk));
            self.disks.remove(gone.unwrap_or(0));
        }
    }

    /// The same without the oldest half.
    pub fn newest(&self) -> Self {
        let half = |len: usize| len.div_ceil(2);
        Self {
            disks: self.disks[half(self.disks.len())..].to_vec(),
            left: self.left[half(self.left.len())..].to_vec(),
        }
    }
}

/// A file, and what tells whether it has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FileMark {
    /// Its path, or the image in a Ceph cluster. Of a block device, the path that was configured: the kernel's names and numbers
    /// of devices change at a reboot.
    pub file: String,
    /// Device and inode of a regular file. The device may have another number after a reboot.
    identity: Option<(u64, u64)>,
    /// Size in bytes, and time of the last change in seconds and nanoseconds. Only regular files tell.
    changed: Option<(u64, i64, i64)>,
}

impl FileMark {
    /// The file of a disk as it is now. `None` if it does not exist. Asks storage.
    pub fn of(file: &FileSpec) -> Option<Self> {
        match file {
            FileSpec::Path(path) => Self::at(path),
            FileSpec::Rbd(_) => Some(Self::named(file)),
            FileSpec::Null(_) => None,
        }
    }

    /// A file that cannot be asked.
    pub fn named(file: &FileSpec) -> Self {
        Self {
            file: file.to_string(),
            identity: None,
            changed: None,
        }
    }

    /// The file at this path.
    pub fn at(path: &Path) -> Option<Self> {
        let metadata = path.metadata().ok()?;
        if !metadata.is_file() {
            // A link elsewhere leads to a name in /dev.
            let link = path.read_link().ok().filter(|to| to.starts_with("/dev"));
            let link = link.filter(|_| !path.starts_with("/dev"));
            let path = link.unwrap_or_else(|| path.to_owned());
            return Some(Self::named(&FileSpec::Path(path)));
        }
        Some(Self::of_regular(&path.canonicalize().ok()?, &metadata))
    }

    /// A regular file of this name.
    pub fn of_regular(path: &Path, metadata: &Metadata) -> Self {
        let Identity { device, inode } = Identity::of(metadata);
        Self {
            file: path.display().to_string(),
            identity: Some((device, inode)),
            changed: Some((metadata.len(), metadata.mtime(), metadata.mtime_nsec())),
        }
    }

    /// A file that is in use changes all the time.
    fn without_change(self) -> Self {
        Self {
            changed: None,
            ..self
        }
    }

    /// This file as it is now. Asks storage.
    pub fn present(self) -> Self {
        match Self::at(Path::new(&self.file)) {
            Some(present) if self.identity.is_some() && present.is(&self) => present,
            _ => self,
        }
    }

    /// This file as it is among these.
    fn among<'a>(&self, mut files: impl Iterator<Item = &'a Self>) -> Option<Self> {
        files
            .find(|it| self.is(it))
            .map(|found| match self.identity {
                Some(_) => found.clone(),
                None => self.clone(),
            })
    }

    /// Whether both are the same file. One that has been replaced by another of its name is not.
    fn is(&self, other: &Self) -> bool {
        match (self.identity, other.identity) {
            // The device may have another number after a reboot.
            (Some((device, inode)), Some((other_device, other_inode))) => {
                inode == other_inode && (device == other_device || self.file == other.file)
            }
            (None, None) => {
                let device = self.device();
                self.file == other.file || device.is_some() && device == other.device()
            }
            _ => false,
        }
    }

    /// The name that the kernel has for a device at present.
    fn device(&self) -> Option<PathBuf> {
        let path = Path::new(&self.file);
        let is_device = self.identity.is_none() && path.starts_with("/dev");
        is_device.then(|| path.canonicalize().ok()).flatten()
    }

    /// Whether nobody has written to the same file, as far as is known.
    fn is_unchanged(&self, now: &Self) -> bool {
        match (self.identity, self.changed) {
            // It was not there to be looked at. The number of one that was removed is used again, under another name.
            (Some(_), None) => self.file == now.file,
            _ => self.changed == now.changed,
        }
    }

    /// Whether this is the same file, or has its name.
    fn is_at(&self, other: &Self) -> bool {
        self.is(other) || self.file == other.file
    }
}

/// Panics unless what is valid reads back as it is written: for fuzzing.
#[cfg(any(test, fuzzing))]
pub fn check(bytes: &[u8]) {
    if let Ok(all) = serde_json::from_slice::<LeftFiles>(bytes) {
        let text = serde_json::to_vec(&all).expect("a record");
        let read: LeftFiles = serde_json::from_slice(&text).expect("what was written");
        assert_eq!(read, all);
    }
}

#[cfg(test)]
mod tests;
