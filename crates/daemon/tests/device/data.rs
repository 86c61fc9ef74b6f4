//! Reads, writes, discards and zeroes in every layout: the right bytes, also at the edges.

use super::*;

#[test]
fn queues_and_ring_modes() {
    for cache in ["none", "writeback"] {
        for queues in 1..=4 {
            let (server, disk) = serve(&format!("cache={cache},queues={queues},queue-size=128"));
            for mode in 0..8 {
                let config = DeviceConfig {
                    queues,
                    queue_size: 128,
                    indirect: mode & 1 != 0,
                    event_idx: mode & 2 != 0,
                    packed: mode & 4 != 0,
                    ..DeviceConfig::default()
                };
                let mut device = connect(&server, config);
                thread::scope(|scope| {
                    for queue in &mut device.queues {
                        scope.spawn(|| read_write_flush(queue, &disk));
                    }
                });
            }
        }
    }
}

/// Rewrites an area of the disk that no other queue uses, and restores it.
pub fn read_write_flush(queue: &mut Queue, disk: &Disk) {
    let area = u64::from(queue.index) * 4096;
    let slots: Vec<u16> = (0..queue.slots()).collect();
    for (op, shift) in [
        (Op::Write, 99),
        (Op::Read, 99),
        (Op::Write, 0),
        (Op::Read, 0),
    ] {
        for &slot in &slots {
            let sector = area + u64::from(slot) * 64;
            let bytes = content(sector + shift, 32 << 10);
            queue.write_buffer(
                slot,
                if op == Op::Write {
                    &bytes
                } else {
                    &[0; 32 << 10]
                },
            );
            queue.prepare(slot, op, sector, 32 << 10);
        }
        queue.submit(&slots);
        for (slot, status) in queue.finish(slots.len()) {
            let sector = area + u64::from(slot) * 64;
            assert_eq!(status, OK, "{op:?} at sector {sector}");
            assert!(
                queue.read_buffer(slot, 32 << 10) == content(sector + shift, 32 << 10),
                "{op:?} at {sector}"
            );
        }
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
        for sector in slots.iter().map(|&slot| area + u64::from(slot) * 64) {
            assert!(
                disk.bytes(sector, 32 << 10) == content(sector + shift, 32 << 10),
                "{op:?} at {sector}, on the host"
            );
        }
    }
}

#[test]
fn no_access_beyond_the_last_sector() {
    for cache in ["none", "writeback"] {
        let (server, disk) = serve(&format!("cache={cache}"));
        let mut device = connect(&server, DeviceConfig::default());
        let (queue, end) = (&mut device.queues[0], DISK_BYTES / 512);
        assert_eq!(queue.read(end - 8, 4096).unwrap(), content(end - 8, 4096));
        assert_eq!(queue.write(end - 8, &content(5, 4096)), OK);
        assert_eq!(disk.bytes(end - 8, 4096), content(5, 4096));
        assert_eq!(queue.read(end, 4096), Err(IOERR));
        assert_eq!(queue.write(end, &content(5, 4096)), IOERR);
        assert_eq!(
            disk.file.metadata().unwrap().len(),
            DISK_BYTES,
            "no write may make the file longer"
        );
    }
}

#[test]
fn several_disks_in_one_process() {
    let disks: Vec<Disk> = (0..3).map(|_| Disk::new()).collect();
    let server = serve_all(
        &disks
            .iter()
            .map(|d| d.argument("queues=2"))
            .collect::<Vec<_>>(),
    );
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let open = |socket| Device::connect(socket, &config).unwrap();
    let mut devices: Vec<Device> = server.sockets.iter().map(open).collect();
    for (number, device) in (1..).zip(&mut devices) {
        for queue in &mut device.queues {
            let sector = u64::from(queue.index) * 8;
            assert_eq!(
                queue.write(sector, &content(1000 * number + sector, 4096)),
                OK
            );
        }
    }
    for (number, (device, disk)) in (1..).zip(devices.iter_mut().zip(&disks)) {
        for sector in [0, 8] {
            assert_eq!(
                device.queues[0].read(sector, 4096).unwrap(),
                content(1000 * number + sector, 4096)
            );
            assert_eq!(
                disk.bytes(sector, 4096),
                content(1000 * number + sector, 4096)
            );
        }
    }
}

