//! Persistent bitmaps of images survive kills and crashes, if ringdisk has a state directory.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::driver::Op;
use testkit::qemu_img as qemu;
use testkit::random::{Random, seeds};
use testkit::server::{Server, wait_for_exit};

use crate::support::small_fs::SmallFs;

use super::stored_disk::{
    BLOCK, Loop, OK, SIZE, StoredDisk, blocks, has_time_namespaces, write, write_load,
};

const REGION: u64 = (1 << 20) / BLOCK;
const CONTINUE: &str = "continue where the process before has left them";

/// What QEMU finds in the image.
pub fn stored(disk: &StoredDisk, bitmap: &str) -> BTreeSet<u64> {
    let ranges = qemu::dirty(disk.dir.path(), "disk.qcow2", bitmap).into_iter();
    ranges
        .flat_map(|range| range.start / BLOCK..range.end.div_ceil(BLOCK))
        .collect()
}

fn kill(server: Server) {
    server.signal(Signal::KILL);
}

/// Returns the new process.
pub fn upgrade(disk: &StoredDisk) -> u32 {
    let upgraded = disk.run(&["upgrade", "--json"]).out;
    let upgraded: Value = serde_json::from_str(&upgraded).unwrap();
    upgraded["pid"].as_u64().unwrap() as u32
}

pub fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    wait_for_exit(pid);
}

pub fn count(disk: &StoredDisk, bitmap: &str) -> u64 {
    disk.bitmap(bitmap)["count"].as_u64().unwrap() / BLOCK
}

fn assert_inconsistent(disk: &StoredDisk, server: &Server, words: &str) {
    assert_eq!(disk.bitmap("b")["inconsistent"], Value::Bool(true));
    let log = server.log();
    assert!(
        log.contains("bitmap 'b' of its image is not continued") && log.contains(words),
        "{log}"
    );
    assert_eq!(disk.bits_files(), 0);
}

/// Nothing is left but the image.
fn stop(disk: &StoredDisk, server: Server) {
    StoredDisk::stop(server);
    assert_eq!((disk.record_path(), disk.bits_files()), (None, 0));
    let left: Vec<_> = fs::read_dir(disk.path("state"))
        .unwrap()
        .flatten()
        .collect();
    let is_intent = |path: PathBuf| path.extension().is_some_and(|end| end == "intent");
    assert!(!left.iter().any(|file| is_intent(file.path())), "{left:?}");
    qemu::check(disk.dir.path(), "disk.qcow2", true);
}

#[test]
fn kills_lose_no_bit_of_images() {
    if !qemu::is_there("kills_lose_no_bit_of_images") {
        return;
    }
    for seed in seeds(4712, 4) {
        let disk = StoredDisk::image();
        let mut random = Random(seed);
        let mut server = disk.serve();
        let (mut submitted, mut completed) = (BTreeSet::new(), BTreeSet::new());
        for round in 0..5 {
            let mut device = disk.device();
            let until = (round * 1000 + 50 + random.below(2000)) as usize / 4;
            let fill = round as u8 + 1;
            let new = write_load(&mut device, &mut random, fill, &mut completed, until);
            submitted.extend(new);
            kill(server);
            drop(device);
            server = disk.serve();
            server.wait_for_log(&[CONTINUE]);
            let dirty = disk.bits_in_use();
            assert_eq!(count(&disk, "b"), dirty.len() as u64);
            assert!(completed.is_subset(&dirty), "seed {seed}, round {round}");
            assert!(dirty.is_subset(&submitted), "seed {seed}, round {round}");
        }
        println!(
            "seed {seed}: {} of {} blocks",
            completed.len(),
            submitted.len()
        );
        let dirty = disk.bits_in_use();
        stop(&disk, server);
        assert_eq!(stored(&disk, "b"), dirty);
        let content = qemu::content(disk.dir.path(), "disk.qcow2", "qcow2");
        for (block, bytes) in (0..).zip(content.chunks(BLOCK as usize)) {
            let is_written = bytes.iter().any(|&byte| byte != 0);
            assert!(
                !is_written || dirty.contains(&block),
                "seed {seed}: {block}"
            );
        }
    }
}

