//! qcow2 images in use: what a guest reads and writes, compared with what QEMU's own tools find in the same files.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use tempfile::TempDir;
use testkit::driver::{Device, DeviceConfig, Op, Queue};
use testkit::random::Random;
use testkit::server::Server;
use testkit::vm::{self, Vm};
use virtio_bindings::virtio_blk::*;

use crate::support::{content, seed, serve_all, successor};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const MIB: u64 = 1 << 20;
/// A guest finishes within a minute even if it is emulated; the machine may be busy.
const GUEST_LIMIT: Duration = Duration::from_secs(480);

/// A directory on a real file system, for images and sockets.
struct Images(TempDir);

impl Images {
    fn new() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn qemu_img(&self, args: &[&str]) -> String {
        let output = self.try_qemu_img(args);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "qemu-img {args:?}: {}{}",
            text(&output.stdout),
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    fn try_qemu_img(&self, args: &[&str]) -> Output {
        let mut command = Command::new("qemu-img");
        command.current_dir(self.0.path()).args(args);
        command.output().unwrap()
    }

    /// A raw file with [`content`] in it.
    fn raw(&self, name: &str, len: u64) {
        std::fs::write(self.path(name), content(0, len as usize)).unwrap();
    }

    fn serve(&self, image: &str, options: &str) -> (Server, Device) {
        let socket = self.path("disk.sock");
        let argument = format!(
            "file={},socket={},queues=2{options}",
            self.path(image).display(),
            socket.display()
        );
        let control = format!("--control={}", self.path("control.qmp").display());
        let server = successor(env!("CARGO_BIN_EXE_ringdisk"), &[argument, control]);
        let device = connect(&socket);
        (server, device)
    }

    /// Asserts that there are no errors and no leaks, and the same content as in a raw file.
    fn check(&self, image: &str, raw: &str) {
        self.qemu_img(&["check", image]);
        self.qemu_img(&["compare", "-F", "raw", image, raw]);
    }
}

fn connect(socket: &Path) -> Device {
    let config = DeviceConfig {
        queues: 2,
        queue_size: 64,
        ..Default::default()
    };
    Device::connect(socket, &config).unwrap()
}

fn read(queue: &mut Queue, at: u64, len: usize) -> Vec<u8> {
    let read = queue.read(at / 512, len);
    read.unwrap_or_else(|status| panic!("read of {len} at {at}: status {status}"))
}

/// The expected content of a disk.
struct Model(Vec<u8>);

impl Model {
    fn write(&mut self, queue: &mut Queue, at: u64, bytes: &[u8]) {
        assert_eq!(queue.write(at / 512, bytes), OK, "write at {at}");
        self.0[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    fn compare(&self, queue: &mut Queue) {
        for at in (0..self.0.len()).step_by(128 << 10) {
            let len = (self.0.len() - at).min(128 << 10);
            let there = read(queue, at as u64, len);
            if let Some(i) = (0..len).find(|&i| there[i] != self.0[at + i]) {
                panic!("differs from byte {} on", at + i);
            }
        }
    }

    fn save(&self, images: &Images, name: &str) {
        std::fs::write(images.path(name), &self.0).unwrap();
    }
}

fn random_operations(queue: &mut Queue, model: &mut Model, random: &mut Random, steps: usize) {
    let sectors = model.0.len() as u64 / 512;
    for step in 0..steps {
        let len = 1 + random.below(256);
        let at = random.below(sectors - len);
        let (from, to) = ((at * 512) as usize, ((at + len) * 512) as usize);
        match random.below(10) {
            0 => {
                let op = Op::WriteZeroes {
                    unmap: random.below(2) == 1,
                };
                assert_eq!(queue.run(op, at, (len * 512) as u32), OK);
                model.0[from..to].fill(0);
            }
            1 => {
                assert_eq!(queue.run(Op::Discard, at, (len * 512) as u32), OK);
                // Either the old content or zeroes: the model takes over what is there.
                let there = read(queue, at * 512, to - from);
                for (i, &byte) in there.iter().enumerate() {
                    assert!(
                        byte == 0 || byte == model.0[from + i],
                        "discarded at {}",
                        from + i
                    );
                }
                model.0[from..to].copy_from_slice(&there);
            }
            2 => assert_eq!(queue.run(Op::Flush, 0, 0), OK),
            3..6 => {
                let there = read(queue, at * 512, to - from);
                assert!(
                    there == model.0[from..to],
                    "step {step}: {len} sectors at {at}"
                );
            }
            _ => {
                let bytes = content(random.below(1 << 40), to - from);
                model.write(queue, at * 512, &bytes);
            }
        }
    }
}

#[test]
fn qemu_and_ringdisk_read_each_others_images() {
    let options = [
        "",
        "cluster_size=4096",
        "cluster_size=2M",
        "extended_l2=on,cluster_size=128k",
        "compat=0.10",
        "lazy_refcounts=on",
        "refcount_bits=1",
        "data_file=data.raw,data_file_raw=on",
    ];
    for option in options {
        println!("options: {option}");
        let images = Images::new();
        images.raw("content.raw", 8 * MIB);
        let mut args = vec!["convert", "-f", "raw", "-O", "qcow2"];
        if !option.is_empty() {
            args.extend(["-o", option]);
        }
        args.extend(["content.raw", "disk.qcow2"]);
        images.qemu_img(&args);
        images.qemu_img(&["resize", "disk.qcow2", "16M"]);
        let mut model = Model(content(0, 8 * MIB as usize));
        model.0.resize(16 * MIB as usize, 0);

        let more = match option.contains("data_file") {
            true => format!(",data-file={}", images.path("data.raw").display()),
            false => String::new(),
        };
        let (mut server, mut device) = images.serve("disk.qcow2", &more);
        let queue = &mut device.queues[0];
        model.compare(queue);
        random_operations(queue, &mut model, &mut Random(seed()), 300);
        model.compare(queue);
        drop(device);
        assert!(server.terminate().unwrap().success(), "{}", server.log());
        model.save(&images, "model.raw");
        images.check("disk.qcow2", "model.raw");
    }
}

#[test]
fn partial_writes_copy_from_the_backing_file_unchanged() {
    let images = Images::new();
    images.raw("base.raw", 8 * MIB);
    let base = "base.raw";
    images.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        base,
        "-F",
        "raw",
        "middle.qcow2",
    ]);
    images.qemu_img(&[
        "convert",
        "-c",
        "-O",
        "qcow2",
        "-B",
        "middle.qcow2",
        "-F",
        "qcow2",
        base,
        "top.qcow2",
    ]);
    images.qemu_img(&[
        "rebase",
        "-u",
        "-f",
        "qcow2",
        "-b",
        "middle.qcow2",
        "-F",
        "qcow2",
        "top.qcow2",
    ]);
    images.qemu_img(&["resize", "-q", "top.qcow2", "12M"]);
    let below = std::fs::read(images.path("middle.qcow2")).unwrap();
    let mut model = Model(content(0, 8 * MIB as usize));
    model.0.resize(12 * MIB as usize, 0);
    for cache in ["none", "writeback", "directsync", "unsafe"] {
        let (mut server, mut device) = images.serve("top.qcow2", &format!(",cache={cache}"));
        let queue = &mut device.queues[1];
        model.compare(queue);
        random_operations(queue, &mut model, &mut Random(seed()), 100);
        model.compare(queue);
        drop(device);
        assert!(server.terminate().unwrap().success(), "{}", server.log());
        model.save(&images, "model.raw");
        images.check("top.qcow2", "model.raw");
    }
    assert!(below == std::fs::read(images.path("middle.qcow2")).unwrap());
    assert!(content(0, 8 * MIB as usize) == std::fs::read(images.path("base.raw")).unwrap());
}

/// Files may end anywhere, even where O_DIRECT cannot read: a raw backing file, and the image itself after the last
/// byte written. What is missing reads as zeroes.
#[test]
fn unaligned_file_ends_read_as_zeroes() {
    for cache in ["none", "writeback"] {
        let images = Images::new();
        let base = MIB + 100;
        images.raw("base.raw", base);
        let create = "create -q -f qcow2 -o cluster_size=4k -b base.raw -F raw disk.qcow2 2M";
        images.qemu_img(&create.split(' ').collect::<Vec<_>>());
        let alone = "convert -f raw -O qcow2 base.raw alone.qcow2";
        images.qemu_img(&alone.split(' ').collect::<Vec<_>>());
        // In the middle of the image's last cluster.
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(images.path("alone.qcow2"));
        let file = file.unwrap();
        file.set_len(file.metadata().unwrap().len() - 64 * 1024 + 300)
            .unwrap();
        for (image, beside) in [("disk.qcow2", MIB + 1024), ("alone.qcow2", MIB - 512)] {
            images.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", image, "model.raw"]);
            let mut model = Model(std::fs::read(images.path("model.raw")).unwrap());
            let (mut server, mut device) = images.serve(image, &format!(",cache={cache}"));
            let queue = &mut device.queues[0];
            model.compare(queue);
            for len in [512, 1024, 4096] {
                let at = (base - base % 512 + 512 - len) as usize;
                let there = read(queue, at as u64, len as usize);
                assert!(there == model.0[at..at + len as usize], "{image} {at}");
            }
            // Next to it in the same cluster.
            model.write(queue, beside, &content(7, 512));
            model.compare(queue);
            drop(device);
            assert!(server.terminate().unwrap().success(), "{}", server.log());
            model.save(&images, "model.raw");
            images.check(image, "model.raw");
        }
    }
}

/// Both queues, on two threads, write to the same clusters at the same time, each to its own sectors.
#[test]
fn concurrent_writes_to_one_cluster_are_all_kept() {
    let images = Images::new();
    images.raw("base.raw", 4 * MIB);
    images.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        "base.raw",
        "-F",
        "raw",
        "disk.qcow2",
    ]);
    let (mut server, mut device) = images.serve("disk.qcow2", "");
    let mut model = content(0, 4 * MIB as usize);
    let ours = |i: u64| content(1_000_000 + i, 512);
    let sectors = 4 * MIB / 512;
    std::thread::scope(|scope| {
        for (n, queue) in (0..).zip(&mut device.queues) {
            scope.spawn(move || {
                let depth = u64::from(queue.slots()).min(16);
                for first in (n..sectors).step_by(2 * depth as usize) {
                    let all = (first..sectors).step_by(2).take(depth as usize);
                    let all: Vec<u64> = all.collect();
                    let slots: Vec<u16> = (0..all.len() as u16).collect();
                    for (&sector, &slot) in all.iter().zip(&slots) {
                        queue.write_buffer(slot, &ours(sector));
                        queue.prepare(slot, Op::Write, sector, 512);
                    }
                    queue.submit(&slots);
                    for (_, status) in queue.finish(slots.len()) {
                        assert_eq!(status, OK);
                    }
                }
            });
        }
    });
    for sector in 0..sectors {
        let at = (sector * 512) as usize;
        model[at..at + 512].copy_from_slice(&ours(sector));
    }
    let model = Model(model);
    model.compare(&mut device.queues[0]);
    drop(device);
    assert!(server.terminate().unwrap().success(), "{}", server.log());
    model.save(&images, "model.raw");
    images.check("disk.qcow2", "model.raw");
}