#[test]
fn every_descriptor_layout() {
    for (cache, packed) in [("none", false), ("writeback", false), ("none", true)] {
        let (server, disk) = serve(&format!("cache={cache}"));
        let mut device = connect(
            &server,
            DeviceConfig {
                slots: 1,
                packed,
                ..DeviceConfig::default()
            },
        );
        let regions = device.memory.regions();
        let border = regions[Device::HIGH].gpa;
        assert_eq!(border, regions[Device::LOW].end());
        // Bouncing for O_DIRECT depends on the alignment of buffers. Some buffers cross two regions, with a descriptor,
        // a sector or the status at the border.
        let aligned = regions[Device::LOW].alloc(1 << 16, 4096);
        for (from, to) in [
            (aligned, aligned + 0x8000),
            (aligned + 0x1001, aligned + 0x8203),
            (border - 2048, aligned),
            (border - 7, aligned + 512),
            (aligned, border - 2048),
            (aligned, border - 4096),
            (aligned, border - 4095),
        ] {
            for (name, layout) in legal_layouts() {
                if packed && matches!(layout.table, Table::Mixed(_)) {
                    continue; // which is what virtio 1.3 §2.8.19 forbids
                }
                let bytes = content(border + from + to, 4096);
                let write = [header(VIRTIO_BLK_T_OUT, 16), bytes.clone()].concat();
                assert_eq!(
                    run_chain(&mut device, &layout, (from, &write), (to, 1)),
                    [OK],
                    "write, {name}, {cache}"
                );
                assert!(
                    disk.bytes(16, 4096) == bytes,
                    "write, {name}, {cache}, {from:#x}"
                );
                let read = header(VIRTIO_BLK_T_IN, 16);
                let got = run_chain(&mut device, &layout, (from, &read), (to, 4097));
                assert!(
                    got == [bytes, vec![OK]].concat(),
                    "read, {name}, {cache}, {to:#x}"
                );
            }
        }
    }
}

/// Runs a request of any shape on queue 0, with `readable` bytes at one address and writable space at another. Returns
/// what the device wrote.
pub fn run_chain(
    device: &mut Device,
    layout: &Layout,
    readable: (u64, &[u8]),
    writable: (u64, u32),
) -> Vec<u8> {
    let (memory, queue) = (&device.memory, &mut device.queues[0]);
    let chain = Chain::request(
        memory, layout, readable.0, readable.1, writable.0, writable.1,
    );
    // This overwrites the slots' descriptors, which are rebuilt before they are used again.
    let table = memory.regions()[Device::RINGS].end() - 4096;
    let head = chain.place(layout.table, &mut queue.ring, 0, memory, table);
    queue.ring.publish([head]);
    let used = queue.ring.next_used(HANG).expect("the request completes");
    assert_eq!(used.id, u32::from(head));
    assert!(
        used.len <= writable.1,
        "{used:?} for {} writable bytes",
        writable.1
    );
    chain.written(memory)
}

