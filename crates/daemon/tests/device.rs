//! The disk that a guest sees: every feature bit of the device and of the vhost-user session, through a driver that was
//! written from the specifications.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use rustix::process::Signal;
use testkit::chain::{Chain, Layout, Table, header, legal_layouts};
use testkit::driver::{Device, DeviceConfig, DiskConfig, HANG, Op, Queue, segment};
use testkit::frontend::{F_PROTOCOL_FEATURES, Frontend, RingAddresses, message, protocol};
use testkit::server::Server;
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

#[path = "support/loop_device.rs"]
mod loop_device;
mod support;
use loop_device::LoopDevice;
use support::{DISK_BYTES, Disk, content, seed, serve, serve_all};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;
/// Long enough for anything to happen that should not happen.
const A_WHILE: Duration = Duration::from_millis(200);

fn connect(server: &Server, config: DeviceConfig) -> Device {
    Device::connect(server.socket(), &config).unwrap()
}

// Features and config space

#[test]
fn offers_what_it_promises() {
    let (server, _disk) = serve("queues=4,queue-size=512");
    let mut frontend = Frontend::connect(server.socket()).unwrap();
    let features = frontend.features().unwrap();
    for bit in [
        VIRTIO_F_VERSION_1,
        VIRTIO_F_RING_PACKED,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_CONFIG_WCE,
        VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_DISCARD,
        VIRTIO_BLK_F_WRITE_ZEROES,
    ] {
        assert!(
            features & 1 << bit != 0,
            "feature bit {bit} is missing in {features:#x}"
        );
    }
    assert!(
        features & 1 << VIRTIO_BLK_F_RO == 0 && features & F_PROTOCOL_FEATURES != 0,
        "{features:#x}"
    );
    assert_eq!(
        frontend.protocol_features().unwrap() & protocol::ALL,
        protocol::ALL
    );
    assert_eq!(frontend.queue_num().unwrap(), 4);
    assert!(frontend.max_mem_slots().unwrap() >= 32);
}

#[test]
fn config_space_tells_the_facts_of_the_disk() {
    let (server, disk) = serve("queues=3,queue-size=128,cache=writeback");
    let mut device = connect(
        &server,
        DeviceConfig {
            queue_size: 128,
            ..DeviceConfig::default()
        },
    );
    let config = device.config().unwrap();
    assert_eq!(config.capacity, DISK_BYTES / 512);
    assert_eq!((config.wce, config.num_queues), (1, 3));
    // Without indirect descriptors a request has a header and a status besides its segments.
    assert!((1..=126).contains(&config.seg_max), "{config:?}");
    assert_eq!(config.blk_size, 512, "the page cache takes any sector");
    let physical = config.blk_size << config.physical_block_exp;
    assert!(
        physical.is_power_of_two()
            && u64::from(physical) <= disk.file.metadata().unwrap().blksize(),
        "{config:?}"
    );
    assert!(
        config.max_discard_sectors >= 2048 && config.max_discard_seg >= 1,
        "{config:?}"
    );
    assert!(config.discard_sector_alignment >= 1, "{config:?}");
    assert!(
        config.max_write_zeroes_sectors >= 2048 && config.max_write_zeroes_seg >= 1,
        "{config:?}"
    );
    assert_eq!(config.write_zeroes_may_unmap, 1, "{config:?}");
    // Any part of it can be read.
    assert_eq!(device.frontend.config(4, 9).unwrap().len(), 9);
    assert_eq!(
        device.frontend.config(0, 256).unwrap()[..8],
        (DISK_BYTES / 512).to_le_bytes()
    );
}

#[test]
fn the_cache_mode_says_whether_there_is_a_write_cache_at_first() {
    for (cache, wce) in [
        ("none", 1),
        ("writeback", 1),
        ("writethrough", 0),
        ("directsync", 0),
        ("unsafe", 1),
    ] {
        let (server, _disk) = serve(&format!("cache={cache}"));
        let mut device = connect(&server, DeviceConfig::default());
        assert_eq!(device.config().unwrap().wce, wce, "cache={cache}");
        // The guest may change it, and its choice outlives its connection.
        let other = 1 - wce;
        let frontend = &mut device.frontend;
        frontend.set_config(DiskConfig::WCE_AT, &[other]).unwrap();
        drop(device);
        let mut device = connect(&server, DeviceConfig::default());
        assert_eq!(device.config().unwrap().wce, other, "cache={cache}");
        let queue = &mut device.queues[0];
        assert_eq!(queue.write(8, &content(9, 4096)), OK);
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
        assert_eq!(queue.read(8, 4096).unwrap(), content(9, 4096));
    }
}

