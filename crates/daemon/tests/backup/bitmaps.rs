//! Incremental backups.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use testkit::random::Random;

use super::{BLOCK, DISK_BYTES, Served, run, text, write};

/// The dirty ranges of an export.
fn dirty(served: &Served, export: &str, bitmap: &str) -> Vec<(u64, u64)> {
    let context = format!("--map=qemu:dirty-bitmap:{bitmap}");
    let map = run("nbdinfo", &["--json", &context, &served.uri(export)]);
    let map: Vec<Value> = serde_json::from_str(&map).unwrap();
    let number = |extent: &Value, key: &str| extent[key].as_u64().unwrap();
    let all: u64 = map.iter().map(|extent| number(extent, "length")).sum();
    assert_eq!(all, DISK_BYTES);
    let dirty = map.iter().filter(|extent| number(extent, "type") == 1);
    dirty
        .map(|extent| (number(extent, "offset"), number(extent, "length")))
        .collect()
}

/// A full backup and what the increments add is the disk, for a raw disk and an image. One increment fails, and the next has
/// its changes, too.
#[test]
fn increments_add_up_to_the_disk() {
    let Some(mut served) = Served::start("increments_add_up_to_the_disk", &[]) else {
        return;
    };
    let mut random = Random(3);
    let mut devices = ["a", "b"].map(|name| served.connect(name));
    let mut backups = [const { Vec::new() }; 2];
    for round in 0..5u64 {
        let mut written = [BTreeSet::new(), BTreeSet::new()];
        for number in 0..50 {
            for (device, written) in devices.iter_mut().zip(&mut written) {
                let block = random.below(DISK_BYTES / BLOCK);
                write(device, 0, block, round * 1000 + number);
                written.insert(block);
            }
        }
        let begun = served.done(&["backup", "begin", "a", "b", "--bitmap=nightly"]);
        let moment = ["a", "b"].map(|disk| served.copy(&format!("{disk}-backup")));
        for (disk, name) in ["a", "b"].into_iter().enumerate() {
            let export = format!("{name}-backup");
            let info = &begun[disk];
            assert_eq!(
                info["bitmap-action"],
                if round == 0 { "new" } else { "used" }
            );
            if round == 0 {
                backups[disk] = served.copy(&export);
                continue;
            }
            let ranges = dirty(&served, &export, "nightly");
            let has = |block: &u64| {
                let mut all = ranges.iter();
                all.any(|&(at, len)| (at..at + len).contains(&(block * BLOCK)))
            };
            assert!(written[disk].iter().all(has), "a change is missing");
            if round == 2 {
                continue;
            }
            let dirty: u64 = ranges.iter().map(|(_, len)| len).sum();
            assert!(dirty < DISK_BYTES / 4, "{dirty}");
            for (at, len) in ranges {
                let range = at as usize..(at + len) as usize;
                backups[disk][range.clone()].copy_from_slice(&moment[disk][range]);
            }
            assert!(backups[disk] == moment[disk], "round {round}, disk {name}");
        }
        // Changes during the backup belong to the next one.
        for device in &mut devices {
            write(device, 1, 77, round + 1);
        }
        let end: &[&str] = match round {
            2 => &["backup", "end", "--failed"],
            _ => &["backup", "end"],
        };
        served.done(end);
        if round == 3 {
            // The bitmaps are stored, and go on.
            drop(devices);
            served.server.terminate().unwrap();
            served.restart();
            devices = ["a", "b"].map(|name| served.connect(name));
        }
    }
}

