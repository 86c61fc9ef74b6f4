//! Changes made to running disks survive `kill -9` and a start with the same arguments.

use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;
use serde_json::json;
use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::server::Server;

use super::server::{CommandOutput, Controlled, QemuClient};
use crate::support::content;

const MIB: u64 = 1 << 20;

/// A ringdisk with persisted state and a configuration of disks a and b.
struct Stateful {
    ringdisk: Controlled,
}

impl Stateful {
    fn start() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        for name in ["a.raw", "b.raw", "c.raw", "d.raw", "e.raw"] {
            fs::write(path(name), content(0, (4 * MIB) as usize)).unwrap();
        }
        let arguments = [
            format!("--state={}", path("state")),
            format!("--config={}", path("config.toml")),
        ];
        fs::write(path("config.toml"), config(&dir.path().display(), "")).unwrap();
        Self {
            ringdisk: Controlled::start_in(dir, &arguments),
        }
    }

    fn restart(self) -> Self {
        Self {
            ringdisk: self.ringdisk.kill_and_restart(),
        }
    }

    fn disk(&self, name: &str) -> serde_json::Value {
        self.ringdisk.disk(name)
    }

    fn attach(&self, disk: &str) {
        let socket = self.ringdisk.path(&format!("{disk}.sock"));
        let disk = format!("{disk}.raw,socket={},queues=2", socket.display());
        self.ringdisk.json(&["attach", &disk]);
    }
}

fn config(dir: &dyn std::fmt::Display, more: &str) -> String {
    ["a", "b"]
        .map(|name| {
            format!(
                "[[disk]]\nfile = \"{dir}/{name}.raw\"\nsocket = \"{dir}/{name}.sock\"\nqueues = 1\n{more}\n"
            )
        })
        .concat()
}

/// A service of root is given to another user: what root has persisted is that user's then.
#[test]
fn persisted_state_of_root_is_given_to_a_user() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: persisted_state_of_root_is_given_to_a_user: needs root");
    }
    let mut kept = Stateful::start();
    kept.ringdisk.json(&["throttle", "a", "iops=77"]);
    kept.ringdisk
        .json(&["bitmap", "add", "a", "nightly", "--persistent"]);
    for name in ["a.raw", "b.raw"] {
        fs::set_permissions(kept.ringdisk.path(name), fs::Permissions::from_mode(0o666)).unwrap();
    }
    let dir = kept.ringdisk.dir.path();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    let text = format!("user = \"nobody\"\n{}", config(&dir.display(), ""));
    fs::write(kept.ringdisk.path("config.toml"), text).unwrap();
    kept.ringdisk.server.terminate().unwrap();
    let kept = Stateful {
        ringdisk: Controlled::start_in(kept.ringdisk.dir, &kept.ringdisk.arguments),
    };
    assert_eq!(kept.disk("a")["limits"]["iops"], 77);
    let bitmaps = kept.ringdisk.json(&["bitmap", "list", "a"]);
    assert!(
        !bitmaps.to_string().contains("inconsistent\":true"),
        "{bitmaps}"
    );
    assert!(bitmaps.to_string().contains("nightly"), "{bitmaps}");
    // It can persist changes.
    kept.ringdisk.json(&["throttle", "a", "iops=78"]);
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["limits"]["iops"], 78);
}

