//! Concurrent operations for a long time: eight disks under a load that verifies everything it reads, while disks are
//! attached, detached, resized, limited and backed up, images get snapshots, front-ends reconnect, and the process is killed
//! and upgraded.
//!
//! For one minute, or `RINGDISK_SOAK_SECONDS` (`cargo xtask soak`).

mod backup;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{self, content, seed};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use testkit::driver::HANG;
use testkit::load::BlockContent;
use testkit::qemu_img;
use testkit::random::Random;
use testkit::server::{Server, wait_for_exit};

use super::driver::{Driver, Guest, Order, QUEUES};
use super::program;

/// Blocks in the load of a queue.
const BLOCKS: usize = 512;
/// Initial size of a disk, and its maximum.
const SIZE: u64 = 16 << 20;
const SIZE_MAX: u64 = 64 << 20;
/// How much the memory of a process may grow after all its disks have been in use for a moment.
const GROWTH_MAX_KIB: u64 = 64 << 10;

/// The disks: how each is made, its initial content, its options, and whether its rings are packed.
const DISKS: [(Make, BlockContent, &str, bool); 8] = [
    (Make::Raw, BlockContent::Pattern, "", false),
    (Make::Raw, BlockContent::Pattern, ",cache=writeback", false),
    (Make::Raw, BlockContent::Pattern, ",aio=native", true),
    (
        Make::Raw,
        BlockContent::Pattern,
        ",aio=threads,cache=writethrough",
        false,
    ),
    (
        Make::Qcow2("cluster_size=4k"),
        BlockContent::Zeroes,
        "",
        false,
    ),
    (Make::Overlay, BlockContent::Pattern, "", false),
    (
        Make::Qcow2("extended_l2=on"),
        BlockContent::Zeroes,
        ",discard=ignore",
        true,
    ),
    (
        Make::Qcow2("cluster_size=64k,lazy_refcounts=on"),
        BlockContent::Zeroes,
        ",cache=writethrough",
        false,
    ),
];