/// After a kill, a flush frees the clusters that were discarded, before anything is written.
#[test]
fn kills_after_a_flush_alone_lose_no_bit() {
    if !qemu::is_there("kills_after_a_flush_alone_lose_no_bit") {
        return;
    }
    let disk = StoredDisk::image();
    let server = disk.serve();
    let mut device = disk.device();
    let blocks_of = |mib: u64| (mib << 20) / BLOCK..((mib + 1) << 20) / BLOCK;
    let queue = &mut device.queues[0];
    assert_eq!(queue.write(1 << 11, &[7; 1 << 20]), OK);
    assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    assert_eq!(queue.run(Op::Discard, 1 << 11, 1 << 20), OK);
    drop(device);
    kill(server);
    let server = disk.serve();
    assert_eq!(disk.device().queues[0].run(Op::Flush, 0, 0), OK);
    kill(server);
    let server = disk.serve();
    server.wait_for_log(&[CONTINUE]);
    write(&mut disk.device(), 3);
    stop(&disk, server);
    let dirty: BTreeSet<u64> = blocks_of(1).chain([3]).collect();
    assert_eq!(stored(&disk, "b"), dirty);
}

#[test]
fn kills_keep_what_commands_have_changed() {
    if !qemu::is_there("kills_keep_what_commands_have_changed") {
        return;
    }
    let disk = StoredDisk::image();
    let server = disk.serve();
    disk.add("new");
    let mut device = disk.device();
    write(&mut device, 3);
    disk.run(&["bitmap", "clear", "d", "b"]);
    disk.run(&["bitmap", "disable", "d", "new"]);
    write(&mut device, 4);
    disk.run(&["resize", "d", "128M"]);
    write(&mut device, (100 << 20) / BLOCK);
    kill(server);
    drop(device);
    // One that was never stored is in the record only.
    let server = disk.serve();
    assert_eq!([count(&disk, "b"), count(&disk, "new")], [2, 1]);
    assert_eq!(disk.bitmap("new")["recording"], false);
    // Writes are noted also while no bitmap records them.
    disk.run(&["bitmap", "disable", "d", "b"]);
    write(&mut disk.device(), 2000);
    let notes = fs::read(disk.intent_path()).unwrap();
    assert!(blocks(&notes[..512]).contains(&(2000 / REGION)));
    disk.run(&["bitmap", "enable", "d", "b"]);
    disk.run(&["bitmap", "enable", "d", "new"]);
    // Killed before anything else is written.
    kill(server);
    let server = disk.serve();
    assert_eq!(disk.bitmap("new")["recording"], true);
    kill(server);
    let server = disk.serve();
    write(&mut disk.device(), 5);
    disk.run(&["bitmap", "remove", "d", "b"]);
    kill(server);
    let server = disk.serve();
    assert_eq!((disk.list().len(), count(&disk, "new")), (1, 2));
    stop(&disk, server);
    assert_eq!(stored(&disk, "new"), BTreeSet::from([3, 5]));
}

#[test]
fn upgrades_and_kills_keep_bitmaps_of_images() {
    if !qemu::is_there("upgrades_and_kills_keep_bitmaps_of_images") {
        return;
    }
    let disk = StoredDisk::image();
    let server = disk.serve();
    let mut device = disk.device();
    write(&mut device, 3);
    assert_eq!(device.queues[0].run(Op::Discard, 100 << 3, 4096), OK);
    let record = fs::read(disk.record_path().unwrap()).unwrap();
    let pid = upgrade(&disk);
    assert_eq!(fs::read(disk.record_path().unwrap()).unwrap(), record);
    assert_eq!(count(&disk, "b"), 2);
    write(&mut device, 5);
    drop((device, server));
    signal(pid, Signal::KILL);
    let server = disk.serve();
    assert_eq!(disk.bits_in_use(), BTreeSet::from([3, 5, 100]));
    // Killed before it has written anything.
    let pid = upgrade(&disk);
    drop(server);
    signal(pid, Signal::KILL);
    let server = disk.serve();
    assert_eq!(disk.bits_in_use(), BTreeSet::from([3, 5, 100]));
    write(&mut disk.device(), 6);
    let pid = upgrade(&disk);
    drop(server);
    signal(pid, Signal::TERM);
    assert_eq!(disk.record_path(), None);
    assert_eq!(stored(&disk, "b"), BTreeSet::from([3, 5, 6, 100]));
}

