//! `kill -9`, again and again: what a guest has in flight is done by the next ringdisk, and comes back once.

#[expect(dead_code, reason = "files are looked at another way here")]
mod support;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Disk, content, seed};
use testkit::driver::{Device, DeviceConfig, HANG, Op, Queue};
use testkit::faulty::Random;
use testkit::frontend::message::{GET_INFLIGHT_FD, SET_INFLIGHT_FD};
use testkit::frontend::{Frontend, Inflight, protocol};
use testkit::server::Server;
use testkit::vm::{self, Vm};

const OK: u8 = 0;
const SECTORS: u64 = 8;

/// Requests of one queue, each on sectors that no other slot touches while it is in flight, so that it is known what a
/// read must find.
struct Load {
    /// What each block of the disk holds: the number of the write that came last, or none.
    written: Vec<Option<u64>>,
    /// What each slot is doing: the block, and the number if it writes.
    doing: Vec<Option<(usize, Option<u64>)>>,
    first_block: usize,
    count: u64,
    completed: u64,
}

impl Load {
    fn new(queue: &Queue, first_block: usize, blocks: usize) -> Self {
        Self {
            written: vec![None; blocks],
            doing: vec![None; usize::from(queue.slots())],
            first_block,
            count: 0,
            completed: 0,
        }
    }

    fn sector(&self, block: usize) -> u64 {
        (self.first_block + block) as u64 * SECTORS
    }

    /// What a block holds.
    fn expected(&self, block: usize, number: Option<u64>) -> Vec<u8> {
        let sector = self.sector(block);
        content(sector + (number.unwrap_or(0) << 20), 512 * SECTORS as usize)
    }

    /// Gives every free slot something to do.
    fn fill(&mut self, queue: &mut Queue, random: &mut Random) {
        let mut ready = Vec::new();
        for slot in 0..self.doing.len() {
            if self.doing[slot].is_some() {
                continue;
            }
            let block = random.below(self.written.len() as u64) as usize;
            let taken = |d: &Option<(usize, _)>| d.is_some_and(|(b, _)| b == block);
            if self.doing.iter().any(taken) {
                continue;
            }
            let (sector, len) = (self.sector(block), 512 * SECTORS as u32);
            let number = (random.below(2) == 0).then(|| {
                self.count += 1;
                self.count
            });
            let op = match number {
                Some(_) => {
                    queue.write_buffer(slot as u16, &self.expected(block, number));
                    Op::Write
                }
                None => {
                    queue.write_buffer(slot as u16, &vec![0xa5; len as usize]);
                    Op::Read
                }
            };
            queue.prepare(slot as u16, op, sector, len);
            self.doing[slot] = Some((block, number));
            ready.push(slot as u16);
        }
        queue.submit(&ready);
    }

    /// Takes what has completed; the driver beneath panics if something does that was not in flight.
    fn take(&mut self, queue: &mut Queue) {
        let mut done = Vec::new();
        queue.poll(|slot, status| done.push((slot, status)));
        for (slot, status) in done {
            assert_eq!(status, OK);
            let (block, number) = self.doing[usize::from(slot)].take().expect("in flight");
            match number {
                Some(_) => self.written[block] = number,
                None => {
                    let found = queue.read_buffer(slot, 512 * SECTORS as usize);
                    let expected = self.expected(block, self.written[block]);
                    assert!(
                        found == expected,
                        "block {block}, of {:?}",
                        self.written[block]
                    );
                }
            }
            self.completed += 1;
        }
    }

    fn is_idle(&self) -> bool {
        self.doing.iter().all(Option::is_none)
    }
}

