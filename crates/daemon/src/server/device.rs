//! A disk as the device of a vhost-user session: connects the session to the I/O threads.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use block::SECTOR_BYTES;
use datapath::{Disk, IoThread, QueueId, StoppingQueue};
use guest::blk::{self, CONFIG_BYTES, ConfigSpace};
use guest::{Device, Driver, FrontendChannel, NewQueue, Pause, RingBase, RingError, StoppedRing};
use tracing::{error, info, warn};

use crate::config::spec::Lock;
use crate::inherited::FileIdentity;
use crate::node::{Node, NodeError, RELEASED};
use crate::server::clients::{Clients, END_TIMEOUT};
use crate::server::error::ExportError;
use crate::server::iothreads::NamedThread;

/// A served disk: what front-ends see of it, and the threads of its queues.
pub struct ServedDisk {
    pub disk: Arc<Disk>,
    /// Its present node.
    node: Mutex<Arc<Node>>,
    pub queue_size: u16,
    /// The thread of each queue.
    pub threads: Vec<NamedThread>,
    /// Clients that use the disk in addition to its guest.
    pub clients: Clients,
    /// The guest's choice of the write cache, initially that of the cache mode. It outlives resets and connections,
    /// since front-ends read the configuration space only once.
    write_cache: AtomicBool,
    /// The write cache of the cache mode.
    write_cache_default: bool,
    /// Called when the guest has changed it.
    chosen: Box<dyn Fn() + Send + Sync>,
    /// The connected front-end, if it accepts notifications.
    frontend: Mutex<Option<FrontendChannel>>,
    /// The size that the front-end has read, in sectors; [`NEVER_READ`] if it has read none.
    capacity_read: AtomicU64,
    /// The VM that is connected has used the disk here, and has not moved since: no other host has it. One that has not used
    /// it may be about to arrive.
    is_ours: AtomicBool,
}

const NEVER_READ: u64 = u64::MAX;

/// How long a pause of a guest waits for what it makes durable. It goes on after that.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(5);

/// What an upgrade carries of a served disk, in addition to its configuration and the session of its front-end.
#[derive(Clone, Copy)]
pub struct CarriedDisk {
    /// The file of its disk, if it is in one that is locked.
    pub file: Option<FileIdentity>,
    /// Bytes of the disk, whose file may be shorter.
    pub size: u64,
    /// The guest's choice of a write cache, if it differs from the cache mode.
    pub write_cache: Option<bool>,
    /// The size that the front-end has read, in sectors.
    pub capacity_read: Option<u64>,
}

impl ServedDisk {
    /// How long its storage has not answered, or something has blocked one of its I/O threads, if that is longer than
    /// storage should take.
    pub fn hangs_for(&self) -> Option<Duration> {
        let threads = self.threads.iter().map(|t| t.thread.blocked_for());
        threads.max().flatten().max(self.disk.hangs_for())
    }

    /// A disk with one queue for each of `threads`, the write cache that its guest has chosen before, and the size that
    /// its front-end has read from the old process. `chosen` is called when the guest changes the write cache.
    pub fn new(
        disk: Arc<Disk>,
        node: Arc<Node>,
        queue_size: u16,
        threads: Vec<NamedThread>,
        choice: Option<bool>,
        capacity_read: Option<u64>,
        chosen: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        let write_cache_default = disk.write_cache();
        let write_cache = AtomicBool::new(choice.unwrap_or(write_cache_default));
        Self {
            write_cache_default,
            chosen,
            disk,
            node: Mutex::new(node),
            queue_size,
            threads,
            clients: Clients::default(),
            write_cache,
            frontend: Mutex::default(),
            capacity_read: AtomicU64::new(capacity_read.unwrap_or(NEVER_READ)),
            is_ours: AtomicBool::new(false),
        }
    }

    pub fn queues(&self) -> u16 {
        self.threads.len() as u16
    }

    /// What an upgrade carries. A new field has to be named here: either it is carried, or there is a reason why not.
    pub fn carried(&self, node: &Node) -> CarriedDisk {
        let Self {
            disk,
            // Whether it is released is handed over for all nodes.
            node: _,
            // Configured, or remembered with the changes made at run time.
            queue_size: _,
            threads: _,
            // They are disconnected, and connect again.
            clients: _,
            write_cache: _,
            // Follows from the configuration.
            write_cache_default: _,
            chosen: _,
            // Part of the session.
            frontend: _,
            capacity_read: _,
            // Only a VM that is stopped needs it, and only for a backup, which waits until it runs again.
            is_ours: _,
        } = self;
        CarriedDisk {
            file: node.identity(),
            size: disk.size(),
            write_cache: self.chosen_write_cache(),
            capacity_read: self.capacity_read(),
        }
    }

