//! Dirty bitmaps changed while guests write: single changes, and groups at one moment for several disks.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use control::{Client, ClientError};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::qemu_img as qemu;
use testkit::server::wait_for_exit;

use super::server::Controlled;

const OK: u8 = 0;

/// Two disks in images of 64 MiB; the first has a stored bitmap.
fn start(test: &str) -> Option<(Controlled, [Device; 2])> {
    if !qemu::is_there(test) {
        return None;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name);
    for name in ["a", "b"] {
        qemu::img(dir.path(), &format!("create -q -f qcow2 {name}.qcow2 64M"));
    }
    qemu::img(dir.path(), "bitmap --add -g 4k a.qcow2 stored");
    let disk = |name: &str| {
        let (file, socket) = (
            path(&format!("{name}.qcow2")),
            path(&format!("{name}.sock")),
        );
        let (file, socket) = (file.display(), socket.display());
        format!("file={file},name={name},socket={socket},queues=2")
    };
    let sockets = ["a.sock", "b.sock"].map(path);
    let disks = ["a", "b"].map(disk);
    let ringdisk = Controlled::start_in(dir, &disks);
    Some((ringdisk, sockets.map(|socket| connect(&socket))))
}

fn connect(socket: &Path) -> Device {
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    Device::connect(socket, &config).unwrap()
}

fn client(ringdisk: &Controlled) -> Client {
    Client::connect(ringdisk.control.clone(), Duration::from_secs(60)).unwrap()
}

fn call(ringdisk: &Controlled, command: &str, arguments: Value) -> Result<Value, String> {
    let reply = client(ringdisk).call(command, arguments);
    reply.map_err(|error| match error {
        ClientError::Refused { error, .. } => error.to_string(),
        error => panic!("{error}"),
    })
}

/// A bitmap as queries show it.
fn bitmap(ringdisk: &Controlled, disk: &str, name: &str) -> Value {
    let nodes = call(ringdisk, "query-named-block-nodes", json!({})).unwrap();
    let nodes = nodes.as_array().unwrap();
    let node = nodes.iter().find(|node| node["node-name"] == disk).unwrap();
    let mut bitmaps = node["dirty-bitmaps"].as_array().into_iter().flatten();
    let found = bitmaps.find(|bitmap| bitmap["name"] == name);
    found.cloned().unwrap_or(Value::Null)
}

fn count(ringdisk: &Controlled, disk: &str, name: &str) -> u64 {
    bitmap(ringdisk, disk, name)["count"].as_u64().unwrap()
}

fn write(device: &mut Device, at: u64) {
    assert_eq!(device.queues[0].write(at >> 9, &[1; 4096]), OK);
}

fn action(kind: &str, data: Value) -> Value {
    json!({ "type": kind, "data": data })
}

fn ringdisk_bitmap(ringdisk: &Controlled, arguments: &[&str]) -> String {
    let ran = ringdisk.ringdisk(&[&["bitmap"], arguments].concat());
    assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
    ran.out
}

