//! QEMU's own client library controls ringdisk while a driver uses the disks.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig, HANG, Op};
use testkit::frontend::message;

use super::server::{Controlled, QemuClient, rewrite, verify};
use crate::support::content;

const MIB: u64 = 1 << 20;

pub fn file_node(name: &str, file: &Path) -> Value {
    json!({
        "driver": "file",
        "node-name": name,
        "filename": file,
        "cache": { "direct": true },
        "discard": "unmap",
    })
}

pub fn export(id: &str, node: &str, socket: &Path) -> Value {
    json!({
        "type": "vhost-user-blk",
        "id": id,
        "node-name": node,
        "writable": true,
        "addr": { "type": "unix", "path": socket },
        "num-queues": 2,
    })
}

pub fn two_queues() -> DeviceConfig {
    DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    }
}

#[test]
fn disk_lifecycle() {
    let mut ringdisk = Controlled::start(&[]);
    let Some(mut qemu) = QemuClient::connect("disk_lifecycle", &ringdisk.control) else {
        return;
    };
    assert_eq!(qemu.greeting["QMP"]["version"]["qemu"]["major"], 10);
    assert_eq!(qemu.greeting["QMP"]["capabilities"], json!([]));
    assert_schema_covers_all_commands(&mut qemu);
    assert_eq!(qemu.call("query-block-exports", json!({})), json!([]));
    assert_eq!(qemu.call("query-named-block-nodes", json!({})), json!([]));

    let file = ringdisk.file("vm1.raw", 16 * MIB);
    let socket = ringdisk.path("vm1.sock");
    qemu.call("blockdev-add", file_node("node1", &file));
    let add = json!({ "qom-type": "iothread", "id": "its-own", "poll-max-ns": 50_000 });
    qemu.call("object-add", add);
    let mut options = export("vm1", "node1", &socket);
    options["iothread"] = "its-own".into();
    qemu.call("block-export-add", options);

    let mut device = Device::connect(&socket, &two_queues()).unwrap();
    device.queues.iter_mut().for_each(rewrite);

    let exports = qemu.call("query-block-exports", json!({}));
    let expected = json!([{
        "id": "vm1", "type": "vhost-user-blk", "node-name": "node1", "shutting-down": false,
    }]);
    assert_eq!(exports, expected);
    let nodes = qemu.call("query-named-block-nodes", json!({ "flat": true }));
    let node = &nodes[0];
    assert_eq!(nodes.as_array().unwrap().len(), 1);
    assert_eq!(
        (&node["node-name"], &node["drv"]),
        (&"node1".into(), &"file".into())
    );
    assert_eq!(node["file"], file.to_str().unwrap());
    assert_eq!(node["image"]["virtual-size"], 16 * MIB);
    let cache = json!({ "writeback": true, "direct": true, "no-flush": false });
    assert_eq!((&node["cache"], &node["ro"]), (&cache, &false.into()));

    assert_disk_runs_on_its_thread(&ringdisk, &mut qemu);
    assert_resize_reaches_the_guest(&mut qemu, &mut device, &file);
    qemu.assert_refused(
        "block-export-del",
        json!({ "id": "vm1" }),
        "GenericError",
        &["vm1", "connected"],
    );
    qemu.assert_refused(
        "blockdev-del",
        json!({ "node-name": "node1" }),
        "GenericError",
        &["in use", "vm1"],
    );
    verify(&mut device.queues[0]);
    qemu.call("block-export-del", json!({ "id": "vm1", "mode": "hard" }));
    let deleted = ("BLOCK_EXPORT_DELETED".to_owned(), json!({ "id": "vm1" }));
    assert_eq!(qemu.event(), deleted);
    assert!(device.config().is_err(), "still connected");
    assert!(!socket.exists());

    // This is safe once no front-end is connected.
    qemu.call("block-export-add", export("vm1", "node1", &socket));
    verify(&mut Device::connect(&socket, &two_queues()).unwrap().queues[1]);
    let mut refused = 0;
    while let Err((_, desc)) = qemu.try_call("block-export-del", json!({ "id": "vm1" })) {
        // The server must first notice that the front-end has disconnected.
        assert!(desc.contains("connected"), "{desc}");
        refused += 1;
        assert!(refused < 10_000, "the front-end stays connected");
    }
    assert_eq!(qemu.event(), deleted);
    qemu.call("blockdev-del", json!({ "node-name": "node1" }));
    qemu.call("object-del", json!({ "id": "its-own" }));
    assert_eq!(qemu.call("query-named-block-nodes", json!({})), json!([]));
    assert_eq!(
        qemu.call("query-iothreads", json!({}))[0]["id"],
        "iothread0"
    );
    assert!(ringdisk.threads().iter().all(|(_, name)| name != "its-own"));

    qemu.call("quit", json!({}));
    assert!(ringdisk.server.ended().unwrap().success());
    assert!(!ringdisk.control.exists());
}

