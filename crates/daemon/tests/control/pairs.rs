//! Any two commands about a disk that run at the same time do what they do one after the other, in one of the two orders.
//!
//! The reference is ringdisk itself: each pair runs in both orders first, on disks of its own.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig};

use super::server::Controlled;

const DISK_BYTES: u64 = 1 << 20;

/// How much later than the first command the second one begins, in both orders: from before the first has looked at the disk
/// until after it has ended.
const DELAYS_US: [u64; 6] = [0, 300, 800, 1500, 3000, 6000];

/// What changes a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// The configuration has another value that needs a restart.
    ReloadRestart,
    ReloadLimits,
    ReloadMove,
    ReloadRemove,
    Replace,
    Throttle,
    Resize,
    Detach,
    DetachByForce,
    Attach,
    AddBitmap,
    BeginBackup,
    EndBackup,
    CancelBackup,
    Export,
    Unexport,
    /// Another disk takes what this one has, which is refused unless it is free.
    TakeFile,
    TakeSocket,
    TakeExportName,
    DeleteGroup,
}

impl Change {
    const ALL: [Self; 20] = [
        Self::ReloadRestart,
        Self::ReloadLimits,
        Self::ReloadMove,
        Self::ReloadRemove,
        Self::Replace,
        Self::Throttle,
        Self::Resize,
        Self::Detach,
        Self::DetachByForce,
        Self::Attach,
        Self::AddBitmap,
        Self::BeginBackup,
        Self::EndBackup,
        Self::CancelBackup,
        Self::Export,
        Self::Unexport,
        Self::TakeFile,
        Self::TakeSocket,
        Self::TakeExportName,
        Self::DeleteGroup,
    ];

    fn is_reload(self) -> bool {
        (self as usize) < 4
    }

    /// The disk in the configuration that this change applies.
    fn configured(self, dir: &Path, disk: &str) -> String {
        let group = format!("[[throttle-group]]\nname = \"{disk}-g\"\niops = 9000\n");
        let other = format!("file = \"{}\"\n", file(dir, disk, "other"));
        let (file, more) = match self {
            Self::ReloadRemove => return group,
            Self::ReloadMove => (other, ""),
            Self::ReloadRestart => (own_file(dir, disk), "cache = \"writeback\"\n"),
            Self::ReloadLimits => (own_file(dir, disk), "cache = \"none\"\niops = 5000\n"),
            _ => (own_file(dir, disk), "cache = \"none\"\n"),
        };
        let more = if self == Self::ReloadMove {
            "cache = \"none\"\n"
        } else {
            more
        };
        let socket = dir.join(format!("{disk}.sock"));
        format!(
            "{group}[[disk]]\nname = \"{disk}\"\nsocket = \"{}\"\nthrottle-group = \"{disk}-g\"\n{file}{more}",
            socket.display()
        )
    }

    /// What must be there first.
    fn needs(self) -> Option<Self> {
        match self {
            Self::EndBackup | Self::CancelBackup => Some(Self::BeginBackup),
            Self::Unexport | Self::TakeExportName => Some(Self::Export),
            _ => None,
        }
    }

