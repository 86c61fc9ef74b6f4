//! Messages and requests of real front-ends and drivers that the newest QEMU and Linux do not send.

use std::collections::BTreeSet;

use testkit::chain::{Chain, Layout, Table, header};
use testkit::driver::{Device, DeviceConfig, DiskConfig, Op, segment};
use testkit::frontend::message::*;
use testkit::frontend::{F_PROTOCOL_FEATURES, Frontend, VERSION, protocol};
use testkit::memory::Memory;
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::{VIRTIO_F_ANY_LAYOUT, VIRTIO_F_VERSION_1};

use crate::support::{content, serve, serve_all};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Older illumos flushes with VIRTIO_BLK_T_FLUSH_OUT; if that is reported as unsupported, it never flushes again. The
/// direction bit has no meaning without data, and neither does the barrier bit, which was never offered.
#[test]
fn legacy_flush_out_type_is_accepted() {
    const BARRIER: u32 = 1 << 31;
    let (_server, disk) = serve("");
    let mut device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
    for (kind, status) in [
        (VIRTIO_BLK_T_FLUSH, OK),
        (VIRTIO_BLK_T_FLUSH | VIRTIO_BLK_T_OUT, OK),
        (VIRTIO_BLK_T_FLUSH | BARRIER, OK),
        (VIRTIO_BLK_T_OUT | BARRIER, OK),
        // VIRTIO_BLK_T_SCSI_CMD, in both directions.
        (2, UNSUPP),
        (3, UNSUPP),
    ] {
        let answer = device.queues[0].run(Op::Unknown(kind), 8, 512);
        assert_eq!(answer, status, "type {kind:#x}");
    }
}

/// Front-ends keep the write cache setting that they read while firmware drives the disk, and show it to Linux.
#[test]
fn driver_without_flush_keeps_the_write_cache_for_the_next_driver() {
    let (_server, disk) = serve("");
    let mut device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
    let all = device.features;
    let firmware = all & !(1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_CONFIG_WCE);
    for choice in [1, 0] {
        let set = device.frontend.set_config(DiskConfig::WCE_AT, &[choice]);
        set.unwrap();
        for features in [firmware, all] {
            device.frontend.set_features(features).unwrap();
            assert_eq!(device.config().unwrap().wce, choice);
        }
    }
}

/// Cloud Hypervisor before version 51 uses virtio-mmio's offset of the configuration; SPDK always reads and writes 256
/// bytes; crosvm forwards the guest's accesses.
#[test]
fn config_accesses_of_all_front_ends() {
    let (_server, disk) = serve("");
    let mut device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
    let frontend = &mut device.frontend;
    let all = frontend.config(0, 256).unwrap();
    let (space, rest) = all.split_at(DiskConfig::LEN);
    assert!(rest.iter().all(|&byte| byte == 0));
    assert_eq!(frontend.config(0x100, 60).unwrap(), space);
    assert_eq!(frontend.config(0x100 + 20, 4).unwrap(), space[20..24]);
    assert_eq!(frontend.config(20, 4).unwrap(), space[20..24]);
    assert_eq!(frontend.config(58, 8).unwrap(), [0; 8]);
    assert_eq!(frontend.config(0xffc, 4).unwrap(), [0; 4]);

    let mut payload = words(&[DiskConfig::WCE_AT, 1, 0]);
    payload.extend([0; 256]);
    frontend.command(SET_CONFIG, &payload, &[]).unwrap();
    assert_eq!(frontend.config(DiskConfig::WCE_AT, 1).unwrap(), [0]);
    // A refused write changes nothing and does not close the connection.
    assert!(frontend.set_config(0, &[0xff; 8]).is_err());
    frontend.set_config(28, &[1; 8]).unwrap();
    let after = frontend.config(0, 60).unwrap();
    assert_eq!(
        (&after[..32], after[32], &after[33..]),
        (&space[..32], 1, &space[33..])
    );
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), content(8, 4096));
}

/// A driver older than virtio 1.0 accepts ANY_LAYOUT, which QEMU offers on its own, and then places the header beside
/// the data it writes and the status after the data it reads.
#[test]
fn legacy_drivers_may_use_any_layout() {
    let (_server, disk) = serve("");
    let mut device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
    let legacy = device.features & !(1 << VIRTIO_F_VERSION_1) | 1 << VIRTIO_F_ANY_LAYOUT;
    device.frontend.set_features(legacy).unwrap();
    let scratch = device.memory.regions()[Device::LOW].alloc(0x10000, 4096);
    let (from, to, table) = (scratch, scratch + 0x4000, scratch + 0x8000);
    let queue = &mut device.queues[0];
    let first = queue.first_free_desc();
    let data = [0xa5; 4096];
    for (readable, writable) in [(vec![], vec![]), (vec![7, 9, 100], vec![1, 4000])] {
        let layout = Layout {
            readable,
            writable,
            gap: 3,
            table: Table::Direct,
        };
        let mut run = |request: &[u8], writable: u32| {
            let chain = Chain::request(&device.memory, &layout, from, request, to, writable);
            let head = chain.place(layout.table, &mut queue.ring, first, &device.memory, table);
            queue.ring.publish([head]);
            queue.ring.kick();
            let used = queue.ring.next_used(testkit::driver::HANG).unwrap();
            assert_eq!((used.id, used.len), (head.into(), writable));
            chain.written(&device.memory)
        };
        let write = [&header(VIRTIO_BLK_T_OUT, 64)[..], &data].concat();
        assert_eq!(run(&write, 1), [OK]);
        let read = run(&header(VIRTIO_BLK_T_IN, 64), 4097);
        assert_eq!((&read[..4096], read[4096]), (&data[..], OK));
    }
}

