//! Persistent bitmaps of disks that are in no image: raw files and block devices.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::driver::Op;
use testkit::qemu_img;
use testkit::random::{Random, seeds};
use testkit::server::{Server, wait_for_exit};

use crate::support::small_fs::{FreezableFs, SmallFs};

use super::stored_disk::{
    BLOCK, Loop, OK, SIZE, StoredDisk, blocks, has_time_namespaces, write, write_load,
};

#[test]
fn stops_and_upgrades_keep_every_bit() {
    let raw = StoredDisk::raw();
    let server = raw.serve();
    raw.add("b");
    let mut device = raw.device();
    write(&mut device, 3);
    let zeroes = Op::WriteZeroes { unmap: true };
    assert_eq!(device.queues[0].run(zeroes, 7 << 3, 8192), OK);
    assert_eq!(device.queues[0].run(Op::Discard, 100 << 3, 4096), OK);
    let mut dirty = BTreeSet::from([3, 7, 8, 100]);
    assert_eq!(raw.bits_in_use(), dirty);
    // An upgrade: both processes use the same bits.
    let upgraded: Value = serde_json::from_str(&raw.run(&["upgrade", "--json"]).out).unwrap();
    let pid = upgraded["pid"].as_u64().unwrap() as u32;
    write(&mut device, 5);
    dirty.insert(5);
    assert_eq!(raw.bits_in_use(), dirty);
    assert_eq!(raw.bitmap("b")["count"], dirty.len() as u64 * BLOCK);
    drop((device, server));
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::TERM).unwrap();
    wait_for_exit(pid);
    for round in 0..3 {
        let (record, bits) = raw.record();
        assert!(record["state"]["stored"].is_object(), "{record}");
        assert_eq!((blocks(&bits), raw.bits_files()), (dirty.clone(), 0));
        let server = raw.serve();
        assert!(raw.record().0["state"]["in-use"].is_object());
        assert_eq!(raw.bits_in_use(), dirty);
        let mut device = raw.device();
        write(&mut device, 1000 + round);
        dirty.insert(1000 + round);
        drop(device);
        StoredDisk::stop(server);
    }
    // What grows is dirty: nobody knows what it contains.
    let server = raw.serve();
    raw.run(&["resize", "d", "65M"]);
    dirty.extend(SIZE / BLOCK..(SIZE + (1 << 20)) / BLOCK);
    assert_eq!(raw.bits_in_use(), dirty);
    raw.run(&["bitmap", "clear", "d", "b"]);
    assert_eq!((raw.bits_in_use(), raw.bits_files()), (BTreeSet::new(), 1));
    raw.run(&["bitmap", "remove", "d", "b"]);
    assert_eq!((raw.record_path(), raw.bits_files()), (None, 0));
    StoredDisk::stop(server);
}

