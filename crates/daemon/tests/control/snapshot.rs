//! External snapshots: a disk continues in an overlay whose backing file is its previous image.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use testkit::driver::{Device, DeviceConfig};
use testkit::load::{BlockContent, Load};
use testkit::qemu_img as qemu;
use testkit::random::Random;

use super::server::{Controlled, QemuClient, rewrite};
use crate::support::wait_until;
use crate::support::{content, seed};

const MIB: u64 = 1 << 20;
const BYTES: u64 = 16 * MIB;

/// Blocks of each of two queues: half of the disk.
const BLOCKS: usize = (BYTES / 4 / testkit::load::BLOCK as u64) as usize;

fn two_queues() -> DeviceConfig {
    DeviceConfig {
        queues: 2,
        inflight: true,
        ..DeviceConfig::default()
    }
}

/// Creates an overlay on a file with further options, in which `OVERLAY` is its name.
fn overlay(at: &Path, name: &str, base: &str, options: &str) {
    let (format, options) = (format_of(base), options.replace("OVERLAY", name));
    let create = format!("create -q -f qcow2 {options} -b {base} -F {format} {name}");
    qemu::img(at, &create);
}

fn format_of(name: &str) -> &str {
    name.rsplit('.').next().unwrap()
}

impl Controlled {
    /// `ringdisk replace disk FILE` as its own process.
    /// With the data file of an overlay, if its options name one.
    fn spawn_replace(&self, file: &str, options: &str) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(["replace", "disk", file]);
        if options.contains("data_file") {
            command.args(["--data-file", &format!("{file}.data")]);
        }
        let command = command.arg("--control");
        let command = command.arg(&self.control).current_dir(self.dir.path());
        command.stdin(Stdio::null()).spawn().unwrap()
    }
}

/// A disk under load that moves from overlay to overlay.
struct Guest {
    device: Device,
    loads: Vec<Load>,
    random: Random,
}

impl Guest {
    fn new(socket: &Path) -> Self {
        let device = Device::connect(socket, &two_queues()).unwrap();
        let loads = Load::all(&device, BLOCKS, BlockContent::Zeroes, true);
        let random = Random(seed());
        Self {
            device,
            loads,
            random,
        }
    }

    fn run(&mut self, length: Duration) {
        Load::run(&mut self.loads, &mut self.device, &mut self.random, length);
    }

    /// Runs until this many more requests have completed.
    fn run_more(&mut self, more: u64) {
        let completed = |loads: &[Load]| loads.iter().map(|load| load.completed).sum::<u64>();
        let before = completed(&self.loads);
        wait_until("the guest's requests complete", || {
            self.run(Duration::from_millis(5));
            completed(&self.loads) >= before + more
        });
    }

    /// Waits until nothing is in flight.
    fn finish(&mut self) {
        Load::finish(&mut self.loads, &mut self.device);
    }

    fn changes(&self) -> Vec<usize> {
        self.loads.iter().map(Load::changes).collect()
    }

    /// Asserts that a file holds what the disk held at some moment between the two change counts. Returns all its
    /// bytes.
    fn assert_moment(&self, at: &Path, name: &str, from: &[usize], to: &[usize]) -> Vec<u8> {
        let bytes = qemu::content(at, name, format_of(name));
        let raw = at.join("moment.out");
        fs::write(&raw, &bytes).unwrap();
        for ((load, &from), &to) in self.loads.iter().zip(from).zip(to) {
            let moment = load.moment(&raw, from..=to).unwrap();
            assert!(moment.is_some(), "{name}: of no moment in {from}..={to}");
        }
        bytes
    }
}

