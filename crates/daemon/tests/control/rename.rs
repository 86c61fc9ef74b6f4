//! The file of a running disk is renamed: ringdisk is told by command or by the configuration, and then uses only the
//! new name.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::qemu_img as qemu;

use super::server::{Controlled, rewrite};
use crate::support::content;

const MIB: u64 = 1 << 20;

/// A ringdisk with persisted state, and configured disks in a directory of their own.
struct RenameTest {
    ringdisk: Controlled,
}

impl RenameTest {
    fn start(disks: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = |name: &str| dir.path().join(name);
        for (_, file) in disks.iter().filter(|(_, file)| file.ends_with(".raw")) {
            fs::write(path(file), content(0, 16 * MIB as usize)).unwrap();
        }
        let arguments = [
            format!("--state={}", path("state").display()),
            format!("--config={}", path("config.toml").display()),
        ];
        write_config(dir.path(), disks);
        Self {
            ringdisk: Controlled::start_in(dir, &arguments),
        }
    }

    fn restart(self) -> Self {
        Self {
            ringdisk: self.ringdisk.kill_and_restart(),
        }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.ringdisk.path(name)
    }

    fn rename(&self, from: &str, to: &str) {
        fs::rename(self.path(from), self.path(to)).unwrap();
    }

    fn configure(&self, disks: &[(&str, &str)]) {
        write_config(self.ringdisk.dir.path(), disks);
    }

    fn connect(&self, name: &str) -> Device {
        let socket = self.path(&format!("{name}.sock"));
        Device::connect(socket, &DeviceConfig::default()).unwrap()
    }

    #[track_caller]
    fn assert_on(&self, disk: &str, file: &str) {
        let there = self.ringdisk.disk(disk);
        assert_eq!(there["file"], self.path(file).to_str().unwrap(), "{there}");
    }
}

fn write_config(dir: &Path, disks: &[(&str, &str)]) {
    let at = dir.display();
    let text = disks.iter().map(|(name, file)| {
        format!(
            "[[disk]]\nname = \"{name}\"\nfile = \"{at}/{file}\"\nsocket = \"{at}/{name}.sock\"\n"
        )
    });
    fs::write(dir.join("config.toml"), text.collect::<String>()).unwrap();
}

/// A restart does not open an old copy that lies at the old name.
#[test]
fn restart_opens_the_new_name() {
    for link in [false, true] {
        let served = RenameTest::start(&[("a", "a.raw")]);
        let mut device = served.connect("a");
        fs::copy(served.path("a.raw"), served.path("copy")).unwrap();
        let new = content(4711, 4096);
        assert_eq!(device.queues[0].write(16000, &new), 0);
        if link {
            fs::hard_link(served.path("a.raw"), served.path("live.raw")).unwrap()
        } else {
            served.rename("a.raw", "live.raw")
        }
        served.ringdisk.json(&["replace", "a", "live.raw"]);
        served.assert_on("a", "live.raw");
        served.rename("copy", "a.raw");
        assert_eq!(device.queues[0].read(16000, 4096).unwrap(), new);
        drop(device);
        let served = served.restart();
        served.assert_on("a", "live.raw");
        let mut device = served.connect("a");
        assert_eq!(device.queues[0].read(16000, 4096).unwrap(), new);
    }
}

/// A reload compares the configuration with the disk's current name.
#[test]
fn reload_compares_with_the_current_name() {
    let served = RenameTest::start(&[("a", "a.raw"), ("b", "b.raw")]);
    let mut device = served.connect("a");
    served.rename("a.raw", "live.raw");
    served.configure(&[("a", "live.raw"), ("b", "b.raw")]);
    served.ringdisk.json(&["reload"]);
    served.assert_on("a", "live.raw");
    rewrite(&mut device.queues[0]);
    // The file and the command give the new name, in either order.
    served.rename("live.raw", "later.raw");
    served.ringdisk.json(&["replace", "a", "later.raw"]);
    served.configure(&[("a", "later.raw"), ("b", "b.raw")]);
    served.ringdisk.json(&["reload"]);
    served.assert_on("a", "later.raw");
    rewrite(&mut device.queues[0]);
    // The disk matches its configuration, so nothing is persisted.
    let state = fs::read_to_string(served.path("state/state.json")).unwrap();
    assert!(!state.contains("instead-of"), "{state}");
    let log = served.ringdisk.server.log();
    assert_eq!(log.matches("disk a: front-end").count(), 1, "{log}");
}

