//! Administrative changes to served images, and a server whose cluster is unreachable.

use std::time::{Duration, Instant};

use testkit::ceph::POOL;
use testkit::driver::{Device, DeviceConfig, HANG, Op};

use super::cluster::{CephVersion, Cluster, ringdisk};
use super::load::Load;

on_each_release!(
    busy_disk_moves_to_an_image_and_back,
    image_is_migrated_in_use,
    served_image_cannot_be_removed,
    repeated_attach_and_detach_leaks_nothing,
    unreachable_cluster_is_refused_and_delays_no_other_disk,
);

const OK: u8 = 0;

fn config() -> DeviceConfig {
    DeviceConfig {
        queues: 2,
        ..DeviceConfig::default()
    }
}

/// From a file to an image, to another image and back, with reads and writes in flight.
fn busy_disk_moves_to_an_image_and_back(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "busy_disk_moves_to_an_image_and_back") else {
        return;
    };
    let file = cluster.folder.path().join("busy.raw");
    let made = std::fs::File::create(&file).unwrap();
    made.set_len(16 << 20).unwrap();
    let socket = cluster.socket("busy").display().to_string();
    let disk = format!("file={},socket={socket},name=busy,queues=2", file.display());
    // The sandbox allows network access only if a disk was in a cluster at startup.
    let other = cluster.image("beside-busy", 8, "");
    let server = cluster.serve(&[&disk, &other]);
    let mut device = Device::connect(&server.sockets[0], &config()).unwrap();
    let mut load = Load::new(&device, 2048);
    load.run(&mut device, 2000);
    load.finish(&mut device);
    assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
    for image in ["busy-1", "busy-2"] {
        let (to, copy) = (format!("{POOL}/{image}"), file.display().to_string());
        let import = ["import", "--no-progress", &copy, &to];
        cluster.ceph().rbd(&import).unwrap();
    }
    load.repeat();
    let access = cluster.ceph().options().replace(',', ":");
    let places = [
        format!("rbd:{POOL}/busy-1{access}"),
        format!("rbd:{POOL}/busy-2{access}"),
        file.display().to_string(),
    ];
    let control = cluster.control().display().to_string();
    for place in &places {
        load.run(&mut device, 300);
        let output = std::thread::scope(|scope| {
            let replace = || ringdisk(&["replace", "--control", &control, "busy", place]);
            let replaced = scope.spawn(replace);
            while !replaced.is_finished() {
                load.run(&mut device, 10);
            }
            replaced.join().unwrap()
        });
        assert!(output.status.success(), "{place}: {output:?}");
        load.run(&mut device, 300);
    }
    load.finish(&mut device);
    drop((device, server));
    load.compare(&std::fs::read(&file).unwrap());
    for image in ["busy-1", "busy-2"] {
        load.compare(&cluster.content(image));
    }
}

/// `rbd migration`: prepared while the image is unused, executed and committed while a guest uses it.
fn image_is_migrated_in_use(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "image_is_migrated_in_use") else {
        return;
    };
    let disk = cluster.image("settler", 32, "queues=2");
    let mut server = cluster.serve(&[&disk]);
    let mut device = Device::connect(server.socket(), &config()).unwrap();
    let mut load = Load::new(&device, 4096);
    load.run(&mut device, 1000);
    load.finish(&mut device);
    assert!(server.terminate().unwrap().success());
    let (from, to) = (format!("{POOL}/settler"), format!("{POOL}/settled"));
    let prepare = ["migration", "prepare", &from, &to];
    cluster.ceph().rbd(&prepare).unwrap();
    let disk = cluster.disk("settled", "queues=2");
    let mut server = cluster.serve(&[&disk]);
    device.reconnect(server.socket(), &config()).unwrap();
    for step in ["execute", "commit"] {
        load.run(&mut device, 500);
        load.fill(&mut device);
        let step = ["migration", step, "--no-progress", &to];
        cluster.ceph().rbd(&step).unwrap();
    }
    load.run(&mut device, 500);
    load.finish(&mut device);
    assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
    drop(device);
    assert!(server.terminate().unwrap().success());
    load.compare(&cluster.content("settled"));
}

