//! Persistent bitmaps of images in a cluster: what a stop, a kill or a power cut leaves is continued, unless another client
//! may have written to the image.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use testkit::ceph::POOL;
use testkit::driver::{Device, HANG, Op};
use testkit::random::Random;
use testkit::server::Server;

use super::cluster::{CephVersion, Cluster};
use crate::control::stored_disk::{BLOCK, OK, SIZE, StoredDisk, blocks, write, write_load};

on_each_release!(
    bitmaps_need_the_lock_of_the_image,
    clients_that_wrote_while_stopped_make_bitmaps_inconsistent,
    clients_that_wrote_after_a_kill_make_bitmaps_inconsistent,
    clients_that_wrote_while_served_make_bitmaps_inconsistent,
    kills_lose_no_bit,
    images_that_shrink_make_bitmaps_inconsistent,
    locks_that_are_not_understood_prevent_only_bitmaps,
    lost_connections_keep_the_lock_until_it_is_broken,
    older_copies_of_the_state_make_bitmaps_inconsistent,
    other_images_of_the_same_name_have_no_bitmaps,
    power_cuts_lose_no_bit,
    stops_keep_every_bit,
);

const OTHER: &str = "another client has had the lock of the disk's image";
const CONTINUE: &str = "continue where the process before has left them";

/// A new image, and a ringdisk with a state directory that serves it.
struct Stored {
    cluster: Cluster,
    disk: StoredDisk,
    image: String,
}

impl Stored {
    fn new(version: CephVersion, test: &str, name: &str) -> Option<Self> {
        let mut cluster = Cluster::get(version, test)?;
        cluster.ceph().create(name, SIZE >> 20).unwrap();
        let image = format!("{POOL}/{name}");
        Some(Self {
            disk: Self::disk(&mut cluster, &image),
            cluster,
            image,
        })
    }

    fn disk(cluster: &mut Cluster, image: &str) -> StoredDisk {
        let (options, release) = (cluster.ceph().options(), cluster.release().clone());
        let ringdisk = move || release.command(env!("CARGO_BIN_EXE_ringdisk"));
        StoredDisk::new(PathBuf::from(format!("rbd:{image}")), options, ringdisk)
    }

    /// With an empty bitmap `b`.
    fn served(&self) -> Server {
        let server = self.disk.serve();
        self.disk.add("b");
        server
    }

    fn rbd(&mut self, arguments: &[&str]) -> String {
        self.cluster.ceph().rbd(arguments).unwrap()
    }

    /// Another client writes to the image, and ends.
    fn write_elsewhere(&mut self) {
        let image = self.image.clone();
        let size = ["--io-size=4096", "--io-total=4096", "--io-threads=1"];
        self.rbd(&[&["bench", "--io-type=write"], &size[..], &[&image]].concat());
    }

    /// The bitmap is removed, and there is a new one.
    fn begin_again(&self) {
        self.disk.run(&["bitmap", "remove", "d", "b"]);
        self.disk.add("b");
    }

    fn kill(&self, server: Server) {
        server.signal(Signal::KILL);
        drop(server);
    }

    fn name(&self) -> &str {
        self.image.split_once('/').unwrap().1
    }

    fn content(&mut self) -> Vec<u8> {
        let name = self.name().to_owned();
        self.cluster.content(&name)
    }
}

