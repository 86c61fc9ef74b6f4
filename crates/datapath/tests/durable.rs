//! What is durable when: a guest with several queues on several threads, and an engine that remembers what a power cut
//! would leave. Each cache mode asks the storage for just what it promises.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{FACTS, Served};
use block::{Aio, Backing, CacheMode, DetectZeroes, Discard, DiskFacts};
use datapath::{Disk, IoThread, Options, Polling};
use image::Image;
use testkit::driver::{Device, DeviceConfig, DiskConfig, HANG, Op};
use testkit::faulty::{Faults, Faulty, MemoryDisk};
use testkit::random::Random;

const DISK_BYTES: u64 = 4 << 20;
const SECTORS: u64 = DISK_BYTES / 512;
/// Sectors of a request.
const LEN: u64 = 8;
const SLOTS: u16 = 16;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

const NO_FAULTS: Faults = Faults {
    room: 64,
    ..Faults::NONE
};

/// Late and in any order, so that many flushes wait for each other.
const SLOW: Faults = Faults {
    short: 50,
    again: 20,
    late: 30,
    ..NO_FAULTS
};

struct Storage {
    bytes: Arc<Mutex<MemoryDisk>>,
    disk: Arc<Disk>,
    served: Served,
}

fn serve(cache: CacheMode, faults: Faults, threads: u64, queues: u16) -> Storage {
    let options = Options {
        cache,
        ..Options::default()
    };
    serve_with(options, faults, threads, queues, FACTS)
}

fn serve_with(
    options: Options,
    faults: Faults,
    threads: u64,
    queues: u16,
    facts: DiskFacts,
) -> Storage {
    let bytes = MemoryDisk::new(DISK_BYTES as usize);
    let seed = seed();
    let thread = |i| {
        let bytes = bytes.clone();
        let make = move || Faulty::new(bytes, faults, seed + i);
        IoThread::spawn(
            format!("io-{i}"),
            Polling::up_to(Duration::from_micros(50)),
            make,
        )
        .unwrap()
    };
    let file = Arc::new(tempfile::tempfile().unwrap().into());
    let disk = Arc::new(Disk::new(
        "durable".into(),
        Image::raw(),
        Some((file, Backing::File, Aio::Auto)),
        facts,
        DISK_BYTES,
        "",
        options,
    ));
    let threads = Arc::new((0..threads).map(thread).collect());
    let served = Served::new(disk.clone(), threads, queues, 256);
    Storage {
        bytes,
        disk,
        served,
    }
}

impl Storage {
    fn connect(&self, queues: u16) -> Device {
        let config = DeviceConfig {
            queues,
            slots: SLOTS,
            buffer_len: (LEN * 512) as u32,
            ..DeviceConfig::default()
        };
        Device::connect(self.served.socket(), &config).unwrap()
    }

    /// Flushes and stable writes that reached the storage.
    fn asked(&self) -> (u64, u64) {
        let bytes = self.bytes.lock().unwrap();
        (bytes.flushes[0], bytes.stable_writes)
    }
}

fn seed() -> u64 {
    let given = std::env::var("RINGDISK_TEST_SEED").ok();
    let seed = given.map_or_else(|| u64::from(std::process::id()), |s| s.parse().unwrap());
    println!("seed {seed}: repeat with RINGDISK_TEST_SEED={seed}");
    seed
}

/// What is under way in a slot of a queue.
#[derive(Clone)]
enum Doing {
    /// A change of the sectors from here on.
    Change(u64),
    /// A flush, with the sectors that it must make stable, and how many had failed when it was sent.
    Flush(Vec<u64>, u64),
}

