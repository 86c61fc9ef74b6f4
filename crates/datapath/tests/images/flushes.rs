//! A flush of an image that fails: what is final about that, and what is not.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use block::{CacheMode, OnError};
use datapath::{IoThread, Options, Polling};
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::faulty::{Faults, Faulty};
use testkit::qemu_img as qemu;

use super::files::{Files, Trouble, disk};
use crate::support::{FACTS, Served};

const OK: u8 = 0;
const IOERR: u8 = 1;

const FAULTS: Faults = Faults {
    room: 64,
    ..Faults::NONE
};

#[test]
fn only_writes_lost_by_the_page_cache_fail_later_flushes() {
    let test = "only_writes_lost_by_the_page_cache_fail_later_flushes";
    if !qemu::is_there(test) {
        return;
    }
    for cached in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        qemu::img(directory.path(), "create -q -f qcow2 disk.qcow2 256M");
        let mut files = Files::default();
        let trouble = files.trouble.clone();
        trouble.cached.store(cached, Relaxed);
        let (chain, its_files) = files.chain(&directory.path().join("disk.qcow2"), None);
        let bytes: Vec<_> = its_files.iter().map(|f| f.disk.clone()).collect();
        let make = move || Faulty::over(bytes, FAULTS, 1);
        let thread = IoThread::spawn("io-0".into(), Polling::up_to(Duration::ZERO), make).unwrap();
        let options = Options {
            cache: if cached {
                CacheMode::Writeback
            } else {
                CacheMode::None
            },
            werror: OnError::Report,
            ..Options::default()
        };
        let disk = disk(Arc::new(chain), 1, FACTS, options);
        let served = Served::new(disk.clone(), Arc::new(vec![thread]), 1, 64);
        let mut device = Device::connect(served.socket(), &DeviceConfig::default()).unwrap();
        let queue = &mut device.queues[0];

        // A queue's first request may be a flush.
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
        // No room for its tables: not now.
        assert_eq!(queue.write(0, &[1; 4096]), OK);
        trouble.full.store(true, Relaxed);
        assert_eq!(queue.run(Op::Flush, 0, 0), IOERR);
        assert_eq!(queue.run(Op::Flush, 0, 0), IOERR);
        trouble.full.store(false, Relaxed);
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
        // Tables that could not be made durable, and no tables at all.
        assert_eq!(queue.write(2048, &[2; 4096]), OK);
        trouble.broken.store(true, Relaxed);
        assert_eq!(queue.run(Op::Flush, 0, 0), IOERR);
        trouble.broken.store(false, Relaxed);
        for _ in 0..2 {
            assert_eq!(queue.run(Op::Flush, 0, 0) == OK, !cached);
            assert_eq!(disk.sync().is_ok(), !cached);
            assert_eq!(disk.lost_writes(), cached);
        }
        assert_eq!(queue.read(2048, 4096), Ok(vec![2; 4096]));
    }
}

