//! Properties of packed virtqueues, tested with a driver that was written from the specification. What they share with
//! split queues is tested with those.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use testkit::chain::header;
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::frontend::message::{SET_VRING_BASE, SET_VRING_ENABLE};
use testkit::ring::{Desc, PackedDesc};
use virtio_bindings::virtio_blk::*;

use crate::support::{content, seed, serve};
use testkit::random::Random;
use testkit::server::Server;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
/// Long enough for an unexpected event to happen.
const QUIET_PERIOD: Duration = Duration::from_millis(100);

fn connect(server: &Server, config: DeviceConfig) -> Device {
    let config = DeviceConfig {
        packed: true,
        ..config
    };
    let device = Device::connect(server.socket(), &config).unwrap();
    assert!(device.queues.iter().all(|q| q.ring.is_packed()));
    device
}

fn assert_reads(device: &mut Device, queue: usize) {
    assert_eq!(
        device.queues[queue].read(8, 4096).unwrap(),
        content(8, 4096)
    );
}

/// Sizes that are not powers of two, down to the smallest: chains of three cross the end of the ring in every way.
#[test]
fn any_ring_size() {
    let (server, _disk) = serve("queue-size=1024");
    for queue_size in [3, 4, 5, 7, 100, 333, 1000, 1023, 1024] {
        for (indirect, event_idx) in [(false, false), (false, true), (true, true)] {
            let slots = if indirect { queue_size } else { queue_size / 3 };
            let config = DeviceConfig {
                queue_size,
                slots: slots.min(100),
                buffer_len: 4096,
                indirect,
                event_idx,
                ..DeviceConfig::default()
            };
            let mut device = connect(&server, config);
            let queue = &mut device.queues[0];
            let slots: Vec<u16> = (0..queue.slots()).collect();
            for round in 0..(4 * usize::from(queue_size)).div_ceil(slots.len()) {
                for &slot in &slots {
                    let sector = round as u64 % 50 + u64::from(slot);
                    queue.prepare(slot, Op::Read, sector, 512);
                    queue.write_buffer(slot, &[0; 512]);
                }
                queue.submit(&slots);
                for (slot, status) in queue.finish(slots.len()) {
                    let sector = round as u64 % 50 + u64::from(slot);
                    assert_eq!(status, OK);
                    assert!(queue.read_buffer(slot, 512) == content(sector, 512));
                }
            }
        }
    }
}

/// Requests of very different lengths complete out of order and are identified by their ids.
#[test]
fn requests_complete_out_of_order() {
    let (server, _disk) = serve("queue-size=64,cache=none");
    for indirect in [false, true] {
        let config = DeviceConfig {
            queue_size: 64,
            slots: 20,
            buffer_len: 256 << 10,
            indirect,
            ..DeviceConfig::default()
        };
        let mut device = connect(&server, config);
        let queue = &mut device.queues[0];
        let (mut ready, mut random) = ((0..20u16).collect::<Vec<_>>(), Random(seed()));
        let mut asked = [(0, 0); 20];
        let (mut overtaken, mut order) = (0, Vec::new());
        for _ in 0..60 {
            for &slot in &ready {
                let len = [512, 4096, 256 << 10][random.below(3) as usize];
                let sector = random.below(1000);
                asked[usize::from(slot)] = (sector, len);
                queue.prepare(slot, Op::Read, sector, len as u32);
            }
            queue.submit(&ready);
            order.append(&mut ready);
            for (slot, status) in queue.finish(1) {
                let (sector, len) = asked[usize::from(slot)];
                assert_eq!(status, OK);
                assert!(queue.read_buffer(slot, len) == content(sector, len));
                overtaken += usize::from(order[0] != slot);
                order.retain(|&other| other != slot);
                ready.push(slot);
            }
        }
        assert!(overtaken > 0, "every request completed in order");
        queue.finish(order.len());
    }
}

/// A stopped queue has returned everything it fetched, so both reported positions are equal, and it resumes there.
#[test]
fn stopped_queues_resume() {
    let (server, _disk) = serve("queue-size=64");
    for event_idx in [false, true] {
        let config = DeviceConfig {
            queue_size: 50,
            indirect: false,
            event_idx,
            ..DeviceConfig::default()
        };
        let mut device = connect(&server, config);
        for round in 0..60 {
            let queue = &mut device.queues[0];
            let slots: Vec<u16> = (0..queue.slots()).collect();
            slots
                .iter()
                .for_each(|&slot| queue.prepare(slot, Op::Read, round + u64::from(slot), 512));
            queue.submit(&slots);
            // With or without requests in flight.
            let mut done = 0;
            if round % 2 == 0 {
                done += queue.finish(slots.len()).len();
            }
            let base = device.frontend.vring_base(0).unwrap();
            assert_eq!(base >> 16, base & 0xffff, "something is in flight");
            let queue = &mut device.queues[0];
            done += queue.poll(|_, status| assert_eq!(status, OK));
            let taken = queue.ring.as_packed().used();
            assert_eq!(u32::from(taken), base & 0xffff, "{done} are done");
            device.start_queue(0, taken).unwrap();
        }
        assert_reads(&mut device, 0);
    }
}