    /// The node, which is neither acquired, released nor replaced while the guard exists.
    pub fn node(&self) -> MutexGuard<'_, Arc<Node>> {
        self.node.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest's choice of the write cache, if it differs from the cache mode.
    pub fn chosen_write_cache(&self) -> Option<bool> {
        let choice = self.write_cache.load(Ordering::Relaxed);
        (choice != self.write_cache_default).then_some(choice)
    }

    /// The threads of its queues, each once.
    pub fn io_threads(&self) -> Vec<Arc<IoThread>> {
        let mut threads: Vec<_> = self.threads.iter().map(|t| &t.thread).collect();
        threads.sort_by_key(|thread| thread.thread_id());
        threads.dedup_by_key(|thread| thread.thread_id());
        threads.into_iter().cloned().collect()
    }

    /// Moves the disk to another node while its guest runs, which sees a pause. The new node may [build
    /// on](crate::node::Node::reopen_over) the old one. `record` persists the move.
    ///
    /// # Errors
    /// The disk stays on its node.
    pub fn replace(
        &self,
        new: &Arc<Node>,
        record: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), ExportError> {
        let fail = |e| ExportError::System(self.disk.name.clone(), "be put on another file", e);
        // Held until the move is done: the disk must not be released or acquired meanwhile.
        let mut node = self.node();
        if !node.is_acquired() {
            return Err(fail(io::Error::other(RELEASED)));
        }
        let other = |e| fail(io::Error::other(e));
        new.acquire(&node.written()).map_err(other)?;
        // Its user says that this is what the guest has written.
        new.forget_journal();
        let threads = self.io_threads();
        let its = new.replacement().map_err(other)?;
        let ready = |its| match new.reopen_over(&node) {
            Ok(false) => Ok(its),
            Ok(true) => new.replacement().map_err(io::Error::other),
            Err(e) => Err(io::Error::other(e)),
        };
        let replaced = self.disk.replace(&threads, its, ready, record);
        replaced.map_err(fail)?;
        *node = new.clone();
        drop(node);
        self.tell_size();
        Ok(())
    }

    /// Gives the disk's file another name. `record` persists it.
    ///
    /// # Errors
    /// `record` failed; the name stays.
    pub fn rename(
        &self,
        new: &Arc<Node>,
        record: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), ExportError> {
        let mut node = self.node();
        record().map_err(|e| {
            let what = "have the new name of its file kept";
            ExportError::System(self.disk.name.clone(), what, e)
        })?;
        *node = new.clone();
        Ok(())
    }

    /// Whether no other host has the disk, also if this one has released it: its VM is stopped then, and still connected.
    pub fn is_acquired_or_ours(&self) -> bool {
        self.node().is_acquired() || self.is_ours.load(Ordering::Relaxed)
    }

    /// Locks the disk and opens its files, if it was released (lock=running). [`release_if_unused`](Self::release_if_unused) is
    /// the way back.
    ///
    /// # Errors
    /// Another host has the lock, or the disk can no longer be served.
    pub fn acquire(&self) -> Result<bool, NodeError> {
        let node = self.node();
        let size = self.disk.size();
        let acquired = node.reacquire(&self.disk)?;
        drop(node);
        if self.disk.size() != size {
            self.tell_size();
        }
        Ok(acquired)
    }

    /// Releases a disk that stays acquired only while a VM runs on it, if none does and no backup is open.
    pub fn release_if_unused(&self) {
        let node = self.node();
        let has_backup = self.disk.fleece().is_some_and(|it| it.failure().is_none());
        let is_used = self.clients.have_guest() || has_backup;
        if node.spec.lock == Lock::Always || !node.is_acquired() || is_used {
            return;
        }
        let ended = (self.clients).end(|_| true, Instant::now() + END_TIMEOUT);
        let released = match ended && !self.disk.is_abandoned() {
            true => node.release(&self.disk).map_err(|e| e.to_string()),
            false => Err("its storage has not answered all requests".to_owned()),
        };
        match released {
            Ok(_) => info!(
                "disk {}: no VM runs on it; the lock of {} is given up",
                self.disk.name, node.filename
            ),
            // It stays acquired until a VM stops on it.
            Err(e) => error!("disk {}: not released: {e}", self.disk.name),
        }
    }

    /// Most data segments in a request: the ring less a header and a status.
    fn seg_max(&self) -> u16 {
        self.queue_size - 2
    }

