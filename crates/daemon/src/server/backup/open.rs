//! The backups that are open, and where they keep old data.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Instant;

use block::DirtyBitmap;
use datapath::{Disk, Fleece, FleeceLimits};
use tracing::error;

use super::bitmap::checkpoint_bytes;
use super::{Backup, BackupDisk, with_bitmaps};
use crate::node::Node;
use crate::node::checkpoint::Continued;
use crate::server::bitmap_plan::ReservedBitmap;
use crate::server::connection_info::quote;
use crate::server::deadline::{ANSWER_TIMEOUT, with_deadline};
use crate::server::device::ServedDisk;
use crate::server::error::BackupError;
use crate::server::nbd::export::{Moment, locked};

/// Open backups by id.
#[derive(Default)]
pub struct OpenBackups {
    open: Mutex<BTreeMap<String, Arc<Backup>>>,
    /// Ids of those that are ending, and are open again if they cannot.
    ending: Mutex<BTreeSet<String>>,
    /// Where files for old data are created.
    directory: OnceLock<PathBuf>,
    /// Bitmaps of backups that have ended while something else changed their disks, which may add them again.
    ended: Mutex<Vec<(Weak<Node>, Arc<DirtyBitmap>)>>,
}

impl OpenBackups {
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Backup>>> {
        locked(&self.open)
    }

    pub(super) fn will_succeed(&self, id: &str) {
        locked(&self.ending).insert(id.into());
    }

    pub(super) fn has_ended(&self, id: &str) {
        locked(&self.ending).remove(id);
    }

    pub(super) fn is_ending(&self, id: &str) -> bool {
        locked(&self.ending).contains(id)
    }