/// A bitmap that becomes too large is lost, and no other.
#[test]
fn growth_keeps_small_and_persistent_bitmaps() {
    let raw = StoredDisk::raw();
    let server = raw.serve();
    let add = |name, options: &[&str]| {
        raw.run(&[&["bitmap", "add", "d", name], options].concat());
    };
    // At 1 TiB they have 256, 16, 64, 32 and 32 MiB of bits.
    add("finest", &["--granularity", "512", "--persistent"]);
    add("temporary", &["--granularity", "8k"]);
    add("fine", &["--granularity", "2k", "--persistent"]);
    add("nightly", &["--granularity", "4k", "--persistent"]);
    add(
        "disabled",
        &["--granularity", "4k", "--disabled", "--persistent"],
    );
    raw.run(&["resize", "d", "1T"]);
    let lost = |of: &StoredDisk| -> Vec<_> {
        let all = of.list().into_iter();
        let lost = all.filter(|bitmap| bitmap["inconsistent"] == true);
        lost.map(|bitmap| bitmap["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(lost(&raw), ["temporary", "finest"]);
    let losses = |server: &Server| server.log().matches("are inconsistent from now on").count();
    assert_eq!(losses(&server), 2);
    assert!(server.log().contains("more than 128 MiB of bits"));
    // They do not come back after a kill, and the others stay.
    write(&mut raw.device(), (1 << 40) / BLOCK - 1);
    server.signal(Signal::KILL);
    drop(server);
    let server = raw.serve();
    assert_eq!(lost(&raw), ["finest"]);
    assert_eq!(raw.bitmap("nightly")["count"], (1_u64 << 40) - SIZE);
    raw.run(&["resize", "d", "1025G"]);
    assert_eq!(lost(&raw), ["fine", "finest"]);
    assert_eq!(losses(&server), 1);
    StoredDisk::stop(server);
    let server = raw.serve();
    assert_eq!(raw.list().len(), 4);
    assert_eq!(raw.bitmap("nightly")["count"], (1025_u64 << 30) - SIZE);
    assert_eq!(raw.bitmap("disabled")["count"], 0);
    StoredDisk::stop(server);
}

#[test]
fn notes_of_an_earlier_process_are_not_used() {
    let raw = StoredDisk::raw();
    let mut server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 1);
    let path = raw.intent_path();
    let earlier = fs::read(&path).unwrap();
    StoredDisk::stop(server);
    server = raw.serve();
    write(&mut raw.device(), SIZE / BLOCK - 1);
    assert_eq!(raw.intent_path(), path);
    raw.crash(server);
    fs::write(&path, earlier).unwrap();
    server = raw.serve();
    raw.assert_inconsistent(&server, "they are of another time");
    StoredDisk::stop(server);
}

/// Its data beyond the end is gone, and no write has said so.
#[test]
fn files_that_shrink_make_bitmaps_inconsistent() {
    let raw = StoredDisk::raw();
    let mut server = raw.serve();
    raw.add("b");
    raw.run(&["bitmap", "add", "d", "temporary"]);
    let file = File::options().write(true).open(&raw.file).unwrap();
    file.set_len(SIZE / 2).unwrap();
    server.signal(Signal::HUP);
    server.wait_for_log(&["the disk's file has become smaller"]);
    file.set_len(SIZE).unwrap();
    for name in ["b", "temporary"] {
        assert_eq!(raw.bitmap(name)["inconsistent"], true, "{name}");
    }
    // Not each time that somebody looks.
    server.signal(Signal::HUP);
    raw.run(&["resize", "d"]);
    assert_eq!(
        server.log().matches("are inconsistent from now on").count(),
        1
    );
    StoredDisk::stop(server);
    server = raw.serve();
    raw.assert_inconsistent(&server, "the disk's file has become smaller");
    // A request that fails shows it, too.
    raw.run(&["bitmap", "remove", "d", "b"]);
    raw.add("b");
    file.set_len(SIZE / 2).unwrap();
    let mut device = raw.device();
    let sector = (SIZE - BLOCK) >> 9;
    assert!(device.queues[0].read(sector, BLOCK as usize).is_err());
    file.set_len(SIZE).unwrap();
    server.wait_for_log(&["are inconsistent from now on", "has become smaller"]);
    assert_eq!(raw.bitmap("b")["inconsistent"], true);
    drop(device);
    StoredDisk::stop(server);
}

/// They are not forgotten silently.
#[test]
fn bitmaps_of_disks_that_cannot_have_them_are_shown_and_removed() {
    let mut raw = StoredDisk::raw();
    let server = raw.serve();
    raw.add("b");
    StoredDisk::stop(server);
    raw.options.push_str(",lock=running");
    for _ in 0..2 {
        let server = raw.serve();
        let _device = raw.device();
        raw.assert_inconsistent(&server, "lock=running");
        StoredDisk::stop(server);
    }
    let server = raw.serve();
    let _device = raw.device();
    raw.run(&["bitmap", "remove", "d", "b"]);
    assert!(raw.list().is_empty() && raw.record_path().is_none());
    StoredDisk::stop(server);
}

/// What is written to a device while it cannot have persistent bitmaps is in none of them, and nothing on the device shows that.
#[test]
fn devices_that_were_written_without_their_bitmaps_have_none() {
    let mut raw = StoredDisk::raw();
    let Some(device) = Loop::new("devices_written_without_bitmaps", &raw.file) else {
        return;
    };
    raw.file = PathBuf::from(&device.0);
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 3);
    server.signal(Signal::KILL);
    drop(server);
    let options = raw.options.clone();
    raw.options.push_str(",lock=running");
    let server = raw.serve();
    let mut device = raw.device();
    write(&mut device, 4);
    raw.assert_inconsistent(&server, "lock=running");
    server.signal(Signal::KILL);
    drop((device, server));
    raw.options = options;
    let server = raw.serve();
    raw.assert_inconsistent(&server, "lock=running");
    StoredDisk::stop(server);
}

#[test]
fn kills_lose_no_bit() {
    for seed in seeds(4711, 4) {
        let raw = StoredDisk::raw();
        let mut random = Random(seed);
        let mut server = raw.serve();
        raw.add("b");
        let (mut submitted, mut completed) = (BTreeSet::new(), BTreeSet::new());
        for round in 0..5 {
            let mut device = raw.device();
            let until = (round * 1000 + 50 + random.below(2000)) as usize / 4;
            let fill = round as u8 + 1;
            let new = write_load(&mut device, &mut random, fill, &mut completed, until);
            submitted.extend(new);
            server.signal(Signal::KILL);
            drop((device, server));
            server = raw.serve();
            server.wait_for_log(&["continue where the process before has left them"]);
            let dirty = raw.bits_in_use();
            assert_eq!(raw.bitmap("b")["count"], dirty.len() as u64 * BLOCK);
            assert!(completed.is_subset(&dirty), "seed {seed}, round {round}");
            assert!(dirty.is_subset(&submitted), "seed {seed}, round {round}");
            let content = fs::read(&raw.file).unwrap();
            for (block, bytes) in (0..).zip(content.chunks(BLOCK as usize)) {
                let is_written = bytes.iter().any(|&byte| byte != 0);
                assert!(
                    !is_written || dirty.contains(&block),
                    "seed {seed}: {block}"
                );
            }
        }
        StoredDisk::stop(server);
        assert_eq!(raw.bits_files(), 0);
    }
}

const REGION: u64 = (1 << 20) / BLOCK;

/// What may be on the disk after a power cut is dirty, and no region that was not written to.
#[test]
fn crashes_of_the_host_lose_no_bit() {
    if !has_time_namespaces("crashes_of_the_host_lose_no_bit") {
        return;
    }
    let raw = StoredDisk::raw();
    let mut random = Random(seeds(99, 1)[0]);
    let mut server = raw.serve();
    raw.add("b");
    let (mut submitted, mut regions) = (BTreeSet::new(), BTreeSet::new());
    for round in 0..3 {
        let mut device = raw.device();
        for _ in 0..50 {
            let block = random.below(SIZE / BLOCK / 8) + round * SIZE / BLOCK / 4;
            let is_new = regions.insert(block / REGION);
            submitted.insert(block);
            write(&mut device, block);
            // The note is there before the write is.
            let notes = fs::read(raw.intent_path()).unwrap();
            assert!(!is_new || blocks(&notes[..512]).contains(&(block / REGION)));
        }
        drop(device);
        raw.crash(server);
        server = raw.serve_after_boot();
        let log = server.log();
        assert!(
            log.contains("continues after the crash of the host"),
            "{log}"
        );
        let dirty = raw.bits_in_use();
        assert!(submitted.is_subset(&dirty));
        assert!(
            dirty
                .iter()
                .all(|block| regions.contains(&(block / REGION)))
        );
        let (record, bits) = raw.record();
        assert!(record["state"]["in-use"].is_object(), "{record}");
        assert_eq!(blocks(&bits), dirty);
    }
    // A bitmap that is cleared and then stored has nothing of that.
    raw.run(&["bitmap", "clear", "d", "b"]);
    write(&mut raw.device(), 5);
    StoredDisk::stop(server);
    assert_eq!(blocks(&raw.record().1), BTreeSet::from([5]));
    let left = fs::read_dir(raw.path("state")).unwrap().flatten();
    let is_intent = |path: &PathBuf| path.extension().is_some_and(|end| end == "intent");
    let intents: Vec<_> = left.map(|file| file.path()).filter(is_intent).collect();
    assert!(intents.is_empty(), "{intents:?}");
}

/// What was written after the host has started was written by another program.
fn check_writes_after_a_crash(raw: &StoredDisk) {
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 3);
    raw.crash(server);
    let server = raw.serve();
    raw.assert_inconsistent(&server, "another program has written to the disk");
    StoredDisk::stop(server);
}

