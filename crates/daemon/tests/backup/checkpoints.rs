//! Checkpoints: an incremental backup relies on the bitmap of the client's last backup, and on no older one.

use std::fs;

use rustix::process::Signal;
use serde_json::Value;
use testkit::server::wait_for_exit;

use super::failures::bits;
use super::{Served, run, text, write};

const KEY: &str = "x-ringdisk-checkpoint";

/// Makes a backup that succeeds. Returns its checkpoint, and what was said when it began.
#[track_caller]
fn backup(served: &Served, disk: &str, since: Option<&str>) -> (String, Value) {
    let begun = begin(served, disk, since);
    let ended = served.done(&["backup", "end"]);
    (ended[KEY].as_str().unwrap().to_owned(), begun)
}

#[track_caller]
fn begin(served: &Served, disk: &str, since: Option<&str>) -> Value {
    let since = since.map(|since| format!("--since={since}"));
    let mut arguments = vec!["backup", "begin", disk, "--bitmap=n"];
    arguments.extend(since.as_deref());
    served.done(&arguments)[0].clone()
}

pub fn stop(served: &mut Served, is_killed: bool) {
    if is_killed {
        let pid = served.server.pid();
        served.server.signal(Signal::KILL);
        wait_for_exit(pid);
    } else {
        assert!(served.server.terminate().unwrap().success());
    }
}

/// The bitmap in a copy of an image has the changes since an earlier backup, and is continued by its name.
#[test]
fn an_image_that_was_put_back_is_copied_in_full() {
    let test = "an_image_that_was_put_back_is_copied_in_full";
    let Some(mut served) = Served::start(test, &[]) else {
        return;
    };
    let (image, copy) = (served.path("b.qcow2"), served.path("copy.qcow2"));
    for is_killed in [false, true] {
        let mut device = served.connect("b");
        write(&mut device, 0, 1, 1);
        let (first, _) = backup(&served, "b", None);
        write(&mut device, 0, 2, 1);
        drop(device);
        stop(&mut served, false);
        fs::copy(&image, &copy).unwrap();
        served.restart();
        let (second, begun) = backup(&served, "b", Some(&first));
        assert_eq!(begun[KEY], *first);
        assert_eq!(begun["x-ringdisk-full"], Value::Null);
        assert_ne!(first, second);
        stop(&mut served, is_killed);
        fs::copy(&copy, &image).unwrap();
        served.restart();
        let begun = begin(&served, "b", Some(&second));
        assert_eq!(begun["x-ringdisk-full"], "other-checkpoint", "{begun}");
        assert_eq!(begun["bitmap-action"], "new");
        assert_eq!(begun[KEY], *first);
        served.done(&["backup", "end", "--failed"]);
        // An incremental backup is right for a client that has the older backup.
        let begun = begin(&served, "b", Some(&first));
        assert_eq!(begun["x-ringdisk-full"], Value::Null);
        served.done(&["backup", "end", "--failed"]);
        served.done(&["bitmap", "remove", "b", "n"]);
    }
}

/// It stays with its bitmap in the image, in the state directory, and in memory.
#[test]
fn a_checkpoint_survives_what_its_bitmap_survives() {
    let test = "a_checkpoint_survives_what_its_bitmap_survives";
    let Some(mut served) = Served::start(test, &[]) else {
        return;
    };
    let image = served.path("b.qcow2");
    for disk in ["a", "b"] {
        let mut device = served.connect(disk);
        let (mut last, begun) = backup(&served, disk, None);
        assert_eq!(begun["x-ringdisk-full"], "missing");
        for is_killed in [false, true] {
            write(&mut device, 0, 9, 1);
            drop(device);
            stop(&mut served, is_killed);
            if disk == "b" && !is_killed {
                // QEMU writes the bitmaps again.
                run("qemu-io", &["-c", "write 16M 64k", text(&image)]);
            }
            served.restart();
            device = served.connect(disk);
            let (next, begun) = backup(&served, disk, Some(&last));
            assert_eq!(begun["x-ringdisk-full"], Value::Null, "{begun}");
            assert_eq!(begun[KEY], *last);
            last = next;
        }
        let listed = served.done(&["bitmap", "list", disk]);
        assert_eq!(listed[disk].as_array().unwrap().len(), 1, "{listed}");
        assert_eq!(listed[disk][0][KEY], *last);
    }
}

/// What makes a bitmap lack changes ends its checkpoint, and so does a new bitmap of its name.
#[test]
fn commands_end_checkpoints() {
    let Some(served) = Served::start("commands_end_checkpoints", &[]) else {
        return;
    };
    let bitmap = |action: &str| drop(served.done(&["bitmap", action, "a", "n"]));
    let mut device = served.connect("a");
    for actions in [&["clear"][..], &["disable", "enable"], &["remove", "add"]] {
        let (last, _) = backup(&served, "a", None);
        write(&mut device, 0, 5, 1);
        actions.iter().for_each(|action| bitmap(action));
        let begun = begin(&served, "a", Some(&last));
        assert_eq!(begun["x-ringdisk-full"], "no-checkpoint", "{actions:?}");
        served.done(&["backup", "end", "--failed"]);
    }
    // More bits do no harm.
    let (last, _) = backup(&served, "a", None);
    served.done(&["bitmap", "add", "a", "other"]);
    write(&mut device, 0, 700, 1);
    served.done(&["bitmap", "merge", "a", "n", "--from=other"]);
    let begun = begin(&served, "a", Some(&last));
    assert_eq!(begun["x-ringdisk-full"], Value::Null);
    served.done(&["backup", "end", "--failed"]);
    let name = format!("ringdisk-checkpoint-{last}-other");
    served.refused(&["bitmap", "add", "a", &name], "choose another name");
    served.refused(
        &["backup", "begin", "a", "--bitmap=n", "--since=12"],
        "'12' is not the checkpoint of a backup",
    );
    let output = served.ringdisk(&[
        "backup",
        "begin",
        "a",
        "--bitmap=n",
        &format!("--since={}", "0".repeat(32)),
    ]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        said.contains("disk a is copied in full: bitmap n: the bitmap has the checkpoint"),
        "{said}"
    );
    served.done(&["backup", "end", "--failed"]);
}

