//! Queues of clients that are not the disk's guest: they have limits of their own, and hear of every error.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use block::{Aio, Backing, OnError, ThrottleLimits};
use datapath::{Admission, Disk, IoThread, Options, Polling, QueueId};
use guest::blk::Status;
use guest::{Buffer, LocalOp, LocalQueue};
use image::Image;
use rustix::event::{PollFd, PollFlags, poll};
use testkit::faulty::{Faults, Faulty, MemoryDisk};

use crate::support::FACTS;

const DISK_BYTES: u64 = 4 << 20;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

struct Client {
    memory: Arc<Mutex<MemoryDisk>>,
    disk: Arc<Disk>,
    thread: IoThread,
    limits: Arc<Admission>,
    queue: LocalQueue,
    id: QueueId,
}

impl Client {
    fn new(faults: Faults) -> Self {
        let memory = MemoryDisk::new(DISK_BYTES as usize);
        let its_memory = memory.clone();
        let polling = Polling::up_to(Duration::from_micros(50));
        let thread = IoThread::spawn("io-0".into(), polling, move || {
            Faulty::new(its_memory, faults, 7)
        });
        let thread = thread.unwrap();
        let file = Arc::new(tempfile::tempfile().unwrap().into());
        let disk = Arc::new(Disk::new(
            "out".into(),
            Image::raw(),
            Some((file, Backing::File, Aio::Auto)),
            FACTS,
            DISK_BYTES,
            "",
            Options {
                rerror: OnError::Stop,
                werror: OnError::Stop,
                ..Options::default()
            },
        ));
        let (queue, new) = LocalQueue::new(1 << 20).unwrap();
        let limits = Arc::new(Admission::default());
        let id = thread.start_client(disk.clone(), new, limits.clone());
        Self {
            memory,
            disk,
            id: id.unwrap(),
            thread,
            limits,
            queue,
        }
    }

    /// Sleeps until the next request has been finished.
    fn next(&mut self) -> (u32, Status, Option<Buffer>) {
        loop {
            if let Some(done) = self.queue.take() {
                return (done.tag, done.status, done.buffer);
            }
            if !self.queue.enable_calls() {
                let call = self.queue.call();
                poll(&mut [PollFd::new(&call, PollFlags::IN)], None).unwrap();
                self.queue.clear_call();
            }
        }
    }

    fn run(&mut self, op: LocalOp, buffer: Option<Buffer>) -> (Status, Option<Buffer>) {
        self.queue.submit(0, op, buffer);
        self.queue.publish();
        let (_, status, buffer) = self.next();
        (status, buffer)
    }

    fn buffer(&mut self, fill: u8) -> Buffer {
        let mut buffer = self.queue.alloc(4096).unwrap();
        self.queue.bytes_mut(&mut buffer).fill(fill);
        buffer
    }

    fn stop(self) {
        self.thread.begin_stop(self.id).wait().unwrap();
        assert_eq!(self.queue.in_flight(), 0);
    }
}

/// Requests of every kind in any number, on storage that transfers less than it was asked for and completes out of order.
#[test]
fn requests_of_clients_are_served() {
    let mut client = Client::new(Faults {
        short: 100,
        again: 50,
        fail: 0,
        late: 4,
        room: 16,
        address_alignment: 1,
        length_alignment: 512,
    });
    let mut expected = HashMap::new();
    for round in 0..50u64 {
        let mut count = 0;
        while client.queue.room() > 0 {
            let block = (round * 64 + count) % 1024;
            let fill = (round + count) as u8;
            let buffer = client.buffer(fill);
            let op = LocalOp::Write { at: block * 4096 };
            client.queue.submit(count as u32, op, Some(buffer));
            expected.insert(block, fill);
            count += 1;
        }
        client.queue.publish();
        for _ in 0..count {
            let (_, status, buffer) = client.next();
            assert_eq!(status, Status::Ok);
            client.queue.give_back(buffer.unwrap());
        }
    }
    let (at, len) = (0, 8192);
    assert_eq!(client.run(LocalOp::Discard { at, len }, None).0, Status::Ok);
    let unmap = false;
    assert_eq!(
        client.run(LocalOp::WriteZeroes { at, len, unmap }, None).0,
        Status::Ok
    );
    assert_eq!(client.run(LocalOp::Flush, None).0, Status::Ok);
    expected.insert(0, 0);
    expected.insert(1, 0);
    for (block, fill) in expected {
        let buffer = client.buffer(0xee);
        let (status, buffer) = client.run(LocalOp::Read { at: block * 4096 }, Some(buffer));
        assert_eq!(status, Status::Ok);
        let buffer = buffer.unwrap();
        assert_eq!(client.queue.bytes(&buffer), [fill; 4096], "{block}");
        client.queue.give_back(buffer);
    }
    client.stop();
}

/// With `rerror=stop`, an error stops the guest; a backup that meets one must not.
#[test]
fn errors_are_reported_and_do_not_stop_the_disk() {
    let mut client = Client::new(Faults::NONE);
    for (errno, expected) in [(EIO, Status::IoError), (ENOSPC, Status::NoSpace)] {
        client.memory.lock().unwrap().outage = Some(errno);
        for op in [LocalOp::Read { at: 0 }, LocalOp::Write { at: 0 }] {
            let buffer = client.buffer(1);
            let (status, buffer) = client.run(op, Some(buffer));
            assert_eq!(status, expected, "{op:?}");
            client.queue.give_back(buffer.unwrap());
        }
        assert_eq!(
            (client.disk.stalled(), client.disk.is_stopped()),
            (0, false)
        );
    }
    client.memory.lock().unwrap().outage = None;
    let buffer = client.buffer(1);
    assert_eq!(
        client.run(LocalOp::Write { at: 0 }, Some(buffer)).0,
        Status::Ok
    );
    client.stop();
}

/// A guest with a limit does not slow its backup down, and the other way round.
#[test]
fn limits_of_a_client_are_its_own() {
    let mut client = Client::new(Faults::NONE);
    let mut limits = ThrottleLimits::NONE;
    limits.iops_total.average = 100;
    // The guest's limits are not the client's.
    client.disk.set_limits(&limits).unwrap();
    let timed = |client: &mut Client| {
        let began = Instant::now();
        for _ in 0..40 {
            let buffer = client.buffer(1);
            let (_, buffer) = client.run(LocalOp::Read { at: 0 }, Some(buffer));
            client.queue.give_back(buffer.unwrap());
        }
        began.elapsed()
    };
    let free = timed(&mut client);
    client.limits.set_limits(&limits).unwrap();
    let limited = timed(&mut client);
    // 40 requests at 100 per second, of which a tenth of a second may have been saved up.
    assert!(limited > Duration::from_millis(250), "{limited:?}");
    assert!(free < limited, "{free:?} {limited:?}");
    let buffer = client.buffer(1);
    let beyond = LocalOp::Read { at: DISK_BYTES };
    assert_eq!(client.run(beyond, Some(buffer)).0, Status::IoError);
    client.stop();
}
