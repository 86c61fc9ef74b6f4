//! Faults in a cluster, and how they are reported.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use testkit::ceph::POOL;
use testkit::driver::{Device, DeviceConfig, HANG, Op};

use super::cluster::{CephVersion, Cluster, ringdisk};
use super::load::Load;

on_each_release!(
    osd_and_monitor_restarts_lose_no_request,
    exclusive_lock_moves_to_the_writer,
    restarted_ringdisk_takes_over_the_lock_and_requests,
    unresponsive_cluster_times_out_and_recovers,
    full_pool_follows_the_error_policy,
    pool_at_its_quota_stops_the_disk,
    running_disk_moves_between_images_and_files,
);

const OK: u8 = 0;
const IOERR: u8 = 1;

/// An OSD and the monitor are killed and restarted: requests wait, and none is lost.
fn osd_and_monitor_restarts_lose_no_request(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "osd_and_monitor_restarts_lose_no_request")
    else {
        return;
    };
    let disk = cluster.image("hardy", 64, "queues=2");
    let mut server = cluster.serve(&[&disk]);
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(server.socket(), &config).unwrap();
    let mut load = Load::new(&device, 2048);
    load.run(&mut device, 300);
    load.fill(&mut device);
    cluster.ceph().kill_osd(1).unwrap();
    load.fill(&mut device);
    cluster.ceph().wait_for_down(1).unwrap();
    load.run(&mut device, 300);
    load.fill(&mut device);
    cluster.ceph().restart_mon().unwrap();
    load.run(&mut device, 300);
    cluster.ceph().start_osd(1).unwrap();
    cluster.ceph().wait_for_osds().unwrap();
    load.run(&mut device, 300);
    load.finish(&mut device);
    assert_eq!(device.queues[1].run(Op::Flush, 0, 0), OK);
    drop(device);
    assert!(server.terminate().unwrap().success());
    load.compare(&cluster.content("hardy"));
}

/// The exclusive lock moves to the client that writes, and everything written before is there.
fn exclusive_lock_moves_to_the_writer(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "exclusive_lock_moves_to_the_writer") else {
        return;
    };
    let disk = cluster.image("moving", 32, "");
    let source = cluster.serve(&[&disk]);
    let mut at_source = Device::connect(source.socket(), &DeviceConfig::default()).unwrap();
    assert_eq!(at_source.queues[0].write(8, &[1; 4096]), OK);
    let target_folder = tempfile::tempdir().unwrap();
    let socket = target_folder
        .path()
        .join("target.sock")
        .display()
        .to_string();
    let control = target_folder.path().join("c.qmp").display().to_string();
    let disk = disk.replace(&cluster.socket("moving").display().to_string(), &socket);
    let target = cluster.start(&["--control", &control, &disk]);
    let mut at_target = Device::connect(target.socket(), &DeviceConfig::default()).unwrap();
    assert_eq!(at_target.queues[0].read(8, 4096).unwrap(), [1; 4096]);
    assert_eq!(at_source.queues[0].write(16, &[2; 4096]), OK);
    // From here on, the guest runs at the target.
    assert_eq!(at_target.queues[0].write(24, &[3; 4096]), OK);
    let owner = |control: &str| {
        let listed = ringdisk(&["list", "--explain", "--json", "--control", control]);
        let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
        let settings = listed[0]["settings"].as_array().unwrap().clone();
        settings.into_iter().find(|s| s["name"] == "lock").unwrap()["value"].clone()
    };
    assert_eq!(owner(&control), "ours");
    assert_eq!(owner(&cluster.control().display().to_string()), "not ours");
    drop((at_source, source));
    for (sector, byte) in [(8, 1), (16, 2), (24, 3)] {
        assert_eq!(
            at_target.queues[0].read(sector, 4096).unwrap(),
            [byte; 4096]
        );
    }
}

/// After `kill -9` or SIGTERM, the next ringdisk takes over the lock and completes the requests in flight.
fn restarted_ringdisk_takes_over_the_lock_and_requests(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(
        version,
        "restarted_ringdisk_takes_over_the_lock_and_requests",
    ) else {
        return;
    };
    let disk = cluster.image("survivor", 64, "queues=2,queue-size=64");
    let config = DeviceConfig {
        queues: 2,
        queue_size: 64,
        inflight: true,
        ..DeviceConfig::default()
    };
    let mut server = cluster.serve(&[&disk]);
    let mut device = Device::connect(server.socket(), &config).unwrap();
    assert!(device.inflight.is_some(), "no inflight region was offered");
    let mut load = Load::new(&device, 1024);
    for signal in [Signal::KILL, Signal::TERM, Signal::KILL] {
        load.run(&mut device, 200);
        load.fill(&mut device);
        server.signal(signal);
        server.ended().unwrap();
        server = cluster.serve(&[&disk]);
        device.reconnect(server.socket(), &config).unwrap();
    }
    load.run(&mut device, 200);
    load.finish(&mut device);
    drop(device);
    assert!(server.terminate().unwrap().success());
    load.compare(&cluster.content("survivor"));
}

