//! What is known of an image, of its copies and of its backups.

use std::path::PathBuf;

use super::oracle::Oracle;

/// What is known of an image that is not served.
#[derive(Clone)]
pub struct ImageState {
    pub oracle: Oracle,
    /// The image's snapshots, by name.
    pub snapshots: Vec<(String, Oracle)>,
    /// ringdisk was killed, and has not opened the image since.
    pub killed: bool,
    /// The image may have leaked clusters.
    pub leaks: bool,
    /// ringdisk ended in order, but with a cache mode that makes nothing durable.
    pub volatile: bool,
    /// Tables that the guest had not flushed were lost: a data file may contain data that no table refers to.
    pub tables_lost: bool,
}

/// A copy of the image, with what was known of it at that moment.
pub struct Backup {
    pub image: PathBuf,
    pub data: Option<PathBuf>,
    pub state: ImageState,
}

/// What a client that makes backups knows.
#[derive(Default)]
pub struct BackupClient {
    /// The checkpoint of its last backup that has succeeded.
    pub checkpoint: Option<String>,
    /// An older state of the disk may have been put back, or a backup may have succeeded without an answer: only the checkpoint
    /// shows what a bitmap continues.
    pub needs_checkpoint: bool,
    /// What another program wrote, ringdisk cannot notice, as its documents say.
    pub needs_full: bool,
}

impl BackupClient {
    /// Whether a bitmap continues the client's last backup if it has the name.
    pub fn trusts_the_name(&self) -> bool {
        self.checkpoint.is_some() && !self.needs_checkpoint && !self.needs_full
    }
}