#[test]
fn largest_and_most_scattered_requests() {
    for (cache, packed) in [("none", false), ("writeback", false), ("none", true)] {
        let (server, disk) = serve(&format!("cache={cache},queue-size=128"));
        let config = DeviceConfig {
            queue_size: 128,
            buffer_len: 1 << 20,
            packed,
            ..DeviceConfig::default()
        };
        let mut device = connect(&server, config);
        let segments = device.config().unwrap().seg_max as usize;
        let len = segments * 512;
        let low = device.memory.regions()[Device::LOW].alloc(1 << 20, 4096);
        // Aligned and misaligned, in the ring and in a table, which may be longer than the ring.
        for (shift, table) in [
            (0, Table::Direct),
            (0, Table::Indirect),
            (3, Table::Indirect),
        ] {
            let cuts: Vec<u32> = [16].into_iter().chain((1..segments).map(|_| 512)).collect();
            let layout = Layout {
                readable: cuts.clone(),
                writable: cuts[1..].to_vec(),
                gap: 32 * shift,
                table,
            };
            let bytes = content(shift + 5, len);
            let write = [header(VIRTIO_BLK_T_OUT, 64), bytes.clone()].concat();
            let got = run_chain(
                &mut device,
                &layout,
                (low + shift, &write),
                (low + 0x8_0000, 1),
            );
            assert_eq!(got, [OK], "{table:?}, cache={cache}");
            assert!(disk.bytes(64, len) == bytes, "{table:?}, cache={cache}");
            let read = header(VIRTIO_BLK_T_IN, 64);
            let layout = Layout {
                writable: [&cuts[1..], &[512]].concat(),
                ..layout
            };
            let got = run_chain(
                &mut device,
                &layout,
                (low, &read),
                (low + 4096 + shift, len as u32 + 1),
            );
            assert!(
                got == [bytes, vec![OK]].concat(),
                "{table:?}, cache={cache}"
            );
        }
        // More data at once than any bounce buffer pool holds, all of it misaligned.
        let queue = &mut device.queues[0];
        let slots: Vec<u16> = (0..queue.slots()).collect();
        let (memory, free) = (&device.memory, queue.first_free_desc());
        let mut chains = Vec::new();
        for &slot in &slots {
            let (sector, data) = (1024 * u64::from(slot), queue.buffer(slot) + 1);
            let (request, table) = (
                low + 0x1000 * u64::from(slot),
                low + 0x1000 * u64::from(slot) + 0x800,
            );
            let layout = Layout {
                writable: vec![512 << 10],
                table: Table::Indirect,
                ..Layout::default()
            };
            let chain = Chain::request(
                memory,
                &layout,
                request,
                &header(VIRTIO_BLK_T_IN, sector),
                data,
                (512 << 10) + 1,
            );
            chains.push((
                sector,
                chain.place(layout.table, &mut queue.ring, free + slot, memory, table),
                chain,
            ));
        }
        queue.ring.publish(chains.iter().map(|(_, head, _)| *head));
        for _ in &chains {
            let used = queue.ring.next_used(HANG).expect("the request completes");
            let (sector, _, chain) = chains
                .iter()
                .find(|(_, head, _)| u32::from(*head) == used.id)
                .unwrap();
            assert!(
                chain.written(memory) == [disk.bytes(*sector, 512 << 10), vec![OK]].concat(),
                "cache={cache}"
            );
        }
    }
}

#[test]
fn full_file_system_fails_the_write_and_serving_continues() {
    let Some(backing) = LoopDevice::new() else {
        return;
    };
    let Some(mount) = backing.mount() else { return };
    let file = mount.join("disk.raw");
    std::fs::File::create(&file)
        .unwrap()
        .set_len(1 << 30)
        .unwrap();
    for cache in ["none", "writeback"] {
        let socket = backing.dir.path().join("disk.sock");
        let mut server = serve_all(&[format!(
            "file={},socket={},cache={cache},werror=report",
            file.display(),
            socket.display()
        )]);
        let mut device = connect(&server, DeviceConfig::default());
        let queue = &mut device.queues[0];
        let writes = (0..).map(|at| (at, queue.write(at * 256, &content(at, 128 << 10))));
        let (full, status) = writes
            .take(8192)
            .find(|(_, status)| *status != OK)
            .expect("64 MiB hold no GiB");
        assert_eq!(status, IOERR);
        assert_eq!(
            queue.read(0, 4096).unwrap(),
            content(0, 4096),
            "cache={cache}, after {full} writes"
        );
        assert_eq!(queue.run(Op::Discard, 0, 32 << 20), OK);
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
        assert_eq!(queue.write(0, &content(3, 4096)), OK, "there is room again");
        // As much at once as the configuration space allows.
        for quarter in 0..4 {
            let sector = quarter * (256 << 20) / 512;
            assert_eq!(queue.run(Op::Discard, sector, 256 << 20), OK);
        }
        assert!(server.terminate().unwrap().success());
    }
}