#[test]
fn bitmaps_record_between_commands() {
    let Some((ringdisk, [mut a, _b])) = start("bitmaps_record_between_commands") else {
        return;
    };
    write(&mut a, 0);
    ringdisk_bitmap(&ringdisk, &["add", "a", "one", "--granularity", "4k"]);
    ringdisk_bitmap(&ringdisk, &["add", "a", "off", "--disabled"]);
    write(&mut a, 1 << 20);
    assert_eq!(a.queues[1].run(Op::Discard, (2 << 20) >> 9, 4096), OK);
    let zeroes = Op::WriteZeroes { unmap: false };
    assert_eq!(a.queues[1].run(zeroes, (3 << 20) >> 9, 4096), OK);
    let one = json!({
        "name": "one", "count": 3 * 4096, "granularity": 4096, "recording": true, "busy": false, "persistent": false,
    });
    assert_eq!(bitmap(&ringdisk, "a", "one"), one);
    assert_eq!(count(&ringdisk, "a", "stored"), 4 * 4096);
    // The default granularity is that of the clusters.
    let off = bitmap(&ringdisk, "a", "off");
    let off = ["granularity", "count", "recording"].map(|key| off[key].clone());
    assert_eq!(off, [json!(65536), json!(0), json!(false)]);

    ringdisk_bitmap(&ringdisk, &["disable", "a", "one"]);
    ringdisk_bitmap(&ringdisk, &["enable", "a", "off"]);
    write(&mut a, 4 << 20);
    assert_eq!(count(&ringdisk, "a", "one"), 3 * 4096);
    assert_eq!(count(&ringdisk, "a", "off"), 65536);
    ringdisk_bitmap(&ringdisk, &["merge", "a", "off", "--from", "one"]);
    assert_eq!(count(&ringdisk, "a", "off"), 4 * 65536);
    ringdisk_bitmap(&ringdisk, &["clear", "a", "off"]);
    ringdisk_bitmap(&ringdisk, &["remove", "a", "one"]);
    assert_eq!(count(&ringdisk, "a", "off"), 0);
    assert_eq!(bitmap(&ringdisk, "a", "one"), Value::Null);
    // A grown disk has a clean part.
    assert_eq!(ringdisk.ringdisk(&["resize", "a", "128M"]).code, Some(0));
    write(&mut a, 100 << 20);
    assert_eq!(count(&ringdisk, "a", "off"), 65536);
    let list = ringdisk_bitmap(&ringdisk, &["list", "a"]);
    assert!(
        list.contains("recording") && list.contains("temporary"),
        "{list}"
    );
    // One that becomes too large is lost, and no other.
    ringdisk_bitmap(&ringdisk, &["add", "a", "fine", "--granularity", "512"]);
    ringdisk_bitmap(&ringdisk, &["add", "a", "nightly", "--persistent"]);
    assert_eq!(ringdisk.ringdisk(&["resize", "a", "1T"]).code, Some(0));
    let is_lost = |name| bitmap(&ringdisk, "a", name)["inconsistent"] == true;
    assert!(is_lost("fine"));
    assert!(!["stored", "off", "nightly"].into_iter().any(is_lost));
}

#[test]
fn bad_changes_are_refused() {
    let Some((ringdisk, _devices)) = start("bad_changes_are_refused") else {
        return;
    };
    let of = |node: &str, name: &str| json!({ "node": node, "name": name });
    let refused = |command: &str, arguments: Value, words: &str| {
        let command = format!("block-dirty-bitmap-{command}");
        let error = call(&ringdisk, &command, arguments).unwrap_err();
        assert!(error.contains(words), "{error}");
    };
    refused("add", of("c", "x"), "Cannot find device='c'");
    refused("clear", of("c", "x"), "Node 'c' not found");
    refused("add", of("a", "stored"), "already exists");
    refused("add", of("a", ""), "cannot be empty");
    refused("add", of("a", &"x".repeat(1024)), "too long");
    refused("add", of("a", "x\0y"), "cannot contain NUL");
    let with = |key: &str, value: Value| {
        let mut arguments = of("a", "x");
        arguments[key] = value;
        arguments
    };
    refused("add", with("granularity", json!(1000)), "power of 2");
    refused("add", with("granularity", json!(256)), "power of 2");
    refused("clear", of("a", "x"), "not found");
    call(&ringdisk, "block-dirty-bitmap-add", of("b", "x")).unwrap();
    assert_eq!(ringdisk.ringdisk(&["resize", "b", "65M"]).code, Some(0));
    let merge = json!({ "node": "a", "target": "stored", "bitmaps": [of("b", "x")] });
    refused("merge", merge, "different sizes");
    let raw = ringdisk.file("raw.raw", 1 << 20);
    for (options, words) in [
        ("", "there is no state directory"),
        (",readonly=on", "disk 'raw' is read-only"),
    ] {
        let raw = format!("file={},name=raw{options}", raw.display());
        assert_eq!(ringdisk.ringdisk(&["attach", &raw]).code, Some(0));
        let mut arguments = of("raw", "x");
        arguments["persistent"] = true.into();
        refused("add", arguments, words);
        assert_eq!(ringdisk.ringdisk(&["detach", "raw"]).code, Some(0));
    }
}

