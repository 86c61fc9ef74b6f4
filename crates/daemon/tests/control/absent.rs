//! Disks of the configuration that cannot be served: the others are, and these are tried again.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::driver::{Device, DeviceConfig};
use testkit::server::Server;
use testkit::storage::Storage;

use super::server::Controlled;
use crate::support::{content, wait_until};

const BYTES: usize = 4 << 20;

fn disk(dir: &Path, name: &str, file: &Path) -> String {
    let socket = dir.join(format!("{name}.sock"));
    let is_image = file.extension().is_some_and(|it| it == "qcow2");
    let format = if is_image { "qcow2" } else { "raw" };
    let (file, socket) = (file.display(), socket.display());
    format!(
        "[[disk]]\nname = \"{name}\"\nfile = \"{file}\"\nsocket = \"{socket}\"\nqueues = 1\nformat = \"{format}\"\n"
    )
}

/// Serves `good`, and `bad` in front of it, with more arguments.
fn start(dir: tempfile::TempDir, bad: &Path, more: &[String]) -> Controlled {
    let at = dir.path();
    let good = at.join("good.raw");
    fs::write(&good, content(0, BYTES)).unwrap();
    let nbd = format!("nbd = \"{}\"\n", at.join("nbd.sock").display());
    let export = "[[export]]\ndisk = \"bad\"\n";
    let text = nbd + &disk(at, "bad", bad) + &disk(at, "good", &good) + export;
    fs::write(at.join("r.toml"), text).unwrap();
    let arguments = [
        format!("--config={}", at.join("r.toml").display()),
        format!("--state={}", at.join("state").display()),
    ];
    Controlled::start_in(dir, &[&arguments[..], more].concat())
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn assert_works(ringdisk: &Controlled, disk: &str) {
    let socket = ringdisk.path(&format!("{disk}.sock"));
    let mut device = Device::connect(socket, &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].read(8, 512).unwrap(), content(8, 512));
}

fn problem(ringdisk: &Controlled) -> String {
    let bad = ringdisk.disk("bad");
    assert_eq!(bad["storage"], "absent", "{bad}");
    bad["problem"].as_str().unwrap().to_owned()
}

#[test]
fn missing_disk_does_not_stop_the_others_and_is_served_when_it_is_there() {
    let dir = directory();
    let bad = dir.path().join("bad.raw");
    let ringdisk = start(dir, &bad, &["--metrics=127.0.0.1:0".into()]);
    assert_works(&ringdisk, "good");
    assert!(problem(&ringdisk).contains("no such file"));
    let list = ringdisk.ringdisk(&["list"]);
    assert!(
        list.out.contains("disk bad is not served, and tried again"),
        "{list:?}"
    );
    // The state does not say that it was detached: the next start tries it as well.
    let ringdisk = ringdisk.kill_and_restart();
    assert!(problem(&ringdisk).contains("no such file"));
    let throttled = ringdisk.ringdisk(&["throttle", "bad", "iops=5"]);
    throttled.assert_fails(1, &["'bad' is not served at present", "no such file"]);
    for command in [
        &["stats", "bad"][..],
        &["resize", "bad", "+1M"],
        &["bitmap", "list", "bad"],
        &["bitmap", "add", "bad", "b"],
        &["bitmap", "remove", "bad", "b"],
        &["bitmap", "merge", "bad", "b", "--from", "c"],
    ] {
        let refused = ringdisk.ringdisk(command);
        refused.assert_fails(1, &["'bad' is not served at present", "no such file"]);
    }
    // Its export is there, and can be removed.
    let exports = ringdisk.json(&["export"]);
    assert_eq!(exports[0]["waiting"], true, "{exports}");
    let listed = ringdisk.ringdisk(&["export"]);
    assert!(listed.out.contains("waits for its disk"), "{listed:?}");

    fs::write(&bad, content(0, BYTES)).unwrap();
    wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
    assert_works(&ringdisk, "bad");
    let exports = ringdisk.json(&["export"]);
    assert_eq!(exports[0]["disk"], "bad", "{exports}");
    assert_works(&ringdisk, "good");
}

