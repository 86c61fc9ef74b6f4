//! NBD exports and backups of images: clients see which objects exist, and a backup is what an image was at one moment.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use testkit::ceph::POOL;
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::random::Random;
use testkit::server::Server;
use testkit::vm::find_program;

use super::cluster::{CephVersion, Cluster, ringdisk};
use crate::backup::moment::{NUMBERED, check};
use crate::backup::{DISK_BYTES, numbers, write};

on_each_release!(
    backup_is_of_one_moment,
    backups_begin_before_the_first_write_after_a_restart,
    backups_of_an_image_and_a_file_are_of_one_moment,
    clones_and_images_without_a_map_are_copied_whole,
    holes_are_told_and_not_read,
    increments_continue_after_a_restart,
);

pub(super) const OK: u8 = 0;
pub(super) const MIB: u64 = 1 << 20;
/// Bytes of each image, in objects of 4 MiB.
pub(super) const BYTES: u64 = 128 * MIB;

/// A served image, and its NBD server.
pub(super) struct Served {
    pub(super) cluster: Cluster,
    pub(super) server: Server,
}

impl Served {
    /// `None` if there is no Ceph, or no client.
    pub(super) fn new(version: CephVersion, test: &str, name: &str) -> Option<Self> {
        for program in ["nbdinfo", "nbdcopy", "qemu-img"] {
            if find_program(program).is_none() {
                println!("skipped: {test}: there is no {program}");
                return None;
            }
        }
        let mut cluster = Cluster::get(version, test)?;
        cluster.ceph().create(name, BYTES / MIB).unwrap();
        Some(Self::of(cluster, name))
    }

    pub(super) fn of(cluster: Cluster, name: &str) -> Self {
        Self::with(cluster, name, "none")
    }

    pub(super) fn with(mut cluster: Cluster, name: &str, cache: &str) -> Self {
        let disk = cluster.disk(name, &format!("name={name},cache={cache}"));
        Self::start(cluster, &[&disk])
    }

    pub(super) fn start(cluster: Cluster, disks: &[&str]) -> Self {
        let control = cluster.control().display().to_string();
        let nbd = cluster.folder.path().join("nbd.sock").display().to_string();
        let state = cluster.folder.path().join("state");
        fs::create_dir_all(&state).unwrap();
        let state = ["--state", &state.display().to_string()];
        let arguments = ["--control", &control, "--nbd", &nbd];
        let server = cluster.start(&[&arguments[..], &state, disks].concat());
        Self { cluster, server }
    }

    /// Serves another image instead.
    pub(super) fn another(self, name: &str) -> Self {
        let Self { cluster, server } = self;
        drop(server);
        Self::of(cluster, name)
    }

    pub(super) fn connect(&self) -> Device {
        Device::connect(self.server.socket(), &DeviceConfig::default()).unwrap()
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.cluster.folder.path().join(name)
    }

    pub(super) fn uri(&self, export: &str) -> String {
        let socket = self.path("nbd.sock");
        format!("nbd+unix:///{export}?socket={}", socket.display())
    }

    /// Runs a subcommand that must succeed.
    #[track_caller]
    pub(super) fn done(&self, arguments: &[&str]) {
        let control = self.cluster.control().display().to_string();
        let output = ringdisk(&[arguments, &["--control", &control]].concat());
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }

    /// The extents of a context: offset, length, type.
    #[track_caller]
    pub(super) fn map(&self, export: &str, context: &str) -> Vec<(u64, u64, u64)> {
        let map = format!("--map={context}");
        let output = run("nbdinfo", &["--json", &map, &self.uri(export)]);
        let extents: Value = serde_json::from_str(&output).unwrap();
        let number = |extent: &Value, key: &str| extent[key].as_u64().unwrap();
        let extents = extents.as_array().unwrap().iter();
        extents
            .map(|e| (number(e, "offset"), number(e, "length"), number(e, "type")))
            .collect()
    }

    pub(super) fn allocation(&self, export: &str) -> Vec<(u64, u64, u64)> {
        self.map(export, "base:allocation")
    }

    /// What a client copies of an export.
    #[track_caller]
    pub(super) fn copy(&self, export: &str) -> Vec<u8> {
        let to = self.path("copy.raw");
        let _ = fs::remove_file(&to);
        let copy = ["--connections=4", &self.uri(export), to.to_str().unwrap()];
        run("nbdcopy", &copy);
        fs::read(&to).unwrap()
    }

