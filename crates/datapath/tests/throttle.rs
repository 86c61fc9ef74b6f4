//! Limits as a guest meets them: no more than they say is completed, nothing that they hold is lost, and what they do not
//! concern does not wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{FACTS, Served};
use block::{Aio, Backing, Rate, ThrottleLimits};
use datapath::{Disk, IoThread, Options, Polling, ThrottleGroup};
use image::Image;
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::faulty::{Faults, Faulty, MemoryDisk};

const DISK_BYTES: u64 = 4 << 20;
const DEPTH: u16 = 32;

/// Time's worth of a limit that may pass at once, and one request.
const SLACK: Duration = Duration::from_millis(50);

fn iops(average: u64) -> ThrottleLimits {
    ThrottleLimits {
        iops_total: rate(average),
        ..ThrottleLimits::NONE
    }
}

fn rate(average: u64) -> Rate {
    Rate {
        average,
        max: 0,
        max_length: 1,
    }
}

/// A disk that keeps nothing, or one in memory.
fn serve(null: bool) -> (Arc<Disk>, Served, Device) {
    let faults = Faults {
        short: 100,
        late: 3,
        ..Faults::NONE
    };
    let memory = MemoryDisk::new(DISK_BYTES as usize);
    let thread = IoThread::spawn(
        "io-0".into(),
        Polling::up_to(Duration::from_micros(50)),
        move || Faulty::new(memory, faults, 1),
    );
    let (image, file) = if null {
        (Image::Null, None)
    } else {
        let file = Arc::new(tempfile::tempfile().unwrap().into());
        (Image::raw(), Some((file, Backing::File, Aio::Auto)))
    };
    let name = "limited".to_owned();
    let disk = Arc::new(Disk::new(
        name,
        image,
        file,
        FACTS,
        DISK_BYTES,
        "",
        Options::default(),
    ));
    let served = Served::new(disk.clone(), Arc::new(vec![thread.unwrap()]), 1, 256);
    let config = DeviceConfig {
        slots: DEPTH,
        buffer_len: 4096,
        ..DeviceConfig::default()
    };
    let device = Device::connect(served.socket(), &config).unwrap();
    (disk, served, device)
}

fn submit(device: &mut Device, op: Op, slots: impl Iterator<Item = u16>) {
    let slots: Vec<u16> = slots.collect();
    let queue = &mut device.queues[0];
    slots
        .iter()
        .for_each(|&slot| queue.prepare(slot, op, u64::from(slot) * 8, 4096));
    queue.submit(&slots);
}

/// Keeps the queue full until this many requests are done.
fn load(device: &mut Device, requests: usize) {
    submit(device, Op::Read, 0..DEPTH);
    let (mut sent, mut done) = (usize::from(DEPTH), 0);
    while done < requests {
        for (slot, status) in device.queues[0].finish(1) {
            assert_eq!(status, 0);
            done += 1;
            if sent < requests {
                sent += 1;
                submit(device, Op::Write, [slot].into_iter());
            }
        }
    }
}

#[test]
fn a_limit_is_not_exceeded() {
    for null in [true, false] {
        let (disk, _served, mut device) = serve(null);
        disk.set_limits(&iops(2000)).unwrap();
        let start = Instant::now();
        load(&mut device, 400);
        let most = 2000.0 * (start.elapsed() + SLACK).as_secs_f64() + 1.0;
        assert!(400.0 <= most, "400 done where {most} may be");
    }
}

/// With such a limit, kicks are not asked for most of the time.
#[test]
fn depth_one_and_flushes_work_under_a_limit() {
    let (disk, _served, mut device) = serve(false);
    disk.set_limits(&iops(500)).unwrap();
    load(&mut device, 100);
    for op in [Op::Read, Op::Write, Op::Flush, Op::Write, Op::Flush] {
        for _ in 0..10 {
            submit(&mut device, op, 0..1);
            assert_eq!(device.queues[0].finish(1), [(0, 0)]);
        }
    }
}

#[test]
fn two_disks_do_not_exceed_the_limit_of_their_group() {
    let group = Arc::new(ThrottleGroup::new("group".into(), &iops(2000)).unwrap());
    let guests: Vec<_> = [true, false].map(serve).into();
    let start = Instant::now();
    let guests: Vec<_> = guests
        .into_iter()
        .map(|(disk, served, mut device)| {
            disk.set_throttle_group(Some(group.clone()));
            std::thread::spawn(move || {
                load(&mut device, 200);
                served
            })
        })
        .collect();
    guests.into_iter().for_each(|guest| {
        guest.join().unwrap();
    });
    let most = 2000.0 * (start.elapsed() + SLACK).as_secs_f64() + 1.0;
    assert!(400.0 <= most, "400 done where {most} may be");
}

/// One a minute: what is done beyond the first must have another reason.
fn one_a_minute() -> ThrottleLimits {
    // Each request counts as 60 or more.
    ThrottleLimits {
        iops_size: 64,
        ..iops(1)
    }
}

#[test]
fn held_requests_go_when_the_limits_are_removed() {
    for null in [true, false] {
        let (disk, _served, mut device) = serve(null);
        disk.set_limits(&one_a_minute()).unwrap();
        submit(&mut device, Op::Read, 0..DEPTH);
        device.queues[0].finish(1);
        disk.set_limits(&ThrottleLimits::NONE).unwrap();
        device.queues[0].finish(usize::from(DEPTH) - 1);
        load(&mut device, 1000);
    }
}

#[test]
fn a_stopping_queue_finishes_held_requests() {
    for null in [true, false] {
        let (disk, _served, mut device) = serve(null);
        disk.set_limits(&one_a_minute()).unwrap();
        submit(&mut device, Op::Read, 0..DEPTH);
        device.queues[0].finish(1);
        let base = device.stop_queue(0).unwrap();
        let done = device.queues[0].poll(|_, status| assert_eq!(status, 0));
        // All that was fetched is done; the rest is left to a successor.
        assert_eq!(usize::from(base), 1 + done);
        disk.set_limits(&ThrottleLimits::NONE).unwrap();
        device.start_queue(0, base).unwrap();
        load(&mut device, 1000);
    }
}

#[test]
fn flushes_are_not_held_and_writes_do_not_wait_for_reads() {
    let (disk, _served, mut device) = serve(false);
    disk.set_limits(&one_a_minute()).unwrap();
    submit(&mut device, Op::Write, 0..8);
    device.queues[0].finish(1);
    submit(&mut device, Op::Flush, 8..9);
    assert_eq!(device.queues[0].finish(1), [(8, 0)]);
    submit(&mut device, Op::GetId, 9..10);
    assert_eq!(device.queues[0].finish(1), [(9, 0)]);

    let (disk, _served, mut device) = serve(false);
    let reads = ThrottleLimits {
        iops_read: rate(1),
        iops_total: rate(0),
        ..one_a_minute()
    };
    disk.set_limits(&reads).unwrap();
    submit(&mut device, Op::Read, 0..8);
    assert_eq!(device.queues[0].finish(1), [(0, 0)]);
    submit(&mut device, Op::Write, 8..DEPTH);
    let done = device.queues[0].finish(usize::from(DEPTH) - 8);
    assert!(done.iter().all(|&(slot, status)| slot >= 8 && status == 0));
}