/// A reload of a changed configuration, a detach, and a removal apply to it as to others.
#[test]
fn commands_apply_to_absent_disks() {
    let dir = directory();
    let (bad, other) = (dir.path().join("bad.raw"), dir.path().join("other.raw"));
    let ringdisk = start(dir, &bad, &[]);
    fs::write(&other, content(0, BYTES)).unwrap();
    let file = ringdisk.path("r.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("bad.raw", "other.raw")).unwrap();
    ringdisk.json(&["reload"]);
    wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
    assert_works(&ringdisk, "bad");

    fs::write(&file, &text).unwrap();
    fs::rename(&other, &bad).unwrap();
    let ringdisk = ringdisk.kill_and_restart();
    assert_works(&ringdisk, "bad");
    fs::remove_file(&bad).unwrap();
    let ringdisk = ringdisk.kill_and_restart();
    problem(&ringdisk);
    ringdisk.json(&["detach", "bad"]);
    assert_eq!(ringdisk.disk("bad"), Value::Null);
    let ringdisk = ringdisk.kill_and_restart();
    assert_eq!(ringdisk.disk("bad"), Value::Null, "it was detached");
}

/// The service manager shows which disks are not served, until they are.
#[test]
fn service_manager_is_told() {
    let dir = directory();
    let (bad, manager) = (dir.path().join("bad.raw"), dir.path().join("notify"));
    let notified = UnixDatagram::bind(&manager).unwrap();
    notified
        .set_read_timeout(Some(testkit::driver::HANG))
        .unwrap();
    let next = || {
        let mut text = vec![0; 4096];
        let n = notified.recv(&mut text).unwrap();
        String::from_utf8(text[..n].to_vec()).unwrap()
    };
    let wait_for = |what: &str| while !next().contains(what) {};
    let file = dir.path().join("r.toml");
    fs::write(&file, disk(dir.path(), "bad", &bad)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command.args(["serve", "--json", "--config"]).arg(&file);
    command.arg("--control").arg(dir.path().join("c.qmp"));
    let _server = Server::ringdisk_command({
        command.env("NOTIFY_SOCKET", &manager);
        command
    })
    .unwrap();
    wait_for("READY=1");
    wait_for("STATUS=degraded: 1 disks are not served, and tried again: bad");
    fs::write(&bad, content(0, BYTES)).unwrap();
    wait_for("STATUS=all disks are served");
}

/// A disk of the command line that cannot be served is an error, and so is a mistake in the configuration.
#[test]
fn command_line_and_mistakes_are_errors() {
    let dir = directory();
    let missing = dir.path().join("missing.raw");
    let good = dir.path().join("good.raw");
    fs::write(&good, content(0, BYTES)).unwrap();
    let file = dir.path().join("r.toml");
    let serve = |text: &str, argument: &str| {
        fs::write(&file, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command
            .arg("serve")
            .arg("--config")
            .arg(&file)
            .arg(argument);
        command.arg("--control").arg(dir.path().join("c.qmp"));
        let ended = command.stdin(Stdio::null()).output().unwrap();
        (
            ended.status.code(),
            String::from_utf8(ended.stderr).unwrap(),
        )
    };
    let argument = format!(
        "{},socket={}/m.sock",
        missing.display(),
        dir.path().display()
    );
    let (code, why) = serve(&disk(dir.path(), "good", &good), &argument);
    assert!(code == Some(1) && why.contains("no such file"), "{why}");
    let (code, why) = serve(
        &(disk(dir.path(), "bad", &missing) + "cach = 1\n"),
        "--explain",
    );
    assert!(code == Some(2) && why.contains("line 7"), "{why}");
}

/// The process that an upgrade starts tries the disk again, in a sandbox that knows it.
#[test]
fn upgrade_serves_a_disk_that_the_sandbox_did_not_know() {
    let (dir, elsewhere) = (directory(), directory());
    let bad = elsewhere.path().join("mounted/later/bad.raw");
    let ringdisk = start(dir, &bad, &[]);
    assert!(problem(&ringdisk).contains("no such file"));
    fs::create_dir_all(bad.parent().unwrap()).unwrap();
    fs::write(&bad, content(0, BYTES)).unwrap();
    let mut guest = Device::connect(ringdisk.path("good.sock"), &DeviceConfig::default()).unwrap();
    let before = ringdisk.server.pid();
    let has_landlock = || problem(&ringdisk).contains("reload --upgrade");
    wait_until("the sandbox's refusal", || {
        ringdisk.disk("bad")["storage"] == "works" || has_landlock()
    });
    if ringdisk.disk("bad")["storage"] == "works" {
        return println!("skipped: this kernel does not restrict files");
    }
    let upgraded = ringdisk.json(&["reload", "--upgrade"]);
    let now = upgraded["pid"].as_u64().unwrap() as u32;
    wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
    assert_works(&ringdisk, "bad");
    assert_eq!(guest.queues[0].read(8, 512).unwrap(), content(8, 512));
    assert_ne!(now, before);
    kill_process(Pid::from_raw(now as i32).unwrap(), Signal::TERM).unwrap();
}

/// The directory of an attached disk was not there at the start, so that the sandbox does not know it.
#[test]
fn upgrade_serves_an_attached_disk_whose_directory_has_come_back() {
    let (dir, elsewhere) = (directory(), directory());
    let [mounted, away] = ["mounted", "away"].map(|name| elsewhere.path().join(name));
    fs::create_dir(&mounted).unwrap();
    let file = mounted.join("bad.raw");
    fs::write(&file, content(0, BYTES)).unwrap();
    let config = |allowed: &str| {
        let good = dir.path().join("good.raw");
        let text = format!("{allowed}{}", disk(dir.path(), "good", &good));
        fs::write(&good, content(0, BYTES)).unwrap();
        fs::write(dir.path().join("r.toml"), text).unwrap();
    };
    config("allow-dir = [\"/\"]\n");
    let arguments = ["config", "state"].map(|key| {
        let name = if key == "state" { "state" } else { "r.toml" };
        format!("--{key}={}", dir.path().join(name).display())
    });
    let process = Controlled::start_in(directory(), &arguments);
    let socket = dir.path().join("bad.sock");
    let attach = format!("{},name=bad,socket={}", file.display(), socket.display());
    process.json(&["attach", &attach]);
    fs::rename(&mounted, &away).unwrap();
    config("");
    let ringdisk = process.kill_and_restart();
    assert!(problem(&ringdisk).contains("no such file"));
    fs::rename(&away, &mounted).unwrap();
    wait_until("the sandbox's refusal", || {
        let bad = ringdisk.disk("bad");
        bad["storage"] == "works" || problem(&ringdisk).contains("reload --upgrade")
    });
    if ringdisk.disk("bad")["storage"] == "works" {
        return println!("skipped: this kernel does not restrict files");
    }
    let upgraded = ringdisk.json(&["reload", "--upgrade"]);
    wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
    let now = upgraded["pid"].as_u64().unwrap() as i32;
    kill_process(Pid::from_raw(now).unwrap(), Signal::TERM).unwrap();
}

/// Storage that hangs at the start: reported at once, the others are served, and SIGTERM ends the process.
#[test]
fn hanging_disk_does_not_stop_the_others() {
    let dir = directory();
    let mount = dir.path().join("mnt");
    fs::create_dir(&mount).unwrap();
    let Ok(storage) = Storage::mount(&mount, content(0, BYTES), 0) else {
        return println!("skipped: no FUSE file system to break");
    };
    storage.change(|s| (s.hangs, s.silent) = (true, true));
    let mut ringdisk = start(dir, &storage.file(), &[]);
    assert_works(&ringdisk, "good");
    let log = ringdisk.server.log();
    assert!(
        log.contains("disk bad: ") && log.contains("does not answer"),
        "{log}"
    );
    problem(&ringdisk);
    storage.change(|s| (s.hangs, s.silent) = (false, false));
    wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
    assert_works(&ringdisk, "bad");
    assert!(ringdisk.server.terminate().unwrap().success());
}

/// A file that appears may be a copy that is not complete: it is not served before it has stayed as it is for a while.
#[test]
fn file_that_appears_is_not_served_at_once() {
    let dir = directory();
    let bad = dir.path().join("bad.raw");
    let ringdisk = start(dir, &bad, &[]);
    problem(&ringdisk);
    fs::write(&bad, content(0, BYTES)).unwrap();
    ringdisk
        .server
        .wait_for_log(&["disk bad", "has just appeared or changed"]);
    wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
    assert_works(&ringdisk, "bad");
}

/// A file that another process has is not taken when that ends, which may only be restarting.
#[test]
fn locked_file_is_served_when_the_operator_says_so() {
    let dir = directory();
    let bad = dir.path().join("bad.raw");
    fs::write(&bad, content(0, BYTES)).unwrap();
    let other = format!(
        "{},socket={}",
        bad.display(),
        dir.path().join("other.sock").display()
    );
    let other = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &[&other]).unwrap();
    let ringdisk = start(dir, &bad, &[]);
    let why = problem(&ringdisk);
    assert!(why.contains("when it is free, 'ringdisk reload'"), "{why}");
    drop(other);
    assert_eq!(problem(&ringdisk), why);
    ringdisk.json(&["reload"]);
    wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
    assert_works(&ringdisk, "bad");
}

/// Exports of an absent disk follow the configuration: what was removed does not come back with the disk.
#[test]
fn exports_of_absent_disks_can_be_changed_and_removed() {
    let dir = directory();
    let bad = dir.path().join("bad.raw");
    let ringdisk = start(dir, &bad, &[]);
    let file = ringdisk.path("r.toml");
    let text = fs::read_to_string(&file).unwrap();
    let more = text.clone() + "writable = true\n[[export]]\ndisk = \"bad\"\nname = \"second\"\n";
    for text in [&more, &text] {
        fs::write(&file, text).unwrap();
        ringdisk.json(&["reload"]);
    }
    fs::write(&bad, content(0, BYTES)).unwrap();
    wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
    let exports = ringdisk.json(&["export"]);
    assert_eq!(exports.as_array().unwrap().len(), 1, "{exports}");
    assert_eq!(exports[0]["writable"], false, "{exports}");
}

/// A disk that a command has attached is absent after a restart, and then configured: it is one disk.
#[test]
fn absent_disk_of_a_command_can_be_configured() {
    let dir = directory();
    let (bad, late) = (dir.path().join("bad.raw"), dir.path().join("late.raw"));
    fs::write(&bad, content(0, BYTES)).unwrap();
    fs::write(&late, content(0, BYTES)).unwrap();
    let ringdisk = start(dir, &bad, &[]);
    ringdisk.json(&["attach", "late.raw,socket=late.sock"]);
    fs::rename(&late, ringdisk.path("away")).unwrap();
    let ringdisk = ringdisk.kill_and_restart();
    assert_eq!(ringdisk.disk("late")["storage"], "absent");
    let file = ringdisk.path("r.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::rename(ringdisk.path("away"), &late).unwrap();
    let late = disk(ringdisk.dir.path(), "late", &late);
    fs::write(&file, text.replacen("[[disk]]", &(late + "[[disk]]"), 1)).unwrap();
    ringdisk.json(&["reload"]);
    wait_until("the disk", || ringdisk.disk("late")["storage"] == "works");
    let list = ringdisk.json(&["list"]);
    let names = list.as_array().unwrap().iter().map(|disk| &disk["name"]);
    assert_eq!(names.filter(|name| *name == "late").count(), 1, "{list}");
    assert_works(&ringdisk, "late");
}

/// With `--user`, no thread may wait for storage when root's rights are given up. The others are served before that storage
/// answers, and what comes back then is opened by the process that root starts to take over.
#[test]
fn hanging_disk_does_not_delay_the_change_of_user() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: hanging_disk_does_not_delay_the_change_of_user: needs root");
    }
    let dir = directory();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mount = dir.path().join("mnt");
    fs::create_dir(&mount).unwrap();
    let Ok(storage) = Storage::mount(&mount, content(0, BYTES), 0) else {
        return println!("skipped: no FUSE file system to break");
    };
    storage.change(|s| (s.hangs, s.silent) = (true, true));
    let ringdisk = start(dir, &storage.file(), &["--user=nobody".into()]);
    assert_works(&ringdisk, "good");
    problem(&ringdisk);
    storage.change(|s| (s.hangs, s.silent) = (false, false));
    let works = || ringdisk.disk("bad")["storage"] == "works";
    let is_refused = || {
        let problem = &ringdisk.disk("bad")["problem"];
        problem
            .as_str()
            .is_some_and(|why| why.contains("reload --upgrade"))
    };
    wait_until("the disk, or the reason", || works() || is_refused());
    if works() {
        return assert_works(&ringdisk, "bad");
    }
    // Only root may use the file system.
    upgrade_serves_bad(&ringdisk);
}

/// A disk that only root may open, and that another process had locked at the start.
#[test]
fn locked_disk_of_root_is_served_later() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: locked_disk_of_root_is_served_later: needs root");
    }
    let dir = directory();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let bad = dir.path().join("bad.raw");
    fs::write(&bad, content(0, BYTES)).unwrap();
    fs::set_permissions(&bad, fs::Permissions::from_mode(0o600)).unwrap();
    let other = format!(
        "{},socket={}",
        bad.display(),
        dir.path().join("other.sock").display()
    );
    let other = Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &[&other]).unwrap();
    let ringdisk = start(dir, &bad, &["--user=nobody".into()]);
    problem(&ringdisk);
    drop(other);
    ringdisk.json(&["reload"]);
    wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
    assert_works(&ringdisk, "bad");
    // Its lock ends with it.
    ringdisk.json(&["export", "bad", "--remove"]);
    ringdisk.json(&["detach", "bad"]);
    let again = format!(
        "{},socket={}",
        bad.display(),
        ringdisk.path("other.sock").display()
    );
    drop(Server::ringdisk(env!("CARGO_BIN_EXE_ringdisk"), &[&again]).unwrap());
}

