//! Reloading a configuration file while guests use the disks.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::driver::{Device, DeviceConfig, HANG, Op};

use super::server::{CommandOutput, Controlled, Stop, rewrite, verify};
use crate::support::content;
use crate::support::wait_until;

const MIB: u64 = 1 << 20;

/// A ringdisk with a configuration file.
struct Configured {
    ringdisk: Controlled,
    file: PathBuf,
}

impl Configured {
    fn start(text: &str) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for name in ["a.raw", "b.raw", "c.raw"] {
            fs::write(dir.path().join(name), content(0, (16 * MIB) as usize)).unwrap();
        }
        let file = write(&dir, text);
        let config = format!("--config={}", file.display());
        let ringdisk = Controlled::start_in(dir, &[config]);
        Self { ringdisk, file }
    }

    fn write(&self, text: &str) {
        write(&self.ringdisk.dir, text);
    }

    /// Reloads the file; this must succeed.
    fn reload(&self, text: &str) {
        self.write(text);
        self.ringdisk.json(&["reload"]);
    }

    fn device(&self, name: &str) -> Device {
        Device::connect(self.socket(name), &DeviceConfig::default()).unwrap()
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.ringdisk.path(&format!("{name}.sock"))
    }

    fn names(&self) -> Vec<String> {
        let disks = self.ringdisk.json(&["list"]);
        let disks = disks.as_array().unwrap().iter();
        disks
            .map(|disk| disk["name"].as_str().unwrap().to_owned())
            .collect()
    }
}

/// Writes a configuration; `DIR` in it stands for the directory.
fn write(dir: &TempDir, text: &str) -> PathBuf {
    let file = dir.path().join("ringdisk.toml");
    fs::write(&file, text.replace("DIR", dir.path().to_str().unwrap())).unwrap();
    file
}

/// A disk on its own file; `options` are more lines.
fn disk(name: &str, options: &str) -> String {
    format!("[[disk]]\nfile = \"DIR/{name}.raw\"\nsocket = \"DIR/{name}.sock\"\n{options}\n")
}

/// Disks are added, removed and changed while the guest of another disk notices nothing.
#[test]
fn unchanged_disk_is_not_disturbed() {
    let stays = disk("a", "queues = 2\niops = 1_000_000");
    let config = Configured::start(&stays);
    let two = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(config.socket("a"), &two).unwrap();
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for queue in &mut device.queues {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    rewrite(queue);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let _stop = Stop(&stop);
        let hang_up = |text: &str| {
            config.write(text);
            config.ringdisk.server.signal(Signal::HUP);
        };
        for _ in 0..3 {
            let before = rounds.load(Ordering::Relaxed);
            // By signal, as a service manager does it.
            hang_up(&(stays.clone() + &disk("b", "") + &disk("c", "cache = \"writeback\"")));
            wait_until("c", || config.names() == ["a", "b", "c"]);
            wait_until("c's socket", || config.socket("c").exists());
            verify(&mut config.device("b").queues[0]);
            assert_eq!(config.ringdisk.disk("c")["cache"], "writeback");

            // The guest can notice changes made while it runs.
            let mut device = config.device("b");
            let group = "[[throttle-group]]\nname = \"bronze\"\niops = 5000\n";
            let limited = disk("b", "throttle-group = \"bronze\"\nbps = \"100M\"");
            hang_up(&(stays.clone() + &limited + group));
            wait_until("b's group", || {
                config.ringdisk.disk("b")["throttle-group"] == "bronze"
            });
            assert_eq!(
                config.ringdisk.disk("b")["limits"],
                json!({ "bps": 100 * MIB })
            );
            wait_until("c's end", || config.names() == ["a", "b"]);
            verify(&mut device.queues[0]);
            assert!(!config.socket("c").exists());

            // A change that is impossible while the guest runs costs the connection.
            hang_up(&(stays.clone() + &disk("b", "readonly = true")));
            wait_until("readonly", || config.ringdisk.disk("b")["readonly"] == true);
            assert!(device.config().is_err(), "its front-end is still connected");
            let mut device = config.device("b");
            assert_eq!(device.queues[0].write(8, &content(9, 4096)), 1);
            verify(&mut device.queues[0]);

            hang_up(&stays);
            wait_until("b's end", || config.names() == ["a"]);
            assert!(device.config().is_err());
            let after = rounds.load(Ordering::Relaxed);
            wait_until("another round", || rounds.load(Ordering::Relaxed) > after);
            assert!(after > before);
        }
    });
    let connected = config
        .ringdisk
        .server
        .log()
        .matches("disk a: front-end")
        .count();
    assert_eq!(connected, 1, "{}", config.ringdisk.server.log());
    assert_eq!(
        config.ringdisk.disk("a")["limits"],
        json!({ "iops": 1_000_000 })
    );
}

