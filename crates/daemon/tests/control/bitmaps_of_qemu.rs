//! The commands about dirty bitmaps, side by side with qemu-storage-daemon: the same random commands and writes, the same
//! replies, and the same bitmaps. Each then continues what the other has stored.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use control::{Client, ClientError};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::qemu_img as qemu;
use testkit::random::{Random, seeds};
use testkit::server::Server;

use crate::support::{serve_all, wait_until};

const OK: u8 = 0;
const SIZE: u64 = 16 << 20;
const DISKS: [&str; 2] = ["a", "b"];

/// A server of the two disks in a directory.
struct Side {
    client: Client,
    devices: [Device; 2],
    process: Process,
}

enum Process {
    Ringdisk(Server),
    Qemu(Child),
}

impl Side {
    fn ringdisk(directory: &Path) -> Self {
        let path = |name: String| directory.join(name).display().to_string();
        let disk = |name| {
            let (file, socket) = (path(format!("{name}.qcow2")), path(format!("{name}.sock")));
            format!("file={file},name={name},socket={socket},queues=2")
        };
        let control = format!("--control={}", path("qmp".into()));
        let server = serve_all(&[disk("a"), disk("b"), control]);
        Self::connect(directory, Process::Ringdisk(server))
    }

    fn qemu(directory: &Path) -> Self {
        let path = |name: String| directory.join(name).display().to_string();
        let mut command = Command::new("qemu-storage-daemon");
        for name in DISKS {
            let (file, socket) = (path(format!("{name}.qcow2")), path(format!("{name}.sock")));
            command.args(["--blockdev", &format!(
                "driver=qcow2,node-name={name},discard=unmap,file.driver=file,file.filename={file},file.discard=unmap"
            )]);
            command.args(["--export", &format!(
                "type=vhost-user-blk,id={name}-export,node-name={name},addr.type=unix,addr.path={socket},writable=on,num-queues=2"
            )]);
        }
        let _ = std::fs::remove_file(directory.join("pid"));
        let qmp = path("qmp".into());
        command.args([
            "--chardev",
            &format!("socket,id=qmp,path={qmp},server=on,wait=off"),
        ]);
        command.args(["--monitor", "chardev=qmp", "--pidfile", &path("pid".into())]);
        let process = command.stdin(Stdio::null()).spawn().unwrap();
        wait_until("qemu-storage-daemon", || directory.join("pid").exists());
        Self::connect(directory, Process::Qemu(process))
    }

    fn connect(directory: &Path, process: Process) -> Self {
        let config = DeviceConfig {
            queues: 2,
            ..DeviceConfig::default()
        };
        let device = |name| Device::connect(directory.join(format!("{name}.sock")), &config);
        Self {
            client: Client::connect(directory.join("qmp"), Duration::from_secs(60)).unwrap(),
            devices: DISKS.map(|name| device(name).unwrap()),
            process,
        }
    }

    /// The result, or the class and the description of the error.
    fn call(&mut self, command: &str, arguments: &Value) -> Result<Value, (String, String)> {
        let result = self.client.call(command, arguments.clone());
        result.map_err(|error| match error {
            ClientError::Refused { error, .. } => (format!("{:?}", error.class), error.desc),
            error => panic!("{command} {arguments}: {error}"),
        })
    }

    /// The bitmaps of both disks as queries show them.
    fn bitmaps(&mut self) -> [Value; 2] {
        let nodes = self.call("query-named-block-nodes", &json!({})).unwrap();
        DISKS.map(|name| {
            let mut nodes = nodes.as_array().unwrap().iter();
            let node = nodes.find(|node| node["node-name"] == name).unwrap();
            let mut bitmaps = node["dirty-bitmaps"].clone();
            if let Some(bitmaps) = bitmaps.as_array_mut() {
                bitmaps.sort_by_key(|bitmap| bitmap["name"].to_string());
            }
            bitmaps
        })
    }