#[test]
fn stored_bitmaps_are_changed_and_stored() {
    let Some((mut ringdisk, [mut a, b])) = start("stored_bitmaps_are_changed_and_stored") else {
        return;
    };
    write(&mut a, 0);
    ringdisk_bitmap(&ringdisk, &["clear", "a", "stored"]);
    write(&mut a, 1 << 20);
    ringdisk_bitmap(&ringdisk, &["disable", "a", "stored"]);
    write(&mut a, 2 << 20);
    drop((a, b));
    assert!(ringdisk.server.terminate().unwrap().success());
    let dir = ringdisk.dir.path();
    assert_eq!(
        qemu::dirty(dir, "a.qcow2", "stored"),
        std::slice::from_ref(&(1 << 20..(1 << 20) + 4096))
    );
    let info = Command::new("qemu-img")
        .arg("info")
        .arg(dir.join("a.qcow2"))
        .output();
    let info = String::from_utf8(info.unwrap().stdout).unwrap();
    assert!(!info.contains("auto") && !info.contains("in-use"), "{info}");
    qemu::check(dir, "a.qcow2", false);

    // What a command has changed must not come back as it was before.
    let ringdisk = ringdisk.restart();
    ringdisk_bitmap(&ringdisk, &["enable", "a", "stored"]);
    let ringdisk = ringdisk.kill_and_restart();
    let list = ringdisk_bitmap(&ringdisk, &["list"]);
    assert!(list.contains("inconsistent"), "{list}");
    let stored = json!({ "node": "a", "name": "stored" });
    let error = call(&ringdisk, "block-dirty-bitmap-clear", stored.clone()).unwrap_err();
    assert!(error.contains("inconsistent"), "{error}");
    let merge = json!({ "node": "a", "target": "stored", "bitmaps": [] });
    let error = call(&ringdisk, "block-dirty-bitmap-merge", merge).unwrap_err();
    assert!(error.contains("inconsistent"), "{error}");
    ringdisk_bitmap(&ringdisk, &["remove", "a", "stored"]);
    assert_eq!(bitmap(&ringdisk, "a", "stored"), Value::Null);
    // Durably.
    let mut ringdisk = ringdisk.kill_and_restart();
    assert_eq!(bitmap(&ringdisk, "a", "stored"), Value::Null);
    assert!(ringdisk.server.terminate().unwrap().success());
    qemu::check(ringdisk.dir.path(), "a.qcow2", false);
}