/// What is read, and snapshots of a served image, change nothing.
fn stops_keep_every_bit(version: CephVersion) {
    let Some(mut stored) = Stored::new(version, "stops_keep_every_bit", "kept-bits") else {
        return;
    };
    let server = stored.served();
    let mut device = stored.disk.device();
    write(&mut device, 3);
    let zeroes = Op::WriteZeroes { unmap: true };
    assert_eq!(device.queues[0].run(zeroes, 7 << 3, 8192), OK);
    assert_eq!(device.queues[0].run(Op::Discard, 1024 << 3, 4096), OK);
    let mut dirty = BTreeSet::from([3, 7, 8, 1024]);
    assert_eq!(stored.disk.bits_in_use(), dirty);
    let snapshot = format!("{}@one", stored.image);
    stored.rbd(&["snap", "create", "--no-progress", &snapshot]);
    drop(device);
    StoredDisk::stop(server);
    for round in 0..2 {
        let (record, bits) = stored.disk.record();
        assert!(record["state"]["stored"].is_object(), "{record}");
        assert_eq!(
            (blocks(&bits), stored.disk.bits_files()),
            (dirty.clone(), 0)
        );
        stored.content();
        let image = stored.image.clone();
        stored.rbd(&["info", &image]);
        assert!(!stored.rbd(&["lock", "ls", &image]).contains("auto"));
        let server = stored.disk.serve();
        assert_eq!(stored.disk.bits_in_use(), dirty, "{}", server.log());
        let mut device = stored.disk.device();
        write(&mut device, 2000 + round);
        dirty.insert(2000 + round);
        drop(device);
        StoredDisk::stop(server);
    }
    // What grows is dirty.
    let server = stored.disk.serve();
    stored.disk.run(&["resize", "d", "65M"]);
    dirty.extend(SIZE / BLOCK..(SIZE + (1 << 20)) / BLOCK);
    assert_eq!(stored.disk.bits_in_use(), dirty);
    StoredDisk::stop(server);
    let server = stored.disk.serve();
    assert_eq!(stored.disk.bits_in_use(), dirty, "{}", server.log());
    stored.disk.run(&["bitmap", "remove", "d", "b"]);
    assert_eq!(stored.disk.record_path(), None);
    StoredDisk::stop(server);
}

fn kills_lose_no_bit(version: CephVersion) {
    let Some(mut stored) = Stored::new(version, "kills_lose_no_bit", "killed-bits") else {
        return;
    };
    let mut random = Random(815);
    let mut server = stored.served();
    let (mut submitted, mut completed) = (BTreeSet::new(), BTreeSet::new());
    for round in 1..4 {
        let mut device = stored.disk.device();
        let until = round * 100 + random.below(200) as usize;
        let new = write_load(&mut device, &mut random, round as u8, &mut completed, until);
        submitted.extend(new);
        stored.kill(server);
        drop(device);
        server = stored.disk.serve();
        server.wait_for_log(&[CONTINUE]);
        let dirty = stored.disk.bits_in_use();
        assert!(completed.is_subset(&dirty), "round {round}");
        assert!(dirty.is_subset(&submitted), "round {round}");
        let content = stored.content();
        for (block, bytes) in (0..).zip(content.chunks(BLOCK as usize)) {
            let is_written = bytes.iter().any(|&byte| byte != 0);
            assert!(!is_written || dirty.contains(&block), "{block}");
        }
    }
    // The next stop stores them.
    let dirty = stored.disk.bits_in_use();
    StoredDisk::stop(server);
    assert_eq!(blocks(&stored.disk.record().1), dirty);
    let server = stored.disk.serve();
    assert_eq!(stored.disk.bits_in_use(), dirty);
    StoredDisk::stop(server);
}