/// A command is the first that changes the image in the new process.
#[test]
fn kills_keep_what_commands_have_changed_after_an_upgrade() {
    if !qemu::is_there("kills_keep_what_commands_have_changed_after_an_upgrade") {
        return;
    }
    let commands: [&[&str]; 4] = [
        &["bitmap", "add", "d", "new", "--persistent"],
        &["bitmap", "clear", "d", "b"],
        &["bitmap", "disable", "d", "b"],
        &["resize", "d", "128M"],
    ];
    for command in commands {
        let disk = StoredDisk::image();
        let server = disk.serve();
        write(&mut disk.device(), 3);
        let pid = upgrade(&disk);
        drop(server);
        disk.run(command);
        signal(pid, Signal::KILL);
        let server = disk.serve();
        server.wait_for_log(&[CONTINUE]);
        assert_ne!(disk.bitmap("b")["inconsistent"], true, "{command:?}");
        if command.contains(&"new") {
            assert_eq!(disk.bitmap("new")["recording"], true);
        }
        stop(&disk, server);
    }
}

#[test]
fn crashes_of_the_host_lose_no_bit_of_images() {
    let test = "crashes_of_the_host_lose_no_bit_of_images";
    if !has_time_namespaces(test) || !qemu::is_there(test) {
        return;
    }
    let disk = StoredDisk::image();
    let mut random = Random(seeds(99, 1)[0]);
    let mut server = disk.serve();
    let (mut submitted, mut regions) = (BTreeSet::new(), BTreeSet::new());
    for round in 0..3 {
        let mut device = disk.device();
        for _ in 0..50 {
            let block = random.below(SIZE / BLOCK / 8) + round * SIZE / BLOCK / 4;
            let is_new = regions.insert(block / REGION);
            submitted.insert(block);
            write(&mut device, block);
            // The note is there before the write is.
            let notes = fs::read(disk.intent_path()).unwrap();
            assert!(!is_new || blocks(&notes[..512]).contains(&(block / REGION)));
        }
        drop(device);
        disk.crash(server);
        server = disk.serve_after_boot();
        server.wait_for_log(&["continue after the crash of the host"]);
        let dirty = disk.bits_in_use();
        assert!(submitted.is_subset(&dirty));
        let is_noted = |block: &u64| regions.contains(&(block / REGION));
        assert!(dirty.iter().all(is_noted));
        // A kill before the next write.
        if round == 1 {
            kill(server);
            server = disk.serve_after_boot();
            assert_eq!(disk.bits_in_use(), dirty);
        }
    }
    let dirty = disk.bits_in_use();
    stop(&disk, server);
    assert_eq!(stored(&disk, "b"), dirty);
}

/// Kills ringdisk after a write, and does something before it starts again.
fn after_kill(between: impl FnOnce(&StoredDisk)) -> (StoredDisk, Server) {
    let disk = StoredDisk::image();
    let server = disk.serve();
    write(&mut disk.device(), 3);
    kill(server);
    // The kernel completes the writes of the killed process, and then releases its lock.
    let is_free = || {
        let mut info = Command::new("qemu-img");
        let info = info.arg("info").arg(&disk.file).output().unwrap();
        info.status.success()
    };
    while !is_free() {}
    between(&disk);
    let server = disk.serve();
    (disk, server)
}

