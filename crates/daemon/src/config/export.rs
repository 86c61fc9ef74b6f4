//! How a disk is served, without where its data is.

use std::path::PathBuf;

use block::CacheMode;

use super::sockets;
use super::spec::{DiskSpec, FileSpec, SocketAccess};

/// How a disk is served.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportSpec {
    pub id: String,
    pub socket: PathBuf,
    pub socket_access: SocketAccess,
    /// None for the number that the server decides once for the export.
    pub queues: Option<u16>,
    pub queue_size: u16,
    /// Ids or numbers of I/O threads; none for the next ones of the pool.
    pub iothreads: Vec<String>,
    pub read_only: bool,
    pub cache: CacheMode,
    /// In bytes; none for that of the disk.
    pub logical_block: Option<u32>,
}

impl From<&DiskSpec> for ExportSpec {
    fn from(disk: &DiskSpec) -> Self {
        Self {
            id: disk.name.clone(),
            socket: sockets::path(disk),
            socket_access: disk.socket_access,
            queues: disk.queues,
            queue_size: disk.queue_size,
            iothreads: disk.iothreads.clone(),
            read_only: disk.read_only,
            cache: disk.cache,
            logical_block: None,
        }
    }
}

impl ExportSpec {
    /// A disk without data that would be served like this, except for its logical block size.
    pub fn on_null_disk(&self) -> DiskSpec {
        DiskSpec {
            socket: Some(self.socket.clone()),
            socket_access: self.socket_access,
            queues: self.queues,
            queue_size: self.queue_size,
            iothreads: self.iothreads.clone(),
            read_only: self.read_only,
            cache: self.cache,
            ..DiskSpec::new(self.id.clone(), FileSpec::Null(512))
        }
    }
}