/// All that may be in the cluster after a power cut is dirty, and nothing outside of the regions that were written to.
fn power_cuts_lose_no_bit(version: CephVersion) {
    let Some(mut stored) = Stored::new(version, "power_cuts_lose_no_bit", "cut-bits") else {
        return;
    };
    let region = (1 << 20) / BLOCK;
    let server = stored.served();
    let mut device = stored.disk.device();
    let mut written = BTreeSet::from([3]);
    write(&mut device, 3);
    drop(device);
    stored.disk.crash(server);
    let mut server = stored.disk.serve();
    server.wait_for_log(&["continues after the crash of the host"]);
    let mut device = stored.disk.device();
    for block in [5 * region + 1, 9 * region] {
        write(&mut device, block);
        written.insert(block);
        let notes = fs::read(stored.disk.intent_path()).unwrap();
        assert!(blocks(&notes[..512]).contains(&(block / region)));
    }
    drop(device);
    stored.disk.crash(server);
    server = stored.disk.serve();
    server.wait_for_log(&["continues after the crash of the host"]);
    let dirty = stored.disk.bits_in_use();
    assert!(written.is_subset(&dirty));
    let regions = [0, 5, 9];
    assert!(
        dirty
            .iter()
            .all(|block| regions.contains(&(block / region)))
    );
    write(&mut stored.disk.device(), 4);
    stored.disk.crash(server);
    stored.write_elsewhere();
    let server = stored.disk.serve();
    stored.disk.assert_inconsistent(&server, OTHER);
    StoredDisk::stop(server);
}

fn clients_that_wrote_while_stopped_make_bitmaps_inconsistent(version: CephVersion) {
    let test = "clients_that_wrote_while_stopped_make_bitmaps_inconsistent";
    let Some(mut stored) = Stored::new(version, test, "stopped-bits") else {
        return;
    };
    let snapshot = format!("{}@one", stored.image);
    stored.rbd(&["snap", "create", "--no-progress", &snapshot]);
    let server = stored.served();
    write(&mut stored.disk.device(), 3);
    StoredDisk::stop(server);
    stored.write_elsewhere();
    let server = stored.disk.serve();
    stored.disk.assert_inconsistent(&server, OTHER);
    StoredDisk::stop(server);
    // It stays so.
    let server = stored.disk.serve();
    assert_eq!(stored.disk.bitmap("b")["inconsistent"], true);
    stored.begin_again();
    write(&mut stored.disk.device(), 3);
    StoredDisk::stop(server);
    stored.rbd(&["snap", "rollback", "--no-progress", &snapshot]);
    let server = stored.disk.serve();
    stored.disk.assert_inconsistent(&server, OTHER);
    stored.begin_again();
    StoredDisk::stop(server);
    let server = stored.disk.serve();
    assert_eq!(stored.disk.bitmap("b")["count"], 0);
    assert_eq!(stored.disk.bitmap("b")["inconsistent"], Value::Null);
    StoredDisk::stop(server);
}

/// The client breaks the lock of the killed process.
fn clients_that_wrote_after_a_kill_make_bitmaps_inconsistent(version: CephVersion) {
    let test = "clients_that_wrote_after_a_kill_make_bitmaps_inconsistent";
    let Some(mut stored) = Stored::new(version, test, "broken-bits") else {
        return;
    };
    let server = stored.served();
    write(&mut stored.disk.device(), 3);
    stored.kill(server);
    stored.write_elsewhere();
    let server = stored.disk.serve();
    stored.disk.assert_inconsistent(&server, OTHER);
    stored.begin_again();
    write(&mut stored.disk.device(), 4);
    stored.kill(server);
    let server = stored.disk.serve();
    server.wait_for_log(&[CONTINUE]);
    assert_eq!(stored.disk.bits_in_use(), BTreeSet::from([4]));
    StoredDisk::stop(server);
}

