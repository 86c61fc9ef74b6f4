//! What is counted is what was done: a guest that keeps its own books compares them with the disk's.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{FACTS, Served};
use block::{Aio, Backing, DetectZeroes, Rate, Request, ThrottleLimits};
use datapath::{Disk, DiskStats, IoAction, IoEvent, IoThread, Options, Polling, RequestStats};
use image::Image;
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::faulty::{Faults, Faulty, MemoryDisk};

const DISK_BYTES: u64 = 4 << 20;
const DEPTH: u16 = 32;
const LEN: u32 = 4096;

fn serve(null: bool, fail: u32) -> (Arc<Disk>, Served, Device) {
    serve_with(null, fail, Options::default())
}

fn serve_with(null: bool, fail: u32, options: Options) -> (Arc<Disk>, Served, Device) {
    let faults = Faults {
        short: 100,
        again: 100,
        fail,
        late: 3,
        room: 16,
        address_alignment: 1,
        length_alignment: 1,
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
    let disk = Arc::new(Disk::new(
        "counted".to_owned(),
        image,
        file,
        FACTS,
        DISK_BYTES,
        "",
        options,
    ));
    let threads = Arc::new(vec![thread.unwrap()]);
    let served = Served::new(disk.clone(), threads, 1, 256);
    let config = DeviceConfig {
        slots: DEPTH,
        buffer_len: LEN,
        ..DeviceConfig::default()
    };
    let device = Device::connect(served.socket(), &config).unwrap();
    (disk, served, device)
}

/// Runs rounds of one kind; returns how many succeeded and how many failed.
fn run(device: &mut Device, op: Op, rounds: usize) -> (u64, u64) {
    let queue = &mut device.queues[0];
    let slots: Vec<u16> = (0..DEPTH).collect();
    let (mut good, mut bad) = (0, 0);
    for _ in 0..rounds {
        for &slot in &slots {
            queue.prepare(slot, op, u64::from(slot) * 8, LEN);
        }
        queue.submit(&slots);
        for (_, status) in queue.finish(slots.len()) {
            match status {
                0 => good += 1,
                _ => bad += 1,
            }
        }
    }
    (good, bad)
}

/// What is counted is shown just after the guest has seen it.
fn settled(disk: &Disk, expected: impl Fn(&DiskStats) -> bool) -> DiskStats {
    loop {
        let stats = disk.stats();
        if expected(&stats) {
            return stats;
        }
        std::thread::yield_now();
    }
}

fn assert_kind(kind: &RequestStats, (good, bad): (u64, u64), bytes: u64) {
    assert_eq!((kind.operations, kind.errors), (good, bad));
    assert_eq!(kind.bytes, good * bytes);
    let latency = &kind.latency;
    for part in [&latency.waiting, &latency.engine, &latency.publishing] {
        assert_eq!(part.count(), good + bad);
    }
    assert_eq!(latency.total.count(), good + bad);
    let parts = latency.waiting.sum_ns() + latency.engine.sum_ns() + latency.publishing.sum_ns();
    assert_eq!(latency.total.sum_ns(), parts);
}

#[test]
fn each_kind_of_request_is_counted_and_timed() {
    for null in [true, false] {
        let (disk, _served, mut device) = serve(null, if null { 0 } else { 50 });
        let measuring = disk.measure();
        let kinds = [
            Op::Read,
            Op::Write,
            Op::Flush,
            Op::Discard,
            Op::WriteZeroes { unmap: true },
        ];
        let done = kinds.map(|op| run(&mut device, op, 20));
        device.queues[0].run(Op::GetId, 0, LEN);
        if !null {
            assert!(done[0].1 > 0 && done[1].1 > 0, "nothing failed");
        }
        let total: u64 = done.iter().map(|d| d.0 + d.1).sum();
        let stats = settled(&disk, |s| {
            let kinds = [&s.read, &s.write, &s.flush, &s.discard, &s.write_zeroes];
            kinds
                .map(|k| k.latency.publishing.count())
                .iter()
                .sum::<u64>()
                == total
        });
        let len = u64::from(LEN);
        assert_kind(&stats.read, done[0], len);
        assert_kind(&stats.write, done[1], len);
        assert_kind(&stats.flush, done[2], 0);
        assert_kind(&stats.discard, done[3], len);
        assert_kind(&stats.write_zeroes, done[4], len);
        assert_eq!((stats.refused, stats.queues), (0, 1));

        // Nobody asks for times any more: they stay, the rest continues.
        drop(measuring);
        let more = run(&mut device, Op::Read, 10);
        let later = settled(&disk, |s| {
            s.read.operations == done[0].0 + more.0 && s.under_way == 0
        });
        let new = later.since(&stats);
        assert_eq!((new.read.operations, new.read.errors), more);
        assert_eq!(new.write, RequestStats::default());
        assert_eq!(new.read.latency.total.count(), 0);
        assert!(new.at_ns > 0 && new.at_ns < later.at_ns);
    }
}

#[test]
fn a_detected_write_of_zeroes_counts_as_a_write() {
    let options = Options {
        detect_zeroes: DetectZeroes::On,
        ..Options::default()
    };
    let (disk, _served, mut device) = serve_with(false, 0, options);
    run(&mut device, Op::Write, 3);
    let stats = settled(&disk, |s| s.write.operations == 96);
    assert_eq!(stats.write_zeroes, RequestStats::default());
}

#[test]
fn counters_outlive_their_queue_and_include_refusals() {
    let (disk, _served, mut device) = serve(true, 0);
    run(&mut device, Op::Write, 3);
    let base = device.stop_queue(0).unwrap();
    let stats = disk.stats();
    assert_eq!((stats.write.operations, stats.queues), (96, 0));
    device.start_queue(0, base).unwrap();
    run(&mut device, Op::Write, 2);
    assert_ne!(device.queues[0].run(Op::Read, DISK_BYTES / 512, LEN), 0);
    let stats = settled(&disk, |s| s.write.operations == 160);
    assert_eq!((stats.refused, stats.queues), (1, 1));
    assert_eq!(stats.read, RequestStats::default());
}

#[test]
fn held_requests_count_as_in_flight() {
    let (disk, _served, mut device) = serve(true, 0);
    let _measuring = disk.measure();
    let average = |average| ThrottleLimits {
        iops_total: Rate {
            average,
            max: 0,
            max_length: 1,
        },
        iops_size: 64,
        ..ThrottleLimits::NONE
    };
    disk.set_limits(&average(1)).unwrap();
    let slots: Vec<u16> = (0..DEPTH).collect();
    let queue = &mut device.queues[0];
    slots
        .iter()
        .for_each(|&slot| queue.prepare(slot, Op::Read, 0, LEN));
    queue.submit(&slots);
    settled(&disk, |s| s.under_way == u64::from(DEPTH) - 1);
    disk.set_limits(&ThrottleLimits::NONE).unwrap();
    device.queues[0].finish(slots.len());
    let stats = settled(&disk, |s| s.read.latency.total.count() == u64::from(DEPTH));
    let latency = &stats.read.latency;
    assert!(latency.waiting.sum_ns() > 0);
    assert!(latency.waiting.percentile_ns(99.0) > latency.engine.percentile_ns(99.0));
}

#[test]
fn events_report_only_failures_of_storage() {
    let (disk, _served, mut device) = serve(false, 0);
    let events: Arc<Mutex<Vec<IoEvent>>> = Arc::default();
    let sink = events.clone();
    assert!(disk.on_event(move |event| sink.lock().unwrap().push(*event)));
    assert!(!disk.on_event(|_| ()));
    run(&mut device, Op::Write, 3);
    assert_ne!(device.queues[0].run(Op::Read, DISK_BYTES / 512, LEN), 0);
    assert_eq!(*events.lock().unwrap(), []);

    let (disk, _served, mut device) = serve(false, 500);
    let sink = events.clone();
    disk.on_event(move |event| sink.lock().unwrap().push(*event));
    let (_, bad) = run(&mut device, Op::Read, 3);
    assert!(bad > 0);
    let events = events.lock().unwrap();
    let Some(IoEvent::Failed(first)) = events.first() else {
        panic!("no failure is reported: {events:?}");
    };
    assert!(matches!(first.request, Request::Read { .. }) && first.errno > 0);
    assert_eq!(first.action, IoAction::Report);
    assert!(events.len() as u64 <= bad);
}

#[test]
fn thread_statistics_grow() {
    let thread = IoThread::spawn(
        "io-0".into(),
        Polling::up_to(Duration::from_micros(50)),
        move || {
            let faults = Faults::NONE;
            Faulty::new(MemoryDisk::new(DISK_BYTES as usize), faults, 1)
        },
    );
    let thread = thread.unwrap();
    loop {
        let stats = thread.stats();
        assert!(stats.polls_hit <= stats.polls);
        let shown = std::path::Path::new("/proc/self/schedstat").exists();
        if stats.sleeps > 0 && (!shown || stats.cpu_ns.is_some_and(|ns| ns > 0)) {
            break;
        }
        std::thread::yield_now();
    }
}
