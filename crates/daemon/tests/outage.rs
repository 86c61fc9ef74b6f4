//! Storage that fails, fills up, hangs or loses its power under the whole server, for raw and qcow2, every engine and
//! cache mode: what a guest sees of it, and what it does to others.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::faulty::Random;
use testkit::server::Server;
use testkit::storage::{Mishaps, Storage};

const DISK_BYTES: u64 = 16 << 20;
const DEPTH: u16 = 16;
const LEN: u32 = 4096;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const EIO: i32 = 5;

/// A disk on storage that does as it is told, or `None` where that cannot be had.
struct Setup {
    storage: Storage,
    dir: tempfile::TempDir,
    format: &'static str,
}

impl Setup {
    fn new(format: &'static str, seed: u64) -> Option<Self> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mount = dir.path().join("mnt");
        std::fs::create_dir(&mount).unwrap();
        let content = match format {
            "raw" => vec![0; DISK_BYTES as usize],
            _ => {
                let image = dir.path().join("image");
                let create = ["create", "-q", "-f", "qcow2"];
                let mut command = Command::new("qemu-img");
                command.args(create).arg(&image).arg(DISK_BYTES.to_string());
                assert!(command.status().unwrap().success());
                std::fs::read(&image).unwrap()
            }
        };
        match Storage::mount(&mount, content, seed) {
            Ok(storage) => Some(Self {
                storage,
                dir,
                format,
            }),
            Err(e) => {
                println!("skipped: no FUSE file system to break: {e}");
                None
            }
        }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("disk.sock")
    }

    fn control(&self) -> PathBuf {
        self.dir.path().join("control.qmp")
    }

    /// Serves it, and others beside it.
    fn serve(&self, options: &str, others: &[String]) -> Server {
        let mut args = vec![format!(
            "file={},name=disk,format={},socket={},queues=1,{options}",
            self.storage.file().display(),
            self.format,
            self.socket().display()
        )];
        args.extend(others.iter().cloned());
        args.push(format!("--control={}", self.control().display()));
        args.push("--iothreads=1".into());
        Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &args).unwrap()
    }

    fn connect(&self) -> Device {
        connect(&self.socket())
    }
}