/// librbd hands the lock over to a client that asks for it, and takes it back with the next write.
fn clients_that_wrote_while_served_make_bitmaps_inconsistent(version: CephVersion) {
    let test = "clients_that_wrote_while_served_make_bitmaps_inconsistent";
    let Some(mut stored) = Stored::new(version, test, "shared-bits") else {
        return;
    };
    let is_inconsistent = |stored: &Stored| stored.disk.bitmap("b")["inconsistent"] == true;
    let took_over = |stored: &mut Stored, device: &mut Device| {
        stored.write_elsewhere();
        write(device, 4);
        let image = stored.image.clone();
        assert!(stored.rbd(&["lock", "ls", &image]).contains("auto"));
    };
    // A command that changes bitmaps shows it.
    let mut server = stored.served();
    let mut device = stored.disk.device();
    write(&mut device, 3);
    took_over(&mut stored, &mut device);
    let refused = stored.disk.try_to(&["bitmap", "clear", "d", "b"]);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(is_inconsistent(&stored));
    server.wait_for_log(&[OTHER]);
    stored.begin_again();
    // A backup shows it, and is full.
    write(&mut device, 3);
    took_over(&mut stored, &mut device);
    let nbd = stored.disk.path("nbd.sock").display().to_string();
    stored.disk.run(&["export", "d", "--listen", &nbd]);
    let begin = ["backup", "begin", "d", "--bitmap", "b"];
    let begun = stored.disk.run(&begin);
    assert!(begun.out.contains("full"), "{begun:?}");
    assert!(is_inconsistent(&stored));
    stored.disk.run(&["backup", "end", "--failed"]);
    stored.begin_again();
    // A backup during which it happens does not advance the bitmap.
    let begun = stored.disk.run(&begin);
    assert!(!begun.out.contains("full"), "{begun:?}");
    took_over(&mut stored, &mut device);
    let ended = stored.disk.try_to(&["backup", "end"]);
    assert_ne!(ended.code, Some(0), "{ended:?}");
    let left = stored.disk.list();
    let is_usable = |bitmap: &Value| bitmap["inconsistent"] != true;
    assert!(!left.iter().any(is_usable), "{left:?}");
    for bitmap in left {
        let name = bitmap["name"].as_str().unwrap();
        stored.disk.run(&["bitmap", "remove", "d", name]);
    }
    stored.disk.add("b");
    // A stop shows it.
    took_over(&mut stored, &mut device);
    drop(device);
    StoredDisk::stop(server);
    server = stored.disk.serve();
    assert!(is_inconsistent(&stored));
    stored.begin_again();
    // The same client has the lock when it is killed.
    let mut device = stored.disk.device();
    write(&mut device, 3);
    took_over(&mut stored, &mut device);
    stored.kill(server);
    drop(device);
    let server = stored.disk.serve();
    stored.disk.assert_inconsistent(&server, OTHER);
    StoredDisk::stop(server);
}

/// A process that is stopped for longer than the cluster waits for it.
fn lost_connections_keep_the_lock_until_it_is_broken(version: CephVersion) {
    let test = "lost_connections_keep_the_lock_until_it_is_broken";
    let Some(mut stored) = Stored::new(version, test, "silent-bits") else {
        return;
    };
    let is_watched = |stored: &mut Stored| {
        let image = stored.image.clone();
        stored.rbd(&["status", &image]).contains("watcher=")
    };
    let until = |stored: &mut Stored, is_it: bool| {
        let start = Instant::now();
        while is_watched(stored) != is_it {
            assert!(start.elapsed() < HANG, "watched, or not");
            thread::sleep(Duration::from_millis(200));
        }
    };
    let server = stored.served();
    write(&mut stored.disk.device(), 3);
    server.signal(Signal::STOP);
    until(&mut stored, false);
    server.signal(Signal::CONT);
    until(&mut stored, true);
    write(&mut stored.disk.device(), 4);
    StoredDisk::stop(server);
    let server = stored.disk.serve();
    let log = server.log();
    assert_eq!(stored.disk.bits_in_use(), BTreeSet::from([3, 4]), "{log}");
    server.signal(Signal::STOP);
    stored.write_elsewhere();
    server.signal(Signal::CONT);
    stored.kill(server);
    let server = stored.disk.serve();
    stored.disk.assert_inconsistent(&server, OTHER);
    StoredDisk::stop(server);
}

