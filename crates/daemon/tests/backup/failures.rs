//! Backups that fail: the guest goes on, and the next backup has everything.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::driver::HANG;
use testkit::server::wait_for_exit;

use super::{BINARY, BLOCK, DISK_BYTES, Served, numbers, write};
use crate::support::small_fs::FreezableFs;

pub fn bits(served: &Served, disk: &str, bitmap: &str) -> u64 {
    let listed = served.done(&["bitmap", "list", disk]);
    let bitmaps = listed[disk].as_array().unwrap();
    let found = bitmaps.iter().find(|b| b["name"] == bitmap);
    found.unwrap_or_else(|| panic!("{listed}"))["count"]
        .as_u64()
        .unwrap()
}

/// Without a directory, old data must fit into memory.
#[test]
fn a_full_fleece_ends_the_backup_only() {
    let Some(served) = Served::start("a_full_fleece_ends_the_backup_only", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    served.done(&["bitmap", "add", "a", "kept", "--persistent"]);
    for block in 0..2048 {
        write(&mut device, 0, block, 1);
    }
    let before = bits(&served, "a", "kept");
    served.done(&["backup", "begin", "a", "--bitmap=kept", "--memory=4M"]);
    for block in 0..2048 {
        write(&mut device, 0, block, 2);
    }
    let listed = served.done(&["backup", "list"]);
    let error = listed[0]["error"].as_str().unwrap();
    assert!(error.contains("memory is full"), "{error}");
    let uri = served.uri("a-backup");
    let copied = Command::new("nbdcopy")
        .args([&uri, "null:"])
        .output()
        .unwrap();
    assert!(!copied.status.success());
    served.refused(&["backup", "end"], "has failed");
    assert_eq!(bits(&served, "a", "kept"), before);
    assert_eq!(served.done(&["backup", "list"]), json!([]));
    // The next one works.
    served.done(&["backup", "begin", "a", "--bitmap=kept"]);
    let content = numbers(&served.copy("a-backup"));
    assert!(content[..2048].iter().all(|&number| number == 2));
    served.done(&["backup", "end"]);
    assert_eq!(bits(&served, "a", "kept"), 0);
}

/// Old data beyond the memory goes to a file.
#[test]
fn a_directory_takes_old_data() {
    let Some(served) = Served::start("a_directory_takes_old_data", &["--fleece=fleece"]) else {
        return;
    };
    let mut devices = ["a", "b"].map(|name| served.connect(name));
    for device in &mut devices {
        for block in 0..4096 {
            write(device, 0, block, block + 1);
        }
    }
    served.done(&["backup", "begin", "a", "b", "--memory=4M"]);
    for device in &mut devices {
        for block in 0..4096 {
            write(device, 0, block, 9_999_999);
        }
    }
    let listed = served.done(&["backup", "list"]);
    assert!(listed[0]["file"].as_u64().unwrap() >= 16 << 20, "{listed}");
    for export in ["a-backup", "b-backup"] {
        let content = numbers(&served.copy(export));
        assert!((0..4096).all(|block| content[block] == block as u64 + 1));
    }
    served.done(&["backup", "end"]);
}

/// A directory for old data that does not answer refuses a backup. Nothing else waits for it.
#[test]
fn a_frozen_fleece_directory_refuses_backups() {
    let test = "a_frozen_fleece_directory_refuses_backups";
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(fleece) = FreezableFs::mount(&dir.path().join("fleece")) else {
        return;
    };
    let option = format!("--fleece={}", fleece.0.display());
    let Some(served) = Served::start(test, &[&option]) else {
        return;
    };
    fleece.freeze(true);
    let begin = ["backup", "begin", "a"];
    served.refused(&begin, "no file for old data can be created there");
    write(&mut served.connect("a"), 0, 0, 1);
    assert_eq!(served.done(&["backup", "list"]), json!([]));
    fleece.freeze(false);
    served.done(&begin);
    served.done(&["backup", "end"]);
}

#[test]
fn disks_with_backups_are_not_moved_or_detached() {
    let Some(served) = Served::start("disks_with_backups_are_not_moved_or_detached", &[]) else {
        return;
    };
    served.done(&["backup", "begin", "a", "--bitmap=x"]);
    served.refused(
        &["backup", "begin", "a", "--id=other"],
        "has an open backup",
    );
    served.refused(&["backup", "begin", "a", "b"], "there is a backup");
    served.refused(&["backup", "begin", "c", "--id=other"], "no disk 'c'");
    served.refused(
        &["backup", "begin", "a", "a", "--id=other"],
        "has an open backup",
    );
    served.refused(
        &["backup", "begin", "b", "b", "--id=other"],
        "disk 'b' is named twice",
    );
    served.refused(&["backup", "end", "--id=other"], "no backup 'other'");
    served.refused(&["detach", "a"], "ringdisk backup end --id=backup");
    let to = served.path("c.raw");
    std::fs::File::create(&to)
        .unwrap()
        .set_len(DISK_BYTES)
        .unwrap();
    served.refused(
        &["replace", "a", to.to_str().unwrap()],
        "has an open backup",
    );
    served.refused(&["bitmap", "remove", "a", "backup-backup-x"], "is open");
    served.done(&["detach", "a", "--force"]);
    assert_eq!(served.done(&["backup", "list"]), json!([]));
}

/// A reload that would end or restart a disk of an open backup changes nothing.
#[test]
fn disks_with_backups_are_not_restarted_by_a_reload() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name);
    let config = |disks: &[(&str, &str)]| {
        let place = dir.path().display();
        let mut text = format!("nbd = '{place}/nbd.sock'\ncontrol = '{place}/control.qmp'\n");
        for (name, keys) in disks {
            text += &format!(
                "[[disk]]\nname = '{name}'\nfile = '{place}/{name}.raw'\nsocket = '{place}/{name}.sock'\n{keys}\n"
            );
        }
        std::fs::write(path("ringdisk.toml"), text).unwrap();
    };
    for file in ["a.raw", "b.raw"] {
        let file = std::fs::File::create(path(file)).unwrap();
        file.set_len(DISK_BYTES).unwrap();
    }
    config(&[("a", ""), ("b", "")]);
    let mut command = Command::new(BINARY);
    command.args(["serve", "--json", "--config"]);
    command.arg(path("ringdisk.toml"));
    let _server = testkit::server::Server::ringdisk_command(command).unwrap();
    let ringdisk = |arguments: &[&str]| {
        let mut command = Command::new(BINARY);
        command.args(arguments).arg("--control");
        let output = command.arg(path("control.qmp")).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code().unwrap(), error)
    };
    assert_eq!(ringdisk(&["backup", "begin", "a", "b", "--bitmap=n"]).0, 0);
    for disks in [&[("a", "")][..], &[("a", ""), ("b", "serial = 'x'")]] {
        config(disks);
        let (code, error) = ringdisk(&["reload"]);
        assert_eq!(code, 1, "{error}");
        let words = "disk 'b' has an open backup, 'backup'; to end it: ringdisk backup end --id=backup; nothing has been changed";
        assert!(error.contains(words), "{error}");
    }
    // Limits disturb nobody.
    config(&[("a", ""), ("b", "iops = 1000")]);
    assert_eq!(ringdisk(&["reload"]).0, 0);
    assert_eq!(ringdisk(&["backup", "end"]).0, 0);
    config(&[("a", "")]);
    assert_eq!(ringdisk(&["reload"]).0, 0);
}