    pub(super) fn rbd(&mut self, arguments: &[&str]) -> String {
        self.cluster.ceph().rbd(arguments).unwrap()
    }

    /// The names of the image's snapshots, as the cluster has them.
    pub(super) fn snapshots(&mut self, name: &str) -> Vec<String> {
        let image = format!("{POOL}/{name}");
        let listed = self.rbd(&["snap", "ls", "--format=json", &image]);
        let listed: Value = serde_json::from_str(&listed).unwrap();
        let names = listed.as_array().unwrap().iter();
        names
            .map(|snap| snap["name"].as_str().unwrap().to_owned())
            .collect()
    }

    /// The number of snapshots in the trash.
    pub(super) fn in_trash(&mut self, name: &str) -> usize {
        let image = format!("{POOL}/{name}");
        let listed = self.rbd(&["snap", "ls", "--all", "--format=json", &image]);
        let listed: Value = serde_json::from_str(&listed).unwrap();
        let all = listed.as_array().unwrap().iter();
        all.filter(|snap| snap["namespace"]["type"] == "trash")
            .count()
    }

    /// Runs a subcommand that must fail, and returns its message.
    #[track_caller]
    pub(super) fn failed(&self, arguments: &[&str]) -> String {
        let control = self.cluster.control().display().to_string();
        let output = ringdisk(&[arguments, &["--control", &control]].concat());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// The only open backup.
    pub(super) fn open_backup(&self) -> Value {
        let control = self.cluster.control().display().to_string();
        let listed = ringdisk(&["backup", "list", "--json", "--control", &control]);
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
        listed[0].clone()
    }
}

#[track_caller]
pub(super) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Objects that have data, by their number, as extents of `base:allocation`.
pub(super) fn objects(numbers: &[u64]) -> Vec<(u64, u64, u64)> {
    let mut extents: Vec<(u64, u64, u64)> = Vec::new();
    for number in 0..BYTES / (4 * MIB) {
        let state = if numbers.contains(&number) { 0 } else { 3 };
        match extents.last_mut() {
            Some(last) if last.2 == state => last.1 += 4 * MIB,
            _ => extents.push((number * 4 * MIB, 4 * MIB, state)),
        }
    }
    extents
}

/// With data in the objects 0, 2 and 31.
pub(super) fn write_some(device: &mut Device) {
    for at in [MIB, 9 * MIB, BYTES - 4096] {
        assert_eq!(device.queues[0].write(at / 512, &[7; 4096]), OK);
    }
}

const FAST_DIFF: &str = "fast-diff";

/// A copy of a sparse image reads only what there is, also if a client begins in the middle of an object.
fn holes_are_told_and_not_read(version: CephVersion) {
    let Some(mut served) = Served::new(version, "holes_are_told_and_not_read", "sparse") else {
        return;
    };
    let mut device = served.connect();
    served.done(&["export", "sparse"]);
    assert_eq!(served.allocation("sparse"), objects(&[]));
    write_some(&mut device);
    assert_eq!(served.allocation("sparse"), objects(&[0, 2, 31]));

    let before = served.cluster.ceph().operations("op_r").unwrap();
    let mut content = vec![0; BYTES as usize];
    for at in [MIB, 9 * MIB, BYTES - 4096] {
        content[at as usize..][..4096].fill(7);
    }
    assert!(served.copy("sparse") == content);
    let reads = served.cluster.ceph().operations("op_r").unwrap() - before;
    assert!(reads < 150, "{reads} reads; without holes, at least 256");

    let uri = served.uri("sparse");
    let from = |start: u64| {
        let start = format!("--start-offset={start}");
        let map = run(
            "qemu-img",
            &["map", "--output=json", "-f", "raw", &start, &uri],
        );
        let map: Value = serde_json::from_str(&map).unwrap();
        (map[0]["length"].as_u64().unwrap(), map[0]["data"] == true)
    };
    assert_eq!(from(5 * MIB), (3 * MIB, false));
    assert_eq!(from(9 * MIB + 4096), (3 * MIB - 4096, true));

    assert_eq!(device.queues[0].run(Op::Discard, 0, 4 << 20), OK);
    assert_eq!(served.allocation("sparse"), objects(&[2, 31]));
    served.done(&["resize", "sparse", "132M"]);
    let grown = served.allocation("sparse");
    assert_eq!(*grown.last().unwrap(), (BYTES, 4 * MIB, 3));
    drop(device);
    // Without the map nothing is known, and all is copied.
    let image = format!("{POOL}/sparse");
    served.rbd(&["feature", "disable", &image, FAST_DIFF]);
    assert_eq!(served.allocation("sparse"), [(0, 132 * MIB, 0)]);
}

/// What a clone shares with its parent is data; nothing is left out of a copy.
fn clones_and_images_without_a_map_are_copied_whole(version: CephVersion) {
    let test = "clones_and_images_without_a_map_are_copied_whole";
    let Some(mut served) = Served::new(version, test, "parent") else {
        return;
    };
    let mut device = served.connect();
    write_some(&mut device);
    drop(device);
    let snap = format!("{POOL}/parent@one");
    served.rbd(&["snap", "create", "--no-progress", &snap]);
    served.rbd(&["snap", "protect", &snap]);
    served.rbd(&["clone", &snap, &format!("{POOL}/child")]);
    served.rbd(&[
        "create",
        "--size=128M",
        "--image-feature=layering",
        &format!("{POOL}/mapless"),
    ]);
    let content = served.cluster.content("parent");

    let mut served = served.another("child");
    let mut device = served.connect();
    served.done(&["export", "child"]);
    if matches!(version, CephVersion::Newer) {
        assert_eq!(served.allocation("child"), objects(&[0, 2, 31]));
    }
    assert!(served.copy("child") == content);
    // In an object of its own, and in one that is in the parent only.
    for at in [20 * MIB, 9 * MIB + 4096] {
        assert_eq!(device.queues[0].write(at / 512, &[8; 4096]), OK);
    }
    if matches!(version, CephVersion::Newer) {
        assert_eq!(served.allocation("child"), objects(&[0, 2, 5, 31]));
    }
    let copied = served.copy("child");
    assert!(copied == served.cluster.content("child") && copied != content);
    drop(device);

    let served = served.another("mapless");
    served.done(&["export", "mapless"]);
    assert_eq!(served.allocation("mapless"), [(0, BYTES, 0)]);
}

/// The guest overwrites, discards and fills while a client copies. The next backup has the changes alone.
fn backup_is_of_one_moment(version: CephVersion) {
    let Some(mut served) = Served::new(version, "backup_is_of_one_moment", "moment") else {
        return;
    };
    let mut device = served.connect();
    write_some(&mut device);
    let before = served.cluster.content("moment");
    served.done(&["backup", "begin", "moment", "--bitmap", "nightly"]);
    let queue = &mut device.queues[0];
    // While the snapshot is being made.
    for at in (0..BYTES).step_by(5 << 18) {
        assert_eq!(queue.write(at / 512, &[9; 4096]), OK);
    }
    assert_eq!(queue.run(Op::Discard, 0, 4 << 20), OK);
    let mut random = Random(11);
    let copied = std::thread::scope(|scope| {
        let copy = scope.spawn(|| served.copy("moment-backup"));
        let mut written = 0;
        while !copy.is_finished() || written < 300 {
            let at = random.below(BYTES / 4096) * 8;
            let done = match written % 8 {
                0 => device.queues[0].run(Op::Discard, at / 8192 * 8192, 4 << 20),
                _ => device.queues[0].write(at, &[written as u8 | 1; 4096]),
            };
            assert_eq!(done, OK);
            written += 1;
        }
        copy.join().unwrap()
    });
    assert!(copied == before, "the backup is not of its moment");
    // Again, with all that has changed meanwhile.
    assert!(served.copy("moment-backup") == before);
    served.done(&["backup", "end"]);

    served.done(&["backup", "begin", "moment", "--bitmap", "nightly"]);
    let now = served.copy("moment-backup");
    assert!(now == served.cluster.content("moment"));
    let mut increment = before;
    let dirty = served.map("moment-backup", "qemu:dirty-bitmap:nightly");
    assert!(dirty.iter().any(|&(_, _, state)| state == 0));
    for (at, len, _) in dirty.into_iter().filter(|&(_, _, state)| state == 1) {
        let range = at as usize..(at + len) as usize;
        increment[range.clone()].copy_from_slice(&now[range]);
    }
    assert!(increment == now, "a change is missing");
    served.done(&["backup", "end"]);
}

/// The first write changes the mark of the image's lock, which is that of no other client.
fn backups_begin_before_the_first_write_after_a_restart(version: CephVersion) {
    let test = "backups_begin_before_the_first_write_after_a_restart";
    let Some(mut served) = Served::new(version, test, "unwritten") else {
        return;
    };
    let begin = ["backup", "begin", "unwritten", "--bitmap", "nightly"];
    write_some(&mut served.connect());
    served.done(&begin);
    served.done(&["backup", "end"]);
    let Served {
        cluster,
        mut server,
    } = served;
    assert!(server.terminate().unwrap().success(), "{}", server.log());
    served = Served::of(cluster, "unwritten");
    let mut device = served.connect();
    served.done(&begin);
    write_some(&mut device);
    assert!(served.copy("unwritten-backup") == served.cluster.content("unwritten"));
    served.done(&["backup", "end"]);
}

/// As with [two files](crate::backup::moment): each write is sent when the one before it has completed, on either disk.
fn backups_of_an_image_and_a_file_are_of_one_moment(version: CephVersion) {
    let test = "backups_of_an_image_and_a_file_are_of_one_moment";
    let Some(Served {
        mut cluster,
        server,
    }) = Served::new(version, test, "numbered")
    else {
        return;
    };
    drop(server);
    let ceph = cluster.ceph();
    ceph.rbd(&[
        "resize",
        "--no-progress",
        "--allow-shrink",
        "--size=64M",
        "rbd/numbered",
    ])
    .unwrap();
    let file = cluster.folder.path().join("two.raw");
    fs::File::create(&file)
        .unwrap()
        .set_len(DISK_BYTES)
        .unwrap();
    let image = cluster.disk("numbered", "name=a");
    let socket = cluster.socket("two");
    let file = format!("file={},socket={},name=b", file.display(), socket.display());
    let served = Served::start(cluster, &[&image, &file]);
    let connect = |socket| Device::connect(socket, &DeviceConfig::default()).unwrap();
    let mut disks = [connect(served.server.socket()), connect(&socket)];
    let (mut random, mut log) = (Random(9), Vec::new());
    for delay_ms in [0, 0, 40, 150] {
        let is_over = AtomicBool::new(false);
        let copies = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let (disk, block) = (random.below(2), random.below(NUMBERED));
                    write(&mut disks[disk as usize], 0, block, log.len() as u64 + 1);
                    log.push((disk, block));
                }
            });
            thread::sleep(Duration::from_millis(200));
            served.done(&["backup", "begin", "a", "b"]);
            // Clients come before there is a snapshot, and after.
            thread::sleep(Duration::from_millis(delay_ms));
            let copies = ["a-backup", "b-backup"].map(|export| numbers(&served.copy(export)));
            is_over.store(true, Ordering::Relaxed);
            copies
        });
        served.done(&["backup", "end"]);
        check(&copies, &log);
    }
}

