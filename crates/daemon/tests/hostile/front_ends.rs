//! Messages that no front-end may send, and connections that stall.

use super::*;

type Message = (&'static str, fn(&mut Device) -> std::io::Result<()>);

/// Messages that must close the connection or be refused.
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

/// Sends a message with a valid header.
fn raw(device: &mut Device, request: u32, payload: &[u8]) -> std::io::Result<()> {
    device.frontend.send_raw(
        request,
        VERSION | NEED_REPLY,
        payload.len() as u32,
        payload,
        &[],
    )
}

/// Rings that a guest can set up wrongly; the front-end only forwards them.
const BAD_RINGS: &[Message] = &[
    ("SET_VRING_NUM of 0", |d| {
        restart_with(d, SET_VRING_NUM, &words(&[0, 0]))
    }),
    ("SET_VRING_NUM of 3", |d| {
        restart_with(d, SET_VRING_NUM, &words(&[0, 3]))
    }),
    ("SET_VRING_NUM of 40960", |d| {
        restart_with(d, SET_VRING_NUM, &words(&[0, 40960]))
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
fn bad_ring_setup_disables_only_that_ring() {
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
        // The other ring continues, and this one can be set up again.
        assert_reads(&mut device, 1);
        let base = device.stop_queue(0).unwrap();
        device.start_queue(0, base).unwrap();
        assert_reads(&mut device, 0);
    }
    drop(server);
}

/// Changes queue 0 and enables it: errors of a ring show when it starts.
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

/// Sends a regular file in place of an eventfd for queue 0.
fn raw_with_file(device: &mut Device, request: u32) -> std::io::Result<()> {
    let file = tempfile::tempfile()?;
    device
        .frontend
        .send_raw(request, VERSION | NEED_REPLY, 8, &[0; 8], &[file.as_fd()])
}

/// Adds the spare region, corrupted by `change`.
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

/// Memory in a FUSE file: reading it could block an I/O thread forever.
#[test]
fn memory_backed_by_fuse_is_refused() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let size = 1 << 20;
    let storage = match Storage::mount(directory.path(), vec![0; size], 1) {
        Ok(storage) => storage,
        Err(e) => {
            let test = "memory_backed_by_fuse_is_refused";
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
    assert!(is_refused(&device.frontend));
    server.wait_for_log(&["is in a file of FUSE"]);
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

#[test]
fn bad_message_closes_only_its_connection() {
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
            sent.is_err() || is_refused(&device.frontend),
            "accepted: {name}"
        );
        drop(device);
        assert_reads(&mut Device::connect(&victim.socket, &config).unwrap(), 0);
        assert_reads(&mut bystander, 0);
    }
    drop(server);
}

/// Whether the message is refused or the connection closed.
fn is_refused(frontend: &Frontend) -> bool {
    match frontend.any_reply() {
        Ok(payload) => payload != 0u64.to_ne_bytes(),
        Err(e) if e.kind() == ErrorKind::WouldBlock => {
            panic!("no answer, and the connection stays")
        }
        Err(_) => true,
    }
}

#[test]
fn partial_messages() {
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
fn stalled_front_end_delays_no_other() {
    let disks = [Disk::new(), Disk::new(), Disk::new()];
    let mut server = serve_all(&disks.iter().map(|d| d.argument("")).collect::<Vec<_>>());
    // One stops in the middle of a header, one never reads a reply.
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
                thread::sleep(QUIET_PERIOD);
            }
            // Closing the connection is also acceptable.
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

#[test]
fn endless_connections_do_not_flood_the_log() {
    let (mut server, _disk) = serve("");
    let started = Instant::now();
    for _ in 0..2000 {
        let mut socket = UnixStream::connect(server.socket()).unwrap();
        // An incomplete or invalid message.
        let _ = socket.write_all(&[0xff; 12]);
    }
    // All earlier connections were accepted before this one.
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_reads(&mut device, 0);
    drop(device);
    thread::sleep(Duration::from_secs(1));
    UnixStream::connect(server.socket()).unwrap();
    server.wait_for_log(&["front-end connected (", " more of these left out)"]);
    assert!(server.terminate().unwrap().success());
    let log = server.log();
    // At most one line per second of each kind.
    let seconds = started.elapsed().as_secs() as usize + 1;
    for what in ["connected", "disconnected", "cut off"] {
        let lines = log.matches(&format!("front-end {what}")).count();
        assert!(lines <= seconds, "{lines} of {what} in {seconds} s");
    }
}

#[test]
fn received_descriptors_are_closed() {
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
        // A message that takes no descriptor, and one that takes one.
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