    fn command(self, dir: &Path, disk: &str) -> Value {
        let (name, arguments) = match self {
            Self::ReloadRestart | Self::ReloadLimits | Self::ReloadMove | Self::ReloadRemove => {
                ("x-ringdisk-reload", json!({}))
            }
            Self::Replace => (
                "x-ringdisk-replace",
                json!({ "id": disk, "file": file(dir, disk, "third") }),
            ),
            Self::Throttle => (
                "block_set_io_throttle",
                json!({ "id": disk, "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 7000, "iops_rd": 0, "iops_wr": 0 }),
            ),
            Self::Resize => (
                "x-ringdisk-resize",
                json!({ "id": disk, "size": 2 * DISK_BYTES }),
            ),
            Self::Detach => ("x-ringdisk-detach", json!({ "id": disk })),
            Self::DetachByForce => ("x-ringdisk-detach", json!({ "id": disk, "force": true })),
            Self::Attach => {
                let spec = format!(
                    "{},name={disk},socket={},cache=none",
                    file(dir, disk, "own"),
                    dir.join(format!("{disk}.sock")).display()
                );
                ("x-ringdisk-attach", json!({ "disk": spec }))
            }
            Self::TakeFile => {
                let spec = format!("{},name={disk}-o", file(dir, disk, "own"));
                let socket = dir.join(format!("{disk}-o.sock"));
                let spec = format!("{spec},socket={}", socket.display());
                ("x-ringdisk-attach", json!({ "disk": spec }))
            }
            Self::TakeSocket => {
                let spec = format!("{},name={disk}-s", file(dir, disk, "fourth"));
                let socket = dir.join(format!("{disk}.sock"));
                let spec = format!("{spec},socket={}", socket.display());
                ("x-ringdisk-attach", json!({ "disk": spec }))
            }
            Self::TakeExportName => (
                "block-export-add",
                json!({ "type": "nbd", "id": format!("{disk}-y"), "node-name": "null", "name": format!("{disk}-x") }),
            ),
            Self::DeleteGroup => ("object-del", json!({ "id": format!("{disk}-g") })),
            Self::AddBitmap => (
                "block-dirty-bitmap-add",
                json!({ "node": disk, "name": "m" }),
            ),
            Self::BeginBackup => (
                "backup-access-setup",
                json!({ "target-id": format!("{disk}-b"), "devices": [
                    { "device": disk, "bitmap-mode": "new", "bitmap-name": "nightly" }] }),
            ),
            Self::EndBackup | Self::CancelBackup => (
                "backup-access-teardown",
                json!({ "target-id": format!("{disk}-b"), "success": self == Self::EndBackup }),
            ),
            Self::Export => (
                "block-export-add",
                json!({ "type": "nbd", "id": format!("{disk}-x"), "node-name": disk, "name": format!("{disk}-x") }),
            ),
            Self::Unexport => (
                "block-export-del",
                json!({ "id": format!("{disk}-x"), "mode": "hard" }),
            ),
        };
        json!({ "execute": name, "arguments": arguments })
    }
}

fn file(dir: &Path, disk: &str, which: &str) -> String {
    dir.join(format!("{disk}-{which}.raw"))
        .display()
        .to_string()
}

fn own_file(dir: &Path, disk: &str) -> String {
    format!("file = \"{}\"\n", file(dir, disk, "own"))
}

/// A client of the control socket.
struct Client(BufReader<UnixStream>);

impl Client {
    fn connect(ringdisk: &Controlled) -> Self {
        let mut client = Self(BufReader::new(
            UnixStream::connect(&ringdisk.control).unwrap(),
        ));
        client.line();
        client
            .run(&json!({ "execute": "qmp_capabilities" }))
            .unwrap();
        client
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn run(&mut self, command: &Value) -> Result<Value, String> {
        (self.0.get_mut())
            .write_all(format!("{command}\n").as_bytes())
            .unwrap();
        loop {
            let mut reply = self.line();
            if reply["event"].is_null() {
                return match reply["return"].take() {
                    Value::Null => Err(reply["error"]["desc"].to_string()),
                    value => Ok(value),
                };
            }
        }
    }

    fn query(&mut self, command: &str) -> Value {
        self.run(&json!({ "execute": command })).unwrap()
    }
}

struct Setup {
    ringdisk: Controlled,
    disks: u32,
}

/// Which of two commands have succeeded, and what the disk is after both.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Outcome {
    succeeded: [bool; 2],
    disk: String,
}

impl Setup {
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let config = dir.path().join("r.toml");
        let setup = Self::config(dir.path(), "");
        fs::write(&config, setup).unwrap();
        let config = format!("--config={}", config.display());
        let null = format!(
            "null:1M,name=null,socket={}",
            dir.path().join("null.sock").display()
        );
        Self {
            ringdisk: Controlled::start_in(dir, &[config, null]),
            disks: 0,
        }
    }

    fn config(dir: &Path, disk: &str) -> String {
        let nbd = dir.join("nbd.sock");
        let (nbd, dir) = (nbd.display(), dir.display());
        format!("nbd = \"{nbd}\"\nallow-dir = [\"{dir}\"]\n{disk}")
    }

    fn configure(&self, disk: &str) {
        let text = Self::config(self.ringdisk.dir.path(), disk);
        fs::write(self.ringdisk.path("r.toml"), text).unwrap();
    }

    /// A new disk, with what the commands need, and the configuration that they apply.
    fn disk(
        &mut self,
        pair: [Change; 2],
        has_guest: bool,
        client: &mut Client,
    ) -> (String, Option<Device>) {
        self.disks += 1;
        let dir = self.ringdisk.dir.path().to_owned();
        let disk = format!("d{:05}", self.disks);
        for which in ["own", "other", "third", "fourth"] {
            let file = fs::File::create(file(&dir, &disk, which)).unwrap();
            file.set_len(DISK_BYTES).unwrap();
        }
        // Changes that need no reload leave the configuration as it is.
        self.configure(&Change::Throttle.configured(&dir, &disk));
        client.query("x-ringdisk-reload");
        let needs: Vec<_> = pair.iter().filter_map(|change| change.needs()).collect();
        if let Some(&first) = needs.first() {
            client.run(&first.command(&dir, &disk)).unwrap();
        }
        if let Some(second) = needs.get(1).filter(|second| **second != needs[0]) {
            client.run(&second.command(&dir, &disk)).unwrap();
        }
        if let Some(reload) = pair.iter().find(|change| change.is_reload()) {
            self.configure(&reload.configured(&dir, &disk));
        }
        // A restart has a connection to end.
        let guest = has_guest.then(|| {
            let socket = dir.join(format!("{disk}.sock"));
            Device::connect(socket, &DeviceConfig::default()).unwrap()
        });
        (disk, guest)
    }

    /// What a disk is, and what depends on it.
    fn look(&self, disk: &str, client: &mut Client) -> String {
        let is_of = |value: &Value, keys: &[&str]| {
            let mut names = keys.iter().filter_map(|key| value[key].as_str());
            names.any(|name| name.starts_with(disk))
        };
        let mut found = Vec::new();
        for (command, keys) in [
            ("query-named-block-nodes", &["node-name"][..]),
            ("query-block-exports", &["id", "node-name"]),
            ("x-ringdisk-backups", &["id"]),
        ] {
            let all = client.query(command);
            let its = all.as_array().unwrap().iter();
            found.extend(its.filter(|value| is_of(value, keys)).cloned());
        }
        for node in &mut found {
            let Some(node) = node.as_object_mut() else {
                continue;
            };
            // The bytes that a backup needs, and the time for which guests were held, do not depend on the order.
            let volatile = |key: &str| ["held-us", "memory", "file"].contains(&key);
            node.retain(|key, value| !volatile(key) || !value.is_number());
            for bitmap in node
                .get_mut("dirty-bitmaps")
                .and_then(Value::as_array_mut)
                .into_iter()
                .flatten()
            {
                let bitmap = bitmap.as_object_mut().unwrap();
                bitmap.retain(|key, _| ["name", "persistent", "recording"].contains(&key.as_str()));
            }
            for device in node
                .get_mut("devices")
                .and_then(Value::as_array_mut)
                .into_iter()
                .flatten()
            {
                device
                    .as_object_mut()
                    .unwrap()
                    .remove("x-ringdisk-checkpoint");
            }
            if let Some(image) = node.get_mut("image").and_then(Value::as_object_mut) {
                image.remove("actual-size");
            }
        }
        json!(found).to_string().replace(disk, "DISK")
    }

    fn clean_up(&self, disk: &str, client: &mut Client) {
        let dir = self.ringdisk.dir.path();
        for change in [Change::CancelBackup, Change::Unexport] {
            let _ = client.run(&change.command(dir, disk));
        }
        let other = json!({ "id": format!("{disk}-y"), "mode": "hard" });
        let _ = client.run(&json!({ "execute": "block-export-del", "arguments": other }));
        for disk in ["", "-o", "-s"].map(|other| format!("{disk}{other}")) {
            let _ = client.run(&Change::DetachByForce.command(dir, &disk));
        }
        self.configure("");
        client.query("x-ringdisk-reload");
        for which in ["own", "other", "third", "fourth"] {
            let _ = fs::remove_file(file(dir, disk, which));
        }
    }

    /// Runs a pair, the second so much after the first; or after the first has ended.
    fn run(
        &mut self,
        pair: [Change; 2],
        delay: Option<Duration>,
        has_guest: bool,
    ) -> (Outcome, [Result<Value, String>; 2]) {
        let mut clients = [(); 2].map(|()| Client::connect(&self.ringdisk));
        let (disk, guest) = self.disk(pair, has_guest, &mut clients[0]);
        let dir = self.ringdisk.dir.path().to_owned();
        let [first, second] = pair.map(|change| change.command(&dir, &disk));
        let [one, other] = &mut clients;
        let replies = match delay {
            None => [one.run(&first), other.run(&second)],
            Some(delay) => thread::scope(|scope| {
                let first = scope.spawn(|| one.run(&first));
                thread::sleep(delay);
                let second = other.run(&second);
                [first.join().unwrap(), second]
            }),
        };
        let outcome = Outcome {
            succeeded: [replies[0].is_ok(), replies[1].is_ok()],
            disk: self.look(&disk, &mut clients[0]),
        };
        drop(guest);
        self.clean_up(&disk, &mut clients[0]);
        (outcome, replies)
    }
}

/// The outcome as if the commands had been named in the other order.
fn swapped(outcome: Outcome) -> Outcome {
    let [second, first] = outcome.succeeded;
    Outcome {
        succeeded: [first, second],
        ..outcome
    }
}

#[test]
fn two_commands_at_once_do_what_they_do_one_after_the_other() {
    let mut setup = Setup::new();
    let mut wrong = Vec::new();
    for (i, &first) in Change::ALL.iter().enumerate() {
        for &second in &Change::ALL[i..] {
            // There is one configuration.
            if first != second && first.is_reload() && second.is_reload() {
                continue;
            }
            // With a guest and without.
            let mut references = Vec::new();
            for has_guest in [false, true] {
                references.push(setup.run([first, second], None, has_guest).0);
                references.push(swapped(setup.run([second, first], None, has_guest).0));
            }
            references.dedup();
            for (i, delay) in DELAYS_US.map(Duration::from_micros).into_iter().enumerate() {
                for (pair, is_swapped) in [([first, second], false), ([second, first], true)] {
                    let (outcome, replies) = setup.run(pair, Some(delay), i % 2 == 0);
                    let outcome = if is_swapped {
                        swapped(outcome)
                    } else {
                        outcome
                    };
                    if !references.contains(&outcome) {
                        wrong.push(format!(
                            "{pair:?} after {delay:?}: {replies:?}\n  {outcome:?}\n  instead of {references:?}"
                        ));
                    }
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} outcomes:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(5)].join("\n")
    );
}