/// A disk that only root may open, and that was not there at the start.
#[test]
fn missing_disk_of_root_is_served_by_an_upgrade() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: missing_disk_of_root_is_served_by_an_upgrade: needs root");
    }
    let dir = directory();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let bad = dir.path().join("bad.raw");
    let ringdisk = start(dir, &bad, &["--user=nobody".into()]);
    assert!(problem(&ringdisk).contains("no such file"));
    let (new, wanted) = (ringdisk.path("new"), content(0, BYTES));
    fs::write(&new, wanted).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&new, &bad).unwrap();
    wait_until("the reason", || {
        problem(&ringdisk).contains("reload --upgrade")
    });
    upgrade_serves_bad(&ringdisk);
}

/// The disk `bad` is served after `ringdisk reload --upgrade`, and the guest of the other one goes on.
fn upgrade_serves_bad(ringdisk: &Controlled) {
    let good = ringdisk.path("good.sock");
    let mut guest = Device::connect(good, &DeviceConfig::default()).unwrap();
    let upgraded = ringdisk.json(&["reload", "--upgrade"]);
    let now = upgraded["pid"].as_u64().unwrap() as i32;
    wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
    assert_works(ringdisk, "bad");
    assert_eq!(guest.queues[0].read(8, 512).unwrap(), content(8, 512));
    let user = fs::metadata(format!("/proc/{now}/status")).unwrap().uid();
    assert_ne!(user, 0, "it has become the user again");
    kill_process(Pid::from_raw(now).unwrap(), Signal::TERM).unwrap();
}

