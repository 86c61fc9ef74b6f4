//! Another client resizes an image: no request beyond the new end succeeds.

use testkit::ceph::POOL;
use testkit::driver::{Device, DeviceConfig, Op};

use super::cluster::{CephVersion, Cluster};
use super::load::Load;
use crate::support::wait_until;

on_each_release!(
    requests_beyond_the_new_end_fail,
    requests_beyond_the_new_end_fail_without_exclusive_lock,
    image_shrinks_and_grows_under_load,
);

const OK: u8 = 0;
const IOERR: u8 = 1;

fn resize(cluster: &mut Cluster, image: &str, mib: u64) {
    let (image, size) = (format!("{POOL}/{image}"), format!("{mib}M"));
    let resize = ["resize", "--no-progress", "--allow-shrink"];
    let resize = [&resize[..], &["--size", &size, &image]].concat();
    cluster.ceph().rbd(&resize).unwrap();
}

/// librbd cuts off requests that cross the end, and reports success.
fn requests_beyond_the_new_end_fail(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "requests_beyond_the_new_end_fail") else {
        return;
    };
    let disk = cluster.image("shrinking", 64, "cache=none");
    shrink(&mut cluster, "shrinking", &disk);
}

/// The other client itself does the shrink.
fn requests_beyond_the_new_end_fail_without_exclusive_lock(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(
        version,
        "requests_beyond_the_new_end_fail_without_exclusive_lock",
    ) else {
        return;
    };
    let image = format!("{POOL}/unlocked");
    let create = [
        "create",
        "--image-feature=layering",
        "--size",
        "64M",
        &image,
    ];
    cluster.ceph().rbd(&create).unwrap();
    let disk = cluster.disk("unlocked", "cache=writeback");
    shrink(&mut cluster, "unlocked", &disk);
}

fn shrink(cluster: &mut Cluster, image: &str, disk: &str) {
    let server = cluster.serve(&[disk]);
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let queue = &mut device.queues[0];
    let end = 32 << 11;
    for sector in [0, end - 8, end] {
        assert_eq!(queue.write(sector, &[1; 4096]), OK);
    }
    assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    resize(cluster, image, 32);
    // librbd gets these as one operation if it may.
    for (slot, sector) in [(0, end - 8), (1, end)] {
        queue.write_buffer(slot, &[4; 4096]);
        queue.prepare(slot, Op::Write, sector, 4096);
    }
    queue.submit(&[0, 1]);
    let mut done = queue.finish(2);
    done.sort_unstable();
    assert_eq!(done, [(0, OK), (1, IOERR)]);
    // A write across the end may be partly done, but is reported as failed.
    assert_eq!(queue.write(end - 8, &[2; 8192]), IOERR);
    assert_eq!(queue.write(end, &[2; 4096]), IOERR);
    for op in [
        Op::WriteZeroes { unmap: false },
        Op::WriteZeroes { unmap: true },
        Op::Discard,
    ] {
        assert_eq!(queue.run(op, end - 8, 8192), IOERR, "{op:?}");
        assert_eq!(queue.run(op, end + 8, 4096), IOERR, "{op:?}");
    }
    assert_eq!(queue.write(end - 8, &[3; 4096]), OK);
    assert!(queue.read(end - 8, 8192).is_err());
    assert_eq!(queue.read(end - 8, 4096).unwrap(), [3; 4096]);
    assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    // After growing again, the image accepts writes, and has none of the refused data.
    resize(cluster, image, 64);
    // The library hears of it a moment later.
    wait_until("the growth", || queue.read(end, 4096).is_ok());
    assert_eq!(queue.read(end, 4096).unwrap(), [0; 4096]);
    assert_eq!(queue.write(end - 8, &[5; 8192]), OK);
    assert_eq!(queue.run(Op::Flush, 0, 0), OK);
    drop((device, server));
    let content = cluster.content(image);
    let end = 32 << 20;
    assert!(content[end - 4096..][..8192] == [5; 8192]);
    assert!(content[end + 4096..].iter().all(|&byte| byte == 0));
}

/// Everything before the end is written and read throughout.
fn image_shrinks_and_grows_under_load(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "image_shrinks_and_grows_under_load") else {
        return;
    };
    let disk = cluster.image("moving-end", 64, "queues=2");
    let mut server = cluster.serve(&[&disk]);
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(server.socket(), &config).unwrap();
    let mut load = Load::new(&device, 4096);
    for mib in [32, 64, 16, 48] {
        load.run(&mut device, 300);
        load.fill(&mut device);
        resize(&mut cluster, "moving-end", mib);
    }
    load.run(&mut device, 300);
    load.finish(&mut device);
    drop(device);
    assert!(server.terminate().unwrap().success());
    load.compare(&cluster.content("moving-end"));
}