#[test]
fn the_guest_sees_the_blocks_that_the_operator_chose() {
    let (server, _disk) = serve("cache=writeback,logical-block-size=4096");
    let mut device = connect(&server, DeviceConfig::default());
    let config = device.config().unwrap();
    assert_eq!((config.blk_size, config.physical_block_exp), (4096, 0));
    let queue = &mut device.queues[0];
    assert_eq!(queue.write(8, &content(9, 4096)), OK);
    assert_eq!(queue.write(9, &content(9, 4096)), IOERR);
    assert_eq!(queue.read(0, 512), Err(IOERR));
    assert_eq!(queue.read(8, 4096).unwrap(), content(9, 4096));

    let (server, _disk) = serve("cache=writeback,physical-block-size=512");
    let config = connect(&server, DeviceConfig::default()).config().unwrap();
    assert_eq!((config.blk_size, config.physical_block_exp), (512, 0));
}

#[test]
fn discard_can_be_left_out() {
    let (server, disk) = serve("discard=ignore");
    let mut device = connect(&server, DeviceConfig::default());
    assert_eq!(device.features & 1 << VIRTIO_BLK_F_DISCARD, 0);
    assert_ne!(device.features & 1 << VIRTIO_BLK_F_WRITE_ZEROES, 0);
    let config = device.config().unwrap();
    assert_eq!(
        (config.write_zeroes_may_unmap, config.max_discard_sectors),
        (0, 0)
    );
    let queue = &mut device.queues[0];
    assert_eq!(queue.run(Op::Discard, 0, 1 << 20), UNSUPP);
    // A driver that asks to give space back all the same gets its zeroes, and keeps the space.
    let allocated = || disk.file.metadata().unwrap().blocks();
    let before = allocated();
    let zeroes = Op::WriteZeroes { unmap: true };
    assert_eq!(queue.run(zeroes, 0, 1 << 20), OK);
    assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    assert_eq!(queue.read(0, 4096).unwrap(), [0; 4096]);
    assert!(
        allocated() >= before,
        "{} of {before} blocks are left",
        allocated()
    );
}

#[test]
fn read_only_disks_are_only_read() {
    let (server, disk) = serve("readonly=on");
    let mut device = connect(&server, DeviceConfig::default());
    assert!(device.features & 1 << VIRTIO_BLK_F_RO != 0);
    let queue = &mut device.queues[0];
    assert_eq!(queue.read(8, 4096).unwrap(), content(8, 4096));
    assert_eq!(queue.write(8, &content(9, 4096)), IOERR);
    for op in [
        Op::Discard,
        Op::WriteZeroes { unmap: false },
        Op::WriteZeroes { unmap: true },
    ] {
        assert_ne!(queue.run(op, 8, 4096), OK, "{op:?}");
    }
    assert_eq!(disk.bytes(8, 4096), content(8, 4096));
    assert_eq!(queue.read(8, 4096).unwrap(), content(8, 4096));
}

#[test]
fn the_serial_is_what_was_asked_for() {
    let (server, _disk) = serve("serial=rd-0815");
    let mut device = connect(&server, DeviceConfig::default());
    let queue = &mut device.queues[0];
    assert_eq!(queue.run(Op::GetId, 0, 0), OK);
    let mut expected = b"rd-0815".to_vec();
    expected.resize(20, 0);
    assert_eq!(queue.read_buffer(0, 20), expected);
}

// Data

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