    /// Has files for old data created in this directory. It can be set once.
    pub fn set_directory(&self, directory: &Path) {
        let _ = self.directory.set(directory.into());
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Backup>> {
        self.lock().values().cloned().collect()
    }

    /// What has this name: a disk at the moment of a backup.
    pub fn find_access(&self, name: &str) -> Option<(Arc<ServedDisk>, Arc<Moment>)> {
        let open = self.lock();
        let readable = open
            .values()
            .filter(|backup| backup.why_still_open().is_none());
        let mut disks = readable.flat_map(|backup| &backup.disks);
        let found = disks.find(|disk| disk.access == name)?;
        Some((found.device.clone(), found.moment.clone()))
    }

    /// Checks that no disk of an open backup has this name.
    ///
    /// # Errors
    /// Which backup.
    pub fn check_name(&self, name: &str) -> Result<(), BackupError> {
        let open = self.lock();
        let has = |backup: &&Arc<Backup>| backup.disks.iter().any(|disk| disk.access == name);
        match open.values().find(has) {
            Some(backup) => Err(BackupError::Access(name.into(), backup.id.clone())),
            None => Ok(()),
        }
    }

    /// The nodes of an open backup's disks.
    pub fn disks_of(&self, id: &str) -> Vec<String> {
        let open = self.lock();
        let disks = open.get(id).into_iter().flat_map(|backup| &backup.disks);
        disks.map(|disk| disk.node.name().to_owned()).collect()
    }

    /// The id of the open backup of a disk, by its name or that of its node.
    pub fn of_disk(&self, disk: &str) -> Option<String> {
        let open = self.lock();
        let is_it = |d: &BackupDisk| d.device.disk.name == disk || d.node.name() == disk;
        let has = |backup: &&Arc<Backup>| backup.disks.iter().any(is_it);
        open.values().find(has).map(|backup| backup.id.clone())
    }

    /// Checks that a disk has no open backup.
    ///
    /// # Errors
    /// It has one.
    pub fn check_none(&self, disk: &str) -> Result<(), BackupError> {
        match self.of_disk(disk) {
            Some(id) => Err(BackupError::Open(disk.into(), id)),
            None => Ok(()),
        }
    }

    /// Checks that no open backup is about a bitmap.
    ///
    /// # Errors
    /// One is.
    pub fn check_bitmap(&self, node: &str, bitmap: &str) -> Result<(), BackupError> {
        let open = self.lock();
        let is_it = |backup: &&Arc<Backup>| {
            let mut all = with_bitmaps(backup);
            all.any(|(disk, b)| {
                disk.node.name() == node && [&b.name, b.background.name()].contains(&bitmap)
            })
        };
        match open.values().find(is_it) {
            Some(backup) => Err(BackupError::Bitmap(bitmap.into(), backup.id.clone())),
            None => Ok(()),
        }
    }

    /// What the end of an open backup of this node needs for the bitmaps that it creates. A backup that ends needs nothing any more:
    /// its disks are kept from changes by others.
    pub fn reserved_bitmap(&self, node: &Node) -> Option<ReservedBitmap> {
        let open = self.all();
        let mut found = open.iter().filter_map(|backup| {
            let mut all = with_bitmaps(backup);
            let (_, bitmap) = all.find(|(disk, _)| disk.node.name() == node.name())?;
            Some((&backup.id, bitmap))
        });
        let (id, bitmap) = found.next()?;
        let with_checkpoint = checkpoint_bytes(bitmap.background.size());
        let (count, bytes) = if node.bitmaps().iter().any(|b| b.name() == bitmap.name) {
            (0, 0)
        } else {
            // One that cannot be used is removed first, and its bits are not in memory.
            let is_unusable = (node.unusable_bitmaps().iter()).any(|b| b.name == bitmap.name);
            (usize::from(!is_unusable), bitmap.background.bytes())
        };
        let has_checkpoint = Continued::of(&bitmap.name, &node.bitmaps()).is_some();
        Some(ReservedBitmap {
            backup: id.clone(),
            count: count + usize::from(!has_checkpoint),
            bytes: bytes + with_checkpoint,
        })
    }

    /// A fleece for a disk, with a file if there is a directory for it.
    pub(super) fn fleece(
        &self,
        disk: &Disk,
        id: &str,
        memory: u64,
    ) -> Result<Arc<Fleece>, BackupError> {
        let file = self.file()?;
        let fleece = Fleece::new(disk.size(), &FleeceLimits { memory }, file);
        let fleece = fleece.map_err(BackupError::Cut)?;
        let (name, id) = (disk.name.clone(), id.to_owned());
        fleece.on_failure(move |why| {
            error!(
                "disk {name}: backup '{id}' has failed: {why}; to end it: ringdisk backup end --id={} --failed",
                quote(&id)
            );
        });
        Ok(fleece)
    }

    /// The bitmap of a backup of a disk ends.
    pub(super) fn will_end(&self, node: &Arc<Node>, bitmap: &Arc<DirtyBitmap>) {
        let its = (Arc::downgrade(node), bitmap.clone());
        locked(&self.ended).push(its);
    }

    /// Nothing else changes these disks now: the bitmaps of their backups that have ended are gone for good.
    pub fn forget_ended(&self, is_one: impl Fn(&str) -> bool) {
        locked(&self.ended).retain(|(node, bitmap)| {
            let node = node.upgrade();
            let its = node.as_ref().filter(|node| is_one(node.name()));
            its.inspect(|node| node.remove_bitmap(bitmap));
            node.is_some() && its.is_none()
        });
    }

    fn file(&self) -> Result<Option<File>, BackupError> {
        let Some(directory) = self.directory.get() else {
            return Ok(None);
        };
        let path = directory.clone();
        let create = move || {
            let mut options = OpenOptions::new();
            options.read(true).write(true).mode(0o600);
            Ok(options.custom_flags(libc::O_TMPFILE).open(path))
        };
        let name = directory.to_string_lossy();
        let created = with_deadline(&name, Instant::now() + ANSWER_TIMEOUT, create);
        let file = created.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        file.map(Some)
            .map_err(|e| BackupError::Fleece(directory.clone(), e))
    }
}