/// The state directory is away: a change is made, and the command says that a restart will lose it. When the directory is
/// back, a reload saves it, and so does the next change.
#[test]
fn change_that_cannot_be_persisted_is_an_error() {
    let kept = Stateful::start();
    let [state, away] = ["state", "away"].map(|name| kept.ringdisk.path(name));
    fs::rename(&state, &away).unwrap();
    let throttled = kept.ringdisk.ringdisk(&["throttle", "a", "iops=77"]);
    throttled.assert_fails(
        1,
        &[
            "it is done",
            "a restart",
            "will lose it",
            "state.json",
            "the next change saves it",
            "a configuration file",
        ],
    );
    let limits = kept.disk("a")["limits"].clone();
    assert_ne!(limits, json!({}));
    // Commands that change nothing succeed. A reload would save it.
    kept.ringdisk.json(&["list"]);
    for _ in 0..2 {
        let reloaded = kept.ringdisk.ringdisk(&["reload"]);
        reloaded.assert_fails(1, &["in effect", "will lose", "json", "then reload again"]);
    }
    fs::rename(&away, &state).unwrap();
    kept.ringdisk.json(&["reload"]);
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["limits"], limits);
    fs::rename(&state, &away).unwrap();
    let throttled = kept.ringdisk.ringdisk(&["throttle", "a", "iops=99"]);
    throttled.assert_fails(1, &["it is done"]);
    fs::rename(&away, &state).unwrap();
    kept.ringdisk.json(&["throttle", "b", "iops=5"]);
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["limits"]["iops"], 99);
}

/// The file of a disk is deleted: the list says so, and only a forced detach gives its data up.
#[test]
fn disk_whose_file_is_deleted_is_not_detached_unasked() {
    let kept = Stateful::start();
    fs::remove_file(kept.ringdisk.path("a.raw")).unwrap();
    crate::support::wait_until("the disk is listed as deleted", || {
        kept.disk("a")["storage"] == "deleted"
    });
    assert_eq!(kept.disk("b")["storage"], "works");
    let detached = kept.ringdisk.ringdisk(&["detach", "a"]);
    detached.assert_fails(1, &["disk 'a'", "a.raw", "deleted", "force"]);
    assert_eq!(kept.disk("a")["storage"], "deleted");
    kept.ringdisk.json(&["detach", "a", "--force"]);
    assert_eq!(kept.disk("a"), serde_json::Value::Null);
}

/// A disk that was moved and then detached: what a reload says of it is a command that serves it with its data.
#[test]
fn reload_says_how_to_attach_a_disk_that_was_moved() {
    let kept = Stateful::start();
    fs::write(kept.ringdisk.path("e.raw"), content(7, (4 * MIB) as usize)).unwrap();
    let moved = kept.ringdisk.path("e.raw");
    kept.ringdisk
        .json(&["replace", "a", &moved.display().to_string()]);
    kept.ringdisk.json(&["detach", "a"]);
    let text = fs::read_to_string(kept.ringdisk.path("config.toml")).unwrap();
    fs::write(
        kept.ringdisk.path("config.toml"),
        text.replacen("queues = 1", "queues = 1\nserial = \"x\"", 1),
    )
    .unwrap();
    let reloaded = kept.ringdisk.ringdisk(&["reload"]);
    let (_, command) = reloaded.out.split_once("ringdisk attach ").unwrap();
    let disk = command.lines().next().unwrap().trim_matches('\'');
    assert!(disk.contains("e.raw"), "{reloaded:?}");
    kept.ringdisk.json(&["attach", disk]);
    let file = kept.disk("a")["file"].clone();
    assert_eq!(file, moved.display().to_string());
}

/// A disk moved to an image is on it after a kill, with all acknowledged writes even if they were not flushed. A disk
/// moved back to a raw file is on that file.
#[test]
fn replacement_survives_a_kill() {
    if !testkit::qemu_img::is_there("replacement_survives_a_kill") {
        return;
    }
    let kept = Stateful::start();
    let at = kept.ringdisk.dir.path().to_owned();
    testkit::qemu_img::img(&at, "convert -f raw -O qcow2 c.raw image.qcow2");
    testkit::qemu_img::img(&at, "resize -q image.qcow2 8M");
    testkit::qemu_img::img(&at, "convert -f raw -O qcow2 d.raw other.qcow2");
    for (disk, file) in [("a", "image.qcow2"), ("b", "other.qcow2"), ("b", "b.raw")] {
        kept.ringdisk.json(&["replace", disk, file]);
    }
    let new = content(4711, 4096);
    // A cluster that is not yet allocated.
    let sector = 6 * MIB / 512;
    let mut device =
        Device::connect(kept.ringdisk.path("a.sock"), &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].write(sector, &new), 0);
    let kept = kept.restart();
    let list = |name: &str, field: &str| kept.disk(name)[field].clone();
    assert_eq!(list("a", "file"), at.join("image.qcow2").to_str().unwrap());
    assert_eq!(list("a", "format"), "qcow2");
    assert_eq!(list("b", "file"), at.join("b.raw").to_str().unwrap());
    assert_eq!(list("b", "format"), "raw");
    let mut device =
        Device::connect(kept.ringdisk.path("a.sock"), &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].read(sector, 4096).unwrap(), new);
    assert_eq!(device.queues[0].read(8, 512).unwrap(), content(8, 512));
    testkit::qemu_img::check(&at, "other.qcow2", false);
}