/// Descriptors that were available before the device knew the ring are fetched at its start; an invalid start position
/// disables only that ring.
#[test]
fn start_position_beyond_the_ring_is_refused() {
    let (server, _disk) = serve("queues=2");
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = connect(&server, config);
    for bad in [256u32, 0x7fff, 256 << 16, u32::MAX] {
        let words = |a: u32, b: u32| [a.to_ne_bytes(), b.to_ne_bytes()].concat();
        let frontend = &mut device.frontend;
        frontend
            .command(SET_VRING_ENABLE, &words(0, 0), &[])
            .unwrap();
        frontend
            .command(SET_VRING_BASE, &words(0, bad), &[])
            .unwrap();
        frontend
            .command(SET_VRING_ENABLE, &words(0, 1), &[])
            .unwrap();
        assert!(device.queues[0].ring.broken(HANG), "no error: {bad:#x}");
        assert_reads(&mut device, 1);
        device.stop_queue(0).unwrap();
        device.start_queue(0, 1 << 15).unwrap();
        assert_reads(&mut device, 0);
    }
    server.wait_for_log(&["queue 0", "ring base"]);
}

// Hostile guests

/// Memory for the buffers of a bad chain: the header at 0, data at 0x1000, the status at 0x3000.
struct Attack<'a> {
    device: &'a mut Device,
    at: u64,
}

impl Attack<'_> {
    /// Puts descriptors at the next positions, without `AVAIL` and `USED`, and makes them available unchanged.
    fn post(&mut self, descs: &[PackedDesc]) {
        let ring = &mut self.device.queues[0].ring;
        let size = ring.size;
        let ring = ring.as_packed();
        let (start, flags) = (ring.avail(), ring.avail_flags());
        for (i, d) in (0..).zip(descs).collect::<Vec<_>>().into_iter().rev() {
            let position = (start & 0x7fff) + i;
            assert!(position < size);
            ring.write(
                position,
                PackedDesc {
                    flags: d.flags | flags,
                    ..*d
                },
            );
        }
        self.device.queues[0].ring.kick();
    }

    fn good(&self, id: u16) -> [PackedDesc; 3] {
        self.device
            .memory
            .write(self.at, &header(VIRTIO_BLK_T_IN, 0));
        let desc = |at, len, flags| PackedDesc {
            addr: self.at + at,
            len,
            id,
            flags,
        };
        [
            desc(0, 16, Desc::NEXT),
            desc(0x1000, 512, Desc::NEXT | Desc::WRITE),
            desc(0x3000, 1, Desc::WRITE),
        ]
    }
}

type Case = (&'static str, &'static str, fn(&mut Attack));

/// What a guest must not write into a packed ring, and the expected log message.
const BAD: &[Case] = &[
    ("id beyond the ring", "buffer id 256", |a| {
        let chain = a.good(256);
        a.post(&chain);
    }),
    ("id far beyond the ring", "buffer id 65535", |a| {
        let chain = a.good(u16::MAX);
        a.post(&chain);
    }),
    (
        "a chain that fills the ring and goes on",
        "256 descriptors",
        |a| {
            let mut empty = a.good(0)[0];
            empty.len = 0;
            a.post(&[empty; 256]);
        },
    ),
    ("a table behind a descriptor", "indirect descriptor", |a| {
        let mut chain = a.good(0);
        chain[1] = PackedDesc {
            flags: Desc::INDIRECT,
            len: 32,
            ..chain[1]
        };
        a.post(&chain[..2]);
    }),
    ("a table with a next", "indirect descriptor", |a| {
        let mut chain = a.good(0);
        chain[0].flags |= Desc::INDIRECT;
        a.post(&chain);
    }),
    ("a table of 17 bytes", "indirect descriptor", |a| {
        let mut chain = a.good(0);
        (chain[0].flags, chain[0].len) = (Desc::INDIRECT, 17);
        a.post(&chain[..1]);
    }),
    ("a table longer than any chain", "descriptors", |a| {
        let mut chain = a.good(0);
        (chain[0].flags, chain[0].len) = (Desc::INDIRECT, 16 * 257);
        a.post(&chain[..1]);
    }),
    ("a table in a hole", "is not in guest memory", |a| {
        let mut chain = a.good(0);
        (chain[0].flags, chain[0].len, chain[0].addr) = (Desc::INDIRECT, 48, 1 << 40);
        a.post(&chain[..1]);
    }),
    ("a header in a hole", "is not in guest memory", |a| {
        let mut chain = a.good(0);
        chain[0].addr = 1 << 40;
        a.post(&chain);
    }),
    ("no status", "no status byte", |a| {
        let mut chain = a.good(0);
        chain[0].flags = 0;
        a.post(&chain[..1]);
    }),
];

