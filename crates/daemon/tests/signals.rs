//! Signals and resource limits, and their effect on the disks: the tables of docs/operating/restart.md.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use serde_json::json;
use tempfile::TempDir;
use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::qemu_img;
use testkit::server::Server;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const MIB: u64 = 1 << 20;

/// A ringdisk that serves the disks of a directory, with a control socket there.
struct Served {
    server: Server,
    dir: TempDir,
}

impl Served {
    /// Serves disks of a directory, each given as NAME,OPTIONS.
    fn new(dir: TempDir, disks: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(["serve", "--json", "--iothreads=1"]);
        command.arg(format!(
            "--control={}",
            dir.path().join("control.qmp").display()
        ));
        command.arg(format!("--state={}", dir.path().join("state").display()));
        for disk in disks {
            let (name, options) = disk.split_once(',').unwrap_or((disk, "cache=none"));
            let (file, socket) = (dir.path().join(name), socket(dir.path(), name));
            let (file, socket) = (file.display(), socket.display());
            command.arg(format!("file={file},socket={socket},queues=1,{options}"));
        }
        command.env("RUNTIME_DIRECTORY", dir.path());
        let server = Server::ringdisk_command(command).unwrap();
        Self { server, dir }
    }

    fn connect(&self, name: &str) -> Device {
        Device::connect(socket(self.dir.path(), name), &DeviceConfig::default()).unwrap()
    }

    fn client(&self) -> control::Client {
        control::Client::connect(self.dir.path().join("control.qmp"), HANG).unwrap()
    }

    /// Sets the soft limit; `None` restores this process's limit, which the server started with.
    fn limit(&self, resource: Resource, current: Option<u64>) {
        let pid = Pid::from_raw(self.server.pid() as i32);
        let Rlimit {
            current: before,
            maximum,
        } = getrlimit(resource);
        let current = current.or(before);
        prlimit(pid, resource, Rlimit { current, maximum }).unwrap();
    }
}

fn socket(directory: &Path, name: &str) -> PathBuf {
    directory.join(name).with_extension("sock")
}

fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn raw(directory: &TempDir, name: &str, bytes: u64) {
    let file = File::create(directory.path().join(name)).unwrap();
    file.set_len(bytes).unwrap();
}

fn assert_works(device: &mut Device) {
    let bytes = vec![7; 4096];
    assert_eq!(device.queues[0].write(8, &bytes), OK);
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), bytes);
}

/// `ulimit -f`, LimitFSIZE=: the kernel sends SIGXFSZ to a process that writes beyond the limit. By default this kills
/// the process, and with it all its disks.
#[test]
fn file_size_limit_fails_only_the_writes_beyond_it() {
    let dir = directory();
    raw(&dir, "small.raw", 2 * MIB);
    let raws = [
        "uring,aio=io_uring",
        "native,aio=native",
        "threads,aio=threads",
        "cached,cache=writeback",
        "cached-threads,cache=writeback,aio=threads",
    ];
    let raws = raws.map(|disk| disk.replacen(',', ".raw,", 1));
    for disk in &raws {
        raw(&dir, disk.split(',').next().unwrap(), 32 * MIB);
    }
    qemu_img::img(dir.path(), "create -q -f qcow2 image.qcow2 64M");
    let disks = raws
        .iter()
        .map(String::as_str)
        .chain(["small.raw", "image.qcow2"]);
    let mut served = Served::new(dir, &disks.collect::<Vec<_>>());
    let mut small = served.connect("small.raw");
    served.limit(Resource::Fsize, Some(16 * MIB));
    let block = vec![9; 64 << 10];
    let at_limit = 16 * MIB / 512;
    for disk in &raws {
        let name = disk.split(',').next().unwrap();
        let mut device = served.connect(name);
        let queue = &mut device.queues[0];
        assert_eq!(queue.write(at_limit, &block), IOERR, "{disk}");
        // Half of it is below the limit.
        assert_eq!(queue.write(at_limit - 64, &block), IOERR, "{disk}");
        assert_eq!(queue.write(at_limit - 128, &block), OK, "{disk}");
        assert_eq!(queue.read(at_limit, 4096).unwrap(), vec![0; 4096], "{disk}");
        assert_works(&mut device);
        assert_works(&mut small);
    }
    let said = served
        .server
        .wait_for_log(&["disk uring", "File too large"]);
    assert!(said.contains("RLIMIT_FSIZE"), "{said}");
    // An image grows: writes beyond the limit fail, existing data stays accessible, and nothing is left half written.
    let mut image = served.connect("image.qcow2");
    let queue = &mut image.queues[0];
    let written: Vec<_> = (0..512).map(|i| queue.write(i * 128, &block)).collect();
    let fit = written.iter().take_while(|&&status| status == OK).count();
    assert!((200..256).contains(&fit), "{fit} of 64 KiB in 16 MiB");
    assert!(
        written[fit..].iter().all(|&status| status == IOERR),
        "{written:?}"
    );
    for i in 0..fit as u64 {
        assert_eq!(queue.read(i * 128, block.len()).unwrap(), block);
    }
    assert_works(&mut small);
    // Growing files.
    let mut client = served.client();
    let refused = client.call(
        "x-ringdisk-resize",
        json!({ "id": "small", "size": 32 * MIB }),
    );
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("File too large") && refused.contains("RLIMIT_FSIZE"),
        "{refused}"
    );
    assert_works(&mut small);
    // Without the limit, everything works again.
    served.limit(Resource::Fsize, None);
    for i in 0..512 {
        assert_eq!(image.queues[0].write(i * 128, &block), OK);
    }
    client
        .call(
            "x-ringdisk-resize",
            json!({ "id": "small", "size": 32 * MIB }),
        )
        .unwrap();
    drop((image, small));
    assert!(served.server.terminate().unwrap().success());
    qemu_img::check(served.dir.path(), "image.qcow2", false);
}

