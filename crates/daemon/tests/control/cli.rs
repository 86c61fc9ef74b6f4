//! The subcommands as an operator types them and as a script reads them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::server::Server;

use super::server::{CommandOutput, Controlled, verify};

#[test]
fn text_output() {
    let ringdisk = Controlled::start(&[]);
    let file = ringdisk.file("vm1.raw", 16 << 20);
    ringdisk.file("copy.raw", 32 << 20);
    let expect = |arguments: &[&str], words: &[&str]| {
        let ran = ringdisk.ringdisk(arguments);
        assert_eq!(
            (ran.code, ran.err.as_str()),
            (Some(0), ""),
            "{arguments:?}: {ran:?}"
        );
        for word in words {
            assert!(
                ran.out.contains(word),
                "{arguments:?}: no '{word}' in {}",
                ran.out
            );
        }
    };
    expect(&["list"], &["no disk is served; 'ringdisk attach FILE'"]);
    // Relative paths are relative to the directory of the command.
    let socket = ringdisk.path("vm1.sock");
    let pasted = format!("path={}", socket.display());
    expect(
        &["attach", "vm1.raw,queues=2,socket=vm1.sock"],
        &["vm1.raw (raw, 16M)", &pasted, "libvirt"],
    );
    expect(
        &["list"],
        &[
            "NAME",
            "vm1",
            "16M",
            file.to_str().unwrap(),
            socket.to_str().unwrap(),
        ],
    );
    expect(&["resize", "vm1", "24M"], &["disk vm1 has 24M now"]);
    expect(&["resize", "vm1"], &["disk vm1 has 24M now"]);
    expect(&["resize", "vm1", "+1M"], &["disk vm1 has 25M now"]);
    expect(
        &[
            "throttle",
            "vm1",
            "iops=500",
            "bps-wr=10M",
            "bps-wr-max=20M",
        ],
        &["disk vm1 is limited"],
    );
    expect(&["list"], &["iops=500", "bps_wr=10M", "bps_wr_max=20M"]);
    expect(&["throttle", "vm1"], &["disk vm1 has no limits"]);
    expect(
        &["replace", "vm1", "copy.raw"],
        &["disk vm1 is on", "copy.raw now"],
    );
    expect(&["list"], &["32M", "copy.raw"]);
    let device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
    expect(&["list"], &["connected"]);
    expect(
        &["detach", "vm1", "--force"],
        &["disk vm1 is no longer served"],
    );
    drop(device);
    expect(&["list"], &["no disk is served"]);
    assert!(!socket.exists());
}

#[test]
fn json_output() {
    let ringdisk = Controlled::start(&[]);
    ringdisk.file("vm1.raw", 16 << 20);
    let copy = ringdisk.file("copy.raw", 16 << 20);
    assert_eq!(ringdisk.json(&["list"]), json!([]));
    let attached = ringdisk.json(&["attach", "vm1.raw,queues=2,socket=vm1.sock,iothreads=1,0"]);
    assert_eq!(attached["name"], "vm1");
    assert_eq!(
        attached["socket"],
        ringdisk.path("vm1.sock").to_str().unwrap()
    );
    assert_eq!(
        (&attached["queues"], &attached["size"]),
        (&2.into(), &(16 << 20).into())
    );
    assert!(attached["qemu"].is_array() && attached["libvirt"].is_object());
    let mut again = ringdisk.json(&["connect-info", "vm1"]);
    again["paste"] = attached["paste"].clone();
    assert_eq!(again, attached);
    let printed = ringdisk.ringdisk(&["connect-info", "vm1"]);
    let pasted = attached["paste"].as_str().unwrap();
    assert_eq!(printed.out.trim_end(), pasted.trim_end());
    ringdisk
        .ringdisk(&["connect-info", "vm2"])
        .assert_fails(1, &["vm2"]);
    let mut device = Device::connect(
        attached["socket"].as_str().unwrap(),
        &DeviceConfig::default(),
    )
    .unwrap();
    verify(&mut device.queues[0]);

    let disk = ringdisk.disk("vm1");
    for (key, value) in [
        ("size", json!(16 << 20)),
        ("format", "raw".into()),
        ("cache", "none".into()),
        ("connected", true.into()),
        ("readonly", false.into()),
        ("write-cache", true.into()),
        ("queues", 2.into()),
        ("iothreads", json!(["iothread1", "iothread0"])),
        ("limits", json!({})),
        ("throttle-group", Value::Null),
    ] {
        assert_eq!(disk[key], value, "{key}");
    }
    assert_eq!(disk["stats"], Value::Null, "these are for another command");
    let mut channel = device.frontend.open_backend_channel().unwrap();
    assert_eq!(
        ringdisk.json(&["resize", "vm1", "20M"]),
        json!({ "size": 20 << 20 })
    );
    channel.next(HANG).unwrap();
    assert_eq!(device.config().unwrap().capacity, (20 << 20) / 512);
    assert_eq!(ringdisk.json(&["throttle", "vm1", "iops=500"]), json!({}));
    assert_eq!(ringdisk.disk("vm1")["limits"], json!({ "iops": 500 }));
    fs::File::options()
        .write(true)
        .open(&copy)
        .unwrap()
        .set_len(20 << 20)
        .unwrap();
    assert_eq!(ringdisk.json(&["replace", "vm1", "copy.raw"]), json!({}));
    assert_eq!(ringdisk.disk("vm1")["file"], copy.to_str().unwrap());
    verify(&mut device.queues[0]);
    assert_eq!(ringdisk.json(&["detach", "vm1", "--force"]), json!({}));
    assert_eq!(ringdisk.json(&["list"]), json!([]));
}