/// Another disk can use the old name at once; locks belong to the file, not to its name.
#[test]
fn old_name_can_be_used_by_another_disk() {
    let served = RenameTest::start(&[("a", "a.raw")]);
    let mut device = served.connect("a");
    served.rename("a.raw", "live.raw");
    served.ringdisk.json(&["replace", "a", "live.raw"]);
    served.ringdisk.file("a.raw", 16 * MIB);
    let other = format!("a.raw,name=b,socket={}", served.path("b.sock").display());
    served.ringdisk.json(&["attach", &other]);
    fs::hard_link(served.path("live.raw"), served.path("again.raw")).unwrap();
    let again = format!(
        "again.raw,name=c,socket={}",
        served.path("c.sock").display()
    );
    let refused = served.ringdisk.ringdisk(&["attach", &again]);
    refused.assert_fails(1, &["again.raw", "in use by disk 'a'"]);
    rewrite(&mut device.queues[0]);
    // The disk closes cleanly under its new name.
    drop(device);
    served.ringdisk.json(&["detach", "a", "--force"]);
    served.ringdisk.json(&["attach", &again]);
}

/// A name that no other process could open is refused.
#[test]
fn descriptor_path_is_refused_as_a_name() {
    let served = RenameTest::start(&[("a", "a.raw")]);
    let open = fs::File::open(served.path("a.raw")).unwrap();
    let descriptor = format!(
        "/proc/{}/fd/{}",
        std::process::id(),
        std::os::fd::AsRawFd::as_raw_fd(&open)
    );
    let refused = served.ringdisk.ringdisk(&["replace", "a", &descriptor]);
    refused.assert_fails(1, &["the file's own name"]);
    served.assert_on("a", "a.raw");
}

/// An image names its backing file relative to its own directory: a new name is accepted only if the backing file
/// resolves to the same file.
#[test]
fn new_name_must_resolve_the_same_backing_file() {
    if !qemu::is_there("new_name_must_resolve_the_same_backing_file") {
        return;
    }
    let served = RenameTest::start(&[("a", "a.raw")]);
    let at = served.ringdisk.dir.path();
    qemu::img(at, "convert -U -f raw -O qcow2 a.raw base.qcow2");
    qemu::img(at, "create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2");
    let mut device = served.connect("a");
    served.ringdisk.json(&["replace", "a", "top.qcow2"]);
    let new = content(4711, 4096);
    assert_eq!(device.queues[0].write(16000, &new), 0);

    fs::create_dir(at.join("other")).unwrap();
    symlink(at.join("top.qcow2"), at.join("other/link.qcow2")).unwrap();
    let away = ["replace", "a", "other/link.qcow2"];
    let refused = served.ringdisk.ringdisk(&away);
    refused.assert_fails(1, &["link.qcow2", "builds on", "base.qcow2"]);
    // A copy of the backing file is not accepted either.
    fs::copy(at.join("base.qcow2"), at.join("other/base.qcow2")).unwrap();
    let refused = served.ringdisk.ringdisk(&away);
    refused.assert_fails(1, &["link.qcow2", "builds on"]);
    served.assert_on("a", "top.qcow2");

    served.rename("top.qcow2", "live");
    served.ringdisk.json(&["replace", "a", "live"]);
    served.assert_on("a", "live");
    drop(device);
    // Unflushed writes are in a journal, which belongs to the file under any name.
    let served = served.restart();
    served.assert_on("a", "live");
    let mut device = served.connect("a");
    assert_eq!(device.queues[0].read(16000, 4096).unwrap(), new);
    rewrite(&mut device.queues[0]);
    drop(device);
    served.ringdisk.json(&["detach", "a", "--force"]);
    qemu::check(served.ringdisk.dir.path(), "live", false);
}