/// After a kill, flushed data is there and the image has no errors, in every cache mode, as long as the host keeps
/// running.
#[test]
fn flushed_writes_survive_a_kill() {
    for cache in ["none", "unsafe"] {
        kill_and_check(cache);
    }
}

fn kill_and_check(cache: &str) {
    let images = Images::new();
    images.qemu_img(&["create", "-q", "-f", "qcow2", "disk.qcow2", "16M"]);
    let mut model = Model(vec![0; 16 * MIB as usize]);
    let mut random = Random(seed());
    for round in 0..10 {
        let (mut server, mut device) = images.serve("disk.qcow2", &format!(",cache={cache}"));
        let queue = &mut device.queues[0];
        model.compare(queue);
        random_operations(queue, &mut model, &mut random, 50);
        assert_eq!(queue.run(Op::Flush, 0, 0), OK);
        // Not flushed: it may be missing, but must not change from read to read.
        let again = read(queue, 0, 64 << 10);
        assert_eq!(queue.write(0, &again), OK);
        server.signal(rustix::process::Signal::KILL);
        let _ = server.terminate();
        drop(device);
        let output = images.try_qemu_img(&["check", "-U", "disk.qcow2"]);
        // Exit code 3 means leaks, which only cost space.
        assert!(
            matches!(output.status.code(), Some(0 | 3)),
            "round {round}: {output:?}"
        );
    }
}