#[test]
fn invalid_configuration_changes_nothing() {
    let text = disk("a", "") + &disk("b", "");
    let config = Configured::start(&text);
    let mut device = config.device("a");
    for (mistake, line, words) in [
        (
            disk("a", "cach = \"none\""),
            4,
            &["'cach'", "cache", "queue-size"][..],
        ),
        (
            disk("a", "cache = \"fast\""),
            4,
            &["cache", "fast", "writeback"],
        ),
        (disk("a", "queues = 0"), 4, &["queues", "1 to 256"]),
        (
            disk("a", "readonly = \"yes\""),
            4,
            &["readonly", "yes", "on nor off"],
        ),
        (
            disk("a", "iothreads = \"fast\""),
            4,
            &["[[iothread]]", "fast"],
        ),
        (
            disk("a", "throttle-group = \"g\""),
            4,
            &["[[throttle-group]]", "\"g\""],
        ),
        (
            "iothreads = 0\n".to_owned() + &disk("a", ""),
            1,
            &["iothreads", "1 to 256"],
        ),
        (
            "nodes = 3\n".to_owned() + &disk("a", ""),
            1,
            &["'nodes'", "poll-max-us", "[[disk]]"],
        ),
        (disk("a", "") + &disk("a", ""), 5, &["'a'", "already"]),
        (disk("a", "") + "[[disk]]\n", 5, &["no file"]),
        ("iothreads = \n".to_owned() + &disk("a", ""), 1, &[]),
    ] {
        // The file also has a valid change.
        config.write(&mistake);
        let line = format!("ringdisk.toml, line {line}: ");
        let words = [&[line.as_str(), "nothing has been changed"], words].concat();
        config
            .ringdisk
            .ringdisk(&["reload"])
            .assert_fails(1, &words);
        assert_eq!(config.names(), ["a", "b"]);
        verify(&mut device.queues[0]);
        // A file that cannot be used at startup is a usage error.
        let control = config.ringdisk.path("other.qmp");
        let mut serve = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        serve
            .args(["serve", "--config"])
            .arg(&config.file)
            .arg("--control")
            .arg(control);
        let ran = CommandOutput::of(&mut serve);
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.err.contains(&line), "{ran:?}");
    }
    assert_unopenable_files_are_refused(&config, &mut device);
    config.write(&disk("a", "iothreads = 99"));
    config
        .ringdisk
        .ringdisk(&["reload"])
        .assert_fails(1, &["iothread99", "nothing has been changed"]);
    verify(&mut device.queues[0]);
    fs::remove_file(&config.file).unwrap();
    let words = [
        "ringdisk.toml",
        "cannot be read",
        "nothing has been changed",
    ];
    config
        .ringdisk
        .ringdisk(&["reload"])
        .assert_fails(1, &words);
    config.reload(&text);
    verify(&mut device.queues[0]);
}

/// Files that cannot be opened are also detected before anything changes.
fn assert_unopenable_files_are_refused(config: &Configured, device: &mut Device) {
    for (added, words) in [
        (disk("absent", ""), &["absent.raw", "no such file"][..]),
        (disk("c", "iothreads = 99"), &["iothread99", "iothread0"]),
        (
            disk("c", "") + "[[disk]]\nname = \"d\"\nfile = \"DIR/a.raw\"\nsocket = \"DIR/d.sock\"",
            &["a.raw", "disk 'a'"],
        ),
    ] {
        config.write(&(disk("a", "") + &added));
        let words = [&["nothing has been changed"], words].concat();
        config
            .ringdisk
            .ringdisk(&["reload"])
            .assert_fails(1, &words);
        assert_eq!(config.names(), ["a", "b"]);
        verify(&mut device.queues[0]);
    }
}