/// Raw files and images of several kinds, with the options of the disk and of the overlays.
const KINDS: [(&str, &str, &str); 8] = [
    ("base.raw", "cache=none", ""),
    (
        "base.raw",
        "cache=writeback,aio=threads",
        "-o cluster_size=4k",
    ),
    ("base.qcow2", "cache=none", ""),
    (
        "small.qcow2",
        "cache=writeback,aio=threads",
        "-o cluster_size=4k",
    ),
    ("small.qcow2", "cache=unsafe", ""),
    (
        "small.qcow2",
        "cache=none,lock=running",
        "-o cluster_size=4k",
    ),
    ("beside.qcow2", "cache=none,aio=native", ""),
    ("base.qcow2", "cache=none", "-o data_file=OVERLAY.data"),
];

/// The previous image holds what the disk held at one moment; it is consistent, closed and locked against writers. The
/// overlay holds the rest.
#[test]
fn guest_io_continues_in_the_overlay() {
    if !qemu::is_there("guest_io_continues_in_the_overlay") {
        return;
    }
    for (base, disk, options) in KINDS {
        println!("{base}, {disk}, {options}");
        let ringdisk = Controlled::start(&["--iothreads=2".into()]);
        let at = ringdisk.dir.path();
        File::create(at.join("base.raw"))
            .and_then(|file| file.set_len(BYTES))
            .unwrap();
        qemu::img(at, &format!("create -q -f qcow2 base.qcow2 {BYTES}"));
        qemu::img(
            at,
            &format!("create -q -f qcow2 -o cluster_size=4k small.qcow2 {BYTES}"),
        );
        qemu::img(
            at,
            &format!("create -q -f qcow2 -o data_file=data.bin beside.qcow2 {BYTES}"),
        );
        let data = match base {
            "beside.qcow2" => ",data-file=data.bin",
            _ => "",
        };
        let attach = format!("{base}{data},name=disk,queues=2,socket=disk.sock,{disk}");
        ringdisk.json(&["attach", &attach]);
        let mut guest = Guest::new(&ringdisk.path("disk.sock"));
        guest.run(Duration::from_millis(100));

        let mut left = Vec::new();
        let mut now = base.to_owned();
        for (round, images) in [&["a.qcow2"][..], &["b.qcow2"], &["c.qcow2", "d.qcow2"]]
            .into_iter()
            .enumerate()
        {
            // All of these hold what the disk holds; the disk continues in the last one.
            let mut below = now.clone();
            for image in images {
                overlay(at, image, &below, options);
                below = (*image).into();
            }
            guest.run(Duration::from_millis(20));
            if round == 1 {
                guest.finish();
            }
            let in_flight = guest.loads.iter().map(Load::in_flight);
            let before = guest.changes().into_iter().zip(in_flight);
            let before: Vec<_> = before
                .map(|(changes, under_way)| changes.saturating_sub(under_way))
                .collect();
            let mut replacing = ringdisk.spawn_replace(&below, options);
            let result = loop {
                guest.run(Duration::from_millis(1));
                if let Some(result) = replacing.try_wait().unwrap() {
                    break result;
                }
            };
            assert!(result.success(), "{}", ringdisk.server.log());
            let after = guest.changes();
            guest.run(Duration::from_millis(100));

            // The old image is open for reading, which QEMU may do too, and nobody writes to it.
            qemu::is_locked(at, &now, format_of(&now));
            let bytes = guest.assert_moment(at, &now, &before, &after);
            if now.ends_with("qcow2") {
                qemu::check(at, &now, false);
            }
            qemu::is_locked(at, &below, "qcow2");
            qemu::img(at, &format!("info -U {below}"));
            left.push((now, bytes));
            now = below;
            let file = ringdisk.path(&now);
            assert_eq!(ringdisk.disk("disk")["file"], file.to_str().unwrap());
        }
        let refused =
            ringdisk.ringdisk(&["attach", &format!("{base},name=other,socket=other.sock")]);
        refused.assert_fails(1, &[base, "in use"]);

        guest.finish();
        let end = guest.changes();
        ringdisk.json(&["detach", "disk", "--force"]);
        guest.assert_moment(at, &now, &end, &end);
        for (name, bytes) in &left {
            assert!(qemu::content(at, name, format_of(name)) == *bytes, "{name}");
        }
        for image in ["a.qcow2", "b.qcow2", "c.qcow2", "d.qcow2"] {
            qemu::check(at, image, false);
        }
        assert!(
            !ringdisk
                .server
                .log()
                .contains("could not be closed cleanly"),
            "{}",
            ringdisk.server.log()
        );
    }
}