/// With a timeout, the guest gets an error instead of waiting forever, and continues when the cluster is back.
fn unresponsive_cluster_times_out_and_recovers(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "unresponsive_cluster_times_out_and_recovers")
    else {
        return;
    };
    let disk = cluster.image("alone", 32, "");
    let disk = disk.replace("rbd/alone", "rbd/alone:rados_osd_op_timeout=2");
    let server = cluster.serve(&[&disk]);
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].write(8, &[1; 4096]), OK);
    for osd in 0..3 {
        cluster.ceph().kill_osd(osd).unwrap();
    }
    assert_eq!(device.queues[0].write(16, &[2; 4096]), IOERR);
    server.wait_for_log(&["timed out"]);
    for osd in 0..3 {
        cluster.ceph().start_osd(osd).unwrap();
    }
    cluster.ceph().wait_for_osds().unwrap();
    let start = Instant::now();
    while device.queues[0].write(16, &[2; 4096]) != OK {
        assert!(start.elapsed() < HANG, "writes still fail");
    }
    assert_eq!(device.queues[0].read(8, 4096).unwrap(), [1; 4096]);
}

/// In a full pool, requests that need space wait, which is reported; reads and requests that need no space complete.
/// With the `report` policy, the guest gets the error.
fn full_pool_follows_the_error_policy(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "full_pool_follows_the_error_policy") else {
        return;
    };
    let patient = cluster.image("patient", 32, "name=patient,queues=2");
    let hasty = cluster.image("hasty", 32, "name=hasty,werror=report");
    let server = cluster.serve(&[&patient, &hasty]);
    let mut client = control::Client::connect(cluster.control(), HANG).unwrap();
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(&server.sockets[0], &config).unwrap();
    let mut impatient = Device::connect(&server.sockets[1], &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].write(8, &[1; 4096]), OK);
    assert_eq!(impatient.queues[0].write(8, &[1; 4096]), OK);
    cluster.ceph().fill_up(true).unwrap();
    // The OSDs learn of it from their next map, and accept writes until then.
    let start = Instant::now();
    let mut sector = 16;
    while impatient.queues[0].write(sector, &[2; 4096]) == OK {
        assert!(start.elapsed() < HANG, "writes still succeed");
        sector += 8;
    }
    // Two requests are merged, one of which needs no space: that one must not fail.
    let queue = &mut impatient.queues[0];
    for (slot, at) in [(0, sector - 8), (1, sector)] {
        queue.write_buffer(slot, &[5; 4096]);
        queue.prepare(slot, Op::Write, at, 4096);
    }
    queue.submit(&[0, 1]);
    let mut done = queue.finish(2);
    done.sort_unstable();
    assert_eq!(done, [(0, OK), (1, IOERR)]);
    let queue = &mut device.queues[0];
    queue.prepare(0, Op::Write, 16, 4096);
    queue.write_buffer(0, &[3; 4096]);
    queue.submit(&[0]);
    let told = event(&mut client, |e| e["data"]["device"] == "patient");
    assert_eq!(told["event"], "BLOCK_IO_ERROR");
    assert_eq!(told["data"]["nospace"], true, "{told}");
    // The same disk in the meantime.
    assert_eq!(device.queues[1].read(8, 4096).unwrap(), [1; 4096]);
    assert_eq!(device.queues[1].write(8, &[4; 4096]), OK);
    assert_eq!(impatient.queues[0].run(Op::Discard, 0, 4 << 20), OK);
    assert_eq!(device.queues[0].poll(|_, _| ()), 0, "the request must wait");
    cluster.ceph().fill_up(false).unwrap();
    assert_eq!(device.queues[0].finish(1), [(0, OK)]);
    event(&mut client, |e| e["event"] == "BLOCK_IO_RESUMED");
    assert_eq!(device.queues[1].read(16, 4096).unwrap(), [3; 4096]);
    let start = Instant::now();
    while impatient.queues[0].write(16, &[4; 4096]) != OK {
        assert!(start.elapsed() < HANG, "writes still fail");
    }
    drop((device, impatient, server));
    let content = cluster.content("patient");
    assert!(content[8 << 9..][..4096] == [4; 4096]);
    assert!(content[16 << 9..][..4096] == [3; 4096]);
}