/// Rewrites an area of the disk that no other queue uses, and puts it back.
fn read_write_flush(queue: &mut Queue, disk: &Disk) {
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
fn the_last_sector_is_the_last() {
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
fn every_layout_that_the_specification_allows() {
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
        // The bounce for O_DIRECT depends on where buffers start; some lie over the border of two regions, with a
        // descriptor, a sector, or the status across it.
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

/// Runs a request of any shape on queue 0: `readable` bytes at an address, and room for writable ones at another.
/// Gives what the device wrote.
fn run_chain(
    device: &mut Device,
    layout: &Layout,
    readable: (u64, &[u8]),
    writable: (u64, u32),
) -> Vec<u8> {
    let (memory, queue) = (&device.memory, &mut device.queues[0]);
    let chain = Chain::request(
        memory, layout, readable.0, readable.1, writable.0, writable.1,
    );
    // Over the descriptors of the slots, which are built anew before they are used again.
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
fn requests_as_large_and_as_scattered_as_allowed() {
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
        // More data at once than any pool of bounce buffers holds, from buffers that need one.
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
fn a_full_file_system_is_an_error_and_no_end() {
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
        // As much at a time as the configuration space allows.
        for quarter in 0..4 {
            let sector = quarter * (256 << 20) / 512;
            assert_eq!(queue.run(Op::Discard, sector, 256 << 20), OK);
        }
        assert!(server.terminate().unwrap().success());
    }
}

#[test]
fn block_devices_of_four_kilobyte_sectors() {
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
fn discard_and_write_zeroes_make_holes() {
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

    // What is not a whole block of the file system is zeroed all the same, and nothing beside it.
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
fn discard_and_write_zeroes_check_their_ranges() {
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
            IOERR,
        ),
        ("too many segments", discard, too_many, IOERR),
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
fn ring_indices_wrap() {
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

// Consistency

/// An operation on the small part of the disk that one queue has to itself.
#[derive(Clone, Debug)]
struct Step {
    op: Op,
    sector: u64,
    sectors: u64,
    seed: u64,
}

const AREA_SECTORS: u64 = 96;

fn step() -> impl Strategy<Value = Step> {
    let op = prop_oneof![
        4 => Just(Op::Write),
        4 => Just(Op::Read),
        1 => Just(Op::Flush),
        1 => Just(Op::WriteZeroes { unmap: false }),
        1 => Just(Op::WriteZeroes { unmap: true }),
    ];
    (op, 0..AREA_SECTORS, 1..=32u64, any::<u64>()).prop_map(|(op, sector, sectors, seed)| {
        let sectors = sectors.min(AREA_SECTORS - sector);
        Step {
            op,
            sector,
            sectors,
            seed: seed >> 16,
        }
    })
}

#[test]
fn random_operations_match_a_plain_array() {
    let seed = seed();
    let config = Config {
        cases: 12,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..Config::default()
    };
    let queues = proptest::collection::vec(proptest::collection::vec(step(), 1..200), 3);
    for (cache, packed) in [("none", false), ("writeback", false), ("none", true)] {
        let (server, disk) = serve(&format!("cache={cache},queues=3"));
        let result = TestRunner::new(config.clone()).run(&queues, |plan| {
            let mut device = connect(
                &server,
                DeviceConfig {
                    queues: 3,
                    packed,
                    ..DeviceConfig::default()
                },
            );
            thread::scope(|scope| {
                let queues = device.queues.iter_mut().zip(&plan);
                let players: Vec<_> = queues
                    .map(|(queue, steps)| scope.spawn(|| play(queue, steps, &disk)))
                    .collect();
                players
                    .into_iter()
                    .try_for_each(|p| p.join().expect("a player does not panic"))
            })
        });
        result.unwrap_or_else(|e| panic!("cache={cache}, seed {seed}: {e}"));
    }
}

/// Plays steps on a queue, as many at once as do not overlap, and compares all that is read with a model.
fn play(queue: &mut Queue, steps: &[Step], disk: &Disk) -> Result<(), TestCaseError> {
    let area = u64::from(queue.index) * AREA_SECTORS;
    let mut model = disk.bytes(area, AREA_SECTORS as usize * 512);
    let mut rest = steps;
    while !rest.is_empty() {
        let batch = independent(rest, queue.slots());
        rest = &rest[batch.len()..];
        for (slot, step) in (0..).zip(batch) {
            let len = step.sectors as usize * 512;
            match step.op {
                Op::Write => queue.write_buffer(slot, &content(step.seed, len)),
                _ => queue.write_buffer(slot, &vec![0xa5; len]),
            }
            queue.prepare(slot, step.op, area + step.sector, len as u32);
        }
        queue.submit(&(0..batch.len() as u16).collect::<Vec<_>>());
        for (slot, status) in queue.finish(batch.len()) {
            let step = &batch[usize::from(slot)];
            let range = step.sector as usize * 512..(step.sector + step.sectors) as usize * 512;
            prop_assert_eq!(status, OK, "{:?}", step);
            match step.op {
                Op::Read => prop_assert!(
                    queue.read_buffer(slot, range.len()) == model[range],
                    "{:?}",
                    step
                ),
                Op::Write => model[range.clone()].copy_from_slice(&content(step.seed, range.len())),
                Op::WriteZeroes { .. } => model[range].fill(0),
                _ => {}
            }
        }
    }
    prop_assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    prop_assert!(
        disk.bytes(area, model.len()) == model,
        "the file differs from the model"
    );
    Ok(())
}

/// The longest beginning of `steps` in which no two touch the same sector.
fn independent(steps: &[Step], most: u16) -> &[Step] {
    let apart =
        |a: &Step, b: &Step| a.sector + a.sectors <= b.sector || b.sector + b.sectors <= a.sector;
    let clash = (1..steps.len().min(usize::from(most)))
        .find(|&n| !steps[..n].iter().all(|s| apart(s, &steps[n])));
    &steps[..clash.unwrap_or(steps.len().min(usize::from(most)))]
}

// Durability

#[test]
fn guest_flushes_reach_the_device_beneath() {
    let Some(backing) = LoopDevice::new() else {
        return;
    };
    for cache in ["none", "writeback"] {
        let socket = backing.dir.path().join("disk.sock");
        let arg = format!(
            "file={},socket={}",
            backing.device.display(),
            socket.display()
        );
        let mut server = serve_all(&[format!("{arg},format=raw,cache={cache}")]);
        let mut device = connect(&server, DeviceConfig::default());
        assert_eq!(
            device.config().unwrap().wce,
            1,
            "completed writes are in a cache, and the guest must know"
        );
        let flushes = backing.count(|| flush_after_each_write(&mut device.queues[0]));
        assert!(
            flushes >= 50,
            "block device, cache={cache}: 50 guest flushes, {flushes} on the device beneath"
        );

        // A guest that switches the cache off has every write stable when it completes.
        device
            .frontend
            .set_config(DiskConfig::WCE_AT, &[0])
            .unwrap();
        assert_eq!(device.config().unwrap().wce, 0);
        let flushes = backing.count(|| write_only(&mut device.queues[0]));
        assert!(
            flushes >= 50,
            "block device, cache={cache}, wce=0: 50 writes, {flushes} flushes beneath"
        );
        device
            .frontend
            .set_config(DiskConfig::WCE_AT, &[1])
            .unwrap();
        assert_eq!(device.config().unwrap().wce, 1);
        drop(device);

        // A guest that knows neither FLUSH nor CONFIG_WCE relies on it (virtio 1.3 §5.2.5.2).
        let features = !(1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_CONFIG_WCE);
        let mut device = connect(
            &server,
            DeviceConfig {
                features,
                ..DeviceConfig::default()
            },
        );
        let flushes = backing.count(|| write_only(&mut device.queues[0]));
        assert!(
            flushes >= 50,
            "block device, cache={cache}, FLUSH not negotiated: 50 writes, {flushes} flushes"
        );
        assert!(server.terminate().unwrap().success());
    }
}

#[test]
fn guest_flushes_reach_the_device_beneath_the_file() {
    let Some(backing) = LoopDevice::new() else {
        return;
    };
    let Some(mount) = backing.mount() else { return };
    let file = mount.join("disk.raw");
    std::fs::write(&file, content(0, 8 << 20)).unwrap();
    for cache in ["none", "writeback"] {
        let socket = backing.dir.path().join("disk.sock");
        let mut server = serve_all(&[format!(
            "file={},socket={},cache={cache}",
            file.display(),
            socket.display()
        )]);
        let mut device = connect(&server, DeviceConfig::default());
        let flushes = backing.count(|| flush_after_each_write(&mut device.queues[0]));
        assert!(
            flushes >= 50,
            "file, cache={cache}: 50 guest flushes, {flushes} on the device beneath"
        );
        assert!(server.terminate().unwrap().success());
    }
}

fn flush_after_each_write(queue: &mut Queue) {
    for round in 0..50 {
        assert_eq!(queue.write(round * 8, &content(round + 7, 4096)), OK);
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    }
}

fn write_only(queue: &mut Queue) {
    for round in 0..50 {
        assert_eq!(queue.write(round * 8, &content(round + 9, 4096)), OK);
    }
}

// The session

#[test]
fn status_and_reset() {
    let (server, _disk) = serve("");
    let mut device = connect(&server, DeviceConfig::default());
    assert_eq!(
        device.frontend.status().unwrap() & 0x4f,
        0x0f,
        "DRIVER_OK, and no DEVICE_NEEDS_RESET"
    );
    assert_eq!(device.queues[0].read(0, 512).unwrap(), content(0, 512));
    device.frontend.reset_device().unwrap();
    device.queues[0].prepare(0, Op::Read, 0, 512);
    device.queues[0].submit(&[0]);
    assert!(
        device.queues[0].ring.next_used(A_WHILE).is_none(),
        "a reset device must not touch its rings"
    );
    assert_eq!(device.frontend.status().unwrap(), 0);
    // It can be set up again without a new connection.
    let features = device.features;
    device.frontend.set_features(features).unwrap();
    device.start_queue(0, 0).unwrap();
    device.frontend.set_status(0x0f).unwrap();
    assert_eq!(device.queues[0].read(0, 512).unwrap(), content(0, 512));
    // Status 0 is a reset as well.
    device.frontend.set_status(0).unwrap();
    assert_eq!(device.frontend.status().unwrap(), 0);
}

#[test]
fn queues_stop_and_go_on() {
    let (server, _disk) = serve("queues=2");
    for event_idx in [false, true] {
        let mut device = connect(
            &server,
            DeviceConfig {
                queues: 2,
                event_idx,
                ..DeviceConfig::default()
            },
        );
        let mut done = [0u16; 2];
        for round in 0..20 {
            for (index, done) in done.iter_mut().enumerate() {
                let queue = &mut device.queues[index];
                let slots: Vec<u16> = (0..queue.slots()).collect();
                slots
                    .iter()
                    .for_each(|&slot| queue.prepare(slot, Op::Read, round + u64::from(slot), 512));
                queue.submit(&slots);
                // With or without requests in flight: what the device took is completed before it says where it stands.
                if round % 2 == 0 {
                    queue.finish(slots.len());
                }
                let base = device.stop_queue(index).unwrap();
                let queue = &mut device.queues[index];
                if round % 2 != 0 {
                    let expected = base.wrapping_sub(*done);
                    let mut completed = 0;
                    completed += queue.poll(|_, status| assert_eq!(status, OK)) as u16;
                    assert_eq!(
                        completed, expected,
                        "requests taken by the device and not completed"
                    );
                }
                *done = base;
                device.start_queue(index, base).unwrap();
            }
        }
    }
}

/// QEMU does this to running rings when it switches the dirty log on or off, and says nothing else.
#[test]
fn addresses_set_again_do_not_stop_a_ring() {
    let (server, _disk) = serve("");
    let mut device = connect(&server, DeviceConfig::default());
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), content(8, 4096));
    let (features, ring) = (device.features, device.queues[0].ring.guest_addresses());
    let user = RingAddresses {
        desc: device.memory.user(ring.desc),
        used: device.memory.user(ring.used),
        avail: device.memory.user(ring.avail),
    };
    device.frontend.set_features(features).unwrap();
    device.frontend.set_vring_addr(0, user).unwrap();
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), content(8, 4096));
}

#[test]
fn disabled_queues_wait() {
    let (server, _disk) = serve("");
    let mut device = connect(&server, DeviceConfig::default());
    device.frontend.set_vring_enable(0, false).unwrap();
    device.queues[0].prepare(0, Op::Read, 0, 512);
    device.queues[0].submit(&[0]);
    assert!(
        device.queues[0].ring.next_used(A_WHILE).is_none(),
        "a disabled ring was served"
    );
    device.frontend.set_vring_enable(0, true).unwrap();
    assert_eq!(device.queues[0].finish(1), [(0, OK)]);
}

#[test]
fn memory_comes_and_goes_while_the_ring_runs() {
    for (cache, packed) in [("none", false), ("writeback", false), ("none", true)] {
        let (server, disk) = serve(&format!("cache={cache},queues=2"));
        let mut device = connect(
            &server,
            DeviceConfig {
                queues: 2,
                packed,
                ..DeviceConfig::default()
            },
        );
        let mut busy = device.queues.remove(1);
        let memory = device.memory.clone();
        let spare = &memory.regions()[Device::SPARE];
        let stop = std::sync::atomic::AtomicBool::new(false);
        let layout = Layout {
            readable: vec![16],
            writable: vec![4096],
            ..Layout::default()
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    read_write_flush(&mut busy, &disk);
                }
            });
            for _ in 0..20 {
                device.frontend.add_mem_reg(spare).unwrap();
                let at = device.memory.regions()[Device::LOW].end() - 512;
                let request = header(VIRTIO_BLK_T_IN, 8);
                let got = run_chain(
                    &mut device,
                    &layout,
                    (at, &request),
                    (spare.gpa + 0x1000, 4097),
                );
                assert!(got == [content(8, 4096), vec![OK]].concat());
                device.frontend.rem_mem_reg(spare).unwrap();
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        // The whole map can be replaced under a running ring, too.
        let all: Vec<_> = memory.regions().iter().collect();
        device.frontend.set_mem_table(&all).unwrap();
        assert_eq!(device.queues[0].read(8, 4096).unwrap(), content(8, 4096));
    }
}

#[test]
fn one_table_of_memory_does_as_well() {
    let (server, _disk) = serve("");
    let protocol = protocol::CONFIG | protocol::MQ;
    let mut device = connect(
        &server,
        DeviceConfig {
            protocol,
            ..DeviceConfig::default()
        },
    );
    assert_eq!(device.protocol, protocol);
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), content(8, 4096));
}

