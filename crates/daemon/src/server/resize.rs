//! Grows disks while their guests run, and detects files that have shrunk.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use tracing::{info, warn};

use super::deadline::{ANSWER_TIMEOUT, with_deadline};
use super::{Claim, Server, ServerError, Waiting};
use crate::node::Node;

impl Server {
    /// Grows a disk to `size`, or to its file if no size is given, and notifies its guest. Returns its size in bytes.
    ///
    /// # Errors
    /// It has not grown; or its storage has not answered in time, and it grows when it does.
    pub fn resize(
        &self,
        claim: &Claim<'_>,
        name: &str,
        size: Option<u64>,
    ) -> Result<u64, ServerError> {
        claim.covers(name);
        let node = self.state().top(name)?.node.clone();
        let (disk, its) = (name.to_owned(), node.clone());
        let grow = move |server: &Self| {
            // As long as it may change the file, no other process takes that over.
            let _inhibitor = server.handover.wait_and_inhibit();
            if _inhibitor.is_err() {
                return Err(ServerError::ChangedMeanwhile(disk));
            }
            server.check_not_shrunk(&its)?;
            if let Some(size) = size {
                let grown = its.grow_file(size);
                grown.map_err(|e| ServerError::Resize(disk, e))?;
            }
            Ok(its.file_size())
        };
        let (disk, its) = (name.to_owned(), Arc::downgrade(&node));
        let late = move |server: &Self, size| {
            let Ok(_inhibitor) = server.handover.wait_and_inhibit() else {
                return;
            };
            // The command has ended, and others may have come.
            let claim = server.claim("resize", || vec![&disk]);
            let grown = claim.and_then(|_claim| match its.upgrade() {
                Some(node) => server.grown(&node, size),
                None => Err(ServerError::ChangedMeanwhile(disk.clone())),
            });
            match grown {
                Ok(size) => {
                    let size = block::format_size(size);
                    info!("disk {disk}: its storage answers again, and it has {size} now");
                }
                Err(e) => warn!("disk {disk}: its storage answers again; {e}"),
            }
        };
        let file = self.spec_of(name).map(|disk| disk.file);
        let grown = self.in_time(name, file.as_ref(), grow, late);
        let size = grown.map_err(|e| match e {
            ServerError::NotResponding(name) => {
                let file = file.map_or_else(String::new, |file| format!("{file}: "));
                ServerError::Silent(name, format!(
                    "{file}its storage does not answer; the disk is resized when it does, and the log says so. Nothing is lost. \
                     Until then, it can be neither resized again nor handed over to a new process"
                ))
            }
            e => e,
        })?;
        self.grown(&node, size)
    }

    /// Lets a disk grow to the size of its file. Returns its size.
    fn grown(&self, node: &Arc<Node>, size: io::Result<u64>) -> Result<u64, ServerError> {
        match self.let_grow(node, &size)? {
            Some(size) => Ok(size),
            None => size.map_err(|e| ServerError::Resize(node.name().into(), e.to_string())),
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

    /// Lets the disk on a node grow to the size of its file, if that is known. Returns the disk's size, if it is served. The
    /// caller has claimed it.
    fn let_grow(
        &self,
        node: &Arc<Node>,
        size: &io::Result<u64>,
    ) -> Result<Option<u64>, ServerError> {
        let state = self.state();
        let export = state.exports.values().find(|e| Arc::ptr_eq(&e.node, node));
        match export {
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
        // Files must be free for the commands that are waited for.
        let nodes: Vec<_> = {
            let state = self.state();
            let exports = state.exports.values();
            exports
                .inspect(|e| e.retry())
                .map(|e| Arc::downgrade(&e.node))
                .collect()
        };
        // Each in a thread of its own, which stays if its storage does not answer.
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        for node in nodes {
            let Some(its) = node.upgrade() else { continue };
            let name = its.name().to_owned();
            let Ok(size) = with_deadline(&name, deadline, move || Ok(its.file_size())) else {
                warn!("disk {name}: its storage does not answer, so its size is unknown");
                continue;
            };
            let waiting = Waiting::until(deadline);
            let claim = self.claim_as(&waiting, "growth", || vec![&name]);
            // A disk that another command has moved or started again has the size of its file already.
            if let (Ok(_claim), Some(node)) = (claim, node.upgrade()) {
                drop(self.let_grow(&node, &size));
            }
        }
    }
}