/// So many kills, at any moment of a load that verifies all that it reads; then the disk must hold all that was written.
fn survive(config: &DeviceConfig, options: &str, rounds: usize) {
    let disk = Disk::new();
    let arguments = [disk.argument(&format!("queues={}{options}", config.queues))];
    let mut random = Random(seed());
    let binary = env!("CARGO_BIN_EXE_ringdisk");
    let mut server = Server::ringdisk(binary, &arguments).unwrap();
    let mut device = Device::connect(server.socket(), config).unwrap();
    assert!(device.inflight.is_some(), "not offered");
    let blocks = 512;
    let mut loads: Vec<Load> = (0..device.queues.len())
        .map(|i| Load::new(&device.queues[i], i * blocks, blocks))
        .collect();
    let mut in_flight_at_kills = 0;
    for round in 0..rounds {
        let length = Duration::from_micros(random.below(12_000));
        let start = Instant::now();
        while start.elapsed() < length {
            for (load, queue) in loads.iter_mut().zip(&mut device.queues) {
                load.fill(queue, &mut random);
                load.take(queue);
            }
        }
        if round % 8 == 7 {
            // An orderly end leaves nothing in flight, and a packed ring goes on where it was all the same.
            assert!(server.terminate().unwrap().success());
        } else {
            server.signal(Signal::KILL);
        }
        drop(server);
        let doing = loads.iter().flat_map(|load| &load.doing);
        in_flight_at_kills += doing.filter(|d| d.is_some()).count();
        server = Server::ringdisk(binary, &arguments).unwrap();
        device.reconnect(server.socket(), config).unwrap();
        if round % 4 == 0 {
            // Stopped at once: what was in flight is done before the answer comes.
            for index in 0..device.queues.len() {
                let base = device.frontend.vring_base(index as u16).unwrap();
                let ring = &device.queues[index].ring;
                match ring.is_packed() {
                    true => assert_eq!(base >> 16, base & 0xffff, "round {round}"),
                    false => assert_eq!(base, ring.base_after_death(), "round {round}"),
                }
                device.resume_queue(index, base).unwrap();
            }
        }
    }
    let start = Instant::now();
    while !loads.iter().all(Load::is_idle) {
        assert!(start.elapsed() < HANG, "requests were lost");
        for (load, queue) in loads.iter_mut().zip(&mut device.queues) {
            load.take(queue);
        }
        thread::sleep(Duration::from_micros(100));
    }
    let completed: u64 = loads.iter().map(|load| load.completed).sum();
    println!("{completed} requests, {in_flight_at_kills} of them in flight at kills");
    assert!(in_flight_at_kills > rounds);
    assert!(server.terminate().unwrap().success());
    let file = File::open(&disk.file).unwrap();
    for load in &loads {
        for (block, number) in load.written.iter().enumerate() {
            let mut found = vec![0; 512 * SECTORS as usize];
            file.read_exact_at(&mut found, load.sector(block) * 512)
                .unwrap();
            assert!(
                found == load.expected(block, *number),
                "block {block}: {number:?}"
            );
        }
    }
}

fn config(packed: bool) -> DeviceConfig {
    DeviceConfig {
        queues: 2,
        queue_size: if packed { 50 } else { 64 },
        packed,
        inflight: true,
        ..DeviceConfig::default()
    }
}

#[test]
fn split_rings_survive_kills() {
    survive(&config(false), ",queue-size=64", 60);
}

#[test]
fn packed_rings_survive_kills() {
    let config = DeviceConfig {
        indirect: false,
        ..config(true)
    };
    survive(&config, ",queue-size=64", 60);
}

#[test]
fn packed_rings_of_tables_survive_kills_without_a_write_cache() {
    survive(&config(true), ",queue-size=64,cache=writethrough", 20);
}

/// Length, offset, queues and their size as the front-end says, and the length of the file.
type BadRegion = ((u64, u64, u16, u16), u64);

