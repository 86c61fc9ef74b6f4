//! Grows disks while their guests run, and detects files that have shrunk.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use tracing::{info, warn};

use super::deadline::{ANSWER_TIMEOUT, patiently, with_deadline};
use super::{Server, ServerError};
use crate::node::Node;

impl Server {
    /// Grows a disk to `size`, or to its file if no size is given, and notifies its guest. Returns its size in bytes.
    ///
    /// # Errors
    /// It has not grown; or its storage has not answered in time, and it grows when it does.
    pub fn resize(&self, name: &str, size: Option<u64>) -> Result<u64, ServerError> {
        let disk = name.to_owned();
        let resize = move |server: &Self| {
            // As long as it may change the file, no other process takes that over.
            let _inhibitor = server.handover.wait_and_inhibit();
            if _inhibitor.is_err() {
                return Err(ServerError::ChangedMeanwhile(disk));
            }
            server.resize_now(&disk, size)
        };
        let disk = name.to_owned();
        let late = move |_: &Self, size| {
            let size = block::format_size(size);
            info!("disk {disk}: its storage answers again, and it has {size} now");
        };
        let file = self.spec_of(name).map(|disk| disk.file);
        self.in_time(name, file.as_ref(), resize, late).map_err(|e| match e {
            ServerError::NotResponding(name) => {
                let file = self.spec_of(&name);
                let file = file.map_or_else(String::new, |disk| format!("{}: ", disk.file));
                ServerError::Silent(name, format!(
                    "{file}its storage does not answer; the disk is resized when it does, and the log says so. Nothing is lost. \
                     Until then, it can be neither resized again nor handed over to a new process"
                ))
            }
            e => e,
        })
    }

    fn resize_now(&self, name: &str, size: Option<u64>) -> Result<u64, ServerError> {
        let node = patiently(|| {
            let state = self.state();
            let node = &state.top(name)?.node;
            if state.is_moving(node.name()) {
                return Err(ServerError::Moving(name.into()));
            }
            Ok(node.clone())
        })?;
        self.check_not_shrunk(&node)?;
        if let Some(size) = size {
            node.grow_file(size)
                .map_err(|e| ServerError::Resize(name.into(), e))?;
        }
        let size = node.file_size();
        let grown = patiently(|| self.let_grow(&node, &size)).map_err(|e| match (e, &size) {
            (ServerError::Moving(name), Ok(size)) => {
                let size = block::format_size(*size);
                let why = format!(
                    "its file has {size} now, but another command changes the disk; 'ringdisk resize {name}' lets it grow"
                );
                ServerError::Resize(name, why)
            }
            (e, _) => e,
        })?;
        match grown {
            Some(size) => Ok(size),
            None => size.map_err(|e| ServerError::Resize(name.into(), e.to_string())),
        }
    }

    /// Checks that the file of a served disk has not become shorter than the disk: growing the file again would not bring
    /// back the data.
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
                        "its file {} now has only {size}, and the disk {disk}: the data beyond is lost, and requests there \
                         fail; move the disk to a complete copy with 'ringdisk replace', or detach it",
                        node.filename
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Lets the disk on a node grow to the size of its file, if that is known. Returns the disk's size, if it is served.
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
                // Also if it grew earlier: no front-end may have been connected then.
                export.device.tell_size();
                Ok(Some(export.disk.size()))
            }
            None if !Arc::ptr_eq(&state.top(node.name())?.node, node) => {
                Err(ServerError::ChangedMeanwhile(node.name().into()))
            }
            None => Ok(None),
        }
    }

    /// Checks all disks for growth. Requests that wait for space are tried again.
    pub fn look_for_growth(&self) {
        let nodes: Vec<_> = {
            let state = self.state();
            let exports = state.exports.values();
            exports
                .inspect(|e| e.retry())
                .map(|e| e.node.clone())
                .collect()
        };
        // Each in a thread of its own, which stays if its storage does not answer.
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        for node in nodes {
            let its = node.clone();
            match with_deadline(node.name(), deadline, move || Ok(its.file_size())) {
                // A disk that is being moved gets the size of its new file in a moment.
                Ok(size) => drop(self.let_grow(&node, &size)),
                Err(_) => warn!(
                    "disk {}: its storage does not answer, so its size is unknown",
                    node.name()
                ),
            }
        }
    }
}
