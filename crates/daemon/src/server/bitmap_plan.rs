//! Changes of dirty bitmaps, made in copies: [`Plan`].

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use block::DirtyBitmap;
use image::UnusableBitmap;
use thiserror::Error;

use crate::node::bitmaps::PreparedBitmaps;
use crate::node::{Node, checkpoint};

/// Most bitmaps of a disk.
pub const BITMAPS_MAX: usize = 256;
/// The longest name in bytes, as in the format of images.
pub const NAME_MAX: usize = 1023;
/// Granularities that images can have, in bytes.
pub const GRANULARITY: std::ops::RangeInclusive<u32> = 512..=1 << 31;
/// Default granularities follow the cluster size within these bounds, as in QEMU.
const GRANULARITY_DEFAULT: (u64, u64) = (4096, 65536);

/// A bitmap, by the name of its disk and its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapName {
    /// As a command names it: a node, or an export.
    pub disk: String,
    pub name: String,
}

/// An action of a group.
#[derive(Clone, Debug)]
pub enum BitmapAction {
    Change(BitmapName, BitmapChange),
    /// Fails.
    Abort,
}

/// A change of a bitmap.
#[derive(Clone, Debug)]
pub enum BitmapChange {
    Add {
        /// In bytes.
        granularity: Option<u32>,
        is_recording: bool,
        is_persistent: bool,
    },
    Remove,
    Clear,
    Enable,
    Disable,
    /// Sets what is dirty in these.
    Merge(Vec<BitmapName>),
}

/// The messages begin with those of QEMU, which programs know.
#[derive(Debug, Error)]
pub enum BitmapError {
    #[error("Transaction aborted using Abort action")]
    Abort,
    #[error("Cannot find device='{0}' nor node-name='{0}'; 'ringdisk list' shows the disks")]
    NoDevice(String),
    #[error("Node '{0}' not found; 'ringdisk list' shows the disks")]
    NoNode(String),
    #[error(
        "disk '{0}' is read-only, released to another host, or stores nothing; only other disks have bitmaps"
    )]
    NoImage(String),
    #[error("Dirty bitmap '{1}' not found; 'ringdisk bitmap list {0}' shows those of the disk")]
    Missing(String, String),
    #[error("Bitmap already exists: {1} (of disk '{0}')")]
    Exists(String, String),
    #[error(
        "Bitmap '{1}' is inconsistent and cannot be used; 'ringdisk bitmap remove {0} {1}' deletes it, and the next backup \
         must be a full one"
    )]
    Inconsistent(String, String),
    #[error(
        "Bitmap '{0}' is currently in use by another operation and cannot be used: the same transaction removes it"
    )]
    Busy(String),
    #[error(transparent)]
    Exported(ExportedBitmapError),
    #[error("Can't make bitmap '{1}' persistent in '{0}': {2}")]
    Unstorable(String, String, String),
    #[error("Bitmap name cannot be empty")]
    NoName,
    #[error("Bitmap name cannot contain NUL: QEMU would not open the image")]
    Nul,
    #[error("Bitmap name too long: {0} (at most 1023 bytes)")]
    LongName(String),
    #[error(
        "Bitmap name '{0}' is one that ringdisk uses for the checkpoint of a backup; choose another name"
    )]
    CheckpointName(String),
    #[error("Granularity must be power of 2 and at least 512 (and at most 2147483648)")]
    Granularity,
    #[error(
        "disk '{0}' has 256 bitmaps, which is the limit, or its bits would take more than 128 MiB of memory; inconsistent ones count until they are removed"
    )]
    TooMany(String),
    #[error(
        "disk '{0}' cannot have another bitmap while backup '{1}' is open: bitmaps are created when it succeeds, and a disk \
         has at most 256 bitmaps with 128 MiB of bits"
    )]
    Reserved(String, String),
    #[error(
        "Bitmaps are of different sizes (destination size is {0}, source size is {1}) and can't be merged"
    )]
    Size(u64, u64),
    #[error("disk '{0}': its bitmaps could not be marked as in use: {1}")]
    Mark(String, io::Error),
    #[error("disk '{0}': the change of its persistent bitmaps could not be made durable: {1}")]
    Store(String, io::Error),
    #[error(
        "disk '{0}': its bitmaps have changed, but its writes from before are not durable: {1}; after a power cut, they may \
         lack changes, so the next backup must be a full one"
    )]
    NotDurable(String, String),
    #[error("its requests in flight have not ended: {0}")]
    Hold(io::Error),
}

