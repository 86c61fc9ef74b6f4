//! Backups: what disks were at one moment, for NBD clients, while their guests go on.
//!
//! Beginning a backup of some disks:
//!
//! 1. Bitmaps are prepared: for each disk with one, another one that records nothing yet, in memory.
//! 2. At one moment for all disks ([`datapath::cut`]), the old data of what is written from now on is preserved, and the
//!    prepared bitmaps record.
//! 3. Writes that were in flight end. Then the backup can be read: the disk, or a [snapshot](Snapshot) of it, with
//!    the old data that was preserved.
//!
//! The bitmap that a backup is about goes on recording, too. If the backup succeeds, it becomes what was recorded since the
//! moment. In any other case (it fails, ringdisk is killed, the host crashes) nothing has happened to it, and it has all
//! changes since the last backup that succeeded. A bitmap that a backup creates exists once it has succeeded. In the same step,
//! the bitmaps get a new [checkpoint].

mod bitmap;
mod open;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use datapath::{CutDisk, Fleece, Held, cut, end_cut};
use harness::text::is_printable;
use tracing::{error, info, warn};

use super::bitmap_plan::{BitmapAction, BitmapChange, BitmapName};
use super::bitmaps::sync;
use super::clients::END_TIMEOUT;
use super::deadline::{self, ANSWER_TIMEOUT};
use super::device::ServedDisk;
use super::error::{BACKUP_DISKS_MAX, BACKUP_ID_BYTES_MAX, BackupError, SETTLE};
use super::nbd::export::{Moment, locked};
use super::nbd::rbd_snapshot::Snapshot;
use super::{Claim, Server, ServerError};
use crate::config::spec::Lock;
use crate::node::Node;
use crate::node::checkpoint::{self, Checkpoint, Continued};
use crate::token::token;
pub use bitmap::{BackupBitmap, BitmapMode, WantedBitmap, WhyFull};
use bitmap::{own_image, prepared};
pub use open::OpenBackups;

/// Bytes of old data that are kept in memory for each disk, if no limit is given.
pub const MEMORY_DEFAULT: u64 = 256 << 20;

/// Writes in flight that storage has failed to serve end in this time if it works again at once.
const RETRY: Duration = Duration::from_secs(1);

/// How long a cluster may take to confirm that a snapshot is there. Without that, a backup is lost that may have taken hours.
const CHECK_TIMEOUT: Duration = Duration::from_secs(20);

/// A disk to be backed up.
pub struct BackupTarget {
    pub disk: String,
    pub bitmap: Option<WantedBitmap>,
}

#[derive(Default)]
pub struct BackupOptions {
    /// Bytes of old data of each disk in memory, at most.
    pub memory: Option<u64>,
    /// For [`Backup::token`].
    pub token: Option<String>,
}

/// An open backup.
pub struct Backup {
    pub id: String,
    /// No other backup has it.
    pub token: String,
    pub disks: Vec<BackupDisk>,
    pub held: Held,
    /// Once its client has everything: why its bitmaps have not advanced.
    complete: Mutex<Option<String>>,
}

/// A disk of an open backup.
pub struct BackupDisk {
    /// The name of what clients can have exported.
    pub access: String,
    pub device: Arc<ServedDisk>,
    pub node: Arc<Node>,
    pub moment: Arc<Moment>,
    pub bitmap: Option<BackupBitmap>,
    /// How often its file had been [cut off](Node::cuts) before the moment.
    cuts: u64,
}

/// Fleeces of a backup that has not begun. They end with this, and their threads.
struct NewFleeces(Vec<Arc<Fleece>>);

impl Drop for NewFleeces {
    fn drop(&mut self) {
        for fleece in &self.0 {
            fleece.end("it has not begun");
        }
    }
}

/// A served disk, and its node.
type ServedNode = (Arc<ServedDisk>, Arc<Node>);

impl Backup {
    /// Why it is still open although its client has everything, if that is so. It cannot fail any more.
    pub fn why_still_open(&self) -> Option<String> {
        locked(&self.complete).clone()
    }

    /// Why it has failed, if it has.
    pub fn failure(&self) -> Option<String> {
        if self.why_still_open().is_some() {
            return None;
        }
        let mut failures = self.disks.iter().filter_map(|disk| {
            let name = &disk.device.disk.name;
            if let Some(why) = disk.moment.fleece.failure() {
                return Some(format!("disk {name}: {why}"));
            }
            let snapshot = disk.moment.snapshot.as_ref();
            if let Some(why) = snapshot.and_then(|snapshot| snapshot.failure()) {
                return Some(format!("disk {name}: {why}"));
            }
            (disk.node.cuts() > disk.cuts).then(|| {
                format!("disk {name}: another program has cut its file off: data was lost that the backup may lack")
            })
        });
        failures.next()
    }

