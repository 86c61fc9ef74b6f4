//! Another process takes over while guests read and write; if it fails, the old one continues.

mod configuration;
mod dirty_log;
mod failure;
mod files;
mod hooks;
mod inheritance;
mod rights;
mod sockets;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{self, Disk, content, seed};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::load::{BlockContent, Load};
use testkit::qemu_img;
use testkit::random::Random;
use testkit::server::{Server, wait_for_exit};
use testkit::vm::{self, Vm};

const BINARY: &str = env!("CARGO_BIN_EXE_ringdisk");

/// A ringdisk that can hand over, with its own control socket and state.
struct Served {
    first: Server,
    /// The process that serves now.
    pid: u32,
    dir: tempfile::TempDir,
    /// The control socket.
    control: PathBuf,
}

impl Served {
    fn start(disks: &[String]) -> Self {
        Self::start_for(disks, None)
    }

    /// With a service manager that listens there.
    fn start_for(disks: &[String], manager: Option<&Path>) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let state = format!("--state={}", dir.path().join("state").display());
        let arguments = [&[state, "--metrics=127.0.0.1:0".into()][..], disks].concat();
        Self::start_in(dir, &arguments, manager)
    }

    /// In a directory with existing files.
    fn start_in(dir: tempfile::TempDir, arguments: &[String], manager: Option<&Path>) -> Self {
        let control = dir.path().join("control.qmp");
        let mut command = Command::new(BINARY);
        command.args(["serve", "--json", "--control"]);
        command.arg(&control).args(arguments);
        if let Some(manager) = manager {
            command.env("NOTIFY_SOCKET", manager);
        }
        let first = Server::ringdisk_command(command).unwrap();
        let pid = first.pid();
        Self {
            first,
            pid,
            dir,
            control,
        }
    }

    fn ringdisk(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(BINARY);
        command.args(arguments).arg("--control").arg(&self.control);
        command.output().unwrap()
    }

    /// Runs an upgrade; returns how long guests waited.
    fn upgrade(&mut self, arguments: &[&str]) -> Duration {
        let output = self.ringdisk(&[&["upgrade", "--json"], arguments].concat());
        assert!(output.status.success(), "{output:?} {}", self.first.log());
        let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
        let before = self.pid;
        self.pid = reply["pid"].as_u64().unwrap() as u32;
        assert_ne!(self.pid, before);
        wait_for_exit(before);
        Duration::from_secs_f64(reply["pause-ms"].as_f64().unwrap() / 1000.0)
    }

    /// A handover that must fail with these words.
    fn assert_upgrade_fails(&self, program: &Path, words: &str) {
        let program = program.to_str().unwrap();
        let output = self.ringdisk(&["upgrade", "--program", program]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        println!("{}", text.trim_end());
        let fits = words.split('|').any(|words| text.contains(words));
        assert!(fits && text.contains("continues to serve"), "{text}");
        assert_eq!(self.list(), 0, "the old process must answer");
    }

    fn list(&self) -> i32 {
        self.ringdisk(&["list"]).status.code().unwrap()
    }

    /// The disk's entry in `list`.
    fn disk(&self, name: &str) -> Value {
        let list = self.ringdisk(&["list", "--json"]);
        let disks: Value = serde_json::from_slice(&list.stdout).unwrap();
        let mut disks = disks.as_array().unwrap().iter();
        disks.find(|disk| disk["name"] == name).unwrap().clone()
    }

    /// Moves a disk to another file with the same content.
    fn replace(&self, disk: &str, file: &Path) {
        let replaced = self.ringdisk(&["replace", disk, file.to_str().unwrap()]);
        assert!(replaced.status.success(), "{replaced:?}");
    }

    /// A script in place of the new program.
    fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn end(mut self) {
        kill_process(Pid::from_raw(self.pid as i32).unwrap(), Signal::TERM).unwrap();
        wait_for_exit(self.pid);
        self.pid = self.first.pid();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // After a failed test, the process that took over.
        if self.pid != self.first.pid() {
            let _ = kill_process(Pid::from_raw(self.pid as i32).unwrap(), Signal::KILL);
        }
    }
}

fn wait_for_path(path: &Path) {
    let start = Instant::now();
    while !path.exists() {
        assert!(start.elapsed() < HANG, "{} does not appear", path.display());
        thread::sleep(Duration::from_millis(5));
    }
}

fn config() -> DeviceConfig {
    DeviceConfig {
        queues: 2,
        queue_size: 64,
        ..DeviceConfig::default()
    }
}