/// The backing file of a disk is in use by this process too; a disk that wants to write to it is refused, and the error
/// names the disk.
#[test]
fn backing_file_is_reported_in_use_by_its_disk() {
    if !qemu::is_there("backing_file_is_reported_in_use_by_its_disk") {
        return;
    }
    let served = RenameTest::start(&[("a", "a.raw")]);
    let at = served.ringdisk.dir.path();
    for name in ["b", "c"] {
        fs::copy(at.join("a.raw"), at.join(format!("{name}.raw"))).unwrap();
        let image = format!("create -q -f qcow2 -b {name}.raw -F raw {name}.qcow2");
        qemu::img(at, &image);
    }
    let disk = |file: &str, name: &str| format!("{file},name={name},socket={name}.sock");
    served.ringdisk.json(&["attach", &disk("b.qcow2", "b")]);
    let below = ["attach", &disk("b.raw", "x")];
    let refused = served.ringdisk.ringdisk(&below);
    refused.assert_fails(1, &["b.raw", "in use by disk 'b'"]);
    // The same in the other direction.
    served.ringdisk.json(&["attach", &disk("c.raw", "c")]);
    let above = ["attach", &disk("c.qcow2", "y")];
    let refused = served.ringdisk.ringdisk(&above);
    refused.assert_fails(1, &["c.raw", "in use by disk 'c'"]);
    // Not even for reading, unless the operator allows it: an image names its backing file.
    let reader = disk("b.raw", "z") + ",readonly=on";
    let refused = served.ringdisk.ringdisk(&["attach", &reader]);
    refused.assert_fails(1, &["b.raw", "in use by disk 'b'", "--allow-backing"]);
}

/// After a snapshot by command, the configuration gets the new file, and another name for the disk: its own former file is no
/// other disk's.
#[test]
fn disk_with_a_snapshot_gets_another_name() {
    let test = "disk_with_a_snapshot_gets_another_name";
    if !qemu::is_there(test) {
        return;
    }
    let served = RenameTest::start(&[("a", "a.raw")]);
    let dir = served.ringdisk.dir.path().to_owned();
    let overlay = "create -q -f qcow2 -b a.raw -F raw above.qcow2";
    qemu::img(&dir, overlay);
    served.ringdisk.json(&["replace", "a", "above.qcow2"]);
    let at = dir.display();
    let text =
        format!("[[disk]]\nname = \"b\"\nfile = \"{at}/above.qcow2\"\nsocket = \"{at}/a.sock\"\n");
    fs::write(served.path("config.toml"), text).unwrap();
    served.ringdisk.json(&["reload"]);
    served.assert_on("b", "above.qcow2");
    rewrite(&mut served.connect("a").queues[0]);
}

/// Configures disks at any sockets.
fn configure_at(dir: &Path, disks: &[[&str; 3]]) {
    let at = dir.display();
    let text = disks.iter().map(|[name, file, socket]| {
        format!(
            "[[disk]]\nname = \"{name}\"\nfile = \"{at}/{file}\"\nsocket = \"{at}/{socket}.sock\"\n"
        )
    });
    fs::write(dir.join("config.toml"), text.collect::<String>()).unwrap();
}

/// Two disks, each on an overlay that a command has put over its file, and to which nothing was written yet.
fn with_overlays(test: &str) -> Option<RenameTest> {
    if !qemu::is_there(test) {
        return None;
    }
    let served = RenameTest::start(&[("a", "a.raw"), ("b", "b.raw")]);
    for disk in ["a", "b"] {
        let overlay = format!("create -q -f qcow2 -b {disk}.raw -F raw {disk}.qcow2");
        qemu::img(served.ringdisk.dir.path(), &overlay);
        let overlay = format!("{disk}.qcow2");
        served.ringdisk.json(&["replace", disk, &overlay]);
    }
    Some(served)
}

/// Two disks exchange their sockets: each stays on its file.
#[test]
fn disks_with_snapshots_exchange_sockets() {
    for start in [false, true] {
        let test = "disks_with_snapshots_exchange_sockets";
        let Some(mut served) = with_overlays(test) else {
            return;
        };
        let dir = served.ringdisk.dir.path().to_owned();
        configure_at(&dir, &[["a", "a.raw", "b"], ["b", "b.raw", "a"]]);
        if start {
            served = served.restart();
        } else {
            served.ringdisk.json(&["reload"]);
        }
        for (disk, socket) in [("a", "b"), ("b", "a")] {
            served.assert_on(disk, &format!("{disk}.qcow2"));
            rewrite(&mut served.connect(socket).queues[0]);
        }
    }
}