#[test]
fn block_device_with_4096_byte_sectors() {
    let Some(backing) = LoopDevice::with_sectors(4096) else {
        return;
    };
    for cache in ["none", "writeback"] {
        let socket = backing.dir.path().join("disk.sock");
        let arg = format!(
            "file={},socket={},cache={cache}",
            backing.device.display(),
            socket.display()
        );
        let mut server = serve_all(&[arg]);
        let mut device = connect(&server, DeviceConfig::default());
        let config = device.config().unwrap();
        assert_eq!(
            config.capacity,
            (64 << 20) / 512,
            "in sectors of 512 bytes, whatever the device has"
        );
        let queue = &mut device.queues[0];
        if config.blk_size == 4096 {
            assert_eq!(queue.read(0, 512), Err(IOERR));
            assert_eq!(queue.write(1, &content(0, 4096)), IOERR);
        }
        assert_eq!(queue.write(8, &content(8, 8192)), OK);
        assert_eq!(queue.read(8, 8192).unwrap(), content(8, 8192));
        assert_eq!(queue.run(Op::WriteZeroes { unmap: false }, 8, 4096), OK);
        assert_eq!(
            queue.read(8, 8192).unwrap(),
            [vec![0; 4096], content(16, 4096)].concat()
        );
        assert_eq!(queue.run(Op::WriteZeroes { unmap: true }, 16, 4096), OK);
        assert_eq!(queue.read(8, 8192).unwrap(), vec![0; 8192]);
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
        if device.features & 1 << VIRTIO_BLK_F_DISCARD != 0 {
            let blocks = || {
                std::fs::metadata(backing.dir.path().join("backing"))
                    .unwrap()
                    .blocks()
            };
            assert_eq!(device.queues[0].write(0, &content(0, 128 << 10)), OK);
            assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
            let before = blocks();
            assert_eq!(device.queues[0].run(Op::Discard, 0, 128 << 10), OK);
            assert!(
                blocks() <= before - 256,
                "cache={cache}: {} of {before} blocks",
                blocks()
            );
        }
        assert!(server.terminate().unwrap().success());
    }
}

#[test]
fn discard_and_write_zeroes_punch_holes() {
    let (server, disk) = serve("");
    let mut device = connect(&server, DeviceConfig::default());
    let queue = &mut device.queues[0];
    let blocks = || std::fs::metadata(&disk.file).unwrap().blocks();
    let (all, zeroes) = (blocks(), vec![0; 128 << 10]);

    assert_eq!(
        queue.run(Op::WriteZeroes { unmap: false }, 2048, 1 << 20),
        OK
    );
    assert_eq!(queue.read(2048, 128 << 10).unwrap(), zeroes);
    assert!(
        blocks() >= all,
        "zeroes without unmap stay allocated: {} of {all} blocks",
        blocks()
    );

    assert_eq!(
        queue.run(Op::WriteZeroes { unmap: true }, 4096, 1 << 20),
        OK
    );
    assert_eq!(queue.read(4096, 128 << 10).unwrap(), zeroes);
    assert!(
        blocks() <= all - 2048,
        "zeroes with unmap are a hole: {} of {all} blocks",
        blocks()
    );

    assert_eq!(queue.run(Op::Discard, 6144, 1 << 20), OK);
    assert!(
        blocks() <= all - 4096,
        "a discarded range is a hole: {} of {all} blocks",
        blocks()
    );

    // A range that is not a whole block of the file system is zeroed as well, and nothing beside it.
    assert_eq!(
        queue.run(Op::WriteZeroes { unmap: true }, 8193, 4096 + 512),
        OK
    );
    let expected = [content(8192, 512), vec![0; 4608], content(8202, 512)].concat();
    assert_eq!(queue.read(8192, 5632).unwrap(), expected);
    for edge in [2047, 4096 - 1, 4096 + 2048, 6143, 8192 + 2048] {
        let zero = [2048..4096u64, 4096..6144, 6144..8192]
            .iter()
            .any(|r| r.contains(&edge));
        let expected = if zero {
            vec![0; 512]
        } else {
            content(edge, 512)
        };
        assert!(
            edge == 6144 || queue.read(edge, 512).unwrap() == expected,
            "sector {edge}"
        );
    }
    assert_eq!(std::fs::metadata(&disk.file).unwrap().len(), DISK_BYTES);
}

