//! Persistent bitmaps of images whose volume has no space for them.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use testkit::qemu_img as qemu;

use super::bitmaps_of_images::{count, signal, stored, upgrade};
use super::stored_disk::{BLOCK, StoredDisk, write};
use crate::support::small_fs::SmallFs;
use crate::upgrade::{RECEIVE_MESSAGE, send_message};

/// The image cannot take its bitmaps before the new process serves. The record has them, and continues to be valid, although no
/// guest has written to the new process before that is upgraded or stopped in its turn.
#[test]
fn upgrades_and_kills_on_a_full_volume_keep_bitmaps_of_images() {
    if !qemu::is_there("upgrades_and_kills_on_a_full_volume_keep_bitmaps_of_images") {
        return;
    }
    let (up, kill) = (true, false);
    for steps in [
        &[up, up][..],
        &[up, up, up],
        &[up, up, kill],
        &[up, kill, up, up],
        &[kill, up, up, kill],
    ] {
        let Some((disk, volume)) = on_small_volume() else {
            return;
        };
        let server = disk.serve();
        // 'b' has an entry in the image, and this one has none.
        disk.add("new");
        write(&mut disk.device(), 3);
        let ballast = volume.0.join("ballast");
        fill(&ballast);
        let mut servers = vec![server];
        let mut pid = servers[0].pid();
        for &is_upgrade in steps {
            if is_upgrade {
                pid = upgrade(&disk);
                continue;
            }
            signal(pid, Signal::KILL);
            servers.push(disk.serve());
            pid = servers[servers.len() - 1].pid();
        }
        for name in ["b", "new"] {
            assert_eq!(disk.bitmap(name)["inconsistent"], Value::Null, "{steps:?}");
            assert_eq!(count(&disk, name), 1, "{steps:?}: {name}");
        }
        fs::remove_file(&ballast).unwrap();
        write(&mut disk.device(), 5);
        signal(pid, Signal::TERM);
        fs::copy(&disk.file, disk.path("disk.qcow2")).unwrap();
        let dirty = BTreeSet::from([3, 5]);
        assert_eq!(stored(&disk, "new"), dirty, "{steps:?}");
    }
}

/// The old process goes on. Its bitmaps are as they were, although the image could not take them.
#[test]
fn failed_upgrades_on_a_full_volume_keep_bitmaps_of_images() {
    if !qemu::is_there("failed_upgrades_on_a_full_volume_keep_bitmaps_of_images") {
        return;
    }
    let Some((disk, volume)) = on_small_volume() else {
        return;
    };
    let server = disk.serve();
    disk.add("new");
    write(&mut disk.device(), 3);
    let ballast = volume.0.join("ballast");
    fill(&ballast);
    let program = disk.path("program");
    let hello = send_message(r#"{"protocol":2,"version":"x"}"#);
    let script = format!("#!/bin/sh\n{hello}; {RECEIVE_MESSAGE}; kill -9 $$\n");
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let upgraded = disk.try_to(&["upgrade", "--program", program.to_str().unwrap()]);
    assert_eq!(upgraded.code, Some(1), "{upgraded:?}");
    server.wait_for_log(&["bitmap 'b' could not be stored in its image"]);
    let assert_dirty = |blocks| {
        for name in ["b", "new"] {
            assert_eq!(disk.bitmap(name)["inconsistent"], Value::Null, "{name}");
            assert_eq!(count(&disk, name), blocks, "{name}");
        }
    };
    assert_dirty(1);
    // The bits of the larger disk survive a kill.
    fs::remove_file(&ballast).unwrap();
    disk.run(&["resize", "d", "128M"]);
    write(&mut disk.device(), (100 << 20) / BLOCK);
    assert_dirty(2);
    signal(server.pid(), Signal::KILL);
    let server = disk.serve();
    assert_dirty(2);
    StoredDisk::stop(server);
}

/// An image on a file system that can be filled.
fn on_small_volume() -> Option<(StoredDisk, SmallFs)> {
    let mut disk = StoredDisk::image();
    let volume = SmallFs::mount(&disk.path("volume"), "1m")?;
    let image = volume.0.join("disk.qcow2");
    fs::copy(&disk.file, &image).unwrap();
    disk.file = image;
    disk.options += ",cache=writeback";
    Some((disk, volume))
}

/// Takes all space of a file system.
fn fill(ballast: &Path) {
    let mut file = File::create(ballast).unwrap();
    while file.write_all(&[0; 4096]).is_ok() {}
}
