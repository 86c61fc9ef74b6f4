//! Dirty bitmaps over NBD.

use std::process::Command;

use control::{Client as Qmp, ClientError};
use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig, HANG};
use testkit::server::wait_for_exit;
use testkit::unpacked::{LIBNBD, LIBNBD_RELEASES, Unpacked};

use super::clients::{map, map_by};
use super::commands::stop_successor;
use super::{BINARY, Served, have, run, text, to_qcow2};
use crate::support::{DISK_BYTES, Disk};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// What the guest writes while the bitmap records: offset and length.
const WRITTEN: [(u64, u64); 4] = [
    (0, 4 * KIB),
    (3 * MIB - 4 * KIB, 8 * KIB),
    (8 * MIB, 64 * KIB),
    (DISK_BYTES - 4 * KIB, 4 * KIB),
];

/// The dirty extents of [`WRITTEN`] and the clean ones between them, as clients show them: offset, length and state.
fn expected() -> Vec<(u64, u64, u64)> {
    let (mut at, mut extents) = (0, Vec::new());
    for (from, len) in WRITTEN {
        if from > at {
            extents.push((at, from - at, 0));
        }
        extents.push((from, len, 1));
        at = from + len;
    }
    assert_eq!(at, DISK_BYTES);
    extents
}

/// The same as `qemu-img map` shows it: what is dirty counts as a hole there.
fn map_of_qemu(options: &str) -> Vec<(u64, u64, u64)> {
    let output = run(
        "qemu-img",
        &["map", "--output=json", "--image-opts", options],
    );
    let extents: Value = serde_json::from_str(&output).unwrap();
    let extents = extents.as_array().unwrap().iter();
    extents
        .map(|extent| {
            let number = |key: &str| extent[key].as_u64().unwrap();
            let is_dirty = extent["data"] == false;
            (number("start"), number("length"), u64::from(is_dirty))
        })
        .collect()
}

/// A disk in a qcow2 image with a stored bitmap `b` of [`WRITTEN`], disabled, and an enabled one without a dirty bit.
fn recorded() -> Served {
    let mut disk = Disk::new();
    to_qcow2(&mut disk);
    let served = Served::start(disk, "");
    let add = [
        "bitmap",
        "add",
        "vm",
        "b",
        "--granularity",
        "4k",
        "--persistent",
    ];
    served.done(&add);
    let mut device = Device::connect(&served.disk.socket, &DeviceConfig::default()).unwrap();
    for (at, len) in WRITTEN {
        assert_eq!(device.queues[0].write(at / 512, &vec![7; len as usize]), 0);
    }
    served.done(&["bitmap", "disable", "vm", "b"]);
    assert_eq!(device.queues[0].write(5 * MIB / 512, &[8; 4096]), 0);
    served.done(&["bitmap", "add", "vm", "enabled"]);
    served
}

/// libnbd's and QEMU's tools see what the guest has written, and so does QEMU's own server afterwards.
#[test]
fn clients_see_what_the_guest_has_written() {
    let test = "clients_see_what_the_guest_has_written";
    if !have(&["nbdinfo", "qemu-img", "qemu-nbd"], test) {
        return;
    }
    let mut served = recorded();
    let exported = served.done(&["export", "vm", "--bitmap", "b"]);
    assert_eq!(exported["uri"], served.uri("vm"));
    assert_eq!(served.done(&["export"])[0]["bitmaps"], json!(["b"]));
    let info: Value = serde_json::from_str(&served.client("nbdinfo", &["--json"])).unwrap();
    let contexts = &info["exports"][0]["contexts"];
    let offered = [
        "base:allocation",
        "qemu:allocation-depth",
        "qemu:dirty-bitmap:b",
    ];
    assert_eq!(contexts, &json!(offered));
    assert_eq!(map(&served, "qemu:dirty-bitmap:b"), expected());
    let options = |socket: &str, export: &str| {
        format!(
            "driver=nbd,server.type=unix,server.path={socket},export={export},x-dirty-bitmap=qemu:dirty-bitmap:b"
        )
    };
    assert_eq!(map_of_qemu(&options(text(&served.nbd()), "vm")), expected());

    // QEMU continues what ringdisk has stored.
    assert!(served.server.terminate().unwrap().success());
    let socket = served.path("qemu.sock");
    let mut qemu = Command::new("qemu-nbd")
        .args(["-r", "-t", "-f", "qcow2", "-B", "b", "-k", text(&socket)])
        .arg(&served.disk.file)
        .spawn()
        .unwrap();
    while !socket.exists() {
        assert_eq!(qemu.try_wait().unwrap(), None);
    }
    let seen = map_of_qemu(&options(text(&socket), ""));
    qemu.kill().unwrap();
    qemu.wait().unwrap();
    assert_eq!(seen, expected());
}