/// The overlays are written into the configuration, but nobody reloads it; then the names go to other disks.
#[test]
fn names_of_disks_with_snapshots_go_to_others() {
    for (how, disks) in [
        (
            "reload",
            [
                ["a", "n.raw", "n"],
                ["c", "a.qcow2", "a"],
                ["b", "b.qcow2", "b"],
            ],
        ),
        (
            "reload",
            [
                ["a", "b.qcow2", "b"],
                ["b", "a.qcow2", "a"],
                ["n", "n.raw", "n"],
            ],
        ),
        (
            "start",
            [
                ["a", "b.qcow2", "b"],
                ["b", "a.qcow2", "a"],
                ["n", "n.raw", "n"],
            ],
        ),
    ] {
        let test = "names_of_disks_with_snapshots_go_to_others";
        let Some(mut served) = with_overlays(test) else {
            return;
        };
        served.ringdisk.file("n.raw", 16 * MIB);
        let dir = served.ringdisk.dir.path().to_owned();
        configure_at(&dir, &disks);
        match how {
            "start" => served = served.restart(),
            _ => _ = served.ringdisk.json(&["reload"]),
        }
        for [disk, file, socket] in disks {
            served.assert_on(disk, file);
            rewrite(&mut served.connect(socket).queues[0]);
        }
    }
}

/// A disk that a reload can serve neither as configured now nor as before is listed, and served once that is repaired.
#[test]
fn disk_that_cannot_be_restored_is_absent() {
    let Some(served) = with_overlays("disk_that_cannot_be_restored_is_absent") else {
        return;
    };
    let dir = served.ringdisk.dir.path().to_owned();
    let mut disks = [["a", "a.qcow2", "a"], ["b", "b.qcow2", "b"]];
    configure_at(&dir, &disks);
    served.ringdisk.json(&["reload"]);
    // It lacks what disk a has written since.
    let fresh = "create -q -f qcow2 -b a.raw -F raw fresh.qcow2";
    qemu::img(&dir, fresh);
    served.ringdisk.json(&["replace", "b", "fresh.qcow2"]);
    disks = [["b", "a.qcow2", "a"], ["a", "fresh.qcow2", "n"]];
    configure_at(&dir, &disks);
    let failed = served.ringdisk.ringdisk(&["reload"]);
    failed.assert_fails(1, &["a", "fresh.qcow2"]);
    served.assert_on("b", "a.qcow2");
    let absent = served.ringdisk.disk("a");
    let problem = absent["problem"].as_str().unwrap_or_default();
    assert!(problem.contains("fresh.qcow2"), "{absent}");
    served.ringdisk.file("n.raw", 16 * MIB);
    disks[1][1] = "n.raw";
    configure_at(&dir, &disks);
    served.ringdisk.json(&["reload"]);
    let start = Instant::now();
    // It is tried again after the reply.
    while !served.ringdisk.disk("a")["problem"].is_null() && start.elapsed() < HANG {
        thread::sleep(Duration::from_millis(20));
    }
    for [disk, file, socket] in disks {
        served.assert_on(disk, file);
        rewrite(&mut served.connect(socket).queues[0]);
    }
}

/// The process that an upgrade has started. Ends it.
struct Upgraded(i32);

impl Drop for Upgraded {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.0).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// A VM runs on another host, where its disk was moved: the configuration here names the new file before the VM comes.
#[test]
fn disk_for_other_hosts_gets_its_new_file() {
    let Some(served) = with_overlays("disk_for_other_hosts_gets_its_new_file") else {
        return;
    };
    let at = served.ringdisk.dir.path().display().to_string();
    let configure = |file: &str| {
        let text = format!(
            "[[disk]]\nname = \"a\"\nfile = \"{at}/{file}\"\nsocket = \"{at}/a.sock\"\nlock = \"running\"\n"
        );
        fs::write(served.path("config.toml"), text).unwrap();
    };
    served.ringdisk.file("n.raw", 16 * MIB);
    configure("n.raw");
    served.ringdisk.json(&["reload"]);
    served.assert_on("a", "n.raw");
    qemu::img(
        served.ringdisk.dir.path(),
        "create -q -f qcow2 -b n.raw -F raw n.qcow2",
    );
    configure("n.qcow2");
    served.ringdisk.json(&["reload"]);
    served.assert_on("a", "n.qcow2");
    let above = "create -q -f qcow2 -b n.qcow2 -F qcow2 above.qcow2";
    qemu::img(served.ringdisk.dir.path(), above);
    configure("above.qcow2");
    let upgraded = served.ringdisk.json(&["upgrade"]);
    let _ended = Upgraded(upgraded["pid"].as_u64().unwrap() as i32);
    let start = Instant::now();
    // The reload comes right after the reply.
    while served.ringdisk.disk("a")["file"] != served.path("above.qcow2").to_str().unwrap()
        && start.elapsed() < HANG
    {
        thread::sleep(Duration::from_millis(20));
    }
    served.assert_on("a", "above.qcow2");
    rewrite(&mut served.connect("a").queues[0]);
}