#[test]
fn writes_to_files_after_a_crash_make_bitmaps_inconsistent() {
    check_writes_after_a_crash(&StoredDisk::raw());
}

#[test]
fn writes_to_devices_after_a_crash_make_bitmaps_inconsistent() {
    let mut raw = StoredDisk::raw();
    // It is not set up again, so the kernel still counts what was written before.
    let test = "writes_to_devices_after_a_crash_make_bitmaps_inconsistent";
    let Some(device) = Loop::new(test, &raw.file) else {
        return;
    };
    raw.file = PathBuf::from(&device.0);
    check_writes_after_a_crash(&raw);
}

/// The file with the notes cannot be written: the guest continues, and the bitmap does not.
#[test]
fn a_failed_note_costs_the_bitmap_and_not_the_write() {
    let raw = StoredDisk::raw();
    let server = raw.serve();
    raw.add("b");
    // It is read first.
    let notes = File::options().write(true).open(raw.intent_path()).unwrap();
    notes.set_len(0).unwrap();
    let mut device = raw.device();
    write(&mut device, 3);
    write(&mut device, 3000);
    assert_eq!(raw.bitmap("b")["inconsistent"], Value::Bool(true));
    server.wait_for_log(&["changes could not be noted"]);
    server.signal(Signal::KILL);
    drop((device, server));
    let server = raw.serve();
    raw.assert_inconsistent(&server, "changes could not be noted");
    StoredDisk::stop(server);
}