/// The bitmap of a killed process has all changes since the last backup that succeeded.
#[test]
fn a_kill_loses_no_changes() {
    let Some(mut served) = Served::start("a_kill_loses_no_changes", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    served.done(&["backup", "begin", "a", "--bitmap=n"]);
    served.done(&["backup", "end"]);
    write(&mut device, 0, 100, 1);
    served.done(&["backup", "begin", "a", "--bitmap=n"]);
    write(&mut device, 0, 200, 1);
    let pid = served.server.pid();
    served.server.signal(Signal::KILL);
    wait_for_exit(pid);
    drop(device);
    served.restart();
    assert_eq!(served.done(&["backup", "list"]), json!([]));
    assert_eq!(bits(&served, "a", "n"), 2 * 65536);
}

/// A backup depends on the memory of the process.
#[test]
fn an_upgrade_ends_backups() {
    let Some(served) = Served::start("an_upgrade_ends_backups", &[]) else {
        return;
    };
    let mut device = served.connect("a");
    served.done(&["bitmap", "add", "a", "n", "--persistent"]);
    write(&mut device, 0, 100, 1);
    served.done(&["backup", "begin", "a", "--bitmap=n"]);
    write(&mut device, 0, 200, 1);
    let output = served.ringdisk(&["upgrade"]);
    assert!(output.status.success(), "{output:?}");
    let line = "backup 'backup' has failed: ringdisk is upgraded";
    served.server.wait_for_log(&[line]);
    assert_eq!(served.done(&["backup", "list"]), json!([]));
    assert_eq!(served.done(&["export"]), json!([]));
    write(&mut device, 0, 300, 1);
    assert_eq!(bits(&served, "a", "n"), 3 * 65536);
    served.done(&["backup", "begin", "a", "--bitmap=n"]);
    served.done(&["backup", "end"]);
    assert_eq!(bits(&served, "a", "n"), 0);
    // The new process is not a child of this one.
    let mut new = control::Client::connect(served.path("control.qmp"), HANG).unwrap();
    new.call("quit", json!({})).unwrap();
}

/// The guest's file systems are frozen at the moment, and thaw whatever happens.
#[test]
fn guest_agents_freeze_and_thaw() {
    let Some(served) = Served::start("guest_agents_freeze_and_thaw", &[]) else {
        return;
    };
    let path = served.path("agent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let agent = thread::spawn(move || {
        let mut all = Vec::new();
        for _ in 0..2 {
            let (socket, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(socket.try_clone().unwrap()).lines();
            let mut socket = socket;
            // Left behind by an earlier client.
            writeln!(socket, "{}", json!({ "return": 1 })).unwrap();
            while let Some(Ok(line)) = lines.next() {
                let command: Value = serde_json::from_str(&line).unwrap();
                let name = command["execute"].as_str().unwrap().to_owned();
                let reply = match &*name {
                    "guest-sync" => command["arguments"]["id"].clone(),
                    _ => json!(2),
                };
                all.push(name);
                writeln!(socket, "{}", json!({ "return": reply })).unwrap();
            }
        }
        all
    });
    let option = format!("--guest-agent={}", path.display());
    served.done(&["backup", "begin", "a", &option]);
    served.refused(
        &["backup", "begin", "a", "--id=x", &option],
        "has an open backup",
    );
    let names = agent.join().unwrap();
    let each = ["guest-sync", "guest-fsfreeze-freeze", "guest-fsfreeze-thaw"];
    assert_eq!(names, [each, each].concat());
    served.refused(
        &["backup", "begin", "b", "--id=x", "--guest-agent=/nowhere"],
        "guest agent /nowhere",
    );
    assert_eq!(
        served.done(&["backup", "list"]).as_array().unwrap().len(),
        1
    );
    assert_eq!(BLOCK, 4096);
}

/// What an agent answers to a command.
pub(super) type Answer = fn(&Value) -> Option<String>;

/// An agent, and what it answers to commands. Returns the names of what it got, each before it answers.
pub(super) fn fake_agent(
    path: &Path,
    answer: Answer,
    got: SyncSender<String>,
) -> thread::JoinHandle<()> {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(socket.try_clone().unwrap()).lines();
        while let Some(Ok(line)) = lines.next() {
            let command: Value = serde_json::from_str(&line).unwrap();
            got.send(command["execute"].as_str().unwrap().to_owned())
                .unwrap();
            if let Some(answer) = answer(&command) {
                // The other end may have gone.
                let _ = writeln!(socket, "{answer}");
            }
        }
    })
}

