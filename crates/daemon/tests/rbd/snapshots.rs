//! The snapshots that backups of images read, and what becomes of them.

use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::json;
use testkit::ceph::POOL;
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::random::Random;

use super::backup::{BYTES, MIB, OK, Served, objects, write_some};
use super::blocklist::blocklist;
use super::cluster::{CephVersion, ringdisk};

on_each_release!(
    backups_of_images_that_others_have_locked_are_refused,
    backups_without_a_snapshot_copy_old_data,
    guests_pay_nothing_once_there_is_a_snapshot,
    readers_without_a_snapshot_are_not_told_zeroes,
    snapshots_left_by_a_kill_are_removed,
    snapshots_left_in_the_trash_are_removed,
    snapshots_that_could_not_be_removed_are_removed_later,
    snapshots_removed_by_others_fail_the_backup,
    writes_of_others_fail_a_backup_that_copies,
);

/// Writes to many places, and discards in between.
fn change(device: &mut Device, random: &mut Random) {
    for n in 0..200 {
        let at = random.below(BYTES / 4096) * 8;
        let done = match n % 8 {
            0 => device.queues[0].run(Op::Discard, at / 8192 * 8192, 4 << 20),
            _ => device.queues[0].write(at, &[n as u8 | 1; 4096]),
        };
        assert_eq!(done, OK);
    }
}

const SNAPSHOT_IS_MADE: &str = "its backup reads";

/// Nothing is copied then, the objects that the image had are told as they were, and nothing is left behind. What was in librbd's
/// cache at the moment belongs to the backup.
fn guests_pay_nothing_once_there_is_a_snapshot(version: CephVersion) {
    let test = "guests_pay_nothing_once_there_is_a_snapshot";
    let Some(mut served) = Served::new(version, test, "snapped") else {
        return;
    };
    let Served { cluster, server } = served;
    drop(server);
    served = Served::with(cluster, "snapped", "writeback");
    let mut device = served.connect();
    write_some(&mut device);
    let mut before = vec![0; BYTES as usize];
    for at in [MIB, 9 * MIB, BYTES - 4096] {
        before[at as usize..][..4096].fill(7);
    }
    served.done(&["backup", "begin", "snapped"]);
    served.server.wait_for_log(&[SNAPSHOT_IS_MADE]);
    let backup = served.open_backup();
    let names = served.snapshots("snapped");
    let [name] = &names[..] else {
        panic!("{names:?}");
    };
    assert!(name.starts_with("ringdisk-backup-"), "{name}");
    let full = format!("{POOL}/snapped@{name}");
    assert_eq!(backup["snapshots"], json!([full]));

    change(&mut device, &mut Random(3));
    let after = served.open_backup();
    assert_eq!([&after["memory"], &after["file"]], [0, 0], "{after}");
    assert_eq!(served.allocation("snapped-backup"), objects(&[0, 2, 31]));
    assert!(served.copy("snapped-backup") == before);
    assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
    assert!(served.cluster.content("snapped") != before);
    served.done(&["backup", "end"]);
    assert_eq!(served.snapshots("snapped"), [""; 0]);
}

fn backups_without_a_snapshot_copy_old_data(version: CephVersion) {
    let test = "backups_without_a_snapshot_copy_old_data";
    let Some(mut served) = Served::new(version, test, "limited") else {
        return;
    };
    let image = format!("{POOL}/limited");
    served.rbd(&["snap", "create", "--no-progress", &format!("{image}@one")]);
    served.rbd(&["snap", "limit", "set", "--limit=1", &image]);
    let mut device = served.connect();
    write_some(&mut device);
    let before = served.cluster.content("limited");
    served.done(&["backup", "begin", "limited"]);
    served.server.wait_for_log(&["copies old data"]);
    change(&mut device, &mut Random(4));
    let backup = served.open_backup();
    assert_eq!(backup["snapshots"], json!([]));
    assert!(served.copy("limited-backup") == before);
    served.done(&["backup", "end"]);
}

/// They may write at any time. After a write of its own guest, the image can be backed up.
fn backups_of_images_that_others_have_locked_are_refused(version: CephVersion) {
    let test = "backups_of_images_that_others_have_locked_are_refused";
    let Some(mut served) = Served::new(version, test, "elsewhere") else {
        return;
    };
    let access = served.cluster.ceph().options();
    let socket = served.cluster.socket("other").display().to_string();
    let disk = format!("file=rbd:{POOL}/elsewhere,socket={socket}{access}");
    let control = served.path("other.qmp").display().to_string();
    let _other = served.cluster.start(&["--control", &control, &disk]);
    let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
    write_some(&mut device);
    let error = served.failed(&["backup", "begin", "elsewhere"]);
    assert!(
        error.contains("cannot be locked") && error.contains("back it up where"),
        "{error}"
    );
    write_some(&mut served.connect());
    served.done(&["backup", "begin", "elsewhere"]);
    served.done(&["backup", "end"]);
}

