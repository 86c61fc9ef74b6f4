//! One moment for all disks, under load.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::json;
use testkit::random::Random;

use super::{BLOCK, DISK_BYTES, OK, Served, numbers, run, write};

pub const BLOCKS: u64 = DISK_BYTES / BLOCK;
/// Blocks of a disk that have numbers; the rest is for load.
pub const NUMBERED: u64 = BLOCKS / 4;

/// Each write is sent when the one before it has completed, on any of the disks. So what the backups have is the state after
/// one of these writes, while other queues keep the disks busy, and others read the backups.
#[test]
fn backups_of_two_disks_are_of_one_moment() {
    let Some(served) = Served::start(
        "backups_of_two_disks_are_of_one_moment",
        &["--fleece=fleece"],
    ) else {
        return;
    };
    let mut log = Vec::new();
    let mut random = Random(7);
    let mut devices = ["a", "b"].map(|name| served.connect(name));
    for round in 0..4 {
        let stop = Arc::new(AtomicBool::new(false));
        let (mut a, mut b) = {
            let [a, b] = devices;
            (a, b)
        };
        let (its_stop, mut its_log) = (stop.clone(), std::mem::take(&mut log));
        let seed = random.below(u64::MAX);
        let writer = thread::spawn(move || {
            let mut random = Random(seed);
            // Also after the backup has begun.
            while !its_stop.load(Ordering::Relaxed) {
                let number = its_log.len() as u64 + 1;
                let (disk, block) = (random.below(2), random.below(NUMBERED));
                let device = if disk == 0 { &mut a } else { &mut b };
                write(device, random.below(2) as usize, block, number);
                its_log.push((disk, block));
                // Load elsewhere.
                for device in [&mut a, &mut b] {
                    let block = NUMBERED + random.below(BLOCKS - NUMBERED);
                    write(device, 1, block, number);
                }
            }
            (a, b, its_log)
        });
        thread::sleep(std::time::Duration::from_millis(200));
        let memory = ["--memory=4M", "--memory=256M"][round % 2];
        let begun = served.done(&["backup", "begin", "a", "b", memory]);
        assert_eq!(begun.as_array().unwrap().len(), 2);
        let copies = ["a-backup", "b-backup"].map(|export| numbers(&served.copy(export)));
        // Read again: the same.
        let again = ["a-backup", "b-backup"].map(|export| numbers(&served.copy(export)));
        assert!(copies == again, "a backup has changed");
        stop.store(true, Ordering::Relaxed);
        let (a, b, its_log) = writer.join().unwrap();
        (devices, log) = ([a, b], its_log);
        assert_eq!(served.done(&["backup", "list"])[0]["error"], json!(null));
        served.done(&["backup", "end"]);
        check(&copies, &log);
    }
}

/// The copies are the state after one of the writes of the log.
pub fn check(copies: &[Vec<u64>; 2], log: &[(u64, u64)]) {
    let numbered = |copy: &Vec<u64>| copy[..NUMBERED as usize].iter().copied().max();
    let last = copies.iter().filter_map(numbered).max().unwrap();
    assert!(
        last > 0 && last < log.len() as u64,
        "{last} of {}",
        log.len()
    );
    let mut expected = BTreeMap::new();
    for (number, &place) in (1..=last).zip(log) {
        expected.insert(place, number);
    }
    for disk in 0..2 {
        for block in 0..NUMBERED {
            let is = copies[disk as usize][block as usize];
            let was = expected.get(&(disk, block)).copied().unwrap_or(0);
            assert_eq!(is, was, "disk {disk}, block {block}, after write {last}");
        }
    }
}

/// The exports are described, cannot be written to, and can be trimmed, as Proxmox does it.
#[test]
fn exports_can_be_read_and_trimmed() {
    let Some(served) = Served::start("exports_can_be_read_and_trimmed", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    for block in 0..64 {
        write(&mut device, 0, block, 1);
    }
    served.done(&["backup", "begin", "a"]);
    for block in 0..32 {
        write(&mut device, 0, block, 2);
    }
    let uri = served.uri("a-backup");
    let info = run("nbdinfo", &["--json", &uri]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], DISK_BYTES);
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["can_trim"], true);
    assert_eq!(export["can_multi_conn"], true);
    let map = run("nbdinfo", &["--json", "--map", &uri]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    assert_eq!(map[0]["length"], 64 * BLOCK, "{map}");
    assert_eq!(map[0]["type"], 0);
    let io = |commands: &[&str]| {
        let mut all = vec!["-f", "raw"];
        all.extend(commands.iter().flat_map(|&command| ["-c", command]));
        all.push(&uri);
        let output = std::process::Command::new("qemu-io").args(all).output();
        let output = output.unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let text = io(&["write -P 9 0 4k", "read 0 4k"]);
    assert!(text.contains("write failed"), "{text}");
    assert!(text.contains("read 4096/4096"), "{text}");
    let text = io(&["discard 0 64k", "read 64k 64k"]);
    assert!(text.contains("read 65536/65536"), "{text}");
    // What was trimmed is gone, and says so.
    let text = io(&["read 0 4k"]);
    assert!(text.contains("read failed"), "{text}");
    served.done(&["backup", "end"]);
    assert_eq!(device.queues[0].write(0, &[3; 4096]), OK);
    let text = io(&["read 0 4k"]);
    assert!(
        text.contains("not available") || text.contains("no export"),
        "{text}"
    );
}
