//! What has been edited in the configuration before an upgrade: no guest is disturbed, and nothing counts as in effect that
//! is not.

use std::os::unix::net::UnixListener;

use super::*;

/// Keys of a disk that a guest or its front-end would notice, each with another value.
fn noticed() -> Vec<(&'static str, String)> {
    let text = |text: &str| format!("\"{text}\"");
    vec![
        ("socket-mode", text("0600")),
        (
            "socket-group",
            text(&rustix::process::getegid().to_string()),
        ),
        (
            "socket-owner",
            text(&rustix::process::geteuid().to_string()),
        ),
        ("cache", text("writeback")),
        ("aio", text("threads")),
        ("queues", "3".into()),
        ("queue-size", "64".into()),
        ("readonly", "true".into()),
        ("serial", text("other")),
        ("discard", text("ignore")),
        ("detect-zeroes", text("on")),
        ("rerror", text("stop")),
        ("werror", text("stop")),
        ("l2-cache-size", text("4M")),
        ("logical-block-size", text("4096")),
        ("physical-block-size", text("512")),
        ("lock", text("running")),
    ]
}

struct Disks {
    dir: PathBuf,
    keys: Vec<(&'static str, String)>,
}

impl Disks {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A disk for each key, which only the given line sets, and `more`.
    fn write(&self, line: impl Fn(&str, &str) -> String, more: &str) {
        let dir = self.dir.display();
        let mut text = format!("nbd = \"{dir}/nbd.sock\"\n");
        for (key, value) in &self.keys {
            text += &format!(
                "[[disk]]\nfile = \"{dir}/{key}.raw\"\nsocket = \"{dir}/{key}.sock\"\n{}\n",
                line(key, value)
            );
            if *key != "queues" {
                text += "queues = 2\n";
            }
        }
        fs::write(self.path("r.toml"), text + more).unwrap();
    }
}

#[test]
fn every_edited_key_of_a_disk_waits_for_a_reload() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disks = Disks {
        dir: dir.path().to_owned(),
        keys: noticed(),
    };
    for (key, _) in &disks.keys {
        fs::write(disks.path(&format!("{key}.raw")), content(0, 1 << 20)).unwrap();
    }
    let plain = |key: &str, _: &str| match key {
        "queues" => "queues = 2".to_owned(),
        _ => String::new(),
    };
    disks.write(plain, "");
    let config = format!("--config={}", disks.path("r.toml").display());
    let state = format!("--state={}", disks.path("state").display());
    let mut served = Served::start_in(dir, &[config, state], None);
    let connect = |(key, _): &(&str, String)| {
        let socket = disks.path(&format!("{key}.sock"));
        Device::connect(socket, &super::config()).unwrap()
    };
    let mut guests: Vec<_> = disks.keys.iter().map(connect).collect();
    disks.write(|key, value| format!("{key} = {value}"), "");
    // The second time, the process that hands over has itself kept the differences.
    for round in 0..2 {
        served.upgrade(&[]);
        for ((key, _), guest) in disks.keys.iter().zip(&mut guests) {
            println!("{key}, round {round}");
            let new = content(round * 100, 512);
            assert_eq!(guest.queues[1].write(3, &new), 0);
            assert_eq!(guest.queues[0].read(3, 512).unwrap(), new);
        }
        for (key, _) in &disks.keys {
            let disk = format!("disk {key}: {key} changed");
            served.first.wait_for_log(&[&disk, "ringdisk reload"]);
        }
    }
    drop(guests);
    let reloaded = served.ringdisk(&["reload"]);
    assert!(reloaded.status.success(), "{reloaded:?}");
    for (key, _) in &disks.keys {
        let disk = format!("disk {key}: its front-end is disconnected");
        assert!(served.first.log().contains(&disk), "{key}");
    }
    assert_eq!(served.disk("queues")["queues"], 3);
    let mode = fs::metadata(disks.path("socket-mode.sock")).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o600);
    // Now all is in effect, and stays so.
    let lines = served.first.log().lines().count();
    served.upgrade(&[]);
    let reloaded = served.ringdisk(&["reload"]);
    assert!(reloaded.status.success(), "{reloaded:?}");
    let log = served.first.log();
    let new = log.lines().skip(lines).collect::<Vec<_>>().join("\n");
    assert!(!new.contains("changed in the configuration"), "{new}");
    assert!(!new.contains("is disconnected"), "{new}");
    served.end();
}

