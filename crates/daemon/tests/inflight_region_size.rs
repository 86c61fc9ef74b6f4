//! Inflight regions that do not match the size of the rings: which sizes ringdisk makes, and what happens to the
//! queues.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use rustix::process::Signal;
use testkit::driver::{Device, DeviceConfig, HANG, Op, RegionEntries};
use testkit::frontend::Inflight;
use testkit::server::Server;

use super::support::Disk;

const OK: u8 = 0;

/// The log message for a queue whose requests in flight are not recorded.
const UNRECORDED: &str = "without a record of its requests in flight";

/// Rings four times as large as their region.
fn too_small(packed: bool) -> DeviceConfig {
    DeviceConfig {
        queues: 2,
        packed,
        inflight: true,
        region: Some(RegionEntries::Made(64)),
        ..DeviceConfig::default()
    }
}

fn start(disk: &Disk, options: &str) -> Server {
    Server::ringdisk(
        env!("CARGO_BIN_EXE_ringdisk"),
        &[disk.argument(&format!("queues=2{options}"))],
    )
    .unwrap()
}

/// Starts a server after a kill: the kernel may still be completing writes and hold the lock.
fn start_after_kill(disk: &Disk) -> Server {
    let argument = [disk.argument("queues=2")];
    let start = Instant::now();
    loop {
        match Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &argument) {
            Ok(server) => return server,
            Err(e) => {
                let is_locked = e.to_string().contains("in use");
                assert!(is_locked && start.elapsed() < HANG, "{e}");
            }
        }
    }
}

/// The version field of a queue's part of a region.
fn version(region: &Inflight, queue: u64) -> u16 {
    let mut bytes = [0; 2];
    let (len, _, queues, _) = region.description;
    let at = queue * (len / u64::from(queues)) + 8;
    let file = File::from(region.file.try_clone().unwrap());
    file.read_exact_at(&mut bytes, at).unwrap();
    u16::from_le_bytes(bytes)
}

/// Any request for a region gets one for 1024 entries. Every queue finds its part at the same place, whatever size the
/// front-end states when it returns the region.
#[test]
fn region_fits_the_largest_ring() {
    let disk = Disk::new();
    let server = start(&disk, "");
    for packed in [false, true] {
        for asked in [0, 1, 128, 1000, 1024] {
            let config = DeviceConfig {
                queue_size: 1024,
                region: Some(RegionEntries::Asked(asked)),
                ..too_small(packed)
            };
            let mut device = Device::connect(server.socket(), &config).unwrap();
            let region = device.inflight.take().unwrap();
            let entry = if packed { 32 } else { 16 };
            assert_eq!(region.description.0, 2 * (entry * 1025 + 64 - entry % 64));
            for queue in &mut device.queues {
                assert_eq!(queue.run(Op::Read, 8, 4096), OK);
            }
            for number in [0, asked, 1024, u16::MAX] {
                let mut again = Inflight {
                    description: region.description,
                    file: region.file.try_clone().unwrap(),
                };
                again.description.3 = number;
                device.frontend.set_inflight(&again).unwrap();
                for queue in &mut device.queues {
                    assert_eq!(queue.run(Op::Read, 8, 4096), OK);
                }
                assert_eq!([0, 1].map(|queue| version(&region, queue)), [1, 1]);
            }
        }
    }
    let log = server.log();
    assert!(!log.contains("queue"), "{log}");
}

/// A queue that does not fit its region is served without a record, which is logged once; the region's content belongs
/// to another queue and is not replayed. With a new region, the next connection has a record again.
#[test]
fn queue_larger_than_its_region_is_served_without_a_record() {
    let disk = Disk::new();
    for packed in [false, true] {
        let server = start(&disk, "");
        let config = too_small(packed);
        let mut device = Device::connect(server.socket(), &config).unwrap();
        let region = device.inflight.take().unwrap();
        let file = File::from(region.file.try_clone().unwrap());
        // A smaller queue had a request in flight.
        file.write_all_at(&[1, 0, 64, 0], 8).unwrap();
        file.write_all_at(&[1], if packed { 32 } else { 16 })
            .unwrap();
        device.frontend.set_inflight(&region).unwrap();
        for _ in 0..3 {
            for queue in &mut device.queues {
                assert_eq!(queue.run(Op::Read, 8, 4096), OK);
            }
            let bases = device.pause(false).unwrap();
            assert_eq!([0, 1].map(|queue| version(&region, queue)), [0, 0]);
            device.go_on(&bases).unwrap();
        }
        let log = server.log();
        // Once for the connection's first region and for the one that replaced it.
        assert_eq!(log.matches(UNRECORDED).count(), 1, "{log}");
        assert!(log.contains("reboot or reset the guest"), "{log}");
        device.frontend.reset_device().unwrap();
        drop(device);
        // The smaller queue returns.
        let small = DeviceConfig {
            queue_size: 64,
            ..config.clone()
        };
        let mut device = Device::connect(server.socket(), &small).unwrap();
        device.frontend.set_inflight(&region).unwrap();
        assert_eq!(device.queues[0].run(Op::Read, 8, 4096), OK);
        assert_eq!(version(&region, 0), 1);
        drop(device);
        let log = server.log();
        assert!(!log.contains("are done again"), "{log}");
        drop(server);

        // With another region there is a record.
        let config = DeviceConfig {
            region: None,
            ..config
        };
        let slow = start(&disk, ",iops=1");
        let mut device = Device::connect(slow.socket(), &config).unwrap();
        let slots = [0, 1, 2, 3];
        for slot in slots {
            device.queues[0].prepare(slot, Op::Read, 8, 4096);
        }
        device.queues[0].submit(&slots);
        let done = device.queues[0].finish(1).len();
        slow.signal(Signal::KILL);
        drop(slow);
        let server = start_after_kill(&disk);
        device.reconnect(server.socket(), &config).unwrap();
        device.queues[0].finish(slots.len() - done);
        let log = server.wait_for_log(&["are done again"]);
        assert!(!log.contains(UNRECORDED), "{log}");
    }
}

/// Without a record, a kill loses what a packed ring has in flight, and ringdisk does not guess its position. A clean
/// shutdown loses nothing, nor does a guest reset.
#[test]
fn packed_ring_without_a_record_is_not_resumed_after_a_kill() {
    let disk = Disk::new();
    let config = too_small(true);
    let server = start(&disk, "");
    let mut device = Device::connect(server.socket(), &config).unwrap();
    // Some laps, so that the position the front-end remembers is outdated.
    for _ in 0..300 {
        assert_eq!(device.queues[0].run(Op::Read, 8, 4096), OK);
    }
    let mut server = server;
    assert!(server.terminate().unwrap().success());
    drop(server);
    let server = start(&disk, "");
    device.reconnect(server.socket(), &config).unwrap();
    for _ in 0..300 {
        assert_eq!(device.queues[0].run(Op::Read, 8, 4096), OK);
    }
    server.signal(Signal::KILL);
    drop(server);
    let server = start_after_kill(&disk);
    device.reconnect(server.socket(), &config).unwrap();
    assert!(device.queues[0].ring.broken(HANG));
    server.wait_for_log(&["queue 0 cannot be served", "reset the guest"]);
    device.frontend.reset_device().unwrap();
    drop(device);
    let mut device = Device::connect(server.socket(), &config).unwrap();
    assert_eq!(device.queues[0].run(Op::Read, 8, 4096), OK);
}