/// After a kill at any moment during the snapshot, the disk is on the old or the new image and has all acknowledged
/// writes. Once the command was answered, it is on the new image.
#[test]
fn kill_leaves_the_disk_on_the_old_or_the_new_image() {
    if !qemu::is_there("kill_leaves_the_disk_on_the_old_or_the_new_image") {
        return;
    }
    for base in ["base.raw", "base.qcow2"] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        qemu::img(
            dir.path(),
            &format!("create -q -f {} {base} {BYTES}", format_of(base)),
        );
        let arguments = [
            format!("--state={}", path("state")),
            format!(
                "name=disk,queues=2,cache=writeback,file={},socket={}",
                path(base),
                path("disk.sock")
            ),
        ];
        let mut ringdisk = Controlled::start_in(dir, &arguments);
        let mut guest = Guest::new(&ringdisk.path("disk.sock"));
        let mut now = base.to_owned();
        let (mut answered, mut moved) = (0, 0);
        for round in 0..24 {
            let next = format!("{round}.qcow2");
            overlay(ringdisk.dir.path(), &next, &now, "-o cluster_size=4k");
            guest.run(Duration::from_millis(5));
            let mut replacing = ringdisk.spawn_replace(&next, "");
            let until_done = round % 8 == 7;
            let kill = Instant::now() + Duration::from_micros(guest.random.below(60_000));
            let mut answer = None;
            while if until_done {
                answer.is_none()
            } else {
                Instant::now() < kill
            } {
                guest.run(Duration::from_micros(500));
                answer = replacing.try_wait().unwrap();
            }
            ringdisk.server.signal(Signal::KILL);
            let answer = answer.unwrap_or_else(|| replacing.wait().unwrap());
            ringdisk = ringdisk.restart();
            guest
                .device
                .reconnect(ringdisk.path("disk.sock"), &two_queues())
                .unwrap();
            let file = ringdisk.disk("disk")["file"].clone();
            let is_on = |name: &str| file == ringdisk.path(name).to_str().unwrap();
            if answer.success() {
                answered += 1;
                assert!(is_on(&next), "{file}");
            }
            if is_on(&next) {
                moved += 1;
                qemu::is_locked(ringdisk.dir.path(), &now, format_of(&now));
                now = next;
            } else {
                assert!(is_on(&now), "{file}");
            }
        }
        println!("{base}: {moved} of 24 moved, {answered} were answered");
        guest.finish();
        let end = guest.changes();
        let completed: u64 = guest.loads.iter().map(|load| load.completed).sum();
        assert!(completed > 1000, "{completed}");
        ringdisk.json(&["detach", "disk", "--force"]);
        guest.assert_moment(ringdisk.dir.path(), &now, &end, &end);
    }
}