/// A guest with its whole system on an overlay of an installed image writes and verifies at random, reboots, and finds
/// everything. The backing file stays as it was installed.
#[test]
fn guest_boots_from_an_overlay() {
    let test = "guest_boots_from_an_overlay";
    if let Some(missing) = vm::missing(true) {
        println!("skipped: {test}: {missing}");
        return;
    }
    let images = Images::new();
    let script = "
        grep -q '^/dev/vda / ext4' /proc/mounts || { echo 'the root is elsewhere'; exit 1; }
        verify() {
            fio --eta=never --name=verify --filename=/verify --size=64M --direct=1 --ioengine=libaio --bs=4k \
                --iodepth=16 --thread --rw=randwrite --randseed=7 --verify=crc32c --output=/tmp/fio \"$@\" \
                || { cat /tmp/fio; exit 1; }
        }
        if [ ! -e /booted ]; then
            verify --do_verify=1 --end_fsync=1
            sha256sum /bin/* >/booted
            echo 'first boot'
            sync
            mount -o remount,ro /
            reboot -f
            sleep 60
        fi
        sha256sum -cs /booted
        verify --verify_only
        echo 'second boot'
        sync
        mount -o remount,ro /";
    vm::install(&images.path("installed.raw"), 384 * MIB, script).unwrap();
    for line in [
        "convert -f raw -O qcow2 installed.raw installed.qcow2",
        "create -q -f qcow2 -b installed.qcow2 -F qcow2 root.qcow2",
    ] {
        images.qemu_img(&line.split(' ').collect::<Vec<_>>());
    }
    let below = std::fs::read(images.path("installed.qcow2")).unwrap();
    let file = images.path("root.qcow2");
    let socket = images.path("root.sock");
    let disk = format!(
        "file={},serial=root,queues=2,socket={}",
        file.display(),
        socket.display()
    );
    let control = format!("--control={}", images.path("control.qmp").display());
    let mut server = serve_all(&[disk, control]);
    let arguments = server.ready["disks"][0]["qemu"].as_array().unwrap();
    let arguments = arguments.iter().map(|a| a.as_str().unwrap().to_owned());
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let guest = Vm::new(logs)
        .cpus(2)
        .disk(vm::Disk::Printed(arguments.collect()))
        .root("root")
        .may_reboot();
    let output = guest.run("", GUEST_LIMIT).unwrap().checked().unwrap();
    assert_eq!(output.lines, ["first boot", "second boot"]);
    assert!(server.terminate().unwrap().success(), "{}", server.log());

    images.qemu_img(&["check", "root.qcow2"]);
    assert!(below == std::fs::read(images.path("installed.qcow2")).unwrap());
    // Everything the guest wrote is in the overlay, and its file system is consistent.
    let output = images.try_qemu_img(&["compare", "root.qcow2", "installed.qcow2"]);
    assert_eq!(output.status.code(), Some(1), "nothing has changed");
    images.qemu_img(&[
        "convert",
        "-f",
        "qcow2",
        "-O",
        "raw",
        "root.qcow2",
        "root.raw",
    ]);
    images.qemu_img(&["compare", "-F", "raw", "root.qcow2", "root.raw"]);
    let e2fsck = vm::find_program("e2fsck").unwrap();
    let output = Command::new(e2fsck)
        .arg("-fn")
        .arg(images.path("root.raw"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "e2fsck: {text}");
}

#[test]
fn invalid_images_and_forbidden_backing_files_are_refused() {
    let images = Images::new();
    std::fs::create_dir(images.path("elsewhere")).unwrap();
    images.raw("elsewhere/base.raw", MIB);
    images.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        "elsewhere/base.raw",
        "-F",
        "raw",
        "ok.qcow2",
    ]);
    std::fs::create_dir(images.path("here")).unwrap();
    images.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        "../elsewhere/base.raw",
        "-F",
        "raw",
        "here/astray.qcow2",
    ]);
    std::fs::write(images.path("text.qcow2"), "this is no image\n".repeat(100)).unwrap();
    let refused = |name: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args([
            "serve",
            &format!(
                "file={},socket={}",
                images.path(name).display(),
                images.path("s").display()
            ),
        ]);
        command
            .args(more)
            .arg("--control")
            .arg(images.path("c.qmp"));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let text = refused("here/astray.qcow2", &[]);
    assert!(
        text.contains("--allow-backing") && text.contains("base.raw"),
        "{text}"
    );
    let text = refused("ok.qcow2", &["--allow-backing", "none"]);
    assert!(text.contains("--allow-backing"), "{text}");
    let text = refused("ok.qcow2", &["--allow-backing", "/not/there"]);
    assert!(
        text.contains("/not/there: No such file") && text.contains("--allow-backing"),
        "{text}"
    );
    let text = refused("missing.qcow2", &[]);
    assert!(text.contains("qemu-img create"), "{text}");
    let text = refused("text.qcow2", &[]);
    assert!(text.contains("text.qcow2"), "{text}");

    let socket = images.path("disk.sock");
    let argument = format!(
        "file={},socket={}",
        images.path("here/astray.qcow2").display(),
        socket.display()
    );
    let allowed = format!("--allow-backing={}", images.path("elsewhere").display());
    let control = format!("--control={}", images.path("control.qmp").display());
    let server = serve_all(&[argument, allowed, control]);
    let config = DeviceConfig::default();
    let mut device = Device::connect(&socket, &config).unwrap();
    assert_eq!(read(&mut device.queues[0], 0, 4096), content(0, 4096));
    drop(server);
}
