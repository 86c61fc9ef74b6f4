//! Another file for a disk while guests use it: they notice nothing, whatever fails, and whatever starts and stops
//! meanwhile. And a disk that grows while it is used.

mod lying;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::{FACTS, Served};
use block::{CacheMode, DiskFacts};
use datapath::{Disk, IoThread, Options, Polling, Replacement, Storage};
use engine::{Uring, UringError};
use image::Image;
use lying::Lying;
use testkit::driver::{Device, DeviceConfig, Op};
use testkit::qemu_img as qemu;
use testkit::random::Random;

const DISK_BYTES: u64 = 1 << 20;
const QUEUES: u16 = 4;
const SLOTS: u16 = 8;
/// Sectors of a request.
const LEN: u64 = 8;
/// Requests of one slot go to its own range.
const RANGE: u64 = (DISK_BYTES / 512) / (QUEUES * SLOTS) as u64;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;

struct Setup {
    disk: Arc<Disk>,
    threads: Arc<Vec<IoThread>>,
    served: Served,
    lying: Lying,
}

/// A disk with several queues on several threads, or `None` where there is no io_uring.
fn setup(threads: usize) -> Option<Setup> {
    let lying = Lying::raw(DISK_BYTES);
    let options = Options {
        cache: CacheMode::Writeback,
        ..Options::default()
    };
    let disk = Disk::new(
        "moving".into(),
        Image::raw(),
        lying.files(),
        FACTS,
        DISK_BYTES,
        "",
        options,
    );
    let disk = Arc::new(disk);
    let thread = |i| {
        let make = || Ok(Uring::new()?);
        let thread = IoThread::spawn(
            format!("io-{i}"),
            Polling::up_to(Duration::from_micros(50)),
            make,
        );
        thread.map_err(|e: Box<dyn std::error::Error + Send + Sync>| {
            let known = e.downcast_ref::<UringError>();
            assert!(!matches!(known, None | Some(UringError::Other(_))), "{e}");
            println!("skipped: {e}");
        })
    };
    let threads: Result<Vec<_>, ()> = (0..threads).map(thread).collect();
    let threads = Arc::new(threads.ok()?);
    let served = Served::new(disk.clone(), threads.clone(), QUEUES, 256);
    Some(Setup {
        disk,
        threads,
        served,
        lying,
    })
}

fn replacement(new: &Lying, size: u64, facts: DiskFacts) -> Replacement {
    Replacement {
        image: new.image.clone(),
        storage: new.files().map(Storage::from).collect(),
        facts,
        size,
    }
}

fn connect(served: &Served) -> Device {
    let config = DeviceConfig {
        queues: QUEUES,
        slots: SLOTS,
        buffer_len: (LEN * 512) as u32,
        ..DeviceConfig::default()
    };
    Device::connect(served.socket(), &config).unwrap()
}

/// Writes and reads on all queues at once, each read checked; stops and starts queues. Until it is told to stop.
fn use_it(device: &mut Device, stop: &AtomicBool, done: &AtomicU64) -> Vec<u8> {
    let mut model = vec![0; DISK_BYTES as usize];
    let mut random = Random(std::process::id().into());
    let len = (LEN * 512) as usize;
    while !stop.load(Ordering::Relaxed) {
        // What each slot does: a write of these bytes, or a read, from here on.
        let mut doing = Vec::new();
        for queue in &mut device.queues {
            for slot in 0..SLOTS {
                let first = (u64::from(queue.index * SLOTS + slot)) * RANGE;
                let at = first + random.below(RANGE / LEN) * LEN;
                let data = match random.below(2) {
                    0 => None,
                    _ => Some(random.any().to_le_bytes().repeat(len / 8)),
                };
                match &data {
                    Some(data) => queue.write_buffer(slot, data),
                    None => queue.write_buffer(slot, &vec![0xa5; len]),
                }
                let op = if data.is_some() { Op::Write } else { Op::Read };
                queue.prepare(slot, op, at, len as u32);
                doing.push((at as usize * 512, data));
            }
            queue.submit(&(0..SLOTS).collect::<Vec<_>>());
        }
        for queue in &mut device.queues {
            for (slot, status) in queue.finish(usize::from(SLOTS)) {
                assert_eq!(status, OK);
                let (at, data) = &doing[usize::from(queue.index * SLOTS + slot)];
                match data {
                    Some(data) => model[*at..at + len].copy_from_slice(data),
                    None => assert!(queue.read_buffer(slot, len) == model[*at..at + len], "{at}"),
                }
                done.fetch_add(1, Ordering::Relaxed);
            }
        }
        if random.below(20) == 0 {
            let ring = random.below(QUEUES.into()) as usize;
            let base = device.stop_queue(ring).unwrap();
            device.start_queue(ring, base).unwrap();
        }
        assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
    }
    model
}

