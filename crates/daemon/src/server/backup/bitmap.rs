//! The bitmap of a backup, and the one that takes its place if the backup succeeds.

use std::sync::Arc;

use block::DirtyBitmap;
use tracing::warn;

use crate::node::Node;
use crate::node::checkpoint::{self, Checkpoint, Continued};
use crate::server::bitmap_plan::{BITMAPS_MAX, GRANULARITY, NAME_MAX, check_name};
use crate::server::error::BackupError;

/// What is to be done with a bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapMode {
    /// The backup is full, and the bitmap is created, or begins again.
    New,
    /// The backup is incremental, with this bitmap, if that can be used; otherwise as [`New`](Self::New).
    Use,
    /// The same, and the bitmap is new if it cannot be used, whatever the reason.
    Auto,
}

/// The bitmap that a client wants a backup to have.
pub struct WantedBitmap {
    pub name: String,
    pub mode: BitmapMode,
    /// The last backup that the client has, if it knows that.
    pub since: Option<Checkpoint>,
}

/// Why a backup with a bitmap is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyFull {
    Wanted,
    Missing,
    Inconsistent,
    Disabled,
    /// The client has a checkpoint, and the bitmap has none.
    NoCheckpoint,
    /// The client has another checkpoint.
    OtherCheckpoint,
    /// The client has this checkpoint, and the bitmap is that of another disk of that backup.
    OtherDisk,
}

/// The bitmap of a disk that is backed up.
pub struct BackupBitmap {
    pub name: String,
    /// As it was wanted.
    pub mode: BitmapMode,
    /// `None` if the backup is incremental.
    pub why_full: Option<WhyFull>,
    /// What the bitmap had when the backup began.
    pub checkpoint: Option<Checkpoint>,
    /// Records changes since the moment.
    pub(super) background: Arc<DirtyBitmap>,
    /// The [mark](Node::own_image) of the lock of the disk's image in a cluster. If it has changed at the end, another client
    /// may have written to the image.
    pub(super) mark: Option<String>,
}

/// A disk as its guest has it.
pub(super) struct Disk<'a> {
    pub name: &'a str,
    pub size: u64,
}

/// The bitmap of a backup of a disk, and the one that says what to copy: the one that it uses, or one with all bits set.
pub(super) fn prepared(
    id: &str,
    node: &Node,
    wanted: Option<&WantedBitmap>,
    Disk { name: served, size }: Disk<'_>,
) -> Result<(Option<BackupBitmap>, Option<Arc<DirtyBitmap>>), BackupError> {
    let Some(WantedBitmap { name, mode, since }) = wanted else {
        return Ok((None, None));
    };
    let disk = node.name();
    check_name(name)?;
    if !node.has_bitmaps() {
        return Err(BackupError::NoBitmaps(disk.into()));
    }
    let mark = own_image(node)?;
    let all = node.bitmaps();
    let found = all.iter().find(|bitmap| bitmap.name() == name);
    let stored = node.unusable_bitmaps();
    let continued = found.and_then(|_| Continued::of(name, &all));
    let is_known = || stored.iter().any(|other| other.name == *name);
    let why_full = match found {
        _ if *mode == BitmapMode::New => Some(WhyFull::Wanted),
        None if is_known() => Some(WhyFull::Inconsistent),
        None => Some(WhyFull::Missing),
        Some(found) => why_not(found, continued.as_ref(), since.as_ref(), served),
    };
    let checkpoint = continued.map(|continued| continued.checkpoint);
    if let (Some(why), Some(since)) = (why_full, since)
        && let Some(why) = other_backup(why, name, since, checkpoint.as_ref())
    {
        warn!("backup '{id}': disk {served} is copied in full: {why}");
    }
    let is_stored = match found {
        Some(found) => found.is_persistent(),
        None => node.check_new_bitmap().is_ok(),
    };
    if !is_stored {
        warn!(
            "backup '{id}': bitmap '{name}' of disk {disk} is not persistent: after the end of ringdisk, the next backup is full"
        );
    }
    let used = found.filter(|_| why_full.is_none()).cloned();
    // One that cannot be used is replaced by another of the same granularity.
    let of_stored = || {
        let its = stored.iter().find(|other| other.name == *name)?.granularity;
        let is_valid = u32::try_from(its).is_ok_and(|its| GRANULARITY.contains(&its));
        (is_valid && its.is_power_of_two()).then(|| its.ilog2())
    };
    let bits = (found.map(|bitmap| bitmap.granularity_bits()))
        .or_else(of_stored)
        .unwrap_or_else(|| node.cluster_bytes().clamp(4096, 65536).ilog2());
    let background = format!("backup-{id}-{name}");
    let extra = (background.len() - name.len()).max(checkpoint::NAME_EXTRA);
    if name.len() + extra > NAME_MAX {
        let most = NAME_MAX - extra;
        return Err(BackupError::LongBitmapName(id.into(), most));
    }
    if all.iter().any(|bitmap| bitmap.name() == background) {
        return Err(BackupError::BitmapName(disk.into(), background));
    }
    // At the end, there are three: this bitmap, the one in the background, and one with the checkpoint. An inconsistent one is
    // removed before that, and so is an old checkpoint.
    let found = found.filter(|bitmap| !bitmap.is_inconsistent());
    let is_other = |other: &str| other != name && checkpoint::bitmap_of(other) != Some(name);
    let others = || all.iter().filter(|bitmap| is_other(bitmap.name()));
    let unusable = stored.iter().filter(|other| is_other(&other.name)).count();
    // The disk may have grown without its guest, and its bitmaps with it.
    let covered = size.max(node.known_size());
    let own = covered.div_ceil(1 << bits).div_ceil(8);
    let kept = found.map_or(own, |found| found.bytes());
    let with_checkpoint = checkpoint_bytes(covered);
    let bytes = others().map(|bitmap| bitmap.bytes()).sum::<u64>() + kept + own + with_checkpoint;
    if others().count() + unusable + 3 > BITMAPS_MAX || bytes > image::BITMAP_BYTES_MAX {
        return Err(BackupError::TooManyBitmaps(disk.into()));
    }
    let new = |name, size, is_recording| {
        let bitmap = DirtyBitmap::new(name, bits, size, is_recording, false);
        bitmap.map_err(|_| BackupError::TooManyBitmaps(disk.into()))
    };
    let wanted = match used {
        Some(used) => used,
        None => {
            let all = new(name.clone(), size, false)?;
            all.mark(0, size);
            Arc::new(all)
        }
    };
    let bitmap = BackupBitmap {
        name: name.clone(),
        mode: *mode,
        why_full,
        checkpoint,
        background: Arc::new(new(background, covered, true)?),
        mark,
    };
    Ok((Some(bitmap), Some(wanted)))
}

