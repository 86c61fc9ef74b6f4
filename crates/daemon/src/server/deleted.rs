//! Notices files that were deleted or replaced while they are served: their data is gone when ringdisk closes them.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use tracing::{error, warn};

use super::{Server, ServerError};

/// How often the files are looked at.
const INTERVAL: Duration = Duration::from_secs(5);

impl Server {
    /// Looks at the files of disks from now on, for as long as the server exists. Storage that does not answer holds this up,
    /// and nothing else.
    pub fn watch_files(self: &Arc<Self>) {
        let server = Arc::downgrade(self);
        let watch = move || {
            while let Some(server) = server.upgrade() {
                let nodes = server.weak_nodes();
                drop(server);
                for node in nodes.iter().filter_map(Weak::upgrade) {
                    let was_deleted = node.is_deleted();
                    node.look_for_name();
                    if node.is_deleted() && !was_deleted {
                        error!(
                            "disk {}: its file {} has been deleted or replaced: its data exists only as long as this process \
                             serves it. 'ringdisk backup copy' copies it",
                            node.name(),
                            node.filename
                        );
                    }
                }
                drop(nodes);
                thread::sleep(INTERVAL);
            }
        };
        let thread = thread::Builder::new().name("files".into());
        if let Err(e) = thread.spawn(watch) {
            warn!("files that are deleted will not be noticed: no thread available: {e}");
        }
    }

    /// Checks that the data of a disk does not end with it.
    pub(super) fn check_not_deleted(&self, name: &str) -> Result<(), ServerError> {
        let state = self.state();
        match state.nodes.get(name).map(|entry| &entry.node) {
            Some(node) if node.is_deleted() => {
                let file = node.filename.clone();
                Err(ServerError::FileDeleted(name.into(), file))
            }
            _ => Ok(()),
        }
    }
}
