//! Every operation, with a driver in user space: data is read back as written, and Ceph's own tool finds it in the
//! image.

use std::time::Instant;

use testkit::ceph::POOL;
use testkit::driver::{Device, DeviceConfig, HANG, Op};

use super::cluster::{CephVersion, Cluster, ringdisk};
use super::load::Load;

on_each_release!(
    adjacent_requests_are_merged,
    written_data_is_read_back_and_stored_in_the_image,
    every_operation_completes,
    snapshots_and_clones,
    resized_image_grows_the_disk,
    settings_are_reported_with_their_source,
);

const OK: u8 = 0;
const IOERR: u8 = 1;

fn config() -> DeviceConfig {
    DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    }
}

/// Adjacent writes from separate buffers are merged into one operation, and so are reads. Each request gets its own
/// result.
fn adjacent_requests_are_merged(version: CephVersion) {
    const EACH: usize = 4096;
    let Some(mut cluster) = Cluster::get(version, "adjacent_requests_are_merged") else {
        return;
    };
    let disk = cluster.image("beside", 64, "cache=none");
    let server = cluster.serve(&[&disk]);
    let config = DeviceConfig {
        slots: 64,
        queue_size: 256,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(server.socket(), &config).unwrap();
    let queue = &mut device.queues[0];
    let slots: Vec<u16> = (0..64).collect();
    // The middle one is not adjacent, and is not the last.
    let sector = |slot: u16| match slot {
        32 => 65536,
        _ => u64::from(slot) * EACH as u64 / 512,
    };
    let content = |slot: u16| vec![slot as u8 + 1; EACH];
    for (op, name) in [(Op::Write, "op_w"), (Op::Read, "op_r")] {
        let before = cluster.ceph().operations(name).unwrap();
        for &slot in &slots {
            let bytes = match op {
                Op::Write => content(slot),
                _ => vec![0; EACH],
            };
            queue.write_buffer(slot, &bytes);
            queue.prepare(slot, op, sector(slot), EACH as u32);
        }
        queue.submit(&slots);
        let mut done = queue.finish(slots.len());
        done.sort_unstable();
        assert!(done.into_iter().eq(slots.iter().map(|&slot| (slot, OK))));
        if op == Op::Read {
            for &slot in &slots {
                assert!(queue.read_buffer(slot, EACH) == content(slot), "{slot}");
            }
        }
        let operations = cluster.ceph().operations(name).unwrap() - before;
        assert!(operations < 32, "{operations} {name} for 64 requests");
    }
}

/// With and without librbd's cache and encryption, over two queues on two threads.
fn written_data_is_read_back_and_stored_in_the_image(version: CephVersion) {
    let Some(mut cluster) =
        Cluster::get(version, "written_data_is_read_back_and_stored_in_the_image")
    else {
        return;
    };
    for (image, options, access) in [
        ("plain", "cache=none,queues=2", ""),
        ("cached", "cache=writeback,queues=2", ""),
        ("strict", "cache=directsync,queues=2", ":ms_client_mode=crc"),
        (
            "secret",
            "cache=writethrough,queues=2,connections=1",
            ":ms_client_mode=secure:ms_mon_client_mode=secure",
        ),
        (
            "waiting",
            "cache=none,queues=2",
            ":rbd_non_blocking_aio=true:ms_async_op_threads=3",
        ),
    ] {
        let disk = cluster.image(image, 64, options);
        let disk = disk.replace(
            &format!("{POOL}/{image}"),
            &format!("{POOL}/{image}{access}"),
        );
        let mut server = cluster.serve(&[&disk]);
        let mut device = Device::connect(server.socket(), &config()).unwrap();
        let mut load = Load::new(&device, 2048);
        load.run(&mut device, 1500);
        load.finish(&mut device);
        assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
        if image == "cached" {
            // Flushed data is there whatever happens to its writer.
            server.signal(rustix::process::Signal::KILL);
            drop(server);
        } else {
            drop(device);
            assert!(server.terminate().unwrap().success());
        }
        load.compare(&cluster.content(image));
    }
}

/// Discards, write-zeroes, a long scatter-gather list, and the end of the disk.
fn every_operation_completes(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "every_operation_completes") else {
        return;
    };
    let disk = cluster.image("operations", 64, "queues=1,serial=in-ceph");
    let server = cluster.serve(&[&disk]);
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let disk_config = device.config().unwrap();
    assert_eq!(disk_config.capacity, 64 << 11);
    let queue = &mut device.queues[0];
    let bytes: Vec<u8> = (0..128 << 10)
        .map(|i: u32| (i / 7 + i / 512) as u8)
        .collect();
    let object = 4 << 11;
    // Across the border between two objects.
    assert_eq!(queue.write(object - 128, &bytes), OK);
    assert_eq!(queue.read(object - 128, bytes.len()).unwrap(), bytes);
    for unmap in [false, true] {
        assert_eq!(queue.run(Op::WriteZeroes { unmap }, object - 8, 8192), OK);
        let mut expected = bytes.clone();
        expected[120 << 9..136 << 9].fill(0);
        assert_eq!(queue.read(object - 128, bytes.len()).unwrap(), expected);
        assert_eq!(queue.write(object - 128, &bytes), OK);
    }
    assert_eq!(queue.run(Op::Discard, 0, 4 << 20), OK);
    assert_eq!(queue.read(0, 4096).unwrap(), [0; 4096]);
    assert_eq!(queue.run(Op::Read, (64 << 11) - 1, 1024), IOERR);
    assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    drop((device, server));
    let content = cluster.content("operations");
    let at = 4 << 20;
    assert!(content[at..][..64 << 10] == bytes[64 << 10..]);
    assert!(content[..at].iter().all(|&b| b == 0));
}