/// Signals that the kernel sends when a limit is reached or for terminal access, and signals that log rotation sends.
#[test]
fn unrelated_signals_are_ignored() {
    let dir = directory();
    raw(&dir, "disk.raw", MIB);
    let mut served = Served::new(dir, &["disk.raw"]);
    let mut device = served.connect("disk.raw");
    for signal in [
        Signal::PIPE,
        Signal::XFSZ,
        Signal::XCPU,
        Signal::TTIN,
        Signal::TTOU,
        Signal::USR1,
        Signal::USR2,
        Signal::URG,
        Signal::WINCH,
        Signal::HUP,
    ] {
        served.server.signal(signal);
        assert_works(&mut device);
        assert!(served.server.is_running(), "{signal:?}");
    }
    drop(device);
    let mut device = served.connect("disk.raw");
    assert_works(&mut device);
    assert!(served.server.terminate().unwrap().success());
}

/// Started by hand, then the window is closed: the log can no longer be written, and SIGHUP arrives.
#[test]
fn closing_the_terminal_does_not_stop_it() {
    let dir = directory();
    raw(&dir, "disk.raw", MIB);
    let (file, socket) = (dir.path().join("disk.raw"), socket(dir.path(), "disk.raw"));
    let control = dir.path().join("control.qmp");
    let ringdisk = format!(
        "exec {} serve file={},socket={} --control={}",
        env!("CARGO_BIN_EXE_ringdisk"),
        file.display(),
        socket.display(),
        control.display()
    );
    // Each message of a front-end is a log line.
    let mut terminal = Command::new("script")
        .args(["-qec", &ringdisk, "/dev/null"])
        .env("RINGDISK_LOG", "debug")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let mut client = loop {
        match control::Client::connect(&control, HANG) {
            Ok(client) => break client,
            Err(e) => assert!(start.elapsed() < HANG, "the server does not start: {e}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
    assert_works(&mut device);
    terminal.kill().unwrap();
    terminal.wait().unwrap();
    for _ in 0..3 {
        assert_works(&mut device);
        drop(device);
        device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
    }
    client
        .call("x-ringdisk-detach", json!({ "id": "disk", "force": true }))
        .unwrap();
    let disk = format!("file={},socket={}", file.display(), socket.display());
    client
        .call("x-ringdisk-attach", json!({ "disk": disk }))
        .unwrap();
    let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
    assert_works(&mut device);
    drop(device);
    client.call("quit", json!({})).unwrap();
    while socket.exists() {
        assert!(start.elapsed() < 2 * HANG, "the server does not end");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A process that cannot start more threads refuses what needs one, names the limit, and serves what it has.
#[test]
fn thread_limit_is_named() {
    let dir = directory();
    raw(&dir, "disk.raw", MIB);
    raw(&dir, "more.raw", MIB);
    let mut served = Served::new(dir, &["disk.raw"]);
    let mut device = served.connect("disk.raw");
    assert_works(&mut device);
    let mut client = served.client();
    let path = |name: &str| served.dir.path().join(name).display().to_string();
    let disk = format!("file={},socket={}", path("more.raw"), path("more.sock"));
    served.limit(Resource::Nproc, Some(1));
    match client.call("x-ringdisk-attach", json!({ "disk": disk })) {
        // The limit does not apply to root.
        Ok(_) => println!("skipped: thread_limit_is_named: this user has no limit"),
        Err(e) => assert!(e.to_string().contains("RLIMIT_NPROC"), "{e}"),
    }
    assert_works(&mut device);
    served.limit(Resource::Nproc, None);
    assert!(served.server.terminate().unwrap().success());
}
