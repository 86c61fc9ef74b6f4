//! Clients on the cluster's blocklist: what happens to their disks, and to other disks of the same process.

use std::time::{Duration, Instant};

use testkit::ceph::POOL;
use testkit::driver::{Device, DeviceConfig, HANG, Op};

use super::cluster::{CephVersion, Cluster, ringdisk};

on_each_release!(
    blocklisted_client_stops_with_an_error,
    other_disks_get_a_new_client,
    opening_a_disk_detects_the_blocklist,
    detach_reports_lost_cached_writes,
);

const OK: u8 = 0;
const IOERR: u8 = 1;

/// Puts the client that has the image open on the blocklist.
pub fn blocklist(cluster: &mut Cluster, image: &str) {
    let image = format!("{POOL}/{image}");
    let ceph = cluster.ceph();
    let status = ceph.rbd(&["status", "--format=json", &image]).unwrap();
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let address = status["watchers"][0]["address"].as_str().unwrap();
    ceph.ceph(&["osd", "blocklist", "add", address]).unwrap();
}

fn connect(socket: impl AsRef<std::path::Path>) -> Device {
    Device::connect(socket, &DeviceConfig::default()).unwrap()
}

/// Writes until a write fails: the OSDs learn of the blocklist from their next map.
fn write_until_error(device: &mut Device) {
    let start = Instant::now();
    while device.queues[0].write(8, &[2; 4096]) == OK {
        assert!(start.elapsed() < HANG, "writes still succeed");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn storage(cluster: &Cluster, name: &str) -> String {
    let control = cluster.control().display().to_string();
    let listed = ringdisk(&["list", "--json", "--control", &control]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let mut disks = listed.as_array().unwrap().iter();
    let disk = disks.find(|disk| disk["name"] == name);
    disk.map_or("gone".into(), |disk| {
        disk["storage"].as_str().unwrap_or("-").to_owned()
    })
}

/// Runs a command that must succeed.
fn succeed(cluster: &Cluster, arguments: &[&str]) {
    let control = cluster.control().display().to_string();
    let output = ringdisk(&[arguments, &["--control", &control]].concat());
    assert!(output.status.success(), "{arguments:?}: {output:?}");
}

/// The disk writes nothing more and reports why; after a detach and attach it has a new client.
fn blocklisted_client_stops_with_an_error(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "blocklisted_client_stops_with_an_error") else {
        return;
    };
    let disk = cluster.image("banned", 32, "");
    let server = cluster.serve(&[&disk]);
    let mut device = connect(server.socket());
    assert_eq!(device.queues[0].write(8, &[1; 4096]), OK);
    blocklist(&mut cluster, "banned");
    write_until_error(&mut device);
    assert_eq!(device.queues[0].write(16, &[2; 4096]), IOERR);
    server.wait_for_log(&["RBD_BLOCKLISTED"]);
    let times = server.log().matches("RBD_BLOCKLISTED").count();
    assert_eq!(times, 1);
    drop(device);
    drop(server);
    let server = cluster.serve(&[&disk]);
    let mut device = connect(server.socket());
    assert_eq!(device.queues[0].write(16, &[3; 4096]), OK);
}

/// Disks that share a connection fail together, but each is repaired on its own, and new disks do not use that
/// connection.
fn other_disks_get_a_new_client(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "other_disks_get_a_new_client") else {
        return;
    };
    let disks = ["sick", "neighbour"].map(|name| {
        let more = format!("name={name},connections=1");
        cluster.image(name, 32, &more)
    });
    let fresh = cluster.image("fresh", 32, "name=fresh,connections=1");
    cluster.image("target", 32, "");
    let file = cluster.folder.path().join("healthy.raw");
    let made = std::fs::File::create(&file).unwrap();
    made.set_len(32 << 20).unwrap();
    let socket = cluster.socket("healthy").display().to_string();
    let healthy = format!("file={},socket={socket},name=healthy", file.display());
    let server = cluster.serve(&[&disks[0], &disks[1], &healthy]);
    let mut sick = connect(&server.sockets[0]);
    let mut neighbour = connect(&server.sockets[1]);
    let mut device = connect(&server.sockets[2]);
    assert_eq!(sick.queues[0].write(8, &[1; 4096]), OK);
    assert_eq!(neighbour.queues[0].write(8, &[1; 4096]), OK);
    assert_eq!(storage(&cluster, "sick"), "works");
    blocklist(&mut cluster, "sick");
    write_until_error(&mut sick);
    for name in ["sick", "neighbour"] {
        assert_eq!(storage(&cluster, name), "blocklisted");
    }
    assert_eq!(storage(&cluster, "healthy"), "works");
    // As the log advises; with cache=none, nothing is lost.
    drop(sick);
    succeed(&cluster, &["detach", "sick"]);
    assert_eq!(storage(&cluster, "sick"), "gone");
    succeed(&cluster, &["attach", &disks[0]]);
    let mut sick = connect(&server.sockets[0]);
    assert_eq!(sick.queues[0].write(8, &[3; 4096]), OK);
    assert_eq!(storage(&cluster, "sick"), "works");
    // A disk that was never used, and a disk that is moved.
    succeed(&cluster, &["attach", &fresh]);
    let mut fresh = connect(cluster.socket("fresh"));
    assert_eq!(fresh.queues[0].write(8, &[4; 4096]), OK);
    let access = cluster.ceph().options().replace(',', ":");
    let target = format!("rbd:{POOL}/target:connections=1{access}");
    succeed(&cluster, &["replace", "healthy", &target]);
    assert_eq!(device.queues[0].write(8, &[5; 4096]), OK);
    // This disk was not detached and attached.
    assert_eq!(neighbour.queues[0].write(16, &[6; 4096]), IOERR);
    assert_eq!(storage(&cluster, "neighbour"), "blocklisted");
    drop(neighbour);
    succeed(&cluster, &["detach", "neighbour"]);
    succeed(&cluster, &["attach", &disks[1]]);
    let mut neighbour = connect(&server.sockets[1]);
    assert_eq!(neighbour.queues[0].write(16, &[7; 4096]), OK);
    drop((sick, neighbour, fresh, device, server));
    for (image, at, byte) in [("sick", 8, 3), ("neighbour", 16, 7), ("target", 8, 5)] {
        let content = cluster.content(image);
        assert!(content[at << 9..][..4096] == [byte; 4096], "{image}");
    }
}

/// Opening another disk is what detects the blocklist, and the disk is opened nevertheless.
fn opening_a_disk_detects_the_blocklist(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "opening_a_disk_detects_the_blocklist") else {
        return;
    };
    let idle = cluster.image("idle", 32, "name=idle,connections=1");
    let next = cluster.image("next", 32, "name=next,connections=1");
    let server = cluster.serve(&[&idle]);
    let mut device = connect(server.socket());
    assert_eq!(device.queues[0].write(8, &[1; 4096]), OK);
    blocklist(&mut cluster, "idle");
    let start = Instant::now();
    let control = cluster.control().display().to_string();
    // The OSD may still block the new client for a moment.
    loop {
        let attached = ringdisk(&["attach", &next, "--control", &control]);
        if attached.status.success() {
            break;
        }
        let text = String::from_utf8_lossy(&attached.stderr).into_owned();
        assert!(
            text.contains("blocklist") && start.elapsed() < HANG,
            "{text}"
        );
    }
    let mut other = connect(cluster.socket("next"));
    while other.queues[0].write(8, &[2; 4096]) != OK {
        assert!(start.elapsed() < HANG, "writes still fail");
        drop(other);
        succeed(&cluster, &["detach", "next"]);
        succeed(&cluster, &["attach", &next]);
        other = connect(cluster.socket("next"));
    }
    assert_eq!(device.queues[0].write(8, &[3; 4096]), IOERR);
    drop(device);
    succeed(&cluster, &["detach", "idle"]);
}

/// With `cache=writeback`, a detach reports what is lost, and that it need not be repeated.
fn detach_reports_lost_cached_writes(version: CephVersion) {
    let Some(mut cluster) = Cluster::get(version, "detach_reports_lost_cached_writes") else {
        return;
    };
    let disk = cluster.image("keeping", 32, "name=keeping,cache=writeback");
    let server = cluster.serve(&[&disk]);
    let mut device = connect(server.socket());
    assert_eq!(device.queues[0].write(8, &[1; 4096]), OK);
    assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
    blocklist(&mut cluster, "keeping");
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < HANG, "flushes still succeed");
        let written = device.queues[0].write(8, &[2; 4096]);
        if written != OK || device.queues[0].run(Op::Flush, 0, 0) != OK {
            break;
        }
    }
    drop(device);
    let control = cluster.control().display().to_string();
    let output = ringdisk(&["detach", "keeping", "--control", &control]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{output:?}");
    for part in ["detached regardless", "blocklist"] {
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(storage(&cluster, "keeping"), "gone");
    succeed(&cluster, &["attach", &disk]);
    let mut device = connect(server.socket());
    assert_eq!(device.queues[0].write(16, &[3; 4096]), OK);
    assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
}
