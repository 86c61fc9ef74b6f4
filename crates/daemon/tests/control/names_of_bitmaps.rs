//! Persistent bitmaps belong to the storage of a disk, and not to its name.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::qemu_img as qemu;
use testkit::server::wait_for_exit;

use super::stored_disk::{BLOCK, Loop, SIZE, StoredDisk, write};

/// A record belongs to the device, and not to one of its names.
#[test]
fn devices_with_two_names_have_one_set_of_bitmaps() {
    let mut raw = StoredDisk::raw();
    let Some(device) = Loop::new("devices_with_two_names", &raw.file) else {
        return;
    };
    let names = ["one", "two"].map(|name| raw.path(name));
    for name in &names {
        symlink(&device.0, name).unwrap();
    }
    raw.file = names[0].clone();
    let mut server = raw.serve();
    raw.add("b");
    let mut dirty = BTreeSet::new();
    for round in 0..6 {
        let block = 100 * round + 3;
        write(&mut raw.device(), block);
        dirty.insert(block);
        let other = &names[(round as usize + 1) % 2];
        // With and without the knowledge of the process that serves it.
        if round % 3 == 0 {
            raw.run(&["replace", "d", other.to_str().unwrap()]);
        }
        if round % 2 == 0 {
            server.signal(Signal::KILL);
            drop(server);
        } else {
            StoredDisk::stop(server);
        }
        raw.file = other.clone();
        fs::remove_file(raw.path("state/state.json")).unwrap_or_default();
        server = raw.serve();
        assert_eq!(raw.bits_in_use(), dirty, "round {round}");
        let records = fs::read_dir(raw.path("state")).unwrap().flatten();
        let is_record = |path: PathBuf| path.extension().is_some_and(|end| end == "bitmaps");
        assert_eq!(records.filter(|file| is_record(file.path())).count(), 1);
    }
    StoredDisk::stop(server);
}

/// The bitmaps of a file that was renamed stay its own, and do not become those of another file at its old name.
#[test]
fn renamed_files_keep_their_bitmaps() {
    for how in ["stop", "kill", "upgrade"] {
        let mut raw = StoredDisk::raw();
        let mut server = raw.serve();
        raw.add("b");
        write(&mut raw.device(), 3);
        let (old, new) = (raw.file.clone(), raw.path("renamed.raw"));
        fs::rename(&old, &new).unwrap();
        raw.run(&["replace", "d", new.to_str().unwrap()]);
        write(&mut raw.device(), 4);
        if how == "upgrade" {
            let upgraded: Value =
                serde_json::from_str(&raw.run(&["upgrade", "--json"]).out).unwrap();
            let pid = upgraded["pid"].as_u64().unwrap() as u32;
            drop(server);
            assert_eq!(raw.bits_in_use(), BTreeSet::from([3, 4]), "{how}");
            kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::TERM).unwrap();
            wait_for_exit(pid);
        } else if how == "kill" {
            server.signal(Signal::KILL);
            drop(server);
        } else {
            StoredDisk::stop(server);
        }
        fs::remove_file(raw.path("state/state.json")).unwrap_or_default();
        // Another file with the old name.
        File::create(&old).unwrap().set_len(SIZE).unwrap();
        server = raw.serve();
        assert_ne!(raw.bitmap("b")["recording"], true, "{how}");
        StoredDisk::stop(server);
        raw.file = new;
        server = raw.serve();
        assert_eq!(raw.bitmap("b")["count"], 2 * BLOCK, "{how}");
        assert_eq!(raw.bitmap("b")["inconsistent"], Value::Null, "{how}");
        StoredDisk::stop(server);
    }
}

/// Records of earlier versions have the name of the file only.
#[test]
fn records_with_the_name_of_the_file_are_continued() {
    for is_killed in [false, true] {
        let raw = StoredDisk::raw();
        let server = raw.serve();
        raw.add("b");
        write(&mut raw.device(), 3);
        if is_killed {
            server.signal(Signal::KILL);
            drop(server);
        } else {
            StoredDisk::stop(server);
        }
        let record = raw.record_path().unwrap();
        rename_record_as_before(&raw);
        let server = raw.serve();
        assert_eq!(raw.bits_in_use(), BTreeSet::from([3]));
        assert_eq!(raw.record_path().unwrap(), record);
        StoredDisk::stop(server);
    }
}

