//! A disk as a front-end's device: the border between a session and the I/O threads.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use datapath::{Disk, QueueId};
use guest::blk::{self, CONFIG_BYTES, ConfigSpace};
use guest::{Device, FrontendChannel, NewQueue, RingBase, RingError, Stopped};
use tracing::{error, warn};

use crate::iothreads::NamedThread;

/// A served disk: what front-ends see of it, and where its queues go.
pub struct ServedDisk {
    pub disk: Arc<Disk>,
    pub queue_size: u16,
    /// The thread of each queue.
    pub threads: Vec<NamedThread>,
    /// The guest's choice, at first the cache mode's: it outlives resets and connections, because front-ends read the
    /// configuration space only once.
    write_cache: AtomicBool,
    /// The front-end that is connected, if it wants to be told of changes.
    frontend: Mutex<Option<FrontendChannel>>,
}

impl ServedDisk {
    /// A disk with one queue for each of `threads`.
    pub fn new(disk: Arc<Disk>, queue_size: u16, threads: Vec<NamedThread>) -> Self {
        let write_cache = AtomicBool::new(disk.write_cache());
        Self {
            disk,
            queue_size,
            threads,
            write_cache,
            frontend: Mutex::default(),
        }
    }

    pub fn queues(&self) -> u16 {
        self.threads.len() as u16
    }

    /// Most data segments in a request: the ring less a header and a status.
    fn seg_max(&self) -> u16 {
        self.queue_size - 2
    }

    /// Tells the guest to look at the size of its disk again, if its front-end listens.
    pub fn tell_size(&self) {
        let frontend = self.frontend.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(Err(e)) = frontend.as_ref().map(FrontendChannel::config_changed) {
            warn!(
                "disk {}: the front-end could not be told of its new size: {e}",
                self.disk.name
            );
        }
    }
}

/// What a session drives.
pub struct BlockDevice<'a> {
    served: &'a ServedDisk,
    running: Vec<Option<Running>>,
    /// Whether the driver can flush, once it has said so.
    flushes: Option<bool>,
}

/// A ring that is being served.
#[derive(Clone, Copy)]
struct Running {
    queue: QueueId,
    /// What its thread wants back when the queue leaves it.
    arrived: Option<u32>,
}

impl<'a> BlockDevice<'a> {
    pub fn new(served: &'a ServedDisk) -> Self {
        let running = vec![None; served.threads.len()];
        let mut device = Self {
            served,
            running,
            flushes: None,
        };
        device.set_features(0);
        device
    }

    /// The cache is on if the guest wants it, unless the driver has no way to flush
    /// (virtio 1.3 §5.2.5).
    fn apply_write_cache(&self) {
        let disk = &self.served.disk;
        let on = self.served.write_cache.load(Ordering::Relaxed) && self.flushes != Some(false);
        let was_on = disk.write_cache();
        disk.set_write_cache(on);
        if was_on
            && !on
            && !disk.facts.read_only
            && let Err(e) = disk.sync()
        {
            error!(
                "disk {}: writes before the cache was switched off are not durable: {e}",
                disk.name
            );
        }
    }

    fn thread(&self, ring: u16) -> &'a NamedThread {
        &self.served.threads[usize::from(ring)]
    }
}

impl Device for BlockDevice<'_> {
    fn features(&self) -> u64 {
        blk::features(&self.served.disk.facts)
    }

    fn queues(&self) -> u16 {
        self.served.queues()
    }

    fn seg_max(&self) -> u16 {
        self.served.seg_max()
    }

    fn config(&self) -> [u8; CONFIG_BYTES] {
        let disk = &self.served.disk;
        ConfigSpace {
            size: disk.size(),
            write_cache: disk.write_cache(),
            queues: self.served.queues(),
            seg_max: self.served.seg_max(),
        }
        .bytes(&disk.facts)
    }

    fn set_write_cache(&mut self, on: bool) {
        self.served.write_cache.store(on, Ordering::Relaxed);
        self.apply_write_cache();
    }

    fn set_features(&mut self, accepted: u64) {
        // Zero is a reset.
        self.flushes = (accepted != 0).then_some(accepted & blk::F_FLUSH != 0);
        self.apply_write_cache();
    }

    fn set_frontend(&mut self, channel: Option<FrontendChannel>) {
        *self
            .served
            .frontend
            .lock()
            .unwrap_or_else(|e| e.into_inner()) = channel;
    }

    fn ring_failed(&self, ring: u16, error: &RingError) {
        self.served.disk.ring_failed(ring, error);
    }

    fn start(&mut self, ring: u16, queue: NewQueue) -> io::Result<()> {
        let thread = self.thread(ring);
        let arrived = thread.arrive(&queue.virtqueue);
        let queue = thread.thread.start(self.served.disk.clone(), queue);
        let queue = queue.inspect_err(|_| thread.leave(arrived))?;
        self.running[usize::from(ring)] = Some(Running { queue, arrived });
        Ok(())
    }

    fn stop(&mut self, ring: u16) -> Stopped {
        let nowhere = Stopped {
            base: RingBase(0),
            unfinished: false,
        };
        let Some(running) = self.running[usize::from(ring)].take() else {
            return nowhere;
        };
        let thread = self.thread(ring);
        let stopped = thread.thread.stop(running.queue);
        thread.leave(running.arrived);
        stopped.unwrap_or_else(|e| {
            error!(
                "disk {}: queue {ring} cannot be stopped: {e}",
                self.served.disk.name
            );
            nowhere
        })
    }

    fn rest(&mut self, _moving: bool) -> io::Result<()> {
        Ok(())
    }

    fn set_signals(&mut self, ring: u16, call: Option<Arc<OwnedFd>>, error: Option<Arc<OwnedFd>>) {
        if let Some(running) = self.running[usize::from(ring)] {
            let thread = &self.thread(ring).thread;
            thread.set_signals(running.queue, call, error);
        }
    }
}