fn call(served: &Served, command: &str, arguments: Value) -> Result<Value, String> {
    let mut qmp = Qmp::connect(served.path("control.qmp"), HANG).unwrap();
    qmp.call(command, arguments).map_err(|error| match error {
        ClientError::Refused { error, .. } => error.to_string(),
        error => panic!("{error}"),
    })
}

/// Bitmaps of an export that can be used, and of those that cannot, as in QEMU; an exported one stays as it is.
#[test]
fn exported_bitmaps_are_in_use() {
    if !have(&["qemu-img"], "exported_bitmaps_are_in_use") {
        return;
    }
    let served = recorded();
    served.refused(
        &["export", "vm", "--bitmap", "none"],
        "Bitmap 'none' is not found",
    );
    served.refused(
        &["export", "vm", "--bitmap", "enabled"],
        "Enabled bitmap 'enabled' incompatible with readonly export",
    );
    served.refused(
        &["export", "vm", "--bitmap", "b", "--bitmap", "b"],
        "Bitmap 'b' is currently in use",
    );
    assert_eq!(served.done(&["export"]), json!([]));
    served.done(&[
        "export",
        "vm",
        "--writable",
        "--bitmap",
        "enabled",
        "--bitmap",
        "b",
    ]);
    let of = |name: &str| json!({ "node": "vm", "name": name });
    for (command, arguments) in [
        ("block-dirty-bitmap-remove", of("b")),
        ("block-dirty-bitmap-clear", of("b")),
        ("block-dirty-bitmap-enable", of("b")),
        ("block-dirty-bitmap-disable", of("enabled")),
        (
            "block-dirty-bitmap-merge",
            json!({ "node": "vm", "target": "b", "bitmaps": [] }),
        ),
    ] {
        let error = call(&served, command, arguments).unwrap_err();
        assert!(
            error.contains("currently in use by another operation"),
            "{error}"
        );
        assert!(error.contains("nbd-vm"), "{error}");
    }
    let nodes = call(&served, "query-named-block-nodes", json!({})).unwrap();
    let bitmaps = nodes[0]["dirty-bitmaps"].as_array().unwrap().clone();
    assert!(
        bitmaps.iter().all(|bitmap| bitmap["busy"] == true),
        "{bitmaps:?}"
    );

    served.done(&["export", "vm", "--remove"]);
    call(&served, "block-dirty-bitmap-remove", of("enabled")).unwrap();
    // The other form that names a bitmap.
    let export =
        |bitmap: Value| json!({ "type": "nbd", "id": "e", "node-name": "vm", "bitmaps": [bitmap] });
    let other = json!({ "node": "none", "name": "b" });
    call(&served, "block-export-add", export(other)).unwrap_err();
    call(&served, "block-export-add", export(of("b"))).unwrap();
    assert_eq!(served.done(&["export"])[0]["bitmaps"], json!(["b"]));
}

