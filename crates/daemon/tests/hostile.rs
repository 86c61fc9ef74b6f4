//! Guests and front-ends that mean harm. Whatever they do, it ends with a virtio status, a retired queue or a closed
//! connection: the other queues, disks and connections go on, and the next front-end finds a working disk.

use std::cell::RefCell;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use testkit::chain::{Chain, header};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::frontend::message::*;
use testkit::frontend::{F_LOG_ALL, Frontend, NEED_REPLY, REPLY, VERSION, eventfd};
use testkit::memory::{Memory, Region};
use testkit::ring::Desc;
use testkit::storage::Storage;
use virtio_bindings::virtio_blk::*;

mod support;
use support::{DISK_BYTES, Disk, content, seed, serve, serve_all};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;
/// Long enough for anything to happen that should not happen.
const A_WHILE: Duration = Duration::from_millis(100);
const END: u64 = DISK_BYTES / 512;

// Guests

/// What a bad request must lead to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expect {
    /// It completes with this status, and its queue goes on.
    Status(u8),
    /// Its queue is retired.
    Retired,
    /// One of both: the specification leaves it open, and either is safe.
    ErrorOrRetired,
    /// As the device likes, as long as it is one of the above or success.
    Anything,
}

use Expect::*;

/// A queue about to be given a bad request: free descriptors, and memory for the buffers.
struct Attack<'a> {
    device: &'a mut Device,
    /// The first free descriptor.
    first: u16,
    /// Start of some scratch memory: a header goes to 0, data to 0x1000, tables to 0x4000.
    at: u64,
}

/// Where the status byte of all attacks goes, behind `Attack::at`.
const STATUS: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const W: u16 = Desc::WRITE;

impl Attack<'_> {
    /// A device-readable header of a request.
    fn header(&self, kind: u32, sector: u64) -> Desc {
        self.device.memory.write(self.at, &header(kind, sector));
        desc(self.at, 16, 0)
    }

    fn data(&self, len: u32, flags: u16) -> Desc {
        desc(self.at + 0x1000, len, flags)
    }

    fn status(&self) -> Desc {
        desc(self.at + STATUS, 1, W)
    }

    /// Submits buffers as a well-linked chain.
    fn chain(&mut self, buffers: &[Desc]) {
        let count = buffers.len() as u16;
        let linked = (0..count).zip(buffers).map(|(i, d)| match i + 1 == count {
            true => *d,
            false => Desc {
                flags: d.flags | Desc::NEXT,
                next: self.first + i + 1,
                ..*d
            },
        });
        let linked: Vec<_> = linked.collect();
        self.raw(&linked, self.first);
    }

    /// Submits descriptors as they are, put into the ring from `first` on.
    fn raw(&mut self, descs: &[Desc], head: u16) {
        let ring = &mut self.device.queues[0].ring;
        (self.first..)
            .zip(descs)
            .for_each(|(i, d)| ring.set_desc(i, *d));
        ring.publish([head]);
    }

    /// Submits an indirect table whose descriptors are linked as they are.
    fn indirect(&mut self, table: &[Desc]) {
        let at = self.at + TABLE;
        (0..).zip(table).for_each(|(i, d)| {
            let bytes = self.device.queues[0].ring.table_bytes(d);
            self.device.memory.write(at + 16 * i, &bytes);
        });
        self.chain(&[desc(at, 16 * table.len() as u32, Desc::INDIRECT)]);
    }

    /// The descriptors of a good read, as an indirect table has them.
    fn good_table(&self) -> [Desc; 3] {
        let link = |d: Desc, next| Desc {
            flags: d.flags | Desc::NEXT,
            next,
            ..d
        };
        [
            link(self.header(VIRTIO_BLK_T_IN, 0), 1),
            link(self.data(512, W), 2),
            self.status(),
        ]
    }
}

fn desc(addr: u64, len: u32, flags: u16) -> Desc {
    Desc {
        addr,
        len,
        flags,
        next: 0,
    }
}

type Case = (&'static str, Expect, fn(&mut Attack));

/// Requests that are well-formed and ask for what cannot be.
const BAD_REQUESTS: &[Case] = &[
    ("read behind the end", Status(IOERR), |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_IN, END), a.data(512, W), a.status()])
    }),
    ("read over the end", Status(IOERR), |a| {
        a.chain(&[
            a.header(VIRTIO_BLK_T_IN, END - 1),
            a.data(1024, W),
            a.status(),
        ])
    }),
    ("write behind the end", Status(IOERR), |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_OUT, END), a.data(512, 0), a.status()])
    }),
    ("write over the end", Status(IOERR), |a| {
        a.chain(&[
            a.header(VIRTIO_BLK_T_OUT, END - 1),
            a.data(1024, 0),
            a.status(),
        ])
    }),
    ("last sector there is", Status(IOERR), |a| {
        a.chain(&[
            a.header(VIRTIO_BLK_T_IN, u64::MAX),
            a.data(512, W),
            a.status(),
        ])
    }),
    ("sector that wraps in bytes", Status(IOERR), |a| {
        a.chain(&[
            a.header(VIRTIO_BLK_T_OUT, 1 << 55),
            a.data(512, 0),
            a.status(),
        ]);
    }),
    ("sector that is negative in bytes", Status(IOERR), |a| {
        a.chain(&[
            a.header(VIRTIO_BLK_T_OUT, 1 << 54),
            a.data(512, 0),
            a.status(),
        ]);
    }),
    ("read of 513 bytes", Status(IOERR), |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_IN, 0), a.data(513, W), a.status()])
    }),
    ("write of 511 bytes", Status(IOERR), |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_OUT, 0), a.data(511, 0), a.status()])
    }),
    ("read of nothing", Anything, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_IN, 0), a.status()])
    }),
    ("write of nothing", Anything, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_OUT, 0), a.status()])
    }),
    (
        "write with nothing to read but room to write",
        ErrorOrRetired,
        |a| {
            a.chain(&[a.header(VIRTIO_BLK_T_OUT, 0), a.data(512, W), a.status()]);
        },
    ),
    ("read with data to read", ErrorOrRetired, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_IN, 0), a.data(512, 0), a.status()])
    }),
    ("flush with data", Anything, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_FLUSH, 9), a.data(512, W), a.status()])
    }),
    ("id into a short buffer", Anything, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_GET_ID, 0), a.data(3, W), a.status()])
    }),
    ("id into nothing", Anything, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_GET_ID, 0), a.status()])
    }),
    ("id into a long buffer", Anything, |a| {
        a.chain(&[
            a.header(VIRTIO_BLK_T_GET_ID, 0),
            a.data(4096, W),
            a.status(),
        ])
    }),
    ("unknown type", Status(UNSUPP), |a| {
        a.chain(&[a.header(77, 0), a.data(512, W), a.status()])
    }),
    ("unknown type without data", Status(UNSUPP), |a| {
        a.chain(&[a.header(u32::MAX, 0), a.status()])
    }),
    ("secure erase, not offered", Status(UNSUPP), |a| {
        a.chain(&[a.header(14, 0), a.data(16, 0), a.status()])
    }),
    ("zone report, not offered", Status(UNSUPP), |a| {
        a.chain(&[a.header(16, 0), a.data(512, W), a.status()])
    }),
];