/// Sends writes, zeroes and flushes on all queues; whatever is acknowledged as durable must survive a power cut at that
/// moment. Gives how many flushes the guest sent.
fn storm(storage: &Storage, device: &mut Device, random: &mut Random, requests: u64) -> u64 {
    let write_cache = storage.disk.write_cache();
    let queues = device.queues.len();
    let mut doing: Vec<Vec<Option<Doing>>> = vec![vec![None; usize::from(SLOTS)]; queues];
    // Ranges that are being changed, and those of which a change has completed and nothing was sent since.
    let mut busy = vec![false; (SECTORS / LEN) as usize];
    let mut completed = vec![false; busy.len()];
    let (mut sent, mut done, mut flushes, mut failed) = (0, 0, 0, 0);
    while done < requests {
        for (q, queue) in device.queues.iter_mut().enumerate() {
            for slot in 0..SLOTS {
                let place = &mut doing[q][usize::from(slot)];
                if place.is_some() || sent == requests || random.below(3) == 0 {
                    continue;
                }
                let (op, at) = match random.below(8) {
                    0..3 => {
                        let bytes = storage.bytes.lock().unwrap();
                        let ranges = 0..SECTORS / LEN;
                        let covered = ranges.filter(|&r| completed[r as usize]);
                        *place = Some(Doing::Flush(covered.collect(), bytes.flushes[1]));
                        flushes += 1;
                        (Op::Flush, 0)
                    }
                    kind => {
                        let range = random.below(SECTORS / LEN);
                        if std::mem::replace(&mut busy[range as usize], true) {
                            continue;
                        }
                        completed[range as usize] = false;
                        *place = Some(Doing::Change(range));
                        match kind {
                            3 => (Op::WriteZeroes { unmap: false }, range * LEN),
                            _ => (Op::Write, range * LEN),
                        }
                    }
                };
                // A flush that is under way need not cover what is sent now.
                let change = match &doing[q][usize::from(slot)] {
                    Some(Doing::Change(range)) => Some(*range),
                    _ => None,
                };
                for other in doing.iter_mut().flatten().flatten() {
                    if let Doing::Flush(covered, _) = other {
                        covered.retain(|&r| Some(r) != change);
                    }
                }
                queue.prepare(slot, op, at, (LEN * 512) as u32);
                queue.submit(&[slot]);
                sent += 1;
            }
        }
        let mut idle = true;
        for (q, queue) in device.queues.iter_mut().enumerate() {
            queue.poll(|slot, status| {
                idle = false;
                done += 1;
                let bytes = storage.bytes.lock().unwrap();
                let stable = |range: u64| bytes.is_stable(range * LEN * 512, LEN * 512);
                match doing[q][usize::from(slot)].take().unwrap() {
                    Doing::Change(range) => {
                        busy[range as usize] = false;
                        completed[range as usize] = status == OK;
                        assert!(write_cache || status != OK || stable(range), "{range}");
                    }
                    Doing::Flush(covered, before) if status == OK => {
                        let lost = covered.into_iter().find(|&range| !stable(range));
                        assert_eq!(
                            lost, None,
                            "acknowledged as durable; {before} failed before"
                        );
                    }
                    Doing::Flush(_, before) => {
                        failed += 1;
                        assert!(
                            bytes.flushes[1] > before || bytes.forgets,
                            "a failure without cause"
                        );
                    }
                }
            });
        }
        let first = &mut device.queues[0];
        if idle && doing[0].iter().any(Option::is_some) {
            assert!(
                first.ring.wait_timeout(HANG),
                "a hang: {done} of {sent} are done"
            );
        }
    }
    println!("{flushes} flushes, {failed} of them failed");
    flushes
}

/// Flushes that arrive while one is under way share the next one, from all queues of all threads.
#[test]
fn overlapping_flushes_share_one() {
    for (threads, queues) in [(1, 1), (1, 4), (2, 4), (4, 4)] {
        let storage = serve(CacheMode::None, SLOW, threads, queues);
        let mut device = storage.connect(queues);
        let sent = storm(&storage, &mut device, &mut Random(seed()), 4000);
        let (flushes, stable) = storage.asked();
        println!("{threads} threads: {sent} flushes in {flushes}");
        assert!(flushes < sent && flushes > 0 && stable == 0);
    }
}