#[test]
fn changes_survive_a_kill() {
    let kept = Stateful::start();
    kept.attach("c");
    kept.ringdisk.json(&["throttle", "a", "iops=1234"]);
    kept.ringdisk.json(&["throttle", "c", "bps-wr=5M"]);
    kept.ringdisk.json(&["resize", "c", "6M"]);
    kept.ringdisk.json(&["detach", "b"]);
    let e = kept.ringdisk.path("e.raw");
    kept.ringdisk.json(&["replace", "a", e.to_str().unwrap()]);
    // The guest of c switches the write cache off.
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(kept.ringdisk.path("c.sock"), &config).unwrap();
    assert_eq!(device.frontend.config(32, 1).unwrap(), [1]);
    device.frontend.set_config(32, &[0]).unwrap();
    assert_eq!(device.queues[1].write(0, &content(99, 512)), 0);

    let kept = kept.restart();
    device
        .reconnect(kept.ringdisk.path("c.sock"), &config)
        .unwrap();
    assert_eq!(device.frontend.config(32, 1).unwrap(), [0]);
    assert_eq!(device.queues[0].read(0, 512).unwrap(), content(99, 512));
    assert_eq!(kept.disk("a")["file"], e.to_str().unwrap());
    assert_eq!(kept.disk("a")["limits"]["iops"], 1234, "{}", kept.disk("a"));
    assert_eq!(kept.disk("b"), json!(null));
    assert_eq!(kept.disk("c")["limits"]["bps_wr"], 5 * MIB);
    assert_eq!(kept.disk("c")["size"], 6 * MIB);
    drop(device);

    // A change that was undone is no longer persisted; the others are.
    kept.attach("b");
    // The server may not yet have noticed that the front-end disconnected.
    kept.ringdisk.json(&["detach", "c", "--force"]);
    let mut kept = kept.restart();
    assert_eq!(kept.disk("c"), json!(null));
    assert_ne!(kept.disk("b"), json!(null));
    assert_eq!(kept.disk("a")["file"], e.to_str().unwrap());
    assert!(kept.ringdisk.server.terminate().unwrap().success());
    let ringdisk = kept.ringdisk.restart();
    let limits = &ringdisk.disk("a")["limits"];
    assert_eq!(limits["iops"], 1234, "an orderly end");
}

/// How often the state was written, counted by renames to its name.
fn written(watch: &OwnedFd) -> usize {
    let mut buffer = [MaybeUninit::uninit(); 64 << 10];
    let mut events = inotify::Reader::new(watch, &mut buffer);
    let mut times = 0;
    while let Ok(event) = events.next() {
        times += usize::from(event.file_name() == Some(c"state.json"));
    }
    times
}

