//! Guests that flood, write garbage, and change or lose their memory while it is used.

use super::*;

#[test]
fn guest_cannot_flood_the_log() {
    let (server, _disk) = serve("queues=2");
    let config = DeviceConfig {
        queues: 2,
        slots: 1,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(server.socket(), &config).unwrap();
    for _ in 0..300 {
        let queue = &mut device.queues[0];
        assert_eq!(queue.run(Op::Read, END, 512), IOERR);
        queue.ring.publish([u16::MAX]);
        assert!(queue.ring.broken(HANG));
        let base = device.stop_queue(0).unwrap();
        device.start_queue(0, base).unwrap();
    }
    server.wait_for_log(&["refused request"]);
    let log = server.log();
    assert!(
        log.lines().count() < 100,
        "600 bad requests led to {} lines of log",
        log.lines().count()
    );
}

#[test]
fn garbage_in_the_ring() {
    let seed = seed();
    let (victim, other) = (Disk::new(), Disk::new());
    let server = serve_all(&[victim.argument("queues=2"), other.argument("")]);
    let mut bystander = Device::connect(&other.socket, &DeviceConfig::default()).unwrap();
    let config = DeviceConfig {
        queues: 2,
        slots: 1,
        queue_size: 16,
        ..DeviceConfig::default()
    };
    let device = RefCell::new(Device::connect(server.socket(), &config).unwrap());
    let low = device.borrow().memory.regions()[Device::LOW].gpa;
    // Not in the rings' region: the device could rightfully write there.
    let addr = prop_oneof![8 => (0..0x8000u64).prop_map(move |at| low + at), 1 => any::<u64>()];
    let len = prop_oneof![4 => Just(16u32), 4 => Just(1), 4 => 0..2048u32, 1 => any::<u32>()];
    let flags = prop_oneof![8 => 0..4u16, 2 => 0..8u16, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0..16u16, 1 => any::<u16>()];
    let desc = (addr, len, flags, next).prop_map(|(addr, len, flags, next)| Desc {
        addr,
        len,
        flags,
        next,
    });
    let descs = proptest::collection::vec(desc, 64);
    let heads = proptest::collection::vec(prop_oneof![9 => 0..16u16, 1 => any::<u16>()], 1..8);
    let kind = prop_oneof![8 => 0..16u32, 1 => any::<u32>()];
    let run = Config {
        cases: 2000,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..Config::default()
    };
    let result = TestRunner::new(run).run(
        &(descs, heads, kind, 0..END + 8),
        |(descs, heads, kind, sector)| {
            let device = &mut *device.borrow_mut();
            for at in (0..0x8000).step_by(0x400) {
                // Every buffer starts with something like a header, every table with something like descriptors.
                device.memory.write(low + at, &header(kind, sector));
            }
            let tables = descs[16..].iter().flat_map(Desc::bytes).collect::<Vec<_>>();
            device.memory.write(low + 0x2000, &tables);
            let ring = &mut device.queues[0].ring;
            (0..16).zip(&descs).for_each(|(i, d)| ring.set_desc(i, *d));
            ring.publish(heads);
            let base = device
                .stop_queue(0)
                .map_err(|e| TestCaseError::fail(e.to_string()))?;
            device
                .start_queue(0, base)
                .map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(device.queues[1].run(Op::Read, 8, 4096), OK);
            Ok(())
        },
    );
    result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    assert_reads(&mut bystander, 0);
}

/// A guest changes headers and tables while the device reads them: the device must use exactly the values it has
/// checked.
#[test]
fn memory_changing_under_the_device() {
    let (server, _disk) = serve("queues=2");
    let config = DeviceConfig {
        queues: 2,
        slots: 1,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(server.socket(), &config).unwrap();
    let at = device.memory.regions()[Device::LOW].alloc(0x9000, 4096);
    let stop = AtomicBool::new(false);
    let memory = device.memory.clone();
    thread::scope(|scope| {
        scope.spawn(|| {
            let evil = [
                desc(1 << 60, u32::MAX, W),
                desc(at, 16, Desc::INDIRECT),
                desc(at, 0, 0),
            ];
            let good = Chain {
                buffers: vec![
                    desc(at, 16, 0),
                    desc(at + 0x1000, 4096, W),
                    desc(at + STATUS, 1, W),
                ],
            };
            for round in (0u64..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                good.indirect(&memory, at + TABLE);
                memory.write(at, &header((round % 3) as u32, round % (END + 9)));
                memory.write(
                    at + TABLE + 16 * (round % 3),
                    &evil[(round / 3 % 3) as usize].bytes(),
                );
            }
        });
        for _ in 0..20_000 {
            let queue = &mut device.queues[0];
            let first = queue.first_free_desc();
            queue
                .ring
                .set_desc(first, desc(at + TABLE, 48, Desc::INDIRECT));
            queue.ring.publish([first]);
            let start = Instant::now();
            while !queue.ring.has_used() {
                if queue.ring.broken(Duration::ZERO) {
                    let base = device.stop_queue(0).unwrap();
                    device.start_queue(0, base).unwrap();
                    break;
                }
                assert!(start.elapsed() < HANG, "neither completed nor retired");
            }
            device.queues[0].ring.take_used(|_| {});
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(device.queues[1].run(Op::Read, 8, 4096), OK);
}

/// A front-end truncates the memory of running rings. For data, the kernel returns EFAULT; the device reads the rings
/// itself.
#[test]
fn truncated_memory() {
    let (mut server, _disk) = serve("");
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let memory = device.memory.clone();
    rustix::fs::ftruncate(&memory.regions()[Device::LOW].file, 4096).unwrap();
    assert_eq!(device.queues[0].run(Op::Read, 8, 4096), IOERR);
    rustix::fs::ftruncate(&memory.regions()[Device::RINGS].file, 4096).unwrap();
    device.queues[0].ring.kick();
    device.queues[0].ring.broken(QUIET_PERIOD);
    assert!(server.is_running());
    assert_reads(
        &mut Device::connect(server.socket(), &DeviceConfig::default()).unwrap(),
        0,
    );
}