/// Without O_DIRECT, a flush that fails takes all that came later with it.
#[test]
fn writes_lost_by_the_page_cache_are_never_acknowledged() {
    let faults = Faults { fail: 3, ..SLOW };
    for (threads, wce) in [(1, 1), (3, 1), (3, 0)] {
        let storage = serve(CacheMode::Writeback, faults, threads, 3);
        storage.bytes.lock().unwrap().forgets = true;
        let mut device = storage.connect(3);
        let frontend = &mut device.frontend;
        frontend.set_config(DiskConfig::WCE_AT, &[wce]).unwrap();
        let mut random = Random(seed());
        while storage.bytes.lock().unwrap().flushes[1] == 0 {
            storm(&storage, &mut device, &mut random, 500);
        }
        let before = storage.asked();
        for queue in &mut device.queues {
            assert_eq!(queue.run(Op::Flush, 0, 0), IO_ERROR);
            // The storage also fails three reads of a thousand.
            assert!((0..10).any(|_| queue.run(Op::Read, 0, 512) == OK));
        }
        assert_eq!(
            storage.asked(),
            before,
            "a flush that could say anything was asked for"
        );
        let error = storage.disk.sync().unwrap_err().to_string();
        assert!(error.contains("PAGECACHE_LOST"), "{error}");
    }
}

/// With O_DIRECT, the next flush tells the truth.
#[test]
fn a_failed_flush_with_o_direct_fails_only_its_requests() {
    let faults = Faults { fail: 20, ..SLOW };
    let storage = serve(CacheMode::None, faults, 2, 4);
    let mut device = storage.connect(4);
    let mut random = Random(seed());
    while storage.bytes.lock().unwrap().flushes[1] < 3 {
        storm(&storage, &mut device, &mut random, 500);
    }
    let (mut left, queue) = (100, &mut device.queues[0]);
    while queue.run(Op::Flush, 0, 0) != OK {
        left -= 1;
        assert!(left > 0, "no flush succeeds any more");
    }
}

/// What a request asks of the storage: flushes and stable writes.
type Asks = (u64, u64);

/// The table of docs/durability.md.
#[test]
fn each_cache_mode_submits_the_flushes_it_promises() {
    const NOTHING: Asks = (0, 0);
    const FLUSH: Asks = (1, 0);
    const STABLE: Asks = (0, 1);
    use CacheMode::{Directsync, None, Unsafe, Writeback, Writethrough};
    let zeroes = Op::WriteZeroes { unmap: true };
    // Write, discard, write-zeroes, flush: with the cache on, and off.
    for (cache, on, off) in [
        (
            None,
            [NOTHING, NOTHING, NOTHING, FLUSH],
            [STABLE, FLUSH, FLUSH, FLUSH],
        ),
        (Writeback, [NOTHING, NOTHING, NOTHING, FLUSH], [FLUSH; 4]),
        (Writethrough, [NOTHING, NOTHING, NOTHING, FLUSH], [FLUSH; 4]),
        (
            Directsync,
            [NOTHING, NOTHING, NOTHING, FLUSH],
            [STABLE, FLUSH, FLUSH, FLUSH],
        ),
        (Unsafe, [NOTHING; 4], [NOTHING; 4]),
    ] {
        let storage = serve(cache, NO_FAULTS, 1, 1);
        let mut device = storage.connect(1);
        for (wce, asks) in [(1, on), (0, off)] {
            let frontend = &mut device.frontend;
            frontend.set_config(DiskConfig::WCE_AT, &[wce]).unwrap();
            for (op, ask) in [Op::Write, Op::Discard, zeroes, Op::Flush]
                .into_iter()
                .zip(asks)
            {
                let before = storage.asked();
                assert_eq!(device.queues[0].run(op, 0, 4096), OK);
                let after = storage.asked();
                let asked = (after.0 - before.0, after.1 - before.1);
                assert_eq!(asked, ask, "cache={cache}, writeback={wce}, {op:?}");
            }
        }
    }
    let facts = DiskFacts {
        read_only: true,
        ..FACTS
    };
    let storage = serve_with(Options::default(), NO_FAULTS, 1, 1, facts);
    let mut device = storage.connect(1);
    assert_eq!(device.queues[0].run(Op::Flush, 0, 0), OK);
    assert_eq!(
        storage.asked(),
        NOTHING,
        "there is nothing to be made durable"
    );
}

