//! One scenario on each supported QEMU (see [`testkit::qemu`]): a disk's whole life, with faults.
//!
//! Two guests per QEMU, one with SeaBIOS and one with OVMF, both booting from a disk of ringdisk. Their data disks are
//! chosen so that every pair of ring format, queue size, number of queues and image format occurs.

mod migration;

use std::fs;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use testkit::compatibility::Record;
use testkit::qemu::Release;
use testkit::qemu_img;
use testkit::server::Server;
use testkit::vm::{self, Qmp, Vm};

use crate::support::{self, successor};

/// A guest finishes within a minute; the machine may be busy.
const LIMIT: Duration = Duration::from_secs(600);

/// How often a guest is started whose QEMU crashes because of its own bug.
const TRIES: u32 = 3;

/// Initial size of a data disk. Later writes go beyond it.
const DATA_BYTES: u64 = 64 << 20;

/// Slow enough for requests to be in flight when a fault happens.
const SLOW_IOPS: u64 = 40;

/// A data disk or the boot disk.
#[derive(Clone, Copy)]
struct Disk {
    packed: bool,
    queues: u16,
    queue_size: u16,
    format: &'static str,
}

const fn disk(ring: &'static str, queues: u16, queue_size: u16, format: &'static str) -> Disk {
    let packed = ring.as_bytes()[0] == b'p';
    Disk {
        packed,
        queues,
        queue_size,
        format,
    }
}

impl Disk {
    /// Serial and name.
    fn name(&self) -> String {
        let ring = if self.packed { "packed" } else { "split" };
        format!("{ring}-{}-{}", self.queues, self.queue_size)
    }
}

struct Guest {
    firmware: &'static str,
    boot: Disk,
    data: [Disk; 3],
}

const GUESTS: [Guest; 2] = [
    Guest {
        firmware: "SeaBIOS",
        boot: disk("split", 4, 128, "qcow2"),
        data: [
            disk("packed", 4, 128, "qcow2"),
            disk("packed", 1, 256, "raw"),
            disk("split", 1, 1024, "qcow2"),
        ],
    },
    Guest {
        firmware: "OVMF",
        boot: disk("packed", 1, 256, "raw"),
        data: [
            disk("split", 1, 128, "raw"),
            disk("split", 4, 256, "qcow2"),
            disk("packed", 4, 1024, "raw"),
        ],
    },
];

/// The guest's messages in order, and the name of each part.
const PARTS: [(&str, &str); 6] = [
    ("boot", "boot from the disk"),
    ("life", "partition, mkfs, write, verify, discard"),
    ("resize", "live resize"),
    ("plug", "hot unplug and plug"),
    ("kill", "kill -9 of ringdisk with requests in flight"),
    ("reset", "reset with requests in flight, boot again, verify"),
];

#[test]
fn debian_12() {
    run_on("debian-12");
}

#[test]
fn debian_12_backports() {
    run_on("debian-12-backports");
}

#[test]
fn debian_13() {
    run_on("debian-13");
}

#[test]
fn debian_unstable() {
    run_on("debian-unstable");
}

fn run_on(release: &str) {
    let test = format!("matrix on {release}");
    if let Some(missing) = vm::missing(true).or_else(vm::missing_loader) {
        println!("skipped: {test}: {missing}");
        return;
    }
    let release = match Release::find(release) {
        Ok(release) => release,
        Err(error) => {
            println!("skipped: {test}: {error:#}");
            return;
        }
    };
    let mut record = Record::new("QEMU", &format!("{} ({})", release.version, release.name));
    let start = Instant::now();
    for guest in &GUESTS {
        let steps = record.steps();
        for tries_left in (0..TRIES).rev() {
            let running = Running::start(&release, guest);
            let logs = running.logs();
            let run = AssertUnwindSafe(|| running.run(&mut record));
            match panic::catch_unwind(run) {
                Ok(()) => break,
                Err(_) if tries_left > 0 && vm::emulation_failed(&logs) => {
                    println!("QEMU's emulation of processors failed; the guest is started again");
                    record.forget_after(steps);
                }
                Err(panic) => panic::resume_unwind(panic),
            }
        }
    }
    report(&release, "both guests", start);
}

/// Prints how long a part took.
fn report(release: &Release, what: &str, start: Instant) {
    println!(
        "time: {:6.1} s on QEMU {}: {what}",
        start.elapsed().as_secs_f64(),
        release.version
    );
}

/// The option that makes a chardev reconnect after a second.
fn reconnects(release: &Release) -> &'static str {
    let mut numbers = release.version.split('.').map(|n| n.parse().unwrap_or(0));
    if (numbers.next(), numbers.next()) < (Some(9), Some(2)) {
        "reconnect=1"
    } else {
        "reconnect-ms=1000"
    }
}