/// The disk continues in its file, locked as before, and a kill loses nothing that was acknowledged since.
#[test]
fn unsaved_snapshot_leaves_the_disk_on_its_own_image() {
    if !qemu::is_there("unsaved_snapshot_leaves_the_disk_on_its_own_image") {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    qemu::img(
        dir.path(),
        &format!("create -q -f qcow2 -o cluster_size=4k base.qcow2 {BYTES}"),
    );
    overlay(dir.path(), "above.qcow2", "base.qcow2", "");
    let state = format!("--state={}", path("state"));
    let disk = format!(
        "name=disk,queues=2,file={},socket={}",
        path("base.qcow2"),
        path("disk.sock")
    );
    let arguments = [state, disk];
    let ringdisk = Controlled::start_in(dir, &arguments);
    let at = ringdisk.dir.path();
    let mut guest = Guest::new(&ringdisk.path("disk.sock"));
    guest.run(Duration::from_millis(50));
    let state = fs::read_dir(at.join("state")).unwrap();
    state.for_each(|file| fs::remove_file(file.unwrap().path()).unwrap());
    fs::remove_dir(at.join("state")).unwrap();
    let file = at.join("base.qcow2");
    for _ in 0..3 {
        let refused = ringdisk.ringdisk(&["replace", "disk", "above.qcow2"]);
        refused.assert_fails(1, &["disk", "No such file"]);
        assert_eq!(ringdisk.disk("disk")["file"], file.to_str().unwrap());
        qemu::is_locked(at, "base.qcow2", "qcow2");
        // Each block is a cluster that is repeatedly allocated and freed.
        guest.run_more(200);
    }
    let ringdisk = ringdisk.kill_and_restart();
    ringdisk.server.wait_for_log(&["replayed"]);
    let socket = ringdisk.path("disk.sock");
    guest.device.reconnect(socket, &two_queues()).unwrap();
    guest.run(Duration::from_millis(50));
    guest.finish();
    let end = guest.changes();
    ringdisk.json(&["detach", "disk", "--force"]);
    guest.assert_moment(ringdisk.dir.path(), "base.qcow2", &end, &end);
}

/// Overlays that the disk cannot move to: it continues, and the failed overlay is released.
#[test]
fn unusable_overlay_is_refused_and_released() {
    if !qemu::is_there("unusable_overlay_is_refused_and_released") {
        return;
    }
    let ringdisk = Controlled::start(&[]);
    let at = ringdisk.dir.path();
    ringdisk.file("a.raw", BYTES);
    ringdisk.file("other.raw", BYTES);
    qemu::img(at, "convert -f raw -O qcow2 a.raw base.qcow2");
    let rebase = |name: &str, base: &str| {
        qemu::img(at, &format!("rebase -u -b {base} -F qcow2 {name}"));
    };
    overlay(at, "itself.qcow2", "base.qcow2", "");
    rebase("itself.qcow2", "itself.qcow2");
    overlay(at, "first.qcow2", "base.qcow2", "");
    overlay(at, "second.qcow2", "first.qcow2", "");
    rebase("first.qcow2", "second.qcow2");
    overlay(at, "small.qcow2", "base.qcow2", "");
    qemu::img(at, "resize -q --shrink small.qcow2 15M");
    overlay(at, "others.qcow2", "other.raw", "");
    qemu::img(
        at,
        "create -q -f qcow2 -b base.qcow2 -F raw wrong.qcow2 16M",
    );
    overlay(at, "written.qcow2", "base.qcow2", "");
    let one = ["write -q -P 1 8M 512".to_owned()];
    qemu::io(at, "written.qcow2", &["-f", "qcow2"], &one);
    overlay(at, "below.qcow2", "written.qcow2", "");
    ringdisk.json(&["attach", "base.qcow2,name=disk,socket=disk.sock"]);
    ringdisk.json(&["attach", "other.raw,name=other,socket=other.sock"]);
    let mut device = Device::connect(ringdisk.path("disk.sock"), &DeviceConfig::default()).unwrap();
    let file = ringdisk.path("base.qcow2");
    for (new, words) in [
        ("itself.qcow2", &["its own backing file", "rebase"][..]),
        ("second.qcow2", &["its own backing file", "rebase"]),
        ("small.qcow2", &["15728640", "16777216"]),
        // An image that another disk writes to.
        ("others.qcow2", &["other.raw", "in use"]),
        ("wrong.qcow2", &["something else", "base.qcow2 -F qcow2"]),
        (
            "written.qcow2",
            &["has been written to", "base.qcow2 -F qcow2"],
        ),
        ("below.qcow2", &["has been written to"]),
        // Nothing of the failed attempt is still open.
        ("small.qcow2", &["15728640", "16777216"]),
    ] {
        let refused = ringdisk.ringdisk(&["replace", "disk", new]);
        refused.assert_fails(1, words);
        rewrite(&mut device.queues[0]);
        assert_eq!(ringdisk.disk("disk")["file"], file.to_str().unwrap());
        qemu::is_locked(at, "base.qcow2", "qcow2");
    }
    let beside = "convert -f raw -O qcow2 -o data_file=data.bin a.raw beside.qcow2";
    qemu::img(at, beside);
    qemu::img(at, "create -q -f qcow2 -b data.bin -F raw part.qcow2");
    let two = "beside.qcow2,data-file=data.bin,name=two,socket=two.sock";
    ringdisk.json(&["attach", two]);
    let refused = ringdisk.ringdisk(&["replace", "two", "part.qcow2"]);
    refused.assert_fails(1, &["a part of", "beside.qcow2 -F qcow2"]);
    overlay(at, "right.qcow2", "base.qcow2", "");
    ringdisk.json(&["replace", "disk", "right.qcow2"]);
    // Another overlay over the previous image, which lacks what was written since, as of an administrator who came later.
    rewrite(&mut device.queues[0]);
    overlay(at, "late.qcow2", "base.qcow2", "");
    let refused = ringdisk.ringdisk(&["replace", "disk", "late.qcow2"]);
    refused.assert_fails(1, &["below what the disk is on", "right.qcow2 -F qcow2"]);
    // A copy of all that is above it.
    qemu::img(
        at,
        "convert -U -O qcow2 -B base.qcow2 -F qcow2 right.qcow2 copy.qcow2",
    );
    // The backing file can no longer be opened for writing.
    let refused = ringdisk.ringdisk(&["replace", "disk", "base.qcow2"]);
    refused.assert_fails(1, &["base.qcow2", "lacks what was written since"]);
    rewrite(&mut device.queues[0]);
}

/// Nodes without an export, and a node on top of another.
#[test]
fn snapshot_of_nodes_without_an_export() {
    let test = "snapshot_of_nodes_without_an_export";
    let ringdisk = Controlled::start(&[]);
    if !qemu::is_there(test) {
        return;
    }
    let Some(mut client) = QemuClient::connect(test, &ringdisk.control) else {
        return;
    };
    let at = ringdisk.dir.path();
    ringdisk.file("a.raw", BYTES);
    qemu::img(at, "convert -f raw -O qcow2 a.raw base.qcow2");
    overlay(at, "one.qcow2", "base.qcow2", "");
    overlay(at, "two.qcow2", "one.qcow2", "");
    let path = |name: &str| ringdisk.path(name);
    client.call(
        "blockdev-add",
        json!({ "driver": "qcow2", "node-name": "node",
            "file": { "driver": "file", "filename": path("base.qcow2") } }),
    );
    let above = |file: &str| json!({ "id": "node", "file": path(file) });
    client.call("x-ringdisk-replace", above("one.qcow2"));
    qemu::check(at, "base.qcow2", false);
    let export = json!({ "type": "vhost-user-blk", "id": "disk", "node-name": "node", "writable": true,
        "addr": { "type": "unix", "path": path("disk.sock") } });
    client.call("block-export-add", export);
    let mut device = Device::connect(path("disk.sock"), &DeviceConfig::default()).unwrap();
    rewrite(&mut device.queues[0]);
    let new = content(4711, 4096);
    assert_eq!(device.queues[0].write(16000, &new), 0);
    client.call("x-ringdisk-replace", above("two.qcow2"));
    assert_eq!(device.queues[0].read(16000, 4096).unwrap(), new);
    assert_eq!(device.queues[0].write(16000, &content(12, 4096)), 0);
    let there = |name: &str| qemu::content(at, name, "qcow2")[16000 * 512..][..4096].to_vec();
    assert_eq!(there("base.qcow2"), content(16000, 4096));
    assert_eq!(there("one.qcow2"), new);
}