/// Without a write cache, writes that end while a flush is under way share the next one.
#[test]
fn writes_through_the_page_cache_share_flushes() {
    let storage = serve(CacheMode::Writethrough, SLOW, 1, 1);
    let mut device = storage.connect(1);
    let queue = &mut device.queues[0];
    let slots: Vec<u16> = (0..SLOTS).collect();
    for round in 0..50 {
        for &slot in &slots {
            let at = (round * 16 + u64::from(slot)) * LEN % SECTORS;
            queue.prepare(slot, Op::Write, at, (LEN * 512) as u32);
        }
        queue.submit(&slots);
        let done = queue.finish(slots.len());
        assert!(done.iter().all(|d| d.1 == OK));
        assert!(storage.bytes.lock().unwrap().is_stable(0, DISK_BYTES));
    }
    let (flushes, stable) = storage.asked();
    println!("800 writes in {flushes} flushes");
    assert!(flushes < 600 && stable == 0);
}

/// Writes of zeroes become write-zeroes where the operator wants that, with what he wants of their space, and are plain
/// writes where the backing cannot.
#[test]
fn writes_of_zeroes_are_detected() {
    use DetectZeroes::{Off, On, Unmap};
    // What is found of two writes, and how often space is given back for it.
    for (detect_zeroes, discard, granularity, zeroed) in [
        (Off, Discard::Unmap, 4096, [0, 0]),
        (On, Discard::Unmap, 4096, [2, 0]),
        (Unmap, Discard::Unmap, 4096, [2, 2]),
        (Unmap, Discard::Ignore, 4096, [2, 0]),
        (Unmap, Discard::Unmap, 0, [0, 0]),
    ] {
        let options = Options {
            detect_zeroes,
            discard,
            ..Options::default()
        };
        let facts = DiskFacts {
            discard_granularity: granularity,
            ..FACTS
        };
        let storage = serve_with(options, NO_FAULTS, 1, 1, facts);
        let queue = &mut storage.connect(1).queues[0];
        let mut data = vec![7; 4096];
        assert_eq!(queue.write(0, &data), OK);
        assert_eq!(queue.write(0, &[0; 512]), OK);
        assert_eq!(queue.write(1, &[0; 4096 - 512]), OK);
        assert_eq!(queue.read(0, 4096).unwrap(), [0; 4096]);
        assert_eq!(storage.bytes.lock().unwrap().zeroed, zeroed, "{options:?}");
        // One byte is enough, wherever it is.
        for at in [0, 63, 64, 1000, 4095] {
            data.fill(0);
            data[at] = 1;
            assert_eq!(queue.write(8, &data), OK);
            assert_eq!(queue.read(8, 4096).unwrap(), data, "{at}");
        }
        assert_eq!(storage.bytes.lock().unwrap().zeroed, zeroed, "{options:?}");
    }
}

/// A backing that turns out not to zero ranges gets the plain write, and is not asked again.
#[test]
fn detected_zeroes_are_written_without_write_zeroes() {
    let options = Options {
        detect_zeroes: DetectZeroes::On,
        ..Options::default()
    };
    let storage = serve_with(options, NO_FAULTS, 1, 1, FACTS);
    storage.bytes.lock().unwrap().cannot_zero = true;
    let queue = &mut storage.connect(1).queues[0];
    for at in 0..3 {
        assert_eq!(queue.write(at * 8, &[7; 4096]), OK);
        assert_eq!(queue.write(at * 8, &[0; 4096]), OK);
        assert_eq!(queue.read(at * 8, 4096).unwrap(), [0; 4096]);
    }
    assert_eq!(storage.bytes.lock().unwrap().zeroed, [1, 0]);
    // The guest's own are its own business.
    let zeroes = Op::WriteZeroes { unmap: false };
    assert_eq!(queue.run(zeroes, 0, 4096), UNSUPPORTED);
}