/// Bytes that differ from sector to sector and within one.
fn content(sector: u64, len: usize) -> Vec<u8> {
    let words =
        (0..len as u64 / 8).map(|i| (sector * 64 + i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

fn seed() -> u64 {
    let given = std::env::var("RINGDISK_TEST_SEED").ok();
    let seed = given.map_or_else(|| u64::from(std::process::id()), |s| s.parse().unwrap());
    println!("seed {seed}: repeat with RINGDISK_TEST_SEED={seed}");
    seed
}

fn config() -> DeviceConfig {
    DeviceConfig {
        slots: DEPTH,
        buffer_len: LEN,
        inflight: true,
        ..DeviceConfig::default()
    }
}

fn connect(socket: &Path) -> Device {
    Device::connect(socket, &config()).unwrap()
}

fn submit(device: &mut Device, op: Op) {
    let queue = &mut device.queues[0];
    let slots: Vec<u16> = (0..DEPTH).collect();
    for &slot in &slots {
        let sector = u64::from(slot) * 1024;
        queue.prepare(slot, op, sector, LEN);
        if op == Op::Write {
            queue.write_buffer(slot, &content(sector, LEN as usize));
        }
    }
    queue.submit(&slots);
}

fn finish(device: &mut Device) -> Vec<u8> {
    let done = device.queues[0].finish(usize::from(DEPTH));
    done.into_iter().map(|(_, status)| status).collect()
}

fn stats(control: &Path) -> serde_json::Value {
    let mut client = control::Client::connect(control, HANG).unwrap();
    let stats = client.call("x-ringdisk-stats", serde_json::json!({}));
    stats.unwrap()["disks"][0].clone()
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + HANG;
    while !is() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How long storage is away: RINGDISK_TEST_OUTAGE_S, in seconds.
fn outage_time() -> Duration {
    let given = std::env::var("RINGDISK_TEST_OUTAGE_S").ok();
    Duration::from_secs_f64(given.map_or(1.0, |s| s.parse().unwrap()))
}

/// With `retry`, a guest that cannot take errors notices nothing but the time, whatever moves the bytes.
#[test]
fn a_guest_outlives_an_outage_on_every_format_and_engine() {
    for format in ["raw", "qcow2"] {
        for aio in ["io_uring", "native", "threads"] {
            let Some(setup) = Setup::new(format, 1) else {
                return;
            };
            let options = format!("cache=none,aio={aio},rerror=retry,werror=retry");
            let mut server = setup.serve(&options, &[]);
            let mut device = setup.connect();
            setup.storage.change(|s| s.outage = Some(EIO));
            submit(&mut device, Op::Write);
            until("storage fails", || {
                stats(&setup.control())["storage"] == "fails"
            });
            std::thread::sleep(outage_time());
            setup.storage.change(|s| s.outage = None);
            assert_eq!(
                finish(&mut device),
                vec![OK; usize::from(DEPTH)],
                "{format} {aio}"
            );
            // In the middle of flushes and reads, too.
            for op in [Op::Flush, Op::Read] {
                setup.storage.change(|s| s.outage = Some(EIO));
                submit(&mut device, op);
                std::thread::sleep(Duration::from_millis(200));
                setup.storage.change(|s| s.outage = None);
                assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)], "{op:?}");
            }
            for slot in 0..DEPTH {
                let read = device.queues[0].read_buffer(slot, LEN as usize);
                assert_eq!(read, content(u64::from(slot) * 1024, LEN as usize));
            }
            drop(device);
            until("storage works", || {
                stats(&setup.control())["storage"] == "works"
            });
            assert!(server.terminate().unwrap().success());
            println!(
                "{format} {aio}: {} operations failed",
                setup.storage.control().failed
            );
        }
    }
}

/// What waits outlives the process: the next one does it, in the region that the front-end keeps.
#[test]
fn what_waits_for_storage_survives_a_restart() {
    for format in ["raw", "qcow2"] {
        let Some(setup) = Setup::new(format, 2) else {
            return;
        };
        let options = "cache=none,rerror=stop,werror=stop";
        let mut server = setup.serve(options, &[]);
        let mut device = setup.connect();
        setup.storage.change(|s| s.outage = Some(EIO));
        submit(&mut device, Op::Write);
        until("it stops", || {
            stats(&setup.control())["storage"] == "stopped"
        });
        // Neither the guest nor the process has to wait for the operator.
        let status = server.terminate().unwrap();
        println!("{format}: {status}");
        setup.storage.change(|s| s.outage = None);
        let _server = setup.serve(options, &[]);
        device.reconnect(setup.socket(), &config()).unwrap();
        assert_eq!(
            finish(&mut device),
            vec![OK; usize::from(DEPTH)],
            "{format}"
        );
        for slot in 0..DEPTH {
            let sector = u64::from(slot) * 1024;
            let read = device.queues[0].read(sector, LEN as usize).unwrap();
            assert_eq!(read, content(sector, LEN as usize), "{format}");
        }
    }
}

/// Storage that does not answer holds up neither the other disks of its thread nor the end of the process.
#[test]
fn storage_that_hangs_keeps_nobody() {
    for (format, aio) in [
        ("raw", "io_uring"),
        ("raw", "threads"),
        ("qcow2", "io_uring"),
    ] {
        let Some(setup) = Setup::new(format, 3) else {
            return;
        };
        let (file, socket) = (
            setup.dir.path().join("other.raw"),
            setup.dir.path().join("o.sock"),
        );
        std::fs::File::create(&file)
            .unwrap()
            .set_len(DISK_BYTES)
            .unwrap();
        let other = format!("file={},socket={}", file.display(), socket.display());
        let mut server = setup.serve(&format!("cache=none,aio={aio}"), &[other]);
        let mut device = setup.connect();
        submit(&mut device, Op::Write);
        assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
        setup.storage.change(|s| s.hangs = true);
        submit(&mut device, Op::Write);
        std::thread::sleep(Duration::from_millis(100));
        let mut beside = connect(&socket);
        submit(&mut beside, Op::Write);
        assert_eq!(
            finish(&mut beside),
            vec![OK; usize::from(DEPTH)],
            "{format} {aio}"
        );
        submit(&mut beside, Op::Flush);
        assert_eq!(
            finish(&mut beside),
            vec![OK; usize::from(DEPTH)],
            "{format} {aio}"
        );
        server.signal(rustix::process::Signal::TERM);
        until_long("the process says that storage hangs", || {
            server
                .log()
                .contains("what the VM wrote and did not flush may be lost")
        });
        // The kernel may keep what is left of the process until storage answers.
        setup.storage.change(|s| s.hangs = false);
        let status = server.ended().unwrap();
        assert_eq!(status.code(), Some(1), "{format} {aio}: {status}");
    }
}

/// Nobody takes over while requests are with storage that does not answer: who would finish them? All go on.
#[test]
fn storage_that_hangs_keeps_the_process() {
    let Some(setup) = Setup::new("raw", 5) else {
        return;
    };
    let server = setup.serve("cache=none", &[]);
    let mut device = setup.connect();
    submit(&mut device, Op::Write);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    setup.storage.change(|s| s.hangs = true);
    submit(&mut device, Op::Write);
    stuck(&setup);
    setup.storage.change(|s| s.hangs = false);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    submit(&mut device, Op::Read);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    let pid = upgrade(&setup)
        .0
        .unwrap_or_else(|| panic!("{}", server.log()));
    submit(&mut device, Op::Read);
    let read = finish(&mut device);
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert_eq!(read, vec![OK; usize::from(DEPTH)]);
}

/// Has another process take over: its number, if that is done, and what is said.
fn upgrade(setup: &Setup) -> (Option<rustix::process::Pid>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    let output = command
        .args(["upgrade", "--json", "--control"])
        .arg(setup.control())
        .output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    println!("{}", text.trim_end());
    let reply: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
    let pid = reply.and_then(|reply| Some(reply["pid"].as_u64()? as i32));
    (pid.and_then(rustix::process::Pid::from_raw), text)
}

/// Nobody takes over, since requests do not end.
fn stuck(setup: &Setup) {
    let (pid, text) = upgrade(setup);
    assert!(pid.is_none());
    assert!(
        text.contains("disk disk do not end") && text.contains("goes on"),
        "{text}"
    );
}

/// Who is told to stop while a pause is still waited for that nobody wants any more stops.
#[test]
fn a_pause_that_came_too_late_swallows_no_stop() {
    let Some(setup) = Setup::new("raw", 11) else {
        return;
    };
    let mut server = setup.serve("cache=none", &[]);
    let mut device = setup.connect();
    setup.storage.change(|s| s.hangs = true);
    submit(&mut device, Op::Write);
    stuck(&setup);
    server.signal(rustix::process::Signal::TERM);
    server.logged(&["stopping"]);
    setup.storage.change(|s| s.hangs = false);
    assert!(server.ended().unwrap().success(), "{}", server.log());
}

/// A file that is being made longer keeps its lock until that is done: whoever gets it then is the only one who writes.
#[test]
fn nothing_is_written_once_a_lock_is_given_up() {
    for (round, ending) in ["its VM stops", "it is put on another image"]
        .into_iter()
        .enumerate()
    {
        // Below the image that is written. What is new of that is not to show what is there.
        let Some(setup) = Setup::new("raw", 12) else {
            return;
        };
        let [file, other] = ["top.qcow2", "other.qcow2"].map(|name| setup.dir.path().join(name));
        let create = |file: &Path, options: &[&str], size: u64| {
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", "qcow2"]).args(options);
            let status = command.arg(file).arg(size.to_string()).status();
            assert!(status.unwrap().success());
        };
        let below = setup.storage.file();
        // The old version has no other way to say zeroes than to write them, and half a cluster is read from below.
        let options = ["-o", "compat=0.10", "-F", "raw", "-b"];
        let options = [&options[..], &[below.to_str().unwrap()]].concat();
        create(&file, &options, (1 << 20) + 4096);
        create(&other, &[], 2 << 20);
        let disk = format!(
            "file={},name=disk,socket={},queues=1,lock=running",
            file.display(),
            setup.socket().display()
        );
        let mut arguments = vec![disk, format!("--control={}", setup.control().display())];
        let allowed = below.parent().unwrap().display();
        arguments.push(format!("--allow-backing={allowed}"));
        let mut server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap();
        let mut device = setup.connect();
        let ringdisk = |arguments: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
            command
                .args(arguments)
                .arg("--control")
                .arg(setup.control());
            command.output().unwrap()
        };
        setup.storage.change(|s| s.hangs = true);
        let (at_end, resized) = std::thread::scope(|scope| {
            let resized = scope.spawn(|| ringdisk(&["resize", "disk", "2M"]));
            until("the resize waits for storage", || {
                setup.storage.control().held > 0
            });
            let at_end = scope.spawn(|| {
                match round {
                    0 => drop(device.stop_queue(0).unwrap()),
                    _ => drop(ringdisk(&["replace", "disk", other.to_str().unwrap()])),
                }
                std::fs::read(&file).unwrap()
            });
            // Time enough to give the lock up too early.
            for _ in 0..100 {
                if !at_end.is_finished() {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            setup.storage.change(|s| s.hangs = false);
            (at_end.join().unwrap(), resized.join().unwrap())
        });
        println!("{ending}: {resized:?}");
        assert!(
            std::fs::read(&file).unwrap() == at_end,
            "{ending}: written to afterwards"
        );
        assert!(server.terminate().unwrap().success());
    }
}

/// A disk that is being put on another file is not removed meanwhile, nor half removed: when that is done, it can be.
#[test]
fn a_disk_that_is_being_moved_is_not_removed() {
    let Some(setup) = Setup::new("raw", 14) else {
        return;
    };
    let allowed = format!("--allow-dir={}", setup.dir.path().display());
    let mut server = setup.serve("cache=none", &[allowed]);
    let other = setup.dir.path().join("other.raw");
    std::fs::write(&other, vec![0; DISK_BYTES as usize]).unwrap();
    let mut device = setup.connect();
    submit(&mut device, Op::Write);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    let ringdisk = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(arguments).arg("--control");
        let output = command.arg(setup.control()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        println!("{arguments:?}: {}", text.trim_end());
        (output.status.success(), text)
    };
    setup.storage.change(|s| s.hangs = true);
    let (moved, removed) = std::thread::scope(|scope| {
        let moved = scope.spawn(|| ringdisk(&["replace", "disk", other.to_str().unwrap()]));
        until("the move waits for storage", || {
            setup.storage.control().held > 0
        });
        let removed = scope.spawn(|| ringdisk(&["detach", "disk", "--force"]));
        let deadline = Instant::now() + HANG;
        while !removed.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        setup.storage.change(|s| s.hangs = false);
        (moved.join().unwrap(), removed.join().unwrap())
    });
    assert!(!removed.0 && removed.1.contains("try again"), "{removed:?}");
    assert!(moved.0, "{moved:?}");
    // The guest has noticed nothing.
    submit(&mut device, Op::Write);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    assert!(ringdisk(&["detach", "disk", "--force"]).0);
    assert!(server.terminate().unwrap().success());
}

/// A command of QMP, to a server that no subcommand asks for it.
fn qmp(setup: &Setup, command: &str) {
    let mut socket = UnixStream::connect(setup.control()).unwrap();
    let lines = ["{\"execute\": \"qmp_capabilities\"}", command].map(|line| format!("{line}\n"));
    socket.write_all(lines.concat().as_bytes()).unwrap();
    let replies = BufReader::new(socket).lines().skip(1).take(2);
    for reply in replies.map(Result::unwrap) {
        assert!(reply.contains("return"), "{reply}");
    }
}

/// Who has a file made longer that the disk leaves meanwhile is not told that the disk is longer.
#[test]
fn a_file_that_was_left_meanwhile_is_not_the_disk() {
    let Some(setup) = Setup::new("qcow2", 15) else {
        return;
    };
    let allowed = format!("--allow-dir={}", setup.dir.path().display());
    let other = setup.dir.path().join("other.raw");
    std::fs::write(&other, vec![0; DISK_BYTES as usize]).unwrap();
    let control = format!("--control={}", setup.control().display());
    let arguments = ["null:1M".into(), control, allowed];
    let mut server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap();
    // Nobody serves it, so that it is moved at once.
    let file = setup.storage.file();
    let add = serde_json::json!({ "execute": "blockdev-add", "arguments":
        { "driver": "qcow2", "node-name": "disk", "file": { "driver": "file", "filename": file } } });
    qmp(&setup, &add.to_string());
    let ringdisk = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(arguments).arg("--control");
        command.arg(setup.control()).output().unwrap()
    };
    let (resized, moved) = std::thread::scope(|scope| {
        setup.storage.change(|s| s.hangs = true);
        let resized = scope.spawn(|| ringdisk(&["resize", "disk", "20M"]));
        until("the resize waits for storage", || {
            setup.storage.control().held > 0
        });
        let moved = scope.spawn(|| ringdisk(&["replace", "disk", other.to_str().unwrap()]));
        server.logged(&["disk disk: was on", "other.raw"]);
        setup.storage.change(|s| s.hangs = false);
        (resized.join().unwrap(), moved.join().unwrap())
    });
    assert!(moved.status.success(), "{moved:?}");
    let text = String::from_utf8_lossy(&resized.stderr);
    assert!(text.contains("changed by somebody else"), "{resized:?}");
    assert!(server.terminate().unwrap().success());
}

/// Who is told to stop while tables are written for another process to find is not waited for by guests, and hands nothing
/// over.
#[test]
fn a_stop_ends_what_is_done_before_a_hand_over() {
    let Some(setup) = Setup::new("qcow2", 16) else {
        return;
    };
    let mut server = setup.serve("cache=none", &[]);
    let mut device = setup.connect();
    submit(&mut device, Op::Write);
    assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
    setup.storage.change(|s| s.hangs = true);
    let text = std::thread::scope(|scope| {
        let asked = scope.spawn(|| upgrade(&setup).1);
        until("tables wait for storage", || {
            setup.storage.control().held > 0
        });
        server.signal(rustix::process::Signal::TERM);
        // It has heard of it by then, most likely.
        std::thread::sleep(Duration::from_millis(500));
        setup.storage.change(|s| s.hangs = false);
        asked.join().unwrap()
    });
    assert!(text.contains("told to stop"), "{text}");
    assert!(server.ended().unwrap().success(), "{}", server.log());
    // The new process, which may be killed before it says so, has been handed nothing to open.
    let log = server.log();
    assert_eq!(log.matches("disk disk: aio=").count(), 1, "{log}");
}

/// A VM stops, and its storage does not answer as its disk is to be left to another host: that is waited for neither by
/// an upgrade nor by a command, and what was begun is done when storage answers.
#[test]
fn storage_that_hangs_as_a_vm_stops_keeps_no_upgrade() {
    for format in ["raw", "qcow2"] {
        let Some(setup) = Setup::new(format, 13) else {
            return;
        };
        let mut server = setup.serve("cache=none,lock=running", &[]);
        let mut device = setup.connect();
        submit(&mut device, Op::Write);
        assert_eq!(finish(&mut device), vec![OK; usize::from(DEPTH)]);
        setup.storage.change(|s| s.hangs = true);
        std::thread::scope(|scope| {
            let stopped = scope.spawn(|| device.stop_queue(0));
            until("the end of the VM waits for storage", || {
                setup.storage.control().held > 0
            });
            let _thaw = Thaw(&setup.storage);
            let mut client = control::Client::connect(setup.control(), HANG).unwrap();
            let nodes = client.call("query-named-block-nodes", json!({}));
            assert_eq!(nodes.unwrap()[0]["node-name"], "disk");
            let asked = scope.spawn(|| upgrade(&setup));
            let deadline = Instant::now() + HANG;
            while !asked.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            let answered = asked.is_finished();
            setup.storage.change(|s| s.hangs = false);
            let (pid, text) = asked.join().unwrap();
            stopped.join().unwrap().unwrap();
            assert!(answered, "{format}: an upgrade waits for storage");
            assert!(
                pid.is_none() && text.contains("goes on"),
                "{format}: {text}"
            );
        });
        assert_eq!(stats(&setup.control())["storage"], "works", "{format}");
        assert!(server.terminate().unwrap().success(), "{format}");
    }
}

/// Has storage answer again, also if an assertion fails: it keeps processes that nothing can end.
struct Thaw<'a>(&'a Storage);

