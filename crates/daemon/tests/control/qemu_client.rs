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

fn file_node(name: &str, file: &Path) -> Value {
    json!({
        "driver": "file",
        "node-name": name,
        "filename": file,
        "cache": { "direct": true },
        "discard": "unmap",
    })
}

fn export(id: &str, node: &str, socket: &Path) -> Value {
    json!({
        "type": "vhost-user-blk",
        "id": id,
        "node-name": node,
        "writable": true,
        "addr": { "type": "unix", "path": socket },
        "num-queues": 2,
    })
}

fn two_queues() -> DeviceConfig {
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
    let names = |entities: &Value| -> Vec<String> {
        let entities = entities.as_array().unwrap().iter();
        entities
            .map(|e| e["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let commands = names(&qemu.call("query-commands", json!({})));
    let schema = names(&qemu.call("query-qmp-schema", json!({})));
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

    // The thread exists under its name and serves the disk.
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

    // The guest is notified of a new size.
    let mut channel = device.frontend.open_backend_channel().unwrap();
    qemu.call(
        "block_resize",
        json!({ "node-name": "node1", "size": 24 * MIB }),
    );
    let (request, _) = channel.next(HANG).unwrap();
    assert_eq!(request, message::BACKEND_CONFIG_CHANGE);
    assert_eq!(device.config().unwrap().capacity, 24 * MIB / 512);
    assert_eq!(fs::metadata(&file).unwrap().len(), 24 * MIB);
    assert_eq!(
        device.queues[0].read(16 * MIB / 512, 4096).unwrap(),
        [0; 4096]
    );
    qemu.call("block_resize", json!({ "device": "vm1", "size": 32 * MIB }));
    channel.next(HANG).unwrap();
    assert_eq!(device.config().unwrap().capacity, 32 * MIB / 512);

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

    // The raw driver over a file.
    let file = ringdisk.file("below.raw", 16 * MIB);
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
        "it is read-only"
    );
    drop(device);
    qemu.call("block-export-del", json!({ "id": "above", "mode": "hard" }));
    qemu.call("blockdev-del", json!({ "node-name": "above" }));

    // The raw driver over an existing node: changes to either apply to the disk.
    qemu.call("blockdev-add", file_node("below", &file));
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
    fs::copy(&file, &copy).unwrap();
    qemu.call("x-ringdisk-replace", json!({ "id": "below", "file": copy }));
    device.queues.iter_mut().for_each(rewrite);
    let new = content(77, 4096);
    assert_eq!(device.queues[0].write(16384, &new), 0);
    let at = 16384 * 512;
    assert_eq!(fs::read(&copy).unwrap()[at..at + 4096], new);
    assert_ne!(fs::read(&file).unwrap()[at..at + 4096], new);
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
    qemu.call("blockdev-add", file_node("old", &file));
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
        match freed {
            true => assert!(now <= before - MIB, "{now} of {before} bytes are allocated"),
            false => assert_eq!(now, before, "{below} below {above}"),
        }
        drop(device);
        qemu.call("block-export-del", json!({ "id": "disk", "mode": "hard" }));
        qemu.call("blockdev-del", json!({ "node-name": "node" }));
    }
}

#[test]
fn errors_have_a_class_and_a_reason() {
    let ringdisk = Controlled::start(&[]);
    let Some(mut qemu) = QemuClient::connect("errors_have_a_class_and_a_reason", &ringdisk.control)
    else {
        return;
    };
    let file = ringdisk.file("vm1.raw", 16 * MIB);
    let other = ringdisk.file("vm2.raw", 16 * MIB);
    let socket = ringdisk.path("vm1.sock");
    qemu.call("blockdev-add", file_node("vm1", &file));
    qemu.call("block-export-add", export("e1", "vm1", &socket));
    qemu.call("object-add", json!({ "qom-type": "iothread", "id": "io1" }));
    let group = json!({ "qom-type": "throttle-group", "id": "g1", "limits": { "iops-total": 5 } });
    qemu.call("object-add", group.clone());

    let locked = ringdisk.file("locked.raw", MIB);
    let _holder = crate::support::serve_all(&[format!(
        "file={},socket={}",
        locked.display(),
        ringdisk.path("holder.sock").display()
    )]);
    let absent = ringdisk.path("absent.raw");
    let not_a_socket = ringdisk.path("not-a-socket");
    fs::write(&not_a_socket, "").unwrap();
    let no_limits = json!({
        "id": "e1", "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0,
    });
    let with = |options: &Value, changes: Value| {
        let mut options = options.clone();
        for (key, value) in changes.as_object().unwrap() {
            options[key] = value.clone();
        }
        options
    };

    let (generic, not_found) = ("GenericError", "DeviceNotFound");
    qemu.assert_refused(
        "no-such-command",
        json!({}),
        "CommandNotFound",
        &["no-such-command"],
    );
    for (command, arguments, class, words) in [
        (
            "blockdev-del",
            json!({ "node-name": "nobody" }),
            not_found,
            &["nobody"][..],
        ),
        (
            "blockdev-del",
            json!({ "node-name": 7 }),
            generic,
            &["node-name", "string"],
        ),
        (
            "blockdev-del",
            json!({}),
            generic,
            &["node-name", "missing"],
        ),
        (
            "blockdev-del",
            json!({ "node-name": "vm1", "x": 1 }),
            generic,
            &["'x'"],
        ),
        (
            "blockdev-del",
            json!({ "node-name": "vm1" }),
            generic,
            &["vm1", "in use", "e1"],
        ),
        (
            "blockdev-add",
            file_node("vm1", &other),
            generic,
            &["vm1", "already"],
        ),
        (
            "blockdev-add",
            file_node("again", &file),
            generic,
            &["vm1.raw", "disk 'vm1'", "detach"],
        ),
        (
            "blockdev-add",
            file_node("held", &locked),
            generic,
            &["locked.raw", "another process"],
        ),
        (
            "blockdev-add",
            file_node("none", &absent),
            generic,
            &["absent.raw", "no such file"],
        ),
        (
            "blockdev-add",
            json!({ "driver": "vmdk", "node-name": "q" }),
            generic,
            &["driver", "vmdk"],
        ),
        (
            "blockdev-add",
            json!({ "driver": "null-co", "node-name": "9" }),
            generic,
            &["node-name"],
        ),
        (
            "blockdev-add",
            json!({ "driver": "null-co", "node-name": "n", "size": 7 }),
            generic,
            &["size"],
        ),
        (
            "blockdev-add",
            json!({ "driver": "null-co" }),
            generic,
            &["node-name"],
        ),
        (
            "blockdev-add",
            json!({ "driver": "raw", "node-name": "r", "file": "nobody" }),
            not_found,
            &["nobody"],
        ),
        (
            "block-export-add",
            export("e2", "nobody", &socket),
            not_found,
            &["nobody"],
        ),
        (
            "block-export-add",
            export("e1", "vm1", &socket),
            generic,
            &["e1", "already"],
        ),
        (
            "block-export-add",
            export("e2", "vm1", &socket),
            generic,
            &["e1", "e2", "same socket"],
        ),
        (
            "block-export-add",
            export("e2", "vm1", &ringdisk.path("other.sock")),
            generic,
            &["vm1", "in use", "e1"],
        ),
        (
            "block-export-del",
            json!({ "id": "nobody" }),
            generic,
            &["nobody"],
        ),
        (
            "block-export-del",
            json!({ "id": "e1", "mode": "soft" }),
            generic,
            &["mode", "soft"],
        ),
        (
            "block_resize",
            json!({ "size": MIB }),
            generic,
            &["device", "node-name"],
        ),
        (
            "block_resize",
            json!({ "node-name": "nobody", "size": MIB }),
            not_found,
            &["nobody"],
        ),
        (
            "block_resize",
            json!({ "node-name": "vm1", "size": MIB }),
            generic,
            &["16M", "shorter"],
        ),
        (
            "block_resize",
            json!({ "node-name": "vm1", "size": -1 }),
            generic,
            &["size"],
        ),
        (
            "block_resize",
            json!({ "node-name": "vm1", "size": 17 * MIB + 1 }),
            generic,
            &["multiple of 512"],
        ),
        (
            "block_resize",
            json!({ "node-name": "vm1", "size": u64::MAX - 511 }),
            generic,
            &["vm1", "longer"],
        ),
        (
            "block_set_io_throttle",
            with(&no_limits, json!({ "id": "nobody" })),
            not_found,
            &["nobody"],
        ),
        (
            "block_set_io_throttle",
            json!({ "id": "e1" }),
            generic,
            &["bps"],
        ),
        (
            "block_set_io_throttle",
            with(&no_limits, json!({ "bps": 5, "bps_rd": 5 })),
            generic,
            &["bps"],
        ),
        (
            "block_set_io_throttle",
            with(&no_limits, json!({ "group": "none" })),
            generic,
            &["group 'none'"],
        ),
        (
            "object-add",
            json!({ "qom-type": "iothread", "id": "io1" }),
            generic,
            &["io1", "already"],
        ),
        (
            "object-add",
            json!({ "qom-type": "iothread", "id": "iothread0" }),
            generic,
            &["iothread0", "already"],
        ),
        ("object-add", group, generic, &["g1", "already"]),
        (
            "object-add",
            json!({ "qom-type": "secret", "id": "s" }),
            generic,
            &["qom-type", "secret"],
        ),
        (
            "object-del",
            json!({ "id": "nobody" }),
            generic,
            &["nobody"],
        ),
        (
            "object-del",
            json!({ "id": "iothread0" }),
            generic,
            &["iothread0", "pool"],
        ),
        (
            "x-ringdisk-attach",
            json!({ "disk": "cach=none" }),
            generic,
            &["cach"],
        ),
        (
            "x-ringdisk-detach",
            json!({ "id": "nobody" }),
            not_found,
            &["nobody"],
        ),
        ("x-ringdisk-reload", json!({}), generic, &["--config"]),
        (
            "x-ringdisk-replace",
            json!({ "id": "e1", "file": absent }),
            generic,
            &["absent.raw"],
        ),
    ] {
        qemu.assert_refused(command, arguments, class, words);
    }
    // On a node of its own, errors of the export itself show.
    qemu.call("blockdev-add", file_node("vm2", &other));
    let good = export("e2", "vm2", &ringdisk.path("vm2.sock"));
    for (changes, words) in [
        (
            json!({ "addr": { "type": "unix", "path": not_a_socket } }),
            &["not-a-socket", "not a socket"][..],
        ),
        (
            json!({ "addr": { "type": "inet", "path": "x" } }),
            &["addr", "inet"],
        ),
        (
            json!({ "addr": { "type": "unix", "path": "/".to_owned() + &"x".repeat(107) } }),
            &["107"],
        ),
        (
            json!({ "addr": { "type": "unix", "path": ringdisk.path("holder.sock") } }),
            &["live server"],
        ),
        (json!({ "iothread": "nobody" }), &["nobody", "io1"]),
        (json!({ "iothread": ["io1", "nobody"] }), &["nobody"]),
        (json!({ "num-queues": 0 }), &["num-queues", "256"]),
        (json!({ "num-queues": 257 }), &["num-queues", "256"]),
        (json!({ "num-queues": "two" }), &["num-queues"]),
        (
            json!({ "logical-block-size": 1024 }),
            &["logical-block-size", "4096"],
        ),
        (json!({ "type": "nbd" }), &["type", "nbd"]),
        (json!({ "id": "9" }), &["id"]),
    ] {
        qemu.assert_refused("block-export-add", with(&good, changes), generic, words);
    }
    // None of these refusals left anything behind.
    qemu.call("block-export-add", good);
    let nodes = qemu.call("query-named-block-nodes", json!({}));
    assert_eq!(nodes.as_array().unwrap().len(), 2, "{nodes}");
    assert_eq!(
        File::open(&file).unwrap().metadata().unwrap().len(),
        16 * MIB
    );
    for socket in [socket, ringdisk.path("vm2.sock")] {
        verify(&mut Device::connect(socket, &two_queues()).unwrap().queues[0]);
    }
    assert!(fs::metadata(not_a_socket).unwrap().is_file());
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