/// Chains that no driver may build.
const BAD_CHAINS: &[Case] = &[
    ("loop of one", Retired, |a| {
        let head = a.header(VIRTIO_BLK_T_IN, 0);
        a.raw(
            &[Desc {
                flags: Desc::NEXT,
                next: a.first,
                ..head
            }],
            a.first,
        );
    }),
    ("loop of two", Retired, |a| {
        let (next, back) = (a.first + 1, a.first);
        let head = a.header(VIRTIO_BLK_T_IN, 0);
        let data = a.data(512, W | Desc::NEXT);
        a.raw(
            &[
                Desc {
                    flags: Desc::NEXT,
                    next,
                    ..head
                },
                Desc { next: back, ..data },
            ],
            a.first,
        );
    }),
    ("loop of writable descriptors", Retired, |a| {
        let next = a.first + 1;
        let head = a.header(VIRTIO_BLK_T_IN, 0);
        a.raw(
            &[
                Desc {
                    flags: Desc::NEXT,
                    next,
                    ..head
                },
                Desc {
                    next,
                    ..a.data(512, W | Desc::NEXT)
                },
            ],
            a.first,
        );
    }),
    ("header outside memory", Retired, |a| {
        a.chain(&[desc(0x10, 16, 0), a.data(512, W), a.status()])
    }),
    ("data outside memory", ErrorOrRetired, |a| {
        a.chain(&[
            a.header(VIRTIO_BLK_T_IN, 0),
            desc(1 << 40, 512, W),
            a.status(),
        ]);
    }),
    ("data to write outside memory", ErrorOrRetired, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_OUT, 0), desc(0, 512, 0), a.status()]);
    }),
    ("data at an address of the front-end", ErrorOrRetired, |a| {
        let user = a.device.memory.user(a.at);
        a.chain(&[a.header(VIRTIO_BLK_T_IN, 0), desc(user, 512, W), a.status()]);
    }),
    ("data that runs into a hole", ErrorOrRetired, |a| {
        let end = a.device.memory.regions()[Device::HIGH].end();
        a.chain(&[
            a.header(VIRTIO_BLK_T_IN, 0),
            desc(end - 512, 1024, W),
            a.status(),
        ]);
    }),
    ("data that ends one byte in a hole", ErrorOrRetired, |a| {
        let end = a.device.memory.regions()[Device::HIGH].end();
        a.chain(&[
            a.header(VIRTIO_BLK_T_OUT, 0),
            desc(end - 511, 512, 0),
            a.status(),
        ]);
    }),
    ("data that wraps around", ErrorOrRetired, |a| {
        a.chain(&[
            a.header(VIRTIO_BLK_T_IN, 0),
            desc(u64::MAX - 511, 1024, W),
            a.status(),
        ]);
    }),
    (
        "data up to the last address there is",
        ErrorOrRetired,
        |a| {
            a.chain(&[
                a.header(VIRTIO_BLK_T_IN, 0),
                desc(u64::MAX - 511, 512, W),
                a.status(),
            ]);
        },
    ),
    (
        "data in memory that is not announced",
        ErrorOrRetired,
        |a| {
            let spare = a.device.memory.regions()[Device::SPARE].gpa;
            a.chain(&[
                a.header(VIRTIO_BLK_T_IN, 0),
                desc(spare, 512, W),
                a.status(),
            ]);
        },
    ),
    ("4 GiB of data", ErrorOrRetired, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_IN, 0), a.data(!511, W), a.status()]);
    }),
    (
        "lengths that overflow 32 bits together",
        ErrorOrRetired,
        |a| {
            let data = a.data(1 << 31, W);
            a.chain(&[
                a.header(VIRTIO_BLK_T_IN, 0),
                data,
                data,
                a.data(512, W),
                a.status(),
            ]);
        },
    ),
    ("status outside memory", Retired, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_FLUSH, 0), desc(1 << 40, 1, W)])
    }),
    ("no status", Retired, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_FLUSH, 0)])
    }),
    ("no status behind data to write", Retired, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_OUT, 0), a.data(512, 0)])
    }),
    ("no header", Retired, |a| {
        a.chain(&[a.data(512, W), a.status()])
    }),
    ("half a header", ErrorOrRetired, |a| {
        a.chain(&[desc(a.at, 8, 0), a.status()])
    }),
    ("header of 15 bytes", ErrorOrRetired, |a| {
        a.chain(&[desc(a.at, 15, 0), a.data(512, W), a.status()])
    }),
    ("readable behind writable", ErrorOrRetired, |a| {
        a.chain(&[
            a.header(VIRTIO_BLK_T_IN, 0),
            a.data(512, W),
            a.data(512, 0),
            a.status(),
        ]);
    }),
    ("header behind the status", ErrorOrRetired, |a| {
        a.chain(&[a.status(), a.header(VIRTIO_BLK_T_FLUSH, 0)])
    }),
    ("empty data", Anything, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_IN, 0), a.data(0, W), a.status()])
    }),
    ("empty descriptors only", Retired, |a| {
        a.chain(&[desc(a.at, 0, 0), desc(a.at, 0, 0), desc(a.at, 0, W)])
    }),
    ("empty status", Retired, |a| {
        a.chain(&[a.header(VIRTIO_BLK_T_FLUSH, 0), desc(a.at + STATUS, 0, W)])
    }),
    ("empty and outside memory", Anything, |a| {
        a.chain(&[
            a.header(VIRTIO_BLK_T_IN, 0),
            desc(u64::MAX, 0, W),
            a.data(512, W),
            a.status(),
        ]);
    }),
    ("indirect table of 17 bytes", Retired, |a| {
        a.good_table();
        a.chain(&[desc(a.at + TABLE, 17, Desc::INDIRECT)]);
    }),
    ("indirect table of 47 bytes", Retired, |a| {
        let table = a.good_table();
        (0..)
            .zip(table)
            .for_each(|(i, d)| a.device.memory.write(a.at + TABLE + 16 * i, &d.bytes()));
        a.chain(&[desc(a.at + TABLE, 47, Desc::INDIRECT)]);
    }),
    ("empty indirect table", Retired, |a| {
        a.chain(&[desc(a.at + TABLE, 0, Desc::INDIRECT)])
    }),
    ("indirect table outside memory", Retired, |a| {
        a.chain(&[desc(1 << 40, 48, Desc::INDIRECT)])
    }),
    ("indirect table that wraps around", Retired, |a| {
        a.chain(&[desc(u64::MAX - 15, 48, Desc::INDIRECT)])
    }),
    ("indirect table as long as memory", Retired, |a| {
        // Longer than any legal chain, and it never ends.
        for i in 0..1024 {
            let endless = Desc {
                flags: Desc::NEXT,
                next: i + 1,
                ..desc(a.at, 1, 0)
            };
            a.device
                .memory
                .write(a.at + TABLE + 16 * u64::from(i), &endless.bytes());
        }
        a.chain(&[desc(a.at + TABLE, 1024 * 16, Desc::INDIRECT)]);
    }),
    ("indirect in indirect", Retired, |a| {
        let inner = a.good_table();
        let at = a.at + TABLE + 0x1000;
        (0..)
            .zip(inner)
            .for_each(|(i, d)| a.device.memory.write(at + 16 * i, &d.bytes()));
        a.indirect(&[desc(at, 48, Desc::INDIRECT)]);
    }),
    ("indirect with a next", Retired, |a| {
        let table = a.good_table();
        (0..)
            .zip(table)
            .for_each(|(i, d)| a.device.memory.write(a.at + TABLE + 16 * i, &d.bytes()));
        a.chain(&[desc(a.at + TABLE, 48, Desc::INDIRECT), a.status()]);
    }),
];