/// What a front-end must not say of the region.
#[test]
fn regions_that_cannot_be_end_the_connection() {
    let (server, _disk) = support::serve("queues=2");
    let memfd = |len: u64| {
        let file = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        file
    };
    let bad: &[BadRegion] = &[
        ((8192, 0, 2, 128), 8191),
        ((8192, 4096, 2, 128), 8192),
        ((u64::MAX, 0, 2, 128), 8192),
        ((8192, u64::MAX - 4095, 2, 128), 8192),
        ((8192, 4, 2, 128), 65536),
        ((0, 0, 2, 128), 8192),
        ((8192, 0, 3, 128), 8192),
        ((8192, 0, 0, 128), 8192),
        ((8192, 0, 2, 0), 8192),
        ((1 << 30, 0, 2, 65535), 1 << 30),
    ];
    for &(description, len) in bad {
        let mut device = Device::connect(server.socket(), &config(false)).unwrap();
        let file = memfd(len);
        let region = Inflight { description, file };
        assert!(
            device.frontend.set_inflight(&region).is_err(),
            "{description:x?}"
        );
        assert!(
            device.frontend.features().is_err(),
            "{description:x?}: still connected"
        );
        let mut frontend = Frontend::connect(server.socket()).unwrap();
        let (queues, size) = (description.2, description.3);
        if queues != 2 || size != 128 {
            frontend
                .set_protocol_features(protocol::INFLIGHT_SHMFD)
                .unwrap();
            assert!(frontend.inflight(queues, size).is_err(), "{description:x?}");
        }
    }
    for request in [GET_INFLIGHT_FD, SET_INFLIGHT_FD] {
        let mut frontend = Frontend::connect(server.socket()).unwrap();
        frontend.set_protocol_features(protocol::REPLY_ACK).unwrap();
        let payload = Inflight::payload((8192, 0, 2, 128));
        let file = memfd(8192);
        let fds = [file.as_fd()];
        let fds = if request == SET_INFLIGHT_FD {
            &fds[..]
        } else {
            &[]
        };
        assert!(
            frontend.command(request, &payload, fds).is_err(),
            "not negotiated"
        );
    }
    // One that is too small for this kind of ring costs the ring.
    let mut device = Device::connect(server.socket(), &config(true)).unwrap();
    let (description, file) = ((2176, 0, 2, 64), memfd(2176));
    device
        .frontend
        .set_inflight(&Inflight { description, file })
        .unwrap();
    assert!(device.queues[1].ring.broken(HANG));
    drop(device);
    let mut device = Device::connect(server.socket(), &config(false)).unwrap();
    assert_eq!(device.queues[1].run(Op::Read, 8, 4096), OK);
}

/// One that the front-end cuts short while it is used ends that connection, like guest memory.
#[test]
fn a_region_that_goes_away() {
    let (mut server, _disk) = support::serve("queues=2,queue-size=64");
    for packed in [false, true] {
        let config = config(packed);
        let mut device = Device::connect(server.socket(), &config).unwrap();
        let description = device.inflight.as_ref().unwrap().description;
        let name = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("region", name).unwrap();
        rustix::fs::ftruncate(&file, description.0).unwrap();
        let region = Inflight { description, file };
        device.frontend.set_inflight(&region).unwrap();
        assert_eq!(device.queues[0].run(Op::Read, 8, 4096), OK);
        rustix::fs::ftruncate(&region.file, 0).unwrap();
        assert_eq!(device.queues[0].run(Op::Read, 8, 4096), OK);
        assert!(device.frontend.any_reply().is_err(), "still connected");
        drop(device);
        let mut device = Device::connect(server.socket(), &config).unwrap();
        assert_eq!(device.queues[1].run(Op::Read, 8, 4096), OK);
    }
    assert!(server.is_running());
}

