//! Storage that writes to other places and says nothing, tables of an image included. What the guest reads may be
//! anything then; but each request is answered, and the disk continues, or stops as one that is corrupt.

use std::sync::Arc;
use std::time::Duration;

use datapath::{IoThread, Options, Polling};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::faulty::{Faults, Faulty};
use testkit::qemu_img as qemu;
use testkit::random::Random;

use super::files::{Files, disk};
use crate::support::{FACTS, Served};

const FAULTS: Faults = Faults {
    short: 50,
    again: 20,
    fail: 5,
    late: 6,
    room: 32,
    address_alignment: 1,
    length_alignment: 1,
};

const SLOTS: u16 = 16;
const LEN_MAX: u64 = 64 << 10;
const REQUESTS: usize = 3000;

#[test]
fn misdirected_writes_that_hit_tables() {
    let test = "misdirected_writes_that_hit_tables";
    if !qemu::is_there(test) {
        return;
    }
    for seed in testkit::random::seeds(7, 4) {
        println!("seed {seed}");
        let directory = tempfile::tempdir().unwrap();
        let create = "create -q -f qcow2 -o cluster_size=512 disk.qcow2 4M";
        qemu::img(directory.path(), create);
        let mut files = Files::default();
        let path = directory.path().join("disk.qcow2");
        // Little memory for tables, so that they are read again.
        let (chain, its_files) = files.chain(&path, Some(1));
        let bytes: Vec<_> = its_files.iter().map(|f| f.disk.clone()).collect();
        let its_bytes = bytes.clone();
        let make = move || Faulty::over(its_bytes, FAULTS, seed);
        let thread = IoThread::spawn("io-0".into(), Polling::up_to(Duration::ZERO), make).unwrap();
        let disk = disk(Arc::new(chain), 1, FACTS, Options::default());
        let served = Served::new(disk, Arc::new(vec![thread]), 1, 64);
        let config = DeviceConfig {
            queue_size: 64,
            slots: SLOTS,
            buffer_len: LEN_MAX as u32,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(served.socket(), &config).unwrap();
        let queue = &mut device.queues[0];
        let mut random = Random(seed);
        let mut free: Vec<u16> = (0..SLOTS).collect();
        let (mut sent, mut answered) = (0, 0);
        bytes[0].lock().unwrap().misdirect = 100;
        while answered < REQUESTS {
            let slots = std::mem::take(&mut free);
            for &slot in &slots {
                let (at, len) = random.range(4 << 20, 512);
                let sectors = (len / 512).clamp(1, LEN_MAX / 512);
                let (op, sectors) = match random.below(16) {
                    0 => (Op::Flush, 0),
                    1 => (Op::WriteZeroes { unmap: true }, sectors),
                    2..9 => (Op::Read, sectors),
                    _ => (Op::Write, sectors),
                };
                let sector = (at / 512).min((4 << 11) - sectors);
                queue.prepare(slot, op, sector, (sectors * 512) as u32);
            }
            queue.submit(&slots);
            sent += slots.len();
            assert!(queue.ring.wait_timeout(HANG), "a hang");
            answered += queue.poll(|slot, _| free.push(slot));
        }
        while answered < sent {
            assert!(queue.ring.wait_timeout(HANG), "a hang");
            answered += queue.poll(|slot, _| free.push(slot));
        }
        let misdirected = bytes[0].lock().unwrap().misdirected.len();
        println!("{answered} requests, {misdirected} writes were misdirected");
        assert!(misdirected > 0);
    }
}
