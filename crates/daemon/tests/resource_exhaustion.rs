//! A process that runs out of a resource refuses new work, reports why, and continues to serve what it has.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use serde_json::json;
use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::server::{Server, wait_for_exit};

use crate::support;

fn serve(dir: &Path, limit: Option<u64>) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    let disk = dir.join("first.raw");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let socket = dir.join("first.sock");
    command
        .args(["serve", "--json", "--iothreads=1"])
        .arg(format!(
            "file={},socket={},queues=1",
            disk.display(),
            socket.display()
        ))
        .arg(format!("--control={}", dir.join("control.qmp").display()));
    if let Some(limit) = limit {
        let mut limited = Command::new("prlimit");
        limited
            .arg(format!("--nofile={limit}:{limit}"))
            .arg(command.get_program());
        limited.args(command.get_args());
        command = limited;
    }
    Server::ringdisk_command(command).unwrap()
}

fn assert_works(device: &mut Device) {
    let bytes = vec![7; 4096];
    assert_eq!(device.queues[0].write(8, &bytes), 0);
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), bytes);
}

#[test]
fn descriptor_limit_refuses_new_disks_and_keeps_the_others() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut server = serve(dir.path(), Some(64));
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let mut client = control::Client::connect(dir.path().join("control.qmp"), HANG).unwrap();
    let mut added = 0;
    let refused = loop {
        let file = dir.path().join(format!("more-{added}.raw"));
        File::create(&file).unwrap().set_len(1 << 20).unwrap();
        let socket = dir.path().join(format!("more-{added}.sock"));
        let disk = format!(
            "file={},socket={},queues=1",
            file.display(),
            socket.display()
        );
        match client.call("x-ringdisk-attach", json!({ "disk": disk })) {
            Ok(_) => added += 1,
            Err(e) => break e.to_string(),
        }
        assert!(added < 64, "64 descriptors are enough for {added} disks");
    };
    assert!(refused.contains("Too many open files"), "{refused}");
    assert_works(&mut device);
    // With one disk less, there is room again.
    assert!(added > 1);
    for gone in [0, 1] {
        let gone = json!({ "id": format!("more-{gone}"), "force": true });
        client.call("x-ringdisk-detach", gone).unwrap();
    }
    let file = dir.path().join("more-0.raw");
    let disk = format!(
        "file={},socket={},queues=1",
        file.display(),
        dir.path().join("again.sock").display()
    );
    client
        .call("x-ringdisk-attach", json!({ "disk": disk }))
        .unwrap();
    assert_works(&mut device);
    assert!(server.terminate().unwrap().success());
}

/// Whichever descriptor is the one too many, the error names the limit rather than the file or directory being opened,
/// and the disk's socket is removed.
#[test]
fn descriptor_limit_is_named_by_every_command() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut server = serve(dir.path(), None);
    let mut client = control::Client::connect(dir.path().join("control.qmp"), HANG).unwrap();
    let mut image = Command::new("qemu-img");
    image
        .args(["create", "-q", "-f", "qcow2"])
        .arg(dir.path().join("more.qcow2"));
    if !image
        .arg("1M")
        .status()
        .is_ok_and(|status| status.success())
    {
        return println!(
            "skipped: descriptor_limit_is_named_by_every_command: there is no qemu-img"
        );
    }
    let file = dir.path().join("more.raw");
    File::create(file).unwrap().set_len(1 << 20).unwrap();
    let pid = Pid::from_raw(server.pid() as i32);
    let limit = getrlimit(Resource::Nofile);
    for format in ["raw", "qcow2"] {
        let socket = dir.path().join("more.sock");
        let disk = format!(
            "file={},socket={},queues=1",
            dir.path().join(format!("more.{format}")).display(),
            socket.display()
        );
        let mut refused = 0;
        loop {
            let open = std::fs::read_dir(format!("/proc/{}/fd", server.pid()));
            let current = Some(open.unwrap().count() as u64 + refused);
            prlimit(pid, Resource::Nofile, Rlimit { current, ..limit }).unwrap();
            let attached = client.call("x-ringdisk-attach", json!({ "disk": disk }));
            prlimit(pid, Resource::Nofile, limit).unwrap();
            let Err(e) = attached else { break };
            let said = e.to_string();
            println!("{format}, {refused} more: {said}");
            assert!(said.contains("RLIMIT_NOFILE"), "{said}");
            assert!(!socket.exists(), "the socket is left behind");
            refused += 1;
            assert!(refused < 64, "64 descriptors are enough for a disk");
        }
        assert!(refused > 1, "{refused}");
        let gone = json!({ "id": "more", "force": true });
        client.call("x-ringdisk-detach", gone).unwrap();
    }
    assert!(server.terminate().unwrap().success());
}