/// The state directory cannot be written when a backup ends: the backup is complete, and stays open until it can.
#[test]
fn the_end_of_a_backup_can_be_repeated() {
    let Some(served) = Served::start("the_end_of_a_backup_can_be_repeated", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    let (last, _) = backup(&served, "a", None);
    write(&mut device, 0, 100, 1);
    begin(&served, "a", Some(&last));
    write(&mut device, 0, 200, 1);
    // In the place of a record that is being written.
    let records = fs::read_dir(served.path("state")).unwrap();
    let records = records.map(|record| record.unwrap().path());
    let blocked: Vec<_> = records
        .filter(|path| path.to_string_lossy().contains("bitmaps"))
        .map(|path| path.with_extension("new"))
        .collect();
    assert!(!blocked.is_empty());
    for path in &blocked {
        fs::create_dir(path).unwrap();
    }
    for _ in 0..2 {
        served.refused(&["backup", "end"], "backup 'backup' is still open");
        let listed = served.done(&["backup", "list"]);
        assert_eq!(listed[0]["id"], "backup");
        assert!(
            listed[0]["error"].as_str().unwrap().contains("durable"),
            "{listed}"
        );
    }
    assert_eq!(bits(&served, "a", "n"), 2 * 65536);
    served.refused(
        &["backup", "begin", "b", "--bitmap=n"],
        "there is a backup 'backup' already",
    );
    for path in &blocked {
        fs::remove_dir(path).unwrap();
    }
    let ended = served.done(&["backup", "end"]);
    assert_eq!(bits(&served, "a", "n"), 65536);
    let begun = begin(&served, "a", ended[KEY].as_str());
    assert_eq!(begun["x-ringdisk-full"], Value::Null, "{begun}");
    served.done(&["backup", "end", "--failed"]);
    served.refused(
        &["backup", "end", "--failed", "--id=mistyped"],
        "there is no backup 'mistyped'",
    );
}

/// All disks of a backup have its checkpoint. The image of one of them is then put in the place of another, or swapped with it.
#[test]
fn a_disk_that_was_exchanged_with_another_of_its_backup_is_copied_in_full() {
    let test = "a_disk_that_was_exchanged_with_another_of_its_backup_is_copied_in_full";
    let Some(served) = Served::start(test, &[]) else {
        return;
    };
    let done = |arguments: &[&str]| {
        let output = served.ringdisk(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    };
    let attach = |name: &str, file: &str| {
        let dir = served.dir.path().display();
        let disk = format!("file={dir}/{file},name={name},socket={dir}/{name}.sock,queues=2");
        done(&["attach", &disk]);
    };
    let detach = |name: &str| done(&["detach", name]);
    let images = ["c.qcow2", "d.qcow2"];
    for image in images {
        let image = served.path(image);
        run(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", text(&image), "64M"],
        );
    }
    let disks = [("c", images[0]), ("d", images[1])];
    let attach_all = || disks.iter().for_each(|(name, file)| attach(name, file));
    let detach_all = || disks.iter().for_each(|(name, _)| detach(name));
    attach_all();
    write(&mut served.connect("c"), 0, 1, 1);
    write(&mut served.connect("d"), 0, 2, 2);
    served.done(&["backup", "begin", "c", "d", "--bitmap=n"]);
    let ended = served.done(&["backup", "end"]);
    let last = ended[KEY].as_str().unwrap().to_owned();
    let full_of = |disk: &str, since: &str| {
        let begun = begin(&served, disk, Some(since));
        served.done(&["backup", "end", "--failed"]);
        begun["x-ringdisk-full"].clone()
    };
    for (name, _) in disks {
        assert_eq!(full_of(name, &last), Value::Null);
        detach(name);
    }
    attach("c", images[1]);
    attach("d", images[0]);
    for (name, _) in disks {
        assert_eq!(full_of(name, &last), "other-disk");
    }
    let since = format!("--since={last}");
    let said = served.ringdisk(&["backup", "begin", "c", "--bitmap=n", &since]);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("another disk of the backup"), "{said}");
    served.done(&["backup", "end", "--failed"]);
    detach_all();
    // A copy of the other one's image, which has its bitmap.
    fs::copy(served.path(images[1]), served.path(images[0])).unwrap();
    attach_all();
    assert_eq!(full_of("c", &last), "other-disk");
    assert_eq!(full_of("d", &last), Value::Null);
    // The checkpoint of a backup of one disk names its content, whatever the name of the disk is.
    let (last, _) = backup(&served, "d", Some(&last));
    detach_all();
    attach("renamed", images[1]);
    assert_eq!(full_of("renamed", &last), Value::Null);
}
