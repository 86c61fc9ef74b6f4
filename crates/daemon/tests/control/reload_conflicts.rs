//! A reload is judged by its final result: disks may swap files, and an impossible configuration is refused as a whole,
//! before any front-end is disconnected.

use std::fs;
use std::path::PathBuf;

use rustix::process::Signal;
use testkit::driver::{Device, DeviceConfig};

use super::host_cpus::kill;
use super::server::{Controlled, rewrite};
use crate::support::wait_until;
use crate::support::{content, serve_all};

const MIB: u64 = 1 << 20;

/// Name, file and socket of a disk, and more lines.
type Disk<'a> = (&'a str, &'a str, &'a str, &'a str);

struct Configured {
    ringdisk: Controlled,
    devices: Vec<Device>,
}

impl Configured {
    /// Disks a, b and c, on a.raw, b.raw and c.raw, at a.sock, b.sock and c.sock, each with a front-end. Every file has its
    /// own first sector.
    fn start(more: &[String]) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for name in ["a", "b", "c", "free"] {
            let mut bytes = content(0, 16 * MIB as usize);
            bytes[16000 * 512..16001 * 512].fill(name.as_bytes()[0]);
            fs::write(dir.path().join(format!("{name}.raw")), bytes).unwrap();
        }
        let path = dir.path().join("config.toml");
        fs::write(&path, text(dir.path(), &AS_STARTED)).unwrap();
        let config = format!("--config={}", path.display());
        let ringdisk = Controlled::start_in(dir, &[&[config][..], more].concat());
        let mut configured = Self {
            ringdisk,
            devices: Vec::new(),
        };
        configured.devices = ["a", "b", "c"].map(|name| configured.connect(name)).into();
        configured
    }

    fn path(&self, name: &str) -> PathBuf {
        self.ringdisk.path(name)
    }

    fn connect(&self, socket: &str) -> Device {
        let path = self.path(&format!("{socket}.sock"));
        Device::connect(path, &DeviceConfig::default()).unwrap()
    }

    fn write(&self, disks: &[Disk<'_>]) {
        let text = text(self.ringdisk.dir.path(), disks);
        fs::write(self.path("config.toml"), text).unwrap();
    }

    fn reload(&self, disks: &[Disk<'_>]) {
        self.write(disks);
        self.ringdisk.json(&["reload"]);
    }

    /// A configuration that is refused with these words, by command and by signal, while no front-end notices anything.
    fn refuses(&mut self, disks: &[Disk<'_>], words: &[&str]) {
        self.write(disks);
        let before = self.ringdisk.json(&["list"]);
        for _ in 0..2 {
            let refused = self.ringdisk.ringdisk(&["reload"]);
            refused.assert_fails(1, &[&["nothing has been changed"], words].concat());
            let refusals = || {
                let log = self.ringdisk.server.log();
                log.matches("nothing has been changed").count()
            };
            let so_far = refusals();
            self.ringdisk.server.signal(Signal::HUP);
            wait_until("the refusal", || refusals() > so_far);
        }
        assert_eq!(self.ringdisk.json(&["list"]), before);
        for device in &mut self.devices {
            rewrite(&mut device.queues[0]);
        }
        let log = self.ringdisk.server.log();
        assert!(!log.contains("is disconnected"), "{log}");
        // The refused configuration leaves no files.
        let mut left = fs::read_dir(self.ringdisk.dir.path()).unwrap();
        assert!(!left.any(|file| {
            file.unwrap()
                .file_name()
                .to_string_lossy()
                .ends_with(".new")
        }));
    }

    /// Expects to read the file of this name at each socket.
    #[track_caller]
    fn assert_finds(&self, sockets: &[(&str, &str)]) {
        for (socket, file) in sockets {
            let mut device = self.connect(socket);
            let there = device.queues[0].read(16000, 512).unwrap();
            let right = file.as_bytes()[0];
            assert_eq!(
                there,
                [right; 512],
                "{socket} is on {}",
                char::from(there[0])
            );
        }
    }
}

const AS_STARTED: [Disk<'_>; 3] = [
    ("a", "a", "a", ""),
    ("b", "b", "b", ""),
    ("c", "c", "c", ""),
];

fn text(dir: &std::path::Path, disks: &[Disk<'_>]) -> String {
    let at = dir.display();
    let disks = disks.iter().map(|(name, file, socket, more)| {
        format!(
            "[[disk]]\nname = \"{name}\"\nfile = \"{at}/{file}.raw\"\nsocket = \"{at}/{socket}.sock\"\n{more}\n"
        )
    });
    disks.collect()
}

/// A configuration with a valid final result is applied even if no order of single steps would allow it.
#[test]
fn disks_swap_files() {
    let mut served = Configured::start(&[]);
    let stays = |served: &mut Configured, device: usize| {
        rewrite(&mut served.devices[device].queues[0]);
    };
    println!("sockets");
    served.reload(&[
        ("a", "a", "b", ""),
        ("b", "b", "a", ""),
        ("c", "c", "c", ""),
    ]);
    served.assert_finds(&[("b", "a"), ("a", "b")]);
    stays(&mut served, 2);
    println!("names");
    served.reload(&[
        ("b", "a", "b", ""),
        ("a", "b", "a", ""),
        ("c", "c", "c", ""),
    ]);
    served.assert_finds(&[("b", "a"), ("a", "b")]);
    assert_eq!(
        served.ringdisk.disk("a")["file"],
        served.path("b.raw").to_str().unwrap()
    );
    println!("files and all else");
    let more = "queues = 1";
    served.reload(&[
        ("a", "a", "a", more),
        ("b", "b", "b", more),
        ("c", "c", "c", ""),
    ]);
    served.assert_finds(&[("a", "a"), ("b", "b")]);
    println!("names, in a row");
    served.reload(&[
        ("b", "a", "a", ""),
        ("x", "b", "b", ""),
        ("c", "c", "c", ""),
    ]);
    served.assert_finds(&[("a", "a"), ("b", "b")]);
    stays(&mut served, 2);
    println!("a file that another leaves while its VM runs");
    served.reload(&[
        ("b", "a", "a", ""),
        ("x", "c", "b", ""),
        ("c", "free", "c", ""),
    ]);
    served.assert_finds(&[("b", "c")]);
    let there = served.devices[2].queues[0].read(16000, 512).unwrap();
    assert_eq!(there, [b'f'; 512]);
    println!("everything anew");
    served.reload(&[
        ("a", "c", "c", ""),
        ("b", "free", "b", ""),
        ("z", "a", "a", ""),
    ]);
    served.assert_finds(&[("c", "c"), ("b", "free"), ("a", "a")]);
    let log = served.ringdisk.server.log();
    assert!(!log.contains("ERROR"), "{log}");
}

/// A VM does not go on with the data of another one, whatever else changes of that one's disk.
#[test]
fn no_disk_moves_to_the_file_of_one_that_ends() {
    let mut served = Configured::start(&[]);
    let c = ("c", "c", "c", "");
    for disks in [
        [("x", "b", "a", ""), ("b", "a", "b", ""), c],
        [("a", "b", "free", ""), ("b", "a", "b", ""), c],
        [("a", "b", "a", "serial = \"x\""), ("b", "a", "b", ""), c],
        [
            ("a", "b", "a", "serial = \"x\""),
            ("b", "c", "b", ""),
            ("c", "a", "c", ""),
        ],
    ] {
        served.refuses(&disks, &["cannot move to the file of disk 'a'"]);
    }
}

/// An upgrade ends no disk whose file is another's now: that is refused, and nobody notices.
#[test]
fn an_upgrade_gives_no_disk_to_another_vm() {
    let mut served = Configured::start(&[]);
    let c = ("c", "c", "c", "");
    for disks in [
        &[("a", "b", "a", ""), c][..],
        &[("a", "b", "b", ""), c],
        &[("a", "b", "b", ""), ("b", "c", "c", "")],
    ] {
        served.write(disks);
        let refused = served.ringdisk.ringdisk(&["upgrade"]);
        refused.assert_fails(1, &["continues to serve", "'ringdisk reload' first"]);
        for device in &mut served.devices {
            rewrite(&mut device.queues[0]);
        }
    }
    // Only a name.
    served.write(&[("d", "a", "a", ""), ("b", "b", "b", ""), c]);
    let upgraded = served.ringdisk.json(&["upgrade"]);
    for device in &mut served.devices {
        rewrite(&mut device.queues[0]);
    }
    kill(&upgraded);
}

/// Changes of disk a that would disconnect its front-end if they were possible, with words of the error.
const IMPOSSIBLE: &[(Disk<'static>, &[&str])] = &[
    (("a", "a", "directory", ""), &["disk 'a'", "directory.sock"]),
    (("a", "a", "missing/a", ""), &["disk 'a'", "missing"]),
    (
        ("a", "missing", "a", "queues = 1"),
        &["disk 'a'", "missing.raw"],
    ),
    (
        ("a", "directory", "a", "queues = 1"),
        &["disk 'a'", "directory.raw"],
    ),
    (
        ("a", "empty", "a", "queues = 1"),
        &["disk 'a'", "empty.raw"],
    ),
    (("a", "odd", "a", "queues = 1"), &["disk 'a'", "odd.raw"]),
    (
        ("a", "b", "a", "queues = 1"),
        &["disk 'a'", "b.raw", "disk 'b'"],
    ),
    (
        ("a", "link", "a", "queues = 1"),
        &["disk 'a'", "link.raw", "disk 'b'"],
    ),
    (
        ("a", "a", "a", "aio = \"native\"\ncache = \"writeback\""),
        &["disk 'a'", "a.raw"],
    ),
    (("a", "missing", "a", ""), &["disk 'a'", "missing.raw"]),
    (("a", "b", "a", ""), &["disk 'a'", "b.raw", "disk 'b'"]),
];

#[test]
fn impossible_configuration_disconnects_nobody() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    fs::write(path("held.raw"), content(0, 16 * MIB as usize)).unwrap();
    let _other = serve_all(&[
        format!("{},socket={}", path("held.raw"), path("held.sock")),
        "--sandbox=off".into(),
    ]);
    fs::write(path("mine.raw"), content(0, 16 * MIB as usize)).unwrap();
    let more = [
        format!("{},socket={}", path("mine.raw"), path("mine.sock")),
        format!("--allow-dir={}", dir.path().display()),
    ];
    let mut served = Configured::start(&more);
    let there = served.ringdisk.dir.path().to_owned();
    let out = |name: &str| {
        let up = there.parent().unwrap();
        let below = dir.path().strip_prefix(up).unwrap();
        format!("../{}/{name}", below.display())
    };
    let [_, b, c] = AS_STARTED;
    fs::create_dir(served.path("directory.sock")).unwrap();
    fs::create_dir(served.path("directory.raw")).unwrap();
    fs::write(served.path("empty.raw"), b"").unwrap();
    fs::write(served.path("odd.raw"), vec![0; 513]).unwrap();
    fs::hard_link(served.path("b.raw"), served.path("link.raw")).unwrap();

    for (disk, words) in IMPOSSIBLE {
        println!("{disk:?}");
        served.refuses(&[*disk, b, c], words);
    }
    println!("a file and a socket of another process");
    let held = out("held");
    served.refuses(
        &[("a", &held, "a", "queues = 1"), b, c],
        &["held.raw", "another process"],
    );
    served.refuses(&[("a", "a", &held, ""), b, c], &["disk 'a'", "held.sock"]);
    println!("files of the command line's disks");
    let mine = out("mine");
    served.refuses(
        &[("a", &mine, "a", "queues = 1"), b, c],
        &["mine.raw", "'mine'"],
    );
    served.refuses(&[("a", "a", &mine, ""), b, c], &["'mine'", "mine.sock"]);
    served.refuses(&[("mine", "a", "a", ""), b, c], &["'mine' already"]);
    println!("a possible change beside an impossible one");
    served.refuses(
        &[
            ("a", "a", "b", ""),
            ("b", "b", "a", ""),
            ("c", "missing", "c", "queues = 1"),
        ],
        &["disk 'c'", "missing.raw"],
    );
    println!("two running disks that would swap files");
    served.refuses(
        &[("a", "b", "a", ""), ("b", "a", "b", ""), c],
        &["'a'", "'b'", "exchange files"],
    );
    println!("a renamed file");
    fs::rename(served.path("a.raw"), served.path("renamed.raw")).unwrap();
    let moved = ("a", "a", "a", "queues = 1");
    served.refuses(
        &[moved, b, c],
        &["disk 'a'", "a.raw", "renamed.raw", "which is now at"],
    );
    fs::copy(served.path("renamed.raw"), served.path("a.raw")).unwrap();
    served.refuses(
        &[moved, b, c],
        &[
            "disk 'a'",
            "no longer the disk's file",
            "renamed.raw",
            "which is now at",
        ],
    );
    served.reload(&[("a", "renamed", "a", ""), b, c]);
    rewrite(&mut served.devices[0].queues[0]);
}

/// A disk was attached for one VM, and then another is configured with its name for another VM: the first keeps its disk, whether
/// that can be served or not, and through a restart. The configured one is served when it has a name of its own.
#[test]
fn attached_disk_keeps_its_name() {
    let state = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut served = Configured::start(&[format!("--state={}", state.path().display())]);
    fs::copy(served.path("c.raw"), served.path("x.raw")).unwrap();
    let socket = served.path("d.sock").display().to_string();
    let attach = format!("free.raw,name=d,socket={socket}");
    served.ringdisk.json(&["attach", &attach]);
    let [a, b, c] = AS_STARTED;
    let with_name = [a, b, c, ("d", "x", "e", "")];
    let words = ["a disk 'd' already"];
    served.refuses(&with_name, &words);

    let [there, away] = ["free.raw", "away.raw"].map(|name| served.path(name));
    fs::rename(&there, &away).unwrap();
    served.write(&AS_STARTED);
    served.devices.clear();
    let restart = |served: Configured| Configured {
        ringdisk: served.ringdisk.kill_and_restart(),
        devices: Vec::new(),
    };
    served = restart(served);
    served.refuses(&with_name, &words);
    fs::rename(&away, &there).unwrap();
    for _ in 0..2 {
        served = restart(served);
        served.assert_finds(&[("a", "a"), ("d", "free")]);
        assert!(!served.path("e.sock").exists());
        let log = served.ringdisk.server.log();
        let told = "disk d: is not served as it is configured";
        assert!(log.contains(told), "{log}");
        served.devices = vec![served.connect("d")];
        served.refuses(&with_name, &words);
        served.devices.clear();
    }
    served.devices = vec![served.connect("d")];
    // Another name, or none, is no reason to take it from its VM.
    served.reload(&AS_STARTED);
    rewrite(&mut served.devices[0].queues[0]);
    served.reload(&[a, b, c, ("e", "x", "e", "")]);
    rewrite(&mut served.devices[0].queues[0]);
    served.assert_finds(&[("e", "c")]);
    served.devices.clear();
    served = restart(served);
    served.assert_finds(&[("d", "free"), ("e", "c")]);
}

/// An attached disk is configured, under its own or another name, perhaps by another path: after a start it is one disk, which a
/// reload may move and restart, and which the next start serves as well. What else commands have made of a configured disk is no
/// reason to leave it out.
#[test]
fn attached_disk_can_be_configured() {
    for (name, file) in [("d", "free"), ("d", "link"), ("db", "free"), ("db", "link")] {
        let state = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut served = Configured::start(&[format!("--state={}", state.path().display())]);
        let at = |name: &str| served.path(name).display().to_string();
        std::os::unix::fs::symlink(at("free.raw"), at("link.raw")).unwrap();
        let disk = format!("free.raw,name=d,socket={}", at("d.sock"));
        served.ringdisk.json(&["attach", &disk]);
        let [a, b, c] = AS_STARTED;
        let mut disks = [a, b, c, (name, file, "d", "")];
        served.write(&disks);
        served.devices.clear();
        let restart = |served: Configured| Configured {
            ringdisk: served.ringdisk.kill_and_restart(),
            devices: Vec::new(),
        };
        for _ in 0..2 {
            served = restart(served);
            served.assert_finds(&[("d", "free"), ("a", "a")]);
            let list = served.ringdisk.json(&["list"]);
            assert_eq!(list.as_array().unwrap().len(), 4, "{list}");
            let log = served.ringdisk.server.log();
            assert!(!log.contains("is not served"), "{log}");
        }
        disks[3].3 = "queues = 3";
        served.reload(&disks);
        fs::copy(served.path("free.raw"), served.path("moved.raw")).unwrap();
        disks[3].1 = "moved";
        served.reload(&disks);
        served = restart(served);
        served.assert_finds(&[("d", "free"), ("a", "a")]);
        assert_eq!(
            served.ringdisk.disk(name)["file"],
            served.path("moved.raw").display().to_string()
        );
    }
}

/// The name of a configured disk that is absent is not that of an attached one of another VM, which would get its exports.
#[test]
fn absent_disk_keeps_its_name() {
    let mut served = Configured::start(&[]);
    served.devices.clear();
    let [a, b, c] = AS_STARTED;
    let missing = [a, b, c, ("m", "missing", "m", "")];
    served.write(&missing);
    served = Configured {
        ringdisk: served.ringdisk.kill_and_restart(),
        devices: Vec::new(),
    };
    assert_eq!(served.ringdisk.disk("m")["storage"], "absent");
    let other = format!("free.raw,name=m,socket={}", served.path("o.sock").display());
    let refused = served.ringdisk.ringdisk(&["attach", &other]);
    refused.assert_fails(1, &["a disk 'm' already", "absent"]);
}