    fn write(&mut self, disk: usize, (at, len): (u64, u64), kind: u64) {
        let queue = &mut self.devices[disk].queues[(at / 4096 % 2) as usize];
        let unmap = kind.is_multiple_of(2);
        let status = match kind {
            0 | 1 => queue.run(Op::WriteZeroes { unmap }, at >> 9, len as u32),
            2 => queue.run(Op::Discard, at >> 9, len as u32),
            _ => queue.write(at >> 9, &vec![kind as u8; len as usize]),
        };
        assert_eq!(status, OK, "{kind} of {len} at {at}");
    }

    fn end(self) {
        drop((self.client, self.devices));
        match self.process {
            Process::Ringdisk(mut server) => {
                assert!(server.terminate().unwrap().success(), "{}", server.log());
            }
            Process::Qemu(mut process) => {
                kill_process(Pid::from_child(&process), Signal::TERM).unwrap();
                let status = process.wait().unwrap();
                assert!(status.success(), "qemu-storage-daemon: {status}");
            }
        }
    }
}

/// A bitmap that may exist.
fn any_name(random: &mut Random) -> String {
    match random.below(12) {
        0 => String::new(),
        1 => "never".into(),
        _ => format!("n{}", random.below(4)),
    }
}

fn any_disk(random: &mut Random) -> &'static str {
    match random.below(20) {
        0 => "nobody",
        1..10 => "a",
        _ => "b",
    }
}

/// The name of a command, and its arguments. QEMU 10.0 crashes if no bitmaps are to be merged.
fn any_command(random: &mut Random) -> (&'static str, Value) {
    let (node, name) = (any_disk(random), any_name(random));
    let one = json!({ "node": node, "name": name });
    match random.below(8) {
        0..3 => {
            let mut arguments = one;
            if random.one_in(2) {
                let all = [512, 4096, 65536, 1 << 20, 1000, 256, 0];
                arguments["granularity"] = all[random.below(all.len() as u64) as usize].into();
            }
            for key in ["persistent", "disabled"] {
                if random.one_in(2) {
                    arguments[key] = random.one_in(2).into();
                }
            }
            ("block-dirty-bitmap-add", arguments)
        }
        3 => ("block-dirty-bitmap-remove", one),
        4 => ("block-dirty-bitmap-clear", one),
        5 => ("block-dirty-bitmap-enable", one),
        6 => ("block-dirty-bitmap-disable", one),
        _ => {
            let source = |random: &mut Random| match random.below(2) {
                0 => json!(any_name(random)),
                _ => json!({ "node": any_disk(random), "name": any_name(random) }),
            };
            let sources: Vec<_> = (0..1 + random.below(3)).map(|_| source(random)).collect();
            let arguments = json!({ "node": node, "target": name, "bitmaps": sources });
            ("block-dirty-bitmap-merge", arguments)
        }
    }
}

/// A transaction that QEMU survives: version 10.0 crashes if one enables a bitmap that is missing, and disables one
/// that the same transaction removes, if that fails.
fn any_transaction(random: &mut Random, bitmaps: &[Value; 2]) -> (&'static str, Value) {
    let exists = |data: &Value| {
        let disk = DISKS.iter().position(|&disk| data["node"] == disk);
        let bitmaps = disk.and_then(|disk| bitmaps[disk].as_array());
        let mut bitmaps = bitmaps.into_iter().flatten();
        bitmaps.any(|bitmap| bitmap["name"] == data["name"])
    };
    let mut actions: Vec<Value> = Vec::new();
    for _ in 0..random.below(5) {
        let (kind, data) = match random.below(12) {
            0 => ("abort", json!({})),
            _ => any_command(random),
        };
        let removes = |action: &Value| {
            action["type"] == "block-dirty-bitmap-remove" && action["data"] == data
        };
        if kind == "block-dirty-bitmap-enable" && (!exists(&data) || actions.iter().any(removes)) {
            continue;
        }
        actions.push(json!({ "type": kind, "data": data }));
    }
    ("transaction", json!({ "actions": actions }))
}

