//! Storage that does not answer: guests without a disk on it continue.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use block::{Aio, Backing, OnError};
use datapath::{Disk, IoThread, Options, Polling};
use image::Image;
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::faulty::{Faults, Faulty, MemoryDisk};
use testkit::qemu_img as qemu;

use super::files::{Files, disk};
use crate::support::{FACTS, Served};

const FAULTS: Faults = Faults {
    room: 64,
    ..Faults::NONE
};

const OK: u8 = 0;
const IOERR: u8 = 1;
const EIO: i32 = 5;
const CLUSTER: u64 = 64 << 10;

/// Until this is so.
pub fn wait_until(what: &str, is: impl Fn() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < HANG, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// One write fails, and its clusters are to be given back, while another one makes the file longer and gets no answer:
/// it holds what knows of the clusters. A neighbour on the same thread is served meanwhile.
#[test]
fn giving_clusters_back_does_not_delay_other_disks() {
    let test = "giving_clusters_back_does_not_delay_other_disks";
    if !qemu::is_there(test) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    qemu::img(directory.path(), "create -q -f qcow2 disk.qcow2 16M");
    let mut files = Files::default();
    let trouble = files.trouble.clone();
    let (chain, its_files) = files.chain(&directory.path().join("disk.qcow2"), None);
    let (bytes, other) = (its_files[0].disk.clone(), MemoryDisk::new(1 << 20));
    let disks = vec![bytes.clone(), other];
    let make = move || Faulty::over(disks, FAULTS, 1);
    let threads = Arc::new(vec![
        IoThread::spawn("io-0".into(), Polling::up_to(Duration::ZERO), make).unwrap(),
    ]);
    let options = Options {
        werror: OnError::Report,
        ..Options::default()
    };
    let image = disk(Arc::new(chain), 1, FACTS, options);
    let served = Served::new(image, threads.clone(), 1, 64);
    let mut device = Device::connect(served.socket(), &DeviceConfig::default()).unwrap();
    let queue = &mut device.queues[0];
    assert_eq!(queue.write(0, &[1; 4096]), OK);

    let raw = Disk::new(
        "raw".into(),
        Image::raw(),
        Some((
            Arc::new(tempfile::tempfile().unwrap().into()),
            Backing::File,
            Aio::Auto,
        )),
        FACTS,
        1 << 20,
        "",
        options,
    );
    let its_served = Served::new(Arc::new(raw), threads, 1, 64);
    let mut neighbour = Device::connect(its_served.socket(), &DeviceConfig::default()).unwrap();
    let its_queue = &mut neighbour.queues[0];
    assert_eq!(its_queue.read(0, 512), Ok(vec![0; 512]));

    let submitted = || bytes.lock().unwrap().submitted.len();
    let before = submitted();
    bytes.lock().unwrap().hang(true);
    queue.prepare(0, Op::Write, CLUSTER / 512, 4096);
    queue.submit(&[0]);
    wait_until("no write to the first cluster", || submitted() > before);
    trouble.hang(true);
    queue.prepare(1, Op::Write, 2 * CLUSTER / 512, 4096);
    queue.submit(&[1]);
    wait_until("no longer file", || trouble.hanging.load(Relaxed) > 0);
    bytes.lock().unwrap().outage = Some(EIO);
    bytes.lock().unwrap().hang(false);
    let mut served = 0;
    for _ in 0..10 {
        its_queue.prepare(0, Op::Read, 0, 512);
        its_queue.submit(&[0]);
        if !its_queue.ring.wait_timeout(HANG) {
            break;
        }
        served += its_queue.poll(|_, status| assert_eq!(status, OK));
    }
    bytes.lock().unwrap().outage = None;
    trouble.hang(false);
    assert_eq!(served, 10, "the neighbour hangs");
    let mut done = queue.finish(2);
    done.sort_unstable();
    assert_eq!(done, [(0, IOERR), (1, OK)]);
    // It is a disk as before, and its clusters can be taken.
    assert_eq!(queue.write(CLUSTER / 512, &[2; 4096]), OK);
    assert_eq!(queue.read(CLUSTER / 512, 4096), Ok(vec![2; 4096]));
}
