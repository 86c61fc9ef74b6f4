//! The bitmap of a backup, and the one that takes its place if the backup succeeds.

use std::sync::Arc;

use block::DirtyBitmap;
use tracing::warn;

use crate::node::Node;
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

/// Where the bitmap of a backup comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapOrigin {
    /// The backup is incremental. All others are full.
    Used,
    New,
    /// It was to be used, and there was none.
    Missing,
    /// It was to be used, and is inconsistent or disabled.
    Unusable,
}

/// The bitmap of a disk that is backed up.
pub struct BackupBitmap {
    pub name: String,
    pub origin: BitmapOrigin,
    /// Records changes since the moment.
    pub(super) background: Arc<DirtyBitmap>,
    /// The [mark](Node::own_image) of the lock of the disk's image in a cluster. If it has changed at the end, another client
    /// may have written to the image.
    pub(super) mark: Option<String>,
}

/// The bitmap of a backup of a disk, and the one that says what to copy: the one that it uses, or one with all bits set.
pub(super) fn prepared(
    id: &str,
    node: &Node,
    wanted: Option<&(String, BitmapMode)>,
    size: u64,
) -> Result<(Option<BackupBitmap>, Option<Arc<DirtyBitmap>>), BackupError> {
    let Some((name, mode)) = wanted else {
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
    let unusable = match found {
        None if stored.iter().any(|other| other.name == *name) => Some(BitmapOrigin::Unusable),
        None => Some(BitmapOrigin::Missing),
        // Disabled, it lacks changes.
        Some(bitmap) if bitmap.is_inconsistent() || !bitmap.is_recording() => {
            Some(BitmapOrigin::Unusable)
        }
        Some(_) => None,
    };
    let origin = match (mode, unusable) {
        (BitmapMode::New, _) | (BitmapMode::Auto, Some(_)) => BitmapOrigin::New,
        (BitmapMode::Use, Some(why)) => why,
        (_, None) => BitmapOrigin::Used,
    };
    let is_stored = match found {
        Some(found) => found.is_persistent(),
        None => node.check_new_bitmap().is_ok(),
    };
    if !is_stored {
        warn!(
            "backup '{id}': bitmap '{name}' of disk {disk} is not persistent: after the end of ringdisk, the next backup is full"
        );
    }
    let used = found.filter(|_| origin == BitmapOrigin::Used).cloned();
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
    if check_name(&background).is_err() {
        let most = NAME_MAX - (background.len() - name.len());
        return Err(BackupError::LongBitmapName(id.into(), most));
    }
    if all.iter().any(|bitmap| bitmap.name() == background) {
        return Err(BackupError::BitmapName(disk.into(), background));
    }
    // At the end, there are two: this bitmap and the one in the background. An inconsistent one is removed before that.
    let found = found.filter(|bitmap| !bitmap.is_inconsistent());
    let others = || all.iter().filter(|bitmap| bitmap.name() != name);
    let unusable = stored.iter().filter(|other| other.name != *name).count();
    // The disk may have grown without its guest, and its bitmaps with it.
    let covered = size.max(node.known_size());
    let own = covered.div_ceil(1 << bits).div_ceil(8);
    let kept = found.map_or(own, |found| found.bytes());
    let bytes = others().map(|bitmap| bitmap.bytes()).sum::<u64>() + kept + own;
    if others().count() + unusable + 2 > BITMAPS_MAX || bytes > image::BITMAP_BYTES_MAX {
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
        origin,
        background: Arc::new(new(background, covered, true)?),
        mark,
    };
    Ok((Some(bitmap), Some(wanted)))
}

/// See [`Node::own_image`].
pub(super) fn own_image(node: &Node) -> Result<Option<String>, BackupError> {
    let owned = node.own_image();
    owned.map_err(|e| BackupError::Lock(node.name().into(), e))
}
