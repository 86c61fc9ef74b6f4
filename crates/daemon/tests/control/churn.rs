//! A process that runs for years: disks are attached and detached many times, and by several clients at once.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use control::Client;
use serde_json::json;
use testkit::driver::{Device, DeviceConfig, HANG};

use super::server::{Controlled, verify};

const CYCLES: u32 = 1000;

#[test]
fn attaching_a_thousand_disks_leaks_nothing() {
    let ringdisk = Controlled::start(&["--iothreads=2".into()]);
    ringdisk.file("disk.raw", 16 << 20);
    let mut client = Client::connect(&ringdisk.control, HANG).unwrap();
    let socket = ringdisk.path("disk.sock");
    let mut cycle = |n: u32| {
        let file = format!(
            "disk.raw,queues=2,socket=disk.sock,aio={}",
            ["auto", "native", "threads"][n as usize % 3]
        );
        let attach = json!({ "disk": file, "directory": ringdisk.dir.path() });
        client.call("x-ringdisk-attach", attach).unwrap();
        // Some disks are used, some of those until they are detached, and some have their own thread and a failure in
        // between.
        let mut device = (n.is_multiple_of(4)).then(|| {
            let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
            verify(&mut device.queues[0]);
            device
        });
        if n.is_multiple_of(8) {
            device = None;
        }
        if n.is_multiple_of(5) {
            let thread = json!({ "qom-type": "iothread", "id": "extra" });
            client.call("object-add", thread).unwrap();
            let other = json!({ "disk": "null:1M,iothreads=extra,socket=/proc/none/x.sock" });
            client.call("x-ringdisk-attach", other).unwrap_err();
            client.call("object-del", json!({ "id": "extra" })).unwrap();
        }
        client
            .call("x-ringdisk-detach", json!({ "id": "disk", "force": true }))
            .unwrap();
        drop(device);
        assert!(!socket.exists());
    };
    // A few rounds create everything that is allocated once and kept.
    (0..40).for_each(&mut cycle);
    let before = loop {
        let held = Resources::of(&ringdisk);
        // The thread that closed the last disk.
        if !held.threads.contains_key("closing") {
            break held;
        }
        thread::sleep(Duration::from_millis(10));
    };
    (0..CYCLES).for_each(&mut cycle);
    // A joined thread may stay visible for a moment.
    let start = Instant::now();
    loop {
        let after = Resources::of(&ringdisk);
        if after.descriptors == before.descriptors && after.threads == before.threads {
            break;
        }
        assert!(start.elapsed() < HANG, "{before:?} became {after:?}");
        thread::sleep(Duration::from_millis(10));
    }
    let after = Resources::of(&ringdisk);
    assert!(
        after.memory_kib < before.memory_kib + 16 * 1024,
        "{} KiB became {} after {CYCLES} disks",
        before.memory_kib,
        after.memory_kib
    );
    assert!(
        after.mappings < before.mappings + CYCLES as usize / 10,
        "{before:?} became {after:?}"
    );
}

/// System resources held by a process.
#[derive(Debug)]
struct Resources {
    /// Descriptors by target.
    descriptors: BTreeMap<String, usize>,
    threads: BTreeMap<String, usize>,
    mappings: usize,
    memory_kib: u64,
}

impl Resources {
    fn of(ringdisk: &Controlled) -> Self {
        let proc = format!("/proc/{}", ringdisk.server.pid());
        let mut descriptors = BTreeMap::new();
        for link in fs::read_dir(format!("{proc}/fd")).unwrap() {
            let target = fs::read_link(link.unwrap().path()).unwrap_or_default();
            // A socket's number differs each time.
            let target = target.display().to_string();
            let kind = target.split(":[").next().unwrap_or_default();
            *descriptors.entry(kind.to_owned()).or_default() += 1;
        }
        let mut threads = BTreeMap::new();
        for (_, name) in ringdisk.threads() {
            // The kernel's io_uring threads and the threads of the blocking pool come and go on demand.
            if !name.starts_with("iou-") && !name.contains("block") {
                *threads.entry(name).or_default() += 1;
            }
        }
        let status = fs::read_to_string(format!("{proc}/status")).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = resident.and_then(|text| text.split_whitespace().next());
        Self {
            descriptors,
            threads,
            mappings: fs::read_to_string(format!("{proc}/maps"))
                .unwrap()
                .lines()
                .count(),
            memory_kib: number.and_then(|n| n.parse().ok()).unwrap(),
        }
    }
}