/// Every client gets an error at once, even if there is no descriptor for its connection, and the log is not flooded. A
/// VM disconnected for lack of descriptors is not reported as faulty, and an idle disk's storage not as stuck.
#[test]
fn descriptor_limit_is_named_to_clients_and_vms() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut server = serve(dir.path(), None);
    let control = format!("--control={}", dir.path().join("control.qmp").display());
    let ringdisk = |command: &str| {
        let mut ringdisk = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        ringdisk.args([command, &control]).output().unwrap()
    };
    // Whether ringdisk has a VM's memory, which its session closes when it ends.
    let has_memory = || {
        let open = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
        let mut links = open
            .flatten()
            .flat_map(|entry| std::fs::read_link(entry.path()));
        links.any(|link| link.to_string_lossy().starts_with("/memfd:"))
    };
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let pid = Pid::from_raw(server.pid() as i32);
    let limit = getrlimit(Resource::Nofile);
    let with = |more: u64, work: &mut dyn FnMut() -> Result<String, String>| {
        let open = std::fs::read_dir(format!("/proc/{}/fd", server.pid()));
        let current = Some(open.unwrap().count() as u64 + more);
        prlimit(pid, Resource::Nofile, Rlimit { current, ..limit }).unwrap();
        let done = work();
        // The process may have ended.
        let _ = prlimit(pid, Resource::Nofile, limit);
        done
    };
    let run = |command: &str| {
        let output = ringdisk(command);
        let [out, error] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        if output.status.success() {
            Ok(out)
        } else {
            Err(error)
        }
    };
    let mut refused = 0;
    while let Err(said) = with(refused, &mut || run("list")) {
        println!("list, {refused} more: {said}");
        assert!(said.contains("RLIMIT_NOFILE"), "{said}");
        refused += 1;
        assert!(refused < 64, "64 descriptors are enough");
    }
    assert!(refused > 0);
    assert_works(&mut device);
    drop(device);
    server.wait_for_log(&["front-end disconnected"]);
    // The session closes its descriptors after that, and the next VM must not find them free.
    let start = Instant::now();
    while has_memory() {
        assert!(start.elapsed() < HANG, "descriptors stay open");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Without a descriptor, the connection waits for one.
    for more in 1..64 {
        let connect = &mut || {
            let device = Device::connect(server.socket(), &DeviceConfig::default());
            device.map(|_| String::new()).map_err(|e| e.to_string())
        };
        if with(more, connect).is_ok() {
            break;
        }
        println!("a VM, {more} more");
        server.wait_for_log(&[support::FRONT_END_CUT_OFF, "RLIMIT_NOFILE"]);
    }
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let mut refused = 0;
    let next = loop {
        match with(refused, &mut || run("upgrade")) {
            Ok(said) => break said.split(' ').nth(1).unwrap().parse().unwrap(),
            Err(said) => {
                println!("upgrade, {refused} more: {said}");
                assert!(
                    said.contains("RLIMIT_NOFILE") && said.contains("continues to serve"),
                    "{said}"
                );
            }
        }
        refused += 1;
        assert!(refused < 64, "64 descriptors are enough");
    };
    assert!(refused > 0);
    assert_works(&mut device);
    let log = server.log();
    assert!(
        !log.contains("4294967295") && !log.contains("stuck"),
        "{log}"
    );
    let lines = log
        .lines()
        .filter(|line| line.contains("cannot serve a client"));
    assert!(lines.count() < 16, "{log}");
    let next = Pid::from_raw(next).unwrap();
    kill_process(next, Signal::TERM).unwrap();
    wait_for_exit(next.as_raw_nonzero().get() as u32);
    assert!(server.ended().unwrap().success());
}

/// The same at startup.
#[test]
fn descriptor_limit_is_named_at_startup() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name);
    File::create(path("disk.raw"))
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let mut refused = 0;
    for limit in 8.. {
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={limit}:{limit}"));
        command.args([
            env!("CARGO_BIN_EXE_ringdisk"),
            "serve",
            "--json",
            "--iothreads=1",
        ]);
        command.arg(format!(
            "file={},socket={}",
            path("disk.raw").display(),
            path("disk.sock").display()
        ));
        command.arg(format!("--control={}", path("control.qmp").display()));
        command.arg(format!("--state={}", path("state").display()));
        command.arg("--metrics=127.0.0.1:0");
        let said = match Server::ringdisk_command(command) {
            Ok(_) => break,
            Err(e) => e.to_string(),
        };
        let last = said.lines().last().unwrap_or_default();
        println!("{limit}: {last}");
        assert!(
            last.contains("RLIMIT_NOFILE") || last.contains("ulimit -n"),
            "{said}"
        );
        refused += 1;
        assert!(refused < 64, "the server does not start");
    }
    assert!(refused > 5, "{refused}");
}