    /// The size that the front-end has read, if any, in sectors.
    pub fn capacity_read(&self) -> Option<u64> {
        let read = self.capacity_read.load(Ordering::Relaxed);
        (read != NEVER_READ).then_some(read)
    }

    /// Notifies the guest of the disk's size if its front-end does not know it: QEMU reads it once, and drops
    /// notifications while the VM is paused or its driver is not running. A front-end may have read it from the old
    /// process.
    fn tell_size_if_not_read(&self) {
        if self.capacity_read() != Some(self.disk.size() / SECTOR_BYTES) {
            self.tell_size();
        }
    }

    /// Notifies the guest of the disk's size, if its front-end accepts notifications.
    pub fn tell_size(&self) {
        let frontend = self.frontend.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(Err(e)) = frontend.as_ref().map(FrontendChannel::config_changed) {
            warn!(
                "disk {}: the front-end could not be notified of the new size: {e}",
                self.disk.name
            );
        }
    }
}

/// The device of a session.
pub struct BlockDevice<'a> {
    served: &'a ServedDisk,
    may_stop: &'a dyn Fn() -> bool,
    running: Vec<Option<Running>>,
    /// Whether the driver can flush, once it is known.
    flushes: Option<bool>,
    /// How long the requests in flight took to finish when rings were stopped last.
    draining: Duration,
}

/// A ring that is being served.
struct Running {
    queue: QueueId,
    /// Set when the ring has been asked to stop.
    stopping: Option<StoppingQueue>,
    /// What its thread needs when the queue is removed.
    arrived: Option<u32>,
}