/// Old data of what others write is not copied. With a snapshot, they may write.
fn writes_of_others_fail_a_backup_that_copies(version: CephVersion) {
    let test = "writes_of_others_fail_a_backup_that_copies";
    let Some(mut served) = Served::new(version, test, "shared") else {
        return;
    };
    let image = format!("{POOL}/shared");
    let mut device = served.connect();
    write_some(&mut device);
    let write = |served: &mut Served| {
        served.rbd(&[
            "bench",
            "--io-type=write",
            "--io-size=4K",
            "--io-total=64K",
            &image,
        ]);
    };
    let before = served.cluster.content("shared");
    served.done(&["backup", "begin", "shared"]);
    served.server.wait_for_log(&[SNAPSHOT_IS_MADE]);
    write(&mut served);
    assert!(served.cluster.content("shared") != before);
    assert!(served.copy("shared-backup") == before);
    served.done(&["backup", "end"]);

    write_some(&mut device);
    let snap = format!("{image}@one");
    served.rbd(&["snap", "create", "--no-progress", &snap]);
    served.rbd(&["snap", "limit", "set", "--limit=1", &image]);
    write_some(&mut device);
    served.done(&["backup", "begin", "shared"]);
    served.server.wait_for_log(&["copies old data"]);
    write(&mut served);
    let error = served.failed(&["backup", "end"]);
    assert!(error.contains("another client has had the lock"), "{error}");
}

/// Its reader may have got newer data. The bitmap keeps what it had.
fn snapshots_removed_by_others_fail_the_backup(version: CephVersion) {
    let test = "snapshots_removed_by_others_fail_the_backup";
    let Some(mut served) = Served::new(version, test, "unsnapped") else {
        return;
    };
    let mut device = served.connect();
    served.done(&["bitmap", "add", "unsnapped", "nightly"]);
    write_some(&mut device);
    let dirty = |served: &Served| {
        let all = served.map("unsnapped-backup", "qemu:dirty-bitmap:nightly");
        let dirty = all.into_iter().filter(|&(_, _, state)| state == 1);
        dirty.map(|(at, len, _)| (at, len)).collect::<Vec<_>>()
    };
    let begin = ["backup", "begin", "unsnapped", "--bitmap", "nightly"];
    served.done(&begin);
    served.server.wait_for_log(&[SNAPSHOT_IS_MADE]);
    let first = dirty(&served);
    assert!(!first.is_empty());
    let name = served.snapshots("unsnapped").remove(0);
    served.rbd(&[
        "snap",
        "rm",
        "--no-progress",
        &format!("{POOL}/unsnapped@{name}"),
    ]);
    let error = served.failed(&["backup", "end"]);
    assert!(error.contains("another client has removed it"), "{error}");
    served.done(&begin);
    assert_eq!(dirty(&served), first);
    assert!(served.copy("unsnapped-backup") == served.cluster.content("unsnapped"));
    served.done(&["backup", "end"]);
}

/// The next backup removes them, and a process that stops leaves none. The bitmap continues.
fn snapshots_left_by_a_kill_are_removed(version: CephVersion) {
    let test = "snapshots_left_by_a_kill_are_removed";
    let Some(mut served) = Served::new(version, test, "left") else {
        return;
    };
    let begin = ["backup", "begin", "left", "--bitmap", "nightly"];
    served.done(&begin);
    served.done(&["backup", "end"]);
    served.done(&begin);
    served.server.wait_for_log(&[SNAPSHOT_IS_MADE]);
    let left = served.snapshots("left").remove(0);
    let Served {
        cluster,
        mut server,
    } = served;
    server.signal(rustix::process::Signal::KILL);
    server.ended().unwrap();
    served = Served::of(cluster, "left");
    assert_eq!(served.snapshots("left"), [left.as_str()]);
    let mut device = served.connect();
    write_some(&mut device);
    served.done(&begin);
    served
        .server
        .wait_for_log(&[&left, "which an earlier backup had left, is removed"]);
    served.server.wait_for_log(&[SNAPSHOT_IS_MADE]);
    let now = served.snapshots("left");
    assert!(now.len() == 1 && now[0] != left, "{now:?}");
    let dirty = served.map("left-backup", "qemu:dirty-bitmap:nightly");
    let dirty: u64 = dirty.iter().filter(|e| e.2 == 1).map(|e| e.1).sum();
    assert!((1..BYTES / 4).contains(&dirty), "{dirty}");

    let Served {
        cluster,
        mut server,
    } = served;
    assert!(server.terminate().unwrap().success(), "{}", server.log());
    drop(device);
    served = Served::of(cluster, "left");
    assert_eq!(served.snapshots("left"), [""; 0]);
    served.done(&begin);
    let again = served.map("left-backup", "qemu:dirty-bitmap:nightly");
    let again: u64 = again.iter().filter(|e| e.2 == 1).map(|e| e.1).sum();
    assert_eq!(again, dirty);
    served.done(&["backup", "end"]);
    assert_eq!(served.snapshots("left"), [""; 0]);
}