#[test]
fn errors_name_the_next_step() {
    let ringdisk = Controlled::start(&[]);
    ringdisk.file("vm1.raw", 16 << 20);
    ringdisk.file("small.raw", 8 << 20);
    ringdisk.json(&["attach", "vm1.raw,socket=vm1.sock"]);
    let device = Device::connect(ringdisk.path("vm1.sock"), &DeviceConfig::default()).unwrap();
    for (arguments, code, words) in [
        (
            &["attach", "vm1.raw"][..],
            1,
            &["vm1", "already", "name="][..],
        ),
        (
            &["attach", "vm1.raw,name=twin"],
            1,
            &["vm1.raw", "in use by disk 'vm1'", "detach"],
        ),
        (
            &["attach", "absent.raw"],
            1,
            &["absent.raw", "no such file", "qemu-img create"],
        ),
        (
            &["attach", "small.raw,socket=vm1.sock"],
            1,
            &["vm1.sock", "same socket"],
        ),
        (
            &["attach", "small.raw,socket=vm1.raw"],
            1,
            &["vm1.raw", "not a socket", "is left alone"],
        ),
        (
            &["attach", "small.raw,socket=s.sock,iothreads=io9"],
            1,
            &["io9", "iothread0"],
        ),
        (
            &["attach", "small.raw,socket=s.sock,throttle-group=g"],
            1,
            &["group 'g'", "[[throttle-group]]"],
        ),
        (&["attach", "small.raw,cach=none"], 2, &["cach", "cache"]),
        (&["detach", "vm1"], 1, &["connected", "force"]),
        (&["detach", "nobody"], 1, &["nobody", "ringdisk list"]),
        (&["resize", "vm1", "8M"], 1, &["16M", "shorter"]),
        (&["resize", "vm1", "big"], 2, &["size", "big"]),
        (&["resize", "nobody"], 1, &["nobody", "ringdisk list"]),
        (&["throttle", "vm1", "iops"], 2, &["iops", "key=value"]),
        (
            &["throttle", "vm1", "speed=1"],
            2,
            &["speed", "iops_wr", "group"],
        ),
        (&["throttle", "vm1", "iops=fast"], 2, &["iops", "fast"]),
        (
            &["throttle", "vm1", "iops=5", "iops-rd=5"],
            2,
            &["iops", "exclude"],
        ),
        (
            &["throttle", "vm1", "group=g"],
            1,
            &["group 'g'", "[[throttle-group]]"],
        ),
        (
            &["replace", "vm1", "small.raw"],
            1,
            &["vm1", "8388608", "16777216"],
        ),
        (
            &["replace", "nobody", "small.raw"],
            1,
            &["nobody", "ringdisk list"],
        ),
        (&["reload"], 1, &["--config FILE"]),
    ] {
        ringdisk.ringdisk(arguments).assert_fails(code, words);
        // Standard output holds the answer and nothing else.
        ringdisk
            .ringdisk(&[arguments, &["--json"]].concat())
            .assert_fails(code, words);
    }
    drop(device);
    assert_eq!(ringdisk.json(&["list"]).as_array().unwrap().len(), 1);
    assert!(!ringdisk.path("s.sock").exists());
}