#[test]
fn front_ends_come_back() {
    let (server, _disk) = serve("queues=2");
    for round in 0..20 {
        let mut device = connect(
            &server,
            DeviceConfig {
                queues: 2,
                ..DeviceConfig::default()
            },
        );
        assert_eq!(device.queues[1].read(8, 4096).unwrap(), content(8, 4096));
        // Every other time with requests in flight.
        for queue in device.queues.iter_mut().filter(|_| round % 2 == 1) {
            let slots: Vec<u16> = (0..queue.slots()).collect();
            slots
                .iter()
                .for_each(|&slot| queue.prepare(slot, Op::Read, u64::from(slot), 128 << 10));
            queue.submit(&slots);
        }
    }
    let fds = std::fs::read_dir(format!("/proc/{}/fd", server.pid()))
        .unwrap()
        .count();
    for _ in 0..20 {
        connect(
            &server,
            DeviceConfig {
                queues: 2,
                ..DeviceConfig::default()
            },
        );
    }
    // The last session may still be ending when a new one is through.
    let mut device = connect(
        &server,
        DeviceConfig {
            queues: 2,
            ..DeviceConfig::default()
        },
    );
    assert_eq!(device.queues[1].read(8, 4096).unwrap(), content(8, 4096));
    let now = std::fs::read_dir(format!("/proc/{}/fd", server.pid()))
        .unwrap()
        .count();
    assert!(
        now <= fds + 32,
        "20 sessions leaked {} file descriptors",
        now - fds
    );
}

