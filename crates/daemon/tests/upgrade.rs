//! Another process takes over while guests read and write; and if it cannot, the old one goes on.

#[expect(dead_code, reason = "disks are looked at another way here")]
mod support;

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{Disk, content, seed};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::faulty::Random;
use testkit::frontend::{F_LOG_ALL, eventfd, eventfd_wait};
use testkit::load::{Held, Load};
use testkit::memory::Memory;
use testkit::server::{Server, gone};
use testkit::vm::{self, Vm};

const BINARY: &str = env!("CARGO_BIN_EXE_ringdisk");

/// A ringdisk that may hand over, with a control socket and state of its own.
struct Served {
    first: Server,
    /// Who serves now.
    pid: u32,
    dir: tempfile::TempDir,
    /// What the new processes have said.
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

    /// In a directory with files that are there already.
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

    /// Has a new process take over; how long guests waited.
    fn upgrade(&mut self, arguments: &[&str]) -> Duration {
        let output = self.ringdisk(&[&["upgrade", "--json"], arguments].concat());
        assert!(output.status.success(), "{output:?} {}", self.first.log());
        let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
        let before = self.pid;
        self.pid = reply["pid"].as_u64().unwrap() as u32;
        assert_ne!(self.pid, before);
        gone(before);
        Duration::from_secs_f64(reply["pause-ms"].as_f64().unwrap() / 1000.0)
    }

    /// A hand-over that must fail, with these words.
    fn fail(&self, program: &Path, words: &str) {
        let program = program.to_str().unwrap();
        let output = self.ringdisk(&["upgrade", "--program", program]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        println!("{}", text.trim_end());
        let fits = words.split('|').any(|words| text.contains(words));
        assert!(fits && text.contains("goes on"), "{text}");
        assert_eq!(self.list(), 0, "it answers");
    }

    fn list(&self) -> i32 {
        self.ringdisk(&["list"]).status.code().unwrap()
    }

    /// What `list` says of a disk.
    fn disk(&self, name: &str) -> Value {
        let list = self.ringdisk(&["list", "--json"]);
        let disks: Value = serde_json::from_slice(&list.stdout).unwrap();
        let mut disks = disks.as_array().unwrap().iter();
        disks.find(|disk| disk["name"] == name).unwrap().clone()
    }

    /// Puts a disk on another file, which holds the same.
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
        gone(self.pid);
        self.pid = self.first.pid();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Of a test that has failed, the one that has taken over.
        if self.pid != self.first.pid() {
            let _ = kill_process(Pid::from_raw(self.pid as i32).unwrap(), Signal::KILL);
        }
    }
}