/// Ceph refuses to remove a watched image. If its header is removed by force, only this disk is affected.
fn served_image_cannot_be_removed(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "served_image_cannot_be_removed") else {
        return;
    };
    let disk = cluster.image("removed", 32, "name=removed");
    let other = cluster.image("stays", 32, "name=stays");
    let server = cluster.serve(&[&disk, &other]);
    let mut device = Device::connect(&server.sockets[0], &DeviceConfig::default()).unwrap();
    let mut stays = Device::connect(&server.sockets[1], &DeviceConfig::default()).unwrap();
    assert_eq!(device.queues[0].write(8, &[1; 4096]), OK);
    let image = format!("{POOL}/removed");
    assert!(
        cluster
            .ceph()
            .rbd(&["rm", "--no-progress", &image])
            .is_err()
    );
    assert_eq!(device.queues[0].write(16, &[2; 4096]), OK);
    let info = cluster
        .ceph()
        .rbd(&["info", "--format=json", &image])
        .unwrap();
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let id = info["id"].as_str().unwrap();
    let header = format!("rbd_header.{id}");
    cluster.ceph().rados(&["-p", POOL, "rm", &header]).unwrap();
    // Requests of this disk may wait forever.
    let queue = &mut device.queues[0];
    queue.prepare(0, Op::Write, 24, 4096);
    queue.submit(&[0]);
    for sector in 0..100 {
        assert_eq!(stays.queues[0].write(8 * sector, &[4; 4096]), OK);
    }
    let more = cluster.image("later", 32, "name=later");
    let control = cluster.control().display().to_string();
    let output = ringdisk(&["attach", &more, "--control", &control]);
    assert!(output.status.success(), "{output:?}");
    let listed = ringdisk(&["list", "--control", &control]);
    assert!(listed.status.success(), "{listed:?}");
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert_eq!(text.lines().count(), 4, "{text}");
}

/// A detached disk leaves no threads, descriptors or locks.
fn repeated_attach_and_detach_leaks_nothing(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "repeated_attach_and_detach_leaks_nothing")
    else {
        return;
    };
    let stays = cluster.image("always", 8, "name=always,connections=2");
    let comes = cluster.image("comes", 8, "name=comes,connections=2");
    let server = cluster.serve(&[&stays]);
    let control = cluster.control().display().to_string();
    let count = |what: &str| {
        let entries = std::fs::read_dir(format!("/proc/{}/{what}", server.pid()));
        entries.unwrap().count()
    };
    let mut before = None;
    for round in 0..rounds() {
        let output = ringdisk(&["attach", &comes, "--control", &control]);
        assert!(output.status.success(), "{round}: {output:?}");
        let mut device = Device::connect(cluster.socket("comes"), &DeviceConfig::default());
        let queue = &mut device.as_mut().unwrap().queues[0];
        assert_eq!(queue.write(8, &[round as u8; 4096]), OK, "{round}");
        drop(device);
        let output = ringdisk(&["detach", "comes", "--force", "--control", &control]);
        assert!(output.status.success(), "{round}: {output:?}");
        if round == 2 {
            before = Some((count("task"), count("fd")));
        }
    }
    let start = Instant::now();
    // A thread that has ended may stay visible for a moment.
    while before.is_some_and(|(threads, fds)| count("task") > threads || count("fd") > fds) {
        let now = (count("task"), count("fd"));
        assert!(start.elapsed() < HANG, "{before:?}, {now:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let locks = cluster
        .ceph()
        .rbd(&["lock", "ls", &format!("{POOL}/comes")])
        .unwrap();
    assert!(!locks.contains("client"), "{locks}");
}

/// Number of rounds, or `RINGDISK_TEST_ROUNDS`.
fn rounds() -> usize {
    let rounds = std::env::var("RINGDISK_TEST_ROUNDS").ok();
    rounds.and_then(|n| n.parse().ok()).unwrap_or(20)
}

/// A disk whose cluster does not answer is refused with a reason, and other disks work in the meantime.
fn unreachable_cluster_is_refused_and_delays_no_other_disk(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(
        version,
        "unreachable_cluster_is_refused_and_delays_no_other_disk",
    ) else {
        return;
    };
    // Nothing listens there.
    let away = cluster.folder.path().join("away.conf");
    let text = std::fs::read_to_string(cluster.ceph().conf()).unwrap();
    let lines = text.lines().map(|line| {
        if line.starts_with("mon host") {
            "mon host = [v2:127.0.0.1:9/0]".to_owned()
        } else {
            line.to_owned()
        }
    });
    std::fs::write(&away, lines.collect::<Vec<_>>().join("\n") + "\n").unwrap();
    let near = cluster.image("near", 8, "name=near");
    let far = near
        .replace("rbd/near", "rbd/far:client_mount_timeout=3")
        .replace("name=near", "name=far")
        .replace("near.sock", "far.sock")
        .replace(
            &cluster.ceph().conf().display().to_string(),
            &away.display().to_string(),
        );
    // At startup, and beside served disks.
    let said = cluster.refused_as(&far);
    for part in ["cannot connect to the cluster", "do its monitors run"] {
        assert!(said.contains(part), "{said}");
    }
    let server = cluster.serve(&[&near]);
    let mut device = Device::connect(server.socket(), &DeviceConfig::default()).unwrap();
    let control = cluster.control().display().to_string();
    std::thread::scope(|scope| {
        let attached = scope.spawn(|| ringdisk(&["attach", &far, "--control", &control]));
        let mut listed = 0;
        while !attached.is_finished() {
            assert_eq!(device.queues[0].write(8, &[1; 4096]), OK);
            let list = ringdisk(&["list", "--control", &control]);
            assert!(list.status.success(), "{list:?}");
            listed += 1;
        }
        let output = attached.join().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && listed > 1, "{listed}: {said}");
        assert!(said.contains("do its monitors run"), "{said}");
    });
}