/// Exports follow the configuration after an upgrade. Other keys of the NBD server need a restart, and the reload says so.
#[test]
fn edited_exports_and_new_disks_come_with_the_upgrade() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disks = Disks {
        dir: dir.path().to_owned(),
        keys: vec![("a", String::new()), ("b", String::new())],
    };
    for name in ["a.raw", "b.raw", "c.raw"] {
        fs::write(disks.path(name), content(0, 1 << 20)).unwrap();
    }
    let none = |_: &str, _: &str| String::new();
    let export = |disk: &str, more: &str| format!("[[export]]\ndisk = \"{disk}\"\n{more}\n");
    disks.write(none, &export("a", "writable = true"));
    let config = format!("--config={}", disks.path("r.toml").display());
    let mut served = Served::start_in(dir, &[config], None);
    let exports = |served: &Served| {
        let exports = served.ringdisk(&["export", "--json"]).stdout;
        let exports: Value = serde_json::from_slice(&exports).unwrap();
        let each = exports.as_array().unwrap().clone().into_iter();
        each.map(|export| (export["disk"].clone(), export["writable"].clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(exports(&served), [("a".into(), true.into())]);
    let mut guest = Device::connect(disks.path("b.sock"), &super::config()).unwrap();

    let new = format!(
        "[[disk]]\nfile = \"{0}/c.raw\"\nsocket = \"{0}/c.sock\"\n",
        disks.dir.display()
    );
    disks.write(none, &(new.clone() + &export("b", "") + &export("c", "")));
    served.upgrade(&[]);
    let expected = ["b", "c"].map(|disk| (Value::from(disk), Value::from(false)));
    support::wait_until("the exports", || exports(&served) == expected);
    assert_eq!(guest.queues[0].read(3, 512).unwrap(), content(3, 512));

    // The server stays where it is.
    let text = fs::read_to_string(disks.path("r.toml")).unwrap();
    fs::write(disks.path("r.toml"), text.replace("nbd.sock", "other.sock")).unwrap();
    served.upgrade(&[]);
    assert_eq!(exports(&served), expected);
    assert!(disks.path("nbd.sock").exists() && !disks.path("other.sock").exists());
    let reloaded = served.ringdisk(&["reload"]);
    let said = String::from_utf8_lossy(&reloaded.stdout).into_owned();
    assert!(said.contains("nbd has changed"), "{reloaded:?}");
    served.end();
}

/// A configuration of disks (name, file), each with an export called like its file, at a socket called like its file.
fn write_exported(dir: &Path, disks: &[(&str, &str)]) {
    let at = dir.display();
    let each = disks.iter().map(|(name, file)| {
        format!(
            "[[disk]]\nname = \"{name}\"\nfile = \"{at}/{file}.raw\"\nsocket = \"{at}/{file}.sock\"\nqueues = 1\n\
             [[export]]\ndisk = \"{name}\"\nname = \"x{file}\"\n"
        )
    });
    let text: String = each.collect();
    fs::write(
        dir.join("r.toml"),
        format!("nbd = \"{at}/nbd.sock\"\n{text}"),
    )
    .unwrap();
}

/// The disks that exports are of, and the files that these have.
fn exported(served: &Served) -> Vec<(String, String)> {
    let exports = served.ringdisk(&["export", "--json"]).stdout;
    let exports: Value = serde_json::from_slice(&exports).unwrap();
    let each = exports.as_array().unwrap().iter().map(|export| {
        let disk = served.disk(export["disk"].as_str().unwrap());
        let file = Path::new(disk["file"].as_str().unwrap()).file_stem();
        let name = export["name"].as_str().unwrap().to_owned();
        (name, file.unwrap().to_str().unwrap().to_owned())
    });
    let mut each: Vec<_> = each.collect();
    each.sort();
    each
}

/// Disks exchange their names: each export has the data of its own disk, before and after the reload that an upgrade leaves to do.
#[test]
fn exports_follow_disks_that_exchange_their_names() {
    for is_upgrade in [false, true] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = dir.path().to_owned();
        for name in ["a", "b"] {
            fs::write(at.join(format!("{name}.raw")), content(0, 1 << 20)).unwrap();
        }
        write_exported(&at, &[("one", "a"), ("two", "b")]);
        let config = format!("--config={}", at.join("r.toml").display());
        let mut served = Served::start_in(dir, &[config], None);
        let expected = ["a", "b"].map(|file| (format!("x{file}"), file.to_owned()));
        assert_eq!(exported(&served), expected);
        write_exported(&at, &[("two", "a"), ("one", "b")]);
        if is_upgrade {
            served.upgrade(&[]);
            let wait = || served.ringdisk(&["reload", "--json"]);
            assert_eq!(exported(&served), expected);
            assert!(wait().status.success());
        } else {
            assert!(served.ringdisk(&["reload"]).status.success());
        }
        assert_eq!(exported(&served), expected);
        served.end();
    }
}

/// A disk is attached for a VM, and another one configured with its name and its socket: a reload refuses that, and an upgrade leaves
/// the VM its disk, and its exports. When the attached one has ended, a reload serves the other.
#[test]
fn an_upgrade_leaves_attached_disks_to_their_vms() {
    for same_name in [true, false] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = dir.path().to_owned();
        for (seed, name) in ["a", "b", "c"].into_iter().enumerate() {
            fs::write(
                at.join(format!("{name}.raw")),
                content(seed as u64, 1 << 20),
            )
            .unwrap();
        }
        write_exported(&at, &[("one", "a")]);
        let arguments = [
            format!("--config={}", at.join("r.toml").display()),
            format!("--state={}", at.join("state").display()),
        ];
        let mut served = Served::start_in(dir, &arguments, None);
        let disk = format!("{0}/b.raw,name=vm,socket={0}/c.sock,queues=2", at.display());
        assert!(served.ringdisk(&["attach", &disk]).status.success());
        let mut guest = Device::connect(at.join("c.sock"), &super::config()).unwrap();
        write_exported(
            &at,
            &[("one", "a"), (if same_name { "vm" } else { "other" }, "c")],
        );
        assert!(!served.ringdisk(&["reload"]).status.success());
        served.upgrade(&[]);
        for _ in 0..2 {
            assert_eq!(guest.queues[0].read(0, 512).unwrap(), content(1, 512));
            assert_eq!(exported(&served), [("xa".into(), "a".into())]);
            assert!(!served.ringdisk(&["reload"]).status.success());
        }
        drop(guest);
        assert!(
            served
                .ringdisk(&["detach", "vm", "--force"])
                .status
                .success()
        );
        assert!(served.ringdisk(&["reload"]).status.success());
        let expected = ["a", "c"].map(|file| (format!("x{file}"), file.to_owned()));
        assert_eq!(exported(&served), expected);
        served.end();
    }
}