/// A guest, and the ringdisk that serves its disks.
struct Running<'a> {
    release: &'a Release,
    guest: &'a Guest,
    /// Disks and sockets.
    folder: tempfile::TempDir,
    arguments: Vec<String>,
    server: Option<Server>,
    log: String,
    /// The current size of the data disks.
    bytes: u64,
}

impl<'a> Running<'a> {
    fn start(release: &'a Release, guest: &'a Guest) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let place = |name: &str| folder.path().join(name).display().to_string();
        fs::hard_link(bootable(), folder.path().join("base.raw")).unwrap();
        qemu_img::img(
            folder.path(),
            &match guest.boot.format {
                "raw" => "convert -f raw -O raw base.raw boot.raw".to_owned(),
                _ => "create -q -f qcow2 -b base.raw -F raw boot.qcow2".to_owned(),
            },
        );
        let boot = [("boot".to_owned(), &guest.boot)].into_iter();
        let all = boot.chain(guest.data.iter().map(|disk| (disk.name(), disk)));
        let mut arguments = vec![format!("--control={}", place("c"))];
        for (name, disk) in all {
            if name != "boot" {
                let create = format!("create -q -f {} {name}.{0} {DATA_BYTES}", disk.format);
                qemu_img::img(folder.path(), &create);
            }
            arguments.push(format!(
                "file={},name={name},serial={name},socket={},queues={},queue-size={}",
                place(&format!("{name}.{}", disk.format)),
                place(&format!("{name}.s")),
                disk.queues,
                disk.queue_size
            ));
        }
        let server = successor(env!("CARGO_BIN_EXE_ringdisk"), &arguments);
        Self {
            release,
            guest,
            folder,
            arguments,
            server: Some(server),
            log: String::new(),
            bytes: DATA_BYTES,
        }
    }

    /// Where QEMU and the guest write their output.
    fn logs(&self) -> PathBuf {
        let name = format!("{}-{}", self.release.name, self.guest.firmware);
        Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join("vm/matrix")
            .join(name)
    }

    /// Takes the guest through all parts, and checks its disks at the end.
    fn run(mut self, record: &mut Record) {
        let firmware = self.guest.firmware;
        let begin = |record: &mut Record, part: usize| {
            if let Some((_, what)) = PARTS.get(part) {
                record.begin(&format!("{firmware}: {what}"));
            }
        };
        let mut vm = Vm::new(self.logs())
            .qemu(self.release)
            .cpus(4)
            .boot_loader()
            .may_reboot()
            .qmp(self.monitor());
        if firmware == "OVMF" {
            vm = vm.uefi(self.release.ovmf());
        }
        vm = self.devices().into_iter().fold(vm, Vm::disk);

        let (mut part, mut start) = (0, Instant::now());
        begin(record, part);
        let output = vm.run_watched("", LIMIT, &mut |line, _| match line.strip_prefix("done ") {
            Some(done) => {
                assert_eq!(done, PARTS[part].0);
                record.passed();
                report(
                    self.release,
                    &format!("{firmware}: {}", PARTS[part].1),
                    start,
                );
                (part, start) = (part + 1, Instant::now());
                begin(record, part);
            }
            None => self.handle_request(line),
        });
        let mut server = self.server.take().unwrap();
        let output = output.and_then(vm::Output::checked);
        if let Err(error) = output {
            let runs = server.is_running();
            panic!(
                "{error:#}\n--- ringdisk, which runs: {runs}, said:\n{}{}",
                self.log,
                server.log()
            );
        }
        assert_eq!(part, PARTS.len(), "the guest ended early");
        assert!(server.terminate().unwrap().success(), "{}", server.log());
        self.log += &server.log();
        assert!(
            self.log.contains("they are done again"),
            "nothing was in flight: {}",
            self.log
        );
        support::assert_all_served(&self.log);
        for disk in &self.guest.data {
            if disk.format == "qcow2" {
                // ringdisk was killed: space may be lost, and nothing else.
                qemu_img::check(self.folder.path(), &format!("{}.qcow2", disk.name()), true);
            }
        }
    }

    /// Does what the guest asks for.
    fn handle_request(&mut self, line: &str) {
        match line {
            "resize" => self.resize(),
            "unplug" => self.unplug(),
            "plug" => self.plug(),
            "slow" => {
                self.limit(SLOW_IOPS);
                self.resize();
            }
            "kill" => {
                let old = self.server.take().unwrap();
                old.signal(Signal::KILL);
                self.log += &old.log();
                drop(old);
                let next = successor(env!("CARGO_BIN_EXE_ringdisk"), &self.arguments);
                self.server = Some(next);
            }
            "reset" => {
                self.qemu().execute("system_reset", json!({})).unwrap();
                self.limit(0);
            }
            // Other output of the script.
            _ => {}
        }
    }

    fn monitor(&self) -> PathBuf {
        self.folder.path().join("q")
    }

    fn qemu(&self) -> Qmp {
        Qmp::connect(&self.monitor()).unwrap()
    }

    fn ringdisk(&self) -> Qmp {
        Qmp::connect(&self.folder.path().join("c")).unwrap()
    }

    /// The arguments that ringdisk prints, with a user's usual changes.
    fn devices(&self) -> Vec<vm::Disk> {
        let ready = &self.server.as_ref().unwrap().ready["disks"];
        let all = [&self.guest.boot].into_iter().chain(&self.guest.data);
        let printed = ready.as_array().unwrap().iter().zip(all).enumerate();
        let devices = printed.map(|(index, (printed, disk))| {
            let printed = printed["qemu"].as_array().unwrap();
            let mut arguments: Vec<String> = printed
                .iter()
                .map(|a| a.as_str().unwrap().to_owned())
                .collect();
            for argument in &mut arguments {
                if argument.starts_with("socket,") {
                    *argument = argument.replace("reconnect-ms=1000", reconnects(self.release));
                } else if argument.starts_with("vhost-user-blk-pci,") {
                    *argument += match (index, disk.packed) {
                        (0, true) => ",bootindex=0,packed=on",
                        (0, false) => ",bootindex=0",
                        (_, true) => ",packed=on",
                        (_, false) => "",
                    };
                    if index > 0 {
                        // Only such a port accepts a device while the guest runs.
                        *argument += &format!(",bus=port{index},id=device{index}");
                    }
                }
            }
            if index > 0 {
                let port = format!("pcie-root-port,id=port{index},chassis={index}");
                arguments.splice(0..0, ["-device".to_owned(), port]);
            }
            vm::Disk::Printed(arguments)
        });
        devices.collect()
    }

    /// Grows the data disks.
    fn resize(&mut self) {
        self.bytes += 32 << 20;
        for disk in &self.guest.data {
            let arguments = json!({ "node-name": disk.name(), "size": self.bytes });
            self.ringdisk().execute("block_resize", arguments).unwrap();
        }
    }

    /// As libvirt does it: the connection is closed too.
    fn unplug(&self) {
        let mut qemu = self.qemu();
        for (index, disk) in (1..).zip(&self.guest.data) {
            qemu.unplug(&format!("device{index}")).unwrap();
            let id = json!({ "id": disk.name() });
            qemu.execute("chardev-remove", id).unwrap();
        }
    }

    fn plug(&self) {
        let mut qemu = self.qemu();
        for (index, disk) in (1..).zip(&self.guest.data) {
            let socket = self.folder.path().join(format!("{}.s", disk.name()));
            let mut data =
                json!({ "addr": { "type": "unix", "data": { "path": socket } }, "server": false });
            let (option, value) = reconnects(self.release).split_once('=').unwrap();
            data[option] = value.parse::<u64>().unwrap().into();
            let backend = json!({ "type": "socket", "data": data });
            let chardev = json!({ "id": disk.name(), "backend": backend });
            qemu.execute("chardev-add", chardev).unwrap();
            let device = json!({
                "driver": "vhost-user-blk-pci", "id": format!("device{index}"), "bus": format!("port{index}"),
                "chardev": disk.name(), "num-queues": disk.queues, "queue-size": disk.queue_size,
                "packed": disk.packed,
            });
            qemu.execute("device_add", device).unwrap();
        }
    }

    /// Limits the data disks to this many requests per second.
    fn limit(&self, iops: u64) {
        for disk in &self.guest.data {
            let limits = json!({
                "id": disk.name(), "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": iops, "iops_rd": 0, "iops_wr": 0,
            });
            self.ringdisk()
                .execute("block_set_io_throttle", limits)
                .unwrap();
        }
    }
}

/// A boot disk with the script of all guests; created once.
fn bootable() -> &'static Path {
    static MADE: OnceLock<tempfile::TempPath> = OnceLock::new();
    MADE.get_or_init(|| {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = file.into_temp_path();
        let script = format!(
            "life() {{\n{}\n}}\n{}",
            vm::disk_lifecycle("$1", 4096),
            include_str!("guest.sh")
        );
        vm::install_loader(&path, 320 << 20, "boot", &script).unwrap();
        path
    })
}