/// Snapshots, which are read-only, and clones, which are writable.
fn snapshots_and_clones(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "snapshots_and_clones") else {
        return;
    };
    let disk = cluster.image("base", 32, "");
    let server = cluster.serve(&[&disk]);
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].write(8, &[1; 4096]), OK);
    let (image, snap) = (format!("{POOL}/base"), format!("{POOL}/base@one"));
    let clone = format!("{POOL}/copy");
    // While the disk is served.
    cluster
        .ceph()
        .rbd(&["snap", "create", "--no-progress", &snap])
        .unwrap();
    assert_eq!(device.queues[0].write(8, &[2; 4096]), OK);
    cluster.ceph().rbd(&["snap", "protect", &snap]).unwrap();
    cluster.ceph().rbd(&["clone", &snap, &clone]).unwrap();
    let frozen = cluster.disk("base@one", "name=frozen");
    let copy = cluster.disk("copy", "");
    let others = cluster
        .folder
        .path()
        .join("others.qmp")
        .display()
        .to_string();
    let second = cluster.start(&["--control", &others, &frozen, &copy]);
    assert_eq!(second.ready["disks"][0]["readonly"], true);
    let mut frozen = Device::connect(&second.sockets[0], &DeviceConfig::default()).unwrap();
    let mut copy = Device::connect(&second.sockets[1], &DeviceConfig::default()).unwrap();
    assert_eq!(frozen.queues[0].read(8, 4096).unwrap(), [1; 4096]);
    assert_eq!(frozen.queues[0].write(8, &[3; 4096]), IOERR);
    assert_eq!(copy.queues[0].read(8, 4096).unwrap(), [1; 4096]);
    assert_eq!(copy.queues[0].write(16, &[3; 4096]), OK);
    assert_eq!(copy.queues[0].read(8, 4096).unwrap(), [1; 4096]);
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), [2; 4096]);
    assert_eq!(device.queues[0].read(16, 4096).unwrap(), [0; 4096]);

    let said = cluster.refused("base@one", "readonly=off");
    assert!(said.contains("a snapshot is read-only"), "{said}");
    let said = cluster.refused("base", "format=qcow2");
    assert!(said.contains("rbd clone"), "{said}");
    let said = cluster.refused("nothing", "");
    assert!(said.contains("no such image"), "{said}");
    drop((device, server));
    cluster
        .ceph()
        .rbd(&["config", "image", "set", &image, "rbd_cache", "true"])
        .unwrap();
    let said = cluster.refused("base", "cache=directsync");
    assert!(said.contains("rbd config image rm"), "{said}");
}