/// The new process offers the same bitmaps, whether or not they are stored.
#[test]
fn exports_with_bitmaps_are_handed_over() {
    if !have(
        &["nbdinfo", "qemu-img"],
        "exports_with_bitmaps_are_handed_over",
    ) {
        return;
    }
    let served = recorded();
    served.done(&["bitmap", "disable", "vm", "enabled"]);
    served.done(&["export", "vm", "--bitmap", "b", "--bitmap", "enabled"]);
    let before = served.done(&["export"]);
    let pid = served.server.pid();
    let control = served.path("control.qmp");
    run(BINARY, &["upgrade", "--control", text(&control)]);
    wait_for_exit(pid);
    assert_eq!(served.done(&["export"]), before);
    assert_eq!(map(&served, "qemu:dirty-bitmap:b"), expected());
    let clean = [(0, DISK_BYTES, 0)];
    assert_eq!(map(&served, "qemu:dirty-bitmap:enabled"), clean);
    served.done(&["export", "vm", "--remove"]);
    stop_successor(&served);
}

/// oVirt's client reads and writes, and sees what a bitmap that records has of its own writes.
#[test]
fn imageio_sees_what_it_has_written() {
    let test = "imageio_sees_what_it_has_written";
    let python = match testkit::python::IMAGEIO.python() {
        Ok(python) => python,
        Err(missing) => return println!("skipped: {test}: {missing}"),
    };
    let served = Served::start(Disk::new(), "");
    served.done(&["bitmap", "add", "vm", "b", "--granularity", "4k"]);
    served.done(&["export", "vm", "--writable", "--bitmap", "b"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nbd/imageio.py");
    let dirty = run(text(&python), &[script, text(&served.nbd()), "vm"]);
    let dirty: Value = serde_json::from_str(&dirty).unwrap();
    assert_eq!(dirty, json!([[MIB, 4 * KIB], [2 * MIB, 64 * KIB]]));
}

/// The tools of the releases that users have.
#[test]
fn clients_of_other_releases_copy_and_see_bitmaps() {
    let test = "clients_of_other_releases_copy_and_see_bitmaps";
    if !have(&["qemu-img", "qemu-io"], test) {
        return;
    }
    let served = recorded();
    served.done(&["export", "vm", "--name", "holes", "--writable"]);
    let zero = ["-f", "raw", "-c", "write -z -u 12M 1M"];
    run(
        "qemu-io",
        &[&zero[..], &[served.uri("holes").as_str()]].concat(),
    );
    served.done(&["export", "vm", "--bitmap", "b"]);
    let uri = served.uri("vm");
    let allocated = [
        (0, 12 * MIB, 0),
        (12 * MIB, MIB, 3),
        (13 * MIB, DISK_BYTES - 13 * MIB, 0),
    ];
    for release in LIBNBD_RELEASES {
        let clients = match Unpacked::find(LIBNBD, release) {
            Ok(clients) => clients,
            Err(missing) => {
                println!("skipped: {test}: {missing}");
                continue;
            }
        };
        let (info, copy) = (clients.program("nbdinfo"), clients.program("nbdcopy"));
        assert_eq!(map_by(&info, &served, "base:allocation"), allocated);
        let depth = map_by(&info, &served, "qemu:allocation-depth");
        assert_eq!(depth, [(0, DISK_BYTES, 1)]);
        assert_eq!(map_by(&info, &served, "qemu:dirty-bitmap:b"), expected());
        for yes in ["multi-conn", "flush", "df"] {
            run(text(&info), &["--can", yes, &uri]);
        }
        let can_write = Command::new(&info).args(["--can", "write", &uri]).output();
        assert_eq!(can_write.unwrap().status.code(), Some(2), "{release}");
        let to = served.path(&format!("{release}.raw"));
        // Beside a guest, long requests are done in pieces.
        let guests = [None, Some(&served.disk.socket)];
        for guest in guests {
            let device = guest.map(|at| Device::connect(at, &DeviceConfig::default()).unwrap());
            for size in ["--request-size=262144", "--request-size=33554432"] {
                run(text(&copy), &["--connections=4", size, &uri, text(&to)]);
                let compare = ["compare", "-f", "raw", "-F", "raw", text(&to), &uri];
                assert!(run("qemu-img", &compare).contains("identical"), "{release}");
            }
            drop(device);
        }
    }
}