/// A failed change is retried by the next reload, even if the file is unchanged.
#[test]
fn failed_change_is_retried_by_the_next_reload() {
    let config = Configured::start(&disk("a", ""));
    let mut device = config.device("a");
    fs::create_dir(config.socket("b")).unwrap();
    let text = disk("a", "") + &disk("b", "") + &disk("c", "");
    config.write(&text);
    let failed = config.ringdisk.ringdisk(&["reload"]);
    failed.assert_fails(1, &["disk 'b'", "b.sock", "nothing has been changed"]);
    assert_eq!(config.names(), ["a"]);
    fs::remove_dir(config.socket("b")).unwrap();
    config.ringdisk.json(&["reload"]);
    assert_eq!(config.names(), ["a", "b", "c"]);

    // A failed change leaves the disk as it was; the next reload completes it.
    fs::create_dir(config.ringdisk.path("elsewhere.sock")).unwrap();
    let moved = disk("a", "") + &disk("b", "").replace("b.sock", "elsewhere.sock") + &disk("c", "");
    config.write(&moved);
    config.ringdisk.ringdisk(&["reload"]).assert_fails(
        1,
        &["disk 'b'", "elsewhere.sock", "nothing has been changed"],
    );
    verify(&mut config.device("b").queues[0]);
    fs::remove_dir(config.ringdisk.path("elsewhere.sock")).unwrap();
    config.ringdisk.json(&["reload"]);
    assert!(!config.socket("b").exists());
    verify(&mut config.device("elsewhere").queues[0]);
    verify(&mut device.queues[0]);
}

/// Both the file and commands change the set of disks, and each accepts what the other has done.
#[test]
fn commands_and_configuration_are_reconciled() {
    let config = Configured::start(&disk("a", ""));
    let ringdisk = &config.ringdisk;
    let mut device = config.device("a");

    // Attached by command, then added to the file for the next start.
    let path = |name: &str| ringdisk.path(name).display().to_string();
    let argument = format!(
        "{},socket={},queues=2,iops=5000",
        path("b.raw"),
        path("b.sock")
    );
    ringdisk.json(&["attach", &argument]);
    let mut other = config.device("b");
    let both = disk("a", "") + &disk("b", "queues = 2\niops = 5000");
    config.reload(&both);
    verify(&mut other.queues[0]);

    // Moved to another file by command, then changed in the configuration.
    ringdisk.json(&["replace", "b", "c.raw"]);
    config.reload(&both.replace("b.raw\"", "c.raw\"\nname = \"b\""));
    verify(&mut other.queues[0]);
    assert_eq!(ringdisk.disk("b")["file"], path("c.raw"));
    // The configuration alone does not move it back, where the VM's data is not.
    config.write(&both);
    let words = [
        "b.raw",
        "a disk was moved from it",
        "nothing has been changed",
    ];
    ringdisk.ringdisk(&["reload"]).assert_fails(1, &words);
    ringdisk.json(&["replace", "b", "b.raw"]);
    config.reload(&both);
    verify(&mut other.queues[0]);
    assert_eq!(ringdisk.disk("b")["file"], path("b.raw"));

    // Detached by command, then removed from the file.
    ringdisk.json(&["detach", "b", "--force"]);
    config.reload(&disk("a", ""));
    assert_eq!(config.names(), ["a"]);

    // A command has given this name to another disk.
    ringdisk.json(&["attach", &format!("c.raw,name=b,socket={}", path("c.sock"))]);
    config.write(&both);
    let words = ["disk 'b' already", "nothing has been changed"];
    ringdisk.ringdisk(&["reload"]).assert_fails(1, &words);
    verify(&mut device.queues[0]);
}

/// Limits set by a command stay until the file sets other limits; other changes to the file do not affect them.
#[test]
fn limits_set_by_command_are_kept_until_the_file_changes_them() {
    let config = Configured::start(&disk("a", ""));
    let limits = || config.ringdisk.disk("a")["limits"]["iops"].clone();
    config.ringdisk.json(&["throttle", "a", "iops=900"]);
    fs::rename(
        config.ringdisk.path("a.raw"),
        config.ringdisk.path("a1.raw"),
    )
    .unwrap();
    config.ringdisk.json(&["replace", "a", "a1.raw"]);
    let renamed = |more: &str| disk("a", more).replace("a.raw\"", "a1.raw\"\nname = \"a\"");
    for more in ["", "serial = \"new\"", "serial = \"newer\""] {
        config.reload(&renamed(more));
        assert_eq!(limits(), 900, "{more}");
    }
    config.reload(&renamed("iops = 77"));
    assert_eq!(limits(), 77);
    let log = config.ringdisk.server.log();
    let names = log.lines().filter(|line| line.contains("is now named"));
    assert_eq!(names.count(), 1, "{log}");
}