#[test]
fn writes_of_other_programs_make_bitmaps_of_images_inconsistent() {
    if !qemu::is_there("writes_of_other_programs_make_bitmaps_of_images_inconsistent") {
        return;
    }
    // Reading changes nothing.
    let (disk, server) = after_kill(|disk| {
        fs::read(&disk.file).unwrap();
    });
    assert_eq!(count(&disk, "b"), 1);
    stop(&disk, server);
    let foreign = "another program has opened the image for writing";
    let (disk, server) = after_kill(|disk| {
        let write = ["write -P 9 1M 4k".into()];
        qemu::io(disk.dir.path(), "disk.qcow2", &["-f", "qcow2"], &write);
    });
    assert_inconsistent(&disk, &server, foreign);
    // The next backup begins with a new one.
    disk.run(&["bitmap", "remove", "d", "b"]);
    disk.add("b");
    write(&mut disk.device(), 5);
    kill(server);
    let server = disk.serve();
    assert_eq!(count(&disk, "b"), 1);
    stop(&disk, server);
    assert_eq!(stored(&disk, "b"), BTreeSet::from([5]));
    // A program that has written nothing.
    let (disk, server) = after_kill(|disk| {
        let read = ["read 1M 4k".into()];
        qemu::io(disk.dir.path(), "disk.qcow2", &["-f", "qcow2"], &read);
    });
    assert_inconsistent(&disk, &server, foreign);
    StoredDisk::stop(server);
    // A backup that is restored in place.
    let disk = StoredDisk::image();
    let server = disk.serve();
    write(&mut disk.device(), 3);
    let backup = fs::read(&disk.file).unwrap();
    // The journal has another generation after a while.
    std::thread::sleep(std::time::Duration::from_millis(200));
    write(&mut disk.device(), 1000);
    std::thread::sleep(std::time::Duration::from_millis(200));
    write(&mut disk.device(), 3000);
    disk.run(&["bitmap", "clear", "d", "b"]);
    kill(server);
    let file = File::options().write(true).open(&disk.file).unwrap();
    file.write_all_at(&backup, 0).unwrap();
    drop(file);
    let server = disk.serve();
    assert_inconsistent(&disk, &server, "are not used");
    StoredDisk::stop(server);
}

/// The guest only writes in place, so that a copy of the image looks like the image. Its bitmaps are those of another time.
#[test]
fn copies_from_before_a_command_are_not_continued() {
    if !qemu::is_there("copies_from_before_a_command_are_not_continued") {
        return;
    }
    let test = "copies_from_before_a_command_are_not_continued";
    let crashes = if has_time_namespaces(test) {
        &[false, true][..]
    } else {
        &[false]
    };
    let cases = crashes
        .iter()
        .flat_map(|&is_crash| [(is_crash, false), (is_crash, true)]);
    for (is_crash, is_before) in cases {
        let disk = StoredDisk::image();
        let directory = disk.dir.path();
        let full = format!("create -q -f qcow2 -o preallocation=full disk.qcow2 {SIZE}");
        qemu::img(directory, &full);
        qemu::img(directory, "bitmap --add -g 4k disk.qcow2 b");
        let server = disk.serve();
        let mut device = disk.device();
        write(&mut device, 3);
        assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
        let clear = || disk.run(&["bitmap", "clear", "d", "b"]);
        if !is_before {
            clear();
        }
        let backup = fs::read(&disk.file).unwrap();
        write(&mut device, 1000);
        if is_before {
            clear();
        }
        drop(device);
        if is_crash {
            disk.crash(server);
        } else {
            kill(server);
        }
        let file = File::options().write(true).open(&disk.file).unwrap();
        file.write_all_at(&backup, 0).unwrap();
        drop(file);
        let server = if is_crash {
            disk.serve_after_boot()
        } else {
            disk.serve()
        };
        if is_before {
            assert_inconsistent(&disk, &server, "are not used");
        } else {
            // It differs only in what the bitmap shows.
            assert!(count(&disk, "b") >= 1);
        }
        StoredDisk::stop(server);
    }
}