pub(super) fn answer(command: &Value) -> Option<String> {
    let reply = match command["execute"].as_str() {
        Some("guest-sync") => command["arguments"]["id"].clone(),
        _ => json!(2),
    };
    Some(json!({ "return": reply }).to_string())
}

/// As [`answer`], but for a command.
pub(super) fn answer_without(name: &str, command: &Value) -> Option<String> {
    answer(command).filter(|_| command["execute"] != name)
}

fn begin(served: &Served, agents: &[PathBuf]) -> Child {
    begin_at(&served.path("control.qmp"), agents)
}

pub(super) fn begin_at(control: &Path, agents: &[PathBuf]) -> Child {
    let mut command = Command::new(BINARY);
    command.args(["backup", "begin", "a", "--control"]);
    command.arg(control);
    for path in agents {
        command.arg("--guest-agent").arg(path);
    }
    command.stderr(Stdio::piped()).spawn().unwrap()
}

/// No guest is frozen before all agents have answered; a signal during the freeze thaws all of them.
#[test]
fn guests_do_not_stay_frozen() {
    let Some(served) = Served::start("guests_do_not_stay_frozen", &[]) else {
        return;
    };
    let no_sync = |command: &_| answer_without("guest-sync", command);
    let no_freeze = |command: &_| answer_without("guest-fsfreeze-freeze", command);
    let rounds: [(&str, Answer, _); 4] = [
        ("guest-sync", no_sync, Some(Signal::INT)),
        ("guest-fsfreeze-freeze", no_freeze, Some(Signal::INT)),
        ("guest-fsfreeze-freeze", no_freeze, Some(Signal::HUP)),
        // What is no answer does not freeze a guest.
        (
            "guest-fsfreeze-freeze",
            |command| match command["execute"].as_str() {
                Some("guest-fsfreeze-freeze") => Some("{{".into()),
                _ => answer(command),
            },
            None,
        ),
    ];
    for (round, (last, bad_answer, signal)) in rounds.into_iter().enumerate() {
        let paths = ["good", "bad"].map(|name| served.path(&format!("{name}{round}.sock")));
        let (good, good_got) = sync_channel(16);
        let (bad, bad_got) = sync_channel(16);
        let agents = [
            fake_agent(&paths[0], answer, good),
            fake_agent(&paths[1], bad_answer, bad),
        ];
        let child = begin(&served, &paths);
        while bad_got.recv_timeout(HANG).unwrap() != last {}
        if let Some(signal) = signal {
            kill_process(Pid::from_child(&child), signal).unwrap();
        }
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        agents.into_iter().for_each(|agent| agent.join().unwrap());
        let good: Vec<_> = good_got.iter().collect();
        match round {
            0 => assert_eq!(good, ["guest-sync"]),
            _ => {
                assert_eq!(good.last().unwrap(), "guest-fsfreeze-thaw");
                assert_eq!(bad_got.iter().last().unwrap(), "guest-fsfreeze-thaw");
            }
        }
        assert_eq!(served.done(&["backup", "list"]), json!([]));
    }
}