#[test]
fn ambiguous_and_small_values_are_refused() {
    let ringdisk = Controlled::start(&[]);
    ringdisk.file("vm1.raw", 16 << 20);
    ringdisk.json(&["attach", "vm1.raw,socket=vm1.sock"]);
    for (arguments, code, words) in [
        (
            &["throttle", "vm1", "bps-wr=1M", "iops=5", "bps_wr=2M"][..],
            2,
            &["bps_wr", "twice"][..],
        ),
        (
            &["throttle", "vm1", "group=a", "group=b"],
            2,
            &["group", "twice"],
        ),
        (&["resize", "vm1", "+"], 2, &["is no size"]),
        (&["resize", "vm1", "++1G"], 2, &["is no size"]),
        (&["resize", "nobody", "+1G"], 1, &["no disk 'nobody'"]),
        (
            &["backup", "begin", "vm1", "--memory", "1M"],
            2,
            &["memory", "4M"],
        ),
    ] {
        ringdisk.ringdisk(arguments).assert_fails(code, words);
    }
}

#[test]
fn missing_control_socket_is_explained() {
    let ringdisk = Controlled::start(&[]);
    let list = |control: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        CommandOutput::of(
            command
                .args(["list", "--control"])
                .arg(ringdisk.path(control)),
        )
    };
    list("absent.qmp").assert_fails(1, &["absent.qmp", "check that `ringdisk serve` runs"]);
    drop(std::os::unix::net::UnixListener::bind(ringdisk.path("dead.qmp")).unwrap());
    list("dead.qmp").assert_fails(1, &["dead.qmp", "no process listens", "ringdisk serve"]);
    let mode = fs::metadata(&ringdisk.control)
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600, "others may connect");
}

/// Without `--control`, the socket lies beside the disks' sockets. The first ringdisk gets it; a second one serves its
/// disks without it.
#[test]
fn default_control_socket() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("ringdisk");
    let as_user = |command: &mut Command| {
        command
            .env("XDG_RUNTIME_DIR", dir.path())
            .current_dir(dir.path())
            .stdin(Stdio::null());
        // Root's default paths belong to the whole machine.
        if rustix::process::geteuid().is_root() {
            command.uid(65534).gid(65534);
        }
    };
    if rustix::process::geteuid().is_root() {
        chown(dir.path(), Some(65534), Some(65534)).unwrap();
    }
    let binary = dir.path().join("program");
    crate::support::copy_ringdisk(&binary);
    let serve = || {
        let mut command = Command::new(&binary);
        as_user(command.args(["serve", "--json", "null:1M"]));
        command
    };
    let ringdisk = |arguments: &[&str]| {
        let mut command = Command::new(&binary);
        as_user(command.args(arguments));
        CommandOutput::of(&mut command)
    };
    // That of the service, if there is one.
    ringdisk(&["list"]).assert_fails(1, &["ringdisk/control.qmp"]);
    let mut first = Server::ringdisk_command(serve()).unwrap();
    assert_eq!(first.socket(), run.join("null.sock"));
    let listed = ringdisk(&["list", "--json"]);
    let disks: Value = serde_json::from_str(&listed.out).unwrap();
    assert_eq!((listed.code, &disks[0]["name"]), (Some(0), &"null".into()));

    let mut command = Command::new(&binary);
    as_user(command.args(["serve", "--json", "null:1M,name=other"]));
    let mut second = Server::ringdisk_command(command).unwrap();
    assert!(run.join("other.sock").exists());
    second.wait_for_log(&["no control socket", "--control PATH"]);
    assert!(second.terminate().unwrap().success());
    // The second ringdisk has not removed the first one's socket.
    assert_eq!(ringdisk(&["list"]).code, Some(0));
    assert!(first.terminate().unwrap().success());
    let left = fs::read_dir(&run).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["journals"], "sockets were left behind");

    // A socket given explicitly must be available.
    let taken = dir.path().join("taken.qmp");
    let _other = std::os::unix::net::UnixListener::bind(&taken).unwrap();
    fs::set_permissions(&taken, fs::Permissions::from_mode(0o666)).unwrap();
    let mut command = serve();
    let refused = CommandOutput::of(command.arg("--control").arg(&taken));
    assert_eq!((refused.code, refused.out.as_str()), (Some(1), ""));
    assert!(
        refused.err.contains("taken.qmp: a live server"),
        "{refused:?}"
    );
}
