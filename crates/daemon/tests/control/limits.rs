//! Limits of disks and groups, measured by what a guest gets through them.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig, Op, Queue};

use super::server::{Controlled, QemuClient};

/// Requests per second.
const LIMIT: u64 = 100;

/// How long a limited disk is measured.
const PERIOD: Duration = Duration::from_secs(2);

#[test]
fn limit_applies_until_removed() {
    let ringdisk = Controlled::start(&[]);
    let test = "limit_applies_until_removed";
    let Some(mut qemu) = QemuClient::connect(test, &ringdisk.control) else {
        return;
    };
    let [mut first, mut second] =
        ["first", "second"].map(|name| null_disk(&ringdisk, &mut qemu, name));
    let group = json!({
        "qom-type": "throttle-group", "id": "both", "limits": { "iops-total": LIMIT },
    });
    qemu.call("object-add", group);

    qemu.call("block_set_io_throttle", limits("first", LIMIT, None));
    let info = |qemu: &mut QemuClient| qemu.call("query-named-block-nodes", json!({}))[0].take();
    assert_eq!(info(&mut qemu)["iops"], LIMIT);
    let (done, in_time) = requests(&mut first.queues[0]);
    assert!(
        done <= max_requests(in_time),
        "{done} requests in {in_time:?} at {LIMIT} a second"
    );
    assert!(done > 0, "a limit is no stop");
    assert_unlimited(&mut second.queues[0]);

    // A group's limit applies to all its disks together.
    for name in ["first", "second"] {
        qemu.call("block_set_io_throttle", limits(name, 0, Some("both")));
    }
    assert_eq!(info(&mut qemu)["group"], "both");
    let both = std::thread::scope(|scope| {
        let each = [&mut first, &mut second].map(|device| {
            let queue = &mut device.queues[0];
            scope.spawn(|| requests(queue))
        });
        each.map(|thread| thread.join().unwrap())
    });
    let (done, in_time) = (both[0].0 + both[1].0, both[0].1.max(both[1].1));
    assert!(
        done <= max_requests(in_time),
        "{done} requests in {in_time:?} of a group with {LIMIT}"
    );
    let group = json!({ "id": "both" });
    qemu.assert_refused(
        "object-del",
        group.clone(),
        "GenericError",
        &["both", "in use"],
    );

    for (name, device) in [("first", &mut first), ("second", &mut second)] {
        qemu.call("block_set_io_throttle", limits(name, 0, None));
        assert_unlimited(&mut device.queues[0]);
    }
    qemu.call("object-del", group);
}

/// A disk is removed, or moved to another file, without waiting for throttled requests.
#[test]
fn throttled_requests_do_not_delay_detach_or_replace() {
    let ringdisk = Controlled::start(&[]);
    let file = ringdisk.file("slow.raw", 1 << 20);
    let copy = ringdisk.file("copy.raw", 1 << 20);
    let attached = ringdisk.json(&[
        "attach",
        &format!("{},iops=1,socket=slow.sock", file.display()),
    ]);
    let socket = attached["socket"].as_str().unwrap();
    for command in [
        &["replace", "slow", "copy.raw"][..],
        &["resize", "slow", "2M"],
        &["detach", "slow", "--force"],
    ] {
        let mut device = Device::connect(socket, &DeviceConfig::default()).unwrap();
        let queue = &mut device.queues[0];
        let slots: Vec<u16> = (0..queue.slots()).collect();
        slots
            .iter()
            .for_each(|&slot| queue.prepare(slot, Op::Read, 8, 4096));
        queue.submit(&slots);
        queue.finish(1);
        // At one request per second, fifteen more wait.
        ringdisk.json(command);
        if command[0] == "resize" {
            continue;
        }
        for (_, status) in queue.finish(slots.len() - 1) {
            assert_eq!(status, 0, "{command:?}");
        }
    }
    assert!(copy.exists() && !std::path::Path::new(socket).exists());
}

fn null_disk(ringdisk: &Controlled, qemu: &mut QemuClient, name: &str) -> Device {
    let socket = ringdisk.path(&format!("{name}.sock"));
    qemu.call(
        "blockdev-add",
        json!({ "driver": "null-co", "node-name": name }),
    );
    let export = json!({
        "type": "vhost-user-blk", "id": name, "node-name": name, "writable": true,
        "addr": { "type": "unix", "path": socket },
    });
    qemu.call("block-export-add", export);
    Device::connect(socket, &DeviceConfig::default()).unwrap()
}

fn limits(disk: &str, iops: u64, group: Option<&str>) -> Value {
    let mut limits = json!({
        "id": disk, "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": iops, "iops_rd": 0, "iops_wr": 0,
    });
    if let Some(group) = group {
        limits["group"] = group.into();
    }
    limits
}

/// Reads for a while; returns the number of reads and the time.
fn requests(queue: &mut Queue) -> (u64, Duration) {
    let start = Instant::now();
    let mut done = 0;
    while start.elapsed() < PERIOD {
        done += batch(queue);
    }
    (done, start.elapsed())
}

/// As many reads as there are slots.
fn batch(queue: &mut Queue) -> u64 {
    let slots: Vec<u16> = (0..queue.slots()).collect();
    slots
        .iter()
        .for_each(|&slot| queue.prepare(slot, Op::Read, 8, 4096));
    queue.submit(&slots);
    let done = queue.finish(slots.len());
    assert!(done.iter().all(|(_, status)| *status == 0));
    done.len() as u64
}

/// The most that a limit may let through: 1.5 times its rate, plus a burst at the start.
fn max_requests(time: Duration) -> u64 {
    LIMIT * time.as_millis() as u64 * 3 / 2000 + 2 * u64::from(DeviceConfig::default().slots)
}

/// Expects far more requests than a limit would let through in that time.
fn assert_unlimited(queue: &mut Queue) {
    let (start, mut done) = (Instant::now(), 0);
    while done < 50 * LIMIT {
        done += batch(queue);
    }
    let time = start.elapsed();
    assert!(
        done > max_requests(time),
        "{done} requests took {time:?}, as if they were limited"
    );
}
