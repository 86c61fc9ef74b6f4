//! What depends on a disk stays when a reload has to restart it, or the reload is refused; and when it is detached.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig};

use super::host_cpus::kill;
use super::server::Controlled;
use crate::support::{content, wait_until};

/// The offset of the write cache in the configuration space.
const WCE: u32 = 32;

fn text(dir: &Path, options: &str, exports: &str) -> String {
    let disk = |name: &str, options: &str| {
        let (file, socket) = (
            dir.join(format!("{name}.raw")),
            dir.join(format!("{name}.sock")),
        );
        let (file, socket) = (file.display(), socket.display());
        format!("[[disk]]\nfile = \"{file}\"\nsocket = \"{socket}\"\n{options}\n")
    };
    let nbd = format!("nbd = \"{}\"\n", dir.join("nbd.sock").display());
    nbd + &disk("a", options) + &disk("b", "queues = 1") + exports
}

fn start(options: &str, exports: &str) -> Controlled {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for name in ["a.raw", "b.raw"] {
        fs::write(dir.path().join(name), content(0, 4 << 20)).unwrap();
    }
    let file = dir.path().join("r.toml");
    fs::write(&file, text(dir.path(), options, exports)).unwrap();
    let config = format!("--config={}", file.display());
    Controlled::start_in(dir, &[config])
}

fn write(ringdisk: &Controlled, options: &str, exports: &str) {
    let text = text(ringdisk.dir.path(), options, exports);
    fs::write(ringdisk.path("r.toml"), text).unwrap();
}

/// The names of the exports, with their disks.
fn exports(ringdisk: &Controlled) -> Vec<(String, String)> {
    let listed = ringdisk.json(&["export"]);
    let exports = listed.as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    exports
        .map(|e| (text(&e["name"]), text(&e["disk"])))
        .collect()
}

fn device(ringdisk: &Controlled) -> Device {
    Device::connect(ringdisk.path("a.sock"), &DeviceConfig::default()).unwrap()
}

fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
    all.iter()
        .map(|(a, b)| ((*a).into(), (*b).into()))
        .collect()
}

/// The guest would go on without flushes, and lose what it has written at the next crash.
#[test]
fn restarted_disk_keeps_exports_and_the_write_cache() {
    let export = "[[export]]\ndisk = \"a\"\n";
    let ringdisk = start("queues = 2", export);
    ringdisk.json(&["export", "a", "--name", "more"]);
    let mut guest = device(&ringdisk);
    assert_eq!(guest.frontend.config(WCE, 1).unwrap(), [1]);
    guest.frontend.set_config(WCE, &[0]).unwrap();
    write(&ringdisk, "queues = 1", export);
    ringdisk.json(&["reload"]);
    assert!(guest.config().is_err(), "the disk was not restarted");
    let mut guest = device(&ringdisk);
    assert_eq!(guest.frontend.config(WCE, 1).unwrap(), [0]);
    assert_eq!(exports(&ringdisk), pairs(&[("a", "a"), ("more", "a")]));

    // The same after a detach, which ends exports only by force.
    drop(guest);
    ringdisk
        .ringdisk(&["detach", "a"])
        .assert_fails(1, &["NBD export"]);
    ringdisk.json(&["detach", "a", "--force"]);
    let socket = ringdisk.path("a.sock");
    let disk = format!(
        "{},socket={}",
        ringdisk.path("a.raw").display(),
        socket.display()
    );
    ringdisk.json(&["attach", &disk]);
    assert_eq!(device(&ringdisk).frontend.config(WCE, 1).unwrap(), [0]);
}

