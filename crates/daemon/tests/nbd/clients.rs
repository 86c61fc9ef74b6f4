//! libnbd's tools, QEMU's tools and fio.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::Value;
use testkit::driver::{Device, DeviceConfig};

use super::{Served, have, run, text, to_qcow2};
use crate::support::{DISK_BYTES, Disk};

/// What a client writes is there for the guest, and the other way round, whatever the format and the cache.
#[test]
fn clients_and_guest_share_the_disk() {
    if !have(
        &["nbdinfo", "nbdcopy", "qemu-img", "qemu-io"],
        "clients_and_guest_share_the_disk",
    ) {
        return;
    }
    for (is_qcow2, options) in [
        (false, "cache=none"),
        (false, "cache=writeback"),
        (true, "cache=none"),
    ] {
        let mut disk = Disk::new();
        if is_qcow2 {
            to_qcow2(&mut disk);
        }
        let before = fs::read(
            disk.socket
                .with_file_name(format!("{}.raw", disk.file.file_stem().unwrap().display())),
        )
        .unwrap();
        let served = Served::start(disk, options);
        served.done(&["export", "vm", "--writable"]);
        let copy = served.path("copy.raw");
        run(
            "nbdcopy",
            &["--connections=4", &served.uri("vm"), text(&copy)],
        );
        assert!(fs::read(&copy).unwrap() == before, "{options}");

        served.client(
            "qemu-io",
            &[
                "-f",
                "raw",
                "-c",
                "write -P 7 1M 1M",
                "-c",
                "write -f -P 9 3M 64k",
                "-c",
                "write -z -u 4M 2M",
                "-c",
                "write -z 6M 1M",
                "-c",
                "discard 8M 1M",
                "-c",
                "flush",
                "-c",
                "read -P 7 1M 1M",
                "-c",
                "read -P 9 3M 64k",
                "-c",
                "read -P 0 4M 3M",
            ],
        );
        let mut device = Device::connect(&served.disk.socket, &DeviceConfig::default()).unwrap();
        let read = |device: &mut Device, at: u64| device.queues[0].read(at / 512, 4096).unwrap();
        assert_eq!(read(&mut device, 1 << 20), [7; 4096]);
        assert_eq!(read(&mut device, 3 << 20), [9; 4096]);
        assert_eq!(read(&mut device, 4 << 20), [0; 4096]);
        assert_eq!(device.queues[0].write(0, &[5; 4096]), 0);
        served.client("qemu-io", &["-f", "raw", "-c", "read -P 5 0 4k"]);

        // All of it, with requests of 32 MiB at most and of 4 KiB.
        let new = served.path("new.raw");
        let content: Vec<u8> = (0..DISK_BYTES).map(|i| (i / 4096 * 7 + i) as u8).collect();
        fs::write(&new, &content).unwrap();
        for size in ["33554432", "4096"] {
            let size = format!("--request-size={size}");
            let arguments = [
                "--flush",
                "--connections=4",
                &size,
                text(&new),
                &served.uri("vm"),
            ];
            run("nbdcopy", &arguments);
            let images = [
                "compare",
                "-f",
                "raw",
                "-F",
                "raw",
                text(&new),
                &served.uri("vm"),
            ];
            assert!(run("qemu-img", &images).contains("identical"), "{options}");
        }
    }
}

