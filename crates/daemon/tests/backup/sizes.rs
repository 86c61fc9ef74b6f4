//! Backups of disks whose files other programs make longer or shorter.

use std::fs::File;

use serde_json::json;
use testkit::driver::HANG;

use super::failures::bits;
use super::{BLOCK, DISK_BYTES, Served, write};

fn set_size(served: &Served, bytes: u64) {
    let file = File::options().write(true).open(served.path("a.raw"));
    file.unwrap().set_len(bytes).unwrap();
}

/// What was cut off is lost, also if the file is as long as before afterwards: a backup is no success.
#[test]
fn file_that_was_cut_off_fails_the_backup() {
    let Some(served) = Served::start("file_that_was_cut_off_fails_the_backup", &[]) else {
        return;
    };
    write(&mut served.connect("a"), 0, DISK_BYTES / BLOCK - 1, 1);
    // Noticed while the backup is open, and at its end.
    for looks_meanwhile in [true, false] {
        served.done(&["backup", "begin", "a"]);
        set_size(&served, DISK_BYTES / 2);
        if looks_meanwhile {
            served.done(&["bitmap", "list"]);
            set_size(&served, DISK_BYTES);
            let listed = served.done(&["backup", "list"]);
            let error = listed[0]["error"].as_str().unwrap();
            assert!(error.contains("has cut its file off"), "{error}");
        }
        served.refused(&["backup", "end"], "has cut its file off");
        set_size(&served, DISK_BYTES);
    }
    // The next one is about what there is now.
    served.done(&["backup", "begin", "a"]);
    served.done(&["backup", "end"]);
}

/// What a file should have and does not is an error for its reader, and no hole: a copy fails, whatever was noticed before.
#[test]
fn disk_without_its_end_cannot_be_copied() {
    let Some(served) = Served::start("disk_without_its_end_cannot_be_copied", &[]) else {
        return;
    };
    for (disk, file) in [("a", "a.raw"), ("b", "b.qcow2")] {
        // In clusters of their own.
        let mut guest = served.connect(disk);
        for block in (0..DISK_BYTES / BLOCK).step_by(128) {
            write(&mut guest, 0, block, 1);
        }
        drop(guest);
        let to = served.path("copy");
        let to = to.to_str().unwrap();
        let copy = ["backup", "copy", disk, "--to", to];
        served.done(&copy);
        let file = File::options().write(true).open(served.path(file));
        let file = file.unwrap();
        let whole = file.metadata().unwrap().len();
        file.set_len(whole / 2).unwrap();
        served.done(&["list"]);
        // The second time as well: the file is as it was when the backup began.
        for _ in 0..2 {
            let _ = std::fs::remove_file(to);
            served.refused(&copy, "");
            assert!(!std::path::Path::new(to).exists());
        }
    }
}

/// A file that has grown, and its guest does not know yet. What the disk will grow by counts as dirty.
#[test]
fn file_grows_before_its_disk() {
    let Some(served) = Served::start("file_grows_before_its_disk", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    let backup = |expected: u64| {
        served.done(&["backup", "begin", "a", "--bitmap=n"]);
        served.done(&["backup", "end"]);
        assert_eq!(bits(&served, "a", "n"), expected);
    };
    backup(0);
    let more = 16 << 20;
    set_size(&served, DISK_BYTES + more);
    // The bitmaps of a disk grow when its size is queried.
    served.done(&["bitmap", "list"]);
    backup(more);
    served.done(&["bitmap", "add", "a", "new", "--persistent"]);
    assert_eq!(bits(&served, "a", "new"), more);
    served.done(&["bitmap", "clear", "a", "new"]);
    write(&mut device, 0, 0, 1);
    // In the middle of a backup.
    served.done(&["backup", "begin", "a", "--bitmap=n"]);
    set_size(&served, DISK_BYTES + 2 * more);
    served.done(&["bitmap", "list"]);
    served.done(&["backup", "end"]);
    assert_eq!(bits(&served, "a", "n"), 2 * more);
    served.done(&["resize", "a"]);
    for bitmap in ["n", "new"] {
        let own = u64::from(bitmap == "new") * 65536;
        assert_eq!(bits(&served, "a", bitmap), 2 * more + own, "{bitmap}");
    }
    backup(0);
}

/// A temporary bitmap survives an upgrade of a disk whose file has grown.
#[test]
fn temporary_bitmap_grows_in_an_upgrade() {
    let Some(served) = Served::start("temporary_bitmap_grows_in_an_upgrade", &[]) else {
        return;
    };
    served.done(&["bitmap", "add", "a", "temporary"]);
    write(&mut served.connect("a"), 0, 0, 1);
    let more = 16 << 20;
    set_size(&served, DISK_BYTES + more);
    served.done(&["upgrade"]);
    assert_eq!(bits(&served, "a", "temporary"), 65536 + more);
    // The new process is not a child of this one.
    let mut new = control::Client::connect(served.path("control.qmp"), HANG).unwrap();
    new.call("quit", json!({})).unwrap();
}