/// A disk that only gets another name, by a reload or an upgrade.
#[test]
fn renamed_disk_keeps_exports_of_commands_and_stays_detached() {
    for command in [&["reload"][..], &["upgrade"]] {
        let export = "[[export]]\ndisk = \"a\"\nname = \"configured\"\n";
        let ringdisk = start("queues = 1", export);
        ringdisk.json(&["export", "a", "--name", "more"]);
        let before = fs::read_to_string(ringdisk.path("r.toml")).unwrap();
        let name = |name: &str| {
            let text = before.replacen("[[disk]]", &format!("[[disk]]\nname = \"{name}\""), 1);
            let text = text.replace("disk = \"a\"", &format!("disk = \"{name}\""));
            fs::write(ringdisk.path("r.toml"), text).unwrap();
        };
        name("c");
        let reply = ringdisk.json(command);
        let now = pairs(&[("configured", "c"), ("more", "c")]);
        wait_until("the exports", || exports(&ringdisk) == now);
        let left_out = reply["left-out"].to_string();
        assert!(!left_out.contains("no longer configured"), "{left_out}");
        assert_eq!(
            device(&ringdisk).queues[0].read(8, 512).unwrap(),
            content(8, 512)
        );
        if command == ["upgrade"] {
            kill(&reply);
        }
    }

    // One that is detached stays so, and its export waits for it.
    for command in [&["reload"][..], &["upgrade"]] {
        let export = "[[export]]\ndisk = \"a\"\n";
        let ringdisk = start("queues = 1", export);
        ringdisk.json(&["detach", "a", "--force"]);
        let before = fs::read_to_string(ringdisk.path("r.toml")).unwrap();
        let after = before.replacen("[[disk]]", "[[disk]]\nname = \"c\"", 1);
        let after = after.replace("disk = \"a\"", "disk = \"c\"");
        fs::write(ringdisk.path("r.toml"), after).unwrap();
        let reply = ringdisk.json(command);
        let said = reply["left-out"].to_string();
        let is_said = said.contains("disk c: was detached by command");
        assert!(is_said || command == ["upgrade"], "{said}");
        ringdisk.json(&["reload"]);
        assert_eq!(ringdisk.disk("c"), Value::Null, "{command:?}");
        assert_eq!(exports(&ringdisk), pairs(&[]));
        if command == ["upgrade"] {
            kill(&reply);
        }
    }
}

/// Exports of commands follow a disk whose name is given to another one.
#[test]
fn exports_of_commands_show_the_same_data_when_names_are_exchanged() {
    let nbd = |dir: &Path| format!("nbd = \"{}\"\n", dir.join("nbd.sock").display());
    let disk = |dir: &Path, name: &str, file: &str| {
        let dir = dir.display();
        format!(
            "[[disk]]\nname = \"{name}\"\nfile = \"{dir}/{file}.raw\"\nsocket = \"{dir}/{file}.sock\"\nqueues = 1\n"
        )
    };
    for names in [
        &[("b", "a"), ("a", "b")][..],
        &[("old", "a"), ("a", "c"), ("b", "b")],
    ] {
        let ringdisk = start("queues = 1", "");
        ringdisk.file("c.raw", 4 << 20);
        let dir = ringdisk.dir.path();
        for name in ["a", "b"] {
            ringdisk.json(&["export", name, "--name", &format!("of-{name}")]);
        }
        let text: String = names
            .iter()
            .map(|(name, file)| disk(dir, name, file))
            .collect();
        fs::write(ringdisk.path("r.toml"), nbd(dir) + &text).unwrap();
        ringdisk.json(&["reload"]);
        let now = exports(&ringdisk);
        assert_eq!(now.len(), 2, "{names:?}: {now:?}");
        for (export, node) in now {
            let its = export.replace("of-", "");
            let file = ringdisk.path(&format!("{its}.raw"));
            assert_eq!(
                ringdisk.disk(&node)["file"],
                file.to_str().unwrap(),
                "{names:?}"
            );
        }
    }
}

/// The name of a disk is given to another VM's, and the disk is not configured any more.
#[test]
fn exports_of_commands_end_with_their_disk() {
    let ringdisk = start("queues = 1", "");
    ringdisk.file("c.raw", 4 << 20);
    ringdisk.json(&["export", "a", "--name", "of-a"]);
    let text = fs::read_to_string(ringdisk.path("r.toml")).unwrap();
    let text = text.replacen("[[disk]]", "[[disk]]\nname = \"a\"", 1);
    let text = text.replace("a.raw", "c.raw").replace("a.sock", "c.sock");
    fs::write(ringdisk.path("r.toml"), text).unwrap();
    let reply = ringdisk.json(&["reload"]);
    let said = reply["left-out"].to_string();
    assert!(
        said.contains("disk a: is another disk now, and with it ended: NBD export 'of-a'"),
        "{said}"
    );
    assert_eq!(exports(&ringdisk), pairs(&[]));
}