/// As OpenNebula does it: an overlay on the export reads what is dirty, and is put on the backup before.
#[test]
fn an_increment_is_a_qcow2_overlay() {
    let Some(served) = Served::start("an_increment_is_a_qcow2_overlay", &[]) else {
        return;
    };
    let mut device = served.connect("b");
    for block in 0..100 {
        write(&mut device, 0, block * 7, 1 + block);
    }
    served.done(&["backup", "begin", "b", "--bitmap=one"]);
    let full = served.path("full.qcow2");
    let uri = served.uri("b-backup");
    run(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", &uri, text(&full)],
    );
    served.done(&["backup", "end"]);
    for block in 50..150 {
        write(&mut device, 0, block * 11, 1000 + block);
    }
    served.done(&["backup", "begin", "b", "--bitmap=one"]);
    let moment = served.copy("b-backup");
    let increment = served.path("increment.qcow2");
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        &uri,
        text(&increment),
    ];
    run("qemu-img", &create);
    let ranges = dirty(&served, "b-backup", "one");
    assert!(!ranges.is_empty());
    let mut commands = vec!["-C".to_owned()];
    for (at, len) in ranges {
        commands.extend(["-c".into(), format!("read {at} {len}")]);
    }
    commands.push(text(&increment).into());
    let commands: Vec<_> = commands.iter().map(String::as_str).collect();
    run("qemu-io", &commands);
    // QEMU's view of the bitmap is that of libnbd.
    let options = format!(
        "driver=nbd,server.type=unix,server.path={},export=b-backup,x-dirty-bitmap=qemu:dirty-bitmap:one",
        served.path("nbd.sock").display()
    );
    let map = run(
        "qemu-img",
        &["map", "--output=json", "--image-opts", &options],
    );
    let map: Vec<Value> = serde_json::from_str(&map).unwrap();
    let of_qemu: Vec<_> = map
        .iter()
        .filter(|extent| extent["data"] == false)
        .map(|extent| {
            (
                extent["start"].as_u64().unwrap(),
                extent["length"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(of_qemu, dirty(&served, "b-backup", "one"));
    served.done(&["backup", "end"]);
    let rebase = [
        "rebase",
        "-u",
        "-F",
        "qcow2",
        "-b",
        text(&full),
        text(&increment),
    ];
    run("qemu-img", &rebase);
    let restored = served.path("restored.raw");
    run(
        "qemu-img",
        &["convert", "-O", "raw", text(&increment), text(&restored)],
    );
    assert!(std::fs::read(&restored).unwrap() == moment);
}

/// The commands of Proxmox' QEMU.
#[test]
fn proxmox_commands_have_bitmap_modes() {
    let Some(served) = Served::start("proxmox_commands_have_bitmap_modes", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    let client = || {
        let path = served.path("control.qmp");
        control::Client::connect(path, std::time::Duration::from_secs(60)).unwrap()
    };
    let setup = |mode: &str| {
        let devices = json!([{ "device": "a", "bitmap-mode": mode, "bitmap-name": "pve" }]);
        let arguments = json!({ "target-id": "pbs", "devices": devices });
        client().call("backup-access-setup", arguments)
    };
    let teardown = |success: bool| {
        let arguments = json!({ "target-id": "pbs", "success": success });
        client().call("backup-access-teardown", arguments)
    };
    let copied = || client().call("query-pbs-bitmap-info", json!({})).unwrap();
    let support = client().call("query-proxmox-support", json!({})).unwrap();
    assert_eq!(support["backup-access-api"], true);
    assert_eq!(support["query-bitmap-info"], true);
    assert_eq!(copied(), json!([]));

    // There is no bitmap: all is copied, and the bitmap says so.
    let info = setup("use").unwrap();
    let expected = json!([{
        "node-name": "a-pbs", "device": "a", "size": DISK_BYTES,
        "bitmap-node-name": "a", "bitmap-name": "pve", "bitmap-action": "missing-recreated",
        "x-ringdisk-full": "missing",
    }]);
    assert_eq!(info, expected);
    assert_eq!(
        copied(),
        json!([{ "drive": "a", "action": "missing-recreated", "size": DISK_BYTES, "dirty": DISK_BYTES }])
    );
    let export = |info: &Value| {
        let bitmap = json!({ "node": info[0]["bitmap-node-name"], "name": info[0]["bitmap-name"] });
        let export = json!({
            "type": "nbd", "id": "e", "node-name": info[0]["node-name"], "name": "drive", "writable": true,
            "bitmaps": [bitmap],
        });
        client().call("block-export-add", export).unwrap();
    };
    export(&info);
    assert_eq!(dirty(&served, "drive", "pve"), [(0, DISK_BYTES)]);
    teardown(false).unwrap();
    assert_eq!(served.done(&["bitmap", "list", "a"])["a"], json!([]));
    // A client cleans up after a setup that has failed.
    teardown(false).unwrap();
    assert!(teardown(true).is_err(), "it was no success");

    let info = setup("none").unwrap();
    assert_eq!(
        info,
        json!([{ "node-name": "a-pbs", "device": "a", "size": DISK_BYTES, "x-ringdisk-full": "wanted" }])
    );
    assert_eq!(copied()[0]["action"], "not-used");
    teardown(true).unwrap();

    let info = setup("new").unwrap();
    assert_eq!(info[0]["bitmap-action"], "new");
    assert!(setup("new").is_err(), "an id names one backup");
    write(&mut device, 0, 5, 1);
    export(&info);
    assert_eq!(served.copy("drive")[5 * BLOCK as usize], 0);
    teardown(true).unwrap();
    // It records what has changed since the moment.
    let info = setup("use").unwrap();
    assert_eq!(info[0]["bitmap-name"], "pve");
    assert_eq!(info[0]["bitmap-action"], "used");
    assert_eq!(copied()[0]["dirty"], 65536);
    teardown(false).unwrap();
    let listed = served.done(&["bitmap", "list", "a"]);
    assert_eq!(listed["a"].as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(listed["a"][0]["name"], "pve");
    assert_eq!(listed["a"][0]["count"], 65536);
    assert_eq!(listed["a"][0]["persistent"], true);
    // It lacks changes.
    served.done(&["bitmap", "disable", "a", "pve"]);
    let info = setup("use").unwrap();
    assert_eq!(info[0]["bitmap-action"], "invalid");
    assert_eq!(copied()[0]["dirty"], DISK_BYTES);
    teardown(false).unwrap();
}

/// A backup replaces a bitmap that cannot be used by one of the same granularity.
#[test]
fn backup_keeps_the_granularity_of_a_bitmap() {
    let Some(mut served) = Served::start("backup_keeps_the_granularity_of_a_bitmap", &[]) else {
        return;
    };
    served.done(&[
        "bitmap",
        "add",
        "a",
        "n",
        "--persistent",
        "--granularity=4k",
    ]);
    assert!(served.server.terminate().unwrap().success());
    let file = std::fs::File::options()
        .write(true)
        .open(served.path("a.raw"));
    file.unwrap().set_len(DISK_BYTES + BLOCK).unwrap();
    served.restart();
    let bitmap = || served.done(&["bitmap", "list", "a"])["a"][0].clone();
    let before = bitmap();
    assert_eq!(
        (&before["inconsistent"], &before["granularity"]),
        (&json!(true), &json!(4096))
    );
    let begun = served.done(&["backup", "begin", "a", "--bitmap=n"]);
    assert!(!begun.to_string().contains("incremental"), "{begun}");
    served.done(&["backup", "end"]);
    let after = bitmap();
    assert_eq!(
        (&after["inconsistent"], &after["granularity"]),
        (&Value::Null, &json!(4096))
    );
}