/// A host that was fenced: another one has taken the lock and removed the snapshot. OSDs answer reads of it with zeroes.
fn readers_without_a_snapshot_are_not_told_zeroes(version: CephVersion) {
    let test = "readers_without_a_snapshot_are_not_told_zeroes";
    let Some(mut served) = Served::new(version, test, "fenced") else {
        return;
    };
    let mut device = served.connect();
    write_some(&mut device);
    let before = served.cluster.content("fenced");
    served.done(&["backup", "begin", "fenced"]);
    served.server.wait_for_log(&[SNAPSHOT_IS_MADE]);
    assert!(served.copy("fenced-backup") == before);
    let name = served.snapshots("fenced").remove(0);
    blocklist(&mut served.cluster, "fenced");
    served.rbd(&[
        "snap",
        "rm",
        "--no-progress",
        &format!("{POOL}/fenced@{name}"),
    ]);
    let copy = ["--connections=4", &served.uri("fenced-backup"), "null:"];
    let read = Command::new("nbdcopy").args(copy).output().unwrap();
    assert!(!read.status.success(), "{read:?}");
    let error = served.failed(&["backup", "end"]);
    assert!(error.contains("snapshot"), "{error}");
}

/// A kill during the removal of a snapshot leaves it without its name.
fn snapshots_left_in_the_trash_are_removed(version: CephVersion) {
    let test = "snapshots_left_in_the_trash_are_removed";
    let Some(mut served) = Served::new(version, test, "trashed") else {
        return;
    };
    // Milliseconds until the kill, nearer to the removal in each attempt.
    let (mut delay, mut attempts) = (20.0, 0);
    loop {
        let mut device = served.connect();
        write_some(&mut device);
        served.done(&["backup", "begin", "trashed"]);
        served.server.wait_for_log(&[SNAPSHOT_IS_MADE]);
        let name = served.open_backup()["snapshots"][0].to_string();
        let control = served.cluster.control();
        let end = thread::spawn(move || {
            let control = control.display().to_string();
            ringdisk(&["backup", "end", "--control", &control])
        });
        served.server.wait_for_log(&["NBD: export", "removed"]);
        thread::sleep(Duration::from_secs_f64(delay / 1000.0));
        let Served {
            cluster,
            mut server,
        } = served;
        server.signal(rustix::process::Signal::KILL);
        server.ended().unwrap();
        end.join().unwrap();
        served = Served::of(cluster, "trashed");
        if served.in_trash("trashed") > 0 {
            break;
        }
        let is_there = |left: &String| name.contains(left.as_str());
        let was_early = served.snapshots("trashed").iter().any(is_there);
        delay *= if was_early { 1.3 } else { 0.9 };
        attempts += 1;
        assert!(attempts < 100, "no kill leaves a snapshot in the trash");
    }
    // The guest's write shows that the killed process has ended.
    let mut device = served.connect();
    write_some(&mut device);
    served.done(&["backup", "begin", "trashed"]);
    served
        .server
        .wait_for_log(&["which an earlier backup had left, is removed"]);
    served.server.wait_for_log(&[SNAPSHOT_IS_MADE]);
    assert_eq!(served.in_trash("trashed"), 0);
    served.done(&["backup", "end"]);
    assert_eq!(
        (
            served.in_trash("trashed"),
            served.snapshots("trashed").len()
        ),
        (0, 0)
    );
}

fn snapshots_that_could_not_be_removed_are_removed_later(version: CephVersion) {
    let test = "snapshots_that_could_not_be_removed_are_removed_later";
    let Some(mut served) = Served::new(version, test, "protected") else {
        return;
    };
    let mut device = served.connect();
    write_some(&mut device);
    served.done(&["backup", "begin", "protected"]);
    served.server.wait_for_log(&[SNAPSHOT_IS_MADE]);
    let first = served.snapshots("protected").remove(0);
    let full = format!("{POOL}/protected@{first}");
    served.rbd(&["snap", "protect", &full]);
    served.done(&["backup", "end"]);
    served.server.wait_for_log(&[&full, "cannot be removed"]);
    served.rbd(&["snap", "unprotect", &full]);
    served.done(&["backup", "begin", "protected", "--id=second"]);
    served
        .server
        .wait_for_log(&[&full, "which an earlier backup had left, is removed"]);
    // Of an open backup, nothing is removed.
    served.server.wait_for_log(&[SNAPSHOT_IS_MADE]);
    served.done(&["backup", "end", "--id=second"]);
    assert_eq!(served.snapshots("protected"), [""; 0]);
}