#[test]
fn exports_are_described() {
    if !have(&["nbdinfo"], "exports_are_described") {
        return;
    }
    let served = Served::start(Disk::new(), "");
    served.done(&["export", "vm"]);
    served.done(&["export", "vm", "--name", "second", "--writable"]);
    let mode = fs::metadata(served.nbd()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let info = |uri: &str, options: &[&str]| -> Value {
        let output = run("nbdinfo", &[&["--json"], options, &[uri]].concat());
        serde_json::from_str(&output).unwrap()
    };
    let all = info(&served.uri(""), &["--list"]);
    assert_eq!(all["exports"].as_array().unwrap().len(), 2);
    let read_only = &info(&served.uri("vm"), &[])["exports"][0];
    let writable = &info(&served.uri("second"), &[])["exports"][0];
    for export in [read_only, writable] {
        assert_eq!(export["export-size"], DISK_BYTES);
        assert_eq!(export["can_multi_conn"], true);
        assert_eq!(export["can_flush"], true);
        assert_eq!(export["can_df"], true);
        assert_eq!(export["block_size_maximum"], 32 << 20);
        let contexts = export["contexts"].as_array().unwrap();
        assert_eq!(contexts, &["base:allocation", "qemu:allocation-depth"]);
    }
    assert_eq!(read_only["is_read_only"], true);
    assert_eq!(writable["is_read_only"], false);
    assert_eq!(writable["can_trim"], true);
    assert_eq!(writable["can_fast_zero"], true);
    let none = std::process::Command::new("nbdinfo")
        .arg(served.uri("none"))
        .output()
        .unwrap();
    assert!(!none.status.success(), "{none:?}");
}

/// The extents of a context: offset, length, type.
pub fn map(served: &Served, context: &str) -> Vec<(u64, u64, u64)> {
    map_by(Path::new("nbdinfo"), served, context)
}

/// The same with another `nbdinfo`.
pub fn map_by(nbdinfo: &Path, served: &Served, context: &str) -> Vec<(u64, u64, u64)> {
    let map = format!("--map={context}");
    let output = served.client(text(nbdinfo), &["--json", &map]);
    let extents: Value = serde_json::from_str(&output).unwrap();
    let number = |extent: &Value, key: &str| extent[key].as_u64().unwrap();
    let extents = extents.as_array().unwrap().iter();
    extents
        .map(|e| (number(e, "offset"), number(e, "length"), number(e, "type")))
        .collect()
}

/// Raw files have the holes of their file system; images have those of the chain, as QEMU sees them.
#[test]
fn holes_and_depths_are_told() {
    if !have(
        &["nbdinfo", "qemu-img", "qemu-io"],
        "holes_and_depths_are_told",
    ) {
        return;
    }
    const MIB: u64 = 1 << 20;
    let disk = Disk::new();
    let file = fs::File::create(&disk.file).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    let write = ["-f", "raw", "-c", "write -P 1 2M 1M", text(&disk.file)];
    run("qemu-io", &write);
    let below = disk.file.clone();
    let mut overlay = Disk::new();
    overlay.file = below.with_file_name("overlay.qcow2");
    let served = Served::start(disk, "");
    served.done(&["export", "vm"]);
    let raw = [
        (0, 2 * MIB, 3),
        (2 * MIB, MIB, 0),
        (3 * MIB, DISK_BYTES - 3 * MIB, 3),
    ];
    assert_eq!(map(&served, "base:allocation"), raw);
    assert_eq!(map(&served, "qemu:allocation-depth"), [(0, DISK_BYTES, 1)]);
    drop(served.server);

    // Behind the end of the backing file there are zeroes, which count as that file's.
    let overlay_bytes = DISK_BYTES + 2 * MIB;
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        text(&below),
        "-F",
        "raw",
        text(&overlay.file),
        &overlay_bytes.to_string(),
    ];
    run("qemu-img", &create);
    let write = [
        "-f",
        "qcow2",
        "-c",
        "write -P 2 4M 1M",
        "-c",
        "write -z 5M 1M",
        text(&overlay.file),
    ];
    run("qemu-io", &write);
    let served = Served::start(overlay, "");
    served.done(&["export", "vm"]);
    let chain = [
        (0, 2 * MIB, 3),
        (2 * MIB, MIB, 0),
        (3 * MIB, MIB, 3),
        (4 * MIB, MIB, 0),
        (5 * MIB, overlay_bytes - 5 * MIB, 3),
    ];
    assert_eq!(map(&served, "base:allocation"), chain);
    let depth = [
        (0, 4 * MIB, 2),
        (4 * MIB, 2 * MIB, 1),
        (6 * MIB, overlay_bytes - 6 * MIB, 2),
    ];
    assert_eq!(map(&served, "qemu:allocation-depth"), depth);
}

/// Clusters that were only reserved, as `qemu-img create` does for Proxmox, are not copied.
#[test]
fn reserved_clusters_are_holes() {
    const MIB: u64 = 1 << 20;
    if !have(&["nbdinfo", "qemu-img"], "reserved_clusters_are_holes") {
        return;
    }
    for options in [
        "preallocation=metadata",
        "preallocation=metadata,extended_l2=on",
        "data_file=data,data_file_raw=on",
    ] {
        let mut disk = Disk::new();
        let directory = disk.file.parent().unwrap();
        let (file, data) = (directory.join("reserved.qcow2"), directory.join("data"));
        let options = options.replace("=data,", &format!("={},", text(&data)));
        let size = DISK_BYTES.to_string();
        let create = [
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            &options,
            text(&file),
            &size,
        ];
        run("qemu-img", &create);
        let write = ["-f", "qcow2", "-c", "write -P 1 0 1M", text(&file)];
        run("qemu-io", &write);
        disk.file = file;
        let more = match options.contains("data_file") {
            true => format!("data-file={}", text(&data)),
            false => String::new(),
        };
        let served = Served::start(disk, &more);
        served.done(&["export", "vm"]);
        let holes = [(0, MIB, 0), (MIB, DISK_BYTES - MIB, 3)];
        assert_eq!(map(&served, "base:allocation"), holes, "{options}");
    }
}

/// Random writes of fio, each with its own content, on several connections at once.
#[test]
fn fio_verifies_what_it_has_written() {
    let test = "fio_verifies_what_it_has_written";
    if !have(&["fio"], test) {
        return;
    }
    if !run("fio", &["--enghelp"])
        .lines()
        .any(|line| line.trim() == "nbd")
    {
        println!("skipped: {test}: fio has no engine for NBD");
        return;
    }
    let served = Served::start(Disk::new(), "queues=2");
    served.done(&["export", "vm", "--writable"]);
    let uri = format!("--uri={}", served.uri("vm"));
    run(
        "fio",
        &[
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bs=4k",
            "--iodepth=32",
            "--size=4M",
            "--numjobs=4",
            "--offset_increment=4M",
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
            "--verify_state_save=0",
        ],
    );
}