/// Why a dirty bitmap cannot be exported. The messages begin with those of QEMU, which programs know.
#[derive(Debug, Error)]
pub enum ExportedBitmapError {
    #[error("Bitmap '{1}' is not found; 'ringdisk bitmap list {0}' shows those of the disk")]
    Missing(String, String),
    #[error(
        "Bitmap '{1}' is inconsistent and cannot be used; 'ringdisk bitmap remove {0} {1}' deletes it, and the next backup \
         must be a full one"
    )]
    Inconsistent(String, String),
    #[error(
        "Enabled bitmap '{1}' incompatible with readonly export: it would change while clients read it; \
         'ringdisk bitmap disable {0} {1}' first"
    )]
    Enabled(String, String),
    #[error(
        "Bitmap '{1}' is currently in use by another operation and cannot be used: NBD export '{0}' has it"
    )]
    Exported(String, String),
    #[error(
        "bitmap '{1}' of node '{2}': clients of disk '{0}' can query only bitmaps of that disk"
    )]
    OtherNode(String, String, String),
}

/// Checks the name of a new bitmap.
///
/// # Errors
/// What is wrong with it.
pub fn check_name(name: &str) -> Result<(), BitmapError> {
    match name {
        "" => Err(BitmapError::NoName),
        name if name.contains('\0') => Err(BitmapError::Nul),
        name if name.len() > NAME_MAX => Err(BitmapError::LongName(name.into())),
        _ => Ok(()),
    }
}

/// What an open backup needs for the bitmaps that it creates when it succeeds.
pub struct ReservedBitmap {
    /// The id of the backup.
    pub backup: String,
    /// Number of bitmaps.
    pub count: usize,
    /// Bytes of bits.
    pub bytes: u64,
}

/// The bitmaps as they will be.
pub struct Plan {
    disks: Vec<PlannedDisk>,
    /// The disk of each name that the actions use.
    places: BTreeMap<String, usize>,
}

/// What else uses the bitmaps of a node.
pub struct BitmapUsers {
    /// Bitmaps that NBD clients may query, each with an export that has it.
    pub exported: BTreeMap<String, String>,
    pub reserved: Option<ReservedBitmap>,
    /// Bytes that its guest can address, if it is served.
    pub served: Option<u64>,
}

struct PlannedDisk {
    node: Arc<Node>,
    has_bitmaps: bool,
    bitmaps: Vec<Arc<DirtyBitmap>>,
    unusable: Vec<UnusableBitmap>,
    /// They stay until the end, as in QEMU.
    removed: BTreeSet<String>,
    /// Bitmaps that NBD clients may query, which stay as they are, each with an export that has it.
    exported: BTreeMap<String, String>,
    reserved: Option<ReservedBitmap>,
    /// Bytes that its guest can address. The file may have more already: what the disk will grow by.
    served: u64,
}

impl PlannedDisk {
    fn new((node, users): (&Arc<Node>, BitmapUsers)) -> Self {
        Self {
            exported: users.exported,
            reserved: users.reserved,
            served: users.served.unwrap_or(u64::MAX),
            has_bitmaps: node.has_bitmaps(),
            bitmaps: node.bitmaps(),
            unusable: node.unusable_bitmaps(),
            removed: BTreeSet::new(),
            node: node.clone(),
        }
    }

    /// What the disk will grow by counts as dirty: no backup can have it before, and it may contain anything.
    fn mark_unserved(&self, bitmap: &DirtyBitmap) {
        bitmap.mark(self.served, bitmap.size().saturating_sub(self.served));
    }

    fn find(&self, name: &str) -> Option<&Arc<DirtyBitmap>> {
        self.bitmaps.iter().find(|bitmap| bitmap.name() == name)
    }

    fn is_unusable(&self, name: &str) -> bool {
        self.unusable.iter().any(|bitmap| bitmap.name == name)
    }

    /// Checks that there is such a bitmap.
    fn check_exists(&self, name: &str) -> Result<(), BitmapError> {
        if self.find(name).is_none() && !self.is_unusable(name) {
            let disk = self.node.name().into();
            return Err(BitmapError::Missing(disk, name.into()));
        }
        Ok(())
    }

    /// What a bitmap has recorded since its checkpoint, if it has one, it will not have any more.
    fn remove_checkpoints(&mut self, name: &str) {
        let bitmaps = self.bitmaps.iter().map(|bitmap| bitmap.name());
        let unusable = self.unusable.iter().map(|bitmap| &*bitmap.name);
        let is_its = |other: &&str| checkpoint::bitmap_of(other) == Some(name);
        let its: Vec<_> = bitmaps
            .chain(unusable)
            .filter(is_its)
            .map(str::to_owned)
            .collect();
        self.removed.extend(its);
    }