/// The image is resized by ringdisk and by Ceph's own tool; the guest is notified at once.
fn resized_image_grows_the_disk(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "resized_image_grows_the_disk") else {
        return;
    };
    let disk = cluster.image("growing", 32, "");
    let server = cluster.serve(&[&disk]);
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_eq!(device.config().unwrap().capacity, 32 << 11);
    assert_eq!(device.queues[0].write(40 << 11, &[1; 4096]), IOERR);
    cluster
        .ceph()
        .rbd(&[
            "resize",
            "--no-progress",
            "--size",
            "48M",
            &format!("{POOL}/growing"),
        ])
        .unwrap();
    let start = Instant::now();
    while device.config().unwrap().capacity != 48 << 11 {
        assert!(start.elapsed() < HANG, "no notification of the new size");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(device.queues[0].write(40 << 11, &[1; 4096]), OK);
    let control = cluster.control().display().to_string();
    let output = ringdisk(&["resize", "--control", &control, "growing", "64M"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(device.config().unwrap().capacity, 64 << 11);
    let output = ringdisk(&["resize", "--control", &control, "growing", "8M"]);
    assert!(!output.status.success());
    assert_eq!(device.queues[0].read(40 << 11, 4096).unwrap(), [1; 4096]);
    let info = cluster
        .ceph()
        .rbd(&["info", &format!("{POOL}/growing")])
        .unwrap();
    assert!(info.contains("size 64 MiB"), "{info}");
}

/// Where each setting of an image comes from, and which sources are ignored.
fn settings_are_reported_with_their_source(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "settings_are_reported_with_their_source") else {
        return;
    };
    let conf = cluster.ceph().conf().with_file_name("other.conf");
    let text = std::fs::read_to_string(cluster.ceph().conf()).unwrap();
    let more = "[client]\nrbd_cache_policy = writethrough\nms_async_op_threads = 2\nrbd_io_scheduler = none\n";
    std::fs::write(&conf, text + more).unwrap();
    let disk = cluster.image("explained", 32, "cache=none");
    let disk = disk.replace(
        &cluster.ceph().conf().display().to_string(),
        &conf.display().to_string(),
    );
    let disk = disk.replace(
        "rbd/explained",
        "rbd/explained:ms_client_mode=secure:rbd_io_scheduler=simple",
    );
    let image = format!("{POOL}/explained");
    let of_image = ["config", "image", "set", &image, "rbd_io_scheduler", "none"];
    cluster.ceph().rbd(&of_image).unwrap();
    let server = cluster.serve(&[&disk, "--explain"]);
    let control = cluster.control().display().to_string();
    let listed = ringdisk(&["list", "--explain", "--json", "--control", &control]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(
        listed[0]["settings"].as_array().unwrap().len(),
        server.ready["explain"][0]["settings"]
            .as_array()
            .unwrap()
            .len()
    );
    let find = |name: &str| {
        let mut settings = listed[0]["settings"].as_array().unwrap().iter();
        settings
            .find(|s| s["name"] == name)
            .unwrap_or_else(|| panic!("no {name}"))
            .clone()
    };
    let is = |name: &str, value: &str, from: &str| {
        let it = find(name);
        assert_eq!(
            (it["value"].as_str(), it["from"].as_str()),
            (Some(value), Some(from)),
            "{it}"
        );
        it["overridden"].clone()
    };
    is("rbd_cache", "false", "command line");
    is("rbd_cache_policy", "writethrough", "ceph.conf");
    is("ms_async_op_threads", "2", "ceph.conf");
    is("librados_thread_count", "1", "ringdisk");
    is("ms_client_mode", "secure", "command line");
    is("rados_osd_op_timeout", "0", "default");
    let overridden = is("rbd_io_scheduler", "none", "image");
    let expected = serde_json::json!([
        { "from": "ceph.conf", "value": "none" },
        { "from": "command line", "value": "simple" },
    ]);
    assert_eq!(overridden, expected);
    assert!(find("librbd")["value"].is_string());
    let allocator = find("allocator");
    let about = allocator["about"].as_str().unwrap();
    match cfg!(feature = "tcmalloc") {
        true => assert_eq!(allocator["value"], "tcmalloc"),
        // A slow setting is reported with a remedy.
        false => assert!(
            allocator["value"] != "libc malloc" || about.contains("libtcmalloc-minimal4"),
            "{allocator}"
        ),
    }
    let text = ringdisk(&["list", "--explain", "--control", &control]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(
        text.contains("simple from command line is OVERRIDDEN"),
        "{text}"
    );
}