/// Does the same with both, and compares. Returns how many commands succeeded and failed.
fn compare(ours: &mut Side, theirs: &mut Side, random: &mut Random, place: &str) -> [u32; 2] {
    let mut results = [0, 0];
    for step in 0..150 {
        if random.one_in(2) {
            let disk = random.below(2) as usize;
            let (at, len) = (random.below(SIZE / 4096 - 64), 1 + random.below(64));
            let (range, kind) = ((at * 4096, len * 4096), random.below(8));
            ours.write(disk, range, kind);
            theirs.write(disk, range, kind);
            continue;
        }
        let (command, arguments) = if random.one_in(3) {
            any_transaction(random, &ours.bitmaps())
        } else {
            any_command(random)
        };
        let (our, their) = (
            ours.call(command, &arguments),
            theirs.call(command, &arguments),
        );
        let place = format!("{place}, step {step}: {command} {arguments}");
        match (&our, &their) {
            (Ok(our), Ok(their)) => assert_eq!(our, their, "{place}"),
            (Err((class, text)), Err((their_class, their_text))) => {
                assert_eq!(class, their_class, "{place}");
                // What QEMU says, and possibly the next step.
                assert!(
                    text.starts_with(their_text.as_str()),
                    "{place}: {text} / {their_text}"
                );
            }
            _ => panic!("{place}: {our:?} / {their:?}"),
        }
        results[usize::from(our.is_err())] += 1;
        assert_eq!(ours.bitmaps(), theirs.bitmaps(), "{place}: {our:?}");
    }
    results
}

/// The bitmaps that an image has, and their dirty ranges.
fn stored(directory: &Path, disk: &str) -> Vec<(Value, Vec<std::ops::Range<u64>>)> {
    let file = format!("{disk}.qcow2");
    let info = Command::new("qemu-img")
        .args(["info", "--output=json", &file])
        .current_dir(directory)
        .output()
        .unwrap();
    let info: Value = serde_json::from_slice(&info.stdout).unwrap();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array();
    let with_bits = |bitmap: &Value| {
        let name = bitmap["name"].as_str().unwrap();
        (bitmap.clone(), qemu::dirty(directory, &file, name))
    };
    let mut all: Vec<_> = bitmaps.into_iter().flatten().map(with_bits).collect();
    all.sort_by_key(|(bitmap, _)| bitmap["name"].to_string());
    all
}

#[test]
fn commands_do_what_those_of_qemu_do() {
    const TEST: &str = "commands_do_what_those_of_qemu_do";
    let version = Command::new("qemu-storage-daemon")
        .arg("--version")
        .output();
    if version.is_err() || !qemu::is_there(TEST) {
        return println!("skipped: {TEST}: there is no qemu-storage-daemon");
    }
    let (mut results, mut compared) = ([0, 0], 0);
    for seed in seeds(7100, 2) {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let sides = ["x", "y"].map(|name| directory.path().join(name));
        for side in &sides {
            std::fs::create_dir(side).unwrap();
            qemu::img(side, &format!("create -q -f qcow2 a.qcow2 {SIZE}"));
            let options = "-o cluster_size=4k";
            qemu::img(
                side,
                &format!("create -q -f qcow2 {options} b.qcow2 {SIZE}"),
            );
        }
        let mut random = Random(seed);
        for round in 0..4 {
            let place = format!("seed {seed}, round {round}");
            let [ours, theirs] = [&sides[round % 2], &sides[(round + 1) % 2]];
            let (mut our_side, mut their_side) = (Side::ringdisk(ours), Side::qemu(theirs));
            let counted = compare(&mut our_side, &mut their_side, &mut random, &place);
            results = [results[0] + counted[0], results[1] + counted[1]];
            our_side.end();
            their_side.end();
            for disk in DISKS {
                let (our, their) = (stored(ours, disk), stored(theirs, disk));
                assert_eq!(our, their, "{place}: {disk}");
                compared += our.len();
                qemu::check(ours, &format!("{disk}.qcow2"), false);
            }
        }
    }
    println!("{results:?} succeeded and failed, {compared} stored bitmaps");
    if std::env::var_os("RINGDISK_TEST_SEED").is_none() {
        assert!(results.iter().all(|&count| count > 100) && compared > 10);
    }
}