/// A region full of nonsense, written while the device uses it and before it takes it up: the queue goes on or is given
/// up, and another disk notices nothing.
#[test]
fn nonsense_in_the_region() {
    let (victim, other) = (Disk::new(), Disk::new());
    let disks = [
        victim.argument("queues=2,queue-size=64"),
        other.argument(""),
    ];
    let mut server = support::serve_all(&[&["--iothreads=1".to_owned()], &disks[..]].concat());
    let mut bystander = Device::connect(&other.socket, &DeviceConfig::default()).unwrap();
    let mut random = Random(seed());
    for round in 0..300 {
        let config = config(round % 2 == 0);
        let mut device = Device::connect(&victim.socket, &config).unwrap();
        let inflight = device.inflight.take().unwrap();
        let len = inflight.description.0;
        let file = File::from(inflight.file.try_clone().unwrap());
        for _ in 0..random.below(20) {
            // Small numbers are more of a danger than large ones.
            let (at, byte) = (random.below(len), random.below(70) as u8);
            file.write_all_at(&[byte], at).unwrap();
        }
        let queue = &mut device.queues[0];
        queue.prepare(0, Op::Read, 8, 4096);
        queue.submit(&[0]);
        device.frontend.set_inflight(&inflight).unwrap();
        let garbage: Vec<u8> = (0..len).map(|_| random.below(4) as u8).collect();
        if random.below(2) == 0 {
            // With the version that is known, and the right number of entries.
            file.write_all_at(&garbage, 0).unwrap();
            file.write_all_at(&[0; 8], 0).unwrap();
            file.write_all_at(&[1, 0], 8).unwrap();
            file.write_all_at(&inflight.description.3.to_le_bytes(), 10)
                .unwrap();
            device.frontend.set_inflight(&inflight).unwrap();
        }
        let _ = device.frontend.vring_base(0);
        if round % 10 == 0 {
            assert_eq!(
                bystander.queues[0].run(Op::Read, 8, 4096),
                OK,
                "round {round}"
            );
        }
    }
    assert!(server.is_running());
    assert!(server.terminate().unwrap().success());
}

// A real guest

#[test]
fn a_guest_survives_kills() {
    guest_survives("a_guest_survives_kills", false);
}

#[test]
fn a_guest_with_packed_rings_survives_kills() {
    guest_survives("a_guest_with_packed_rings_survives_kills", true);
}

/// Four writers that read back what they wrote, past the guest's page cache, while ringdisk is killed under them.
fn guest_survives(test: &str, packed: bool) {
    if let Some(missing) = vm::missing(false) {
        println!("skipped: {test}: {missing}");
        return;
    }
    let disk = Disk::new();
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    File::options()
        .write(true)
        .open(&disk.file)
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    // As slow as a disk may be, so that something is in flight at each kill.
    let arguments = [disk.argument("queues=2,iops=40")];
    let binary = env!("CARGO_BIN_EXE_ringdisk");
    let mut server = Some(Server::ringdisk(binary, &arguments).unwrap());
    let socket = disk.socket.display();
    let pasted = [
        "-chardev",
        &format!("socket,id=disk,path={socket},reconnect-ms=100"),
        "-device",
        "vhost-user-blk-pci,chardev=disk,num-queues=2,queue-size=128",
    ];
    let pasted = pasted.map(String::from).to_vec();
    let mut guest = Vm::new(logs).cpus(2).disk(vm::Disk::Pasted(pasted));
    if packed {
        guest = guest.packed();
    }
    let mut logs = String::new();
    let output = guest.run_watched(
        "head -c 1048576 /dev/urandom >/tmp/data
         writer() {
             until [ -e /tmp/enough ]; do
                 dd if=/tmp/data of=/dev/vda bs=64k seek=$(($1 * 64)) oflag=direct conv=notrunc 2>/tmp/dd.$1
                 dd if=/dev/vda bs=64k skip=$(($1 * 64)) count=16 iflag=direct 2>/tmp/dd.$1 | cmp - /tmp/data
                 echo >>/tmp/rounds
             done
         }
         writers=
         for i in 1 2 3 4; do writer $i & writers=\"$writers $!\"; done
         for i in 1 2 3 4 5 6; do
             sleep 2
             echo kill
         done
         sleep 1
         touch /tmp/enough
         for writer in $writers; do wait $writer; done
         [ $(wc -l </tmp/rounds) -ge 4 ]",
        // The machine may be busy.
        Duration::from_secs(400),
        &mut |line, _| {
            if line == "kill" {
                let old = server.take().unwrap();
                old.signal(Signal::KILL);
                logs += &old.log();
                drop(old);
                server = Some(Server::ringdisk(binary, &arguments).unwrap());
            }
        },
    );
    output.unwrap().checked().unwrap();
    let mut server = server.unwrap();
    assert!(server.terminate().unwrap().success());
    logs += &server.log();
    assert!(
        logs.contains("they are done again"),
        "nothing was in flight: {logs}"
    );
    assert!(
        !logs.contains("given up") && !logs.contains("cannot be served"),
        "{logs}"
    );
}
