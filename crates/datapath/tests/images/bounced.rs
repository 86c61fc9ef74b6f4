//! Guests whose buffers are not aligned as the storage needs them, at disks whose requests go piece by piece.

use std::sync::Arc;
use std::time::Duration;

use block::DiskFacts;
use datapath::{IoThread, Options};
use testkit::driver::{Device, DeviceConfig};
use testkit::faulty::{Faults, Faulty};
use testkit::qemu_img as qemu;

use crate::files::{Files, disk};
use crate::support::{FACTS, Served};

const FAULTS: Faults = Faults {
    short: 0,
    again: 0,
    fail: 0,
    late: 0,
    room: 64,
    address_alignment: 512,
    length_alignment: 512,
};

const OK: u8 = 0;
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
    let thread = IoThread::spawn("io-0".into(), Duration::ZERO, make).unwrap();
    let facts = DiskFacts {
        address_alignment: FAULTS.address_alignment,
        length_alignment: FAULTS.length_alignment,
        ..FACTS
    };
    let disk = disk(Arc::new(chain), its_files.len(), facts, Options::default());
    let served = Served::new(disk, Arc::new(vec![thread]), 1, 64);
    let config = DeviceConfig {
        buffer_offset: 8,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(served.socket(), &config).unwrap();
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