/// A guest that keeps switching its write cache does not wear out the disk that holds the state.
#[test]
fn frequent_write_cache_switches_persist_the_last_one() {
    let mut kept = Stateful::start();
    let mut device =
        Device::connect(kept.ringdisk.path("a.sock"), &DeviceConfig::default()).unwrap();
    let state = kept.ringdisk.path("state");
    let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, &state, WatchFlags::MOVE).unwrap();
    let choice = || {
        let text = fs::read_to_string(state.join("state.json")).unwrap();
        let state: serde_json::Value = serde_json::from_str(&text).unwrap();
        state["write-caches"]["a"].clone()
    };
    let start = Instant::now();
    // The first switch is persisted at once, the last one some time later.
    for round in 0..500 {
        let on = u8::from(round % 2 == 1);
        device.frontend.set_config(32, &[on]).unwrap();
    }
    while choice() != json!(null) {
        assert!(start.elapsed() < HANG, "{}", choice());
        thread::sleep(Duration::from_millis(10));
    }
    let times = written(&watch);
    let seconds = start.elapsed().as_secs() as usize;
    println!("written {times} times in {seconds} s");
    assert!((2..=seconds + 1).contains(&times), "{times} in {seconds} s");
    // A switch just before the shutdown is persisted too.
    for on in [0, 1, 0] {
        device.frontend.set_config(32, &[on]).unwrap();
    }
    assert!(kept.ringdisk.server.terminate().unwrap().success());
    assert_eq!(choice(), json!(false));
}

/// Many disks move at once. After each round, the persisted file of each disk is its last one: no older record
/// overwrites a newer one.
#[test]
fn concurrent_replacements_persist_the_last_file_of_each_disk() {
    const ROUNDS: usize = 12;
    let kept = Stateful::start();
    let names: Vec<_> = (0..6).map(|i| format!("disk{i}")).collect();
    for name in &names {
        for end in ["", "-0", "-1"] {
            kept.ringdisk.file(&format!("{name}{end}.raw"), MIB);
        }
        kept.attach(name);
    }
    let state = kept.ringdisk.path("state/state.json");
    let is_on =
        |text: &str, name: &str| (0..2).find(|end| text.contains(&format!("{name}-{end}.raw")));
    thread::scope(|scope| {
        let kept = &kept;
        let moves = move |name| {
            for round in 0..ROUNDS {
                let file = format!("{name}-{}.raw", round % 2);
                kept.ringdisk.json(&["replace", name, &file]);
            }
        };
        let moves: Vec<_> = names
            .iter()
            .map(|name| scope.spawn(move || moves(name)))
            .collect();
        let mut last = vec![None; names.len()];
        let mut changes = vec![0; names.len()];
        while moves.iter().any(|moves| !moves.is_finished()) {
            let text = fs::read_to_string(&state).unwrap();
            for (i, name) in names.iter().enumerate() {
                let now = is_on(&text, name);
                changes[i] += usize::from(now != last[i]);
                last[i] = now;
            }
            thread::sleep(Duration::from_micros(200));
        }
        assert!(changes.iter().all(|n| *n <= ROUNDS), "{changes:?}");
    });
    let kept = kept.restart();
    for name in &names {
        let file = kept.ringdisk.path(&format!("{name}-1.raw"));
        assert_eq!(kept.disk(name)["file"], file.to_str().unwrap());
    }
}

/// The message must not blame the disk's own file system.
#[test]
fn failed_state_write_names_the_state_directory() {
    let kept = Stateful::start();
    // A directory of this name prevents writing the file.
    fs::create_dir(kept.ringdisk.path("state/state.new")).unwrap();
    let replaced = kept.ringdisk.ringdisk(&["replace", "a", "e.raw"]);
    replaced.assert_fails(1, &["disk", "/state/state.json", "make room there"]);
}

#[test]
fn later_configuration_wins_over_persisted_state() {
    let kept = Stateful::start();
    kept.attach("c");
    kept.ringdisk.json(&["throttle", "a", "iops=1234"]);
    kept.ringdisk.json(&["detach", "b"]);
    let dir = kept.ringdisk.dir.path().display().to_string();
    let text = config(&dir, "iops = 77");
    fs::write(kept.ringdisk.path("config.toml"), &text).unwrap();
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["limits"]["iops"], 77);
    assert_eq!(kept.disk("b")["limits"]["iops"], 77);
    let said = [
        "disk b",
        "was detached at run time",
        "served again, from",
        "b.raw",
    ];
    kept.ringdisk.server.wait_for_log(&said);
    assert_ne!(kept.disk("c"), json!(null), "which it does not speak of");

    // The same without a restart: a reload applies the file as written.
    kept.ringdisk.json(&["throttle", "b", "iops=5"]);
    fs::write(kept.ringdisk.path("config.toml"), config(&dir, "iops = 78")).unwrap();
    kept.ringdisk.json(&["reload"]);
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["limits"]["iops"], 78);
    assert_eq!(kept.disk("b")["limits"]["iops"], 78);

    // The file sets no other limits.
    kept.ringdisk.json(&["throttle", "b", "iops=6"]);
    let text = config(&dir, "iops = 78\nserial = 'new'");
    fs::write(kept.ringdisk.path("config.toml"), text).unwrap();
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["limits"]["iops"], 78);
    assert_eq!(kept.disk("b")["limits"]["iops"], 6);
}