/// The record of a process is not used once another one has served the image, whatever that has left.
#[test]
fn records_are_of_one_process() {
    if !qemu::is_there("records_are_of_one_process") {
        return;
    }
    let (state, aside) = ("state", "aside");
    let (disk, server) = after_kill(|disk| {
        fs::rename(disk.path(state), disk.path(aside)).unwrap();
        fs::create_dir(disk.path(state)).unwrap();
        // It has no record, and leaves none.
        let server = disk.serve();
        assert_eq!(disk.bitmap("b")["inconsistent"], Value::Bool(true));
        write(&mut disk.device(), 4);
        kill(server);
        fs::remove_dir_all(disk.path(state)).unwrap();
        fs::rename(disk.path(aside), disk.path(state)).unwrap();
    });
    assert_inconsistent(
        &disk,
        &server,
        "another program has opened the image for writing",
    );
    StoredDisk::stop(server);
    // A record that was left is not used after an orderly end.
    let (disk, server) = after_kill(|disk| {
        let record = disk.record_path().unwrap();
        let kept = fs::read(&record).unwrap();
        let notes = disk.intent_path();
        let kept_notes = fs::read(&notes).unwrap();
        let server = disk.serve();
        write(&mut disk.device(), 4);
        stop(disk, server);
        fs::write(&record, kept).unwrap();
        fs::write(&notes, kept_notes).unwrap();
    });
    assert_eq!(disk.bits_in_use(), BTreeSet::from([3, 4]));
    stop(&disk, server);
}

#[test]
fn images_without_their_state_directory_have_inconsistent_bitmaps() {
    if !qemu::is_there("images_without_their_state_directory_have_inconsistent_bitmaps") {
        return;
    }
    let (disk, server) = after_kill(|disk| {
        fs::remove_dir_all(disk.path("state")).unwrap();
        fs::create_dir(disk.path("state")).unwrap();
    });
    assert_eq!(disk.bitmap("b")["inconsistent"], Value::Bool(true));
    StoredDisk::stop(server);
    // The bits, or the notes, are lost.
    for what in ["runtime/journals", "state"] {
        let (disk, server) = after_kill(|disk| {
            for file in fs::read_dir(disk.path(what)).unwrap().flatten() {
                let path = file.path();
                let end = path.extension().unwrap_or_default();
                if end == "bits" || end == "intent" {
                    fs::remove_file(path).unwrap();
                }
            }
        });
        assert_eq!(
            disk.bitmap("b")["inconsistent"],
            Value::Bool(true),
            "{what}"
        );
        StoredDisk::stop(server);
    }
}

/// After a kill, the record is found by the image, and not by its name.
#[test]
fn renamed_images_keep_their_bitmaps() {
    if !qemu::is_there("renamed_images_keep_their_bitmaps") {
        return;
    }
    for is_told in [false, true] {
        let mut disk = StoredDisk::image();
        let server = disk.serve();
        write(&mut disk.device(), 3);
        let new = disk.path("renamed.qcow2");
        fs::rename(&disk.file, &new).unwrap();
        if is_told {
            disk.run(&["replace", "d", new.to_str().unwrap()]);
            write(&mut disk.device(), 4);
        }
        kill(server);
        disk.file = new;
        fs::remove_file(disk.path("state/state.json")).unwrap_or_default();
        let server = disk.serve();
        server.wait_for_log(&[CONTINUE]);
        assert_eq!(count(&disk, "b"), 1 + u64::from(is_told));
        StoredDisk::stop(server);
        assert_eq!((disk.record_path(), disk.bits_files()), (None, 0));
    }
}

