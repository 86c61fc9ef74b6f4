//! Disks that become longer while their guests run, and files that have become shorter.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use tracing::warn;

use super::shutdown::{ANSWER_TIMEOUT, with_deadline};
use super::{Server, ServerError};
use crate::node::Node;

impl Server {
    /// Makes a disk longer, or finds out that it has become longer, and tells its guest. Without a size it
    /// becomes as long as its file. Returns its size in bytes.
    pub fn resize(&self, name: &str, size: Option<u64>) -> Result<u64, ServerError> {
        let node = {
            let state = self.state();
            let node = &state.top(name)?.node;
            if state.is_moving(node.name()) {
                return Err(ServerError::Moving(name.into()));
            }
            node.clone()
        };
        self.check_not_shrunk(&node)?;
        if let Some(size) = size {
            // Its storage may not answer, which is no reason for others to wait.
            node.grow_file(size)
                .map_err(|e| ServerError::Resize(name.into(), e))?;
        }
        let size = node.file_size();
        match self.let_grow(&node, &size)? {
            Some(size) => Ok(size),
            None => size.map_err(|e| ServerError::Resize(name.into(), e.to_string())),
        }
    }

    /// Whether the file of a disk that is served is as long as the disk: nothing that is made longer brings back what was
    /// behind its end.
    fn check_not_shrunk(&self, node: &Arc<Node>) -> Result<(), ServerError> {
        let Ok(size) = node.file_size() else {
            return Ok(());
        };
        let state = self.state();
        let export = state.exports.values().find(|e| Arc::ptr_eq(&e.node, node));
        match export.map(|export| export.disk.size()) {
            Some(disk) if size < disk => {
                let [size, disk] = [size, disk].map(block::format_size);
                Err(ServerError::Resize(
                    node.name().into(),
                    format!(
                        "its file {} has only {size} by now, and the disk {disk}: what was behind is lost, and requests \
                         there fail; 'ringdisk replace' puts the disk on a whole copy, or detach it",
                        node.filename
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Lets the disk on a node grow to what its file is now, as far as that is known. Returns its size, if it is served.
    fn let_grow(
        &self,
        node: &Arc<Node>,
        size: &io::Result<u64>,
    ) -> Result<Option<u64>, ServerError> {
        let state = self.state();
        let export = state.exports.values().find(|e| Arc::ptr_eq(&e.node, node));
        match export {
            // The other file may not be as long.
            Some(_) if state.is_moving(node.name()) => Err(ServerError::Moving(node.name().into())),
            Some(export) => {
                Node::let_grow(&export.disk, size);
                // Also if it grew earlier: the front-end may have been away then.
                export.device.tell_size();
                Ok(Some(export.disk.size()))
            }
            None if !Arc::ptr_eq(&state.top(node.name())?.node, node) => {
                Err(ServerError::Overrides(node.name().into()))
            }
            None => Ok(None),
        }
    }

    /// Looks at all disks for growth.
    pub fn look_for_growth(&self) {
        let nodes: Vec<_> = {
            let state = self.state();
            state.exports.values().map(|e| e.node.clone()).collect()
        };
        // One after the other, and each in a thread of its own, in which it stays if its storage does not answer.
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        for node in nodes {
            let its = node.clone();
            match with_deadline(node.name(), deadline, move || Ok(its.file_size())) {
                // What is being put on another file is as long as that in a moment.
                Ok(size) => drop(self.let_grow(&node, &size)),
                Err(_) => warn!(
                    "disk {}: its storage does not answer; whether it has grown is not known",
                    node.name()
                ),
            }
        }
    }
}