/// Links and heads that no driver may write into a split ring. A packed one has neither.
const BAD_LINKS: &[Case] = &[
    ("next beyond the ring", Retired, |a| {
        let head = a.header(VIRTIO_BLK_T_IN, 0);
        a.raw(
            &[Desc {
                flags: Desc::NEXT,
                next: a.device.queues[0].ring.size,
                ..head
            }],
            a.first,
        );
    }),
    ("next far beyond the ring", Retired, |a| {
        let head = a.header(VIRTIO_BLK_T_IN, 0);
        a.raw(
            &[Desc {
                flags: Desc::NEXT,
                next: u16::MAX,
                ..head
            }],
            a.first,
        );
    }),
    ("loop in an indirect table", Retired, |a| {
        let mut table = a.good_table();
        table[2] = Desc {
            flags: W | Desc::NEXT,
            next: 1,
            ..table[2]
        };
        a.indirect(&table);
    }),
    ("head beyond the ring", Retired, |a| {
        a.raw(&[], a.device.queues[0].ring.size)
    }),
    ("head far beyond the ring", Retired, |a| {
        a.raw(&[], u16::MAX)
    }),
    ("more available than the ring holds", Retired, |a| {
        let ring = &mut a.device.queues[0].ring;
        ring.publish_jump(ring.size + 1);
    }),
    ("available index gone backwards", Retired, |a| {
        a.device.queues[0].ring.publish_jump(u16::MAX)
    }),
    ("next beyond the indirect table", Retired, |a| {
        let mut table = a.good_table();
        table[1].next = 3;
        a.indirect(&table);
    }),
];

#[test]
fn bad_requests_get_their_status() {
    attack_with_all(BAD_REQUESTS, DeviceConfig::default());
}

#[test]
fn bad_chains_retire_their_queue_only() {
    attack_with_all(BAD_CHAINS, DeviceConfig::default());
    attack_with_all(BAD_LINKS, DeviceConfig::default());
}

#[test]
fn bad_requests_and_chains_in_packed_rings() {
    let packed = || DeviceConfig {
        packed: true,
        ..DeviceConfig::default()
    };
    attack_with_all(BAD_REQUESTS, packed());
    attack_with_all(BAD_CHAINS, packed());
}

#[test]
fn indirect_tables_that_were_not_negotiated_do_no_harm() {
    attack_with_all(
        &[("indirect", Anything, |a| a.indirect(&a.good_table()))],
        DeviceConfig {
            indirect: false,
            ..DeviceConfig::default()
        },
    );
}