/// Gives the record of a disk that is not in use the name that earlier versions gave it. Returns that.
fn rename_record_as_before(raw: &StoredDisk) -> PathBuf {
    let record = raw.record_path().unwrap();
    let stem = record.file_stem().unwrap().to_str().unwrap().to_owned();
    let (_, path) = stem.split_once('-').unwrap();
    let before = record.with_file_name(format!("{path}.bitmaps"));
    fs::rename(&record, &before).unwrap();
    before
}

/// The record of an earlier version is found by the file, under each of its names, and so is the device's.
#[test]
fn records_of_earlier_versions_are_found_by_the_storage() {
    for is_device in [false, true] {
        let mut raw = StoredDisk::raw();
        let made = if is_device {
            let test = "records_of_earlier_versions_are_found_by_the_storage";
            let Some(device) = Loop::new(test, &raw.file) else {
                return;
            };
            Some(device)
        } else {
            None
        };
        let names = [raw.path("one.raw"), raw.path("two.raw")];
        for name in &names {
            match &made {
                Some(Loop(device)) => symlink(device, name).unwrap(),
                None => fs::hard_link(&raw.file, name).unwrap(),
            }
        }
        let mut written = BTreeSet::new();
        // One name, the other, and the first again.
        for (round, name) in (0..).zip([&names[0], &names[1], &names[0]]) {
            raw.file.clone_from(name);
            let server = raw.serve();
            if round == 0 {
                raw.add("b");
            }
            assert_eq!(raw.bitmap("b")["inconsistent"], Value::Null, "{is_device}");
            assert_eq!(raw.bits_in_use(), written);
            write(&mut raw.device(), round);
            written.insert(round);
            server.signal(Signal::KILL);
            drop(server);
            fs::remove_file(raw.path("state/state.json")).unwrap_or_default();
            rename_record_as_before(&raw);
        }
    }
}

/// The file system has given the inode to another file, which was written at the same time.
#[test]
fn records_are_not_used_for_another_file_with_the_inode() {
    for is_old in [false, true] {
        let raw = StoredDisk::raw();
        if fs::metadata(&raw.file).unwrap().created().is_err() {
            println!("skipped: the file system does not know when a file was made");
            return;
        }
        let server = raw.serve();
        raw.add("b");
        write(&mut raw.device(), 3);
        server.signal(Signal::KILL);
        drop(server);
        if is_old {
            // It was written before the file was made.
            let record = File::options()
                .append(true)
                .open(rename_record_as_before(&raw))
                .unwrap();
            record
                .set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 30))
                .unwrap();
        } else {
            // Its name has the time at which another file was made.
            let record = raw.record_path().unwrap();
            let stem = record.file_stem().unwrap().to_str().unwrap().to_owned();
            let (_, path) = stem.split_once('-').unwrap();
            let other = format!("{:016x}-{path}.bitmaps", 1);
            fs::rename(&record, record.with_file_name(other)).unwrap();
        }
        let server = raw.serve();
        assert_eq!(raw.bitmap("b")["inconsistent"], Value::Bool(true));
        server.wait_for_log(&["bitmap 'b' is not continued", "replaced the disk's file"]);
        StoredDisk::stop(server);
    }
}

/// The image never had the bitmap: it was added while the disk was served, and then ringdisk was killed.
#[test]
fn bitmaps_that_an_image_lacks_are_named() {
    if !qemu::is_there("bitmaps_that_an_image_lacks_are_named") {
        return;
    }
    let disk = StoredDisk::image();
    let server = disk.serve();
    disk.add("new");
    write(&mut disk.device(), 3);
    server.signal(Signal::KILL);
    drop(server);
    let server = disk.serve();
    assert_eq!(disk.bitmap("new")["count"], BLOCK);
    server.signal(Signal::KILL);
    drop(server);
    // QEMU opens the image, and nobody knows what it has written.
    while !Command::new("qemu-io")
        .args(["-c", "write 1M 4k"])
        .arg(&disk.file)
        .output()
        .unwrap()
        .status
        .success()
    {}
    let server = disk.serve();
    server.wait_for_log(&["bitmap 'new' is gone: its image does not have it"]);
    server.wait_for_log(&["bitmap 'b' of its image is not continued"]);
    assert!(!server.log().contains("'b' is gone"), "{}", server.log());
    StoredDisk::stop(server);
}