/// The state directory is full when the disk is opened: its bitmaps work, and do not vanish.
#[test]
fn a_full_state_directory_costs_the_bitmaps_visibly() {
    let raw = StoredDisk::raw();
    fs::remove_dir(raw.path("state")).unwrap();
    let Some(state) = SmallFs::mount(&raw.path("state"), "2m,mode=700") else {
        return;
    };
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 3);
    StoredDisk::stop(server);
    let filler = state.0.join("filler");
    fs::write(&filler, vec![0; 4 << 20]).unwrap_err();
    let server = raw.serve();
    server.wait_for_log(&["cannot be written", "inconsistent"]);
    write(&mut raw.device(), 4);
    assert_eq!(raw.bitmap("b")["count"], 2 * BLOCK);
    server.signal(Signal::KILL);
    drop(server);
    let server = raw.serve();
    raw.assert_inconsistent(&server, "could not be written when the disk was opened");
    assert_eq!(raw.bits_files(), 0);
    StoredDisk::stop(server);
    // It is stored if there is space again when the disk is closed.
    fs::remove_file(&filler).unwrap();
    let server = raw.serve();
    raw.run(&["bitmap", "remove", "d", "b"]);
    raw.add("b");
    StoredDisk::stop(server);
    fs::write(&filler, vec![0; 4 << 20]).unwrap_err();
    let server = raw.serve();
    write(&mut raw.device(), 5);
    fs::remove_file(&filler).unwrap();
    StoredDisk::stop(server);
    let server = raw.serve();
    assert_eq!(raw.bitmap("b")["count"], BLOCK);
    StoredDisk::stop(server);
}