/// If something else has taken a socket's path, the reload reports it and leaves it alone.
#[test]
fn occupied_socket_path_is_reported_and_left_alone() {
    let text = disk("a", "") + &disk("b", "");
    let mut config = Configured::start(&text);
    let mut device = config.device("a");
    let socket = config.socket("a");
    for directory in [true, false] {
        fs::remove_file(&socket).unwrap();
        if directory {
            fs::create_dir(&socket).unwrap()
        } else {
            fs::write(&socket, "precious").unwrap()
        }
        for _ in 0..2 {
            let ran = config.ringdisk.ringdisk(&["reload"]);
            assert_eq!(ran.code, Some(0), "{ran:?}");
            let what = if directory { "a directory" } else { "a file" };
            for words in ["disk a", "no VM can connect", what, "move it away"] {
                assert!(ran.out.contains(words), "{ran:?}");
            }
            let reply = config.ringdisk.json(&["reload"]);
            assert_eq!(reply["unreachable"].as_array().unwrap().len(), 1, "{reply}");
        }
        verify(&mut device.queues[0]);
        if directory {
            fs::remove_dir(&socket).unwrap()
        } else {
            fs::remove_file(&socket).unwrap()
        }
        assert_eq!(config.ringdisk.json(&["reload"]), json!({}));
        config
            .ringdisk
            .server
            .wait_for_log(&["WARN", "has created it again"]);
        wait_until("the socket is there again", || socket.exists());
    }
    fs::remove_file(&socket).unwrap();
    fs::write(&socket, "precious").unwrap();
    drop(device);
    assert!(config.ringdisk.server.terminate().unwrap().success());
    assert_eq!(fs::read_to_string(&socket).unwrap(), "precious");
}