fn until_there(path: &Path) {
    let start = Instant::now();
    while !path.exists() {
        assert!(start.elapsed() < HANG, "{} does not come", path.display());
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

/// Ends the load also if an assertion fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Loads devices until `during` has ended; returns the longest request of all in that time.
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
    made.is_ok_and(|status| status.success())
}

fn rounds() -> u64 {
    let given = std::env::var("RINGDISK_TEST_ROUNDS").ok();
    given.map_or(5, |n| n.parse().unwrap())
}

/// Raw and qcow2, with and without in-flight tracking, split and packed rings, one after the other, five times or as
/// `RINGDISK_TEST_ROUNDS` says.
#[test]
fn guests_go_on() {
    let (mut image, raw, plain, idle) = (Disk::new(), Disk::new(), Disk::new(), Disk::new());
    if !qcow2(&mut image) {
        println!("skipped: guests_go_on: there is no qemu-img");
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
        let loads = Load::all(&device, blocks, held, held == Held::Zeroes);
        (device, loads)
    };
    let mut devices = vec![
        with(connect(&image, true, false), 4096, Held::Zeroes),
        with(connect(&raw, true, true), 512, Held::Content),
        with(connect(&plain, false, false), 512, Held::Content),
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
        // The conversation with the front-end goes on too.
        for (device, _) in &mut devices {
            assert_eq!(device.config().unwrap().num_queues, 2);
        }
        assert_eq!(
            devices[2].0.frontend.config(32, 1).unwrap(),
            [0],
            "its choice"
        );
        let size = format!("{}M", 17 + round);
        let name = raw.file.file_stem().unwrap().to_str().unwrap().to_owned();
        let resized = served.ringdisk(&["resize", &name, &size]);
        assert!(resized.status.success(), "{resized:?}");
        // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG
        assert_eq!(channel.next(HANG).unwrap().0, 2);
    }
    // A disk that nobody used is one that somebody may use.
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
    for ((_, loads), file) in devices.iter().zip([&converted, &raw.file, &plain.file]) {
        loads.iter().for_each(|load| load.verify(file).unwrap());
    }
}

/// A disk that was put on an image is handed over as such.
#[test]
fn a_disk_on_another_image_is_handed_over() {
    let (mut image, raw) = (Disk::new(), Disk::new());
    image.file = raw.file.with_file_name("other");
    if !qcow2(&mut image) {
        println!("skipped: a_disk_on_another_image_is_handed_over: there is no qemu-img");
        return;
    }
    fs::write(&raw.file, vec![0; 64 << 20]).unwrap();
    let options = "queues=2,queue-size=64,name=disk";
    let mut served = Served::start(&[raw.argument(options)]);
    let mut random = Random(seed());
    let device = Device::connect(&raw.socket, &config()).unwrap();
    served.replace("disk", &image.file);
    let loads = Load::all(&device, 4096, Held::Zeroes, true);
    let mut devices = vec![(device, loads)];
    for _ in 0..2 {
        under_load(&mut devices, &mut random, || {
            thread::sleep(Duration::from_millis(100));
            served.upgrade(&[]);
        });
    }
    for (device, loads) in &mut devices {
        Load::finish(loads, device);
    }
    served.end();
    let at = image.file.parent().unwrap();
    let name = image.file.file_name().unwrap().to_str().unwrap();
    testkit::qemu_img::check(at, name, false);
    let converted = format!("convert -f qcow2 -O raw {name} converted");
    testkit::qemu_img::img(at, &converted);
    for load in &devices[0].1 {
        load.verify(&at.join("converted")).unwrap();
    }
    assert!(fs::read(&raw.file).unwrap() == vec![0; 64 << 20]);
}

/// What is handed over of a guest's write cache is newer than what was written down: a guest that has switched it off again
/// would not flush.
#[test]
fn a_choice_that_is_handed_over_wins() {
    let disk = Disk::new();
    let mut served = Served::start(&[disk.argument("queues=2,name=disk,cache=directsync")]);
    let mut device = Device::connect(&disk.socket, &config()).unwrap();
    let state = served.dir.path().join("state/state.json");
    let mut choose = |on: u8, kept: Value| {
        device.frontend.set_config(32, &[on]).unwrap();
        let start = Instant::now();
        loop {
            let text = fs::read_to_string(&state).unwrap();
            let now: Value = serde_json::from_str(&text).unwrap();
            if now["write-caches"]["disk"] == kept {
                return text;
            }
            assert!(start.elapsed() < HANG, "{text}");
            thread::sleep(Duration::from_millis(10));
        }
    };
    let older = choose(1, true.into());
    choose(0, Value::Null);
    // As it is when the last choice has not been written yet.
    let kept = served.dir.path().join("older");
    fs::write(&kept, older).unwrap();
    let program = served.script(
        "behind",
        &format!(
            r#"cp {} {} && exec {BINARY} "$@""#,
            kept.display(),
            state.display()
        ),
    );
    served.upgrade(&["--program", program.to_str().unwrap()]);
    assert_eq!(device.frontend.config(32, 1).unwrap(), [0]);
    drop(device);
    // It does not come back with the next front-end, nor with the next process.
    let mut device = Device::connect(&disk.socket, &config()).unwrap();
    served.upgrade(&[]);
    assert_eq!(device.frontend.config(32, 1).unwrap(), [0]);
    served.end();
}

/// Disks in files of one directory that hold the same, those of a configuration among them.
struct Files(tempfile::TempDir);

impl Files {
    fn new(names: &[&str]) -> Self {
        let files = Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        for name in names {
            fs::write(files.path(name), content(0, 4 << 20)).unwrap();
        }
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The same by a name of its own, also when this is gone.
    fn config(&self) -> Config {
        Config(self.0.path().to_owned())
    }

    fn serve(self, arguments: &[String]) -> Served {
        let config = format!("--config={}", self.path("config.toml").display());
        Served::start_in(self.0, &[&[config][..], arguments].concat(), None)
    }
}

/// A configuration, and the directory of its disks.
struct Config(PathBuf);

impl Config {
    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Disks by name, file and socket, each with two queues and further lines.
    fn write(&self, disks: &[(&str, &str, &str)], more: &str) {
        let dir = self.0.display();
        let text = disks.iter().map(|(name, file, socket)| {
            format!("[[disk]]\nname = \"{name}\"\nfile = \"{dir}/{file}\"\nsocket = \"{dir}/{socket}\"\nqueues = 2\n{more}\n")
        });
        fs::write(self.path("config.toml"), text.collect::<String>()).unwrap();
    }

    fn argument(&self, name: &str) -> String {
        let dir = self.0.display();
        format!("{dir}/{name}.raw,socket={dir}/{name}.sock,queues=2")
    }

    /// Has a guest write to one file, and looks that it goes to no other.
    fn write_goes_to(&self, device: &mut Device, sector: u64, file: &str, others: &[&str]) {
        let new = content(4711 + sector, 4096);
        assert_eq!(device.queues[1].write(sector, &new), 0);
        assert_eq!(device.queues[0].read(sector, 4096).unwrap(), new);
        let there = |name: &str| {
            let bytes = fs::read(self.path(name)).unwrap();
            bytes[sector as usize * 512..][..4096] == new
        };
        assert!(there(file), "{file}");
        others
            .iter()
            .for_each(|other| assert!(!there(other), "{other}"));
    }
}

/// A disk stays on the file that it was put on by command, with and without state, on the command line and in a
/// configuration, of which something else is changed: or its guest would go on in a file that it has long left.
#[test]
fn a_disk_stays_on_the_file_that_it_was_put_on() {
    for state in [false, true] {
        println!("with state: {state}");
        let files = Files::new(&["a.raw", "a2.raw", "b.raw", "b2.raw"]);
        let here = files.config();
        here.write(&[("b", "b.raw", "b.sock")], "");
        let mut arguments = vec![here.argument("a")];
        if state {
            arguments.push(format!("--state={}", here.path("state").display()));
        }
        let mut served = files.serve(&arguments);
        let connect = |name| Device::connect(here.path(name), &config()).unwrap();
        let (mut a, mut b) = (connect("a.sock"), connect("b.sock"));
        let on = |served: &Served| {
            for (name, file) in [("a", "a2.raw"), ("b", "b2.raw")] {
                let disk = served.disk(name);
                assert_eq!(disk["file"], here.path(file).to_str().unwrap(), "{disk}");
            }
        };
        served.replace("a", &here.path("a2.raw"));
        served.replace("b", &here.path("b2.raw"));
        on(&served);
        for round in 0..3 {
            // From the second time on, it was the process before that has inherited it.
            if round == 1 {
                here.write(&[("b", "b.raw", "b.sock")], "iops = 77");
            }
            served.upgrade(&[]);
            on(&served);
            here.write_goes_to(&mut a, 8 + 8 * round, "a2.raw", &["a.raw"]);
            here.write_goes_to(&mut b, 8 + 8 * round, "b2.raw", &["b.raw"]);
        }
        assert_eq!(served.disk("b")["limits"]["iops"], 77);
        // Nor does a reload afterwards think otherwise.
        here.write(&[("b", "b.raw", "b.sock")], "iops = 78");
        let reloaded = served.ringdisk(&["reload"]);
        assert!(reloaded.status.success(), "{reloaded:?}");
        on(&served);
        assert_eq!(served.disk("b")["limits"]["iops"], 78);
        served.end();
    }
}

/// Where the configuration says another file by now, the disk is put there as by a reload: when it has been taken over.
#[test]
fn a_disk_is_put_on_the_file_that_is_written_down_since() {
    let files = Files::new(&["a.raw", "b.raw", "c.raw"]);
    let here = files.config();
    here.write(&[("disk", "a.raw", "disk.sock")], "");
    let state = format!("--state={}", here.path("state").display());
    let mut served = files.serve(&[state]);
    let mut device = Device::connect(here.path("disk.sock"), &config()).unwrap();
    served.replace("disk", &here.path("b.raw"));
    here.write(&[("disk", "c.raw", "disk.sock")], "iops = 77");
    served.upgrade(&[]);
    let start = Instant::now();
    let is_there =
        |served: &Served| served.disk("disk")["file"] == here.path("c.raw").to_str().unwrap();
    while !is_there(&served) {
        assert!(start.elapsed() < HANG, "{}", served.disk("disk"));
        thread::sleep(Duration::from_millis(10));
    }
    here.write_goes_to(&mut device, 8, "c.raw", &["a.raw", "b.raw"]);
    // It stays there, and that is no longer news.
    served.upgrade(&[]);
    assert!(is_there(&served));
    assert_eq!(served.disk("disk")["limits"]["iops"], 77);
    here.write_goes_to(&mut device, 16, "c.raw", &["a.raw", "b.raw"]);
    served.end();
}

/// A guest is never handed to a process that would serve it another file: under the same path, or at the socket of a
/// disk that has another name by now.
#[test]
fn no_guest_is_put_on_another_file() {
    let files = Files::new(&["a.raw", "b.raw"]);
    let here = files.config();
    let disks = [("a", "a.raw", "a.sock"), ("b", "b.raw", "b.sock")];
    here.write(&disks, "");
    let mut served = files.serve(&[]);
    let connect = |name| Device::connect(here.path(name), &config()).unwrap();
    let (mut a, mut b) = (connect("a.sock"), connect("b.sock"));
    let log = |served: &Served, words: &str| {
        served.first.logged(&[words]);
    };

    here.write(&[("a", "a.raw", "b.sock"), ("b", "b.raw", "a.sock")], "");
    served.fail(Path::new(BINARY), "cannot serve");
    log(
        &served,
        "disk 'a' is on another file than the disk that is served at",
    );
    here.write(&[("b", "a.raw", "c.sock"), ("c", "b.raw", "a.sock")], "");
    served.fail(Path::new(BINARY), "cannot serve");
    here.write(&disks, "");

    fs::rename(here.path("a.raw"), here.path("old.raw")).unwrap();
    fs::copy(here.path("old.raw"), here.path("a.raw")).unwrap();
    served.fail(Path::new(BINARY), "cannot serve");
    here.write_goes_to(&mut a, 8, "old.raw", &["a.raw"]);
    fs::rename(here.path("old.raw"), here.path("a.raw")).unwrap();

    // Another name alone is no other file.
    here.write(&[("x", "a.raw", "a.sock"), ("b", "b.raw", "b.sock")], "");
    served.upgrade(&[]);
    here.write_goes_to(&mut a, 16, "a.raw", &["b.raw"]);
    here.write_goes_to(&mut b, 24, "b.raw", &["a.raw"]);
    served.end();
}

/// A new process that gives up when it has opened an image leaves that, and its journal, as they are.
#[test]
fn an_image_is_not_closed_by_who_gives_up() {
    let test = "an_image_is_not_closed_by_who_gives_up";
    if !testkit::qemu_img::is_there(test) {
        return;
    }
    let files = Files::new(&["b.raw"]);
    let here = files.config();
    testkit::qemu_img::img(&here.0, "create -q -f qcow2 a.qcow2 64M");
    let disks = [("a", "a.qcow2", "a.sock"), ("b", "b.raw", "b.sock")];
    here.write(&disks, "");
    let served = files.serve(&[]);
    let mut device = Device::connect(here.path("a.sock"), &config()).unwrap();
    // To clusters that have to be taken, and not flushed.
    let write = |device: &mut Device, sector| {
        assert_eq!(device.queues[0].write(sector, &content(sector, 4096)), 0);
    };
    write(&mut device, 0);
    here.write(&[("a", "a.qcow2", "b.sock"), ("b", "b.raw", "a.sock")], "");
    served.fail(Path::new(BINARY), "cannot serve");
    write(&mut device, 4096);
    here.write(&disks, "");
    let pid = Pid::from_raw(served.pid as i32).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    let log = served.first.log();
    assert!(!log.contains("panicked"), "{log}");
    let arguments = [format!("--config={}", here.path("config.toml").display())];
    let _again = support::serve_all(&arguments);
    let mut device = Device::connect(here.path("a.sock"), &config()).unwrap();
    for sector in [0, 4096] {
        let there = device.queues[1].read(sector, 4096).unwrap();
        assert!(there == content(sector, 4096), "sector {sector}");
    }
}

/// A message: the length of the text, no descriptors, the text.
fn say(text: &str) -> String {
    let zeroes = r"\000".repeat(15);
    format!(r#"printf '\{:03o}{zeroes}{text}' >&0"#, text.len())
}

/// Takes a message, of up to 32 KiB, and loses its descriptors.
const HEAR: &str = "dd bs=32768 count=1 <&0 >/dev/null 2>&1";

#[test]
fn a_failed_hand_over_leaves_the_old_one_serving() {
    let (mut image, raw) = (Disk::new(), Disk::new());
    if !qcow2(&mut image) {
        println!("skipped: a_failed_hand_over_leaves_the_old_one_serving: there is no qemu-img");
        return;
    }
    let options = "queues=2,queue-size=64";
    let mut served = Served::start(&[image.argument(options), raw.argument(options)]);
    let mut random = Random(seed());
    let mut devices = vec![];
    for (disk, held) in [(&image, Held::Zeroes), (&raw, Held::Content)] {
        let config = DeviceConfig {
            inflight: held == Held::Content,
            ..config()
        };
        let device = Device::connect(&disk.socket, &config).unwrap();
        let loads = Load::all(&device, 512, held, held == Held::Zeroes);
        devices.push((device, loads));
    }
    let hello = say(r#"{"protocol":2,"version":"x"}"#);
    let other = say(r#"{"protocol":99,"version":"x"}"#);
    let prepared = say(r#""Prepared""#);
    let serving = say(r#""Serving""#);
    let [too_late, tried] = ["too-late", "tried"].map(|name| served.dir.path().join(name));
    let gone_file = served.dir.path().join("gone");
    let programs = [
        ("exits", "exit 1".to_owned(), "has not come up"),
        ("other", format!("{other}; exec sleep 1000"), "version 99"),
        (
            "noise",
            "printf xyz >&0; exec sleep 1000".into(),
            "has not come up",
        ),
        (
            "dies",
            format!("{hello}; exit 3"),
            "cannot serve|be handed over",
        ),
        ("hangs", format!("{hello}; exec sleep 1000"), "cannot serve"),
        (
            "killed",
            format!("{hello}; {HEAR}; kill -9 $$"),
            "cannot serve",
        ),
        (
            "early",
            format!("{hello}; {HEAR}; {prepared}; exit 0"),
            "as it took over",
        ),
        (
            "taking",
            format!("{hello}; {HEAR}; {prepared}; {HEAR}; kill -9 $$"),
            "as it took over",
        ),
        (
            "late",
            format!(
                "{hello}; {HEAR}; {prepared}; {HEAR}; exec 3<&0
                 (exec <&3; sleep 6; {serving} && touch {}; touch {}) &
                 wait",
                too_late.display(),
                tried.display()
            ),
            "as it took over",
        ),
        (
            "else",
            format!("{hello}; {HEAR}; {hello}; exec sleep 1000"),
            "cannot serve",
        ),
    ];
    let longest = under_load(&mut devices, &mut random, || {
        for (name, text, words) in programs {
            served.fail(&served.script(name, &text), words);
        }
        // The right program, for a disk that cannot be opened any more.
        fs::rename(&raw.file, &gone_file).unwrap();
        served.fail(Path::new(BINARY), "cannot serve");
        fs::rename(&gone_file, &raw.file).unwrap();
        served.fail(Path::new("/nonexistent/ringdisk"), "cannot be started");
    });
    println!("the longest request took {longest:?}");
    assert!(served.first.is_running());
    // Who comes when nobody waits any more knows it, and does not serve.
    until_there(&tried);
    assert!(!too_late.exists());
    // After all that, it can be done.
    under_load(&mut devices, &mut random, || {
        let pause = served.upgrade(&[]);
        println!("guests waited {pause:?}");
    });
    for (device, loads) in &mut devices {
        Load::finish(loads, device);
    }
    served.end();
    devices[1]
        .1
        .iter()
        .for_each(|load| load.verify(&raw.file).unwrap());
}

/// A guest that is being moved to another machine: what the device writes to its memory is marked.
struct Moving {
    device: Device,
    log: Memory,
    event: OwnedFd,
}

impl Moving {
    fn start(disk: &Disk, packed: bool) -> Self {
        let config = DeviceConfig { packed, ..config() };
        let mut device = Device::connect(&disk.socket, &config).unwrap();
        let end = device.memory.regions()[Device::HIGH].end();
        // A bit for each page.
        let log = Memory::new(&[(0, end.div_ceil(8 * 4096).next_multiple_of(4096))]).unwrap();
        let event = eventfd().unwrap();
        let frontend = &mut device.frontend;
        frontend.set_log(&log.regions()[0], event.as_fd()).unwrap();
        let features = device.features | F_LOG_ALL;
        device.frontend.set_features(features).unwrap();
        Self { device, log, event }
    }

    fn is_marked(&self, guest: u64) -> bool {
        let page = guest / 4096;
        self.log.read(page / 8, 1)[0] >> (page % 8) & 1 != 0
    }

    fn clear(&self) {
        let bytes = self.log.regions()[0].size as usize;
        self.log.write(0, &vec![0; bytes]);
    }

    /// Has the device write to memory, and looks for all its marks.
    fn round(&mut self) {
        self.clear();
        for queue in &mut self.device.queues {
            let slots: Vec<_> = (0..queue.slots()).collect();
            for &slot in &slots {
                queue.prepare(slot, Op::Read, u64::from(slot) * 16, 8192);
            }
            queue.submit(&slots);
        }
        for queue in &mut self.device.queues {
            let done = queue.finish(usize::from(queue.slots()));
            assert!(done.iter().all(|(_, status)| *status == 0), "{done:?}");
        }
        for queue in &self.device.queues {
            for slot in 0..queue.slots() {
                let at = queue.buffer(slot);
                let marked = [at, at + 4096].map(|at| self.is_marked(at));
                assert_eq!(marked, [true; 2], "queue {}, slot {slot}", queue.index);
            }
            // The ring is marked after the guest has been shown what it says.
            let ring = queue.ring.guest_addresses();
            let written = match queue.ring.is_packed() {
                true => ring.desc,
                false => ring.used,
            };
            let start = Instant::now();
            while !self.is_marked(written) {
                assert!(start.elapsed() < HANG, "ring {} is not marked", queue.index);
                thread::sleep(Duration::from_micros(100));
            }
        }
        assert!(eventfd_wait(&self.event, Some(HANG)).unwrap());
    }
}

/// In the midst of a live migration, the marks go on, and with them the migration.
#[test]
fn a_guest_that_is_being_moved_goes_on() {
    let disks = [Disk::new(), Disk::new()];
    let options = "queues=2,queue-size=64";
    let mut served = Served::start(&disks.each_ref().map(|disk| disk.argument(options)));
    let mut guests = [
        Moving::start(&disks[0], false),
        Moving::start(&disks[1], true),
    ];
    let taking = served.script(
        "taking",
        &format!(
            "{}; {HEAR}; {}; {HEAR}; kill -9 $$",
            say(r#"{"protocol":2,"version":"x"}"#),
            say(r#""Prepared""#)
        ),
    );
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _stop = Stop(&done);
            for _ in 0..2 {
                served.fail(&taking, "as it took over");
                served.upgrade(&[]);
            }
        });
        while !done.load(Ordering::Relaxed) {
            guests.iter_mut().for_each(Moving::round);
        }
    });
    for guest in &mut guests {
        guest.round();
        // It has moved, or has not: nothing is marked any more.
        let features = guest.device.features;
        guest.device.frontend.set_features(features).unwrap();
        guest.clear();
        assert!(guest.device.queues[1].read(0, 4096).is_ok());
        let bytes = guest.log.regions()[0].size as usize;
        assert!(guest.log.read(0, bytes).iter().all(|byte| *byte == 0));
    }
    served.end();
}

/// `ringdisk reload --upgrade`, as the service does it: the same program rereads the configuration, another takes over.
#[test]
fn a_reload_takes_up_a_new_program() {
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
    gone(served.pid);
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
    // What was changed meanwhile is known to the next one, and to the one after a kill.
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

/// Who has become somebody else hands over all the same, and the next one is in the same sandbox.
#[test]
fn a_user_of_its_own_hands_over() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: a_user_of_its_own_hands_over: needs root");
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
        // It could write that down.
        let list = served.ringdisk(&["list", "--json"]);
        let list = String::from_utf8(list.stdout).unwrap();
        assert!(list.contains(&format!("{}", 7000 + round)), "{list}");
    }
    served.end();
}

/// A disk that is locked only while a VM runs on it stays locked, or unlocked, as it is.
#[test]
fn a_disk_that_may_move_stays_as_it_is() {
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
        return println!("skipped: a_disk_that_may_move_stays_as_it_is: there is no qemu-io");
    }
    for _ in 0..2 {
        served.upgrade(&[]);
        assert_eq!(write(&running), Some(false), "its lock is lost");
        assert_eq!(write(&idle), Some(true), "it is locked");
        assert!(device.queues[1].read(8, 4096).is_ok());
    }
    let mut other = Device::connect(&idle.socket, &config()).unwrap();
    assert!(other.queues[0].read(0, 4096).is_ok());
    assert_eq!(write(&idle), Some(false));
    served.end();
}

/// What was left to another host when it was taken over is no reason not to lock what has its name later.
#[test]
fn a_name_that_was_away_is_locked_again() {
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
    // Which ends by itself only if it must not have the file.
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
        "its lock is missing: {text}"
    );
    served.end();
}

/// What a limit holds back is let go, not waited for.
#[test]
fn a_limit_holds_nothing_up() {
    let disk = Disk::new();
    let mut served = Served::start(&[disk.argument("queues=2,queue-size=64,iops=1")]);
    let mut random = Random(seed());
    let device = Device::connect(&disk.socket, &config()).unwrap();
    let loads = Load::all(&device, 512, Held::Content, false);
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

/// A front-end that is in the middle of a message keeps nobody from an upgrade; it alone is cut off.
#[test]
fn half_a_message_holds_nothing_up() {
    use std::io::Write;
    let (disk, other) = (Disk::new(), Disk::new());
    let mut served = Served::start(&[disk.argument("queues=2"), other.argument("queues=2")]);
    let mut half = std::os::unix::net::UnixStream::connect(&disk.socket).unwrap();
    half.write_all(&[1, 0, 0, 0, 1, 0]).unwrap();
    let mut device = Device::connect(&other.socket, &config()).unwrap();
    served.upgrade(&[]);
    assert!(device.queues[1].read(0, 4096).is_ok());
    assert!(Device::connect(&disk.socket, &config()).is_ok());
    served.end();
}

/// Who is told to stop while another process is to take over stops, and leaves nobody behind, or it is the other that
/// serves, with all that belongs to it.
#[test]
fn a_stop_meanwhile_is_a_stop() {
    let mut random = Random(seed());
    let (mut stopped, mut handed) = (0, 0);
    for round in 0..14 {
        let disk = Disk::new();
        let mut served = Served::start(&[disk.argument("queues=2")]);
        let upgrade = Command::new(BINARY)
            .args(["upgrade", "--json", "--control"])
            .arg(&served.control)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        if round % 2 == 0 {
            served.first.logged(&["handing over to process"]);
        }
        thread::sleep(Duration::from_micros(
            random.below(60_000 >> (5 * (1 - round % 2))),
        ));
        // It may be gone.
        let pid = Pid::from_raw(served.pid as i32).unwrap();
        let _ = kill_process(pid, Signal::TERM);
        let output = upgrade.wait_with_output().unwrap();
        gone(served.pid);
        let left = ["control.qmp", "control.qmp.upgrade"].map(|name| served.dir.path().join(name));
        let mut left = left.iter().chain([&disk.socket]);
        match output.status.success() {
            true => {
                assert!(left.all(|path| path.exists()), "{}", served.first.log());
                let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
                served.pid = reply["pid"].as_u64().unwrap() as u32;
                assert_eq!(served.list(), 0);
                served.end();
                handed += 1;
            }
            false => {
                assert!(!left.any(|path| path.exists()), "{}", served.first.log());
                let log = served.first.log();
                if let Some((_, pid)) = log.split_once("handing over to process ") {
                    gone(pid.split(',').next().unwrap().parse().unwrap());
                }
                stopped += 1;
            }
        }
    }
    println!("{stopped} stopped, {handed} handed over");
    assert!(stopped > 0);
}

/// A guest that would not connect again notices a pause, and no more.
#[test]
fn a_real_guest_goes_on() {
    let test = "a_real_guest_goes_on";
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
        &vm::writers("upgrade", 4, 1),
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