/// When a VM stops, its disk is released completely even if no descriptor is free to reopen the file: the next VM can
/// acquire and release it.
#[test]
fn disk_is_released_without_free_descriptors() {
    for format in ["raw", "qcow2"] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = dir.path().join(format!("disk.{format}"));
        let mut image = Command::new("qemu-img");
        image.args(["create", "-q", "-f", format]).arg(&disk);
        assert!(image.arg("1M").status().unwrap().success());
        let socket = dir.path().join("disk.sock");
        let argument = format!(
            "file={},socket={},queues=1,lock=running",
            disk.display(),
            socket.display()
        );
        let control = format!("--control={}", dir.path().join("control.qmp").display());
        let mut server =
            Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &[argument, control]).unwrap();
        let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
        assert_works(&mut device);

        let pid = Pid::from_raw(server.pid() as i32);
        let mut limit = getrlimit(Resource::Nofile);
        let before = limit.current.replace(3);
        prlimit(pid, Resource::Nofile, limit).unwrap();
        device.stop_queue(0).unwrap();
        server.wait_for_log(&["RLIMIT_NOFILE", "its descriptor stays open"]);
        limit.current = before;
        prlimit(pid, Resource::Nofile, limit).unwrap();
        let is_left = || {
            let mut check = Command::new("qemu-img");
            check.args(["info", "-f", format]).arg(&disk);
            assert!(
                check.output().unwrap().status.success(),
                "the image must be unlocked"
            );
        };
        is_left();

        drop(device);
        let mut device = Device::connect(&socket, &DeviceConfig::default())
            .unwrap_or_else(|e| panic!("{format}: {e}: {}", server.log()));
        assert_works(&mut device);
        device.stop_queue(0).unwrap();
        is_left();
        assert!(server.terminate().unwrap().success());
    }
}

/// A disk needs threads, which need stacks. A limit on address space stands in for a lack of memory: the kernel
/// enforces it without killing the process, as it would when it runs out of overcommitted memory.
#[test]
fn memory_limit_refuses_new_disks_and_keeps_the_others() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut server = serve(dir.path(), None);
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_works(&mut device);
    let mut client = control::Client::connect(dir.path().join("control.qmp"), HANG).unwrap();
    let mut attach = |number: u32| {
        let file = dir.path().join(format!("more{number}.raw"));
        File::create(&file).unwrap().set_len(1 << 20).unwrap();
        let socket = file.with_extension("sock");
        let (file, socket) = (file.display(), socket.display());
        let disk = format!("file={file},socket={socket},queues=1");
        client.call("x-ringdisk-attach", json!({ "disk": disk }))
    };

    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kib = size.and_then(|rest| rest.split_whitespace().next());
    let bytes = kib.unwrap().parse::<u64>().unwrap() << 10;
    let pid = Pid::from_raw(server.pid() as i32);
    let set = |current| {
        let limit = Rlimit {
            current,
            ..getrlimit(Resource::As)
        };
        prlimit(pid, Resource::As, limit).unwrap();
    };
    // Less than the stack of a thread. Those of threads that have ended are used again.
    set(Some(bytes + (1 << 20)));
    let refused = (0..16).find_map(|number| attach(number).err());
    let refused = refused.unwrap().to_string();
    assert!(refused.contains("no thread can be started"), "{refused}");
    assert_works(&mut device);
    set(None);
    attach(16).unwrap();
    assert_works(&mut device);
    assert!(server.terminate().unwrap().success());
}

/// If the log cannot be written, only log lines are lost: standard error is a full device, or a pipe that nobody reads.
#[test]
fn unwritable_log_delays_nobody() {
    let (reader, pipe) = std::io::pipe().unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    for stderr in [Stdio::from(full), Stdio::from(pipe)] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = dir.path().join("disk.raw");
        File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let socket = dir.path().join("disk.sock");
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command
            .args(["serve", "--json"])
            .arg(format!(
                "file={},socket={}",
                disk.display(),
                socket.display()
            ))
            .arg(format!("--control={}", dir.path().join("c.qmp").display()))
            // Every message of a front-end is a line: far more than a pipe holds.
            .env("RINGDISK_LOG", "debug")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .process_group(0);
        let mut child = command.spawn().unwrap();
        let start = Instant::now();
        // The socket exists a moment before ringdisk listens on it.
        while UnixStream::connect(&socket).is_err() {
            assert!(start.elapsed() < HANG, "the server does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        for _ in 0..40 {
            let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
            assert_works(&mut device);
        }
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let start = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(start.elapsed() < HANG, "the server does not end"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(status.success(), "{status}");
    }
    drop(reader);
}