/// Swaps what the disk is in again and again under load, every third time in vain: raw files, images, and images that
/// build on another. What the guest wrote is in the last one, and nothing more was written to those before.
#[test]
fn the_guest_does_not_notice() {
    let images = qemu::is_there("the_guest_does_not_notice: images");
    for threads in [1, 3] {
        let Some(mut setup) = setup(threads) else {
            return;
        };
        let mut device = connect(&setup.served);
        let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
        let model = thread::scope(|scope| {
            let guest = scope.spawn(|| use_it(&mut device, &stop, &done));
            for swap in 0..60 {
                let before = done.load(Ordering::Relaxed);
                let new = match swap % 4 {
                    1 if images => Lying::qcow2(DISK_BYTES, false),
                    2 if images => Lying::qcow2(DISK_BYTES, true),
                    _ => Lying::raw(DISK_BYTES),
                };
                let fails = swap % 3 == 2;
                let facts = DiskFacts {
                    address_alignment: [1, 512][swap % 2],
                    length_alignment: [1, 512][swap % 2],
                    ..FACTS
                };
                let mut bytes = Vec::new();
                let new_facts = replacement(&new, DISK_BYTES, facts);
                let ready = |new| match swap % 6 {
                    5 => Err(io::Error::other("not ready")),
                    _ => Ok(new),
                };
                let result = setup.disk.replace(&setup.threads, new_facts, ready, || {
                    bytes = setup.lying.content(DISK_BYTES);
                    thread::sleep(Duration::from_millis(1));
                    assert!(
                        setup.lying.content(DISK_BYTES) == bytes,
                        "something is under way"
                    );
                    new.fill(&bytes);
                    if fails {
                        Err(io::Error::other("not recorded"))
                    } else {
                        Ok(())
                    }
                });
                assert_eq!(result.is_err(), fails, "{result:?}");
                if !fails {
                    // Nothing goes to the old one any more.
                    setup.lying.ends_with(&bytes);
                    setup.lying = new;
                }
                while done.load(Ordering::Relaxed) < before + 200 && !guest.is_finished() {
                    thread::yield_now();
                }
            }
            stop.store(true, Ordering::Relaxed);
            guest.join().unwrap()
        });
        assert!(setup.lying.content(DISK_BYTES) == model);
        drop(device);
        setup.lying.ends_with(&model);
    }
}

#[test]
fn unfit_files_are_refused_before_the_pause() {
    let Some(setup) = setup(1) else { return };
    let mut device = connect(&setup.served);
    let new = Lying::raw(DISK_BYTES);
    let large_blocks = DiskFacts {
        logical_block: 4096,
        ..FACTS
    };
    let read_only = DiskFacts {
        read_only: true,
        ..FACTS
    };
    for (size, facts, says) in [
        (DISK_BYTES - 512, FACTS, "bytes, and the disk"),
        (DISK_BYTES, large_blocks, "blocks of 4096"),
        (DISK_BYTES, read_only, "is read-only"),
    ] {
        let new = replacement(&new, size, facts);
        let never = || panic!("it was recorded");
        let error = setup
            .disk
            .replace(&setup.threads, new, Ok, never)
            .unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    assert_eq!(device.queues[0].write(0, &[7; 512]), OK);
    assert_eq!(setup.lying.content(512), [7; 512]);
}

/// A larger file, or the same one grown: every queue can go there at once, and none before.
#[test]
fn growth_reaches_all_queues() {
    let Some(setup) = setup(3) else { return };
    let mut device = connect(&setup.served);
    let end = DISK_BYTES / 512;
    for queue in &mut device.queues {
        assert_eq!(queue.read(end, 512), Err(IO_ERROR));
    }
    setup.lying.set_len(2 * DISK_BYTES);
    setup.disk.grow(2 * DISK_BYTES);
    for queue in &mut device.queues {
        let at = end + u64::from(queue.index);
        assert_eq!(queue.write(at, &[7; 512]), OK);
        assert_eq!(queue.read(at, 512).unwrap(), [7; 512]);
    }
    assert_eq!(device.config().unwrap().capacity, 2 * end);

    let new = Lying::raw(3 * DISK_BYTES);
    let larger = replacement(&new, 3 * DISK_BYTES, FACTS);
    setup
        .disk
        .replace(&setup.threads, larger, Ok, || Ok(()))
        .unwrap();
    assert_eq!(device.config().unwrap().capacity, 3 * end);
    for queue in &mut device.queues {
        assert_eq!(queue.write(3 * end - 1, &[9; 512]), OK);
        assert_eq!(queue.read(3 * end, 512), Err(IO_ERROR));
    }
}