#[derive(Clone, Copy)]
enum Make {
    Raw,
    /// With these options of qemu-img.
    Qcow2(&'static str),
    /// A qcow2 image on a raw file that has all the content.
    Overlay,
}

/// A disk and its guest.
struct Disk {
    name: String,
    file: PathBuf,
    argument: String,
    qcow2: bool,
    size: u64,
    snapshots: Vec<u32>,
    /// It was killed with internal snapshots since its last backup: its bitmap may be inconsistent.
    may_lack_bitmap: bool,
    /// The process was killed: images may have leaked clusters.
    killed: bool,
    driver: Driver,
}

/// Resources of a process while none of its disks is in use.
#[derive(Debug)]
struct Resources {
    descriptors: usize,
    threads: usize,
    memory_kib: u64,
}

struct Soak {
    dir: TempDir,
    control: PathBuf,
    arguments: Vec<String>,
    disks: Vec<Disk>,
    /// The first process; its log also has the lines of those that took over.
    first: Server,
    pid: u32,
    /// The resources of this process at its start.
    baseline: Option<Resources>,
    random: Random,
    counts: BTreeMap<&'static str, usize>,
}

impl Drop for Soak {
    fn drop(&mut self) {
        // A process that took over is not a child.
        if let Some(pid) = Pid::from_raw(self.pid as i32) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

impl Soak {
    fn start(seed: u64) -> Self {
        // Not in /tmp, which may be a tmpfs: the test needs O_DIRECT and holes of a real file system.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut random = Random(seed);
        let disks: Vec<_> = DISKS
            .iter()
            .enumerate()
            .map(|(i, disk)| make(dir.path(), i, disk, &mut random))
            .collect();
        let control = dir.path().join("control.qmp");
        let mut arguments = vec![
            "--iothreads=2".to_owned(),
            format!("--control={}", control.display()),
            format!("--state={}", dir.path().join("state").display()),
            format!("--nbd={}", dir.path().join("nbd.sock").display()),
            format!("--fleece={}", dir.path().display()),
        ];
        arguments.extend(disks.iter().map(|disk| disk.argument.clone()));
        let first = serve(dir.path(), &arguments);
        Self {
            pid: first.pid(),
            dir,
            control,
            arguments,
            disks,
            first,
            baseline: None,
            random,
            counts: BTreeMap::new(),
        }
    }

    /// Runs `ringdisk ARGUMENTS`, which must succeed; returns the output.
    fn ringdisk(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(program());
        command.args(arguments).arg("--control").arg(&self.control);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn list(&self) -> Vec<Value> {
        serde_json::from_str(&self.ringdisk(&["list", "--json"])).unwrap()
    }

    /// Waits until a disk, or without a name any disk, has no connection.
    fn wait_for_disconnect(&self, name: &str) {
        let start = Instant::now();
        let busy =
            |disk: &Value| disk["connected"] == true && (name.is_empty() || disk["name"] == name);
        while self.list().iter().any(busy) {
            assert!(start.elapsed() < HANG, "{:?}", self.list());
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn all(&mut self, order: impl Fn() -> Order) {
        self.disks.iter().for_each(|disk| disk.driver.send(order()));
        self.disks.iter_mut().for_each(|disk| disk.driver.wait());
    }

    /// Nothing leaks: with all disks idle, a process has the resources of its start.
    fn compare(&mut self) {
        self.all(|| Order::Disconnect);
        self.wait_for_disconnect("");
        let start = Instant::now();
        let read = || used(self.pid);
        let Some(baseline) = &self.baseline else {
            self.baseline = Some(read());
            return self.all(|| Order::Connect);
        };
        let same = |now: &Resources| {
            now.descriptors <= baseline.descriptors
                && now.threads <= baseline.threads
                && now.memory_kib <= baseline.memory_kib + GROWTH_MAX_KIB
        };
        // Threads of connections end a moment later.
        let mut now = read();
        while !same(&now) {
            assert!(
                start.elapsed() < HANG,
                "something leaks: {now:?}, and when it was baseline {baseline:?}: {:?}",
                descriptors(self.pid)
            );
            thread::sleep(Duration::from_millis(20));
            now = read();
        }
        self.count("comparison");
        self.all(|| Order::Connect);
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Does one random operation.
    fn step(&mut self) {
        let i = self.random.below(self.disks.len() as u64) as usize;
        match self.random.below(100) {
            0..20 => self.limit(i),
            20..30 => self.backup(),
            30..45 => self.resize(i),
            45..60 => {
                self.count("reconnection");
                self.disks[i].driver.order(Order::Reconnect);
            }
            60..80 => self.detach(i),
            80..86 => self.compare(),
            86..93 => self.kill(),
            _ => self.upgrade(),
        }
    }

    fn limit(&mut self, i: usize) {
        self.count("limit");
        let iops = format!("iops={}", 200 + self.random.below(20_000));
        let bytes = format!("bps-wr={}M", 1 + self.random.below(50));
        let limits: &[&str] = match self.random.below(4) {
            0 => &[&iops],
            1 => &[&iops, &bytes],
            _ => &[],
        };
        let name = &self.disks[i].name;
        self.ringdisk(&[&["throttle", name], limits].concat());
    }

    fn resize(&mut self, i: usize) {
        let grown = self.disks[i].size + ((1 + self.random.below(8)) << 20);
        // QEMU refuses this too, with snapshots in some versions of the format.
        if grown > SIZE_MAX || !self.disks[i].snapshots.is_empty() {
            return;
        }
        self.count("resize");
        let name = self.disks[i].name.clone();
        self.ringdisk(&["resize", &name, &grown.to_string()]);
        self.disks[i].size = grown;
        assert_eq!(self.listed(&name).expect("it is served")["size"], grown);
    }

    fn listed(&self, name: &str) -> Option<Value> {
        self.list().into_iter().find(|disk| disk["name"] == name)
    }

    /// Detaches a disk, inspects its file, and attaches it again.
    fn detach(&mut self, i: usize) {
        self.count("detach");
        self.disks[i].driver.order(Order::Disconnect);
        let name = self.disks[i].name.clone();
        self.wait_for_disconnect(&name);
        self.ringdisk(&["detach", &name]);
        match self.random.below(8) {
            0 => self.kill(),
            1 => self.upgrade(),
            _ => {}
        }
        assert!(self.listed(&name).is_none(), "it was detached");
        self.inspect(i);
        self.ringdisk(&["attach", &self.disks[i].argument.clone()]);
        let size = self.disks[i].size;
        assert_eq!(self.listed(&name).expect("it is served")["size"], size);
        self.disks[i].driver.order(Order::Connect);
    }

    /// Checks a file that is not served with QEMU's tools, and may create or delete a snapshot.
    fn inspect(&mut self, i: usize) {
        let (directory, disk) = (self.dir.path(), &mut self.disks[i]);
        let file = disk.file.file_name().and_then(|name| name.to_str());
        let file = file.expect("this test has named it");
        if !disk.qcow2 {
            return disk.driver.order(Order::Verify(disk.file.clone()));
        }
        qemu_img::check(directory, file, disk.killed);
        // QEMU's repair removes the snapshots of an image that has bitmaps.
        if disk.snapshots.is_empty() && std::mem::take(&mut disk.killed) {
            qemu_img::img(directory, &format!("check -q -f qcow2 -r leaks {file}"));
        }
        let raw = directory.join("converted.raw");
        qemu_img::img(
            directory,
            &format!("convert -f qcow2 -O raw {file} converted.raw"),
        );
        disk.driver.order(Order::Verify(raw.clone()));
        fs::remove_file(&raw).unwrap();
        let next = disk.snapshots.last().map_or(0, |last| last + 1);
        match self.random.below(3) {
            0 if disk.snapshots.len() < 3 => {
                qemu_img::img(directory, &format!("snapshot -c s{next} {file}"));
                disk.snapshots.push(next);
                self.journal_changes();
                self.count("snapshot");
            }
            1 if !disk.snapshots.is_empty() => {
                let oldest = disk.snapshots.remove(0);
                qemu_img::img(directory, &format!("snapshot -d s{oldest} {file}"));
                self.journal_changes();
                self.count("snapshot deletion");
            }
            _ => {}
        }
    }

    /// An image with internal snapshots has no journal: with its last snapshot, the process gains a descriptor.
    fn journal_changes(&mut self) {
        self.baseline = None;
    }

    /// Kills the process and starts it with the same arguments. Nothing may have changed.
    fn kill(&mut self) {
        self.count("kill");
        let before = state(&self.list());
        kill_process(Pid::from_raw(self.pid as i32).unwrap(), Signal::KILL).unwrap();
        wait_for_exit(self.pid);
        self.first = serve(self.dir.path(), &self.arguments);
        for disk in &mut self.disks {
            disk.killed = true;
            disk.may_lack_bitmap |= !disk.snapshots.is_empty();
        }
        self.pid = self.first.pid();
        self.baseline = None;
        self.all(|| Order::Reconnect);
        assert_eq!(state(&self.list()), before, "after a kill");
    }

    /// Another process takes over.
    fn upgrade(&mut self) {
        let before = state(&self.list());
        let reply: Value = serde_json::from_str(&self.ringdisk(&["upgrade", "--json"])).unwrap();
        let old = self.pid;
        self.pid = reply["pid"].as_u64().unwrap() as u32;
        assert_ne!(self.pid, old);
        wait_for_exit(old);
        self.count("upgrade");
        self.baseline = None;
        assert_eq!(state(&self.list()), before, "after an upgrade");
    }

    /// Shuts down and compares every byte.
    fn end(mut self) -> u64 {
        self.compare();
        self.compare();
        self.all(|| Order::Disconnect);
        kill_process(Pid::from_raw(self.pid as i32).unwrap(), Signal::TERM).unwrap();
        wait_for_exit(self.pid);
        for i in 0..self.disks.len() {
            self.inspect(i);
        }
        let log = self.first.log();
        for bad in ["panicked", support::QUEUE_RETIRED, "is not used"] {
            assert!(!log.contains(bad), "{log}");
        }
        let drivers = std::mem::take(&mut self.disks);
        drivers.into_iter().map(|disk| disk.driver.end()).sum()
    }
}

/// Starts a ringdisk whose journals and other files are in this directory.
fn serve(directory: &Path, arguments: &[String]) -> Server {
    let mut command = Command::new(program());
    command.args(["serve", "--json"]).args(arguments);
    command.env("RUNTIME_DIRECTORY", directory);
    Server::ringdisk_command(command).unwrap()
}

/// Creates a disk.
fn make(
    directory: &Path,
    i: usize,
    (make, held, options, packed): &(Make, BlockContent, &str, bool),
    random: &mut Random,
) -> Disk {
    let raw = |name: &str| {
        let path = directory.join(name);
        fs::write(&path, content(0, SIZE as usize)).unwrap();
        path
    };
    let image = |name: &str, options: &str, rest: &str| {
        qemu_img::img(
            directory,
            &format!("create -q -f qcow2 -o {options} {name} {rest}"),
        );
        directory.join(name)
    };
    let name = format!("d{i}");
    let file = match make {
        Make::Raw => raw(&format!("{name}.raw")),
        Make::Qcow2(options) => image(&format!("{name}.qcow2"), options, &SIZE.to_string()),
        Make::Overlay => {
            raw("base.raw");
            image(
                &format!("{name}.qcow2"),
                "cluster_size=16k",
                "-b base.raw -F raw",
            )
        }
    };
    let socket = directory.join(format!("{name}.sock"));
    Disk {
        argument: format!(
            "file={},socket={},queues={QUEUES},queue-size=64{options}",
            file.display(),
            socket.display()
        ),
        name,
        file,
        qcow2: !matches!(make, Make::Raw),
        size: SIZE,
        snapshots: Vec::new(),
        may_lack_bitmap: false,
        killed: false,
        driver: Driver::start(Guest {
            socket,
            held: *held,
            packed: *packed,
            seed: random.below(u64::MAX),
            blocks: BLOCKS,
            pause_us: 2000,
        }),
    }
}

/// What a kill and an upgrade must preserve.
fn state(list: &[Value]) -> BTreeMap<String, [Value; 3]> {
    let of = |disk: &Value| ["size", "limits", "file"].map(|key| disk[key].clone());
    let named = list.iter();
    named
        .map(|disk| (disk["name"].to_string(), of(disk)))
        .collect()
}

fn descriptors(pid: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let mut links: Vec<_> = links
        .map(|link| link.to_string_lossy().into_owned())
        .collect();
    links.sort();
    links
}

fn used(pid: u32) -> Resources {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let number = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        let word = line.and_then(|rest| rest.split_whitespace().next());
        word.and_then(|word| word.parse().ok())
            .unwrap_or_else(|| panic!("no {key} in {status}"))
    };
    Resources {
        descriptors: descriptors(pid).len(),
        threads: number("Threads:") as usize,
        memory_kib: number("VmRSS:"),
    }
}

#[test]
fn all_at_once() {
    if !qemu_img::is_there("all_at_once") {
        return;
    }
    if Command::new("nbdcopy").arg("--version").output().is_err() {
        return println!("skipped: all_at_once: there is no nbdcopy");
    }
    let given = std::env::var("RINGDISK_SOAK_SECONDS");
    let length = Duration::from_secs(given.map_or(60, |seconds| seconds.parse().unwrap()));
    let mut soak = Soak::start(seed());
    soak.all(|| Order::Connect);
    let start = Instant::now();
    let mut told = start;
    while start.elapsed() < length {
        // Long enough for requests to be in flight.
        thread::sleep(Duration::from_micros(soak.random.below(200_000)));
        if soak.baseline.is_none() {
            soak.compare();
        }
        soak.step();
        if told.elapsed() > Duration::from_secs(30) {
            told = Instant::now();
            let left = length.saturating_sub(start.elapsed()).as_secs();
            println!("{left} s to go: {:?}", soak.counts);
        }
    }
    let counts = soak.counts.clone();
    println!("{} requests, {counts:?}", soak.end());
}