impl Drop for Thaw<'_> {
    fn drop(&mut self) {
        self.0.change(|s| s.hangs = false);
    }
}

/// Storage that answers nothing, not even whether a file is there: commands that need an answer wait for it, and neither
/// other commands, nor other guests, nor the end of the process wait for those.
#[test]
fn storage_that_says_nothing_keeps_no_command() {
    let Some(setup) = Setup::new("raw", 14) else {
        return;
    };
    let [file, later] = ["other.raw", "later.raw"].map(|n| setup.dir.path().join(n));
    for file in [&file, &later] {
        std::fs::File::create(file)
            .unwrap()
            .set_len(DISK_BYTES)
            .unwrap();
    }
    let sockets = ["o.sock", "l.sock"].map(|n| setup.dir.path().join(n));
    let disk =
        |file: &Path, socket: &Path| format!("file={},socket={}", file.display(), socket.display());
    let Some(served) = Setup::new("raw", 15) else {
        return;
    };
    let others = [
        disk(&file, &sockets[0]),
        disk(&served.storage.file(), &served.socket()) + ",name=served,format=raw",
        // It would look at files before.
        "--sandbox=off".into(),
    ];
    let mut server = setup.serve("cache=none", &others);
    let mut beside = connect(&sockets[0]);
    let client = || control::Client::connect(setup.control(), HANG).unwrap();
    let node = json!({
        "driver": "raw", "node-name": "idle",
        "file": { "driver": "file", "filename": setup.storage.file() },
    });
    client()
        .call("x-ringdisk-detach", json!({ "id": "disk" }))
        .unwrap();
    client().call("blockdev-add", node).unwrap();
    let _thaw = [&setup, &served].map(|setup| Thaw(&setup.storage));
    for setup in [&setup, &served] {
        setup.storage.change(|s| (s.hangs, s.silent) = (true, true));
    }
    // Each of these looks at it, in its own way.
    let export = json!({
        "type": "vhost-user-blk", "id": "export", "node-name": "idle",
        "addr": { "type": "unix", "path": setup.socket() },
    });
    let again =
        json!({ "disk": format!("file={},name=again,format=raw", setup.storage.file().display()) });
    let place = json!({ "id": "other", "file": setup.storage.file() });
    let hang = [
        ("block-export-add", export),
        ("x-ringdisk-attach", again),
        ("x-ringdisk-replace", place),
        ("x-ringdisk-resize", json!({ "id": "idle" })),
    ];
    for (command, arguments) in hang {
        let before = setup.storage.control().held;
        let mut its = client();
        let ask = move || drop(its.call(command, arguments));
        std::thread::spawn(ask);
        // The last one waits behind the first one, in the kernel.
        let last = command == "x-ringdisk-resize";
        until(command, || last || setup.storage.control().held > before);
        // What is known of it is shown.
        let nodes = client().call("query-named-block-nodes", json!({})).unwrap();
        let idle = nodes
            .as_array()
            .unwrap()
            .iter()
            .find(|node| node["node-name"] == "idle");
        let size = idle.map(|idle| &idle["image"]["virtual-size"]);
        assert_eq!(size, Some(&json!(DISK_BYTES)), "{command}: {nodes}");
        client().call("x-ringdisk-stats", json!({})).unwrap();
    }
    server.signal(rustix::process::Signal::HUP);
    // Others are served, and added, and make choices that are kept.
    beside.frontend.set_config(32, &[0]).unwrap();
    submit(&mut beside, Op::Write);
    assert_eq!(finish(&mut beside), vec![OK; usize::from(DEPTH)]);
    let later = json!({ "disk": disk(&later, &sockets[1]) });
    client().call("x-ringdisk-attach", later).unwrap();
    submit(&mut connect(&sockets[1]), Op::Read);
    server.logged(&["disk served", "whether it has grown is not known"]);
    server.signal(rustix::process::Signal::TERM);
    until_long("the process says that storage hangs", || {
        let log = server.log();
        let hangs = |name| log.contains(&format!("disk {name}: its storage does not answer; what"));
        hangs("idle") && hangs("served")
    });
    for setup in [&setup, &served] {
        setup.storage.change(|s| s.hangs = false);
    }
    let status = server.ended().unwrap();
    assert_eq!(status.code(), Some(1), "{status}");
}