/// The thread exists under its name and serves the disk.
fn assert_disk_runs_on_its_thread(ringdisk: &Controlled, qemu: &mut QemuClient) {
    let threads = qemu.call("query-iothreads", json!({}));
    let thread = &threads[0];
    assert_eq!(threads.as_array().unwrap().len(), 1, "{threads}");
    assert_eq!(
        (&thread["id"], &thread["poll-max-ns"]),
        (&"its-own".into(), &50_000.into())
    );
    let id = thread["thread-id"].as_u64().unwrap() as u32;
    assert!(ringdisk.threads().contains(&(id, "its-own".into())));
    qemu.assert_refused(
        "object-del",
        json!({ "id": "its-own" }),
        "GenericError",
        &["its-own", "detach"],
    );
}

fn assert_schema_covers_all_commands(qemu: &mut QemuClient) {
    let mut names = |query: &str| -> Vec<String> {
        let entities = qemu.call(query, json!({}));
        let entities = entities.as_array().unwrap().iter();
        entities
            .map(|entity| entity["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let commands = names("query-commands");
    let schema = names("query-qmp-schema");
    for command in [
        "blockdev-add",
        "block-export-add",
        "query-blockstats",
        "quit",
    ] {
        assert!(commands.iter().any(|name| name == command), "{command}");
    }
    for name in commands
        .iter()
        .map(String::as_str)
        .chain(["BLOCK_EXPORT_DELETED"])
    {
        assert!(schema.iter().any(|described| described == name), "{name}");
    }
}

/// Grows node1 by its own name and by that of its export.
fn assert_resize_reaches_the_guest(qemu: &mut QemuClient, device: &mut Device, file: &Path) {
    let mut channel = device.frontend.open_backend_channel().unwrap();
    qemu.call(
        "block_resize",
        json!({ "node-name": "node1", "size": 24 * MIB }),
    );
    let (request, _) = channel.next(HANG).unwrap();
    assert_eq!(request, message::BACKEND_CONFIG_CHANGE);
    assert_eq!(device.config().unwrap().capacity, 24 * MIB / 512);
    assert_eq!(fs::metadata(file).unwrap().len(), 24 * MIB);
    assert_eq!(
        device.queues[0].read(16 * MIB / 512, 4096).unwrap(),
        [0; 4096]
    );
    qemu.call("block_resize", json!({ "device": "vm1", "size": 32 * MIB }));
    channel.next(HANG).unwrap();
    assert_eq!(device.config().unwrap().capacity, 32 * MIB / 512);
}

#[test]
fn every_node_driver() {
    let ringdisk = Controlled::start(&[]);
    let Some(mut qemu) = QemuClient::connect("every_node_driver", &ringdisk.control) else {
        return;
    };
    // The null driver.
    qemu.call(
        "blockdev-add",
        json!({ "driver": "null-co", "node-name": "nothing", "size": MIB }),
    );
    let socket = ringdisk.path("null.sock");
    qemu.call("block-export-add", export("nothing", "nothing", &socket));
    let mut device = Device::connect(&socket, &two_queues()).unwrap();
    assert_eq!(device.config().unwrap().capacity, MIB / 512);
    assert_eq!(device.queues[1].write(8, &content(8, 4096)), 0);

    let file = ringdisk.file("below.raw", 16 * MIB);
    raw_driver_over_a_file(&ringdisk, &mut qemu, &file);
    raw_driver_over_a_node(&ringdisk, &mut qemu, &file);
}

fn raw_driver_over_a_file(ringdisk: &Controlled, qemu: &mut QemuClient, file: &Path) {
    let raw = json!({
        "driver": "raw",
        "node-name": "above",
        "read-only": true,
        "file": { "driver": "file", "filename": file, "aio": "threads" },
    });
    qemu.call("blockdev-add", raw);
    let socket = ringdisk.path("raw.sock");
    let mut options = export("above", "above", &socket);
    qemu.assert_refused(
        "block-export-add",
        options.clone(),
        "GenericError",
        &["above", "read-only"],
    );
    options["writable"] = false.into();
    qemu.call("block-export-add", options);
    let mut device = Device::connect(&socket, &two_queues()).unwrap();
    verify(&mut device.queues[0]);
    assert_eq!(
        device.queues[0].write(8, &content(9, 4096)),
        1,
        "the disk is read-only"
    );
    drop(device);
    qemu.call("block-export-del", json!({ "id": "above", "mode": "hard" }));
    qemu.call("blockdev-del", json!({ "node-name": "above" }));
}

/// Changes to either node apply to the disk.
fn raw_driver_over_a_node(ringdisk: &Controlled, qemu: &mut QemuClient, file: &Path) {
    qemu.call("blockdev-add", file_node("below", file));
    qemu.call(
        "blockdev-add",
        json!({ "driver": "raw", "node-name": "above", "file": "below" }),
    );
    let socket = ringdisk.path("reference.sock");
    let refused = [
        ("blockdev-del", json!({ "node-name": "below" })),
        ("block-export-add", export("below", "below", &socket)),
        (
            "blockdev-add",
            json!({ "driver": "raw", "node-name": "third", "file": "below" }),
        ),
    ];
    for (command, arguments) in refused {
        qemu.assert_refused(
            command,
            arguments,
            "GenericError",
            &["below", "in use", "above"],
        );
    }
    qemu.call("block-export-add", export("disk", "above", &socket));
    let mut device = Device::connect(&socket, &two_queues()).unwrap();
    device.queues.iter_mut().for_each(rewrite);
    let mut channel = device.frontend.open_backend_channel().unwrap();
    qemu.call(
        "block_resize",
        json!({ "node-name": "below", "size": 20 * MIB }),
    );
    channel.next(HANG).unwrap();
    assert_eq!(device.config().unwrap().capacity, 20 * MIB / 512);
    let copy = ringdisk.path("copy.raw");
    fs::copy(file, &copy).unwrap();
    qemu.call("x-ringdisk-replace", json!({ "id": "below", "file": copy }));
    device.queues.iter_mut().for_each(rewrite);
    let new = content(77, 4096);
    assert_eq!(device.queues[0].write(16384, &new), 0);
    let at = 16384 * 512;
    assert_eq!(fs::read(&copy).unwrap()[at..at + 4096], new);
    assert_ne!(fs::read(file).unwrap()[at..at + 4096], new);
    let nodes = qemu.call("query-named-block-nodes", json!({}));
    for node in nodes
        .as_array()
        .unwrap()
        .iter()
        .filter(|n| n["drv"] != "null-co")
    {
        assert_eq!(node["file"], copy.to_str().unwrap(), "{node}");
    }
    // The disk's previous file is no longer in use.
    qemu.call("blockdev-add", file_node("old", file));
    qemu.call("block-export-del", json!({ "id": "disk", "mode": "hard" }));
    for node in ["above", "below", "old"] {
        qemu.call("blockdev-del", json!({ "node-name": node }));
    }
}

#[test]
fn discard_follows_each_nodes_setting() {
    use std::os::unix::fs::MetadataExt;
    let ringdisk = Controlled::start(&[]);
    let Some(mut qemu) =
        QemuClient::connect("discard_follows_each_nodes_setting", &ringdisk.control)
    else {
        return;
    };
    let file = ringdisk.file("vm1.raw", 16 * MIB);
    let allocated = || fs::metadata(&file).unwrap().blocks() * 512;
    let before = allocated();
    assert!(before >= 16 * MIB, "{before} bytes are allocated");
    for (below, above, freed) in [
        ("ignore", "unmap", false),
        ("unmap", "ignore", false),
        ("unmap", "unmap", true),
    ] {
        let node = json!({
            "driver": "raw",
            "node-name": "node",
            "discard": above,
            "file": { "driver": "file", "filename": file, "discard": below },
        });
        qemu.call("blockdev-add", node);
        let socket = ringdisk.path("disk.sock");
        qemu.call("block-export-add", export("disk", "node", &socket));
        let mut device = Device::connect(&socket, &two_queues()).unwrap();
        let status = device.queues[0].run(Op::Discard, 0, MIB as u32);
        assert_eq!(status, if freed { 0 } else { 2 }, "{below} below {above}");
        let now = allocated();
        if freed {
            assert!(now <= before - MIB, "{now} of {before} bytes are allocated")
        } else {
            assert_eq!(now, before, "{below} below {above}")
        }
        drop(device);
        qemu.call("block-export-del", json!({ "id": "disk", "mode": "hard" }));
        qemu.call("blockdev-del", json!({ "node-name": "node" }));
    }
}

#[test]
fn block_device() {
    let ringdisk = Controlled::start(&[]);
    let Some(mut qemu) = QemuClient::connect("block_device", &ringdisk.control) else {
        return;
    };
    let file = ringdisk.file("backing.raw", 16 * MIB);
    let made = Command::new("losetup")
        .args(["-f", "--show"])
        .arg(&file)
        .output();
    let device = match made {
        Ok(output) if output.status.success() => String::from_utf8(output.stdout).unwrap(),
        other => return println!("skipped: block_device: no loop device: {other:?}"),
    };
    let device = device.trim();
    let node = json!({ "driver": "host_device", "node-name": "dev", "filename": device });
    qemu.call("blockdev-add", node.clone());
    let again = json!({ "driver": "host_device", "node-name": "again", "filename": device });
    qemu.assert_refused(
        "blockdev-add",
        again,
        "GenericError",
        &[device, "disk 'dev'"],
    );
    let socket = ringdisk.path("dev.sock");
    qemu.call("block-export-add", export("dev", "dev", &socket));
    let mut guest = Device::connect(&socket, &two_queues()).unwrap();
    rewrite(&mut guest.queues[0]);
    let node = &qemu.call("query-named-block-nodes", json!({}))[0];
    assert_eq!(node["drv"], "host_device");
    let longer = json!({ "node-name": "dev", "size": 20 * MIB });
    qemu.assert_refused(
        "block_resize",
        longer.clone(),
        "GenericError",
        &["16M", "lvextend"],
    );

    // This is how lvextend grows a device.
    File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(20 * MIB)
        .unwrap();
    let grown = Command::new("losetup")
        .args(["-c", device])
        .status()
        .unwrap();
    assert!(grown.success());
    qemu.call("block_resize", longer);
    assert_eq!(guest.config().unwrap().capacity, 20 * MIB / 512);
    drop(guest);
    qemu.call("x-ringdisk-detach", json!({ "id": "dev", "force": true }));
    let _ = Command::new("losetup").args(["-d", device]).status();
}