/// The runtime directory is full when the disk grows. The record says so before anybody is told.
#[test]
fn bitmaps_without_space_for_a_larger_disk_do_not_come_back() {
    let test = "bitmaps_without_space_for_a_larger_disk_do_not_come_back";
    if !qemu::is_there(test) {
        return;
    }
    for (is_upgraded, end) in [
        (false, Signal::KILL),
        (true, Signal::TERM),
        (true, Signal::KILL),
    ] {
        let disk = StoredDisk::image();
        let runtime = disk.path("runtime");
        fs::remove_dir(&runtime).unwrap();
        let Some(_runtime) = SmallFs::mount(&runtime, "1m,mode=700") else {
            return;
        };
        let server = disk.serve();
        disk.run(&[
            "bitmap",
            "add",
            "d",
            "coarse",
            "--granularity",
            "1M",
            "--persistent",
        ]);
        // Its bits would need 2 MiB, and those of the other 8 KiB.
        disk.run(&["resize", "d", "64G"]);
        assert_eq!(disk.bitmap("b")["inconsistent"], Value::Bool(true));
        server.wait_for_log(&[
            "'b' are inconsistent from now on",
            "has no space for its bits",
        ]);
        write(&mut disk.device(), (32 << 30) / BLOCK);
        let is_as_it_was = || {
            assert_eq!(disk.bitmap("b")["inconsistent"], Value::Bool(true));
            assert_eq!(disk.bitmap("coarse")["inconsistent"], Value::Null);
            assert_eq!(disk.bitmap("coarse")["count"], 1 << 20);
        };
        is_as_it_was();
        let mut pid = server.pid();
        if is_upgraded {
            pid = upgrade(&disk);
            is_as_it_was();
            // The bitmap that is lost takes nothing from the other one.
            write(&mut disk.device(), (32 << 30) / BLOCK);
        }
        signal(pid, end);
        drop(server);
        let server = disk.serve();
        is_as_it_was();
        StoredDisk::stop(server);
    }
}

/// Notes that cannot be written cost nothing unless the process is killed.
#[test]
fn failed_notes_of_images_matter_after_a_kill() {
    if !qemu::is_there("failed_notes_of_images_matter_after_a_kill") {
        return;
    }
    for is_killed in [false, true] {
        let disk = StoredDisk::image();
        let server = disk.serve();
        write(&mut disk.device(), 3);
        // Another process reads them first.
        let upgraded = disk.run(&["upgrade", "--json"]).out;
        let upgraded: Value = serde_json::from_str(&upgraded).unwrap();
        drop(server);
        let notes = File::options()
            .write(true)
            .open(disk.intent_path())
            .unwrap();
        notes.set_len(0).unwrap();
        write(&mut disk.device(), 3000);
        assert_eq!(count(&disk, "b"), 2);
        assert_eq!(disk.record_path(), None);
        let pid = upgraded["pid"].as_u64().unwrap() as u32;
        let signal = if is_killed {
            Signal::KILL
        } else {
            Signal::TERM
        };
        kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
        wait_for_exit(pid);
        if is_killed {
            let server = disk.serve();
            assert_eq!(disk.bitmap("b")["inconsistent"], Value::Bool(true));
            StoredDisk::stop(server);
        } else {
            assert_eq!(stored(&disk, "b"), BTreeSet::from([3, 3000]));
        }
    }
}

#[test]
fn bitmaps_of_images_on_block_devices() {
    let test = "bitmaps_of_images_on_block_devices";
    if !qemu::is_there(test) {
        return;
    }
    let mut disk = StoredDisk::image();
    let file = disk.file.clone();
    // The image has space to grow.
    let image = File::options().write(true).open(&file).unwrap();
    image.set_len(2 * SIZE).unwrap();
    drop(image);
    let Some(device) = Loop::new(test, &file) else {
        return;
    };
    disk.file = PathBuf::from(&device.0);
    let server = disk.serve();
    write(&mut disk.device(), 3);
    kill(server);
    let server = disk.serve();
    server.wait_for_log(&[CONTINUE]);
    write(&mut disk.device(), 4);
    assert_eq!(disk.bits_in_use(), BTreeSet::from([3, 4]));
    StoredDisk::stop(server);
    drop(device);
    assert_eq!(stored(&disk, "b"), BTreeSet::from([3, 4]));
}
