//! Exports are added, limited, removed and handed over.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;
use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::server::{Server, wait_for_exit};

use super::raw::Client;
use super::{BINARY, Served, have, run, text};
use crate::support::Disk;

#[test]
fn exports_are_added_and_removed() {
    let served = Served::start(Disk::new(), "");
    let reply = served.done(&["export", "vm"]);
    assert_eq!(reply["uri"], served.uri("vm"));
    served.refused(&["export", "vm"], "an NBD export named 'vm' already");
    served.refused(&["export", "none"], "there is no disk 'none'");
    served.done(&["export", "vm", "--name", "b", "--bps", "1M", "--writable"]);
    let client = Client::connect(&served.nbd(), "b");
    let list = served.done(&["export"]);
    assert_eq!(list[0]["name"], "b");
    assert_eq!(list[0]["clients"], 1);
    assert_eq!(list[0]["limits"], json!({ "bps": 1 << 20 }));
    assert_eq!(list[1]["clients"], 0);
    served.refused(
        &["export", "vm", "--name", "b", "--remove"],
        "clients are connected",
    );
    served.refused(&["detach", "vm"], "(ringdisk export b --remove)");
    served.done(&["export", "vm", "--name", "b", "--remove", "--force"]);
    client.expect_end();
    // The disk goes, and its exports with it.
    let client = Client::connect(&served.nbd(), "vm");
    served.done(&["detach", "vm", "--force"]);
    client.expect_end();
    assert_eq!(served.done(&["export"]), json!([]));
}

/// The server is stopped with clients, and ringdisk as well.
#[test]
fn clients_do_not_keep_ringdisk_from_stopping() {
    let mut served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let idle = Client::connect(&served.nbd(), "vm");
    let mut busy = Client::connect(&served.nbd(), "vm");
    // It never reads the replies.
    for cookie in 0..200 {
        busy.try_read(cookie, 0, 1 << 20);
    }
    assert!(served.server.terminate().unwrap().success());
    idle.expect_end();
    assert!(!served.nbd().exists());
}

/// A client of `export` whose connection takes a second to end: it reads no replies.
fn slow_client(served: &Served, export: &str) -> Client {
    let mut client = Client::connect(&served.nbd(), export);
    for cookie in 0..200 {
        client.try_read(cookie, 0, 1 << 20);
    }
    client
}

/// The names of the exports.
fn exports(served: &Served) -> Vec<String> {
    let list = served.done(&["export"]);
    let list = list.as_array().unwrap().iter();
    list.map(|export| export["name"].as_str().unwrap().to_owned())
        .collect()
}

/// While clients of an export are disconnected, there may be a new one with its name, whose clients stay.
#[test]
fn clients_of_a_new_export_are_not_those_of_the_old_one() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let old = slow_client(&served, "vm");
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| served.done(&["export", "vm", "--remove", "--force"]));
        while !exports(&served).is_empty() {}
        served.done(&["export", "vm"]);
        let mut new = Client::connect(&served.nbd(), "vm");
        new.read(1, 0, 4096);
        removal.join().unwrap();
        new.read(2, 0, 4096);
    });
    drop(old);
    assert_eq!(exports(&served), ["vm"]);
}

/// An export that two commands remove at the same time has one event.
#[test]
fn the_end_of_an_export_is_told_once() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm", "--name", "a"]);
    served.done(&["export", "vm", "--name", "b"]);
    let _slow = slow_client(&served, "a");
    let mut qmp = control::Client::connect(served.path("control.qmp"), HANG).unwrap();
    std::thread::scope(|scope| {
        let stop = || {
            let socket = served.path("control.qmp");
            let mut qmp = control::Client::connect(socket, HANG).unwrap();
            qmp.call("nbd-server-stop", json!({})).unwrap();
        };
        let stop = scope.spawn(stop);
        while exports(&served) != ["b"] {}
        served.done(&["export", "vm", "--name", "b", "--remove"]);
        stop.join().unwrap();
    });
    let mut ended = Vec::new();
    while let Some(event) = qmp.event(Duration::from_millis(100)).unwrap() {
        if event["event"] == "BLOCK_EXPORT_DELETED" {
            ended.push(event["data"]["id"].as_str().unwrap().to_owned());
        }
    }
    ended.sort();
    assert_eq!(ended, ["nbd-a", "nbd-b"]);
}

/// What belongs to clients goes with them, even if no other client comes.
#[test]
fn clients_that_have_left_leave_no_descriptors() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    let pid = served.server.pid();
    let count = || {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        descriptors.count()
    };
    drop(Client::connect(&served.nbd(), "vm"));
    while served.done(&["export"])[0]["clients"] != 0 {}
    let before = count();
    let clients: Vec<_> = (0..20)
        .map(|_| Client::connect(&served.nbd(), "vm"))
        .collect();
    assert!(count() > before + 20);
    drop(clients);
    let began = Instant::now();
    while count() > before {
        assert!(began.elapsed() < HANG, "{} instead of {before}", count());
    }
}

/// A request that takes long is not finished first: 256 MiB are read ahead, an eighth of a second for each piece.
#[test]
fn long_requests_do_not_delay_the_end_of_a_connection() {
    let disk = Disk::new();
    let file = fs::File::options().write(true).open(&disk.file).unwrap();
    file.set_len(256 << 20).unwrap();
    let served = Served::start(disk, "");
    served.done(&["export", "vm", "--bps", "8M"]);
    let mut client = Client::connect(&served.nbd(), "vm");
    client.send(&Client::header(5, 1, 0, 256 << 20));
    // The request has been started when this one is answered.
    client.send(&Client::header(9, 2, 0, 0));
    assert_eq!(client.reply(), (22, 2));
    served.done(&["export", "vm", "--remove", "--force"]);
    // NBD_ESHUTDOWN
    assert_eq!(client.reply(), (108, 1));
    client.expect_end();
}