/// Stops the load even after a failed assertion.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Loads devices until `during` has ended; returns the longest request in that time.
fn under_load(
    devices: &mut [(Device, Vec<Load>)],
    random: &mut Random,
    during: impl FnOnce() + Send,
) -> Duration {
    for load in devices.iter_mut().flat_map(|(_, loads)| loads) {
        load.longest = Duration::ZERO;
    }
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _stop = Stop(&done);
            during();
        });
        while !done.load(Ordering::Relaxed) {
            for (device, loads) in devices.iter_mut() {
                Load::run(loads, device, random, Duration::from_micros(500));
            }
        }
    });
    let loads = devices.iter().flat_map(|(_, loads)| loads);
    loads.map(|load| load.longest).max().unwrap()
}

fn qcow2(disk: &mut Disk) -> bool {
    let image = disk.file.with_extension("qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"])
        .arg(&image)
        .arg("64M")
        .status();
    disk.file = image;
    let bitmap = Command::new("qemu-img")
        .args(["bitmap", "--add", "-g", "4k"])
        .args([disk.file.as_os_str(), "b0".as_ref()])
        .status();
    let succeeded = |status: io::Result<ExitStatus>| status.is_ok_and(|status| status.success());
    succeeded(made) && succeeded(bitmap)
}

/// The bitmap that was stored at the end has all that was ever written.
fn check_bitmap(image: &Path, content: &Path) {
    let directory = image.parent().unwrap();
    let name = image.file_name().unwrap().to_str().unwrap();
    let dirty = qemu_img::dirty(directory, name, "b0");
    let content = fs::read(content).unwrap();
    let mut written = 0;
    for (at, block) in (0..).step_by(4096).zip(content.chunks(4096)) {
        if block.iter().any(|&byte| byte != 0) {
            let is_dirty = dirty.iter().any(|range| range.contains(&at));
            assert!(is_dirty, "the bitmap lacks the write at {at}");
            written += 1;
        }
    }
    assert!(written > 0);
}

