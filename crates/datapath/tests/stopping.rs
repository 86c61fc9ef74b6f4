//! The end of a session: all queues of a disk stop at the same time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{FACTS, Served};
use block::{Aio, Backing};
use datapath::{Disk, IoThread, Options, Polling};
use image::Image;
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::faulty::{Faults, Faulty, MemoryDisk};

const DISK_BYTES: u64 = 1 << 20;
const LEN: u32 = 4096;
const OK: u8 = 0;

/// None; operations are executed in order.
const FAULTS: Faults = Faults::NONE;

fn lock(storage: &Mutex<MemoryDisk>) -> MutexGuard<'_, MemoryDisk> {
    storage.lock().unwrap_or_else(PoisonError::into_inner)
}

fn until(what: &str, storage: &Mutex<MemoryDisk>, is: impl Fn(&MemoryDisk) -> bool) {
    let deadline = Instant::now() + HANG;
    while !is(&lock(storage)) {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A queue stops, and fetches nothing more, while another queue of the disk still waits for storage. Once, the queues
/// were stopped one after another: an upgrade of a disk with 16 queues on slow storage took so long that it was
/// cancelled, because the later queues kept storage busy.
#[test]
fn a_queue_stops_while_another_waits_for_storage() {
    for n_threads in [1, 2] {
        let storage = MemoryDisk::new(DISK_BYTES as usize);
        let spawn = |n| {
            let its_storage = storage.clone();
            let make = move || Faulty::new(its_storage, FAULTS, 1);
            IoThread::spawn(format!("io-{n}"), Polling::up_to(Duration::ZERO), make).unwrap()
        };
        let threads = Arc::new((0..n_threads).map(spawn).collect());
        let file = Arc::new(tempfile::tempfile().unwrap().into());
        let disk = Disk::new(
            "slow".into(),
            Image::raw(),
            Some((file, Backing::File, Aio::Auto)),
            FACTS,
            DISK_BYTES,
            "",
            Options {
                // Longer than the test waits for anything.
                stop_timeout: 2 * HANG,
                ..Options::default()
            },
        );
        let served = Served::new(Arc::new(disk), threads, 2, 256);
        let config = DeviceConfig {
            queues: 2,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(served.socket(), &config).unwrap();
        for queue in &mut device.queues {
            assert_eq!(queue.run(Op::Read, 0, LEN), OK);
        }
        let [slow, idle] = &mut device.queues[..] else {
            unreachable!("two queues")
        };

        lock(&storage).hang(true);
        slow.prepare(0, Op::Read, 0, LEN);
        slow.submit(&[0]);
        until("the request arrives", &storage, |s| s.submitted.len() == 3);
        let watched = lock(&storage).watched;
        served.begin_stop();
        until("the idle queue stops", &storage, |s| s.watched < watched);
        assert_eq!(lock(&storage).watched, watched - 1);
        idle.prepare(0, Op::Read, 0, LEN);
        idle.submit(&[0]);
        lock(&storage).hang(false);
        // Waits for the end of the session.
        drop(served);

        assert_eq!(lock(&storage).submitted.len(), 3, "{n_threads} threads");
        assert_eq!(slow.finish(1), [(0, OK)]);
        idle.poll(|slot, _| panic!("request {slot} was served after the queue had stopped"));
    }
}