/// A configured disk gets the name or the socket of an attached one: an upgrade takes neither from its VM.
#[test]
fn an_upgrade_leaves_disks_whose_names_collide_to_their_vms() {
    for collides in ["name", "socket", "both"] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = dir.path().to_owned();
        for (seed, name) in ["a", "b"].into_iter().enumerate() {
            fs::write(
                at.join(format!("{name}.raw")),
                content(seed as u64, 1 << 20),
            )
            .unwrap();
        }
        let write = |name: &str, socket: &str| {
            let at = at.display();
            let text = format!(
                "nbd = \"{at}/nbd.sock\"\n[[disk]]\nname = \"{name}\"\nfile = \"{at}/a.raw\"\nsocket = \"{at}/{socket}.sock\"\n\
                 queues = 2\n[[export]]\ndisk = \"{name}\"\nname = \"xa\"\n"
            );
            fs::write(format!("{at}/r.toml"), text).unwrap();
        };
        write("one", "a");
        let arguments = [
            format!("--config={}", at.join("r.toml").display()),
            format!("--state={}", at.join("state").display()),
        ];
        let mut served = Served::start_in(dir, &arguments, None);
        let disk = format!("{0}/b.raw,name=vm,socket={0}/b.sock,queues=2", at.display());
        assert!(served.ringdisk(&["attach", &disk]).status.success());
        let connect = |name: &str| Device::connect(at.join(name), &super::config()).unwrap();
        let mut guests = ["a.sock", "b.sock"].map(connect);
        let [name, socket] = ["name", "socket"].map(|it| collides == it || collides == "both");
        write(
            if name { "vm" } else { "one" },
            if socket { "b" } else { "a" },
        );
        assert!(!served.ringdisk(&["reload"]).status.success());
        for _ in 0..2 {
            served.upgrade(&[]);
            for (seed, guest) in guests.iter_mut().enumerate() {
                let read = guest.queues[0].read(0, 512).unwrap();
                assert_eq!(read, content(seed as u64, 512), "{collides}");
            }
            assert_eq!(exported(&served), [("xa".into(), "a".into())]);
        }
        write("one", "a");
        assert!(served.ringdisk(&["reload"]).status.success());
        for (seed, guest) in guests.iter_mut().enumerate() {
            let read = guest.queues[0].read(0, 512).unwrap();
            assert_eq!(read, content(seed as u64, 512), "{collides}");
        }
        served.end();
    }
}

/// The control socket has another path in the configuration: after the upgrade, the next one goes there.
#[test]
fn an_edited_control_socket_is_that_of_the_next_upgrade() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("a.raw"), content(0, 1 << 20)).unwrap();
    let write = |control: &str| {
        let text = format!(
            "control = {:?}\n[[disk]]\nfile = {:?}\nsocket = {:?}\n",
            path(control),
            path("a.raw"),
            path("a.sock")
        );
        fs::write(path("r.toml"), text).unwrap();
    };
    write("c.qmp");
    let config = format!("--config={}", path("r.toml").display());
    let binary = env!("CARGO_BIN_EXE_ringdisk");
    let _first = Server::ringdisk(binary, &[config]).unwrap();
    let mut guest = Device::connect(path("a.sock"), &super::config()).unwrap();
    write("n.qmp");
    // A process that was killed has left it.
    drop(UnixListener::bind(path("n.qmp.upgrade")).unwrap());
    let mut pid = 0;
    for control in ["c.qmp", "n.qmp", "n.qmp"] {
        let mut upgrade = Command::new(binary);
        upgrade.args(["upgrade", "--json", "--control"]);
        let output = upgrade.arg(path(control)).output().unwrap();
        assert!(output.status.success(), "{control}: {output:?}");
        let outcome: Value = serde_json::from_slice(&output.stdout).unwrap();
        pid = outcome["pid"].as_i64().unwrap() as i32;
        assert_eq!(guest.queues[0].read(0, 512).unwrap(), content(0, 512));
    }
    kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
}
