//! Sockets and other files of a process across upgrades.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use testkit::driver::Op;
use testkit::vm::Qmp;

use super::*;

/// The old process may still exist, but accepts no clients.
#[test]
fn client_connecting_after_an_upgrade_gets_answers() {
    let disk = Disk::new();
    let mut served = Served::start(&[disk.argument("queues=1")]);
    for _ in 0..15 {
        let output = served.ringdisk(&["upgrade", "--json"]);
        let mut clients: Vec<_> = (0..8)
            .map(|_| Qmp::connect(&served.control).unwrap())
            .collect();
        for client in &mut clients {
            client
                .execute("query-version", serde_json::json!({}))
                .unwrap();
        }
        let before = served.pid;
        let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
        served.pid = reply["pid"].as_u64().unwrap() as u32;
        wait_for_exit(before);
    }
    served.end();
}

/// A front-end in the middle of a message does not delay an upgrade; only that front-end is disconnected.
#[test]
fn partial_message_does_not_delay_an_upgrade() {
    use std::io::Write;
    let (disk, other) = (Disk::new(), Disk::new());
    let mut served = Served::start(&[disk.argument("queues=2"), other.argument("queues=2")]);
    let mut half = std::os::unix::net::UnixStream::connect(&disk.socket).unwrap();
    half.write_all(&[1, 0, 0, 0, 1, 0]).unwrap();
    let mut device = Device::connect(&other.socket, &config()).unwrap();
    served.upgrade(&[]);
    assert!(device.queues[1].read(0, 4096).is_ok());
    assert!(Device::connect(&disk.socket, &config()).is_ok());
    served.end();
}

/// If something else has taken a socket's path, it is left alone, by the next process too, which cannot tell it from a
/// path that the previous process made.
#[test]
fn non_socket_at_a_socket_path_is_left_alone() {
    let disk = Disk::new();
    let mut served = Served::start(&[disk.argument("queues=2,queue-size=64")]);
    let mut device = Device::connect(&disk.socket, &config()).unwrap();
    let upgrade = served.dir.path().join("control.qmp.upgrade");
    fs::remove_file(&disk.socket).unwrap();
    let foreign = std::os::unix::net::UnixListener::bind(&disk.socket).unwrap();
    let pid = Pid::from_raw(served.pid as i32).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    served
        .first
        .wait_for_log(&["ERROR", "no VM can connect", "another socket"]);
    served.upgrade(&[]);
    assert_eq!(device.queues[1].run(Op::Read, 8, 4096), 0);
    fs::remove_file(&upgrade).unwrap();
    fs::create_dir(&upgrade).unwrap();
    let pid = Pid::from_raw(served.pid as i32).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    let said = [
        "ERROR",
        "no command gets to",
        "control.qmp.upgrade",
        "a directory",
    ];
    served.first.wait_for_log(&said);
    kill_process(Pid::from_raw(served.pid as i32).unwrap(), Signal::TERM).unwrap();
    wait_for_exit(served.pid);
    served.pid = served.first.pid();
    assert!(upgrade.is_dir());
    std::os::unix::net::UnixStream::connect(&disk.socket).unwrap();
    drop(foreign);
}

/// The record of how ringdisk was started is removed: an upgrade explains the consequence, and SIGHUP rewrites the
/// record where the sandbox permits it.
#[test]
fn removed_launch_record_can_be_rewritten() {
    let disk = Disk::new();
    let off = "--sandbox=off".to_owned();
    let mut served = Served::start(&[disk.argument("queues=1"), off]);
    let start = served.dir.path().join("control.qmp.start");
    for round in 0..3 {
        let before = fs::read(&start).unwrap();
        fs::remove_file(&start).unwrap();
        let output = served.ringdisk(&["upgrade"]);
        let said = String::from_utf8_lossy(&output.stderr);
        let told = said.contains("control.qmp.start") && said.contains("restart ringdisk");
        assert!(!output.status.success() && told, "{said}");
        let pid = Pid::from_raw(served.pid as i32).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
        wait_for_path(&start);
        while fs::read(&start).unwrap() != before {
            thread::yield_now();
        }
        if round < 2 {
            served.upgrade(&[]);
        }
    }
    served.end();
}

/// The sockets' directory is cleaned up: connected guests continue, and after SIGHUP new connections work again, with
/// the next process too.
#[test]
fn removed_sockets_are_recreated() {
    let disk = Disk::new();
    let mut served = Served::start(&[disk.argument("queues=2,queue-size=64")]);
    let mut random = Random(seed());
    let device = Device::connect(&disk.socket, &config()).unwrap();
    let loads = Load::all(&device, 512, BlockContent::Pattern, false);
    let mut devices = vec![(device, loads)];
    let upgrade = served.dir.path().join("control.qmp.upgrade");
    let name = disk.file.file_stem().unwrap().to_str().unwrap().to_owned();
    let control = served.control.clone();
    under_load(&mut devices, &mut random, || {
        for round in 0..3 {
            let sockets = [&disk.socket, &control, &upgrade];
            for socket in sockets {
                fs::remove_file(socket).unwrap();
            }
            let pid = Pid::from_raw(served.pid as i32).unwrap();
            kill_process(pid, Signal::HUP).unwrap();
            sockets.into_iter().for_each(|socket| wait_for_path(socket));
            assert_eq!(served.disk(&name)["connected"], true);
            if round == 1 {
                served.upgrade(&[]);
            }
        }
    });
    let (device, loads) = &mut devices[0];
    Load::finish(loads, device);
    devices.clear();
    let mut device = Device::connect(&disk.socket, &config()).unwrap();
    assert_eq!(device.queues[0].run(Op::Read, 8, 4096), 0);
    let sockets = [disk.socket.clone(), control, upgrade];
    served.end();
    sockets
        .iter()
        .for_each(|socket| assert!(!socket.exists(), "{socket:?}"));
}

/// A front-end is in the middle of a message when its socket is made again: it is not cut off.
#[test]
fn socket_is_recreated_in_the_middle_of_a_message() {
    let disk = Disk::new();
    let served = Served::start(&[disk.argument("queues=2,name=disk")]);
    let mut front_end = UnixStream::connect(&disk.socket).unwrap();
    front_end.set_read_timeout(Some(HANG)).unwrap();
    // VHOST_USER_GET_FEATURES, version 1, without a payload.
    let words = [1u32, 1, 0].map(u32::to_ne_bytes);
    let (first, rest) = words.as_flattened().split_at(7);
    front_end.write_all(first).unwrap();
    support::wait_until("the front-end", || served.disk("disk")["connected"] == true);
    fs::remove_file(&disk.socket).unwrap();
    let pid = Pid::from_raw(served.pid as i32).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    wait_for_path(&disk.socket);
    let mut reply = [0; 20];
    front_end.write_all(rest).unwrap();
    front_end.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..4], words[0]);
    drop(front_end);
    assert!(Device::connect(&disk.socket, &config()).is_ok());
    served.end();
}