    /// Checks that nothing else uses a bitmap.
    fn check_free(&self, name: &str) -> Result<(), BitmapError> {
        if let Some(export) = self.exported.get(name) {
            let busy = ExportedBitmapError::Exported(export.clone(), name.into());
            return Err(BitmapError::Exported(busy));
        }
        if self.removed.contains(name) {
            return Err(BitmapError::Busy(name.into()));
        }
        Ok(())
    }

    /// A bitmap that exists, if it can be used.
    fn usable(&self, name: &str) -> Result<&Arc<DirtyBitmap>, BitmapError> {
        self.check_free(name)?;
        let found = self.find(name).filter(|bitmap| !bitmap.is_inconsistent());
        found.ok_or_else(|| BitmapError::Inconsistent(self.node.name().into(), name.into()))
    }
}

impl Plan {
    /// `users` are those of each node, and `places` has the place among the nodes of each name that the actions use.
    pub fn new(
        nodes: &[Arc<Node>],
        users: Vec<BitmapUsers>,
        places: BTreeMap<String, usize>,
    ) -> Self {
        Self {
            disks: nodes.iter().zip(users).map(PlannedDisk::new).collect(),
            places,
        }
    }

    /// Marks what is stored in the images as in use, where actions may change it.
    ///
    /// # Errors
    /// It could not be marked.
    pub fn begin(&self, actions: &[BitmapAction]) -> Result<(), BitmapError> {
        for disk in &self.disks {
            if disk.has_bitmaps && self.changes_stored(disk, actions) {
                let used = disk.node.use_bitmaps();
                used.map_err(|e| BitmapError::Mark(disk.node.name().into(), e))?;
            }
        }
        Ok(())
    }

    /// Whether actions may change what is stored in the image of a disk.
    fn changes_stored(&self, disk: &PlannedDisk, actions: &[BitmapAction]) -> bool {
        actions.iter().any(|action| match action {
            BitmapAction::Abort => false,
            BitmapAction::Change(target, change) => {
                let new =
                    matches!(change, BitmapChange::Add { is_persistent, .. } if *is_persistent);
                let old = disk.find(&target.name).is_some_and(|b| b.is_persistent());
                let is_on_it = (self.places.get(&target.disk))
                    .is_some_and(|&place| Arc::ptr_eq(&self.disks[place].node, &disk.node));
                is_on_it && (new || old)
            }
        })
    }

    fn disk(&self, name: &str) -> Option<usize> {
        self.places.get(name).copied()
    }

    /// The disk of a bitmap that exists.
    fn disk_of(&self, bitmap: &BitmapName) -> Result<usize, BitmapError> {
        let missing = || BitmapError::NoNode(bitmap.disk.clone());
        let place = self.disk(&bitmap.disk).ok_or_else(missing)?;
        self.disks[place].check_exists(&bitmap.name)?;
        Ok(place)
    }

    /// Makes a change in the copies.
    ///
    /// # Errors
    /// It is not possible.
    pub fn apply(&mut self, target: &BitmapName, change: &BitmapChange) -> Result<(), BitmapError> {
        let new = match change {
            BitmapChange::Add {
                granularity,
                is_recording,
                is_persistent,
            } => return self.add(target, *granularity, *is_recording, *is_persistent),
            BitmapChange::Remove => {
                let place = self.disk_of(target)?;
                self.disks[place].check_free(&target.name)?;
                self.disks[place].removed.insert(target.name.clone());
                self.disks[place].remove_checkpoints(&target.name);
                return Ok(());
            }
            BitmapChange::Clear => {
                let new = self.target(target)?.cleared();
                let place = self.disk_of(target)?;
                self.disks[place].mark_unserved(&new);
                self.disks[place].remove_checkpoints(&target.name);
                new
            }
            BitmapChange::Enable | BitmapChange::Disable => {
                let old = self.target(target)?;
                let is_recording = matches!(change, BitmapChange::Enable);
                let (new, was_recording) = (old.recording(is_recording), old.is_recording());
                if !(was_recording && is_recording) {
                    let place = self.disk_of(target)?;
                    self.disks[place].remove_checkpoints(&target.name);
                }
                new
            }
            BitmapChange::Merge(sources) => self.merged(target, sources)?,
        };
        let place = self.disk_of(target)?;
        let mut bitmaps = self.disks[place].bitmaps.iter_mut();
        if let Some(old) = bitmaps.find(|bitmap| bitmap.name() == target.name) {
            *old = Arc::new(new);
        }
        Ok(())
    }

    /// A bitmap that can be changed.
    fn target(&self, target: &BitmapName) -> Result<&Arc<DirtyBitmap>, BitmapError> {
        self.disks[self.disk_of(target)?].usable(&target.name)
    }

