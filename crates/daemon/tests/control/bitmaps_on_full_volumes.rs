//! Persistent bitmaps of images whose volume has no space for them.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use testkit::qemu_img as qemu;

use super::bitmaps_of_images::{count, signal, stored, upgrade};
use super::stored_disk::{StoredDisk, write};
use crate::support::small_fs::SmallFs;

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
        let mut disk = StoredDisk::image();
        let volume = disk.path("volume");
        let Some(_volume) = SmallFs::mount(&volume, "1m") else {
            return;
        };
        let image = volume.join("disk.qcow2");
        fs::copy(&disk.file, &image).unwrap();
        disk.file = image;
        disk.options += ",cache=writeback";
        let server = disk.serve();
        // 'b' has an entry in the image, and this one has none.
        disk.add("new");
        write(&mut disk.device(), 3);
        let ballast = volume.join("ballast");
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
        for name in ["b", "new"] {
            assert_eq!(stored(&disk, name), BTreeSet::from([3, 5]), "{steps:?}");
        }
    }
}

/// Takes all space of a file system.
fn fill(ballast: &Path) {
    let mut file = File::create(ballast).unwrap();
    while file.write_all(&[0; 4096]).is_ok() {}
}