/// A disk that was moved to another file and then detached never comes back on its earlier file: neither after an
/// unrelated configuration change, nor after a reload, nor after a start.
#[test]
fn detached_disk_comes_back_on_its_last_file() {
    let kept = Stateful::start();
    let path = |kept: &Stateful, name| kept.ringdisk.path(name).display().to_string();
    let [e, c] = ["e.raw", "c.raw"].map(|name| path(&kept, name));
    kept.ringdisk.json(&["replace", "a", &e]);
    kept.ringdisk.json(&["detach", "a"]);
    let dir = kept.ringdisk.dir.path().display().to_string();
    let write = |kept: &Stateful, text: &str| {
        fs::write(kept.ringdisk.path("config.toml"), text).unwrap();
    };
    // This also holds after several processes have persisted it.
    let kept = kept.restart();
    assert_eq!(kept.disk("a"), json!(null));
    write(&kept, &config(&dir, "iops = 76"));
    kept.ringdisk.json(&["reload"]);
    let kept = kept.restart();
    assert_eq!(kept.disk("a"), json!(null));
    write(&kept, &config(&dir, "iops = 77"));
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["file"], e);
    assert_eq!(kept.disk("a")["limits"]["iops"], 77);
    // The configuration now names another file.
    kept.ringdisk.json(&["detach", "a"]);
    let other = |more| config(&dir, more).replacen("/a.raw", "/c.raw\"\nname = \"a", 1);
    write(&kept, &other("iops = 78"));
    kept.ringdisk.json(&["reload"]);
    write(&kept, &other("iops = 79"));
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["file"], c);
}

/// Unrelated configuration changes do not undo a replacement: neither at a start nor at a reload that disconnects the
/// front-end. Only naming another file does.
#[test]
fn unrelated_configuration_change_keeps_the_replaced_file() {
    let kept = Stateful::start();
    let path = |kept: &Stateful, name| kept.ringdisk.path(name).display().to_string();
    let [e, c] = ["e.raw", "c.raw"].map(|name| path(&kept, name));
    kept.ringdisk.json(&["replace", "a", &e]);
    let dir = kept.ringdisk.dir.path().display().to_string();
    let write = |kept: &Stateful, text: &str| {
        fs::write(kept.ringdisk.path("config.toml"), text).unwrap();
    };
    write(&kept, &config(&dir, "iops = 77"));
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["file"], e);
    assert_eq!(kept.disk("a")["limits"]["iops"], 77);
    for more in ["queue-size = 64", "serial = 'new'"] {
        write(&kept, &config(&dir, more));
        kept.ringdisk.json(&["reload"]);
        assert_eq!(kept.disk("a")["file"], e, "{more}");
    }
    let log = kept
        .ringdisk
        .server
        .wait_for_log(&["disk a", "front-end is disconnected"]);
    println!("{log}");
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["file"], e);
    write(
        &kept,
        &config(&dir, "").replace("/a.raw", "/c.raw").replacen(
            "[[disk]]",
            "[[disk]]\nname = 'a'",
            1,
        ),
    );
    let kept = kept.restart();
    assert_eq!(kept.disk("a")["file"], c);
}