/// A message: the length of the text, no descriptors, the text.
pub fn send_message(text: &str) -> String {
    let zeroes = r"\000".repeat(15);
    format!(r#"printf '\{:03o}{zeroes}{text}' >&0"#, text.len())
}

/// Receives a message of up to 32 KiB, and drops its descriptors.
pub const RECEIVE_MESSAGE: &str = "dd bs=32768 count=1 <&0 >/dev/null 2>&1";

fn rounds() -> u64 {
    let given = std::env::var("RINGDISK_TEST_ROUNDS").ok();
    given.map_or(5, |n| n.parse().unwrap())
}

/// Raw and qcow2, with and without an inflight region, split and packed rings, in turn, five times or
/// `RINGDISK_TEST_ROUNDS` times.
#[test]
fn guests_continue_on_every_format_and_ring() {
    let (mut image, raw, plain, idle) = (Disk::new(), Disk::new(), Disk::new(), Disk::new());
    if !qcow2(&mut image) {
        println!("skipped: guests_continue_on_every_format_and_ring: there is no qemu-img");
        return;
    }
    let options = "queues=2,queue-size=64";
    let arguments = [
        image.argument(options),
        raw.argument(options),
        plain.argument(&format!("{options},cache=writeback")),
        idle.argument(options),
    ];
    let mut served = Served::start(&arguments);
    let mut random = Random(seed());
    let connect = |disk: &Disk, inflight, packed| {
        let config = DeviceConfig {
            inflight,
            packed,
            ..config()
        };
        Device::connect(&disk.socket, &config).unwrap()
    };
    let with = |device: Device, blocks, held| {
        let loads = Load::all(&device, blocks, held, held == BlockContent::Zeroes);
        (device, loads)
    };
    let mut devices = vec![
        with(connect(&image, true, false), 4096, BlockContent::Zeroes),
        with(connect(&raw, true, true), 512, BlockContent::Pattern),
        with(connect(&plain, false, false), 512, BlockContent::Pattern),
    ];
    let mut channel = devices[1].0.frontend.open_backend_channel().unwrap();
    devices[2].0.frontend.set_config(32, &[0]).unwrap();
    for round in 0..rounds() {
        let mut pause = Duration::ZERO;
        let longest = under_load(&mut devices, &mut random, || {
            thread::sleep(Duration::from_millis(100));
            pause = served.upgrade(&[]);
            thread::sleep(Duration::from_millis(100));
        });
        println!("round {round}: guests waited {pause:?}, the longest request took {longest:?}");
        // The session with the front-end continues, too.
        for (device, _) in &mut devices {
            assert_eq!(device.config().unwrap().num_queues, 2);
        }
        assert_eq!(
            devices[2].0.frontend.config(32, 1).unwrap(),
            [0],
            "the guest's write cache setting"
        );
        let size = format!("{}M", 17 + round);
        let name = raw.file.file_stem().unwrap().to_str().unwrap().to_owned();
        let resized = served.ringdisk(&["resize", &name, &size]);
        assert!(resized.status.success(), "{resized:?}");
        // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG
        assert_eq!(channel.next(HANG).unwrap().0, 2);
    }
    // An idle disk can still be connected to.
    assert!(Device::connect(&idle.socket, &config()).is_ok());
    for (device, loads) in &mut devices {
        Load::finish(loads, device);
    }
    let sockets = [&image, &raw, &plain, &idle].map(|disk| disk.socket.clone());
    served.end();
    assert!(!sockets.iter().any(|socket| socket.exists()));
    let converted = image.file.with_extension("converted");
    let run = |command: &mut Command| command.output().unwrap();
    let check = run(Command::new("qemu-img").arg("check").arg(&image.file));
    assert!(check.status.success(), "{check:?}");
    let mut convert = Command::new("qemu-img");
    convert
        .args(["convert", "-O", "raw"])
        .arg(&image.file)
        .arg(&converted);
    assert!(run(&mut convert).status.success());
    check_bitmap(&image.file, &converted);
    for ((_, loads), file) in devices.iter().zip([&converted, &raw.file, &plain.file]) {
        loads.iter().for_each(|load| load.verify(file).unwrap());
    }
}

/// `ringdisk reload --upgrade`, as the service does it: the process reloads the configuration and then starts its
/// successor.
#[test]
fn reload_with_upgrade_starts_the_new_program() {
    let disk = Disk::new();
    let manager_dir = tempfile::tempdir().unwrap();
    let manager_path = manager_dir.path().join("notify");
    let manager = UnixDatagram::bind(&manager_path).unwrap();
    let mut served = Served::start_for(&[disk.argument("queues=2")], Some(&manager_path));
    let output = served.ringdisk(&["reload", "--upgrade"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("no configuration"),
        "the same program: {output:?}"
    );
    let copy = served.dir.path().join("ringdisk");
    fs::copy(BINARY, &copy).unwrap();
    let mut device = Device::connect(&disk.socket, &config()).unwrap();
    let mut reload = Command::new(&copy);
    reload
        .args(["reload", "--upgrade", "--json", "--control"])
        .arg(&served.control);
    let output = reload.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
    wait_for_exit(served.pid);
    served.pid = reply["pid"].as_u64().unwrap() as u32;
    let mut told = String::new();
    while !told.contains("MAINPID") {
        let mut message = [0; 1000];
        let n = manager.recv(&mut message).unwrap();
        told += std::str::from_utf8(&message[..n]).unwrap();
    }
    assert!(told.contains(&format!("MAINPID={}", served.pid)), "{told}");
    let exe = fs::read_link(format!("/proc/{}/exe", served.pid)).unwrap();
    assert_eq!(exe, copy);
    assert!(device.queues[0].read(0, 4096).is_ok());
    // The next process knows the changes made meanwhile, and so does the one after a kill.
    let name = disk.file.file_stem().unwrap().to_str().unwrap().to_owned();
    assert!(
        served
            .ringdisk(&["throttle", &name, "iops=4321"])
            .status
            .success()
    );
    served.upgrade(&[]);
    let list = served.ringdisk(&["list", "--json"]);
    assert!(
        String::from_utf8_lossy(&list.stdout).contains("4321"),
        "{list:?}"
    );
    served.end();
}

fn status(pid: u32, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    line.unwrap().split_whitespace().next().unwrap().to_owned()
}

/// A process that has changed its user can hand over too, and its successor has the same sandbox.
#[test]
fn unprivileged_process_hands_over() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: unprivileged_process_hands_over: needs root");
    }
    let disk = Disk::new();
    let user = ["--user=nobody".to_owned(), disk.argument("queues=2")];
    let mut served = Served::start(&user);
    let seccomp = status(served.pid, "Seccomp:");
    let mut device = Device::connect(&disk.socket, &config()).unwrap();
    for round in 0..2 {
        let name = disk.file.file_stem().unwrap().to_str().unwrap();
        let limit = format!("iops={}", 7000 + round);
        let throttled = served.ringdisk(&["throttle", name, &limit]);
        assert!(throttled.status.success(), "{throttled:?}");
        served.upgrade(&[]);
        assert_eq!(status(served.pid, "Uid:"), "65534");
        assert_eq!(status(served.pid, "CapEff:"), "0000000000000000");
        assert_eq!(status(served.pid, "Seccomp:"), seccomp);
        assert!(device.queues[1].read(0, 4096).is_ok());
        // It could write to the state directory.
        let list = served.ringdisk(&["list", "--json"]);
        let list = String::from_utf8(list.stdout).unwrap();
        assert!(list.contains(&format!("{}", 7000 + round)), "{list}");
    }
    served.end();
}

