//! Another file under a disk while its guest reads and writes.

use std::fs::{self, File};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use testkit::driver::{Device, DeviceConfig, HANG};

use crate::running::{Controlled, Stop, rewrite, until, verify};
use crate::support::{content, serve_all};

const MIB: u64 = 1 << 20;

/// Four queues on two threads are never idle, each write is read back; the disk goes from file to file under them. The
/// guest writes what is there already, so that all files hold the same bytes.
#[test]
fn the_guest_goes_on() {
    for options in [
        "cache=none",
        "cache=writeback",
        "cache=none,aio=native",
        "cache=none,aio=threads",
    ] {
        let ringdisk = Controlled::start(&["--iothreads=2".into()]);
        let files = ["a.raw", "b.raw", "c.raw"].map(|name| ringdisk.file(name, 16 * MIB));
        let disk = format!("a.raw,name=disk,queues=4,socket=disk.sock,{options}");
        let attached = ringdisk.json(&["attach", &disk]);
        assert_eq!(attached["name"], "disk");
        let config = DeviceConfig {
            queues: 4,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(ringdisk.path("disk.sock"), &config).unwrap();
        let mut queues = std::mem::take(&mut device.queues);
        let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            for queue in &mut queues {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        rewrite(queue);
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            // Ends the load also if an assertion below fails.
            let _stop = Stop(&stop);
            for file in files.iter().cycle().skip(1).take(12) {
                ringdisk.json(&["replace", "disk", file.to_str().unwrap()]);
                let before = rounds.load(Ordering::Relaxed);
                until("another round", || {
                    rounds.load(Ordering::Relaxed) >= before + 4
                });
                assert_eq!(ringdisk.disk("disk")["file"], file.to_str().unwrap());
            }
        });
        assert!(
            !ringdisk.server.log().contains("given up"),
            "{}",
            ringdisk.server.log()
        );

        // From now on, what is written goes to the last file alone.
        let new = content(4711, 4096);
        assert_eq!(queues[3].write(16000, &new), 0);
        assert_eq!(queues[0].read(16000, 4096).unwrap(), new);
        assert_eq!(queues[0].run(testkit::driver::Op::Flush, 0, 0), 0);
        for (file, has_it) in files.iter().zip([true, false, false]) {
            let bytes = &fs::read(file).unwrap()[16000 * 512..16000 * 512 + 4096];
            assert_eq!(bytes == new, has_it, "{}", file.display());
        }
        // Of the others nothing is held.
        drop(device);
        ringdisk.json(&["attach", "b.raw,socket=b.sock"]);
        ringdisk.json(&["attach", "c.raw,socket=c.sock"]);
    }
}

#[test]
fn a_longer_file_makes_the_disk_grow() {
    let ringdisk = Controlled::start(&[]);
    ringdisk.file("small.raw", 16 * MIB);
    ringdisk.file("large.raw", 32 * MIB);
    ringdisk.json(&["attach", "small.raw,name=disk,socket=disk.sock"]);
    let mut device = Device::connect(ringdisk.path("disk.sock"), &DeviceConfig::default()).unwrap();
    let mut channel = device.frontend.open_backend_channel().unwrap();
    ringdisk.json(&["replace", "disk", "large.raw"]);
    channel.next(HANG).unwrap();
    assert_eq!(device.config().unwrap().capacity, 32 * MIB / 512);
    let beyond = 16 * MIB / 512 + 8;
    assert_eq!(
        device.queues[0].read(beyond, 4096).unwrap(),
        content(beyond, 4096)
    );
    assert_eq!(ringdisk.disk("disk")["size"], 32 * MIB);
}

/// By another of its names, the file that the disk is on is no other file.
#[test]
fn the_same_file_stays() {
    let ringdisk = Controlled::start(&[]);
    let file = ringdisk.file("disk.raw", 16 * MIB);
    fs::hard_link(&file, ringdisk.path("link.raw")).unwrap();
    std::os::unix::fs::symlink(&file, ringdisk.path("symlink.raw")).unwrap();
    ringdisk.json(&["attach", "disk.raw,socket=disk.sock"]);
    let mut device = Device::connect(ringdisk.path("disk.sock"), &DeviceConfig::default()).unwrap();
    for name in ["disk.raw", "link.raw", "symlink.raw"] {
        ringdisk.json(&["replace", "disk", name]);
        rewrite(&mut device.queues[0]);
        assert_eq!(ringdisk.disk("disk")["file"], file.to_str().unwrap());
    }
}

#[test]
fn what_cannot_be_leaves_the_disk_as_it_was() {
    let ringdisk = Controlled::start(&[]);
    let file = ringdisk.file("disk.raw", 16 * MIB);
    for (name, bytes) in [
        ("small.raw", 16 * MIB - 512),
        ("locked.raw", 16 * MIB),
        ("other.raw", 16 * MIB),
    ] {
        ringdisk.file(name, bytes);
    }
    fs::create_dir(ringdisk.path("directory")).unwrap();
    File::create(ringdisk.path("empty.raw")).unwrap();
    let holder = ringdisk.path("holder.sock");
    let _holder = serve_all(&[format!(
        "file={},socket={}",
        ringdisk.path("locked.raw").display(),
        holder.display()
    )]);
    ringdisk.json(&[
        "attach",
        "disk.raw,queues=2,socket=disk.sock,cache=writeback",
    ]);
    ringdisk.json(&["attach", "other.raw,socket=other.sock"]);
    ringdisk.json(&["attach", "null:16M,name=nothing,socket=nothing.sock"]);
    let before = ringdisk.disk("disk");
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(ringdisk.path("disk.sock"), &config).unwrap();
    let mut busy = device.queues.remove(1);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                rewrite(&mut busy);
            }
        });
        let _stop = Stop(&stop);
        for (new, words) in [
            ("small.raw", &["16776704", "16777216"][..]),
            ("locked.raw", &["locked.raw", "another process"]),
            ("other.raw", &["other.raw", "in use by disk 'other'"]),
            ("absent.raw", &["absent.raw", "no such file"]),
            ("directory", &["directory"]),
            ("empty.raw", &["empty"]),
        ] {
            ringdisk
                .ringdisk(&["replace", "disk", new])
                .assert_fails(1, words);
            rewrite(&mut device.queues[0]);
        }
    });
    ringdisk
        .ringdisk(&["replace", "nothing", "absent.raw"])
        .assert_fails(1, &["absent.raw"]);
    ringdisk
        .ringdisk(&["replace", "nothing", "small.raw"])
        .assert_fails(1, &["nothing", "in no file"]);
    let mut after = ringdisk.disk("disk");
    after["connected"] = before["connected"].clone();
    assert_eq!(after, before);
    let new = content(4711, 4096);
    assert_eq!(device.queues[0].write(16000, &new), 0);
    verify(&mut device.queues[0]);
    assert_eq!(
        fs::read(file).unwrap()[16000 * 512..16000 * 512 + 4096],
        new
    );
    // What was tried is let go.
    ringdisk.json(&["attach", "small.raw,socket=small.sock,cache=writeback"]);
}
