//! The driver against qemu-storage-daemon: a server that this project did not write tells whether the driver is right.

use std::io::Write;
use std::process::Command;

use testkit::chain::{Chain, Table, header, legal_layouts};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::frontend::protocol;
use testkit::server::Server;

#[test]
fn reads_writes_and_flushes_in_every_ring_mode() {
    let Some((server, dir)) = qemu() else { return };
    for (indirect, event_idx) in [(false, false), (false, true), (true, false), (true, true)] {
        let config = DeviceConfig {
            queues: 2,
            indirect,
            event_idx,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(server.socket(), &config).unwrap();
        let disk_config = device.config().unwrap();
        assert_eq!((disk_config.capacity, disk_config.num_queues), (8 << 11, 2));
        for queue in &mut device.queues {
            let sector = 8 * u64::from(queue.index);
            assert_eq!(queue.read(sector, 4096).unwrap(), content(sector, 4096));
            assert_eq!(queue.write(sector, &content(77, 4096)), 0);
            assert_eq!(queue.run(Op::Flush, 0, 0), 0);
            assert_eq!(queue.read(sector, 4096).unwrap(), content(77, 4096));
            assert_eq!(queue.write(sector, &content(sector, 4096)), 0);
            assert_eq!(queue.run(Op::GetId, 0, 0), 0);
            assert_eq!(queue.run(Op::Unknown(77), 0, 512), 2);
        }
        // More requests than a 16-bit index counts, 16 at a time.
        let queue = &mut device.queues[0];
        let slots: Vec<u16> = (0..queue.slots()).collect();
        slots
            .iter()
            .for_each(|&slot| queue.prepare(slot, Op::Read, u64::from(slot), 512));
        for round in 0..70_000 / u64::from(queue.slots()) {
            slots
                .iter()
                .for_each(|&slot| queue.set_sector(slot, round + u64::from(slot)));
            queue.submit(&slots);
            assert!(
                queue
                    .finish(slots.len())
                    .iter()
                    .all(|&(_, status)| status == 0)
            );
        }
    }
    drop(dir);
}

#[test]
fn every_descriptor_layout() {
    let Some((server, dir)) = qemu() else { return };
    let config = DeviceConfig {
        slots: 1,
        protocol: protocol::ALL & !protocol::REPLY_ACK,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(server.socket(), &config).unwrap();
    let low = &device.memory.regions()[Device::LOW];
    let (table, from, to) = (
        low.alloc(4096, 16),
        low.alloc(4096, 16),
        low.alloc(65536, 16),
    );
    let (queue, memory) = (&mut device.queues[0], &device.memory);
    // QEMU's libvhost-user takes an indirect table only as the first descriptor. It also counts a buffer over two
    // regions as two descriptors and finds a loop then, so that is left to the tests of our own server.
    for (name, layout) in legal_layouts()
        .into_iter()
        .filter(|(_, l)| !matches!(l.table, Table::Mixed(_)))
    {
        let chain = Chain::request(memory, &layout, from, &header(0, 8), to, 4097);
        let first = queue.first_free_desc();
        let head = chain.place(layout.table, &mut queue.ring, first, memory, table);
        queue.ring.publish([head]);
        let used = queue
            .ring
            .next_used(HANG)
            .unwrap_or_else(|| panic!("no completion: {name}"));
        assert_eq!((used.id, used.len), (u32::from(head), 4097), "{name}");
        assert_eq!(
            chain.written(memory),
            [content(8, 4096), vec![0]].concat(),
            "{name}"
        );
    }
    drop(dir);
}

fn qemu() -> Option<(Server, tempfile::TempDir)> {
    if Command::new("qemu-storage-daemon")
        .arg("--version")
        .output()
        .is_err()
    {
        eprintln!("skipped: qemu-storage-daemon is not installed");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk.raw");
    std::fs::File::create(&file)
        .unwrap()
        .write_all(&content(0, 8 << 20))
        .unwrap();
    let blockdev = format!("driver=file,filename={}", file.display());
    Some((
        Server::qemu(&blockdev, &dir.path().join("disk.sock"), 2).unwrap(),
        dir,
    ))
}

/// Bytes that differ from sector to sector and within one.
fn content(sector: u64, len: usize) -> Vec<u8> {
    let words = (0..len as u64 / 8).map(|i| (sector * 64 + i).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}