#[test]
fn restart_that_would_lose_temporary_bitmaps_is_refused() {
    let ringdisk = start("queues = 2", "");
    ringdisk.json(&["bitmap", "add", "a", "nightly"]);
    let mut guest = device(&ringdisk);
    write(&ringdisk, "queues = 1", "");
    let refused = ringdisk.ringdisk(&["reload"]);
    refused.assert_fails(1, &["'a'", "nightly", "nothing has been changed"]);
    let refused = ringdisk.ringdisk(&["detach", "b"]);
    assert_eq!(refused.code, Some(0), "{refused:?}");
    assert_eq!(guest.queues[0].read(8, 512).unwrap(), content(8, 512));
    drop(guest);
    let refused = ringdisk.ringdisk(&["detach", "a"]);
    refused.assert_fails(1, &["temporary bitmaps (nightly)"]);
    ringdisk.json(&["bitmap", "remove", "a", "nightly"]);
    ringdisk.json(&["reload"]);
    assert_eq!(ringdisk.disk("a")["queues"], 1);
}

/// What a removed disk takes along is said, and what is configured for it returns with it.
#[test]
fn removed_disk_and_changed_exports_are_as_configured() {
    let export = "[[export]]\ndisk = \"a\"\n";
    let ringdisk = start("queues = 1", export);
    ringdisk.json(&["bitmap", "add", "a", "nightly"]);
    let whole = fs::read_to_string(ringdisk.path("r.toml")).unwrap();
    let at = whole.find("[[disk]]").unwrap();
    let second = at + 1 + whole[at + 1..].find("[[disk]]").unwrap();
    let only_b = format!("{}{}", &whole[..at], &whole[second..].replace(export, ""));
    fs::write(ringdisk.path("r.toml"), only_b).unwrap();
    let reply = ringdisk.json(&["reload"]);
    let said = reply["left-out"][0].as_str().unwrap();
    for words in ["disk a: ", "NBD export 'a'", "temporary bitmap 'nightly'"] {
        assert!(said.contains(words), "{said}");
    }
    fs::write(ringdisk.path("r.toml"), &whole).unwrap();
    assert_eq!(ringdisk.json(&["reload"]), json!({}));
    assert_eq!(exports(&ringdisk), pairs(&[("a", "a")]));

    // Changed exports take effect; one that a command has removed does not return with an unchanged file.
    write(
        &ringdisk,
        "queues = 1",
        &(export.to_owned() + "[[export]]\ndisk = \"b\"\n"),
    );
    ringdisk.json(&["reload"]);
    assert_eq!(exports(&ringdisk), pairs(&[("a", "a"), ("b", "b")]));
    ringdisk.json(&["export", "b", "--remove"]);
    ringdisk.json(&["reload"]);
    assert_eq!(exports(&ringdisk), pairs(&[("a", "a")]));
    write(&ringdisk, "queues = 1", "");
    ringdisk.json(&["reload"]);
    assert_eq!(exports(&ringdisk), pairs(&[]));
}

