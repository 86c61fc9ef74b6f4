//! Guests whose buffers are not aligned as the storage needs them, at disks whose requests go piece by piece.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use block::{Aio, Backing, DiskFacts, GuestOffset, OnError};
use datapath::{Disk, IoThread, Options, Polling};
use image::Image;
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::faulty::{Faults, Faulty, MemoryDisk};
use testkit::qemu_img as qemu;

use super::files::{Files, disk};
use super::hung::wait_until;
use crate::support::{FACTS, Served};

const FAULTS: Faults = Faults {
    room: 128,
    address_alignment: 512,
    length_alignment: 512,
    ..Faults::NONE
};

const NEEDS: DiskFacts = DiskFacts {
    address_alignment: FAULTS.address_alignment,
    length_alignment: FAULTS.length_alignment,
    ..FACTS
};

fn misaligned() -> DeviceConfig {
    DeviceConfig {
        buffer_offset: 8,
        ..DeviceConfig::default()
    }
}

const OK: u8 = 0;
const IOERR: u8 = 1;
const EIO: i32 = 5;
const CLUSTER: usize = 64 << 10;

/// A write begins in a cluster of the overlay's own, by a bounce buffer, and ends in one of which the rest is in the
/// backing file: what is read of that goes where it is written from.
#[test]
fn a_copy_after_a_bounced_piece_is_not_bounced() {
    let test = "a_copy_after_a_bounced_piece_is_not_bounced";
    if !qemu::is_there(test) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("base.raw"), [0xbb; 4 * CLUSTER]).unwrap();
    let create = "create -q -f qcow2 -b base.raw -F raw disk.qcow2";
    qemu::img(directory.path(), create);
    let mut files = Files::with_room(16 * CLUSTER as u64);
    let (chain, its_files) = files.chain(&directory.path().join("disk.qcow2"), None);
    let bytes: Vec<_> = its_files.iter().map(|f| f.disk.clone()).collect();
    let its_bytes = bytes.clone();
    let make = move || Faulty::over(its_bytes, FAULTS, 1);
    let thread = IoThread::spawn("io-0".into(), Polling::up_to(Duration::ZERO), make).unwrap();
    let disk = disk(Arc::new(chain), its_files.len(), NEEDS, Options::default());
    let served = Served::new(disk, Arc::new(vec![thread]), 1, 64);
    let mut device = Device::connect(served.socket(), &misaligned()).unwrap();
    let queue = &mut device.queues[0];

    assert_eq!(queue.write(0, &[1; CLUSTER]), OK);
    let (at, len) = (48 << 10, 32 << 10);
    assert_eq!(queue.write(at as u64 / 512, &vec![2; len]), OK);
    let mut expected = vec![0xbb; 2 * CLUSTER];
    expected[..CLUSTER].fill(1);
    expected[at..at + len].fill(2);
    let found = queue.read(0, 2 * CLUSTER).unwrap();
    let differs = (0..)
        .zip(found.iter().zip(&expected))
        .find(|(_, (a, b))| a != b);
    assert_eq!(differs, None::<(usize, _)>);
    for bytes in bytes {
        assert_eq!(bytes.lock().unwrap().mistakes, [""; 0]);
    }
}

/// Storage that does not answer has all the buffers but the one that another disk is due. A request of that one waits
/// for it, and the one that has it fails: what it took is given back beside the I/O thread, because another thread makes
/// the image longer just then, and nothing else happens there.
#[test]
fn a_buffer_freed_by_a_job_is_reused() {
    let test = "a_buffer_freed_by_a_job_is_reused";
    if !qemu::is_there(test) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    qemu::img(directory.path(), "create -q -f qcow2 disk.qcow2 16M");
    let mut files = Files::default();
    let trouble = files.trouble.clone();
    let (chain, its_files) = files.chain(&directory.path().join("disk.qcow2"), None);
    let (bytes, hung) = (its_files[0].disk.clone(), MemoryDisk::new(1 << 20));
    let disks = vec![bytes.clone(), hung.clone()];
    let make = move || Faulty::over(disks, FAULTS, 1);
    let threads = Arc::new(vec![
        IoThread::spawn("io-0".into(), Polling::up_to(Duration::ZERO), make).unwrap(),
    ]);
    let options = Options {
        werror: OnError::Report,
        ..Options::default()
    };
    let chain = Arc::new(chain);
    let image = disk(chain.clone(), 1, NEEDS, options);
    let served = Served::new(image, threads.clone(), 1, 64);
    let mut device = Device::connect(served.socket(), &misaligned()).unwrap();
    let queue = &mut device.queues[0];
    assert_eq!(queue.write(0, &[1; 4096]), OK);

    let file = Arc::new(tempfile::tempfile().unwrap().into());
    let raw = Disk::new(
        "raw".into(),
        Image::raw(),
        Some((file, Backing::File, Aio::Auto)),
        NEEDS,
        1 << 20,
        "",
        options,
    );
    let its_served = Served::new(Arc::new(raw), threads, 1, 256);
    let config = DeviceConfig {
        queue_size: 256,
        slots: 65,
        ..misaligned()
    };
    let mut neighbour = Device::connect(its_served.socket(), &config).unwrap();
    let its_queue = &mut neighbour.queues[0];
    assert_eq!(its_queue.read(0, 512), Ok(vec![0; 512]));
    hung.lock().unwrap().hang(true);
    let all = 0..65;
    for number in all.clone() {
        its_queue.prepare(number, Op::Read, 0, 512);
    }
    let submitted = || bytes.lock().unwrap().submitted.len();
    let before = submitted();
    its_queue.submit(&all.clone().collect::<Vec<_>>());
    wait_until("not all read", || submitted() == before + all.len());

    bytes.lock().unwrap().hang(true);
    for (number, cluster) in [(0, 1), (1, 2)] {
        queue.prepare(number, Op::Write, cluster * CLUSTER as u64 / 512, 4096);
    }
    queue.submit(&[0, 1]);
    wait_until("no write", || submitted() > before + all.len());
    trouble.hang(true);
    let other = thread::spawn(move || {
        chain
            .prepare_write(GuestOffset(4 * CLUSTER as u64), 4096)
            .map(drop)
    });
    wait_until("no longer file", || trouble.hanging.load(Relaxed) > 0);
    bytes.lock().unwrap().outage = Some(EIO);
    let turns = || bytes.lock().unwrap().turns;
    let turns_before = turns();
    bytes.lock().unwrap().hang(false);
    wait_until("the write has not failed", || turns() > turns_before);
    // What follows on that turn is not seen from here.
    thread::sleep(Duration::from_millis(20));
    trouble.hang(false);
    other.join().unwrap().unwrap();
    let mut done = queue.finish(2);
    done.sort_unstable();
    assert_eq!(done, [(0, IOERR), (1, IOERR)]);
    hung.lock().unwrap().hang(false);
    assert_eq!(its_queue.finish(all.len()).len(), all.len());
}
