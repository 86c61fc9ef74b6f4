//! Backups that fail: the guest goes on, and the next backup has everything.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::thread;

use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::server::wait_for_exit;

use super::{BLOCK, DISK_BYTES, Served, numbers, write};

fn bits(served: &Served, disk: &str, bitmap: &str) -> u64 {
    let listed = served.done(&["bitmap", "list", disk]);
    let bitmaps = listed[disk].as_array().unwrap();
    let found = bitmaps.iter().find(|b| b["name"] == bitmap);
    found.unwrap_or_else(|| panic!("{listed}"))["count"]
        .as_u64()
        .unwrap()
}

/// Without a directory, old data must fit into memory.
#[test]
fn a_full_fleece_ends_the_backup_only() {
    let Some(served) = Served::start("a_full_fleece_ends_the_backup_only", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    served.done(&["bitmap", "add", "a", "kept", "--persistent"]);
    for block in 0..2048 {
        write(&mut device, 0, block, 1);
    }
    let before = bits(&served, "a", "kept");
    served.done(&["backup", "begin", "a", "--bitmap=kept", "--memory=4M"]);
    for block in 0..2048 {
        write(&mut device, 0, block, 2);
    }
    let listed = served.done(&["backup", "list"]);
    let error = listed[0]["error"].as_str().unwrap();
    assert!(error.contains("memory is full"), "{error}");
    let uri = served.uri("a-backup");
    let copied = Command::new("nbdcopy")
        .args([&uri, "null:"])
        .output()
        .unwrap();
    assert!(!copied.status.success());
    served.refused(&["backup", "end"], "has failed");
    assert_eq!(bits(&served, "a", "kept"), before);
    assert_eq!(served.done(&["backup", "list"]), json!([]));
    // The next one works.
    served.done(&["backup", "begin", "a", "--bitmap=kept"]);
    let content = numbers(&served.copy("a-backup"));
    assert!(content[..2048].iter().all(|&number| number == 2));
    served.done(&["backup", "end"]);
    assert_eq!(bits(&served, "a", "kept"), 0);
}

/// Old data beyond the memory goes to a file.
#[test]
fn a_directory_takes_old_data() {
    let Some(served) = Served::start("a_directory_takes_old_data", &["--fleece=fleece"]) else {
        return;
    };
    let mut devices = ["a", "b"].map(|name| served.connect(name));
    for device in &mut devices {
        for block in 0..4096 {
            write(device, 0, block, block + 1);
        }
    }
    served.done(&["backup", "begin", "a", "b", "--memory=4M"]);
    for device in &mut devices {
        for block in 0..4096 {
            write(device, 0, block, 9_999_999);
        }
    }
    let listed = served.done(&["backup", "list"]);
    assert!(listed[0]["file"].as_u64().unwrap() >= 16 << 20, "{listed}");
    for export in ["a-backup", "b-backup"] {
        let content = numbers(&served.copy(export));
        assert!((0..4096).all(|block| content[block] == block as u64 + 1));
    }
    served.done(&["backup", "end"]);
}

#[test]
fn disks_with_backups_are_not_moved_or_detached() {
    let Some(served) = Served::start("disks_with_backups_are_not_moved_or_detached", &[]) else {
        return;
    };
    served.done(&["backup", "begin", "a", "--bitmap=x"]);
    served.refused(
        &["backup", "begin", "a", "--id=other"],
        "has an open backup",
    );
    served.refused(&["backup", "begin", "a", "b"], "there is a backup");
    served.refused(&["backup", "begin", "c", "--id=other"], "no disk 'c'");
    served.refused(
        &["backup", "begin", "a", "a", "--id=other"],
        "has an open backup",
    );
    served.refused(
        &["backup", "begin", "b", "b", "--id=other"],
        "each named once",
    );
    served.refused(&["backup", "end", "--id=other"], "no backup 'other'");
    served.refused(&["detach", "a"], "uses the disk");
    let to = served.path("c.raw");
    std::fs::File::create(&to)
        .unwrap()
        .set_len(DISK_BYTES)
        .unwrap();
    served.refused(
        &["replace", "a", to.to_str().unwrap()],
        "has an open backup",
    );
    served.refused(&["bitmap", "remove", "a", "backup-backup-x"], "is open");
    served.done(&["detach", "a", "--force"]);
    assert_eq!(served.done(&["backup", "list"]), json!([]));
}

/// The bitmap of a killed process has all changes since the last backup that succeeded.
#[test]
fn a_kill_loses_no_changes() {
    let Some(mut served) = Served::start("a_kill_loses_no_changes", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    served.done(&["backup", "begin", "a", "--bitmap=n"]);
    served.done(&["backup", "end"]);
    write(&mut device, 0, 100, 1);
    served.done(&["backup", "begin", "a", "--bitmap=n"]);
    write(&mut device, 0, 200, 1);
    let pid = served.server.pid();
    served.server.signal(Signal::KILL);
    wait_for_exit(pid);
    drop(device);
    served.restart();
    assert_eq!(served.done(&["backup", "list"]), json!([]));
    assert_eq!(bits(&served, "a", "n"), 2 * 65536);
}

/// A backup depends on the memory of the process.
#[test]
fn an_upgrade_ends_backups() {
    let Some(served) = Served::start("an_upgrade_ends_backups", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    served.done(&["bitmap", "add", "a", "n", "--persistent"]);
    write(&mut device, 0, 100, 1);
    served.done(&["backup", "begin", "a", "--bitmap=n"]);
    write(&mut device, 0, 200, 1);
    let output = served.ringdisk(&["upgrade"]);
    assert!(output.status.success(), "{output:?}");
    let line = "backup 'backup' has failed: ringdisk is upgraded";
    served.server.wait_for_log(&[line]);
    assert_eq!(served.done(&["backup", "list"]), json!([]));
    assert_eq!(served.done(&["export"]), json!([]));
    write(&mut device, 0, 300, 1);
    assert_eq!(bits(&served, "a", "n"), 3 * 65536);
    served.done(&["backup", "begin", "a", "--bitmap=n"]);
    served.done(&["backup", "end"]);
    assert_eq!(bits(&served, "a", "n"), 0);
}

/// The guest's file systems are frozen at the moment, and thaw whatever happens.
#[test]
fn guest_agents_freeze_and_thaw() {
    let Some(served) = Served::start("guest_agents_freeze_and_thaw", &[]) else {
        return;
    };
    let path = served.path("agent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let agent = thread::spawn(move || {
        let mut all = Vec::new();
        for _ in 0..2 {
            let (socket, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(socket.try_clone().unwrap()).lines();
            let mut socket = socket;
            // Left behind by an earlier client.
            writeln!(socket, "{}", json!({ "return": 1 })).unwrap();
            while let Some(Ok(line)) = lines.next() {
                let command: Value = serde_json::from_str(&line).unwrap();
                let name = command["execute"].as_str().unwrap().to_owned();
                let reply = match &*name {
                    "guest-sync" => command["arguments"]["id"].clone(),
                    _ => json!(2),
                };
                all.push(name);
                writeln!(socket, "{}", json!({ "return": reply })).unwrap();
            }
        }
        all
    });
    let option = format!("--guest-agent={}", path.display());
    served.done(&["backup", "begin", "a", &option]);
    served.refused(&["backup", "begin", "a", &option], "there is a backup");
    let names = agent.join().unwrap();
    let each = ["guest-sync", "guest-fsfreeze-freeze", "guest-fsfreeze-thaw"];
    assert_eq!(names, [each, each].concat());
    served.refused(
        &["backup", "begin", "b", "--id=x", "--guest-agent=/nowhere"],
        "guest agent /nowhere",
    );
    assert_eq!(
        served.done(&["backup", "list"]).as_array().unwrap().len(),
        1
    );
    assert_eq!(BLOCK, 4096);
}
