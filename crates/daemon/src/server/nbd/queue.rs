//! A client's queue on a thread of its disk.

use std::io;
use std::sync::Arc;

use block::DirtyBitmap;
use datapath::QueueId;
use guest::NewQueue;
use tracing::error;

use super::export::NbdExport;
use crate::node::RELEASED;
use crate::server::clients::Client;
use crate::server::device::ServedDisk;
use crate::server::iothreads::NamedThread;

/// A client's queue in service. It stops when this is dropped.
pub struct ClientQueue {
    device: Arc<ServedDisk>,
    client: Arc<Client>,
    thread: NamedThread,
    queue: QueueId,
}

impl ClientQueue {
    /// Has one of the disk's threads serve a queue. Also returns the bitmaps of the export: clients see those that the disk
    /// has now.
    ///
    /// # Errors
    /// The disk is released, or the thread cannot serve it.
    pub fn start(
        client: Client,
        queue: NewQueue,
        export: &NbdExport,
    ) -> io::Result<(Self, Vec<Option<Arc<DirtyBitmap>>>)> {
        let (device, disk) = (&export.device, export.disk());
        // Held, so that the disk is not released meanwhile.
        let node = device.node();
        if !node.is_acquired() {
            return Err(io::Error::other(RELEASED));
        }
        let thread = device.threads[device.clients.number() % device.threads.len()].clone();
        let queue = (thread.thread).start_client(disk, queue, export.limits.clone())?;
        let client = Arc::new(client);
        device.clients.add(client.clone());
        let bitmaps = export.bitmaps_of(&node);
        drop(node);
        let started = Self {
            device: device.clone(),
            client,
            thread,
            queue,
        };
        Ok((started, bitmaps))
    }
}

impl Drop for ClientQueue {
    fn drop(&mut self) {
        if let Err(e) = self.thread.thread.begin_stop(self.queue).wait() {
            let disk = &self.device.disk.name;
            error!("disk {disk}: the queue of an NBD client cannot be stopped: {e}");
        }
        self.device.clients.remove(&self.client);
    }
}