#[test]
fn discard_and_write_zeroes_ranges_are_checked() {
    let (server, disk) = serve("");
    let mut device = connect(
        &server,
        DeviceConfig {
            slots: 1,
            ..DeviceConfig::default()
        },
    );
    let at = device.memory.regions()[Device::LOW].alloc(8192, 512);
    let config = device.config().unwrap();
    let end = DISK_BYTES / 512;
    let (discard, zeroes) = (VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES);
    let too_many = vec![segment(0, 8, 0); config.max_discard_seg as usize + 1].concat();
    for (name, kind, payload, expected) in [
        (
            "behind the end",
            discard,
            segment(end, 8, 0).to_vec(),
            IOERR,
        ),
        (
            "over the end",
            zeroes,
            segment(end - 1, 8, 0).to_vec(),
            IOERR,
        ),
        ("overflow", zeroes, segment(u64::MAX, 8, 0).to_vec(), IOERR),
        (
            "overflow in bytes",
            discard,
            segment(u64::MAX / 512 + 1, 8, 0).to_vec(),
            IOERR,
        ),
        (
            "longer than the maximum",
            zeroes,
            segment(0, u32::MAX, 0).to_vec(),
            IOERR,
        ),
        (
            "unmap in a discard",
            discard,
            segment(0, 8, 1).to_vec(),
            UNSUPP,
        ),
        (
            "unknown flag in a discard",
            discard,
            segment(0, 8, 2).to_vec(),
            UNSUPP,
        ),
        (
            "unknown flag in write zeroes",
            zeroes,
            segment(0, 8, 1 << 31).to_vec(),
            UNSUPP,
        ),
        (
            "half a segment",
            zeroes,
            segment(0, 8, 0)[..8].to_vec(),
            IOERR,
        ),
        ("no segment", discard, vec![], IOERR),
        (
            "a segment and a half",
            zeroes,
            [segment(0, 8, 0).to_vec(), vec![0; 8]].concat(),
            UNSUPP,
        ),
        ("too many to discard", discard, too_many.clone(), UNSUPP),
        ("too many to zero", zeroes, too_many, UNSUPP),
        (
            "too many segments, one of them behind the end",
            zeroes,
            [segment(0, 8, 0), segment(end, 8, 0)].concat(),
            UNSUPP,
        ),
    ] {
        let request = [header(kind, 0), payload].concat();
        let layout = Layout {
            readable: vec![16],
            ..Layout::default()
        };
        assert_eq!(
            run_chain(&mut device, &layout, (at, &request), (at + 4096, 1)),
            [expected],
            "{name}"
        );
    }
    assert_eq!(disk.bytes(0, 8192), content(0, 8192));
    assert_eq!(disk.bytes(end - 8, 4096), content(end - 8, 4096));
}

#[test]
fn ring_indices_wrap_around() {
    for (indirect, event_idx, packed) in [
        (false, true, false),
        (true, false, false),
        (false, true, true),
        (true, true, true),
    ] {
        let (server, _disk) = serve("queue-size=16");
        let slots = if indirect { 16 } else { 5 };
        let config = DeviceConfig {
            queue_size: 16,
            slots,
            buffer_len: 512,
            indirect,
            event_idx,
            packed,
            ..Default::default()
        };
        let mut device = connect(&server, config);
        let queue = &mut device.queues[0];
        let mut ready: Vec<u16> = (0..slots).collect();
        let (mut submitted, mut done) = (0u32, 0);
        while done < 70_000 {
            for &slot in &ready {
                queue.prepare(slot, Op::Read, u64::from(submitted % 999), 512);
                queue.write_buffer(slot, &[0]);
                submitted += 1;
            }
            queue.submit(&ready);
            ready.clear();
            for (slot, status) in queue.finish(1) {
                assert_eq!(status, OK);
                assert_ne!(
                    queue.read_buffer(slot, 1),
                    [0],
                    "read did not reach slot {slot}"
                );
                ready.push(slot);
                done += 1;
            }
        }
    }
}