/// A disk whose pool is at its quota stops, and resumes on command without losing anything.
fn pool_at_its_quota_stops_the_disk(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "pool_at_its_quota_stops_the_disk") else {
        return;
    };
    let disk = cluster.image("stopping", 64, "name=stopping,queues=2,werror=stop");
    let mut server = cluster.serve(&[&disk]);
    let control = cluster.control().display().to_string();
    let mut client = control::Client::connect(&control, HANG).unwrap();
    let config = DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    };
    let mut device = Device::connect(server.socket(), &config).unwrap();
    let mut load = Load::new(&device, 16384);
    load.run(&mut device, 20);
    cluster.ceph().limit(4096, true).unwrap();
    let storage = |client: &mut control::Client| {
        let stats = client.call("x-ringdisk-stats", serde_json::json!({}));
        stats.unwrap()["disks"][0]["storage"].clone()
    };
    let wait_until = |client: &mut control::Client, state: &str, each: &mut dyn FnMut()| {
        let start = Instant::now();
        while storage(client) != state {
            assert!(start.elapsed() < HANG, "the disk never becomes '{state}'");
            each();
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait_until(&mut client, "stopped", &mut || {
        load.fill(&mut device);
        load.take(&mut device);
    });
    let told = event(&mut client, |e| e["event"] == "BLOCK_IO_ERROR");
    let expected = serde_json::json!(["stopping", "write", "stop", true]);
    let data = &told["data"];
    let found = [
        &data["device"],
        &data["operation"],
        &data["action"],
        &data["nospace"],
    ];
    assert_eq!(serde_json::json!(found), expected, "{told}");
    load.fill(&mut device);
    let resume = || ringdisk(&["resume", "stopping", "--control", &control]);
    // Too early: the disk stops again.
    assert!(resume().status.success());
    wait_until(&mut client, "stopped", &mut || ());
    cluster.ceph().limit(0, false).unwrap();
    assert_eq!(
        storage(&mut client),
        "stopped",
        "the disk resumed without a command"
    );
    // An OSD may have an older map than the monitor.
    wait_until(&mut client, "works", &mut || {
        assert!(resume().status.success());
        load.take(&mut device);
    });
    load.run(&mut device, 300);
    load.finish(&mut device);
    drop(device);
    assert!(server.terminate().unwrap().success());
    load.compare(&cluster.content("stopping"));
}

/// Waits for the next event of this name.
fn event(
    client: &mut control::Client,
    is: impl Fn(&serde_json::Value) -> bool,
) -> serde_json::Value {
    loop {
        let event = client.event(HANG).unwrap().expect("no event came");
        if is(&event) {
            return event;
        }
    }
}

/// A disk under writes moves to an image, to another image, and back to a file: nothing is lost.
fn running_disk_moves_between_images_and_files(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "running_disk_moves_between_images_and_files")
    else {
        return;
    };
    let file = cluster.folder.path().join("moved.raw");
    std::fs::File::create(&file)
        .unwrap()
        .set_len(32 << 20)
        .unwrap();
    let socket = cluster.socket("moved");
    let disk = format!(
        "file={},socket={},name=moved,cache=writeback",
        file.display(),
        socket.display()
    );
    // The sandbox allows network access only if a disk was in a cluster at startup.
    let other = cluster.image("other", 8, "");
    let server = cluster.serve(&[&disk, &other]);
    let mut device = Device::connect(&server.sockets[0], &DeviceConfig::default()).unwrap();
    let access = cluster.ceph().options().replace(',', ":");
    let control = cluster.control().display().to_string();
    let replace = |file: &str| ringdisk(&["replace", "--control", &control, "moved", file]);
    let mut expected = vec![0u8; 32 << 20];
    let mut bring = |device: &mut Device, round: u8| {
        let sector = 64 * u64::from(round);
        assert_eq!(device.queues[0].write(sector, &[round; 8192]), OK);
        assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
        expected[sector as usize * 512..][..8192].fill(round);
        expected.clone()
    };
    bring(&mut device, 1);
    let now = bring(&mut device, 2);
    for (round, image) in [(3, "first"), (4, "second")] {
        // A copy made by Ceph's own tools.
        let copy = cluster.folder.path().join("copy");
        std::fs::write(
            &copy,
            if round == 3 {
                now.clone()
            } else {
                bring(&mut device, 9)
            },
        )
        .unwrap();
        let to = format!("{POOL}/{image}");
        let copy = copy.display().to_string();
        let import = ["import", "--no-progress", &copy, &to];
        cluster.ceph().rbd(&import).unwrap();
        // The second image is in the same cluster as the first: it needs no options for access.
        let access = if round == 3 { access.as_str() } else { "" };
        let done = replace(&format!("rbd:{to}{access}"));
        assert!(done.status.success(), "{done:?}");
        let now = bring(&mut device, round);
        assert_eq!(cluster.content(image), now, "{image}");
    }
    let done = replace("rbd:rbd/nothing");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(
        !done.status.success() && said.contains("no such image"),
        "{said}"
    );
    assert_eq!(device.queues[0].read(64, 8192).unwrap(), [1; 8192]);
    std::fs::write(&file, cluster.content("second")).unwrap();
    let done = replace(&file.display().to_string());
    assert!(done.status.success(), "{done:?}");
    let now = bring(&mut device, 5);
    drop((device, server));
    assert!(std::fs::read(&file).unwrap() == now);
}
