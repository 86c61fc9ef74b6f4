//! What reads as zeroes is written by the I/O thread itself: no more of it at a time than its neighbours can wait for.

use std::sync::Arc;
use std::time::Duration;

use block::{Aio, Backing, DetectZeroes};
use datapath::{Disk, IoThread, Options, Polling};
use image::Image;
use testkit::chain::{Chain, Table, header};
use testkit::driver::{Device, DeviceConfig, HANG, Queue};
use testkit::faulty::{Faults, Faulty, MemoryDisk};
use testkit::memory::Memory;
use testkit::qemu_img as qemu;
use testkit::ring::Desc;

use super::files::{Files, disk};
use crate::support::{FACTS, Served};

const FAULTS: Faults = Faults {
    room: 64,
    ..Faults::NONE
};

const MIB: u64 = 1 << 20;
const PIECES: u64 = 128;
const OK: u8 = 0;
const IN: u32 = 0;
const OUT: u32 = 1;

/// A guest reads 128 MiB of zeroes into 1 MiB of its memory, over and over: meanwhile, the thread takes a turn for each
/// of them.
#[test]
fn a_long_read_of_zeroes_takes_turns() {
    let test = "a_long_read_of_zeroes_takes_turns";
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
    let thread = IoThread::spawn("io-0".into(), Polling::up_to(Duration::ZERO), make).unwrap();
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
    let data = queue.buffer(0);
    memory.write(data, &vec![0xa5; MIB as usize]);
    let turns = || bytes[0].lock().unwrap().turns;
    let before = turns();
    run_large(queue, &memory, IN);
    assert!(memory.read(data, MIB as usize).iter().all(|&b| b == 0));
    let took = turns() - before;
    println!("{PIECES} MiB took {took} turns");
    // The first of it comes before the first turn ends, and so does what that one goes on with.
    assert!(took + 2 >= PIECES, "{took}");
}

/// The same for a write of as many zeroes, which are looked for, in an image and in a raw file.
#[test]
fn detecting_zeroes_takes_turns() {
    let test = "detecting_zeroes_takes_turns";
    if !qemu::is_there(test) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    qemu::img(directory.path(), "create -q -f qcow2 disk.qcow2 256M");
    for raw in [false, true] {
        let options = Options {
            detect_zeroes: DetectZeroes::Unmap,
            ..Options::default()
        };
        let mut files = Files::default();
        let (chain, its_files) = files.chain(&directory.path().join("disk.qcow2"), None);
        let (bytes, disk) = if raw {
            let size = PIECES * MIB;
            let file = Arc::new(tempfile::tempfile().unwrap().into());
            let files = [(file, Backing::File, Aio::Auto)];
            let name = "raw".into();
            let disk = Disk::new(name, Image::raw(), files, FACTS, size, "", options);
            (MemoryDisk::file(vec![1; size as usize]), Arc::new(disk))
        } else {
            (
                its_files[0].disk.clone(),
                disk(Arc::new(chain), 1, FACTS, options),
            )
        };
        let its_bytes = bytes.clone();
        let make = move || Faulty::over(vec![its_bytes], FAULTS, 1);
        let thread = IoThread::spawn("io-0".into(), Polling::up_to(Duration::ZERO), make).unwrap();
        let served = Served::new(disk, Arc::new(vec![thread]), 1, 512);
        let config = DeviceConfig {
            queue_size: 512,
            slots: 2,
            buffer_len: MIB as u32,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(served.socket(), &config).unwrap();
        let memory = device.memory.clone();
        let queue = &mut device.queues[0];
        assert_eq!(queue.write(0, &[7; 4096]), OK);
        memory.write(queue.buffer(0), &vec![0; MIB as usize]);
        let turns = || bytes.lock().unwrap().turns;
        let before = turns();
        run_large(queue, &memory, OUT);
        let took = turns() - before;
        assert!(took + 2 >= PIECES, "{took}");
        assert_eq!(queue.read(0, 4096), Ok(vec![0; 4096]));
        let file = bytes.lock().unwrap().bytes.len() as u64;
        assert!(raw || file < PIECES * MIB, "zeroes were written");
    }
}

/// Moves 128 MiB, all of them from or to the first buffer of a queue; the control bytes are in the second.
fn run_large(queue: &mut Queue, memory: &Arc<Memory>, kind: u32) {
    let (data, control) = (queue.buffer(0), queue.buffer(1));
    memory.write(control, &header(kind, 0));
    let desc = |addr, len, flags| Desc {
        addr,
        len,
        flags,
        next: 0,
    };
    let flags = if kind == IN { Desc::WRITE } else { 0 };
    let mut buffers = vec![desc(control, 16, 0)];
    buffers.extend((0..PIECES).map(|_| desc(data, MIB as u32, flags)));
    buffers.push(desc(control + 16, 1, Desc::WRITE));
    let first = queue.first_free_desc();
    let chain = Chain { buffers };
    let head = chain.place(Table::Direct, &mut queue.ring, first, memory, 0);
    queue.ring.publish([head]);
    let used = queue.ring.next_used(HANG).expect("a hang");
    let moved = if kind == IN { (PIECES * MIB) as u32 } else { 0 };
    assert_eq!(used.len, moved + 1);
    assert_eq!(memory.read(control + 16, 1), [OK]);
}