/// A disk that is written down is on storage that answers nothing: who waits for it can be stopped.
#[test]
fn storage_that_says_nothing_keeps_no_configuration() {
    let Some(setup) = Setup::new("raw", 16) else {
        return;
    };
    let config = setup.dir.path().join("ringdisk.toml");
    std::fs::write(&config, "").unwrap();
    let arguments = [
        format!("--config={}", config.display()),
        format!("--control={}", setup.control().display()),
        "--sandbox=off".into(),
    ];
    let mut server = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &arguments).unwrap();
    let (file, socket) = (setup.storage.file(), setup.socket());
    let disk = format!("[[disk]]\nfile = {file:?}\nformat = \"raw\"\nsocket = {socket:?}\n");
    std::fs::write(&config, disk).unwrap();
    let _thaw = Thaw(&setup.storage);
    setup.storage.change(|s| (s.hangs, s.silent) = (true, true));
    server.signal(rustix::process::Signal::HUP);
    until("the configuration waits for storage", || {
        setup.storage.control().held > 0
    });
    server.signal(rustix::process::Signal::TERM);
    server.logged(&["stopping"]);
    setup.storage.change(|s| s.hangs = false);
    assert!(server.ended().unwrap().success(), "{}", server.log());
}

/// Longer than a server waits for storage.
fn until_long(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !is() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The default of `werror`: writes wait for space, and go on when it is made.
#[test]
fn writes_wait_for_space() {
    for format in ["raw", "qcow2"] {
        let Some(setup) = Setup::new(format, 4) else {
            return;
        };
        let _server = setup.serve("cache=none", &[]);
        let mut device = setup.connect();
        setup.storage.change(|s| s.full = true);
        submit(&mut device, Op::Write);
        until("writes wait", || {
            stats(&setup.control())["storage"] == "fails"
        });
        let waiting = stats(&setup.control())["stats"]["stalled"].clone();
        assert!(waiting.as_u64().unwrap() > 0, "{waiting}");
        setup.storage.change(|s| s.full = false);
        assert_eq!(
            finish(&mut device),
            vec![OK; usize::from(DEPTH)],
            "{format}"
        );
        for sector in (0..u64::from(DEPTH)).map(|slot| slot * 1024) {
            let read = device.queues[0].read(sector, LEN as usize).unwrap();
            assert_eq!(read, content(sector, LEN as usize));
        }
        assert_eq!(stats(&setup.control())["stats"]["write"]["errors"], 0);
    }
}

/// What a sector may hold: what was last acknowledged, or anything that was written since without being so.
#[derive(Clone, Default)]
struct Sector {
    /// Of what was made durable, or acknowledged while nothing was cut.
    known: Vec<u64>,
}

/// Faults at random, and a power cut at the end of each round: every sector holds what the guest may expect, and what
/// it flushed is there. The seed is printed.
#[test]
fn faults_and_power_cuts_leave_what_was_promised() {
    let seed = seed();
    let rounds = std::env::var("RINGDISK_TEST_ROUNDS").map_or(1, |n| n.parse().unwrap());
    let mut cases = 0;
    for round in 0..rounds {
        for format in ["raw", "qcow2"] {
            for cache in ["none", "directsync", "writeback", "writethrough", "unsafe"] {
                for aio in ["io_uring", "native", "threads"] {
                    if aio == "native" && !matches!(cache, "none" | "directsync") {
                        continue;
                    }
                    let seed = seed ^ (cases + round) << 32;
                    if !faults_and_a_cut(format, cache, aio, seed) {
                        return;
                    }
                    cases += 1;
                }
            }
        }
    }
    println!("{cases} runs of faults");
}

fn faults_and_a_cut(format: &'static str, cache: &str, aio: &str, seed: u64) -> bool {
    const SLOTS: u64 = DEPTH as u64;
    /// Each slot has so many places of its own.
    const PLACES: u64 = 32;
    let Some(setup) = Setup::new(format, seed) else {
        return false;
    };
    let context = format!("{format}, cache={cache}, aio={aio}, seed {seed}");
    let mut random = Random(seed);
    let options = format!("cache={cache},aio={aio},rerror=report,werror=report");
    let mut server = setup.serve(&options, &[]);
    let mut device = setup.connect();
    let mut sectors = vec![Sector { known: vec![0] }; (SLOTS * PLACES) as usize];
    // What may be there after a cut: all since the last flush that succeeded.
    let mut since: Vec<Vec<u64>> = vec![vec![0]; sectors.len()];
    let place_of = |slot: u64, place: u64| (place * SLOTS + slot) * 64 + 8 * (place % 8);
    let mut next = 0u64;
    let mut errors = 0;
    for step in 0..60 {
        let mishaps = Mishaps {
            short: 100,
            fail: if step % 3 == 0 { 60 } else { 0 },
            again: 30,
            late_ms: u64::from(step % 5 == 0),
        };
        setup.storage.change(|s| s.mishaps = mishaps);
        let queue = &mut device.queues[0];
        let flushes = random.below(4) == 0;
        let mut asked = Vec::new();
        for slot in 0..SLOTS {
            let place = random.below(PLACES);
            let op = match random.below(5) {
                _ if flushes => Op::Flush,
                0 | 1 => Op::Read,
                _ => Op::Write,
            };
            let sector = place_of(slot, place);
            queue.prepare(slot as u16, op, sector, LEN);
            if op == Op::Write {
                next += 1;
                let mark = next.to_le_bytes().repeat(LEN as usize / 8);
                queue.write_buffer(slot as u16, &mark);
            }
            asked.push((op, (place * SLOTS + slot) as usize, next));
        }
        queue.submit(&(0..DEPTH).collect::<Vec<_>>());
        let done = queue.finish(usize::from(DEPTH));
        let mut flushed = false;
        for (slot, status) in done {
            let (op, place, value) = asked[usize::from(slot)];
            errors += u64::from(status != OK);
            assert!(
                matches!(status, OK | IO_ERROR),
                "{context}: status {status}"
            );
            match (op, status) {
                (Op::Read, OK) => {
                    let read = queue.read_buffer(slot, LEN as usize);
                    let may = &sectors[place].known;
                    for sector in read.chunks(512) {
                        let found = u64::from_le_bytes(sector[..8].try_into().unwrap());
                        assert!(
                            may.contains(&found),
                            "{context}: read {found}, not of {may:?}"
                        );
                    }
                }
                (Op::Write, OK) => {
                    sectors[place].known = vec![value];
                    match matches!(cache, "directsync" | "writethrough") {
                        true => since[place] = vec![value],
                        false => since[place].push(value),
                    }
                }
                // All of it, a part or nothing.
                (Op::Write, _) => {
                    sectors[place].known.push(value);
                    since[place].push(value);
                }
                (Op::Flush, OK) => flushed = true,
                _ => {}
            }
        }
        if flushed && cache != "unsafe" {
            for (known, since) in sectors.iter().zip(&mut since) {
                since.clone_from(&known.known);
            }
        }
    }
    // A kill, and the power goes: what is in the kernel is lost too.
    server.signal(rustix::process::Signal::KILL);
    let _ = server.ended();
    drop(device);
    setup.storage.change(|s| {
        s.mishaps = Mishaps::default();
        s.cut_power(&mut random);
    });
    let bytes = setup.storage.control().bytes().to_vec();
    let failed = setup.storage.control().failed;
    let image = setup.dir.path().join("after");
    std::fs::write(&image, bytes).unwrap();
    if format == "qcow2" && cache != "unsafe" {
        let check = Command::new("qemu-img")
            .args(["check", "-q", "-f", "qcow2"])
            .arg(&image)
            .status();
        // 3: space is lost, and nothing else.
        assert!(matches!(check.unwrap().code(), Some(0 | 3)), "{context}");
    }
    if cache != "unsafe" {
        let raw = setup.dir.path().join("raw");
        let mut convert = Command::new("qemu-img");
        convert
            .args(["convert", "-f", format, "-O", "raw"])
            .arg(&image)
            .arg(&raw);
        assert!(convert.status().unwrap().success(), "{context}");
        let bytes = std::fs::read(&raw).unwrap();
        for (place, may) in since.iter().enumerate() {
            let (slot, place) = (place as u64 % SLOTS, place as u64 / SLOTS);
            let at = place_of(slot, place) as usize * 512;
            for sector in bytes[at..at + LEN as usize].chunks(512) {
                let found = u64::from_le_bytes(sector[..8].try_into().unwrap());
                assert!(
                    may.contains(&found),
                    "{context}: after the cut, {found} at slot {slot}, place {place}, and not one of {may:?}"
                );
            }
        }
    }
    println!("{context}: {failed} faults of storage, {errors} errors for the guest");
    true
}