fn other_images_of_the_same_name_have_no_bitmaps(version: CephVersion) {
    let test = "other_images_of_the_same_name_have_no_bitmaps";
    let Some(mut stored) = Stored::new(version, test, "again-bits") else {
        return;
    };
    for is_killed in [false, true] {
        let server = stored.served();
        write(&mut stored.disk.device(), 3);
        if is_killed {
            stored.kill(server);
            // It cannot be removed while it is watched.
            let image = stored.image.clone();
            let renamed = format!("{image}-old");
            stored.rbd(&["rename", &image, &renamed]);
        } else {
            StoredDisk::stop(server);
            let image = stored.image.clone();
            stored.rbd(&["rm", "--no-progress", &image]);
        }
        let name = stored.name().to_owned();
        stored.cluster.ceph().create(&name, SIZE >> 20).unwrap();
        let server = stored.disk.serve();
        stored
            .disk
            .assert_inconsistent(&server, "another image, which had this name");
        stored.disk.run(&["bitmap", "remove", "d", "b"]);
        StoredDisk::stop(server);
    }
}

/// Each is as a process has left it, but not the last one.
fn older_copies_of_the_state_make_bitmaps_inconsistent(version: CephVersion) {
    let test = "older_copies_of_the_state_make_bitmaps_inconsistent";
    let Some(mut stored) = Stored::new(version, test, "copied-bits") else {
        return;
    };
    let image = stored.image.clone();
    let other = Stored::disk(&mut stored.cluster, &image);
    let copy = |from: &str, to: PathBuf| {
        let _ = fs::remove_dir_all(&to);
        let mut command = Command::new("cp");
        command.arg("-a").args([stored.disk.path(from), to]);
        assert!(command.status().unwrap().success());
    };
    const OLDER: &str = "the state directory is a copy that is older";
    let restored = || {
        copy("copy", stored.disk.path("state"));
        let server = stored.disk.serve();
        assert_eq!(stored.disk.bitmap("b")["inconsistent"], true);
        server.wait_for_log(&["bitmap 'b' is not continued", OLDER]);
        stored.begin_again();
        server
    };
    let mut server = stored.served();
    write(&mut stored.disk.device(), 3);
    StoredDisk::stop(server);
    // Of a stop, restored after a kill or after a kill in each of two later runs.
    for kills in [1, 2] {
        copy("state", stored.disk.path("copy"));
        for block in 0..kills {
            server = stored.disk.serve();
            write(&mut stored.disk.device(), 4 + block);
            stored.kill(server);
        }
        StoredDisk::stop(restored());
    }
    // Of a kill, restored after the next crash of the host.
    server = stored.disk.serve();
    write(&mut stored.disk.device(), 7);
    stored.disk.crash(server);
    copy("state", stored.disk.path("copy"));
    server = stored.disk.serve();
    write(&mut stored.disk.device(), 800);
    stored.disk.crash(server);
    server = restored();
    // Of a process that still serves the image.
    copy("state", other.path("state"));
    let second = other.serve();
    let living = format!("process {} of this host serves its image", server.pid());
    other.assert_inconsistent(&second, &living);
    // It was not put on the blocklist, and has kept the lock, although the other one has flushed.
    StoredDisk::stop(second);
    write(&mut stored.disk.device(), 8);
    stored.disk.add("another");
    assert_eq!(stored.disk.bitmap("b")["inconsistent"], Value::Null);
    StoredDisk::stop(server);
}

/// Its data beyond the end is gone, and no write has said so.
fn images_that_shrink_make_bitmaps_inconsistent(version: CephVersion) {
    let test = "images_that_shrink_make_bitmaps_inconsistent";
    let Some(mut stored) = Stored::new(version, test, "cut-off-bits") else {
        return;
    };
    let server = stored.served();
    stored.disk.run(&["bitmap", "add", "d", "temporary"]);
    write(&mut stored.disk.device(), SIZE / BLOCK - 1);
    stored.disk.run(&["bitmap", "clear", "d", "b"]);
    let image = stored.image.clone();
    let (half, whole) = (format!("{}M", SIZE >> 21), format!("{}M", SIZE >> 20));
    let resize = ["resize", "--no-progress", "--allow-shrink", &image, "-s"];
    for size in [&half, &whole] {
        stored.rbd(&[&resize[..], &[size]].concat());
    }
    server.wait_for_log(&["the disk's file has become smaller"]);
    for name in ["b", "temporary"] {
        assert_eq!(stored.disk.bitmap(name)["inconsistent"], true, "{name}");
    }
    StoredDisk::stop(server);
    let server = stored.disk.serve();
    stored
        .disk
        .assert_inconsistent(&server, "the disk's file has become smaller");
    StoredDisk::stop(server);
}

