//! Commands about dirty bitmaps.

use std::collections::{BTreeMap, BTreeSet};

use control::{
    BlockDirtyBitmap, BlockDirtyBitmapAdd, BlockDirtyBitmapMerge, BlockDirtyBitmapOrStr,
    BlockDirtyInfo, Transaction, TransactionActionKind,
};

use super::{Reply, Run, done};
use crate::node::Node;
use crate::node::checkpoint::{self, Continued};
use crate::server::bitmap_plan::{BitmapAction, BitmapChange, BitmapName};
use crate::server::bitmaps::disks_of;

pub(super) fn add(run: &Run<'_>, wanted: BlockDirtyBitmapAdd) -> Reply {
    change(run, &[added(wanted)])
}

pub(super) fn clear(run: &Run<'_>, which: BlockDirtyBitmap) -> Reply {
    change(run, &[one(which, BitmapChange::Clear)])
}

pub(super) fn disable(run: &Run<'_>, which: BlockDirtyBitmap) -> Reply {
    change(run, &[one(which, BitmapChange::Disable)])
}

pub(super) fn enable(run: &Run<'_>, which: BlockDirtyBitmap) -> Reply {
    change(run, &[one(which, BitmapChange::Enable)])
}

pub(super) fn merge(run: &Run<'_>, wanted: BlockDirtyBitmapMerge) -> Reply {
    change(run, &[merged(wanted)])
}

pub(super) fn remove(run: &Run<'_>, which: BlockDirtyBitmap) -> Reply {
    change(run, &[one(which, BitmapChange::Remove)])
}

pub(super) fn transaction(run: &Run<'_>, wanted: Transaction) -> Reply {
    let action = |kind| match kind {
        TransactionActionKind::Abort(_) => BitmapAction::Abort,
        TransactionActionKind::BitmapAdd(wanted) => added(wanted.data),
        TransactionActionKind::BitmapRemove(which) => one(which.data, BitmapChange::Remove),
        TransactionActionKind::BitmapClear(which) => one(which.data, BitmapChange::Clear),
        TransactionActionKind::BitmapEnable(which) => one(which.data, BitmapChange::Enable),
        TransactionActionKind::BitmapDisable(which) => one(which.data, BitmapChange::Disable),
        TransactionActionKind::BitmapMerge(wanted) => merged(wanted.data),
    };
    let actions = wanted.actions.into_iter();
    let actions: Vec<_> = actions.map(|wanted| action(wanted.action)).collect();
    change(run, &actions)
}

fn change(run: &Run<'_>, actions: &[BitmapAction]) -> Reply {
    let claim = run.claim(|| disks_of(actions).collect())?;
    done(run.server.change_bitmaps(&claim, actions))
}

fn name(which: BlockDirtyBitmap) -> BitmapName {
    BitmapName {
        disk: which.node,
        name: which.name,
    }
}

fn one(which: BlockDirtyBitmap, change: BitmapChange) -> BitmapAction {
    BitmapAction::Change(name(which), change)
}

fn added(wanted: BlockDirtyBitmapAdd) -> BitmapAction {
    let BlockDirtyBitmapAdd {
        node: disk,
        name,
        granularity,
        persistent,
        disabled,
    } = wanted;
    let change = BitmapChange::Add {
        granularity,
        is_recording: disabled != Some(true),
        is_persistent: persistent == Some(true),
    };
    BitmapAction::Change(BitmapName { disk, name }, change)
}

fn merged(wanted: BlockDirtyBitmapMerge) -> BitmapAction {
    let BlockDirtyBitmapMerge {
        node: disk,
        target,
        bitmaps,
    } = wanted;
    let source = |source| match source {
        BlockDirtyBitmapOrStr::Local(name) => BitmapName {
            disk: disk.clone(),
            name,
        },
        BlockDirtyBitmapOrStr::External(bitmap) => name(bitmap),
    };
    let sources = bitmaps.into_iter().map(source).collect();
    let target = BitmapName {
        disk: disk.clone(),
        name: target,
    };
    BitmapAction::Change(target, BitmapChange::Merge(sources))
}

/// The bitmaps of a disk, the newest first, as in QEMU; or `None` if it has none. `exported` are those that NBD clients may
/// query.
pub(super) fn info(
    node: &Node,
    exported: &BTreeMap<String, String>,
) -> Option<Vec<BlockDirtyInfo>> {
    let (bitmaps, unusable) = (node.bitmaps(), node.unusable_bitmaps());
    // Those with checkpoints are shown only if they were left behind.
    let names: BTreeSet<_> = (bitmaps.iter().map(|bitmap| bitmap.name().to_owned()))
        .chain(unusable.iter().map(|bitmap| bitmap.name.clone()))
        .collect();
    let is_shown = |name: &str| {
        let of = checkpoint::bitmap_of(name);
        of.is_none_or(|of| !names.contains(of))
    };
    let usable = bitmaps.iter().filter(|bitmap| is_shown(bitmap.name()));
    let usable = usable.map(|bitmap| BlockDirtyInfo {
        name: Some(bitmap.name().to_owned()),
        count: bitmap.dirty_bits() * bitmap.granularity(),
        granularity: u32::try_from(bitmap.granularity()).unwrap_or(0),
        recording: bitmap.is_recording() && !bitmap.is_inconsistent(),
        busy: exported.contains_key(bitmap.name()),
        persistent: bitmap.is_persistent(),
        inconsistent: bitmap.is_inconsistent().then_some(true),
        checkpoint: Continued::of(bitmap.name(), &bitmaps)
            .filter(|_| bitmap.is_recording() && !bitmap.is_inconsistent())
            .map(|continued| continued.checkpoint.to_string()),
    });
    let unusable = (unusable.iter()).filter(|bitmap| is_shown(&bitmap.name));
    let unusable = unusable.cloned().map(|bitmap| BlockDirtyInfo {
        name: Some(bitmap.name),
        count: 0,
        granularity: u32::try_from(bitmap.granularity).unwrap_or(0),
        recording: false,
        busy: false,
        persistent: true,
        inconsistent: Some(true),
        checkpoint: None,
    });
    let all: Vec<_> = unusable.chain(usable).collect();
    (!all.is_empty()).then(|| all.into_iter().rev().collect())
}