#[test]
fn a_second_front_end_does_not_disturb_the_first() {
    let (server, _disk) = serve("");
    let mut first = connect(&server, DeviceConfig::default());
    let second = Frontend::connect(server.socket());
    if let Ok(second) = &second {
        // Refused, or left waiting: either way it gets no answer.
        second
            .send_raw(message::GET_FEATURES, 1, 0, &[], &[])
            .unwrap_or_default();
    }
    for _ in 0..100 {
        assert_eq!(first.queues[0].read(8, 4096).unwrap(), content(8, 4096));
    }
    assert_eq!(first.config().unwrap().capacity, DISK_BYTES / 512);
    drop((first, second));
    let mut third = connect(&server, DeviceConfig::default());
    assert_eq!(third.queues[0].read(8, 4096).unwrap(), content(8, 4096));
}

#[test]
fn guests_hear_of_a_grown_disk() {
    let (server, disk) = serve("");
    let mut device = connect(&server, DeviceConfig::default());
    let mut channel = device.frontend.open_backend_channel().unwrap();
    let file = OpenOptions::new().write(true).open(&disk.file).unwrap();
    file.set_len(2 * DISK_BYTES).unwrap();
    file.write_all_at(&content(3, 4096), DISK_BYTES).unwrap();
    assert_eq!(
        device.queues[0].read(DISK_BYTES / 512, 4096),
        Err(IOERR),
        "not before it is told to look"
    );
    server.signal(Signal::HUP);
    let (request, _) = channel.next(HANG).unwrap();
    assert_eq!(request, message::BACKEND_CONFIG_CHANGE);
    assert_eq!(device.config().unwrap().capacity, 2 * DISK_BYTES / 512);
    assert_eq!(
        device.queues[0].read(DISK_BYTES / 512, 4096).unwrap(),
        content(3, 4096)
    );
}