/// Where the open files of a process are.
fn open_files(pid: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    files
        .filter_map(|file| fs::read_link(file.ok()?.path()).ok())
        .collect()
}

/// A disk that only root may open, and that a command has detached: no new process has a descriptor of it.
#[test]
fn detached_disk_of_root_stays_closed() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: detached_disk_of_root_stays_closed: needs root");
    }
    let dir = directory();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let bad = dir.path().join("bad.raw");
    fs::write(&bad, content(0, BYTES)).unwrap();
    fs::set_permissions(&bad, fs::Permissions::from_mode(0o600)).unwrap();
    let ringdisk = start(dir, &bad, &["--user=nobody".into()]);
    ringdisk.json(&["export", "bad", "--remove"]);
    ringdisk.json(&["detach", "bad"]);
    let upgraded = ringdisk.json(&["upgrade"]);
    let now = upgraded["pid"].as_u64().unwrap() as i32;
    assert!(!open_files(&now.to_string()).contains(&bad));
    kill_process(Pid::from_raw(now).unwrap(), Signal::TERM).unwrap();
}

/// An image that only root may open, whose backing file is missing: the reason says so, nobody finds it locked, and it is
/// served when that file is there. When the configuration has it no longer, it is closed.
#[test]
fn image_of_root_is_served_when_its_backing_file_is_there() {
    if !rustix::process::geteuid().is_root() {
        return println!(
            "skipped: image_of_root_is_served_when_its_backing_file_is_there: needs root"
        );
    }
    for comes in [true, false] {
        let dir = directory();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let (bad, base) = (dir.path().join("bad.qcow2"), dir.path().join("base.raw"));
        fs::write(&base, content(0, BYTES)).unwrap();
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-fqcow2", "-Fraw", "-b"]);
        assert!(create.arg(&base).arg(&bad).status().unwrap().success());
        fs::set_permissions(&bad, fs::Permissions::from_mode(0o600)).unwrap();
        let away = dir.path().join("away");
        fs::rename(&base, &away).unwrap();
        let ringdisk = start(dir, &bad, &["--user=nobody".into()]);
        for _ in 0..2 {
            ringdisk.json(&["reload"]);
            wait_until("the reason", || problem(&ringdisk).contains("base.raw"));
        }
        let pid = ringdisk.server.pid().to_string();
        assert!(open_files(&pid).contains(&bad));
        if comes {
            fs::rename(&away, &base).unwrap();
            ringdisk.json(&["reload"]);
            wait_until("the disk", || ringdisk.disk("bad")["storage"] == "works");
            assert_works(&ringdisk, "bad");
            let is_bad = |file: &PathBuf| *file == bad;
            wait_until("one descriptor", || {
                open_files(&pid).into_iter().filter(is_bad).count() == 1
            });
        } else {
            // Between attempts, which lock it for a moment.
            wait_until("it is not locked", || {
                let mut info = Command::new("qemu-img");
                let info = info.arg("info").arg(&bad).stdout(Stdio::null());
                info.status().unwrap().success()
            });
            let good = disk(&ringdisk.path(""), "good", &ringdisk.path("good.raw"));
            fs::write(ringdisk.path("r.toml"), good).unwrap();
            ringdisk.json(&["reload"]);
            wait_until("it is closed", || !open_files(&pid).contains(&bad));
        }
    }
}