    /// Notices files that have become shorter, unless their storage does not answer, and snapshots that are not certainly there.
    fn look_for_losses(&self) {
        let begun = Instant::now();
        let looking = self.disks.iter().map(|disk| {
            let (node, snapshot) = (disk.node.clone(), disk.moment.snapshot.clone());
            let look = move || {
                node.rbd().inspect(|rbd| rbd.settle());
                snapshot.inspect(|snapshot| snapshot.check());
                // So that bitmaps show it, also if the backup has failed before.
                let _ = node.check_owner();
                Ok(node.file_size())
            };
            (disk, deadline::begin(disk.node.name(), look))
        });
        let looking: Vec<_> = looking.collect();
        for (disk, task) in looking {
            let snapshot = disk.moment.snapshot.as_ref();
            let limit = snapshot.map_or(ANSWER_TIMEOUT, |_| CHECK_TIMEOUT);
            let name = disk.node.name();
            let looked = task.and_then(|task| deadline::end(name, begun + limit, &task));
            if let (Err(_), Some(snapshot)) = (looked, snapshot) {
                snapshot.lose("the cluster does not answer");
            }
        }
    }
}

impl Server {
    /// Begins a backup of some disks, at one moment.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn begin_backup(
        &self,
        claim: &Claim<'_>,
        id: &str,
        targets: &[BackupTarget],
        options: BackupOptions,
    ) -> Result<Arc<Backup>, ServerError> {
        let served = self.targets(id, targets)?;
        let names: Vec<_> = served.iter().map(|(_, node)| node.name()).collect();
        for (device, node) in &served {
            claim.covers(node.name());
            claim.covers(&access_of(device, id));
        }
        let backup = self.begin(id, targets, &served, options)?;
        info!(
            "backup '{id}': begun for {}; guests were held for {} us",
            names.join(", "),
            backup.held.time.as_micros()
        );
        Ok(backup)
    }

    /// What a backup of these disks changes: the disks, and the names that they have in it.
    pub fn names_in_backup(&self, id: &str, disks: &[&String]) -> Vec<String> {
        let names = disks.iter().flat_map(|&disk| {
            let node = self.node_of(disk).unwrap_or_else(|| disk.clone());
            let device = self.state().device_of(&node);
            let access = device.map(|device| access_of(&device, id));
            [disk.clone()].into_iter().chain(access.ok())
        });
        names.collect()
    }

    /// The devices and nodes of disks to be backed up.
    fn targets(&self, id: &str, targets: &[BackupTarget]) -> Result<Vec<ServedNode>, ServerError> {
        if !(1..=BACKUP_ID_BYTES_MAX).contains(&id.len()) {
            return Err(BackupError::LongId(id.len()).into());
        }
        if !(1..=BACKUP_DISKS_MAX).contains(&targets.len()) {
            return Err(BackupError::Disks.into());
        }
        // QEMU asks for another export then, whatever is encoded in the URI (RFC 3986, 5.2.4).
        let has_dot_segments = || id.split('/').any(|part| matches!(part, "." | ".."));
        if !id.chars().all(is_printable) || has_dot_segments() {
            return Err(BackupError::Id(id.into()).into());
        }
        let open = self.backups.lock();
        if open.contains_key(id) || self.backups.is_ending(id) {
            return Err(BackupError::Exists(id.into()).into());
        }
        if open.len() >= BACKUP_DISKS_MAX {
            return Err(ServerError::TooMany(format!("{BACKUP_DISKS_MAX} backups")));
        }
        drop(open);
        let mut served = Vec::<ServedNode>::new();
        for target in targets {
            let name = self.node_of(&target.disk);
            let name = name.ok_or_else(|| self.not_there(&target.disk))?;
            let state = self.state();
            let node = state.top(&name)?.node.clone();
            let device = state.device_of(node.name());
            let device = device.map_err(|_| BackupError::NotServed(target.disk.clone()))?;
            let access = access_of(&device, id);
            let is_taken = state.nodes.contains_key(&access) || state.exports.contains_key(&access);
            if is_taken || self.backups.find_access(&access).is_some() {
                return Err(BackupError::Name(access).into());
            }
            self.backups.check_none(&device.disk.name)?;
            if served.iter().any(|(other, _)| Arc::ptr_eq(other, &device)) {
                return Err(BackupError::Twice(target.disk.clone()).into());
            }
            served.push((device, node));
        }
        Ok(served)
    }

    fn begin(
        &self,
        id: &str,
        targets: &[BackupTarget],
        served: &[ServedNode],
        options: BackupOptions,
    ) -> Result<Arc<Backup>, ServerError> {
        // If it does not begin.
        let _unused = Unused::new(served.iter().map(|(device, node)| (device, node)));
        for (device, node) in served {
            self.lock_for_backup(device, node)?;
        }
        // None of them is released meanwhile.
        let kept: Vec<_> = served.iter().map(|(device, _)| device.node()).collect();
        if let Some(node) = kept.iter().find(|node| !node.is_acquired()) {
            return Err(BackupError::Released(node.name().into()).into());
        }
        let memory = options.memory.unwrap_or(MEMORY_DEFAULT);
        // First, since it has a time limit.
        let snapshots = (served.iter()).map(|(device, node)| Snapshot::of(&device.disk, node));
        let snapshots: Vec<_> = snapshots.collect::<Result<_, _>>()?;
        let bitmaps = served.iter().zip(targets).map(|((device, node), target)| {
            let disk = bitmap::Disk {
                name: &device.disk.name,
                size: device.disk.size(),
            };
            prepared(id, node, target.bitmap.as_ref(), disk)
        });
        let bitmaps: Vec<_> = bitmaps.collect::<Result<_, _>>()?;
        for ((_, node), target) in served.iter().zip(targets) {
            if let Some(bitmap) = &target.bitmap
                && self.exported_bitmaps(node).contains_key(&bitmap.name)
            {
                let disk = node.name().into();
                return Err(BackupError::BitmapExported(disk, bitmap.name.clone()).into());
            }
        }
        let cuts: Vec<_> = served.iter().map(|(_, node)| node.cuts()).collect();
        let mut fleeces = NewFleeces(Vec::new());
        for (device, _) in served {
            let fleece = self.backups.fleece(&device.disk, id, memory)?;
            fleeces.0.push(fleece);
        }
        let disks = served.iter().zip(&fleeces.0);
        let disks: Vec<_> = disks
            .map(|((device, _), fleece)| CutDisk {
                disk: device.disk.clone(),
                fleece: fleece.clone(),
                threads: device.io_threads(),
            })
            .collect();
        let record = || {
            for ((_, node), (bitmap, _)) in served.iter().zip(&bitmaps) {
                if let Some(bitmap) = bitmap {
                    node.add_bitmap(bitmap.background.clone());
                }
            }
        };
        let held = cut(&disks, record).map_err(BackupError::Cut)?;
        let fleeces = std::mem::take(&mut fleeces.0);
        let stores = fleeces.into_iter().zip(snapshots);
        let disks = served.iter().zip(stores).zip(bitmaps).zip(cuts);
        let disks = disks.map(|((((device, node), store), (bitmap, wanted)), cuts)| {
            let (fleece, snapshot) = store;
            // A copy that is made later has more bits, and never fewer.
            let frozen = wanted.map(|wanted| Arc::new(wanted.recording(false)));
            let moment = Moment {
                fleece,
                snapshot,
                bitmaps: frozen.into_iter().collect(),
            };
            BackupDisk {
                access: access_of(device, id),
                device: device.clone(),
                node: node.clone(),
                moment: Arc::new(moment),
                bitmap,
                cuts,
            }
        });
        let backup = Arc::new(Backup {
            id: id.into(),
            token: options.token.unwrap_or_else(token),
            disks: disks.collect(),
            held,
            complete: Mutex::default(),
        });
        drop(kept);
        Ok(self.open_backup(backup)?)
    }

    /// Locks a disk that was released when its VM stopped. Its storage may not answer, also to a release that is under way.
    fn lock_for_backup(&self, device: &Arc<ServedDisk>, node: &Node) -> Result<(), ServerError> {
        if node.spec.lock != Lock::Running {
            return Ok(());
        }
        let (device, unused) = (device.clone(), device.clone());
        let lock = move |_: &Self| match device.is_acquired_or_ours() {
            true => device
                .acquire()
                .map(drop)
                .map_err(|e| BackupError::Acquire(device.disk.name.clone(), e.to_string()).into()),
            false => Err(BackupError::Released(device.disk.name.clone()).into()),
        };
        let late = move |_: &Self, ()| unused.release_if_unused();
        self.in_time(node.name(), Some(&node.spec.file), lock, late)
    }

    /// Waits for writes that were in flight at the moment. Then the backup can be read.
    fn open_backup(&self, backup: Arc<Backup>) -> Result<Arc<Backup>, BackupError> {
        if let Err(e) = backup.disks.iter().try_for_each(settle) {
            self.stop_backup(&backup, "it has not begun");
            return Err(e);
        }
        let mut open = self.backups.lock();
        if open.contains_key(&backup.id) || self.backups.is_ending(&backup.id) {
            drop(open);
            self.stop_backup(&backup, "it has not begun");
            return Err(BackupError::Exists(backup.id.clone()));
        }
        open.insert(backup.id.clone(), backup.clone());
        drop(open);
        for BackupDisk { device, moment, .. } in &backup.disks {
            if let Some(snapshot) = &moment.snapshot {
                snapshot.make(device.disk.clone(), moment.fleece.clone());
            }
        }
        Ok(backup)
    }

    /// Ends a backup that was a success, if it has this token, and disconnects its clients. Its bitmaps have only what has
    /// changed since its moment then, and a new checkpoint, durably, which is returned if there is a bitmap.
    ///
    /// # Errors
    /// There is no such backup, or the bitmaps could not advance: it is still open. Or it was not a success after all, and is
    /// ended.
    pub fn end_backup(
        &self,
        claim: &Claim<'_>,
        id: &str,
        token: Option<&str>,
    ) -> Result<Option<Checkpoint>, ServerError> {
        let backup = self.take_backup(id, token, || self.backups.will_succeed(id))?;
        for disk in &backup.disks {
            claim.covers(disk.node.name());
        }
        self.disconnect_backup(&backup);
        let ended = self.succeed(&backup);
        let is_open = matches!(ended, Err(ServerError::Backup(BackupError::StillOpen(..))));
        if is_open {
            self.backups.lock().insert(id.into(), backup);
        } else {
            self.close_backup(&backup);
        }
        self.backups.has_ended(id);
        ended.inspect(|_| info!("backup '{id}': ended"))
    }

    /// Ends a backup that was no success, if it has this token, and disconnects its clients: its bitmaps have all that they
    /// had. Waits for no command.
    ///
    /// # Errors
    /// There is no such backup.
    pub fn cancel_backup(&self, id: &str, token: Option<&str>) -> Result<(), ServerError> {
        let backup = self.take_backup(id, token, || ())?;
        self.disconnect_backup(&backup);
        self.close_backup(&backup);
        info!("backup '{id}': ended");
        Ok(())
    }

    /// A backup, which is not open any more once `taken` was called.
    fn take_backup(
        &self,
        id: &str,
        token: Option<&str>,
        taken: impl FnOnce(),
    ) -> Result<Arc<Backup>, BackupError> {
        // While it is held, nobody exports a disk of the backup.
        let _state = self.state();
        let mut open = self.backups.lock();
        let is_meant = |backup: &Backup| token.is_none_or(|token| backup.token == token);
        if !open.get(id).is_some_and(|backup| is_meant(backup)) {
            return Err(BackupError::Missing(id.into()));
        }
        taken();
        (open.remove(id)).ok_or_else(|| BackupError::Missing(id.into()))
    }

    /// The bitmaps of a backup advance, if it has not failed. They get the checkpoint that is returned.
    fn succeed(&self, backup: &Backup) -> Result<Option<Checkpoint>, ServerError> {
        let failed = |why| ServerError::from(BackupError::Failed(backup.id.clone(), why));
        if backup.why_still_open().is_none() {
            backup.look_for_losses();
            if let Some(why) = backup.failure() {
                return Err(failed(why));
            }
            // Clients have all of it, so that nothing more is copied for them.
            for disk in &backup.disks {
                disk.moment.fleece.end("it was ended");
            }
        }
        if with_bitmaps(backup).next().is_none() {
            return Ok(None);
        }
        let checkpoint = Checkpoint::new();
        match self.advance_bitmaps(backup, &checkpoint) {
            Ok(()) => Ok(Some(checkpoint)),
            Err(e @ ServerError::Backup(BackupError::Changes(_))) => Err(failed(e.to_string())),
            // Nothing has happened to the bitmaps, and the next attempt may succeed.
            Err(e) => {
                let why = e.to_string();
                *locked(&backup.complete) = Some(why.clone());
                Err(BackupError::StillOpen(backup.id.clone(), why).into())
            }
        }
    }

    /// What an ended backup has is released.
    fn close_backup(&self, backup: &Arc<Backup>) {
        for disk in &backup.disks {
            disk.moment.fleece.end("it was ended");
        }
        self.release_backup(backup);
        end_snapshots(std::slice::from_ref(backup));
    }

    fn disconnect_backup(&self, backup: &Backup) {
        let deadline = Instant::now() + END_TIMEOUT;
        for disk in &backup.disks {
            self.end_nbd_exports_at(&disk.moment, deadline);
        }
    }

    /// Ends a backup without its clients' consent. Waits for no request of the guests.
    fn stop_backup(&self, backup: &Arc<Backup>, why: &str) {
        self.stop_reading(backup, why);
        end_snapshots(std::slice::from_ref(backup));
    }

    fn stop_reading(&self, backup: &Backup, why: &str) {
        for disk in &backup.disks {
            disk.moment.fleece.end(why);
        }
        self.release_backup(backup);
        self.disconnect_backup(backup);
    }

    /// Ends the backups of a disk, or of all disks. Their bitmaps have all that they had. Returns the ids of those that had
    /// not failed before.
    pub fn fail_backups(&self, disk: Option<&str>, why: &str) -> Vec<String> {
        let ended: Vec<_> = {
            let mut open = self.backups.lock();
            let is_of = |backup: &Backup| {
                disk.is_none_or(|name| backup.disks.iter().any(|d| d.device.disk.name == name))
            };
            let ids: Vec<_> = open
                .values()
                .filter(|backup| is_of(backup))
                .map(|backup| backup.id.clone())
                .collect();
            ids.iter().filter_map(|id| open.remove(id)).collect()
        };
        let mut failed = Vec::new();
        for backup in &ended {
            error!("backup '{}' has failed: {why}", backup.id);
            if backup.failure().is_none() {
                failed.push(backup.id.clone());
            }
            self.stop_reading(backup, why);
        }
        // Of all at once, since each waits for its cluster.
        end_snapshots(&ended);
        failed
    }

    /// The bitmaps become what was recorded since the moment, with this checkpoint, all of them or none.
    fn advance_bitmaps(&self, backup: &Backup, checkpoint: &Checkpoint) -> Result<(), ServerError> {
        // A power cut must not undo what the backup has and the bitmaps will not have.
        for (disk, bitmap) in with_bitmaps(backup) {
            sync(&disk.device)?;
            if own_image(&disk.node)? != bitmap.mark {
                bitmap.background.set_inconsistent();
            }
            if bitmap.background.is_inconsistent() {
                return Err(BackupError::Changes(disk.node.name().into()).into());
            }
        }
        let has_several = with_bitmaps(backup).nth(1).is_some();
        let mut stale = Vec::new();
        let mut actions = Vec::new();
        for (disk, bitmap) in with_bitmaps(backup) {
            let name = |name: &str| BitmapName {
                disk: disk.node.name().into(),
                name: name.into(),
            };
            let (target, background) = (name(&bitmap.name), bitmap.background.name());
            // The backup does not have what was added to the disk since.
            let (then, now) = (disk.moment.fleece.size(), disk.node.known_size());
            bitmap.background.mark(then, now.saturating_sub(then));
            let known = disk.node.bitmaps();
            let known = known.iter().find(|known| known.name() == bitmap.name);
            let usable = known.filter(|known| !known.is_inconsistent());
            let is_persistent = disk.node.check_new_bitmap().is_ok()
                && usable.is_none_or(|usable| usable.is_persistent());
            match usable {
                Some(_) => actions.extend([
                    BitmapAction::Change(target.clone(), BitmapChange::Clear),
                    BitmapAction::Change(target.clone(), BitmapChange::Enable),
                ]),
                None => {
                    let unusable = disk.node.unusable_bitmaps();
                    if known.is_some() || unusable.iter().any(|other| other.name == bitmap.name) {
                        stale.push(BitmapAction::Change(target.clone(), BitmapChange::Remove));
                    }
                    let add = BitmapChange::Add {
                        granularity: u32::try_from(bitmap.background.granularity()).ok(),
                        is_recording: true,
                        is_persistent,
                    };
                    actions.push(BitmapAction::Change(target.clone(), add));
                }
            }
            // After the changes that remove the old one.
            let add = BitmapChange::Add {
                granularity: Some(1 << checkpoint::GRANULARITY_BITS),
                is_recording: false,
                is_persistent,
            };
            let which = has_several.then_some(&*disk.device.disk.name);
            let continued = Continued::new(checkpoint.clone(), which);
            let with_checkpoint = name(&continued.name_for(&bitmap.name));
            actions.push(BitmapAction::Change(with_checkpoint, add));
            let merge = BitmapChange::Merge(vec![name(background)]);
            actions.push(BitmapAction::Change(target, merge));
            actions.push(BitmapAction::Change(name(background), BitmapChange::Remove));
        }
        if !stale.is_empty() {
            self.change_bitmaps_at_once(&stale)?;
        }
        self.change_bitmaps_at_once(&actions)
    }

    /// Removes the bitmaps that record since the moment, and ends the copies of old data. Waits for no request.
    fn release_backup(&self, backup: &Backup) {
        for (disk, bitmap) in with_bitmaps(backup) {
            let (node, background) = (&disk.node, &bitmap.background);
            // What changes the bitmaps now has this one, too, and would add it again.
            self.backups.will_end(node, background);
            node.remove_bitmap(background);
            self.claims.unless_claimed(node.name(), || {
                self.backups.forget_ended(|ended| ended == node.name());
            });
        }
        for disk in &backup.disks {
            // Its queues then take over which bitmaps record changes.
            end_cut(&disk.device.disk, &disk.device.io_threads());
        }
        let disks = backup.disks.iter();
        drop(Unused::new(disks.map(|disk| (&disk.device, &disk.node))));
    }
}

