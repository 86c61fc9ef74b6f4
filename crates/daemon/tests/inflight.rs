//! Repeated `kill -9`: the next ringdisk completes the guest's requests in flight, each exactly once.

mod other_users;

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::support::{self, Disk, content, seed, successor};
use rustix::process::Signal;
use testkit::driver::{Device, DeviceConfig, Op, RegionEntries};
use testkit::frontend::message::{GET_INFLIGHT_FD, SET_INFLIGHT_FD};
use testkit::frontend::{Frontend, Inflight, protocol};
use testkit::load::{BlockContent, Load};
use testkit::qemu_img;
use testkit::random::Random;
use testkit::server::Server;
use testkit::vm::{self, Vm};

const OK: u8 = 0;

/// Kills the server `rounds` times at any moment of a verifying load; at the end the disk must hold everything written.
fn kill_repeatedly(config: &DeviceConfig, options: &str, rounds: usize) {
    let disk = Disk::new();
    let argument = disk.argument(&format!("queues={}{options}", config.queues));
    kill_repeatedly_on(
        config,
        &disk,
        argument,
        (512, BlockContent::Pattern),
        rounds,
    );
}

/// An image that is served.
struct Image {
    file: PathBuf,
    disk: Disk,
}

impl Image {
    /// An empty image; `None` if there is no qemu-img for `test`.
    fn new(test: &str, options: &str) -> Option<Self> {
        let disk = Disk::new();
        let file = disk.file.with_extension("qcow2");
        let image = Self { file, disk };
        qemu_img::is_there(test).then(|| {
            let name = image.file.file_name().unwrap().to_str().unwrap();
            let create = format!("create -q -f qcow2 {options} {name} 64M");
            qemu_img::img(image.file.parent().unwrap(), &create);
            image
        })
    }

    fn argument(&self) -> String {
        let (file, socket) = (self.file.display(), self.disk.socket.display());
        format!("file={file},socket={socket}")
    }

    /// Serves it, with a runtime directory of this name beside it.
    fn serve(&self, runtime: &str, more: &[&str]) -> io::Result<Server> {
        loop {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
            command.args(["serve", "--json", &self.argument()]);
            command.args(more);
            command.env("RUNTIME_DIRECTORY", self.file.with_file_name(runtime));
            match Server::ringdisk_command(command) {
                // The kernel may still be completing the killed process's writes.
                Err(e) if e.to_string().contains("in use") => {}
                result => return result,
            }
        }
    }

    /// The only file in a directory of journals.
    fn journal(&self, directory: &str) -> PathBuf {
        let directory = self.file.with_file_name(directory);
        let mut journals = fs::read_dir(directory).unwrap();
        journals.next().unwrap().unwrap().path()
    }
}

/// Writes data that takes a cluster and is never flushed.
fn write(server: &Server) {
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].write(9, &content(9, 4096)), 0);
}

/// Expects to read that data.
fn verify(server: &Server) {
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].read(9, 4096).unwrap(), content(9, 4096));
}

/// The same on an image whose blocks are clusters that are repeatedly allocated and freed, and hardly ever flushed.
#[test]
fn acknowledged_qcow2_writes_survive_kills() {
    let test = "acknowledged_qcow2_writes_survive_kills";
    let Some(mut image) = Image::new(test, "-o cluster_size=4k") else {
        return;
    };
    let argument = format!("{},queues=2,queue-size=64", image.argument());
    image.disk.file = image.file;
    let on = (8192, BlockContent::Zeroes);
    let log = kill_repeatedly_on(&config(false), &image.disk, argument, on, 60);
    assert!(log.contains("are done again"), "{log}");
    // At first, there may be a journal of an earlier file that had the same number.
    let (_, after) = log.split_once("front-end connected").unwrap();
    assert!(!after.contains("is not used"), "{log}");
}

/// Starting again with another directory reports where the journal was looked for, and loses nothing.
#[test]
fn journal_in_another_directory_is_reported() {
    let Some(image) = Image::new("journal_in_another_directory_is_reported", "") else {
        return;
    };
    let start = |runtime: &str| image.serve(runtime, &[]).unwrap();
    let server = start("runtime");
    write(&server);
    server.signal(Signal::KILL);
    drop(server);
    let server = start("elsewhere");
    server.wait_for_log(&["there is none at", "elsewhere/journals/"]);
    drop(server);
    let server = start("runtime");
    server.wait_for_log(&["from the journal of a killed process"]);
    verify(&server);
}