/// The kernel may hold what a killed process had in its ring, and with it the lock on the file, a little longer than the
/// process itself.
#[test]
fn a_killed_server_can_be_replaced_at_once() {
    let disk = Disk::new();
    for round in 0..10 {
        let server = serve_all(&[disk.argument("")]);
        let mut device = connect(&server, DeviceConfig::default());
        let queue = &mut device.queues[0];
        assert_eq!(queue.write(0, &content(round, 4096)), OK);
        let slots: Vec<u16> = (0..queue.slots()).collect();
        slots
            .iter()
            .for_each(|&slot| queue.prepare(slot, Op::Read, 0, 128 << 10));
        queue.submit(&slots);
        drop(server);
        assert_eq!(disk.bytes(0, 4096), content(round, 4096));
    }
}

#[test]
fn sigterm_ends_in_order() {
    let (mut server, disk) = serve("");
    let mut device = connect(&server, DeviceConfig::default());
    let queue = &mut device.queues[0];
    let slots: Vec<u16> = (0..queue.slots()).collect();
    for &slot in &slots {
        queue.write_buffer(slot, &content(7, 4096));
        queue.prepare(slot, Op::Write, 8 * u64::from(slot), 4096);
    }
    queue.submit(&slots);
    assert!(server.terminate().unwrap().success());
    assert!(!disk.socket.exists(), "the socket was left behind");
    queue.poll(|slot, status| {
        assert_eq!(status, OK);
        assert!(
            disk.bytes(8 * u64::from(slot), 4096) == content(7, 4096),
            "slot {slot} was acknowledged"
        );
    });
}

/// A thread that looks out for the guest of one queue must see the kick of another: it came as work
/// that waits for the thread to enter the kernel, which a look-out does not do by itself.
#[test]
fn a_kick_is_seen_while_another_queue_is_hot() {
    let disk = Disk::new();
    for cache in ["none", "writeback"] {
        let argument = disk.argument(&format!("queues=2,cache={cache}"));
        let server = serve_all(&["--iothreads=1".into(), argument]);
        let config = DeviceConfig {
            queues: 2,
            ..DeviceConfig::default()
        };
        let mut device = connect(&server, config);
        for round in 0..50 {
            for at in 0..50 {
                let data = device.queues[0].read(at * 8, 4096).unwrap();
                assert_eq!(data, disk.bytes(at * 8, 4096), "round {round}");
            }
            let data = device.queues[1].read(round * 8, 4096).unwrap();
            assert_eq!(
                data,
                disk.bytes(round * 8, 4096),
                "the other queue, round {round}"
            );
        }
    }
}