/// A change to a disk that a command detached is skipped with a warning; all other changes are applied.
#[test]
fn change_to_a_detached_disk_is_skipped_with_a_warning() {
    let three = |more: &str| disk("a", "") + &disk("b", "") + &disk("c", more);
    let config = Configured::start(&three(""));
    let mut device = config.device("a");
    config.ringdisk.json(&["detach", "c"]);
    fs::rename(config.ringdisk.path("c.raw"), config.ringdisk.path("d.raw")).unwrap();
    let other_file = three("").replace("c.raw\"", "d.raw\"\nname = \"c\"");
    for (round, text) in [
        three("iops = 77"),
        three("serial = \"new\""),
        other_file.clone(),
    ]
    .into_iter()
    .enumerate()
    {
        let iops = 1000 + round as u64;
        let first = disk("a", "");
        let text = text.replace(&first, &disk("a", &format!("iops = {iops}")));
        config.write(&text);
        let ran = config.ringdisk.ringdisk(&["reload"]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        for words in ["in effect", "disk c", "detached", "ringdisk attach"] {
            assert!(ran.out.contains(words), "{ran:?}");
        }
        assert_eq!(config.names(), ["a", "b"]);
        assert_eq!(config.ringdisk.disk("a")["limits"]["iops"], iops);
    }
    verify(&mut device.queues[0]);
    // A disk that is attached again is unchanged if it matches the file.
    let attached = format!(
        "{},name=c,socket={}",
        config.ringdisk.path("d.raw").display(),
        config.socket("c").display()
    );
    config.ringdisk.json(&["attach", &attached]);
    let reloaded = config.ringdisk.json(&["reload"]);
    assert_eq!(reloaded, json!({}));
    assert_eq!(config.names(), ["a", "b", "c"]);
    verify(&mut config.device("c").queues[0]);
}

/// The configuration alone moves a disk to an image and back; its guest only notices a pause.
#[test]
fn disk_moves_to_a_file_of_another_format() {
    if !testkit::qemu_img::is_there("disk_moves_to_a_file_of_another_format") {
        return;
    }
    let config = Configured::start(&disk("a", "format = \"raw\""));
    let at = config.ringdisk.dir.path();
    testkit::qemu_img::img(at, "convert -f raw -O qcow2 c.raw image.qcow2");
    let mut device = config.device("a");
    let on = |file: &str, format: &str| {
        let raw = disk("a", &format!("format = \"{format}\""));
        let named = format!("{file}\"\nname = \"a\"");
        config.reload(&raw.replace("a.raw\"", &named));
    };
    on("image.qcow2", "qcow2");
    super::server::rewrite(&mut device.queues[0]);
    assert_eq!(config.ringdisk.disk("a")["format"], "qcow2");
    on("b.raw", "raw");
    super::server::rewrite(&mut device.queues[0]);
    assert_eq!(config.ringdisk.disk("a")["format"], "raw");
    testkit::qemu_img::check(at, "image.qcow2", false);
}

/// The format of a disk's current file cannot change: the reload reports it and the guest continues. Removing a format
/// that the file name does not imply is reported as well, because the next start would refuse it.
#[test]
fn format_of_the_current_file_cannot_change() {
    if !testkit::qemu_img::is_there("format_of_the_current_file_cannot_change") {
        return;
    }
    let config = Configured::start(&disk("a", "format = \"raw\""));
    let ringdisk = &config.ringdisk;
    let at = ringdisk.dir.path();
    testkit::qemu_img::img(at, "convert -f raw -O qcow2 c.raw image");
    let mut device = config.device("a");
    let mut refused = |text: &str, words: &[&str], format: &str| {
        config.write(text);
        let reloaded = ringdisk.ringdisk(&["reload"]);
        reloaded.assert_fails(1, words);
        assert_eq!(ringdisk.disk("a")["format"], format);
        super::server::rewrite(&mut device.queues[0]);
    };
    let words = ["disk 'a'", "a.raw with format=raw", "format="];
    refused(&disk("a", "format = \"qcow2\""), &words, "raw");
    config.reload(&disk("a", ""));
    let image = |more: &str| disk("a", more).replace("a.raw\"", "image\"\nname = \"a\"");
    config.reload(&image("format = \"qcow2\""));
    let words = ["disk 'a'", "image", "format=qcow2"];
    refused(&image(""), &words, "qcow2");
    config.reload(&image("format = \"qcow2\""));
}

/// A renamed disk keeps its file.
#[test]
fn renamed_disk_keeps_its_file() {
    let config = Configured::start(&disk("a", ""));
    config.reload("[[disk]]\nname = \"other\"\nfile = \"DIR/a.raw\"\nsocket = \"DIR/a.sock\"");
    assert_eq!(config.names(), ["other"]);
    verify(&mut config.device("a").queues[0]);
}

/// Each queue runs on the thread that the file names, as the CPU time of the threads shows.
#[test]
fn queues_run_on_their_configured_threads() {
    let text = "[[iothread]]\nid = \"even\"\n[[iothread]]\nid = \"odd\"\npoll-max-us = 0\n"
        .to_owned()
        + &disk(
            "a",
            "queues = 4\niothread-vq-mapping = [\n\
             { iothread = \"even\", vqs = [0, 2] },\n\
             { iothread = \"odd\", vqs = [3, 1] },\n]",
        );
    let config = Configured::start(&text);
    let ringdisk = &config.ringdisk;
    let threads = ringdisk.disk("a")["iothreads"].take();
    assert_eq!(threads, json!(["even", "odd", "even", "odd"]));
    let mut client = control::Client::connect(&ringdisk.control, HANG).unwrap();
    let info = client.call("query-iothreads", json!({})).unwrap();
    let info = |id: &str| {
        let mut threads = info.as_array().unwrap().iter();
        threads.find(|thread| thread["id"] == id).unwrap().clone()
    };
    assert_eq!(info("odd")["poll-max-ns"], 0);
    let thread_id = |id: &str| info(id)["thread-id"].as_u64().unwrap() as u32;
    let ids = ["even", "odd"].map(thread_id);
    for (id, name) in ids.iter().zip(["even", "odd"]) {
        assert!(ringdisk.threads().contains(&(*id, name.into())));
    }
    let config_of_four = DeviceConfig {
        queues: 4,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(config.socket("a"), &config_of_four).unwrap();
    let run = |id: u32| {
        let path = format!("/proc/{}/task/{id}/schedstat", ringdisk.server.pid());
        let text = fs::read_to_string(path).unwrap();
        text.split_whitespace()
            .next()
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    for queue in &mut device.queues {
        let before = ids.map(run);
        for _ in 0..500 {
            assert_eq!(queue.run(Op::Read, 8, 4096), 0);
        }
        let ran = [run(ids[0]) - before[0], run(ids[1]) - before[1]];
        let (its, other) = match queue.index % 2 {
            0 => (ran[0], ran[1]),
            _ => (ran[1], ran[0]),
        };
        assert!(
            its > 10 * other,
            "queue {}: threads ran for {ran:?} ns",
            queue.index
        );
    }
    // A thread in use is not removed; an unused one is.
    config.write(&text.replace(
        "[[iothread]]\nid = \"even\"\n",
        "[[iothread]]\nid = \"extra\"\n",
    ));
    let words = ["\"even\"", "nothing has been changed"];
    ringdisk.ringdisk(&["reload"]).assert_fails(1, &words);
    config.reload(&(text.clone() + "[[iothread]]\nid = \"extra\"\n"));
    let has_extra = || ringdisk.threads().iter().any(|(_, name)| name == "extra");
    assert!(has_extra());
    config.reload(&text);
    assert!(!has_extra());
    verify(&mut device.queues[3]);
    assert_eq!(ringdisk.disk("a")["connected"], Value::Bool(true));
}

/// A file for each VM comes, changes and goes with a reload, under the sandbox.
#[test]
fn files_beside_the_configuration_are_reloaded() {
    let configured = Configured::start(&disk("a", ""));
    let mut device = configured.device("a");
    let beside = configured.ringdisk.path("disks.d");
    fs::create_dir(&beside).unwrap();
    let place = configured.ringdisk.dir.path().to_str().unwrap().to_owned();
    let put = |name: &str, text: &str| {
        fs::write(beside.join(name), text.replace("DIR", &place)).unwrap();
    };
    put("vm-b.toml", &disk("b", ""));
    put("vm-c.toml", &disk("c", ""));
    configured.ringdisk.json(&["reload"]);
    assert_eq!(configured.names(), ["a", "b", "c"]);
    verify(&mut configured.device("b").queues[0]);

    put("vm-c.toml", &disk("c", "sckt = 1"));
    let refused = configured.ringdisk.ringdisk(&["reload"]);
    refused.assert_fails(1, &["disks.d/vm-c.toml, line 4", "sckt"]);
    assert_eq!(configured.names(), ["a", "b", "c"]);

    // It is away for a moment: nobody loses a disk.
    let away = configured.ringdisk.path("away");
    fs::rename(&beside, &away).unwrap();
    for command in ["reload", "upgrade"] {
        let refused = configured.ringdisk.ringdisk(&[command]);
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.err.contains("is not there any more"), "{refused:?}");
    }
    fs::rename(&away, &beside).unwrap();
    put("vm-c.toml", &disk("c", ""));
    assert_eq!(configured.names(), ["a", "b", "c"]);

    fs::remove_file(beside.join("vm-c.toml")).unwrap();
    configured.ringdisk.json(&["reload"]);
    assert_eq!(configured.names(), ["a", "b"]);
    verify(&mut device.queues[0]);
    let restarted = configured.ringdisk.kill_and_restart();
    assert_eq!(restarted.json(&["list"]).as_array().unwrap().len(), 2);
}

/// A command has detached a disk for which the configuration gets an export: the reload says so once, and the export comes
/// with the disk.
#[test]
fn export_of_a_detached_disk_comes_with_the_disk() {
    let (nbd, disks) = ("nbd = \"DIR/nbd.sock\"\n", disk("a", "") + &disk("b", ""));
    let with_exports = format!("{nbd}{disks}[[export]]\ndisk = \"a\"\n[[export]]\ndisk = \"b\"\n");
    let config = Configured::start(&format!("{nbd}{disks}"));
    let exported = |ringdisk: &Controlled| {
        let exports = ringdisk.json(&["export"]);
        let exports = exports.as_array().unwrap().iter();
        exports
            .map(|it| it["disk"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    config.ringdisk.json(&["detach", "b"]);
    config.write(&with_exports);
    for says_so in [true, false] {
        let reloaded = config.ringdisk.ringdisk(&["reload"]);
        assert_eq!(reloaded.code, Some(0), "{reloaded:?}");
        let sentence = "'b' is not exported: its disk 'b' was detached";
        assert_eq!(reloaded.out.contains(sentence), says_so, "{reloaded:?}");
        assert_eq!(exported(&config.ringdisk), ["a"]);
    }
    let attach = format!("b.raw,socket={}", config.socket("b").display());
    config.ringdisk.json(&["attach", &attach]);
    assert_eq!(exported(&config.ringdisk), ["a", "b"]);
    // Also if it is detached and attached again.
    config.ringdisk.json(&["detach", "b", "--force"]);
    assert_eq!(exported(&config.ringdisk), ["a"]);
    config.ringdisk.json(&["attach", &attach]);
    assert_eq!(exported(&config.ringdisk), ["a", "b"]);
}