/// QEMU reconnects with the features that its guest accepted, even if the disk's options have changed since.
#[test]
fn reconnecting_guest_keeps_features_offered_before() {
    let (mut server, disk) = serve("");
    let accepted = {
        let device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
        device.features
    };
    assert_ne!(accepted & 1 << VIRTIO_BLK_F_DISCARD, 0);
    assert!(server.terminate().unwrap().success());
    let _server = serve_all(&[disk.argument("discard=ignore")]);
    let mut device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
    assert_eq!(device.features & 1 << VIRTIO_BLK_F_DISCARD, 0);
    device.frontend.set_features(accepted).unwrap();
    let queue = &mut device.queues[0];
    queue.write_buffer(0, &segment(8, 8, 0));
    assert_eq!(queue.run(Op::Discard, 0, 16), UNSUPP);
    assert_eq!(queue.read(8, 4096).unwrap(), content(8, 4096));
}

/// crosvm's rings have 32768 entries by default: one holds more requests than any ring of QEMU.
#[test]
fn ring_of_32768_entries() {
    const SLOTS: u16 = 3000;
    let (_server, disk) = serve("");
    for packed in [false, true] {
        let config = DeviceConfig {
            queue_size: 1 << 15,
            slots: SLOTS,
            buffer_len: 4096,
            packed,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(&disk.socket, &config).unwrap();
        let queue = &mut device.queues[0];
        // The first rounds last until both sides have set up the ring again.
        for round in 0..12u64 {
            let sector = |slot: u16| (u64::from(slot) + round) * 8 % 32768;
            for slot in 0..SLOTS {
                queue.prepare(slot, Op::Read, sector(slot), 4096);
            }
            queue.submit(&(0..SLOTS).collect::<Vec<_>>());
            let done = queue.finish(SLOTS.into());
            let slots: BTreeSet<u16> = done.iter().map(|&(slot, _)| slot).collect();
            assert_eq!(slots.len(), usize::from(SLOTS));
            assert!(done.iter().all(|&(_, status)| status == OK));
            for slot in (0..SLOTS).step_by(97) {
                let expected = content(sector(slot), 4096);
                assert_eq!(queue.read_buffer(slot, 4096), expected, "{slot}");
            }
        }
    }
}

/// Front-ends of rust-vmm and crosvm send up to 32 regions in one message, and expect the reply to SET_LOG_BASE to be
/// as long as the message.
#[test]
fn rust_vmm_32_regions_and_set_log_base_reply() {
    let (_server, disk) = serve("");
    let mut frontend = Frontend::connect(&disk.socket).unwrap();
    let accepted = protocol::ALL & frontend.protocol_features().unwrap();
    frontend.set_protocol_features(accepted).unwrap();
    let layout: Vec<(u64, u64)> = (0..32).map(|i| (i << 20, 4096)).collect();
    let memory = Memory::new(&layout).unwrap();
    let regions: Vec<_> = memory.regions().iter().collect();
    frontend.set_mem_table(&regions).unwrap();

    let log = Memory::new(&[(0, 4096)]).unwrap();
    let (log, payload) = (&log.regions()[0], words(&[1024, 0, 0, 0]));
    let fds = [std::os::fd::AsFd::as_fd(&log.file)];
    let sent = frontend.send_raw(SET_LOG_BASE, VERSION, 16, &payload, &fds);
    sent.unwrap();
    assert_eq!(frontend.any_reply().unwrap(), payload);
}

/// QEMU 7.2, whose back-end restarted while the VM was paused, resumes in the middle of the handshake: it neither reads
/// nor sets protocol features again, but uses them.
#[test]
fn qemu_7_2_front_end_that_skips_protocol_features_is_served() {
    let (_server, disk) = serve("");
    let device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
    let features = device.features;
    drop(device);
    let mut frontend = Frontend::connect(&disk.socket).unwrap();
    frontend
        .set_features(features | F_PROTOCOL_FEATURES)
        .unwrap();
    assert_eq!(frontend.status().unwrap(), 0);
    frontend.set_status(8).unwrap();
    let inflight = frontend.inflight(1, 128).unwrap();
    frontend.set_inflight(&inflight).unwrap();
    drop(frontend);
    // A front-end that reads the protocol features and sets none has none.
    let mut frontend = Frontend::connect(&disk.socket).unwrap();
    frontend.protocol_features().unwrap();
    frontend
        .set_features(features | F_PROTOCOL_FEATURES)
        .unwrap();
    assert!(frontend.inflight(1, 128).is_err());
}

/// QEMU keeps a chardev's connection when its device is unplugged. The next device starts from the beginning on the
/// same connection, with the same memory.
#[test]
fn device_is_plugged_in_again_on_the_same_connection() {
    let (_server, disk) = serve("");
    let mut device = Device::connect(&disk.socket, &DeviceConfig::default()).unwrap();
    for _ in 0..2 {
        assert!(device.queues[0].read(0, 512).is_ok());
        device.frontend.vring_base(0).unwrap();
        device.plug_in_again(&DeviceConfig::default()).unwrap();
    }
}