/// Without a write cache, past the page cache: a write in place is stable as it is written, but the request that took its cluster
/// has not been able to flush the table that leads there.
#[test]
fn a_write_in_place_is_durable_with_its_table() {
    let test = "a_write_in_place_is_durable_with_its_table";
    if !qemu::is_there(test) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    qemu::img(directory.path(), "create -q -f qcow2 disk.qcow2 1M");
    let mut files = Files::default();
    let trouble = files.trouble.clone();
    let (chain, its_files) = files.chain(&directory.path().join("disk.qcow2"), None);
    let bytes: Vec<_> = its_files.iter().map(|f| f.disk.clone()).collect();
    let make = move || Faulty::over(bytes, FAULTS, 1);
    let thread = IoThread::spawn("io-0".into(), Polling::up_to(Duration::ZERO), make).unwrap();
    let options = Options {
        cache: CacheMode::Directsync,
        werror: OnError::Report,
        ..Options::default()
    };
    let disk = disk(Arc::new(chain), 1, FACTS, options);
    let served = Served::new(disk, Arc::new(vec![thread]), 1, 64);
    let mut device = Device::connect(served.socket(), &DeviceConfig::default()).unwrap();
    let queue = &mut device.queues[0];
    let after_a_power_cut = || {
        let left = tempfile::tempdir().unwrap();
        files.save(left.path());
        qemu::content(left.path(), "disk.qcow2", "qcow2")
    };
    let (cluster, sector) = (64 << 10, 16 << 10);

    assert_eq!(queue.write(0, &[1; 4096]), OK);
    trouble.broken.store(true, Relaxed);
    assert_eq!(queue.write(cluster / 512, &[2; 4096]), IOERR);
    assert_eq!(queue.write((cluster + sector) / 512, &[3; 4096]), IOERR);
    trouble.broken.store(false, Relaxed);
    assert_eq!(queue.write((cluster + 2 * sector) / 512, &[4; 4096]), OK);
    let content = after_a_power_cut();
    for (at, byte) in [
        (0, 1),
        (cluster, 2),
        (cluster + sector, 3),
        (cluster + 2 * sector, 4),
    ] {
        let at = at as usize;
        assert!(content[at..at + 4096] == [byte; 4096], "what is at {at}");
    }
    // No table has changed: there is nothing to be flushed.
    trouble.broken.store(true, Relaxed);
    assert_eq!(queue.write(cluster / 512, &[5; 4096]), OK);
    assert!(after_a_power_cut()[cluster as usize..][..4096] == [5; 4096]);
}

/// The journal cannot be written, nor can the tables be made durable: a write into new clusters fails. One beside it, in the
/// same cluster, must not succeed either, though it goes in place and the guest has a write cache: a kill would take
/// back the table that leads there, and both writes with it. So it was acknowledged before.
#[test]
fn a_write_in_place_waits_for_the_change_it_depends_on() {
    let test = "a_write_in_place_waits_for_the_change_it_depends_on";
    if !qemu::is_there(test) {
        return;
    }
    for begun in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        qemu::img(directory.path(), "create -q -f qcow2 disk.qcow2 1M");
        let journal = Arc::new(Trouble::default());
        let mut files = Files::default();
        files.journal = Some(journal.clone());
        let trouble = files.trouble.clone();
        let (chain, its_files) = files.chain(&directory.path().join("disk.qcow2"), None);
        let bytes: Vec<_> = its_files.iter().map(|f| f.disk.clone()).collect();
        let make = move || Faulty::over(bytes, FAULTS, 1);
        let thread = IoThread::spawn("io-0".into(), Polling::up_to(Duration::ZERO), make).unwrap();
        let options = Options {
            cache: CacheMode::None,
            werror: OnError::Report,
            ..Options::default()
        };
        let disk = disk(Arc::new(chain), 1, FACTS, options);
        let served = Served::new(disk, Arc::new(vec![thread]), 1, 64);
        let mut device = Device::connect(served.socket(), &DeviceConfig::default()).unwrap();
        let queue = &mut device.queues[0];
        let (cluster, sector) = (64 << 10, 16 << 10);

        journal.full.store(!begun, Relaxed);
        assert_eq!(queue.write(0, &[1; 4096]), OK);
        journal.full.store(true, Relaxed);
        trouble.broken.store(true, Relaxed);
        assert_eq!(queue.write(cluster / 512, &[2; 4096]), IOERR, "{begun}");
        let beside = |n: u64| (cluster + n * sector) / 512;
        assert_eq!(queue.write(beside(1), &[3; 4096]), IOERR, "{begun}");
        trouble.broken.store(false, Relaxed);
        assert_eq!(queue.write(beside(2), &[4; 4096]), OK);
        // What a kill leaves at this moment, without any journal.
        let left = tempfile::tempdir().unwrap();
        files.save(left.path());
        let content = qemu::content(left.path(), "disk.qcow2", "qcow2");
        for (at, byte) in [
            (0, 1),
            (cluster, 2),
            (cluster + sector, 3),
            (cluster + 2 * sector, 4),
        ] {
            let at = at as usize;
            assert!(content[at..at + 4096] == [byte; 4096], "what is at {at}");
        }
    }
}