    fn merged(
        &self,
        target: &BitmapName,
        sources: &[BitmapName],
    ) -> Result<DirtyBitmap, BitmapError> {
        let place = self.disk_of(target)?;
        let old = self.disks[place].usable(&target.name)?;
        let new = old.recording(old.is_recording());
        for source in sources {
            let bitmap = self.target(source)?;
            let (own, size) = (new.size(), bitmap.size());
            // Bitmaps of one disk differ only while they grow with it. What is new counts as dirty.
            if own != size && self.disk_of(source)? != place {
                return Err(BitmapError::Size(own, size));
            }
            if new.bytes_at(size) > image::BITMAP_BYTES_MAX || new.grow(size).is_err() {
                return Err(BitmapError::TooMany(target.disk.clone()));
            }
            new.merge(bitmap);
            let (from, to) = (own.min(size), own.max(size));
            new.mark(from, to - from);
        }
        Ok(new)
    }

    fn add(
        &mut self,
        target: &BitmapName,
        granularity: Option<u32>,
        is_recording: bool,
        is_persistent: bool,
    ) -> Result<(), BitmapError> {
        let BitmapName { disk: given, name } = target.clone();
        check_name(&name)?;
        let place = self.disk(&given).ok_or(BitmapError::NoDevice(given))?;
        let disk = &mut self.disks[place];
        let node = disk.node.name().to_owned();
        let (least, most) = GRANULARITY_DEFAULT;
        let default = || disk.node.cluster_bytes().clamp(least, most) as u32;
        let granularity = granularity.unwrap_or_else(default);
        if !granularity.is_power_of_two() || !GRANULARITY.contains(&granularity) {
            return Err(BitmapError::Granularity);
        }
        if !disk.has_bitmaps {
            return Err(BitmapError::NoImage(node));
        }
        if disk.check_exists(&name).is_ok() {
            return Err(BitmapError::Exists(node, name));
        }
        // Another program may have removed the bitmap of this name, and left its checkpoint.
        disk.remove_checkpoints(&name);
        if is_persistent {
            let checked = disk.node.check_new_bitmap();
            checked.map_err(|why| BitmapError::Unstorable(node.clone(), name.clone(), why))?;
        }
        let size = disk.node.known_size();
        let bytes = disk.bitmaps.iter().map(|b| b.bytes()).sum::<u64>()
            + size.div_ceil(granularity.into()).div_ceil(8);
        // A new checkpoint takes the place of the old one.
        let is_checkpoint = |name: &&String| checkpoint::bitmap_of(name).is_some();
        let replaced = disk.removed.iter().filter(is_checkpoint).count();
        let count = disk.bitmaps.len() + disk.unusable.len() - replaced + 1;
        if count > BITMAPS_MAX || bytes > image::BITMAP_BYTES_MAX {
            return Err(BitmapError::TooMany(node));
        }
        if let Some(reserved) = &disk.reserved
            && (count + reserved.count > BITMAPS_MAX
                || bytes + reserved.bytes > image::BITMAP_BYTES_MAX)
        {
            return Err(BitmapError::Reserved(node, reserved.backup.clone()));
        }
        let bits = granularity.trailing_zeros();
        let new = DirtyBitmap::new(name, bits, size, is_recording, is_persistent);
        let new = new.map_err(|_| BitmapError::TooMany(node))?;
        disk.mark_unserved(&new);
        disk.bitmaps.push(Arc::new(new));
        Ok(())
    }

    /// Steps 4 and 5 of a [change](super::bitmaps): no request is in flight.
    ///
    /// # Errors
    /// The bitmaps stay.
    pub fn carry_out(self) -> Result<(), BitmapError> {
        let mut prepared = Vec::new();
        for disk in self.disks {
            let node = disk.node.clone();
            match disk.prepare() {
                Ok(bitmaps) => prepared.push((node, bitmaps)),
                Err(e) => {
                    for (node, bitmaps) in prepared {
                        node.give_up_bitmaps(&bitmaps);
                    }
                    return Err(BitmapError::Store(node.name().into(), e));
                }
            }
        }
        for (node, bitmaps) in prepared {
            node.set_bitmaps(bitmaps);
        }
        Ok(())
    }
}

impl PlannedDisk {
    /// Step 4.
    fn prepare(mut self) -> io::Result<PreparedBitmaps> {
        let is_stored = |name: &&str| {
            self.is_unusable(name) || self.find(name).is_some_and(|b| b.is_persistent())
        };
        let names = self.removed.iter().map(String::as_str).filter(is_stored);
        let names: Vec<_> = names.collect();
        let removed = &self.removed;
        self.bitmaps
            .retain(|bitmap| !removed.contains(bitmap.name()));
        self.node.prepare_bitmaps(&names, self.bitmaps)
    }
}