fn bitmaps_need_the_lock_of_the_image(version: CephVersion) {
    let test = "bitmaps_need_the_lock_of_the_image";
    let Some(mut stored) = Stored::new(version, test, "lockless-bits") else {
        return;
    };
    let image = stored.image.clone();
    let features = ["fast-diff", "object-map", "exclusive-lock"];
    stored.rbd(&[&["feature", "disable", &image], &features[..]].concat());
    let add = ["bitmap", "add", "d", "b", "--persistent"];
    let server = stored.disk.serve();
    let refused = stored.disk.try_to(&add);
    let advice = format!("rbd feature enable {image} exclusive-lock");
    assert!(refused.err.contains(&advice), "{refused:?}");
    stored.disk.run(&["bitmap", "add", "d", "temporary"]);
    StoredDisk::stop(server);
    stored.rbd(&["feature", "enable", &image, "exclusive-lock"]);
    let server = stored.disk.serve();
    stored.disk.run(&add);
    // It is given up while the disk is served.
    stored.rbd(&["feature", "disable", &image, "exclusive-lock"]);
    write(&mut stored.disk.device(), 3);
    let refused = stored.disk.try_to(&["bitmap", "clear", "d", "b"]);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert_eq!(stored.disk.bitmap("b")["inconsistent"], true);
    StoredDisk::stop(server);
    // Without the lock, it is shown, and can be removed.
    let server = stored.disk.serve();
    stored.disk.assert_inconsistent(&server, OTHER);
    stored.disk.run(&["bitmap", "remove", "d", "b"]);
    assert_eq!(stored.disk.record_path(), None);
    StoredDisk::stop(server);
}

/// Clients share it, or have left a long text with it.
fn locks_that_are_not_understood_prevent_only_bitmaps(version: CephVersion) {
    let test = "locks_that_are_not_understood_prevent_only_bitmaps";
    let long = "x".repeat(20 << 10);
    let cases: [&[&[&str]]; 2] = [
        &[
            &["--lock-type=shared", "--lock-cookie=a", "--lock-tag=t"],
            &["--lock-type=shared", "--lock-cookie=b", "--lock-tag=t"],
        ],
        &[&["--lock-type=exclusive", "--lock-description", &long]],
    ];
    for (number, locks) in cases.into_iter().enumerate() {
        let Some(mut stored) = Stored::new(version, test, &format!("odd-bits-{number}")) else {
            return;
        };
        StoredDisk::stop(stored.served());
        let image = stored.image.clone();
        let info = stored.rbd(&["info", "--format=json", &image]);
        let info: Value = serde_json::from_str(&info).unwrap();
        let header = format!("rbd_header.{}", info["id"].as_str().unwrap());
        for lock in locks {
            let get = ["-p", POOL, "lock", "get", &header, "rbd_lock"];
            let ceph = stored.cluster.ceph();
            ceph.rados(&[&get[..], lock].concat()).unwrap();
        }
        let server = stored.disk.serve();
        let why = "the lock of its image cannot be used";
        stored.disk.assert_inconsistent(&server, why);
        let add = ["bitmap", "add", "d", "new", "--persistent"];
        let refused = stored.disk.try_to(&add);
        assert!(refused.err.contains(why), "{refused:?}");
        // librbd would wait for the lock.
        stored.kill(server);
    }
}