/// Whichever of the commands is first, the disk is served afterwards.
#[test]
fn a_restart_and_a_change_of_bitmaps_exclude_each_other() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for name in ["a.raw", "b.raw"] {
        fs::write(dir.path().join(name), content(0, 4 << 20)).unwrap();
    }
    let file = dir.path().join("r.toml");
    fs::write(&file, text(dir.path(), "cache = \"none\"", "")).unwrap();
    let arguments = [
        format!("--config={}", file.display()),
        format!("--state={}", dir.path().join("state").display()),
    ];
    let ringdisk = Controlled::start_in(dir, &arguments);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for name in ["one", "two"] {
            let (ringdisk, is_over) = (&ringdisk, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    for change in [
                        &["add", "a", name, "--persistent"][..],
                        &["remove", "a", name],
                    ] {
                        ringdisk.ringdisk(&[&["bitmap"], change].concat());
                    }
                }
            });
        }
        let served: Vec<_> = (0..30)
            .map(|round| {
                let cache = ["writeback", "none"][round % 2];
                write(&ringdisk, &format!("cache = \"{cache}\""), "");
                let reloaded = ringdisk.ringdisk(&["reload"]);
                let can_connect = UnixStream::connect(ringdisk.path("a.sock")).is_ok();
                (can_connect, reloaded)
            })
            .collect();
        is_over.store(true, Ordering::Relaxed);
        let done = served
            .iter()
            .filter(|(_, reloaded)| reloaded.code == Some(0));
        assert!(done.count() > 0, "{served:?}");
        assert!(
            served.iter().all(|(can_connect, _)| *can_connect),
            "{served:?}"
        );
    });
    ringdisk.json(&["reload"]);
    device(&ringdisk);
}

/// What one reload does after its changes does not keep the files of disks that the next one restarts.
#[test]
fn reloads_follow_each_other_closely() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().to_owned();
    let configure = |changed: usize, cache: &str| {
        let disk = |i: usize| {
            let file = path.join(format!("{i}.raw"));
            let cache = if i == changed { cache } else { "none" };
            let (file, socket) = (file.display(), path.join(format!("{i}.sock")));
            let socket = socket.display();
            format!(
                "[[disk]]\nfile = \"{file}\"\nsocket = \"{socket}\"\nqueues = 1\ncache = \"{cache}\"\n"
            )
        };
        let text: String = (0..6).map(disk).collect();
        // At once: a reload may be reading it.
        fs::write(path.join("new"), text).unwrap();
        fs::rename(path.join("new"), path.join("r.toml")).unwrap();
    };
    for i in 0..6 {
        fs::write(path.join(format!("{i}.raw")), content(0, 1 << 20)).unwrap();
    }
    configure(0, "none");
    let config = format!("--config={}", path.join("r.toml").display());
    let ringdisk = Controlled::start_in(dir, &[config]);
    for round in 0..60 {
        ringdisk.server.signal(Signal::HUP);
        thread::sleep(Duration::from_micros(500 * (round % 40)));
        configure(
            round as usize % 6,
            ["writeback", "none"][round as usize / 6 % 2],
        );
        ringdisk.json(&["reload"]);
        let disks = ringdisk.json(&["list"]);
        assert_eq!(disks.as_array().unwrap().len(), 6, "round {round}: {disks}");
    }
}

/// A reload starts the disk on the file that it has then, or changes nothing.
#[test]
fn a_restart_does_not_undo_a_move() {
    let ringdisk = start("cache = \"none\"", "");
    for name in ["one.raw", "two.raw"] {
        fs::write(ringdisk.path(name), content(0, 4 << 20)).unwrap();
    }
    let mut both = 0;
    for round in 0..40 {
        let cache = ["writeback", "none"][round % 2];
        write(&ringdisk, &format!("cache = \"{cache}\""), "");
        let file = ringdisk.path(["one.raw", "two.raw"][round % 2]);
        let file = file.to_str().unwrap();
        let (moved, reloaded) = thread::scope(|scope| {
            let moved = scope.spawn(|| {
                // While the reload prepares the disk, stops it, or starts it.
                thread::sleep(Duration::from_micros(round as u64 * 500));
                ringdisk.ringdisk(&["replace", "a", file])
            });
            let reloaded = ringdisk.ringdisk(&["reload"]);
            (moved.join().unwrap(), reloaded)
        });
        let disks = ringdisk.json(&["list"]);
        let disk = disks
            .as_array()
            .unwrap()
            .iter()
            .find(|disk| disk["name"] == "a");
        let is_there = disk.is_some_and(|disk| disk["file"] == file);
        assert!(
            is_there || moved.code != Some(0),
            "{moved:?} {reloaded:?} {disks}"
        );
        both += u32::from(moved.code == Some(0) && reloaded.code == Some(0));
    }
    println!("{both} of 40 reloads and moves have both succeeded");
    ringdisk.json(&["reload"]);
    device(&ringdisk);
}