/// Two increments, with a restart before each, are the disk.
fn increments_continue_after_a_restart(version: CephVersion) {
    let test = "increments_continue_after_a_restart";
    let Some(mut served) = Served::new(version, test, "restarted") else {
        return;
    };
    let mut random = Random(5);
    let mut write = |served: &Served, fill: u8| {
        let mut device = served.connect();
        for _ in 0..50 {
            let at = random.below(BYTES / 4096) * 8;
            assert_eq!(device.queues[0].write(at, &[fill; 4096]), OK);
        }
    };
    write(&served, 1);
    served.done(&["backup", "begin", "restarted", "--bitmap", "nightly"]);
    let mut backup = served.copy("restarted-backup");
    served.done(&["backup", "end"]);
    for round in [2, 3] {
        write(&served, round);
        let Served { cluster, server } = served;
        let mut server = server;
        assert!(server.terminate().unwrap().success(), "{}", server.log());
        served = Served::of(cluster, "restarted");
        write(&served, round + 10);
        served.done(&["backup", "begin", "restarted", "--bitmap", "nightly"]);
        let now = served.copy("restarted-backup");
        let dirty = served.map("restarted-backup", "qemu:dirty-bitmap:nightly");
        let changed = dirty.iter().filter(|&&(_, _, state)| state == 1);
        let changed: u64 = changed.clone().map(|&(_, len, _)| len).sum();
        assert!(changed < BYTES / 4, "{changed}");
        for (at, len, _) in dirty.into_iter().filter(|&(_, _, state)| state == 1) {
            let range = at as usize..(at + len) as usize;
            backup[range.clone()].copy_from_slice(&now[range]);
        }
        assert!(backup == now, "a change is missing in round {round}");
        served.done(&["backup", "end"]);
        assert!(backup == served.cluster.content("restarted"));
    }
}