/// Nodes and exports made by QEMU's commands.
#[test]
fn nodes_and_exports_made_by_qmp_are_restored() {
    let kept = Stateful::start();
    let test = "nodes_and_exports_made_by_qmp_are_restored";
    let Some(mut qemu) = QemuClient::connect(test, &kept.ringdisk.control) else {
        return;
    };
    let file = kept.ringdisk.path("c.raw");
    let limits = json!({ "iops-total": 50 });
    qemu.call(
        "object-add",
        json!({ "qom-type": "throttle-group", "id": "g", "limits": limits }),
    );
    qemu.call(
        "object-add",
        json!({ "qom-type": "iothread", "id": "mine" }),
    );
    let below = json!({ "driver": "file", "filename": file, "node-name": "below" });
    qemu.call("blockdev-add", below);
    let over = json!({ "driver": "raw", "file": "below", "node-name": "over" });
    qemu.call("blockdev-add", over);
    let addr = json!({ "type": "unix", "path": kept.ringdisk.path("x.sock") });
    let export = json!({
        "type": "vhost-user-blk", "id": "x", "node-name": "over", "addr": addr,
        "writable": true, "num-queues": 3, "iothread": "mine",
    });
    qemu.call("block-export-add", export);
    let alone = json!({ "driver": "null-co", "size": 4096, "node-name": "alone" });
    qemu.call("blockdev-add", alone);
    let nodes = qemu.call("query-named-block-nodes", json!({}));
    let exports = qemu.call("query-block-exports", json!({}));
    let threads = qemu.call("query-iothreads", json!({}));
    drop(qemu);

    let kept = kept.restart();
    let mut qemu = QemuClient::connect(test, &kept.ringdisk.control).unwrap();
    assert_eq!(qemu.call("query-named-block-nodes", json!({})), nodes);
    assert_eq!(qemu.call("query-block-exports", json!({})), exports);
    let ids = |threads: &serde_json::Value| {
        let threads = threads.as_array().unwrap().iter();
        threads.map(|t| t["id"].clone()).collect::<Vec<_>>()
    };
    let now = qemu.call("query-iothreads", json!({}));
    assert_eq!(ids(&now), ids(&threads));
    let config = DeviceConfig {
        queues: 3,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(kept.ringdisk.path("x.sock"), &config).unwrap();
    assert_eq!(device.queues[2].read(8, 512).unwrap(), content(8, 512));
    drop(device);
    qemu.call("object-del", json!({ "id": "g" }));
}

/// A missing file is reported, does not stop the other disks, and its disk stays in the state.
#[test]
fn missing_file_is_reported_and_its_disk_kept_in_the_state() {
    let kept = Stateful::start();
    kept.attach("c");
    let (file, away) = (kept.ringdisk.path("c.raw"), kept.ringdisk.path("away"));
    fs::rename(&file, &away).unwrap();
    let kept = kept.restart();
    kept.ringdisk
        .server
        .wait_for_log(&["disk c", "no such file"]);
    assert_ne!(kept.disk("a"), json!(null));
    kept.ringdisk.json(&["throttle", "a", "iops=9"]);
    fs::rename(&away, &file).unwrap();
    let kept = kept.restart();
    assert_ne!(kept.disk("c"), json!(null));
}

#[test]
fn state_directory_is_exclusive_and_damage_is_refused() {
    let kept = Stateful::start();
    kept.ringdisk.json(&["throttle", "a", "iops=1234"]);
    let state = format!("--state={}", kept.ringdisk.path("state").display());
    let serve = |more: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        let control = format!("--control={}.qmp", kept.ringdisk.control.display());
        // Only the last line.
        command.env("RINGDISK_LOG", "off");
        CommandOutput::of(command.args(["serve", &state, &control, more]))
    };
    serve("null:1M").assert_fails(1, &["another ringdisk", "--state"]);
    kept.ringdisk.server.signal(Signal::KILL);
    let file = kept.ringdisk.path("state/state.json");
    let text = fs::read_to_string(&file).unwrap();
    for (damaged, says) in [
        (
            text.replace("\"version\": 1", "\"version\": 7"),
            "version 7",
        ),
        (text[..text.len() / 2].to_owned(), "EOF"),
        (text.replace("iops=1234", "iops=many"), "iops"),
        (String::new(), "EOF"),
    ] {
        fs::write(&file, damaged).unwrap();
        // The lock ends with the process, which may take a moment.
        let mut ran = serve("null:1M");
        while ran.err.contains("another ringdisk") {
            ran = serve("null:1M");
        }
        ran.assert_fails(1, &["state.json", says, "configuration alone"]);
    }
    fs::write(&file, text).unwrap();
    let queues = file.with_file_name("queues.json");
    let before = fs::read(&queues).unwrap();
    for damaged in ["{", r#"{"a": 0}"#, "[]"] {
        fs::write(&queues, damaged).unwrap();
        let ran = serve("null:1M");
        ran.assert_fails(1, &["queues.json: cannot be read", "number of queues"]);
        assert!(!ran.err.contains("configuration alone"), "{ran:?}");
    }
    fs::write(&queues, before).unwrap();
    let disk = format!("null:1M,socket={}.null", kept.ringdisk.control.display());
    let server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &[state, disk]);
    let log = server.unwrap().log();
    assert!(!log.contains("cannot be read"), "{log}");
}