/// A disk that is locked only while its VM runs stays locked, or unlocked.
#[test]
fn lock_running_disk_keeps_its_lock_state() {
    let (running, idle) = (Disk::new(), Disk::new());
    let options = "queues=2,lock=running";
    let mut served = Served::start(&[running.argument(options), idle.argument(options)]);
    let mut device = Device::connect(&running.socket, &config()).unwrap();
    assert!(device.queues[0].read(0, 4096).is_ok());
    let write = |disk: &Disk| {
        let mut io = Command::new("qemu-io");
        io.args(["-f", "raw", "-c", "write 0 512"]).arg(&disk.file);
        io.output().ok().map(|output| output.status.success())
    };
    if write(&idle).is_none() {
        return println!("skipped: lock_running_disk_keeps_its_lock_state: there is no qemu-io");
    }
    for _ in 0..2 {
        served.upgrade(&[]);
        assert_eq!(
            write(&running),
            Some(false),
            "the running disk must stay locked"
        );
        assert_eq!(write(&idle), Some(true), "the idle disk must stay unlocked");
        assert!(device.queues[1].read(8, 4096).is_ok());
    }
    let mut other = Device::connect(&idle.socket, &config()).unwrap();
    assert!(other.queues[0].read(0, 4096).is_ok());
    assert_eq!(write(&idle), Some(false));
    served.end();
}

/// A disk released at the handover must not prevent locking a later disk of the same name.
#[test]
fn disk_reusing_the_name_of_a_released_disk_is_locked() {
    let (idle, other) = (Disk::new(), Disk::new());
    let mut served = Served::start(&[
        idle.argument("queues=2,lock=running,name=disk"),
        other.argument("queues=2,name=other"),
    ]);
    served.upgrade(&[]);
    let run = |arguments: &[&str]| {
        let output = served.ringdisk(arguments);
        assert!(output.status.success(), "{output:?}");
    };
    run(&["detach", "disk"]);
    run(&["detach", "other"]);
    run(&["attach", &other.argument("queues=2,name=disk")]);
    // It ends on its own only if it is refused the file.
    let mut second = Command::new("timeout");
    let control = format!("--control={}.2", served.control.display());
    second.args([
        "30",
        BINARY,
        "serve",
        &control,
        &other.file.display().to_string(),
    ]);
    let output = second.env("RINGDISK_LOG", "off").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("another process"),
        "expected a lock conflict: {text}"
    );
    served.end();
}

/// Throttled requests are released, not waited for.
#[test]
fn throttled_requests_do_not_delay_an_upgrade() {
    let disk = Disk::new();
    let mut served = Served::start(&[disk.argument("queues=2,queue-size=64,iops=1")]);
    let mut random = Random(seed());
    let device = Device::connect(&disk.socket, &config()).unwrap();
    let loads = Load::all(&device, 512, BlockContent::Pattern, false);
    let mut devices = vec![(device, loads)];
    under_load(&mut devices, &mut random, || {
        thread::sleep(Duration::from_millis(50));
        served.upgrade(&[]);
        served.upgrade(&[]);
    });
    let name = disk.file.file_stem().unwrap().to_str().unwrap();
    assert!(
        served
            .ringdisk(&["throttle", name, "iops=0"])
            .status
            .success()
    );
    let (device, loads) = &mut devices[0];
    Load::finish(loads, device);
    served.end();
    loads
        .iter()
        .for_each(|load| load.verify(&disk.file).unwrap());
}

/// A guest whose QEMU would not reconnect only notices a pause.
#[test]
fn linux_guest_continues() {
    let test = "linux_guest_continues";
    if let Some(missing) = vm::missing(false) {
        println!("skipped: {test}: {missing}");
        return;
    }
    let disk = Disk::new();
    let file = fs::File::options().write(true).open(&disk.file).unwrap();
    file.set_len(64 << 20).unwrap();
    let mut served = Served::start(&[disk.argument("queues=2")]);
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let guest = Vm::new(logs).cpus(2).disk(vm::Disk::VhostUser {
        socket: disk.socket.clone(),
        queues: 2,
        queue_size: 128,
    });
    let output = guest.run_watched(
        &vm::verifying_writers("upgrade", 4, 1),
        // The machine may be busy.
        Duration::from_secs(400),
        &mut |line, _| {
            if line == "upgrade" {
                println!("the guest waited {:?}", served.upgrade(&[]));
            }
        },
    );
    output.unwrap().checked().unwrap();
    served.end();
}