#[test]
fn bad_chain_retires_only_its_queue() {
    for (name, cause, post) in BAD {
        println!("{name}");
        // One server per case, because guest errors are logged at most once per second.
        let (server, disk) = serve("queues=2");
        let config = DeviceConfig {
            queues: 2,
            ..DeviceConfig::default()
        };
        let mut device = connect(&server, config);
        let at = device.memory.regions()[Device::LOW].alloc(0x4000, 4096);
        post(&mut Attack {
            device: &mut device,
            at,
        });
        assert!(device.queues[0].ring.broken(HANG), "{name}: not retired");
        assert!(
            device.queues[0].ring.next_used(QUIET_PERIOD).is_none(),
            "{name}: completed"
        );
        assert_reads(&mut device, 1);
        device.stop_queue(0).unwrap();
        device.start_queue(0, 1 << 15).unwrap();
        assert_reads(&mut device, 0);
        println!("{name}");
        server.wait_for_log(&["queue 0"]);
        server.wait_for_log(&[cause]);
        assert_eq!(disk.bytes(0, 4096), content(0, 4096));
    }
}

/// A guest takes back available descriptors, and changes chains and tables while the device reads them.
#[test]
fn descriptors_changing_under_the_device() {
    let (server, disk) = serve("queues=2");
    let config = DeviceConfig {
        queues: 2,
        slots: 1,
        queue_size: 8,
        ..DeviceConfig::default()
    };
    let mut device = connect(&server, config);
    let at = device.memory.regions()[Device::LOW].alloc(0x9000, 4096);
    let memory = device.memory.clone();
    let ring = device.queues[0].ring.guest_addresses().desc;
    let stop = AtomicBool::new(false);
    let mut retired = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(7);
            while !stop.load(Ordering::Relaxed) {
                let flags = [0x80u16, 0x8000, 0x8080, 0][random.below(4) as usize]
                    | [0, 1, 2, 3, 4, 6][random.below(6) as usize];
                // The flags of any descriptor, at any time.
                let position = random.below(8);
                memory.write(ring + 16 * position + 14, &flags.to_le_bytes());
                std::hint::spin_loop();
            }
        });
        for round in 0..3000u64 {
            let attack = Attack {
                device: &mut device,
                at,
            };
            let chain = attack.good((round % 8) as u16);
            let ring = attack.device.queues[0].ring.as_packed();
            for (i, d) in (0..8).zip(chain.iter().cycle()) {
                ring.write(i, *d);
            }
            attack.device.queues[0].ring.kick();
            if round % 100 == 0 {
                assert_reads(&mut device, 1);
            }
            if device.queues[0].ring.broken(Duration::ZERO) || round % 10 == 0 {
                retired += 1;
                device.stop_queue(0).unwrap();
                device.start_queue(0, 1 << 15).unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(retired > 0);
    device.stop_queue(0).unwrap();
    device.start_queue(0, 1 << 15).unwrap();
    assert_reads(&mut device, 0);
    assert_reads(&mut device, 1);
    assert_eq!(disk.bytes(0, 4096), content(0, 4096), "nothing was written");
}

/// Descriptors and event areas with random content.
#[test]
fn garbage_in_the_ring() {
    let (server, _disk) = serve("queues=2");
    let config = DeviceConfig {
        queues: 2,
        slots: 1,
        queue_size: 16,
        ..DeviceConfig::default()
    };
    let mut device = connect(&server, config);
    let mut random = Random(seed());
    // Not in the rings' region: the device could rightfully write there.
    let low = device.memory.regions()[Device::LOW].gpa;
    let driver = device.queues[0].ring.guest_addresses().avail;
    let start = Instant::now();
    for round in 0..2000 {
        for at in (0..0x8000).step_by(0x400) {
            let kind = random.below(16) as u32;
            device
                .memory
                .write(low + at, &header(kind, random.below(40_000)));
        }
        let ring = device.queues[0].ring.as_packed();
        for position in 0..16 {
            let desc = PackedDesc {
                addr: match random.below(9) {
                    0 => random.any(),
                    _ => low + random.below(0x8000),
                },
                len: [16, 1, random.below(2048) as u32, random.any() as u32]
                    [random.below(16).saturating_sub(12) as usize],
                id: random.below(17) as u16,
                flags: [0x80, 0x8000][random.below(2) as usize] | random.below(8) as u16,
            };
            ring.write(position, desc);
        }
        device
            .memory
            .write(driver, &random.any().to_le_bytes()[..4]);
        device.queues[0].ring.kick();
        let base = device.stop_queue(0).unwrap();
        assert!(base & 0x7fff < 16, "round {round}: base {base:#x}");
        device.start_queue(0, base).unwrap();
        assert_eq!(device.queues[1].run(Op::Read, 8, 4096), OK, "round {round}");
    }
    assert_reads(&mut device, 0);
    println!("{:?}", start.elapsed());
}
