//! Requests and descriptor chains that no driver may send.

use super::*;

/// The expected result of a bad request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expect {
    /// It completes with this status, and its queue continues.
    Status(u8),
    /// Its queue is retired.
    Retired,
    /// Either: the specification leaves it open, and both are safe.
    ErrorOrRetired,
    /// Any of the above, or success.
    Anything,
}

use Expect::*;

/// A queue for a bad request: free descriptors and memory for buffers.
struct Attack<'a> {
    device: &'a mut Device,
    /// The first free descriptor.
    first: u16,
    /// Start of scratch memory: the header is at 0, data at 0x1000, tables at 0x4000.
    at: u64,
}

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
        let linked = (0..count).zip(buffers).map(|(i, d)| {
            if i + 1 == count {
                *d
            } else {
                Desc {
                    flags: d.flags | Desc::NEXT,
                    next: self.first + i + 1,
                    ..*d
                }
            }
        });
        let linked: Vec<_> = linked.collect();
        self.raw(&linked, self.first);
    }

    /// Submits descriptors unchanged, placed in the ring from `first` on.
    fn raw(&mut self, descs: &[Desc], head: u16) {
        let ring = &mut self.device.queues[0].ring;
        (self.first..)
            .zip(descs)
            .for_each(|(i, d)| ring.set_desc(i, *d));
        ring.publish([head]);
    }

    /// Submits an indirect table of these descriptors, unchanged.
    fn indirect(&mut self, table: &[Desc]) {
        let at = self.at + TABLE;
        (0..).zip(table).for_each(|(i, d)| {
            let bytes = self.device.queues[0].ring.table_bytes(d);
            self.device.memory.write(at + 16 * i, &bytes);
        });
        self.chain(&[desc(at, 16 * table.len() as u32, Desc::INDIRECT)]);
    }

    /// The descriptors of a valid read, as in an indirect table.
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

type Case = (&'static str, Expect, fn(&mut Attack));

/// Well-formed requests that ask for something impossible.
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
        // Longer than any legal chain, and without an end.
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

/// Links and heads that no driver may write into a split ring; packed rings have neither.
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
fn bad_request_gets_an_error_status() {
    attack_with_all(BAD_REQUESTS, DeviceConfig::default());
}

#[test]
fn retired_queue_is_logged() {
    let (server, _disk) = serve("");
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let ring = &mut device.queues[0].ring;
    ring.publish([u16::MAX]);
    assert!(ring.broken(HANG));
    server.wait_for_log(&[support::QUEUE_RETIRED]);
}

#[test]
fn bad_chain_retires_only_its_queue() {
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
fn indirect_tables_without_negotiation_are_harmless() {
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
        // Where a chain leads does not depend on the kind of ring.
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

/// Posts a bad request on queue 0 and checks its result.
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
        // Nothing outside the given buffers is written.
        assert_eq!(device.memory.read(at + STATUS + 1, 64), [0xee; 64]);
    } else {
        assert!(
            !matches!(expect, Status(_)),
            "retired, but {expect:?} was expected"
        );
        device.queues[0].prepare(0, Op::Read, 0, 512);
        device.queues[0].submit(&[0]);
        assert!(
            device.queues[0].ring.next_used(QUIET_PERIOD).is_none(),
            "a retired queue goes on"
        );
        let base = device.stop_queue(0).unwrap();
        device.start_queue(0, base).unwrap();
    }
    assert_reads(device, 0);
}
