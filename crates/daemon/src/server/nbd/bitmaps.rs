//! The dirty bitmaps of exports. As in QEMU, nobody changes or removes one while an export has it.

use std::collections::BTreeMap;
use std::sync::Arc;

use block::DirtyBitmap;
use control::BlockDirtyBitmap;

use super::NbdServer;
use super::export::{NbdExport, locked};
use crate::config::nbd::NbdExportSpec;
use crate::node::Node;
use crate::server::bitmap_plan::ExportedBitmapError;
use crate::server::device::ServedDisk;
use crate::server::error::NbdError;
use crate::server::{Server, ServerError};

impl NbdExport {
    /// Its bitmaps in the order of their names; `None` if the disk does not have one any more, or it is of no use.
    pub fn bitmaps_of(&self, node: &Node) -> Vec<Option<Arc<DirtyBitmap>>> {
        if let Some(moment) = &self.moment {
            return moment.bitmaps.iter().cloned().map(Some).collect();
        }
        let all = node.bitmaps();
        let find = |name: &String| {
            let mut usable = all.iter().filter(|bitmap| !bitmap.is_inconsistent());
            usable.find(|bitmap| bitmap.name() == name).cloned()
        };
        self.bitmaps.iter().map(find).collect()
    }
}

impl NbdServer {
    /// The bitmaps of a disk that clients may query, each with the id of an export that has it.
    pub fn bitmaps_of(&self, device: &Arc<ServedDisk>) -> BTreeMap<String, String> {
        let exports = locked(&self.exports);
        let exports = exports.by_id.values();
        let of_disk =
            exports.filter(|export| Arc::ptr_eq(&export.device, device) && export.moment.is_none());
        of_disk
            .flat_map(|export| {
                let names = export.bitmaps.iter().cloned();
                names.map(|name| (name, export.id.clone()))
            })
            .collect()
    }
}

impl Server {
    /// The bitmaps of a node that NBD clients may query, each with the id of an export that has it.
    pub fn exported_bitmaps(&self, node: &Arc<Node>) -> BTreeMap<String, String> {
        let device = {
            let state = self.state();
            let mut disks = state.exports.values();
            let disk = disks.find(|export| Arc::ptr_eq(&export.node, node));
            disk.map(|disk| disk.device.clone())
        };
        device.map_or_else(BTreeMap::new, |device| self.nbd.bitmaps_of(&device))
    }

    /// Checks that a bitmap that a command names with its node is one of the disk that is to be exported.
    ///
    /// # Errors
    /// It belongs to another disk, or there is no such node.
    pub fn check_bitmap_node(
        &self,
        disk: &str,
        bitmap: &BlockDirtyBitmap,
    ) -> Result<(), ServerError> {
        let state = self.state();
        let is_same = match self.backups.find_access(disk) {
            // It has the bitmap of the backup, whatever the disk's is now.
            Some((device, _)) => {
                bitmap.node == disk || Arc::ptr_eq(&state.device_of(&bitmap.node)?, &device)
            }
            None => Arc::ptr_eq(&state.top(disk)?.node, &state.top(&bitmap.node)?.node),
        };
        if !is_same {
            let (name, node) = (bitmap.name.clone(), bitmap.node.clone());
            let other = ExportedBitmapError::OtherNode(disk.into(), name, node);
            return Err(NbdError::from(other).into());
        }
        Ok(())
    }

    /// Checks that the bitmaps of a new export exist, can be used, and do not change while clients read them. The caller
    /// holds the exports.
    pub(super) fn check_bitmaps(
        &self,
        spec: &NbdExportSpec,
        node: &Arc<Node>,
    ) -> Result<(), ServerError> {
        if spec.bitmaps.is_empty() {
            return Ok(());
        }
        let (all, unusable) = (node.bitmaps(), node.unusable_bitmaps());
        for (i, name) in spec.bitmaps.iter().enumerate() {
            let fail = |error: fn(String, String) -> ExportedBitmapError| {
                let error = error(node.name().into(), name.clone());
                Err(NbdError::from(error).into())
            };
            if spec.bitmaps[..i].contains(name) {
                let twice = ExportedBitmapError::Exported(spec.id.clone(), name.clone());
                return Err(NbdError::from(twice).into());
            }
            self.backups.check_bitmap(node.name(), name)?;
            match all.iter().find(|bitmap| bitmap.name() == name) {
                Some(bitmap) if bitmap.is_inconsistent() => {
                    return fail(ExportedBitmapError::Inconsistent);
                }
                Some(bitmap) if bitmap.is_recording() && !spec.writable => {
                    return fail(ExportedBitmapError::Enabled);
                }
                Some(_) => {}
                None if unusable.iter().any(|bitmap| bitmap.name == *name) => {
                    return fail(ExportedBitmapError::Inconsistent);
                }
                None => return fail(ExportedBitmapError::Missing),
            }
        }
        Ok(())
    }
}