/// What an operator learns of a bitmap that does not continue the last backup of the client.
fn other_backup(
    why: WhyFull,
    bitmap: &str,
    since: &Checkpoint,
    has: Option<&Checkpoint>,
) -> Option<String> {
    match why {
        WhyFull::NoCheckpoint | WhyFull::OtherCheckpoint => Some(format!(
            "the last backup that the client has is {since}, and the checkpoint of bitmap '{bitmap}' is {}; the disk or the \
             bitmap may be an older one that was put back",
            has.map_or("none", Checkpoint::as_str)
        )),
        WhyFull::OtherDisk => Some(format!(
            "bitmap '{bitmap}' is that of another disk of backup {since}; that disk's image or file is in the place of this \
             one's, or the disk had another name then"
        )),
        WhyFull::Wanted | WhyFull::Missing | WhyFull::Inconsistent | WhyFull::Disabled => None,
    }
}

/// Why a bitmap cannot be used, if it cannot.
fn why_not(
    bitmap: &DirtyBitmap,
    continued: Option<&Continued>,
    since: Option<&Checkpoint>,
    disk: &str,
) -> Option<WhyFull> {
    let checkpoint = continued.map(|continued| &continued.checkpoint);
    match since {
        _ if bitmap.is_inconsistent() => Some(WhyFull::Inconsistent),
        // It lacks changes.
        _ if !bitmap.is_recording() => Some(WhyFull::Disabled),
        Some(_) if checkpoint.is_none() => Some(WhyFull::NoCheckpoint),
        Some(_) if checkpoint != since => Some(WhyFull::OtherCheckpoint),
        Some(_) if !continued.is_some_and(|its| its.is_of_disk(disk)) => Some(WhyFull::OtherDisk),
        _ => None,
    }
}

/// Bytes of the bitmap with the checkpoint of a bitmap of a disk of `size` bytes.
pub(super) fn checkpoint_bytes(size: u64) -> u64 {
    size.div_ceil(1 << checkpoint::GRANULARITY_BITS).div_ceil(8)
}

/// See [`Node::own_image`].
pub(super) fn own_image(node: &Node) -> Result<Option<String>, BackupError> {
    let owned = node.own_image();
    owned.map_err(|e| BackupError::Lock(node.name().into(), e))
}