fn attack_with_all(cases: &[Case], config: DeviceConfig) {
    let config = DeviceConfig {
        queues: 2,
        slots: 1,
        ..config
    };
    let caches: &[_] = match config.packed {
        // What a chain leads to does not depend on the kind of ring.
        true => &["none"],
        false => &["none", "writeback"],
    };
    for cache in caches {
        let (victim, other) = (Disk::new(), Disk::new());
        let options = format!("queues=2,cache={cache}");
        let server = serve_all(&[victim.argument(&options), other.argument(&options)]);
        let mut bystander = Device::connect(&other.socket, &config).unwrap();
        for &(name, expect, post) in cases {
            println!("{name}, cache={cache}");
            let mut device = Device::connect(&victim.socket, &config).unwrap();
            attack(&mut device, expect, post);
            assert_reads(&mut device, 1);
            assert_reads(&mut bystander, 0);
        }
        assert_eq!(
            victim.bytes(0, 4096),
            content(0, 4096),
            "no bad request may write"
        );
        assert_eq!(victim.file.metadata().unwrap().len(), DISK_BYTES);
        drop(server);
    }
}

/// Posts a bad request on queue 0, and sees to it that it ends as expected.
fn attack(device: &mut Device, expect: Expect, post: fn(&mut Attack)) {
    let at = device.memory.regions()[Device::LOW].alloc(0x9000, 4096);
    let first = device.queues[0].first_free_desc();
    device.memory.write(at, &vec![0xee; 0x9000]);
    post(&mut Attack { device, first, at });

    let queue = &mut device.queues[0];
    let deadline = Instant::now() + HANG;
    let used = loop {
        if let Some(used) = queue.ring.next_used(Duration::from_millis(5)) {
            break Some(used);
        } else if queue.ring.broken(Duration::from_millis(5)) {
            break None;
        }
        assert!(Instant::now() < deadline, "neither completed nor retired");
    };
    if let Some(used) = used {
        let status = device.memory.read(at + STATUS, 1)[0];
        let accepted = match expect {
            Status(expected) => status == expected,
            ErrorOrRetired => status == IOERR,
            Anything => status != 0xee,
            Retired => false,
        };
        assert!(
            accepted,
            "{used:?} with status {status}, but {expect:?} was expected"
        );
        // Nothing is written beside the buffers that were given.
        assert_eq!(device.memory.read(at + STATUS + 1, 64), [0xee; 64]);
    } else {
        assert!(
            !matches!(expect, Status(_)),
            "retired, but {expect:?} was expected"
        );
        device.queues[0].prepare(0, Op::Read, 0, 512);
        device.queues[0].submit(&[0]);
        assert!(
            device.queues[0].ring.next_used(A_WHILE).is_none(),
            "a retired queue goes on"
        );
        let base = device.stop_queue(0).unwrap();
        device.start_queue(0, base).unwrap();
    }
    assert_reads(device, 0);
}

fn assert_reads(device: &mut Device, queue: usize) {
    assert_eq!(
        device.queues[queue].read(8, 4096).unwrap(),
        content(8, 4096)
    );
}

