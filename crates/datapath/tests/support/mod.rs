//! A disk served in this process: a real vhost-user session on one thread, an I/O thread of any engine on another.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use block::DiskFacts;
use datapath::{Disk, IoThread, QueueId, StoppingQueue};
use guest::blk::{self, CONFIG_BYTES, ConfigSpace};
use guest::{Device, Driver, FrontendChannel, NewQueue, RingBase, StoppedRing};
use tempfile::TempDir;
use testkit::frontend::eventfd;

pub struct Served {
    directory: TempDir,
    stop: OwnedFd,
    session: Option<JoinHandle<()>>,
}

impl Served {
    /// Serves one front-end until this is dropped. The queues go to the threads in turn.
    pub fn new(disk: Arc<Disk>, threads: Arc<Vec<IoThread>>, queues: u16, queue_size: u16) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
        let stop = eventfd().unwrap();
        let its_stop = stop.try_clone().unwrap();
        let session = thread::spawn(move || {
            let (socket, _) = listener.accept().unwrap();
            let mut device = Queues {
                disk,
                threads,
                queue_size,
                running: vec![None; usize::from(queues)],
                stopping: (0..queues).map(|_| None).collect(),
            };
            match guest::serve(&socket, &mut device, its_stop.as_fd()) {
                // Tests break threads on purpose.
                guest::SessionEnd::Failed(e) => {
                    let why = e.to_string();
                    let expected = ["an I/O thread failed", "has not answered"];
                    assert!(expected.iter().any(|part| why.contains(part)), "{why}");
                }
                _ => assert!(device.running.iter().all(Option::is_none)),
            }
        });
        Self {
            directory,
            stop,
            session: Some(session),
        }
    }

    /// Asks the session to stop, and does not wait.
    pub fn begin_stop(&self) {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).unwrap();
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.begin_stop();
        // After a failure, it may have lost a request and wait for it for ever.
        if !thread::panicking() {
            let session = self.session.take().unwrap();
            session.join().expect("the session ended well");
        }
    }
}

struct Queues {
    disk: Arc<Disk>,
    threads: Arc<Vec<IoThread>>,
    queue_size: u16,
    running: Vec<Option<QueueId>>,
    stopping: Vec<Option<StoppingQueue>>,
}

impl Queues {
    fn thread(&self, ring: u16) -> &IoThread {
        &self.threads[usize::from(ring) % self.threads.len()]
    }
}

impl Device for Queues {
    fn ring_failed(&self, _: u16, _: &guest::RingError) {}

    fn features(&self) -> u64 {
        blk::features(&self.disk.facts)
    }

    fn queues(&self) -> u16 {
        self.running.len() as u16
    }

    fn seg_max(&self) -> u16 {
        self.queue_size - 2
    }

    fn config(&self) -> [u8; CONFIG_BYTES] {
        ConfigSpace {
            size: self.disk.size(),
            write_cache: self.disk.write_cache(),
            queues: self.queues(),
            seg_max: self.seg_max(),
        }
        .bytes(&self.disk.facts)
    }

    fn capacity_read(&self, _sectors: u64) {}

    fn untracked(&self, _ring: u16, _size: u16) {}

    fn set_write_cache(&mut self, on: bool) {
        self.disk.set_write_cache(on);
    }

    fn set_features(&mut self, _accepted: u64) {}

    fn set_frontend(&mut self, _channel: Option<FrontendChannel>) {}

    fn start(&mut self, ring: u16, queue: NewQueue, _driver: Driver) -> io::Result<()> {
        let id = self.thread(ring).start(self.disk.clone(), queue)?;
        self.running[usize::from(ring)] = Some(id);
        Ok(())
    }

    fn begin_stop(&mut self, ring: u16) {
        let id = self.running[usize::from(ring)].take();
        let id = id.expect("a session stops what runs");
        self.stopping[usize::from(ring)] = Some(self.thread(ring).begin_stop(id));
    }

    fn finish_stop(&mut self, ring: u16) -> StoppedRing {
        let stopping = self.stopping[usize::from(ring)].take();
        let stopping = stopping.expect("a session waits for what it has asked to stop");
        // A thread that has failed has no answer.
        stopping.wait().unwrap_or(StoppedRing {
            base: RingBase(0),
            unfinished: false,
        })
    }

    fn quiesce(&mut self, _: guest::Pause) -> io::Result<()> {
        Ok(())
    }

    fn storage_answered(&self) -> bool {
        !self.disk.is_abandoned()
    }

    fn set_event_fds(
        &mut self,
        ring: u16,
        call: Option<Arc<OwnedFd>>,
        error: Option<Arc<OwnedFd>>,
    ) {
        if let Some(id) = self.running[usize::from(ring)] {
            self.thread(ring).set_event_fds(id, call, error);
        }
    }
}

/// A disk of 512-byte sectors on which anything goes.
pub const FACTS: DiskFacts = DiskFacts {
    logical_block: 512,
    physical_block: 4096,
    optimal_io: 0,
    address_alignment: 1,
    length_alignment: 1,
    discard_granularity: 4096,
    read_only: false,
};