/// Disks that may not be in use by a backup any more: they are [released](ServedDisk::release_if_unused), where nothing else uses
/// them.
struct Unused(Vec<Arc<ServedDisk>>);

impl Unused {
    fn new<'a>(disks: impl Iterator<Item = (&'a Arc<ServedDisk>, &'a Arc<Node>)>) -> Self {
        let disks = disks.filter(|(_, node)| node.spec.lock == Lock::Running);
        Self(disks.map(|(device, _)| device.clone()).collect())
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        let begun = Instant::now();
        let tasks = self.0.drain(..).map(|device| {
            let name = device.disk.name.clone();
            let task = deadline::begin(&name, move || {
                device.release_if_unused();
                Ok(())
            });
            (name, task)
        });
        // At the same time: storage may not answer.
        let tasks: Vec<_> = tasks.collect();
        for (name, task) in tasks {
            let done = task.and_then(|task| deadline::end(&name, begun + ANSWER_TIMEOUT, &task));
            let _ = done.inspect_err(|e| warn!("disk {name}: not released yet: {e}"));
        }
    }
}

/// Waits until the writes to a disk have ended that were in flight at the moment, unless they wait for storage that fails.
fn settle(disk: &BackupDisk) -> Result<(), BackupError> {
    let (fleece, disk) = (&disk.moment.fleece, &disk.device.disk);
    let deadline = Instant::now() + SETTLE;
    while !fleece.wait_settled(RETRY) {
        if disk.stalled() > 0 {
            return Err(BackupError::Stalled(disk.name.clone()));
        }
        if Instant::now() > deadline {
            return Err(BackupError::Slow(disk.name.clone()));
        }
    }
    Ok(())
}

