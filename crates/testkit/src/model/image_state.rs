//! What is known of an image and of its copies.

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