impl<'a> BlockDevice<'a> {
    /// Once the session is to stop, `may_stop` says whether it does, or goes on.
    pub fn new(served: &'a ServedDisk, may_stop: &'a dyn Fn() -> bool) -> Self {
        let running = served.threads.iter().map(|_| None).collect();
        let mut device = Self {
            served,
            may_stop,
            running,
            flushes: None,
            draining: Duration::ZERO,
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

    /// Acquires the disk if it is released, before the first ring is served.
    fn acquire(&mut self) -> io::Result<()> {
        let began = Instant::now();
        if self.served.acquire().map_err(io::Error::other)? {
            self.draining = Duration::ZERO;
            info!(
                "disk {}: a VM starts on it; locked and reopened {} in {:.1} ms",
                self.served.disk.name,
                self.served.node().filename,
                began.elapsed().as_secs_f64() * 1000.0
            );
        }
        Ok(())
    }

    fn start_queue(&mut self, ring: u16, queue: NewQueue, driver: Driver) -> io::Result<()> {
        self.acquire()?;
        let node = self.served.node().clone();
        if driver != Driver::Starts {
            let was_here = driver != Driver::GoesOn;
            node.check_journal(was_here).map_err(|e| {
                if driver == Driver::GoesOnHere {
                    node.note_lacking();
                }
                io::Error::other(e)
            })?;
        }
        node.forget_journal();
        let first = self.running.iter().all(Option::is_none);
        let thread = self.thread(ring);
        let arrived = thread.arrive(&queue.virtqueue);
        let queue = thread.thread.start(self.served.disk.clone(), queue);
        let queue = queue.inspect_err(|_| thread.leave(arrived))?;
        self.running[usize::from(ring)] = Some(Running {
            queue,
            stopping: None,
            arrived,
        });
        self.served.is_ours.store(true, Ordering::Relaxed);
        if first {
            // QEMU accepts notifications now: its device starts before its rings.
            self.served.tell_size_if_not_read();
        }
        Ok(())
    }

    /// Writes what a journal has of an image whose guest pauses, as QEMU does for its own disks: nothing tells whether it was
    /// served here when it goes on, and so whether it relies on that. Storage that does not answer is not waited for.
    fn make_durable(&self) {
        let disk = self.served.disk.clone();
        let (done, ended) = mpsc::channel();
        let sync = move || {
            if let Err(e) = disk.sync() {
                error!(
                    "disk {}: its guest pauses, and not all is durable: {e}",
                    disk.name
                );
            }
            let _ = done.send(());
        };
        if thread::Builder::new()
            .name("sync".into())
            .spawn(sync)
            .is_ok()
        {
            let _ = ended.recv_timeout(PAUSE_TIMEOUT);
        }
    }

    fn thread(&self, ring: u16) -> &'a NamedThread {
        &self.served.threads[usize::from(ring)]
    }
}

impl Drop for BlockDevice<'_> {
    fn drop(&mut self) {
        self.served.is_ours.store(false, Ordering::Relaxed);
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
            // The guest's choice, not the effective state: front-ends keep this value for later drivers. After SeaBIOS,
            // which cannot flush, Linux would find the cache off and never flush.
            write_cache: self.served.write_cache.load(Ordering::Relaxed),
            queues: self.served.queues(),
            seg_max: self.served.seg_max(),
        }
        .bytes(&disk.facts)
    }

    fn may_stop(&mut self) -> bool {
        (self.may_stop)()
    }

    fn capacity_read(&self, sectors: u64) {
        self.served.capacity_read.store(sectors, Ordering::Relaxed);
    }

    fn set_write_cache(&mut self, on: bool) {
        let was = self.served.write_cache.swap(on, Ordering::Relaxed);
        self.apply_write_cache();
        if was != on {
            (self.served.chosen)();
        }
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

    fn untracked(&self, ring: u16, size: u16) {
        self.served.disk.ring_untracked(ring, size);
    }

    fn start(&mut self, ring: u16, queue: NewQueue, driver: Driver) -> io::Result<()> {
        // First, so that the end of a backup does not release the disk meanwhile.
        self.served.clients.guest_queue_started();
        let started = self.start_queue(ring, queue, driver);
        started.inspect_err(|_| self.served.clients.guest_queue_stopped())
    }

    fn begin_stop(&mut self, ring: u16) {
        let thread = &self.thread(ring).thread;
        if let Some(running) = &mut self.running[usize::from(ring)] {
            running.stopping = Some(thread.begin_stop(running.queue));
        }
    }

    fn finish_stop(&mut self, ring: u16) -> StoppedRing {
        let nowhere = StoppedRing {
            base: RingBase(0),
            unfinished: false,
        };
        let Some(Running {
            stopping: Some(stopping),
            arrived,
            ..
        }) = self.running[usize::from(ring)].take()
        else {
            return nowhere;
        };
        let began = Instant::now();
        let stopped = stopping.wait();
        self.draining += began.elapsed();
        self.thread(ring).leave(arrived);
        self.served.clients.guest_queue_stopped();
        stopped.unwrap_or_else(|e| {
            error!(
                "disk {}: queue {ring} cannot be stopped: {e}",
                self.served.disk.name
            );
            nowhere
        })
    }

    fn quiesce(&mut self, why: Pause) -> io::Result<()> {
        let migrating = why == Pause::Moving;
        let draining = std::mem::take(&mut self.draining);
        let node = self.served.node();
        if !migrating && node.spec.lock == Lock::Always {
            let is_stopped = why == Pause::Stopped;
            if is_stopped && self.storage_answered() && node.has_unflushed_changes() {
                drop(node);
                self.make_durable();
            }
            return Ok(());
        }
        let (name, began) = (&self.served.disk.name, Instant::now());
        if migrating {
            self.served.is_ours.store(false, Ordering::Relaxed);
        }
        match self.served.disk.fleece() {
            // Nobody preserves what the other host writes over.
            Some(fleece) if migrating => fleece.fail("its VM was moved to another host"),
            // The end of the backup releases it.
            Some(fleece) if fleece.failure().is_none() => return Ok(()),
            _ => {}
        }
        // None of them changes the disk once it is released.
        let ended = self.served.clients.end(|_| true, began + END_TIMEOUT);
        if !(ended && self.storage_answered()) && node.is_acquired() {
            // Unanswered writes may still reach the file.
            let e = "its storage has not answered all requests";
            error!("disk {name}: not released: {e}");
            if migrating {
                return Err(io::Error::other(e));
            }
            // The node stays acquired until the VM stops again, or its front-end disconnects.
            return Ok(());
        }
        match node.release(&self.served.disk) {
            Ok(false) => Ok(()),
            Ok(true) => {
                let ms = |time: Duration| time.as_secs_f64() * 1000.0;
                info!(
                    "disk {name}: its VM has stopped{}; the lock of {} is given up, after {:.1} ms to finish \
                     what was under way and {:.1} ms to make it durable",
                    if migrating { " to go on elsewhere" } else { "" },
                    node.filename,
                    ms(draining),
                    ms(began.elapsed()),
                );
                Ok(())
            }
            Err(e) => {
                error!("disk {name}: not released: {e}");
                Err(io::Error::other(e))
            }
        }
    }

    fn storage_answered(&self) -> bool {
        !self.served.disk.is_abandoned()
    }

    fn set_event_fds(
        &mut self,
        ring: u16,
        call: Option<Arc<OwnedFd>>,
        error: Option<Arc<OwnedFd>>,
    ) {
        if let Some(running) = &self.running[usize::from(ring)] {
            let thread = &self.thread(ring).thread;
            thread.set_event_fds(running.queue, call, error);
        }
    }
}