/// Several clients run all commands on the same few disks at once. Each command succeeds or is refused, nothing hangs,
/// no two disks share a file, and in the end all disks can be removed.
#[test]
fn concurrent_clients_cannot_break_invariants() {
    let mut ringdisk = Controlled::start(&["--iothreads=2".into()]);
    ringdisk.file("a.raw", 1 << 20);
    ringdisk.file("b.raw", 1 << 20);
    let third =
        if testkit::qemu_img::is_there("concurrent_clients_cannot_break_invariants: an image") {
            "c.qcow2"
        } else {
            "c.raw"
        };
    let files = ["a.raw", "b.raw", third];
    match third {
        "c.raw" => drop(ringdisk.file(third, 1 << 20)),
        _ => testkit::qemu_img::img(ringdisk.dir.path(), "create -q -f qcow2 c.qcow2 1M"),
    }
    let seed = crate::support::seed();
    thread::scope(|scope| {
        for number in 0..4u64 {
            let ringdisk = &ringdisk;
            scope.spawn(move || {
                let mut client = Client::connect(&ringdisk.control, 2 * HANG).unwrap();
                let mut random = seed
                    .wrapping_add(number)
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    | 1;
                let mut pick = |n: u64| {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    random % n
                };
                for _ in 0..200 {
                    let name = ["one", "two"][pick(2) as usize];
                    let file = ringdisk.path(files[pick(3) as usize]);
                    let (command, arguments) = match pick(8) {
                        0..=2 => {
                            let file = file.display();
                            let disk = format!("{file},name={name},socket={name}.sock");
                            (
                                "x-ringdisk-attach",
                                json!({ "disk": disk, "directory": ringdisk.dir.path() }),
                            )
                        }
                        3 => ("x-ringdisk-detach", json!({ "id": name })),
                        4 => ("x-ringdisk-detach", json!({ "id": name, "force": true })),
                        5 => ("x-ringdisk-replace", json!({ "id": name, "file": file })),
                        6 => ("block-export-del", json!({ "id": name, "mode": "hard" })),
                        _ => ("x-ringdisk-resize", json!({ "id": name })),
                    };
                    match client.call(command, arguments) {
                        Ok(_) | Err(control::ClientError::Refused { .. }) => {}
                        Err(e) => panic!("{command}: {e}"),
                    }
                    // A guest that connects at a bad moment.
                    if pick(4) == 0 {
                        let _ = Device::connect(
                            ringdisk.path(&format!("{name}.sock")),
                            &DeviceConfig::default(),
                        );
                    }
                    let disks = client.call("x-ringdisk-stats", json!({})).unwrap();
                    let disks = disks["disks"].as_array().unwrap();
                    let files: std::collections::BTreeSet<_> =
                        disks.iter().map(|d| d["file"].as_str()).collect();
                    assert_eq!(files.len(), disks.len(), "two disks on one file: {disks:?}");
                }
            });
        }
    });
    for disk in ringdisk.json(&["list"]).as_array().unwrap() {
        ringdisk.json(&["detach", disk["name"].as_str().unwrap(), "--force"]);
    }
    // No lock and no socket is left.
    for name in files {
        ringdisk.json(&["attach", &format!("{name},socket=one-{name}.sock")]);
    }
    assert!(!ringdisk.path("one.sock").exists() && !ringdisk.path("two.sock").exists());
    assert!(ringdisk.server.terminate().unwrap().success());
    assert!(
        !ringdisk.server.log().contains("panicked"),
        "{}",
        ringdisk.server.log()
    );
}

/// A command that is running when the shutdown begins is completed and answered, and leaves nothing behind.
#[test]
fn shutdown_waits_for_running_commands() {
    for round in 0..20 {
        let mut ringdisk = Controlled::start(&[]);
        ringdisk.file("disk.raw", 1 << 20);
        thread::scope(|scope| {
            let (control, dir) = (&ringdisk.control, ringdisk.dir.path());
            let mut client = Client::connect(control, HANG).unwrap();
            let commands = scope.spawn(move || {
                let attach = json!({ "disk": "disk.raw,socket=disk.sock", "directory": dir });
                let mut done = 0;
                while client.call("x-ringdisk-attach", attach.clone()).is_ok()
                    && client
                        .call("x-ringdisk-detach", json!({ "id": "disk" }))
                        .is_ok()
                {
                    done += 1;
                }
                done
            });
            thread::sleep(Duration::from_millis(round));
            let mut other = Client::connect(control, HANG).unwrap();
            other.call("quit", json!({})).expect("quit is answered");
            let done = commands.join().unwrap();
            println!("{done} disks came and went");
        });
        assert!(ringdisk.server.ended().unwrap().success());
        let mut left: Vec<_> = fs::read_dir(ringdisk.dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.retain(|name| name != "disk.raw");
        assert!(left.is_empty(), "{left:?} are left behind");
    }
}