/// Writes to parts of the disk that are not noted wait for the state directory, and the log says so.
#[test]
fn a_state_directory_that_does_not_answer_is_named() {
    let raw = StoredDisk::raw();
    let Some(state) = FreezableFs::mount(&raw.path("state")) else {
        return;
    };
    let server = raw.serve();
    raw.add("b");
    let mut device = raw.device();
    write(&mut device, 3);
    state.freeze(true);
    write(&mut device, 3);
    let queue = &mut device.queues[0];
    queue.prepare(0, Op::Write, 900 * (BLOCK >> 9), 512);
    queue.submit(&[0]);
    thread::sleep(Duration::from_secs(3));
    state.freeze(false);
    assert_eq!(queue.finish(1), [(0, OK)]);
    server.wait_for_log(&["writes to new parts of the disk waited for it"]);
    assert_eq!(raw.bitmap("b")["count"], 2 * BLOCK);
    drop(device);
    StoredDisk::stop(server);
}

#[test]
fn what_a_crash_leaves_may_be_damaged() {
    let raw = StoredDisk::raw();
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 3);
    fs::remove_file(raw.intent_path()).unwrap();
    raw.crash(server);
    let server = raw.serve();
    raw.assert_inconsistent(&server, "it was in use when the host crashed");
    StoredDisk::stop(server);
    // It stays so, until it is removed.
    let server = raw.serve();
    assert_eq!(raw.bitmap("b")["inconsistent"], Value::Bool(true));
    raw.run(&["bitmap", "remove", "d", "b"]);
    raw.add("b");
    write(&mut raw.device(), 4);
    StoredDisk::stop(server);
    let server = raw.serve();
    assert_eq!(raw.bitmap("b")["count"], BLOCK);
    // The bits are lost, and the boot is the same.
    server.signal(Signal::KILL);
    drop(server);
    let name = raw.record().0["bitmaps"][0]["bits"]
        .as_str()
        .unwrap()
        .to_owned();
    fs::remove_file(raw.path("runtime/journals").join(name)).unwrap();
    let server = raw.serve();
    raw.assert_inconsistent(&server, "has left no bits of it");
    // A damaged record.
    StoredDisk::stop(server);
    fs::write(raw.record_path().unwrap(), "{").unwrap();
    let server = raw.serve();
    server.wait_for_log(&["is damaged"]);
    assert_eq!(raw.list().len(), 1);
    raw.run(&["bitmap", "remove", "d", ""]);
    assert_eq!((raw.list().len(), raw.record_path()), (0, None));
    StoredDisk::stop(server);
}

#[test]
fn writes_of_other_programs_make_bitmaps_inconsistent() {
    let raw = StoredDisk::raw();
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 3);
    StoredDisk::stop(server);
    // Reading it changes nothing.
    fs::read(&raw.file).unwrap();
    let server = raw.serve();
    assert_eq!(raw.bitmap("b")["count"], BLOCK);
    StoredDisk::stop(server);
    let file = File::options().write(true).open(&raw.file).unwrap();
    file.write_all_at(&[9; 512], 1 << 20).unwrap();
    let server = raw.serve();
    raw.assert_inconsistent(&server, "another program has written to the disk");
    raw.run(&["bitmap", "remove", "d", "b"]);
    raw.add("b");
    StoredDisk::stop(server);
    // Another file at its place, with the same times of writing.
    let (copy, modified) = (
        raw.path("copy"),
        fs::metadata(&raw.file).unwrap().modified().unwrap(),
    );
    fs::copy(&raw.file, &copy).unwrap();
    File::options()
        .write(true)
        .open(&copy)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    fs::rename(&copy, &raw.file).unwrap();
    let server = raw.serve();
    raw.assert_inconsistent(&server, "replaced the disk's file");
    raw.run(&["bitmap", "remove", "d", "b"]);
    raw.add("b");
    write(&mut raw.device(), 3);
    // After a kill, once some time has passed.
    server.signal(Signal::KILL);
    drop(server);
    let server = raw.serve();
    assert_eq!(raw.bitmap("b")["count"], BLOCK);
    server.signal(Signal::KILL);
    drop(server);
    let file = File::options().write(true).open(&raw.file).unwrap();
    file.write_all_at(&[8; 512], 1 << 20).unwrap();
    let later = SystemTime::now() + Duration::from_secs(5);
    file.set_modified(later).unwrap();
    let server = raw.serve();
    raw.assert_inconsistent(&server, "another program has written to the disk");
    StoredDisk::stop(server);
}

