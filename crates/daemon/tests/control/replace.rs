//! Replacing a disk's file while its guest reads and writes.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::qemu_img as qemu;

use super::server::{Controlled, Stop, rewrite, verify};
use crate::support::wait_until;
use crate::support::{self, content, serve_all};

const MIB: u64 = 1 << 20;

/// Four queues on two threads are always busy and read back each write, while the disk moves from file to file. The
/// guest rewrites existing data, so all files hold the same bytes.
#[test]
fn guest_io_continues_across_replacements() {
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
            // Stops the load even if an assertion below fails.
            let _stop = Stop(&stop);
            for file in files.iter().cycle().skip(1).take(12) {
                ringdisk.json(&["replace", "disk", file.to_str().unwrap()]);
                let before = rounds.load(Ordering::Relaxed);
                wait_until("another round", || {
                    rounds.load(Ordering::Relaxed) >= before + 4
                });
                assert_eq!(ringdisk.disk("disk")["file"], file.to_str().unwrap());
            }
        });
        support::assert_queues_served(&ringdisk.server.log());

        // From now on, writes go only to the last file.
        let new = content(4711, 4096);
        assert_eq!(queues[3].write(16000, &new), 0);
        assert_eq!(queues[0].read(16000, 4096).unwrap(), new);
        assert_eq!(queues[0].run(Op::Flush, 0, 0), 0);
        for (file, has_it) in files.iter().zip([true, false, false]) {
            let bytes = &fs::read(file).unwrap()[16000 * 512..16000 * 512 + 4096];
            assert_eq!(bytes == new, has_it, "{}", file.display());
        }
        // No other file is still in use.
        drop(device);
        ringdisk.json(&["attach", "b.raw,socket=b.sock"]);
        ringdisk.json(&["attach", "c.raw,socket=c.sock"]);
    }
}