#[test]
fn a_guest_cannot_flood_the_log() {
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
    server.logged(&["refused request"]);
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
    // Not in the region of the rings: the device would be right to write over them.
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

/// A guest that changes headers and tables while the device reads them: what was checked must be what is used.
#[test]
fn memory_that_changes_under_the_device() {
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

/// A front-end that takes its memory away from under the rings. For the data, the kernel answers EFAULT; the rings the
/// device reads itself.
#[test]
fn memory_that_goes_away() {
    let (mut server, _disk) = serve("");
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let memory = device.memory.clone();
    rustix::fs::ftruncate(&memory.regions()[Device::LOW].file, 4096).unwrap();
    assert_eq!(device.queues[0].run(Op::Read, 8, 4096), IOERR);
    rustix::fs::ftruncate(&memory.regions()[Device::RINGS].file, 4096).unwrap();
    device.queues[0].ring.kick();
    device.queues[0].ring.broken(A_WHILE);
    assert!(server.is_running());
    assert_reads(
        &mut Device::connect(server.socket(), &DeviceConfig::default()).unwrap(),
        0,
    );
}

// Front-ends

type Message = (&'static str, fn(&mut Device) -> std::io::Result<()>);

/// Messages after which the connection must be closed, or which must be refused if it stays.
const BAD_MESSAGES: &[Message] = &[
    ("version 0", |d| {
        d.frontend.send_raw(GET_FEATURES, NEED_REPLY, 0, &[], &[])
    }),
    ("version 2", |d| {
        d.frontend
            .send_raw(GET_FEATURES, NEED_REPLY | 2, 0, &[], &[])
    }),
    ("a reply to nothing", |d| {
        d.frontend
            .send_raw(GET_FEATURES, VERSION | REPLY | NEED_REPLY, 8, &[0; 8], &[])
    }),
    ("message 0", |d| raw(d, 0, &[])),
    ("message 4711", |d| raw(d, 4711, &[])),
    ("4 GiB of payload announced", |d| {
        d.frontend
            .send_raw(SET_OWNER, VERSION | NEED_REPLY, u32::MAX, &[0; 64], &[])
    }),
    ("64 KiB of payload", |d| raw(d, SET_MEM_TABLE, &[0; 65536])),
    ("SET_OWNER with payload", |d| raw(d, SET_OWNER, &[0; 8])),
    ("SET_FEATURES of 4 bytes", |d| raw(d, SET_FEATURES, &[0; 4])),
    ("SET_FEATURES of nothing", |d| raw(d, SET_FEATURES, &[])),
    ("SET_FEATURES that were not offered", |d| {
        raw(d, SET_FEATURES, &u64::MAX.to_ne_bytes())
    }),
    ("SET_PROTOCOL_FEATURES that were not offered", |d| {
        raw(d, SET_PROTOCOL_FEATURES, &u64::MAX.to_ne_bytes())
    }),
    ("GET_CONFIG of 4 GiB", |d| {
        raw(d, GET_CONFIG, &words(&[0, u32::MAX, 0]))
    }),
    ("GET_CONFIG far outside", |d| {
        raw(
            d,
            GET_CONFIG,
            &[words(&[u32::MAX - 3, 8, 0]), vec![0; 8]].concat(),
        )
    }),
    ("GET_CONFIG of another size than its payload", |d| {
        raw(d, GET_CONFIG, &[words(&[0, 60, 0]), vec![0; 8]].concat())
    }),
    ("GET_CONFIG without header", |d| raw(d, GET_CONFIG, &[0; 5])),
    ("SET_CONFIG of the capacity", |d| {
        raw(d, SET_CONFIG, &[words(&[0, 8, 0]), vec![0xff; 8]].concat())
    }),
    ("SET_CONFIG far outside", |d| {
        raw(d, SET_CONFIG, &[words(&[u32::MAX, 1, 0]), vec![0]].concat())
    }),
    ("SET_CONFIG of another size than its payload", |d| {
        raw(d, SET_CONFIG, &[words(&[32, 200, 0]), vec![0]].concat())
    }),
    ("SET_VRING_NUM of queue 99", |d| {
        raw(d, SET_VRING_NUM, &words(&[99, 128]))
    }),
    ("SET_VRING_NUM of 65536", |d| {
        raw(d, SET_VRING_NUM, &words(&[0, 65536]))
    }),
    ("SET_VRING_NUM of 4 GiB", |d| {
        raw(d, SET_VRING_NUM, &words(&[0, 1 << 31]))
    }),
    ("SET_VRING_BASE of queue 4294967295", |d| {
        raw(d, SET_VRING_BASE, &words(&[u32::MAX, 0]))
    }),
    ("SET_VRING_BASE of 70000", |d| {
        raw(d, SET_VRING_BASE, &words(&[0, 70000]))
    }),
    ("GET_VRING_BASE of queue 99", |d| {
        raw(d, GET_VRING_BASE, &words(&[99, 0]))
    }),
    ("SET_VRING_ENABLE of queue 99", |d| {
        raw(d, SET_VRING_ENABLE, &words(&[99, 1]))
    }),
    ("SET_VRING_ADDR of queue 99", |d| {
        raw(d, SET_VRING_ADDR, &ring_addresses(d, 99, 0, 0))
    }),
    ("SET_VRING_KICK of queue 200", |d| {
        raw_with_fd(d, SET_VRING_KICK, &200u64.to_ne_bytes())
    }),
    ("SET_VRING_CALL of queue 255", |d| {
        raw_with_fd(d, SET_VRING_CALL, &255u64.to_ne_bytes())
    }),
    ("SET_VRING_KICK without a descriptor", |d| {
        raw(d, SET_VRING_KICK, &0u64.to_ne_bytes())
    }),
    ("SET_VRING_ERR without a descriptor", |d| {
        raw(d, SET_VRING_ERR, &0u64.to_ne_bytes())
    }),
    ("SET_VRING_KICK with a regular file", |d| {
        raw_with_file(d, SET_VRING_KICK)
    }),
    ("SET_VRING_CALL with a regular file", |d| {
        raw_with_file(d, SET_VRING_CALL)
    }),
    ("SET_VRING_ERR with a regular file", |d| {
        raw_with_file(d, SET_VRING_ERR)
    }),
    ("SET_BACKEND_REQ_FD without a descriptor", |d| {
        raw(d, SET_BACKEND_REQ_FD, &[])
    }),
    ("SET_MEM_TABLE without descriptors", |d| {
        raw(
            d,
            SET_MEM_TABLE,
            &[words(&[1, 0]), region(d, |_| {})].concat(),
        )
    }),
    ("SET_MEM_TABLE of one region and 1000 announced", |d| {
        raw_with_fd(
            d,
            SET_MEM_TABLE,
            &[words(&[1000, 0]), region(d, |_| {})].concat(),
        )
    }),
    ("SET_MEM_TABLE of two regions and one descriptor", |d| {
        raw_with_fd(
            d,
            SET_MEM_TABLE,
            &[
                words(&[2, 0]),
                region(d, |_| {}),
                region(d, |r| r[0] += 1 << 30),
            ]
            .concat(),
        )
    }),
    ("ADD_MEM_REG without a descriptor", |d| {
        raw(d, ADD_MEM_REG, &[vec![0; 8], region(d, |_| {})].concat())
    }),
    ("ADD_MEM_REG of a descriptor that is no memory", |d| {
        raw_with_fd(d, ADD_MEM_REG, &[vec![0; 8], region(d, |_| {})].concat())
    }),
    ("ADD_MEM_REG of length 0", |d| add_region(d, |r| r[1] = 0)),
    ("ADD_MEM_REG that wraps around", |d| {
        add_region(d, |r| r[0] = u64::MAX - 4095)
    }),
    ("ADD_MEM_REG that wraps around in user addresses", |d| {
        add_region(d, |r| r[2] = u64::MAX - 4095)
    }),
    ("ADD_MEM_REG that wraps around in the file", |d| {
        add_region(d, |r| r[3] = u64::MAX - 4095)
    }),
    ("ADD_MEM_REG of negative offset", |d| {
        add_region(d, |r| r[3] = 1 << 63)
    }),
    ("ADD_MEM_REG of 2^60 bytes", |d| {
        add_region(d, |r| r[1] = 1 << 60)
    }),
    ("ADD_MEM_REG behind the end of the file", |d| {
        add_region(d, |r| r[3] += 1 << 30)
    }),
    ("ADD_MEM_REG longer than its file", |d| {
        add_region(d, |r| r[1] += 4096)
    }),
    ("ADD_MEM_REG over another region", |d| {
        let gpa = d.memory.regions()[Device::LOW].gpa;
        let size = d.memory.regions()[Device::SPARE].size;
        add_region(d, |r| r[0] = gpa.wrapping_sub(size) + 4096)
    }),
    ("REM_MEM_REG of an unknown region", |d| {
        raw(d, REM_MEM_REG, &[vec![0; 8], region(d, |_| {})].concat())
    }),
];

/// Sends a message that has the right form as far as its header goes.
fn raw(device: &mut Device, request: u32, payload: &[u8]) -> std::io::Result<()> {
    device.frontend.send_raw(
        request,
        VERSION | NEED_REPLY,
        payload.len() as u32,
        payload,
        &[],
    )
}

/// Rings as a guest can set them up wrongly; the front-end only passes them on.
const BAD_RINGS: &[Message] = &[
    ("SET_VRING_NUM of 0", |d| {
        restart_with(d, SET_VRING_NUM, &words(&[0, 0]))
    }),
    ("SET_VRING_NUM of 3", |d| {
        restart_with(d, SET_VRING_NUM, &words(&[0, 3]))
    }),
    ("SET_VRING_NUM of 2048", |d| {
        restart_with(d, SET_VRING_NUM, &words(&[0, 2048]))
    }),
    ("SET_VRING_ADDR at guest-physical addresses", |d| {
        let offset = d.memory.regions()[0]
            .gpa
            .wrapping_sub(d.memory.regions()[0].user);
        restart_with(d, SET_VRING_ADDR, &ring_addresses(d, 0, offset, 0))
    }),
    ("SET_VRING_ADDR outside memory", |d| {
        restart_with(d, SET_VRING_ADDR, &ring_addresses(d, 0, 1 << 60, 0))
    }),
    ("SET_VRING_ADDR at odd addresses", |d| {
        restart_with(d, SET_VRING_ADDR, &ring_addresses(d, 0, 1, 0))
    }),
    ("SET_VRING_ADDR at the end of memory", |d| {
        let region = &d.memory.regions()[Device::HIGH];
        let payload = ring_addresses(d, 0, 0, region.user + region.size - 16);
        restart_with(d, SET_VRING_ADDR, &payload)
    }),
];

#[test]
fn bad_rings_cost_the_guest_that_ring_only() {
    let disk = Disk::new();
    let server = serve_all(&[disk.argument("queues=2")]);
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    for (name, send) in BAD_RINGS {
        println!("{name}");
        let mut device = Device::connect(&disk.socket, &config).unwrap();
        assert_reads(&mut device, 1);
        send(&mut device).unwrap();
        assert!(device.queues[0].ring.broken(HANG), "no error: {name}");
        // The other ring goes on, and this one can be set up anew.
        assert_reads(&mut device, 1);
        let base = device.stop_queue(0).unwrap();
        device.start_queue(0, base).unwrap();
        assert_reads(&mut device, 0);
    }
    drop(server);
}

/// Changes queue 0 and enables it: what is wrong with a ring shows when it starts.
fn restart_with(device: &mut Device, request: u32, payload: &[u8]) -> std::io::Result<()> {
    device
        .frontend
        .command(SET_VRING_ENABLE, &words(&[0, 0]), &[])?;
    device.frontend.command(request, payload, &[])?;
    device
        .frontend
        .command(SET_VRING_ENABLE, &words(&[0, 1]), &[])
}

/// The same with an eventfd.
fn raw_with_fd(device: &mut Device, request: u32, payload: &[u8]) -> std::io::Result<()> {
    let fd = eventfd()?;
    device.frontend.send_raw(
        request,
        VERSION | NEED_REPLY,
        payload.len() as u32,
        payload,
        &[fd.as_fd()],
    )
}

/// Hands over a regular file for the signals of queue 0.
fn raw_with_file(device: &mut Device, request: u32) -> std::io::Result<()> {
    let file = tempfile::tempfile()?;
    device
        .frontend
        .send_raw(request, VERSION | NEED_REPLY, 8, &[0; 8], &[file.as_fd()])
}

/// Adds the spare region, spoilt by `change`.
fn add_region(device: &mut Device, change: impl Fn(&mut [u64; 4])) -> std::io::Result<()> {
    let payload = [vec![0; 8], region(device, change)].concat();
    let fd = device.memory.regions()[Device::SPARE].file.as_fd();
    device.frontend.send_raw(
        ADD_MEM_REG,
        VERSION | NEED_REPLY,
        payload.len() as u32,
        &payload,
        &[fd],
    )
}

/// Memory in a file that a process makes up as it is read: that could keep an I/O thread waiting for ever.
#[test]
fn memory_that_is_made_up_as_it_is_read_is_refused() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let size = 1 << 20;
    let storage = match Storage::mount(directory.path(), vec![0; size], 1) {
        Ok(storage) => storage,
        Err(e) => {
            let test = "memory_that_is_made_up_as_it_is_read_is_refused";
            return println!("skipped: {test}: there is no FUSE: {e}");
        }
    };
    let file = File::options().read(true).write(true).open(storage.file());
    let file = file.unwrap();
    let (server, _disk) = serve("");
    let device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let region = region(&device, |fields| (fields[1], fields[3]) = (size as u64, 0));
    let payload = [vec![0; 8], region].concat();
    let sent = device.frontend.send_raw(
        ADD_MEM_REG,
        VERSION | NEED_REPLY,
        payload.len() as u32,
        &payload,
        &[file.as_fd()],
    );
    sent.unwrap();
    assert!(refused(&device.frontend));
    server.logged(&["is in a file of FUSE"]);
}

/// The spare region in a message: guest-physical address, size, user address, offset in the file.
fn region(device: &Device, change: impl Fn(&mut [u64; 4])) -> Vec<u8> {
    let Region {
        gpa,
        size,
        user,
        mmap_offset,
        ..
    } = device.memory.regions()[Device::SPARE];
    let mut fields = [gpa, size, user, mmap_offset];
    change(&mut fields);
    fields.iter().flat_map(|f| f.to_ne_bytes()).collect()
}

/// The addresses of queue 0 moved by `offset`, with the used ring at `used` unless that is 0.
fn ring_addresses(device: &Device, queue: u32, offset: u64, used: u64) -> Vec<u8> {
    let ring = device.queues[0].ring.guest_addresses();
    let user = |gpa| device.memory.user(gpa).wrapping_add(offset);
    let used = if used == 0 { user(ring.used) } else { used };
    let fields = [user(ring.desc), used, user(ring.avail), 0];
    [
        words(&[queue, 0]),
        fields.iter().flat_map(|f| f.to_ne_bytes()).collect(),
    ]
    .concat()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

#[test]
fn bad_messages_end_their_connection_only() {
    let (victim, other) = (Disk::new(), Disk::new());
    let server = serve_all(&[victim.argument("queues=2"), other.argument("queues=2")]);
    let mut bystander = Device::connect(&other.socket, &DeviceConfig::default()).unwrap();
    let config = DeviceConfig {
        queues: 1,
        ..DeviceConfig::default()
    };
    for (name, send) in BAD_MESSAGES {
        println!("{name}");
        let mut device = Device::connect(&victim.socket, &config).unwrap();
        let sent = send(&mut device);
        assert!(
            sent.is_err() || refused(&device.frontend),
            "accepted: {name}"
        );
        drop(device);
        assert_reads(&mut Device::connect(&victim.socket, &config).unwrap(), 0);
        assert_reads(&mut bystander, 0);
    }
    drop(server);
}

/// Whether the answer is a refusal or the end of the connection.
fn refused(frontend: &Frontend) -> bool {
    match frontend.any_reply() {
        Ok(payload) => payload != 0u64.to_ne_bytes(),
        Err(e) if e.kind() == ErrorKind::WouldBlock => {
            panic!("no answer, and the connection stays")
        }
        Err(_) => true,
    }
}

#[test]
fn halves_of_messages() {
    let (server, _disk) = serve("");
    for bytes in [
        &[1u8][..],
        &[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0],
        &[2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 7, 7],
    ] {
        let mut socket = UnixStream::connect(server.socket()).unwrap();
        socket.write_all(bytes).unwrap();
        drop(socket);
        assert_reads(
            &mut Device::connect(server.socket(), &DeviceConfig::default()).unwrap(),
            0,
        );
    }
}

#[test]
fn a_front_end_that_stalls_holds_nobody_up() {
    let disks = [Disk::new(), Disk::new(), Disk::new()];
    let mut server = serve_all(&disks.iter().map(|d| d.argument("")).collect::<Vec<_>>());
    // One stops in the middle of a header, one never reads an answer.
    let mut halted = UnixStream::connect(&disks[0].socket).unwrap();
    halted.write_all(&[1, 0, 0, 0, 1]).unwrap();
    let mut deaf = UnixStream::connect(&disks[1].socket).unwrap();
    deaf.set_nonblocking(true).unwrap();
    let get_features = [words(&[GET_FEATURES, VERSION, 0])].concat();
    let mut stalled = 0;
    while stalled < 3 {
        match deaf.write(&get_features) {
            Ok(_) => stalled = 0,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                stalled += 1;
                thread::sleep(A_WHILE);
            }
            // Hanging up on it is as good.
            Err(_) => break,
        }
    }
    assert_reads(
        &mut Device::connect(&disks[2].socket, &DeviceConfig::default()).unwrap(),
        0,
    );
    assert!(
        server.terminate().unwrap().success(),
        "the server ends even so"
    );
}

/// An event counter that blocks whoever adds to it.
fn full_counter() -> OwnedFd {
    let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    fd
}

#[test]
fn signals_that_nobody_takes_hold_nobody_up() {
    never_taken(&full_counter(), || {});
}

/// Whether a descriptor blocks belongs to what is open, which the front-end has open as well.
#[test]
fn signals_made_to_block_again_hold_nobody_up() {
    let signal = full_counter();
    never_taken(&signal, || block_again(&signal));
}

/// Lets a disk send its signals to a descriptor that can take no more. `then` is done once the disk has it.
fn never_taken(signal: &OwnedFd, then: impl FnOnce()) {
    let (victim, other) = (Disk::new(), Disk::new());
    let mut server = serve_all(&[
        "--iothreads=1".to_owned(),
        victim.argument("queues=2"),
        other.argument("queues=2"),
    ]);
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut bystander = Device::connect(&other.socket, &config).unwrap();
    let mut device = Device::connect(&victim.socket, &config).unwrap();
    device.frontend.set_vring_call(0, signal.as_fd()).unwrap();
    device.frontend.set_vring_err(0, signal.as_fd()).unwrap();
    then();
    for _ in 0..20 {
        assert_reads_uncalled(&mut device, 0);
    }
    assert_reads(&mut device, 1);
    assert_reads(&mut bystander, 0);
    assert_reads(&mut bystander, 1);
    // A broken ring is reported, or rather is not.
    device.queues[0].ring.publish([u16::MAX]);
    assert_reads(&mut device, 1);
    assert_reads(&mut bystander, 0);
    let base = device.stop_queue(0).unwrap();
    device.start_queue(0, base).unwrap();
    assert_reads(&mut device, 0);
    assert!(server.terminate().unwrap().success());
}

/// A read whose call never comes.
fn assert_reads_uncalled(device: &mut Device, queue: usize) {
    let queue = &mut device.queues[queue];
    queue.prepare(0, Op::Read, 8, 4096);
    queue.submit(&[0]);
    let start = Instant::now();
    while queue.poll(|_, status| assert_eq!(status, OK)) == 0 {
        assert!(start.elapsed() < HANG, "the queue hangs");
        thread::sleep(Duration::from_micros(100));
    }
    assert!(queue.read_buffer(0, 4096) == content(8, 4096));
}

/// Undoes what the server has done to a descriptor, so that it blocks who writes to it.
fn block_again(signal: &OwnedFd) {
    let flags = rustix::fs::fcntl_getfl(signal).unwrap();
    rustix::fs::fcntl_setfl(signal, flags & !OFlags::NONBLOCK).unwrap();
}

/// Each queue, each descriptor and each connection would be another chance to hold up the thread. There is one.
#[test]
fn who_sends_such_signals_for_ever_holds_others_up_once() {
    let (victim, other) = (Disk::new(), Disk::new());
    let mut server = serve_all(&[
        "--iothreads=1".to_owned(),
        victim.argument("queues=2"),
        other.argument(""),
    ]);
    let mut bystander = Device::connect(&other.socket, &DeviceConfig::default()).unwrap();
    for _ in 0..2 {
        let config = DeviceConfig {
            queues: 2,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(&victim.socket, &config).unwrap();
        for _ in 0..2 {
            let calls = [full_counter(), full_counter()];
            for (queue, call) in (0..).zip(&calls) {
                device.frontend.set_vring_call(queue, call.as_fd()).unwrap();
                block_again(call);
            }
            for queue in 0..2 {
                assert_reads_uncalled(&mut device, queue);
                assert_reads(&mut bystander, 0);
            }
        }
    }
    assert!(server.terminate().unwrap().success());
    let log = server.log();
    assert_eq!(log.matches("has held up an I/O thread").count(), 1, "{log}");
}

/// What may take for ever to look at, or to write to.
#[test]
fn only_event_counters_are_taken_for_signals() {
    let (server, _disk) = serve("queues=2");
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let memory = Memory::new(&[(0, 1 << 20)]).unwrap();
    let file = &memory.regions()[0].file;
    let descriptors = [
        reader.as_fd(),
        writer.as_fd(),
        socket.as_fd(),
        epoll.as_fd(),
        file.as_fd(),
    ];
    for (request, payload) in [
        (SET_VRING_KICK, &[0; 8][..]),
        (SET_VRING_CALL, &[0; 8]),
        (SET_VRING_ERR, &[0; 8]),
        (SET_LOG_FD, &[]),
    ] {
        for descriptor in descriptors {
            let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
            let sent = device.frontend.command(request, payload, &[descriptor]);
            assert!(sent.is_err(), "message {request} with {descriptor:?}");
        }
        let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
        let counter = eventfd().unwrap();
        let sent = device
            .frontend
            .command(request, payload, &[counter.as_fd()]);
        sent.unwrap();
    }
}

#[test]
fn a_dirty_log_whose_event_blocks_holds_nobody_up() {
    let (victim, other) = (Disk::new(), Disk::new());
    let mut server = serve_all(&[
        "--iothreads=1".to_owned(),
        victim.argument(""),
        other.argument(""),
    ]);
    let mut bystander = Device::connect(&other.socket, &DeviceConfig::default()).unwrap();
    let mut device = Device::connect(&victim.socket, &DeviceConfig::default()).unwrap();
    let log = Memory::new(&[(0, 1 << 20)]).unwrap();
    let event = full_counter();
    let log = &log.regions()[0];
    device.frontend.set_log(log, event.as_fd()).unwrap();
    block_again(&event);
    let features = device.features | F_LOG_ALL;
    device.frontend.set_features(features).unwrap();
    for _ in 0..3 {
        assert_reads(&mut device, 0);
        assert_reads(&mut bystander, 0);
    }
    assert!(server.terminate().unwrap().success());
    assert!(!server.log().contains("held up"), "{}", server.log());
}

/// The thread that speaks with the front-end reports rings that it cannot serve.
#[test]
fn a_bad_ring_whose_error_blocks_holds_nobody_up() {
    let disk = Disk::new();
    let mut server = serve_all(&[disk.argument("queues=2")]);
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(&disk.socket, &config).unwrap();
    let error = full_counter();
    for queue in 0..2 {
        device.frontend.set_vring_err(queue, error.as_fd()).unwrap();
    }
    block_again(&error);
    // Not aligned, as a guest may have it.
    for queue in 0..2 {
        let addresses = ring_addresses(&device, queue, 1, 0);
        let frontend = &mut device.frontend;
        frontend.command(SET_VRING_ADDR, &addresses, &[]).unwrap();
    }
    // Both rings are tried anew.
    let spare = &device.memory.regions()[Device::SPARE];
    device.frontend.add_mem_reg(spare).unwrap();
    server.logged(&["cannot be served as the guest set it up"]);
    assert!(server.terminate().unwrap().success());
}

#[test]
fn who_connects_for_ever_does_not_fill_the_log() {
    let (mut server, _disk) = serve("");
    let started = Instant::now();
    for _ in 0..2000 {
        let mut socket = UnixStream::connect(server.socket()).unwrap();
        // No message, or none that makes sense.
        let _ = socket.write_all(&[0xff; 12]);
    }
    // All others have been taken before this one.
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_reads(&mut device, 0);
    drop(device);
    thread::sleep(Duration::from_secs(1));
    UnixStream::connect(server.socket()).unwrap();
    server.logged(&["front-end connected (", " more of these left out)"]);
    assert!(server.terminate().unwrap().success());
    let log = server.log();
    // At most one a second of each kind.
    let seconds = started.elapsed().as_secs() as usize + 1;
    for what in ["connected", "disconnected", "cut off"] {
        let lines = log.matches(&format!("front-end {what}")).count();
        assert!(lines <= seconds, "{lines} of {what} in {seconds} s");
    }
}

#[test]
fn descriptors_do_not_pile_up() {
    let (server, _disk) = serve("");
    let open = || {
        std::fs::read_dir(format!("/proc/{}/fd", server.pid()))
            .unwrap()
            .count()
    };
    let fds: Vec<_> = (0..8).map(|_| eventfd().unwrap()).collect();
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let before = open();
    for _ in 0..50 {
        let frontend = Frontend::connect(server.socket()).unwrap();
        // A message that takes none, and one that takes one.
        frontend.send_raw(SET_OWNER, VERSION, 0, &[], &fds).unwrap();
        frontend
            .send_raw(SET_VRING_CALL, VERSION, 8, &[0; 8], &fds)
            .unwrap_or_default();
    }
    assert_reads(
        &mut Device::connect(server.socket(), &DeviceConfig::default()).unwrap(),
        0,
    );
    let after = open();
    assert!(
        after <= before + 16,
        "{} file descriptors were left open",
        after - before
    );
}
