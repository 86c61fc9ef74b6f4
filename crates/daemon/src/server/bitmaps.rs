//! Changes of dirty bitmaps: all of a group or none, at one moment for all disks.
//!
//! 1. If persistent bitmaps change, those in the images are marked as in use, so that a crash does not bring them back as
//!    they were before.
//! 2. The disks are held: nothing is fetched, and requests in flight end.
//! 3. The changes are made in order, in copies. If one of them fails, nothing has changed.
//! 4. Persistent bitmaps that are removed are removed from the images, and those of disks that are in no image are changed
//!    [in the state directory](crate::node), durably.
//! 5. The copies take the place of the old bitmaps, and the disks continue.
//!
//! If 4 fails, the bitmaps stay: one that is in its image no more is stored again with the others. A crash leaves each disk
//! {with its bitmaps in use} or {without those that were removed}.
//!
//! Bitmaps in the state directory survive a power cut. What a disk loses then must therefore be in them, or not yet in a
//! backup: a client may copy writes that the guest has not flushed as soon as it knows that a bitmap was cleared. So the
//! disks are made durable before the command succeeds, and before it begins, so that failed storage changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Instant;

use block::DirtyBitmap;

use super::bitmap_plan::{BitmapAction, BitmapChange, BitmapError, BitmapName, BitmapUsers, Plan};
use super::deadline::{SHUTDOWN_TIMEOUT, with_deadline};
use super::device::ServedDisk;
use super::{Claim, Server, ServerError};
use crate::node::{Node, checkpoint};

impl Server {
    /// Does all these actions, or none of them, at one moment for all disks.
    ///
    /// # Errors
    /// Nothing has changed, except after [`BitmapError::NotDurable`].
    pub fn change_bitmaps(
        &self,
        claim: &Claim<'_>,
        actions: &[BitmapAction],
    ) -> Result<(), ServerError> {
        disks_of(actions).for_each(|disk| claim.covers(disk));
        check_names(actions)?;
        self.check_not_absent(actions)?;
        self.check_not_in_backups(actions)?;
        self.check_not_hung(actions)?;
        self.noted_disks(actions).iter().try_for_each(sync)?;
        self.change_bitmaps_at_once(actions)?;
        // They may have got their first persistent bitmap.
        for device in self.noted_disks(actions) {
            sync(&device)
                .map_err(|e| BitmapError::NotDurable(device.disk.name.clone(), e.to_string()))?;
        }
        Ok(())
    }

    /// Checks that no bitmap is on a disk that is to be served and cannot be. Other missing disks are found later.
    fn check_not_absent(&self, actions: &[BitmapAction]) -> Result<(), ServerError> {
        let absent = |disk: &&str| self.node_of(disk).is_none() && self.is_absent(disk);
        let absent = disks_of(actions).find(absent);
        absent.map_or(Ok(()), |disk| Err(self.not_there(disk)))
    }

    /// Checks that no storage hangs, which would be waited for, and with it the commands about all these disks.
    fn check_not_hung(&self, actions: &[BitmapAction]) -> Result<(), ServerError> {
        let (nodes, _) = self.nodes_of(actions);
        let served = self.served_by(&nodes);
        match served.iter().find(|device| device.hangs_for().is_some()) {
            Some(device) => Err(ServerError::Silent(
                device.disk.name.clone(),
                "its storage hangs; nothing was changed; try again when it answers".into(),
            )),
            None => Ok(()),
        }
    }

    /// Checks that no open backup is about any of the bitmaps.
    fn check_not_in_backups(&self, actions: &[BitmapAction]) -> Result<(), ServerError> {
        for action in actions {
            if let BitmapAction::Change(target, _) = action
                && let Some(node) = self.node_of(&target.disk)
            {
                self.backups.check_bitmap(&node, &target.name)?;
            }
        }
        Ok(())
    }

    /// The served disks that must be durable: bitmaps that survive a power cut in the state directory change, and are not only
    /// removed.
    fn noted_disks(&self, actions: &[BitmapAction]) -> Vec<Arc<ServedDisk>> {
        let is_removal =
            |action: &BitmapAction| matches!(action, BitmapAction::Change(_, BitmapChange::Remove));
        if actions.iter().all(is_removal) {
            return Vec::new();
        }
        let (mut nodes, _) = self.nodes_of(actions);
        nodes.retain(|node| node.has_notes());
        self.served_by(&nodes)
    }

    fn served_by(&self, nodes: &[Arc<Node>]) -> Vec<Arc<ServedDisk>> {
        let state = self.state();
        let exports = state.exports.values();
        let exports = exports.filter(|e| nodes.iter().any(|node| Arc::ptr_eq(&e.node, node)));
        exports.map(|export| export.device.clone()).collect()
    }

    /// The same without making disks durable, and whatever backups are open.
    pub(super) fn change_bitmaps_at_once(
        &self,
        actions: &[BitmapAction],
    ) -> Result<(), ServerError> {
        let (nodes, places) = self.nodes_of(actions);
        Ok(self.change_held(&nodes, places, actions)?)
    }