/// With `--user`, the directory belongs to that user but root reads it: a symlink or FIFO placed there must neither
/// make root create a file nor block it.
#[test]
fn symlinks_and_fifos_in_the_state_directory_are_refused() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (state, elsewhere) = (dir.path().join("state"), dir.path().join("elsewhere"));
    let refuses = |says: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        let disk = format!("null:1M,socket={}", dir.path().join("s").display());
        // With the sandbox off, Landlock is not what refuses it.
        command.args(["serve", "--json", "--sandbox=off", &disk, "--state"]);
        command.arg(&state).env("RUNTIME_DIRECTORY", dir.path());
        let said = Server::ringdisk_command(command).err().unwrap().to_string();
        assert!(said.contains(says), "{said}");
    };
    for (name, says) in [
        ("lock", "state/lock: cannot be used"),
        ("state.json", "state.json: cannot be read"),
        ("queues.json", "queues.json: cannot be read"),
        ("directory", "directory: cannot be read"),
    ] {
        let file = state.join(name);
        fs::create_dir(&state).unwrap();
        fs::set_permissions(&state, fs::Permissions::from_mode(0o700)).unwrap();
        symlink(&elsewhere, &file).unwrap();
        refuses(says);
        assert!(!elsewhere.exists(), "{name}");
        fs::remove_file(&file).unwrap();
        mknodat(CWD, &file, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        refuses(says);
        fs::remove_dir_all(&state).unwrap();
    }
}

/// A start while the directory of the configuration is away forgets nothing of its disks.
#[test]
fn state_of_a_directory_that_is_away_is_kept() {
    let stateful = Stateful::start();
    let path = |name: &str| stateful.ringdisk.path(name);
    let (beside, away) = (path("config.d"), path("away"));
    fs::create_dir(&beside).unwrap();
    let (file, socket) = (path("c.raw"), path("c.sock"));
    let text = format!("[[disk]]\nfile = {file:?}\nsocket = {socket:?}\n");
    fs::write(beside.join("c.toml"), text).unwrap();
    stateful.ringdisk.json(&["reload"]);
    stateful
        .ringdisk
        .json(&["replace", "c", path("d.raw").to_str().unwrap()]);
    fs::rename(&beside, &away).unwrap();
    let arguments = [
        format!("--state={}", path("state").display()),
        format!("--config={}", path("config.toml").display()),
    ];
    stateful.ringdisk.server.signal(Signal::KILL);
    for is_file in [false, true] {
        if is_file {
            fs::write(&beside, "").unwrap();
        }
        let refused = loop {
            let started = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments);
            let refused = started.err().unwrap().to_string();
            if !refused.contains("in use") {
                break refused;
            }
        };
        assert!(
            refused.contains("was part of the configuration"),
            "{refused}"
        );
    }
    fs::remove_file(&beside).unwrap();
    fs::rename(&away, &beside).unwrap();
    let stateful = stateful.restart();
    let moved = stateful.disk("c")["file"].as_str().unwrap().to_owned();
    assert!(moved.ends_with("d.raw"), "{moved}");
}
