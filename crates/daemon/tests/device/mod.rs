//! The disk as a guest sees it: every feature bit of the device and of the vhost-user session, tested with a driver
//! that was written from the specifications.

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

mod data;
mod flushes;
mod random;
use crate::support::loop_device::LoopDevice;
use crate::support::{DISK_BYTES, Disk, content, seed, serve, serve_all};
use data::{read_write_flush, run_chain};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;
/// Long enough for an unexpected event to happen.
const QUIET_PERIOD: Duration = Duration::from_millis(200);

fn connect(server: &Server, config: DeviceConfig) -> Device {
    Device::connect(server.socket(), &config).unwrap()
}

// Features and config space

#[test]
fn feature_bits_are_offered() {
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
fn config_space_describes_the_disk() {
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
    // Any part can be read.
    assert_eq!(device.frontend.config(4, 9).unwrap().len(), 9);
    assert_eq!(
        device.frontend.config(0, 256).unwrap()[..8],
        (DISK_BYTES / 512).to_le_bytes()
    );
}

#[test]
fn cache_mode_sets_the_initial_write_cache() {
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
        // The guest may change it, and the setting outlives its connection.
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
fn configured_block_sizes_reach_the_guest() {
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
fn discard_can_be_disabled() {
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
    // A driver that asks to unmap gets zeroes, and the space stays allocated.
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
fn read_only_disk_refuses_writes() {
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
fn configured_serial_reaches_the_guest() {
    let (server, _disk) = serve("serial=rd-0815");
    let mut device = connect(&server, DeviceConfig::default());
    let queue = &mut device.queues[0];
    assert_eq!(queue.run(Op::GetId, 0, 0), OK);
    let mut expected = b"rd-0815".to_vec();
    expected.resize(20, 0);
    assert_eq!(queue.read_buffer(0, 20), expected);
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
        device.queues[0].ring.next_used(QUIET_PERIOD).is_none(),
        "a reset device must not touch its rings"
    );
    assert_eq!(device.frontend.status().unwrap(), 0);
    // It can be set up again on the same connection.
    let features = device.features;
    device.frontend.set_features(features).unwrap();
    device.start_queue(0, 0).unwrap();
    device.frontend.set_status(0x0f).unwrap();
    assert_eq!(device.queues[0].read(0, 512).unwrap(), content(0, 512));
    // Status 0 also resets the device.
    device.frontend.set_status(0).unwrap();
    assert_eq!(device.frontend.status().unwrap(), 0);
}

#[test]
fn stopped_queues_resume() {
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
                // With or without requests in flight: the device completes the requests it has fetched before it
                // reports its position.
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

/// QEMU does this to running rings when it switches the dirty log on or off, without any other message.
#[test]
fn setting_ring_addresses_again_does_not_stop_a_ring() {
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
        device.queues[0].ring.next_used(QUIET_PERIOD).is_none(),
        "a disabled ring was served"
    );
    device.frontend.set_vring_enable(0, true).unwrap();
    assert_eq!(device.queues[0].finish(1), [(0, OK)]);
}

#[test]
fn memory_regions_change_while_the_ring_runs() {
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
        // The whole memory map can also be replaced under a running ring.
        let all: Vec<_> = memory.regions().iter().collect();
        device.frontend.set_mem_table(&all).unwrap();
        assert_eq!(device.queues[0].read(8, 4096).unwrap(), content(8, 4096));
    }
}

#[test]
fn set_mem_table_works_as_well() {
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
fn front_end_can_reconnect() {
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
        // Every other round has requests in flight.
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
    // The last session may still be ending when the new connection is made.
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
fn second_front_end_does_not_disturb_the_first() {
    let (server, _disk) = serve("");
    let mut first = connect(&server, DeviceConfig::default());
    let second = Frontend::connect(server.socket());
    if let Ok(second) = &second {
        // Refused or left waiting: in either case it gets no answer.
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
fn guest_is_notified_of_a_grown_disk() {
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

/// The kernel may hold the killed process's requests, and the lock on the file, a little longer than the process.
#[test]
fn killed_server_can_be_restarted_at_once() {
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
fn sigterm_shuts_down_cleanly() {
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

/// A thread that polls for one queue's guest must still see another queue's kick. The kick arrives as work that waits
/// for the thread to enter the kernel, which polling does not do.
#[test]
fn kick_is_seen_while_the_thread_polls_another_queue() {
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