    /// The bitmaps that are not stored in images, each with the name of its disk.
    pub fn temporary_bitmaps(&self) -> Vec<(String, Arc<DirtyBitmap>)> {
        let nodes: Vec<_> = {
            let state = self.state();
            let entries = state.nodes.values().filter(|entry| entry.child.is_none());
            entries.map(|entry| entry.node.clone()).collect()
        };
        let of_node = |node: &Arc<Node>| {
            let bitmaps = node.bitmaps().into_iter();
            let temporary = bitmaps.filter(|b| !b.is_persistent() && !b.is_inconsistent());
            let name = node.name().to_owned();
            temporary.map(move |bitmap| (name.clone(), bitmap))
        };
        nodes.iter().flat_map(of_node).collect()
    }

    /// The names of the temporary bitmaps of a disk.
    pub fn temporary_bitmaps_of(&self, disk: &str) -> Vec<String> {
        let all = self.temporary_bitmaps().into_iter();
        let its = all.filter(|(of, _)| of == disk);
        its.map(|(_, bitmap)| bitmap.name().to_owned()).collect()
    }

    /// The nodes that actions are about, each once, and the place among them of each name.
    fn nodes_of(&self, actions: &[BitmapAction]) -> (Vec<Arc<Node>>, BTreeMap<String, usize>) {
        let names: BTreeSet<_> = disks_of(actions).collect();
        let (mut nodes, mut places) = (Vec::<Arc<Node>>::new(), BTreeMap::new());
        for name in names {
            let Some(node) = self.node_of(name) else {
                continue;
            };
            let Ok(node) = self.state().top(&node).map(|entry| entry.node.clone()) else {
                continue;
            };
            let place = nodes.iter().position(|other| Arc::ptr_eq(other, &node));
            places.insert(name.to_owned(), place.unwrap_or(nodes.len()));
            if place.is_none() {
                nodes.push(node);
            }
        }
        (nodes, places)
    }

    fn change_held(
        &self,
        nodes: &[Arc<Node>],
        places: BTreeMap<String, usize>,
        actions: &[BitmapAction],
    ) -> Result<(), BitmapError> {
        let served = self.served_by(nodes);
        // None of them is released meanwhile: that would store its bitmaps.
        let kept: Vec<_> = served.iter().map(|device| device.node()).collect();
        let users = nodes.iter().map(|node| BitmapUsers {
            exported: self.exported_bitmaps(node),
            reserved: self.backups.reserved_bitmap(node),
            served: (served
                .iter()
                .zip(&kept)
                .find(|(_, on)| Arc::ptr_eq(on, node)))
            .map(|(device, _)| device.disk.size()),
        });
        let mut plan = Plan::new(nodes, users.collect(), places);
        plan.begin(actions)?;
        let disks: Vec<_> = (served.iter())
            .map(|device| (device.disk.clone(), device.io_threads()))
            .collect();
        let change = || {
            for action in actions {
                match action {
                    BitmapAction::Abort => return Err(BitmapError::Abort),
                    BitmapAction::Change(target, change) => plan.apply(target, change)?,
                }
            }
            plan.carry_out()
        };
        datapath::hold(&disks, change).map_err(BitmapError::Hold)?
    }
}

/// The disks that actions are about.
pub fn disks_of(actions: &[BitmapAction]) -> impl Iterator<Item = &str> {
    actions.iter().flat_map(|action| {
        let (target, sources) = match action {
            BitmapAction::Abort => (None, &[][..]),
            BitmapAction::Change(target, BitmapChange::Merge(sources)) => {
                (Some(target), &sources[..])
            }
            BitmapAction::Change(target, _) => (Some(target), &[][..]),
        };
        let all = target.into_iter().chain(sources);
        all.map(|bitmap| bitmap.disk.as_str())
    })
}

/// Checks that the names of new bitmaps are not those that backups use.
fn check_names(actions: &[BitmapAction]) -> Result<(), BitmapError> {
    for action in actions {
        if let BitmapAction::Change(BitmapName { name, .. }, BitmapChange::Add { .. }) = action
            && checkpoint::bitmap_of(name).is_some()
        {
            return Err(BitmapError::CheckpointName(name.clone()));
        }
    }
    Ok(())
}

/// Makes the completed writes of a disk durable.
///
/// # Errors
/// They are not, or its storage does not answer.
pub(super) fn sync(device: &Arc<ServedDisk>) -> Result<(), ServerError> {
    let (name, device) = (format!("disk {}", device.disk.name), device.clone());
    let work = move || Ok(device.disk.sync());
    let synced = match with_deadline(&name, Instant::now() + SHUTDOWN_TIMEOUT, work) {
        Err(ServerError::NotResponding(_)) => Err(io::ErrorKind::TimedOut.into()),
        synced => synced?,
    };
    synced.map_err(|e| ServerError::Sync(name, e))
}