/// Kills a server of a disk this many times (`RINGDISK_TEST_ROUNDS` multiplies it), and compares the disk with what it
/// must hold; returns the log.
fn kill_repeatedly_on(
    config: &DeviceConfig,
    disk: &Disk,
    argument: String,
    (blocks, held): (usize, BlockContent),
    rounds: usize,
) -> String {
    let times = std::env::var("RINGDISK_TEST_ROUNDS").map_or(1, |n| n.parse().unwrap());
    let rounds = rounds * times;
    let (arguments, mut kills) = ([argument], 0);
    let mut random = Random(seed());
    let binary = env!("CARGO_BIN_EXE_ringdisk");
    let mut server = Server::ringdisk(binary, &arguments).unwrap();
    let mut device = Device::connect(server.socket(), config).unwrap();
    assert!(device.inflight.is_some(), "no inflight region was offered");
    let mut loads = Load::all(&device, blocks, held, held == BlockContent::Zeroes);
    let mut in_flight_at_kills = 0;
    let mut log = String::new();
    for round in 0..rounds {
        let length = Duration::from_micros(random.below(12_000));
        Load::run(&mut loads, &mut device, &mut random, length);
        if round % 8 == 7 {
            // A clean shutdown leaves nothing in flight, and a packed ring resumes at its position as well.
            assert!(server.terminate().unwrap().success());
        } else {
            server.signal(Signal::KILL);
            kills += 1;
        }
        log += &server.log();
        drop(server);
        in_flight_at_kills += loads.iter().map(Load::in_flight).sum::<usize>();
        server = successor(binary, &arguments);
        device.reconnect(server.socket(), config).unwrap();
        if round % 4 == 0 {
            // The queue is stopped at once: requests in flight are completed before the reply.
            for index in 0..device.queues.len() {
                let base = device.frontend.vring_base(index as u16).unwrap();
                let ring = &device.queues[index].ring;
                if ring.is_packed() {
                    assert_eq!(base >> 16, base & 0xffff, "round {round}")
                } else {
                    assert_eq!(base, ring.base_after_death(), "round {round}")
                }
                device.resume_queue(index, base).unwrap();
            }
        }
    }
    Load::finish(&mut loads, &mut device);
    let completed: u64 = loads.iter().map(|load| load.completed).sum();
    println!("{completed} requests, {in_flight_at_kills} of them in flight at {kills} kills");
    assert!(in_flight_at_kills > rounds);
    assert!(server.terminate().unwrap().success());
    log += &server.log();
    let file = if disk.file.extension().is_some_and(|e| e == "qcow2") {
        as_raw(&disk.file)
    } else {
        disk.file.clone()
    };
    loads.iter().for_each(|load| load.verify(&file).unwrap());
    log
}

/// What QEMU reads from the image; it must be consistent except for leaks.
fn as_raw(image: &Path) -> PathBuf {
    let run = |args: &[&str], paths: &[&Path]| {
        let mut command = Command::new("qemu-img");
        command.args(args).args(paths).output().unwrap()
    };
    let check = run(&["check", "-f", "qcow2"], &[image]);
    assert!(
        [Some(0), Some(3)].contains(&check.status.code()),
        "{check:?}"
    );
    let raw = image.with_extension("converted");
    let converted = run(&["convert", "-f", "qcow2", "-O", "raw"], &[image, &raw]);
    assert!(converted.status.success(), "{converted:?}");
    raw
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
    kill_repeatedly(&config(false), ",queue-size=64", 60);
}

#[test]
fn packed_rings_survive_kills() {
    let config = DeviceConfig {
        indirect: false,
        ..config(true)
    };
    kill_repeatedly(&config, ",queue-size=64", 60);
}

#[test]
fn packed_rings_with_indirect_tables_survive_kills_without_a_write_cache() {
    kill_repeatedly(&config(true), ",queue-size=64,cache=writethrough", 20);
}

/// QEMU asks for `queue-size` entries, and some versions still let the driver set up rings of 1024.
fn config_of_1024_entries(packed: bool) -> DeviceConfig {
    DeviceConfig {
        queue_size: 1024,
        region: Some(RegionEntries::Asked(128)),
        ..config(packed)
    }
}

#[test]
fn split_rings_larger_than_requested_survive_kills() {
    kill_repeatedly(&config_of_1024_entries(false), "", 20);
}

#[test]
fn packed_rings_larger_than_requested_survive_kills() {
    let config = DeviceConfig {
        indirect: false,
        ..config_of_1024_entries(true)
    };
    kill_repeatedly(&config, "", 20);
}

/// A region made by an older ringdisk is too small for the ring: kills still lose nothing.
#[test]
fn split_rings_survive_kills_with_too_small_a_region() {
    let config = DeviceConfig {
        queue_size: 256,
        region: Some(RegionEntries::Made(64)),
        ..config(false)
    };
    kill_repeatedly(&config, "", 40);
}