/// Removes the snapshots of backups that no client reads any more. Nobody waits for long for a cluster that does not answer.
fn end_snapshots(backups: &[Arc<Backup>]) {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let disks = backups.iter().flat_map(|backup| &backup.disks);
    let ending = disks.filter_map(|disk| {
        let (name, snapshot) = (&disk.device.disk.name, disk.moment.snapshot.clone()?);
        let end = move || {
            snapshot.end();
            Ok(())
        };
        Some((name, deadline::begin(name, end)))
    });
    let ending: Vec<_> = ending.collect();
    for (name, task) in ending {
        match task.map(|task| deadline::end(name, deadline, &task)) {
            Ok(Ok(())) => {}
            Ok(Err(_)) => error!(
                "disk {name}: the snapshot of its backup is removed when the cluster answers; it does not now"
            ),
            Err(e) => error!("disk {name}: the snapshot of its backup remains: {e}"),
        }
    }
}

fn with_bitmaps(backup: &Backup) -> impl Iterator<Item = (&BackupDisk, &BackupBitmap)> {
    let disks = backup.disks.iter();
    disks.filter_map(|disk| Some((disk, disk.bitmap.as_ref()?)))
}

fn access_of(device: &ServedDisk, id: &str) -> String {
    format!("{}-{id}", device.disk.name)
}