/// What QEMU's server can do and this one cannot is refused, not ignored.
#[test]
fn what_does_not_exist_is_refused() {
    let served = Served::start(Disk::new(), "");
    let mut qmp = control::Client::connect(served.path("control.qmp"), HANG).unwrap();
    let unix = json!({ "type": "unix", "data": { "path": served.path("other.sock") } });
    let export = json!({ "type": "nbd", "id": "e", "node-name": "vm" });
    for (command, mut arguments, key, value) in [
        (
            "nbd-server-start",
            json!({ "addr": unix }),
            "max-connections",
            json!(1),
        ),
        (
            "block-export-add",
            export.clone(),
            "allocation-depth",
            json!(true),
        ),
        ("block-export-add", export, "writethrough", json!(true)),
    ] {
        arguments[key] = value;
        let error = qmp.call(command, arguments).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}

/// The limits of an export are those of its clients, and not of the guest.
#[test]
fn limits_apply_to_clients_only() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm", "--bps", "4M"]);
    let mut client = Client::connect(&served.nbd(), "vm");
    let began = Instant::now();
    for i in 0..8 {
        client.read(i, i << 20, 1 << 20);
    }
    assert!(
        began.elapsed() > Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    let throttled = began.elapsed();
    let mut device = Device::connect(&served.disk.socket, &DeviceConfig::default()).unwrap();
    let began = Instant::now();
    for i in 0..64 {
        device.queues[0].read(i * 128, 4096).unwrap();
    }
    assert!(began.elapsed() < throttled);
}

/// Another process takes over: exports and their socket stay, and clients connect again.
#[test]
fn exports_are_handed_over() {
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm", "--writable", "--iops", "5000"]);
    served.done(&["export", "vm", "--name", "second"]);
    let before = served.done(&["export"]);
    let old = Client::connect(&served.nbd(), "vm");
    let pid = served.server.pid();
    // Whoever asks meanwhile gets no answer, or a complete one, from either process.
    let (control, nbd) = (served.path("control.qmp"), served.nbd());
    std::thread::scope(|threads| {
        let upgrade = threads.spawn(move || {
            run(BINARY, &["upgrade", "--control", text(&control)]);
            wait_for_exit(pid);
        });
        while !upgrade.is_finished() {
            if let Some(names) = Client::list(&nbd) {
                assert_eq!(names, ["second", "vm"]);
            }
        }
        upgrade.join().unwrap();
    });
    old.expect_end();
    let mut after = served.done(&["export"]);
    for export in after.as_array_mut().unwrap() {
        export["clients"] = json!(0);
    }
    let mut before = before;
    before
        .as_array_mut()
        .unwrap()
        .iter_mut()
        .for_each(|e| e["clients"] = json!(0));
    assert_eq!(after, before);
    let mut client = Client::connect(&served.nbd(), "vm");
    assert_eq!(client.write(1, 0, &[3; 4096]), 0);
    assert_eq!(client.read(2, 0, 4096), vec![3; 4096]);
    served.done(&["export", "vm", "--remove", "--force"]);
    stop_successor(&served);
}

/// Ends the process that serves now, which is not a child of this one.
pub fn stop_successor(served: &Served) {
    use std::io::{BufRead, BufReader, Write};
    let socket = std::os::unix::net::UnixStream::connect(served.path("control.qmp")).unwrap();
    let mut lines = BufReader::new(&socket).lines();
    lines.next();
    for command in ["qmp_capabilities", "quit"] {
        writeln!(&socket, "{{\"execute\":\"{command}\"}}").unwrap();
        lines.next();
    }
}

#[test]
fn configuration_names_exports() {
    let disk = Disk::new();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let config = dir.path().join("ringdisk.toml");
    let start = |exports: &str| {
        let configuration = format!(
            "nbd = \"127.0.0.1:0\"\n[[disk]]\nname = \"vm\"\nfile = \"{}\"\nsocket = \"{}\"\n{exports}",
            disk.file.display(),
            disk.socket.display()
        );
        fs::write(&config, configuration).unwrap();
        let control = dir.path().join("control.qmp");
        let mut command = Command::new(BINARY);
        command.args(["serve", "--json", "--config"]).arg(&config);
        command.arg("--control").arg(&control);
        (Server::ringdisk_command(command), control)
    };
    let export = "[[export]]\ndisk = \"vm\"\nname = \"backup\"\nbps = \"10M\"\n";
    let (server, control) = start(export);
    let list = run(BINARY, &["export", "--json", "--control", text(&control)]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list[0]["name"], "backup");
    assert_eq!(list[0]["limits"], json!({ "bps": 10 << 20 }));
    if have(&["nbdinfo"], "configuration_names_exports") {
        let size = run("nbdinfo", &["--size", list[0]["uri"].as_str().unwrap()]);
        assert_eq!(size.trim(), (16 << 20).to_string());
    }
    drop(server);
    for (mistake, words) in [
        ("[[export]]\ndisk = \"other\"\n", "no [[disk]] with name"),
        ("[[export]]\nname = \"x\"\n", "needs a disk"),
        ("[[export]]\ndisk = \"vm\"\nspeed = 1\n", "no key 'speed'"),
    ] {
        let error = start(mistake).0.err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
}
