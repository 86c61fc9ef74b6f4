//! Guest memory pinned by `fixed-buffers=on`.

use super::*;

#[test]
fn pinned_memory_transfers_correct_data() {
    for cache in ["none", "writeback"] {
        for queues in [1, 4] {
            let (server, disk) = serve(&format!(
                "cache={cache},queues={queues},queue-size=128,fixed-buffers=on"
            ));
            for indirect in [false, true] {
                let config = DeviceConfig {
                    queues,
                    queue_size: 128,
                    indirect,
                    ..DeviceConfig::default()
                };
                // Each round is a reconnecting front-end.
                let mut device = Device::connect(server.socket(), &config).unwrap();
                assert!(pinned(&server) > 0, "no memory is pinned");
                thread::scope(|scope| {
                    for queue in &mut device.queues {
                        scope.spawn(|| rewrite(queue, &disk));
                    }
                });
            }
            assert!(!server.log().contains("cannot be pinned"));
            // A session's pinned memory is released with it.
            let start = Instant::now();
            while pinned(&server) > 0 {
                assert!(start.elapsed() < HANG, "memory stays pinned");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
    let (server, _disk) = serve("");
    let _device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_eq!(
        pinned(&server),
        0,
        "memory is pinned without fixed-buffers=on"
    );
}

/// KiB of memory pinned by the server.
fn pinned(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmPin:"));
    let number = line.and_then(|l| l.split_whitespace().next());
    number.expect("VmPin").parse().unwrap()
}

/// Writes to an area that no other queue uses, and reads it back in the guest and on the host.
fn rewrite(queue: &mut Queue, disk: &Disk) {
    const LEN: usize = 32 << 10;
    let area = u64::from(queue.index) * 4096;
    let place = |slot: u16| area + u64::from(slot) * 64;
    let slots: Vec<u16> = (0..queue.slots()).collect();
    // The last round restores the content.
    for shift in [5, 77, 0] {
        for op in [Op::Write, Op::Read] {
            for &slot in &slots {
                let bytes = match op {
                    Op::Write => content(place(slot) + shift, LEN),
                    _ => vec![0xa5; LEN],
                };
                queue.write_buffer(slot, &bytes);
                queue.prepare(slot, op, place(slot), LEN as u32);
            }
            queue.submit(&slots);
            for (slot, status) in queue.finish(slots.len()) {
                assert_eq!(status, OK, "{op:?} in slot {slot}");
                let right = content(place(slot) + shift, LEN);
                assert!(queue.read_buffer(slot, LEN) == right, "{op:?}, {slot}");
            }
            assert_eq!(queue.run(Op::Flush, 0, 0), OK);
        }
        for &slot in &slots {
            let right = content(place(slot) + shift, LEN);
            assert!(disk.bytes(place(slot), LEN) == right, "on the host");
        }
    }
}

#[test]
fn pinned_memory_regions_come_and_go() {
    let (server, disk) = serve("queues=2,fixed-buffers=on");
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(server.socket(), &config).unwrap();
    let mut busy = device.queues.remove(1);
    let memory = device.memory.clone();
    let spare = &memory.regions()[Device::SPARE];
    let low = &memory.regions()[Device::LOW];
    let header_at = low.end() - (16 << 10);
    let before = pinned(&server);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                rewrite(&mut busy, &disk);
            }
        });
        for round in 0..20 {
            device.frontend.add_mem_reg(spare).unwrap();
            assert!(pinned(&server) > before, "round {round}");
            // Into the new region, and across the border between two old ones.
            for to in [spare.gpa + 0x1000, low.gpa - 2048] {
                let got = read_to(&mut device, header_at, to);
                assert!(got == [content(8, 4096), vec![OK]].concat(), "{to:#x}");
            }
            device.frontend.rem_mem_reg(spare).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(pinned(&server), before, "a region that went stays pinned");
    let all: Vec<_> = memory.regions().iter().collect();
    device.frontend.set_mem_table(&all).unwrap();
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), content(8, 4096));
    drop(device);
    assert_serves(&disk.socket);
    assert!(!server.log().contains("cannot be pinned"));
}

/// Reads 4096 bytes at sector 8 into guest memory; returns them and the status.
fn read_to(device: &mut Device, header_at: u64, to: u64) -> Vec<u8> {
    let layout = Layout {
        readable: vec![16],
        writable: vec![4096],
        ..Layout::default()
    };
    let (memory, queue) = (&device.memory, &mut device.queues[0]);
    let request = header(VIRTIO_BLK_T_IN, 8);
    let chain = Chain::request(memory, &layout, header_at, &request, to, 4097);
    let table = memory.regions()[Device::RINGS].end() - 4096;
    let head = chain.place(layout.table, &mut queue.ring, 0, memory, table);
    queue.ring.publish([head]);
    let used = queue.ring.next_used(HANG).expect("the request completes");
    assert_eq!(used.id, u32::from(head));
    chain.written(memory)
}

/// A balloon returns a page to the host by punching it out of guest memory, and the guest gets a new page when it
/// writes there again. The pinned page is the old one, which is why memory is pinned only on request.
#[test]
fn page_replaced_by_a_balloon_is_written_as_the_guest_sees_it() {
    const LEN: usize = 4096;
    for fixed in ["off", "on"] {
        let (_server, disk) = serve(&format!("fixed-buffers={fixed}"));
        let mut device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
        let low = &device.memory.regions()[Device::LOW];
        let queue = &mut device.queues[0];
        let (old, new) = (content(1000, LEN), content(2000, LEN));
        assert_eq!(queue.write(0, &old), OK);
        assert!(disk.bytes(0, LEN) == old);

        let at = low.mmap_offset + queue.buffer(0) - low.gpa;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&low.file, hole, at, LEN as u64).unwrap();
        assert!(queue.read_buffer(0, LEN) == vec![0; LEN]);
        assert_eq!(queue.write(0, &new), OK);
        let on_disk = disk.bytes(0, LEN);
        let seen = match on_disk {
            bytes if bytes == new => "what the guest wrote",
            bytes if bytes == old => "what was in the page before the guest gave it away",
            bytes if bytes == vec![0; LEN] => "zeroes",
            _ => "something else",
        };
        println!("fixed-buffers={fixed}: the disk has {seen}");
        // With pinning on, the result depends on the page size that the kernel chooses.
        if fixed == "off" {
            assert_eq!(seen, "what the guest wrote");
        }
    }
}
