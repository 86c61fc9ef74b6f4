//! Guest memory is added and removed while requests use other parts of it: no request is lost or done twice, and each
//! transfers its own bytes. QEMU sends such changes when memory is plugged in or out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use testkit::driver::{Device, DeviceConfig, HANG, Op, Queue};

use crate::support::{self, content, serve};

/// Bytes of a request.
const LEN: usize = 16 << 10;

/// Memory changes per kind of disk.
const CHANGES: usize = 150;

#[test]
fn requests_in_flight_survive_memory_changes() {
    for (options, packed) in [
        ("cache=none", false),
        ("cache=none", true),
        ("cache=writeback", false),
        ("cache=none,aio=native", false),
        ("cache=writeback,aio=threads", true),
        ("cache=none,fixed-buffers=on", false),
        // Most of them are throttled when the queue is stopped.
        ("cache=none,iops=2000", false),
    ] {
        let (server, _disk) = serve(&format!("queues=3,{options}"));
        let config = DeviceConfig {
            queues: 3,
            packed,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(server.socket(), &config).unwrap();
        let mut queues = std::mem::take(&mut device.queues);
        let memory = device.memory.clone();
        let (stop, frontend) = (AtomicBool::new(false), &mut device.frontend);
        let done: u64 = thread::scope(|scope| {
            let busy = queues
                .iter_mut()
                .map(|queue| scope.spawn(|| keep_busy(queue, &stop)));
            let busy: Vec<_> = busy.collect();
            let regions = memory.regions();
            let all: Vec<_> = regions[..Device::SPARE].iter().collect();
            for n in 0..CHANGES {
                match n % 10 {
                    // As a front-end does that cannot change single regions.
                    9 => frontend.set_mem_table(&all).unwrap(),
                    _ => {
                        frontend.add_mem_reg(&regions[Device::SPARE]).unwrap();
                        frontend.rem_mem_reg(&regions[Device::SPARE]).unwrap();
                    }
                }
                if busy.iter().any(|thread| thread.is_finished()) {
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
            busy.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(
            done > CHANGES as u64,
            "{options}: only {done} requests were under way"
        );
        let log = server.log();
        support::assert_all_served(&log);
    }
}

/// Requests whose memory is removed wait for it, whatever record the front-end keeps; requests that were already
/// fetched are given back meanwhile.
#[test]
fn requests_wait_for_removed_memory() {
    for (packed, inflight) in [(false, false), (true, false), (false, true), (true, true)] {
        let (server, _disk) = serve("iops=50");
        let config = DeviceConfig {
            packed,
            inflight,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(server.socket(), &config).unwrap();
        let memory = device.memory.clone();
        let region = &memory.regions()[Device::LOW];
        let queue = &mut device.queues[0];
        for slot in 0..4 {
            queue.prepare(slot, Op::Read, u64::from(slot) * 8, 4096);
        }
        for round in 0..3 {
            // The last request has its buffer elsewhere, and is queued behind the others.
            device.frontend.rem_mem_reg(region).unwrap();
            let queue = &mut device.queues[0];
            queue.submit(&[0, 1, 2, 3]);
            assert!(queue.ring.broken(HANG), "{packed} {inflight}: {round}");
            // It is still removed after another change.
            let spare = &memory.regions()[Device::SPARE];
            device.frontend.add_mem_reg(spare).unwrap();
            device.frontend.rem_mem_reg(spare).unwrap();
            device.frontend.add_mem_reg(region).unwrap();
            let done = device.queues[0].finish(4);
            assert!(done.iter().all(|&(_, status)| status == 0), "{done:?}");
            for slot in 0..4 {
                let read = device.queues[0].read_buffer(slot, 4096);
                assert_eq!(read, content(u64::from(slot) * 8, 4096));
                device.queues[0].prepare(slot, Op::Read, u64::from(slot) * 8, 4096);
            }
        }
        // Some requests are in flight when the memory of the next one is removed.
        let queue = &mut device.queues[0];
        queue.submit(&[0, 1]);
        queue.prepare_at(2, Op::Read, 0, 4096, memory.regions()[Device::SPARE].gpa);
        queue.submit(&[2]);
        assert!(queue.ring.broken(HANG));
        assert_eq!(queue.finish(2).len(), 2);
        device
            .frontend
            .add_mem_reg(&memory.regions()[Device::SPARE])
            .unwrap();
        assert_eq!(device.queues[0].finish(1), [(2, 0)]);
    }
}

/// Writes and reads back in every slot, each as soon as it is free; returns the number of requests.
fn keep_busy(queue: &mut Queue, stop: &AtomicBool) -> u64 {
    // For each slot: the last content written, and whether it is being read back.
    let mut slots: Vec<(u64, bool)> = (0..queue.slots())
        .map(|slot| (u64::from(slot), false))
        .collect();
    let (mut under_way, mut done) = (0, 0);
    for slot in 0..queue.slots() {
        start(queue, slot, slots[usize::from(slot)]);
        under_way += 1;
    }
    while under_way > 0 {
        assert!(
            queue.ring.wait_timeout(HANG),
            "queue {}: {under_way} requests are lost",
            queue.index
        );
        let mut completed = Vec::new();
        queue.poll(|slot, status| completed.push((slot, status)));
        for (slot, status) in completed {
            let (seed, reading) = slots[usize::from(slot)];
            assert_eq!(status, 0, "queue {}, slot {slot}", queue.index);
            if reading {
                let found = queue.read_buffer(slot, LEN);
                assert!(
                    found == content(seed, LEN),
                    "queue {}, slot {slot}",
                    queue.index
                );
            }
            (under_way, done) = (under_way - 1, done + 1);
            // Everything written is read back before the end.
            if reading && stop.load(Ordering::Relaxed) {
                continue;
            }
            let next = if reading {
                (seed + 977, false)
            } else {
                (seed, true)
            };
            slots[usize::from(slot)] = next;
            start(queue, slot, next);
            under_way += 1;
        }
    }
    done
}

fn start(queue: &mut Queue, slot: u16, (seed, reading): (u64, bool)) {
    let at = u64::from(queue.index) * 8192 + u64::from(slot) * (LEN as u64 / 512);
    let (op, bytes) = if reading {
        (Op::Read, vec![0xa5; LEN])
    } else {
        (Op::Write, content(seed, LEN))
    };
    queue.write_buffer(slot, &bytes);
    queue.prepare(slot, op, at, LEN as u32);
    queue.submit(&[slot]);
}