/// Nor while the server does not answer, nor where the agent has too many clients.
#[test]
fn guests_do_not_wait_for_the_server() {
    let Some(served) = Served::start("guests_do_not_wait_for_the_server", &[]) else {
        return;
    };
    let path = served.path("agent.sock");
    let (sender, got) = sync_channel(0);
    let agent = fake_agent(&path, answer, sender);
    let child = begin(&served, std::slice::from_ref(&path));
    assert_eq!(got.recv_timeout(HANG).unwrap(), "guest-sync");
    served.server.signal(Signal::STOP);
    assert_eq!(got.recv_timeout(HANG).unwrap(), "guest-fsfreeze-freeze");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(got.recv_timeout(HANG).unwrap(), "guest-fsfreeze-thaw");
    served.server.signal(Signal::CONT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    agent.join().unwrap();
    assert_eq!(served.done(&["backup", "list"]), json!([]));

    let path = served.path("full.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let mut waiting = Vec::new();
    loop {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        match connect(&socket, &SocketAddrUnix::new(&path).unwrap()) {
            Ok(()) => waiting.push(socket),
            Err(e) => break assert_eq!(e, Errno::AGAIN),
        }
    }
    let child = begin(&served, &[path]);
    thread::sleep(Duration::from_millis(500));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}