#[test]
fn snapshots_store_the_bitmaps_below() {
    if !qemu_img::is_there("snapshots_store_the_bitmaps_below") {
        return;
    }
    let raw = StoredDisk::raw();
    let server = raw.serve();
    raw.add("b");
    let mut device = raw.device();
    write(&mut device, 3);
    qemu_img::img(
        raw.dir.path(),
        "create -q -f qcow2 -b disk.raw -F raw above.qcow2",
    );
    let above = raw.path("above.qcow2");
    raw.run(&["replace", "d", above.to_str().unwrap()]);
    write(&mut device, 4);
    assert_eq!(raw.list().len(), 0);
    let (record, bits) = raw.record();
    assert!(record["state"]["stored"].is_object(), "{record}");
    assert_eq!((blocks(&bits), raw.bits_files()), (BTreeSet::from([3]), 0));
    drop(device);
    StoredDisk::stop(server);
    // The disk below, by itself.
    for remembered in ["state/state.json", "state/left.json"] {
        fs::remove_file(raw.path(remembered)).unwrap();
    }
    let server = raw.serve();
    assert_eq!(raw.bits_in_use(), BTreeSet::from([3]));
    StoredDisk::stop(server);
}

#[test]
fn bitmaps_of_block_devices() {
    let mut raw = StoredDisk::raw();
    let Some(device) = Loop::new("bitmaps_of_block_devices", &raw.file) else {
        return;
    };
    raw.file = PathBuf::from(&device.0);
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 3);
    server.signal(Signal::KILL);
    drop(server);
    let server = raw.serve();
    write(&mut raw.device(), 4);
    StoredDisk::stop(server);
    let server = raw.serve();
    assert_eq!(raw.bits_in_use(), BTreeSet::from([3, 4]));
    StoredDisk::stop(server);
    // The kernel counts the writes of other programs.
    let file = File::options().write(true).open(&raw.file).unwrap();
    file.write_all_at(&[9; 4096], 1 << 20).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let server = raw.serve();
    raw.assert_inconsistent(&server, "another program has written to the disk");
    StoredDisk::stop(server);
}

/// What a killed process has left is used only if it is all there.
#[test]
fn bits_that_were_cut_off_make_the_bitmap_inconsistent() {
    let raw = StoredDisk::raw();
    let server = raw.serve();
    raw.add("b");
    write(&mut raw.device(), 1);
    server.signal(Signal::KILL);
    drop(server);
    let (record, _) = raw.record();
    let name = record["bitmaps"][0]["bits"].as_str().unwrap();
    let bits = File::options()
        .write(true)
        .open(raw.path("runtime/journals").join(name));
    bits.unwrap().set_len(4096).unwrap();
    let server = raw.serve();
    raw.assert_inconsistent(&server, "their file is too short");
    StoredDisk::stop(server);
}

/// Some file systems have times in whole seconds: a write in the second of the stop must be noticed, too.
#[test]
fn writes_of_other_programs_are_noticed_where_times_are_coarse() {
    let mut raw = StoredDisk::raw();
    let small_inodes = ["-I", "128"];
    let Some(fs) = FreezableFs::mount_with(&raw.path("coarse"), &small_inodes) else {
        return;
    };
    raw.file = fs.0.join("disk.raw");
    File::create(&raw.file).unwrap().set_len(SIZE).unwrap();
    for _ in 0..3 {
        let server = raw.serve();
        raw.add("b");
        write(&mut raw.device(), 1);
        StoredDisk::stop(server);
        let file = File::options().write(true).open(&raw.file).unwrap();
        file.write_all_at(&[7; 4096], 5 * BLOCK).unwrap();
        let server = raw.serve();
        raw.assert_inconsistent(&server, "another program has written");
        raw.run(&["bitmap", "remove", "d", "b"]);
        StoredDisk::stop(server);
    }
}