#[test]
fn longer_file_grows_the_disk() {
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

/// Another path to the disk's current file is the same file; from then on the disk uses that path.
#[test]
fn same_file_under_another_path_is_kept() {
    let ringdisk = Controlled::start(&[]);
    let file = ringdisk.file("disk.raw", 16 * MIB);
    fs::hard_link(&file, ringdisk.path("link.raw")).unwrap();
    std::os::unix::fs::symlink(&file, ringdisk.path("symlink.raw")).unwrap();
    ringdisk.json(&["attach", "disk.raw,socket=disk.sock"]);
    let mut device = Device::connect(ringdisk.path("disk.sock"), &DeviceConfig::default()).unwrap();
    for name in ["disk.raw", "link.raw", "symlink.raw"] {
        ringdisk.json(&["replace", "disk", name]);
        rewrite(&mut device.queues[0]);
        let path = ringdisk.path(name);
        assert_eq!(ringdisk.disk("disk")["file"], path.to_str().unwrap());
        // The same file in another format is refused.
        let words = format!("{name} with format=raw");
        ringdisk
            .ringdisk(&["replace", "disk", name, "--format", "qcow2"])
            .assert_fails(1, &[&words]);
        ringdisk.json(&["replace", "disk", name, "--format", "raw"]);
    }
}

#[test]
fn failed_replacement_leaves_the_disk_unchanged() {
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
            (
                "absent.raw",
                &[
                    "absent.raw",
                    "no such file",
                    "must contain what disk 'disk' contains",
                ],
            ),
            ("directory", &["directory"]),
            (
                "empty.raw",
                &["is empty", "must contain what disk 'disk' contains"],
            ),
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
    for key in ["connected", "front-end-pid"] {
        after[key] = before[key].clone();
    }
    assert_eq!(after, before);
    let new = content(4711, 4096);
    assert_eq!(device.queues[0].write(16000, &new), 0);
    verify(&mut device.queues[0]);
    assert_eq!(
        fs::read(file).unwrap()[16000 * 512..16000 * 512 + 4096],
        new
    );
    // The failed files are released.
    ringdisk.json(&["attach", "small.raw,socket=small.sock,cache=writeback"]);
}

/// A raw disk of [`content`], and images with the same content: a converted one, one on a nearly equal backing file,
/// one with an external data file, and a longer one.
fn make_images(ringdisk: &Controlled) {
    let at = ringdisk.dir.path();
    ringdisk.file("a.raw", 16 * MIB);
    qemu::img(at, "convert -f raw -O qcow2 a.raw plain.qcow2");
    qemu::img(
        at,
        "convert -f raw -O qcow2 -o cluster_size=4k a.raw base.qcow2",
    );
    let options = ["-f", "qcow2"];
    qemu::io(at, "base.qcow2", &options, &["write -q -P 9 8M 64k".into()]);
    qemu::img(
        at,
        "create -q -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2",
    );
    let right = "write -q -s a.part 8M 64k".into();
    let part = content(8 * MIB / 512, 64 << 10);
    fs::write(at.join("a.part"), part).unwrap();
    qemu::io(at, "overlay.qcow2", &options, &[right]);
    qemu::img(
        at,
        "convert -f raw -O qcow2 -o data_file=data.bin a.raw beside.qcow2",
    );
    qemu::img(at, "convert -f raw -O qcow2 a.raw longer.qcow2");
    qemu::img(at, "resize -q longer.qcow2 24M");
}

/// The journal of an image that is served.
fn journal(ringdisk: &Controlled, image: &Path) -> PathBuf {
    let stat = fs::metadata(image).unwrap();
    let name = format!("{:x}-{:x}.journal", stat.dev(), stat.ino());
    let open = fs::read_dir(format!("/proc/{}/fd", ringdisk.server.pid())).unwrap();
    let mut open = open.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    let found = open.find(|path| path.ends_with(&name));
    found.unwrap_or_else(|| panic!("{} has no journal", image.display()))
}

/// Raw to image, image to image, and back, under load. Each file that the disk leaves is consistent, closed, unlocked,
/// and unchanged.
#[test]
fn raw_files_and_images_replace_each_other_under_load() {
    if !qemu::is_there("raw_files_and_images_replace_each_other_under_load") {
        return;
    }
    for options in ["cache=none", "cache=writeback,aio=threads", "cache=unsafe"] {
        let ringdisk = Controlled::start(&["--iothreads=2".into()]);
        make_images(&ringdisk);
        let at = ringdisk.dir.path();
        let right = content(0, (16 * MIB) as usize);
        ringdisk.json(&[
            "attach",
            &format!("a.raw,name=disk,queues=4,socket=disk.sock,{options}"),
        ]);
        let config = DeviceConfig {
            queues: 4,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(ringdisk.path("disk.sock"), &config).unwrap();
        let mut queues = std::mem::take(&mut device.queues);
        let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        let names = [
            "a.raw",
            "plain.qcow2",
            "overlay.qcow2",
            "a.raw",
            "beside.qcow2",
            "plain.qcow2",
            "a.raw",
            "overlay.qcow2",
        ];
        thread::scope(|scope| {
            for queue in &mut queues {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        rewrite(queue);
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let _stop = Stop(&stop);
            let mut journal_of_last: Option<PathBuf> = None;
            for pair in names.windows(2) {
                let [old, new] = pair else { unreachable!() };
                let data: &[&str] = match *new {
                    "beside.qcow2" => &["--data-file", "data.bin"],
                    _ => &[],
                };
                ringdisk.json(&[&["replace", "disk", new], data].concat());
                let disk = ringdisk.disk("disk");
                assert_eq!(disk["file"], ringdisk.path(new).to_str().unwrap());
                let format = new.rsplit('.').next().unwrap();
                assert_eq!(disk["format"], format);
                let its = (format == "qcow2").then(|| journal(&ringdisk, &ringdisk.path(new)));
                let left = std::mem::replace(&mut journal_of_last, its);
                assert!(!left.is_some_and(|journal| journal.exists()), "{old}");
                // QEMU takes the locks, so nobody else holds them.
                if old.ends_with("qcow2") {
                    qemu::check(at, old, false);
                }
                let format = old.rsplit('.').next().unwrap();
                assert!(qemu::content(at, old, format) == right, "{old}");
                let before = rounds.load(Ordering::Relaxed);
                wait_until("another round", || {
                    rounds.load(Ordering::Relaxed) >= before + 4
                });
            }
        });

        // From now on, writes go only to the last image, and are there when it is closed.
        ringdisk.json(&["replace", "disk", "longer.qcow2"]);
        assert_eq!(ringdisk.disk("disk")["size"], 24 * MIB);
        let new = content(4711, 4096);
        for sector in [16000, 24 * MIB / 512 - 8] {
            assert_eq!(queues[3].write(sector, &new), 0);
            assert_eq!(queues[0].read(sector, 4096).unwrap(), new);
        }
        assert_eq!(queues[0].run(Op::Flush, 0, 0), 0);
        for name in ["plain.qcow2", "overlay.qcow2", "beside.qcow2"] {
            assert!(qemu::content(at, name, "qcow2") == right, "{name}");
        }
        drop((queues, device));
        ringdisk.json(&["detach", "disk", "--force"]);
        qemu::check(at, "longer.qcow2", false);
        let mut longer = right.clone();
        longer.resize((24 * MIB) as usize, 0);
        for sector in [16000, 24 * MIB / 512 - 8] {
            let at = sector as usize * 512;
            longer[at..at + 4096].copy_from_slice(&new);
        }
        assert!(qemu::content(at, "longer.qcow2", "qcow2") == longer);
        assert!(!ringdisk.server.log().contains("panicked"));
    }
}

/// Invalid images, images in use, and images with forbidden backing files: the disk continues, and the failed image is
/// released.
#[test]
fn unusable_image_is_refused_and_released() {
    if !qemu::is_there("unusable_image_is_refused_and_released") {
        return;
    }
    let ringdisk = Controlled::start(&[]);
    make_images(&ringdisk);
    let at = ringdisk.dir.path();
    let other = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::rename(at.join("base.qcow2"), other.path().join("base.qcow2")).unwrap();
    let base = other.path().join("base.qcow2");
    let rebase = format!("rebase -u -b {} -F qcow2 overlay.qcow2", base.display());
    qemu::img(at, &rebase);
    qemu::img(at, "create -q -f qcow2 small.qcow2 15M");
    fs::write(at.join("none.qcow2"), content(0, 1 << 20)).unwrap();
    ringdisk.json(&["attach", "plain.qcow2,name=disk,socket=disk.sock"]);
    ringdisk.json(&[
        "attach",
        "beside.qcow2,data-file=data.bin,name=other,socket=other.sock",
    ]);
    let mut device = Device::connect(ringdisk.path("disk.sock"), &DeviceConfig::default()).unwrap();
    for (new, words) in [
        ("small.qcow2", &["15728640", "16777216"][..]),
        ("none.qcow2", &["none.qcow2"]),
        ("overlay.qcow2", &["base.qcow2", "allow-backing"]),
        ("beside.qcow2", &["in use by disk 'other'"]),
    ] {
        ringdisk
            .ringdisk(&["replace", "disk", new])
            .assert_fails(1, words);
        rewrite(&mut device.queues[0]);
        let file = ringdisk.path("plain.qcow2");
        assert_eq!(ringdisk.disk("disk")["file"], file.to_str().unwrap());
    }
    qemu::check(at, "small.qcow2", false);
    // A file is raw only if somebody says so.
    let failed = ["replace", "disk", "a.raw", "--format", "qcow2"];
    ringdisk.ringdisk(&failed).assert_fails(1, &["a.raw"]);
    fs::copy(at.join("a.raw"), at.join("unnamed")).unwrap();
    let unnamed = ringdisk.ringdisk(&["replace", "disk", "unnamed"]);
    unnamed.assert_fails(1, &["unnamed", "format"]);
    ringdisk.json(&["replace", "disk", "unnamed", "--format", "raw"]);
    rewrite(&mut device.queues[0]);
    assert_eq!(ringdisk.disk("disk")["format"], "raw");
    qemu::check(at, "plain.qcow2", false);
}

/// A guest with a raw disk can write an image header into it. The format of the next file must come from its name or
/// the operator, never from the previous file.
#[test]
fn image_format_is_never_probed() {
    if !qemu::is_there("image_format_is_never_probed") {
        return;
    }
    let text = "[[disk]]\nname = \"b\"\nfile = \"DIR/b.raw\"\nsocket = \"DIR/b.sock\"\n";
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let config = dir.path().join("ringdisk.toml");
    let text = text.replace("DIR", dir.path().to_str().unwrap());
    fs::write(dir.path().join("b.raw"), content(0, (16 * MIB) as usize)).unwrap();
    fs::write(&config, &text).unwrap();
    let ringdisk = Controlled::start_in(dir, &[format!("--config={}", config.display())]);
    make_images(&ringdisk);
    let at = ringdisk.dir.path();
    fs::rename(at.join("plain.qcow2"), at.join("image")).unwrap();
    fs::copy(at.join("image"), at.join("unnamed")).unwrap();

    ringdisk.json(&["attach", "image,format=qcow2,name=disk,socket=disk.sock"]);
    let mut device = Device::connect(ringdisk.path("disk.sock"), &DeviceConfig::default()).unwrap();
    let refused = ringdisk.ringdisk(&["replace", "disk", "unnamed"]);
    refused.assert_fails(1, &["unnamed", "--format"]);
    rewrite(&mut device.queues[0]);
    ringdisk.json(&["replace", "disk", "unnamed", "--format", "qcow2"]);
    rewrite(&mut device.queues[0]);
    // Raw may be inherited: a raw file refers to no other files.
    let refused = ringdisk.ringdisk(&["replace", "disk", "beside.qcow2"]);
    refused.assert_fails(1, &["beside.qcow2", "data-file=PATH", "data.bin"]);
    ringdisk.json(&["replace", "disk", "beside.qcow2", "--data-file", "data.bin"]);
    fs::copy(at.join("longer.qcow2"), at.join("bytes")).unwrap();
    fs::File::options()
        .write(true)
        .open(at.join("bytes"))
        .and_then(|file| file.set_len(32 * MIB))
        .unwrap();
    ringdisk.json(&["replace", "disk", "bytes", "--format", "raw"]);
    fs::copy(at.join("bytes"), at.join("others")).unwrap();
    let refused = ringdisk.ringdisk(&["replace", "disk", "others"]);
    refused.assert_fails(1, &["others", "like an image in qcow2", "format=raw"]);
    ringdisk.json(&["replace", "disk", "others", "--format", "raw"]);
    assert_eq!(ringdisk.disk("disk")["format"], "raw");
    assert_eq!(ringdisk.disk("disk")["size"], 32 * MIB);

    // The configuration is authoritative for its disks' files.
    ringdisk.json(&["replace", "b", "image", "--format", "qcow2"]);
    fs::copy(at.join("unnamed"), at.join("another")).unwrap();
    fs::write(&config, text.replace("b.raw", "another")).unwrap();
    let refused = ringdisk.ringdisk(&["reload"]);
    refused.assert_fails(1, &["disk 'b'", "another", "format=raw"]);
    let file = ringdisk.path("image");
    assert_eq!(ringdisk.disk("b")["file"], file.to_str().unwrap());
}

/// With `lock=running`, the new image is locked while the VM runs, and the old one is unlocked at once.
#[test]
fn lock_running_moves_to_the_new_image() {
    if !qemu::is_there("lock_running_moves_to_the_new_image") {
        return;
    }
    let ringdisk = Controlled::start(&[]);
    make_images(&ringdisk);
    let at = ringdisk.dir.path();
    ringdisk.json(&["attach", "a.raw,name=disk,socket=disk.sock,lock=running"]);
    let away = ringdisk.ringdisk(&["replace", "disk", "plain.qcow2"]);
    away.assert_fails(1, &["no VM runs on it here"]);
    let connect = || Device::connect(ringdisk.path("disk.sock"), &DeviceConfig::default()).unwrap();
    let mut device = connect();
    for name in ["plain.qcow2", "overlay.qcow2", "a.raw", "plain.qcow2"] {
        ringdisk.json(&["replace", "disk", name]);
        rewrite(&mut device.queues[0]);
    }
    qemu::check(at, "overlay.qcow2", false);
    assert_eq!(
        qemu::check_code(at, "plain.qcow2"),
        Some(1),
        "the new image must be locked"
    );
    assert_eq!(device.queues[0].write(16000, &content(4711, 4096)), 0);
    for queue in 0..device.queues.len() {
        device.stop_queue(queue).unwrap();
    }
    qemu::check(at, "plain.qcow2", false);
    drop(device);
    let mut device = connect();
    let there = device.queues[0].read(16000, 4096).unwrap();
    assert_eq!(there, content(4711, 4096));
    verify(&mut device.queues[0]);
}