#[test]
fn persistent_bitmaps_are_stored_and_killed_ones_inconsistent() {
    let Some((mut ringdisk, [mut a, b])) =
        start("persistent_bitmaps_are_stored_and_killed_ones_inconsistent")
    else {
        return;
    };
    write(&mut a, 0);
    let add = ["add", "a", "new", "--granularity", "4k", "--persistent"];
    ringdisk_bitmap(&ringdisk, &add);
    ringdisk_bitmap(&ringdisk, &["add", "b", "of-b", "--persistent"]);
    ringdisk_bitmap(&ringdisk, &["add", "a", "temporary"]);
    write(&mut a, 1 << 20);
    let list = ringdisk.json(&["bitmap", "list", "a"]);
    let kinds: Vec<_> = list["a"].as_array().unwrap().iter().collect();
    let kind = |name: &str| {
        let found = kinds.iter().find(|bitmap| bitmap["name"] == name);
        found.unwrap()["persistent"].clone()
    };
    assert_eq!(
        [kind("new"), kind("temporary")],
        [json!(true), json!(false)]
    );
    // An upgrade stores them, and the next process continues.
    let upgraded = ringdisk.json(&["upgrade"]);
    let pid = i32::try_from(upgraded["pid"].as_u64().unwrap()).unwrap();
    write(&mut a, 2 << 20);
    assert_eq!(count(&ringdisk, "a", "new"), 2 * 4096);
    assert_eq!(count(&ringdisk, "a", "stored"), 3 * 4096);
    // So does a temporary one.
    assert_eq!(count(&ringdisk, "a", "temporary"), 2 * 65536);
    drop((a, b));
    ringdisk.server.ended().unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    wait_for_exit(pid as u32);
    let dir = ringdisk.dir.path();
    let ranges = [1_u64 << 20, 2 << 20].map(|at| at..at + 4096);
    assert_eq!(qemu::dirty(dir, "a.qcow2", "new"), ranges);
    assert_eq!(qemu::dirty(dir, "b.qcow2", "of-b"), []);
    for image in ["a.qcow2", "b.qcow2"] {
        qemu::check(dir, image, false);
    }

    let ringdisk = ringdisk.restart();
    let mut a = connect(&ringdisk.path("a.sock"));
    write(&mut a, 3 << 20);
    let added = ["add", "a", "late", "--persistent"];
    ringdisk_bitmap(&ringdisk, &added);
    drop(a);
    let ringdisk = ringdisk.kill_and_restart();
    // What was written to is inconsistent, what was never stored is gone, and the other disk's is as it was.
    for name in ["new", "stored"] {
        assert_eq!(bitmap(&ringdisk, "a", name)["inconsistent"], json!(true));
    }
    assert_eq!(bitmap(&ringdisk, "a", "late"), Value::Null);
    assert_eq!(bitmap(&ringdisk, "b", "of-b")["recording"], json!(true));
}

#[test]
fn groups_happen_whole_and_at_one_moment() {
    let Some((ringdisk, [mut a, mut b])) = start("groups_happen_whole_and_at_one_moment") else {
        return;
    };
    let of = |node: &str, name: &str| json!({ "node": node, "name": name, "granularity": 4096 });
    let transaction =
        |actions: Value| call(&ringdisk, "transaction", json!({ "actions": actions }));
    write(&mut a, 0);
    let clear = action(
        "block-dirty-bitmap-clear",
        json!({ "node": "a", "name": "stored" }),
    );
    let add = action("block-dirty-bitmap-add", of("b", "x"));
    let missing = action(
        "block-dirty-bitmap-disable",
        json!({ "node": "b", "name": "y" }),
    );
    let error = transaction(json!([clear, add, missing])).unwrap_err();
    assert!(error.contains("not found"), "{error}");
    let error = transaction(json!([clear, add, action("abort", json!({}))])).unwrap_err();
    assert!(error.contains("Abort"), "{error}");
    assert_eq!(count(&ringdisk, "a", "stored"), 4096);
    assert_eq!(bitmap(&ringdisk, "b", "x"), Value::Null);

    // A guest writes to one disk, and after that to the other. Whatever the moment is, the second disk has at most one
    // recorded write more: the one whose first half came before.
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let at = written.fetch_add(1, Ordering::Relaxed) % 4096 * 4096;
                write(&mut a, at);
                write(&mut b, at);
            }
        });
        for round in 0..20 {
            let before = written.load(Ordering::Relaxed);
            while written.load(Ordering::Relaxed) < before + 20 {
                std::thread::yield_now();
            }
            let name = format!("r{round}");
            let add = |node| action("block-dirty-bitmap-add", of(node, &name));
            transaction(json!([add("a"), add("b")])).unwrap();
            let since = written.load(Ordering::Relaxed);
            while written.load(Ordering::Relaxed) < since + 20 {
                std::thread::yield_now();
            }
            let disable = |node: &str| {
                action(
                    "block-dirty-bitmap-disable",
                    json!({ "node": node, "name": name }),
                )
            };
            transaction(json!([disable("a"), disable("b")])).unwrap();
            let [in_a, in_b] = ["a", "b"].map(|disk| count(&ringdisk, disk, &name) / 4096);
            // At the end, one may have its first half only.
            assert!(
                in_a >= 18 && in_a.abs_diff(in_b) <= 1,
                "round {round}: {in_a} {in_b}"
            );
        }
        stop.store(true, Ordering::Relaxed);
    });
}
