//! What disks need is gone from the configuration, or cannot be had on this host any more: no restart costs a VM its disk.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig};

use super::server::Controlled;
use crate::support::content;

const BYTES: usize = 1 << 20;

/// Serves a configured disk; another file is there to be attached.
fn start(configured: &str) -> Controlled {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for name in ["a.raw", "b.raw"] {
        fs::write(dir.path().join(name), content(0, BYTES)).unwrap();
    }
    configure(dir.path(), configured);
    let arguments = [
        format!("--state={}", dir.path().join("state").display()),
        format!("--config={}", dir.path().join("r.toml").display()),
    ];
    Controlled::start_in(dir, &arguments)
}

fn configure(dir: &Path, more: &str) {
    let (top, tables) = more.split_once("---").unwrap_or(("", more));
    let at = dir.display();
    let disk = format!("[[disk]]\nname = \"a\"\nfile = \"{at}/a.raw\"\nsocket = \"{at}/a.sock\"\n");
    fs::write(dir.join("r.toml"), format!("{top}\n{disk}{tables}\n")).unwrap();
}

fn attach(ringdisk: &Controlled, options: &str) {
    let (file, socket) = (ringdisk.path("b.raw"), ringdisk.path("b.sock"));
    let disk = format!("{},socket={},{options}", file.display(), socket.display());
    ringdisk.json(&["attach", &disk]);
}

#[track_caller]
fn assert_works(ringdisk: &Controlled, disk: &str) {
    let socket = ringdisk.path(&format!("{disk}.sock"));
    let mut device = Device::connect(socket, &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].read(8, 512).unwrap(), content(8, 512));
}

fn saved(ringdisk: &Controlled) -> Value {
    let text = fs::read(ringdisk.path("state/state.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// The commands' disks keep the thread and the group, whose definitions are saved with them.
#[test]
fn thread_and_group_of_commands_outlive_their_configuration() {
    let tables = "[[iothread]]\nid = \"fast\"\n[[throttle-group]]\nname = \"g\"\niops = 500\n";
    let ringdisk = start(tables);
    attach(&ringdisk, "iothreads=fast");
    ringdisk.json(&["throttle", "a", "group=g"]);
    configure(ringdisk.dir.path(), "");
    let check = |ringdisk: &Controlled| {
        assert_works(ringdisk, "a");
        assert_works(ringdisk, "b");
        assert_eq!(ringdisk.disk("a")["throttle-group"], "g");
        assert_eq!(saved(ringdisk)["throttle-groups"][0]["limits"]["iops"], 500);
        let threads = ringdisk.threads();
        assert!(
            threads.iter().any(|(_, name)| name == "fast"),
            "{threads:?}"
        );
    };
    let ringdisk = ringdisk.kill_and_restart();
    check(&ringdisk);
    ringdisk.json(&["reload"]);
    let ringdisk = ringdisk.kill_and_restart();
    check(&ringdisk);
    // The configuration wins again.
    configure(ringdisk.dir.path(), &tables.replace("500", "700"));
    let ringdisk = ringdisk.kill_and_restart();
    assert_eq!(
        saved(&ringdisk)["throttle-groups"][0]["limits"]["iops"],
        700
    );
    assert_works(&ringdisk, "a");
    // Nothing needs them any more, so that they end with their configuration.
    ringdisk.json(&["throttle", "a"]);
    ringdisk.json(&["detach", "b"]);
    configure(ringdisk.dir.path(), "");
    let ringdisk = ringdisk.kill_and_restart();
    assert_eq!(saved(&ringdisk)["throttle-groups"], json!([]));
    assert_eq!(saved(&ringdisk)["iothreads"], json!([]));
    assert_works(&ringdisk, "a");
}

/// They come back into the configuration, with other settings: a reload takes them as they are configured.
#[test]
fn thread_and_group_of_commands_can_be_configured_again() {
    let tables = "[[iothread]]\nid = \"fast\"\n[[throttle-group]]\nname = \"g\"\niops = 500\n";
    let ringdisk = start(tables);
    attach(&ringdisk, "iothreads=fast,throttle-group=g");
    configure(ringdisk.dir.path(), "");
    let ringdisk = ringdisk.kill_and_restart();
    assert_works(&ringdisk, "b");
    let tables = tables.replace("500", "700") + "[[iothread]]\nid = \"new\"\n";
    configure(ringdisk.dir.path(), &tables);
    ringdisk.json(&["reload"]);
    assert_eq!(
        saved(&ringdisk)["throttle-groups"][0]["limits"]["iops"],
        700
    );
    assert_works(&ringdisk, "b");
    let again = ringdisk.json(&["reload"]);
    assert_eq!(again["left-out"], Value::Null, "{again}");
}

/// A disk of a command and a configured one name a thread of a pool that is smaller now.
#[test]
fn smaller_pool_keeps_the_threads_that_disks_name() {
    let ringdisk = start("iothreads = 4\n---iothreads = [\"3\"]\n");
    attach(&ringdisk, "iothreads=iothread2");
    configure(
        ringdisk.dir.path(),
        "iothreads = 2\n---iothreads = [\"3\"]\n",
    );
    ringdisk.json(&["reload"]);
    let ringdisk = ringdisk.kill_and_restart();
    let check = |ringdisk: &Controlled| {
        assert_works(ringdisk, "a");
        assert_works(ringdisk, "b");
    };
    check(&ringdisk);
    configure(
        ringdisk.dir.path(),
        "iothreads = 4\n---iothreads = [\"3\"]\n",
    );
    let ringdisk = ringdisk.kill_and_restart();
    check(&ringdisk);
    assert!(saved(&ringdisk)["iothreads"] == json!([]));
}

/// Services that no disk needs, and CPUs that the host no longer has.
#[test]
fn disks_are_served_without_what_is_configured_wrongly_beside_them() {
    let ringdisk = start("");
    let wrong = "cpus = \"1000\"\nmetrics = \"192.0.2.9:9747\"\nnbd = \"192.0.2.9:10809\"\n---\
                 [[iothread]]\nid = \"t\"\ncpus = \"1001\"\n";
    configure(ringdisk.dir.path(), wrong);
    let ringdisk = ringdisk.kill_and_restart();
    assert_works(&ringdisk, "a");
    for problem in [
        "cpus: ",
        "[[iothread]] t: ",
        "192.0.2.9:9747",
        "192.0.2.9:10809",
    ] {
        ringdisk.server.wait_for_log(&[problem]);
    }
    // And each reload says so, as long as it is so.
    for _ in 0..2 {
        let said = ringdisk.json(&["reload"])["left-out"].to_string();
        for address in ["192.0.2.9:9747", "192.0.2.9:10809"] {
            assert!(said.contains(address), "{said}");
        }
    }
}
