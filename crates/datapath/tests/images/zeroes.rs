//! What reads as zeroes is written by the I/O thread itself: no more of it at a time than its neighbours can wait for.

use std::sync::Arc;
use std::time::Duration;

use datapath::{IoThread, Options};
use testkit::chain::{Chain, Table, header};
use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::faulty::{Faults, Faulty};
use testkit::qemu_img as qemu;
use testkit::ring::Desc;

use crate::files::{Files, disk};
use crate::support::{FACTS, Served};

const FAULTS: Faults = Faults {
    short: 0,
    again: 0,
    fail: 0,
    late: 0,
    room: 64,
    address_alignment: 1,
    length_alignment: 1,
};

const MIB: u64 = 1 << 20;
const PIECES: u64 = 128;
const OK: u8 = 0;

/// A guest reads 128 MiB of zeroes into 1 MiB of its memory, over and over: meanwhile, the thread takes a turn for each
/// of them.
#[test]
fn a_long_read_of_zeroes_goes_by_turns() {
    let test = "a_long_read_of_zeroes_goes_by_turns";
    if !qemu::is_there(test) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    qemu::img(directory.path(), "create -q -f qcow2 disk.qcow2 256M");
    let mut files = Files::default();
    let (chain, its_files) = files.chain(&directory.path().join("disk.qcow2"), None);
    let bytes: Vec<_> = its_files.iter().map(|f| f.disk.clone()).collect();
    let its_bytes = bytes.clone();
    let make = move || Faulty::over(its_bytes, FAULTS, 1);
    let thread = IoThread::spawn("io-0".into(), Duration::ZERO, make).unwrap();
    let disk = disk(Arc::new(chain), 1, FACTS, Options::default());
    let served = Served::new(disk, Arc::new(vec![thread]), 1, 512);
    let config = DeviceConfig {
        queue_size: 512,
        slots: 2,
        buffer_len: MIB as u32,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(served.socket(), &config).unwrap();
    let queue = &mut device.queues[0];
    // Its table is in memory from now on.
    assert_eq!(queue.read(0, 512), Ok(vec![0; 512]));

    let memory = device.memory.clone();
    let (control, data) = (queue.buffer(1), queue.buffer(0));
    memory.write(data, &vec![0xa5; MIB as usize]);
    memory.write(control, &header(0, 0));
    let desc = |addr, len, flags| Desc {
        addr,
        len,
        flags,
        next: 0,
    };
    let mut buffers = vec![desc(control, 16, 0)];
    buffers.extend((0..PIECES).map(|_| desc(data, MIB as u32, Desc::WRITE)));
    buffers.push(desc(control + 16, 1, Desc::WRITE));
    let first = queue.first_free_desc();
    let chain = Chain { buffers };
    let head = chain.place(Table::Direct, &mut queue.ring, first, &memory, 0);
    let turns = || bytes[0].lock().unwrap().turns;
    let before = turns();
    queue.ring.publish([head]);
    let used = queue.ring.next_used(HANG).expect("a hang");
    assert_eq!(used.len, (PIECES * MIB) as u32 + 1);
    assert_eq!(memory.read(control + 16, 1), [OK]);
    assert!(memory.read(data, MIB as usize).iter().all(|&b| b == 0));
    let took = turns() - before;
    println!("{PIECES} MiB took {took} turns");
    // The first of it comes before the first turn ends, and so does what that one goes on with.
    assert!(took + 2 >= PIECES, "{took}");
}