/// Length, offset, number and size of queues as the front-end states them, and the length of the file.
type BadRegion = ((u64, u64, u16, u16), u64);

/// Invalid descriptions of the region.
#[test]
fn invalid_region_closes_the_connection() {
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
        if queues != 2 {
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
    // A region that is too small for this kind of ring, or that ends before the second ring.
    for len in [2176, 1088] {
        let mut device = Device::connect(server.socket(), &config(true)).unwrap();
        let (description, file) = ((len, 0, 2, 64), memfd(len));
        device
            .frontend
            .set_inflight(&Inflight { description, file })
            .unwrap();
        assert_eq!(device.queues[1].run(Op::Read, 8, 4096), OK);
    }
    let mut device = Device::connect(server.socket(), &config(false)).unwrap();
    assert_eq!(device.queues[1].run(Op::Read, 8, 4096), OK);
}

/// A region that the front-end truncates while in use closes that connection, like guest memory.
#[test]
fn truncated_region_closes_the_connection() {
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

/// Random bytes in the region, while the device uses it and before it reads it: the queue continues or is retired, and
/// another disk notices nothing.
#[test]
fn random_region_content_harms_only_its_queue() {
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
            // Small numbers are more dangerous than large ones.
            let (at, byte) = (random.below(len), random.below(70) as u8);
            file.write_all_at(&[byte], at).unwrap();
        }
        let queue = &mut device.queues[0];
        queue.prepare(0, Op::Read, 8, 4096);
        queue.submit(&[0]);
        device.frontend.set_inflight(&inflight).unwrap();
        let garbage: Vec<u8> = (0..len).map(|_| random.below(4) as u8).collect();
        if random.below(2) == 0 {
            // With a known version and the right number of entries.
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

/// A front-end sets up a ring and asks for its position before it runs: requests in flight at the previous server are
/// not forgotten.
#[test]
fn stopping_a_ring_before_it_runs_keeps_its_inflight_requests() {
    let disk = Disk::new();
    let binary = env!("CARGO_BIN_EXE_ringdisk");
    for packed in [false, true] {
        let config = config(packed);
        // As slow as a disk can be.
        let slow = Server::ringdisk(binary, &[disk.argument("queues=2,iops=1")]).unwrap();
        let mut device = Device::connect(slow.socket(), &config).unwrap();
        let slots = [0, 1, 2, 3];
        for slot in slots {
            device.queues[0].prepare(slot, Op::Read, 8, 4096);
        }
        device.queues[0].submit(&slots);
        // All have been fetched once one has completed.
        let mut done = device.queues[0].finish(1);
        slow.signal(Signal::KILL);
        drop(slow);
        let server = successor(binary, &[disk.argument("queues=2")]);
        device.rejoin(server.socket(), &config).unwrap();
        let base = device.queues[0].ring.base_after_death();
        device.frontend.set_vring_base(0, base).unwrap();
        assert_eq!(device.frontend.vring_base(0).unwrap(), base);
        device.resume_queue(0, base).unwrap();
        done.extend(device.queues[0].finish(slots.len() - done.len()));
        server.wait_for_log(&["are done again"]);
        assert!(done.iter().all(|&(_, status)| status == OK), "{done:?}");
    }
}

// A real guest

#[test]
fn guest_survives_kills() {
    kill_under_guest("guest_survives_kills", false);
}

#[test]
fn guest_with_packed_rings_survives_kills() {
    kill_under_guest("guest_with_packed_rings_survives_kills", true);
}

/// Four writers read back their writes, bypassing the guest's page cache, while ringdisk is killed.
fn kill_under_guest(test: &str, packed: bool) {
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
    // As slow as a disk can be, so that something is in flight at each kill.
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
    let mut guest = Vm::new(logs).cpus(2).disk(vm::Disk::Printed(pasted));
    if packed {
        guest = guest.packed();
    }
    let mut logs = String::new();
    let output = guest.run_watched(
        &vm::verifying_writers("kill", 6, 2),
        // The machine may be busy.
        Duration::from_secs(400),
        &mut |line, _| {
            if line == "kill" {
                let old = server.take().unwrap();
                old.signal(Signal::KILL);
                logs += &old.log();
                drop(old);
                server = Some(successor(binary, &arguments));
            }
        },
    );
    let mut server = server.unwrap();
    if let Err(e) = output.and_then(vm::Output::checked) {
        let runs = server.is_running();
        logs += &server.log();
        panic!("{e:#}\n--- the servers said (the last of them runs: {runs}):\n{logs}");
    }
    assert!(server.terminate().unwrap().success());
    logs += &server.log();
    assert!(
        logs.contains("they are done again"),
        "nothing was in flight: {logs}"
    );
    support::assert_queues_served(&logs);
}
