//! Disks that share an I/O thread: none keeps another one waiting for longer than its turn takes.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{FACTS, Served};
use block::{Aio, Backing, DiskFacts};
use datapath::{Disk, IoThread, Options, Polling};
use image::Image;
use testkit::chain::{Chain, Layout, Table, header};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::faulty::{Faults, Faulty, MemoryDisk};
use testkit::frontend::{F_LOG_ALL, eventfd, eventfd_wait};
use testkit::memory::Memory;

const DISK_BYTES: u64 = 1 << 20;
const OK: u8 = 0;

const FAULTS: Faults = Faults {
    late: 20,
    room: 4,
    ..Faults::NONE
};

/// Most operations that one queue submits in its turn.
const TURN_MAX: usize = 32;

/// Two disks on one thread, with a guest each.
fn neighbours(
    faults: Faults,
    facts: DiskFacts,
    slots: u16,
) -> (Arc<Mutex<MemoryDisk>>, Vec<Served>, Vec<Device>) {
    let bytes = MemoryDisk::new(DISK_BYTES as usize);
    let its_bytes = bytes.clone();
    let make = move || Faulty::new(its_bytes, faults, 1);
    let thread = IoThread::spawn(
        "io-0".into(),
        Polling::up_to(Duration::from_micros(50)),
        make,
    )
    .unwrap();
    let threads = Arc::new(vec![thread]);
    let serve = |name: &str| {
        let file = Arc::new(tempfile::tempfile().unwrap().into());
        let disk = Disk::new(
            name.into(),
            Image::raw(),
            Some((file, Backing::File, Aio::Auto)),
            facts,
            DISK_BYTES,
            "",
            Options::default(),
        );
        Served::new(Arc::new(disk), threads.clone(), 1, 1024)
    };
    let served: Vec<Served> = ["busy", "quiet"].map(serve).into();
    let connect = |served: &Served| {
        let config = DeviceConfig {
            queue_size: 1024,
            slots,
            buffer_len: 8192,
            ..DeviceConfig::default()
        };
        Device::connect(served.socket(), &config).unwrap()
    };
    let devices = served.iter().map(connect).collect();
    (bytes, served, devices)
}

/// Both have much to do, and the engine has little room: each waits only for a short turn of the other.
#[test]
fn disks_take_short_turns() {
    let (bytes, _served, mut devices) = neighbours(FAULTS, FACTS, 800);
    let slots: Vec<u16> = (0..800).collect();
    for device in &mut devices {
        for &slot in &slots {
            device.queues[0].prepare(slot, Op::Read, u64::from(slot), 512);
        }
    }
    let counts = [800, 200];
    for (device, count) in devices.iter_mut().zip(counts) {
        device.queues[0].submit(&slots[..count]);
    }
    for (device, count) in devices.iter_mut().zip(counts) {
        assert!(
            device.queues[0]
                .finish(count)
                .iter()
                .all(|done| done.1 == OK)
        );
    }
    let order = bytes.lock().unwrap().submitted.clone();
    assert_eq!(order.len(), 1000);
    // While the one that came later has something to do, so has the other one.
    let first = order.iter().position(|&file| file == 1).unwrap();
    let last = order.iter().rposition(|&file| file == 1).unwrap();
    let runs = order[first..=last].chunk_by(|a, b| a == b);
    let longest = runs.map(<[u32]>::len).max().unwrap();
    println!("at most {longest} operations of one disk in a row");
    // Two turns: when there is room for one operation only, each disk gets it every other time.
    assert!(longest <= 2 * TURN_MAX, "{longest}");
}

/// A guest whose buffers all have to be copied has more requests than there are bounce buffers; its neighbour gets one
/// all the same.
#[test]
fn disks_share_bounce_buffers() {
    let facts = DiskFacts {
        address_alignment: 512,
        length_alignment: 512,
        ..FACTS
    };
    let faults = Faults {
        room: 512,
        address_alignment: 512,
        length_alignment: 512,
        ..FAULTS
    };
    let (bytes, _served, mut devices) = neighbours(faults, facts, 200);
    let mut heads = Vec::new();
    for (device, requests) in devices.iter_mut().zip([200, 20]) {
        let memory = device.memory.clone();
        let queue = &mut device.queues[0];
        let first = queue.first_free_desc();
        let place = |i: u16| {
            let (from, to) = (
                queue.buffer(0) + 16 * u64::from(i),
                queue.buffer(i) + 4096 + 1,
            );
            let (layout, header) = (Layout::default(), header(0, u64::from(i)));
            let chain = Chain::request(&memory, &layout, from, &header, to, 513);
            (chain, first + 2 * i)
        };
        let chains: Vec<_> = (0..requests).map(place).collect();
        for (chain, at) in &chains {
            chain.place(Table::Direct, &mut queue.ring, *at, &memory, 0);
        }
        heads.push(chains.iter().map(|c| c.1).collect::<Vec<_>>());
    }
    for (device, heads) in devices.iter_mut().zip(&heads) {
        device.queues[0].ring.publish(heads.iter().copied());
    }
    for (device, heads) in devices.iter_mut().zip(&heads) {
        for _ in heads {
            assert!(device.queues[0].ring.next_used(HANG).is_some());
        }
    }
    let bytes = bytes.lock().unwrap();
    assert_eq!(bytes.mistakes, [""; 0]);
    // From when it came on, the quiet one was served as often as the busy one, but for what was under way.
    let quiet: Vec<usize> = (0..220).filter(|&i| bytes.submitted[i] == 1).collect();
    let of_busy = quiet[19] - quiet[0] - 19;
    println!("{of_busy} operations of the busy disk among 20 of the quiet one");
    assert!(of_busy <= 64, "{of_busy}");
}

/// A dirty log's event is written to when something was marked, and not in each turn that the thread makes for others.
#[test]
fn the_dirty_log_is_signalled_only_after_a_mark() {
    let faults = Faults {
        late: 0,
        room: 512,
        ..FAULTS
    };
    let (_bytes, _served, mut devices) = neighbours(faults, FACTS, 800);
    let memory = Memory::new(&[(0, 1 << 20)]).unwrap();
    let event = eventfd().unwrap();
    let [busy, quiet] = &mut devices[..] else {
        panic!("two of them");
    };
    let log = &memory.regions()[0];
    quiet.frontend.set_log(log, event.as_fd()).unwrap();
    let features = quiet.features | F_LOG_ALL;
    quiet.frontend.set_features(features).unwrap();
    assert_eq!(quiet.queues[0].run(Op::Read, 0, 512), OK);
    assert!(eventfd_wait(&event, Some(HANG)).unwrap());
    let slots: Vec<u16> = (0..800).collect();
    for &slot in &slots {
        busy.queues[0].prepare(slot, Op::Read, u64::from(slot), 512);
    }
    let rounds = 20;
    for _ in 0..rounds {
        quiet.queues[0].prepare(0, Op::Read, 0, 512);
        quiet.queues[0].submit(&[0]);
        busy.queues[0].submit(&slots);
        busy.queues[0].finish(slots.len());
        quiet.queues[0].finish(1);
    }
    let mut interrupts = [0; 8];
    rustix::io::read(&event, &mut interrupts).unwrap();
    let interrupts = u64::from_ne_bytes(interrupts);
    println!("{interrupts} interrupts in {rounds} rounds");
    // With each request, and as its ring is left alone and looked at again.
    assert!(interrupts <= 4 * rounds, "{interrupts}");
}
